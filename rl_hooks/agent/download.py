"""Downloads a drafter version from the service, verifies it, and makes it safe for an engine to load.

    <cache>/<run>/<version>/          complete: verified against the manifest, stripped, fsynced, then renamed here
    <cache>/<run>/<version>.part/     under way: `<file>.part` grows and is resumed with Range after any interruption

Invariant: a directory without `.part` is complete, because the rename is the last step (atomic on one filesystem).
If the service answers 307, the bytes come from its object store, which never sees the service's token. If the store
fails, or gives wrong bytes, the service itself sends them.
No file grows beyond its size in the manifest. For the model that size is bounded by the version's own config.json,
which is downloaded before it; for any other file by 1 MiB. No download takes the last free bytes of the disk.
Synchronous on purpose: it runs in a thread, where hashing and writing do not delay the engines' loops.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, ParamSpec, TypeVar

import httpx

from rl_hooks import wire
from rl_hooks.durable import AtomicDirectory, write_synced
from rl_hooks.engines.bounded import IDENTITY, refuse_encoded
from rl_hooks.errors import DigestError, DownloadError, InvalidDrafterError, ManifestError, NoRoomError, cut
from rl_hooks.format.drafter import (
    CONFIG_FILE,
    MAX_CONFIG_BYTES,
    MODEL_FILE,
    check_drafter,
    kind_of,
    most_bytes,
    parse_drafter,
    read_object,
)
from rl_hooks.format.eagle3 import DrafterError
from rl_hooks.format.release import RECEIPT, OfferedFile, Release, VerifiedManifest, sha256_of
from rl_hooks.lock import LockHeld, exclusive
from rl_hooks.sending.exchange import trusted_of_store

log = logging.getLogger("draftalign.agent")

#: How long to wait for another agent's download into the same cache.
LOCK_SECONDS: Final = 120.0
#: Prefix of the name of an engine that has no address. Such a name is never used again.
IN_PROCESS: Final = "in-process:"
#: Seconds without a write of its memory after which an engine is gone. The second is for one that follows by itself,
#: which writes each second, except while it is idle with a swap to do: files that go then are downloaded again.
_FORGOTTEN_SECONDS: Final = 7 * 86400.0
_FORGOTTEN_ALONE_SECONDS: Final = 3600.0
#: Free bytes of the cache's disk that no download takes: engines and trainers write there too.
MIN_FREE_BYTES: Final = 256 << 20
#: Longest download of one file; the object store has half of it. After that the service is asked again what it offers,
#: and the download resumes.
DOWNLOAD_SECONDS: Final = 600.0

_P = ParamSpec("_P")
_T = TypeVar("_T")


async def in_thread(act: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
    """`asyncio.to_thread` in a daemon thread: a trainer's process that ends does not wait for a download."""
    future: Future[_T] = Future()

    def work() -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            result = act(*args, **kwargs)
        except BaseException as error:  # noqa: BLE001 - it is the caller's
            future.set_exception(error)
        else:
            future.set_result(result)

    threading.Thread(target=work, name="draftalign-files", daemon=True).start()
    return await asyncio.wrap_future(future)


def fetch_release(
    client: httpx.Client,
    manifest: VerifiedManifest,
    cache: Path,
    *,
    again: bool = False,
    stopped: Callable[[], bool] = lambda: False,
) -> Release:
    """Return the manifest's version from the cache, downloading what is missing.

    A cached version that differs from its download is deleted first; with `again`, any cached version is.

    Raises DownloadError (try again), DigestError or InvalidDrafterError (the version is bad), or ManifestError for
    sizes that no drafter has. The next call resumes the download where this one stopped.
    """
    home = cache.absolute() / manifest.run
    home.mkdir(parents=True, exist_ok=True)
    final, staging = home / manifest.version, home / f"{manifest.version}.part"
    try:
        with exclusive(home / ".lock", LOCK_SECONDS, stopped):
            if final.exists():
                cached = cached_release(manifest, final)
                if is_intact(cached) and not again:
                    return cached
                shutil.rmtree(final)
            staging.mkdir(exist_ok=True)
            # The model last: the config tells how large it can be.
            for file in sorted(manifest.files, key=lambda one: one.name == MODEL_FILE):
                _check_size(staging, manifest, file)
                part = staging / f"{file.name}.part"
                _Download(client, manifest, file, part, stopped).into(staging / file.name)
            _make_safe(staging, manifest.kind)
            receipt = {
                "digest": manifest.digest,
                "sha256": {file.name: sha256_of(staging / file.name) for file in manifest.files},
            }
            write_synced(staging / RECEIPT, json.dumps(receipt).encode())
            AtomicDirectory(staging).commit(final)
    except LockHeld as held:
        raise DownloadError(f"{held}, which shares this cache: still downloading, or stopped?") from None
    return cached_release(manifest, final)


