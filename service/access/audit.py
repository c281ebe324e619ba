"""Who did what: files of JSON lines under `audit/` in the state directory, which only grow, 8 MiB a piece.

Each call is two lines with one `id`: what is asked, on the disk before anything is done, and what came of it, on the
disk before it is answered. A first line without a second means that the process ended in between.

Each token has two files, of which the newest pieces are kept: so nobody can fill the disk, nor push out what another
token did. One is for registrations, which are all that a write token can have written down, as often as it likes; the
other is for what only an admin may do: publish, roll back, hold, pause, delete.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from rl_hooks.durable import sync
from service.storage.history.lines import LineFile
from service.storage.layout import Layout

_PIECE_BYTES: Final = 8 << 20
#: Full pieces of a token that are kept, by the kind of its calls.
_KEPT: Final = {"acts": 7, "registrations": 1}
_REGISTRATION: Final = re.compile(r"PUT /runs/[^/]*")


class AuditLog:
    """The audit log of one state directory. All of it blocks."""

    def __init__(self, layout: Layout) -> None:
        self._directory = layout.audit

    def append(self, entry: Mapping[str, Any]) -> None:
        """Add a line, and force it to the disk. `entry` has the `token` and the `call`. Raises OSError."""
        if not self._directory.is_dir():
            self._directory.mkdir(parents=True, exist_ok=True)
            sync(self._directory.parent)
        kind = "registrations" if _REGISTRATION.fullmatch(entry["call"]) else "acts"
        name = hashlib.sha256(entry["token"].encode()).hexdigest()[:16]  # it may hold what no file name may
        self._file(self._directory / f"{kind}_{name}.jsonl").append(entry)

    def read(self, run: str | None = None) -> Iterator[dict[str, Any]]:
        """Each call, oldest first: its second line, or its first where there is no second one (yet). `run`: of one."""
        calls: dict[str, dict[str, Any]] = {}
        for path in sorted(self._files()):
            for entry in self._file(path).read():
                calls[entry["id"]] = calls.get(entry["id"], {}) | entry
        yield from sorted((c for c in calls.values() if run in (None, c["run"])), key=lambda call: call["time"])

    def _files(self) -> set[Path]:
        """The piece in use of each token's files."""
        found = {path.with_stem(path.stem.partition("-")[0]) for path in self._directory.glob("*.jsonl")}
        return {path for path in found if path.stem.partition("_")[0] in _KEPT}

    @staticmethod
    def _file(path: Path) -> LineFile:
        kept = _KEPT[path.stem.partition("_")[0]]
        return LineFile(path, max_bytes=_PIECE_BYTES, kept=kept, mode=0o600)
