"""Test before training: what every drafter would have had on a batch, from the batch alone.

One record per batch (docs/reference/state.md, "Score record"). Only sums are kept: pooling batches is exact.
"""

from __future__ import annotations

import hashlib
import logging
import math
import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from drafter.batch import Fill, RolloutBatch, prompt_hashes, screen
from drafter.device import is_device_fault, is_out_of_memory
from drafter.errors import BatchRejected, DrafterError
from drafter.model.draft_model import DraftModel
from drafter.policy import Policy, TargetHead
from drafter.replay.acceptance import Floats, Replay
from drafter.replay.lossless import drafters_favour
from drafter.replay.ngram import ngram_replay
from drafter.replay.replay import TOKENS_AT_ONCE, Drafting, replay
from drafter.training.ranks import Ranks
from rl_hooks.wire import COUNTED_DIGITS, COUNTED_PROMPTS
from service.monitor.records import (
    LARGE_GAP_NATS,
    TURNS_MARK,
    DrafterSums,
    Favour,
    Replayed,
    SamplingSettings,
    ScoreRecord,
)

log = logging.getLogger("draftalign.worker")

#: Most tokens of a prompt lookup, which walks a text token by token on the CPU: 28 ms.
_NGRAM_TOKENS = 8192
_GAP = (
    "log-probabilities disagree with the features by {gap:.3g} nats on average (limit {limit:g}): a state taken before "
    "the final norm, a stale head, a wrong temperature, a shifted mask or tokens of a much older policy; compare "
    "logprobs[t] with last_hidden[t-1] @ lm_head"
)
#: Older weights' tokens are weighed where their gap exceeds the newest weights' own by this factor.
_MORE_OFF = 2.0
#: Log-probabilities are of another law than drew the tokens where the mean weight is further from 1 than this number
#: plus this number of standard errors.
_MEAN_OFF, _ERRORS_OFF = 0.01, 4.0
#: Of each prompt's rollouts one in four stands for all, but two at least.
_SIBLINGS_FOR_ONE, _FEWEST_SIBLINGS = 4, 2
#: Where there are many prompts, they are put into this number of shares, and a record tells what each share had.
_SHARES = 16


@dataclass(frozen=True, slots=True)
class Scores:
    """Replays of one batch by name (`served`, `candidate`, `frozen`, `ngram`, `best`) and its score record.

    They are of the rollouts at `looked`, which may be a part of the batch (`some_siblings`).
    """

    replays: Mapping[str, Replay]
    record: ScoreRecord
    versions: Mapping[str, Replay]  # the same by drafter version, of archived ones too
    looked: tuple[int, ...]  # places in the batch of the rollouts that were replayed
    prompts: tuple[str, ...]  # `prompt_hashes` of these
    strata: tuple[str, ...] = ()  # `_kinds`; empty: not known
    entropies: tuple[float, ...] = ()  # of each rollout: mean negated log-probability of its response tokens, in nats
    sampling: SamplingSettings | None = None  # None: greedy answers, which are kinds of their own


