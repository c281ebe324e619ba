"""The evidence of a claim about drafters that were not trained on it, and the pooled evidence of several claims."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final, Self

import numpy as np
import numpy.typing as npt

from drafter.batch import RolloutBatch
from drafter.replay.acceptance import Replay
from service.worker.scoring import Scores

#: Prompts that a look at a challenger needs. Claims of fewer are pooled.
FEWEST_PROMPTS: Final = 4
#: Once this number of claims is pooled, two prompts are enough, because a run may have no more.
POOLED_CLAIMS: Final = 4
#: Fewest prompts that bound an error. They are enough where nothing is promoted: for a fall of α, for a realised gain.
LEAST_PROMPTS: Final = 2


@dataclass(frozen=True, slots=True)
class Fresh:
    """A claim's rollouts, scored and not trained on yet."""

    batches: tuple[RolloutBatch, ...]
    looked: tuple[tuple[int, ...], ...]  # of each batch, the places of the rollouts that were replayed
    replays: Mapping[str, Replay]  # by version, of the drafters that were scored on all batches
    prompts: tuple[str, ...]  # of each replayed rollout
    evidence: tuple[int, ...]  # rollouts whose prompts the candidate was not trained on (`of` has the exception)
    by_prompt: bool  # False: there is only one prompt, so each rollout is an observation

    @classmethod
    def of(cls, scored: Sequence[tuple[RolloutBatch, Scores]], trained: Mapping[str, int]) -> Self:
        """`trained`: prompts that the candidate was trained on lately, with the newest policy version of each.

        If fewer than two prompts are new, prompts whose earlier rollouts are of another policy version count as
        evidence too: the run repeats its prompts, and later rollouts will. Siblings are never evidence, because
        rollouts of one group are of one version whenever they arrive.
        """
        batches = tuple(batch for batch, _ in scored)
        names = set.intersection(*(set(scores.versions) for _, scores in scored))
        replays = {name: Replay.concat([scores.versions[name] for _, scores in scored]) for name in sorted(names)}
        prompts = tuple(prompt for _, scores in scored for prompt in scores.prompts)
        looked = tuple(scores.looked for _, scores in scored)
        policies = [batch.policy_version for batch, scores in scored for _ in scores.looked]
        unseen = tuple(i for i, prompt in enumerate(prompts) if prompt not in trained)
        if len({prompts[i] for i in unseen}) < 2:
            unseen = tuple(i for i, prompt in enumerate(prompts) if trained.get(prompt) != policies[i])
        return cls(batches, looked, replays, prompts, unseen, by_prompt=not trained or len({*trained, *prompts}) > 1)

    def select(self, rollouts: Sequence[int]) -> list[RolloutBatch]:
        """The parts of the batches with these rollouts, in ascending order."""
        bounds = np.cumsum([0, *(len(places) for places in self.looked)])
        chosen = np.array(sorted(rollouts), dtype=np.int64)
        parts = [chosen[(chosen >= low) & (chosen < high)] - low for low, high in pairwise(bounds)]
        of_batches = zip(self.batches, self.looked, parts, strict=True)
        return [batch.select([places[i] for i in part]) for batch, places, part in of_batches if part.size]


@dataclass(slots=True)
class Pool:
    """Claims with too few prompts, such as a single group, which are kept until they have enough together."""

    claims: list[tuple[tuple[Replay, ...], tuple[str, ...]]] = field(default_factory=list)
    by_prompt: bool = True  # of all waiting claims

    def add(
        self,
        fresh: Fresh,
        replays: Sequence[Replay],
        rollouts: Sequence[int],
        *,
        alone: int = LEAST_PROMPTS,
        claims: int = 1,
    ) -> tuple[list[Replay], npt.NDArray[np.int64] | None] | None:
        """Add `rollouts` of a claim. Returns the pooled replays and each rollout's prompt; None: too few prompts yet.

        Where each rollout is an observation, no prompts are returned. `alone`: prompts that are enough in one claim.
        `claims`: the fewest claims to wait for.
        """
        prompts = tuple(fresh.prompts[i] if fresh.by_prompt else f"{fresh.prompts[i]} {i}" for i in rollouts)
        if fresh.by_prompt != self.by_prompt:  # waiting rollouts counted in another way
            self.claims, self.by_prompt = [], fresh.by_prompt
        if prompts:
            self.claims.append((tuple(replays), prompts))
        names = [prompt for _, of_one in self.claims for prompt in of_one]
        fewest = alone if len(self.claims) <= 1 else FEWEST_PROMPTS
        if not fresh.by_prompt or len(self.claims) >= POOLED_CLAIMS:
            fewest = LEAST_PROMPTS
        if len(set(names)) < fewest or len(self.claims) < claims:
            self.claims = self.claims[-POOLED_CLAIMS:]
            return None
        pooled = [Replay.concat(parts) for parts in zip(*(parts for parts, _ in self.claims), strict=True)]
        self.claims = []
        _, groups = np.unique(names, return_inverse=True)
        return pooled, groups.astype(np.int64) if fresh.by_prompt else None
