"""Does `service.monitor.worth` find the best depth and the speed-up? Engines with known costs, and noisy counters.

    python -m benchmarks.worth [--engines 40]     # prints a table; seeded; seconds

An engine has step times of its own and an acceptance; its counters are of 40 windows, each at one batch size and one of
the depths it was run with, with 3 % of noise in the mean step time, and one window in twenty spoilt (a pause: twice to
five times the time). Asked are 24 batch sizes from the smallest to the largest that was seen. "Linear" engines have no
bend in their costs; "roofline" engines wait for memory or for arithmetic, whichever is longer. A depth counts as right
where its true speed-up is within 1 % of the best one's. Simulated.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from service.monitor.records import StepSample
from service.monitor.worth import StepTime, best_depth, speedup, tokens_per_round

DEPTHS = 6
Time = Callable[[float, int], float]


def linear(rng: np.random.Generator) -> Time:
    """Costs of the fitted form, over two orders of magnitude of batch sizes."""
    c0, d0 = rng.uniform(8e-3, 30e-3), rng.uniform(2e-4, 2e-3)
    c1, d1 = c0 * 10 ** rng.uniform(-3, -1.7), d0 * 10 ** rng.uniform(-3, -1.7)
    return lambda batch, depth: float(c0 + c1 * batch * (depth + 1) + depth * (d0 + d1 * batch))


def roofline(rng: np.random.Generator) -> Time:
    """A step takes the longer of reading the weights and of the arithmetic on its tokens."""
    read, drafter = rng.uniform(8e-3, 30e-3), rng.uniform(2e-4, 2e-3)
    token = read / rng.uniform(60, 300)
    return lambda batch, depth: float(max(read, token * batch * (depth + 1)) + depth * drafter)


@dataclass(frozen=True)
class Found:
    """Over engines and batch sizes: share answered, of these share right, and the error of the speed-up."""

    answered: float
    right: float
    within: float  # share of the batch sizes at which the speed-up at the best depth is within 5 %


def judge(kind: Callable[[np.random.Generator], Time], depths: Sequence[int], engines: int, seed: int = 0) -> Found:
    """Fit engines that ran with `depths`, and ask."""
    answered: list[bool] = []
    right: list[bool] = []
    within: list[bool] = []
    for number in range(engines):
        rng = np.random.default_rng([seed, number])
        time, keep = kind(rng), rng.uniform(0.5, 0.9)
        tokens = tokens_per_round([keep ** (j + 1) for j in range(DEPTHS)])
        samples = []
        for window in range(40):
            batch, depth = float(np.exp(rng.uniform(0, np.log(256)))), depths[window % len(depths)]
            spoilt = rng.uniform(2, 5) if rng.random() < 0.05 else 1.0
            seconds = 100 * time(batch, depth) * spoilt * np.exp(0.03 * rng.standard_normal())
            samples.append(StepSample(batch, depth, 100, float(seconds)))
        fitted = StepTime.fit(samples)
        assert fitted is not None
        for batch in np.geomspace(*fitted.batches, 24):
            truth = [tokens[k] * time(batch, 0) / time(batch, k) for k in range(DEPTHS + 1)]
            best = best_depth(fitted, tokens, float(batch))
            answered.append(best is not None)
            if best is not None:
                right.append(bool(truth[best.depth] >= 0.99 * max(truth)))
                found = speedup(fitted, tokens, float(batch), best.depth)
                within.append(found is not None and abs(found / truth[best.depth] - 1) <= 0.05)
    return Found(float(np.mean(answered)), _share(right), _share(within))


def _share(found: Sequence[bool]) -> float:
    return float(np.mean(found)) if found else float("nan")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=int, default=40)
    engines = parser.parse_args().engines
    print("| engine | depths it ran with | answered | best depth right | speed-up within 5 % |\n|---|---|---|---|---|")
    for name, kind in (("linear", linear), ("roofline", roofline)):
        for depths in ((0, 2, 4, 6), (0, 4), (2, 6), (4,), (0,)):
            found = judge(kind, depths, engines)
            print(f"| {name} | {depths} | {found.answered:.0%} | {found.right:.1%} | {found.within:.1%} |")


if __name__ == "__main__":
    main()
