"""What people ask of a run, over HTTP, and a real worker that obeys: hold a version, pause, drain, archive."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from helpers.service.service_fixtures import HEADERS, RunningService
from helpers.worker.worker_fixtures import Bench, Nest

from rl_hooks.sending.sender import RolloutSender
from service.errors import LatestHeld
from service.storage.layout import revalidate
from service.storage.registry import Registry
from service.storage.runs import change_state, read_state
from service.worker.learner import Learner
from service.worker.process import worker as process
from service.worker.process.worker import Worker

#: Gains that show at once.
EAGER: dict[str, Any] = {"gate_min_gain": 0.005, "recent_tokens": 100_000, "learning_rate": 5e-3}
#: Most batches until a gain is shown.
_BATCHES = 16


def post(bench: Bench, service: RunningService, name: str, **options: Any) -> httpx.Response:
    return service.post(bench.world.rollout_file(name, **options))


def trained(bench: Bench, reply: httpx.Response) -> Callable[[], bool]:
    assert reply.status_code == 202, reply.text
    return lambda: bench.state(reply.json()["batch_id"]) == "trained"


def until_published(bench: Bench, service: RunningService, name: str, after: int) -> int:
    """Post batches until `latest` has a sequence above `after`; returns it."""
    for n in range(_BATCHES):
        bench.wait(trained(bench, post(bench, service, f"{name} {n}", rollouts=64)))
        sequence = int(service.client.get("/drafter/latest").json()["sequence"])
        if sequence > after:
            return sequence
    raise AssertionError(f"nothing was published in {_BATCHES} batches")


def looked(bench: Bench) -> tuple[str, int]:
    """What the worker's checkpoint says of the gate: the version that all trials are against, and looks so far."""
    gate = json.loads((bench.checkpoint() / "state.json").read_text())["gate"]
    return gate["served"], gate["trials"]["candidate"]["spent"]["looks"]


def become(service: RunningService, state: str, run: str = "default") -> dict[str, Any]:
    reply = service.client.patch(f"/runs/{run}", json={"state": state, "reason": "a test", "by": "ada"})
    assert reply.status_code == 200, reply.text
    described: dict[str, Any] = reply.json()
    return described


# --- a version that is held
def test_a_held_version_is_served_until_it_is_released_and_the_gate_looks_at_nothing(
    bench: Bench, service: RunningService, workers: Nest
) -> None:
    bench.begin()
    workers.start(bench, settings=EAGER)
    bench.wait(lambda: service.client.get("/drafter/latest").status_code == 200)
    until_published(bench, service, "before", after=1)
    first = Registry(bench.layout).versions("default")[0]
    before = looked(bench)
    reply = service.client.put(f"/drafter/{first}/hold?run=default", json={"reason": "the second is odd", "by": "ada"})
    assert reply.status_code == 200, reply.text
    held = service.client.get("/drafter/latest").json()
    assert held["version"] == first
    for n in range(3):
        bench.wait(trained(bench, post(bench, service, f"held {n}", rollouts=64)))
    assert service.client.get("/drafter/latest").json() == held
    assert looked(bench) == before, "not one look was taken"
    described = service.client.get("/runs/default").json()
    assert (described["held"]["by"], described["held"]["reason"]) == ("ada", "the second is odd")
    said = described["headline"]
    texts = [said["text"], *said["also"]]
    assert any("Held at v000001" in text and "by ada (the second is odd)" in text for text in texts), texts
    assert 'draftalign_drafter_held{run="default"} 1.0' in service.client.get("/metrics").text
    looked_at = [e["event"] for e in service.client.get("/drafters").json()["history"]]
    assert looked_at[looked_at.index("held") :] == ["held"], "nothing was judged"
    records = bench.store.scores()
    assert all(r.candidate is not None and (r.trained_tokens_total or 0) > 0 for r in list(records.values())[-3:])
    released = service.client.delete(f"/drafter/{first}/hold", params={"run": "default", "by": "bob"})
    assert released.status_code == 204, released.text
    assert until_published(bench, service, "after", after=held["sequence"]) > held["sequence"]
    assert service.client.get("/runs/default").json()["held"] is None


