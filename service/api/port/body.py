"""Takes the rest of a request's body from its connection straight to a writer, past the HTTP parser and ASGI.

Through uvicorn each byte of a body is copied three times more, in pieces of 256 KiB. Here the transport reads into one
buffer, and the writer takes it from there (`benchmarks/ingest.py` has the ratios).
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from starlette.requests import ClientDisconnect

if TYPE_CHECKING:
    from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

#: Among the extensions of a request's ASGI scope; absent where another server than ours serves the application.
TAKE_BODY: Final = "draftalign.take_body"
Write = Callable[[memoryview], None]


class _Buffer(threading.local):
    """One buffer for all connections of a thread's event loop: what was read is written before the callback returns."""

    def __init__(self) -> None:
        self.view = memoryview(bytearray(1 << 20))


_BUFFER: Final = _Buffer()


class BodyTooSlowError(Exception):
    """Nothing came for a while, or not all in time."""


class BodyReader(asyncio.BufferedProtocol):
    """Stands in for the HTTP protocol of a connection while the last `left` bytes of a body come.

    `finish` gives the connection back: it is called once, with the last byte. After a failed write the bytes are
    discarded, as the client still has to read the refusal.
    """

    def __init__(
        self, http: asyncio.Protocol, cycle: RequestResponseCycle, left: int, write: Write, finish: Callable[[], None]
    ) -> None:
        self._http, self._cycle, self._left, self._finish = http, cycle, left, finish
        self._write: Write | None = write
        self._loop = asyncio.get_running_loop()
        self._done: asyncio.Future[None] = self._loop.create_future()
        self._heard = self._loop.time()

    async def wait(self, idle_seconds: float, seconds: float) -> None:
        """Return once all was written.

        Raises what the writer raised; BodyTooSlowError when nothing came for `idle_seconds`, or not all within
        `seconds`; ClientDisconnect.
        """
        deadline = self._loop.time() + seconds
        try:
            while not self._done.done():
                until = min(self._heard + idle_seconds, deadline)
                if until <= self._loop.time():
                    raise BodyTooSlowError
                await asyncio.wait({self._done}, timeout=until - self._loop.time())
            self._done.result()
        finally:
            self._write = None  # what it writes to may be closed now

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002 - not more than what is missing of this body
        """Where the next bytes go. Bytes of a pipelined request are left to the parser."""
        return _BUFFER.view[: self._left]

    def buffer_updated(self, nbytes: int) -> None:
        """Write what came."""
        self._heard = self._loop.time()
        self._left -= nbytes
        if self._write is not None:
            try:
                self._write(_BUFFER.view[:nbytes])
            except Exception as error:  # noqa: BLE001 - whatever it is, the request's handler answers for it
                self._fail(error)
        if self._left == 0:
            self._finish()
            if not self._done.done():
                self._done.set_result(None)
        elif self._write is None:
            self._cycle.message_event.set()  # the refusal may wait for the rest, to discard it

    def eof_received(self) -> None:
        """The client sends no more: the connection is closed."""

    def connection_lost(self, exc: Exception | None) -> None:
        """The client went away. The HTTP protocol calls `client_left`."""
        self._http.connection_lost(exc)

    def client_left(self) -> None:
        """The client went away: nothing more comes."""
        self._fail(ClientDisconnect())

    def pause_writing(self) -> None:
        """Pause the writing of the answer, as the HTTP protocol does."""
        self._http.pause_writing()

    def resume_writing(self) -> None:
        """Resume the writing of the answer, as the HTTP protocol does."""
        self._http.resume_writing()

    def _fail(self, error: Exception) -> None:
        self._write = None
        if not self._done.done():
            self._done.set_exception(error)
            self._done.exception()  # marks it as retrieved: after a cancelled request nobody waits for it
