"""A native multi-token-prediction head as a drafter: one module, applied again and again.

The layout is DeepSeek-V3's, with its own latent attention or, as in GLM-4.5, a grouped one.

    e   = embed(token), zero at the document's first row, as vLLM reads it
    h   = eh_proj(cat(enorm(e), hnorm(r)))          r: the target's last_hidden; later steps: norm(pre)
    h1  = h + attention(input_layernorm(h));   pre = h1 + mlp(post_attention_layernorm(h1))
    q   = softmax(head(norm(pre)))                  over the whole vocabulary, `norm` is shared_head.norm

Embedding and head are the policy's own: frozen here, shared live by engines, never exported. Rows, steps, keys and
positions are those of `drafter.unroll`, so plan, loss, trainer and replay serve both kinds of drafter.

Legend: H hidden, V vocabulary, n rows of a step, N heads, hd width of a query.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 - its name everywhere
from torch import Tensor, nn

from drafter.attention import attend, gather_keys
from drafter.errors import DrafterError
from drafter.experts import Cast, Experts, ExpertSizes, SwiGLU
from drafter.grouped_attention import GroupedAttention, GroupedSizes
from drafter.latent_attention import LatentAttention, LatentSizes, Yarn
from drafter.plan import Plan
from drafter.pointwise import rms_norm, take_rows
from drafter.unroll import Unrolled
from drafter.vocabulary import DraftVocabulary


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
                f"({config.get('model_type')!r}) lacks {', '.join(missing)}. Train an EAGLE-3 drafter instead"
            )
        if config.get("hidden_act", "silu") != "silu":
            raise DrafterError(f"an MTP drafter's activation must be silu, got {config['hidden_act']!r}")
        _refuse_other_modules(config)
        return cls(
            layer=_count(config, "num_hidden_layers"),
            hidden_size=_count(config, "hidden_size"),
            vocab_size=_count(config, "vocab_size"),
            attention=_grouped(config) if grouped else _latent(config),
            experts=_experts(config),
            intermediate_size=_count(config, "intermediate_size"),
            rms_norm_eps=_number(config, "rms_norm_eps", 1e-6),
            max_position_embeddings=_count(config, "max_position_embeddings", 4096),
            model_type=str(config.get("model_type") or "deepseek_v3"),
            zero_first_embedding=zero_first_embedding,
            normed_feedback=not grouped if normed_feedback is None else normed_feedback,
        )


#: Policies whose MTP layer has grouped attention under DeepSeek-V3's names.
_GROUPED: Final = ("glm4_moe",)
_MAX_SIZE: Final = 1 << 24  # of anything that a config counts


def _count(config: Mapping[str, Any], name: str, default: int | None = None) -> int:
    """A positive integer, or the default where there is one: for zero, null and absence."""
    value = config.get(name) or default
    if type(value) is not int or not (0 < value <= _MAX_SIZE or value == default):
        raise DrafterError(f"{name} must be a positive integer up to {_MAX_SIZE}, got {config.get(name)!r}")
    return value


def _number(config: Mapping[str, Any], name: str, default: float | None = None) -> float:
    """A positive number, or the default where there is one: for zero, null and absence."""
    value: Any = config.get(name) or default
    if type(value) not in (int, float) or not (0 < value <= sys.float_info.max or value == default):
        raise DrafterError(f"{name} must be a positive number, got {config.get(name)!r}")
    return float(value)


def _refuse_other_modules(config: Mapping[str, Any]) -> None:
    """Refuse, by name, what is not one module of full attention."""
    for name in ("num_nextn_predict_layers", "num_mtp_layers"):  # the second is transformers' alias
        modules = config.get(name)
        if modules is not None and (type(modules) is not int or modules != 1):
            raise DrafterError(
                f"an MTP drafter is one module, applied again for every step; {name} is {modules!r}. Train an EAGLE-3 "
                "drafter instead"
            )
    if config.get("index_topk"):
        raise DrafterError(
            f"sparse attention by an indexer (index_topk {config['index_topk']!r}) is not supported: an MTP drafter "
            "attends to every token. Train an EAGLE-3 drafter instead"
        )


def _latent(config: Mapping[str, Any]) -> LatentSizes:
    if config.get("attention_bias"):
        raise DrafterError("latent attention with biases (attention_bias) is not supported")
    theta, yarn = _rope(config)
    return LatentSizes(
        hidden_size=_count(config, "hidden_size"),
        heads=_count(config, "num_attention_heads"),
        kv_rank=_count(config, "kv_lora_rank"),
        nope=_count(config, "qk_nope_head_dim"),
        rope=_count(config, "qk_rope_head_dim"),
        value=_count(config, "v_head_dim"),
        q_rank=None if config.get("q_lora_rank") is None else _count(config, "q_lora_rank"),
        rope_theta=theta,
        interleaved=bool(config.get("rope_interleave", True)),
        yarn=yarn,
    )


def _grouped(config: Mapping[str, Any]) -> GroupedSizes:
    theta, yarn = _rope(config)
    if yarn is not None:
        raise DrafterError("grouped attention with YaRN is not supported")
    heads = _count(config, "num_attention_heads")
    width = _count(config, "head_dim", _count(config, "hidden_size") // heads or None)
    share = _number(config.get("rope_parameters") or {}, "partial_rotary_factor", 0.5)  # the family's default
    return GroupedSizes(
        hidden_size=_count(config, "hidden_size"),
        heads=heads,
        kv_heads=_count(config, "num_key_value_heads", heads),
        head_dim=width,
        rotary=int(width * _number(config, "partial_rotary_factor", share)),
        bias=bool(config.get("attention_bias")),
        head_norms=bool(config.get("use_qk_norm")),
        rope_theta=theta,
    )


def _rope(config: Mapping[str, Any]) -> tuple[float, Yarn | None]:
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(rope, Mapping):
        raise DrafterError(f"rope_parameters must be an object, got {rope!r}")
    theta = _number(config, "rope_theta", _number(rope, "rope_theta", 10_000.0))
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind != "yarn" or rope.get("factor") is None or rope.get("attention_factor") is not None:
        raise DrafterError(f"rotary positions must be default or YaRN with a factor, got {dict(rope)}")
    whole = _count(config, "max_position_embeddings", 4096)
    return theta, Yarn(
        factor=_number(rope, "factor"),
        original_max_position_embeddings=_count(rope, "original_max_position_embeddings", whole),
        beta_fast=_number(rope, "beta_fast", 32.0),
        beta_slow=_number(rope, "beta_slow", 1.0),
        mscale=_number(rope, "mscale", 0.0),
        mscale_all_dim=_number(rope, "mscale_all_dim", 0.0),
    )


def _experts(config: Mapping[str, Any]) -> ExpertSizes | None:
    if not config.get("n_routed_experts"):
        return None
    if config.get("scoring_func", "sigmoid") != "sigmoid" or config.get("topk_method", "noaux_tc") != "noaux_tc":
        raise DrafterError(
            f"experts must be chosen as DeepSeek-V3 chooses them (sigmoid, noaux_tc), got "
            f"{config.get('scoring_func')!r} and {config.get('topk_method')!r}"
        )
    # vLLM decides by the layer's number, as for any other layer; transformers and SGLang give a module experts always.
    layer, every = _count(config, "num_hidden_layers"), _count(config, "moe_layer_freq", 1)
    first = _count(config, "first_k_dense_replace", 0)
    if layer < first or layer % every:
        raise DrafterError(
            f"the MTP module, layer {layer}, is dense to vLLM by first_k_dense_replace {first} and moe_layer_freq "
            f"{every}, and has {config['n_routed_experts']!r} experts to transformers. Set n_routed_experts to 0 if "
            "its tensors are a dense layer's, first_k_dense_replace to 0 and moe_layer_freq to 1 if they are experts'"
        )
    return ExpertSizes(
        routed=_count(config, "n_routed_experts"),
        chosen=_count(config, "num_experts_per_tok"),
        shared=_count(config, "n_shared_experts", 0),
        intermediate_size=_count(config, "moe_intermediate_size"),
        groups=_count(config, "n_group", 1),
        chosen_groups=_count(config, "topk_group", 1),
        normalised=bool(config.get("norm_topk_prob", True)),
        scaling=_number(config, "routed_scaling_factor", 1.0),
    )


class MtpWeights(NamedTuple):
    """The module's weights in the dtype to compute in."""

    enorm: Tensor  # [H]
    hnorm: Tensor  # [H]
    eh: Tensor  # [H, 2H], columns: embedding half, then hidden half
    input_norm: Tensor  # [H]
    attention: Any  # LatentWeights or GroupedWeights: of the attention itself
    post_norm: Tensor  # [H]
    norm: Tensor  # [H], shared_head.norm
    lm_head: Tensor  # [V, H], the policy's
    experts: Cast  # of the feed-forward part, as they are used


