"""Whether a new drafter has a lower acceptance length in this engine than the one that it replaced.

Both must be measured on the same traffic. So the old version's α is taken over its last rounds in this engine, and a
baseline that is too old gives no verdict.

Rounds of one prompt are alike, so they are not independent: 200 rounds of ten prompts tell as much as ten rounds of
different prompts. Both sides are therefore kept in blocks (differences between two scrapes, joined until each has an
eighth of the trial's rounds). The standard error of log α is computed for a ratio of sums over blocks. A version is
swapped back when its α is below `ratio` of the old one's *and* is significantly below it. A trial that is not
significant goes on, up to `patience` times its rounds, and then passes.

An engine may draft fewer tokens the more requests it serves (vLLM's `num_speculative_tokens_per_batch_size`), and α
falls with them. Where the two sides were drafted at different depths, both are therefore taken at a depth of 1: by the
first draft of each round, whose acceptance depends on no depth.

Pure: times are passed in.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from rl_hooks.engines.counters import Counts

#: Blocks that a side is cut into; their variance is not measured where there are fewer than half as many.
_BLOCKS: Final = 8
#: Variance of clustered rounds over that of independent ones, where there are too few blocks to measure it.
_DESIGN_EFFECT: Final = 4.0
#: By how much the depths of two sides may differ: ends of requests and of the context cut some drafts short.
_SAME_DEPTH: Final = 0.05
#: One-sided 99 % quantile of the normal distribution.
_CERTAIN: Final = 2.326


@dataclass(frozen=True, slots=True)
class CanaryRule:
    """After `rounds` rounds of the new version, α below `ratio` x the old one's swaps it back. 0 rounds: never.

    2000 rounds are about 100 answers of 20 rounds each: the spread of α over answers is near a third of α, so that a
    drop of a tenth is then 2 to 3 standard errors: enough for a verdict.
    """

    rounds: int = 2000
    ratio: float = 0.9
    baseline_max_age_seconds: float = 300.0
    #: A trial that is not significant goes on for up to `patience` x `rounds` rounds.
    patience: float = 4.0


@dataclass(frozen=True, slots=True)
class CanaryResult:
    """What the canary found, as it is reported to the service; both α are at a depth of 1 where the depths differed."""

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
        self._trial: list[Counts] = []
        self._trial_at: float | None = None  # when its first counts came
        self._replayed: float | None = None

    def loaded(self, version: str, *, exempt: bool, replayed: float | None = None) -> None:
        """A version was just swapped in. `exempt`: a person asked for it, or it was restored after a restart.

        `replayed`: α that the gate's replay gave the version *before* it, on rollouts of the newest policy. The engine
        counted that version while the policy was an older one. RL may have lowered α since, so the new version is
        compared with the lower of the two.
        """
        if version == self.trial:
            return  # loaded again: its trial goes on
        self._replayed, self._trial_at = replayed, None
        if version == self.good:
            self.trial = None
        elif exempt or self.good is None or self.rule.rounds <= 0 or self._baseline().rounds < self.rule.rounds:
            self._accept(version)
        else:
            self.trial, self._trial = version, []

    def interrupted(self) -> None:
        """The engine restarted or another client swapped it: a running trial has no baseline any more, and ends."""
        self.trial = None

    def count(self, version: str, counts: Counts, now: float) -> CanaryResult | None:
        """Take in counts of the loaded version; a verdict comes once, when the trial has seen enough rounds."""
        if version == self.good:
            self._remember(counts, now)
            return None
        if version != self.trial or self.good is None:
            return None
        if self._trial_at is None:
            self._trial_at = now
            if now - self._recent_at > self.rule.baseline_max_age_seconds:  # nothing to compare with
                self._accept(version)
                self._remember(counts, now)
                return None
        if counts.rounds:
            self._trial.append(counts)
        rounds, good = sum(self._trial, Counts()).rounds, self.good
        if rounds < self.rule.rounds:
            return None
        sides = self._at_common_depth()
        passed = None if sides is None else self._holds(*sides)
        if passed is None:
            if rounds < self.rule.patience * self.rule.rounds:
                return None
            passed = True
        trial, baseline = (sum(side, Counts()) for side in sides or (self._trial, self._recent))
        asked = self._asked(baseline)
        verdict = CanaryResult(version, good, trial.alpha, asked, trial.rounds, baseline.rounds, passed)
        if passed:
            kept = self._trial
            self._accept(version)
            for part in kept:
                self._remember(part, now)
        self.trial = None
        return verdict

    def dump(self, now: float) -> dict[str, Any]:
        """The state that must survive a restart of the agent, as JSON takes it."""
        return {
            "good": self.good,
            "trial": self.trial,
            "baseline": [asdict(counts) for counts in self._recent],
            "baseline_age_seconds": now - self._recent_at,
            "counts": [asdict(counts) for counts in self._trial],
            "begun": self._trial_at is not None,
            "replayed": self._replayed,
        }

    def restore(self, document: Mapping[str, Any], now: float) -> None:
        """Inverse of `dump`; raises KeyError, TypeError or ValueError for anything else."""
        recent, trial = ([Counts.load(c) for c in document[name]] for name in ("baseline", "counts"))
        self.good, self.trial, self._replayed = document["good"], document["trial"], document["replayed"]
        self._recent, self._trial = deque(recent), trial
        self._recent_at = now - float(document["baseline_age_seconds"])
        self._trial_at = now if document["begun"] else None

    def _asked(self, baseline: Counts) -> float:
        """The α of the version before: what it had, or has by replay now, where that is less."""
        if self._replayed is None:
            return baseline.alpha
        depths = [len(part.accepted_per_position or ()) for part in (*self._trial, *self._recent)]
        at_one = baseline.drafted_tokens == baseline.rounds and max(depths) > 1
        return min(baseline.alpha, _at_depth_one(self._replayed, max(depths)) if at_one else self._replayed)

    def _at_common_depth(self) -> tuple[Sequence[Counts], Sequence[Counts]] | None:
        """Parts of the trial and of the baseline; None where the depths differ and positions were not counted."""
        sides = tuple(self._trial), tuple(self._recent)
        depths = [total.drafted_tokens / max(total.rounds, 1) for total in (sum(side, Counts()) for side in sides)]
        if max(depths) <= (1 + _SAME_DEPTH) * min(depths):
            return sides
        if not all(part.accepted_per_position or not part.accepted_tokens for side in sides for part in side):
            return None
        trial, baseline = (tuple(map(_first_drafts, side)) for side in sides)
        return trial, baseline

    def _holds(self, trials: Sequence[Counts], baselines: Sequence[Counts]) -> bool | None:
        """Whether the trial passes; None if it looks worse, but not significantly."""
        trial, asked = sum(trials, Counts()), self._asked(sum(baselines, Counts()))
        if trial.alpha >= self.rule.ratio * asked:
            return True
        size = max(self.rule.rounds // _BLOCKS, 1)
        variance = log_alpha_variance(blocks(trials, size)) + log_alpha_variance(blocks(baselines, size))
        certain = math.log(trial.alpha / asked) + _CERTAIN * math.sqrt(variance) < 0
        return False if certain else None

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


def _at_depth_one(alpha: float, depth: int) -> float:
    """The α at a depth of 1 of who has this one at `depth`, if each draft of a round is accepted as often.

    First drafts are accepted more often than later ones, so this is rather too low, and a trial passes more easily.
    """
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2.0
        low, high = (middle, high) if sum(middle**j for j in range(depth + 1)) < alpha else (low, middle)
    return 1.0 + low


def _first_drafts(counts: Counts) -> Counts:
    """The same rounds as if each had drafted one token."""
    accepted = counts.accepted_per_position[0] if counts.accepted_per_position else 0  # of a drafter that is dead
    return Counts(counts.rounds, counts.rounds, accepted, (accepted,), None, counts.window_seconds)


def blocks(parts: Sequence[Counts], rounds: int) -> list[Counts]:
    """Join neighbouring differences until each has `rounds` rounds; the rest joins the last."""
    joined: list[Counts] = []
    open_block = Counts()
    for part in parts:
        open_block += part
        if open_block.rounds >= rounds:
            joined.append(open_block)
            open_block = Counts()
    if open_block.rounds:
        joined = [*joined[:-1], joined[-1] + open_block] if joined else [open_block]
    return joined


def log_alpha_variance(sides: Sequence[Counts]) -> float:
    """Variance of log α (delta method, ratio of sums over blocks); at least the variance of independent rounds."""
    total = sum(sides, Counts())
    if not total.rounds:
        return math.inf
    independent = _round_variance(total) / (total.rounds * total.alpha**2)
    if len(sides) < _BLOCKS // 2:
        return independent * _DESIGN_EFFECT
    residuals = sum(((part.accepted_tokens + part.rounds) - total.alpha * part.rounds) ** 2 for part in sides)
    clustered = len(sides) / (len(sides) - 1) * residuals / (total.alpha * total.rounds) ** 2
    return max(clustered, independent)


def _round_variance(counts: Counts) -> float:
    """Variance of the accepted tokens of a round: E[a^2] = Σ (2i + 1) p_i, p_i the share of rounds past position i."""
    mean = counts.accepted_tokens / counts.rounds
    if sum(counts.accepted_per_position) != counts.accepted_tokens:  # not counted: assume the largest possible
        depth = counts.drafted_tokens / counts.rounds
        return max(mean * (depth - mean), 0.0)
    square = sum((2 * i + 1) * n for i, n in enumerate(counts.accepted_per_position)) / counts.rounds
    return max(square - mean * mean, 0.0)
