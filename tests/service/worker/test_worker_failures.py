"""Exceptions that nobody foresaw end at their run or their batch: the process and the other runs go on."""

from __future__ import annotations

import gc
import resource
import signal
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from redis import Redis
from redis.exceptions import ConnectionError as RedisConnectionError
from service_fixtures import HEADERS, RunningService
from storage_fixtures import RolloutQueue, Store
from worker_fixtures import Bench, alive, nest, wait_until_gone

import service.worker.claim
import service.worker.inbox
import service.worker.process.worker
from drafter.errors import BatchRejected, CheckpointError, DrafterError
from drafter.files.checkpoint import export_config
from drafter.training.trainer import DrafterTrainer
from service.errors import WorkerError
from service.storage.layout import file_id
from service.storage.lease import Leases
from service.storage.queue.deliveries import MAX_DELIVERIES
from service.storage.queue.deliveries import RolloutQueue as WorkersQueue
from service.storage.queue.keys import GROUP, Keys
from service.storage.reports.store import Store as WorkersStore
from service.storage.runs import change_state, untouched
from service.worker.checkpoint import CheckpointSuperseded, WorkerCheckpoint
from service.worker.learner import Learner
from service.worker.lineage import Lineage
from service.worker.loop import LeaseLost, RunWorker
from service.worker.process.worker import Worker
from service.worker.recent import RecentRollouts
from service.worker.scoring import score as learners_score

