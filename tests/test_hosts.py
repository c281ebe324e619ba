"""API replicas and workers that share no directory: one Redis, one object store, and a state directory for each."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from helpers.ports import free_port
from redis import Redis

pytest.importorskip("obstore")
pytest.importorskip("botocore")
pytest.importorskip("moto")

from helpers.engine.engine_forks import Fork
from helpers.forked import ROOT, forks
from helpers.service.failover_fixtures import until
from helpers.service.object_fixtures import BUCKET, Store
from helpers.service.service_fixtures import HEADERS, RunningService, rollout_file
from helpers.service.valkey_fixtures import OwnValkey
from helpers.worker.worker_fixtures import ONE_BY_ONE, World
from test_replicas import answers, upload, upload_with_a_pause

from service.api.context.looks import Looks
from service.storage.queue.lease import Leases
from service.storage.reports.store import AsyncStore

URL = f"s3://{BUCKET}/state"
SETTINGS = ONE_BY_ONE | {"gate_min_gain": 0.005, "recent_tokens": 100_000, "learning_rate": 5e-3, "state_url": URL}


class Hosts:
    """Processes, each with a directory of its own."""

    def __init__(self, place: Path, redis_url: str, stack: contextlib.ExitStack) -> None:
        self._place, self._stack = place, stack
        given = {f"DRAFTALIGN_{name.upper()}": str(value) for name, value in SETTINGS.items()}
        self._environment = os.environ | given | {"DRAFTALIGN_REDIS_URL": redis_url, "OMP_NUM_THREADS": "1"}
        self._environment["PYTHONPATH"] = str(ROOT)

    def start(self, what: str, host: str, port: int = 0) -> Fork:
        own = {"DRAFTALIGN_STATE_DIR": str(self._place / host), "DRAFTALIGN_PORT": str(port)}
        kind = "worker" if what == "worker" else "command"
        process = forks(kind).fork("service.cli", [what], self._environment | own, self._place / f"{host}.log")
        self._stack.callback(process.wait)
        self._stack.callback(process.kill)
        if port:
            until(lambda: answers(port), f"the API of {host} is ready")
        return process


def told(url: str, path: str) -> Any:
    reply = httpx.get(url + path)
    assert reply.status_code == 200, reply.text
    return reply.json()


def serves(url: str) -> tuple[str, int] | None:
    reply = httpx.get(f"{url}/drafter/latest?run=default")
    return None if reply.status_code == 404 else (reply.json()["version"], reply.json()["sequence"])


@pytest.mark.slow
def newest_checkpoint(state: Path) -> str:
    """Its name, which has its number."""
    return max(path.name for path in (state / "runs" / "default" / "worker").glob("checkpoint-*"))


def test_hosts_that_share_no_directory_lose_nothing(tmp_path: Path, store: Store, own_valkey: OwnValkey) -> None:
    world = World()
    sent: list[str] = []
    with contextlib.ExitStack() as stack:
        hosts = Hosts(tmp_path, own_valkey.url, stack)
        ports = [free_port(), free_port()]
        urls = [f"http://127.0.0.1:{port}" for port in ports]
        first = hosts.start("serve", "a", ports[0])
        hosts.start("serve", "b", ports[1])

        # Registered at one, sent to the other at once, and published by the worker of a third.
        put = httpx.put(f"{urls[0]}/runs/default", content=world.run_file(drafter=world.drafter()), headers=HEADERS)
        assert put.status_code == 201, put.text
        sent.append(upload(urls[1:], world.rollout_file("first")))
        worker = hosts.start("worker", "w")
        until(lambda: all(map(serves, urls)), "both serve the first version")
        initial, _ = serves(urls[0]) or pytest.fail("nothing")
        world.heads[1] = world.heads[0] * 1.05
        head = httpx.put(f"{urls[1]}/runs/default/head", content=world.head_file(1), headers=HEADERS)
        assert head.status_code == 201, head.text
        sent += send_until(world, urls, "of", lambda: (serves(urls[0]) or (initial,))[0] != initial)
        until(lambda: serves(urls[0]) == serves(urls[1]), "both serve the same")

        # One is killed amid an upload; who sent it goes on at the other.
        go_on = threading.Event()
        body = world.rollout_file("cut", policy_version=1, rollouts=200)
        with ThreadPoolExecutor(1) as pool:
            cut = pool.submit(upload_with_a_pause, urls, body, go_on)
            until(lambda: any((tmp_path / "a" / "spool" / "tmp").iterdir()), "half of it has come")
            first.kill()
            first.wait()
            go_on.set()
            batch_id, was_cut = cut.result(60)
        assert was_cut
        sent.append(batch_id)
        trained(urls[1], sent)

        # The worker dies, with what it had; another host's goes on from its checkpoint.
        worker.kill()
        worker.wait()
        reached, before = newest_checkpoint(tmp_path / "w"), told(urls[1], "/runs/default")["drafter"]
        hosts.start("worker", "w2")
        sent += send_until(world, urls[1:], "after", lambda: told(urls[1], "/runs/default")["drafter"] != before)
        trained(urls[1], sent)
        assert newest_checkpoint(tmp_path / "w2") >= reached  # its last may not have reached the store

        # A person goes back through the one; the other, started again, says the same.
        hold = httpx.put(f"{urls[1]}/drafter/{initial}/hold?run=default", json={"reason": "it was better"})
        assert hold.status_code == 200, hold.text
        hosts.start("serve", "a", ports[0])
        until(lambda: serves(urls[0]) == serves(urls[1]), "both serve the same")
        assert (serves(urls[0]) or pytest.fail("nothing"))[0] == initial
        history = [told(url, "/drafters?run=default")["history"] for url in urls]
        assert history[0] == history[1]
        moves = [event["sequence"] for event in history[0] if event["event"] in ("published", "rolled_back")]
        assert moves == list(range(1, len(moves) + 1)), "each number once, none left out"
        model = httpx.get(f"{urls[0]}/drafter/{initial}/model.safetensors?run=default")
        assert model.status_code == 200
        assert not [key for key in store.stored() if "/rollouts/" in key], "what has ended is deleted"

        # Deleted through the one, it is gone everywhere, and its name is free.
        assert httpx.delete(f"{urls[1]}/runs/default", timeout=60).status_code == 204
        until(lambda: httpx.get(f"{urls[0]}/runs/default").status_code == 404, "the other knows it")
        until(lambda: not (tmp_path / "w2/runs/default").exists(), "the worker's files are gone")
        assert store.stored() == ["state/trees/default"]
        put = httpx.put(f"{urls[0]}/runs/default", content=world.run_file(drafter=world.drafter()), headers=HEADERS)
        assert put.status_code == 201, put.text


@pytest.fixture
def replicas(tmp_path: Path, store: Store, redis_url: str) -> Iterator[tuple[RunningService, RunningService]]:
    found = [RunningService(state_dir=tmp_path / name, redis_url=redis_url, state_url=URL) for name in ("a", "b")]
    try:
        yield found[0], found[1]
    finally:
        for one in found:
            one.stop()


def test_a_run_that_a_host_has_not_fetched_yet_is_not_taken_for_another_states(
    replicas: tuple[RunningService, RunningService], monkeypatch: pytest.MonkeyPatch, redis_client: Redis
) -> None:
    async def find_nothing(_self: Looks, _run: str) -> None:
        """As where the store takes longer than a call waits for it."""

    one, other = replicas
    monkeypatch.setattr(Looks, "catch_up", find_nothing)
    monkeypatch.setattr(type(other.layout), "refresh", lambda _layout: None)
    assert one.register().status_code == 201
    assert Leases(redis_client).hold("default")
    assert Leases(redis_client).hold("unknown")
    assert other.register().status_code == 200
    refused = other.client.put("/runs/unknown", content=b"", headers=HEADERS)
    assert (refused.status_code, refused.json()["type"]) == (503, "urn:draftalign:run-of-another-state")


class Stopped:
    """The first to delete a run's keys in Redis stops right before or after it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
        self._forget, self._where = AsyncStore.forget, where
        self._asleep, self._wake = threading.Event(), threading.Event()
        stopped = self

        async def forget(self: AsyncStore, *fence: Any) -> Any:
            return await stopped._in_place_of(self, *fence)

        monkeypatch.setattr(AsyncStore, "forget", forget)

    async def _in_place_of(self, store: AsyncStore, *fence: Any) -> Any:
        first, found = not self._asleep.is_set(), None
        if self._where == "after" or not first:
            found = await self._forget(store, *fence)
        if first:
            self._asleep.set()
            await asyncio.to_thread(self._wake.wait, 30)
        return await self._forget(store, *fence) if first and self._where == "before" else found

    @contextlib.contextmanager
    def meanwhile(self, call: Callable[[], httpx.Response]) -> Iterator[list[httpx.Response]]:
        """Others go on while a call is stopped; its answer is in the list afterwards."""
        answers: list[httpx.Response] = []
        with ThreadPoolExecutor(1) as pool:
            late = pool.submit(call)
            assert self._asleep.wait(60)
            try:
                yield answers
            finally:
                self._wake.set()
            answers.append(late.result(60))


