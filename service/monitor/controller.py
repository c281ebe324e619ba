"""Train or idle: spend the worker's seconds only where they are expected to save generation time.

Pure: numbers in, a decision out; no clock, no Redis, no torch. The state is JSON, so the worker persists it.

The cost model. A round costs the same whatever it yields, so the time of rounds with drafts goes as 1/α. A drafter that
is better by the fraction `g` saves `g / (1 + g)` of that time in every policy version, until the policy has moved on.
Engines report how much time goes to rounds with drafts (`service.monitor.worth.DraftingTime`). There is less to save
where large batches run without drafts, or engines rest while the trainer works. Training costs worker seconds, each
worth `worker_cost` seconds of the engines. Training pays while

    versions_served · drafting_seconds · g / (1 + g)  >  worker_cost · train_seconds

`g` is measured: the paired gain of the trained candidate over the served drafter (drafter.replay.gate). A measurement
is noisy, so it enters a Kalman filter with its standard error. The filter's state is the expected gain of the next
training, with its variance. Training stops when the expected gain no longer pays. It goes on when the gain exceeds what
pays by a standard error.

While idle the worker goes on scoring, and probes: it trains once to measure the gain. Each probe costs one credit.
Credit grows by one in `_CLAIMS_PER_PROBE` claims, which bounds how often noise can make the worker train for nothing. A
probe is due when α of the served drafter has fallen (`Cusum`), when the last probe was promising, or when the credit is
full. If engines draft nothing, the worker still probes, because a poor drafter may be the reason; but not if their step
times show that no drafter could make them faster.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any, Final, Self

from service.monitor.headroom import LearningCurve


class Action(StrEnum):
    """What to do with a batch after it was scored."""

    TRAIN = "train"  #: the last trainings paid, or nothing is known yet
    PROBE = "probe"  #: idle, but train once to see whether it pays again
    IDLE = "idle"  #: training saves less than it costs
    DEFER = "defer"  #: rollouts of a newer policy have arrived: train on those instead


@dataclass(frozen=True, slots=True)
class Decision:
    """An action and the sentence that explains it to a person.

    `undrafted`: engines spend no time in rounds with drafts, so training cannot pay at any price.
    """

    action: Action
    reason: str
    undrafted: bool = False


@dataclass(frozen=True, slots=True)
class Economy:
    """The prices, in seconds. `worker_cost`: how many seconds of the engines one worker second is worth.

    `drafting_share`: the share of the time between two policy versions that engines spend in rounds with drafts; None:
    unknown.
    """

    worker_cost: float = 0.1
    drafting_share: float | None = None
    versions_served: float = 5.0  # how long a gain lasts before the policy has moved on
    min_gain: float = 0.005  # a smaller relative gain is not worth a swap, whatever it costs
    may_pay: bool = False  # engines draft nothing now, but might with a better drafter

    @property
    def assumed_share(self) -> float:
        """The drafting share, or the usual one where it is unknown."""
        return _DRAFTING_SHARE if self.drafting_share is None else self.drafting_share

    def break_even(self, train_seconds: float, version_seconds: float | None) -> float:
        """The relative gain from which on a training pays; infinite where no gain is worth its seconds.

        `version_seconds` None: not known yet. Then `min_gain` is enough, since costs cannot be compared.
        """
        if self.assumed_share == 0.0:
            return math.inf
        if not version_seconds:
            return self.min_gain
        cost, at_stake = self.worker_cost * train_seconds, self.versions_served * self.assumed_share * version_seconds
        return max(self.min_gain, cost / (at_stake - cost)) if cost < at_stake else math.inf


#: Share of the time between two policy versions that goes to rounds with drafts (generation, reported: 65 to 85 %).
_DRAFTING_SHARE: Final = 0.7
_SMOOTHING: Final = 0.4
#: A training counts as at most this multiple of the usual seconds: the machine may have slept.
_MOST_AT_ONCE: Final = 4.0
_MIN_TRAININGS: Final = 4
#: The most claims that are passed over in a row, so that training goes on even if scoring alone cannot catch up.
_MOST_DEFERRED: Final = 8
#: Mean and standard deviation of a training's gain, before any is known.
_FIRST_GAIN: Final = 0.05
#: Variance by which the expected gain wanders from claim to claim: a standard deviation of 0.3 %.
_GAIN_DRIFT: Final = 0.003**2
#: Standard deviation, at least, of what a training may gain after a fall of α.
_GAIN_OF_A_FALL: Final = 0.03
#: An idle worker may train once in this number of claims: where nothing is to be gained, on 5 % of the claims at most.
_CLAIMS_PER_PROBE: Final = 28
#: The largest credit, and the first one, in probes. A full credit is reason enough for a probe, so the first is due
#: after a quarter of those claims.
_MOST_PROBES: Final = 2.0
_PROBES_AT_FIRST: Final = 1.75
#: The decision for rollouts that were passed over.
DEFERRED: Final = Decision(Action.DEFER, "rollouts of a newer policy are there already; training goes to those")
#: The decision where nothing that comes can judge a training.
UNJUDGED: Final = Decision(
    Action.IDLE,
    "no prompt is new: nothing can be judged, so nothing is trained until other prompts or another policy version come",
)
#: The decision while memory runs out in each training.
NO_MEMORY: Final = Decision(Action.IDLE, "nothing is trained on for a while, because memory ran out in each training")


#: Over how many claims the level of α is taken: few while publishes move it, more while nothing does.
_MEMORY_AWAKE: Final = 5
_MEMORY_IDLE: Final = 64
#: The CUSUM of shortfalls: claims before it begins; the slack, which each claim subtracts; the most that one claim
#: counts for, so that an outlier alone is no fall; the limit above which α fell. All but the first are in standard
#: deviations.
_LEAST_CLAIMS: Final = 6
_SLACK: Final = 0.5
_MOST_OF_A_CLAIM: Final = 4.0
_LIMIT: Final = 6.0
#: Standard deviation of log α that is assumed at least.
_LEAST_DEVIATION: Final = 0.005


@dataclass(slots=True)
class Cusum:
    """The level of the served drafter's α, and the evidence that α fell.

    A one-sided CUSUM (Page 1954) of shortfalls in standard deviations. Mean and variance are learnt on the way (Hawkins
    1987, self-starting). In logarithms, so that a fall of 5 % counts the same whatever α is.
    """

    claims: float = 0.0  # on which mean and variance rest
    mean: float = 0.0
    variance: float = 0.0
    evidence: float = 0.0  # the CUSUM, in standard deviations
    shortfall: float = 0.0  # of the newest claim

    @property
    def fell(self) -> bool:
        """Whether α fell beyond chance."""
        return self.evidence > _LIMIT

    def feed(self, alpha: float, memory: int) -> None:
        """Take the α of one claim. Mean and variance are of about the last `memory` claims."""
        value = math.log(alpha)
        if not self.claims:
            self.claims, self.mean = 1.0, value
            return
        self.shortfall = self.mean - value
        count = min(self.claims, memory - 1.0) + 1.0
        deviation = math.sqrt(self.variance * (1.0 + 1.0 / count) + _LEAST_DEVIATION**2)
        step = -self.shortfall
        if self.claims >= _LEAST_CLAIMS:
            score = min(self.shortfall / deviation, _MOST_OF_A_CLAIM)
            self.evidence = max(0.0, self.evidence + score - _SLACK)
            reach = _MOST_OF_A_CLAIM * deviation
            step = min(max(step, -reach), reach)
        self.claims = count
        self.mean += step / count
        self.variance += (step * step * (1.0 - 1.0 / count) - self.variance) / count

    def restart(self) -> None:
        """Learn the level again. What was known counts like at most `_LEAST_CLAIMS` claims."""
        self.claims, self.evidence = min(self.claims, float(_LEAST_CLAIMS)), 0.0


@dataclass(slots=True)
class Controller:
    """The controller's whole state."""

    trainings: int = 0
    gain: float = _FIRST_GAIN  # relative gain that the next training is expected to bring
    variance: float = _FIRST_GAIN**2  # of that expectation
    train_seconds: float = 0.0  # smoothed
    version_seconds: float = 0.0  # smoothed time between policy versions; 0: not known
    deferred: int = 0  # claims passed over since the last decision
    idle: bool = False
    probes: float = _PROBES_AT_FIRST  # credit for probes
    probing: bool = False  # a probe has begun, and may have ended early for newer rollouts
    level: Cusum = field(default_factory=Cusum)
    curve: LearningCurve = field(default_factory=LearningCurve)

    def defers(self, *, newer_waits: bool) -> bool:
        """Whether to pass a claim over because rollouts of a newer policy wait in the queue (`newer_waits`).

        Not while idle: there is no training to save time on, and every claim counts towards the next probe.
        """
        if self.idle or not newer_waits or self.deferred >= _MOST_DEFERRED:
            return False
        self.deferred += 1
        return True

    def decide(
        self,
        economy: Economy,
        alpha_served: float | None,
        *,
        version_seconds: float | None = None,
        warming_up: bool = False,
        unfinished: bool = False,
    ) -> Decision:
        """Decide about one scored claim.

        `alpha_served`: replay α of the served drafter, pooled over the claim; None: no drafter is served.
        `version_seconds`: time between policy versions now, also while nothing is trained.
        `warming_up`: the learning rate is still rising, so gains do not show what training can do.
        `unfinished`: the last training ended early for newer rollouts and was not judged. A probe goes on with those,
        without another credit.
        """
        self.deferred = 0
        if version_seconds is not None:
            weight = 1.0 if self.version_seconds == 0.0 else _SMOOTHING  # the first is taken whole
            self.version_seconds += weight * (version_seconds - self.version_seconds)
        if alpha_served is None:
            return self._train("no drafter is served yet")
        self.level.feed(alpha_served, _MEMORY_IDLE if self.idle else _MEMORY_AWAKE)
        self.variance = min(self.variance + _GAIN_DRIFT, _FIRST_GAIN**2)
        self.probes = min(self.probes + 1.0 / _CLAIMS_PER_PROBE, _MOST_PROBES)
        if warming_up:
            return self._train("the learning rate is still rising; gains say little yet")
        if self.trainings < _MIN_TRAININGS:
            return self._train(
                f"{self.trainings} of the first {_MIN_TRAININGS} trainings done; gains are not known yet"
            )
        price, sure = economy.break_even(self.train_seconds, self.version_seconds), math.sqrt(self.variance)
        expected = f"a training is expected to gain {self.gain:+.1%} ± {sure:.1%}; it "
        expected += f"pays from {price:.1%}" if price < math.inf else "cannot pay"
        if economy.drafting_share is not None:
            expected += f", as engines spend {economy.drafting_share:.0%} of their time in rounds with drafts"
        if self.gain > price + (sure if self.idle else 0.0):
            return self._train(expected)
        self.probing = self.probing and unfinished
        if self.idle and self.probing:
            return Decision(Action.PROBE, "the last probe goes on with newer rollouts")
        if not self.idle:
            self.idle, self.probes = True, min(self.probes, _PROBES_AT_FIRST)
        if economy.may_pay and self.probes >= _MOST_PROBES:
            return self._probed("engines draft nothing with this drafter; training it now and then all the same")
        return self._probe(price) or Decision(Action.IDLE, expected, undrafted=economy.assumed_share == 0.0)

    def _train(self, reason: str) -> Decision:
        self.idle = self.probing = False
        return Decision(Action.TRAIN, reason)

    def _probe(self, price: float) -> Decision | None:
        """A probe, if one is due, there is credit for it, and its gain could pay. Else None."""
        if self.probes < 1.0:
            return None
        if self.level.fell:
            fall = self.level.shortfall
            self.variance += max(_GAIN_OF_A_FALL, fall) ** 2
            self.level.restart()
            by = f"{-math.expm1(-fall):.1%}"
            reason = f"served α fell beyond chance, last by {by}; testing whether training pays again"
        elif self.gain > price:
            reason = f"the last probe promised {self.gain:+.1%}; testing again"
        elif self.probes >= _MOST_PROBES:
            reason = "none was due for a while; testing whether training pays again"
        else:
            return None
        if self.gain + 2.0 * math.sqrt(self.variance) <= price:
            return None
        return self._probed(reason)

    def _probed(self, reason: str) -> Decision:
        self.probes -= 1.0
        self.probing = True
        self.level.evidence = 0.0  # the probe answers a fall, too
        return Decision(Action.PROBE, reason)

    def learn(
        self,
        *,
        gain: float,
        error: float | None,
        promoted: bool,
        train_seconds: float,
    ) -> None:
        """Record one training: its paired relative gain, and the seconds it took.

        `error`: the gain's standard error; None: the gain could not be measured, and only the seconds count.
        `promoted`: whether the candidate is served now.
        """
        first = self.trainings == 0
        self.trainings += 1
        if error is not None:
            weight = self.variance / (self.variance + error * error)
            self.gain += weight * (gain - self.gain)
            self.variance *= 1.0 - weight
            self.curve.learn(gain, error, promoted=promoted)
        self.train_seconds = train_seconds if first else _smoothed(self.train_seconds, train_seconds)

    def published(self) -> None:
        """Note that the candidate is served now, by later looks than the verdict that refused it.

        So what was trained last did gain. An idle worker goes on, unless less is expected than what pays.
        """
        self.idle = False
        self.curve.published()

    def to_json(self) -> dict[str, Any]:
        """Plain values for the worker's checkpoint."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Self:
        """Back from `to_json`."""
        curve = LearningCurve.of(values["curve"]["measured"])
        return cls(**values | {"level": Cusum(**values["level"]), "curve": curve})


def _smoothed(known: float, seconds: float) -> float:
    return known + _SMOOTHING * (min(seconds, _MOST_AT_ONCE * known) - known) if known else seconds
