"""Train or idle: the controller trains while it pays, stops when it does not, and notices when it pays again.

The worlds are those of `benchmarks/idle.py`, with fewer runs; its tables are in docs/lab/worth.md.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from benchmarks.idle import (
    BEGINNING,
    HURTS,
    MOVING,
    OTHERS,
    UNPAYABLE,
    World,
    at_the_end_of_gains,
    grid,
    live,
    share_trained,
    trains_on,
    waking,
)
from service.monitor.controller import Action, Controller, Cusum, Economy

ECONOMY = Economy(worker_cost=0.1, drafting_share=0.7, versions_served=5.0)


def named(worlds: list[World]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("world", worlds, ids=lambda world: world.name)


def taught(gain: float, *, error: float = 0.004, trainings: int = 6, train_seconds: float = 1.0) -> Controller:
    """A controller that measured `gain` so often."""
    controller = Controller()
    for _ in range(trainings):
        controller.decide(ECONOMY, 3.0, version_seconds=3.0)
        controller.learn(gain=gain, error=error, promoted=False, train_seconds=train_seconds)
    return controller


# --- the bars
@named([*grid(), *OTHERS, *HURTS])
def test_with_nothing_to_gain_at_most_one_claim_in_twenty_is_trained_on(world: World) -> None:
    assert share_trained(world, 3) <= 0.05


@named([*grid(), *OTHERS])
def test_a_fall_of_five_percent_wakes_it_within_twenty_claims(world: World) -> None:
    assert waking(world, 9).trains <= 20


@named([world for world in [*grid(), *OTHERS] if world.gain_se < 0.01])
def test_and_is_won_back(world: World) -> None:
    assert waking(world, 7).missed == 0


@named(HURTS)
def test_where_training_hurts_it_never_trains_on(world: World) -> None:
    assert not [seed for seed in range(20) if trains_on(world, seed)]


@named(grid()[3:6])
def test_a_fall_in_the_very_claim_in_which_gains_end_is_not_taken_for_the_level(world: World) -> None:
    assert at_the_end_of_gains(world, 9).trains <= 20


def test_training_that_can_never_pay_is_not_even_tried() -> None:
    assert share_trained(UNPAYABLE[0], 3) == 0


@named(MOVING[:2])
def test_it_trains_without_pause_while_trainings_gain(world: World) -> None:
    assert all(live(world, seed).trained.all() for seed in range(3))


def test_a_slow_loss_is_won_back_again_and_again() -> None:
    found = live(MOVING[2], 0)
    assert found.deficit[BEGINNING:].mean() < 0.05, "never looking would be at 100 % by the end"
    assert 0.05 < found.trained[BEGINNING:].mean() < 0.6


# --- one decision at a time
def test_while_the_learning_rate_rises_no_gain_is_too_small() -> None:
    controller = Controller()
    for _ in range(8):
        decision = controller.decide(ECONOMY, 3.0, warming_up=True)
        assert decision.action is Action.TRAIN
        controller.learn(gain=0.0, error=0.004, promoted=False, train_seconds=1.0)
    assert "still rising" in decision.reason
    assert controller.decide(ECONOMY, 3.0).action is Action.IDLE


def test_the_first_trainings_are_free() -> None:
    controller = Controller()
    for _ in range(4):
        assert controller.decide(ECONOMY, 3.0).action is Action.TRAIN
        controller.learn(gain=-0.1, error=0.001, promoted=False, train_seconds=1.0)
    assert controller.decide(ECONOMY, 3.0).action is Action.IDLE


def test_no_served_drafter_always_trains() -> None:
    assert taught(-0.1).decide(ECONOMY, None).action is Action.TRAIN


def test_a_gain_that_cannot_be_measured_is_unknown_and_not_zero() -> None:
    controller = taught(0.05)
    expected = controller.gain
    for _ in range(20):
        assert controller.decide(ECONOMY, 3.0).action is Action.TRAIN
        controller.learn(gain=math.nan, error=None, promoted=False, train_seconds=1.0)
    assert controller.gain == expected


def test_a_sure_measurement_counts_more_than_an_unsure_one() -> None:
    sure, unsure = taught(0.05), taught(0.05)
    for controller, error in ((sure, 0.002), (unsure, 0.03)):
        controller.learn(gain=0.0, error=error, promoted=False, train_seconds=1.0)
    assert sure.gain < 0.02 < 0.045 < unsure.gain


def test_it_idles_when_the_gain_is_real_but_costs_more_than_it_saves() -> None:
    dear = taught(0.01, train_seconds=1000.0)
    assert dear.decide(ECONOMY, 3.0).action is Action.IDLE
    assert taught(0.01, train_seconds=0.01).decide(ECONOMY, 3.0).action is Action.TRAIN


def test_one_look_that_finds_a_gain_resumes_training() -> None:
    controller = taught(0.0)
    actions = [controller.decide(ECONOMY, 3.0).action for _ in range(10)]
    assert set(actions) == {Action.IDLE, Action.PROBE}
    controller.learn(gain=0.08, error=0.01, promoted=False, train_seconds=1.0)
    assert controller.decide(ECONOMY, 3.0).action is Action.TRAIN
    assert not controller.idle


def test_a_fall_of_served_alpha_is_looked_at_and_the_reason_says_so() -> None:
    controller = taught(0.0, trainings=8)
    assert controller.decide(ECONOMY, 3.0).action is Action.IDLE
    decisions = [controller.decide(ECONOMY, 2.7) for _ in range(2)]
    assert decisions[-1].action is Action.PROBE
    assert "fell beyond chance" in decisions[-1].reason


def test_probes_are_paid_from_a_credit_that_no_noise_can_overdraw() -> None:
    """α that halves and doubles from claim to claim: one look in 28 claims, and two more."""
    controller, probes = taught(0.0), 0
    for t in range(280):
        if controller.decide(ECONOMY, (2.0, 4.0, 1.2)[t % 3]).action is not Action.IDLE:
            probes += 1
            controller.learn(gain=0.0, error=0.004, promoted=False, train_seconds=1.0)
    assert probes <= 12


def idle(**values: object) -> Controller:
    """An idle controller in the middle of a run, which is sure that nothing is to be gained."""
    state = {"trainings": 9, "gain": 0.0, "variance": 1e-6, "probes": 1.5, "idle": True} | values
    return Controller.from_json(
        {**Controller().to_json(), **state, "level": {"claims": 64.0, "mean": math.log(3.0), "variance": 1e-4}}
    )


def test_a_probe_after_a_fall_doubts_the_gain_by_the_size_of_the_fall_and_begins_a_new_level() -> None:
    controller = idle(probes=1.5)
    controller.level.evidence = 5.5  # a claim 40 % lower, at most four deviations of one, raises the alarm
    decision = controller.decide(ECONOMY, 1.8)
    assert decision.action is Action.PROBE
    assert decision.reason == "served α fell beyond chance, last by 40.0%; testing whether training pays again"
    fall = math.log(3.0 / 1.8)
    assert controller.variance == pytest.approx(1e-6 + 0.003**2 + fall**2)
    assert controller.probes == pytest.approx(1.5 + 1 / 28 - 1)
    assert (controller.level.claims, controller.level.evidence) == (6.0, 0.0)


def test_a_small_fall_is_a_reason_to_expect_three_percent() -> None:
    controller = idle()
    controller.level.evidence = 5.5
    assert controller.decide(ECONOMY, 2.95).action is Action.PROBE
    assert controller.variance == pytest.approx(1e-6 + 0.003**2 + 0.03**2)


@pytest.mark.parametrize(
    ("due", "economy"),
    [
        ({"probes": 2.0}, ECONOMY),
        ({"gain": 0.02}, ECONOMY),
        ({"probes": 2.0}, replace(ECONOMY, drafting_share=0.0, may_pay=True)),
    ],
    ids=["credit", "promise", "engines draft nothing"],
)
def test_a_probe_for_another_reason_answers_the_fall_that_was_nearly_shown(
    due: dict[str, float], economy: Economy
) -> None:
    """Else the next claim would be trained on too, although this probe has just shown that it hurts."""
    controller = idle(variance=0.02**2, **due)
    controller.level.evidence = 5.0
    assert controller.decide(economy, 2.97).action is Action.PROBE
    controller.learn(gain=-0.1, error=0.004, promoted=False, train_seconds=1.0)
    controller.probes = 1.5
    assert controller.decide(ECONOMY, 2.0).action is Action.IDLE  # one claim counts for four deviations at most
    assert controller.decide(ECONOMY, 2.0).action is Action.PROBE


@pytest.mark.parametrize(("probes", "action"), [(0.95, Action.IDLE), (1.0 - 1 / 28, Action.PROBE), (1.2, Action.PROBE)])
def test_a_probe_takes_a_whole_credit(probes: float, action: Action) -> None:
    controller = idle(probes=probes)
    controller.level.evidence = 9.0
    assert controller.decide(ECONOMY, 3.0).action is action


def test_a_full_credit_and_a_promising_look_are_reasons_of_their_own() -> None:
    """A gain that pays, though not by a standard error, is tested again."""
    full, promising, neither = idle(probes=2.0), idle(gain=0.02, variance=0.03**2), idle()
    for controller in (full, promising, neither):
        controller.variance = max(controller.variance, 0.005**2)  # two of these above the price of 0.5 %
    assert full.decide(ECONOMY, 3.0).reason == "none was due for a while; testing whether training pays again"
    assert promising.decide(ECONOMY, 3.0).reason == "the last probe promised +2.0%; testing again"
    assert neither.decide(ECONOMY, 3.0).action is Action.IDLE


@pytest.mark.parametrize(("sd", "action"), [(0.0020, Action.IDLE), (0.0045, Action.PROBE)])
def test_no_look_where_two_standard_errors_do_not_reach_the_price(sd: float, action: Action) -> None:
    """The price is 1 %, the gain 0.2 %; the claim adds (0.3 %)² to the variance."""
    controller = idle(probes=2.0, gain=0.002, variance=sd**2)
    economy = replace(ECONOMY, min_gain=0.01)
    assert controller.decide(economy, 3.0).action is action


def test_the_first_seconds_are_taken_as_they_are_and_later_ones_smoothed() -> None:
    controller = Controller()
    for train, version in ((10.0, None), (20.0, 4.0), (20.0, 8.0)):
        controller.decide(ECONOMY, 3.0, version_seconds=version)
        controller.learn(gain=0.0, error=None, promoted=False, train_seconds=train)
    assert controller.train_seconds == pytest.approx(10 + 0.4 * 10 + 0.4 * 6)
    assert controller.version_seconds == pytest.approx(4 + 0.4 * 4)
    assert (controller.trainings, controller.gain, controller.variance) == (3, 0.05, 0.05**2)


def test_one_absurd_time_does_not_price_training_out_of_reach() -> None:
    """A machine that slept for an hour, among trainings of 20 s that pay."""
    controller = Controller()
    for seconds in (20.0, 20.0, 3600.0):
        controller.learn(gain=0.1, error=0.01, promoted=True, train_seconds=seconds)
    assert controller.train_seconds == pytest.approx(20 + 0.4 * 60)
    for _ in range(9):  # a lasting change is followed, if not at once
        controller.learn(gain=0.1, error=0.01, promoted=True, train_seconds=3600.0)
    assert controller.train_seconds > 3000


@pytest.mark.parametrize(("gain", "action"), [(0.015, Action.TRAIN), (-0.02, Action.IDLE)])
def test_an_idle_worker_whose_candidate_later_looks_publish_goes_on_while_that_pays(
    gain: float, action: Action
) -> None:
    """Its credit for probes is spent, and what is expected is not sure enough to wake it by itself."""
    controller = idle(gain=gain, variance=0.02**2, probes=0.1)
    assert controller.decide(ECONOMY, 3.0).action is Action.IDLE
    controller.published()
    assert controller.decide(ECONOMY, 3.0).action is action


def test_the_time_between_versions_is_followed_while_nothing_is_trained() -> None:
    controller = idle()
    controller.version_seconds = 60.0
    for _ in range(20):
        controller.decide(ECONOMY, 3.0, version_seconds=600.0)
    assert controller.version_seconds == pytest.approx(600.0, rel=0.01)


def test_a_measured_gain_is_weighed_by_its_error() -> None:
    controller = Controller()
    controller.learn(gain=0.01, error=0.05, promoted=False, train_seconds=1.0)
    assert controller.gain == pytest.approx(0.03)  # as sure as what was expected before
    assert controller.variance == pytest.approx(0.05**2 / 2)


@pytest.mark.parametrize(
    ("train_seconds", "version_seconds", "expected"),
    [(20.0, None, 0.005), (20.0, 0.0, 0.005), (0.0, 60.0, 0.005), (1e9, 1.0, math.inf)],
)
def test_break_even_at_its_edges(train_seconds: float, version_seconds: float | None, expected: float) -> None:
    assert ECONOMY.break_even(train_seconds, version_seconds) == expected


def test_break_even_is_where_what_the_rounds_save_is_the_cost() -> None:
    """Generation time goes as 1/α, so a gain g leaves 1/(1+g) of it."""
    gain, before = ECONOMY.break_even(200.0, 60.0), ECONOMY.assumed_share * 60.0
    saved = ECONOMY.versions_served * (before - before / (1 + gain))
    assert saved == pytest.approx(ECONOMY.worker_cost * 200.0)
    assert replace(ECONOMY, worker_cost=0.0).break_even(200.0, 60.0) == ECONOMY.min_gain
    even = Economy(worker_cost=0.5, drafting_share=0.5, versions_served=4.0)
    assert even.break_even(4.0, 1.0) == math.inf, "as much as rounds without end would save"


def test_the_price_is_of_the_time_that_goes_to_rounds() -> None:
    """Engines that mostly run large batches without drafts have little to save, and those that never draft nothing."""
    price = {
        share: replace(ECONOMY, drafting_share=share).break_even(200.0, 60.0) for share in (1.0, 0.9, 0.45, 0.1, 0.0)
    }
    saved = {share: gain / (1 + gain) * share for share, gain in price.items() if share}
    assert saved == pytest.approx(dict.fromkeys(saved, 20.0 / (5 * 60)), rel=1e-9)
    assert price[0.0] == replace(ECONOMY, drafting_share=0.0).break_even(200.0, None) == math.inf
    assert replace(ECONOMY, drafting_share=None).break_even(200.0, 60.0) == ECONOMY.break_even(200.0, 60.0)


@pytest.mark.parametrize(("share", "trains"), [(0.9, True), (0.02, False), (0.0, False)])
def test_a_gain_is_trained_for_only_where_engines_draft(share: float, trains: bool) -> None:
    economy, controller = replace(ECONOMY, drafting_share=share), Controller()
    actions = []
    for _ in range(40):
        decision = controller.decide(economy, 3.0, version_seconds=60.0)
        actions.append(decision.action)
        if decision.action is not Action.IDLE:
            controller.learn(gain=0.04, error=0.01, promoted=True, train_seconds=20.0)
    assert (actions[-10:] == [Action.TRAIN] * 10) is trains
    assert trains or actions[4:] == [Action.IDLE] * 36, "the first four are done to learn what they gain"
    assert f"{share:.0%} of their time" in decision.reason
    assert decision.undrafted is (share == 0.0), "no price would help"


def test_where_a_poor_drafter_is_why_engines_draft_nothing_it_is_trained_now_and_then() -> None:
    """By `worth` a poor drafter's plan has no drafts. It must not stay poor for that."""
    economy, controller = replace(ECONOMY, drafting_share=0.0, may_pay=True), Controller()
    actions = []
    for _ in range(2000):
        actions.append(controller.decide(economy, 1.05, version_seconds=60.0).action)
        if actions[-1] is not Action.IDLE:
            controller.learn(gain=0.1, error=0.01, promoted=True, train_seconds=20.0)
    assert actions[4:].count(Action.PROBE) == 72, "one claim in 28"
    assert Action.TRAIN not in actions[4:]


