"""The cause of a fall of α is named in simulated worlds, and what cannot be told apart is said together."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from benchmarks.alarms import TROUBLES, Bank, Trouble, config, make_bank, named, tick_values
from service.monitor.drift.cause import Cause, RecentTicks, Row, cause_of, engine_change
from service.monitor.drift.monitor import DriftMonitor
from service.monitor.drift.state import DriftState
from service.monitor.records import (
    AcceptanceRecord,
    Change,
    DrafterSums,
    Estimate,
    SamplingSettings,
    ScoreRecord,
    WorkerGauges,
    read,
)

SMALL = 0.0001  # variance: 1 %
NOTHING = Estimate(0.0, 0.0)


@pytest.fixture(scope="module")
def bank() -> Bank:
    return make_bank(300, 3)


@pytest.mark.parametrize(
    "what",
    [
        "policy moved",
        "aux layers swapped",
        "damaged drafter, 10 %",
        "harder prompts",
        "temperature 1.3",
        "temperature 1.3, later a flatter policy",
    ],
)
def test_each_cause_is_named_in_a_simulated_world(bank: Bank, what: str) -> None:
    trouble, wanted = TROUBLES[what]
    found = Counter(named(bank, trouble, seed) for seed in range(3))
    assert set(found) <= wanted, found


def test_nothing_is_named_where_nothing_happens(bank: Bank) -> None:
    assert named(bank, TROUBLES["nothing"][0], 1) is None


def fell(held: float = 0.0, drafter: float = 0.0, **more: Estimate | bool | None) -> Change:
    """A change whose parts are known to 1 %; strata are known, and the mix is as it was."""
    given = {"alarm": True, "prompts": Estimate(0.0, SMALL)} | more
    return Change(rollouts=640, held=Estimate(held, SMALL), drafter=Estimate(drafter, SMALL), **given)  # type: ignore[arg-type]


def test_what_engines_do_not_lose_are_the_features() -> None:
    live = Estimate(0.4, SMALL)  # live over replay rose, because replay alone fell
    why = cause_of(fell(held=-0.4), live)
    assert why.cause == "features or selection"
    assert why.terms["features"].value == pytest.approx(-0.4)
    assert why.terms["policy"].value == pytest.approx(0.0)
    assert why.terms["engine"].value == pytest.approx(0.0)
    assert cause_of(fell(held=-0.4), Estimate(0.0, SMALL)).cause == "policy moved"
    assert cause_of(fell(held=-0.4), Estimate(0.01, SMALL)).cause == "policy moved", "1 % is chance"
    both = cause_of(fell(held=-0.4), Estimate(0.1, SMALL))
    assert both.cause == "policy moved"
    assert both.terms["policy"].value == pytest.approx(-0.3)


def test_what_cannot_be_told_apart_is_named_together() -> None:
    assert cause_of(fell(held=-0.2)).cause == "features or policy"
    assert cause_of(fell(held=-0.2, prompts=None)).cause == "features, policy or prompts"
    assert cause_of(fell(held=-0.2, prompts=None), Estimate(0.0, SMALL)).cause == "policy moved, or prompts"


@pytest.mark.parametrize(("entropy", "how"), [(-0.5, "sharpened"), (0.5, "flattened"), (-0.1, "moved")])
def test_a_policy_that_became_surer_is_told_from_one_that_moved(entropy: float, how: str) -> None:
    change = fell(held=-0.2, entropy=Estimate(entropy, SMALL))
    assert cause_of(change, Estimate(0.0, SMALL)).cause == f"policy {how}"
    if how != "moved":
        assert cause_of(change).cause == f"policy {how}", "features leave the log-probabilities alone"
    unsure = replace(change, entropy=Estimate(entropy, 0.25))
    assert cause_of(unsure, Estimate(0.0, SMALL)).cause == "policy moved"


def test_prompts_and_engines_are_named_where_there_is_no_alarm_and_only_there() -> None:
    harder: dict[str, Any] = {"prompts": Estimate(-0.3, SMALL)}
    assert cause_of(fell(alarm=False, **harder)).cause == "prompts"
    assert cause_of(fell(alarm=False), Estimate(-0.3, SMALL)).cause == "engine"
    assert cause_of(fell(held=-0.1, **harder), Estimate(-0.3, SMALL)).cause == "policy moved"
    assert cause_of(fell(held=-0.1, alarm=False)).cause is None


def test_a_version_that_lost_beyond_chance_is_named_before_the_alarm() -> None:
    """Beyond three standard errors: each publish is one more chance of being wrong."""
    assert cause_of(fell(drafter=-0.035, alarm=False)).cause == "drafter"
    assert cause_of(fell(drafter=-0.025, alarm=False)).cause is None, "2.5 standard errors"
    assert cause_of(fell(drafter=-0.025)).cause == "drafter", "the alarm says that there is a fall"
    small = replace(fell(alarm=False), drafter=Estimate(-0.005, SMALL / 100))
    assert cause_of(small).cause is None, "five standard errors, but half a percent"


def test_the_largest_fall_is_named_and_chance_is_not() -> None:
    assert cause_of(fell(held=-0.1, drafter=-0.2)).cause == "drafter"
    assert cause_of(fell(held=-0.2, drafter=0.1), Estimate(0.0, SMALL)).cause == "policy moved"
    nothing = cause_of(fell(held=-0.015, drafter=0.1))
    assert (nothing.cause, nothing.fall) == (None, None)


def test_the_parts_add_up_to_the_change_and_a_version_accounts_for_what_it_was_measured_at() -> None:
    evidence = RecentTicks()
    for tick in range(10):
        evidence.add(Row(tick, 3.0, 3.0, 3.0, 0.0, 0.0))
    evidence.calm("fast", 9)
    evidence.shift, evidence.shift_variance = -0.5, 0.0001
    for tick in range(10, 20):
        evidence.add(Row(tick, 2.2, 2.9, 3.0, evidence.shift, evidence.shift_variance))
    change = change_of(evidence, "fast", uncertainty=0.01)
    assert change is not None
    assert change.prompts is not None
    assert change.rollouts == 640
    assert change.drafter.value == pytest.approx(math.log(2.2 / 2.7))
    assert change.held.value == pytest.approx(math.log(2.7 / 2.9))
    assert change.prompts.value == pytest.approx(math.log(2.9 / 3.0))
    assert change.prompts.value + change.held.value + change.drafter.value == pytest.approx(math.log(2.2 / 3.0))


def remembered(*rows: Row) -> RecentTicks:
    evidence = RecentTicks()
    for row in rows:
        evidence.add(row)
    return evidence


def change_of(
    evidence: RecentTicks, *alarms: str, sd: float = 0.1, uncertainty: float = 0.0, owed: Estimate = NOTHING
) -> Change | None:
    return evidence.change(alarms, sd=sd, uncertainty=uncertainty, owed=owed, several_strata=True, rollouts_per_tick=64)


def test_a_worse_version_is_blamed_though_the_statistic_rose_only_later() -> None:
    """The shift came at tick 0, the statistic was last 0 at tick 9: the baseline is the better version's."""
    evidence = RecentTicks()
    evidence.shift, evidence.shift_variance = -0.15, 0.0004
    for tick in range(20):
        evidence.add(Row(tick, 2.85, 3.0, 3.0, evidence.shift, evidence.shift_variance))
    evidence.calm("fast", 9)
    asked = change_of(evidence, "fast", owed=Estimate(-0.15, 0.0004))
    assert asked is not None
    assert asked.drafter.value == pytest.approx(math.log(2.85 / 3.0))
    assert asked.drafter.variance == pytest.approx(0.0004 / 3.0**2)
    assert asked.held.value == pytest.approx(0.0)
    assert cause_of(asked).cause == "drafter"
    made_up = change_of(evidence, "fast")
    assert made_up is not None
    assert made_up.drafter.value == 0.0


