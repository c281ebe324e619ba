"""One computation for all who ask for the same at the same time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from typing import Any, TypeVar

_Found = TypeVar("_Found")


class Shared:
    """Computes one answer of a kind at a time. Whoever asks meanwhile gets the next one, which all of them share.

    So nobody gets an answer that was begun before he asked, and what he wrote before is in it. A failure is shared like
    an answer: beside a Redis that hangs, those who wait do not wait for one another. Nothing is kept.
    """

    def __init__(self) -> None:
        self._running: dict[Hashable, asyncio.Task[Any]] = {}
        self._next: dict[Hashable, asyncio.Task[Any]] = {}

    async def get(self, kind: Hashable, compute: Callable[[], Awaitable[_Found]]) -> _Found:
        """Compute, or share what was begun since."""
        task = self._next.get(kind)
        if task is None:
            before = self._running.get(kind)
            task = asyncio.create_task(self._compute(kind, before, compute))
            task.add_done_callback(lambda done: done.cancelled() or done.exception())  # even if nobody waits any more
            (self._running if before is None else self._next)[kind] = task
        found: _Found = await asyncio.shield(task)  # who leaves does not end it for the others
        return found

    async def _compute(
        self, kind: Hashable, before: asyncio.Task[Any] | None, compute: Callable[[], Awaitable[_Found]]
    ) -> _Found:
        if before is not None:
            await asyncio.wait({before})
            self._running[kind] = self._next.pop(kind)
        try:
            return await compute()
        finally:
            del self._running[kind]
