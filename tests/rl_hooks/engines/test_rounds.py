"""Every round is counted once, for the drafter that made its drafts and the policy that verified them."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import random
import threading
from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.engine.rounds_fixtures import Output, Scheduler
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_hooks.engines.counting.counters import Counts
from rl_hooks.engines.counting.rounds import _Bucket, counted_prompt
from rl_hooks.engines.vllm import KNOWN_RELEASES
from rl_hooks.engines.vllm.rounds import CountingUnsupportedError, RoundCounter
from rl_hooks.wire import COUNTED_DIGITS, COUNTED_PROMPTS, prompt_hash


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), ahead=st.sampled_from([1, 2]))
def test_every_round_is_its_makers_whatever_is_swapped_between_steps(seed: int, ahead: int) -> None:
    """`ahead`: steps that are scheduled before the first one's result is in (2: asynchronous scheduling)."""
    scheduler = Scheduler(seed)
    counter = RoundCounter(scheduler)
    counter.serve(None, scheduler.policy)
    draw, under_way = random.Random(seed + 1), deque[tuple[Output, dict[str, str | None]]]()
    for number in range(60):
        if draw.random() < 0.25:
            scheduler.drafter = f"v{number}"
            counter.serve(scheduler.drafter, scheduler.policy)
        if draw.random() < 0.1:
            scheduler.policy = number
            counter.serve(scheduler.drafter, scheduler.policy)
        output = scheduler.schedule()
        under_way.append((output, scheduler.execute(output)))
        if len(under_way) == ahead:
            scheduler.update_from_output(*under_way.popleft())
    read = counter.read()
    assert read.exact is not None
    assert {(d, p): (c.rounds, c.accepted_tokens) for d, p, c in read.exact} == {
        law: (rounds, scheduler.accepted[law]) for law, rounds in scheduler.truth.items()
    }
    assert (read.counts.emitted_tokens, read.counts.drafted_tokens) == (scheduler.emitted, scheduler.told)
    assert read.policy_version == scheduler.policy
    of_prompt = scheduler.of_prompt
    assert {(d, p): c.by_prompt for d, p, c in read.exact} == {
        law: {
            prompt_hash([n])[:COUNTED_DIGITS]: (of_prompt[*law, n, "tokens"], of_prompt[*law, n, "rounds"])
            for n in range(scheduler.prompts)
            if of_prompt[*law, n, "rounds"]
        }
        for law in scheduler.truth
    }


def test_a_request_that_comes_again_under_its_name_is_its_new_prompts() -> None:
    scheduler = Scheduler(0)
    counter = RoundCounter(scheduler)
    for prompt in (1, 2):
        scheduler.requests = {"r": SimpleNamespace(prompt_token_ids=[prompt])}
        while "r" in scheduler.requests:  # the scheduler ends it at random
            scheduler.update_from_output(Output(num_scheduled_tokens={"r": 1}), {"r": "v1"})
    ((_, _, counts),) = counter.read().exact or ()
    assert set(counts.by_prompt) == {prompt_hash([1])[:COUNTED_DIGITS], prompt_hash([2])[:COUNTED_DIGITS]}


def test_more_prompts_than_are_compared_are_not_counted_one_by_one_and_take_no_room() -> None:
    scheduler = Scheduler(0)
    counter, known = RoundCounter(scheduler), []
    for prompt in range(3 * COUNTED_PROMPTS):
        name = f"r{prompt}"
        scheduler.requests = {name: SimpleNamespace(prompt_token_ids=[prompt])}  # the one before was aborted
        scheduler.update_from_output(Output(num_scheduled_tokens={name: 1}), {name: "v1"})
        ((_, _, counts),) = counter.read().exact or ()
        known.append(len(counts.by_prompt))
    assert known == [*range(1, COUNTED_PROMPTS + 1), *[0] * (2 * COUNTED_PROMPTS)]
    assert counts.rounds == 3 * COUNTED_PROMPTS


