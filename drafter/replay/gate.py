"""The promotion gate: may a challenger replace the served drafter, and how much will it gain?

Both are replayed on the same rollouts, so the prompts' difficulty cancels. The tokens are the same too, so
α_challenger / α_served is the ratio of the sums of their rounds. One such comparison is a `Look`. A comparison that
cannot be made is no evidence.

The worker looks after every claim, so the chance of an error is bounded over *all* looks at one served drafter. `Trial`
spends half of that chance on an e-process (Howard et al. 2021, arXiv 1810.08240; Ramdas et al. 2023, arXiv 2210.01948).
Under an equal or worse challenger the process exceeds 1/error with a probability of at most `error`, whenever one stops
(Ville). It pools looks: several can show a small gain that no single look can show. The other half is spent on single
looks, most of it on the first ones (as LORD does: Javanmard and Montanari 2018, arXiv 1603.09000), because gains mostly
come with a new training. After a publish a new trial begins, with a budget of its own.

The promised gain is a posterior mean: the less sure the looks are, the nearer it is to 0. The prior is a random walk
from 0 at the publish, with a rise and a step for each training, or part of one. Rise, step, and the gain's variance
from claim to claim are learnt from the looks.

No clock, no randomness; the state is plain JSON.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from statistics import NormalDist
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from drafter.replay.acceptance import Replay, log_ratio

_NORMAL: Final = NormalDist()
#: Standard deviation of the gains that are expected, in units of the spread between prompts (the mixing law).
_EFFECT_SD: Final = 0.5
#: Standard deviation of the log of a ratio of α where nothing is known of the challenger, as of an archived version.
_UNKNOWN_SD: Final = 0.5
#: Standard deviations of what one training adds to the log gain beside the usual rise, each with its chance before any
#: look. A run begins with large ones.
_STEPS: Final = {0.001: 0.05, 0.003: 0.05, 0.01: 0.1, 0.03: 0.3, 0.1: 0.5}
#: At each look the chances of `_STEPS` move back to the first ones by so much: later trainings may move the gain more.
_FORGOTTEN: Final = 0.005
#: One training is expected to add no more than this.
_LARGEST_RISE: Final = 0.2
#: A larger log gain is impossible, since a round emits at least one token. But the expectation grows with each training
#: without a look, until no float holds it.
_LARGEST_LOG_GAIN: Final = 5.0
#: Standard deviation of one pair's gain from claim to claim, which more prompts do not reduce. Promises use this value.
#: The error of a look uses one that is learnt (`ClaimSpread`), and no less than this.
CLAIM_SD: Final = 0.01
#: The prior of that variance for a trained challenger: an inverse gamma law with the mean `_CLAIM_SD_BEFORE`² and the
#: weight of `_CLAIMS_BEFORE` observations.
_CLAIM_SD_BEFORE: Final = 0.018
_CLAIMS_BEFORE: Final = 6.0
_VARIANCES_BEFORE: Final = (_CLAIMS_BEFORE - 2.0) * _CLAIM_SD_BEFORE**2
#: Observations that are remembered, and the standard deviation that one counts for at most.
_CLAIMS_MEMORY: Final = 32.0
_LARGEST_CLAIM_SD: Final = 0.03
#: For the promise, the error of few prompts is widened as for a gain of this number of standard errors at most. Widened
#: further it would shrink the surest gains the most.
_SURE: Final = 5.0
#: The policy moves, so the looks at an untrained challenger go out of date. Together they weigh as much as
#: `_MEMORY_LOOKS` new ones at most, and nothing once a look is `_BREAK` standard deviations above the expectation.
_MEMORY_LOOKS: Final = 64
_BREAK: Final = 3.0
_NO_DIFFERENCE: Final = "no difference: both drafters do the same with every rollout"
#: The e-process is a mixture of processes, one that begins at each look. The last so many are kept, and the best of
#: those before.
_STARTS: Final = 8


@dataclass(frozen=True, slots=True)
class Look:
    """One paired comparison on rollouts that neither drafter was trained on. Gains are relative: 0.05 = 5 % higher."""

    gain: float  # α_challenger / α_served - 1 on these rollouts; nan where it could not be measured
    error: float  # standard error of log(1 + gain); of few prompts it is widened, so that the normal law fits
    prompts: int  # independent observations
    rollouts: int  # rollouts with at least one round
    alpha_challenger: float
    alpha_served: float
    fault: str = ""  # why nothing can be learnt from it; empty: something can
    error_above: float = 0.0  # as `error`, widened as for a gain of `_SURE` at most; 0: the same

    @property
    def same(self) -> bool:
        """Whether both drafters did the same with every rollout: no evidence of a gain, and a gain of exactly 0."""
        return self.fault == _NO_DIFFERENCE

    @property
    def log_gain(self) -> float:
        """log(α_challenger / α_served)."""
        return math.log1p(self.gain)


def compare(challenger: Replay, served: Replay, groups: npt.NDArray[np.int64] | None = None) -> Look:
    """Look at two replays of the same rollouts in the same order.

    `groups` [R] marks rollouts of one prompt, which count as one observation: siblings say nearly the same.
    Delta method on the logarithm of the ratio of sums (`acceptance.log_ratio`), clustered by rollout or group.
    Student's t of few clusters becomes the normal deviate of the same probability (Wallace 1959), so that looks pool.
    """
    counted = int(np.count_nonzero(served.tokens))
    fault, error_above = _fault(challenger, served, groups), 0.0
    if fault:
        return Look(math.nan, math.nan, 0, counted, challenger.alpha, served.alpha, fault)
    ratio = log_ratio(served.rounds, challenger.rounds, groups)
    error = ratio.error
    if ratio.clusters < 2:
        fault = "too little evidence: rollouts of one prompt bound nothing, at least 2 prompts are needed"
    elif abs(ratio.centre) < 1e-9 and error < 1e-9:
        return Look(0.0, 0.0, ratio.clusters, counted, challenger.alpha, served.alpha, _NO_DIFFERENCE)
    else:
        sampled, degrees = max(error, 1e-9), max(ratio.effective - 1.0, 1.0)
        error = _widened(ratio.centre, sampled, degrees)
        error_above = _widened(min(ratio.centre, _SURE * sampled), sampled, degrees)
    gain = math.expm1(ratio.centre)
    return Look(gain, error, ratio.clusters, counted, challenger.alpha, served.alpha, fault, error_above)


def _widened(centre: float, error: float, degrees: float) -> float:
    """The standard error that makes `centre` as unlikely by the normal law as Student's t makes it at `error`.

    By Wallace's approximation; at a centre of 0, its limit. The deviate is at most 0.01 too large. With few degrees of
    freedom it is too small, which errs on the safe side: a deviate of 2 by 0.12 with 1 degree, 0.03 with 2, 0.004 with
    5.
    """
    t = abs(centre) / error
    scale = (8.0 * degrees + 1.0) / (8.0 * degrees + 3.0)
    if t < 1e-3:
        return error / scale
    return abs(centre) / (scale * math.sqrt(degrees * math.log1p(t * t / degrees)))


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the gate decided and on what evidence. Gains are relative: 0.05 = the challenger's α is 5 % higher."""

    promote: bool
    gain: float  # promised: expected gain, shrunk; nan while nothing could be measured
    low: float  # its one-sided lower bound; nan as well
    high: float  # its one-sided upper bound
    looks: int  # that were pooled
    error: float  # most probability that an equal challenger comes this far in any of the looks
    reason: str  # for people: what decided


