"""What acceptance is worth: found on engines with known costs, unknown where the counters do not tell.

The engines are those of `benchmarks/worth.py`, fewer of them; its table is in docs/lab/worth.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from benchmarks.worth import Time, attention, judge, linear, roofline, soft
from service.monitor.records import StepSample
from service.monitor.worth import (
    DraftingTime,
    StepTime,
    Worth,
    depth_by_batch,
    pooled,
    speedups,
    step_speedup,
    tokens_per_round,
    worth,
)

TOKENS = tokens_per_round([0.8, 0.64, 0.512, 0.41])


def clean(
    time: Time, depths: tuple[int, ...] = (0, 2, 4), batches: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128)
) -> StepTime:
    samples = [StepSample(b, k, 10, 10 * time(b, k)) for k in depths for b in batches]
    found = StepTime.fit(samples)
    assert found is not None
    return found


def seconds(step: StepTime, batch: float, depth: int) -> float:
    return float(step.times([batch], depth)[0, depth])


def memory_bound_then_not(batch: float, depth: int) -> float:
    return 10e-3 + 60e-6 * batch * (depth + 1) + depth * 5e-4


@pytest.mark.parametrize("kind", [linear, roofline, attention, soft])
def test_best_depth_and_speed_up_are_found_from_noisy_counters(kind: Callable[[np.random.Generator], Time]) -> None:
    found = judge(kind, (0, 2, 4, 6), engines=2, seed=0)
    assert found.answered > 0.5
    assert found.right >= 0.95
    assert found.within >= 0.95


@pytest.mark.parametrize("corner", [40.0, 61.0, 93.0, 140.0])
def test_the_corner_is_found_between_batch_sizes_that_were_seen(corner: float) -> None:
    def time(batch: float, depth: int) -> float:
        return 10e-3 * max(1.0, batch * (depth + 1) / corner) + depth * 1e-3

    found = clean(time)
    for batch in (10, 20, 40, 80):
        for depth in range(5):
            assert seconds(found, batch, depth) == pytest.approx(time(batch, depth), rel=0.01)


@pytest.mark.parametrize("p", [2, 3, 5])
def test_a_bend_need_not_be_a_corner(p: int) -> None:
    def time(batch: float, depth: int) -> float:
        return float(10e-3 * (1 + (batch * (depth + 1) / 90) ** p) ** (1 / p) + depth * 1e-3)

    found = clean(time)
    for batch in (10, 20, 40, 80):
        assert seconds(found, batch, 3) == pytest.approx(time(batch, 3), rel=0.03)


def test_a_sequence_may_cost_more_than_its_tokens() -> None:
    """Its attention is computed once, however many drafts are verified."""

    def time(batch: float, depth: int) -> float:
        return 10e-3 + 2e-4 * batch + 1e-5 * batch * (depth + 1) + depth * 1e-3

    found = clean(time)
    for depth in range(5):
        assert seconds(found, 50, depth) == pytest.approx(time(50, depth), rel=0.01)


def test_a_form_that_does_not_fit_says_nothing_and_why() -> None:
    """A mixture of experts reads more weights the more tokens a step has: the costs bend the other way."""

    def time(batch: float, depth: int) -> float:
        return float(10e-3 * (0.5 + 0.5 * (1 - (1 - 2 / 8) ** (batch * (depth + 1)))) + depth * 1e-3)

    samples = [StepSample(2 ** (i / 2), k, 10, 10 * time(2 ** (i / 2), k)) for k in range(5) for i in range(15)]
    found = worth(samples, SURVIVAL)
    assert found.batches == ()
    assert "a mixture of experts" in str(found.unknown)


@pytest.mark.parametrize("depths", [(4,), (0,)])
def test_one_depth_alone_says_nothing_of_the_others(depths: tuple[int, ...]) -> None:
    """Not even without noise: the step and the drafter cannot be told apart."""
    found = clean(memory_bound_then_not, depths)
    assert np.isnan(speedups(found, TOKENS, [16])).any()
    assert depth_by_batch(found, TOKENS, 64) is None
    other = 4 if depths == (0,) else 0
    assert math.isnan(seconds(found, 16, other))
    assert seconds(found, 16, depths[0]) == pytest.approx(memory_bound_then_not(16, depths[0]), rel=1e-6)


def test_two_depths_are_enough_also_without_plain_decoding() -> None:
    found = clean(memory_bound_then_not, (2, 4))
    assert seconds(found, 16, 0) == pytest.approx(memory_bound_then_not(16, 0), rel=1e-3)


def test_batch_sizes_far_from_those_seen_are_unknown() -> None:
    found = clean(memory_bound_then_not)
    assert [math.isnan(seconds(found, batch, 2)) for batch in (0.5, 1, 190, 200)] == [True, False, False, True]
    assert depth_by_batch(found, TOKENS, 4096) is None


def test_a_few_spoilt_windows_do_not_count() -> None:
    samples = [
        StepSample(b, k, 10, 10 * memory_bound_then_not(b, k)) for k in (0, 2, 4) for b in (1, 2, 4, 8, 16, 32, 64, 128)
    ]
    samples[3] = StepSample(8, 0, 10, 5.0)
    samples[14] = StepSample(64, 2, 10, 0.0)  # no time at all: not used
    found = StepTime.fit(pooled(samples))
    assert found is not None
    assert seconds(found, 8, 0) == pytest.approx(memory_bound_then_not(8, 0), rel=0.02)


@pytest.mark.parametrize(
    "samples",
    [
        [],
        [StepSample(1, 2, 0, 1.0)],
        [StepSample(0, 2, 1, 1.0)],
        [StepSample(1, 2, 1, math.inf)],
        [StepSample(1, 0, 1, -1)],
    ],
)
def test_nothing_can_be_fitted_to_nothing(samples: list[StepSample]) -> None:
    assert StepTime.fit(pooled(samples)) is None


def test_the_speed_up_is_tokens_over_time_and_falls_below_one_where_speculation_costs() -> None:
    found = clean(memory_bound_then_not)
    expected = TOKENS[4] * memory_bound_then_not(1, 0) / memory_bound_then_not(1, 4)
    assert speedups(found, TOKENS, [1])[0, 4] == pytest.approx(expected, rel=1e-3)
    bad = tokens_per_round([0.05, 0.0, 0.0, 0.0])
    [row] = speedups(found, bad, [128])
    assert row.argmax() == 0
    assert row.max() == 1.0


def test_the_list_for_vllm_covers_every_batch_size_once_with_the_best_depth() -> None:
    found = clean(memory_bound_then_not)
    plan = depth_by_batch(found, TOKENS, 128)
    assert plan is not None
    assert plan[0][0] == 1
    assert plan[-1][1] == 128
    assert all(after[0] == before[1] + 1 for before, after in pairwise(plan))
    depths = [depth for _, _, depth in plan]
    assert depths == sorted(depths, reverse=True)
    assert len(set(depths)) > 1
    for first, last, depth in plan:
        for batch in {max(first, 1), last}:
            assert np.argmax(speedups(found, TOKENS, [batch])[0]) == depth


def test_tokens_per_round_sums_what_is_kept() -> None:
    assert tokens_per_round([0.5, 0.25]) == [1.0, 1.5, 1.75]


@pytest.mark.parametrize(("plain", "drafted", "whole"), [(100.0, 56.6, 1.41), (133.6, 87.0, 1.35)])
def test_a_reported_step_speed_up_comes_out(plain: float, drafted: float, whole: float) -> None:
    """Seconds of generation without and with drafts, and the step's speed-up, as arXiv 2604.26779 reports them.

    Generation is said to take 65 to 72 % of a step.
    """
    low, high = (step_speedup(share, plain / drafted) for share in (0.65, 0.72))
    assert low - 0.02 <= whole <= high + 0.02


SURVIVAL = [0.8, 0.64, 0.512, 0.41]


def counted(depths: tuple[int, ...] = (0, 2, 4), largest: int = 256) -> list[StepSample]:
    batches = [2**i for i in range(largest.bit_length())]
    return [StepSample(b, k, 10, 10 * memory_bound_then_not(b, k)) for k in depths for b in batches]


def test_worth_says_what_the_depth_in_use_brings_where_another_is_better_and_where_it_costs() -> None:
    found = worth(counted(), SURVIVAL)
    assert (found.unknown, found.depth) == (None, 4)
    assert [row.batch for row in found.batches] == [2**i for i in range(9)]
    for row in found.batches:
        truth = [
            TOKENS[k] * memory_bound_then_not(row.batch, 0) / memory_bound_then_not(row.batch, k) for k in range(5)
        ]
        assert row.speedup == pytest.approx(truth[4], rel=0.01)
        assert truth[row.best_depth] >= 0.99 * max(truth)
    costs = [row.batch for row in found.batches if row.speedup < 1]
    assert found.costs_from == (costs[0] if costs else None)
    assert worth(counted(), [0.05, 0.0, 0.0, 0.0]).costs_from == 1


def test_where_nothing_is_known_it_says_what_is_missing() -> None:
    assert worth([], SURVIVAL) == Worth()
    assert "no engine" in str(Worth().unknown)
    assert "replayed for 0" in str(worth(counted(), []).unknown)
    assert "draft 4 tokens" in str(worth(counted((0, 4)), SURVIVAL[:3]).unknown)
    alone = worth(counted((4,)), SURVIVAL)
    assert "at depth 4 do not tell" in str(alone.unknown)
    assert "another depth" in str(alone.unknown)
    assert alone.batches == ()
    assert "engines draft 0 tokens" in str(worth(counted((0,)), SURVIVAL).unknown)
    one_size = [StepSample(8, k, 10, 10 * memory_bound_then_not(8, k)) for k in (0, 2, 4)]
    assert "more batch sizes" in str(worth(one_size, SURVIVAL).unknown)


HOSTILE = [
    StepSample(4, 3, 10**15, 1e-300),
    StepSample(4, 3, 1, 5e-324),
    StepSample(1e-300, 3, 9 * 10**15, 1e-300),
    StepSample(1e6, 4, 10, 1.0),
    StepSample(1e300, 4, 10, 1.0),
    StepSample(math.nan, 4, 10, 1.0),
    StepSample(4, 4, 10, math.inf),
    StepSample(4, 10**6, 10, 1.0),
    StepSample(4, -1, 10, 1.0),
    StepSample(0, 0, 0, 0),
]


@pytest.mark.parametrize("bad", HOSTILE, ids=repr)
def test_what_an_engine_cannot_mean_changes_nothing(bad: StepSample) -> None:
    assert worth([bad], SURVIVAL).unknown is not None
    assert worth([*counted(), bad], SURVIVAL) == worth(counted(), SURVIVAL)


def test_no_engine_outvotes_all_others_and_no_number_of_cells_is_too_many() -> None:
    liar = [StepSample(8, 4, (1 << 53) - 1, 0.5 * ((1 << 53) - 1))]
    honest = [replace(one, steps=10**6, seconds=one.seconds * 10**5) for one in counted()] * 20
    found, truth = worth([*honest, *liar], SURVIVAL), worth(honest, SURVIVAL)
    assert found.unknown is None
    assert found.batches[-1].speedup == pytest.approx(truth.batches[-1].speedup, rel=0.05)
    rng = np.random.default_rng(0)
    many = [
        StepSample(float(b), int(k), 10, 1.0) for b, k in zip(rng.uniform(0.1, 60000, 9000), range(9000), strict=True)
    ]
    assert len(pooled(many)) <= 128


def test_as_many_costs_as_samples_are_no_proof() -> None:
    """A fit that goes through all its points has no residual; the noise that engines have is taken instead."""
    rng, wrong, said = np.random.default_rng(1), 0, 0
    for _ in range(12):
        cells = [
            StepSample(b, k, 10, 10 * memory_bound_then_not(b, k) * float(np.exp(0.1 * rng.standard_normal())))
            for b in (8, 64)
            for k in (0, 4)
        ]
        for row in worth(cells, SURVIVAL).batches:
            truth = TOKENS[4] * memory_bound_then_not(row.batch, 0) / memory_bound_then_not(row.batch, 4)
            said, wrong = said + 1, wrong + (abs(row.speedup / truth - 1) > 0.05)
    assert wrong <= 1, (wrong, said)


def test_engines_are_pooled_by_depth_and_batch_size() -> None:
    """By the engines' median step, weighted by steps."""
    engines = [
        StepSample(8, 3, 10, 1.0),
        StepSample(8.4, 3, 30, 1.5),
        StepSample(8, 3, 25, 90.0),
        StepSample(8, 0, 5, 1.0),
    ]
    found = pooled(engines)
    assert [(one.depth, one.steps, one.seconds) for one in found] == [(0, 5, 1.0), (3, 65, pytest.approx(65 * 0.1))]
    assert found[1].batch == pytest.approx((8 * 35 + 8.4 * 30) / 65)


