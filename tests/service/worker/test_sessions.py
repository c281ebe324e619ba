"""A trainer that is started again: its session tells the service which attempt its rollouts are of.

Real hooks, a real API and Redis, and a real worker.
"""

from __future__ import annotations

import asyncio
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from weakref import WeakKeyDictionary

import httpx
import pytest
import redis.asyncio
import torch
import torch.distributed as dist
from helpers.forked import ROOT, forks, run_fork
from helpers.ports import free_port
from helpers.service.service_fixtures import HEADERS, RunningService
from helpers.trainer.hooks_fixtures import AUX, Attach, attaching, receiver, step
from helpers.trainer.hooks_fixtures import tiny_qwen3 as tiny
from helpers.worker.worker_fixtures import Bench, World
from torch._C._distributed_c10d import HashStore, PrefixStore
from transformers import Qwen3ForCausalLM

import rl_hooks.trainer.session
import service.api.runs
import service.storage.runs
from examples.demo import child
from rl_hooks import wire
from rl_hooks.hook import DrafterHook
from rl_hooks.sending.features import as_wire
from rl_hooks.sending.registration import head_job
from rl_hooks.trainer.session import Session
from service.monitor.records import Return
from service.storage.reports.store import AsyncStore
from service.storage.runs import _sum_of, keep_head

TRAINER = Path(__file__).with_name("session_trainer.py")
FIRST, SECOND, THIRD = "1" * 32, "2" * 32, "3" * 32


@pytest.fixture(autouse=True)
def _small(bench: Bench) -> None:
    bench.world.rollouts = 4


@pytest.fixture(name="service")
def _service(serve: Callable[..., RunningService]) -> RunningService:
    return serve()


@pytest.fixture(name="attach")
def _attach(service: RunningService) -> Iterator[Attach]:
    with attaching(service.url) as attach:
        yield attach


