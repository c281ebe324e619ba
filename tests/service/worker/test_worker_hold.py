"""While engines count otherwise than replay says, the worker scores, trains and checkpoints, and publishes nothing."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

import pytest
import redis.asyncio
from record_fixtures import acceptance
from worker_fixtures import Bench

from service.storage.registry import Registry
from service.storage.reports import AsyncStore

#: Publishes at the first look that shows a gain.
EAGER: dict[str, Any] = {"gate_min_gain": 0.0, "gate_rollouts": 2, "recent_tokens": 400}


def report(bench: Bench, version: str, rounds: int, kept: float) -> None:
    """An engine has counted so many rounds, each of which kept so many of four drafts on average."""
    accepted = int(kept * rounds)
    counts = {"rounds": rounds, "accepted_tokens": accepted, "drafted_tokens": 4 * rounds}
    named = {"reporter": "e", "drafter_version": version, "policy_version": 0, "created": time.time()}

    async def book() -> None:
        client = redis.asyncio.Redis.from_url(bench.redis_url)
        await AsyncStore(client, "default").book(acceptance(named | counts | {"emitted_tokens": rounds + accepted}))
        await client.aclose()

    asyncio.run(book())


def test_nothing_is_published_while_engines_and_replay_disagree_and_it_ends_by_itself(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    bench.begin()
    worker, registry = bench.worker(**EAGER), Registry(bench.layout)
    for n in range(3):
        bench.post(f"before {n}")
        bench.drain(worker)
    published = registry.versions("default")
    assert len(published) > 1
    for n in range(2):  # replay of what is served now
        bench.post(f"scored {n}")
    served = registry.latest("default")
    assert served is not None
    report(bench, served.version, 3000, 3.6)
    with caplog.at_level(logging.WARNING, "draftalign.worker"):
        for n in range(3):
            batch = bench.post(f"held {n}")
            bench.drain(worker)
            assert bench.state(batch) == "trained", "it goes on learning"
    assert registry.versions("default")[-1] == served.version
    said = [record.message for record in caplog.records if "nothing is published" in record.message]
    assert len(said) == 1, "said once"
    assert "more than the drafter could accept" in said[0]
    assert len(bench.store.scores()) == 8
    scored = [s for s in bench.store.scores().values() if s.drafter_version == served.version]
    sums = [one.served for one in scored if one.served is not None]
    replayed = sum(s.tokens for s in sums) / sum(s.rounds for s in sums)
    before = int(3000 * 3.6)
    counts = 40_000
    rounds, accepted = 3000 + counts, before + int((replayed - 1) * counts)
    report(bench, served.version, rounds, accepted / rounds)
    bench.post("after")
    bench.drain(worker)
    assert registry.versions("default")[-1] != served.version
