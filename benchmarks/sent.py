"""What becomes of a drafter that was trained elsewhere and sent to the gate. Simulated; seeded.

    nice python -m benchmarks.sent [--runs 200] [--worlds NAME ...]

It is looked at with each claim, by the shipped `compare`, the trial that archived versions get (`archive_trial`, behind
the first and the former drafter), `Trial.verdict` and `given_up`, until it is published or refused. The worlds are
those of `benchmarks/gate_error.py`, and noisier ones. The table says for each true gain over the served drafter in how
many of the runs it was published, after how many looks (the median, of those), how many were refused as no better, how
many because all looks were spent, and after how many looks a refusal came.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np

from benchmarks.gate_error import WORLDS, World, batch
from drafter.replay.gate import compare
from service.worker.promotion.gate import SENT_LOOKS, archive_trial, given_up

GAINS: Final = (-0.2, -0.05, -0.01, 0.0, 0.005, 0.01, 0.02, 0.05, 0.1)
_PLACE: Final = 3
NOISY: Final = (
    World("noisy, 8 prompts of 4", 8, 4, prompt_sd=0.15, rollout_sd=0.15),
    World("noisy, tails, 4 prompts of 8", 4, 8, prompt_sd=0.2, rollout_sd=0.1, tails=True),
)
_MIN_GAIN: Final = 0.005
_SHOWN: Final = ("32 prompts", "64 prompts of 8 siblings", "8 prompts of 4 siblings", "heavy tails",
                 "gain varies by 1 % a claim", *(world.name for world in NOISY))  # fmt: skip


class Outcome(NamedTuple):
    """How one drafter fared."""

    published: bool
    looks: int
    why: str  # it was refused


def send(world: World, gain: float, rng: np.random.Generator) -> Outcome:
    """Send one drafter of that true gain and look until there is a verdict."""
    trial, looks = archive_trial(_PLACE), 0
    while True:
        looks += 1
        true = gain + world.claim_sd * float(rng.standard_normal())
        trial.take(compare(*batch(world, true, rng)))
        verdict = trial.verdict(min_gain=_MIN_GAIN)
        if verdict.promote:
            return Outcome(True, looks, "")
        if why := given_up(verdict, 0, _MIN_GAIN):
            return Outcome(False, looks, why)


def table(worlds: Sequence[World], runs: int) -> None:
    """Print the table."""
    print(f"{'world':<28}{'true gain':>10}{'published':>11}{'looks':>7}{'no better':>11}{'in doubt':>10}{'looks':>7}")
    for world in worlds:
        for gain in GAINS:
            rng = np.random.default_rng([7, round(1e4 * gain) + 10_000, *world.name.encode()])
            found = [send(world, gain, rng) for _ in range(runs)]
            won, lost = [o.looks for o in found if o.published], [o.looks for o in found if not o.published]
            shares = [
                np.mean([o.why.startswith(text) for o in found]) for text in ("it is no better", f"{SENT_LOOKS} looks")
            ]
            medians = [f"{np.median(looks):.0f}" if looks else "-" for looks in (won, lost)]
            print(f"{world.name:<28}{gain:>+10.1%}{len(won) / runs:>11.1%}{medians[0]:>7}{shares[0]:>11.1%}"
                  f"{shares[1]:>10.1%}{medians[1]:>7}")  # fmt: skip


def main() -> None:
    """Print the table of the chosen worlds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--worlds", nargs="*", default=_SHOWN)
    given = parser.parse_args()
    table([world for world in (*WORLDS, *NOISY) if world.name in given.worlds], given.runs)


if __name__ == "__main__":
    main()
