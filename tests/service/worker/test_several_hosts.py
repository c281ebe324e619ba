"""A worker and an API that share an object store and no directory (`state_url`): rollouts, heads and checkpoints."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis.asyncio

pytest.importorskip("obstore")
pytest.importorskip("botocore")
pytest.importorskip("moto")

from helpers.engine.agent_fixtures import Engine, drafter_bytes, drafter_config, eventually, start_agent
from helpers.service.failover_fixtures import until
from helpers.service.object_fixtures import BUCKET, Store, failing
from helpers.service.service_fixtures import HEADERS, RunningService, publish
from helpers.worker.worker_fixtures import Bench, nest
from torch import Tensor

from service.api.context.context import ServiceContext
from service.errors import ConfigurationError, ObjectStoreError
from service.ranks import check_hosts, run_on_ranks
from service.settings import Settings
from service.storage import mirror
from service.storage.queue.incoming import new_name
from service.storage.registry import Registry
from service.worker.checkpoint import CheckpointSuperseded

URL = f"s3://{BUCKET}/state"


@pytest.fixture
def on(store: Store, tmp_path: Path, redis_url: str) -> Iterator[Callable[[str], Bench]]:
    """What a worker needs, on a host of this name."""
    made: list[Bench] = []

    def host(name: str) -> Bench:
        made.append(Bench(tmp_path / name, redis_url, state_url=URL))
        return made[-1]

    yield host
    for bench in made:
        bench.redis.close()


@pytest.fixture
def bench(on: Callable[[str], Bench]) -> Bench:
    bench = on("w")
    bench.begin()
    return bench


@pytest.fixture
def api(bench: Bench, tmp_path: Path, redis_url: str) -> Iterator[RunningService]:
    served = RunningService(state_dir=tmp_path / "a", redis_url=redis_url, state_url=URL)
    yield served
    served.stop()


def rollouts(store: Store) -> list[str]:
    return [key for key in store.stored() if "/rollouts/" in key]


def post(api: RunningService, bench: Bench, body: bytes) -> str:
    reply = api.post(body, run="default")
    assert reply.status_code == 202, reply.text
    bench.posted.append(reply.json()["batch_id"])
    return bench.posted[-1]


def test_a_file_that_came_through_the_api_is_kept_in_the_store_until_it_is_trained_on(
    bench: Bench, api: RunningService, store: Store
) -> None:
    body = bench.world.rollout_file("a")
    post(api, bench, body)
    (key,) = rollouts(store)
    assert store.client().get_object(Bucket=BUCKET, Key=key)["Body"].read() == body
    assert api.spooled() == [], "nothing of it is on the API's host"
    assert api.post(body, run="default").json()["duplicate"]
    assert rollouts(store) == [key], "what came again is not kept beside it"
    bench.drain(bench.worker())
    assert bench.state(bench.posted[0]) == "trained"
    assert rollouts(store) == []


def test_what_somebody_spoils_in_the_store_harms_its_own_run_alone(
    bench: Bench,
    store: Store,
    tmp_path: Path,
    redis_url: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A drafter with a flipped bit, then a tree that leads out of the directory: worker, API, agents, engines."""
    monkeypatch.setattr(mirror, "_LOOK_SECONDS", 3600.0)  # this process hears of others only where it asks
    bench.register(bench.world.run_file(drafter=bench.world.drafter()), run="spoilt")
    config, registry, bucket = json.dumps(drafter_config(64)), Registry(bench.layout), store.client()
    spoilt = publish(registry, "spoilt", content=drafter_bytes(1, hidden=64), config=config).version
    tree = json.loads(bucket.get_object(Bucket=BUCKET, Key="state/trees/spoilt")["Body"].read())
    key = f"state/files/spoilt/{tree['files'][f'drafters/{spoilt}/model.safetensors']['object']}"
    body = bucket.get_object(Bucket=BUCKET, Key=key)["Body"].read()
    bucket.put_object(Bucket=BUCKET, Key=key, Body=body[:-1] + bytes([body[-1] ^ 1]))
    api = RunningService(state_dir=tmp_path / "a", redis_url=redis_url, state_url=URL)  # a host that has nothing yet
    engines = Engine(), Engine()
    try:
        with (
            start_agent(api.url, engines[0], cache=tmp_path / "0", run="default"),
            start_agent(api.url, engines[1], cache=tmp_path / "1", run="spoilt"),
            nest(tmp_path / "log") as workers,
        ):
            eventually(lambda: any(spoilt in r.getMessage() for r in caplog.records if "agent" in r.name))
            evil = {"files": {"../../../evil": {"bytes": 1, "changed_ns": 1, "text": "x"}}}
            bucket.put_object(Bucket=BUCKET, Key="state/trees/spoilt", Body=json.dumps(evil).encode())
            workers.start(bench)
            post(api, bench, bench.world.rollout_file("a"))
            bench.wait(lambda: bench.state(bench.posted[0]) == "trained")
            eventually(lambda: engines[0].version is not None)
            served = registry.latest("default")
            assert served is not None
            assert engines[0].version == served.version
            assert engines[1].swapped == []
        assert api.client.get("/drafter/latest", params={"run": "spoilt"}).json()["version"] == spoilt
        newest = publish(registry, content=drafter_bytes(2, hidden=64), config=config).version
        assert api.client.get("/drafter/latest").json()["version"] == newest, "the store is asked for the others"
    finally:
        api.stop()
        for engine in engines:
            engine.down()
    assert not list(tmp_path.rglob("evil"))


