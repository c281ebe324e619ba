"""RolloutSender over real sockets, against a receiver that refuses, resets, stalls and answers nonsense."""

from __future__ import annotations

import contextlib
import email.utils
import faulthandler
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.ports import free_port
from helpers.trainer.hooks_fixtures import AUX, Answer, Received, Receiver, receiver, tiny_qwen3

from rl_hooks import wire
from rl_hooks.hook import DrafterHook
from rl_hooks.sending.delivery import NO_SUCH_RUN
from rl_hooks.sending.exchange import Origin
from rl_hooks.sending.jobs import Job, run_path
from rl_hooks.sending.sender import RolloutSender
from rl_hooks.sending.tally import Tally


def finished(sender: RolloutSender, seconds: float = 60.0) -> dict[str, object]:
    assert sender.flush(seconds), sender.stats()
    return sender.stats()


def test_what_is_submitted_arrives_byte_for_byte_and_in_order() -> None:
    with receiver() as service:
        sender = RolloutSender(service.url + "/base", run="a b", token="secret")
        for i in range(5):
            assert sender.submit([b"head", memoryview(bytes([i]) * 100)])
        stats = finished(sender)
        assert [r.body for r in service.requests] == [b"head" + bytes([i]) * 100 for i in range(5)]
        first = service.requests[0]
        assert (first.method, first.path) == ("POST", "/base/rollouts?run=a%20b")
        assert first.headers["content-type"] == "application/x-safetensors"
        assert first.headers["authorization"] == "Bearer secret"
        assert stats["sent"] == 5
        assert stats["bytes_sent"] == 520
        assert stats["queue_bytes"] == 0
        assert sender.close()


def test_a_body_of_64_mib_arrives_whole() -> None:
    with receiver() as service:
        sender = RolloutSender(service.url)
        body = memoryview(os.urandom(64 << 20))
        assert sender.submit([b"x", body])
        assert finished(sender, 60)["sent"] == 1
        assert service.requests[0].body[1:] == body
        sender.close()


def test_a_refusal_costs_no_body_and_retry_after_is_honoured() -> None:
    with receiver() as service:
        times: list[float] = []

        def refuse_once() -> tuple[int, dict[str, str], object] | None:
            times.append(time.monotonic())
            return (429, {"Retry-After": "1"}, {"detail": "full"}) if len(times) == 1 else None

        service.refuse = refuse_once
        sender = RolloutSender(service.url)
        sender.submit([b"z" * 1000])
        stats = finished(sender)
        assert (stats["sent"], stats["retries"], stats["bytes_sent"]) == (1, 1, 1000)
        assert times[1] - times[0] >= 1.0
        assert len(service.requests) == 1
        sender.close()


@pytest.mark.parametrize(("status", "kind"), [(403, "too-many-runs"), (500, "run-damaged")])
def test_a_registration_that_waits_for_a_person_is_sent_again_at_a_slow_pace(status: int, kind: str) -> None:
    with receiver() as service:
        left: list[Answer] = [(status, {}, {"type": f"urn:draftalign:{kind}", "detail": "delete one"})] * 3
        service.answer = lambda _request: left.pop() if left else (201, {}, {})
        sender, pauses = RolloutSender(service.url), list[float]()
        registration = Job("PUT", run_path("default"), lambda: [b"x"], 1, keep=True)

        def pause(seconds: float) -> bool:
            pauses.append(seconds)
            return False

        assert sender._delivery.deliver(registration, pause) == "sent"
        assert len(pauses) == 3
        assert min(pauses) >= 30.0
        assert not sender.refused
        assert "delete one" in sender.stats()["last_error"]
        sender.close()


def test_what_follows_from_a_refused_registration_does_not_hide_its_cause() -> None:
    with receiver() as service:
        service.answer = lambda request: (
            (422, {}, {"detail": "no drafter's config"})
            if request.method == "PUT"
            else (404, {}, {"type": "urn:draftalign:no-such-run", "detail": "run 'r' is not registered"})
        )
        # 404 is retried by a rank whose run registers itself in its first forward.
        sender = RolloutSender(service.url, run="r", retry_statuses=frozenset({404}))
        sender.submit_job(Job("PUT", run_path("r"), lambda: [b"0"], 1))
        sender.submit([b"1"])
        stats = finished(sender)
        assert stats["dropped_error"] == 2
        said = str(stats["last_error"])
        assert "run 'r' is not registered. Before that, PUT " in said
        assert "no drafter's config. This process sends nothing until it is attached again" in said
        assert not sender.submit([b"2"]), "nothing is captured for a run that nobody has registered"
        assert len(service.requests) == 2
        sender.close()


@pytest.mark.parametrize(
    ("statuses", "kind", "sent"),
    [((422, 202, 202), "", 2), ((503, 201, 404, 202), NO_SUCH_RUN, 2), ((404, 404, 202), "a proxy's", 1)],
    ids=["by another process", "after a retry", "a proxy without the service behind it"],
)
def test_nothing_ends_for_good_where_the_run_may_be_registered(statuses: tuple[int, ...], kind: str, sent: int) -> None:
    answers: list[Answer] = [(status, {"Retry-After": "0"}, {"type": kind}) for status in statuses]
    with receiver() as service:
        service.answer = lambda _request: answers.pop(0)
        sender = RolloutSender(service.url, run="r")
        sender.submit_job(Job("PUT", run_path("r"), lambda: [b"0"], 1))
        for body in (b"1", b"2"):
            sender.submit([body])
        assert finished(sender)["sent"] == sent
        assert not sender.refused
        sender.close()


