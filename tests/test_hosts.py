"""API replicas and workers that share no directory: one Redis, one object store, and a state directory for each."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("obstore")
pytest.importorskip("botocore")
pytest.importorskip("moto")

from failover_fixtures import free_port, until
from object_fixtures import BUCKET, Store, running_store
from service_fixtures import HEADERS
from test_replicas import answers, upload, upload_with_a_pause
from worker_fixtures import ONE_BY_ONE, World

from service.cli.valkey import EmbeddedValkey

URL = f"s3://{BUCKET}/state"
SETTINGS = ONE_BY_ONE | {"gate_min_gain": 0.005, "recent_tokens": 100_000, "learning_rate": 5e-3, "state_url": URL}


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    yield from running_store(monkeypatch)


class Hosts:
    """Processes, each with a directory of its own."""

    def __init__(self, place: Path, redis_url: str, stack: contextlib.ExitStack) -> None:
        self._place, self._stack = place, stack
        given = {f"DRAFTALIGN_{name.upper()}": str(value) for name, value in SETTINGS.items()}
        self._environment = os.environ | given | {"DRAFTALIGN_REDIS_URL": redis_url, "OMP_NUM_THREADS": "1"}

    def start(self, what: str, host: str, port: int = 0) -> subprocess.Popen[bytes]:
        own = {"DRAFTALIGN_STATE_DIR": str(self._place / host), "DRAFTALIGN_PORT": str(port)}
        process = subprocess.Popen([sys.executable, "-m", "service.cli", what], env=self._environment | own)
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
@pytest.mark.timeout(300)
def test_hosts_that_share_no_directory_lose_nothing(tmp_path: Path, store: Store) -> None:
    world, valkey = World(), EmbeddedValkey(tmp_path / "redis")
    sent: list[str] = []
    with contextlib.ExitStack() as stack:
        valkey.start()
        stack.callback(valkey.stop)
        hosts = Hosts(tmp_path, valkey.url, stack)
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
            batch_id, was_cut = cut.result(30)
        assert was_cut
        sent.append(batch_id)
        trained(urls[1], sent)

        # The worker dies, with what it had; another host's goes on from its checkpoint.
        worker.kill()
        worker.wait()
        before = told(urls[1], "/runs/default")["drafter"]
        hosts.start("worker", "w2")
        sent += send_until(world, urls[1:], "after", lambda: told(urls[1], "/runs/default")["drafter"] != before)
        trained(urls[1], sent)
        assert max((tmp_path / "w2/runs/default/worker").glob("checkpoint-*")).name > "checkpoint-000000007"

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
        assert httpx.delete(f"{urls[1]}/runs/default", timeout=40).status_code == 204
        until(lambda: httpx.get(f"{urls[0]}/runs/default").status_code == 404, "the other knows it")
        until(lambda: not (tmp_path / "w2/runs/default").exists(), "the worker's files are gone")
        assert store.stored() == ["state/trees/default"]
        put = httpx.put(f"{urls[0]}/runs/default", content=world.run_file(drafter=world.drafter()), headers=HEADERS)
        assert put.status_code == 201, put.text


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
