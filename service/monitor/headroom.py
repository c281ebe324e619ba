"""What further training would still bring, and what to do about it.

Pure: no torch, no Redis, no clock. The *publication lag* is what the best existing drafter has over the served one: a
worker that keeps up has none, and one that stopped has none either. Headroom is about a drafter that does not exist
yet: what five more trainings on today's rollouts would bring over the served one. By then the policy has moved on.

It follows from the learning curve. Every verdict of the gate, promoted or refused, measures the candidate against the
served drafter, with an error. Successive trainings on the same text gain a, a·r, a·r², ...: after a gain of a there is
a·(r + ... + r⁵) left. The gain of a refused candidate is not served yet, so it is added. Neither a nor r is known well,
so both are estimated together: for each r of a grid a normal posterior of a, weighted by how well that r explains the
verdicts. The median of that mixture and its 95 % interval are reported.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import NormalDist
from typing import Final, Literal, get_args

from service.monitor.records import Z_95, Headroom, ScoreRecord

#: So many of the newest verdicts are kept.
_LOOKED_AT: Final = 8
#: Standard deviation of what a training gains, before anything is known.
_PRIOR_GAIN: Final = 0.05
#: An older verdict says less of the next gain: for each training between, its variance is doubled, and it may differ by
#: so much (standard deviation) from what the curve says.
_FORGETTING: Final = 0.01
#: Trainings for which today's rollouts are worth training on.
_HORIZON: Final = 5
#: No gain is measured better than that.
_LEAST_ERROR: Final = 0.001
#: Ratios of a training's gain to the one before; all are equally likely before anything is known.
_RATIOS: Final = (0.5, 0.7, 0.85, 1.0, 1.1)
_NORMAL: Final = NormalDist()


@dataclass(frozen=True, slots=True)
class MeasuredGain:
    """What the gate measured after a training: relative gain of the candidate over the served drafter."""

    gain: float
    error: float
    promoted: bool


@dataclass(frozen=True, slots=True)
class _Line:
    """The fit of one ratio. `fit`: log likelihood, but for what is the same for all ratios.

    `mean`, `deviation`: of the newest training's gain.

    `left`: the headroom, in units of that gain.
    """

    fit: float
    ratio: float
    mean: float
    deviation: float
    left: float


@dataclass(slots=True)
class LearningCurve:
    """The last verdicts of a run; JSON through `dataclasses.asdict`."""

    measured: list[MeasuredGain] = field(default_factory=list)

    @classmethod
    def of(cls, measured: Sequence[dict[str, float | bool]]) -> LearningCurve:
        """Back from JSON."""
        return cls([MeasuredGain(float(m["gain"]), float(m["error"]), bool(m["promoted"])) for m in measured])

    def learn(self, gain: float, error: float, *, promoted: bool) -> None:
        """Take one verdict."""
        self.measured = [*self.measured, MeasuredGain(gain, error, promoted)][-_LOOKED_AT:]

    def published(self) -> None:
        """Note that the candidate is served now, by later looks than the newest verdict's, which refused it."""
        self.measured = [*self.measured[:-1], *(replace(one, promoted=True) for one in self.measured[-1:])]

    def headroom(self, busy: float | None = None) -> Headroom | None:
        """What is left; None before the first verdict."""
        if not self.measured:
            return None
        lines = [self._line(ratio) for ratio in _RATIOS]
        best = max(one.fit for one in lines)
        weights = [math.exp(one.fit - best) for one in lines]
        parts = [(w / sum(weights), one) for w, one in zip(weights, lines, strict=True)]
        each = sum(weight * one.ratio * one.mean for weight, one in parts)
        square = sum(weight * one.ratio**2 * (one.mean**2 + one.deviation**2) for weight, one in parts)
        left = [(weight, one.left * one.mean, one.left * one.deviation) for weight, one in parts]
        return Headroom(
            gain=_quantile(left, 0.5),
            low=_quantile(left, 0.025),
            high=_quantile(left, 0.975),
            each=each,
            each_error=math.sqrt(max(square - each * each, 0.0)),
            busy=busy,
        )

    def _line(self, ratio: float) -> _Line:
        """Fit a for one ratio. A verdict is a sum of gains: of all trainings since the last promoted candidate."""
        precision, weighted, reach = 1.0 / _PRIOR_GAIN**2, 0.0, 0.0
        for age, one in zip(range(len(self.measured) - 1, -1, -1), self.measured, strict=True):
            reach += ratio**-age
            uncertain = 2.0**age * (one.error**2 + _LEAST_ERROR**2) + (_FORGETTING * age) ** 2
            precision += reach * reach / uncertain
            weighted += reach * one.gain / uncertain
            reach = 0.0 if one.promoted else reach
        mean = weighted / precision
        fit = 0.5 * mean * weighted - 0.5 * math.log(precision)
        return _Line(
            fit, ratio, mean, 1.0 / math.sqrt(precision), reach + sum(ratio**n for n in range(1, _HORIZON + 1))
        )