@pytest.mark.parametrize(
    "page", ["<!doctype html><html>", {"status": "ok"}, [], {"run": "another"}, {"upload": "done"}], ids=str
)
def test_what_something_else_answers_with_200_takes_nothing(page: object, caplog: pytest.LogCaptureFixture) -> None:
    """A proxy's maintenance page, or another service. What does not name the run is sent again."""
    pages = 2
    with receiver() as service, caplog.at_level(logging.WARNING, "rl_hooks"):
        service.misbehave = "foreign"

        def answer(_request: Received) -> Answer:
            return (200, {}, page) if len(service.requests) < pages else (202, {}, {"run": "r"})

        service.answer = answer
        sender = RolloutSender(service.url, run="r")
        sender.submit_job(Job("PUT", run_path("r"), lambda: [b"0"], 1, keep=True))
        sender.submit([b"1"])
        stats = finished(sender)
        assert (stats["sent"], stats["retries"], stats["dropped_error"]) == (2, pages, 0)
        assert [request.body for request in service.requests] == [b"0"] * (pages + 1) + [b"1"]
        sender.close()
    assert f"expected the service's JSON, got 200 with {json.dumps(page).encode()!r}" in caplog.text


def test_a_registration_outlasts_a_token_that_is_missing_at_first_and_a_proxy_that_is_starting(
    caplog: pytest.LogCaptureFixture,
) -> None:
    statuses = [401, 403, 404, 201, 202]
    with receiver() as service, caplog.at_level(logging.WARNING, "rl_hooks"):
        service.answer = lambda _request: (statuses.pop(0), {"Retry-After": "0"}, {"detail": "not yet"})
        sender = RolloutSender(service.url, run="r", patience_seconds=0.0)
        sender.submit_job(Job("PUT", run_path("r"), lambda: [b"0"], 1, keep=True))
        sender.submit([b"1"])
        stats = finished(sender)
        assert (stats["sent"], stats["retries"], stats["dropped_error"]) == (2, 3, 0)
        assert not sender.refused
        sender.close()
    assert [record.getMessage().partition(" was answered ")[2][:3] for record in caplog.records] == [
        "401",
        "403",
        "404",
    ]
    assert all("It is tried again, and training goes on" in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize("kind", ["urn:draftalign:not-found", NO_SUCH_RUN])
def test_a_404_of_the_service_to_what_is_kept_is_final(kind: str) -> None:
    with receiver() as service:
        service.answer = lambda _request: (404, {}, {"type": kind})
        sender = RolloutSender(service.url, run="r")
        sender.submit_job(Job("PUT", run_path("r"), lambda: [b"0"], 1, keep=True))
        assert finished(sender)["dropped_error"] == 1
        sender.close()


@pytest.mark.parametrize(
    ("variable", "given", "sent"),
    [("s3cret", None, "Bearer s3cret"), ("s3cret", "own", "Bearer own"), ("", None, None), (None, None, None)],
)
def test_a_hook_without_a_token_takes_the_environments(
    monkeypatch: pytest.MonkeyPatch, variable: str | None, given: str | None, sent: str | None
) -> None:
    monkeypatch.delenv("DRAFTALIGN_TOKEN", raising=False)
    if variable is not None:
        monkeypatch.setenv("DRAFTALIGN_TOKEN", variable)
    with receiver() as service:
        hook = DrafterHook(tiny_qwen3(tied=False), service.url, token=given, aux_layers=AUX)
        finished(hook.sender)
        hook.close()
    registration = next(one for one in service.requests if one.method == "PUT")
    assert registration.headers.get("authorization") == sent


def test_a_token_that_no_header_can_hold_is_refused_and_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with receiver() as service:
        monkeypatch.setenv("DRAFTALIGN_TOKEN", " s3cret\n")  # as `export DRAFTALIGN_TOKEN="$(cat file)"` of some shells
        sender = RolloutSender(service.url)
        sender.submit([b"z"])
        finished(sender)
        assert service.requests[0].headers.get("authorization") == "Bearer s3cret"
        sender.close()
        for bad in ("s3\ncret", "s3cret\u2019"):
            with pytest.raises(ValueError, match="printable ASCII") as raised:
                RolloutSender(service.url, token=bad)
            assert "cret" not in str(raised.value)


def test_a_401_says_where_the_token_is_given(caplog: pytest.LogCaptureFixture) -> None:
    with receiver() as service, caplog.at_level(logging.WARNING, "rl_hooks"):
        service.answer = lambda _request: (401, {}, {"detail": "no token came"})
        sender = RolloutSender(service.url, patience_seconds=0.0)
        sender.submit([b"z"])
        assert "no token came (give token=" in str(finished(sender)["last_error"])
        sender.close()
    assert [record.getMessage().startswith("draftalign: POST ") for record in caplog.records] == [True]


@pytest.mark.parametrize(
    ("make", "fault"),
    [
        (lambda _: None, "No such file"),
        (Path.mkdir, "Is a directory"),
        (os.mkfifo, "is empty; expected a token"),  # nobody writes into it, and the thread does not wait for that
        (lambda path: path.write_text("\r\n"), "is empty; expected a token"),
        (lambda path: path.write_text("s3cret\nother\n"), "has a character that is not printable ASCII"),
        (lambda path: path.write_text("s3cret", "utf-16"), "has a character that is not printable ASCII"),
        (lambda path: path.write_text("s3cret" * 1000), "holds more than 4096 bytes"),
    ],
    ids=["gone", "directory", "fifo", "empty", "two lines", "utf-16", "large"],
)
def test_a_file_that_holds_no_token_is_named_and_nothing_is_asked(
    make: Callable[[Path], object], fault: str, tmp_path: Path
) -> None:
    make(told := tmp_path / "token")
    with receiver() as service:
        sender = RolloutSender(service.url, token=f"@{told}", patience_seconds=0.0)
        sender.submit([b"z"])
        said = str(finished(sender)["last_error"])
        sender.close()
    assert f"the file {told} that DRAFTALIGN_TOKEN names" in said
    assert fault in said
    assert "cret" not in said
    assert not service.requests


def test_a_link_to_a_token_may_be_changed_as_kubernetes_does_it(tmp_path: Path) -> None:
    (link := tmp_path / "token").symlink_to(tmp_path / "first")
    (tmp_path / "first").write_bytes(b"first\r\n")
    (tmp_path / "second").write_text("second\n")
    with receiver() as service:
        sender = RolloutSender(service.url, token=f"@{link}")
        sender.submit([b"1"])
        finished(sender)
        (tmp_path / "new").symlink_to(tmp_path / "second")
        (tmp_path / "new").replace(link)
        sender.submit([b"2"])
        finished(sender)
        sender.close()
    assert [one.headers["authorization"] for one in service.requests] == ["Bearer first", "Bearer second"]


@pytest.mark.parametrize("kind", [None, "urn:draftalign:not-found"])
def test_a_404_of_no_run_names_the_whole_address_and_doubts_it(kind: str | None) -> None:
    with receiver() as service:
        service.answer = lambda _request: (404, {}, {"detail": "Not Found"} | ({"type": kind} if kind else {}))
        sender = RolloutSender(service.url + "/api", run="r")
        sender.submit([b"z"])
        said = str(finished(sender)["last_error"])
        sender.close()
    assert f"POST {service.url}/api/rollouts?run=r was answered 404: Not Found (is it a draftalign service?)" in said


def test_retry_after_may_be_a_date() -> None:
    with receiver() as service:
        answers: list[Answer] = [
            (503, {"Retry-After": email.utils.formatdate(time.time() - 5, usegmt=True)}, {}),
            (202, {}, {}),
        ]
        service.answer = lambda _request: answers.pop(0)
        sender = RolloutSender(service.url)
        sender.submit([b"z"])
        assert finished(sender)["sent"] == 1
        sender.close()


def test_a_rejected_rollout_is_dropped_with_one_warning_that_says_why(caplog: pytest.LogCaptureFixture) -> None:
    with receiver() as service, caplog.at_level(logging.WARNING, "rl_hooks"):
        service.answer = lambda _request: (422, {}, {"title": "Bad", "detail": "loss_mask: must hold 0 and 1"})
        sender = RolloutSender(service.url)
        for _ in range(3):
            sender.submit([b"z"])
        stats = finished(sender)
        assert (stats["dropped_error"], stats["retries"], stats["sent"]) == (3, 0, 0)
        assert len(service.requests) == 3
        # A busy machine may also be told what is still to be sent.
        warnings = [r.message for r in caplog.records if "still to be sent" not in r.message]
        assert [text.count("loss_mask: must hold 0 and 1") for text in warnings] == [1]
        sender.close()


def test_the_rows_that_the_run_wants_are_those_that_the_service_named_last() -> None:
    with receiver() as service:
        sender = RolloutSender(service.url)
        heard = []
        for status, fields in (
            (202, {}),
            (202, {"last_rows": "predicting"}),
            (202, {}),
            (202, {"last_rows": "those of Tuesday"}),
            (422, {"title": "Bad", "detail": "last_hidden"}),  # the run may be another one
            (200, {"duplicate": True, "last_rows": "predicting"}),
            (202, {"last_rows": "all"}),
        ):
            service.answer = lambda _request, status=status, fields=fields: (status, {}, fields)  # type: ignore[misc]
            sender.submit([b"z"])
            finished(sender)
            heard.append(sender.last_rows)
        assert heard == ["all", *["predicting"] * 3, "all", "predicting", "all"]
        sender.close()


@pytest.mark.parametrize(
    ("statuses", "said"),
    [((200, 200), 1), ((200, 503, 200), 0), ((201, 200), 0)],
    ids=["begun again", "a try may have arrived", "the run began here, so a loop shows its rollouts twice"],
)
def test_duplicates_are_counted_apart_and_said_where_a_trainer_may_have_begun_again(
    statuses: tuple[int, ...], said: int, caplog: pytest.LogCaptureFixture
) -> None:
    answers: list[Answer] = [(status, {"Retry-After": "0"}, {"duplicate": True}) for status in statuses]
    answers[0] = (statuses[0], {}, {})
    with receiver() as service:
        service.answer = lambda _request: answers.pop(0)
        sender = RolloutSender(service.url, run="r")
        sender.submit_job(Job("PUT", run_path("r"), lambda: [b"0"], 1))
        sender.submit([b"z"])
        stats = finished(sender)
        assert (stats["duplicates"], stats["sent"]) == (1, 1)
        sender.close()
    assert caplog.text.count("another run name (the hook's run=)") == said


def test_the_body_goes_out_after_a_second_when_the_server_ignores_expect() -> None:
    with receiver() as service:
        service.misbehave = "silent"
        sender = RolloutSender(service.url)
        sender.submit([b"z"])
        assert finished(sender)["sent"] == 1
        sender.close()


@pytest.mark.parametrize("misbehaviour", ["reset", "garbage"])
def test_a_broken_service_is_retried_until_it_recovers(misbehaviour: str) -> None:
    with receiver() as service:
        service.misbehave = misbehaviour
        sender = RolloutSender(service.url)
        sender.submit([b"z" * 100_000])
        deadline = time.monotonic() + 60
        while sender.stats()["retries"] < 2:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        service.misbehave = ""
        assert finished(sender)["sent"] == 1
        sender.close()


@pytest.mark.parametrize("silent", [False, True], ids=["before the body", "after the body"])
def test_an_answer_that_drips_without_end_is_given_up_in_time(silent: bool) -> None:
    def drip(listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            connection, _ = listener.accept()
            with connection:
                while silent and not connection.recv(1 << 16).endswith(b"body"):
                    pass
                connection.sendall(b"HTTP/1.1 202 Accepted\r\nx-slow: ")
                while True:
                    connection.sendall(b"y")
                    time.sleep(0.05)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=drip, args=(listener,), daemon=True).start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        sender = RolloutSender(url, timeout_seconds=0.5, patience_seconds=0.1)
        sender.submit([b"body"])
        stats = finished(sender)
        assert (stats["dropped_error"], stats["sent"]) == (1, 0)
        assert "timed out" in str(stats["last_error"])
        sender.close()


@pytest.mark.parametrize(
    "header",
    [
        "Content-Length: " + "9" * 5000,
        "Retry-After: Mon, 01 Jan 99999999999 00:00:00 GMT",
        "Retry-After: Mon, 01 Jan 2030 00:00:00 +99999999999999999999",
    ],
    ids=["length", "year", "zone"],
)
def test_a_number_that_nothing_holds_costs_a_registration_one_try_and_not_its_life(header: str) -> None:
    def serve(listener: socket.socket) -> None:
        for first in (f"503 Away\r\n{header}\r\n\r\n", '201 Created\r\nContent-Length: 17\r\n\r\n{"run":"default"}'):
            connection, _ = listener.accept()
            with connection:
                connection.recv(1 << 16)
                connection.sendall(f"HTTP/1.1 {first}".encode())

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=serve, args=(listener,), daemon=True).start()
        sender = RolloutSender(f"http://127.0.0.1:{listener.getsockname()[1]}")
        sender.submit_job(Job("PUT", run_path("default"), lambda: [b"x"], 1, keep=True))
        stats = finished(sender)
        assert (stats["sent"], stats["retries"], stats["dropped_error"]) == (1, 1, 0)
        sender.close()