def test_a_head_that_came_to_another_host_before_a_batch_is_there_with_the_batch(
    bench: Bench, api: RunningService
) -> None:
    worker = bench.worker()
    bench.world.heads[1] = bench.world.heads[0] * 1.3
    body = bench.world.head_file(1)
    assert api.client.put("/runs/default/head", content=body, headers=HEADERS).status_code == 201
    post(api, bench, bench.world.rollout_file("a", policy_version=1))
    assert not bench.layout.head("default", 1).exists()
    bench.drain(worker)
    assert bench.state(bench.posted[0]) == "trained"
    assert worker.learner.target.head_of(1)[0] == 1
    there, here = bench.layout.head("default", 1).stat(), api.layout.head("default", 1).stat()
    assert there.st_mtime_ns == here.st_mtime_ns


def test_a_file_that_alone_names_its_run_is_taken_by_a_host_that_has_not_heard_of_the_run_yet(
    on: Callable[[str], Bench], tmp_path: Path, redis_url: str
) -> None:
    served = RunningService(state_dir=tmp_path / "a", redis_url=redis_url, state_url=URL)
    try:
        (bench := on("w")).begin()
        reply = served.post(bench.world.rollout_file("a"))
        assert reply.status_code == 202, reply.text
    finally:
        served.stop()


def test_an_agent_that_a_later_version_was_told_is_not_told_an_earlier_one(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, redis_url: str
) -> None:
    """It asks one replica and then another, which has not looked yet."""
    monkeypatch.setattr(mirror, "_LOOK_SECONDS", 3600.0)
    registry = Registry(bench.layout)
    first = publish(registry)
    api = RunningService(state_dir=tmp_path / "late", redis_url=redis_url, state_url=URL)
    try:
        second = publish(registry, content=b"second")
        told = api.client.get("/drafter/latest", headers={"If-None-Match": second.etag})
        assert told.status_code == 304
        told = api.client.get("/drafter/latest", headers={"If-None-Match": first.etag})
        assert told.json()["version"] == second.version
        third = publish(registry, content=b"third")
        report = {"reporter": "r", "drafter_version": third.version, "policy_version": 0}
        report |= {"rounds": 4, "accepted_tokens": 4, "drafted_tokens": 16}
        found = api.client.post("/acceptance", json=report)
        assert found.status_code == 200, found.text
        assert api.registry.versions("default")[-1] == third.version, "it has looked, and the counts are the run's"
        fourth = publish(registry, content=b"fourth")
        assert api.client.get(f"/drafter/{fourth.version}/model.safetensors").content == b"fourth"
        fifth = publish(registry, content=b"fifth")
        assert (
            api.client.post(f"/drafter/{fifth.version}/rollback?run=default", json={"reason": "again"}).status_code
            == 200
        )
        bench.layout.pull("default")
        back = registry.latest("default")
        assert back is not None
        assert (back.version, back.sequence) == (fifth.version, fifth.sequence + 1)
    finally:
        api.stop()


def test_a_store_that_hangs_holds_up_no_answer_for_long(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, redis_url: str, store: Store
) -> None:
    monkeypatch.setattr(mirror, "_LOOK_SECONDS", 3600.0)
    monkeypatch.setattr("service.api.context.looks._SECONDS", 0.2)
    first = publish(Registry(bench.layout))
    api = RunningService(state_dir=tmp_path / "late", redis_url=redis_url, state_url=URL)
    try:
        assert api.client.get("/drafter/latest").json()["version"] == first.version
        let_go, begun, answered = threading.Event(), list[str](), list[str]()

        def hangs(environ: dict[str, Any], _: Any) -> None:
            begun.append(environ["PATH_INFO"])
            let_go.wait(60)
            answered.append(environ["PATH_INFO"])

        store.fault = hangs
        told = api.client.get("/drafter/latest")
        assert told.json()["version"] == first.version, "what is known is served on"
        assert api.client.get("/runs/unknown").status_code == 404
        assert api.client.get("/healthz").status_code == 200
        assert begun
        assert answered == [], "nobody waited for the store"
        let_go.set()
        store.fault = failing("GET", "403 Forbidden")
        assert api.client.get("/drafter/latest").json()["version"] == first.version
        asked = len(store.requests)
        for number in range(8):
            assert api.client.get(f"/runs/unknown-{number}").status_code == 404
        assert len(store.requests) - asked <= 2, "it was asked a moment ago"
    finally:
        store.fault = None
        api.stop()


