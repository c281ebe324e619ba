"""Dead batches through the real API and the real worker: listed, downloaded, put back once, discarded, swept."""

from __future__ import annotations

import asyncio
import os
import random
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis.asyncio
from helpers.engine.engine_forks import Fork
from helpers.forked import running_api
from helpers.ports import free_port
from helpers.service.service_fixtures import RunningService
from helpers.worker.worker_fixtures import Bench
from torch import Tensor
from typer.testing import CliRunner

from rl_hooks import wire
from service.api.context.context import ServiceContext
from service.cli.main import app as command_line
from service.storage.queue.deliveries import Entry, RolloutQueue
from service.storage.queue.keys import Keys
from service.storage.ready import Memory, memory_of

Serve = Callable[..., RunningService]
DEAD = "/runs/default/dead"
#: Takes what died of its log-probabilities.
LENIENT: dict[str, Any] = {"logprob_gap_nats": 10.0}


def shifted(tensors: dict[str, Tensor]) -> None:
    """Log-probabilities that disagree with the features by one nat: the batch dies."""
    tensors["logprobs"] -= 1.0


def dying(bench: Bench, name: str, **options: Any) -> bytes:
    return bench.world.rollout_file(name, change=shifted, **options)


def die(bench: Bench, service: RunningService, *names: str) -> list[str]:
    """Post batches that the worker refuses, and let it; returns their ids."""
    found = [service.post(dying(bench, name)).json()["batch_id"] for name in names]
    bench.drain(bench.worker())
    assert {bench.state(batch_id) for batch_id in found} == {"dead"}
    return found


def check_ledger(bench: Bench) -> dict[str, int]:
    """Whatever came in is out, or in the queue; whatever is in the queue was counted once."""
    counts = bench.queue.counters()
    came = counts["accepted_total"] + counts["put_back_total"]
    assert came == counts["acked_total"] + counts["dead_total"] + counts["items"]
    kept = [int(name.rpartition(b":")[2]) for name in bench.redis.zrange("da:{default}:dead_files", 0, -1)]
    assert counts["dead_file_bytes"] == sum(kept)
    assert counts["items"] == bench.redis.xlen("da:{default}:queue")
    return counts


def test_a_dead_batch_is_listed_downloaded_put_back_once_and_trained(bench: Bench, serve: Serve) -> None:
    service = serve()
    bench.begin()
    body = dying(bench, "bad")
    batch_id = service.post(body).json()["batch_id"]
    bench.drain(bench.worker())
    listed = service.client.get(DEAD).json()
    (letter,) = listed["dead"]
    assert (listed["total"], listed["file_bytes"], listed["older"]) == (1, len(body), None)
    assert (letter["batch_id"], letter["has_file"], letter["bytes"]) == (batch_id, True, len(body))
    assert "log-probabilities disagree" in letter["reason"]
    assert letter["rollout_ids"] == [f"bad/{i}" for i in range(8)]
    assert abs(letter["died"] - time.time()) < 60
    assert service.client.get(f"{DEAD}/{batch_id}/file").content == body
    odd = service.client.get(f"{DEAD}/{batch_id}/file", headers={"Range": "bytes=x"})
    assert (odd.status_code, odd.json()["type"]) == (400, "urn:draftalign:bad-range")
    assert f'draftalign_dead_file_bytes{{run="default"}} {float(len(body))}' in service.client.get("/metrics").text
    first, again = (service.client.post(f"{DEAD}/{batch_id}/retry") for _ in range(2))
    assert (first.status_code, first.json()["put_back"], first.json()["state"]) == (202, True, "queued")
    assert (again.status_code, again.json()["put_back"], again.json()["state"]) == (200, False, "queued")
    assert (check_ledger(bench)["items"], service.client.get(DEAD).json()["dead"]) == (1, [])
    assert service.client.delete(f"{DEAD}/{batch_id}").status_code == 409
    bench.drain(bench.worker(**LENIENT))
    assert service.client.get(f"/rollouts/{batch_id}").json()["state"] == "trained"
    assert service.client.post(f"{DEAD}/{batch_id}/retry").json()["state"] == "trained"
    assert service.client.get(f"{DEAD}/{batch_id}/file").status_code == 409
    counts = check_ledger(bench)
    assert (counts["acked_total"], counts["put_back_total"], counts["dead_total"]) == (1, 1, 1)
    assert bench.spooled() == []
    assert bench.store.scores()[batch_id].rollouts == 8


