"""A run's lease: a worker that has lost it writes nothing, and nobody takes another's."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
from helpers.worker.worker_fixtures import Bench, states
from redis import Redis
from redis.exceptions import ConnectionError as RedisConnectionError

import service.storage.queue.lease
import service.worker.inbox
import service.worker.process.worker
import service.worker.promotion.promises
from service.storage.queue.lease import Leases
from service.storage.registry import Registry
from service.worker.checkpoint import CheckpointSuperseded
from service.worker.inbox import Inbox
from service.worker.loop import LeaseLost, RunWorker
from service.worker.process.heartbeat import Heartbeat
from service.worker.process.worker import Worker


def test_a_worker_that_was_overtaken_writes_no_checkpoint(bench: Bench) -> None:
    """It was stopped for longer than its lease, another one went on, and now it wakes up in the middle of a batch."""
    bench.begin()
    bench.post("a")
    sleeper = bench.worker()
    bench.drain(sleeper)
    bench.post("b")
    bench.drain(bench.worker())
    newest, counts = bench.checkpoint(), bench.trainer_counts()
    with pytest.raises(CheckpointSuperseded, match="its state is newer"):
        sleeper.save()
    assert (bench.checkpoint(), bench.trainer_counts()) == (newest, counts)
    assert not list(bench.layout.worker("default").glob(".writing*"))


def test_a_worker_without_its_lease_neither_checkpoints_nor_publishes(bench: Bench) -> None:
    bench.register()
    for name in "abcd":
        bench.post(name)
    worker = RunWorker(
        bench.settings.model_copy(update={"gate_min_gain": 0.0, "claim_tokens": 10_000}),
        bench.layout,
        bench.queue,
        bench.store,
        "default",
        holds_lease=lambda: False,
    )
    with pytest.raises(LeaseLost):
        bench.drain(worker)
    assert states(bench) == ["queued"] * 4
    assert Registry(bench.layout).latest("default") is None
    assert not list(bench.layout.worker("default").glob("checkpoint-*"))


def test_two_heirs_of_a_dead_worker_do_not_take_the_lease_from_each_other(bench: Bench) -> None:
    """And nobody gives back a lease that is another's."""
    successors = [Leases(bench.redis) for _ in range(2)]
    machine = successors[0].holder.partition("/")[0]
    bench.redis.set(Leases.key("default"), f"{machine}/{2**22 + 1}/killed")  # no process has that number
    assert successors[0].hold("default"), "it need not expire"
    assert not successors[1].hold("default")
    successors[1].give_back("default")
    assert not successors[1].hold("default")
    assert successors[0].hold("default")
    successors[0].give_back("default")
    assert successors[1].hold("default")


def test_a_worker_that_was_stopped_while_it_renewed_its_lease_does_not_renew_anothers(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.begin()
    client = Redis.from_url(bench.redis_url)
    mine, other = Leases(client), Leases(bench.redis)
    key = Leases.key("default")
    for number in range(1, 6):
        bench.redis.delete(key)
        assert mine.hold("default")
        steps = 0

        def step(*words: Any, number: int = number, **options: Any) -> Any:
            nonlocal steps
            steps += 1
            if steps == number:
                bench.redis.delete(key)  # expired: this one was stopped for longer
                assert other.hold("default")
            return type(client).execute_command(client, *words, **options)  # type: ignore[no-untyped-call]

        with monkeypatch.context() as patch:
            patch.setattr(client, "execute_command", step)
            claims = mine.hold("default")
        assert not claims or steps < number, f"stopped before step {number}"


@pytest.mark.parametrize(
    ("owner", "step"), [(Heartbeat, "_beat_open"), (Leases, "hold")], ids=["before", "in its lock"]
)
def test_the_last_heartbeat_takes_no_lease_that_was_given_back(
    owner: type[Any], step: str, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is in the middle of its round when the worker ends in order: a standby would wait for the lease to expire."""
    bench.begin()
    bench.register(run="before-default")
    worker = Worker(bench.settings, Redis.from_url(bench.redis_url))
    worker._turn()
    went_on, began, go_on = list[bool](), threading.Event(), threading.Event()
    inner, real = threading.Lock(), getattr(owner, step)

    class Lock:
        """The heartbeat, which holds it, goes on once the worker waits for it."""

        def __enter__(self) -> None:
            if not inner.acquire(blocking=False):
                go_on.set()
                inner.acquire()

        def __exit__(self, *_: object) -> None:
            inner.release()

    def slow(self: Any, *given: Any) -> Any:
        if threading.current_thread() is heartbeat and not began.is_set():
            began.set()
            went_on.append(go_on.wait(60))  # an error would be the heartbeat's own, which it logs
        return real(self, *given)

    monkeypatch.setattr(worker._heartbeat, "lock", Lock())
    monkeypatch.setattr(owner, step, slow)
    heartbeat = threading.Thread(target=worker._heartbeat.beat)
    heartbeat.start()
    assert began.wait(60)
    worker._close()
    go_on.set()
    heartbeat.join(60)
    assert went_on == [True]
    assert [bench.redis.get(Leases.key(run)) for run in ("before-default", "default")] == [None, None]


def test_entries_that_a_failing_redis_took_from_the_workers_hands_come_back_at_once_and_unblamed(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five times: without the release they would be dead, without the second look they would wait for a minute."""
    bench.begin()
    bench.post("a")
    bench.post("b")
    worker = bench.worker(claim_tokens=10_000, checkpoint_seconds=1e9)
    for _ in range(5):
        with monkeypatch.context() as patch:

            def away(*_: Any, **_named: Any) -> None:
                raise RedisConnectionError("away")

            patch.setattr(Inbox, "load", away)
            with pytest.raises(RedisConnectionError):
                worker.cycle()
    bench.drain(worker)
    assert states(bench) == ["trained", "trained"]
    assert bench.totals()["batches"] == 2
    bench.post("c")
    worker.cycle()
    assert states(bench)[2] == "queued", "afterwards checkpoints are as rare as before"


def test_a_worker_that_was_asked_to_stop_keeps_its_lease_until_its_last_checkpoint_is_written(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or a standby would take over while it still writes, and its last training would be for nothing."""
    monkeypatch.setattr(service.storage.queue.lease, "LEASE_SECONDS", 2.0)
    monkeypatch.setattr(service.worker.process.heartbeat, "_BEAT_SECONDS", 0.1)
    bench.begin()
    bench.post("a")
    worker, standby = Worker(bench.settings, bench.redis), Leases(bench.redis)
    save, taken = RunWorker.save, []

    def slow(self: RunWorker) -> None:
        worker.stop()
        time.sleep(3.0)
        taken.append(standby.hold("default"))
        save(self)

    monkeypatch.setattr(RunWorker, "save", slow)
    worker.serve()
    assert taken
    assert not any(taken)
    assert states(bench) == ["trained"]
    assert standby.hold("default"), "given back"
