"""Versions of a run's drafter: immutable directories, complete or invisible.

Files and manifest are fsynced in a staging directory beside the others, then one rename (atomic on one filesystem)
makes the version appear, also after loss of power at any line. With `drafters_url` an object store has a copy of the
files.
"""

from __future__ import annotations

import hashlib
import logging
import shutil
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from rl_hooks.durable import AtomicDirectory, sync, write_synced
from rl_hooks.format.drafter import DrafterKind
from service.errors import ObjectStoreError, RegistryError, RunDamaged, VersionNotFound
from service.monitor.events import GateEvidence
from service.storage.drafters.objects import Objects
from service.storage.layout import FILE_NAME, VERSION_NAME, Layout

log = logging.getLogger("draftalign.registry")

MANIFEST = "manifest.json"
#: Age at which a staging directory was left by a publisher that died.
_LEFTOVER_SECONDS = 3600.0


class VersionFile(BaseModel):
    """One file of a version, with its digest."""

    model_config = ConfigDict(frozen=True)
    name: str
    bytes: int
    sha256: str


class Manifest(BaseModel):
    """What `GET /drafter/latest` answers. `sequence`, `reason`, `override_canary`: of the pointer; else of the version.

    `override_canary`: a person wants it in engines whose canary has rejected the version, too.
    """

    model_config = ConfigDict(frozen=True)
    run: str
    version: str
    sequence: int
    reason: str
    digest: str
    files: tuple[VersionFile, ...]
    parent: str | None
    policy_version: int
    kind: DrafterKind = "eagle3"
    config_fingerprint: str
    d2t_sha256: str
    aux_layers: tuple[int, ...]
    aux_layers_convention: Literal["entering"] = "entering"
    created: float
    gate: GateEvidence | None = None
    override_canary: bool = False

    @property
    def etag(self) -> str:
        """Strong entity tag: changes whenever `latest` moves."""
        return f'"{self.sequence}-{self.version}"'


