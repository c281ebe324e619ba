"""Do archived versions serve again where that gains, and only there. Simulated; seeded.

    python -m benchmarks.returns [--runs 20] [--claims 200] [--only TEXT]

Two drafters know one kind of prompts each. Claims follow one another as each world says, and the shipped `Gate` looks
at them; its archive holds both drafters and one that knows neither, or the first drafter is one of the two. The
candidate is always a little worse, so nothing but the archive can win. Engines have what a claim chose with the next
one. The table says by how much the mean log α lies above that of the drafter which was served first, how much that of
the better one for each claim would, and how often another version was served. Then how many claims of a policy that
comes back it takes until the version that knows it is chosen, and the same after claims that alternated.
"""

from __future__ import annotations

import argparse
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from drafter.replay.acceptance import Replay
from service.settings import Settings
from service.worker.lineage import CANDIDATE
from service.worker.promotion.evidence import Fresh
from service.worker.promotion.gate import Gate

Floats = npt.NDArray[np.float64]

DEPTH: Final = 4
FIRST, OF_A, OF_B = "v1-none", "v2-a", "v3-b"


@dataclass(frozen=True)
class World:
    """How claims follow one another, and what drafters are worth on them."""

    name: str
    shares: Callable[[int, np.random.Generator], list[float]]  # of each claim, the share of prompts of kind B
    gap: float = 0.2  # logarithm by which the drafter that knows a kind is better on it
    first: str = FIRST  # the run's oldest version, which every claim is scored with; it may be the one of A
    harder: float = 0.0  # logarithm by which prompts of kind B are harder for everyone
    prompts: int = 16
    siblings: int = 4
    spread: float = 0.05  # of the log of rounds, between prompts and between rollouts


