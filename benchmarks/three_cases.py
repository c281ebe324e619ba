"""Three cases in which training at a fixed interval does the wrong thing, and what draftalign does. Seeded; a table.

    python -m benchmarks.three_cases [--seeds 0 1 2]

* **A killed drafter.** The policy stands still and the drafter is good, but the engine loses it (α = 1 there) until it
  is offered something to load.
* **The old one is better.** The policy goes from A to B and back to A, eighteen claims each.
* **Nothing to gain.** The policy stands still, and the drafter is as good as it gets.

The policy is the small Markov one of `benchmarks/headroom.py`. Drafters are real ones, trained and replayed with the
shipped code. `draftalign` is the shipped worker (scores, gate, archive, controller) with an embedded Valkey, and the
API's `POST /acceptance` for what the engine counts. The other trainer has the same optimizer, passes and memory of
recent rollouts, but no rise of the learning rate; it trains on every fourth claim, or on every second, and publishes
what comes out. It replays nothing: *replayed* is what scoring, judging and asking the archive cost beside training. An
engine takes a claim to load what is offered. α lost: what a drafter trained at length on the policy of the day would
have more, in mean over all claims. The last column names what the service did, in this script's words: an engine called
dead in the answer to its counts, a version served again in the history, an idle controller. Training at a fixed
interval does none of that.
"""

from __future__ import annotations

import argparse
import copy
import logging
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from fastapi.testclient import TestClient

from benchmarks.headroom import CONFIG, LAYERS, Markov
from benchmarks.worker_run import NAME, WorkerRun
from drafter.batch import RolloutBatch
from drafter.model.draft_model import DraftModel
from drafter.model.eagle3 import Eagle3Drafter
from drafter.policy import Policy, TargetHead
from drafter.replay.acceptance import Replay
from drafter.replay.replay import replay
from drafter.training.trainer import DrafterTrainer, TrainConfig
from service.api.app import create_app
from service.settings import Settings
from service.worker import scoring
from service.worker.recent import RecentRollouts, Task, taken

DEPTH: Final = 4
ROLLOUTS: Final = 48
INTERVAL: Final = 4
#: How the drafters are made that know a policy: steps and learning rates.
RECIPE: Final = ((250, 1e-2), (150, 3e-3), (50, 1e-3))
SETTINGS: Final[dict[str, Any]] = {
    "depth": DEPTH,
    "learning_rate": 2e-3,
    "train_step_tokens": 1000,
    "recent_tokens": 5000,
    "worker_cost": 0.0,  # so that nothing depends on how fast this machine is
    "checkpoint_seconds": 1.0,
}


@dataclass(frozen=True)
class Case:
    """What happens: the policy of each claim, `A` or `B`, and the claim at which the engine loses its drafter."""

    name: str
    policies: str
    killed_at: int | None = None

    def shortened(self, every: int) -> Case:
        """The same with a part of the claims, for a test."""
        killed = None if self.killed_at is None else self.killed_at // every
        return replace(self, policies=self.policies[::every], killed_at=killed)


CASES: Final = (
    Case("a killed drafter", "A" * 36, killed_at=17),
    Case("the old one is better", "A" * 18 + "B" * 18 + "A" * 18),
    Case("nothing to gain", "A" * 60),
)


@dataclass
class Account:
    """What one trainer did in one case."""

    trainings: int = 0
    tokens: int = 0
    replayed: int = 0  # response tokens, once for each drafter that was replayed on them
    offered: int = 0  # versions published, served again or pushed: each is a swap in every engine
    lost: float = 0.0  # α, summed over claims
    says: str = ""


