"""What one client may make the service keep, and how soon it learns that Redis hangs."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import redis.asyncio
from helpers.engine.agent_fixtures import eventually
from helpers.service.access_fixtures import RULES, TokenFile, request_of
from helpers.service.service_fixtures import (
    HEADERS,
    RunningService,
    f32,
    head_file,
    rollout_file,
    rollout_tensors,
    run_file,
)
from helpers.service.storage_fixtures import RolloutQueue
from helpers.service.valkey_fixtures import OwnValkey
from helpers.worker.record_fixtures import told
from pydantic import SecretStr
from redis import Redis

from rl_hooks import wire
from service.api.app import create_app
from service.api.context.context import RedisServer
from service.api.port.connections import Places
from service.api.rollouts import batches as rollouts_api
from service.monitor.events import Moved
from service.settings import Settings
from service.storage import ready
from service.storage.history import events
from service.storage.layout import Layout, locked
from service.storage.queue.keys import Keys
from service.storage.queue.rollout_queue import parts
from service.storage.ready import WriteTest
from service.storage.registry import Registry
from service.storage.reports.store import Store


def kind(reply: httpx.Response) -> str:
    return str(reply.json()["type"]).removeprefix("urn:draftalign:")


def test_a_file_of_too_many_rollouts_is_refused_before_it_is_queued(serve: Callable[..., RunningService]) -> None:
    service = serve(max_batch_rollouts=3)
    service.register()
    assert service.post(rollout_file(("a", "b", "c"))).status_code == 202
    reply = service.post(rollout_file(("d", "e", "f", "g")))
    assert (reply.status_code, kind(reply), reply.json()["field"]) == (422, "bad-file", "rollout_ids")
    assert "at most 3" in reply.json()["detail"]
    assert len(service.spooled()) == 1


def test_a_file_has_at_most_4096_rollouts_by_default(service: RunningService) -> None:
    """The script that queues them holds Redis for the time that these take, and no longer."""
    ids = tuple(str(i) for i in range(4096))
    assert service.post(rollout_file(ids, lengths=(2,) * 4096)).status_code == 202
    ids = (*ids, "one more")
    assert service.post(rollout_file(ids, lengths=(2,) * 4097)).status_code == 422


def test_a_file_of_too_many_tokens_is_refused_before_it_is_queued(serve: Callable[..., RunningService]) -> None:
    """A worker does not leave a batch half way: one of millions of tokens would hold all other runs up."""
    service = serve(max_batch_tokens=12)
    service.register()
    assert service.post(rollout_file(("a", "b"), lengths=(6, 6))).status_code == 202
    reply = service.post(rollout_file(("c", "d"), lengths=(6, 7)))
    assert (reply.status_code, kind(reply), reply.json()["field"]) == (422, "bad-file", "input_ids")
    assert "at most 12" in reply.json()["detail"]
    assert len(service.spooled()) == 1


def test_a_rollout_that_is_too_long_is_refused_before_it_is_queued(serve: Callable[..., RunningService]) -> None:
    """Training and scoring take time by the square of its length."""
    service = serve(max_rollout_tokens=6)
    service.register()
    assert service.post(rollout_file(("a", "b"), lengths=(6, 6))).status_code == 202
    reply = service.post(rollout_file(("c", "d"), lengths=(7, 2)))
    assert (reply.status_code, kind(reply), reply.json()["field"]) == (422, "bad-file", "cu_seqlens")
    assert "a rollout of 7 tokens; at most 6 (`max_rollout_tokens`)" in reply.json()["detail"]
    assert len(service.spooled()) == 1


def test_so_many_rollouts_wait_in_the_queue_and_room_comes_back_as_they_end(
    serve: Callable[..., RunningService], redis_client: Redis
) -> None:
    """Redis has a key for each: what waits must not fill it for other runs."""
    service = serve(max_batch_rollouts=3, queue_max_rollouts=5)
    service.register()
    assert service.post(rollout_file(("a", "b", "c"))).status_code == 202
    reply = service.post(rollout_file(("d", "e", "f")))
    assert (reply.status_code, kind(reply)) == (429, "queue-full")
    assert "is full: 3 of 5 rollouts (DRAFTALIGN_QUEUE_MAX_ROLLOUTS)" in reply.json()["detail"]
    assert service.post(rollout_file(("d", "e"))).status_code == 202
    early = service.client.post("/rollouts?run=default", content=b"no rollout file", headers=HEADERS)
    assert (early.status_code, kind(early)) == (429, "queue-full"), "before the body is read"
    queue = RolloutQueue(redis_client, "default")
    for entry in queue.claim("worker", 1000, 0.0):
        assert queue.ack(entry, "trained")
    assert service.post(rollout_file(("f", "g", "h"))).status_code == 202
    assert parts(redis_client.get(Keys("default").held))["rollouts"] == "3"


def test_rows_that_are_shared_stand_for_no_more_bytes_than_a_file_may_have(
    serve: Callable[..., RunningService],
) -> None:
    """Else a file of some megabytes would be gigabytes of features to whoever reads it."""
    service = serve(max_body_bytes=100_000)
    service.register()

    def shared(tokens: int) -> bytes:
        row = wire.Tensor.of(np.zeros((1, 24), np.uint16), "BF16")
        tensors = rollout_tensors((tokens,))
        mask = np.zeros(tokens, np.uint8)
        mask[-1] = 1
        last = wire.Tensor.of(np.zeros((1, 8), np.uint16), "BF16")
        few = {"last_hidden": last, "logsumexp": f32(1), "loss_mask": wire.Tensor.of(mask, "U8")}
        rows = {"aux_hidden": row, "aux_rows": wire.Tensor.of(np.zeros(tokens, np.int32), "I32")}
        return rollout_file((str(tokens),), lengths=(tokens,), tensors=tensors | few | rows, last_rows="predicting")

    assert service.post(shared(2000)).status_code == 202
    reply = service.post(shared(2100))
    assert (reply.status_code, reply.json()["field"]) == (422, "aux_rows")
    assert "at most 100000 (`max_body_bytes`), send several files" in reply.json()["detail"]


def test_there_may_be_so_many_runs_and_one_that_exists_is_always_taken(serve: Callable[..., RunningService]) -> None:
    service = serve(max_runs=2)
    assert [service.register(run).status_code for run in ("a", "b")] == [201, 201]
    reply = service.register("c")
    assert (reply.status_code, kind(reply)) == (403, "too-many-runs")
    assert "DRAFTALIGN_MAX_RUNS" in reply.json()["detail"]
    assert "retry-after" not in reply.headers, "a person has to make room"
    assert service.register("a").status_code == 200
    service.client.delete("/runs/b").raise_for_status()
    assert service.register("c").status_code == 201


def test_a_token_of_some_runs_leaves_room_for_the_runs_of_the_others(
    serve: Callable[..., RunningService], tmp_path: Path
) -> None:
    tokens = TokenFile(tmp_path / "tokens")
    tokens.add("math", "write", ("math-*",))
    tokens.add("math-too", "write", ("math-*",))  # the same runs: no further share
    tokens.add("chess", "write", ("chess-*",))
    tokens.add("all", "write")
    service = serve(max_runs=6, token_file=tokens.path)

    def put(token: str, run: str) -> httpx.Response:
        return service.client.put(f"/runs/{run}", content=run_file(), headers=HEADERS | tokens.headers(token))

    assert [put("math", f"math-{n}").status_code for n in range(2)] == [201, 201]
    for token in ("math", "math-too"):
        reply = put(token, "math-2")
        assert (reply.status_code, kind(reply)) == (403, "too-many-runs")
        assert f"2 runs that token '{token}' is for" in reply.json()["detail"]
        assert "retry-after" not in reply.headers
    assert put("math", "math-0").status_code == 200, "a run that exists is always taken"
    assert [put("chess", f"chess-{n}").status_code for n in range(3)] == [201, 201, 403]
    assert [put("all", f"other-{n}").status_code for n in range(3)] == [201, 201, 403]


def heads(service: RunningService) -> list[int]:
    """Policy versions whose heads are kept; each has the sum of its bytes beside it, and no other is there."""
    paths = list(service.layout.heads("default").iterdir())
    kept, sums = (sorted(int(p.stem) for p in paths if p.suffix == end) for end in (".safetensors", ".crc32"))
    assert kept == sums
    return kept


def put_head(service: RunningService, version: int) -> httpx.Response:
    return service.client.put("/runs/default/head", content=head_file(version), headers=HEADERS)


def test_returns_that_a_head_claims_are_bounded_and_of_its_run_only(
    service: RunningService, redis_client: Redis
) -> None:
    """A head may say that its trainer went back: as often as it likes, and anything but 1 says nothing."""
    service.register()
    service.register("other")

    def says(what: str) -> int:
        body = head_file(1, metadata={"went_back": what})
        return service.client.put("/runs/default/head", content=body, headers=HEADERS).status_code

    assert {says(what) for what in ("0", "", "yes", "true", "1 ", "\x00", "9" * 500)} == {201}
    assert Store(redis_client, "default").returns() == []
    assert {says("1") for _ in range(80)} == {201}
    assert len(Store(redis_client, "default").returns()) == 64
    assert Store(redis_client, "other").returns() == []


def test_heads_that_come_without_rollouts_are_bounded(serve: Callable[..., RunningService]) -> None:
    """No batch has come that could need them; the newest stay for batches that are on their way."""
    service = serve(max_heads=8)
    service.register()
    assert {put_head(service, version).status_code for version in range(1, 41)} == {201}
    assert len(heads(service)) <= 8
    assert set(heads(service)) >= set(range(37, 41))


def test_heads_of_a_run_whose_lock_a_stopped_process_keeps_hold_up_no_other_run(service: RunningService) -> None:
    """They wait, and take no more than one of the threads that wait for locks."""
    service.register()
    service.register("other")
    with ThreadPoolExecutor(8) as pool:
        with locked(service.layout, "default"):
            waiting = [pool.submit(put_head, service, version) for version in range(1, 9)]
            service.wait_for_requests(8)
            body = head_file(1)
            assert service.client.put("/runs/other/head", content=body, headers=HEADERS).status_code == 201
            assert not any(one.done() for one in waiting)
        assert {one.result().status_code for one in waiting} == {201}


def test_heads_that_queued_batches_need_stay_and_the_next_waits_until_the_worker_has_caught_up(
    serve: Callable[..., RunningService],
) -> None:
    service = serve(max_heads=4)
    service.register()
    for version in range(1, 5):
        assert put_head(service, version).status_code == 201
        assert service.post(rollout_file((f"r{version}", f"s{version}"), policy_version=version)).status_code == 202
    reply = put_head(service, 5)
    assert (reply.status_code, kind(reply)) == (429, "too-many-heads")
    assert reply.headers["retry-after"]
    assert heads(service) == [1, 2, 3, 4]
    assert put_head(service, 4).status_code == 201, "the same head again takes no more room"


def report(version: str, **changes: Any) -> dict[str, Any]:
    counts = {"rounds": 600, "accepted_tokens": 900, "drafted_tokens": 2400}
    return {"reporter": "engine", "drafter_version": version} | counts | changes


def test_of_a_canary_only_what_is_known_is_kept(service: RunningService) -> None:
    manifest = service.publish()
    figures = {"alpha": 2.0, "previous_alpha": 2.5, "rounds": 500, "previous_rounds": 600}
    canary = {"version": manifest.version, "previous": "", "outcome": "passed", "sequence": 1} | figures
    body = report(manifest.version, canary=canary | {f"x{i}": "y" * 1000 for i in range(50)})
    service.client.post("/acceptance", json=body).raise_for_status()
    assert told(service.registry)[-1]["canary"] == canary
    assert service.layout.history("default").stat().st_size < 2000


@pytest.mark.parametrize("change", [{"version": "v000009-00000000"}, {"sequence": 2}, {"version": "made up"}])
def test_a_canary_of_what_was_never_offered_is_refused(service: RunningService, change: dict[str, Any]) -> None:
    manifest = service.publish()
    canary = {"version": manifest.version, "previous": "", "outcome": "passed", "sequence": 1} | change
    reply = service.client.post("/acceptance", json=report(manifest.version, canary=canary))
    assert (reply.status_code, kind(reply), reply.json()["field"]) == (422, "bad-canary", "canary")
    assert len(told(service.registry)) == 1


def test_more_accepted_tokens_than_rounds_can_bring_are_refused(service: RunningService) -> None:
    manifest = service.publish()
    lie = report(manifest.version, rounds=1, accepted_tokens=10**9, drafted_tokens=10**9)
    reply = service.client.post("/acceptance", json=lie)
    assert (reply.status_code, kind(reply)) == (422, "bad-body")
    assert "at most 64 a round" in reply.json()["detail"]


def test_the_history_has_a_bound_and_its_digest_goes_on_over_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "_HISTORY_BYTES", 2000)
    layout = Layout(tmp_path)
    layout.make_run("r")
    followed, found = Registry(layout), 0
    for number in range(200):
        event = Moved(time=float(number), version=f"v{number}")
        Registry(layout).history.record("r", event)
        if number % 7 == 0:
            found = followed.history.digest("r").published
            assert found == number + 1, "each line is read once, also over a piece's end"
    pieces = list((tmp_path / "runs/r").glob("history*.jsonl"))
    assert len(pieces) == 2
    assert sum(path.stat().st_size for path in pieces) < 2 * 2000 + 200
    versions = [event["version"] for event in told(followed, "r")]
    assert versions == [f"v{i}" for i in range(200 - len(versions), 200)], "the newest, without a gap"
    assert len(versions) > 20
    assert Registry(layout).history.digest("r").published == 200, (
        "what was published is counted, whatever of it was deleted"
    )


def test_a_report_token_cannot_make_a_run_forget(
    serve: Callable[..., RunningService], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever may report may report verdicts: they push out one another, and no publish, no hold, nothing sent."""
    monkeypatch.setattr(events, "_HISTORY_BYTES", 4000)
    monkeypatch.setattr(events, "_VERDICT_BYTES", 4000)
    service = serve(tokens="engine:report;boss:admin")
    headers = {name: {"Authorization": f"Bearer {name}"} for name in ("engine", "boss")}
    service.client.put("/runs/default", content=run_file(), headers=HEADERS | headers["boss"]).raise_for_status()
    manifest = service.publish()
    sent = service.registry.stage("default")
    (sent / "model.safetensors").write_bytes(b"sent")
    facts: dict[str, Any] = {"like": manifest, "reason": "from the lab", "by": "ada", "most_waiting": 4}
    waiting, _ = service.registry.archive("default", sent, **facts)
    service.registry.hold("default", manifest.version, "under test")
    moves = service.layout.history("default").read_bytes()
    canary = {"version": manifest.version, "previous": "", "outcome": "passed", "sequence": 1}
    for number in range(60):
        body = report(manifest.version, reporter=f"engine {number}", canary=canary)
        service.client.post("/acceptance", json=body, headers=headers["engine"]).raise_for_status()
    assert service.layout.history("default").read_bytes() == moves
    hold = f"/drafter/{manifest.version}/hold?run=default"
    service.client.put(hold, json={"reason": "longer"}, headers=headers["boss"]).raise_for_status()
    listing = service.client.get("/drafters", headers=headers["boss"]).json()
    assert listing["waiting"] == [waiting.version]
    kinds = Counter(event["event"] for event in listing["history"])
    assert (kinds["published"], kinds["sent"], kinds["held"]) == (1, 1, 2), "and no false one"
    assert 5 < kinds["canary_passed"] < 40, "the newest verdicts are there"
    times = [event["time"] for event in listing["history"]]
    assert times == sorted(times), "verdicts stand among the moves"