FIRST = "before-default"  # runs are served in this order


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs are looked for in every turn, and tried again at once."""
    monkeypatch.setattr(service.worker.process.worker, "_LOOK_FOR_RUNS_SECONDS", 0.0)
    monkeypatch.setattr(service.worker.process.worker, "_FAILED_SECONDS", 0.0)


@pytest.fixture
def worker(bench: Bench) -> Worker:
    """A worker of its own connection; `bench` has the run `default` with a drafter, and another before it."""
    bench.begin()
    bench.register(bench.world.run_file(drafter=bench.world.drafter()), run=FIRST)
    return Worker(bench.settings, Redis.from_url(bench.redis_url))


def broken(error: BaseException, when: Any, real: Any) -> Any:
    """`real`, which raises `error` where `when(self, ...)` holds."""

    def maybe(self: Any, *args: Any, **named: Any) -> Any:
        if when(self, *args):
            raise error
        return real(self, *args, **named)

    return maybe


def error_of(bench: Bench, run: str = FIRST) -> Any:
    return Store(bench.redis, run).worker().error or None


def a_minute_later(worker: Worker) -> None:
    """What was refused is tried again."""
    for state in worker._runs.values():
        state.retry_at = 0.0


def holds(recent: RecentRollouts, batch: str) -> bool:
    return any(name.startswith(batch) for name in recent.names())


def turns(worker: Worker, bench: Bench, ended: list[str], most: int = 40) -> int:
    """Turns until all these batches of `default` have ended."""
    for number in range(most):
        if all(bench.state(batch) not in ("queued", "unknown") for batch in ended):
            return number
        worker._turn()
    raise AssertionError([bench.state(batch) for batch in ended])


def test_a_run_that_cannot_be_opened_for_whatever_reason_says_so_and_keeps_no_other_waiting(
    bench: Bench, worker: Worker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    batch = bench.post("a")
    with monkeypatch.context() as patch:
        bad = broken(AttributeError("no attribute 'get'"), lambda self: self._run == FIRST, Lineage.begin)
        patch.setattr(Lineage, "begin", bad)
        turns(worker, bench, [batch])
        assert bench.state(batch) == "trained"
        assert "no attribute 'get'" in error_of(bench)
        assert error_of(bench, "default") is None
        assert "in begin" in caplog.text or "maybe" in caplog.text, "the traceback"
    for _ in range(3):
        worker._turn()
    assert error_of(bench) is None, "it was opened again, and nothing is said of it any more"


@pytest.mark.parametrize("fault", ["a drafter with NaN", "a config of before the check"])
def test_a_refused_run_that_is_registered_anew_is_tried_at_once(
    bench: Bench, worker: Worker, redis_url: str, fault: str
) -> None:
    """By PUT, as a trainer does; not a minute later, and the rollouts that were taken for it are trained."""
    bad = bench.world.drafter()
    if fault == "a drafter with NaN":
        bad.fc.weight.data[0, 0] = float("nan")
        bench.register(bench.world.run_file(drafter=bad), run="zz")
    else:
        config = export_config(bad.config) | {"norm_output": True}
        bench.register(bench.world.run_file(drafter=bad, drafter_config=config), run="zz", checked=False)
    batch = bench.post_file(bench.world.rollout_file("z", run="zz"))
    queue = RolloutQueue(bench.redis, "zz")
    worker._turn()
    assert error_of(bench, "zz")
    assert queue.batch(batch)["state"] == "queued"  # type: ignore[index]
    service = RunningService(state_dir=bench.layout.root, redis_url=redis_url)
    try:
        good = bench.world.run_file(drafter=bench.world.drafter())
        reply = service.client.put("/runs/zz", content=good, headers=HEADERS)
        assert (reply.status_code, reply.json()["worker_error"]) == (201, None)
        assert bench.layout.target("zz").read_bytes() == good
        for _ in range(3):
            worker._turn()
        assert queue.batch(batch)["state"] == "trained"  # type: ignore[index]
        described = service.client.get("/runs/zz").json()
        assert described["worker_error"] is None
        assert described["drafter"] is not None
        assert service.client.put("/runs/zz", content=good, headers=HEADERS).status_code == 200
    finally:
        service.stop()


def test_only_a_file_that_the_worker_cannot_begin_with_is_refused_and_only_until_it_can(
    bench: Bench, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused() -> Any:
        return Store(bench.redis, FIRST).worker().refused

    file = file_id(bench.layout.target(FIRST))
    assert file is not None
    damaged = CheckpointError("it cannot be read")
    damaged.__cause__ = OSError(5, "Input/output error")
    too_large = DrafterError("it cannot be built")
    too_large.__cause__ = MemoryError("no memory left")
    passing = [torch.OutOfMemoryError("no memory left"), OSError(28, "No space left"), KeyError("what"), damaged]
    passing += [too_large]
    for error, told in [*((error, None) for error in passing), (DrafterError("holds NaN"), file)]:
        with monkeypatch.context() as patch:
            patch.setattr(Lineage, "begin", broken(error, lambda self: self._run == FIRST, Lineage.begin))
            a_minute_later(worker)
            worker._turn()
            assert error_of(bench)
            assert refused() == told
    a_minute_later(worker)
    worker._turn()
    assert (error_of(bench), refused()) == (None, None)
    batch = bench.post_file(bench.world.rollout_file("x", run=FIRST))
    monkeypatch.setattr(Learner, "train", broken(DrafterError("in training"), lambda *_: True, Learner.train))
    worker._turn()
    assert error_of(bench) == "in training"
    assert refused() is None
    assert RolloutQueue(bench.redis, FIRST).batch(batch)["state"] == "queued"  # type: ignore[index]


def test_a_run_that_is_registered_anew_while_it_trains_gets_no_checkpoint_of_the_old_target(
    bench: Bench, worker: Worker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bench.register(run="zz")  # from scratch: nothing is published
    batch = bench.post_file(bench.world.rollout_file("z", run="zz"))
    again = bench.layout.root / "again"
    again.write_bytes(bench.layout.target("zz").read_bytes())
    real = Learner.train

    def replaced(self: Learner, *args: Any) -> tuple[float, float]:
        if again.exists():
            again.replace(bench.layout.target("zz"))
        return real(self, *args)

    monkeypatch.setattr(Learner, "train", replaced)
    queue = RolloutQueue(bench.redis, "zz")
    worker._turn()
    assert not again.exists(), "it did train"
    assert untouched(bench.layout, "zz")
    assert queue.batch(batch)["state"] == "queued"  # type: ignore[index]
    assert "run zz was registered again" in caplog.text
    for _ in range(2):
        worker._turn()
    assert queue.batch(batch)["state"] == "trained"  # type: ignore[index]


def test_a_run_that_was_opened_and_is_registered_anew_is_opened_again(bench: Bench, worker: Worker) -> None:
    bench.register(run="zz")
    worker._turn()
    before = worker.served["zz"]
    again = bench.layout.root / "again"
    again.write_bytes(bench.layout.target("zz").read_bytes())
    again.replace(bench.layout.target("zz"))
    worker._turn()
    assert worker.served["zz"] is not before


def test_a_run_that_is_dropped_after_its_refused_file_was_replaced_is_opened_again_at_once(
    bench: Bench, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The minute of waiting is for the file that was refused, not for the one that took its place."""
    bench.register(run="zz")
    with monkeypatch.context() as patch:
        patch.setattr(Lineage, "begin", broken(DrafterError("NaN"), lambda self: self._run == "zz", Lineage.begin))
        worker._turn()
        assert "zz" not in worker.served
    again = bench.layout.root / "again"
    again.write_bytes(bench.layout.target("zz").read_bytes())
    again.replace(bench.layout.target("zz"))
    worker._turn()
    worker._drop("zz", "the lease is gone")
    worker._turn()
    assert "zz" in worker.served


