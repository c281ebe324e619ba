"""Which runs this worker takes and which it leaves to other workers, where several share the runs of one service.

Each is to have as many runs as the others. A worker that has its share takes a further run only where no other worker
has served that for a while. One that has two runs more than another hands one over that has work: it closes that run
and gives its lease back.

Workers need not have the same memory. One that has none for a run leaves it to the others first; and a run that came
back to who handed it over stays there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from redis import Redis

from service.storage.queue.lease import Leases
from service.storage.reports.store import Store

#: A worker at a turn that takes long looks for runs at its end only. Until then it says that it has so many more, and
#: nobody hands it one.
BUSY = 1_000_000
#: A worker that has its share of the runs takes one more only if nobody else has for so long.
_LEFT_SECONDS = 30.0
#: Between two runs that are handed to other workers: each begins with a checkpoint that is read. And how long none is
#: handed over after one that nobody took: whoever has fewer cannot open it.
_HAND_OVER_SECONDS = 5.0
_UNWANTED_SECONDS = 600.0
#: A run for which a worker had no memory, or that came back from there, is not tried there again for so long.
_REMEMBERED_SECONDS = 3600.0


class Share:
    """The share of one worker. `now` is monotonic; `served`: how many runs this worker has open."""

    def __init__(self, redis: Redis, leases: Leases) -> None:
        self._redis = redis
        self._leases = leases
        self._most = math.inf  # runs that this worker may have
        self._hands_none_before = -math.inf  # monotonic
        self._untaken: str | None = None  # the run that it handed over last, until another worker has taken it
        self._untaken_since = -math.inf
        self._left_since: dict[str, float] = {}  # runs that are left to other workers (monotonic)
        self._lacked_memory: dict[str, float] = {}  # when there was no memory for a run (monotonic)
        self._handed_over: dict[str, float] = {}  # when a run was, while the others are the same (monotonic)
        self._known: frozenset[str] = frozenset()  # the others

    def look(self, served: int, wanted: int, now: float) -> bool:
        """Ask how many runs the others have; returns whether to hand one over. `wanted`: runs to be worked on."""
        others = self._leases.others(served)
        if self._known != others.keys():  # one that came may have more memory
            self._known = frozenset(others)
            self._handed_over.clear()
        self._most = math.ceil(wanted / (1 + len(others))) if others else math.inf
        fewest = min(others.values(), default=BUSY)
        if served <= fewest < BUSY:  # no other worker has fewer, so none takes what was handed over
            self._untaken = None
        return (
            served > 1 + fewest
            and self._untaken is None
            and now >= self._hands_none_before
            and self._is_to_hand_over(others, served)
        )

    def _is_to_hand_over(self, others: Mapping[str, int], served: int) -> bool:
        """Whether this worker is among those that hand a run over now.

        `lacking` counts the runs that workers below their share still need. So many workers hand one run over each:
        those that serve most. Of workers that serve equally many, names decide.
        """
        share = (served + sum(n for n in others.values() if n < BUSY)) // (1 + len(others))
        lacking = sum(max(0, share - n) for n in others.values())
        before = sum((-n, name) < (-served, self._leases.holder) for name, n in others.items() if n < BUSY)
        return before < max(1, lacking)

    def leave(self, run: str, now: float) -> None:
        """Note that there was no memory for a run: others may try it first."""
        self._lacked_memory[run] = now

    def may_hand_over(self, run: str, now: float) -> bool:
        """Whether this run, which is open here, did not come back from another worker."""
        return now - self._handed_over.get(run, -math.inf) > _REMEMBERED_SECONDS

    def note_handed_over(self, run: str, now: float) -> None:
        """Note that this run is handed over. The next one waits until another worker has taken it."""
        self._handed_over[run] = self._untaken_since = now
        self._untaken = run
        self._hands_none_before = now + _HAND_OVER_SECONDS
        self._left_since[run] = now

    def may_take(self, run: str, served: int, now: float) -> bool:
        """Whether this worker has less than its share of the runs, or no other one serves this run."""
        lacked_memory = now - self._lacked_memory.get(run, -math.inf) < _REMEMBERED_SECONDS
        if math.isinf(self._most) or (served < self._most and run != self._untaken and not lacked_memory):
            self.forget(run)
            return True
        anothers, since = self._leases.is_anothers(run), self._note_left(run, now)
        if run == self._untaken and (anothers or since > self._untaken_since):  # it may have closed it since
            self._untaken = None
        if anothers or now - since < (2 * _LEFT_SECONDS if lacked_memory else _LEFT_SECONDS):
            return False
        if run == self._untaken:
            self._hands_none_before = now + _UNWANTED_SECONDS
        self.forget(run)
        return True

    def _note_left(self, run: str, now: float) -> float:
        """Since when nobody has served this run, as far as this worker knows.

        A lease alone says nothing: its holder may be unable to open the run.
        """
        since = self._left_since.get(run, now)
        ago = Store(self._redis, run).served_ago()
        if ago is not None and ago >= 0.0:  # else from before the clock of Redis was set back
            since = max(since, now - ago)
        self._left_since[run] = since
        return since

    def forget(self, run: str) -> None:
        """Leave the run to other workers no more: this one takes it, or nobody is to work on it."""
        self._left_since.pop(run, None)
        self._lacked_memory.pop(run, None)
        if run == self._untaken:
            self._untaken = None
