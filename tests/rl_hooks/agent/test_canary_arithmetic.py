"""The canary's figures against numpy, and its rules at their edges: no simulation, no draw."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from scipy import stats

from rl_hooks.agent.canary import (
    Canary,
    CanaryResult,
    CanaryRule,
    _at_common_depth,
    _at_depth_one,
    _student_99,
    blocks,
    log_alpha_variance,
)
from rl_hooks.engines.counting.counters import Counts

AT_ONCE = CanaryRule(rounds=400, patience=1.0)


def part(rounds: int, accepted: int, positions: tuple[int, ...] = (), depth: int = 3) -> Counts:
    return Counts(rounds, depth * rounds, accepted, positions, None, 1.0)


def counting(rule: CanaryRule, stretches: Sequence[float]) -> Canary:
    """A canary whose version `a` has done these stretches, of this α each, in eight equal blocks."""
    canary = Canary(rule)
    canary.loaded("a", exempt=False)
    for alpha in stretches:
        for _ in range(8):
            canary.count("a", part(rule.rounds // 8, round((alpha - 1.0) * rule.rounds / 8)), now=0.0)
    return canary


def judged(canary: Canary, alpha: float, version: str = "b", **more: Any) -> CanaryResult | None:
    """The verdict at the first look on a version of this α."""
    canary.loaded(version, exempt=False, **more)
    eighth, found = canary.rule.rounds // 8, None
    for _ in range(8):
        assert found is None
        found = canary.count(version, part(eighth, round((alpha - 1.0) * eighth)), now=1.0)
    return found


# --- the variance of log α


def variance(accepted: Sequence[int], rounds: int) -> float:
    """Of log α over blocks of `rounds` rounds: ratio of sums, first-order autoregressive, Kendall's correction."""
    emitted = np.array(accepted) + rounds
    residuals = emitted - emitted.mean()
    squares = float(residuals @ residuals)
    alike = float(residuals[1:] @ residuals[:-1]) / squares
    alike = np.clip(alike + (1 + 3 * alike) / len(emitted), 0.0, 0.9)
    of_mean = np.var(emitted, ddof=1) / len(emitted) / rounds**2
    return float(of_mean / (emitted.mean() / rounds) ** 2 * (1 + alike) / (1 - alike))


@pytest.mark.parametrize(
    "accepted",
    [
        [0, 60, 0, 60, 0, 60, 0, 60],  # neighbours unlike: taken as independent
        [10, 70, 90, 20, 60, 50, 80, 30],
        [20, 40, 70, 80, 60, 30, 50, 20],  # somewhat alike
        [5, 15, 30, 50, 70, 90, 95, 100],  # alike
        [0] * 30 + [100] * 30,  # more alike than is believed
        [0, 100, 20, 80],  # as few as are measured
    ],
)
def test_the_variance_of_clustered_rounds_is_that_of_their_blocks(accepted: list[int]) -> None:
    found = log_alpha_variance([part(50, one) for one in accepted])
    assert found == pytest.approx(variance(accepted, 50))


