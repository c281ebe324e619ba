"""How often does an engine's canary swap an equal drafter back, and how often a worse one? Simulated; seeded.

    nice python -m benchmarks.canary [--runs 60] [--worlds NAME ...]

The shipped `Canary` is fed the counts of a simulated engine that changes from one version to another: an equal one, one
whose log odds of acceptance are lower by 0.4 and 0.8 (α 14 and 28 % lower), and a dead one.
*Just begun*: the engine has done 2,000 rounds with the version before; else 40,000. 20 minutes on one core.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from rl_hooks.agent.canary import Canary, CanaryResult, CanaryRule
from rl_hooks.engines.counting.counters import Counts

_DEPTH: Final = 4
#: Log odds that a draft is accepted, by position, given that all before it were.
_SOUND: Final = np.array([0.94, 1.59, 1.39, 1.82])
_WORSE: Final = (0.0, 0.4, 0.8, 6.0)


@dataclass(frozen=True)
class World:
    """What an engine serves: eight answers to each prompt one after the other, as in GRPO, `running` at a time.

    `prompt_sd`, `answer_sd`: of the log odds. `steps`: engine steps from one scrape to the next. A `very_hard` share of
    the prompts has log odds lower by 3. `prompts`: of a step of RL; `easy_first`: in the order of their difficulty;
    `waits`: the next step begins when all answers of this one have ended.
    """

    name: str
    running: int
    tokens: int
    prompt_sd: float
    answer_sd: float
    steps: int = 4
    prompts: int = 16
    very_hard: float = 0.0
    easy_first: bool = False
    waits: bool = False


WORLDS: Final = (
    World("usual", 32, 60, 0.35, 0.35),
    World("prompts unlike each other", 32, 60, 0.9, 0.6),
    World("unlike, 400 tokens", 32, 400, 0.9, 0.6),
    World("unlike, 1,200 tokens", 64, 1200, 0.9, 0.6, steps=2, prompts=64),
    World("5 % very hard, 400 tokens", 32, 400, 0.35, 0.35, very_hard=0.05),
    World("unlike, easy ones first", 32, 200, 0.9, 0.6, prompts=64, easy_first=True),
    World("unlike, 8 running", 8, 200, 0.9, 0.6),
    World("one prompt at a time", 8, 400, 0.9, 0.3, steps=8),
    World("unlike, 5 tokens", 32, 5, 0.9, 0.6),
    World("64 prompts, 100 tokens", 64, 100, 0.6, 0.4, prompts=64),
    World("64 prompts, unlike", 64, 100, 0.9, 0.6, prompts=64),
    World("steps that wait", 64, 100, 0.6, 0.4, waits=True),
    World("4,096 rounds a scrape", 256, 400, 0.6, 0.4, steps=16, prompts=64),
)


@dataclass
class Traffic:
    """An engine in a world. `shift`: of the log odds, for another drafter."""

    world: World
    draw: np.random.Generator
    shift: float = 0.0
    _waiting: list[tuple[float, int]] = field(default_factory=list)
    _odds: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))  # [running]
    _left: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, dtype=np.int64))  # [running], tokens

    def scrape(self) -> Counts:
        """What was counted since the last scrape."""
        rounds, positions = 0, np.zeros(_DEPTH, dtype=np.int64)
        for _ in range(self.world.steps):
            self._admit()
            log_odds = self._odds[:, None] + self.shift + _SOUND  # [running, depth]
            passed = (self.draw.random(log_odds.shape) < 1 / (1 + np.exp(-log_odds))).cumprod(axis=1).sum(axis=1)
            accepted = np.minimum(passed, self._left - 1)
            rounds += len(accepted)
            positions += (accepted[:, None] > np.arange(_DEPTH)).sum(axis=0)
            self._left = self._left - accepted - 1
            self._odds, self._left = self._odds[self._left > 0], self._left[self._left > 0]
        return Counts(rounds, _DEPTH * rounds, int(positions.sum()), tuple(map(int, positions)), None, 5.0)

    def _admit(self) -> None:
        free = self.world.running - len(self._odds)
        while free and not (self.world.waits and len(self._odds)) and len(self._waiting) < free:
            self._waiting += self._step()
        new, self._waiting = self._waiting[:free], self._waiting[free:]
        self._odds = np.concatenate([self._odds, [odds for odds, _ in new]])
        self._left = np.concatenate([self._left, np.array([tokens for _, tokens in new], dtype=np.int64)])

    def _step(self) -> list[tuple[float, int]]:
        """The answers of one step of RL."""
        world, draw = self.world, self.draw
        prompts = draw.normal(0.0, world.prompt_sd, world.prompts) - 3.0 * (
            draw.random(world.prompts) < world.very_hard
        )
        ordered = sorted(prompts, reverse=True) if world.easy_first else list(prompts)
        return [
            (prompt + draw.normal(0.0, world.answer_sd), max(2, int(draw.poisson(world.tokens))))
            for prompt in ordered
            for _ in range(8)
        ]


def trial(world: World, seed: int, worse: float = 0.0, before: int = 2_000) -> CanaryResult:
    """The verdict on a version that is worse by that much, in an engine that began empty and did `before` rounds."""
    traffic, canary = Traffic(world, np.random.default_rng(seed)), Canary(CanaryRule())
    canary.loaded("a", exempt=True)
    while before > 0:
        counts = traffic.scrape()
        before -= counts.rounds
        canary.count("a", counts, now=0.0)
    canary.loaded("b", exempt=False)
    traffic.shift = -worse
    while (verdict := canary.count("b", traffic.scrape(), now=0.0)) is None:
        pass
    return verdict


def table(worlds: Sequence[World], runs: int) -> None:
    """Print how many of the runs were swapped back; a quarter of them for versions that are worse."""
    print(f"{'world':<28}{'engine':<12}{'equal':>10}" + "".join(f"{f'-{worse:g}':>10}" for worse in _WORSE[1:]))
    for world in worlds:
        for name, before in (("just begun", 2_000), ("warm", 40_000)):
            line = f"{world.name:<28}{name:<12}"
            for worse in _WORSE:
                many = runs if worse == 0.0 else max(1, runs // 4)
                back = sum(not trial(world, int(1000 * worse) + n, worse, before).passed for n in range(many))
                line += f"{f'{back}/{many}':>10}"
            print(line, flush=True)


def main() -> None:
    """Print the table of the chosen worlds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=60)
    parser.add_argument("--worlds", nargs="*", default=[world.name for world in WORLDS])
    given = parser.parse_args()
    table([world for world in WORLDS if world.name in given.worlds], given.runs)


if __name__ == "__main__":
    main()
