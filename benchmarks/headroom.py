"""Is the reported headroom what further training would bring? Walk through a run, and train a copy on at each claim.

    python -m benchmarks.headroom markov --out FILE [--seeds 0 1 2]             # a small world; minutes
    python -m benchmarks.tracking record --out DIR --seeds 0 --steps 60         # the demo's RL run; two minutes
    python -m benchmarks.headroom recorded --recording DIR/seed-0 --out FILE [--every 2]
    python -m benchmarks.headroom report --out FILE ...
    python -m benchmarks.headroom simulated                                     # the truth is exact; seconds

A walk does as a worker does: each claim's rollouts first judge the candidate against the served drafter (the shipped
gate), then are trained on (the shipped trainer and memory). A copy of the candidate goes on training on the rollouts of
that day, and is measured against the served drafter on rollouts that it never saw: fresh ones of the same policy in the
small world, those of the next two versions in the recording. `curve` has that gain before and after each further
training; its best is what was to be had. `report` runs the shipped `LearningCurve` over the verdicts and compares;
claims with nothing to gain it simulates, as verdicts that are nothing but noise.

`simulated` trains nothing. A training closes a share of the candidate's distance to what today's rollouts can teach,
and the policy opens it again. So what was to be had is known exactly. Beside it stands what a walk would measure of it
on two claims' rollouts. The last column is a headroom that is always right, judged by what a walk measures.

The small world is a Markov policy: the next token depends on the last one through a head. The head is new at first,
jumps after 15 claims, moves from the 28th to the 42nd, and stands still until the 60th.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from benchmarks.recording import open_recording
from benchmarks.tracking import initial_drafter
from drafter.batch import RolloutBatch, prompt_hashes
from drafter.model.draft_model import DraftModel
from drafter.model.eagle3 import DrafterConfig, Eagle3Drafter
from drafter.policy import Policy, TargetHead
from drafter.replay.gate import CLAIM_SD, Look, Trial, compare
from drafter.replay.replay import numbered, replay
from drafter.training.trainer import DrafterTrainer, TrainConfig
from drafter.vocabulary import DraftVocabulary
from examples.demo import PROMPTS_PER_STEP
from service.monitor.headroom import LearningCurve
from service.worker.recent import RecentRollouts, Task, taken

DEPTH: Final = 4
#: Trainings of a copy on the rollouts of one day.
FURTHER: Final = 5


@dataclass(frozen=True)
class Day:
    """One claim: what there is to train on, and what to measure on. Policies by version."""

    batch: RolloutBatch
    unseen: Sequence[RolloutBatch]
    policies: Callable[[int], Policy]
    look: bool = True


@dataclass(frozen=True)
class Sizes:
    """Settings of the worker."""

    learning_rate: float
    step_tokens: int
    recent_tokens: int
    passes: float = 8.0


def walk(days: Iterator[Day], drafter: DraftModel, sizes: Sizes) -> Iterator[dict[str, Any]]:
    """Judge, look, train; a row for each claim."""
    served = copy.deepcopy(drafter)
    trainer = DrafterTrainer(drafter, TrainConfig(DEPTH, sizes.learning_rate, warmup_windows=30))
    with tempfile.TemporaryDirectory() as scratch:
        recent = RecentRollouts(Path(scratch), capacity_tokens=sizes.recent_tokens, run="recorded")  # never settled
        trial = Trial()
        for number, day in enumerate(days):
            row: dict[str, Any] = {"claim": number, "policy_version": day.batch.policy_version}
            if number:
                trial.trained()
                look = _look(trainer.drafter, served, day)
                trial.take(look)
                promote = trial.verdict().promote
                row |= {"gain": look.gain, "error": None if look.fault else look.error, "promoted": promote}
                if promote:
                    served = copy.deepcopy(trainer.drafter)
                    trial = Trial(promise=trial.promise.next().known())
            newest = recent.add(Path(f"{number}.safetensors"), day.batch)

            def train(one: DrafterTrainer, seed: int, newest: Any = newest, day: Day = day) -> None:
                task = Task([newest], recent.but([newest]), sizes.passes, sizes.step_tokens, seed)
                for drawn in task.drawn():
                    one.step([(batch, day.policies(batch.policy_version)) for batch in taken(drawn)])

            if day.look:
                before, on = _rounds(served, day), copy.deepcopy(trainer)
                row["curve"] = [before / _rounds(on.drafter, day) - 1]
                for further in range(FURTHER):
                    train(on, 1000 * number + further)
                    row["curve"].append(before / _rounds(on.drafter, day) - 1)
            train(trainer, number)
            yield row


def _look(candidate: DraftModel, served: DraftModel, day: Day) -> Look:
    policy = day.policies(day.batch.policy_version)
    found = [replay(one, day.batch, policy, depth=DEPTH) for one in (candidate, served)]
    return compare(found[0], found[1], numbered(prompt_hashes(day.batch)))


def _rounds(drafter: DraftModel, day: Day) -> float:
    """Expected rounds on the rollouts that nothing was trained on."""
    each = (replay(drafter, b, day.policies(b.policy_version), depth=DEPTH) for b in day.unseen)
    return sum(float(found.rounds.sum()) for found in each)


# --- the small world
VOCAB, HIDDEN, LAYERS = 40, 16, (2, 4, 5)
CLAIMS, JUMP, MOVES, STANDS = 60, 15, 28, 42
CONFIG: Final[dict[str, Any]] = {
    "model_type": "qwen3", "hidden_size": HIDDEN, "intermediate_size": 24, "num_hidden_layers": 8,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "vocab_size": VOCAB,
}  # fmt: skip


class Markov:
    """A policy whose next token depends on the last one alone, through a head that moves."""

    def __init__(self, seed: int) -> None:
        g = torch.Generator().manual_seed(seed)
        self.embed, self.states = (torch.randn(VOCAB, HIDDEN, generator=g) for _ in range(2))
        self.aux = torch.randn(VOCAB, len(LAYERS) * HIDDEN, generator=g)
        self.corners = torch.randn(4, VOCAB, HIDDEN, generator=g) * 0.6
        self.rng = np.random.default_rng(seed)

    def head(self, version: int) -> Tensor:
        """The head of one policy version."""
        jump, moved = (0.5 if version >= JUMP else 0.0), min(max(version - MOVES, 0), STANDS - MOVES) * 0.03
        mixed: Tensor = self.corners[0] + jump * self.corners[1] + moved * self.corners[2]
        scaled: Tensor = mixed / (1 + jump**2 + moved**2) ** 0.5
        return scaled

    def policy(self, version: int) -> Policy:
        """What drafters share with it."""
        return Policy(version, self.embed, TargetHead(self.head(version)))

    def sample(self, version: int, rollouts: int, name: str) -> RolloutBatch:
        """Rollouts of one policy version."""
        return self.sample_from(self.head(version), rollouts, name, version)

    def sample_from(self, head: Tensor, rollouts: int, name: str, version: int = 0) -> RolloutBatch:
        """Rollouts of 24 tokens after prompts of three."""
        logits = self.states @ head.T
        law = torch.softmax(logits.double(), -1).numpy().cumsum(-1)
        ids = np.zeros((rollouts, 27), dtype=np.int64)
        ids[:, :3] = self.rng.integers(VOCAB, size=(rollouts, 3))
        for place in range(3, 27):
            draws = self.rng.random((rollouts, 1))
            ids[:, place] = np.minimum((law[ids[:, place - 1]] < draws).sum(1), VOCAB - 1)
        x, mask = torch.from_numpy(ids.ravel()), torch.ones(rollouts, 27, dtype=torch.bool)
        mask[:, :3] = False
        logprobs = torch.zeros(x.numel())
        logprobs[1:] = torch.log_softmax(logits, -1)[x[:-1], x[1:]]
        return RolloutBatch(
            input_ids=x,
            cu_seqlens=torch.arange(0, x.numel() + 1, 27),
            loss_mask=mask.ravel(),
            aux_hidden=self.aux[x],
            logprobs=logprobs * mask.ravel(),
            last_hidden=self.states[x],
            logsumexp=torch.logsumexp(logits, -1)[x],
            rollout_ids=tuple(f"{name}/{i}" for i in range(rollouts)),
            policy_version=version,
        )

    def drafter(self) -> Eagle3Drafter:
        """A new one."""
        torch.manual_seed(0)
        made = Eagle3Drafter(
            DrafterConfig.from_target(CONFIG, LAYERS, VOCAB), DraftVocabulary(torch.arange(VOCAB), VOCAB)
        )
        made.init_from_target(self.head(0))
        return made

    def days(self) -> Iterator[Day]:
        """100 claims."""
        for version in range(CLAIMS):
            yield Day(self.sample(version, 48, f"v{version}"), [self.sample(version, 160, f"t{version}")], self.policy)


def markov(seed: int) -> Iterator[dict[str, Any]]:
    """One seed of the small world."""
    world = Markov(seed)
    for row in walk(
        world.days(), world.drafter(), Sizes(learning_rate=3e-3, step_tokens=1000, recent_tokens=5000, passes=4.0)
    ):
        yield row | {"run": f"markov-{seed}"}


# --- the recording
def recorded(directory: Path, every: int) -> Iterator[dict[str, Any]]:
    """The demo's RL run, trained on at every `every`-th version, as a worker does that is so far behind."""
    found = open_recording(directory)
    policies = [Policy(v, h, TargetHead(h)) for v, h in zip(found.versions, found.heads, strict=True)]
    places = range(0, len(policies) - 2, every)
    days = (
        Day(found.batches[at], found.batches[at + 1 : at + 3], policies.__getitem__, number % 2 == 0)
        for number, at in enumerate(places)
    )
    drafter = copy.deepcopy(initial_drafter(directory))
    more = found.prompts / PROMPTS_PER_STEP
    sizes = Sizes(learning_rate=1e-2, step_tokens=round(900 * more), recent_tokens=round(8000 * more))
    for row in walk(days, drafter, sizes):
        yield row | {"run": f"{directory.name}-every-{every}-prompts-{found.prompts}"}