def test_prompts_of_aborted_requests_are_forgotten() -> None:
    scheduler = Scheduler(0)
    counter = RoundCounter(scheduler)
    for number in range(100):
        scheduler.requests = {f"r{number}": SimpleNamespace(prompt_token_ids=[0])}
        scheduler.update_from_output(Output(num_scheduled_tokens={f"r{number}": 1}), {f"r{number}": "v1"})
        assert len(counter._prompts) <= 1


def test_a_request_without_tokens_counts_for_no_prompt() -> None:
    scheduler = Scheduler(0)
    counter = RoundCounter(scheduler)
    for tokens in (None, [1 << 70]):
        scheduler.requests = {"r": SimpleNamespace(prompt_token_ids=[0])}
        counter._prompts = {"r": counted_prompt(tokens)}
        scheduler.update_from_output(Output(num_scheduled_tokens={"r": 1}), {"r": "v1"})
    ((_, _, counts),) = counter.read().exact or ()
    assert (counts.rounds, counts.by_prompt) == (2, {})


class Told(Scheduler):
    """One step in which these rounds are told: drafts, accepted ones, those that a grammar forbade."""

    def update_from_output(self, scheduler_output: Output, rounds: Any) -> dict[int, Any]:  # noqa: ARG002
        for number, (drafted, accepted, invalid) in enumerate(rounds):
            self.make_spec_decoding_stats(None, drafted, accepted, invalid, f"r{number}")
        # The last request ended at its first token of this round.
        return {0: SimpleNamespace(outputs=[SimpleNamespace(request_id="r2", new_token_ids=[1])])}


class Strange(Scheduler):
    """Answers an update in another form than today's vLLM, or raises at one."""

    def __init__(self, answer: Any) -> None:
        super().__init__(3)
        self.answer = answer

    def update_from_output(self, scheduler_output: Output, makers: dict[str, str | None]) -> dict[int, Any]:
        outputs = super().update_from_output(scheduler_output, makers)
        if isinstance(self.answer, Exception):
            raise self.answer
        return outputs if self.answer == "invalid" else {0: self.answer}

    def make_spec_decoding_stats(self, *args: Any, **told: Any) -> None:
        super().make_spec_decoding_stats(*args, **told)

    make_spec_decoding_stats.__signature__ = inspect.signature(Scheduler.make_spec_decoding_stats)  # type: ignore[attr-defined]


def rounds_of(scheduler: Scheduler, steps: int) -> None:
    for _ in range(steps):
        output = scheduler.schedule()
        scheduler.update_from_output(output, scheduler.execute(output))


