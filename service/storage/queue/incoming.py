"""Rollout files on their way through object storage (`rollouts_url`), past the API.

    <url>/rollouts/<run>/<blob>

Invariants:
* A file is in the store only from the trainer's PUT until a worker has it in the spool. After that it is like a file
  that came through the API. With `state_url` the spool is lost if its host is, so the object is kept until the batch is
  acknowledged, or as long as a dead batch's file (`kept`).
* A file's name holds the time at which it came, which becomes its time in the spool: which head scores a file depends
  on whether the head came before it.
* A file's name holds the SHA-256 of its bytes. The URL for its PUT is signed for that digest and length. Both are
  compared when the file is fetched: a store may ignore the signed digest, and its owner may change the object.
* An object is deleted when its file is in the spool (with `kept`: when its batch has ended), or when no entry will ever
  name it (`disown`).
* A prefix belongs to one state directory.

Every error of the store is an `ObjectStoreError`, which is an OSError, and comes within a bounded time.
"""

from __future__ import annotations

import base64
import contextlib
import datetime
import errno
import hashlib
import os
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, Self
from urllib.parse import parse_qs, urlsplit

from service.errors import BlobDamaged, ConfigurationError, ObjectStoreError
from service.settings import Settings
from service.storage.drafters.objects import FETCHED_BYTES, URL_SECONDS, ObjectStore
from service.storage.layout import BLOB_NAME
from service.storage.spool import Spool

#: Stretches of a file that are nearer to each other than this are read in one request.
_NEAR_BYTES: Final = 16 << 10
#: After a failure the store is not asked for this time, so that a claim of many files does not wait for each.
_AWAY_SECONDS: Final = 5.0


class SignedPut(NamedTuple):
    """The URL for the PUT of one file. `headers` must be sent with it: the signature covers them."""

    url: str
    headers: dict[str, str]


def new_name(batch_id: str, sha256: str, came_ns: int) -> str:
    """A fresh name for a batch's file. `came_ns`: when its sender asked, by the clock of the spool (Unix ns)."""
    return f"{batch_id}.{came_ns:016x}{uuid.uuid4().hex[:16]}.{sha256}.safetensors"


def sha256_in(blob: str) -> str:
    """The SHA-256 in a file's name; empty for a file that came through the API, which names another digest."""
    name = BLOB_NAME.fullmatch(blob)
    return name[1] if name is not None and len(name[1]) == 64 else ""


