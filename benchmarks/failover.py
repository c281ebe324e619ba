"""How many acknowledged batches a failover loses: kill -9 of a real primary while clients queue batches.

The queue is the shipped `AsyncRolloutQueue`, through the shipped client, on servers of this machine: a cluster of three
primaries with a replica each, or a primary and its replica under three Sentinels. A batch is lost if its enqueue was
answered, and the primary that took over does not know it. Redis replicates asynchronously, so some may be.

    python benchmarks/failover.py --failovers 10
    python benchmarks/failover.py --failovers 3 --settings       what servers under Sentinels lose by their settings
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]  # in this order: tests/ has a folder of each package's name

from helpers.service.failover_fixtures import Cluster, Sentinels, Server, Servers, until  # noqa: E402 - the path must be set first
from redis import Redis  # noqa: E402
from redis.asyncio.retry import Retry  # noqa: E402
from redis.backoff import ExponentialBackoff  # noqa: E402
from redis.exceptions import RedisError  # noqa: E402

from service.storage.queue.keys import Keys  # noqa: E402
from service.storage.queue.rollout_queue import AsyncRolloutQueue, Batch  # noqa: E402
from service.storage.ready import connect_async  # noqa: E402

CLIENTS = 8


async def one_failover(servers: Servers, run: str, seed: int) -> tuple[int, int, float]:
    """Batches acknowledged before the kill, how many of them are lost, and seconds until the next is acknowledged."""
    rng = random.Random(seed)
    retry = Retry(ExponentialBackoff(cap=0.2, base=0.05), 2)  # as the API's
    async with connect_async(servers.url, socket_timeout=5.0, socket_connect_timeout=2.0, retry=retry) as client:
        queue = AsyncRolloutQueue(client, run)
        answered: dict[str, float] = {}

        async def send(number: int, until: asyncio.Event) -> None:
            count = 0
            while not until.is_set():
                name = f"{seed:08x}{number:08x}{count:016x}"
                batch = Batch(name, f"{name}.b", 100, 10, 2, 0, 0, (name,))
                try:
                    await queue.enqueue(batch, max_items=1 << 30, max_bytes=1 << 40)
                except RedisError:
                    await asyncio.sleep(0.05)
                else:
                    answered[name] = time.monotonic()
                    count += 1

        over = asyncio.Event()
        senders = [asyncio.create_task(send(number, over)) for number in range(CLIENTS)]
        while len(answered) < 200:  # noqa: ASYNC110 - polled, so that the senders pay for nothing
            await asyncio.sleep(0.01)
        await asyncio.sleep(rng.uniform(0.0, 0.5))
        primary = servers.primary_of(Keys(run).queue)
        primary.kill()
        killed = time.monotonic()
        before = [name for name, at in answered.items() if at < killed]
        while max(answered.values()) < killed + 0.2:  # noqa: ASYNC110 - later than the dead primary's last answers
            await asyncio.sleep(0.01)
        away = min(at for at in answered.values() if at > killed + 0.2) - killed
        over.set()
        await asyncio.gather(*senders)
        lost = 0
        for name in answered:
            lost += not await client.exists(Keys(run).batch(name))
        await client.delete(Keys(run).queue)
    await asyncio.to_thread(servers.bring_back, primary)
    return len(before), lost, away


def _write(server: Server, names: list[str]) -> list[str]:
    """The names that the server acknowledged: it may refuse."""
    taken = []
    for name in names:
        with contextlib.suppress(RedisError):
            server.client.set(name, 1)
            taken.append(name)
    return taken


def restarted_at_once(_servers: Sentinels, first: Server, _second: Server) -> list[str]:
    """The primary is killed and started again before the Sentinels miss it. Returns the acknowledged writes' names."""
    names = _write(first, [f"a{n}" for n in range(100)])
    first.wait_for_replica()
    first.kill()
    first.start()
    return names


