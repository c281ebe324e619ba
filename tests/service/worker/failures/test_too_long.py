"""Rollouts that are too long for the memory that there is: their batch ends, and the others go on meanwhile."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.worker.failure_fixtures import a_minute_later, error_of, turns
from helpers.worker.worker_fixtures import Bench
from redis import Redis

import service.worker.scoring
from drafter.batch import RolloutBatch, load_batch
from drafter.policy import TargetHead
from drafter.replay.replay import replay
from drafter.training.trainer import DrafterTrainer
from service.worker.process.worker import Worker

MOST = 200  # tokens of a rollout for which there is memory
TRIES = 10


def tries_of(bench: Bench, batch_id: str) -> Any:
    """How often memory ran out for a batch, as Redis has it."""
    return bench.redis.hget(f"da:{{default}}:batch:{batch_id}", "memory_tries")


def longest(batch: RolloutBatch) -> int:
    return int(batch.cu_seqlens.diff().max())


@pytest.fixture(name="tried", params=["loaded", "compared with its head", "scored on a CPU", "scored on a GPU"])
def _tried(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Memory runs out at rollouts of more than `MOST` tokens. The longest of each batch that was tried."""
    monkeypatch.setattr("service.worker.inbox.MEMORY_TRIES", TRIES)
    monkeypatch.setattr("service.worker.inbox.MEMORY_TRY_SECONDS", 0.0)
    tried: list[int] = []

    def within_memory(real: Callable[..., Any], error: Exception, place: int) -> Callable[..., Any]:
        def within(*args: Any, **named: Any) -> Any:
            batch = load_batch(args[place]) if isinstance(args[place], Path) else args[place]
            tried.append(longest(batch))
            if longest(batch) > MOST:
                raise error
            return real(*args, **named)

        return within

    on_host = OSError(errno.ENOMEM, "Cannot allocate memory")
    if request.param == "loaded":
        monkeypatch.setattr("service.worker.inbox.load_batch", within_memory(load_batch, on_host, 0))
    elif request.param == "compared with its head":
        gap = within_memory(TargetHead.logprob_gap, MemoryError(), 1)
        monkeypatch.setattr(TargetHead, "logprob_gap", gap)
    else:
        on_gpu = torch.OutOfMemoryError("CUDA out of memory")
        error = on_gpu if "GPU" in request.param else RuntimeError("DefaultCPUAllocator: can't allocate memory")
        monkeypatch.setattr(service.worker.scoring, "replay", within_memory(replay, error, 1))
    return tried


def test_a_batch_that_needs_more_memory_than_there_is_ends_after_some_tries_and_keeps_nobody_waiting(
    bench: Bench, worker: Worker, tried: list[int]
) -> None:
    changes = {"claim_idle_seconds": 0.001, "claim_tokens": 10_000}  # all that waits is claimed at once
    worker._settings = worker._settings.model_copy(update=changes)
    long = bench.post("long", lengths=[900, 12])
    short = [bench.post(name, rollouts=4) for name in "abc"]
    for _ in range(4):
        a_minute_later(worker)
        worker._turn()
    turns(worker, bench, short)
    assert bench.state(long) == "queued", "another process may have the memory for a while"
    assert "memory" in error_of(bench, "default")
    assert bench.store.worker().for_memory
    turns(worker, bench, [long])
    assert bench.state(long) == "dead"
    assert bench.reason(long).startswith(f"memory ran out {TRIES} times")
    assert TRIES <= sum(n > MOST for n in tried) <= 2 * TRIES + 4
    turns(worker, bench, [bench.post("later", rollouts=4)])
    assert error_of(bench, "default") is None
    assert tries_of(bench, long) is None