@pytest.mark.parametrize("loss", [0.05, 0.07])
def test_a_damaged_drafter_is_named_though_it_lost_little(bank: Bank, loss: float) -> None:
    found = Counter(named(bank, Trouble(version=1 - loss), seed) for seed in range(6))
    assert set(found) <= {"drafter", None}, found
    assert found["drafter"] >= 4


@pytest.mark.parametrize("loss", [0.03, 0.04])
def test_a_drafter_that_lost_too_little_for_an_early_alarm_is_named(bank: Bank, loss: float) -> None:
    found = Counter(named(bank, Trouble(version=1 - loss), seed) for seed in range(6))
    assert found["drafter"] >= 5, found


@pytest.mark.parametrize(("every", "error"), [(64, 0.007), (8, 0.03)])
def test_equal_versions_are_not_named_however_often_one_is_published(bank: Bank, every: int, error: float) -> None:
    rng = np.random.default_rng(every)
    monitor, level, asked, blamed = DriftMonitor(config()), 0.0, 0, 0
    for tick, value in enumerate(tick_values(bank, 1200, rng).tolist()):
        level += (value - level) / (tick + 1)
        if tick and tick % every == 0:
            measured = (error * level) ** 2 * float(rng.chisquare(7)) / 7
            monitor.rebase(float(rng.normal(0, error * level)), measured, decided=False)
        monitor.tick(value)
        change = monitor.change() if tick % 4 == 0 else None
        if change is not None:
            asked += 1
            blamed += cause_of(change).cause == "drafter"
    assert asked > 250
    assert blamed <= 0.01 * asked


