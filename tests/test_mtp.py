"""The MTP drafter: against a float64 reference, against transformers' own MTP, trained, replayed, exported."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from drafter_worlds import SHAPES, mask_of
from mtp_reference import reference_pres
from torch import Tensor
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM
from transformers.modeling_layers import MtpModel

from drafter.errors import DrafterError
from drafter.model import rms_norm
from drafter.mtp import MtpConfig, MtpDrafter, unroll_mtp
from drafter.plan import make_plan

VOCAB, LAYERS = 41, 3
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
        "vocab_size": VOCAB,
        "hidden_size": 24,
        "intermediate_size": 20,
        "moe_intermediate_size": 10,
        "num_hidden_layers": LAYERS,
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
        "num_nextn_predict_layers": 1,
        "max_position_embeddings": 64,
        "attn_implementation": "eager",
        "experts_implementation": "eager",
        "pad_token_id": 0,
        "eos_token_id": 1,
    }
    return DeepseekV3Config(**(sizes | changes))


VARIANTS: dict[str, dict[str, Any]] = {
    "experts": {},
    "dense": {"n_routed_experts": 0},
    "one query projection": {"q_lora_rank": None},
    "yarn": {"rope_parameters": YARN},
    "weights not normalised": {"norm_topk_prob": False, "routed_scaling_factor": 1.5},
}


def drafter_for(config: DeepseekV3Config, seed: int = 0, **changes: Any) -> MtpDrafter:
    """In float64, with weights large enough that every term of the formulas matters."""
    g = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g, dtype=torch.float64)

    sizes = (config.vocab_size, config.hidden_size)
    drafter = MtpDrafter(replace(MtpConfig.from_target(config.to_dict()), **changes), draw(*sizes), draw(*sizes))
    drafter = drafter.double()
    for parameter in drafter.parameters():
        noise = draw(*parameter.shape)
        parameter.data = 0.3 * noise if parameter.ndim == 2 else 1 + 0.3 * noise
    for name, buffer in drafter.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(0.2 * draw(*buffer.shape))
    return drafter


@pytest.mark.parametrize("zero_first", [True, False])
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_row_and_step_equals_the_reference(variant: str, zero_first: bool) -> None:
    config = target_config(**VARIANTS[variant])
    drafter = drafter_for(config, zero_first_embedding=zero_first)
    masks = SHAPES["packed, awkward"]
    g = torch.Generator().manual_seed(7)
    T = sum(m.numel() for m in masks)
    ids = torch.randint(VOCAB, (T,), generator=g)
    last = torch.randn(T, config.hidden_size, generator=g, dtype=torch.float64)
    starts = torch.tensor([0] + [m.numel() for m in masks]).cumsum(0)
    got = unroll_mtp(drafter, make_plan(starts, torch.cat(masks), 3), ids, last)
    weights = {name: tensor.detach() for name, tensor in drafter.state_dict().items()}
    compared = 0
    for begin, end in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True):
        expected = reference_pres(
            weights, config, drafter.embed_tokens, ids[begin:end].tolist(), last[begin:end], 3, zero_first
        )
        for step in range(3):
            for row, pre in zip(got.rows[step].tolist(), got.pre[step], strict=True):
                if begin <= row < end:
                    assert torch.allclose(pre, expected[row - begin, step], rtol=1e-9, atol=1e-9), (row, step)
                    compared += 1
    assert compared == sum(got.plan.entries) > 60


def transformers_twin(drafter: MtpDrafter, config: DeepseekV3Config) -> MtpModel:
    """transformers' own MTP modules with the same weights."""
    main = DeepseekV3ForCausalLM(config).double()
    main.model.embed_tokens.weight.data = drafter.embed_tokens.clone()
    main.lm_head.weight.data = drafter.head.clone()
    twin = MtpModel(main, 1).double()
    own = {name: tensor for name, tensor in drafter.state_dict().items() if "experts." not in name}
    renamed = {
        (name if name.split(".")[0] in ("enorm", "hnorm", "eh_proj") else f"mtp_block.{name}").replace(
            "mtp_block.shared_head.norm", "post_norm"
        ): tensor
        for name, tensor in own.items()
    }
    if drafter.config.experts is not None:
        full = drafter.state_dict()
        for name in ("gate_proj", "up_proj", "down_proj"):
            key = f"mlp.shared_experts.{name}.weight"
            renamed[f"mtp_block.{key}"] = full[key]
        parts = [
            [full[f"mlp.experts.{e}.{name}.weight"] for e in range(config.n_routed_experts)]
            for name in ("gate_proj", "up_proj", "down_proj")
        ]
        renamed["mtp_block.mlp.experts.gate_up_proj"] = torch.cat([torch.stack(parts[0]), torch.stack(parts[1])], dim=1)
        renamed["mtp_block.mlp.experts.down_proj"] = torch.stack(parts[2])
    twin.layers[0].load_state_dict(renamed)
    return twin.eval()


@torch.no_grad()
@pytest.mark.parametrize("variant", ["experts", "one query projection", "yarn", "weights not normalised"])
def test_every_row_and_step_equals_transformers(variant: str) -> None:
    config = target_config(**VARIANTS[variant])
    drafter = drafter_for(config, zero_first_embedding=False)
    twin = transformers_twin(drafter, config)
    n, steps = 11, 3
    g = torch.Generator().manual_seed(3)
    ids = torch.randint(VOCAB, (n,), generator=g)
    last = torch.randn(n, config.hidden_size, generator=g, dtype=torch.float64)
    got = unroll_mtp(drafter, make_plan(torch.tensor([0, n]), mask_of(n, 2), steps), ids, last)
    for step in range(steps):
        for row, pre in zip(got.rows[step].tolist(), got.pre[step], strict=True):
            # A round that began at `row` is one causal pass: true features up to it, then its own outputs.
            fed = last[: row + 1]
            for j in range(step + 1):
                out = twin.forward_layer(
                    0,
                    fed[None],
                    torch.arange(row + 1 + j)[None],
                    None,
                    input_ids=ids[1 : row + 2 + j][None],
                )[0]
                fed = torch.cat([fed, out[-1:]])
            normed = rms_norm(pre, drafter.shared_head.norm.weight, config.rms_norm_eps)
            # transformers computes rotary angles in float32
            assert torch.allclose(normed, out[-1], rtol=1e-5, atol=1e-5), (row, step)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_lora_rank": None}, "lacks kv_lora_rank.*EAGLE-3"),
        ({"attention_bias": True}, "attention biases"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}, "YaRN"),
        ({"v_head_dim": 11}, "v_head_dim"),
        ({"scoring_func": "softmax"}, "sigmoid"),
        ({"n_group": 3}, "3 groups"),
        ({"num_experts_per_tok": 5}, "cannot give 5"),
    ],
)
def test_configs_of_another_layout_are_refused_by_what_differs(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(DrafterError, match=message):
        MtpConfig.from_target(target_config().to_dict() | changes)
