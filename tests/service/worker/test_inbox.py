"""The inbox and the learner by themselves: deliveries without training, and training without a queue."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import pytest
from helpers.worker.worker_fixtures import VOCAB, Bench
from redis.exceptions import ConnectionError as RedisConnectionError

from drafter.batch import load_batch
from drafter.device import is_out_of_memory
from drafter.errors import BatchRejected, DrafterError
from drafter.training.trainer import DrafterTrainer
from rl_hooks.wire import WireError
from service.errors import BlobDamaged, ObjectStoreError
from service.storage.queue.deliveries import MAX_DELIVERIES, Entry, RolloutQueue
from service.worker.inbox import MEMORY_TRIES, RECENT_BATCHES, ArrivedVersions, Inbox, Loaded, Phase
from service.worker.learner import Learner
from service.worker.recent import RecentRollouts
from service.worker.target import Target

TraceFunction = Callable[[FrameType, str, object], Any]


@pytest.fixture
def inbox(bench: Bench) -> Inbox:
    bench.begin()
    return opened(bench)


def opened(bench: Bench, applied: Sequence[str] = ()) -> Inbox:
    settings = bench.settings.model_copy(update={"claim_tokens": 10_000})
    made = Inbox(settings, bench.layout, bench.queue, VOCAB)
    made.applied |= {*applied}
    return made


def new(inbox: Inbox) -> list[Loaded]:
    """What is new, after the backlog."""
    assert not inbox.redeliver()
    return inbox.load(inbox.claim())


def deliveries(inbox: Inbox) -> list[int]:
    """How often each entry of the backlog has been delivered, by the queue's count."""
    entries = inbox.redeliver()
    inbox.end_turn()
    return [entry.deliveries for entry in entries]


def test_a_batch_is_held_from_its_claim_until_it_is_acknowledged(bench: Bench, inbox: Inbox) -> None:
    batch = bench.post("a")
    assert list(inbox.held) == []
    (loaded,) = new(inbox)
    claimed = inbox.held
    assert claimed == (loaded.entry.entry_id,)
    inbox.finish(loaded)
    inbox.end_turn()
    assert (inbox.held, inbox.done, bench.state(batch)) == (claimed, 1, "queued")
    inbox.commit(lambda _: None)
    assert (inbox.held, inbox.done, bench.state(batch)) == ((), 0, "trained")
    assert claimed == (loaded.entry.entry_id,), "a snapshot does not change under its reader"


def test_a_heartbeat_sees_what_is_held_at_every_moment_of_a_change(bench: Bench, inbox: Inbox) -> None:
    """Another thread may read between any two lines. An entry that one heartbeat misses lapses, and is claimed."""
    bench.post("a")
    bench.post("b")
    first, second = new(inbox)
    both = {first.entry.entry_id, second.entry.entry_id}
    seen: list[set[str]] = []

    def read(frame: FrameType, event: str, argument: object) -> TraceFunction:
        seen.append(set(inbox.held))
        return read

    before = sys.gettrace()
    sys.settrace(read)
    try:
        inbox.wait([first, second])
        inbox.uncount(Phase.WAITING)
        for loaded in inbox.resume():
            inbox.finish(loaded)
        inbox.uncount(Phase.DONE)
        inbox.interrupt()
    finally:
        sys.settrace(before)
    assert len(seen) > 100
    assert [held for held in seen if held != both] == []


def test_nothing_is_acknowledged_before_the_checkpoint_that_holds_it(bench: Bench, inbox: Inbox) -> None:
    batches = [bench.post(name) for name in "ab"]
    for loaded in new(inbox):
        inbox.finish(loaded)

    def full(_: Sequence[str]) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        inbox.commit(full)
    assert [bench.state(b) for b in batches] == ["queued"] * 2
    states: list[str] = []
    listed: list[str] = []

    def write(applied: Sequence[str]) -> None:
        states.extend(bench.state(b) for b in batches)
        listed.extend(applied)

    inbox.commit(write)
    assert states == ["queued"] * 2
    assert listed == sorted(batches)
    assert [bench.state(b) for b in batches] == ["trained"] * 2


