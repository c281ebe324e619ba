"""The fused loss: chunking, memory, and true probabilities."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.drafter.drafter_worlds import SHAPES, VOCAB, World, cast, expected, gradients, ours, world
from torch.utils._python_dispatch import TorchDispatchMode

from drafter.errors import TargetHeadError
from drafter.model.eagle3_unroll import unroll
from drafter.policy import TargetHead
from drafter.training.loss import draft_loss
from drafter.training.target import draft_target
from drafter.unroll.plan import make_plan
from drafter.unroll.unrolled import Unrolled
from drafter.vocabulary import DraftVocabulary

AWKWARD = SHAPES["packed, awkward"]


def unrolled(w: World, steps: int) -> Unrolled:
    plan = make_plan(w.batch.cu_seqlens, w.batch.loss_mask, steps)
    return unroll(w.drafter, plan, w.batch.input_ids, w.batch.aux_hidden, w.embed_tokens)


@pytest.mark.parametrize("chunk", [1, 50, 10_000])
def test_chunking_changes_nothing(chunk: int) -> None:
    w = world(AWKWARD)
    whole, cut = ours(w, 4), ours(w, 4, chunk=chunk)
    torch.testing.assert_close(whole.kl_sums, cut.kl_sums, rtol=1e-12, atol=0)
    for a, b in zip(gradients(w, whole.loss).values(), gradients(w, cut.loss).values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-13)


class _Largest(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Largest tensor made, by the size of its last axis."""

    def __init__(self, width: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.width, self.elements = width, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (list, tuple)) else (out,):
            if isinstance(tensor, torch.Tensor) and tensor.ndim and tensor.shape[-1] == self.width:
                self.elements = max(self.elements, tensor.numel())
        return out


def test_logits_of_more_than_a_chunk_are_never_held() -> None:
    w = world(SHAPES["packed, full response"] * 6)
    entries, steps, chunk = 0, 4, 300
    with _Largest(len(w.drafter.vocabulary)) as seen:
        result = ours(w, steps, chunk=chunk)
        torch.autograd.backward(result.loss)
    entries = sum(result.entries)
    assert entries * len(w.drafter.vocabulary) > 5 * chunk  # there was something to hold
    assert seen.elements <= chunk


def test_the_loss_is_zero_and_the_acceptance_is_the_covered_mass_when_q_is_the_target() -> None:
    """With q = p/m the acceptance is sum min(p, p/m) = m: the true one, not that of renormalised probabilities."""
    w = world(SHAPES["one document, half response"], temperature=1.3)
    u = unrolled(w, 1)
    target = draft_target(w.batch, u.plan, w.drafter.vocabulary, TargetHead(w.head), torch.float64)
    # rms(norm(pre)) is replaced by the target's own state: make the drafter's head see it through its norm.
    state = w.batch.last_hidden[u.rows[0] + 1]
    scale = state.pow(2).mean(-1, keepdim=True).sqrt()
    with torch.no_grad():
        w.drafter.norm.weight.fill_(1.0)
        w.drafter.lm_head.weight.copy_(w.head[w.drafter.vocabulary.ids])
    weights = w.drafter.weights()
    masses, kls = [], []
    for i in range(state.shape[0]):  # one row at a time, its length folded into the head
        one = replace(
            u,
            pre=(state[i : i + 1],),
            rows=(u.rows[0][i : i + 1],),
            weights=weights._replace(lm_head=weights.lm_head.detach() * scale[i]),
            plan=replace(
                u.plan,
                order=torch.zeros(1, dtype=torch.int64),
                target_index=torch.zeros(1, dtype=torch.int64),
                entry_step=torch.zeros(1, dtype=torch.int64),
                target_starts=(0, 1),
            ),
        )
        aimed = replace(target, hidden=state[i : i + 1], logsumexp=w.batch.logsumexp[u.rows[0][i : i + 1] + 1])
        result = draft_loss(w.drafter, one, aimed, denominator=1.0)
        kls.append(result.kl_sums.item())
        masses.append((result.acceptance_sums.item(), aimed.logprobs(0, 1, torch.float64).exp().sum().item()))
    assert max(abs(k) for k in kls) < 1e-6  # rms_norm's epsilon
    for acceptance, mass in masses:
        assert acceptance == pytest.approx(mass, abs=1e-5)
        assert mass < 0.999


def test_the_caller_divides_and_steps_decay() -> None:
    w = world(AWKWARD)
    a = ours(w, 3, decay=0.5, denominator=10.0)
    want = sum(0.5**j * kl for j, kl in enumerate(a.kl_sums.tolist())) / 10.0
    assert a.loss.item() == pytest.approx(want, rel=1e-12)
    assert a.kl_sums.tolist() == pytest.approx(expected(w, 3).kl, rel=1e-10)


def test_a_frozen_head_gets_no_gradient_and_changes_no_other() -> None:
    w = world(AWKWARD)
    whole = gradients(w, ours(w, 3).loss)
    w.drafter.lm_head.weight.requires_grad_(False)
    torch.autograd.backward(ours(w, 3).loss)
    assert w.drafter.lm_head.weight.grad is None
    for name, parameter in w.drafter.named_parameters():
        if name != "lm_head.weight":
            torch.testing.assert_close(parameter.grad, whole[name], rtol=1e-12, atol=0)


