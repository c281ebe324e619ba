"""Does an idle worker idle, wake, and leave alone what training hurts? The shipped `Controller` in simulated worlds.

    python -m benchmarks.idle [--runs 20]     # prints the tables; seeded; about a minute

A world is a served drafter that is `deficit` (in log α) below what training could reach, a candidate that each training
takes a share of its way, the gate's noisy measurement of candidate against served, and α per claim with the world's own
noise. The gate is a lower bound above 0.5 %. Everything else is the shipped class. The first table has nothing to gain
after the first 100 claims; the second has a fall of 5 % that training wins back, at a claim drawn between 200 and 260.
Simulated: shares and counts of claims, no seconds.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median

import numpy as np
import numpy.typing as npt

from service.monitor.controller import Action, Controller, Economy

#: Claims of a world; the first 100 are the run's beginning.
CLAIMS = 600
BEGINNING = 100
#: A fall that has not been won back after so many claims was missed.
MISSED = 100
#: Two trainings in a row where training hurts are rare: that table has so many times the runs.
HURTS_RUNS = 20

Noise = Callable[[np.random.Generator, int, float], npt.NDArray[np.float64]]


@dataclass(frozen=True)
class World:
    """One world. Standard deviations and gains are relative; `noise` makes log α of each claim, of unit variance."""

    name: str
    alpha_sd: float = 0.01
    gain_se: float = 0.008
    noise: str = "independent"
    step: float = 0.0  # what a training does whatever the deficit: negative hurts
    deficit: float = 0.3  # at the start
    share: float = 0.5  # of its way to the best that a training takes the candidate
    drift: float = 0.0  # the policy moves away from the drafters by so much a claim
    fall_every: int = 0  # the policy jumps by 5 % and back, every so many claims
    hurts_after: int = 0  # trainings after which `step` applies
    worker_cost: float = 0.1
    version_seconds: float | None = 60.0
    late: bool = False  # a gain is measured one claim after its training


def noise_of(kind: str, rng: np.random.Generator, claims: int) -> npt.NDArray[np.float64]:
    """What moves log α from claim to claim, of about unit variance."""
    normal = rng.standard_normal(claims)
    if kind == "independent":
        return normal
    if kind == "AR(1) 0.9":
        for t in range(1, claims):
            normal[t] = 0.9 * normal[t - 1] + math.sqrt(1 - 0.81) * normal[t]
        return normal
    if kind == "Student t, 3":
        return rng.standard_t(3, claims) / math.sqrt(3)
    if kind == "mix, single":  # one claim in five has hard prompts
        return np.where(rng.random(claims) < 0.2, -2.0, 0.5) + 0.2 * normal
    if kind == "mix, blocks":  # so do blocks of 25 claims
        hard = rng.random(claims // 25 + 1) < 0.3
        return np.where(np.repeat(hard, 25)[:claims], -1.6, 0.6) + 0.3 * normal
    raise ValueError(kind)


@dataclass(frozen=True)
class Outcome:
    """What became of one run of a world."""

    trained: npt.NDArray[np.bool_]  # by claim
    deficit: npt.NDArray[np.float64]  # of the served drafter after each claim


def live(world: World, seed: int, *, claims: int = CLAIMS, fall_at: int | None = None, fall: float = 0.05) -> Outcome:
    """Run the controller through a world."""
    rng = np.random.default_rng(seed)
    wobble = world.alpha_sd * noise_of(world.noise, rng, claims)
    errors = world.gain_se * rng.standard_normal(claims)
    economy, controller = Economy(worker_cost=world.worker_cost), Controller()
    served = candidate = world.deficit
    trained, deficits, trainings, measured, away = np.zeros(claims, bool), np.zeros(claims), 0, False, False

    def measure(t: int) -> None:
        nonlocal served
        gain = math.expm1(served - candidate) + errors[t]
        promoted = gain - 1.645 * world.gain_se > 0.005
        controller.learn(gain=gain, error=world.gain_se, promoted=promoted, train_seconds=20.0)
        if promoted:
            served = candidate

    for t in range(claims):
        served, candidate = served + world.drift, candidate + world.drift
        jump = fall if t == fall_at else 0.0
        if world.fall_every and t % world.fall_every == world.fall_every - 1:
            jump, away = (-0.05 if away else 0.05), not away
        served, candidate = max(0.0, served + jump), max(0.0, candidate + jump)
        if measured:
            measure(t)
            measured = False
        alpha = 3.5 * math.exp(wobble[t] - served)
        decision = controller.decide(economy, alpha, version_seconds=world.version_seconds)
        if decision.action is not Action.IDLE:
            trained[t], trainings = True, trainings + 1
            candidate = candidate * (1 - world.share)
            if trainings > world.hurts_after:
                candidate -= world.step
            if world.late:
                measured = True
            else:
                measure(t)
        deficits[t] = served
    return Outcome(trained, deficits)


def grid(**more: object) -> list[World]:
    """The bars' grid: sd of α per claim and standard error of a measured gain."""
    return [
        World(f"sd {100 * sd:g} %, SE {100 * se:g} %", alpha_sd=sd, gain_se=se, **more)  # type: ignore[arg-type]
        for sd in (0.0, 0.01, 0.02, 0.06)
        for se in (0.004, 0.008, 0.015)
    ]


