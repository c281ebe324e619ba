"""Writing so that it survives a power cut: data reaches the disk before the name that points to it."""

from __future__ import annotations

import os
from pathlib import Path


def sync(path: Path) -> None:
    """Flush a file, or a directory's entries, to the disk: a rename is durable only after its directory's."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_synced(path: Path, data: bytes) -> None:
    """Write a whole file and flush it. To replace one: write beside it, rename, `sync` the folder."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
