"""Does the gate publish a worse drafter where a trainer's log-probabilities are wrong. Simulated; seeded.

    python -m benchmarks.poisoned [--runs 6] [--seed 0] [--as-sent]

A policy of 32 tokens, each of which depends on the one before. Older weights drew the rollouts of an asynchronous run,
the features' own weights those of a synchronous one, and the trainer logs their log-probabilities in one of the forms
below, by as much as it still takes. A claim goes through the shipped check (`score_shared`), the shipped
recursion and the shipped `Trial`, 30 looks at most. True α is that of live decoding under the features' policy, of the
chain's stationary law. The table says how often a candidate that is truly worse was published, how often one that is
better, after how many looks (median), how far the measured gain of both was off, and in how many claims the
log-probabilities were used as weights, and were moved (`mean_weight`). `--as-sent`: by the rule that moved none.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor

import service.worker.scoring
from drafter.batch import RolloutBatch
from drafter.errors import BatchRejected
from drafter.policy import Policy, TargetHead
from drafter.replay.acceptance import Replay, find_segments, replay_rounds
from drafter.replay.gate import Trial, compare
from drafter.training.ranks import ALONE
from service.settings import Settings
from service.worker.scoring import ScoreOrder, score_shared

AGES: Final = (0.0, 0.2)  # by which the policy's logits moved since tokens were drawn: a gap of 0 and 0.13 nats
LOSS: Final = 0.01  # of the worse drafter's true α
GAIN: Final = 0.03  # of the better one's
VOCAB, DEPTH, PROMPTS, SIBLINGS, TOKENS, LOOKS = 32, 4, 8, 4, 48, 30
MOST_GAP: Final = 0.23  # nats; a batch dies at 0.25
Law = Tensor  # f32[V, V]: log-probability of a token after another one


@dataclass(frozen=True)
class World:
    """Laws of the policy, of what drew the tokens, and of three drafters: one that serves, a worse and a better one."""

    policy: Law
    drew: Law
    before: Law  # an older policy than the one that drew
    served: Law
    worse: Law
    fits_older: Law  # worse, too: it has learnt what the older weights had
    better: Law


def world(seed: int, age: float) -> World:
    """`age`: deviation of the logits by which the policy moved since tokens were drawn; 0: a synchronous run."""
    random = torch.Generator().manual_seed(seed)

    def moved(logits: Tensor, by: float) -> Tensor:
        return logits + by * torch.randn(VOCAB, VOCAB, generator=random)

    before = moved(torch.zeros(VOCAB, VOCAB), 2.0)
    drew = moved(before, age or 0.3)
    policy = moved(drew, age)
    served, aside = moved(policy, 0.9), torch.randn(VOCAB, VOCAB, generator=random)
    worse = _as_good_as(policy, served, served + aside, -LOSS)
    fits_older = _as_good_as(policy, served, served + (drew - policy), -LOSS) if age else worse
    better = _as_good_as(policy, served, policy, GAIN)
    laws = policy, drew, before, served, worse, fits_older, better
    return World(*(one.log_softmax(-1) for one in laws))


def _as_good_as(policy: Tensor, served: Tensor, towards: Tensor, gain: float) -> Tensor:
    """Logits on the way from one drafter to another at which true α has changed by this."""
    first = alpha(policy.log_softmax(-1), served.log_softmax(-1))
    for part in np.linspace(0.0, 6.0, 301):
        logits = served + float(part) * (towards - served)
        found = alpha(policy.log_softmax(-1), logits.log_softmax(-1)) / first - 1.0
        if part and (found >= gain if gain > 0 else found <= gain):
            return logits
    raise ValueError(f"expected a drafter with a gain of {gain} on the way, found none")


def alpha(policy: Law, drafter: Law) -> float:
    """α of live decoding in the long run, exact: by the chain of the tokens at which rounds begin."""
    p, q = policy.double().exp(), drafter.double().exp()
    accepted = torch.minimum(p, q)
    reached, ends, emitted = torch.eye(VOCAB, dtype=torch.float64), torch.zeros_like(p), torch.zeros_like(p[0])
    for _ in range(DEPTH):
        ends, emitted = ends + reached @ (p - accepted), emitted + reached.sum(-1)
        reached = reached @ accepted
    ends, emitted = ends + reached @ p, emitted + reached.sum(-1)
    begins = torch.linalg.matrix_power(ends, 1 << 12)[0]
    return float(begins @ emitted)


#: Larger or smaller by as much as the worker takes, or by a quarter of that,
SCALED: Final = ("all too low", "all too high", "one kind too low", "one kind too high", "one low, the rest high")
#: or as large as they are.
FORMS: Final = (
    "honest", *SCALED, "a tenth shuffled", "none below -3", "temperature 1.2", "temperature 0.85", "older weights",
)  # fmt: skip


def wrong(form: str, world: World, before: Tensor, said: Tensor, honest: Tensor, random: torch.Generator) -> Tensor:
    """What a trainer logs, less what it should have logged, f32[T].

    One kind of tokens: those that the worse drafter proposes more often than the served one, as an attacker would
    choose them. With the rest high the mean stays what it was, for an attacker who knows the rule.
    """
    kind = (world.worse[before, said] > world.served[before, said]).float()
    match form.split():
        case ["all", "too", way]:
            return torch.full_like(honest, -1.0 if way == "low" else 1.0)
        case ["one", "kind", "too", way]:
            return -kind if way == "low" else kind
        case ["one", *_]:
            return torch.where(kind > 0, -1.0, kind.mean() / (1.0 - kind.mean()))
        case ["a", *_]:
            some = torch.rand(len(honest), generator=random) < 0.1
            return torch.where(some, honest[torch.randperm(len(honest), generator=random)] - honest, 0.0)
        case ["none", *_]:
            return honest.clamp(min=-3.0) - honest
        case ["temperature", told]:
            return (world.drew / float(told)).log_softmax(-1)[before, said] - honest
        case ["older", _]:
            return world.before[before, said] - honest
    return torch.zeros_like(honest)


def claim(world: World, form: str, share: float, random: torch.Generator) -> tuple[RolloutBatch, Tensor, Tensor]:
    """A batch, and of each of its rows the token before and the token."""
    R, N = PROMPTS * SIBLINGS, TOKENS + 1
    ids = torch.randint(VOCAB, (R, N), generator=random)
    for t in range(1, N):
        ids[:, t] = torch.multinomial(world.drew[ids[:, t - 1]].exp(), 1, generator=random)[:, 0]
    before, said = ids.roll(1, 1).flatten(), ids.flatten()
    honest = world.drew[before, said]
    change, gap = wrong(form, world, before, said, honest, random), world.policy[before, said] - honest
    if form in SCALED:
        most = max(by for by in np.arange(0.0, 2.0, 0.01) if (gap - by * change).abs().mean() < MOST_GAP or not by)
        change *= share * most
    logged = (honest + change).clamp(max=0.0)
    mask = torch.ones(R, N, dtype=torch.bool)
    mask[:, 0] = False
    states = torch.eye(VOCAB)[said]
    batch = RolloutBatch(
        input_ids=said, cu_seqlens=torch.arange(0, R * N + 1, N), loss_mask=mask.flatten(),
        aux_hidden=torch.zeros(R * N, 1), logprobs=logged, last_hidden=states, logsumexp=torch.zeros(R * N),
        rollout_ids=tuple(map(str, range(R))),
    )  # fmt: skip
    return batch, before, said


def replayed(batch: RolloutBatch, q: Tensor) -> Replay:
    """Replay by the formula of `drafter.replay.replay`, with `q` [T] of each token."""
    segments = find_segments(batch.loss_mask.numpy(), batch.cu_seqlens.numpy())
    weights = torch.zeros_like(q) if batch.log_weights is None else batch.log_weights
    c = torch.minimum(q - batch.logprobs, weights).exp()
    rows = torch.from_numpy(segments.rows())[:, None] + torch.arange(DEPTH)
    accepted = c[rows.clamp(max=len(c) - 1)].numpy()  # what lies past a segment's end is not read
    return replay_rounds(accepted, segments, weighted=batch.log_weights is not None)


@dataclass
class Found:
    """Of one run with one candidate."""

    published: int | None = None  # after so many looks
    weighed: int = 0
    mended: int = 0
    dead: int = 0
    off: float = math.nan  # mean of the measured log gains less the true one


def play(world: World, candidate: Law, form: str, share: float, seed: int) -> Found:
    """Look at a candidate on up to `LOOKS` claims."""
    random, trial, gains, found = torch.Generator().manual_seed(seed), Trial(), list[float](), Found()
    policy = Policy(0, torch.zeros(VOCAB, 1), TargetHead(world.policy.T.contiguous()))
    groups = np.repeat(np.arange(PROMPTS), SIBLINGS)
    trial.trained(1.0)
    while found.published is None and len(gains) + found.dead < LOOKS:
        batch, before, said = claim(world, form, share, random)
        try:
            scored = score_shared(ALONE, {}, policy, batch, ScoreOrder([0], seed, DEPTH, "probabilistic", 0.25, None))
        except BatchRejected:
            found.dead += 1
            continue
        found.weighed += scored.batch.log_weights is not None
        found.mended += scored.mean_weight is not None
        ours, theirs = (replayed(scored.batch, law[before, said]) for law in (candidate, world.served))
        look = compare(ours, theirs, groups)
        gains.append(look.log_gain)
        trial.take(look)
        if trial.verdict(min_gain=Settings().gate_min_gain).promote:
            found.published = len(gains) + found.dead
    truth = math.log(alpha(world.policy, candidate) / alpha(world.policy, world.served))
    found.off = float(np.mean(gains)) - truth if gains else math.nan
    return found


def row(age: float, form: str, share: float, seeds: Sequence[int]) -> str:
    """One row of the table."""
    worlds = [world(seed, age) for seed in seeds]
    runs = {
        name: [play(one, getattr(one, name), form, share, seed) for seed, one in zip(seeds, worlds, strict=True)]
        for name in ("worse", "fits_older", "better")
    }
    cells = []
    for found in runs.values():
        looks = [one.published for one in found if one.published]
        cells.append(f"{len(looks)} of {len(found)}" + (f" ({np.median(looks):.0f})" if looks else ""))
    offs = [[one.off for one in found if not math.isnan(one.off)] for found in runs.values()]
    cells.append(", ".join(f"{np.mean(one):+.1%}" if one else "-" for one in offs))
    every = [one for found in runs.values() for one in found]
    cells += [str(sum(getattr(one, name) for one in every)) for name in ("weighed", "mended", "dead")]
    return " | ".join(cells)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--as-sent", action="store_true")
    given = parser.parse_args()
    if given.as_sent:
        service.worker.scoring._MEAN_OFF = math.inf
    seeds = range(given.seed, given.seed + given.runs)
    print("| moved by; form; size | worse | fits older | better | gains off | weighed | mended | dead |")
    print("|---|---|---|---|---|---|---|---|")
    for age in AGES:
        for form in FORMS:
            for share in (1.0, 0.25) if form in SCALED else (1.0,):
                print(f"| {age}; {form}; {share} | {row(age, form, share, seeds)} |", flush=True)


if __name__ == "__main__":
    main()
