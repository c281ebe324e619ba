"""A real SGLang server for the tests here; without its environment (`make sglang`) they are not collected."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.engine.engine_fixtures import trained_drafter
from helpers.engine.server_load import write_drafters
from sglang_server.sglang_process import PYTHON, SGLangProcess

from drafter.model.eagle3 import Eagle3Drafter

if not PYTHON.exists():
    collect_ignore_glob = ["test_sglang_server_*.py"]


@pytest.fixture(scope="session")
def drafters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory that agent and server share: `random` (what the server starts with) and `trained`."""
    return write_drafters(tmp_path_factory.mktemp("drafters"))


@pytest.fixture(scope="session")
def trained() -> Eagle3Drafter:
    """The drafter in `trained`."""
    return trained_drafter()


@pytest.fixture(scope="session")
def server(drafters: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SGLangProcess]:
    """One server for the session: a start costs half a minute, and idle it sleeps."""
    with SGLangProcess.ready(tmp_path_factory.mktemp("sglang"), drafters) as server:
        yield server
