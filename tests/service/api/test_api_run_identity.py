"""Another policy under the same name: what is near is the same run, what is not is refused with what differs."""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import httpx
import numpy as np
import numpy.typing as npt
import pytest
import torch
from attacks.runs import SIZES, drafter_tensors
from helpers.service.service_fixtures import (
    CONFIG,
    HEADERS,
    HIDDEN,
    LAYERS,
    VOCAB,
    RunningService,
    f32,
    head_file,
    i32,
    joined,
    rollout_file,
    run_file,
)
from helpers.worker.death_fixtures import Stopped, die_in
from helpers.worker.record_fixtures import gauges
from redis import Redis

from drafter.files.checkpoint import export_config
from rl_hooks import wire
from rl_hooks.sending.features import as_wire
from service.storage import runs
from service.storage.reports.store import Store
from service.storage.runs import commit_run, crc32_of, load_run, read_run_header
from service.storage.spool import Spool
from service.worker.target import Target

FloatArray: TypeAlias = npt.NDArray[np.float32]


def weights(seed: int = 0, rows: int = VOCAB) -> FloatArray:
    return np.random.default_rng(seed).standard_normal((rows, HIDDEN)).astype(np.float32)


def moved(head: FloatArray, by: float, seed: int = 9) -> FloatArray:
    """The head, moved by this share of its norm."""
    step = np.random.default_rng(seed).standard_normal(head.shape).astype(np.float32)
    return (head + step * (by * np.linalg.norm(head) / np.linalg.norm(step))).astype(np.float32)


def as_bf16(array: FloatArray) -> wire.Tensor:
    return as_wire(torch.from_numpy(array).bfloat16())


def f32_of(array: FloatArray) -> wire.Tensor:
    return wire.Tensor.of(array, "F32")


def policy(embed: FloatArray, head: FloatArray | None = None) -> dict[str, wire.Tensor]:
    """Tensors of a registration; tied where no head is given."""
    return {"embed_tokens": f32_of(embed)} | ({} if head is None else {"lm_head": f32_of(head)})


def put_policy(
    service: RunningService, tensors: dict[str, wire.Tensor], run: str = "r", **metadata: str
) -> httpx.Response:
    body = joined(wire.encode(tensors, {**wire.parse_header(run_file()).metadata, **metadata}))
    return service.client.put(f"/runs/{run}", content=body, headers=HEADERS)


def put_head(service: RunningService, version: int, tensors: dict[str, wire.Tensor], run: str = "r") -> httpx.Response:
    meta = {"format": wire.HEAD_FORMAT, "policy_version": str(version)}
    return service.client.put(f"/runs/{run}/head", content=joined(wire.encode(tensors, meta)), headers=HEADERS)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_another_policy_of_the_same_sizes_is_a_conflict_that_says_what_differs(
    bare: RunningService, tied: bool
) -> None:
    mine = policy(weights(0), None if tied else weights(1))
    assert put_policy(bare, mine).status_code == 201
    before = {p: p.read_bytes() for p in bare.layout.run("r").rglob("*") if p.is_file()}
    config = json.dumps(CONFIG | {"rope_theta": 5.0})
    reply = put_policy(bare, policy(weights(2), None if tied else weights(3)), config=config)
    assert (reply.status_code, reply.json()["type"]) == (409, "urn:draftalign:run-conflict")
    tensor = "embed_tokens" if tied else "lm_head"
    assert re.search(
        rf"run 'r' is another policy's: this {tensor} is 1\.\d\d from .* the one registered with it "
        r".*cosine -?0\.\d\d\).*another run name.*rope_theta 5\.0 \(the run's: None\)",
        reply.json()["detail"],
    )
    assert {p: p.read_bytes() for p in bare.layout.run("r").rglob("*") if p.is_file()} == before
    assert bare.spooled() == []
    assert put_policy(bare, mine).status_code == 200


def test_another_embedding_with_the_same_head_is_a_conflict(bare: RunningService) -> None:
    assert put_policy(bare, policy(weights(0), weights(1))).status_code == 201
    reply = put_policy(bare, policy(weights(2), weights(1)))
    assert reply.status_code == 409
    assert "this embed_tokens is 1." in reply.json()["detail"]


