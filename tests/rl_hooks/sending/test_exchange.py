"""One HTTP request, byte by byte: what is sent, when, and how any answer is read."""

from __future__ import annotations

import email.utils
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from rl_hooks.sending import exchange as module
from rl_hooks.sending.exchange import Origin, Reply, ReplyError, RunService, clean_token, exchange, trusted

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


class Line:
    """The server's end of one connection."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection, self._file = connection, connection.makefile("rb")
        self.head = b""
        self.body = b""

    def hear(self) -> None:
        while not self.head.endswith(b"\r\n\r\n"):
            line = self._file.readline()
            if not line:
                return
            self.head += line

    def take(self, size: int) -> None:
        self.body += self._file.read(size)

    def say(self, text: bytes) -> None:
        self._connection.sendall(text)


@contextmanager
def serving(acts: Callable[[Line], None], base: str = "") -> Iterator[tuple[Origin, list[Line]]]:
    """One connection is accepted; `acts` is told of it after its headers, and it is closed then."""
    lines: list[Line] = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def work() -> None:
            connection, _ = server.accept()
            with connection:
                lines.append(Line(connection))
                lines[0].hear()
                acts(lines[0])
                lines[0]._file.close()

        thread = threading.Thread(target=work)
        thread.start()
        yield Origin("http", "127.0.0.1", server.getsockname()[1], base), lines
        thread.join()


def ask(
    origin: Origin, body: Any = (b"abc",), headers: Mapping[str, str] | None = None, *, timeout_seconds: float = 60.0
) -> Reply:
    return exchange(origin, "POST", "/rollouts", headers or {}, body, timeout_seconds=timeout_seconds)


def never() -> Iterator[bytes]:
    raise AssertionError("the body was asked for")
    yield b""


@pytest.mark.parametrize("interim", [[CONTINUE], [b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n"], [CONTINUE] * 8, []])
def test_the_body_goes_out_whole_once_the_server_wants_it_or_is_silent(
    interim: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SLICE_BYTES", 7)
    if not interim:
        monkeypatch.setattr(module, "CONTINUE_SECONDS", 0.01)
    array: Any = np.arange(6, dtype=np.float32).reshape(2, 3)
    body = [b"head", b"", memoryview(array), memoryview(array[:0]), b"tail"]

    def acts(line: Line) -> None:
        line.say(b"".join(interim))
        line.take(4 + 24 + 4)
        line.say(OK)

    with serving(acts, "/base") as (origin, lines):
        reply = ask(origin, body, {"X-Run": "one"})
    assert lines[0].body == b"head" + array.tobytes() + b"tail"
    assert (reply.status, reply.body, reply.body_bytes_sent) == (200, b"{}", 32)
    head = lines[0].head.decode().split("\r\n")
    assert head[0] == "POST /base/rollouts HTTP/1.1"
    assert sorted(head[1:]) == [
        "",
        "",
        "Connection: close",
        "Expect: 100-continue",
        f"Host: 127.0.0.1:{origin.port}",
        "X-Run: one",
    ]


def test_a_server_that_refuses_the_headers_gets_no_body() -> None:
    with serving(lambda line: line.say(b"HTTP/1.1 429 Full\r\nRetry-After: 7\r\nContent-Length: 4\r\n\r\nfull")) as (
        origin,
        lines,
    ):
        reply = ask(origin, never())
    assert (reply.status, reply.detail, reply.retry_after_seconds, reply.body_bytes_sent) == (429, "full", 7.0, 0)
    assert lines[0].body == b""


def test_a_refusal_in_the_middle_of_a_body_is_told_and_not_the_broken_pipe() -> None:
    asked = threading.Event()

    def acts(line: Line) -> None:
        line.say(CONTINUE + b"HTTP/1.1 507 No room\r\nContent-Length: 0\r\n\r\n")
        asked.wait(60)

    piece = bytes(1 << 20)
    with serving(acts) as (origin, _):
        reply = ask(origin, (piece for _ in range(64)), timeout_seconds=0.3)
        asked.set()
    assert reply.status == 507
    assert reply.body_bytes_sent < 64 << 20


def test_a_connection_that_breaks_in_the_middle_of_a_body_is_an_error() -> None:
    def acts(line: Line) -> None:
        line.say(CONTINUE)
        line.take(10)

    with serving(acts) as (origin, _), pytest.raises(OSError, match=r"Broken pipe|reset by peer"):
        ask(origin, (bytes(1 << 20) for _ in range(64)))


LONG = bytes(80 << 10)
HEADS = b"HTTP/1.1 200 OK\r\n"


@pytest.mark.parametrize(
    ("answer", "body"),
    [
        (HEADS + b"Content-Length: 3\r\n\r\nabcdef", b"abc"),
        (HEADS + b"\r\nto the end", b"to the end"),
        (HEADS + b"Content-Length: -3\r\n\r\nabc", b"abc"),
        (HEADS + "Content-Length: ²\r\n\r\nabc".encode("latin-1"), b"abc"),
        (HEADS + b"Content-Length: " + b"9" * 5000 + b"\r\n\r\nabc", b"abc"),
        (HEADS + b"\r\n" + LONG, LONG[: 64 << 10]),
        (HEADS + b"Content-Length: 81920\r\n\r\n" + LONG, LONG[: 64 << 10]),
        (HEADS + b"Transfer-Encoding: Chunked\r\n\r\n3;x=y\r\nabc\r\nA\r\n0123456789\r\n0\r\n\r\n", b"abc0123456789"),
        (HEADS + b"Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n-1\r\nxyz", b"abc"),
        (HEADS + b"Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n", b"abc"),
        (HEADS + b"Transfer-Encoding: chunked\r\n\r\n" + 3 * (b"8000\r\n" + bytes(1 << 15) + b"\r\n"), bytes(1 << 16)),
        (HEADS + b"Transfer-Encoding: chunked\r\n\r\n14000\r\n" + LONG, LONG[: 64 << 10]),
        (2 * CONTINUE + b"HTTP/1.0 200\r\n\r\nold", b"old"),
    ],
)
def test_any_answer_is_read_to_its_end_or_to_64_kib(answer: bytes, body: bytes) -> None:
    def acts(line: Line) -> None:
        line.say(CONTINUE)
        line.take(3)
        line.say(answer)

    with serving(acts) as (origin, _):
        reply = ask(origin)
    assert (reply.status, reply.body) == (200, body)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (b"", "closed the connection without an answer"),
        (b"SSH-2.0-OpenSSH\r\n", "expected an HTTP status line, got b'SSH-2.0-OpenSSH"),
        (b"HTTP/1.1\r\n\r\n", "expected an HTTP status line"),
        (b"HTTP/2 200 OK\r\n\r\n", "expected an HTTP status line"),
        (b"HTTP/1.1 2000 OK\r\n\r\n", "expected an HTTP status line"),
        (b"HTTP/1.1 2xx OK\r\n\r\n", "expected an HTTP status line"),
        (9 * CONTINUE, "more than 8 interim answers"),
        (HEADS + 200 * b"A: b\r\n" + b"\r\n", "not an HTTP answer: .*got more than 100 headers"),
    ],
)
def test_what_is_no_answer_is_named(answer: bytes, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CONTINUE_SECONDS", 0.01)

    def acts(line: Line) -> None:
        line.take(3)
        line.say(answer)

    with serving(acts) as (origin, _), pytest.raises(ReplyError, match=said):
        ask(origin)


def test_what_drips_is_read_until_the_time_is_over() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.send(b"x")
        incoming = module._Incoming(ours)
        with pytest.raises(TimeoutError, match="timed out"):
            incoming.readinto(bytearray(1))
        incoming.begin(60.0)
        assert incoming.readinto(bytearray(1)) == 1
        assert 0 < (ours.gettimeout() or 0) <= 60.0


def reply(headers: Mapping[str, str] | None = None, body: bytes = b"") -> Reply:
    return Reply(503, headers or {}, body, 0)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        (" 7 ", 7.0),
        ("0", 0.0),
        ("1234567890123", 123456789.0),
        ("", None),
        ("-1", None),
        ("²", None),
        ("soon", None),
        ("Wed, 21 Oct 2015 07:28:00 GMT", 0.0),
        ("Wed, 21 Oct 99999 07:28:00 GMT", None),
    ],
)
def test_when_to_come_again_is_a_number_or_a_date(text: str, seconds: float | None) -> None:
    assert reply({"retry-after": text}).retry_after_seconds == seconds
    if seconds is None:
        assert reply().retry_after_seconds is None


def test_a_date_that_is_to_come_is_so_many_seconds_away() -> None:
    hours = reply({"retry-after": email.utils.formatdate(time.time() + 86400, usegmt=True)}).retry_after_seconds
    assert hours is not None
    assert 0 < hours <= 86400


@pytest.mark.parametrize(
    ("body", "detail"),
    [
        (b'{"detail": "why", "title": "what"}', "why"),
        (b'{"title": "what"}', "what"),
        (b'{"detail": {"a": 1}}', "{'a': 1}"),
        (b"[1]", "[1]"),
        (b"plain \xff", "plain \ufffd"),
        (b"[" * 100_000, "[" * 500),
        (b"x" * 501, "x" * 500),
    ],
)
def test_why_is_what_the_problem_says_or_the_beginning_of_the_body(body: bytes, detail: str) -> None:
    assert reply(body=body).detail == detail
    assert isinstance(reply(body=body).fields, dict)


@pytest.mark.parametrize("url", ["ftp://h", "h:80", "http://", "http://h?a", "http://h#a", "http://h:99999"])
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match=r"http://host:port|range"):
        Origin.parse(url)


def test_an_address_with_a_password_is_refused_and_not_told() -> None:
    with pytest.raises(ValueError, match="DRAFTALIGN_TOKEN") as caught:
        Origin.parse("http://user:secret@h:80")
    assert "secret" not in str(caught.value)
    assert Origin.parse("http://H/a/b//") == Origin("http", "h", 80, "/a/b")


def test_a_token_is_stripped_and_one_that_no_header_can_hold_is_refused_and_not_told() -> None:
    assert [clean_token(token, "T") for token in (None, "", " \n", " t1\n")] == [None, None, None, "t1"]
    for token in ("a\nb", "schl\u00fcssel"):
        with pytest.raises(ValueError, match=r"^T has a character") as caught:
            clean_token(token, "T")
        assert token not in str(caught.value)


@pytest.mark.parametrize("token", [None, "t1"])
def test_a_runs_requests_carry_its_token(token: str | None) -> None:
    with serving(lambda line: line.say(OK)) as (origin, lines):
        service = RunService(origin, "one", token)
        service.ask("GET", "/runs/one", {"X-Own": "1"}, (), timeout_seconds=60.0)
    assert (b"Authorization: Bearer t1\r\n" in lines[0].head) == (token is not None)
    assert (b"Authorization" in lines[0].head) == (token is not None)
    assert b"X-Own: 1\r\n" in lines[0].head
    assert "t1" not in repr(service)


def test_authorities_that_cannot_be_read_are_named(tmp_path: Any) -> None:
    with pytest.raises(OSError, match=f"DRAFTALIGN_CA_FILE {tmp_path}/none.*expected a PEM file"):
        trusted(str(tmp_path / "none"))
