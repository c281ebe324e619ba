"""POST /rollouts and GET /rollouts/{id}, over a real socket into a real Redis."""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fastapi.routing
import httpx
import numpy as np
import pytest
import redis.asyncio
from helpers.engine.agent_fixtures import eventually
from helpers.ports import free_port
from helpers.service.service_fixtures import (
    CONFIG,
    HEADERS,
    RunningService,
    joined,
    rollout_file,
    rollout_metadata,
    rollout_tensors,
    run_file,
    with_last_rows,
)
from helpers.service.storage_fixtures import RolloutQueue
from helpers.service.valkey_fixtures import OwnValkey
from redis import Redis

from rl_hooks import wire
from service.api.context.context import ServiceContext
from service.cli.valkey import find_binary
from service.storage.queue.rollout_queue import AsyncRolloutQueue, Batch, Enqueued

Serve = Callable[..., RunningService]


@pytest.fixture
def queue(redis_client: Redis) -> RolloutQueue:
    queue = RolloutQueue(redis_client, "default")
    queue.ensure_group()
    return queue


def head_of(body: bytes, path: str = "/rollouts", *extra: str, length: int | None = None) -> bytes:
    lines = [
        f"POST {path} HTTP/1.1",
        "Host: 127.0.0.1",
        f"Content-Type: {wire.CONTENT_TYPE}",
        f"Content-Length: {len(body) if length is None else length}",
        *extra,
    ]
    return "\r\n".join(lines).encode() + b"\r\n\r\n"


def test_an_accepted_batch_is_queued_and_its_file_is_the_body(service: RunningService, queue: RolloutQueue) -> None:
    body = rollout_file(("a", "b"), policy_version=4, policy_version_max=5)
    reply = service.post(body)
    assert reply.status_code == 202
    batch_id = wire.batch_id("default", 4, ("a", "b"))
    assert reply.json() == {
        "batch_id": batch_id,
        "duplicate": False,
        "run": "default",
        "state": "queued",
        "dead_total": 0,
        "last_dead_reason": "",
        "known_rollouts": 0,
        "last_rows": "predicting",
        "optional_tensors": ["aux_rows", "versions_behind"],
        "direct_uploads": False,
        "warning": None,
        "warning_code": None,
    }
    (entry,) = queue.claim("w", 1000, 60.0)
    assert (entry.batch_id, entry.tokens, entry.rollouts, entry.bytes) == (batch_id, 11, 2, len(body))
    assert (entry.policy_version, entry.policy_version_max) == (4, 5)
    (path,) = service.spooled()
    assert path == service.layout.blob("default", entry.blob)
    assert path.read_bytes() == body
    assert path.name.startswith(batch_id + ".")


def test_the_fate_of_a_batch_can_be_asked_by_batch_or_rollout_id(service: RunningService, queue: RolloutQueue) -> None:
    batch_id = service.post(rollout_file(("x/1", "y"))).json()["batch_id"]
    queued = service.client.get(f"/rollouts/{batch_id}").json()
    assert (queued["state"], queued["tokens"], queued["rollout_ids"]) == ("queued", 11, ["x/1", "y"])
    assert service.client.get("/rollouts/x/1").json() == queued
    (entry,) = queue.claim("w", 1000, 60.0)
    queue.dead_letter(entry, "aux_hidden holds NaN")
    dead = service.client.get("/rollouts/y", params={"run": "default"}).json()
    assert (dead["state"], dead["reason"]) == ("dead", "aux_hidden holds NaN")
    assert service.client.get("/rollouts/unknown").status_code == 404
    assert service.client.get("/rollouts/y", params={"run": "other"}).status_code == 404