def test_each_part_has_the_variance_of_a_mean_over_the_ticks() -> None:
    """A mean of n ticks of one sd, against a baseline that is unsure; a version's error; the spread of what varies."""
    expected = np.array([2.0, 1.8, 2.1])
    usual, now = np.array([0.5, 0.4, 0.6]), np.array([0.3, 0.35, 0.2])
    evidence = remembered(
        *(
            Row(t, 1.5, e, 2.2, 0.3, 0.01 + 0.02 * t, h, u)
            for t, (e, h, u) in enumerate(zip(expected, now, usual, strict=True))
        )
    )
    evidence.since["fast"] = -1, 0.2, 0.015
    change = change_of(evidence, "fast", sd=0.12, uncertainty=0.7)
    assert change is not None
    version = (0.05 - 0.015) / 1.4**2
    assert change.drafter.value == pytest.approx(math.log(1.5 / 1.4))
    assert change.drafter.variance == pytest.approx(version)
    noise = (0.12 / expected.mean()) ** 2 * (1 / 3 + 0.7)
    assert change.held.value == pytest.approx(math.log(1.4 / expected.mean()))
    assert change.held.variance == pytest.approx(noise + version)
    for found, values in ((change.prompts, np.log(expected / 2.2)), (change.entropy, np.log(now / usual))):
        assert found is not None
        assert found.value == pytest.approx(values.mean())
        assert found.variance == pytest.approx(values.var(ddof=1) / 3)


def test_entropy_is_of_the_ticks_that_know_it_and_of_two_at_least() -> None:
    known, unknown = [(0.25, 0.5), (0.5, 0.25)], [(None, 0.5), (0.5, None), (0.0, 0.5), (0.5, 0.0), (None, None)]
    for times in (1, 2):
        pairs = [*unknown, *known[:times]]
        change = change_of(remembered(*(Row(t, 3.0, 3.0, 3.0, 0.0, 0.0, *pair) for t, pair in enumerate(pairs))))
        assert change is not None
        assert (change.entropy is not None) == (times == 2)
        if change.entropy is not None:
            assert (change.entropy.value, change.entropy.variance) == pytest.approx((0.0, math.log(2) ** 2))


def test_without_an_alarm_the_change_is_that_of_the_last_16_ticks() -> None:
    """Versions that came before cost nothing in them, and what their difference is unsure by is not counted either."""
    shifts = [0.0] * 8 + [-0.4] * 5 + [-0.7] * 11
    rows = [Row(t, 2.5 if t < 8 else 2.0, 3.0, 3.0, s, -0.01 * s) for t, s in enumerate(shifts)]
    change = change_of(remembered(*rows))
    assert change is not None
    assert (change.alarm, change.rollouts) == (False, 16 * 64)
    now = 2.0 - 0.3 * 5 / 16  # α of these ticks, with the last version in all of them
    assert change.drafter.value == pytest.approx(math.log(now / (now + 0.3)))
    assert change.drafter.variance == pytest.approx(0.003 / (now + 0.3) ** 2)
    first, second = change_of(remembered(*rows[8:9])), change_of(remembered(*rows[12:14]))
    assert first is not None
    assert second is not None
    assert first.drafter == Estimate(0.0, 0.0), "there is nothing before it to compare with"
    assert second.drafter.value == pytest.approx(math.log(1.85 / 2.15))


def _fallen(seed: int, *, policy: float = 1.0, version: float = 1.0) -> Change | None:
    """What the monitor says four ticks after its first alarm: α is 3 and falls after 80 ticks, which vary by 2 %."""
    rng, monitor, left, error = np.random.default_rng([41, seed]), DriftMonitor(config()), 4, 0.004
    for tick in range(400):
        if tick == 80 and version != 1:
            monitor.rebase(rng.normal(3 * (version - 1), 3 * error), (3 * error) ** 2, decided=False)
        reading = monitor.tick(3 * (policy * version if tick >= 80 else 1.0) * (1 + rng.normal(0, 0.02)))
        left -= tick >= 80 and (reading.alarm or left < 4)
        if left < 0:
            return monitor.change()
    return None


