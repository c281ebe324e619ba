"""Several workers share the runs out: each has as many as the others, also where one comes later or dies."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.service.storage_fixtures import RolloutQueue, Store
from helpers.worker.record_fixtures import gauges
from helpers.worker.worker_fixtures import Bench, Nest, nest
from redis import Redis

from service.storage.queue import lease
from service.storage.queue.keys import Keys
from service.storage.queue.lease import WORKERS, Leases
from service.storage.runs import change_state
from service.worker.lineage import Lineage
from service.worker.loop import RunWorker
from service.worker.process import heartbeat, share
from service.worker.process import worker as process
from service.worker.process.share import Share
from service.worker.process.worker import Worker

RUNS = [f"run{n}" for n in range(4)]


@pytest.fixture
def workers(tmp_path: Path) -> Iterator[Nest]:
    with nest(tmp_path / "log") as made:
        yield made


def holders(bench: Bench) -> Counter[str]:
    """How many runs each worker has the lease on."""
    found = [bench.redis.get(Leases.key(run)) for run in RUNS]
    return Counter(name.decode() for name in found if name is not None)


def a_worker(bench: Bench) -> Worker:
    return Worker(bench.settings, Redis.from_url(bench.redis_url))


def other_worker(bench: Bench) -> Leases:
    """All that the others see of a worker."""
    return Leases(Redis.from_url(bench.redis_url))


def begin(bench: Bench) -> None:
    """Four runs, each with a batch that waits: who has nothing to do is not handed over."""
    for run in RUNS:
        bench.register(bench.world.run_file(drafter=bench.world.drafter()), run=run)
        bench.post(f"waits {run}", run=run)


def trained(bench: Bench, run: str, batch: str) -> bool:
    record = RolloutQueue(bench.redis, run).batch(batch)
    return record is not None and record["state"] == "trained"


@pytest.mark.slow
def test_a_worker_that_comes_later_gets_its_share_and_a_dead_ones_runs_go_back(bench: Bench, workers: Nest) -> None:
    def at_work() -> list[int]:
        """How many runs each worker has, while work comes for all of them."""
        for run in RUNS:
            if not bench.redis.xlen(Keys(run).queue):
                bench.post(f"more {run} {time.monotonic_ns()}", run=run)
        return sorted(holders(bench).values())

    begin(bench)
    first = workers.start(bench, lease_seconds=2.0)
    bench.wait(lambda: sorted(holders(bench).values()) == [4])
    batches = [(run, bench.post(f"before {run}", run=run)) for run in RUNS]
    second = workers.start(bench, lease_seconds=2.0)
    bench.wait(lambda: at_work() == [2, 2])
    batches += [(run, bench.post(f"shared {run}", run=run)) for run in RUNS]
    bench.wait(lambda: all(trained(bench, *batch) for batch in batches))
    third = workers.start(bench, lease_seconds=2.0)
    bench.wait(lambda: at_work() == [1, 1, 2])
    workers.kill(second)
    bench.wait(lambda: at_work() == [2, 2])
    workers.kill(third, signal.SIGTERM)
    # While work comes: after a death at work the one that is left opens no run without any.
    bench.wait(lambda: at_work() == [4])
    batches += [(run, bench.post(f"alone {run}", run=run)) for run in RUNS]
    bench.wait(lambda: all(trained(bench, *batch) for batch in batches))
    workers.kill(first, signal.SIGTERM)
    assert bench.redis.hlen(WORKERS) <= 1, "who ends leaves; who was killed is forgotten by the next"


RANK = """
import service.storage.queue.lease
import service.worker.process.heartbeat
from service.cli.main import app

service.storage.queue.lease.LEASE_SECONDS = 5.0
service.worker.process.heartbeat._BEAT_SECONDS = 0.2
app(["worker"])
"""


@contextmanager
def two_ranks(bench: Bench, directory: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A worker of two processes, under torchrun, which starts none again."""
    (directory / "rank.py").write_text(RANK)
    given = {k: v for k, v in bench.settings.model_dump(exclude_defaults=True).items() if k != "tokens"}
    variables = {f"DRAFTALIGN_{k.upper()}": str(v) for k, v in given.items()}
    variables |= {"DRAFTALIGN_REDIS_URL": bench.redis_url, "OMP_NUM_THREADS": "1"}
    variables |= {"PYTHONPATH": str(Path(__file__).parents[3])}
    argv = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "0"]
    argv += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1"]
    with subprocess.Popen([*argv, str(directory / "rank.py")], env=os.environ | variables) as agent:
        try:
            yield agent
            agent.terminate()
            agent.wait(60)
        finally:
            left = ranks_of(agent) if agent.poll() is None else []
            for pid in left:  # they would go on working on the next test's runs
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            agent.kill()