@dataclass(slots=True)
class Walk:
    """How trainings move the gain, under one assumption: a Kalman filter of log(1 + gain) and of its rise per training.

    A training adds the rise and a random amount with standard deviation `step`. The rise changes too, by an independent
    amount with the same standard deviation.
    """

    step: float
    chance: float  # that this assumption is right
    mean: float = 0.0
    variance: float = _UNKNOWN_SD**2
    rise: float = 0.0
    rise_variance: float = 0.0
    covariance: float = 0.0  # of gain and rise

    def trained(self, share: float) -> None:
        """Note that share of a whole training of the challenger."""
        self.mean += share * self.rise
        self.variance += share * (2.0 * self.covariance + share * self.rise_variance + self.step**2)
        self.covariance += share * self.rise_variance
        self.rise_variance += share * self.step**2

    def forget(self, log_gain: float, noise: float) -> None:
        """Widen the expectation, or reset it where this look contradicts it. The gate's error does not depend on it."""
        self.variance = max(self.variance, noise / _MEMORY_LOOKS)
        if log_gain - self.mean > _BREAK * math.sqrt(self.variance + noise):
            self.mean, self.variance, self.covariance = 0.0, _UNKNOWN_SD**2, 0.0

    def learn(self, log_gain: float, noise: float) -> float:
        """Learn from a look. Returns the logarithm of its density under this assumption, up to a constant."""
        surprise, expected = log_gain - self.mean, self.variance + noise
        kept, raised = self.variance / expected, self.covariance / expected
        self.mean += kept * surprise
        self.rise = min(max(self.rise + raised * surprise, -_LARGEST_RISE), _LARGEST_RISE)
        self.rise_variance -= raised * self.covariance
        self.covariance *= 1.0 - kept
        self.variance *= 1.0 - kept
        return -0.5 * (math.log(expected) + surprise**2 / expected)

    def next(self) -> Walk:
        """The walk against another served drafter: the gain is unknown, and the rise stays about the same."""
        return Walk(self.step, self.chance, rise=self.rise, rise_variance=self.step**2)


