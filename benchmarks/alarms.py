"""The drift alarm in simulated worlds: its rate, its delay and the causes that it names. Simulated, and it says so.

    python benchmarks/alarms.py            all tables, some minutes on one core
    python benchmarks/alarms.py causes     one of: rates, mixes, delays, publishes, causes, wander

Beside it stand river's ADWIN and Page-Hinkley (where `river` is installed: an environment of its own with river, numpy
and pydantic will do) and two Prometheus rules.

The world: prompts in groups of 8 rollouts, 8 groups to a tick. Draft token i of a round is accepted with probability
sigmoid(1.25 + stratum + prompt N(0, .35) + rollout N(0, .15) + AR(1) text difficulty (sd .8, phi .9) - .12 i - shift),
i < 5; strata +.35, 0, -.55 make up 50, 30, 20 % of the prompts; lengths are lognormal (median 200 rounds, sigma .8),
harder prompts longer. A fall of α is a shift of the logits, or a factor. Ticks are drawn from a bank of groups.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from service.monitor.drift.cause import cause_of
from service.monitor.drift.limits import DriftConfig
from service.monitor.drift.monitor import DriftMonitor
from service.monitor.drift.state import ArrivalRate, DriftState
from service.monitor.drift.succession import Succession
from service.monitor.records import Estimate, SamplingSettings

try:
    from river import drift as river  # type: ignore[import-not-found, unused-ignore]
except ImportError:
    river = None

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
        """α of every rollout [G, 8]."""
        return self.tokens / self.rounds

    def group_means(self) -> Floats:
        """Mean over rollouts of each group's α [G]."""
        means: Floats = self.alpha.mean(axis=1)
        return means


def make_bank(
    groups: int, seed: int, shift: float = 0.0, logits: Floats = STRATUM_LOGIT, shares: Floats = STRATUM_SHARE
) -> Bank:
    """Simulate every round of `groups` groups; the same seed with another shift gives the same prompts and texts."""
    rng = np.random.default_rng(seed)
    stratum = rng.choice(len(logits), size=groups, p=shares)
    prompt = rng.normal(0, 0.35, groups)
    base = (1.25 + logits[stratum] + prompt)[:, None] + rng.normal(0, 0.15, (groups, ROLLOUTS_PER_GROUP))
    hardness = -(logits[stratum] + prompt)[:, None]
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


def median_delays_rollouts(
    bank: Bank, drops: Sequence[float], *, runs: int, ticks: int, seed: int, settings: DriftConfig, before: int = 3000
) -> list[float]:
    """For each step down by a fraction, the median delay in rollouts (infinite where the median run missed it).

    Each step comes after the same ticks of before, whose alarms are acknowledged.
    """
    delays: list[list[float]] = []
    for run in range(runs):
        rng, standing = np.random.default_rng([seed, run]), DriftMonitor(settings)
        for value in tick_values(bank, before, rng).tolist():
            if standing.tick(value).alarm:
                standing.acknowledge()
        values, kept = tick_values(bank, ticks, rng), standing.state.to_json()
        found = []
        for drop in drops:
            monitor = DriftMonitor(settings, DriftState.from_json(kept))
            alarms = (n for n, v in enumerate((values * (1 - drop)).tolist(), 1) if monitor.tick(v).alarm)
            found.append(next(alarms, math.inf) * ROLLOUTS_PER_TICK)
        delays.append(found)
    return np.median(delays, axis=0).tolist()  # type: ignore[no-any-return]


# --- mixes of prompts that change
#: Shares of the strata at a tick, of which there is one a minute.
Mix = Callable[[int], Floats]
DAY = 1440


def harder(points: float) -> Floats:
    """The usual mix with so many points more of the hard stratum, less of the easy one."""
    shares: Floats = STRATUM_SHARE + np.array([-points, 0.0, points])
    return shares


def daily(points: float) -> Mix:
    """Harder by day, easier by night."""
    return lambda tick: harder(points * math.sin(2 * math.pi * tick / DAY))