def accepted(service: RunningService) -> str:
    """Send a file of rollouts; returns the id of its batch."""
    reply = service.post(rollout_file())
    assert reply.status_code == 202, reply.text
    return str(reply.json()["batch_id"])


@pytest.mark.parametrize("where", ["before", "after"])
def test_a_host_that_is_stopped_while_it_registers_a_run_deletes_nothing_of_anothers(
    replicas: tuple[RunningService, RunningService], monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    one, other = replicas
    one.client.timeout = httpx.Timeout(60)
    with Stopped(monkeypatch, where).meanwhile(one.register) as late:
        assert other.register().status_code == 201
        batch = accepted(other)
    assert late[0].status_code == 200, "the run is there by then"
    for url in (one.url, other.url):
        assert told(url, f"/rollouts/{batch}?run=default")["state"] == "queued"


@pytest.mark.parametrize("where", ["before", "after"])
def test_a_host_that_is_stopped_while_it_deletes_a_run_deletes_nothing_of_the_next_one(
    replicas: tuple[RunningService, RunningService], monkeypatch: pytest.MonkeyPatch, store: Store, where: str
) -> None:
    one, other = replicas
    one.client.timeout = httpx.Timeout(60)
    assert one.register().status_code == 201
    old = accepted(one)
    with Stopped(monkeypatch, where).meanwhile(lambda: one.client.delete("/runs/default")) as late:
        assert other.client.delete("/runs/default").status_code == 204
        assert other.register().status_code == 201
        batch = accepted(other)
    assert late[0].status_code == 204
    assert batch == old, "the same file, which is no duplicate in the new run"
    assert told(other.url, f"/rollouts/{batch}?run=default")["state"] == "queued"
    (kept,) = [key for key in store.stored() if "/rollouts/" in key]
    assert batch in kept


@pytest.mark.parametrize("known", [True, False], ids=["known here", "on a host that never knew it"])
def test_a_run_whose_list_of_files_is_damaged_can_be_deleted(
    replicas: tuple[RunningService, RunningService],
    monkeypatch: pytest.MonkeyPatch,
    store: Store,
    tmp_path: Path,
    redis_url: str,
    known: bool,
) -> None:
    one, other = replicas
    assert one.register().status_code == 201
    accepted(one)
    store.client().put_object(Bucket=BUCKET, Key="state/trees/default", Body=b"spoilt")
    asked = one if known else RunningService(state_dir=tmp_path / "late", redis_url=redis_url, state_url=URL)
    try:
        state = one.client.patch("/runs/default", json={"state": "paused", "reason": "x"})
        assert (state.status_code, "is damaged" in state.json()["detail"]) == (503, True), "which needs the list"
        assert asked.client.delete("/runs/default").status_code == 204
    finally:
        if not known:
            asked.stop()
    until(lambda: httpx.get(f"{other.url}/runs/default").status_code == 404, "the other knows it")
    monkeypatch.setattr("service.storage.mirror._LEFTOVER_SECONDS", -3600.0)
    one.layout.sweep()
    assert store.stored() == ["state/trees/default"], "nothing of it is left"
    until(lambda: other.register().status_code == 201, "its name is free, and the other knows it")
    until(lambda: httpx.get(f"{one.url}/runs/default").is_success, "the first knows it")
    accepted(one)


def send_until(world: World, urls: Sequence[str], name: str, condition: Callable[[], object]) -> list[str]:
    """Send batches to one replica after the other, as the worker takes them; returns their ids."""
    sent: list[str] = []
    deadline = time.monotonic() + 90.0
    while not condition():
        assert time.monotonic() < deadline
        if not sent or told(urls[-1], f"/rollouts/{sent[-1]}?run=default")["state"] == "trained":
            url = urls[len(sent) % len(urls)]
            sent.append(upload([url], world.rollout_file(f"{name} {len(sent)}", policy_version=1)))
        time.sleep(0.05)
    return sent


def trained(url: str, batches: list[str]) -> None:
    def states() -> set[str]:
        return {told(url, f"/rollouts/{batch_id}?run=default")["state"] for batch_id in batches}

    until(lambda: states() == {"trained"}, f"all {len(batches)} batches are trained on")