@pytest.mark.parametrize("by", [0.0, 0.004, 0.1, 0.4])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_a_policy_that_moved_is_let_in_and_its_head_is_known_from_its_version_on(
    bare: RunningService, tied: bool, by: float
) -> None:
    first = weights(1)
    assert put_policy(bare, policy(first if tied else weights(0), None if tied else first)).status_code == 201
    now = moved(first, by) if by else first
    reply = put_policy(bare, policy(now if tied else weights(0), None if tied else now), policy_version="7")
    assert reply.status_code == 200
    target = Target.open(bare.layout, "r")
    assert np.array_equal(target.at(6).needed_head().lm_head.numpy(), first)
    assert np.array_equal(target.at(7).needed_head().lm_head.numpy(), now)
    assert reply.json()["latest_head"] == (7 if by else None), "the same head is not kept twice"
    assert bare.spooled() == []


def heads_in_force(service: RunningService, *versions: int) -> list[FloatArray]:
    target = Target.open(service.layout, "r")
    return [target.at(version).needed_head().lm_head.numpy() for version in versions]


def run_ahead(service: RunningService) -> tuple[FloatArray, FloatArray, FloatArray]:
    """A run at version 50 whose head has moved at 40 and at 50; returns its embedding, first and newest head."""
    embed, first = weights(0), weights(1)
    halfway = moved(first, 0.3)
    now = moved(halfway, 0.3, seed=10)
    assert put_policy(service, policy(embed, first)).status_code == 201
    for version, head in ((40, halfway), (50, now)):
        assert put_head(service, version, {"lm_head": f32_of(head)}).status_code == 201
    return embed, first, now


@pytest.mark.parametrize("by", [0.0, 0.001])
def test_a_trainer_that_goes_back_is_not_caught_up_by_the_heads_of_before(bare: RunningService, by: float) -> None:
    embed, first, _ = run_ahead(bare)
    back = moved(first, by) if by else first
    for _ in range(2):  # the answer may get lost
        assert put_policy(bare, policy(embed, back), policy_version="30").status_code == 200
    assert all(np.array_equal(found, back) for found in heads_in_force(bare, 30, 40, 50, 60))
    assert np.array_equal(heads_in_force(bare, 29)[0], first)
    again = moved(back, 0.2)
    assert put_head(bare, 45, {"lm_head": f32_of(again)}).status_code == 201
    for found, wanted in zip(heads_in_force(bare, 44, 45, 50, 60), (back, again, again, again), strict=True):
        assert np.array_equal(found, wanted)


@pytest.mark.parametrize("by", [0.0, 0.001, 0.1])
@pytest.mark.parametrize("synced", [False, True], ids=["the weights on its disk", "the policy's"])
def test_an_engine_that_joins_under_version_0_hides_no_head(bare: RunningService, by: float, synced: bool) -> None:
    embed, first, now = run_ahead(bare)
    before = heads_in_force(bare, 40, 50, 60)
    held = now if synced else first
    held = moved(held, by) if by else held
    for _ in range(2):  # two engines
        assert put_policy(bare, policy(embed, held)).status_code == 200
    for found, wanted in zip(heads_in_force(bare, 0, 40, 50, 60), (held, *before), strict=True):
        assert np.array_equal(found, wanted)


def test_the_head_that_comes_later_counts_also_where_the_clock_was_set_back(bare: RunningService) -> None:
    run_ahead(bare)
    later = time.time_ns() + 3600 * 10**9
    os.utime(bare.layout.head("r", 50), ns=(later, later))
    head = moved(weights(1), 0.2)
    for version in (45, 51):
        assert put_head(bare, version, {"lm_head": f32_of(head)}).status_code == 201
        assert np.array_equal(heads_in_force(bare, 60)[0], head)
        head = moved(head, 0.2)


def test_a_cast_of_the_same_policy_is_let_in(bare: RunningService) -> None:
    assert put_policy(bare, policy(weights(0), weights(1))).status_code == 201
    for cast in (as_bf16, lambda array: wire.Tensor.of(array.astype(np.float16), "F16")):
        tensors = {"embed_tokens": cast(weights(0)), "lm_head": cast(weights(1))}
        assert put_policy(bare, tensors).status_code == 200
    assert put_policy(bare, {"embed_tokens": as_bf16(weights(2)), "lm_head": as_bf16(weights(3))}).status_code == 409


