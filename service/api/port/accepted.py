"""Takes connections that come together off the listening socket at once, and lets probes pass those that wait.

uvloop accepts one connection in a turn of its loop, in the order in which they came. So where a thousand agents connect
in one instant, a probe would wait until the requests of all before it have begun, and who finds the kernel's queue full
tries again after a second.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final

log = logging.getLogger("draftalign.api")

#: Probes that begin in a turn of the loop, and one other: a probe's answer takes four turns, a request some 0.5 ms.
_PROBES_AT_ONCE: Final = 4
#: Connections that sent nothing yet, which are looked at again in a turn.
_LOOKED_AT_AGAIN: Final = 32
#: How a probe's request begins. With TLS nothing can be told of it.
_PROBES: Final = (b"GET /healthz ", b"GET /readyz ")
_LONGEST: Final = max(map(len, _PROBES))


class AcceptedConnections:
    """The connections of some listening sockets that were accepted and have not begun yet.

    The loop's own server goes on accepting one in a turn: where they come one at a time, all.
    """

    def __init__(
        self, listeners: Sequence[Any], protocol: Callable[[], asyncio.Protocol], room: Callable[[], int]
    ) -> None:
        """`protocol`: makes one for each connection; `room`: how many may be here and not have begun."""
        self._loop = asyncio.get_running_loop()
        self._protocol, self._room = protocol, room
        self._probes: deque[socket.socket] = deque()
        self._asking: deque[socket.socket] = deque()
        self._silent: deque[socket.socket] = deque()  # sent nothing yet
        self._tasks: set[asyncio.Task[Any]] = set()
        self._begins = False  # a turn of `_begin` is due
        self._listeners = [socket.socket(fileno=os.dup(one.fileno())) for one in listeners]
        for listener in self._listeners:
            # Not at once: first the loop's server accepts one.
            self._loop.add_reader(listener, self._loop.call_soon, self._accept, listener)

    def close(self) -> None:
        """Accept nothing more, and close what has not begun."""
        while self._listeners:
            listener = self._listeners.pop()
            self._loop.remove_reader(listener)
            listener.close()
        while waiting := self._probes or self._asking or self._silent:
            waiting.pop().close()

    def _accept(self, listener: socket.socket) -> None:
        """Accept all that wait."""
        if listener.fileno() < 0:  # closed since
            return
        here = len(self._probes) + len(self._asking) + len(self._silent) + len(self._tasks)
        for _ in range(self._room() - here):
            try:
                link, _address = listener.accept()
            except BlockingIOError:
                break
            except OSError as error:  # no descriptor is left, or the client is gone
                log.debug("a connection was not accepted: %s", error)
                break
            link.setblocking(False)
            self._look(link)
        if not self._begins:
            self._begin()

    def _look(self, link: socket.socket) -> None:
        """Tell who waits for what."""
        try:
            begun = link.recv(_LONGEST, socket.MSG_PEEK)
        except BlockingIOError:
            self._silent.append(link)
            return
        except OSError:  # the client is gone: its protocol notices
            begun = b""
        (self._probes if begun.startswith(_PROBES) else self._asking).append(link)

    def _begin(self) -> None:
        """Let some begin, and others in the next turn."""
        for _ in range(min(_LOOKED_AT_AGAIN, len(self._silent))):
            self._look(self._silent.popleft())
        for _ in range(min(_PROBES_AT_ONCE, len(self._probes))):
            self._connect(self._probes.popleft())
        if waiting := self._asking or self._silent:
            self._connect(waiting.popleft())
        self._begins = bool(self._probes or self._asking or self._silent)
        if self._begins:
            self._loop.call_soon(self._begin)

    def _connect(self, link: socket.socket) -> None:
        task = self._loop.create_task(self._loop.connect_accepted_socket(self._protocol, link))
        self._tasks.add(task)
        task.add_done_callback(self._connected)

    def _connected(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.debug("a connection did not begin: %s", error)
