"""What an event costs does not depend on how long the run is, counted in records that are read; and what is shared."""

from __future__ import annotations

import asyncio
import gc
import json
import random
import socket
import threading
import time
import tracemalloc
import weakref
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import redis.asyncio
from helpers.engine.agent_fixtures import eventually
from helpers.service.service_fixtures import RunningService, publish
from helpers.service.storage_fixtures import Store
from helpers.worker.record_fixtures import acceptance, gauges, score
from redis import Redis

from service.api.auth import _BEGIN_AT_ONCE, _TAKEN_IN_FIRST, Throttle
from service.api.context.context import ServiceContext
from service.api.context.evidence import Evidence
from service.api.snapshot import read_followed, read_headlines, read_now
from service.monitor.events import Refused
from service.monitor.live.engine import LiveRule
from service.monitor.metrics import RunSnapshot
from service.monitor.records import Return, RunState, ScoreRecord, written
from service.reading.pointer import Pointer
from service.reading.quiet import Quiet, Told
from service.reading.series import Series
from service.reading.shared import Shared
from service.storage.drafters.versions import Manifest
from service.storage.history.lines import Followed, LineFile
from service.storage.layout import Layout
from service.storage.queue.keys import Keys
from service.storage.registry import Registry
from service.storage.reports.store import AsyncStore
from service.storage.reports.summary import summary_of
from service.storage.runs import change_state


