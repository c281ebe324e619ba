"""The worker's bounded memory of recent rollouts: what it trains on again.

No rollout is held out. The gate judges on rollouts that have just arrived, before they come in here
(`service.worker.promotion`), and leaves out those whose prompt is in here: their siblings were trained on.

Batches are kept as the files they came in (`runs/<run>/worker/recent/`); the newest `capacity_tokens` of them stay.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from drafter.batch import RolloutBatch, load_batch, prompt_hashes
from drafter.errors import TargetHeadError
from rl_hooks.wire import WireError

log = logging.getLogger("draftalign.worker")


@dataclass(frozen=True, slots=True)
class KeptBatch:
    """One batch in memory-mapped form."""

    name: str  # file name inside the directory of recent batches
    batch: RolloutBatch
    prompts: frozenset[str]  # `prompt_hashes` of its rollouts
    known: tuple[int, ...] = ()  # places in the file of rollouts that are not in `batch`: an earlier batch had them

    @property
    def policy_version(self) -> int:
        """The policy that generated it."""
        return self.batch.policy_version


class RecentRollouts:
    """Newest batches, oldest first."""

    def __init__(self, directory: Path, *, capacity_tokens: int) -> None:
        self._directory = directory
        self._directory.mkdir(parents=True, exist_ok=True)
        # Listed before the checkpoint is read: after SIGSTOP in between, a successor's files must not look like strays.
        # docs/guide/operating.md, "What a paused process can do".
        self._found = list(directory.iterdir())
        self._capacity_tokens = capacity_tokens
        self._kept: list[KeptBatch] = []
        self._unsettled: dict[str, Path] = {}  # name -> where the spool still holds the file
        self._dropped: list[str] = []

    def add(self, path: Path, batch: RolloutBatch, known: tuple[int, ...] = ()) -> KeptBatch:
        """Take in a batch whose file still lies in the spool; `settle` moves it here. `known`: see `KeptBatch`."""
        self._kept = [k for k in self._kept if k.name != path.name]  # a redelivered one takes its own place
        kept = self._keep(path.name, batch, known)
        self._unsettled[path.name] = path
        while len(self._kept) > 1 and sum(k.batch.tokens for k in self._kept) > self._capacity_tokens:
            self._dropped.append(self._kept.pop(0).name)
        return kept

    def _keep(self, name: str, batch: RolloutBatch, known: tuple[int, ...]) -> KeptBatch:
        kept = KeptBatch(name, batch, frozenset(prompt_hashes(batch)), known)
        self._kept.append(kept)
        return kept

    @property
    def prompts(self) -> dict[str, int]:
        """Prompts (hashes) of all that is kept, on which the candidate is trained -> newest policy that answered it."""
        found: dict[str, int] = {}
        for kept in self._kept:
            for prompt in kept.prompts:
                found[prompt] = max(found.get(prompt, kept.policy_version), kept.policy_version)
        return found

    def names(self) -> list[str]:
        """What a checkpoint must list to be able to `restore`."""
        return [kept.name for kept in self._kept]

    def known(self) -> dict[str, tuple[int, ...]]:
        """What a checkpoint must list too: the rollouts of a file that an earlier batch had, by its name."""
        return {kept.name: kept.known for kept in self._kept if kept.known}

    def settle(self) -> None:
        """After a checkpoint that lists `names()`: move new files out of the spool, delete what nothing lists now."""
        for name, path in self._unsettled.items():
            if path.exists():
                path.rename(self._directory / name)
        self._unsettled.clear()
        for name in self._dropped:
            (self._directory / name).unlink(missing_ok=True)
        self._dropped.clear()

    def restore(
        self,
        names: Sequence[str],
        spool: Path,
        complete: Callable[[RolloutBatch], RolloutBatch] = lambda batch: batch,
        known: Mapping[str, Sequence[int]] | None = None,
    ) -> None:
        """Load what a checkpoint listed, from here or, if the crash came before `settle`, from the spool.

        `complete` adds what the sender could not compute. `known`: what `known()` was; None: of an older worker.
        """
        left_out = {name: tuple(places) for name, places in (known or {}).items()}
        for name in names:
            path = next((p for p in (self._directory / name, spool / name) if p.exists()), None)
            if path is None:
                continue
            try:
                places = left_out.get(name, ())
                self._keep(name, complete(without(load_batch(path), places)), places)
            # Torn by loss of power, or without a head; what was learnt from it is in the checkpoint.
            except (WireError, TargetHeadError) as error:
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
        new = list(newest)
        old = [k for k in self._kept if k not in new]
        of_new, of_old = step_tokens, step_tokens
        if new and old:
            of_new = round(newest_share * step_tokens)
            of_old = step_tokens - of_new
        left = passes * sum(k.batch.tokens for k in newest)
        while (new or old) and left > 0:
            drawn = [*_fill(new, of_new, rng), *_fill(old, of_old, rng)]
            left -= sum(part.tokens for part in drawn)
            yield _packed(drawn)


def without(batch: RolloutBatch, places: Sequence[int]) -> RolloutBatch:
    """The batch less the rollouts at these places."""
    left_out = set(places)
    return batch.select([i for i in range(batch.rollouts) if i not in left_out]) if left_out else batch


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
        rollouts[kept.policy_version] = rollouts.get(kept.policy_version, 0) + kept.batch.rollouts
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
    places = [(b, i) for b, kept in enumerate(batches) for i in range(kept.batch.rollouts)]
    lengths = np.concatenate([np.diff(k.batch.cu_seqlens.numpy()) for k in batches])
    order = rng.permutation(len(places))
    count = int(np.searchsorted(np.cumsum(lengths[order]), tokens)) + 1
    chosen: dict[int, list[int]] = {}
    for place in sorted(order[:count]):
        batch, rollout = places[place]
        chosen.setdefault(batch, []).append(rollout)
    return [batches[batch].batch.select(rollouts) for batch, rollouts in chosen.items()]
