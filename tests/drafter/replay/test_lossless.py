"""Whether engines emit what the policy would: by the tokens alone."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from decode_fixtures import EOS, log_rollouts, make_drafter, make_prompts, make_target, policy_of, train_lightly
from drafter_reference import reference_steps
from drafter_worlds import SHAPES, cast, world
from torch import Tensor

import drafter.reference.decode as decode
import drafter.replay.lossless as lossless
from drafter.model.eagle3 import Eagle3Drafter
from drafter.policy import Policy, TargetHead
from drafter.reference.decode import generate
from drafter.replay.lossless import drafters_favour


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_sums_are_those_of_their_definition(
    shape: str, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lossless, "_LOGITS_ELEMENTS", 30)  # several chunks
    w = world(SHAPES[shape], temperature=temperature)
    weights = dict(w.drafter.named_parameters())
    kept = w.drafter.vocabulary.ids.tolist()
    documents = [cast(d, torch.float64) for d in w.documents]
    (first,) = reference_steps(weights, w.drafter.config, w.embed_tokens, kept, documents, 1, w.head, temperature)
    excess = variance = 0.0
    for row, z in zip(first.rows, first.logits, strict=True):
        q = torch.zeros(len(w.head), dtype=torch.float64)
        q[kept] = (z / temperature).softmax(-1)
        p = (w.head @ w.batch.last_hidden[row + 1] / temperature).softmax(-1)
        excess += float(q[w.batch.input_ids[row + 2]] - p @ q)
        variance += float(p @ q**2 - (p @ q) ** 2)
    found = drafters_favour(w.drafter, w.batch, w.policy)
    assert found is not None
    assert found.tokens == len(first.rows)
    assert found.excess == pytest.approx(excess, rel=1e-5)
    assert found.variance == pytest.approx(variance, rel=1e-5)


def test_nothing_is_said_where_the_law_is_not_known() -> None:
    w = world(SHAPES["packed, full response"])
    assert drafters_favour(w.drafter, replace(w.batch, warped=True), w.policy) is None
    assert drafters_favour(w.drafter, replace(w.batch, temperature=0.0), w.policy) is None
    assert drafters_favour(w.drafter, w.batch, Policy(0, w.embed_tokens)) is None
    few = TargetHead(w.head[:2], ids=torch.tensor([0, 1]))
    assert drafters_favour(w.drafter, w.batch, Policy(0, w.embed_tokens, few)) is None
    broken = replace(w.batch, last_hidden=torch.full_like(w.batch.last_hidden, math.nan))
    assert drafters_favour(w.drafter, broken, w.policy) is None


def test_of_long_batches_some_rollouts_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    w = world(SHAPES["packed, full response"])
    whole = drafters_favour(w.drafter, w.batch, w.policy)
    monkeypatch.setattr(lossless, "_TOKENS", w.batch.tokens // 2)
    part = drafters_favour(w.drafter, w.batch, w.policy)
    assert whole is not None
    assert part is not None
    assert 0 < part.tokens < whole.tokens
    monkeypatch.setattr(lossless, "_TOKENS", 1)
    assert drafters_favour(w.drafter, w.batch, w.policy) is not None


@cache
def trained() -> tuple[Any, Eagle3Drafter]:
    """A policy, and a drafter that knows something of it."""
    target = make_target()
    prompts = make_prompts(60, 64, seed=9)
    made = generate(target, None, prompts, max_tokens=20, generator=torch.Generator().manual_seed(9))
    return target, train_lightly(target, make_drafter(target, 56), log_rollouts(target, prompts, made), steps=25)


REAL = decode.verify_chain
Verify = Callable[..., tuple[Tensor, Tensor]]


def lax(p: Tensor, q: Tensor, drafts: Tensor, *, generator: torch.Generator, **more: Any) -> tuple[Tensor, Tensor]:
    """Accept whatever the policy gives a tenth to: "typical acceptance"."""
    likely = p[:, :-1].exp().gather(2, drafts[:, :, None])[:, :, 0] > 0.1
    accepted = likely.long().cumprod(1).sum(1)
    return accepted, torch.multinomial(p[torch.arange(len(p)), accepted].exp(), 1, generator=generator)[:, 0]


def no_residual(
    p: Tensor, q: Tensor, drafts: Tensor, *, generator: torch.Generator, **more: Any
) -> tuple[Tensor, Tensor]:
    """Accept rightly, and draw what takes a rejected draft's place from p itself."""
    accepted, _ = REAL(p, q, drafts, generator=generator, **more)
    return accepted, torch.multinomial(p[torch.arange(len(p)), accepted].exp(), 1, generator=generator)[:, 0]


def colder(p: Tensor, q: Tensor, drafts: Tensor, **more: Any) -> tuple[Tensor, Tensor]:
    """The engine samples at temperature 0.8, the rollouts say 1."""
    return REAL((p / 0.8).log_softmax(-1), q, drafts, **more)


@pytest.mark.parametrize(
    ("verify", "biased"),
    [(REAL, False), (lax, True), (no_residual, True), (colder, True)],
    ids=lambda x: getattr(x, "__name__", x),
)
def test_a_sampler_that_is_not_lossless_is_seen_in_the_tokens(
    verify: Verify, biased: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode, "verify_chain", verify)
    target, drafter = trained()
    excess = variance = 0.0
    for seed in range(2):
        asked = make_prompts(256, 64, seed=seed)
        generator = torch.Generator().manual_seed(seed)
        made = generate(target, drafter, asked, max_tokens=24, eos_id=EOS, generator=generator)
        found = drafters_favour(drafter, log_rollouts(target, asked, made), policy_of(target))
        assert found is not None
        excess, variance = excess + found.excess, variance + found.variance
    z = excess / math.sqrt(variance)
    assert (z > 5) if biased else abs(z) < 3.5, z
