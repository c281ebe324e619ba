"""The history of each run: what was published, refused, moved, held and sent, and the verdicts of canaries.

It is bounded. What must not be forgotten stands at the head of each new piece of it: versions that wait for the gate,
how many were published, the newest move. Canaries' verdicts have a file of their own, because whoever may read a run
may report them: they push nothing else out.
"""

from __future__ import annotations

import heapq
import threading
import time
from collections.abc import Callable, Collection
from pathlib import Path
from types import EllipsisType
from typing import Any

from service.monitor.events import CanaryVerdict, Event, RunEvent, read_event
from service.storage.history.digest import HistoryDigest, SentDrafter, canary_key
from service.storage.history.lines import Followed, LineFile
from service.storage.layout import Layout

#: Size of a piece of the history; the newest full one is kept. Some 6,000 events.
_HISTORY_BYTES = 2 << 20
#: The same of the canaries' verdicts: some 3,000.
_VERDICT_BYTES = 1 << 20


class History:
    """The histories in one state directory."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._digests: dict[Path, HistoryDigest] = {}
        self._events: dict[str, tuple[Followed[RunEvent], ...]] = {}
        self._asked: dict[str, float] = {}  # when these were asked for last
        self._reading = threading.Lock()

    def events(self, run: str) -> list[RunEvent]:
        """The newest recorded events, verdicts of canaries among them, oldest first. Each line is read once."""
        self._asked[run] = time.monotonic()
        followed = self._events.get(run)
        if followed is None:
            files = self._moves(run), self._verdicts(run)
            followed = self._events[run] = tuple(Followed(file, RunEvent.of) for file in files)
        found = heapq.merge(*(file.read() for file in followed), key=lambda event: event.time or 0.0)
        return [event for event in found if event.event != "carried"]

    def drop_events(self, older_than_seconds: float) -> None:
        """Keep no `events` that nobody has asked for since: they take up to 6 MiB a run."""
        for run, asked in list(self._asked.items()):  # other threads add to it meanwhile
            if time.monotonic() - asked > older_than_seconds:
                self._asked.pop(run, None)
                self._events.pop(run, None)

    def drop(self, run: str) -> None:
        """Keep nothing of a run that was deleted."""
        self._asked.pop(run, None)
        self._events.pop(run, None)
        with self._reading:
            for file in (self._moves(run), self._verdicts(run)):
                self._digests.pop(file.path, None)

    def digest(self, run: str) -> HistoryDigest:
        """Moves and what waits for the gate, up to date."""
        return self._digest(self._moves(run))

    def sent(self, run: str) -> dict[str, SentDrafter]:
        """Versions that people sent and that are not judged yet, oldest first."""
        digest = self.digest(run)
        with self._reading:
            return dict(digest.sent)

    def last_of(self, run: str, kinds: Collection[str], version: str | EllipsisType | None = ...) -> Event | None:
        """The newest event of these kinds that is kept. `version`: of this one; None: of none; not given: of any."""
        newest_first = map(read_event, reversed(self._moves(run).read()))
        found = (event for event in newest_first if event.event in kinds and version in (..., event.version))
        return next(found, None)

    def _digest(self, file: LineFile) -> HistoryDigest:
        with self._reading:
            digest = self._digests.setdefault(file.path, HistoryDigest())
            if not digest.follow(file.pieces()):
                digest = self._digests[file.path] = HistoryDigest()
                digest.follow(file.pieces())
            return digest

    def record(self, run: str, event: Event) -> None:
        """Append an event (e.g. a refused candidate) to the history, durably. `time` is added when absent.

        Waits for a lock for a second at most (`LineFile`).
        """

        def work(now: History) -> None:
            now._moves(run).append(_line(event), head=lambda: now._carried(run))

        self._change(run, work)

    def record_verdict(self, run: str, event: CanaryVerdict) -> None:
        """Append a canary's verdict, durably, unless it is a repeat."""

        def work(now: History) -> None:
            file = now._verdicts(run)
            if canary_key(event) not in now._digest(file).canaries:
                file.append(_line(event))

        self._change(run, work)

    def _change(self, run: str, work: Callable[[History], None]) -> None:
        self._layout.change(run, lambda files: work(self if files is self._layout else History(files)), alone=False)

    def _carried(self, run: str) -> dict[str, Any] | None:
        digest = self.digest(run)
        with self._reading:
            return _line(digest.carried()) if len(self._moves(run).pieces()) > 1 else None  # a piece may be gone

    def _moves(self, run: str) -> LineFile:
        return self._file(self._layout.history(run), _HISTORY_BYTES)

    def _verdicts(self, run: str) -> LineFile:
        return self._file(self._layout.verdicts(run), _VERDICT_BYTES)

    def _file(self, path: Path, piece_bytes: int) -> LineFile:
        pieces = self._layout.pieces
        return LineFile(path, max_bytes=piece_bytes // pieces, kept=2 * pieces - 1)


def _line(event: Event) -> dict[str, Any]:
    return {"time": time.time()} | event.written
