"""Exact counts of vLLM's speculation by drafter version and policy version, from its scheduler.

A step verifies drafts that were made in the step before. After a swap, each running request still has drafts of the
old drafter once; they are counted as the old one's. The policy is the one whose step verified them.

All calls come from the engine's thread, except `read`.
"""

from __future__ import annotations

import inspect
import logging
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Final

from rl_hooks.engines.counters import Counts, Snapshot
from rl_hooks.engines.vllm import KNOWN_RELEASES
from rl_hooks.wire import COUNTED_DIGITS, COUNTED_PROMPTS, prompt_hash

log = logging.getLogger("vllm.draftalign")

_MAX_BUCKETS: Final = 64
#: Parameters of the method that vLLM's scheduler calls for each request with drafts to verify.
_TOLD: Final = (
    *("spec_decoding_stats", "num_draft_tokens", "num_accepted_tokens", "num_invalid_spec_tokens", "request_id"),
)
_Law = tuple[str | None, int | None]
_Round = tuple[str, int, int]  # request, drafts, accepted ones


class CountingUnsupportedError(Exception):
    """The scheduler of this vLLM is another than the one that was read; the message says what differs."""


@dataclass(slots=True)
class _Bucket:
    drafted: int = 0
    emitted: int = 0
    #: Rounds by how many drafts they accepted.
    accepted: Counter[int] = field(default_factory=Counter)
    #: Tokens emitted and rounds of each prompt; None: there were too many.
    by_prompt: dict[str, list[int]] | None = field(default_factory=dict)
    #: Requests that ended in a step that was verified so, and those that were left after the last such step.
    finished: int = 0
    running: int = 0

    def counts(self) -> Counts:
        table = dict(self.accepted)
        deepest = max(table, default=0)
        return Counts(
            rounds=sum(table.values()),
            drafted_tokens=self.drafted,
            accepted_tokens=sum(length * rounds for length, rounds in table.items()),
            accepted_per_position=tuple(
                sum(rounds for length, rounds in table.items() if length > position) for position in range(deepest)
            ),
            emitted_tokens=self.emitted,
            by_prompt={prompt: (tokens, rounds) for prompt, (tokens, rounds) in (self.by_prompt or {}).items()},
            finished_requests=self.finished,
            running_requests=self.running,
        )

    def add(self, prompts: Iterable[tuple[str | None, int]]) -> None:
        """Rounds of prompts: the tokens that each emitted. None: the prompt is not known."""
        found = self.by_prompt
        if found is None:
            return
        for prompt, emitted in prompts:
            if prompt is None:
                continue
            if (of := found.get(prompt)) is None:
                of = found[prompt] = [0, 0]
            of[0] += emitted
            of[1] += 1
        if len(found) > COUNTED_PROMPTS:
            self.by_prompt = None


class RoundBooks:
    """Rounds of one engine by drafter and policy version. `add` and `tell` are called by one thread, `read` by any."""

    def __init__(self) -> None:
        self._buckets: dict[_Law, _Bucket] = {}
        self._gone = Counts()  # sum of the buckets that were dropped beyond the bound
        self._reading = threading.Lock()  # for both: `read` must not see a bucket twice, or miss it

    def add(
        self, law: _Law, drafted: int, accepted: Iterable[int], emitted: Sequence[int], prompts: Iterable[str | None]
    ) -> None:
        """Rounds that this drafter and this policy have made: drafts of all, and of each round drafts that were
        accepted, tokens that were emitted, and the prompt.
        """
        with self._reading:
            bucket = self._buckets.pop(law, None)
            if bucket is None:
                while len(self._buckets) >= _MAX_BUCKETS:
                    self._gone += replace(self._buckets.pop(next(iter(self._buckets))).counts(), by_prompt={})
                bucket = _Bucket()
            self._buckets[law] = bucket  # last in order: most recently counted
            bucket.drafted += drafted
            bucket.accepted.update(accepted)
            bucket.emitted += sum(emitted)
            bucket.add(zip(prompts, emitted, strict=True))

    def tell(self, law: _Law, finished: int, running: int) -> None:
        """Requests that have ended since the last call, and those that run now."""
        with self._reading:
            if (bucket := self._buckets.get(law)) is not None:
                bucket.finished += finished
                bucket.running = running

    def read(self, policy: int | None) -> Snapshot:
        """Cumulative counts of each (drafter version, policy version). `policy`: the version that serves now."""
        with self._reading:
            exact = [(drafter, version, bucket.counts()) for (drafter, version), bucket in self._buckets.items()]
            gone = self._gone
        return Snapshot.of_exact(tuple(exact), gone, policy)