# --- the report
def report(paths: Sequence[Path]) -> None:
    """Compare what was reckoned with what was to be had."""
    print("| run | claims with more than 2 % to be had | within a factor of two | median ratio | in the interval |")
    print("|---|---|---|---|---|")
    rows = [json.loads(line) for path in paths for line in path.read_text().splitlines()]
    for run in dict.fromkeys(row["run"] for row in rows):
        curve, ratios, inside = LearningCurve(), [], []
        for row in (row for row in rows if row["run"] == run):
            if row.get("error") is not None:
                curve.learn(row["gain"], row["error"], promoted=row["promoted"])
            found, there = curve.headroom(), max(row.get("curve", [0.0]))
            if found is None or found.gain is None or found.low is None or found.high is None or there <= 0.02:
                continue
            ratios.append(found.gain / there)
            inside.append(found.low <= there <= found.high)
        near = np.mean([0.5 <= ratio <= 2.0 for ratio in ratios])
        print(f"| {run} | {len(ratios)} | {near:.0%} | {np.median(ratios):.2f} | {np.mean(inside):.0%} |")
    print("\n| nothing to gain, simulated | claims with 0 in the interval |\n|---|---|")
    for error in (0.002, 0.008, 0.03):
        print(f"| standard error {100 * error:g} % | {stationary(error):.1%} |")


