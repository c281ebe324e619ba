"""While engines count otherwise than replay says, the worker scores. It trains and publishes nothing."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from typing import Any

import pytest
import redis.asyncio
from helpers.worker.record_fixtures import acceptance
from helpers.worker.worker_fixtures import Bench

from service.monitor.records import StepSample
from service.storage.registry import Registry
from service.storage.reports.store import AsyncStore
from service.worker import journal
from service.worker.loop import RunWorker

#: Gains that show at once.
EAGER: dict[str, Any] = {"gate_min_gain": 0.005, "recent_tokens": 100_000, "learning_rate": 5e-3}
#: Most batches until a gain is shown.
_BATCHES = 12


def report(bench: Bench, version: str, rounds: int, kept: float, steps: Sequence[StepSample] = ()) -> None:
    """An engine has counted these rounds; of four drafts each kept `kept` on average."""
    accepted = int(kept * rounds)
    counts = {"rounds": rounds, "accepted_tokens": accepted, "drafted_tokens": 4 * rounds}
    named = {"reporter": "e", "drafter_version": version, "policy_version": 0, "created": time.time()}

    async def book() -> None:
        client = redis.asyncio.Redis.from_url(bench.redis_url)
        counted = acceptance(named | counts | {"emitted_tokens": rounds + accepted})
        await AsyncStore(client, "default").book(counted, steps)
        await client.aclose()

    asyncio.run(book())


def publish_another(bench: Bench, worker: RunWorker, registry: Registry, name: str) -> int:
    """Post batches until another version is served; returns how many it took."""
    before = registry.versions("default")
    for n in range(_BATCHES):
        bench.post(f"{name} {n}", rollouts=64)
        bench.drain(worker)
        if registry.versions("default") != before:
            return n + 1
    raise AssertionError(f"nothing was published in {_BATCHES} batches")


def test_nothing_is_published_while_engines_and_replay_disagree_and_it_ends_by_itself(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    bench.begin()
    worker, registry = bench.worker(**EAGER), Registry(bench.layout)
    posted = publish_another(bench, worker, registry, "before")
    served = registry.latest("default")
    assert served is not None
    report(bench, served.version, 3000, 3.6)
    for n in range(2):
        bench.post(f"scored {n}", rollouts=64)
    bench.drain(worker)  # before it was replayed nothing can be said of it
    versions, trainer = registry.versions("default"), worker.learner.lineage.trainer
    assert trainer is not None
    windows, known = trainer.windows, worker.learner.judge.controller.trainings
    worker.learner.judge.controller.deferred = 3
    with caplog.at_level(logging.WARNING, "draftalign.worker"):
        for n in range(3):
            batch = bench.post(f"held {n}", rollouts=64)
            bench.drain(worker)
            assert bench.state(batch) == "trained", "scored, and kept for later"
            assert bench.store.scores()[batch].action == "idle"
    assert trainer.windows == windows, "such rollouts may teach what has to be unlearnt"
    assert worker.learner.judge.controller.trainings == known
    assert worker.learner.judge.controller.deferred == 0, "what was passed over before is over"
    assert "nothing is trained while nothing may be published" in str(bench.store.worker().action_reason)
    assert registry.versions("default") == versions
    said = [record.message for record in caplog.records if "nothing is published" in record.message]
    assert len(said) == 1, "said once"
    assert "more than the drafter could accept" in said[0]
    assert len(bench.store.scores()) == posted + 5
    scored = [s for s in bench.store.scores().values() if s.drafter_version == served.version]
    sums = [one.served for one in scored if one.served is not None]
    replayed = sum(s.tokens for s in sums) / sum(s.rounds for s in sums)
    before = int(3000 * 3.6)
    counts = 40_000
    rounds, accepted = 3000 + counts, before + int((replayed - 1) * counts)
    report(bench, served.version, rounds, accepted / rounds)
    publish_another(bench, worker, registry, "after")


def test_the_worker_trains_for_what_engines_draft_and_says_so(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine at large batches takes steps without drafts: no drafter saves it any time."""
    monkeypatch.setattr(journal, "_LEAST_WINDOW_SECONDS", 0.0)
    bench.begin()
    worker = bench.worker(**EAGER)
    for n in range(10):
        batch = bench.post(f"batch {n}", rollouts=16)
        report(bench, "v000001", 1, 1.0, [StepSample(512, 0, 100 * n + 1, 10.0 * n + 1)])
        bench.drain(worker)
    assert bench.store.scores()[batch].action == "idle"
    said = str(bench.store.worker().action_reason)
    assert "engines spend 0% of their time in rounds with drafts" in said
    assert worker.learner.judge.controller.trainings < 6
