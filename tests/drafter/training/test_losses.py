"""Losses "lk", "nla" and "alpha" against a brute-force float64 reference, by gradcheck, and in training."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from drafter_reference import Row, rms
from drafter_worlds import SHAPES, World, gradients, mask_of, ours, with_top, world
from torch import Tensor
from torch.autograd.gradcheck import gradcheck

from drafter.errors import DrafterError
from drafter.model.eagle3_unroll import unroll
from drafter.policy import TargetHead
from drafter.training.chain_loss import _FusedChain, chain_length, chain_loss
from drafter.training.loss import DraftLoss, _FusedLoss, draft_loss
from drafter.training.optimizer import Method
from drafter.training.target import DraftTarget, draft_target
from drafter.training.trainer import DrafterTrainer, Loss, TrainConfig
from drafter.unroll.plan import Plan, make_plan
from drafter.unroll.unrolled import Unrolled
from service.settings import Settings

AWKWARD = SHAPES["packed, awkward"]
DENOMINATOR, DECAY = 7.0, 0.8
KINDS = ("lk", "nla", "alpha")


def prepared(w: World, steps: int) -> tuple[Unrolled, DraftTarget]:
    plan = make_plan(w.batch.cu_seqlens, w.batch.loss_mask, steps)
    unrolled = unroll(w.drafter, plan, w.batch.input_ids, w.batch.aux_hidden)
    return unrolled, draft_target(w.batch, plan, w.drafter.vocabulary, TargetHead(w.head), w.head.dtype)


def production(w: World, steps: int, kind: Any, *, chunk: int = 1 << 22) -> DraftLoss:
    unrolled, target = prepared(w, steps)
    if kind == "alpha":
        return chain_loss(w.drafter, unrolled, target, denominator=DENOMINATOR, chunk_elements=chunk)
    return draft_loss(
        w.drafter, unrolled, target, denominator=DENOMINATOR, step_decay=DECAY, kind=kind, chunk_elements=chunk
    )


def laws(w: World, weights: dict[str, Tensor], steps: int) -> dict[tuple[int, int], tuple[Tensor, Tensor]]:
    """(row, step) -> the target's p and the drafter's q on the draft vocabulary, one row at a time, by autograd."""
    config, ids = w.drafter.config, w.drafter.vocabulary.ids
    found: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
    start = 0
    for doc in w.documents:
        tokens, mask, n = doc.input_ids.tolist(), doc.loss_mask.tolist(), doc.tokens
        embed = w.drafter.embed_tokens
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
                    assert doc.last_hidden is not None
                    p = torch.softmax(w.head @ doc.last_hidden[t + 1 + j] / doc.divisor, -1)[ids]
                    found[start + t, j] = (p, torch.softmax(z / doc.divisor, -1))
        start += n
    return found


def brute_force(w: World, steps: int, kind: str) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss by its definition, and autograd's gradients."""
    weights = {name: p.detach().clone().requires_grad_() for name, p in w.drafter.named_parameters()}
    found = laws(w, weights, steps)
    total = torch.zeros((), dtype=torch.float64)
    if kind == "alpha":
        for row in {row for row, _ in found}:
            product = torch.ones((), dtype=torch.float64)
            for j in range(steps):
                if (row, j) not in found:
                    break
                product = product * torch.minimum(*found[row, j]).sum()
                total = total + 1 - product
    else:
        for (_, j), (p, q) in found.items():
            a = torch.minimum(p, q).sum()
            kl = (p * (p / (p.sum() * q)).log()).sum()
            weight = torch.exp(-3 * a.detach())
            value = weight * kl + (1 - weight) * (1 - a) if kind == "lk" else -a.log()
            total = total + DECAY**j * value
    loss = total / DENOMINATOR
    return loss.detach(), dict(zip(weights, torch.autograd.grad(loss, list(weights.values())), strict=True))


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


