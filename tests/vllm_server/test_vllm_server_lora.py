"""A real vLLM with an adapter beside its policy: what the adapter answers is another policy's, and is never sent."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from helpers.engine.agent_fixtures import eventually
from helpers.engine.engine_fixtures import base_policy, odd_prompts
from helpers.service.service_fixtures import RunningService
from safetensors.torch import save_file
from vllm_server.test_vllm_server_tap import TOLERANCE, expected
from vllm_server.vllm_process import FORKED, VllmServer

from drafter.batch import RolloutBatch, load_batch

RANK = 4


def write_adapter(directory: Path) -> Path:
    """An adapter in PEFT's layout, of random factors for the queries of each layer."""
    directory.mkdir()
    config, factors = base_policy()[0].config, {}
    generator = torch.Generator().manual_seed(0)
    for layer in range(config.num_hidden_layers):
        module = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        queries = config.num_attention_heads * config.head_dim
        for name, shape in (("lora_A", (RANK, config.hidden_size)), ("lora_B", (queries, RANK))):
            factors[f"{module}.{name}.weight"] = torch.randn(shape, generator=generator)
    save_file(factors, directory / "adapter_model.safetensors")
    facts = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": ["q_proj"], "bias": "none"}
    (directory / "adapter_config.json").write_text(json.dumps(facts))
    return directory


def arrived(service: RunningService) -> list[RolloutBatch]:
    """The files in the spool."""
    return [load_batch(path) for path in service.spooled() if path.suffix == ".safetensors"]


def test_what_an_adapter_answers_is_counted_and_not_sent(
    serve: Callable[..., RunningService], drafters: Path, tmp_path: Path
) -> None:
    service = serve()
    environment = {
        "DRAFTALIGN_URL": service.url,
        "DRAFTALIGN_RUN": "live",
        "DRAFTALIGN_SAMPLE_FRACTION": "1.0",
        "DRAFTALIGN_TOKENS_PER_MINUTE": "10000000",
        **FORKED,
    }
    # One adapter more than there is: with one, vLLM 0.32 on a CPU applies it to the whole of a batch.
    adapter = f"adapter={write_adapter(tmp_path / 'adapter')}"
    options = ("--enable-lora", "--max-loras", "2", "--max-lora-rank", "8", "--lora-modules", adapter)
    only = ("--lora-target-modules", "q_proj")  # that of the embedding, which the drafter shares, fails on a CPU
    (tmp_path / "vllm").mkdir()
    server = VllmServer(tmp_path / "vllm", drafters / "trained", drafters, options=(*options, *only), **environment)
    try:
        server.wait_until_healthy()
        prompts = odd_prompts(6, seed=41)
        asked = [(prompt, model) for prompt in prompts for model in ("policy", "adapter")]
        with ThreadPoolExecutor(4) as pool:
            answers = list(pool.map(lambda one: server.generate(one[0], model=one[1]), asked))
        by_model = {
            model: [tuple(p + text) for (p, m), text in zip(asked, answers, strict=True) if m == model]
            for model in ("policy", "adapter")
        }
        assert not {*by_model["policy"]} & {*by_model["adapter"]}, "the adapter changes nothing"
        eventually(lambda: server.state()["tap"]["delivered"] == len(prompts), 60)
        assert server.state()["tap"]["skipped_distribution"] == len(prompts)
        eventually(lambda: sum(batch.rollouts for batch in arrived(service)) >= len(prompts), 60)
        found = list[tuple[int, ...]]()
        for batch in arrived(service):
            for begin, end in itertools.pairwise(batch.cu_seqlens.tolist()):
                ids = batch.input_ids[begin:end].tolist()
                found.append(tuple(ids))
                aux, _, logits = expected(ids)
                sent = batch.aux_hidden[begin : end - 1].float()
                assert float(((sent - aux[:-1]).abs() - 2.0**-8 * aux[:-1].abs()).max()) < TOLERANCE
                answered = batch.loss_mask[begin + 1 : end]
                own = logits.log_softmax(-1)[:-1].gather(-1, torch.tensor(ids)[1:, None])[:, 0]
                assert float((batch.logprobs[begin + 1 : end] - own)[answered].abs().max()) < TOLERANCE
        assert sorted(found) == sorted(by_model["policy"])
    finally:
        server.stop()