def test_batches_that_are_put_back_are_of_their_own_time(bench: Bench, serve: Serve) -> None:
    """Eight of an old policy are no trainer that went back: not for the worker, the gauges, the curves or the alarm."""
    service = serve()
    bench.begin()
    first = [service.post(dying(bench, f"old {n}", policy_version=3)).json()["batch_id"] for n in range(8)]
    bench.drain(bench.worker())
    for n in range(4):
        bench.post(f"new {n}", policy_version=40 + n)
    worker = bench.worker(**LENIENT, max_policy_lag=16)
    bench.drain(worker)
    before, arrived = service.client.get("/alpha").json(), service.client.get("/metrics").text
    drift, last = worker.learner.journal.state["drift"], last_arrival(arrived)
    for batch_id in first:
        assert service.client.post(f"{DEAD}/{batch_id}/retry").json()["put_back"]
    bench.drain(worker)
    assert {bench.state(batch_id) for batch_id in first} == {"trained"}
    assert worker.inbox.versions.newest == 43
    assert {bench.store.scores()[batch_id].action for batch_id in first} == {"defer"}, "they join the mix, as late ones"
    assert worker.learner.journal.state["drift"] == drift
    after = service.client.get("/alpha").json()
    assert after["current"] == before["current"]
    assert [point["policy_version"] for point in after["points"]] == [3, 40, 41, 42, 43]
    assert len(after["attempts"]) == 1
    assert last_arrival(service.client.get("/metrics").text) == last
    assert set(first) & {name.partition(".")[0] for name in worker.learner.recent.names()}
    late = [bench.post("late", policy_version=20), bench.post("next", policy_version=44)]
    bench.drain(worker)
    assert [bench.state(batch_id) for batch_id in late] == ["skipped", "trained"], "20 is late for 43, and not for 3"
    check_ledger(bench)


def last_arrival(text: str) -> str:
    (line,) = [line for line in text.splitlines() if line.startswith("draftalign_batches_last_arrival_")]
    return line


def test_a_batch_of_the_newest_policy_that_is_put_back_is_worked_on_as_what_arrives_now(
    bench: Bench, serve: Serve
) -> None:
    service = serve()
    bench.begin()
    (batch_id,) = die(bench, service, "bad")
    (came,) = bench.redis.xrevrange("da:{default}:dead", count=1)
    service.client.post(f"{DEAD}/{batch_id}/retry").raise_for_status()
    worker = bench.worker(**LENIENT)
    bench.drain(worker)
    record = bench.store.scores()[batch_id]
    assert record.action != "defer"
    assert str(record.entry_id) > came[1][b"entry_id"].decode()


def test_a_batch_that_dies_again_keeps_the_time_when_it_came_first(bench: Bench, serve: Serve) -> None:
    service = serve()
    bench.begin()
    (batch_id,) = die(bench, service, "bad")
    (came,) = bench.redis.xrevrange("da:{default}:dead", count=1)
    bench.post("new", policy_version=1)
    bench.drain(bench.worker())
    for settings in ({}, LENIENT):
        service.client.post(f"{DEAD}/{batch_id}/retry").raise_for_status()
        bench.drain(bench.worker(**settings))
    assert bench.state(batch_id) == "trained"
    assert bench.store.scores()[batch_id].entry_id == came[1][b"entry_id"].decode()


