"""Who holds a run: takers, renewals, the dead of this machine, deletions."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import redis.asyncio
from redis import Redis

from service.storage.queue import lease
from service.storage.queue.lease import WORKERS, Leases

KEY = Leases.key("default")


@pytest.fixture
def client(redis_client: Redis) -> Any:
    return redis_client  # redis-py types every reply as "maybe awaitable"


def asked(url: str, act: Callable[[redis.asyncio.Redis, str], Awaitable[Any]]) -> Any:
    async def ask() -> Any:
        async with redis.asyncio.Redis.from_url(url) as made:
            return await act(made, "default")

    return asyncio.run(ask())


def dead_pid() -> int:
    with subprocess.Popen([sys.executable, "-S", "-c", ""]) as process:
        process.wait()
    return process.pid


def test_one_worker_has_a_run_until_it_gives_it_back(client: Any) -> None:
    mine, other = Leases(client), Leases(client)
    assert not mine.is_anothers("default"), "nobody's"
    assert [mine.hold("default"), other.hold("default"), mine.hold("other")] == [True, False, True]
    assert [mine.is_anothers("default"), other.is_anothers("default")] == [False, True]
    other.give_back("default")
    assert client.get(KEY).decode() == mine.holder
    assert 0 < client.pttl(KEY) <= 15_000
    client.pexpire(KEY, 1_000)
    assert mine.hold("default")
    assert client.pttl(KEY) > 1_000, "it is renewed"
    mine.give_back("default")
    assert client.get(KEY) is None
    assert other.hold("default")


@pytest.mark.parametrize("dead", [True, False])
@pytest.mark.parametrize("here", [True, False])
def test_the_lease_of_a_process_that_has_ended_here_is_taken_at_once(client: Any, dead: bool, here: bool) -> None:
    machine = lease._machine() if here else "elsewhere"
    holder = f"{machine}/{dead_pid() if dead else os.getpid()}/a"
    client.set(KEY, holder, px=10_000)
    client.hset(WORKERS, holder, f"{client.time()[0] * 1000} 3")
    mine = Leases(client)
    assert mine.hold("default") == (dead and here)
    assert client.get(KEY).decode() == (mine.holder if dead and here else holder)
    assert mine.others(0) == ({} if dead and here else {holder: 3})


@pytest.mark.parametrize("holder", ["a", "{}/x/a", "{}//a"])
def test_a_holder_of_another_form_is_not_taken_for_dead(client: Any, holder: str) -> None:
    client.set(KEY, holder.format(lease._machine()))
    assert not Leases(client).hold("default")


def test_where_nobody_knows_the_machine_nobody_is_taken_for_dead(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path) -> Path:
        raise OSError("no /proc here")

    monkeypatch.setattr(Path, "readlink", refuse)
    gone = Leases(client)
    client.set(KEY, gone.holder.replace(f"/{os.getpid()}/", f"/{dead_pid()}/"))
    assert not Leases(client).hold("default")


def test_workers_know_each_other_by_their_newest_notes(client: Any) -> None:
    a, b = Leases(client), Leases(client)
    assert [a.others(4), b.others(1), a.others(5), b.others(2)] == [{}, {a.holder: 4}, {b.holder: 1}, {a.holder: 5}]
    old = int(client.hget(WORKERS, a.holder).split()[0]) - 16_000
    client.hset(WORKERS, a.holder, f"{old} 5")
    assert b.others(2) == {}
    assert client.hkeys(WORKERS) == [b.holder.encode()]
    c = Leases(client)
    assert [c.others(7), a.others(1)] == [{b.holder: 2}, {b.holder: 2, c.holder: 7}]
    b.leave()
    assert a.others(1) == {c.holder: 7}


def test_a_run_that_is_deleted_is_no_workers(client: Any, redis_url: str) -> None:
    mine = Leases(client)
    assert not asked(redis_url, lease.is_worked_on)
    assert mine.hold("default")
    assert asked(redis_url, lease.is_worked_on)
    assert not asked(redis_url, lease.take_from_workers)
    asked(redis_url, lease.give_back)
    assert client.get(KEY).decode() == mine.holder, "only its own is given back"
    mine.give_back("default")
    for _ in range(2):  # it goes on after an interruption
        assert asked(redis_url, lease.take_from_workers)
    assert 0 < client.ttl(KEY) <= 600
    assert not asked(redis_url, lease.is_worked_on)
    assert [mine.hold("default"), mine.is_anothers("default")] == [False, True]
    asked(redis_url, lease.give_back)
    assert mine.hold("default")
