"""Counters, the newest error, and warnings that are logged once, of the hook, the sender or the tap."""

from __future__ import annotations

import logging
import re
import threading
from collections import Counter


class Tally:
    """Safe to use from several threads. A forked child makes its own: this one's lock may be held in its copy."""

    def __init__(self, logger: logging.Logger, *names: str) -> None:
        self.last_error = ""
        self._logger = logger
        self._lock = threading.Lock()
        self._counts = Counter(dict.fromkeys(names, 0))
        self._warned: set[str] = set()

    def add(self, name: str, amount: int = 1) -> None:
        """Raise one counter."""
        with self._lock:
            self._counts[name] += amount

    def __getitem__(self, name: str) -> int:
        return self._counts[name]

    def counts(self) -> dict[str, int]:
        """All counters now."""
        with self._lock:
            return dict(self._counts)

    def warn(self, kind: str, text: str) -> None:
        """Log the first warning of each kind."""
        with self._lock:
            first = kind not in self._warned
            self._warned.add(kind)
        if first:
            self._logger.warning("draftalign: %s (logged once; see stats())", text)

    def note(self, kind: str, text: str) -> None:
        """Keep an error as the newest, and log the first of each kind."""
        self.last_error = text
        self.warn(kind, text)


def kind_of(text: str) -> str:
    """The message up to its first digit. Messages of one kind differ in their figures only."""
    return re.split(r"[0-9]", text, maxsplit=1)[0]