#: Worlds that the constants were not chosen in.
OTHERS = [
    World("AR(1) 0.9, sd 2 %", alpha_sd=0.02, noise="AR(1) 0.9"),
    World("AR(1) 0.9, sd 6 %, SE 1.5 %", alpha_sd=0.06, gain_se=0.015, noise="AR(1) 0.9"),
    World("Student t with 3, sd 2 %", alpha_sd=0.02, noise="Student t, 3"),
    World("hard prompts in one claim of five, -10 %", alpha_sd=0.04, noise="mix, single"),
    World("hard prompts in blocks of 25, -9 %", alpha_sd=0.04, noise="mix, blocks"),
    World("gains measured one claim late", alpha_sd=0.02, late=True),
    World("worker costs nothing", alpha_sd=0.02, worker_cost=0.0),
    World("seconds a version unknown", alpha_sd=0.02, version_seconds=None),
    World("SE 4 %", alpha_sd=0.02, gain_se=0.04),
]
#: Where training does harm.
HURTS = [
    World("hurts by 2 %, sd 1 %", alpha_sd=0.01, step=-0.02, deficit=0.0),
    World("hurts by 2 %, sd 6 %, SE 1.5 %", alpha_sd=0.06, gain_se=0.015, step=-0.02, deficit=0.0),
    World("hurts by 2 % after ten good ones", alpha_sd=0.02, step=-0.02, hurts_after=10),
    World(
        "hurts by 2 %, AR(1) 0.9, sd 6 %, SE 1.5 %",
        alpha_sd=0.06,
        gain_se=0.015,
        noise="AR(1) 0.9",
        step=-0.02,
        deficit=0.0,
    ),
    World(
        "hurts by 2 %, hard prompts in blocks of 25, SE 1.5 %",
        alpha_sd=0.04,
        gain_se=0.015,
        noise="mix, blocks",
        step=-0.02,
        deficit=0.0,
    ),
    World("hurts by 5 %, sd 6 %, SE 4 %", alpha_sd=0.06, gain_se=0.04, step=-0.05, deficit=0.0),
]
#: Where it has no business to train, though the drafter lags.
UNPAYABLE = [World("can never pay, falls every 50", alpha_sd=0.02, worker_cost=1e6, fall_every=50)]
#: Where there is something to gain all the time.
MOVING = [
    World("each training gains 5 %", step=0.05, deficit=0.0, share=0.0, gain_se=0.015, alpha_sd=0.02),
    World("policy moves away by 2 % a claim", drift=0.02),
    World("policy moves away by 0.2 % a claim", drift=0.002, alpha_sd=0.02),
    World("gains decay slowly: 3 % of the way each", deficit=1.0, share=0.03, alpha_sd=0.02),
    World("a policy that jumps and returns, every 80", fall_every=80, alpha_sd=0.02),
]


