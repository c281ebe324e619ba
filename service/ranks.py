"""The worker on several GPUs: `torchrun` starts a process for each, rank 0 is the worker, and the others follow it.

Rank 0 alone claims, judges, checkpoints, publishes and acknowledges. It sends orders to the others: the list of runs
that it serves, the file and the drafters of each batch to score, and the files of each training with how to draw from
them. All ranks load the same files and draw the same windows. Each replays or trains on every W-th rollout. A follower
has no state that could be lost: if its trainer's fingerprint differs, it copies the trainer of rank 0. So a follower
that failed or was restarted goes on with the next order.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from drafter.batch import RolloutBatch, load_batch, without
from drafter.device import is_device_fault
from drafter.errors import BatchRejected
from drafter.model.draft_model import DraftModel
from drafter.training.ranks import Ranks, joined
from drafter.training.trainer import DrafterTrainer, TrainConfig
from service.errors import ConfigurationError
from service.settings import Settings
from service.storage.layout import FileId, Layout, is_there
from service.worker.checkpoint import taken_over
from service.worker.lineage import CANDIDATE, Lineage
from service.worker.process.device import use_device
from service.worker.process.worker import run_worker
from service.worker.recent import KeptBatch, Task, windows, with_normalisers
from service.worker.scoring import ScoreOrder, score_shared
from service.worker.target import Target

log = logging.getLogger("draftalign.worker")


class FollowedRun:
    """One run as a follower holds it: target, drafters, trainer, and the batches that are trained on."""

    def __init__(self, settings: Settings, run: str, ranks: Ranks, device: torch.device) -> None:
        self._layout = Layout(settings.state_dir)
        self._run = run
        self.target_file: FileId = self._layout.target_id(run)  # before it is read
        self._ranks = ranks
        self._device = device
        self._target = Target.open(self._layout, run, device)
        self._lineage = Lineage(settings, self._layout, run, self._target)  # of published drafters
        self._trainer: DrafterTrainer | None = None
        self._kept: dict[tuple[str, tuple[int, ...]], KeptBatch] = {}

    def prepare(self, order: Mapping[str, Any]) -> Callable[[], None]:
        """Load what the order names; returns what is left to do, in which the ranks wait for each other."""
        config = order["config"]
        if (asked := order.get("score")) is None:
            return partial(self._train, self._task(order["train"]), config)
        whole = self._read(asked["file"], tuple(asked["known"]))
        policy = self._target.with_head(*asked["head"])
        replayed: dict[str, str] = asked["drafters"]  # as `Lineage.replayed` has it on rank 0
        published = {name: self._lineage.version(name) for name in replayed.values() if name != CANDIDATE}

        def score() -> None:
            candidate = self._follow(config).drafter
            drafters = {name: published.get(equal, candidate) for name, equal in replayed.items()}
            score_shared(self._ranks, drafters, policy, whole, ScoreOrder(**asked["how"]))

        return score

    def _task(self, order: Mapping[str, Any]) -> Task:
        """What is ordered, its files loaded; those that no order names any more are let go."""
        before, self._kept = self._kept, {}

        def kept(name: str, known: tuple[int, ...]) -> KeptBatch:
            if (found := before.get((name, known))) is None:
                batch = replace(self._read(name, known), older=None)  # as rank 0 keeps it: it packs them alike
                found = KeptBatch(name, batch, frozenset(), known)
            self._kept[name, known] = found
            return found

        return Task.of(order, kept)

    def _read(self, name: str, known: tuple[int, ...]) -> RolloutBatch:
        places = (self._layout.worker(self._run) / "recent" / name, self._layout.spool(self._run) / name)
        path = next((place for place in places if is_there(place)), None)
        if path is None:
            raise OSError(f"{name} is neither among the recent rollouts nor in the spool: is this rank 0's state_dir?")
        return without(load_batch(path), known)

    def _train(self, task: Task, config: Mapping[str, Any]) -> None:
        """Rank 0's `Learner.train`, without its decisions."""
        trainer = self._follow(config)
        task = with_normalisers(self._ranks, task)
        for window in windows(task.drawn(), trainer, self._target):
            trainer.step(window)
            if self._ranks.shared(bool):
                break

    def _follow(self, config: Mapping[str, Any]) -> DrafterTrainer:
        """The trainer as rank 0 has it."""

        def make(drafter: DraftModel) -> DrafterTrainer:
            given = TrainConfig(**{**config, "betas": tuple(config["betas"])})
            return DrafterTrainer(drafter.to(self._device), given, self._ranks)

        self._trainer = taken_over(self._ranks, self._trainer, self._layout.worker(self._run), make)
        return self._trainer