def test_the_body_follows_any_interim_answer() -> None:
    """A proxy's 103, say: whoever waits for a 100 after it waits in vain."""

    def serve(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(1 << 16)
            connection.sendall(b"HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\n")
            while not connection.recv(1 << 16).endswith(b"body"):
                pass
            connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 202 Accepted\r\nContent-Length: 17\r\n\r\n")
            connection.sendall(b'{"run":"default"}')

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=serve, args=(listener,), daemon=True).start()
        sender = RolloutSender(f"http://127.0.0.1:{listener.getsockname()[1]}")
        sender.submit([b"body"])
        stats = finished(sender)
        assert (stats["sent"], stats["retries"]) == (1, 0)
        sender.close(1.0)


def test_patience_is_bounded_and_then_the_rollout_is_dropped() -> None:
    sender = RolloutSender(f"http://127.0.0.1:{free_port()}", patience_seconds=0.5)
    sender.submit([b"z"])
    sender.submit([b"z"])
    stats = finished(sender)
    assert (stats["dropped_error"], stats["sent"]) == (2, 0)
    assert "refused" in str(stats["last_error"])
    sender.close()


def test_a_service_that_starts_late_gets_the_registration_first_and_then_everything_queued() -> None:
    port = free_port()
    sender = RolloutSender(f"http://127.0.0.1:{port}", patience_seconds=0.2)
    sender.submit_job(Job("PUT", "/runs/default", lambda: [b"config"], 6, keep=True))
    for i in range(3):
        sender.submit([bytes([i])])
    time.sleep(1.0)  # longer than the patience: the registration, which is kept, holds the queue
    with receiver(port) as service:
        assert finished(sender)["sent"] == 4
        assert [r.body for r in service.requests] == [b"config", b"\0", b"\1", b"\2"]
    sender.close()


