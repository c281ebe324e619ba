"""What an MTP module's files must say, as `rl_hooks.format.eagle3` does for an EAGLE-3 drafter.

The names are DeepSeek-V3's: `model.layers.{N}.*` beside a config.json that transformers knows.

Legend: H hidden, N heads, hd width of a head.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

from rl_hooks.format.eagle3 import (
    UNTRAINED,
    CheckpointError,
    DrafterError,
    Found,
    check_parameters,
    compare,
    count,
    number,
    rope_fields,
    rope_theta,
)

#: Copies of the policy's own that published checkpoints carry in this layer, and what they are copies of.
COPIES: Final[Mapping[str, str]] = {"embed_tokens.weight": "embed_tokens", "shared_head.head.weight": "head"}
#: What engines do differently, in config.json under `draftalign`.
_SWITCHES: Final = ("zero_first_embedding", "normed_feedback")
#: Most parameters of one module: that of Kimi K2 has some 17 billion.
_MAX_PARAMETERS: Final = 1 << 35
_MAX_EXPERTS: Final = 4096
#: Figure of a config -> the least and the most that is taken: far outside what any policy has (routed_scaling_factor 1
#: to 16, YaRN's factor up to 128, rotations 1 and 32, mscale up to 1), far inside where float32 or the ramp overflows.
_BOUNDS: Final[Mapping[str, tuple[float, float]]] = {
    "routed_scaling_factor": (0.0, 1024.0),
    "factor": (1.0, 1 << 20),
    "beta_fast": (1e-3, 1e6),
    "beta_slow": (1e-3, 1e6),
    "mscale": (0.0, 128.0),
    "mscale_all_dim": (0.0, 128.0),
}


def _check_bounds(**figures: float) -> None:
    """Raise `DrafterError` for a figure with which every state would be NaN."""
    for name, value in figures.items():
        least, most = _BOUNDS[name]
        if not least <= value <= most:
            raise DrafterError(f"{name} must be {least:g} to {most:g}, got {value!r}")


@dataclass(frozen=True)
class Yarn:
    """YaRN's stretching of rotary positions (arXiv 2309.00071), with DeepSeek's two mscale figures."""

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0  # 0: absent
    mscale_all_dim: float = 0.0

    def __post_init__(self) -> None:
        _check_bounds(**{name: value for name, value in asdict(self).items() if name in _BOUNDS})

    def magnitude(self, mscale: float) -> float:
        """0.1 mscale ln(factor) + 1."""
        return 1.0 if self.factor <= 1 else 0.1 * mscale * math.log(self.factor) + 1.0

    @property
    def rotary_scale(self) -> float:
        """What cos and sin are multiplied by."""
        if self.mscale and self.mscale_all_dim:
            return self.magnitude(self.mscale) / self.magnitude(self.mscale_all_dim)
        return self.magnitude(1.0)

    @property
    def softmax_scale(self) -> float:
        """What attention scores are multiplied by, beside 1/sqrt(hd)."""
        return self.magnitude(self.mscale_all_dim) ** 2 if self.mscale_all_dim else 1.0


@dataclass(frozen=True)
class LatentSizes:
    """Sizes of the attention."""

    hidden_size: int
    heads: int
    kv_rank: int
    nope: int
    rope: int
    value: int
    q_rank: int | None = None  # None: one q_proj
    rope_theta: float = 10_000.0
    interleaved: bool = True  # rotary pairs are (0, 1), (2, 3), ...; else half-split
    yarn: Yarn | None = None

    def __post_init__(self) -> None:
        if self.rope % 2 or self.value > self.width:
            raise DrafterError(
                f"qk_rope_head_dim must be even and v_head_dim at most qk_nope_head_dim + qk_rope_head_dim, got "
                f"{self.rope}, {self.value} and {self.width}"
            )
        if self.yarn is not None and self.rope_theta <= 1:  # its ramp divides by log(rope_theta)
            raise DrafterError(f"YaRN needs a rope_theta above 1, got {self.rope_theta!r}")

    @property
    def width(self) -> int:
        """hd: a query's and key's width per head."""
        return self.nope + self.rope


@dataclass(frozen=True)
class GroupedSizes:
    """Sizes of the attention. The first `rotary` of a head's dimensions turn with the position."""

    hidden_size: int
    heads: int
    kv_heads: int
    head_dim: int
    rotary: int
    bias: bool = False
    head_norms: bool = False
    rope_theta: float = 10_000.0

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads or self.rotary % 2 or self.rotary > self.head_dim:
            raise DrafterError(
                f"heads must be a multiple of key-value heads and the rotary part an even number of a head's "
                f"{self.head_dim} dimensions, got {self.heads}, {self.kv_heads} and {self.rotary}"
            )


