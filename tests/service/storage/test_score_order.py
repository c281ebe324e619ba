"""The batches that arrived last are kept, also where the clock of Redis stands still."""

from __future__ import annotations

import asyncio

import pytest
import redis.asyncio
from helpers.service.storage_fixtures import Store
from helpers.worker.record_fixtures import score
from redis import Redis

from service.storage.reports import store as reports
from service.storage.reports.store import AsyncStore


@pytest.mark.parametrize(
    "entries",
    [
        [f"{1000 + n}-0" for n in range(40)],
        [f"1732660000000-{n}" for n in range(40)],  # the clock was set back: until it has caught up, one millisecond
        [*(f"1732660000000-{n}" for n in range(30)), *(f"1732660000001-{n}" for n in range(10))],
    ],
    ids=["the clock goes on", "it stands", "it goes on again"],
)
def test_the_last_batches_are_those_of_the_highest_ids(
    redis_client: Redis, redis_url: str, monkeypatch: pytest.MonkeyPatch, entries: list[str]
) -> None:
    monkeypatch.setattr(reports, "RECENT_SCORES", 8)
    store = Store(redis_client, "default")
    for n, entry in enumerate(entries):  # names in another order than arrivals
        store.put_score(f"{(7 * n) % 40:032x}", score({"policy_version": n, "entry_id": entry}))

    async def newest() -> list[int | None]:
        client = redis.asyncio.Redis.from_url(redis_url)
        found = await AsyncStore(client, "default").recent_scores()
        await client.aclose()
        return [record.policy_version for record in found.values()]

    assert asyncio.run(newest()) == [*range(32, 40)]
