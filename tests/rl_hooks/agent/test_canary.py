"""The canary by itself: when it is certain, and how often it is wrong where prompts are unlike each other."""

from __future__ import annotations

import json
import math
import random

import numpy as np
import pytest

from benchmarks.canary import WORLDS, Traffic, trial
from rl_hooks.agent.canary import Canary, CanaryResult, CanaryRule, _student_99, blocks, log_alpha_variance
from rl_hooks.engines.counting.counters import Counts


def _counts(rounds: int, accepted: int, depth: int = 3) -> Counts:
    return Counts(rounds, depth * rounds, rounds * accepted, (), None, 1.0)


def test_canary_compares_with_the_last_rounds_of_the_old_version_only() -> None:
    canary = Canary(CanaryRule(rounds=100))
    canary.loaded("a", exempt=False)
    for _ in range(50):
        canary.count("a", _counts(100, 3), now=0.0)  # long ago, on easier text
    canary.count("a", _counts(100, 1), now=1.0)
    canary.loaded("b", exempt=False)
    verdict = canary.count("b", _counts(100, 1), now=2.0)
    assert verdict is not None
    assert verdict.passed
    assert verdict.previous_alpha == 2.0


def test_canary_has_no_verdict_from_a_stale_or_thin_baseline() -> None:
    canary = Canary(CanaryRule(rounds=100, baseline_max_age_seconds=60.0))
    canary.loaded("a", exempt=False)
    canary.count("a", _counts(99, 3), now=0.0)
    canary.loaded("b", exempt=False)
    assert canary.trial is None
    assert canary.good == "b"
    canary.count("b", _counts(100, 3), now=0.0)
    canary.loaded("c", exempt=False)
    assert canary.count("c", _counts(100, 0), now=61.0) is None
    assert (canary.good, canary.trial) == ("c", None)


def test_a_trial_that_takes_long_is_judged_by_the_baseline_that_it_began_with() -> None:
    canary = Canary(CanaryRule(rounds=100, baseline_max_age_seconds=60.0))
    canary.loaded("a", exempt=False)
    canary.count("a", _counts(100, 3), now=0.0)
    canary.loaded("b", exempt=False)
    assert canary.count("b", _counts(50, 0), now=5.0) is None
    verdict = canary.count("b", _counts(50, 0), now=1000.0)
    assert verdict is not None
    assert not verdict.passed


def test_a_trial_goes_on_when_its_version_is_loaded_anew_or_the_agent_restarts() -> None:
    canary = Canary(CanaryRule(rounds=100))
    canary.loaded("a", exempt=False)
    canary.count("a", _counts(100, 3), now=0.0)
    canary.loaded("b", exempt=False)
    assert canary.count("b", _counts(50, 0), now=1.0) is None
    canary.loaded("b", exempt=False)
    again = Canary(CanaryRule(rounds=100))
    again.restore(json.loads(json.dumps(canary.dump(2.0))), 1000.0)
    verdict = again.count("b", _counts(50, 0), now=1001.0)
    assert verdict is not None
    assert (verdict.passed, verdict.rounds, again.good) == (False, 100, "a")


def test_a_trial_overtaken_by_a_newer_version_leaves_the_baseline() -> None:
    canary = Canary(CanaryRule(rounds=100))
    canary.loaded("a", exempt=False)
    canary.count("a", _counts(100, 3), now=0.0)
    canary.loaded("b", exempt=False)
    assert canary.count("b", _counts(50, 0), now=1.0) is None
    canary.loaded("c", exempt=False)
    verdict = canary.count("c", _counts(100, 0), now=2.0)
    assert verdict is not None
    assert (verdict.previous, verdict.passed, canary.good) == ("a", False, "a")


def _rounds(accepted: list[int], per_block: int) -> list[Counts]:
    """Differences of `per_block` rounds each, counted as an engine of depth 3 would."""
    return [
        Counts(per_block, 3 * per_block, per_block * a, tuple(per_block * (a > i) for i in range(3)), None, 1.0)
        for a in accepted
    ]


def _verdict(canary: Canary, parts: list[Counts]) -> CanaryResult | None:
    canary.loaded("b", exempt=False)
    return next((v for part in parts if (v := canary.count("b", part, now=1.0)) is not None), None)