@dataclass(frozen=True)
class ExpertSizes:
    """How many experts there are, how large, and how they are chosen."""

    routed: int
    chosen: int
    shared: int
    intermediate_size: int
    groups: int = 1
    chosen_groups: int = 1
    normalised: bool = True
    scaling: float = 1.0

    def __post_init__(self) -> None:
        _check_bounds(routed_scaling_factor=self.scaling)
        if self.routed > _MAX_EXPERTS:
            raise DrafterError(f"n_routed_experts must be at most {_MAX_EXPERTS}, got {self.routed}")
        per_group = self.routed // max(self.groups, 1)
        if (
            self.groups < 1
            or self.routed % self.groups
            or per_group < 2
            or not 1 <= self.chosen_groups <= self.groups
            or not 1 <= self.chosen <= per_group * self.chosen_groups
        ):
            raise DrafterError(
                f"{self.routed} experts in {self.groups} groups cannot give {self.chosen} experts of "
                f"{self.chosen_groups} groups; each group needs two experts or more, and equally many"
            )


@dataclass(frozen=True)
class MtpConfig:
    """Sizes of an MTP module. `layer` is its number in the policy's checkpoint: the count of ordinary layers."""

    layer: int
    hidden_size: int
    vocab_size: int
    attention: LatentSizes | GroupedSizes
    experts: ExpertSizes | None  # None: a dense layer
    intermediate_size: int
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 4096
    model_type: str = "deepseek_v3"
    zero_first_embedding: bool = True  # as vLLM does; transformers does not
    normed_feedback: bool = True  # a step is fed norm(pre), else `pre` itself
    kind: str = "mtp"

    def __post_init__(self) -> None:
        check_parameters(mtp_shapes(self), _MAX_PARAMETERS)

    def identity(self) -> dict[str, Any]:
        """Every field as JSON gives it back, to compare with a stored one."""
        return asdict(self)

    @classmethod
    def from_target(
        cls, config: Mapping[str, Any], *, zero_first_embedding: bool = True, normed_feedback: bool | None = None
    ) -> MtpConfig:
        """Read a transformers config. Raises `DrafterError` naming what it lacks or has too much.

        The two switches are the serving engine's; by default vLLM's, which feeds back the normed state for DeepSeek's
        modules and the un-normed one for GLM's.
        """
        grouped = config.get("model_type") in _GROUPED
        needed = [
            *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size"),
            *(() if grouped else ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")),
        ]
        missing = [name for name in needed if config.get(name) is None]
        if missing:
            raise DrafterError(
                f"an MTP drafter needs a config of DeepSeek-V3's or GLM-4.5's kind; this one "
                f"({config.get('model_type')!r}) lacks {', '.join(missing)}. {_instead(config)}"
            )
        if config.get("hidden_act", "silu") != "silu":
            raise DrafterError(f"an MTP drafter's activation must be silu, got {config['hidden_act']!r}")
        _refuse_other_modules(config)
        return cls(
            layer=count(config, "num_hidden_layers"),
            hidden_size=count(config, "hidden_size"),
            vocab_size=count(config, "vocab_size"),
            attention=_grouped(config) if grouped else _latent(config),
            experts=_experts(config),
            intermediate_size=count(config, "intermediate_size"),
            rms_norm_eps=number(config, "rms_norm_eps", 1e-6),
            max_position_embeddings=count(config, "max_position_embeddings", 4096),
            model_type=str(config.get("model_type") or "deepseek_v3"),
            zero_first_embedding=zero_first_embedding,
            normed_feedback=not grouped if normed_feedback is None else normed_feedback,
        )


#: Policies whose MTP layer has grouped attention under DeepSeek-V3's names.
_GROUPED: Final = ("glm4_moe",)


def _refuse_other_modules(config: Mapping[str, Any]) -> None:
    """Refuse, by name, what is not one module of full attention."""
    for name in ("num_nextn_predict_layers", "num_mtp_layers"):  # the second is transformers' alias
        modules = config.get(name)
        if modules is not None and (type(modules) is not int or modules != 1):
            raise DrafterError(
                f"an MTP drafter is one module, applied again for every step; {name} is {modules!r}. {_instead(config)}"
            )
    if config.get("index_topk"):
        raise DrafterError(
            f"sparse attention by an indexer (index_topk {config['index_topk']!r}) is not supported: an MTP drafter "
            f"attends to every token. {_instead(config)}"
        )


def _instead(config: Mapping[str, Any]) -> str:
    """What to do with a policy whose own module is not trained here."""
    if config.get("hc_mult") is None:
        return "Train an EAGLE-3 drafter instead"
    return (
        f"Nor does an EAGLE-3 drafter fit it: it has {config['hc_mult']!r} residual streams (hc_mult), and a drafter "
        f"reads one. {UNTRAINED}"
    )


def _latent(config: Mapping[str, Any]) -> LatentSizes:
    if config.get("attention_bias"):
        raise DrafterError("latent attention with biases (attention_bias) is not supported")
    theta, yarn = _rope(config)
    return LatentSizes(
        hidden_size=count(config, "hidden_size"),
        heads=count(config, "num_attention_heads"),
        kv_rank=count(config, "kv_lora_rank"),
        nope=count(config, "qk_nope_head_dim"),
        rope=count(config, "qk_rope_head_dim"),
        value=count(config, "v_head_dim"),
        q_rank=None if config.get("q_lora_rank") is None else count(config, "q_lora_rank"),
        rope_theta=theta,
        interleaved=bool(config.get("rope_interleave", True)),
        yarn=yarn,
    )


def _grouped(config: Mapping[str, Any]) -> GroupedSizes:
    theta, yarn = _rope(config)
    if yarn is not None:
        raise DrafterError("grouped attention with YaRN is not supported")
    heads = count(config, "num_attention_heads")
    width = count(config, "head_dim", count(config, "hidden_size") // heads or None)
    share = number(config.get("rope_parameters") or {}, "partial_rotary_factor", 0.5)  # the family's default
    return GroupedSizes(
        hidden_size=count(config, "hidden_size"),
        heads=heads,
        kv_heads=count(config, "num_key_value_heads", heads),
        head_dim=width,
        rotary=int(width * number(config, "partial_rotary_factor", share)),
        bias=bool(config.get("attention_bias")),
        head_norms=bool(config.get("use_qk_norm")),
        rope_theta=theta,
    )


def _rope(config: Mapping[str, Any]) -> tuple[float, Yarn | None]:
    rope = rope_fields(config)
    theta = rope_theta(config, rope)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind != "yarn" or rope.get("factor") is None or rope.get("attention_factor") is not None:
        raise DrafterError(f"rotary positions must be default or YaRN with a factor, got {dict(rope)}")
    whole = count(config, "max_position_embeddings", 4096)
    yarn = Yarn(
        factor=number(rope, "factor"),
        original_max_position_embeddings=count(rope, "original_max_position_embeddings", whole),
        beta_fast=number(rope, "beta_fast", 32.0),
        beta_slow=number(rope, "beta_slow", 1.0),
        mscale=number(rope, "mscale", 0.0),
        mscale_all_dim=number(rope, "mscale_all_dim", 0.0),
    )
    # Where a figure is absent, vLLM takes mscale for 1 and mscale_all_dim for 0; transformers reads neither.
    served = yarn.magnitude(1.0 if rope.get("mscale") is None else yarn.mscale) / yarn.magnitude(yarn.mscale_all_dim)
    if not math.isclose(served, yarn.rotary_scale):
        raise DrafterError(
            f"YaRN with mscale {rope.get('mscale')!r} and mscale_all_dim {rope.get('mscale_all_dim')!r} scales cos and "
            f"sin by {served:.4g} in vLLM and by {yarn.rotary_scale:.4g} in transformers; give both figures or neither"
        )
    return theta, yarn


def _experts(config: Mapping[str, Any]) -> ExpertSizes | None:
    if not config.get("n_routed_experts"):
        return None
    if config.get("scoring_func", "sigmoid") != "sigmoid" or config.get("topk_method", "noaux_tc") != "noaux_tc":
        raise DrafterError(
            f"experts must be chosen as DeepSeek-V3 chooses them (sigmoid, noaux_tc), got "
            f"{config.get('scoring_func')!r} and {config.get('topk_method')!r}"
        )
    # vLLM decides by the layer's number, as for any other layer; transformers and SGLang give a module experts always.
    layer, every = count(config, "num_hidden_layers"), count(config, "moe_layer_freq", 1)
    first = count(config, "first_k_dense_replace", 0)
    if layer < first or layer % every:
        raise DrafterError(
            f"the MTP module, layer {layer}, is dense to vLLM by first_k_dense_replace {first} and moe_layer_freq "
            f"{every}, and has {config['n_routed_experts']!r} experts to transformers. Set n_routed_experts to 0 if "
            "its tensors are a dense layer's, first_k_dense_replace to 0 and moe_layer_freq to 1 if they are experts'"
        )
    return ExpertSizes(
        routed=count(config, "n_routed_experts"),
        chosen=count(config, "num_experts_per_tok"),
        shared=count(config, "n_shared_experts", 0),
        intermediate_size=count(config, "moe_intermediate_size"),
        groups=count(config, "n_group", 1),
        chosen_groups=count(config, "topk_group", 1),
        normalised=bool(config.get("norm_topk_prob", True)),
        scaling=number(config, "routed_scaling_factor", 1.0),
    )


def prefix(config: MtpConfig) -> str:
    """Where the module's tensors are in the policy's checkpoint."""
    return f"model.layers.{config.layer}."


def parse_mtp_config(document: Mapping[str, Any]) -> MtpConfig:
    """Read what `export_mtp_config` wrote, or a policy's own config.json. Raises `CheckpointError`."""
    own = document.get("draftalign") or {}
    switches = {k: own[k] for k in _SWITCHES if k in own} if isinstance(own, Mapping) else {"draftalign": own}
    if not all(isinstance(value, bool) for value in switches.values()):
        raise CheckpointError(f"config.json: {' and '.join(_SWITCHES)} must be true or false, got {own!r}")
    try:
        return MtpConfig.from_target(document, **switches)
    except (DrafterError, TypeError, ValueError, OverflowError) as error:
        raise CheckpointError(f"config.json: {error}") from error


def mtp_shapes(config: MtpConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of a module, without its prefix. Copies of the policy's own are not among them."""
    H = config.hidden_size
    return {
        "enorm.weight": (H,),
        "hnorm.weight": (H,),
        "eh_proj.weight": (H, 2 * H),
        "input_layernorm.weight": (H,),
        **{f"self_attn.{name}": shape for name, shape in _attention_shapes(config.attention).items()},
        "post_attention_layernorm.weight": (H,),
        **{f"mlp.{name}": shape for name, shape in _mlp_shapes(config).items()},
        "shared_head.norm.weight": (H,),
    }


def _attention_shapes(sizes: LatentSizes | GroupedSizes) -> dict[str, tuple[int, ...]]:
    H, N = sizes.hidden_size, sizes.heads
    if isinstance(sizes, GroupedSizes):
        hd = sizes.head_dim
        rows = {"q_proj": N * hd, "k_proj": sizes.kv_heads * hd, "v_proj": sizes.kv_heads * hd}
        return {
            **{f"{name}.weight": (size, H) for name, size in rows.items()},
            **({f"{name}.bias": (size,) for name, size in rows.items()} if sizes.bias else {}),
            "o_proj.weight": (H, N * hd),
            **({"q_norm.weight": (hd,), "k_norm.weight": (hd,)} if sizes.head_norms else {}),
        }
    queries: dict[str, tuple[int, ...]] = {"q_proj.weight": (N * sizes.width, H)}
    if sizes.q_rank is not None:
        queries = {
            "q_a_proj.weight": (sizes.q_rank, H),
            "q_a_layernorm.weight": (sizes.q_rank,),
            "q_b_proj.weight": (N * sizes.width, sizes.q_rank),
        }
    return queries | {
        "kv_a_proj_with_mqa.weight": (sizes.kv_rank + sizes.rope, H),
        "kv_a_layernorm.weight": (sizes.kv_rank,),
        "kv_b_proj.weight": (N * (sizes.nope + sizes.value), sizes.kv_rank),
        "o_proj.weight": (H, N * sizes.value),
    }


def _mlp_shapes(config: MtpConfig) -> dict[str, tuple[int, ...]]:
    H, experts = config.hidden_size, config.experts

    def swiglu(where: str, width: int) -> dict[str, tuple[int, ...]]:
        outward = {f"{where}{name}_proj.weight": (width, H) for name in ("gate", "up")}
        return {**outward, f"{where}down_proj.weight": (H, width)}

    if experts is None:
        return swiglu("", config.intermediate_size)
    shapes: dict[str, tuple[int, ...]] = {
        "gate.weight": (experts.routed, H),
        "gate.e_score_correction_bias": (experts.routed,),
    }
    for expert in range(experts.routed):
        shapes |= swiglu(f"experts.{expert}.", experts.intermediate_size)
    if experts.shared:
        shapes |= swiglu("shared_experts.", experts.shared * experts.intermediate_size)
    return shapes


def check_mtp_header(found: Found, config: MtpConfig) -> None:
    """Raise `CheckpointError` unless a module's tensors, prefix and copies removed, are those of the config."""
    compare(found, mtp_shapes(config), "Scales of 8-bit weights mean that they have to be dequantised first")


def of_module(tensors: Iterable[str], config: MtpConfig) -> dict[str, str]:
    """Those of a checkpoint's tensors that are the module's own: name without prefix -> name. Copies are left out."""
    where = prefix(config)
    mine = {name.removeprefix(where): name for name in tensors if name.startswith(where)}
    return {short: name for short, name in mine.items() if short not in COPIES}
