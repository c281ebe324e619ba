"""Which rollouts of a batch are captured, under which ids, and which rows of the forward hold them.

Legend: B rows, S tokens of a row (padding included), N selected rows (tokens), R selected rollouts.
"""

from __future__ import annotations

import hashlib
import operator
import os
import uuid
import zlib
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Final, Required, TypedDict

import numpy as np
import numpy.typing as npt
from torch import Tensor

from rl_hooks import wire
from rl_hooks.errors import RolloutError
from rl_hooks.sending.features import PackedIndex
from rl_hooks.sending.sampling import sampling_position
from rl_hooks.sending.tally import Tally
from rl_hooks.trainer.packing import PackedRollouts, lay_out

#: Policy versions whose spent tokens are known: micro-batches of one step may be of several.
_VERSIONS: Final = 64
#: Of the digest in a rollout's id, and of the trainer's own name for it: the format takes 128 characters.
_DIGEST_DIGITS: Final = 16
_NAME_CHARACTERS: Final = 128 - 1 - _DIGEST_DIGITS
#: A fall of policy versions by this much may be a return to an earlier checkpoint; a smaller one is a late batch.
_FALL: Final = 3
#: Rollouts of a policy version that are noted as offered; more do not count, for a loop may never raise its version.
_NOTED_ROLLOUTS: Final = 65_536
#: A policy version is expected to have the tokens of the second largest of so many before it: of an asynchronous
#: trainer the newest one is not complete, and one that is unusually large says nothing of the next ones.
_VERSIONS_COMPARED: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureArguments:
    """What `capture` is told of the one forward that happens inside, by keyword.

    A packed row [1, T] holds several rollouts. Say where they begin by `cu_seqlens` [R + 1], or by `position_ids` that
    begin again at 0, or give nested tensors. `rewards` and the like then have one entry per rollout. The forward may
    pad the row at its end. It must keep the rollouts apart: its own positions and boundaries are compared with yours.
    """

    #: These, `attention_mask` and `logprobs` are [B, S], padded on either side or both.
    input_ids: Tensor
    #: 1 where the policy generated the token itself.
    loss_mask: Tensor
    policy_version: int
    attention_mask: Tensor | None = None
    cu_seqlens: Tensor | None = None
    position_ids: Tensor | None = None
    #: int64 [T]: where the forward has each token of this row, if it is over a prefix tree, [1, N]: what several
    #: rollouts begin with is there once. `input_ids` and the like then hold each rollout whole.
    tree_places: Tensor | None = None
    #: [B, S]: log p of each of `input_ids` under the distribution it was sampled from. Column s is of token s. Those
    #: left out or NaN are recomputed from the features.
    logprobs: Tensor | None = None
    #: Integers [B, S]: how many policy versions, at most, the weights that drew a token were behind the forward's; 0
    #: where these drew it, for sure. Read where `loss_mask` is 1. None: not known.
    versions_behind: Tensor | None = None
    rewards: Sequence[float] | Tensor | None = None
    temperature: float = 1.0
    top_p: float | None = 1.0
    top_k: int | None = 0
    #: Each is sent with a digest of the rollout's tokens: `content_id`.
    rollout_ids: Sequence[str] | None = None
    #: Of which kind each row's prompt is (its source, say): another mix of kinds is then no drift.
    strata: Sequence[str] | None = None
    #: `wire.prompt_hash` of what tells prompts apart whose tokens are the same. Rollouts of a prompt that was trained
    #: on judge no drafter.
    prompt_hashes: Sequence[str] | None = None


class MegatronCaptureKeywords(TypedDict, total=False):
    """The names and types of `CaptureArguments` that Megatron's hook takes."""

    input_ids: Required[Tensor]
    loss_mask: Required[Tensor]
    policy_version: Required[int]
    attention_mask: Tensor | None
    cu_seqlens: Tensor | None
    logprobs: Tensor | None
    versions_behind: Tensor | None
    rewards: Sequence[float] | Tensor | None
    temperature: float
    top_p: float | None
    top_k: int | None
    rollout_ids: Sequence[str] | None
    strata: Sequence[str] | None
    prompt_hashes: Sequence[str] | None


