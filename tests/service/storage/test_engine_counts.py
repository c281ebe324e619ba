"""Booking of engines' reports: the same sums as reading every record, with constant work and a bounded table."""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import redis.asyncio
from helpers.service.service_fixtures import RunningService
from helpers.service.storage_fixtures import Store
from helpers.worker.record_fixtures import acceptance, by_drafter, score
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from redis import Redis
from redis.exceptions import RedisError

from rl_hooks.engines.counting.counters import MAX_BUCKETS, Counts, Ledger
from service.api import snapshot
from service.errors import EndedLife, TooManyReporters
from service.monitor.alpha import Attempt, Turn
from service.monitor.counts import (
    LiveAlpha,
    servers,
    since,
    total,
)
from service.monitor.records import AcceptanceRecord, ScoreRecord
from service.storage.queue.keys import Keys
from service.storage.reports import engine_counts
from service.storage.reports.engine_counts import KEPT_APART, Account
from service.storage.reports.store import AsyncStore

Record = dict[str, Any]
KEYS = Keys("default")
CLOCK = iter(range(1, 1 << 40))


def report(reporter: str = "a", drafter: str = "v1", policy: int | None = 0, **more: Any) -> Record:
    rounds = more.get("rounds", 10)
    return {
        "reporter": reporter,
        "engine": f"http://{reporter}",
        "method": "drafter",
        "drafter_version": drafter,
        "policy_version": policy,
        "rounds": rounds,
        "accepted_tokens": 2 * rounds,
        "drafted_tokens": 4 * rounds,
        "emitted_tokens": 3 * rounds,
        "accepted_per_position": [rounds, rounds],
        "window_seconds": 5.0,
        "created": float(next(CLOCK)),
        **more,
    }


def with_store(url: str, work: Any, most: int = 1024) -> Any:
    """Run `await work(store)` on a client of its own."""

    async def main() -> Any:
        client = redis.asyncio.Redis.from_url(url)
        try:
            return await work(AsyncStore(client, "default", most))
        finally:
            await client.aclose()

    return asyncio.run(main())


async def booked(store: AsyncStore, record: AcceptanceRecord) -> tuple[int, int]:
    """Take a report in; returns the account's sums of its drafter."""
    await store.book(record)
    account = Account.read(await store._redis.hget(KEYS.reporters, str(record.reporter)))
    rounds, accepted = account.sums[str(record.drafter_version)]
    return rounds, accepted


def book(url: str, *reports: Record, most: int = 1024) -> list[tuple[int, int]]:
    async def work(store: AsyncStore) -> list[tuple[int, int]]:
        return [await booked(store, acceptance(one)) for one in reports]

    found: list[tuple[int, int]] = with_store(url, work, most)
    return found


class FullRead:
    """What was done before: every record is kept, and all of them are read for each report."""

    def __init__(self) -> None:
        self.records: dict[tuple[str | None, str | None, int | None], AcceptanceRecord] = {}
        self.unplaced: dict[tuple[str | None, str | None], AcceptanceRecord] = {}

    def book(self, record: AcceptanceRecord, latest: int | None) -> tuple[int, int]:
        own = (record.reporter, record.drafter_version)
        previous = self.records.get((*own, latest if record.policy_version is None else record.policy_version))
        more = since(record, previous)
        if record.policy_version is None:
            more = since(record, self.unplaced.get(own))
            self.unplaced[own] = record
            placed = replace(more, policy_version=latest)
            record = total(placed, previous)
        if previous is not None and not more.rounds:  # it is of when it was counted
            record = replace(record, created=previous.created)
        self.records[*own, record.policy_version] = record
        same = [r for r in self.records.values() if (r.reporter, r.drafter_version) == own]
        return sum(r.rounds for r in same), sum(accepted(r) for r in same)


def accepted(record: AcceptanceRecord) -> int:
    """Its accepted tokens, which every report here says."""
    assert record.accepted_tokens is not None
    return record.accepted_tokens


