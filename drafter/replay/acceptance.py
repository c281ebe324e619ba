"""Replay α: the acceptance length a drafter would have had on tokens that were already emitted. Pure NumPy.

Chain speculation with rejection sampling accepts the draft of an emitted token x with probability
`c = min(1, q(x) / p(x))`, independently of everything else, so the law of the rounds along a given text is known
exactly and a short recursion gives their expected number. α = tokens / rounds, of sums that were pooled first: the
mean of per-rollout ratios is another quantity, and so is a mean over positions (rounds begin more often in hard
places).

What counts: in each generation segment (a maximal run of tokens that the policy generated) the first token comes from
the prefill and belongs to no round; each of the other n tokens is emitted by exactly one round. Drafts past the end of
a segment are cut off, as engines cut them at the end of a response.

Legend: T tokens, R rollouts, S segments, N tokens emitted by rounds (summed over segments), K draft depth.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

#: Padded elements of one block of the recursion: bounds memory where one segment is far longer than the others.
_BLOCK_ELEMENTS = 1 << 22
#: Of weighed tokens: the effective number of rollouts that accepted a draft, over that of all rounds, is at least this.
_RELIED_ON = 0.25


@dataclass(frozen=True, slots=True)
class Segments:
    """Generation segments of a batch, in token order. The tokens that rounds emitted form one packed axis [N]."""

    first: Ints  # [S] row of the segment's first token, the one that comes from the prefill
    tokens: Ints  # [S] n: tokens emitted by rounds
    rollout: Ints  # [S] index of the rollout
    document: Ints  # [S] row where the rollout begins
    rollouts: int

    @property
    def offsets(self) -> Ints:
        """Where each segment's tokens begin on the packed axis, and its length at the end: [S+1]."""
        return np.concatenate(([0], np.cumsum(self.tokens)))

    def rows(self) -> Ints:
        """Row in the batch of each token that a round emitted: [N]."""
        within = np.arange(int(self.tokens.sum())) - np.repeat(self.offsets[:-1], self.tokens)
        return np.repeat(self.first + 1, self.tokens) + within


def find_segments(loss_mask: npt.NDArray[np.bool_], cu_seqlens: npt.NDArray[np.integer]) -> Segments:
    """Split `loss_mask` [T] into maximal runs that do not cross the rollout boundaries `cu_seqlens` [R+1].

    >>> find_segments(np.array([0, 1, 1, 0, 1, 1, 1], bool), np.array([0, 3, 7])).tokens.tolist()
    [1, 2]
    """
    bounds = np.asarray(cu_seqlens, dtype=np.int64)
    mask = np.asarray(loss_mask, dtype=bool)
    if mask.ndim != 1 or bounds.ndim != 1 or bounds.size < 1 or bounds[0] != 0 or bounds[-1] != mask.size:
        raise ValueError(
            f"cu_seqlens must run from 0 to the {mask.size} tokens of loss_mask, got {bounds[:1]}..{bounds[-1:]}"
        )
    if np.any(np.diff(bounds) < 0):
        raise ValueError("cu_seqlens must not decrease")
    starts_document = np.zeros(mask.size + 1, dtype=bool)
    starts_document[bounds] = True
    before = np.concatenate(([False], mask[:-1]))
    after = np.concatenate((mask[1:], [False]))
    first = np.flatnonzero(mask & (~before | starts_document[:-1]))
    last = np.flatnonzero(mask & (~after | starts_document[1:]))
    rollout = np.searchsorted(bounds, first, side="right") - 1
    return Segments(first, last - first, rollout, bounds[rollout], bounds.size - 1)


