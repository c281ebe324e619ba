"""SGLang as it runs on GPUs: schedules that overlap, on one rank and with tensor parallelism. Here on a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.engine.engine_fixtures import elicit_prompts, odd_prompts
from helpers.service.service_fixtures import RunningService
from sglang_server.sglang_process import SGLangProcess
from sglang_server.test_sglang_server_agent import answers_over_a_swap
from sglang_server.test_sglang_server_swap import replayed, swap

from drafter.model.eagle3 import Eagle3Drafter


@pytest.fixture(scope="module", params=[1, 2], ids=["one rank", "two ranks"])
def server(
    request: pytest.FixtureRequest, drafters: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SGLangProcess]:
    """One server for the tests of each number of ranks. (SGLang binds each rank to a core of its own.)"""
    ranks: int = request.param
    arguments = ["--tp-size", str(ranks)] if ranks > 1 else []
    environment = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"} if ranks > 1 else {}
    scratch = tmp_path_factory.mktemp("overlap")
    with SGLangProcess.ready(scratch, drafters, *arguments, DRAFTALIGN_TESTS_OVERLAP="1", **environment) as started:
        facts = started.client.get("/server_info").raise_for_status().json()
        assert (facts["disable_overlap_schedule"], facts["tp_size"]) == (False, ranks)
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
    server: SGLangProcess, service: RunningService, trained: Eagle3Drafter, drafters: Path
) -> None:
    """A round of the older drafter's is still under way at the swap."""
    answers_over_a_swap(server, service, trained, drafters, left_out=2)
