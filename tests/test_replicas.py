"""Three API replicas on one state directory: one is killed amid an upload, a long poll and a download."""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from helpers.engine.engine_forks import Fork
from helpers.forked import ROOT, forks
from helpers.ports import free_port
from helpers.service.service_fixtures import HEADERS, publish, rollout_file, run_file
from helpers.service.storage_fixtures import RolloutQueue
from helpers.service.valkey_fixtures import OwnValkey
from redis import Redis

from service.storage.layout import Layout
from service.storage.registry import Registry

REPLICAS = 3
#: More than the sockets of one connection hold, so that a killed replica has not sent it all.
DRAFTER_BYTES = 48 << 20
#: Of the uploads that are cut; the others are a hundredth of it.
LONG = (4000, 3000)
LONG_BYTES = len(rollout_file(lengths=LONG))
PATIENCE_SECONDS = 60.0


class Replicas:
    """The `serve` processes of one state directory and one Redis."""

    def __init__(self, state_dir: Path, redis_url: str, stack: contextlib.ExitStack) -> None:
        self.layout = Layout(state_dir)
        self.registry = Registry(self.layout)
        self.ports = [free_port() for _ in range(REPLICAS)]
        self._environment = os.environ | {"DRAFTALIGN_STATE_DIR": str(state_dir), "DRAFTALIGN_REDIS_URL": redis_url}
        self._stack = stack
        self._processes = [self._start(port) for port in self.ports]
        self._wait_until_ready()

    def _start(self, port: int) -> Fork:
        environment = self._environment | {"DRAFTALIGN_PORT": str(port), "PYTHONPATH": str(ROOT)}
        process = forks("command").fork("service.cli", ["serve"], environment, self.layout.root / f"{port}.log")
        self._stack.callback(process.wait)
        self._stack.callback(process.kill)
        return process

    def _wait_until_ready(self) -> None:
        for port in self.ports:
            until(lambda port=port: answers(port), f"the replica at {port} is ready")  # type: ignore[misc]

    def kill(self, number: int) -> None:
        """End one as kill -9 does."""
        self._processes[number].kill()
        self._processes[number].wait()

    def start_again(self, number: int) -> None:
        """Start the one that was killed, on its port."""
        self._processes[number] = self._start(self.ports[number])
        self._wait_until_ready()

    def urls(self, first: int) -> list[str]:
        """All, in turn, from this one on."""
        return [f"http://127.0.0.1:{self.ports[(first + turn) % REPLICAS]}" for turn in range(REPLICAS)]


def answers(port: int) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(f"http://127.0.0.1:{port}/readyz").status_code == 200
    return False


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, f"not within {PATIENCE_SECONDS:.0f} s: {what}"
        time.sleep(0.02)


