"""Step times by batch size and depth, from what vLLM's metrics page says."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from rl_hooks.engines.counting.counters import Counts, Snapshot
from rl_hooks.engines.counting.step_times import MAX_CELLS, StepSums

PAGE = """
vllm:spec_decode_num_drafts_total{engine="0"} 800
vllm:spec_decode_num_draft_tokens_total{engine="0"} 2400
vllm:spec_decode_num_accepted_tokens_total{engine="0"} 900
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="0"} 900
# TYPE vllm:iteration_tokens_total histogram
vllm:iteration_tokens_total_bucket{engine="0",le="+Inf"} 150.0
vllm:iteration_tokens_total_count{engine="0"} 100.0
vllm:iteration_tokens_total_sum{engine="0"} 9000.0
vllm:iteration_tokens_total_count{engine="1"} 50.0
vllm:inter_token_latency_seconds_count{engine="0"} 800
vllm:inter_token_latency_seconds_sum{engine="0"} 16.5
vllm:num_requests_running{engine="0"} 8.0
vllm:num_requests_running{engine="1"} 4.0
"""


def snapshot(outputs: float, steps: float, seconds: float, rounds: float, depth: float) -> Snapshot:
    """At its end as many requests run as its steps held."""
    running = outputs / steps if steps else 8.0
    counts = Counts(int(rounds), int(rounds * depth), 0, (0,), None)
    return Snapshot(counts, times=(outputs, steps, seconds, running))


def start(running: float = 8.0) -> Snapshot:
    return replace(snapshot(0, 0, 0, 0, 0), times=(0.0, 0.0, 0.0, running))


START = start()


def test_the_page_is_read_and_an_engine_without_them_is_counted_all_the_same() -> None:
    assert Snapshot.parse(PAGE).times == (800.0, 150.0, 16.5, 6.0)
    without = "\n".join(line for line in PAGE.splitlines() if "inter_token" not in line)
    assert Snapshot.parse(without).times is None
    for value in ("NaN", "+Inf", "-1", "1e308"):
        assert Snapshot.parse(PAGE.replace("16.5", value)).times is None, value
    assert Snapshot.parse(without).counts.rounds == 800


def test_a_step_takes_what_its_outputs_waited_and_holds_the_sequences_that_did() -> None:
    """100 steps of 8 sequences, 20 ms each, whatever time lay between them."""
    times = StepSums()
    times.add(START, snapshot(outputs=800, steps=100, seconds=800 * 0.020, rounds=800, depth=3))
    [found] = times.document()
    assert found == {"batch": 8.0, "depth": 3, "steps": 100, "seconds": pytest.approx(2.0)}


def test_sums_are_cumulative_by_depth_and_by_batch_size() -> None:
    times, before = StepSums(), START
    for sequences, depth, step_seconds in ((8, 3, 0.02), (8, 3, 0.04), (64, 3, 0.03), (8, 0, 0.01)):
        assert before.times is not None
        outputs, steps, seconds, _ = before.times
        before = replace(before, times=(outputs, steps, seconds, float(sequences)))
        rounds = sequences * 100 if depth else 0
        after = replace(
            before,
            counts=before.counts + Counts(rounds, rounds * depth),
            times=(outputs + sequences * 100, steps + 100, seconds + sequences * 100 * step_seconds, float(sequences)),
        )
        times.add(before, after)
        before = after
    found = {(row["depth"], row["batch"]): (row["steps"], row["seconds"]) for row in times.document()}
    assert found == {
        (3, 8.0): (200, pytest.approx(6.0)),
        (3, 64.0): (100, pytest.approx(3.0)),
        (0, 8.0): (100, pytest.approx(1.0)),
    }


@pytest.mark.parametrize(
    "after",
    [
        snapshot(19 * 8, 19, 1.0, 19 * 8, 3),  # too few steps
        snapshot(0, 100, 0.0, 0, 0),  # only prefills
        snapshot(800, 100, 16.0, 800, 2.5),  # two depths in one stretch
        snapshot(800, 100, 16.0, 400, 3),  # drafts for half of the sequences
        replace(snapshot(800, 100, 16.0, 800, 3), times=None),
        replace(snapshot(800, 100, 16.0, 800, 3), times=(800.0, 100.0, 16.0, 2.0)),  # most of them ended meanwhile
        replace(snapshot(800, 400, 16.0, 800, 3), times=(800.0, 400.0, 16.0, 8.0)),  # four API servers count each step
        snapshot(800, 100, 1e-200, 800, 3),
        snapshot(800, 100, 1e9, 800, 3),
        snapshot(800, 100, 16.0, 800, 65),  # deeper than a report may say
    ],
)
def test_what_says_nothing_is_left_out(after: Snapshot) -> None:
    times = StepSums()
    times.add(START, after)
    times.add(after, START)  # counters that fell
    assert times.document() == []


def test_the_cells_are_bounded_and_those_with_the_fewest_steps_go() -> None:
    times = StepSums()
    for number in range(3 * MAX_CELLS):
        sequences, steps = 2 ** (number % 16), 20 + number
        outputs = sequences * steps
        times.add(start(sequences), snapshot(outputs, steps, outputs * 0.01, outputs, 1 + number // 16))
    kept = times.document()
    assert len(kept) == MAX_CELLS
    assert min(row["steps"] for row in kept) > 20 + MAX_CELLS
    assert all(math.isclose(row["seconds"], 0.01 * row["steps"]) for row in kept)


def test_a_stretch_that_holds_a_pause_is_left_out() -> None:
    times = StepSums()
    for seconds in (0.02, 0.07, 0.021):
        times.add(START, snapshot(800, 100, 800 * seconds, 800, 3))
    [found] = times.document()
    assert (found["steps"], found["seconds"]) == (200, pytest.approx(4.1))