class World:
    """Two Markov policies, a drafter trained at length on each, and claims of rollouts."""

    def __init__(self, seed: int, recipe: Sequence[tuple[int, float]] = RECIPE) -> None:
        self._seed, self._markov = seed, Markov(seed)
        first, second = self._markov.corners[0], self._markov.corners[1]
        self.heads = {"A": first, "B": (0.6 * first + 0.8 * second)}
        self.embed = self._markov.embed
        self.experts = {"A": self._expert("A", self._markov.drafter(), recipe)}
        self.experts["B"] = self._expert("B", self.experts["A"], recipe)

    def begin(self) -> None:
        """Draw the same rollouts again from here on."""
        self._markov.rng = np.random.default_rng([self._seed, 1])

    def policy(self, name: str, version: int = 0) -> Policy:
        """What drafters share with it."""
        return Policy(version, self.embed, TargetHead(self.heads[name]))

    def sample(self, name: str, version: int, rollouts: int = ROLLOUTS) -> RolloutBatch:
        """Rollouts of a policy."""
        return self._markov.sample_from(self.heads[name], rollouts, f"v{version}", version)

    def _expert(self, name: str, begun: Eagle3Drafter, recipe: Sequence[tuple[int, float]]) -> Eagle3Drafter:
        drafter = copy.deepcopy(begun)
        trainer = DrafterTrainer(drafter, TrainConfig(DEPTH))
        for steps, rate in recipe:
            trainer.config = replace(trainer.config, learning_rate=rate)
            for _ in range(steps):
                trainer.step([(self.sample(name, 0), self.policy(name))])
        return drafter

    def replay(self, drafter: Any, batch: RolloutBatch, name: str) -> Replay:
        """What an engine does with it."""
        return replay(drafter, batch, self.policy(name, batch.policy_version), depth=DEPTH)


class Interval:
    """Trains on one claim of `every`, and publishes what comes out."""

    def __init__(self, world: World, scratch: Path, settings: Settings, every: int) -> None:
        self._world, self._settings, self._every = world, settings, every
        self._trainer = DrafterTrainer(copy.deepcopy(world.experts["A"]), TrainConfig(DEPTH, settings.learning_rate))
        self._recent = RecentRollouts(scratch / "recent", capacity_tokens=settings.recent_tokens, run="case")
        self._names: dict[int, str] = {}
        self.drafter: DraftModel = copy.deepcopy(world.experts["A"])
        self.account = Account(says="nothing")

    def claim(self, batch: RolloutBatch, name: str, live: tuple[float, float]) -> None:  # noqa: ARG002
        """Take a claim's rollouts. What the engine counted, it does not ask."""
        version = batch.policy_version
        self._names[version] = name
        newest = self._recent.add(Path(f"{version}.safetensors"), batch)
        if version % self._every != self._every - 1:
            return
        passes, step_tokens = self._settings.train_passes, self._settings.train_step_tokens
        for drawn in Task([newest], self._recent.but([newest]), passes, step_tokens, seed=version).drawn():
            window = [(b, self._world.policy(self._names[b.policy_version], b.policy_version)) for b in taken(drawn)]
            self.account.tokens += self._trainer.step(window).response_tokens
        self.account.trainings += 1
        self.account.offered += 1
        self.drafter = copy.deepcopy(self._trainer.drafter)


class Draftalign:
    """The shipped worker, and the API for what the engine counts."""

    def __init__(self, world: World, run: WorkerRun, api: TestClient) -> None:
        self._run, self._api, self._heads = run, api, world.heads
        self._learner = run.worker.learner
        self._last, self._died = "", False
        self.account = Account()
        train = self._learner.train

        def trained(*args: Any) -> tuple[float, float]:
            self.account.trainings += 1
            return train(*args)

        self._learner.train = trained  # type: ignore[method-assign, assignment]

    @property
    def drafter(self) -> Any:
        """What engines are offered."""
        return self._learner.lineage.version(self._run.served)

    def claim(self, batch: RolloutBatch, name: str, live: tuple[float, float]) -> None:
        """Take a claim's rollouts, and what the engine counted while it generated them: tokens and rounds."""
        if name != self._last:
            self._run.put_head(batch.policy_version, self._heads[name])
            self._last = name
        version = self._run.served
        self._run.post(batch)
        while self._run.worker.cycle():
            pass
        tokens, rounds = live
        report = {
            "run": NAME,
            "reporter": "engine",
            "drafter_version": version,
            "policy_version": batch.policy_version,
            "rounds": round(rounds),
            "emitted_tokens": round(tokens),
            "accepted_tokens": round(tokens) - round(rounds),
            "drafted_tokens": DEPTH * round(rounds),
        }
        answer = self._api.post("/acceptance", json=report).raise_for_status().json()
        if answer["dead"]:
            self._died, self.account.says = True, "the engine's drafter is dead"
        self._close()

    def _close(self) -> None:
        self.account.tokens = self._learner.journal.totals.trained_tokens
        offers = [e for e in self._run.events() if e["event"] in ("published", "rolled_back", "pushed_again")]
        self.account.offered = len(offers) - 1  # without the one that the run began with
        if any(e["event"] == "rolled_back" for e in offers):
            self.account.says = "an archived version is better"
        elif not self._died:
            self.account.says = "nothing to gain" if self._learner.judge.controller.idle else "training gains"


