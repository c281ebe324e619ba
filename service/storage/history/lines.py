"""A file of JSON lines that only grows, in pieces: a full one is renamed, and the oldest of those are deleted."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Final, Generic, TypeVar

from pydantic_core import to_json

from rl_hooks.durable import append_line, sync
from rl_hooks.lock import LockHeld, exclusive
from service.storage.layout import is_there, revalidate

_Kept = TypeVar("_Kept")
#: Longer than a line takes to be on a slow disk.
_LOCK_SECONDS: Final = 1.0


class LineFile:
    """The pieces of one such file: `path`, which is appended to, and `<stem>-<Unix time in ns>.jsonl`, ascending.

    Several processes may append. A line is one write to the end of the file, which on a local disk needs no lock. Hosts
    of an NFS would overwrite each other's, so a lock is waited for, but not for long (docs/reference/paused.md).
    """

    def __init__(self, path: Path, *, max_bytes: int, kept: int, mode: int = 0o666) -> None:
        """`max_bytes`: size at which a piece is full; `kept`: most full pieces; `mode`: of a new piece."""
        self.path, self._max_bytes, self._kept, self._mode = path, max_bytes, kept, mode

    def append(self, entry: Mapping[str, Any], head: Callable[[], Mapping[str, Any] | None] = lambda: None) -> None:
        """Add a line, and force it to the disk. Raises OSError. NaN becomes null, since JSON has none.

        `head`: makes the line that a new piece begins with.
        """
        if not is_there(self.path.parent):  # of a run that was deleted meanwhile, which the lock would make again
            raise FileNotFoundError(errno.ENOENT, "the directory is gone", str(self.path.parent))
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(exclusive(self.path.with_suffix(".lock"), _LOCK_SECONDS, mode=self._mode))
            except LockHeld:  # it grows meanwhile
                pass
            else:
                if self._is_full():
                    self.path.rename(self.path.with_stem(f"{self.path.stem}-{self._next()}"))
            self._append(entry, head)

    def _append(self, entry: Mapping[str, Any], head: Callable[[], Mapping[str, Any] | None]) -> None:
        is_new = not is_there(self.path)
        first = head() if is_new else None
        lines = [to_json(one, inf_nan_mode="null") for one in (first, entry) if one is not None]
        append_line(self.path, b"\n".join(lines), self._mode)
        if is_new:
            sync(self.path.parent)
            for path in self._full()[: -self._kept]:  # `head` may have read them
                path.unlink(missing_ok=True)

    def pieces(self) -> list[Path]:
        """All pieces, oldest first. The last one may not exist."""
        return [*self._full(), self.path]

    def read(self) -> list[dict[str, Any]]:
        """Every entry, oldest first. A line torn by loss of power is skipped."""
        return Followed(self, lambda entry: entry).read()

    def _next(self) -> int:
        """What a full piece is named by: above the newest one, also where the clock was set back."""
        names = (path.stem.rpartition("-")[2] for path in self._full())
        return max([time.time_ns(), *(int(name) + 1 for name in names if name.isdecimal())])

    def _full(self) -> list[Path]:
        return sorted(self.path.parent.glob(f"{self.path.stem}-*.jsonl"), key=lambda path: (len(path.name), path.name))

    def _is_full(self) -> bool:
        revalidate(self.path.parent)  # another host may have renamed it just now
        with contextlib.suppress(FileNotFoundError):
            return self.path.stat().st_size >= self._max_bytes
        return False


class Followed(Generic[_Kept]):
    """What is kept of each entry of such a file. A call reads what was appended since the last one."""

    def __init__(self, file: LineFile, keep: Callable[[dict[str, Any]], _Kept]) -> None:
        self._file, self._keep = file, keep
        self._pieces: dict[int, tuple[int, list[_Kept]]] = {}  # by inode: bytes that were read, and the entries in them
        self.lines_read = 0  # in all
        self._reading = threading.Lock()

    def read(self) -> list[_Kept]:
        """Every entry, oldest first: what `LineFile.read` gives."""
        with self._reading:
            while True:
                pieces, found = self._file.pieces(), list[_Kept]()
                followed: dict[int, tuple[int, list[_Kept]]] = {}
                for piece in pieces:
                    with contextlib.suppress(FileNotFoundError), piece.open("rb") as file:
                        found += self._follow(file, followed)
                self._pieces = followed
                if pieces == self._file.pieces():  # else a piece was renamed meanwhile
                    return found

    def _follow(self, file: BinaryIO, followed: dict[int, tuple[int, list[_Kept]]]) -> list[_Kept]:
        inode = os.fstat(file.fileno()).st_ino
        done, known = self._pieces.get(inode, (0, []))
        if file.seek(0, os.SEEK_END) < done:  # another file: a backup was put back
            done, known = 0, []
        file.seek(done)
        *lines, last = file.read().split(b"\n")  # the last one may not be complete
        if lines:
            known = [*known, *map(self._keep, entries(lines))]
            done += sum(map(len, lines)) + len(lines)
        self.lines_read += len(lines)
        followed[inode] = done, known
        return [*known, *map(self._keep, entries([last]))]


def entries(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """The lines that are JSON objects."""
    for line in lines:
        with contextlib.suppress(ValueError):
            entry = json.loads(line)
            if isinstance(entry, dict):
                yield entry
