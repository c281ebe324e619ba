"""Memory that a process has freed and its C library still keeps."""

from __future__ import annotations

import contextlib
import ctypes
from typing import Final

#: How often long-lived processes return it.
RETURN_MEMORY_SECONDS: Final = 60.0


def return_freed_memory() -> None:
    """Have glibc return free memory to the system (1 to 13 ms); with another C library, nothing.

    Blocks of many sizes leave its heap in pieces, which it keeps: resident memory would rise for hours (soak.md).
    """
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