def test_a_history_from_a_backup_is_read_from_its_beginning(tmp_path: Path) -> None:
    layout = Layout(tmp_path)
    layout.make_run("r")
    followed = Registry(layout)
    for _ in range(3):
        followed.history.record("r", Moved())
    assert followed.history.digest("r").published == 3
    backup = tmp_path / "backup"
    backup.write_text(json.dumps({"event": "published"}) + "\n")
    backup.replace(layout.history("r"))
    assert followed.history.digest("r").published == 1


#: Calls that read and write files alone. Every other call must say within two seconds that Redis hangs.
WITHOUT_REDIS = {
    *(("GET", path) for path in ("/", "/docs", "/openapi.json", "/healthz")),
    *(("GET", path) for path in ("/drafter/latest", "/drafter/{version}/{file}", "/drafters")),
    ("POST", "/drafter/{version}/rollback"),
    *((method, "/drafter/{version}/hold") for method in ("PUT", "DELETE")),
    ("POST", "/drafters"),
    ("POST", "/rollouts/direct"),  # 404 at once: no object store is set here; test_api_direct.py has one
}


def quickest_of_four(ask: Callable[[], float], within: float = 2.0) -> float:
    """A loaded machine is late itself now and then; a call that waits too long always is."""
    seconds = ask()
    for _ in range(3):
        if seconds >= within:
            seconds = min(seconds, ask())
    return seconds


