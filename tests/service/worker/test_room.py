"""Where memory runs out, runs that are idle give theirs up to one that has work, and go on later as they were."""

from __future__ import annotations

import asyncio
import errno
import gc
import json
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from redis import Redis
from redis import asyncio as aio
from redis.exceptions import ConnectionError as RedisConnectionError
from storage_fixtures import RolloutQueue, Store
from worker_fixtures import CONFIG, LAYERS, Bench, alive, joined, nest

import service.worker.process.worker
from drafter.batch import load_batch
from drafter.device import RanksLost, is_out_of_memory
from drafter.errors import CheckpointError
from drafter.training.ranks import Orders
from rl_hooks import wire
from rl_hooks.sending.features import as_wire
from service.storage.layout import Layout, file_id
from service.storage.lease import Leases
from service.storage.queue.deliveries import RolloutQueue as WorkersQueue
from service.storage.queue.keys import GROUP, Keys
from service.storage.reports.store import AsyncStore
from service.storage.reports.store import Store as WorkersStore
from service.storage.runs import change_state
from service.worker.learner import Learner
from service.worker.lineage import Lineage
from service.worker.loop import RunWorker
from service.worker.process import turns
from service.worker.process.room import Room
from service.worker.process.worker import Worker

RUNS = ["a", "b", "c", "d"]
NO_MEMORY: list[Exception] = [
    RuntimeError("[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory"),
    torch.OutOfMemoryError("CUDA out of memory"),
    MemoryError("Cannot allocate memory (os error 12)"),
    OSError(errno.ENOMEM, "Cannot allocate memory"),
]


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs are looked for in every turn."""
    monkeypatch.setattr(service.worker.process.worker, "_LOOK_FOR_RUNS_SECONDS", 0.0)


@pytest.fixture(name="worker")
def _worker(bench: Bench) -> Iterator[Worker]:
    """A worker of its own connection; three runs are open, one after another was trained, and all are idle."""
    worker = Worker(bench.settings, Redis.from_url(bench.redis_url))
    for run in RUNS[:3]:
        register(bench, run)
        train(bench, worker, run, "first")
    yield worker
    worker._close()


def register(bench: Bench, run: str) -> None:
    bench.register(bench.world.run_file(drafter=bench.world.drafter()), run=run)


def post(bench: Bench, run: str, name: str) -> str:
    return bench.post_file(bench.world.rollout_file(f"{run}-{name}", run=run))


def is_trained(bench: Bench, run: str, batch: str) -> bool:
    record = RolloutQueue(bench.redis, run).batch(batch)
    return record is not None and record["state"] == "trained"


def until_trained(bench: Bench, worker: Worker, run: str, batch: str, most: int = 20) -> int:
    """Turns until a batch was trained."""
    for number in range(most):
        if is_trained(bench, run, batch):
            return number
        worker._turn()
    raise AssertionError(f"{run} was not trained: {error_of(bench, run)}")


def train(bench: Bench, worker: Worker, run: str, name: str) -> None:
    until_trained(bench, worker, run, post(bench, run, name))


def train_unsaved(bench: Bench, worker: Worker) -> str:
    """Run a is open and was trained on a batch that no checkpoint has; the batch."""
    worker._settings = bench.settings.model_copy(update={"checkpoint_seconds": 1e9})
    worker._room.close_idle()
    batch = post(bench, "a", "unsaved")
    while "a" not in worker.served or not worker.served["a"].inbox.done:
        worker._turn()
    return batch


def ask_of_drift(bench: Bench, run: str) -> None:
    async def ask() -> None:
        client = aio.Redis.from_url(bench.redis_url)
        await AsyncStore(client, run).ask_of_drift("reset")
        await client.aclose()

    asyncio.run(ask())


def note_death(bench: Bench, run: str) -> None:
    """As a process leaves it that is killed while it works on the run."""
    file = file_id(bench.layout.target(run))
    assert file is not None
    WorkersStore(bench.redis, run).set_worker({"working": [*file, 1, time.time()]})


def error_of(bench: Bench, run: str) -> Any:
    return Store(bench.redis, run).worker().error or None


def as_it_is(worker: Worker, run: str) -> Any:
    """Weights, moments and counters of an open run."""
    learner = worker.served[run].learner
    trainer, kept = learner.lineage.needed_trainer, learner.recent.names()
    return trainer.fingerprint(), learner.journal.state, learner.controller.to_json(), learner.gate.state, kept


def no_room(
    monkeypatch: pytest.MonkeyPatch, worker: Worker, where: str, error: Exception, others: int = 3
) -> list[str]:
    """Have memory run out where a run is opened, or trained, while so many others are open. Returns who failed."""
    kind, name = (Lineage, "set_candidate") if where == "opened" else (Learner, "train")
    real, failed = getattr(kind, name), list[str]()

    def allocating(self: Any, *args: Any, **named: Any) -> Any:
        run = self._run if where == "opened" else self.run
        if len(worker.served.keys() - {run}) >= others:
            failed.append(run)
            raise error
        return real(self, *args, **named)

    monkeypatch.setattr(kind, name, allocating)
    return failed


@pytest.mark.parametrize("where", ["opened", "trained"])
@pytest.mark.parametrize("error", NO_MEMORY, ids=["cpu", "cuda", "python", "mmap"])
def test_who_was_idle_longest_gives_way_to_a_run_with_work_and_goes_on_later_as_it_was(
    bench: Bench, worker: Worker, monkeypatch: pytest.MonkeyPatch, error: Exception, where: str
) -> None:
    failed = no_room(monkeypatch, worker, where, error)
    before = as_it_is(worker, "a")
    register(bench, "d")
    until_trained(bench, worker, "d", post(bench, "d", "x"))
    assert failed == ["d"]
    assert error_of(bench, "d") is None
    for _ in range(5):
        worker._turn()
    assert worker.served.keys() == {"b", "c", "d"}, "no more were closed than was needed, and a has nothing to do"
    assert bench.redis.get(Leases.key("a")) is None, "another worker may have it"
    seen: list[Any] = []
    opened = RunWorker

    def watched(*args: Any, **named: Any) -> RunWorker:
        made = opened(*args, **named)
        if made.run == "a":
            worker._runs["a"].worker = made
            seen.append(as_it_is(worker, "a"))
        return made

    monkeypatch.setattr(service.worker.process.worker, "RunWorker", watched)
    train(bench, worker, "a", "later")
    assert seen[-1] == before
    assert worker.served["a"].learner.journal.totals.batches == 2
    assert worker.served.keys() == {"a", "c", "d"}, "now b was idle longest"
    assert failed == ["d", "a"]


@pytest.mark.parametrize("where", ["opened", "trained"])
@pytest.mark.parametrize("error", NO_MEMORY[:2], ids=["cpu", "cuda"])
def test_a_run_is_refused_only_where_no_other_is_idle_and_says_so(
    bench: Bench, worker: Worker, monkeypatch: pytest.MonkeyPatch, error: Exception, where: str
) -> None:
    monkeypatch.setattr(turns, "AHEAD_SECONDS", 1e-6)
    monkeypatch.setattr(service.worker.process.worker, "AHEAD_SECONDS", 1e-6)  # one claim in each turn
    monkeypatch.setattr(service.worker.process.worker, "_FAILED_SECONDS", 30.0)
    worker._room.close_idle(2)
    assert worker.served.keys() == {"c"}
    failed = no_room(monkeypatch, worker, where, error, others=1)
    theirs = [post(bench, "c", f"flood{number}") for number in range(12)]
    register(bench, "d")
    honest = post(bench, "d", "x")
    for _ in range(4):
        worker._turn()
    assert "d" in failed
    assert not is_trained(bench, "c", theirs[-1])
    assert worker.served.keys() == {"c"}
    told = error_of(bench, "d")
    assert "memory ran out, and to close idle runs did not help, or none was idle" in told
    assert str(error) in told
    wait = worker._runs["d"].retry_at - time.monotonic()
    assert wait > 50 if isinstance(error, torch.OutOfMemoryError) else 15 < wait <= 30
    until_trained(bench, worker, "c", theirs[-1])
    worker._runs["d"].retry_at = 0.0  # a minute later
    until_trained(bench, worker, "d", honest)
    assert worker.served.keys() == {"d"}
    assert error_of(bench, "d") is None


@pytest.mark.parametrize("error", NO_MEMORY, ids=["cpu", "cuda", "python", "mmap"])
def test_who_is_idle_gives_way_also_where_a_batch_cannot_be_read_for_want_of_memory(
    bench: Bench, worker: Worker, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def loading(*args: Any, **named: Any) -> Any:
        if len(worker.served) > 2:
            raise error
        return load_batch(*args, **named)

    monkeypatch.setattr("service.worker.inbox.load_batch", loading)
    until_trained(bench, worker, "a", post(bench, "a", "x"))
    assert "a" in worker.served


def test_a_run_that_needs_more_than_there_is_closes_ever_more_at_once(
    bench: Bench, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not one for each try: beside a thousand small runs it would be tried a thousand times."""
    for run in ("e", "f", "g", "h"):
        register(bench, run)
        train(bench, worker, run, "first")
    batch = post(bench, "h", "x")
    open_then = list[int]()
    with monkeypatch.context() as patch:
        failed = no_room(patch, worker, "trained", NO_MEMORY[0], others=0)
        while error_of(bench, "h") is None:
            worker._turn()
            open_then.append(len(worker.served))
    assert failed == ["h"] * 4
    assert open_then[-1] == 0
    assert [few for few in dict.fromkeys(open_then) if few < 6] in ([5, 3, 0], [5, 4, 3, 1, 0]), open_then
    worker._runs["h"].retry_at = 0.0
    until_trained(bench, worker, "h", batch)
    assert worker._runs["h"].short == 0


