"""Every Lua script and every public method of the queue and the reports, once or more on a real cluster."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers.service.failover_fixtures import Cluster
from helpers.worker.record_fixtures import gauges

import service.storage
from service.monitor.live.engine import LiveRule
from service.monitor.records import AcceptanceRecord, ScoreRecord
from service.storage.queue.dead import DeadLetters
from service.storage.queue.deliveries import RolloutQueue
from service.storage.queue.keys import Keys, lua, text
from service.storage.queue.lease import give_back, take_from_workers
from service.storage.queue.rollout_queue import AsyncRolloutQueue, Batch, Enqueued
from service.storage.ready import connect, connect_async
from service.storage.reports.store import AsyncStore, Store
from service.storage.reports.summary import Summary, answers_of, summary_in, summary_of

SCRIPTS = {path.stem for path in (Path(service.storage.__file__).parent / "lua").glob("*.lua")}
CLASSES = (RolloutQueue, AsyncRolloutQueue, DeadLetters, Store, AsyncStore)
RUNS = ("alpha", "beta", "gamma", "delta")  # in slots of more than one primary
HOUR = 3600.0


class Noted:
    """An object whose public methods are called by name, each of them noted."""

    def __init__(self, inner: object, called: set[str]) -> None:
        self._inner, self._called = inner, called

    def __getattr__(self, name: str) -> Any:
        self._called.add(f"{type(self._inner).__name__}.{name}")
        return getattr(self._inner, name)


def public_methods(classes: Iterable[type]) -> set[str]:
    """Those that a class says itself."""
    return {
        f"{each.__name__}.{name}"
        for each in classes
        for name, value in vars(each).items()
        if callable(value) and not name.startswith("_")
    }


class Spied:
    """A cluster's client: which texts of scripts it sent, and had an answer to."""

    def __init__(self, client: Any, ran: set[str], texts: dict[str, str]) -> None:
        self._ran, self._texts, self._execute = ran, texts, client.execute_command
        is_async = asyncio.iscoroutinefunction(self._execute)
        client.execute_command = self.execute_async if is_async else self.execute

    def execute(self, *args: Any, **options: Any) -> Any:
        answer = self._execute(*args, **options)
        self._note(args)
        return answer

    async def execute_async(self, *args: Any, **options: Any) -> Any:
        answer = await self._execute(*args, **options)
        self._note(args)
        return answer

    def _note(self, args: tuple[Any, ...]) -> None:
        if args[0] in ("SCRIPT LOAD", "EVAL"):
            self._texts[hashlib.sha1(text(args[1]).encode(), usedforsecurity=False).hexdigest()] = text(args[1])
        if args[0] in ("EVAL", "EVALSHA"):
            sent = self._texts[args[1]] if args[0] == "EVALSHA" else args[1]
            self._ran |= {name for name in SCRIPTS if lua(name) in sent}


def make_batch(number: int, *ids: str) -> Batch:
    name = f"{number:032x}"
    return Batch(name, f"{name}.{name}.safetensors", 100, 10, 2, number, number, ids or (f"{number}a", f"{number}b"))


@pytest.mark.slow
def test_every_script_and_every_public_method_runs_on_a_cluster(tmp_path: Path) -> None:
    called: set[str] = set()
    ran: set[str] = set()
    texts: dict[str, str] = {}
    with Cluster(tmp_path, replicas=False) as servers, connect(servers.url) as client:
        Spied(client, ran, texts)

        async def live(run: str) -> None:
            async with connect_async(servers.url) as of_api:
                Spied(of_api, ran, texts)
                asynchronous = AsyncRolloutQueue(of_api, run, 3_000, 9)
                read = functools.partial(summary_of, of_api, run)
                worker, dead = RolloutQueue(client, run, 3_000), DeadLetters(of_api, asynchronous)
                await rollouts_live(read, *(Noted(each, called) for each in (worker, asynchronous, dead)))
                await reports_live(Noted(Store(client, run), called), Noted(AsyncStore(of_api, run, 1), called), read)
                await sessions_live(Noted(asynchronous, called), Noted(AsyncStore(of_api, run), called), read)
                together = await answers_of(of_api, RUNS)
                assert together.keys() == set(RUNS)
                assert summary_in(together[run]) == await read()
                assert await take_from_workers(of_api, run)
                await give_back(of_api, run)
            assert not list(client.scan_iter(match=f"da:{{{run}}}:*"))

        for run in RUNS:
            asyncio.run(live(run))
        primaries = {servers.primary_of(Keys(run).queue).port for run in RUNS}
    assert len(primaries) > 1
    assert ran == SCRIPTS, f"never ran on a cluster: {sorted(SCRIPTS - ran)}"
    assert sorted(public_methods(CLASSES) - called) == []