class _SharedHead(nn.Module):
    """Only its norm is the module's own."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(size, eps)


class MtpDrafter(nn.Module):
    """The MTP module of one policy. `embed_tokens` and `head` [V, H] are the policy's: set them anew as they move."""

    embed_tokens: Tensor
    head: Tensor

    def __init__(self, config: MtpConfig, embed_tokens: Tensor, head: Tensor) -> None:
        super().__init__()
        for name, tensor in (("embed_tokens", embed_tokens), ("head", head)):
            if tuple(tensor.shape) != (config.vocab_size, config.hidden_size):
                raise DrafterError(
                    f"{name} must be {(config.vocab_size, config.hidden_size)}, got {tuple(tensor.shape)}"
                )
        size, eps = config.hidden_size, config.rms_norm_eps
        self.config = config
        with torch.device("cpu"):  # also where the module is only built for its shapes
            self.vocabulary = DraftVocabulary.full(config.vocab_size)
        self.enorm = nn.RMSNorm(size, eps)
        self.hnorm = nn.RMSNorm(size, eps)
        self.eh_proj = nn.Linear(2 * size, size, bias=False)
        self.input_layernorm = nn.RMSNorm(size, eps)
        self.self_attn = (
            LatentAttention(config.attention, eps)
            if isinstance(config.attention, LatentSizes)
            else GroupedAttention(config.attention, eps)
        )
        self.post_attention_layernorm = nn.RMSNorm(size, eps)
        self.mlp = SwiGLU(size, config.intermediate_size) if config.experts is None else Experts(size, config.experts)
        self.shared_head = _SharedHead(size, eps)
        self.register_buffer("embed_tokens", embed_tokens.detach(), persistent=False)
        self.register_buffer("head", head.detach(), persistent=False)
        for parameter in self.parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.02)

    def weights(self, dtype: torch.dtype | None = None) -> MtpWeights:
        """Weights in `dtype` (default: as stored), cast once for many uses; gradients flow to all but the head."""
        cast = dtype or self.eh_proj.weight.dtype
        return MtpWeights(
            enorm=self.enorm.weight.to(cast),
            hnorm=self.hnorm.weight.to(cast),
            eh=self.eh_proj.weight.to(cast),
            input_norm=self.input_layernorm.weight.to(cast),
            attention=self.self_attn.weights(cast),
            post_norm=self.post_attention_layernorm.weight.to(cast),
            norm=self.shared_head.norm.weight.to(cast),
            lm_head=self.head.to(cast),
            experts=Cast(cast),
        )

    def to_target(self, draft_ids: Tensor) -> Tensor:
        """Target token ids of draft ids: the same, as nothing is left out of the vocabulary."""
        return draft_ids

    def finish(self, h: Tensor, attended: Tensor, weights: MtpWeights) -> Tensor:
        """Compute `pre` [n, H] from the layer's input h [n, H] and the kernel's output [n, N, hd]."""
        h1 = h + self.self_attn.merge(attended, weights.attention)
        fed: Tensor = self.mlp(rms_norm(h1, weights.post_norm, self.config.rms_norm_eps), weights.experts)
        return h1 + fed


