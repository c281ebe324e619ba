"""Why the served drafter's α changed: takes the change apart, and names the part that explains a fall.

Pure: no torch, no Redis, no clock. The drift monitor adds a `Row` per tick. `RecentTicks.change` takes the change apart
since the fall began. A CUSUM dates that to the last tick at which its statistic was 0.

    log(α now / α of the baseline) = prompts + policy + sampling + drafter        in replay, and + engine in engines
    prompts   other shares of the strata, each stratum at its level of the baseline
    drafter   another version is served. Old and new are replayed on the same rollouts when they change (`Succession`)
    policy    the rest: the same version on the same strata. A version never changes, so the rollouts did
    sampling  the part of the rest that came with another temperature, top-p or top-k, which the rollouts' files tell
    features  the part of the rest that engines do not see. A trainer that sends other aux states than the engine has,
              or begins to send a selection of the answers, moves every drafter's replay α, and no live α
    engine    the change of live over replay α

The frozen drafter is no reference for what the policy did. If it fits worse than the served drafter, it has less to
lose. If the policy returns to where it began, the frozen drafter even gains. Both would look like a fault of the served
drafter.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from statistics import median_low
from typing import Final, Protocol

from service.monitor.counts import live_sums
from service.monitor.records import Z_95, AcceptanceRecord, Change, DrafterSums, Estimate, Resampled, SamplingSettings

#: Number of ticks that are remembered, and of the newest that are compared while there is no alarm.
_REMEMBERED_TICKS: Final = 128
_QUIET_WINDOW_TICKS: Final = 16
#: A smaller fall (log) gets no cause.
_LEAST_FALL: Final = 0.01
#: Standard errors that a version must have lost to be named without an alarm: each publish is one more chance to err.
#: And that ticks under the usual sampling must have lost, to be the policy's fall beside another sampling.
_SURE: Final = 3.0
#: From this change of log entropy on a policy is called sharper or flatter.
_SHARPER: Final = 0.25
#: Sampling is another one from this change of log temperature on, or of top-p. Less moves α by less than is named.
_OTHER_TEMPERATURE, _OTHER_TOP_P = 0.02, 0.005
#: How answers were sampled at so many of the last ticks at which a lane's statistic was 0 is how they are usually.
_USUAL_TICKS: Final = 32
#: Ticks under the usual sampling since a fall began that tell how much of it came without another sampling.
_TELLING_TICKS: Final = 5
#: Live rounds that a live α needs, before the change and after it.
_LIVE_ROUNDS: Final = 1000


@dataclass(slots=True)
class Row:
    """One tick. `expected`: α of the baseline at the tick's mix of strata; `level`: at the mix of the baseline.

    `shift`: by how much changes of the served version have moved α without moving the baseline, since the run began;
    `shift_variance`: of that. Entropy is in nats, expected at the tick's mix too; None: not known.
    """

    tick: int
    alpha: float
    expected: float
    level: float
    shift: float
    shift_variance: float
    entropy: float | None = None
    entropy_expected: float | None = None
    sampling: SamplingSettings | None = None


@dataclass(slots=True)
class RecentTicks:
    """The last ticks, and since when each lane's statistic has been above 0: tick, shift, shift variance.

    `sampling`: of the newest batch; None: not known. `usual`: of the last ticks at which a lane's statistic was 0.
    """

    rows: list[Row] = field(default_factory=list)
    since: dict[str, tuple[int, float, float]] = field(default_factory=dict)
    shift: float = 0.0
    shift_variance: float = 0.0
    sampling: SamplingSettings | None = None
    usual: dict[str, list[SamplingSettings]] = field(default_factory=dict)

    def add(self, row: Row) -> None:
        """Remember a tick."""
        self.rows = [*self.rows, row][-_REMEMBERED_TICKS:]

    def calm(self, lane: str, tick: int) -> None:
        """Note that a lane's statistic is 0 after a tick."""
        self.since[lane] = tick, self.shift, self.shift_variance

    def at_level(self, lane: str) -> None:
        """Note that α is at its level with answers that are sampled as now: a lane's statistic is 0 of itself."""
        if self.sampling is not None:
            self.usual[lane] = [*self.usual.get(lane, []), self.sampling][-_USUAL_TICKS:]

    def change(
        self,
        alarms: Sequence[str],
        *,
        sd: float,
        uncertainty: float,
        owed: Estimate,
        several_strata: bool,
        rollouts_per_tick: int,
    ) -> Change | None:
        """Take the change apart, over the ticks since the fall began. `alarms`: the lanes above their limits.

        The one among them whose statistic was 0 last says when it began. Without an alarm it is over the last 16 ticks.
        `sd`: standard deviation of a tick, in tokens per round. `uncertainty`: variance of the baseline, in sd².
        `owed`: by how much versions that were proven worse have changed α since the baseline was set, at most 0, in
        tokens per round. The baseline has not fallen with them. So this is their part of the change, even if a small
        loss raised the statistic only some ticks later.
        `several_strata`: False: there is one stratum, and the prompts' part is not known.
        """
        if not self.rows:
            return None
        starts = [self.since[lane] for lane in alarms if lane in self.since]
        since = max(starts)[0] if starts else self.rows[-1].tick - _QUIET_WINDOW_TICKS
        rows = [row for row in self.rows if row.tick > since]
        if not rows or min(min(row.expected, row.level) for row in rows) <= 0:
            return None
        if starts:
            rows = rows[_began([row.expected - row.alpha for row in rows]) :]
        _, shift, shift_variance = max(starts, default=(since, rows[0].shift, rows[0].shift_variance))
        n, last = len(rows), rows[-1]
        moved = Estimate(last.shift - shift, max(0.0, last.shift_variance - shift_variance))
        if owed.value < min(moved.value, 0.0):
            moved = owed
        # α in all of these ticks, with the version of now and had the version stayed. Some came before a new version.
        alpha = _mean([r.alpha - r.shift + last.shift for r in rows])
        expected = _mean([r.expected for r in rows])
        without = max(alpha - moved.value, alpha / 10)
        drafter_variance = moved.variance / without**2
        noise = (sd / expected) ** 2 * (1 / n + uncertainty)
        mixes = [math.log(r.expected / r.level) for r in rows]
        pairs = [(r.entropy or 0.0, r.entropy_expected or 0.0) for r in rows]
        entropies = [math.log(now / usual) for now, usual in pairs if now > 0 and usual > 0]
        held = Estimate(math.log(without / expected), noise + drafter_variance)
        usual, origin = [one for lane in alarms for one in self.usual.get(lane, [])], last.shift - moved.value
        return Change(
            alarm=bool(alarms),
            rollouts=n * rollouts_per_tick,
            prompts=Estimate(_mean(mixes), _variance_of_mean(mixes)) if several_strata else None,
            held=held,
            drafter=Estimate(math.log(alpha / without), drafter_variance),
            entropy=Estimate(_mean(entropies), _variance_of_mean(entropies)) if len(entropies) > 1 else None,
            resampled=self._resampled(rows, median_low(usual), held, origin, sd) if usual else None,
        )

    def _resampled(
        self, rows: Sequence[Row], before: SamplingSettings, held: Estimate, origin: float, sd: float
    ) -> Resampled | None:
        """Which part of `held` came with another sampling than `before`, the usual one. `rows`: since the fall began.

        All, unless some ticks tell of a fall without a change of the sampling: those since the fall began that were
        sampled as usual, or those before it that were sampled as the others are now. A CUSUM begins some ticks before
        the change, while they happen to be low, so three standard errors are asked for. `origin`: the
        shift of the version at the baseline.
        """
        others = [row for row in rows if _changed(row.sampling, before)]
        if not others:
            return None
        now = median_low(row.sampling for row in others if row.sampling is not None)
        as_before = [row for row in rows if not _changed(row.sampling, before)]
        earlier = [row for row in self.rows if row.tick < rows[0].tick and _changed(row.sampling, before)]
        as_now = [row for row in earlier if not _changed(row.sampling, now)]
        parts = []
        if len(as_before) >= _TELLING_TICKS:
            # The few ticks are among the many: what both show has the variance of the many.
            fewer = 1 / len(as_before) - 1 / len(rows)
            parts.append(Estimate(held.value - _log_change(as_before, origin), fewer * (sd / rows[0].expected) ** 2))
        if len(as_now) >= _TELLING_TICKS:
            share, error = len(others) / len(rows), sd / rows[0].expected
            parts.append(Estimate(share * _log_change(as_now, origin), (share * error) ** 2 / len(as_now)))
        told = (p for p in parts if held.value - p.value < -_SURE * math.sqrt(held.variance + p.variance))
        return Resampled(before, now, next(told, held))


