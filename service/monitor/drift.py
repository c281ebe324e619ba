"""Drift of the served drafter's α: numbers in, alarm out. No clock, no Redis, no torch.

The input matters more than the detector. Each rollout gives one number, scored *before* it is trained on: its replay α
(tokens / rounds) under the served drafter. `observe` cuts the stream of rollouts into ticks of equal *data*. A tick's
value is the mean over its rollouts of α less what is usual in the rollout's stratum, so another mix of strata is no
drift (`Levels`). It is not the ratio of sums: there long rollouts weigh more, so ticks are noisier and skewed.

The frozen drafter is *not* used to cancel noise: a moving policy lowers both drafters, and their difference would hide
that fall.

Each lane is a one-sided CUSUM in units of the long-run sd:  S <- max(0, S + (baseline - value) / sd - k),  alarm at
S > h. The limit h follows from the wanted alarm rate by Siegmund's formula. Notable choices:
* The rate is in days, as people mean it, and the ticks in a day are learnt from when rollouts arrived (`Traffic`).
* sd = max(tick sd, sd of batch means · sqrt(batch)) over several batch lengths, from successive differences: slow
  wander widens the limits, a trend does not. After the baseline is frozen, batches that close while a lane is above
  half its limit are left out: a fall must not widen the limits by which it is found.
* While the baseline is learnt, the residual is scaled by 1 / sqrt(1 + q), q the baseline's variance in units of the
  tick's: recursive residuals, which are independent and of unit variance however short the history is.
* When another drafter is served, the baseline is moved to it: `rebase`. The difference is measured on rollouts that
  came after the change (`Succession`). The gate's gain is not used: the gate publishes what looked good on its
  evidence, so its gains are too large on average, and a baseline that adds them up rises above what any drafter can do.
  A rebase adds its own variance to the baseline's, which then learns again from the new drafter's ticks.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby
from typing import Any, Final, Self

from service.monitor.cause import Evidence, Row
from service.monitor.records import Change

_STATE_FORMAT: Final = "draftalign.drift.v3"
#: The one before: one level instead of one per stratum.
_OLDER_FORMAT: Final = "draftalign.drift.v2"
#: Variance of what is not known, in units of a tick's. Infinity has no arithmetic.
_UNKNOWN: Final = 1e9
_DAY_SECONDS: Final = 86_400.0
#: Memory of the traffic. A longer pause between batches counts as a day.
_TRAFFIC_SECONDS: Final = 3 * _DAY_SECONDS
#: Batches that may have been scored before the watched version changed; after so many in a row it was deleted.
_SCORED_BEFORE: Final = 64
#: A stratum's share is taken for no less.
_LEAST_SHARE: Final = 1 / 64
#: A spread of this fraction of α is rounding.
_ROUNDING: Final = 1e-6
#: The formula of the limit holds for run lengths from here on.
_FEWEST_TICKS: Final = 50.0
#: A paired difference within this many standard errors of 0 may be chance.
_CHANCE_SD: Final = 2.0
#: Versions whose order is remembered. Engines are not further behind than this.
_OFFERED_VERSIONS: Final = 32
#: Rollouts on which a drafter is compared with the one that it replaces, before its α is watched: one tick's worth.
_COMPARED_ROLLOUTS: Final = 64
#: How far above its limit a statistic may stand, so that a lane clears soon after the fall has been repaired.
_HEADROOM_SD: Final = 5.0
#: Differences that a batch length needs before it counts; with fewer, the largest of several sds is noise.
_MIN_DIFFERENCES: Final = 8
#: Weight of the newest tick in the recent level, from which `rebase` computes how much was lost.
_RECENT_WEIGHT: Final = 1 / 32
#: The same for the level shown now, which caps what a gain may add to the baseline.
_SHOWN_WEIGHT: Final = 1 / 4


class DriftError(ValueError):
    """A setting, an observation or a stored state that the monitor cannot use; the message says which."""


def cusum_limit(k: float, run_length_ticks: float) -> float:
    """Limit h of a one-sided CUSUM with allowance `k` (sd) whose false alarms come once in `run_length_ticks`.

    Siegmund (1985): (exp(2kb) - 2kb - 1) / (2k²) = ARL with b = h + 1.166. `cusum_limit(0.25, 43_200)` is 16.0.
    """
    if not k > 0 or not run_length_ticks > 1:
        raise DriftError(
            f"expected k > 0 and a run length above one tick, got k={k}, run_length_ticks={run_length_ticks}"
        )
    target = 2 * k * k * run_length_ticks
    low, high = 0.0, math.log1p(target) + 3.0  # exp(z) - z - 1 at `high` exceeds the target for every target > 0
    for _ in range(80):
        middle = (low + high) / 2
        if math.expm1(middle) - middle < target:
            low = middle
        else:
            high = middle
    return max(0.0, high / (2 * k) - 1.166)


@dataclass(frozen=True, slots=True)
class Lane:
    """One CUSUM. `k`: allowance in sd; half the size of the fall that it finds fastest."""

    name: str
    k: float


@dataclass(frozen=True, slots=True)
class DriftConfig:
    """Settings. Each lane gets an equal part of the alarm rate."""

    rollouts_per_tick: int = 64  # 8 prompts of 8 rollouts; a tick should hold whole groups
    days_between_false_alarms: float = 30.0
    lanes: tuple[Lane, ...] = (Lane("fast", 0.5), Lane("slow", 0.1))
    baseline_ticks: int = 1_440
    warmup_ticks: int = 20  # no statistic before: the sd of fewer ticks is a guess
    dead_band: float = 0.0  # fraction of the baseline that may be lost without being counted
    batch_ticks: tuple[int, ...] = (15, 60, 240)
    sd_window_ticks: int = 5_760  # memory of the sd estimates
    strata: int = 16  # told apart; those that come later are one more together. 0: tags are not looked at

    def __post_init__(self) -> None:
        if self.rollouts_per_tick < 1 or self.warmup_ticks < 3 or self.baseline_ticks <= self.warmup_ticks:
            raise DriftError(
                "expected rollouts_per_tick >= 1, warmup_ticks >= 3 and baseline_ticks above it, got "
                f"{self.rollouts_per_tick}, {self.warmup_ticks}, {self.baseline_ticks}"
            )
        if not 0 <= self.dead_band < 1:
            raise DriftError(f"dead_band is a fraction of the baseline in [0, 1), got {self.dead_band}")
        if not 0 < self.days_between_false_alarms < math.inf:
            raise DriftError(f"expected days_between_false_alarms > 0, got {self.days_between_false_alarms}")
        if not self.lanes or len({lane.name for lane in self.lanes}) != len(self.lanes):
            raise DriftError("expected at least one lane, and a name of its own for each")

    def limit(self, lane: Lane, rollouts_per_second: float = 64 / 60) -> float:
        """The lane's limit h: n lanes, each at 1/n of the permitted rate (union bound)."""
        ticks = self.days_between_false_alarms * _DAY_SECONDS * rollouts_per_second / self.rollouts_per_tick
        return cusum_limit(lane.k, max(_FEWEST_TICKS, len(self.lanes) * ticks))


