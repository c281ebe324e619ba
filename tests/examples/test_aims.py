"""The losses of `benchmarks/aims.py` against their definitions, one row at a time in float64."""

from __future__ import annotations

import pytest
import torch
from helpers.drafter.drafter_worlds import SHAPES, World, world
from helpers.drafter.loss_reference import laws
from torch import Tensor

from benchmarks.aims import SHARPER, Aim, AimedTrainer
from drafter.policy import TargetHead
from drafter.training.target import draft_target
from drafter.training.trainer import TrainConfig
from drafter.unroll.plan import make_plan

STEPS, DENOMINATOR, DECAY = 3, 7.0, 0.8


def defined(w: World, aim: Aim) -> Tensor:
    """The loss by its definition; differentiable in the drafter's parameters, weights held constant."""
    found = laws(w, dict(w.drafter.named_parameters()), STEPS)
    accepted = {at: float(torch.minimum(p, q).sum().detach()) for at, (p, q) in found.items()}
    weights = {}
    for row, step in found:
        reached = 1.0
        for before in range(step if aim == "first rejected" else 0):
            reached *= accepted.get((row, before), 1.0)
        weights[row, step] = reached * (1 - accepted[row, step])
    mean = sum(weights.values()) / len(weights)
    total = torch.zeros((), dtype=torch.float64)
    for (row, step), (p, q) in found.items():
        kl = (p * (p / p.sum() / q).log()).sum()
        sharp = q**SHARPER / (q**SHARPER).sum()
        missed = 1 - (p * sharp).sum()
        value = {"greedy": kl + missed, "only greedy": missed}.get(aim, weights[row, step] / mean * kl)
        total = total + DECAY**step * value
    return total / DENOMINATOR


@pytest.mark.parametrize("aim", ["rejected", "first rejected", "greedy", "only greedy"])
def test_an_aimed_loss_and_its_gradients_are_what_its_definition_says(aim: Aim) -> None:
    w = world(SHAPES["packed, awkward"])
    trainer = AimedTrainer(w.drafter, TrainConfig(steps_ahead=STEPS, step_decay=DECAY, compute_dtype="float64"))
    trainer.aim = aim
    plan = make_plan(w.batch.cu_seqlens, w.batch.loss_mask, STEPS)
    target = draft_target(w.batch, plan, w.drafter.vocabulary, TargetHead(w.head), w.head.dtype)
    parameters = list(w.drafter.parameters())
    got = trainer.loss_of(plan, w.batch, w.policy, target, DENOMINATOR).loss
    want = defined(w, aim)
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-12)
    ours = torch.autograd.grad(got, parameters, allow_unused=True)
    theirs = torch.autograd.grad(want, parameters, allow_unused=True)
    for mine, reference in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, reference, rtol=1e-7, atol=1e-10)


def test_another_aim_would_be_noticed() -> None:
    w = world(SHAPES["packed, awkward"])
    assert abs(float((defined(w, "rejected") / defined(w, "first rejected")).detach()) - 1) > 1e-3
    assert abs(float((defined(w, "greedy") / defined(w, "only greedy")).detach()) - 1) > 1e-3
