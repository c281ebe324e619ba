"""Which failures are laid to a batch: it is dead of them, and nothing else is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from helpers.service.storage_fixtures import RolloutQueue
from helpers.worker.failure_fixtures import FIRST, a_minute_later, broken, error_of, holds, turns
from helpers.worker.worker_fixtures import Bench

import service.worker.claim
import service.worker.inbox
import service.worker.process.worker
import service.worker.scoring
from drafter.batch import RolloutBatch, load_batch
from drafter.errors import BatchRejected, DrafterError
from drafter.policy import Policy
from drafter.replay.replay import replay
from drafter.training.trainer import DrafterTrainer, Prepared, StepReport
from service.errors import WorkerError
from service.storage.queue.deliveries import MAX_DELIVERIES
from service.storage.queue.deliveries import RolloutQueue as WorkersQueue
from service.storage.queue.keys import GROUP, Keys
from service.worker.checkpoint import CheckpointSuperseded
from service.worker.learner import Learner
from service.worker.loop import LeaseLost
from service.worker.process.worker import Worker
from service.worker.promotion.judge import Judge
from service.worker.scoring import score as learners_score


def test_a_batch_that_cannot_be_scored_is_dead_of_it_and_the_others_are_trained(
    bench: Bench, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    posted = [bench.post(name) for name in "abc"]

    def score(drafters: Any, found: Any) -> Any:
        if found.batch.rollout_ids[0].startswith("b/"):
            raise IndexError("index 50 is out of bounds")
        return learners_score(drafters, found)

    monkeypatch.setattr(service.worker.claim, "score", score)
    turns(worker, bench, posted)
    assert [bench.state(b) for b in posted] == ["trained", "dead", "trained"]
    assert bench.reason(posted[1]) == "cannot be scored: IndexError: index 50 is out of bounds"
    assert error_of(bench, "default") is None


@pytest.mark.parametrize("where", ["load_batch", "screen"])
def test_a_batch_that_cannot_be_loaded_is_dead_of_it(
    bench: Bench, worker: Worker, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    posted = [bench.post(name) for name in "ab"]
    real = getattr(service.worker.inbox, where)

    def failing(what: Any, **named: Any) -> Any:
        name = what.name if where == "load_batch" else what.rollout_ids[0]
        if name.startswith(posted[0]) or name.startswith("a/"):
            raise ValueError("what is this")
        return real(what, **named)

    monkeypatch.setattr(service.worker.inbox, where, failing)
    turns(worker, bench, posted)
    assert [bench.state(b) for b in posted] == ["dead", "trained"]
    assert bench.reason(posted[0]) == "cannot be loaded: ValueError: what is this"


@pytest.mark.parametrize("claim_tokens", [1, 10_000])
def test_a_batch_that_fails_every_training_is_dead_after_three_tries_and_holds_nobody_up(
    bench: Bench, worker: Worker, monkeypatch: pytest.MonkeyPatch, claim_tokens: int
) -> None:
    """Nothing ever kills the process: the deliveries count what was raised as well."""
    worker._settings = bench.settings.model_copy(update={"claim_tokens": claim_tokens})
    posted = [bench.post(name) for name in "abc"]
    other = bench.post_file(bench.world.rollout_file("x", run=FIRST))
    tried: list[int] = []

    def trains(self: Learner, newest: Any, *_: Any) -> bool:
        if any(kept.batch.rollout_ids[0].startswith("b/") for kept in newest):
            tried.append(len(newest))
            return True
        return False

    monkeypatch.setattr(Learner, "train", broken(RuntimeError("mat1 and mat2"), trains, Learner.train))
    worker._turn()
    assert RolloutQueue(bench.redis, FIRST).batch(other)["state"] == "trained"  # type: ignore[index]
    said = set()
    while "queued" in [bench.state(b) for b in posted]:
        worker._turn()
        said.add(error_of(bench, "default"))
    assert "RuntimeError: mat1 and mat2" in said, "until the run has worked again"
    assert [bench.state(b) for b in posted] == ["trained", "dead", "trained"]
    assert bench.reason(posted[1]) == "failed its worker 3 times, at last alone: RuntimeError: mat1 and mat2"
    assert len(tried) == MAX_DELIVERIES
    assert tried[-1] == 1
    assert bench.totals()["batches"] == 2
    worker._turn()
    assert error_of(bench, "default") is None


def test_a_gate_that_raises_ends_at_its_run(bench: Bench, worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    other = bench.post_file(bench.world.rollout_file("x", run=FIRST))
    batch = bench.post("a")
    bad = broken(ZeroDivisionError("division by zero"), lambda self, *_: self.run == FIRST, Judge.judge)
    with monkeypatch.context() as patch:
        patch.setattr(Judge, "judge", bad)
        turns(worker, bench, [batch])
        assert bench.state(batch) == "trained"
        assert "division by zero" in error_of(bench)
    for _ in range(4):
        worker._turn()
    assert RolloutQueue(bench.redis, FIRST).batch(other)["state"] == "trained"  # type: ignore[index]
    assert error_of(bench) is None


@pytest.mark.parametrize(
    "error",
    [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("DefaultCPUAllocator: can't allocate memory")],
    ids=["cuda", "cpu"],
)
def test_memory_that_runs_out_is_not_laid_to_the_batch_at_once(
    bench: Bench, worker: Worker, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    batch = bench.post("a")
    calls = 0

    def score(*args: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls < MAX_DELIVERIES:
            raise error
        return learners_score(*args, **named)

    monkeypatch.setattr(service.worker.claim, "score", score)
    for _ in range(MAX_DELIVERIES + 1):  # in one of them the idle run is closed
        a_minute_later(worker)  # a minute later
        worker._turn()
    assert bench.state(batch) == "trained"


@pytest.mark.parametrize(
    "error",
    [torch.OutOfMemoryError("CUDA out of memory"), MemoryError("on rank 1: OutOfMemoryError: CUDA out of memory")],
    ids=["here", "on another rank"],
)
def test_a_run_whose_gpu_memory_ran_out_says_what_to_do(
    bench: Bench, worker: Worker, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    bench.post_file(bench.world.rollout_file("x", run=FIRST))
    monkeypatch.setattr(Learner, "train", broken(error, lambda *_: True, Learner.train))
    for _ in range(3):  # in between the idle run is closed
        worker._turn()
    told = error_of(bench)
    assert told is not None
    assert told.startswith("the GPU's memory ran out: lower")
    assert "lower DRAFTALIGN_TRAIN_STEP_TOKENS, raise DRAFTALIGN_GPU_MEMORY_SHARE" in told
    assert str(error) in told


@pytest.mark.parametrize("where", [(Learner, "train"), (Judge, "judge")], ids=["train", "judge"])
@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory"),
        DrafterError("the archive is broken"),
        WorkerError("the run cannot go on"),
    ],
    ids=["cuda", "cpu", "drafter", "service"],
)
def test_what_is_no_batchs_fault_kills_none_however_long_it_lasts(
    bench: Bench, worker: Worker, monkeypatch: pytest.MonkeyPatch, error: Exception, where: tuple[type, str]
) -> None:
    posted = [bench.post(name) for name in "abc"]
    raised: list[int] = []

    def always(*_: Any) -> bool:
        raised.append(1)
        return True

    with monkeypatch.context() as patch:
        patch.setattr(*where, broken(error, always, getattr(*where)))
        for _ in range(4 * MAX_DELIVERIES):
            a_minute_later(worker)  # a minute later
            worker._turn()
    assert len(raised) > MAX_DELIVERIES
    assert [bench.state(b) for b in posted] == ["queued"] * 3
    a_minute_later(worker)
    turns(worker, bench, posted)
    assert [bench.state(b) for b in posted] == ["trained"] * 3


def test_rollouts_that_must_not_be_trained_on_are_the_batchs_fault_in_training_too(
    bench: Bench, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = bench.post("a")
    bad = broken(BatchRejected("not to be trained on"), lambda *_: True, Learner.train)
    monkeypatch.setattr(Learner, "train", bad)
    for _ in range(2 * MAX_DELIVERIES):
        a_minute_later(worker)
        worker._turn()
    assert bench.reason(batch) == "failed its worker 3 times, at last alone: BatchRejected: not to be trained on"


@pytest.mark.parametrize("where", [(Learner, "train"), (Judge, "judge")], ids=["train", "judge"])
def test_a_kept_batch_with_which_nothing_can_be_trained_kills_no_later_one_and_is_dropped(
    bench: Bench,
    worker: Worker,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    where: tuple[type, str],
) -> None:
    first = bench.post("a")
    turns(worker, bench, [first])

    def mixed(self: Learner | Judge, _newest: Any, *more: Any) -> bool:
        if isinstance(self, Judge):
            return holds(self._recent, first)
        return any(kept.name.startswith(first) for kept in more[0])

    monkeypatch.setattr(*where, broken(RuntimeError("bad mix"), mixed, getattr(*where)))
    kept_first = [p for p in (bench.layout.worker("default") / "recent").iterdir() if p.name.startswith(first)]
    posted = [bench.post(name) for name in "bcd"]
    turns(worker, bench, posted)
    assert [bench.state(b) for b in posted] == ["trained"] * 3
    for _ in range(2):
        worker._turn()
    assert not any(path.exists() for path in kept_first)
    assert "recent rollouts are dropped" in caplog.text
    caplog.clear()
    later = [bench.post(name) for name in "ef"]
    turns(worker, bench, later)
    assert [bench.state(b) for b in later] == ["trained"] * 2
    assert "bad mix" not in caplog.text, "nothing fails any more"
    assert error_of(bench, "default") is None
    assert bench.totals()["batches"] == 6


def test_the_recent_rollouts_stay_where_a_batch_was_found_guilty(
    bench: Bench, worker: Worker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its neighbours were worked on alone as well, before it and after it."""
    first = bench.post("a")
    turns(worker, bench, [first])
    posted = [bench.post(name) for name in "bcd"]

    def trains(self: Learner, newest: Any, *_: Any) -> bool:
        return any(kept.name.startswith(posted[1]) for kept in newest)

    monkeypatch.setattr(Learner, "train", broken(RuntimeError("mat1 and mat2"), trains, Learner.train))
    turns(worker, bench, posted)
    for _ in range(3):
        worker._turn()
    assert [bench.state(b) for b in posted] == ["trained", "dead", "trained"]
    assert "recent rollouts are dropped" not in caplog.text
    assert holds(worker.served["default"].learner.recent, first)


