"""A worker is stopped (SIGSTOP) before some step, a successor goes on, then it continues: nothing is lost or doubled.

Longer than its lease, that is: a debugger, a paused container, a machine that swaps. `DRAFTALIGN_HANDOVERS` sets before
how many of a turn's steps it is stopped (default 8, 0: before each), `DRAFTALIGN_CHAOS_SEED` before which.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from helpers.worker.record_fixtures import told
from helpers.worker.worker_fixtures import Bench
from redis import Redis

import rl_hooks.durable
import service.storage.drafters.versions
import service.worker.checkpoint
import service.worker.lineage
from drafter.replay.gate import Trial
from drafter.training.trainer import DrafterTrainer
from service.errors import RegistryBusy
from service.monitor.controller import Action, Controller, Decision
from service.storage.layout import Layout
from service.storage.queue.keys import Keys
from service.storage.registry import Registry
from service.worker.checkpoint import CheckpointSuperseded, WorkerCheckpoint
from service.worker.loop import LeaseLost, RunWorker
from service.worker.recent import RecentRollouts

pytestmark = pytest.mark.chaos

HANDOVERS = int(os.environ.get("DRAFTALIGN_HANDOVERS", "8"))
SEED = int(os.environ.get("DRAFTALIGN_CHAOS_SEED", str(random.SystemRandom().randrange(1 << 30))))

#: Settings with which the gate promotes every candidate, where no look proves too little (`hasty`).
EAGER: dict[str, Any] = {"gate_min_gain": -1e6, "recent_tokens": 400}

STEPS_OF_A_SAVE = [
    (rl_hooks.durable, "sync"),
    (service.worker.checkpoint, "write_kind"),
    (shutil, "rmtree"),
    (DrafterTrainer, "save"),
    (WorkerCheckpoint, "newest"),
    (Path, "mkdir"),
    (Path, "write_text"),
    (Path, "rename"),
]
STEPS_OF_OPENING = [
    (WorkerCheckpoint, "newest"),
    (WorkerCheckpoint, "restore"),
    (Path, "iterdir"),
    (RecentRollouts, "restore"),
    (RecentRollouts, "settle"),
]
STEPS_OF_A_TURN = [
    *STEPS_OF_A_SAVE,
    (service.worker.lineage, "write_kind"),
    (rl_hooks.durable, "write_synced"),
    (service.storage.drafters.versions, "write_synced"),
    (DrafterTrainer, "step"),
    (Redis, "execute_command"),
    (Path, "replace"),
    (Path, "unlink"),
]


def sleep_before_step(
    patch: pytest.MonkeyPatch, steps: list[tuple[Any, str]], number: int, meanwhile: Callable[[], object]
) -> list[str]:
    """Call `meanwhile` before the `number`-th of `steps` from here on; returns the steps' names, as they come."""
    done: list[str] = []
    asleep = False

    def watch(owner: Any, name: str) -> None:
        real = getattr(owner, name)

        def step(*args: Any, **kwargs: Any) -> Any:
            nonlocal asleep
            if not asleep:
                done.append(name)
                if len(done) == number:
                    asleep = True
                    meanwhile()
                    asleep = False
            return real(*args, **kwargs)

        patch.setattr(owner, name, step)

    for owner, name in steps:
        watch(owner, name)
    return done


