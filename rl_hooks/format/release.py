"""A drafter version that the service offers: its verified manifest, who signed it, and the release on this disk.

The agent builds paths from the names in a manifest, so `parse_manifest` accepts plain names only.

Signatures are Ed25519, over the bytes of an answer and over the nonce of the request that it answers. The API holds the
private key; agents hold public keys only, so whoever takes over an engine cannot sign. With public keys an agent sends
a new nonce with every long poll, and believes no answer whose signature does not cover it. So

* a manifest that the service did not write, or that was changed, is refused (TUF: arbitrary installation);
* so is one that the service signed earlier, for whoever asked: rollback and freeze need no clock to be noticed;
* the signature covers the digest of all files of one version of one run, so files of two do not mix.

`cryptography` (the extra `signing`) is imported where a key is used: agents without keys need none.
"""

from __future__ import annotations

import base64
import errno
import hashlib
import json
import math
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Self

from rl_hooks.errors import DigestError, ManifestError, SignatureError

#: A plain name: starts with a letter or digit, so neither a path, nor hidden, nor `..`.
PLAIN_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_TEXT: Final = re.compile(r"(?s).{0,400}")
_SHA256: Final = re.compile(r"[0-9a-f]{64}")
_MAX_FILES: Final = 64
_MAX_LAYERS: Final = 64
_MAX_LAYER: Final = 4096
#: The answer's header that holds the signature, in base64.
SIGNATURE_HEADER: Final = "Draftalign-Signature"
#: What a nonce must match: 128 to 256 bits, hexadecimal.
NONCE_PATTERN: Final = "^[0-9a-f]{32,64}$"
#: Ends the use of a key for anything else, and of a signature for another form of message.
_PURPOSE: Final = b"draftalign manifest 1"
#: Written last into a complete directory of an agent's cache: what was verified, and the digests after stripping.
RECEIPT: Final = "draftalign-receipt.json"
#: No receipt can be there: no such file, no directory, or the name of a model on a hub that is too long for a path.
_NO_CACHE: Final = (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG)
_INSTALL: Final = "signatures need the package cryptography: pip install './rl_hooks[signing]'"


