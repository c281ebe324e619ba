"""A run's part of a scrape is made again where something of it changed, and is what another process makes of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest
import redis.asyncio
from helpers.service.service_fixtures import RunningService, rollout_file
from helpers.service.storage_fixtures import Store
from helpers.worker.record_fixtures import acceptance, gauges, score
from redis import Redis

from service.api.context.context import ServiceContext
from service.api.snapshot import facts_of, read_headlines, read_parts
from service.monitor.events import Refused
from service.monitor.headline import RunFacts
from service.monitor.headroom import TRAINER_SILENT_SECONDS
from service.monitor.live.watch import EVIDENCE_SECONDS
from service.monitor.metrics import RunSnapshot, part_of, render
from service.storage.layout import Layout
from service.storage.queue.deliveries import RolloutQueue
from service.storage.queue.keys import Keys
from service.storage.reports.store import AsyncStore
from service.storage.reports.summary import SummaryText
from service.storage.runs import change_state, withdraw_run

KEYS = Keys("one")
HEADROOM = {"gain": 0.2, "low": 0.1, "high": 0.3, "each": 0.05, "each_error": 0.01, "busy": 0.5}


class Scraped:
    """Two API processes on one Redis: one keeps what it made, the other is asked for the first time."""

    def __init__(self, service: RunningService, redis_client: Redis, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.service, self.redis, self.url = service, redis_client, url
        self.store, self.queue, self.scored = Store(redis_client, "one"), RolloutQueue(redis_client, "one", 3_000), 0
        self.made: list[str] = []
        self.sent = self.asked = self.listed = 0

        def noted(run: str, snapshot: RunSnapshot) -> Any:
            self.made.append(run)
            return part_of(run, snapshot)

        monkeypatch.setattr("service.api.snapshot.part_of", noted)
        of = SummaryText.of  # a busy machine may stop for half a second between Redis' clock and ours
        monkeypatch.setattr(SummaryText, "of", lambda found: replace(of(found), ahead=0))

    def score(self) -> None:
        """A batch is scored."""
        self.scored += 1
        sums = {"tokens": 200.0 + self.scored, "rounds": 100.0}
        fields = {"policy_version": self.scored // 4, "served": sums, "frozen": sums, "created": float(self.scored)}
        fields |= {"entry_id": f"{self.scored}-0", "drafter_version": "v000001-aaaaaaaa", "rollouts": 8}
        self.store.put_score(f"{self.scored:032x}", score(fields))

    def post(self, name: str) -> None:
        """A batch comes."""
        assert self.service.post(rollout_file((name,), run="one"), run="one").status_code == 202

    def end(self, *, dead: bool) -> None:
        """The worker ends a batch."""
        self.queue.ensure_group()
        (entry,) = self.queue.claim("worker", 1, 3600.0)
        assert self.queue.dead_letter(entry, "broken") if dead else self.queue.ack(entry)

    def run(self, work: Callable[[Callable[[], Awaitable[list[str]]]], Awaitable[None]]) -> None:
        """Do some work, which may compare what both processes say and gets the runs that one made again."""

        async def main() -> None:
            async with redis.asyncio.Redis.from_url(self.url) as client:
                pool: Any = client.connection_pool
                of = self

                class Counted(pool.connection_class):  # type: ignore[misc]
                    async def send_packed_command(self, *args: Any, **options: Any) -> None:
                        of.sent += 1
                        await super().send_packed_command(*args, **options)

                pool.connection_class = Counted
                context = ServiceContext(self.service.settings, client)

                async def look(context: ServiceContext) -> bytes:
                    parts, damaged = await read_parts(context, context.layout.run_names())
                    return render(parts, unreadable=list(damaged))

                async def facts(context: ServiceContext, now: float) -> dict[str, RunFacts | str]:
                    found, damaged = await read_headlines(context, context.layout.run_names())
                    told: dict[str, RunFacts | str] = {run: str(error) for run, error in damaged.items()}
                    for run, (snapshot, _) in found.items():
                        same = replace(snapshot, now=now, api_began=None, redis_fill=None)
                        told[run] = facts_of(same, self.service.settings)
                    return told

                async def compare() -> list[str]:
                    self.made.clear()
                    before = self.sent
                    found, made = await look(context), list(self.made)
                    self.asked = self.sent - before
                    other = ServiceContext(self.service.settings, client)
                    assert found.splitlines() == (await look(other)).splitlines()
                    now, before = time.time(), self.sent
                    told = await facts(context, now)
                    self.listed = self.sent - before
                    assert told == await facts(other, now), "what headlines are made of"
                    other.close()
                    return made

                await work(compare)
                context.close()

        asyncio.run(main())


@pytest.fixture
def scraped(
    serve: Callable[..., RunningService], redis_client: Redis, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> Scraped:
    """Three runs. The queue's bound is fixed: that by the disk depends on what others write there."""
    service = serve(queue_max_bytes=1 << 20, max_body_bytes=1 << 20)
    for run in ("one", "other", "third"):
        assert service.register(run).status_code == 201
    return Scraped(service, redis_client, redis_url, monkeypatch)