def periods(a: int, b: int | None = None) -> Callable[[int, np.random.Generator], list[float]]:
    """So many claims of A, so many of B, and so on."""
    b = a if b is None else b
    return lambda claims, _: ([*[0.0] * a, *[1.0] * b] * (claims // (a + b) + 1))[:claims]


def at_random(stays: float) -> Callable[[int, np.random.Generator], list[float]]:
    """The next claim is of the same kind with that probability."""

    def draw(claims: int, rng: np.random.Generator) -> list[float]:
        return [float(turns % 2) for turns in np.cumsum(rng.random(claims) > stays)]

    return draw


def mixed(spread: float) -> Callable[[int, np.random.Generator], list[float]]:
    """Both kinds in each claim, in shares that vary."""
    return lambda claims, rng: [float(np.clip(share, 0.0, 1.0)) for share in rng.normal(0.5, spread, claims)]


def drift(claims: int, _: np.random.Generator) -> list[float]:
    """From A to B, slowly."""
    return [number / claims for number in range(claims)]


def excess(world: World, version: str, of_b: Floats) -> Floats:
    """Logarithm of the rounds that a version takes, beside those of the one that knows the prompt."""
    known = {FIRST: np.full(of_b.size, 2.0), OF_A: of_b, OF_B: 1.0 - of_b}
    return world.gap * known[version]


@dataclass(frozen=True)
class Part:
    """Stands for a batch of some of a claim's rollouts."""

    places: tuple[int, ...]
    policy_version: int

    def select(self, places: Sequence[int]) -> Part:
        """Those at these places."""
        return Part(tuple(self.places[i] for i in places), self.policy_version)


class Run:
    """One run, which serves the drafter of A at first."""

    def __init__(self, world: World, rng: np.random.Generator) -> None:
        versions = [world.first, *(v for v in (OF_A, OF_B) if v != world.first)]
        lineage: Any = SimpleNamespace(archived=lambda: versions, existing=lambda v: v, waiting=dict, published=0)
        self.gate = Gate(Settings(), lineage)
        self.gate.archive.replay = self._replayed  # type: ignore[method-assign]
        self.gate.begin(OF_A)
        self._world, self._rng = world, rng
        self._replays = dict[str, Replay]()
        self.served, self.swaps = OF_A, 0

    def _replayed(self, version: str, batches: Sequence[Any]) -> Replay:
        return Replay.concat([self._replays[version].select(part.places) for part in batches])

    def claim(self, number: int, share: float) -> tuple[float, float, float]:
        """Log α of what was served, of the one that was served at first, and of the better one for this claim."""
        world, rng = self._world, self._rng
        size, known = world.prompts * world.siblings, np.arange(world.prompts) >= round(share * world.prompts)
        of_b = np.repeat(rng.permutation(1.0 - known), world.siblings)
        tokens = np.ceil(
            np.repeat(rng.lognormal(5.0, 0.4, world.prompts), world.siblings) * rng.uniform(0.7, 1.3, size)
        )
        common = world.harder * of_b + self._noise(1.0) - math.log(3.5)
        for version in (FIRST, OF_A, OF_B):
            self._replays[version] = _pack(tokens, common + excess(world, version, of_b) + self._noise(0.5))
        worse = np.log(self._replays[self.served].rounds / tokens) + 0.02 + self._noise(0.3)
        self._replays[CANDIDATE] = _pack(tokens, worse)
        scored = {CANDIDATE, self.served, world.first, self.gate.outcomes.watched or self.served}
        prompts, places = [f"{number}/{i}" for i in range(world.prompts)], tuple(range(size))
        fresh = Fresh(
            (Part(places, number),),  # type: ignore[arg-type]
            (places,),
            {version: self._replays[version] for version in sorted(scored)},
            tuple(np.repeat(prompts, world.siblings).tolist()),
            places,
            by_prompt=True,
        )
        of_a, of_b_too, ours = (math.log(self._replays[version].alpha) for version in (OF_A, OF_B, self.served))
        self.gate.outcomes.settle(fresh)
        winner = self.gate.judge(fresh, self.served)[0]
        if winner.verdict.promote:
            evidence = winner.evidence.model_copy(update={"judged_to": f"{number}-0", "train_on": False})
            self.gate.promoted(winner.version, self.served, evidence)
            self.served, self.swaps = winner.version, self.swaps + 1
        return ours, of_a, max(of_a, of_b_too)

    def _noise(self, scale: float) -> Floats:
        world, rng = self._world, self._rng
        of_prompts = np.repeat(rng.standard_normal(world.prompts), world.siblings)
        return scale * world.spread * (of_prompts + rng.standard_normal(of_prompts.size))


def _pack(tokens: Floats, log_rounds: Floats) -> Replay:
    """`log_rounds`: by token."""
    rounds = np.clip(tokens * np.exp(log_rounds), tokens / (DEPTH + 1), tokens)
    empty = np.zeros((tokens.size, DEPTH))
    return Replay(tokens, rounds, empty, empty)


def run(world: World, shares: Sequence[float], rng: np.random.Generator) -> tuple[float, float, int]:
    """Mean log α above what was served first: of what was served, of the better one; swaps."""
    played = Run(world, rng)
    found = np.array([played.claim(number, share) for number, share in enumerate(shares)])
    return float(np.mean(found[:, 0] - found[:, 1])), float(np.mean(found[:, 2] - found[:, 1])), played.swaps


def return_after(world: World, rng: np.random.Generator, before: Sequence[float], back: float) -> int | None:
    """Claims of a policy that comes back until what knows it is chosen, 1 at best; None: not in 20.

    `before`: what claims were until then. `back`: what they are from then on.
    """
    played, wanted = Run(world, rng), OF_B if back else OF_A
    for number, share in enumerate(before):
        played.claim(number, share)
    if played.served == wanted:
        return 0
    for number in range(20):
        played.claim(len(before) + number, back)
        if played.served == wanted:
            return number + 1
    return None


def _of(name: str, shares: Callable[[int, np.random.Generator], list[float]]) -> list[World]:
    return [
        World(f"{name}: 20 %", shares),
        World(f"{name}: 20 %, A the oldest", shares, first=OF_A),
        World(f"{name}: 5 %, 32 prompts, B the oldest", shares, gap=0.05, prompts=32, first=OF_B),
        World(f"{name}: 10 %, B harder, 64 prompts", shares, gap=0.1, harder=0.3, prompts=64, siblings=1),
    ]


WORLDS: Final = (
    *(w for p in (1, 2, 3, 4, 8, 16) for w in _of(f"each {p}", periods(p))),
    *(w for a, b in ((2, 1), (4, 1), (8, 1), (8, 2), (1, 4), (1, 8)) for w in _of(f"A {a}, B {b}", periods(a, b))),
    *(w for stays in (0.5, 0.8) for w in _of(f"the same again in {stays:.0%}", at_random(stays))),
    *_of("mixed in each claim", mixed(0.25)),
    *_of("slow drift", drift),
    *_of("nothing changes", lambda claims, _: [0.0] * claims),
)


def _apart(name: str, shares: Callable[[int, np.random.Generator], list[float]]) -> list[World]:
    return [
        World(
            f"{name}: 8 %, B harder, 8 prompts of 8", shares, gap=0.08, harder=-0.2, prompts=8, siblings=8, first=OF_B
        ),
        World(f"{name}: 30 %, noisy, 16 prompts", shares, gap=0.3, spread=0.15, siblings=1, first=OF_A),
        World(f"{name}: 12 %, 128 prompts of 4", shares, gap=0.12, prompts=128),
        World(f"{name}: 20 %, 10 prompts of 1", shares, prompts=10, siblings=1, first=OF_A),
        World(f"{name}: 10 %, 20 prompts of 1", shares, gap=0.1, prompts=20, siblings=1),
    ]


#: Nothing was chosen in these.
SET_ASIDE: Final = (
    *(w for p in (1, 2, 3, 5, 6, 12) for w in _apart(f"each {p}", periods(p))),
    *(w for a, b in ((1, 2), (3, 1), (6, 1), (10, 3)) for w in _apart(f"A {a}, B {b}", periods(a, b))),
    *(w for stays in (0.3, 0.6, 0.7, 0.9) for w in _apart(f"the same again in {stays:.0%}", at_random(stays))),
    *_apart("mixed in each claim", mixed(0.4)),
    *_apart("slow drift", drift),
    *_apart("nothing changes", lambda claims, _: [0.0] * claims),
)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--claims", type=int, default=200)
    parser.add_argument("--only", default="", help="worlds with this in their name")
    options = parser.parse_args()
    print("| world | served | the better one | swaps |\n|---|---|---|---|")
    for number, world in enumerate([*WORLDS, *SET_ASIDE]):
        if options.only not in world.name:
            continue
        found = []
        for seed in range(options.runs):
            rng = np.random.default_rng([number, seed])
            found.append(run(world, world.shares(options.claims, rng), rng))
        served, best, swaps = np.mean(found, axis=0)
        print(f"| {world.name} | {served:+.2%} | {best:+.2%} | {swaps:.1f} |")
    print("\n| the policy comes back | claims until its version is chosen |\n|---|---|")
    for world in (*_of("", drift), *_apart("", drift)):
        for away in (2, 4, 8, 16, 40):
            _returns(f"after {away}{world.name}", world, [0.0] * 12 + [1.0] * away, 0.0, options.runs)
        turns = [float(n % 2) for n in range(20)]
        _returns(f"20 claims in turns, 16 of A, B{world.name}", world, [*turns, *[0.0] * 16], 1.0, options.runs)


def _returns(name: str, world: World, before: Sequence[float], back: float, runs: int) -> None:
    took = [return_after(world, np.random.default_rng([len(before), seed]), before, back) for seed in range(runs)]
    counted = Counter("none in 20" if claims is None else str(claims) for claims in took)
    print(f"| {name} | {', '.join(f'{claims}: {n} times' for claims, n in sorted(counted.items()))} |")


if __name__ == "__main__":
    main()