# --- the time that a gain in α shortens
def rounds_of(seconds: float, drafting: float) -> list[StepSample]:
    """An engine after `seconds`, of which the part `drafting` went to steps with drafts and a tenth to others."""
    parts = {depth: (drafting if depth else 0.1) * seconds for depth in (0, 4)}
    return [StepSample(8, depth, max(1, int(100 * part)), part) for depth, part in parts.items() if part > 0]


@pytest.mark.parametrize("drafting", [0.0, 0.05, 0.4, 0.9])
@pytest.mark.parametrize("step_seconds", [0.7, 11.0, 45.0])
def test_the_drafting_share_is_what_engines_spent_in_rounds(drafting: float, step_seconds: float) -> None:
    """Synchronous: an engine generates in one piece of each RL step and rests in the other."""
    time = DraftingTime()
    random = np.random.default_rng(0)
    for now in np.cumsum(random.uniform(2, 9, 400)):
        whole, part = divmod(float(now), step_seconds)
        busy = whole * drafting * step_seconds + min(part, drafting * step_seconds)
        samples = [StepSample(8, 4, 1000, busy), StepSample(64, 0, 1000, float(now))]
        time.feed({"a": (float(now), samples)}, 4 * step_seconds)
    assert time.share == pytest.approx(drafting, abs=0.06)


