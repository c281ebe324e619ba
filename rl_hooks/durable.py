"""Writing so that it survives a power cut: data reaches the disk before the name that points to it.

Every name that is new, or that a file takes from another, is itself on the disk once its directory was synced.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self


def at_home(path: str | Path) -> Path:
    """A path whose `~` is the home directory: a shell leaves it as it is in `--state-dir=~/x`, and env files do.

    That of a user who has none stays as it is.
    """
    return Path(os.path.expanduser(path))  # noqa: PTH111 - Path's raises where there is no home


def sync(path: Path) -> None:
    """Flush a file, or a directory's entries, to the disk: a rename is durable only after its directory's."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_synced(path: Path, data: bytes) -> None:
    """Write a whole file and flush it. To replace one: `replace_file`."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def replace_file(path: Path, data: bytes, *, durable: bool = True) -> None:
    """Put a whole file in the place of `path`: readers see the old one or the new one.

    Not `durable`: a power cut may lose it. A process that is killed here leaves a file `.<stem>-<uuid>` beside it.
    """
    temporary = path.with_name(f".{path.stem}-{uuid.uuid4().hex}")
    try:
        if durable:
            write_synced(temporary, data)
        else:
            temporary.write_bytes(data)
        temporary.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    if durable:
        sync(path.parent)


def append_line(path: Path, line: bytes, mode: int = 0o666) -> None:
    """Add a line to a file and flush it. The file is made, with `mode`, if it is not there; a torn line stays alone."""
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND
    with os.fdopen(os.open(path, flags, mode), "r+b", buffering=0) as file:
        size = file.seek(0, os.SEEK_END)
        if size > 0 and os.pread(file.fileno(), 1, size - 1) != b"\n":  # the last line is torn: begin a new one
            line = b"\n" + line
        if file.write(line + b"\n") != len(line) + 1:
            raise OSError(errno.ENOSPC, "the disk took only a part of the line", str(path))
        os.fsync(file.fileno())


class AtomicDirectory:
    """A directory that is filled under a passing name and appears under its final one: complete, or not at all.

    As a context manager it deletes what was not committed. Both names must be on one filesystem.
    """

    def __init__(self, path: Path) -> None:
        """`path`: the passing name; the directory is there."""
        self.path = path
        self.renamed = False  # it has its final name, which a power cut may still take from it if `commit` failed

    @classmethod
    def make(cls, parent: Path, prefix: str) -> Self:
        """Make an empty one in `parent`. Not named by the process id: two containers over one volume may share it."""
        path = parent / f"{prefix}{uuid.uuid4().hex}"
        path.mkdir(parents=True)
        return cls(path)

    def commit(self, final: Path, check: Callable[[], None] = lambda: None) -> None:
        """Sync all that is in it, then give it its final name. `check` runs right before, and raises to give up."""
        for path in [*self.path.rglob("*"), self.path]:
            sync(path)
        check()
        self.path.rename(final)
        self.renamed = True
        sync(final.parent)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
