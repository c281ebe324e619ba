"""What a published version gains over the one before it, on rollouts that come later; what promises brought so far."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from drafter.replay.acceptance import Replay, log_ratio
from drafter.replay.gate import compare
from service.monitor.events import Realised
from service.monitor.records import Z_95

#: Before any promise is measured, this logarithmic gain (some two publishes') counts as promised and exactly kept.
_KEPT_BEFORE: Final = 0.1
#: Weight of what is older, at each promise that is measured: what was kept five publishes ago counts half.
_KEPT_MEMORY: Final = 0.87
#: A promise is corrected by this factor at most, up or down.
_LARGEST_CORRECTION: Final = 2.0
#: Rollouts after which it is settled what a version gains.
_SETTLED_ROLLOUTS: Final = 256


@dataclass(slots=True)
class Promise:
    """A published version beside the one before it, on rollouts that came after it was published."""

    version: str
    before: str
    promised: float
    expected: float  # by the looks, before it was corrected
    rounds: float = 0.0  # of `version`
    rounds_before: float = 0.0
    variance: float = 0.0  # Σ (rounds_before · standard error of the log ratio)² over claims, by Student's t
    rollouts: int = 0
    policy_version: int | None = None  # newest of the rollouts
    after: str | None = None  # newest queue entry of those that chose it; None: not known
    archived: bool = False  # it was not the candidate when it won
    trained_to: int | None = None  # policy version of its last training, if it was the candidate

    def trainer_went_back(self, policy_version: int) -> bool:
        """Whether the trainer went back since: rollouts of now are of an earlier policy than it was trained on.

        Engines may be one policy version apart.
        """
        return self.trained_to is not None and policy_version < self.trained_to - 1

    def add(self, new: Replay, old: Replay, groups: npt.NDArray[np.int64] | None, policy_version: int) -> None:
        """Count rollouts of a claim, or of several together; the newest are of that policy version."""
        look = compare(new, old, groups)
        if not math.isfinite(look.error):
            return
        rounds, ratio = float(old.rounds.sum()), log_ratio(old.rounds, new.rounds, groups)
        self.rounds += float(new.rounds.sum())
        self.rounds_before += rounds
        # The look's error says how unlikely a gain of 0 is. About a large gain its interval would be too wide.
        self.variance += (rounds * ratio.reach(0.975) / Z_95) ** 2
        self.rollouts += look.rollouts
        self.policy_version = policy_version

    @property
    def settled(self) -> bool:
        """Whether it was measured on enough rollouts."""
        return self.rollouts >= _SETTLED_ROLLOUTS

    @property
    def weight(self) -> float:
        """Of what it brought, among promises: on few rollouts it says less."""
        return min(1.0, self.rollouts / _SETTLED_ROLLOUTS)

    @property
    def log_gain(self) -> float:
        """Realised; known once there are rounds."""
        return math.log(self.rounds_before / self.rounds)

    def event(self) -> Realised:
        """What the history keeps: relative gains, the realised one with its 95 % interval."""
        log_gain = self.log_gain
        reach = Z_95 * math.sqrt(self.variance) / self.rounds_before
        return Realised(
            version=self.version,
            policy_version=self.policy_version,
            before=self.before,
            promised=self.promised,
            realised=math.expm1(log_gain),
            low=math.expm1(log_gain - reach),
            high=math.expm1(log_gain + reach),
            rollouts=self.rollouts,
        )


@dataclass(slots=True)
class Kept:
    """What promises brought: sums of logarithmic gains, the older ones counting less.

    A look says what a version gains on the rollouts of now. What it brings is measured on later ones, on which the
    version before has grown staler still, or on which a lucky look does not repeat itself. Both last as long as the run
    goes on in the same way, so the next promise is corrected by what the ones before brought.
    """

    expected: float = 0.0  # by the looks
    realised: float = 0.0

    def add(self, promise: Promise, weight: float) -> None:
        """Count a version whose gain was measured."""
        self.expected = _KEPT_MEMORY * self.expected + weight * math.log1p(promise.expected)
        self.realised = _KEPT_MEMORY * self.realised + weight * promise.log_gain

    @property
    def correction(self) -> float:
        """Realised to expected logarithmic gain, 1 where nothing is known."""
        return min(max(self.kept_share, 1.0 / _LARGEST_CORRECTION), _LARGEST_CORRECTION)

    @property
    def kept_share(self) -> float:
        """The same without bounds."""
        return (_KEPT_BEFORE + self.realised) / max(_KEPT_BEFORE + self.expected, 1e-9)
