"""Where α counted live must fall beside replay α of the very same text: only the coin flips of drafts vary."""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import Any
from unittest import mock

import numpy as np
import numpy.typing as npt

from drafter.replay import replay as module
from drafter.replay.acceptance import Replay, Segments, _blocks, _end_law, replay_rounds


def rounds_variance(conditional: npt.NDArray[np.floating], segments: Segments) -> npt.NDArray[np.float64]:
    """Variance of the number of rounds of each rollout given the text, [R]: by the first two moments, backwards."""
    found = np.zeros(segments.rollouts)
    for block in _blocks(segments, conditional.shape[1]):
        ends, _ = _end_law(conditional, segments.offsets[:-1][block], segments.tokens[block])
        S, n, width = ends.shape
        mean, square = np.zeros((2, S, n + width))
        for i in range(n - 1, -1, -1):
            later = np.einsum("sk,sk->s", ends[:, i], mean[:, i + 1 : i + 1 + width])
            real = ends[:, i].sum(axis=1)  # 1 within the segment, 0 past its end
            mean[:, i] = real + later
            square[:, i] = real + 2 * later + np.einsum("sk,sk->s", ends[:, i], square[:, i + 1 : i + 1 + width])
        np.add.at(found, segments.rollout[block], (square[:, 0] - np.square(mean[:, 0])).clip(min=0.0))
    return found


def live_interval(replayed: Replay, variance: float, level: float = 0.95) -> tuple[float, float]:
    """Interval of α counted live on the rollouts of a replay whose number of rounds has this variance."""
    tokens, rounds = float(replayed.tokens.sum()), float(replayed.rounds.sum())
    reach = NormalDist().inv_cdf(0.5 + level / 2) * math.sqrt(variance)
    return tokens / (rounds + reach), tokens / max(rounds - reach, tokens / (replayed.depth + 1))


def replay_live(level: float, *given: Any, **named: Any) -> tuple[Replay, tuple[float, float]]:
    """`replay`, and the interval of α counted live on the same rollouts."""
    variances = []

    def noted(conditional: npt.NDArray[np.floating], segments: Segments, *, weighted: bool) -> Replay:
        variances.append(float(rounds_variance(conditional, segments).sum()))
        return replay_rounds(conditional, segments, weighted=weighted)

    with mock.patch.object(module, "replay_rounds", noted):
        found = module.replay(*given, **named)
    return found, live_interval(found, sum(variances), level)
