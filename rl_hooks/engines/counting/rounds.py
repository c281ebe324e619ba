"""Verification rounds of one engine, by the drafter version and the policy version that made them."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from rl_hooks.engines.counting.counters import Counts, Snapshot
from rl_hooks.wire import COUNTED_DIGITS, COUNTED_PROMPTS, prompt_hash

_MAX_BUCKETS: Final = 64
#: The drafter and the policy version of a round; None: not known.
Law = tuple[str | None, int | None]


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
        self._buckets: dict[Law, _Bucket] = {}
        self._gone = Counts()  # sum of the buckets that were dropped beyond the bound
        self._reading = threading.Lock()  # for both: `read` must not see a bucket twice, or miss it

    def add(
        self, law: Law, drafted: int, accepted: Iterable[int], emitted: Sequence[int], prompts: Iterable[str | None]
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

    def tell(self, law: Law, finished: int, running: int) -> None:
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


def counted_prompt(tokens: Sequence[int] | None) -> str | None:
    """How a request's prompt is counted; None where its tokens are not there, or are none that a rollout may hold."""
    try:
        return None if tokens is None else prompt_hash(tokens)[:COUNTED_DIGITS]
    except (OverflowError, TypeError, ValueError):
        return None