def test_what_dies_again_can_be_put_back_again_and_counts_as_two_deaths(bench: Bench, serve: Serve) -> None:
    service = serve()
    bench.begin()
    (batch_id,) = die(bench, service, "bad")
    assert service.client.post(f"{DEAD}/{batch_id}/retry").status_code == 202
    bench.drain(bench.worker())
    assert [one["batch_id"] for one in service.client.get(DEAD).json()["dead"]] == [batch_id]
    assert check_ledger(bench)["dead_total"] == 2
    assert service.client.post(f"{DEAD}/{batch_id}/retry").json()["put_back"]
    check_ledger(bench)


def test_a_discarded_batch_is_gone_with_its_file_and_stays_dead(bench: Bench, serve: Serve) -> None:
    service = serve()
    bench.begin()
    (batch_id,) = die(bench, service, "bad")
    for _ in range(2):
        assert service.client.delete(f"{DEAD}/{batch_id}").status_code == 204
    assert (service.client.get(DEAD).json()["dead"], bench.spooled(), bench.state(batch_id)) == ([], [], "dead")
    assert check_ledger(bench)["dead_file_bytes"] == 0
    for reply in (
        service.client.post(f"{DEAD}/{batch_id}/retry"),
        service.client.get(f"{DEAD}/{batch_id}/file"),
    ):
        assert (reply.status_code, reply.json()["type"]) == (410, "urn:draftalign:file-gone")
    assert service.post(dying(bench, "bad")).json()["state"] == "dead"
    for strange in ("0" * 32, "bad%2F0", "x" * 500):
        assert service.client.post(f"{DEAD}/{strange}/retry").status_code in (404, 405)
        assert service.client.delete(f"{DEAD}/{strange}").status_code in (404, 405)


def test_files_are_kept_up_to_a_bound_of_bytes_the_oldest_go_first(bench: Bench, serve: Serve) -> None:
    service = serve()
    bench.begin()
    bodies = {name: dying(bench, name, lengths=[12] * 8) for name in ("first", "later", "last")}
    size = max(map(len, bodies.values()))
    worker = bench.worker(dead_letter_bytes=2 * size)
    found = [service.post(body).json()["batch_id"] for body in bodies.values()]
    bench.drain(worker)
    listed = service.client.get(DEAD).json()
    assert [(one["batch_id"], one["has_file"]) for one in listed["dead"]] == [
        (found[2], True),
        (found[1], True),
        (found[0], False),
    ]
    assert check_ledger(bench)["dead_file_bytes"] == sum(map(len, bodies.values())) - len(bodies["first"])
    assert len(bench.spooled()) == 2
    assert service.client.post(f"{DEAD}/{found[0]}/retry").status_code == 410
    page = service.client.get(DEAD, params={"count": 2}).json()
    assert [one["batch_id"] for one in page["dead"]] == found[:0:-1]
    rest = service.client.get(DEAD, params={"count": 2, "before": page["older"]}).json()
    assert ([one["batch_id"] for one in rest["dead"]], rest["older"], rest["total"]) == ([found[0]], None, 3)
    for hostile in ("0-0", "-", "+", "1", "9" * 30 + "-1", "(1-1"):
        assert service.client.get(DEAD, params={"before": hostile}).status_code == 422, hostile


def reap(bench: Bench, **changes: Any) -> None:
    async def once() -> None:
        async with redis.asyncio.Redis.from_url(bench.redis_url) as client:
            await ServiceContext(bench.settings.model_copy(update=changes), client).reap()

    asyncio.run(once())


