"""PUT and GET /runs/{run}, and PUT /runs/{run}/head."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis.asyncio
from attacks.runs import SIZES, drafter_tensors
from helpers.service.service_fixtures import (
    CONFIG,
    FINGERPRINT,
    HEADERS,
    HIDDEN,
    LAYERS,
    VOCAB,
    RunningService,
    f32,
    head_file,
    i32,
    rollout_file,
    run_file,
)
from redis import Redis

from drafter.files.checkpoint import export_config
from rl_hooks import wire
from service.api.context.context import ServiceContext
from service.storage.layout import Layout
from service.storage.queue.keys import Keys
from service.storage.queue.lease import Leases
from service.storage.reports.store import AsyncStore
from service.storage.runs import delete_run, sweep_deleted, withdraw_run
from service.storage.spool import Upload


def test_a_run_is_created_once_and_described(bare: RunningService, redis_client: Redis) -> None:
    body = run_file()
    created = bare.client.put("/runs/exp-1.a_B", content=body, headers=HEADERS)
    assert created.status_code == 201
    document = bare.client.get("/runs/exp-1.a_B").json()
    assert document == created.json()
    assert document["target_fingerprint"] == FINGERPRINT
    assert (document["vocab_size"], document["hidden_size"], document["aux_layers"]) == (VOCAB, HIDDEN, list(LAYERS))
    assert (document["drafter"], document["reference_version"], document["latest_head"]) == (None, None, None)
    assert bare.layout.target("exp-1.a_B").read_bytes() == body
    assert bare.client.put("/runs/exp-1.a_B", content=body, headers=HEADERS).status_code == 200
    assert bare.layout.run_names() == ["exp-1.a_B"]
    assert bare.spooled() == []
    assert redis_client.smembers(Keys.RUNS) == {b"exp-1.a_B"}


def test_runs_are_not_listed_on_the_event_loop(bare: RunningService, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a network file system a listing takes long, and nothing else would be answered meanwhile."""
    threads, list_runs = set[threading.Thread](), Layout.run_names

    def noted(layout: Layout) -> list[str]:
        threads.add(threading.current_thread())
        return list_runs(layout)

    monkeypatch.setattr(Layout, "run_names", noted)
    bare.register().raise_for_status()
    for path in ("/runs", "/metrics"):
        bare.client.get(path).raise_for_status()
    asyncio.run_coroutine_threadsafe(
        bare.server.config.app.state.context.reap(),  # type: ignore[union-attr]
        bare.server.servers[0].get_loop(),
    ).result(60)
    assert threads
    assert bare._thread not in threads


def test_another_target_under_the_same_name_is_a_conflict(service: RunningService) -> None:
    other = CONFIG | {"num_hidden_layers": 12, "intermediate_size": 99}
    reply = service.register(config=other)
    assert reply.status_code == 409
    detail = reply.json()["detail"]
    assert "This one has num_hidden_layers 12 (the run's: 8). Use another run name" in detail
    assert service.client.get("/runs/default").json()["target_fingerprint"] == FINGERPRINT


def test_a_run_may_bring_its_drafter_and_tie_its_embeddings(bare: RunningService) -> None:
    meta = {"drafter_config": json.dumps(export_config(SIZES)), "draft_vocab_size": "20"}
    assert bare.register(tensors=drafter_tensors(), metadata=meta).status_code == 201
    document = bare.client.get("/runs/default").json()
    assert document["draft_vocab_size"] == 20
    tied = wire.encode({"embed_tokens": f32(VOCAB, HIDDEN)}, wire.parse_header(run_file()).metadata)
    content = b"".join(bytes(part) for part in tied)
    assert bare.client.put("/runs/tied", content=content, headers=HEADERS).status_code == 201


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"metadata": {"format": "draftalign.run.v9"}}, "format"),
        ({"metadata": {"config": "[]"}}, "config"),
        ({"metadata": {"config": "{"}}, "config"),
        ({"metadata": {"config": '{"hidden_size": 1e9}'}}, "config"),
        ({"metadata": {"aux_layers": json.dumps({"convention": "leaving", "layers": [1]})}}, "aux_layers"),
        ({"metadata": {"aux_layers": json.dumps({"convention": "entering", "layers": [3, 2]})}}, "aux_layers"),
        ({"metadata": {"aux_layers": json.dumps({"convention": "entering", "layers": [99]})}}, "aux_layers"),
        ({"metadata": {"target_fingerprint": "0" * 32}}, "target_fingerprint"),
        ({"metadata": {"policy_version": "-1"}}, "policy_version"),
        ({"metadata": {"policy_version": "NaN"}}, "policy_version"),
        ({"metadata": {"draft_vocab_size": "51"}}, "draft_vocab_size"),
        ({"metadata": {"drafter_config": "{}"}}, "drafter_config"),
        ({"tensors": {"drafter.fc.weight": f32(1)}}, "drafter_config"),
        ({"tensors": {"lm_head": f32(VOCAB, HIDDEN + 1)}}, "lm_head"),
        ({"tensors": {"lm_head": i32(1, 2)}}, "lm_head"),
        ({"tensors": {"surprise": f32(1)}}, "surprise"),
    ],
)
def test_a_bad_run_is_refused_by_the_name_of_its_fault(bare: RunningService, changes: Any, field: str) -> None:
    reply = bare.register(**changes)
    assert reply.status_code == 422
    assert reply.json()["field"] == field
    assert bare.spooled() == []
    assert bare.layout.run_names() == []


