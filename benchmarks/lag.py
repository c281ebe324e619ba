"""How long from data to engine? Play a recorded RL run to the shipped worker at a given pace; seeded, prints a table.

    python -m benchmarks.tracking record --out DIR --seeds 0 --steps 90      # the demo's RL run; two minutes
    python -m benchmarks.lag --recording DIR/seed-0 [--pace 1 0.5] [--steps 60] [--events]

The clock counts RL steps and is not the machine's: each optimizer step, replay and publish takes what it took beside RL
in the demo on two busy cores (`Costs`), times `--pace`, so the table does not depend on what else runs. With each RL
step the next policy version's rollouts arrive, whatever the worker does. The engine takes what is published when its
next RL step begins. A recording with more prompts a step (`--prompts 32`) is played with as many times the rollouts of
a look, tokens of an optimizer step and recent tokens. `--events` prints what was done when, and α of each policy
version's rollouts with the served drafter and with the candidate.

`--oracle` puts in the gate's place one that knows each candidate's true gain: on all rollouts of the next four policy
versions, which the worker has not seen. What it does not reach, no gate can. The last column is of any test at all: the
first step that it could let a new version draft in half of the runs, at an error of 5 % a run (`Played.earliest`): by
the prompts' errors alone, and where an equal candidate's gain varies by `CLAIM_SD` from claim to claim, too.
"""

from __future__ import annotations

import argparse
import copy
import logging
import math
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from statistics import NormalDist, fmean, median
from typing import Any, Final
from unittest import mock

import torch

from benchmarks.recipes import SERVING_DEPTH
from benchmarks.recording import Recording, open_recording
from benchmarks.tracking import initial_drafter
from benchmarks.worker_run import WorkerRun
from drafter.model.draft_model import DraftModel
from drafter.policy import Policy, TargetHead
from drafter.replay.acceptance import Replay, log_ratio
from drafter.replay.gate import CLAIM_SD, Look, compare
from drafter.replay.replay import replay
from drafter.training.trainer import DrafterTrainer
from examples.demo import PROMPTS_PER_STEP, SERVICE_SETTINGS
from examples.demo_report import kept_promises
from examples.policy import AUX_LAYERS, load
from service.settings import Settings
from service.worker.lineage import CANDIDATE
from service.worker.promotion import gate as judged_by
from service.worker.promotion.gate import Contest
from service.worker.recent import KeptBatch

#: Policy versions on whose rollouts a candidate's true gain is measured: about as many as it will serve.
_AHEAD: Final = 4
#: Standard errors from 0 at which the best test of 5 % has a power of one half.
_DISTANCE: Final = NormalDist().inv_cdf(0.95)
#: Settings that are sized for the rollouts of one RL step.
_PER_STEP: Final = ("gate_rollouts", "train_step_tokens", "recent_tokens")


@dataclass(frozen=True)
class Costs:
    """In RL steps."""

    optimizer_step: float = 0.39
    batch: float = 0.07  # to load one and to replay n-grams
    replay: float = 0.1  # of one drafter on one batch
    publish: float = 0.2  # checkpoint, files, and the agent's swap

    def at(self, pace: float) -> Costs:
        """Of a machine that needs so many times as long."""
        return Costs(*(pace * getattr(self, one.name) for one in fields(self)))


@dataclass(frozen=True)
class LookAt:
    """One look at the candidate, and the truth."""

    drafts: int  # the RL step that it would draft first, were it published now
    truth: float  # log of its α over the served drafter's on the next policy versions' rollouts
    error: float  # standard error of what the look says of that, by its prompts alone; nan: it says nothing


@dataclass
class Played:
    """What came of a run, by RL step and by version."""

    served: list[str] = field(default_factory=list)  # version that drafted each RL step
    trained_to: dict[str, int] = field(default_factory=dict)  # version -> newest policy version that it was trained on
    lags: list[float] = field(default_factory=list)  # publication lag where all drafters were compared
    alphas: list[float] = field(default_factory=list)  # of the served drafter, one for each batch
    train_seconds: float = 0.0
    refused: int = 0
    looks: list[LookAt] = field(default_factory=list)
    kept: float | None = None  # realised to promised gain, logarithms added up over the publishes that were measured

    @property
    def to_engine(self) -> list[int]:
        """For each version that served: RL steps from its newest data to the first step that it drafts."""
        first = {version: step for step, version in reversed(list(enumerate(self.served)))}
        return [step - self.trained_to[v] for v, step in sorted(first.items()) if v in self.trained_to]

    @property
    def first_step(self) -> int | None:
        """The first RL step that a new version drafted."""
        return next((step for step, version in enumerate(self.served) if version in self.trained_to), None)

    def earliest(self, spread: float = 0.0) -> int | None:
        """The first step that any test could let a new version draft in half of the runs.

        `spread`: standard deviation of an equal candidate's gain from claim to claim, which more prompts do not reduce.

        Whatever publishes by a given look, and an equal candidate in 5 % of runs, is a test on the looks so far. None
        has more power than Neyman and Pearson's, which here knows truth and errors: one half where the truth is as many
        standard errors from 0 as 5 % are. A look at a candidate that is worse in truth says nothing for it.
        """
        known = 0.0
        for look in self.looks:
            known += max(0.0, look.truth) ** 2 / (look.error**2 + spread**2) if look.error > 0 else 0.0
            if known >= _DISTANCE**2 and look.truth > 0:
                return look.drafts
        return None


