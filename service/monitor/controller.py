"""Train or idle: spend the worker's seconds only where they are expected to save generation time.

Pure: numbers in, a decision out; no clock, no Redis, no torch. The state is JSON, so the worker persists it.

The cost model. A round costs the same whatever it yields, so generation time goes as 1/α: a drafter better by the
fraction `g` saves `g / (1 + g)` of the generation time of every policy version until the policy has moved on. Training
costs worker seconds, each worth `worker_cost` seconds of the engines that generate. Training pays while

    versions_served · generation_seconds · g / (1 + g)  >  worker_cost · train_seconds

`g` is measured, not guessed: it is the paired gain, on held-out rollouts, of the trained candidate over the served
drafter (drafter.replay.gate), smoothed. When training no longer pays, the worker idles. It still scores every batch, to
see the policy move, and it probes now and then, less often each time a probe finds no gain.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any, Final, Self


class Action(StrEnum):
    """What to do with a batch after it was scored."""

    TRAIN = "train"  #: the last trainings paid, or nothing is known yet
    PROBE = "probe"  #: idle, but test whether training would pay again
    IDLE = "idle"  #: training saves less than it costs
    DEFER = "defer"  #: rollouts of a newer policy have arrived: train on those instead


@dataclass(frozen=True, slots=True)
class Decision:
    """An action and the sentence that explains it to a person."""

    action: Action
    reason: str


@dataclass(frozen=True, slots=True)
class Economy:
    """The prices. Units: seconds; `worker_cost` = seconds of the engines that one worker second is worth."""

    worker_cost: float = 0.1
    generation_share: float = 0.7  # of the time between two policy versions (reported: 65 to 85 %)
    versions_served: float = 5.0  # how long a gain lasts before the policy has moved on
    min_gain: float = 0.002  # relative gains below this are noise whatever they cost
    wake_drop: float = 0.02  # relative fall of served α since idling began at which the worker probes

    def worth(self, gain: float, version_seconds: float) -> float:
        """Seconds of the engines saved by a relative gain in α."""
        return self.versions_served * self.generation_share * version_seconds * gain / (1.0 + gain)


_SMOOTHING = 0.4
_MIN_TRAININGS = 4
_MAX_PROBE_INTERVAL = 32
#: Most claims passed over in a row, so that training goes on even if scoring alone cannot catch up.
_MOST_DEFERRED = 8
#: The decision for rollouts that were passed over.
DEFERRED: Final = Decision(Action.DEFER, "rollouts of a newer policy are there already; training goes to those")


@dataclass(slots=True)
class Controller:
    """The controller's whole state."""

    trainings: int = 0
    gain: float = 0.0  # smoothed relative gain of candidate over served, held-out
    train_seconds: float = 0.0  # smoothed
    version_seconds: float = 0.0  # smoothed time between policy versions
    deferred: int = 0  # claims passed over since the last decision
    idle_batches: int = 0
    probe_interval: int = 2
    idle: bool = False
    idle_alpha: float = 0.0  # served α when idling began

    def defers(self, *, newer_waits: bool) -> bool:
        """Whether to pass a claim over because rollouts of a newer policy wait in the queue (`newer_waits`).

        Not while idle: no time is spent on training then, and every claim counts towards the next probe.
        """
        if self.idle or not newer_waits or self.deferred >= _MOST_DEFERRED:
            return False
        self.deferred += 1
        return True

    def decide(self, economy: Economy, alpha_served: float | None, *, warming_up: bool = False) -> Decision:
        """Decide about one scored batch. `alpha_served`: replay α of the served drafter on it; None: none serves.

        `warming_up`: the learning rate has not reached its value, so gains do not show what training can do.
        """
        self.deferred = 0
        if alpha_served is None:
            return self._train("no drafter is served yet")
        if warming_up:
            return self._train("the learning rate is still rising; gains say little yet")
        if self.trainings < _MIN_TRAININGS:
            return self._train(
                f"{self.trainings} of the first {_MIN_TRAININGS} trainings done; gains are not known yet"
            )
        if self.idle:
            return self._decide_idle(economy, alpha_served)
        worth = economy.worth(max(self.gain, 0.0), self.version_seconds)
        cost = economy.worker_cost * self.train_seconds
        if self.gain >= economy.min_gain and (worth > cost or self.version_seconds == 0.0):
            return Decision(
                Action.TRAIN, f"last gains {self.gain:+.1%} save {worth:.2g} s for {cost:.2g} s of training"
            )
        self.idle, self.idle_batches, self.idle_alpha = True, 0, alpha_served
        return Decision(
            Action.IDLE, f"gains of {self.gain:+.2%} no longer pay: {worth:.2g} s saved, {cost:.2g} s spent"
        )

    def _train(self, reason: str) -> Decision:
        self.idle = False
        return Decision(Action.TRAIN, reason)

    def _decide_idle(self, economy: Economy, alpha_served: float) -> Decision:
        self.idle_batches += 1
        self.idle_alpha = max(self.idle_alpha, alpha_served)
        if alpha_served < self.idle_alpha * (1.0 - economy.wake_drop):
            fall = 1.0 - alpha_served / self.idle_alpha
            return Decision(Action.PROBE, f"served α fell by {fall:.1%} since training stopped")
        if self.idle_batches >= self.probe_interval:
            return Decision(
                Action.PROBE, f"{self.idle_batches} batches without training; testing whether it pays again"
            )
        return Decision(Action.IDLE, f"regret is small; next look in {self.probe_interval - self.idle_batches} batches")

    def learn(self, economy: Economy, *, gain: float, train_seconds: float, version_seconds: float | None) -> None:
        """Record one training: its relative paired gain, its seconds, and the time since the last policy version."""
        first = self.trainings == 0
        self.trainings += 1
        # A probe's gain counts in full: it is not averaged with the gains that led to idling.
        rate = 1.0 if first or self.idle else _SMOOTHING
        self.gain += rate * (gain - self.gain)
        self.train_seconds += (1.0 if first else _SMOOTHING) * (train_seconds - self.train_seconds)
        if version_seconds is not None:
            weight = 1.0 if self.version_seconds == 0.0 else _SMOOTHING
            self.version_seconds += weight * (version_seconds - self.version_seconds)
        if not self.idle:
            return
        self.idle_batches = 0
        if self.gain >= economy.min_gain and (
            self.version_seconds == 0.0
            or economy.worth(self.gain, self.version_seconds) > economy.worker_cost * self.train_seconds
        ):
            self.idle, self.probe_interval = False, 2
        else:
            self.probe_interval = min(_MAX_PROBE_INTERVAL, 2 * self.probe_interval)

    def to_json(self) -> dict[str, Any]:
        """Plain values for the worker's checkpoint."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Self:
        """Back from `to_json`."""
        return cls(**values)
