"""Exceptions that nobody foresaw end at their run or their batch: the process and the other runs go on."""

from __future__ import annotations

import gc
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.service.valkey_fixtures import OwnValkey
from helpers.worker.failure_fixtures import FIRST, broken
from helpers.worker.worker_fixtures import Bench

import service.worker.claim
import service.worker.inbox
import service.worker.process.worker
from drafter.training.trainer import DrafterTrainer
from service.storage.queue.deliveries import RolloutQueue as WorkersQueue
from service.storage.queue.lease import Leases
from service.worker.loop import RunWorker
from service.worker.process.worker import Worker


class ClosedBetween:
    """The state of a run that another thread closes right after it was looked at."""

    def __init__(self, worker: object) -> None:
        self.looks = [worker]

    @property
    def worker(self) -> object:
        return self.looks.pop() if self.looks else None


def test_a_heartbeat_never_meets_a_run_that_is_closed_while_it_looks(worker: Worker) -> None:
    """Or it would take the lease again that an orderly stop has just given back."""
    worker._turn()
    worker._runs[FIRST] = ClosedBetween(worker.served[FIRST])  # type: ignore[assignment]
    assert None not in worker.served.values()


def test_a_worker_keeps_no_file_of_a_run_open(bench: Bench, worker: Worker) -> None:
    """Or some thousand registered runs would be all that a process may open."""
    bench.register(run="zz")
    worker._turn()
    assert worker.served.keys() == {FIRST, "default", "zz"}
    worker.served[FIRST].learner.target.lm_head()
    gc.collect()
    assert "target.safetensors" not in Path("/proc/self/maps").read_text(), "a map holds its file open"


def test_a_device_that_failed_ends_the_process_because_no_run_can_use_it_any_more(
    bench: Bench, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = bench.post("a")
    error = torch.AcceleratorError("CUDA error: device-side assert triggered")
    monkeypatch.setattr(DrafterTrainer, "step", broken(error, lambda *_: True, DrafterTrainer.step))
    with pytest.raises(torch.AcceleratorError):
        worker._turn()
    assert bench.state(batch) == "queued"


def test_heartbeats_survive_whatever_is_raised_and_one_runs_trouble_is_not_the_others(
    bench: Bench, worker: Worker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(service.worker.process.heartbeat, "_BEAT_SECONDS", 0.01)
    worker._turn()
    beats: list[str] = []
    beat = WorkersQueue.heartbeat

    def failing(self: WorkersQueue, *args: Any) -> Any:
        beats.append(self.run)
        if self.run == FIRST:
            raise TypeError("unhashable")
        return beat(self, *args)

    monkeypatch.setattr(WorkersQueue, "heartbeat", failing)
    with worker._heartbeat.beating() as thread:
        bench.wait(lambda: beats.count("default") >= 3)
        assert [r.getMessage() for r in caplog.records if r.exc_info] == [
            f"no heartbeat for run {FIRST} (said once for each kind of error)"
        ]
    thread.join(60)
    assert not thread.is_alive()


def test_a_beat_that_fails_before_it_comes_to_any_run_does_not_end_the_heartbeat(
    worker: Worker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(service.worker.process.heartbeat, "_BEAT_SECONDS", 0.01)
    beats: list[int] = []
    twice = threading.Event()

    def failing() -> None:
        beats.append(1)
        if len(beats) == 3:
            twice.set()
        raise MemoryError("no room for a list of runs")

    monkeypatch.setattr(worker._heartbeat, "beat", failing)
    with worker._heartbeat.beating() as thread:
        assert twice.wait(60)
    thread.join(60)
    assert [r.getMessage() for r in caplog.records if r.exc_info] == [
        "a heartbeat failed (said once for each kind of error)"
    ]


def test_an_orderly_stop_closes_every_run_whatever_one_of_them_raises(
    bench: Bench, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.post("a")
    worker._settings = bench.settings.model_copy(update={"checkpoint_seconds": 1e9})
    worker._turn()
    bad = broken(TypeError("unhashable"), lambda self: self.run == FIRST, RunWorker.close)
    monkeypatch.setattr(RunWorker, "close", bad)
    worker._close()
    assert bench.state(bench.posted[0]) == "trained"
    assert bench.redis.get(Leases.key("default")) is None


def test_a_redis_that_takes_no_writes_is_told_once_a_minute_not_at_each_try(
    tmp_path: Path, own_valkey: OwnValkey, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with Bench(tmp_path, own_valkey.url) as bench:
        bench.begin()
        bench.redis.execute_command("REPLICAOF", "127.0.0.1", "1")
        worker = Worker(bench.settings, bench.redis)
        tries = 0

        def pause(_: float) -> None:
            nonlocal tries
            tries += 1
            if tries == 20:
                worker.stop()

        monkeypatch.setattr(worker, "_pause", pause)
        worker.serve()
    told = [record.message for record in caplog.records if "read-only replica" in record.message]
    assert len(told) == 1
    assert "give the address of its primary" in told[0]
