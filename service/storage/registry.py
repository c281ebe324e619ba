"""Published drafters of each run: immutable version directories, one pointer, and an append-only history.

Invariants, also after loss of power at any line:
* A version directory is complete or invisible: files and manifest are fsynced in a staging directory beside it, then
  one rename (atomic on one filesystem) makes it appear. It never changes afterwards.
* `latest.json` is replaced by one atomic rename, and its `sequence` only grows: publish, rollback and push-again each
  take a new number, so a reader that remembers the last sequence can refuse anything older.
* `publish` is compare-and-set on `latest`: a drafter replaces only the version that it was judged against. So a worker
  that was paused during another publish or a rollback changes nothing (docs/guide/operating.md, "What a paused process
  can do").
* One `flock` per run serialises the API (rollback, push-again) and the worker (publish). After `LOCK_SECONDS` the error
  names the holder: a paused process (a debugger, a paused container) keeps the lock until it goes on or is killed.

Handles files only: no torch, no tensors.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
import threading
import time
import uuid
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Literal

from pydantic import BaseModel, ConfigDict
from pydantic_core import to_json

from rl_hooks.durable import AtomicDirectory, replace_file, write_synced
from rl_hooks.lock import LockHeld, exclusive
from service.errors import LatestMoved, RegistryBusy, RegistryError, VersionNotFound
from service.monitor.records import RunEvent
from service.storage.layout import FILE_NAME, VERSION_NAME, Layout

MANIFEST = "manifest.json"
#: For `instead_of`: replace the served version, whichever it is.
ANY = "*"
_READ_BYTES = 1 << 20
#: How long to wait for a run's lock. It is held for renames, and for deleting old versions.
LOCK_SECONDS = 30.0
#: Age at which a staging directory was left by a publisher that died.
_LEFTOVER_SECONDS = 3600.0
#: Canary verdicts remembered, to drop repeats. A repeat comes within minutes, if at all.
_CANARIES_REMEMBERED = 4096
_PUSHES_REMEMBERED = 16


class VersionFile(BaseModel):
    """One file of a version, with its digest."""

    model_config = ConfigDict(frozen=True)
    name: str
    bytes: int
    sha256: str


class Manifest(BaseModel):
    """What `GET /drafter/latest` answers. `sequence` and `reason` are the pointer's, the rest is the version's."""

    model_config = ConfigDict(frozen=True)
    run: str
    version: str
    sequence: int
    reason: str
    digest: str
    files: tuple[VersionFile, ...]
    parent: str | None
    policy_version: int
    kind: Literal["eagle3", "mtp"] = "eagle3"
    config_fingerprint: str
    d2t_sha256: str
    aux_layers: tuple[int, ...]
    aux_layers_convention: Literal["entering"] = "entering"
    created: float
    alpha: dict[str, Any] | None = None
    gate: dict[str, Any] | None = None

    @property
    def etag(self) -> str:
        """Strong entity tag: changes whenever `latest` moves."""
        return f'"{self.sequence}-{self.version}"'


class HistoryDigest:
    """The facts that acceptance reports need from the history. Each line is read once."""

    def __init__(self) -> None:
        #: When the drafter was pushed again the last times, in Unix seconds.
        self.pushed: deque[float] = deque(maxlen=_PUSHES_REMEMBERED)
        #: `canary_key` of the newest verdicts, oldest first.
        self.canaries: dict[tuple[str, ...], None] = {}
        #: How many versions were published.
        self.published = 0
        self.bytes_read = 0

    def read(self, file: BinaryIO) -> None:
        """Read the complete lines appended since the last call."""
        file.seek(self.bytes_read)
        text = file.read()
        complete = text[: text.rfind(b"\n") + 1]
        self.bytes_read += len(complete)
        for event in _events(complete.splitlines()):
            if event.get("event") == "published":
                self.published += 1
            elif event.get("event") == "pushed_again" and isinstance(when := event.get("time"), (int, float)):
                self.pushed.append(when)
            elif str(event.get("event")).startswith("canary_"):
                self.canaries[canary_key(event)] = None
                while len(self.canaries) > _CANARIES_REMEMBERED:
                    del self.canaries[next(iter(self.canaries))]


def canary_key(event: Mapping[str, Any]) -> tuple[str, ...]:
    """Two canary events with the same key are the same verdict."""
    return tuple(str(event.get(name)) for name in ("event", "version", "reporter", "offer"))


def _events(lines: Sequence[bytes]) -> Iterator[dict[str, Any]]:
    for line in lines:
        with contextlib.suppress(ValueError):
            event = json.loads(line)
            if isinstance(event, dict):
                yield event


class Registry:
    """The registry of one state directory."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._digests: dict[str, HistoryDigest] = {}
        self._reading = threading.Lock()

    # --- reading
    def latest(self, run: str) -> Manifest | None:
        """Manifest of the served version, or None before the first publish."""
        pointer = self._pointer(run)
        while pointer is not None:
            try:
                manifest = self.get(run, pointer["version"])
            except VersionNotFound:
                moved = self._pointer(run)  # `latest` may have moved, and the old version been pruned
                if moved == pointer:
                    raise
                pointer = moved
            else:
                return manifest.model_copy(update={"sequence": pointer["sequence"], "reason": pointer["reason"]})
        return None

    def get(self, run: str, version: str) -> Manifest:
        """Manifest of one version as it was published."""
        path = self._layout.drafter(run, version) / MANIFEST
        try:
            return Manifest.model_validate_json(path.read_bytes())
        except FileNotFoundError as error:
            raise VersionNotFound(f"run {run!r} has no drafter version {version!r}; see GET /drafters") from error

    def versions(self, run: str) -> list[str]:
        """Complete versions on disk, oldest first."""
        directory = self._layout.drafters(run)
        if not directory.is_dir():
            return []
        names = (p.name for p in directory.iterdir() if VERSION_NAME.fullmatch(p.name) and (p / MANIFEST).is_file())
        return sorted(names, key=_number)

    def history(self, run: str) -> list[dict[str, Any]]:
        """Every recorded event, oldest first. A line torn by loss of power is skipped."""
        try:
            lines = self._layout.history(run).read_bytes().splitlines()
        except FileNotFoundError:
            return []
        return list(_events(lines))

    def events(self, run: str) -> list[RunEvent]:
        """The history, for whoever looks into it."""
        return [RunEvent.of(event) for event in self.history(run)]

    def digest(self, run: str) -> HistoryDigest:
        """Publishes, pushes and canary verdicts of the history, up to date."""
        with self._reading:
            digest = self._digests.setdefault(run, HistoryDigest())
            with contextlib.suppress(FileNotFoundError), self._layout.history(run).open("rb") as file:
                if file.seek(0, os.SEEK_END) < digest.bytes_read:  # another file, from a backup
                    digest = self._digests[run] = HistoryDigest()
                digest.read(file)
            return digest

    def path(self, run: str, version: str, name: str) -> Path:
        """Path of one file that the version's manifest lists (or of the manifest itself)."""
        manifest = self.get(run, version)
        names = [file.name for file in manifest.files]
        if name not in (*names, MANIFEST):
            raise VersionNotFound(f"drafter {version} has no file {name[:80]!r}; it has {names}")
        return self._layout.drafter_file(run, version, name)

    # --- writing
    def stage(self, run: str) -> Path:
        """Make a new, empty staging directory on the registry's filesystem, to be filled and handed to `publish`."""
        return AtomicDirectory.make(self._layout.drafters(run), ".staged-").path

    def publish(
        self,
        run: str,
        staged: Path,
        *,
        policy_version: int,
        parent: str | None,
        config_fingerprint: str,
        d2t_sha256: str,
        aux_layers: Sequence[int],
        kind: Literal["eagle3", "mtp"] = "eagle3",
        alpha: Mapping[str, Any] | None = None,
        gate: Mapping[str, Any] | None = None,
        reason: str = "published",
        instead_of: str | None = ANY,
    ) -> Manifest:
        """Turn a staged directory into the next version and point `latest` at it (compare-and-set).

        `instead_of`: the version that it was judged against, None where nothing was served. Raises `LatestMoved` when
        another one is served now.
        """
        files = tuple(_digest(path) for path in _staged_files(staged))
        digest = hashlib.sha256("".join(f"{f.sha256} {f.name}\n" for f in files).encode()).hexdigest()
        with locked(self._layout, run):
            existing = self.versions(run)
            number = 1 + (_number(existing[-1]) if existing else 0)
            pointer = self._require_served(run, instead_of)
            if pointer is not None:  # a pruned version's number is never used again
                number = max(number, 1 + _number(pointer["version"]))
            manifest = Manifest(
                run=run,
                version=f"v{number:06d}-{digest[:8]}",
                sequence=1 + (0 if pointer is None else pointer["sequence"]),
                reason=reason,
                digest=digest,
                files=files,
                parent=parent,
                policy_version=policy_version,
                kind=kind,
                config_fingerprint=config_fingerprint,
                d2t_sha256=d2t_sha256,
                aux_layers=tuple(aux_layers),
                created=time.time(),
                alpha=None if alpha is None else dict(alpha),
                gate=None if gate is None else dict(gate),
            )
            write_synced(staged / MANIFEST, manifest.model_dump_json(indent=1).encode())
            AtomicDirectory(staged).commit(self._layout.drafter(run, manifest.version))
            self._point(run, manifest, reason, "published", {"parent": parent, "alpha": alpha, "gate": gate})
        return manifest

    def rollback(self, run: str, version: str, reason: str, *, instead_of: str | None = ANY) -> Manifest:
        """Point `latest` at an existing version again, after verifying its digests. Takes a new sequence number.

        `instead_of`: as for `publish`.
        """
        self.verify(run, version)
        with locked(self._layout, run):
            self._require_served(run, instead_of)
            return self._repoint(run, self.get(run, version), reason, "rolled_back")

    def push_again(self, run: str, reason: str) -> Manifest:
        """Give the served version a new sequence number, so that every engine loads it again."""
        with locked(self._layout, run):
            manifest = self.latest(run)
            if manifest is None:
                raise VersionNotFound(f"run {run!r} has published no drafter yet, so none can be pushed again")
            # Not "pushed again": a person's rollback with those words overrides an agent's canary, and this must not.
            return self._repoint(run, manifest, f"revived: {reason}", "pushed_again")

    def record(self, run: str, event: Mapping[str, Any]) -> None:
        """Append an event (e.g. a refused candidate) to the history, durably. `time` is added when absent.

        Takes no lock, since a paused process could hold it: a line is one write at the file's end.
        """
        self._append(run, {"time": time.time(), **event})

    def verify(self, run: str, version: str) -> None:
        """Recompute every digest of a version; raises RegistryError that names the file that differs."""
        for file in self.get(run, version).files:
            path = self._layout.drafter_file(run, version, file.name)
            found = _digest(path) if path.is_file() else None
            if found != file:
                raise RegistryError(f"{version}/{file.name} no longer matches its manifest; do not serve this version")

    def prune(self, run: str, keep: int, protect: set[str] | frozenset[str] = frozenset()) -> list[str]:
        """Delete all but the newest `keep` versions, the served one and those in `protect`; returns those deleted.

        Also removes staging directories that a killed publisher left behind more than an hour ago.
        """
        if keep < 1:
            raise ValueError(f"keep must be at least 1, got {keep}")
        with locked(self._layout, run):
            pointer = self._pointer(run)
            safe = set(protect) | set(self.versions(run)[-keep:]) | ({pointer["version"]} if pointer else set())
            gone = [version for version in self.versions(run) if version not in safe]
            for version in gone:
                path = self._layout.drafter(run, version)
                # Renamed first: a half-deleted directory must not look like a version.
                deleted = path.with_name(f".deleted-{uuid.uuid4().hex}")
                path.rename(deleted)
                shutil.rmtree(deleted)
            for path in self._layout.drafters(run).glob(".*"):
                if time.time() - path.stat().st_mtime > _LEFTOVER_SECONDS:
                    shutil.rmtree(path, ignore_errors=True)
            for path in self._layout.run(run).glob(".latest-*"):
                path.unlink()
        return gone

    # --- inside
    def _pointer(self, run: str) -> dict[str, Any] | None:
        try:
            text = self._layout.latest(run).read_bytes()
        except FileNotFoundError:
            return None
        pointer = json.loads(text)
        if not isinstance(pointer, dict) or not {"sequence", "version", "reason"} <= pointer.keys():
            raise RegistryError(f"{self._layout.latest(run)} is not a pointer of sequence, version and reason")
        return pointer

    def _require_served(self, run: str, version: str | None) -> dict[str, Any] | None:
        """Read the pointer (None: nothing was published yet); LatestMoved unless it is at `version`."""
        pointer = self._pointer(run)
        served = None if pointer is None else pointer["version"]
        if version not in (served, ANY):
            raise LatestMoved(f"run {run!r} serves {served} now, not {version}: nothing was published")
        return pointer

    def _repoint(self, run: str, manifest: Manifest, reason: str, kind: str) -> Manifest:
        pointer = self._pointer(run)
        sequence = 1 + (0 if pointer is None else int(pointer["sequence"]))
        moved = manifest.model_copy(update={"sequence": sequence, "reason": reason})
        self._point(run, moved, reason, kind, {"previous": None if pointer is None else pointer["version"]})
        return moved

    def _point(self, run: str, manifest: Manifest, reason: str, kind: str, more: Mapping[str, Any]) -> None:
        event = {
            "time": time.time(),
            "event": kind,
            "sequence": manifest.sequence,
            "version": manifest.version,
            "policy_version": manifest.policy_version,
            "reason": reason,
        }
        self._recover_history(run)
        pointer = {"sequence": manifest.sequence, "version": manifest.version, "reason": reason, "event": kind}
        replace_file(self._layout.latest(run), json.dumps(pointer).encode())
        self._append(run, event | dict(more))

    def _recover_history(self, run: str) -> None:
        """Append the event that is missing if a crash came between the pointer's rename and the append."""
        pointer = self._pointer(run)
        if pointer is None or any(event.get("sequence") == pointer["sequence"] for event in self.history(run)):
            return
        self._append(run, {"time": time.time(), "event": "published", **pointer, "recovered": True})

    def _append(self, run: str, event: Mapping[str, Any]) -> None:
        path = self._layout.history(run)
        line = to_json(event, inf_nan_mode="null") + b"\n"  # an α of no rounds is NaN, which JSON does not have
        with path.open("a+b", buffering=0) as file:
            if file.tell() > 0:
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":  # the last line is torn: begin a new one
                    line = b"\n" + line
            if file.write(line) != len(line):
                raise OSError(errno.ENOSPC, "the disk took only a part of the line", str(path))
            os.fsync(file.fileno())


