"""A service that takes what hooks send, and an environment that ends with its test."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from rl_hooks.stacks.environment import ENGINES_SHARE

if TYPE_CHECKING:
    from helpers.trainer.hooks_fixtures import Receiver


@pytest.fixture(autouse=True)
def _engines_share_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENGINES_SHARE, "0")  # noted by monkeypatch, which takes it away at the end
    monkeypatch.delenv(ENGINES_SHARE)


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")


@pytest.fixture
def service() -> Iterator[Receiver]:
    """It keeps all requests, and can misbehave."""
    from helpers.trainer.hooks_fixtures import receiver

    with receiver() as made:
        yield made
