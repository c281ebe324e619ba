"""A vLLM whose policy's own MTP module cannot be swapped: counted as vLLM counts it, under its name, left alone.

The policy is made by hand, in the form of MiMo: its layers add nothing, so the next token depends on the last one only,
and the module sees that token through a noisy projection. It is right often, but not always.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from helpers.engine.agent_fixtures import eventually, start_agent
from helpers.service.service_fixtures import RunningService
from helpers.service.storage_fixtures import Store
from redis import Redis
from safetensors.torch import save_file
from torch import Tensor
from vllm_server.vllm_process import FORKED, VllmServer

from examples.policy import BASE_POLICY
from rl_hooks.agent.follower import EngineFollower

HIDDEN, MIDDLE, VOCABULARY, HEADS = 64, 128, 105, 2


def mimo(directory: Path, *, noise: float) -> Path:
    """Write the policy, with one MTP module whose view of a token is off by `noise`."""
    directory.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copyfile(BASE_POLICY / name, directory / name)
    config = {
        "architectures": ["MiMoForCausalLM"],
        "model_type": "qwen2",
        "hidden_size": HIDDEN,
        "intermediate_size": MIDDLE,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "num_hidden_layers": 1,
        "num_nextn_predict_layers": 1,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "eos_token_id": 1,
        "pad_token_id": 0,
        "hidden_act": "silu",
        "torch_dtype": "float32",
    }
    (directory / "config.json").write_text(json.dumps(config))
    save_file(_weights(noise), directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def _weights(noise: float) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(0)
    tensors = {
        "model.embed_tokens.weight": torch.randn(VOCABULARY, HIDDEN, generator=random),
        "lm_head.weight": torch.randn(VOCABULARY, HIDDEN, generator=random) * 0.4,
        "model.norm.weight": torch.ones(HIDDEN),
    }
    module = "model.mtp_layers.0."
    for prefix in ("model.layers.0.", module):
        tensors |= _idle_block(prefix)
    tensors |= {module + name + ".weight": torch.ones(HIDDEN) for name in _MODULE_NORMS}
    token = torch.eye(HIDDEN) + noise * torch.randn(HIDDEN, HIDDEN, generator=random)
    tensors[module + "input_proj.weight"] = torch.cat([torch.zeros(HIDDEN, HIDDEN), token], dim=1)
    return tensors


_MODULE_NORMS = ("token_layernorm", "hidden_layernorm", "final_layernorm")


def _idle_block(prefix: str) -> dict[str, Tensor]:
    """A decoder block that adds zero to its input."""
    shapes = {
        **{f"self_attn.{name}_proj.weight": (HIDDEN, HIDDEN) for name in "qkvo"},
        **{f"self_attn.{name}_proj.bias": (HIDDEN,) for name in "qkv"},
        "mlp.gate_proj.weight": (MIDDLE, HIDDEN),
        "mlp.up_proj.weight": (MIDDLE, HIDDEN),
        "mlp.down_proj.weight": (HIDDEN, MIDDLE),
    }
    tensors = {prefix + name: torch.zeros(shape) for name, shape in shapes.items()}
    norms = ("input_layernorm", "post_attention_layernorm")
    return tensors | {f"{prefix}{name}.weight": torch.ones(HIDDEN) for name in norms}


def test_mtp_speculation_is_counted_as_vllm_counts_it(
    serve: Callable[..., RunningService], redis_url: str, drafters: Path, tmp_path: Path
) -> None:
    service = serve()
    service.register()
    policy = mimo(tmp_path / "policy", noise=0.05)
    speculative = {"method": "mtp", "num_speculative_tokens": 1}
    server = VllmServer(
        tmp_path / "vllm", drafters / "random", drafters, speculative=speculative, policy=policy, **FORKED
    )
    try:
        server.wait_until_healthy()
        assert server.state()["method"] == "mtp"
        refused = server.swap("trained", "an-eagle3-drafter")
        assert (refused.status_code, "this one is of 'mimo_mtp'" in refused.text) == (409, True), refused.text
        with start_agent(service.url, server, cache=tmp_path / "cache", engine_kind="vllm") as agent:
            follower: EngineFollower = eventually(lambda: agent.followers.get(server.url))
            eventually(lambda: follower.loaded_version == "mtp")
            before = server.counters()
            with ThreadPoolExecutor(6) as pool:
                texts = list(
                    pool.map(
                        lambda i: server.generate([2 + i], temperature=1.0, seed=i, max_tokens=40, ignore_eos=True),
                        range(64),
                    )
                )
            emitted = sum(len(text) - 1 for text in texts)
            # vLLM answers before it counts: the last step's tokens may come later.
            after = eventually(lambda: (c := server.counters()).emitted_tokens == emitted and c)
            assert before.rounds == 0
            counts = eventually(
                lambda: (c := follower.ledger.version_counts("mtp")).emitted_tokens == after.emitted_tokens and c,
                30,
            )
            with Redis.from_url(redis_url) as redis:
                store = Store(redis, "default")
                eventually(
                    lambda: any(
                        r.drafter_version == "mtp" and r.accepted_tokens == after.accepted_tokens
                        for r in store.acceptances()
                    ),
                    30,
                )
        # Before it stops: vLLM's processes do not always end without one.
        assert server.log.read_text().count("Traceback") == 0
    finally:
        server.stop()
    alpha = 1 + after.accepted_tokens / after.rounds
    print(f"MTP: α {alpha:.4f} over {after.rounds} rounds; the agent {counts.alpha:.4f} over {counts.rounds}")
    assert counts.accepted_tokens == after.accepted_tokens
    assert 1.1 < alpha < 1.95
    assert counts.alpha == pytest.approx(alpha, rel=0.03)
