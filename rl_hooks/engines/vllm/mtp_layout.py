"""The layout of a policy's own MTP module in vLLM, and its weights in the policy's checkpoint. No vLLM is imported.

DeepSeek-V3's (latent attention) and GLM-4.5's (grouped attention), one module each. Embedding and head are the policy's
live ones; a candidate's file is what the service publishes: `model.layers.N.*` without copies of them.

Legend: H hidden, N query heads, G key-value heads, hd head size, V vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import safe_open
from torch import Tensor

from rl_hooks.engines.vllm.layout import (
    DrafterRefusedError,
    integer,
    number,
    product,
)

#: Model types, in a config.json and as vLLM renames them for the drafter: to whether attention is grouped.
_FAMILIES: Final[Mapping[str, bool]] = {
    "deepseek_v3": False,
    "deepseek_mtp": False,
    "glm4_moe": True,
    "glm4_moe_mtp": True,
}
_SIZES: Final = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
_LATENT: Final = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_EXPERTS: Final = ("num_experts_per_tok", "moe_intermediate_size")
_EXPERTS_BY_DEFAULT: Final[Mapping[str, Any]] = {
    "n_shared_experts": 0,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
}
_YARN: Final[Mapping[str, float]] = {
    "factor": 1.0,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 0.0,
    "mscale_all_dim": 0.0,
}
_INDEX_FILE: Final = "model.safetensors.index.json"


@dataclass(frozen=True)
class MtpLayout:
    """Every field of a configuration that gives the weights their shape or their meaning."""

    fields: Mapping[str, Any]

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> MtpLayout:
        """Read a policy's or module's config.json, or vLLM's copy of it. Raises `DrafterRefusedError`."""
        family = str(config.get("model_type"))
        if family not in _FAMILIES or config.get("index_topk") is not None:
            raise DrafterRefusedError(
                f"MTP modules of DeepSeek-V3's and GLM-4.5's form can be swapped, this one is of {family!r}"
            )
        if (modules := config.get("num_nextn_predict_layers")) != 1:
            raise DrafterRefusedError(f"a policy with one MTP module is expected, this one has {modules!r}")
        fields: dict[str, Any] = {name: integer(config, name) for name in _SIZES}
        fields["rms_norm_eps"] = number({"rms_norm_eps": 1e-6} | _given(config), "rms_norm_eps")
        grouped = _FAMILIES[family]
        fields |= (_grouped if grouped else _latent)(config, fields)
        fields |= _rope(config, grouped=grouped) | _experts(config) | _switches(config, grouped=grouped)
        return cls(fields)

    @property
    def vocab_size(self) -> int:
        """V."""
        return int(self.fields["vocab_size"])

    @property
    def draft_vocab_size(self) -> int:
        """V: every token is proposed."""
        return self.vocab_size

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """None: the module reads the target's last state."""
        return ()

    @property
    def float32(self) -> frozenset[str]:
        """What the router adds to its float32 scores, and in GLM's form the router itself."""
        names = ["e_score_correction_bias"] + (["weight"] if self.fields["grouped"] else [])
        return frozenset(f"{self._prefix}mlp.gate.{name}" for name in names)

    @property
    def shared(self) -> frozenset[str]:
        """The policy's embedding and head, which a module brings no copies of."""
        return frozenset({"model.embed_tokens", "lm_head", f"{self._prefix}shared_head.head"})

    @property
    def _prefix(self) -> str:
        return f"model.layers.{self.fields['num_hidden_layers']}."

    def of(self, config: Mapping[str, Any]) -> MtpLayout:
        """Read a candidate's config.json."""
        return MtpLayout.read(config)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every weight, as DeepSeek-V3's and GLM-4.5's checkpoints name them."""
        H = self.fields["hidden_size"]
        attention = self._grouped_shapes() if self.fields["grouped"] else self._latent_shapes()
        shapes: dict[str, tuple[int, ...]] = {
            "enorm.weight": (H,),
            "hnorm.weight": (H,),
            "eh_proj.weight": (H, 2 * H),
            "input_layernorm.weight": (H,),
            **{f"self_attn.{name}": shape for name, shape in attention.items()},
            "post_attention_layernorm.weight": (H,),
            **{f"mlp.{name}": shape for name, shape in self._mlp_shapes().items()},
            "shared_head.norm.weight": (H,),
        }
        return {self._prefix + name: shape for name, shape in shapes.items()}

    def unread(self) -> dict[str, tuple[int, ...]]:
        """None."""
        return {}

    def module_elements(self) -> dict[str, int]:
        """Elements by vLLM module; attention and feed-forward as a whole, since kernels cut them differently.

        Without biases: vLLM's reload leaves them in place and records no shape of them.
        """
        outside = ("enorm", "hnorm", "eh_proj", "shared_head.norm")
        inside = ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp")
        sizes = {
            name.removeprefix(self._prefix): product(shape)
            for name, shape in self.shapes().items()
            if not name.endswith("bias")
        }
        return {
            self._prefix + ("" if module in outside else "mtp_block.") + module: sum(
                size for name, size in sizes.items() if name.startswith(module + ".")
            )
            for module in (*outside, *inside)
        }

    def fingerprint(self, d2t: Tensor) -> None:  # noqa: ARG002 - the protocol's
        """Unknown here: a candidate's config.json is compared with the engine's field by field instead."""
        return

    def differences(self, other: MtpLayout) -> list[str]:
        """`field is ours here, theirs there` for each field in which they differ."""
        names = sorted(self.fields.keys() | other.fields.keys())
        pairs = ((name, self.fields.get(name), other.fields.get(name)) for name in names)
        return [f"{name} is {a} here, {b} there" for name, a, b in pairs if a != b]

    def _grouped_shapes(self) -> dict[str, tuple[int, ...]]:
        H, hd = self.fields["hidden_size"], self.fields["head_dim"]
        queries, keys = self.fields["num_attention_heads"] * hd, self.fields["num_key_value_heads"] * hd
        widths = {"q": queries, "k": keys, "v": keys}
        shapes: dict[str, tuple[int, ...]] = {f"{x}_proj.weight": (width, H) for x, width in widths.items()}
        if self.fields["attention_bias"]:
            shapes |= {f"{x}_proj.bias": (width,) for x, width in widths.items()}
        if self.fields["use_qk_norm"]:
            shapes |= {"q_norm.weight": (hd,), "k_norm.weight": (hd,)}
        return {**shapes, "o_proj.weight": (H, queries)}

    def _latent_shapes(self) -> dict[str, tuple[int, ...]]:
        f = self.fields
        H, N, value, q_rank, kv_rank = (
            f[name] for name in ("hidden_size", "num_attention_heads", "v_head_dim", "q_lora_rank", "kv_lora_rank")
        )
        width = f["qk_nope_head_dim"] + f["qk_rope_head_dim"]
        queries: dict[str, tuple[int, ...]] = {"q_proj.weight": (N * width, H)}
        if q_rank:
            queries = {
                "q_a_proj.weight": (q_rank, H),
                "q_a_layernorm.weight": (q_rank,),
                "q_b_proj.weight": (N * width, q_rank),
            }
        return queries | {
            "kv_a_proj_with_mqa.weight": (kv_rank + f["qk_rope_head_dim"], H),
            "kv_a_layernorm.weight": (kv_rank,),
            "kv_b_proj.weight": (N * (f["qk_nope_head_dim"] + value), kv_rank),
            "o_proj.weight": (H, N * value),
        }

    def _mlp_shapes(self) -> dict[str, tuple[int, ...]]:
        H, experts = self.fields["hidden_size"], self.fields["n_routed_experts"]
        if not experts:
            return _swiglu("", H, self.fields["intermediate_size"])
        size = self.fields["moe_intermediate_size"]
        shapes: dict[str, tuple[int, ...]] = {"gate.weight": (experts, H), "gate.e_score_correction_bias": (experts,)}
        for number_ in range(experts):
            shapes |= _swiglu(f"experts.{number_}.", H, size)
        if several := self.fields["n_shared_experts"]:
            shapes |= _swiglu("shared_experts.", H, several * size)
        return shapes


def read_own_module(policy: Path, layout: MtpLayout, dtype: torch.dtype) -> dict[str, Tensor]:
    """The module that a policy's checkpoint ships, sharded or not: what vLLM loaded when it started.

    Raises OSError or `DrafterRefusedError` where it is not there as `layout` says.
    """
    wanted = layout.shapes()
    files = {policy / "model.safetensors"}
    if (policy / _INDEX_FILE).exists():
        places = json.loads((policy / _INDEX_FILE).read_text())["weight_map"]
        files = {policy / Path(places[name]).name for name in wanted if name in places}
    tensors: dict[str, Tensor] = {}
    for path in sorted(files):
        with safe_open(str(path), framework="pt", device="cpu") as file:
            for name in wanted.keys() & set(file.keys()):
                tensors[name] = file.get_tensor(name).to(torch.float32 if name in layout.float32 else dtype)
    if {name: tuple(tensor.shape) for name, tensor in tensors.items()} != wanted:
        raise DrafterRefusedError(f"{policy} does not hold the module that its configuration describes")
    return tensors


def _swiglu(where: str, hidden: int, inner: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{where}gate_proj.weight": (inner, hidden),
        f"{where}up_proj.weight": (inner, hidden),
        f"{where}down_proj.weight": (hidden, inner),
    }


def _given(config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that have a value: null means the default."""
    return {name: value for name, value in config.items() if value is not None}


