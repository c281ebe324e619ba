"""Runs that are closed for others, or after a death: who looks after them, and when they are opened again."""

from __future__ import annotations

import errno
import gc
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
from helpers.service.storage_fixtures import Store
from helpers.worker.record_fixtures import gauges
from helpers.worker.room_fixtures import (
    NO_MEMORY,
    RUNS,
    ask_of_drift,
    error_of,
    is_trained,
    no_room,
    note_death,
    post,
    register,
    train,
    train_unsaved,
    until_trained,
)
from helpers.worker.worker_fixtures import Bench
from redis import Redis
from redis.exceptions import ConnectionError as RedisConnectionError

import service.worker.process.worker
from drafter.training.ranks import Orders
from service.storage.layout import Layout
from service.storage.queue.lease import Leases
from service.storage.reports.store import Store as WorkersStore
from service.storage.runs import change_state
from service.worker.learner import Learner
from service.worker.loop import RunWorker
from service.worker.process.room import Room
from service.worker.process.worker import Worker


def test_what_a_run_has_in_hand_for_its_vocabulary_comes_again_once_more_comes(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is idle too: it waits for others' batches to come, and may hold a million tokens until then."""
    few = bench.settings.model_copy(update={"vocab_min_tokens": 80, "draft_vocab_size": 32})
    worker = Worker(few, Redis.from_url(bench.redis_url))
    bench.register(run="a")  # without a drafter
    first = post(bench, "a", "few")
    worker._turn()
    assert worker.served["a"].inbox.waiting == 1
    register(bench, "d")
    failed = no_room(monkeypatch, worker, "opened", NO_MEMORY[0], others=1)
    until_trained(bench, worker, "d", post(bench, "d", "x"))
    again: list[str] = []

    def watched(*args: Any, **named: Any) -> RunWorker:
        again.append(args[4])
        return RunWorker(*args, **named)

    monkeypatch.setattr(service.worker.process.worker, "RunWorker", watched)
    for _ in range(5):
        worker._turn()
    assert worker.served.keys() == {"d"}
    assert not again, "nothing has come for it"
    second = post(bench, "a", "more")
    until_trained(bench, worker, "a", second)
    assert is_trained(bench, "a", first)
    assert worker.served["a"].learner.journal.totals.batches == 2
    assert failed[0] == "d"
    worker._close()


def test_a_checkpoint_that_fails_when_a_run_is_closed_for_another_loses_no_batch(
    bench: Bench, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    unsaved = train_unsaved(bench, worker)
    with monkeypatch.context() as patch:
        patch.setattr(Learner, "save", lambda *_: (_ for _ in ()).throw(MemoryError("no copy of the weights")))
        worker._room.close_idle()
    assert "a" not in worker.served
    assert not is_trained(bench, "a", unsaved)
    worker._settings = bench.settings
    until_trained(bench, worker, "a", unsaved)
    assert worker.served["a"].learner.journal.totals.batches == 2, "once"


def test_a_run_that_is_closed_for_others_has_somebody_who_looks_after_it_and_heeds_people(
    bench: Bench, worker: Worker
) -> None:
    worker._room.close_idle(2)

    def beat(run: str) -> float:
        return Store(bench.redis, run).worker().heartbeat or 0.0

    for run in RUNS[:2]:
        Store(bench.redis, run).set_worker(gauges({"heartbeat": 1.0}))
    other = Leases(Redis.from_url(bench.redis_url))
    assert other.hold("b")
    worker._heartbeat.beat()
    assert beat("a") > time.time() - 20, "or people would be told that no worker is there"
    assert beat("b") == 1.0, "it is the other worker's"
    assert bench.redis.get(Leases.key("a")) is None
    bench.layout.run_json("a").rename(bench.layout.withdrawn("a"))  # as a deletion begins
    bench.redis.delete(WorkersStore(bench.redis, "a")._keys.worker)
    worker._heartbeat.beat()
    assert not bench.redis.exists(WorkersStore(bench.redis, "a")._keys.worker)
    bench.layout.withdrawn("a").rename(bench.layout.run_json("a"))

    worker._turn()
    assert "a" not in worker.served
    ask_of_drift(bench, "a")
    for _ in range(2):
        worker._turn()
    assert "reset" in worker.served["a"].learner.journal.drift.heeded
    worker._room.close_idle()
    for _ in range(2):
        worker._turn()
    assert not worker.served, "it was heeded once"


def test_a_closed_run_whose_heartbeat_fails_keeps_no_other_from_its_own(
    bench: Bench, worker: Worker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    worker._room.close_idle()
    for run in RUNS[:3]:
        Store(bench.redis, run).set_worker(gauges({"heartbeat": 1.0}))
    real = Layout.run_json

    def run_json(self: Layout, run: str) -> Path:
        if run == "a":
            raise OSError(errno.EIO, "Input/output error")
        return real(self, run)

    monkeypatch.setattr(Layout, "run_json", run_json)
    worker._heartbeat.beat()
    beats = [Store(bench.redis, run).worker().heartbeat or 0.0 for run in RUNS[:3]]
    assert [beat > time.time() - 20 for beat in beats] == [False, True, True]
    assert "no heartbeat for run a" in caplog.text
    assert bench.redis.get(Leases.key("a")) is None, "another worker may have it"


def test_redis_that_went_away_while_a_run_was_opened_is_no_death(
    bench: Bench, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So nobody is closed for it: this very process lives."""
    register(bench, "d")
    with monkeypatch.context() as patch:
        patch.setattr(WorkersStore, "end", lambda *_: (_ for _ in ()).throw(RedisConnectionError("away")))
        with pytest.raises(RedisConnectionError):
            worker._turn()
    worker._runs["d"].worker = None
    worker._turn()
    assert worker.served.keys() == set(RUNS)
    assert not worker._room.sparing


def test_after_a_death_at_work_runs_without_work_are_not_open_beside_what_killed_it(
    bench: Bench, worker: Worker
) -> None:
    """The memory that ran out may have been theirs: a run is blamed for what it does without them."""
    worker._close()
    note_death(bench, "b")
    batch = post(bench, "b", "x")
    again = Worker(bench.settings, Redis.from_url(bench.redis_url))
    beside = list[set[str]]()
    learn = Learner.learn

    def watched(self: Learner, *args: Any, **named: Any) -> Any:
        beside.append(set(again.served))
        return learn(self, *args, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Learner, "learn", watched)
        until_trained(bench, again, "b", batch)
    assert beside == [{"b"}]
    for _ in range(3):
        again._turn()
    assert again.served.keys() == {"b"}
    assert [error_of(bench, run) for run in RUNS[:3]] == [None] * 3
    train(bench, again, "c", "later")
    register(bench, "d")
    again._turn()
    assert again.served.keys() == {"b", "c", "d"}, "the first drafter of a new one is to be served"
    again._close()


def test_a_run_that_may_have_killed_is_opened_once_no_rank_holds_an_idle_one_and_its_lease_is_kept_meanwhile(
    bench: Bench, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker._close()
    again, other = Worker(bench.settings, Redis.from_url(bench.redis_url)), Leases(Redis.from_url(bench.redis_url))
    assert other.hold("b")
    for _ in range(2):
        again._turn()
    assert again.served.keys() == {"a", "c"}
    note_death(bench, "b")
    post(bench, "b", "x")
    other.give_back("b")
    told, seen = list[Any](), list[Any]()
    monkeypatch.setattr(Orders, "stand", lambda _, order: told.append(order))

    def opening(*args: Any, **named: Any) -> RunWorker:
        seen.append((args[4], again._heartbeat._opening, told[-1:]))
        return RunWorker(*args, **named)

    monkeypatch.setattr(service.worker.process.worker, "RunWorker", opening)
    again._turn()
    assert seen == [("b", "b", [{"runs": []}])]
    again._close()


@pytest.mark.parametrize(("dead", "before", "meanwhile"), [("a", "b", "c"), ("c", "a", "b")])
def test_what_people_asked_while_no_worker_was_there_is_done_after_a_death_too_and_once(
    bench: Bench, worker: Worker, dead: str, before: str, meanwhile: str
) -> None:
    """After a death no idle run is opened by turns any more; what was asked of one that was put off is not lost."""
    ask_of_drift(bench, before)
    worker._turn()
    worker._close()
    ask_of_drift(bench, meanwhile)
    for served in ({dead, meanwhile}, {dead}):
        note_death(bench, dead)
        post(bench, dead, f"{len(served)}")
        again = Worker(bench.settings, Redis.from_url(bench.redis_url))
        for _ in range(3):
            again._turn()
        assert again.served.keys() == served
        again._close()


def test_a_run_that_others_are_closed_for_is_opened_before_one_of_these_that_is_called_meanwhile(
    bench: Bench, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or whoever comes first by name would take the memory each time."""
    failed = no_room(monkeypatch, worker, "opened", NO_MEMORY[0])
    close = Room._close

    def closing(self: Room, run: str) -> None:
        close(self, run)
        post(bench, run, f"meanwhile {len(failed)}")

    monkeypatch.setattr(Room, "_close", closing)
    register(bench, "d")
    post(bench, "d", "x")
    for _ in range(2):
        worker._turn()
    assert failed == ["d", "a"]
    assert "d" in worker.served


def test_a_closed_run_is_opened_again_for_another_target_and_once_it_was_paused(bench: Bench, worker: Worker) -> None:
    bench.register(run="e")  # from scratch
    worker._turn()
    worker._room.close_idle()
    worker._turn()
    assert not worker.served
    bench.layout.run_json("e").unlink()
    register(bench, "e")  # within a second, and with a drafter, which is to be served
    change_state(bench.layout, "a", "paused", "for a test")
    worker._turn()
    worker._heartbeat.beat()
    assert worker.served.keys() == {"e"}
    assert bench.layout.latest("e").exists()
    change_state(bench.layout, "a", "active", "for a test")
    worker._turn()
    assert worker.served.keys() == {"a", "e"}, "as any run that is made active"


def test_what_a_closed_run_had_is_free_before_anything_else_is_done(
    bench: Bench, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner = weakref.ref(worker.served["a"].learner)
    worker.served["a"].learner.__dict__["itself"] = learner()  # as a library may leave it, one that compiles say
    returned = list[bool]()
    monkeypatch.setattr(service.worker.process.room, "return_freed_memory", lambda: returned.append(learner() is None))
    gc.disable()
    try:
        worker._room.close_idle(1)
    finally:
        gc.enable()
    assert returned == [True]