@pytest.fixture(name="store_url")
def _store_url(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Of an object store that hosts share their state by."""
    pytest.importorskip("obstore")
    pytest.importorskip("moto")
    from helpers.service.object_fixtures import BUCKET, running_store

    for _ in running_store(monkeypatch):
        yield f"s3://{BUCKET}/state"


def attempts_of(client: httpx.Client) -> list[tuple[int, int, int]]:
    """First and last policy version of each attempt, and how many batches it has, as `GET /alpha` says."""
    found = client.get("/alpha").json()["attempts"]
    return [(one["first_policy"], one["last_policy"], one["batches"]) for one in found]


def moved(model: Qwen3ForCausalLM, seed: int, by: float = 0.15) -> None:
    """The head goes somewhere else with each seed."""
    with torch.no_grad():
        head = model.lm_head.weight
        shift = torch.randn(head.shape, generator=torch.Generator().manual_seed(seed))
        head.add_(shift * (by * head.norm() / shift.norm()))


# --- real hooks
@pytest.mark.parametrize("died_at", [0, 1, 2, 5])
def test_a_trainer_that_begins_again_at_step_0_is_another_attempt_however_early_it_died(
    attach: Attach, bench: Bench, service: RunningService, died_at: int
) -> None:
    model = tiny()
    start = {name: value.clone() for name, value in model.state_dict().items()}
    hook = attach(model)
    worker = bench.worker()
    for version in range(died_at + 1):
        step(hook, model, version)
        moved(model, version)
    bench.drain(worker)
    hook.close(5.0)
    model.load_state_dict(start)
    again = attach(model)
    for version in range(3):
        step(again, model, version)
        moved(model, 100 + version)
    bench.drain(worker)
    assert bench.queue.counters()["dead_total"] == 0
    assert attempts_of(service.client) == [(0, died_at, died_at + 1), (0, 2, 3)]
    points = service.client.get("/alpha").json()["points"]
    assert [(one["policy_version"], one["rollouts"]) for one in points] == [(0, 4), (1, 4), (2, 4)]


@pytest.mark.parametrize(
    ("resumes_at", "expected"),
    [(2, [(0, 3, 4), (2, 4, 3)]), (3, [(0, 5, 7)]), (4, [(0, 6, 7)]), (6, [(0, 8, 7)])],
)
def test_a_trainer_that_resumes_goes_on_with_the_curve_or_branches_off_where_it_went_back(
    attach: Attach, bench: Bench, service: RunningService, resumes_at: int, expected: list[tuple[int, int, int]]
) -> None:
    """It registers at version 0 wherever it resumes, as many trainers do. A step back by one is told apart too."""
    model = tiny()
    hook = attach(model)
    worker = bench.worker()
    for version in range(4):
        step(hook, model, version)
    bench.drain(worker)
    hook.close(5.0)
    resumed = attach(model)
    for version in range(resumes_at, resumes_at + 3):
        step(resumed, model, version)
    bench.drain(worker)
    assert attempts_of(service.client) == expected
    resumed.close(5.0)
    step(attach(model), model, resumes_at + 1)
    bench.drain(worker)
    assert attempts_of(service.client) == [*expected, (resumes_at + 1, resumes_at + 1, 1)]
    assert bench.queue.counters()["dead_total"] == 0


def test_a_head_of_the_next_attempt_meets_no_batch_of_the_one_before(attach: Attach, bench: Bench) -> None:
    """It died at version 1, so no batch is of a higher version than the head that replaces its own."""
    model = tiny()
    start = {name: value.clone() for name, value in model.state_dict().items()}
    hook = attach(model)
    worker = bench.worker(recent_tokens=100_000)
    step(hook, model, 0)
    moved(model, 1, by=0.02)
    step(hook, model, 1)
    bench.drain(worker)
    abandoned = set(worker.learner.recent.names())
    assert len(abandoned) == 2
    hook.close(5.0)
    model.load_state_dict(start)
    again = attach(model)
    for version in range(3):
        step(again, model, version)
        moved(model, 100 + version, by=0.02)
        bench.drain(worker)
    kept = worker.learner.recent.but([])
    assert [one.policy_version for one in kept if one.name in abandoned] == [0], "of version 0 it has the same weights"
    assert len(kept) == 4
    assert bench.queue.counters()["dead_total"] == 0


def test_a_batch_that_waited_until_its_head_was_replaced_is_not_scored_with_the_next_attempts(
    attach: Attach, bench: Bench
) -> None:
    model = tiny()
    start = {name: value.clone() for name, value in model.state_dict().items()}
    hook = attach(model)
    worker = bench.worker()
    step(hook, model, 0)
    bench.drain(worker)
    moved(model, 1, by=0.02)
    step(hook, model, 1)  # waits
    hook.close(5.0)
    model.load_state_dict(start)
    again = attach(model)
    step(again, model, 0)
    moved(model, 2, by=0.02)
    step(again, model, 1)
    bench.drain(worker)
    assert again.stats()["dead"] == 0, "no answer since"
    step(again, model, 2)
    assert again.stats()["dead"] == 1
    assert "the trainer went back to an earlier policy version after this batch" in again.stats()["last_dead_reason"]


def test_what_a_trainer_that_was_followed_by_another_sends_late_is_skipped_and_it_is_told(
    attach: Attach, bench: Bench, service: RunningService, caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny()
    old = attach(model)
    worker = bench.worker()
    for version in range(3):
        step(old, model, version)
        bench.drain(worker)
    new = attach(model)
    step(new, model, 0)
    step(old, model, 3)
    step(new, model, 1)
    bench.drain(worker)
    assert attempts_of(service.client) == [(0, 2, 3), (0, 1, 2)]
    assert service.client.get("/runs/default").json()["latest_policy"] == 1
    assert bench.queue.counters()["skipped_total"] == 1
    assert bench.spooled() == []
    said = service.client.get("/runs/default").json()["headline"]
    assert "not used" not in " ".join([said["text"], *said["also"]]), "it may have ended, and this was under way"
    key = "da:{default}:outdated"
    first, last, session = bench.redis.get(key).decode().split()
    bench.redis.set(key, f"{int(first) - 60} {last} {session}", keepttl=True)  # as if that had been a minute ago
    step(old, model, 4)
    said = service.client.get("/runs/default").json()["headline"]
    assert (said["level"], said["state"]) == ("warn", "outdated"), "for nobody else may read that trainer's log"
    assert "give each a run name of its own" in said["text"]
    bench.redis.expire(key, bench.redis.ttl(key) - 600)  # as if that had been ten minutes ago
    assert service.client.get("/runs/default").json()["headline"]["state"] != "outdated"
    step(old, model, 5)
    assert bench.redis.get(key).decode().split()[2:] == [session]
    warnings = [r.getMessage() for r in caplog.records if "are not used any more" in r.getMessage()]
    assert len(warnings) == 1
    assert "give each a run name of its own" in warnings[0]


def test_a_head_that_a_trainer_sends_after_another_has_followed_it_hides_none_of_the_next_attempt(
    bench: Bench, service: RunningService
) -> None:
    """Without that, the batches of the version that both reach would be compared with the old trainer's head."""
    head = bench.world.heads[0]
    bench.world.heads |= {version: head + 0.01 * version * torch.ones_like(head) for version in (1, 2)}
    bench.begin()

    def put_head(version: int, session: str) -> httpx.Response:
        body = bench.world.head_file(version, session=session)
        return service.client.put("/runs/default/head", content=body, headers=HEADERS)

    def post(name: str, version: int, session: str, began: int) -> str:
        body = bench.world.rollout_file(name, policy_version=version, **told(session, began))
        return str(service.post(body).json()["batch_id"])

    worker = bench.worker()
    post("first", 0, FIRST, 0)
    assert put_head(1, FIRST).status_code == 201
    post("first again", 1, FIRST, 0)
    registered = service.client.put(
        "/runs/default", content=bench.world.run_file(metadata={"session": SECOND}), headers=HEADERS
    )
    assert registered.status_code == 200
    assert put_head(1, SECOND).status_code == 201, "it has sent no batch yet"
    post("second", 0, SECOND, 0)
    mine = bench.layout.head("default", 1).read_bytes()
    bench.world.heads[1] = bench.world.heads[2]
    late = put_head(1, FIRST)
    assert (late.status_code, late.json()["type"]) == (409, "urn:draftalign:followed")
    assert "give each a run name of its own" in late.json()["detail"]
    assert bench.layout.head("default", 1).read_bytes() == mine
    assert put_head(2, SECOND).status_code == 201
    assert put_head(2, "").status_code == 201, "an engine's tap tells no session"
    bench.drain(worker)


@pytest.mark.parametrize(("late", "dead"), [(0, 1), (1, 0), (9, 0)])
def test_a_head_of_the_old_trainer_between_the_next_ones_registration_and_its_first_batch_costs_one_version_at_most(
    attach: Attach, bench: Bench, service: RunningService, late: int, dead: int
) -> None:
    """It is taken: whether the next one will send anything is not known yet. What that sends itself hides it."""
    model = tiny()
    start = {name: value.clone() for name, value in model.state_dict().items()}
    old = attach(model)
    worker = bench.worker()
    for version in range(4):
        step(old, model, version)
        moved(model, version, by=0.2)
    bench.drain(worker)
    head = b"".join(map(bytes, head_job("default", model.lm_head.weight, late, session=old.session.id).body()))
    model.load_state_dict(start)
    new = attach(model)
    assert new.flush(20.0), "it is registered, at version 0"
    assert service.client.put("/runs/default/head", content=head, headers=HEADERS).status_code == 201
    for version in range(3):
        step(new, model, version)
        bench.drain(worker)
    assert bench.queue.counters()["dead_total"] == dead, "of the registered version alone, and with a reason"


@pytest.mark.parametrize("kind", ["directory", "objects"])
@pytest.mark.parametrize("begins", ["before the place", "amid the place"])
def test_a_head_that_is_late_by_milliseconds_hides_none_of_the_next_attempt(
    begins: str,
    kind: str,
    serve: Callable[..., RunningService],
    request: pytest.FixtureRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The next attempt begins, and sends its head to another replica, after this one has looked at the session."""
    hosts = [{"state_dir": tmp_path / "one"}] * 2
    if kind == "objects":
        hosts = [{"state_dir": tmp_path / name, "state_url": request.getfixturevalue("store_url")} for name in "ab"]
    one, other = (serve(**host) for host in hosts)
    world, begun, queued = World(), list[threading.Thread](), threading.Event()
    there_first = (kind, begins) == ("directory", "amid the place")  # then the other head waits for the run's lock
    files = list[bytes]()
    for session, by in ((FIRST, 0.01), (SECOND, 0.02)):
        world.heads[1] = world.heads[0] + by
        files.append(world.head_file(1, session=session))
    first, second = files

    def next_attempt() -> None:
        answer = other.post(world.rollout_file("second", **told(SECOND)))
        assert answer.status_code == 202, answer.text
        queued.set()
        assert other.client.put("/runs/default/head", content=second, headers=HEADERS).status_code == 201

    def after_its_begin(work: Callable[..., Any]) -> Callable[..., Any]:
        def late(*args: Any, **named: Any) -> Any:
            if not begun:
                begun.append(threading.Thread(target=next_attempt))
                begun[0].start()
                assert queued.wait(60)
                if not there_first:
                    begun[0].join()
            return work(*args, **named)

        return late

    assert one.client.put("/runs/default", content=world.run_file(), headers=HEADERS).status_code == 201
    assert one.post(world.rollout_file("first", **told(FIRST))).status_code == 202
    if begins == "before the place":
        monkeypatch.setattr(service.api.runs, "keep_head", after_its_begin(keep_head))
    else:
        monkeypatch.setattr(service.storage.runs, "_sum_of", after_its_begin(_sum_of))
    late = one.client.put("/runs/default/head", content=first, headers=HEADERS)
    begun[0].join()
    assert late.status_code == (201 if there_first else 409), late.text
    one.layout.pull("default")
    assert one.layout.head("default", 1).read_bytes() == second


def test_a_head_that_comes_while_its_run_is_deleted_is_not_there_for_the_next_run_of_its_name(
    serve: Callable[..., RunningService], monkeypatch: pytest.MonkeyPatch
) -> None:
    api, world = serve(), World()

    def keep(*args: Any, **named: Any) -> None:
        assert api.client.delete("/runs/default").status_code == 204
        keep_head(*args, **named)

    assert api.client.put("/runs/default", content=world.run_file(), headers=HEADERS).status_code == 201
    monkeypatch.setattr(service.api.runs, "keep_head", keep)
    late = api.client.put("/runs/default/head", content=world.head_file(0), headers=HEADERS)
    assert (late.status_code, late.json()["type"]) == (404, "urn:draftalign:no-such-run")
    assert not api.layout.head("default", 0).exists()


def test_a_trainer_that_loads_an_earlier_checkpoint_in_the_same_process_still_opens_an_attempt(
    attach: Attach, bench: Bench, service: RunningService
) -> None:
    """The hook says so with its head. The next session begins above the versions that it reached then."""
    model = tiny()
    hook = attach(model)
    worker = bench.worker()
    for version in [*range(7), *range(2, 5)]:
        step(hook, model, version)
        bench.drain(worker)
    hook.close(5.0)
    resumed = attach(model)
    step(resumed, model, 5)
    bench.drain(worker)
    assert attempts_of(service.client) == [(0, 6, 8), (3, 5, 3)]


def test_what_an_engine_sends_beside_a_trainer_opens_no_attempt(
    attach: Attach, bench: Bench, service: RunningService
) -> None:
    """It says version 0 eight times in a row and more; the trainer goes on in the same attempt."""
    model = tiny()
    with receiver() as tap:
        engine = DrafterHook(model, tap.url, aux_layers=AUX)
        engine.session.id = ""
        for number in range(10):
            with engine.capture(**_rollout(number)):
                model(_rollout(number)["input_ids"])
        assert engine.close(20)
        files = [one.body for one in tap.rollouts()]
    hook = attach(model)
    worker = bench.worker()
    for version in (0, 20, 21):
        step(hook, model, version)
    for body in files:
        assert service.post(body).status_code == 202
    step(hook, model, 22)
    bench.drain(worker)
    assert attempts_of(service.client) == [(0, 22, 14)]


def _rollout(number: int) -> dict[str, Any]:
    ids = torch.randint(2, 50, (1, 12), generator=torch.Generator().manual_seed(number))
    mask = torch.ones_like(ids)
    mask[:, :3] = 0
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "loss_mask": mask, "policy_version": 0}


# --- what a session is
def test_a_hook_says_its_session_in_all_that_it_sends() -> None:
    model = tiny()
    with receiver() as service:
        for began in (4, 9):
            hook = DrafterHook(model, service.url, aux_layers=AUX, policy_version=began)
            for version in (began, began + 1):
                step(hook, model, version)
                moved(model, version)
            hook.close(5.0)
        said = [wire.parse_header(one.body).metadata for one in service.requests if one.method in ("PUT", "POST")]
    kinds = [one["format"].split(".")[1] for one in said]
    assert kinds == ["run", "rollouts", "head", "rollouts"] * 2
    sessions = [one["session"] for one in said]
    assert [len(set(sessions[:4])), len(set(sessions[4:])), len(set(sessions))] == [1, 1, 2]
    assert all(wire.SESSION.fullmatch(one) for one in sessions)
    began_at = [one.get("session_began") for one in said]
    assert began_at == [None, "4", None, "4", None, "9", None, "9"]


@pytest.mark.parametrize("told_by", ["WORLD_SIZE", "OMPI_COMM_WORLD_SIZE"])
def test_ranks_that_no_process_group_joins_and_nobody_tells_their_rank_are_named_by_the_hook_and_all_are_used(
    attach: Attach,
    bench: Bench,
    service: RunningService,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    told_by: str,
) -> None:
    monkeypatch.setenv(told_by, "2")
    model = tiny()
    hooks = [attach(model) for _ in range(2)]
    for version in range(2):
        for hook in hooks:
            step(hook, model, version)
    (said, again) = (r.getMessage() for r in caplog.records if "which this hook was not told" in r.getMessage())
    assert said == again
    assert f"{told_by}=2" in said
    assert "rank= and world_size=" in said
    bench.drain(bench.worker())
    counters = bench.queue.counters()
    assert (counters["accepted_total"], counters["skipped_total"], counters["dead_total"]) == (4, 0, 0)


def test_a_hook_that_is_told_of_its_rank_is_not_warned_of_it(
    service: RunningService, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in range(2):
        DrafterHook(tiny(), service.url, aux_layers=AUX, rank=rank, world_size=2).close(0.0)
    assert "was not told" not in caplog.text


def test_ranks_that_nothing_tells_of_each_other_are_named_by_the_service(
    attach: Attach, bench: Bench, service: RunningService, caplog: pytest.LogCaptureFixture
) -> None:
    """Each is taken for a trainer of its own, and the last one to come goes on; the others hear why they do not."""
    model = tiny()
    hooks = [attach(model) for _ in range(3)]
    for version in range(2):
        for hook in hooks:
            step(hook, model, version)
    bench.drain(bench.worker())
    counters = bench.queue.counters()
    assert (counters["accepted_total"], counters["skipped_total"]) == (6, 2)
    warned = [r.getMessage() for r in caplog.records if "rollouts of this trainer are not used" in r.getMessage()]
    assert len(warned) == 2
    assert all("if they are ranks of one trainer, tell each hook its rank and world_size" in text for text in warned)
    key = "da:{default}:outdated"
    lines = [line.split() for line in bench.redis.get(key).decode().splitlines()]
    ago = "\n".join(f"{int(first) - 60} {last} {session}" for first, last, session in lines)  # as if since a minute
    bench.redis.set(key, ago, keepttl=True)
    for hook in hooks:  # they send in turn
        step(hook, model, 2)
    assert service.client.get("/runs/default").json()["headline"]["state"] == "outdated"


@pytest.mark.parametrize(("rank", "world_size"), [(1, 1), (0, 2), (1, 2)])
def test_ranks_that_no_process_group_joins_have_no_session(rank: int, world_size: int) -> None:
    assert Session("default", rank, world_size).of_rollouts() == {}
    assert Session("default", rank, world_size).of_run() == {}


def test_what_says_that_there_are_more_ranks_is_heeded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert Session("default", 0, 1).id == ""
    monkeypatch.setenv("WORLD_SIZE", "two")
    assert Session("default", 0, 1).id == "", "whatever it means"


@pytest.mark.parametrize("restarted", [False, True], ids=["in the same process", "by torchrun, in another"])
def test_a_process_group_that_is_made_again_over_the_same_store_begins_another_session(
    monkeypatch: pytest.MonkeyPatch, restarted: bool
) -> None:
    """As under torchrun, whose store stays. The ids of before may be of earlier attempts: their files are skipped."""
    store = HashStore()
    found = list[str]()
    for _ in range(2):
        if restarted:
            monkeypatch.setattr(rl_hooks.trainer.session, "_made", WeakKeyDictionary())
        dist.init_process_group("gloo", store=PrefixStore("same", store), rank=0, world_size=1)
        try:
            found += [_of_several("a").id for _ in range(2)]
        finally:
            dist.destroy_process_group()
    assert len(set(found)) == 4


def _of_several(run: str) -> Session:
    """Of rank 0 where the group says that there are two."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "get_world_size", lambda: 2)
        return Session(run, 0, 2)


# --- over HTTP
def told(session: str, began: int = 0, **more: str) -> dict[str, Any]:
    return {"extra": {"session": session, "session_began": str(began), **more}}


def test_an_attempt_begins_where_the_session_began_also_where_its_first_rollouts_are_lost(
    bench: Bench, service: RunningService
) -> None:
    bench.begin()
    worker = bench.worker()

    def post(name: str, version: int, session: str, began: int) -> str:
        reply = service.post(bench.world.rollout_file(name, policy_version=version, **told(session, began)))
        assert reply.status_code == 202, reply.text
        state: str = reply.json()["state"]
        return state

    for version in range(3):
        post(f"first {version}", version, FIRST, 0)
    assert post("second", 7, SECOND, 0) == "queued", "it began at 0, and the service was away until now"
    assert post("second late", 0, SECOND, 0) == "queued"
    assert post("another rank, late", 6, SECOND, 5) == "queued"
    assert post("third goes on", 8, THIRD, 8) == "queued"
    assert post("first is late", 2, FIRST, 0) == "skipped"
    assert post("second goes on as well", 8, SECOND, 0) == "queued", "of the same attempt as the third"
    bench.drain(worker)
    assert attempts_of(service.client) == [(0, 2, 3), (0, 8, 5)]


def test_a_session_begins_at_the_registration_for_what_engines_count(bench: Bench, service: RunningService) -> None:
    bench.begin()
    for version in range(2):
        service.post(bench.world.rollout_file(f"a{version}", policy_version=version, **told(FIRST)))
    file = bench.world.run_file(metadata={"session": SECOND})
    for _ in range(2):
        assert service.client.put("/runs/default", content=file, headers=HEADERS).status_code == 200
    (mark,) = bench.store.returns()
    assert (mark.to, mark.attempt) == (0, 0), "once; a sign for no batch"
    service.post(bench.world.rollout_file("b0", policy_version=0, **told(SECOND)))
    assert bench.store.returns() == [mark]
    service.post(bench.world.rollout_file("c0", policy_version=0, **told(THIRD)))
    assert [(one.to, one.attempt) for one in bench.store.returns()] == [(0, 0), (0, 0)], "it has not registered"
    assert isinstance(mark, Return)


def test_a_session_that_registered_above_where_it_begins_is_told_as_a_return_by_its_first_batch(
    bench: Bench, service: RunningService
) -> None:
    bench.begin()
    service.post(bench.world.rollout_file("a0", policy_version=0, **told(FIRST)))
    file = bench.world.run_file(metadata={"session": SECOND, "policy_version": "9"})
    assert service.client.put("/runs/default", content=file, headers=HEADERS).status_code == 200
    assert bench.store.returns() == []
    service.post(bench.world.rollout_file("b0", policy_version=0, **told(SECOND)))
    assert [(one.to, one.attempt) for one in bench.store.returns()] == [(0, 0)]


def test_of_more_sessions_of_one_attempt_than_are_remembered_the_newest_are(
    bench: Bench, service: RunningService
) -> None:
    """Each goes on where the one before ended. Ids say nothing: here each is below all that came before it."""
    bench.begin()
    bench.world.heads |= dict.fromkeys(range(9), bench.world.heads[0])
    for version in (4, 5):
        service.post(bench.world.rollout_file(f"first {version}", policy_version=version, **told("f" * 32, 4)))
    for number in range(300, 0, -1):
        file = bench.world.rollout_file(f"{number}", policy_version=5, rollouts=1, **told(f"{number:032x}", 5))
        assert service.post(file).json()["state"] == "queued"
    last = f"{0:032x}"
    for version in (6, 7, 8):
        service.post(bench.world.rollout_file(f"last {version}", policy_version=version, **told(last, 6)))
    assert bench.redis.get("da:{default}:attempt") == b"1 4 8"
    assert bench.redis.zcard("da:{default}:sessions") == 256


def test_a_trainer_that_goes_back_as_another_begins_does_not_take_the_attempt_back(
    bench: Bench, service: RunningService
) -> None:
    """The other's first rollouts come while its head is noted."""
    bench.begin()
    for version in range(4):
        service.post(bench.world.rollout_file(f"a{version}", policy_version=version, **told(FIRST)))

    class Slow(redis.asyncio.Redis):
        async def execute_command(self, *args: Any, **options: Any) -> Any:
            if args[0] in ("SET", "EVAL") and "da:{default}:attempt" in args:
                await asyncio.to_thread(service.post, bench.world.rollout_file("b", **told(SECOND)))
            return await super().execute_command(*args, **options)  # type: ignore[no-untyped-call]

    async def note() -> None:
        async with Slow.from_url(bench.redis_url) as client:
            await AsyncStore(client, "default").note_head(1, went_back=True, session=FIRST)

    asyncio.run(note())
    assert bench.redis.get("da:{default}:attempt") == b"2 0 0"


def test_of_a_run_that_told_no_sessions_before_it_is_guessed_as_ever(bench: Bench, service: RunningService) -> None:
    bench.begin()
    worker = bench.worker()
    for version in range(10):
        service.post(bench.world.rollout_file(f"a{version}", policy_version=version))
    file = bench.world.run_file(metadata={"session": FIRST})
    assert service.client.put("/runs/default", content=file, headers=HEADERS).status_code == 200
    for version in range(4):
        service.post(bench.world.rollout_file(f"b{version}", policy_version=version, **told(FIRST)))
    bench.drain(worker)
    assert attempts_of(service.client) == [(0, 9, 10), (0, 3, 4)]


def test_a_duplicate_of_a_session_that_was_followed_is_a_duplicate(bench: Bench, service: RunningService) -> None:
    bench.begin()
    file = bench.world.rollout_file("a", **told(FIRST))
    assert service.post(file).status_code == 202
    assert service.post(bench.world.rollout_file("b", **told(SECOND))).status_code == 202
    again = service.post(file)
    assert (again.status_code, again.json()["duplicate"], again.json()["state"]) == (200, True, "queued")
    late = bench.world.rollout_file("c", **told(FIRST))
    first, second = service.post(late), service.post(late)
    assert (first.status_code, first.json()["state"], first.json()["duplicate"]) == (202, "skipped", False)
    assert (second.status_code, second.json()["state"], second.json()["duplicate"]) == (200, "skipped", True)
    found = service.client.get(f"/rollouts/{first.json()['batch_id']}").json()
    assert (found["state"], found["reason"]) == ("skipped", "it came after a later start of the trainer had begun")
    retried = service.client.post(f"/runs/default/dead/{first.json()['batch_id']}/retry")
    assert (retried.status_code, retried.json()["state"], retried.json()["put_back"]) == (200, "skipped", False)
    counters = bench.queue.counters()
    assert (counters["accepted_total"], counters["acked_total"], counters["skipped_total"]) == (3, 1, 1)
    assert len(bench.spooled()) == 2


def test_a_dead_batch_that_is_put_back_stays_of_its_attempt(bench: Bench, service: RunningService) -> None:
    """Also where the newest batch is of the same policy version, so that nothing else says that it is belated."""
    bench.begin()
    worker = bench.worker()

    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        tensors["logprobs"][4:] -= 3.0 * (tensors["logprobs"][4:] < 0)

    dead = service.post(bench.world.rollout_file("a", change=spoil, **told(FIRST))).json()["batch_id"]
    service.post(bench.world.rollout_file("b", **told(FIRST)))
    bench.drain(worker)
    assert bench.state(dead) == "dead"
    service.post(bench.world.rollout_file("c", **told(SECOND)))
    assert service.client.post(f"/runs/default/dead/{dead}/retry").status_code < 300
    (entry,) = [one for one in bench.queue.unfinished() if one.batch_id == dead]
    assert (entry.attempt, entry.belated) == (1, True)


def test_a_batch_that_came_before_its_own_head_outlives_its_attempt(bench: Bench, service: RunningService) -> None:
    """Another rank's, while rank 0's head is on its way. It waits until the next attempt has begun."""
    bench.begin()
    bench.world.move_head(1)
    bench.world.heads[2] = bench.world.heads[1]
    early = service.post(bench.world.rollout_file("a1", policy_version=1, **told(FIRST, 1))).json()["batch_id"]
    time.sleep(0.05)
    bench.put_head(1)
    time.sleep(0.05)
    service.post(bench.world.rollout_file("a2", policy_version=2, **told(FIRST, 1)))
    service.post(bench.world.rollout_file("b1", policy_version=1, **told(SECOND, 1)))
    bench.drain(bench.worker())
    assert (bench.state(early), bench.reason(early)) == ("trained", "")
    assert attempts_of(service.client) == [(1, 2, 2), (1, 1, 1)]


def test_what_an_engine_sends_before_the_next_attempts_first_batch_does_not_hide_whose_head_it_is(
    bench: Bench, service: RunningService
) -> None:
    bench.begin()
    bench.world.move_head(1)
    bench.put_head(1)
    waits = service.post(bench.world.rollout_file("a1", policy_version=1, **told(FIRST, 1))).json()["batch_id"]
    time.sleep(0.05)
    bench.world.move_head(1, seed=2)
    bench.put_head(1)
    time.sleep(0.05)
    for name, session in (("engine", {}), ("b1", told(SECOND, 1))):
        service.post(bench.world.rollout_file(name, policy_version=1, **session))
    bench.drain(bench.worker())
    assert bench.state(waits) == "dead"
    assert bench.reason(waits).startswith("the trainer went back")


@pytest.mark.parametrize(
    ("metadata", "field"),
    [
        ({"session": "x" * 32}, "session"),
        ({"session": "A" * 32}, "session"),
        ({"session": "1" * 31}, "session"),
        ({"session": "1" * 33}, "session"),
        ({"session": "1" * 100_000}, "session"),
        ({"session": FIRST + "\n"}, "session"),
        ({"session": "٠" * 32}, "session"),
        ({"session": FIRST, "session_began": "-1"}, "session_began"),
        ({"session": FIRST, "session_began": "1e3"}, "session_began"),
        ({"session": FIRST, "session_began": "9" * 16}, "session_began"),
        ({"session": FIRST}, "session_began"),
    ],
)
def test_a_session_that_is_none_is_refused_by_api_and_worker(
    bench: Bench, service: RunningService, metadata: dict[str, str], field: str
) -> None:
    bench.begin()
    good = bench.world.rollout_file("good", **told(FIRST))
    bad = bench.world.rollout_file("bad", extra=metadata)
    refused = service.post(bad)
    assert (refused.status_code, refused.json()["field"]) == (422, field), refused.text
    assert len(refused.text) < 1000
    if field == "session":
        run = bench.world.run_file(metadata=metadata)
        assert service.client.put("/runs/default", content=run, headers=HEADERS).status_code == 422
        meta = {"format": wire.HEAD_FORMAT, "policy_version": "1", **metadata}
        head = b"".join(map(bytes, wire.encode({"lm_head": as_wire(bench.world.heads[0])}, meta)))
        assert service.client.put("/runs/default/head", content=head, headers=HEADERS).status_code == 422
    # The worker reads the file again: one that came another way dies, and takes nobody with it.
    header = wire.check_rollout_header(wire.parse_header(good))
    with bench.spool.upload() as upload:
        upload.write(bad)
        blob = bench.spool.new_blob(header.batch_id, upload.digest)
        upload.keep(bench.layout.blob("default", blob))
    bench.enqueue("default", bench._spooled(header, blob, len(bad)))
    worker = bench.worker()
    bench.drain(worker)
    assert bench.state(header.batch_id) == "dead"
    assert field in bench.reason(header.batch_id)
    service.post(bench.world.rollout_file("after", **told(FIRST)))
    bench.drain(worker)
    assert bench.queue.counters()["acked_total"] == 1


def test_a_session_of_another_type_is_no_safetensors_file(bench: Bench, service: RunningService) -> None:
    bench.begin()
    body = bench.world.rollout_file("a", **told(FIRST))
    size = int.from_bytes(body[:8], "little")
    header = json.loads(body[8 : 8 + size])
    for value in (7, None, ["1" * 32], {"a": 1}):
        header["__metadata__"]["session"] = value
        text = json.dumps(header).encode()
        reply = service.post(len(text).to_bytes(8, "little") + text + body[8 + size :])
        assert reply.status_code == 422, value
    assert bench.queue.counters()["accepted_total"] == 0


def test_sessions_without_end_are_bounded_and_the_last_attempts_stay(bench: Bench, service: RunningService) -> None:
    bench.begin()
    bench.world.heads[5] = bench.world.heads[0]
    service.post(bench.world.rollout_file("first", policy_version=5, **told(FIRST, 5)))
    for number in range(300):
        run = bench.world.run_file(metadata={"session": f"{number:032x}"})
        assert service.client.put("/runs/default", content=run, headers=HEADERS).status_code == 200
    assert bench.redis.zcard("da:{default}:sessions") <= 256
    service.post(bench.world.rollout_file("again", policy_version=4, **told(FIRST, 5)))
    assert bench.redis.get("da:{default}:attempt") == b"1 4 5"
    assert len(bench.store.returns()) == 64


# --- processes
@contextmanager
def trainer(url: str, *words: int) -> Iterator[None]:
    """Until all that it has to send is sent; then SIGKILL."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with TemporaryDirectory() as place:
        said, errors = Path(place, "said"), Path(place, "errors")
        process = forks("trainer").fork(str(TRAINER), [url, *map(str, words)], environment, said, errors=errors)
        try:
            wait_for(lambda: said.read_text() == "sent\n" or process.poll() is not None)
            assert process.poll() is None, errors.read_text()
            yield
        finally:
            process.kill()
            process.wait()


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while True:
        with suppress(httpx.TransportError):
            if condition():
                return
        assert time.monotonic() < deadline, "nothing happened in 120 s"
        time.sleep(0.1)


@pytest.mark.slow
def test_trainers_that_are_killed_at_version_1_are_told_apart_by_the_whole_service_after_a_restart_of_it_too(
    tmp_path: Path,
) -> None:
    """`draftalign up` with its own Valkey and worker, and trainers as processes that end by SIGKILL."""
    port = free_port()
    up = ["service.cli", "up", "--port", str(port), "--state-dir", str(tmp_path / "state")]
    settings = {"DRAFTALIGN_VOCAB_MIN_TOKENS": "20", "DRAFTALIGN_DRAFT_VOCAB_SIZE": "16"}
    with httpx.Client(base_url=f"http://127.0.0.1:{port}") as client:

        def are(expected: list[tuple[int, int, int]]) -> Callable[[], bool]:
            return lambda: attempts_of(client) == expected

        with child("up", up, settings):
            wait_for(lambda: client.get("/readyz").is_success)
            with trainer(str(client.base_url), 0, 1):
                pass
            wait_for(are([(0, 1, 2)]))  # a next attempt's head of version 1 would come before its batch is looked at
            with trainer(str(client.base_url), 0, 1):
                pass
            wait_for(are([(0, 1, 2), (0, 1, 2)]))
        with child("up", up, settings):
            wait_for(lambda: client.get("/readyz").is_success)
            assert attempts_of(client) == [(0, 1, 2), (0, 1, 2)]
            with trainer(str(client.base_url), 0, 2):
                pass
            wait_for(are([(0, 1, 2), (0, 1, 2), (0, 2, 3)]))


@pytest.mark.slow
def test_the_ranks_of_a_trainer_are_of_one_session(bench: Bench, service: RunningService) -> None:
    """Two processes in a gloo group, started twice: each start is one attempt, whichever rank's rollouts come first."""
    words = service.url, "0", "1", "2"
    for _ in range(2):
        done = run_fork("trainer", str(TRAINER), *words, directory=ROOT, environment=os.environ, seconds=200)
        assert done.returncode == 0, done.stderr
        bench.drain(bench.worker())
    assert attempts_of(service.client) == [(0, 1, 4), (0, 1, 4)]
    assert bench.redis.zcard("da:{default}:sessions") == 2
    assert bench.queue.counters()["skipped_total"] == 0