@dataclass(slots=True)
class GainPosterior:
    """The posterior of a challenger's log(1 + gain), over all assumptions of `_STEPS`.

    Why several: a single step that is learnt falls to its least value where looks are noisy. After that looks hardly
    change the expectation, which just goes on by the usual rise.
    """

    walks: list[Walk] = field(
        default_factory=lambda: [Walk(step, chance, rise_variance=step**2) for step, chance in _STEPS.items()]
    )
    moved: float = 0.0  # trainings since the last look; a part of one counts by its share

    @property
    def mean(self) -> float:
        """Expected log(1 + gain)."""
        return math.fsum(walk.chance * walk.mean for walk in self.walks)

    @property
    def variance(self) -> float:
        """The variance of log(1 + gain): within the assumptions and between them."""
        mean = self.mean
        return math.fsum(walk.chance * (walk.variance + (walk.mean - mean) ** 2) for walk in self.walks)

    def known(self, variance: float = 0.0) -> GainPosterior:
        """Set the gain to 0 with that variance; 0: the challenger is the served drafter itself. Returns this object."""
        for walk in self.walks:
            walk.mean, walk.variance, walk.covariance = 0.0, variance, 0.0
        return self

    def trained(self, share: float) -> None:
        """Note that share of a whole training of the challenger. Earlier looks say less about it from now on."""
        for walk in self.walks:
            walk.trained(share)
        self.moved += share

    def learn(self, log_gain: float, noise: float) -> None:
        """Learn the gain, its rise and the assumptions' chances from a look. `noise`: the look's variance."""
        if not self.moved:
            for walk in self.walks:
                walk.forget(log_gain, noise)
        logs = [math.log(walk.chance) + walk.learn(log_gain, noise) for walk in self.walks]
        top = max(logs)
        whole = math.fsum(math.exp(one - top) for one in logs)
        for walk, one in zip(self.walks, logs, strict=True):
            walk.chance = (1.0 - _FORGOTTEN) * math.exp(one - top) / whole + _FORGOTTEN * _STEPS[walk.step]
        self.moved = 0.0

    def next(self) -> GainPosterior:
        """The posterior against another served drafter. How far trainings move the challenger stays known."""
        return GainPosterior([walk.next() for walk in self.walks])


@dataclass(slots=True)
class LookError:
    """The standard error of looks: each look's own, and at least the average of all so far, by their prompts.

    The challenger may be much worse on a few prompts. A look without one of these shows a small gain and a small error;
    a look with one shows a large loss and a large error. The average keeps the former from seeming sure.
    """

    total: float = 0.0  # error² times prompts, summed
    looks: int = 0

    def take(self, look: Look) -> tuple[float, float]:
        """Count a look, and return its error²: as a test of no gain takes it, and as the promise does."""
        above = max((look.error_above or look.error) ** 2, self.total / max(self.looks, 1) / look.prompts)
        self.total += look.error**2 * look.prompts
        self.looks += 1
        error2 = max(look.error**2, self.total / self.looks / look.prompts)
        return error2, min(error2, above)


@dataclass(slots=True)
class ClaimSpread:
    """How much the true gain of one drafter over another differs between claims. More prompts do not reduce this."""

    variances: float = _VARIANCES_BEFORE  # summed over observations
    observations: float = _CLAIMS_BEFORE
    last: list[tuple[float, float]] = field(default_factory=list)  # the last two looks: log gain, error²

    @property
    def sd(self) -> float:
        """The standard deviation between claims, which a look's error includes whatever its number of prompts.

        Its square is about the posterior mean of the variance under an inverse gamma law. An observation counts as
        `_LARGEST_CLAIM_SD` at most, so a spread near that is learnt too small: 2 and 3 % as 1.8 and 2.2 %.
        """
        return math.sqrt(max(self.variances / (self.observations - 2.0), CLAIM_SD**2))

    def learn(self, log_gain: float, error2: float) -> None:
        """Learn from three looks in a row how much the gain varies beyond their errors.

        g₁ - 2g₂ + g₃ has mean 0 where each training brings as much as the one before. Its variance is six times the
        variance from claim to claim, plus what the looks' errors add. The weight is the square of (usual spread /
        (usual spread + the looks' errors)), both as variances: small where prompts are few.
        """
        if len(self.last) == 2:
            (first, first2), (second, second2) = self.last
            errors2, usual2 = first2 + 4.0 * second2 + error2, 6.0 * _CLAIM_SD_BEFORE**2
            weight = (usual2 / (usual2 + errors2)) ** 2
            beyond = (first - 2.0 * second + log_gain) ** 2 - errors2
            kept = min(1.0, (_CLAIMS_MEMORY - 1.0) / self.observations)
            self.variances = kept * self.variances + weight * min(beyond / 6.0, _LARGEST_CLAIM_SD**2)
            self.observations = kept * self.observations + weight
        self.last = [*self.last[-1:], (log_gain, error2)]

    def kept(self) -> ClaimSpread:
        """The spread that the next trial begins with: the learnt one, if it is above the prior; else the prior.

        The new trial has its whole error to spend, and a spread that was small so far may grow.
        """
        return ClaimSpread(self.variances, self.observations) if self.sd > _CLAIM_SD_BEFORE else ClaimSpread()


