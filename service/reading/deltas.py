"""What changed of the last attempt's series since a reader's cursor, so that a page that stays open need not read all.

A cursor is opaque to readers: of this process, at this turn, with so many events. One that is not known here (another
process, too old) gets all again.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

#: Policy versions that were points once and are remembered as gone; beyond, older cursors are not known any more.
_GONE: Final = 4096


class Delta(NamedTuple):
    """`points`: JSON of those that changed, by policy version. `gone`: policy versions that are none any more.
    `events`: JSON of those that came after the first `kept_events`, which the reader has.
    """

    points: list[bytes]
    gone: list[int]
    events: Sequence[bytes]
    kept_events: int


class Deltas:
    """Of one run, in one process. `take` what is now, then ask for what changed `since` a cursor."""

    def __init__(self) -> None:
        self._process = secrets.token_hex(4)
        self._turn = self._first_known = self._events_turn = 0  # the last at which another event than the last changed
        self._points: dict[int, bytes] = {}
        self._events: list[bytes] = []
        self._changed: dict[int, int] = {}  # by policy version, in order of turns

    def take(self, points: Mapping[int, bytes], events: Sequence[bytes]) -> str:
        """Compare with what was taken before; returns the cursor of now, the same while nothing changes."""
        changed = [policy for policy, text in points.items() if self._points.get(policy) != text]
        changed += [policy for policy in self._points if policy not in points]
        turn = self._turn + 1
        if self._events[: len(events)] != list(events[: len(self._events)]) or len(events) < len(self._events):
            self._events_turn = turn
        if changed or len(events) != len(self._events) or self._events_turn == turn:
            self._turn = turn
            for policy in changed:
                self._changed.pop(policy, None)
                self._changed[policy] = turn
            self._points, self._events = dict(points), list(events)
            self._forget()
        return f"{self._process}.{self._turn}.{len(self._events)}"

    def _forget(self) -> None:
        gone = [policy for policy in self._changed if policy not in self._points]
        for policy in gone[: max(0, len(gone) - _GONE)]:
            self._first_known = max(self._first_known, self._changed.pop(policy))

    def since(self, cursor: str) -> Delta | None:
        """What changed since; None where all must be read again."""
        process, _, rest = cursor.partition(".")
        turn, _, events = rest.partition(".")
        if process != self._process or not (turn.isdecimal() and events.isdecimal()):
            return None
        at, kept = int(turn), int(events)
        if not max(self._first_known, self._events_turn) <= at <= self._turn or kept > len(self._events):
            return None
        later = sorted(policy for policy, changed in self._changed.items() if changed > at)
        found = [self._points[policy] for policy in later if policy in self._points]
        return Delta(found, [policy for policy in later if policy not in self._points], self._events[kept:], kept)
