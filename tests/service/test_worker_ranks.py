"""The worker on two ranks: what one process would have learnt, whatever fails or dies on one of them."""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import itertools
import multiprocessing
import os
import random
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import asdict, is_dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.engine.agent_fixtures import eventually
from helpers.forked import run_fork
from helpers.ports import free_port
from helpers.worker.rank_fixtures import fork_ranks, run_two_ranks
from helpers.worker.record_fixtures import told
from helpers.worker.rollout_files import as_fp8, prompts_once_of
from helpers.worker.worker_fixtures import Bench, World, final_state, states, wait_until_gone
from safetensors.torch import load_file

import drafter.batch
import drafter.policy
import drafter.replay.lossless
import drafter.training.ranks
import service.ranks
import service.storage.queue.lease
import service.storage.registry
import service.worker.checkpoint
import service.worker.learner
import service.worker.process.worker
import service.worker.scoring
from drafter.batch import RolloutBatch, load_batch
from drafter.device import RanksLost
from drafter.errors import BatchRejected, TargetHeadError
from drafter.policy import Policy, TargetHead
from drafter.replay.gate import Trial
from drafter.replay.replay import replay
from drafter.training.optimizer import Optimizer
from drafter.training.ranks import ALONE, JoinedRanks
from drafter.training.trainer import DrafterTrainer, TrainConfig
from rl_hooks import wire
from service.ranks import FollowedRun, Follower, run_on_ranks
from service.settings import Settings
from service.storage.queue.deliveries import MAX_DELIVERIES, RolloutQueue
from service.storage.queue.incoming import new_name
from service.storage.registry import Registry
from service.storage.runs import change_state
from service.worker.checkpoint import CheckpointSuperseded, WorkerCheckpoint, copy_to_ranks, taken_over
from service.worker.loop import RunWorker
from service.worker.process.worker import Worker
from service.worker.scoring import ScoreOrder, score_shared
from service.worker.target import Target

#: Muon's bfloat16 iterations make much of the last bit; AdamW's weights can be compared.
ADAMW: dict[str, Any] = {"optimizer": "adamw", "train_passes": 3.0, "claim_tokens": 200}


def run_ranks(bench: Bench, lead: Callable[[], None], fault: Callable[[int], object] = abs, world: int = 2) -> int:
    """Rank 0 does `lead`, the others follow it. `fault(rank)` breaks something in a rank before."""

    def work(rank: int) -> None:
        ranks = JoinedRanks()
        vars(drafter.training.ranks)["_joined"].append(ranks)
        fault(rank)
        if rank:
            Follower(bench.settings, ranks, torch.device("cpu")).serve()
        else:
            lead()
            ranks.shared(dict, idle=True)

    return fork_ranks(work, world)


def outcome(bench: Bench) -> dict[str, Any]:
    """All that must not depend on how many ranks there were, but for rounding."""
    found = final_state(bench)
    parts = ("drafter/model.safetensors", "trainer/moments.safetensors")
    learnt = {f"{part} {n}": t for part in parts for n, t in load_file(bench.checkpoint() / part).items()}
    return found | {"weights": learnt, "scores": {k: flat(v) for k, v in found["scores"].items()}}


def flat(score: dict[str, Any]) -> dict[str, Any]:
    return {k: asdict(v) if is_dataclass(v) and not isinstance(v, type) else v for k, v in score.items()}


def assert_alike(one: Any, two: Any, where: str = "") -> None:
    """Numbers that were computed within rounding, all else equal."""
    if isinstance(one, dict):
        assert one.keys() == two.keys(), where
        for key in one:
            assert_alike(one[key], two[key], f"{where} {key}")
    elif isinstance(one, torch.Tensor):
        assert one.shape == two.shape, where
        assert float((one.double() - two.double()).abs().max()) <= 1e-4 * max(float(one.double().abs().max()), 1e-12), (
            where
        )
    else:
        assert one == (pytest.approx(two, rel=1e-4) if isinstance(one, float) else two), where


def one_process(directory: Path, redis_url: str, post: Callable[[Bench], None], **changes: Any) -> dict[str, Any]:
    """What one process makes of it."""
    with Bench(directory, redis_url, **changes) as bench:
        bench.redis.flushall()
        post(bench)
        bench.drain(bench.worker())
        return outcome(bench)


def five(bench: Bench) -> None:
    """Ragged batches of two policy versions, with a new head between them."""
    bench.begin()
    for number, name in enumerate("abcde"):
        if number == 3:
            bench.world.move_head(1)
            bench.put_head(1)
        bench.post(name, policy_version=int(number >= 3), rollouts=3 + number)


def test_two_ranks_learn_what_one_process_learns(tmp_path: Path, redis_url: str) -> None:
    """And rank 1 takes the trainer over once: from then on its own is the same to the last bit."""

    def count(rank: int) -> None:
        real = DrafterTrainer.load

        def loading(self: DrafterTrainer, directory: Path) -> None:
            with (tmp_path / f"loads {rank}").open("a") as file:
                file.write(".")
            real(self, directory)

        DrafterTrainer.load = loading  # type: ignore[method-assign]

    with Bench(tmp_path / "two", redis_url, **ADAMW) as bench:
        five(bench)
        assert run_ranks(bench, lambda: bench.drain(bench.worker()), count) == 0
        two = outcome(bench)
    one = one_process(tmp_path / "one", redis_url, five, **ADAMW)
    assert_alike(one, two)
    assert any(not torch.equal(one["weights"][n], two["weights"][n]) for n in one["weights"]), "no sum was formed"
    assert (tmp_path / "loads 1").read_text() == "."
    assert two["counts"]["windows"] > 5


