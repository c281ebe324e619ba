"""A real vLLM started with drafters as speculators publishes them, config and layout: registered, trained, swapped.

Each beside a policy of the family that it is published for, vLLM's own class of it: Qwen3, gpt-oss (experts, attention
sinks, YaRN, sliding layers) and Llama 3, small and with random weights.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.engine.agent_fixtures import eventually
from helpers.engine.engine_fixtures import elicit_prompts, odd_prompts
from helpers.engine.published_drafters import PUBLISHED, write_published
from helpers.engine.server_load import publish
from helpers.service.service_fixtures import RunningService
from helpers.service.storage_fixtures import RolloutQueue, Store
from redis import Redis
from transformers import GptOssConfig, GptOssForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM
from vllm_server.vllm_conformance import check_calls
from vllm_server.vllm_process import DEPTH, FORKED, VllmServer

from drafter.files.checkpoint import read_drafter, write_drafter
from drafter.model.eagle3 import Eagle3Drafter
from examples.policy import BASE_POLICY
from service.storage.layout import Layout
from service.worker.loop import RunWorker

#: What vLLM captures of eight layers where a drafter's config names none.
LAYERS = (2, 4, 5)
SIZES: dict[str, Any] = {
    "vocab_size": 105,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": None,
    "tie_word_embeddings": False,
}
EXPERTS: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 64}


def make_policy(name: str) -> Any:
    """A policy of the family, its weights as bfloat16 holds them."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        made: Any
        if name == "gpt-oss-20b":
            made = GptOssForCausalLM(GptOssConfig(**SIZES, **EXPERTS, initial_context_length=64))
        elif name == "Qwen3-8B":
            made = Qwen3ForCausalLM(Qwen3Config(**SIZES))
        else:
            made = LlamaForCausalLM(LlamaConfig(**SIZES))
        for parameter in made.parameters():
            if parameter.ndim >= 2:
                parameter.data.normal_(std=0.1)
            parameter.data = parameter.data.bfloat16().float()
    return made.eval().requires_grad_(False)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_server_that_starts_with_it_is_registered_trained_and_swapped(
    name: str, serve: Callable[..., RunningService], redis_url: str, tmp_path: Path
) -> None:
    policy = make_policy(name)
    policy.save_pretrained(tmp_path / "policy")
    for file in BASE_POLICY.glob("*token*"):
        shutil.copy(file, tmp_path / "policy")
    published = write_published(tmp_path / "published", name, policy.get_input_embeddings().weight, seed=1)
    service = serve(drafting="greedy", depth=DEPTH, train_step_tokens=400)
    environment: dict[str, Any] = {
        "DRAFTALIGN_URL": service.url,
        "DRAFTALIGN_RUN": "live",
        "DRAFTALIGN_SAMPLE_FRACTION": "1.0",
        "DRAFTALIGN_TOKENS_PER_MINUTE": "10000000",
        **FORKED,
    }
    server = VllmServer(tmp_path, published, tmp_path / "cache", policy=tmp_path / "policy", **environment)
    try:
        server.wait_until_healthy()
        state = server.state()
        assert (state["problem"], state["takes"]) == (None, "eagle3"), state
        prompts = elicit_prompts(20, seed=31) + odd_prompts(20, seed=31)
        texts = [server.generate(prompt, max_tokens=24) for prompt in prompts]
        server.generate([5], max_tokens=1)  # a step, in which the last ends are told
        eventually(lambda: service.client.get("/runs/live").status_code == 200, 60)
        first, trained = _trained(service, redis_url)
        eventually(lambda: _asked(server)["version"] == first, 60)
        assert [server.generate(prompt, max_tokens=24) for prompt in prompts[:4]] == texts[:4]

        write_drafter(_made(tmp_path / "trained"), trained)
        second = publish(service, tmp_path / "trained", trained, run="live")
        eventually(lambda: _asked(server)["version"] == second, 60)
        assert [server.generate(prompt, max_tokens=24) for prompt in prompts[:4]] == texts[:4]
        ours = read_drafter(service.layout.drafter("live", second))
        check_calls(server, ours, tmp_path, odd_prompts(1, seed=77)[0] + elicit_prompts(1, seed=11)[0], policy, LAYERS)
    finally:
        server.stop()


def _trained(service: RunningService, redis_url: str) -> tuple[str, Eagle3Drafter]:
    """The version that the run begins with, and the worker's candidate once it has trained on the engine's traffic."""
    with Redis.from_url(redis_url) as redis:
        queue, store = RolloutQueue(redis, "live"), Store(redis, "live")
        worker = RunWorker(service.settings, Layout(service.settings.state_dir), queue, store, "live")
        lineage = worker.learner.lineage
        before = {n: p.detach().clone() for n, p in lineage.candidate.named_parameters()}
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and not lineage.needed_trainer.windows:
            worker.cycle()
        candidate = lineage.candidate
        assert isinstance(candidate, Eagle3Drafter)
        still = [n for n, p in candidate.named_parameters() if torch.equal(p, before[n])]
        assert not still, "every weight has been trained"
    manifest = service.registry.versions("live")
    return manifest[0], candidate


def _asked(server: VllmServer) -> dict[str, Any]:
    """The state after a step: a swap waits for one."""
    server.generate([5], max_tokens=1)
    return server.state()


def _made(directory: Path) -> Path:
    directory.mkdir()
    return directory
