"""Object storage, and in it copies of published drafters (`drafters_url`) that engines fetch by presigned URLs.

    <url>/runs/<run>/<digest of the version>/<file>

Invariants:
* A key holds the version's digest, so an object never changes: whoever writes it again writes the same bytes. A put
  that finds its key taken by an object of the right length found its own earlier write.
* An object appears whole (one put, or the end of a multipart upload), and before `latest.json` names its version.
* A prefix is one state directory's: `keep_only` deletes whatever else stands under a run.

Every error of the store is an `ObjectStoreError`, which is an OSError, and comes within a bounded time.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import time
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from service.errors import ConfigurationError, ObjectStoreError

#: An upload holds this much of a file times `_PARTS_AT_ONCE` in memory.
_PART_BYTES: Final = 8 << 20
_PARTS_AT_ONCE: Final = 2
#: One request, a part's upload among them; and all attempts at it together.
_REQUEST_SECONDS: Final = 30.0
_RETRY_SECONDS: Final = 10.0
#: A file is fetched in pieces: each is a request of bounded time, and memory holds four.
_PIECE_BYTES: Final = 8 << 20
_PIECES_AT_ONCE: Final = 4
FETCHED_BYTES: Final = _PIECE_BYTES * _PIECES_AT_ONCE
#: How long a presigned URL is good for. What has begun may take longer.
URL_SECONDS: Final = 900.0
#: Age at which objects of no version were left by a publisher that died.
_LEFTOVER_SECONDS: Final = 3600.0


class ObjectStore:
    """What lies under one URL. Credentials and endpoint come from the environment that obstore reads."""

    def __init__(self, setting: str, url: str, *, request_seconds: float = _REQUEST_SECONDS) -> None:
        """Nothing is sent yet. Raises ConfigurationError where the URL or the environment cannot be used."""
        try:
            import obstore
            from obstore.store import from_url
        except ImportError as error:
            raise ConfigurationError(f"{setting} needs the extra s3: pip install '.[s3]'") from error
        seconds = datetime.timedelta(seconds=1)
        client = {"allow_http": True, "connect_timeout": 5 * seconds, "timeout": request_seconds * seconds}
        retry = {"max_retries": 3, "retry_timeout": _RETRY_SECONDS * seconds}
        options = {"mkdir": True} if url.startswith("file://") else {"client_options": client, "retry_config": retry}
        self._obstore: Any = obstore
        self._bare_tags = False
        try:
            self._store: Any = from_url(url, **options)
        except (obstore.exceptions.BaseError, ValueError, OSError) as error:
            raise ConfigurationError(f"{setting} {url}: {_said(error)}") from error

    def size(self, key: str) -> int | None:
        """Bytes of an object; None where there is none. Inside `errors`."""
        try:
            return int(self._obstore.head(self._store, key)["size"])
        except FileNotFoundError:
            return None

    def tag(self, key: str) -> str | None:
        """Entity tag of an object; None where there is none. Blocks."""
        with self.errors(key):
            try:
                return str(self._obstore.head(self._store, key)["e_tag"])
            except FileNotFoundError:
                return None

    def listed(self, prefix: str) -> list[tuple[str, float]]:
        """Keys under a prefix, with the time at which each was written, in Unix seconds. Blocks."""
        with self.errors(prefix):
            found = [one for page in self._obstore.list(self._store, prefix) for one in page]
        return [(one["path"], one["last_modified"].timestamp()) for one in found]

    def delete(self, keys: Sequence[str]) -> None:
        """Delete objects; missing is fine. Blocks."""
        if keys:
            with self.errors(keys[0]):
                self._obstore.delete(self._store, list(keys))

    def tags(self, prefix: str) -> dict[str, str]:
        """Entity tags of all objects under a prefix, by key. Blocks."""
        with self.errors(prefix):
            found = [one for page in self._obstore.list(self._store, prefix) for one in page]
        return {one["path"]: str(one["e_tag"]) for one in found}

    def look(self, key: str, etag: str | None = None, *, most_bytes: int) -> tuple[bytes, str | None] | None:
        """A small object and its entity tag, which is None where there is no object. None: it has this tag. Blocks.

        Raises ValueError where it is larger.
        """
        with self.errors(key):
            try:
                found = self._obstore.get(self._store, key, options={} if etag is None else {"if_none_match": etag})
                if (size := found.meta["size"]) > most_bytes:
                    raise ValueError(f"it has {size} bytes, the limit is {most_bytes}")
                return bytes(found.bytes()), str(found.meta["e_tag"])
            except FileNotFoundError:
                return b"", None
            except self._obstore.exceptions.NotModifiedError:
                return None

    def replace(self, key: str, body: bytes, etag: str | None) -> str | None:
        """Put a small object where another has this entity tag, or where there is none. Blocks.

        Returns its own tag. None: it is another, or this put has been done, and its answer was lost.
        """
        if etag is None:
            return self._put_where(key, body, "create")
        # HTTP has a tag in quotes. Ceph's gateway says it so, and knows it in If-Match only without them.
        quoted, bare = {"e_tag": etag}, {"e_tag": etag.strip('"')}
        form, other = (bare, quoted) if self._bare_tags else (quoted, bare)
        tag = self._put_where(key, body, form)
        # The other form only where this one was refused wrongly: stores take it for a fault, or for no condition.
        if tag is None and self.tag(key) == etag and (tag := self._put_where(key, body, other)) is not None:
            self._bare_tags = not self._bare_tags
        return tag

    def _put_where(self, key: str, body: bytes, mode: Any) -> str | None:
        with self.errors(key):
            try:
                return str(self._obstore.put(self._store, key, body, mode=mode, use_multipart=False)["e_tag"])
            except (self._obstore.exceptions.AlreadyExistsError, self._obstore.exceptions.PreconditionError):
                return None

    def trouble_with_conditions(self, key: str) -> str | None:
        """What this store does wrong with the condition of a put, by a trial of each. `key`: to try with. Blocks."""

        def after(body: bytes, etag: str | None) -> tuple[bytes, str | None]:
            self.replace(key, body, etag)  # what stands then is asked for: its answer may have been lost
            return self.look(key, most_bytes=len(b"another")) or (b"", None)

        first, tag = after(b"first", None)
        done, tag = after(b"second", tag)  # it shows in which form this store knows a tag; the next are in that form
        kept = [after(b"another", none) for none in (None, f'"{"0" * 32}"')] == [(done, tag)] * 2
        self.delete([key])
        if not kept:
            return "does a put whose condition is not met"
        return None if (first, done) == (b"first", b"second") else "refuses a put whose condition is met"

    def send(self, key: str, path: Path, mode: str = "overwrite") -> None:
        """Put a file, in parts where it is large. Inside `errors`. Blocks."""
        options = {"chunk_size": _PART_BYTES, "max_concurrency": _PARTS_AT_ONCE, "mode": mode}
        self._obstore.put(self._store, key, path, **options)

    def fetch(self, key: str, size: int, path: Path) -> None:
        """Get an object of this size into a file. Raises FileNotFoundError where there is none. Blocks."""
        with self.errors(key):
            found = self.size(key)
        if found is None:
            raise FileNotFoundError(errno.ENOENT, "no such object", key)
        if found != size:
            raise ObjectStoreError(f"the object store has {found} bytes of {key}, expected {size}")
        with path.open("wb") as file:
            for begin in range(0, size, FETCHED_BYTES):
                with self.errors(key):
                    file.writelines(self.pieces(key, begin, size))

    def pieces(self, key: str, begin: int, size: int) -> list[memoryview]:
        """The next pieces of an object, from a byte on. Inside `errors`. Blocks."""
        starts = range(begin, min(begin + FETCHED_BYTES, size), _PIECE_BYTES)
        ends = [min(start + _PIECE_BYTES, size) for start in starts]
        found = self._obstore.get_ranges(self._store, key, starts=list(starts), ends=ends, coalesce=0)
        return [memoryview(one) for one in found]

    @contextlib.contextmanager
    def errors(self, what: str) -> Iterator[None]:
        """Make every error of the store an `ObjectStoreError`."""
        try:
            yield
        except (self._obstore.exceptions.BaseError, OSError) as error:
            raise ObjectStoreError(f"the object store failed at {what}: {_said(error)}") from error


class Objects(ObjectStore):
    """The drafters under one URL."""

    def __init__(self, url: str, *, request_seconds: float = _REQUEST_SECONDS) -> None:
        """As of `ObjectStore`."""
        super().__init__("drafters_url", url, request_seconds=request_seconds)

    def put(self, run: str, digest: str, path: Path, size: int) -> None:
        """Store one file of a version, of `size` bytes; nothing is sent where it is there already. Blocks."""
        key = _key(run, digest, path.name)
        with self.errors(key):
            if (found := self.size(key)) is None:
                try:
                    # obstore sends a conditional put in one piece: larger files go in parts, to a key that is theirs.
                    mode = "create" if size <= _PART_BYTES else "overwrite"
                    self.send(key, path, mode)
                except self._obstore.exceptions.AlreadyExistsError:
                    pass  # ours: the attempt whose answer was lost
                found = self.size(key)
        if found != size:
            raise ObjectStoreError(
                f"the object store holds {found} bytes as {key}, expected {size}; delete that object"
            )

    async def url(self, run: str, digest: str, name: str, size: int) -> str | None:
        """A URL that opens one file for a quarter of an hour; None where the store has no such file, or cannot sign."""
        key = _key(run, digest, name)
        with self.errors(key):
            try:
                if (await self._obstore.head_async(self._store, key))["size"] != size:
                    return None
                expires = datetime.timedelta(seconds=URL_SECONDS)
                return str(await self._obstore.sign_async(self._store, "GET", key, expires))
            except (FileNotFoundError, ValueError, TypeError):  # a directory cannot sign
                return None

    def keep_only(self, run: str, digests: Collection[str], gone: Collection[str]) -> None:
        """Delete the objects of the versions `gone`, and old ones of no version in `digests`. Blocks.

        A young object may be of a version that is about to be published.
        """
        began = time.time()

        def unwanted(digest: str, written: float) -> bool:
            return digest not in digests and (digest in gone or began - written > _LEFTOVER_SECONDS)

        found = self.listed(f"runs/{run}/")
        self.delete([key for key, written in found if unwanted(key.split("/")[2], written)])

    def of_run(self, run: str) -> list[str]:
        """Keys of everything of a run. Blocks."""
        return [key for key, _ in self.listed(f"runs/{run}/")]


def _key(run: str, digest: str, name: str) -> str:
    return f"runs/{run}/{digest}/{name}"


def _said(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
