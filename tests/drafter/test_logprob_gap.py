"""The check of log-probabilities under truncated sampling, in worlds that its limit was not tuned on.

Heads of three sharpnesses, of this policy version or 0.5 % off, states rounded to bfloat16 or 0.4 % off as well, two
temperatures, seven truncations. Honest batches must live; those whose log-probabilities were raised by 0.4 nats and
more on average must die.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import Tensor

import drafter.policy
from drafter.batch import RolloutBatch
from drafter.policy import Policy, TargetHead
from drafter.training.ranks import ALONE
from service.settings import Settings
from service.worker.scoring import ScoreOrder, SharedScore, score, score_shared

VOCAB, HIDDEN, ROLLOUTS, TOKENS = 1000, 64, 8, 65
TRUNCATIONS = ((1.0, 0), (0.95, 0), (0.7, 0), (0.3, 0), (1.0, 50), (1.0, 5), (0.9, 20))  # top_p, top_k
LIMIT_NATS = Settings.model_fields["logprob_gap_nats"].default
Truncation = tuple[float, int]


def kept(p: Tensor, top_p: float, top_k: int) -> Tensor:
    """The law f32[N, V] that sampling leaves of p f32[N, V]; not normalised."""
    sorted_p, order = p.sort(-1, descending=True)
    if top_k:
        sorted_p = torch.where(torch.arange(p.shape[1]) < top_k, sorted_p, 0.0)
    share = sorted_p / sorted_p.sum(-1, keepdim=True)
    sorted_p = torch.where(share.cumsum(-1) - share < top_p, sorted_p, 0.0)
    return torch.zeros_like(p).scatter_(1, order, sorted_p)


def drawn(
    seed: int, sharpness: float, drift: float, noise: float, temperature: float, truncation: Truncation
) -> tuple[TargetHead, RolloutBatch, Tensor]:
    """A head as the service has it, an honest batch, and log p of its tokens before truncation, f32[N]."""
    random = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random)

    head = normal(VOCAB, HIDDEN) * sharpness / math.sqrt(HIDDEN)
    engines = head * (1 + drift * normal(VOCAB, 1)) + drift * normal(VOCAB, HIDDEN) * sharpness / math.sqrt(HIDDEN)
    N = ROLLOUTS * TOKENS
    hidden = normal(N, HIDDEN)
    logits = hidden @ engines.T / temperature
    left = kept(logits.softmax(-1), *truncation)
    said = torch.multinomial(left, 1, generator=random)  # [N, 1], drawn by row t - 1
    ids, logged, raw = torch.zeros(N, dtype=torch.int64), torch.zeros(N), torch.zeros(N)
    ids[1:] = said[:-1, 0]
    raw[1:] = logits.log_softmax(-1).gather(1, said)[:-1, 0]
    logged[1:] = (left / left.sum(-1, keepdim=True)).log().gather(1, said)[:-1, 0]
    starts = torch.arange(0, N + 1, TOKENS)
    mask = torch.ones(N, dtype=torch.bool)
    mask[starts[:-1]] = False
    batch = RolloutBatch(
        input_ids=ids,
        cu_seqlens=starts,
        loss_mask=mask,
        aux_hidden=torch.zeros(N, HIDDEN, dtype=torch.bfloat16),
        logprobs=logged,
        last_hidden=(hidden * (1 + noise * normal(N, HIDDEN))).bfloat16(),
        logsumexp=logits.logsumexp(-1),
        temperature=temperature,
        top_p=truncation[0],
        top_k=truncation[1],
        rollout_ids=tuple(map(str, range(ROLLOUTS))),
        aux_layers=(0,),
    )
    return TargetHead(head.bfloat16()), batch, raw


@pytest.mark.parametrize("truncation", TRUNCATIONS)
def test_honest_log_probabilities_live_and_raised_ones_die(
    truncation: Truncation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drafter.policy, "_UNFORESEEN", random.Random(0))
    honest, kept_lies, lies = [], [], 0
    worlds = product((1.0, 3.0, 8.0), (0.0, 0.005), (0.0, 0.004), (0.7, 1.0))  # sharpness, drift, noise, temperature
    for seed, world in enumerate(worlds):
        head, batch, raw = drawn(seed, *world, truncation)
        logged, said = batch.logprobs, batch.loss_mask
        honest += [head.logprob_gap(batch)[0], head.logprob_gap(replace(batch, logprobs=raw))[0]]
        half = torch.rand(len(logged), generator=torch.Generator().manual_seed(seed)) < 0.5
        for lie in (
            torch.zeros_like(logged),  # certain of each token
            torch.where(half, 0.0, logged),
            (logged + 0.5).clamp(max=0.0),
            0.6 * logged,  # of another temperature
        ):
            if float((lie - logged)[said].mean()) >= 0.4:
                lies += 1
                kept_lies += [world] * (head.logprob_gap(replace(batch, logprobs=lie))[0] <= LIMIT_NATS)
    assert max(honest) <= LIMIT_NATS, "0 of 48 honest batches die"
    assert lies >= 15, "the worlds must be able to lie"
    assert len(kept_lies) <= 0.02 * lies, f"{kept_lies} of {lies} lies"


@pytest.mark.parametrize("truncation", TRUNCATIONS)
def test_a_normaliser_that_moves_with_the_log_probabilities_does_not_hide_them(truncation: Truncation) -> None:
    """Log p = logit - logsumexp: a sender that shifts both agrees with itself, and not with the head."""
    for seed, sharpness in enumerate((1.0, 3.0, 8.0)):
        head, batch, raw = drawn(seed, sharpness, 0.005, 0.004, 0.7, truncation)
        for shift in (-2.0, 0.4, 2.0, 50.0):
            lie = replace(batch, logprobs=raw - shift, logsumexp=batch.logsumexp + shift)
            assert head.logprob_gap(lie, LIMIT_NATS)[0] > LIMIT_NATS, (sharpness, shift)


def moved_together(head: TargetHead, batch: RolloutBatch, generator: torch.Generator) -> tuple[TargetHead, Tensor]:
    """The sender's head has moved by one vector in every row, 0.5 % of them: no log p does, but every logsumexp."""
    moved = torch.randn(HIDDEN, generator=generator)
    moved *= 0.005 * head.lm_head.norm(dim=1).mean() / moved.norm()
    return head, batch.logsumexp + batch.last_hidden.float() @ moved / batch.divisor


