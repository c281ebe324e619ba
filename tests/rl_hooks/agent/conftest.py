"""The agent's cache in memory: each download and each swap syncs several files, and no test here is about the disk."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

MEMORY = Path("/dev/shm")  # noqa: S108 - a tmpfs on Linux


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """As pytest's, in memory where there is a tmpfs."""
    with tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as name:
        yield Path(name)