def test_a_publish_that_races_a_hold_loses_and_its_look_is_not_counted(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gate has decided, the files are written, and then a person holds what is served."""
    bench.begin()
    worker, registry = bench.worker(**EAGER), Registry(bench.layout)
    publish, raced = Registry.publish, []

    def late(self: Registry, run: str, staged: Path, **facts: Any) -> Any:
        served = registry.latest("default")
        assert served is not None
        raced.append(registry.hold("default", served.version, "just now"))
        looks = worker.learner.judge.gate.state["trials"]
        assert looks["candidate"]["spent"]["looks"] > 0, "it was looked at"
        return publish(self, run, staged, **facts)

    monkeypatch.setattr(Registry, "publish", late)
    before: dict[str, Any] = {}
    for n in range(_BATCHES):
        before = worker.learner.judge.gate.state
        bench.post(f"b{n}", rollouts=64)
        bench.drain(worker)
        if raced:
            break
    assert len(raced) == 1
    after = worker.learner.judge.gate.state
    assert after["trials"]["candidate"]["spent"] == before["trials"]["candidate"]["spent"]
    assert len(registry.versions("default")) == 1, "what was staged has gone"
    assert registry.held("default") is not None


def test_holding_what_is_served_moves_no_engine_and_holding_another_does(service: RunningService) -> None:
    assert service.register().status_code == 201
    first, second = service.publish(), service.publish(content=b"second")
    reply = service.client.put(f"/drafter/{second.version}/hold?run=default", json={"reason": "good"})
    assert (reply.json()["version"], reply.json()["sequence"]) == (second.version, 2)
    with pytest.raises(LatestHeld, match="a person"):
        service.publish(content=b"third")
    rolled = service.client.post(f"/drafter/{first.version}/rollback?run=default", json={"reason": "x"})
    assert (rolled.status_code, rolled.json()["type"]) == (409, "urn:draftalign:drafter-held")
    wrong = service.client.delete(f"/drafter/{first.version}/hold?run=default")
    assert (wrong.status_code, wrong.json()["type"]) == (409, "urn:draftalign:drafter-held")
    moved = service.client.put(f"/drafter/{first.version}/hold?run=default", json={"reason": "better"})
    assert (moved.json()["version"], moved.json()["sequence"]) == (first.version, 3)
    service.registry.push_again("default", "dead in an engine")
    held = service.registry.held("default")
    assert held is not None
    assert (held.version, held.reason) == (first.version, "better"), "also after it was pushed again"
    assert service.client.delete(f"/drafter/{first.version}/hold?run=default").status_code == 204
    for released in (first, second):
        again = service.client.delete(f"/drafter/{released.version}/hold?run=default")
        assert again.status_code == 204, "none is held: what was asked for is so"
    unknown = service.client.delete("/drafter/v000009-00000000/hold?run=default")
    assert (unknown.status_code, unknown.json()["type"]) == (404, "urn:draftalign:no-such-drafter")
    history = service.client.get("/drafters").json()["history"]
    events = ["published", "published", "held", "rolled_back", "held", "pushed_again", "released"]
    assert [e["event"] for e in history] == events
    assert [e["event"] for e in history if e.get("to_hold")] == ["rolled_back"], "a hold moved it: it is no rollback"
    service.publish(content=b"fourth")


def test_a_hold_that_is_repeated_is_there_once(service: RunningService) -> None:
    assert service.register().status_code == 201
    first, _ = service.publish(), service.publish(content=b"second")

    def hold(reason: str) -> int:
        reply = service.client.put(f"/drafter/{first.version}/hold?run=default", json={"reason": reason})
        return int(reply.json()["sequence"])

    assert [hold("good"), hold("good"), hold("better")] == [3, 3, 3]
    history = service.client.get("/drafters").json()["history"]
    assert [e["reason"] for e in history if e["event"] == "held"] == ["good", "better"]


@pytest.mark.parametrize("body", [{}, {"reason": ""}, {"reason": "x", "by": 3}, {"reason": "x", "for": 3}, []])
def test_a_hold_needs_a_reason(service: RunningService, body: object) -> None:
    assert service.register().status_code == 201
    version = service.publish().version
    assert service.client.put(f"/drafter/{version}/hold?run=default", json=body).status_code == 422
    assert service.registry.held("default") is None


# --- the state of a run
def test_a_paused_run_queues_and_is_worked_on_again_within_seconds(
    bench: Bench, service: RunningService, workers: Nest
) -> None:
    bench.begin()
    workers.start(bench)
    bench.wait(trained(bench, post(bench, service, "a")))
    assert become(service, "paused")["headline"]["state"] == "paused"
    bench.wait(lambda: "not worked on until it is active again" in workers.log.read_text(), 5.0)
    waiting = post(bench, service, "b")
    assert waiting.status_code == 202
    time.sleep(1.0)
    assert bench.state(waiting.json()["batch_id"]) == "queued"
    assert "1 batch queued" in service.client.get("/runs/default").json()["headline"]["text"]
    metrics = service.client.get("/metrics").text
    assert 'draftalign_run_state{run="default",state="paused"} 1.0' in metrics
    assert "draftalign_worker_heartbeat_timestamp_seconds{" not in metrics, "no alarm for a worker that is to be silent"
    become(service, "active")
    bench.wait(trained(bench, waiting), 5.0)
    assert bench.totals()["batches"] == 2, "it went on from its checkpoint"


def test_a_pause_ends_the_training_in_hand_and_loses_nothing(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is obeyed at the next optimizer step, and not at the end of a training."""
    bench.begin()
    worker = Worker(bench.settings.model_copy(update={"train_passes": 50.0}), bench.redis)
    train, steps = Learner.train, []

    def paused(self: Learner, *given: Any) -> tuple[float, float]:
        assert self.lineage.trainer is not None
        before = self.lineage.trainer.windows
        change_state(bench.layout, "default", "paused", "the GPU is needed")
        found = train(self, *given)
        steps.append(self.lineage.trainer.windows - before)
        return found

    monkeypatch.setattr(Learner, "train", paused)
    batch = bench.post("a", rollouts=32)
    worker._turn()
    assert steps == [1]
    worker._look_at = 0.0
    worker._turn()
    assert worker.served == {}, "its memory is free"
    assert bench.state(batch) == "trained"
    assert bench.redis.exists("da:{default}:lease") == 0


def test_on_a_slow_file_system_the_look_for_runs_takes_a_tenth_of_the_time_and_finds_a_new_run_soon(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each directory is opened again in each look, so that a network's client asks its server."""
    for number in range(20):
        bench.register(run=f"run{number}")
        if number >= 12:
            change_state(bench.layout, f"run{number}", "archived", "it has ended")
    worker = Worker(bench.settings, bench.redis)
    clock, look = 100.0, revalidate

    def slow(directory: Path) -> None:
        nonlocal clock
        clock += 0.005
        look(directory)

    for module in ("layout", "runs", "reports.drafting"):
        monkeypatch.setattr(f"service.storage.{module}.revalidate", slow)
    monkeypatch.setattr(process, "time", SimpleNamespace(monotonic=lambda: clock))
    looking = 0.0

    def turns_until(end: float) -> None:
        nonlocal clock, looking
        while clock < end:
            before = clock
            worker._turn()
            looking += clock - before
            clock += 0.25

    turns_until(110.0)
    assert len(worker.served) == 12
    looking = 0.0
    turns_until(210.0)
    assert 1.0 < looking < 12.0, "of 100 s"
    bench.register(run="new")
    turns_until(clock + 6.0)
    assert "new" in worker.served
    monkeypatch.undo()
    worker._close()


def test_a_draining_run_works_its_queue_off_and_a_trainer_stops_sending(
    bench: Bench, service: RunningService, workers: Nest
) -> None:
    bench.begin()
    queued = [post(bench, service, name) for name in "abc"]
    become(service, "draining")
    refused = post(bench, service, "d")
    assert (refused.status_code, refused.json()["type"]) == (409, "urn:draftalign:run-closed")
    assert "Retry-After" not in refused.headers
    assert len(bench.spooled()) == 3, "nothing of it was kept"
    sender = RolloutSender(service.url, run="default", patience_seconds=60.0)
    assert sender.submit([bench.world.rollout_file("e")])
    assert sender.flush(5.0), "it is not tried again"
    assert sender.refused
    assert not sender.submit([bench.world.rollout_file("f")]), "and nothing more is sent"
    assert (sender.stats()["retries"], sender.stats()["dropped_error"]) == (0, 2)
    assert "draining by ada (a test)" in sender.stats()["last_error"]
    again = service.client.put("/runs/default", content=bench.world.run_file(), headers=HEADERS)
    assert again.status_code == 409, "a trainer that starts now learns it at once"
    workers.start(bench)
    for reply in queued:
        bench.wait(trained(bench, reply))
    said = service.client.get("/runs/default").json()["headline"]
    assert any("nothing is left in the queue" in text for text in (said["text"], *said["also"])), said
    become(service, "active")
    assert post(bench, service, "h").status_code == 202


def test_an_archived_run_keeps_its_drafters_and_nothing_else_is_accepted(
    bench: Bench, service: RunningService, workers: Nest
) -> None:
    bench.begin()
    workers.start(bench)
    bench.wait(trained(bench, post(bench, service, "a")))
    become(service, "paused")
    bench.wait(lambda: "not worked on until" in workers.log.read_text(), 5.0)
    waiting = [post(bench, service, name).json()["batch_id"] for name in "bcd"]
    become(service, "archived")
    bench.wait(lambda: [bench.state(b) for b in waiting] == ["skipped"] * 3, 10.0)
    assert "archived" in bench.reason(waiting[0])
    bench.wait(lambda: bench.spooled() == [])  # a file goes after its entry has ended
    assert bench.queue.depth() == (0, 0)
    version = service.client.get("/drafter/latest").json()["version"]
    assert service.client.get(f"/drafter/{version}/model.safetensors").status_code == 200
    for path in ("/alpha", "/drafters", "/runs/default", f"/rollouts/{waiting[0]}"):
        assert service.client.get(path).status_code == 200, path
    body: dict[str, Any] = {"reason": "x"}
    counts = {"reporter": "e", "engine": "e", "drafter_version": version, "rounds": 1}
    for reply in (
        post(bench, service, "e"),
        service.client.put("/runs/default", content=bench.world.run_file(), headers=HEADERS),
        service.client.put("/runs/default/head", content=bench.world.head_file(0), headers=HEADERS),
        service.client.post(f"/drafter/{version}/rollback?run=default", json=body),
        service.client.put(f"/drafter/{version}/hold?run=default", json=body),
        service.client.delete(f"/drafter/{version}/hold?run=default"),
        service.client.post("/runs/default/drift/reset"),
        service.client.post("/acceptance", json=counts | {"accepted_tokens": 1, "drafted_tokens": 4}),
    ):
        assert (reply.status_code, reply.json()["type"]) == (409, "urn:draftalign:run-closed"), reply.request.url
    assert service.client.get("/runs").json()["runs"][0]["state"] == "archived"
    become(service, "active")
    bench.wait(trained(bench, post(bench, service, "f")), 10.0)
    assert bench.totals()["batches"] == 2, "it went on from its checkpoint"


def test_a_batch_that_was_on_its_way_when_its_run_was_archived_is_swept_too(
    bench: Bench, service: RunningService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("service.worker.process.worker._LOOK_AT_ARCHIVED_SECONDS", 0.0)
    monkeypatch.setattr("service.worker.process.worker._LOOK_FOR_RUNS_SECONDS", 0.0)
    bench.begin()
    worker = Worker(bench.settings, bench.redis)
    become(service, "archived")
    worker._turn()
    late = bench.post("late")  # past the API's last look
    worker._turn()
    assert bench.state(late) == "skipped"
    assert bench.spooled() == []


def test_one_runs_state_is_not_the_others(bench: Bench, service: RunningService, workers: Nest) -> None:
    for run in ("one", "two"):
        bench.register(bench.world.run_file(drafter=bench.world.drafter()), run=run)
    become(service, "paused", "one")
    workers.start(bench)
    bodies = {run: bench.world.rollout_file("a", run=run) for run in ("one", "two")}
    batches = {run: service.post(body).json()["batch_id"] for run, body in bodies.items()}
    bench.wait(lambda: service.client.get(f"/rollouts/{batches['two']}?run=two").json()["state"] == "trained")
    assert service.client.get(f"/rollouts/{batches['one']}?run=one").json()["state"] == "queued"


def test_another_api_process_obeys_at_once(bench: Bench, service: RunningService) -> None:
    bench.begin()
    other = RunningService(state_dir=bench.layout.root, redis_url=bench.redis_url)
    try:
        become(other, "draining")
        assert post(bench, service, "a").status_code == 409
    finally:
        other.stop()


def test_a_state_that_cannot_be_read_pauses_the_run_and_says_so(bench: Bench, service: RunningService) -> None:
    bench.begin()
    bench.layout.run_state("default").write_bytes(b'{"state": "asleep"}')
    assert read_state(bench.layout, "default").state == "paused"
    assert post(bench, service, "a").status_code == 202, "nothing is lost"
    worker = Worker(bench.settings, bench.redis)
    worker._turn()
    assert worker.served == {}
    assert "cannot be read" in service.client.get("/runs/default").json()["headline"]["text"]
    assert become(service, "active")["state"] == "active"
    assert service.client.patch("/runs/default", json={"state": "asleep", "reason": "x"}).status_code == 422
    assert service.client.patch("/runs/nobody", json={"state": "paused", "reason": "x"}).status_code == 404


# --- attempts
def test_a_trainer_that_resumes_is_told_by_its_first_head_where_it_registered_at_version_0(
    bench: Bench, service: RunningService
) -> None:
    """So does a hook by default; and engines register at 0 meanwhile."""
    bench.begin()
    worker = bench.worker()

    def attempt(name: str, policies: Iterable[int]) -> None:
        for policy in policies:
            bench.post(f"{name}/{policy}", policy_version=policy, rollouts=2)
        bench.drain(worker)

    def register(version: int) -> None:
        body = bench.world.run_file(metadata={"policy_version": str(version)})
        assert service.client.put("/runs/default", content=body, headers=HEADERS).status_code == 200

    attempt("first", range(13))
    register(0)
    for version in (8, 9):
        bench.world.heads[version] = bench.world.heads[0]
        head = service.client.put("/runs/default/head", content=bench.world.head_file(version), headers=HEADERS)
        assert head.status_code == 201
    attempt("second", range(8, 14))
    register(9)
    register(0)
    attempt("third", range(9, 12))
    found = service.client.get("/alpha").json()["attempts"]
    assert [(one["first_policy"], one["last_policy"], one["batches"]) for one in found] == [
        (0, 12, 13),
        (8, 13, 6),
        (9, 11, 3),
    ]


def test_a_trainer_that_starts_again_is_shown_apart_from_its_first_attempt(
    bench: Bench, service: RunningService, workers: Nest
) -> None:
    bench.begin()
    workers.start(bench)
    for name, policy in (("first", 40), ("again", 2)):
        for n in range(8):
            bench.wait(trained(bench, post(bench, service, f"{name} {n}", policy_version=policy + n)))
    document = service.client.get("/alpha").json()
    assert document["attempt"] == 2
    assert [(one["first_policy"], one["last_policy"]) for one in document["attempts"]] == [(40, 47), (2, 9)]
    assert [point["policy_version"] for point in document["points"]] == list(range(2, 10))
    older = service.client.get("/alpha", params={"attempt": 1}).json()
    assert [point["policy_version"] for point in older["points"]] == list(range(40, 48))
    assert [e["event"] for e in older["events"]][:1] == ["published"], "the first drafter is of the first attempt"
    assert older["current"] == document["current"], "what is true now is true of the last"
    unknown = service.client.get("/alpha", params={"attempt": 3})
    assert (unknown.status_code, unknown.json()["type"]) == (404, "urn:draftalign:no-such-attempt")
    assert service.client.get("/alpha", params={"attempt": 0}).status_code == 422