@pytest.mark.parametrize(("part", "factor"), [("drafter", 0.95), ("drafter", 0.9), ("policy", 0.93), ("policy", 0.9)])
def test_the_interval_of_a_part_holds_the_truth_nineteen_times_in_twenty(part: str, factor: float) -> None:
    """Ticks before the fall diluted the policy's part, and two standard errors were taken off each version's."""
    found = [_fallen(seed, **{"version" if part == "drafter" else part: factor}) for seed in range(120)]
    terms = [cause_of(change).terms[part] for change in found if change is not None]
    assert len(terms) > 110
    assert np.mean([term.low <= math.log(factor) <= term.high for term in terms]) > 0.9
    assert np.mean([term.value for term in terms]) == pytest.approx(math.log(factor), rel=0.06)


def test_a_loss_that_many_versions_luck_explains_is_in_the_interval_and_so_is_none() -> None:
    """One of forty equal versions seems to have lost two standard errors."""
    monitor = DriftMonitor(config())
    for tick in range(60):
        monitor.tick(3.0 + 0.02 * (-1) ** tick)
    monitor.rebase(-0.15, 0.05**2, decided=False)
    monitor.tick(2.9)
    change = monitor.change()
    assert change is not None
    assert change.drafter.low < math.log(2.85 / 3.0) < change.drafter.value < 0.0 < change.drafter.high


@pytest.mark.parametrize("luck", [0.0, 0.02, 0.04])
def test_a_version_that_makes_up_for_a_loss_leaves_none_of_it(luck: float) -> None:
    """Where the last ticks show less of the loss than it is, the gain raises the baseline by the rest."""
    monitor = DriftMonitor(config())
    for tick in range(60):
        monitor.tick(3.0 + 0.02 * (-1) ** tick)
    monitor.rebase(-0.3, 0.02**2, decided=False)
    for _ in range(30):
        monitor.tick(2.7)
    monitor.state.recent, monitor.state.shown = 2.7 + luck, 2.7 + luck
    lost = monitor.change()
    assert lost is not None
    assert lost.drafter.value == pytest.approx(math.log(2.7 / 3.0), abs=0.003)
    monitor.rebase(0.3, 0.02**2, decided=False)
    for _ in range(20):
        monitor.tick(3.0)
    assert monitor.state.levels.owed == pytest.approx(-luck, abs=0.001), "what was not seen is not made up for"
    mended = monitor.change()
    assert mended is not None
    assert monitor.state.levels.forgiven == pytest.approx(0.0, abs=0.001)
    assert mended.drafter.value == pytest.approx(-luck / 3.0, abs=0.002)


def test_there_is_no_change_to_take_apart_before_a_tick_and_where_a_level_has_no_logarithm() -> None:
    assert change_of(RecentTicks()) is None
    calm = remembered(Row(1, 3.0, 3.0, 3.0, 0.0, 0.0))
    calm.calm("fast", 1)
    assert change_of(calm, "fast") is None
    for low in (0.0, -0.1):
        assert change_of(remembered(Row(1, 3.0, low, 3.0, 0.0, 0.0))) is None
        assert change_of(remembered(Row(1, 3.0, 3.0, low, 0.0, 0.0))) is None
    assert change_of(remembered(Row(1, 3.0, 0.5, 3.0, 0.0, 0.0))) is not None


def test_a_version_accounts_for_a_factor_of_ten_at_most() -> None:
    evidence = remembered(Row(1, 2.0, 3.0, 3.0, 0.0, 0.0), Row(2, 2.0, 3.0, 3.0, 9.0, 0.0))
    change = change_of(evidence)
    assert change is not None
    assert change.drafter.value == pytest.approx(math.log(10))


def test_what_replay_lost_beyond_what_engines_lost_is_the_features_and_no_more() -> None:
    """Whatever is measured, the parts add up to what replay lost and to what engines lost; each has its own error."""
    for held in (-0.4, -0.1, -0.0001, 0.2):
        for live in (-0.3, 0.01, 0.15, 0.5):
            change = replace(fell(drafter=-0.05, prompts=Estimate(-0.02, SMALL)), held=Estimate(held, 2 * SMALL))
            engine = Estimate(live, 3 * SMALL)
            terms = cause_of(change, engine).terms
            total = {n: sum(e.value for other, e in terms.items() if other != n) for n in ("features", "engine")}
            assert total["engine"] == pytest.approx(held - 0.05 - 0.02), "what replay lost"
            assert total["features"] == pytest.approx(held + live - 0.05 - 0.02), "what engines lost"
            unseen = -min(live, -held) if held < 0 and live > 1.96 * math.sqrt(3 * SMALL) else 0.0
            assert terms["features"] == Estimate(unseen, 3 * SMALL)
            for name, value, own in (("policy", held - unseen, 2), ("engine", live + unseen, 3)):
                assert terms[name].value == pytest.approx(value)
                assert terms[name].variance == pytest.approx((5 if unseen else own) * SMALL)