class Follower:
    """A rank other than 0."""

    def __init__(self, settings: Settings, ranks: Ranks, device: torch.device) -> None:
        self._settings = settings
        self._layout = Layout(settings.state_dir)
        self._ranks = ranks
        self._device = device
        self._runs: dict[str, FollowedRun] = {}

    def serve(self) -> None:
        """Do what rank 0 orders, until it ends."""
        order: dict[str, Any]
        while order := self._ranks.shared(dict, idle=True):
            run = order.get("run")
            if run is None:
                self._runs = {run: held for run, held in self._runs.items() if run in order["runs"]}
                continue
            try:
                with self._ranks.in_step():
                    self._ranks.together(partial(self._prepare, order))()
            except BatchRejected as error:
                log.info("run %s: a batch is refused: %s", run, error)
            except Exception as error:
                if is_device_fault(error):
                    raise
                log.error("run %s: an order failed (%s); rank 0 decides what becomes of it", run, error)
                self._runs.pop(run, None)

    def _prepare(self, order: Mapping[str, Any]) -> Callable[[], None]:
        """Open the run and load what the order names; returns what is left to do."""
        run = order["run"]
        if run in self._runs and self._runs[run].target_file != self._layout.target_id(run):
            del self._runs[run]  # it was registered again
        if run not in self._runs:
            self._runs[run] = FollowedRun(self._settings, run, self._ranks, self._device)
        return self._runs[run].prepare(order)


def run_on_ranks(settings: Settings) -> None:
    """Run the worker until SIGTERM or SIGINT: alone, or as one of the processes that `torchrun` has started.

    Where only rank 0's host gets the signal (a drained pod), the ranks of the others end with 1: `torchrun` begins a
    round of those that are left. Ends with 0 it would take for the end of the job.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        check_hosts(settings)
        settings = settings.model_copy(update={"device": own_device(settings.device)})
    device = use_device(settings.device, settings.gpu_memory_share)
    with joined(device) as ranks:
        if ranks.rank == 0:
            run_worker(settings)
            ranks.shared(dict, idle=True)  # nothing more to do
            return
        signals: list[int] = []
        for number in (signal.SIGTERM, signal.SIGINT):  # rank 0 ends what is in hand, and then says so
            signal.signal(number, lambda number, _: signals.append(number))
        Follower(settings, ranks, device).serve()
    if not signals and os.environ.get("GROUP_RANK", "0") != "0":
        sys.exit(
            "draftalign: rank 0 was told to end, and this host was not: torchrun begins again without rank 0's host"
        )


def check_hosts(settings: Settings) -> None:
    """Refuse ranks of several hosts where each has a state directory of its own: they map one another's files."""
    if settings.state_url is not None and os.environ.get("LOCAL_WORLD_SIZE") != os.environ.get("WORLD_SIZE"):
        raise ConfigurationError(
            "with DRAFTALIGN_STATE_URL all ranks of a worker are on one host (torchrun --nnodes 1): each host has a "
            "state directory of its own, and ranks map the files of rank 0. Share a directory instead, or start one "
            "worker for each host"
        )


def own_device(name: str) -> str:
    """The device of this rank: `cuda` is the one of its number on its host."""
    if name.startswith("cuda:"):
        raise ConfigurationError(
            f"DRAFTALIGN_DEVICE={name!r} names one GPU, and there are several ranks: say cuda, and each rank takes "
            "the one with its LOCAL_RANK"
        )
    return f"{name}:{os.environ.get('LOCAL_RANK', '0')}" if name == "cuda" else name
