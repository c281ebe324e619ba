"""The queue against a real server: de-duplication, bounds, delivery, death."""

from __future__ import annotations

import asyncio
import threading
import time
from dataclasses import replace
from typing import Any

import pytest
import redis.asyncio
from helpers.service.storage_fixtures import RolloutQueue
from redis import Redis

from service.storage.queue.dead import DeadLetters
from service.storage.queue.deliveries import KILLER, Entry
from service.storage.queue.keys import ENDED_SECONDS, GROUP, REMEMBERED_BYTES, DeathCode, Keys
from service.storage.queue.rollout_queue import COUNTERS, AsyncRolloutQueue, Batch, Enqueued, fair_bound


def make_batch(number: int, *, size: int = 100, tokens: int = 10, ids: tuple[str, ...] | None = None) -> Batch:
    return Batch(
        batch_id=f"{number:032x}",
        blob=f"{number:032x}.{number:032x}.safetensors",
        bytes=size,
        tokens=tokens,
        rollouts=2,
        policy_version=number,
        policy_version_max=number + 1,
        rollout_ids=ids or (f"r{number}a", f"r{number}b"),
    )


class Bench:
    """A queue seen from both sides."""

    def __init__(self, url: str, client: Redis, remembered_bytes: int = REMEMBERED_BYTES) -> None:
        self.url = url
        self.client: Any = client
        self.remembered_bytes = remembered_bytes
        self.worker = RolloutQueue(client, "default", remembered_bytes)
        self.worker.ensure_group()

    def put(self, *batches: Batch, max_items: int = 100, max_bytes: int = 10_000) -> Enqueued:
        async def send() -> Enqueued:
            async with redis.asyncio.Redis.from_url(self.url) as client:
                queue = AsyncRolloutQueue(client, "default", self.remembered_bytes)
                for batch in batches:
                    outcome = await queue.enqueue(batch, max_items=max_items, max_bytes=max_bytes)
                return outcome

        return asyncio.run(send())

    def discard(self, batch_id: str) -> str | None:
        async def send() -> str | None:
            async with redis.asyncio.Redis.from_url(self.url) as client:
                letters = DeadLetters(client, AsyncRolloutQueue(client, "default", self.remembered_bytes))
                return (await letters.discard(batch_id))[0]

        return asyncio.run(send())

    def claim(self, consumer: str = "w", max_tokens: int = 1000, idle: float = 1000.0) -> list[Entry]:
        return self.worker.claim(consumer, max_tokens, idle)


@pytest.fixture
def bench(redis_url: str, redis_client: Redis) -> Bench:
    return Bench(redis_url, redis_client)


def test_an_entry_carries_what_was_enqueued_and_ends_with_its_ack(bench: Bench) -> None:
    assert bench.put(make_batch(7)).outcome == "accepted"
    assert bench.worker.depth() == (1, 100)
    (entry,) = bench.claim()
    assert (entry.batch_id, entry.blob) == (make_batch(7).batch_id, make_batch(7).blob)
    assert (entry.bytes, entry.tokens, entry.rollouts) == (100, 10, 2)
    assert (entry.policy_version, entry.policy_version_max, entry.deliveries) == (7, 8, 1)
    assert bench.worker.depth() == (1, 100), "pending entries are still in the queue"
    assert bench.worker.ack(entry, "trained")
    assert bench.worker.depth() == (0, 0)
    record = bench.worker.batch(entry.batch_id)
    assert record is not None
    assert record["state"] == "trained"
    assert bench.client.xlen(Keys("default").queue) == 0
    assert 0 < bench.client.ttl(Keys("default").batch(entry.batch_id)) <= ENDED_SECONDS
    assert 0 < bench.client.ttl(Keys("default").rollout("r7a")) <= ENDED_SECONDS