def _quantile(parts: Sequence[tuple[float, float, float]], probability: float) -> float:
    """Quantile of a mixture of normals (weight, mean, deviation), by bisection."""
    low = min(mean - 6.0 * deviation for _, mean, deviation in parts)
    high = max(mean + 6.0 * deviation for _, mean, deviation in parts)
    for _ in range(50):
        middle = (low + high) / 2.0
        below = sum(weight * _NORMAL.cdf((middle - mean) / max(dev, 1e-9)) for weight, mean, dev in parts)
        low, high = (middle, high) if below < probability else (low, middle)
    return (low + high) / 2.0


# --- in words
#: A larger headroom is worth training for. With an upper bound below the second, none is said to be left.
_SMALL: Final = 0.02
_RULED_OUT: Final = 0.03
#: A worker that trains for more than this share of the time has no time left.
_BUSY: Final = 0.8
#: A trainer is called silent after this time, and not before this multiple of its longest recent pause.
TRAINER_SILENT_SECONDS: Final = 600.0
_LONGEST_PAUSES: Final = 3.0

State = Literal[
    "converged", "resting", "training_bound", "learning", "unpaid", "blocked", "starved", "hurt", "behind", "unknown"
]
STATES: Final[tuple[State, ...]] = get_args(State)


@dataclass(frozen=True, slots=True)
class Advice:
    """What the headroom says to do. `text` is a sentence for people."""

    state: State
    text: str


def advise(
    found: Headroom | None,
    *,
    action: str | None,
    starved: bool,
    blocked: str | None = None,
    undrafted: bool = False,
) -> Advice:
    """Say what to do. `action`: what the controller decided last. `starved`: rollouts have stopped coming.

    `blocked`: why nothing can be trained, whether it pays or not. `undrafted`: engines spend no time in rounds with
    drafts.
    """
    if starved:
        return Advice("starved", "no new rollouts: there is nothing to learn from")
    if found is None or found.gain is None or found.low is None or found.high is None:
        return Advice("unknown", "no training was judged since the learning rate stopped rising")
    each, error = found.each or 0.0, found.each_error or 0.0
    if each + Z_95 * error < 0.0:
        return Advice(
            "hurt", f"each training loses {-each:.1%}: look at the rollouts, lower the learning rate or the passes"
        )
    span = f"{found.gain:.1%} ({found.low:+.1%} to {found.high:+.1%})"
    if found.high < -_RULED_OUT:  # damage that was done at once: later trainings lose nothing more
        return Advice("hurt", f"what is trained stays worse, {span}: look at the rollouts, lower the learning rate")
    left = f"further training would bring {span}"
    if blocked is not None and found.high >= _RULED_OUT:
        return Advice("blocked", f"{left}, but {blocked}")
    busy = (found.busy or 0.0) > _BUSY
    if found.low > 0.0 and found.gain > _SMALL and blocked is None:
        if busy:
            return Advice("training_bound", f"each training still gains {each:.1%}, {left}: more passes, or a GPU")
        if action == "idle" and undrafted:
            nothing = "which saves nothing, as engines spend no time in rounds with drafts"
            return Advice("unpaid", f"{left}, {nothing}: do nothing")
        if action == "idle":
            return Advice("unpaid", f"{left}, which saves less than it costs: do nothing, or lower the worker's cost")
        return Advice("learning", f"{left}: the worker is at it, do nothing")
    if busy and action == "defer":
        return Advice("behind", "rollouts are passed over, and what training on them would bring is not known")
    if found.high < _RULED_OUT:
        remains = f"at most {max(found.high, 0.0):.1%} is left"
        if found.low > 0.0:
            remains = f"but for {found.gain:.1%} ({found.low:.1%} to {found.high:.1%}), which is little"
        return Advice("converged", f"{remains}: do nothing")
    if action in ("idle", "probe"):
        return Advice(
            "resting",
            f"training is not expected to pay now: do nothing; how much it would still bring is uncertain, {span}",
        )
    return Advice("unknown", f"{left}: the verdicts do not tell yet")


def longest_pause(records: Sequence[ScoreRecord]) -> float | None:
    """Seconds between batches that arrived one after the other; None where their queue entries are not known."""
    known = [milliseconds / 1000.0 for has, milliseconds, _ in (record.arrival for record in records) if has]
    return max((later - earlier for earlier, later in pairwise(known)), default=None)


def trainer_silent(last_arrival: float | None, now: float, pause: float | None) -> bool:
    """Whether rollouts have stopped coming. `pause`: the longest recent one, in seconds; times are Unix seconds."""
    if last_arrival is None:
        return False
    return now - last_arrival > max(TRAINER_SILENT_SECONDS, _LONGEST_PAUSES * (pause or 0.0))