def cached_release(manifest: VerifiedManifest, path: Path) -> Release:
    """The release whose complete directory is `path`, as its receipt describes it; nothing is verified here."""
    receipt = _receipt(path, manifest)
    read = {MODEL_FILE, CONFIG_FILE}
    return Release(manifest, path, {name: receipt[name] for name in read} if read <= receipt.keys() else {})


def is_intact(release: Release) -> bool:
    """Whether the release's files are still the verified ones, byte for byte."""
    receipt = _receipt(release.path, release.manifest)
    names = {file.name for file in release.manifest.files}
    try:
        return receipt.keys() == names and all(sha256_of(release.path / name) == receipt[name] for name in names)
    except OSError:
        return False


def prune_cache(cache: Path, run: str, keep: set[str]) -> list[str]:
    """Delete the complete and partial versions of `run` that are not in `keep`; returns the names that went.

    Versions that another engine's memory names stay, too: engines of one host share a cache by default. While another
    agent holds the cache's lock, nothing is deleted; the next call tries again.
    """
    home = cache.absolute() / run
    gone: list[str] = []
    with contextlib.suppress(LockHeld), exclusive(home / ".lock", 0.0):
        keep = keep.union(*map(_remembered, sorted((home / "engines").glob("*.json"))))
        for path in sorted(home.iterdir()):
            if path.is_dir() and path.name.removesuffix(".part") not in keep and path.name != "engines":
                shutil.rmtree(
                    path, ignore_errors=True
                )  # one that cannot be deleted, as a link, must not keep the others
                if not path.exists():
                    gone.append(path.name)
    return gone


def _remembered(memory: Path) -> set[str]:
    """The versions that an engine's memory names: the one it has, the one it was asked to load, and its fallback.

    `EngineFollower` writes the memory. A memory that was not written for a week is of an engine that is gone, and names
    nothing. For an engine that follows by itself an hour is enough: it was killed, and its memory is deleted,
    because its name is never used again.
    """
    try:
        document = json.loads(memory.read_bytes())
        alone = str(document["engine"]).startswith(IN_PROCESS)
        if time.time() - memory.stat().st_mtime > (_FORGOTTEN_ALONE_SECONDS if alone else _FORGOTTEN_SECONDS):
            if alone:
                memory.unlink()
            return set()
        releases = [document[name] for name in ("fallback", "pending") if document[name] is not None]
        served = [] if document["known"] is None else [document["known"]["version"]]
        return {str(release["manifest"]["version"]) for release in releases} | set(map(str, served))
    except (OSError, ValueError, KeyError, TypeError):  # the engine's own agent ignores it too
        return set()


def strip_shared(path: Path) -> list[str]:
    """Remove embeddings, and heads of MTP modules, from a safetensors file, rewriting it only if there are any.

    Engines share these modules of the policy with the drafter, so loading such a tensor overwrites the *policy*.
    Returns the names removed; raises WireError if the file is not safetensors.
    """
    source = wire.MappedFile(path)
    infos = source.header.tensors
    poison = sorted(
        name
        for name in infos
        if any(part.startswith("embed_tokens") for part in name.split(".")) or "shared_head.head." in name
    )
    if poison:
        kept = {
            name: wire.Tensor.of(source.array(name), info.dtype) for name, info in infos.items() if name not in poison
        }
        stripped = path.with_name(f"{path.name}.stripped")
        with stripped.open("wb") as out:
            for piece in wire.encode(kept, source.header.metadata):
                out.write(piece)
            out.flush()
            os.fsync(out.fileno())
        stripped.replace(path)
    return poison


