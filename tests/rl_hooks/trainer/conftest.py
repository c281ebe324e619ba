"""What an adapter writes into its process' environment ends with its test."""

from __future__ import annotations

import pytest

from rl_hooks.trainer.stacks.environment import ENGINES_SHARE


@pytest.fixture(autouse=True)
def _engines_share_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENGINES_SHARE, "0")  # noted by monkeypatch, which takes it away at the end
    monkeypatch.delenv(ENGINES_SHARE)
