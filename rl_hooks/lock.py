"""One process at a time: a file lock with a bounded wait, which names the process that holds it.

A paused process keeps its locks (docs/reference/paused.md).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

_POLL_SECONDS: Final = 0.01


class LockHeld(Exception):  # noqa: N818 - reads as what happened
    """Another process keeps the lock. `holder`: "process 4711 of node3"."""

    def __init__(self, path: Path, holder: str, seconds: float) -> None:
        super().__init__(f"{path} has been locked for {seconds:.0f} s by {holder}")
        self.holder = holder


@contextlib.contextmanager
def exclusive(
    path: Path, seconds: float, stopped: Callable[[], bool] = lambda: False, *, mode: int = 0o666
) -> Iterator[int]:
    """Hold the lock of the file `path`, which is created with `mode` if it does not exist.

    Yields the lock's file descriptor: a child that inherits it holds the lock, too, until it ends.
    Raises `LockHeld` when another process still has it after `seconds`, or as soon as `stopped()`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, mode)
    with os.fdopen(descriptor, "a+b", buffering=0) as file:
        while True:
            try:
                # The kernel releases it when the file closes, or this process dies.
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                waited = time.monotonic() - began
                if waited >= seconds or stopped():
                    file.seek(0)
                    holder = file.read(200).decode(errors="replace") or "another process"
                    raise LockHeld(path, holder, waited) from None
            time.sleep(_POLL_SECONDS)
        with contextlib.suppress(OSError):  # the lock itself needs no room on a full disk
            file.truncate(0)
            file.write(f"process {os.getpid()} of {socket.gethostname()}".encode())
        yield file.fileno()