def test_a_canary_of_clustered_rounds_waits_until_it_is_certain() -> None:
    """Blocks that differ widely among themselves: 400 rounds, but only some prompts."""
    canary = Canary(CanaryRule(rounds=400, patience=2.0))
    canary.loaded("a", exempt=False)
    for part in _rounds([3, 3, 0, 3, 3, 0, 3, 3], 50):
        canary.count("a", part, now=0.0)
    unlucky = [3, 0, 3, 0, 3, 0, 3, 0]  # α 2.5 after 3.25: below 0.9 of it, by chance
    assert _verdict(canary, _rounds(unlucky, 50)) is None
    assert canary.trial == "b"
    later = [canary.count("b", part, now=1.0) for part in _rounds([3] * 8, 50)]
    assert [v.passed for v in later if v is not None] == [True]


def test_a_canary_that_never_becomes_certain_passes_when_its_patience_ends() -> None:
    canary = Canary(CanaryRule(rounds=400, patience=2.0))
    canary.loaded("a", exempt=False)
    for part in _rounds([3, 3, 0, 3, 3, 0, 3, 3], 50):
        canary.count("a", part, now=0.0)
    verdict = _verdict(canary, _rounds([3, 0, 3, 0, 3, 0, 3, 0] * 2, 50))
    assert verdict is not None
    assert verdict.passed
    assert verdict.rounds == 800


def test_a_canary_whose_rounds_have_other_depths_and_no_positions_passes_when_its_patience_ends() -> None:
    canary = Canary(CanaryRule(rounds=100, patience=2.0))
    canary.loaded("a", exempt=False)
    canary.count("a", _counts(100, 3), now=0.0)
    canary.loaded("b", exempt=False)
    assert canary.count("b", _counts(100, 1, depth=1), now=1.0) is None
    verdict = canary.count("b", _counts(100, 1, depth=1), now=1.0)
    assert verdict is not None
    assert verdict.passed


def test_the_canary_of_an_unchanged_drafter_passes_where_the_depth_falls_with_the_batch() -> None:
    """Each draft is accepted at 0.7; the baseline is of depth 4, the trial's rounds are of depth 1, then 2, then 4."""
    draw = random.Random(0)

    def part(depth: int) -> Counts:
        accepted = [next((i for i in range(depth) if draw.random() > 0.7), depth) for _ in range(50)]
        positions = tuple(sum(a > i for a in accepted) for i in range(4))
        return Counts(50, 50 * depth, sum(accepted), positions, None, 1.0)

    for _ in range(20):
        canary = Canary(CanaryRule())
        canary.loaded("a", exempt=False)
        for _ in range(44):
            canary.count("a", part(4), now=0.0)
        verdict = _verdict(canary, [part(depth) for depth in (1, 2, 4) for _ in range(20)])
        assert verdict is not None
        assert verdict.passed
        assert verdict.previous_alpha == pytest.approx(1.7, abs=0.1)


def test_a_version_that_is_dead_fails_at_another_depth_too() -> None:
    """VLLM's plugin names no positions where nothing was accepted."""
    canary = Canary(CanaryRule())
    canary.loaded("a", exempt=True)
    for _ in range(44):
        canary.count("a", Counts(50, 200, 90, (35, 25, 18, 12), None, 1.0), now=0.0)
    verdict = _verdict(canary, [Counts(50, 50, 0, (), None, 1.0) for _ in range(60)])
    assert verdict is not None
    assert not verdict.passed


@pytest.mark.parametrize(("before", "after"), [(4, 4), (4, 2), (3, 4)])
def test_a_better_version_passes_at_any_depth_where_the_policy_has_become_harder_to_draft_for(
    before: int, after: int
) -> None:
    """What replay says of the version before, on the newest policy, is of the full depth."""
    draw = random.Random(0)

    def part(depth: int, first: float, later: float) -> Counts:
        shares = [first, *[later] * (depth - 1)]
        accepted = [next((i for i, p in enumerate(shares) if draw.random() > p), depth) for _ in range(50)]
        positions = tuple(sum(a > i for a in accepted) for i in range(4))
        return Counts(50, 50 * depth, sum(accepted), positions, None, 1.0)

    canary = Canary(CanaryRule())
    canary.loaded("a", exempt=True)
    for _ in range(44):
        canary.count("a", part(before, 0.8, 0.85), now=0.0)
    of_the_one_before = sum((part(4, 0.55, 0.65) for _ in range(100)), Counts()).alpha
    canary.loaded("b", exempt=False, replayed=of_the_one_before)
    parts = (part(after, 0.6, 0.7) for _ in range(60))
    verdict = next((v for counts in parts if (v := canary.count("b", counts, now=1.0)) is not None), None)
    assert verdict is not None
    assert verdict.passed