def test_a_second_ack_changes_nothing(bench: Bench) -> None:
    bench.put(make_batch(1))
    (entry,) = bench.claim()
    assert bench.worker.ack(entry)
    assert not bench.worker.ack(entry)
    assert not bench.worker.dead_letter(entry, "too late")
    assert bench.worker.counters()["acked_total"] == 1
    assert bench.worker.counters()["dead_total"] == 0
    assert bench.worker.depth() == (0, 0)


def test_a_duplicate_is_recognised_while_queued_and_after_its_end(bench: Bench) -> None:
    bench.put(make_batch(1))
    assert bench.put(make_batch(1)) == Enqueued("duplicate", "queued")
    (entry,) = bench.claim()
    bench.worker.ack(entry, "skipped")
    assert bench.put(make_batch(1)) == Enqueued("duplicate", "skipped")
    assert bench.worker.counters()["duplicates_total"] == 2
    assert bench.worker.counters()["accepted_total"] == 1


def commands_done(client: Any) -> int:
    """Without what each new connection says of itself."""
    of_clients = ("info", "hello", "client|setinfo", "select", "auth")
    found = client.info("commandstats").items()
    return sum(one["calls"] for name, one in found if name.removeprefix("cmdstat_") not in of_clients)


def test_an_enqueue_is_few_commands_however_many_rollouts_it_names(bench: Bench) -> None:
    """The script, five in it, and two more for every further thousand rollouts, after a death too."""
    bench.put(make_batch(1))  # it loads the script
    assert bench.worker.dead_letter(bench.claim()[0], "broken")
    cost = {}
    for number, rollouts in ((2, 1), (3, 1000), (4, 2500)):
        before = commands_done(bench.client)
        bench.put(make_batch(number, ids=tuple(f"{number}-{n}" for n in range(rollouts))))
        cost[rollouts] = commands_done(bench.client) - before
    assert cost == {1: 6, 1000: 6, 2500: 10}
    assert len(bench.client.keys(Keys("default").rollout("*"))) == 2 + 1 + 1000 + 2500


def test_after_the_newest_letter_is_gone_the_one_before_says_why_a_batch_died(bench: Bench) -> None:
    bench.put(make_batch(1), make_batch(2))
    for number, entry in enumerate(bench.claim()):
        assert bench.worker.dead_letter(entry, f"reason {number}")

    async def discard(number: int) -> None:
        async with redis.asyncio.Redis.from_url(bench.url) as client:
            await DeadLetters(client, AsyncRolloutQueue(client, "default")).discard(make_batch(number).batch_id)

    asyncio.run(discard(2))
    assert bench.put(make_batch(3)) == Enqueued("accepted", "queued", None, 2, "reason 0")
    asyncio.run(discard(1))
    assert bench.put(make_batch(4)) == Enqueued("accepted", "queued", None, 2, "")


def test_of_many_rollouts_those_that_came_before_are_told_by_their_place(bench: Bench) -> None:
    bench.put(make_batch(1, ids=tuple(f"r{n}" for n in range(2500))))
    ids = tuple(f"r{n}" for n in range(990, 1010)) + tuple(f"new{n}" for n in range(2000)) + ("r2499",)
    assert bench.put(make_batch(2, ids=ids)).known == 21
    entries = bench.claim()
    assert list(entries[1].known) == [*range(20), 2020]
    owner = {name: bench.client.get(Keys("default").rollout(name)).decode() for name in ("r990", "new0", "new1999")}
    assert owner == {"r990": f"{1:032x}", "new0": f"{2:032x}", "new1999": f"{2:032x}"}


def test_counts_of_terabytes_are_exact(bench: Bench) -> None:
    size = 3_000_000_000_001
    for number in range(3):
        assert bench.put(make_batch(number, size=size), max_bytes=4 * size).outcome == "accepted"
    assert bench.worker.depth() == (3, 3 * size)
    full = bench.put(make_batch(9, size=2 * size), max_bytes=4 * size)
    assert full.held == (3, 3 * size, 6)


