"""A worker of several runs, of which each takes long to open and to write down: how it starts, and how it ends."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

import pytest
from helpers.service.storage_fixtures import Store
from helpers.worker.record_fixtures import gauges
from helpers.worker.room_fixtures import ask_of_drift, is_trained, post, register, train
from helpers.worker.worker_fixtures import Bench, Nest
from redis import Redis

import service.worker.process.worker
from service.storage.queue.lease import Leases
from service.storage.reports.drafting import Drafting, learn_drafting
from service.storage.reports.store import Store as WorkersStore
from service.worker.checkpoint import WorkerCheckpoint
from service.worker.loop import RunWorker
from service.worker.process.worker import Worker

RUNS = ["a", "b", "c", "d", "e"]


def a_worker(bench: Bench) -> Worker:
    return Worker(bench.settings, Redis.from_url(bench.redis_url))


@pytest.fixture
def lived(bench: Bench) -> None:
    """Each run has been trained, and has a checkpoint; none has work, and no worker is there."""
    worker = a_worker(bench)
    for run in RUNS:
        register(bench, run)
        worker._look_at = 0.0
        train(bench, worker, run, "first")
    worker._close()


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The runs that are opened, in this order."""
    order: list[str] = []

    def opening(*args: Any, **named: Any) -> RunWorker:
        order.append(args[4])
        return RunWorker(*args, **named)

    monkeypatch.setattr(service.worker.process.worker, "RunWorker", opening)
    return order


def checkpoints(bench: Bench) -> dict[str, str]:
    """The name of each run's newest checkpoint; it counts them."""
    return {run: max(path.name for path in bench.layout.worker(run).glob("checkpoint-*")) for run in RUNS}


@pytest.mark.usefixtures("lived")
def test_after_a_start_a_batch_waits_for_its_own_run_to_be_opened_and_for_no_idle_one(
    bench: Bench, opened: list[str]
) -> None:
    batch = post(bench, "e", "waits")
    worker = a_worker(bench)
    worker._turn()
    assert is_trained(bench, "e", batch)
    assert opened == ["e", "a"], "and one that is idle"
    for run in RUNS:
        Store(bench.redis, run).set_worker(gauges({"heartbeat": 1.0}))
    worker._heartbeat.beat()
    beats = {run: Store(bench.redis, run).worker().heartbeat or 0.0 for run in RUNS}
    assert min(beats.values()) > time.time() - 20, "somebody looks after those that are still to be opened"
    assert bench.redis.get(Leases.key("d")) is None, "another worker may have it"
    called = post(bench, "d", "is called")
    worker._look_at = 0.0  # a second later
    worker._turn()
    assert is_trained(bench, "d", called)
    assert opened == ["e", "a", "d", "b"]
    for _ in range(4):
        worker._turn()
    assert opened == ["e", "a", "d", "b", "c"]
    worker._close()


@pytest.mark.usefixtures("lived")
def test_what_another_worker_took_or_lost_meanwhile_is_opened_once_by_who_may(bench: Bench, opened: list[str]) -> None:
    worker, other = a_worker(bench), Leases(Redis.from_url(bench.redis_url))
    worker._turn()
    assert other.hold("b")
    for _ in range(6):
        worker._turn()
    assert opened == ["a", "c", "d", "e"]
    other.give_back("b")
    worker._look_at = 0.0
    worker._turn()
    assert opened == ["a", "c", "d", "e", "b"]
    worker._close()


@pytest.mark.parametrize("have_work", [True, False])
@pytest.mark.usefixtures("lived")
def test_a_worker_that_is_stopped_while_it_opens_a_run_opens_no_further_one(
    bench: Bench, opened: list[str], have_work: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for run in RUNS if have_work else []:
        post(bench, run, "waits")
    worker = a_worker(bench)

    def opening(*args: Any, **named: Any) -> RunWorker:
        worker.stop()
        opened.append(args[4])
        return RunWorker(*args, **named)

    monkeypatch.setattr(service.worker.process.worker, "RunWorker", opening)
    before = checkpoints(bench)
    worker.serve()
    assert opened == ["a"]
    assert checkpoints(bench) == before
    assert [bench.redis.get(Leases.key(run)) for run in RUNS] == [None] * len(RUNS)


@pytest.mark.usefixtures("lived")
def test_a_stop_writes_what_is_new_and_nothing_else(bench: Bench, workers: Nest) -> None:
    before = checkpoints(bench)
    pid = workers.start(bench, settings={"checkpoint_seconds": 1e9})
    bench.wait(lambda: all(bench.redis.get(Leases.key(run)) for run in RUNS))
    scored = len(Store(bench.redis, "c").scores())
    batch = post(bench, "c", "new")
    bench.wait(lambda: len(Store(bench.redis, "c").scores()) > scored)
    assert checkpoints(bench) == before
    workers.kill(pid, signal.SIGTERM)
    assert is_trained(bench, "c", batch)
    assert checkpoints(bench) == before | {"c": "checkpoint-" + f"{int(before['c'][-9:]) + 1:09d}"}
    worker = a_worker(bench)
    for _ in RUNS:
        worker._turn()
    assert worker.served["c"].learner.journal.totals.batches == 2
    worker._close()


@pytest.mark.usefixtures("lived")
def test_what_was_asked_and_could_not_be_written_down_is_written_when_the_run_is_closed(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = a_worker(bench)
    worker._turn()
    ask_of_drift(bench, "a")
    with monkeypatch.context() as patch:
        full = OSError(28, "No space left on device")
        patch.setattr(WorkerCheckpoint, "save", lambda *_: (_ for _ in ()).throw(full))
        worker._turn()
    assert worker.served["a"].learner.journal.drift.heeded
    before = checkpoints(bench)
    worker._close()
    assert checkpoints(bench)["a"] > before["a"]
    learn_drafting(bench.layout, "a", Drafting(depth=2, drafting="greedy"))
    before = checkpoints(bench)
    for _ in range(2):
        worker = a_worker(bench)
        worker._turn()
        worker._close()
    later = checkpoints(bench)
    assert int(later["a"][-9:]) == int(before["a"][-9:]) + 1, "measured from scratch once, and that is written down"
    assert later | {"a": ""} == before | {"a": ""}


def test_the_first_drafter_is_written_down_when_the_worker_ends_though_nothing_was_sent(bench: Bench) -> None:
    register(bench, "a")
    worker = a_worker(bench)
    worker._turn()
    assert not list(bench.layout.worker("a").glob("checkpoint-*"))
    worker._close()
    first: list[Path] = list(bench.layout.worker("a").glob("checkpoint-*"))
    assert len(first) == 1


def test_scores_that_a_full_redis_has_not_taken_are_sent_when_the_run_is_closed(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.begin()
    worker = bench.worker()
    batch = bench.post("x")
    with monkeypatch.context() as patch:
        patch.setattr(WorkersStore, "put_score", lambda *_: False)
        bench.drain(worker)
    assert bench.state(batch) == "trained"
    assert not bench.store.scores()
    newest = bench.checkpoint()
    worker.close()
    assert bench.store.scores().keys() == {batch}
    assert bench.checkpoint() == newest
