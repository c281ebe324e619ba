"""Replay α of any drafter on any rollout files, beside n-gram drafting."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from drafter.batch import RolloutBatch, prompt_hashes, screen
from drafter.errors import DrafterError
from drafter.model.draft_model import DraftModel
from drafter.policy import Policy
from drafter.replay.acceptance import Ints, Replay
from drafter.replay.ngram import ngram_replay
from drafter.replay.replay import Drafting, numbered, replay


@dataclass(frozen=True, slots=True, eq=False)
class Evaluation:
    """Replays of the same rollouts, in one order. `groups` numbers each rollout's prompt: the unit that varies."""

    drafter: Replay
    ngram: Replay
    groups: Ints
    policy_versions: tuple[int, int]  # lowest and highest
    tokens: int  # prompts included

    def summary(self) -> dict[str, Any]:
        """Every figure as plain numbers, ready for JSON; nan becomes None. Intervals are of 95 %."""
        figures = {
            name: {
                "alpha": _plain(one.alpha),
                "interval": [_plain(x) for x in one.interval(groups=self.groups)],
                "rounds": float(one.rounds.sum()),
                "position_acceptance": [_plain(x) for x in one.position_acceptance.tolist()],
                "conditional_acceptance": [_plain(x) for x in one.conditional_acceptance.tolist()],
            }
            for name, one in (("drafter", self.drafter), ("n-gram", self.ngram))
        }
        return {
            "rollouts": self.drafter.rollouts,
            "prompts": len(set(self.groups.tolist())),
            "tokens": self.tokens,
            "tokens_by_rounds": float(self.drafter.tokens.sum()),
            "policy_versions": list(self.policy_versions),
            "depth": self.drafter.depth,
            "drafters": figures,
        }


def evaluate(
    drafter: DraftModel,
    batches: Iterable[RolloutBatch],
    policy_at: Callable[[int], Policy],
    *,
    depth: int,
    drafting: Drafting = "probabilistic",
) -> Evaluation:
    """Replay every batch, one in memory at a time, with the policy of its version, which `policy_at` gives.

    Raises `BatchRejected` for features that give no probabilities, `DrafterError` where a batch is of another target.
    """
    own, ngram, prompts, versions, tokens = [], [], list[str](), [], 0
    for batch in batches:
        screen(batch)
        prompts += prompt_hashes(batch)
        versions.append(batch.policy_version)
        tokens += batch.tokens
        policy = policy_at(batch.policy_version)
        own.append(replay(drafter, batch, policy, depth=depth, drafting=drafting))
        ngram.append(ngram_replay(batch.input_ids, batch.loss_mask, batch.cu_seqlens, depth=depth))
    if not versions:
        raise DrafterError("expected at least one batch of rollouts to evaluate on")
    return Evaluation(
        drafter=Replay.concat(own),
        ngram=Replay.concat(ngram),
        groups=numbered(prompts),
        policy_versions=(min(versions), max(versions)),
        tokens=tokens,
    )


def _plain(value: float) -> float | None:
    return None if math.isnan(value) else value
