"""Whether a new drafter has a lower acceptance length in this engine than the drafter that it replaced.

Both must be measured on the same traffic. So the old version's α is taken over its last rounds in this engine, and a
baseline that is too old gives no verdict.

Rounds of one prompt are alike, and an engine serves few prompts at a time: 2,000 rounds may be of two prompts. So the
error comes from how the traffic itself changes α. The canary keeps stretches of `rounds` rounds. Under an equal version
α would change as it changes from one stretch to the next under one version. Until such changes were seen, a usual one
is assumed (`_USUAL_CHANGE`). The error is never below that of the blocks within the stretches, including the
correlation of neighbouring blocks.

A trial is looked at after 1, 2, 4, ... stretches, and compared with as many of the old version. It passes if its α is
at least `ratio` of the old one's. It is swapped back if its α is certainly lower. If neither holds up to `patience`
stretches, it passes.

A restarted engine may sample at another temperature. Until it has done `rounds` rounds with the old version again, a
new one is swapped back only if it is dead.

An engine may draft fewer tokens the more requests it serves (vLLM's `num_speculative_tokens_per_batch_size`), which
lowers α. If the two sides were drafted at different depths, both are therefore taken at a depth of 1: by the first
draft of each round, whose acceptance does not depend on the depth.

Pure: times are passed in.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain, pairwise
from typing import Any, Final, Self

from rl_hooks.engines.counting.counters import Counts

#: The assumed change of log α from one stretch to the next under one version (root mean square), and for how many
#: measured changes it counts.
_USUAL_CHANGE: Final = 0.1
_USUAL_COUNTS_FOR: Final = 4
#: A version that accepts less than this share of what the old one accepts is dead, whatever the error.
_DEAD_SHARE: Final = 0.05
#: How many changes are remembered.
_CHANGES: Final = 32
#: How many blocks a stretch is cut into. With fewer than half as many, their variance is not measured.
_BLOCKS: Final = 8
#: The assumed ratio of the variances of clustered and independent rounds, where too few blocks are there to measure it.
_DESIGN_EFFECT: Final = 4.0
#: The largest correlation of neighbouring blocks.
_MOST_ALIKE: Final = 0.9
#: Depths that differ by up to this share count as equal: ends of requests and of the context cut some drafts short.
_SAME_DEPTH: Final = 0.05


@dataclass(frozen=True, slots=True)
class CanaryRule:
    """After `rounds` rounds of the new version, α below `ratio` x the old one's swaps it back. 0 rounds: never.

    2000 rounds are about 100 answers of 20 rounds each. The spread of α over answers is near a third of α, so a drop of
    a tenth is then 2 to 3 standard errors, enough for a verdict.
    """

    rounds: int = 2000
    ratio: float = 0.9
    baseline_max_age_seconds: float = 3600.0
    #: A trial that is not significant goes on for up to `patience` x `rounds` rounds.
    patience: float = 4.0

    @property
    def looks(self) -> tuple[int, ...]:
        """After how many stretches of `rounds` rounds a trial is looked at."""
        last = max(1, math.ceil(self.patience))
        return (*(2**i for i in range(last.bit_length()) if 2**i < last), last)


@dataclass(frozen=True, slots=True)
class CanaryResult:
    """The canary's verdict, as it is reported to the service. Both α are at a depth of 1 if the depths differed."""

    version: str
    previous: str
    alpha: float
    previous_alpha: float
    rounds: int
    previous_rounds: int
    passed: bool

    def document(self) -> dict[str, Any]:
        """The `canary` field of an acceptance report."""
        document = asdict(self)
        passed = document.pop("passed")
        return document | {"outcome": "passed" if passed else "rolled_back"}


