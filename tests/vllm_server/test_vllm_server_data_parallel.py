"""Two data-parallel engine cores and two API processes behind one server: every core is swapped, or the swap failed.

Where the cores follow the service by themselves, each does, and each reports what it has counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from helpers.engine.agent_fixtures import eventually
from helpers.engine.engine_fixtures import elicit_prompts
from helpers.engine.server_load import publish
from helpers.service.service_fixtures import RunningService
from helpers.service.storage_fixtures import Store
from redis import Redis
from vllm_server.vllm_process import FORKED, VllmServer

from drafter.model.eagle3 import Eagle3Drafter


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


def test_two_cores_follow_the_service_with_variables_alone_and_each_reports_its_rounds(
    serve: Callable[..., RunningService],
    redis_url: str,
    drafters: Path,
    trained: Eagle3Drafter,
    tmp_path: Path,
) -> None:
    service, prompts = serve(), elicit_prompts(16, seed=3)
    metrics = tmp_path / "metrics"
    metrics.mkdir()
    server = VllmServer(
        tmp_path,
        drafters / "random",
        drafters,
        options=("--data-parallel-size", "2"),  # and as many API processes
        DRAFTALIGN_URL=service.url,
        DRAFTALIGN_SAMPLE_FRACTION="1.0",
        DRAFTALIGN_TOKENS_PER_MINUTE="10000000",
        # As vLLM sets it for API processes that it spawns. Ours are forked from one that has looked for it already.
        PROMETHEUS_MULTIPROC_DIR=str(metrics),
        **FORKED,
    )

    def generate() -> list[list[int]]:
        with ThreadPoolExecutor(8) as pool:
            return list(pool.map(server.generate, prompts))

    def staged() -> list[dict[str, Any]]:
        body = {"method": "draftalign_staged"}
        answers: list[dict[str, Any]] = server.client.post("/test/rpc", json=body).raise_for_status().json()
        return answers

    try:
        server.wait_until_healthy()
        texts = generate()
        eventually(lambda: service.client.get("/runs/default").status_code == 200, 30)
        version = publish(service, drafters / "trained", trained)
        eventually(lambda: [(one.get("version"), one.get("done")) for one in staged()] == [(version, True)] * 2, 120)
        assert server.state()["version"] is None, "an engine that is idle swaps nothing"
        before = server.counters()
        assert generate() == texts
        after = server.counters()
        assert (server.state()["version"], server.state()["loaded"]) == (version, True)
        rounds, accepted = after.rounds - before.rounds, after.accepted_tokens - before.accepted_tokens
        assert 1 + accepted / rounds > 2.0

        def reported() -> dict[str | None, tuple[int, int | None]]:
            with Redis.from_url(redis_url) as client:
                found = Store(client, "default").acceptances()
            ours = [one for one in found if one.drafter_version == version and one.policy_version == 0]
            return {one.reporter: (one.rounds, one.accepted_tokens) for one in ours if one.reporter}

        eventually(lambda: sum(one for one, _ in reported().values()) >= rounds, 60)
        counts = list(reported().values())
        print(f"rounds and accepted drafts by core {counts}, vLLM's own {rounds} and {accepted}")
        assert len(counts) == 2
        assert min(one for one, _ in counts) > 0
        assert (sum(one for one, _ in counts), sum(one or 0 for _, one in counts)) == (rounds, accepted)
    finally:
        server.stop()