def test_the_cause_says_what_fell_by_how_much_and_what_else_changed() -> None:
    entropy = Estimate(math.log(1.5), SMALL)
    change = fell(held=math.log(0.6), drafter=math.log(1.2), prompts=Estimate(math.log(0.8), SMALL), entropy=entropy)
    reach = math.exp(1.959964 * 0.01)
    most, least = f"−{100 - 60 / reach:.0f} %", f"−{100 - 60 * reach:.0f} %"
    assert cause_of(change, Estimate(0.005, SMALL)) == Cause(
        "policy flattened",
        f"policy flattened −40 % ({least} to {most}); prompts −20 %; drafter +20 %; entropy +50 %",
        math.log(0.6),
        640,
        cause_of(change, Estimate(0.005, SMALL)).terms,
        entropy,
    )
    other = cause_of(replace(change, held=Estimate(0.0, SMALL), drafter=Estimate(math.log(0.5), SMALL)))
    assert (other.cause, other.fall) == ("drafter", math.log(0.5))
    assert other.text == "drafter −50 % (−49 % to −51 %); prompts −20 %", "the entropy is the policy's"


def test_a_fall_below_one_percent_is_named_for_nothing_however_sure() -> None:
    change = replace(fell(entropy=Estimate(0.1, SMALL)), held=Estimate(-0.005, 1e-10))
    assert change.prompts is not None
    assert cause_of(change) == Cause(
        None,
        "no part of the change is a fall beyond chance",
        None,
        640,
        {"prompts": change.prompts, "policy": change.held, "drafter": change.drafter},
        change.entropy,
    )


def test_intervals_of_the_fall_cover_it_as_often_as_they_say() -> None:
    covered, runs = 0, 60
    for run in range(runs):
        rng = np.random.default_rng([11, run])
        monitor = DriftMonitor()
        for value in rng.normal(3.0, 0.15, 600).tolist():
            monitor.tick(value)
        for value in rng.normal(2.85, 0.15, 60).tolist():
            monitor.tick(value)
        change = monitor.change()
        assert change is not None
        covered += change.held.low <= math.log(0.95) <= change.held.high
    assert covered >= 0.85 * runs


# --- live over replay
def scored(policy: int, alpha: float) -> ScoreRecord:
    return ScoreRecord(policy_version=policy, served=DrafterSums.of([alpha * 10, alpha * 11] * 40, [10, 11] * 40))


def counted(policy: int, alpha: float, rounds: int = 2000) -> AcceptanceRecord:
    return AcceptanceRecord(policy_version=policy, rounds=rounds, emitted_tokens=int(alpha * rounds), reporter="e")


def test_the_engines_part_is_the_change_of_live_over_replay() -> None:
    scores = [scored(0, 3.0), scored(1, 3.0), scored(2, 2.0)]
    found = engine_change(scores, [counted(0, 2.9), counted(1, 2.9), counted(2, 2.9)])
    assert found is not None
    assert found.value == pytest.approx(math.log(3 / 2), abs=0.01)
    assert math.sqrt(found.variance) == pytest.approx(0.5 * math.sqrt(1 / 2000 + 1 / 4000), rel=0.05)


def test_without_enough_rounds_before_and_after_the_engines_say_nothing() -> None:
    scores = [scored(0, 3.0), scored(1, 3.0)]
    assert engine_change(scores, []) is None
    assert engine_change(scores, [counted(1, 2.9)]) is None
    assert engine_change(scores, [counted(0, 2.9, rounds=500), counted(1, 2.9)]) is None
    assert engine_change([], [counted(0, 2.9), counted(1, 2.9)]) is None


