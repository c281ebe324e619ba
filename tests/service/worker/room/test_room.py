"""Where memory runs out, runs that are idle give theirs up to one that has work, and go on later as they were."""

from __future__ import annotations

import errno
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from helpers.service.storage_fixtures import RolloutQueue
from helpers.worker.room_fixtures import (
    NO_MEMORY,
    RUNS,
    as_it_is,
    error_of,
    is_trained,
    no_room,
    post,
    register,
    train,
    train_unsaved,
    until_trained,
    watched,
)
from helpers.worker.worker_fixtures import Bench
from redis import Redis

import service.worker.process.worker
from drafter.batch import load_batch
from drafter.device import RanksLost, is_out_of_memory
from drafter.errors import CheckpointError
from service.storage.queue.deliveries import RolloutQueue as WorkersQueue
from service.storage.queue.keys import GROUP, Keys
from service.storage.queue.lease import Leases
from service.worker.learner import Learner
from service.worker.loop import RunWorker
from service.worker.process import turns
from service.worker.process.room import Room
from service.worker.process.worker import Worker


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
    assert worker.served["a"].inbox.put_off


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

        def looking(self: Worker, run: str, *args: Any, error: Exception = error, **named: Any) -> None:
            if run == "a":
                raise error
            look_after(self, run, *args, **named)

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