def test_an_upload_is_seven_commands_of_redis(service: RunningService, redis_client: Redis) -> None:
    """One before its body is read, and the script with five in it."""

    def done() -> int:
        found: dict[str, dict[str, int]] = redis_client.info("commandstats")
        return sum(one["calls"] for name, one in found.items() if name != "cmdstat_info")

    for start in range(2):  # the first loads the script
        before = done()
        body = rollout_file(tuple(f"{start}-{number}" for number in range(8)))
        assert service.client.post("/rollouts?run=default", content=body, headers=HEADERS).status_code == 202
    assert done() - before == 7


def test_fastapi_describes_the_upload_and_solves_nothing_for_it(
    service: RunningService, monkeypatch: pytest.MonkeyPatch
) -> None:
    solved: list[str] = []
    plain: Any = getattr(fastapi.routing, "solve_dependencies")  # noqa: B009 - mypy: it is not exported

    async def solve(**named: Any) -> Any:
        solved.append(named["request"].url.path)
        return await plain(**named)

    monkeypatch.setattr(fastapi.routing, "solve_dependencies", solve)
    assert service.post(rollout_file(), run="default").status_code == 202
    assert service.post(rollout_file(), run="elsewhere").status_code == 404, "the query is read all the same"
    assert not solved
    service.client.get("/drafters").raise_for_status()
    assert solved == ["/drafters"]
    described = service.client.get("/openapi.json").json()["paths"]["/rollouts"]["post"]
    assert [one["name"] for one in described["parameters"]] == ["run"]
    assert described["responses"]["202"]["content"]["application/json"]["schema"]["$ref"].endswith("/Receipt")


def test_sending_a_batch_twice_queues_it_once(service: RunningService, queue: RolloutQueue) -> None:
    first = service.post(rollout_file())
    again = service.post(rollout_file(("b", "a")))
    assert (first.status_code, again.status_code) == (202, 200)
    assert again.json() == {**first.json(), "duplicate": True}
    assert len(service.spooled()) == 1
    assert queue.depth().items == 1
    (entry,) = queue.claim("w", 1000, 60.0)
    queue.ack(entry, "trained")
    late = service.post(rollout_file())
    assert (late.status_code, late.json()["state"]) == (200, "trained")
    assert len(service.spooled()) == 1


def test_the_same_ids_of_another_policy_version_are_the_same_rollouts(
    service: RunningService, queue: RolloutQueue
) -> None:
    assert service.post(rollout_file(("a", "b"), policy_version=1)).status_code == 202
    again = service.post(rollout_file(("a", "b"), policy_version=2))
    assert (again.status_code, again.json()["known_rollouts"]) == (200, 2)
    assert "(2 of 2)" in again.json()["warning"]
    assert queue.depth().items == 1
    assert len(service.spooled()) == 1


def test_other_rollouts_under_ids_that_came_are_not_used_and_the_answer_says_so(service: RunningService) -> None:
    """A trainer's own loop that names rollouts by step and place, and starts again from step 0."""
    assert service.post(rollout_file()).json()["warning"] is None
    assert service.post(rollout_file()).json()["warning"] is None, "the same file again"
    reply = service.post(rollout_file(lengths=(7, 9)))
    assert (reply.status_code, reply.json()["duplicate"]) == (200, True)
    assert "other rollouts came with the same ids" in reply.json()["warning"]
    assert len(service.spooled()) == 1


