"""`POST /rollouts/direct`: a file's tensors go to the object store, and what is queued is what was announced."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis.asyncio
from helpers.service.access_fixtures import TokenFile

pytest.importorskip("obstore")
pytest.importorskip("botocore")
pytest.importorskip("moto")

from helpers.service.object_fixtures import BUCKET, OTHER, Store, failing, running_store, signed_only, silent
from helpers.service.service_fixtures import HEADERS, RunningService, i32, rollout_file
from pydantic import ValidationError
from redis import Redis

from rl_hooks import wire
from service.api.context.context import ServiceContext
from service.api.rollouts import direct
from service.errors import ConfigurationError
from service.settings import Settings
from service.storage.queue.deliveries import RolloutQueue
from service.storage.queue.incoming import Incoming, new_name
from service.storage.queue.keys import DeathCode
from service.storage.queue.rollout_queue import AsyncRolloutQueue
from service.storage.spool import Spool

URL = f"s3://{BUCKET}/some/prefix"
ZEROS = "0" * 64


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    yield from running_store(monkeypatch, signed_only())


@pytest.fixture
def service(store: Store, serve: Callable[..., RunningService]) -> RunningService:
    served = serve(rollouts_url=URL)
    served.register()
    return served


def head_of(file: bytes) -> bytes:
    return file[: wire.header_size(file[:8])]


def ask(service: RunningService, file: bytes, upload: str | None = None, **changes: Any) -> httpx.Response:
    """One question about a file, as the hook asks it."""
    params: dict[str, Any] = {"run": "default", "bytes": len(file), "sha256": hashlib.sha256(file).hexdigest()}
    params |= {} if upload is None else {"upload": upload}
    head = changes.pop("head", head_of(file))
    return service.client.post("/rollouts/direct", params=params | changes, content=head, headers=HEADERS)


def put(place: httpx.Response, file: bytes) -> httpx.Response:
    assert place.status_code == 201, place.text
    return httpx.put(place.json()["url"], content=file, headers=place.json()["headers"])


def sent(service: RunningService, file: bytes) -> tuple[httpx.Response, str]:
    """Ask, put and ask again; the last answer, and the upload's name."""
    place = ask(service, file)
    assert put(place, file).status_code == 200
    upload = place.json()["upload"]
    return ask(service, file, upload), upload


def queue(service: RunningService, redis_url: str) -> RolloutQueue:
    return RolloutQueue(Redis.from_url(redis_url), "default")


def test_a_file_goes_past_the_api_and_is_queued_as_any_other(
    store: Store, service: RunningService, redis_url: str
) -> None:
    file = rollout_file()
    through = service.post(rollout_file(policy_version=9)).json()
    assert through["direct_uploads"] is True
    assert service.client.get("/runs/default").json()["direct_uploads"] is True
    reply, upload = sent(service, file)
    assert reply.status_code == 202
    same = ("batch_id", "last_dead_reason")
    assert {k: v for k, v in reply.json().items() if k not in same} == {
        k: v for k, v in through.items() if k not in same
    }
    assert store.stored() == [f"some/prefix/rollouts/default/{upload}"]
    (entry,) = [e for e in queue(service, redis_url).unfinished() if e.blob == upload]
    header = wire.check_rollout_header(wire.parse_header(file))
    assert (entry.batch_id, entry.bytes, entry.tokens) == (header.batch_id, len(file), header.tokens)
    assert entry.rollouts == header.rollouts
    assert len(service.spooled()) == 1, "that of the other file"


