"""A worker process in which what a test names fails."""

from __future__ import annotations

from typing import Any

from helpers.service.storage_fixtures import Store
from helpers.worker.worker_fixtures import Bench

from service.worker.process.worker import Worker
from service.worker.recent import RecentRollouts

FIRST = "before-default"  # runs are served in this order


def broken(error: BaseException, when: Any, real: Any) -> Any:
    """`real`, which raises `error` where `when(self, ...)` holds."""

    def maybe(self: Any, *args: Any, **named: Any) -> Any:
        if when(self, *args):
            raise error
        return real(self, *args, **named)

    return maybe


def error_of(bench: Bench, run: str = FIRST) -> Any:
    return Store(bench.redis, run).worker().error or None


def a_minute_later(worker: Worker) -> None:
    """What was refused is tried again."""
    for state in worker._runs.values():
        state.retry_at = 0.0


def holds(recent: RecentRollouts, batch: str) -> bool:
    return any(name.startswith(batch) for name in recent.names())


def turns(worker: Worker, bench: Bench, ended: list[str], most: int = 40) -> int:
    """Turns until all these batches of `default` have ended."""
    for number in range(most):
        if all(bench.state(batch) not in ("queued", "unknown") for batch in ended):
            return number
        worker._turn()
    raise AssertionError([bench.state(batch) for batch in ended])