def test_a_restarted_service_loses_nothing_that_was_queued() -> None:
    port = free_port()
    sender = RolloutSender(f"http://127.0.0.1:{port}")
    with receiver(port) as service:
        sender.submit([b"1"])
        assert finished(sender)["sent"] == 1
    sender.submit([b"2"])
    time.sleep(0.3)
    with receiver(port) as service:
        assert finished(sender)["sent"] == 2
        assert [r.body for r in service.requests] == [b"2"]
    sender.close()


def test_a_full_queue_drops_the_oldest_and_never_what_is_kept() -> None:
    port = free_port()
    sender = RolloutSender(f"http://127.0.0.1:{port}", queue_bytes=300)
    sender.submit_job(Job("PUT", "/runs/default", lambda: [b"k"], 10_000, keep=True))
    for i in range(10):
        assert sender.submit([bytes([i]) * 100])
    assert not sender.submit([b"z" * 301])  # can never fit
    stats = sender.stats()
    assert stats["dropped_full"] == 8
    assert stats["queue_bytes"] == 300
    with receiver(port) as service:
        assert finished(sender)["sent"] == 4
        assert [r.body[:1] for r in service.requests] == [b"k", b"\7", b"\x08", b"\x09"]
    sender.close()


def head(body: bytes, size_bytes: int) -> Job:
    return Job("PUT", "/runs/default/head", lambda: [body], size_bytes, keep=True)