class Versions:
    """The versions in one state directory. What is served is `Registry`'s to say."""

    def __init__(self, layout: Layout, drafters_url: str | None = None) -> None:
        """`drafters_url`: of the object store that gets each version before `latest` names it."""
        self._layout = layout
        self.objects = None if drafters_url is None else Objects(drafters_url)

    def get(self, run: str, version: str) -> Manifest:
        """Manifest of one version as it was published."""
        path = self._layout.drafter(run, version) / MANIFEST
        try:
            return Manifest.model_validate_json(path.read_bytes())
        except FileNotFoundError as error:
            raise VersionNotFound(f"run {run!r} has no drafter version {version!r}; see GET /drafters") from error
        except (ValidationError, IsADirectoryError) as error:
            raise RunDamaged(run, path, error) from error

    def versions(self, run: str) -> list[str]:
        """Complete versions on disk, oldest first."""
        return [name for name in self._directories(run) if (self._layout.drafter(run, name) / MANIFEST).is_file()]

    def _directories(self, run: str) -> list[str]:
        """Of complete versions, and of those whose manifest is gone."""
        directory = self._layout.drafters(run)
        names = (p.name for p in directory.iterdir()) if directory.is_dir() else ()
        return sorted(filter(VERSION_NAME.fullmatch, names), key=version_number)

    def manifests(self, run: str) -> tuple[list[Manifest], dict[str, str]]:
        """Manifests of the versions on disk, oldest first; of damaged ones, what is wrong with them."""
        found, damaged = list[Manifest](), dict[str, str]()
        for version in self.versions(run):
            try:
                found.append(self.get(run, version))
            except VersionNotFound:  # pruned meanwhile
                continue
            except RunDamaged as error:
                damaged[version] = str(error)
        return found, damaged

    def path(self, run: str, version: str, name: str) -> Path:
        """Path of one file that the version's manifest lists (or of the manifest itself)."""
        manifest = self.get(run, version)
        names = [file.name for file in manifest.files]
        if name not in (*names, MANIFEST):
            raise VersionNotFound(f"drafter {version} has no file {name[:80]!r}; it has {names}")
        return self._layout.drafter_file(run, version, name)

    def stage(self, run: str) -> Path:
        """Make a new, empty staging directory on the registry's filesystem, to be filled and handed to `publish`."""
        return AtomicDirectory.make(self._layout.drafters(run), ".staged-").path

    def verify(self, run: str, version: str) -> None:
        """Recompute every digest of a version; raises RegistryError that names the file that differs."""
        for file in self.get(run, version).files:
            path = self._layout.drafter_file(run, version, file.name)
            found = _digest(path) if path.is_file() else None
            if found != file:
                raise RegistryError(f"{version}/{file.name} no longer matches its manifest; do not serve this version")

    def _store(self, run: str, digest: str, files: Sequence[VersionFile], directory: Path) -> None:
        """Copy a version into the object store, where there is one. Before the lock is taken: it may take long."""
        if self.objects is not None:
            for file in files:
                self.objects.put(run, digest, directory / file.name, file.bytes)

    def _objects_used(self, run: str) -> tuple[dict[str, str], dict[str, str]]:
        """Digest of each version whose objects are known; of damaged ones, what is wrong with them."""
        if self.objects is None:
            return {}, {}
        manifests, damaged = self.manifests(run)
        lost = set(self._directories(run)).difference(self.versions(run))
        damaged |= {version: f"version {version} has no {MANIFEST}" for version in lost}
        return {manifest.version: manifest.digest for manifest in manifests}, damaged

    def _delete_objects(self, run: str, used: tuple[dict[str, str], dict[str, str]], gone: Sequence[str]) -> None:
        """Delete the objects of versions that are gone, as of `_objects_used` before."""
        digests, damaged = used
        if self.objects is None:
            return
        if damaged:  # nobody knows which objects are theirs
            log.error("run %s: no object is deleted while manifests are damaged: %s", run, "; ".join(damaged.values()))
            return
        kept = {digest for version, digest in digests.items() if version not in gone}
        try:
            self.objects.keep_only(run, kept, {digests[version] for version in gone})
        except ObjectStoreError as error:  # what is left is old by the time that it answers again
            log.warning("objects of run %s that no version needs were not deleted: %s", run, error)

    def _delete_leftovers(self, run: str) -> None:
        for path in self._layout.drafters(run).glob(".*"):
            if time.time() - path.stat().st_mtime > _LEFTOVER_SECONDS:
                shutil.rmtree(path, ignore_errors=True)

    def _commit(self, staged: Path, manifest: Manifest) -> None:
        own = self._layout.own(staged)
        write_synced(own / MANIFEST, manifest.model_dump_json(indent=1).encode())
        AtomicDirectory(own).commit(self._layout.drafter(manifest.run, manifest.version))

    def _delete(self, run: str, version: str) -> None:
        path = self._layout.drafter(run, version)
        # Renamed first: a half-deleted directory must not look like a version.
        deleted = path.with_name(f".deleted-{uuid.uuid4().hex}")
        path.rename(deleted)
        shutil.rmtree(deleted)


def version_number(version: str) -> int:
    """Of a version's name."""
    return int(version[1:].partition("-")[0])


def _staged_files(staged: Path) -> list[Path]:
    paths = sorted(staged.iterdir())
    for path in paths:
        if path.is_symlink() or not path.is_file() or not FILE_NAME.fullmatch(path.name) or path.name == MANIFEST:
            raise RegistryError(f"staged drafter holds {path.name!r}; expected plain files other than {MANIFEST}")
    if not paths:
        raise RegistryError(f"staged drafter {staged} is empty; write its files first")
    return paths


def digests_of(staged: Path) -> tuple[tuple[VersionFile, ...], str]:
    """The files of a staged directory, forced to the disk, and the digest of all of them."""
    for path in (paths := _staged_files(staged)):
        sync(path)
    files = tuple(map(_digest, paths))
    return files, hashlib.sha256("".join(f"{f.sha256} {f.name}\n" for f in files).encode()).hexdigest()


def _digest(path: Path) -> VersionFile:
    with path.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        return VersionFile(name=path.name, bytes=file.tell(), sha256=sha256)
