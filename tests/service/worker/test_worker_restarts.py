"""Restarts of one run's worker, in this process: whatever the moment, every batch counts once and none is lost."""

from __future__ import annotations

import contextlib
import shutil
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from redis import Redis
from redis.exceptions import ConnectionError as RedisConnectionError
from storage_fixtures import Store
from worker_fixtures import Bench, final_state, states

import rl_hooks.durable
import service.storage.lease
import service.worker.inbox
import service.worker.process.worker
import service.worker.promotion.promises
from drafter.batch import load_batch
from drafter.files.checkpoint import write_drafter
from drafter.training.trainer import DrafterTrainer
from service.storage.history.events import History
from service.storage.lease import Leases
from service.storage.queue.deliveries import MAX_DELIVERIES
from service.storage.queue.deliveries import RolloutQueue as WorkersQueue
from service.storage.registry import Registry
from service.storage.reports.store import Store as WorkersStore
from service.worker.checkpoint import CheckpointSuperseded, WorkerCheckpoint
from service.worker.claim import ClaimScorer
from service.worker.inbox import Inbox, Loaded
from service.worker.learner import Learner, TrainingStopped
from service.worker.lineage import Lineage
from service.worker.loop import LeaseLost, RunWorker
from service.worker.process.worker import Worker
from service.worker.recent import RecentRollouts


class Stopped(BaseException):
    """The process dies here."""