@contextmanager
def replays_counted(account: Account) -> Iterator[None]:
    """Add up what the worker replays meanwhile: to score, to judge, to ask the archive."""
    of_worker: Any = scoring
    before = of_worker.replay

    def counted(*args: Any, **named: Any) -> Replay:
        found: Replay = before(*args, **named)
        account.replayed += round(float(found.tokens.sum()))
        return found

    of_worker.replay = counted
    try:
        yield
    finally:
        of_worker.replay = before


def play(world: World, case: Case, trainer: Interval | Draftalign, wake: Callable[[], int]) -> Account:
    """Run a case. `wake`: a number that changes whenever engines are offered something to load."""
    dead, known = False, wake()
    drafter = trainer.drafter
    for version, name in enumerate(case.policies):
        if wake() != known:
            known, dead, drafter = wake(), False, trainer.drafter
        if version == case.killed_at:
            dead = True
        batch = world.sample(name, version)
        best, found = world.replay(world.experts[name], batch, name), world.replay(drafter, batch, name)
        tokens = float(found.tokens.sum())
        rounds = tokens if dead else float(found.rounds.sum())
        trainer.account.lost += best.alpha - tokens / rounds
        trainer.claim(batch, name, (tokens, rounds))
    return trainer.account


def at_interval(case: Case, world: World, every: int, **changes: Any) -> Account:
    """What training on one claim of so many does; `changes` of the settings."""
    with tempfile.TemporaryDirectory() as scratch:
        world.begin()
        fixed = Interval(world, Path(scratch), Settings(**SETTINGS | changes), every)
        return play(world, case, fixed, lambda: fixed.account.offered)


def compare(case: Case, world: World, **changes: Any) -> tuple[Account, Account]:
    """What the one and the other trainer do; `changes` of the settings of both."""
    chosen, fixed = SETTINGS | changes, at_interval(case, world, INTERVAL, **changes)
    with tempfile.TemporaryDirectory() as scratch:
        world.begin()
        with (
            WorkerRun(
                Path(scratch) / "state", CONFIG, LAYERS,
                embed=world.embed, head=world.heads["A"], drafter=world.experts["A"], **chosen,
            ) as run,
            TestClient(create_app(run.settings), base_url="http://127.0.0.1") as api,
        ):  # fmt: skip
            ours = Draftalign(world, run, api)
            with replays_counted(ours.account):
                play(world, case, ours, lambda: run.sequence)
    return fixed, ours.account


def table(cases: Sequence[Case], worlds: Sequence[World], show: Callable[[str], None] = print) -> None:
    """One line per case and trainer, summed or averaged over seeds."""
    columns = ("case", "trainer", "trainings", "tokens trained", "replayed", "swaps", "α lost", "what it says")
    show(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    for case in cases:
        found = [(*compare(case, world), at_interval(case, world, INTERVAL // 2)) for world in worlds]
        names = ("every 4th claim", "draftalign", "every 2nd claim")
        for name, accounts in zip(names, zip(*found, strict=True), strict=True):
            mean = {field: sum(getattr(a, field) for a in accounts) / len(worlds) for field in ("trainings", "offered")}
            tokens, replayed = (sum(getattr(a, f) for a in accounts) / len(worlds) for f in ("tokens", "replayed"))
            lost = sum(a.lost for a in accounts) / len(worlds) / len(case.policies)
            says = "; ".join(dict.fromkeys(a.says for a in accounts))
            show(
                f"| {case.name} | {name} | {mean['trainings']:.1f} | {tokens / 1000:.0f} k | {replayed / 1000:.0f} k | "
                f"{mean['offered']:.1f} | {lost:+.2f} | {says} |"
            )


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    chosen = parser.parse_args()
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    started = time.monotonic()
    table(CASES, [World(seed) for seed in chosen.seeds])
    print(f"\n{len(chosen.seeds)} seeds, {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
