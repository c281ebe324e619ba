"""Whether a new drafter does worse in this engine than the one that it replaced.

Only a comparison on the same traffic counts, so the old version's α is that of its last rounds here, not of its life,
and a baseline that is too old gives no verdict. Rounds of one prompt are correlated: with few prompts in flight
`rounds` must be large (thousands) for a drop of 10 % to mean anything; see docs.

Pure: times are passed in.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

from rl_hooks.counters import Counts


@dataclass(frozen=True, slots=True)
class CanaryRule:
    """After `rounds` rounds of the new version, α below `ratio` x the old one's sends it back. 0 rounds: never."""

    rounds: int = 200
    ratio: float = 0.9
    baseline_max_age_seconds: float = 300.0


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the canary found, as it is reported to the service."""

    version: str
    previous: str
    alpha: float
    previous_alpha: float
    rounds: int
    previous_rounds: int
    passed: bool

    def document(self) -> dict[str, Any]:
        """The `canary` field of an acceptance report."""
        return {
            "version": self.version,
            "previous": self.previous,
            "alpha": self.alpha,
            "previous_alpha": self.previous_alpha,
            "rounds": self.rounds,
            "previous_rounds": self.previous_rounds,
            "outcome": "passed" if self.passed else "rolled_back",
        }


class Canary:
    """Watches one engine. During the trial of a version, `good` stays the one before it."""

    def __init__(self, rule: CanaryRule) -> None:
        self.rule = rule
        self.good: str | None = None
        self.trial: str | None = None
        self._recent: deque[Counts] = deque()
        self._recent_at = 0.0
        self._trial_counts = Counts()

    def loaded(self, version: str, *, exempt: bool) -> None:
        """A version was just swapped in. `exempt`: a person insists on it, or it was restored after a restart."""
        if version == self.good:
            self.trial = None
        elif exempt or self.good is None or self.rule.rounds <= 0 or self._baseline().rounds < self.rule.rounds:
            self._accept(version)
        else:
            self.trial, self._trial_counts = version, Counts()

    def interrupted(self) -> None:
        """The engine restarted or was swapped by somebody else: a running trial has lost its footing."""
        self.trial = None

    def count(self, version: str, counts: Counts, now: float) -> Verdict | None:
        """Take in counts of the loaded version; a verdict comes once, when the trial has seen enough rounds."""
        if version == self.good:
            self._remember(counts, now)
            return None
        if version != self.trial or self.good is None:
            return None
        self._trial_counts += counts
        if self._trial_counts.rounds < self.rule.rounds:
            return None
        baseline, trial, good = self._baseline(), self._trial_counts, self.good
        fresh = now - self._recent_at <= self.rule.baseline_max_age_seconds
        passed = not fresh or trial.alpha >= self.rule.ratio * baseline.alpha
        verdict = Verdict(version, good, trial.alpha, baseline.alpha, trial.rounds, baseline.rounds, passed)
        if passed:
            self._accept(version)
            self._remember(trial, now)
        self.trial = None
        return verdict

    def _accept(self, version: str) -> None:
        self.good, self.trial = version, None
        self._recent.clear()

    def _baseline(self) -> Counts:
        return sum(self._recent, Counts())

    def _remember(self, counts: Counts, now: float) -> None:
        """Keep the newest differences that together have enough rounds."""
        if counts.rounds == 0:
            return
        self._recent.append(counts)
        self._recent_at = now
        while sum(c.rounds for c in self._recent) - self._recent[0].rounds >= max(self.rule.rounds, 1):
            self._recent.popleft()