def test_a_broken_key_of_one_run_is_not_in_the_way_of_the_others_room(
    bench: Bench, serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    serve().stop()  # it would tell of the run too
    for run in ("broken", "sound"):
        bench.register(run=run)
    bench.redis.set(Keys("broken").counters, "x")
    bench.redis.rpush("da:{broken}:ended", "x")

    async def once() -> None:
        async with redis.asyncio.Redis.from_url(bench.redis_url) as client:
            context = ServiceContext(bench.settings, client)
            await context.reap()
            context.disk.want_room(1 << 40)
            await context.disk.make_room()

    asyncio.run(once())
    assert caplog.text.count("run broken: WRONGTYPE") == 2, "of what is remembered, and of dead batches"


def test_a_redis_that_does_not_say_what_memory_it_has_is_no_trouble(bench: Bench, serve: Serve) -> None:
    """Some services rename the command, or deny it."""
    bench.redis.acl_setuser("asks", enabled=True, nopass=True, keys=["*"], channels=["*"], commands=["+@all", "-info"])
    asked = f"unix://asks@{bench.redis_url.removeprefix('unix://')}"

    async def once() -> Memory | None:
        async with redis.asyncio.Redis.from_url(asked) as client:
            return await memory_of(client)

    class Renamed:
        async def info(self, _: str) -> None:
            raise redis.exceptions.ResponseError("unknown command 'INFO', with args beginning with: 'memory'")

    class Another:
        async def info(self, _: str) -> dict[str, int]:
            return {"maxmemory": 1 << 30}

    try:
        assert asyncio.run(once()) is None
        assert asyncio.run(memory_of(Renamed())) is None
        assert asyncio.run(memory_of(Another())) is None
    finally:
        bench.redis.acl_deluser("asks")


def test_a_redis_that_is_nearly_full_says_so_and_remembers_less(bench: Bench, serve: Serve) -> None:
    service = serve()
    bench.register(run="old")
    queue = RolloutQueue(bench.redis, "old")
    queue.ensure_group()
    for number in range(150):
        assert service.post(bench.world.rollout_file(str(number), run="old")).status_code == 202
        for entry in queue.claim("w", 10**9, 1000.0):
            queue.ack(entry)

    def remembered() -> int:
        return int(bench.redis.hget(Keys("old").counters, "remembered_bytes") or 0)

    taken, used = remembered(), int(bench.redis.info("memory")["used_memory"])
    reap(bench)
    assert remembered() == taken, "without a limit there is room"
    bench.redis.config_set("maxmemory", int(used / 0.95))
    try:
        told = re.search(r"^draftalign_redis_memory_ratio (.*)$", service.client.get("/metrics").text, re.MULTILINE)
        assert told is not None
        assert 0.9 < float(told[1]) < 1.3, "connections' buffers come and go"
        assert service.client.get("/runs/old").json()["headline"]["state"] == "redis_full"
        reap(bench, remembered_bytes=16 * (taken // 20))
        assert 0.9 * (taken // 20) < remembered() < 0.8 * taken
    finally:
        bench.redis.config_set("maxmemory", 0)


def test_a_full_redis_keeps_no_file_of_refused_uploads_and_its_memory_is_cut_all_the_same(
    bench: Bench, serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    service = serve()
    for run, batches in {"old": 60, "other": 1}.items():
        bench.register(run=run)
        queue = RolloutQueue(bench.redis, run)
        queue.ensure_group()
        for number in range(batches):
            assert service.post(bench.world.rollout_file(str(number), run=run)).status_code == 202
            for entry in queue.claim("w", 10**9, 1000.0):
                queue.ack(entry)
                service.layout.blob(run, entry.blob).unlink()
    taken = int(bench.redis.hget(Keys("old").counters, "remembered_bytes") or 0)
    left = service.layout.spool("other") / f"{'ab' * 16}.{'cd' * 16}.{'ef' * 8}.safetensors"
    left.write_bytes(b"of an API that was killed")
    os.utime(left, (time.time() - 3600,) * 2)
    bench.redis.config_set("maxmemory", max(int(bench.redis.info("memory")["used_memory"]) - 20_000, 1))
    try:
        for _ in range(3):
            refused = service.post(bench.world.rollout_file("new", run="other"))
            assert (refused.status_code, refused.json()["type"]) == (503, "urn:draftalign:redis-full")
        assert list(service.layout.spool("other").iterdir()) == [left]
        reap(bench, remembered_bytes=taken // 12)
        assert int(bench.redis.hget(Keys("old").counters, "remembered_bytes") or 0) < taken // 5
        assert "run other: its spool was not swept" in caplog.text
    finally:
        bench.redis.config_set("maxmemory", 0)
    reap(bench)
    assert not left.exists(), "once there is room"
    assert service.post(bench.world.rollout_file("new", run="other")).status_code == 202


def test_runs_that_ended_give_way_where_redis_remembers_too_much_of_all(bench: Bench, serve: Serve) -> None:
    """Each within its own bound: a week's finished runs would fill Redis for the one that goes on."""
    service = serve()
    sizes = {"old": 60, "older": 40, "small": 3}

    def known(run: str) -> int:
        return len(bench.redis.keys(f"da:{{{run}}}:batch:*"))

    for run, batches in sizes.items():
        bench.register(run=run)
        queue = RolloutQueue(bench.redis, run)
        queue.ensure_group()
        for number in range(batches):
            assert service.post(bench.world.rollout_file(f"{number}", run=run)).status_code == 202
            for entry in queue.claim("w", 10**9, 1000.0):
                queue.ack(entry)
    each = int(bench.redis.hget("da:{old}:counters", "remembered_bytes") or 0) // 60
    reap(bench, remembered_bytes=54 * each)
    assert {run: known(run) for run in sizes} == sizes, "together they are below twice the bound of one"
    reap(bench, remembered_bytes=22 * each)
    assert known("small") == 3, "it has less than its share"
    assert known("old") == pytest.approx(20, abs=1)
    assert known("older") == pytest.approx(20, abs=1)
    assert service.post(bench.world.rollout_file("59", run="old")).json()["duplicate"], "the newest are known"


def test_the_reaper_keeps_a_dead_batchs_file_until_it_is_old(bench: Bench, serve: Serve) -> None:
    service = serve()
    bench.begin()
    die(bench, service, "bad")
    old = {"orphan_age_seconds": 1e-9}
    reap(bench, **old)
    assert len(bench.spooled()) == 1
    reap(bench, dead_letter_seconds=3600.0, **old)
    assert len(bench.spooled()) == 1
    reap(bench, dead_letter_seconds=1e-3, **old)
    assert (bench.spooled(), check_ledger(bench)["dead_file_bytes"]) == ([], 0)
    assert [one["has_file"] for one in service.client.get(DEAD).json()["dead"]] == [False]


def test_a_file_that_was_given_up_cannot_be_put_back_though_it_is_still_there(bench: Bench, serve: Serve) -> None:
    """A reaper is paused between the two: what it deletes next must be nobody's."""
    service = serve()
    bench.begin()
    (batch_id,) = die(bench, service, "bad")
    (given_up,) = bench.queue.sweep_dead(older_than_seconds=3600.0, max_bytes=0)
    assert bench.spooled() == [given_up]
    assert service.client.post(f"{DEAD}/{batch_id}/retry").status_code == 410
    assert check_ledger(bench)["items"] == 0
    assert not service.client.get(DEAD).json()["dead"][0]["has_file"]
    reap(bench, orphan_age_seconds=1e-9)
    assert bench.spooled() == []


def test_the_file_and_whatever_changes_something_need_an_admin(bench: Bench, serve: Serve) -> None:
    service = serve(tokens="reader:read;sender:write;boss:admin")
    bench.begin()
    bench.post_file(dying(bench, "bad"))
    bench.drain(bench.worker())

    def ask(method: str, path: str, token: str) -> int:
        headers = {"Authorization": f"Bearer {token}"}
        return service.client.request(method, path, headers=headers).status_code

    (batch_id,) = bench.posted
    for token in ("reader", "sender"):
        assert ask("GET", DEAD, token) == 200
        assert ask("GET", f"{DEAD}/{batch_id}/file", token) == 403
        assert ask("GET", f"{DEAD}//{batch_id}/file", token) == 403
        assert ask("POST", f"{DEAD}/{batch_id}/retry", token) == 403
        assert ask("DELETE", f"{DEAD}/{batch_id}", token) == 403
    assert ask("GET", f"{DEAD}/{batch_id}/file", "boss") == 200
    assert ask("POST", f"{DEAD}/{batch_id}/retry", "boss") == 202


def test_a_full_queue_refuses_to_take_a_batch_back(bench: Bench, serve: Serve) -> None:
    service = serve(queue_max_items=1)
    bench.begin()
    (batch_id,) = die(bench, service, "bad")
    assert service.post(bench.world.rollout_file("good")).status_code == 202
    refused = service.client.post(f"{DEAD}/{batch_id}/retry")
    assert (refused.status_code, refused.json()["type"]) == (429, "urn:draftalign:queue-full")
    assert "is full: 1 of 1 batches (DRAFTALIGN_QUEUE_MAX_ITEMS)" in refused.json()["detail"]
    assert service.client.get(DEAD).json()["dead"][0]["has_file"]
    bench.drain(bench.worker(**LENIENT))
    assert service.client.post(f"{DEAD}/{batch_id}/retry").status_code == 202
    check_ledger(bench)


def test_many_who_put_it_back_at_once_put_it_back_once(bench: Bench, serve: Serve) -> None:
    service = serve()
    bench.begin()
    (batch_id,) = die(bench, service, "bad")
    answers: list[dict[str, Any]] = []
    ask = [
        threading.Thread(target=lambda: answers.append(httpx.post(f"{service.url}{DEAD}/{batch_id}/retry").json()))
        for _ in range(8)
    ]
    for thread in ask:
        thread.start()
    for thread in ask:
        thread.join(60)
    assert sorted(one["put_back"] for one in answers) == [False] * 7 + [True]
    assert check_ledger(bench)["items"] == 1


def test_a_file_that_is_deleted_while_it_is_asked_for_is_gone(
    bench: Bench, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = serve()
    bench.begin()
    (batch_id,) = die(bench, service, "bad")
    (kept,) = service.spooled()
    kept.unlink()
    monkeypatch.setattr(Path, "exists", lambda _: True)  # a moment ago it was
    assert service.client.get(f"{DEAD}/{batch_id}/file").status_code == 410


def test_the_command_lists_saves_puts_back_and_discards(bench: Bench, serve: Serve, tmp_path: Path) -> None:
    service = serve()
    bench.begin()
    kept, dropped = die(bench, service, "bad", "worse")

    def draftalign(*arguments: str) -> str:
        done = CliRunner().invoke(command_line, ["dead", "--service", service.url, *arguments])
        return done.output + ("" if done.exception is None else str(done.exception))

    listed = draftalign()
    assert kept in listed
    assert "log-probabilities disagree" in listed
    assert "2 dead batches" in listed
    draftalign("--save", kept, str(tmp_path / "kept.safetensors"))
    assert (tmp_path / "kept.safetensors").read_bytes() == dying(bench, "bad")
    assert "exists" in draftalign("--save", kept, str(tmp_path / "kept.safetensors"))
    assert "is discarded" in draftalign("--discard", dropped)
    assert "410" in draftalign("--retry", dropped)
    assert f"{kept} is queued\n" in draftalign("--retry", kept)
    assert f"{kept} is queued already" in draftalign("--retry", kept)
    assert ".." in draftalign("--discard", "..")
    assert service.client.get("/runs/default").status_code == 200
    assert "at a time" in draftalign("--retry", kept, "--discard", kept)
    assert "0 dead batches" in draftalign()


def test_a_worker_that_was_paused_leaves_a_batch_alone_that_was_put_back_meanwhile(
    bench: Bench, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would skip it as too old; meanwhile another worker took it, it died, and a person put it back."""
    service = serve()
    bench.begin()
    bench.post("newer", policy_version=9)
    paused = bench.worker(max_policy_lag=2, claim_tokens=10_000)
    (batch_id,) = (service.post(dying(bench, "bad")).json()["batch_id"],)
    ack = RolloutQueue.ack

    def meanwhile(self: RolloutQueue, entry: Entry, *rest: Any) -> bool:
        if entry.batch_id == batch_id:
            monkeypatch.setattr(RolloutQueue, "ack", ack)
            assert self.dead_letter(entry, "of another worker")
            assert service.client.post(f"{DEAD}/{batch_id}/retry").status_code == 202
        return ack(self, entry, *rest)

    monkeypatch.setattr(RolloutQueue, "ack", meanwhile)
    paused.cycle()
    assert bench.state(batch_id) == "queued"
    bench.drain(bench.worker(**LENIENT))
    assert bench.state(batch_id) == "trained"
    check_ledger(bench)


@pytest.mark.chaos
def test_an_api_that_is_killed_while_it_puts_batches_back_loses_none_and_queues_none_twice(
    bench: Bench, tmp_path: Path
) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    bench.begin()
    for number in range(24):
        bench.post_file(dying(bench, f"bad{number}", rollouts=1))
    worker = bench.worker()
    bench.drain(worker)
    assert {bench.state(batch_id) for batch_id in bench.posted} == {"dead"}
    answered: list[str] = []
    for _ in range(3):
        with service_process(bench, tmp_path / "api.log") as (process, url):
            killer = threading.Timer(rng.uniform(0.0, 0.15), process.kill)
            killer.start()
            try:
                for batch_id in bench.posted:
                    if httpx.post(f"{url}{DEAD}/{batch_id}/retry").json().get("put_back"):
                        answered.append(batch_id)
            except httpx.TransportError:
                pass
            killer.join()
        assert len(set(answered)) == len(answered), "one put back is said once"
        assert {bench.state(batch_id) for batch_id in answered} <= {"queued"}
        check_ledger(bench)
    with service_process(bench, tmp_path / "api.log") as (_, url):
        for batch_id in bench.posted:
            assert httpx.post(f"{url}{DEAD}/{batch_id}/retry").status_code in (200, 202)
    assert check_ledger(bench)["items"] == 24
    bench.drain(bench.worker(**LENIENT))
    assert {bench.state(batch_id) for batch_id in bench.posted} == {"trained"}
    counts = check_ledger(bench)
    assert (counts["acked_total"], counts["put_back_total"], counts["dead_total"]) == (24, 24, 24)
    assert sum(record.rollouts or 0 for record in bench.store.scores().values()) == 24
    assert bench.totals()["batches"] == 24


@contextmanager
def service_process(bench: Bench, log: Path) -> Iterator[tuple[Fork, str]]:
    """The API as a process of its own."""
    port = free_port()
    url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + 60
    with running_api(bench.settings.state_dir, bench.redis_url, port, log) as process:
        while True:
            try:
                if httpx.get(f"{url}/healthz").is_success:
                    break
            except httpx.TransportError:
                pass
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.02)
        yield process, url


# --- effect once per rollout ------------------------------------------------------------------------------------------


def regrouped(bench: Bench, *ids: str, version: int = 0, **options: Any) -> bytes:
    """A batch of these rollouts, whatever they hold."""
    name = "+".join(ids)
    return bench.world.rollout_file(name, policy_version=version, rollouts=len(ids), rollout_ids=list(ids), **options)


def remembered(bench: Bench) -> list[str]:
    """Ids of what the worker trains on again, as its successor reads them."""
    recent = bench.worker().learner.recent
    return sorted(i for kept in recent._kept.values() for i in kept.batch.rollout_ids)


def test_rollouts_that_come_again_in_other_groups_are_trained_on_once(bench: Bench, serve: Serve) -> None:
    service = serve()
    bench.begin()
    assert service.post(regrouped(bench, "a", "b", "c")).status_code == 202
    part = service.post(regrouped(bench, "c", "d", "a"))
    assert (part.status_code, part.json()["known_rollouts"]) == (202, 2)
    assert "(2 of 3)" in part.json()["warning"]
    whole = service.post(regrouped(bench, "d", "b", version=7))
    assert (whole.status_code, whole.json()["duplicate"], whole.json()["state"]) == (200, True, "queued")
    assert whole.json()["known_rollouts"] == 2
    again = service.post(regrouped(bench, "c", "d", "a"))
    assert (again.status_code, again.json()["known_rollouts"]) == (200, 2)
    assert len(service.spooled()) == 2
    bench.drain(bench.worker())
    scores = bench.store.scores()
    assert sorted(record.rollouts or 0 for record in scores.values()) == [1, 3]
    assert remembered(bench) == ["a", "b", "c", "d"]
    fate = service.client.get("/rollouts/d").json()
    assert (fate["state"], fate["known_rollouts"], fate["rollouts"]) == ("trained", 2, 3)
    late = service.post(regrouped(bench, "d", "a", "b", version=1))
    assert (late.status_code, late.json()["state"]) == (200, "trained")
    assert (check_ledger(bench)["accepted_total"], bench.totals()["batches"]) == (2, 2)


def test_a_known_rollout_is_left_out_again_when_its_batch_is_delivered_again(bench: Bench, serve: Serve) -> None:
    service = serve()
    bench.begin()
    service.post(regrouped(bench, "a", "b"))
    service.post(regrouped(bench, "b", "c"))
    worker = bench.worker(checkpoint_seconds=1e6)  # nothing is acknowledged: the next life does all of it again
    bench.drain(worker)
    assert check_ledger(bench)["items"] == 2
    bench.drain(bench.worker())
    assert remembered(bench) == ["a", "b", "c"]
    assert sum(record.rollouts or 0 for record in bench.store.scores().values()) == 3


def test_uploads_that_race_with_common_rollouts_share_them_out(bench: Bench, serve: Serve) -> None:
    service = serve()
    bench.begin()
    rng = random.Random(5)
    groups = [rng.sample("abcdefghijkl", 4) for _ in range(16)]
    files = [regrouped(bench, *group, lengths=[10] * 4) for group in groups]
    replies: list[dict[str, Any]] = []
    threads = [threading.Thread(target=lambda f=file: replies.append(service.post(f).json())) for file in files]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    new = sum(4 - one["known_rollouts"] for one in replies if not one["duplicate"])
    assert new == len(set().union(*groups))
    bench.drain(bench.worker(recent_tokens=10_000))
    assert remembered(bench) == sorted(set().union(*groups))
    assert bench.spooled() == []


def test_rollouts_of_a_dead_batch_may_come_in_another_and_are_left_out_when_it_is_put_back(
    bench: Bench, serve: Serve
) -> None:
    service = serve()
    bench.begin()
    part, whole = (
        service.post(regrouped(bench, *ids, change=shifted)).json()["batch_id"] for ids in (("a", "b"), ("c", "d"))
    )
    bench.drain(bench.worker())
    assert {bench.state(part), bench.state(whole)} == {"dead"}
    new = service.post(regrouped(bench, "d", "b", "c"))
    assert (new.status_code, new.json()["known_rollouts"]) == (202, 0)
    back = service.client.post(f"{DEAD}/{part}/retry")
    assert (back.status_code, back.json()["known_rollouts"]) == (202, 1)
    none = service.client.post(f"{DEAD}/{whole}/retry")
    assert (none.status_code, none.json()["state"], none.json()["put_back"]) == (200, "skipped", False)
    bench.drain(bench.worker(**LENIENT))
    assert remembered(bench) == ["a", "b", "c", "d"]
    assert bench.spooled() == []
    assert service.client.get(DEAD).json()["total"] == 0
    assert wire.batch_id("default", 0, ("d", "b", "c")) == service.client.get("/rollouts/d").json()["batch_id"]
