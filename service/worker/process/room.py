"""Which runs have nothing to do, so that they may be closed where another needs the memory, and when each is opened
again.

A run that is open and idle keeps its memory as long as nobody needs it: to open it again takes seconds.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from redis import Redis

from service.storage.layout import Layout
from service.storage.queue.keys import Keys, text
from service.storage.reports import Store
from service.storage.runs import untouched
from service.worker.checkpoint import WorkerCheckpoint


@dataclass(frozen=True, slots=True)
class Closed:
    """What a run had when it was closed for others, or not opened: it is opened for what comes beside that."""

    entries: frozenset[str]  # of its queue, which wait for more (while the draft vocabulary is gathered)
    heeded: Mapping[str, str]  # what people had asked of its drift alarm


class Room:
    """What the runs of one worker have to do."""

    def __init__(self, redis: Redis, layout: Layout) -> None:
        self._redis: Any = redis
        self._layout = layout

    def has_work(self, run: str, held: Collection[str] = ()) -> bool:
        """Whether entries wait in its queue beside those that are in hand."""
        queue = Keys(run).queue
        newest = self._redis.xrevrange(queue, count=1)
        return bool(newest) and (text(newest[0][0]) not in held or self._redis.xlen(queue) > len(held))

    def needs(self, run: str) -> bool:
        """Whether opening a run is urgent: it has work, or was never begun, and its first drafter is to be served."""
        return self.has_work(run) or untouched(self._layout, run)

    def closed(self, run: str) -> Closed:
        """A run that there was no memory to open, and that has nothing to do: what people asked waits for a batch."""
        return Closed(frozenset(), Store(self._redis, run).drift_requests())

    def spared(self, run: str) -> Closed:
        """A run that is not opened because it has nothing to do, unless people asked what its checkpoint lacks."""
        newest = WorkerCheckpoint(self._layout.worker(run)).newest()
        state = {} if newest is None else json.loads((newest / "state.json").read_text())
        return Closed(frozenset(), state.get("drift_heeded", {}))

    def is_called(self, run: str, closed: Closed) -> bool:
        """Whether something came for a run since it was closed."""
        asked = Store(self._redis, run).drift_requests()
        return self.has_work(run, closed.entries) or any(closed.heeded.get(what) != asked[what] for what in asked)
