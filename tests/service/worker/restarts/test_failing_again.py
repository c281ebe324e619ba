"""What fails again and again, a file, a disk or Redis, keeps nobody waiting and is not laid to the batch."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Any

import pytest
from helpers.service.storage_fixtures import Store
from helpers.worker.death_fixtures import fails_with
from helpers.worker.worker_fixtures import Bench, states
from redis.exceptions import ConnectionError as RedisConnectionError

import service.storage.queue.lease
import service.worker.inbox
import service.worker.process.worker
import service.worker.promotion.promises
from drafter.batch import load_batch
from drafter.training.trainer import DrafterTrainer
from service.storage.queue.deliveries import MAX_DELIVERIES
from service.storage.queue.lease import Leases
from service.worker.claim import ClaimScorer
from service.worker.inbox import Inbox, Loaded
from service.worker.learner import TrainingStopped
from service.worker.lineage import Lineage
from service.worker.loop import RunWorker
from service.worker.process.worker import Worker
from service.worker.recent import RecentRollouts


def test_a_file_that_cannot_be_read_for_long_keeps_nobody_waiting_and_is_never_blamed(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Too many open files, a disk that fails: the batch was acknowledged, and has done no harm."""
    bench.begin()
    unread, read = bench.post("a"), bench.post("b")
    idle = 0.1

    def failing(path: Path, **options: Any) -> Any:
        if path.name.startswith(unread):
            raise OSError(24, "Too many open files")
        return load_batch(path, **options)

    with monkeypatch.context() as patch:
        patch.setattr(service.worker.inbox, "load_batch", failing)
        for _ in range(2):  # the second is a restart
            worker = bench.worker(claim_idle_seconds=idle)
            for _ in range(MAX_DELIVERIES):
                bench.drain(worker)
                time.sleep(2 * idle)
    assert (bench.state(unread), bench.state(read)) == ("queued", "trained")
    bench.drain(worker)
    assert states(bench) == ["trained", "trained"]


@pytest.mark.parametrize("error", [RedisConnectionError("away"), OSError(5, "Input/output error")])
def test_what_fails_again_and_again_after_a_death_is_not_laid_to_the_batch(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    bench.begin()
    bench.post("a")
    bench.worker().inbox.claim()  # and dies
    worker = bench.worker()
    with monkeypatch.context() as patch:
        patch.setattr(ClaimScorer, "score", fails_with(error))
        for _ in range(2 * MAX_DELIVERIES):
            with pytest.raises(type(error)):
                worker.cycle()
    bench.drain(worker)
    assert states(bench) == ["trained"], bench.reason(bench.posted[0])


def test_a_disk_that_fails_in_each_training_is_not_laid_to_the_batch(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.begin()
    bench.post("a")
    with monkeypatch.context() as patch:
        patch.setattr(DrafterTrainer, "step", fails_with(OSError(5, "Input/output error")))
        for _ in range(2 * MAX_DELIVERIES):
            with pytest.raises(TrainingStopped):  # the worker drops the run for that, and opens it again
                bench.worker().cycle()
    bench.drain(bench.worker())
    assert states(bench) == ["trained"], bench.reason(bench.posted[0])


def test_a_redis_that_goes_away_amid_a_training_has_no_rollout_trained_on_again(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between steps the worker asks whether newer rollouts wait. A candidate that is half trained must not go on."""
    bench.begin()
    worker = bench.worker(train_passes=8.0)
    bench.post("a")
    bench.drain(worker)
    trainer = worker.learner.lineage.needed_trainer
    ask, steps = Inbox.newest_waiting, trainer.windows

    def failing(self: Inbox, after: Loaded) -> int | None:
        if trainer.windows > steps + 2:
            raise RedisConnectionError("away")
        return ask(self, after)

    bench.post("b")
    with monkeypatch.context() as patch:
        patch.setattr(Inbox, "newest_waiting", failing)
        patch.setattr(Store, "put_score", fails_with(RedisConnectionError("away")))
        with pytest.raises(RedisConnectionError):
            worker.cycle()
    trained = trainer.windows
    assert trained == steps + 3
    assert worker.learner.judge.gate.training.is_part, "the next training goes on with it"
    bench.drain(worker)
    assert trainer.windows == trained
    assert states(bench) == ["trained"] * 2
    assert set(bench.store.scores()) == set(bench.posted)


def test_a_disk_that_fails_right_after_a_training_costs_no_score_and_trains_nothing_twice(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.begin()
    worker = bench.worker()
    bench.post("a")
    bench.drain(worker)
    bench.post("b")
    trainer, ask = worker.learner.lineage.needed_trainer, Lineage.served_version
    steps = trainer.windows

    def failing(self: Lineage) -> str | None:
        if trainer.windows > steps:
            raise OSError(5, "Input/output error")
        return ask(self)

    with monkeypatch.context() as patch:
        patch.setattr(Lineage, "served_version", failing)
        with pytest.raises(TrainingStopped):  # the worker drops the run for that, and opens it again
            worker.cycle()
    bench.drain(bench.worker())
    assert states(bench) == ["trained"] * 2
    assert set(bench.store.scores()) == set(bench.posted)
    assert bench.trainer_counts()["windows"] == trainer.windows


@pytest.mark.parametrize("when", ["opened", "worked on"])
def test_a_run_whose_part_of_the_disk_fails_keeps_no_other_run_waiting(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    bench.begin()
    bench.register(run="before-default")
    bench.post("a")
    if when == "opened":
        restore = RecentRollouts.__init__

        def failing(self: RecentRollouts, directory: Path, **options: Any) -> None:
            if "before-default" in directory.parts:
                raise OSError(5, "Input/output error")
            restore(self, directory, **options)

        monkeypatch.setattr(RecentRollouts, "__init__", failing)
    else:
        cycle = RunWorker.cycle
        broken = fails_with(OSError(5, "Input/output error"))
        monkeypatch.setattr(RunWorker, "cycle", lambda self: (cycle if self.run == "default" else broken)(self))
    worker = Worker(bench.settings, bench.redis)
    with contextlib.suppress(OSError):  # of the one run, after the other had its turn
        worker._turn()
    assert states(bench) == ["trained"]
    if when == "opened":
        assert "Input/output" in (Store(bench.redis, "before-default").worker().error or "")


def test_a_full_redis_keeps_nothing_from_being_worked_on_and_acknowledged(bench: Bench) -> None:
    """Not the first worker nor one that starts meanwhile: what is queued would fill it for ever."""
    bench.begin()
    for name in "abc":
        bench.post(name)
    first = Worker(bench.settings, bench.redis)
    first._turn()
    bench.post("d")
    limit = bench.redis.config_get("maxmemory")["maxmemory"]
    bench.redis.config_set("maxmemory", 1)
    try:
        first._turn()
        bench.redis.delete(Leases.key("default"))  # expired
        second = Worker(bench.settings, bench.redis)
        for _ in range(4):
            second._turn()
        assert states(bench) == ["trained"] * 4
        assert len(bench.store.scores()) == 1
        bench.redis.hdel(bench.store._keys.worker, "heartbeat")
        second._heartbeat.beat()
        assert bench.store.worker().heartbeat is not None, "or people would be told that it is silent"
    finally:
        bench.redis.config_set("maxmemory", limit)
    bench.post("e")
    second._turn()
    assert states(bench) == ["trained"] * 5
    assert set(bench.posted[2:]) <= set(bench.store.scores()), "those of the worker that lives were kept"
