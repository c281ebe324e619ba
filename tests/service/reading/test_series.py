"""The kept series equals what is computed from all records, whatever was written, deleted or lost in between."""

from __future__ import annotations

import asyncio
import json
import math
import random
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import redis.asyncio
from helpers.service.service_fixtures import publish
from helpers.service.storage_fixtures import Store
from helpers.worker.record_fixtures import acceptance, gauges, score
from helpers.worker.whole_fixtures import read_snapshot, run_document
from pydantic import SecretStr
from redis import Redis
from redis.exceptions import ResponseError

from service.api.context.context import ServiceContext
from service.api.problems import Problem
from service.api.snapshot import read_attempt, read_followed, read_headlines, read_now, read_parts, run_text
from service.monitor.events import Moves, read_event
from service.monitor.metrics import RunSnapshot, render
from service.reading import quiet
from service.reading.series import Series
from service.settings import Settings
from service.storage.queue.keys import Keys
from service.storage.registry import Registry
from service.storage.reports import summary
from service.storage.reports.store import AsyncStore

KEYS = Keys("default")
START = 1_700_000_000.0
VERSIONS = ("v000001-aaaaaaaa", "v000002-bbbbbbbb")


class World:
    """A run to which trainer, engines and people do things in a random order."""

    def __init__(self, client: Redis, registry: Registry, store: AsyncStore, seed: int) -> None:
        self.redis, self.registry, self.api = client, registry, store
        self.worker = Store(client, "default")
        self.rng = random.Random(seed)
        self.now, self.policy, self.counts = START, 0, dict[tuple[str, str, int | None], list[int]]()
        self.made, self.scored = 0, dict[str, dict[str, Any]]()
        self.trimmed = 0

    def sums(self, alpha: float) -> dict[str, float]:
        rounds = float(self.rng.randint(50, 200))
        tokens = rounds * alpha * self.rng.uniform(0.9, 1.1)
        moments = {
            "tokens_squared": tokens**2 / 7,
            "rounds_squared": rounds**2 / 7.5,
            "tokens_rounds": tokens * rounds / 8,
        }
        return {"tokens": tokens, "rounds": rounds, "rollouts": 8.0, **(moments if self.rng.random() < 0.9 else {})}

    def put(self, batch_id: str, fields: dict[str, Any]) -> None:
        self.scored[batch_id] = fields
        self.worker.put_score(batch_id, score(fields))

    def batch(self) -> None:
        rng = self.rng
        self.policy = rng.choice([self.policy, self.policy, self.policy + 1])
        fields: dict[str, Any] = {
            "entry_id": f"{int(1000 * self.now)}-{rng.randint(0, 3)}",
            "policy_version": rng.choice([self.policy, self.policy, max(0, self.policy - 2), None]),
            "drafter_version": rng.choice(VERSIONS),
            "served": self.sums(2.5),
            "created": self.now,
            "rollouts": 8,
            "tokens": 900,
            "logprob_sum": -rng.uniform(10, 900),
            "logprob_tokens": 900,
            "action": rng.choice(["train", "idle", None]),
            "published_total": len(self.scored) // 5,
        }
        if rng.random() < 0.5:
            fields |= {"frozen": self.sums(2.2), "best": self.sums(2.7), "best_version": rng.choice(VERSIONS)}
        self.made += 1
        self.put(f"{self.made:032x}", fields)

    def again(self) -> None:
        """A batch is delivered again, and scored by another drafter."""
        if self.scored:
            batch_id = self.rng.choice(list(self.scored))
            self.put(batch_id, self.scored[batch_id] | {"served": self.sums(2.0), "created": self.now})

    def back(self) -> None:
        """The trainer goes on from an earlier checkpoint."""
        self.policy = max(0, self.policy - 30)
        for _ in range(16):
            self.batch()
            self.now += 1

    def trim(self) -> None:
        for batch_id in list(self.scored)[:3]:
            self.redis.hdel(KEYS.scores, batch_id)  # as a worker of before the stream does
            del self.scored[batch_id]
        self.trimmed += 1

    async def report(self) -> None:
        reporter, drafter = f"agent {self.rng.randint(0, 3)}", self.rng.choice(VERSIONS)
        policy = self.rng.choice([self.policy, max(0, self.policy - 1), None])
        counts = self.counts.setdefault((reporter, drafter, policy), [0, 0])
        more = self.rng.randint(1, 400)
        counts[0] += more
        counts[1] += self.rng.choice([0, int(1.5 * more)])
        method = self.rng.choice(["drafter", "drafter", "ngram"])
        fields = {"reporter": reporter, "drafter_version": drafter, "policy_version": policy, "created": self.now}
        fields |= {"rounds": counts[0], "accepted_tokens": counts[1], "drafted_tokens": 4 * counts[0], "method": method}
        await self.api.book(acceptance(fields | {"accepted_per_position": [counts[1]]}))

    async def many_reports(self) -> None:
        """So many that older ones are added up, and live sums with them."""
        for policy in range(70):
            fields = {"reporter": "many", "drafter_version": VERSIONS[0], "policy_version": policy, "rounds": 10}
            await self.api.book(acceptance(fields | {"accepted_tokens": 15, "created": self.now}))

    def event(self) -> None:
        kind = self.rng.choice(["refused", "rolled_back", "pushed_again", "realised"])
        event = {"event": kind, "time": self.now, "gain": self.rng.choice([0.1, float("nan")])}
        if kind == "realised":
            event |= {"version": self.rng.choice(VERSIONS), "promised": 0.1, "realised": self.rng.random()}
        if kind in ("rolled_back", "pushed_again"):
            event["sequence"] = self.rng.choice([1, 2])
        self.registry.history.record("default", read_event(event))

    def gauges(self) -> None:
        half = {"value": -0.2, "variance": 0.001}
        change = {"rollouts": 64, "alarm": True, "held": half, "drafter": {"value": 0.0, "variance": 0.001}}
        self.worker.set_worker(gauges({"heartbeat": self.now, "drift_change": change, "published_total": 3}))

    def lose(self) -> None:
        """Redis was put back from a backup without the stream, or the stream was trimmed."""
        self.redis.xtrim(KEYS.changes, maxlen=self.rng.choice([0, 1]))

    async def step(self) -> None:
        self.now += self.rng.choice([0.5, 3.0, 40.0])
        happens = [self.batch] * 6 + [self.again, self.back, self.trim, self.event, self.event, self.gauges, self.lose]
        later = [self.report] * 6 + [self.many_reports]
        chosen: Callable[[], Awaitable[None] | None] = self.rng.choice([*happens, *later])
        found = chosen()
        if found is not None:
            await found


