"""A file of JSON lines that only grows, in pieces: a full one is renamed, and the oldest of those are deleted."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic_core import to_json

from rl_hooks.durable import append_line, sync
from rl_hooks.lock import LockHeld, exclusive


class LineFile:
    """The pieces of one such file: `path`, which is appended to, and `<stem>-<Unix time in ns>.jsonl`.

    Several processes may append. A line is one write, which needs no lock that a paused process could keep.
    """

    def __init__(self, path: Path, *, max_bytes: int, kept: int, mode: int = 0o666) -> None:
        """`max_bytes`: size at which a piece is full; `kept`: most full pieces; `mode`: of a new piece."""
        self.path, self._max_bytes, self._kept, self._mode = path, max_bytes, kept, mode

    def append(self, entry: Mapping[str, Any], head: Callable[[], Mapping[str, Any] | None] = lambda: None) -> None:
        """Add a line, and force it to the disk. Raises OSError. NaN becomes null, since JSON has none.

        `head`: makes the line that a new piece begins with.
        """
        if self._is_full():
            # Held by a paused process, it keeps the file growing, and nobody waiting.
            with contextlib.suppress(LockHeld), exclusive(self.path.with_suffix(".lock"), 0.0):
                if self._is_full():  # else another process was faster
                    self.path.rename(self.path.with_stem(f"{self.path.stem}-{time.time_ns()}"))
        is_new = not self.path.exists()
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
        while True:
            pieces, found = self.pieces(), list[dict[str, Any]]()
            for piece in pieces:
                with contextlib.suppress(FileNotFoundError):
                    found += entries(piece.read_bytes().splitlines())
            if pieces == self.pieces():  # else a piece was renamed meanwhile
                return found

    def _full(self) -> list[Path]:
        return sorted(self.path.parent.glob(f"{self.path.stem}-*.jsonl"), key=lambda path: (len(path.name), path.name))

    def _is_full(self) -> bool:
        with contextlib.suppress(FileNotFoundError):
            return self.path.stat().st_size >= self._max_bytes
        return False


def entries(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """The lines that are JSON objects."""
    for line in lines:
        with contextlib.suppress(ValueError):
            entry = json.loads(line)
            if isinstance(entry, dict):
                yield entry
