"""The worker's side of queue and store, with the readings that only the API's side has, for tests that block."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from service.monitor.records import AcceptanceRecord, WorkerGauges
from service.storage.queue import deliveries
from service.storage.queue.keys import strings, text
from service.storage.queue.rollout_queue import COUNTERS, counts
from service.storage.reports import store as reports
from service.storage.reports.engine_counts import live_record
from service.storage.reports.summary import gauges


class Depth(NamedTuple):
    """Size of the queue, pending entries included."""

    items: int
    bytes: int


class RolloutQueue(deliveries.RolloutQueue):
    """The worker's queue, and what the API reads of it."""

    def depth(self) -> Depth:
        """Items and bytes in the queue now."""
        counters = self.counters()
        return Depth(counters["items"], counters["bytes"])

    def counters(self) -> dict[str, int]:
        """All counters, zero where nothing was counted yet."""
        values = self._redis.hmget(self._keys.counters, *COUNTERS)
        return counts(values, self._redis.get(self._keys.held))

    def batch(self, batch_id: str) -> dict[str, str] | None:
        """The fate of one batch, or None if it is unknown or was forgotten."""
        return strings(self._redis.hgetall(self._keys.batch(batch_id))) or None

    def dead_letters(self, count: int = 100) -> list[dict[str, str]]:
        """The newest dead letters, newest first."""
        return [strings(fields) for _, fields in self._redis.xrevrange(self._keys.dead, count=count)]


class Store(reports.Store):
    """The worker's store, and what the API reads of it."""

    def acceptances(self) -> list[AcceptanceRecord]:
        """All acceptance records, and the live sums that older ones were added to, read in one transaction."""
        with self._redis.pipeline(transaction=True) as pipe:
            pipe.hgetall(self._keys.acceptance)
            pipe.hgetall(self._keys.live)
            counted, live = pipe.execute()
        sums = {text(name): value for name, value in live.items()}
        return [*reports._known(AcceptanceRecord, counted.values()), *_live_records(sums)]

    def worker(self) -> WorkerGauges:
        """The worker's gauges; unknown before its first sign of life."""
        return gauges(strings(self._redis.hgetall(self._keys.worker)))

    def latest_head(self) -> int | None:
        """Highest policy version whose head was received."""
        value = self._redis.get(self._keys.latest_head)
        return None if value is None else int(value)


def _live_records(table: Mapping[str, bytes]) -> Iterator[AcceptanceRecord]:
    """The live sums over all reporters, as records without a reporter."""
    for name, rounds in table.items():
        identity, _, kind = name.rpartition(":")
        if kind == "rounds":
            created = float(table.get(f"{identity}:created", 0.0))
            yield live_record(identity, int(rounds), int(table.get(f"{identity}:tokens", 0)), created)