def test_concurrent_duplicates_leave_one_entry_and_its_file(service: RunningService, queue: RolloutQueue) -> None:
    body = rollout_file(lengths=(3000, 2000), tensors=None)
    statuses: list[int] = []
    threads = [threading.Thread(target=lambda: statuses.append(service.post(body).status_code)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(statuses) == [200] * 7 + [202]
    (entry,) = queue.claim("w", 1000, 60.0)
    assert [p.name for p in service.spooled()] == [entry.blob]


def test_every_form_of_the_file_is_taken(service: RunningService) -> None:
    T = 11
    fp8 = {
        "aux_hidden": wire.Tensor.of(np.zeros((T, 24), np.uint8), "F8_E4M3"),
        "aux_hidden_scale": wire.Tensor.of(np.ones((T, 3), np.float32), "F32"),
        "last_hidden": wire.Tensor.of(np.zeros((T, 8), np.uint8), "F8_E4M3"),
        "last_hidden_scale": wire.Tensor.of(np.ones((T, 1), np.float32), "F32"),
    }
    assert service.post(rollout_file(("1", "2"), tensors=fp8)).status_code == 202
    fewer = with_last_rows(rollout_tensors() | fp8, "predicting")
    assert fewer["last_hidden_scale"].shape == (9, 1)
    assert service.post(rollout_file(("3", "4"), tensors=fewer, last_rows="predicting")).status_code == 202
    no_normalisers = rollout_file(("7", "8"), tensors={"logsumexp": None}, last_rows="predicting")
    assert service.post(no_normalisers).status_code == 202
    extra = rollout_file(("5", "6"), rewards=[0.0, 1.0], raw_metadata={"anything": "else"})
    assert service.post(extra).status_code == 202


def test_a_full_queue_answers_429_with_retry_after_and_reads_no_body(serve: Serve, queue: RolloutQueue) -> None:
    service = serve(queue_max_items=1)
    service.register()
    assert service.post(rollout_file(("1", "2"))).status_code == 202
    body = rollout_file(("3", "4"))
    reply = service.raw(head_of(body, "/rollouts?run=default", "Expect: 100-continue"))
    assert reply.startswith(b"HTTP/1.1 429"), "and not 100 Continue"
    assert b"retry-after: 2" in reply.lower()
    assert b"connection: close" in reply.lower()
    assert b"application/problem+json" in reply
    for run in (None, "default"):  # a client that does not wait for 100 Continue sees the answer too
        answer = service.post(body, run)
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "2")
        assert "is full: 1 of 1 batches" in answer.json()["detail"]
    assert len(service.spooled()) == 1
    (entry,) = queue.claim("w", 1000, 60.0)
    queue.ack(entry)
    assert service.post(body).status_code == 202


def test_a_queue_full_by_bytes_answers_429(serve: Serve) -> None:
    body = rollout_file(("1", "2"))
    service = serve(queue_max_bytes=len(body) + 10, max_body_bytes=len(body) + 10)
    service.register()
    assert service.post(body, "default").status_code == 202
    assert service.post(rollout_file(("3", "4")), "default").status_code == 429


def test_a_spool_without_room_answers_429_before_the_body(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    service = serve(spool_min_free_bytes=1 << 60)
    reply = service.raw(head_of(rollout_file(), "/rollouts", "Expect: 100-continue"))
    assert reply.startswith(b"HTTP/1.1 429")
    assert b"(DRAFTALIGN_SPOOL_MIN_FREE_BYTES). Where something else fills it, make room." in reply
    unready = service.client.get("/readyz")
    assert unready.status_code == 503
    assert re.search(r"B are free on the spool's disk; at least 1048576 TiB must be \(", unready.json()["detail"])
    assert "GET /readyz: spool-low: " in caplog.text


def test_expect_100_continue_is_answered_when_the_body_is_wanted(service: RunningService) -> None:
    body = rollout_file()
    with socket.create_connection(("127.0.0.1", service.port), timeout=60) as connection:
        connection.sendall(head_of(body, "/rollouts?run=default", "Expect: 100-continue", "Connection: close"))
        assert connection.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.sendall(body)
        assert connection.recv(4096).startswith(b"HTTP/1.1 202")


@pytest.mark.parametrize("sent", [0, 5, 200, 3000])
def test_a_body_cut_off_leaves_nothing(service: RunningService, queue: RolloutQueue, sent: int) -> None:
    body = rollout_file()
    assert len(body) > 1500
    with socket.create_connection(("127.0.0.1", service.port)) as connection:
        connection.sendall(head_of(body, length=len(body) + 2000) + body[:sent])
        time.sleep(0.1)
    deadline = time.monotonic() + 60
    while service.spooled() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert service.spooled() == []
    assert queue.depth() == (0, 0)
    assert service.post(body).status_code == 202


def test_a_body_that_stalls_is_dropped_with_408(serve: Serve) -> None:
    service = serve(body_idle_seconds=0.2)
    service.register()
    body = rollout_file()
    reply = service.raw(head_of(body) + body[:-10])
    assert reply.startswith(b"HTTP/1.1 408")
    assert service.spooled() == []


def test_a_lying_header_is_refused_before_the_features_come(service: RunningService) -> None:
    """Only the header is sent of a body announced as 100 MB: the answer comes all the same."""
    tensors, metadata = rollout_tensors(), rollout_metadata()
    header = bytes(wire.encode(tensors, metadata)[0])
    reply = service.raw(head_of(b"", length=100_000_000) + header)
    assert reply.startswith(b"HTTP/1.1 422")
    assert b"Content-Length says 100000000" in reply
    assert service.spooled() == []


@pytest.mark.parametrize(
    ("broken", "mended"),
    [
        (("REPLICAOF", "127.0.0.1", "1"), ("REPLICAOF", "NO", "ONE")),
        (("ACL", "SETUSER", "default", "-@write"), ("ACL", "SETUSER", "default", "+@all")),
    ],
)
def test_a_redis_that_takes_no_writes_is_not_ready_and_says_why(
    tmp_path: Path, own_valkey: OwnValkey, broken: tuple[str, ...], mended: tuple[str, ...]
) -> None:
    """A replica after a failover, or a user without the right: not a bug, and not the sender's fault."""
    service = RunningService(state_dir=tmp_path / "state", redis_url=own_valkey.url)
    try:
        service.register()
        with Redis.from_url(own_valkey.url) as client:
            client.execute_command(*broken)
            for reply in (service.client.get("/readyz"), service.post(rollout_file())):
                assert (reply.status_code, reply.json()["type"]) == (503, "urn:draftalign:redis-unusable")
                assert "retry-after" in reply.headers
            assert service.client.get("/healthz").status_code == 200
            client.execute_command(*mended)
        eventually(lambda: service.client.get("/readyz").status_code == 200)  # it remembers for a second
        assert service.post(rollout_file()).status_code == 202
    finally:
        service.stop()


def test_a_node_of_a_cluster_is_not_ready(tmp_path: Path) -> None:
    socket_path = tmp_path / "node.sock"
    bus = f"--cluster-enabled yes --cluster-port {free_port()}"
    options = f"--port 0 --unixsocket {socket_path} {bus} --dir {tmp_path} --save ''"
    node = subprocess.Popen([find_binary(), *shlex.split(options)], stdout=subprocess.DEVNULL)
    service = RunningService(state_dir=tmp_path / "state", redis_url=f"unix://{socket_path}")
    try:
        with Redis.from_url(f"unix://{socket_path}") as client:
            eventually(lambda: socket_path.exists() and client.ping())
            client.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
            eventually(lambda: b"cluster_state:ok" in client.execute_command("CLUSTER", "INFO"))
        reply = service.client.get("/readyz")
        assert (reply.status_code, reply.json()["type"]) == (503, "urn:draftalign:redis-unusable")
    finally:
        service.stop()
        node.kill()
        node.wait()


def test_a_sentinels_own_port_is_not_ready_and_says_what_to_give_instead(tmp_path: Path) -> None:
    socket_path, conf = tmp_path / "sentinel.sock", tmp_path / "sentinel.conf"
    conf.write_text(f"port 0\nunixsocket {socket_path}\ndir {tmp_path}\n")
    watcher = subprocess.Popen([find_binary(), str(conf), "--sentinel"], stdout=subprocess.DEVNULL)
    service = RunningService(state_dir=tmp_path / "state", redis_url=f"unix://{socket_path}")
    try:
        with Redis.from_url(f"unix://{socket_path}") as client:
            eventually(lambda: socket_path.exists() and client.ping())
        reply = service.client.get("/readyz")
        assert (reply.status_code, reply.json()["type"]) == (503, "urn:draftalign:redis-unusable")
        assert "redis+sentinel://HOST:PORT/SERVICE_NAME" in reply.json()["detail"]
        assert service.client.get("/healthz").status_code == 200
    finally:
        service.stop()
        watcher.kill()
        watcher.wait()


def test_redis_going_away_is_a_503_and_coming_back_is_noticed(tmp_path: Path, own_valkey: OwnValkey) -> None:
    service = RunningService(state_dir=tmp_path / "state", redis_url=own_valkey.url)
    try:
        service.register()
        assert service.client.get("/readyz").status_code == 200
        own_valkey.stop()
        reply = service.post(rollout_file())
        assert reply.status_code == 503
        assert reply.json()["type"] == "urn:draftalign:redis-away"
        assert "retry-after" in reply.headers
        eventually(lambda: service.client.get("/readyz").status_code == 503)  # it remembers for a second
        assert service.client.get("/healthz").status_code == 200
        assert service.spooled() == []
        own_valkey.start()
        assert service.post(rollout_file()).status_code == 202
    finally:
        service.stop()


def test_orphans_are_reaped_and_queued_files_are_not(service: RunningService, queue: RolloutQueue) -> None:
    batch_id = service.post(rollout_file()).json()["batch_id"]
    (queued,) = service.spooled()
    stray = service.layout.blob("default", f"{'0' * 32}.{'1' * 32}.{'2' * 16}.safetensors")
    rival = service.layout.blob("default", f"{batch_id}.{'1' * 32}.{'2' * 16}.safetensors")
    unfinished = service.layout.spool_tmp / "dead"
    young = service.layout.spool_tmp / "young"
    for path in (stray, rival, unfinished, young):
        path.write_bytes(b"x")
    for path in (queued, stray, rival, unfinished):
        os.utime(path, (0, 0))

    asyncio.run(reap(service))  # or the service's own sweep was first
    assert service.spooled() == sorted([queued, young])


async def reap(service: RunningService) -> int:
    """Sweep the spool as another API process would."""
    assert service.settings.redis_url is not None
    async with redis.asyncio.Redis.from_url(service.settings.redis_url.get_secret_value()) as client:
        return await ServiceContext(service.settings, client).reap()


def test_a_sweep_forgets_runs_that_another_process_deleted(service: RunningService, redis_url: str) -> None:
    """A run that is registered under that name later begins with nothing kept."""

    async def sweep_twice() -> tuple[set[str], set[str]]:
        async with redis.asyncio.Redis.from_url(redis_url) as client:
            other = ServiceContext(service.settings, client)
            await other.reap()
            before = other.disk.runs & other._kept.keys()
            other.of("gone")  # of one that was deleted while that was told
            assert service.client.delete("/runs/default").status_code == 204
            await other.reap()
            other.close()
            return before, {*other._kept, *other.disk.runs}

    assert asyncio.run(sweep_twice()) == ({"default"}, set())


def test_a_process_that_was_stopped_before_it_queued_a_file_does_not_acknowledge_what_another_has_swept(
    service: RunningService, queue: RolloutQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or whose clock jumped: the entry would name a file that is gone."""
    enqueue = AsyncRolloutQueue.enqueue

    async def late(self: AsyncRolloutQueue, batch: Batch, **bounds: Any) -> Enqueued:
        blob = service.layout.blob("default", batch.blob)
        os.utime(blob, (0, 0))
        await reap(service)  # or the service's own sweep was first
        assert not blob.exists()
        return await enqueue(self, batch, **bounds)

    body = rollout_file()
    with monkeypatch.context() as patch:
        patch.setattr(AsyncRolloutQueue, "enqueue", late)
        reply = service.post(body)
    assert (reply.status_code, reply.json()["type"]) == (503, "urn:draftalign:spool-swept")
    assert "send it again" in reply.json()["detail"]
    assert queue.depth() == (0, 0)
    assert service.post(body).status_code == 202
    assert len(service.spooled()) == 1


def resident_bytes(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * 4096


def test_a_128_mib_body_costs_no_memory(valkey: OwnValkey, redis_url: str, tmp_path: Path) -> None:
    """The API as its own process: its resident memory grows by less than 32 MiB while it takes a 128 MiB file."""
    port = free_port()
    script = (
        "import sys; from service.api.app import run_api; from service.settings import Settings\n"
        f"run_api(Settings(state_dir=sys.argv[1], redis_url=sys.argv[2], port={port}))"
    )
    argv = [sys.executable, "-c", script, str(tmp_path / "state"), redis_url]
    with subprocess.Popen(argv) as process, httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
        try:
            deadline = time.monotonic() + 60
            while True:
                try:
                    client.get("/healthz")
                    break
                except httpx.ConnectError:
                    assert time.monotonic() < deadline
                    time.sleep(0.05)
            config = {**CONFIG, "hidden_size": 1024}
            client.put("/runs/default", content=run_file(config), headers=HEADERS).raise_for_status()
            T, H = 16_384, 1024
            tensors: dict[str, Any] = rollout_tensors((T,), hidden=H)
            tensors["aux_hidden"] = wire.Tensor.of(np.zeros((T, 3 * H), np.uint16), "BF16")
            meta = rollout_metadata(("big",), target_fingerprint=wire.target_fingerprint(config, (2, 4, 5)))
            parts = wire.encode(tensors, meta)
            size = wire.parts_bytes(parts)
            assert size > 128 << 20
            small = joined(wire.encode(rollout_tensors((9,), hidden=H), {**meta, "rollout_ids": '["s"]'}))
            client.post("/rollouts", content=small, headers=HEADERS).raise_for_status()
            before = resident_bytes(process.pid)
            highest = 0
            done = threading.Event()

            def watch() -> None:
                nonlocal highest
                while not done.is_set():
                    highest = max(highest, resident_bytes(process.pid))
                    time.sleep(0.002)

            watcher = threading.Thread(target=watch)
            watcher.start()
            content = (bytes(part[i : i + (1 << 20)]) for part in parts for i in range(0, len(part), 1 << 20))
            reply = client.post("/rollouts", content=content, headers=HEADERS | {"Content-Length": str(size)})
            done.set()
            watcher.join()
            assert reply.status_code == 202
            assert highest - before < 32 << 20
        finally:
            process.terminate()
            assert process.wait(60) in (0, -15)


@pytest.mark.parametrize(
    ("method", "path", "kind"),
    [
        ("POST", "/rollouts", wire.CONTENT_TYPE),
        ("PUT", "/runs/other", wire.CONTENT_TYPE),
        ("POST", "/acceptance", "application/json"),
    ],
)
def test_a_client_that_leaves_in_the_middle_is_no_error_of_the_service(
    service: RunningService, caplog: pytest.LogCaptureFixture, method: str, path: str, kind: str
) -> None:
    head = f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: {kind}\r\nContent-Length: 100000\r\n\r\n"
    with caplog.at_level("DEBUG", "draftalign.api"):
        with socket.create_connection(("127.0.0.1", service.port), timeout=60) as connection:
            connection.sendall(head.encode() + rollout_file()[:50])
            time.sleep(0.2)
        deadline = time.monotonic() + 60
        while "the client left" not in caplog.text and time.monotonic() < deadline:
            time.sleep(0.02)
    assert f"{method} {path}: the client left" in caplog.text
    assert [record.getMessage() for record in caplog.records if record.levelname in ("WARNING", "ERROR")] == []
    assert service.spooled() == []
