"""Which runs this worker takes and which it leaves to other workers, where several workers share a service's runs.

The aim is that all have equally many runs. A worker that has its share takes one more run only if no other worker has
served that run for a while. A worker that has two runs more than another hands over a run that has work: it closes the
run and gives its lease back.

Workers may have different amounts of memory. A worker without memory for a run leaves it to the others first. If a run
that was handed over comes back, it stays.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from redis import Redis

from service.storage.queue.lease import Leases
from service.storage.reports.store import Store

#: A worker in a long turn looks for runs only at the turn's end. Until then it announces more runs
#: than it has, by this number, so that nobody hands it one.
BUSY = 1_000_000
#: A worker that has its share takes one more run only if no other worker has served that run for this time.
_LEFT_SECONDS = 30.0
#: Least time between two runs that are handed over: the other worker reads a checkpoint for each. After a run that
#: nobody took, none is handed over for `_UNWANTED_SECONDS`: the workers with fewer runs cannot open it.
_HAND_OVER_SECONDS = 5.0
_UNWANTED_SECONDS = 600.0
#: For this time a worker leaves a run to the others first for which it had no memory, and hands over no run that came
#: back.
_REMEMBERED_SECONDS = 3600.0


class Share:
    """The share of one worker. `now`: monotonic time. `served`: how many runs this worker has open."""

    def __init__(self, redis: Redis, leases: Leases) -> None:
        self._redis = redis
        self._leases = leases
        self._most = math.inf  # runs that this worker may have
        self._hands_none_before = -math.inf  # monotonic
        self._untaken: str | None = None  # the run that it handed over last, until another worker has taken it
        self._untaken_since = -math.inf
        self._left_since: dict[str, float] = {}  # runs that are left to other workers (monotonic)
        self._lacked_memory: dict[str, float] = {}  # when there was no memory for a run (monotonic)
        #: When a run was handed over (monotonic); forgotten when other workers come or go.
        self._handed_over: dict[str, float] = {}
        self._known: frozenset[str] = frozenset()  # the others

    def look(self, served: int, wanted: int, now: float) -> bool:
        """Compare with the other workers. Returns whether to hand a run over. `wanted`: runs to serve in all."""
        others = self._leases.others(served)
        if self._known != others.keys():  # a new worker may have more memory
            self._known = frozenset(others)
            self._handed_over.clear()
        self._most = math.ceil(wanted / (1 + len(others))) if others else math.inf
        fewest = min(others.values(), default=BUSY)
        if served <= fewest < BUSY:  # no other worker has fewer runs, so none will take the one handed over
            self._untaken = None
        return (
            served > 1 + fewest
            and self._untaken is None
            and now >= self._hands_none_before
            and self._is_to_hand_over(others, served)
        )

    def _is_to_hand_over(self, others: Mapping[str, int], served: int) -> bool:
        """Whether this worker is among those that hand a run over now.

        `lacking`: how many runs the workers below their share need together. As many workers hand over one run each:
        those that serve most, and of equal ones the first by name.
        """
        share = (served + sum(n for n in others.values() if n < BUSY)) // (1 + len(others))
        lacking = sum(max(0, share - n) for n in others.values())
        before = sum((-n, name) < (-served, self._leases.holder) for name, n in others.items() if n < BUSY)
        return before < max(1, lacking)

    def leave(self, run: str, now: float) -> None:
        """Note that there was no memory for a run, so that others try it first."""
        self._lacked_memory[run] = now

    def may_hand_over(self, run: str, now: float) -> bool:
        """Whether this open run may be handed over: not if it came back after that."""
        return now - self._handed_over.get(run, -math.inf) > _REMEMBERED_SECONDS

    def note_handed_over(self, run: str, now: float) -> None:
        """Note that this run is handed over. No other is, until another worker has taken this one."""
        self._handed_over[run] = self._untaken_since = now
        self._untaken = run
        self._hands_none_before = now + _HAND_OVER_SECONDS
        self._left_since[run] = now

    def may_take(self, run: str, served: int, now: float) -> bool:
        """Whether to take a run: this worker has less than its share, or nobody has served the run for a while."""
        lacked_memory = now - self._lacked_memory.get(run, -math.inf) < _REMEMBERED_SECONDS
        if math.isinf(self._most) or (served < self._most and run != self._untaken and not lacked_memory):
            self.forget(run)
            return True
        anothers, since = self._leases.is_anothers(run), self._note_left(run, now)
        if run == self._untaken and (anothers or since > self._untaken_since):  # taken, and perhaps closed since
            self._untaken = None
        if anothers or now - since < (2 * _LEFT_SECONDS if lacked_memory else _LEFT_SECONDS):
            return False
        if run == self._untaken:
            self._hands_none_before = now + _UNWANTED_SECONDS
        self.forget(run)
        return True

    def _note_left(self, run: str, now: float) -> float:
        """Since when nobody has served this run, as far as this worker knows.

        A lease does not show that: its holder may be unable to open the run.
        """
        since = self._left_since.get(run, now)
        ago = Store(self._redis, run).served_ago()
        if ago is not None and ago >= 0.0:  # negative: the clock of Redis was set back since
            since = max(since, now - ago)
        self._left_since[run] = since
        return since

    def forget(self, run: str) -> None:
        """Forget that the run is left to others: this worker takes it, or nobody shall work on it."""
        self._left_since.pop(run, None)
        self._lacked_memory.pop(run, None)
        if run == self._untaken:
            self._untaken = None