def _began(losses: Sequence[float]) -> int:
    """Where a fall most probably began among a CUSUM's ticks: the change point of most likelihood, for a step.

    A CUSUM begins some ticks before the fall, while these happen to be low. Counted with it they would dilute it.
    """
    sums = list(accumulate(reversed(losses)))
    best = max(range(len(sums)), key=lambda at: max(sums[at], 0.0) ** 2 / (at + 1))
    return len(sums) - 1 - best


def _log_change(rows: Sequence[Row], origin: float) -> float:
    """Change of log α over some ticks, by anything but another version since its shift was `origin`."""
    alpha, moved = _mean([row.alpha for row in rows]), _mean([row.shift for row in rows]) - origin
    return math.log(max(alpha - moved, alpha / 10) / _mean([row.expected for row in rows]))


def _changed(one: SamplingSettings | None, other: SamplingSettings) -> list[str]:
    """What of the sampling differs, by the names that rollout files have for it; where it is not known, nothing."""
    if one is None:
        return []
    colder, warmer = sorted((one.temperature, other.temperature))
    differs = {
        "temperature": warmer > colder * math.exp(_OTHER_TEMPERATURE),
        "top_p": abs(one.top_p - other.top_p) > _OTHER_TOP_P,
        "top_k": one.top_k != other.top_k,
    }
    return [name for name, another in differs.items() if another]


