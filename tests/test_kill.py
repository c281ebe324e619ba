"""SIGKILL and SIGSTOP of the API while clients send: what was answered with 202 is in the queue once, with its file."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import httpx
import pytest
from helpers.forked import running_api
from helpers.ports import free_port
from helpers.service.service_fixtures import HEADERS, rollout_file, run_file
from helpers.service.storage_fixtures import RolloutQueue
from helpers.service.valkey_fixtures import OwnValkey
from redis import Redis

from rl_hooks.sending.sender import RolloutSender
from service.storage.layout import Layout


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

    def __init__(self, number: int, port: int, timeout_seconds: float = 5.0) -> None:
        super().__init__()
        self.number = number
        self.timeout_seconds = timeout_seconds
        self.unanswered = 0  # requests that the API did not answer in time
        self.url = f"http://127.0.0.1:{port}/rollouts?run=default"
        self.answered: list[str] = []
        self.stopping = threading.Event()

    def run(self) -> None:
        count = 0
        while not self.stopping.is_set():
            body = rollout_file((f"{self.number}-{count}-a", f"{self.number}-{count}-b"), lengths=(400, 300))
            while not self.stopping.is_set():
                try:
                    reply = httpx.post(self.url, content=body, headers=HEADERS, timeout=self.timeout_seconds)
                except httpx.TransportError as error:
                    self.unanswered += isinstance(error, httpx.ReadTimeout)
                    time.sleep(0.01)
                    continue
                if reply.status_code in (200, 202):
                    self.answered.append(reply.json()["batch_id"])
                    break
                assert reply.status_code == 503, reply.text
                time.sleep(0.01)
            count += 1


def wait_for_answers(senders: Sequence[Sender], count: int) -> None:
    """Until `count` further batches are answered: on a busy machine a life of half a second may answer none."""
    deadline = time.monotonic() + 60
    wanted = count + sum(len(sender.answered) for sender in senders)
    while sum(len(sender.answered) for sender in senders) < wanted:
        assert time.monotonic() < deadline, "the API does not answer"
        time.sleep(0.01)


@pytest.mark.slow
@pytest.mark.chaos
def test_nothing_that_was_answered_is_lost_when_api_and_valkey_are_killed(
    tmp_path: Path, own_valkey: OwnValkey
) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    port = free_port()
    senders = [Sender(number, port) for number in range(3)]
    try:
        for life in range(4):
            with running_api(tmp_path, own_valkey.url, port, tmp_path / "api.log") as process:
                wait_until_ready(port)
                if life == 0:
                    put = httpx.put(f"http://127.0.0.1:{port}/runs/default", content=run_file(), headers=HEADERS)
                    assert put.status_code == 201
                    for sender in senders:
                        sender.start()
                wait_for_answers(senders, 6)
                time.sleep(rng.uniform(0.05, 0.5))
                if life % 2:
                    os.kill(own_valkey.process.pid, signal.SIGKILL)
                    own_valkey.stop()
                    time.sleep(rng.uniform(0.0, 0.3))
                    own_valkey.start()
                    wait_until_ready(port)
                    time.sleep(rng.uniform(0.05, 0.3))
                process.kill()
        with running_api(tmp_path, own_valkey.url, port, tmp_path / "api.log"):
            wait_until_ready(port)
            for sender in senders:
                sender.stopping.set()
            for sender in senders:
                sender.join(60)
            answered = [batch_id for sender in senders for batch_id in sender.answered]
            print(len(answered), "answered")
            assert len(answered) > 20
            assert set(answered) <= queued_once(tmp_path, own_valkey.url)
    finally:
        for sender in senders:
            sender.stopping.set()


def queued_once(state_dir: Path, url: str) -> set[str]:
    """The ids of all queued batches; none is there twice, and each has its file."""
    with Redis.from_url(url) as client:
        queue = RolloutQueue(client, "default")
        entries = queue.claim("w", 1 << 40, 1000.0)
        depth = queue.depth()
        assert queue.counters()["accepted_total"] == len(entries)
    queued = {entry.batch_id for entry in entries}
    assert len(queued) == len(entries), "no batch is queued twice"
    assert depth == (len(entries), sum(entry.bytes for entry in entries))
    for entry in entries:
        assert Layout(state_dir).blob("default", entry.blob).stat().st_size == entry.bytes
    return queued


@pytest.mark.slow
@pytest.mark.chaos
def test_an_api_that_is_stopped_and_goes_on_loses_and_doubles_nothing_and_holds_up_no_trainer(
    tmp_path: Path, own_valkey: OwnValkey
) -> None:
    """SIGSTOP amid uploads, longer than clients wait: they send again what the API finishes when it goes on."""
    port = free_port()
    senders = [Sender(number, port, timeout_seconds=0.3) for number in range(3)]
    trainer = RolloutSender(f"http://127.0.0.1:{port}")
    of_trainer = 0
    try:
        with running_api(tmp_path, own_valkey.url, port, tmp_path / "api.log") as process:
            wait_until_ready(port)
            put = httpx.put(f"http://127.0.0.1:{port}/runs/default", content=run_file(), headers=HEADERS)
            assert put.status_code == 201
            for sender in senders:
                sender.start()
            for _ in range(4):
                wait_for_answers(senders, 6)
                timeouts = sum(sender.unanswered for sender in senders)
                os.kill(process.pid, signal.SIGSTOP)
                for _ in range(5):
                    trainer.submit([rollout_file((f"t-{of_trainer}-a", f"t-{of_trainer}-b"))])
                    of_trainer += 1
                while sum(sender.unanswered for sender in senders) < timeouts + 6:
                    time.sleep(0.01)
                os.kill(process.pid, signal.SIGCONT)
            wait_for_answers(senders, 6)
            for sender in senders:
                sender.stopping.set()
            for sender in senders:
                sender.join(60)
            assert trainer.flush(60)
            sent = trainer.stats()
            assert sent["sent"] + sent["duplicates"] == of_trainer
            wait_until_idle(port)
            answered = {batch_id for sender in senders for batch_id in sender.answered}
            queued = queued_once(tmp_path, own_valkey.url)
            assert answered <= queued
            # A sender that was told to stop may have sent one that was not answered.
            assert 0 <= len(queued) - len(answered) - of_trainer <= len(senders)
    finally:
        for sender in senders:
            sender.stopping.set()
        trainer.close(1.0)


def wait_until_idle(port: int) -> None:
    """Until uploads whose clients are gone have ended too: three answers in turn say the same of the queue."""
    seen: list[object] = []
    while len(seen) < 3 or len({str(one) for one in seen[-3:]}) > 1:
        seen.append(httpx.get(f"http://127.0.0.1:{port}/runs/default").json()["rollouts"])
        time.sleep(0.2)
