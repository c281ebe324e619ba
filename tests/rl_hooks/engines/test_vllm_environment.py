"""Says aloud when the real vLLM is not there: without it, tests/vllm_server holds the plugin to its pure parts only."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

PYTHON = Path(__file__).parents[3] / ".venv-vllm" / "bin" / "python"


def test_the_real_vllm_is_there_with_our_plugins() -> None:
    if not PYTHON.exists():
        pytest.skip("no .venv-vllm: `make vllm`; swaps, conformance and live α were not checked on a real vLLM")
    code = "from importlib.metadata import entry_points as e; print(*sorted(p.group for p in e(name='draftalign')))"
    found = subprocess.run([str(PYTHON), "-c", code], capture_output=True, text=True, timeout=60)
    assert {"vllm.endpoint_plugins", "vllm.general_plugins"} <= set(found.stdout.split()), found.stderr
