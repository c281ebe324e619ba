"""Files of accepted rollouts, beside the queue whose entries name them.

An upload is written to `spool/tmp/<uuid>` and appears in a run's spool by one rename, so a file there is complete.
Names hold the batch id *and* a new uuid, so a duplicate upload can delete its own file and no other. They also hold the
digest of the bytes that came, which `check_blob` compares wherever the file was moved: XXH3 (64 bits) of what came
through the API, SHA-256 of what a trainer put into an object store (`service.storage.queue.incoming`).
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from xxhash import xxh3_64

from service.errors import BlobDamaged
from service.storage.layout import BLOB_NAME, Layout

T = TypeVar("T")


class Upload:
    """One file being received. Write, then `keep` it somewhere; leaving the `with` block without that deletes it."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / uuid.uuid4().hex
        self._digest = xxh3_64()
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        self._descriptor = _made(directory, lambda: os.open(self.path, flags, 0o600))

    def __enter__(self) -> Upload:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
        self.path.unlink(missing_ok=True)  # missing if it was kept

    def write(self, chunk: bytes | memoryview) -> None:
        """Append. Runs on the event loop: a chunk is at most 1 MiB and goes to the page cache."""
        self._digest.update(chunk)
        view = memoryview(chunk)
        while view:
            done = os.write(self._descriptor, view)
            view = view[done:]

    @property
    def digest(self) -> str:
        """XXH3 of what was written, 16 hexadecimal digits."""
        return self._digest.hexdigest()

    def read(self, begin: int, size: int) -> bytes:
        """Some of what was written."""
        return os.pread(self._descriptor, size, begin)

    def sync(self) -> None:
        """Force the bytes to the disk. Slow: call it in a thread."""
        os.fsync(self._descriptor)

    def close(self) -> None:
        """Close the descriptor; idempotent."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def keep(self, final: Path) -> None:
        """Move the file to its final place. A rename is atomic on one filesystem."""
        _made(final.parent, lambda: self.path.rename(final))


def _made(directory: Path, use: Callable[[], T]) -> T:
    """Call `use`. If the directory is missing, make it and call again: a look each time would cost more than `use`."""
    try:
        return use()
    except FileNotFoundError:
        directory.mkdir(parents=True, exist_ok=True)
        return use()


class Spool:
    """The spool of one state directory."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._reserved: Counter[str] = Counter()

    def upload(self) -> Upload:
        """Begin to receive a file."""
        return Upload(self._layout.spool_tmp)

    @contextlib.contextmanager
    def reserve(self, size: int, run: str = "") -> Iterator[None]:
        """Reserve `size` bytes, so that parallel uploads do not count on the same free space. `run`: '' is unknown."""
        self._reserved[run] += size
        try:
            yield
        finally:
            self._reserved[run] -= size
            if not self._reserved[run]:
                del self._reserved[run]

    def reserved_bytes(self, run: str) -> int:
        """What a run's uploads in progress have reserved."""
        return self._reserved[run]

    def free_bytes(self) -> int:
        """Free space of the spool's filesystem, less what uploads in progress may still take."""
        directory = self._layout.spool_tmp
        status = _made(directory, lambda: os.statvfs(directory))
        return status.f_bavail * status.f_frsize - self._reserved.total()

    def check_takes_files(self) -> None:
        """Raise OSError unless another file can be made there: it may be read-only, another user's, without an inode.

        Some file systems count no inodes, or always say that none is left.
        """
        directory = self._layout.spool_tmp
        status = _made(directory, lambda: os.statvfs(directory))
        if (status.f_files and not status.f_favail) or not os.access(directory, os.W_OK | os.X_OK):
            with self.upload():  # raises what is wrong
                pass

    def now_ns(self) -> int:
        """The time that a file which is written now gets, in Unix ns: the clock may be another host's."""
        with self.upload() as probe:
            return probe.path.stat().st_mtime_ns

    def new_blob(self, batch_id: str, digest: str) -> str:
        """A fresh name for a batch's file. `digest`: as `Upload.digest`."""
        return f"{batch_id}.{uuid.uuid4().hex}.{digest}.safetensors"

    def path(self, run: str, blob: str) -> Path:
        """Where a queue entry's file lies."""
        return self._layout.blob(run, blob)

    def delete(self, run: str, blob: str) -> None:
        """Delete a file; missing is fine."""
        self.path(run, blob).unlink(missing_ok=True)

    def old_blobs(self, run: str, older_than_seconds: float) -> list[str]:
        """Files older than this: the reaper asks the queue about each."""
        found = (path.name for path in _old(self._layout.spool(run), older_than_seconds))
        return sorted(filter(BLOB_NAME.fullmatch, found))

    def reap_uploads(self, older_than_seconds: float) -> int:
        """Delete uploads that a dead API process left unfinished; returns how many."""
        gone = list(_old(self._layout.spool_tmp, older_than_seconds))
        for path in gone:
            path.unlink(missing_ok=True)
        return len(gone)


def _old(directory: Path, seconds: float) -> Iterator[Path]:
    """What was written in a directory longer ago than this; nothing where there is none of this name."""
    limit = time.time() - seconds
    for path in directory.iterdir() if directory.is_dir() else ():
        with contextlib.suppress(FileNotFoundError):  # it was kept or deleted meanwhile
            if path.stat().st_mtime < limit:
                yield path


def check_blob(path: Path) -> None:
    """BlobDamaged when a rollout file, in the spool or kept by the worker, has not the bytes that were uploaded.

    It reads the whole file. One whose name is not `BLOB_NAME` is not compared.
    """
    if not stat.S_ISREG(path.lstat().st_mode):  # a device or a pipe may never end
        raise BlobDamaged(f"{path} is damaged: it is no regular file any more")
    name = BLOB_NAME.fullmatch(path.name)
    if name is None:
        return
    with path.open("rb") as file:
        kind = "XXH3" if len(name[1]) == 16 else "SHA-256"
        found = hashlib.file_digest(file, xxh3_64 if kind == "XXH3" else "sha256").hexdigest()
    if found != name[1]:
        raise BlobDamaged(f"{path} is damaged: its bytes have the {kind} {found}, those that came had {name[1]}")