def share_trained(world: World, runs: int) -> float:
    """Share of the claims after the beginning that were trained on."""
    return float(np.mean([live(world, seed).trained[BEGINNING:].mean() for seed in range(runs)]))


def trains_on(world: World, seed: int) -> bool:
    """Whether a run trains on two claims in a row after its beginning."""
    trained = live(world, seed).trained[BEGINNING:]
    return bool((trained[1:] & trained[:-1]).any())


@dataclass(frozen=True)
class Waking:
    """How a fall was answered, over runs: claims until the first training, until all but 1.5 % was won back."""

    trains: float  # median claims
    recovers: float  # median claims
    missed: float  # share of runs


def waking(world: World, runs: int, *, fall: float = 0.05) -> Waking:
    """Drop the served drafter's α by `fall` once, in a world with nothing to gain."""
    trains, recovers = [], []
    for seed in range(runs):
        fall_at = 200 + int(np.random.default_rng(seed).integers(60))
        found = live(world, seed, fall_at=fall_at, claims=fall_at + MISSED, fall=fall)
        back = np.flatnonzero(found.deficit[fall_at:] < 0.015)
        trains.append(_first(np.flatnonzero(found.trained[fall_at:])))
        recovers.append(_first(back))
    return Waking(median(trains), median(recovers), float(np.mean(np.asarray(recovers) >= MISSED)))


def _first(found: Sequence[int] | npt.NDArray[np.int64]) -> int:
    return int(found[0]) if len(found) else MISSED


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=20)
    runs = parser.parse_args().runs
    print("| nothing to gain | claims trained |\n|---|---|")
    for world in [*grid(), *OTHERS, *HURTS, *UNPAYABLE]:
        print(f"| {world.name} | {share_trained(world, runs):.1%} |")
    print("\n| where training hurts | runs with two trainings in a row |\n|---|---|")
    for world in HURTS:
        seeds = range(HURTS_RUNS * runs)
        print(f"| {world.name} | {sum(trains_on(world, seed) for seed in seeds)} of {len(seeds)} |")
    print("\n| something to gain | claims trained | mean lag |\n|---|---|---|")
    for world in MOVING:
        found = [live(world, seed) for seed in range(runs)]
        lag = np.mean([one.deficit[BEGINNING:].mean() for one in found])
        print(f"| {world.name} | {np.mean([o.trained[BEGINNING:].mean() for o in found]):.1%} | {lag:.1%} |")
    print("\n| a fall of 5 % | claims to a training | to all but 1.5 % | missed |\n|---|---|---|---|")
    for world in [*grid(), *OTHERS]:
        found_waking = waking(world, runs)
        print(f"| {world.name} | {found_waking.trains:g} | {found_waking.recovers:g} | {found_waking.missed:.0%} |")
    trap = [replace(world, name=f"in the claim in which gains end, {world.name}") for world in grid()[4:6]]
    for world in trap:
        found_waking = at_the_end_of_gains(world, runs)
        print(f"| {world.name} | {found_waking.trains:g} | {found_waking.recovers:g} | {found_waking.missed:.0%} |")


def at_the_end_of_gains(world: World, runs: int) -> Waking:
    """The fall comes in the very claim in which the controller goes idle."""
    trains, recovers = [], []
    for seed in range(runs):
        quiet = live(world, seed)
        fall_at = int(np.flatnonzero(~quiet.trained)[0])
        found = live(world, seed, fall_at=fall_at, claims=fall_at + MISSED)
        trains.append(_first(np.flatnonzero(found.trained[fall_at:])))
        recovers.append(_first(np.flatnonzero(found.deficit[fall_at:] < 0.015)))
    return Waking(median(trains), median(recovers), float(np.mean(np.asarray(recovers) >= MISSED)))


if __name__ == "__main__":
    main()
