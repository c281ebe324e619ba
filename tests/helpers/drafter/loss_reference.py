"""The loss by its definition, one row at a time in float64: what `drafter.training` is held to."""

from __future__ import annotations

import torch
from helpers.drafter.drafter_reference import Row, rms
from helpers.drafter.drafter_worlds import World
from torch import Tensor

from drafter.model.eagle3_unroll import unroll
from drafter.policy import TargetHead
from drafter.training.target import DraftTarget, draft_target
from drafter.unroll.plan import make_plan
from drafter.unroll.unrolled import Unrolled

DENOMINATOR, DECAY = 7.0, 0.8


def prepared(w: World, steps: int) -> tuple[Unrolled, DraftTarget]:
    plan = make_plan(w.batch.cu_seqlens, w.batch.loss_mask, steps)
    unrolled = unroll(w.drafter, plan, w.batch.input_ids, w.batch.aux_hidden, w.embed_tokens)
    return unrolled, draft_target(w.batch, plan, w.drafter.vocabulary, TargetHead(w.head), w.head.dtype)


def laws(w: World, weights: dict[str, Tensor], steps: int) -> dict[tuple[int, int], tuple[Tensor, Tensor]]:
    """(row, step) -> the target's p and the drafter's q on the draft vocabulary, one row at a time, by autograd."""
    config, ids = w.drafter.config, w.drafter.vocabulary.ids
    found: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
    start = 0
    for doc in w.documents:
        tokens, mask, n = doc.input_ids.tolist(), doc.loss_mask.tolist(), doc.tokens
        embed = w.embed_tokens
        first = [
            Row(weights, config, embed[tokens[t + 1]], weights["fc.weight"] @ doc.aux_hidden[t], t)
            for t in range(n - 1)
        ]
        for t in range(n - 2):
            own: list[Row] = []
            pre = torch.zeros(0)
            for j in range(min(steps, n - t - 2)):
                here = first[t]
                if j:
                    here = Row(weights, config, embed[tokens[t + 1 + j]], pre, t + j)
                    own.append(here)
                pre = here.pre(first[: t + 1] + own)
                if mask[t + 2 + j]:
                    z = weights["lm_head.weight"] @ rms(pre, weights["norm.weight"], config.rms_norm_eps)
                    p = torch.softmax(w.head @ doc.last_hidden[t + 1 + j] / doc.divisor, -1)[ids]
                    found[start + t, j] = (p, torch.softmax(z / doc.divisor, -1))
        start += n
    return found


def brute_force(w: World, steps: int) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss by its definition, and autograd's gradients."""
    weights = {name: p.detach().clone().requires_grad_() for name, p in w.drafter.named_parameters()}
    found = laws(w, weights, steps)
    total = torch.zeros((), dtype=torch.float64)
    for (_, j), (p, q) in found.items():
        total = total + DECAY**j * (p * (p / (p.sum() * q)).log()).sum()
    loss = total / DENOMINATOR
    return loss.detach(), dict(zip(weights, torch.autograd.grad(loss, list(weights.values())), strict=True))
