"""What is known from a run's history: moves of `latest`, pushes, what waits for the gate, verdicts of canaries."""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

from service.monitor.events import CanaryVerdict, Carried, DrafterSent, Event, Moves, read_event
from service.storage.history.lines import entries
from service.storage.layout import file_id

#: Canary verdicts remembered, to drop repeats. A repeat comes within minutes, if at all.
_CANARIES_REMEMBERED = 4096
_PUSHES_REMEMBERED = 16


class HistoryDigest:
    """What is known from a history, whatever of it was deleted since. Each line is read once."""

    def __init__(self) -> None:
        #: When the drafter was pushed again the last times, in Unix seconds.
        self.pushed: deque[float] = deque(maxlen=_PUSHES_REMEMBERED)
        #: `canary_key` of the newest verdicts, oldest first.
        self.canaries: dict[tuple[str, ...], None] = {}
        #: How many versions were published.
        self.published = 0
        #: The highest sequence number of a move. None: no move is known.
        self.sequence: int | None = None
        self._inode: int | None = None  # of the piece that was read last
        #: Versions that a person sent and that are not judged yet, oldest first.
        self.sent: dict[str, SentDrafter] = {}
        #: What is told of the pieces that are there; replaced, not changed, so that any thread may read it.
        self.moves = Moves()
        self._moves: dict[int, Moves] = {}  # by inode
        self.bytes_read = 0

    def follow(self, pieces: Sequence[Path]) -> bool:
        """Read what was appended since the last call. False: it does not go on from there (a backup was put back)."""
        inodes = [None if (found := file_id(piece)) is None else found[0] for piece in pieces]
        if self._inode is not None and self._inode not in inodes:
            return False
        begin = 0 if self._inode is None else inodes.index(self._inode)
        for piece in pieces[begin:]:  # those before were read to their ends
            with contextlib.suppress(FileNotFoundError), piece.open("rb") as file:
                inode = os.fstat(file.fileno()).st_ino
                if inode != self._inode:
                    self._inode, self.bytes_read = inode, 0
                    self._moves.pop(inode, None)  # of a piece that is gone
                    self._moves[inode] = Moves()
                if inode not in inodes or file.seek(0, os.SEEK_END) < self.bytes_read:
                    return False  # it was renamed just now, or is another file
                self._read(file, self._moves[inode])
        self._moves = {inode: moves for inode, moves in self._moves.items() if inode in inodes}
        self.moves = sum(self._moves.values(), Moves())
        return True

    def _read(self, file: BinaryIO, moves: Moves) -> None:
        file.seek(self.bytes_read)
        text, begins = file.read(), self.bytes_read == 0
        complete = text[: text.rfind(b"\n") + 1]
        self.bytes_read += len(complete)
        for number, event in enumerate(map(read_event, entries(complete.splitlines()))):
            self._read_sent(event)
            if event.sequence is not None:
                self.sequence = max(event.sequence, self.sequence or 0)
            if isinstance(event, Carried):
                if begins and number == 0:
                    self._carry_on(event)
                continue
            moves.add(event)
            if event.event == "published":
                self.published += 1
            elif event.event == "pushed_again" and event.time is not None:
                self.pushed.append(event.time)
            elif isinstance(event, CanaryVerdict):
                self.canaries[canary_key(event)] = None
                while len(self.canaries) > _CANARIES_REMEMBERED:
                    del self.canaries[next(iter(self.canaries))]

    def carried(self) -> Carried:
        """First event of a new piece."""
        return Carried(sequence=self.sequence, published=self.published, pushed=list(self.pushed), sent=dict(self.sent))

    def _carry_on(self, event: Carried) -> None:
        """Go on from a piece's first event: whoever wrote it may know more than the lines that are still there."""
        if event.published >= self.published:
            self.published, self.pushed = event.published, deque(event.pushed, maxlen=_PUSHES_REMEMBERED)
            # Beside what its writer knew: what another process wrote to the piece before while this one was begun.
            self.sent = {version: SentDrafter(*sent) for version, sent in event.sent.items()} | self.sent

    def _read_sent(self, event: Event) -> None:
        if isinstance(event, DrafterSent):
            self.sent[str(event.version)] = SentDrafter(str(event.reason), event.by, self.published)
        elif event.event in ("published", "rolled_back", "refused"):
            self.sent.pop(str(event.version), None)


class SentDrafter(NamedTuple):
    """A drafter that a person sent: why, who, and how many versions had been published before."""

    reason: str
    by: str | None
    published: int

    @property
    def sender(self) -> str:
        """For people: who sent it, and why."""
        return f"sent{f' by {self.by}' if self.by else ''} ({self.reason})"


def canary_key(event: CanaryVerdict) -> tuple[str, ...]:
    """Two canary events with the same key are the same verdict."""
    return event.event, str(event.version), str(event.reporter), str(event.offer)