@pytest.mark.parametrize("name", ["..%2fx", "%2e%2e", "a%2fb", ".x", "a" * 65, "a%0a", "{x}", "a b", "%00"])
def test_a_run_name_cannot_leave_its_directory(bare: RunningService, name: str) -> None:
    assert bare.client.put(f"/runs/{name}", content=run_file(), headers=HEADERS).status_code in (404, 405, 422)
    assert not bare.layout.runs.exists() or bare.layout.run_names() == []


def test_an_unknown_run_is_a_404_everywhere(service: RunningService) -> None:
    client = service.client
    assert client.get("/runs/other").status_code == 404
    assert client.put("/runs/other/head", content=head_file(1), headers=HEADERS).status_code == 404
    assert service.post(rollout_file(), "other").status_code == 404
    assert service.post(rollout_file(run="other")).status_code == 404
    for path in ("/drafter/latest", "/drafters", "/alpha", "/rollouts/a", "/drafter/v000001-00000000/config.json"):
        reply = client.get(path, params={"run": "other"})
        assert (reply.status_code, reply.json()["type"]) == (404, "urn:draftalign:no-such-run"), path
    assert service.spooled() == []


def test_a_head_is_kept_by_policy_version_and_the_last_is_remembered(service: RunningService) -> None:
    full, older = head_file(7), head_file(5)
    reply = service.client.put("/runs/default/head", content=full, headers=HEADERS)
    assert (reply.status_code, reply.json()) == (201, {"run": "default", "policy_version": 7, "latest_head": 7})
    late = service.client.put("/runs/default/head", content=older, headers=HEADERS)
    assert late.json()["latest_head"] == 5, "a trainer went back, or the one before was nonsense"
    assert service.layout.head("default", 7).read_bytes() == full
    assert service.layout.head("default", 5).read_bytes() == older
    assert service.client.get("/runs/default").json()["latest_head"] == 5


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (head_file(1, ids=range(VOCAB)), "ids"),
        (head_file(1, ids=[3, 1, 49]), "ids"),
        (head_file(1, rows=3), "lm_head"),
        (head_file(1, metadata={"policy_version": "1e3"}), "policy_version"),
        (head_file(1, metadata={"format": "x"}), "format"),
        (run_file(), "format"),
    ],
)
def test_a_bad_head_is_refused(service: RunningService, body: bytes, field: str) -> None:
    reply = service.client.put("/runs/default/head", content=body, headers=HEADERS)
    assert (reply.status_code, reply.json()["field"]) == (422, field)
    assert list(service.layout.heads("default").iterdir()) == []
    assert service.spooled() == []


def test_a_config_without_the_sizes_of_a_drafter_from_scratch_is_refused(bare: RunningService) -> None:
    answer = bare.register(config={k: v for k, v in CONFIG.items() if k != "intermediate_size"})
    assert answer.status_code == 422
    assert "the target's config lacks intermediate_size" in answer.json()["detail"]


def test_a_new_run_does_not_inherit_what_an_old_one_of_its_name_left_in_redis(
    bare: RunningService, redis_client: Redis
) -> None:
    for part in ("scores", "acceptance", "latest_head"):
        redis_client.set(f"da:{{default}}:{part}-stale", "old")
    redis_client.hset("da:{default}:scores", "0" * 32, '{"policy_version": 7}')
    redis_client.set("da:{defaults}:latest_head", "5")
    assert bare.register().status_code == 201
    assert bare.client.get("/alpha", params={"run": "default"}).json()["points"] == []
    assert redis_client.get("da:{defaults}:latest_head") is not None, "another run was touched"