# --- the level of α
@pytest.mark.parametrize("claims", [1, 2, 5, 6])
def test_the_level_of_the_first_claims_is_their_mean_and_variance(claims: int) -> None:
    alphas = np.random.default_rng(claims).uniform(2.0, 4.0, claims)
    level = Cusum()
    for alpha in alphas.tolist():
        level.feed(alpha, 64)
    assert level.claims == claims
    assert level.mean == pytest.approx(np.log(alphas).mean(), rel=1e-12)
    assert level.variance == pytest.approx(np.log(alphas).var(), rel=1e-12)
    assert level.evidence == 0.0, "six claims are no level yet"


@pytest.mark.parametrize("memory", [5, 64])
def test_a_claim_moves_a_level_that_is_long_known_by_one_part_in_its_memory(memory: int) -> None:
    level = Cusum()
    for _ in range(100):
        level.feed(3.0, memory)
    level.feed(3.0 * math.exp(0.01), memory)
    assert level.mean - math.log(3.0) == pytest.approx(0.01 / memory)
    assert level.claims == memory


def test_evidence_is_the_sum_of_shortfalls_in_standard_deviations_less_half_of_one_each() -> None:
    """From the seventh claim on; a claim deviates by its own variance, the level's error, and 0.5 %."""
    alphas = [3.0, 3.1, 2.9, 3.05, 2.95, 3.02]
    mean, variance = np.log(alphas).mean(), np.log(alphas).var()
    deviation = math.sqrt(variance * (1 + 1 / 7) + 0.005**2)
    for scores, wanted in (([1.5], 1.0), ([-3.0], 0.0), ([100.0], 3.5)):
        level = Cusum()
        for alpha in alphas:
            level.feed(alpha, 64)
        for score in scores:
            level.feed(math.exp(mean - score * deviation), 64)
        assert level.evidence == pytest.approx(wanted)
        assert level.shortfall == pytest.approx(scores[-1] * deviation)
        assert level.mean == pytest.approx(mean - min(max(scores[0], -4.0), 4.0) * deviation / 7), "an outlier counts 4"
    steady = Cusum()
    for _ in range(7):
        steady.feed(3.0, 64)
    steady.feed(3.0 * math.exp(-0.0075), 64)
    assert steady.evidence == pytest.approx(1.0), "where nothing varied, 0.5 % is a standard deviation"


