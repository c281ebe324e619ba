"""PUT and GET /runs/{run}, and PUT /runs/{run}/head."""

from __future__ import annotations

import asyncio
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from attacks.runs import SIZES, drafter_tensors
from redis import Redis
from service_fixtures import (
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

from drafter.checkpoint import export_config
from rl_hooks import wire
from service.queue import Keys
from service.store import AsyncStore


@pytest.fixture
def bare(serve: Any) -> RunningService:
    """The API without any run."""
    started: RunningService = serve()
    return started


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


def test_another_target_under_the_same_name_is_a_conflict(service: RunningService) -> None:
    other = CONFIG | {"num_hidden_layers": 12}
    reply = service.register(config=other)
    assert reply.status_code == 409
    assert FINGERPRINT in reply.json()["detail"]
    assert service.client.get("/runs/default").json()["target_fingerprint"] == FINGERPRINT


def test_a_run_may_bring_its_drafter_and_tie_its_embeddings(bare: RunningService) -> None:
    meta = {"drafter_config": json.dumps(export_config(SIZES)), "draft_vocab_size": "20"}
    assert bare.register(tensors=drafter_tensors(), metadata=meta).status_code == 201
    document = bare.client.get("/runs/default").json()
    assert (document["has_drafter"], document["draft_vocab_size"]) == (True, 20)
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


def test_a_head_is_kept_by_policy_version_and_the_highest_is_remembered(service: RunningService) -> None:
    full, rows = head_file(7), head_file(5, ids=[3, 1, 49])
    reply = service.client.put("/runs/default/head", content=full, headers=HEADERS)
    assert (reply.status_code, reply.json()) == (201, {"run": "default", "policy_version": 7, "latest_head": 7})
    late = service.client.put("/runs/default/head", content=rows, headers=HEADERS)
    assert late.json()["latest_head"] == 7
    assert service.layout.head("default", 7).read_bytes() == full
    assert service.layout.head("default", 5).read_bytes() == rows
    assert service.client.get("/runs/default").json()["latest_head"] == 7


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (head_file(1, ids=[1, 50]), "ids"),
        (head_file(1, ids=[1, -1]), "ids"),
        (head_file(1, ids=[1, 1]), "ids"),
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
    monkeypatch.setattr("service.registry.LOCK_SECONDS", 0.1)
    forget, asleep, wake = AsyncStore.forget, threading.Event(), threading.Event()

    async def slow(self: AsyncStore) -> int:
        if not asleep.is_set():
            asleep.set()
            await asyncio.to_thread(wake.wait, 20)
        return await forget(self)

    monkeypatch.setattr(AsyncStore, "forget", slow)
    with ThreadPoolExecutor() as threads, httpx.Client(base_url=bare.url, timeout=20.0) as second:
        late = threads.submit(bare.register)
        assert asleep.wait(20)
        other = second.put("/runs/default", content=run_file(), headers=HEADERS)
        rollouts = second.post("/rollouts", content=rollout_file(), headers=HEADERS)
        wake.set()
        assert late.result(20).status_code == 201
        assert (other.status_code, rollouts.status_code) == (503, 404), "whose run would have been another's"
        assert "registry-busy" in other.json()["type"]
        assert second.put("/runs/default", content=run_file(), headers=HEADERS).status_code == 200
        assert second.post("/rollouts", content=rollout_file(), headers=HEADERS).status_code == 202


def refuse(service: RunningService, redis_client: Redis, run: str = "default") -> None:
    """As the worker says it."""
    redis_client.hset(f"da:{{{run}}}:worker", "error", json.dumps("fc.weight holds NaN"))
    assert service.client.get(f"/runs/{run}").json()["worker_error"] == "fc.weight holds NaN"


def test_a_run_that_the_worker_refused_is_registered_anew_and_what_is_queued_stays(
    service: RunningService, redis_client: Redis
) -> None:
    assert service.post(rollout_file()).status_code == 202
    refuse(service, redis_client)
    body = run_file(metadata={"draft_vocab_size": "20"})
    reply = service.client.put("/runs/default", content=body, headers=HEADERS)
    assert (reply.status_code, reply.json()["worker_error"], reply.json()["draft_vocab_size"]) == (201, None, 20)
    assert service.layout.target("default").read_bytes() == body
    assert service.client.get("/rollouts/a").json()["state"] == "queued"
    assert service.register().status_code == 200
    assert service.layout.target("default").read_bytes() == body, "it is not refused any more"


def test_a_refused_run_may_turn_out_to_be_of_another_target(service: RunningService, redis_client: Redis) -> None:
    other = CONFIG | {"num_hidden_layers": 12}
    assert service.register(config=other).status_code == 409
    refuse(service, redis_client)
    assert service.register(config=other).status_code == 201
    fingerprint = wire.target_fingerprint(other, LAYERS)
    assert service.client.get("/runs/default").json()["target_fingerprint"] == fingerprint
    assert service.post(rollout_file()).status_code == 422, "of the target that was replaced"
    assert service.post(rollout_file(target_fingerprint=fingerprint)).status_code == 202


@pytest.mark.parametrize("touched", ["published", "trained"])
def test_a_run_that_was_at_work_before_its_error_keeps_its_target(
    service: RunningService, redis_client: Redis, touched: str
) -> None:
    if touched == "published":
        service.publish()
    else:
        (service.layout.worker("default") / "checkpoint-000000001").mkdir(parents=True)
    before = service.layout.target("default").read_bytes()
    refuse(service, redis_client)
    assert service.register(metadata={"draft_vocab_size": "20"}).status_code == 200
    assert service.register(config=CONFIG | {"num_hidden_layers": 12}).status_code == 409
    assert service.layout.target("default").read_bytes() == before


def test_a_run_at_work_is_not_stopped_by_a_drafter_that_a_restarted_trainer_brings(service: RunningService) -> None:
    """What came first counts, as ever; a run that is new is refused for it."""
    changes: Any = {"tensors": {"drafter.fc.weight": f32(1)}, "metadata": {"drafter_config": "{}"}}
    assert service.register("new", **changes).status_code == 422
    assert service.register(**changes).status_code == 200
