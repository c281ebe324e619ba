"""A worker with three idle runs, which looks for runs in every turn."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from helpers.worker.room_fixtures import RUNS, register, train
from helpers.worker.worker_fixtures import Bench
from redis import Redis

import service.worker.process.worker
from service.worker.process.worker import Worker


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs are looked for in every turn."""
    monkeypatch.setattr(service.worker.process.worker, "_LOOK_FOR_RUNS_SECONDS", 0.0)


@pytest.fixture(name="worker")
def _worker(bench: Bench) -> Iterator[Worker]:
    """A worker of its own connection; three runs are open, one after another was trained, and all are idle."""
    worker = Worker(bench.settings, Redis.from_url(bench.redis_url))
    for run in RUNS[:3]:
        register(bench, run)
        train(bench, worker, run, "first")
    yield worker
    worker._close()
