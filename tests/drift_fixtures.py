"""A simulated world of rollouts for the drift monitor, and the long form of its simulation.

The world: prompts in groups of 8 rollouts, 8 groups to a tick. Draft token i of a round is accepted with probability
sigmoid(1.25 + stratum + prompt N(0, .35) + rollout N(0, .15) + AR(1) text difficulty (sd .8, phi .9) - .12 i - shift),
i < 5; strata +.35, 0, -.55 make up 50, 30, 20 % of the prompts; lengths are lognormal (median 200 rounds, sigma .8),
harder prompts longer. A fall of α is a shift of the logits. Ticks are drawn from a bank of groups.

`python tests/drift_fixtures.py` prints the figures of docs/reference/drift.md (minutes); the tests run a short form.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from service.monitor.drift import DriftConfig, DriftMonitor

DEPTH = 5
STRATA = ("easy", "middle", "hard")
STRATUM_SHARE = np.array([0.5, 0.3, 0.2])
STRATUM_LOGIT = np.array([0.35, 0.0, -0.55])
GROUPS_PER_TICK = 8
ROLLOUTS_PER_GROUP = 8
ROLLOUTS_PER_TICK = GROUPS_PER_TICK * ROLLOUTS_PER_GROUP

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Bank:
    """Groups of rollouts: `stratum` [G], `tokens` and `rounds` [G, 8]."""

    stratum: npt.NDArray[np.int64]
    tokens: Floats
    rounds: Floats

    @property
    def alpha(self) -> Floats:
        return self.tokens / self.rounds

    def group_means(self) -> Floats:
        """Mean over rollouts of each group's α [G]."""
        means: Floats = self.alpha.mean(axis=1)
        return means


def make_bank(groups: int, seed: int, shift: float = 0.0) -> Bank:
    """Simulate every round of `groups` groups; the same seed with another shift gives the same prompts and texts."""
    rng = np.random.default_rng(seed)
    stratum = rng.choice(3, size=groups, p=STRATUM_SHARE)
    prompt = rng.normal(0, 0.35, groups)
    base = (1.25 + STRATUM_LOGIT[stratum] + prompt)[:, None] + rng.normal(0, 0.15, (groups, ROLLOUTS_PER_GROUP))
    hardness = -(STRATUM_LOGIT[stratum] + prompt)[:, None]
    lengths = np.exp(np.log(200) + 0.4 * hardness + rng.normal(0, 0.8, base.shape)).clip(8, 1200).astype(int)
    difficulty = rng.normal(0, 0.8, base.shape)
    tokens = np.zeros(base.shape)
    steps = 0.12 * np.arange(DEPTH)
    for index in range(int(lengths.max())):
        logit = (base + difficulty - shift)[..., None] - steps
        accepted = rng.random(logit.shape) < 1 / (1 + np.exp(-logit))
        emitted = 1 + np.cumprod(accepted, axis=-1).sum(axis=-1)
        tokens += np.where(index < lengths, emitted, 0)
        difficulty = 0.9 * difficulty + rng.normal(0, 0.8 * np.sqrt(1 - 0.81), base.shape)
    return Bank(stratum, tokens, lengths.astype(float))


def tick_values(bank: Bank, ticks: int, rng: np.random.Generator) -> Floats:
    """Draw tick values [ticks] of known strata as `DriftMonitor.observe` forms them, but fast.

    `test_the_simulator_forms_ticks_as_the_monitor_does` holds the two together.
    """
    means = bank.group_means()
    usual = np.array([means[bank.stratum == code].mean() for code in range(len(STRATA))])
    level = float(usual @ (np.bincount(bank.stratum, minlength=len(STRATA)) / len(means)))
    draws = rng.integers(0, len(means), (ticks, GROUPS_PER_TICK))
    values: Floats = level + (means - usual[bank.stratum])[draws].mean(axis=1)
    return values