class Clock:
    """RL steps since the first rollouts arrived; `arrive` is called for each that has begun."""

    def __init__(self, steps: int, arrive: Callable[[int], None]) -> None:
        self.now = 0.0
        self.arrived = 0
        self._steps, self._arrive = steps, arrive

    def spend(self, steps: float) -> None:
        """Let time pass."""
        self.now += steps
        while self.arrived < self._steps and self.arrived <= self.now:
            self.arrived += 1
            self._arrive(self.arrived - 1)

    def wait(self) -> bool:
        """Let time pass until the next rollouts arrive; False where none will."""
        if self.arrived == self._steps:
            return False
        self.spend(max(0.0, self.arrived - self.now))
        return True


class _Truths:
    """Notes the truth beside each look of the gate at the candidate. `oracle`: the gate then goes by it."""

    def __init__(self, recording: Recording, run: WorkerRun, clock: Clock, *, events: bool, oracle: bool) -> None:
        self.looks: list[LookAt] = []
        self._recording, self._run, self._clock = recording, run, clock
        self._events, self._oracle = events, oracle
        self._take = run.worker.learner.judge.gate._take
        self._error = math.nan  # of the look in hand

    def compared(self, ours: Replay, theirs: Replay, groups: Any = None) -> Look:
        """In `compare`'s place, which keeps the error that the prompts alone make to itself."""
        self._error = log_ratio(theirs.rounds, ours.rounds, groups).error
        return compare(ours, theirs, groups)

    def taken(self, version: str, look: Look) -> Contest:
        """In the place of the gate's own, which takes a look in."""
        contest: Contest = self._take(version, look)
        if version != CANDIDATE or self._run.worker.learner.judge.gate.training.trained_to is None:
            return contest
        noted = LookAt(self._clock.arrived + 1, self._gain(), math.nan if look.fault else self._error)
        self.looks.append(noted)
        if self._events:
            said = f"gain {noted.truth:+.1%}, look {look.gain:+.1%} ± {noted.error:.1%}"
            print(f"step {self._clock.now:6.1f}: {said}")
        if not self._oracle:
            return contest
        gain = math.expm1(noted.truth)
        promote = gain > self._run.settings.gate_min_gain
        return replace(contest, verdict=replace(contest.verdict, promote=promote, gain=gain, low=gain, high=gain))

    def _gain(self) -> float:
        """Log of the candidate's α over the served drafter's on the next policy versions' rollouts."""
        batches, learner = self._recording.batches, self._run.worker.learner
        first = min(self._clock.arrived, len(batches) - 1)
        ahead = list(enumerate(self._recording.heads))[first : first + _AHEAD]

        def rounds(drafter: DraftModel) -> float:
            found = [replay(drafter, batches[v], Policy(v, h, TargetHead(h)), depth=SERVING_DEPTH) for v, h in ahead]
            return sum(float(one.rounds.sum()) for one in found)

        served = learner.lineage.version(str(learner.judge.gate.served))
        return math.log(rounds(served) / rounds(learner.lineage.candidate))