class Handover:
    """One worker that sleeps, and the successor that takes over meanwhile."""

    def __init__(self, bench: Bench, name: str, rollouts: int = 8) -> None:
        """`rollouts`: of the batch that comes meanwhile."""
        self.bench = bench
        self.rollouts = rollouts
        self.successor: RunWorker | None = None
        self.refused = False
        self._name = name
        self._leased = True

    def sleeper(self, **changes: Any) -> RunWorker:
        """A worker whose lease is gone once there is a successor."""
        bench = self.bench
        settings = bench.settings.model_copy(update=changes)
        return RunWorker(settings, bench.layout, bench.queue, bench.store, "default", holds_lease=lambda: self._leased)

    def take_over(self, **changes: Any) -> None:
        """Another batch comes, and all is done by another worker; it stops where the registry is the sleeper's."""
        self._leased = False
        self.bench.post(f"{self._name}/successor", rollouts=self.rollouts)
        self.successor = self.bench.worker(**changes)
        try:
            self.bench.drain(self.successor)
        except RegistryBusy:
            self.refused = True

    @contextlib.contextmanager
    def waking_up(self) -> Any:
        """What a worker that finds itself overtaken may say, and nothing else."""
        try:
            yield
        except (LeaseLost, CheckpointSuperseded, OSError):
            assert self.successor is not None


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take one look for proof."""
    monkeypatch.setattr(Trial, "error", 0.0)


def parents(registry: Registry) -> list[str | None]:
    """Of what was published, oldest first; other events stand in between."""
    return [e["parent"] for e in told(registry) if e["event"] == "published"]


def assert_each_was_published_over_what_was_served(registry: Registry) -> None:
    """An archived version that is served again counts: to these settings it is better, whatever it gains."""
    served = None
    for event in told(registry):
        if event["event"] == "published":
            assert event["parent"] == served, event
        if event["event"] in ("published", "rolled_back"):
            served = event["version"]
    assert served is not None


def begin_eager(bench: Bench) -> Registry:
    """A run that has had some turns, and evidence for its gate."""
    bench.begin()
    for i in range(4):
        bench.post(f"first/{i}")
    bench.drain(bench.worker(**EAGER))
    return Registry(bench.layout)


def test_asleep_anywhere_in_a_checkpoint(bench: Bench) -> None:
    bench.begin()
    bench.post("first")
    bench.drain(bench.worker())
    for number in itertools.count(1):
        bench.post(f"{number}/asleep", rollouts=2)
        handover = Handover(bench, str(number), rollouts=2)
        sleeper = bench.worker(checkpoint_seconds=600.0)
        bench.drain(sleeper)
        with pytest.MonkeyPatch.context() as patch, handover.waking_up():
            done = sleep_before_step(patch, STEPS_OF_A_SAVE, number, handover.take_over)
            sleeper.save()
        bench.post(f"{number}/after", rollouts=2)
        bench.drain(handover.successor or sleeper)  # raises where its checkpoint is no longer the newest
        bench.drain(bench.worker())
        assert all(bench.state(b) == "trained" for b in bench.posted), f"asleep before step {number}: {done}"
        assert bench.totals()["batches"] == len(bench.posted), f"asleep before step {number}: {done}"
        assert bench.trainer_counts()["windows"] > 0
        if handover.successor is None:
            break
    assert {name for _, name in STEPS_OF_A_SAVE} <= set(done), done


def test_awake_again_while_its_heir_writes_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both with one process id, as in two containers over one volume: neither writes into the other's."""

    class Trainer:
        def __init__(self, drafter: str) -> None:
            self.drafter = drafter

        def save(self, directory: Path) -> None:
            (directory / "who").write_text(self.drafter)

    layout = Layout(tmp_path)
    layout.make_run("default")
    sleeper, successor = WorkerCheckpoint(layout, "default"), WorkerCheckpoint(layout, "default")
    writes, woken = threading.Event(), threading.Event()

    def write_kind(directory: Path, drafter: str) -> None:
        if drafter == "sleeper":
            done.append(threads.submit(successor.save, Trainer("successor"), {"who": "successor"}))  # type: ignore[arg-type]
            assert writes.wait(60)
        (directory / "who").write_text(drafter)
        if drafter == "successor":
            writes.set()
            assert woken.wait(60)

    monkeypatch.setattr(service.worker.checkpoint, "write_kind", write_kind)
    done: list[Future[None]] = []
    with ThreadPoolExecutor() as threads:
        with pytest.raises(FileNotFoundError):
            sleeper.save(Trainer("sleeper"), {"who": "sleeper"})  # type: ignore[arg-type]
        woken.set()
        done[0].result(60)
    newest = successor.newest()
    assert newest is not None
    assert (newest / "state.json").read_text() == '{"who": "successor"}'
    assert [(newest / part / "who").read_text() for part in ("trainer", "drafter")] == ["successor", "successor"]


def test_asleep_while_it_opens_the_run(bench: Bench) -> None:
    """Then it knows an older checkpoint's recent rollouts than its successor's, whose files it must leave alone."""
    bench.begin()
    bench.post("first")
    bench.drain(bench.worker())
    recent = bench.layout.worker("default") / "recent"
    for number in itertools.count(1):
        handover = Handover(bench, str(number))
        files: set[str] = set()

        def take_over(handover: Handover = handover, files: set[str] = files) -> None:
            handover.take_over(recent_tokens=100_000)
            files |= {path.name for path in recent.iterdir()}

        with pytest.MonkeyPatch.context() as patch, handover.waking_up():
            done = sleep_before_step(patch, STEPS_OF_OPENING, number, take_over)
            bench.worker(recent_tokens=100_000)
        assert files <= {path.name for path in recent.iterdir()}, f"asleep before step {number}: {done}"
        if handover.successor is None:
            break
    assert {name for _, name in STEPS_OF_OPENING} <= set(done), done