def test_the_newest_policy_is_that_of_the_batch_that_came_last_not_of_one_that_is_put_back(bench: Bench) -> None:
    latest = Keys("default").prefix + "latest_policy"
    bench.put(make_batch(7))
    (seven,) = bench.claim()
    assert bench.worker.dead_letter(seven, "it broke")
    bench.put(make_batch(3))  # a trainer that went back
    assert bench.client.get(latest) == b"4"

    async def put_back() -> Enqueued:
        async with redis.asyncio.Redis.from_url(bench.url) as client:
            queue = AsyncRolloutQueue(client, "default")
            letter = (await queue.batch(seven.batch_id) or {})["letter_id"]
            return await queue.enqueue(make_batch(7), max_items=9, max_bytes=9999, put_back=letter)

    assert asyncio.run(put_back()).outcome == "accepted"
    assert bench.client.get(latest) == b"4"
    came_again = bench.claim()[-1]
    assert (came_again.batch_id, came_again.belated) == (seven.batch_id, True)


def test_what_was_queued_uncounted_leaves_no_debt_behind(bench: Bench) -> None:
    """Another version counted it elsewhere; or a queue of that many more would never be full."""
    bench.put(make_batch(1), make_batch(2))
    bench.client.delete(Keys("default").held)
    bench.put(make_batch(3), make_batch(4))
    for entry in bench.claim():
        bench.worker.ack(entry)
    assert bench.worker.depth() == (0, 0)
    bench.put(make_batch(5))
    assert bench.worker.depth() == (1, 100)


def test_whoever_sends_the_next_batch_hears_how_many_died_and_why_the_newest_did(bench: Bench) -> None:
    assert (bench.put(make_batch(1)).dead_total, bench.put(make_batch(2)).last_dead_reason) == (0, "")
    for number, entry in enumerate(bench.claim()):
        bench.worker.dead_letter(entry, f"reason {number}")
    assert bench.put(make_batch(3)) == Enqueued("accepted", "queued", None, 2, "reason 1")
    assert bench.put(make_batch(3)) == Enqueued("duplicate", "queued", None, 2, "reason 1")


def test_a_batch_whose_file_was_lost_may_be_sent_again(bench: Bench) -> None:
    bench.put(make_batch(1))
    (entry,) = bench.claim()
    bench.worker.dead_letter(entry, "its file is gone", code="blob_missing")
    assert bench.put(make_batch(1)).outcome == "accepted"
    assert bench.client.ttl(Keys("default").batch(entry.batch_id)) == -1, "its record lives again"


def test_a_reason_is_for_people_and_lets_nothing_in_again(bench: Bench) -> None:
    bench.put(make_batch(1))
    (entry,) = bench.claim()
    bench.worker.dead_letter(entry, "blob_missing")
    assert bench.put(make_batch(1)).outcome == "duplicate"
    record = bench.worker.batch(entry.batch_id)
    assert record is not None
    assert record["code"] == "unusable"


@pytest.mark.parametrize("code", ["blob_missing", "blob_damaged", "unusable"])
def test_a_batch_that_was_discarded_is_a_duplicate_whatever_it_died_of(bench: Bench, code: DeathCode) -> None:
    bench.put(make_batch(1))
    (entry,) = bench.claim()
    bench.worker.dead_letter(entry, "bad", code=code)
    for _ in range(2):
        assert bench.discard(entry.batch_id) == "dead"
    record = bench.worker.batch(entry.batch_id)
    assert record is not None
    assert (record["reason"], record["code"]) == ("discarded: bad", "discarded")
    assert bench.put(make_batch(1)).outcome == "duplicate"


# --- what is remembered of batches that ended
def train(bench: Bench, *numbers: int, rollouts: int = 8, width: int = 36) -> None:
    """Send and end batches, one after the other."""
    for number in numbers:
        ids = tuple(f"{number}-{place}".rjust(width, "x") for place in range(rollouts))
        assert bench.put(make_batch(number, ids=ids)).outcome == "accepted"
        (entry,) = bench.claim()
        assert bench.worker.ack(entry)


def remembered(bench: Bench) -> int:
    return int(bench.client.hget(Keys("default").counters, "remembered_bytes") or 0)