@dataclass(frozen=True, slots=True)
class Replay:
    """What a drafter would have done on each of R rollouts. Add up before dividing; never average ratios."""

    tokens: Floats  # [R] tokens emitted by rounds
    rounds: Floats  # [R] expected rounds
    accepted: Floats  # [R, K] expected rounds whose drafts 0..j were all accepted and lie within the response
    reached: Floats  # [R, K] expected rounds that accepted drafts 0..j-1 and had a j-th one within the response

    def __post_init__(self) -> None:
        R = self.tokens.shape[0]
        shapes = [self.tokens.shape, self.rounds.shape]
        wide = [self.accepted.shape, self.reached.shape]
        if shapes != [(R,)] * 2 or wide != [(R, self.accepted.shape[-1])] * 2:
            raise ValueError(f"expected tokens and rounds [R] and counts [R, K], got {shapes} and {wide}")

    @property
    def _arrays(self) -> tuple[Floats, Floats, Floats, Floats]:
        return self.tokens, self.rounds, self.accepted, self.reached

    @property
    def rollouts(self) -> int:
        """R, those without a single round included."""
        return int(self.tokens.size)

    @property
    def depth(self) -> int:
        """K."""
        return int(self.accepted.shape[1])

    @property
    def alpha(self) -> float:
        """Tokens per round, bonus token included: a value from 1 to K + 1, nan where there is no round."""
        return _ratio(float(self.tokens.sum()), float(self.rounds.sum()))

    @property
    def position_acceptance(self) -> Floats:
        """Share of all rounds that accepted drafts 0..j, [K], never rising; nan without a round.

        The counterpart of an engine's accepted tokens per position over drafts. Rounds that had no j-th draft (the
        response ended, a lookup found nothing) count as rounds that did not accept it.
        """
        return _share(self.accepted.sum(axis=0), np.full(self.depth, self.rounds.sum()))

    @property
    def conditional_acceptance(self) -> Floats:
        """Share that accepted draft j of the rounds that came to it, `reached`: [K]; nan where none did."""
        return _share(self.accepted.sum(axis=0), self.reached.sum(axis=0))

    @property
    def tells_positions(self) -> bool:
        """Whether `accepted` can be relied on: not where a few large weights of tokens make it.

        A round's weights multiply, so one rollout may hold most of a deep position's sum. Then that sum exceeds the one
        before it, or the rollout accepts more drafts there than it has rounds while the effective number of rollouts
        (Kish) is far below that of the rounds. Without weights neither happens.
        """
        kept = np.concatenate((self.rounds[:, None], self.accepted), axis=1)
        sums = kept.sum(axis=0)
        if np.any(sums[1:] > sums[:-1] * (1.0 + 1e-9)):
            return False
        effective = _share(np.square(sums), np.square(kept).sum(axis=0), most=math.inf)
        over = np.any(kept > self.rounds[:, None] * (1.0 + 1e-9), axis=0)
        return not np.any(over & (effective < _RELIED_ON * effective[0]))

    def total(self) -> dict[str, float]:
        """Pooled sums, as they are stored: {"tokens", "rounds"}."""
        return {"tokens": float(self.tokens.sum()), "rounds": float(self.rounds.sum())}

    def select(self, rollouts: Sequence[int] | Ints) -> Replay:
        """Return these rollouts only, in this order."""
        index = np.asarray(rollouts, dtype=np.int64)
        return Replay(*(one[index] for one in self._arrays))

    @staticmethod
    def concat(parts: Sequence[Replay]) -> Replay:
        """Pool rollouts of several replays of the same depth."""
        if not parts:
            raise ValueError("expected at least one replay to pool, got none")
        depths = {part.depth for part in parts}
        if len(depths) != 1:
            raise ValueError(f"α depends on the draft depth: pool replays of one depth, got {sorted(depths)}")
        return Replay(*(np.concatenate(ones) for ones in zip(*(part._arrays for part in parts), strict=True)))

    def interval(self, level: float = 0.95, groups: Ints | None = None) -> tuple[float, float]:
        """Two-sided interval of α over rollouts drawn from the same source: (low, high), nan with fewer than two.

        `ratio_interval`, clustered by rollout, or by `groups` [R] where several rollouts answer one prompt. Cut to
        1..K+1, where α lies.
        """
        found = ratio_interval(self.tokens, self.rounds, groups, level)
        low, high = np.array(found).clip(1.0, self.depth + 1.0).tolist()
        return low, high