@pytest.mark.parametrize(
    ("accepted", "factor"),
    [
        ([40] * 8, 1.0),  # blocks that do not differ: no less than that of independent rounds
        ([30, 60, 45], 4.0),  # too few blocks to measure
    ],
)
@pytest.mark.parametrize("counted", [True, False])
def test_the_variance_is_no_less_than_that_of_independent_rounds(
    accepted: list[int], factor: float, counted: bool
) -> None:
    """50 rounds of depth 3. Positions: of `n` accepted, `n // 5` rounds got three, the rest of it came one by one."""
    positions = [(n - 2 * (n // 5), n // 5, n // 5) if counted else () for n in accepted]
    sides = [part(50, n, three) for n, three in zip(accepted, positions, strict=True)]
    rounds, mean = 50 * len(accepted), sum(accepted) / (50 * len(accepted))
    threes = sum(n // 5 for n in accepted)
    ones = sum(accepted) - 3 * threes
    each = np.array([3] * threes + [1] * ones + [0] * (rounds - threes - ones))
    of_a_round = float(np.var(each)) if counted else mean * (3 - mean)  # not counted: the largest that is possible
    assert log_alpha_variance(sides) == pytest.approx(factor * of_a_round / rounds / (1 + mean) ** 2)


def test_nothing_is_known_of_no_rounds_and_rounds_that_are_all_alike_have_no_variance() -> None:
    assert log_alpha_variance([]) == math.inf
    assert log_alpha_variance([part(50, 150, (50, 50, 50))] * 8) == 0.0
    assert log_alpha_variance([part(50, 150)] * 8) == 0.0
    assert log_alpha_variance([part(50, 160)] * 8) == 0.0  # more than the depth: counted wrongly


def test_blocks_are_closed_when_they_have_their_rounds_and_the_rest_joins_the_last() -> None:
    threes = [part(3, 1)] * 4 + [part(2, 1)]
    assert [block.rounds for block in blocks(threes, 6)] == [6, 8]
    assert blocks(threes, 6)[1].accepted_tokens == 3
    assert [block.rounds for block in blocks(threes[3:], 6)] == [5]
    assert [block.rounds for block in blocks([part(3, 1)] * 7, 6)] == [6, 6, 9]
    assert blocks([], 6) == []


@pytest.mark.parametrize(
    ("degrees", "within"), [(4, 0.007), (5, 0.0032), (8, 6e-4), (12, 1.5e-4), (36, 3e-5), (math.inf, 3e-5)]
)
def test_the_quantile_of_students_t_is_as_exact_as_stated(degrees: float, within: float) -> None:
    assert _student_99(degrees) == pytest.approx(stats.t.ppf(0.99, degrees), rel=within)


# --- when a trial is looked at, and what it is compared with


@pytest.mark.parametrize(
    ("patience", "looks"),
    [
        (0.0, (1,)),
        (1.0, (1,)),
        (1.5, (1, 2)),
        (2.5, (1, 2, 3)),
        (4.0, (1, 2, 4)),
        (5.0, (1, 2, 4, 5)),
        (8.0, (1, 2, 4, 8)),
    ],
)
def test_a_trial_is_looked_at_after_doubling_stretches_and_at_its_end(patience: float, looks: tuple[int, ...]) -> None:
    assert CanaryRule(patience=patience).looks == looks


def changes(alphas: Sequence[float], scale: int) -> list[float]:
    """Of log α, from `scale` stretches to the next as many."""
    means = [float(np.mean(alphas[i : i + scale])) for i in range(len(alphas) - scale + 1)]
    return [math.log(means[i + scale] / means[i]) for i in range(len(means) - scale)]


def error_of_change(before: Sequence[float], trial: Sequence[float], looks: Sequence[int]) -> float:
    """What 1 of 100 changes exceeds at the last of these looks; a change of 0.1 is usual, and counts for four."""
    expected = measured = 0.1**2
    counts_for = 4.0
    for scale in looks:
        both = np.array(changes(before, scale) + changes(trial, scale))
        counts_for = 4 + len(both) / scale
        measured = (4 * expected + float(both @ both) / scale) / counts_for
        expected = max(0.1**2, measured)
    return _student_99(counts_for) * math.sqrt(measured)


BEFORE = pytest.mark.parametrize(
    "before",
    [
        [3.0],
        [3.0] * 12,
        [2.5, 3.5] * 6,  # restless traffic
        [2.0, 2.0, 2.0, 2.0, 3.0, 3.0, 3.0, 3.0],  # a change that shows over several stretches
    ],
)


@BEFORE
def test_the_error_of_a_change_is_measured_at_each_look(before: list[float]) -> None:
    canary = counting(CanaryRule(rounds=8000, patience=4.0), before)
    canary.loaded("b", exempt=False)
    for many in (1, 2, 4):
        expected = error_of_change(before, [], [look for look in (1, 2, 4) if look <= many])
        assert canary._error_of_change(many) == pytest.approx(expected)


@BEFORE
def test_a_trial_fails_at_a_look_where_it_is_lower_by_more_than_alpha_changes_by_itself(before: list[float]) -> None:
    """Blocks are alike, and many: their variance is far below the changes between stretches."""
    rule, outcomes = CanaryRule(rounds=8000, patience=4.0), set()
    kept = counting(rule, before).dump(0.0)
    for alpha in np.arange(1.512, 3.0, 0.06):
        canary, trial = Canary(rule), list[float]()
        canary.restore(kept, 0.0)
        verdict: CanaryResult | None = None
        while verdict is None:
            trial.append(float(alpha))
            verdict = judged(canary, float(alpha))
            many = len(trial)
            previous = float(np.mean(before[-many:]))
            looks = [look for look in rule.looks if look <= many]
            drop = math.log(alpha / previous)
            passed: bool | None = None
            if many not in rule.looks:
                assert verdict is None
            elif alpha >= 0.9 * previous:
                passed = True
            elif drop + error_of_change(before, trial, looks) < 0:
                passed = False
            elif many == rule.looks[-1]:
                passed = True  # patience is over
            assert (verdict and verdict.passed) == passed, (alpha, trial)
            outcomes.add((many, passed))
    assert {passed for _, passed in outcomes} == {None, True, False}


@pytest.mark.parametrize("spread", [0, 12])
def test_a_trial_fails_only_below_the_error_of_both_sides_blocks(spread: int) -> None:
    """Twelve equal stretches before: α hardly changes, so that the blocks' own variance decides."""
    outcomes, canary = set(), Canary(AT_ONCE)
    canary.loaded("a", exempt=False)
    for one in [100 - spread, 100 + spread] * 48:
        canary.count("a", part(50, one), now=0.0)
    kept = canary.dump(0.0)
    for accepted in range(60, 100):
        sides = [100 - spread, 100 + spread] * 4, [accepted - spread, accepted + spread] * 4
        canary.restore(kept, 0.0)
        canary.loaded("b", exempt=False)
        verdicts = [canary.count("b", part(50, one), now=1.0) for one in sides[1]]
        of_blocks = sum(log_alpha_variance([part(50, one) for one in side]) for side in sides)
        error = max(2.3263 * math.sqrt(of_blocks), error_of_change([3.0] * 12, [1.0 + accepted / 50], [1]))
        alpha = 1.0 + accepted / 50
        failed = alpha < 0.9 * 3.0 and math.log(alpha / 3.0) + error < 0
        assert verdicts[-1] is not None
        assert verdicts[-1].passed is not failed, accepted
        outcomes.add(failed)
    assert outcomes == {True, False}


@pytest.mark.parametrize(
    ("before", "after", "passed"),
    [
        (4.0, 3.0, True),  # exactly the ratio
        (1.4, 1.0175, False),  # accepts less than 0.05 of 0.4: dead, though log α fell by less than is certain
        (1.4, 1.025, None),
    ],
)
def test_the_first_look_at_its_edges(before: float, after: float, passed: bool | None) -> None:
    verdict = judged(counting(CanaryRule(rounds=3200, ratio=0.75), [before]), after)
    assert (verdict and verdict.passed) == passed


def test_what_is_kept_is_bounded_and_idle_scrapes_add_nothing() -> None:
    rule = CanaryRule(rounds=16)
    canary = counting(rule, [2.0, 3.0] * 40)
    for _ in range(100):
        canary.count("a", Counts(window_seconds=1.0), now=1.0)
    canary.count("a", Counts(1, 3, 1, (), None, 1.0, {"p": (2, 1)}), now=1.0)
    kept = canary.dump(1.0)["baseline"]
    assert [len(found) for _, found in kept["changes"]] == [32, 32, 32]
    assert [len(stretch) for stretch in kept["done"]] == [8] * 8  # two times the longest look, in eight blocks each
    assert [(one["rounds"], one["by_prompt"]) for one in kept["begun"]] == [(1, {})]
    canary.loaded("b", exempt=False)
    for _ in range(100):
        canary.count("b", Counts(window_seconds=1.0), now=1.0)
    assert canary.dump(1.0)["counts"]["begun"] == []
    verdict = judged(canary, 3.0)
    assert verdict is not None
    assert verdict.passed
    kept = canary.dump(1.0)["baseline"]  # of b: the changes of before go on, the stretches do not
    assert [len(found) for _, found in kept["changes"]] == [32, 32, 32]
    assert len(kept["done"]) == 1
    again = Canary(rule)
    again.restore(json.loads(json.dumps(canary.dump(1.0))), 1.0)
    for _ in range(100):
        again.count("b", part(16, 32), now=1.0)
    assert [len(found) for _, found in again.dump(1.0)["baseline"]["changes"]] == [32, 32, 32]
    for rounds in (8, 80):
        canary = Canary(CanaryRule(rounds=rounds))
        canary.loaded("a", exempt=False)
        for _ in range(rounds):
            canary.count("a", part(1, 1), now=0.0)
        assert [len(stretch) for stretch in canary.dump(1.0)["baseline"]["done"]] == [8]


# --- which version is on trial


def test_only_a_new_version_after_a_whole_stretch_of_the_old_one_is_on_trial() -> None:
    def after(canary: Canary, version: str, *, exempt: bool = False) -> tuple[str | None, str | None]:
        canary.loaded(version, exempt=exempt)
        return canary.good, canary.trial

    assert after(Canary(AT_ONCE), "a") == ("a", None)
    assert after(counting(AT_ONCE, [3.0]), "b") == ("a", "b")
    assert after(counting(AT_ONCE, [3.0]), "b", exempt=True) == ("b", None)
    assert after(counting(AT_ONCE, []), "b") == ("b", None)
    switched_off = Canary(CanaryRule(rounds=0))
    switched_off.loaded("a", exempt=False)
    switched_off.count("a", part(400, 800), now=0.0)
    assert after(switched_off, "b") == ("b", None)
    each_round = Canary(CanaryRule(rounds=1))
    each_round.loaded("a", exempt=False)
    each_round.count("a", part(1, 2), now=0.0)
    assert after(each_round, "b") == ("a", "b")
    assert after(each_round, "a") == ("a", None)  # swapped back, by whomever
    assert after(each_round, "c") == ("a", "c"), "the baseline is still there"


def test_rounds_of_another_version_and_of_idle_scrapes_decide_nothing() -> None:
    canary = counting(CanaryRule(rounds=400, patience=1.0, baseline_max_age_seconds=60.0), [3.0])
    canary.count("a", Counts(), now=50.0)  # nothing was counted: the baseline is as old as before
    canary.loaded("b", exempt=False)
    assert canary.count("c", part(400, 0), now=1.0) is None
    assert (canary.good, canary.trial) == ("a", "b")
    assert canary.count("b", part(100, 0), now=60.5) is None
    assert (canary.good, canary.trial) == ("b", None), "the baseline was too old"
    assert canary.count("b", part(300, 900), now=61.0) is None
    verdict = judged(canary, 2.0, "c")  # judged by all that b has done, its first rounds included
    assert verdict is not None
    assert (verdict.previous, verdict.previous_alpha, verdict.previous_rounds) == ("b", 1.0 + 900 / 400, 400)


def test_a_baseline_of_exactly_the_greatest_age_is_one() -> None:
    canary = counting(CanaryRule(rounds=400, patience=1.0, baseline_max_age_seconds=60.0), [3.0])
    canary.loaded("b", exempt=False)
    verdict = canary.count("b", part(400, 0), now=60.0)
    assert verdict is not None
    assert not verdict.passed
    assert verdict.document() == {
        "version": "b",
        "previous": "a",
        "alpha": 1.0,
        "previous_alpha": 3.0,
        "rounds": 400,
        "previous_rounds": 400,
        "outcome": "rolled_back",
    }


def test_a_version_that_has_passed_is_the_next_ones_baseline() -> None:
    canary = counting(AT_ONCE, [3.0])
    verdict = judged(canary, 4.0)
    assert verdict is not None
    assert verdict.document()["outcome"] == "passed"
    assert (canary.good, canary.trial) == ("b", None)
    verdict = judged(canary, 2.0, "c")
    assert verdict is not None
    assert (verdict.previous, verdict.previous_alpha, verdict.passed) == ("b", 4.0, False)
    assert (canary.good, canary.trial) == ("b", None)


@pytest.mark.parametrize(("restarted", "passed"), [(False, False), (True, True)])
def test_only_a_restart_makes_the_baseline_one_of_before(restarted: bool, passed: bool) -> None:
    """Another client's swap ends a trial; an engine that was started again may draw at another temperature."""
    canary = counting(AT_ONCE, [3.0] * 4)
    canary.loaded("b", exempt=False)
    canary.interrupted(restarted=True) if restarted else canary.interrupted()
    assert canary.trial is None
    verdict = judged(canary, 1.5)
    assert verdict is not None
    assert verdict.passed is passed
    if restarted:
        again = counting(AT_ONCE, [3.0] * 4)
        again.interrupted(restarted=True)
        for _ in range(8):
            again.count("a", part(50, 50), now=0.0)
        assert len(again.dump(0.0)["baseline"]["done"]) == 1, "one stretch since, in the place of all before"


def test_all_of_a_canary_survives_a_restart_of_its_agent() -> None:
    rule = CanaryRule(rounds=400, baseline_max_age_seconds=60.0)
    canary = counting(rule, [2.0, 3.0] * 3)
    canary.loaded("b", exempt=False, replayed=2.5)

    def again(dumped: float, restored: float) -> Canary:
        made = Canary(rule)
        made.restore(json.loads(json.dumps(canary.dump(dumped))), restored)
        return made

    for begun in (False, True):
        later = again(30.0, 1000.0)
        assert json.dumps(later.dump(1000.0)) == json.dumps(canary.dump(30.0))
        later.count("b", part(100, 200), now=1031.0)  # the baseline is 61 s old, and the trial began in time or not
        assert (later.good, later.trial) == (("a", "b") if begun else ("b", None))
        in_time = again(30.0, 1000.0)
        in_time.count("b", part(100, 200), now=1030.0)
        assert (in_time.good, in_time.trial) == ("a", "b")
        canary.count("b", part(100, 200), now=1.0)
    fresh = Canary(rule)
    fresh.restore(Canary(rule).dump(0.0), 0.0)
    assert (fresh.good, fresh.trial) == (None, None)
    young = counting(rule, [])
    fresh.restore(young.dump(0.0), 0.0)
    assert (fresh.good, fresh.trial) == ("a", None)


# --- depths that differ


@pytest.mark.parametrize("depth", [1, 3, 7])
def test_alpha_at_a_depth_of_one_is_of_drafts_that_are_accepted_equally_often(depth: int) -> None:
    assert _at_depth_one(sum(0.6**j for j in range(depth + 1)), depth) == pytest.approx(1.6)


def test_sides_of_other_depths_are_compared_by_first_drafts_where_those_are_known() -> None:
    deep, shallow = part(100, 120, (70, 30, 20)), part(100, 60, (60,), depth=1)
    silent, dead = part(100, 60, (), depth=1), part(100, 0, (), depth=1)
    as_first = [Counts(100, 100, 70, (70,), None, 1.0)]
    almost = [part(20, 20, depth=21)]  # 5 % deeper
    assert _at_common_depth(almost, [part(20, 20, depth=20)]) == (almost, [part(20, 20, depth=20)])
    for trial, baseline, expected in (
        (deep, deep, ([deep], [deep])),
        (shallow, deep, ((shallow,), tuple(as_first))),
        (deep, shallow, (tuple(as_first), (shallow,))),
        (dead, deep, ((Counts(100, 100, 0, (0,), None, 1.0),), tuple(as_first))),
        (
            part(100, 60, (60,), depth=1),
            Counts(100, 106, 60, (58, 2), None, 1.0),
            ((shallow,), (Counts(100, 100, 58, (58,), None, 1.0),)),
        ),
        (silent, deep, None),
        (deep, silent, None),
    ):
        found = _at_common_depth([trial], [baseline])
        assert found is None if expected is None else found == expected


@pytest.mark.parametrize(
    ("trial_depth", "before_depth", "replayed", "previous"),
    [
        (1, 3, 2.176, 1.6),  # replay is of the full depth: 1 + 0.6 + 0.36 + 0.216
        (3, 1, 2.176, 1.6),
        (1, 2, 1.96, 1.6),
        (1, 3, 3.5, 1.7),  # the engine's own count is lower
        (1, 1, 1.5, 1.5),  # no deeper draft was ever made: as it is
        (3, 3, 2.0, 2.0),
        (1, 3, None, 1.7),
    ],
)
def test_what_replay_says_is_compared_at_the_depth_of_both_sides(
    trial_depth: int, before_depth: int, replayed: float | None, previous: float
) -> None:
    def counts(depth: int) -> Counts:
        positions = (70, 60, 50)[:depth]
        return part(100, sum(positions), positions, depth=depth)

    canary = Canary(CanaryRule(rounds=100, patience=1.0))
    canary.loaded("a", exempt=False)
    canary.count("a", counts(before_depth), now=0.0)
    canary.loaded("b", exempt=False, replayed=replayed)
    verdict = canary.count("b", counts(trial_depth), now=1.0)
    assert verdict is not None
    assert verdict.previous_alpha == pytest.approx(previous)
    assert verdict.alpha == pytest.approx(2.8 if trial_depth == before_depth == 3 else 1.7)


def test_what_replay_says_stays_as_it_is_where_no_positions_are_counted() -> None:
    canary = Canary(CanaryRule(rounds=100, patience=1.0))
    canary.loaded("a", exempt=False)
    canary.count("a", part(100, 70, depth=1), now=0.0)
    canary.loaded("b", exempt=False, replayed=1.5)
    verdict = canary.count("b", part(100, 60, depth=1), now=1.0)
    assert verdict is not None
    assert verdict.previous_alpha == 1.5
