"""Runs that cannot be opened, or are registered anew: they are tried again in time, and keep no other waiting."""

from __future__ import annotations

import resource
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.service.service_fixtures import HEADERS, RunningService
from helpers.service.storage_fixtures import RolloutQueue, Store
from helpers.worker.failure_fixtures import FIRST, a_minute_later, broken, error_of, turns
from helpers.worker.worker_fixtures import Bench

import service.worker.claim
import service.worker.inbox
import service.worker.process.worker
from drafter.errors import CheckpointError, DrafterError
from drafter.files.checkpoint import export_config
from rl_hooks import wire
from service.storage.queue.keys import Keys
from service.storage.queue.lease import Leases
from service.storage.registry import Registry
from service.storage.runs import commit_run, read_run_header, untouched, withdraw_run
from service.worker.learner import Learner
from service.worker.lineage import Lineage
from service.worker.process.worker import Worker


def test_a_run_that_cannot_be_opened_for_whatever_reason_says_so_and_keeps_no_other_waiting(
    bench: Bench, worker: Worker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    batch = bench.post("a")
    with monkeypatch.context() as patch:
        bad = broken(AttributeError("no attribute 'get'"), lambda self: self._run == FIRST, Lineage.begin)
        patch.setattr(Lineage, "begin", bad)
        turns(worker, bench, [batch])
        assert bench.state(batch) == "trained"
        assert "no attribute 'get'" in error_of(bench)
        assert error_of(bench, "default") is None
        assert "in begin" in caplog.text or "maybe" in caplog.text, "the traceback"
    for _ in range(3):
        worker._turn()
    assert error_of(bench) is None, "it was opened again, and nothing is said of it any more"


@pytest.mark.parametrize("fault", ["a drafter with NaN", "a config of before the check"])
def test_a_refused_run_that_is_registered_anew_is_tried_at_once(
    bench: Bench, worker: Worker, redis_url: str, fault: str
) -> None:
    """By PUT, as a trainer does; not a minute later, and the rollouts that were taken for it are trained."""
    bad = bench.world.drafter()
    if fault == "a drafter with NaN":
        bad.fc.weight.data[0, 0] = float("nan")
        bench.register(bench.world.run_file(drafter=bad), run="zz")
    else:
        config = export_config(bad.config) | {"norm_output": True}
        bench.register(bench.world.run_file(drafter=bad, drafter_config=config), run="zz", checked=False)
    batch = bench.post_file(bench.world.rollout_file("z", run="zz"))
    queue = RolloutQueue(bench.redis, "zz")
    worker._turn()
    assert error_of(bench, "zz")
    assert queue.batch(batch)["state"] == "queued"  # type: ignore[index]
    service = RunningService(state_dir=bench.layout.root, redis_url=redis_url)
    try:
        good = bench.world.run_file(drafter=bench.world.drafter())
        reply = service.client.put("/runs/zz", content=good, headers=HEADERS)
        assert (reply.status_code, reply.json()["worker_error"]) == (201, None)
        assert bench.layout.target("zz").read_bytes() == good
        for _ in range(3):
            worker._turn()
        assert queue.batch(batch)["state"] == "trained"  # type: ignore[index]
        described = service.client.get("/runs/zz").json()
        assert described["worker_error"] is None
        assert described["drafter"] is not None
        assert service.client.put("/runs/zz", content=good, headers=HEADERS).status_code == 200
    finally:
        service.stop()


def test_a_first_drafter_that_cannot_draft_is_tried_once_not_every_minute(
    bench: Bench, worker: Worker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Each try writes the whole drafter. A run that failed otherwise is tried again in a minute, as before."""
    bad = bench.world.drafter()
    for weight in bad.parameters():
        weight.data.fill_(1e30)
    bench.register(bench.world.run_file(drafter=bad), run="zz")
    staged: list[str] = []
    real = Registry.stage

    def counted(self: Registry, run: str) -> Path:
        staged.append(run)
        return real(self, run)

    monkeypatch.setattr(Registry, "stage", counted)
    now = time.monotonic
    for minute in range(30):
        monkeypatch.setattr(time, "monotonic", lambda minute=minute: now() + 61.0 * minute)
        worker._turn()
    assert staged.count("zz") == 1
    assert caplog.text.count("cannot draft") == 1
    assert "cannot draft" in (error_of(bench, "zz") or "")
    monkeypatch.setattr(time, "monotonic", lambda: now() + 3700.0)
    worker._turn()
    assert staged.count("zz") == 2, "a passing fault may have been taken for the drafter's"
    good = bench.world.run_file(drafter=bench.world.drafter())
    with bench.spool.upload() as upload:
        upload.write(good)
        record = read_run_header("zz", wire.parse_header(good))
        assert commit_run(bench.layout, record, upload, refused=bench.layout.target_id("zz"))
    worker._turn()
    assert staged.count("zz") == 3
    assert bench.layout.latest("zz").exists(), "another file is tried at once"


def test_a_worker_that_leaves_a_run_alone_for_an_hour_is_not_called_silent(bench: Bench, worker: Worker) -> None:
    """It would hide why nothing is done for the run, and page somebody."""
    bad = bench.world.drafter()
    for weight in bad.parameters():
        weight.data.fill_(1e30)
    bench.register(bench.world.run_file(drafter=bad), run="zz")
    worker._turn()
    assert worker._runs["zz"].retry_at > time.monotonic() + 3000.0
    key = Keys("zz").worker

    def beats() -> bool:
        bench.redis.hdel(key, "heartbeat")
        worker._heartbeat.beat()
        return bool(bench.redis.hexists(key, "heartbeat"))

    assert beats()
    other = Leases(bench.redis)
    assert other.hold("zz")
    assert not beats(), "another worker has it, and says so itself"
    other.give_back("zz")
    withdraw_run(bench.layout, "zz")
    assert not beats(), "nothing is written of one that is being deleted"


def test_only_a_file_that_the_worker_cannot_begin_with_is_refused_and_only_until_it_can(
    bench: Bench, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused() -> Any:
        return Store(bench.redis, FIRST).worker().refused

    file = bench.layout.target_id(FIRST)
    assert file is not None
    damaged = CheckpointError("it cannot be read")
    damaged.__cause__ = OSError(5, "Input/output error")
    too_large = DrafterError("it cannot be built")
    too_large.__cause__ = MemoryError("no memory left")
    passing = [torch.OutOfMemoryError("no memory left"), OSError(28, "No space left"), KeyError("what"), damaged]
    passing += [too_large]
    for error, told in [*((error, None) for error in passing), (DrafterError("holds NaN"), file)]:
        with monkeypatch.context() as patch:
            patch.setattr(Lineage, "begin", broken(error, lambda self: self._run == FIRST, Lineage.begin))
            a_minute_later(worker)
            worker._turn()
            assert error_of(bench)
            assert refused() == told
    a_minute_later(worker)
    worker._turn()
    assert (error_of(bench), refused()) == (None, None)
    batch = bench.post_file(bench.world.rollout_file("x", run=FIRST))
    monkeypatch.setattr(Learner, "train", broken(DrafterError("in training"), lambda *_: True, Learner.train))
    worker._turn()
    assert error_of(bench) == "in training"
    assert refused() is None
    assert RolloutQueue(bench.redis, FIRST).batch(batch)["state"] == "queued"  # type: ignore[index]


def test_a_run_that_is_registered_anew_while_it_trains_gets_no_checkpoint_of_the_old_target(
    bench: Bench, worker: Worker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bench.register(run="zz")  # from scratch: nothing is published
    batch = bench.post_file(bench.world.rollout_file("z", run="zz"))
    again = bench.layout.root / "again"
    again.write_bytes(bench.layout.target("zz").read_bytes())
    real = Learner.train

    def replaced(self: Learner, *args: Any) -> tuple[float, float]:
        if again.exists():
            again.replace(bench.layout.target("zz"))
        return real(self, *args)

    monkeypatch.setattr(Learner, "train", replaced)
    queue = RolloutQueue(bench.redis, "zz")
    worker._turn()
    assert not again.exists(), "it did train"
    assert untouched(bench.layout, "zz")
    assert queue.batch(batch)["state"] == "queued"  # type: ignore[index]
    assert "run zz was registered again" in caplog.text
    for _ in range(2):
        worker._turn()
    assert queue.batch(batch)["state"] == "trained"  # type: ignore[index]


def test_a_run_that_was_opened_and_is_registered_anew_is_opened_again(bench: Bench, worker: Worker) -> None:
    bench.register(run="zz")
    worker._turn()
    before = worker.served["zz"]
    again = bench.layout.root / "again"
    again.write_bytes(bench.layout.target("zz").read_bytes())
    again.replace(bench.layout.target("zz"))
    worker._turn()
    assert worker.served["zz"] is not before


def test_a_run_that_is_dropped_after_its_refused_file_was_replaced_is_opened_again_at_once(
    bench: Bench, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The minute of waiting is for the file that was refused, not for the one that took its place."""
    bench.register(run="zz")
    with monkeypatch.context() as patch:
        patch.setattr(Lineage, "begin", broken(DrafterError("NaN"), lambda self: self._run == "zz", Lineage.begin))
        worker._turn()
        assert "zz" not in worker.served
    again = bench.layout.root / "again"
    again.write_bytes(bench.layout.target("zz").read_bytes())
    again.replace(bench.layout.target("zz"))
    worker._turn()
    worker._drop("zz", "the lease is gone")
    worker._turn()
    assert "zz" in worker.served


def test_100_runs_and_few_descriptors_leave_an_honest_run_trained(bench: Bench, worker: Worker) -> None:
    """Each has a rollout file waiting, so each is opened and worked on; the process may open some 40 files more."""
    body = bench.world.run_file()
    for number in range(100):
        bench.register(body, run=f"many-{number:02d}")
        bench.post_file(bench.world.rollout_file("x", run=f"many-{number:02d}", rollouts=1))
    batch = bench.post("a")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(list(Path("/proc/self/fd").iterdir())) + 40, hard))
    try:
        turns(worker, bench, [batch], 700)
        assert len(worker.served) == 102, "all are open now"
        later = bench.post("b")
        turns(worker, bench, [later], 700)
        assert bench.state(batch) == bench.state(later) == "trained"
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert not [run for run in worker.served if error_of(bench, run)]


def test_a_run_that_fails_again_and_again_is_tried_ever_less_often(
    bench: Bench, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service.worker.process.worker, "_FAILED_SECONDS", 1.0)
    for count, pause in enumerate((1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0), 1):
        before = time.monotonic()
        worker._handle_error(FIRST, ValueError("again"))
        assert worker._runs[FIRST].failures == count
        assert before + pause <= worker._runs[FIRST].retry_at <= time.monotonic() + pause
    worker._runs[FIRST].failures = 10_000  # a week of it
    worker._handle_error(FIRST, ValueError("again"))