def unroll_mtp(
    drafter: MtpDrafter,
    plan: Plan,
    input_ids: Tensor,
    last_hidden: Tensor,
    *,
    dtype: torch.dtype | None = None,
) -> Unrolled:
    """Run every step of `plan` over input_ids int64[T] and last_hidden [T, H], as `drafter.unroll.unroll` does.

    Gradients flow to all parameters but shared_head.norm, which the loss applies for the last time.
    """
    config, weights = drafter.config, drafter.weights(dtype)
    H, eps, cast, layer = config.hidden_size, config.rms_norm_eps, weights.eh.dtype, drafter.self_attn
    if input_ids.shape != (plan.tokens,) or last_hidden.shape != (plan.tokens, H):
        raise DrafterError(
            f"the plan is for {plan.tokens} tokens of hidden size {H}, got input_ids {tuple(input_ids.shape)} and "
            f"last_hidden {tuple(last_hidden.shape)}"
        )
    if not plan.computed[0]:
        empty = weights.eh.new_zeros(0, H)
        return Unrolled(plan, plan.rows, tuple(empty for _ in range(plan.steps)), weights)

    # The embedding half of eh_proj does not depend on the step: once per position, read shifted.
    tokens = input_ids.index_select(0, plan.read_rows)
    embedded = rms_norm(F.embedding(tokens, drafter.embed_tokens).to(cast), weights.enorm, eps)
    embedded = F.linear(embedded, weights.eh[:, :H])

    def enter(r: Tensor, step: int) -> Tensor:
        read = take_rows(embedded, plan.read_index[step][: r.shape[0]])
        if step == 0 and config.zero_first_embedding:
            read = read * (plan.positions != 0)[:, None].to(cast)
        return F.linear(rms_norm(r, weights.hnorm, eps), weights.eh[:, H:]) + read

    n = plan.computed[0]
    h = enter(last_hidden.index_select(0, plan.kv_rows).to(cast), 0)
    x = rms_norm(h, weights.input_norm, eps)
    keys = gather_keys(plan, *layer.keys_values(x, plan.positions, weights.attention))
    h, x = h[:n], x[:n]
    pres: list[Tensor] = []
    pre = h
    diagonal: list[tuple[Tensor, Tensor]] = []
    for step, n in enumerate(plan.computed):
        if not n:  # no response reaches this deep
            pres.append(pre[:0])
            continue
        positions = plan.positions[:n] + step
        if step:
            h = enter(rms_norm(pre[:n], weights.norm, eps) if config.normed_feedback else pre[:n], step)
            x = rms_norm(h, weights.input_norm, eps)
            diagonal = [(old_k[:n], old_v[:n]) for old_k, old_v in diagonal]
            diagonal.append(layer.keys_values(x, positions, weights.attention))
        attended = attend(plan, step, layer.queries(x, positions, weights.attention), keys, diagonal)
        pre = drafter.finish(h, attended, weights)
        chosen = plan.active[step]
        pres.append(pre if chosen is None else take_rows(pre, chosen))
    return Unrolled(plan, plan.rows, tuple(pres), weights)
