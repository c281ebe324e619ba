"""Several workers share the runs out: each has as many as the others, also where one comes later or dies."""

from __future__ import annotations

import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from redis import Redis
from storage_fixtures import RolloutQueue
from worker_fixtures import Bench, Nest, nest

from service.storage.lease import WORKERS, Leases
from service.storage.runs import change_state
from service.worker import process
from service.worker.process import Worker

RUNS = [f"run{n}" for n in range(4)]


@pytest.fixture
def workers(tmp_path: Path) -> Iterator[Nest]:
    with nest(tmp_path / "log") as made:
        yield made


def holders(bench: Bench) -> Counter[str]:
    """How many runs each worker has the lease on."""
    found = [bench.redis.get(Leases.key(run)) for run in RUNS]
    return Counter(name.decode() for name in found if name is not None)


def begin(bench: Bench) -> None:
    for run in RUNS:
        bench.register(bench.world.run_file(drafter=bench.world.drafter()), run=run)


def trained(bench: Bench, run: str, batch: str) -> bool:
    record = RolloutQueue(bench.redis, run).batch(batch)
    return record is not None and record["state"] == "trained"


@pytest.mark.slow
def test_a_worker_that_comes_later_gets_its_share_and_a_dead_ones_runs_go_back(bench: Bench, workers: Nest) -> None:
    begin(bench)
    first = workers.start(bench, lease_seconds=2.0)
    bench.wait(lambda: sorted(holders(bench).values()) == [4])
    batches = [(run, bench.post(f"before {run}", run=run)) for run in RUNS]
    second = workers.start(bench, lease_seconds=2.0)
    bench.wait(lambda: sorted(holders(bench).values()) == [2, 2])
    batches += [(run, bench.post(f"shared {run}", run=run)) for run in RUNS]
    bench.wait(lambda: all(trained(bench, *batch) for batch in batches))
    third = workers.start(bench, lease_seconds=2.0)
    bench.wait(lambda: sorted(holders(bench).values()) == [1, 1, 2])
    workers.kill(second)
    bench.wait(lambda: sorted(holders(bench).values()) == [2, 2])
    workers.kill(third, signal.SIGTERM)
    bench.wait(lambda: sorted(holders(bench).values()) == [4])
    batches += [(run, bench.post(f"alone {run}", run=run)) for run in RUNS]
    bench.wait(lambda: all(trained(bench, *batch) for batch in batches))
    workers.kill(first, signal.SIGTERM)
    assert bench.redis.hlen(WORKERS) <= 1, "who ends leaves; who was killed is forgotten by the next"


def test_who_has_its_share_leaves_the_rest_for_a_while_and_then_takes_what_nobody_wants(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(bench)
    monkeypatch.setattr(process, "_LOOK_FOR_RUNS_SECONDS", 0.0)
    monkeypatch.setattr(process, "_LEFT_SECONDS", 0.5)
    other = Leases(Redis.from_url(bench.redis_url))
    worker = Worker(bench.settings, Redis.from_url(bench.redis_url))
    assert other.others(0) == []
    worker._find_runs()
    assert len(worker.served) == 2, "the other one lives, and may want two"
    worker._find_runs()
    assert len(worker.served) == 2, "it waits"
    taken = {run for run in RUNS if other.hold(run)}
    assert taken == set(RUNS) - set(worker.served)
    time.sleep(0.6)
    worker._find_runs()
    other.give_back(taken.pop())
    worker._find_runs()
    assert len(worker.served) == 2, "it waits from now on"
    time.sleep(0.6)
    worker._find_runs()
    assert len(worker.served) == 3, "for nobody else took it"
    other.give_back(taken.pop())
    other.leave()
    worker._find_runs()
    assert len(worker.served) == 4, "there is no other one"
    worker._close()
    assert not bench.redis.exists(WORKERS)


def test_paused_runs_are_nobodys_share(bench: Bench) -> None:
    begin(bench)
    for run in RUNS[:2]:
        change_state(bench.layout, run, "paused", "for a test")
    other = Leases(Redis.from_url(bench.redis_url))
    other.others(0)
    worker = Worker(bench.settings, Redis.from_url(bench.redis_url))
    worker._find_runs()
    assert len(worker.served) == 1
    worker._close()


def test_a_full_redis_keeps_no_worker_from_its_runs(bench: Bench) -> None:
    leases, other = (Leases(Redis.from_url(bench.redis_url)) for _ in range(2))
    assert (leases.others(3), other.others(1)) == ([], [3])
    bench.redis.config_set("maxmemory", 1)
    try:
        assert leases.others(3) == [], "as it was before"
        assert other.others(1) == [3]
    finally:
        bench.redis.config_set("maxmemory", 0)
    assert leases.others(3) == [1]
