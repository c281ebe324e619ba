"""How often the gate is wrong over a whole run, how fast it is right, and what it promises. Simulated; seeded.

    python -m benchmarks.gate_error [--runs 400] [--looks 100] [--worlds NAME ...]

A run looks at one challenger up to 100 times, each time on new rollouts, with the shipped `compare` and `Trial` and the
default settings. In each world the true gain is set; the table says in how many runs the challenger was ever published,
after how many looks (the median, of those published), and the mean gain promised to those that were, beside the gain
that they then have.

Two more tables, of 8 prompts of 4 siblings: the promises over four publishes where trainings are cut into parts, after
four publishes of whole ones; and how many looks a gain of 5 % needs after so many at an equal challenger. Then the
error over 400 looks.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt

from drafter.replay.acceptance import Replay
from drafter.replay.gate import GainPosterior, Trial, compare

Floats = npt.NDArray[np.float64]

DEPTH: Final = 4
LONG: Final = 400
GAINS: Final = (-0.05, -0.01, 0.0, 0.005, 0.01, 0.02, 0.05)


@dataclass(frozen=True)
class World:
    """How rollouts and the two drafters' rounds on them come about."""

    name: str
    prompts: int
    siblings: int
    prompt_sd: float = 0.03  # of the log ratio of rounds between prompts
    rollout_sd: float = 0.03  # and between siblings
    tails: bool = False  # Student's t with 3 degrees of freedom, lengths and α spread over their whole range
    mix_sd: float = 0.0  # of the share of prompts of a kind on which the challenger is 4 % better, else 4 % worse
    claim_sd: float = 0.0  # of the true gain from claim to claim
    per_training: float = 0.0  # by which each further training changes the gain
    rare: float = (
        0.0  # share of the prompts on which the challenger takes `rare_loss` more rounds, else that much fewer
    )
    rare_loss: float = 0.0
    quiet: int = 0  # looks at which the gain does not vary, before the publish after which the run begins


WORLDS: Final = (
    World("32 prompts", 32, 1),
    World("64 prompts of 8 siblings", 64, 8),
    World("8 prompts of 4 siblings", 8, 4),
    World("4 prompts of 8 siblings", 4, 8),
    World("heavy tails", 32, 1, tails=True),
    World("heavy tails, 8 prompts of 4", 8, 4, tails=True),
    World("prompt mix that moves", 32, 1, mix_sd=0.1),
    World("gain varies by 0.5 % a claim", 32, 1, claim_sd=0.005),
    World("gain varies by 1 % a claim", 32, 1, claim_sd=0.01),
    World("gain varies by 2 % a claim", 32, 1, claim_sd=0.02),
    World("gain varies by 2 % a claim, 64 of 8", 64, 8, claim_sd=0.02),
    World("gain varies by 3 % a claim", 32, 1, claim_sd=0.03),
    World("2 % better on 95 % of the prompts, 38 % worse on 5 %", 8, 4, rare=0.05, rare_loss=0.38),
    World("2 % better on 95 % of the prompts, 38 % worse on 5 %: 32", 32, 1, rare=0.05, rare_loss=0.38),
    World("each training costs 0.2 %", 32, 1, per_training=-0.002),
    World("each training brings 0.2 %", 32, 1, per_training=0.002),
    World("gain varies by 1.5 % a claim", 32, 1, claim_sd=0.015),
    World("gain varies by 1.5 % a claim, after 40 quiet looks", 32, 1, claim_sd=0.015, quiet=40),
    World("gain varies by 2 % a claim, after 40 quiet looks", 32, 1, claim_sd=0.02, quiet=40),
    World("gain varies by 2 % a claim, 64 of 8, after 40 quiet looks", 64, 8, claim_sd=0.02, quiet=40),
    World("gain varies by 2 % a claim, 8 of 4, after 200 quiet looks", 8, 4, claim_sd=0.02, quiet=200),
    World("32 prompts, after 40 quiet looks", 32, 1, quiet=40),
)

FEW: Final = World("8 prompts of 4 siblings", 8, 4, prompt_sd=0.06)


def batch(world: World, gain: float, rng: np.random.Generator) -> tuple[Replay, Replay, npt.NDArray[np.int64]]:
    """Replays of challenger and served drafter on one claim's rollouts, and the prompt of each.

    The ratio of expected rounds is 1 + gain: the noise is multiplied on rounds with mean 1.
    """
    groups = np.repeat(np.arange(world.prompts), world.siblings)
    R = groups.size
    spread = (lambda n: rng.standard_t(3, n) / np.sqrt(3.0)) if world.tails else rng.standard_normal
    tokens = np.ceil(rng.lognormal(5.0, 1.0 if world.tails else 0.4, world.prompts))[groups]
    tokens = np.ceil(tokens * rng.uniform(0.7, 1.3, R))
    alpha = 1.2 + 3.0 * (rng.beta(0.7, 0.7, world.prompts) if world.tails else rng.beta(5.0, 5.0, world.prompts))
    served = tokens / np.clip(alpha[groups], 1.0, DEPTH + 1.0)
    noise = world.prompt_sd * spread(world.prompts)[groups] + world.rollout_sd * spread(R)
    if world.mix_sd:
        share = float(np.clip(0.5 + world.mix_sd * rng.standard_normal(), 0.0, 1.0))
        noise = noise + np.where(rng.random(world.prompts) < share, 0.02, -0.02)[groups]
    if world.rare:
        fewer = world.rare * world.rare_loss / (1.0 - world.rare)
        noise = noise + np.where(rng.random(world.prompts) < world.rare, world.rare_loss, -fewer)[groups]
    rounds = np.clip(served / (1.0 + gain) * (1.0 + np.clip(noise, -0.4, 0.4)), tokens / (DEPTH + 1), tokens)
    return _replay(tokens, rounds), _replay(tokens, served), groups.astype(np.int64)


