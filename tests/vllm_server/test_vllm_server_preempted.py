"""Requests that a real vLLM preempts, because its KV cache is too small for all: their rows come out exactly."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.engine.agent_fixtures import eventually
from helpers.engine.engine_fixtures import base_policy, elicit_prompts
from helpers.engine.tap_fixtures import truncated
from helpers.service.service_fixtures import RunningService
from safetensors.torch import load_file
from vllm_server.vllm_process import FORKED, V2_RUNNER, VllmServer

from examples.policy import AUX_LAYERS

#: Blocks of 32 tokens, for requests of 66 tokens each.
SMALL_CACHE = ("--block-size", "32", "--num-gpu-blocks-override", "6", "--max-model-len", "128")
REQUESTS, TOKENS = 4, 60


# V2's kernel for top-k and top-p does not run in Triton's interpreter.
@pytest.fixture(params=[({}, {"top_p": 0.9, "top_k": 8}), (V2_RUNNER, {})], ids=["V1 runner", "V2 runner"])
def fleet(
    request: pytest.FixtureRequest, serve: Callable[..., RunningService], drafters: Path, tmp_path: Path
) -> Iterator[tuple[VllmServer, dict[str, Any]]]:
    """A server whose cache does not hold its requests, and how some of them are drawn."""
    runner, some = request.param
    environment: dict[str, Any] = {
        "DRAFTALIGN_URL": serve(drafting="greedy").url,
        "DRAFTALIGN_RUN": "live",
        "DRAFTALIGN_SAMPLE_FRACTION": "1.0",
        "DRAFTALIGN_TOKENS_PER_MINUTE": "10000000",
    }
    server = VllmServer(
        tmp_path / "vllm", drafters / "trained", drafters, options=SMALL_CACHE, **environment, **runner, **FORKED
    )
    try:
        server.wait_until_healthy()
        server.client.timeout = 600
        yield server, some
    finally:
        server.stop()


def preemptions(server: VllmServer) -> float:
    lines = server.client.get("/metrics").raise_for_status().text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:num_preemptions_total"))


@torch.no_grad()
def test_what_was_preempted_is_sent_as_it_would_have_been(
    fleet: tuple[VllmServer, dict[str, Any]], tmp_path: Path
) -> None:
    server, some = fleet
    server.generate([5], max_tokens=1)  # the tap begins with the first request
    server.rpc("keep_collected")
    prompts = elicit_prompts(REQUESTS, seed=7)
    cut = [some if number % 2 else {} for number in range(REQUESTS)]
    more: dict[str, Any] = {"max_tokens": TOKENS, "temperature": 1.0, "ignore_eos": True, "stop_token_ids": []}
    with ThreadPoolExecutor(REQUESTS) as pool:
        texts = list(pool.map(lambda i: server.generate(prompts[i], seed=i, **more, **cut[i]), range(REQUESTS)))
    assert preemptions(server) > 0
    server.generate([5], max_tokens=1)  # a step, in which the last ends are told
    stats: dict[str, Any] = {}

    def all_came() -> bool:
        stats.update(server.state()["tap"])
        return bool(sum(stats.get(name, 0) for name in ("delivered", "skipped_unscored", "failures")) > REQUESTS)

    eventually(all_came, 60)
    assert "failures" not in stats
    kept = server.rpc("take_collected", str(tmp_path / "kept.safetensors"))
    tensors = load_file(tmp_path / "kept.safetensors")
    came = {tuple(tensors[f"{n}.input_ids"].tolist()): n for n in range(len(kept))}
    model, _ = base_policy()
    gaps = {"aux": 0.0, "logprobs": 0.0}
    for prompt, text, law in zip(prompts, texts, cut, strict=True):
        ids = [*prompt, *text]
        number = came[tuple(ids)]
        out = model.model(torch.tensor([ids]), output_hidden_states=True)
        aux = torch.cat([out.hidden_states[layer][0] for layer in AUX_LAYERS], dim=-1)
        gaps["aux"] = max(gaps["aux"], float((tensors[f"{number}.aux"][: len(ids) - 1] - aux[:-1]).abs().max()))
        laws = truncated(model.lm_head(out.last_hidden_state[0]).log_softmax(-1), **law)
        own = laws[len(prompt) - 1 : -1].gather(-1, torch.tensor(text)[:, None])[:, 0]
        said = tensors[f"{number}.logprobs"][len(prompt) :]
        gaps["logprobs"] = max(gaps["logprobs"], float((said - own).abs().max()))
    print(f"{preemptions(server):.0f} preemptions, largest differences {gaps}; {stats}")
    assert max(gaps.values()) < 1e-4