@pytest.mark.parametrize("answer", [None, SimpleNamespace(outputs=[SimpleNamespace(request_id="r")])])
def test_a_scheduler_that_answers_otherwise_costs_the_counts_and_no_step(
    answer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    scheduler = Strange(answer)
    counter = RoundCounter(scheduler)
    rounds_of(scheduler, 30)
    assert counter.failed
    known = len(counter._prompts)
    rounds_of(scheduler, 30)
    assert len(counter._prompts) == known, "nothing is kept any more"
    assert caplog.text.count("no longer counted") == 1
    assert scheduler.told > 0


def test_drafts_told_in_another_form_cost_the_counts_and_no_step() -> None:
    scheduler = Told(0)
    counter = RoundCounter(scheduler)
    output = scheduler.schedule()
    forms: Any = [(3, 0, [1, 2])]
    assert scheduler.update_from_output(output, forms)
    assert counter.failed


def test_an_update_that_raises_is_the_engines_and_its_rounds_count_for_no_later_step() -> None:
    scheduler = Strange(RuntimeError("the engine's own"))
    counter = RoundCounter(scheduler)
    raised = 0
    for _ in range(10):
        with contextlib.suppress(RuntimeError):
            rounds_of(scheduler, 1)
            raised -= 1
        raised += 1
    assert raised == 10
    assert scheduler.told > 0
    scheduler.answer = "invalid"
    before = sum(scheduler.truth.values())
    rounds_of(scheduler, 10)
    assert counter.read().counts.rounds == sum(scheduler.truth.values()) - before > 0
    assert not counter.failed


def test_positions_ends_and_drafts_that_a_grammar_forbade_are_counted_as_vllm_does() -> None:
    scheduler = Told(0)
    counter = RoundCounter(scheduler)
    counter.serve("v1", 4)
    output = scheduler.schedule()
    scheduler.update_from_output(output, [(3, 0, None), (3, 1, {"r1": 1}), (3, 3, None)])
    ended: dict[str, Any] = {"finished_requests": 3, "running_requests": 0}
    assert counter.read().exact == (("v1", 4, Counts(3, 8, 4, (2, 1, 1), 1, **ended)),)


def test_requests_that_ended_and_those_that_run_are_counted() -> None:
    scheduler = Told(0)
    counter = RoundCounter(scheduler)
    counter.serve("v1", 4)
    scheduler.requests["r2"] = SimpleNamespace(prompt_token_ids=[1])
    scheduler.update_from_output(scheduler.schedule(), [(3, 0, None), (3, 1, None), (3, 3, None)])
    ((_, _, counts),) = counter.read().exact or ()
    assert (counts.finished_requests, counts.running_requests) == (2, 1)


def test_totals_never_fall_when_old_versions_leave_the_books() -> None:
    scheduler = Scheduler(0)
    counter = RoundCounter(scheduler)
    before = counter.read()
    for version in range(100):
        counter.serve("v1", version)
        output = scheduler.schedule()
        output.num_scheduled_tokens = {"r": 1}
        scheduler.requests["r"] = SimpleNamespace(prompt_token_ids=[version])
        scheduler.update_from_output(output, {"r": "v1"})
        assert not counter.read().has_fallen(before)
        before = counter.read()
    assert before.counts.rounds == 100
    assert counter._books._gone.by_prompt == {}, "prompts of versions that left the books take no room"
    assert before.exact is not None
    assert len(before.exact) < 100


def test_an_unknown_scheduler_is_not_counted_and_not_touched() -> None:
    scheduler = SimpleNamespace(make_spec_decoding_stats=lambda stats, drafted: None, requests={})  # noqa: ARG005
    with pytest.raises(CountingUnsupportedError, match=f"stats, drafted; the counts know {KNOWN_RELEASES},"):
        RoundCounter(scheduler)
    assert set(vars(scheduler)) == {"make_spec_decoding_stats", "requests"}


def test_an_old_version_that_leaves_the_books_during_a_read_is_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    counter = RoundCounter(Scheduler(0))
    for version in range(64):
        counter._book(("v1", version), [("r", 4, 2)] * 1000, {"r": 3})
    counts, booked, called = _Bucket.counts, threading.Event(), itertools.count(1)

    def book() -> None:
        counter._book(("v1", 64), [("r", 4, 2)], {"r": 3})
        booked.set()

    def interrupted(bucket: _Bucket) -> Counts:
        if next(called) == 64:  # the last one of this read: the engine's thread goes on here
            threading.Thread(target=book, daemon=True).start()
            booked.wait(0.2)
        return counts(bucket)

    monkeypatch.setattr(_Bucket, "counts", interrupted)
    assert counter.read().counts.rounds == 64_000
    assert booked.wait(60)
    assert counter.read().counts.rounds == 64_001


def test_the_version_that_is_counted_most_stays_in_the_books() -> None:
    counter = RoundCounter(Scheduler(0))
    for version in range(200):
        counter._book(("v1", 0), [("r", 4, 2)], {"r": 3})
        counter._book(("v1", version + 1), [("r", 4, 2)], {"r": 3})
    exact = counter.read().exact
    assert exact is not None
    assert {policy: counts.rounds for _, policy, counts in exact}[0] == 200
