"""What the headline is told: read from what API, engines and worker have stored."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import redis.asyncio
from helpers.service.service_fixtures import RunningService, rollout_file
from helpers.service.storage_fixtures import RolloutQueue, Store
from helpers.worker.record_fixtures import acceptance, gauges, score, stored
from helpers.worker.worker_fixtures import Bench
from redis import Redis

import service.api.snapshot
import service.monitor.headline
from service.api.context.context import ServiceContext
from service.api.snapshot import facts_of
from service.monitor.headline import RunFacts
from service.settings import Settings
from service.storage.history.events import History
from service.storage.queue.keys import Keys
from service.storage.ready import Memory, memory_of
from service.storage.reports.store import RECENT_SCORES, AsyncStore
from service.storage.runs import change_state

NOW = 5000.0
VERSION = "v000001-aaaaaaaa"


def facts(**fields: Any) -> RunFacts:
    return facts_of(stored(**({"now": NOW} | fields)), Settings(queue_max_bytes=1 << 34))


def scored(second: float, alpha: float = 3.0) -> dict[str, Any]:
    sums = {"tokens": 100 * alpha, "rounds": 100.0}
    entry = f"{int(second * 1000)}-0"
    return {"entry_id": entry, "policy_version": 1, "drafter_version": VERSION, "served": sums, "created": second}


def counted(rounds: int, accepted: int, created: float, **more: Any) -> dict[str, Any]:
    record = {"reporter": "e", "drafter_version": VERSION, "policy_version": 1, "created": created}
    return record | {"rounds": rounds, "accepted_tokens": accepted, **more}


def test_batches_dead_and_scored_are_put_in_the_order_in_which_they_came() -> None:
    letters = [{"entry_id": f"{n}000-0", "reason": f"reason {n}"} for n in (30, 29, 8)]
    found = facts(scores=[scored(n) for n in range(10, 29)], dead_letters=letters)
    assert (found.recent_batches, found.recent_dead, found.dead_reason) == (20, 2, "reason 30")


def test_it_is_known_how_many_of_the_newest_batches_are_dead_and_when_one_was_scored_last() -> None:
    def dead(*seconds: int) -> RunFacts:
        letters = [{"entry_id": f"{n}000-0", "reason": "r"} for n in seconds]
        return facts(scores=[scored(n) for n in range(10, 20)], dead_letters=letters)

    assert [dead(*found).newest_dead for found in ((), (5, 6), (5, 20, 21), tuple(range(20, 50)))] == [0, 0, 2, 20]
    assert (dead().last_scored, facts().last_scored) == (19.0, None)


def test_an_engine_is_dead_by_its_last_rounds() -> None:
    healthy, dead = counted(10_000, 20_000, NOW - 60), counted(300, 2, NOW - 5, policy_version=2)
    [found] = facts(scores=[scored(1)], acceptances=[healthy, dead]).watch.engines
    assert (found.reporter, found.drafter_version, found.rounds, found.name) == ("e", VERSION, 300, "dead")
    assert found.stretch is not None
    assert found.stretch.live_alpha == pytest.approx(1 + 2 / 300)
    assert found.stretch.replay_alpha == 3.0
    few, other = dead | {"rounds": 30, "accepted_tokens": 0}, dead | {"method": "ngram"}
    for record in (few, other):
        assert not [e for e in facts(scores=[scored(1)], acceptances=[record]).watch.engines if e.sick]
    [bad] = facts(scores=[scored(1, alpha=1.1)], acceptances=[dead]).watch.engines
    assert (bad.name, "bad, not dead" in bad.text) == ("healthy", True)
    [unknown] = facts(acceptances=[dead]).watch.engines
    assert unknown.name == "unknown", "nobody knows"


def test_what_a_sick_engine_counted_is_no_evidence() -> None:
    good = counted(1000, 2000, NOW - 5) | {"reporter": "good"}
    found = facts(scores=[scored(1)], acceptances=[good, counted(1000, 0, NOW - 4)])
    assert found.current is not None
    assert (found.current.alpha_live, found.current.live_rounds) == (3.0, 1000)


def test_pauses_of_a_trainer_are_known_by_when_its_batches_came() -> None:
    assert facts(scores=[scored(10), scored(70), scored(75)]).longest_pause == 60.0
    assert facts(scores=[{"policy_version": 1, "created": 1.0}]).longest_pause is None


def test_an_alarm_is_a_lane_above_its_limit() -> None:
    lanes = {"fast": {"statistic": 3.0, "limit": 9.5}, "slow": {"statistic": 40.0, "limit": 36.1}}
    found = facts(worker={"drift": lanes, "drift_alpha": 2.5, "drift_level": 3.4})
    assert (found.worker.drift_alarm, found.worker.drift_alpha, found.worker.drift_level) == (True, 2.5, 3.4)
    assert not facts(worker={"drift": {"fast": lanes["fast"]}}).worker.drift_alarm
    assert not facts(worker={"drift": {"fast": {}}}).worker.drift_alarm


def test_a_run_says_what_it_waits_for(service: RunningService) -> None:
    def said() -> dict[str, Any]:
        found: dict[str, Any] = service.client.get("/runs/default").json()["headline"]
        assert found == service.client.get("/alpha").json()["headline"]
        return found

    assert said()["text"] == "Waiting for the first rollouts."
    assert service.post(rollout_file()).status_code == 202
    assert said()["text"] == "Waiting: 1 batch is queued, the worker has not begun."


def test_when_batches_came_is_told_also_after_they_ended(service: RunningService, redis_client: Redis) -> None:
    def arrived() -> float | None:
        for line in service.client.get("/metrics").text.splitlines():
            if line.startswith("draftalign_batches_last_arrival_timestamp_seconds{"):
                return float(line.rpartition(" ")[2])
        return None

    assert arrived() is None
    before = time.time()
    service.post(rollout_file())
    first = arrived()
    assert first is not None
    assert first == pytest.approx(before, abs=60)
    queue = RolloutQueue(redis_client, "default")
    [entry] = queue.claim("worker", 1, 60.0)
    queue.ack(entry)
    assert arrived() == first


def test_the_log_says_the_headline_when_it_becomes_another(
    bench: Bench,
    serve: Callable[..., RunningService],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench.begin()
    monkeypatch.setattr(service.api.snapshot, "_WATCH_SECONDS", 0.05)
    caplog.set_level(logging.INFO, logger="draftalign.api")
    serve()
    bench.wait(lambda: "default: Waiting for the first rollouts." in caplog.text)
    bench.worker()  # takes the run up, however long that takes, then says nothing more
    monkeypatch.setattr(service.monitor.headline, "SILENT_SECONDS", 3.0)
    monkeypatch.setattr(service.monitor.headline, "_START_SECONDS", 3.0)
    bench.store.set_worker(gauges({"heartbeat": time.time() - 71}))
    bench.wait(lambda: re.search(r"default: Worker silent for [78]\d s", caplog.text))  # not in the API's first 3 s
    lines = [record for record in caplog.records if record.getMessage().startswith("default: ")]
    assert [record.levelname for record in lines] == ["INFO", "WARNING"], "each once, however often it is looked"


def test_a_run_that_cannot_be_read_hides_no_other(
    serve: Callable[..., RunningService],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    bench: Bench,
) -> None:
    monkeypatch.setattr(service.api.snapshot, "_WATCH_SECONDS", 0.05)
    caplog.set_level(logging.INFO, logger="draftalign.api")
    api = serve()
    for run in ("broken", "sound"):
        assert api.register(run).status_code == 201
    api.layout.latest("broken").write_text("{")
    bench.wait(lambda: "sound: Waiting for the first rollouts." in caplog.text)


def test_a_run_whose_headline_fails_is_told_of_once_and_hides_no_other(
    serve: Callable[..., RunningService],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    bench: Bench,
) -> None:
    real, looked = service.api.snapshot.read_headlines, Counter[str]()

    async def read(context: ServiceContext, runs: Sequence[str]) -> Any:
        found, damaged = await real(context, runs)
        if found.pop("broken", None) is not None:
            looked["broken"] += 1
            damaged["broken"] = KeyError("nobody foresaw it") if looked["broken"] < 3 else TypeError("nor this")
        return found, damaged

    monkeypatch.setattr(service.api.snapshot, "_WATCH_SECONDS", 0.05)
    monkeypatch.setattr(service.api.snapshot, "read_headlines", read)
    caplog.set_level(logging.INFO, logger="draftalign.api")
    api = serve()
    for run in ("broken", "sound"):
        assert api.register(run).status_code == 201
    bench.wait(lambda: looked["broken"] > 5)
    assert "sound: Waiting for the first rollouts." in caplog.text
    told = [r.exc_info[0] for r in caplog.records if r.exc_info and "broken" in r.getMessage()]
    assert told == [KeyError, TypeError]


def test_headlines_go_on_when_redis_answers_oddly(
    serve: Callable[..., RunningService],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    bench: Bench,
) -> None:
    real, asked = memory_of, Counter[str]()

    async def odd(client: Redis) -> Memory | None:
        asked["memory"] += 1
        if asked["memory"] < 3:
            raise KeyError("nobody foresaw it")
        return await real(client)

    caplog.set_level(logging.INFO, logger="draftalign.api")
    monkeypatch.setattr(service.api.snapshot, "_WATCH_SECONDS", 0.05)
    running = serve()
    assert running.register("sound").status_code == 201
    monkeypatch.setattr(service.api.snapshot, "memory_of", odd)  # now: a request asks, too
    bench.wait(lambda: asked["memory"] > 3)
    change_state(running.layout, "sound", "paused", "for a while")
    bench.wait(lambda: "sound: Paused" in caplog.text)
    assert [r.exc_info[0] for r in caplog.records if r.exc_info] == [KeyError], "said once"


def test_what_a_headline_reads_does_not_grow_with_the_run(
    service: RunningService, redis_client: Redis, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("service.api.snapshot._WATCH_SECONDS", 3600.0)
    version, now = service.publish().version, time.time()

    def grow(scores: range, silent: range) -> None:
        store = Store(redis_client, "default")
        for n in scores:
            store.put_score(f"{n:032x}", score(scored(now - 10_000 + n) | {"drafter_version": version}))
        book(redis_url, [counted(500, 9, now - 5, drafter_version=version)])
        book(redis_url, [counted(500, 900, now - 10_000, reporter=f"silent {n}") for n in silent])

    def read() -> tuple[dict[str, Any], int]:
        before = redis_client.info("stats")["total_net_output_bytes"]
        found: dict[str, Any] = service.client.get("/runs/default").raise_for_status().json()["headline"]
        return found, redis_client.info("stats")["total_net_output_bytes"] - before

    grow(range(300), range(10))
    assert service.client.get("/alpha").json()["headline"] == read()[0]
    monkeypatch.delattr(History, "events")  # the history grows too
    grow(range(300, 301), range(0))  # what was read before is not read again while no batch was scored
    found, size = read()
    assert found["state"] == "engine_dead"
    grow(range(301, 1200), range(10, 60))
    read()  # the batches that are new by now, at most 256 of them
    grow(range(1200, 1201), range(0))
    assert read()[1] < 1.1 * size


def test_only_the_newest_scores_keep_what_engines_are_compared_with(redis_client: Redis) -> None:
    store, sums = Store(redis_client, "default"), {"tokens": 30.0, "rounds": 10.0}
    replayed = [{"version": "v1", "sums": sums, "accepted": [5.0], "reached": [10.0]}]
    for n in range(RECENT_SCORES + 3):
        store.put_score(f"{n:032x}", score(scored(100 + n) | {"replayed": replayed}))
    found = list(store.scores().values())
    assert [record.replayed is None for record in found] == [True] * 3 + [False] * RECENT_SCORES
    assert all(record.served is not None for record in found)


def test_engines_that_fell_silent_are_told_of_by_when_the_last_one_reported(
    service: RunningService, redis_url: str, redis_client: Redis
) -> None:
    Store(redis_client, "default").put_score("a" * 32, score(scored(time.time())))
    book(redis_url, [counted(500, 900, time.time() - 7200)])
    for document in (service.client.get("/runs/default").json(), service.client.get("/alpha").json()):
        assert "No engine has reported for 2 h: none drafts, or agents are away." in document["headline"]["also"]


def test_an_engine_that_is_followed_and_has_drafted_nothing_is_told_of_until_it_drafts(
    service: RunningService, redis_url: str, redis_client: Redis
) -> None:
    def told() -> list[bool]:
        documents = (service.client.get(path).json() for path in ("/runs/default", "/alpha"))
        return ["No engine has drafted yet: e follows" in " ".join(d["headline"]["also"]) for d in documents]

    now = time.time()
    Store(redis_client, "default").put_score("a" * 32, score(scored(now)))
    book(redis_url, [counted(0, 0, now - 9)])
    assert told() == [True, True]
    book(redis_url, [counted(500, 900, now - 8), counted(0, 0, now - 1, policy_version=2)])
    assert told() == [False, False]


def book(url: str, reports: list[dict[str, Any]]) -> None:
    async def main() -> None:
        client = redis.asyncio.Redis.from_url(url)
        try:
            for report in reports:
                await AsyncStore(client, "default").book(acceptance(report))
        finally:
            await client.aclose()

    asyncio.run(main())


def test_a_record_that_is_added_up_meanwhile_is_read_once(redis_url: str, redis_client: Redis) -> None:
    keys, name = Keys("default"), json.dumps(["drafter", VERSION, 1])
    stop = threading.Event()

    def fold_and_back() -> None:
        with Redis.from_url(redis_url) as client:
            while not stop.is_set():
                for apart in (True, False):
                    pipe = client.pipeline(transaction=True)
                    pipe.delete(keys.live if apart else keys.acceptance)
                    if apart:
                        pipe.hset(keys.acceptance, "e/v/1", json.dumps(counted(7, 7, NOW)))
                    else:
                        pipe.hset(keys.live, mapping={f"{name}:rounds": 7, f"{name}:tokens": 14})
                    pipe.execute()

    writer = threading.Thread(target=fold_and_back)
    writer.start()
    try:
        while not redis_client.exists(keys.live, keys.acceptance):
            pass
        seen = [Store(redis_client, "default").acceptances() for _ in range(300)]
    finally:
        stop.set()
        writer.join()
    assert [sum(record.rounds for record in records) for records in seen] == [7] * 300


@pytest.mark.parametrize(
    ("limit", "setting", "disk", "queue"),
    [
        (4 << 30, None, 0.5, 1e-4),
        (0, None, math.inf, 1e-4),
        (None, None, 0.0, 1e-4),
        (4 << 30, 4 << 30, 0.0, 0.5),
        (0, 4 << 30, math.inf, 1e-4),
    ],
)
def test_a_queue_that_the_disk_bounds_is_told_from_one_that_a_setting_bounds(
    limit: int | None, setting: int | None, disk: float, queue: float
) -> None:
    snapshot = stored(now=NOW, counters={"items": 1, "bytes": 2 << 30}, queue_limit_bytes=limit)
    found = facts_of(snapshot, Settings(queue_max_bytes=setting))
    assert (found.disk_fill, found.queue_fill) == (disk, queue)
