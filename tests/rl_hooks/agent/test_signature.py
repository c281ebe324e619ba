"""A manifest's signature: only who holds the key can name what engines load."""

from __future__ import annotations

from typing import Any

import pytest
from service_fixtures import RunningService

from rl_hooks.errors import ManifestError
from rl_hooks.release import manifest_signature, parse_manifest

KEY = "a key of the operator's"


@pytest.fixture
def offer(serve: Any) -> dict[str, Any]:
    """The manifest that a service with a key answers."""
    service: RunningService = serve(signing_key=KEY)
    service.register()
    service.publish()
    answer: dict[str, Any] = service.client.get("/drafter/latest").raise_for_status().json()
    return answer


def test_a_signed_manifest_is_taken(offer: dict[str, Any]) -> None:
    assert parse_manifest(offer, "default", KEY).version == offer["version"]
    assert parse_manifest(offer, "default").version == offer["version"]  # an agent without a key asks for none


@pytest.mark.parametrize(
    "change",
    [
        {"signature": None},
        {"signature": "00" * 32},
        {"sequence": 999},
        {"reason": "pushed again: says somebody"},  # would pass the canary by
        {"gate": {"alpha_served": 1.0}},  # would ask nothing of it
        {"config_fingerprint": "0" * 32},
        {"d2t_sha256": "0" * 32},
        {"kind": "mtp"},
    ],
)
def test_a_manifest_that_is_not_as_signed_is_refused(offer: dict[str, Any], change: dict[str, Any]) -> None:
    with pytest.raises(ManifestError, match="signature"):
        parse_manifest(offer | change, "default", KEY)


def test_another_key_does_not_do(offer: dict[str, Any]) -> None:
    forged = offer | {"signature": manifest_signature("another", offer)}
    with pytest.raises(ManifestError, match="DRAFTALIGN_SIGNING_KEY"):
        parse_manifest(forged, "default", KEY)


def test_without_a_key_nothing_is_signed(serve: Any) -> None:
    service: RunningService = serve()
    service.register()
    service.publish()
    assert service.client.get("/drafter/latest").json()["signature"] is None
