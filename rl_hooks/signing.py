"""Signed manifests: Ed25519 over the bytes of an answer and over the nonce of the request that it answers.

The API holds the private key; agents hold public keys only, so whoever takes over an engine cannot sign. With public
keys an agent sends a new nonce with every long poll, and believes no answer whose signature does not cover it. So

* a manifest that the service did not write, or that was changed, is refused (TUF: arbitrary installation);
* so is one that the service signed earlier, for whoever asked: rollback and freeze need no clock to be noticed;
* the signature covers the digest of all files of one version of one run, so files of two do not mix.

`cryptography` (the extra `signing`) is imported where a key is used: agents without keys need none.
"""

from __future__ import annotations

import base64
import binascii
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

from rl_hooks.errors import SignatureError

#: The answer's header that holds the signature, in base64.
HEADER: Final = "Draftalign-Signature"
#: What a nonce must match: 128 to 256 bits, hexadecimal.
NONCE_PATTERN: Final = "^[0-9a-f]{32,64}$"
#: Ends the use of a key for anything else, and of a signature for another form of message.
_PURPOSE: Final = b"draftalign manifest 1"
_INSTALL: Final = "signatures need the package cryptography: pip install 'draftalign[signing]'"


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
            except (binascii.Error, ValueError):
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
        if text is not None:
            return cls.parse(text)
        if environment.get("DRAFTALIGN_SIGNING_KEY"):
            raise ValueError(
                "DRAFTALIGN_SIGNING_KEY, a secret that service and agents shared, is no longer read: make a key with "
                "`draftalign keygen`, and give agents its public half in DRAFTALIGN_PUBLIC_KEYS"
            )
        return None

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
        except (binascii.Error, ValueError):
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