def test_a_roles_temporary_credentials_sign_too(
    store: Store, serve: Callable[..., RunningService], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SESSION_TOKEN", "of a role/+=")
    service = serve(rollouts_url=URL)
    service.register()
    place = ask(service, rollout_file())
    assert "X-Amz-Security-Token=of%20a%20role%2F%2B%3D&" in place.json()["url"]
    if OTHER:
        return  # it may know that there is no such token
    assert sent(service, rollout_file())[0].status_code == 202


def test_a_name_says_when_its_file_came_by_the_clock_of_heads(service: RunningService) -> None:
    spool = Spool(service.layout)
    before = spool.now_ns()
    upload = ask(service, rollout_file()).json()["upload"]
    assert before <= int(upload.split(".")[1][:16], 16) <= spool.now_ns()


def test_without_a_store_nothing_is_said_of_it_and_files_go_through_the_api(
    serve: Callable[..., RunningService],
) -> None:
    service = serve()
    service.register()
    assert service.client.get("/runs/default").json()["direct_uploads"] is False
    assert service.post(rollout_file()).json()["direct_uploads"] is False
    reply = ask(service, rollout_file(policy_version=4))
    assert (reply.status_code, reply.json()["type"]) == (404, "urn:draftalign:no-direct-uploads")


# --- asked again
def test_every_question_may_be_repeated(service: RunningService, store: Store, redis_url: str) -> None:
    file = rollout_file()
    first, second = ask(service, file), ask(service, file)
    assert first.json()["upload"] != second.json()["upload"], "each has a name of its own"
    upload = second.json()["upload"]
    again = ask(service, file, upload)
    assert again.status_code == 201, "it was not put yet"
    assert again.json()["upload"] != upload, "a name that was swept would never be taken again"
    upload = again.json()["upload"]
    for _ in range(2):
        assert put(again, file).status_code == 200
    assert ask(service, file, upload).status_code == 202
    for named in (upload, None, second.json()["upload"]):
        reply = ask(service, file, named)
        assert (reply.status_code, reply.json()["duplicate"], reply.json()["state"]) == (200, True, "queued")
    assert len(queue(service, redis_url).unfinished()) == 1


def test_an_answer_that_was_lost_is_given_again_after_the_worker_took_the_object_away(
    service: RunningService, store: Store, redis_url: str
) -> None:
    file = rollout_file()
    reply, upload = sent(service, file)
    assert reply.status_code == 202
    store.client().delete_object(Bucket=BUCKET, Key=f"some/prefix/rollouts/default/{upload}")
    (entry,) = queue(service, redis_url).unfinished()
    queue(service, redis_url).ack(entry)
    again = ask(service, file, upload)
    assert (again.status_code, again.json()["state"]) == (200, "trained")


def test_another_replica_finishes_what_one_began(
    service: RunningService, serve: Callable[..., RunningService], redis_url: str
) -> None:
    file, other = rollout_file(), serve(rollouts_url=URL)
    place = ask(service, file)
    assert put(place, file).status_code == 200
    service.client.close()  # the first one is asked nothing more
    assert ask(other, file, place.json()["upload"]).status_code == 202
    assert len(queue(other, redis_url).unfinished()) == 1


@pytest.mark.parametrize(("code", "status"), [("blob_missing", 201), ("blob_damaged", 201), ("unusable", 200)])
def test_a_batch_whose_file_was_lost_may_come_again_and_another_dead_one_may_not(
    service: RunningService, redis_url: str, code: DeathCode, status: int
) -> None:
    file = rollout_file()
    sent(service, file)
    (entry,) = queue(service, redis_url).unfinished()
    queue(service, redis_url).dead_letter(entry, "no head", code=code, keep_file=False)
    assert ask(service, file).status_code == status
    assert ask(service, file).json().get("dead_total", 1) == 1


def test_a_batch_whose_file_is_found_lost_while_it_is_asked_about_is_not_queued_without_one(
    service: RunningService, store: Store, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer to a repeated question is not "queued": its sender would let go of the only copy."""
    file, known = rollout_file(), AsyncRolloutQueue.batch
    _, upload = sent(service, file)
    entries = queue(service, redis_url).unfinished()

    async def dies(self: AsyncRolloutQueue, batch_id: str) -> dict[str, str] | None:
        found = await known(self, batch_id)
        if entries:
            store.client().delete_object(Bucket=BUCKET, Key=f"some/prefix/rollouts/default/{upload}")
            queue(service, redis_url).dead_letter(entries.pop(), "gone", code="blob_missing", keep_file=False)
        return found

    monkeypatch.setattr(AsyncRolloutQueue, "batch", dies)
    reply = ask(service, file, upload)
    assert (reply.status_code, reply.json()["type"]) == (503, "urn:draftalign:spool-swept")
    assert queue(service, redis_url).unfinished() == []
    assert sent(service, file)[0].status_code == 202


# --- refused before any tensor travels
@pytest.mark.parametrize(
    ("settings", "file", "status", "kind"),
    [
        ({"max_body_bytes": 600}, rollout_file(), 413, "too-large"),
        ({"queue_max_items": 1}, rollout_file(), 429, "queue-full"),
        ({"max_batch_tokens": 4}, rollout_file(), 422, "bad-file"),
        ({"max_batch_rollouts": 1}, rollout_file(), 422, "bad-file"),
        ({}, rollout_file(run="other"), 422, "bad-file"),
        ({}, rollout_file(target_fingerprint="f" * 32), 422, "bad-file"),
        ({}, rollout_file(tensors={"logprobs": None}), 422, "bad-file"),
        ({"spool_min_free_bytes": 1 << 60}, rollout_file(), 429, "spool-low"),
    ],
)
def test_what_post_rollouts_refuses_by_the_header_is_refused_before_it_is_put(
    store: Store,
    serve: Callable[..., RunningService],
    settings: dict[str, Any],
    file: bytes,
    status: int,
    kind: str,
) -> None:
    service = serve(rollouts_url=URL)
    service.register()
    if kind == "queue-full":
        assert service.post(rollout_file(policy_version=1)).status_code == 202
    strict = serve(rollouts_url=URL, **settings)
    through, reply = strict.post(file, run="default"), ask(strict, file)
    assert (reply.status_code, reply.json()["type"]) == (status, f"urn:draftalign:{kind}")
    assert (through.status_code, through.json()["type"]) == (status, f"urn:draftalign:{kind}")
    if kind != "too-large":
        assert reply.json()["detail"] == through.json()["detail"]


def test_a_closed_run_and_one_that_is_not_there_are_refused(service: RunningService) -> None:
    assert ask(service, rollout_file(), run="nobody").json()["type"] == "urn:draftalign:no-such-run"
    service.client.patch("/runs/default", json={"state": "draining", "reason": "r"}).raise_for_status()
    reply = ask(service, rollout_file())
    assert (reply.status_code, reply.json()["type"]) == (409, "urn:draftalign:run-closed")


def test_a_huge_header_is_refused_unread(service: RunningService) -> None:
    reply = ask(service, rollout_file(), head=b"x" * ((1 << 20) + 1))
    assert (reply.status_code, reply.json()["type"]) == (413, "urn:draftalign:too-large")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"head": b""}, "a safetensors file starts with"),
        ({"head": b"\xff" * 8}, "length word says"),
        ({"head": head_of(rollout_file()) + b"more"}, "describes a header of"),
        ({"head": head_of(rollout_file())[:-1]}, "bytes long, but only"),
        ({"bytes": len(rollout_file()) + 1}, "describes a header of"),
        ({"bytes": -1}, "bytes"),
        ({"bytes": 1 << 60}, "bytes"),
        ({"sha256": "F" * 64}, "sha256"),
        ({"sha256": "../" + "0" * 61}, "sha256"),
    ],
)
def test_what_contradicts_itself_is_refused(service: RunningService, changes: dict[str, Any], said: str) -> None:
    reply = ask(service, rollout_file(), **changes)
    assert reply.status_code == 422
    assert said in reply.json()["detail"]


# --- hostile
@pytest.mark.parametrize(
    "upload",
    [
        "",
        "../../../etc/passwd",
        f"{'0' * 32}.{'1' * 32}.{ZEROS}.safetensors",
        "..%2f..%2fother%2f",
        "a" * 5000,
        f"{'0' * 32}.{'1' * 32}.{'2' * 16}.safetensors",
    ],
)
def test_a_name_that_is_no_upload_of_this_file_is_refused(service: RunningService, upload: str) -> None:
    reply = ask(service, rollout_file(), upload)
    assert (reply.status_code, reply.json()["type"]) == (422, "urn:draftalign:bad-upload")


def test_an_upload_of_another_run_is_none_of_this_run(service: RunningService, store: Store, redis_url: str) -> None:
    service.register("other")
    theirs = rollout_file(run="other")
    place = ask(service, theirs, run="other")
    assert put(place, theirs).status_code == 200
    upload = place.json()["upload"]
    refused = ask(service, theirs, upload)
    assert (refused.status_code, refused.json()["field"]) == (422, "run")
    ours = rollout_file()
    assert ask(service, ours, upload).json()["type"] == "urn:draftalign:bad-upload"
    batch_id = wire.check_rollout_header(wire.parse_header(ours)).batch_id
    renamed = new_name(batch_id, hashlib.sha256(ours).hexdigest(), time.time_ns())
    assert ask(service, ours, renamed).status_code == 201, "nobody put that"
    assert queue(service, redis_url).unfinished() == []


def test_a_token_of_another_run_neither_gets_a_place_nor_queues(
    store: Store, serve: Callable[..., RunningService], tmp_path: Path, redis_url: str
) -> None:
    tokens = TokenFile(tmp_path / "tokens")
    for run in ("default", "other"):
        tokens.add(run, "write", (run,))
    service = serve(rollouts_url=URL, token_file=tokens.path)
    file = rollout_file()

    def by(run: str) -> None:
        service.client.headers.update(tokens.headers(run))

    by("default")
    service.register().raise_for_status()
    place = ask(service, file)
    assert put(place, file).status_code == 200
    by("other")
    service.register("other").raise_for_status()
    for upload in (None, place.json()["upload"]):
        assert ask(service, file, upload).status_code == 403
        assert ask(service, file, upload, run="other").status_code in (403, 422)
    assert queue(service, redis_url).unfinished() == []
    by("default")
    assert ask(service, file, place.json()["upload"]).status_code == 202
    del service.client.headers["Authorization"]
    assert ask(service, file).status_code == 401


@pytest.mark.parametrize("other", ["other bytes", "shorter", "longer", "without the digest"])
def test_the_url_takes_these_bytes_and_no_others(service: RunningService, store: Store, other: str) -> None:
    file = rollout_file()
    place = ask(service, file)
    assert "X-Amz-SignedHeaders=content-length%3Bhost%3Bx-amz-checksum-sha256&" in place.json()["url"]
    bodies = {"other bytes": file[:-1] + b"\x07", "shorter": file[:-1], "longer": file + b"\0"}
    body, headers = bodies.get(other, file), dict(place.json()["headers"])
    headers["Content-Length"] = str(len(body))
    if other == "without the digest":
        del headers["x-amz-checksum-sha256"]
    assert httpx.put(place.json()["url"], content=body, headers=headers).status_code in (400, 403)
    elsewhere = place.json()["url"].replace("/rollouts/default/", "/rollouts/other/")
    assert httpx.put(elsewhere, content=file, headers=place.json()["headers"]).status_code == 403
    assert store.stored() == []
    assert ask(service, file, place.json()["upload"]).status_code == 201


@pytest.mark.parametrize("length", [-1, 1])
def test_an_object_of_another_length_is_not_there(service: RunningService, store: Store, length: int) -> None:
    """In a store that binds nothing."""
    store.fault = None
    file = rollout_file()
    upload = ask(service, file).json()["upload"]
    body = file[:-1] if length < 0 else file + b"\0"
    store.client().put_object(Bucket=BUCKET, Key=f"some/prefix/rollouts/default/{upload}", Body=body)
    assert ask(service, file, upload).status_code == 201


def changed_token(file: bytes) -> bytes:
    header = wire.parse_header(file)
    at = header.header_bytes + header.tensors["input_ids"].begin
    return file[:at] + b"\xff\xff\xff\x7f" + file[at + 4 :]


def changed_mask(file: bytes) -> bytes:
    header = wire.parse_header(file)
    at = header.header_bytes + header.tensors["loss_mask"].begin
    return file[:at] + b"\x01" + file[at + 1 :]


def changed_header(file: bytes) -> bytes:
    return file.replace(b'"temperature":"1.0"', b'"temperature":"9.0"')


@pytest.mark.parametrize("change", [changed_token, changed_mask, changed_header])
def test_what_lies_there_is_checked_and_not_what_was_said(
    service: RunningService, store: Store, redis_url: str, change: Callable[[bytes], bytes]
) -> None:
    """In a store that binds nothing, or to its owner, the sender's word is worth nothing."""
    file = rollout_file()
    upload = ask(service, file).json()["upload"]
    assert change(file) != file
    store.client().put_object(Bucket=BUCKET, Key=f"some/prefix/rollouts/default/{upload}", Body=change(file))
    reply = ask(service, file, upload)
    assert (reply.status_code, reply.json()["type"]) == (422, "urn:draftalign:bad-file")
    assert queue(service, redis_url).unfinished() == []


@pytest.mark.parametrize(
    "tensors",
    [
        {"input_ids": i32(*([99] * 11))},
        {"cu_seqlens": i32(0, 1, 11)},
        {"aux_rows": i32(*([0] * 11))},
        {"versions_behind": i32(*([-1] * 11))},
    ],
)
def test_integer_tensors_are_refused_as_by_post_rollouts(
    service: RunningService, store: Store, tensors: dict[str, wire.Tensor]
) -> None:
    file = rollout_file(tensors=tensors)
    through, (reply, _) = service.post(file), sent(service, file)
    assert (reply.status_code, reply.json()["detail"]) == (through.status_code, through.json()["detail"])
    assert reply.status_code == 422


# --- the store fails
@pytest.mark.parametrize("fault", [failing("HEAD"), failing("GET", "403 Forbidden"), silent(2.0)])
def test_a_store_that_fails_the_api_is_named_and_the_next_question_is_answered(
    service: RunningService, store: Store, monkeypatch: pytest.MonkeyPatch, fault: Any
) -> None:
    monkeypatch.setattr(direct, "_STORE_SECONDS", 1.0)
    file = rollout_file()
    place = ask(service, file)
    assert put(place, file).status_code == 200
    store.fault = fault
    reply = ask(service, file, place.json()["upload"])
    assert (reply.status_code, reply.json()["type"]) == (503, "urn:draftalign:object-store-away")
    store.fault = None
    monkeypatch.undo()
    assert ask(service, file, place.json()["upload"]).status_code == 202


# --- swept
def test_files_that_nobody_queued_are_swept_and_those_that_wait_are_not(
    store: Store, service: RunningService, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, waits = sent(service, rollout_file())
    lost = rollout_file(policy_version=4)
    place = ask(service, lost)
    assert put(place, lost).status_code == 200
    store.client().put_object(Bucket=BUCKET, Key="some/prefix/rollouts/default/of another kind", Body=b"x")

    async def reap() -> int:
        async with redis.asyncio.Redis.from_url(redis_url) as client:
            return await ServiceContext(service.settings, client).reap()

    assert asyncio.run(reap()) == 0, "it is young"
    old = Incoming.old
    monkeypatch.setattr(Incoming, "old", lambda self, run, seconds: old(self, run, seconds - 7200))
    store.fault = failing("GET", "403 Forbidden")
    assert asyncio.run(reap()) == 0
    store.fault = signed_only()
    asyncio.run(reap())  # or the service's own sweep was first
    assert store.stored() == [
        f"some/prefix/rollouts/default/{waits}",
        "some/prefix/rollouts/default/of another kind",
    ]
    again = ask(service, lost, place.json()["upload"])
    assert again.status_code == 201
    assert put(again, lost).status_code == 200
    assert ask(service, lost, again.json()["upload"]).status_code == 202, "under another name it is taken"


def test_a_deleted_run_leaves_no_object(store: Store, service: RunningService) -> None:
    service.register("default2")
    _, kept = sent(service, rollout_file())
    other = rollout_file(run="default2")
    place = ask(service, other, run="default2")
    assert put(place, other).status_code == 200
    assert service.client.delete("/runs/default2").is_success
    assert store.stored() == [f"some/prefix/rollouts/default/{kept}"]


# --- settings
@pytest.mark.parametrize("url", ["", "bucket", "gs://bucket/x", "az://account/x", "file:///tmp/x"])
def test_a_store_that_binds_nothing_is_refused(url: str) -> None:
    with pytest.raises(ValidationError, match="rollouts_url must begin with s3://: an upload URL of another kind"):
        Settings(rollouts_url=url)


def test_no_credentials_are_said_at_the_start(store: Store, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(ConfigurationError, match=r"rollouts_url s3://.* no upload can be signed: there are no cred"):
        Incoming(URL)


@pytest.mark.parametrize("missing", ["obstore", "botocore.auth"])
def test_the_missing_extra_is_named(store: Store, monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    monkeypatch.setitem(__import__("sys").modules, missing, None)
    with pytest.raises(ConfigurationError, match=r"rollouts_url needs the extra s3: pip install '\.\[s3\]'"):
        Incoming(URL)