@pytest.mark.parametrize("tried", ["loaded"], indirect=True)
@pytest.mark.usefixtures("tried")
def test_a_run_that_is_opened_again_and_again_does_not_use_up_the_tries_of_its_batch(
    bench: Bench, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other runs that need memory close it when it is idle, and it is opened again at once, and tries its batch."""
    monkeypatch.setattr("service.worker.inbox.MEMORY_TRY_SECONDS", 3600.0)
    long = bench.post("long", lengths=[900, 12])
    for _ in range(2 * TRIES):
        a_minute_later(worker)
        worker._look_at = 0.0
        worker._turn()
        worker._room.close_idle()
    assert bench.state(long) == "queued"
    assert tries_of(bench, long) == b"1"


@pytest.mark.parametrize("tried", ["loaded"], indirect=True)
@pytest.mark.usefixtures("tried")
def test_a_worker_that_is_restarted_every_few_minutes_does_not_forget_the_tries_of_a_batch(
    bench: Bench, worker: Worker
) -> None:
    long = bench.post("long", lengths=[900, 12])
    for tries in range(1, TRIES + 1):
        worker._settings = worker._settings.model_copy(update={"claim_idle_seconds": 0.001})
        for _ in range(20):
            a_minute_later(worker)
            worker._look_at = 0.0
            worker._turn()
            if bench.state(long) == "dead" or int(tries_of(bench, long) or 0) >= tries:
                break
        assert bench.state(long) == ("dead" if tries == TRIES else "queued")
        worker._close()
        worker = Worker(bench.settings, Redis.from_url(bench.redis_url))
    assert bench.reason(long).startswith(f"memory ran out {TRIES} times")
    assert tries_of(bench, long) is None, "one that is put back begins again"


def test_where_all_newer_rollouts_are_too_long_to_be_trained_on_they_are_tried_again_as_well(
    bench: Bench, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answers grow longer as a policy learns, and memory may have been short for a while only."""
    monkeypatch.setattr("service.worker.recent._LIMITED_TRAININGS", 3)
    turns(worker, bench, [bench.post("short", rollouts=4)])
    full = pytest.MonkeyPatch()
    full.setattr(DrafterTrainer, "step", lambda *_: (_ for _ in ()).throw(torch.OutOfMemoryError("CUDA")))
    bench.post("long", lengths=[900, 12])
    worker._turn()
    full.undo()
    limit = worker._runs["default"].suspicion.limit
    assert limit.tokens == 899
    a_minute_later(worker)
    turns(worker, bench, [bench.post(f"long{n}", lengths=[900, 901]) for n in range(6)])
    assert limit.tokens is None
    assert worker.served["default"].learner.journal.totals.trained_tokens > 900


def test_a_run_whose_every_training_runs_out_of_memory_goes_on_scoring_after_an_hour_and_trains_when_it_can(
    bench: Bench, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("service.worker.recent._HOPELESS_TRAININGS", 5)
    monkeypatch.setattr("service.worker.recent._LIMITED_TRAININGS", 2)
    batches = [bench.post(name, rollouts=4) for name in "abc"]
    with pytest.MonkeyPatch.context() as full:
        full.setattr(DrafterTrainer, "step", lambda *_: (_ for _ in ()).throw(torch.OutOfMemoryError("CUDA")))
        for _ in range(5):
            assert bench.state(batches[0]) == "queued"
            a_minute_later(worker)
            worker._turn()
        assert "memory" in error_of(bench, "default")
        a_minute_later(worker)
        turns(worker, bench, batches[:1])
    assert error_of(bench, "default") is None
    assert "nothing is trained on for a while, because memory ran out" in (bench.store.worker().action_reason or "")
    assert bench.store.scores()[batches[0]].served, "it was scored"
    turns(worker, bench, batches)
    assert [bench.store.scores()[batch].action for batch in batches] == ["idle", "idle", "train"]
    assert worker.served["default"].learner.journal.totals.trained_tokens


def test_a_run_that_is_scored_only_is_so_again_after_one_training_that_runs_out_of_memory(
    bench: Bench, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a run whose memory is short for good would be refused for an hour after each 64 claims."""
    monkeypatch.setattr("service.worker.recent._HOPELESS_TRAININGS", 5)
    monkeypatch.setattr("service.worker.recent._LIMITED_TRAININGS", 2)
    trainings: list[int] = []

    def step(*_: Any) -> None:
        trainings.append(sum(bench.state(batch) == "trained" for batch in batches))
        raise torch.OutOfMemoryError("CUDA")

    monkeypatch.setattr(DrafterTrainer, "step", step)
    batches = [bench.post(name, rollouts=4) for name in "abcdef"]
    for _ in range(20):
        a_minute_later(worker)
        worker._turn()
    assert trainings == [0] * 5 + [2, 4], "two claims are scored between two trainings"
    assert [bench.state(batch) for batch in batches] == ["trained"] * 6
    facts = bench.store.worker()
    assert facts.action == "idle"
    assert facts.no_memory
