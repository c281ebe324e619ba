"""A drafter version that the service offers: its verified manifest, and the release once it is on this disk.

The agent builds paths from the names in a manifest, so `parse_manifest` accepts plain names only.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from rl_hooks.errors import ManifestError

#: A plain name: starts with a letter or digit, so neither a path, nor hidden, nor `..`.
PLAIN_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_SHA256: Final = re.compile(r"[0-9a-f]{64}")
_MAX_FILES: Final = 64


@dataclass(frozen=True, slots=True)
class OfferedFile:
    """One file of a drafter version."""

    name: str
    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """The verified part of `GET /drafter/latest` that the agent acts on.

    `sequence` grows with every publish, rollback and re-push: a higher one with the same version asks for a new load.
    """

    run: str
    version: str
    sequence: int
    reason: str
    digest: str
    files: tuple[OfferedFile, ...]
    config_fingerprint: str
    d2t_sha256: str
    #: α of the version served before, as the gate replayed it on the newest rollouts; None where it is not known.
    replayed_alpha: float | None = None
    #: `eagle3`, or `mtp`: a policy's own module.
    kind: str = "eagle3"

    @property
    def pushed_again(self) -> bool:
        """Whether a person published this version again, after it had been served."""
        return self.reason.lower().startswith(("pushed again", "pushed_again"))


@dataclass(frozen=True, slots=True)
class Release:
    """A downloaded, verified and stripped drafter in `path`, with its manifest."""

    manifest: Manifest
    path: Path
    #: Of model.safetensors, verified and stripped; None where `path` holds no verified files.
    sha256: str | None = None

    @property
    def version(self) -> str:
        """The drafter version."""
        return self.manifest.version

    @property
    def sequence(self) -> int:
        """The offer's sequence number."""
        return self.manifest.sequence


def files_digest(files: Mapping[str, str]) -> str:
    """Digest of a version from `{name: sha256}`: SHA-256 over the lines `<sha256> <name>`, sorted by name."""
    return hashlib.sha256("".join(f"{files[name]} {name}\n" for name in sorted(files)).encode()).hexdigest()


def parse_manifest(document: object, run: str) -> Manifest:
    """Verify a manifest of `run`; raises ManifestError naming the fault."""
    if not isinstance(document, dict):
        raise ManifestError(f"the manifest must be a JSON object, got {type(document).__name__}")
    if document.get("run") != run:
        raise ManifestError(f"run: asked for {run!r}, got a manifest of {str(document.get('run'))[:80]!r}")
    entries = document.get("files")
    if not isinstance(entries, list) or not 1 <= len(entries) <= _MAX_FILES:
        raise ManifestError(f"files: expected a list of 1 to {_MAX_FILES} entries, got {str(entries)[:80]}")
    files = tuple(_offered_file(entry) for entry in entries)
    sha256s = {file.name: file.sha256 for file in files}
    if len(sha256s) != len(files):
        raise ManifestError("files: a name appears twice")
    manifest = Manifest(
        run=run,
        version=_name(document, "version"),
        sequence=_count(document, "sequence"),
        reason=str(document.get("reason", ""))[:400],
        digest=_sha256(document, "digest"),
        files=files,
        config_fingerprint=_text(document, "config_fingerprint"),
        d2t_sha256=_text(document, "d2t_sha256"),
        replayed_alpha=_replayed_alpha(document.get("gate")),
        kind=_kind(document.get("kind", "eagle3")),
    )
    if files_digest(sha256s) != manifest.digest:
        raise ManifestError(f"digest: {manifest.digest} does not match the listed files; do not use this version")
    return manifest


def _kind(value: object) -> str:
    if value not in ("eagle3", "mtp"):
        raise ManifestError(f"kind: expected eagle3 or mtp, got {str(value)[:80]!r}; update this agent")
    return str(value)


def _replayed_alpha(gate: object) -> float | None:
    value = gate.get("alpha_served") if isinstance(gate, dict) else None
    known = isinstance(value, (int, float)) and not isinstance(value, bool) and 1.0 <= value < math.inf
    return float(value) if known and value is not None else None


def _offered_file(entry: object) -> OfferedFile:
    if not isinstance(entry, dict):
        raise ManifestError(f"files: an entry must be an object, got {str(entry)[:80]}")
    return OfferedFile(_name(entry, "name"), _count(entry, "bytes"), _sha256(entry, "sha256"))


def _text(table: Mapping[str, Any], key: str) -> str:
    value = table.get(key)
    if not isinstance(value, str) or len(value) > 400:
        raise ManifestError(f"{key}: expected a string, got {str(value)[:80]!r}")
    return value


def _name(table: Mapping[str, Any], key: str) -> str:
    value = table.get(key)
    if not isinstance(value, str) or not PLAIN_NAME.fullmatch(value) or value == "engines" or value.endswith(".part"):
        raise ManifestError(f"{key}: {str(value)[:80]!r} is not a plain name of letters, digits, '.', '_' and '-'")
    return value


def _sha256(table: Mapping[str, Any], key: str) -> str:
    value = table.get(key)
    if not isinstance(value, str) or not _SHA256.fullmatch(value):
        raise ManifestError(f"{key}: expected 64 hexadecimal digits, got {str(value)[:80]!r}")
    return value


def _count(table: Mapping[str, Any], key: str) -> int:
    value = table.get(key)
    if type(value) is not int or not 0 <= value < 1 << 53:
        raise ManifestError(f"{key}: expected a non-negative integer, got {str(value)[:80]!r}")
    return value
