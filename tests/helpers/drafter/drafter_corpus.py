"""Drafters' files, good and odd, each with the one verdict that every reader must give.

Every case is the config.json and the tensors of a small drafter of the same target, changed in one thing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor

from drafter.files.checkpoint import export_config
from drafter.files.mtp import export_mtp_config
from drafter.model.eagle3 import DrafterConfig
from rl_hooks.format.eagle3 import DrafterError, parse_config, tensor_shapes, with_layers
from rl_hooks.format.mtp import MtpConfig, mtp_shapes, parse_mtp_config, prefix

LAYERS: Final = (2, 4, 5)
TARGET: Final[dict[str, Any]] = {
    "model_type": "qwen3",
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 40,
    "rope_theta": 5e5,
}
SIZES: Final = DrafterConfig.from_target(TARGET, LAYERS, 20)
#: Takes a field out of a config.
ABSENT: Final = object()

_MTP: Final[dict[str, Any]] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "moe_intermediate_size": 8,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_nextn_predict_layers": 1,
    "vocab_size": 40,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "first_k_dense_replace": 0,
}
MTP_TARGETS: Final[Mapping[str, dict[str, Any]]] = {
    "deepseek_v3": _MTP
    | {
        "model_type": "deepseek_v3",
        "q_lora_rank": 12,
        "kv_lora_rank": 8,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 8,
    },
    "glm4_moe": _MTP
    | {
        "model_type": "glm4_moe",
        "num_key_value_heads": 2,
        "head_dim": 8,
        "attention_bias": True,
        "use_qk_norm": True,
        "partial_rotary_factor": 0.5,
    },
}
BASES: Final[Mapping[str, dict[str, Any]]] = {"eagle3": export_config(SIZES)} | {
    family: export_mtp_config(MtpConfig.from_target(config)) for family, config in MTP_TARGETS.items()
}

Change = Callable[[dict[str, Tensor]], None]


@dataclass(frozen=True)
class Case:
    """A drafter: which it is made of, what is changed, and whether its files are a drafter's."""

    good: bool
    base: str = "eagle3"
    changes: Mapping[str, Any] = field(default_factory=dict)
    tensors: Change | None = None
    #: Engines that cannot take it although the format allows it.
    beyond: frozenset[str] = frozenset()

    @property
    def document(self) -> dict[str, Any]:
        """Its config.json."""
        return {n: v for n, v in (BASES[self.base] | dict(self.changes)).items() if v is not ABSENT}

    @property
    def target(self) -> dict[str, Any]:
        """The config of the policy that it belongs to."""
        return dict(MTP_TARGETS.get(self.base, TARGET))

    def weights(self) -> dict[str, Tensor]:
        """Its tensors: those that its config asks for where it can be read, else those of what it was made of."""
        document = json.loads(json.dumps(self.document))
        try:
            made = _shapes(document)
        except (DrafterError, TypeError, ValueError, OverflowError):
            made = _shapes(BASES[self.base])
        random = torch.Generator().manual_seed(0)
        found = {n: torch.randn(shape, generator=random) for n, shape in made.items() if n not in ("d2t", "t2d")}
        if "d2t" in made:
            size, whole = made["d2t"][0], made["t2d"][0]
            found |= {"d2t": torch.arange(size), "t2d": torch.zeros(whole, dtype=torch.bool)}
            found["t2d"][torch.arange(size) * 2] = True
        if self.tensors is not None:
            self.tensors(found)
        return found