def check_receipt(directory: Path) -> None:
    """Raise DigestError where a drafter of an agent's cache is not as it was verified: before an engine loads it.

    A directory without a receipt is of no cache: it passes.
    """
    try:
        text = (directory / RECEIPT).read_bytes()
    except OSError as error:
        if error.errno in _NO_CACHE:
            return
        raise DigestError(f"{directory / RECEIPT} cannot be read, so its drafter is not loaded: {error}") from error
    try:
        named = json.loads(text)["sha256"]
        other = [f"{name} has other bytes" for name, digest in named.items() if sha256_of(directory / name) != digest]
        if len(named) < 2:
            other = [f"{RECEIPT} must name config and model, and cannot be read so"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        other = [f"{RECEIPT} cannot be read, or a file that it names ({error})"]
    if other:
        raise DigestError(
            f"{directory} is not the drafter that the agent has verified: {', '.join(other)[:400]}. It is not loaded. "
            "Delete the directory, and start with another copy of the drafter; then the agent brings the newest version"
        )


def sha256_of(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal digits. Blocks."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@dataclass(frozen=True, slots=True)
class OfferedFile:
    """One file of a drafter version."""

    name: str
    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class VerifiedManifest:
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
    #: The layers whose entering states it reads; empty where the service does not say.
    aux_layers: tuple[int, ...] = ()
    #: A person wants it in engines whose canary has rejected the version, too.
    override_canary: bool = False


@dataclass(frozen=True, slots=True)
class Release:
    """A downloaded, verified and stripped drafter in `path`, with its manifest."""

    manifest: VerifiedManifest
    path: Path
    #: SHA-256 by name of the two files that engines read, verified and stripped; empty where none were verified.
    sha256s: Mapping[str, str] = field(default_factory=dict)

    @property
    def sha256(self) -> str | None:
        """Of model.safetensors, which engines tell; None where `path` holds no verified files."""
        return self.sha256s.get("model.safetensors")

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


def parse_manifest(document: object, run: str) -> VerifiedManifest:
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
    kind = document.get("kind", "eagle3")
    if kind not in ("eagle3", "mtp"):
        raise ManifestError(f"kind: expected eagle3 or mtp, got {str(kind)[:80]!r}; update this agent")
    manifest = VerifiedManifest(
        run=run,
        version=_name(document, "version"),
        sequence=_count(document, "sequence"),
        reason=str(document.get("reason", ""))[:400],
        digest=_sha256(document, "digest"),
        files=files,
        config_fingerprint=_text(document, "config_fingerprint"),
        d2t_sha256=_text(document, "d2t_sha256"),
        replayed_alpha=_replayed_alpha(document.get("gate")),
        kind=str(kind),
        aux_layers=layers_of(document.get("aux_layers")),
        override_canary=_flag(document, "override_canary"),
    )
    if files_digest(sha256s) != manifest.digest:
        raise ManifestError(f"digest: {manifest.digest} does not match the listed files; do not use this version")
    return manifest


def layers_of(value: object) -> tuple[int, ...]:
    """The layers that a manifest or an engine names, for messages only; empty where they are none."""
    if not isinstance(value, list | tuple) or len(value) > _MAX_LAYERS:
        return ()
    return tuple(value) if all(type(one) is int and 0 <= one <= _MAX_LAYER for one in value) else ()


def _replayed_alpha(gate: object) -> float | None:
    value = gate.get("alpha_served") if isinstance(gate, dict) else None
    if isinstance(value, int | float) and not isinstance(value, bool) and 1.0 <= value < math.inf:
        return float(value)
    return None


def _offered_file(entry: object) -> OfferedFile:
    if not isinstance(entry, dict):
        raise ManifestError(f"files: an entry must be an object, got {str(entry)[:80]}")
    return OfferedFile(_name(entry, "name"), _count(entry, "bytes"), _sha256(entry, "sha256"))


def _text(table: Mapping[str, Any], key: str, form: re.Pattern[str] = _TEXT, expected: str = "a string") -> str:
    value = table.get(key)
    if not isinstance(value, str) or not form.fullmatch(value):
        raise ManifestError(f"{key}: expected {expected}, got {str(value)[:80]!r}")
    return value


def _name(table: Mapping[str, Any], key: str) -> str:
    value = table.get(key)
    if not isinstance(value, str) or not PLAIN_NAME.fullmatch(value) or value == "engines" or value.endswith(".part"):
        raise ManifestError(f"{key}: {str(value)[:80]!r} is not a plain name of letters, digits, '.', '_' and '-'")
    return value


def _flag(table: Mapping[str, Any], key: str) -> bool:
    value = table.get(key, False)  # services and agents' memories of before have none
    if type(value) is not bool:
        raise ManifestError(f"{key}: expected true or false, got {str(value)[:80]!r}")
    return value


def _sha256(table: Mapping[str, Any], key: str) -> str:
    return _text(table, key, _SHA256, "64 hexadecimal digits")


def _count(table: Mapping[str, Any], key: str) -> int:
    value = table.get(key)
    if type(value) is not int or not 0 <= value < 1 << 53:
        raise ManifestError(f"{key}: expected a non-negative integer, got {str(value)[:80]!r}")
    return value


def new_nonce() -> str:
    """A number that was never sent before, for one request."""
    return secrets.token_hex(16)


def new_key() -> tuple[bytes, str]:
    """A new private key in PEM (PKCS 8, not encrypted), and its public key."""
    ed25519, serialization = _library()
    key = ed25519.Ed25519PrivateKey.generate()
    pem: bytes = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return pem, base64.b64encode(key.public_key().public_bytes_raw()).decode()


class SigningKey:
    """The service's private key, from a PEM file; raises ValueError naming the fault, OSError."""

    def __init__(self, path: Path) -> None:
        ed25519, serialization = _library()
        wanted = f"{path}: expected an Ed25519 private key in PEM, without a password, as `draftalign keygen` writes it"
        try:
            key = serialization.load_pem_private_key(path.read_bytes(), None)
        except (ValueError, TypeError) as error:
            raise ValueError(f"{wanted}: {error}") from None
        if not isinstance(key, ed25519.Ed25519PrivateKey):
            raise ValueError(f"{wanted}; got a {type(key).__name__}")  # noqa: TRY004 - of what the file says
        self._key = key
        #: What agents are given, in base64.
        self.public: str = base64.b64encode(key.public_key().public_bytes_raw()).decode()

    def sign(self, nonce: str, body: bytes) -> str:
        """The signature's header value."""
        return base64.b64encode(self._key.sign(_message(nonce, body))).decode()


@dataclass(frozen=True, slots=True)
class PublicKeys:
    """The keys that an agent trusts: a signature by any of them will do, so that keys can be changed in steps.

    PublicKeys.parse("base64,base64")     two keys
    PublicKeys.parse("@/etc/draftalign/keys")   those of a file, one a line
    """

    raw: tuple[bytes, ...]

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read keys, separated by commas or white space; raises ValueError naming the fault."""
        if text.startswith("@"):
            try:
                text = Path(text[1:]).read_text("utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise ValueError(f"public keys: {text[:200]!r} cannot be read: {error}") from error
        names = text.replace(",", " ").split()
        if not names:
            raise ValueError("public keys: none is given; an agent without keys must not set the variable")
        ed25519, _ = _library()
        keys = []
        for name in names:
            try:
                raw = base64.b64decode(name, validate=True)
                ed25519.Ed25519PublicKey.from_public_bytes(raw)
            except ValueError:
                raise ValueError(
                    f"public keys: {name[:60]!r} is not the base64 of an Ed25519 public key (44 characters), as "
                    "`draftalign keygen` prints it; @FILE reads them from a file"
                ) from None
            keys.append(raw)
        return cls(tuple(keys))

    @classmethod
    def of_environment(cls, environment: Mapping[str, str]) -> Self | None:
        """The keys in DRAFTALIGN_PUBLIC_KEYS, None without it; raises ValueError."""
        text = environment.get("DRAFTALIGN_PUBLIC_KEYS")
        return None if text is None else cls.parse(text)

    def check(self, nonce: str, body: bytes, signature: str | None) -> None:
        """Raise SignatureError unless one of the keys signed this body for this nonce."""
        if signature is None:
            raise SignatureError(
                "signature: the service's answer has none, and this agent has public keys; set "
                "DRAFTALIGN_SIGNING_KEY_FILE on the service. Nothing was taken"
            )
        ed25519, _ = _library()
        from cryptography.exceptions import InvalidSignature

        try:
            given = base64.b64decode(signature, validate=True)
        except ValueError:
            given = b""
        for raw in self.raw:
            try:
                ed25519.Ed25519PublicKey.from_public_bytes(raw).verify(given, _message(nonce, body))
            except InvalidSignature:
                continue
            return
        raise SignatureError(
            f"signature: none of this agent's {len(self.raw)} public keys made it for this request; the answer is of "
            "another key, changed on its way, or an earlier one sent again. Nothing was taken"
        )


def _message(nonce: str, body: bytes) -> bytes:
    return b"\n".join((_PURPOSE, nonce.encode(), body))


def _library() -> tuple[Any, Any]:
    try:
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError as error:
        raise ValueError(f"{_INSTALL} ({error})") from error
    return ed25519, serialization