def die_in(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, *, after: bool = False, calls: int = 1) -> None:
    """From the `calls`-th call on, `owner.name` ends the process, before or after doing its work."""
    real = getattr(owner, name)
    count = 0

    def dying(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        if count < calls:
            return real(*args, **kwargs)
        if after:
            real(*args, **kwargs)
        raise Stopped

    monkeypatch.setattr(owner, name, dying)


MOMENTS = [
    (ClaimScorer, "score", False),
    (Learner, "train", False),
    (Learner, "train", True),
    (Learner, "judge", False),
    (Learner, "judge", True),
    (WorkersStore, "put_score", False),
    (WorkersStore, "put_score", True),
    (WorkerCheckpoint, "save", False),
    (WorkerCheckpoint, "save", True),
    (WorkersQueue, "ack", False),
    (WorkersQueue, "ack", True),
]


@pytest.mark.parametrize(("owner", "name", "after"), MOMENTS, ids=lambda x: getattr(x, "__name__", str(x)))
def test_a_death_at_any_step_leaves_the_state_of_an_undisturbed_run(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, after: bool
) -> None:
    """Weights, optimizer and counters bit for bit; one score per batch; nothing left in queue or spool."""
    bench.begin()
    for batch in "abcde":
        bench.post(batch)
    with monkeypatch.context() as patch:
        die_in(patch, owner, name, after=after, calls=3)
        with pytest.raises(Stopped):
            bench.drain(bench.worker())
    bench.drain(bench.worker())
    found = final_state(bench)

    bench.redis.flushall()
    with Bench(tmp_path / "calm", bench.redis_url) as calm:
        calm.begin()
        for batch in "abcde":
            calm.post(batch)
        calm.drain(calm.worker())
        assert found == final_state(calm)


def test_a_stop_right_after_a_death_between_checkpoint_and_ack_trains_nothing_twice(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The orderly stop writes a checkpoint of its own, which must not forget what the one before had applied."""
    bench.begin()
    bench.post("a")
    with monkeypatch.context() as patch:
        die_in(patch, WorkersQueue, "ack")
        with pytest.raises(Stopped):
            bench.drain(bench.worker())
    counts = bench.trainer_counts()
    bench.worker().close()
    bench.drain(bench.worker())
    assert states(bench) == ["trained"]
    assert bench.trainer_counts() == counts
    assert bench.totals()["batches"] == 1


def test_files_are_moved_out_of_the_spool_by_the_next_start(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not only by its first checkpoint: meanwhile the reaper would take them for orphans."""
    bench.begin()
    bench.post("a")
    with monkeypatch.context() as patch:
        die_in(patch, WorkerCheckpoint, "save", after=True)
        with pytest.raises(Stopped):
            bench.drain(bench.worker())
    assert len(bench.spooled()) == 1
    bench.worker()
    assert bench.spooled() == []


def test_restarts_while_a_vocabulary_is_gathered_lose_nothing_and_count_nothing_twice(bench: Bench) -> None:
    """More deaths than an entry may have deliveries: they only waited, so they are not to blame."""
    bench.register()
    for name in "abc":
        bench.post(name, rollouts=4)
    for _ in range(6):
        worker = bench.worker(vocab_min_tokens=100_000)
        for _ in range(5):
            worker.cycle()
        counted = int(worker.learner.token_counts.sum())
        assert worker.inbox.waiting == 3
    assert states(bench) == ["queued"] * 3
    bench.post("d", rollouts=4)
    bench.drain(bench.worker(vocab_min_tokens=counted + 1))
    assert states(bench) == ["trained"] * 4
    assert set(bench.store.scores()) == set(bench.posted)
    assert bench.totals()["batches"] == 4


def test_a_batch_that_kills_its_worker_once_gathering_ends_is_dead_and_the_others_live(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.register()
    batches = [bench.post(name, rollouts=4) for name in "abc"]
    real = ClaimScorer.score

    def deadly(self: ClaimScorer, loaded: Loaded, *args: Any, **more: Any) -> Any:
        if loaded.entry.batch_id == batches[1]:
            raise Stopped
        return real(self, loaded, *args, **more)

    monkeypatch.setattr(ClaimScorer, "score", deadly)
    for _ in range(8):
        try:
            bench.drain(bench.worker(vocab_min_tokens=50, claim_tokens=10_000))
            break
        except Stopped:
            continue
    assert states(bench) == ["trained", "dead", "trained"]
    assert bench.reason(batches[1]) == "killed its worker 3 times"


def test_an_orderly_stop_while_gathering_gives_the_entries_back_unblamed(bench: Bench) -> None:
    bench.register()
    bench.post("a")
    for _ in range(5):
        worker = bench.worker(vocab_min_tokens=100_000)
        worker.cycle()
        worker.close()
    assert states(bench) == ["queued"]


def test_what_is_in_hand_is_not_claimed_again_after_redis_was_away_for_long(bench: Bench) -> None:
    """Its idle time then exceeds the limit at which a dead worker's entries are taken over."""
    bench.begin()
    bench.post("a")
    worker = bench.worker(claim_idle_seconds=0.05, checkpoint_seconds=1e9)
    worker.inbox.backlog = False
    worker.cycle()
    counts = worker.learner.lineage.trainer.windows  # type: ignore[union-attr]
    time.sleep(0.1)
    assert not worker.cycle()
    assert worker.learner.lineage.trainer.windows == counts  # type: ignore[union-attr]


def test_a_checkpoint_that_fails_is_tried_again_without_training_twice(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.begin()
    bench.post("a")
    worker = bench.worker()
    with monkeypatch.context() as patch:

        def full(*_: Any) -> None:
            raise OSError(28, "No space left on device")

        patch.setattr(WorkerCheckpoint, "save", full)
        for _ in range(6):
            with pytest.raises(OSError, match="No space"):
                bench.drain(worker)
    assert states(bench) == ["queued"]
    bench.drain(worker)
    bench.post("b")
    bench.drain(worker)
    assert states(bench) == ["trained", "trained"]
    assert bench.totals()["batches"] == 2


def test_a_checkpoint_whose_directory_could_not_be_synced_is_the_workers_own(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has its name by then: the next one follows it, and no other worker is thought to have written it."""
    bench.begin()
    bench.post("a")
    worker = bench.worker(checkpoint_seconds=1e9)
    worker.cycle()
    real = rl_hooks.durable.sync

    def failing(path: Path) -> None:
        if path == bench.layout.worker("default"):
            raise OSError(5, "Input/output error")
        real(path)

    with monkeypatch.context() as patch:
        patch.setattr(rl_hooks.durable, "sync", failing)
        with pytest.raises(OSError, match="Input/output"):
            worker.save()
    assert states(bench) == ["queued"]
    first = bench.checkpoint().name
    worker.save()
    assert states(bench) == ["trained"]
    assert bench.checkpoint().name > first


def test_a_score_that_redis_did_not_take_is_sent_before_the_batch_is_acknowledged(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.begin()
    bench.post("a")
    worker = bench.worker()
    with monkeypatch.context() as patch:

        def away(*_: Any) -> None:
            raise RedisConnectionError("away")

        patch.setattr(WorkersStore, "put_score", away)
        with pytest.raises(RedisConnectionError):
            worker.cycle()
    worker.cycle()
    worker.close()
    assert states(bench) == ["trained"]
    assert set(bench.store.scores()) == set(bench.posted)


def test_a_candidate_is_checkpointed_before_it_is_published(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a redelivered batch would be scored by a served drafter that was trained on it."""
    bench.register()
    for name in "abcdefghijkl":
        bench.post(name)
    with monkeypatch.context() as patch:
        die_in(patch, Registry, "publish", after=True)
        with pytest.raises(Stopped):
            bench.drain(bench.worker(gate_min_gain=0.0, checkpoint_seconds=1e9, recent_tokens=100_000))
    before = bench.store.scores()
    assert Registry(bench.layout).latest("default") is not None
    bench.drain(bench.worker(gate_min_gain=1e6))
    after = bench.store.scores()
    assert {b: after[b].candidate for b in before} == {b: before[b].candidate for b in before}
    assert all(after[b].drafter_version is None for b in before)


def test_a_torn_file_among_the_recent_ones_does_not_stop_the_run(bench: Bench) -> None:
    bench.begin()
    bench.post("a")
    bench.drain(bench.worker())
    (path,) = (bench.layout.worker("default") / "recent").iterdir()
    path.write_bytes(path.read_bytes()[:50])
    bench.post("b")
    bench.drain(bench.worker())
    assert states(bench) == ["trained", "trained"]


def test_leftovers_of_killed_checkpoints_are_removed(bench: Bench) -> None:
    bench.begin()
    directory = bench.layout.worker("default")
    bench.post("a")
    bench.drain(bench.worker())
    (directory / "checkpoint-000000000").mkdir()
    (directory / ".writing-1").mkdir()
    bench.post("b")
    bench.drain(bench.worker())
    assert sorted(p.name for p in directory.iterdir()) == ["checkpoint-000000002", "recent"]


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


def test_the_last_heartbeat_takes_no_lease_that_was_given_back(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is in the middle of its round when the worker ends in order: a standby would wait for the lease to expire."""
    bench.begin()
    bench.register(run="before-default")
    worker = Worker(bench.settings, Redis.from_url(bench.redis_url))
    worker._turn()
    beat, began, closed = WorkersQueue.heartbeat, threading.Event(), threading.Event()

    def slow(self: WorkersQueue, consumer: str, entry_ids: Sequence[str]) -> list[str]:
        if threading.current_thread() is heartbeat and not began.is_set():
            began.set()
            assert closed.wait(20)
        return beat(self, consumer, entry_ids)

    monkeypatch.setattr(WorkersQueue, "heartbeat", slow)
    heartbeat = threading.Thread(target=worker._heartbeat.beat)
    heartbeat.start()
    assert began.wait(20)
    worker._close()
    closed.set()
    heartbeat.join(20)
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

            def away(*_: Any) -> None:
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
    monkeypatch.setattr(service.storage.lease, "LEASE_SECONDS", 2.0)
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


def fails_with(error: Exception) -> Any:
    """A stand-in for whatever meets that error."""

    def failing(*_: Any, **__: Any) -> Any:
        raise error

    return failing


def test_a_file_that_cannot_be_read_for_long_keeps_nobody_waiting_and_is_never_blamed(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Too many open files, a disk that fails: the batch was acknowledged, and has done no harm."""
    bench.begin()
    unread, read = bench.post("a"), bench.post("b")
    idle = 0.1

    def failing(path: Path, **options: Any) -> Any:
        if path.name.startswith(unread):
            raise OSError(24, "Too many open files")
        return load_batch(path, **options)

    with monkeypatch.context() as patch:
        patch.setattr(service.worker.inbox, "load_batch", failing)
        for _ in range(2):  # the second is a restart
            worker = bench.worker(claim_idle_seconds=idle)
            for _ in range(MAX_DELIVERIES):
                bench.drain(worker)
                time.sleep(2 * idle)
    assert (bench.state(unread), bench.state(read)) == ("queued", "trained")
    bench.drain(worker)
    assert states(bench) == ["trained", "trained"]


@pytest.mark.parametrize("error", [RedisConnectionError("away"), OSError(5, "Input/output error")])
def test_what_fails_again_and_again_after_a_death_is_not_laid_to_the_batch(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    bench.begin()
    bench.post("a")
    bench.worker().inbox.claim()  # and dies
    worker = bench.worker()
    with monkeypatch.context() as patch:
        patch.setattr(ClaimScorer, "score", fails_with(error))
        for _ in range(2 * MAX_DELIVERIES):
            with pytest.raises(type(error)):
                worker.cycle()
    bench.drain(worker)
    assert states(bench) == ["trained"], bench.reason(bench.posted[0])


def test_a_disk_that_fails_in_each_training_is_not_laid_to_the_batch(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.begin()
    bench.post("a")
    with monkeypatch.context() as patch:
        patch.setattr(DrafterTrainer, "step", fails_with(OSError(5, "Input/output error")))
        for _ in range(2 * MAX_DELIVERIES):
            with pytest.raises(TrainingStopped):  # the worker drops the run for that, and opens it again
                bench.worker().cycle()
    bench.drain(bench.worker())
    assert states(bench) == ["trained"], bench.reason(bench.posted[0])


@pytest.mark.parametrize("when", ["opened", "worked on"])
def test_a_run_whose_part_of_the_disk_fails_keeps_no_other_run_waiting(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    bench.begin()
    bench.register(run="before-default")
    bench.post("a")
    if when == "opened":
        restore = RecentRollouts.__init__

        def failing(self: RecentRollouts, directory: Path, **options: Any) -> None:
            if "before-default" in directory.parts:
                raise OSError(5, "Input/output error")
            restore(self, directory, **options)

        monkeypatch.setattr(RecentRollouts, "__init__", failing)
    else:
        cycle = RunWorker.cycle
        broken = fails_with(OSError(5, "Input/output error"))
        monkeypatch.setattr(RunWorker, "cycle", lambda self: (cycle if self.run == "default" else broken)(self))
    worker = Worker(bench.settings, bench.redis)
    with contextlib.suppress(OSError):  # of the one run, after the other had its turn
        worker._turn()
    assert states(bench) == ["trained"]
    if when == "opened":
        assert "Input/output" in (Store(bench.redis, "before-default").worker().error or "")


def test_a_full_redis_keeps_nothing_from_being_worked_on_and_acknowledged(bench: Bench) -> None:
    """Not the first worker nor one that starts meanwhile: what is queued would fill it for ever."""
    bench.begin()
    for name in "abc":
        bench.post(name)
    first = Worker(bench.settings, bench.redis)
    first._turn()
    bench.post("d")
    limit = bench.redis.config_get("maxmemory")["maxmemory"]
    bench.redis.config_set("maxmemory", 1)
    try:
        first._turn()
        bench.redis.delete(Leases.key("default"))  # expired
        second = Worker(bench.settings, bench.redis)
        for _ in range(4):
            second._turn()
        assert states(bench) == ["trained"] * 4
        assert len(bench.store.scores()) == 1
    finally:
        bench.redis.config_set("maxmemory", limit)
    bench.post("e")
    second._turn()
    assert states(bench) == ["trained"] * 5
    assert set(bench.posted[2:]) <= set(bench.store.scores()), "those of the worker that lives were kept"


#: Gains that show at once.
EAGER: dict[str, Any] = {"gate_min_gain": 0.005, "recent_tokens": 100_000, "learning_rate": 5e-3}


def published_by(bench: Bench, worker: RunWorker, name: str) -> int:
    """Post batches until another version is published; returns how many it took."""
    before = Registry(bench.layout).versions("default")
    for n in range(16):
        bench.post(f"{name} {n}", rollouts=64)
        bench.drain(worker)
        if Registry(bench.layout).versions("default") != before:
            return n + 1
    raise AssertionError("nothing was published")


@pytest.mark.parametrize("pushed", [False, True])
def test_a_death_right_after_a_publish_makes_it_no_refusal_and_its_gain_is_measured(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, *, pushed: bool
) -> None:
    bench.begin()
    registry = Registry(bench.layout)
    with monkeypatch.context() as patch:
        die_in(patch, Lineage, "promote", after=True)
        with pytest.raises(Stopped):
            published_by(bench, bench.worker(**EAGER), "a")
    served = registry.latest("default")
    assert served is not None
    assert served.gate is not None
    if pushed:
        registry.push_again("default", "the engine lost it")
    refused = [e for e in registry.history.read("default") if e["event"] == "refused"]
    worker = bench.worker(**EAGER)
    bench.drain(worker)
    assert worker.learner.journal.totals.published == 1
    assert worker.learner.gate.served == served.version
    assert worker.learner.gate.outcomes.unmeasured, "those that judged it do not measure it"
    after = [e for e in registry.history.read("default") if e["event"] == "refused"]
    assert after == refused, "the candidate is what is served: that is no refusal"
    for n in range(8):
        bench.post(f"b {n}", rollouts=64)
        bench.drain(worker)
    realised = [e for e in registry.history.read("default") if e["event"] == "realised"]
    assert realised[0]["version"] == served.version
    assert realised[0]["promised"] == served.gate["gain"]


@pytest.mark.parametrize("dies", ["before the history has it", "before a checkpoint has it"])
def test_a_death_right_after_a_sent_drafter_is_published_keeps_its_promise_and_what_is_trained(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, dies: str
) -> None:
    bench.begin()
    registry, idle = Registry(bench.layout), EAGER | {"learning_rate": 1e-12}
    bench.worker(**idle).close()
    first, better = registry.latest("default"), bench.world.trained_drafter(tmp_path)
    assert first is not None
    staged = registry.stage("default")
    write_drafter(staged, better)
    sent, _ = registry.archive("default", staged, like=first, reason="from the lab", by="ada", most_waiting=4)
    with monkeypatch.context() as patch:
        if dies == "before the history has it":

            def dying(self: History, run: str, event: dict[str, Any]) -> None:
                if event["event"] == "published":
                    raise Stopped
                append(self, run, event)

            append = History.record
            patch.setattr(History, "record", dying)
        else:
            die_in(patch, Lineage, "promote", after=True)
        with pytest.raises(Stopped):  # noqa: PT012 - until it has looked often enough
            for n in range(8):
                bench.post(f"a {n}", rollouts=32)
                bench.drain(bench.worker(**idle))
    served = registry.latest("default")
    assert served is not None
    assert served.version == sent.version
    worker = bench.worker(**idle)
    bench.drain(worker)
    assert (worker.learner.gate.served, worker.learner.gate.outcomes.watched) == (sent.version, first.version)
    assert worker.learner.gate.outcomes.unmeasured, "those that judged it do not measure it"
    assert worker.learner.journal.totals.published == 1
    for name, value in better.state_dict().items():
        trained = worker.learner.lineage.candidate.state_dict()[name]
        assert torch.allclose(trained.float(), value.float(), atol=1e-3), "trained on from it"
    monkeypatch.setattr(service.worker.promotion.promises, "_SETTLED_ROLLOUTS", 1)
    bench.post("b", rollouts=32)
    bench.drain(worker)
    (realised,) = [e for e in registry.history.read("default") if e["event"] == "realised"]
    assert (realised["version"], realised["before"]) == (sent.version, first.version)
    assert realised["promised"] > 0
    worker.save()
    registry.push_again("default", "lost")
    published = [
        e for e in registry.history.read("default") if e.get("version") == sent.version and e["event"] == "published"
    ]
    assert [e["gate"]["gain"] for e in published] == [realised["promised"]], "told once"


def test_a_rollback_by_a_person_ends_what_was_being_measured(bench: Bench) -> None:
    bench.begin()
    worker, registry = bench.worker(**EAGER), Registry(bench.layout)
    published_by(bench, worker, "a")
    first = registry.versions("default")[0]
    assert worker.learner.gate.outcomes.watched == first
    measured = worker.learner.gate.served
    worker.save()
    strict = bench.worker(**EAGER | {"gate_min_gain": 1e6})
    bench.post("before", rollouts=64)
    bench.drain(strict)
    registry.rollback("default", first, "by hand")
    strict.learner.controller.curve.learn(0.2, 0.01, promoted=False)
    assert strict.learner.gate.outcomes.watched == first
    bench.post("after", rollouts=64)
    bench.drain(strict)
    assert strict.learner.gate.served == first
    assert strict.learner.gate.outcomes.watched is None, "the other one does not serve"
    assert gains(bench) == [measured], "what is known of it is written"
    assert all(m.gain != 0.2 for m in strict.learner.controller.curve.measured), "that was against another drafter"


def gains(bench: Bench) -> list[str]:
    return [e["version"] for e in Registry(bench.layout).history.read("default") if e["event"] == "realised"]


def test_a_gain_that_is_known_half_is_written_once_whoever_dies(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next publish ends the measurement; the checkpoint is from before it, so the next life finds it again."""
    monkeypatch.setattr(service.worker.promotion.promises, "_SETTLED_ROLLOUTS", 1_000_000)
    bench.begin()
    worker = bench.worker(**EAGER)
    published_by(bench, worker, "a")
    measured = Registry(bench.layout).versions("default")[-1]
    worker.save()
    strict = bench.worker(**EAGER | {"gate_min_gain": 1e6})
    bench.post("half", rollouts=64)
    bench.drain(strict)
    strict.save()
    assert not gains(bench)
    with monkeypatch.context() as patch:
        die_in(patch, Lineage, "promote", after=True)
        with pytest.raises(Stopped):
            published_by(bench, bench.worker(**EAGER), "b")
    with monkeypatch.context() as patch:
        die_in(patch, Learner, "_decide")
        with pytest.raises(Stopped):
            bench.drain(bench.worker(**EAGER))
    bench.drain(bench.worker(**EAGER))
    event = {"event": "realised", "version": measured}
    worker.learner.lineage.record_gain(event)  # and a third time, from whoever finds it
    assert gains(bench) == [measured]
    Registry(bench.layout).rollback("default", measured, "by hand")
    worker.learner.lineage.record_gain(event)
    assert gains(bench) == [measured, measured], "served again, measured again"


def test_a_death_between_a_gain_that_is_written_and_the_checkpoint_writes_it_once(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.begin()
    worker = bench.worker(**EAGER)
    published_by(bench, worker, "a")
    monkeypatch.setattr(service.worker.promotion.promises, "_SETTLED_ROLLOUTS", 1)
    bench.post("after", rollouts=64)
    with monkeypatch.context() as patch:
        die_in(patch, Lineage, "record_gain", after=True)
        with pytest.raises(Stopped):
            bench.drain(worker)
    assert gains(bench)
    strict = bench.worker(**EAGER | {"gate_min_gain": 1e6})
    bench.drain(strict)
    bench.post("more", rollouts=64)
    bench.drain(strict)
    assert len(gains(bench)) == len(set(gains(bench)))


def test_rollouts_that_chose_a_version_do_not_measure_it_when_they_come_again(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that fails is not the batches' doing, so their delivery is not counted: it does not tell."""
    bench.begin()
    worker = bench.worker(**EAGER)
    promote = Lineage.promote

    def then_the_disk_fails(self: Lineage, *arguments: Any) -> Any:
        patch.setattr(Learner, "_conclude", fails_with(OSError(5, "Input/output error")))
        return promote(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Lineage, "promote", then_the_disk_fails)
        with pytest.raises(OSError, match="Input/output"):
            published_by(bench, worker, "a")
    versions = Registry(bench.layout).versions("default")
    bench.drain(worker)
    assert Registry(bench.layout).versions("default") == versions
    assert worker.learner.gate.outcomes.unmeasured


def test_a_claim_that_fails_after_a_rollback_is_looked_at_once(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.begin()
    worker, registry = bench.worker(**EAGER), Registry(bench.layout)
    published_by(bench, worker, "a")
    worker.save()
    registry.rollback("default", registry.versions("default")[0], "by hand")
    strict = bench.worker(**EAGER | {"gate_min_gain": 1e6})
    monkeypatch.setattr(Lineage, "refuse", fails_with(OSError(28, "no space left on device")))
    bench.post("after", rollouts=64)
    with pytest.raises(OSError, match="no space"):
        bench.drain(strict)
    state = strict.learner.gate.state
    assert state["served"] == registry.versions("default")[0]
    assert (state["trials"]["candidate"]["looks"], state["tested"]) == (0, 0), "it comes again, and counts then"


def test_a_version_whose_predecessor_is_gone_is_not_waited_for(bench: Bench) -> None:
    """All drafters would be compared with every claim, for a gain that nobody can measure."""
    bench.begin()
    worker = bench.worker(**EAGER)
    published_by(bench, worker, "a")
    assert worker.learner.gate.outcomes.unmeasured
    shutil.rmtree(bench.layout.drafter("default", str(worker.learner.gate.outcomes.watched)))
    assert not worker.learner.gate.outcomes.unmeasured


def test_what_earlier_versions_kept_in_redis_is_deleted(bench: Bench) -> None:
    bench.begin()
    bench.redis.hset("da:{default}:judged", "engine/v000001", "[1, 2]")
    worker = Worker(bench.settings, bench.redis)
    worker._turn()
    assert set(worker.served) == {"default"}
    assert bench.redis.exists("da:{default}:judged") == 0