def _replay(tokens: Floats, rounds: Floats) -> Replay:
    empty = np.zeros((tokens.size, DEPTH))
    return Replay(tokens, rounds, empty, empty)


@dataclass(frozen=True)
class Run:
    """How one run ended. All None where nothing was published."""

    looks: int | None = None
    promised: float | None = None
    gain: float | None = None  # true, of what was published


def run(
    world: World,
    gain: float,
    rng: np.random.Generator,
    looks: int = 100,
    *,
    trial: Trial | None = None,
    share: float = 1.0,
) -> Run:
    """Look until the challenger is published, at most `looks` times, each time after that share of a training."""
    trial = trial or Trial(promise=GainPosterior().known())
    for _ in range(world.quiet):
        trial.trained()
        trial.take(compare(*batch(world, 0.0, rng)))
    if world.quiet:
        trial = trial.next()
        trial.promise.known()
    for look in range(looks):
        true = gain + look * share * world.per_training + world.claim_sd * float(rng.standard_normal())
        trial.trained(share)
        trial.take(compare(*batch(world, true, rng)))
        verdict = trial.verdict()
        if verdict.promote:
            return Run(look + 1, verdict.gain, true)
    return Run()


def publishes(share: float, per_training: float, rng: np.random.Generator) -> list[Run]:
    """Four publishes of a challenger to which whole trainings bring so much, then four in parts: those are returned."""
    world, promise, found = replace(FEW, per_training=per_training), GainPosterior(), []
    for part in [1.0] * 4 + [share] * 4:
        trial = Trial(promise=promise.known())
        found.append(run(world, part * per_training, rng, trial=trial, share=part))
        promise = trial.promise.next()
    return [one for one in found[4:] if one.looks is not None]


def late(before: int, gain: float, rng: np.random.Generator) -> int | None:
    """Looks that a gain needs to be published after so many looks at an equal challenger; None: not in 100."""
    trial = Trial(promise=GainPosterior().known())
    for _ in range(before):
        trial.trained()
        trial.take(compare(*batch(FEW, 0.0, rng)))
    return run(FEW, gain, rng, trial=trial).looks


def per_look(world: World, rng: np.random.Generator, looks: int) -> float:
    """Share of single looks at an equal challenger whose z lies above the 95 % quantile: 0.05 where it is honest."""
    over = 0
    for _ in range(looks):
        look = compare(*batch(world, 0.0, rng))
        over += not look.fault and look.log_gain > 1.6449 * look.error
    return over / looks


def table(worlds: Sequence[World], runs: int, looks: int, show: Callable[[str], None] = print) -> None:
    """Print one line per world and gain. What is drawn for a world does not hang on which others are printed."""
    show("| world | true gain | published | median look | promised | true then | error per look |")
    show("|---|---|---|---|---|---|---|")
    for world in worlds:
        number = WORLDS.index(world)
        honest = per_look(world, np.random.default_rng([number, 1000]), 10 * runs)
        for place, gain in enumerate(GAINS):
            rng = np.random.default_rng([number, place])
            ended = [run(world, gain, rng, looks) for _ in range(runs)]
            done = [one for one in ended if one.looks is not None]
            after = f"{np.median([one.looks for one in done]):.0f}" if done else "–"
            promised = f"{np.mean([one.promised for one in done]):+.2%}" if done else "–"
            true = f"{np.mean([one.gain for one in done]):+.2%}" if done else "–"
            mark = f"{honest:.3f}" if gain == 0.0 else ""
            show(f"| {world.name} | {gain:+.1%} | {len(done) / runs:.3f} | {after} | {promised} | {true} | {mark} |")


def parts(runs: int, show: Callable[[str], None] = print) -> None:
    """Print what is promised where trainings are cut, and how soon a late gain is seen."""
    show("\n| part of a training | it gains, whole | looks, mean | promised | true then | promised / true |")
    show("|---|---|---|---|---|---|")
    for number, share in enumerate((1.0, 0.25, 0.125)):
        for place, gain in enumerate((0.02, 0.05, 0.1)):
            rng = np.random.default_rng([100 + number, place])
            done = [one for _ in range(runs) for one in publishes(share, gain, rng)]
            promised, true = (float(np.mean([getattr(one, of) for one in done])) for of in ("promised", "gain"))
            looks = np.mean([one.looks for one in done])
            show(f"| {share:g} | {gain:.0%} | {looks:.1f} | {promised:+.2%} | {true:+.2%} | {promised / true:.2f} |")
    show("\n| looks at an equal challenger before | looks until +5 % is published, median | 90 % quantile |")
    show("|---|---|---|")
    for number, before in enumerate((0, 10, 30, 100)):
        rng = np.random.default_rng(200 + number)
        needed = [100 if (found := late(before, 0.05, rng)) is None else found for _ in range(runs)]
        show(f"| {before} | {np.median(needed):g} | {np.quantile(needed, 0.9):g} |")
    rng = np.random.default_rng([300])
    wrong = sum(run(FEW, 0.0, rng, LONG).looks is not None for _ in range(runs))
    show(f"\nan equal challenger was published in {wrong} of {runs} runs of {LONG} looks")


def main(argv: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=400)
    parser.add_argument("--looks", type=int, default=100)
    parser.add_argument("--worlds", nargs="*", default=[], help="names; all where none is given")
    options = parser.parse_args(argv)
    table([w for w in WORLDS if not options.worlds or w.name in options.worlds], options.runs, options.looks)
    parts(options.runs)


if __name__ == "__main__":
    main()
