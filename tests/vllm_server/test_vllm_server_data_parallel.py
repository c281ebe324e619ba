"""Two data-parallel engine cores and two API processes behind one server: every core is swapped, or the swap failed."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from agent_fixtures import eventually
from vllm_server.vllm_process import FORKED, VllmServer

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def cores(drafters: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    """A server of two cores, which believes that it can sleep."""
    options = ("--data-parallel-size", "2", "--api-server-count", "2")
    scratch = tmp_path_factory.mktemp("vllm")
    server = VllmServer(scratch, drafters / "random", drafters, options=options, DRAFTALIGN_TESTS_SLEEP="1", **FORKED)
    try:
        server.wait_until_healthy()
        eventually(lambda: server.log.read_text(errors="replace").count("Application startup complete") == 2, 120)
        yield server
    finally:
        server.stop()


def test_a_core_that_fails_fails_the_swap_and_a_paused_engine_is_told_of_alike_by_every_process(
    cores: VllmServer,
) -> None:
    cores.rpc("fail_a_core", 1)
    failed = cores.swap("trained", "v1")
    assert failed.status_code == 503, failed.text
    assert "broke this load half-way" in failed.text
    state = cores.state()
    assert state["loaded"] is False
    assert "different drafters" in state["problem"]
    assert cores.swap("trained", "v1").json()["version"] == "v1"
    assert (cores.state()["version"], cores.state()["loaded"]) == ("v1", True)

    cores.client.post("/test/pause").raise_for_status()

    def told(_: int) -> tuple[Any, ...]:  # a connection of its own each time: either process may take it
        state = httpx.get(f"{cores.url}/drafter/state", timeout=60).json()
        return state["version"], state["loaded"], state["swaps"] >= 1, state["problem"]

    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(told, range(24))) == {("v1", True, True, "the engine sleeps or is paused")}
