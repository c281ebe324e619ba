"""The worker's bounded memory of recent rollouts, which it trains on again.

No rollout is held out. The gate judges on rollouts that have just arrived, before they are added here
(`service.worker.promotion`). It leaves out rollouts whose prompt is in here, because their siblings were trained on.

Batches are kept as the files in which they came (`runs/<run>/worker/recent/`). The newest ones stay: up to
`capacity_tokens` tokens, and no more bytes than are free on the disk.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt
import torch

from drafter.batch import RolloutBatch, load_batch, prompt_hashes, without
from drafter.device import prefetch
from drafter.errors import TargetHeadError
from drafter.policy import Policy
from drafter.training.ranks import ALONE, Ranks
from drafter.training.trainer import DrafterTrainer, Prepared
from rl_hooks.wire import WireError
from service.errors import BlobDamaged
from service.monitor.alpha import Abandoned
from service.storage.spool import check_blob
from service.worker.target import Target

log = logging.getLogger("draftalign.worker")

#: How many trainings leave out the rollouts for which there was no memory; then they are tried again.
_LIMITED_TRAININGS: Final = 64
#: After this number of trainings, a minute apart, that ran out of memory with nothing to leave out, all is left out.
_HOPELESS_TRAININGS: Final = 60


@dataclass(frozen=True, slots=True)
class KeptBatch:
    """One batch. Its file is mapped, and its features are read whenever rows of it are drawn."""

    name: str  # file name inside the directory of recent batches
    batch: RolloutBatch
    prompts: frozenset[str]  # `prompt_hashes` of its rollouts
    known: tuple[int, ...] = ()  # places in the file of rollouts that are not in `batch`: `Loaded.left_out`

    @property
    def policy_version(self) -> int:
        """The policy that generated it."""
        return self.batch.policy_version

    @property
    def states_bytes(self) -> int:
        """Bytes of its hidden states: nearly all of its file."""
        return self.batch.aux_hidden.nbytes + self.batch.last_hidden.nbytes


#: What one optimizer step trains on: rollouts of kept batches, by their places.
Drawn = list[tuple[KeptBatch, list[int]]]


@dataclass
class LengthLimit:
    """Rollouts of more `tokens` are left out, since memory ran out with such. None: no limit; 0: all are left out.

    A window holds whole rollouts, so a smaller `step_tokens` would not help. After some `trainings` the long ones are
    tried again: another process may have had the memory.
    """

    tokens: int | None = None
    trainings: int = 0  # until it is lifted
    hopeless: int = 0  # trainings in a row that failed with nothing to leave out

    def tighten(self, lengths: npt.NDArray[np.int64], step_tokens: int) -> bool:
        """Lower the limit: leave out the longer half of the rollouts above `step_tokens`. Returns whether it did.

        If no rollout would be left, the limit stays. After `_HOPELESS_TRAININGS` of such calls in a row all rollouts
        are left out, and batches are only scored.
        """
        suspects = np.sort(lengths[lengths > step_tokens])
        most = int(suspects[(len(suspects) - 1) // 2]) - 1 if len(suspects) else 0
        if not (lengths <= most).any():
            self.hopeless += 1
            if self.hopeless < _HOPELESS_TRAININGS:
                return False
            most = 0
        self.tokens, self.trainings = most, _LIMITED_TRAININGS
        return True

    def trained(self) -> None:
        """Note a training that ended well. If the limit left all rollouts out, `hopeless` stays."""
        if self.tokens != 0:
            self.hopeless = 0
        self.trainings -= self.tokens is not None
        if self.trainings <= 0:
            self.tokens = None


class RecentRollouts:
    """The newest batches of a run, oldest first. `run`: for the log."""

    def __init__(self, directory: Path, *, capacity_tokens: int, run: str) -> None:
        self._run = run
        self._directory = directory
        self._directory.mkdir(parents=True, exist_ok=True)
        # Listed before the checkpoint is read: files that a successor adds in between must not look like strays
        # (docs/reference/paused.md).
        self._found = list(directory.iterdir())
        self._capacity_tokens = capacity_tokens
        self.limit = LengthLimit()
        self._kept: dict[str, KeptBatch] = {}  # by name, oldest first
        self._tokens = self._bytes = 0  # of these
        self._unsettled: dict[str, Path] = {}  # name -> where the spool still holds the file
        self._dropped: set[str] = set()

    def add(self, path: Path, batch: RolloutBatch, known: tuple[int, ...] = ()) -> KeptBatch:
        """Add a batch whose file is still in the spool. `settle` moves the file here. `known`: see `KeptBatch`."""
        self._remove(path.name)  # a redelivered batch replaces itself
        kept = self._keep(path.name, batch, known)
        self._unsettled[path.name] = path
        self._dropped.discard(path.name)
        most_bytes = shutil.disk_usage(self._directory).free
        while len(self._kept) > 1 and (self._tokens > self._capacity_tokens or self._bytes > most_bytes):
            self._drop(next(iter(self._kept)))
        return kept

    def _keep(self, name: str, batch: RolloutBatch, known: tuple[int, ...]) -> KeptBatch:
        batch = replace(batch, log_weights=None, older=None)  # training and other ranks have none
        kept = KeptBatch(name, batch, frozenset(prompt_hashes(batch)), known)
        self._kept[name] = kept
        self._tokens += batch.tokens
        self._bytes += kept.states_bytes
        return kept

    def _remove(self, name: str) -> None:
        if (kept := self._kept.pop(name, None)) is not None:
            self._tokens -= kept.batch.tokens
            self._bytes -= kept.states_bytes

    def _drop(self, name: str) -> None:
        """Forget a batch. `settle` deletes its file."""
        self._remove(name)
        self._dropped.add(name)

    @property
    def prompts(self) -> dict[str, int]:
        """Hashes of all prompts in here, which were trained on, with the newest policy that answered each."""
        found: dict[str, int] = {}
        for kept in self._kept.values():
            for prompt in kept.prompts:
                found[prompt] = max(found.get(prompt, kept.policy_version), kept.policy_version)
        return found

    def names(self) -> list[str]:
        """File names that a checkpoint must list, for `restore`."""
        return list(self._kept)

    def known_rollouts(self) -> dict[str, tuple[int, ...]]:
        """The known rollouts of each file. A checkpoint lists them too."""
        return {name: kept.known for name, kept in self._kept.items() if kept.known}

    def settle(self) -> None:
        """After a checkpoint with `names()`: move new files out of the spool, and delete files of forgotten batches."""
        for name, path in self._unsettled.items():
            if path.exists():
                path.rename(self._directory / name)
        self._unsettled.clear()
        for name in self._dropped:
            (self._directory / name).unlink(missing_ok=True)
        self._dropped.clear()

    def clear(self) -> None:
        """Delete all batches. Call it right after a checkpoint, whose drafter has learnt from them."""
        for name in self.names():
            self._drop(name)
        self.settle()

    def restore(
        self,
        names: Sequence[str],
        spool: Path,
        known: Mapping[str, Sequence[int]],
        complete: Callable[[RolloutBatch], RolloutBatch] = lambda batch: batch,
    ) -> None:
        """Load the batches that a checkpoint lists, from here, or from the spool after a crash before `settle`.

        `complete` adds normalisers that the sender could not compute. `known`: what `known_rollouts()` was.
        """
        for name in names:
            path = next((p for p in (self._directory / name, spool / name) if p.exists()), None)
            if path is None:
                continue
            try:
                check_blob(path)
                places = tuple(known.get(name, ()))
                self._keep(name, complete(without(load_batch(path), places)), places)
            # Damaged, or without a head. The checkpoint has learnt from it already.
            except (BlobDamaged, WireError, TargetHeadError, OSError) as error:
                if isinstance(error, OSError) and error.errno != errno.EIO:
                    raise  # a later read may succeed
                log.warning("%s: %s is left out of the recent rollouts: %s", self._run, name, error)
                continue
            if path.parent == spool:
                self._unsettled[name] = path
        for stray in self._found:
            if stray.name not in names:
                stray.unlink(missing_ok=True)

    def forget_abandoned(self, heads: Sequence[tuple[int, int]], abandoned: Callable[[], Abandoned]) -> None:
        """Drop batches of an attempt that the trainer abandoned, whose heads may be those of the next attempt by now.

        `heads`: policy version of each received head, and when it came (Unix ns). `abandoned`: returns the abandoned
        attempt. It is called only if a head came after a batch of its version or a higher one. That alone proves
        nothing: the head may be late, since several engines each send the heads that they meet.
        """
        if not self._outdated(heads, math.inf, told=True):
            return
        before = abandoned()  # a batch's file is older than the end of its entry's millisecond
        if names := self._outdated(heads, (before.until + 1.0) * 1e6, told=before.told):
            said = "%s: the trainer went back: %d recent batches of before are not trained on again"
            log.info(said, self._run, len(names))
            for name in names:
                self._drop(name)

    def _outdated(self, heads: Sequence[tuple[int, int]], until_ns: float, *, told: bool) -> set[str]:
        """Names of batches whose policy version was reached again.

        A head outdates batches of its version and of higher ones that came before it. If no session `told` of the
        abandonment, it does so only if some of them are of a higher version. Batches from after `until_ns` stay.
        """
        kept, came_ns = self._kept.values(), {name: self._came_ns(name) for name in self._kept}
        found = set[str]()
        for version, head_ns in heads:
            before = [k for k in kept if k.policy_version >= version and came_ns[k.name] < min(head_ns, until_ns)]
            if told or any(k.policy_version > version for k in before):
                found |= {k.name for k in before}
        return found

    def _came_ns(self, name: str) -> float:
        for path in (self._directory / name, self._unsettled.get(name)):
            with contextlib.suppress(FileNotFoundError):
                if path is not None:
                    return path.stat().st_mtime_ns
        return math.inf

    def oldest_policy_version(self) -> int | None:
        """The oldest policy version of all batches; None: there is no batch."""
        return min((kept.policy_version for kept in self._kept.values()), default=None)

    def ran_out_of_memory(self, step_tokens: int) -> None:
        """After memory ran out in a training: leave the longest rollouts out of the next ones, if others remain."""
        lengths = np.concatenate([_lengths(kept)[_short(kept, self.limit.tokens)] for kept in self._kept.values()])
        if self.limit.tighten(lengths, step_tokens):
            log.warning(
                "%s: memory ran out in a training with a rollout of %d tokens; in the next %d, those of more than %d "
                "are scored and not trained on",
                *(self._run, lengths.max(), self.limit.trainings, self.limit.tokens),
            )

    def but(self, newest: Sequence[KeptBatch]) -> list[KeptBatch]:
        """All batches but these, oldest first."""
        names = {kept.name for kept in newest}
        return [kept for name, kept in self._kept.items() if name not in names]


@dataclass(frozen=True, slots=True)
class Task:
    """One training: the batches from which its windows are drawn, and how. Every rank draws the same.

    `newest_share`: docs/lab/recipes.md compares other shares than half.
    """

    newest: Sequence[KeptBatch]
    older: Sequence[KeptBatch]
    passes: float
    step_tokens: int
    seed: int
    newest_share: float = 0.5
    longest: int | None = None  # tokens; longer rollouts are left out

    @property
    def tokens(self) -> float:
        """Tokens of all windows together. The last window may exceed it a little."""
        return self.passes * sum(int(_lengths(kept)[_short(kept, self.longest)].sum()) for kept in self.newest)

    def drawn(self) -> Iterator[Drawn]:
        """Draw the rollouts of each optimizer step: a part from the newest batches, the rest from older ones.

        Ends once `passes` times the tokens of the newest batches were drawn. Each part is filled with whole rollouts,
        of one policy version if that has enough. With too few rollouts, steps are smaller, and there are more of them.
        `taken` takes the rollouts out of the batches.
        """
        rng = np.random.default_rng(self.seed)
        of_new, of_old = self.step_tokens, self.step_tokens
        if self.newest and self.older:
            of_new = round(self.newest_share * self.step_tokens)
            of_old = self.step_tokens - of_new
        left = self.tokens
        while (self.newest or self.older) and left > 0:
            drawn = [*_fill(self.newest, of_new, rng, self.longest), *_fill(self.older, of_old, rng, self.longest)]
            left -= _tokens(drawn)
            yield drawn

    def order(self) -> dict[str, Any]:
        """The task as JSON. A batch is the name of its file and its known rollouts."""
        batches = {part: [[k.name, k.known] for k in getattr(self, part)] for part in ("newest", "older")}
        return batches | {name: getattr(self, name) for name in ("passes", "step_tokens", "seed", "longest")}

    @classmethod
    def of(cls, order: Mapping[str, Any], kept: Callable[[str, tuple[int, ...]], KeptBatch]) -> Self:
        """The task of an order. `kept`: returns a batch by its file's name and its known rollouts."""
        newest, older = ([kept(name, tuple(known)) for name, known in order[part]] for part in ("newest", "older"))
        return cls(newest, older, order["passes"], order["step_tokens"], order["seed"], longest=order["longest"])


