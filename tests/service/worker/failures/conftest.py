"""A worker of two runs, which looks for runs, and tries failed ones again, in every turn."""

from __future__ import annotations

import pytest
from helpers.worker.failure_fixtures import FIRST
from helpers.worker.worker_fixtures import Bench
from redis import Redis

import service.worker.claim
import service.worker.inbox
import service.worker.process.worker
from service.worker.process.worker import Worker


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs are looked for in every turn, and tried again at once."""
    monkeypatch.setattr(service.worker.process.worker, "_LOOK_FOR_RUNS_SECONDS", 0.0)
    monkeypatch.setattr(service.worker.process.worker, "_FAILED_SECONDS", 0.0)


@pytest.fixture
def worker(bench: Bench) -> Worker:
    """A worker of its own connection; `bench` has the run `default` with a drafter, and another before it."""
    bench.world.rollouts = 4
    bench.begin()
    bench.register(bench.world.run_file(drafter=bench.world.drafter()), run=FIRST)
    return Worker(bench.settings, Redis.from_url(bench.redis_url))
