"""A file that reserves a little of the disk. On a full disk it is freed piece by piece for calls that make room.

Archiving or deleting a run takes some room itself: for the audit log, and for the run's new state.
"""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Final

#: Size of the file: enough for dozens of such calls, and for a Redis on the same disk that goes on meanwhile.
SPARE_BYTES: Final = 4 << 20
#: The most that one such call writes.
CALL_BYTES: Final = 64 << 10
#: Freed at a time. Not all at once: whatever fills the disk takes what a call leaves, and the next call needs room too.
_PIECE_BYTES: Final = 4 * CALL_BYTES


def is_full(error: OSError) -> bool:
    """Whether the disk, or the quota on it, is used up."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


class SpareFile:
    """The file of one state directory, which several processes may share. All of it blocks."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def fill(self, free_bytes: int) -> None:
        """Let the file grow to its size, or to a sixteenth of what is free where that is less. Raises OSError."""
        there = self._path.stat().st_size if self._path.exists() else 0
        wanted = min(SPARE_BYTES, free_bytes // 16)
        if wanted > there:
            with self._path.open("ab") as file:
                file.write(os.urandom(wanted - there))  # some file systems would compress zeros to nothing

    def write(self, write: Callable[[], None], room_bytes: int = 0) -> None:
        """Call `write`, with room for `room_bytes` besides; free pieces of the file until it succeeds.

        Raises OSError: the disk does not work, or is full and nothing is left of the file.
        """
        while True:
            try:
                self._try(room_bytes)
                write()
            except OSError as error:
                if not (is_full(error) and self._give_up()):
                    raise
            else:
                return

    def _try(self, room_bytes: int) -> None:
        if room_bytes:
            with tempfile.TemporaryFile(dir=self._path.parent) as trial:
                trial.write(os.urandom(room_bytes))
                trial.flush()
                os.fsync(trial.fileno())

    def _give_up(self) -> bool:
        """Free a piece. Whether there was one."""
        with contextlib.suppress(FileNotFoundError):
            left = self._path.stat().st_size - _PIECE_BYTES
            if left > 0:
                os.truncate(self._path, left)
            else:
                self._path.unlink()
            return True
        return False