def _shapes(document: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    own = document.get("draftalign")
    if isinstance(own, Mapping) and own.get("kind") == "mtp":
        config = parse_mtp_config(document)
        return {prefix(config) + name: shape for name, shape in mtp_shapes(config).items()}
    return tensor_shapes(parse_config(with_layers(document, LAYERS)))


def _cast(name: str, dtype: torch.dtype) -> Change:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors[name] = tensors[name].to(dtype)

    return change


def _drop(name: str) -> Change:
    def change(tensors: dict[str, Tensor]) -> None:
        del tensors[name]

    return change


def _add(name: str, *shape: int) -> Change:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors[name] = torch.ones(shape)

    return change


def _all_bfloat16(tensors: dict[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        if tensor.is_floating_point():
            tensors[name] = tensor.to(torch.bfloat16)


def _good(beyond: tuple[str, ...] = (), /, base: str = "eagle3", tensors: Change | None = None, **changes: Any) -> Case:
    return Case(True, base, changes, tensors, frozenset(beyond))


def _odd(base: str = "eagle3", tensors: Change | None = None, **changes: Any) -> Case:
    return Case(False, base, changes, tensors)


_ROPE: Final = {"rope_type": "default", "rope_theta": 5e5}
_YARN: Final = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
_LLAMA3: Final = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_IDS: Final = "eagle_aux_hidden_state_layer_ids"


def _layers(named: object) -> dict[str, Any]:
    """The layers named at the top level alone."""
    return {_IDS: named, "eagle_config": ABSENT}


_EAGLE3: Final[dict[str, Case]] = {
    # --- good
    "as draftalign writes it": _good(),
    "over the whole vocabulary": _good(draft_vocab_size=40),
    "of two layers": _good(("sglang",), num_hidden_layers=2),
    "norm_before_residual": _good(("sglang",), norm_before_residual=True),
    "norm_before_fc": _good(norm_before_fc=True),
    "norm_before_fc in eagle_config": _good(eagle_config={_IDS: [1, 3, 4], "norm_before_fc": True}),
    "norm_before_fc off by both names": _good(
        norm_before_fc=False, eagle_config={_IDS: [1, 3, 4], "norm_before_fc": None}
    ),
    "in bfloat16": _good(tensors=_all_bfloat16),
    "of mixed dtypes": _good(tensors=_cast("norm.weight", torch.bfloat16)),
    "named as SafeAILab does": _good(architectures=["LlamaForCausalLM"]),
    "without rope_parameters": _good(rope_parameters=ABSENT),
    "rope_theta in rope_parameters alone": _good(rope_theta=ABSENT),
    "rope scaling llama3": _good(rope_parameters=_ROPE | _LLAMA3),
    "rope scaling llama3 by its old names": _good(rope_parameters=ABSENT, rope_scaling=_LLAMA3),
    "rope scaling llama3 by both names": _good(rope_parameters=_ROPE | _LLAMA3, rope_scaling=_LLAMA3),
    "a window that is off": _good(sliding_window=4096, use_sliding_window=False),
    "layer_types of full attention": _good(layer_types=["full_attention"]),
    "entering layers alone": _good(eagle_config=ABSENT),
    "another limit of positions": _good(max_position_embeddings=64),
    "what changes nothing, said": _good(logit_scale=1, final_logit_softcapping=None, is_causal=True),
    "another family of target": _good(target_model_type="llama"),
    # --- another function of weights of the same shapes
    "hidden_act gelu": _odd(hidden_act="gelu"),
    "mlp_bias": _odd(mlp_bias=True),
    "attention_bias": _odd(attention_bias=True),
    "sliding window": _odd(sliding_window=128),
    "use_sliding_window": _odd(use_sliding_window=True, sliding_window=128),
    "layer_types with a window": _odd(layer_types=["sliding_attention"]),
    "partial rotary": _odd(partial_rotary_factor=0.5),
    "partial rotary inside rope_parameters": _odd(rope_parameters=_ROPE | {"partial_rotary_factor": 0.5}),
    "contradictory rope_theta": _odd(rope_theta=1e4),
    "no rope_theta": _odd(rope_theta=ABSENT, rope_parameters=ABSENT),
    "a negative rope_theta": _odd(rope_theta=-1.0, rope_parameters=ABSENT),
    "a rope_theta whose positions overflow": _odd(rope_theta=1e-300, rope_parameters=ABSENT),
    "rope_theta true": _odd(rope_theta=True, rope_parameters=ABSENT),
    "rope scaling llama3 of the factor alone": _odd(
        rope_parameters=ABSENT, rope_scaling={"rope_type": "llama3", "factor": 8.0}
    ),
    "rope scaling llama3 by one of two names": _odd(rope_scaling=_LLAMA3),
    "rope scaling llama3, another by each name": _odd(
        rope_parameters=_ROPE | _LLAMA3, rope_scaling=_LLAMA3 | {"factor": 32.0}
    ),
    "rope scaling llama3, another original length beside it": _odd(
        rope_parameters=_ROPE | _LLAMA3, original_max_position_embeddings=128
    ),
    "rope scaling llama3, bands the wrong way round": _odd(
        rope_parameters=_ROPE | _LLAMA3 | {"low_freq_factor": 4.0, "high_freq_factor": 1.0}
    ),
    "rope scaling llama3 of a factor below one": _odd(rope_parameters=_ROPE | _LLAMA3 | {"factor": 0.5}),
    "rope scaling llama3 of a text": _odd(rope_parameters=_ROPE | _LLAMA3 | {"factor": "8"}),
    "rope scaling llama3 of half a position": _odd(
        rope_parameters=_ROPE | _LLAMA3 | {"original_max_position_embeddings": 64.5}
    ),
    "rope scaling yarn": _odd(rope_parameters=_YARN | {"rope_theta": 5e5}),
    "rope scaling by its old name": _odd(rope_scaling={"type": "linear", "factor": 2.0}),
    "rope_parameters that are a text": _odd(rope_parameters="default"),
    "tied embeddings": _odd(tie_word_embeddings=True),
    "norm_output": _odd(norm_output=True),
    "fc_norm": _odd(fc_norm=True),
    "norm_before_fc, the other by each name": _odd(
        norm_before_fc=False, eagle_config={_IDS: [1, 3, 4], "norm_before_fc": True}
    ),
    "norm_before_fc and fc_norm": _odd(norm_before_fc=True, fc_norm=True),
    "norm_before_fc that is a text": _odd(norm_before_fc="yes"),
    "norm_before_fc without its norm": _odd(tensors=_drop("input_norm.weight"), norm_before_fc=True),
    "a norm before fc that the config does not name": _odd(tensors=_add("input_norm.weight", 48)),
    "use_aux_norm": _odd(use_aux_norm=True),
    "qkv_bias": _odd(qkv_bias=True),
    "attention to later tokens": _odd(is_causal=False),
    "interleaved rotary pairs": _odd(rope_is_neox_style=False),
    "scaled logits": _odd(logit_scale=0.0625),
    "capped logits": _odd(final_logit_softcapping=30.0),
    "a foreign architecture": _odd(architectures=["Qwen3ForCausalLM"]),
    "norm_before_residual that is a text": _odd(norm_before_residual="yes"),
    # --- layers
    "other outputs than inputs": _odd(eagle_config={_IDS: [2, 4, 5]}),
    "layers of the wrong order": _odd(**_layers([5, 4, 2])),
    "a layer twice": _odd(**_layers([2, 2, 5])),
    "a negative layer": _odd(**_layers([-1, 4, 5])),
    "layers that are texts": _odd(**_layers(["2", "4", "5"])),
    "no layers at all": _odd(**_layers([])),
    "no auxiliary states": _odd(eagle_config={"use_aux_hidden_state": False}),
    "eagle_config that is a list": _odd(eagle_config=[1, 3, 4]),
    # --- sizes
    "head_dim that is odd": _odd(head_dim=3),
    "key-value heads that do not divide": _odd(num_key_value_heads=3),
    "a hidden_size of zero": _odd(hidden_size=0),
    "a negative vocabulary": _odd(vocab_size=-40),
    "a size that is a truth value": _odd(num_key_value_heads=True),
    "a size that is a float": _odd(intermediate_size=24.0),
    "a size that is a text": _odd(hidden_size="16"),
    "a size beyond all measure": _odd(intermediate_size=1 << 40),
    "more parameters than fit": _odd(hidden_size=1 << 14, target_hidden_size=1 << 14, intermediate_size=1 << 21),
    "no head_dim": _odd(head_dim=ABSENT),
    "no draft_vocab_size": _odd(draft_vocab_size=ABSENT),
    "a draft vocabulary larger than the target's": _odd(draft_vocab_size=41),
    "another width of the target": _odd(target_hidden_size=32),
    "no layers of its own": _odd(num_hidden_layers=0),
    "a thousand layers": _odd(num_hidden_layers=1000),
    "an eps that is NaN": _odd(rms_norm_eps=float("nan")),
    "an eps of one": _odd(rms_norm_eps=1.0),
    "no eps": _odd(rms_norm_eps=ABSENT),
    "an eps that is null": _odd(rms_norm_eps=None),
    "another kind": _odd(draftalign={"kind": "medusa"}),
    # --- tensors
    "a tensor of integers": _odd(tensors=_cast("norm.weight", torch.int64)),
    "a tensor in float64": _odd(tensors=_cast("norm.weight", torch.float64)),
    "no fc": _odd(tensors=_drop("fc.weight")),
    "no d2t": _odd(tensors=_drop("d2t")),
    "no t2d": _odd(tensors=_drop("t2d")),
    "d2t in 32 bits": _odd(tensors=_cast("d2t", torch.int32)),
    "a norm too many": _odd(tensors=_add("midlayer.self_attn.q_norm.weight", 4)),
    "a norm of another width": _odd(tensors=_add("norm.weight", 8)),
}

_MTP_CASES: Final[dict[str, Case]] = {
    # --- good
    "DeepSeek-V3's form": _good(("sglang",), "deepseek_v3"),
    "GLM-4.5's form": _good(("sglang",), "glm4_moe"),
    "DeepSeek's, dense": _good(("sglang",), "deepseek_v3", n_routed_experts=0),
    "DeepSeek's, one q_proj": _good(("sglang",), "deepseek_v3", q_lora_rank=None),
    "DeepSeek's, with YaRN": _good(("sglang",), "deepseek_v3", rope_parameters=_YARN),
    "DeepSeek's, half-split pairs": _good(("sglang", "vllm"), "deepseek_v3", rope_interleave=False),
    "DeepSeek's, number of modules not said": _good(("sglang",), "deepseek_v3", num_nextn_predict_layers=ABSENT),
    "GLM's, without biases and norms": _good(("sglang",), "glm4_moe", attention_bias=False, use_qk_norm=False),
    "GLM's, other feedback": _good(("sglang",), "glm4_moe", draftalign={"kind": "mtp", "normed_feedback": True}),
    "latent attention of another family": _good(("sglang", "vllm"), "deepseek_v3", model_type="glm4_moe_lite"),
    # --- odd
    "DeepSeek's, gelu": _odd("deepseek_v3", hidden_act="gelu"),
    "DeepSeek's, biases": _odd("deepseek_v3", attention_bias=True),
    "DeepSeek's, softmax over experts": _odd("deepseek_v3", scoring_func="softmax"),
    "DeepSeek's, sparse attention": _odd("deepseek_v3", index_topk=2048),
    "DeepSeek's, three modules": _odd("deepseek_v3", num_nextn_predict_layers=3),
    "DeepSeek's, YaRN without a factor": _odd("deepseek_v3", rope_parameters={"rope_type": "yarn"}),
    "DeepSeek's, one of YaRN's two figures": _odd("deepseek_v3", rope_parameters=_YARN | {"mscale": 0.707}),
    "DeepSeek's, scaled positions": _odd("deepseek_v3", rope_parameters=_YARN | {"rope_type": "linear"}),
    "DeepSeek's, experts scaled until they overflow": _odd("deepseek_v3", routed_scaling_factor=1e38),
    "DeepSeek's, YaRN by nearly nothing": _odd("deepseek_v3", rope_parameters=_YARN | {"factor": 1e-300}),
    "DeepSeek's, YaRN with a ramp that overflows": _odd("deepseek_v3", rope_parameters=_YARN | {"beta_fast": 1e-300}),
    "DeepSeek's, YaRN with a magnitude that overflows": _odd(
        "deepseek_v3", rope_parameters=_YARN | {"mscale": 1e300, "mscale_all_dim": 1e300}
    ),
    "DeepSeek's, YaRN of base 1": _odd("deepseek_v3", rope_theta=1.0, rope_parameters=_YARN | {"rope_theta": 1.0}),
    "DeepSeek's, odd rotary width": _odd("deepseek_v3", qk_rope_head_dim=3),
    "DeepSeek's, no kv_lora_rank": _odd("deepseek_v3", kv_lora_rank=ABSENT),
    "DeepSeek's, dense to vLLM alone": _odd("deepseek_v3", first_k_dense_replace=9),
    "DeepSeek's, more experts chosen than there are": _odd("deepseek_v3", num_experts_per_tok=5),
    "DeepSeek's, an eps that is NaN": _odd("deepseek_v3", rms_norm_eps=float("nan")),
    "DeepSeek's, a switch that is a text": _odd("deepseek_v3", draftalign={"kind": "mtp", "normed_feedback": "yes"}),
    "GLM's, YaRN": _odd("glm4_moe", rope_parameters=_YARN),
    "GLM's, heads that do not divide": _odd("glm4_moe", num_key_value_heads=3),
    "GLM's, more than a head turns": _odd("glm4_moe", partial_rotary_factor=2.0),
    "GLM's, a size that is a text": _odd("glm4_moe", hidden_size="16"),
    "DeepSeek's, no router": _odd("deepseek_v3", _drop("model.layers.8.mlp.gate.weight")),
    "GLM's, a tensor of integers": _odd("glm4_moe", _cast("model.layers.8.enorm.weight", torch.int64)),
}

CORPUS: Final[Mapping[str, Case]] = _EAGLE3 | _MTP_CASES
#: Named by nobody: readers that know the run's or the engine's layers take those, the others refuse.
NO_LAYERS: Final = _good(**_layers(ABSENT))