def test_what_a_checkpoint_holds_is_acknowledged_unread_when_it_comes_again(bench: Bench, inbox: Inbox) -> None:
    batch = bench.post("a")
    assert new(inbox)  # and dies between checkpoint and acknowledgement
    bench.layout.blob("default", bench.spooled()[0]).write_bytes(b"")
    again = opened(bench, applied=[batch])
    assert again.load(again.redeliver()) == []
    assert bench.state(batch) == "trained"
    assert again.held == ()


def test_a_failure_that_is_no_batchs_counts_no_delivery_and_a_death_does(bench: Bench, inbox: Inbox) -> None:
    for name in "ab":
        bench.post(name)
    for _ in range(2 * MAX_DELIVERIES):
        inbox.load(inbox.redeliver() or inbox.claim())
        inbox.interrupt()
        inbox.end_turn()
    assert deliveries(inbox) == [1, 1]
    assert deliveries(opened(bench)) == [1, 1], "that was released too"
    assert deliveries(opened(bench)) == [2, 2], "and here the process has died"


def test_a_delivery_that_redis_could_not_take_back_is_taken_back_later(
    bench: Bench, inbox: Inbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two failures in a row: the second must not make it forget the first."""
    bench.post("a")
    new(inbox)

    def away(*_: object) -> None:
        raise RedisConnectionError("away")

    with monkeypatch.context() as patch:
        patch.setattr(RolloutQueue, "release", away)
        for _ in range(3):
            inbox.interrupt()
            inbox.end_turn()
            with pytest.raises(RedisConnectionError):
                inbox.redeliver()
    assert deliveries(inbox) == [1]


def test_what_waits_for_a_vocabulary_is_held_in_order_and_counts_from_then_on(bench: Bench, inbox: Inbox) -> None:
    batches = [bench.post(name) for name in "abc"]
    inbox.wait(new(inbox))
    inbox.end_turn()
    assert (inbox.waiting, len(inbox.held)) == (3, 3)
    resumed = inbox.resume()
    assert [loaded.entry.batch_id for loaded in resumed] == batches
    assert (inbox.waiting, len(inbox.held)) == (0, 3), "a long first training must not look like an abandoned claim"
    assert deliveries(opened(bench)) == [2] * 3


def test_an_unreadable_file_is_left_to_its_idle_time_and_not_counted(
    bench: Bench, inbox: Inbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.post("a")

    def failing(*_: object, **__: object) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr("service.worker.inbox.load_batch", failing)
        assert new(inbox) == []
    assert inbox.held == ()
    assert inbox.redeliver() == [], "not at once"
    assert deliveries(opened(bench)) == [1]


CUDA = RuntimeError("CUDA error: device-side assert triggered")
#: What loading a batch may raise, and what follows: the batch's code where it is dead, `put off`, or `raised`.
FATES: list[tuple[Exception, str]] = [
    (FileNotFoundError(2, "gone"), "blob_missing"),
    (BlobDamaged("other bytes"), "blob_damaged"),
    (WireError("input_ids", "wrong"), "unusable"),
    (BatchRejected("all of it is NaN"), "unusable"),
    (ValueError("a bug that this batch brings out"), "unusable"),
    (OSError(5, "Input/output error"), "put off"),
    (OSError(12, "Cannot allocate memory"), "put off"),
    (MemoryError(), "put off"),
    (RuntimeError("DefaultCPUAllocator: can't allocate memory"), "put off"),
    (RedisConnectionError("away"), "raised"),
    (ObjectStoreError("away"), "put off"),
    (DrafterError("it does not fit"), "raised"),
    (CUDA, "raised"),
]


@pytest.mark.parametrize(("error", "fate"), FATES, ids=lambda one: f"{one}"[:30])
def test_a_batch_that_cannot_be_loaded_dies_is_put_off_or_is_not_to_blame(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, error: Exception, fate: str
) -> None:
    def failing(*_: object, **__: object) -> None:
        raise error

    bench.begin()
    inbox = Inbox(bench.settings, bench.layout, bench.queue, VOCAB, ends_for_memory=lambda: False)
    batch = bench.post("a")
    monkeypatch.setattr("service.worker.inbox.load_batch", failing)
    if fate == "raised":
        with pytest.raises(type(error)):
            new(inbox)
        assert (len(inbox.held), bench.state(batch)) == (1, "queued")
        return
    assert new(inbox) == []
    assert inbox.held == ()
    short = is_out_of_memory(error)
    if fate == "put off":
        assert (bench.state(batch), len(inbox.put_off), inbox.short_of_memory) == ("queued", 1, short)
        assert deliveries(opened(bench)) == [1]
    else:
        assert (bench.state(batch), bench.code(batch), inbox.put_off) == ("dead", fate, [])
        assert len(bench.spooled()) == 1, "its file is kept"
        assert bench.reason(batch)


def test_memory_that_runs_out_ends_a_batch_after_many_tries_or_is_raised(
    bench: Bench, inbox: Inbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = bench.post("a")
    (loaded,) = new(inbox)
    with pytest.raises(MemoryError):
        inbox.fail(loaded.entry, MemoryError(), "cannot be scored")
    patient = Inbox(bench.settings, bench.layout, bench.queue, VOCAB, ends_for_memory=lambda: False)
    for tries, state in ((MEMORY_TRIES - 1, "queued"), (MEMORY_TRIES, "dead")):
        monkeypatch.setattr(RolloutQueue, "memory_ran_out", lambda *_, tries=tries: tries)
        patient.fail(loaded.entry, MemoryError("40 GiB"), "cannot be scored")
        assert bench.state(batch) == state
    assert "memory ran out 60 times, so it cannot be scored; raise the memory" in bench.reason(batch)
    assert "MemoryError: 40 GiB" in bench.reason(batch)


@pytest.mark.parametrize(("lag", "ends"), [(2, ["skipped", "queued", "queued"]), (None, ["queued"] * 3)])
def test_a_batch_of_a_policy_that_is_too_old_is_skipped_and_its_file_deleted(
    bench: Bench, lag: int | None, ends: list[str]
) -> None:
    bench.begin()
    settings = bench.settings.model_copy(update={"claim_tokens": 10_000, "max_policy_lag": lag})
    inbox = Inbox(settings, bench.layout, bench.queue, VOCAB)
    batches = [bench.post(f"v{version}", policy_version=version) for version in (4, 5, 7)]
    assert not inbox.redeliver()
    found = inbox.load(inbox.claim())
    assert [bench.state(batch) for batch in batches] == ends
    assert [loaded.entry.policy_version for loaded in found] == [4, 5, 7][ends.count("skipped") :]
    assert len(bench.spooled()) == len(found)
    if lag is not None:
        assert bench.reason(batches[0]) == "3 policy versions old; limit 2"


def test_beyond_the_most_tokens_the_oldest_batches_that_wait_are_passed_over(
    bench: Bench, inbox: Inbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches = [bench.post(name) for name in "abcd"]
    loaded = new(inbox)
    tokens = loaded[0].batch.tokens
    monkeypatch.setattr("service.worker.inbox._MOST_WAITING_TOKENS", 2 * tokens)
    inbox.wait(loaded[:2])
    assert inbox.waiting == 2
    inbox.wait(loaded[2:])
    assert [bench.state(batch) for batch in batches] == ["skipped", "skipped", "queued", "queued"]
    assert (inbox.waiting, len(bench.spooled())) == (2, 2)
    assert "while the draft vocabulary was gathered" in bench.reason(batches[0])
    monkeypatch.setattr(RolloutQueue, "was_refused", lambda _: True)
    inbox.wait([])
    assert [bench.state(batch) for batch in batches[2:]] == ["skipped", "queued"], "all that fills the queue waits here"
    monkeypatch.setattr("service.worker.inbox._MOST_WAITING_TOKENS", 0)
    monkeypatch.setattr(RolloutQueue, "was_refused", lambda _: False)
    inbox.wait([])
    assert inbox.waiting == 1, "the newest stays, however long it is"


def test_an_orderly_stop_counts_neither_what_waits_nor_what_is_done(bench: Bench, inbox: Inbox) -> None:
    for name in "ab":
        bench.post(name)
    waits, done = new(inbox)
    inbox.wait([waits])
    inbox.finish(done)
    inbox.uncount(Phase.DONE)
    assert deliveries(opened(bench)) == [1, 1]


def test_the_time_between_policy_versions_starts_again_with_a_trainer_that_went_back() -> None:
    versions = ArrivedVersions()

    def arrive(seconds: float, version: int) -> None:
        versions.note(Entry(f"{int(1000 * seconds)}-0", "b", "b", 1, 1, 1, version, version, 1))

    arrive(0.0, 199)
    assert (versions.newest, versions.seconds_per_version) == (199, None)
    arrive(50.0, 200)
    assert (versions.newest, versions.seconds_per_version) == (200, 50.0)
    for number in range(RECENT_BATCHES + 2):
        arrive(100.0 + 10.0 * number, 101 + number)
    assert (versions.newest, versions.seconds_per_version) == (110, 10.0)


def test_a_batch_that_is_delivered_again_is_no_new_arrival() -> None:
    """One that is put off comes again for an hour; it may be of an earlier start, whose versions were higher."""
    versions = ArrivedVersions()
    old = Entry("1000-0", "old", "old", 1, 1, 1, 500, 500, 1, attempt=1)
    versions.note(old)
    for number in range(3):
        name = f"new{number}"
        versions.note(Entry(f"{2000 + number}-0", name, name, 1, 1, 1, 450 + number, 450 + number, 1, attempt=2))
        versions.note(old)
        assert versions.newest == 450 + number


@pytest.mark.parametrize("apart", [1, 4, 1000])
def test_how_far_labels_lie_apart_says_nothing_of_the_time_between_them(apart: int) -> None:
    """A trainer may count optimizer steps."""
    versions = ArrivedVersions()
    for number in range(5):
        version = apart * number
        versions.note(Entry(f"{60_000 * number}-0", "b", "b", 1, 1, 1, version, version, 1))
    assert versions.seconds_per_version == 60.0


def test_a_pause_of_the_run_says_nothing_of_the_time_between_versions_and_bursts_do() -> None:
    """After a night's pause sixteen versions seemed to take an hour and a half each: any training seemed to pay."""

    def seconds_after(times: Sequence[float]) -> float | None:
        versions = ArrivedVersions()
        for number, seconds in enumerate(times):
            versions.note(Entry(f"{int(1000 * seconds)}-0", "b", "b", 1, 1, 1, number, number, 1))
        return versions.seconds_per_version

    before, night = [60.0 * number for number in range(20)], 24 * 3600.0
    for back in range(1, 20):
        assert seconds_after([*before, *(before[-1] + night + 60.0 * number for number in range(back))]) == 60.0
    bursts = [burst + one for burst in range(0, 4000, 400) for one in range(4)]
    assert seconds_after(bursts) == (bursts[-1] - bursts[-16]) / 15
    # The service was away for so many versions, which a sender had kept and sent at once.
    for away in range(1, 14):
        kept = [20 * 60.0 + away * 60.0 + number for number in range(away)]
        assert seconds_after([*before, *kept]) == (kept[-1] - before[-16 + away]) / 15


def test_a_clock_of_redis_that_was_set_back_does_not_make_versions_follow_at_once() -> None:
    """All ids have one millisecond until it has caught up: a training would seem not to pay before the next version."""
    versions = ArrivedVersions()

    def arrive(seconds: float, version: int) -> None:
        versions.note(Entry(f"{int(1000 * seconds)}-{version}", "b", "b", 1, 1, 1, version, version, 1))

    for number in range(4):
        arrive(60.0 * number, number)
    for number in range(4, 400):
        arrive(180.0, number)
        assert versions.seconds_per_version == 60.0
    assert versions.newest == 399
    arrive(240.0, 400)
    assert versions.seconds_per_version == 60.0


def received(bench: Bench, path: Path, name: str, policy_version: int = 0) -> Loaded:
    path.write_bytes(bench.world.rollout_file(name, policy_version=policy_version))
    entry = Entry(f"{1 + policy_version}-0", name, path.name, 1, 1, 1, policy_version, policy_version, 1)
    return Loaded(entry, path, load_batch(path))


def learner(bench: Bench, inbox: Inbox) -> Learner:
    bench.begin()
    target = Target.open(bench.layout, "default")
    made = Learner(bench.settings, bench.layout, bench.store, "default", target, inbox, lambda: None)
    made.lineage.begin()
    return made


def test_a_learner_finishes_every_batch(bench: Bench, inbox: Inbox, tmp_path: Path) -> None:
    subject = learner(bench, inbox)
    assert subject.lineage.trainer is not None
    batches = [received(bench, tmp_path / f"v{v}.safetensors", f"v{v}", v) for v in (1, 2)]
    outcome = subject.learn(batches)
    assert outcome is not None
    assert inbox.held == ("2-0", "3-0")
    assert inbox.done == 2
    assert outcome.scores.record.policy_version == 2
    assert outcome.trained_with_recent
    assert subject.lineage.trainer.windows > 0


def test_in_isolation_nothing_is_mixed_in_and_nothing_is_judged(
    bench: Bench, inbox: Inbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    subject = learner(bench, inbox)
    subject.learn([received(bench, tmp_path / "a.safetensors", "a")])
    trained: set[str] = set()
    step = DrafterTrainer.step

    def watched(self: DrafterTrainer, window: Any) -> Any:
        trained.update(i.partition("/")[0] for prepared, _ in window for i in prepared.batch.rollout_ids)
        return step(self, window)

    monkeypatch.setattr(DrafterTrainer, "step", watched)
    outcomes, mixed = [], []
    for name in "bc":
        trained.clear()
        batch = received(bench, tmp_path / f"{name}.safetensors", name)
        outcomes.append(subject.learn([batch], isolated=name == "b"))
        mixed.append(sorted(trained))
    assert mixed[0] == ["b"]
    assert {"b", "c"} <= set(mixed[1])
    assert [o is not None and o.trained_with_recent for o in outcomes] == [False, True]
    assert outcomes[0] is not None
    assert outcomes[0].verdict is None
    assert subject.recent.names() == [f"{name}.safetensors" for name in "abc"]


def test_a_claim_of_as_many_batches_as_a_queue_holds_is_booked_in_linear_time(bench: Bench, tmp_path: Path) -> None:
    """A trainer may send each rollout in a file of its own. Squared, it took 16 and 38 s."""
    (tmp_path / "a").write_bytes(bench.world.rollout_file("a", rollouts=1))
    batch, count = load_batch(tmp_path / "a"), 10_000
    entries = [Entry(f"{i + 1}-0", f"batch{i}", f"file{i}", 1, 1, 1, 0, 0, 1) for i in range(count)]
    queue = mock.Mock(spec=RolloutQueue, run="default")
    queue.claim.return_value = entries
    inbox = Inbox(bench.settings, bench.layout, queue, VOCAB)
    recent = RecentRollouts(tmp_path / "recent", capacity_tokens=1 << 30, run="default")
    began = time.process_time()
    for entry in inbox.claim():
        recent.add(tmp_path / entry.blob, batch)
        inbox.finish(Loaded(entry, tmp_path / entry.blob, batch))
    inbox.commit(lambda applied: None if len(applied) == count else pytest.fail("some are missing"))
    assert time.process_time() - began < 8.0
    assert (len(recent.names()), inbox.held) == (count, ())


def test_no_class_of_the_worker_has_more_than_twelve_attributes(bench: Bench) -> None:
    """Settings objects are data, and count as one."""
    bench.begin()
    worker = bench.worker()
    for subject in (worker, worker.inbox, worker.learner):
        names = [name for name in vars(subject) if not name.startswith("__")]
        assert not dataclasses.is_dataclass(subject)
        assert len(names) <= 12, (type(subject), names)
