"""Does `service.monitor.worth` find the best depth and the speed-up? Engines with known costs, and noisy counters.

    python -m benchmarks.worth [--engines 12]     # prints a table; seeded; a minute or two

An engine has step times of its own and an acceptance. It answers RL batches whose sequences end one after the other:
the batch size falls all the time. An agent scrapes its counters every 5 s (`rl_hooks.engines.step_times`).
A step has 3 % of noise, and one stretch in twenty is spoilt (a pause: twice to five times the time). Asked are 24 batch
sizes from the smallest to the largest that was seen. "Linear" engines have no bend in their costs; "roofline" engines
wait for memory or for arithmetic, whichever is longer. A depth counts as right where its true speed-up is within 1 % of
the best one's. Simulated.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from rl_hooks.engines.counters import Counts, Snapshot
from rl_hooks.engines.step_times import StepSums
from service.monitor.records import StepSample
from service.monitor.worth import StepTime, pooled, speedups, tokens_per_round

DEPTHS = 6
#: RL batches that an engine answers, tokens of the longest answer, and the agent's interval.
BURSTS = 8
LONGEST = 4000
SCRAPE_SECONDS = 5.0
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


def reported(time: Time, depth: int, rng: np.random.Generator) -> list[StepSample]:
    """What the agent beside one engine reports after some RL batches, whose sequences end one after the other."""
    books, clock, scraped = StepSums(), 0.0, 0.0
    outputs = steps = waited = 0.0
    before: Snapshot | None = None
    pause = 1.0
    for _ in range(BURSTS):
        ends = np.sort(rng.integers(LONGEST // 20, LONGEST, int(np.exp(rng.uniform(1, np.log(256))))))
        at = np.arange(int(ends[-1]))
        running = len(ends) - np.searchsorted(ends, at, side="right")
        for batch in running:
            seconds = time(float(batch), depth) * pause * float(np.exp(0.03 * rng.standard_normal()))
            clock, outputs, steps, waited = clock + seconds, outputs + batch, steps + 1, waited + batch * seconds
            if clock - scraped >= SCRAPE_SECONDS:
                rounds = int(outputs) if depth else 0
                counts = Counts(rounds, rounds * depth, 0, (0,), None)
                now = Snapshot(counts, times=(outputs, steps, waited, float(batch)))
                if before is not None:
                    books.add(before, now)
                before, scraped = now, clock
                pause = rng.uniform(2, 5) if rng.random() < 0.05 else 1.0
    return [StepSample(**one) for one in books.document()]


def judge(kind: Callable[[np.random.Generator], Time], depths: Sequence[int], engines: int, seed: int = 0) -> Found:
    """Fit what engines report that ran with `depths`, and ask."""
    answered: list[bool] = []
    right: list[bool] = []
    within: list[bool] = []
    for number in range(engines):
        rng = np.random.default_rng([seed, number])
        time, keep = kind(rng), rng.uniform(0.5, 0.9)
        tokens = tokens_per_round([keep ** (j + 1) for j in range(DEPTHS)])
        cells = pooled(one for depth in depths for one in reported(time, depth, rng))
        fitted = StepTime.fit(cells)
        if fitted is None:
            continue
        sizes = np.geomspace(*fitted.batches, 24).tolist()
        for batch, row in zip(sizes, speedups(fitted, tokens, sizes), strict=True):
            truth = [tokens[k] * time(batch, 0) / time(batch, k) for k in range(DEPTHS + 1)]
            answered.append(not np.isnan(row).any())
            if answered[-1]:
                best = int(np.argmax(row))
                right.append(bool(truth[best] >= 0.99 * max(truth)))
                within.append(bool(abs(row[best] / truth[best] - 1) <= 0.05))
    return Found(_share(answered), _share(right), _share(within))


def _share(found: Sequence[bool]) -> float:
    return float(np.mean(found)) if found else float("nan")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=int, default=12)
    engines = parser.parse_args().engines
    print("| engine | depths it ran with | answered | best depth right | speed-up within 5 % |\n|---|---|---|---|---|")
    for name, kind in (("linear", linear), ("roofline", roofline)):
        for depths in ((0, 2, 4, 6), (0, 4), (2, 6), (4,), (0,)):
            found = judge(kind, depths, engines)
            print(
                f"| {name} | {depths} | {found.answered:.0%} | {found.right:.1%} | {found.within:.1%} |".replace(
                    "nan%", "-"
                )
            )


if __name__ == "__main__":
    main()