def stationary(error: float, claims: int = 2000, seed: int = 0) -> float:
    """Share of claims whose interval holds 0, where each verdict is noise and one in twenty is promoted by chance."""
    rng, curve, held = np.random.default_rng(seed), LearningCurve(), 0
    for gain in error * rng.standard_normal(claims):
        curve.learn(gain, error, promoted=gain > 1.645 * error)
        found = curve.headroom()
        held += found is not None and found.low is not None and found.high is not None and found.low <= 0 <= found.high
    return held / claims


# --- the truth is exact
@dataclass(frozen=True)
class World:
    """Distances are logs of α. `closes`: share of the distance that a training closes. `error`: of a look."""

    closes: float
    distance: float
    moves: Callable[[int], float]  # how much the policy adds to the distance, by claim
    error: float
    luck: float = 0.01  # sd of what a training gains beside that
    understated: float = 1.0  # how many times larger the true error is


WORLDS: Final = {
    "a new drafter, looks of 2 %": World(0.3, 0.6, lambda _: 0.01, 0.02, 0.005),
    "a policy that moves, 2 %": World(0.3, 0.15, lambda _: 0.02, 0.02, 0.005),
    "the same, eight prompts, 8 %": World(0.3, 0.3, lambda _: 0.03, 0.08, 0.02),
    "slow, eight prompts, 8 %": World(0.15, 0.2, lambda _: 0.01, 0.08, 0.02),
    "a jump, 4 %": World(0.3, 0.1, lambda claim: 0.3 if claim == 20 else 0.002, 0.04),
    "set aside: returns every 12 claims, 3 %": World(
        0.4, 0.2, lambda claim: {6: 0.25, 0: -0.2}.get(claim % 12, 0.004), 0.03
    ),
    "set aside: siblings, 4 %": World(0.25, 0.3, lambda _: 0.02, 0.04, understated=1.6),
    "set aside: slower, far, 5 %": World(0.1, 0.8, lambda _: 0.01, 0.05),
}