@dataclass(slots=True)
class SpentError:
    """The chance of an error that looks have spent: half on single looks, half on an e-process that pools them."""

    looks: int = 0
    single: float = 1.0  # smallest p-value of a look, divided by the weight of that look
    starts: list[tuple[float, float, float]] = field(default_factory=list)  # log weight, Σ √n·z, Σ n

    def spend(self, z: float, prompts: int) -> None:
        """Spend on a look by itself, and on a process that begins with it. `z`: its gain in standard errors."""
        share, weight = 6.0 / (math.pi * (self.looks + 1.0)) ** 2, math.sqrt(prompts)  # shares add up to 1
        self.single = min(self.single, _NORMAL.cdf(-z) / share)
        self.starts.append((math.log(share), 0.0, 0.0))
        self.starts = [(w, s + weight * z, n + prompts) for w, s, n in self.starts]
        if len(self.starts) > _STARTS + 1:  # a start that is left out makes the process smaller: the bound holds
            first, second, *rest = self.starts
            self.starts = [max(first, second, key=lambda start: start[0] + _log_e(*start[1:])), *rest]
        self.looks += 1

    def chance(self, share: float) -> float:
        """An upper bound of the chance that an equal challenger ever comes so far. `share`: its part of the error."""
        if not self.starts:
            return 1.0
        logs = [weight + _log_e(s, n) for weight, s, n in self.starts]
        top = max(logs)
        log_e = top + math.log(math.fsum(math.exp(log - top) for log in logs))
        pooled = math.exp(-max(log_e, 0.0))  # a chance is 1 at most
        return min(1.0, 2.0 * min(pooled, self.single) / share)


