"""Without vLLM's environment the demo says what to do, before it starts anything."""

from __future__ import annotations

from pathlib import Path

import pytest

from examples import vllm_engine
from examples.demo import DemoConfig, run_demo
from service.errors import ConfigurationError


def test_the_demo_says_how_to_get_a_vllm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(vllm_engine, "PYTHON", tmp_path / "nowhere/bin/python")
    with pytest.raises(ConfigurationError, match="make vllm"):
        run_demo(DemoConfig(engine="vllm", out=tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_an_engine_that_nobody_knows_is_refused_with_those_that_are(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="`example`, `vllm` or a URL"):
        run_demo(DemoConfig(engine="sglang", out=tmp_path / "out"))