def _grouped(config: Mapping[str, Any], sizes: Mapping[str, int]) -> dict[str, Any]:
    heads = sizes["num_attention_heads"]
    return {
        "grouped": True,
        "num_key_value_heads": integer(config, "num_key_value_heads", heads),
        "head_dim": integer(config, "head_dim", sizes["hidden_size"] // heads),
        "attention_bias": bool(config.get("attention_bias")),
        "use_qk_norm": bool(config.get("use_qk_norm")),
    }


def _latent(config: Mapping[str, Any], sizes: Mapping[str, int]) -> dict[str, Any]:  # noqa: ARG001 - as `_grouped`
    ranks: dict[str, Any] = {name: integer(config, name) for name in _LATENT}
    q_rank = config.get("q_lora_rank")
    ranks["q_lora_rank"] = None if q_rank is None else integer(config, "q_lora_rank")
    return {"grouped": False, **ranks, "rope_interleave": bool(_given(config).get("rope_interleave", True))}


def _rope(config: Mapping[str, Any], *, grouped: bool) -> dict[str, Any]:
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    fields: dict[str, Any] = {
        "rope_type": str(kind).removeprefix("deepseek_"),  # vLLM renames DeepSeek's YaRN once it has built the layer
        "rope_theta": float(config.get("rope_theta") or rope.get("rope_theta") or 1e4),
    }
    if kind != "default":
        fields |= {name: float(rope.get(name) or default) for name, default in _YARN.items()}
    if grouped:
        share = config.get("partial_rotary_factor") or rope.get("partial_rotary_factor")
        fields["partial_rotary_factor"] = float(share or 0.5)  # the family's default
    return fields


def _experts(config: Mapping[str, Any]) -> dict[str, Any]:
    if not config.get("n_routed_experts"):
        return {"n_routed_experts": 0}
    given = _given(config)
    return {
        "n_routed_experts": integer(config, "n_routed_experts"),
        **{name: integer(config, name) for name in _EXPERTS},
        **{name: given.get(name, default) for name, default in _EXPERTS_BY_DEFAULT.items()},
    }


def _switches(config: Mapping[str, Any], *, grouped: bool) -> dict[str, bool]:
    """How the module was trained to be fed; where the config does not say, it is vLLM's own."""
    own = config.get("draftalign")
    own = own if isinstance(own, Mapping) else {}
    return {
        "zero_first_embedding": bool(own.get("zero_first_embedding", True)),
        "normed_feedback": bool(own.get("normed_feedback", not grouped)),
    }
