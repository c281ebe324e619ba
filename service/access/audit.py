"""Who did what: `audit/audit.jsonl` in the state directory, which only grows, 16 MiB a piece.

Each call is two lines with one `id`: what is asked, on the disk before anything is done, and what came of it, on the
disk before it is answered. A first line without a second means that the process ended in between. The newest 8 full
pieces are kept, so that whoever may write cannot fill the disk with it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from service.storage.layout import Layout
from service.storage.lines import LineFile

_PIECE_BYTES: Final = 16 << 20
_KEPT: Final = 8


class AuditLog:
    """The audit log of one state directory. All of it blocks."""

    def __init__(self, layout: Layout) -> None:
        self._file = LineFile(layout.audit, max_bytes=_PIECE_BYTES, kept=_KEPT, mode=0o600)
        self._directory = layout.audit.parent

    def append(self, entry: Mapping[str, Any]) -> None:
        """Add a line, and force it to the disk. Raises OSError."""
        self._directory.mkdir(parents=True, exist_ok=True)
        self._file.append(entry)

    def read(self, run: str | None = None) -> Iterator[dict[str, Any]]:
        """Each call, oldest first: its second line, or its first where there is no second one (yet). `run`: of one."""
        asked: dict[str, dict[str, Any]] = {}
        for entry in self._file.read():
            known = asked.pop(entry["id"], {})
            if "status" not in entry:
                asked[entry["id"]] = entry
            elif run in (None, entry["run"]):
                yield known | entry
        yield from (entry for entry in asked.values() if run in (None, entry["run"]))
