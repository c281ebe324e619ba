"""A long body goes from its connection to the spool, past the HTTP parser; the connection goes on after it."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import random
import select
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import uvicorn
from helpers.engine.agent_fixtures import eventually
from helpers.service.service_fixtures import CONFIG, HEADERS, VOCAB, RunningService, rollout_file
from starlette.requests import Request

from rl_hooks import wire
from service.api import problems, uploads
from service.storage.spool import Upload

Serve = Callable[..., RunningService]
GET = b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"


def long_file(name: str = "a") -> bytes:
    """Some 3 MB: more than one buffer."""
    return rollout_file((f"{name}0", f"{name}1"), lengths=(20_000, 20_000), policy_version=1)


def request(body: bytes, *extra: str) -> bytes:
    lines = ["POST /rollouts?run=default HTTP/1.1", "Host: 127.0.0.1", f"Content-Type: {wire.CONTENT_TYPE}"]
    lines += [f"Content-Length: {len(body)}", *extra]
    return "\r\n".join(lines).encode() + b"\r\n\r\n"


class Connection:
    """A kept connection, and the answers on it."""

    def __init__(self, service: RunningService) -> None:
        self.socket = socket.create_connection(("127.0.0.1", service.port), timeout=60)
        self._left = b""

    def answer(self) -> tuple[int, bytes]:
        """Status and body of the next answer."""
        while b"\r\n\r\n" not in self._left:
            self._more()
        head, _, self._left = self._left.partition(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r")[0] or 0)
        while len(self._left) < length:
            self._more()
        body, self._left = self._left[:length], self._left[length:]
        return int(head.split()[1]), body

    def close(self) -> None:
        self.socket.close()

    def _more(self) -> None:
        came = self.socket.recv(65536)
        assert came, f"closed after {self._left!r}"
        self._left += came


@pytest.fixture(params=["uvloop", "asyncio"])
def either_loop(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, serve: Serve) -> RunningService:
    """The API, on each of the event loops."""
    monkeypatch.setattr(uvicorn, "Config", functools.partial(uvicorn.Config, loop=request.param))
    service = serve()
    service.register()
    return service


@pytest.fixture
def connection(either_loop: RunningService) -> Iterator[Connection]:
    with contextlib.closing(Connection(either_loop)) as found:
        yield found


def pieces(data: bytes, most: int, draw: random.Random) -> Iterator[bytes]:
    at = 0
    while at < len(data):
        size = draw.randint(1, most)
        yield data[at : at + size]
        at += size


@pytest.mark.parametrize("most", [50, 4096, 300_000, 1 << 30])
def test_however_it_comes_the_file_is_the_body_and_the_connection_goes_on(
    either_loop: RunningService, connection: Connection, most: int
) -> None:
    """In pieces of any size, or all at once with the next requests behind it: they are answered one by one."""
    draw = random.Random(most)
    short = most == 50
    files = [rollout_file((f"{n}a", f"{n}b"), policy_version=1) if short else long_file(n) for n in "xyz"]
    stream = b"".join(request(file) + file + GET for file in files)
    for piece in pieces(stream, most, draw):
        connection.socket.sendall(piece)
    for _ in files:
        status, body = connection.answer()
        assert status == 202, body
        assert connection.answer() == (200, b'{"status":"ok"}')
    found = {path.read_bytes() for path in either_loop.spooled()}
    assert found == set(files)


def test_what_came_while_redis_was_asked_is_part_of_the_body(
    either_loop: RunningService, connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of it, and the next requests too."""
    take = uploads._take_rest

    async def late(request: Request, *args: Any) -> bool:
        await asyncio.sleep(0.3)
        return await take(request, *args)

    monkeypatch.setattr(uploads, "_take_rest", late)
    files = [rollout_file((f"{n}a", f"{n}b"), lengths=(100, 100), policy_version=1) for n in "xy"]
    assert len(files[0]) < 30_000  # the parser is paused beyond 64 KiB
    for file in files:
        cut = wire.header_size(file[:8]) + 10
        connection.socket.sendall(request(file) + file[:cut])
        time.sleep(0.1)
        connection.socket.sendall(file[cut:] + GET)
        status, body = connection.answer()
        assert status == 202, body
        assert connection.answer()[0] == 200
    assert {path.read_bytes() for path in either_loop.spooled()} == set(files)


