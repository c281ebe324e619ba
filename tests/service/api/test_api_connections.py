"""What a stranger may take of the API without a token: bytes and seconds of a header, and connections."""

from __future__ import annotations

import contextlib
import gc
import http.client
import json
import resource
import signal
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from helpers.engine.agent_fixtures import eventually
from helpers.ports import free_port
from helpers.service.port_fixtures import DESCRIPTORS, FLOODS, GET, MIB, POST, Process, places, pour
from helpers.service.service_fixtures import HEADERS, RunningService, rollout_file
from helpers.service.valkey_fixtures import OwnValkey
from pydantic import SecretStr

from service.api import app
from service.api.port import connections
from service.api.port.connections import (
    MAX_CONNECTIONS,
    MAX_HEADER_BYTES,
    MAX_HEADER_FIELDS,
    MAX_PIPELINED,
    Places,
)
from service.settings import Settings


@pytest.fixture
def process(tmp_path: Path, redis_url: str) -> Iterator[Process]:
    made = Process(tmp_path, redis_url)
    yield made
    made.process.kill()
    made.process.wait()


@pytest.fixture(scope="module")
def flooded(tmp_path_factory: pytest.TempPathFactory, valkey: OwnValkey) -> Iterator[Process]:
    """One for all floods: together they may not take what one may."""
    made = Process(tmp_path_factory.mktemp("flooded"), valkey.url)
    yield made
    made.process.kill()
    made.process.wait()


@pytest.mark.parametrize("flood", FLOODS)
def test_a_flood_on_one_connection_takes_no_memory_and_stalls_nobody(flooded: Process, flood: str) -> None:
    begin, piece = FLOODS[flood]
    closed = []
    with flooded.connect() as connection:
        connection.sendall(begin)
        flooding = threading.Thread(target=lambda: closed.append(pour(connection, piece)))
        flooding.start()
        served = [flooded.answers() for _ in range(5)]
        flooding.join(60)
    assert served == [True] * 5
    assert closed == [True]
    assert flooded.peak_bytes() - flooded.fresh_bytes < 24 * MIB


@pytest.mark.parametrize("sent", [b"", GET + b"a: b", POST + b"Content-Length: 1000000\r\n\r\n"])
def test_connections_that_send_no_request_shut_nobody_out(process: Process, sent: bytes) -> None:
    """More of them than the process may open files: half a header, or the beginning of a body that nobody reads."""
    with contextlib.ExitStack() as stack:
        for _ in range(DESCRIPTORS + 50):
            connection = stack.enter_context(process.connect())
            with contextlib.suppress(OSError):  # it may be closed for a newer one by now
                connection.sendall(sent)
        assert [process.answers() for _ in range(5)] == [True] * 5


def whole_answer(connection: socket.socket) -> tuple[int, bytes]:
    """Read one: its body may come in a packet of its own, and the next answer after it."""
    answer = http.client.HTTPResponse(connection)
    answer.begin()
    return answer.status, answer.read()


def test_the_api_may_open_as_many_files_as_the_hard_limit_says(tmp_path: Path, redis_url: str) -> None:
    made = Process(tmp_path, redis_url, hard=2 * DESCRIPTORS)
    try:
        assert resource.prlimit(made.process.pid, resource.RLIMIT_NOFILE) == (2 * DESCRIPTORS,) * 2
    finally:
        made.process.kill()
        made.process.wait()


