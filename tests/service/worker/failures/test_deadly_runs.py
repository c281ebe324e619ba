"""Runs that kill the worker process are set aside, and tried again ever more rarely."""

from __future__ import annotations

import signal
import time
from collections import Counter
from pathlib import Path

import pytest
from helpers.service.storage_fixtures import RolloutQueue
from helpers.worker.failure_fixtures import FIRST, broken, error_of
from helpers.worker.record_fixtures import gauges
from helpers.worker.worker_fixtures import Bench, alive, nest, wait_until_gone
from redis.exceptions import ConnectionError as RedisConnectionError

import service.worker.claim
import service.worker.inbox
import service.worker.process.worker
from service.storage.reports.store import Store as WorkersStore
from service.storage.runs import change_state
from service.worker.process.worker import Worker


def test_a_run_that_kills_the_worker_when_it_is_opened_is_set_aside_and_the_others_train(
    bench: Bench, tmp_path: Path
) -> None:
    """As the kernel kills it for memory: no exception is caught, and the next process would open the run again."""
    bench.begin()
    bench.register(bench.world.run_file(drafter=bench.world.drafter()), run=FIRST)
    batch = bench.post("honest")
    with nest(tmp_path / "log") as workers:
        for _ in range(3):
            pid = workers.start(bench, dies_opening=FIRST)
            wait_until_gone(pid, 60.0)
        pid = workers.start(bench, dies_opening=FIRST)
        bench.wait(lambda: bench.state(batch) == "trained" or not alive(pid))
        assert alive(pid), "the fourth worker opened the run again"
        assert bench.state(batch) == "trained"
        # It may be said later: the run's lease is that of the process that died, until it expires.
        bench.wait(lambda: error_of(bench) or not alive(pid))
        assert "died 3 times while it opened this run" in error_of(bench)


def test_a_run_whose_every_batch_kills_the_worker_is_set_aside_and_the_others_train(
    bench: Bench, tmp_path: Path
) -> None:
    """Its drafter takes more memory than there is, say: each batch would kill three processes before it is dead."""
    bench.begin()
    bench.register(bench.world.run_file(drafter=bench.world.drafter()), run=FIRST)
    killers = [bench.post(f"killer{number}", run=FIRST) for number in range(4)]
    honest = bench.post("honest")
    deaths = 0
    with nest(tmp_path / "log") as workers:
        while True:
            pid = workers.start(bench, dies_training=FIRST)
            bench.wait(lambda pid=pid: bench.state(honest) == "trained" or not alive(pid))  # type: ignore[misc]
            if alive(pid):
                break
            deaths += 1
        print(f"{deaths} deaths until another run was trained")
        assert deaths == 4, deaths
        assert "died 4 times while it worked on this run" in error_of(bench)
        workers.kill(pid, signal.SIGTERM)
    queue = RolloutQueue(bench.redis, FIRST)
    states = Counter((queue.batch(batch) or {}).get("state") for batch in killers)
    assert states == {"queued": 3, "dead": 1}, "the others wait, and are not lost"


def test_a_run_that_was_set_aside_is_tried_again_later_ever_more_rarely_or_as_a_person_wants(
    bench: Bench, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = bench.layout.target_id(FIRST)
    assert file is not None
    store = WorkersStore(bench.redis, FIRST)

    def died(times: int, seconds_ago: float) -> None:
        store.set_worker(gauges({"opening": [*file, times, time.time() - seconds_ago]}))
        worker._runs.clear()  # it is another process now
        worker._room.put_off.clear()
        worker._room.sparing = False

    died(1, 0.0)
    worker._turn()
    assert FIRST in worker.served, "one death may have been any other's fault"
    assert store.begun("opening", file) == (0, 0.0), "the end of the opening is not noted"
    for times, seconds in ((3, 20.0), (4, 40.0), (6, 160.0), (60, 86_400.0)):
        died(times, seconds - 20.0)
        worker._turn()
        assert FIRST not in worker.served
        assert f"died {times} times" in error_of(bench)
        assert worker._runs[FIRST].retry_at - time.monotonic() < 21.0
        died(times, seconds + 1.0)
        worker._turn()
        assert FIRST in worker.served

    died(3, -5.0)
    worker._turn()
    assert FIRST not in worker.served, "another host's clock may be seconds ahead"
    died(3, -3600.0)
    worker._turn()
    assert FIRST in worker.served, "the clock was set back: nobody waits until it has caught up"
    died(9, 0.0)
    worker._turn()
    assert FIRST not in worker.served
    assert bench.redis.hget(f"da:{{{FIRST}}}:worker", "refused") is not None, "a PUT would not replace the file"
    change_state(bench.layout, FIRST, "paused", "to be tried again")
    worker._turn()
    change_state(bench.layout, FIRST, "active", "to be tried again")
    worker._turn()
    assert FIRST in worker.served

    died(9, 0.0)
    bench.layout.target(FIRST).write_bytes(bench.layout.target(FIRST).read_bytes())  # another file
    worker._turn()
    assert FIRST in worker.served


def test_redis_that_goes_away_while_a_run_is_opened_is_no_death_of_the_worker(
    bench: Bench, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = bench.layout.target_id(FIRST)
    away = broken(RedisConnectionError("away"), lambda *_: True, None)
    with monkeypatch.context() as patched:
        patched.setattr(service.worker.process.worker, "RunWorker", away)
        for _ in range(5):
            with pytest.raises(RedisConnectionError):
                worker._turn()
    assert WorkersStore(bench.redis, FIRST).begun("opening", file)[0] <= 1
    worker._turn()
    assert FIRST in worker.served
