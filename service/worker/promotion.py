"""Who may replace the served drafter: the trained candidate or an archived version, judged on held-out rollouts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from drafter.batch import RolloutBatch, prompt_hashes
from drafter.policy import Policy
from drafter.replay.acceptance import Replay
from drafter.replay.gate import MIN_ROLLOUTS, Verdict, judge
from service.settings import Settings
from service.worker.lineage import CANDIDATE, Lineage
from service.worker.recent import HeldOut
from service.worker.scoring import replay_each


@dataclass(frozen=True, slots=True)
class Contest:
    """The outcome for one challenger. `version` is CANDIDATE or an archived version."""

    version: str
    verdict: Verdict
    challenger: Replay
    incumbent: Replay
    prompts: int  # that the evidence answers
    by_prompt: bool  # no rollout of these prompts was ever trained on

    @property
    def facts(self) -> dict[str, Any]:
        """The evidence, as the manifest and the history keep it."""
        verdict = self.verdict
        return {
            "gain": verdict.gain,
            "low": verdict.low,
            "high": verdict.high,
            "rollouts": verdict.rollouts,
            "prompts": self.prompts,
            "held_out_by": "prompt" if self.by_prompt else "group",
            "alpha_candidate": self.challenger.alpha,
            "alpha_served": self.incumbent.alpha,
        }


def contest(
    settings: Settings,
    lineage: Lineage,
    evidence: HeldOut,
    policy: Policy,
    versions: Sequence[str],
) -> list[Contest]:
    """Judge each of `versions` against the served drafter, drafting for `policy`, best lower bound first.

    Without a served drafter the incumbent is plain decoding: one token a round.
    """
    prompts, groups = _prompts(evidence.batches)
    served = lineage.served()
    compared = [*versions, *([served.version] if served else [])]
    drafters = {v: lineage.candidate if v == CANDIDATE else lineage.version(v) for v in compared}
    replays = replay_each(drafters, policy, evidence.batches, settings.depth, settings.drafting)
    challengers = {version: replays[version] for version in versions}
    incumbent = replays[served.version] if served else _without_drafter(replays[versions[0]])
    outcomes = []
    for version, challenger in challengers.items():
        verdict = judge(
            challenger,
            incumbent,
            min_gain=settings.gate_min_gain,
            confidence=settings.gate_confidence,
            min_rollouts=min(settings.gate_rollouts, MIN_ROLLOUTS),
            groups=groups,
        )
        if groups is None:
            said = f"{verdict.reason}; rollouts were counted, for they answer {prompts} prompts only"
            verdict = replace(verdict, reason=said)
        outcomes.append(Contest(version, verdict, challenger, incumbent, prompts, evidence.by_prompt))
    return sorted(outcomes, key=lambda c: (c.verdict.promote, c.verdict.low), reverse=True)


def _prompts(evidence: Sequence[RolloutBatch]) -> tuple[int, npt.NDArray[np.int64] | None]:
    """How many prompts there are, and which one each rollout answers: rollouts of one prompt are one observation.

    None, which counts rollouts, where the prompts are too few to bound anything: better evidence than none.
    """
    hashes = [prompt for batch in evidence for prompt in prompt_hashes(batch)]
    found, groups = np.unique(hashes, return_inverse=True)
    return len(found), groups.astype(np.int64) if len(found) >= MIN_ROLLOUTS else None


def _without_drafter(found: Replay) -> Replay:
    """What plain decoding does with the same rollouts: one token a round."""
    nothing = np.zeros_like(found.accepted)
    return Replay(found.tokens, found.tokens.copy(), np.zeros_like(found.rounds), nothing, nothing.copy())