def test_all_ranks_replay_a_candidate_that_is_what_was_published_once(tmp_path: Path, redis_url: str) -> None:
    """Rank 0 says so: the first batch is scored before any training, the others after it."""

    def count(rank: int) -> None:
        def counted(*arguments: Any, **named: Any) -> Any:
            with (tmp_path / f"replays {rank}").open("a") as file:
                file.write(".")
            return replay(*arguments, **named)

        vars(service.worker.scoring)["replay"] = counted

    def three(bench: Bench) -> None:
        bench.begin()
        for name in "abc":
            bench.post(name)

    changes = ADAMW | {"claim_tokens": 1}
    with Bench(tmp_path / "two", redis_url, **changes) as bench:
        three(bench)
        assert run_ranks(bench, lambda: bench.drain(bench.worker()), count) == 0
        two = outcome(bench)
    assert [(tmp_path / f"replays {rank}").read_text() for rank in range(2)] == ["." * (1 + 2 + 2)] * 2
    assert_alike(one_process(tmp_path / "one", redis_url, three, **changes), two)


def spoilt(bench: Bench) -> None:
    """Batches without normalisers and with; of those that are bad, the bad rows are of another rank's pieces each."""
    bench.begin()
    bench.post("a", rollouts=7, change=lambda t: t.pop("logsumexp"))
    bench.post("b", rollouts=7, top_p=0.999)
    bench.post("nan", rollouts=7, change=lambda t: t["aux_hidden"].fill_(float("nan")))
    bench.post("some", rollouts=7, change=lambda t: t["last_hidden"][60:].fill_(float("inf")))
    bench.post("lie", rollouts=7, change=lambda t: t["logprobs"][40:].sub_(9.0))
    bench.post("scale", rollouts=7, change=lambda t: t["logsumexp"].add_(3.0))
    bench.post("c", rollouts=2, change=lambda t: t.pop("logsumexp"))


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_check_batches_as_one_process_does_to_the_bit(tmp_path: Path, redis_url: str, world: int) -> None:
    """Reasons of dead batches, the gaps of the others and the drawn rows; and no rank does all of a batch."""
    changes = ADAMW | {"train_passes": 1.0}

    def arm(rank: int) -> None:
        vars(drafter.policy)["_UNFORESEEN"] = random.Random(0)
        vars(drafter.policy).update(_HEAD_ROWS=9, _TOKENS_AT_ONCE=11, _LOGITS_AT_ONCE=400)
        vars(drafter.batch)["_SCREENED_ROWS"] = 10
        vars(drafter.replay.lossless)["_TOKENS_AT_ONCE"] = 30
        real = Target.normalised

        def normalised(self: Target, *arguments: Any) -> Any:
            assert rank == 0, "rank 0's normalisers are taken over"
            return real(self, *arguments)

        Target.normalised = normalised  # type: ignore[assignment,method-assign]
        rows = RolloutBatch.last_rows

        def noted(self: RolloutBatch, places: torch.Tensor) -> Any:
            with (tmp_path / f"rows {rank}").open("a") as file:
                file.write(f"{len(places)}\n")
            return rows(self, places)

        RolloutBatch.last_rows = noted  # type: ignore[assignment,method-assign]

    def found(directory: Path, world: int) -> Any:
        with Bench(directory, redis_url, **changes) as bench:
            bench.redis.flushall()
            spoilt(bench)
            assert run_ranks(bench, lambda: bench.drain(bench.worker()), arm, world) == 0
            dead = {one: bench.reason(one) for one in bench.posted if bench.state(one) == "dead"}
            gaps = {one: record.logprob_gap for one, record in bench.store.scores().items()}
            sums = {one: (record.ngram, record.favour) for one, record in bench.store.scores().items()}
            some = bench.store.scores()[bench.posted[3]].rollouts, bench.reason(bench.posted[3])
            return states(bench), dead, gaps, sums, some

    several = found(tmp_path / "several", world)
    done = [sum(map(int, (tmp_path / f"rows {rank}").read_text().split())) for rank in range(world)]
    for rank in range(world):
        (tmp_path / f"rows {rank}").unlink()
    one = found(tmp_path / "one", 1)
    assert several == one
    assert one[0] == ["trained", "trained", "dead", "trained", "dead", "dead", "trained"]
    assert one[4][0] < 7, "rollouts from row 60 on are left out"
    assert None not in one[2].values()
    assert any(favour is not None for _, favour in one[3].values())
    assert [reason.partition(" ")[0] for reason in one[1].values()] == ["aux_hidden", *["log-probabilities"] * 2]
    whole = int(sum(map(int, (tmp_path / "rows 0").read_text().split())))
    assert max(done) < 0.9 * whole