def test_what_is_remembered_of_ended_batches_is_bounded_and_the_newest_are_known(
    redis_url: str, redis_client: Redis
) -> None:
    bench = Bench(redis_url, redis_client, 50_000)
    train(bench, *range(60))
    known = [bench.worker.batch(make_batch(number).batch_id) is not None for number in range(60)]
    assert 15 < sum(known) < 25
    assert known == sorted(known), "the newest are known"
    assert 45_000 < remembered(bench) <= 50_000
    keys = Keys("default")
    assert bench.client.llen(keys.prefix + "ended") == sum(known)
    assert len(bench.client.keys(keys.rollout("*"))) == 8 * sum(known)
    assert bench.put(make_batch(0)).outcome == "accepted", "forgotten"
    assert bench.put(make_batch(59)).outcome == "duplicate"


@pytest.mark.parametrize("rollouts", [1, 8, 64, 1024])
@pytest.mark.parametrize("width", [12, 36, 128])
def test_what_is_said_to_be_remembered_is_what_redis_takes(bench: Bench, rollouts: int, width: int) -> None:
    train(bench, 0, rollouts=rollouts, width=width)
    keys, batch_id = Keys("default"), make_batch(0).batch_id
    found = [keys.batch(batch_id), *bench.client.keys(keys.rollout("*"))]
    assert len(found) == 1 + rollouts
    # Beside a key's own bytes: its places in the tables of keys and of expiry times.
    taken = sum(bench.client.memory_usage(name, samples=0) + 48 for name in found)
    assert remembered(bench) == pytest.approx(taken, rel=0.35)


def test_small_batches_make_room_for_large_ones_and_a_lower_bound_is_reached(
    redis_url: str, redis_client: Redis
) -> None:
    bench = Bench(redis_url, redis_client, 60_000)
    train(bench, *range(70), rollouts=1)
    train(bench, 100, rollouts=300, width=12)
    assert remembered(bench) <= 60_000
    assert bench.worker.batch(make_batch(69).batch_id) is not None
    lower = Bench(redis_url, redis_client, 10_000)
    train(lower, *range(200, 210))
    assert remembered(bench) <= 10_000


def shorten(bench: Bench, most: int) -> int:
    async def once() -> int:
        async with redis.asyncio.Redis.from_url(bench.url) as client:
            queue = AsyncRolloutQueue(client, "default")
            left = await queue.shorten(most)
            assert left == await queue.remembered()
            return left

    return asyncio.run(once())


