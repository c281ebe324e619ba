"""Who did what: an append-only file of one JSON object a line, `audit/audit.jsonl` in the state directory.

Each call is two lines with one `id`: what is asked, on the disk before anything is done, and what came of it, on the
disk before it is answered. A first line without a second means that the process ended in between.

A file that has grown to `_MAX_BYTES` is renamed to `audit-<Unix time in ns>.jsonl`; the newest `_KEPT` of those are
kept, so that whoever may write cannot fill the disk with it. Several processes may append.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from pydantic_core import to_json

from rl_hooks.durable import append_line, sync
from rl_hooks.lock import LockHeld, exclusive
from service.storage.layout import Layout

_MAX_BYTES: Final = 16 << 20
_KEPT: Final = 8


class AuditLog:
    """The audit log of one state directory. All of it blocks."""

    def __init__(self, layout: Layout) -> None:
        self._path = layout.audit

    def append(self, entry: Mapping[str, Any]) -> None:
        """Add a line, and force it to the disk. Raises OSError."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        if self._is_full():
            self._rotate()
        is_new = not self._path.exists()
        append_line(self._path, to_json(entry), mode=0o600)
        if is_new:
            sync(self._path.parent)

    def read(self, run: str | None = None) -> Iterator[dict[str, Any]]:
        """Each call, oldest first: its second line, or its first where there is no second one (yet). `run`: of one."""
        asked: dict[str, dict[str, Any]] = {}
        for entry in self._lines():
            known = asked.pop(entry["id"], {})
            if "status" not in entry:
                asked[entry["id"]] = entry
            elif run in (None, entry.get("run")):
                yield known | entry
        yield from (entry for entry in asked.values() if run in (None, entry.get("run")))

    def _lines(self) -> Iterator[dict[str, Any]]:
        for path in [*self._rotated(), self._path]:
            with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
                for line in file:
                    with contextlib.suppress(ValueError):  # torn by loss of power
                        entry = json.loads(line)
                        if isinstance(entry, dict) and "id" in entry:
                            yield entry

    def _is_full(self) -> bool:
        with contextlib.suppress(FileNotFoundError):
            return self._path.stat().st_size >= _MAX_BYTES
        return False

    def _rotated(self) -> list[Path]:
        return sorted(self._path.parent.glob("audit-*.jsonl"), key=lambda path: (len(path.name), path.name))

    def _rotate(self) -> None:
        with contextlib.suppress(LockHeld), exclusive(self._path.with_name("audit.lock"), 0.0):
            if self._is_full():  # else another process was faster
                self._path.rename(self._path.with_name(f"audit-{time.time_ns()}.jsonl"))
                for path in self._rotated()[:-_KEPT]:
                    path.unlink()
