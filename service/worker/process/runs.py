"""What the worker knows of each registered run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from service.storage.layout import FileId
from service.worker.loop import RunWorker, Suspicion

#: A run that cannot be worked on is tried again after this, at most.
REFUSED_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Closed:
    """What was known of a run when it was closed, or not opened, to leave memory to others.

    The run is opened when its queue or its drift alarm has something that is not named here.
    """

    entries: frozenset[str]  # in its queue: they wait for more tokens, of which the draft vocabulary is to be chosen
    heeded: Mapping[str, str]  # what people had asked of its drift alarm


@dataclass
class Run:
    """What the worker knows of one run."""

    worker: RunWorker | None = None  # None: it is not served now
    file: FileId = None  # of its target when it was last opened
    retry_at: float = 0.0  # not opened nor asked before this (monotonic), unless its target is another file
    failures: int = 0  # unforeseen exceptions, and errors of the disk, since it last worked
    worked_at: float = 0.0  # it was opened, or had work, last (monotonic)
    short: int = 0  # times that others were closed for it since it last worked (`Room` has the rule)
    short_at: float = 0.0  # the last of them (monotonic)
    closed: Closed | None = None  # it has nothing to do: not open until it is called, or until its turn (`Room`)
    proven: bool = True  # it has worked since it was opened
    lost: bool = False  # another worker took the lease while this process was paused
    suspicion: Suspicion = field(default_factory=Suspicion)
    empty_until: float = 0.0  # of an archived run: its queue is not looked at before this (monotonic)

    def back_off(self, first: float) -> float:
        """Count a failure; how long to wait after it, in seconds."""
        self.failures += 1
        return min(first * 2.0 ** min(self.failures - 1, 10), REFUSED_SECONDS)


def served(runs: Mapping[str, Run]) -> dict[str, RunWorker]:
    """Those that are open now."""
    # Read once each: the heartbeat asks while a run is opened or closed.
    return {run: worker for run, state in list(runs.items()) if (worker := state.worker) is not None}