@dataclass(slots=True)
class Trial:
    """All looks at one challenger against one served drafter. The challenger may be trained between looks.

    `share`: its part of the error that all challengers of the served drafter share. The parts add up to 1 at most.
    """

    share: float = 1.0
    promise: GainPosterior = field(default_factory=GainPosterior)
    look_error: LookError = field(default_factory=LookError)
    claims: ClaimSpread = field(default_factory=ClaimSpread)
    spent: SpentError = field(default_factory=SpentError)
    same: int = 0  # looks that showed no difference: they spend nothing

    def trained(self, share: float = 1.0) -> None:
        """Note that share of a whole training of the challenger."""
        self.promise.trained(share)

    def take(self, look: Look) -> None:
        """Pool a look. Its rollouts must be new: never looked at or trained on. A look with a fault teaches nothing.

        If both drafters did the same, the expected gain moves towards 0, and no error is spent.
        """
        if look.same:
            self.same += 1
            self.promise.learn(0.0, CLAIM_SD**2)
        if look.fault:
            return
        error2, told2 = self.look_error.take(look)
        self.spent.spend(look.log_gain / math.sqrt(error2 + self.claims.sd**2), look.prompts)
        self.claims.learn(look.log_gain, error2)  # after `spend`: a look must not change the error that judges it
        self.promise.learn(look.log_gain, told2 + CLAIM_SD**2)

    def next(self) -> Trial:
        """The same challenger's trial against another served drafter. How much it moves and varies stays known."""
        return Trial(self.share, self.promise.next(), claims=self.claims.kept())

    @property
    def error(self) -> float:
        """An upper bound of the chance that an equal challenger ever comes so far."""
        return self.spent.chance(self.share)

    def verdict(self, *, min_gain: float = 0.005, confidence: float = 0.95) -> Verdict:
        """Promote if an equal challenger would hardly ever come so far, and the promised gain is worth a swap.

        `confidence`: 1 minus the chance, over all looks together, that an equal or worse challenger is promoted.
        `min_gain`: the least relative gain in α that is worth a swap.
        """
        if not 0.5 <= confidence < 1.0:
            raise ValueError(f"expected a confidence from 0.5 to below 1, got {confidence}")
        if not math.isfinite(min_gain):
            raise ValueError(f"expected a finite min_gain, got {min_gain}")
        taken = self.spent.looks + self.same
        if not taken:
            nothing = math.nan
            return Verdict(False, nothing, nothing, nothing, 0, 1.0, "too little evidence: nothing could be compared")
        reach = _NORMAL.inv_cdf(confidence) * math.sqrt(self.promise.variance)
        logs = (self.promise.mean + part for part in (0.0, -reach, reach))
        gain, low, high = (math.expm1(min(log, _LARGEST_LOG_GAIN)) for log in logs)
        error = self.error
        sure, worth = error <= (1.0 - confidence) * (1.0 + 1e-9), gain >= min_gain
        looks = "1 look" if taken == 1 else f"{taken} looks"
        reason = "not enough evidence yet: " if worth and not sure else ""
        reason += f"expected gain {gain:+.2%} ({low:+.2%} to {high:+.2%}) after {looks}; a drafter that is no "
        reason += f"better would look this good in {100 * error:.3g} % of trials at most "
        reason += f"({100 * (1.0 - confidence):.3g} % allowed)"
        if not worth:
            reason += f"; a swap is worth {min_gain:+.2%}"
        promote = sure and worth and self.spent.looks > 0  # not if all looks showed no difference
        return Verdict(promote, gain, low, high, taken, error, reason)

    def to_json(self) -> dict[str, Any]:
        """Plain values for the worker's checkpoint."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Trial:
        """Back from `to_json`; JSON has made lists of tuples."""
        promise, claims, spent = (dict(values[name]) for name in ("promise", "claims", "spent"))
        promise["walks"] = [Walk(**walk) for walk in promise["walks"]]
        claims["last"] = [tuple(look) for look in claims["last"]]
        spent["starts"] = [tuple(start) for start in spent["starts"]]
        return cls(
            values["share"],
            GainPosterior(**promise),
            LookError(**values["look_error"]),
            ClaimSpread(**claims),
            SpentError(**spent),
            values["same"],
        )


def _log_e(s: float, n: float) -> float:
    """Logarithm of the one-sided normal mixture (Robbins 1970; Howard et al. 2021, proposition 6).

    The mean of exp(δ·s - δ²·n/2) over effects δ ≥ 0 of a half-normal law with standard deviation `_EFFECT_SD`, where s
    is the sum of √n·z and n the number of prompts. Under an equal challenger z ~ N(0, 1), and its mean is 1.
    """
    width = 1.0 + _EFFECT_SD**2 * n
    z = _EFFECT_SD * s / math.sqrt(width)
    tail = 0.5 * math.erfc(-z / math.sqrt(2.0))
    if tail <= 0.0:  # far below: Mills' ratio, so that the logarithm stays finite
        return math.log(2.0) - 0.5 * math.log(width) - 0.5 * math.log(2.0 * math.pi) - math.log(-z)
    return math.log(2.0) - 0.5 * math.log(width) + z * z / 2.0 + math.log(tail)


def _fault(challenger: Replay, served: Replay, groups: npt.NDArray[np.int64] | None) -> str:
    """Why the two replays cannot be compared; empty: they can."""
    if challenger.rollouts != served.rollouts or not np.array_equal(challenger.tokens, served.tokens):
        return "not paired: the two replays are of different rollouts; replay both drafters on the same batch"
    if challenger.depth != served.depth:
        return f"not comparable: draft depth {challenger.depth} against {served.depth}"
    if groups is not None and groups.shape != served.tokens.shape:
        return f"groups must name one prompt per rollout: {groups.shape} for {served.rollouts} rollouts"
    for name, replay in (("challenger", challenger), ("served drafter", served)):
        if not (np.isfinite(replay.rounds).all() and np.isfinite(replay.tokens).all()):
            return f"the {name}'s replay holds values that are not finite"
        # A round emits between 1 and K + 1 tokens, so anything else was not computed by `replay_rounds`.
        fewest = replay.tokens / (replay.depth + 1)
        if np.any(replay.rounds > replay.tokens * (1 + 1e-6)) or np.any(replay.rounds < fewest * (1 - 1e-6)):
            return f"the {name}'s replay is impossible: a round emits 1 to {replay.depth + 1} tokens"
    if not served.tokens.any():
        return "no evidence: not one rollout has a round"
    return ""
