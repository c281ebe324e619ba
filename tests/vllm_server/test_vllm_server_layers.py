"""A drafter of two layers on a real vLLM: served, hot-swapped, and the same function as ours."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from engine_fixtures import base_policy, random_drafter, write
from test_vllm_server_conformance import check_conformance
from vllm_process import VllmServer

from drafter.model.eagle3 import Eagle3Drafter

pytestmark = pytest.mark.timeout(600)


def two_layers(seed: int) -> Eagle3Drafter:
    """Random weights, large enough that both layers matter."""
    one = random_drafter(base_policy()[0], seed=5, draft_vocab_size=96)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        drafter = Eagle3Drafter(replace(one.config, num_hidden_layers=2), one.vocabulary)
    for parameter in drafter.parameters():
        if parameter.ndim == 2:
            parameter.data *= 4
    return drafter


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[VllmServer, Path]]:
    """A server that starts with one drafter of two layers, and the directory with another."""
    directory = tmp_path_factory.mktemp("deep")
    write(two_layers(1), directory / "first")
    write(two_layers(2), directory / "second")
    write(random_drafter(base_policy()[0], seed=5, draft_vocab_size=96), directory / "shallow")
    server = VllmServer(tmp_path_factory.mktemp("vllm"), directory / "first", directory)
    try:
        server.wait_until_healthy()
        yield server, directory
    finally:
        server.stop()


def test_it_is_swapped_and_computes_what_ours_computes(deep: tuple[VllmServer, Path], tmp_path: Path) -> None:
    server, directory = deep
    state = server.client.get("/drafter/state").json()
    assert state["problem"] is None, state
    check_conformance(server, directory, tmp_path, "second")


def test_another_number_of_layers_is_refused_and_nothing_touched(deep: tuple[VllmServer, Path]) -> None:
    server, _ = deep
    before = server.client.get("/drafter/state").json()
    refused = server.swap("shallow", "shallow")
    assert refused.status_code == 409
    assert "num_hidden_layers" in refused.json()["detail"]
    assert server.client.get("/drafter/state").json() == before
