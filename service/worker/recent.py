"""The worker's bounded memory of recent rollouts: what it trains on again, and the held-out rollouts for the gate.

One prompt in N is held out: none of its rollouts is ever trained on. A hash of the prompt chooses it, so a restart
chooses the same ones. The prompt decides and not the rollout: the siblings of a held-out rollout (a GRPO group) would
teach the candidate nearly the same text.

That needs many prompts: of three, all or none may be held out. So the first `MIN_ROLLOUTS * N` prompts of a run are
never split by prompt. Of these, one *group* in N is held out: the rollouts of one prompt in one batch. A run whose
prompts are empty, or fewer than that, stays split by group; `HeldOut.by_prompt` says which it is.

Batches are kept as the files they came in (`runs/<run>/worker/recent/`); the newest `capacity_tokens` of them stay.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from drafter.batch import RolloutBatch, load_batch, prompt_hashes
from drafter.replay.gate import MIN_ROLLOUTS
from rl_hooks.wire import WireError

log = logging.getLogger("draftalign.worker")


def is_held_out(key: str, one_in: int) -> bool:
    """Hold out about one key in `one_in`, always the same ones. 0: none."""
    return one_in > 0 and int.from_bytes(hashlib.sha256(key.encode()).digest()[:8]) % one_in == 0


@dataclass(frozen=True, slots=True)
class KeptBatch:
    """One batch in memory-mapped form, its training rollouts told from its held-out ones."""

    name: str  # file name inside the directory of recent batches
    batch: RolloutBatch
    train: tuple[int, ...]  # indices of rollouts
    held_out: tuple[int, ...]  # of prompts that are never trained on
    held_out_groups: tuple[int, ...] = ()  # their prompts may have been trained on in other batches

    @property
    def policy_version(self) -> int:
        """The policy that generated it."""
        return self.batch.policy_version


@dataclass(frozen=True, slots=True)
class HeldOut:
    """Evidence for the gate: rollouts that no candidate was trained on."""

    batches: list[RolloutBatch]  # the batch that came last first
    by_prompt: bool  # True: no rollout of their prompts was ever trained on either


class RecentRollouts:
    """Newest batches, oldest first."""

    def __init__(self, directory: Path, *, capacity_tokens: int, holdout_one_in: int) -> None:
        self._directory = directory
        self._directory.mkdir(parents=True, exist_ok=True)
        # Listed before the checkpoint is read: after SIGSTOP in between, a successor's files must not look like strays.
        # docs/guide/operating.md, "What a paused process can do".
        self._found = list(directory.iterdir())
        self._capacity_tokens = capacity_tokens
        self._holdout_one_in = holdout_one_in
        self._kept: list[KeptBatch] = []
        self._first_prompts: dict[str, None] = {}  # hashes, in order of arrival; split by group
        self._unsettled: dict[str, Path] = {}  # name -> where the spool still holds the file
        self._dropped: list[str] = []

    def add(self, path: Path, batch: RolloutBatch) -> KeptBatch:
        """Take in a batch whose file still lies in the spool; `settle` moves it here."""
        self._kept = [k for k in self._kept if k.name != path.name]  # a redelivered one takes its own place
        kept = self._keep(path.name, batch)
        self._unsettled[path.name] = path
        while len(self._kept) > 1 and sum(k.batch.tokens for k in self._kept) > self._capacity_tokens:
            self._dropped.append(self._kept.pop(0).name)
        return kept

    def _keep(self, name: str, batch: RolloutBatch) -> KeptBatch:
        batch_id, one_in = name.partition(".")[0], self._holdout_one_in
        by_prompt, by_group = [], []
        for rollout, prompt in enumerate(prompt_hashes(batch)):
            if len(self._first_prompts) < MIN_ROLLOUTS * one_in:
                self._first_prompts[prompt] = None
            if prompt not in self._first_prompts:
                by_prompt += [rollout] if is_held_out(prompt, one_in) else []
            elif is_held_out(f"{batch_id}/{prompt}", one_in):
                by_group.append(rollout)
        left_out = {*by_prompt, *by_group}
        train = tuple(i for i in range(batch.rollouts) if i not in left_out)
        kept = KeptBatch(name, batch, train, tuple(by_prompt), tuple(by_group))
        self._kept.append(kept)
        return kept

    @property
    def first_prompts(self) -> list[str]:
        """Hashes of the prompts that are split by group; a checkpoint must keep them."""
        return list(self._first_prompts)

    def names(self) -> list[str]:
        """What a checkpoint must list to be able to `restore`."""
        return [kept.name for kept in self._kept]

    def settle(self) -> None:
        """After a checkpoint that lists `names()`: move new files out of the spool, delete what nothing lists now."""
        for name, path in self._unsettled.items():
            if path.exists():
                path.rename(self._directory / name)
        self._unsettled.clear()
        for name in self._dropped:
            (self._directory / name).unlink(missing_ok=True)
        self._dropped.clear()

    def restore(self, names: Sequence[str], spool: Path, first_prompts: Sequence[str] | None) -> None:
        """Load what a checkpoint listed, from here or, if the crash came before `settle`, from the spool.

        `first_prompts`: as the checkpoint has them. None: it is of a version that split by rollout, so every prompt of
        these batches may have been trained on.
        """
        self._first_prompts = dict.fromkeys(first_prompts or ())
        for name in names:
            path = next((p for p in (self._directory / name, spool / name) if p.exists()), None)
            if path is None:
                continue
            try:
                batch = load_batch(path)
                if first_prompts is None:
                    self._first_prompts |= dict.fromkeys(prompt_hashes(batch))
                self._keep(name, batch)
            except WireError as error:  # torn by loss of power; what was learnt from it is in the checkpoint
                log.warning("%s is left out of the recent rollouts: %s", name, error)
                continue
            if path.parent == spool:
                self._unsettled[name] = path
        for stray in self._found:
            if stray.name not in names:
                stray.unlink(missing_ok=True)

    def oldest_policy_version(self) -> int | None:
        """Of all that is kept; None when nothing is."""
        return min((kept.policy_version for kept in self._kept), default=None)

    def held_out(self, rollouts: int) -> HeldOut:
        """Held-out rollouts, the batch that came last first, until `rollouts` of `MIN_ROLLOUTS` prompts are together.

        By prompt where that gives as many rollouts, and as many prompts as can be had; else of groups too. By arrival
        and not by version: a trainer that went back to an earlier checkpoint counts on from there.
        """
        newest_first = self._kept[::-1]
        by_prompt = _enough([(k.batch, k.held_out) for k in newest_first], rollouts)
        of_all = _enough([(k.batch, sorted((*k.held_out, *k.held_out_groups))) for k in newest_first], rollouts)
        prompts = len(_prompts(by_prompt))
        as_many = prompts >= MIN_ROLLOUTS or prompts == len(_prompts(of_all))
        if as_many and sum(batch.rollouts for batch in by_prompt) >= rollouts:
            return HeldOut(by_prompt, by_prompt=True)
        return HeldOut(of_all, by_prompt=False)

    def train_steps(
        self,
        newest: Sequence[KeptBatch],
        *,
        passes: float,
        step_tokens: int,
        seed: int,
        newest_share: float = 0.5,
    ) -> Iterator[list[RolloutBatch]]:
        """Yield what each optimizer step trains on: some tokens from the newest batches, the rest from older ones.

        Ends once `passes` times the tokens of the newest batches were drawn. Each part takes whole rollouts of as many
        batches as fill it, of one policy version where that has enough; where there are too few, steps are smaller, and
        more. `newest_share`: docs/lab/recipes.md has what other shares than half do.
        """
        rng = np.random.default_rng(seed)
        new = [k for k in newest if k.train]
        old = [k for k in self._kept if k.train and k not in new]
        of_new, of_old = step_tokens, step_tokens
        if new and old:
            of_new = round(newest_share * step_tokens)
            of_old = step_tokens - of_new
        left = passes * sum(k.batch.tokens for k in newest)
        while (new or old) and left > 0:
            drawn = [*_fill(new, of_new, rng), *_fill(old, of_old, rng)]
            left -= sum(part.tokens for part in drawn)
            yield _packed(drawn)


def _enough(parts: Sequence[tuple[RolloutBatch, Sequence[int]]], rollouts: int) -> list[RolloutBatch]:
    """As many of the parts as hold `rollouts` rollouts of `MIN_ROLLOUTS` prompts together; all where they do not."""
    found: list[RolloutBatch] = []
    for batch, indices in parts:
        if rollouts <= 0 and len(_prompts(found)) >= MIN_ROLLOUTS:
            break
        if indices:
            found.append(batch.select(indices))
            rollouts -= len(indices)
    return found


def _prompts(batches: Sequence[RolloutBatch]) -> set[str]:
    return {prompt for batch in batches for prompt in prompt_hashes(batch)}


def _packed(parts: Sequence[RolloutBatch]) -> list[RolloutBatch]:
    """One batch of each policy version and kind: a step of many small ones would keep no GPU busy."""
    alike: dict[tuple[object, ...], list[RolloutBatch]] = {}
    for part in parts:
        alike.setdefault((part.policy_version, *part.kind), []).append(part)
    return [RolloutBatch.concat(group) for group in alike.values()]


def _fill(batches: Sequence[KeptBatch], tokens: int, rng: np.random.Generator) -> Iterator[RolloutBatch]:
    """Random whole rollouts, at least one if there is any, up to about `tokens`.

    Of one policy version as far as they go: rollouts of another have another head, and need passes of their own. A
    version comes up as often as it has rollouts, so that each rollout does as often as any other.
    """
    rollouts: dict[int, int] = {}
    for kept in batches:
        rollouts[kept.policy_version] = rollouts.get(kept.policy_version, 0) + len(kept.train)
    weights = np.array(list(rollouts.values()), dtype=np.float64)
    versions = list(rollouts)
    for place in rng.choice(len(versions), len(versions), replace=False, p=weights / weights.sum()) if versions else ():
        parts = _draw([k for k in batches if k.policy_version == versions[place]], tokens, rng)
        yield from parts
        tokens -= sum(part.tokens for part in parts)
        if tokens <= 0:
            return


def _draw(batches: Sequence[KeptBatch], tokens: int, rng: np.random.Generator) -> list[RolloutBatch]:
    """Random whole rollouts of all the batches, at least one, up to about `tokens`."""
    places = [(b, i) for b, kept in enumerate(batches) for i in kept.train]
    lengths = np.concatenate([np.diff(k.batch.cu_seqlens.numpy())[list(k.train)] for k in batches])
    order = rng.permutation(len(places))
    count = int(np.searchsorted(np.cumsum(lengths[order]), tokens)) + 1
    chosen: dict[int, list[int]] = {}
    for place in sorted(order[:count]):
        batch, rollout = places[place]
        chosen.setdefault(batch, []).append(rollout)
    return [batches[batch].batch.select(rollouts) for batch, rollouts in chosen.items()]