class Engine:
    """Counts as an agent does: cumulative, per drafter and policy; a restart begins at zero."""

    def __init__(self, name: str, places: bool, trims: bool) -> None:
        self.name = name
        self.places = places
        self.trims = trims
        self.drafter, self.policy = 0, 0
        self.counts: dict[tuple[int, int | None], list[int]] = {}
        self.last: Record | None = None
        self.used: list[tuple[int, int | None]] = []

    def do(self, what: str, rounds: int, accepted: int) -> Record | None:
        if what == "again":
            return None if self.last is None else self.last | {"created": float(next(CLOCK))}
        if what == "restart":
            self.counts = {}
            return None
        self.drafter += what == "drafter"
        self.policy += what == "policy"
        key = (self.drafter, self.policy if self.places else None)
        if what == "late" and self.used:
            key = self.used[-1]
        if key not in self.used:
            self.used = [*self.used, key][-2:]
        counts = self.counts.setdefault(key, [0, 0])
        counts[0] += rounds
        counts[1] += min(accepted, 4 * rounds)
        self.last = report(
            self.name,
            f"v{key[0]}",
            key[1],
            rounds=counts[0],
            accepted_tokens=counts[1],
            emitted_tokens=counts[0] + counts[1] if self.trims else None,
            accepted_per_position=[counts[1]] * (1 + key[0] % 2),
        )
        return self.last


STEPS = st.tuples(
    st.integers(0, 2),
    st.sampled_from(["count", "count", "policy", "policy", "drafter", "late", "again", "restart"]),
    st.integers(0, 400),
    st.integers(0, 900),
    st.booleans(),
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(STEPS, max_size=60))
@pytest.mark.parametrize(("apart", "drafters"), [(1000, 1000), (4, 2), (3, 3)])
def test_running_sums_are_those_of_reading_everything(
    redis_url: str, redis_client: Redis, apart: int, drafters: int, steps: list[Any]
) -> None:
    """Restarts, repeated and late reports, several reporters, and one whose engine does not know the policy."""
    redis_client.flushall()
    engines = [Engine("a", True, True), Engine("b", True, False), Engine("c", False, True)]
    model = FullRead()

    async def work(store: AsyncStore) -> None:
        latest = 0
        for which, what, rounds, accepted, newer in steps:
            latest += newer
            redis_client.set(KEYS.latest_policy, latest)
            document = engines[which].do(what, rounds, accepted)
            if document is not None:
                record = acceptance(document)
                assert await booked(store, record) == model.book(record, latest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_counts, "KEPT_APART", apart)
        patch.setattr(engine_counts, "KEPT_DRAFTERS", drafters)
        with_store(redis_url, work)
    wanted, found = list(model.records.values()), Store(redis_client, "default").acceptances()
    live = [point_live(records) for records in (wanted, found)]
    assert live[0] == live[1]
    assert of_reporters(wanted) == of_reporters(found)
    if drafters > 3:
        assert servers(wanted) == servers(found)


def point_live(records: list[AcceptanceRecord]) -> dict[int, Any]:
    policies = sorted({record.policy_version for record in records if record.policy_version is not None})
    found = {policy: by_drafter([r for r in records if r.policy_version == policy]) for policy in policies}
    return {policy: (alphas, sum(one.rounds for one in alphas.values())) for policy, alphas in found.items() if alphas}


def of_reporters(records: list[AcceptanceRecord]) -> dict[str, tuple[int, int]]:
    """As the counters of `/metrics` add them up."""
    sums: defaultdict[str, list[int]] = defaultdict(lambda: [0, 0])
    for record in records:
        if record.reporter is not None:
            sums[record.reporter][0] += record.rounds
            sums[record.reporter][1] += accepted(record)
    return {reporter: (rounds, accepted) for reporter, (rounds, accepted) in sums.items()}