def test_requests_that_wait_for_redis_leave_descriptors_for_probes(tmp_path: Path, own_valkey: OwnValkey) -> None:
    """Each of them has one connection to the API, and asks for one to a Redis that hangs."""
    made = Process(tmp_path, own_valkey.url)
    asked = b"GET /runs HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer engine-secret\r\n\r\n"
    own_valkey.process.send_signal(signal.SIGSTOP)
    try:
        with contextlib.ExitStack() as stack:
            clients = [stack.enter_context(made.connect()) for _ in range(DESCRIPTORS // 2 - 10)]
            for client in clients:
                client.sendall(asked)
            assert [made.answers() for _ in range(5)] == [True] * 5
            answers = [whole_answer(client) for client in clients]
        assert {status for status, _ in answers} == {503}
        details = {json.loads(body)["detail"].partition(";")[0] for _, body in answers}
        assert details == {
            "Redis does not answer",
            "all connections to Redis that this process may open are in use",
        }
        assert b"Too many open files" not in (tmp_path / "serve.log").read_bytes()
    finally:
        own_valkey.process.send_signal(signal.SIGCONT)
        made.process.kill()
        made.process.wait()


# --- one server in this process


def status(reply: bytes) -> int:
    return int(reply.split(b" ", 2)[1])


def status_of_one(connection: socket.socket) -> int:
    return whole_answer(connection)[0]


def request(fields: int, size: int) -> bytes:
    """A request for /healthz whose header has this number of fields beside Host, and about `size` bytes."""
    one = size // fields
    return b"GET /healthz HTTP/1.1\r\nHost: x\r\n" + (b"a: " + b"b" * (one - 5) + b"\r\n") * fields + b"\r\n"


@pytest.mark.parametrize(
    ("fields", "size", "answer"),
    [
        (1, MAX_HEADER_BYTES - 100, 200),
        (MAX_HEADER_FIELDS - 1, MAX_HEADER_BYTES - 1000, 200),
        (1, MAX_HEADER_BYTES + 100, 431),
        (MAX_HEADER_FIELDS - 1, MAX_HEADER_BYTES + 1000, 431),
        (MAX_HEADER_FIELDS, 1000, 431),
    ],
)
@pytest.mark.parametrize("pieces", [1, 7])
def test_a_header_is_refused_beyond_its_bounds_and_only_there(
    service: RunningService, fields: int, size: int, answer: int, pieces: int
) -> None:
    data = request(fields, size)
    with socket.create_connection(("127.0.0.1", service.port), timeout=60) as connection:
        for _ in range(2 if answer == 200 else 1):  # the second one is counted again
            for i in range(pieces):
                connection.sendall(data[len(data) * i // pieces : len(data) * (i + 1) // pieces])
                time.sleep(0.01)
            reply = connection.recv(65536)
            assert status(reply) == answer
        if answer != 200:
            assert str(MAX_HEADER_BYTES).encode() in reply
            assert connection.recv(1) == b""


def test_a_few_requests_may_be_sent_before_the_first_is_answered(service: RunningService) -> None:
    one = b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"
    last = one.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
    reply = service.raw(one * (MAX_PIPELINED - 1) + last)
    assert reply.count(b"HTTP/1.1 200") == MAX_PIPELINED


@pytest.fixture
def hasty(service: RunningService, monkeypatch: pytest.MonkeyPatch) -> RunningService:
    """A service that waits 0.3 s for a header."""
    monkeypatch.setattr(connections, "HEADER_SECONDS", 0.3)
    return service


def reads_until_closed(connection: socket.socket) -> bytes:
    reply = b""
    while chunk := connection.recv(65536):
        reply += chunk
    return reply


@pytest.mark.parametrize("sent", [b"", b"\r\n", b"GET /heal", GET + b"a: b"])
@pytest.mark.parametrize("kept", [False, True])
def test_a_header_that_does_not_come_ends_the_connection(hasty: RunningService, sent: bytes, kept: bool) -> None:
    with socket.create_connection(("127.0.0.1", hasty.port), timeout=60) as connection:
        if kept:
            connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
            assert status_of_one(connection) == 200
            if not sent:
                return  # idle between two requests: the longer limit holds
        connection.sendall(sent)
        reply = reads_until_closed(connection)
        assert reply == b"" if sent in (b"", b"\r\n") else status(reply) == 408


def test_a_connection_that_is_idle_between_two_requests_ends(
    serve: Callable[..., RunningService], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "IDLE_SECONDS", 1)
    with socket.create_connection(("127.0.0.1", serve().port), timeout=60) as connection:
        for _ in range(2):
            connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
            assert status_of_one(connection) == 200
        assert reads_until_closed(connection) == b"", "closed by the server, with no further word"


def test_bytes_that_drip_into_a_header_do_not_prolong_it(hasty: RunningService) -> None:
    sent, address = 0, ("127.0.0.1", hasty.port)
    closed = contextlib.suppress(BrokenPipeError, ConnectionResetError)
    with socket.create_connection(address, timeout=60) as connection, closed:
        for byte in GET + b"a" * 1000:
            connection.sendall(bytes([byte]))
            sent += 1
            time.sleep(0.05)
    assert 0 < sent < 500, "a header of 50 s is not waited for"


def test_a_body_that_nobody_wanted_keeps_no_connection(hasty: RunningService) -> None:
    with socket.create_connection(("127.0.0.1", hasty.port), timeout=60) as connection:
        connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n")
        assert status_of_one(connection) == 200
        connection.sendall(b"x")
        assert connection.recv(1) == b""


def test_what_is_at_work_or_idle_between_requests_outlasts_the_limit_of_headers(hasty: RunningService) -> None:
    etag = hasty.publish().etag
    body = rollout_file()
    with httpx.Client(base_url=hasty.url, timeout=60) as client:
        poll = client.get("/drafter/latest", params={"wait": 1.0}, headers={"If-None-Match": etag})
        assert poll.status_code == 304
        time.sleep(0.7)
        with silent_connections(hasty, 1):
            assert client.get("/healthz").status_code == 200
    with socket.create_connection(("127.0.0.1", hasty.port), timeout=60) as connection:
        head = "POST /rollouts HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: {}\r\nContent-Length: {}\r\n\r\n"
        connection.sendall(head.format(HEADERS["Content-Type"], len(body)).encode())
        for i in range(4):
            time.sleep(0.2)
            connection.sendall(body[len(body) * i // 4 : len(body) * (i + 1) // 4])
        assert status_of_one(connection) == 202
        time.sleep(0.7)
        connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
        assert status_of_one(connection) == 200


@contextlib.contextmanager
def silent_connections(service: RunningService, count: int) -> Iterator[list[socket.socket]]:
    """So many open connections that send nothing."""
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(socket.create_connection(("127.0.0.1", service.port), 10)) for _ in range(count)]


def test_the_connection_that_waited_longest_gives_way_and_none_at_work_does(service: RunningService) -> None:
    etag = service.publish().etag
    places(service).limit = 4
    replies: list[int] = []

    def poll() -> None:
        headers = {"If-None-Match": etag}
        reply = httpx.get(f"{service.url}/drafter/latest", params={"wait": 3.0}, headers=headers, timeout=60)
        replies.append(reply.status_code)

    polls = [threading.Thread(target=poll) for _ in range(2)]
    service.client.close()
    for thread in polls:
        thread.start()
    service.wait_for_requests(2)
    with silent_connections(service, 5) as silent:
        assert [connection.recv(1) for connection in silent[:3]] == [b""] * 3
        assert httpx.get(f"{service.url}/healthz", timeout=60).status_code == 200
    for thread in polls:
        thread.join(60)
    assert replies == [304, 304]
    service.client = httpx.Client(base_url=service.url)


def test_where_all_connections_are_at_work_a_new_one_is_told_so(service: RunningService) -> None:
    etag = service.publish().etag
    service.client.close()
    service.wait_for_no_connections()
    places(service).limit = 1
    poll = threading.Thread(
        target=httpx.get,
        args=(f"{service.url}/drafter/latest?wait=2",),
        kwargs={"headers": {"If-None-Match": etag}, "timeout": 20},
    )
    poll.start()
    service.wait_for_requests()
    assert httpx.get(f"{service.url}/healthz").status_code == 503
    poll.join(60)
    places(service).limit = 100
    service.client = httpx.Client(base_url=service.url)


@pytest.mark.parametrize(
    ("descriptors", "limit"), [(64, 32), (256, 128), (1024, 512), (4096, 2048), (1 << 20, MAX_CONNECTIONS), (-1, 4096)]
)
def test_connections_leave_descriptors_for_files_and_redis(descriptors: int, limit: int) -> None:
    found = Places(descriptors)
    assert found.limit == limit
    assert descriptors < 0 or found.limit + found.to_redis + found.backlog < descriptors


@pytest.mark.parametrize("protocol", ["h2c", "websocket"])
def test_another_protocol_is_not_taken_up(service: RunningService, protocol: str) -> None:
    fields = f"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: {protocol}\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n"
    fields += "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Version: 13\r\n"
    with socket.create_connection(("127.0.0.1", service.port), timeout=60) as connection:
        for _ in range(2):
            connection.sendall(f"GET /healthz HTTP/1.1\r\nHost: x\r\n{fields}\r\n".encode())
            assert status_of_one(connection) == 200


def test_garbage_collections_pass_over_what_lives_as_long_as_the_process(
    tmp_path: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    frozen: list[int] = []
    full: list[int] = []

    def serve(self: app.Server) -> None:
        self.started = True
        frozen.append(gc.get_freeze_count())
        before = gc.get_stats()[2]["collections"]
        waiting = [[] for _ in range(300_000)]  # type: ignore[var-annotated]  # more than 1,000 requests that wait have
        full.append(gc.get_stats()[2]["collections"] - before)
        del waiting

    monkeypatch.setattr(app.Server, "run", serve)
    alive: list[list[int]] = [[] for _ in range(20_000)]
    before, threshold = gc.get_freeze_count(), gc.get_threshold()
    # Nothing is thawed afterwards: a full collection over what the whole suite has imported takes
    # a second, in which no service of this process answers.
    try:
        app.run_api(Settings(state_dir=tmp_path, redis_url=SecretStr(redis_url), port=free_port()))
    finally:
        gc.set_threshold(*threshold)
    assert frozen[0] >= before + len(alive)
    assert full == [0], "each holds the event loop while it looks at all that wait"


def test_what_no_request_leaves_is_collected_all_the_same(
    serve: Callable[..., RunningService], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Circle:
        def __init__(self) -> None:
            self.itself = self

    monkeypatch.setattr(app, "RETURN_MEMORY_SECONDS", 0.05)
    found = weakref.ref(Circle())
    gc.disable()
    try:
        serve()
        eventually(lambda: found() is None)
    finally:
        gc.enable()


def test_a_request_leaves_no_garbage(service: RunningService) -> None:
    """What refers to itself stays until a full collection: beside many requests these hold the event loop for long."""

    def kept() -> int:
        kinds = {"BoundedProtocol", "RequestResponseCycle", "BodyReader"}
        return sum(type(one).__name__ in kinds for one in gc.get_objects())

    etag, body = service.publish().etag, rollout_file()
    poll = f"GET /drafter/latest?wait=20 HTTP/1.1\r\nHost: localhost\r\nIf-None-Match: {etag}\r\n\r\n".encode()
    post = f"POST /rollouts?run=default HTTP/1.1\r\nHost: localhost\r\nContent-Type: {HEADERS['Content-Type']}\r\n"
    post += f"Content-Length: {len(body)}\r\n\r\n"
    service.client.close()
    service.wait_for_no_connections()
    gc.collect()
    before = kept()
    gc.disable()
    try:
        for said in (
            b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n",
            b"GET /nothing HTTP/1.1\r\nHost: localhost\r\n\r\n" * 2,
            poll,  # whose client goes
            post.encode() + body,
            post.encode() + body[: len(body) // 2],
            post.encode() + b"no file",
        ):
            service.raw(said, read_seconds=0.3)
        service.wait_for_no_connections()
        eventually(lambda: kept() == before)
    finally:
        gc.enable()
