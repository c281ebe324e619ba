"""The demo's vLLM: the policy changes between RL steps, rounds are told apart by completion, α is that of replay."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.drafter.decode_fixtures import policy_of
from helpers.engine.engine_fixtures import base_policy, elicit_prompts, trained_drafter, write
from helpers.ports import free_port
from vllm_server.vllm_process import FORKED, forking_demo

from drafter.replay.replay import replay
from examples import elicit, vllm_engine
from examples.features import Rollout, batch_of
from examples.vllm_engine import VllmClient, vllm_server
from rl_hooks.engines.counting.counters import Snapshot

DEPTH = 4


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmClient]:
    state_dir, port = tmp_path_factory.mktemp("demo") / "state", free_port()
    drafter = write(trained_drafter(), state_dir / "initial-drafter")
    with pytest.MonkeyPatch.context() as patch:
        # In the demo's own test vLLM spawns what this server starts, as a user's does.
        patch.setattr(vllm_engine, "subprocess", forking_demo(**FORKED))
        with vllm_server(state_dir, drafter, port, depth=DEPTH, seed=0) as process:
            served = VllmClient(f"http://127.0.0.1:{port}", state_dir)
            served.wait(process)
            yield served
            served.close()


def moved_policy(seed: int) -> Any:
    """The shipped policy with every parameter moved by a twentieth of its spread."""
    model = copy.deepcopy(base_policy()[0])
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * parameter.std() * 0.05)
    return model


@torch.no_grad()
def largest_difference(model: Any, rollouts: list[Rollout]) -> float:
    """Between the log-probabilities that the server logged and those of a plain forward."""
    worst = 0.0
    for rollout in rollouts:
        ids = torch.tensor([rollout.prompt_ids + rollout.token_ids])
        logits = model(ids).logits[0, len(rollout.prompt_ids) - 1 : -1].log_softmax(-1)
        own = logits.gather(-1, torch.tensor(rollout.token_ids)[:, None])[:, 0]
        worst = max(worst, float((own - torch.tensor(rollout.logprobs)).abs().max()))
    return worst


def test_every_policy_is_served_exactly_and_its_rounds_are_those_of_replay(client: VllmClient) -> None:
    prompts = elicit_prompts(32, seed=8)
    for version, model in enumerate((base_policy()[0], moved_policy(1), moved_policy(2), base_policy()[0])):
        if version:
            client.load_policy(model, version)
        before = Snapshot.parse(client._http.get("/metrics").text)
        completions = client.generate(prompts, elicit.TASK)
        after = Snapshot.parse(client._http.get("/metrics").text)
        rollouts = [
            Rollout(tuple(p), tuple(c["token_ids"]), tuple(c["logprobs"]))
            for p, c in zip(prompts, completions, strict=True)
        ]
        # All of it: an embedding without its tied head, or a layer left behind, would show.
        assert largest_difference(model, rollouts) < 1e-4
        rounds = sum(c["rounds"] for c in completions)
        assert rounds == after.counts.rounds - before.counts.rounds
        assert after.policy_version == version
        # The engine shares the policy's embedding.
        expected = replay(
            trained_drafter(), batch_of(model, rollouts), policy_of(model), depth=DEPTH, drafting="greedy"
        )
        emitted = sum(c["emitted_tokens"] for c in completions)
        assert emitted == expected.total()["tokens"]
        assert rounds == pytest.approx(expected.total()["rounds"], rel=0.01)


def test_a_policy_outside_of_its_directory_is_not_loaded(client: VllmClient, tmp_path: Path) -> None:
    answer = client._http.post("/policy", json={"path": str(tmp_path), "version": 9})
    assert answer.status_code == 403