@dataclass(frozen=True, slots=True)
class Cause:
    """What changed α since the baseline. `terms`: changes of log α by name, which add up.

    `cause`: the name of the largest fall among them, if it is beyond chance. While the alarm is on it is one of those
    that the alarm sees; else it is the prompts or the engine, which move α without an alarm, or the drafter: what a
    version has lost is known from one tick's rollouts, dozens of ticks before the alarm. `fall`: its change of log α.
    `text`: that in words.
    """

    cause: str | None
    text: str
    fall: float | None
    rollouts: int
    terms: Mapping[str, Estimate]
    entropy: Estimate | None


class HasSums(Protocol):
    """Replay on rollouts of one policy version: a score record, or a sum of several."""

    @property
    def policy_version(self) -> int | None:
        """None where it is not known."""

    def sums(self, drafter: str, /) -> DrafterSums | None:
        """What a drafter had; None where it was not scored or had no round."""


def cause_of(change: Change, engine: Estimate | None = None) -> Cause:
    """Name the cause. `engine`: change of log(live α / replay α) since the baseline; None where engines say nothing.

    Where a cause cannot be told from others, all of them are named: "features, policy or prompts".
    """
    held, part = change.held, None if change.resampled is None else change.resampled.held
    # What replay lost and engines did not is neither the policy's doing nor the sampling's.
    told = engine is not None and held.value < 0 and engine.low > 0
    unseen = -min(engine.value, -held.value) if engine is not None and told else 0.0
    error = engine.variance if engine is not None and told else 0.0
    sampled = 0.0 if part is None else part.value - max(unseen, min(part.value, 0.0))
    terms = {} if change.prompts is None else {"prompts": change.prompts}
    if engine is not None:
        terms["features"] = Estimate(unseen, engine.variance)
    own = held.variance + (0.0 if part is None else part.variance)
    terms["policy"] = Estimate(held.value - unseen - sampled, own + error)
    if part is not None:
        terms["sampling"] = Estimate(sampled, part.variance + error)
    if engine is not None:
        terms["engine"] = Estimate(engine.value + unseen, engine.variance + (held.variance if told else 0.0))
    terms["drafter"] = change.drafter
    asked = ("policy", "sampling", "features", "drafter") if change.alarm else ("prompts", "engine", "drafter")
    falls = {n: e for n, e in terms.items() if n in asked and e.high < 0 and e.value < -_LEAST_FALL}
    if not change.alarm and change.drafter.value > -_SURE * math.sqrt(change.drafter.variance):
        falls.pop("drafter", None)
    worst = min(falls, key=lambda name: falls[name].value, default=None)
    if worst is None:
        return Cause(
            None, "no part of the change is a fall beyond chance", None, change.rollouts, terms, change.entropy
        )
    together = {"policy": _policy_name(change, engine), "features": "features or selection"}
    name = title = together.get(worst, worst)
    if worst == "sampling" and change.resampled is not None:
        name, title = _sampling_names(change.resampled)
    fell = falls[worst]
    said = [f"{title} {_percent(fell.value)} ({_percent(fell.high)} to {_percent(fell.low)})"]
    said += [
        f"{other} {_percent(e.value)}" for other, e in terms.items() if other != worst and abs(e.value) > _LEAST_FALL
    ]
    if change.entropy is not None and worst in ("policy", "sampling"):
        said.append(f"entropy {_percent(change.entropy.value)}")
    return Cause(name, "; ".join(said), fell.value, change.rollouts, terms, change.entropy)


