"""A real cluster of three primaries, and a real Sentinel: one URL, and the queue works through both clients."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.service.failover_fixtures import Cluster, Sentinels, until
from helpers.service.storage_fixtures import RolloutQueue
from redis.exceptions import ConnectionError as RedisConnectionError

from service.cli.checks import check_redis, checked_redis
from service.errors import ConfigurationError
from service.storage.queue.keys import Keys
from service.storage.queue.lease import Leases
from service.storage.queue.rollout_queue import AsyncRolloutQueue, Batch
from service.storage.ready import WriteTest, connect, connect_async
from service.storage.reports.store import AsyncStore


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[str]:
    with Cluster(tmp_path, replicas=False) as servers:
        yield servers.url


@pytest.fixture
def sentinel(tmp_path: Path) -> Iterator[str]:
    with Sentinels(tmp_path) as servers:
        yield f"{servers.url}/2"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["cluster", "sentinel"])
def test_a_runs_life_behind_one_url(kind: str, request: pytest.FixtureRequest) -> None:
    url = request.getfixturevalue(kind)
    check_redis(url)
    with connect(url) as client:
        for run in ("alpha", "beta", "gamma", "delta"):  # in slots of more than one primary
            queue = RolloutQueue(client, run)
            queue.ensure_group()
            assert asyncio.run(_enqueue(url, run)) == ["accepted", "accepted", "duplicate"]
            first, second = queue.claim("w", 1000, 0.0)
            queue.heartbeat("w", [first.entry_id, second.entry_id])
            assert queue.ack(first, "trained")
            assert queue.dead_letter(second, "cannot be read")
            assert queue.depth() == (0, 0)
            assert queue.counters()["dead_total"] == 1
            lease = Leases(client)
            assert lease.hold(run)
            assert asyncio.run(_forget(url, run))
            assert not list(client.scan_iter(match=f"da:{{{run}}}:*"))


async def _enqueue(url: str, run: str) -> list[str]:
    async with connect_async(url) as client:
        await WriteTest(client).check()
        queue = AsyncRolloutQueue(client, run)
        batches = [Batch(f"{n:032x}", f"{n:032x}.b", 100, 10, 2, n, n, (f"r{n}",)) for n in (1, 2, 2)]
        return [(await queue.enqueue(b, max_items=9, max_bytes=10_000)).outcome for b in batches]


async def _forget(url: str, run: str) -> int | None:
    async with connect_async(url) as client:
        return await AsyncStore(client, run).forget()


@pytest.mark.slow
def test_a_cluster_that_lacks_a_primary_counts_as_away_also_in_pipelines(tmp_path: Path) -> None:
    """redis-py raises what is no RedisError then, and for CLUSTERDOWN one that would be answered with 500."""
    with Cluster(tmp_path, replicas=False) as servers, connect(servers.url) as client:
        away = servers.primary_of(Keys("alpha").queue)
        # Of a run whose primary lives: it answers CLUSTERDOWN.
        other = next(k for n in range(99) if servers.primary_of(k := Keys(f"run{n}").queue) is not away)
        left = next(node for node in servers.nodes if node is not away)
        away.kill()
        until(lambda: left.client.cluster("INFO")["cluster_state"] == "fail", "the others miss it")
        for key, transaction in itertools.product((Keys("alpha").queue, other), (False, True)):
            with client.pipeline(transaction=transaction) as pipe:
                pipe.exists(key)
                with pytest.raises(RedisConnectionError):
                    pipe.execute()
            piped = _piped(servers.url, key, transaction=transaction)
            with pytest.raises(RedisConnectionError):
                asyncio.run(piped)
        for key in (Keys("alpha").queue, other):
            with pytest.raises(RedisConnectionError):
                client.exists(key)


async def _piped(url: str, key: str, *, transaction: bool) -> None:
    async with connect_async(url) as client, client.pipeline(transaction=transaction) as pipe:
        pipe.exists(key)
        await pipe.execute()


@pytest.mark.parametrize(
    ("url", "named"),
    [
        ("redis+cluster://:p@h:1/3", "a cluster has no databases"),
        ("redis+sentinel://:p@h:1", "ends with /SERVICE_NAME"),
        ("redis+sentinel://:p@h:1/mine/x", "ends with /SERVICE_NAME"),
        ("redis+cluster://:p@h:1,:2", "must begin with one of"),
    ],
)
def test_a_url_that_names_none_is_refused_without_its_password(url: str, named: str) -> None:
    with pytest.raises(ConfigurationError, match=named) as caught:
        checked_redis(url)
    assert ":p@" not in str(caught.value)


def test_a_place_shows_all_members_and_no_secret() -> None:
    assert checked_redis("rediss+sentinel://u:p%40@a:1,b/mine") == "rediss+sentinel://a:1,b:26379/mine"
    with pytest.raises(ConfigurationError, match=r"no Redis answers at redis.cluster://127.0.0.1:1: "):
        check_redis("redis+cluster://127.0.0.1:1")