class Canary:
    """Watches one engine. During the trial of a version, `good` is still the version before it."""

    def __init__(self, rule: CanaryRule) -> None:
        self.rule = rule
        self.good: str | None = None
        self.trial: str | None = None
        self._good = _Stretches(rule)
        self._good_at = 0.0  # when the newest counts of `good` came
        self._trial = _Stretches(rule)
        self._trial_at: float | None = None  # when the trial's first counts came
        self._replayed: float | None = None

    def loaded(self, version: str, *, exempt: bool, replayed: float | None = None) -> None:
        """Note that a version was swapped in. `exempt`: a person asked for it, or it was restored after a restart.

        `replayed`: the gate's replay α of the version *before* it, on rollouts of the newest policy. The engine counted
        that version under an older policy, and RL may have lowered α since. So the new version is compared with the
        lower one of the two.
        """
        if version == self.trial:
            return  # loaded again: its trial goes on
        self._replayed, self._trial_at = replayed, None
        if version == self.good:
            self.trial = None
        elif exempt or self.good is None or self.rule.rounds <= 0 or not self._good.done:
            self._accept(version, _Stretches(self.rule))
        else:
            self.trial, self._trial = version, _Stretches(self.rule)

    def interrupted(self, *, restarted: bool = False) -> None:
        """End a running trial, because the engine restarted or another client swapped its drafter."""
        self.trial = None
        if restarted:
            self._good.set_before()

    def count(self, version: str, counts: Counts, now: float) -> CanaryResult | None:
        """Take in counts of the loaded version. Returns the verdict once, when the trial has seen enough rounds."""
        if version == self.good:
            if counts.rounds:
                self._good_at = now
                self._good.add(counts)
            return None
        if version != self.trial or self.good is None:
            return None
        if self._trial_at is None:
            self._trial_at = now
            if now - self._good_at > self.rule.baseline_max_age_seconds:  # nothing to compare with
                self._accept(version, _Stretches(self.rule))
                return self.count(version, counts, now)
        if not self._trial.add(counts) or (many := len(self._trial.done)) not in self.rule.looks:
            return None
        trials, baselines = self._trial.newest(many), self._good.newest(many)
        sides = _at_common_depth(trials, baselines)
        passed = None if sides is None else self._holds(*sides, many)
        if passed is None:
            if many < self.rule.looks[-1]:
                return None
            passed = True
        trial, baseline = (_total(side) for side in sides or (trials, baselines))
        verdict = CanaryResult(
            version, self.good, trial.alpha, self._previous_alpha(baseline), trial.rounds, baseline.rounds, passed
        )
        if passed:
            self._good_at = now
            self._accept(version, self._trial)
        self.trial = None
        return verdict

    def dump(self, now: float) -> dict[str, Any]:
        """The state that must survive a restart of the agent, as JSON takes it."""
        return {
            "good": self.good,
            "trial": self.trial,
            "baseline": self._good.dump(),
            "baseline_age_seconds": now - self._good_at,
            "counts": self._trial.dump(),
            "begun": self._trial_at is not None,
            "replayed": self._replayed,
        }

    def restore(self, document: Mapping[str, Any], now: float) -> None:
        """Inverse of `dump`; raises KeyError, TypeError or ValueError for anything else."""
        good, trial = (_Stretches.load(self.rule, document[name]) for name in ("baseline", "counts"))
        self.good, self.trial, self._replayed = document["good"], document["trial"], document["replayed"]
        self._good, self._trial = good, trial
        self._good_at = now - float(document["baseline_age_seconds"])
        self._trial_at = now if document["begun"] else None
        if self.trial is not None and not good.done:  # another rule kept the counts: nothing to compare with
            self._accept(self.trial, trial)

    def _previous_alpha(self, baseline: Counts) -> float:
        """The α of the version before: the engine's count, or replay's α under today's policy if that is lower."""
        if self._replayed is None:
            return baseline.alpha
        many = len(self._trial.done)
        depths = [len(part.accepted_per_position) for side in (self._trial, self._good) for part in side.newest(many)]
        at_one = baseline.drafted_tokens == baseline.rounds and max(depths) > 1
        return min(baseline.alpha, _at_depth_one(self._replayed, max(depths)) if at_one else self._replayed)

    def _holds(self, trials: Sequence[Counts], baselines: Sequence[Counts], many: int) -> bool | None:
        """Whether the trial passes; None if it looks worse, but not significantly."""
        trial, previous = _total(trials), self._previous_alpha(_total(baselines))
        if trial.alpha >= self.rule.ratio * previous:
            return True
        if trial.alpha - 1.0 < _DEAD_SHARE * (previous - 1.0):
            return False
        if self._good.of_before:
            return None
        within = log_alpha_variance(trials) + log_alpha_variance(baselines)
        error = max(_student_99(math.inf) * math.sqrt(within), self._error_of_change(many))
        return False if math.log(trial.alpha / previous) + error < 0 else None

    def _error_of_change(self, many: int) -> float:
        """The fall of log α, from `many` stretches to the next under one version, that 1 of 100 exceeds.

        Until such changes were seen often, the change over fewer stretches is assumed, or the usual one if larger.
        """
        expected, measured, counts_for = _USUAL_CHANGE**2, 0.0, 0.0
        for scale in self.rule.looks[: self.rule.looks.index(many) + 1]:
            changes = [*self._good.changes[scale], *self._trial.changes[scale]]
            squares = sum(change**2 for change in changes) / scale  # neighbouring changes share stretches
            counts_for = _USUAL_COUNTS_FOR + len(changes) / scale
            measured = (_USUAL_COUNTS_FOR * expected + squares) / counts_for
            expected = max(_USUAL_CHANGE**2, measured)
        return _student_99(counts_for) * math.sqrt(measured)

    def _accept(self, version: str, stretches: _Stretches) -> None:
        for many, changes in self._good.changes.items():
            stretches.changes[many] = deque([*changes, *stretches.changes[many]], maxlen=_CHANGES)
        self.good, self.trial, self._good = version, None, stretches


