"""Whose turn it is: the worker's time is shared between its runs."""

from __future__ import annotations

import math
from collections.abc import Collection

#: A run may be ahead of another one that has work by this time. After it at work, runs that had none are asked too.
AHEAD_SECONDS = 0.25


class Turns:
    """Whose turn it is: the run that took the fewest of the worker's seconds (start-time fair queueing).

    A run that has work again, and a new one, begin with as many seconds as the run at work that took the fewest. So no
    run saves seconds up while it has no work, and none waits for seconds that it took long ago.
    """

    def __init__(self) -> None:
        self._taken: dict[str, float] = {}  # seconds; of a run that is not at work, where it begins again at the least
        self._at_work: set[str] = set()  # had work when they were asked last
        self._fewest = 0.0  # the fewest seconds that a run at work took; it never falls

    def order(self, runs: Collection[str]) -> list[str]:
        """The runs that can be asked for work, in the order in which to ask; of equals, those without work first."""
        self._at_work &= set(runs)
        return sorted(runs, key=lambda run: (self._stands_at(run), run in self._at_work))

    def may(self, run: str) -> bool:
        """Whether it is not far ahead of another one that has work."""
        fewest = min((self._taken[other] for other in self._at_work), default=math.inf)
        return self._stands_at(run) <= fewest + AHEAD_SECONDS

    def asked(self, run: str, seconds: float, *, at_work: bool) -> None:
        """Note what came of asking it: seconds of work, and whether more is to be expected."""
        self._taken[run] = self._stands_at(run) + seconds
        self._at_work = self._at_work | {run} if at_work else self._at_work - {run}
        self._fewest = max(self._fewest, min((self._taken[other] for other in self._at_work), default=0.0))

    def _stands_at(self, run: str) -> float:
        taken = self._taken.get(run, 0.0)
        return taken if run in self._at_work else max(taken, self._fewest)