def ranks_of(agent: subprocess.Popen[bytes]) -> list[int]:
    """Process ids of the ranks that torchrun started, in their order."""
    children = Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split()
    return [int(pid) for pid in children]


@pytest.mark.slow
def test_a_worker_of_two_ranks_hands_runs_over_and_when_a_rank_dies_the_other_worker_has_them_all(
    tmp_path: Path, redis_url: str, workers: Nest
) -> None:
    with Bench(tmp_path / "state", redis_url) as bench, two_ranks(bench, tmp_path) as ranks:

        def at_work() -> list[int]:
            for run in RUNS:
                if not bench.redis.xlen(Keys(run).queue):
                    batches.append((run, bench.post(f"more {run} {time.monotonic_ns()}", run=run)))
            return sorted(holders(bench).values())

        batches: list[tuple[str, str]] = []
        begin(bench)
        bench.wait(lambda: at_work() == [4], 120)
        single = workers.start(bench, lease_seconds=5.0)
        bench.wait(lambda: at_work() == [2, 2], 120)
        batches += [(run, bench.post(f"shared {run}", run=run)) for run in RUNS]
        bench.wait(lambda: all(trained(bench, *batch) for batch in batches), 120)
        os.kill(ranks_of(ranks)[1], signal.SIGKILL)
        bench.wait(lambda: at_work() == [4], 120)
        assert ranks.wait(60) != 0, "torchrun was to start none again"
        bench.wait(lambda: all(trained(bench, *batch) for batch in batches), 120)
        for run in RUNS:
            counters = RolloutQueue(bench.redis, run).counters()
            assert (counters["acked_total"], counters["dead_total"]) == (counters["accepted_total"], 0), run
        workers.kill(single, signal.SIGTERM)


def test_who_has_its_share_leaves_the_rest_for_a_while_and_then_takes_what_nobody_serves(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "_LOOK_FOR_RUNS_SECONDS", 0.0)
    begin(bench)
    other = other_worker(bench)
    worker = a_worker(bench)
    assert other.others(0) == {}
    for _ in range(3):
        other.others(0)
        worker._find_runs()
        assert len(worker.served) == 2, "the other one lives, and may want two"
    first, second = sorted(set(RUNS) - set(worker.served))
    Store(bench.redis, first).set_worker(gauges({"action": "train"}))
    Store(bench.redis, second).set_worker(gauges({"error": "the GPU's memory ran out"}))
    for run in worker._share._left_since:
        worker._share._left_since[run] -= 40.0  # time passes
    assert other.hold(second)  # one that cannot open it, now and then
    worker._find_runs()
    other.give_back(second)
    other.others(0)
    worker._find_runs()
    assert set(RUNS) - set(worker.served) == {first}, "that was served just now, the other by nobody"
    Store(bench.redis, first).set_worker(gauges({"heartbeat": time.time() - 40.0}))
    worker._share._left_since[first] -= 40.0  # time passes
    other.others(0)
    worker._find_runs()
    assert len(worker.served) == 4
    worker._close()


def handed_over(bench: Bench, monkeypatch: pytest.MonkeyPatch, has: int) -> tuple[Worker, Leases, set[str]]:
    """A worker with all four runs that has handed one over to another, which `has` some; and which one."""
    monkeypatch.setattr(process, "_LOOK_FOR_RUNS_SECONDS", 0.0)
    monkeypatch.setattr(share, "_HAND_OVER_SECONDS", 0.0)
    begin(bench)
    worker = a_worker(bench)
    worker._find_runs()
    assert len(worker.served) == 4
    other = other_worker(bench)
    other.others(has)
    worker._find_runs()
    gone = set(RUNS) - set(worker.served)
    assert len(gone) == 1
    return worker, other, gone