def test_heads_drift_as_far_as_they_like_step_by_step_and_a_trainer_resumes_there(bare: RunningService) -> None:
    """Compared with the nearest head that the run has known."""
    embed, head = weights(0), weights(1)
    assert put_policy(bare, policy(embed, head)).status_code == 201
    now = head
    for version in range(1, 9):
        now = moved(now, 0.45, seed=100 + version)
        assert put_head(bare, version, {"lm_head": f32_of(now)}).status_code == 201
    assert np.linalg.norm(now - head) > 0.8 * max(np.linalg.norm(now), np.linalg.norm(head)), "far from the first"
    assert put_policy(bare, policy(embed, moved(now, 0.01)), policy_version="9").status_code == 200
    assert put_policy(bare, policy(embed, head), policy_version="0").status_code == 200, "and from the beginning"


@pytest.mark.parametrize("by", [0.7, 1.5])
def test_a_trainer_resumes_where_its_untied_embedding_has_moved_far_too(bare: RunningService, by: float) -> None:
    """Heads are sent as they move, the embedding only with the registration: it is compared with the first one."""
    embed, head = weights(0), weights(1)
    assert put_policy(bare, policy(embed, head)).status_code == 201
    now, now_embed = moved(head, 0.4), moved(embed, by)
    distance = np.linalg.norm(now_embed - embed) / np.linalg.norm(now_embed)
    assert 0.55 < distance < 0.9, "a head that far from all others would be another policy's"
    assert put_head(bare, 500, {"lm_head": f32_of(now)}).status_code == 201
    assert put_policy(bare, policy(now_embed, now), policy_version="500").status_code == 200
    assert put_policy(bare, policy(weights(2), now), policy_version="500").status_code == 409


def test_a_foreign_head_is_a_conflict_and_nothing_of_it_is_kept(bare: RunningService) -> None:
    assert put_policy(bare, policy(weights(0), weights(1))).status_code == 201
    assert put_head(bare, 3, {"lm_head": f32_of(moved(weights(1), 0.05))}).status_code == 201
    for foreign in (f32_of(weights(2)), as_bf16(weights(2))):
        reply = put_head(bare, 4, {"lm_head": foreign})
        assert reply.status_code == 409
        assert re.search(r"this lm_head is 1\.\d\d from the nearest", reply.json()["detail"])
    assert sorted(p.name for p in bare.layout.heads("r").iterdir()) == ["3.crc32", "3.safetensors"]
    assert bare.client.get("/runs/r").json()["latest_head"] == 3
    assert bare.spooled() == []


def test_a_damaged_head_of_the_run_stands_in_nobodys_way(bare: RunningService) -> None:
    assert put_policy(bare, policy(weights(0), weights(1))).status_code == 201
    bare.layout.head("r", 5).write_bytes(b"\0" * 100)
    assert put_head(bare, 6, {"lm_head": f32_of(moved(weights(1), 0.05))}).status_code == 201
    assert put_policy(bare, policy(weights(0), weights(1)), policy_version="5").status_code == 200


@pytest.mark.parametrize(
    ("bad", "dtype"),
    [(bad, dtype) for bad in (np.nan, np.inf, -np.inf) for dtype in ("F32", "BF16", "F16")]
    + [(bad, dtype) for bad in (2.0**20, -3e38) for dtype in ("F32", "BF16")],
)
def test_weights_that_are_no_numbers_or_overflow_are_refused_by_name(
    bare: RunningService, bad: float, dtype: str
) -> None:
    sound, rotten = weights(0), weights(1)
    rotten[VOCAB - 1, HIDDEN - 1] = bad
    casts: dict[str, Callable[[FloatArray], wire.Tensor]] = {
        "F32": f32_of,
        "BF16": as_bf16,
        "F16": lambda a: wire.Tensor.of(a.astype(np.float16), "F16"),
    }
    cast = casts[dtype]
    for name, tensors in (
        ("lm_head", {"embed_tokens": cast(sound), "lm_head": cast(rotten)}),
        ("embed_tokens", {"embed_tokens": cast(rotten), "lm_head": cast(sound)}),
    ):
        reply = put_policy(bare, tensors)
        assert (reply.status_code, reply.json()["field"]) == (422, name)
        assert "holds NaN, infinity, or values of 2^20" in reply.json()["detail"]
    assert bare.layout.run_names() == []
    assert put_policy(bare, {"embed_tokens": cast(sound), "lm_head": cast(sound)}).status_code == 201
    assert put_head(bare, 1, {"lm_head": cast(rotten)}).status_code == 422
    assert list(bare.layout.heads("r").iterdir()) == []