def logits_in_bfloat16(head: TargetHead, batch: RolloutBatch, _: torch.Generator) -> tuple[TargetHead, Tensor]:
    """The sender rounds its logits."""
    weight = head.lm_head.bfloat16()
    return TargetHead(weight), ((batch.last_hidden @ weight.T).float() / batch.divisor).logsumexp(-1)


@pytest.mark.parametrize("temperature", [0.3, 0.7, 1.0])
def test_an_honest_normaliser_that_is_a_little_off_lives(temperature: float) -> None:
    """At a temperature of 0.1 a third of these die: what is off is divided by it."""
    for seed, sharpness, truncation in product(range(2), (1.0, 3.0, 8.0), TRUNCATIONS):
        drawn_head, batch, _ = drawn(seed, sharpness, 0.0, 0.0, temperature, truncation)
        for world in (moved_together, logits_in_bfloat16):
            held, logsumexp = world(drawn_head, batch, torch.Generator().manual_seed(seed + 99))
            assert held.logprob_gap(replace(batch, logsumexp=logsumexp), LIMIT_NATS)[0] <= LIMIT_NATS, world.__name__


@pytest.mark.parametrize("limit", [0.0, LIMIT_NATS])
def test_what_a_product_in_bfloat16_rounds_kills_no_batch(limit: float) -> None:
    """The sender had float32. At a low temperature the product is off by more than the limit."""
    _, batch, _ = drawn(0, 8.0, 0.0, 0.0, 0.03, TRUNCATIONS[0])
    weight = drawn(0, 8.0, 0.0, 0.0, 0.03, TRUNCATIONS[0])[0].lm_head.bfloat16()
    logits = batch.last_hidden.float() @ weight.float().T / batch.divisor
    rounded = (batch.last_hidden @ weight.T).float() / batch.divisor
    assert (rounded.logsumexp(-1) - logits.logsumexp(-1)).abs().mean() > LIMIT_NATS
    logged = batch.logprobs.clone()
    logged[1:] = logits.log_softmax(-1)[:-1].gather(1, batch.input_ids[1:, None])[:, 0]
    honest = replace(batch, logprobs=logged, logsumexp=logits.logsumexp(-1))
    assert TargetHead(weight).logprob_gap(honest, limit)[0] < 1e-3


@pytest.mark.parametrize("truncation", [(0.9, 0), (1.0, 5)])
def test_lowered_log_probabilities_die(truncation: Truncation) -> None:
    head, batch, _ = drawn(0, 3.0, 0.0, 0.0, 1.0, truncation)
    assert head.logprob_gap(replace(batch, logprobs=batch.logprobs - 50.0))[0] > LIMIT_NATS


def test_a_sender_that_is_honest_on_some_tokens_only_does_not_know_which_are_looked_at() -> None:
    """Honest on 32 evenly spaced tokens, and certain of all others."""
    head, batch, _ = drawn(0, 1.0, 0.0, 0.0, 1.0, (0.9, 0))
    said = batch.loss_mask.nonzero().flatten()
    honest = said[:: math.ceil(len(said) / 32)]
    logged = torch.zeros_like(batch.logprobs)
    logged[honest] = batch.logprobs[honest]
    assert min(head.logprob_gap(replace(batch, logprobs=logged))[0] for _ in range(5)) > LIMIT_NATS