def scored(number: int) -> dict[str, Any]:
    sums = {"tokens": 200.0 + number, "rounds": 100.0}
    fields = {"policy_version": number // 8, "served": sums, "frozen": sums, "created": float(number)}
    return fields | {"entry_id": f"{number + 1}-0", "drafter_version": "v000001-aaaaaaaa", "rollouts": 8}


def on_series(url: str, work: Callable[[Series, list[int]], Awaitable[None]]) -> None:
    """Run on a series; the list gets how many score records each read asks for."""

    async def main() -> None:
        client = redis.asyncio.Redis.from_url(url)
        store, asked = AsyncStore(client, "default"), list[int]()
        plain = store.scores_of

        async def scores_of(batch_ids: Any) -> Any:
            asked.append(len(batch_ids))
            return await plain(batch_ids)

        store.scores_of = scores_of  # type: ignore[method-assign]
        try:
            await work(Series(store, None), asked)
        finally:
            await client.aclose()

    asyncio.run(main())


def test_one_more_score_pools_one_policy_version_however_many_there_are(redis_url: str, redis_client: Redis) -> None:
    worker = Store(redis_client, "default")

    async def work(series: Series, asked: list[int]) -> None:
        number = 0
        for size in (40, 640):
            while number < size:
                worker.put_score(f"{number:032x}", score(scored(number)))
                number += 1
            await series.refresh()
            assert len(series.points) == size // 8
            assert max(asked) <= 256, "never more at once"
            asked.clear()
            assert (await series.refresh(), asked) == (0, []), "nothing new"
            worker.put_score(f"{number:032x}", score(scored(number)))
            assert (await series.refresh(), asked) == (1, [1])
            number += 1
            asked.clear()

    on_series(redis_url, work)


def test_a_score_is_kept_in_less_than_a_kilobyte(redis_url: str, redis_client: Redis) -> None:
    """Its sums are six; a point of the chart is among it, shared by the batches of a policy version."""
    worker = Store(redis_client, "default")
    for number in range(800):
        worker.put_score(f"{number:032x}", score(scored(number)))

    async def work(series: Series, asked: list[int]) -> None:
        tracemalloc.start()
        try:
            await series.refresh()
            kept, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert kept / 800 < 1000

    on_series(redis_url, work)


def test_rounds_by_prompt_are_not_kept_here(redis_url: str, redis_client: Redis) -> None:
    """A report has up to 64 of them, a reporter up to 64 reports; only the comparison of its account reads them."""

    async def work(series: Series, asked: list[int]) -> None:
        client = redis.asyncio.Redis.from_url(redis_url)
        fields = {"reporter": "engine", "drafter_version": "v000001-aaaaaaaa", "policy_version": 1, "rounds": 10}
        try:
            await AsyncStore(client, "default").book(acceptance(fields | {"by_prompt": {"0000000a": [20, 10]}}))
            await series.refresh()
        finally:
            await client.aclose()
        assert [(r.rounds, r.by_prompt) for r in series._counts.all()] == [(10, None)]

    on_series(redis_url, work)


def test_a_policy_version_whose_counts_were_added_up_leaves_nothing(
    redis_url: str, redis_client: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("service.storage.reports.engine_counts.MAX_LIVE", 8)
    monkeypatch.setattr("service.storage.reports.engine_counts.KEPT_APART", 8)

    async def work(series: Series, asked: list[int]) -> None:
        client = redis.asyncio.Redis.from_url(redis_url)
        store = AsyncStore(client, "default")
        try:
            for policy in range(60):
                fields = {"reporter": "engine", "drafter_version": "v000001-aaaaaaaa", "policy_version": policy}
                await store.book(acceptance(fields | {"rounds": 10, "accepted_tokens": 15, "created": float(policy)}))
                await series.refresh()
        finally:
            await client.aclose()
        assert len(series.points) <= 16
        assert len(series._counts.policies()) <= 17, "those, and the sums of older ones"

    on_series(redis_url, work)


def figures(service: RunningService) -> list[str]:
    """All that /metrics says, but for what a person did to a run meanwhile, and what others use of disk and Redis."""
    lines = service.client.get("/metrics").raise_for_status().text.splitlines()
    return [line for line in lines if not any(word in line for word in ("run_state", "queue_limit", "redis_memory"))]


def test_of_an_archived_run_a_scrape_keeps_neither_chart_nor_history(
    serve: Callable[..., RunningService], redis_client: Redis
) -> None:
    """Of each of thousands of batches and events they are 2 MiB here."""
    service, keys, worker = serve(), Keys("default"), Store(redis_client, "default")
    service.register()
    served = service.publish()
    redis_client.hset(keys.scores, mapping={f"{n:032x}": written(score(scored(n))) for n in range(1000)})
    newest = {f"{n:032x}": float(n) for n in range(1000 - 256, 1000)}
    redis_client.zadd(keys.recent_scores, newest)
    worker.put_score(f"{1000:032x}", score(scored(1000)))
    for policy in range(100, 125):
        counts = {"rounds": 90 + policy, "accepted_tokens": 130, "drafted_tokens": 400, "policy_version": policy}
        report = counts | {"reporter": f"engine {policy % 3}", "drafter_version": served.version}
        service.client.post("/acceptance", json=report).raise_for_status()
    half = {"value": -0.2, "variance": 0.001}
    change = {"rollouts": 64, "alarm": True, "held": half, "drafter": {"value": 0.0, "variance": 0.001}}
    worker.set_worker(gauges({"drift_change": change}))
    lines = [json.dumps({"event": "refused", "time": 9.0 + n, "reason": "no gain" * 30}) for n in range(3000)]
    with service.layout.history("default").open("a") as file:
        file.write("\n".join(lines) + "\n")
    followed = figures(service)
    assert any('drift_part{part="engine"' in line for line in followed)
    assert any("refused_total" in line and line.endswith(" 3000.0") for line in followed)

    change_state(service.layout, "default", "archived", "over")
    told = figures(service)
    assert set(told) < set(followed), "less than of one that is worked on, and nothing else"
    assert any("refused_total" in line and line.endswith(" 3000.0") for line in told)
    restarted, told = serve(), figures(service)
    tracemalloc.start()
    try:
        assert figures(restarted) == told
        gc.collect()
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept < 1 << 20
    one, other = (api.client.get("/alpha").json() for api in (service, restarted))
    assert len(one["points"]) == 126
    passing = {"cursor", "headline"}  # the headline says since when
    assert {k: v for k, v in one.items() if k not in passing} == {k: v for k, v in other.items() if k not in passing}


def test_a_quiet_run_is_read_again_when_a_record_of_it_changes(redis_url: str, redis_client: Redis) -> None:
    worker, keys = Store(redis_client, "default"), Keys("default")
    for number in range(24):
        worker.put_score(f"{number:032x}", score(scored(number)))

    async def main() -> None:
        client = redis.asyncio.Redis.from_url(redis_url)
        try:
            quiet, now = Quiet(AsyncStore(client, "default"), None), time.time()

            async def read(snapshot: RunSnapshot) -> Told | None:
                return await quiet.read(snapshot, (await summary_of(client, "default")).changes)

            assert await read(RunSnapshot(now=now)) is None, "something has just happened"
            archived = RunSnapshot(now=now, state=RunState("archived"))
            in_two_hours = RunSnapshot(now=now + 7200)
            told = await read(in_two_hours)
            assert told is not None
            assert await read(in_two_hours) is told
            assert await read(archived) is told
            redis_client.hdel(keys.scores, f"{3:032x}")  # as a worker shortens them
            later = await read(in_two_hours)
            assert later is not None
            assert later is not told
            worker.put_score(f"{24:032x}", score(scored(24)))
            assert await read(RunSnapshot(now=now)) is None
        finally:
            await client.aclose()

    asyncio.run(main())


@pytest.mark.parametrize("state", ["active", "archived"])
def test_of_a_run_in_which_nothing_changed_redis_is_asked_once(
    state: Any, service: RunningService, redis_url: str, redis_client: Redis
) -> None:
    """However much there is of it: a scrape asks for each run. What any process changes is seen at the next look."""
    worker, sent = Store(redis_client, "default"), 0
    for number in range(16):
        worker.put_score(f"{number:032x}", score(scored(number)))
    service.publish()
    change_state(service.layout, "default", state, "wanted so")

    async def main() -> None:
        async with redis.asyncio.Redis.from_url(redis_url) as client:
            pool: Any = client.connection_pool

            class Counted(pool.connection_class):  # type: ignore[misc]
                async def send_packed_command(self, *args: Any, **options: Any) -> None:
                    nonlocal sent
                    sent += 1
                    await super().send_packed_command(*args, **options)

            pool.connection_class = Counted
            context = ServiceContext(service.settings, client)

            async def asked() -> tuple[int, RunSnapshot]:
                before = sent
                found = await read_now(context, "default", await context.summary("default"))
                return sent - before, found

            await asked()
            times, first = await asked()
            assert (times, len(first.scores)) == (1, 16)
            worker.put_score(f"{16:032x}", score(scored(16)))
            worker.set_worker(gauges({"action": "training"}))
            counted = {"reporter": "r", "policy_version": 2, "rounds": 7, "accepted_tokens": 9, "drafted_tokens": 28}
            counted |= {"method": "drafter", "drafter_version": "v000001-aaaaaaaa", "created": time.time()}
            await context.store("default").book(acceptance(counted))
            times, later = await asked()
            assert times > 1
            assert (len(later.scores), later.worker.action) == (17, "training")
            assert [record.rounds for record in later.acceptances] == [7]
            assert [engine.reporter for engine in later.watch.engines] == ["r"]
            context.close()

    asyncio.run(main())


def test_a_chart_and_a_history_that_nobody_has_asked_for_are_dropped(
    service: RunningService, redis_url: str, redis_client: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the sweep, after an hour. Who asks then gets all of it."""
    Store(redis_client, "default").put_score("a" * 32, score(scored(1)))
    service.publish()

    async def main() -> None:
        async with redis.asyncio.Redis.from_url(redis_url) as client:
            context = ServiceContext(service.settings, client)
            first = await read_followed(context, "default")
            kept: list[weakref.ref[Any]] = [
                weakref.ref(context.of("default").series),
                weakref.ref(context.registry.history._events["default"][0]),
            ]
            await context.reap()
            gc.collect()
            assert all(one() is not None for one in kept)
            clock = time.monotonic
            monkeypatch.setattr(time, "monotonic", lambda: clock() + 3601)
            await context.reap()
            gc.collect()
            assert [one() for one in kept] == [None, None]
            later = await read_followed(context, "default", first.cursor)
            assert (later.points, later.events, later.delta) == (first.points, first.events, None)
            context.close()

    asyncio.run(main())


def test_an_answer_is_304_until_something_changes(service: RunningService, redis_client: Redis) -> None:
    service.publish()
    for path in ("/alpha", "/drafters", "/metrics"):
        first = service.client.get(path)
        again = service.client.get(path, headers={"If-None-Match": first.headers["etag"]})
        assert (again.status_code, again.content) == (304, b""), path
    before = {path: service.client.get(path).headers["etag"] for path in ("/alpha", "/drafters", "/metrics")}
    Store(redis_client, "default").put_score("a" * 32, score(scored(1)))
    service.registry.history.record("default", Refused(reason="no gain"))
    for path, etag in before.items():
        reply = service.client.get(path, headers={"If-None-Match": etag})
        assert reply.status_code == 200, path
    document = service.client.get("/alpha").json()
    assert [point["policy_version"] for point in document["points"]] == [0]
    assert [event["event"] for event in document["events"]] == ["published", "refused"]
    assert service.client.get("/drafters").json()["history"][-1]["reason"] == "no gain"


def test_those_who_ask_meanwhile_share_one_answer_that_was_begun_after_they_asked() -> None:
    async def main() -> None:
        shared, begun = Shared(), list[asyncio.Event]()

        async def compute() -> int:
            begun.append(asyncio.Event())
            await begun[-1].wait()
            return len(begun)

        first = asyncio.create_task(shared.get("a", compute))
        await asyncio.sleep(0)
        others = [asyncio.create_task(shared.get("a", compute)) for _ in range(5)]
        await asyncio.sleep(0)
        begun[0].set()
        assert await first == 1
        await asyncio.sleep(0)
        begun[1].set()
        assert await asyncio.gather(*others) == [2] * 5, "not what was begun before they asked"
        assert not shared._running, "nothing is kept"
        assert not shared._next

    asyncio.run(main())


def test_many_who_list_the_runs_at_once_share_two_answers(
    service: RunningService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each open page asks every few seconds, and a run takes milliseconds."""
    asked, wake = list[str](), threading.Event()
    plain = read_headlines

    async def slow(context: ServiceContext, runs: Sequence[str]) -> object:
        asked.extend(runs)
        await asyncio.to_thread(wake.wait, 20)
        return await plain(context, runs)

    monkeypatch.setattr("service.api.runs.read_headlines", slow)
    arrived, share = list[object](), Shared.get

    async def counted(self: Shared, kind: Any, compute: Any) -> Any:
        arrived.append(kind)
        return await share(self, kind, compute)

    monkeypatch.setattr(Shared, "get", counted)
    with ThreadPoolExecutor(10) as pool:
        found = pool.map(lambda _: httpx.get(f"{service.url}/runs", timeout=60).json(), range(10))
        eventually(lambda: arrived.count(("runs", ("default",))) == 10, 20)
        wake.set()
        assert [one["run"] for listed in found for one in listed["runs"]] == ["default"] * 10
    assert asked == ["default"] * 2


def test_those_who_share_a_failure_do_not_wait_for_one_another() -> None:
    """Each of them would take as long as the first: beside a Redis that hangs, the eighth two minutes."""

    async def main() -> None:
        shared, begun = Shared(), 0

        async def compute() -> int:
            nonlocal begun
            begun += 1
            await asyncio.sleep(0.01)
            raise OSError("away")

        found = await asyncio.gather(*(shared.get("a", compute) for _ in range(9)), return_exceptions=True)
        assert all(isinstance(error, OSError) for error in found)
        assert begun == 2

    asyncio.run(main())


def test_many_who_ask_what_the_engines_say_share_it_and_who_asks_for_now_gets_what_is_computed_since() -> None:
    async def main() -> None:
        computed = 0

        class Engineless:
            async def engines(self, _since: float) -> dict[str, str]:
                nonlocal computed
                computed += 1
                await asyncio.sleep(0.01)
                return {}

            async def times_scored(self) -> int:
                return 0

            async def recent_scores(self, _known: object = None) -> dict[str, ScoreRecord]:
                return {}

            async def returns(self) -> list[Return]:
                return []

        store: Any = Engineless()
        unserved: Any = SimpleNamespace(served=lambda: None)
        evidence = Evidence(lambda: LiveRule(4), Shared(), store, unserved, lambda: 1_000_000)
        found = await asyncio.gather(*(evidence.engines() for _ in range(9)))
        assert computed == 1
        assert len(set(map(id, found))) == 1
        now = await asyncio.gather(*(evidence.engines(fresh=True) for _ in range(9)))
        assert computed == 3, "the first, and one for all who asked while that was computed"
        assert not any(one is found[0] for one in now)
        assert await evidence.engines() is now[-1]

    asyncio.run(main())


def test_a_move_that_another_request_noticed_first_is_not_waited_for(tmp_path: Path) -> None:
    registry = Registry(Layout(tmp_path))
    publish(registry, content=b"first")

    async def main() -> None:
        path = Layout(tmp_path).latest("default")
        pointer = Pointer(path, lambda: registry.latest("default"), asyncio.Event())
        seen = pointer.served()
        publish(registry, content=b"second")
        assert pointer.served() is not seen  # somebody else's look
        await asyncio.wait_for(pointer.moves(seen), timeout=60)
        second, waits = pointer.served(), []
        waits.append(asyncio.create_task(pointer.moves(second)))
        await asyncio.sleep(0)
        publish(registry, content=b"third")
        pointer.served()  # before the watcher looks
        await asyncio.wait_for(waits[0], timeout=60)

    asyncio.run(main())


def test_an_answer_that_fails_fails_for_nobody_else() -> None:
    async def main() -> None:
        shared, turn = Shared(), 0

        async def compute() -> int:
            nonlocal turn
            turn += 1
            await asyncio.sleep(0.01)
            if turn == 1:
                raise OSError("away")
            return turn

        found = await asyncio.gather(*(shared.get("a", compute) for _ in range(3)), return_exceptions=True)
        assert isinstance(found[0], OSError)
        assert found[1:] == [2, 2]

    asyncio.run(main())


@pytest.mark.parametrize("seed", range(4))
def test_what_is_followed_of_a_file_is_what_is_read_of_it(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    path = tmp_path / "history.jsonl"
    file = LineFile(path, max_bytes=400, kept=1)
    followed = Followed(file, dict)
    for number in range(200):
        what = rng.random()
        if what < 0.8:
            file.append({"n": number, "x": "y" * rng.randint(0, 60)})
        elif what < 0.9:
            with path.open("ab") as torn:
                torn.write(rng.choice([b'{"n": ', b"{}", b"\n", b"[1]\n"]))
        elif what < 0.93 and path.exists():
            path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:2]))  # a backup was put back
            followed = Followed(file, dict) if rng.random() < 0.5 else followed
        elif what < 0.95:
            path.unlink(missing_ok=True)
        if rng.random() < 0.5:
            assert followed.read() == file.read()


def test_each_line_of_the_history_is_read_once_and_a_publish_reads_none_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry = Registry(Layout(tmp_path))
    publish(registry)
    for _ in range(300):
        registry.history.record("default", Refused())
    assert len(registry.history.events("default")) == 301
    publish(registry, content=b"second")
    read = registry.history.digest("default").bytes_read
    size = Layout(tmp_path).history("default").stat().st_size
    assert read == size

    monkeypatch.delattr(LineFile, "read")  # of a whole history
    publish(registry, content=b"third")
    assert sum(file.lines_read for file in registry.history._events["default"]) == 301
    assert len(registry.history.events("default")) == 303
    assert sum(file.lines_read for file in registry.history._events["default"]) == 303


def test_many_who_wait_cost_one_look_and_all_learn_of_a_move(
    service: RunningService, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = service.publish()
    context: ServiceContext = service.server.config.app.state.context  # type: ignore[union-attr]
    looks: list[float] = []
    plain = context.of("default").pointer._read

    def read() -> Manifest | None:
        looks.append(time.monotonic())
        return plain()

    monkeypatch.setattr(context.of("default").pointer, "_read", read)

    def poll(_: int) -> int:
        reply = httpx.get(
            f"{service.url}/drafter/latest", params={"wait": 30}, headers={"If-None-Match": manifest.etag}, timeout=90
        )
        sequence: int = reply.json()["sequence"]
        return sequence

    with ThreadPoolExecutor(20) as pool:
        found = pool.map(poll, range(20))
        service.wait_for_requests(20)
        time.sleep(0.3)
        assert len(looks) <= 1, "a manifest is read when `latest` moves"
        assert len(context.of("default").pointer._waiting) == 20
        service.publish(content=b"new")
        assert set(found) == {2}
    assert len(looks) <= 2


@pytest.mark.parametrize("behind", ["", "GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"])
def test_a_client_that_is_gone_is_not_waited_for(serve: Callable[..., RunningService], behind: str) -> None:
    """Also where it has sent another request behind: uvicorn tells only the last one that it is gone."""
    service = serve(long_poll_max_seconds=3600)
    assert service.register().status_code == 201
    etag = service.publish().etag
    context: ServiceContext = service.server.config.app.state.context  # type: ignore[union-attr]

    def becomes(count: int) -> None:
        deadline = time.monotonic() + 60
        while len(context.of("default").pointer._waiting) != count:
            assert time.monotonic() < deadline
            time.sleep(0.01)

    with socket.create_connection(("127.0.0.1", service.port)) as link:
        asked = f"GET /drafter/latest?wait=3600 HTTP/1.1\r\nHost: localhost\r\nIf-None-Match: {etag}\r\n\r\n"
        link.sendall((asked + behind).encode())
        becomes(1)
    becomes(0)


def test_few_requests_begin_in_a_turn_so_that_a_probe_is_next() -> None:
    async def main() -> list[str]:
        throttle, order = Throttle(), list[str]()

        async def request(number: int) -> None:
            await throttle.wait()
            order.append(f"agent {number}")

        async def probe() -> None:
            order.append("probe")

        tasks = [asyncio.create_task(request(n)) for n in range(500)]
        await asyncio.sleep(0)
        tasks.append(asyncio.create_task(probe()))
        await asyncio.gather(*tasks)
        return order

    order = asyncio.run(main())
    assert order.index("probe") <= 3 * _BEGIN_AT_ONCE
    assert [name for name in order if name != "probe"] == [f"agent {n}" for n in range(500)], "first come, first served"


def test_while_more_requests_come_few_begin_and_none_waits_for_ever() -> None:
    """Uvloop accepts one connection in a turn: whoever is to be accepted next waits for all that begin before."""

    async def main() -> tuple[list[int], list[int]]:
        throttle, order, begun = Throttle(), list[int](), list[int]()

        async def request(number: int) -> None:
            await throttle.wait()
            order.append(number)

        tasks = []
        for number in range(_TAKEN_IN_FIRST + 500):
            tasks.append(asyncio.create_task(request(number)))
            await asyncio.sleep(0)
            begun.append(len(order))
        await asyncio.gather(*tasks)
        return order, begun

    order, begun = asyncio.run(main())
    assert begun[_TAKEN_IN_FIRST - 1] == 1, "the first, which found none at work"
    assert begun[-1] >= len(begun) - _BEGIN_AT_ONCE, (
        "then they begin faster than they come: the queue of a flood has an end"
    )
    assert order == list(range(len(begun))), "first come, first served"


def test_a_point_is_json(redis_url: str, redis_client: Redis) -> None:
    async def work(series: Series, asked: list[int]) -> None:
        Store(redis_client, "default").put_score("a" * 32, score(scored(8)))
        await series.refresh()
        assert [json.loads(point)["alpha_served"] for point in series.points.values()] == [2.08]

    on_series(redis_url, work)