class Incoming(ObjectStore):
    """The rollout files under one URL."""

    def __init__(self, url: str, *, kept: bool = False) -> None:
        """`kept`: the store is the spool. Raises ConfigurationError where nothing can be signed, or nobody be asked."""
        super().__init__("rollouts_url", url)
        self.kept = kept
        self._away_until = 0.0
        try:
            import botocore.auth
            import botocore.awsrequest
            import botocore.exceptions
            import botocore.session
        except ImportError as error:
            raise ConfigurationError("rollouts_url needs the extra s3: pip install '.[s3]'") from error
        self._botocore: Any = botocore
        try:
            self._credentials: Any = botocore.session.get_session().get_credentials()
            self.place("none", new_name("0" * 32, "0" * 64, 0), 0)
        except (ObjectStoreError, botocore.exceptions.BotoCoreError) as error:
            raise ConfigurationError(
                f"rollouts_url {url}: no upload can be signed: {error}. Set AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY "
                "and AWS_REGION, or give this machine a role"
            ) from error

    @classmethod
    def of(cls, settings: Settings) -> Self | None:
        """The store of these settings; None: files go through the API, into the directory."""
        url = settings.rollouts_url or settings.state_url
        return None if url is None else cls(url, kept=settings.state_url is not None)

    @staticmethod
    def keeper(store: Incoming | None) -> Incoming | None:
        """The store, if it keeps files until their batches have ended; None: the spool keeps them."""
        return store if store is not None and store.kept else None

    def put(self, run: str, blob: str, path: Path) -> None:
        """Store a file that came through the API. Blocks."""
        with self.errors(key := _key(run, blob)):
            self.send(key, path)

    def holds(self, run: str, blob: str) -> bool:
        """Whether the store has a file. Blocks."""
        with self.errors(key := _key(run, blob)):
            return self.size(key) is not None

    def place(self, run: str, blob: str, size: int) -> SignedPut:
        """A URL that takes one file of this length, with the digest in its name, for a quarter of an hour. Blocks."""
        key = _key(run, blob)
        checksum = base64.b64encode(bytes.fromhex(sha256_in(blob))).decode()
        headers = {"Content-Length": str(size), "x-amz-checksum-sha256": checksum}
        if self._credentials is None:
            raise ObjectStoreError("there are no credentials")
        try:
            with self.errors(key):
                # obstore signs no headers, and botocore knows neither its endpoint nor its way to name a bucket.
                signed = self._obstore.sign(self._store, "PUT", key, datetime.timedelta(seconds=URL_SECONDS))
            region = parse_qs(urlsplit(signed).query)["X-Amz-Credential"][0].split("/")[2]
            request = self._botocore.awsrequest.AWSRequest("PUT", signed.partition("?")[0], headers=headers)
            auth = self._botocore.auth.S3SigV4QueryAuth
            auth(self._credentials.get_frozen_credentials(), "s3", region, int(URL_SECONDS)).add_auth(request)
        except self._botocore.exceptions.BotoCoreError as error:
            raise ObjectStoreError(f"no upload can be signed: {error}") from error
        return SignedPut(str(request.url), headers)

    async def read(self, run: str, blob: str, size: int, stretches: Sequence[tuple[int, int]]) -> list[bytes] | None:
        """Read stretches of a file, each a pair of begin and end. None: there is no such file of this length."""
        key, (begins, ends) = _key(run, blob), zip(*stretches, strict=True)
        with self.errors(key):
            try:
                if (await self._obstore.head_async(self._store, key))["size"] != size:
                    return None
                found = await self._obstore.get_ranges_async(
                    self._store, key, starts=begins, ends=ends, coalesce=_NEAR_BYTES
                )
            except FileNotFoundError:
                return None
        return [bytes(one) for one in found]

    def bring(self, run: str, blob: str, size: int, spool: Spool, *, least_free_bytes: int, sync: bool) -> None:
        """Fetch a file into the spool and compare its length and digest. Then delete the object, unless it is kept.

        Blocks. Raises FileNotFoundError if it is not there, BlobDamaged if its length or digest differs, and OSError
        if it cannot be fetched now: the store fails, or the disk has no room. If the process is killed in here, the
        file is still in the store or in the spool.
        """
        key, digest = _key(run, blob), hashlib.sha256()
        if (left := self._away_until - time.monotonic()) > 0:
            raise ObjectStoreError(f"the object store failed a moment ago; it is asked again in {left:.0f} s")
        if (found := self._of_store(key, self.size)) is None:
            raise FileNotFoundError(errno.ENOENT, "no such object", key)
        if found != size:
            raise BlobDamaged(f"{key} is damaged: the object store has {found} bytes of it, the sender said {size}")
        if spool.free_bytes() - size < least_free_bytes:
            raise OSError(errno.ENOSPC, f"{size} bytes would leave less than {least_free_bytes} free on the disk", key)
        with spool.upload() as upload:
            for begin in range(0, size, FETCHED_BYTES):
                for piece in self._of_store(key, self.pieces, begin, size):
                    upload.write(piece)
                    digest.update(piece)
            if digest.hexdigest() != sha256_in(blob):
                raise BlobDamaged(f"{key} is damaged: its bytes have the SHA-256 {digest.hexdigest()}")
            if sync:
                upload.sync()
            upload.keep(path := spool.path(run, blob))
        came_ns = int(blob.split(".")[1][:16], 16)  # the time of arrival: heads that came since must be newer
        os.utime(path, ns=(came_ns, came_ns))  # only now: old files in `spool/tmp` are swept
        if not self.kept:
            self.discard(run, [blob])

    def discard(self, run: str, blobs: Sequence[str]) -> None:
        """Delete files that nobody needs. If the store is away, the sweep does it later. Blocks."""
        with contextlib.suppress(ObjectStoreError):
            self.remove(run, blobs)

    def _of_store(self, key: str, ask: Any, *args: Any) -> Any:
        try:
            with self.errors(key):
                return ask(key, *args)
        except ObjectStoreError:
            self._away_until = time.monotonic() + _AWAY_SECONDS
            raise

    def old(self, run: str, older_than_seconds: float) -> list[str]:
        """Names of files that are older than this. The reaper asks the queue about each. Blocks."""
        limit = time.time() - older_than_seconds
        names = [(key.rpartition("/")[2], written) for key, written in self.listed(f"rollouts/{run}/")]
        return [name for name, written in names if written < limit and BLOB_NAME.fullmatch(name)]

    def remove(self, run: str, blobs: Sequence[str]) -> None:
        """Delete files; missing is fine. Blocks."""
        self.delete([_key(run, blob) for blob in blobs])

    def of_run(self, run: str) -> list[str]:
        """Keys of everything of a run. Blocks."""
        return [key for key, _ in self.listed(f"rollouts/{run}/")]


def _key(run: str, blob: str) -> str:
    return f"rollouts/{run}/{blob}"