@pytest.mark.parametrize(("asleep", "memory"), [(False, 5), (True, 64)])
def test_the_level_moves_with_publishes_and_is_held_while_idle(asleep: bool, memory: int) -> None:
    controller = idle(idle=asleep, probes=0.0, gain=0.0 if asleep else 0.1)
    controller.decide(ECONOMY, 3.0 * math.exp(0.01))
    assert controller.idle is asleep
    assert controller.level.mean - math.log(3.0) == pytest.approx(0.01 / memory)


# --- what is said
def test_the_reason_states_what_is_expected_what_it_costs_and_what_engines_draft() -> None:
    controller = idle(gain=0.02, variance=0.01**2 - 0.003**2, probes=0.0, train_seconds=60.0, version_seconds=20.0)
    price = 0.1 * 60 / (5 * 0.7 * 20 - 0.1 * 60)
    said = f"a training is expected to gain +2.0% ± 1.0%; it pays from {price:.1%}"
    engines = ", as engines spend 70% of their time in rounds with drafts"
    for economy, text in (
        (replace(ECONOMY, drafting_share=None), said),
        (ECONOMY, said + engines),
        (replace(ECONOMY, worker_cost=100.0), said.replace(f"pays from {price:.1%}", "cannot pay") + engines),
    ):
        found = replace(controller).decide(economy, 3.0)
        assert (found.action, found.reason) == (Action.IDLE, text)
    fresh = Controller()
    assert fresh.decide(ECONOMY, None).reason == "no drafter is served yet"
    assert fresh.decide(ECONOMY, 3.0).reason == "0 of the first 4 trainings done; gains are not known yet"
    cut = idle(probing=True)
    assert cut.decide(ECONOMY, 3.0, unfinished=True).reason == "the last probe goes on with newer rollouts"


