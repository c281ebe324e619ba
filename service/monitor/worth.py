"""What acceptance is worth in time: speed-up by batch size, the best depth, where speculation begins to cost.

Pure: no torch, no Redis, no clock. α alone does not tell: the same acceptance speeds up a small batch, which waits for
memory, and slows down a large one, which waits for arithmetic (SmartSpec, arXiv 2406.14066; Sequoia, arXiv 2402.12374).
What decides is the time of an engine step at batch size B with k drafts for each sequence,

    t(B, k) = c0 + c1·B + c2·((n^p + n0^p)^(1/p) - n0) + k·(d0 + d1·B),      n = B·(k + 1),      c, d ≥ 0

c0: the step itself. c1: each sequence, its attention for one. c2: each of the n tokens that a step verifies, from n0
on, where arithmetic takes longer than reading the weights (the roofline). p: how sharp that bend is. d0, d1: each of
the k drafter steps, and of the drafts in it. The five costs are fitted to what an engine counted, once for each of
three p and each n0 that is tried: relative errors, outliers weighed down (Huber), no cost below zero. The p and n0 that
fit best are taken. A time that the samples do not determine, or that the form does not fit, is unknown, and so is every
batch size far from those that were seen. With S_j the probability that j drafts are accepted, a round of depth k emits
τ_k = 1 + S_1 + ... + S_k tokens, and the speed-up over plain decoding is τ_k · t(B, 0) / t(B, k).
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, product
from typing import Final

import numpy as np
import numpy.typing as npt

from service.monitor.records import StepSample

Floats = npt.NDArray[np.float64]

#: A predicted step time with a larger relative standard error is unknown.
_MOST_ERROR: Final = 0.03
#: For batch sizes further than this factor from all that were seen, nothing is predicted.
_FAR: Final = 1.5
_PARAMETERS: Final = 5
#: Relative noise of a mean step time, where the samples are too few to tell.
_NOISE: Final = 0.2
#: Ranges of a possible sample; others are left out.
_BATCH: Final = (1e-2, 65536.0)
_STEP_SECONDS: Final = (1e-6, 1e3)
#: The largest batch size in a plan of depths.
_LARGEST: Final = 4096
#: How many cells (depth and batch size) are fitted, those with the most steps; and the most steps that an
#: engine counts for in one.
_CELLS: Final = 128
_MOST_STEPS: Final = 1_000_000
#: Sharpness of the bend that is tried; the last is a corner.
_SHARPNESS: Final = (2.0, 4.0, 100.0)
#: Bends that are tried first, quantiles of the tokens a step; then, so many times, so many between the best one's
#: neighbours. A bend that is 15 % off makes a step there 10 % off.
_BENDS: Final = 8
_REFINEMENTS: Final = 3
_BETWEEN: Final = 4
#: Residuals beyond this multiple of their typical size count less and less (Huber 1964).
_HUBER: Final = 1.345
_REWEIGHTINGS: Final = 6
_RIDGE: Final = 1e-12
#: All sets of columns but the empty one, [31, 5] of 0 and 1, small ones first.
_SETS: Final = np.array(sorted(product((0.0, 1.0), repeat=_PARAMETERS), key=sum)[1:])
_SILENT: Final = "no engine has said how long its steps take"


@dataclass(frozen=True, slots=True, eq=False)
class StepTime:
    """The fitted time of an engine step."""

    costs: Floats  # [5] c0, c1, c2, d0, d1, each times its `scale`, in seconds
    scale: Floats  # [5]
    bend: tuple[float, float]  # n0, tokens, and p
    covariance: Floats  # [5, 5] of `costs`
    misfit: float  # typical relative difference between a sample and the fit
    known: Floats  # [5, n], an orthonormal basis of what the samples say something about
    batches: tuple[float, float]  # smallest and largest seen

    @classmethod
    def fit(cls, samples: Sequence[StepSample]) -> StepTime | None:
        """Fit to what was counted and `pooled`; None where there is nothing to fit."""
        if not samples:
            return None
        tokens = np.array([s.batch * (s.depth + 1) for s in samples])
        best: list[tuple[float, StepTime]] = []
        for sharpness in _SHARPNESS:
            fits: dict[float, tuple[float, StepTime]] = {}
            bends = np.quantile(tokens, np.linspace(0.05, 0.95, _BENDS))
            for _ in range(1 + _REFINEMENTS):
                for bend in bends.tolist():
                    fits[bend] = fits.get(bend) or _fit(samples, (bend, sharpness))
                tried = sorted(fits)
                at = min(range(len(tried)), key=lambda i: fits[tried[i]][0])
                bends = np.geomspace(tried[max(0, at - 1)], tried[min(at + 1, len(tried) - 1)], _BETWEEN + 2)[1:-1]
            best.append(fits[tried[at]])
        return min(best, key=lambda one: one[0])[1]

    def times(self, batches: Sequence[float], depths: int) -> Floats:
        """Times of a step, [len(batches), depths + 1], in seconds; nan where the samples do not determine them."""
        rows = _rows(np.array(batches)[:, None], np.arange(depths + 1), self.bend) / self.scale
        time = rows @ self.costs
        variance = np.maximum(np.einsum("nki,ij,nkj->nk", rows, self.covariance, rows), 0.0)
        error = np.sqrt(variance + (self.misfit * time) ** 2)  # more samples do not mend a form that does not fit
        rest = np.linalg.norm(rows - rows @ self.known @ self.known.T, axis=-1)
        told = rest <= 1e-6 * np.linalg.norm(rows, axis=-1)  # else it depends on a cost that no sample shows
        sizes = np.array(batches)[:, None]
        near = (self.batches[0] / _FAR <= sizes) & (sizes <= self.batches[1] * _FAR)
        found: Floats = np.where(told & near & (time > 0) & (error <= _MOST_ERROR * time), time, np.nan)
        return found


def _sound(one: StepSample) -> bool:
    return (
        one.steps > 0
        and 0 <= one.depth <= 64
        and _BATCH[0] <= one.batch <= _BATCH[1]
        and _STEP_SECONDS[0] <= one.seconds / one.steps <= _STEP_SECONDS[1]
    )


def _rows(batch: Floats, depth: npt.NDArray[np.int64], bend: tuple[float, float]) -> Floats:
    """What each cost is multiplied with, [..., 5]."""
    (n0, p), tokens = bend, batch * (depth + 1)
    over = np.exp(np.logaddexp(p * np.log(tokens), p * np.log(n0)) / p) - n0
    return np.stack(np.broadcast_arrays(1.0, batch, over, depth, depth * batch), axis=-1)


def _fit(used: Sequence[StepSample], bend: tuple[float, float]) -> tuple[float, StepTime]:
    """Fit with one bend; also how badly it fits, outliers counted as Huber does."""
    times = np.array([s.seconds / s.steps for s in used])
    sizes, depths = np.array([s.batch for s in used]), np.array([s.depth for s in used])
    design = _rows(sizes, depths, bend) / times[:, None]  # relative: all times are 1
    scale = np.linalg.norm(design, axis=0)
    scale[scale == 0.0] = 1.0  # nothing is known of it
    design /= scale
    weights = np.ones(len(used))
    for _ in range(_REWEIGHTINGS):
        root = np.sqrt(weights)
        costs = _nonnegative(design * root[:, None], root)
        residuals = np.abs(design @ costs - 1.0)
        typical = max(float(np.median(residuals)) / 0.6745, 1e-9)
        weights = np.minimum(1.0, _HUBER * typical / np.maximum(residuals, 1e-12))
    _, singular, directions = np.linalg.svd(design * np.sqrt(weights)[:, None], full_matrices=False)
    kept = singular > 1e-6 * singular[0]
    basis = directions[kept].T
    squares = float((weights * residuals**2).sum())
    rank = int(kept.sum())
    # With about as many costs as samples the residuals do not show the noise: then it is taken to be large.
    noise = max(squares / max(1, len(used) - rank), (_NOISE if len(used) <= rank + 2 else 1e-6) ** 2)
    covariance = noise * basis @ np.diag(1.0 / singular[kept] ** 2) @ basis.T
    return squares, StepTime(costs, scale, bend, covariance, typical, basis, (float(sizes.min()), float(sizes.max())))


def _nonnegative(design: Floats, wanted: Floats) -> Floats:
    """Least squares without negative coefficients: of all sets of columns whose fit has none, the best one."""
    normal, target = design.T @ design, design.T @ wanted
    # A column that is left out has those of the unit matrix instead; the small ridge is for columns that are alike.
    chosen = normal * _SETS[:, :, None] * _SETS[:, None, :] + np.eye(_PARAMETERS) * (1 - _SETS[:, :, None])
    ridge = _RIDGE * np.trace(normal) * np.eye(_PARAMETERS)
    costs = np.linalg.solve(chosen + ridge, (target * _SETS)[:, :, None])[:, :, 0]
    errors = np.einsum("si,ij,sj->s", costs, normal, costs) - 2 * costs @ target
    errors = np.where((costs >= 0).all(axis=1), errors, np.inf)
    found: Floats = costs[np.argmax(errors <= errors.min() + _RIDGE * len(wanted))]
    return found


def tokens_per_round(survival: Sequence[float]) -> list[float]:
    """τ_0, τ_1, ...: tokens that a round of each depth emits. `survival[j - 1]`: share of rounds that keep j drafts."""
    return [1.0, *(1.0 + float(total) for total in np.cumsum(survival))]


def speedups(step: StepTime, tokens: Sequence[float], batches: Sequence[float]) -> Floats:
    """Tokens per second with each depth over those without, [len(batches), len(tokens)]; nan where it is unknown."""
    times = step.times(batches, len(tokens) - 1)
    found: Floats = np.array(tokens) * times[:, :1] / times
    return found


def depth_by_batch(step: StepTime, tokens: Sequence[float], largest: int) -> list[tuple[int, int, int]] | None:
    """The list for vLLM's `num_speculative_tokens_per_batch_size`: (first, last, depth), from 1 to `largest`.

    A batch size below all that were seen has the depth of the smallest seen; None where one further up is unknown.
    """
    smallest = max(1, math.ceil(step.batches[0] / _FAR))
    batches = range(smallest, min(largest, _LARGEST) + 1)
    found = speedups(step, tokens, batches)
    if not len(batches) or np.isnan(found).any():
        return None
    depths = np.argmax(found, axis=1)
    starts = [0, *(np.flatnonzero(np.diff(depths)) + 1).tolist(), len(batches)]
    plan = [(batches[a], batches[b - 1], int(depths[a])) for a, b in pairwise(starts)]
    return [(1, plan[0][1], plan[0][2]), *plan[1:]]


def pooled(samples: Iterable[StepSample]) -> list[StepSample]:
    """Samples of several engines, alike in hardware and model: one for each depth and batch size in factors of √2.

    Its step takes the median of the engines' steps, each engine weighted by how many it took: one that reports
    nonsense does not move it.
    """
    cells: defaultdict[tuple[int, int], list[StepSample]] = defaultdict(list)
    for one in samples:
        if _sound(one):
            cells[one.depth, round(2 * math.log2(one.batch))].append(one)
    found = sorted((_median(ones) for ones in cells.values()), key=lambda one: -one.steps)[:_CELLS]
    return sorted(found, key=lambda one: (one.depth, one.batch))


def _median(ones: Sequence[StepSample]) -> StepSample:
    ranked = sorted(ones, key=lambda one: one.seconds / one.steps)
    weights = np.minimum([one.steps for one in ranked], _MOST_STEPS)
    total = np.cumsum(weights)
    middle = ranked[int(np.searchsorted(total, total[-1] / 2))]
    steps, batch = int(total[-1]), float(np.average([one.batch for one in ranked], weights=weights))
    return StepSample(batch, middle.depth, steps, steps * middle.seconds / middle.steps)


@dataclass(frozen=True, slots=True)
class AtBatch:
    """At one batch size: the best depth, its speed-up over plain decoding, and that of the depth in use."""

    batch: int
    best_depth: int
    best_speedup: float
    speedup: float


@dataclass(frozen=True, slots=True)
class Worth:
    """What acceptance is worth in time; `unknown` says why nothing is known.

    `costs_from`: the smallest batch size, of those asked, at which the depth in use is slower than plain decoding.
    `plan`: (first, last, depth), for vLLM's `num_speculative_tokens_per_batch_size`.
    """

    unknown: str | None = _SILENT
    depth: int | None = None
    batches: tuple[AtBatch, ...] = ()
    costs_from: int | None = None
    plan: tuple[tuple[int, int, int], ...] | None = None


def worth(samples: Sequence[StepSample], survival: Sequence[float]) -> Worth:
    """What a drafter that keeps `survival[j - 1]` of its rounds' j-th drafts is worth, at powers of two that were seen.

    The depth in use is the one that the engines took most steps with.
    """
    cells = pooled(samples)
    if not cells:
        return Worth("the step times that engines report are impossible" if samples else _SILENT)
    taken: Counter[int] = Counter()
    for one in cells:
        taken[one.depth] += one.steps
    depth = max(taken, key=lambda k: (k > 0, taken[k], k))
    if not 1 <= depth <= len(survival):
        return Worth(f"engines draft {depth} tokens a round; the served drafter was replayed for {len(survival)}")
    step, tokens = StepTime.fit(cells), tokens_per_round(survival)
    sizes = [
        2**i for i in range(13) if min(c.batch for c in cells) / _FAR <= 2**i <= max(c.batch for c in cells) * _FAR
    ]
    if step is None or not sizes:
        return Worth("the step times that engines report are of batch sizes that are never evaluated")
    values = speedups(step, tokens, sizes)
    best = [int(np.argmax(row)) for row in values]  # where one is nan, its place
    found = tuple(
        AtBatch(size, k, float(row[k]), float(row[depth]))
        for size, k, row in zip(sizes, best, values, strict=True)
        if not np.isnan(row).any()
    )
    if not found and step.misfit > _MOST_ERROR:
        return Worth(
            f"step times differ by {step.misfit:.0%} from the costs that are fitted (a mixture of experts reads more "
            "weights the larger a batch is), so they tell no best depth"
        )
    if not found:
        seen = ", ".join(map(str, sorted(taken)))
        more = "let one engine run at another depth for a while" if len(taken) == 1 else "more batch sizes would tell"
        return Worth(f"step times at depth {seen} do not tell a step from its drafts yet; {more}")
    plan = depth_by_batch(step, tokens, found[-1].batch)
    slow = (one.batch for one in found if one.speedup < 1.0)
    return Worth(None, depth, found, next(slow, None), None if plan is None else tuple(plan))


@dataclass(slots=True)
class DraftingTime:
    """The share of the time that engines spend in steps with drafts, from the step times that they report.

    A gain in α shortens those steps' part and nothing else: steps without drafts, the trainer's part of an RL step, and
    batch sizes at which an engine does not speculate stay as they are.
    """

    share: float | None = None  # None: no engine has said enough
    _from: dict[str, tuple[float, float]] = field(default_factory=dict)  # reporter -> when, seconds with drafts by then
    _shares: dict[str, float] = field(default_factory=dict)  # reporter -> of its last window
    _samples: list[StepSample] = field(default_factory=list)  # of all reporters, as they said last

    def feed(self, heard: Mapping[str, tuple[float, Sequence[StepSample]]], window_seconds: float) -> None:
        """Take the cumulative step times of each reporter, and when it reported them.

        A window lasts `window_seconds` or more, and should hold a few policy versions, because engines of a synchronous
        trainer rest between two. An engine that no longer reports says nothing about the time since. The share is the
        median of the engines' last windows, so that none outvotes the others by reporting often.
        """
        begun = {}
        for name, (now, samples) in heard.items():
            if not samples:
                continue
            drafting = sum(one.seconds for one in samples if one.depth > 0 and _sound(one))
            since, before = self._from.get(name, (now, drafting))
            if drafting < before:  # the engine was restarted
                since, before = now, drafting
            if 0.0 < now - since >= window_seconds:
                self._shares[name] = min(1.0, (drafting - before) / (now - since))
                since, before = now, drafting
            begun[name] = since, before
        self._from = begun
        self._shares = {name: share for name, share in self._shares.items() if name in begun}
        if self._shares:
            self.share = float(np.median(list(self._shares.values())))
        self._samples = [one for _, samples in heard.values() for one in samples]

    @property
    def may_pay(self) -> bool:
        """Whether a drafter that is always right could make these engines faster, as far as their step times tell.

        With a poor drafter the best depth may be 0 everywhere, which says nothing about a better one.
        """
        deepest = max((one.depth for one in self._samples if _sound(one)), default=0)
        found = worth(self._samples, [1.0] * deepest)
        return found.unknown is not None or any(one.best_depth > 0 for one in found.batches)


def step_speedup(generation_share: float, speedup: float) -> float:
    """Speed-up of a whole RL step (Amdahl). Generation, a share of it without speculation, takes 1 / `speedup`."""
    return 1.0 / (1.0 - generation_share + generation_share / speedup)
