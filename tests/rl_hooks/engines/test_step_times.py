"""Step times by batch size and depth, from what vLLM's metrics page says."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from rl_hooks.engines.counters import Snapshot
from rl_hooks.engines.step_times import MAX_CELLS, StepTimes

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
"""


def snapshot(outputs: float, steps: float, seconds: float, rounds: float, depth: float) -> Snapshot:
    return Snapshot(int(rounds), int(rounds * depth), 0, (0,), None, None, (outputs, steps, seconds))


START = snapshot(0, 0, 0, 0, 0)


def test_the_page_is_read_and_an_engine_without_them_is_counted_all_the_same() -> None:
    assert Snapshot.parse(PAGE).times == (800.0, 150.0, 16.5)
    without = "\n".join(line for line in PAGE.splitlines() if "inter_token" not in line)
    assert Snapshot.parse(without).times is None
    assert Snapshot.parse(PAGE.replace("16.5", "NaN")).times is None
    assert Snapshot.parse(without).rounds == 800


def test_a_step_takes_what_its_outputs_waited_and_holds_the_sequences_that_did() -> None:
    """100 steps of 8 sequences, 20 ms each, whatever time lay between them."""
    times = StepTimes()
    times.add(START, snapshot(outputs=800, steps=100, seconds=800 * 0.020, rounds=800, depth=3))
    [found] = times.document()
    assert found == {"batch": 8.0, "depth": 3, "steps": 100, "seconds": pytest.approx(2.0)}


def test_sums_are_cumulative_by_depth_and_by_batch_size() -> None:
    times, before = StepTimes(), START
    for sequences, depth, step_seconds in ((8, 3, 0.02), (8, 3, 0.04), (64, 3, 0.03), (8, 0, 0.01)):
        assert before.times is not None
        outputs, steps, seconds = before.times
        rounds = sequences * 100 if depth else 0
        after = replace(
            before,
            rounds=before.rounds + rounds,
            drafted_tokens=before.drafted_tokens + rounds * depth,
            times=(outputs + sequences * 100, steps + 100, seconds + sequences * 100 * step_seconds),
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
    ],
)
def test_what_says_nothing_is_left_out(after: Snapshot) -> None:
    times = StepTimes()
    times.add(START, after)
    times.add(after, START)  # counters that fell
    assert times.document() == []


def test_the_cells_are_bounded_and_those_with_the_fewest_steps_go() -> None:
    times = StepTimes()
    for number in range(3 * MAX_CELLS):
        sequences, steps = 2 ** (number % 20), 20 + number
        outputs = sequences * steps
        times.add(START, snapshot(outputs, steps, outputs * 0.01, outputs, 1 + number // 20))
    kept = times.document()
    assert len(kept) == MAX_CELLS
    assert min(row["steps"] for row in kept) > 20 + MAX_CELLS
    assert all(math.isclose(row["seconds"], 0.01 * row["steps"]) for row in kept)