@dataclass(frozen=True, slots=True)
class LogRatio:
    """Logarithm of a ratio of sums over clusters, and how well it is known."""

    centre: float  # nan where a sum is not positive
    error: float  # standard error; nan with fewer than two clusters
    clusters: int
    effective: float  # clusters of equal size that would weigh the same (Kish): few when one holds most of the tokens

    def reach(self, probability: float) -> float:
        """Distance from the centre to the bound that `probability` of the law lies below (Student's t)."""
        return student_quantile(probability, max(self.effective - 1.0, 1.0)) * self.error


def log_ratio(numerator: Floats, denominator: Floats, groups: Ints | None = None) -> LogRatio:
    """Delta method: cluster i moves log(sum a / sum b) by a_i / sum a - b_i / sum b.

    A cluster with share w of the sums pulls the estimate towards itself, so its deviation is divided by 1 - w (HC2).
    `groups` names the cluster of each entry. Clusters where both are zero carry nothing and are not counted.
    """
    a, b = _clustered(numerator, denominator, groups)
    total_a, total_b = float(a.sum()), float(b.sum())
    if not (total_a > 0 and total_b > 0 and math.isfinite(total_a) and math.isfinite(total_b)):
        return LogRatio(math.nan, math.nan, int(a.size), math.nan)
    share_a, share_b = a / total_a, b / total_b
    weight = (share_a + share_b) / 2
    effective = 1.0 / float(np.square(weight).sum())
    error = math.nan
    if a.size >= 2:
        error = math.sqrt(float((np.square(share_a - share_b) / (1.0 - weight).clip(min=1e-12)).sum()))
    return LogRatio(math.log(total_a / total_b), error, int(a.size), effective)


def ratio_interval(
    numerator: Floats, denominator: Floats, groups: Ints | None = None, level: float = 0.95
) -> tuple[float, float]:
    """Two-sided interval of sum a / sum b, for people; nan with fewer than two clusters. At each end the wider of two.

    Of few clusters both know what `LogRatio.reach` does not. Student's t has the jackknife's error (deviations divided
    by 1 - w) and Satterthwaite's degrees of freedom, which are few where clusters weigh unlike (Bell and McCaffrey
    2002). Hall's transformation (1992) knows the skewness: long, hard prompts are rare, and a sample has too few.
    """
    a, b = _clustered(numerator, denominator, groups)
    ratio = log_ratio(a, b)
    if math.isnan(ratio.centre) or math.isnan(ratio.error):
        return math.nan, math.nan
    share_a, share_b = a / a.sum(), b / b.sum()
    weight = (share_a + share_b) / 2
    kept = (1.0 - weight).clip(min=1e-12)
    off = (share_a - share_b) / kept
    error = math.sqrt(float(np.square(off).sum()))
    if error == 0.0:
        return math.exp(ratio.centre), math.exp(ratio.centre)
    probability = 0.5 + level / 2
    t, z = student_quantile(probability, _degrees(weight, kept)), NormalDist().inv_cdf(probability)
    skewness = float((off**3).sum()) / error**3  # of the mean
    below, above = max(t, _hall(z, skewness)), max(t, -_hall(-z, skewness))
    return math.exp(ratio.centre - below * error), math.exp(ratio.centre + above * error)


def _degrees(weight: Floats, kept: Floats) -> float:
    """Satterthwaite's degrees of freedom of the jackknife's variance; clusters' deviations are as large as they weigh.

    tr(M)² / tr(M²) of M[i, j] = g[i]·g[j]·(δ[i, j] - w[i] - w[j] + Σ w²), without the matrix.
    """
    g2, squares = np.square(weight / kept), float(np.square(weight).sum())
    own = g2 * (1.0 - 2.0 * weight + squares)
    first, second, third = (float((g2 * weight**power).sum()) for power in range(3))
    pairs = squares**2 * first**2 - 4.0 * squares * first * second + 2.0 * first * third + 2.0 * second**2
    pairs -= float(np.square(g2 * (squares - 2.0 * weight)).sum())
    return max(1.0, float(own.sum()) ** 2 / (float(np.square(own).sum()) + pairs))


