"""What `/metrics` tells of all scores and counts of a run in which nothing happens, in a few records.

`Series` keeps something of each batch and policy version, so that what comes next costs little. Nothing comes to a run
that is archived, or that ended long ago: its records are read once, and what is told of them is kept until one changes.
It is the same to the bit (`tests/service/reading/test_series.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Sequence
from typing import Final, NamedTuple

from service.monitor.alpha import attempts
from service.monitor.counts import sound
from service.monitor.current import condensed
from service.monitor.drift.cause import engine_change
from service.monitor.metrics import RunSnapshot
from service.monitor.records import AcceptanceRecord, DrafterSums, Estimate, ScoreRecord, read
from service.reading.series import ScoredBatch, ServedSums, read_count
from service.storage.reports.store import AsyncStore, Change, Changes

#: Without a score and without a count for this time, a run is quiet.
QUIET_SECONDS: Final = 3600.0


class Told(NamedTuple):
    """`acceptances`: as `condensed` has them. `engine`: what live over replay α did; None where nothing says so."""

    acceptances: list[AcceptanceRecord]
    engine: Estimate | None


class _Kept(NamedTuple):
    """What was told, of which records (`Changes`), and beside what of a snapshot."""

    cursor: str
    sizes: tuple[int, int]
    sick: frozenset[tuple[str, str | None]]
    moved: bool
    scores: Sequence[ScoreRecord]
    told: Told


class Quiet:
    """One run's."""

    def __init__(self, store: AsyncStore, max_lag: int | None) -> None:
        self._store, self._max_lag = store, max_lag
        self._kept: _Kept | None = None

    async def read(self, snapshot: RunSnapshot, newest: Changes) -> Told | None:
        """Tell it, beside the rest of a snapshot; None where something happens: then `Series` is to be read.

        `newest`: cursor and sizes when the snapshot was taken.
        """
        sick, moved = frozenset(snapshot.watch.sick), snapshot.worker.drift_change is not None
        kept, self._kept = self._kept, None
        if kept is not None and kept.scores is snapshot.scores:
            beside = kept.cursor, kept.sizes, kept.sick, kept.moved
            if beside == (newest.cursor, newest.sizes, sick, moved):
                self._kept = kept
                return kept.told
        cursor = newest.cursor
        last = int(cursor.partition("-")[0]) / 1000.0
        if snapshot.state.state != "archived" and snapshot.now - last < QUIET_SECONDS:
            return None
        told = await self._compute(snapshot, sick, moved)
        found = await self._store.changes(cursor)
        if found is None or found.changed:
            return None
        self._kept = _Kept(cursor, found.sizes, sick, moved, snapshot.scores, told)
        return told

    async def _compute(self, snapshot: RunSnapshot, sick: Collection[tuple[str, str | None]], moved: bool) -> Told:
        """`moved`: whether the worker has told a change of α, of which the engines' part is wanted."""
        records: dict[str, AcceptanceRecord | None] = {}
        async for piece in self._store.all_records("al"):
            await asyncio.to_thread(_put_counts, records, piece)
        counts = [record for record in records.values() if record is not None]
        policies = {record.policy_version for record in counts if record.ours} if moved else set()
        batches: dict[str, tuple[ScoredBatch, DrafterSums | None]] = {}
        returns = await self._store.returns()
        if policies - {None}:
            async for piece in self._store.all_records("s"):
                await asyncio.to_thread(_put_batches, batches, piece, policies)

        def compute() -> Told:
            last = attempts((batch for batch, _ in batches.values()), self._max_lag, returns)[-1]
            replayed = [ServedSums(batch.policy_version or 0, batches[batch.batch_id][1]) for batch in last.scores]
            engine = engine_change(replayed, filter(last.counted, sound(counts, sick)))
            return Told(condensed(counts, sick, snapshot.newest, snapshot.now), engine)

        return await asyncio.to_thread(compute)


def _put_counts(records: dict[str, AcceptanceRecord | None], piece: Iterable[Change]) -> None:
    for kind, name, value in piece:
        records[kind + name] = None if value is None else read_count(kind + name, value)


def _put_batches(
    batches: dict[str, tuple[ScoredBatch, DrafterSums | None]],
    piece: Iterable[Change],
    policies: Collection[int | None],
) -> None:
    """Take batches in, with the served drafter's replay on those of these policy versions."""
    for _, batch_id, value in piece:
        record = None if value is None else read(ScoreRecord, value)
        if record is not None:
            served = record.sums("served") if record.policy_version in policies else None
            batches[batch_id] = ScoredBatch.of(batch_id, record), served
