"""Service, swap agent and vLLM, all real, under load: what the drafter's way to a serving engine promises."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from agent_fixtures import eventually, start_agent
from engine_fixtures import elicit_prompts
from safetensors.torch import load_file
from service_fixtures import RunningService
from torch import Tensor
from vllm_load import Load, edited
from vllm_process import VllmServer

from drafter.checkpoint import config_fingerprint
from drafter.model import Eagle3Drafter
from drafter.vocabulary import DraftVocabulary
from rl_hooks.canary import CanaryRule
from rl_hooks.follower import EngineFollower

pytestmark = pytest.mark.timeout(600)


def publish(service: RunningService, directory: Path, drafter: Eagle3Drafter) -> str:
    """Publish the files as they are; the manifest says what they say of themselves, as the worker's would."""
    staged = service.registry.stage("default")
    for path in directory.iterdir():
        (staged / path.name).write_bytes(path.read_bytes())
    d2t = load_file(directory / "model.safetensors")["d2t"]
    vocabulary = DraftVocabulary.from_d2t(d2t, drafter.config.vocab_size)
    aux_layers = json.loads((directory / "config.json").read_text())["eagle_aux_hidden_state_layer_ids"]
    facts: dict[str, Any] = {"policy_version": 0, "parent": None, "aux_layers": tuple(aux_layers)}
    facts["config_fingerprint"] = config_fingerprint(drafter.config, vocabulary)
    facts["d2t_sha256"] = vocabulary.digest
    return service.registry.publish("default", staged, **facts).version


def poison_embedding(tensors: dict[str, Tensor]) -> None:
    tensors["embed_tokens.weight"] = torch.randn(105, 64)


def next_words(tensors: dict[str, Tensor]) -> None:
    """Another draft vocabulary of the same size."""
    tensors["d2t"] -= 1
    tensors["t2d"] = tensors["t2d"].roll(-1)


def rounds_of(follower: EngineFollower, version: str) -> int:
    return follower.ledger.version_counts(version).rounds


def test_the_agent_keeps_a_real_vllm_on_the_right_drafter(
    server: VllmServer, service: RunningService, trained: Eagle3Drafter, drafters: Path
) -> None:
    assert server.swap("random", "before-the-agent").status_code == 200
    policy = server.rpc("policy_digest")
    load = Load(server, elicit_prompts(24, seed=4))  # one kind of traffic: a canary compares over time
    rule = CanaryRule(rounds=200)
    with load.running(), start_agent(service.url, server, cache=drafters / "agent", canary=rule) as agent:
        good = publish(service, drafters / "trained", trained)
        follower: EngineFollower = eventually(lambda: agent.followers.get(server.url))
        eventually(lambda: follower.loaded_version == good)
        eventually(lambda: rounds_of(follower, good) > 400, 120)

        worse = publish(service, drafters / "random", trained)
        eventually(lambda: follower.loaded_version == worse)
        eventually(lambda: follower.loaded_version == good, 120)
        eventually(lambda: "canary_rolled_back" in service.client.get("/drafters").text)

        poisoned = publish(service, edited(drafters, poison_embedding), trained)
        eventually(lambda: server.state()["version"] == poisoned, 60)
        assert server.rpc("policy_digest") == policy
        eventually(lambda: rounds_of(follower, poisoned) > 400, 120)  # its canary is over

        publish(service, edited(drafters, next_words), trained)
        load.wait_for(20)
        assert server.state()["version"] == poisoned

        swaps = server.state()["swaps"]
        server.rpc("wipe_drafter")
        eventually(lambda: server.state()["swaps"] == swaps + 1, 60)
        assert server.state()["loaded"] is True
        load.wait_for(20)
        alphas = [follower.ledger.version_counts(version).alpha for version in (good, worse)]
    assert load.failures == []
    assert load.changed == {}
    assert server.rpc("policy_digest") == policy
    print(f"alpha of the good drafter {alphas[0]:.3f}, of the worse {alphas[1]:.3f}; {load.served} requests")
    assert alphas[1] < 0.9 * alphas[0]