def _check_size(staging: Path, manifest: VerifiedManifest, file: OfferedFile) -> None:
    """Refuse a file that is larger than a drafter's can be, before it is requested."""
    most, by = MAX_CONFIG_BYTES, "of a file beside the model"
    if file.name == MODEL_FILE:
        try:
            most, by = most_bytes(parse_drafter(read_object(staging / CONFIG_FILE))), f"by its {CONFIG_FILE}"
        except (OSError, DrafterError) as error:
            raise InvalidDrafterError(f"the version is no drafter that an engine could serve: {error}") from error
    if file.bytes > most:
        raise ManifestError(
            f"{manifest.version}/{file.name}: expected at most {most} bytes {by}, the manifest says {file.bytes}; "
            "nothing of it was downloaded. Publish another version, and see who wrote this manifest"
        )


def _check_room(directory: Path, wanted: int, name: str) -> None:
    free = shutil.disk_usage(directory).free
    if wanted > 0 and wanted > free - MIN_FREE_BYTES:
        raise NoRoomError(
            f"{name}: expected {wanted} bytes and {MIN_FREE_BYTES} to spare free at {directory}, found {free}; nothing "
            "was written. Free some, or give the agent another cache directory"
        )


def _make_safe(directory: Path, kind: str) -> None:
    """Strip the checkpoint, and verify that it is a whole drafter of this kind: engines load a partial one silently."""
    path = directory / MODEL_FILE
    if not path.is_file():
        raise InvalidDrafterError(f"the version has no {MODEL_FILE}; publish drafters as one safetensors file")
    try:
        strip_shared(path)
        tensors = wire.MappedFile(path).header.tensors
    except wire.WireError as error:
        raise InvalidDrafterError(f"{MODEL_FILE} is not a usable safetensors file: {error}") from error
    try:
        config = read_object(directory / CONFIG_FILE)
        if (said := kind_of(config)) != kind:
            raise InvalidDrafterError(f"{CONFIG_FILE} is that of a drafter of kind {said}, the manifest says {kind}")
        check_drafter({name: (info.shape, info.dtype) for name, info in tensors.items()}, parse_drafter(config))
    except (OSError, DrafterError) as error:
        raise InvalidDrafterError(f"the version is no drafter that an engine could serve: {error}") from error