async def rollouts_live(summary: Callable[[], Awaitable[Summary]], worker: Any, api: Any, dead: Any) -> None:
    """Batches of one run come, end in every way, die, are put back and are forgotten."""
    bounds: dict[str, Any] = {"max_items": 3, "max_bytes": 1000}
    worker.ensure_group()
    await api.ensure_group()
    nothing = await summary()
    assert (nothing.oldest_queued, nothing.last_arrival, nothing.dead_letters) == (None, None, [])
    assert (await api.enqueue(make_batch(1), **bounds)).outcome == "accepted"
    assert (await api.enqueue(make_batch(1), **bounds)).outcome == "duplicate"
    assert (await api.enqueue(make_batch(2, "1a", "2b"), **bounds)).known == 1
    assert (await api.enqueue(make_batch(3), **bounds)).outcome == "accepted"
    assert (await api.enqueue(make_batch(4), **bounds)).outcome == "full"
    assert worker.ack(worker.claim("one", 1, HOUR)[0])
    assert (await api.enqueue(make_batch(4), **bounds)).outcome == "accepted"
    assert await api.disown(make_batch(5).batch_id, make_batch(5).blob)
    assert not await api.disown(make_batch(4).batch_id, make_batch(4).blob)
    assert (await api.enqueue(make_batch(5), max_items=9, max_bytes=1000)).outcome == "disowned"
    await api.count_rejected()
    assert tuple(await api.depth()) == (3, 300, 6)
    assert await api.dead_file_bytes() == 0
    assert await api.batch_of("1a") == make_batch(1).batch_id
    found = await summary()
    assert (found.counters["items"], found.counters["bytes"], found.counters["rejected_total"]) == (3, 300, 2)
    assert time.time() - HOUR < (found.oldest_queued or 0) <= (found.last_arrival or 0)
    assert worker.newest_policy() == 4
    assert [entry.policy_version for entry in worker.unfinished()][-1:] == [4]
    assert not worker.was_refused(), "since it was asked last"

    assert await api.remembered() > await api.shorten(0) == 0, "of the one that ended"

    first, second, third = worker.claim("one", 1000, HOUR)
    assert [worker.memory_ran_out(third, pause) for pause in (60.0, 60.0, 0.0)] == [1, 1, 2]
    worker.release("one", [third])
    assert [entry.deliveries for entry in worker.own_pending("one", [first.entry_id, second.entry_id])] == [1]
    assert worker.heartbeat("one", [first.entry_id]) == [first.entry_id]
    taken = worker.claim("two", 1000, 0.0)
    assert [entry.entry_id for entry in taken] == [first.entry_id, second.entry_id, third.entry_id]
    assert worker.ack(first)
    assert worker.dead_letter(second, "reason 2")
    assert worker.dead_letter(third, "reason 3")
    died = [letter["reason"] for letter in (await summary()).dead_letters]
    assert (died, await dead.total(), len(await dead.page(9))) == (["reason 3", "reason 2"], 2, 2)
    known = await api.batch(third.batch_id)
    assert (await dead.put_back(third.batch_id, known, **bounds)).outcome == "accepted"
    assert await dead.discard(second.batch_id) == ("dead", second.blob)
    (again,) = worker.claim("two", 1000, HOUR)
    assert worker.dead_letter(again, "once more")
    assert await dead.sweep(older_than_seconds=HOUR, max_bytes=100) == []
    assert await dead.sweep(older_than_seconds=HOUR, max_bytes=99) == [third.blob]
    assert await api.enqueue(make_batch(6), **bounds) == Enqueued("accepted", "queued", None, 3, "once more")
    (sixth,) = worker.claim("two", 1000, HOUR)
    assert worker.dead_letter(sixth, "the last")
    assert worker.sweep_dead(older_than_seconds=-HOUR, max_bytes=1000) == [sixth.blob]
    assert await api.batch(first.batch_id) is None, "forgotten: so much is not remembered"
    counts = (await summary()).counters
    assert (counts["items"], counts["accepted_total"], counts["dead_total"], counts["put_back_total"]) == (0, 5, 4, 1)