def test_a_canary_is_certain_of_the_same_drop_when_every_block_shows_it() -> None:
    canary = Canary(CanaryRule(rounds=400))
    canary.loaded("a", exempt=False)
    for part in _rounds([3] * 8, 50):
        canary.count("a", part, now=0.0)
    verdict = _verdict(canary, _rounds([2, 2, 1, 2, 2, 1, 2, 2], 50))
    assert verdict is not None
    assert not verdict.passed


def test_the_canary_of_an_unchanged_drafter_seldom_fails_on_clustered_traffic() -> None:
    """A prompt's rounds are alike; 2000 rounds are a hundred prompts. 200 trials of a drafter against itself."""
    draw = random.Random(0)
    failures = 0
    for _ in range(200):
        canary = Canary(CanaryRule())
        canary.loaded("a", exempt=False)
        for part in _rounds([draw.choice([0, 1, 2, 3]) for _ in range(110)], 20):
            canary.count("a", part, now=0.0)
        verdict = _verdict(canary, _rounds([draw.choice([0, 1, 2, 3]) for _ in range(400)], 20))
        failures += verdict is not None and not verdict.passed
    assert failures <= 6


def test_independent_rounds_have_the_variance_of_their_positions() -> None:
    draw = random.Random(1)
    accepted = [draw.choice([0, 1, 1, 3]) for _ in range(4000)]
    counts = sum(_rounds(accepted, 1), Counts())
    mean = sum(accepted) / len(accepted)
    spread = sum((a - mean) ** 2 for a in accepted) / len(accepted)
    expected = 4.0 * spread / (len(accepted) * (1 + mean) ** 2)  # too few blocks to measure: the design effect
    assert log_alpha_variance([counts]) == pytest.approx(expected)
    assert log_alpha_variance([]) == math.inf


@pytest.mark.parametrize(("degrees", "quantile"), [(4, 3.747), (8, 2.896), (36, 2.434), (math.inf, 2.326)])
def test_what_is_certain_is_the_quantile_of_students_t(degrees: float, quantile: float) -> None:
    assert _student_99(degrees) == pytest.approx(quantile, rel=0.01)


@pytest.mark.parametrize("size", [1, 30, 1000])
def test_blocks_keep_every_round(size: int) -> None:
    parts = _rounds([0, 1, 2, 3] * 5, 7)
    joined = blocks(parts, size)
    assert sum(joined, Counts()) == sum(parts, Counts())
    assert all(part.rounds >= min(size, 140) for part in joined)


@pytest.mark.parametrize(("replayed", "passed"), [(None, False), (2.0, True), (3.9, False)])
def test_a_new_version_is_not_blamed_for_what_the_policy_did(replayed: float | None, passed: bool) -> None:
    """The old version gave α 4 on an older policy and gives `replayed` on today's; the new one gives 2 live."""
    canary = Canary(CanaryRule(rounds=100))
    canary.loaded("a", exempt=False)
    canary.count("a", _counts(100, 3), now=0.0)
    canary.loaded("b", exempt=False, replayed=replayed)
    verdict = canary.count("b", _counts(100, 1), now=1.0)
    assert verdict is not None
    assert verdict.passed is passed
    assert verdict.previous_alpha == min(4.0, replayed or 4.0)


@pytest.mark.parametrize("accepted", [0.2, 0.4])
def test_a_dead_version_is_swapped_back_where_the_old_one_was_weak(accepted: float) -> None:
    """Nothing is known of the traffic yet, and log α can fall by 0.3 at most."""
    canary = Canary(CanaryRule())
    canary.loaded("a", exempt=True)
    for _ in range(10):
        canary.count("a", Counts(200, 600, round(200 * accepted), (), None, 1.0), now=0.0)
    verdict = _verdict(canary, [Counts(200, 600, 1, (), None, 1.0)] * 10)
    assert verdict is not None
    assert not verdict.passed


@pytest.mark.parametrize("rule", [CanaryRule(rounds=0), CanaryRule(patience=8.0), CanaryRule(rounds=20_000)])
def test_a_trial_by_another_rule_ends_when_the_agent_restarts(rule: CanaryRule) -> None:
    """What was kept has stretches of another size, or nothing is to be judged any more."""
    canary = Canary(CanaryRule())
    canary.loaded("a", exempt=True)
    canary.count("a", _counts(2_000, 3), now=0.0)
    canary.loaded("b", exempt=False)
    assert canary.count("b", _counts(500, 3), now=0.0) is None
    again = Canary(rule)
    again.restore(json.loads(json.dumps(canary.dump(0.0))), 0.0)
    assert (again.good, again.trial) == ("b", None)
    assert [again.count("b", _counts(500, 0), now=1.0) for _ in range(50)] == [None] * 50