@dataclass(slots=True)
class _Download:
    """One file of a version, on its way into `part`."""

    client: httpx.Client
    manifest: VerifiedManifest
    file: OfferedFile
    part: Path
    stopped: Callable[[], bool]
    direct: bool = False  # never from the object store
    redirected: bool = False  # bytes may have come from there
    deadline: float = field(default_factory=lambda: time.monotonic() + DOWNLOAD_SECONDS)

    def into(self, done: Path) -> None:
        """Get it, resuming a partial one, and verify it before it gets its name."""
        file, part, version = self.file, self.part, self.manifest.version
        if done.exists():
            if _matches(done, file):
                return
            done.unlink()  # for instance stripped, then interrupted
        resumed = self._have() > 0
        _check_room(part.parent, file.bytes - self._have(), f"{version}/{file.name}")
        self._receive()
        if not _matches(part, file) and (resumed or self.redirected):
            # The resumed part may be damaged by an interrupted write, and the object store may hold anything: download
            # once more, from the first byte.
            log.warning("%s/%s is not what the manifest says; asking the service itself", version, file.name)
            part.unlink()
            self.direct = True
            self._receive()
        if not _matches(part, file):
            found = f"{part.stat().st_size} bytes, sha256 {sha256_of(part)}"
            part.unlink()
            raise DigestError(
                f"{version}/{file.name}: expected {file.bytes} bytes, sha256 {file.sha256}, got {found}; "
                "nothing was swapped"
            )
        part.replace(done)

    def _have(self) -> int:
        return self.part.stat().st_size if self.part.exists() else 0

    def _receive(self) -> None:
        """Append until the file has its size. A broken connection is resumed as long as each brings bytes."""
        file, part = f"{self.manifest.version}/{self.file.name}", self.part
        while (have := self._have()) != self.file.bytes or not part.exists():
            self._check_time(have, self.deadline)
            if have > self.file.bytes:
                part.unlink()
                have = 0
            try:
                self._ask(have)
            except _StoreFailed as error:
                log.warning("%s: %s; asking the service itself", file, error)
                self.redirected = self.direct = True
            except httpx.HTTPError as error:
                self._check_time(now := self._have(), self.deadline)
                if now <= have:
                    raise DownloadError(f"{file} stopped at byte {now}: {cut(repr(error), 400)}") from error
            else:
                break

    def _ask(self, have: int) -> None:
        """Ask once, and append what comes."""
        # identity: offsets and sizes of a compressed answer would not be the file's.
        headers = IDENTITY | ({"Range": f"bytes={have}-"} if have else {})
        url = f"/drafter/{self.manifest.version}/{self.file.name}"
        asked = {"run": self.manifest.run} | ({"direct": "true"} if self.direct else {})
        with (
            _ended(self.client, self.deadline),
            self.client.stream("GET", url, params=asked, headers=headers) as response,
        ):
            if response.status_code != 307 or self.direct:
                # A store's answer is left to the digest: some stores mark their files with an encoding of their own.
                refuse_encoded(response, f"GET {url}")
                self._append(response, f"GET {url}", have, self.deadline)
                return
            location = response.headers.get("Location", "")
        until = (time.monotonic() + self.deadline) / 2  # the service has as long, if the store does not give it
        try:
            tls = trusted_of_store(os.environ.get("DRAFTALIGN_CA_FILE"))
            # A client of its own: the service's has the token in its headers, and trusts only the service's authority.
            with (
                httpx.Client(timeout=self.client.timeout, trust_env=False, verify=tls) as store,
                _ended(store, until),
                store.stream("GET", location, headers=headers) as response,
            ):
                self._append(response, "the object store", have, until)
        # UnicodeError: no host can have that name.
        except (httpx.HTTPError, httpx.InvalidURL, UnicodeError, DownloadError) as error:
            if self.stopped():
                raise
            raise _StoreFailed(f"the object store failed: {cut(str(error) or repr(error), 400)}") from error
        self.redirected = True

    def _append(self, response: httpx.Response, asked: str, have: int, deadline: float) -> None:
        file = self.file
        if response.status_code == 200:
            have = 0  # the answer holds the whole file, and not only the range
        elif response.status_code != 206 or not have:
            # The first characters: a hostile answer may be of any length.
            text = next(response.iter_raw(), b"")[:300].decode("utf-8", "replace")
            raise DownloadError(f"{asked} answered {response.status_code}: {text}")
        elif not response.headers.get("Content-Range", "").startswith(f"bytes {have}-"):
            raise DownloadError(f"{asked} from byte {have} answered {response.headers.get('Content-Range')!r:.200}")
        with self.part.open("r+b" if have else "wb") as out:
            out.seek(have)
            # Raw: an iterator with a buffer would lose the buffered bytes when the connection breaks.
            for chunk in response.iter_raw():
                if have + len(chunk) > file.bytes:
                    out.truncate(0)  # what came before is not the file's either
                    raise DigestError(f"{self.manifest.version}/{file.name} is longer than its {file.bytes} bytes")
                out.write(chunk)
                have += len(chunk)
                if self.stopped():
                    raise DownloadError(f"stopped at byte {have} of {file.name}; the next start resumes it")
                self._check_time(have, deadline)
            out.flush()
            os.fsync(out.fileno())

    def _check_time(self, have: int, deadline: float) -> None:
        if have < self.file.bytes and time.monotonic() > deadline:
            raise DownloadError(
                f"{self.manifest.version}/{self.file.name}: expected {self.file.bytes} bytes within "
                f"{DOWNLOAD_SECONDS:.0f} s (an object store has half of it), got {have}; goes on from there once the "
                "service was asked again. If this comes back, see the network to the service"
            )


@contextlib.contextmanager
def _ended(client: httpx.Client, deadline: float) -> Iterator[None]:
    """Close the client at the deadline: httpx bounds the time between two bytes, and no answer's headers."""
    timer = threading.Timer(max(0.0, deadline - time.monotonic()), client.close)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


class _StoreFailed(Exception):  # noqa: N818
    """The object store did not give the rest of the file."""


def _receipt(directory: Path, manifest: VerifiedManifest) -> dict[str, str]:
    """SHA-256 by file name, as written when the files were verified against this manifest's digest; else nothing."""
    try:
        receipt = json.loads((directory / RECEIPT).read_bytes())
        return {str(n): str(d) for n, d in receipt["sha256"].items()} if receipt["digest"] == manifest.digest else {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def _matches(path: Path, file: OfferedFile) -> bool:
    return path.stat().st_size == file.bytes and sha256_of(path) == file.sha256
