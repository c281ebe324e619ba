"""The sender puts rollout files into the service's object store, and through the API where it cannot."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
from helpers.ports import free_port
from helpers.trainer.hooks_fixtures import Answer, Received, receiver

pytest.importorskip("obstore")
pytest.importorskip("botocore")
pytest.importorskip("moto")

from helpers.service.object_fixtures import BUCKET, Fault, Store, failing, running_store, signed_only
from helpers.service.service_fixtures import RunningService, rollout_metadata, rollout_tensors
from redis import Redis

from rl_hooks import wire
from rl_hooks.sending import delivery
from rl_hooks.sending.direct import DirectUpload
from rl_hooks.sending.exchange import Reply, RunService
from rl_hooks.sending.sender import RolloutSender
from service.storage.queue.deliveries import Entry, RolloutQueue

TOKEN = "of-the-trainer"
LONG = (500, 300)


@pytest.fixture(autouse=True)
def _small_files_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delivery, "_SMALLEST_DIRECT_BYTES", 0)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    yield from running_store(monkeypatch, signed_only())


@pytest.fixture
def service(store: Store, serve: Callable[..., RunningService]) -> RunningService:
    served = serve(rollouts_url=f"s3://{BUCKET}/in", tokens=f"{TOKEN}:admin")
    served.client.headers["Authorization"] = f"Bearer {TOKEN}"
    served.register()
    return served


@pytest.fixture
def sender(service: RunningService) -> Iterator[RolloutSender]:
    """One that has heard of the store, by its first file."""
    made = RolloutSender(service.url, token=TOKEN)
    send(made, 1)
    assert made._delivery.wanted.direct_uploads
    yield made
    made.close(1.0)


def send(sender: RolloutSender, version: int) -> list[bytes | memoryview]:
    ids = (f"a{version}", f"b{version}")
    parts = wire.encode(rollout_tensors(LONG), rollout_metadata(ids, policy_version=version))
    assert sender.submit(parts)
    assert sender.flush(60)
    return parts


def waiting(redis_url: str) -> list[Entry]:
    return RolloutQueue(Redis.from_url(redis_url), "default").unfinished()


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name == "rl_hooks" and r.levelno >= logging.WARNING]


def test_a_file_goes_to_the_store_and_its_header_to_the_api(
    store: Store, service: RunningService, sender: RolloutSender, redis_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    before = sender.stats()
    parts = send(sender, 2)
    body = b"".join(map(bytes, parts))
    first, second = waiting(redis_url)
    key = f"in/rollouts/default/{second.blob}"
    assert store.stored() == [key]
    assert store.client().get_object(Bucket=BUCKET, Key=key)["Body"].read() == body
    assert service.spooled() == [service.layout.blob("default", first.blob)]
    stats = sender.stats()
    assert (stats["sent"], stats["duplicates"], stats["retries"], warnings(caplog)) == (2, 0, 0, [])
    assert stats["bytes_sent"] - before["bytes_sent"] == len(body) + len(parts[0])


def test_a_small_file_goes_through_the_api(
    store: Store, service: RunningService, sender: RolloutSender, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = wire.parts_bytes(send(sender, 2))
    monkeypatch.setattr(delivery, "_SMALLEST_DIRECT_BYTES", size)
    send(sender, 3)
    assert (len(store.stored()), len(service.spooled())) == (2, 1)
    monkeypatch.setattr(delivery, "_SMALLEST_DIRECT_BYTES", size + 1)
    send(sender, 4)
    assert (len(store.stored()), len(service.spooled())) == (2, 2)


def test_the_store_never_sees_the_token(store: Store, sender: RolloutSender) -> None:
    send(sender, 2)
    (put,) = (
        headers
        for (method, path), headers in zip(store.requests, store.headers, strict=True)
        if method == "PUT" and "/rollouts/" in path
    )
    assert "HTTP_AUTHORIZATION" not in put
    assert TOKEN not in str(store.headers)


# --- what is lost on the way
@pytest.mark.parametrize("lost", [1, 2])
def test_an_answer_of_the_api_that_is_lost_is_asked_for_again(
    store: Store, sender: RolloutSender, redis_url: str, monkeypatch: pytest.MonkeyPatch, lost: int
) -> None:
    answers, asked = list[int](), RunService.ask

    def losing(*args: Any, **options: Any) -> Reply:
        reply = asked(*args, **options)
        answers.append(reply.status)
        if len(answers) == lost:
            raise ConnectionResetError("lost")
        return reply

    monkeypatch.setattr(RunService, "ask", losing)
    send(sender, 2)
    assert answers == ([201, 201, 202] if lost == 1 else [201, 202, 200])
    stats = sender.stats()
    assert (stats["sent"] + stats["duplicates"], stats["retries"]) == (2, 1)
    assert store.count("PUT", ".safetensors") == 1
    assert len(waiting(redis_url)) == 2


def test_a_put_whose_answer_is_lost_is_recognised(
    store: Store, sender: RolloutSender, redis_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    def lose(environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes] | None:
        if environ["REQUEST_METHOD"] != "PUT":
            return None
        b"".join(store.app(environ, lambda *_: None))  # stored
        start("500 Internal Server Error", [("Content-Length", "0")])
        return [b""]

    store.fault = lose
    send(sender, 2)
    assert store.count("PUT", ".safetensors") == 1
    assert (sender.stats()["sent"], sender.stats()["retries"], warnings(caplog)) == (2, 0, [])
    assert len(store.stored()) == 1


def test_a_put_that_fails_once_is_tried_again(store: Store, sender: RolloutSender) -> None:
    failed: list[str] = []

    def once(environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes] | None:
        if environ["REQUEST_METHOD"] != "PUT" or failed:
            return None
        failed.append("once")
        return failing("PUT", "503 Slow Down")(environ, start)

    store.fault = once
    send(sender, 2)
    assert len(store.stored()) == 1
    assert sender.stats()["sent"] == 2


# --- through the API all the same
@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (failing("PUT", "403 Forbidden"), "it answered 403: fail"),
        (failing("PUT", "307 Temporary Redirect"), "it answered 307"),
        (None, "Connection refused"),
    ],
)
def test_a_store_that_cannot_be_used_is_said_once_and_files_go_through_the_api(
    store: Store,
    service: RunningService,
    sender: RolloutSender,
    redis_url: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    fault: Fault | None,
    said: str,
) -> None:
    store.fault, put = fault, DirectUpload._put
    if fault is None:

        def elsewhere(self: DirectUpload, place: Any) -> str:
            """The trainer reaches the store's name nowhere."""
            return put(self, {**place, "url": place["url"].replace(f":{store.port}/", f":{free_port()}/")})

        monkeypatch.setattr(DirectUpload, "_put", elsewhere)
    for version in (2, 3):
        send(sender, version)
    stats = sender.stats()
    assert (stats["sent"], stats["dropped_error"], stats["retries"]) == (3, 0, 0)
    assert len(service.spooled()) == len(waiting(redis_url)) == 3
    (warning,) = warnings(caplog)
    assert said in warning
    assert "Rollouts go through the service's API for five minutes, then it is tried again" in warning
    assert store.count("PUT", ".safetensors") == (0 if fault is None else 2), "by the first of the two"
    store.fault = signed_only()
    sender._delivery._store_away_until = 0.0  # five minutes later
    monkeypatch.setattr(DirectUpload, "_put", put)
    send(sender, 4)
    assert sender.stats()["sent"] == 4
    assert len(service.spooled()) == 3


