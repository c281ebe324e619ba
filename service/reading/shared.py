"""One computation for all who ask for the same at the same time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, TypeVar

_Found = TypeVar("_Found")


@dataclass
class _Asked:
    """Those who ask for one thing: how many, how often it was computed for them, and what the last one gave."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    waiting: int = 0
    begun: int = 0
    found: tuple[int, Any, Exception | None] | None = None


class Shared:
    """Computes one answer of a kind at a time. Whoever asks meanwhile gets the next one, which all of them share.

    So nobody gets an answer that was begun before he asked, and what he wrote before is in it. A failure is shared like
    an answer: beside a Redis that hangs, those who wait do not wait for one another. Nothing is kept.
    """

    def __init__(self) -> None:
        self._asked: dict[Hashable, _Asked] = {}

    async def get(self, kind: Hashable, compute: Callable[[], Awaitable[_Found]]) -> _Found:
        """Compute, or share what was begun since."""
        asked = self._asked.setdefault(kind, _Asked())
        before = asked.begun
        asked.waiting += 1
        try:
            async with asked.lock:
                if asked.found is None or asked.found[0] <= before:
                    asked.begun += 1
                    asked.found = None
                    try:
                        asked.found = asked.begun, await compute(), None
                    except Exception as error:  # noqa: BLE001 - raised below, for all who share it
                        asked.found = asked.begun, None, error
                outcome: tuple[int, Any, Exception | None] = asked.found
            found: _Found = outcome[1]
            if outcome[2] is not None:
                raise outcome[2]
            return found
        finally:
            asked.waiting -= 1
            if not asked.waiting:
                del self._asked[kind]