def test_every_call_learns_within_two_seconds_that_redis_hangs(
    own_valkey: OwnValkey, serve: Callable[..., RunningService]
) -> None:
    service = serve(redis_url=own_valkey.url)
    for run in ("default", "other"):
        service.register(run).raise_for_status()
    service.publish()
    pid = own_valkey.process.pid

    def asked(rule: tuple[str, str]) -> tuple[float, httpx.Response]:
        call = request_of(service, *rule, "default")
        began = time.monotonic()
        reply = service.client.request(**call)
        return time.monotonic() - began, reply

    os.kill(pid, signal.SIGSTOP)
    try:
        with ThreadPoolExecutor(4) as callers:
            answers = dict(zip(RULES, callers.map(asked, RULES), strict=True))
            for _ in range(3):  # a loaded machine is late itself now and then; a call that waits too long always is
                late = [rule for rule, (seconds, _) in answers.items() if seconds >= 2.0]
                answers |= dict(zip(late, callers.map(asked, late), strict=True))
    finally:
        os.kill(pid, signal.SIGCONT)
    assert not {rule: seconds for rule, (seconds, _) in answers.items() if seconds >= 2.0}
    away = {rule: reply for rule, (_, reply) in answers.items() if rule not in WITHOUT_REDIS}
    assert {rule for rule, reply in away.items() if reply.status_code != 503} == set()
    assert {kind(reply) for reply in away.values()} == {"redis-away"}
    assert all(reply.headers["retry-after"] for reply in away.values())
    assert [rule for rule in WITHOUT_REDIS if answers[rule][1].status_code >= 500] == []
    assert service.post(rollout_file()).status_code == 202


