"""vLLM divides MiniCPM's last state itself: what its tap sends and registers agrees with the model's own logits."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from helpers.engine.agent_fixtures import eventually
from helpers.engine.engine_fixtures import random_drafter, write
from helpers.service.service_fixtures import RunningService
from safetensors.torch import load_file
from transformers import MiniCPM3Config, MiniCPM3ForCausalLM
from vllm_server.vllm_process import FORKED, VllmServer

from examples.policy import BASE_POLICY
from rl_hooks.wire import LogitMap, MappedFile

SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "v_head_dim": 32,
    "max_position_embeddings": 256,
    "scale_emb": 2,
    "dim_model_base": 32,  # logits are a quarter of what the undivided state would give
    "tie_word_embeddings": False,
    "pad_token_id": 0,
}


def write_policy(directory: Path) -> MiniCPM3ForCausalLM:
    """A model whose distributions are far from uniform, with the shipped policy's tokenizer."""
    vocab = json.loads((BASE_POLICY / "config.json").read_text())["vocab_size"]
    torch.manual_seed(0)
    model = MiniCPM3ForCausalLM(MiniCPM3Config(vocab_size=vocab, **SIZES)).eval().float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2:
                parameter.normal_(std=0.4 if "embed" in name or "lm_head" in name else 0.1)
    model.save_pretrained(directory)
    for file in BASE_POLICY.glob("*token*"):
        shutil.copy(file, directory)
    return model


def test_a_served_minicpms_rollouts_have_its_own_log_probabilities(
    serve: Callable[..., RunningService], tmp_path: Path
) -> None:
    model = write_policy(tmp_path / "policy")
    write(random_drafter(model, seed=5), tmp_path / "drafters" / "random")
    service = serve()
    environment: dict[str, Any] = {
        "DRAFTALIGN_URL": service.url,
        "DRAFTALIGN_RUN": "live",
        "DRAFTALIGN_SAMPLE_FRACTION": "1.0",
        "DRAFTALIGN_TOKENS_PER_MINUTE": "10000000",
    }
    server = VllmServer(
        tmp_path,
        tmp_path / "drafters" / "random",
        tmp_path / "drafters",
        policy=tmp_path / "policy",
        **environment,
        **FORKED,
    )
    try:
        server.wait_until_healthy()
        server.generate([5], max_tokens=1)  # the tap begins with the first request
        server.rpc("keep_collected")
        prompt = [5, 9, 7, 11]
        answer = server.generate(prompt, temperature=1.0, seed=0)
        server.generate([5], max_tokens=1)  # a step, in which its end is told
        kept = server.rpc("take_collected", str(tmp_path / "kept.safetensors"))
        eventually(service.layout.target("live").exists, 30)
    finally:
        server.stop()
    tensors = load_file(tmp_path / "kept.safetensors")
    texts = [[*prompt[: kept[n]["first"]], *tensors[f"{n}.input_ids"].tolist()] for n in range(len(kept))]
    number = texts.index(prompt + answer)
    with torch.no_grad():
        law = model(torch.tensor([prompt + answer])).logits[0].log_softmax(-1)
    own = law[len(prompt) - 1 : -1].gather(-1, torch.tensor(answer)[:, None])[:, 0]
    logged = tensors[f"{number}.logprobs"][len(prompt) - kept[number]["first"] :]
    assert torch.allclose(logged, own, atol=1e-4)
    metadata = MappedFile(service.layout.target("live")).header.metadata
    assert LogitMap.from_metadata(metadata) == LogitMap()