class _Stretches:
    """Rounds of one version in stretches, the newest last. Each stretch is kept in blocks.

    `changes[n]`: changes of log α from n stretches to the next n, of earlier versions too. Only neighbours are
    compared, so RL's slow change of α does not count. `of_before`: the engine has restarted since, and the next stretch
    replaces all of these.
    """

    def __init__(self, rule: CanaryRule) -> None:
        self._rule = rule
        self.done: deque[tuple[Counts, ...]] = deque(maxlen=2 * rule.looks[-1])
        self._begun: list[Counts] = []
        self.of_before = False
        self.changes = {many: deque[float](maxlen=_CHANGES) for many in rule.looks}

    def add(self, counts: Counts) -> bool:
        """Take in the difference between two scrapes. Returns whether it ended a stretch."""
        if counts.rounds:
            self._begun.append(replace(counts, by_prompt={}))
        if sum(part.rounds for part in self._begun) < max(self._rule.rounds, 1):
            return False
        if self.of_before:
            self.done.clear()
            self.of_before = False
        self.done.append(tuple(blocks(self._begun, max(self._rule.rounds // _BLOCKS, 1))))
        self._begun = []
        for many, changes in self.changes.items():
            if len(self.done) >= 2 * many:
                stretches = list(self.done)
                before, after = stretches[-2 * many : -many], stretches[-many:]
                changes.append(math.log(_total(chain(*after)).alpha / _total(chain(*before)).alpha))
        return True

    def set_before(self) -> None:
        """Note that the engine has restarted: the next stretch begins with new rounds."""
        self.of_before, self._begun = True, []

    def newest(self, many: int) -> list[Counts]:
        """The blocks of the newest `many` stretches, or of all if there are fewer, and all rounds after them."""
        return [*chain(*list(self.done)[-many:]), *self._begun]

    def dump(self) -> dict[str, Any]:
        """As JSON takes it."""
        return {
            "done": [[asdict(block) for block in stretch] for stretch in self.done],
            "begun": [asdict(counts) for counts in self._begun],
            "changes": [[many, list(changes)] for many, changes in self.changes.items()],
            "rounds": self._rule.rounds,
            "of_before": self.of_before,
        }

    @classmethod
    def load(cls, rule: CanaryRule, document: Mapping[str, Any]) -> Self:
        """Inverse of `dump`. Counts that another rule kept are forgotten."""
        stretches, changes = cls(rule), {int(many): found for many, found in document["changes"]}
        if document["rounds"] == rule.rounds and changes.keys() == stretches.changes.keys():
            stretches.done.extend(tuple(map(Counts.load, stretch)) for stretch in document["done"])
            stretches._begun = list(map(Counts.load, document["begun"]))
            stretches.of_before = document["of_before"]
            for many, found in changes.items():
                stretches.changes[many].extend(map(float, found))
        return stretches


def _total(parts: Iterable[Counts]) -> Counts:
    return sum(parts, Counts())


def _student_99(degrees: float) -> float:
    """One-sided 99 % quantile of Student's t: Abramowitz & Stegun 26.7.5, within 1 % from 4 degrees of freedom on."""
    z, n = 2.3263, degrees
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return z + sum(term / n ** (i + 1) for i, term in enumerate(terms))


def _at_common_depth(
    trials: Sequence[Counts], baselines: Sequence[Counts]
) -> tuple[Sequence[Counts], Sequence[Counts]] | None:
    """Both sides, at a depth of 1 if their depths differ; None if that needs positions which were not counted."""
    sides = trials, baselines
    depths = [total.drafted_tokens / total.rounds for total in map(_total, sides)]
    if max(depths) <= (1 + _SAME_DEPTH) * min(depths):
        return sides
    if not all(part.accepted_per_position or not part.accepted_tokens for side in sides for part in side):
        return None
    trial, baseline = (tuple(map(_first_drafts, side)) for side in sides)
    return trial, baseline


def _at_depth_one(alpha: float, depth: int) -> float:
    """The α at a depth of 1 of a drafter with `alpha` at `depth`, if all drafts of a round are accepted equally often.

    First drafts are accepted more often than later ones. So this is rather too low, and a trial passes more easily.
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
    """Variance of log α (delta method, ratio of sums over blocks); at least the variance of independent rounds.

    Neighbouring blocks may be of one prompt. Their correlation enters as that of a first-order autoregressive process.
    """
    total = sum(sides, Counts())
    if not total.rounds:
        return math.inf
    independent = _round_variance(total) / (total.rounds * total.alpha**2)
    if len(sides) < _BLOCKS // 2:
        return independent * _DESIGN_EFFECT
    residuals = [(part.accepted_tokens + part.rounds) - total.alpha * part.rounds for part in sides]
    squares = sum(residual**2 for residual in residuals)
    alike = sum(a * b for a, b in pairwise(residuals)) / squares if squares else 0.0
    alike += (1 + 3 * alike) / len(sides)  # in so few blocks it seems lower than it is (Kendall 1954)
    alike = min(max(alike, 0.0), _MOST_ALIKE)
    clustered = len(sides) / (len(sides) - 1) * squares / (total.alpha * total.rounds) ** 2
    return max(clustered * (1 + alike) / (1 - alike), independent)


def _round_variance(counts: Counts) -> float:
    """Variance of the accepted tokens of a round: E[a^2] = Σ (2i + 1) p_i, p_i the share of rounds past position i."""
    mean = counts.accepted_tokens / counts.rounds
    if sum(counts.accepted_per_position) != counts.accepted_tokens:  # not counted: assume the largest possible
        depth = counts.drafted_tokens / counts.rounds
        return max(mean * (depth - mean), 0.0)
    square = sum((2 * i + 1) * n for i, n in enumerate(counts.accepted_per_position)) / counts.rounds
    return max(square - mean * mean, 0.0)
