"""SGLang as it runs on several GPUs: schedules that overlap, tensor parallelism, and both. Here on a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from engine_fixtures import elicit_prompts, odd_prompts
from service_fixtures import RunningService
from sglang_server.sglang_process import SGLangProcess
from sglang_server.test_sglang_server_agent import answers_over_a_swap
from sglang_server.test_sglang_server_swap import replayed, swap

from drafter.model.eagle3 import Eagle3Drafter

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module", params=["overlap", "ranks", "both"])
def way(request: pytest.FixtureRequest) -> str:
    """How the server runs."""
    return str(request.param)


@pytest.fixture(scope="module")
def server(way: str, drafters: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SGLangProcess]:
    """One server for the tests of each way. (SGLang binds each rank to a core of its own.)"""
    overlap, ranks = {"overlap": (True, 1), "ranks": (False, 2), "both": (True, 2)}[way]
    arguments = ["--tp-size", str(ranks)] if ranks > 1 else []
    environment = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"} if ranks > 1 else {}
    if overlap:
        environment["DRAFTALIGN_TESTS_OVERLAP"] = "1"
    scratch = tmp_path_factory.mktemp(way)
    with SGLangProcess.ready(scratch, drafters, *arguments, **environment) as started:
        facts = started.client.get("/server_info").raise_for_status().json()
        assert (not facts["disable_overlap_schedule"], facts["tp_size"]) == (overlap, ranks)
        yield started


def test_a_swapped_drafters_rounds_are_those_of_replay_one_by_one(
    server: SGLangProcess, drafters: Path, trained: Eagle3Drafter
) -> None:
    swap(server, drafters, drafters / "trained", "measured")
    tokens, rounds, expected_tokens, expected_rounds = replayed(
        server, trained, odd_prompts(20, seed=7) + elicit_prompts(20, seed=21)
    )
    print(f"alpha {tokens / rounds:.4f}, {rounds} rounds, replay {expected_rounds}")
    assert (tokens, rounds) == (expected_tokens, expected_rounds)
    assert tokens / rounds > 1.5


def test_answers_that_run_over_a_swap_are_counted_by_the_drafter_of_each_round(
    way: str, server: SGLangProcess, service: RunningService, trained: Eagle3Drafter, drafters: Path
) -> None:
    """Where schedules overlap, a round of the older drafter's is still under way at the swap."""
    answers_over_a_swap(server, service, trained, drafters, left_out=1 if way == "ranks" else 2)