class ClosedBetween:
    """The state of a run that another thread closes right after it was looked at."""

    def __init__(self, worker: object) -> None:
        self.looks = [worker]

    @property
    def worker(self) -> object:
        return self.looks.pop() if self.looks else None


def test_a_heartbeat_never_meets_a_run_that_is_closed_while_it_looks(worker: Worker) -> None:
    """Or it would take the lease again that an orderly stop has just given back."""
    worker._turn()
    worker._runs[FIRST] = ClosedBetween(worker.served[FIRST])  # type: ignore[assignment]
    assert None not in worker.served.values()


def test_a_worker_keeps_no_file_of_a_run_open(bench: Bench, worker: Worker) -> None:
    """Or some thousand registered runs would be all that a process may open."""
    bench.register(run="zz")
    worker._turn()
    assert worker.served.keys() == {FIRST, "default", "zz"}
    worker.served[FIRST].learner.target.lm_head()
    gc.collect()
    assert "target.safetensors" not in Path("/proc/self/maps").read_text(), "a map holds its file open"


def test_300_runs_and_few_descriptors_leave_an_honest_run_trained(bench: Bench, worker: Worker) -> None:
    """Each has a rollout file waiting, so each is opened and worked on; the process may open some 40 files more."""
    body = bench.world.run_file()
    for number in range(300):
        bench.register(body, run=f"many-{number:03d}")
        bench.post_file(bench.world.rollout_file("x", run=f"many-{number:03d}", rollouts=1))
    batch = bench.post("a")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(list(Path("/proc/self/fd").iterdir())) + 40, hard))
    try:
        turns(worker, bench, [batch], 700)
        assert len(worker.served) == 302, "all are open now"
        later = bench.post("b")
        turns(worker, bench, [later], 700)
        assert bench.state(batch) == bench.state(later) == "trained"
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert not [run for run in worker.served if error_of(bench, run)]


def test_a_run_that_fails_again_and_again_is_tried_ever_less_often(
    bench: Bench, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service.worker.process.worker, "_FAILED_SECONDS", 1.0)
    for count, pause in enumerate((1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0), 1):
        before = time.monotonic()
        worker._fail(FIRST, ValueError("again"))
        assert worker._runs[FIRST].failures == count
        assert before + pause <= worker._runs[FIRST].retry_at <= time.monotonic() + pause
    worker._runs[FIRST].failures = 10_000  # a week of it
    worker._fail(FIRST, ValueError("again"))


def test_a_batch_that_cannot_be_scored_is_dead_of_it_and_the_others_are_trained(
    bench: Bench, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    posted = [bench.post(name) for name in "abc"]

    def score(batch: Any, *args: Any, **named: Any) -> Any:
        if batch.rollout_ids[0].startswith("b/"):
            raise IndexError("index 50 is out of bounds")
        return learners_score(batch, *args, **named)

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
    bad = broken(ZeroDivisionError("division by zero"), lambda self, *_: self.run == FIRST, Learner.judge)
    with monkeypatch.context() as patch:
        patch.setattr(Learner, "judge", bad)
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


@pytest.mark.parametrize("where", ["train", "judge"])
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
    bench: Bench, worker: Worker, monkeypatch: pytest.MonkeyPatch, error: Exception, where: str
) -> None:
    posted = [bench.post(name) for name in "abc"]
    raised: list[int] = []

    def always(*_: Any) -> bool:
        raised.append(1)
        return True

    with monkeypatch.context() as patch:
        patch.setattr(Learner, where, broken(error, always, getattr(Learner, where)))
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


