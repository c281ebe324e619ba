"""Memory that a process has freed and its C library still keeps, and what is no garbage."""

from __future__ import annotations

import contextlib
import ctypes
import gc
from collections.abc import Iterator
from typing import Final

#: mallopt's number for the most arenas: M_ARENA_MAX of glibc's malloc.h.
_M_ARENA_MAX: Final = -8

#: How often long-lived processes return it.
RETURN_MEMORY_SECONDS: Final = 60.0


def return_freed_memory() -> None:
    """Have glibc return free memory to the system (1 to 13 ms); with another C library, nothing.

    Blocks of many sizes leave its heap in pieces, which it keeps: resident memory would rise for hours (soak.md).
    """
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def share_one_heap() -> None:
    """Have the threads of a process that runs Python, and not torch, share one heap; with another C library, nothing.

    glibc gives each thread an arena, up to eight a core, and what one thread frees the others cannot use. Python's
    lock lets one thread allocate at a time anyway. Call it before threads start: an arena once made stays.
    """
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Nothing looks for garbage in what is imported here, then or later: it stays as long as the process.

    To import what a worker needs takes 1.6 s of CPU instead of 2.7, its end included.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