def test_heads_whose_rollouts_were_all_dropped_are_dropped_with_them() -> None:
    port = free_port()
    sender = RolloutSender(f"http://127.0.0.1:{port}", queue_bytes=100)
    sender.submit_job(Job("PUT", "/runs/default", lambda: [b"run"], 3, keep=True))
    for version in range(4):
        sender.submit_job(head(b"head%d" % version, 5))
        sender.submit([b"rollout%d" % version + b"." * 92])
    with receiver(port) as service:
        finished(sender)
        assert [r.body[:8] for r in service.requests] == [b"run", b"head3", b"rollout3"]
    sender.close()


@pytest.mark.parametrize("rollout_bytes", [10, 101], ids=["small", "too large to be queued"])
def test_heads_do_not_fill_the_memory_of_a_trainer_whose_service_is_away(rollout_bytes: int) -> None:
    port = free_port()
    sender = RolloutSender(f"http://127.0.0.1:{port}", queue_bytes=100)
    sender.submit_job(Job("PUT", "/runs/default", lambda: [b"run"], 3, keep=True))
    for version in range(30):
        sender.submit_job(head(b"head%02d" % version, 40))
        sender.submit([b"rollout%02d" % version, bytes(rollout_bytes - 9)])
        assert sum(job.size_bytes for job in sender._queue.waiting) <= 3 + 40 + 2 * 100
    with receiver(port) as service:
        finished(sender)
        bodies = [r.body for r in service.requests]
    assert (bodies[0], bodies[-1][:9]) == (b"run", b"rollout29" if rollout_bytes == 10 else b"head29")
    for body, before in zip(bodies[2:], bodies[1:], strict=False):
        if body.startswith(b"rollout"):
            assert before == b"head" + body[7:9], "a rollout never goes out with another head than its own"
    sender.close()