def turns(urls: Sequence[str]) -> Iterator[str]:
    """The replicas again and again, as a client takes them that goes to another when one is away."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline:
        yield from urls
        time.sleep(0.02)


def upload(urls: Sequence[str], body: bytes) -> str:
    """Send one batch until a replica acknowledges it; returns its id."""
    for url in turns(urls):
        with contextlib.suppress(httpx.TransportError):
            reply = httpx.post(f"{url}/rollouts?run=default", content=body, headers=HEADERS)
            if reply.status_code in (200, 202):
                return str(reply.json()["batch_id"])
            assert reply.status_code == 503, reply.text
    raise AssertionError("no replica took the batch")


def upload_with_a_pause(urls: Sequence[str], body: bytes, go_on: threading.Event) -> tuple[str, bool]:
    """Send half of a batch to the first replica, and the rest later. Returns its id, and whether that was cut off."""
    host, port = urls[0].removeprefix("http://").split(":")
    head = (
        f"POST /rollouts?run=default HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n"
    )
    head += "".join(f"{name}: {value}\r\n" for name, value in HEADERS.items())
    answer = b""
    with contextlib.suppress(ConnectionError), socket.create_connection((host, int(port))) as connection:
        connection.sendall(head.encode() + b"\r\n" + body[: len(body) // 2])
        go_on.wait()
        connection.sendall(body[len(body) // 2 :])
        while more := connection.recv(65536):
            answer += more
    assert not answer or answer.startswith(b"HTTP/1.1 202 "), answer
    return upload(urls if answer else urls[1:], body), not answer


def wait_for_another(urls: Sequence[str], etag: str) -> tuple[str, bool]:
    """A long poll. Returns the version that comes, and whether the first replica left it unanswered."""
    cut = False
    for url in turns(urls):
        try:
            reply = httpx.get(
                f"{url}/drafter/latest",
                params={"run": "default", "wait": 30},
                headers={"If-None-Match": etag},
                timeout=90,
            )
        except httpx.TransportError:
            cut = cut or url == urls[0]
            continue
        assert reply.status_code == 200, "it waited its whole time"
        return str(reply.json()["version"]), cut
    raise AssertionError("no replica told of a publish")


def download(urls: Sequence[str], version: str, begun: threading.Event, go_on: threading.Event) -> tuple[str, int]:
    """A file's SHA-256, and how many bytes of it the first replica had sent when it broke off, 0 if it did not.

    Waits with its first bytes; goes on where it was.
    """
    digest, have, cut_at = hashlib.sha256(), 0, 0
    for url in turns(urls):
        headers = {"Range": f"bytes={have}-"} if have else {}
        try:
            with httpx.stream(
                "GET", f"{url}/drafter/{version}/model.safetensors?run=default", headers=headers
            ) as reply:
                assert reply.status_code == (206 if have else 200)
                for chunk in reply.iter_bytes():
                    digest.update(chunk)
                    have += len(chunk)
                    begun.set()
                    go_on.wait()
        except httpx.TransportError:
            cut_at = cut_at or have
            continue
        return digest.hexdigest(), cut_at
    raise AssertionError("no replica sent the whole file")


def halves(layout: Layout) -> int:
    """Uploads of which much has come and not all, those of replicas that were killed included."""
    sizes = []
    for path in layout.spool_tmp.iterdir():
        with contextlib.suppress(FileNotFoundError):
            sizes.append(path.stat().st_size)
    return sum(size >= LONG_BYTES // 3 for size in sizes)


class Senders:
    """Uploads of small batches, each to the next replica, until they are stopped."""

    def __init__(self, replicas: Replicas, pool: ThreadPoolExecutor) -> None:
        self._replicas = replicas
        self._stopping = threading.Event()
        self._running = [pool.submit(self._send, number) for number in range(2)]

    def _send(self, number: int) -> list[str]:
        acknowledged: list[str] = []
        while not self._stopping.wait(0.01):
            count = len(acknowledged)
            body = rollout_file((f"{number}-{count}-a", f"{number}-{count}-b"), lengths=(40, 30))
            acknowledged.append(upload(self._replicas.urls(count), body))
        return acknowledged

    def stop(self) -> list[str]:
        """The ids of all batches that were acknowledged."""
        self._stopping.set()
        return [batch_id for sender in self._running for batch_id in sender.result(PATIENCE_SECONDS)]


@pytest.mark.slow
def test_clients_of_a_replica_that_is_killed_go_on_at_another(tmp_path: Path, own_valkey: OwnValkey) -> None:
    content = os.urandom(DRAFTER_BYTES)
    sha256 = hashlib.sha256(content).hexdigest()
    with contextlib.ExitStack() as stack:
        replicas = Replicas(tmp_path, own_valkey.url, stack)
        put = httpx.put(f"{replicas.urls(0)[0]}/runs/default", content=run_file(), headers=HEADERS)
        assert put.status_code == 201
        publish(replicas.registry, content=content)
        pool = stack.enter_context(ThreadPoolExecutor(16))
        senders = Senders(replicas, pool)
        stack.callback(senders.stop)
        acknowledged: list[str] = []
        for victim in range(REPLICAS):
            acknowledged += kill_amid_everything(replicas, victim, pool, sha256)
            replicas.start_again(victim)
        acknowledged += senders.stop()
        assert len(acknowledged) > 9 + 2 * REPLICAS
        check_queue(replicas.layout, own_valkey.url, acknowledged)


def kill_amid_everything(replicas: Replicas, victim: int, pool: ThreadPoolExecutor, sha256: str) -> list[str]:
    """Kill one replica while each receives an upload, holds a long poll and sends a file.

    Returns the batches that were acknowledged.
    """
    latest = httpx.get(f"{replicas.urls(victim)[0]}/drafter/latest")
    version, etag, go_on = latest.json()["version"], latest.headers["ETag"], threading.Event()
    cut_before = halves(replicas.layout)
    begun = [threading.Event() for _ in range(REPLICAS)]
    uploads: list[Future[tuple[str, bool]]] = []
    polls: list[Future[tuple[str, bool]]] = []
    downloads: list[Future[tuple[str, int]]] = []
    try:
        for number in range(REPLICAS):
            urls = replicas.urls(number)
            body = rollout_file((f"{victim}{number}a", f"{victim}{number}b"), lengths=LONG)
            uploads.append(pool.submit(upload_with_a_pause, urls, body, go_on))
            polls.append(pool.submit(wait_for_another, urls, etag))
            downloads.append(pool.submit(download, urls, version, begun[number], go_on))
        for each in begun:
            assert each.wait(PATIENCE_SECONDS)
        until(lambda: halves(replicas.layout) == cut_before + REPLICAS, "half of each upload has come")
        time.sleep(0.3)  # for the polls to be there too: nothing outside says so
        assert not any(poll.done() for poll in polls)
        replicas.kill(victim)
    finally:
        go_on.set()
    others = [number for number in range(REPLICAS) if number != victim]
    received = [each.result(PATIENCE_SECONDS) for each in uploads]
    assert [number for number, (_, cut) in enumerate(received) if cut] == [victim]
    sent = [each.result(PATIENCE_SECONDS) for each in downloads]
    assert [digest for digest, _ in sent] == [sha256] * REPLICAS
    assert 0 < sent[victim][1] < DRAFTER_BYTES
    assert [sent[number][1] for number in others] == [0, 0]
    content = replicas.registry.path("default", version, "model.safetensors").read_bytes()
    newer = publish(replicas.registry, content=content, policy_version=2 + victim)
    told = [each.result(PATIENCE_SECONDS) for each in polls]
    assert [found for found, _ in told] == [newer.version] * REPLICAS
    assert [number for number, (_, cut) in enumerate(told) if cut] == [victim]
    return [batch_id for batch_id, _ in received]


def check_queue(layout: Layout, url: str, acknowledged: Sequence[str]) -> None:
    """Every acknowledged batch is queued once, with its file."""
    assert len(set(acknowledged)) == len(acknowledged)
    with Redis.from_url(url) as client:
        queue = RolloutQueue(client, "default")
        entries = queue.claim("w", 1 << 40, 1000.0)
        assert queue.depth() == (len(entries), sum(entry.bytes for entry in entries))
        assert queue.counters()["accepted_total"] == len(entries)
    assert sorted(entry.batch_id for entry in entries) == sorted(acknowledged)
    for entry in entries:
        assert layout.blob("default", entry.blob).stat().st_size == entry.bytes