class CaptureKeywords(MegatronCaptureKeywords, total=False):
    """The names and types of `CaptureArguments`, for editors and type checkers."""

    position_ids: Tensor | None
    tree_places: Tensor | None


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """Which rows of a batch to copy, and what is known about them."""

    rows: npt.NDArray[np.int64]  # [N] into the forward's flattened [B * S]
    index: PackedIndex
    rollout_ids: tuple[str, ...]  # R
    rewards: tuple[float, ...] | None
    strata: tuple[str, ...] | None
    layout: PackedRollouts  # of all rollouts of the batch
    policy_version: int
    temperature: float
    top_p: float
    top_k: int
    prompt_hashes: tuple[str, ...] | None = None  # None: told from the tokens
    offered: tuple[int, int] = (0, 0)  # rollouts and generated tokens that these and those left out at random have

    def scored(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Which of these N rows precede a token that the policy generated, and that token."""
        rows = wire.predicting_rows(self.index.loss_mask)
        return rows, self.index.input_ids[rows + 1].astype(np.int64)

    def files(self, tokens: int, longest: int) -> list[tuple[slice, BatchPlan]]:
        """The plan in files of at most `tokens` tokens: which of the N rows, and what is known about them.

        A rollout is never split. One that has more tokens is a file of its own, of its first `longest`; it is left out
        where the policy generated none of these.
        """
        ends, firsts = self.index.cu_seqlens.tolist(), [0]
        for r in range(1, len(self.rollout_ids)):
            if ends[r + 1] - ends[firsts[-1]] > tokens:
                firsts.append(r)
        parts = (self._part(first, last, longest) for first, last in pairwise([*firsts, len(self.rollout_ids)]))
        return [part for part in parts if part[1].index.loss_mask.any()]

    def _part(self, first: int, last: int, longest: int) -> tuple[slice, BatchPlan]:
        """Rollouts `first` to `last`; a single one is cut."""
        index, chosen = self.index, slice(first, last)
        begin, end = int(index.cu_seqlens[first]), int(index.cu_seqlens[last])
        rows = slice(begin, min(end, begin + longest) if last - first == 1 else end)
        return rows, replace(
            self,
            rows=self.rows[rows],
            index=PackedIndex(
                input_ids=index.input_ids[rows],
                cu_seqlens=np.minimum(index.cu_seqlens[first : last + 1] - begin, rows.stop - begin).astype(np.int32),
                loss_mask=index.loss_mask[rows],
                logprobs=None if index.logprobs is None else index.logprobs[rows],
                versions_behind=None if index.versions_behind is None else index.versions_behind[rows],
            ),
            rollout_ids=self.rollout_ids[chosen],
            rewards=None if self.rewards is None else self.rewards[chosen],
            strata=None if self.strata is None else self.strata[chosen],
            prompt_hashes=None if self.prompt_hashes is None else self.prompt_hashes[chosen],
            offered=(0, 0) if first else self.offered,  # said once
        )


class UniqueId(str):
    """An id of `RolloutIds`: unique as it is, so nothing is added to it."""

    __slots__ = ()


class RolloutIds:
    """Names the rollouts of one attachment and rank."""

    def __init__(self, rank: int) -> None:
        self._prefix = uuid.uuid4().hex
        self._rank = rank
        self._made = 0

    def of(self, policy_version: int, number: int) -> UniqueId:
        """Unique over attachments, processes, ranks, versions and numbers; the same each time that it is asked for."""
        text = f"{self._prefix}/{os.getpid()}/{policy_version}/{self._rank}/{number}"
        return UniqueId(hashlib.sha256(text.encode()).hexdigest()[:24])

    def next(self, policy_version: int) -> UniqueId:
        """An id for a rollout that its trainer has not numbered (from 0 on)."""
        self._made += 1
        return self.of(policy_version, -self._made)


def content_id(name: object, tokens: npt.NDArray[np.int32], generated: npt.NDArray[np.bool_]) -> str:
    """The id of a rollout that its trainer calls `name`: the name and a digest of the rollout's tokens.

    The service counts an id once within a run. So a rollout that is sent again, in another batch or in a later epoch,
    counts once. Other tokens under the same name are another rollout: a loop may number from 0 in each step.
    """
    if isinstance(name, UniqueId):
        return name
    name = str(name)
    if len(name) > _NAME_CHARACTERS or not name.isprintable():  # no id that the service takes
        name = hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:32]
    held = tokens.astype("<i4").tobytes() + generated.astype(np.uint8).tobytes()
    return f"{name}-{hashlib.sha256(held).hexdigest()[:_DIGEST_DIGITS]}"


class VersionOrder:
    """Finds out from the order of policy versions whether the trainer went back to an earlier checkpoint.

    A return is a fall of three or more, followed by a version above the fallen one and below the highest: 8, 4, 5.
    A smaller fall is taken for late rollouts, by the service too. Late rollouts among fresh ones are no return either:
    8, 4, 9, or 8, 5, 3, 9. But 8, 3, 5, 9 looks like a return at the 5. If the next version that reaches the highest
    one before (the 9) comes by a larger step than usual, it was no return: rollouts are late by that much in this run,
    and from then on only a larger fall counts.
    """

    def __init__(self) -> None:
        self._highest = -1  # since the trainer went back last
        self._step = 0  # the smallest from the highest version to a higher one; 0: none yet
        self._fallen: int | None = None  # far below that; the next version tells whether the trainer went back to it
        self._fall = _FALL
        #: The highest version before that and the lowest after it, until one as high has come.
        self._returned: tuple[int, int] | None = None

    def went_back(self, policy_version: int) -> bool:
        """Whether this version, the next one, shows that the trainer went back."""
        if policy_version >= self._highest:
            step, self._fallen = policy_version - self._highest, None
            if self._returned is None:
                if step and self._highest >= 0:
                    self._step = min(self._step or step, step)
            elif policy_version >= self._returned[0]:
                if step > max(self._step, 1):
                    self._fall = max(self._fall, self._returned[0] - self._returned[1] + 1)
                self._returned = None
            self._highest = policy_version
        elif self._fallen is not None and policy_version > self._fallen:
            highest, lowest = self._returned or (self._highest, self._fallen)
            self._returned = max(highest, self._highest), min(lowest, self._fallen)
            self._highest, self._fallen = policy_version, None
            return True
        elif policy_version <= self._highest - self._fall:
            self._fallen = policy_version
        return False


@dataclass(slots=True)
class _Budget:
    """Of one policy version: what was taken, and what was offered, by id or content."""

    #: That will be offered, as far as earlier versions tell; 0: there was none.
    expected_tokens: int
    spent_tokens: int = 0
    taken: set[str] = field(default_factory=set)
    offered_tokens: int = 0
    offered: set[Hashable] = field(default_factory=set)


class RolloutChoice:
    """Samples a fraction of the rollouts, at most `max_tokens_per_step` tokens of each policy version.

    A trainer may sort its micro-batches by length. So the budget is spread over all micro-batches that are expected:
    where it is too small for them, a rollout is taken by the chance that what is left of the budget is of what is still
    to come. Without an earlier version, and from the last micro-batch that is expected on, it goes to whatever comes.
    """

    def __init__(self, sample_fraction: float, max_tokens_per_step: int, tally: Tally) -> None:
        if not 0.0 < sample_fraction <= 1.0 or max_tokens_per_step < 2:
            raise ValueError("sample_fraction must be in (0, 1] and max_tokens_per_step at least 2")
        self._fraction, self._max_tokens = sample_fraction, max_tokens_per_step
        self.tally = tally
        self._budgets: dict[int, _Budget] = {}  # by policy version, the newest used last
        self._versions = VersionOrder()
        self._offered_rollouts = self._offered_tokens = 0

    def choose(
        self,
        names: Sequence[str],
        tokens_B: Sequence[int],
        generated_B: Sequence[int],
        policy_version: int,
        known_as: Sequence[Hashable] | None = None,
    ) -> list[int]:
        """The sampled rollouts of a micro-batch that fit into its policy version's budget, in batch order.

        `tokens_B`, `generated_B`: how many tokens each has, and how many of them the policy generated. `known_as`: what
        is the same when a rollout comes again, if not its name.
        """
        newest = [*self._budgets.values()][-_VERSIONS_COMPARED:]
        if self._versions.went_back(policy_version):
            self._budgets.clear()  # the versions that come again are of other weights
        budget = self._budgets.pop(policy_version, None)
        if budget is None:
            budget = _Budget(min(sorted(one.offered_tokens for one in newest)[-2:], default=0))
        due_tokens, spent_tokens = budget.expected_tokens - budget.offered_tokens, budget.spent_tokens
        first = {name: b for b, name in reversed([*enumerate(names)])}  # an id counts once, in one batch too
        usable = [b for b, name in enumerate(names) if tokens_B[b] >= 2 and generated_B[b] and first[name] == b]
        for b in usable:
            known = names[b] if known_as is None else known_as[b]
            noted = known in budget.offered or len(budget.offered) >= _NOTED_ROLLOUTS
            if int(tokens_B[b]) <= self._max_tokens and not noted:
                budget.offered.add(known)
                budget.offered_tokens += int(tokens_B[b])
                self._offered_rollouts += 1
                self._offered_tokens += int(generated_B[b])
        left_tokens = self._max_tokens - spent_tokens
        share = left_tokens / due_tokens if budget.expected_tokens > budget.offered_tokens else 1.0
        place = {b: sampling_position(names[b], "sample") for b in usable}
        fresh = (b for b in usable if names[b] not in budget.taken)  # none of an earlier epoch's
        sampled = sorted((b for b in fresh if place[b] < self._fraction), key=place.__getitem__)
        chosen: list[int] = []
        for b in sampled:
            if place[b] >= share:
                break
            if spent_tokens + int(tokens_B[b]) > self._max_tokens:
                # Stop at the first that does not fit: going on would favour short rollouts. One that could never fit
                # is passed over, or it would block the rest of the version.
                if int(tokens_B[b]) <= self._max_tokens:
                    break
                self.tally.warn(
                    "budget",
                    f"a rollout of {int(tokens_B[b])} tokens is left out, as all of more than max_tokens_per_step "
                    f"({self._max_tokens}) are: raise that option to send them",
                )
                continue
            spent_tokens += int(tokens_B[b])
            chosen.append(b)
            budget.taken.add(names[b])
        if not budget.expected_tokens and 2 * spent_tokens > self._max_tokens:  # said while there is a file to say it
            self._offered_rollouts, self._offered_tokens = self._offered_rollouts if chosen else 0, 0
        budget.spent_tokens = spent_tokens
        self._budgets[policy_version] = budget
        if len(self._budgets) > _VERSIONS:
            del self._budgets[next(iter(self._budgets))]
        self.tally.add("skipped_empty", len(names) - len(usable))
        self.tally.add("skipped_sampling", len(usable) - len(sampled))
        self.tally.add("skipped_budget", len(sampled) - len(chosen))
        return sorted(chosen)

    def take_offered(self) -> tuple[int, int]:
        """Rollouts that could have been chosen since this was asked last, each once, and their generated tokens.

        No tokens from where a start's first version has spent half of its budget: it may not reach the last ones, so
        nothing may be concluded from how it was drawn. The service compares no version of which a file says that.
        """
        offered = self._offered_rollouts, self._offered_tokens
        self._offered_rollouts = self._offered_tokens = 0
        return offered


def _stratum(name: str) -> str:
    """What of a name the service takes: an optional label must not cost a batch."""
    return "".join(c for c in str(name) if c.isprintable())[:64]


def checked_version(policy_version: Any) -> int:
    """A policy version of any kind of integer. Raises RolloutError for what is none, or none that a file can hold."""
    try:
        version = operator.index(policy_version)
    except TypeError:
        version = -1
    if not 0 <= version < 10**wire.INTEGER_DIGITS:
        expected = f"an integer from 0 on, of at most {wire.INTEGER_DIGITS} digits"
        raise RolloutError(f"policy_version must be {expected}, got {policy_version!r}")
    return version


def _numbers(name: str, values: Sequence[Any] | Tensor) -> list[float]:
    found = []
    for value in values.tolist() if isinstance(values, Tensor) else values:  # at once: each waits for the device
        try:
            found.append(float(value))
        except (TypeError, ValueError, OverflowError, RuntimeError):  # the last: a tensor with several
            raise RolloutError(f"{name}: expected a number, got {str(value)[:80]}") from None
    return found


def _within(name: str, value: Any, highest: int, lowest: int = 0) -> float:
    """The number, which the service would refuse the whole file for if it were out of range."""
    (found,) = _numbers(name, [value])
    if not lowest <= found <= highest:
        raise RolloutError(f"{name} must be from {lowest} to {highest}, got {found}")
    return found


def _behind(layout: PackedRollouts, said: Tensor, generated_T: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
    """`versions_behind` [T] of tokens that the policy generated; 0 elsewhere."""
    if isinstance(said, Tensor) and said.is_floating_point():
        raise RolloutError(f"versions_behind must be integers, got {said.dtype}")
    return np.where(generated_T, layout.flat("versions_behind", said, np.int64), 0)


def plan_batch(ids: RolloutIds, choice: RolloutChoice, told: CaptureArguments) -> BatchPlan | None:
    """Check what `capture` was told and choose among the rollouts; None if none is chosen.

    Raises RolloutError for tensors that do not fit together, and for packed rows that cannot be told apart.
    """
    policy_version, prompt_hashes = checked_version(told.policy_version), told.prompt_hashes
    layout = lay_out(told.input_ids, told.attention_mask, told.cu_seqlens, told.position_ids, told.tree_places)
    tokens_T = layout.flat("input_ids", told.input_ids, np.int32)
    generated_T = layout.generated(told.loss_mask)
    logprobs_T = None if told.logprobs is None else layout.flat("logprobs", told.logprobs.float(), np.float32)
    places = list(layout.rollouts)
    scale = _within("temperature", told.temperature, wire.HIGHEST_TEMPERATURE)
    top_p = 1.0 if told.top_p is None else _within("top_p", told.top_p, 1)
    # vLLM and transformers say "no top-k" as -1, 0 or None.
    top_k = max(0, int(_within("top_k", told.top_k or 0, 10**wire.INTEGER_DIGITS - 1, lowest=-1)))
    values = None if told.rewards is None else _numbers("rewards", told.rewards)
    lists = [len(one) for one in (told.rollout_ids, values, told.strata, prompt_hashes) if one is not None]
    # The padding at the end of a packed row has positions too, and so looks like rollouts that nobody generated.
    while layout.packed and lists and len(places) > lists[0] and not generated_T[places[-1]].any():
        places.pop()
    if any(count != len(places) for count in lists):
        of = "rollout" if layout.packed else "row"
        raise RolloutError(
            f"rollout_ids, rewards, strata and prompt_hashes must hold one entry per {of} ({len(places)})"
        )
    if prompt_hashes is not None and not all(map(wire.is_prompt_hash, prompt_hashes)):
        raise RolloutError("prompt_hashes must be of `rl_hooks.wire.prompt_hash`: 16 hexadecimal digits each")
    named = told.rollout_ids
    # No features precede the first token of a rollout, so it cannot be predicted.
    generated_T[[one[0] for one in places if len(one)]] = False
    behind_T = None if told.versions_behind is None else _behind(layout, told.versions_behind, generated_T)
    names: list[str]
    known_as: list[tuple[int, int]] | None = None
    if named is None:
        names = [ids.next(policy_version) for _ in places]
        seen = Counter[int]()
        known_as = []
        for at in places:
            checksum = zlib.crc32(tokens_T[at].tobytes())
            known_as.append((checksum, seen[checksum]))  # several answers may be the same
            seen[checksum] += 1
    else:
        names = [content_id(n, tokens_T[at], generated_T[at]) for n, at in zip(named, places, strict=True)]
    counts = [int(generated_T[one].sum()) for one in places]
    chosen = choice.choose(names, [len(one) for one in places], counts, policy_version, known_as)
    if not chosen:
        return None
    if values is not None and not all(wire.is_finite_number(values[b]) for b in chosen):
        choice.tally.warn("rewards", "a reward is not finite, or beyond 1e300: those of its batch are not sent")
        values = None
    rows = np.concatenate([places[b] for b in chosen])
    if behind_T is not None:
        low, high = int(behind_T[rows].min()), int(behind_T[rows].max())
        if low < 0 or high > min(policy_version, np.iinfo(np.int32).max):
            said = f"versions_behind are {low} to {high}, expected 0 to policy_version ({policy_version})"
            choice.tally.warn("versions_behind", f"{said}: those of such a batch are not sent")
            behind_T = None
    return BatchPlan(
        rows=layout.in_forward(rows).astype(np.int64),
        index=PackedIndex(
            input_ids=tokens_T[rows],
            cu_seqlens=np.cumsum([0, *(len(places[b]) for b in chosen)], dtype=np.int32),
            loss_mask=generated_T[rows].astype(np.uint8),
            logprobs=None if logprobs_T is None else logprobs_T[rows],
            versions_behind=None if behind_T is None else behind_T[rows].astype(np.int32),
        ),
        rollout_ids=tuple(names[b] for b in chosen),
        rewards=None if values is None else tuple(values[b] for b in chosen),
        strata=None if told.strata is None else tuple(_stratum(told.strata[b]) for b in chosen),
        layout=layout,
        policy_version=policy_version,
        temperature=scale,
        top_p=top_p,
        top_k=top_k,
        prompt_hashes=None if prompt_hashes is None else tuple(prompt_hashes[b] for b in chosen),
        offered=choice.take_offered(),
    )
