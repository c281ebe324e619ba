"""One run's files and uploads leave room on the spool's disk for the others."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import redis.asyncio
from helpers.engine.agent_fixtures import eventually
from helpers.service.service_fixtures import HEADERS, VOCAB, RunningService, head_file, rollout_file
from helpers.service.storage_fixtures import RolloutQueue
from redis import Redis

from rl_hooks.wire import CONTENT_TYPE, Tensor
from service.api.context.context import ServiceContext
from service.api.problems import in_units
from service.storage.layout import Layout
from service.storage.queue.keys import Keys
from service.storage.runs import kept_bytes
from service.storage.spool import Spool

Serve = Callable[..., RunningService]
Disk = Callable[[int], None]
BODY = len(rollout_file(("a0",), run="other"))


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Disk:
    """Let the state directory's disk have this number of bytes free now, and fewer as files come."""

    def taken() -> int:
        total = 0
        for path in (tmp_path / "state").rglob("*"):
            with contextlib.suppress(FileNotFoundError):
                # Not the audit log: on a disk that small its lines on refused uploads are many files' worth.
                counts = path.is_file() and path.parent.name != "audit"
                total += path.stat().st_size if counts else 0
        return total

    def resize(free: int) -> None:
        size = taken() + free
        monkeypatch.setattr(
            "service.storage.spool.os.statvfs",
            lambda _path: SimpleNamespace(f_bavail=size - taken(), f_frsize=1, f_files=0),
        )

    return resize


def flood(service: RunningService, run: str, prefix: str) -> int:
    """Send until the queue is full; returns how many files it took."""
    for number in range(200):
        reply = service.post(rollout_file((f"{prefix}{number}",), run=run), run)
        if reply.status_code == 429:
            assert reply.json()["type"] in ("urn:draftalign:queue-full", "urn:draftalign:spool-low")
            return number
        assert reply.status_code == 202
    raise AssertionError("nothing ended the flood")


def test_a_run_that_floods_leaves_room_for_others(serve: Serve, disk: Disk, redis_client: Redis) -> None:
    service = serve(spool_min_free_bytes=0)
    for run in ("flood", "other", "third"):
        assert service.register(run).status_code == 201
    disk(80 * BODY)
    first = flood(service, "flood", "a")
    assert 58 <= first <= 61, "three quarters of the disk"
    assert service.register("fourth").status_code == 201
    second = flood(service, "other", "b")
    assert 9 <= second <= 15, "three quarters of what is left"
    assert flood(service, "third", "c") >= 1
    work_off(service, redis_client, "flood")
    assert flood(service, "other", "d") >= 20, "room comes back to who goes on"


def test_a_bound_that_is_set_holds_on_a_large_disk(serve: Serve, disk: Disk) -> None:
    service = serve(queue_max_bytes=3 * BODY, max_body_bytes=3 * BODY, spool_min_free_bytes=0)
    service.register()
    disk(1000 * BODY)
    assert flood(service, "default", "a") == 3
    said = service.post(rollout_file(("b",)), "default").json()["detail"]
    full, file = in_units(3 * BODY), in_units(BODY)
    assert f"is full: {full} of {full} (DRAFTALIGN_QUEUE_MAX_BYTES), and this file has {file}" in said
    assert (full, file) == ("3.7 KiB", "1.2 KiB")


def work_off(service: RunningService, client: Redis, run: str) -> None:
    """As a worker does that has no use for any batch."""
    queue = RolloutQueue(client, run)
    for entry in queue.claim("w", 1000, 60.0):
        queue.ack(entry)
        Spool(service.layout).delete(run, entry.blob)


@contextlib.contextmanager
def slow_uploads(service: RunningService, path: str, length: int, most: int) -> Iterator[int]:
    """Announce files of `length` bytes, send a part of each and stay; yields how many were let in."""
    method = "PUT" if path.endswith("/head") else "POST"
    head = (
        f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: {CONTENT_TYPE}\r\n"
        f"Content-Length: {length}\r\nExpect: 100-continue\r\n\r\n"
    ).encode()
    with contextlib.ExitStack() as stack:
        let_in = 0
        for _ in range(most):
            connection = stack.enter_context(socket.create_connection(("127.0.0.1", service.port), timeout=60))
            connection.sendall(head)
            answer = connection.recv(4096)
            let_in += answer.startswith(b"HTTP/1.1 100")
            assert answer.startswith((b"HTTP/1.1 100", b"HTTP/1.1 429"))
        yield let_in


