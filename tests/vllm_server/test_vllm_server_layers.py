"""Drafters of other forms on a real vLLM, such as two layers: swapped, and the same function as ours."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from helpers.engine.engine_fixtures import base_policy, random_drafter, write
from vllm_server.vllm_conformance import check_conformance
from vllm_server.vllm_process import FORKED, VllmServer

from drafter.model.eagle3 import Eagle3Drafter
from rl_hooks.format.eagle3 import Llama3Rope


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


FORM: dict[str, Any] = {
    "num_hidden_layers": 2,
    "norm_before_residual": True,
    # Short enough that a text of some dozen tokens turns pairs of every band.
    "rope_scaling": Llama3Rope(8.0, 1.0, 4.0, 32),
    "norm_before_fc": True,
}
#: Each part of the form taken away, and what the refusal names.
OTHERS: dict[str, Any] = {
    "num_hidden_layers": 1,
    "norm_before_residual": False,
    "rope_scaling": None,
    "norm_before_fc": False,
}


class Served(NamedTuple):
    """A server, the directory of its drafters, and what it said of the one that it began with."""

    server: VllmServer
    directory: Path
    at_first: dict[str, Any]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server that starts with one drafter of the form, and the directory with another and with those that differ.

    All parts of the form at once, for a start costs half a minute, and each part shows in every state. The config of
    the first drafter ends before the policy.
    """
    directory = tmp_path_factory.mktemp("drafters")
    write(drafter_of(1, **FORM, max_position_embeddings=64), directory / "first")
    write(drafter_of(2, **FORM), directory / "second")
    for name, value in OTHERS.items():
        write(drafter_of(2, **FORM | {name: value}), directory / name)
    server = VllmServer(tmp_path_factory.mktemp("vllm"), directory / "first", directory, **FORKED)
    try:
        server.wait_until_healthy()
        yield Served(server, directory, server.state())
    finally:
        server.stop()


def test_a_drafter_whose_config_ends_before_the_policy_is_told_and_swapped(served: Served) -> None:
    """Else one request that is longer than 64 tokens ends drafting for its whole batch, and nobody says why."""
    server, state = served.server, served.at_first
    assert "longer than 64 tokens, and it serves up to 256: write max_position_embeddings 256" in state["problem"]
    assert state["problem"] in server.log.read_text()
    assert (state["takes"], server.swap("second", "told").status_code) == ("eagle3", 200)


def test_it_is_swapped_and_computes_what_ours_computes(served: Served, tmp_path: Path) -> None:
    check_conformance(served.server, served.directory, tmp_path, "second")


@pytest.mark.parametrize("part", OTHERS)
def test_another_form_is_refused_and_nothing_touched(served: Served, part: str) -> None:
    server = served.server
    before = server.state()
    refused = server.swap(part, part)
    assert refused.status_code == 409
    assert part in refused.json()["detail"]
    assert server.state() == before