@pytest.mark.parametrize("step", [(service.worker.lineage, "write_kind"), (RecentRollouts, "add")])
def test_what_the_successor_says_of_a_batch_stands(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, step: tuple[Any, str]
) -> None:
    """Nor does a paused worker set the gauges: counters that go back are taken for a restart by Prometheus."""
    begin_eager(bench)
    bench.post("asleep")
    handover = Handover(bench, "it")
    sleeper = handover.sleeper(**EAGER)
    said: list[Any] = []

    def take_over() -> None:
        handover.take_over(**EAGER)
        said.extend((bench.store.scores(), bench.redis.hgetall(Keys("default").worker)))

    with handover.waking_up():
        sleep_before_step(monkeypatch, [step], 1, take_over)
        bench.drain(sleeper)
    assert set(said[0]) == set(bench.posted)
    assert [bench.store.scores(), bench.redis.hgetall(Keys("default").worker)] == said


def test_what_won_against_a_drafter_that_is_no_longer_served_is_not_published(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The candidate of a worker that slept, when it wakes up; or any, when a person rolls back while it is judged."""
    registry = begin_eager(bench)
    bench.post("asleep")
    handover = Handover(bench, "it")
    sleeper = handover.sleeper(**EAGER)
    with handover.waking_up():
        sleep_before_step(monkeypatch, [(service.worker.lineage, "write_kind")], 1, lambda: handover.take_over(**EAGER))
        bench.drain(sleeper)
    assert handover.successor is not None
    assert_each_was_published_over_what_was_served(registry)
    oldest = registry.versions("default")[0]
    bench.post("judged")
    sleep_before_step(
        monkeypatch,
        [(service.worker.lineage, "write_kind")],
        1,
        lambda: registry.rollback("default", oldest, "by hand"),
    )
    worker = bench.worker(**EAGER)
    bench.drain(worker)
    latest = registry.latest("default")
    assert latest is not None
    assert (latest.version, latest.reason) == (oldest, "by hand")
    monkeypatch.undo()  # of the gate's rule as well, so a look may not be enough
    published = len(parents(registry))
    for number in range(12):
        bench.post(f"next {number}")
        bench.drain(worker)
        if parents(registry)[published:]:
            break
    assert parents(registry)[published:] == [oldest]


def test_asleep_anywhere_in_a_turn(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Claim, score, train, judge, checkpoint, publish, acknowledge: with every candidate promoted."""
    print(f"DRAFTALIGN_CHAOS_SEED={SEED} DRAFTALIGN_HANDOVERS={HANDOVERS}")
    monkeypatch.setattr(service.storage.layout, "LOCK_SECONDS", 0.05)
    monkeypatch.setattr(Controller, "decide", lambda *_, **__: Decision(Action.TRAIN, "each turn has all steps"))
    registry = begin_eager(bench)

    def turn(number: int) -> list[str]:
        """Sleep before that step of a turn; returns the names of all."""
        bench.post(f"{number}/asleep")
        handover = Handover(bench, str(number))
        sleeper = handover.sleeper(**EAGER)
        before = registry.latest("default")
        with pytest.MonkeyPatch.context() as patch, handover.waking_up():
            done = sleep_before_step(patch, STEPS_OF_A_TURN, number, lambda: handover.take_over(**EAGER))
            bench.drain(sleeper)
        where = f"asleep before step {number}: {done[max(0, number - 4) : number]}"
        bench.post(f"{number}/after")
        with contextlib.nullcontext() if handover.successor is None else contextlib.suppress(CheckpointSuperseded):
            bench.drain(handover.successor or sleeper)
        bench.drain(bench.worker(**EAGER))
        assert {bench.state(b) for b in bench.posted} == {"trained"}, where
        assert bench.totals()["batches"] == len(bench.posted), where
        assert set(bench.store.scores()) == set(bench.posted), where
        assert bench.queue.depth() == (0, 0), where
        latest = registry.latest("default")
        assert before is not None
        assert latest is not None
        assert latest.sequence > before.sequence, where
        for version in registry.versions("default"):
            registry.verify("default", version)
        return done

    steps = turn(1 << 30)
    assert {name for _, name in STEPS_OF_A_TURN} <= set(steps), steps
    numbers = list(range(1, len(steps) + 1))
    for number in sorted(random.Random(SEED).sample(numbers, HANDOVERS)) if HANDOVERS else numbers:
        turn(number)