@dataclass(frozen=True, slots=True)
class LaneReading:
    """One lane after one tick."""

    statistic: float
    limit: float

    @property
    def alarm(self) -> bool:
        """True above the limit."""
        return self.statistic > self.limit


@dataclass(frozen=True, slots=True)
class DriftReading:
    """The monitor after one tick. `lanes` is empty, and `sd` None, until the warm-up is over."""

    ticks: int
    value: float
    baseline: float | None
    sd: float | None
    lanes: Mapping[str, LaneReading]

    @property
    def alarm(self) -> bool:
        """True while any lane is above its limit."""
        return any(lane.alarm for lane in self.lanes.values())


@dataclass(slots=True)
class Spread:
    """Variance from successive differences of means over `length` ticks, with a bounded memory."""

    length: int
    total: float = 0.0  # of the batch being filled
    filled: int = 0
    last: float | None = None  # mean of the batch before
    differences: int = 0
    variance: float = 0.0  # of a batch mean

    def add(self, value: float, memory_ticks: int, *, counts: bool) -> None:
        """Add one tick. With `counts` false, a batch that closes now does not change the variance."""
        self.total += value
        self.filled += 1
        if self.filled < self.length:
            return
        mean = self.total / self.length
        if self.last is not None and counts:
            self.differences += 1
            weight = 1 / min(self.differences, max(2 * _MIN_DIFFERENCES, memory_ticks // self.length))
            self.variance += weight * ((mean - self.last) ** 2 / 2 - self.variance)
        self.last, self.total, self.filled = mean, 0.0, 0

    @property
    def tick_sd(self) -> float:
        """The sd of independent ticks whose batch means have this variance."""
        return math.sqrt(self.variance * self.length)


@dataclass(slots=True)
class Levels:
    """What α is on average in each stratum under the served drafter, and how surely: a Kalman filter.

    Variances are in units of a tick's. A tick's part in one stratum observes that stratum's level with the variance
    1 / (its share of the tick). Levels are correlated, because a rebase moves all of them by one error, which each tick
    then corrects in all of them. With one stratum it is the running mean.
    """

    names: list[str] = field(default_factory=list)
    means: list[float] = field(default_factory=list)
    shares: list[float] = field(default_factory=list)  # of the baseline's rollouts
    entropies: list[float | None] = field(default_factory=list)  # of the policy, in nats
    covariance: list[list[float]] = field(default_factory=list)
    doubted: bool = False  # a rebase has added an error, which is being learnt
    owed: float = (
        0.0  # what versions that were proven to be worse cost; it is not learnt, or the fall would be the level
    )

    @property
    def level(self) -> float:
        """α at the baseline's mix of strata."""
        return math.fsum(w * mean for w, mean in zip(self.shares, self.means, strict=True))

    def uncertainty(self, shares: Mapping[str, float] | None = None) -> float:
        """Variance of the level at a mix, the baseline's by default."""
        weights = self.shares if shares is None else [shares.get(name, 0.0) for name in self.names]
        return math.fsum(
            a * b * self.covariance[i][j] for i, a in enumerate(weights) for j, b in enumerate(weights) if a and b
        )

    def known(self, name: str) -> bool:
        """Whether a stratum's level rests on a tick's worth of rollouts."""
        place = self.names.index(name)
        return self.covariance[place][place] <= 1.0

    def meet(self, name: str, mean: float) -> None:
        """Take in a stratum that is new, at the level that it shows."""
        if name not in self.names:
            self.names.append(name)
            self.means.append(mean)
            self.shares.append(0.0)
            self.entropies.append(None)
            self.covariance = [*([*row, 0.0] for row in self.covariance), [0.0] * len(self.names)]
            self.covariance[-1][-1] = _UNKNOWN

    def learn(self, name: str, share: float, mean: float, entropy: float | None) -> None:
        """Learn from the part of a tick that is in one stratum."""
        j = self.names.index(name)
        column = [row[j] for row in self.covariance]
        total = column[j] + 1 / share
        error = mean - self.means[j]
        for i, own in enumerate(column):
            self.means[i] += own / total * error
            self.covariance[i] = [c - own * other / total for c, other in zip(self.covariance[i], column, strict=True)]
        before = self.entropies[j]
        if entropy is not None:
            self.entropies[j] = entropy if before is None else before + column[j] / total * (entropy - before)

    def move(self, by: float, variance: float) -> None:
        """Move all levels by one number with an error of so much variance.

        A level stays above a tenth of what it was: the difference may have been measured where α was far higher. How
        much a stratum differs from the others is less certain than the mean over all, the more so the rarer it is.
        """
        self.means = [max(mean + by, mean / 10) for mean in self.means]
        if variance > 0:
            self.doubted = True
            known = math.isfinite(variance)
            for i, (row, share) in enumerate(zip(self.covariance, self.shares, strict=True)):
                own = variance * (1 / max(share, _LEAST_SHARE) - 1) if known else _UNKNOWN
                moved = [min(c + variance, _UNKNOWN) if known else 0.0 for c in row]
                moved[i] = min(moved[i] + own, _UNKNOWN)
                self.covariance[i] = moved


@dataclass(slots=True)
class Traffic:
    """Rollouts a second over the last days, from when they arrived. It begins with an hour of 64 a minute."""

    rollouts: float = 3840.0
    seconds: float = 3600.0
    last: float | None = None  # arrival of the newest batch, in Unix seconds

    @property
    def rollouts_per_second(self) -> float:
        """The rate."""
        return self.rollouts / self.seconds

    def add(self, rollouts: int, arrived: float) -> None:
        """Count a batch. One that arrived before the last, by a clock that was set back, only adds its rollouts."""
        gap = 0.0 if self.last is None else min(max(0.0, arrived - self.last), _DAY_SECONDS)
        kept = math.exp(-gap / _TRAFFIC_SECONDS)
        self.rollouts = self.rollouts * kept + (0 if self.last is None else rollouts)
        self.seconds = self.seconds * kept + gap
        self.last = arrived


@dataclass(slots=True)
class DriftState:
    """The state that survives a restart; `to_json` and `from_json` keep it bit for bit."""

    ticks: int = 0
    levels: Levels = field(default_factory=Levels)
    recent: float = 0.0  # exponentially weighted level of the last ticks
    shown: float = 0.0  # level of the very last ticks: what the drafter shows now
    offset: float = 0.0  # how far rebases, as corrected since, moved the baseline: keeps publishes out of the sd
    statistics: dict[str, float] = field(default_factory=dict)
    spreads: list[Spread] = field(default_factory=list)
    pending: list[tuple[str, float, float | None]] = field(default_factory=list)  # (stratum, α, entropy), unticked
    evidence: Evidence = field(default_factory=Evidence)
    traffic: Traffic = field(default_factory=Traffic)

    @property
    def baseline(self) -> float:
        """α to compare with, at the baseline's mix of strata."""
        return self.levels.level

    @property
    def known_ticks(self) -> float:
        """The baseline is as certain as a mean of so many ticks."""
        return 1 / self.levels.uncertainty() if self.levels.names else 0.0

    def to_json(self) -> str:
        """Serialise, with the name of the format."""
        return json.dumps({"format": _STATE_FORMAT, **asdict(self)}, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read what `to_json` wrote, also before there were strata; raises DriftError on anything else."""
        try:
            table: dict[str, Any] = json.loads(text)
            found = table.pop("format")
            if found == _OLDER_FORMAT:
                table = _with_levels(table)
                found = _STATE_FORMAT
            evidence = table.pop("evidence")
            state = cls(
                levels=Levels(**table.pop("levels")),
                spreads=[Spread(**spread) for spread in table.pop("spreads")],
                pending=[(str(stratum), float(alpha), entropy) for stratum, alpha, entropy in table.pop("pending")],
                evidence=Evidence(**(evidence | {"rows": [Row(**row) for row in evidence["rows"]]})),
                traffic=Traffic(**table.pop("traffic")),
                **table,
            )
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise DriftError(f"not a stored drift state ({error}); delete it and the monitor starts afresh") from error
        if found != _STATE_FORMAT:
            raise DriftError(
                f"expected drift state {_STATE_FORMAT}, got {found!r}; delete it and the monitor starts afresh"
            )
        return state


def _with_levels(table: dict[str, Any]) -> dict[str, Any]:
    """A state of the format before, in which one stratum was all."""
    baseline, known = table.pop("baseline"), table.pop("known_ticks")
    kept = {name: table[name] for name in ("ticks", "recent", "shown", "offset", "statistics", "spreads")}
    variance = 1 / known if known > 0 else _UNKNOWN
    one = Levels([""], [baseline], [1.0], [None], [[variance]], doubted=known < kept["ticks"])
    levels = asdict(one) if kept["ticks"] else asdict(Levels())
    pending = [(stratum, alpha, None) for stratum, alpha in table["pending"]]
    return kept | {"levels": levels, "pending": pending, "evidence": asdict(Evidence()), "traffic": asdict(Traffic())}


class DriftMonitor:
    """Watches one drafter of one run. It has no other state than `state`."""

    def __init__(self, config: DriftConfig | None = None, state: DriftState | None = None) -> None:
        self.config = config or DriftConfig()
        self.state = state or DriftState()
        self._set_limits()
        lengths = [1, *self.config.batch_ticks]
        if [spread.length for spread in self.state.spreads] != lengths:
            self.state.spreads = [Spread(length) for length in lengths]
        # Lanes that were renamed or removed since the state was stored are dropped, new ones start at 0.
        self.state.statistics = {name: self.state.statistics.get(name, 0.0) for name in self._limits}

    def observe(
        self,
        tokens: Sequence[float],
        rounds: Sequence[float],
        strata: Sequence[str] | None = None,
        *,
        entropies: Sequence[float] | None = None,
        arrived: float | None = None,
    ) -> list[DriftReading]:
        """Add one batch: per rollout the served drafter's replay tokens and rounds. One reading per closed tick.

        `strata`: the kind of each rollout's prompt. `entropies`: of each rollout, in nats. `arrived`: when the batch
        came, in Unix seconds. Rollouts without a round are skipped. The rollouts of one prompt should be neighbours;
        otherwise order does not matter.
        """
        lists = (tokens, rounds, tokens if strata is None else strata, tokens if entropies is None else entropies)
        if len({len(one) for one in lists}) > 1:
            raise DriftError(
                f"expected as many tokens, rounds, strata and entropies, got {[len(one) for one in lists]}"
            )
        for index, (token, rnd) in enumerate(zip(tokens, rounds, strict=True)):
            if not (math.isfinite(token) and math.isfinite(rnd)):
                raise DriftError(
                    f"rollout {index} has tokens={token}, rounds={rnd}; screen the batch before feeding it"
                )
        if arrived is not None:
            self.state.traffic.add(len(tokens), arrived)
            self._set_limits()
        readings = []
        for index, (token, rnd) in enumerate(zip(tokens, rounds, strict=True)):
            if rnd <= 0:
                continue
            entropy = None if entropies is None or not math.isfinite(entropies[index]) else entropies[index]
            self.state.pending.append((strata[index] if strata is not None else "", token / rnd, entropy))
            if len(self.state.pending) == self.config.rollouts_per_tick:
                readings.append(self._close(self._parts()))
        return readings

    def tick(self, value: float) -> DriftReading:
        """Add one tick of one stratum: the mean α over its rollouts."""
        if not math.isfinite(value):
            raise DriftError(f"a tick must be a finite number, got {value}; screen the batch before feeding it")
        return self._close({"": (1.0, value, None)})

    def reading(self, value: float, sd: float | None) -> DriftReading:
        """The present statistics as a reading of `value`."""
        state = self.state
        lanes = {} if sd is None else {n: LaneReading(s, self._limits[n]) for n, s in state.statistics.items()}
        return DriftReading(state.ticks, value, state.baseline if state.ticks else None, sd, lanes)

    def change(self) -> Change | None:
        """What α's change since the baseline is made of, over the ticks since the alarm's fall began, else the last."""
        sd = self._sd()
        if sd is None or self.state.ticks <= self.config.warmup_ticks:
            return None
        return self.state.evidence.change(
            [name for name, statistic in self.state.statistics.items() if statistic > self._limits[name]],
            sd=sd,
            uncertainty=self.state.levels.uncertainty(),
            several_strata=len(self.state.levels.names) > 1,
            rollouts_per_tick=self.config.rollouts_per_tick,
        )

    def rebase(self, paired_difference: float, variance: float = 0.0, *, decided: bool = True) -> None:
        """Move the baseline to a new served drafter: `paired_difference` is its mean α minus the old one's.

        Both are measured on the same rollouts, so prompts and policy cancel. `variance` is the variance of the
        difference: the baseline becomes less certain by it, and learns again from the next ticks. If it is infinite,
        the baseline starts from scratch. `decided`: it is served although it may be worse (a rollback).
        A new version that is proven worse does not lower the baseline: a gate that publishes worse and worse drafters
        must raise an alarm.
        A gain first makes up for the loss since the baseline was set, and that part does not raise the baseline: the
        drafter is back where it was, and a higher baseline would mean a false alarm after every retraining.
        A loss that is not made up for stays counted, so that frequent publishing does not hide a slow fall.
        """
        if not math.isfinite(paired_difference) or not variance >= 0:
            raise DriftError(
                f"the paired difference must be a finite number with a variance, got {paired_difference} and {variance}"
            )
        state = self.state
        if state.ticks == 0:
            return
        # A difference that may be chance must not end an alarm.
        reach = _CHANCE_SD * math.sqrt(variance)
        chance = min(max(paired_difference, -reach), reach)
        proven = paired_difference - chance
        # Right after a fall the recent level is still the old one.
        lost = max(0.0, state.baseline - min(state.recent, state.shown))
        made_up = min(lost, max(0.0, paired_difference))
        state.recent += paired_difference
        # A gain does not raise the baseline above the level shown now: gains that each follow a fall of the policy
        # would otherwise add up to a level that was never reached.
        state.shown += paired_difference
        ceiling = max(state.baseline + chance, state.shown) if proven > 0 else math.inf
        counted = paired_difference if decided else max(paired_difference, chance)
        sd = self._sd()
        before = state.baseline
        wanted = min(before + counted - made_up, ceiling) - before
        state.levels.move(wanted, 0.0 if variance == 0 else variance / sd**2 if sd else math.inf)
        moved = state.baseline - before
        state.offset += moved
        state.evidence.shift += paired_difference - moved
        state.levels.owed = min(0.0, state.levels.owed + paired_difference - moved)
        # The tick being filled was scored with the old drafter.
        state.pending = [(stratum, alpha + paired_difference, entropy) for stratum, alpha, entropy in state.pending]
        if lost > 0:
            repaired = min(lost, max(0.0, proven)) / lost
            state.statistics = {name: s * (1 - repaired) for name, s in state.statistics.items()}
        if math.isinf(variance):
            self.acknowledge()  # the statistics compared with a baseline that is now discarded
            state.levels.owed = 0.0
        else:
            state.evidence.shift_variance += variance

    def acknowledge(self) -> None:
        """Set the lanes to 0, as an operator does after a fall was dealt with. The baseline stays: a fall that is
        still there raises the alarm again.
        """
        self.state.statistics = dict.fromkeys(self.state.statistics, 0.0)
        for name in self.state.statistics:
            self.state.evidence.calm(name, self.state.ticks)

    def reset(self) -> None:
        """Learn baseline and spread from the next rollouts, where the new level is the right one."""
        fresh = DriftState(traffic=self.state.traffic)
        self.state = DriftMonitor(self.config, fresh).state

    # --- inside
    def _sd(self) -> float | None:
        """Long-run sd of a tick: the largest over batch lengths that have been seen often enough."""
        spreads = self.state.spreads
        found = [s.tick_sd for s in spreads if s.length == 1 or s.differences >= _MIN_DIFFERENCES]
        sd = max(found)
        return sd if sd > _ROUNDING * abs(self.state.baseline) else None

    def _set_limits(self) -> None:
        rate = self.state.traffic.rollouts_per_second
        self._limits = {lane.name: self.config.limit(lane, rate) for lane in self.config.lanes}

    def _parts(self) -> dict[str, tuple[float, float, float | None]]:
        """The tick that is full, by stratum: its share of the rollouts, mean α, mean entropy."""
        pending, self.state.pending = self.state.pending, []
        known = [name for name in self.state.levels.names if name]
        for name in dict.fromkeys(stratum for stratum, _, _ in pending if stratum):
            if name not in known and len(known) < self.config.strata:
                known.append(name)
        parts = {}
        named = ((s if s in known and self.config.strata else "", alpha, h) for s, alpha, h in pending)
        told = sorted(named, key=lambda one: one[0])
        for name, group in groupby(told, key=lambda one: one[0]):
            rollouts = list(group)
            entropies = [h for _, _, h in rollouts if h is not None]
            n = len(rollouts)
            parts[name] = (
                n / len(pending),
                math.fsum(alpha for _, alpha, _ in rollouts) / n,
                math.fsum(entropies) / n if len(entropies) == n else None,
            )
        return parts

    def _close(self, parts: Mapping[str, tuple[float, float, float | None]]) -> DriftReading:
        """Close a tick: compare it with the baseline, then learn from it."""
        state, config, levels = self.state, self.config, self.state.levels
        for name, (_, mean, _) in parts.items():
            levels.meet(name, mean)
        state.ticks += 1
        if state.ticks <= config.baseline_ticks:
            shares = [parts[name][0] if name in parts else 0.0 for name in levels.names]
            levels.shares = [w + (p - w) / state.ticks for w, p in zip(levels.shares, shares, strict=True)]
        # Strata that are new say nothing yet, and must not hide what the others say.
        told = {name: part for name, part in parts.items() if levels.known(name)} or dict(parts)
        whole = math.fsum(share for share, _, _ in told.values())
        mix = {name: share / whole for name, (share, _, _) in told.items()}
        alpha = math.fsum(mix[name] * mean for name, (_, mean, _) in told.items())
        expected = math.fsum(mix[name] * levels.means[levels.names.index(name)] for name in told)
        level, uncertainty = levels.level, levels.uncertainty(mix)
        value = level + alpha - expected
        sd = self._sd() if state.ticks > config.warmup_ticks else None
        if sd is not None:
            loss = (expected - alpha) / math.sqrt(1 + uncertainty) - config.dead_band * level
            for lane in config.lanes:
                limit = self._limits[lane.name]
                statistic = max(0.0, state.statistics[lane.name] + loss / sd - lane.k)
                state.statistics[lane.name] = min(statistic, limit + _HEADROOM_SD)
        self._explain(mix, told, alpha, expected, level)
        self._learn(parts, value, uncertainty)
        return self.reading(value, sd)

    def _explain(
        self,
        mix: Mapping[str, float],
        told: Mapping[str, tuple[float, float, float | None]],
        alpha: float,
        expected: float,
        level: float,
    ) -> None:
        """Remember the tick for the cause of an alarm."""
        state, levels, evidence = self.state, self.state.levels, self.state.evidence
        pairs = [(mix[n], h, levels.entropies[levels.names.index(n)]) for n, (_, _, h) in told.items()]
        known = [(share, h, usual) for share, h, usual in pairs if h is not None and usual is not None]
        entropies: tuple[float | None, float | None] = (None, None)
        if len(known) == len(pairs):
            entropies = math.fsum(p * h for p, h, _ in known), math.fsum(p * usual for p, _, usual in known)
        evidence.add(Row(state.ticks, alpha, expected, level, evidence.shift, evidence.shift_variance, *entropies))
        for name, statistic in state.statistics.items():
            if statistic == 0:
                evidence.calm(name, state.ticks)

    def _learn(self, parts: Mapping[str, tuple[float, float, float | None]], value: float, uncertainty: float) -> None:
        """Move levels, recent level and spreads by one tick."""
        state, config, levels = self.state, self.config, self.state.levels
        if uncertainty * config.baseline_ticks > 1 + 1e-9:
            before = levels.level
            for name, (share, mean, entropy) in parts.items():
                levels.learn(name, share, mean - levels.owed, entropy)
            if levels.doubted:  # it corrects a rebase, whose error must not count as wander
                state.offset += levels.level - before
        else:
            levels.doubted = False
        state.recent += max(_RECENT_WEIGHT, 1 / state.ticks) * (value - state.recent)
        state.shown += max(_SHOWN_WEIGHT, 1 / state.ticks) * (value - state.shown)
        learning = state.ticks <= config.baseline_ticks
        calm = learning or all(s < self._limits[name] / 2 for name, s in state.statistics.items())
        for spread in state.spreads:
            spread.add(value - state.offset, config.sd_window_ticks, counts=calm)


@dataclass(slots=True)
class Succession:
    """Follows which drafter is served, and compares each new one with the one before it on the same rollouts.

    It does not matter what changed it: a publish, a rollback by a person, another worker. The rollouts came after the
    change, so the drafter was not selected on them.
    """

    watched: str | None = None  # the version whose α the monitor is fed
    offered: list[str] = field(default_factory=list)  # versions, in the order in which they last became the latest
    returned: list[str] = field(default_factory=list)  # those that became the latest more than once
    successor: str | None = None  # the version that is compared with the watched one
    previous: str | None = None  # the version watched before
    passed: int = 0  # batches in a row that were scored with that one and not with the watched one
    differences: dict[str, list[float]] = field(default_factory=dict)  # prompt -> [sum of differences of α, rollouts]

    def feed(
        self,
        monitor: DriftMonitor,
        replays: Mapping[str, tuple[Sequence[float], Sequence[float]]],
        prompts: Sequence[str],
        *,
        served: str,
        latest: str | None,
        strata: Sequence[str] | None = None,
        entropies: Sequence[float] | None = None,
        arrived: float | None = None,
    ) -> list[DriftReading]:
        """Show the monitor one batch: per version the rollouts' replay tokens and rounds. One reading per tick closed.

        `strata`, `entropies`, `arrived`: as `DriftMonitor.observe` takes them. `served` drafted the batch's rollouts,
        `latest` is offered to engines now, `prompts` names the prompt of each rollout. Engines load a new version one
        after another. Rollouts of an engine that still has an older version count too, replayed with the watched
        version. If the watched version was deleted, and so was not replayed, the monitor's baseline starts from
        scratch with the served one.
        """
        if latest is not None and self.offered[-1:] != [latest]:
            self.returned = sorted({*self.returned, latest} & {*self.offered})
            self.offered = [*(v for v in self.offered if v != latest), latest][-_OFFERED_VERSIONS:]
        if self.watched is None:
            self.watched = served
        elif self.watched not in replays and self.previous in replays and self.passed < _SCORED_BEFORE:
            self.passed += 1
            return []  # it was scored before the watched version was
        elif self.watched not in replays:
            monitor.rebase(0.0, math.inf)
            self._watch(served)
        elif self._is_newer(served):
            if self.successor not in (None, served):  # a third version is served before the comparison is done
                self._succeed(monitor)
                return []  # this batch was not replayed with the version now watched
            self._compare(monitor, replays, prompts, served)
        self.passed = 0
        tokens, rounds = replays[self.watched]
        return monitor.observe(tokens, rounds, strata, entropies=entropies, arrived=arrived)

    def _is_newer(self, version: str) -> bool:
        """Whether it became the latest after the watched version; False if it was never seen as the latest."""
        places = {v: place for place, v in enumerate(self.offered)}
        return places.get(version, -1) > places.get(self.watched or "", -1)

    def _compare(
        self,
        monitor: DriftMonitor,
        replays: Mapping[str, tuple[Sequence[float], Sequence[float]]],
        prompts: Sequence[str],
        successor: str,
    ) -> None:
        self.successor = successor
        tokens, before = replays[self.watched or successor]
        for prompt, token, old, new in zip(prompts, tokens, before, replays[successor][1], strict=True):
            if old > 0 and new > 0:
                sums = self.differences.setdefault(prompt, [0.0, 0.0])
                sums[0] += token / new - token / old
                sums[1] += 1
        if sum(count for _, count in self.differences.values()) >= _COMPARED_ROLLOUTS:
            self._succeed(monitor)

    def _succeed(self, monitor: DriftMonitor) -> None:
        """Watch the successor from now on."""
        mean, variance = self.difference()
        monitor.rebase(mean, variance, decided=self._served_again(self.successor or ""))
        self._watch(self.successor)

    def _served_again(self, version: str) -> bool:
        """Whether it was the latest before: it was seen so, or its number is lower than the watched one's."""
        return version in self.returned or _number(version) < _number(self.watched or "")

    def _watch(self, version: str | None) -> None:
        self.previous, self.watched, self.successor, self.differences = self.watched, version, None, {}

    def difference(self) -> tuple[float, float]:
        """Mean over rollouts of the successor's α minus the watched one's, and the variance of that mean.

        Rollouts of one prompt are one observation; of fewer than two prompts the variance is infinite.
        """
        if not self.differences:
            return 0.0, math.inf
        n = math.fsum(count for _, count in self.differences.values())
        mean = math.fsum(total for total, _ in self.differences.values()) / n
        clusters = len(self.differences)
        if clusters < 2:
            return mean, math.inf
        squares = math.fsum((total - count * mean) ** 2 for total, count in self.differences.values())
        return mean, squares / n**2 * clusters / (clusters - 1)


def _number(version: str) -> int:
    digits = version.partition("-")[0].removeprefix("v")
    return int(digits) if digits.isascii() and digits.isdigit() else 0