def _hall(deviate: float, skewness: float) -> float:
    """The value of a studentised mean with that skewness that is as unlikely as a normal `deviate`."""
    if abs(skewness) < 1e-4:
        return deviate
    inner = 1.0 + skewness * (deviate - skewness / 6.0)
    return 3.0 / skewness * (math.copysign(abs(inner) ** (1 / 3), inner) - 1.0)


def _clustered(numerator: Floats, denominator: Floats, groups: Ints | None) -> tuple[Floats, Floats]:
    """Sums by cluster, of those that carry something."""
    if groups is not None:
        _, index = np.unique(groups, return_inverse=True)
        numerator = np.bincount(index, weights=numerator).astype(np.float64)
        denominator = np.bincount(index, weights=denominator).astype(np.float64)
    kept = (numerator != 0) | (denominator != 0)
    return numerator[kept], denominator[kept]


def student_quantile(probability: float, degrees: float) -> float:
    """Quantile of Student's t, by the Cornish-Fisher expansion around the normal (within 0.5 % from 5 degrees on).

    That is up to a probability of 0.99; at 0.999 it is within 2 %. nan below one degree of freedom.
    """
    if not degrees >= 1:
        return math.nan
    z = NormalDist().inv_cdf(probability)
    n = degrees
    return (
        z
        + (z**3 + z) / (4 * n)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * n**3)
    )


def replay_rounds(conditional: npt.NDArray[np.floating], segments: Segments, *, weighted: bool = False) -> Replay:
    """Expected rounds of each rollout, given the probability that each draft of each possible round is accepted.

    `conditional` [N, K]: row i, column j = probability that the j-th draft of a round whose first draft is token i of
    the packed axis is accepted, given that those before it were. Entries past the end of a segment are not read.
    With R[s] the expected number of rounds begun at token s of a segment of n (docs/reference/algorithm.md):

        R[0] = 1;  for s ascending:  survived = 1
            for j in 0..K-1:  R[s+j+1] += R[s]·survived·(1 - c[s,j]);  survived *= c[s,j]
            R[s+K+1] += R[s]·survived
        rounds = R[0] + ... + R[n-1]

    `weighted`: c is a probability times its token's weight, because another law drew the token (`replay`). Such a c may
    exceed 1, and counts as 1 in R. By the weights the rounds of R would emit other tokens in mean than the text has,
    E = Σ_s R[s]·(1 + c[s,0] + c[s,0]·c[s,1] + ...) within the segment. So they are multiplied by tokens / E.
    """
    N = int(segments.tokens.sum())
    if conditional.ndim != 2 or conditional.shape[0] != N:
        raise ValueError(f"expected acceptances [{N}, K], one row per token emitted by a round: {conditional.shape}")
    K = int(conditional.shape[1])
    result = Replay(*(np.zeros(segments.rollouts) for _ in range(2)), *(np.zeros((segments.rollouts, K)) for _ in "ar"))
    emitted = np.zeros(segments.rollouts)
    likely = conditional.clip(max=1.0) if weighted else conditional
    for block in _blocks(segments, K):
        offsets, lengths = segments.offsets[:-1][block], segments.tokens[block]
        rollout = segments.rollout[block]
        ends, inside = _end_law(likely, offsets, lengths)
        begun = _rounds_begun(ends)
        np.add.at(result.tokens, rollout, lengths)
        np.add.at(result.rounds, rollout, begun.sum(axis=1))
        # A round accepts its first j drafts exactly when it emits more than j tokens.
        survived = ends[:, :, ::-1].cumsum(axis=2)[:, :, ::-1]  # [S, n, K+1] by j
        if weighted:
            c, within = _padded(conditional, offsets, lengths)
            survived = _survived(c)
            np.add.at(emitted, rollout, np.einsum("sn,snk->s", begun, survived * within))
        np.add.at(result.accepted, rollout, np.einsum("sn,snk->sk", begun, survived[:, :, 1:] * inside))
        np.add.at(result.reached, rollout, np.einsum("sn,snk->sk", begun, survived[:, :, :-1] * inside))
    return _scaled(result, emitted) if weighted else result


