"""Limits on connections before any token was checked: bytes and seconds of a header, and the number of connections.

uvicorn's httptools protocol has no such limits: one connection's headers could fill the memory, and silent connections
could use up the process's descriptors. Its other protocol (h11) limits the header's bytes only, and costs 1.2 times the
CPU seconds for an upload. Requests with a token have no limit here: uploads, downloads and long polls may take long.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import resource
import socket
import ssl
import weakref
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final

import httptools
from starlette.requests import ClientDisconnect
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from service.api.port.body import TAKE_BODY, BodyReader, Write
from service.api.problems import REFUSED
from service.errors import ConfigurationError

log = logging.getLogger("draftalign.api")

#: Request line and header fields together; fields after a chunked body likewise.
MAX_HEADER_BYTES: Final = 32 << 10
MAX_HEADER_FIELDS: Final = 128
#: From a request's first byte, or from the connection's beginning, to the end of the header.
HEADER_SECONDS: Final = 10.0
#: Requests that wait while the one before them is answered.
MAX_PIPELINED: Final = 16
#: With the memory that a header may take, this bounds what strangers can make the process use.
MAX_CONNECTIONS: Final = 4096
_TOO_LARGE: Final = (
    HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
    f"a header may have {MAX_HEADER_BYTES} bytes in {MAX_HEADER_FIELDS} fields",
)
#: How long a TLS connection that is being closed may take to flush and to exchange close_notify; and a refused one.
_SHUTDOWN_SECONDS: Final = 5.0
_REFUSED_SECONDS: Final = 1.0
#: First byte of a TLS connection.
_HANDSHAKE: Final = b"\x16"
_PLAIN_HTTP: Final = (
    b"HTTP/1.1 400 Bad Request\r\ncontent-type: text/plain; charset=utf-8\r\ncontent-length: 56\r\n"
    b"connection: close\r\n\r\nthis port speaks TLS: begin the service's URL with https"
)


class Places:
    """The connections of one server: how many there may be, and which of them wait for a request, longest first.

    Without a descriptor accept() fails, and no probe is answered. So clients may take half of them, Redis a quarter
    (of a cluster each node, and these together more than all), connections that come in one go an eighth; the last
    eighth is for files.
    """

    def __init__(self, descriptors: int | None = None) -> None:
        soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0] if descriptors is None else descriptors
        if soft == resource.RLIM_INFINITY:
            soft = 8 * MAX_CONNECTIONS
        self.limit = max(1, min(MAX_CONNECTIONS, soft // 2))
        #: As each request may ask Redis. Beyond, redis-py raises at once.
        self.to_redis = max(1, min(MAX_CONNECTIONS, soft // 4))
        #: Accepted in one go at most, before any of them can be closed again.
        self.backlog = max(1, min(512, soft // 8))
        self.waiting: dict[BoundedProtocol | TlsDoor, None] = {}

    def make_room(self, connections: set[Any]) -> bool:
        """Close the connection that has waited longest, else one whose request was refused. False: all are at work."""
        found = next(iter(self.waiting), None)
        if found is None:
            found = next((c for c in connections if isinstance(c, BoundedProtocol) and c.gives_way), None)
        if found is None:
            return False
        found.give_up()
        return True


def new_parser(protocol: HttpToolsProtocol) -> httptools.HttpRequestParser:
    """A parser as uvicorn makes it: what follows a request that closes the connection is no error."""
    parser = httptools.HttpRequestParser(protocol)
    parser.set_dangerous_leniencies(lenient_data_after_close=True)
    return parser


class BoundedProtocol(HttpToolsProtocol):
    """uvicorn's HTTP/1.1 protocol within the bounds above."""

    def __init__(self, *args: Any, places: Places, **named: Any) -> None:
        super().__init__(*args, **named)
        self._places = places
        self._given_up = False
        self._header_timer: asyncio.TimerHandle | None = None
        self._refusal: tuple[HTTPStatus, str] | None = None
        self._in_header = self._in_message = False
        self._header_bytes = 0
        self._idle_bytes = 0  # came since a header or a part of a body was complete
        self._reader: BodyReader | None = None
        #: Requests that are not answered yet. When the client leaves, uvicorn tells the one that came last.
        self._cycles: list[RequestResponseCycle] = []

    @property
    def gives_way(self) -> bool:
        """Whether it may be closed for another: its request was refused, or it sends without waiting for answers."""
        refused = self.cycle is not None and bool(self.cycle.scope.get(REFUSED))
        return not self._given_up and (refused or bool(self.pipeline) or self.transport.is_closing())

    def give_up(self) -> None:
        """Close at once; what was not sent yet is lost."""
        self._given_up = True
        self._works()
        self.transport.abort()

    # --- the connection
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take a place, and wait for a request."""
        super().connection_made(transport)
        crowded = len(self.connections) > self._places.limit
        if crowded and not self._places.make_room(self.connections - {self}):
            self._refuse(HTTPStatus.SERVICE_UNAVAILABLE, "all connections are in use")
            return
        self._waits()
        self._begin_header_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Free the place.

        asyncio's TLS may call this protocol although a `BodyReader` had taken its place: it is told, too.
        """
        if self._reader is not None:
            self._reader.client_left()
            self._reader = None
        self._works()
        self._end_header_timer()
        for cycle in self._cycles:
            cycle.disconnected = not cycle.response_complete
            cycle.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse; refuse a header that is too long."""
        self._idle_bytes += len(data)
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self._idle_bytes > MAX_HEADER_BYTES:
            self._refuse(*_TOO_LARGE)
            return
        idle = self.cycle is None or self.cycle.response_complete
        if self._in_header or (idle and (self._in_message or self._idle_bytes)):
            self._begin_header_timer()
        elif idle and self.timeout_keep_alive_task is None:  # end of a body that no handler read
            self._end_header_timer()
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def on_response_complete(self) -> None:
        """Begin with the next request that came already, or wait for one."""
        super().on_response_complete()
        if self.cycle.response_complete and not self.transport.is_closing():
            self._waits()

    # --- the parser
    def on_message_begin(self) -> None:
        """Start to count this header."""
        super().on_message_begin()
        self._header_bytes = 0
        self._in_header = self._in_message = True

    def on_url(self, url: bytes) -> None:
        """Take a part of the request's line."""
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a field."""
        self._count(len(name) + len(value) + len(b": \r\n"))
        if len(self.headers) >= MAX_HEADER_FIELDS:
            raise self._refused(*_TOO_LARGE)
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Begin to answer."""
        self._idle_bytes = 0
        self._in_header = False
        self._end_header_timer()
        self._works()
        if len(self.pipeline) >= MAX_PIPELINED:
            raise self._refused(HTTPStatus.TOO_MANY_REQUESTS, f"at most {MAX_PIPELINED} requests may wait for answers")
        super().on_headers_complete()
        self._cycles = [one for one in self._cycles if not one.response_complete] + [self.cycle]
        extensions = self.cycle.scope.setdefault("extensions", {})
        extensions[TAKE_BODY] = {"take": functools.partial(_take_body, weakref.ref(self), weakref.ref(self.cycle))}

    def on_body(self, body: bytes) -> None:
        """Take a part of the body."""
        self._idle_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """The request has come."""
        self._idle_bytes = 0
        self._in_message = False
        super().on_message_complete()

    # --- a long body
    async def take_body(
        self, cycle: RequestResponseCycle, left: int, write: Write, idle_seconds: float, seconds: float
    ) -> None:
        """Give the last `left` bytes of a request's body to `write`, past the parser; see `BodyReader.wait`."""
        if cycle.disconnected or self.transport.is_closing():
            raise ClientDisconnect
        came, cycle.body = cycle.body, bytearray()
        if came:
            write(memoryview(came))
        if not cycle.more_body:
            return
        self._reader = reader = BodyReader(self, cycle, left - len(came), write, self._body_is_complete)
        self._set_protocol(reader)
        await reader.wait(idle_seconds, seconds)

    def _body_is_complete(self) -> None:
        """Go on with a new parser: the old one has not seen the end of this body."""
        self.parser = new_parser(self)
        self._reader = None
        self._set_protocol(self)
        self.on_message_complete()

    def _set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        """Let another protocol read; uvloop looks at what a protocol can do when reading begins."""
        self.flow.pause_reading()
        self.transport.set_protocol(protocol)
        self.flow.resume_reading()

    # --- inside
    def _waits(self) -> None:
        self._places.waiting[self] = None

    def _works(self) -> None:
        self._places.waiting.pop(self, None)

    def _begin_header_timer(self) -> None:
        if self._header_timer is None:
            self._header_timer = self.loop.call_later(HEADER_SECONDS, self._header_is_late)

    def _end_header_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _header_is_late(self) -> None:
        if self._in_header:
            self._refuse(HTTPStatus.REQUEST_TIMEOUT, f"the header took more than {HEADER_SECONDS:.0f} s")
        else:
            self.transport.close()

    def _count(self, more: int) -> None:
        self._header_bytes += more
        if self._header_bytes > MAX_HEADER_BYTES:
            raise self._refused(*_TOO_LARGE)

    def _refused(self, status: HTTPStatus, said: str) -> ValueError:
        """An exception for the parser, which answers any exception as a bad request."""
        self._refusal = status, said
        return ValueError(said)

    def _refuse(self, status: HTTPStatus, said: str) -> None:
        self._refusal = status, said
        self.send_400_response(said)

    def send_400_response(self, msg: str) -> None:
        """Answer a refusal by the parser or by a limit, unless another answer is under way, and close."""
        answering = self.cycle is not None and self.cycle.response_started and not self.cycle.response_complete
        if not answering and not self.pipeline:
            status, said = self._refusal or (HTTPStatus.BAD_REQUEST, msg)
            head = b"content-type: text/plain; charset=utf-8\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
            self.transport.write(STATUS_LINE[status] + head % len(said) + said.encode())
        self.transport.close()
        if self.scheme == "https":  # TLS goes on reading until the client sends close_notify
            self.loop.call_later(_REFUSED_SECONDS, self.transport.abort)

    def _unsupported_upgrade_warning(self) -> None:
        """Log nothing: `Upgrade` (h2c, WebSocket) is ignored, as HTTP allows, and any client can ask for it often."""