def play(recording: Recording, directory: Path, costs: Costs, *, events: bool = False, oracle: bool = False) -> Played:
    """Play a recording. `oracle`: a candidate is published where it is better in truth by a swap's worth."""
    policy, _ = load(recording.task.base_policy)
    drafter = copy.deepcopy(initial_drafter(recording.directory))
    played = Played()
    chosen: dict[str, Any] = {name.removeprefix("DRAFTALIGN_").lower(): v for name, v in SERVICE_SETTINGS.items()}
    for name in _PER_STEP:
        chosen[name] = int(chosen[name]) * recording.prompts // PROMPTS_PER_STEP
    with WorkerRun(
        directory,
        policy.config.to_dict(),
        AUX_LAYERS,
        embed=policy.get_input_embeddings().weight.detach().float(),
        head=None,
        drafter=drafter,
        **Settings(**chosen).model_dump(include=set(chosen)),
    ) as run:
        learner = run.worker.learner
        train, score, promote = learner.train, learner.scorer.score, learner.lineage.promote
        step_of = DrafterTrainer.step
        offered = run.served
        newest = 0

        def arrive(step: int) -> None:
            nonlocal offered
            if step:
                run.put_head(step, recording.heads[step])
            run.post(recording.batches[step], drafter_version=offered)
            played.served.append(offered)
            offered = run.served  # the next step's rollouts begin now

        clock = Clock(len(recording.batches), arrive)

        def trained(batches: Sequence[KeptBatch], *args: Any) -> tuple[float, float]:
            nonlocal newest
            newest = max(kept.policy_version for kept in batches)
            begun = clock.now
            found = train(batches, *args)
            if events:
                print(f"step {begun:6.1f}: trains on {newest} until {clock.now:.1f}")
            return found

        def stepped(self: Any, window: Any) -> Any:
            clock.spend(costs.optimizer_step)
            return step_of(self, window)

        def scored(*args: Any) -> Any:
            whole = score(*args)
            found = None if whole is None else whole[1]
            clock.spend(costs.batch + costs.replay * (0 if found is None else len(found.versions)))
            if events and found is not None:
                sums = {name: found.record.sums(name) for name in ("served", "candidate")}
                told = ", ".join(f"{n} {math.nan if one is None else one.alpha:.3f}" for n, one in sums.items())
                print(f"step {clock.now:6.1f}: α of policy {found.record.policy_version}: {told}")
            return whole

        def promoted(*args: Any) -> Any:
            clock.spend(costs.publish)
            manifest = promote(*args)
            played.trained_to[manifest.version] = newest
            if events:
                print(f"step {clock.now:6.1f}: serves {manifest.version}, trained to {newest}")
            return manifest

        truths = _Truths(recording, run, clock, events=events, oracle=oracle)
        learner.judge.gate._take = truths.taken  # type: ignore[method-assign]
        learner.train, learner.scorer.score = trained, scored  # type: ignore[method-assign, assignment]
        learner.lineage.promote = promoted  # type: ignore[method-assign, assignment]
        judging = mock.patch.object(judged_by, "compare", truths.compared)
        with mock.patch.object(DrafterTrainer, "step", stepped), judging:
            clock.spend(0.0)
            while run.worker.cycle() or clock.wait():
                pass
        for record in sorted(run.store.scores().values(), key=lambda r: r.policy_version or 0):
            if record.best is not None and record.served is not None and record.frozen is not None:
                played.lags.append(record.best.alpha - record.served.alpha)
            if record.served is not None:
                played.alphas.append(record.served.alpha)
        played.looks = truths.looks
        played.train_seconds = learner.journal.totals.train_seconds
        played.refused = learner.journal.totals.refused
        played.kept = kept_promises(run.events())["realised_to_promised"]
    return played


def row(name: str, played: Played) -> str:
    """One line of the table."""
    found = played.to_engine
    thirds = [fmean(played.alphas[i * len(played.alphas) // 3 : (i + 1) * len(played.alphas) // 3]) for i in range(3)]
    return (
        f"| {name} | {len(played.trained_to)} / {played.refused} | {played.first_step} | "
        f"{median(found) if found else '–'} ({max(found, default='–')}) | {fmean(played.lags):.3f} | "
        f"{fmean(played.alphas):.3f} ({', '.join(f'{t:.2f}' for t in thirds)}) | {played.train_seconds:.0f} | "
        f"{'–' if played.kept is None else f'{played.kept:.2f}'} | "
        f"{played.earliest() or '–'} / {played.earliest(CLAIM_SD) or '–'} |"
    )


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recording", type=Path, required=True)
    parser.add_argument("--pace", type=float, nargs="+", default=[1.0, 0.5])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--events", action="store_true")
    parser.add_argument("--oracle", action="store_true")
    chosen = parser.parse_args()
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    recording = open_recording(chosen.recording, until=chosen.steps)
    headings: tuple[str, ...] = (
        "seconds a step",
        "published / refused",
        "first new version drafts step",
        "data to engine, steps (most)",
    )
    headings += (
        "mean publication lag",
        "mean α (by thirds)",
        "training s",
        "realised / promised",
        "any test's first step",
    )
    print(f"| {' | '.join(headings)} |\n|{'---|' * len(headings)}")
    for pace in chosen.pace:
        with tempfile.TemporaryDirectory() as scratch:
            played = play(recording, Path(scratch), Costs().at(pace), events=chosen.events, oracle=chosen.oracle)
            print(row(f"{pace:g}", played), flush=True)


if __name__ == "__main__":
    main()