def test_each_policy_versions_engines_are_compared_with_its_own_rollouts_weighed_by_live_rounds() -> None:
    """Versions 0 and 1 before, 2 and 3 now: of the last ones, as many as hold 1,000 live rounds, and not fewer."""
    alone = ScoreRecord(policy_version=3, served=DrafterSums.of([30.0], [10.0]))  # one rollout: known to its own size
    halves = [ScoreRecord(policy_version=2, served=DrafterSums.of([a * 10], [10])) for a in (2.0, 2.5)]
    live = [counted(0, 3.1, 900), counted(1, 2.8, 300), counted(2, 2.2, 999), counted(3, 2.4, 1)]
    live += [replace(counted(0, 9.9), emitted_tokens=None), replace(counted(2, 9.9), method="ngram")]
    unasked = [ScoreRecord(policy_version=None, served=DrafterSums.of([99.0], [10.0])), ScoreRecord(policy_version=7)]
    found = engine_change([*unasked, scored(0, 3.0), scored(1, 2.9), *halves, alone], live)
    assert found is not None

    def sides(parts: list[tuple[int, float, DrafterSums]]) -> tuple[float, float]:
        rounds, tokens, replays = (
            np.array([p[0] for p in parts]),
            np.array([p[1] for p in parts]),
            [p[2] for p in parts],
        )
        alpha = np.array([r.alpha for r in replays])
        relative = np.array([1 / 1.959964 if r.error is None else r.error / r.alpha for r in replays])
        weight = rounds / rounds.sum()
        return weight @ np.log(tokens / rounds / alpha), (weight**2) @ relative**2 + 0.25 / rounds.sum()

    served = [s.served for s in (scored(0, 3.0), scored(1, 2.9), *halves, alone)]
    zero, one, half, rest, last = (s for s in served if s is not None)
    before = sides([(900, int(3.1 * 900), zero), (300, int(2.8 * 300), one)])
    now = sides([(999, int(2.2 * 999), half + rest), (1, 2, last)])
    assert found.value == pytest.approx(now[0] - before[0])
    assert found.variance == pytest.approx(now[1] + before[1], rel=1e-5)


def test_the_last_versions_are_as_many_as_hold_a_thousand_live_rounds() -> None:
    scores = [scored(v, 3.0) for v in range(5)]
    alphas, rounds = (3.0, 3.0, 2.0, 2.0, 2.0), (500, 500, 1, 500, 499)
    found = engine_change(scores, [counted(v, a, n) for v, (a, n) in enumerate(zip(alphas, rounds, strict=True))])
    assert found is not None
    assert found.value == pytest.approx(math.log(2 / 3))
    assert engine_change(scores[:3], [counted(v, 3.0, n) for v, n in enumerate((1000, 600, 399))]) is None
    assert engine_change(scores[:2], [counted(0, 3.0, 1000), counted(1, 3.0, 1000)]) is not None


def test_rounds_that_emitted_nothing_and_records_without_rounds_are_no_live_alpha() -> None:
    scores = [scored(0, 3.0), scored(1, 3.0), scored(2, 3.0), scored(3, 3.0)]
    live = [counted(0, 3.0), counted(1, 3.0), counted(2, 0.0), replace(counted(3, 0.0, 0), emitted_tokens=None)]
    assert engine_change(scores, live) == engine_change(scores[:2], live[:2])


# --- another sampling
WARM, HOT = SamplingSettings(1.0), SamplingSettings(1.3)


Ticks = Sequence[tuple[float, SamplingSettings | None]]


def sampled(*ticks: tuple[float, SamplingSettings | None], lane: str = "fast", earlier: Ticks = ()) -> Change:
    """The change where α was 3 at first, by (α, sampling) of the ticks since. `earlier`: the last before that."""
    evidence = RecentTicks()
    for tick in range(40):
        evidence.sampling = WARM
        evidence.add(Row(tick, 3.0, 3.0, 3.0, 0.0, 0.0, sampling=WARM))
        evidence.calm(lane, tick)
        evidence.at_level(lane)
    for tick, (alpha, sampling) in enumerate(earlier, 40):
        evidence.add(Row(tick, alpha, 3.0, 3.0, 0.0, 0.0, 1.5, 1.0, sampling))
        evidence.calm(lane, tick)
    for tick, (alpha, sampling) in enumerate(ticks, 40 + len(earlier)):
        evidence.add(Row(tick, alpha, 3.0, 3.0, 0.0, 0.0, 1.5, 1.0, sampling))
    change = change_of(evidence, lane, sd=0.03)
    assert change is not None
    return change


def test_another_temperature_is_named_as_the_files_tell_it() -> None:
    change = sampled(*[(2.7, HOT)] * 9)
    assert change.resampled is not None
    assert (change.resampled.before, change.resampled.now) == (WARM, HOT)
    for engine in (None, Estimate(0.0, SMALL)):
        why = cause_of(change, engine)
        assert why.cause == "sampling temperature"
        assert why.text == "sampling temperature from 1 to 1.3 −10 % (−9 % to −11 %); entropy +50 %"
        assert why.terms["sampling"].value == pytest.approx(math.log(0.9))
        assert why.terms["policy"].value == pytest.approx(0.0)