def test_the_drafting_share_is_unknown_until_a_window_is_over_and_without_step_times() -> None:
    time = DraftingTime()
    for now in (1.0, 30.0, 59.0):
        time.feed({"a": (now, rounds_of(now, 0.5)), "silent": (now, [])}, 60.0)
        assert time.share is None
    time.feed({"a": (61.0, rounds_of(61.0, 0.5)), "silent": (61.0, [])}, 60.0)
    assert time.share == pytest.approx(0.5)


def test_engines_that_were_restarted_or_died_do_not_count_against_the_others() -> None:
    """A dead engine's counts are read for half an hour: many of them must not say that nobody drafts."""
    time = DraftingTime()
    for now in range(1, 1801, 20):
        since = now if now < 300 else now - 290  # b was restarted
        heard = {"a": (float(now), rounds_of(now, 0.6)), "b": (float(now), rounds_of(since, 0.6))}
        heard |= {f"dead {n}": (min(now, 400.0), rounds_of(min(now, 400), 0.6)) for n in range(9)}
        time.feed(heard, 60.0)
        assert time.share is None or time.share == pytest.approx(0.6, abs=1e-6), now
    assert time.share is not None


@pytest.mark.parametrize("every", [1, 7])
def test_an_engine_that_reports_at_other_times_than_the_others_does_not_speak_alone(every: int) -> None:
    time = DraftingTime()
    for now in range(1, 1200, every):
        heard = {}
        for place, (name, share) in enumerate({"a": 0.2, "b": 0.2, "liar": 1.0}.items()):
            at = float(max(1, now - (now + 2 * place) % 5))  # it reports every 5 s
            heard[name] = (at, rounds_of(at, share))
        time.feed(heard, 60.0)
        assert time.share is None or now < 120 or time.share == pytest.approx(0.2, abs=1e-6)


