"""State, Redis and clients of 28 November 2026 (commit da2b0c80) are understood by today's service.

`of_28_november/` holds what that version left with one batch queued (`state/`, `redis.json`), and what its hook and
agent go on to send (`rollouts.safetensors`, `report.json`). Where one of these tests fails, an upgrade loses something:
read the old form too, or have it refused in words and say so in docs/guide/operating.md#upgrade.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.service.service_fixtures import HEADERS, RunningService
from helpers.service.storage_fixtures import RolloutQueue
from helpers.worker.worker_fixtures import Bench
from redis import Redis

from rl_hooks.format.release import parse_manifest
from service.storage.layout import Layout

LEFT = Path(__file__).with_name("of_28_november")
VERSION = "v000001-d6cfbc1b"


@pytest.fixture
def taken_over(serve: Callable[..., RunningService], redis_client: Redis, tmp_path: Path) -> RunningService:
    """Today's API on what was left."""
    state = tmp_path / "state"
    shutil.copytree(LEFT / "state", state)
    for told in state.glob("runs/*/heads/*.crc32"):  # a backup keeps the files' times, git does not
        written = int(told.read_text().split()[0])
        os.utime(told.with_suffix(".safetensors"), ns=(written, written))
    for key, (kind, value) in json.loads((LEFT / "redis.json").read_text()).items():
        _restore(redis_client, key, kind, value)
    return serve(state_dir=state)


def _restore(redis: Redis, key: str, kind: str, value: Any) -> None:
    if kind == "string":
        redis.set(key, value)
    elif kind == "hash":
        redis.hset(key, mapping=value)
    elif kind == "set":
        redis.sadd(key, *value)
    elif kind == "zset":
        redis.zadd(key, dict(value))
    else:
        assert kind == "stream", (key, kind)
        for entry, fields in value:
            redis.xadd(key, fields, entry)


def test_the_run_stands_as_it_stood(taken_over: RunningService) -> None:
    (line,) = taken_over.client.get("/runs").json()["runs"]
    assert (line["run"], line["state"], line["drafter"]) == ("default", "paused", VERSION)
    run = taken_over.client.get("/runs/default").json()
    assert (run["state_change"]["by"], run["state_change"]["reason"]) == ("ann", "an upgrade")
    assert (run["latest_policy"], run["latest_head"]) == (0, 1)
    rollouts = run["rollouts"]
    assert (rollouts["accepted_total"], rollouts["waiting"], rollouts["dead_total"]) == (1, 1, 0)
    (engine,) = taken_over.client.get("/alpha").json()["servers"]
    assert (engine["rounds"], engine["alpha"]) == (100, 2.5)
    answered = taken_over.client.get("/drafter/latest", params={"run": "default"})
    manifest = parse_manifest(answered.json(), "default")
    assert (manifest.version, manifest.sequence) == (VERSION, 1)
    assert answered.json() == json.loads((LEFT / f"state/runs/default/drafters/{VERSION}/manifest.json").read_text())
    assert taken_over.client.get(f"/drafter/{VERSION}/model.safetensors").content == b"weights"
    (event,) = [one for one in taken_over.client.get("/drafters").json()["history"] if one["event"] == "published"]
    assert event["version"] == VERSION


def test_its_clients_go_on(taken_over: RunningService) -> None:
    layout = Layout(LEFT / "state")
    again = taken_over.client.put("/runs/default", content=layout.target("default").read_bytes(), headers=HEADERS)
    assert (again.status_code, again.json().get("warning")) == (200, None)
    (queued,) = layout.spool("default").iterdir()
    known = taken_over.client.post("/rollouts", params={"run": "default"}, content=queued.read_bytes(), headers=HEADERS)
    assert (known.status_code, known.json()["state"]) == (200, "queued")
    new = (LEFT / "rollouts.safetensors").read_bytes()
    taken = taken_over.client.post("/rollouts", params={"run": "default"}, content=new, headers=HEADERS)
    assert (taken.status_code, taken.json()["known_rollouts"], taken.json()["warning"]) == (202, 0, None)
    report = json.loads((LEFT / "report.json").read_text())
    report |= {"rounds": 200, "accepted_tokens": 300, "drafted_tokens": 800, "emitted_tokens": 500}
    report["accepted_per_position"] = [160, 80, 40, 20]
    assert taken_over.client.post("/acceptance", json=report).json()["warning"] is None
    (engine,) = taken_over.client.get("/alpha").json()["servers"]
    assert (engine["rounds"], engine["alpha"]) == (200, 2.5)


def test_a_worker_trains_on_what_was_queued(taken_over: RunningService, redis_client: Redis, redis_url: str) -> None:
    """As a run from scratch: its published drafter is not one that a worker could begin with."""
    layout = taken_over.layout
    shutil.rmtree(layout.run("default") / "drafters")
    for path in (layout.latest("default"), layout.history("default")):
        path.unlink()
    with Bench(layout.root, redis_url, vocab_min_tokens=5, depth=4) as bench:
        new = (LEFT / "rollouts.safetensors").read_bytes()
        assert taken_over.client.post("/rollouts?run=default", content=new, headers=HEADERS).status_code == 202
        bench.drain(bench.worker())
        batches = [key.decode().rpartition(":")[2] for key in redis_client.scan_iter("da:{default}:batch:*")]
        ends = [(RolloutQueue(redis_client, "default").batch(batch) or {}).get("state") for batch in batches]
    assert ends == ["trained"] * 2
