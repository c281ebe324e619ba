"""What adapters that are put into a trainer read from its environment."""

from __future__ import annotations

from typing import Any

import pytest

from rl_hooks.trainer.stacks.environment import attached


def told(monkeypatch: pytest.MonkeyPatch, **environment: str) -> list[dict[str, Any]]:
    """The options that an adapter is given; none where it is not attached."""
    for name in ("URL", "RUN", "TOKEN", "INITIAL_DRAFTER", "AUX_LAYERS"):
        monkeypatch.delenv(f"DRAFTALIGN_{name}", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(f"DRAFTALIGN_{name}", value)
    found: list[dict[str, Any]] = []
    attached("a trainer", 0, found.append)
    return found


def test_the_hooks_options_are_those_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert told(monkeypatch, URL="http://s") == [{"url": "http://s", "run": "default", "token": None}]
    drafter = {"INITIAL_DRAFTER": "/drafters/first", "AUX_LAYERS": "2, 14,25"}
    assert told(monkeypatch, URL="http://s", RUN="r", TOKEN="t", **drafter) == [
        {
            "url": "http://s",
            "run": "r",
            "token": "t",
            "initial_drafter": "/drafters/first",
            "aux_layers": (2, 14, 25),
        }
    ]


def test_what_is_wrong_there_leaves_the_trainer_alone_and_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert told(monkeypatch) == []
    assert "draftalign is OFF: DRAFTALIGN_URL=http://host:port is not set" in caplog.text
    assert told(monkeypatch, URL="http://s", AUX_LAYERS="the usual ones") == []
    assert "DRAFTALIGN_AUX_LAYERS must be numbers like 2,14,25, got 'the usual ones'" in caplog.text
