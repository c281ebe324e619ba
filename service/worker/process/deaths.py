"""Runs that are set aside, because worker processes died while they opened them or worked on them.

A process that is killed, for memory say, catches no exception. So a worker notes in Redis that it begins, and takes the
note back when that has ended, well or by an error. Without notes the next process would do the same again and die too,
and no other run would ever be served. `RunWorker` notes its work; the opening is noted here.
"""

from __future__ import annotations

import time

from redis import Redis

from service.monitor.records import WorkerGauges
from service.storage.queue.deliveries import MAX_DELIVERIES
from service.storage.reports.store import Store

#: Deaths of the process while it opened a run, after which the run is set aside.
_DEATHS = 3
#: The same for deaths at work on it, without a turn between them that went well: a batch alone is dead after one less.
_DEATHS_AT_WORK = MAX_DELIVERIES + 1
#: A run is set aside for this time, and twice as long after each further death: each try interrupts all other runs.
_DIED_SECONDS = 20.0
_DIED_MOST_SECONDS = 86_400.0


class Deaths:
    """The notes on the runs of one worker."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis
        self._opening: set[str] = set()  # this very process began to open these, and has not noted the end: no death

    def happened(self, run: str, file: tuple[int, int]) -> bool:
        """Whether a process died while it opened this run or worked on it, and none has done that well since."""
        store = Store(self._redis, run)
        opening = run not in self._opening and store.begun("opening", file)[0] > 0
        return opening or store.begun("working", file)[0] > 0

    def begin(self, run: str, file: tuple[int, int]) -> tuple[float, str] | None:
        """Note that the run is being opened. If it is set aside instead: returns for how many seconds, and why.

        `file`: of the run's target.
        """
        store = Store(self._redis, run)
        deaths, since = store.begun("opening", file)
        if run in self._opening:
            deaths, aside = max(deaths - 1, 0), None  # Redis went away meanwhile, and this process lives
        else:
            aside = _set_aside(run, "opened", deaths, since, _DEATHS)
        aside = aside or _set_aside(run, "worked on", *store.begun("working", file), _DEATHS_AT_WORK)
        if aside is None:
            store.begin("opening", file, deaths + 1)
            self._opening.add(run)
        else:
            store.set_worker(WorkerGauges(refused=file))  # so that the next PUT replaces the file
        return aside

    def end(self, run: str) -> None:
        """Note that the opening has ended."""
        Store(self._redis, run).end("opening")
        self._opening.discard(run)

    def forget(self, run: str) -> None:
        """Forget how often processes died: the run is tried at once."""
        Store(self._redis, run).end("opening", "working")


def _set_aside(run: str, done: str, deaths: int, since: float, most: int) -> tuple[float, str] | None:
    """For how many seconds and why a run is set aside at which processes died `deaths` times, the last one at `since`.

    None: it is not, after less than `most` deaths or when the time is over.
    """
    pause = min(_DIED_SECONDS * 2.0 ** min(deaths - most, 20), _DIED_MOST_SECONDS)
    seconds = since + pause - time.time()
    if deaths < most or not 0 < seconds <= 2 * pause:  # later: a clock was set back since
        return None
    return min(seconds, pause), (
        f"the worker died {deaths} times while it {done} this run (memory?). It is tried again {pause:.0f} s after"
        f" the last time; at once after another PUT /runs/{run} with a smaller drafter, or once it was paused and"
        " made active again"
    )