def test_a_long_run_keeps_a_bounded_number_of_records_and_all_of_its_rounds(
    redis_url: str, redis_client: Redis
) -> None:
    policies = 5 * KEPT_APART
    sums = book(redis_url, *(report(f"e{i}", f"v{p // 100}", p) for p in range(policies) for i in range(2)))
    assert sums[-1] == (200, 400)
    drafters = 1 + (policies - 1) // 100
    assert redis_client.hlen(KEYS.acceptance) <= 2 * (KEPT_APART + drafters)
    records = Store(redis_client, "default").acceptances()
    assert point_live(records) == {p: ({f"v{p // 100}": LiveAlpha(3.0, 20)}, 20) for p in range(policies)}
    assert of_reporters(records) == {f"e{i}": (10 * policies, 20 * policies) for i in range(2)}
    assert {line.reporter: line.rounds for line in servers(records)} == {"e0": 200, "e1": 200}


def test_many_drafter_versions_leave_one_record_of_the_oldest(
    redis_url: str, redis_client: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_counts, "KEPT_DRAFTERS", 5)
    book(
        redis_url,
        *(report("a", f"v{p}", p) for p in range(300)),
        *(report("a", f"v{p}", None) for p in range(300, 310)),
    )
    assert redis_client.hlen(KEYS.acceptance) <= 6 + 2
    assert redis_client.hlen(KEYS.unplaced) == 5
    assert of_reporters(Store(redis_client, "default").acceptances()) == {"a": (3100, 6200)}


def test_a_reporter_that_was_silent_for_an_hour_gives_way_and_its_rounds_stay(
    redis_url: str, redis_client: Redis
) -> None:
    book(redis_url, *(report(name, "v1", 7) for name in ("a", "b", "c", "a")), most=3)
    book(redis_url, report("d", "v1", 7, created=next(CLOCK) + 3600.0), most=3)
    records = Store(redis_client, "default").acceptances()
    assert set(of_reporters(records)) == {"a", "c", "d"}
    assert by_drafter(records)["v1"].rounds == 40
    for key in (KEYS.reporters, KEYS.acceptance):
        assert redis_client.hlen(key) == 3
    assert redis_client.zcard(KEYS.reported) == 3


def test_reporters_without_a_round_keep_none_out_that_has_some(redis_url: str, redis_client: Redis) -> None:
    """Of an idle one nothing is lost; it comes in again once it has rounds, or another one goes."""
    book(redis_url, report("a", "v1", 7), *(report(name, "v1", 7, rounds=0) for name in ("x", "y", "z", "x")), most=4)
    assert redis_client.zrange(KEYS.idle, 0, -1) == [b"y", b"z", b"x"]
    with pytest.raises(TooManyReporters):
        book(redis_url, report("w", "v1", 7, rounds=0), most=4)
    book(redis_url, report("b", "v1", 7), report("z", "v1", 7), report("c", "v1", 7), most=4)
    assert set(redis_client.hkeys(KEYS.reporters)) == {b"a", b"b", b"c", b"z"}
    assert redis_client.hlen(KEYS.acceptance) == redis_client.zcard(KEYS.reported) == 4
    assert not redis_client.exists(KEYS.idle)
    for name in ("x", "d"):
        with pytest.raises(TooManyReporters):
            book(redis_url, report(name, "v1", 7), most=4)
    assert by_drafter(Store(redis_client, "default").acceptances())["v1"].rounds == 40


def test_an_idle_reporter_that_counts_while_another_looks_for_room_stays(redis_url: str, redis_client: Redis) -> None:
    """As one would of which an older API has booked rounds, without a word to the set of idle ones."""
    book(redis_url, report("x", "v1", 7), most=2)
    redis_client.zadd(KEYS.idle, {"x": 1.0})
    book(redis_url, report("y", "v1", 7, rounds=0), report("b", "v1", 7), most=2)
    assert set(redis_client.hkeys(KEYS.reporters)) == {b"x", b"b"}
    with pytest.raises(TooManyReporters):
        book(redis_url, report("c", "v1", 7), most=2)
    assert of_reporters(Store(redis_client, "default").acceptances()) == {"x": (10, 20), "b": (10, 20)}


