"""Drift of the served drafter's α: numbers in, alarm out. No clock, no Redis, no torch.

The input matters more than the detector. Each rollout gives one number, its replay α (tokens / rounds) under the served
drafter, scored *before* it is trained on. `observe` cuts the stream of rollouts into ticks of equal *data*. A tick's
value is the mean, over its rollouts, of α minus the usual α of the rollout's stratum (`Levels`). So another mix of
strata is no drift. A ratio of sums would give long rollouts more weight, and make ticks noisier and skewed.

The frozen drafter is *not* used to cancel noise. A moving policy lowers the α of both drafters, and their difference
would hide that fall.

Each lane is a one-sided CUSUM in units of the long-run sd:  S <- max(0, S + (baseline - value) / sd - k),  alarm at
S > h. The limit h follows from the wanted alarm rate by Siegmund's formula. Notable choices:
* People give the rate per day. The number of ticks in a day is learnt from the arrival of rollouts (`ArrivalRate`).
* sd = max(tick sd, sd of batch means · sqrt(batch)) over several batch lengths, from successive differences. Slow
  wander widens the limits, and a trend does not. After the baseline is frozen, batches that close while a lane is above
  half its limit are left out: a fall must not widen the limits that are to detect it.
* While the baseline is learnt, the residual is scaled by 1 / sqrt(1 + q), with q the baseline's variance in units of
  the tick's. These recursive residuals are independent and of unit variance, however short the history is.
* A frozen baseline is raised to a rise that has lasted for as many ticks as a baseline is learnt from. What falls after
  that is a fall. A CUSUM upwards, with the slowest lane's k and h, detects the rise. While it is above half its limit,
  and after it raised the baseline, the sd of before is kept, because the rise is no noise. If α comes back, it was.
* When another drafter is served, the baseline is moved to it: `rebase`. The difference is measured on rollouts that
  came after the change (`Succession`). The gate's gain is not used. The gate publishes drafters that looked good on its
  evidence, so its gains are too large on average, and a baseline that adds them up rises above what any drafter can do.
  A rebase adds its own variance to the baseline's, which then learns again from the new drafter's ticks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Final

from service.monitor.drift.cause import Row
from service.monitor.drift.limits import DriftConfig, DriftError
from service.monitor.drift.state import MIN_DIFFERENCES, DriftState, Rise, Spread, Undo
from service.monitor.records import Change, Estimate, SamplingSettings

#: A rebase may be corrected for so many ticks.
_CORRECTED_TICKS: Final = 32
#: A spread below this fraction of α is rounding.
_ROUNDING: Final = 1e-6
#: A paired difference within this many standard errors of 0 may be chance.
_CHANCE_SD: Final = 2.0
#: From so many standard errors on a loss is told in full. Of a lesser one `_CHANCE_SD` are taken off, and the standard
#: error counts so many times: its interval reaches from what was measured to above 0.
_SURE_SD, _DOUBT = 4.0, 2.0
#: Number of versions whose differences are remembered; sd of a difference of log α before any is known; the least sd.
_DIFFERENCES_KEPT: Final = 32
_DIFFERENCE_BEFOREHAND: Final = 0.02
_LEAST_DIFFERENCE: Final = 0.002
#: The largest loss, in sd, that one tick counts for. Siegmund's formula assumes normal ticks. If one prompt in a
#: hundred is far harder than the rest, a tick with such a prompt is 4 to 8 sd low, and two such ticks alone raised an
#: alarm. A smaller cap delays large falls. A larger one exceeds the stated rate of alarms there
#: (docs/reference/drift.md).
_LARGEST_LOSS_SD: Final = 2.5
#: A statistic is capped at this distance above its limit, so that a lane clears soon after the fall was repaired.
_MOST_ABOVE_LIMIT_SD: Final = 5.0
#: Weight of the newest tick in the recent level, from which `rebase` computes the loss.
_RECENT_WEIGHT: Final = 1 / 32
#: Weight of the newest tick in the level that is shown, which caps how much a gain adds to the baseline.
_SHOWN_WEIGHT: Final = 1 / 4


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


class DriftMonitor:
    """Watches one drafter of one run. It has no other state than `state`."""

    def __init__(self, config: DriftConfig | None = None, state: DriftState | None = None) -> None:
        self.config = config or DriftConfig()
        self.state = state or DriftState()
        self._set_limits()
        lengths = [1, *self.config.batch_ticks]
        if [spread.length for spread in self.state.spreads] != lengths:
            self.state.spreads, self.state.rise.spreads = [Spread(length) for length in lengths], []
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
        sampling: SamplingSettings | None = None,
    ) -> list[DriftReading]:
        """Add one batch: per rollout the served drafter's replay tokens and rounds. One reading per closed tick.

        `strata`: the kind of each rollout's prompt. `entropies`: of each rollout, in nats. `arrived`: when the batch
        came, in Unix seconds. `sampling`: how its answers were sampled; None: as those before. Rollouts without a round
        are skipped. The rollouts of one prompt should be neighbours. Beyond that the order matters only if α changes
        with it over thousands of rollouts (docs/reference/drift.md).
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
        if sampling is not None:
            self.state.evidence.sampling = sampling
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
            owed=Estimate(self.state.levels.owed + self.state.levels.forgiven, self.state.levels.owed_variance),
            # Greedy answers of a kind are of it (`service.worker.scoring`).
            several_strata=len({f" {name}".removesuffix(" greedy").strip() for name in self.state.levels.names}) > 1,
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
        before = replace(state, pending=[], levels=replace(state.levels, undo=None)).to_json()
        paired_difference, variance = self._shrunk(paired_difference, variance)
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
        old = state.baseline
        wanted = min(old + counted - made_up, ceiling) - old
        state.levels.move(wanted, 0.0 if variance == 0 else variance / sd**2 if sd else math.inf)
        moved, forgiven = state.baseline - old, state.levels.forgiven
        state.offset += moved
        worse = counted > paired_difference
        # Among many versions some seem to have lost two standard errors. What that forgives is told of a surer one.
        sure = worse and -paired_difference >= _SURE_SD * math.sqrt(variance)
        told_variance = variance * (1.0 if sure or not worse else _DOUBT**2)
        state.levels.owe(paired_difference - moved, told_variance)
        state.levels.forgive(moved if sure or proven > 0 else 0.0)
        state.evidence.shift += paired_difference - moved + state.levels.forgiven - forgiven
        # The tick being filled was scored with the old drafter.
        state.pending = [(stratum, alpha + paired_difference, entropy) for stratum, alpha, entropy in state.pending]
        if lost > 0:
            repaired = min(lost, max(0.0, proven)) / lost
            state.statistics = {name: s * (1 - repaired) for name, s in state.statistics.items()}
        if math.isinf(variance):
            self.acknowledge()  # the statistics compared with a baseline that is now discarded, and so did the rise
            state.spreads, state.rise = self._spreads(), Rise()
            state.levels.owe(math.inf)
        else:
            state.evidence.shift_variance += told_variance
            state.levels.undo = Undo(before, decided)

    def correct(self, paired_difference: float, variance: float) -> bool:
        """Do the last rebase once more, and the ticks since then: its difference is known better now.

        False: that is not possible any more, because a person acknowledged the alarm, or too many ticks have passed.
        """
        undo, now = self.state.levels.undo, self.state
        if undo is None:
            return False
        self.state = DriftState.from_json(undo.before)
        self.state.traffic = now.traffic
        self.rebase(paired_difference, variance, decided=undo.decided)
        sampled = {row.tick: row.sampling for row in now.evidence.rows}
        for parts in undo.ticks:
            self.state.evidence.sampling = sampled.get(self.state.ticks + 1)
            self._close(parts)
        self.state.evidence.sampling = now.evidence.sampling
        self.state.pending = now.pending
        return True

    def acknowledge(self) -> None:
        """Set the lanes to 0, as an operator does after a fall was dealt with. The baseline stays: a fall that is
        still there raises the alarm again.
        """
        self.state.statistics, self.state.levels.undo = dict.fromkeys(self.state.statistics, 0.0), None
        for name in self.state.statistics:
            self.state.evidence.calm(name, self.state.ticks)

    def reset(self) -> None:
        """Learn baseline and spread from the next rollouts, where the new level is the right one."""
        fresh = DriftState(traffic=self.state.traffic)
        self.state = DriftMonitor(self.config, fresh).state

    # --- inside
    def _shrunk(self, difference: float, variance: float) -> tuple[float, float]:
        """What a difference that may be chance says, given how much this run's versions differ: mean and variance.

        Empirical Bayes (Efron and Morris 1973): the spread of the true differences is learnt from the last ones.
        Without it, the baseline of a run that publishes often is the sum of their errors, and follows every fall.
        """
        if not 0 < variance < math.inf:
            return difference, variance
        state = self.state
        unit = state.baseline**2
        excess = math.fsum(d * d - v for d, v in state.differences) + _DIFFERENCE_BEFOREHAND**2 * unit
        spread = max(excess / (1 + len(state.differences)), _LEAST_DIFFERENCE**2 * unit)
        state.differences = [*state.differences, (difference, variance)][-_DIFFERENCES_KEPT:]
        if abs(difference) > _CHANCE_SD * math.sqrt(variance):
            return difference, variance
        share = spread / (spread + variance)
        return difference * share, variance * share

    def _sd(self) -> float | None:
        """Long-run sd of a tick: the largest over batch lengths that have been seen often enough."""
        found = [s.tick_sd for s in self._spreads() if s.length == 1 or s.differences >= MIN_DIFFERENCES]
        sd = max(found)
        return sd if sd > _ROUNDING * abs(self.state.baseline) else None

    def _spreads(self) -> list[Spread]:
        """The spreads in use. While α rises above the baseline, those that were known when that began."""
        rising = self.state.rise.statistic >= max(self._limits.values()) / 2
        return (self.state.rise.spreads if rising else []) or self.state.spreads

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
        if levels.undo is not None:
            levels.undo.ticks.append(dict(parts))
            levels.undo = levels.undo if len(levels.undo.ticks) < _CORRECTED_TICKS else None
        for name, (_, mean, _) in parts.items():
            levels.meet(name, mean)
        state.ticks += 1
        if state.ticks <= config.baseline_ticks:
            shares = [parts[name][0] if name in parts else 0.0 for name in levels.names]
            levels.shares = [w + (p - w) / state.ticks for w, p in zip(levels.shares, shares, strict=True)]
        # Strata that are new say nothing yet, and must not hide what the others say.
        told = {name: part for name, part in parts.items() if levels.has_level(name)} or dict(parts)
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
                counted = min(loss / sd, _LARGEST_LOSS_SD)
                statistic = max(0.0, state.statistics[lane.name] + counted - lane.k)
                state.statistics[lane.name] = min(statistic, limit + _MOST_ABOVE_LIMIT_SD)
        self._explain(mix, told, alpha, expected - levels.forgiven, level - levels.forgiven)
        self._learn(parts, value, uncertainty)
        if sd is not None:
            self._follow_rise(alpha - expected, sd)
        return self.reading(value, sd)

    def _follow_rise(self, gain: float, sd: float) -> None:
        """Raise the baseline once α has been above it for as long as a baseline is learnt; it learns again from there.

        As if it knew the new level from one tick: the kinds of prompts may have risen by different amounts.
        """
        state, rise, lane = self.state, self.state.rise, min(self.config.lanes, key=lambda lane: lane.k)
        limit = self._limits[lane.name]
        counted = max(min(gain / sd, _LARGEST_LOSS_SD), -_LARGEST_LOSS_SD) - lane.k
        rise.statistic = min(max(0.0, rise.statistic + counted), limit + _MOST_ABOVE_LIMIT_SD)
        if rise.statistic == 0 or not rise.spreads:
            rise.spreads = [Spread(s.length, differences=s.differences, variance=s.variance) for s in state.spreads]
        if rise.statistic <= limit:
            rise.ticks, rise.mean = 0, 0.0
            return
        rise.ticks += 1
        rise.mean += (gain - rise.mean) / rise.ticks
        if rise.ticks < self.config.baseline_ticks:
            return
        state.levels.owe(math.inf)
        state.levels.move(rise.mean, 1.0)
        state.levels.doubted = False  # α does not jump here as at a rebase, so there is no error to correct
        state.spreads, state.rise = rise.spreads, Rise()

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
        shift = evidence.shift, evidence.shift_variance
        evidence.add(Row(state.ticks, alpha, expected, level, *shift, *entropies, evidence.sampling))
        for name, statistic in state.statistics.items():
            if statistic == 0:
                evidence.calm(name, state.ticks)
                evidence.at_level(name)

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