def test_a_part_is_made_again_after_each_event_and_says_what_another_process_says(scraped: Scraped) -> None:
    service, layout = scraped.service, scraped.service.layout
    state = layout.run_state("one")
    drift = {"value": -0.2, "variance": 0.001}
    change = {"rollouts": 64, "alarm": True, "held": drift, "drafter": {"value": 0.0, "variance": 0.001}}
    worker = {"action": "train", "published_total": 2, "rounds_total": {"served": 3.0}, "drift_change": change}
    old = {"reporter": "r", "policy_version": 2, "rounds": 70, "accepted_tokens": 90, "drafted_tokens": 280}
    old |= {"method": "drafter", "drafter_version": "v000001-aaaaaaaa", "created": time.time() - EVIDENCE_SECONDS - 60}
    events: list[Callable[[], object]] = [
        lambda: scraped.post("a"),
        lambda: scraped.end(dead=False),
        lambda: scraped.post("b"),
        lambda: scraped.end(dead=True),
        scraped.score,
        lambda: scraped.store.put_score(f"{1:032x}", score({"policy_version": 9, "created": 1.0})),
        lambda: scraped.store.set_worker(gauges(worker)),
        lambda: scraped.store.set_worker(gauges({"error": "no memory"})),
        lambda: service.publish("one"),
        lambda: service.publish("one", b"others"),
        lambda: service.registry.rollback("one", service.registry.versions("one")[0], "by hand"),
        lambda: service.registry.push_again("one", "lost"),
        lambda: service.registry.history.record("one", Refused(reason="no gain")),
        lambda: service.registry.history.record("one", Refused(reason="no gain")),
        lambda: change_state(layout, "one", "paused", "for a while"),
        lambda: state.write_text(state.read_text().replace("paused", "draining")),  # a process died before the history
        lambda: change_state(layout, "one", "archived", "over"),
        lambda: change_state(layout, "one", "active", "again"),
        lambda: scraped.redis.hset(KEYS.counters, "rejected_total", 7),
        lambda: scraped.redis.set(KEYS.scored, 1000),
    ]

    async def work(compare: Callable[[], Awaitable[list[str]]]) -> None:
        assert await compare() == ["one", "other", "third"]
        assert await compare() == []
        assert (scraped.asked, scraped.listed) == (1, 2), "once for all runs; and Redis' memory"
        for number, event in enumerate(events):
            event()
            assert await compare() == ["one"], number
            assert await compare() == [], number
        for beat in (None, "1764547200.25", "soon"):
            scraped.store.set_worker()
            if beat is not None:
                scraped.redis.hset(KEYS.worker, "heartbeat", beat)
            assert await compare() == ([] if beat != "soon" else ["one"]), (
                "a sign of life alone changes no other sample"
            )
        scraped.store.set_worker()
        assert await compare() == ["one"]

        async with redis.asyncio.Redis.from_url(scraped.url) as client:
            await AsyncStore(client, "one").book(acceptance(old))
            assert await compare() == ["one"]
            assert await compare() == [], "its engine is silent"
            await AsyncStore(client, "one").book(acceptance(old | {"rounds": 80, "created": time.time()}))
        assert await compare() == ["one"]
        assert await compare() == ["one"], "what engines say ends by the clock"

    scraped.run(work)


def test_a_run_that_is_broken_deleted_or_begun_again_is_what_another_process_says(scraped: Scraped) -> None:
    service, layout = scraped.service, scraped.service.layout

    async def work(compare: Callable[[], Awaitable[list[str]]]) -> None:
        service.publish("one")
        scraped.score()
        await compare()
        scraped.redis.set(KEYS.dead, "of another kind")
        assert await compare() == []
        scraped.redis.delete(KEYS.dead)
        assert await compare() == ["one"]
        latest = layout.latest("one").read_bytes()
        layout.latest("one").write_bytes(b"{")
        assert await compare() == []
        layout.latest("one").write_bytes(latest)
        assert await compare() == ["one"]
        withdraw_run(Layout(layout.root), "one")
        assert await compare() == []
        layout.withdrawn("one").unlink()
        assert service.register("one").status_code in (200, 201)
        assert await compare() == ["one"]
        assert await compare() == []

    scraped.run(work)


def test_what_the_clock_alone_changes_is_told(scraped: Scraped, monkeypatch: pytest.MonkeyPatch) -> None:
    """Headroom has another meaning once the trainer is silent, without anything being written."""
    real, past = time.time, 0.0
    monkeypatch.setattr(time, "time", lambda: real() + past)

    async def work(compare: Callable[[], Awaitable[list[str]]]) -> None:
        nonlocal past
        scraped.post("a")
        scraped.end(dead=False)
        scraped.store.set_worker(gauges({"headroom": HEADROOM, "action": "train"}))
        assert await compare() == ["one", "other", "third"]
        assert await compare() == ["one"]
        past = TRAINER_SILENT_SECONDS + 60.0
        assert await compare() == ["one"], "now it is silent"
        assert await compare() == []

    scraped.run(work)