def test_a_head_that_fits_no_batch_is_no_lost_rank(tmp_path: Path) -> None:
    """Every rank finds it, outside of what they share out: the run is in trouble, and the processes go on."""
    world, file = World(), tmp_path / "a"
    file.write_bytes(world.rollout_file("a", rollouts=2))
    batch = load_batch(file)
    order = ScoreOrder([0, 1], 0, 1, "greedy", gap_nats=0.1, served=None)
    narrow = TargetHead(world.heads[0][:, :-1].contiguous())

    def work(_rank: int) -> None:
        ranks = JoinedRanks()
        for head in (None, narrow):
            with pytest.raises(TargetHeadError), ranks.in_step():
                score_shared(ranks, {}, Policy(0, world.embed, head), batch, order)
        assert ranks.add([1]) == [2]

    assert run_two_ranks(work) == 0


def dies_in_window(number: int, dies: int = 1) -> Callable[[int], None]:
    """That rank is killed in the middle of that window: the others wait for its gradients."""

    def arm(rank: int) -> None:
        real = DrafterTrainer._accumulate

        def dying(self: DrafterTrainer, *arguments: Any) -> Any:
            if rank == dies and self.windows == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(self, *arguments)

        DrafterTrainer._accumulate = dying  # type: ignore[assignment,method-assign]

    return arm


def test_a_killed_rank_ends_all_and_the_next_start_learns_what_an_undisturbed_one_learns(
    tmp_path: Path, redis_url: str
) -> None:
    """The checkpoint precedes the acknowledgement, so nothing is lost and nothing is trained twice."""
    changes = ADAMW | {"claim_tokens": 1}
    with Bench(tmp_path / "two", redis_url, **changes) as bench:
        five(bench)
        ended = tmp_path / "rank 0 ended"

        def lead() -> None:
            with pytest.raises(RanksLost):
                bench.drain(bench.worker())
            ended.touch()
            os._exit(3)

        assert run_ranks(bench, lead, dies_in_window(4)) != 0
        assert ended.exists(), "rank 0 learnt that rank 1 has gone, and did not hang"
        assert "trained" in states(bench)
        assert states(bench) != ["trained"] * 5
        assert run_ranks(bench, lambda: bench.drain(bench.worker())) == 0
        two = outcome(bench)
    assert_alike(one_process(tmp_path / "one", redis_url, five, **changes), two)


def test_a_start_with_another_number_of_ranks_goes_on_from_the_checkpoint(tmp_path: Path, redis_url: str) -> None:
    """Two ranks, of which one is killed; one process, which is killed; three ranks: as one undisturbed process."""
    changes = ADAMW | {"claim_tokens": 1}
    with Bench(tmp_path / "several", redis_url, **changes) as bench:
        five(bench)

        def lead() -> None:
            try:
                bench.drain(bench.worker())
            except RanksLost:
                os._exit(3)

        done = [0]
        for world, fault in ((2, dies_in_window(2, dies=1)), (1, dies_in_window(4, dies=0)), (3, abs)):
            assert (run_ranks(bench, lead, fault, world) == 0) == (world == 3)
            done.append(states(bench).count("trained"))
        print("trained after each start:", done, bench.trainer_counts())
        assert sorted(set(done)) == done, "each start has trained some, from what the one before had learnt"
        assert done[-1] == 5
        several = outcome(bench)
    assert_alike(one_process(tmp_path / "one", redis_url, five, **changes), several)


def test_a_rank_that_does_not_answer_in_a_training_ends_it_and_the_next_start_learns_all(
    tmp_path: Path, redis_url: str
) -> None:
    """Stopped, not killed: no connection is closed, and only rank 0's patience tells it."""
    changes = ADAMW | {"claim_tokens": 1}
    ended = tmp_path / "rank 0 ended"

    def arm(rank: int) -> None:
        (tmp_path / f"pid {rank}").write_text(str(os.getpid()))
        real = DrafterTrainer._accumulate

        def stopping(self: DrafterTrainer, *arguments: Any) -> Any:
            if rank == 1 and self.windows == 4:
                os.kill(os.getpid(), signal.SIGSTOP)
            return real(self, *arguments)

        DrafterTrainer._accumulate = stopping  # type: ignore[assignment,method-assign]

    with Bench(tmp_path / "two", redis_url, **changes) as bench:
        five(bench)

        def lead() -> None:
            with pytest.raises(RanksLost):
                bench.drain(bench.worker())
            ended.touch()
            os.kill(int((tmp_path / "pid 1").read_text()), signal.SIGKILL)
            os._exit(3)

        with shorter_patience(20.0):
            assert run_ranks(bench, lead, arm) != 0
        assert ended.exists()
        assert states(bench) != ["trained"] * 5
        assert run_ranks(bench, lambda: bench.drain(bench.worker())) == 0
        two = outcome(bench)
    assert_alike(one_process(tmp_path / "one", redis_url, five, **changes), two)