def test_without_gradients_the_figures_are_the_same() -> None:
    w = world(AWKWARD)
    with torch.no_grad():
        quiet = ours(w, 3)
    assert not quiet.loss.requires_grad
    assert torch.equal(quiet.kl_sums, ours(w, 3).kl_sums)


# --- the target's head ----------------------------------------------------------------------------------------------


def test_recomputed_logprobs_agree_with_those_logged() -> None:
    w = world(AWKWARD, temperature=0.7)
    gap, tokens = TargetHead(w.head).logprob_gap(cast(w.batch, torch.float32))
    assert tokens == w.batch.response_tokens
    assert gap < 1e-5


@pytest.mark.parametrize(
    "fault", ["stale head", "temperature", "shifted features", "shifted logprobs", "pre-norm state"]
)
def test_the_gap_shows_what_is_wrong_with_the_rollouts(fault: str) -> None:
    w = world(AWKWARD, temperature=0.7)
    batch, head = w.batch, w.head
    if fault == "stale head":
        head = head + 0.3 * torch.randn_like(head)
    elif fault == "temperature":
        batch = replace(batch, temperature=1.0)
    elif fault == "shifted features":
        batch = replace(batch, last_hidden=batch.last_hidden.roll(1, 0))
    elif fault == "shifted logprobs":
        batch = replace(batch, logprobs=batch.logprobs.roll(1, 0))
    else:
        batch = replace(batch, last_hidden=batch.last_hidden * 3.0)
    assert TargetHead(head).logprob_gap(batch)[0] > 0.1


def test_of_a_long_batch_tokens_all_over_it_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    w = world(AWKWARD)
    monkeypatch.setattr("drafter.policy._GAP_TOKENS", 4)
    honest, tokens = TargetHead(w.head).logprob_gap(w.batch)
    assert 3 <= tokens <= 4 < w.batch.response_tokens
    last = w.batch.logprobs.clone()
    last[w.batch.tokens // 2 :] -= 5.0
    assert TargetHead(w.head).logprob_gap(replace(w.batch, logprobs=last))[0] > honest + 1.0


@pytest.mark.parametrize(("top_p", "top_k"), [(0.7, 0), (1.0, 5), (0.8, 5), (1.0, 1), (0.0, 0), (0.999, 1000)])
def test_truncated_sampling_may_log_more_by_what_was_cut_off(top_p: float, top_k: int) -> None:
    w = world(AWKWARD, temperature=0.7)
    batch = cast(w.batch, torch.float32)
    said = batch.loss_mask.nonzero().flatten()
    law = ((batch.last_hidden[said - 1] @ w.head.T.float()) / 0.7).softmax(-1)
    logged = batch.logprobs.clone()
    for t, p in zip(said.tolist(), law, strict=True):  # the reference: one token after the other
        order = p.argsort(descending=True)[: top_k or VOCAB].tolist()
        mass = 0.0
        for token in order:
            mass += float(p[token])
            if mass >= top_p * float(p[order].sum()):
                break
        logged[t] -= math.log(mass)
    head = TargetHead(w.head.float())

    def gap(shift: float) -> float:
        return head.logprob_gap(replace(batch, top_p=top_p, top_k=top_k, logprobs=logged + shift))[0]

    assert gap(0.0) < 1e-4
    assert gap(0.5) == pytest.approx(0.5, abs=0.01), "invented: above what the truncated law gives"
    raw = head.logprob_gap(replace(batch, top_p=top_p, top_k=top_k))[0]  # a sender that logs the law before truncation
    assert raw < 1e-4
    assert head.logprob_gap(replace(batch, top_p=top_p, top_k=top_k, logprobs=batch.logprobs - 0.5))[0] > 0.4


def test_a_head_gives_the_rows_of_a_vocabulary_that_it_has() -> None:
    w = world(AWKWARD)
    vocabulary = DraftVocabulary(torch.tensor([2, 7, 16]), VOCAB)
    assert torch.equal(TargetHead(w.head).rows(vocabulary, dtype=torch.float64), w.head[[2, 7, 16]])
    with pytest.raises(TargetHeadError, match="1 of 3 draft tokens have no row"):
        TargetHead(w.head[:10]).rows(vocabulary)


def test_no_comparable_token_gives_nan_and_zero() -> None:
    w = world(AWKWARD)
    said = w.batch.input_ids.masked_fill(w.batch.loss_mask, VOCAB - 1)
    gap, tokens = TargetHead(w.head[:-1]).logprob_gap(replace(w.batch, input_ids=said))
    assert tokens == 0
    assert gap != gap


def test_heads_that_cannot_serve_are_refused() -> None:
    w = world(AWKWARD)
    plan = make_plan(w.batch.cu_seqlens, w.batch.loss_mask, 2)
    vocabulary = w.drafter.vocabulary
    with pytest.raises(TargetHeadError, match="NaN or infinity"):
        TargetHead(w.head * float("nan"))
    for empty in (w.head[:0], w.head[:, :0]):
        with pytest.raises(TargetHeadError, match="not empty"):
            TargetHead(empty)
    with pytest.raises(TargetHeadError, match="12 wide, the head 5"):
        draft_target(w.batch, plan, vocabulary, TargetHead(w.head[:, :5]))
