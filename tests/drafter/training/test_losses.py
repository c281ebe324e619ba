"""The loss against a brute-force float64 reference, by gradcheck, and in training."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from helpers.drafter.drafter_worlds import SHAPES, gradients, mask_of, ours, world
from helpers.drafter.loss_reference import brute_force, prepared
from torch import Tensor
from torch.autograd.gradcheck import gradcheck

from drafter.training.loss import _FusedLoss
from drafter.training.optimizer import Method
from drafter.training.target import DraftTarget
from drafter.training.trainer import DrafterTrainer, TrainConfig
from drafter.unroll.plan import Plan
from service.settings import Settings

AWKWARD = SHAPES["packed, awkward"]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("steps", [1, 4])
def test_the_fused_loss_and_every_gradient_equal_brute_force(shape: str, steps: int) -> None:
    w = world(SHAPES[shape], temperature=0.8)
    loss, slopes = brute_force(w, steps)
    result = ours(w, steps)
    assert result.loss.item() == pytest.approx(loss.item(), rel=1e-10)
    for name, gradient in gradients(w, result.loss).items():
        torch.testing.assert_close(gradient, slopes[name], rtol=1e-8, atol=1e-11, msg=name)


def inputs_of_the_fused_function() -> tuple[Tensor, Tensor, DraftTarget, Plan]:
    """Hidden states [E, 12] and lm_head [D, 12] in float64, and what they are held against."""
    w = world((mask_of(6, 1), mask_of(5, 2, holes=(3,))), temperature=0.9)
    unrolled, target = prepared(w, 3)
    generator = torch.Generator().manual_seed(5)
    hidden = torch.randn(unrolled.plan.order.numel(), 12, generator=generator, dtype=torch.float64)
    head = torch.randn(len(w.drafter.vocabulary), 12, generator=generator, dtype=torch.float64)
    return hidden.requires_grad_(), head.requires_grad_(), target, unrolled.plan


STEP_WEIGHTS = torch.tensor([0.5, 0.4, 0.3], dtype=torch.float64)


def test_gradcheck_of_the_fused_function() -> None:
    hidden, head, target, plan = inputs_of_the_fused_function()

    def loss(hidden: Tensor, head: Tensor) -> Tensor:
        out: tuple[Tensor, ...] = _FusedLoss.apply(hidden, head, target, plan, STEP_WEIGHTS, 40, True)  # type: ignore[no-untyped-call]
        return out[0]

    assert gradcheck(loss, (hidden, head), eps=1e-6, atol=1e-6)


def test_a_target_with_no_mass_on_the_draft_vocabulary_gives_no_gradient() -> None:
    w = world(AWKWARD)
    nowhere = torch.full_like(w.batch.logsumexp, 1e4)  # log p of every draft token is near -1e4
    result = ours(replace(w, batch=replace(w.batch, logsumexp=nowhere)), 3)
    assert torch.isfinite(result.loss)
    for gradient in gradients(w, result.loss).values():
        assert gradient.abs().max().item() == 0


def test_training_raises_the_acceptance() -> None:
    w = world((mask_of(20, 2), mask_of(24, 6)), dtype=torch.float32)
    trainer = DrafterTrainer(w.drafter, TrainConfig(steps_ahead=3, learning_rate=1e-2))
    reports = [trainer.step([(w.batch, w.policy)]) for _ in range(25)]
    assert sum(reports[-1].acceptance_per_step) > sum(reports[0].acceptance_per_step) + 0.1
    assert reports[-1].loss < reports[0].loss


def test_the_service_offers_the_optimizers_that_the_trainer_knows() -> None:
    annotation: object = Settings.model_fields["optimizer"].annotation
    assert annotation == Method
    assert Settings.model_fields["optimizer"].default == TrainConfig().optimizer


def test_bfloat16_training_comes_near_float32() -> None:
    acceptance = {}
    for dtype in ("float32", "bfloat16"):
        w = world((mask_of(20, 2), mask_of(24, 6)), dtype=torch.float32)
        config = TrainConfig(steps_ahead=3, learning_rate=1e-2, compute_dtype=dtype)
        trainer = DrafterTrainer(w.drafter, config)
        reports = [trainer.step([(w.batch, w.policy)]) for _ in range(20)]
        assert all(report.skipped is None for report in reports)
        acceptance[dtype] = sum(reports[-1].acceptance_per_step)
    assert acceptance["bfloat16"] == pytest.approx(acceptance["float32"], rel=0.05)
