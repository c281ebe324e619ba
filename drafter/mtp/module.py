"""A native multi-token-prediction head as a drafter: one module, applied again and again.

The layout is DeepSeek-V3's, with its own latent attention or, as in GLM-4.5, a grouped one.

    e   = embed(token), zero at the document's first row, as vLLM reads it
    h   = eh_proj(cat(enorm(e), hnorm(r)))          r: the target's last_hidden; later steps: norm(pre)
    h1  = h + attention(input_layernorm(h));   pre = h1 + mlp(post_attention_layernorm(h1))
    q   = softmax(head(norm(pre)))                  over the whole vocabulary, `norm` is shared_head.norm

Embedding and head are the policy's: they come with each call, engines share the live ones, and no file of ours holds
them. Rows, steps, keys and positions are those of `drafter.model.eagle3_unroll`, so plan, loss, trainer and replay
serve both kinds of drafter.

Legend: H hidden, V vocabulary, n rows of a step, N heads, hd width of a query.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 - its name everywhere
from torch import Tensor, nn

from drafter.batch import RolloutBatch
from drafter.errors import BatchRejected, DrafterError
from drafter.model.draft_model import DraftModel
from drafter.model.pointwise import rms_norm, take_rows
from drafter.mtp.experts import Cast, Experts, SwiGLU
from drafter.mtp.grouped import GroupedAttention
from drafter.mtp.latent import LatentAttention
from drafter.policy import Policy
from drafter.unroll.attention import attend, gather_keys
from drafter.unroll.plan import Plan
from drafter.unroll.unrolled import Unrolled
from drafter.vocabulary import DraftVocabulary
from rl_hooks.format.mtp import LatentSizes, MtpConfig

__all__ = ["MtpConfig", "MtpDrafter", "MtpWeights", "unroll_mtp"]


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


class MtpDrafter(DraftModel):
    """The MTP module of one policy, whose embedding and head it drafts with."""

    kind = "mtp"
    as_stored = frozenset({"mlp.gate.weight"})
    config: MtpConfig

    def __init__(self, config: MtpConfig) -> None:
        super().__init__()
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
        for parameter in self.parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.02)

    def plan(self, batch: RolloutBatch, steps: int) -> Plan:
        """See `DraftModel.plan`. Raises `BatchRejected` too where last_hidden of the prompts was not sent."""
        if not batch.every_last_row:
            raise BatchRejected(
                f"an MTP module reads last_hidden of all {batch.tokens} tokens, these rollouts carry "
                f"those of {len(batch.last_hidden)}; send files that hold all of them"
            )
        return super().plan(batch, steps)

    def unroll(self, plan: Plan, batch: RolloutBatch, policy: Policy, *, dtype: torch.dtype | None = None) -> Unrolled:
        """Run every step of `plan` on last_hidden; see `DraftModel.unroll`. The policy must have its head."""
        embed_tokens = policy.embedding(self.config.vocab_size, self.config.hidden_size)
        weight = self.eh_proj.weight
        head = policy.needed_head().rows(self.vocabulary, weight.device, dtype or weight.dtype)
        return unroll_mtp(self, plan, batch.input_ids, batch.last_hidden, embed_tokens, head, dtype=dtype)

    def weights(self, lm_head: Tensor, dtype: torch.dtype | None = None) -> MtpWeights:
        """Weights in `dtype` (default: as stored), cast once for many uses, beside the policy's lm_head [V, H].

        Gradients flow to all but the head.
        """
        cast = dtype or self.eh_proj.weight.dtype
        return MtpWeights(
            enorm=self.enorm.weight.to(cast),
            hnorm=self.hnorm.weight.to(cast),
            eh=self.eh_proj.weight.to(cast),
            input_norm=self.input_layernorm.weight.to(cast),
            attention=self.self_attn.weights(cast),
            post_norm=self.post_attention_layernorm.weight.to(cast),
            norm=self.shared_head.norm.weight.to(cast),
            lm_head=lm_head.to(cast),
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
    embed_tokens: Tensor,
    lm_head: Tensor,
    *,
    dtype: torch.dtype | None = None,
) -> Unrolled:
    """`MtpDrafter.unroll` over input_ids int64[T], last_hidden [T, H] and the policy's embed_tokens, lm_head [V, H]."""
    config, weights = drafter.config, drafter.weights(lm_head, dtype)
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
    embedded = rms_norm(F.embedding(tokens, embed_tokens).to(cast), weights.enorm, eps)
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
