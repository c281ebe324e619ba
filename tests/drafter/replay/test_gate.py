"""How often the gate is wrong, by simulation, and what it refuses to judge."""

from __future__ import annotations

import math

import numpy as np
import pytest

from drafter.replay.acceptance import Replay
from drafter.replay.gate import Verdict, judge

DEPTH = 4


def replay_of(tokens: np.ndarray, alpha: np.ndarray) -> Replay:
    R = tokens.size
    empty = np.zeros((R, DEPTH))
    rounds = tokens / np.clip(alpha, 1.0, DEPTH + 1.0)
    return Replay(tokens.astype(float), rounds, np.zeros(R), empty, empty)


def pair(rng: np.random.Generator, rollouts: int, gain: float) -> tuple[Replay, Replay]:
    """Lengths and α of prompts spread widely (heavy tails); the two drafters share the prompt and differ by 8 %."""
    tokens = np.ceil(rng.lognormal(4.0, 1.0, rollouts))
    alpha = 1.2 + 3.0 * rng.beta(0.7, 0.7, rollouts)
    noise = rng.standard_t(3, rollouts) * 0.05
    served = replay_of(tokens, alpha)
    rounds = np.clip(served.rounds / (1.0 + gain) * np.exp(noise), tokens / (DEPTH + 1), tokens)
    return Replay(served.tokens, rounds, served.rounds_variance, served.accepted, served.reached), served


def promotions(seed: int, rollouts: int, gain: float, looks: int = 2000) -> float:
    rng = np.random.default_rng(seed)
    return float(np.mean([judge(*pair(rng, rollouts, gain)).promote for _ in range(looks)]))


@pytest.mark.parametrize("rollouts", [16, 64, 300])
def test_an_equal_candidate_is_promoted_no_more_often_than_the_confidence_allows(rollouts: int) -> None:
    assert promotions(1, rollouts, 0.0) < 0.065


@pytest.mark.parametrize("rollouts", [16, 64, 300])
def test_a_candidate_five_percent_worse_is_promoted_in_under_one_percent(rollouts: int) -> None:
    assert promotions(2, rollouts, -0.05) < 0.01


@pytest.mark.parametrize(("rollouts", "often"), [(64, 0.8), (300, 0.98)])
def test_a_candidate_five_percent_better_is_mostly_promoted(rollouts: int, often: float) -> None:
    assert promotions(3, rollouts, 0.05) > often


def test_a_candidate_is_held_to_the_configured_gain() -> None:
    candidate, served = pair(np.random.default_rng(4), 500, 0.05)
    assert judge(candidate, served).promote
    assert judge(candidate, served, min_gain=0.02).promote
    refused = judge(candidate, served, min_gain=0.10)
    assert not refused.promote
    assert "not above +10.00%" in refused.reason


def test_the_verdict_states_the_ratio_of_sums_and_its_bounds() -> None:
    candidate, served = pair(np.random.default_rng(5), 100, 0.03)
    verdict = judge(candidate, served)
    assert verdict.gain == pytest.approx(candidate.alpha / served.alpha - 1)
    assert verdict.low < verdict.gain < verdict.high
    assert judge(candidate, served, confidence=0.99).low < verdict.low
    assert judge(candidate, served) == verdict


def test_rollouts_of_one_prompt_count_once() -> None:
    rng = np.random.default_rng(6)
    candidate, served = pair(rng, 20, 0.0)
    many = [np.repeat(np.arange(20), 16)]
    copies = [Replay.concat([x]).select(many[0]) for x in (candidate, served)]
    alone = judge(candidate, served)
    grouped = judge(*copies, groups=many[0])
    assert grouped.low == pytest.approx(alone.low)
    assert judge(*copies).low > grouped.low
    assert not judge(*copies, groups=np.zeros(320, dtype=np.int64)).promote


def test_the_same_drafter_is_never_promoted() -> None:
    _, served = pair(np.random.default_rng(7), 100, 0.0)
    verdict = judge(served, served)
    assert not verdict.promote
    assert (verdict.gain, verdict.low, verdict.high) == (0.0, 0.0, 0.0)


def refused(verdict: Verdict, why: str) -> None:
    assert not verdict.promote
    assert why in verdict.reason


def test_too_few_rollouts_are_refused_however_large_the_gain() -> None:
    tokens = np.full(15, 100.0)
    better, worse = replay_of(tokens, np.full(15, 4.0)), replay_of(tokens, np.full(15, 1.5))
    refused(judge(better, worse), "too little evidence: 15 held-out rollouts")
    assert judge(better, worse, min_rollouts=15).promote


def test_rollouts_without_a_round_are_no_evidence() -> None:
    tokens = np.concatenate((np.full(10, 50.0), np.zeros(90)))
    better, worse = replay_of(tokens, np.full(100, 4.0)), replay_of(tokens, np.full(100, 1.5))
    verdict = judge(better, worse)
    refused(verdict, "too little evidence: 10")
    assert verdict.rollouts == 10
    nothing = replay_of(np.zeros(50), np.full(50, 2.0))
    refused(judge(nothing, nothing), "no evidence")
    empty = replay_of(np.zeros(0), np.zeros(0))
    refused(judge(empty, empty), "no evidence")


def test_values_that_cannot_be_are_refused() -> None:
    candidate, served = pair(np.random.default_rng(8), 50, 0.5)
    candidate.rounds[3] = math.nan
    refused(judge(candidate, served), "not finite")
    candidate.rounds[3] = 0.0
    refused(judge(candidate, served), "impossible")


def test_replays_of_other_rollouts_or_depths_are_refused() -> None:
    candidate, served = pair(np.random.default_rng(9), 50, 0.5)
    refused(judge(candidate.select(range(49)), served), "not paired")
    refused(judge(candidate.select(list(range(49, -1, -1))), served), "not paired")
    deeper = Replay(served.tokens, served.rounds, served.rounds_variance, np.zeros((50, 5)), np.zeros((50, 5)))
    refused(judge(candidate, deeper), "depth")
    refused(judge(candidate, served, groups=np.arange(3)), "one prompt per rollout")


@pytest.mark.parametrize(
    "settings", [{"confidence": 1.0}, {"confidence": 0.3}, {"min_gain": math.nan}, {"min_rollouts": 1}]
)
def test_nonsensical_settings_are_refused(settings: dict[str, float]) -> None:
    candidate, served = pair(np.random.default_rng(10), 50, 0.0)
    with pytest.raises(ValueError, match="expected"):
        judge(candidate, served, **settings)  # type: ignore[arg-type]
