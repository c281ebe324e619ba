"""SGLang's rounds are counted in the step that did them, and none that an older drafter had a part in."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from rl_hooks.engines.sglang.memory import WeightMemory
from rl_hooks.engines.sglang.rounds import ACCEPTED, FAULTS, ROUNDS, StepCounter


class Request:
    """What our plugin reads of SGLang's `Req`."""

    def __init__(self) -> None:
        self.spec_verify_ct = 0
        self.output_ids_through_stop = [7]  # of the prefill


class Scheduler:
    """What our plugin reads of SGLang's `SchedulerBatchResultProcessor`."""

    def __init__(self, *, counts: bool = True) -> None:
        self.counter = StepCounter()
        self.requests: dict[str, Request] = {}
        self.metrics_reporter = SimpleNamespace(current_scheduler_metrics_enabled=True, is_stats_logging_rank=counts)

    def launch(self, *names: str) -> Any:
        """Begin a step of these requests."""
        reqs = [self.requests.setdefault(name, Request()) for name in names]
        return SimpleNamespace(reqs=reqs, launch_ts=time.monotonic())

    def prefill(self, *names: str) -> None:
        """A whole step that reads their prompts."""
        assert self.counter.prefilled(None, self, self.launch(*names), "result") is None  # type: ignore[func-returns-value]

    def end(self, batch: Any, *emitted: int) -> Any:
        """Take in a decoding step's results: tokens by request; 0 for one that had ended before it was computed."""

        def original(processor: Any, batch: Any, result: str) -> str:
            assert processor is self
            for request, tokens in zip(batch.reqs, emitted, strict=True):
                request.spec_verify_ct += tokens > 0
                request.output_ids_through_stop += [7] * tokens
            return result

        return self.counter.decoded(original, self, batch, result="what SGLang returns")

    def step(self, **emitted: int) -> Any:
        """A whole decoding step."""
        return self.end(self.launch(*emitted), *emitted.values())

    def counted(self) -> tuple[int, ...]:
        """Rounds, and tokens accepted at each position."""
        if self.counter._rounds is None:
            return (0,)
        samples = [s for c in (self.counter._rounds, self.counter._accepted) for f in c.collect() for s in f.samples]
        table = {(s.name, s.labels.get("position")): int(s.value) for s in samples if s.name.endswith("_total")}
        positions = [table.get((ACCEPTED, str(position)), 0) for position in range(len(table) - 1)]
        return table[ROUNDS, None], *positions


def test_a_round_is_counted_in_its_step_and_not_at_the_end_of_its_request() -> None:
    scheduler = Scheduler()
    assert scheduler.step(a=1, b=4) == "what SGLang returns"
    assert scheduler.counted() == (2, 1, 1, 1)
    scheduler.step(a=3, b=2)
    assert scheduler.counted() == (4, 3, 2, 1)


def test_a_row_of_a_request_that_had_ended_is_no_round() -> None:
    """Where schedules overlap, its next step is computed before its end is known."""
    scheduler = Scheduler()
    scheduler.step(a=2, b=2)
    scheduler.step(a=0, b=2)
    assert scheduler.counted() == (3, 3)


def test_the_first_round_after_a_swap_is_left_out_of_requests_that_run_over_it() -> None:
    """Its first token was drafted in the step before, by the older drafter."""
    scheduler = Scheduler()
    scheduler.step(a=1, b=1)
    scheduler.prefill("late")
    scheduler.counter.drafter_changed()
    scheduler.step(a=2, b=2, late=2)
    assert scheduler.counted() == (2,)
    scheduler.step(a=4, b=4, late=1)
    assert scheduler.counted() == (5, 2, 2, 2)


def test_all_rounds_of_a_request_that_begins_after_a_swap_count() -> None:
    scheduler = Scheduler()
    scheduler.step(a=1)
    scheduler.counter.drafter_changed()
    scheduler.prefill("b")
    scheduler.step(a=4, b=2)
    assert scheduler.counted() == (2, 1)


def test_a_step_under_way_at_a_swap_is_left_out_with_the_one_after_it() -> None:
    """With overlapping schedules a step is launched before the results of the one before are taken in."""
    scheduler = Scheduler()
    first = scheduler.launch("a")
    second = scheduler.launch("a")
    scheduler.end(first, 1)
    scheduler.counter.drafter_changed()
    third = scheduler.launch("a")
    scheduler.end(second, 2)  # the older drafter's
    fourth = scheduler.launch("a")
    scheduler.end(third, 2)  # its first token is
    assert scheduler.counted() == (1,)
    scheduler.end(fourth, 3)
    assert scheduler.counted() == (2, 1, 1)


def test_only_the_rank_that_sglang_counts_in_counts() -> None:
    scheduler = Scheduler(counts=False)
    scheduler.step(a=2)
    assert scheduler.counted() == (0,)


def test_a_fault_ends_the_counting_and_no_step(caplog: pytest.LogCaptureFixture) -> None:
    scheduler = Scheduler()
    scheduler.step(a=2)
    scheduler.metrics_reporter = SimpleNamespace()
    for _ in range(2):
        assert scheduler.counter.decoded(lambda *_: "done", scheduler, scheduler.launch("a")) == "done"
    assert scheduler.counted() == (1, 1)
    assert caplog.text.count("rounds are no longer counted") == 1
    told = [(s.name, s.value) for f in scheduler.counter._faults.collect() for s in f.samples]
    assert (FAULTS, 1.0) in told, "what was counted stays on the page, and looks like an idle server"


def test_the_page_says_whether_the_weights_are_released() -> None:
    memory, manager = WeightMemory(), SimpleNamespace(offload_tags=set[str]())
    for tags in ({"kv_cache"}, {"weights"}, set[str]()):
        manager.offload_tags = tags
        memory.changed(None, manager, object())
        assert memory._gauge._value.get() == ("weights" in tags) == memory.released
    memory.changed(None, object())  # of another SGLang: no failure of ours reaches it