@pytest.mark.parametrize("route", ["rollouts", "run", "new run", "head"])
def test_a_redis_that_hangs_while_a_file_comes_is_named_within_two_seconds_of_its_end(
    own_valkey: OwnValkey, serve: Callable[..., RunningService], route: str
) -> None:
    """Rollouts may be queued all the same when Redis goes on: sent again they are queued once."""
    service = serve(redis_url=own_valkey.url)
    service.register().raise_for_status()
    pid = own_valkey.process.pid
    method, path, body = {
        "rollouts": ("POST", "/rollouts?run=default", rollout_file()),
        "run": ("PUT", "/runs/default", run_file()),
        "new run": ("PUT", "/runs/new", run_file()),
        "head": ("PUT", "/runs/default/head", head_file(3)),
    }[route]
    ended = list[float]()

    def parts() -> Iterator[bytes]:
        yield body[:-100]
        time.sleep(0.3)  # the header is checked by then
        os.kill(pid, signal.SIGSTOP)
        yield body[-100:]
        ended.append(time.monotonic())

    details = list[str]()

    def asked() -> float:
        """Seconds from the body's end to the answer, which is checked."""
        try:
            headers = HEADERS | {"Content-Length": str(len(body))}
            reply = service.client.request(method, path, content=parts(), headers=headers)
            took = time.monotonic() - ended[-1]
        finally:
            os.kill(pid, signal.SIGCONT)
        assert (reply.status_code, kind(reply)) == (503, "redis-away")
        assert reply.headers["retry-after"]
        details.append(reply.json()["detail"])
        return took

    assert quickest_of_four(asked) < 2.0
    again = service.client.request(method, path, content=body, headers=HEADERS)
    assert again.status_code in (200, 201, 202)
    if route == "rollouts":
        assert "send it again" in details[-1]
        eventually(lambda: len(service.spooled()) == 1)  # whichever of the two is queued
        assert Redis.from_url(own_valkey.url).xlen(Keys("default").queue) == 1