# --- traffic of prompts that are unlike each other

UNLIKE = [world for world in WORLDS if world.name in ("usual", "prompts unlike each other", "64 prompts, unlike")]


@pytest.mark.parametrize("before", [2_000, 20_000])
def test_an_equal_version_is_seldom_swapped_back_whatever_the_prompts_are(before: int) -> None:
    """Stated: 1 of 100 a look, at most 3 looks. Neighbouring blocks alone said 20 to 35 of 100 in the last two."""
    back = sum(not trial(world, seed, before=before).passed for world in UNLIKE for seed in range(20))
    assert back <= 3, back


def test_an_equal_version_is_seldom_swapped_back_where_a_stretch_is_of_one_prompt_or_two() -> None:
    """Before what neighbouring blocks have in common was asked: 9 of 40."""
    world = next(world for world in WORLDS if world.name == "one prompt at a time")
    back = sum(not trial(world, seed).passed for seed in range(40))
    assert back <= 3, back


@pytest.mark.parametrize("since", [0, 500])
@pytest.mark.parametrize(("shift", "passed"), [(-0.8, True), (-6.0, False)])
def test_a_version_that_comes_after_a_restart_is_swapped_back_only_where_it_is_dead(
    shift: float, passed: bool, since: int
) -> None:
    """The engine may have been started again to draw at another temperature: α is 28 % lower for any version."""
    traffic, canary = Traffic(WORLDS[0], np.random.default_rng(0)), Canary(CanaryRule())

    def count(version: str, rounds: int) -> CanaryResult | None:
        verdict = None
        while rounds > 0 and verdict is None:
            counts = traffic.scrape()
            rounds -= counts.rounds
            verdict = canary.count(version, counts, now=0.0)
        return verdict

    canary.loaded("a", exempt=True)
    count("a", 10_000)
    canary.interrupted(restarted=True)
    traffic.shift = -0.8
    canary.loaded("a", exempt=False)
    count("a", since)
    again = Canary(CanaryRule())
    again.restore(json.loads(json.dumps(canary.dump(0.0))), 0.0)
    canary = again
    canary.loaded("b", exempt=False)
    traffic.shift = shift
    verdict = count("b", 10_000)
    assert verdict is not None
    assert verdict.passed is passed


def test_rounds_of_before_a_restart_are_in_no_stretch_that_ends_after_it() -> None:
    """The engine was started again to draw at another temperature, just before a stretch of the old version ended."""
    canary = Canary(CanaryRule(rounds=400))
    canary.loaded("a", exempt=False)
    for part in _rounds([3] * 15, 50):
        canary.count("a", part, now=0.0)
    canary.interrupted(restarted=True)
    canary.loaded("a", exempt=False)
    for part in _rounds([1], 50):
        canary.count("a", part, now=0.0)
    verdict = _verdict(canary, _rounds([1] * 100, 50))
    assert verdict is not None
    assert verdict.passed


def test_a_worse_version_is_swapped_back_again_once_the_old_one_was_counted_after_a_restart() -> None:
    canary = Canary(CanaryRule(rounds=400))
    canary.loaded("a", exempt=False)
    for part in _rounds([3] * 24, 50):
        canary.count("a", part, now=0.0)
    canary.interrupted(restarted=True)
    canary.loaded("a", exempt=False)
    for part in _rounds([2] * 8, 50):
        canary.count("a", part, now=0.0)
    verdict = _verdict(canary, _rounds([1] * 8, 50))
    assert verdict is not None
    assert (verdict.passed, verdict.previous_alpha) == (False, 3.0)


@pytest.mark.parametrize("before", [2_000, 20_000])
def test_a_dead_version_is_swapped_back_at_the_first_look_whatever_the_prompts_are(before: int) -> None:
    verdicts = [trial(world, seed, 6.0, before) for world in UNLIKE for seed in range(3)]
    assert not any(verdict.passed for verdict in verdicts)
    assert max(verdict.rounds for verdict in verdicts) < 2_300


def test_a_version_that_is_clearly_worse_is_swapped_back_where_prompts_are_alike() -> None:
    verdicts = [trial(WORLDS[0], seed, 0.8, 20_000) for seed in range(8)]
    assert sum(not verdict.passed for verdict in verdicts) >= 7