def wander(ticks: int, sd: float, memory_ticks: float, rng: np.random.Generator) -> Floats:
    """A stationary AR(1) path [ticks]."""
    keep = float(np.exp(-1 / memory_ticks))
    noise = rng.normal(0, sd * np.sqrt(1 - keep * keep), ticks)
    path = np.empty(ticks)
    level = rng.normal(0, sd)
    for index in range(ticks):
        level = keep * level + noise[index]
        path[index] = level
    return path


def config(days: float = 30.0, **more: object) -> DriftConfig:
    """The shipped settings, at one false alarm in `days` of 64 rollouts a minute."""
    return DriftConfig(days_between_false_alarms=days, **more)  # type: ignore[arg-type]


def count_alarms(values: Floats, settings: DriftConfig) -> int:
    """Alarms of a fresh monitor over the values, lanes started again after each."""
    monitor = DriftMonitor(settings)
    alarms = 0
    for value in values.tolist():
        if monitor.tick(value).alarm:
            alarms += 1
            monitor.acknowledge()
    return alarms


def delay_ticks(before: Floats, after: Floats, settings: DriftConfig) -> int | None:
    """Ticks from the change to the first alarm; the monitor runs on `before` first, its alarms there acknowledged."""
    monitor = DriftMonitor(settings)
    for value in before.tolist():
        if monitor.tick(value).alarm:
            monitor.acknowledge()
    for index, value in enumerate(after.tolist(), start=1):
        if monitor.tick(value).alarm:
            return index
    return None


def falls(
    bank: Bank, drop: float, ticks: int, runs: int, seed: int, before: int = 3000
) -> Iterator[tuple[Floats, Floats]]:
    """Pairs of value streams before and after a step by the fraction `drop`."""
    for run in range(runs):
        rng = np.random.default_rng([seed, run])
        yield tick_values(bank, before, rng), tick_values(bank, ticks, rng) * (1 - drop)


def median_delay_rollouts(bank: Bank, drop: float, *, runs: int, ticks: int, seed: int, settings: DriftConfig) -> float:
    """Median delay in rollouts (infinite where the median run missed the fall)."""
    delays = [delay_ticks(before, after, settings) for before, after in falls(bank, drop, ticks, runs, seed)]
    return float(np.median([np.inf if d is None else d * ROLLOUTS_PER_TICK for d in delays]))


def main() -> None:
    """Print the tables of docs/reference/drift.md."""
    bank = make_bank(1500, seed=1)
    values = tick_values(bank, 40_000, np.random.default_rng(2))
    level = float(values.mean())
    print(f"alpha: ratio of sums {bank.tokens.sum() / bank.rounds.sum():.3f}, mean of rollouts {bank.alpha.mean():.3f}")
    print(f"tick sd {100 * values.std() / level:.2f} %")
    settings = config()
    print("limits", {lane.name: round(settings.limit(lane), 1) for lane in settings.lanes})
    for name, sd, memory in (
        ("none", 0.0, 60),
        ("0.3 %, 1 h", 0.003, 60),
        ("1 %, 1 h", 0.01, 60),
        ("1 %, 1 day", 0.01, 1440),
    ):
        for band in (0.0, 0.02):
            alarms, streams = 0, 24
            delays: dict[float, list[float]] = {0.02: [], 0.05: [], 0.10: [], 0.20: []}
            for stream in range(streams):
                rng = np.random.default_rng([3, stream])
                quiet = tick_values(bank, 43_200, rng) * (1 + wander(43_200, sd, memory, rng))
                alarms += count_alarms(quiet, config(dead_band=band))
                for drop, found in delays.items():
                    path = 1 + wander(7000, sd, memory, rng)
                    before, after = (
                        tick_values(bank, 3000, rng) * path[:3000],
                        tick_values(bank, 4000, rng) * path[3000:],
                    )
                    delay = delay_ticks(before, after * (1 - drop), config(dead_band=band))
                    found.append(np.inf if delay is None else delay * ROLLOUTS_PER_TICK / 1000)
            row = "  ".join(f"{100 * drop:.0f}%: {np.median(found):.1f}k" for drop, found in delays.items())
            print(
                f"wander {name:10s} dead-band {band:.2f}: {alarms / streams:.2f} alarms per 30 days; {row}", flush=True
            )


if __name__ == "__main__":
    main()
