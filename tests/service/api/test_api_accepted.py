"""Connections that come together: probes pass those that wait, and none is lost or kept."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from typing import ClassVar

import pytest
import uvloop
from agent_fixtures import eventually
from service_fixtures import RunningService

from service.api.port.accepted import AcceptedConnections

OTHERS = 100
GET = b"GET %b HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"


@contextlib.contextmanager
def clients(port: int, *said: bytes) -> Iterator[list[socket.socket]]:
    """A connection for each, which has said that."""
    with contextlib.ExitStack() as stack:
        links = []
        for text in said:
            links.append(stack.enter_context(socket.create_connection(("127.0.0.1", port), 20)))
            links[-1].sendall(text)
        yield links


@contextlib.contextmanager
def held(service: RunningService) -> Iterator[None]:
    """Its event loop does nothing."""
    holding, release = threading.Event(), threading.Event()

    def hold() -> None:
        holding.set()
        release.wait(60)

    service.server.servers[0].get_loop().call_soon_threadsafe(hold)
    holding.wait(20)
    try:
        yield
    finally:
        release.set()


@pytest.mark.parametrize("path", ["/healthz", "/readyz"])
def test_a_probe_is_answered_before_those_that_connected_earlier(service: RunningService, path: str) -> None:
    config, order = service.server.config, []
    served = config.loaded_app

    async def recorded(scope, receive, send) -> None:  # type: ignore[no-untyped-def]
        order.append(scope["path"])
        await served(scope, receive, send)

    config.loaded_app = recorded
    try:
        with contextlib.ExitStack() as stack:
            with held(service):
                said = [GET % b"/nothing"] * OTHERS + [GET % path.encode()]
                links = stack.enter_context(clients(service.port, *said))
            answers = [b"".join(iter(lambda link=link: link.recv(4096), b"")) for link in links]  # type: ignore[misc]
    finally:
        config.loaded_app = served
    assert [answer.split()[1] for answer in answers] == [b"404"] * OTHERS + [b"200"]
    assert len(order) == OTHERS + 1
    assert order.index(path) < OTHERS / 4


class Heard(asyncio.Protocol):
    """Notes what is said to it, in order."""

    order: ClassVar[list[bytes]] = []

    def data_received(self, data: bytes) -> None:
        self.order.append(data)


async def heard(count: int) -> None:
    """Turns of the loop until so many have spoken."""
    while len(Heard.order) < count:  # noqa: ASYNC110 - each turn counts
        await asyncio.sleep(0)


def with_accepted(act: Callable[[socket.socket, AcceptedConnections], object], room: int = 1000) -> list[bytes]:
    """What came to the protocols beside `act`, a coroutine function of a listening socket's server."""
    Heard.order = []

    async def run() -> None:
        listener = socket.create_server(("127.0.0.1", 0), backlog=512)
        listener.setblocking(False)
        accepted = AcceptedConnections([listener], Heard, lambda: room)  # without the loop's own server
        try:
            await act(listener, accepted)  # type: ignore[misc]
        finally:
            accepted.close()
            listener.close()

    uvloop.run(run())
    return Heard.order


def test_a_probe_that_speaks_late_passes_those_that_wait_too() -> None:
    async def act(listener: socket.socket, _accepted: AcceptedConnections) -> None:
        with clients(listener.getsockname()[1], *[b"agent"] * OTHERS, b"") as links:
            await heard(1)  # all were accepted by now
            assert len(Heard.order) < OTHERS / 4
            links[-1].sendall(GET % b"/healthz")
            await heard(OTHERS + 1)

    order = with_accepted(act)
    assert sorted(order) == sorted([b"agent"] * OTHERS + [GET % b"/healthz"])
    assert order.index(GET % b"/healthz") < OTHERS / 2


def test_who_connects_and_says_nothing_begins_after_those_that_ask() -> None:
    async def act(listener: socket.socket, _accepted: AcceptedConnections) -> None:
        with clients(listener.getsockname()[1], *[b""] * OTHERS, b"agent", b"agent") as links:
            await heard(2)
            for link in links[:OTHERS]:
                link.sendall(b"late")
            await heard(OTHERS + 2)

    assert with_accepted(act) == [b"agent"] * 2 + [b"late"] * OTHERS


def test_a_flood_of_probes_keeps_nobody_waiting_for_all_of_them() -> None:
    async def act(listener: socket.socket, _accepted: AcceptedConnections) -> None:
        with clients(listener.getsockname()[1], *[GET % b"/healthz"] * OTHERS, *[b"agent"] * 10):
            await heard(OTHERS + 10)

    order = with_accepted(act)
    assert order.index(GET % b"/healthz") < order.index(b"agent")
    assert [place for place, said in enumerate(order) if said == b"agent"][-1] < OTHERS / 2 + 10


def test_no_more_are_accepted_than_there_is_room_for() -> None:
    async def act(listener: socket.socket, _accepted: AcceptedConnections) -> None:
        with clients(listener.getsockname()[1], *[b"agent"] * OTHERS):
            await asyncio.sleep(0.2)
            listener.accept()[0].close()  # BlockingIOError if none waits any more

    assert not with_accepted(act, room=0)


def test_what_has_not_begun_is_closed_at_the_end_and_the_port_is_free() -> None:
    async def act(listener: socket.socket, accepted: AcceptedConnections) -> None:
        port = listener.getsockname()[1]
        with clients(port, *[b"agent"] * OTHERS, b"") as links:
            await heard(1)
            accepted.close()
            listener.close()
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(("127.0.0.1", port), 5)
            links[-1].settimeout(20)
            with contextlib.suppress(ConnectionResetError):
                assert links[-1].recv(1) == b""
        await asyncio.sleep(0.1)

    assert len(with_accepted(act)) < OTHERS


def test_a_client_that_is_gone_before_it_begins_leaves_nothing(
    service: RunningService, caplog: pytest.LogCaptureFixture
) -> None:
    service.client.close()
    service.wait_for_no_connections()
    said = [b"", GET % b"/nothing"] * (OTHERS // 2)
    with held(service), clients(service.port, *said) as links:
        for link in links[::4]:  # closed by a reset, half of those that said nothing
            link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    eventually(lambda: not service.server.server_state.connections)
    assert service.raw(GET % b"/healthz").startswith(b"HTTP/1.1 200 ")
    eventually(lambda: not service.server.server_state.connections)
    assert not service.server.server_state.tasks
    assert not [said for said in caplog.records if said.levelname == "ERROR"]
