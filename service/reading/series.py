"""The α series of a run, kept up to date: a look costs what has changed since the last one, in Redis and here.

Of a score record its policy version and time are kept, of a policy version its finished point. A policy version of
which anything changed is pooled again, from records that are read back. So a record takes 0.45 kB, with its share of
a point, where its sums took 1.8, and what a look computes is the same as from all records: `service.monitor.alpha`
computes it.

Other processes write too. What they changed is named in a stream, in the transaction that changes it (`book.lua`,
`Store.put_score`; `follow.lua` reads it); if names were forgotten, or a count does not agree, all is read again.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from itertools import chain
from typing import Final, NamedTuple

from pydantic_core import to_json

from service.monitor.alpha import Attempt, attempts, pool_point
from service.monitor.counts import sound
from service.monitor.records import AcceptanceRecord, Arrival, DrafterSums, Return, ScoreRecord, read
from service.reading.deltas import Deltas
from service.storage.reports.engine_counts import live_record
from service.storage.reports.store import AsyncStore, Change, Changes

#: Score records that are in memory at once, or those of one policy version where it has more.
_AT_ONCE: Final = 256
Sick = frozenset[tuple[str, str | None]]


class ScoredBatch(NamedTuple):
    """What is kept of a score record."""

    batch_id: str
    policy_version: int | None
    arrival: Arrival
    created: float
    attempt: int | None

    @classmethod
    def of(cls, batch_id: str, record: ScoreRecord) -> ScoredBatch:
        """Take it from the record."""
        return cls(batch_id, record.policy_version, record.arrival, record.created, record.attempt)


class ServedSums(NamedTuple):
    """The served drafter's replay on all batches of a policy version: all that a cause needs of score records."""

    policy_version: int
    served: DrafterSums | None

    def sums(self, drafter: str) -> DrafterSums | None:
        """Of `served`, the only one that is kept."""
        return self.served if drafter == "served" else None


class _Counts:
    """What engines have counted: the records by kind and name, "a" or "l" and whose."""

    def __init__(self) -> None:
        self._records: dict[str, AcceptanceRecord | None] = {}  # None: cannot be read
        self._names: defaultdict[int | None, dict[str, None]] = defaultdict(dict)  # by policy version

    def put(self, name: str, value: bytes | None) -> list[int | None]:
        """Take a change in; returns the policy versions whose counts it changes."""
        changed = []
        before = self._records.pop(name, None)
        if before is not None:
            names = self._names[before.policy_version]
            del names[name]
            if not names:  # policy versions are without bound
                del self._names[before.policy_version]
            changed.append(before.policy_version)
        if value is None:
            return changed
        record = read_count(name, value)
        self._records[name] = record
        if record is not None:
            self._names[record.policy_version][name] = None
            changed.append(record.policy_version)
        return changed

    def all(self) -> list[AcceptanceRecord]:
        return [record for record in self._records.values() if record is not None]

    def of(self, policy: int) -> list[AcceptanceRecord]:
        return [r for name in self._names.get(policy, ()) if (r := self._records[name]) is not None]

    def policies(self) -> Collection[int | None]:
        return self._names.keys()

    def reports(self) -> int:
        """How many there are but for live sums, read or not."""
        return sum(name[0] == "a" for name in self._records)

    def clear(self) -> None:
        self._records.clear()
        self._names.clear()