def test_a_run_that_never_fits_closes_its_neighbours_as_often_as_there_are_some_and_then_none_for_an_hour(
    bench: Bench, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They have a batch now and then, and are idle each time that it is tried."""
    real, closed = Learner.train, list[str]()
    close = Room._close

    def allocating(self: Learner, *args: Any) -> Any:
        if self.run == "d":
            raise NO_MEMORY[0]
        return real(self, *args)

    def closing(self: Room, run: str) -> None:
        closed.append(run)
        close(self, run)

    monkeypatch.setattr(Learner, "train", allocating)
    monkeypatch.setattr(Room, "_close", closing)
    register(bench, "d")
    post(bench, "d", "x")

    def minutes(name: str) -> int:
        """How many were closed in some minutes."""
        before = len(closed)
        for number in range(4):
            for run in RUNS[:3]:
                train(bench, worker, run, f"{name}{number}")
            worker._runs["d"].retry_at = 0.0
            for _ in range(4):
                worker._turn()
        return len(closed) - before

    assert 3 < minutes("trickle") <= 7, "1, 2 and 4"
    assert minutes("later") == 0
    assert worker.served.keys() == {"a", "b", "c"}
    assert "did not help" in error_of(bench, "d")
    worker._runs["d"].short_at -= 3601.0
    assert 3 < minutes("an hour later") <= 7
    assert minutes("and") == 0
    again = bench.layout.root / "again"
    again.write_bytes(bench.layout.target("d").read_bytes())
    again.replace(bench.layout.target("d"))
    assert minutes("another file") > 0


@pytest.mark.parametrize("error", [NO_MEMORY[0], *NO_MEMORY[2:]], ids=["cpu", "python", "mmap"])
def test_a_batch_for_whose_file_there_is_no_memory_keeps_the_others_of_its_run_waiting_only_until_that_is_said(
    bench: Bench, worker: Worker, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    monkeypatch.setattr(service.worker.process.worker, "_FAILED_SECONDS", 0.0)
    worker._settings = bench.settings.model_copy(update={"claim_tokens": 10_000})  # both batches are claimed at once
    worker._room.close_idle()
    register(bench, "d")
    for run in RUNS:
        train(bench, worker, run, "again")
    huge = post(bench, "a", "huge")
    path = bench.layout.blob("a", RolloutQueue(bench.redis, "a").batch(huge)["blob"])  # type: ignore[index]
    opened = list[str]()
    monkeypatch.setattr(Worker, "_open", watched(Worker._open, opened))

    def loading(file: Path, **named: Any) -> Any:
        if file == path:
            raise error
        return load_batch(file, **named)

    small = post(bench, "a", "small")
    with monkeypatch.context() as patch:
        patch.setattr("service.worker.inbox.load_batch", loading)
        until_trained(bench, worker, "a", small)
        assert opened == ["a"] * 3, "one and two were closed for it, which is all; then it said so"
        assert str(error) in error_of(bench, "a")
        until_trained(bench, worker, "b", post(bench, "b", "later"))
        for number in range(3):
            until_trained(bench, worker, "a", post(bench, "a", f"small{number}"))
        assert opened == ["a"] * 3 + ["b"], "it goes on, and closes nobody for it"
        assert str(error) in error_of(bench, "a"), "as long as that batch waits"
        worker._room.close_idle()
        assert worker.served == {}, "to wait for memory is no work"
        until_trained(bench, worker, "a", post(bench, "a", "another"))
    assert not is_trained(bench, "a", huge)
    pending = bench.redis.xpending_range(Keys("a").queue, GROUP, "-", "+", 9)
    assert [entry["times_delivered"] for entry in pending] == [0]
    worker._room.close_idle()
    until_trained(bench, worker, "a", huge)
    worker._turn()
    assert error_of(bench, "a") is None
    assert worker._runs["a"].short == 0


def watched(real: Any, runs: list[str]) -> Any:
    """A method of a worker that notes the run which it is called with."""

    def method(self: Worker, run: str, *args: Any) -> Any:
        runs.append(run)
        return real(self, run, *args)

    return method


def test_a_run_of_which_all_that_waits_cannot_be_read_is_idle_and_is_tried_again(
    bench: Bench, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        bad_sector = OSError(errno.EIO, "Input/output error")
        patch.setattr("service.worker.inbox.load_batch", lambda *_, **__: (_ for _ in ()).throw(bad_sector))
        bad = post(bench, "a", "bad")
        worker._turn()
        assert worker._room.idle() == ["b", "c", "a"]
    worker._room.close_idle()
    until_trained(bench, worker, "a", bad)


@pytest.fixture(name="unreadable")
def _unreadable(bench: Bench, worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of run a, a batch lies on a bad sector."""
    bad = RolloutQueue(bench.redis, "a").batch(post(bench, "a", "bad"))
    assert bad is not None
    path = bench.layout.blob("a", bad["blob"])

    def loading(file: Path, **named: Any) -> Any:
        if file == path:
            raise OSError(errno.EIO, "Input/output error")
        return load_batch(file, **named)

    monkeypatch.setattr("service.worker.inbox.load_batch", loading)
    worker._turn()
    assert worker.served["a"].inbox.unreadable


@pytest.mark.usefixtures("unreadable")
def test_a_batch_that_cannot_be_read_does_not_keep_the_word_of_another_trouble(
    bench: Bench, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service.worker.process.worker, "_FAILED_SECONDS", 0.0)
    good = post(bench, "a", "good")
    with monkeypatch.context() as patch:
        patch.setattr(Learner, "train", mock.Mock(side_effect=ValueError("a hiccup")))
        worker._turn()
    assert "a hiccup" in error_of(bench, "a")
    until_trained(bench, worker, "a", good)
    assert error_of(bench, "a") is None
    assert worker._runs["a"].failures == 0


@pytest.mark.usefixtures("unreadable")
def test_a_run_that_looks_for_a_file_again_and_again_is_the_last_one_closed_for_others(
    bench: Bench, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    for run in ("b", "c"):
        train(bench, worker, run, "again")
    assert worker._room.idle() == ["b", "c", "a"]
    no_room(monkeypatch, worker, "opened", NO_MEMORY[0])
    register(bench, "d")
    train(bench, worker, "d", "first")
    for _ in range(3):
        worker._turn()
    assert worker.served.keys() == {"a", "c", "d"}


def test_a_run_is_told_to_have_no_memory_only_while_it_has_work(
    bench: Bench, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its batch may be gone meanwhile: it was dropped, or is too old."""
    with monkeypatch.context() as patch:
        no_room(patch, worker, "trained", NO_MEMORY[0], others=0)
        post(bench, "a", "x")
        while error_of(bench, "a") is None:
            worker._turn()
    queue = WorkersQueue(bench.redis, "a")
    for entry in queue.own_pending("worker"):
        queue.ack(entry, "skipped", "dropped")
    no_room(monkeypatch, worker, "opened", NO_MEMORY[0], others=0)
    worker._runs["a"].retry_at = 0.0
    worker._turn()
    assert "a" not in worker.served
    assert error_of(bench, "a") is None


def test_memory_that_runs_out_where_a_run_is_looked_after_leaves_it_open_with_what_it_has(
    bench: Bench, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel may say so of any file that is opened; it is not this run that needs more."""
    unsaved = train_unsaved(bench, worker)
    opened = worker.served["a"]
    look_after = Worker._look_after
    for error in NO_MEMORY[2:]:

        def looking(self: Worker, run: str, *args: Any, error: Exception = error) -> None:
            if run == "a":
                raise error
            look_after(self, run, *args)

        with monkeypatch.context() as patch:
            patch.setattr(Worker, "_look_after", looking)
            worker._turn()
        assert worker.served["a"] is opened
        assert "Cannot allocate memory" in error_of(bench, "a")
        worker._runs["a"].retry_at = 0.0
    worker._turn()
    assert error_of(bench, "a") is None
    worker._room.close_idle()
    assert is_trained(bench, "a", unsaved)


@pytest.mark.parametrize("has", ["another has it", "another had it"])
def test_deliveries_that_another_worker_counts_stay_where_a_lost_run_is_closed(
    bench: Bench, worker: Worker, has: str
) -> None:
    """It was stopped, and what it gathers a vocabulary from was delivered to another one meanwhile."""
    worker._settings = bench.settings.model_copy(update={"vocab_min_tokens": 200, "draft_vocab_size": 32})
    bench.register(run="e")  # without a drafter
    post(bench, "e", "few")
    worker._turn()
    assert worker.served["e"].inbox.waiting == 1
    bench.redis.set(Leases.key("e"), "another")
    for _ in range(3):
        WorkersQueue(bench.redis, "e").own_pending("worker")
    worker._heartbeat.beat()
    if has == "another had it":
        bench.redis.delete(Leases.key("e"))
    worker._room.close_idle()
    assert "e" not in worker.served
    pending = bench.redis.xpending_range(Keys("e").queue, GROUP, "-", "+", 9)
    assert [entry["times_delivered"] for entry in pending] == [3]


def test_a_run_without_work_for_which_there_is_no_memory_waits_for_its_batch_and_takes_nobodys(
    bench: Bench, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As at a start: where each took the place of another, none would gain, and all would be read again."""
    worker._close()
    again = Worker(bench.settings, Redis.from_url(bench.redis_url))
    failed = no_room(monkeypatch, again, "opened", NO_MEMORY[0], others=2)
    for _ in range(5):
        again._turn()
    assert (set(again.served), failed) == ({"a", "b"}, ["c"])
    assert error_of(bench, "c") is None
    train(bench, again, "c", "second")
    assert again.served.keys() == {"b", "c"}
    again._close()


def test_what_a_run_has_in_hand_for_its_vocabulary_comes_again_once_more_comes(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is idle too: it waits for others' batches to come, and may hold a million tokens until then."""
    few = bench.settings.model_copy(update={"vocab_min_tokens": 200, "draft_vocab_size": 32})
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
        Store(bench.redis, run).set_worker({"heartbeat": 1.0})
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
    assert "reset" in worker.served["a"].learner.journal.heeded
    worker._room.close_idle()
    for _ in range(2):
        worker._turn()
    assert not worker.served, "it was heeded once"


def test_a_closed_run_whose_heartbeat_fails_keeps_no_other_from_its_own(
    bench: Bench, worker: Worker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    worker._room.close_idle()
    for run in RUNS[:3]:
        Store(bench.redis, run).set_worker({"heartbeat": 1.0})
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
    note_death(bench, "b")
    post(bench, "b", "x")
    again = Worker(bench.settings, Redis.from_url(bench.redis_url))
    told, seen = list[Any](), list[Any]()
    monkeypatch.setattr(Orders, "stand", lambda _, order: told.append(order))

    def opening(*args: Any, **named: Any) -> RunWorker:
        seen.append((args[4], again._heartbeat._opening, told[-1:]))
        return RunWorker(*args, **named)

    monkeypatch.setattr(service.worker.process.worker, "RunWorker", opening)
    again._turn()
    assert seen == [("a", "a", []), ("b", "b", [{"runs": []}])]
    again._close()


def test_what_people_asked_while_no_worker_was_there_is_done_after_a_death_too_and_once(
    bench: Bench, worker: Worker
) -> None:
    ask_of_drift(bench, "b")
    worker._turn()
    worker._close()
    ask_of_drift(bench, "c")
    for served in ({"a", "c"}, {"a"}):
        note_death(bench, "a")
        post(bench, "a", f"{len(served)}")
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


def test_memory_that_ran_out_is_known_by_its_cause_too_but_a_lost_rank_stays_one() -> None:
    wrapped = CheckpointError("moments cannot be read")
    assert not is_out_of_memory(wrapped)
    wrapped.__cause__ = OSError(errno.ENOMEM, "Cannot allocate memory")
    assert is_out_of_memory(wrapped)
    assert not is_out_of_memory(OSError(errno.ENOSPC, "No space left on device"))


def test_a_rank_that_is_lost_for_memory_ends_the_process(
    bench: Bench, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = RanksLost("out of step")
    lost.__cause__ = MemoryError()
    no_room(monkeypatch, worker, "trained", lost, others=0)
    post(bench, "a", "x")
    with pytest.raises(RanksLost):
        worker._turn()


# --- a process whose memory is bounded --------------------------------------------------------------------------------

FAT = dict(CONFIG) | {"hidden_size": 256, "intermediate_size": 32_768, "vocab_size": 40}
FINGERPRINT = wire.target_fingerprint(FAT, LAYERS)
TOKENS = 20


def fat_run() -> tuple[bytes, torch.Tensor]:
    """Body of PUT /runs/{run} of some KiB, whose drafter takes 100 MB, and its moments as much again; and its head."""
    embed, head = torch.randn(40, 256) * 0.02, torch.randn(40, 256) * 0.02
    facts = {
        "format": wire.RUN_FORMAT,
        "config": json.dumps(FAT),
        "aux_layers": json.dumps({"convention": "entering", "layers": LAYERS}),
        "target_fingerprint": FINGERPRINT,
        "policy_version": "0",
    }
    return joined(wire.encode({"embed_tokens": as_wire(embed), "lm_head": as_wire(head)}, facts)), head


def fat_batch(run: str, name: str, head: torch.Tensor) -> bytes:
    ids = torch.randint(0, 40, (TOKENS,))
    mask = torch.ones(TOKENS, dtype=torch.uint8)
    mask[0] = 0
    last = torch.randn(TOKENS, 256).bfloat16()
    logits = last.float() @ head.T
    logprobs = torch.zeros(TOKENS)
    logprobs[1:] = torch.log_softmax(logits, -1)[torch.arange(TOKENS - 1), ids[1:]]
    tensors = {
        "input_ids": ids.int(),
        "cu_seqlens": torch.tensor([0, TOKENS], dtype=torch.int32),
        "loss_mask": mask,
        "aux_hidden": torch.randn(TOKENS, 3 * 256).bfloat16(),
        "last_hidden": last,
        "logprobs": logprobs,
        "logsumexp": torch.logsumexp(logits, -1),
    }
    facts: dict[str, Any] = {"run": run, "policy_version": 0, "rollout_ids": [name], "target_fingerprint": FINGERPRINT}
    metadata = wire.rollout_metadata(**facts, aux_layers=LAYERS)
    return joined(wire.encode({k: as_wire(v) for k, v in tensors.items()}, metadata))


@pytest.mark.timeout(300)
def test_an_honest_run_is_trained_beside_fat_idle_ones_in_a_process_whose_memory_is_bounded(
    bench: Bench, tmp_path: Path
) -> None:
    """A review: some registrations of 80 KiB held 200 MB each for ever, and the next honest run was refused."""
    body, head = fat_run()
    fat = [f"fat{number}" for number in range(2)]
    with nest(tmp_path / "log") as workers:
        pid = workers.start(bench, address_space=900 << 20, settings={"draft_vocab_size": 32})

        def trained(run: str, batch: str) -> None:
            bench.wait(lambda: is_trained(bench, run, batch) or not alive(pid), 60.0)
            assert alive(pid), "the process died"
            assert is_trained(bench, run, batch)

        for run in [*fat, "honest"]:
            bench.register(body, run=run)
            trained(run, bench.post_file(fat_batch(run, f"{run}-first", head)))
        states = {run: state_of(bench, run) for run in fat}
        for run in fat:
            trained(run, bench.post_file(fat_batch(run, f"{run}-second", head)))
            totals, windows = state_of(bench, run)
            assert totals["batches"] == 2
            assert windows > states[run][1] > 0
        assert not [run for run in [*fat, "honest"] if error_of(bench, run)]
    log = (tmp_path / "log").read_text()
    print(f"{log.count('is idle, and closed')} times an idle run was closed")
    assert "is idle, and closed" in log, "all fitted: the test shows nothing"


def state_of(bench: Bench, run: str) -> tuple[dict[str, Any], int]:
    """Totals and windows of a run's newest checkpoint."""
    newest = max(bench.layout.worker(run).glob("checkpoint-*"))
    windows = json.loads((newest / "trainer" / "trainer.json").read_text())["windows"]
    return json.loads((newest / "state.json").read_text())["totals"], windows