def test_more_requests_than_100_may_ask_redis_at_once(tmp_path: Path) -> None:
    """Beyond 100 redis-py raises at once by itself, and the API would say that Redis does not answer."""
    app = create_app(Settings(state_dir=tmp_path, redis_url=SecretStr("redis://127.0.0.1:1")))
    pool = app.state.context.redis.client.connection_pool
    for _ in range(Places().to_redis):  # none of them is opened
        pool.get_available_connection()
    app.state.context.close()


def test_a_stall_of_the_api_itself_is_not_blamed_on_redis(
    service: RunningService, monkeypatch: pytest.MonkeyPatch
) -> None:
    finish = rollouts_api._finish_enqueue

    async def stalled(*arguments: Any) -> Any:
        time.sleep(1.7)  # noqa: ASYNC251 - nothing of this process goes on
        return await finish(*arguments)

    monkeypatch.setattr(rollouts_api, "_finish_enqueue", stalled)
    assert service.post(rollout_file()).status_code == 202


def test_asking_without_end_whether_it_is_ready_makes_redis_write_once_a_second(
    own_valkey: OwnValkey, serve: Callable[..., RunningService]
) -> None:
    service = serve(redis_url=own_valkey.url)

    def ask(command: str) -> tuple[set[int], int, float]:
        """Status codes of 300 calls from eight callers side by side, writes that they caused, and seconds."""
        client.config_resetstat()
        began = time.monotonic()
        with ThreadPoolExecutor(8) as callers:
            answers = list(callers.map(service.client.get, ["/readyz"] * 300))
        seconds = time.monotonic() - began
        counted = client.info("commandstats").get(f"cmdstat_{command}")  # Redis names no command that it did not run
        return {reply.status_code for reply in answers}, 0 if counted is None else counted["calls"], seconds

    with Redis.from_url(own_valkey.url) as client:
        time.sleep(1.1)  # what was written before is no longer remembered
        answers, writes, seconds = ask("mset")
        assert answers == {200}
        assert 1 <= writes <= 1 + seconds
        time.sleep(1.1)
        assert ask("mset")[1] >= 1, "it is not remembered for longer"
        client.execute_command("REPLICAOF", "127.0.0.1", "1")
        eventually(lambda: service.client.get("/readyz").status_code == 503)
        time.sleep(1.1)
        answers, writes, seconds = ask("eval")
        assert answers == {503}
        assert 1 <= writes <= 1 + seconds, "a refusal is remembered too"