@pytest.mark.parametrize("kind", ["kl", *KINDS])
@pytest.mark.parametrize("chunk", [1, 60, 200])
@pytest.mark.parametrize("top", [0, 4])
def test_chunking_changes_no_loss_and_no_gradient(kind: str, chunk: int, top: int) -> None:
    w = world(AWKWARD)
    w = with_top(w, top) if top else w
    whole, cut = production(w, 4, kind), production(w, 4, kind, chunk=chunk)
    assert cut.loss.item() == pytest.approx(whole.loss.item(), rel=1e-12)
    torch.testing.assert_close(whole.kl_sums, cut.kl_sums, rtol=1e-12, atol=0)
    for a, b in zip(gradients(w, whole.loss).values(), gradients(w, cut.loss).values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("top", [0, 4])
def test_every_loss_reports_the_figures_that_kl_reports(kind: str, top: int) -> None:
    w = world(AWKWARD)
    w = with_top(w, top) if top else w
    kl, other = ours(w, 4), production(w, 4, kind)
    assert other.entries == kl.entries
    torch.testing.assert_close(other.kl_sums, kl.kl_sums, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(other.acceptance_sums, kl.acceptance_sums, rtol=1e-12, atol=1e-14)


def inputs_of_the_fused_function(top: int) -> tuple[Tensor, Tensor, DraftTarget, Plan]:
    """Hidden states [E, 12] and lm_head [D, 12] in float64, and what they are held against."""
    w = world((mask_of(6, 1), mask_of(5, 2, holes=(3,))), temperature=0.9)
    unrolled, target = prepared(with_top(w, top) if top else w, 3)
    generator = torch.Generator().manual_seed(5)
    hidden = torch.randn(unrolled.plan.order.numel(), 12, generator=generator, dtype=torch.float64)
    head = torch.randn(len(w.drafter.vocabulary), 12, generator=generator, dtype=torch.float64)
    return hidden.requires_grad_(), head.requires_grad_(), target, unrolled.plan


STEP_WEIGHTS = torch.tensor([0.5, 0.4, 0.3], dtype=torch.float64)


@pytest.mark.parametrize("kind", ["kl", "nla", "alpha"])  # "lk" holds its weight constant: see the next test
@pytest.mark.parametrize("top", [0, 4])
def test_gradcheck_of_the_fused_function(kind: Any, top: int) -> None:
    hidden, head, target, plan = inputs_of_the_fused_function(top)

    def loss(hidden: Tensor, head: Tensor) -> Tensor:
        out: tuple[Tensor, ...]
        if kind == "alpha":
            out = _FusedChain.apply(hidden, head, target, plan.chains, 3, DENOMINATOR, 40, True)  # type: ignore[no-untyped-call]
        else:
            out = _FusedLoss.apply(hidden, head, target, plan, STEP_WEIGHTS, kind, 40, True)  # type: ignore[no-untyped-call]
        return out[0]

    assert gradcheck(loss, (hidden, head), eps=1e-6, atol=1e-6)


def kl_and_acceptance(hidden: Tensor, head: Tensor, target: DraftTarget, plan: Plan) -> tuple[Tensor, Tensor]:
    """Both by their definition, [E]; a tail counts as one token more."""
    p = target.logprobs(0, plan.target_rows.numel(), torch.float64).exp()[plan.target_index]
    q = torch.softmax(hidden @ head.T / target.divisor, -1)
    if target.tail is not None:
        p = torch.cat([p, target.tail[plan.target_index, None]], -1)
        q = torch.cat([q, (q * (p[:, :-1] == 0)).sum(-1, keepdim=True)], -1)
    kl = torch.special.xlogy(p, p / (p.sum(-1, keepdim=True) * q)).sum(-1)
    return kl, torch.minimum(p, q).sum(-1)


def slope_by_differences(loss: Callable[[], Tensor], x: Tensor, eps: float = 1e-6) -> Tensor:
    """Central differences of a loss by each element of x, which is moved in place."""
    slope = torch.empty_like(x)
    for at in range(x.numel()):
        kept = float(x.view(-1)[at])
        ends = []
        for moved in (kept + eps, kept - eps):
            x.view(-1)[at] = moved
            ends.append(loss())
        x.view(-1)[at] = kept
        slope.view(-1)[at] = (ends[0] - ends[1]) / (2 * eps)
    return slope


@pytest.mark.parametrize("slip", [1.0, 1.01], ids=["as it is", "a weight 1 % too large"])
@pytest.mark.parametrize("top", [0, 4])
def test_the_slope_of_lk_is_that_of_its_formula_with_the_weight_held(
    top: int, slip: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Finite differences of w0 kl + (1 - w0) (1 - a), w0 = exp(-3 a) where nothing is moved yet."""
    hidden, head, target, plan = inputs_of_the_fused_function(top)

    def slipped(_: str, kl: Tensor, a: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        weight = slip * torch.exp(-3 * a)
        return weight * kl + (1 - weight) * (1 - a), weight, weight - 1

    if slip != 1:
        monkeypatch.setattr("drafter.training.loss._value", slipped)
    fused = _FusedLoss.apply(hidden, head, target, plan, STEP_WEIGHTS, "lk", 40, True)[0]  # type: ignore[no-untyped-call]
    found = torch.autograd.grad(fused, (hidden, head))

    with torch.no_grad():
        held = torch.exp(-3 * kl_and_acceptance(hidden, head, target, plan)[1])

        def loss() -> Tensor:
            kl, a = kl_and_acceptance(hidden, head, target, plan)
            return (STEP_WEIGHTS[plan.entry_step] * (held * kl + (1 - held) * (1 - a))).sum()

        wanted = [slope_by_differences(loss, x) for x in (hidden, head)]
        worst = max(float((f - w).norm() / w.norm()) for f, w in zip(found, wanted, strict=True))
        value = abs(float(fused / loss()) - 1)
    if slip == 1:
        assert max(worst, value) < 1e-7
    else:
        assert min(worst, value) > 1e-3


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
    outside = [i for i in range(17) if i not in w.drafter.vocabulary.ids.tolist()]
    T = w.batch.tokens
    batch = replace(
        w.batch,
        last_hidden=None,
        logsumexp=None,
        top_ids=torch.full((T, 1), outside[0]),
        top_logprobs=torch.zeros(T, 1, dtype=torch.float64),
    )
    result = production(World(w.drafter, w.head, batch), 3, kind)
    assert torch.isfinite(result.loss)
    for gradient in gradients(w, result.loss).values():
        assert gradient.abs().max().item() == 0


@pytest.mark.parametrize("kind", ["kl", *KINDS])
def test_training_with_each_loss_raises_the_acceptance(kind: Any) -> None:
    w = world((mask_of(20, 2), mask_of(24, 6)), dtype=torch.float32)
    trainer = DrafterTrainer(w.drafter, TrainConfig(steps_ahead=3, learning_rate=1e-2, loss=kind))
    reports = [trainer.step(w.batch, TargetHead(w.head)) for _ in range(25)]
    assert sum(reports[-1].acceptance_per_step) > sum(reports[0].acceptance_per_step) + 0.1
    assert reports[-1].loss < reports[0].loss


def test_the_chain_loss_beats_kl_at_its_own_aim_from_the_same_start() -> None:
    """What is minimised is what falls most: after equal steps, "alpha" loses fewer drafts of whole chains."""
    lost = {}
    for kind in ("kl", "alpha"):
        w = world((mask_of(20, 2), mask_of(24, 6)), dtype=torch.float32)
        trainer = DrafterTrainer(w.drafter, TrainConfig(steps_ahead=3, learning_rate=1e-2, step_decay=1.0, loss="kl"))
        for _ in range(30):
            trainer.step(w.batch, TargetHead(w.head))
        trainer = DrafterTrainer(w.drafter, TrainConfig(steps_ahead=3, learning_rate=3e-3, step_decay=1.0, loss=kind))
        for _ in range(60):
            trainer.step(w.batch, TargetHead(w.head))
        lost[kind] = production(w, 3, "alpha").loss.item()
    assert lost["alpha"] < lost["kl"]


def test_an_unknown_loss_is_refused_by_name() -> None:
    with pytest.raises(DrafterError, match="one of kl, lk, nla, alpha, got 'tv'"):
        TrainConfig(loss="tv")  # type: ignore[arg-type]
    w = world(AWKWARD)
    with pytest.raises(DrafterError, match="'tv'"):
        production(w, 2, "tv")


def test_the_service_offers_the_losses_that_the_trainer_knows() -> None:
    assert Settings.model_fields["loss"].annotation == Loss
    assert Settings.model_fields["loss"].default == TrainConfig().loss


def test_the_service_offers_the_optimizers_that_the_trainer_knows() -> None:
    assert Settings.model_fields["optimizer"].annotation == Method
    assert Settings.model_fields["optimizer"].default == TrainConfig().optimizer


@pytest.mark.parametrize(("kind", "theirs"), [("lk", "lk_hybrid_loss"), ("nla", "neg_log_acceptance_loss")])
def test_the_losses_per_draft_are_those_of_speculators(kind: str, theirs: str) -> None:
    """Over the whole vocabulary, where p needs no renormalising and the two can be compared."""
    eager = pytest.importorskip("speculators.losses.eager")
    w = world(AWKWARD, draft=17)
    unrolled, target = prepared(w, 3)
    plan = unrolled.plan
    logp = target.logprobs(0, plan.target_rows.numel(), torch.float64)
    logits = torch.cat([w.drafter.logits(pre) for pre in unrolled.pre]).index_select(0, plan.order)
    each = getattr(eager, theirs)(logits[None], logp.index_select(0, plan.target_index)[None])[0]
    want = (each * DECAY**plan.entry_step).sum().item() / DENOMINATOR
    assert production(w, 3, kind).loss.item() == pytest.approx(want, rel=1e-6)


@pytest.mark.parametrize("kind", ["kl", *KINDS])
def test_bfloat16_training_with_each_loss_comes_near_float32(kind: Any) -> None:
    acceptance = {}
    for dtype in ("float32", "bfloat16"):
        w = world((mask_of(20, 2), mask_of(24, 6)), dtype=torch.float32)
        config = TrainConfig(steps_ahead=3, learning_rate=1e-2, loss=kind, compute_dtype=dtype)  # type: ignore[arg-type]
        trainer = DrafterTrainer(w.drafter, config)
        reports = [trainer.step(w.batch, TargetHead(w.head)) for _ in range(20)]
        assert all(report.skipped is None for report in reports)
        acceptance[dtype] = sum(reports[-1].acceptance_per_step)
    assert acceptance["bfloat16"] == pytest.approx(acceptance["float32"], rel=0.05)
