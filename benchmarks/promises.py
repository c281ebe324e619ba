"""What publishes promise over a whole run, and what they bring afterwards. Simulated; seeded; the shipped gate.

    python -m benchmarks.promises [--runs 40]

A run has up to 12 publishes. A challenger is trained in parts and looked at after each on new rollouts (8 prompts of 2
siblings, noisy, where nothing else is said) until the shipped `Trial` publishes it; its promise is the expected gain,
corrected by what the run's promises brought so far (`Kept`). Realised is the gain on the rollouts of the next five
claims. In each course the true gain is set.
The table has realised to expected and to promised gain, logarithms added up, and the share of the runs in which the
latter lies within 0.8 to 1.25.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from benchmarks.gate_error import World, batch
from drafter.replay.gate import GainPosterior, Trial, compare
from service.worker.promotion.promises import Kept, Promise

PUBLISHES: Final = 12
LOOKS: Final = 150
CLAIMS: Final = 5
FEW: Final = World("8 prompts of 2 siblings", 8, 2, prompt_sd=0.06, rollout_sd=0.05)


@dataclass(frozen=True)
class Course:
    """How the true gain goes."""

    name: str
    part: float = 0.0  # by which a part of a training raises it
    share: float = 0.125  # of a whole training in a part
    world: World = FEW
    first: float = 0.0  # by which the first part after a publish raises it more
    square: float = 0.0  # times the square of the parts since the last publish
    later: float = 0.0  # of `part`: by which each claim after the publish raises it, as the version before grows stale
    slower: float = 1.0  # factor of `part` from publish to publish, down to 0.3 %

    def gain(self, publishes: int, parts: int, claims: int) -> float:
        """After so many publishes, parts of trainings since the last one, and claims since it was served."""
        part = self.part if self.slower == 1.0 else max(self.part * self.slower**publishes, 0.003)
        return self.first + part * (parts + self.later * claims) + self.square * parts**2


COURSES: Final = (
    Course("each part brings 0.5 %", 0.005),
    Course("each part brings 1 %", 0.01),
    Course("each part brings 2 %", 0.02),
    Course("1.5 % each, and the version before loses 0.5 % a claim", 0.015, later=1 / 3),
    Course("the policy moves fast, then slowly", 0.03, later=0.5, slower=0.67),
    Course("the gain grows by the square of the parts", square=0.0015),
    Course("5 % by the first part, 0.2 % by others", 0.002, first=0.048),
    Course("1 % each, the mix of prompts moves", 0.01, world=replace(FEW, mix_sd=0.1)),
    Course("1 % each, prompts of 16 siblings", 0.01, world=replace(FEW, siblings=16)),
    Course("1 % each, and it varies by 2 % a claim", 0.01, world=replace(FEW, claim_sd=0.02)),
    Course("whole trainings of 2 %, 64 prompts of 8", 0.02, share=1.0, world=World("64 of 8", 64, 8)),
    Course("nothing to gain"),
    Course("each part costs 0.2 %", -0.002),
)


@dataclass
class Sums:
    """Of a run: publishes, and logarithmic gains added up over them."""

    publishes: int = 0
    expected: float = 0.0
    promised: float = 0.0
    realised: float = 0.0


def play(course: Course, rng: np.random.Generator) -> Sums:
    """One run."""

    def look(k: int, j: int) -> float:
        return course.gain(sums.publishes, k, j) + course.world.claim_sd * float(rng.standard_normal())

    sums, kept, posterior, looks = Sums(), Kept(), GainPosterior(), 0
    while sums.publishes < PUBLISHES:
        trial, parts, promoted = Trial(promise=posterior.known()), 0, False
        while not promoted:
            if looks == LOOKS:
                return sums
            looks, parts = looks + 1, parts + 1
            trial.trained(course.share)
            trial.take(compare(*batch(course.world, look(parts, 0), rng)))
            promoted = trial.verdict().promote
        gain = trial.verdict().gain
        later = [compare(*batch(course.world, look(parts, j), rng)).log_gain for j in range(1, CLAIMS + 1)]
        sums.publishes += 1
        sums.expected += math.log1p(gain)
        sums.promised += kept.correction * math.log1p(gain)
        sums.realised += float(np.mean(later))
        rollouts = CLAIMS * course.world.prompts * course.world.siblings
        promise = Promise("new", "old", gain, gain, 1.0, math.exp(float(np.mean(later))), rollouts=rollouts)
        kept.add(promise, promise.weight)
        posterior = trial.promise.next()
    return sums


def main(argv: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=40)
    runs = parser.parse_args(argv).runs
    print("| course | publishes a run | realised / expected | realised / promised | runs within 0.8 to 1.25 |")
    print("|---|---|---|---|---|")
    for number, course in enumerate(COURSES):
        played = [play(course, np.random.default_rng([number, seed])) for seed in range(runs)]
        each = [one.realised / one.promised for one in played if one.publishes]
        names = ("expected", "promised", "realised")
        expected, promised, realised = (sum(getattr(one, name) for one in played) for name in names)
        publishes = sum(one.publishes for one in played) / runs
        told = f"{realised / expected:.2f} | {realised / promised:.2f}" if each else "– | –"
        share = f"{np.mean([0.8 <= one <= 1.25 for one in each]):.0%}" if each else "–"
        print(f"| {course.name} | {publishes:.1f} | {told} | {share} |", flush=True)


if __name__ == "__main__":
    main()
