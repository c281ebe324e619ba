"""Makes memory for runs that have work: closes idle runs for them, and opens those again when something comes.

An idle run keeps its memory as long as no other run needs it, because opening it again takes seconds.
"""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any, Final

from redis import Redis

from drafter.training.ranks import Orders, current
from service.memory import return_freed_memory
from service.storage.layout import FileId, Layout
from service.storage.queue.keys import Keys, text
from service.storage.reports.store import Store
from service.storage.runs import untouched
from service.worker.checkpoint import WorkerCheckpoint
from service.worker.process.runs import Closed, Run, served

log = logging.getLogger("draftalign.worker")

#: After the last try that `_may_close_for` allows a run, none is closed for it for this time, unless it has worked.
_CLOSES_NONE_SECONDS: Final = 3600.0


class Room:
    """The memory of one worker's runs: which runs are idle, and closed where another one needs their memory.

    `sparing`: a process died at work, so runs that have nothing to do are not opened. `put_off`: runs without work,
    which are opened in this order, one a turn.
    """

    def __init__(
        self,
        redis: Redis,
        layout: Layout,
        runs: Mapping[str, Run],
        lock: threading.Lock,
        checkpoint_and_close: Callable[[str], bool],
    ) -> None:
        """`lock`: the heartbeat's. `checkpoint_and_close`: returns whether the checkpoint was written."""
        self._redis: Any = redis
        self._layout, self._runs, self._lock, self._checkpoint_and_close = layout, runs, lock, checkpoint_and_close
        self._orders = Orders(current())
        self._to_close = 0  # idle runs, before the next turn
        self.put_off: list[str] = []
        self.sparing = False

    def send_open_runs(self) -> None:
        """Send the ranks that help with training the list of open runs. They hold these, and no others."""
        self._orders.stand({"runs": sorted(served(self._runs))})

    # --- what a run has to do
    def _has_work(self, run: str, held: Collection[str] = ()) -> bool:
        """Whether its queue has entries besides `held`."""
        queue = Keys(run).queue
        newest = self._redis.xrevrange(queue, count=1)
        return bool(newest) and (text(newest[0][0]) not in held or self._redis.xlen(queue) > len(held))

    def others_wait(self, run: str) -> bool:
        """Whether another open run has work while this one is worked on."""
        others = ((other, worker.inbox) for other, worker in served(self._runs).items() if other != run)
        return any(self._has_work(other, {*inbox.held, *inbox.put_off}) for other, inbox in others)

    def needs(self, run: str) -> bool:
        """Whether opening a run is urgent: it has work, or was never begun and does not serve its first drafter yet."""
        return self._has_work(run) or untouched(self._layout, run)

    def closed(self, run: str) -> Closed:
        """The note of a run without work for which there was not memory enough to open it.

        What people have asked of its drift monitor so far counts as heeded: a batch or a later request opens it.
        """
        return Closed(frozenset(), Store(self._redis, run).drift_requests())

    def _spared(self, run: str) -> Closed:
        """The note of a run that is not opened because it has no work.

        Its checkpoint says which requests of people it has heeded. A later request opens it.
        """
        newest = WorkerCheckpoint(self._layout, run).newest()
        state: dict[str, Any] = {}
        with contextlib.suppress(ValueError):  # a damaged checkpoint is reported when the run is opened
            state = {} if newest is None else json.loads((newest / "state.json").read_bytes())
        return Closed(frozenset(), state.get("drift_heeded", {}))

    def _is_called(self, run: str, closed: Closed) -> bool:
        """Whether a batch or a request came for a run since it was closed."""
        asked = Store(self._redis, run).drift_requests()
        return self._has_work(run, closed.entries) or any(closed.heeded.get(what) != asked[what] for what in asked)

    # --- runs without work, one a turn
    def puts_off(self, run: str, state: Run, file: FileId) -> bool:
        """Put a run off that has no work, until its turn or a batch comes. Returns whether it was put off."""
        if self.needs(run):
            return False
        state.closed, state.file = self._spared(run), file  # so that requests of people open it, too
        self.put_off.append(run)
        return True

    def next_idle(self) -> str | None:
        """Take the next run that was put off, and let it be opened. None: all have had their turn."""
        while self.put_off:
            run = self.put_off.pop(0)
            state = self._runs.get(run)
            if state is not None and state.closed is not None:  # not deleted, and not opened for a batch
                self._open_again(state)
                return run
        return None

    # --- who gives memory up, and for whom
    def close_idle_for(self, run: str) -> bool:
        """Ask that idle runs be closed before the next turn, for a run that lacks memory. Returns whether they will."""
        state = self._runs[run]
        if not self._may_close_for(run):
            return False
        self._to_close = max(self._to_close, 2**state.short)
        state.short, state.short_at, state.retry_at = state.short + 1, time.monotonic(), 0.0
        return True

    def close_wanted(self) -> bool:
        """Close idle runs if `close_idle_for` asked for it. Returns whether it did.

        It is called after the memory error is handled: until then the exception holds the failed run's memory.
        """
        if not self._to_close:
            return False
        self.close_idle(self._to_close)
        self._to_close = 0
        return True

    def _may_close_for(self, run: str) -> bool:
        """Whether idle runs may be closed for a run for which memory ran out.

        One is closed at the first failure, then 2, 4, ..., up to as many as there are: beside a thousand small runs the
        run is tried ten times. After that none is closed until the run has worked, its target's file has changed, or an
        hour has passed. Else a run that never fits would close again and again those that have a batch now and then.
        """
        state = self._runs[run]
        if time.monotonic() - state.short_at > _CLOSES_NONE_SECONDS:
            state.short = 0
        return 2**state.short <= len(self._runs) and any(other != run for other in self.idle())

    def closes_for_memory(self, run: str) -> bool:
        """Whether a run is closed when memory runs out for one of its batches.

        If so, idle runs are closed for it, or it reports that there is no memory. After that report only the batch is
        put off, and the run's other batches do not wait for it.
        """
        return self._may_close_for(run) or not self._runs[run].failures

    def idle(self) -> list[str]:
        """The open runs that have no work now. The first one has worked least recently.

        Runs with batches that are put off come last: such a run is opened again soon to look for the batch.
        """
        inboxes = {run: worker.inbox for run, worker in served(self._runs).items()}
        waits = {run: inbox.put_off for run, inbox in inboxes.items()}
        idle = [run for run, inbox in inboxes.items() if not self._has_work(run, {*inbox.held, *waits[run]})]
        return sorted(idle, key=lambda run: (bool(waits[run]), self._runs[run].worked_at))

    def close_idle(self, most: int | None = None) -> None:
        """Close up to `most` idle runs, each after a checkpoint, and return their memory. None: all of them.

        Each is opened when something comes for it. Runs that were put off lose their turn: they would take memory
        without having work.
        """
        self.put_off.clear()
        for run in self.idle()[:most]:
            log.info("run %s is idle, and closed until a batch comes: another one needs the memory", run)
            self._close(run)
        gc.collect()
        return_freed_memory()
        self.send_open_runs()  # they give their memory up too

    def _close(self, run: str) -> None:
        state = self._runs[run]
        worker = state.worker
        if worker is None:
            return
        ended = self._checkpoint_and_close(run)
        entries = worker.inbox.held if ended else ()  # held entries wait for more; without a checkpoint all come again
        state.closed = Closed(frozenset(entries), worker.learner.journal.drift.heeded)

    def stays_closed(self, run: str, state: Run, file: FileId) -> bool:
        """Whether a run that is not open stays so, because it has no work and others may need the memory."""
        if state.closed is None and self.sparing and not self.needs(run):
            state.closed, state.file = self._spared(run), file
        if state.closed is None:
            return False
        if state.file == file and not self._is_called(run, state.closed):
            return True
        self._open_again(state)
        return False

    def _open_again(self, state: Run) -> None:
        with self._lock:  # else a heartbeat may give back the lease that is taken next
            state.closed = None