def test_ranks_of_several_hosts_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    settings = Settings(state_dir=tmp_path, state_url=URL)
    with pytest.raises(ConfigurationError, match="all ranks of a worker are on one host"):
        run_on_ranks(settings)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    check_hosts(settings)


def test_a_store_that_is_away_refuses_a_file_and_loses_none(bench: Bench, api: RunningService, store: Store) -> None:
    worker = bench.worker()
    body = bench.world.rollout_file("a")
    store.fault = failing("PUT", "403 Forbidden")
    assert api.post(body, run="default").status_code == 503
    store.fault = failing("GET", "403 Forbidden")
    until(lambda: api.client.get("/readyz").status_code == 503, "it says that it takes none")
    assert api.client.get("/readyz").json()["type"].endswith("object-store-away")
    store.fault = None
    until(lambda: api.client.get("/readyz").status_code == 200, "it takes them again")
    post(api, bench, body)
    store.fault = failing("GET", "403 Forbidden")
    with pytest.raises(ObjectStoreError):
        worker.cycle()
    store.fault = None
    bench.drain(worker)
    assert bench.state(bench.posted[0]) == "trained"


def test_what_a_host_had_in_hand_when_it_died_another_one_trains_on(
    bench: Bench, api: RunningService, on: Callable[[str], Bench], store: Store
) -> None:
    first = bench.worker()
    for name in "abc":
        post(api, bench, bench.world.rollout_file(name))
    first.cycle()
    entries = first.inbox.claim()
    first.inbox.load(entries)
    assert len(bench.spooled()) == 1, "it is on the first host's disk, and not done"
    other = on("other")
    other.layout.pull("default", checkpoints=True)  # as `Worker` does when it opens a run
    second = other.worker()
    assert second.learner.journal.totals.batches == 1, "it goes on from the first one's checkpoint"
    other.drain(second)
    assert [bench.state(batch) for batch in bench.posted] == ["trained"] * 3
    assert set(bench.store.scores()) == set(bench.posted), "each counts once"
    assert rollouts(store) == []
    with pytest.raises(CheckpointSuperseded):
        first.save()  # it was only stopped, and wakes up
    bench.layout.blob("default", new_name("0" * 32, "0" * 64, 0)).write_bytes(b"brought, and ended elsewhere")
    bench.worker()
    assert bench.spooled() == [], "nobody else knows of what lies there"
    assert other.checkpoint().name == max(p.name for p in other.layout.worker("default").glob("checkpoint-*"))


def test_a_file_that_is_gone_from_this_host_alone_is_not_missing(
    bench: Bench, api: RunningService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that was stopped wakes while another one on its host begins with the run."""
    worker = bench.worker()
    post(api, bench, bench.world.rollout_file("a"))

    def gone(path: Path, **_: object) -> None:
        path.unlink()
        raise FileNotFoundError(path)

    with monkeypatch.context() as patch:
        patch.setattr("service.worker.inbox.load_batch", gone)
        worker.cycle()
    assert bench.state(bench.posted[0]) == "queued"
    bench.drain(bench.worker())
    assert bench.state(bench.posted[0]) == "trained"


def test_a_dead_batch_is_downloaded_put_back_and_discarded_on_any_host(
    bench: Bench, api: RunningService, store: Store, redis_url: str
) -> None:
    def shift(tensors: dict[str, Tensor]) -> None:
        tensors["logprobs"] -= 1.0

    bodies = [bench.world.rollout_file(name, change=shift) for name in "ab"]
    back, gone = (post(api, bench, body) for body in bodies)
    bench.drain(bench.worker())
    assert len(rollouts(store)) == 2, "the files of the dead are kept"
    assert bench.spooled() == []
    dead = api.client.get("/runs/default/dead").json()["dead"]
    assert [one["has_file"] for one in dead] == [True, True]
    assert api.client.get(f"/runs/default/dead/{back}/file").content == bodies[0]
    assert api.client.post(f"/runs/default/dead/{back}/retry").status_code == 202
    bench.drain(bench.worker(logprob_gap_nats=10.0))
    assert bench.state(back) == "trained"
    assert api.client.delete(f"/runs/default/dead/{gone}").status_code == 204
    asyncio.run(_reap(api, redis_url))
    assert rollouts(store) == []
    assert api.spooled() == []
    assert api.client.get(f"/runs/default/dead/{gone}/file").status_code == 410


async def _reap(api: RunningService, redis_url: str) -> None:
    client = redis.asyncio.Redis.from_url(redis_url)
    context = ServiceContext(api.settings.model_copy(update={"orphan_age_seconds": -5.0}), client)
    try:
        await context.reap()
    finally:
        context.close()
        await client.aclose()