@pytest.mark.parametrize("path", ["/rollouts?run=slow", "/rollouts", "/runs/slow/head", "/drafters?run=slow"])
def test_uploads_that_stay_on_their_way_leave_room_for_others(serve: Serve, disk: Disk, path: str) -> None:
    service = serve(spool_min_free_bytes=0)
    for run in ("slow", "other"):
        service.register(run)
    disk(12 * BODY)
    with slow_uploads(service, path, BODY if "drafters" not in path else BODY // 2, 12) as let_in:
        assert 1 <= let_in <= 9
        reply = service.post(rollout_file(("1",), run="other"), "other")
        assert reply.status_code == 202, reply.json()
    reply = service.post(rollout_file(("2",), run="other"), "other")
    assert reply.status_code == 202, reply.json()


@pytest.mark.parametrize("newest", [None, 0, 100], ids=["before rollouts", "newer", "older than the rollouts"])
def test_heads_of_a_run_leave_room_for_others(
    newest: int | None, serve: Serve, disk: Disk, redis_client: Redis
) -> None:
    service = serve(spool_min_free_bytes=0, max_heads=64)
    for run in ("heads", "other"):
        service.register(run)
    if newest is not None:
        assert service.post(rollout_file(("r",), run="heads", policy_version=newest), "heads").status_code == 202
        work_off(service, redis_client, "heads")
    disk(10 * len(head_file(1)))
    codes = []
    for version in range(1, 12):
        reply = service.client.put("/runs/heads/head", content=head_file(version), headers=HEADERS)
        codes.append(reply.status_code)
    assert codes.count(201) in (6, 7, 8)
    assert reply.json()["type"] == "urn:draftalign:spool-low"
    assert "others find room" in reply.json()["detail"]
    assert service.post(rollout_file(("1",), run="other"), "other").status_code == 202


def test_a_head_that_is_sent_again_and_again_makes_no_room_for_others_of_its_run(
    serve: Serve, disk: Disk, redis_client: Redis
) -> None:
    """That of the batch accepted last: the others come after it only until it comes again."""
    service = serve(spool_min_free_bytes=0, max_heads=64)
    for run in ("heads", "other"):
        service.register(run)
    put = functools.partial(service.client.put, "/runs/heads/head", headers=HEADERS)
    assert put(content=head_file(100)).status_code == 201
    assert service.post(rollout_file(("r",), run="heads", policy_version=100), "heads").status_code == 202
    work_off(service, redis_client, "heads")
    disk(10 * len(head_file(1)))
    codes = []
    for version in range(1, 12):
        codes.append(put(content=head_file(version)).status_code)
        put(content=head_file(100))
    assert codes.count(201) in (6, 7, 8)
    assert service.post(rollout_file(("1",), run="other"), "other").status_code == 202


def test_a_sweep_that_fails_as_nobody_foresaw_does_not_end_the_sweeps(
    serve: Serve, disk: Disk, redis_client: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("service.api.app._MAKE_ROOM_SECONDS", 0.01)
    service = serve()
    service.register()
    context = service.server.config.app.state.context  # type: ignore[union-attr]
    make_room, begun = context.disk.make_room, list[int]()

    async def counted() -> None:
        begun.append(1)
        await make_room()

    context.disk.make_room = counted
    redis_client.hset(Keys("default").counters, "dead_file_bytes", "nonsense")
    disk(0)
    for times in (1, 2):
        assert service.post(rollout_file(("1",)), "default").status_code == 429
        eventually(lambda times=times: len(begun) >= times, 10.0)  # type: ignore[misc]


def test_a_dead_batch_needs_no_more_disk_to_be_put_back(
    serve: Serve, disk: Disk, redis_client: Redis, redis_url: str
) -> None:
    service = serve(spool_min_free_bytes=0)
    service.register()
    disk(100 * BODY)
    assert service.post(rollout_file(("1",)), "default").status_code == 202
    queue = RolloutQueue(redis_client, "default")
    [entry] = queue.claim("w", 1000, 60.0)
    queue.dead_letter(entry, "bad", keep_file=True)
    swept(service, redis_url)  # else it may come in between, and count what the worker keeps
    disk(BODY + kept_bytes(service.layout, "default") // 3)  # of which a run may have three quarters
    assert service.client.post(f"/runs/default/dead/{entry.batch_id}/retry").status_code == 202


def swept(service: RunningService, redis_url: str) -> None:
    """As a service does every five minutes."""
    context = service.server.config.app.state.context  # type: ignore[union-attr]

    async def sweep() -> None:
        async with redis.asyncio.Redis.from_url(redis_url) as client:
            other = ServiceContext(service.settings, client)
            await other.reap()
            context.disk._kept_bytes = other.disk._kept_bytes
            other.close()

    asyncio.run(sweep())


def kill_all(client: Redis, run: str) -> None:
    """Every batch that waits dies, and its file is kept."""
    queue = RolloutQueue(client, run)
    for entry in queue.claim("w", 1000, 60.0):
        queue.dead_letter(entry, "bad", keep_file=True)


def test_dead_batches_count_in_their_runs_share_and_make_room_for_its_own_rollouts(
    serve: Serve, disk: Disk, redis_client: Redis
) -> None:
    service = serve(spool_min_free_bytes=0)
    for run in ("flood", "other"):
        service.register(run)
    disk(80 * BODY)
    for number in range(12):
        for place in range(10):
            body = rollout_file((f"{number}-{place}",), run="flood")
            assert service.post(body, "flood").status_code == 202, "its own dead batches refuse it nothing"
        kill_all(redis_client, "flood")
    taken = sum(path.stat().st_size for path in service.layout.spool("flood").iterdir())
    assert 50 * BODY < taken < 61 * BODY, "three quarters of the disk, whatever becomes of them"
    assert flood(service, "other", "b") >= 9
    disk(2 * BODY)
    assert service.post(rollout_file(("last",), run="flood"), "flood").status_code == 202


def test_what_the_worker_keeps_counts_in_its_runs_share(serve: Serve, disk: Disk, redis_url: str) -> None:
    service = serve(spool_min_free_bytes=0)
    for run in ("flood", "other"):
        service.register(run)
    disk(80 * BODY)
    recent = service.layout.worker("flood") / "recent"
    recent.mkdir(parents=True)
    (recent / "x").write_bytes(bytes(40 * BODY))
    swept(service, redis_url)
    assert 18 <= flood(service, "flood", "a") <= 21, "with the 40, three quarters of the 80"
    (recent / "x").write_bytes(b"")
    (recent / "y").write_bytes(bytes(40 * BODY))
    disk(8 * BODY)
    swept(service, redis_url)
    assert flood(service, "other", "b") >= 5


def test_a_run_whose_drafters_fill_a_small_disk_goes_on(serve: Serve, disk: Disk, redis_url: str) -> None:
    service = serve(spool_min_free_bytes=0)
    service.register()
    drafters = service.layout.drafters("default")
    drafters.mkdir(parents=True, exist_ok=True)
    (drafters / "x").write_bytes(bytes(200 * BODY))
    disk(40 * BODY)
    swept(service, redis_url)
    assert 8 <= flood(service, "default", "a") <= 11, "a quarter of what is free"


def test_files_of_dead_batches_make_room_those_of_the_run_with_most_of_them_first(
    serve: Serve, disk: Disk, redis_client: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("service.api.app._MAKE_ROOM_SECONDS", 0.1)
    service = serve(spool_min_free_bytes=3 * BODY)
    for run, batches in (("many", 12), ("few", 2), ("other", 0)):
        service.register(run)
        for number in range(batches):
            assert service.post(rollout_file((f"{run}{number}",), run=run), run).status_code == 202
        kill_all(redis_client, run)
    disk(3 * BODY)  # somebody else's files took the rest
    body = rollout_file(("1",), run="other")
    assert service.post(body, "other").json()["type"] == "urn:draftalign:spool-low"
    eventually(lambda: service.post(body, "other").status_code in (200, 202))
    left = {run: sum(path.stat().st_size for path in service.layout.spool(run).iterdir()) for run in ("many", "few")}
    assert left["few"] == pytest.approx(2 * BODY, rel=0.1)
    assert 6 * BODY < left["many"] < 12 * BODY
    listed = service.client.get("/runs/many/dead").json()["dead"]
    assert len(listed) == 12
    assert 1 <= sum(not one["has_file"] for one in listed) <= 5


def dead_files(service: RunningService, run: str) -> int:
    """Dead batches of a run whose file is still there."""
    return sum(one["has_file"] for one in service.client.get(f"/runs/{run}/dead").json()["dead"])


def make_dead(service: RunningService, client: Redis, run: str, batches: int, first: int = 0) -> None:
    for number in range(first, first + batches):
        assert service.post(rollout_file((f"{run}d{number}",), run=run), run).status_code == 202
    kill_all(client, run)


def test_an_upload_for_which_there_is_room_takes_nobodys_dead_batches(
    serve: Serve, disk: Disk, redis_client: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("service.api.app._MAKE_ROOM_SECONDS", 0.05)
    service = serve(spool_min_free_bytes=0)
    for run in ("other", "a"):
        service.register(run)
    make_dead(service, redis_client, "other", 6)
    disk(2 * BODY)
    assert service.post(rollout_file(("1",), run="a"), "a").status_code == 202
    time.sleep(0.3)
    assert dead_files(service, "other") == 6


def test_a_bound_of_the_queue_takes_no_dead_batches_on_a_large_disk(
    serve: Serve, disk: Disk, redis_client: Redis
) -> None:
    service = serve(queue_max_bytes=8 * BODY, max_body_bytes=2 * BODY, spool_min_free_bytes=0)
    service.register("a")
    make_dead(service, redis_client, "a", 6)
    disk(100_000 * BODY)
    assert [service.post(rollout_file((f"x{n}",), run="a"), "a").status_code for n in range(8)] == [202] * 8
    assert dead_files(service, "a") == 6


def test_an_upload_that_is_refused_anyway_takes_no_dead_batches(serve: Serve, disk: Disk, redis_client: Redis) -> None:
    service = serve(queue_max_items=2, spool_min_free_bytes=0)
    service.register("a")
    disk(20 * BODY)
    for first in (0, 2, 4):
        make_dead(service, redis_client, "a", 2, first)
    disk(2 * BODY)
    assert [service.post(rollout_file((f"x{n}",), run="a"), "a").status_code for n in range(2)] == [202] * 2
    before = dead_files(service, "a")
    assert service.post(rollout_file(("x2",), run="a"), "a").status_code == 429
    assert dead_files(service, "a") == before


def test_a_bad_file_and_a_duplicate_take_no_dead_batches(serve: Serve, disk: Disk, redis_client: Redis) -> None:
    service = serve(spool_min_free_bytes=0)
    service.register("a")
    disk(20 * BODY)
    make_dead(service, redis_client, "a", 8)
    there = rollout_file(("there",), run="a")
    assert service.post(there, "a").status_code == 202
    disk(4 * BODY)
    before = dead_files(service, "a")
    for name in ("a", None):  # with the run in the URL and without
        assert service.post(rollout_file(("bad",), run="a", target_fingerprint="0" * 64), name).status_code == 422
        assert service.post(there, name).status_code == 200
    assert dead_files(service, "a") == before
    assert service.post(rollout_file(("good",), run="a"), "a").status_code == 202
    assert dead_files(service, "a") < before, "else this shows nothing"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own, of 4 MiB."""
    place = tmp_path / "small"
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "none", place], capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip(f"nothing can be mounted here: {mounted.stderr.decode()}")
    yield place
    subprocess.run(["umount", "--lazy", place], check=True)


@pytest.mark.parametrize("named", [True, False], ids=["run in the URL", "run in the file"])
def test_on_a_full_disk_a_file_that_is_refused_for_its_tensors_takes_no_dead_batches(
    named: bool, small_disk: Path, serve: Serve, redis_client: Redis
) -> None:
    service = serve(state_dir=small_disk, spool_min_free_bytes=0)
    service.register("a")

    def body(name: str, **more: Any) -> bytes:
        return rollout_file((name,), run="a", lengths=(2000,), **more)

    for number in range(15):
        assert service.post(body(f"dead{number}"), "a").status_code == 202
        kill_all(redis_client, "a")
    free = os.statvfs(small_disk).f_bavail * os.statvfs(small_disk).f_frsize
    (small_disk / "another's").write_bytes(bytes(free - 3 * len(body("good"))))
    unknown = Tensor.of(np.full(2000, VOCAB, np.int32), "I32")
    before, name = dead_files(service, "a"), "a" if named else None
    reply = service.post(body("bad", tensors={"input_ids": unknown}), name)
    assert (reply.status_code, "input_ids" in reply.text) == (422, True), reply.text
    assert dead_files(service, "a") == before == 15
    assert service.post(body("good"), name).status_code == 202
    assert dead_files(service, "a") < before, "else this shows nothing"


def test_a_batch_that_comes_again_after_its_file_was_lost_makes_its_room(
    serve: Serve, disk: Disk, redis_client: Redis
) -> None:
    service = serve(spool_min_free_bytes=0)
    service.register("a")
    disk(20 * BODY)
    lost = rollout_file(("lost",), run="a")
    assert service.post(lost, "a").status_code == 202
    queue = RolloutQueue(redis_client, "a")
    for entry in queue.claim("w", 1000, 60.0):
        queue.dead_letter(entry, "its file is gone", code="blob_missing")
    make_dead(service, redis_client, "a", 8)
    disk(5 * BODY // 2)
    assert service.post(lost, "a").status_code == 202
    assert dead_files(service, "a") < 8


def test_uploads_that_come_at_once_share_the_room_too(serve: Serve, disk: Disk) -> None:
    service = serve(spool_min_free_bytes=0)
    for run in ("slow", "other"):
        service.register(run)
    disk(12 * BODY)
    head = (
        f"POST /rollouts?run=slow HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: {CONTENT_TYPE}\r\n"
        f"Content-Length: {BODY}\r\nExpect: 100-continue\r\n\r\n"
    ).encode()
    with contextlib.ExitStack() as stack:
        senders = [socket.create_connection(("127.0.0.1", service.port), timeout=60) for _ in range(40)]
        for sender in senders:
            stack.enter_context(sender)
            sender.sendall(head)
        answers = [sender.recv(4096) for sender in senders]
        assert sum(answer.startswith(b"HTTP/1.1 100") for answer in answers) == 9, "three quarters of twelve"
        assert service.post(rollout_file(("1",), run="other"), "other").status_code == 202


@pytest.mark.parametrize(("room", "to"), [(3.0, 7), (1.1, 7), (3.0, 3)], ids=["room", "little room", "back"])
def test_a_run_that_only_a_head_brings_on_gets_it_received(
    room: float, to: int, serve: Serve, disk: Disk, redis_client: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker deletes its old heads, but works on no run without rollouts, which come after the head.

    `to`: also of a trainer that goes back to an earlier checkpoint.
    """
    monkeypatch.setattr("service.api.app._MAKE_ROOM_SECONDS", 0.05)
    service = serve(spool_min_free_bytes=0)
    for run in ("a", "other"):
        service.register(run)
    make_dead(service, redis_client, "other", 20)
    for version in range(1, 7):
        assert service.client.put("/runs/a/head", content=head_file(version), headers=HEADERS).status_code == 201
        sent = rollout_file((f"r{version}",), run="a", policy_version=version)
        assert service.post(sent, "a").status_code == 202
        work_off(service, redis_client, "a")
    disk(int(room * len(head_file(7))))

    def received() -> bool:
        return service.client.put("/runs/a/head", content=head_file(to), headers=HEADERS).status_code == 201

    for state in ("paused", "active"):
        body = {"state": state, "reason": "a test"}
        assert service.client.patch("/runs/a", json=body).status_code == 200
        assert state == "active" or not received(), "the worker leaves a paused run's heads where they are"
    eventually(received)
    assert dead_files(service, "other") < 20 or room > 2


def fill_up(place: Path) -> None:
    """Let another program take the rest of a disk."""
    with contextlib.suppress(OSError), (place / "another's").open("wb", buffering=0) as file:
        while file.write(bytes(4096)):
            pass


def written(service: RunningService) -> list[tuple[str, int | None]]:
    """Each line of the audit log: the call, and the status, which the line of what is asked has not."""
    texts = [path.read_text() for path in service.layout.audit.glob("acts_*.jsonl")]
    found = [json.loads(line) for text in texts for line in text.splitlines() if line.startswith("{")]
    return [(one["call"], one.get("status")) for one in sorted(found, key=lambda one: one.get("ended", one["time"]))]


def test_on_a_full_disk_without_room_for_the_audit_log_nothing_is_done_and_it_is_said_what_to_do(
    small_disk: Path, serve: Serve
) -> None:
    service = serve(state_dir=small_disk, spool_min_free_bytes=0)
    service.register("old")
    service.publish("old", bytes(1 << 20))
    fill_up(small_disk)
    delete = service.client.delete("/runs/old")
    assert (delete.status_code, delete.json()["type"]) == (503, "urn:draftalign:audit")
    assert "free 1 MiB on it" in delete.json()["detail"]
    assert service.client.get("/runs/old").status_code == 200
    (small_disk / "another's").unlink()
    assert service.client.delete("/runs/old").status_code == 204
    assert written(service) == [("DELETE /runs/old", None), ("DELETE /runs/old", 204)]


def test_a_disk_without_inodes_is_not_ready_and_it_is_said_what_to_do(small_disk: Path, serve: Serve) -> None:
    service = serve(state_dir=small_disk, spool_min_free_bytes=0)
    service.register("old")
    assert service.post(rollout_file(("before",), run="old"), "old").status_code == 202
    status = os.statvfs(small_disk)
    used = status.f_files - status.f_ffree
    subprocess.run(["mount", "-o", f"remount,nr_inodes={used}", small_disk], check=True)
    for reply in (service.client.get("/readyz"), service.post(rollout_file(("more",), run="old"), "old")):
        assert (reply.status_code, reply.json()["type"]) == (503, "urn:draftalign:disk")
        assert "where `df -i` shows none free" in reply.json()["detail"]
    refused = service.client.delete("/runs/old")
    assert (refused.status_code, refused.json()["type"]) == (503, "urn:draftalign:audit")
    assert "or an inode (df -i)" in refused.json()["detail"]
    subprocess.run(["mount", "-o", f"remount,nr_inodes={used + 100}", small_disk], check=True)
    assert service.client.get("/readyz").status_code == 200
    assert service.post(rollout_file(("more",), run="old"), "old").status_code == 202


def test_a_disk_that_becomes_read_only_is_not_ready_until_it_is_writable_again(small_disk: Path, serve: Serve) -> None:
    """As the kernel makes one whose blocks fail. What is served is served on."""
    service = serve(state_dir=small_disk, spool_min_free_bytes=0)
    service.register("old")
    version = service.publish("old").version
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    for reply in (service.client.get("/readyz"), service.post(rollout_file(run="old"), "old")):
        assert (reply.status_code, reply.json()["type"]) == (503, "urn:draftalign:disk")
        assert "see how the state directory is mounted" in reply.json()["detail"]
    assert service.client.get("/drafter/latest?run=old").json()["version"] == version
    subprocess.run(["mount", "-o", "remount,rw", small_disk], check=True)
    assert service.client.get("/readyz").status_code == 200
    assert service.post(rollout_file(run="old"), "old").status_code == 202


def test_a_disk_that_always_says_that_no_inode_is_left_is_believed_only_where_no_file_can_be_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spool = Spool(Layout(tmp_path))
    monkeypatch.setattr("service.storage.spool.os.statvfs", lambda _path: SimpleNamespace(f_files=1, f_favail=0))
    spool.check_takes_files()
    assert not list((tmp_path / "spool" / "tmp").iterdir())


@pytest.mark.skipif(os.getuid() != 0, reason="becomes another user, and root again")
@pytest.mark.parametrize(("mode", "takes"), [(0o755, False), (0o766, False), (0o777, True)])
def test_a_spool_of_another_user_takes_files_only_where_its_mode_says_so(mode: int, takes: bool) -> None:
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        tmp = root / "spool" / "tmp"
        tmp.mkdir(parents=True)
        for place, its in ((root, 0o755), (tmp.parent, 0o755), (tmp, mode)):
            place.chmod(its)
        os.setresuid(65534, 65534, 0)
        try:
            with contextlib.nullcontext() if takes else pytest.raises(PermissionError):
                Spool(Layout(root)).check_takes_files()
        finally:
            os.setresuid(0, 0, 0)
