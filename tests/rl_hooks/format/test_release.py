"""What an agent believes of a manifest, of a signature, and of a cached drafter: pure, a table for each."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.engine.agent_fixtures import manifest, sha256

from rl_hooks.errors import DigestError, ManifestError, SignatureError
from rl_hooks.format.release import (
    NONCE_PATTERN,
    RECEIPT,
    PublicKeys,
    Release,
    SigningKey,
    check_receipt,
    files_digest,
    layers_of,
    new_key,
    new_nonce,
    parse_manifest,
)

FILES = {"model.safetensors": b"weights", "config.json": b"{}"}


def offered(**changes: Any) -> dict[str, Any]:
    return manifest(1, FILES, 1, "published") | changes


def named(**entry: Any) -> Callable[[], dict[str, Any]]:
    """A manifest of one file, whose digest is right: what its entry says is all that can be wrong."""

    def make() -> dict[str, Any]:
        files = [{"name": "a", "bytes": 1, "sha256": "0" * 64} | entry]
        return offered(files=files, digest=sha256(f"{files[0]['sha256']} {files[0]['name']}\n".encode()))

    return make


def of_many(count: int, name: str = "f{}") -> Callable[[], dict[str, Any]]:
    names = [name.format(number) for number in range(count)]
    sha = "0" * 64
    files = [{"name": one, "bytes": 1, "sha256": sha} for one in names]
    return lambda: offered(files=files, digest=files_digest(dict.fromkeys(names, sha)))


@pytest.mark.parametrize(
    ("make", "fault"),
    [
        (lambda: [offered()], "must be a JSON object, got list"),
        (lambda: offered(run="other"), "run: asked for 'default', got a manifest of 'other'"),
        (lambda: offered(files=[]), "files: expected a list of 1 to 64"),
        (lambda: offered(files={"name": "a"}), "files: expected a list of 1 to 64"),
        (of_many(65), "files: expected a list of 1 to 64"),
        (of_many(2, "same"), "files: a name appears twice"),
        (lambda: offered(files=["model.safetensors"]), "files: an entry must be an object"),
        *(
            (named(name=name), "plain name")
            for name in (
                *("../../evil", "/etc/passwd", "a/b", "..", ".hidden", "", "x\x00y", "a\\..\\b", "a\n", "-a", 7, None),
                *("a" * 129, "engines", "a.part"),  # the last two are the cache's own
            )
        ),
        *((named(bytes=size), "bytes: expected a non-neg") for size in (-1, 1 << 53, 1.0, True, "1", None)),
        *(
            (named(sha256=text), "sha256: expected 64 hex")
            for text in ("0" * 63, "0" * 65, "A" * 64, "0" * 63 + "\n", 0)
        ),
        *((lambda v=v: offered(version=v), "version: .* not a plain name") for v in ("../v1", 3, "engines", "v1.part")),
        *((lambda n=n: offered(sequence=n), "sequence: expected a non-neg") for n in (-1, True, 1 << 53, None)),
        (lambda: offered(digest="0" * 64), "digest: 0+ does not match the listed files"),
        (lambda: offered(digest="x"), "digest: expected 64 hexadecimal digits"),
        (lambda: offered(config_fingerprint=None), "config_fingerprint: expected a string"),
        (lambda: offered(d2t_sha256="x" * 401), "d2t_sha256: expected a string"),
        (lambda: offered(kind="medusa"), "kind: expected eagle3 or mtp, got 'medusa'; update this agent"),
        (lambda: offered(override_canary=1), "override_canary: expected true or false"),
    ],
)
def test_a_manifest_that_breaks_the_contract_is_refused_by_the_name_of_the_field(
    make: Callable[[], object], fault: str
) -> None:
    with pytest.raises(ManifestError, match=fault):
        parse_manifest(make(), "default")


@pytest.mark.parametrize(
    "field",
    ["run", "files", "kind", "version", "sequence", "digest", "config_fingerprint", "d2t_sha256", "override_canary"],
)
def test_a_refusal_quotes_no_more_than_a_line_of_what_was_said(field: str) -> None:
    for said in ("x/" * 100_000, ["y" * 100_000]):
        with pytest.raises(ManifestError, match=field) as refused:
            parse_manifest(offered(**{field: said}), "default")
        assert len(str(refused.value)) < 250


@pytest.mark.parametrize("make", [of_many(64), named(name="a" * 128), named(bytes=(1 << 53) - 1), named(bytes=0)])
def test_the_largest_that_a_manifest_may_say_is_taken(make: Callable[[], object]) -> None:
    parse_manifest(make(), "default")


def test_a_manifest_is_read_as_it_was_written() -> None:
    found = parse_manifest(offered(reason="r" * 500, kind="mtp", override_canary=True, sequence=7), "default")
    assert [(f.name, f.bytes, f.sha256) for f in found.files] == [(n, len(d), sha256(d)) for n, d in FILES.items()]
    assert (found.run, found.sequence, found.reason, found.kind) == ("default", 7, "r" * 400, "mtp")
    assert (found.config_fingerprint, found.d2t_sha256, found.aux_layers) == ("fingerprint", "d2t", (2, 4, 5))
    assert (found.version, found.digest) == (offered()["version"], offered()["digest"])
    assert found.override_canary
    older = parse_manifest({k: v for k, v in offered().items() if k not in ("reason", "aux_layers")}, "default")
    assert (older.kind, older.override_canary, older.reason, older.aux_layers) == ("eagle3", False, "", ())
    release = Release(found, Path("x"), {"model.safetensors": "m", "config.json": "c"})
    assert (release.sha256, Release(found, Path("x")).sha256, release.sequence) == ("m", None, 7)
    assert release.version == found.version


@pytest.mark.parametrize(
    ("gate", "alpha"),
    [
        *(({"alpha_served": value}, value) for value in (1.0, 1, 2.5)),
        *(({"alpha_served": value}, None) for value in (0.99, math.inf, math.nan, True, "2", None)),
        ({}, None),
        ([2.0], None),
        (None, None),
    ],
)
def test_what_the_gate_replayed_is_taken_only_where_it_can_be_an_alpha(gate: object, alpha: float | None) -> None:
    assert parse_manifest(offered(gate=gate), "default").replayed_alpha == alpha


@pytest.mark.parametrize(
    ("told", "layers"),
    [
        ([0, 4096], (0, 4096)),
        ((1,), (1,)),
        ([1] * 64, (1,) * 64),
        *(
            (wrong, ())
            for wrong in ([1] * 65, [4097], [1, -1], [True], [1.0], ["1"], [[1]], [10**4000], "12", {1: 2}, 7, None)
        ),
    ],
)
def test_layers_are_told_only_where_they_can_be_some(told: object, layers: tuple[int, ...]) -> None:
    assert layers_of(told) == layers


@pytest.fixture(scope="module")
def signers(tmp_path_factory: pytest.TempPathFactory) -> list[SigningKey]:
    pytest.importorskip("cryptography", reason="signatures need the extra `signing`")
    folder = tmp_path_factory.mktemp("keys")
    for name in "ab":
        (folder / name).write_bytes(new_key()[0])
    return [SigningKey(folder / name) for name in "ab"]


def test_only_a_trusted_keys_signature_over_this_nonce_and_this_body_is_believed(signers: list[SigningKey]) -> None:
    ours, other = signers
    nonce, body = new_nonce(), b'{"version": "v1"}'
    signature = ours.sign(nonce, body)
    for keys in (ours.public, f"{other.public},{ours.public}", f"{ours.public}\n{other.public}"):
        PublicKeys.parse(keys).check(nonce, body, signature)
    trusting = PublicKeys.parse(ours.public)
    raw = ours._key.sign(b"\n".join((nonce.encode(), body)))  # of the same key, for another purpose
    for wrong in (
        other.sign(nonce, body),
        ours.sign(new_nonce(), body),
        ours.sign(nonce, body + b" "),
        f"{signature}!",
        "AAAA",
        "",
        "?",
    ):
        with pytest.raises(SignatureError, match="none of this agent's 1 public keys made it"):
            trusting.check(nonce, body, wrong)
    for wrong in (
        base64.b64encode(raw).decode(),
        ours.sign(nonce + "\n", body),
        ours.sign(nonce[:-1], nonce[-1:].encode() + body),
    ):
        with pytest.raises(SignatureError):
            trusting.check(nonce, body, wrong)
    with pytest.raises(SignatureError, match="answer has none"):
        trusting.check(nonce, body, None)
    assert re.fullmatch(NONCE_PATTERN, nonce)
    assert new_nonce() != nonce


def test_an_agents_keys_come_from_its_environment_or_a_file(signers: list[SigningKey], tmp_path: Path) -> None:
    both = [base64.b64decode(signer.public) for signer in signers]
    (tmp_path / "keys").write_text("\n".join(signer.public for signer in signers))
    found = PublicKeys.of_environment({"DRAFTALIGN_PUBLIC_KEYS": f"@{tmp_path / 'keys'}"})
    assert found is not None
    assert list(found.raw) == both
    assert PublicKeys.of_environment({}) is None
    for text, fault in (
        ("", "none is given"),
        (" , ", "none is given"),
        ("@/nowhere", "cannot be read"),
        *(
            (bad, "not the base64 of an Ed25519")
            for bad in ("AAAA", "not base64!", f"{signers[0].public},x", f"{signers[0].public}!")
        ),
        (signers[0].public[:-1] + "\u00e9", "not the base64 of an Ed25519"),
    ):
        with pytest.raises(ValueError, match=f"public keys: .*{fault}"):
            PublicKeys.parse(text)
    (tmp_path / "keys").write_bytes(b"\xff")
    with pytest.raises(ValueError, match="cannot be read"):
        PublicKeys.parse(f"@{tmp_path / 'keys'}")


def test_a_private_key_of_another_kind_or_with_a_password_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("cryptography", reason="signatures need the extra `signing`")
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec, ed25519

    pem, pkcs8 = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    other = ec.generate_private_key(ec.SECP256R1()).private_bytes(pem, pkcs8, serialization.NoEncryption())
    locked = ed25519.Ed25519PrivateKey.generate().private_bytes(
        pem, pkcs8, serialization.BestAvailableEncryption(b"secret")
    )
    for content, fault in ((other, "got a .*EC"), (locked, "without a password"), (b"", "expected an Ed25519")):
        (tmp_path / "key").write_bytes(content)
        with pytest.raises(ValueError, match=fault):
            SigningKey(tmp_path / "key")


@pytest.mark.parametrize(
    ("receipt", "fault"),
    [
        ({}, None),
        ({"model.safetensors": "0" * 64}, "model.safetensors has other bytes"),
        ({"model.safetensors": None}, "must name config and model"),
        ({"absent": "0" * 64}, "cannot be read"),
    ],
)
def test_a_cached_drafter_is_loaded_only_as_its_receipt_says(
    receipt: dict[str, str | None], fault: str | None, tmp_path: Path
) -> None:
    for name, data in FILES.items():
        (tmp_path / name).write_bytes(data)
    digests = {name: hashlib.sha256(data).hexdigest() for name, data in FILES.items()} | receipt
    text = json.dumps({"sha256": {name: digest for name, digest in digests.items() if digest is not None}})
    (tmp_path / RECEIPT).write_text(text)
    if fault is None:
        check_receipt(tmp_path)
        check_receipt(tmp_path / "model.safetensors")  # a file can have none, and passes
        return
    with pytest.raises(DigestError, match=fault):
        check_receipt(tmp_path)