@contextlib.contextmanager
def locked(layout: Layout, run: str) -> Iterator[None]:
    """Hold a run's lock, also against other processes. Raises `RegistryBusy` after `LOCK_SECONDS`."""
    try:
        with exclusive(layout.registry_lock(run), LOCK_SECONDS):
            yield
    except LockHeld as held:
        raise RegistryBusy(
            f"the registry of run {run!r} has been locked for {LOCK_SECONDS:.0f} s by {held.holder}: is it stopped? "
            "Nothing was changed; let it go on or kill it"
        ) from None


def _number(version: str) -> int:
    return int(version[1:].partition("-")[0])


def _staged_files(staged: Path) -> list[Path]:
    paths = sorted(staged.iterdir())
    for path in paths:
        if path.is_symlink() or not path.is_file() or not FILE_NAME.fullmatch(path.name) or path.name == MANIFEST:
            raise RegistryError(f"staged drafter holds {path.name!r}; expected plain files other than {MANIFEST}")
    if not paths:
        raise RegistryError(f"staged drafter {staged} is empty; write its files first")
    return paths


def _digest(path: Path) -> VersionFile:
    """Digest a file, and force it to the disk."""
    sha = hashlib.sha256()
    size = 0
    with path.open("rb") as file:
        while chunk := file.read(_READ_BYTES):
            sha.update(chunk)
            size += len(chunk)
        os.fsync(file.fileno())
    return VersionFile(name=path.name, bytes=size, sha256=sha.hexdigest())
