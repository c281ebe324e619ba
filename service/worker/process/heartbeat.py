"""The worker's sign of life, from a thread of its own: a training step, or the last save, may take longer than a lease.

It renews the leases of the open runs, the holds on their entries, and says that somebody looks after the others.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping

from redis import Redis
from redis.exceptions import RedisError

from service.storage.layout import Layout, is_there
from service.storage.queue.deliveries import RolloutQueue
from service.storage.queue.lease import Leases
from service.storage.reports.store import Store
from service.worker.inbox import CONSUMER
from service.worker.loop import RunWorker
from service.worker.process.runs import Run

log = logging.getLogger("draftalign.worker")

_BEAT_SECONDS = 3.0


class Heartbeat:
    """The heartbeat of all runs of a worker.

    `lock` is held while a run is given back, opened again or let go, and during each run's heartbeat. Else a heartbeat
    would take a lease again that was just given back.
    """

    def __init__(
        self,
        redis: Redis,
        layout: Layout,
        leases: Leases,
        runs: Mapping[str, Run],
        has: Callable[[], int],
        stopping: Callable[[], bool],
    ) -> None:
        """`has`: how many runs the worker says that it has; `stopping`: whether it is to end."""
        self.lock = threading.Lock()
        self._redis, self._layout, self._leases = redis, layout, leases
        self._runs, self._has, self._stopping = runs, has, stopping
        self._opening: str | None = None  # the run that is being opened, which may take longer than a lease
        self._told: set[type[Exception]] = set()  # kinds of failures that were logged
        self._ended = False

    @contextlib.contextmanager
    def beating(self) -> Iterator[threading.Thread]:
        """Beat meanwhile, in that thread. It ends with the next beat, also where an exception ends the worker."""
        thread = threading.Thread(target=self._work, name="heartbeat", daemon=True)
        thread.start()
        try:
            yield thread
        finally:
            self._ended = True

    @contextlib.contextmanager
    def opening(self, run: str) -> Iterator[None]:
        """Renew the lease of a run that is opened meanwhile."""
        self._opening = run
        try:
            yield
        finally:
            self._opening = None

    def give_back(self, run: str) -> None:
        """Serve the run no more, and give its lease back."""
        with self.lock:
            self._runs[run].worker = None
            self._opening = None if self._opening == run else self._opening
            self._leases.give_back(run)

    def _work(self) -> None:
        """Beat until the worker ends, whatever fails: without beats every lease would expire while it works on."""
        took = 0.0
        while not self._ended:
            time.sleep(max(0.0, _BEAT_SECONDS - took))  # of some hundred runs, a beat itself takes seconds
            began = time.monotonic()
            try:
                self.beat()
            except Exception as error:  # noqa: BLE001 - or every lease would expire
                self._log("a heartbeat failed", error)
            took = time.monotonic() - began

    def beat(self) -> None:
        """Beat once."""
        if not self._stopping():
            with contextlib.suppress(RedisError):
                self._leases.others(self._has())
            with self.lock, contextlib.suppress(RedisError):
                if self._opening is not None:
                    self._leases.hold(self._opening)
        runs = list(self._runs.items())  # they are opened and closed meanwhile
        for run, state in sorted(runs, key=lambda one: one[1].worker is None):
            try:
                if (worker := state.worker) is not None:
                    self._beat_open(run, worker)
                self._beat_closed(run, state)
                if worker is None and state.retry_at > time.monotonic():
                    self._beat_refused(run)
            except RedisError as error:
                log.debug("no heartbeat for %s: %s", run, error)
            except Exception as error:  # noqa: BLE001 - one run's trouble is not the others'
                self._log(f"no heartbeat for run {run}", error)

    def _beat_open(self, run: str, worker: RunWorker) -> None:
        with self.lock:
            state = self._runs.get(run)
            if state is None or state.worker is not worker:
                return
            if not self._leases.hold(run):
                state.lost = True
                return
            RolloutQueue(self._redis, run).heartbeat(CONSUMER, worker.inbox.held)
            Store(self._redis, run).set_worker()

    def _beat_closed(self, run: str, state: Run) -> None:
        """Say that somebody looks after a run which is closed until a batch comes for it."""
        with self.lock:
            known = self._runs.get(run) is state and state.closed is not None
            if not known or self._stopping() or not self._leases.hold(run):
                return
            try:
                if is_there(self._layout.run_json(run)):  # nothing is written of one that is being deleted
                    Store(self._redis, run).set_worker()
            finally:
                self._leases.give_back(run)  # though the disk fails: another worker may have it

    def _beat_refused(self, run: str) -> None:
        """Say that somebody looks after a run that is not tried again for now, which may be a day."""
        if not self._stopping() and not self._leases.is_anothers(run) and is_there(self._layout.run_json(run)):
            Store(self._redis, run).set_worker()

    def _log(self, what: str, error: Exception) -> None:
        if type(error) not in self._told:
            self._told.add(type(error))
            log.error("%s (said once for each kind of error)", what, exc_info=error)