def test_who_trains_goes_on_until_it_does_not_pay_and_who_idles_begins_only_by_a_standard_error() -> None:
    known: dict[str, Any] = {"gain": 0.02, "variance": 0.03**2, "probes": 0.0}
    assert idle(idle=False, **known).decide(ECONOMY, 3.0).action is Action.TRAIN
    assert idle(idle=True, **known).decide(ECONOMY, 3.0).action is Action.IDLE


def test_what_is_not_measured_for_long_is_as_unsure_as_in_the_beginning_and_not_less_sure() -> None:
    controller = idle(probes=0.0)
    for _ in range(1000):
        controller.probes = 0.0
        controller.decide(ECONOMY, 3.0)
    assert controller.variance == 0.05**2


def test_a_probe_that_was_cut_goes_on_and_is_paid_for_once() -> None:
    controller = Controller(trainings=9, gain=0.0, variance=0.01, idle=True, probes=4.0)
    assert controller.decide(ECONOMY, 3.0).action is Action.PROBE
    left = controller.probes
    for part in range(1, 4):
        assert controller.decide(ECONOMY, 3.0, unfinished=True).action is Action.PROBE
        assert controller.probes == pytest.approx(left + part / 28), "nothing more is paid"
    assert controller.decide(ECONOMY, 3.0).action is Action.IDLE, "it was done"
    assert controller.decide(ECONOMY, 3.0, unfinished=True).action is Action.IDLE, "of an earlier training"