def with_normalisers(ranks: Ranks, task: Task) -> Task:
    """The task with rank 0's normalisers. Files may lack them, and each costs a product with the whole head."""
    batches = [*task.newest, *task.older]
    sizes = [kept.batch.tokens for kept in batches]
    own = [kept.batch.logsumexp.float() if ranks.rank == 0 else torch.zeros(kept.batch.tokens) for kept in batches]
    parts = torch.split(ranks.add_table(torch.cat(own)), sizes)
    whole = [
        replace(kept, batch=replace(kept.batch, logsumexp=part, normalised=True))
        for kept, part in zip(batches, parts, strict=True)
    ]
    return replace(task, newest=whole[: len(task.newest)], older=whole[len(task.newest) :])


def taken(drawn: Drawn, ranks: Ranks = ALONE) -> list[RolloutBatch]:
    """A rank's share of a drawn window: every W-th rollout."""
    parts, before = [], 0
    for kept, rollouts in drawn:
        if mine := rollouts[(ranks.rank - before) % ranks.world :: ranks.world]:
            parts.append(kept.batch.select(mine))
        before += len(rollouts)
    return _packed(parts)


def windows(drawn: Iterable[Drawn], trainer: DrafterTrainer, target: Target) -> Iterator[list[tuple[Prepared, Policy]]]:
    """Yield the input of `trainer.step` for each drawn window: this rank's share, with rank 0's heads."""
    ranks = trainer.ranks
    shares = ((sorted({kept.policy_version for kept, _ in w}), taken(w, ranks)) for w in drawn)
    prepared = prefetch(((versions, [trainer.prepare(b) for b in mine]) for versions, mine in shares), trainer.device)

    def heads(versions: Sequence[int]) -> list[tuple[int, Sequence[int] | None]]:
        return [target.head_of(version) for version in versions]

    def policies(versions: Sequence[int], named: Sequence[tuple[int, Sequence[int] | None]]) -> dict[int, Policy]:
        return {version: target.with_head(*head) for version, head in zip(versions, named, strict=True)}

    while (window := ranks.together(lambda: next(prepared, None))) is not None:
        versions, mine = window
        named = ranks.shared(partial(heads, versions))
        found = ranks.together(partial(policies, versions, named))
        yield [(one, found[one.batch.policy_version]) for one in mine]