def _policy_name(change: Change, engine: Estimate | None) -> str:
    """The name of a fall under the same drafter: all causes that cannot be told apart."""
    entropy, how = None if change.resampled else change.entropy, "moved"
    if entropy is not None and abs(entropy.value) > max(_SHARPER, Z_95 * math.sqrt(entropy.variance)):
        how = "sharpened" if entropy.value < 0 else "flattened"
    if how == "moved" and engine is None:  # features leave the log-probabilities alone
        return "features or policy" if change.prompts is not None else "features, policy or prompts"
    return f"policy {how}" if change.prompts is not None else f"policy {how}, or prompts"


def _sampling_names(change: Resampled) -> tuple[str, str]:
    """What of the sampling was changed: as a cause, which is one of a few, and with the values."""
    names = _changed(change.now, change.before)
    pairs = [(name, _said(getattr(change.before, name)), _said(getattr(change.now, name))) for name in names]
    values = [f"{name} from {before} to {now}" for name, before, now in pairs]
    return f"sampling {' and '.join(names)}".strip(), f"sampling {' and '.join(values)}".strip()


def _said(setting: float) -> str:
    return f"{setting:.3g}" if isinstance(setting, float) else str(setting)


def engine_change(scores: Sequence[HasSums], acceptances: Iterable[AcceptanceRecord]) -> Estimate | None:
    """Change of log(live α / replay α) from the first policy versions to the last, of the served drafters.

    The last policy versions that hold 1,000 live rounds are compared with those before them. None where either have
    fewer. A live round's number of tokens is taken to have an sd of half of its mean.
    """
    counted: defaultdict[int, list[AcceptanceRecord]] = defaultdict(list)
    for record in acceptances:
        if record.policy_version is not None and record.ours:
            counted[record.policy_version].append(record)
    replayed: defaultdict[int, DrafterSums] = defaultdict(lambda: DrafterSums(0.0, 0.0))
    for score in scores:
        if (
            score.policy_version is not None
            and score.policy_version in counted
            and (sums := score.sums("served")) is not None
        ):
            replayed[score.policy_version] += sums
    points = [
        (live, replayed[v])
        for v in sorted(replayed)
        if (live := live_sums(counted[v])) is not None and live[0] > 0  # rounds that emitted nothing have no logarithm
    ]
    rounds, cut = 0.0, len(points)
    while cut and rounds < _LIVE_ROUNDS:
        cut -= 1
        rounds += points[cut][0][1]
    before, now = _live_over_replay(points[:cut]), _live_over_replay(points[cut:])
    if before is None or now is None:
        return None
    return Estimate(now.value - before.value, now.variance + before.variance)


def _live_over_replay(points: Sequence[tuple[tuple[float, float], DrafterSums]]) -> Estimate | None:
    """Mean over policy versions, weighted by live rounds: engines are compared with rollouts of the same version."""
    rounds = math.fsum(live[1] for live, _ in points)
    if rounds < _LIVE_ROUNDS:
        return None
    value, variance = 0.0, 0.25 / rounds
    for (live_tokens, live_rounds), replay in points:
        weight = live_rounds / rounds
        value += weight * math.log(live_tokens / live_rounds / replay.alpha)
        variance += (weight * (1 / Z_95 if replay.error is None else replay.error / replay.alpha)) ** 2
    return Estimate(value, variance)


def as_fraction(log_ratio: float) -> float:
    """A change of log α as a fraction of α: -0.2 is a fifth less."""
    return math.expm1(min(log_ratio, 20.0))


def _percent(log_ratio: float) -> str:
    return f"{100 * as_fraction(log_ratio):+.0f} %".replace("-", "\N{MINUS SIGN}")


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _variance_of_mean(values: Sequence[float]) -> float:
    mean, n = _mean(values), len(values)
    return math.fsum((v - mean) ** 2 for v in values) / (n * max(1, n - 1))
