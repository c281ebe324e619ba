"""Drafters of other forms on a real vLLM, such as two layers: swapped, and the same function as ours."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_fixtures import base_policy, random_drafter, write
from vllm_server.vllm_conformance import check_conformance
from vllm_server.vllm_process import FORKED, VllmServer

from drafter.model.eagle3 import Eagle3Drafter
from rl_hooks.format.eagle3 import Llama3Rope

pytestmark = pytest.mark.timeout(600)


def drafter_of(seed: int, **form: Any) -> Eagle3Drafter:
    """Random weights, large enough that every layer and every norm matters."""
    one = random_drafter(base_policy()[0], seed=5, draft_vocab_size=96)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        drafter = Eagle3Drafter(replace(one.config, **form), one.vocabulary)
    for parameter in drafter.parameters():
        if parameter.ndim == 2:
            parameter.data *= 4
    if drafter.input_norm is not None:
        drafter.input_norm.weight.data = torch.linspace(0.5, 2.0, drafter.input_norm.weight.numel()).roll(seed)
    return drafter


FORMS: dict[str, dict[str, Any]] = {
    "two layers": {"num_hidden_layers": 2},
    "a normed residual": {"norm_before_residual": True},
    # Short enough that a text of some dozen tokens turns pairs of every band.
    "scaled rotary positions": {"rope_scaling": Llama3Rope(8.0, 1.0, 4.0, 32)},
    "a norm before fc": {"norm_before_fc": True},
}


@pytest.fixture(scope="module", params=FORMS)
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[VllmServer, Path, str]]:
    """A server that starts with one drafter of the form, the directory with another, and what the form is told by."""
    form = FORMS[request.param]
    directory = tmp_path_factory.mktemp("drafters")
    write(drafter_of(1, **form), directory / "first")
    write(drafter_of(2, **form), directory / "second")
    write(random_drafter(base_policy()[0], seed=5, draft_vocab_size=96), directory / "plain")
    server = VllmServer(tmp_path_factory.mktemp("vllm"), directory / "first", directory, **FORKED)
    try:
        server.wait_until_healthy()
        yield server, directory, next(iter(form))
    finally:
        server.stop()


def test_it_is_swapped_and_computes_what_ours_computes(served: tuple[VllmServer, Path, str], tmp_path: Path) -> None:
    server, directory, _ = served
    state = server.client.get("/drafter/state").json()
    assert state["problem"] is None, state
    check_conformance(server, directory, tmp_path, "second")


def test_another_form_is_refused_and_nothing_touched(served: tuple[VllmServer, Path, str]) -> None:
    server, _, told = served
    before = server.client.get("/drafter/state").json()
    refused = server.swap("plain", "plain")
    assert refused.status_code == 409
    assert told in refused.json()["detail"]
    assert server.client.get("/drafter/state").json() == before


def test_a_drafter_whose_config_ends_before_the_policy_is_told_and_swapped(tmp_path: Path) -> None:
    """Else one request that is longer than 64 tokens ends drafting for its whole batch, and nobody says why."""
    write(drafter_of(1, max_position_embeddings=64), tmp_path / "drafters/first")
    write(drafter_of(2), tmp_path / "drafters/second")
    server = VllmServer(tmp_path, tmp_path / "drafters/first", tmp_path / "drafters", **FORKED)
    try:
        server.wait_until_healthy()
        state = server.state()
        answer = server.swap("second", "second")
    finally:
        server.stop()
    assert "longer than 64 tokens, and it serves up to 256: write max_position_embeddings 256" in state["problem"]
    assert state["problem"] in server.log.read_text()
    assert (state["takes"], answer.status_code) == ("eagle3", 200)