def test_expect_is_answered_and_a_refused_file_leaves_the_connection_usable(
    either_loop: RunningService, connection: Connection
) -> None:
    """A file whose index is wrong is refused once it has come whole."""
    wrong = rollout_file(
        ("a", "b"),
        tensors={"input_ids": wire.Tensor.of(np.full(40_000, VOCAB, np.int32), "I32")},
        lengths=(20_000,) * 2,
    )
    for file, expected in ((long_file(), 202), (wrong, 422), (long_file(), 200)):
        connection.socket.sendall(request(file, "Expect: 100-continue"))
        assert connection.answer()[0] == 100
        connection.socket.sendall(file)
        status, body = connection.answer()
        assert status == expected, body
    assert [path.read_bytes() for path in either_loop.spooled()] == [long_file()]


@pytest.mark.parametrize("after", [0, 2_000_000])
def test_a_disk_that_fills_is_told_to_a_client_that_is_still_sending(
    either_loop: RunningService, connection: Connection, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    whole = Upload.write

    def write(self: Upload, chunk: bytes | memoryview) -> None:
        if self.path.stat().st_size + len(chunk) > after:
            raise OSError(errno.ENOSPC, "no space left on device")
        whole(self, chunk)

    monkeypatch.setattr(Upload, "write", write)
    file = long_file()
    connection.socket.sendall(request(file))
    connection.socket.sendall(file[:-4])
    status, body = connection.answer()
    assert (status, b"spool-full" in body) == (503, True)
    for at in range(-4, 0):  # a client that does not look yet: for longer than a silent one is waited for
        assert not select.select([connection.socket], [], [], 0.4 * problems._LINGER_IDLE_SECONDS)[0], "closed"
        connection.socket.sendall(file[at : at + 1 or None])
    assert connection.socket.recv(1) == b"", "the connection is closed once all was read"
    assert either_loop.spooled() == []
    monkeypatch.undo()
    assert either_loop.post(file).status_code == 202


@pytest.mark.parametrize("setting", ["idle", "all"])
def test_a_long_body_that_comes_too_slowly_is_refused(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, setting: str
) -> None:
    """Nothing for `body_idle_seconds`; or a byte now and then, for longer than a body of its length may take."""
    service = serve(body_idle_seconds=0.3 if setting == "idle" else 0.5)
    service.register()
    if setting == "all":
        monkeypatch.setattr(uploads, "_MIN_BYTES_PER_SECOND", 1 << 30)
    file, answered = long_file(), False
    with contextlib.closing(Connection(service)) as connection:
        connection.socket.sendall(request(file) + file[:2_000_000])
        for at in range(2_000_000, 2_000_100) if setting == "all" else ():
            answered = bool(select.select([connection.socket], [], [], 0.1)[0])
            if answered:
                break
            connection.socket.sendall(file[at : at + 1])
        assert answered is (setting == "all")
        status, body = connection.answer()
        assert (status, b"too-slow" in body) == (408, True)
    eventually(lambda: service.spooled() == [])


@pytest.mark.parametrize("sent", [100, 2_000_000])
def test_an_upload_that_outlasts_a_stop_is_refused_as_any_other(
    serve: Serve, caplog: pytest.LogCaptureFixture, sent: int
) -> None:
    """In the header of the file, and in its tensors: a problem document that says that it may be sent again."""
    service = serve()
    service.register()
    service.server.config.timeout_graceful_shutdown = 1
    file = long_file()
    with contextlib.closing(Connection(service)) as connection:
        connection.socket.sendall(request(file) + file[:sent])
        service.wait_for_requests()
        service.stop()
        status, body = connection.answer()
    assert (status, b"urn:draftalign:stopping" in body) == (503, True), body
    assert service.spooled() == []
    assert not [record for record in caplog.records if record.exc_info], "no traceback: nothing has failed"


def test_a_client_that_leaves_in_a_long_body_leaves_nothing(
    either_loop: RunningService, connection: Connection, caplog: pytest.LogCaptureFixture
) -> None:
    file = long_file()
    with caplog.at_level("DEBUG", "draftalign.api"):
        connection.socket.sendall(request(file) + file[:2_500_000])
        eventually(lambda: [path.stat().st_size for path in either_loop.spooled()] == [2_500_000])
        connection.socket.close()
        eventually(lambda: either_loop.spooled() == [])
        eventually(lambda: "the client left" in caplog.text)
    assert [record.getMessage() for record in caplog.records if record.levelname in ("WARNING", "ERROR")] == []
    assert either_loop.post(file).status_code == 202


def test_a_client_that_left_while_redis_was_asked_is_not_waited_for(
    either_loop: RunningService, connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    take = uploads._take_rest
    reached: list[bool] = []

    async def late(request: Request, *args: Any) -> bool:
        connection.close()
        await asyncio.sleep(0.3)
        reached.append(True)
        return await take(request, *args)

    monkeypatch.setattr(uploads, "_take_rest", late)
    file = long_file()
    connection.socket.sendall(request(file) + file[:5000])
    eventually(lambda: reached == [True] and either_loop.spooled() == [])


def test_another_server_than_ours_passes_the_body_through_asgi(service: RunningService) -> None:
    async def post() -> int:
        transport = httpx.ASGITransport(app=service.server.config.app)  # type: ignore[arg-type]
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            reply = await client.post("/rollouts", content=long_file(), headers=HEADERS)
            return reply.status_code

    future = asyncio.run_coroutine_threadsafe(post(), service.server.servers[0].get_loop())
    assert future.result(60) == 202
    assert [path.read_bytes() for path in service.spooled()] == [long_file()]


def test_two_servers_in_two_threads_do_not_mix_their_bodies(serve: Serve, tmp_path: Path) -> None:
    """Sockets are read without the interpreter's lock: what two event loops read into may not be the same memory."""

    def upload(run: str) -> bool:
        service = services[run]
        sent = {rollout_file((f"{n}a", f"{n}b"), lengths=(20_000, 20_000), run=run) for n in range(12)}
        for file in sent:
            assert service.post(file).status_code == 202
        return {path.read_bytes() for path in service.spooled()} == sent

    services = {run: serve(state_dir=tmp_path / run) for run in ("one", "two")}
    for run, service in services.items():  # one after the other: FastAPI finishes a route at its first request
        service.register(run).raise_for_status()
        assert service.post(b"no rollouts").is_client_error
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(upload, ("one", "two"))) == [True, True]


def test_an_upload_makes_no_directory_and_opens_its_file_once(service: RunningService) -> None:
    """Each such call of the system is a part of what a small upload costs."""
    done: list[tuple[str, str]] = []
    watching = True

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if watching and event in ("os.mkdir", "open") and isinstance(args[0], str | Path):
            done.append((event, str(args[0])))

    sys.addaudithook(hook)  # it cannot be taken away again
    try:
        assert service.post(rollout_file(), run="default").status_code == 202
    finally:
        watching = False
    spool = str(service.layout.root / "spool")
    assert [(event, Path(path).parent.name) for event, path in done if path.startswith(spool)] == [("open", "tmp")]


def test_a_spool_whose_directories_are_gone_takes_files(service: RunningService) -> None:
    shutil.rmtree(service.layout.root / "spool")
    assert service.post(rollout_file(), run="default").status_code == 202
    (blob,) = service.spooled()
    assert blob.read_bytes() == rollout_file()


def test_a_file_of_another_target_than_its_run_has_when_it_has_come_is_not_kept(service: RunningService) -> None:
    """The run was deleted, and its name given to a run of another target, while the file came."""
    body = long_file()
    with contextlib.closing(Connection(service)) as connection:
        connection.socket.sendall(request(body, "Expect: 100-continue"))
        assert connection.answer()[0] == 100
        connection.socket.sendall(body[:100_000])
        service.wait_for_requests()
        assert eventually(lambda: any(path.stat().st_size for path in service.spooled()))
        assert service.client.delete("/runs/default").is_success
        assert service.register(config=CONFIG | {"num_hidden_layers": 9}).status_code == 201
        connection.socket.sendall(body[100_000:])
        status, answer = connection.answer()
    assert (status, b"target_fingerprint" in answer) == (422, True), answer
    assert service.spooled() == []
