"""A worker's sign of life: whose clock it bears, and how often it comes."""

from __future__ import annotations

import asyncio
import re
import shutil
import threading
import time
from collections.abc import Sequence
from types import SimpleNamespace

import pytest
import redis.asyncio
from helpers.service.service_fixtures import RunningService
from helpers.service.storage_fixtures import Store
from helpers.worker.record_fixtures import gauges
from helpers.worker.worker_fixtures import Bench, Nest
from redis import Redis

from service.storage.queue.deliveries import RolloutQueue
from service.storage.reports.summary import Summary, summary_of
from service.worker.process import heartbeat
from service.worker.process.worker import Worker


@pytest.mark.parametrize("ahead", [70.0, -70.0])
def test_a_worker_whose_clock_is_wrong_is_not_called_silent(
    bench: Bench, service: RunningService, workers: Nest, ahead: float
) -> None:
    """It would hide what is wrong with the run, and page somebody."""
    bench.begin()
    service.server._context.lifetime.began = 0.0
    workers.start(bench, clock_ahead=ahead)
    batch = bench.post("a")
    bench.wait(lambda: bench.state(batch) == "trained")
    said = service.client.get("/runs/default").json()["headline"]
    assert not any("Worker silent" in text for text in (said["text"], *said["also"])), said
    found = re.search(
        r'^draftalign_worker_heartbeat_timestamp_seconds\{run="default"\} (\S+)',
        service.client.get("/metrics").text,
        re.M,
    )
    assert found is not None
    assert abs(float(found[1]) - time.time()) < 30.0


def test_who_reads_a_sign_of_life_needs_no_right_clock(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(bench.redis, "default")
    assert store.served_ago() is None
    store.set_worker(gauges({"error": None}))
    right = time.time
    monkeypatch.setattr(time, "time", lambda: right() + 3600.0)
    ago = store.served_ago()
    assert ago is not None
    assert 0.0 <= ago < 30.0
    store.set_worker(gauges({"error": "the disk is full"}))
    assert store.served_ago() is None


@pytest.mark.parametrize("ahead", [3600.0, -3600.0])
def test_who_reads_how_long_a_batch_waits_needs_no_right_clock(
    bench: Bench, service: RunningService, monkeypatch: pytest.MonkeyPatch, ahead: float
) -> None:
    """An API whose host is an hour ahead would say of each batch that it has waited for an hour."""
    bench.begin()
    bench.post("a")
    right = time.time
    monkeypatch.setattr(time, "time", lambda: right() + ahead)
    found = asyncio.run(found_in(bench.redis_url))
    assert found.oldest_queued is not None
    assert abs(found.oldest_queued - time.time()) < 60.0
    said = service.client.get("/runs/default").json()["headline"]
    assert not any("waits for 60 min" in text for text in (said["text"], *said["also"])), said


async def found_in(redis_url: str) -> Summary:
    async with redis.asyncio.Redis.from_url(redis_url) as client:
        return await summary_of(client, "default")


def test_a_beat_writes_nothing_of_a_run_that_is_deleted_meanwhile(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run is let go, and its keys are deleted, as soon as the beat allows it: at its first write, say."""
    bench.begin()
    bench.post("a")
    client = Redis.from_url(bench.redis_url)
    worker = Worker(bench.settings, client)
    worker._find_runs()
    assert worker.served["default"].inbox.claim()
    shutil.rmtree(bench.layout.run("default"))

    def delete() -> None:
        worker._let_go("default")
        client.delete(*client.scan_iter("da:{default}:*"))

    deletion = threading.Thread(target=delete)
    beat = RolloutQueue.heartbeat

    def beat_late(self: RolloutQueue, consumer: str, entry_ids: Sequence[str]) -> list[str]:
        deletion.start()
        deletion.join(2.0)
        return beat(self, consumer, entry_ids)

    monkeypatch.setattr(RolloutQueue, "heartbeat", beat_late)
    worker._heartbeat.beat()
    deletion.join()
    assert list(client.scan_iter("da:{default}:*")) == []
    worker._heartbeat.beat()
    assert list(client.scan_iter("da:{default}:*")) == []


def test_a_beat_that_takes_long_itself_comes_as_often(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """As that of 256 runs, where Redis syncs each write to a disk that takes its time."""
    worker = Worker(bench.settings, Redis.from_url(bench.redis_url))
    clock, beats, slept = 0.0, 0, list[float]()

    def sleep(seconds: float) -> None:
        nonlocal clock
        clock += seconds
        slept.append(seconds)

    def beat() -> None:
        nonlocal clock, beats
        clock, beats = clock + (2.0, 7.0, 2.0)[beats], beats + 1
        worker._heartbeat._ended = beats == 3

    monkeypatch.setattr(heartbeat, "time", SimpleNamespace(monotonic=lambda: clock, sleep=sleep))
    monkeypatch.setattr(worker._heartbeat, "beat", beat)
    worker._heartbeat._work()
    assert slept == [3.0, 1.0, 0.0]
