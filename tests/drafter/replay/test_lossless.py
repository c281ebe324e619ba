"""Whether engines emit what the policy would: by the tokens alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from helpers.drafter.decode_fixtures import EOS, default_target, log_rollouts, make_prompts, policy_of, schooled
from helpers.drafter.drafter_reference import reference_steps
from helpers.drafter.drafter_worlds import SHAPES, cast, mask_of, world
from torch import Tensor

import drafter.replay.lossless as lossless
import examples.reference.decode as decode
from drafter.batch import RolloutBatch
from drafter.policy import Policy, TargetHead
from drafter.replay.lossless import drafters_favour
from examples.reference.decode import generate


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_sums_are_those_of_their_definition(
    shape: str, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lossless, "_LOGITS_ELEMENTS_ON_CPU", 30)  # several chunks
    w = world(SHAPES[shape], temperature=temperature)
    exact, noise = w.batch.logprobs, torch.randn(w.batch.tokens, generator=torch.Generator().manual_seed(0))
    batch = replace(w.batch, logprobs=exact - noise.double())  # other weights drew the tokens
    weights = dict(w.drafter.named_parameters())
    kept = w.drafter.vocabulary.ids.tolist()
    documents = [cast(d, torch.float64) for d in w.documents]
    (first,) = reference_steps(weights, w.drafter.config, w.embed_tokens, kept, documents, 1, w.head, temperature)
    excess = variance = 0.0
    known = 0
    for row, z in zip(first.rows, first.logits, strict=True):
        token = int(w.batch.input_ids[row + 2])
        if token in kept and w.batch.loss_mask[row + 1]:  # else it was drawn without a draft
            q = (z / temperature).softmax(-1)
            p = (w.head[kept] @ w.batch.last_hidden[row + 1] / temperature).softmax(-1)
            off = float(q[kept.index(token)] - p @ q)
            odds = min(math.exp(float(noise[row + 2])), 10.0)
            excess += odds * off
            variance += float(p @ q**2 - (p @ q) ** 2) + (odds**2 - odds) * off**2
            known += 1
    found = drafters_favour(w.drafter, batch, w.policy)
    assert found is not None
    assert found.tokens == known > 0
    assert found.excess == pytest.approx(excess, rel=1e-5)
    assert found.variance == pytest.approx(variance, rel=1e-5)


def test_nothing_is_said_where_the_law_is_not_known() -> None:
    w = world(SHAPES["packed, full response"])
    assert drafters_favour(w.drafter, replace(w.batch, top_k=5), w.policy) is None
    assert drafters_favour(w.drafter, replace(w.batch, temperature=0.0), w.policy) is None
    assert drafters_favour(w.drafter, w.batch, Policy(0, w.embed_tokens)) is None
    broken = replace(w.batch, last_hidden=torch.full_like(w.batch.last_hidden, math.nan))
    assert drafters_favour(w.drafter, broken, w.policy) is None


@pytest.mark.parametrize("lengths", [(30, 30, 30, 30), (100,), (9, 9, 9, 100, 9, 9), (100, 9, 9)])
def test_of_long_batches_evenly_spaced_rollouts_are_looked_at(
    lengths: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    w = world(tuple(mask_of(length, 1) for length in lengths))
    monkeypatch.setattr(lossless, "_TOKENS", 40)
    step, seen = math.ceil(sum(lengths) / 40), set[int]()
    for version in range(12):
        some = w.batch.select(replace(w.batch, policy_version=version).places_of_some(40))
        places = range(len(lengths))[version % min(step, len(lengths)) :: step]
        assert some.cu_seqlens.diff().tolist() == [lengths[place] for place in places], "their lengths have no say"
        seen.update(places)
    assert seen == {*range(len(lengths))}, "none is always left out"
    assert drafters_favour(w.drafter, w.batch, w.policy) is not None


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
def test_a_sampler_that_is_not_lossless_is_seen_in_the_tokens(verify: Verify, biased: bool) -> None:
    tilt, z = tilt_of(drawn(verify))
    assert (z > 4) if biased else abs(z) < 3.5, (tilt, z)


@pytest.mark.parametrize(("verify", "biased"), [(REAL, False), (lax, True), (no_residual, True)])
def test_that_older_weights_drew_the_tokens_is_no_bias_and_hides_none(verify: Verify, *, biased: bool) -> None:
    """An asynchronous trainer sends features of newer weights, and the sampler's own log-probabilities."""
    newer = TargetHead(policy_of(default_target()).needed_head().lm_head * 0.85)
    late = [newer.normalise(replace(batch, normalised=False)) for batch in drawn(verify)]
    tilt, z = tilt_of(late, of_policy=lambda policy: replace(policy, head=newer))
    assert (z > 4) if biased else abs(z) < 3.5, (tilt, z)
    recomputed = [replace(batch, logprobs=newer.token_logprobs(batch).nan_to_num()) for batch in late]
    assert tilt_of(recomputed, of_policy=lambda policy: replace(policy, head=newer))[1] > 4, "so they must send them"


