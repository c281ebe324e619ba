"""The cause of a fall of α is named in simulated worlds, and what cannot be told apart is said together."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from benchmarks.alarms import TROUBLES, Bank, make_bank, named
from service.monitor.drift.cause import Evidence, Row, cause_of, engine_change
from service.monitor.drift.monitor import DriftMonitor
from service.monitor.records import AcceptanceRecord, Change, DrafterSums, Estimate, ScoreRecord

SMALL = 0.0001  # variance: 1 %


@pytest.fixture(scope="module")
def bank() -> Bank:
    return make_bank(300, 3)


@pytest.mark.parametrize("what", ["policy moved", "aux layers swapped", "damaged drafter", "harder prompts"])
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
    assert why.cause == "features"
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


def test_the_largest_fall_is_named_and_chance_is_not() -> None:
    assert cause_of(fell(held=-0.1, drafter=-0.2)).cause == "drafter"
    assert cause_of(fell(held=-0.2, drafter=0.1), Estimate(0.0, SMALL)).cause == "policy moved"
    nothing = cause_of(fell(held=-0.015, drafter=0.1))
    assert (nothing.cause, nothing.fall) == (None, None)


def test_the_parts_add_up_to_the_change_and_a_version_accounts_for_what_it_was_measured_at() -> None:
    evidence = Evidence()
    for tick in range(10):
        evidence.add(Row(tick, 3.0, 3.0, 3.0, 0.0, 0.0))
    evidence.calm("fast", 9)
    evidence.shift, evidence.shift_variance = -0.5, 0.0001
    for tick in range(10, 20):
        evidence.add(Row(tick, 2.2, 2.9, 3.0, evidence.shift, evidence.shift_variance))
    change = evidence.change(["fast"], sd=0.1, uncertainty=0.01, several_strata=True, rollouts_per_tick=64)
    assert change is not None
    assert change.prompts is not None
    assert change.rollouts == 640
    assert change.drafter.value == pytest.approx(math.log(2.2 / 2.7))
    assert change.held.value == pytest.approx(math.log(2.7 / 2.9))
    assert change.prompts.value == pytest.approx(math.log(2.9 / 3.0))
    assert change.prompts.value + change.held.value + change.drafter.value == pytest.approx(math.log(2.2 / 3.0))


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
