"""Which drafter a run serves: read when `latest` moves, and waited for by any number of agents at the cost of one.

Another process may move it (the worker, another API process), so it is told by the file: one look each `_LOOK_SECONDS`
while anybody waits, and one for each request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from service.storage.drafters.versions import Manifest
from service.storage.layout import FileId, file_id

#: How often a watcher looks.
_LOOK_SECONDS: Final = 0.1
#: Waiting requests that are woken at once: others, such as probes, are answered between two such groups.
_WOKEN_AT_ONCE: Final = 32


@dataclass(frozen=True, slots=True)
class Latest:
    """The manifest of what is served, and how it is sent."""

    manifest: Manifest
    body: bytes
    etag: str


class Pointer:
    """One run's."""

    def __init__(self, path: Path, read: Callable[[], Manifest | None], stopping: asyncio.Event) -> None:
        """`path`: the file that is replaced when `latest` moves; `read`: reads what it names."""
        self._path, self._read, self._stopping = path, read, stopping
        self._file: FileId = None
        self._served: Latest | None = None
        self._waiting: dict[asyncio.Future[None], None] = {}
        self._watcher: asyncio.Task[None] | None = None

    def served(self) -> Latest | None:
        """What is served now; None before the first publish. A look at a small file: too short to need a thread."""
        file = file_id(self._path)  # before the manifest, so that a move in between is noticed
        if file is None or file != self._file:
            manifest = self._read()
            body = b"" if manifest is None else manifest.model_dump_json().encode()
            self._served = None if manifest is None else Latest(manifest, body, manifest.etag)
            self._file = file
        return self._served

    async def moves(self, seen: Latest | None) -> None:
        """Wait until another than `seen` is served, or the server is asked to stop. Raises what reading it raised."""
        if self._served is not seen:  # another request noticed it since
            return
        waiting = asyncio.get_running_loop().create_future()
        self._waiting[waiting] = None
        if self._watcher is None or self._watcher.done():
            self._watcher = asyncio.create_task(self._watch(seen))
        try:
            await waiting
        finally:
            self._waiting.pop(waiting, None)

    async def _watch(self, before: Latest | None) -> None:
        while self._waiting:
            await asyncio.sleep(_LOOK_SECONDS)
            trouble: Exception | None = None
            try:
                now = self.served()
            except Exception as error:  # noqa: BLE001 - whoever waits is told
                now, trouble = None, error
            if now is not before or trouble is not None or self._stopping.is_set():
                before = now
                await self._wake(trouble)

    async def _wake(self, trouble: Exception | None) -> None:
        asked = list(self._waiting)
        for number, waiting in enumerate(asked):
            if not waiting.done():
                waiting.set_result(None) if trouble is None else waiting.set_exception(trouble)
            if number % _WOKEN_AT_ONCE == _WOKEN_AT_ONCE - 1:
                await asyncio.sleep(0)
