"""What acceptance is worth in time: speed-up by batch size, the best depth, where speculation begins to cost.

Pure: no torch, no Redis, no clock. α alone does not tell: the same acceptance speeds up a small batch, which waits for
memory, and slows down a large one, which waits for arithmetic (SmartSpec, arXiv 2406.14066; Sequoia, arXiv 2402.12374).
What decides is the time of an engine step at batch size B with k drafts for each sequence,

    t(B, k) = c0 + c1·n + c2·max(0, n - n0) + k·(d0 + d1·B),      n = B·(k + 1),      c, d ≥ 0:

the step itself, the tokens n that it verifies, which cost more each from n0 on, where arithmetic takes longer than
reading the weights (the roofline), and k drafter steps. The five are fitted to what an engine counted, for each n0 of a
grid: relative errors, outliers weighed down (Huber), none below zero; the n0 that fits best is taken. What the samples
do not determine is unknown, and so is every batch size far from those that were seen. With S_j the probability that j
drafts are accepted, a round of depth k emits τ_k = 1 + S_1 + ... + S_k tokens, and the speed-up over plain decoding is
τ_k · t(B, 0) / t(B, k).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, combinations
from typing import Final

import numpy as np
import numpy.typing as npt

from service.monitor.records import StepSample

Floats = npt.NDArray[np.float64]

#: A predicted step time whose relative standard error is above that is unknown.
_MOST_ERROR: Final = 0.03
#: Batch sizes further than this factor from all that were seen are not spoken of.
_FAR: Final = 1.5
_PARAMETERS: Final = 5
#: Bends that are tried: quantiles of the tokens a step.
_BENDS: Final = 16
#: Residuals beyond so many of their typical size count less and less (Huber 1964).
_HUBER: Final = 1.345
_REWEIGHTINGS: Final = 6
_SILENT: Final = "no engine has said how long its steps take"


@dataclass(frozen=True, slots=True, eq=False)
class StepTime:
    """The fitted time of an engine step."""

    costs: Floats  # [5] c0, c1, c2, d0, d1, each times its `scale`, in seconds
    scale: Floats  # [5]
    bend: float  # n0, tokens
    covariance: Floats  # [5, 5] of `costs`
    known: Floats  # [5, n], an orthonormal basis of what the samples say something about
    batches: tuple[float, float]  # smallest and largest seen

    @classmethod
    def fit(cls, samples: Sequence[StepSample]) -> StepTime | None:
        """Fit to what was counted; None where there is nothing to fit."""
        used = [s for s in samples if s.steps > 0 and s.batch > 0 and s.depth >= 0 and 0 < s.seconds < math.inf]
        if not used:
            return None
        tokens = np.array([s.batch * (s.depth + 1) for s in used])
        bends = np.unique(np.quantile(tokens, np.linspace(0.05, 0.95, _BENDS)))
        fits = [_fit(used, float(bend)) for bend in bends]
        return min(fits, key=lambda one: one[0])[1]

    def seconds(self, batch: float, depth: int) -> float | None:
        """Time of a step; None where the samples do not determine it."""
        if not self.batches[0] / _FAR <= batch <= self.batches[1] * _FAR:
            return None
        row = np.array(_row(batch, depth, self.bend)) / self.scale
        if np.linalg.norm(row - self.known @ (self.known.T @ row)) > 1e-6 * np.linalg.norm(row):
            return None  # it has a part that no sample says anything about
        time = float(row @ self.costs)
        error = math.sqrt(max(float(row @ self.covariance @ row), 0.0))
        return time if time > 0 and error <= _MOST_ERROR * time else None


def _row(batch: float, depth: int, bend: float) -> tuple[float, ...]:
    tokens = batch * (depth + 1)
    return 1.0, tokens, max(0.0, tokens - bend), float(depth), depth * batch


def _fit(used: Sequence[StepSample], bend: float) -> tuple[float, StepTime]:
    """Fit with one bend; also how badly it fits, outliers counted as Huber does."""
    times = np.array([s.seconds / s.steps for s in used])
    design = np.array([_row(s.batch, s.depth, bend) for s in used]) / times[:, None]  # relative: all times are 1
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
    noise = max(squares / max(1, len(used) - int(kept.sum())), 1e-12)
    covariance = noise * basis @ np.diag(1.0 / singular[kept] ** 2) @ basis.T
    sizes = [s.batch for s in used]
    return squares, StepTime(costs, scale, bend, covariance, basis, (min(sizes), max(sizes)))


def _nonnegative(design: Floats, wanted: Floats) -> Floats:
    """Least squares without negative coefficients: the best of all sets of columns whose fit has none."""
    best, costs = math.inf, np.zeros(_PARAMETERS)
    for chosen in chain.from_iterable(combinations(range(_PARAMETERS), n) for n in range(1, _PARAMETERS + 1)):
        part = np.linalg.lstsq(design[:, chosen], wanted, rcond=1e-9)[0]
        error = float(((design[:, chosen] @ part - wanted) ** 2).sum())
        if (part >= 0).all() and error < best * (1 - 1e-9):
            best, costs = error, np.zeros(_PARAMETERS)
            costs[list(chosen)] = part
    return costs


def tokens_per_round(survival: Sequence[float]) -> list[float]:
    """τ_0, τ_1, ...: tokens that a round of each depth emits. `survival[j - 1]`: share of rounds that keep j drafts."""
    return [1.0, *(1.0 + float(total) for total in np.cumsum(survival))]


@dataclass(frozen=True, slots=True)
class Best:
    """The best depth at one batch size, and its speed-up over plain decoding. Depth 0: speculation costs."""

    depth: int
    speedup: float


def speedup(step: StepTime, tokens: Sequence[float], batch: float, depth: int) -> float | None:
    """Tokens per second with `depth` drafts over those without; None where a step time is unknown."""
    plain, drafted = step.seconds(batch, 0), step.seconds(batch, depth)
    return None if plain is None or drafted is None else tokens[depth] * plain / drafted


def best_depth(step: StepTime, tokens: Sequence[float], batch: float) -> Best | None:
    """The depth with the largest speed-up; None where that of any depth is unknown."""
    found = [speedup(step, tokens, batch, depth) for depth in range(len(tokens))]
    known = [value for value in found if value is not None]
    if len(known) < len(found):
        return None
    depth = int(np.argmax(known))
    return Best(depth, known[depth])


def depth_by_batch(step: StepTime, tokens: Sequence[float], largest: int) -> list[tuple[int, int, int]] | None:
    """The list for vLLM's `num_speculative_tokens_per_batch_size`: (first, last, depth), from 1 to `largest`.

    A batch size below all that were seen has the depth of the smallest seen; None where one further up is unknown.
    """
    found: list[tuple[int, int, int]] = []
    smallest = max(1, math.ceil(step.batches[0] / _FAR))
    for batch in range(smallest, largest + 1):
        best = best_depth(step, tokens, batch)
        if best is None:
            return None
        if found and found[-1][2] == best.depth:
            found[-1] = (found[-1][0], batch, best.depth)
        else:
            found.append((batch if found else 1, batch, best.depth))
    return found or None


def pooled(samples: Iterable[StepSample]) -> list[StepSample]:
    """Samples of several engines, alike in hardware and model: one for each depth and batch size in factors of √2."""
    cells: dict[tuple[int, int], list[float]] = {}
    for one in samples:
        if one.steps <= 0 or one.batch <= 0:
            continue
        cell = cells.setdefault((one.depth, round(2 * math.log2(one.batch))), [0.0, 0, 0.0])
        for i, more in enumerate((one.batch * one.steps, one.steps, one.seconds)):
            cell[i] += more
    found = sorted(cells.items())
    return [StepSample(outputs / steps, depth, int(steps), time) for (depth, _), (outputs, steps, time) in found]


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


def worth(samples: Sequence[StepSample], survival: Sequence[float], depth: int) -> Worth:
    """What a drafter that keeps `survival[j - 1]` of its rounds' j-th drafts is worth, at powers of two that were seen.

    `depth`: the one in use, at most as many as `survival` has.
    """
    if not samples:
        return Worth()
    if not 1 <= depth <= len(survival):
        return Worth("the served drafter was not replayed by position so far")
    step = StepTime.fit(pooled(samples))
    tokens = tokens_per_round(survival)
    if step is None:
        return Worth()
    sizes = [2**i for i in range(20) if step.batches[0] / _FAR <= 2**i <= step.batches[1] * _FAR]
    found = []
    for size in sizes:
        best, now = best_depth(step, tokens, size), speedup(step, tokens, size, depth)
        if best is not None and now is not None:
            found.append(AtBatch(size, best.depth, best.speedup, now))
    if not found:
        seen = sorted({s.depth for s in samples})
        more = "let one engine run at another depth for a while" if len(seen) == 1 else "let engines run on"
        return Worth(f"step times are known at depth {', '.join(map(str, seen))} only, which does not tell; {more}")
    plan = depth_by_batch(step, tokens, found[-1].batch)
    slow = (one.batch for one in found if one.speedup < 1.0)
    return Worth(None, depth, tuple(found), next(slow, None), None if plan is None else tuple(plan))


def step_speedup(generation_share: float, speedups: Mapping[float, float]) -> float:
    """Speed-up of a whole RL step (Amdahl), of which generation is `generation_share` without speculation.

    `speedups`: speed-up of generation -> share of the generation time that it applies to. The long tail of a batch, few
    sequences that run on alone, is a share of its own. Shares that do not add up to 1 raise ValueError.
    """
    if not 0 <= generation_share <= 1 or not math.isclose(sum(speedups.values()), 1.0, abs_tol=1e-6):
        raise ValueError(f"expected shares from 0 to 1 that add up to 1, got {generation_share}, {dict(speedups)}")
    return 1.0 / (1.0 - generation_share + generation_share * sum(part / by for by, part in speedups.items()))
