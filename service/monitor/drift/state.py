"""What the drift monitor knows: levels by stratum, spread, traffic. It is kept bit for bit over a restart."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from pydantic import ConfigDict, TypeAdapter

from service.monitor.drift.cause import RecentTicks
from service.monitor.drift.limits import DAY_SECONDS, DriftError

_STATE_FORMAT: Final = "draftalign.drift.v3"
#: Variance of what is not known, in units of a tick's. Infinity has no arithmetic.
_UNKNOWN: Final = 1e9
#: A change of this fraction of α is rounding.
_ROUNDING: Final = 1e-9
#: Memory of the traffic. A longer pause between batches counts as a day.
_TRAFFIC_SECONDS: Final = 3 * DAY_SECONDS
#: Least share that a stratum is taken to have.
_LEAST_SHARE: Final = 1 / 64
#: Differences from which on a batch length counts; with fewer, the largest of several sds would be noise.
MIN_DIFFERENCES: Final = 8


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
            weight = 1 / min(self.differences, max(2 * MIN_DIFFERENCES, memory_ticks // self.length))
            self.variance += weight * ((mean - self.last) ** 2 / 2 - self.variance)
        self.last, self.total, self.filled = mean, 0.0, 0

    @property
    def tick_sd(self) -> float:
        """The sd of independent ticks whose batch means have this variance."""
        return math.sqrt(self.variance * self.length)


@dataclass(slots=True)
class Undo:
    """What it takes to do the last rebase once more. `before`: the state before it, as JSON; `ticks`: closed since."""

    before: str
    decided: bool
    ticks: list[dict[str, tuple[float, float, float | None]]] = field(default_factory=list)


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
    owed: float = 0.0  # what versions that were proven worse cost, at most 0; not learnt, or the level would fall too
    owed_variance: float = 0.0  # of that
    forgiven: float = 0.0  # by how much what may be chance in those losses has lowered the levels, at most 0
    undo: Undo | None = None  # of the last rebase, while it may be corrected

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

    def has_level(self, name: str) -> bool:
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

    def owe(self, by: float, variance: float = 0.0) -> None:
        """Count what a new version cost that did not lower the levels; a gain makes up for it.

        What is left of a difference by rounding is none, and its variance is none of what is owed.
        """
        if abs(by) <= _ROUNDING * self.level:
            return
        self.owed = min(0.0, self.owed + by)
        self.owed_variance = self.owed_variance + variance if self.owed < 0 else 0.0
        if self.owed == 0:
            self.forgiven = 0.0

    def forgive(self, by: float) -> None:
        """Count by how much a version that was proven worse has lowered the levels, or a better one raised them."""
        self.forgiven = min(0.0, self.forgiven + by)

    def move(self, by: float, variance: float) -> None:
        """Move all levels by one number, whose error has this variance.

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
class Rise:
    """Whether α has risen above the baseline to stay: the slowest lane's CUSUM, upwards."""

    statistic: float = 0.0
    ticks: int = 0  # for which it has stood above the limit
    mean: float = 0.0  # of what α was above the baseline by in those
    spreads: list[Spread] = field(default_factory=list)  # when the statistic was 0 for the last time


@dataclass(slots=True)
class ArrivalRate:
    """Rollouts a second over the last days, from when they arrived. It begins with an hour of 64 a minute."""

    rollouts: float = 3840.0
    seconds: float = 3600.0
    last: float | None = None  # arrival of the newest batch, in Unix seconds

    @property
    def rollouts_per_second(self) -> float:
        """The rate."""
        return self.rollouts / self.seconds

    def add(self, rollouts: int, arrived: float) -> None:
        """Count a batch. Where the clock was set back and it seems older than the last one, only its rollouts count."""
        gap = 0.0 if self.last is None else min(max(0.0, arrived - self.last), DAY_SECONDS)
        kept = math.exp(-gap / _TRAFFIC_SECONDS)
        self.rollouts = self.rollouts * kept + (0 if self.last is None else rollouts)
        self.seconds = self.seconds * kept + gap
        self.last = arrived


@dataclass(slots=True)
class DriftState:
    """The state that survives a restart; `to_json` and `from_json` keep it bit for bit."""

    __pydantic_config__ = ConfigDict(extra="forbid")
    ticks: int = 0
    levels: Levels = field(default_factory=Levels)
    recent: float = 0.0  # exponentially weighted level of the last ticks
    shown: float = 0.0  # level of the very last ticks: what the drafter shows now
    offset: float = 0.0  # how far rebases, as corrected since, moved the baseline: keeps publishes out of the sd
    statistics: dict[str, float] = field(default_factory=dict)
    spreads: list[Spread] = field(default_factory=list)
    pending: list[tuple[str, float, float | None]] = field(default_factory=list)  # (stratum, α, entropy), unticked
    evidence: RecentTicks = field(default_factory=RecentTicks)
    traffic: ArrivalRate = field(default_factory=ArrivalRate)
    rise: Rise = field(default_factory=Rise)
    differences: list[tuple[float, float]] = field(default_factory=list)  # of the last versions, with their variances

    @property
    def baseline(self) -> float:
        """α to compare with, at the baseline's mix of strata."""
        return self.levels.level

    def to_json(self) -> str:
        """Serialise, with the name of the format."""
        return json.dumps({"format": _STATE_FORMAT, **asdict(self)}, allow_nan=False)

    @staticmethod
    def from_json(text: str) -> DriftState:
        """Read what `to_json` wrote. Raises DriftError on another format or an unknown field."""
        try:
            table: dict[str, Any] = json.loads(text)
            found, state = table.pop("format"), _READER.validate_python(table)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise DriftError(f"not a stored drift state ({error}); delete it to start from scratch") from error
        if found != _STATE_FORMAT:
            raise DriftError(f"expected drift state {_STATE_FORMAT}, got {found!r}; delete it to start from scratch")
        return state


_READER: Final = TypeAdapter(DriftState)