@pytest.mark.parametrize(
    ("now", "said"),
    [
        (SamplingSettings(0.7), "temperature from 1 to 0.7"),
        (SamplingSettings(1e-300), "temperature from 1 to 1e-300"),
        (SamplingSettings(1.0, 0.95), "top_p from 1 to 0.95"),
        (SamplingSettings(1.0, 1.0, 50_000), "top_k from 0 to 50000"),
        (SamplingSettings(1.01, 0.9, 20), "top_p from 1 to 0.9 and top_k from 0 to 20"),
        (SamplingSettings(0.6, 0.9, 20), "temperature from 1 to 0.6 and top_p from 1 to 0.9 and top_k from 0 to 20"),
    ],
)
def test_whatever_of_the_sampling_was_changed_is_named(now: SamplingSettings, said: str) -> None:
    """The cause is a metric's label, so it has no values."""
    why = cause_of(sampled(*[(2.7, now)] * 9))
    assert why.text.startswith(f"sampling {said} \N{MINUS SIGN}10 % (")
    assert why.cause == f"sampling {re.sub(r' from [^ ]+ to [^ ]+', '', said)}"


def test_a_percent_of_the_temperature_is_no_other_sampling() -> None:
    assert cause_of(sampled(*[(2.7, SamplingSettings(1.01))] * 9)).cause == "policy flattened"


def test_of_samplings_that_alternate_one_is_named() -> None:
    """The middle value of each setting by itself would be the usual one."""
    change = sampled(*[(2.7, SamplingSettings(0.7)), (2.7, SamplingSettings(1.0, 0.9)), (2.7, HOT)] * 3)
    assert cause_of(change).text.startswith("sampling top_p from 1 to 0.9 ")


def test_a_fall_that_the_usual_sampling_shows_too_is_none_of_the_other_sampling() -> None:
    """Some validations at another temperature come into a fall that is the policy's; and the other way round."""
    policy = sampled(*[(2.7, WARM), (2.7, WARM), (2.7, HOT)] * 6)
    assert policy.resampled is not None
    assert policy.resampled.held.value == pytest.approx(0.0)
    assert policy.resampled.held.variance == pytest.approx((0.03 / 3) ** 2 * (1 / 12 - 1 / 18))
    why = cause_of(policy)
    assert why.cause == "features or policy"
    assert why.terms["policy"].variance == pytest.approx(policy.held.variance + policy.resampled.held.variance)
    validations = sampled(*[(3.0, WARM)] * 5, *[(2.7, HOT)] * 12)
    assert cause_of(validations).cause == "sampling temperature"
    few = sampled(*[(2.7, WARM)] * 4, *[(2.7, HOT)] * 12)
    assert cause_of(few).cause == "sampling temperature", "four ticks do not tell"
    dip = sampled(*[(2.97, WARM)] * 6, *[(2.9, HOT)] * 6)
    assert dip.resampled is not None
    assert dip.resampled.held == dip.held, "six ticks that are a standard deviation low, before the change, are chance"


def test_what_another_sampling_cost_before_a_fall_is_its_part() -> None:
    """Ticks that were sampled as now before the fall began tell what that costs: nothing here, or a part."""
    fell = [(2.7, HOT)] * 9
    free = sampled(*fell, earlier=[(3.0, HOT)] * 5)
    assert free.resampled is not None
    assert free.resampled.held.value == 0.0
    assert free.resampled.held.variance == pytest.approx((0.03 / 3) ** 2 / 5)
    assert cause_of(free).cause == "features or policy"
    half = cause_of(sampled(*fell, earlier=[(2.85, HOT)] * 8)).terms
    assert half["sampling"].value == pytest.approx(math.log(2.85 / 3))
    assert half["policy"].value == pytest.approx(math.log(2.7 / 2.85))
    for told in ([(3.0, HOT)] * 4, [(2.7, HOT)] * 8, [(3.0, SamplingSettings(1.6))] * 8, [(3.0, WARM)] * 8):
        assert cause_of(sampled(*fell, earlier=told)).cause == "sampling temperature", "nothing tells of it"
    sometimes = sampled(*[(2.7, HOT), (2.7, WARM)] * 4, earlier=[(2.85, HOT)] * 8)
    assert cause_of(sometimes).terms["sampling"].value == pytest.approx(math.log(2.85 / 3) / 2), "in half of the ticks"