async def reports_live(worker: Any, api: Any, summary: Callable[[], Awaitable[Summary]]) -> None:
    """Scores, engines' counts and requests of one run, and its end."""
    assert await api.newest_change() == "0-0"
    assert worker.put_score("b1", ScoreRecord(batch_id="b1", policy_version=1))
    assert list(worker.scores()) == list(await api.recent_scores()) == ["b1"]
    assert worker.recent_scores() == list(worker.scores().values())
    assert await api.times_scored() == (await summary()).times_scored == 1
    assert len(await api.scores_of(["b1", "b2"])) == 1
    seen = await api.newest_change()
    long_ago = time.time() - 2 * HOUR
    await api.book(AcceptanceRecord(reporter="old", policy_version=1, rounds=7, emitted_tokens=9, created=long_ago))
    await api.book(AcceptanceRecord(reporter="old", policy_version=None, rounds=9, emitted_tokens=9, created=long_ago))
    await api.book(AcceptanceRecord(reporter="new", policy_version=2, rounds=5, emitted_tokens=8, created=time.time()))
    changes = await api.changes(seen)
    assert {kind for kind, _, _ in changes.changed} == {"a", "l"}, "the silent one's rounds are in a live sum"
    assert (await summary()).changes == changes._replace(changed=[])
    assert await api.changes("1-1") is None, "of no change that is kept"
    assert {kind async for piece in api.all_records() for kind, _, _ in piece} == {"s", "a", "l"}
    assert [record.rounds for record in await api.newest_acceptances(0.0)] == [5]
    assert list(await api.engines(0.0)) == ["new"]
    assert ((await summary()).last_report or 0) > long_ago + HOUR
    assert worker.watch({name: account for name, (_, account) in worker.accounts(0.0).items()}, LiveRule()) is not None

    worker.set_worker(gauges({"action": "training", "refused": [1, 2]}))
    assert worker.served_ago() is not None
    worker.begin("opening", (1, 2), 1)
    assert worker.begun("opening", (1, 2))[0] == 1
    worker.end("opening")
    worker.forget_refusal()
    await api.forget_refusal()
    assert (await summary()).worker.action == "training"
    asked = await api.ask_of_drift("reset")
    assert worker.drift_requests() == {"reset": asked}
    assert worker.told("error") is None
    for number in (3, 2):
        await api.note_head(number)
    assert (await api.latest_head(), await api.latest_policy()) == (2, 6)
    for number in (6, 0):
        await api.note_registration(number)
    assert len(await api.returns()) == 1, "at 6 nobody went back"
    for number in (3, 2, 1):
        await api.note_head(number)
    assert [one.to for one in await api.returns()] == [0, 3], "where that trainer really begins: its first head says it"
    assert worker.returns() == await api.returns()
    assert (await api.forget(2) or 0) > 5
    assert await api.forget(1) is None, "a later change was there before it"
    assert await api.forget(2) == 0
    assert await api.forget() == 1, "the number"


async def sessions_live(api: Any, store: Any, summary: Callable[[], Awaitable[Summary]]) -> None:
    """A trainer starts twice, its first start sends something late, and the second one goes back."""
    first, second = "1" * 32, "2" * 32

    async def outcome(number: int, session: str) -> str:
        batch = replace(make_batch(number), session=session, session_began=1)
        outcome: str = (await api.enqueue(batch, max_items=9, max_bytes=1000)).outcome
        return outcome

    assert await outcome(1, first) == "accepted"
    assert not (await summary()).outdated
    await store.note_registration(0, second)
    assert [await outcome(2, second), await outcome(3, first), await outcome(4, second)] == [
        *("accepted", "outdated", "accepted")
    ]
    assert not (await summary()).outdated, "one file that is late"
    assert [await store.was_followed(session) for session in (first, second, "3" * 32, "")] == [
        True,
        False,
        False,
        False,
    ]
    await store.note_head(2, went_back=True, session=second)
    assert [(one.to, one.attempt) for one in await store.returns()] == [(0, 0), (2, 2)]
    assert await outcome(5, "3" * 32) == "accepted"
    assert (await api.batch(make_batch(5).batch_id) or {})["attempt"] == "3"
    await store.forget()