def test_ranks_learn_alike_from_8_bits_shared_prompts_and_an_object_store(
    tmp_path: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 brings what lies in the store into the spool, where the others find it."""
    if "DRAFTALIGN_TESTS_FRESH" not in os.environ:
        # Ranks are forks, and obstore's threads, which another test of this process may have begun, do not outlive one.
        here = f"{__file__}::test_ranks_learn_alike_from_8_bits_shared_prompts_and_an_object_store"
        quietly = "-W", "ignore::pytest.PytestAssertRewriteWarning"  # of what the fork has imported
        given, variables = (
            ("-q", "-n", "0", "-p", "no:cacheprovider", *quietly),
            os.environ | {"DRAFTALIGN_TESTS_FRESH": "1"},
        )
        done = run_fork("worker", "pytest", *given, here, directory=tmp_path, environment=variables, seconds=110)
        assert done.returncode == 0, done.stdout[-4000:]
        return
    pytest.importorskip("obstore")
    pytest.importorskip("moto")
    from helpers.service.object_fixtures import BUCKET, running_store

    def overflow(t: dict[str, torch.Tensor]) -> None:  # in an answer of the second rollout
        t["aux_hidden"][t["cu_seqlens"][1] + 5] = float("inf")

    def post(bench: Bench) -> None:
        bench.begin()
        for number, name in enumerate("abc"):
            body = bench.world.rollout_file(name, prompts=[1, 1, 1, 2, 2, 3, 3], change=overflow)
            if name != "a":
                body = as_fp8(body, tmp_path / "x", last=name == "c")
            if name != "b":
                body = prompts_once_of(body, tmp_path / "x")
            if number == 0 or bench.settings.rollouts_url is None:
                bench.post_file(body)
                continue
            header = wire.check_rollout_header(wire.parse_header(body))
            blob = new_name(header.batch_id, hashlib.sha256(body).hexdigest(), time.time_ns())
            client.put_object(Bucket=BUCKET, Key=f"in/rollouts/default/{blob}", Body=body)
            assert bench.enqueue("default", bench._spooled(header, blob, len(body))) == "accepted"
            bench.posted.append(header.batch_id)

    for store in running_store(monkeypatch):
        client = store.client()
        with Bench(tmp_path / "two", redis_url, rollouts_url=f"s3://{BUCKET}/in", **ADAMW) as bench:
            post(bench)
            assert len(store.stored()) == 2
            assert run_ranks(bench, lambda: bench.drain(bench.worker())) == 0
            assert store.stored() == []
            assert {record.rollouts for record in bench.store.scores().values()} == {6}
            two = outcome(bench)
    assert_alike(one_process(tmp_path / "one", redis_url, post, **ADAMW), two)


def test_ranks_cut_a_training_at_the_same_window_where_another_run_waits(tmp_path: Path, redis_url: str) -> None:
    """Rank 0 alone knows that one waits; what was learnt so far stays, on both."""

    def arm(rank: int) -> None:
        vars(service.worker.learner)["LONGEST_CLAIM_SECONDS"] = 0.0
        real = DrafterTrainer.step

        def counted(self: DrafterTrainer, window: Any) -> Any:
            with (tmp_path / f"windows {rank}").open("a") as file:
                file.write(".")
            return real(self, window)

        DrafterTrainer.step = counted  # type: ignore[method-assign]

    def windows(directory: Path, *, waits: bool) -> list[int]:
        with Bench(directory, redis_url, **ADAMW | {"train_step_tokens": 16}) as bench:
            bench.redis.flushall()
            bench.begin()
            bench.post("a", rollouts=6)

            def lead() -> None:
                store, queue = bench.store, bench.queue
                bench.drain(RunWorker(bench.settings, bench.layout, queue, store, "default", others_wait=lambda: waits))

            assert run_ranks(bench, lead, arm) == 0
            assert states(bench) == ["trained"]
            assert bench.totals()["trained_tokens"] > 0
        found = [len((tmp_path / f"windows {rank}").read_text()) for rank in (0, 1)]
        for rank in (0, 1):
            (tmp_path / f"windows {rank}").unlink()
        return found

    whole, cut = windows(tmp_path / "alone", waits=False), windows(tmp_path / "waits", waits=True)
    assert whole[0] == whole[1]
    assert cut[0] == cut[1]
    assert 0 < cut[0] < whole[0] / 2


#: The gate publishes what gains anything, and Muon moves the matrices: two ranks repeat each other to the bit.
PUBLISHING: dict[str, Any] = {"claim_tokens": 1, "train_passes": 3.0, "learning_rate": 1e-2, "gate_min_gain": 1e-4}

#: How many (moment, rank) pairs are drawn; 0: all of them.
RANK_KILLS = int(os.environ.get("DRAFTALIGN_RANK_KILLS", "4"))
SEED = int(os.environ.get("DRAFTALIGN_CHAOS_SEED", str(random.SystemRandom().randrange(1 << 30))))

#: Where a rank is killed: owner, method, before or after it, at which call. Both ranks score, train and exchange; the
#: rest rank 0 does while rank 1 waits for its next order. The calls lie behind the first version that the gate chose.
DEATHS: dict[str, tuple[Any, str, str, int]] = {
    "scoring": (service.worker.scoring, "replay", "before", 9),
    "scored": (service.worker.scoring, "replay", "after", 9),
    "in the middle of a window": (DrafterTrainer, "_accumulate", "before", 7),
    "before Muon's exchange": (Optimizer, "exchange", "before", 7),
    "in Muon's exchange": (JoinedRanks, "give", "before", 14),
    "after Muon's exchange": (Optimizer, "exchange", "after", 7),
    "before a checkpoint": (WorkerCheckpoint, "save", "before", 3),
    "while a checkpoint is written": (service.worker.checkpoint, "write_kind", "before", 4),
    "after a checkpoint": (WorkerCheckpoint, "save", "after", 3),
    "before a publication": (Registry, "publish", "before", 1),
    "while a version is published": (Registry, "_point", "before", 1),
    "between pointer and history": (service.storage.registry, "replace_file", "after", 1),
    "after a publication": (Registry, "publish", "after", 1),
    "before the acknowledgement": (RolloutQueue, "ack", "before", 3),
    "after the acknowledgement": (RolloutQueue, "ack", "after", 3),
}


def test_every_moment_at_which_a_rank_may_be_killed_exists() -> None:
    """A name that has moved is not drawn every time."""
    assert [moment for moment, (owner, name, _, _) in DEATHS.items() if not hasattr(owner, name)] == []


def killed_at(moment: str, dies: int, directory: Path) -> Callable[[int], None]:
    """That rank is killed at that moment, by itself where it comes there, else by the rank that does."""
    owner, name, when, call = DEATHS[moment]
    both = owner in (service.worker.scoring, DrafterTrainer, Optimizer, JoinedRanks)

    def arm(rank: int) -> None:
        (directory / f"pid {rank}").write_text(str(os.getpid()))
        if rank != (dies if both else 0):
            return
        real, calls = getattr(owner, name), itertools.count(1)

        def kill() -> None:
            (directory / "killed").touch()
            victim = int((directory / f"pid {dies}").read_text())
            os.kill(victim, signal.SIGKILL)
            if dies != rank:
                wait_until_gone(victim)

        def dying(*arguments: Any, **named: Any) -> Any:
            now = next(calls) == call
            if now and when == "before":
                kill()
            found = real(*arguments, **named)
            if now and when == "after":
                kill()
            return found

        setattr(owner, name, dying)

    return arm


def learnt_by_two(directory: Path, redis_url: str, fault: Callable[[int], object] | None = None) -> dict[str, Any]:
    """What two ranks make of five batches where the gate publishes whatever gains, with a death at `fault`."""
    with Bench(directory, redis_url, **PUBLISHING) as bench:
        bench.redis.flushall()
        bench.begin()
        registry = Registry(bench.layout)
        bench.worker()  # publishes the first drafter
        first = registry.latest("default")
        assert first is not None
        for number, name in enumerate("abcde"):  # else what served a batch is what serves when it is scored
            bench.post(name, rollouts=3 + number, drafter_version=first.version)

        def lead() -> None:
            try:
                bench.drain(bench.worker())
            except RanksLost:
                os._exit(3)

        if fault is not None:
            assert run_ranks(bench, lead, fault) != 0
        assert run_ranks(bench, lead) == 0
        events = [e for e in told(registry) if e["event"] in ("published", "rolled_back")]
        moves = [(e["event"], e["sequence"], e["version"], e["parent"]) for e in events]
        for version in registry.versions("default"):
            registry.verify("default", version)
        latest = registry.latest("default")
        assert latest is not None
        return final_state(bench) | {"moves": moves, "latest": (latest.sequence, latest.version)}


@pytest.mark.chaos
def test_whatever_moment_a_rank_is_killed_at_nothing_is_lost_and_nothing_trained_twice(
    tmp_path: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights, moments, counters, scores and published versions to the bit what two undisturbed ranks have."""
    print(f"DRAFTALIGN_CHAOS_SEED={SEED} DRAFTALIGN_RANK_KILLS={RANK_KILLS}")
    monkeypatch.setattr(Trial, "error", 0.0)  # one look is proof
    calm = learnt_by_two(tmp_path / "calm", redis_url)
    assert len(calm["moves"]) == 4, "the first drafter, and what the gate chose after each of three turns"
    everywhere = list(itertools.product(DEATHS, (0, 1)))
    for moment, dies in random.Random(SEED).sample(everywhere, RANK_KILLS) if RANK_KILLS else everywhere:
        where = f"rank {dies} is killed {moment}"
        directory = tmp_path / where
        directory.mkdir()
        found = learnt_by_two(directory / "state", redis_url, killed_at(moment, dies, directory))
        assert (directory / "killed").exists(), f"{where}: it never came there"
        assert found == calm, where


@pytest.mark.parametrize("faulty", [0, 1])
def test_a_batch_that_fails_on_one_rank_ends_alone_and_the_ranks_go_on(
    tmp_path: Path, redis_url: str, faulty: int
) -> None:
    def arm(rank: int) -> None:
        real = DrafterTrainer.prepare

        def failing(self: DrafterTrainer, batch: RolloutBatch) -> Any:
            if rank == faulty and any(i.startswith("bad") for i in batch.rollout_ids):
                raise RuntimeError("boom")
            return real(self, batch)

        DrafterTrainer.prepare = failing  # type: ignore[method-assign]

    with Bench(tmp_path / "two", redis_url, **ADAMW) as bench:
        bench.begin()
        for name in ("a", "bad", "b"):
            bench.post(name, rollouts=6)

        def lead() -> None:
            for _ in range(MAX_DELIVERIES - 1):  # as `Worker` does: the run is opened again from its last checkpoint
                with pytest.raises(RuntimeError, match="boom"):
                    bench.drain(bench.worker())
            with pytest.raises(RuntimeError, match="boom"):  # in isolation
                bench.drain(bench.worker())
            bench.drain(bench.worker())

        assert run_ranks(bench, lead, arm) == 0
        assert states(bench) == ["trained", "dead", "trained"]
        where = "RuntimeError: boom" if faulty == 0 else "on rank 1: RuntimeError: boom"
        assert where in bench.reason(bench.posted[1])


def test_ranks_share_the_rollouts_that_are_scored(tmp_path: Path, redis_url: str) -> None:
    """Each replays its own, with every drafter; also a batch of one rollout, and one of many siblings."""

    def count(rank: int) -> None:
        def counted(drafter: Any, batch: RolloutBatch, *arguments: Any, **named: Any) -> Any:
            with (tmp_path / f"scored {rank}").open("a") as file:
                file.writelines(f"{rollout_id}\n" for rollout_id in batch.rollout_ids)
            return replay(drafter, batch, *arguments, **named)

        vars(service.worker.scoring)["replay"] = counted

    with Bench(tmp_path / "two", redis_url, **ADAMW) as bench:
        bench.begin()
        bench.post("a", rollouts=5)
        bench.post("b", rollouts=1)
        assert run_ranks(bench, lambda: bench.drain(bench.worker()), count) == 0
        assert states(bench) == ["trained"] * 2
        siblings = bench.post("c", prompts=[1] * 8)

        def behind() -> None:
            worker = bench.worker()
            worker.learner.scorer.keeps_up = False
            bench.drain(worker)
            record = bench.store.scores()[siblings]
            assert record.served is not None
            assert record.tokens is not None
            (bench.layout.root / "tokens").write_text(f"{record.served.tokens / record.tokens}")

        assert run_ranks(bench, behind, count) == 0
        assert 0.1 < float((bench.layout.root / "tokens").read_text()) < 0.4
    first, second = ({*(tmp_path / f"scored {rank}").read_text().split()} for rank in (0, 1))
    some = sorted((first | second) & {f"c/{i}" for i in range(8)})
    assert some in [[f"c/{i}", f"c/{i + 4}"] for i in range(4)]
    assert first == {"a/0", "a/2", "a/4", "b/0", some[0]}
    assert second == {"a/1", "a/3", some[1]}


def test_two_ranks_weigh_what_others_drew_as_one_does(tmp_path: Path) -> None:
    """Weights, gap, replays and what is told of positions; five rollouts are not shared out evenly."""
    world, file = World(), tmp_path / "a"
    file.write_bytes(world.rollout_file("a", rollouts=5))
    batch, newer = load_batch(file), Policy(0, world.embed, TargetHead(world.heads[0] * 1.05))
    batch = newer.needed_head().normalise(replace(batch, normalised=False))
    drafters = {"one": world.drafter().eval(), "other": world.drafter(3).eval()}
    order = ScoreOrder(range(5), 7, 3, "probabilistic", gap_nats=0.25, served=None)
    alone = score_shared(ALONE, drafters, newer, batch, order)
    assert alone.batch.log_weights is not None
    assert alone.gap is not None
    assert alone.gap > 0.02

    def work(_rank: int) -> None:
        found = score_shared(JoinedRanks(), drafters, newer, batch, order)
        assert found.gap == pytest.approx(alone.gap)
        assert found.batch.log_weights is not None
        torch.testing.assert_close(found.batch.log_weights, alone.batch.log_weights)
        for name, one in alone.by_version.items():
            other = found.by_version[name]
            for mine, theirs in zip(one._arrays, other._arrays, strict=True):
                np.testing.assert_allclose(theirs, mine, rtol=1e-5, atol=1e-7)
            assert other.tells_positions == one.tells_positions

    assert run_two_ranks(work) == 0


def test_a_batch_that_cannot_be_replayed_on_one_rank_is_dead_and_the_ranks_go_on(
    tmp_path: Path, redis_url: str
) -> None:
    def arm(rank: int) -> None:
        def failing(drafter: Any, batch: RolloutBatch, *arguments: Any, **named: Any) -> Any:
            if rank == 1 and any(i.startswith("bad") for i in batch.rollout_ids):
                raise BatchRejected("NaN")
            return replay(drafter, batch, *arguments, **named)

        vars(service.worker.scoring)["replay"] = failing

    with Bench(tmp_path / "two", redis_url, **ADAMW) as bench:
        bench.begin()
        for name in ("a", "bad", "b"):
            bench.post(name, rollouts=6)
        assert run_ranks(bench, lambda: bench.drain(bench.worker()), arm) == 0
        assert states(bench) == ["trained", "dead", "trained"]
        assert bench.reason(bench.posted[1]) == "on rank 1: BatchRejected: NaN"


def test_a_rank_that_cannot_read_a_file_is_no_fault_of_the_batch(tmp_path: Path, redis_url: str) -> None:
    """Another disk, or another state directory, on one rank: it is tried again, and no delivery counts."""

    def arm(rank: int) -> None:
        if rank == 1:

            def failing(path: Path, **_: Any) -> Any:
                if (tmp_path / "mended").exists():
                    return load_batch(path)
                raise OSError(5, "Input/output error")

            vars(service.ranks)["load_batch"] = failing

    with Bench(tmp_path / "two", redis_url, **ADAMW) as bench:
        bench.begin()
        bench.post("a", rollouts=6)

        def lead() -> None:
            for _ in range(5):
                with pytest.raises(OSError, match="on rank 1: OSError"):
                    bench.drain(bench.worker())
            (tmp_path / "mended").touch()
            bench.drain(bench.worker())

        assert run_ranks(bench, lead, arm) == 0
        assert states(bench) == ["trained"]


def test_a_run_that_rank_0_lets_go_is_let_go_by_the_others_and_orders_come_while_nothing_happens(
    tmp_path: Path, redis_url: str
) -> None:
    """Followers wait for 8 s at the most here, and rank 0 has nothing to do for longer."""
    held = tmp_path / "held"

    def arm(rank: int) -> None:
        vars(drafter.training.ranks)["_BEAT_SECONDS"] = 0.5
        if rank == 1:
            real = FollowedRun.prepare

            def preparing(self: FollowedRun, *arguments: Any) -> Any:
                held.touch()
                weakref.finalize(self, held.unlink)
                return real(self, *arguments)

            FollowedRun.prepare = preparing  # type: ignore[assignment,method-assign]

    with Bench(tmp_path / "two", redis_url, **ADAMW) as bench:
        bench.begin()
        bench.post("a", rollouts=6)

        def lead() -> None:
            worker = Worker(bench.settings, bench.redis)
            person = threading.Thread(target=pause_and_stop, args=(worker,))
            person.start()
            worker.serve()
            person.join()
            assert asked == [True, False]

        asked: list[bool] = []

        def pause_and_stop(worker: Worker) -> None:
            try:
                eventually(lambda: states(bench) == ["trained"], seconds=60)
                asked.append(held.exists())
                change_state(bench.layout, "default", "paused", "the GPU is needed")
                eventually(lambda: not held.exists(), seconds=60)
                asked.append(held.exists())
                time.sleep(9.5)
            finally:
                worker.stop()

        with shorter_patience(8.0):
            assert run_ranks(bench, lead, arm) == 0


@pytest.mark.parametrize("meanwhile", ["rank 0 writes it", "rank 1 reads it"])
def test_a_copy_that_another_worker_clears_is_a_lost_lease_and_no_fault_of_the_run(
    tmp_path: Path, redis_url: str, meanwhile: str
) -> None:
    """Another worker takes the run, and dies: rank 0 was paused, say. No minute is lost."""

    def arm(rank: int) -> None:
        vars(service.worker.process.heartbeat)["_BEAT_SECONDS"] = 0.1
        name = "read_kind" if rank else "write_kind"
        real = vars(service.worker.checkpoint)[name]

        def armed(directory: Path, *arguments: Any) -> Any:
            copied = rank or any(frame.function == "copy_to_ranks" for frame in inspect.stack(0))
            if copied and meanwhile.startswith(f"rank {rank}") and not (tmp_path / "taken").exists():
                bench.redis.set(service.storage.queue.lease.Leases.key("default"), "elsewhere/1/a", px=1000)
                WorkerCheckpoint(bench.layout, "default")._clear_leftovers()  # as its `save` begins
                (tmp_path / "taken").touch()
            return real(directory, *arguments)

        vars(service.worker.checkpoint)[name] = armed

    with Bench(tmp_path / "two", redis_url, **ADAMW) as bench:
        bench.begin()
        bench.post("a", rollouts=6)

        def lead() -> None:
            worker = Worker(bench.settings, bench.redis)
            found: list[Exception] = []
            real = worker._handle_error

            def handled(run: str, error: Exception) -> None:
                found.append(error)
                real(run, error)

            worker._handle_error = handled  # type: ignore[method-assign]

            def stop() -> None:
                try:
                    eventually(lambda: states(bench) == ["trained"], seconds=120)
                finally:
                    worker.stop()

            person = threading.Thread(target=stop)
            person.start()
            worker.serve()
            person.join()
            assert [type(error) for error in found] == [CheckpointSuperseded]
            assert states(bench) == ["trained"]

        assert run_ranks(bench, lead, arm) == 0


def test_a_run_that_kills_another_rank_is_set_aside_and_the_others_train(tmp_path: Path, redis_url: str) -> None:
    """Rank 1 has less memory, say: it opens a run with rank 0's first order, which is of a batch."""
    first = "before-default"  # runs are served in this order

    def arm(rank: int) -> None:
        vars(service.storage.queue.lease)["LEASE_SECONDS"] = 0.5
        vars(service.worker.process.heartbeat)["_BEAT_SECONDS"] = 0.1
        real = FollowedRun.__init__

        def opening(self: FollowedRun, settings: Settings, run: str, *arguments: Any) -> None:
            if rank and run == first:
                os.kill(os.getpid(), signal.SIGKILL)
            real(self, settings, run, *arguments)

        FollowedRun.__init__ = opening  # type: ignore[assignment,method-assign]

    with Bench(tmp_path / "two", redis_url, **ADAMW) as bench:
        bench.begin()
        bench.register(bench.world.run_file(drafter=bench.world.drafter()), run=first)
        for number in range(4):
            bench.post(f"killer{number}", run=first)
        honest = bench.post("honest", rollouts=6)

        def lead() -> None:
            worker = Worker(bench.settings, bench.redis)

            def stop() -> None:
                try:
                    eventually(lambda: bench.state(honest) == "trained", seconds=60)
                finally:
                    worker.stop()

            person = threading.Thread(target=stop)
            person.start()
            try:
                worker.serve()
            except RanksLost:
                os._exit(3)
            person.join()

        deaths = 0
        while run_ranks(bench, lead, arm) != 0:
            deaths += 1
            assert deaths <= 4, "this run keeps the worker from the other"
        print(f"{deaths} deaths until another run was trained")
        assert deaths == 4
        assert bench.state(honest) == "trained"


def test_a_rank_that_hears_nothing_more_from_rank_0_ends(tmp_path: Path, redis_url: str) -> None:
    """As where its host has lost its power: no connection is closed. It is stopped here, and goes on afterwards."""
    ended = tmp_path / "rank 1 ended"
    with Bench(tmp_path / "two", redis_url, **ADAMW) as bench:

        def work(rank: int) -> None:
            ranks = JoinedRanks()
            if rank == 0:
                eventually(ended.exists, seconds=60)
                os._exit(3)
            with pytest.raises(RanksLost, match="does not answer"):
                Follower(bench.settings, ranks, torch.device("cpu")).serve()
            ended.touch()
            os._exit(3)

        with shorter_patience(3.0):
            run_two_ranks(work)
    assert ended.exists()


@pytest.mark.parametrize(
    ("host", "told", "code"),
    [(1, (0,), 1), (1, (1, 0), 0), (0, (0,), 0)],
    ids=["rank 0's host alone", "both hosts", "one host, rank 0 alone"],
)
def test_ranks_of_another_host_fail_where_rank_0s_host_alone_is_told_to_end(
    tmp_path: Path, redis_url: str, host: int, told: tuple[int, ...], code: int
) -> None:
    """Their `torchrun` then goes on with those that are left: ends with 0 it would take for the end of the job."""
    port = str(free_port())
    with Bench(tmp_path / "two", redis_url, **ADAMW) as bench:
        bench.begin()
        bench.post("a", rollouts=6)

        def one(rank: int) -> None:
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2", "RANK": str(rank)}
            os.environ |= {"LOCAL_RANK": "0", "GROUP_RANK": str(host * rank)}
            run_on_ranks(bench.settings)

        ranks = [multiprocessing.get_context("fork").Process(target=one, args=(rank,)) for rank in range(2)]
        try:
            for process in ranks:
                process.start()
            eventually(lambda: states(bench) == ["trained"], seconds=60)
            for rank in told:
                ranks[rank].terminate()
            for process in ranks:
                process.join(60)
            assert [process.exitcode for process in ranks] == [0, code]
        finally:
            for process in ranks:
                process.kill()


@contextlib.contextmanager
def shorter_patience(seconds: float) -> Iterator[None]:
    """How long a rank waits for rank 0's next order, and for another in a training."""
    patience = vars(drafter.training.ranks)
    before = {name: patience[name] for name in ("_IDLE", "_PATIENCE")}
    patience |= dict.fromkeys(before, timedelta(seconds=seconds))
    try:
        yield
    finally:
        patience |= before


def test_a_trainer_that_differs_in_the_last_bit_is_taken_over_and_an_equal_one_is_not(tmp_path: Path) -> None:
    """In a weight, a moment, a counter, the configuration; afterwards it is the same."""
    world = World()
    (tmp_path / "file").write_bytes(world.rollout_file("a"))
    batch, policy, directory = load_batch(tmp_path / "file"), world.policy(), tmp_path / "worker"
    directory.mkdir()

    def changed(t: DrafterTrainer, what: str) -> DrafterTrainer:
        if what == "weight":
            vector = next(p for p in t.drafter.parameters() if p.ndim == 1)
            vector.data[0] = torch.nextafter(vector.data[0], torch.tensor(9.0))
        elif what == "moment":
            moment = next(m for name, m in t._optimizer.moments().items() if name.startswith("exp_avg_sq."))
            moment.mul_(1.5)
        elif what == "counter":
            t.tokens_trained += 1
        return t

    def work(rank: int) -> None:
        ranks = JoinedRanks()
        for what in ("", "weight", "moment", "counter", "absent"):
            own: DrafterTrainer = DrafterTrainer(world.drafter(), TrainConfig(learning_rate=1e-2))
            own.step([(batch, policy)])
            if rank == 0:
                own.ranks = ranks
                copy_to_ranks(own, directory)
                continue
            wanted = own.fingerprint()
            mine = None if what == "absent" else changed(own, what)
            found = taken_over(
                ranks, mine, directory, lambda drafter: DrafterTrainer(drafter, TrainConfig(learning_rate=1e-2))
            )
            assert (found is mine) == (what == ""), what
            assert found.fingerprint() == wanted, what

    assert run_two_ranks(work) == 0
    assert list(directory.iterdir()) == [], "the copies are gone"