def _scaled(found: Replay, emitted: Floats) -> Replay:
    """The rounds that emit `found.tokens`, where those of `found` emit `emitted`: no more than K + 1 each."""
    emitted = np.minimum(emitted, (found.depth + 1) * found.rounds)
    scale = np.divide(found.tokens, emitted, out=np.ones_like(emitted), where=emitted > 0)
    return Replay(
        found.tokens, found.rounds * scale, *(one * scale[:, None] for one in (found.accepted, found.reached))
    )


def _blocks(segments: Segments, depth: int) -> Iterator[Ints]:
    """Group segments of similar length, so that padding one block stays within the memory bound."""
    order = np.argsort(segments.tokens, kind="stable")
    order = order[segments.tokens[order] > 0]
    begin = 0
    while begin < order.size:
        end = begin + 1
        # Ascending lengths: the last segment of a block sets the padding of all.
        while (
            end < order.size and (end + 1 - begin) * int(segments.tokens[order[end]]) * (depth + 1) <= _BLOCK_ELEMENTS
        ):
            end += 1
        yield order[begin:end]
        begin = end


def _padded(
    conditional: npt.NDArray[np.floating], offsets: Ints, lengths: Ints
) -> tuple[Floats, npt.NDArray[np.bool_]]:
    """Acceptances [S, n, K], 0 past the ends of segments; whether a round has j more tokens there, [S, n, K+1].

    Past the end nothing is read: a round that gets there emits its last token there, whichever way.
    """
    K = conditional.shape[1]
    position = np.arange(int(lengths.max()))
    within = position[:, None] + np.arange(K + 1) < lengths[:, None, None]
    rows = np.where(within[:, :, 0], offsets[:, None] + position, 0)
    return np.where(within[:, :, :-1], np.asarray(conditional[rows], dtype=np.float64), 0.0), within


def _survived(c: Floats) -> Floats:
    """Probability that the first j drafts of a round are accepted: [S, n, K+1] by j."""
    return np.concatenate((np.ones((*c.shape[:2], 1)), np.cumprod(c, axis=2)), axis=2)


def _end_law(
    conditional: npt.NDArray[np.floating], offsets: Ints, lengths: Ints
) -> tuple[Floats, npt.NDArray[np.bool_]]:
    """Law of a round's length, padded: ends [S, n, K+1], where ends[s, i, m] = P(round begun at i emits m+1 tokens).

    Rows past the end of a segment are zero: no round begins there. Also says which drafts lie within their segment
    (inside [S, n, K]).
    """
    c, within = _padded(conditional, offsets, lengths)
    if not np.all((c >= 0) & (c <= 1)):
        raise ValueError("acceptance probabilities must lie in [0, 1]: the drafter or the log-probabilities hold NaN")
    ends = _survived(c)
    ends[:, :, :-1] *= 1.0 - c
    return ends * within[:, :, :1], within[:, :, :-1]


def _rounds_begun(ends: Floats) -> Floats:
    """Expected number of rounds begun at each token: [S, n]."""
    S, n, width = ends.shape
    begun: Floats = np.zeros((S, n + width))
    begun[:, 0] = 1.0
    for i in range(n):
        begun[:, i + 1 : i + 1 + width] += begun[:, i : i + 1] * ends[:, i]
    inside: Floats = (ends.sum(axis=2) > 0).astype(np.float64)
    return begun[:, :n] * inside


def _share(part: Floats, whole: Floats, most: float = 1.0) -> Floats:
    """Part / whole, at most 1 where sums differ in their last bits; nan where whole is 0."""
    share: Floats = np.full(part.shape, np.nan)
    np.divide(part, whole, out=share, where=whole > 0)
    return share.clip(max=most)


def _ratio(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator > 0 else math.nan
