"""Small MTP modules and the policies that they are of, in float64, for every layout that is read."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import DeepseekV3Config, Glm4MoeConfig

from drafter.mtp.module import MtpConfig, MtpDrafter
from drafter.policy import Policy, TargetHead

VOCAB, LAYERS = 41, 3
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 24,
    "intermediate_size": 20,
    "moe_intermediate_size": 10,
    "num_hidden_layers": LAYERS,
    "num_nextn_predict_layers": 1,
    "max_position_embeddings": 64,
    "attn_implementation": "eager",
    "experts_implementation": "eager",
    "pad_token_id": 0,
    "eos_token_id": 1,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 0.8,
}


def target_config(**changes: Any) -> DeepseekV3Config:
    sizes = {
        **_SIZES,
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
        "q_lora_rank": 10,
        "kv_lora_rank": 8,
        "qk_nope_head_dim": 6,
        "qk_rope_head_dim": 4,
        "v_head_dim": 7,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "n_group": 4,
        "topk_group": 2,
        "num_experts_per_tok": 3,
        "first_k_dense_replace": 1,
    }
    return DeepseekV3Config(**(sizes | changes))


VARIANTS: dict[str, dict[str, Any]] = {
    "experts": {},
    "dense": {"n_routed_experts": 0},
    "one query projection": {"q_lora_rank": None},
    "yarn": {"rope_parameters": YARN},
    "weights not normalised": {"norm_topk_prob": False, "routed_scaling_factor": 1.5},
}


def glm_config(**changes: Any) -> Glm4MoeConfig:
    sizes = {
        **_SIZES,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "n_routed_experts": 6,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "routed_scaling_factor": 1.5,
    }
    return Glm4MoeConfig(**(sizes | changes))


CONFIGS: dict[str, Any] = {
    **{name: (lambda changes=changes: target_config(**changes)) for name, changes in VARIANTS.items()},
    "glm": glm_config,
    "glm with biases and head norms": lambda: glm_config(attention_bias=True, use_qk_norm=True),
}


def drafter_for(config: Any, seed: int = 0, **changes: Any) -> tuple[MtpDrafter, Policy]:
    """In float64, with weights large enough that every term of the formulas matters, and the policy that it is of."""
    g = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g, dtype=torch.float64)

    sizes = (config.vocab_size, config.hidden_size)
    policy = Policy(0, draw(*sizes), TargetHead(draw(*sizes)))
    drafter = MtpDrafter(replace(MtpConfig.from_target(config.to_dict()), **changes)).double()
    for parameter in drafter.parameters():
        noise = draw(*parameter.shape)
        parameter.data = 0.3 * noise if parameter.ndim == 2 else 1 + 0.3 * noise
    for name, buffer in drafter.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(0.2 * draw(*buffer.shape))
    return drafter, policy