def an_hour_passes(bench: Bench, worker: Worker, run: str) -> None:
    """In which nobody serves a run that this worker has handed over."""
    worker._share._untaken_since -= 3600.0
    worker._share._left_since[run] -= 3600.0
    Store(bench.redis, run).set_worker(gauges({"heartbeat": time.time() - 7200.0}))  # before it was handed over


def test_a_run_that_is_handed_over_is_left_alone_and_the_next_waits_until_it_is_taken(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, other, gone = handed_over(bench, monkeypatch, 0)
    for _ in range(3):
        worker._find_runs()
        assert set(RUNS) - set(worker.served) == gone, "it does not take it itself, nor hands over the next"
    assert other.hold(*gone)
    for _ in range(2):
        other.others(0)
        worker._find_runs()
    assert len(worker.served) == 2, "the next one, once that is taken"
    worker._close()


def test_of_those_at_work_the_one_that_works_second_most_is_handed_over(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So the two that work most come to be parted."""
    monkeypatch.setattr(process, "_LOOK_FOR_RUNS_SECONDS", 0.0)
    begin(bench)
    worker = a_worker(bench)
    worker._find_runs()
    for run, seconds in zip(RUNS, (1.0, 3.0, 2.0, 0.0), strict=True):
        worker._turns.asked(run, seconds, at_work=True)
    other_worker(bench).others(0)
    worker._find_runs()
    assert set(RUNS) - set(worker.served) == {RUNS[2]}
    worker._close()


def test_a_run_that_was_taken_and_closed_for_others_between_two_looks_keeps_no_other_from_being_handed_over(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who has it looks after it without its lease, and opens it for its next batch."""
    worker, other, gone = handed_over(bench, monkeypatch, 0)
    an_hour_passes(bench, worker, *gone)
    Store(bench.redis, *gone).set_worker(gauges({"heartbeat": time.time()}))
    for _ in range(2):
        other.others(0)
        worker._find_runs()
    assert len(worker.served) == 2
    worker._close()


@pytest.mark.parametrize(("workers", "each", "asked"), [(4, 2, 1), (10, 2, 1), (10, 4, 3), (1, 4, 1)])
def test_as_many_hand_a_run_over_as_a_worker_that_comes_lacks(
    redis_client: Redis, workers: int, each: int, asked: int
) -> None:
    """All see it within the same second, and each hand-over costs a checkpoint, an end and a beginning."""
    leases = [Leases(redis_client) for _ in range(workers)]
    for one in leases:
        one.others(each)
    Leases(redis_client).others(0)
    wanted = workers * each
    handing = [Share(redis_client, one).look(each, wanted, 0.0) for one in leases]
    assert sum(handing) == asked


def test_a_note_that_is_no_note_or_of_a_clock_that_was_ahead_is_no_workers(redis_client: Redis) -> None:
    in_an_hour = f"{(time.time() + 3600.0) * 1000.0:.0f} 0"
    redis_client.hset(WORKERS, mapping={"another machine/1/x": "nonsense", "another machine/2/x": in_an_hour})
    assert Leases(redis_client).others(1) == {}
    assert redis_client.hlen(WORKERS) == 1


def test_a_run_that_is_left_is_taken_back_at_once_where_no_other_worker_lives(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, other, _ = handed_over(bench, monkeypatch, 0)
    other.leave()
    worker._find_runs()
    assert len(worker.served) == 4
    worker._close()


def test_a_run_that_is_left_and_paused_keeps_no_other_from_being_handed_over(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, other, gone = handed_over(bench, monkeypatch, 0)
    change_state(bench.layout, gone.pop(), "paused", "for a test")
    for _ in range(2):
        other.others(0)
        worker._find_runs()
    assert len(worker.served) == 2
    worker._close()


def test_a_run_with_nothing_to_do_is_not_handed_over_and_one_with_work_is_also_to_who_opens_no_other(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that started after a death at work looks after a run without work and does not open it."""
    monkeypatch.setattr(process, "_LOOK_FOR_RUNS_SECONDS", 0.0)
    monkeypatch.setattr(share, "_HAND_OVER_SECONDS", 0.0)
    begin(bench)
    worker, other = (a_worker(bench) for _ in range(2))
    while not all(trained(bench, run, batch) for run, batch in zip(RUNS, bench.posted, strict=True)):
        worker._turn()
    other._room.sparing = True
    for _ in range(4):
        other._turn()
        worker._turn()
        other._heartbeat.beat()
        assert len(worker.served) == 4
    for run in RUNS:
        bench.post(f"more {run}", run=run)
    for _ in range(4):
        other._find_runs()
        worker._find_runs()
    assert (len(worker.served), len(other.served)) == (2, 2)
    other._close()
    worker._close()


def test_a_run_that_nobody_takes_comes_back_and_none_is_handed_over_for_long(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, other, gone = handed_over(bench, monkeypatch, 0)
    an_hour_passes(bench, worker, *gone)
    for _ in range(3):
        other.others(0)
        worker._find_runs()
        assert len(worker.served) == 4
    worker._close()


def test_a_run_that_cannot_be_opened_is_given_back_for_others_and_is_in_nobodys_share(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "_LOOK_FOR_RUNS_SECONDS", 0.0)
    begin(bench)
    bench.layout.target(RUNS[0]).write_bytes(b"damaged")
    worker = a_worker(bench)
    worker._find_runs()
    assert set(worker.served) == set(RUNS[1:])
    assert not bench.redis.exists(Leases.key(RUNS[0]))
    other = other_worker(bench)
    other.others(1)
    bench.register(bench.world.run_file(drafter=bench.world.drafter()), run="run4")
    worker._find_runs()
    # Three is half of five, but of the four that can be opened it is more than half.
    assert worker._share._most == 2
    worker._close()


def test_a_run_that_the_other_one_leaves_as_it_has_its_share_is_served_at_once(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """How many runs the other one has is known late: two workers that start together both open two."""
    monkeypatch.setattr(process, "_LOOK_FOR_RUNS_SECONDS", 0.0)
    begin(bench)
    other, worker = other_worker(bench), a_worker(bench)
    other.others(0)
    assert other.hold(RUNS[0])
    assert other.hold(RUNS[1])
    for _ in range(2):
        worker._find_runs()
    assert len(worker.served) == 1, "it hands one over to a worker that says it has none"
    other.others(2)
    worker._find_runs()
    assert set(worker.served) == set(RUNS[2:])
    worker._close()


def test_the_first_error_of_a_run_that_another_worker_serves_is_no_reason_to_take_it(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, other, gone = handed_over(bench, monkeypatch, 0)
    (run,) = gone
    an_hour_passes(bench, worker, run)
    assert other.hold(run)
    Store(bench.redis, run).set_worker(gauges({"heartbeat": time.time()}))
    other.others(1)
    worker._find_runs()
    Store(bench.redis, run).set_worker(gauges({"error": "ValueError: one time"}))
    other.give_back(run)
    other.others(2)
    worker._find_runs()
    assert run not in worker.served
    worker._close()


def test_a_sign_of_life_from_a_clock_that_is_ahead_keeps_no_run_from_being_served(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, other, gone = handed_over(bench, monkeypatch, 0)
    an_hour_passes(bench, worker, *gone)
    Store(bench.redis, *gone).set_worker(gauges({"heartbeat": time.time() + 3600.0}))
    other.others(0)
    worker._find_runs()
    assert len(worker.served) == 4
    worker._close()


def test_what_a_worker_says_of_a_run_that_it_gives_back_is_said_before_another_one_takes_it(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "_LOOK_FOR_RUNS_SECONDS", 0.0)
    bench.begin()
    worker, other = (a_worker(bench) for _ in range(2))
    memory = iter([torch.OutOfMemoryError("too little here")])

    def open_it(self: RunWorker, *arguments: Any, **options: Any) -> None:
        for error in memory:
            raise error
        opened(self, *arguments, **options)

    def then_the_other(run: str) -> None:
        give_back(run)
        other._find_runs()
        other._turn()

    opened, give_back = RunWorker.__init__, worker._leases.give_back
    monkeypatch.setattr(RunWorker, "__init__", open_it)
    monkeypatch.setattr(worker._leases, "give_back", then_the_other)
    worker._find_runs()
    assert set(other.served) == {"default"}
    assert bench.store.worker().error is None, "the other one serves it"
    assert worker._runs["default"].retry_at > time.monotonic()
    other._close()


def test_a_failed_training_leaves_the_run_with_its_worker_which_alone_knows_what_may_be_to_blame(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "_LOOK_FOR_RUNS_SECONDS", 0.0)
    bench.begin()
    worker = a_worker(bench)
    worker._find_runs()
    worker._runs["default"].suspicion.recent = True
    worker._handle_error("default", ValueError("one time"))
    assert not worker.served
    other = other_worker(bench)
    assert not other.hold("default")
    bench.redis.delete(Leases.key("default"))  # its time is over
    assert other.hold("default")
    worker._runs["default"].retry_at = 0.0
    worker._find_runs()
    assert not worker._runs["default"].suspicion.recent, "another worker finds that out by itself now"


def test_paused_runs_are_nobodys_share(bench: Bench) -> None:
    begin(bench)
    for run in RUNS[:2]:
        change_state(bench.layout, run, "paused", "for a test")
    other = other_worker(bench)
    other.others(0)
    worker = a_worker(bench)
    worker._find_runs()
    assert len(worker.served) == 1
    worker._close()


def test_a_full_redis_keeps_no_worker_from_its_runs(bench: Bench) -> None:
    leases, other = (other_worker(bench) for _ in range(2))
    assert (leases.others(3), other.others(1)) == ({}, {leases.holder: 3})
    bench.redis.config_set("maxmemory", 1)
    try:
        assert leases.others(3) == {}, "as it was before"
        assert other.others(1) == {leases.holder: 3}
    finally:
        bench.redis.config_set("maxmemory", 0)
    assert leases.others(3) == {other.holder: 1}


def test_no_run_is_handed_to_a_worker_in_a_long_turn(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would look for the run only afterwards, and nobody would serve it until then."""
    monkeypatch.setattr(process, "_LOOK_FOR_RUNS_SECONDS", 0.0)
    begin(bench)
    worker, other = (a_worker(bench) for _ in range(2))
    worker._find_runs()
    other._look_at = time.monotonic() - 60.0
    other._heartbeat.beat()
    for _ in range(2):
        worker._find_runs()
        assert len(worker.served) == 4
    other._look_at = time.monotonic()
    other._heartbeat.beat()
    worker._find_runs()
    assert len(worker.served) == 3
    worker._close()


def test_beside_a_worker_of_long_turns_one_run_is_handed_over_in_vain_and_then_none_for_long(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It looks for runs at the beginning of each turn only, and may not see the one that is left to it."""
    worker, other, gone = handed_over(bench, monkeypatch, 0)
    other.others(share.BUSY)
    worker._find_runs()
    assert set(RUNS) - set(worker.served) == gone
    an_hour_passes(bench, worker, *gone)
    worker._find_runs()
    assert len(worker.served) == 4
    for _ in range(3):
        other.others(0)
        worker._find_runs()
        assert len(worker.served) == 4
    worker._close()


def test_a_run_that_takes_longer_to_open_than_a_lease_lasts_stays_with_one_worker(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease, "LEASE_SECONDS", 2.0)
    monkeypatch.setattr(heartbeat, "_BEAT_SECONDS", 0.1)
    bench.begin()
    opened, openings = RunWorker.__init__, []

    def slowly(self: RunWorker, *arguments: Any, **options: Any) -> None:
        openings.append(self)
        time.sleep(3.0)
        opened(self, *arguments, **options)

    monkeypatch.setattr(RunWorker, "__init__", slowly)
    workers = [a_worker(bench) for _ in range(2)]
    threads = [threading.Thread(target=worker.serve) for worker in workers]
    for thread in threads:
        thread.start()
    try:
        batch = bench.post("a")
        bench.wait(lambda: trained(bench, "default", batch))
    finally:
        for worker in workers:
            worker.stop()
        for thread in threads:
            thread.join()
    assert len(openings) == 1


def test_a_worker_that_has_lost_a_run_says_nothing_of_it(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "_LOOK_FOR_RUNS_SECONDS", 0.0)
    bench.begin()
    worker = a_worker(bench)
    worker._find_runs()
    worker._turn()
    bench.redis.delete(Leases.key("default"))
    assert other_worker(bench).hold("default")
    worker._handle_error("default", OSError("the checkpoint is gone"))
    assert bench.store.worker().error is None, "the other one would not take it back"
    Store(bench.redis, "default").set_worker(gauges({"error": "the other one's"}))
    worker._note_work("default")
    assert bench.store.worker().error == "the other one's"


@pytest.mark.parametrize("full", [False, True])
def test_what_a_worker_suspects_of_a_run_ends_where_another_one_serves_it(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, full: bool
) -> None:
    """Also where this worker has its share of the runs, and so does not try to take it."""
    monkeypatch.setattr(process, "_LOOK_FOR_RUNS_SECONDS", 0.0)
    bench.begin()
    if full:
        bench.register(bench.world.run_file(drafter=bench.world.drafter()), run="second")
    worker, other = a_worker(bench), other_worker(bench)
    assert other.hold("default")
    other.others(1)
    worker._find_runs()
    assert len(worker.served) == full
    worker._runs["default"].suspicion.recent = True
    worker._find_runs()
    assert not worker._runs["default"].suspicion.recent
    worker._close()


def test_an_orderly_end_gives_back_the_runs_that_wait_for_another_try(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "_LOOK_FOR_RUNS_SECONDS", 0.0)
    bench.begin()
    worker = a_worker(bench)
    worker._find_runs()
    worker._runs["default"].suspicion.recent = True
    worker._handle_error("default", ValueError("one time"))
    worker._close()
    assert other_worker(bench).hold("default")


def test_a_run_is_given_back_with_nothing_noted_of_its_opening(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another worker may begin to open it at once; a fault of the device, after which nothing works, is noted."""
    bench.begin()
    worker, found = a_worker(bench), []
    errors: Iterator[Exception] = iter([torch.OutOfMemoryError("too little"), RuntimeError("CUDA error: gone")])

    def fail(*_: Any, **__: Any) -> None:
        raise next(errors)

    def given_back(run: str) -> None:
        found.append((bench.store.begun("opening", bench.layout.target_id(run))[0], worker._heartbeat._opening))

    monkeypatch.setattr(RunWorker, "__init__", fail)
    monkeypatch.setattr(worker._leases, "give_back", given_back)
    monkeypatch.setattr(process, "is_device_fault", lambda error: "CUDA" in str(error))
    worker._find_runs()
    assert found == [(0, None)]
    worker._look_at = worker._runs["default"].retry_at = 0.0
    with pytest.raises(RuntimeError, match="CUDA"):
        worker._find_runs()
    assert bench.store.begun("opening", bench.layout.target_id("default"))[0] == 1


@pytest.mark.parametrize("fits", [0, 1, 2])
def test_workers_of_unequal_memory_hand_no_run_to_and_fro(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, fits: int
) -> None:
    """Nobody knows how much another worker has: what does not fit there comes back, and stays."""
    monkeypatch.setattr(process, "_LOOK_FOR_RUNS_SECONDS", 0.0)
    monkeypatch.setattr(process, "_FAILED_SECONDS", 0.01)
    monkeypatch.setattr(share, "_HAND_OVER_SECONDS", 0.0)
    monkeypatch.setattr(share, "_LEFT_SECONDS", 2.0)  # longer than a turn of both on a loaded machine
    begin(bench)
    large, small = a_worker(bench), a_worker(bench)
    opening, turning, tried = Lineage.set_candidate, [large], list[str]()

    def opened(self: Lineage, *args: Any, **named: Any) -> Any:
        if turning[0] is small:
            tried.append(self._run)
            large._find_runs()  # in a process of its own it looks while this one reads a checkpoint
            if len(small.served.keys() - {self._run}) >= fits:
                raise MemoryError("Cannot allocate memory (os error 12)")
        return opening(self, *args, **named)

    monkeypatch.setattr(Lineage, "set_candidate", opened)
    monkeypatch.setattr(RunWorker, "cycle", lambda _: True)  # what waits goes on waiting
    large._turn()
    began = time.monotonic()
    while (now := time.monotonic()) < began + 5.0 or (len(small.served | large.served) < 4 and now < began + 60.0):
        for worker in (large, small):
            turning[0] = worker
            worker._turn()
        time.sleep(0.02)
    assert len(tried) == len(set(tried)), "none is tried there twice"
    assert len(tried) > fits or fits == 2, "else this shows nothing"
    assert (len(small.served), len(large.served)) == (fits, 4 - fits), "and each has somebody who serves it"
    small._close()
    large._close()
