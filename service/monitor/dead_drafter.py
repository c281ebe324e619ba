"""Tells a dead drafter from a bad one: pure, no Redis, no clock, no torch.

A weight sync, a sleep/wake or a refit can leave an engine with a drafter whose every proposal is rejected: live α is
1.00, outputs stay right, nobody notices. The proof that the drafter itself is sound is its replay α on the very
rollouts that the engine produced. Live low *and* replay high means: the engine lost it; push it again.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from service.monitor.records import ScoreRecord

#: Replay α of the last so many scored batches is what an engine's live α is compared with.
REPLAYED_BATCHES: Final = 64


@dataclass(frozen=True, slots=True)
class DeadRule:
    """When a drafter counts as dead, and how often that may trigger a push."""

    min_rounds: int = 200
    live_alpha: float = 1.05
    replay_alpha: float = 1.3
    push_again_seconds: float = 30.0

    def suspects(self, rounds: int, accepted_tokens: int) -> bool:
        """Whether these counts are enough, and low enough, that the rest of the evidence matters."""
        return rounds >= self.min_rounds and 1.0 + accepted_tokens / rounds <= self.live_alpha


@dataclass(frozen=True, slots=True)
class Judgement:
    """`judged` is whether there was evidence enough; `dead` the verdict; `push` whether to act on it now."""

    judged: bool
    dead: bool
    push: bool
    reason: str


def pooled_replay_alpha(scores: Iterable[ScoreRecord], drafter_version: str | None) -> float | None:
    """Pooled replay α of a version over the batches scored while it was served; None without a round."""
    found = [sums for r in scores if r.drafter_version == drafter_version and (sums := r.sums("served")) is not None]
    return sum(sums.tokens for sums in found) / sum(sums.rounds for sums in found) if found else None


def judge(
    rule: DeadRule,
    *,
    rounds: int,
    accepted_tokens: int,
    replay_alpha: float | None,
    is_latest: bool,
    seconds_since_push: float | None,
) -> Judgement:
    """Judge a drafter by what an engine counted since it was last judged.

    `seconds_since_push` is None if the run's drafter was never pushed again.
    """
    if rounds < rule.min_rounds:
        return Judgement(False, False, False, f"{rounds} rounds so far; {rule.min_rounds} are needed to judge")
    live = 1.0 + accepted_tokens / rounds
    if live > rule.live_alpha:
        return Judgement(True, False, False, f"alive: live α {live:.2f} over {rounds} rounds")
    if replay_alpha is None or math.isnan(replay_alpha):
        return Judgement(True, False, False, f"live α {live:.2f}, but no replay α of this version to compare with")
    if replay_alpha <= rule.replay_alpha:
        return Judgement(True, False, False, f"live α {live:.2f} and replay α {replay_alpha:.2f} agree: bad, not dead")
    evidence = f"live α {live:.2f} over {rounds} rounds against replay α {replay_alpha:.2f}"
    if not is_latest:
        return Judgement(True, True, False, f"{evidence}, but a newer drafter is served already")
    if seconds_since_push is not None and seconds_since_push < rule.push_again_seconds:
        return Judgement(True, True, False, f"{evidence}; pushed again {seconds_since_push:.0f} s ago already")
    return Judgement(True, True, True, evidence)