def test_what_is_remembered_can_be_cut_also_while_redis_is_full(bench: Bench) -> None:
    train(bench, *range(200), rollouts=2)
    held = remembered(bench)
    assert shorten(bench, held) == held, "it is no more than that"
    bench.client.config_set("maxmemory", 1)
    try:
        left = shorten(bench, held // 10)
    finally:
        bench.client.config_set("maxmemory", 0)
    assert held // 20 < left == remembered(bench) <= held // 10
    known = [bench.worker.batch(make_batch(number).batch_id) is not None for number in range(200)]
    assert known == sorted(known), "the newest are known"
    assert sum(known) == pytest.approx(20, abs=1)
    keys = Keys("default")
    assert bench.client.llen(keys.prefix + "ended") == sum(known)
    assert len(bench.client.keys(keys.rollout("*"))) == 2 * sum(known)
    assert shorten(bench, 0) == remembered(bench) == 0
    assert shorten(bench, 0) == 0
    train(bench, 300)
    assert remembered(bench) > 0, "it goes on"


def test_a_dead_batch_whose_file_is_kept_outlives_a_cut_until_such_take_twice_the_bound(bench: Bench) -> None:
    for number in range(10):
        bench.put(make_batch(number))
        (entry,) = bench.claim()
        bench.worker.dead_letter(entry, "bad", keep_file=True)
    each = remembered(bench) // 10
    assert shorten(bench, 5 * each + 5) == remembered(bench) == pytest.approx(10 * each, abs=20)
    assert shorten(bench, 3 * each) == pytest.approx(6 * each, abs=20)


def test_a_cut_goes_on_behind_many_dead_batches_whose_files_are_kept(bench: Bench) -> None:
    for number in range(300):
        bench.put(make_batch(number))
        (entry,) = bench.claim()
        bench.worker.dead_letter(entry, "bad", keep_file=True)
    dead = remembered(bench)
    train(bench, *range(300, 330))
    assert remembered(bench) > dead
    assert shorten(bench, dead * 2 // 3) == pytest.approx(dead, abs=20), "those are spared below twice the bound"
    assert all(bench.worker.batch(make_batch(number).batch_id) for number in (0, 299))
    assert not any(bench.worker.batch(make_batch(number).batch_id) for number in range(300, 330))


@pytest.mark.parametrize("held", [[], [5], [0, 0], [3, 9, 100], [50, 50, 50], [1, 2, 3, 400, 400]])
@pytest.mark.parametrize("most", [0, 1, 60, 90, 10_000])
def test_a_fair_bound_is_the_largest_that_keeps_the_sum(held: list[int], most: int) -> None:
    bound = fair_bound(held, most)
    assert sum(min(one, bound) for one in held) <= most
    if bound < most:
        assert sum(min(one, bound + 1) for one in held) > most


def test_a_batch_of_more_than_may_be_remembered_is_known_until_the_next(redis_url: str, redis_client: Redis) -> None:
    bench = Bench(redis_url, redis_client, 1_000)
    for number in range(3):
        train(bench, number)
        assert bench.worker.batch(make_batch(number).batch_id) is not None
        assert bench.client.llen(Keys("default").prefix + "ended") == 1


def test_batches_whose_time_is_over_count_no_more(bench: Bench) -> None:
    train(bench, *range(4))
    keys = Keys("default")
    each = remembered(bench) // 4
    bench.client.delete(keys.batch(make_batch(0).batch_id))  # as if it had expired
    train(bench, 4)
    assert remembered(bench) == pytest.approx(4 * each, abs=8)
    bench.client.delete(keys.prefix + "ended")  # as if none had ended for 7 days
    train(bench, 5)
    assert remembered(bench) == pytest.approx(each, abs=8)


def test_a_dead_batch_that_was_put_back_and_waits_is_not_forgotten(redis_url: str, redis_client: Redis) -> None:
    bench = Bench(redis_url, redis_client, 5_000)
    bench.put(make_batch(0))
    (entry,) = bench.claim()
    bench.worker.dead_letter(entry, "its file is gone", code="blob_missing")
    assert bench.put(make_batch(0)).outcome == "accepted", "its file was lost: sent again"
    (again,) = bench.claim()
    train(bench, *range(1, 9))
    waiting = bench.worker.batch(again.batch_id)
    assert waiting is not None
    assert waiting["state"] == "queued"
    assert bench.worker.ack(again)
    outcome = bench.put(make_batch(0))
    assert (outcome.outcome, outcome.state) == ("duplicate", "trained")


def test_a_batch_that_was_sent_again_is_remembered_from_its_last_end(redis_url: str, redis_client: Redis) -> None:
    bench = Bench(redis_url, redis_client, 2_900)
    bench.put(make_batch(0))
    (entry,) = bench.claim()
    bench.worker.dead_letter(entry, "its file is gone", code="blob_missing", keep_file=False)
    train(bench, 1, rollouts=2)
    assert bench.put(make_batch(0)).outcome == "accepted", "its file was lost: sent again"
    (again,) = bench.claim()
    assert bench.worker.ack(again)
    train(bench, 2, rollouts=2)
    known = [bench.worker.batch(make_batch(number).batch_id) is not None for number in range(3)]
    assert known == [True, False, True]
    assert bench.put(make_batch(0)).outcome == "duplicate"


def test_a_dead_batch_whose_file_is_kept_can_be_put_back_for_longer(redis_url: str, redis_client: Redis) -> None:
    bench = Bench(redis_url, redis_client, 12_000)
    bench.put(make_batch(0))
    (entry,) = bench.claim()
    bench.worker.dead_letter(entry, "broken")
    train(bench, *range(1, 30))
    assert bench.worker.batch(make_batch(0).batch_id) is not None
    assert bench.worker.batch(make_batch(1).batch_id) is None
    keys = Keys("default")
    assert bench.client.zcard(keys.dead_files) == 1
    assert remembered(bench) <= 12_000


def test_dead_batches_alone_take_no_more_than_twice_the_bound(redis_url: str, redis_client: Redis) -> None:
    bench = Bench(redis_url, redis_client, 12_000)
    for number in range(60):
        bench.put(make_batch(number))
        (entry,) = bench.claim()
        bench.worker.dead_letter(entry, "broken")
        assert remembered(bench) <= 2 * 12_000 + 1_200
    keys, ended = Keys("default"), Keys("default").prefix + "ended"
    sizes = [int(one.rpartition(b":")[2]) for one in bench.client.lrange(ended, 0, -1)]
    assert sum(sizes) == remembered(bench)
    left = bench.client.zcard(keys.dead_files)
    assert left == len(sizes) < 30, "their files are given up with them"
    assert bench.worker.counters()["dead_file_bytes"] == 100 * left
    known = [bench.worker.batch(make_batch(number).batch_id) is not None for number in range(60)]
    assert sum(known) == left


@pytest.mark.parametrize("dies", [False, True])
def test_a_batch_of_which_redis_has_lost_the_record_ends_and_is_forgotten(
    redis_url: str, redis_client: Redis, dies: bool
) -> None:
    bench = Bench(redis_url, redis_client, 5_000)
    bench.put(make_batch(0))
    (entry,) = bench.claim()
    bench.client.delete(Keys("default").batch(entry.batch_id))
    assert bench.worker.dead_letter(entry, "broken") if dies else bench.worker.ack(entry)
    train(bench, *range(1, 9))
    assert bench.worker.batch(entry.batch_id) is None
    assert remembered(bench) <= 5_000


def test_the_queue_is_bounded_by_items_and_by_bytes(bench: Bench) -> None:
    bench.put(make_batch(1), make_batch(2))
    assert bench.put(make_batch(3), max_items=2).outcome == "full"
    assert bench.put(make_batch(3), max_bytes=299).outcome == "full"
    assert bench.put(make_batch(3), max_bytes=300).outcome == "accepted"
    assert bench.worker.counters()["rejected_total"] == 2


def test_the_newest_policy_is_of_the_last_entries_or_of_those_after_one(bench: Bench) -> None:
    assert bench.worker.newest_policy() is None
    bench.put(*(make_batch(number) for number in (7, 3, 5, 4)))
    entries = bench.claim()
    assert [entry.policy_version_max for entry in entries] == [8, 4, 6, 5]
    assert bench.worker.newest_policy() == 8
    assert bench.worker.newest_policy(after=entries[0].entry_id) == 6, "the entry itself does not count"
    assert bench.worker.newest_policy(after=entries[2].entry_id) == 5
    assert bench.worker.newest_policy(after=entries[3].entry_id) is None
    bench.worker.ack(entries[0])
    assert bench.worker.newest_policy() == 6, "what is ended does not wait"
    bench.put(make_batch(90), *(make_batch(number) for number in range(10, 26)))
    assert bench.worker.newest_policy() == 26, "the last sixteen"
    newest = bench.client.xrevrange(Keys("default").queue, count=1)[0][1]
    for _ in range(100):  # put back from dead letters
        bench.client.xadd(Keys("default").queue, {**newest, "policy_version_max": "99", "arrived": "1-1"})
    assert bench.worker.newest_policy() == 26, "those hide nothing that waits"


def test_a_claim_stops_at_the_token_budget(bench: Bench) -> None:
    bench.put(*(make_batch(n, tokens=40) for n in range(5)))
    assert [e.tokens for e in bench.claim(max_tokens=100)] == [40, 40, 40]
    assert len(bench.claim(max_tokens=100)) == 2
    assert bench.claim() == []


def test_a_dead_workers_entries_are_taken_over_before_new_ones(bench: Bench) -> None:
    bench.put(make_batch(1), make_batch(2))
    bench.claim("dead", max_tokens=1)
    time.sleep(0.03)
    entries = bench.claim("alive", idle=0.02)
    assert [(e.policy_version, e.deliveries) for e in entries] == [(1, 2), (2, 1)]


def test_a_late_ack_of_a_worker_that_was_only_stopped_is_harmless(bench: Bench) -> None:
    bench.put(make_batch(1))
    (stopped,) = bench.claim("stopped")
    (taken,) = bench.claim("alive", idle=0.0)
    assert bench.worker.ack(taken)
    assert not bench.worker.ack(stopped)
    assert bench.worker.counters()["acked_total"] == 1


def test_a_heartbeat_keeps_entries_and_tells_which_were_taken_over(bench: Bench) -> None:
    bench.put(make_batch(1), make_batch(2))
    first, second = bench.claim("me")
    queue = Keys("default").queue
    bench.client.xclaim(queue, GROUP, "me", 0, [first.entry_id, second.entry_id], idle=60_000, justid=True)
    assert bench.worker.heartbeat("me", [first.entry_id]) == [first.entry_id]
    (taken,) = bench.claim("other", idle=30.0)
    assert taken.entry_id == second.entry_id
    assert bench.worker.heartbeat("me", [first.entry_id, second.entry_id]) == [first.entry_id]
    pending = bench.client.xpending_range(queue, GROUP, first.entry_id, first.entry_id, 1)
    assert pending[0]["times_delivered"] == 1, "a heartbeat is not a delivery"


def test_an_entry_that_kills_three_workers_becomes_a_dead_letter(bench: Bench) -> None:
    bench.put(make_batch(1))
    deliveries = [bench.claim(f"w{n}", idle=0.0)[0].deliveries for n in range(3)]
    assert deliveries == [1, 2, 3]
    assert bench.claim("w3", idle=0.0) == []
    record = bench.worker.batch(make_batch(1).batch_id)
    assert record is not None
    assert (record["state"], record["reason"]) == ("dead", KILLER)
    assert bench.worker.dead_letters()[0]["reason"] == KILLER
    assert bench.worker.dead_letters()[0]["blob"] == make_batch(1).blob
    assert bench.worker.depth() == (0, 0)


def test_a_worker_that_restarts_finds_what_it_held_and_a_poison_kills_no_neighbour(bench: Bench) -> None:
    """A worker with a stable name works through its entries; number 2 kills it each time it is worked on."""
    bench.put(*(make_batch(n) for n in range(5)))
    done: list[int] = []

    def live() -> bool:
        """One life: finish what can be finished; True when nothing is left."""
        entries = bench.worker.own_pending("stable") or bench.claim("stable")
        while entries:
            unsaved: list[Entry] = []
            for entry in entries:
                if entry.policy_version == 2:
                    return False  # killed: what was not yet saved is lost
                unsaved.append(entry)
            for entry in unsaved:  # saved after the batch, as the worker checkpoints
                bench.worker.ack(entry)
                done.append(entry.policy_version)
            entries = bench.worker.own_pending("stable") or bench.claim("stable")
        return True

    lives = 1
    while not live():
        lives += 1
        assert lives < 10
    assert sorted(done) == [0, 1, 3, 4]
    assert [letter["policy_version"] for letter in bench.worker.dead_letters()] == ["2"]
    assert bench.worker.depth() == (0, 0)


def test_what_may_have_killed_comes_alone_or_last_and_only_to_who_holds_it(bench: Bench) -> None:
    bench.put(*(make_batch(number) for number in range(4)))
    first, _, third, _ = bench.claim("w")

    def delivered_twice(entry: Entry) -> None:
        bench.client.xclaim(Keys("default").queue, GROUP, "w", 0, [entry.entry_id], retrycount=2, justid=True)

    def own(consumer: str = "w") -> list[tuple[int, int]]:
        entries = bench.worker.own_pending(consumer, skip=[first.entry_id])
        assert not any(entry.suspect for entry in entries[:-1])
        return [(entry.policy_version, entry.deliveries) for entry in entries]

    delivered_twice(third)
    assert own("another") == []
    assert own() == [(1, 2)], "the first is in hand, and the third would be a suspect"
    bench.worker.ack(bench.worker.unfinished()[1])
    assert own() == [(2, 3)]
    bench.worker.release("w", [replace(third, deliveries=3)])
    assert own() == [(2, 3)], "a delivery that was taken back is none"
    assert own() == [(3, 2)], "the fourth delivery is its end"
    assert [letter["policy_version"] for letter in bench.worker.dead_letters()] == ["2"]
    delivered_twice(first)
    assert [(entry.policy_version, entry.deliveries) for entry in bench.claim(idle=0.0)] == [(0, 3)]
    assert [entry.policy_version for entry in bench.worker.unfinished()] == [0, 3]


def test_uploads_that_were_refused_are_seen_once(bench: Bench) -> None:
    bench.put(make_batch(1), max_items=1)
    bench.put(make_batch(2), max_items=1)
    assert [bench.worker.was_refused() for _ in range(2)] == [False, False], "what was before is not news"
    bench.put(make_batch(3), max_items=1)
    assert [bench.worker.was_refused() for _ in range(2)] == [True, False]


def test_an_orderly_stop_is_not_held_against_its_entries(bench: Bench) -> None:
    bench.put(make_batch(1))
    entries = bench.claim("stable")
    for _ in range(6):
        bench.worker.release("stable", entries)
        entries = bench.worker.own_pending("stable")
        assert [e.deliveries for e in entries] == [1]


def test_a_pending_entry_that_was_deleted_is_forgotten(bench: Bench) -> None:
    bench.put(make_batch(1), make_batch(2))
    first, _ = bench.claim("w")
    bench.client.xdel(Keys("default").queue, first.entry_id)
    assert [e.policy_version for e in bench.worker.own_pending("w")] == [2]
    assert [e.policy_version for e in bench.claim("v", idle=0.0)] == [2]


def test_a_worker_survives_a_server_that_was_emptied(bench: Bench) -> None:
    bench.client.flushall()
    assert bench.claim() == []
    bench.put(make_batch(1))
    assert len(bench.claim()) == 1


def test_many_concurrent_senders_and_workers_lose_and_double_nothing(bench: Bench) -> None:
    """Eight senders send 40 batches, each twice; four workers drain them. The counters must come out exact."""

    def send(offset: int) -> None:
        bench_of_thread = Bench(bench.url, Redis.from_url(bench.url))
        bench_of_thread.put(*(make_batch(n) for n in range(offset, 40, 4) for _ in range(1)))
        bench_of_thread.client.close()

    acked: list[str] = []

    def work(name: str) -> None:
        with Redis.from_url(bench.url) as client:
            queue = RolloutQueue(client, "default")
            while len(acked) < 40:
                for entry in queue.claim(name, 30, 1000.0):
                    assert queue.ack(entry)
                    acked.append(entry.batch_id)

    threads = [threading.Thread(target=send, args=(n % 4,)) for n in range(8)]
    threads += [threading.Thread(target=work, args=(f"w{n}",)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(acked) == sorted(make_batch(n).batch_id for n in range(40))
    counters = bench.worker.counters()
    assert list(counters) == list(COUNTERS)
    assert counters["accepted_total"] == counters["acked_total"] == counters["duplicates_total"] == 40
    assert bench.worker.depth() == (0, 0)


def test_a_run_name_cannot_reach_another_runs_keys() -> None:
    assert Keys("a").queue == "da:{a}:queue"
    assert Keys("a").prefix != Keys("a:queue").prefix