def test_a_training_that_was_cut_as_the_worker_became_idle_is_not_a_look() -> None:
    controller = Controller(trainings=9, gain=-0.1, variance=1e-6, probes=0.4)
    for _ in range(3):
        assert controller.decide(ECONOMY, 3.0, unfinished=True).action is Action.IDLE


# --- passing over, state
def test_a_claim_is_passed_over_while_newer_rollouts_wait_but_not_for_ever() -> None:
    controller = Controller()
    assert not controller.defers(newer_waits=False)
    for _ in range(2):
        assert [controller.defers(newer_waits=True) for _ in range(9)] == [True] * 8 + [False]
        controller.decide(ECONOMY, 3.0)


def test_that_a_claim_had_nothing_to_decide_about_does_not_begin_the_count_anew() -> None:
    """Say the newer rollouts that others were passed over for were dead."""
    controller = Controller()
    found = []
    for _ in range(9):
        found.append(controller.defers(newer_waits=True))
        assert not controller.defers(newer_waits=False)
    assert found == [True] * 8 + [False]


def test_an_idle_controller_passes_nothing_over() -> None:
    controller = taught(0.0)
    assert controller.decide(ECONOMY, 3.0).action is Action.IDLE
    assert not controller.defers(newer_waits=True)


def test_state_survives_json() -> None:
    controller = taught(0.0)
    controller.decide(ECONOMY, 2.0)
    restored = Controller.from_json(json.loads(json.dumps(controller.to_json())))
    assert restored == controller
    assert restored.decide(ECONOMY, 2.0) == controller.decide(ECONOMY, 2.0)