async def _take_body(
    connection: weakref.ref[BoundedProtocol], cycle: weakref.ref[RequestResponseCycle], *of_body: Any
) -> None:
    """`BoundedProtocol.take_body`, for a request's scope.

    The references are weak: a scope that refers to itself would keep its whole request until garbage is collected,
    which stops the event loop for tens of milliseconds when many requests wait.
    """
    taker, request = connection(), cycle()
    if taker is None or request is None:
        raise ClientDisconnect
    await taker.take_body(request, *of_body)


class TlsDoor(asyncio.Protocol):
    """Passes a connection on to the HTTP protocol after its TLS handshake.

    A TLS server of asyncio calls its protocol only after the handshake, so that silent connections could use up the
    process's descriptors without being counted. Here a handshake counts as a connection, may take `HEADER_SECONDS`,
    and is closed for others. Plain HTTP is told to use https.
    """

    def __init__(self, *, tls: ssl.SSLContext, places: Places, **named: Any) -> None:
        self._inner = BoundedProtocol(places=places, **named)
        self._tls, self._places = tls, places
        self._shaking: asyncio.Task[None] | None = None
        self._taken = False  # the socket is the inner protocol's transport's

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take a place, and begin the handshake."""
        connections = self._inner.connections
        try:
            if len(connections) < self._places.limit or self._places.make_room(connections):
                sock = socket.socket(fileno=os.dup(transport.get_extra_info("socket").fileno()))
                connections.add(self)  # type: ignore[arg-type]  # uvicorn calls no method but `shutdown`
                self._places.waiting[self] = None
                self._shaking = asyncio.get_running_loop().create_task(self._shake(sock))
                # A task that is cancelled before its first step runs no `finally`.
                self._shaking.add_done_callback(lambda _: self._leave(sock))
        except OSError as error:
            log.warning("a connection was refused: %s", error)
        transport.abort()  # closes its own descriptor, not the connection of `sock`

    def give_up(self) -> None:
        """Make room for another connection."""
        self._places.waiting.pop(self, None)
        if self._shaking is not None:
            self._shaking.cancel()

    shutdown = give_up

    async def _shake(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(HEADER_SECONDS):
                self._taken = await _begins_tls(sock)
                if self._taken:
                    await loop.connect_accepted_socket(
                        lambda: self._inner, sock, ssl=self._tls, ssl_shutdown_timeout=_SHUTDOWN_SECONDS
                    )
        except OSError as error:  # ssl.SSLError, and a handshake that is late
            log.debug("a TLS handshake failed: %s", error)
        finally:
            self._leave(sock)

    def _leave(self, sock: socket.socket) -> None:
        self._inner.connections.discard(self)
        self._places.waiting.pop(self, None)
        if not self._taken:
            sock.close()


async def _begins_tls(sock: socket.socket) -> bool:
    """Wait for a connection's first byte, and leave it there. Plain HTTP is answered."""
    loop, ready = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(sock, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(sock)
    first = sock.recv(1, socket.MSG_PEEK)
    if first not in (b"", _HANDSHAKE):
        sock.recv(MAX_HEADER_BYTES)  # a close with bytes unread would reset the connection before the answer is read
        sock.send(_PLAIN_HTTP)
    return first == _HANDSHAKE


def tls_context(certificate: Path, key: Path) -> ssl.SSLContext:
    """What a server needs of TLS 1.2 and 1.3. Raises ConfigurationError where the files cannot be used."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(certificate, key, password="")  # an encrypted key would ask on the terminal
    except OSError as error:
        raise ConfigurationError(
            f"tls_cert {certificate} and tls_key {key} cannot be used: {error}; expected a PEM certificate chain, the "
            "server's own first, and its unencrypted PEM key"
        ) from error
    return context
