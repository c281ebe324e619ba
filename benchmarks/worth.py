"""Does `service.monitor.worth` find the best depth and the speed-up? Engines with known costs, and noisy counters.

    python -m benchmarks.worth [--engines 12] [--seed 0]     # prints a table; seeded; some minutes

An engine has step times of its own and an acceptance. It answers RL batches whose sequences end one after the other:
the batch size falls all the time. An agent scrapes its counters every 5 s (`rl_hooks.engines.counting.step_times`).
A step has 3 % of noise, and one stretch in twenty is spoilt (a pause: twice to five times the time). Asked are 24 batch
sizes from the smallest to the largest that was seen. The docstring of each kind of engine says what its steps cost. A
depth counts as right where its true speed-up is within 1 % of the best one's. The last three kinds were made after the
fit. Simulated.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from rl_hooks.engines.counting.counters import Counts, Snapshot
from rl_hooks.engines.counting.step_times import StepSums
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
    read, drafter, corner = _parts(rng)
    return lambda batch, depth: read * max(1.0, batch * (depth + 1) / corner) + depth * drafter


def attention(rng: np.random.Generator) -> Time:
    """The same, and each sequence costs its attention, however many tokens it verifies."""
    plain, each = roofline(rng), 10 ** rng.uniform(-4.5, -3.5)
    return lambda batch, depth: plain(batch, depth) + each * batch


def drafter_bends(rng: np.random.Generator) -> Time:
    """The same, and the drafter waits for memory or arithmetic too, from another batch size on."""
    read, drafter, corner = _parts(rng)
    own = rng.uniform(60, 300)
    return lambda batch, depth: read * max(1.0, batch * (depth + 1) / corner) + depth * drafter * max(1.0, batch / own)


def padded(rng: np.random.Generator) -> Time:
    """A step is as long as one of the next size that a CUDA graph was recorded for."""
    plain = roofline(rng)

    def padded_step(batch: float, depth: int) -> float:
        tokens = max(1.0, batch * (depth + 1))
        step = 8 if tokens <= 256 else 16
        size = 2 ** np.ceil(np.log2(tokens)) if tokens <= 8 else step * np.ceil(tokens / step)
        return plain(float(size) / (depth + 1), depth)

    return padded_step


def soft(rng: np.random.Generator) -> Time:
    """A bend without a corner: memory and arithmetic wait for each other in part."""
    read, drafter, corner = _parts(rng)
    p = rng.uniform(2, 6)
    return lambda batch, depth: float(read * (1 + (batch * (depth + 1) / corner) ** p) ** (1 / p) + depth * drafter)


def overlapped(rng: np.random.Generator) -> Time:
    """Set aside: the shorter of reading and arithmetic is hidden but for a share of it."""
    read, drafter, corner = _parts(rng)
    shown = rng.uniform(0.1, 0.5)

    def step(batch: float, depth: int) -> float:
        arithmetic = batch * (depth + 1) / corner
        return read * (max(1.0, arithmetic) + shown * min(1.0, arithmetic)) + depth * drafter

    return step


def two_corners(rng: np.random.Generator) -> Time:
    """Set aside: part of the layers bend at one size, the others at another."""
    read, drafter, corner = _parts(rng)
    share, later = rng.uniform(0.3, 0.7), corner * rng.uniform(1.5, 4)

    def step(batch: float, depth: int) -> float:
        tokens = batch * (depth + 1)
        return read * (share * max(1.0, tokens / corner) + (1 - share) * max(1.0, tokens / later)) + depth * drafter

    return step


def experts(rng: np.random.Generator) -> Time:
    """Set aside: a mixture of experts reads more weights the more tokens there are, until it has read all."""
    read, drafter, corner = _parts(rng)
    count, dense = rng.choice([16, 64]), rng.uniform(0.2, 0.5)

    def step(batch: float, depth: int) -> float:
        tokens = batch * (depth + 1)
        reading = dense + (1 - dense) * (1 - (1 - 2 / count) ** tokens)
        return float(read * max(reading, tokens / corner) + depth * drafter)

    return step


def _parts(rng: np.random.Generator) -> tuple[float, float, float]:
    """Seconds to read the weights, seconds of a drafter step, tokens from which arithmetic takes longer."""
    return rng.uniform(8e-3, 30e-3), rng.uniform(2e-4, 2e-3), rng.uniform(60, 300)


KINDS = (linear, roofline, attention, drafter_bends, padded, soft, overlapped, two_corners, experts)


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
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    print("| engine | depths it ran with | answered | best depth right | speed-up within 5 % |\n|---|---|---|---|---|")
    for kind in KINDS:
        name = kind.__name__.replace("_", " ")
        for depths in ((0, 2, 4, 6), (0, 4), (2, 6), (4,), (0,)):
            found = judge(kind, depths, asked.engines, asked.seed)
            print(
                f"| {name} | {depths} | {found.answered:.0%} | {found.right:.1%} | {found.within:.1%} |".replace(
                    "nan%", "-"
                )
            )


if __name__ == "__main__":
    main()