def test_all_who_ask_whether_it_is_ready_learn_at_once_that_redis_hangs(
    own_valkey: OwnValkey, serve: Callable[..., RunningService]
) -> None:
    service = serve(redis_url=own_valkey.url)
    pid = own_valkey.process.pid

    def asked() -> float:
        with ThreadPoolExecutor(16) as callers:
            began = time.monotonic()
            replies = list(callers.map(service.client.get, ["/readyz"] * 16))
        assert {reply.status_code for reply in replies} == {503}
        return time.monotonic() - began

    os.kill(pid, signal.SIGSTOP)
    try:
        assert quickest_of_four(asked, within=2.9) < 2.9  # 1.5; two tests one after the other take 3
    finally:
        os.kill(pid, signal.SIGCONT)
    eventually(lambda: service.client.get("/readyz").status_code == 200)


def test_who_leaves_before_the_test_write_has_ended_takes_nobodys_answer_along(own_valkey: OwnValkey) -> None:
    async def ask() -> list[object]:
        async with redis.asyncio.Redis.from_url(own_valkey.url) as client:
            test = WriteTest(client)
            asked = [asyncio.create_task(test.check()) for _ in range(2)]
            await asyncio.sleep(0)
            asked[0].cancel()
            return await asyncio.gather(*asked, return_exceptions=True)

    left, told = asyncio.run(ask())
    assert isinstance(left, asyncio.CancelledError)
    assert told is None


def test_a_pause_of_this_process_is_not_taken_for_one_of_redis(
    own_valkey: OwnValkey, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ready, "PROBE_SECONDS", 1.0)

    async def ask() -> None:
        async with redis.asyncio.Redis.from_url(own_valkey.url) as client:
            server = RedisServer(client)
            await server.check()  # it is connected
            for check in (server.check, server.writes.check):
                own_valkey.process.send_signal(signal.SIGSTOP)
                try:
                    asked = asyncio.create_task(check())
                    await asyncio.sleep(0.1)  # the question is on its way
                finally:
                    own_valkey.process.send_signal(signal.SIGCONT)
                time.sleep(2 * ready.PROBE_SECONDS)  # noqa: ASYNC251 - meanwhile the answer comes
                await asked

    asyncio.run(ask())


def test_an_upload_that_breaks_off_leaves_nothing_and_no_traceback(
    service: RunningService, caplog: pytest.LogCaptureFixture
) -> None:
    body = rollout_file()
    head = f"POST /rollouts HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: {HEADERS['Content-Type']}\r\n"
    for cut in (0, 4, 100, len(body) - 1):
        with socket.create_connection(("127.0.0.1", service.port), timeout=60) as connection:
            connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body[:cut])
            service.wait_for_requests()
    service.client.close()
    service.wait_for_no_connections()
    service.client = httpx.Client(base_url=service.url)
    assert service.spooled() == []
    assert [record.getMessage() for record in caplog.records if record.levelname in ("ERROR", "WARNING")] == []
