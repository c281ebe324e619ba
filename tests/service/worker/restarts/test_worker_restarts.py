"""Restarts of one run's worker, in this process: whatever the moment, every batch counts once and none is lost."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from helpers.service.valkey_fixtures import OwnValkey
from helpers.worker.death_fixtures import Stopped, die_in
from helpers.worker.worker_fixtures import Bench, final_state, states
from redis.exceptions import ConnectionError as RedisConnectionError

import rl_hooks.durable
from service.storage.queue import lease
from service.storage.queue.deliveries import RolloutQueue as WorkersQueue
from service.storage.registry import Registry
from service.storage.reports.store import Store as WorkersStore
from service.worker.checkpoint import WorkerCheckpoint
from service.worker.claim import ClaimScorer
from service.worker.inbox import CONSUMER, Loaded
from service.worker.journal import Journal
from service.worker.learner import Learner
from service.worker.loop import RegisteredAgain
from service.worker.promotion.judge import Judge

COUNTS = ("trained_tokens_total", "train_seconds_total", "published_total", "refused_total")
SUMS = ("rounds_total", "round_tokens_total")
MOMENTS = [
    (ClaimScorer, "score", False),
    (Learner, "train", False),
    (Learner, "train", True),
    (Judge, "judge", False),
    (Judge, "judge", True),
    (WorkersStore, "put_score", False),
    (WorkersStore, "put_score", True),
    (WorkerCheckpoint, "save", False),
    (WorkerCheckpoint, "save", True),
    (WorkersQueue, "ack", False),
    (WorkersQueue, "ack", True),
]


def five(bench: Bench) -> None:
    bench.begin()
    for batch in "abcde":
        bench.post(batch)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, valkey: OwnValkey) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch, Bench(tmp_path_factory.mktemp("calm"), valkey.url) as calm:
        patch.setattr(lease, "LEASE_SECONDS", 600.0)
        calm.redis.flushall()
        five(calm)
        calm.drain(calm.worker())
        return final_state(calm)


@pytest.mark.parametrize(("owner", "name", "after"), MOMENTS, ids=lambda x: getattr(x, "__name__", str(x)))
def test_a_death_at_any_step_leaves_the_state_of_an_undisturbed_run(
    undisturbed: dict[str, Any], bench: Bench, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, after: bool
) -> None:
    """Weights, optimizer and counters bit for bit; one score per batch; nothing left in queue or spool."""
    five(bench)
    with monkeypatch.context() as patch:
        die_in(patch, owner, name, after=after, calls=3)
        with pytest.raises(Stopped):
            bench.drain(bench.worker())
    bench.drain(bench.worker())
    assert final_state(bench) == undisturbed


def test_the_totals_that_are_told_never_fall_though_a_death_loses_what_no_checkpoint_holds(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prometheus takes a counter that falls for one that began at 0, and counts all of it once more."""
    five(bench)
    told: list[dict[str, float]] = []

    def report(self: Journal, *args: Any, **kwargs: Any) -> None:
        real(self, *args, **kwargs)
        sums = {f"{kind} {name}": value for kind in SUMS for name, value in bench.store.told(kind).items()}
        told.append({kind: bench.store.told(kind) for kind in COUNTS} | sums)

    real = Journal.report
    monkeypatch.setattr(Journal, "report", report)
    with monkeypatch.context() as patch:
        die_in(patch, ClaimScorer, "score", calls=4)
        with pytest.raises(Stopped):
            bench.drain(bench.worker(checkpoint_seconds=1e6))
    assert len(told) == 3
    bench.drain(bench.worker(checkpoint_seconds=1e6))
    assert len(told) > 3
    assert "rounds_total served" in told[0]
    for before, after in pairwise(told):
        assert all(after[name] >= value for name, value in before.items()), (before, after)
    assert told[-1]["rounds_total served"] > told[2]["rounds_total served"]


def test_nothing_is_told_of_a_run_that_was_registered_again(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The totals would be the new run's from then on."""
    five(bench)
    worker = bench.worker()

    def score(self: ClaimScorer, *args: Any) -> Any:
        bench.layout.target("default").touch()
        return real(self, *args)

    real = ClaimScorer.score
    monkeypatch.setattr(ClaimScorer, "score", score)
    with pytest.raises(RegisteredAgain):
        bench.drain(worker)
    assert bench.store.told("trained_tokens_total") is None


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
        counted = int(worker.learner.lineage.token_counts.sum())
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
    worker = bench.worker(checkpoint_seconds=1e9)
    worker.inbox.backlog = False
    worker.cycle()
    counts = worker.learner.lineage.trainer.windows  # type: ignore[union-attr]
    bench.redis.xclaim("da:{default}:queue", "workers", CONSUMER, 0, worker.inbox.held, idle=3_600_000, justid=True)
    assert not worker.cycle()
    assert worker.learner.lineage.trainer.windows == counts  # type: ignore[union-attr]


@pytest.mark.parametrize("was_away", [False, True])
def test_a_redis_that_is_emptied_while_a_batch_is_in_hand_holds_up_no_later_one(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, was_away: bool
) -> None:
    """What was in hand is trained on, and is known no more. `was_away`: as a server is that is started again."""
    bench.begin()
    bench.post("a")
    worker = bench.worker(checkpoint_seconds=1e9)
    worker.inbox.backlog = False
    assert worker.cycle()
    if was_away:
        with monkeypatch.context() as patch:
            patch.setattr(WorkersQueue, "claim", _away)
            with pytest.raises(RedisConnectionError):
                worker.cycle()
    assert len(held := worker.inbox.held) == 1
    bench.redis.flushall()
    assert bench.queue.heartbeat(CONSUMER, held) == [], "the run's other signs of life follow this one"
    later = bench.post("b")
    bench.drain(worker)
    worker.close()
    assert bench.state(later) == "trained"
    assert bench.totals()["batches"] == 2
    assert bench.queue.depth() == (0, 0)


def _away(*_: object, **__: object) -> None:
    raise RedisConnectionError("away")


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