def second_dies_too(servers: Sentinels, first: Server, second: Server) -> list[str]:
    """The second is killed while it is alone, and the first comes back before it."""
    names = _write(first, [f"a{n}" for n in range(100)])
    first.wait_for_replica()
    servers.kill(first)
    names += _write(second, [f"b{n}" for n in range(100)])
    until(lambda: servers.leader() == second.port, "the Sentinels agree")
    second.kill()
    first.start()
    until(lambda: servers.leader() == first.port and first.is_primary(), "the first leads again")
    second.start()
    return names


def stands_still(_servers: Sentinels, first: Server, _second: Server) -> list[str]:
    """The primary is stopped for 3 s and goes on, while 8 clients that are connected to it write."""
    over, taken = threading.Event(), list[str]()

    def write(client: int) -> None:
        with Redis(port=first.port, socket_timeout=30.0) as connection:
            count = 0
            while not over.is_set():
                name = f"{client}.{count}"
                try:
                    connection.set(name, 1)
                    taken.append(name)
                except RedisError:
                    time.sleep(0.01)
                count += 1

    writers = [threading.Thread(target=write, args=(n,)) for n in range(CLIENTS)]
    for writer in writers:
        writer.start()
    time.sleep(1.0)
    first.signal(signal.SIGSTOP)
    time.sleep(3.0)
    first.signal(signal.SIGCONT)
    time.sleep(12.0)  # Sentinels turn a primary that was replaced into a replica after 8 to 10 s
    over.set()
    for writer in writers:
        writer.join()
    return taken


#: What happens, whether there is an append-only file, min-replicas-to-write and down-after-milliseconds.
SETTINGS = [
    (restarted_at_once, "no", "1", 5000),
    (restarted_at_once, "yes", "1", 5000),
    (second_dies_too, "no", "0", 5000),
    (second_dies_too, "no", "1", 5000),
    (second_dies_too, "yes", "0", 5000),
    (second_dies_too, "yes", "1", 5000),
    (stands_still, "yes", "0", 1000),
    (stands_still, "yes", "1", 1000),
    (stands_still, "yes", "0", 5000),
    (stands_still, "yes", "1", 5000),
]


def settings(tries: int) -> None:
    """Print what is lost under Sentinels with each of `SETTINGS`: acknowledged writes, in each of so many tries."""
    print("what happens       appendonly  min-replicas-to-write  down-after  lost of acknowledged, by try")
    for happens, appendonly, least, down_after_ms in SETTINGS:
        found = []
        for _ in range(tries):
            with tempfile.TemporaryDirectory() as place, Sentinels(Path(place), down_after_ms) as servers:
                servers.set(appendonly=appendonly, min_replicas_to_write=least)
                first = servers.primary_of("")
                names = happens(servers, first, servers.replica_of(first))
                servers.settle()
                client = servers.primary_of("").client
                found.append(f"{sum(not client.exists(name) for name in names)} of {len(names)}")
        print(f"{happens.__name__:17}  {appendonly:10}  {least:21}  {down_after_ms:10}  {', '.join(found)}", flush=True)


def main() -> None:
    """Print a table: one line for each kind of Redis."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--failovers", type=int, default=10)
    parser.add_argument("--settings", action="store_true", help="what Sentinels' servers lose by their settings")
    asked = parser.parse_args()
    if asked.settings:
        settings(asked.failovers)
        return
    print("kind      failovers  acknowledged  lost  failovers that lost any  most lost  seconds away (median, most)")
    for kind in ("cluster", "sentinel"):
        with tempfile.TemporaryDirectory() as place:
            made = Cluster(Path(place), replicas=True) if kind == "cluster" else Sentinels(Path(place))
            with made as servers:
                found = [asyncio.run(one_failover(servers, f"r{n}", n)) for n in range(asked.failovers)]
        before, lost, away = (list(column) for column in zip(*found, strict=True))
        print(
            f"{kind:9} {len(found):9}  {sum(before):12}  {sum(lost):4}  {sum(n > 0 for n in lost):23}  {max(lost):9}"
            f"  {sorted(away)[len(away) // 2]:.1f}, {max(away):.1f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