def replay_each(
    drafters: Mapping[str, DraftModel], policy: Policy, batch: RolloutBatch, depth: int, drafting: Drafting
) -> dict[str, Replay]:
    """Replay a batch with each drafter, drafting for `policy`. Features are copied to its device once for all.

    One that has several names is replayed once. Where memory runs out, the rollouts of that group are replayed fewer
    at a time, and in the end one by one.
    """
    found: dict[str, list[Replay]] = {name: [] for name in drafters}
    waiting = [*batch.groups(TOKENS_AT_ONCE)][::-1]
    while waiting:
        group = waiting.pop()
        try:
            parts = _replay_group(drafters, policy, group, depth, drafting)
        except Exception as error:
            if group.rollouts == 1 or is_device_fault(error) or not is_out_of_memory(error):
                raise
            log.warning("memory ran out in a replay of %d tokens: fewer at a time", group.tokens)
            waiting += [*group.groups(group.tokens // 4)][::-1]
            continue
        for name, part in parts.items():
            found[name].append(part)
    return {name: Replay.concat(parts) for name, parts in found.items()}


def _replay_group(
    drafters: Mapping[str, DraftModel], policy: Policy, group: RolloutBatch, depth: int, drafting: Drafting
) -> dict[str, Replay]:
    moved = group.to(policy.embed_tokens.device)  # freed at the end, also by an error: fewer rollouts need the memory
    distinct = dict.fromkeys(drafters.values())
    found = {one: replay(one, moved, policy, depth=depth, drafting=drafting) for one in distinct}
    return {name: found[one] for name, one in drafters.items()}


@dataclass(frozen=True, slots=True)
class ScoreOrder:
    """How ranks score a batch together; plain JSON values."""

    looked: Sequence[int]  # places of the rollouts that are replayed
    seed: int  # of the tokens that are drawn for the check
    depth: int
    drafting: Drafting
    gap_nats: float  # most that log-probabilities may be off
    served: str | None  # the drafter whose favour is looked for


class SharedScore(NamedTuple):
    """What several ranks find of one batch together, and each of them has."""

    order: ScoreOrder
    batch: RolloutBatch  # with its normalisers
    gap: float | None  # how far its log-probabilities are off; None: not known
    newest_gap: float | None  # the same of what the features' weights drew, for sure; None: not known
    part: RolloutBatch  # the rollouts that were replayed
    by_version: dict[str, Replay]
    ngram: Replay
    favour: Favour | None  # whether tokens lean towards the drafter that served; None: not known
    mean_weight: float | None  # by which its log-probabilities are wrong; None: they may be right, or are no weights


def score_shared(
    ranks: Ranks, drafters: Mapping[str, DraftModel], policy: Policy, batch: RolloutBatch, order: ScoreOrder
) -> SharedScore:
    """Check a batch and replay it on all ranks, which call this with the same. Raises `BatchRejected` on all.

    In checks they do pieces that do not depend on how many they are, so all find what one process finds, to the bit.
    """
    batch, gap, newest_gap, mean_weight = _checked(ranks, policy, batch, order.gap_nats, order.seed)
    part = batch if len(order.looked) == batch.rollouts else batch.select(order.looked)
    found = replay_shared(ranks, drafters, policy, part, order)
    favour = None if order.served is None else _favour(ranks, drafters[order.served], part, policy)
    ngram = _ngram_shared(ranks, part, order.depth)
    return SharedScore(order, batch, gap, newest_gap, part, found, ngram, favour, mean_weight)


def _checked(
    ranks: Ranks, policy: Policy, batch: RolloutBatch, limit: float, seed: int
) -> tuple[RolloutBatch, float | None, float | None, float | None]:
    """The batch with its normalisers, weighed if others drew it; the gaps and `mean_weight` of a `SharedScore`."""
    mean_weight = None
    try:
        if ranks.world > 1:  # else it was screened when it was loaded
            screen(batch, ranks.fill)
        head = policy.needed_head()
        batch = head.normalise(batch, ranks.fill)
        gap, checked = head.logprob_gap(batch, limit, fill=ranks.fill, seed=seed)
        if checked and not gap <= limit:
            raise BatchRejected(_GAP.format(gap=gap, limit=limit))
        newest, older = head.gaps_by_age(batch, ranks.fill)
        if checked and _older_drew(gap, newest, older):
            batch, mean_weight = _weighed(head, batch, ranks.fill)
    except DrafterError as error:  # of what all ranks have alike
        raise ranks.agreed(error)  # noqa: B904 - it is this error
    return batch, gap if checked else None, newest, mean_weight


def _weighed(head: TargetHead, batch: RolloutBatch, fill: Fill) -> tuple[RolloutBatch, float | None]:
    """The batch with the weights of its tokens, and the mean weight where the logged law cannot have drawn them.

    A token that the law s drew has a weight p / s of mean 1, whatever was drawn before it, so weights less 1 are not
    correlated. Another mean shows that the trainer logged another law (another temperature, a top-p that nobody tells).
    Then the logged log-probabilities are moved by its logarithm, so that the mean is 1.
    """
    weighed = head.weighed(batch, fill)
    if weighed.log_weights is None:
        return batch, None
    drawn = batch.loss_mask if batch.older is None else batch.loss_mask & batch.older
    off = weighed.log_weights[drawn].double().expm1()
    mean, error = float(off.mean()), float(off.square().sum().sqrt()) / off.numel()
    if abs(mean) <= _MEAN_OFF + _ERRORS_OFF * error:
        return weighed, None
    return head.weighed(replace(batch, logprobs=batch.logprobs + drawn * math.log1p(mean)), fill), 1.0 + mean


def _older_drew(gap: float, newest: float | None, older: float | None) -> bool:
    """Whether weights matter: where nobody tells, by the whole `gap`; else by what older weights add to it.

    Features or a head that are wrong show in what the newest weights drew, too. Weighed by these, α would be of no law
    that any engine has.
    """
    if newest is None:
        return gap > LARGE_GAP_NATS
    return older is not None and older > max(LARGE_GAP_NATS, _MORE_OFF * newest)


def replay_shared(
    ranks: Ranks, drafters: Mapping[str, DraftModel], policy: Policy, batch: RolloutBatch, order: ScoreOrder
) -> dict[str, Replay]:
    """`replay_each` of one batch on all ranks, which call this with the same: each replays every W-th rollout.

    What is raised on one rank is raised on all.
    """
    depth, drafting = order.depth, order.drafting
    if ranks.world == 1:
        return replay_each(drafters, policy, batch, depth, drafting)
    mine = list(range(ranks.rank, batch.rollouts, ranks.world))
    table = torch.zeros(len(drafters), batch.rollouts, 2 + 2 * depth, dtype=torch.float64)

    def own() -> None:
        found = replay_each(drafters, policy, batch.select(mine), depth, drafting)
        for place, one in enumerate(found.values()):
            table[place, mine] = _columns(one)

    ranks.together(own if mine else lambda: None)
    tables = ranks.add_table(table)  # a rollout is in the table of one rank: nothing is rounded
    return {name: _replay_of(one, depth) for name, one in zip(drafters, tables, strict=True)}


def _ngram_shared(ranks: Ranks, batch: RolloutBatch, depth: int) -> Replay:
    """What prompt lookup would have had on some of a batch's rollouts; several ranks share these out."""
    places = batch.places_of_some(_NGRAM_TOKENS)
    table = torch.zeros(len(places), 2 + 2 * depth, dtype=torch.float64)
    ids, mask, starts = batch.input_ids.cpu(), batch.loss_mask.cpu(), batch.cu_seqlens.tolist()

    def one(row: int, place: int) -> None:
        text = slice(starts[place], starts[place + 1])
        table[row] = _columns(ngram_replay(ids[text], mask[text], (0, text.stop - text.start), depth=depth))[0]

    return _replay_of(ranks.fill(table, [partial(one, row, place) for row, place in enumerate(places)]), depth)


def _columns(found: Replay) -> Tensor:
    columns = [found.tokens, found.rounds, *found.accepted.T, *found.reached.T]
    return torch.from_numpy(np.stack(columns, axis=1))


def _replay_of(table: Tensor, depth: int) -> Replay:
    """The replay whose `_columns` are these [R, 2 + 2 * depth]."""
    one = table.numpy()
    return Replay(one[:, 0], one[:, 1], one[:, 2 : 2 + depth], one[:, 2 + depth :])


def some_siblings(prompts: Sequence[str], policy_version: int) -> tuple[int, ...]:
    """Places of the rollouts that stand for all: a quarter of each prompt's, evenly spaced, and two at least.

    Siblings are alike, so a few of them say nearly as much about a drafter. The first one is drawn afresh for each
    prompt and policy version: a trainer may sort siblings, send each prompt in a file of its own, and ask the same
    prompts again. What the rollouts say has no part in it.
    """
    places: dict[str, list[int]] = {}
    for place, prompt in enumerate(prompts):
        places.setdefault(prompt, []).append(place)
    chosen = list[int]()
    for prompt, own in places.items():
        kept = min(len(own), max(len(own) // _SIBLINGS_FOR_ONE, _FEWEST_SIBLINGS))
        first = int.from_bytes(hashlib.blake2b(f"{policy_version} {prompt}".encode(), digest_size=4).digest())
        chosen += (own[(first + i * len(own) // kept) % len(own)] for i in range(kept))
    return tuple(sorted(chosen))


def score(drafters: Mapping[str, tuple[str, DraftModel]], found: SharedScore) -> Scores:
    """The score of a batch with every drafter of `drafters`: role -> (version, drafter).

    `found` is of each of them. The record does not say which batch it is, nor what was done with it.

    Roles beside `served`, `candidate` and `frozen` are archived versions. They count for `best` only: the best of all
    drafters, which is told where the candidate is scored.
    """
    batch, part, by_version = found.batch, found.part, found.by_version
    replays: dict[str, Replay] = {"ngram": found.ngram}
    for role, (version, _) in drafters.items():
        if role in ("served", "candidate", "frozen"):
            replays[role] = by_version[version]
    best_version = None
    if "candidate" in drafters:  # without it, what served would be the best of itself
        best_version = max(by_version, key=lambda v: np.nan_to_num(by_version[v].alpha))
        replays["best"] = by_version[best_version]
    response = batch.logprobs[batch.loss_mask]
    vocabularies = [drafter.vocabulary for _, drafter in drafters.values()]  # one, in a lineage
    said = batch.input_ids[batch.loss_mask].cpu()
    rewards = batch.rewards or ()
    prompts = prompt_hashes(part)
    told_apart = int(_segments(part).max()) <= 1
    unpublished = drafters["candidate"][0] if "candidate" in drafters else None
    sums: dict[str, Any] = {name: DrafterSums.of(one.tokens, one.rounds) for name, one in replays.items()}
    record = ScoreRecord(
        **sums,
        replayed=tuple(
            _replayed(v, one, prompts, told_apart=told_apart) for v, one in by_version.items() if v != unpublished
        ),
        policy_version=batch.policy_version,
        rollouts=batch.rollouts,
        segments=int(_segments(batch).sum()),
        offered=batch.offered,
        tokens=int(batch.response_tokens),
        best_version=best_version,
        logprob_sum=float(response.double().sum()),
        logprob_tokens=int(response.numel()),
        draftable_tokens=int(vocabularies[0].t2d[said].sum()) if vocabularies else None,
        reward_sum=math.fsum(rewards),
        reward_count=len(rewards),
        created=time.time(),
        depth=found.order.depth,
        drafting=found.order.drafting,
        logprob_gap=found.gap,
        newest_gap=found.newest_gap,
        mean_weight=found.mean_weight,
        favour=found.favour,
    )
    sampling = SamplingSettings(part.temperature, part.top_p, part.top_k) if part.temperature else None
    known = prompts, _kinds(part), _entropies(part), sampling
    return Scores(replays, record, by_version, tuple(found.order.looked), *known)


def _favour(ranks: Ranks, drafter: DraftModel, batch: RolloutBatch, policy: Policy) -> Favour | None:
    """Whether its tokens lean towards the drafter; None where that cannot be said. It never costs the batch."""
    try:
        found = drafters_favour(drafter, batch, policy, ranks.fill)
    except Exception as error:
        if is_device_fault(error):
            raise
        log.exception("whether speculation is lossless is not known of this batch")
        return None
    return None if found is None else Favour(*found)


def _segments(batch: RolloutBatch) -> Tensor:
    """Stretches of tokens [R] that each rollout generated.

    What goes on after other tokens (a tool's, a user's) is another request to an engine, with another prompt.
    """
    generated, starts = batch.loss_mask.cpu(), batch.cu_seqlens[:-1]
    begins = generated & ~generated.roll(1)
    begins[starts] = generated[starts]
    return torch.bincount(batch.rollout_of[begins], minlength=batch.rollouts)


def _replayed(version: str, found: Replay, prompts: Sequence[str], *, told_apart: bool) -> Replayed:
    """What live counts are compared with, summed by prompt; a thousandth of a round is enough.

    `told_apart`: whether engines count these prompts as they are here: no answer has several `_segments`.
    """
    by_position = (found.accepted, found.reached) if found.tells_positions else (np.zeros((1, 0)),) * 2
    accepted, reached = (tuple(counts.sum(axis=0).round(3).tolist()) for counts in by_position)
    tokens, rounds = _summed(prompts, found.tokens), _summed(prompts, found.rounds)
    sums = DrafterSums.of(tokens.values(), rounds.values())
    if len(tokens) <= COUNTED_PROMPTS:
        mark = "" if told_apart else TURNS_MARK
        by_prompt = {
            f"{name[:COUNTED_DIGITS]}{mark}": (round(tokens[name], 3), round(r, 3))
            for name, r in rounds.items()
            if r > 0
        }
        return Replayed(version, sums, accepted, reached, by_prompt)
    shares = [f"{zlib.crc32(prompt.encode()) % _SHARES:x}" for prompt in prompts]
    tokens, rounds = _summed(shares, found.tokens), _summed(shares, found.rounds)
    by_share = {share: (round(tokens[share], 3), round(r, 3)) for share, r in rounds.items() if r > 0}
    return Replayed(version, sums, accepted, reached, by_share=by_share)


def _summed(names: Sequence[str], counts: Floats) -> dict[str, float]:
    """Sums of counts [R] by name; each rollout has a name."""
    found, index = np.unique(names, return_inverse=True)
    return dict(zip(found.tolist(), np.bincount(index, counts).tolist(), strict=True))


def _kinds(batch: RolloutBatch) -> tuple[str, ...]:
    """The kind of each rollout's prompt. Greedy answers are kinds of their own: no RL trains on them.

    They are a validation's, on other prompts, and their α is another quantity. It would pass for a change of the
    policy's.
    """
    if batch.temperature:
        return batch.strata
    return tuple(f"{kind} greedy".strip() for kind in batch.strata or [""] * batch.rollouts)


def _entropies(batch: RolloutBatch) -> tuple[float, ...]:
    mask, rollout = batch.loss_mask.cpu(), batch.rollout_of
    surprise = torch.where(mask, -batch.logprobs.double().cpu(), 0.0)
    totals = torch.zeros(batch.rollouts, dtype=torch.float64).index_add_(0, rollout, surprise)
    counts = torch.zeros(batch.rollouts, dtype=torch.float64).index_add_(0, rollout, mask.double())
    return tuple((totals / counts).tolist())