def weekend(points: float) -> Mix:
    """Harder for two days in seven."""
    return lambda tick: harder(points if tick // DAY % 7 >= 5 else 0.0)


def blocks(topics: int, prompts: int, seed: int) -> Mix:
    """One topic after another, in a random order, `prompts` of each."""
    ticks = prompts // GROUPS_PER_TICK
    order = [np.random.default_rng([seed, n]).permutation(topics) for n in range(1 + 50_000 // ticks // topics)]
    one = np.eye(topics)
    return lambda tick: one[order[tick // ticks // topics][tick // ticks % topics]]


def mixed(bank: Bank, mix: Mix, ticks: int, rng: np.random.Generator) -> tuple[Floats, npt.NDArray[np.int64]]:
    """Group means of α and strata [ticks, 8]."""
    means = bank.group_means()
    members = [np.flatnonzero(bank.stratum == code) for code in range(int(bank.stratum.max()) + 1)]
    strata = np.empty((ticks, GROUPS_PER_TICK), dtype=np.int64)
    for tick in range(ticks):
        strata[tick] = rng.choice(len(members), size=GROUPS_PER_TICK, p=mix(tick))
    alphas = np.empty(strata.shape)
    for code, groups in enumerate(members):
        at = strata == code
        alphas[at] = means[rng.choice(groups, size=int(at.sum()))]
    return alphas, strata


def group_monitor(**settings: Any) -> DriftMonitor:
    """A monitor that is fed one number per group, 8 of them a tick and a minute."""
    plan = DriftConfig(rollouts_per_tick=GROUPS_PER_TICK, **settings)
    traffic = ArrivalRate(rollouts=60.0 * GROUPS_PER_TICK, seconds=3600.0)
    return DriftMonitor(plan, DriftState(traffic=traffic))


def mix_alarms(alphas: Floats, strata: npt.NDArray[np.int64] | None) -> int:
    """Alarms over the ticks; `strata`: where the rollouts say theirs."""
    monitor, alarms, ones = group_monitor(), 0, [1.0] * GROUPS_PER_TICK
    for tick, row in enumerate(alphas.tolist()):
        tags = None if strata is None else [f"kind {code}" for code in strata[tick].tolist()]
        for reading in monitor.observe(row, ones, tags, arrived=60.0 * tick):
            if reading.alarm:
                alarms += 1
                monitor.acknowledge()
    return alarms


# --- others
class Detector(Protocol):
    """What is fed a tick's value and says whether it alarms."""

    def __call__(self, value: float) -> bool:
        """Feed one tick."""
        ...


def ours() -> Detector:
    """The shipped monitor with the shipped settings."""
    monitor = DriftMonitor()

    def feed(value: float) -> bool:
        alarm = monitor.tick(value).alarm
        if alarm:
            monitor.acknowledge()
        return alarm

    return feed


def adwin() -> Detector:
    """River's ADWIN with its defaults; only a fall counts."""
    detector = river.ADWIN()
    before = [0.0]

    def feed(value: float) -> bool:
        mean = before[0]
        detector.update(value)
        before[0] = detector.estimation
        return bool(detector.drift_detected and detector.estimation < mean)

    return feed


def page_hinkley(sd: float) -> Detector:
    """River's Page-Hinkley, tuned with the true sd to one false alarm in 30 days: delta sd / 4, threshold 17.5 sd."""
    detector = river.PageHinkley(delta=0.25 * sd, threshold=17.5 * sd, alpha=1.0, mode="down")

    def feed(value: float) -> bool:
        detector.update(value)
        return bool(detector.drift_detected)

    return feed


def prometheus(share: float) -> Detector:
    """`avg_over_time(alpha[1h]) < share * avg_over_time(alpha[1d])`, once per spell."""
    values: list[float] = []
    on = [False]

    def feed(value: float) -> bool:
        values.append(value)
        del values[:-DAY]
        below = len(values) > 60 and np.mean(values[-60:]) < share * np.mean(values)
        alarm, on[0] = bool(below and not on[0]), bool(below)
        return alarm

    return feed


def detectors(sd: float) -> dict[str, Callable[[], Detector]]:
    """All that are compared, by name. river's are missing where it is not installed."""
    found: dict[str, Callable[[], Detector]] = {"draftalign": ours}
    if river is not None:
        found |= {"ADWIN": adwin, "Page-Hinkley, tuned": lambda: page_hinkley(sd)}
    return found | {"1h < 0.95 1d": lambda: prometheus(0.95), "1h < 0.98 1d": lambda: prometheus(0.98)}


# --- causes
@dataclass(frozen=True)
class Trouble:
    """A change of a world, as factors of α and of entropy. `version`: of a new drafter version that is served since."""

    policy: float = 1.0
    features: float = 1.0
    version: float = 1.0
    engine: float = 1.0
    entropy: float = 1.0
    points: float = 0.0  # of hard prompts
    temperature: float = 1.0
    warmer_before: bool = False  # the temperature was that 200 ticks before, when nothing else was changed


TROUBLES: dict[str, tuple[Trouble, set[str | None]]] = {
    "nothing": (Trouble(), {None}),
    "policy moved": (Trouble(policy=0.9, entropy=0.95), {"policy moved"}),
    "policy sharpened": (Trouble(policy=0.9, entropy=0.6), {"policy sharpened"}),
    "policy flattened": (Trouble(policy=0.9, entropy=1.5), {"policy flattened"}),
    "aux layers swapped": (Trouble(features=0.7), {"features or selection"}),
    "harder prompts": (Trouble(points=0.3), {"prompts"}),
    "damaged drafter, 10 %": (Trouble(version=0.9), {"drafter"}),
    "damaged drafter, 7 %": (Trouble(version=0.93), {"drafter"}),
    "damaged drafter, 5 %": (Trouble(version=0.95), {"drafter"}),
    "damaged drafter, 4 %": (Trouble(version=0.96), {"drafter"}),
    "sick engine": (Trouble(engine=0.8), {"engine"}),
    "policy 8 %, drafter 3 %": (Trouble(policy=0.92, version=0.97), {"policy moved"}),
    "drafter 8 %, policy 3 %": (Trouble(policy=0.97, version=0.92), {"drafter"}),
    "policy 10 %, harder prompts": (Trouble(policy=0.9, points=0.2), {"policy moved"}),
    "policy 15 %, better drafter 5 %": (Trouble(policy=0.85, version=1.05), {"policy moved"}),
    "features 20 %, policy 5 %": (Trouble(features=0.8, policy=0.95), {"features or selection"}),
    "temperature 1.3": (
        Trouble(policy=0.9, entropy=1.5, temperature=1.3),
        {"sampling temperature"},
    ),
    "temperature 1.3, later a flatter policy": (
        Trouble(policy=0.9, entropy=1.5, temperature=1.3, warmer_before=True),
        {"policy flattened"},
    ),
}


def named(bank: Bank, trouble: Trouble, seed: int, *, live: bool = True, tagged: bool = True) -> str | None:
    """The cause named 60 ticks after a change, or 3 after the first alarm; None: none.

    A new version is no better or worse than 2 % on single groups, besides its factor.
    """
    rng = np.random.default_rng(seed)
    monitor, succession = group_monitor(), Succession()
    start = 400
    alphas, strata = mixed(bank, lambda tick: harder(trouble.points if tick >= start else 0.0), start + 60, rng)
    left = None
    for tick, row in enumerate(alphas.tolist()):
        changed = tick >= start
        served = "v2" if changed and trouble.version != 1 else "v1"
        factor = trouble.policy * trouble.features if changed else 1.0
        old = [alpha * factor for alpha in row]
        replays = {"v1": ([1.0] * len(old), [1 / a for a in old])}
        if served == "v2":
            new = [a * trouble.version * math.exp(rng.normal(0, 0.02)) for a in old]
            replays["v2"] = ([1.0] * len(new), [1 / a for a in new])
        readings = succession.feed(
            monitor,
            replays,
            [f"{tick}/{n}" for n in range(len(row))],
            served=served,
            latest=served,
            strata=[f"kind {code}" for code in strata[tick].tolist()] if tagged else None,
            entropies=(rng.normal(1.5, 0.3, len(row)).clip(0.3) * (trouble.entropy if changed else 1.0)).tolist(),
            arrived=60.0 * tick,
            sampling=SamplingSettings(trouble.temperature if tick >= start - 200 * trouble.warmer_before else 1.0),
        )
        if changed and left is None and any(reading.alarm for reading in readings):
            left = 3
        if left is not None:
            left -= 1
            if left < 0:
                break
    change = monitor.change()
    if change is None:
        return None
    error = 0.01  # of the engines' log α
    engine = Estimate(math.log(trouble.engine / trouble.features) + rng.normal(0, error), error**2)
    return cause_of(change, engine if live else None).cause


# --- tables
def print_rates(bank: Bank) -> None:
    """False alarms in a world that stands still, by traffic."""
    print("\nFalse alarms where nothing changes (simulated; 6 streams of 20,000 ticks from a cold start)")
    print(f"{'rollouts a minute':>18} {'setting: days':>14} {'stated':>8} {'found':>8}")
    for per_minute, days in ((1, 30.0), (64, 3.0), (64, 30.0), (640, 0.3), (6400, 0.03)):
        alarms, ticks, streams = 0, 20_000, 6
        for stream in range(streams):
            monitor = DriftMonitor(DriftConfig(days_between_false_alarms=days))
            values = tick_values(bank, ticks, np.random.default_rng([5, stream]))
            for tick, value in enumerate(values.tolist()):
                if tick % 10 == 0:
                    monitor.observe([1.0] * 640, [0.0] * 640, arrived=tick * 3840 / per_minute)  # only the traffic
                if monitor.tick(value).alarm:
                    alarms += 1
                    monitor.acknowledge()
        stated = streams * ticks * 64 / per_minute / 1440 / days
        print(f"{per_minute:18} {days:14} {stated:8.1f} {alarms:8}", flush=True)


def print_mixes(bank: Bank) -> None:
    """False alarms where only the mix of prompts changes."""
    topics = make_bank(3000, 4, logits=np.random.default_rng(9).normal(0, 0.3, 10), shares=np.full(10, 0.1))
    worlds: dict[str, tuple[Bank, Mix]] = {
        "always the same": (bank, lambda _: STRATUM_SHARE),
        "daily, 10 points either way": (bank, daily(0.1)),
        "weekend 10 points harder": (bank, weekend(0.1)),
        "weekend 20 points harder": (bank, weekend(0.2)),
        "topics, 200 prompts each": (topics, blocks(10, 200, 1)),
        "topics, 2,000 prompts each": (topics, blocks(10, 2000, 1)),
    }
    print("\nAlarms in 30 days of 64 rollouts a minute, only the prompts change (simulated; 2 streams)")
    print(f"{'world':30} {'strata sent':>12} {'not sent':>12}")
    for name, (source, mix) in worlds.items():
        found = []
        for stream in range(2):
            alphas, strata = mixed(source, mix, 43_200, np.random.default_rng([6, stream]))
            found.append((mix_alarms(alphas, strata), mix_alarms(alphas, None)))
        told, untold = np.mean(found, axis=0)
        print(f"{name:30} {told:12.1f} {untold:12.1f}", flush=True)


def print_delays(bank: Bank) -> None:
    """Rollouts until a fall is found, and false alarms before it, beside others."""
    values = tick_values(bank, 20_000, np.random.default_rng(2))
    rows = detectors(float(values.std()))
    if river is None:
        print("\nriver not installed: no ADWIN, no Page-Hinkley")
    ramps = {"step 2 %": (0.02, 1), "step 5 %": (0.05, 1), "step 10 %": (0.1, 1), "step 20 %": (0.2, 1)}
    ramps |= {"ramp 5 % in 12 h": (0.05, 720), "ramp 20 % in 7 days": (0.2, 7 * DAY)}
    print("\nMedian rollouts (thousands) until a fall is found; missed in the time of its ramp and 4,000 ticks more;")
    print("false alarms per 30 days (simulated; 10 falls after 3,000 ticks; 30 days); the weekend without strata")
    print(f"{'':22}" + "".join(f"{name:>21}" for name in [*ramps, "stands still", "weekend +10 points"]))
    still = [tick_values(bank, 43_200, np.random.default_rng(8))]
    weeks = [mixed(bank, weekend(0.1), 43_200, np.random.default_rng(8))[0].mean(axis=1)]
    for name, make in rows.items():
        line = f"{name:22}"
        for drop, length in ramps.values():
            found = []
            for run in range(10):
                rng = np.random.default_rng([7, run])
                detector, ticks = make(), length + 4000
                for value in tick_values(bank, 3000, rng).tolist():
                    detector(value)
                fall = 1 - drop * np.minimum(1, np.arange(1, ticks + 1) / length)
                stream = (tick_values(bank, ticks, rng) * fall).tolist()
                found.append(next((n for n, value in enumerate(stream, 1) if detector(value)), math.inf))
            missed = sum(map(math.isinf, found))
            line += f"{float(np.median(found)) * ROLLOUTS_PER_TICK / 1000:12.1f} ({missed:2} of 10)"
        for streams in (still, weeks):
            detector = make()
            line += f"{np.mean([sum(map(detector, stream.tolist())) for stream in streams]):21.1f}"
        print(line, flush=True)


def publishing(
    bank: Bank,
    monitor: DriftMonitor,
    ticks: int,
    *,
    every: int,
    seed: int,
    error: float = 0.007,
    fall_at: int | None = None,
    drop: float = 0.0,
    won_back: float = 0.0,
) -> list[bool]:
    """Alarm or not at every tick, beside a publish every so many ticks, whose gain is measured with an `error` (log).

    `won_back`: what each version gains, and the policy has cost since the last one; 0: versions are equal.
    """
    rng = np.random.default_rng([20_240_611, seed])
    values = tick_values(bank, ticks, rng)
    level = float(values.mean())
    alarms = []
    for index, value in enumerate(values.tolist()):
        if index and index % every == 0:
            measured_variance = (error * level) ** 2 * float(rng.chisquare(15)) / 15
            monitor.rebase(float(rng.normal(won_back * level, error * level)), measured_variance)
        lost = won_back * (index % every) / every
        fallen = drop if fall_at is not None and index >= fall_at else 0.0
        alarms.append(monitor.tick(value * (1 - lost) * (1 - fallen)).alarm)
    return alarms


def print_publishes(bank: Bank, runs: int = 8) -> None:
    """Delays of falls that publishes do not repair, and the time in alarm where they leave nothing to find."""
    print(f"\nFalls beside publishes of equal drafters, in thousand rollouts (simulated; {runs} runs of 1,500 ticks)")
    for every in (64, 8):
        for error in (0.003, 0.007, 0.01):
            cells = []
            for drop in (0.05, 0.1, 0.2):
                delays = []
                for run in range(runs):
                    given = {"every": every, "seed": run, "error": error, "fall_at": 2500, "drop": drop}
                    alarms = publishing(bank, DriftMonitor(config()), 4000, **given)[2500:]  # type: ignore[arg-type]
                    delays.append(alarms.index(True) if any(alarms) else None)
                known = sorted(d for d in delays if d is not None)
                middle = f"{known[len(known) // 2] * ROLLOUTS_PER_TICK / 1000:.2f}" if known else "-"
                cells.append(f"{drop:.0%} {middle} ({len(delays) - len(known)} not)")
            print(f"every {every:2} ticks, error {error:.1%}: {'; '.join(cells)}", flush=True)
    print("Share of the time in alarm (simulated; 4 runs of 10,000 ticks)")
    for won_back in (0.0, 0.01, 0.03):
        for every in (64, 8):
            shares = [
                np.mean(publishing(bank, DriftMonitor(config()), 10_000, every=every, seed=run, won_back=won_back))
                for run in range(4)
            ]
            print(f"each version wins back {won_back:.0%}, every {every:2} ticks: {np.mean(shares):.1%}", flush=True)


def print_wander(bank: Bank) -> None:
    """False alarms where α truly wanders, without and with a dead-band."""
    print("\nFalse alarms in 30 days where alpha wanders (simulated; 4 streams)")
    for name, sd, memory in (("0.3 %, 1 h", 0.003, 60), ("1 %, 1 h", 0.01, 60), ("1 %, 1 day", 0.01, DAY)):
        for band in (0.0, 0.02):
            alarms = 0
            for stream in range(4):
                rng = np.random.default_rng([3, stream])
                path = 1 + wander(43_200, sd, memory, rng)
                alarms += count_alarms(tick_values(bank, 43_200, rng) * path, config(dead_band=band))
            print(f"{name:12} dead-band {band:.2f}: {alarms / 4:6.2f}", flush=True)


def print_causes(bank: Bank, runs: int = 40) -> None:
    """How often each cause is named."""
    print(f"\nWhat is named (simulated; {runs} runs each)")
    print(f"{'what happened':34} {'right':>8}   named with live figures and strata | neither")
    right = total = 0
    for name, (trouble, wanted) in TROUBLES.items():
        found = Counter(named(bank, trouble, run) for run in range(runs))
        blind = Counter(named(bank, trouble, run, live=False, tagged=False) for run in range(runs))
        hits = sum(count for cause, count in found.items() if cause in wanted)
        right, total = right + hits, total + runs
        print(f"{name:34} {hits:3} / {runs}   {told(found)} | {told(blind)}", flush=True)
    print(f"{'all':34} {right} / {total}")


def told(counts: Counter[str | None]) -> str:
    """Counts in words."""
    return ", ".join(f"{cause or 'nothing'} {count}" for cause, count in counts.most_common())


def main() -> None:
    """Print the tables that were asked for."""
    tables = {"rates": print_rates, "mixes": print_mixes, "delays": print_delays, "causes": print_causes}
    tables |= {"publishes": print_publishes, "wander": print_wander}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="*", metavar="TABLE", help=f"one of {', '.join(tables)}; all by default")
    asked = parser.parse_args().tables
    if unknown := [name for name in asked if name not in tables]:
        parser.error(f"no such table: {', '.join(unknown)}; there are {', '.join(tables)}")
    bank = make_bank(1500, seed=1)
    for name in asked or tables:
        tables[name](bank)


if __name__ == "__main__":
    main()
