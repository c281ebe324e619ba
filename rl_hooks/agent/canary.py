"""Whether a new drafter has a lower acceptance length in this engine than the one that it replaced.

Both must be measured on the same traffic. So the old version's α is taken over its last rounds in this engine, and a
baseline that is too old gives no verdict.

Rounds of one prompt are alike, and an engine serves few prompts at a time: 2,000 rounds may be two prompts. So the
error is taken from what the traffic does by itself. Stretches of `rounds` rounds are kept; how α changes from one to
the next, under one version, is how it changes under an equal one. Until such changes were seen, a usual one is assumed
(`_USUAL_CHANGE`). The error is at least what the blocks within the stretches say, with the correlation of neighbours.
A trial is looked at after 1, 2, 4, ... stretches, beside as many of the old version: it passes if its α is at
least `ratio` of the old one's, and is swapped back where it is certainly lower. One that is never certain passes after
`patience` stretches.

An engine that has restarted may draw at another temperature. Until it has done `rounds` rounds with the old version
again, a new one is swapped back only where it is dead.

An engine may draft fewer tokens the more requests it serves (vLLM's `num_speculative_tokens_per_batch_size`), and α
falls with them. Where the two sides were drafted at different depths, both are therefore taken at a depth of 1: by the
first draft of each round, whose acceptance depends on no depth.

Pure: times are passed in.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain, pairwise
from typing import Any, Final, Self

from rl_hooks.engines.counters import Counts

#: How much log α changes from one stretch to the next under one version, before it was measured (root mean square), and
#: how many measured changes that counts for.
_USUAL_CHANGE: Final = 0.1
_USUAL_COUNTS_FOR: Final = 4
#: One that accepts less than this share of what the old one accepts is dead, however little is known of the traffic.
_DEAD_SHARE: Final = 0.05
#: Changes that are remembered.
_CHANGES: Final = 32
#: Blocks that a stretch is cut into; their variance is not measured where there are fewer than half as many.
_BLOCKS: Final = 8
#: Variance of clustered rounds over that of independent ones, where there are too few blocks to measure it.
_DESIGN_EFFECT: Final = 4.0
#: Correlation of neighbouring blocks, at most.
_MOST_ALIKE: Final = 0.9
#: By how much the depths of two sides may differ: ends of requests and of the context cut some drafts short.
_SAME_DEPTH: Final = 0.05


@dataclass(frozen=True, slots=True)
class CanaryRule:
    """After `rounds` rounds of the new version, α below `ratio` x the old one's swaps it back. 0 rounds: never.

    2000 rounds are about 100 answers of 20 rounds each: the spread of α over answers is near a third of α, so that a
    drop of a tenth is then 2 to 3 standard errors: enough for a verdict.
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
        document = asdict(self)
        passed = document.pop("passed")
        return document | {"outcome": "passed" if passed else "rolled_back"}


class Canary:
    """Watches one engine. During the trial of a version, `good` stays the one before it."""

    def __init__(self, rule: CanaryRule) -> None:
        self.rule = rule
        self.good: str | None = None
        self.trial: str | None = None
        self._good = _Stretches(rule)
        self._good_at = 0.0  # when the newest of them came
        self._trial = _Stretches(rule)
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
        elif exempt or self.good is None or self.rule.rounds <= 0 or not self._good.done:
            self._accept(version, _Stretches(self.rule))
        else:
            self.trial, self._trial = version, _Stretches(self.rule)

    def interrupted(self, *, restarted: bool = False) -> None:
        """The engine restarted, or another client swapped it: a running trial ends."""
        self.trial = None
        if restarted:
            self._good.set_before()

    def count(self, version: str, counts: Counts, now: float) -> CanaryResult | None:
        """Take in counts of the loaded version; a verdict comes once, when the trial has seen enough rounds."""
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
        if self.trial is not None and not good.done:  # by today's rule there is nothing to compare with
            self._accept(self.trial, trial)

    def _previous_alpha(self, baseline: Counts) -> float:
        """The α of the version before: what the engine counted, or what replay says of now, where that is less."""
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
        """By how much log α falls by itself from so many stretches to the next, under one version, in 1 of 100 cases.

        Until changes over so many were seen often, it is taken to change as over fewer, if that is more than usual.
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
    """Rounds of one version in stretches, the newest last; each is kept in blocks.

    `changes`: how much log α changed from so many stretches to the next so many, by how many; of earlier versions too.
    Neighbours are compared, so what RL does to α in the long run does not count. `of_before`: the engine has restarted
    since; the next stretch replaces these.
    """

    def __init__(self, rule: CanaryRule) -> None:
        self._rule = rule
        self.done: deque[tuple[Counts, ...]] = deque(maxlen=2 * rule.looks[-1])
        self._begun: list[Counts] = []
        self.of_before = False
        self.changes = {many: deque[float](maxlen=_CHANGES) for many in rule.looks}

    def add(self, counts: Counts) -> bool:
        """Take in a difference between two scrapes; returns whether it ended a stretch."""
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
        """The engine has restarted: none of these rounds is of a stretch to come."""
        self.of_before, self._begun = True, []

    def newest(self, many: int) -> list[Counts]:
        """The blocks of the newest stretches, as many as there are, and of what came after them."""
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
        """Inverse of `dump`; what was kept by another rule is forgotten."""
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
    """Both sides, at a depth of 1 where their depths differ; None where positions were not counted then."""
    sides = trials, baselines
    depths = [total.drafted_tokens / max(total.rounds, 1) for total in map(_total, sides)]
    if max(depths) <= (1 + _SAME_DEPTH) * min(depths):
        return sides
    if not all(part.accepted_per_position or not part.accepted_tokens for side in sides for part in side):
        return None
    trial, baseline = (tuple(map(_first_drafts, side)) for side in sides)
    return trial, baseline


def _at_depth_one(alpha: float, depth: int) -> float:
    """The α at a depth of 1 of a drafter that has `alpha` at `depth`, if all drafts of a round are accepted as often.

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
    """Variance of log α (delta method, ratio of sums over blocks); at least the variance of independent rounds.

    Neighbouring blocks may be of one prompt: their correlation counts, as of an autoregressive process of first order.
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
