"""Whether engines emit what the policy would: a test on the tokens alone, without asking the engine.

Rejection sampling is lossless: whatever the drafter proposes, token t is drawn from the policy's p_t. So with q_t, the
drafter's law of that token, fixed before it is drawn, and p_t taken on the draft vocabulary alone, where the token is
in it, the differences

    q_t(x_t) - sum_v p_t(v) q_t(v)

have mean 0 and variance sum_v p_t(v) (q_t(v) - sum_u p_t(u) q_t(u))^2 each, whatever came before (a martingale). An
engine that accepts drafts too freely, or draws a rejected token from p instead of from what p has over q, emits what
the drafter proposes more often than that. One whose sampling is colder does so too, unless it sends log-probabilities
of that law (see below). p and q are of the temperature that the tokens were drawn at. Tokens outside the draft
vocabulary are left out: p on the vocabulary alone needs no normaliser of the whole head, and so no head that is exactly
of the policy's version. Where an offset of 0.002 nats of the normaliser tilted p by a fifth, it cancels.

Of asynchronous rollouts other weights drew the tokens than the features are of: the law of a token is some s_t, whose
log-probability the sampler sent. So each difference is weighted by w = p_t(x_t) / s_t(x_t), which makes its mean 0
again: sum_v s_t(v) w(v) f(v) = sum_v p_t(v) f(v). Its variance is sum_v p_t(v) w(v) (q_t(v) - ...)^2, of which
w (w - 1) (q_t(x_t) - ...)^2 beside the variance above is an estimate without bias. Where p is the sampler's law w is 1.
An engine that verifies wrongly reports what it verified by and not what it emits, so weights do not hide it. They do
hide another temperature whose log-probabilities it sends: the gap between those and the features' is what shows it.

Legend: T tokens, U rows that are looked at, D draft vocabulary.
"""

from __future__ import annotations

import math
from functools import partial
from typing import NamedTuple

import torch

from drafter.batch import Fill, RolloutBatch, fill_alone
from drafter.device import working_dtype
from drafter.model.draft_model import DraftModel
from drafter.model.matmul import times_wide
from drafter.model.pointwise import rms_norm
from drafter.policy import Policy, TargetHead

#: Of longer batches, some rollouts are looked at; several ranks share pieces of them out.
_TOKENS = 8192
_TOKENS_AT_ONCE = 2048
_LOGITS_ELEMENTS = 1 << 24
_LOGITS_ELEMENTS_ON_CPU = 1 << 20  # nearer its caches
#: A token's weight at most: one log-probability that makes no sense must not outweigh all other tokens.
_MOST_WEIGHT = 10.0


class Excess(NamedTuple):
    """How often tokens were what the drafter proposes; all are sums over tokens."""

    excess: float  # of q(x) over its mean under the policy
    variance: float  # of `excess` under the policy
    tokens: int


@torch.no_grad()
def drafters_favour(drafter: DraftModel, batch: RolloutBatch, policy: Policy, fill: Fill = fill_alone) -> Excess | None:
    """Compare with what the policy would have drawn; None where its law is not known.

    That is so without its head, and where sampling was truncated (top-p, top-k) or greedy.
    """
    if policy.head is None or batch.warped or batch.temperature == 0:
        return None
    lengths, groups, tokens = batch.cu_seqlens.diff().tolist(), list[list[int]](), 0
    for place in batch.places_of_some(_TOKENS):
        if not groups or tokens + lengths[place] > _TOKENS_AT_ONCE:
            groups, tokens = [*groups, []], 0
        groups[-1].append(place)
        tokens += lengths[place]
    head = policy.head
    table = torch.zeros(len(groups), len(Excess._fields), dtype=torch.float64)

    def compute(row: int, group: list[int]) -> None:
        table[row] = torch.tensor(_excess(drafter, batch.select(group), policy, head), dtype=torch.float64)

    excess, variance, seen = fill(table, [partial(compute, *part) for part in enumerate(groups)]).sum(0).tolist()
    if not (math.isfinite(excess) and math.isfinite(variance)) or not seen:
        return None
    return Excess(excess, variance, int(seen))


def _excess(drafter: DraftModel, batch: RolloutBatch, policy: Policy, policy_head: TargetHead) -> Excess:
    device = next(drafter.parameters()).device
    dtype = working_dtype(device)
    head = policy_head.rows(drafter.vocabulary, device, dtype or torch.float32)  # [D, Ht]
    batch = batch.to(device)
    plan = drafter.plan(batch, 1).to(device)
    unrolled = drafter.unroll(plan, batch, policy, dtype=dtype)
    rows, pre = unrolled.rows[0], unrolled.pre[0]  # [U]: row t proposes x[t + 2], drawn by the policy's state at t + 1
    drafted = batch.loss_mask[rows + 1]  # the first token that is generated is drawn without a draft, perhaps as no end
    rows, pre = rows[drafted], pre[drafted]
    proposed = drafter.vocabulary.to_draft.to(device)[batch.input_ids[rows + 2]]  # [U], -1 outside the vocabulary
    rows, pre, proposed = rows[proposed >= 0], pre[proposed >= 0], proposed[proposed >= 0]
    sums = torch.zeros(2, dtype=torch.float64, device=device)
    chunk = max(1, (_LOGITS_ELEMENTS if device.type == "cuda" else _LOGITS_ELEMENTS_ON_CPU) // len(head))
    for begin in range(0, len(rows), chunk):
        part = slice(begin, begin + chunk)
        normed = rms_norm(pre[part], unrolled.weights.norm, drafter.config.rms_norm_eps)
        q = (times_wide(normed, unrolled.weights.lm_head).float() / batch.divisor).softmax(-1)  # [u, D]
        states = batch.last_rows(rows[part] + 1).to(head.dtype)
        logits = policy_head.logit_map.apply(times_wide(states, head).float())
        p = (logits / batch.divisor).softmax(-1)
        mean = (p * q).sum(-1, keepdim=True)
        known = proposed[part, None]
        own = logits.gather(1, known)[:, 0] / batch.divisor - batch.logsumexp[rows[part] + 1]
        weight = (own - batch.logprobs[rows[part] + 2]).exp().clamp(max=_MOST_WEIGHT)
        off = (q.gather(1, known) - mean)[:, 0]
        excess = weight * off
        variance = (p * (q - mean) ** 2).sum(-1) + weight * (weight - 1.0) * off**2
        sums += torch.stack([excess.double().sum(), variance.double().sum()])
    total, spread = sums.tolist()
    return Excess(total, spread, len(rows))
