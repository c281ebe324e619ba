"""Answers are as the OpenAPI document says, and docs/reference/api.md names every problem and code that there is."""

from __future__ import annotations

import ast
import re
from http import HTTPStatus
from pathlib import Path
from typing import Any, get_args

import pytest
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from helpers.service.service_fixtures import HEADERS, RunningService, head_file, rollout_file
from helpers.service.storage_fixtures import RolloutQueue, Store
from helpers.worker.record_fixtures import score
from pydantic import BaseModel, SecretStr, TypeAdapter
from redis import Redis

from rl_hooks import wire
from service.api import acceptance as acceptance_api
from service.api import problems
from service.api import runs as runs_api
from service.api.acceptance import AcceptanceReply
from service.api.app import create_app
from service.api.context import answers
from service.api.rollouts.batches import Receipt, WarningCode
from service.api.snapshot import cause_document
from service.monitor.drift.cause import Cause
from service.monitor.events import GateEvidence, Refused
from service.monitor.records import Estimate, WorkerGauges
from service.settings import Settings
from service.storage.queue.keys import DeathCode

ROOT = Path(__file__).resolve().parents[3]
API_PAGE = (ROOT / "docs" / "reference" / "api.md").read_text("utf-8")


@pytest.fixture
def lived(service: RunningService, redis_client: Redis) -> RunningService:
    """A run that has had of everything: scores, engines, a dead batch, moves, a hold, a refusal."""
    first = service.publish(gate=GateEvidence(gain=0.1, alpha_candidate=3.0))
    second = service.publish(content=b"second")
    service.registry.history.record("default", Refused(policy_version=2, reason="no gain", gate=GateEvidence(gain=0.0)))
    body = {"reason": "slow", "override_canary": True}
    service.client.post(f"/drafter/{first.version}/rollback?run=default", json=body).raise_for_status()
    service.client.put(f"/drafter/{first.version}/hold?run=default", json={"reason": "good"}).raise_for_status()
    state = {"state": "active", "reason": "for a test", "by": "ada"}
    service.client.patch("/runs/default", json=state).raise_for_status()
    store = Store(redis_client, "default")
    for number in range(12):
        sums = {name: {"tokens": 300.0 + number, "rounds": 100.0} for name in ("served", "candidate", "frozen", "best")}
        record = {"policy_version": number // 4, "drafter_version": second.version, "created": float(number)} | sums
        store.put_score(f"{number:032x}", score(record))
    counts: dict[str, Any] = {"rounds": 400, "accepted_tokens": 800, "drafted_tokens": 1600, "policy_version": 2}
    counts["step_times"] = [{"batch": 8.0, "depth": 4, "steps": 100, "seconds": 1.0}]
    counted = {"reporter": "engine", "drafter_version": first.version} | counts
    check(AcceptanceReply, answered(service, "POST /acceptance", json=counted)[1])
    service.post(rollout_file()).raise_for_status()
    queue = RolloutQueue(redis_client, "default")
    queue.ensure_group()
    (entry,) = queue.claim("w", max_tokens=1000, min_idle_seconds=60.0)
    queue.dead_letter(entry, "its file has other bytes", code="blob_damaged", keep_file=True)
    store.set_worker(WorkerGauges(action="train"))
    return service


def answered(service: RunningService, call: str, **more: Any) -> tuple[int, bytes]:
    method, path = call.split(" ")
    reply = service.client.request(method, path, **more)
    assert reply.is_success, reply.text
    return reply.status_code, reply.content


def check(kind: type[BaseModel], content: bytes) -> Any:
    """Validate an answer. All that it says is declared: what is read from it and written again says the same."""
    found = kind.model_validate_json(content)
    told = TypeAdapter(Any).validate_json(content)
    assert found.model_dump(mode="json", exclude_unset=True) == told
    return found


def test_what_is_read_of_a_run_is_as_declared(lived: RunningService) -> None:
    (run,) = check(answers.RunList, answered(lived, "GET /runs")[1]).runs
    one = check(answers.RunAnswer, answered(lived, "GET /runs/default")[1])
    assert (run.state, one.state, one.state_change.by) == ("active", "active", "ada"), "one name has one shape"
    drafters = check(answers.DrafterList, answered(lived, "GET /drafters")[1])
    assert {"published", "rolled_back", "refused", "held"} <= {event.event for event in drafters.history}
    assert all(type(event).__name__ != "Event" for event in drafters.history), "each kind is known"
    alpha = check(answers.AlphaAnswer, answered(lived, "GET /alpha")[1])
    assert (len(alpha.points), len(alpha.servers), len(alpha.engines)) == (3, 1, 1)
    changed = check(answers.AlphaAnswer, answered(lived, f"GET /alpha?since={alpha.cursor}")[1])
    assert changed.kept_events is not None
    check(answers.AlphaAnswer, answered(lived, "GET /alpha?attempt=1")[1])
    check(answers.WorthAnswer, answered(lived, "GET /runs/default/worth?generation_share=0.7")[1])
    (dead,) = check(answers.DeadPage, answered(lived, "GET /runs/default/dead")[1]).dead
    assert (dead.code, dead.reason) == ("blob_damaged", "its file has other bytes")
    fate = check(answers.BatchFate, answered(lived, f"GET /rollouts/{dead.batch_id}")[1])
    assert (fate.state, fate.code) == ("dead", "blob_damaged")
    for probe in ("GET /healthz", "GET /readyz"):
        check(answers.Status, answered(lived, probe)[1])


def test_what_is_read_of_a_run_that_has_just_been_registered_is_as_declared(service: RunningService) -> None:
    """The fuzzer came upon it: `current` was null, and declared an object."""
    service.register("young").raise_for_status()
    for call, kind in (
        ("GET /runs", answers.RunList),
        ("GET /runs/young", answers.RunAnswer),
        ("GET /drafters?run=young", answers.DrafterList),
        ("GET /alpha?run=young", answers.AlphaAnswer),
        ("GET /runs/young/worth", answers.WorthAnswer),
        ("GET /runs/young/dead", answers.DeadPage),
    ):
        check(kind, answered(service, call)[1])


def test_what_writes_answer_is_as_declared(lived: RunningService) -> None:
    again = check(Receipt, answered(lived, "POST /rollouts", content=rollout_file(), headers=HEADERS)[1])
    assert (again.state, again.warning_code) == ("queued", None), "its file was damaged, so it may come again"
    other = rollout_file(("a",), lengths=(6,))
    assert check(Receipt, answered(lived, "POST /rollouts", content=other, headers=HEADERS)[1]).duplicate
    some = rollout_file(("b", "c"))
    known = check(Receipt, answered(lived, "POST /rollouts", content=some, headers=HEADERS)[1])
    assert (known.known_rollouts, known.warning_code) == (1, "known-rollouts")
    registered = lived.register()
    assert registered.status_code == 200
    assert check(answers.RunAnswer, registered.content).warning_code in (None, "ignored")
    check(answers.HeadReceipt, answered(lived, "PUT /runs/default/head", content=head_file(3), headers=HEADERS)[1])
    check(answers.DriftRequest, answered(lived, "POST /runs/default/drift/reset")[1])


def test_no_request_waits_until_routes_are_made() -> None:
    """FastAPI's `include_router` makes them again, for each application, at the first request."""
    served = set(map(id, application().routes))
    assert served >= {id(route) for part in (runs_api, acceptance_api) for route in part.router.routes}


def application() -> FastAPI:
    return create_app(Settings(redis_url=SecretStr("redis://127.0.0.1:1")))


def test_the_openapi_document_has_a_schema_for_every_json_answer() -> None:
    document = application().openapi()
    bare = {
        f"{method.upper()} {path} {status}"
        for path, calls in document["paths"].items()
        for method, call in calls.items()
        for status, answer in call["responses"].items()
        if (json := answer.get("content", {}).get("application/json")) is not None and "$ref" not in json["schema"]
    }
    assert bare == set()


def raised() -> set[tuple[int, str]]:
    """Status and type of every problem that the code makes."""
    found = {(status, kind) for status, kind, _ in problems._ANSWERS.values()}
    for path in (ROOT / "service").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Problem":
                match node.args:
                    case [ast.Constant(value=int(status)), ast.Constant(value=str(kind)), *_]:
                        found.add((status, kind))
                    case [_, ast.Constant(value=str(kind)), *_]:
                        found |= {(status, kind) for status in (400, 416)}  # as Starlette found
                    case _:
                        assert path.name == "problems.py", "a problem's type must be a literal, for this test"
    of_router = HTTPStatus.NOT_FOUND, HTTPStatus.METHOD_NOT_ALLOWED
    return found | {(status, status.phrase.lower().replace(" ", "-")) for status in of_router}


def test_the_page_names_every_problem_and_every_code() -> None:
    told = {
        (int(status), kind)
        for kind, statuses in re.findall(r"^\| `([a-z-]+)` \| ([0-9, ]+) \|", API_PAGE, re.MULTILINE)
        for status in statuses.split(", ")
    }
    assert told == raised()
    for code in (*get_args(DeathCode), *get_args(WarningCode), "ignored"):
        assert f"`{code}`" in API_PAGE, code


@pytest.mark.parametrize("path", ["/healthz", "/runs", "/nothing", "/docs"])
def test_every_answer_names_the_contract(service: RunningService, path: str) -> None:
    assert service.client.get(path).headers["Draftalign-Api"] == str(wire.API_VERSION)
    assert service.client.get("/openapi.json").json()["info"]["version"] == str(wire.API_VERSION)


def test_what_lasts_until_a_person_acts_names_no_time_to_ask_again() -> None:
    statuses = {kind: {s for s, k in raised() if k == kind} for kind in ("too-many-runs", "run-damaged")}
    assert statuses == {"too-many-runs": {403}, "run-damaged": {500}}
    assert "Retry-After" not in problems.as_problem(RequestValidationError([{"loc": ("q", "x"), "msg": "m"}])).headers


def test_a_change_that_has_no_cause_is_as_declared() -> None:
    why = Cause(None, "no part of the change is a fall beyond chance", None, 64, {"policy": Estimate(0.1, 0.01)}, None)
    assert answers.CauseLine.model_validate(cause_document(why), strict=True).cause is None