class Series:
    """One run's. `refresh` first; what it has then is of that moment. One caller at a time: `Series.lock`.

    `attempt`: the number, from 1, of the trainer's attempt whose points these are; None: the last.
    """

    def __init__(self, store: AsyncStore, max_lag: int | None, attempt: int | None = None) -> None:
        self.lock = asyncio.Lock()
        self.deltas = Deltas()
        self._store, self._max_lag, self._attempt = store, max_lag, attempt
        self._cursor: str | None = None
        self._batches: dict[str, ScoredBatch] = {}
        self._counts = _Counts()
        self._points: dict[int, tuple[bytes, DrafterSums | None]] = {}
        self._stale: set[int] = set()
        self._sick: Sick = frozenset()
        self._attempts: list[Attempt[ScoredBatch]] = attempts(())

    @property
    def attempts(self) -> Sequence[Attempt[ScoredBatch]]:
        """The trainer's attempts, oldest first."""
        return self._attempts

    @property
    def chosen(self) -> Attempt[ScoredBatch]:
        """The attempt whose points these are; the last where there are fewer."""
        return self._attempts[-1 if self._attempt is None else min(self._attempt, len(self._attempts)) - 1]

    @property
    def acceptances(self) -> list[AcceptanceRecord]:
        """All acceptance records, and the live sums."""
        return self._counts.all()

    @property
    def served(self) -> list[ServedSums]:
        """Replay of the served drafter by policy version of the attempt, of those that engines have counted."""
        return [ServedSums(policy, sums) for policy, (_, sums) in sorted(self._points.items()) if sums is not None]

    @property
    def points(self) -> dict[int, bytes]:
        """The points of the attempt as JSON, by policy version in ascending order."""
        return {policy: text for policy, (text, _) in sorted(self._points.items())}

    @property
    def _sizes(self) -> tuple[int, int]:
        return len(self._batches), self._counts.reports()

    async def refresh(self, sick: Collection[tuple[str, str | None]] = (), newest: Changes | None = None) -> int:
        """Catch up; returns how many policy versions were pooled. `sick`: whose counts are no evidence.

        `newest`: cursor and sizes a moment ago: where they are those that are known, nothing is asked.
        """
        if newest is None or (newest.cursor, newest.sizes) != (self._cursor, self._sizes):
            await self._follow()
        if self._sick != (now := frozenset(sick)):
            other, self._sick = self._sick ^ now, now
            known = self._counts.all()
            self._touch(r.policy_version for r in known if (r.reporter, r.drafter_version) in other)
        pooled, scored = 0, defaultdict[int | None, list[str]](list)
        for batch in self.chosen.scores if self._stale else ():
            scored[batch.policy_version].append(batch.batch_id)
        while self._stale:
            some, batch_ids = list[int](), list[str]()
            for policy in sorted(self._stale):
                if some and len(batch_ids) + len(scored[policy]) > _AT_ONCE:
                    break
                some.append(policy)
                batch_ids += scored[policy]
            scores = await self._store.scores_of(batch_ids)
            await asyncio.to_thread(self._pool, some, scores)
            self._stale.difference_update(some)
            pooled += len(some)
        return pooled

    async def _follow(self) -> None:
        found = None if self._cursor is None else await self._store.changes(self._cursor)
        if found is not None:
            moved = await asyncio.to_thread(self._apply, found.changed) if found.changed else False
            if moved:
                await asyncio.to_thread(self._order, await self._store.returns())
            self._cursor = found.cursor  # only now: what failed in between is followed again
            if found.sizes == self._sizes:
                return
        await self._read_all()

    async def _read_all(self) -> None:
        self._cursor, cursor = None, await self._store.newest_change()
        self._touch(chain(self._points, self._counts.policies()))
        self._batches.clear()
        self._counts.clear()
        async for piece in self._store.all_records():
            await asyncio.to_thread(self._apply, piece)
        found = await self._store.changes(cursor)  # while they were read
        if found is not None:
            await asyncio.to_thread(self._apply, found.changed)
        await asyncio.to_thread(self._order, await self._store.returns())
        self._cursor = None if found is None else found.cursor

    def _apply(self, changed: Iterable[Change]) -> bool:
        """Take changes in; returns whether batches are among them."""
        moved = False
        for kind, name, value in changed:
            if kind == "s":
                moved = True
                self._put_score(name, value)
            else:
                self._touch(self._counts.put(kind + name, value))
        return moved

    def _put_score(self, batch_id: str, value: bytes | None) -> None:
        before = self._batches.pop(batch_id, None)
        if before is not None:
            self._touch([before.policy_version])
        if value is not None:
            record = read(ScoreRecord, value) or ScoreRecord()  # one that cannot be read is counted all the same
            self._batches[batch_id] = ScoredBatch.of(batch_id, record)
            self._touch([record.policy_version])

    def _touch(self, policies: Iterable[int | None]) -> None:
        self._stale.update(policy for policy in policies if policy is not None)

    def _order(self, returns: Sequence[Return]) -> None:
        """Tell attempts apart. `returns`: when a trainer went back, and whereto."""
        opened = self.chosen.opened
        self._attempts = attempts(self._batches.values(), self._max_lag, returns)
        if opened != self.chosen.opened:
            self._touch(chain(self._points, self._counts.policies()))

    def _pool(self, policies: Sequence[int], scores: Sequence[ScoreRecord]) -> None:
        """Pool these policy versions again. `scores`: of their batches in the attempt, in order of arrival."""
        found: defaultdict[int | None, list[ScoreRecord]] = defaultdict(list)
        for score in scores:
            found[score.policy_version].append(score)
        for policy in policies:
            self._points.pop(policy, None)
            records = self._counts.of(policy)
            counted = sound([record for record in records if self.chosen.counted(record)], self._sick)
            scored = found[policy]
            if not (scored or counted):
                continue
            text = to_json(pool_point(policy, scored, counted), inf_nan_mode="null")
            sums = [s for score in scored if (s := score.sums("served")) is not None] if counted else []
            self._points[policy] = text, sum(sums, DrafterSums(0.0, 0.0)) if sums else None


def read_count(name: str, value: bytes) -> AcceptanceRecord | None:
    """A record of `Change` "a" or "l", with the kind before its name; None: it cannot be read."""
    if name[0] == "l":
        with contextlib.suppress(ValueError, TypeError):
            rounds, tokens, created = value.split()
            return live_record(name[1:], int(rounds), int(tokens), float(created))
        return None
    record = read(AcceptanceRecord, value)
    if record is None:
        return None
    return replace(  # a few strings in many records; nobody reads the canary, or prompts
        record,
        engine=sys.intern(record.engine),
        method=sys.intern(record.method),
        reporter=None if record.reporter is None else sys.intern(record.reporter),
        drafter_version=None if record.drafter_version is None else sys.intern(record.drafter_version),
        canary=None,
        by_prompt=None,
        withheld=None if record.withheld is None else sys.intern(record.withheld),
    )
