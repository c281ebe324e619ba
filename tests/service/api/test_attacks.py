"""Every hostile upload gets its status and a word on its fault, and leaves nothing behind.

One server takes them all, in random order: an attack must not harm what comes after it either.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from attacks.accepted import ACCEPTED
from attacks.corpus import MAKERS, Attack
from attacks.runs import RUNS
from attacks.sent import DRAFTERS, HEADS, REPORTS
from helpers.service.service_fixtures import HEADERS, RunningService, rollout_file
from helpers.service.storage_fixtures import RolloutQueue
from helpers.service.valkey_fixtures import OwnValkey
from redis import Redis

from rl_hooks import wire


@pytest.fixture(scope="module")
def target(valkey: OwnValkey, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    """One server for the whole corpus."""
    service = RunningService(state_dir=tmp_path_factory.mktemp("attacked"), redis_url=valkey.url)
    service.register().raise_for_status()
    yield service
    service.stop()


@pytest.fixture
def queue(valkey: OwnValkey) -> Iterator[RolloutQueue]:
    with Redis.from_url(valkey.url) as client:
        client.flushall()
        yield RolloutQueue(client, "default")


def answer(service: RunningService, attack: Attack) -> tuple[int, dict[str, str], str]:
    """Send the attack over a bare socket; returns status, headers in lower case, and body."""
    length = len(attack.body) if attack.announced is None else attack.announced
    headers = {"Host": "127.0.0.1", "Content-Type": wire.CONTENT_TYPE, **attack.headers}
    if length >= 0:
        headers["Content-Length"] = str(length)
    lines = [f"{attack.method} {attack.path} HTTP/1.1", *(f"{k}: {v}" for k, v in headers.items())]
    with socket.create_connection(("127.0.0.1", service.port), timeout=60) as connection:
        connection.sendall("\r\n".join(lines).encode() + b"\r\n\r\n" + attack.body)
        file = connection.makefile("rb")
        status = int(file.readline().split()[1])
        reply: dict[str, str] = {}
        while line := file.readline().strip():
            name, _, value = line.decode().partition(":")
            reply[name.lower()] = value.strip()
        return status, reply, file.read(int(reply.get("content-length", "0"))).decode()


@pytest.mark.parametrize("name", sorted(MAKERS))
def test_an_attack_is_refused_by_name_and_leaves_nothing(
    target: RunningService, queue: RolloutQueue, name: str
) -> None:
    attack = MAKERS[name]()
    status, headers, body = answer(target, attack)
    assert status == attack.status, body
    if headers.get("content-type") == "application/problem+json":
        problem = json.loads(body)
        assert problem["status"] == status
        assert attack.names in f"{problem['detail']} {problem.get('field', '')}"
        assert len(problem["detail"]) < 600, "an answer does not echo a whole attack"
    else:
        assert status == 400, "only what the HTTP parser itself refuses comes without a problem document"
    deadline = time.monotonic() + 60  # the parser's own refusal may overtake the end of the upload
    while target.spooled() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert target.spooled() == []
    assert queue.depth() == (0, 0)
    assert queue.counters()["accepted_total"] == 0


@pytest.mark.parametrize("name", sorted(RUNS))
def test_a_run_that_the_worker_could_not_begin_is_refused_by_name_and_leaves_nothing(
    target: RunningService, name: str
) -> None:
    attack = RUNS[name]
    reply = target.client.put("/runs/evil", content=attack.body, headers=HEADERS)
    problem = reply.json()
    assert (reply.status_code, problem["field"]) == (422, attack.field), problem
    assert attack.words in problem["detail"]
    assert len(problem["detail"]) < 800, "an answer does not echo a whole attack"
    assert target.layout.run_names() == ["default"]
    assert target.spooled() == []


def test_after_all_that_a_good_batch_is_taken(target: RunningService, queue: RolloutQueue) -> None:
    queue.ensure_group()
    assert target.post(rollout_file()).status_code == 202
    (entry,) = queue.claim("w", 1000, 60.0)
    target.layout.blob("default", entry.blob).unlink()


def test_the_corpus_is_not_thinned_out() -> None:
    page = (Path(__file__).parents[3] / "docs/reference/guarantees.md").read_text()
    assert f"{len(MAKERS)} hostile requests and {len(RUNS)} hostile run files" in page
    of_worker = f"{len(ACCEPTED)} hostile files that the API takes, {len(RUNS)} hostile runs, {len(HEADS)} heads, "
    assert f"{of_worker}{len(DRAFTERS)} sent drafters and {len(REPORTS)} reports of engines" in page