def test_reporters_that_come_at_once_are_no_more_than_there_is_room_for(redis_url: str, redis_client: Redis) -> None:
    book(redis_url, *(report(name, "v1", 7) for name in "abc"), report("idle", "v1", 7, rounds=0), most=4)

    async def work(store: AsyncStore) -> list[Any]:
        new = [acceptance(report(f"n{number}", "v1", 7)) for number in range(8)]
        return await asyncio.gather(*(store.book(one) for one in new), return_exceptions=True)

    found = with_store(redis_url, work, 4)
    assert sum(isinstance(one, TooManyReporters) for one in found) == 7
    assert redis_client.hlen(KEYS.reporters) == redis_client.zcard(KEYS.reported) == 4


def test_a_reporter_that_had_rounds_is_not_idle_with_another_drafter_or_life(
    redis_url: str, redis_client: Redis
) -> None:
    idle = (report("a", "v2", 8, rounds=0), report("a", "v2", 9, rounds=0, life="second"))
    book(redis_url, report("a", "v1", 7, life="first"), *idle, most=1)
    with pytest.raises(TooManyReporters):
        book(redis_url, report("b", "v2", 9), most=1)
    assert of_reporters(Store(redis_client, "default").acceptances()) == {"a": (10, 20)}


def test_reporters_beyond_the_bound_are_refused_and_no_round_is_counted_twice(
    redis_url: str, redis_client: Redis
) -> None:
    refused = set()
    for cycle in range(1, 11):
        for engine in range(24):
            try:
                book(redis_url, report(f"e{engine}", "v1", 7, rounds=10 * cycle), most=20)
            except TooManyReporters:
                refused.add(engine)
    assert refused == {20, 21, 22, 23}
    records = Store(redis_client, "default").acceptances()
    assert of_reporters(records) == {f"e{engine}": (100, 200) for engine in range(20)}
    assert by_drafter(records)["v1"].rounds == 2000
    assert not redis_client.exists(KEYS.live)


def test_a_reporter_too_many_gets_a_429_that_names_the_bound_and_changes_nothing(
    serve: Callable[..., RunningService], redis_client: Redis
) -> None:
    service = serve(max_reporters=2)
    service.register()
    for name in ("a", "b"):
        reply = service.client.post("/acceptance", json={"run": "default", **report(name)})
        assert reply.status_code == 200, reply.text
    before = {key: redis_client.dump(key) for key in redis_client.scan_iter()}
    reply = service.client.post("/acceptance", json={"run": "default", **report("c")})
    assert (reply.status_code, reply.json()["type"]) == (429, "urn:draftalign:too-many-reporters")
    assert "has 2 reporters" in reply.json()["detail"]
    assert int(reply.headers["Retry-After"]) > 0
    assert {key: redis_client.dump(key) for key in redis_client.scan_iter()} == before
    assert service.client.post("/acceptance", json={"run": "default", **report("a", rounds=20)}).status_code == 200


def test_live_sums_are_of_the_attempt_in_which_they_were_reported(redis_url: str, redis_client: Redis) -> None:
    """Of a second attempt too there are more policy versions than records that stay apart."""
    policies = range(KEPT_APART + 30)
    earlier = [report("a", "v1", p, rounds=10, created=100.0 + p) for p in policies]
    book(redis_url, *earlier, *(report("a", "v2", p, rounds=20, created=1000.0 + p) for p in policies))
    turn = Turn(900.0, 900.0, 0.0)
    attempts: list[Attempt[ScoreRecord]] = [Attempt(None, turn, ()), Attempt(turn, None, ())]
    records = Store(redis_client, "default").acceptances()
    points = [point_live([record for record in records if attempt.counted(record)]) for attempt in attempts]
    assert points[0] == {p: ({"v1": LiveAlpha(3.0, 10)}, 10) for p in policies}
    assert points[1] == {p: ({"v2": LiveAlpha(3.0, 20)}, 20) for p in policies}


