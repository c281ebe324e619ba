"""Drift of the served drafter's α: numbers in, alarm out. No clock, no Redis, no torch.

The input matters more than the detector. Each rollout gives one number, scored *before* it is trained on: its replay α
(tokens / rounds) under the served drafter. `observe` cuts the stream of rollouts into ticks of equal *data*; a clock
would make the limit depend on traffic. A tick's value is the mean over its rollouts, standardised to fixed stratum
weights where strata are known. It is not the ratio of sums: there long rollouts weigh more, so ticks are noisier and
skewed, and a change of mix looks like drift.

The frozen drafter is *not* used to cancel noise: a moving policy lowers both drafters, and their difference would hide
that fall. Feed the frozen drafter to a second monitor; `attribute` reads the two.

Each lane is a one-sided CUSUM in units of the long-run sd:  S <- max(0, S + (baseline - value) / sd - k),  alarm at
S > h. The limit h follows from the wanted alarm rate by Siegmund's formula. Notable choices:
* sd = max(tick sd, sd of batch means · sqrt(batch)) over several batch lengths, from successive differences: slow
  wander widens the limits, a trend does not. After the baseline is frozen, batches that close while a lane is above
  half its limit are left out: a fall must not widen the limits by which it is found.
* Until `baseline_ticks` the baseline is the running mean, and the residual is scaled by sqrt(n / (n + 1)): recursive
  residuals, which are independent and of unit variance however short the history is.
* When another drafter is served, the baseline is moved to it: `rebase`. The difference is measured on rollouts that
  came after the change (`Succession`). The gate's gain is not used: the gate publishes what looked good on its
  evidence, so its gains are too large on average, and a baseline that adds them up rises above what any drafter can do.
* The certainty of the baseline is counted in ticks (`known_ticks`): as certain as a mean of n ticks, it moves by
  1 / (n + 1) of the next residual, until n is `baseline_ticks`. A rebase adds its own variance, so the baseline
  learns again from the new drafter's ticks. This is a Kalman filter in units of sd².
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final, Literal, Self

_STATE_FORMAT: Final = "draftalign.drift.v2"
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
    """Settings. The alarm rate is per rollouts, not per hours; each lane gets an equal part of it."""

    rollouts_per_tick: int = 64  # 8 prompts of 8 rollouts; a tick should hold whole groups
    rollouts_between_false_alarms: float = 43_200 * 64  # 30 days at 64 rollouts a minute
    lanes: tuple[Lane, ...] = (Lane("fast", 0.5), Lane("slow", 0.1))
    baseline_ticks: int = 1_440
    warmup_ticks: int = 20  # no statistic before: the sd of fewer ticks is a guess
    dead_band: float = 0.0  # fraction of the baseline that may be lost without being counted
    batch_ticks: tuple[int, ...] = (15, 60, 240)
    sd_window_ticks: int = 5_760  # memory of the sd estimates
    stratum_weights: Mapping[str, float] = field(default_factory=dict)  # empty: one stratum

    def __post_init__(self) -> None:
        if self.rollouts_per_tick < 1 or self.warmup_ticks < 3 or self.baseline_ticks <= self.warmup_ticks:
            raise DriftError(
                "expected rollouts_per_tick >= 1, warmup_ticks >= 3 and baseline_ticks above it, got "
                f"{self.rollouts_per_tick}, {self.warmup_ticks}, {self.baseline_ticks}"
            )
        if not 0 <= self.dead_band < 1:
            raise DriftError(f"dead_band is a fraction of the baseline in [0, 1), got {self.dead_band}")
        if not self.lanes or len({lane.name for lane in self.lanes}) != len(self.lanes):
            raise DriftError("expected at least one lane, and a name of its own for each")
        if any(not weight > 0 for weight in self.stratum_weights.values()):
            raise DriftError("stratum weights must be positive; leave out strata that must not count")

    def limit(self, lane: Lane) -> float:
        """The lane's limit h: n lanes, each at 1/n of the permitted rate (union bound)."""
        ticks = self.rollouts_between_false_alarms / self.rollouts_per_tick
        return cusum_limit(lane.k, len(self.lanes) * ticks)


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
class DriftState:
    """The state that survives a restart; `to_json` and `from_json` keep it bit for bit."""

    ticks: int = 0
    baseline: float = 0.0
    known_ticks: float = 0.0  # the baseline is as certain as a mean of this many ticks
    recent: float = 0.0  # exponentially weighted level of the last ticks
    shown: float = 0.0  # level of the very last ticks: what the drafter shows now
    offset: float = 0.0  # how far rebases, as corrected since, moved the baseline: keeps publishes out of the sd
    statistics: dict[str, float] = field(default_factory=dict)
    spreads: list[Spread] = field(default_factory=list)
    pending: list[tuple[str, float]] = field(default_factory=list)  # (stratum, α) of the tick being filled
    stratum_means: dict[str, float] = field(default_factory=dict)
    stratum_counts: dict[str, int] = field(default_factory=dict)

    def to_json(self) -> str:
        """Serialise, with the name of the format."""
        return json.dumps({"format": _STATE_FORMAT, **asdict(self)}, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read what `to_json` wrote; raises DriftError on anything else."""
        try:
            table: dict[str, Any] = json.loads(text)
            found = table.pop("format")
            spreads = [Spread(**spread) for spread in table.pop("spreads")]
            pending = [(str(stratum), float(alpha)) for stratum, alpha in table.pop("pending")]
            state = cls(spreads=spreads, pending=pending, **table)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise DriftError(f"not a stored drift state ({error}); delete it and the monitor starts afresh") from error
        if found != _STATE_FORMAT:
            raise DriftError(
                f"expected drift state {_STATE_FORMAT}, got {found!r}; delete it and the monitor starts afresh"
            )
        return state


class DriftMonitor:
    """Watches one drafter of one run. It has no other state than `state`."""

    def __init__(self, config: DriftConfig | None = None, state: DriftState | None = None) -> None:
        self.config = config or DriftConfig()
        self.state = state or DriftState()
        self._limits = {lane.name: self.config.limit(lane) for lane in self.config.lanes}
        lengths = [1, *self.config.batch_ticks]
        if [spread.length for spread in self.state.spreads] != lengths:
            self.state.spreads = [Spread(length) for length in lengths]
        # Lanes that were renamed or removed since the state was stored are dropped, new ones start at 0.
        self.state.statistics = {name: self.state.statistics.get(name, 0.0) for name in self._limits}

    def observe(
        self, tokens: Sequence[float], rounds: Sequence[float], strata: Sequence[str] | None = None
    ) -> list[DriftReading]:
        """Add one batch: per rollout the served drafter's replay tokens and rounds. One reading per closed tick.

        Rollouts without a round are skipped, and so are those of a stratum without a weight. The rollouts of one
        prompt should be neighbours; otherwise order does not matter.
        """
        if len(tokens) != len(rounds) or (strata is not None and len(strata) != len(tokens)):
            raise DriftError(
                "expected as many tokens, rounds and strata, got "
                f"{len(tokens)}, {len(rounds)} and {len(strata) if strata is not None else 'none'}"
            )
        for index, (token, rnd) in enumerate(zip(tokens, rounds, strict=True)):
            if not (math.isfinite(token) and math.isfinite(rnd)):
                raise DriftError(
                    f"rollout {index} has tokens={token}, rounds={rnd}; screen the batch before feeding it"
                )
        readings = []
        weights = self.config.stratum_weights
        for index, (token, rnd) in enumerate(zip(tokens, rounds, strict=True)):
            stratum = strata[index] if strata is not None and weights else ""
            if rnd <= 0 or (weights and stratum not in weights):
                continue
            self.state.pending.append((stratum, token / rnd))
            if len(self.state.pending) == self.config.rollouts_per_tick:
                readings.append(self.tick(self._standardised_mean()))
        return readings

    def tick(self, value: float) -> DriftReading:
        """Add one tick's value: the (stratified) mean α over its rollouts."""
        if not math.isfinite(value):
            raise DriftError(f"a tick must be a finite number, got {value}; screen the batch before feeding it")
        state, config = self.state, self.config
        sd = self._sd() if state.ticks >= config.warmup_ticks else None
        if sd is not None:
            loss = state.baseline - value
            if state.known_ticks < config.baseline_ticks:
                loss *= math.sqrt(state.known_ticks / (state.known_ticks + 1))
            if config.dead_band:
                loss -= config.dead_band * state.baseline
            for lane in config.lanes:
                statistic = max(0.0, state.statistics[lane.name] + loss / sd - lane.k)
                state.statistics[lane.name] = min(statistic, self._limits[lane.name] + _HEADROOM_SD)
        self._learn(value)
        return self.reading(value, sd)

    def reading(self, value: float, sd: float | None) -> DriftReading:
        """The present statistics as a reading of `value`."""
        state = self.state
        lanes = {} if sd is None else {n: LaneReading(s, self._limits[n]) for n, s in state.statistics.items()}
        return DriftReading(state.ticks, value, state.baseline if state.ticks else None, sd, lanes)

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
        before = state.baseline
        state.baseline = min(state.baseline + counted - made_up, ceiling)
        state.offset += state.baseline - before
        state.stratum_means = {name: mean + paired_difference for name, mean in state.stratum_means.items()}
        # The tick being filled was scored with the old drafter.
        state.pending = [(stratum, alpha + paired_difference) for stratum, alpha in state.pending]
        if lost > 0:
            repaired = min(lost, max(0.0, proven)) / lost
            state.statistics = {name: s * (1 - repaired) for name, s in state.statistics.items()}
        if math.isinf(variance):
            self.acknowledge()  # the statistics compared with a baseline that is now discarded
        if variance > 0:
            sd = self._sd()
            doubt = variance / sd**2 if sd else math.inf
            state.known_ticks = 1 / (1 / state.known_ticks + doubt) if state.known_ticks > 0 else 0.0

    def acknowledge(self) -> None:
        """Reset the lanes to 0, as an operator does after an alarm was dealt with; the baseline stays."""
        self.state.statistics = dict.fromkeys(self.state.statistics, 0.0)

    # --- inside
    def _sd(self) -> float | None:
        """Long-run sd of a tick: the largest over batch lengths that have been seen often enough."""
        spreads = self.state.spreads
        found = [s.tick_sd for s in spreads if s.length == 1 or s.differences >= _MIN_DIFFERENCES]
        return max(found) or None

    def _learn(self, value: float) -> None:
        """Move baseline, recent level and spreads by one tick."""
        state, config = self.state, self.config
        state.ticks += 1
        if state.known_ticks < config.baseline_ticks:
            state.known_ticks += 1
            learnt = (value - state.baseline) / state.known_ticks
            state.baseline += learnt
            if state.known_ticks < state.ticks:  # it corrects a rebase, whose error must not count as wander
                state.offset += learnt
        state.recent += max(_RECENT_WEIGHT, 1 / state.ticks) * (value - state.recent)
        state.shown += max(_SHOWN_WEIGHT, 1 / state.ticks) * (value - state.shown)
        learning = state.ticks <= config.baseline_ticks
        calm = learning or all(s < self._limits[name] / 2 for name, s in state.statistics.items())
        for spread in state.spreads:
            spread.add(value - state.offset, config.sd_window_ticks, counts=calm)

    def _standardised_mean(self) -> float:
        """Close the tick: mean per stratum, weighted; a stratum without rollouts counts as its own mean so far."""
        state, weights = self.state, self.config.stratum_weights or {"": 1.0}
        values = {name: [alpha for stratum, alpha in state.pending if stratum == name] for name in weights}
        state.pending = []
        total = weight_sum = 0.0
        for name, alphas in values.items():
            mean = math.fsum(alphas) / len(alphas) if alphas else state.stratum_means.get(name)
            if mean is None:  # never seen: the other strata share its weight
                continue
            total += weights[name] * mean
            weight_sum += weights[name]
            if alphas:
                count = state.stratum_counts[name] = state.stratum_counts.get(name, 0) + 1
                before = state.stratum_means.get(name, 0.0)
                state.stratum_means[name] = before + (mean - before) / min(count, self.config.baseline_ticks)
        return total / weight_sum


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
    differences: dict[str, list[float]] = field(default_factory=dict)  # prompt -> [sum of differences of α, rollouts]

    def feed(
        self,
        monitor: DriftMonitor,
        replays: Mapping[str, tuple[Sequence[float], Sequence[float]]],
        prompts: Sequence[str],
        *,
        served: str,
        latest: str | None,
    ) -> list[DriftReading]:
        """Show the monitor one batch: per version the rollouts' replay tokens and rounds. One reading per tick closed.

        `served` drafted the batch's rollouts, `latest` is offered to engines now, `prompts` names the prompt of each
        rollout. Engines load a new version one after another. Rollouts of an engine that still has an older version
        count too, replayed with the watched version. If the watched version was deleted, and so was not replayed, the
        monitor's baseline starts from scratch with the served one.
        """
        if latest is not None and self.offered[-1:] != [latest]:
            self.returned = sorted({*self.returned, latest} & {*self.offered})
            self.offered = [*(v for v in self.offered if v != latest), latest][-_OFFERED_VERSIONS:]
        if self.watched is None:
            self.watched = served
        elif self.watched not in replays:
            monitor.rebase(0.0, math.inf)
            self._watch(served)
        elif self._is_newer(served):
            if self.successor not in (None, served):  # a third version is served before the comparison is done
                self._succeed(monitor)
                return []  # this batch was not replayed with the version now watched
            self._compare(monitor, replays, prompts, served)
        tokens, rounds = replays[self.watched]
        return monitor.observe(tokens, rounds)

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
        monitor.rebase(mean, variance, decided=self.successor in self.returned)
        self._watch(self.successor)

    def _watch(self, version: str | None) -> None:
        self.watched, self.successor, self.differences = version, None, {}

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


def attribute(served: DriftReading, frozen: DriftReading) -> Literal["none", "policy", "drafter"]:
    """The cause of an alarm, from monitors of the served and of the frozen drafter on the same rollouts.

    Both fell: the policy (or the text it is asked for) moved. Only the served one fell: the drafter got worse.
    """
    if not served.alarm:
        return "none"
    return "policy" if frozen.alarm else "drafter"