def test_a_log_probability_that_makes_no_sense_does_not_outweigh_the_other_tokens() -> None:
    batches = [replace(batch, logprobs=batch.logprobs.clone()) for batch in drawn(REAL)]
    for batch in batches:
        batch.logprobs[torch.nonzero(batch.loss_mask).flatten()[::1000]] = -100.0
    tilt, z = tilt_of(batches)
    assert abs(z) < 3.5, (tilt, z)


def shifted(batch: RolloutBatch) -> RolloutBatch:
    return replace(batch, logsumexp=batch.logsumexp + 0.05)


def rounded(batch: RolloutBatch) -> RolloutBatch:
    return replace(
        batch, last_hidden=batch.last_hidden.bfloat16().float(), aux_hidden=batch.aux_hidden.bfloat16().float()
    )


def scaled(policy: Policy) -> Policy:
    return replace(policy, head=TargetHead(policy.needed_head().lm_head * 1.005))


def moved(policy: Policy) -> Policy:
    head = policy.needed_head().lm_head
    noise = torch.randn(head.shape, generator=torch.Generator().manual_seed(0))
    return replace(policy, head=TargetHead(head + 0.005 * noise * head.norm() / noise.norm()))


@pytest.mark.parametrize("inexact", [shifted, rounded, scaled, moved], ids=lambda x: x.__name__)
def test_what_rounding_and_a_head_of_half_a_per_cent_off_do_is_no_bias(inexact: Any) -> None:
    """The hook sends a head again once it has moved by half a per cent; features travel in bfloat16."""
    of_policy = inexact in (scaled, moved)
    exact, _ = tilt_of(drawn(REAL))
    found, _ = tilt_of(drawn(REAL), **{"of_policy" if of_policy else "of_batch": inexact})
    assert abs(found - exact) < 0.05


@cache
def drawn(verify: Verify) -> tuple[RolloutBatch, ...]:
    """What an engine that verifies like this draws."""
    target, drafter = default_target(), schooled()
    batches = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode, "verify_chain", verify)
        for seed in range(2):
            asked = make_prompts(256, 64, seed=seed)
            generator = torch.Generator().manual_seed(seed)
            made = generate(target, drafter, asked, max_tokens=24, eos_id=EOS, generator=generator)
            batches.append(log_rollouts(target, asked, made))
    return tuple(batches)


def tilt_of(
    batches: Sequence[RolloutBatch],
    *,
    of_batch: Callable[[RolloutBatch], RolloutBatch] = lambda batch: batch,
    of_policy: Callable[[Policy], Policy] = lambda policy: policy,
) -> tuple[float, float]:
    """λ, and how many standard errors that is."""
    target, drafter = default_target(), schooled()
    excess = variance = 0.0
    for batch in batches:
        found = drafters_favour(drafter, of_batch(batch), of_policy(policy_of(target)))
        assert found is not None
        excess, variance = excess + found.excess, variance + found.variance
    return excess / variance, excess / math.sqrt(variance)
