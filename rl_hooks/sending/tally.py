"""Counters, the newest error, and warnings that are logged once, of the hook, the sender or the tap."""

from __future__ import annotations

import logging
import os
import re
import threading
from collections import Counter
from typing import Final

from rl_hooks.errors import MAX_REASON, cut

#: A process with another id is a forked child of the one that imported this.
_IMPORTED_BY: Final = os.getpid()
_LONGEST_LINE_SECONDS: Final = 1.0
#: Kinds that are logged: the service's words are in their names.
_MOST_KINDS: Final = 200


class Tally:
    """Safe to use from several threads, and in a forked child, whose copy counts on by itself."""

    def __init__(self, logger: logging.Logger, *names: str) -> None:
        self.last_error = ""
        self._logger = logger
        self._pid, self._lock = os.getpid(), threading.Lock()
        self._counts = Counter(dict.fromkeys(names, 0))
        self._warned: set[str] = set()

    def _guard(self) -> threading.Lock:
        """A forked child makes a lock of its own: a thread of the parent may have held the parent's at the fork."""
        if os.getpid() != self._pid:
            self._pid, self._lock = os.getpid(), threading.Lock()
        return self._lock

    def add(self, name: str, amount: int = 1) -> None:
        """Raise one counter."""
        with self._guard():
            self._counts[name] += amount

    def __getitem__(self, name: str) -> int:
        return self._counts[name]

    def counts(self) -> dict[str, int]:
        """All counters now."""
        with self._guard():
            return dict(self._counts)

    def warn(self, kind: str, text: str) -> None:
        """Log the first warning of each kind; of very many kinds the first ones."""
        kind = cut(kind)
        with self._guard():
            first = kind not in self._warned and len(self._warned) < _MOST_KINDS
            if first:
                self._warned.add(kind)
        if first:
            log_warning(self._logger, f"draftalign: {cut(text, MAX_REASON)} (logged once; see stats())")

    def note(self, kind: str, text: str) -> None:
        """Keep an error as the newest, and log the first of each kind."""
        self.last_error = cut(text, MAX_REASON)
        self.warn(kind, text)


def log_warning(logger: logging.Logger, text: str) -> None:
    """Log a warning. In a forked child wait at most a second for it.

    A thread of the parent may have been writing to the log's stream at the fork. The child's copy of the stream then
    stays locked, and whoever writes to it waits in C, where no signal ends the wait.
    """
    if os.getpid() == _IMPORTED_BY:
        logger.warning("%s", text)
        return
    line = threading.Thread(target=logger.warning, args=("%s", text), name="draftalign-log", daemon=True)
    try:
        line.start()
    except RuntimeError:  # out of threads: the error is in stats() all the same
        return
    line.join(_LONGEST_LINE_SECONDS)


def kind_of(text: str) -> str:
    """The message up to its first digit. Messages of one kind differ in their figures only."""
    return re.split(r"[0-9]", text, maxsplit=1)[0]