def _tokens(drawn: Drawn) -> int:
    return sum(int(_lengths(kept)[rollouts].sum()) for kept, rollouts in drawn)


def _lengths(kept: KeptBatch) -> npt.NDArray[np.int64]:
    """Tokens of each rollout."""
    return np.diff(kept.batch.cu_seqlens.numpy())


def _short(kept: KeptBatch, longest: int | None) -> npt.NDArray[np.int64]:
    """Places of the rollouts of at most `longest` tokens; None: of all."""
    return np.arange(kept.batch.rollouts) if longest is None else np.flatnonzero(_lengths(kept) <= longest)


def _packed(parts: Sequence[RolloutBatch]) -> list[RolloutBatch]:
    """One batch of each policy version and kind, because many small ones would not keep a GPU busy."""
    alike: dict[tuple[object, ...], list[RolloutBatch]] = {}
    for part in parts:
        alike.setdefault((part.policy_version, *part.kind), []).append(part)
    return [RolloutBatch.concat(group) for group in alike.values()]


def _fill(
    batches: Sequence[KeptBatch], tokens: int, rng: np.random.Generator, longest: int | None
) -> Iterator[tuple[KeptBatch, list[int]]]:
    """Draw random whole rollouts of at most `longest` tokens each, up to about `tokens` together; at least one.

    All are of one policy version if that has enough: each version has its own head, and needs its own pass. A version
    is drawn in proportion to its number of rollouts, so that every rollout has the same chance.
    """
    rollouts: dict[int, int] = {}
    for kept in batches:
        if count := len(_short(kept, longest)):
            rollouts[kept.policy_version] = rollouts.get(kept.policy_version, 0) + count
    weights = np.array(list(rollouts.values()), dtype=np.float64)
    versions = list(rollouts)
    for place in rng.choice(len(versions), len(versions), replace=False, p=weights / weights.sum()) if versions else ():
        parts = _draw([k for k in batches if k.policy_version == versions[place]], tokens, rng, longest)
        yield from parts
        tokens -= _tokens(parts)
        if tokens <= 0:
            return


def _draw(batches: Sequence[KeptBatch], tokens: int, rng: np.random.Generator, longest: int | None) -> Drawn:
    """Random whole rollouts of all the batches, at least one, up to about `tokens`."""
    short = [_short(kept, longest) for kept in batches]
    places = [(b, i) for b, own in enumerate(short) for i in own.tolist()]
    lengths = np.concatenate([_lengths(kept)[own] for kept, own in zip(batches, short, strict=True)])
    order = rng.permutation(len(places))
    count = int(np.searchsorted(np.cumsum(lengths[order]), tokens)) + 1
    chosen: dict[int, list[int]] = {}
    for place in sorted(order[:count]):
        batch, rollout = places[place]
        chosen.setdefault(batch, []).append(rollout)
    return [(batches[batch], rollouts) for batch, rollouts in chosen.items()]