def test_another_version_that_came_meanwhile_is_none_of_what_a_sampling_cost() -> None:
    """A version that is 0.3 better came before the fall; `Row.shift` says so, and the baseline has not risen."""
    evidence = RecentTicks(usual={"fast": [WARM] * 32})
    for tick in range(8):
        evidence.add(Row(tick, 2.7, 3.0, 3.0, 0.0, 0.0, sampling=HOT))
    evidence.shift = 0.3
    evidence.calm("fast", 7)
    for tick in range(8, 16):
        evidence.add(Row(tick, 2.7, 3.0, 3.0, 0.3, 0.0, sampling=HOT))
    change = change_of(evidence, "fast", sd=0.03)
    assert change is not None
    assert cause_of(change).cause == "features or policy"
    assert cause_of(change).terms["sampling"].value == pytest.approx(0.0)


def test_what_engines_did_not_lose_is_not_the_samplings() -> None:
    change = sampled(*[(2.7, HOT)] * 9)
    why = cause_of(change, Estimate(-math.log(0.9), SMALL))
    assert why.cause == "features or selection"
    assert (why.terms["sampling"].value, why.terms["policy"].value) == pytest.approx((0.0, 0.0))
    for engine in (Estimate(0.04, SMALL), Estimate(-0.04, SMALL)):
        terms = cause_of(change, engine).terms
        total = sum(e.value for name, e in terms.items() if name not in ("features", "engine"))
        assert total + terms["features"].value == pytest.approx(change.held.value)
        assert total + terms["engine"].value == pytest.approx(change.held.value + engine.value)


def until_alarm(
    monitor: DriftMonitor, rng: np.random.Generator, ticks: int, alpha: float, now: SamplingSettings
) -> str | None:
    """The cause that is named at the first alarm."""
    for _ in range(ticks):
        reading = monitor.observe([alpha * math.exp(rng.normal(0.0, 0.02))] * 64, [1.0] * 64, sampling=now)[0]
        if reading.alarm:
            change = monitor.change()
            assert change is not None
            return cause_of(change).cause
    return None


def test_a_fall_by_another_sampling_keeps_its_name_after_it_was_acknowledged() -> None:
    monitor, rng = DriftMonitor(), np.random.default_rng(5)
    assert until_alarm(monitor, rng, 300, 3.0, WARM) is None
    for _ in range(3):
        assert until_alarm(monitor, rng, 60, 2.8, HOT) == "sampling temperature"
        for _ in range(60):
            monitor.observe([2.8] * 64, [1.0] * 64, sampling=HOT)
        monitor.acknowledge()
        monitor = DriftMonitor(state=DriftState.from_json(monitor.state.to_json()))


def test_another_sampling_that_cost_nothing_is_usual_when_a_fall_comes() -> None:
    monitor, rng = DriftMonitor(), np.random.default_rng(5)
    assert until_alarm(monitor, rng, 300, 3.0, WARM) is None
    assert until_alarm(monitor, rng, 300, 3.0, HOT) is None
    assert until_alarm(monitor, rng, 60, 2.8, HOT) == "features, policy or prompts"


def test_samplings_that_always_alternated_are_not_why_all_fall() -> None:
    """Two ranks, or two kinds of prompts, with a temperature each. The warmer one costs 4 %."""
    monitor, rng, found = DriftMonitor(), np.random.default_rng(5), None
    for tick in range(380):
        now = (WARM, HOT)[tick % 2]
        alpha = (2.7 if tick >= 320 else 3.0) * (0.96 if now == HOT else 1)
        found = found or until_alarm(monitor, rng, 1, alpha, now)
        assert tick >= 320 or found is None, "no alarm before"
    assert found == "features, policy or prompts"


def test_a_correction_of_a_version_keeps_how_its_ticks_were_sampled() -> None:
    monitor = DriftMonitor()
    for _ in range(40):
        monitor.observe([3.0, 3.1] * 32, [1.0] * 64, sampling=WARM)
    monitor.rebase(0.01, 0.01)
    for now in (WARM, WARM, HOT, HOT):
        monitor.observe([3.0, 3.1] * 32, [1.0] * 64, sampling=now)
    assert monitor.correct(0.01, 0.005)
    assert [row.sampling for row in monitor.state.evidence.rows[-5:]] == [WARM, WARM, WARM, HOT, HOT]
    assert monitor.state.evidence.sampling == HOT


def test_a_change_of_the_sampling_is_read_as_it_was_written() -> None:
    change = sampled(*[(2.7, SamplingSettings(0.7, 0.9, 50))] * 9)
    written = WorkerGauges(drift_change=change).model_dump_json()
    found = read(WorkerGauges, written)
    assert found is not None
    assert found.drift_change == change
