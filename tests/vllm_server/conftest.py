"""A vLLM server for the tests in this directory; without its environment (`make vllm`) they are not collected."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.engine.engine_fixtures import trained_drafter
from helpers.engine.server_load import write_drafters
from vllm_server.vllm_process import FORKED, PYTHON, VllmServer

from drafter.model.eagle3 import Eagle3Drafter

if not PYTHON.exists():
    collect_ignore_glob = ["test_vllm_server_*.py"]


@pytest.fixture(scope="session")
def drafters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The configured directory: `random` (what the server starts with) and `trained`."""
    return write_drafters(tmp_path_factory.mktemp("drafters"))


@pytest.fixture(scope="session")
def trained() -> Eagle3Drafter:
    """The drafter in `trained`."""
    return trained_drafter()


@pytest.fixture(scope="session")
def server(drafters: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    """One server for the session: a start costs a minute."""
    started = VllmServer(tmp_path_factory.mktemp("vllm"), drafters / "random", drafters, **FORKED)
    try:
        started.wait_until_healthy()
        yield started
    finally:
        started.stop()