def test_a_head_two_per_cent_off_is_found_where_the_policy_is_sharp() -> None:
    head, batch, _ = drawn(0, 8.0, 0.02, 0.0, 1.0, (0.9, 20))
    assert head.logprob_gap(batch)[0] > LIMIT_NATS


def test_a_token_is_weighed_by_what_the_head_gives_it_over_what_it_was_drawn_with() -> None:
    head, batch, _ = drawn(3, 3.0, 0.0, 0.0, 0.8, (1.0, 0))
    newer = TargetHead(head.lm_head * 1.05)
    late = newer.normalise(replace(batch, normalised=False))
    weighed = newer.weighed(late)
    assert weighed.log_weights is not None
    expected = (newer.token_logprobs(late) - late.logprobs)[late.loss_mask].clamp(max=math.log(10.0))
    torch.testing.assert_close(weighed.log_weights[late.loss_mask], expected)
    assert not weighed.log_weights[~late.loss_mask].any()
    assert float(weighed.log_weights[late.loss_mask].double().exp().mean()) == pytest.approx(1.0, abs=0.05)
    assert weighed.select([2, 0]).log_weights is not None, "a part of a batch is weighed as well"
    low = newer.weighed(replace(late, logprobs=late.logprobs - 50.0)).log_weights
    assert low is not None
    assert float(low.max()) == pytest.approx(math.log(10.0)), "one senseless log-probability outweighs no others"


@pytest.mark.parametrize("sampling", [{"top_p": 0.9}, {"top_k": 5}, {"temperature": 0.0}])
def test_where_the_law_is_not_known_nothing_is_weighed(sampling: dict[str, float]) -> None:
    head, batch, _ = drawn(3, 3.0, 0.0, 0.0, 1.0, (1.0, 0))
    other = replace(batch, **sampling)  # type: ignore[arg-type]
    assert head.weighed(other).log_weights is None


@pytest.mark.parametrize(("scale", "others"), [(1.0, False), (1.003, False), (1.05, True), (0.93, True)])
def test_what_others_drew_is_weighed_when_it_is_scored(scale: float, *, others: bool) -> None:
    head, batch, _ = drawn(3, 3.0, 0.0, 0.0, 1.0, (1.0, 0))
    now = TargetHead(head.lm_head * scale)
    late = now.normalise(replace(batch, normalised=False))
    order = ScoreOrder(range(late.rollouts), 0, 3, "probabilistic", LIMIT_NATS, None)
    found = score_shared(ALONE, {}, Policy(0, torch.zeros(VOCAB, HIDDEN), now), late, order)
    assert found.gap is not None
    assert (found.gap > 0.02) == others
    for one in (found.batch, found.part):
        assert (one.log_weights is not None) == others


def aged(world: str, seed: int, off: float) -> tuple[TargetHead, RolloutBatch]:
    """The service's head and a batch. *Older*: weights that are `off` drew all, half or some; *wrong*: the head is."""
    newest, batch, _ = drawn(seed, 3.0, 0.0, 0.0, 1.0, (1.0, 0))
    head = TargetHead((newest.lm_head.float() * (1 + off)).bfloat16())
    late = head.normalise(replace(batch, normalised=False))  # what `newest` drew, beside the features of `head`
    own, _ = torch.tensor_split(torch.arange(ROLLOUTS), 2)
    mine = late.loss_mask & torch.isin(late.rollout_of, own)
    said = late.loss_mask
    if world in ("older, untold", "wrong, untold"):
        return head, late
    if world == "older":
        return head, replace(late, older=said)
    if world == "wrong":
        return head, replace(late, older=torch.zeros_like(said))
    if world == "mixed":  # half was drawn by the head's own law: its log-probabilities are the head's, rounded
        recomputed = head.token_logprobs(late, mine)
        return head, replace(late, older=said & ~mine, logprobs=torch.where(mine, recomputed - 0.005, late.logprobs))
    return head, replace(late, older=said & ~mine)  # "wrong and mixed": the newest ones are as far off


def scored(head: TargetHead, batch: RolloutBatch) -> SharedScore:
    order = ScoreOrder(range(batch.rollouts), 0, 3, "probabilistic", LIMIT_NATS, None)
    return score_shared(ALONE, {}, Policy(0, torch.zeros(VOCAB, HIDDEN), head), batch, order)