def simulated(world: World, seed: int) -> Iterator[dict[str, Any]]:
    """Rows as a walk's; `there` is what was to be had, and `measured` what two claims' rollouts would say of it."""
    rng = np.random.default_rng(seed)
    trial, candidate, served = Trial(), world.distance, world.distance
    for claim in range(CLAIMS):
        moved = world.moves(claim) if claim else 0.0
        candidate, served = max(candidate + moved, 0.0), served + moved
        row: dict[str, Any] = {}
        if claim:
            trial.trained()
            gain = math.expm1(served - candidate + world.error * world.understated * rng.standard_normal())
            error = world.error * math.sqrt(rng.chisquare(7) / 7)
            trial.take(Look(gain, error, PROMPTS_PER_STEP, 8 * PROMPTS_PER_STEP, 1.0, 1.0))
            row = {"gain": gain, "error": math.hypot(error, CLAIM_SD), "promoted": trial.verdict().promote}
            if row["promoted"]:
                served, trial = candidate, Trial(promise=trial.promise.next().known())
        best = served - candidate * (1 - world.closes) ** FURTHER
        row["there"] = math.expm1(best)
        row["measured"] = math.expm1(best + world.error * world.understated * rng.standard_normal() / math.sqrt(2))
        yield row
        candidate = candidate * (1 - world.closes) + world.luck * rng.standard_normal()


def print_simulated(seeds: int = 10) -> None:
    """The shipped headroom, and a perfect one, by the truth and by what a walk measures of it."""
    print(
        "| world | claims | within a factor of two | median ratio | in the interval | by what a walk measures "
        "| one that is always right |"
    )
    print("|---|---|---|---|---|---|---|")
    for name, world in WORLDS.items():
        ratios, inside, told, perfect = [], [], [], []
        for seed in range(seeds):
            curve = LearningCurve()
            for row in simulated(world, seed):
                if "gain" not in row:
                    continue
                curve.learn(row["gain"], row["error"], promoted=row["promoted"])
                found = curve.headroom()
                assert found is not None
                assert found.gain is not None
                assert found.low is not None
                assert found.high is not None
                if row["there"] > 0.02:
                    ratios.append(found.gain / row["there"])
                    inside.append(found.low <= row["there"] <= found.high)
                if row["measured"] > 0.02:
                    told.append(0.5 <= found.gain / row["measured"] <= 2.0)
                    perfect.append(0.5 <= row["there"] / row["measured"] <= 2.0)
        near = np.mean([0.5 <= ratio <= 2.0 for ratio in ratios])
        ours = f"{near:.0%} | {np.median(ratios):.2f} | {np.mean(inside):.0%} | {np.mean(told):.0%}"
        print(f"| {name} | {len(ratios)} | {ours} | {np.mean(perfect):.0%} |", flush=True)


def main() -> None:
    """Walk, report or simulate."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("markov", "recorded", "report", "simulated"))
    parser.add_argument("--out", type=Path, nargs="+", default=[])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--recording", type=Path)
    parser.add_argument("--every", type=int, default=2)
    chosen = parser.parse_args()
    if chosen.command == "simulated":
        print_simulated()
        return
    if not chosen.out:
        parser.error(f"{chosen.command} expects --out: where its rows are, or go")
    if chosen.command == "report":
        report(chosen.out)
        return
    with chosen.out[0].open("a") as out:
        rows = (
            (row for seed in chosen.seeds for row in markov(seed))
            if chosen.command == "markov"
            else recorded(chosen.recording, chosen.every)
        )
        for row in rows:
            print(json.dumps(row), file=out, flush=True)


if __name__ == "__main__":
    main()
