"""What tests of the drift monitor share: noise, ticks, replays of several versions."""

from __future__ import annotations

import numpy as np

from service.monitor.drift.limits import DriftConfig
from service.monitor.drift.monitor import DriftMonitor, DriftReading
from service.monitor.drift.succession import Succession

SEED = 20_240_611


def noise(ticks: int, seed: int = 0, level: float = 3.0, sd: float = 0.15) -> list[float]:
    return list(np.random.default_rng([SEED, seed]).normal(level, sd, ticks))


def feed(monitor: DriftMonitor, values: list[float]) -> DriftReading:
    for value in values:
        reading = monitor.tick(value)
    return reading


#: Differences of a run whose versions are so unlike each other that none is taken for chance.
UNLIKE = [(1e6, 0.0)]
SHORT = DriftConfig(baseline_ticks=100, batch_ticks=(5, 20))


def first_alarm(monitor: DriftMonitor, values: list[float]) -> int | None:
    return next((number for number, value in enumerate(values) if monitor.tick(value).alarm), None)


def sd_of(monitor: DriftMonitor) -> float:
    found = monitor._sd()
    assert found is not None
    return found


def replays(prompts: int, **alpha: float) -> dict[str, tuple[list[float], list[float]]]:
    """Per version the tokens and rounds of 8 rollouts of each prompt; prompts differ a little in α."""
    spread = np.repeat(np.linspace(0.9, 1.1, prompts), 8)
    return {v: ([12.0] * len(spread), (12.0 / (a * spread)).tolist()) for v, a in alpha.items()}


def names(prompts: int, start: int = 0) -> list[str]:
    return [f"p{start + n}" for n in range(prompts) for _ in range(8)]


def watching(monitor: DriftMonitor) -> Succession:
    """Thirty ticks under v1."""
    found = Succession()
    for _ in range(30):
        found.feed(monitor, replays(8, v1=3.0), names(8), served="v1", latest="v1")
    return found


def noisy(rng: np.random.Generator, **level: float) -> tuple[dict[str, tuple[list[float], list[float]]], list[str]]:
    """One tick of 8 new prompts of 8 rollouts; their difficulty is common to all versions, a little is each one's."""
    hard = np.repeat(rng.normal(0, 0.1, 8), 8) + rng.normal(0, 0.12, 64)
    found = {}
    for version, alpha in level.items():
        own = np.repeat(rng.normal(0, 0.02, 8), 8) + rng.normal(0, 0.02, 64)
        found[version] = ([100.0] * 64, (100.0 / (alpha * np.exp(hard + own))).tolist())
    return found, [f"{rng.integers(1 << 40)}" for _ in range(8) for _ in range(8)][::8] * 8
