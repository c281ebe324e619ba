"""A disk that fails one run, or all: that run waits, and nothing is lost."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from helpers.service.service_fixtures import RunningService
from helpers.service.storage_fixtures import RolloutQueue
from helpers.worker.failure_fixtures import FIRST, a_minute_later, broken, error_of, turns
from helpers.worker.worker_fixtures import Bench

from service.storage.queue.deliveries import MAX_DELIVERIES
from service.worker.checkpoint import WorkerCheckpoint
from service.worker.process.worker import Worker


@pytest.mark.parametrize("trouble", ["its part of the disk is full", "its directory is no directory any more"])
def test_a_disk_that_fails_one_run_pauses_that_run_alone(
    bench: Bench, worker: Worker, monkeypatch: pytest.MonkeyPatch, redis_url: str, trouble: str
) -> None:
    """The others lose no turn; it says so, waits longer each time, and goes on with what it had in hand."""
    worker._turn()
    ours, directory = bench.post_file(bench.world.rollout_file("x", run=FIRST)), bench.layout.worker(FIRST)
    queue, kept = RolloutQueue(bench.redis, FIRST), directory.with_name("kept")
    waits: list[float] = []
    with monkeypatch.context() as patch:
        if trouble == "its part of the disk is full":
            full = OSError(28, "No space left on device")
            patch.setattr(WorkerCheckpoint, "save", broken(full, lambda self, *_: FIRST in self._directory.parts,
                                                           WorkerCheckpoint.save))  # fmt: skip
        else:
            directory.rename(kept)
            directory.write_text("")
        for n in range(4):
            other = bench.post(f"b{n}")
            assert turns(worker, bench, [other]) <= 4, "it does not wait for the other's disk"
            while worker._runs[FIRST].failures == n:
                worker._turn()
            waits.append(worker._runs[FIRST].retry_at - time.monotonic())
            worker._turn()
            assert worker._runs[FIRST].failures == n + 1, "it is not asked before then"
            worker._runs[FIRST].retry_at = 0.0
        assert waits == pytest.approx([5.0, 10.0, 20.0, 40.0], abs=3.0)
        assert (error_of(bench) or "").startswith("[Errno"), error_of(bench)
        assert error_of(bench, "default") is None
        assert queue.batch(ours)["state"] == "queued"  # type: ignore[index]
        with_api = RunningService(state_dir=bench.layout.root, redis_url=redis_url)
        try:
            assert with_api.client.get(f"/runs/{FIRST}").json()["worker_error"] == error_of(bench)
            text = with_api.client.get("/metrics").text
        finally:
            with_api.stop()
        assert f'draftalign_worker_error{{run="{FIRST}"}} 1.0' in text
        assert 'draftalign_worker_error{run="default"} 0.0' in text
    if kept.exists():
        directory.unlink()
        kept.rename(directory)
    a_minute_later(worker)
    worker._turn()
    assert queue.batch(ours)["state"] == "trained"  # type: ignore[index]
    assert error_of(bench) is None
    assert worker._runs[FIRST].failures == 0
    assert worker._runs[FIRST].worker.learner.journal.totals.batches == 1, "scored once"  # type: ignore[union-attr]


def test_a_disk_that_is_full_for_everybody_loses_and_acknowledges_nothing(
    bench: Bench, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs, ours = bench.post("a"), bench.post_file(bench.world.rollout_file("x", run=FIRST))
    queue = RolloutQueue(bench.redis, FIRST)

    def ends() -> list[str]:
        return [bench.state(theirs), queue.batch(ours)["state"]]  # type: ignore[index]

    with monkeypatch.context() as patch:
        full = broken(OSError(28, "No space left on device"), lambda *_: True, WorkerCheckpoint.save)
        patch.setattr(WorkerCheckpoint, "save", full)
        for _ in range(2 * MAX_DELIVERIES):
            worker._turn()
            a_minute_later(worker)
        assert ends() == ["queued", "queued"]
        assert "No space" in error_of(bench)
        assert "No space" in error_of(bench, "default")
    worker._turn()
    worker._turn()
    assert ends() == ["trained", "trained"]
    assert {error_of(bench), error_of(bench, "default")} == {None}


def test_a_run_whose_directory_cannot_be_looked_into_keeps_no_other_waiting(
    bench: Bench, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker._turn()
    stat = Path.stat

    def refusing(self: Path, **options: Any) -> Any:
        if self == bench.layout.run_json(FIRST):
            raise PermissionError(13, "Permission denied", str(self))
        return stat(self, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "stat", refusing)
        worker._runs[FIRST].worker = None
        turns(worker, bench, [bench.post("a")])
        assert "Permission denied" in error_of(bench)
    a_minute_later(worker)
    worker._turn()
    worker._turn()
    assert error_of(bench) is None