def merged(before: dict[str, Any], answer: dict[str, Any]) -> dict[str, Any]:
    """As the page does it."""
    if "gone" not in answer:
        return answer
    points = {point["policy_version"]: point for point in before["points"]}
    for policy in answer.pop("gone"):
        del points[policy]
    points |= {point["policy_version"]: point for point in answer["points"]}
    events = before["events"][: answer.pop("kept_events")] + answer["events"]
    return answer | {"points": [points[policy] for policy in sorted(points)], "events": events}


def test_what_engines_have_of_a_cause_is_reckoned_beside_the_event_loop(
    tmp_path: Path, redis_url: str, redis_client: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A quarter of a second for 32,000 counts of 10,000 policy versions, at every look: long polls are not to wait."""
    threads: list[threading.Thread] = []

    def reckoned(self: RunSnapshot, *_: Any) -> RunSnapshot:
        threads.append(threading.current_thread())
        return self

    async def main() -> None:
        client = redis.asyncio.Redis.from_url(redis_url)
        context = ServiceContext(Settings(state_dir=tmp_path, redis_url=SecretStr(redis_url)), client)
        monkeypatch.setattr(context, "run", lambda _: type("R", (), {"created": START})())
        monkeypatch.setattr(RunSnapshot, "with_engine", reckoned)
        monkeypatch.setattr(quiet, "QUIET_SECONDS", math.inf)
        publish(Registry(context.layout))
        try:
            for read in (read_followed, partial(read_attempt, attempt=1)):
                await read(context, "default")
            await read_now(context, "default", await context.summary("default"))
            await read_headlines(context, ["default"])
        finally:
            await client.aclose()

    asyncio.run(main())
    assert len(threads) == 4
    assert threading.current_thread() not in threads


@pytest.mark.parametrize("seed", range(4))
def test_the_answers_equal_those_computed_from_all_records(
    seed: int, tmp_path: Path, redis_url: str, redis_client: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:

    async def main() -> int:
        client = redis.asyncio.Redis.from_url(redis_url)
        settings = Settings(state_dir=tmp_path, redis_url=SecretStr(redis_url), max_policy_lag=4)
        one, other = ServiceContext(settings, client), ServiceContext(settings, client)  # two processes
        world = World(redis_client, Registry(one.layout), one.store("default"), seed)
        for context in (one, other):
            monkeypatch.setattr(context, "run", lambda _: type("R", (), {"created": START})())
        monkeypatch.setattr(time, "time", lambda: world.now)
        monkeypatch.setattr("service.storage.history.events._HISTORY_BYTES", 300)
        monkeypatch.setattr("service.api.context.context._UNASKED_SECONDS", -1.0)
        answer = summary.SummaryText.of
        monkeypatch.setattr(summary.SummaryText, "of", lambda found: replace(answer(found), ahead=0))
        publish(world.registry)

        trimmed: dict[ServiceContext, int] = {}
        open_pages: dict[ServiceContext, dict[str, Any]] = {}  # what a page shows that merges what changed

        async def look(context: ServiceContext) -> int:
            """Compare, and return the number of attempts."""
            context.of("default").evidence._engines = None  # told once, for both
            if trimmed.get(context) != world.trimmed:  # few are kept here: some of the newest 256 went
                context.of("default").evidence._recent = None
                trimmed[context] = world.trimmed
            whole = await read_snapshot(context, redis_client, "default")
            followed = await read_followed(context, "default")
            found = json.loads(run_text("default", followed, settings))
            shown = open_pages.get(context)
            if shown is not None:
                changed = await read_followed(context, "default", shown["cursor"])
                shown = merged(shown, json.loads(run_text("default", changed, settings)))
                assert shown == found
            open_pages[context] = json.loads(json.dumps(found))
            assert found.pop("cursor") == followed.cursor
            wanted = json.loads(json.dumps(run_document("default", whole, settings)).replace("NaN", "null"))
            assert found.keys() == wanted.keys()
            for name in wanted:
                assert found[name] == wanted[name], name
            for number in range(1, len(found["attempts"]) + 1):
                of_one = json.loads(run_text("default", await read_attempt(context, "default", number), settings))
                wanted = json.loads(json.dumps(run_document("default", whole, settings, number)).replace("NaN", "null"))
                assert of_one == wanted, number
            with pytest.raises(Problem, match="none is number"):
                await read_attempt(context, "default", len(found["attempts"]) + 1)
            moves = Moves()
            for event in whole.history:
                moves.add(read_event(event.written))
            assert whole.moves == moves
            monkeypatch.setattr(quiet, "QUIET_SECONDS", -math.inf)
            of_quiet = await read_now(context, "default", await context.summary("default"))
            monkeypatch.setattr(quiet, "QUIET_SECONDS", math.inf)
            scraped = await read_now(context, "default", await context.summary("default"))
            assert len(of_quiet.acceptances) <= len(scraped.acceptances)
            assert of_quiet.current == whole.current
            for snapshot in (followed.snapshot, scraped, of_quiet):
                shared = replace(snapshot, redis_fill=whole.redis_fill)  # others write to Redis meanwhile
                assert sorted(render({"r": shared}).splitlines()) == sorted(render({"r": whole}).splitlines())
            parts, damaged = await read_parts(context, ["default"])
            assert damaged == {}
            shared = replace(whole, queue_limit_bytes=scraped.queue_limit_bytes)
            assert sorted(render(parts).splitlines()) == sorted(render({"default": shared}).splitlines())
            if world.rng.random() < 0.3:  # nobody asks for an hour
                context._drop_unasked()
            return len(found["attempts"])

        try:
            for _ in range(50):
                await world.step()
                if world.rng.random() < 0.4:  # else several things happen before anybody looks
                    await look(world.rng.choice([one, one, other]))
            for _ in range(40):
                world.policy, world.now = world.policy + 1, world.now + 1
                world.batch()
            await look(one)
            world.now += 1
            world.back()
            attempts = await look(one)
        finally:
            await client.aclose()
        return attempts

    assert asyncio.run(main()) >= 2


def test_a_redis_that_fails_in_the_middle_of_a_look_leaves_no_batch_out_of_the_next(
    redis_url: str, redis_client: Redis
) -> None:
    """A key of another kind fails one command, as a Redis that restarts between two of them does."""
    worker = Store(redis_client, "default")

    def scored(number: int) -> None:
        fields = {"entry_id": f"{number}-0", "policy_version": number // 2, "rollouts": 8, "tokens": 9}
        worker.put_score(f"{number:032x}", score(fields | {"created": START + number}))

    async def look(series: Series) -> dict[int, bytes]:
        await series.refresh()
        return series.points

    async def main() -> None:
        async with redis.asyncio.Redis.from_url(redis_url) as client:
            series = Series(AsyncStore(client, "default"), None)
            for number in range(6):
                scored(number)
                redis_client.set(KEYS.returns, "")
                with pytest.raises(ResponseError):
                    await series.refresh()
                redis_client.delete(KEYS.returns)
                assert await look(series) == await look(Series(AsyncStore(client, "default"), None)), number

    asyncio.run(main())