@pytest.mark.parametrize("off", [0.04, 0.07, -0.06])
@pytest.mark.parametrize(
    ("world", "weighed", "named"),
    [
        ("older", True, False),
        ("older, untold", True, False),
        ("wrong", False, True),
        ("wrong, untold", True, False),  # nothing tells these two apart
        ("mixed", True, False),
        ("wrong and mixed", False, True),
    ],
)
def test_only_what_older_weights_drew_is_weighed(world: str, off: float, *, weighed: bool, named: bool) -> None:
    for seed in range(4):
        head, batch = aged(world, seed, off)
        found = scored(head, batch)
        assert found.gap is not None
        assert (found.batch.log_weights is not None) == weighed, (seed, found.gap, found.newest_gap)
        assert (found.newest_gap is not None and found.newest_gap > 0.02) == named
        assert score({}, found).record.newest_gap == found.newest_gap
        weights = found.batch.log_weights
        if weights is not None and batch.older is not None:
            assert not weights[~batch.older].any(), "what the newest weights drew weighs 1"
            assert weights[batch.older].abs().mean() > 0.02


def test_few_tokens_of_the_newest_weights_tell_nothing() -> None:
    """One in a hundred may be far off where nothing is wrong."""
    head, batch = aged("older", 0, 0.07)
    said = torch.nonzero(batch.loss_mask).flatten()
    for newest, weighed in ((31, True), (32, False)):
        older = batch.loss_mask.clone()
        older[said[:newest]] = False
        found = scored(head, replace(batch, older=older))
        assert (found.newest_gap is None, found.batch.log_weights is not None) == (weighed, weighed)


@pytest.mark.parametrize("sampling", [{"top_p": 0.9}, {"top_k": 5}, {"temperature": 0.0}])
def test_where_the_law_is_not_known_no_age_has_a_gap(sampling: dict[str, float]) -> None:
    head, batch = aged("wrong", 0, 0.05)
    assert head.gaps_by_age(replace(batch, **sampling)) == (None, None)  # type: ignore[arg-type]


def honest_claims(seed: int) -> Iterator[tuple[TargetHead, RolloutBatch]]:
    """Claims that older weights drew, by three sharpnesses, two temperatures, and ways and sizes of a policy's move."""
    for sharpness, temperature in product((1.0, 3.0, 8.0), (0.7, 1.0)):
        older, batch, _ = drawn(seed, sharpness, 0.0, 0.0, temperature, (1.0, 0))
        generator, weight = torch.Generator().manual_seed(seed + 7), older.lm_head.float()
        for size in (0.01, 0.03, 0.06, 0.12):
            noise = size * torch.randn(weight.shape, generator=generator) * sharpness / math.sqrt(HIDDEN)
            by_row = 1 + 2 * size * torch.randn(VOCAB, 1, generator=generator)
            for moved in (weight * (1 + size * (-1) ** (seed + 1)), weight + noise, weight * by_row):
                head = TargetHead(moved.bfloat16())
                for rollouts in (1, 3, 8):
                    late = head.normalise(replace(batch.select(range(rollouts)), normalised=False))
                    if 0.02 < head.logprob_gap(late)[0] < LIMIT_NATS:
                        yield head, late


def test_honest_log_probabilities_of_older_weights_are_weights() -> None:
    """On seeds that the limits were not set by; 1000 to 1033 too, by hand: 0 of 4,891 claims were said to be wrong."""
    claims = [scored(*one) for one in honest_claims(2000)]
    assert len(claims) >= 100
    assert not [found.mean_weight for found in claims if found.mean_weight]
    assert all(found.batch.log_weights is not None for found in claims)


@pytest.mark.parametrize("world", ["older, untold", "older", "mixed"])
@pytest.mark.parametrize("form", ["too low", "too high", "one kind", "of a colder law"])
def test_log_probabilities_of_another_law_than_drew_the_tokens_are_moved(world: str, form: str) -> None:
    head, batch = aged(world, 0, 0.02)
    logged = batch.logprobs
    lie = {
        "too low": logged - 0.15,
        "too high": (logged + 0.15).clamp(max=0.0),
        "one kind": logged - 0.3 * (batch.input_ids % 2),
        "of a colder law": 0.95 * logged,
    }[form]
    wrong = batch.loss_mask if batch.older is None else batch.older
    sent = replace(batch, logprobs=torch.where(wrong, lie, logged))
    found, honest = scored(head, sent), scored(head, batch)
    assert (found.mean_weight is not None, honest.mean_weight) == (True, None)
    assert found.mean_weight == pytest.approx(float(weights_of(head.weighed(sent))[wrong].mean()), rel=1e-6)
    assert score({}, found).record.mean_weight == found.mean_weight
    assert weights_of(found.batch)[wrong].mean() == pytest.approx(1.0, abs=1e-3)
    assert torch.equal(found.batch.logprobs[~wrong], logged[~wrong])
    if form == "too low":  # a number is known but for what the mean weight of the honest ones is off
        torch.testing.assert_close(found.batch.logprobs[wrong], logged[wrong], atol=0.03, rtol=0.0)


def weights_of(batch: RolloutBatch) -> Tensor:
    assert batch.log_weights is not None
    return batch.log_weights.double().exp()