def test_a_registration_that_comes_late_deletes_nothing_of_the_run(
    bare: RunningService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trainer that lost patience, or two ranks: the one in the middle of forgetting an older run meets the other."""
    monkeypatch.setattr("service.storage.layout.LOCK_SECONDS", 0.1)
    forget, asleep, wake = AsyncStore.forget, threading.Event(), threading.Event()

    async def slow(self: AsyncStore, fence: int | None = None) -> int | None:
        if not asleep.is_set():
            asleep.set()
            await asyncio.to_thread(wake.wait, 20)
        return await forget(self, fence)

    monkeypatch.setattr(AsyncStore, "forget", slow)
    with ThreadPoolExecutor() as threads, httpx.Client(base_url=bare.url, timeout=60) as second:
        late = threads.submit(bare.register)
        assert asleep.wait(60)
        other = second.put("/runs/default", content=run_file(), headers=HEADERS)
        rollouts = second.post("/rollouts", content=rollout_file(), headers=HEADERS)
        wake.set()
        assert late.result(60).status_code == 201
        assert (other.status_code, rollouts.status_code) == (503, 404), "whose run would have been another's"
        assert "registry-busy" in other.json()["type"]
        assert second.put("/runs/default", content=run_file(), headers=HEADERS).status_code == 200
        assert second.post("/rollouts", content=rollout_file(), headers=HEADERS).status_code == 202


def test_runs_are_listed_with_what_they_serve_and_how_they_are(service: RunningService) -> None:
    service.register("other")
    version = service.publish().version
    found = service.client.get("/runs").json()["runs"]
    assert [(one["run"], one["drafter"]) for one in found] == [("default", version), ("other", None)]
    assert all(one["headline"]["text"] for one in found)


def files_of(service: RunningService, run: str) -> list[Path]:
    return [p for top in (service.layout.run(run), service.layout.spool(run)) for p in top.rglob("*")]


def test_a_deleted_run_is_gone_from_everywhere_and_its_name_is_free(
    service: RunningService, redis_client: Redis
) -> None:
    service.register("other")
    service.publish()
    assert service.post(rollout_file()).status_code == 202
    assert service.client.delete("/runs/default").status_code == 204
    assert files_of(service, "default") == []
    assert [key for key in redis_client.keys() if b"{default}" in key] == []  # noqa: SIM118 - the command of that name
    assert service.post(rollout_file()).status_code == 404
    assert service.client.get("/drafter/latest").status_code == 404
    assert [one["run"] for one in service.client.get("/runs").json()["runs"]] == ["other"]
    assert 'run="default"' not in service.client.get("/metrics").text
    assert service.client.delete("/runs/default").status_code == 404
    assert service.register().status_code == 201
    assert service.client.get("/runs/default").json()["drafter"] is None
    assert service.post(rollout_file()).status_code == 202


def test_a_run_of_another_state_that_is_worked_on_in_the_same_redis_keeps_its_queue(
    serve: Callable[..., RunningService], redis_client: Redis, tmp_path: Path
) -> None:
    first, second = serve(), serve(state_dir=tmp_path / "another")
    assert first.register().status_code == 201
    assert first.post(rollout_file()).status_code == 202
    leases = Leases(redis_client)
    assert leases.hold("default")
    # By its length alone: a hook that waits for "100 Continue" sends gigabytes to nobody.
    refused = second.client.put("/runs/default", content=b"no registration", headers=HEADERS)
    assert (refused.status_code, refused.json()["type"]) == (503, "urn:draftalign:run-of-another-state")
    assert second.register().status_code == 503
    assert second.client.get("/runs").json()["runs"] == []
    assert first.client.get("/runs/default").json()["rollouts"]["waiting"] == 1
    leases.give_back("default")
    assert second.register().status_code == 201, "a state that was lost may begin again"


def test_a_run_at_work_is_unregistered_at_once_and_deleted_when_its_worker_has_let_go(
    service: RunningService, redis_client: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("service.api.runs._LET_GO_SECONDS", 0.3)
    leases = Leases(redis_client)
    assert leases.hold("default")
    reply = service.client.delete("/runs/default")
    assert (reply.status_code, reply.json()["state"]) == (202, "deleting")
    assert "still at work on it" in reply.json()["detail"]
    assert service.client.get("/runs/default").status_code == 404
    again = service.register()
    assert (again.status_code, again.json()["type"]) == (503, "urn:draftalign:run-being-deleted")
    assert again.headers["Retry-After"] == "2"
    assert files_of(service, "default") != [], "its checkpoints are still there: another run would go on from them"
    leases.give_back("default")
    assert service.client.delete("/runs/default").status_code == 204
    assert files_of(service, "default") == []
    assert not leases.hold("default") or redis_client.delete(Leases.key("default"))
    assert service.register().status_code == 201


def test_a_deletion_that_was_cut_short_is_finished_by_the_next(
    service: RunningService, monkeypatch: pytest.MonkeyPatch
) -> None:
    service.publish()
    real = Path.rename

    def broken(self: Path, target: Path) -> Path:
        if self == service.layout.run("default"):
            raise OSError("killed")
        return real(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", broken)
        assert httpx.delete(f"{service.url}/runs/default").status_code >= 500  # and its connection is closed
    assert service.client.get("/runs").json()["runs"] == []
    assert service.register().status_code == 503
    assert service.client.delete("/runs/default").status_code == 204
    assert files_of(service, "default") == []


def test_a_deletion_that_nobody_asks_for_again_is_finished_by_the_sweep(
    service: RunningService, redis_client: Redis, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("service.api.runs._LET_GO_SECONDS", 0.0)
    leases = Leases(redis_client)
    for run in ("at_work", "left"):
        service.register(run)
        service.publish(run)
        assert leases.hold(run)
        assert service.client.delete(f"/runs/{run}").status_code == 202
    leases.give_back("left")

    async def sweep() -> None:
        async with redis.asyncio.Redis.from_url(redis_url) as client:
            await ServiceContext(service.settings, client).reap()

    asyncio.run(sweep())
    assert files_of(service, "left") == []
    assert [key for key in redis_client.keys() if b"{left}" in key] == []  # noqa: SIM118 - the command of that name
    assert service.register("left").status_code == 201
    assert service.layout.target("at_work").exists(), "its worker has not let go of it"
    leases.give_back("at_work")
    asyncio.run(sweep())
    assert files_of(service, "at_work") == []
    assert service.client.get("/runs/left").status_code == 200, "the new run of that name is another"


def test_a_second_deletion_leaves_a_new_run_of_that_name_alone(service: RunningService, redis_client: Redis) -> None:
    """A client that lost patience asks again while the first deletion ends and a trainer registers again."""
    withdraw_run(service.layout, "default")
    delete_run(service.layout, "default")
    assert service.register().status_code == 201
    assert service.post(rollout_file()).status_code == 202
    assert not delete_run(service.layout, "default", lambda _: pytest.fail("the new run's keys would go"))
    assert service.client.get("/runs/default").status_code == 200
    assert len(service.spooled()) == 1
    assert list(service.layout.runs.glob(".deleted-*")) == []


def test_what_a_cut_deletion_left_is_swept(service: RunningService) -> None:
    left = service.layout.runs / ".deleted-abc" / "drafters"
    left.mkdir(parents=True)
    sweep_deleted(service.layout)
    assert not left.parent.exists()
    assert service.client.get("/runs/default").status_code == 200


def test_rollouts_that_were_on_their_way_leave_nothing_behind(
    service: RunningService, redis_client: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep = Upload.keep

    def slow(self: Upload, path: Path) -> None:
        keep(self, path)
        withdraw_run(service.layout, "default")

    monkeypatch.setattr(Upload, "keep", slow)
    assert service.post(rollout_file()).status_code == 404
    assert service.spooled() == []
    assert redis_client.xlen("da:{default}:queue") == 0


def test_a_run_whose_files_are_damaged_hides_no_other(service: RunningService) -> None:
    for run in ("good", "hurt"):
        service.client.put(f"/runs/{run}", content=run_file(), headers=HEADERS).raise_for_status()
        service.publish(run)
    service.layout.latest("hurt").write_text("{")
    listed = {one["run"]: one for one in service.client.get("/runs").raise_for_status().json()["runs"]}
    assert listed["hurt"]["headline"]["state"] == "unreadable"
    assert listed["good"]["headline"]["state"] != "unreadable"
    text = service.client.get("/metrics").raise_for_status().text
    assert 'draftalign_run_unreadable{run="hurt"} 1.0' in text
    assert 'draftalign_drafter_sequence{run="good"} 1.0' in text
    assert 'draftalign_drafter_sequence{run="hurt"}' not in text


@pytest.mark.parametrize("name", ["hc_mult", "altup_num_inputs"])
def test_a_policy_of_several_residual_streams_is_refused_and_other_runs_go_on(
    service: RunningService, name: str
) -> None:
    """Whatever stands in that field: an answer for its own run, and nothing for any other."""
    for value in (2, 4, 10**30):
        answer = service.client.put("/runs/many", content=run_file(CONFIG | {name: value}), headers=HEADERS)
        assert answer.status_code == 422
        assert f"{value} residual streams ({name})" in answer.text
        assert "What works" in answer.text
    assert service.client.get("/runs/many").status_code == 404
    for odd, other in enumerate((1, 0, -3, True, None, "4", 4.0, [4], {"4": 4})):
        answer = service.client.put(f"/runs/odd{odd}", content=run_file(CONFIG | {name: other}), headers=HEADERS)
        assert answer.status_code in (200, 201, 422), (other, answer.text)
    assert service.client.put("/runs/honest", content=run_file(), headers=HEADERS).is_success
