"""Losses that `benchmarks/tracking.py` tries and the product does not ship: dense, by autograd, for toys.

Per supervised entry, with p the target's and q the drafter's law on the draft vocabulary, a = sum min(p, q) and
kl = KL(p || q):

    "rejected"        (1 - a) kl: where the draft would be rejected (OSD, arXiv 2310.07177, expected)
    "first rejected"  prod_{i<j} a_i (1 - a_j) kl: where the round would end (the error position of Draft-OPD)
    "greedy"          kl + 1 - sum p q_s, with q_s the drafter's law sharpened by `SHARPER`: near p(argmax q), which is
                      what a greedy draft is accepted by
    "only greedy"     1 - sum p q_s

Weights are held constant and scaled to a mean of 1 over the batch, so that a learning rate means the same.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from drafter.batch import RolloutBatch
from drafter.model.pointwise import rms_norm
from drafter.policy import Policy
from drafter.training.loss import DraftLoss
from drafter.training.target import DraftTarget
from drafter.training.trainer import DrafterTrainer
from drafter.unroll.plan import Plan

Aim = Literal["", "rejected", "first rejected", "greedy", "only greedy"]
#: What the drafter's logits are multiplied by to stand for its argmax.
SHARPER = 3.0


class AimedTrainer(DrafterTrainer):
    """The trainer with one of these losses in the place of its own."""

    aim: Aim = ""

    def loss_of(
        self, plan: Plan, batch: RolloutBatch, policy: Policy, target: DraftTarget, denominator: float
    ) -> DraftLoss:
        """Give the aimed loss of a plan, its batch and its target; entries are in the plan's order."""
        unrolled = self.drafter.unroll(plan, batch, policy, dtype=self._dtype)
        hidden = torch.cat(unrolled.pre).index_select(0, plan.order)
        normed = rms_norm(hidden, unrolled.weights.norm, self.drafter.config.rms_norm_eps)
        logits = normed @ unrolled.weights.lm_head.t() / target.divisor  # [E, D]
        logp = target.logprobs(0, plan.target_rows.numel(), logits.dtype).clamp(min=-1e30)[plan.target_index]
        p, logq = logp.exp(), torch.log_softmax(logits, -1)
        mass = p.sum(-1)
        kl = (p * logp).sum(-1) - torch.special.xlogy(mass, mass) - (p * logq).sum(-1)
        a = torch.minimum(p, logq.exp()).sum(-1)
        step = logits.new_tensor([self.config.step_decay**j for j in range(plan.steps)])[plan.entry_step]
        loss = (step * self._value(plan, p, logits, kl, a)).sum() / denominator
        sums = logits.new_zeros(plan.steps)
        return DraftLoss(
            loss,
            sums.index_add(0, plan.entry_step, kl.detach()),
            sums.index_add(0, plan.entry_step, a.detach()),
            plan.entries,
        )

    def _value(self, plan: Plan, p: Tensor, logits: Tensor, kl: Tensor, a: Tensor) -> Tensor:
        kept = a.detach()
        if self.aim == "rejected":
            return _scaled(1 - kept) * kl
        if self.aim == "first rejected":
            return _scaled(_reached(plan, kept) * (1 - kept)) * kl
        missed = 1 - (p * torch.softmax(SHARPER * logits, -1)).sum(-1)
        return missed if self.aim == "only greedy" else kl + missed


def _scaled(weight: Tensor) -> Tensor:
    return weight / weight.mean().clamp(min=1e-6)


def _reached(plan: Plan, kept: Tensor) -> Tensor:
    """Probability [E] that a round which begins at an entry's row gets as far as the entry's step."""
    rows = torch.cat(plan.rows)[plan.order]
    table = torch.ones(plan.tokens, plan.steps, dtype=kept.dtype)
    table[rows, plan.entry_step] = kept
    before = torch.cat([torch.ones(plan.tokens, 1, dtype=kept.dtype), table.cumprod(1)[:, :-1]], dim=1)
    return before[rows, plan.entry_step]