def test_what_a_second_registration_brings_in_vain_is_said(bare: RunningService) -> None:
    drafter, mine = drafter_tensors(), policy(weights(0), weights(1))
    config = json.dumps(export_config(SIZES))
    spaced = json.dumps(export_config(SIZES), indent=4)
    first = put_policy(bare, mine | drafter, drafter_config=config, draft_vocab_size="20")
    assert (first.status_code, "warning" in first.json()) == (201, False)
    for same in (
        put_policy(bare, mine | drafter, drafter_config=spaced, draft_vocab_size="20"),
        put_policy(bare, mine),
    ):
        assert (same.status_code, "warning" in same.json()) == (200, False)
    other = drafter | {"drafter.fc.weight": f32_of(np.ones(drafter["drafter.fc.weight"].shape, np.float32))}
    renamed = json.dumps(export_config(SIZES) | {"note": "another"})
    for tensors, meta in ((other, config), (drafter, renamed), ({"drafter.d2t": i32(1)}, config)):
        reply = put_policy(bare, mine | tensors, drafter_config=meta)
        assert reply.status_code == 200
        assert "is ignored: its initial drafter. To begin with it, use another run name" in reply.json()["warning"]
    reply = put_policy(bare, mine | other, drafter_config=config, draft_vocab_size="24")
    assert "its initial drafter, its draft_vocab_size of 24" in reply.json()["warning"]
    assert "warning" not in bare.client.get("/runs/r").json()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda d2t, _: d2t.__iadd__(10**9), "ids that ascend within"),
        (lambda d2t, _: d2t.__isub__(1), "ids that ascend within"),
        (lambda d2t, _: d2t.__setitem__(1, -1), "ids that ascend within"),
        (lambda _, t2d: t2d.__setitem__(slice(None), t2d[::-1].copy()), "names other tokens than d2t"),
    ],
)
def test_a_draft_vocabulary_that_contradicts_itself_is_refused_before_the_worker_meets_it(
    bare: RunningService, change: Any, words: str
) -> None:
    drafter, mine = drafter_tensors(), policy(weights(0), weights(1))
    d2t = np.zeros(SIZES.draft_vocab_size, np.int64)
    t2d = np.arange(SIZES.vocab_size) < SIZES.draft_vocab_size
    change(d2t, t2d)
    spoilt = {"drafter.d2t": wire.Tensor.of(d2t, "I64"), "drafter.t2d": wire.Tensor.of(t2d, "BOOL")}
    config = json.dumps(export_config(SIZES))
    reply = put_policy(bare, mine | drafter | spoilt, drafter_config=config)
    assert (reply.status_code, words in reply.text) == (422, True), reply.text
    assert bare.layout.run_names() == []
    assert put_policy(bare, mine | drafter, drafter_config=config).status_code == 201


def test_offsets_of_a_whole_vocabulary_that_wrap_around_are_refused(bare: RunningService) -> None:
    """Each id is above the one before it, by the differences of 64 bits; without t2d nothing else says otherwise."""
    ids = np.arange(SIZES.vocab_size)
    ids[1:4] = 2**63 - 1, 1 - 2**63, -1
    assert (np.diff(ids) > 0).all()
    drafter = drafter_tensors()
    del drafter["drafter.t2d"]
    drafter |= {
        "drafter.d2t": wire.Tensor.of(ids - np.arange(len(ids)), "I64"),
        "drafter.lm_head.weight": f32_of(np.ones((SIZES.vocab_size, SIZES.hidden_size), np.float32)),
    }
    config = json.dumps(export_config(replace(SIZES, draft_vocab_size=SIZES.vocab_size)))
    reply = put_policy(bare, policy(weights(0), weights(1)) | drafter, drafter_config=config)
    assert (reply.status_code, "ids that ascend within" in reply.text) == (422, True), reply.text


def refuse(service: RunningService, redis_client: Redis, run: str = "default") -> None:
    """As the worker says it."""
    refused = json.dumps(service.layout.target_id(run))
    key, error = f"da:{{{run}}}:worker", json.dumps("fc.weight holds NaN")
    redis_client.hset(key, mapping={"error": error, "refused": refused})
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