def test_what_is_in_hand_when_the_lease_is_lost_is_not_touched(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the other worker's: to release it would take back a delivery that is counted against what it does there."""
    bench.begin()
    bench.post("a")
    released: list[Any] = []
    monkeypatch.setattr(Learner, "train", broken(LeaseLost("its lease is gone"), lambda *_: True, Learner.train))
    worker = bench.worker()
    monkeypatch.setattr(WorkersQueue, "release", lambda *args: released.append(args[2]))
    with pytest.raises(LeaseLost):
        worker.cycle()
    assert not any(released)


@pytest.mark.parametrize(
    ("error", "deliveries"),
    [
        (MemoryError("no copy"), 0),
        (LeaseLost("its lease is gone"), 1),
        (CheckpointSuperseded("its state is newer"), 1),
        (ValueError("it may be what was learnt"), 1),
    ],
)
def test_a_last_checkpoint_that_fails_counts_where_the_batch_may_be_to_blame_and_takes_back_nothing_that_is_anothers(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, error: Exception, deliveries: int
) -> None:
    bench.begin()
    bench.post("a")
    worker = bench.worker(checkpoint_seconds=1e9)
    worker.cycle()
    assert worker.inbox.done == 1
    monkeypatch.setattr(Learner, "save", broken(error, lambda *_: True, Learner.save))
    with pytest.raises(type(error)):
        worker.close()
    pending = bench.redis.xpending_range(Keys("default").queue, GROUP, "-", "+", 9)
    assert [entry["times_delivered"] for entry in pending] == [deliveries]


def test_a_rollout_for_which_a_training_has_no_memory_does_not_stop_the_run(
    bench: Bench, worker: Worker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A window holds whole rollouts, so no setting makes it smaller. Shorter ones go on being trained on."""
    most, tried = 200, list[int]()
    step = DrafterTrainer.step

    def within_memory(self: DrafterTrainer, window: Sequence[tuple[Prepared, Policy]]) -> StepReport:
        longest = max(int(one.batch.cu_seqlens.diff().max()) for one, _ in window)
        tried.append(longest)
        if longest > most:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return step(self, window)

    monkeypatch.setattr(DrafterTrainer, "step", within_memory)
    short = bench.post("short", rollouts=4)
    turns(worker, bench, [short])
    long = bench.post("long", lengths=[900, 12])
    both = [bench.post(name, rollouts=4) for name in "ab"]
    for _ in range(5):
        a_minute_later(worker)
        worker._turn()
    turns(worker, bench, [long, *both])
    assert [bench.state(batch) for batch in (long, *both)] == ["trained"] * 3
    assert bench.store.scores()[long].tokens, "it was scored"
    assert [n for n in tried if n > most] == [900], "one failure is enough: all others have less than a step's tokens"
    assert caplog.text.count("in the next 64, those of more than 899 are scored and not trained on") == 1
    assert error_of(bench, "default") is None


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA"), RuntimeError("can't allocate memory")])
def test_a_batch_for_whose_replay_at_once_there_is_no_memory_is_scored_in_parts(
    bench: Bench, worker: Worker, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    most, tried, whole = 70, list[int](), replay

    def within_memory(drafter: Any, batch: RolloutBatch, *args: Any, **named: Any) -> Any:
        tried.append(batch.tokens)
        if batch.tokens > most:
            raise error
        return whole(drafter, batch, *args, **named)

    monkeypatch.setattr(service.worker.scoring, "replay", within_memory)
    body = bench.world.rollout_file("a", lengths=[40, 11, 12, 13, 50, 14, 15, 60])
    batch = bench.post_file(body)
    turns(worker, bench, [batch])
    assert max(tried) == 215, "at first all at once"
    (record,) = bench.store.scores().values()
    (path,) = (bench.layout.worker("default") / "recent").iterdir()
    drafter = worker.served["default"].learner.lineage.version(record.drafter_version or "")
    alone = whole(drafter, load_batch(path), bench.world.policy(), depth=bench.settings.depth)
    assert record.served is not None
    assert record.served.alpha == pytest.approx(alone.alpha, rel=1e-6)


def test_memory_that_runs_out_with_short_rollouts_is_not_laid_to_them(
    bench: Bench, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = broken(torch.OutOfMemoryError("CUDA out of memory"), lambda *_: True, DrafterTrainer.step)
    batch = bench.post("a", rollouts=4)
    with monkeypatch.context() as patch:
        patch.setattr(DrafterTrainer, "step", bad)
        for _ in range(6):
            a_minute_later(worker)
            worker._turn()
    assert bench.state(batch) == "queued"
    assert worker._runs["default"].suspicion.limit.tokens is None
    a_minute_later(worker)
    turns(worker, bench, [batch])
    assert bench.state(batch) == "trained"