@pytest.mark.parametrize("where", ["train", "judge"])
def test_a_kept_batch_with_which_nothing_can_be_trained_kills_no_later_one_and_is_dropped(
    bench: Bench, worker: Worker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, where: str
) -> None:
    first = bench.post("a")
    turns(worker, bench, [first])

    def mixed(self: Learner, _newest: Any, *more: Any) -> bool:
        return any(kept.name.startswith(first) for kept in more[0]) if where == "train" else holds(self.recent, first)

    monkeypatch.setattr(Learner, where, broken(RuntimeError("bad mix"), mixed, getattr(Learner, where)))
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


def test_a_device_that_failed_ends_the_process_because_no_run_can_use_it_any_more(
    bench: Bench, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = bench.post("a")
    error = torch.AcceleratorError("CUDA error: device-side assert triggered")
    monkeypatch.setattr(DrafterTrainer, "step", broken(error, lambda *_: True, DrafterTrainer.step))
    with pytest.raises(torch.AcceleratorError):
        worker._turn()
    assert bench.state(batch) == "queued"


def test_heartbeats_survive_whatever_is_raised_and_one_runs_trouble_is_not_the_others(
    bench: Bench, worker: Worker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(service.worker.process.heartbeat, "_BEAT_SECONDS", 0.01)
    worker._turn()
    beats: list[str] = []
    beat = WorkersQueue.heartbeat

    def failing(self: WorkersQueue, *args: Any) -> Any:
        beats.append(self.run)
        if self.run == FIRST:
            raise TypeError("unhashable")
        return beat(self, *args)

    monkeypatch.setattr(WorkersQueue, "heartbeat", failing)
    with worker._heartbeat.beating() as thread:
        bench.wait(lambda: beats.count("default") >= 3)
        assert [r.getMessage() for r in caplog.records if r.exc_info] == [
            f"no heartbeat for run {FIRST} (said once for each kind of error)"
        ]
    thread.join(20)
    assert not thread.is_alive()


def test_a_beat_that_fails_before_it_comes_to_any_run_does_not_end_the_heartbeat(
    worker: Worker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(service.worker.process.heartbeat, "_BEAT_SECONDS", 0.01)
    beats: list[int] = []
    twice = threading.Event()

    def failing() -> None:
        beats.append(1)
        if len(beats) == 3:
            twice.set()
        raise MemoryError("no room for a list of runs")

    monkeypatch.setattr(worker._heartbeat, "beat", failing)
    with worker._heartbeat.beating() as thread:
        assert twice.wait(20)
    thread.join(20)
    assert [r.getMessage() for r in caplog.records if r.exc_info] == [
        "a heartbeat failed (said once for each kind of error)"
    ]


def test_an_orderly_stop_closes_every_run_whatever_one_of_them_raises(
    bench: Bench, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.post("a")
    worker._settings = bench.settings.model_copy(update={"checkpoint_seconds": 1e9})
    worker._turn()
    bad = broken(TypeError("unhashable"), lambda self: self.run == FIRST, RunWorker.close)
    monkeypatch.setattr(RunWorker, "close", bad)
    worker._close()
    assert bench.state(bench.posted[0]) == "trained"
    assert bench.redis.get(Leases.key("default")) is None


@pytest.mark.parametrize("trouble", ["its part of the disk is full", "its directory is no directory any more"])
def test_a_disk_that_fails_one_run_pauses_that_run_alone(
    bench: Bench, worker: Worker, monkeypatch: pytest.MonkeyPatch, redis_url: str, trouble: str
) -> None:
    """The others lose no turn; it says so, waits longer each time, and goes on with what it had in hand."""
    worker._turn()
    ours, directory = bench.post_file(bench.world.rollout_file("x", run=FIRST)), bench.layout.worker(FIRST)
    queue, kept = RolloutQueue(bench.redis, FIRST), directory.with_name("kept")
    waits: list[float] = []
    with monkeypatch.context() as patch:
        if trouble == "its part of the disk is full":
            full = OSError(28, "No space left on device")
            patch.setattr(WorkerCheckpoint, "save", broken(full, lambda self, *_: FIRST in self._directory.parts,
                                                           WorkerCheckpoint.save))  # fmt: skip
        else:
            directory.rename(kept)
            directory.write_text("")
        for n in range(4):
            other = bench.post(f"b{n}")
            assert turns(worker, bench, [other]) <= 4, "it does not wait for the other's disk"
            while worker._runs[FIRST].failures == n:
                worker._turn()
            waits.append(worker._runs[FIRST].retry_at - time.monotonic())
            worker._turn()
            assert worker._runs[FIRST].failures == n + 1, "it is not asked before then"
            worker._runs[FIRST].retry_at = 0.0
        assert waits == pytest.approx([5.0, 10.0, 20.0, 40.0], abs=3.0)
        assert (error_of(bench) or "").startswith("[Errno"), error_of(bench)
        assert error_of(bench, "default") is None
        assert queue.batch(ours)["state"] == "queued"  # type: ignore[index]
        with_api = RunningService(state_dir=bench.layout.root, redis_url=redis_url)
        try:
            assert with_api.client.get(f"/runs/{FIRST}").json()["worker_error"] == error_of(bench)
            text = with_api.client.get("/metrics").text
        finally:
            with_api.stop()
        assert f'draftalign_worker_error{{run="{FIRST}"}} 1.0' in text
        assert 'draftalign_worker_error{run="default"} 0.0' in text
    if kept.exists():
        directory.unlink()
        kept.rename(directory)
    a_minute_later(worker)
    worker._turn()
    assert queue.batch(ours)["state"] == "trained"  # type: ignore[index]
    assert error_of(bench) is None
    assert worker._runs[FIRST].failures == 0
    assert worker._runs[FIRST].worker.learner.journal.totals.batches == 1, "scored once"  # type: ignore[union-attr]


def test_a_disk_that_is_full_for_everybody_loses_and_acknowledges_nothing(
    bench: Bench, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs, ours = bench.post("a"), bench.post_file(bench.world.rollout_file("x", run=FIRST))
    queue = RolloutQueue(bench.redis, FIRST)

    def ends() -> list[str]:
        return [bench.state(theirs), queue.batch(ours)["state"]]  # type: ignore[index]

    with monkeypatch.context() as patch:
        full = broken(OSError(28, "No space left on device"), lambda *_: True, WorkerCheckpoint.save)
        patch.setattr(WorkerCheckpoint, "save", full)
        for _ in range(2 * MAX_DELIVERIES):
            worker._turn()
            a_minute_later(worker)
        assert ends() == ["queued", "queued"]
        assert "No space" in error_of(bench)
        assert "No space" in error_of(bench, "default")
    worker._turn()
    worker._turn()
    assert ends() == ["trained", "trained"]
    assert {error_of(bench), error_of(bench, "default")} == {None}


def test_a_run_whose_directory_cannot_be_looked_into_keeps_no_other_waiting(
    bench: Bench, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker._turn()
    stat = Path.stat

    def refusing(self: Path, **options: Any) -> Any:
        if self == bench.layout.run_json(FIRST):
            raise PermissionError(13, "Permission denied", str(self))
        return stat(self, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "stat", refusing)
        worker._runs[FIRST].worker = None
        turns(worker, bench, [bench.post("a")])
        assert "Permission denied" in error_of(bench)
    a_minute_later(worker)
    worker._turn()
    worker._turn()
    assert error_of(bench) is None


@pytest.mark.timeout(240)
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


@pytest.mark.timeout(240)
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
    file = file_id(bench.layout.target(FIRST))
    assert file is not None
    store = WorkersStore(bench.redis, FIRST)

    def died(times: int, seconds_ago: float) -> None:
        store.set_worker({"opening": [*file, times, time.time() - seconds_ago]})
        worker._runs.clear()  # it is another process now
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
    file = file_id(bench.layout.target(FIRST))
    away = broken(RedisConnectionError("away"), lambda *_: True, None)
    with monkeypatch.context() as patched:
        patched.setattr(service.worker.process.worker, "RunWorker", away)
        for _ in range(5):
            with pytest.raises(RedisConnectionError):
                worker._turn()
    assert WorkersStore(bench.redis, FIRST).begun("opening", file)[0] <= 1
    worker._turn()
    assert FIRST in worker.served