def test_live_sums_go_back_a_bounded_number_of_policy_versions(
    redis_url: str, redis_client: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_counts, "MAX_LIVE", 10)
    book(redis_url, *(report("a", "v1", p) for p in range(KEPT_APART + 30)))
    assert redis_client.hlen(KEYS.live) == 30
    assert redis_client.llen(KEYS.live_order) == 10
    assert sorted(point_live(Store(redis_client, "default").acceptances())) == list(range(20, KEPT_APART + 30))


def test_reports_of_one_reporter_at_the_same_moment_are_all_counted(redis_url: str, redis_client: Redis) -> None:
    async def work(store: AsyncStore) -> None:
        await asyncio.gather(*(store.book(acceptance(report("a", "v1", p))) for p in range(40)))

    with_store(redis_url, work)
    assert book(redis_url, report("a", "v1", 39)) == [(400, 800)]
    assert of_reporters(Store(redis_client, "default").acceptances()) == {"a": (400, 800)}


def test_a_crash_between_reading_and_writing_leaves_the_report_to_be_sent_again(
    redis_url: str, redis_client: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    redis_client.set(KEYS.latest_policy, 3)
    first, second = report("a", "v1", None, rounds=10), report("a", "v1", None, rounds=25)
    assert book(redis_url, first) == [(10, 20)]

    async def crash(*_: Any, **__: Any) -> bool:
        raise ConnectionError("killed")

    with monkeypatch.context() as patch:
        patch.setattr(engine_counts.EngineCounts, "_write", crash)
        with pytest.raises(ConnectionError):
            book(redis_url, second)
    assert book(redis_url, second, second) == [(25, 50)] * 2


# --- the work of a report


@pytest.fixture
def commands(service: RunningService, redis_client: Redis) -> Iterator[list[tuple[str, ...]]]:
    """Every command that the API sends, with its arguments; the watch that logs headlines now and then sends none."""
    client: Any = service.server.config.app.state.context.redis.client  # type: ignore[union-attr]
    sent: list[tuple[str, ...]] = []
    connection = client.connection_pool.connection_class
    plain = connection.pack_command

    def pack(self: Any, *command: Any) -> Any:
        sent.append(tuple(str(part) for part in command))
        return plain(self, *command)

    async def away(*_: Any) -> None:
        raise RedisError("not now")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(snapshot, "read_headlines", away)
        patch.setattr(connection, "pack_command", pack)
        yield sent


def fields_read(commands: list[tuple[str, ...]]) -> list[tuple[str, int]]:
    """Names of commands, and how many fields or members each reads; whole tables and scans are not allowed here."""
    whole = {"HGETALL", "HVALS", "HKEYS", "HSCAN", "SCAN", "KEYS", "SMEMBERS"}
    assert not [command for command in commands if command[0] in whole]
    return [(command[0], len(command)) for command in commands]


@pytest.mark.parametrize("accepted", [2, 0], ids=["alive", "dead"])
def test_a_report_costs_the_same_at_ten_and_at_a_thousand_records(
    service: RunningService, redis_client: Redis, commands: list[tuple[str, ...]], redis_url: str, accepted: int
) -> None:
    version = service.publish().version
    store = Store(redis_client, "default")
    served = {"tokens": 300.0, "rounds": 100.0}
    for number in range(300):
        store.put_score(
            f"{number:032x}", score({"drafter_version": version, "served": served, "created": float(number)})
        )
    service.client.post("/acceptance", json={"run": "default", **report("e0", version, 1)}).raise_for_status()
    work = []
    rounds = 300  # where nothing is accepted, the drafter is pushed again at once: for that all engines are asked, once
    first = {"run": "default", **report("e0", version, 1, rounds=rounds, accepted_tokens=accepted * rounds)}
    assert (service.client.post("/acceptance", json=first).json()["pushed_again"] is None) == (accepted > 0)
    for engines in (10, 1000):
        book(redis_url, *(report(f"e{i}", version, 1) for i in range(engines)))
        store.put_score(f"{engines:032x}", score({"drafter_version": version, "served": served, "created": 300.0}))
        rounds += 300
        document = {"run": "default", **report("e0", version, 1, rounds=rounds, accepted_tokens=accepted * rounds)}
        commands.clear()
        reply = service.client.post("/acceptance", json=document)
        assert reply.status_code == 200, reply.text
        assert reply.json()["dead"] == (accepted == 0)
        work.append(fields_read(commands))
    assert work[0] == work[1]
    assert 3 <= len(work[0]) <= 12


def test_a_report_of_an_old_engine_costs_a_few_fields_more_at_most(
    service: RunningService, redis_client: Redis, commands: list[tuple[str, ...]], redis_url: str
) -> None:
    def cost(policy: int) -> tuple[int, int]:
        commands.clear()
        reply = service.client.post("/acceptance", json={"run": "default", **report("e0", "v1", policy)})
        assert reply.status_code == 200, reply.text
        work = fields_read(commands)
        return len(work), sum(size for _, size in work)

    book(redis_url, report("e1"))
    cost(0)  # loads the script
    few = cost(1)
    book(redis_url, *(report("e0", "v1", p) for p in range(2, 1000)))
    many = cost(1000)
    assert many[0] <= few[0] + 2, "one reads what is added up"
    assert many[1] <= few[1] + 12


def test_kept_rounds_say_whether_their_engine_named_the_policy_version(redis_url: str, redis_client: Redis) -> None:
    redis_client.set(KEYS.latest_policy, 3)

    async def work(store: AsyncStore) -> list[Any]:
        for fields in (report("a", "v1", 2, rounds=300), report("a", "v1", None, rounds=300)):
            found = await store.book(acceptance(fields))
        return [(block.policy_version, block.named) for block in found]

    assert with_store(redis_url, work) == [(2, True), (3, False)]
    (text,) = redis_client.hvals(KEYS.reporters)
    assert [block.named for block in Account.read(text).blocks] == [True, False]
    assert [len(block) for block in json.loads(text)["blocks"]] == [11, 12], "older services read 11"


def test_a_new_life_ends_the_blocks_of_the_old_one_and_loses_no_round(redis_url: str, redis_client: Redis) -> None:
    """Exactly at the boundary: whatever the counts are, all of the new ones are of the new life."""
    one: dict[str, Any] = {"life": "one"}
    two: dict[str, Any] = {"life": "two"}

    async def work(store: AsyncStore) -> list[Any]:
        blocks = []
        for fields in (
            report(rounds=300, **one),
            report(rounds=500, **one),
            report(rounds=100, policy=1, **one),
            report(rounds=700, **two),  # more than before: no count fell
            report(rounds=750, **two),
            report(rounds=740, **two),  # late, and not counted
            report(rounds=90, policy=1, **two),
        ):
            found = await store.book(acceptance(fields))
            blocks.append([(b.policy_version, b.rounds) for b in found])
        with pytest.raises(EndedLife, match="'two', since 'one'"):
            await store.book(acceptance(report(rounds=900, **one)))
        return blocks

    blocks = with_store(redis_url, work)
    assert blocks[2] == [(0, 300), (0, 200), (1, 100)]
    assert blocks[3:6] == [[(0, 700)], [(0, 700), (0, 50)], [(0, 700), (0, 50)]]
    assert blocks[6] == [(0, 700), (0, 50), (1, 90)]
    (text,) = redis_client.hvals(KEYS.reporters)
    account = Account.read(text)
    assert account.lives == ("one", "two")
    assert account.sums["v1"][0] == 500 + 100 + 750 + 90
    rounds = [r.rounds for r in Store(redis_client, "default").acceptances() if r.reporter is not None]
    assert sum(rounds) == 1440


def test_what_an_agent_let_go_of_and_counts_again_is_booked(redis_url: str, redis_client: Redis) -> None:
    """A trainer goes further back than an agent remembers, and not as far as the service."""
    ledger = Ledger()

    async def send(store: AsyncStore) -> None:
        for bucket in ledger.buckets():
            if bucket.unreported_rounds:
                rounds = bucket.counts.rounds
                await store.book(acceptance(report(policy=bucket.policy_version, rounds=rounds, life=bucket.life)))
                bucket.reported = (rounds, False)

    async def work(store: AsyncStore) -> None:
        for policy in range(MAX_BUCKETS + 10):
            ledger.book("v1", policy, Counts(1000))
            await send(store)
        for policy in (5, 5, 6):
            ledger.book("v1", policy, Counts(100))
            await send(store)

    with_store(redis_url, work)
    (text,) = redis_client.hvals(KEYS.reporters)
    assert Account.read(text).sums["v1"][0] == (MAX_BUCKETS + 10) * 1000 + 300


def test_the_time_that_an_engine_was_behind_is_that_over_which_it_reported(redis_url: str) -> None:
    """Neither the time that it slept is, nor what it drafts with again."""
    times = (
        (1000.0, "v1", False, None),
        (1060.0, "v1", True, 0.0),
        (1200.0, "v1", True, 140.0),
        (1500.0, "v1", True, 140.0),  # away
        (1560.0, "v1", True, 200.0),
        (1500.0, "v1", True, 200.0),  # the clock was set back
        (1510.0, "v2", True, 0.0),  # swapped, to one that is replaced as well
        (1520.0, "v2", False, None),
        (1530.0, "v2", True, 0.0),
    )

    async def work(store: AsyncStore) -> list[float | None]:
        found = []
        for rounds, (at, version, outdated, _) in enumerate(times, 1):
            await store.book(acceptance(report(drafter=version, rounds=rounds, created=at)), outdated=outdated)
            await store.book(acceptance(report(drafter="v0", rounds=5, created=at, final=True)), outdated=True)
            await store.book(acceptance(report(drafter=version, rounds=rounds, created=at + 100)), outdated=outdated)
            (record,) = (r for r in await store.newest_acceptances(0.0) if r.drafter_version == version)
            found.append(record.behind)
        return found

    assert with_store(redis_url, work) == [behind for *_, behind in times]


@pytest.mark.parametrize("placed", [False, True])
def test_a_reporter_that_loses_its_memory_again_and_again_is_counted_once(redis_url: str, placed: bool) -> None:
    """As a plugin that dies with its engine, under one name; more lives than are remembered."""
    policy = 0 if placed else None
    reports = [
        report(policy=policy, rounds=rounds, life=f"{life:x}")
        for life in range(20)
        for rounds in (10 + life, 10 + life, 30 + life)
    ]
    sums = book(redis_url, *reports)
    assert sums[-1][0] == sum(30 + life for life in range(20))


@pytest.mark.parametrize(("fence", "command"), [(None, "del"), (2, "eval")])
def test_a_run_of_very_many_keys_is_forgotten_by_many_commands(
    redis_url: str, redis_client: Redis, fence: int | None, command: str
) -> None:
    """One that names a million keys would stop this process and Redis for seconds."""
    redis_client.mset({KEYS.rollout(str(number)): "" for number in range(10_000)} | {"da:{other}:held": ""})
    redis_client.config_resetstat()
    assert with_store(redis_url, lambda store: store.forget(fence)) == 10_000
    assert redis_client.info("commandstats")[f"cmdstat_{command}"]["calls"] >= 10
    left = set(redis_client.keys())
    assert left == {b"da:{other}:held"} | (set() if fence is None else {KEYS.fence.encode()})