def test_a_store_that_the_api_does_not_reach_is_left_for_the_api(
    store: Store, service: RunningService, sender: RolloutSender, caplog: pytest.LogCaptureFixture
) -> None:
    store.fault = failing("HEAD", "403 Forbidden")
    send(sender, 2)
    assert sender.stats()["sent"] == 2
    assert len(service.spooled()) == 2
    assert "the service says: the object store failed at rollouts/default/" in warnings(caplog)[0]


def test_a_service_that_takes_no_direct_uploads_any_more_gets_them_itself(
    store: Store, service: RunningService, sender: RolloutSender, caplog: pytest.LogCaptureFixture
) -> None:
    service.server.config.app.state.context.disk.incoming = None  # type: ignore[union-attr]
    send(sender, 2)
    assert sender.stats()["sent"] == 2
    assert len(service.spooled()) == 2
    assert not sender._delivery.wanted.direct_uploads
    assert store.stored() == []


@pytest.mark.parametrize(
    "place",
    [
        {},
        {"upload": 1, "url": 2, "headers": 3},
        {"upload": "x", "url": "javascript:alert(1)", "headers": {}},
        {"upload": "x", "url": "http://127.0.0.1:99999999/", "headers": {}},
        {"upload": "x", "url": "http://[::1/", "headers": {}},
        {"upload": "x", "url": "http://127.0.0.1:9/a b\r\nHost: evil", "headers": {}},
        {"upload": "x", "url": "http://127.0.0.1:9/", "headers": {"A\r\nB": "c"}},
        {"upload": "x", "url": "http://127.0.0.1:9/", "headers": {"A": "c\r\nD: e"}},
        {"upload": "x\r\n" * 999, "url": "\ud800", "headers": {"\ud800": None}},
    ],
)
def test_nonsense_of_a_service_ends_in_an_upload_through_it(place: Any) -> None:
    def answer(request: Received) -> Answer:
        return (201, {}, place) if request.path.startswith("/rollouts/direct") else (202, {}, {"direct_uploads": True})

    with receiver() as service:
        service.answer = answer
        sender = RolloutSender(service.url)
        for version in (1, 2):
            send(sender, version)
        stats = sender.stats()
        assert (stats["sent"], stats["dropped_error"]) == (2, 0)
        assert [r.path for r in service.requests if "direct" not in r.path] == ["/rollouts?run=default"] * 2
        sender.close(1.0)


def test_what_is_no_rollout_file_goes_through_the_api(service: RunningService, sender: RolloutSender) -> None:
    assert sender.submit([b"nonsense"])
    assert sender.submit([])
    assert sender.flush(20)
    assert sender.stats()["dropped_error"] == 2


# --- refused
def test_a_full_queue_is_waited_for_and_nothing_is_put_meanwhile(
    store: Store, service: RunningService, sender: RolloutSender, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    context: Any = service.server.config.app.state.context  # type: ignore[union-attr]
    context.settings = context.settings.model_copy(update={"queue_max_items": 1})
    puts: list[int] = []
    pause = sender._delivery.deliver

    def freed(job: Any, wait: Callable[[float], bool]) -> str:
        def waited(seconds: float) -> bool:
            puts.append(store.count("PUT", ".safetensors"))
            (first,) = waiting(redis_url)
            RolloutQueue(Redis.from_url(redis_url), "default").ack(first)
            return False

        return pause(job, waited)

    monkeypatch.setattr(sender._delivery, "deliver", freed)
    send(sender, 2)
    assert puts == [0]
    assert (sender.stats()["sent"], store.count("PUT", ".safetensors")) == (2, 1)


def test_a_closed_run_ends_it(service: RunningService, sender: RolloutSender, store: Store) -> None:
    service.client.patch("/runs/default", json={"state": "draining", "reason": "r"}).raise_for_status()
    send(sender, 2)
    assert sender.refused
    assert store.stored() == []
