"""SIGKILL of the API and of Valkey while clients send: what was answered with 202 is in the queue, with its file."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from redis import Redis
from service_fixtures import HEADERS, rollout_file, run_file
from storage_fixtures import RolloutQueue

from service.cli.valkey import EmbeddedValkey
from service.storage.layout import Layout

API = """
import sys
from service.api.app import run_api
from service.settings import Settings
run_api(Settings(state_dir=sys.argv[1], redis_url=sys.argv[2], port=int(sys.argv[3])))
"""


@contextmanager
def api(state_dir: Path, url: str, port: int) -> Iterator[subprocess.Popen[bytes]]:
    argv = [sys.executable, "-c", API, str(state_dir), url, str(port)]
    with subprocess.Popen(argv) as process:
        try:
            yield process
        finally:
            process.kill()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


def wait_until_ready(port: int) -> None:
    deadline = time.monotonic() + 90  # three senders hammer it while it starts
    while True:
        try:
            if httpx.get(f"http://127.0.0.1:{port}/readyz").status_code == 200:
                return
        except httpx.TransportError:
            pass
        assert time.monotonic() < deadline, "the API did not become ready"
        time.sleep(0.05)


class Sender(threading.Thread):
    """Sends batches until told to stop, each again and again until it is answered with 200 or 202."""

    def __init__(self, number: int, port: int) -> None:
        super().__init__()
        self.number = number
        self.url = f"http://127.0.0.1:{port}/rollouts?run=default"
        self.answered: list[str] = []
        self.stopping = threading.Event()

    def run(self) -> None:
        count = 0
        while not self.stopping.is_set():
            body = rollout_file((f"{self.number}-{count}-a", f"{self.number}-{count}-b"), lengths=(400, 300))
            while not self.stopping.is_set():
                try:
                    reply = httpx.post(self.url, content=body, headers=HEADERS)
                except httpx.TransportError:
                    time.sleep(0.01)
                    continue
                if reply.status_code in (200, 202):
                    self.answered.append(reply.json()["batch_id"])
                    break
                assert reply.status_code == 503, reply.text
                time.sleep(0.01)
            count += 1


def wait_for_answers(senders: Sequence[Sender], count: int) -> None:
    """Until so many more batches are answered: on a busy machine a life of half a second may answer none."""
    deadline = time.monotonic() + 60
    wanted = count + sum(len(sender.answered) for sender in senders)
    while sum(len(sender.answered) for sender in senders) < wanted:
        assert time.monotonic() < deadline, "the API does not answer"
        time.sleep(0.01)


@pytest.mark.slow
@pytest.mark.chaos
@pytest.mark.timeout(400)
def test_nothing_that_was_answered_is_lost_when_api_and_valkey_are_killed(tmp_path: Path) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    port = free_port()
    valkey = EmbeddedValkey(tmp_path)
    valkey.start()
    senders = [Sender(number, port) for number in range(3)]
    try:
        for life in range(4):
            with api(tmp_path, valkey.url, port) as process:
                wait_until_ready(port)
                if life == 0:
                    put = httpx.put(f"http://127.0.0.1:{port}/runs/default", content=run_file(), headers=HEADERS)
                    assert put.status_code == 201
                    for sender in senders:
                        sender.start()
                wait_for_answers(senders, 6)
                time.sleep(rng.uniform(0.05, 0.5))
                if life % 2:
                    assert valkey.pid is not None
                    os.kill(valkey.pid, signal.SIGKILL)
                    valkey.stop()
                    time.sleep(rng.uniform(0.0, 0.3))
                    valkey.start()
                    wait_until_ready(port)
                    time.sleep(rng.uniform(0.05, 0.3))
                process.kill()
        with api(tmp_path, valkey.url, port):
            wait_until_ready(port)
            for sender in senders:
                sender.stopping.set()
            for sender in senders:
                sender.join(30)
            answered = [batch_id for sender in senders for batch_id in sender.answered]
            print(len(answered), "answered")
            assert len(answered) > 20
            with Redis.from_url(valkey.url) as client:
                queue = RolloutQueue(client, "default")
                entries = queue.claim("w", 1 << 40, 1000.0)
                depth = queue.depth()
        queued = {entry.batch_id: entry for entry in entries}
        assert len(queued) == len(entries), "no batch is queued twice"
        assert set(answered) <= set(queued)
        assert depth.items == len(entries)
        assert depth.bytes == sum(entry.bytes for entry in entries)
        for entry in entries:
            assert Layout(tmp_path).blob("default", entry.blob).stat().st_size == entry.bytes
    finally:
        for sender in senders:
            sender.stopping.set()
        valkey.stop()
