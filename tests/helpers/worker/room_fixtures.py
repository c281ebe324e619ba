"""Runs of a worker process whose memory runs out where a test says so."""

from __future__ import annotations

import asyncio
import errno
import time
from typing import Any

import pytest
import torch
from helpers.service.storage_fixtures import RolloutQueue, Store
from helpers.worker.record_fixtures import gauges
from helpers.worker.worker_fixtures import Bench
from redis import asyncio as aio

from service.storage.reports.store import AsyncStore
from service.storage.reports.store import Store as WorkersStore
from service.worker.learner import Learner
from service.worker.lineage import Lineage
from service.worker.process.worker import Worker

RUNS = ["a", "b", "c", "d"]
NO_MEMORY: list[Exception] = [
    RuntimeError("[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory"),
    torch.OutOfMemoryError("CUDA out of memory"),
    MemoryError("Cannot allocate memory (os error 12)"),
    OSError(errno.ENOMEM, "Cannot allocate memory"),
]


def register(bench: Bench, run: str) -> None:
    bench.register(bench.world.run_file(drafter=bench.world.drafter()), run=run)


def post(bench: Bench, run: str, name: str) -> str:
    return bench.post_file(bench.world.rollout_file(f"{run}-{name}", run=run, rollouts=4))


def is_trained(bench: Bench, run: str, batch: str) -> bool:
    record = RolloutQueue(bench.redis, run).batch(batch)
    return record is not None and record["state"] == "trained"


def until_trained(bench: Bench, worker: Worker, run: str, batch: str, most: int = 20) -> int:
    """Turns until a batch was trained."""
    for number in range(most):
        if is_trained(bench, run, batch):
            return number
        worker._turn()
    raise AssertionError(f"{run} was not trained: {error_of(bench, run)}")


def train(bench: Bench, worker: Worker, run: str, name: str) -> None:
    until_trained(bench, worker, run, post(bench, run, name))


def train_unsaved(bench: Bench, worker: Worker) -> str:
    """Run a is open and was trained on a batch that no checkpoint has; the batch."""
    worker._settings = bench.settings.model_copy(update={"checkpoint_seconds": 1e9})
    worker._room.close_idle()
    batch = post(bench, "a", "unsaved")
    while "a" not in worker.served or not worker.served["a"].inbox.done:
        worker._turn()
    return batch


def ask_of_drift(bench: Bench, run: str) -> None:
    async def ask() -> None:
        client = aio.Redis.from_url(bench.redis_url)
        await AsyncStore(client, run).ask_of_drift("reset")
        await client.aclose()

    asyncio.run(ask())


def note_death(bench: Bench, run: str) -> None:
    """As a process leaves it that is killed while it works on the run."""
    file = bench.layout.target_id(run)
    assert file is not None
    WorkersStore(bench.redis, run).set_worker(gauges({"working": [*file, 1, time.time()]}))


def error_of(bench: Bench, run: str) -> Any:
    return Store(bench.redis, run).worker().error or None


def as_it_is(worker: Worker, run: str) -> Any:
    """Weights, moments and counters of an open run."""
    learner = worker.served[run].learner
    trainer, kept = learner.lineage.needed_trainer, learner.recent.names()
    judge = learner.judge
    return trainer.fingerprint(), learner.journal.state, judge.controller.to_json(), judge.gate.state, kept


def no_room(
    monkeypatch: pytest.MonkeyPatch, worker: Worker, where: str, error: Exception, others: int = 3
) -> list[str]:
    """Have memory run out where a run is opened, or trained, while `others` are open. Returns who failed."""
    kind, name = (Lineage, "set_candidate") if where == "opened" else (Learner, "train")
    real, failed = getattr(kind, name), list[str]()

    def allocating(self: Any, *args: Any, **named: Any) -> Any:
        run = self._run if where == "opened" else self.run
        if len(worker.served.keys() - {run}) >= others:
            failed.append(run)
            raise error
        return real(self, *args, **named)

    monkeypatch.setattr(kind, name, allocating)
    return failed


def watched(real: Any, runs: list[str]) -> Any:
    """A method of a worker that notes the run which it is called with."""

    def method(self: Worker, run: str, *args: Any) -> Any:
        runs.append(run)
        return real(self, run, *args)

    return method