class RoundCounter:
    """Counts the rounds of one scheduler. `serving` is the drafter and the policy of the steps from now on."""

    def __init__(self, scheduler: Any) -> None:
        self.serving: _Law = (None, None)
        #: A fault of ours has ended the counting; the scheduler's methods pass through.
        self.failed = False
        self._books = RoundBooks()
        self._laws: dict[int, _Law] = {}  # of the steps under way, by their scheduler output
        #: Request -> drafter of its drafts, while some are of an older one; None: all are of the present one.
        self._makers: dict[str, str | None] | None = None
        self._step: list[_Round] = []
        self._prompts: dict[str, str | None] = {}  # request -> its prompt, as it is counted; None: not known
        self._law: _Law = self.serving
        self._scheduler = scheduler
        self._wrap(scheduler)

    def serve(self, drafter: str | None, policy: int | None) -> None:
        """The drafter and the policy from the next step on."""
        before, self.serving = self.serving[0], (drafter, policy)
        if before != drafter and self._makers is None:
            self._makers = dict.fromkeys(self._scheduler.requests, before)

    def read(self) -> Snapshot:
        """Cumulative counts of each (drafter version, policy version). Any thread."""
        return self._books.read(self.serving[1])

    # --- called in the scheduler
    def _wrap(self, scheduler: Any) -> None:
        found = tuple(inspect.signature(scheduler.make_spec_decoding_stats).parameters)
        if found != _TOLD:
            raise CountingUnsupportedError(
                f"make_spec_decoding_stats takes {', '.join(found)}; the counts know {KNOWN_RELEASES}, where it "
                f"takes {', '.join(_TOLD)}"
            )
        told, schedule, update = scheduler.make_spec_decoding_stats, scheduler.schedule, scheduler.update_from_output
        prompts, append = self._prompts, self._step.append

        def counted_schedule(*args: Any, **kwargs: Any) -> Any:
            output = schedule(*args, **kwargs)
            self._laws[id(output)] = self.serving
            return output

        def counted(
            spec_decoding_stats: Any,
            num_draft_tokens: int,
            num_accepted_tokens: int,
            num_invalid_spec_tokens: dict[str, int] | None,
            request_id: str,
        ) -> Any:
            # Called for each request of each step, hundreds of times between two forwards: `_end` does what can wait.
            drafted = num_draft_tokens
            if (num_invalid_spec_tokens or request_id not in prompts) and not self.failed:
                with self._guarded():
                    drafted -= (num_invalid_spec_tokens or {}).get(request_id, 0)
                    if request_id not in prompts:  # now: a request that ends in this step is not there after it
                        request = self._scheduler.requests.get(request_id)
                        prompts[request_id] = counted_prompt(getattr(request, "prompt_token_ids", None))
            append((request_id, drafted, num_accepted_tokens))
            return told(spec_decoding_stats, num_draft_tokens, num_accepted_tokens, num_invalid_spec_tokens, request_id)

        def counted_update(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            self._law = self._laws.pop(id(scheduler_output), self.serving)
            self._step.clear()  # of an update that raised
            outputs = update(scheduler_output, *args, **kwargs)
            if not self.failed:
                with self._guarded():
                    self._end(scheduler_output, outputs)
            return outputs

        scheduler.make_spec_decoding_stats = counted
        scheduler.schedule = counted_schedule
        scheduler.update_from_output = counted_update

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """A fault of ours ends the counting, with a line in the log: an exception here would end the engine."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - the engine must not feel this
            self.failed = True
            log.warning("draftalign: rounds are no longer counted in this engine: %r", error)

    def _end(self, scheduler_output: Any, outputs: dict[int, Any]) -> None:
        drafter, policy = self._law
        if self._step:
            emitted = {one.request_id: len(one.new_token_ids) for batch in outputs.values() for one in batch.outputs}
            if self._makers is None:
                self._book((drafter, policy), self._step, emitted)
            else:
                by_maker: dict[str | None, list[_Round]] = {}
                for round_ in self._step:
                    by_maker.setdefault(self._makers.get(round_[0], drafter), []).append(round_)
                for maker, rounds in by_maker.items():
                    self._book((maker, policy), rounds, emitted)
            requests = self._scheduler.requests  # those that wait too, thousands: what is walked is `_prompts`
            ended = [one for one in self._prompts if one not in requests]
            for request in ended:
                del self._prompts[request]
            self._books.tell((drafter, policy), len(ended), len(self._prompts))
            self._step.clear()
        if self._makers is not None:
            self._makers |= dict.fromkeys(scheduler_output.num_scheduled_tokens, drafter)
            requests = self._scheduler.requests
            self._makers = {request: maker for request, maker in self._makers.items() if request in requests}
            if all(maker == self.serving[0] for maker in self._makers.values()):
                self._makers = None

    def _book(self, law: _Law, rounds: Sequence[_Round], emitted: Mapping[str, int]) -> None:
        requests, drafted, accepted = zip(*rounds, strict=True)
        tokens = [emitted.get(request, 0) for request in requests]
        self._books.add(law, sum(drafted), accepted, tokens, map(self._prompts.get, requests))


def counted_prompt(tokens: Sequence[int] | None) -> str | None:
    """How a request's prompt is counted; None where its tokens are not there, or are none that a rollout may hold."""
    try:
        return None if tokens is None else prompt_hash(tokens)[:COUNTED_DIGITS]
    except (OverflowError, TypeError, ValueError):
        return None