def test_no_engine_outvotes_the_others_about_the_time_that_goes_to_rounds() -> None:
    time = DraftingTime()
    for now in (1.0, 100.0):
        honest = {name: rounds_of(now, 0.5) for name in "abc"}
        liars = {"never": [StepSample(8, 0, 10, 1.0)], "nonsense": [StepSample(8, 4, 10, math.inf)]}
        time.feed({name: (now, steps) for name, steps in {**honest, **liars}.items()}, 60.0)
    assert time.share == pytest.approx(0.5)


@pytest.mark.parametrize(("draft_seconds", "pays"), [(0.1, True), (1.2, False)])
def test_whether_any_drafter_could_pay_is_read_from_step_times(draft_seconds: float, pays: bool) -> None:
    """Of engines that draft nothing now; a draft that takes longer than a step is worth it for nobody."""
    steps = [StepSample(b, k, 100, 100 * (1.0 + k * draft_seconds)) for k in (0, 4) for b in (1, 4, 16, 64)]
    time = DraftingTime()
    assert time.may_pay, "nobody has said"
    time.feed({"e": (0.0, steps)}, 60.0)
    more = [replace(one, steps=200, seconds=2 * one.seconds) if one.depth == 0 else one for one in steps]
    time.feed({"e": (100.0, more)}, 60.0)
    assert time.share == 0.0
    assert time.may_pay is pays