@pytest.mark.parametrize("refused", [None, [0, 0]], ids=["a passing fault", "the file before this one"])
def test_a_run_that_gathers_its_vocabulary_is_not_replaced_for_an_error_that_is_not_its_files(
    bare: RunningService, redis_client: Redis, refused: Any
) -> None:
    """Nothing was trained yet, and memory ran out once: the same trainer's PUT and another policy's change nothing."""
    mine, other = policy(weights(0), weights(1)), policy(weights(2), weights(3))
    assert put_policy(bare, mine).status_code == 201
    before = bare.layout.target("r").read_bytes()
    head = bare.layout.head("r", 3)
    assert put_head(bare, 3, {"lm_head": mine["lm_head"]}).status_code == 201
    error = json.dumps("DefaultCPUAllocator: can't allocate memory")
    redis_client.hset("da:{r}:worker", mapping={"error": error, "refused": json.dumps(refused)})
    again = put_policy(bare, mine)
    assert (again.status_code, again.json()["worker_error"]) == (200, "DefaultCPUAllocator: can't allocate memory")
    assert put_policy(bare, other).status_code == 409
    assert bare.layout.target("r").read_bytes() == before
    assert head.exists()


def test_a_run_whose_file_was_replaced_while_another_one_came_is_not_replaced_again(service: RunningService) -> None:
    """Two trainers send a corrected file at once: the worker has refused neither of them."""
    body = run_file(metadata={"draft_vocab_size": "20"})
    record = read_run_header("default", wire.parse_header(body))
    refused = service.layout.target_id("default")
    for expected in (True, False):
        with Spool(service.layout).upload() as upload:
            upload.write(body)
            assert commit_run(service.layout, record, upload, refused=refused) is expected


@pytest.mark.parametrize(
    ("owner", "name", "calls"),
    [(runs, "delete_head", 1), (runs, "replace_file", 1), (Path, "rename", 1), (runs, "replace_file", 2)],
)
def test_what_is_queued_stays_where_the_process_dies_while_it_replaces_a_refused_file(
    service: RunningService, redis_client: Redis, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, calls: int
) -> None:
    assert service.post(rollout_file()).status_code == 202
    assert service.client.put("/runs/default/head", content=head_file(3), headers=HEADERS).status_code == 201
    refuse(service, redis_client)
    body = run_file(metadata={"draft_vocab_size": "20"})
    record = read_run_header("default", wire.parse_header(body))
    refused = service.layout.target_id("default")
    with Spool(service.layout).upload() as upload, monkeypatch.context() as patch, contextlib.suppress(Stopped):
        upload.write(body)
        die_in(patch, owner, name, calls=calls)
        commit_run(service.layout, record, upload, refused=refused)
    reply = service.client.put("/runs/default", content=body, headers=HEADERS)
    assert (reply.is_success, reply.json()["draft_vocab_size"]) == (True, 20), reply.text
    assert service.layout.target("default").read_bytes() == body
    assert crc32_of(service.layout.target("default")) == load_run(service.layout, "default").crc32
    assert service.client.get("/rollouts/a").json()["state"] == "queued"
    assert [path.name.endswith(".safetensors") for path in service.spooled()] == [True]


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


def test_the_drift_alarm_is_acknowledged_or_reset_by_a_request_that_is_kept(
    service: RunningService, redis_client: Redis
) -> None:
    service.register()
    for action, statistic in (("acknowledge", 9.6), ("reset", 9.4)):
        Store(redis_client, "default").set_worker(gauges({"drift": {"fast": {"statistic": statistic, "limit": 9.5}}}))
        reply = service.client.post(f"/runs/default/drift/{action}")
        assert reply.status_code == 202
        assert reply.json()["action"] == action
        assert reply.json()["alarm"] is (statistic > 9.5)
    assert service.client.post("/runs/default/drift/silence").status_code == 422
    assert service.client.post("/runs/nobody/drift/reset").status_code == 404


def test_another_map_of_the_logits_is_refused_with_both_and_one_that_is_rounded_otherwise_is_not(
    service: RunningService,
) -> None:
    """Under the run's map every batch of that trainer would die: its log p are of other logits."""
    own, tensors = {"logit_scale": repr(1 / 3), "logit_softcap": "30.0"}, policy(weights())
    assert put_policy(service, tensors, **own).status_code == 201
    for other in ({}, own | {"logit_scale": "0.3334"}, {"logit_scale": repr(1 / 3)}, own | {"logit_softcap": "50.0"}):
        refused = put_policy(service, tensors, **other)
        assert (refused.status_code, refused.json()["type"]) == (409, "urn:draftalign:run-conflict")
        assert "registered with LogitMap(scale=0.333333" in refused.json()["detail"]
        assert str(wire.LogitMap.from_metadata(other)) in refused.json()["detail"]
    assert put_policy(service, tensors, **own | {"logit_scale": "0.33333334"}).status_code == 200
