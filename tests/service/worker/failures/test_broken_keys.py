"""A key of one run in Redis holds what the service did not write: the other runs train and are shown as before."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from helpers.service.service_fixtures import RunningService
from helpers.service.storage_fixtures import RolloutQueue
from helpers.worker.failure_fixtures import FIRST, error_of, turns
from helpers.worker.worker_fixtures import Bench, Nest
from redis import Redis

from service.worker.process.worker import Worker

_REPORT = {"run": "other", "reporter": "e", "drafter_version": "v1", "policy_version": 3, "window_seconds": 5.0} | {
    "rounds": 1000,
    "accepted_tokens": 10,
    "drafted_tokens": 4000,
    "emitted_tokens": 1010,
}


@contextmanager
def overwritten(redis: Redis, key: bytes) -> Iterator[None]:
    """Have another kind of value at a key; it is as it was at the end."""
    was, kind = redis.dump(key), redis.type(key)
    redis.delete(key)
    if kind == b"string":
        redis.lpush(key, "x")
    else:
        redis.set(key, "x")
    yield
    redis.delete(key)
    if was is not None:
        redis.restore(key, 0, was, replace=True)  # a worker may have written meanwhile


def ended(bench: Bench, run: str, batch: str) -> str | None:
    """The state of a batch."""
    return (RolloutQueue(bench.redis, run).batch(batch) or {}).get("state")


def trained(bench: Bench, batch: str) -> Callable[[], bool]:
    """For `Bench.wait`."""
    return lambda: ended(bench, "default", batch) == "trained"


def test_whichever_key_of_a_run_is_broken_the_other_run_trains_and_is_shown(
    bench: Bench, service: RunningService, workers: Nest
) -> None:
    bench.begin()
    bench.register(bench.world.run_file(drafter=bench.world.drafter()), run="other")
    workers.start(bench)
    first = [bench.post("a"), bench.post("a", run="other")]
    assert service.client.post("/acceptance", json=_REPORT).status_code == 200
    bench.wait(lambda: [ended(bench, "default", first[0]), ended(bench, "other", first[1])] == ["trained"] * 2)
    keys = [key for key in bench.redis.scan_iter("da:{other}:*") if b":rollout:" not in key]
    assert len(keys) > 12
    for number, key in enumerate(sorted(keys)):
        with overwritten(bench.redis, key):
            bench.wait(trained(bench, bench.post(f"b{number}")))
            assert service.client.get("/readyz").status_code == 200
            runs = {one["run"]: one["headline"]["state"] for one in service.client.get("/runs").json()["runs"]}
            assert runs.keys() == {"default", "other"}, key
            assert runs["default"] != "unreadable"
            told = service.client.get("/metrics").text
            assert re.search(r'^draftalign_alpha{.*run="default"', told, re.MULTILINE), key
            for path in ("/runs/other", "/alpha?run=other", "/drafter/latest?run=other"):
                reply = service.client.get(path)
                assert reply.status_code in (200, 500), (key, path, reply.text)
                assert reply.status_code == 200 or reply.json()["type"] == "urn:draftalign:run-damaged", key


@pytest.mark.parametrize("name", ["queue", "worker", "lease", "counters"])
def test_a_worker_tells_a_broken_key_as_its_runs_trouble_and_works_on(
    bench: Bench, worker: Worker, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    worker._turn()
    batches = [bench.post("a", run=FIRST), bench.post("b")]
    with overwritten(bench.redis, f"da:{{{FIRST}}}:{name}".encode()):
        turns(worker, bench, batches[1:])
        assert bench.state(batches[1]) == "trained"
        assert name in ("worker", "lease") or "WRONGTYPE" in (error_of(bench) or "")
    assert "WRONGTYPE" in caplog.text
    assert "does not answer" not in caplog.text
    for _ in range(4):
        worker._turn()
    assert ended(bench, FIRST, batches[0]) == "trained"
    assert error_of(bench) is None
