"""The losses against a brute-force float64 reference, by gradcheck, and in training."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args

import pytest
import torch
from drafter_worlds import SHAPES, gradients, mask_of, ours, world
from loss_reference import DENOMINATOR, brute_force, laws, prepared, production
from torch import Tensor
from torch.autograd.gradcheck import gradcheck

from drafter.errors import DrafterError
from drafter.training.chain_loss import _FusedChain, chain_length
from drafter.training.loss import _FusedLoss
from drafter.training.optimizer import Method
from drafter.training.target import DraftTarget
from drafter.training.trainer import DrafterTrainer, Loss, TrainConfig
from drafter.unroll.plan import Plan
from service.settings import Settings

AWKWARD = SHAPES["packed, awkward"]
KINDS = get_args(Loss)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("steps", [1, 4])
def test_the_fused_loss_and_every_gradient_equal_brute_force(kind: str, shape: str, steps: int) -> None:
    w = world(SHAPES[shape], temperature=0.8)
    loss, slopes = brute_force(w, steps, kind)
    result = production(w, steps, kind)
    assert result.loss.item() == pytest.approx(loss.item(), rel=1e-10)
    for name, gradient in gradients(w, result.loss).items():
        torch.testing.assert_close(gradient, slopes[name], rtol=1e-8, atol=1e-11, msg=name)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chunk", [1, 60, 200])
def test_chunking_changes_no_loss_and_no_gradient(kind: str, chunk: int) -> None:
    w = world(AWKWARD)
    whole, cut = production(w, 4, kind), production(w, 4, kind, chunk=chunk)
    assert cut.loss.item() == pytest.approx(whole.loss.item(), rel=1e-12)
    torch.testing.assert_close(whole.kl_sums, cut.kl_sums, rtol=1e-12, atol=0)
    for a, b in zip(gradients(w, whole.loss).values(), gradients(w, cut.loss).values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-13)


def test_alpha_reports_the_figures_that_kl_reports() -> None:
    w = world(AWKWARD)
    kl, other = ours(w, 4), production(w, 4, "alpha")
    assert other.entries == kl.entries
    torch.testing.assert_close(other.kl_sums, kl.kl_sums, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(other.acceptance_sums, kl.acceptance_sums, rtol=1e-12, atol=1e-14)


def inputs_of_the_fused_function() -> tuple[Tensor, Tensor, DraftTarget, Plan]:
    """Hidden states [E, 12] and lm_head [D, 12] in float64, and what they are held against."""
    w = world((mask_of(6, 1), mask_of(5, 2, holes=(3,))), temperature=0.9)
    unrolled, target = prepared(w, 3)
    generator = torch.Generator().manual_seed(5)
    hidden = torch.randn(unrolled.plan.order.numel(), 12, generator=generator, dtype=torch.float64)
    head = torch.randn(len(w.drafter.vocabulary), 12, generator=generator, dtype=torch.float64)
    return hidden.requires_grad_(), head.requires_grad_(), target, unrolled.plan


STEP_WEIGHTS = torch.tensor([0.5, 0.4, 0.3], dtype=torch.float64)


@pytest.mark.parametrize("kind", KINDS)
def test_gradcheck_of_the_fused_function(kind: Any) -> None:
    hidden, head, target, plan = inputs_of_the_fused_function()

    def loss(hidden: Tensor, head: Tensor) -> Tensor:
        out: tuple[Tensor, ...]
        if kind == "kl":
            out = _FusedLoss.apply(hidden, head, target, plan, STEP_WEIGHTS, 40, True)  # type: ignore[no-untyped-call]
        elif kind == "alpha":
            out = _FusedChain.apply(hidden, head, target, plan.chains, 3, DENOMINATOR, 40, True)  # type: ignore[no-untyped-call]
        else:
            pytest.skip(f"{kind}: no fused function of its own is named here; its gradients are held to brute force")
        return out[0]

    assert gradcheck(loss, (hidden, head), eps=1e-6, atol=1e-6)


def test_gradcheck_of_chain_length() -> None:
    a = torch.rand(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    a[0, 1] = 0.0  # a draft that is never kept must not turn later slopes into nan
    present = torch.ones(6, 4, dtype=torch.bool)
    present[1, 2:] = False
    present[2, 1] = False
    present[3, 0] = False
    moved = a.clone().requires_grad_()
    lost, slope = chain_length(moved, present)
    by_autograd = torch.autograd.grad(lost.sum(), moved)[0]
    torch.testing.assert_close(slope.detach(), by_autograd, rtol=1e-12, atol=0)
    assert lost[3].item() == 0
    assert lost[2].item() == pytest.approx(1 - a[2, 0].item())


def test_a_chain_ends_at_a_gap_and_at_its_document() -> None:
    """One row of a document with tool output: the steps beyond the gap change neither loss nor gradient."""
    mask = torch.tensor([False, True, True, False, True, True])
    w = world((mask,))
    found = laws(w, dict(w.drafter.named_parameters()), 4)
    lengths = {0: 1, 1: 0, 2: 2, 3: 1}  # row 0 drafts token 2, then meets the gap at token 3
    expected = 0.0
    for row, n in lengths.items():
        product = 1.0
        for j in range(n):
            product *= torch.minimum(*found[row, j]).sum().item()
            expected += 1 - product
    assert production(w, 4, "alpha").loss.item() == pytest.approx(expected / DENOMINATOR, rel=1e-10)


@pytest.mark.parametrize("kind", KINDS)
def test_a_frozen_head_changes_no_other_gradient(kind: str) -> None:
    w = world(AWKWARD)
    whole = gradients(w, production(w, 3, kind).loss)
    w.drafter.lm_head.weight.requires_grad_(False)
    torch.autograd.backward(production(w, 3, kind).loss)
    assert w.drafter.lm_head.weight.grad is None
    for name, parameter in w.drafter.named_parameters():
        if name != "lm_head.weight":
            torch.testing.assert_close(parameter.grad, whole[name], rtol=1e-12, atol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_target_with_no_mass_on_the_draft_vocabulary_gives_no_gradient(kind: str) -> None:
    w = world(AWKWARD)
    nowhere = torch.full_like(w.batch.logsumexp, 1e4)  # log p of every draft token is near -1e4
    result = production(replace(w, batch=replace(w.batch, logsumexp=nowhere)), 3, kind)
    assert torch.isfinite(result.loss)
    for gradient in gradients(w, result.loss).values():
        assert gradient.abs().max().item() == 0


@pytest.mark.parametrize("kind", KINDS)
def test_training_with_each_loss_raises_the_acceptance(kind: Any) -> None:
    w = world((mask_of(20, 2), mask_of(24, 6)), dtype=torch.float32)
    trainer = DrafterTrainer(w.drafter, TrainConfig(steps_ahead=3, learning_rate=1e-2, loss=kind))
    reports = [trainer.step([(w.batch, w.policy)]) for _ in range(25)]
    assert sum(reports[-1].acceptance_per_step) > sum(reports[0].acceptance_per_step) + 0.1
    assert reports[-1].loss < reports[0].loss


def test_the_chain_loss_beats_kl_at_its_own_aim_from_the_same_start() -> None:
    """What is minimised is what falls most: after equal steps, "alpha" loses fewer drafts of whole chains."""
    lost = {}
    for kind in ("kl", "alpha"):
        w = world((mask_of(20, 2), mask_of(24, 6)), dtype=torch.float32)
        trainer = DrafterTrainer(w.drafter, TrainConfig(steps_ahead=3, learning_rate=1e-2, step_decay=1.0, loss="kl"))
        for _ in range(30):
            trainer.step([(w.batch, w.policy)])
        trainer = DrafterTrainer(w.drafter, TrainConfig(steps_ahead=3, learning_rate=3e-3, step_decay=1.0, loss=kind))
        for _ in range(60):
            trainer.step([(w.batch, w.policy)])
        lost[kind] = production(w, 3, "alpha").loss.item()
    assert lost["alpha"] < lost["kl"]


def test_an_unknown_loss_is_refused_by_name() -> None:
    with pytest.raises(DrafterError, match=f"one of {', '.join(KINDS)}, got 'no such loss'"):
        TrainConfig(loss="no such loss")  # type: ignore[arg-type]


def annotation_of(setting: str) -> object:
    return Settings.model_fields[setting].annotation


def test_the_service_offers_the_losses_that_the_trainer_knows() -> None:
    assert annotation_of("loss") == Loss
    assert Settings.model_fields["loss"].default == TrainConfig().loss


def test_the_service_offers_the_optimizers_that_the_trainer_knows() -> None:
    assert annotation_of("optimizer") == Method
    assert Settings.model_fields["optimizer"].default == TrainConfig().optimizer


@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_training_with_each_loss_comes_near_float32(kind: Any) -> None:
    acceptance = {}
    for dtype in ("float32", "bfloat16"):
        w = world((mask_of(20, 2), mask_of(24, 6)), dtype=torch.float32)
        config = TrainConfig(steps_ahead=3, learning_rate=1e-2, loss=kind, compute_dtype=dtype)
        trainer = DrafterTrainer(w.drafter, config)
        reports = [trainer.step([(w.batch, w.policy)]) for _ in range(20)]
        assert all(report.skipped is None for report in reports)
        acceptance[dtype] = sum(reports[-1].acceptance_per_step)
    assert acceptance["bfloat16"] == pytest.approx(acceptance["float32"], rel=0.05)
