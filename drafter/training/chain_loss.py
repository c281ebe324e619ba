"""The "alpha" loss: expected acceptance length of whole chains, fused with lm_head, in chunks of rows.

A row t whose steps 0..n-1 are all supervised is one chain of n drafts. With a_j = sum_v min(p_j, q_j) the probability
that draft j is kept once it is reached, the chain is expected to keep

    L_t = sum_{j < n} prod_{i <= j} a_i         d L_t / d a_i = prod_{k < i} a_k (1 + a_{i+1} (1 + a_{i+2} (...)))

drafts, and the loss is sum_t (n - L_t) / denominator: drafts lost per response token, 0 when every draft is kept. Steps
need no weights of their own, the chain weighs them; a step beyond a gap (tool output inside the chain) is not part of
it. Greedy decoding (temperature 0) is treated like temperature 1, as everywhere.

The gradient at one step needs the acceptances of the row's other steps. So chunks walk *rows*, all steps of a row in
one chunk: its a_j are known before its gradient is formed, in the same pass, and neither [E, D] nor [T, V] is ever
held. Neighbouring chunks form the softmax of K-1 target rows twice; that is all it costs over the loss of single steps.

Legend: E entries (all steps), U target rows, D draft vocabulary, H hidden, K steps, C chains of one chunk.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - its name everywhere
from torch import Tensor

from drafter.model.draft_model import DraftModel
from drafter.model.matmul import add_times_wide, times, times_wide
from drafter.model.pointwise import rms_norm, take_rows
from drafter.training.loss import DraftLoss, acceptance_slope, chunk_size, kernels, target_of
from drafter.training.target import DraftTarget
from drafter.unroll.plan import Chains
from drafter.unroll.unrolled import Unrolled


def chain_loss(
    drafter: DraftModel,
    unrolled: Unrolled,
    target: DraftTarget,
    *,
    denominator: float,
    chunk_elements: int | None = None,
) -> DraftLoss:
    """Drafts that whole chains are expected to lose. Gradients reach `pre`, norm and, unless frozen, lm_head.

    Holds logits of at most `chunk_elements` (default: what suits the device), or of one row's K steps where those are
    more. Never waits for the device.
    """
    weights, plan = unrolled.weights, unrolled.plan
    chains = plan.chains
    ordered = take_rows(torch.cat(unrolled.pre), chains.order)
    hidden = rms_norm(ordered, weights.norm, drafter.config.rms_norm_eps)
    loss, kl_sums, acceptance_sums = _FusedChain.apply(  # type: ignore[no-untyped-call]
        hidden,
        weights.lm_head,
        target,
        chains,
        plan.steps,
        denominator,
        chunk_elements or chunk_size(hidden.device),
        torch.is_grad_enabled(),
    )
    return DraftLoss(loss, kl_sums, acceptance_sums, plan.entries)


def chain_length(a_CK: Tensor, present_CK: Tensor) -> tuple[Tensor, Tensor]:
    """Expected drafts lost [C] of chains with acceptances `a`, and its derivative by each acceptance [C, K].

    `present` says which steps are supervised; only those before the first missing one count.

    >>> lost, slope = chain_length(torch.tensor([[0.5, 0.5]]), torch.ones(1, 2, dtype=torch.bool))
    >>> lost, slope  # 2 - (0.5 + 0.25); -(1 + 0.5), -0.5
    (tensor([1.2500]), tensor([[-1.5000, -0.5000]]))
    """
    inside = present_CK.to(a_CK.dtype).cumprod(dim=1)
    a = a_CK * inside
    survived = a.cumprod(dim=1)
    before = torch.cat([torch.ones_like(a[:, :1]), survived[:, :-1]], dim=1)
    tail = torch.ones_like(a)
    for step in range(a.shape[1] - 2, -1, -1):
        tail[:, step] += a[:, step + 1] * tail[:, step + 1]
    return (inside - survived).sum(dim=1), -before * tail * inside


class _FusedChain(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        lm_head: Tensor,
        target: DraftTarget,
        chains: Chains,
        steps: int,
        denominator: float,
        chunk_elements: int,
        grad_enabled: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        wide = torch.promote_types(lm_head.dtype, torch.float32)
        want_hidden = grad_enabled and ctx.needs_input_grad[0]
        want_head = grad_enabled and ctx.needs_input_grad[1]
        grad_hidden = torch.empty_like(hidden) if want_hidden else None
        grad_head = torch.zeros_like(lm_head, dtype=wide) if want_head else None
        loss = hidden.new_zeros((), dtype=wide)
        sums = hidden.new_zeros(2, steps, dtype=wide)  # kl, acceptance
        fused = kernels(hidden)
        for begin, end in chains.chunks(max(1, chunk_elements // lm_head.shape[0])):
            entries = slice(chains.starts[begin], chains.starts[end])
            step, chain = chains.step[entries], chains.row[entries] - begin
            low, high = chains.first_target[begin], max(chains.last_target[begin:end])
            p, mass, own = target_of(target, low, high, wide)
            pick = chains.target_index[entries] - low

            h = hidden[entries]
            logits = times_wide(h, lm_head)
            if fused is not None:
                found = fused.measure(logits, p, own, pick, target.divisor)
                kl, acceptance = found.kl, found.acceptance
            else:
                p, own = p.index_select(0, pick), own.index_select(0, pick)
                q = F.log_softmax(logits.div_(target.divisor), dim=-1)
                kl = own - torch.linalg.vecdot(p, q)
                acceptance = torch.minimum(p, q.exp_()).sum(-1)
            sums.index_add_(1, step, torch.stack([kl, acceptance]))
            a = acceptance.new_zeros(end - begin, steps).index_put_((chain, step), acceptance)
            present = torch.zeros_like(a, dtype=torch.bool)
            present.index_put_((chain, step), torch.ones_like(chain, dtype=torch.bool))
            lost, by_acceptance = chain_length(a, present)
            loss += lost.sum() / denominator
            if grad_hidden is None and grad_head is None:
                continue
            scale = by_acceptance[chain, step] / (denominator * target.divisor)
            if fused is not None:
                none = torch.zeros_like(scale)
                slope = fused.slope(logits, p, mass, pick, found, none, scale, target.divisor, h.dtype)
            else:
                slope = acceptance_slope(p, q).mul_(scale[:, None]).to(h.dtype)
            if grad_hidden is not None:
                grad_hidden[entries] = times(slope, lm_head.t())
            if grad_head is not None:
                add_times_wide(grad_head, slope.t(), h.t())
        ctx.save_for_backward(grad_hidden, None if grad_head is None else grad_head.to(lm_head.dtype))
        kl_sums, acceptance_sums = sums.unbind(0)
        kl_sums, acceptance_sums = kl_sums.clone(), acceptance_sums.clone()
        ctx.mark_non_differentiable(kl_sums, acceptance_sums)
        return loss, kl_sums, acceptance_sums

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_head = ctx.saved_tensors
        scaled = [None if g is None else g * grads[0].to(g.dtype) for g in (grad_hidden, grad_head)]
        return (*scaled, None, None, None, None, None, None)
