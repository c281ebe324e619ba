"""The promotion gate: may a candidate replace the served drafter?

Both are replayed on the same held-out rollouts, so prompts' difficulty cancels (a paired comparison needs a
hundred times less than a live split). The tokens are the same, so α_candidate / α_served is the ratio of the sums of
their rounds, and its lower confidence bound decides. What cannot be judged is refused: no data is not success.

Pure functions; no clock, no state. Judging again and again on growing evidence is the caller's to pace: every look has
its own chance of being wrong.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from drafter.replay.acceptance import Replay, log_ratio

#: Below this many rollouts the linearised error is not to be trusted (tests/drafter/replay/test_gate.py).
MIN_ROLLOUTS = 16


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the gate decided and on what evidence. Gains are relative: 0.05 = the candidate's α is 5 % higher."""

    promote: bool
    gain: float  # α_candidate / α_served - 1; nan where it could not be measured
    low: float  # one-sided lower confidence bound of the gain
    high: float  # one-sided upper confidence bound of the gain
    rollouts: int  # rollouts with at least one round
    reason: str  # for people: what decided


def judge(
    candidate: Replay,
    served: Replay,
    *,
    min_gain: float = 0.0,
    confidence: float = 0.95,
    min_rollouts: int = MIN_ROLLOUTS,
    groups: npt.NDArray[np.int64] | None = None,
) -> Verdict:
    """Promote when the lower bound of the paired relative gain in α lies above `min_gain`.

    The replays must be of the same rollouts in the same order. `confidence` is one-sided: a candidate that is exactly
    `min_gain` better is promoted in 1 - confidence of all looks. `groups` [R] marks rollouts of one prompt, which then
    count as one observation, for the error and for `min_rollouts` alike.
    Delta method on the logarithm of the ratio of sums (`acceptance.log_ratio`), clustered by rollout or group.
    """
    if not 0.5 <= confidence < 1.0:
        raise ValueError(f"expected a one-sided confidence from 0.5 to below 1, got {confidence}")
    if not math.isfinite(min_gain) or min_rollouts < 2:
        raise ValueError(f"expected a finite min_gain and at least 2 rollouts, got {min_gain=} and {min_rollouts=}")
    counted = int(np.count_nonzero(served.tokens))
    fault = _fault(candidate, served, groups)
    if fault:
        return Verdict(False, math.nan, math.nan, math.nan, counted, fault)
    ratio = log_ratio(served.rounds, candidate.rounds, groups)
    gain = math.expm1(ratio.centre)
    if ratio.clusters < min_rollouts:
        kind = "rollouts" if groups is None else "prompts"
        reason = f"too little evidence: {ratio.clusters} held-out {kind} with a round, {min_rollouts} needed"
        return Verdict(False, gain, math.nan, math.nan, counted, reason)
    reach = ratio.reach(confidence)
    low, high = math.expm1(ratio.centre - reach), math.expm1(ratio.centre + reach)
    if not math.isfinite(low):
        return Verdict(False, gain, low, high, counted, f"the gain could not be bounded: {low} to {high}")
    promote = low > min_gain
    comparison = "above" if promote else "not above"
    reason = (
        f"α {served.alpha:.3f} -> {candidate.alpha:.3f} ({gain:+.2%}); lower bound {low:+.2%} at {confidence:.0%} "
        f"is {comparison} {min_gain:+.2%}"
    )
    return Verdict(promote, gain, low, high, counted, reason)


def _fault(candidate: Replay, served: Replay, groups: npt.NDArray[np.int64] | None) -> str:
    """Why the two replays cannot be compared, or nothing."""
    if candidate.rollouts != served.rollouts or not np.array_equal(candidate.tokens, served.tokens):
        return "not paired: the two replays are of different rollouts; replay both drafters on the same batch"
    if candidate.depth != served.depth:
        return f"not comparable: draft depth {candidate.depth} against {served.depth}"
    if groups is not None and groups.shape != served.tokens.shape:
        return f"groups must name one prompt per rollout: {groups.shape} for {served.rollouts} rollouts"
    for name, replay in (("candidate", candidate), ("served drafter", served)):
        if not (np.isfinite(replay.rounds).all() and np.isfinite(replay.tokens).all()):
            return f"the {name}'s replay holds values that are not finite"
        # A round emits between 1 and K + 1 tokens, so anything else was not computed by `replay_rounds`.
        fewest = replay.tokens / (replay.depth + 1)
        if np.any(replay.rounds > replay.tokens * (1 + 1e-6)) or np.any(replay.rounds < fewest * (1 - 1e-6)):
            return f"the {name}'s replay is impossible: a round emits 1 to {replay.depth + 1} tokens"
    if not served.tokens.any():
        return "no evidence: not one held-out rollout has a round"
    return ""