def test_close_waits_as_long_as_files_arrive_and_then_says_what_is_lost(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six files take three times the patience together; then the service is away, and patience ends the wait."""
    monkeypatch.setattr("rl_hooks.sending.sender._SAY_SECONDS", 0.2)

    def slowly(_request: Received) -> Answer:
        time.sleep(0.5)
        return 202, {}, {"duplicate": False}

    with receiver() as service:
        service.answer = slowly
        sender = RolloutSender(service.url, patience_seconds=1.0)
        for number in range(6):
            sender.submit([b"%d" % number])
        assert sender.close()
        assert len(service.requests) == 6
    assert "requests (0.0 MB of rollouts) are still to be sent to the service" in caplog.text
    away = RolloutSender(f"http://127.0.0.1:{free_port()}", patience_seconds=1.0)
    away.submit_job(Job("PUT", run_path("default"), lambda: [b"0"], 1, keep=True))
    away.submit([b"1"])
    began = time.monotonic()
    assert not away.close()
    assert time.monotonic() - began > 1.0
    assert "requests that were not sent: what they hold is lost" in caplog.text


def test_close_counts_the_file_in_hand_as_lost(caplog: pytest.LogCaptureFixture) -> None:
    sender = RolloutSender(f"http://127.0.0.1:{free_port()}", patience_seconds=30.0)
    sender.submit([b"1"])
    assert not sender.close(0.5)
    assert sender.stats()["dropped_closed"] == 1
    assert "closed with 1 requests that were not sent" in caplog.text


def test_an_error_in_the_block_is_seen_long_before_patience_ends() -> None:
    url, ended = f"http://127.0.0.1:{free_port()}", threading.Event()

    def block() -> None:
        with (
            pytest.raises(MemoryError, match="theirs"),
            DrafterHook(tiny_qwen3(), url, run="r", aux_layers=AUX, patience_seconds=600.0),
        ):
            raise MemoryError("theirs")
        ended.set()

    threading.Thread(target=block, daemon=True).start()
    assert ended.wait(60)


def test_what_waits_is_said_without_the_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A log handler that hangs holds up whoever flushes, and nobody else."""
    monkeypatch.setattr("rl_hooks.sending.sender._SAY_SECONDS", 0.1)
    said, go_on = threading.Event(), threading.Event()

    class Hangs(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "are still to be sent" in record.getMessage():
                said.set()
                go_on.wait(60)

    handler = Hangs()
    logging.getLogger("rl_hooks").addHandler(handler)
    sender = RolloutSender(f"http://127.0.0.1:{free_port()}", patience_seconds=60.0)
    sender.submit([b"1"])
    thread = threading.Thread(target=sender.flush, args=(2.0,))
    thread.start()
    try:
        assert said.wait(60)
        assert sender.submit([b"2"]), "it waits for no handler"
        assert not go_on.is_set()
    finally:
        go_on.set()
        thread.join()
        logging.getLogger("rl_hooks").removeHandler(handler)
        sender.close(0.1)


@pytest.mark.parametrize("status", [308, 400, 405, 411, 413])
def test_a_proxys_refusal_of_a_registration_is_not_final(status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nginx refuses a body of over 1 MiB by default (413), until somebody mends that."""
    monkeypatch.setattr("rl_hooks.sending.delivery._PERSON_SECONDS", 0.01)
    statuses = [status, 201, 202]
    with receiver() as service:
        service.answer = lambda _request: (statuses.pop(0), {}, {})
        sender = RolloutSender(service.url, run="r")
        sender.submit_job(Job("PUT", run_path("r"), lambda: [b"0"], 1, keep=True))
        sender.submit([b"1"])
        assert (finished(sender)["sent"], sender.refused) == (2, False)
        sender.close()


def test_a_hook_is_closed_at_the_end_of_its_block() -> None:
    with receiver() as service:
        model = tiny_qwen3()
        with DrafterHook(model, service.url, run="r", aux_layers=AUX) as hook:
            assert hook.flush()
        assert not hook.sender.submit([b"after close"])
        assert [request.path for request in service.requests] == ["/runs/r"]
        assert not any(module._forward_hooks for module in model.modules())


def test_rollouts_that_came_before_are_counted_and_said(caplog: pytest.LogCaptureFixture) -> None:
    with receiver() as service:
        answer = {"duplicate": True, "known_rollouts": 4, "warning": "rollouts came in an earlier batch (4 of 4)"}
        service.answer = lambda _request: (200, {}, answer)
        sender = RolloutSender(service.url)
        for _ in range(3):
            sender.submit([b"1"])
        assert (finished(sender)["duplicates"], sender.stats()["known_rollouts"]) == (3, 12)
        sender.close()
    assert caplog.text.count("came in an earlier batch") == 1


def test_submitting_never_blocks_and_never_raises(caplog: pytest.LogCaptureFixture) -> None:
    """The peer takes connections and never answers: whoever waits for it waits until the test's own end."""

    def explode() -> list[bytes]:
        raise RuntimeError("no")

    with socket.create_server(("127.0.0.1", 0)) as silent:
        sender = RolloutSender(f"http://127.0.0.1:{silent.getsockname()[1]}", queue_bytes=1000, timeout_seconds=600)
        for _ in range(1000):
            sender.submit([b"z" * 100])
        assert not sender.submit(explode)
        assert sender.submit(explode, size_bytes=10)
        assert not sender.close(0.1)
        assert not sender.submit([b"after close"])
    stats = sender.stats()
    assert stats["dropped_closed"] >= 10
    assert "requests that were not sent: what they hold is lost" in caplog.text
    assert stats["queue_bytes"] == 0


def test_an_exploding_body_does_not_end_the_thread() -> None:
    with receiver() as service:
        sender = RolloutSender(service.url)

        def explode() -> list[bytes]:
            raise RuntimeError("copy failed")

        sender.submit(explode, size_bytes=1)
        sender.submit([b"next"])
        stats = finished(sender)
        assert (stats["dropped_error"], stats["sent"]) == (1, 1)
        assert "copy failed" in str(stats["last_error"])
        sender.close()


def test_a_rank_that_did_not_register_waits_for_the_run_to_appear(caplog: pytest.LogCaptureFixture) -> None:
    with receiver() as service:
        answers: list[Answer] = [(404, {}, {"type": NO_SUCH_RUN, "detail": "unknown run"})] * 2 + [(202, {}, {})]
        service.answer = lambda _request: answers.pop(0)
        sender = RolloutSender(service.url, retry_statuses=frozenset({404}))
        sender.submit([b"z"])
        stats = finished(sender)
        assert (stats["sent"], stats["retries"]) == (1, 2)
        sender.close()
    (said,) = [record.message for record in caplog.records]
    assert "unknown run. It is tried again: rank 0 registers the run in its first forward" in said


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_does_not_send_its_parents_rollouts_again() -> None:
    port = free_port()
    sender = RolloutSender(f"http://127.0.0.1:{port}")
    sender.submit([b"parent"])
    child = os.fork()
    if child == 0:
        ok = sender.submit([b"child"]) and sender.stats()["queue_items"] == 1 and sender.flush(10)
        os._exit(0 if ok else 1)
    with receiver(port) as service:
        assert finished(sender)["sent"] == 1
        service.wait(2)
        assert os.waitpid(child, 0)[1] == 0
        assert sorted(r.body for r in service.requests) == [b"child", b"parent"]
    sender.close()


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
@pytest.mark.parametrize("call", ["flush", "close", "stats", "submit"])
def test_a_child_that_was_forked_while_a_thread_held_the_senders_lock_never_waits_for_it(call: str) -> None:
    """Or a data loader's worker would hang in whatever it inherited, and the trainer with it."""
    sender = RolloutSender(f"http://127.0.0.1:{free_port()}")
    sender.submit([b"parent"])
    calls: dict[str, Callable[[], bool]] = {
        "flush": lambda: sender.flush(10),
        "close": lambda: sender.close(10),  # nothing of its own is lost
        "stats": lambda: sender.stats()["queue_items"] == 0,
        "submit": lambda: not sender.submit(lambda: next(iter(()))),  # cannot be made, which is noted
    }
    held, release = threading.Event(), threading.Event()

    def hold() -> None:
        with sender._changed:
            held.set()
            release.wait(60)

    threading.Thread(target=hold, daemon=True).start()
    assert held.wait(60)
    child = os.fork()
    if child == 0:
        ok = False
        try:
            faulthandler.dump_traceback_later(20, exit=True)  # a lock in C heeds no signal
            ok = calls[call]()
        finally:
            os._exit(0 if ok else 1)
    assert os.waitpid(child, 0)[1] == 0
    release.set()
    sender.close(0.0)


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_child_that_was_forked_while_a_thread_wrote_to_the_log_does_not_wait_for_the_logs_stream() -> None:
    """Its copy of the stream stays locked, and who waits for that waits in C: no signal ends it."""
    read, write = os.pipe()
    os.set_blocking(write, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(write, bytes(65536))
    os.set_blocking(write, True)
    log = logging.getLogger("rl_hooks")
    sender = RolloutSender(f"http://127.0.0.1:{free_port()}")
    with os.fdopen(write, "w") as stream:
        handler = logging.StreamHandler(stream)
        log.addHandler(handler)
        try:
            writer = threading.Thread(target=stream.write, args=("x" * 1_000_000,), daemon=True)  # beyond any buffer
            writer.start()
            writer.join(0.5)
            assert writer.is_alive(), "the pipe is full: it waits in `write`, with the stream's lock"
            child = os.fork()
            if child == 0:
                faulthandler.dump_traceback_later(20, exit=True)
                queued = sender.submit(lambda: next(iter(())))  # cannot be made, which is noted and logged
                os._exit(0 if not queued and "could not be queued" in sender.stats()["last_error"] else 1)
            assert os.waitpid(child, 0)[1] == 0
        finally:
            log.removeHandler(handler)
            reader = threading.Thread(target=lambda: [*iter(lambda: os.read(read, 65536), b"")], daemon=True)
            reader.start()
            writer.join(60)
    reader.join(60)
    os.close(read)
    sender.close(0.0)


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_child_that_was_forked_while_a_thread_counted_counts_on() -> None:
    """The hook's own counts: they are in no sender, and are made once."""
    tally = Tally(logging.getLogger("rl_hooks"), "files")
    with tally._lock:
        child = os.fork()
        if child == 0:
            faulthandler.dump_traceback_later(20, exit=True)
            tally.add("files")
            os._exit(0 if tally.counts() == {"files": 1} else 1)
        assert os.waitpid(child, 0)[1] == 0
    assert tally.counts() == {"files": 0}


def test_what_is_queued_while_there_is_no_thread_to_be_had_is_sent_once_there_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    start, refusals = threading.Thread.start, [1, 1]

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "rollout-sender" and refusals:
            refusals.pop()
            raise RuntimeError("can't start new thread")
        start(thread)

    with receiver() as service:
        monkeypatch.setattr(threading.Thread, "start", refuse)
        lonely = RolloutSender(service.url)
        assert lonely.submit([b"0"])
        assert not lonely.close(0.1)
        sender = RolloutSender(service.url)
        for i in range(3):
            assert sender.submit([bytes([i])])
        assert finished(sender)["sent"] == 3
        assert [r.body for r in service.requests] == [b"\0", b"\1", b"\2"]
        sender.close()


@pytest.mark.parametrize("url", ["", "127.0.0.1:80", "ftp://x", "http://", "http://h?x=1"])
def test_a_url_that_is_none_is_refused_at_once(url: str) -> None:
    with pytest.raises(ValueError, match="service URL"):
        RolloutSender(url)


def test_a_url_with_a_password_is_refused_and_not_told() -> None:
    # The agent's client would send it in the token's place, the sender not at all; both would log it.
    with pytest.raises(ValueError, match="DRAFTALIGN_TOKEN") as refused:
        RolloutSender("http://trainer:s3cret@h:1")
    assert "cret" not in str(refused.value)


def test_origins_are_parsed_with_ports_and_base_paths() -> None:
    assert Origin.parse("https://h/x/") == Origin("https", "h", 443, "/x")
    assert Origin.parse("http://[::1]:81") == Origin("http", "::1", 81, "")


def test_a_refusal_in_mid_body_is_read_and_not_taken_for_a_broken_pipe() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            peer, _ = listener.accept()
            with peer:
                peer.recv(65536)
                peer.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
                peer.recv(65536)
                peer.sendall(b"HTTP/1.1 413 Too Large\r\nContent-Length: 22\r\n\r\n" + b'{"detail":"too large"}')
                peer.shutdown(socket.SHUT_RDWR)
                time.sleep(0.5)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        sender = RolloutSender(f"http://127.0.0.1:{listener.getsockname()[1]}")
        sender.submit([bytes(32 << 20)])
        stats = finished(sender)
        thread.join()
        assert stats["dropped_error"] == 1
        assert "413: too large" in str(stats["last_error"])
        sender.close()


def saying(answer: object) -> Callable[[Received], Answer]:
    return lambda _request: (202, {}, answer)


def heard(sender: RolloutSender, service: Receiver, *answers: object) -> dict[str, object]:
    """Send as many batches as there are answers."""
    for answer in answers:
        service.answer = saying(answer)
        sender.submit([b"z"])
        stats = finished(sender)
    return stats


def test_deaths_are_counted_from_the_first_answer_on_and_each_kind_of_reason_is_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with receiver() as service, caplog.at_level(logging.WARNING, "rl_hooks"):
        sender = RolloutSender(service.url, run="r")
        gap = "log-probabilities disagree with the features by {} nats"
        stats = heard(
            sender,
            service,
            {"dead_total": 7, "last_dead_reason": "of another trainer"},
            {"dead_total": 7, "last_dead_reason": "of another trainer"},
            {"dead_total": 8, "last_dead_reason": gap.format(2.5)},
            {"dead_total": 10, "last_dead_reason": gap.format(0.31)},
            {"dead_total": 11, "last_dead_reason": "input_ids: holds an id outside the vocabulary"},
            {"dead_total": 12, "last_dead_reason": gap.format(1)},
        )
        assert (stats["dead"], stats["last_dead_reason"]) == (5, gap.format(1))
        told = [r.message for r in caplog.records]
        assert len(told) == 2
        assert (
            "batches of run 'r' die in the drafter service (1 so far) and train nothing: " + gap.format(2.5) in told[0]
        )
        assert "(4 so far) and train nothing: input_ids: holds" in told[1]
        assert (stats["sent"], stats["dropped_error"]) == (6, 0)
        # The run was made again, or Redis emptied: counting began again.
        stats = heard(
            sender,
            service,
            {"dead_total": 0, "last_dead_reason": ""},
            {"dead_total": 1, "last_dead_reason": gap.format(4)},
        )
        assert stats["dead"] == 6
        sender.close()


@pytest.mark.parametrize(
    "answer",
    [{}, {"dead_total": "3", "last_dead_reason": "x"}, {"dead_total": 3}, {"dead_total": None, "warning": 7}],
)
def test_an_older_service_that_says_nothing_of_deaths_does_as_well(
    answer: object, caplog: pytest.LogCaptureFixture
) -> None:
    with receiver() as service, caplog.at_level(logging.WARNING, "rl_hooks"):
        sender = RolloutSender(service.url)
        stats = heard(sender, service, answer, answer)
        assert (stats["sent"], stats["dead"], stats["last_dead_reason"]) == (2, 0, "")
        assert caplog.records == []
        sender.close()


def test_after_a_registration_was_turned_away_nothing_more_is_sent_and_a_head_turned_away_ends_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with receiver() as service, caplog.at_level(logging.WARNING, "rl_hooks"):
        sender = RolloutSender(service.url, run="r")
        service.answer = lambda request: (202 if request.method == "POST" else 409, {}, {"detail": "no"})
        sender.submit_job(Job("PUT", "/runs/r/head", lambda: [b"h"], 1, keep=True))
        sender.submit([b"z"])
        assert finished(sender)["sent"] == 1
        assert not sender.refused
        sender.submit_job(Job("PUT", "/runs/r", lambda: [b"run"], 3, keep=True))
        sender.submit([b"z"])
        stats = finished(sender)
        assert not sender.submit([b"z"])
        assert sender.refused
        assert (stats["sent"], sender.stats()["dropped_error"], stats["queue_bytes"]) == (1, 4, 0)
        assert len(service.requests) == 3
        assert [r.message.count("its own work goes on") for r in caplog.records] == [0, 1]
        sender.close()


def test_a_warning_of_the_service_reaches_the_log_once(caplog: pytest.LogCaptureFixture) -> None:
    with receiver() as service, caplog.at_level(logging.WARNING, "rl_hooks"):
        sender = RolloutSender(service.url)
        stats = heard(sender, service, {"warning": "a drafter was ignored"}, {"warning": "a drafter was ignored"})
        assert stats["sent"] == 2
        assert caplog.text.count("a drafter was ignored") == 1
        sender.close()


@pytest.mark.parametrize("status", [200, 404])
@pytest.mark.parametrize("number", ["1", "2"])
def test_a_service_of_another_contract_is_told_in_the_log_once(
    number: str, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    with receiver() as service, caplog.at_level(logging.WARNING, "rl_hooks"):
        service.answer = lambda _: (status, {wire.API_HEADER: number}, {})
        sender = RolloutSender(service.url)
        for path in ("/runs/default/head", "/rollouts?run=default"):
            sender.submit_job(Job("POST", path, lambda: [b"file"], 3))
        finished(sender)
        said = f"expected Draftalign-Api: 1, got '{number}'; use rl_hooks of the service's version. It goes on"
        assert caplog.text.count(said) == (number == "2")
        sender.close()
