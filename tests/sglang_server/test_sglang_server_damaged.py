"""A real SGLang whose command line names a drafter of an agent's cache that is no longer as it was verified."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.engine.server_load import damaged_in_a_cache
from sglang_server.sglang_process import SGLangProcess


def test_a_server_does_not_start_with_a_drafter_whose_bytes_changed_in_the_cache(
    drafters: Path, tmp_path: Path
) -> None:
    damaged = damaged_in_a_cache(drafters / "random", tmp_path / "v000001-0a1b2c3d")
    server = SGLangProcess(tmp_path, damaged, drafters)
    try:
        with pytest.raises(RuntimeError, match="did not start"):
            server.wait_until_ready()
        assert "model.safetensors has other bytes. It is not loaded." in server.log.read_text()
    finally:
        server.stop()
