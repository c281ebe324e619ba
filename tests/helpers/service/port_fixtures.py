"""`draftalign serve` as a process that may open few files, and what strangers pour into it."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import httpx
from helpers.ports import free_port
from helpers.service.service_fixtures import RunningService

from service.api.port.connections import Places

ROOT = Path(__file__).parents[3]
MIB = 1 << 20
DESCRIPTORS = 256


class Process:
    """`draftalign serve` with tokens, as a process of its own that may open few files."""

    def __init__(self, directory: Path, redis_url: str, options: Sequence[str] = (), hard: int = DESCRIPTORS) -> None:
        self.port: int = free_port()
        environment = {k: v for k, v in os.environ.items() if not k.startswith("DRAFTALIGN_")}
        environment |= {
            "PYTHONPATH": str(ROOT),
            "DRAFTALIGN_PORT": str(self.port),
            "DRAFTALIGN_REDIS_URL": redis_url,
            "DRAFTALIGN_STATE_DIR": str(directory / "state"),
            "DRAFTALIGN_TOKENS": "engine-secret:read",
        }
        command = f'ulimit -Sn {DESCRIPTORS} && ulimit -Hn {hard} && exec "$0" -m service.cli serve "$@"'
        with (directory / "serve.log").open("wb") as log:
            arguments = ["sh", "-c", command, sys.executable, *options]
            self.process = subprocess.Popen(arguments, env=environment, stderr=log)
        try:
            self._wait_ready(directory / "serve.log")
        except BaseException:  # nobody else would end it
            self.process.kill()
            self.process.wait()
            raise
        self.fresh_bytes = self.peak_bytes()

    def _wait_ready(self, log: Path) -> None:
        deadline = time.monotonic() + 60
        while not self.answers():
            assert self.process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)

    def answers(self) -> bool:
        """Whether a new connection is served."""
        with contextlib.suppress(httpx.HTTPError):
            return httpx.get(f"http://127.0.0.1:{self.port}/healthz", timeout=10).status_code == 200
        return False

    def connect(self) -> socket.socket:
        """Asks again at once where the queue of what is to be accepted is full: the kernel would after 1, 3 and 7 s."""
        deadline = time.monotonic() + 60
        while True:
            try:
                connection = socket.create_connection(("127.0.0.1", self.port), timeout=0.2)
            except TimeoutError:
                assert time.monotonic() < deadline
            else:
                connection.settimeout(10)
                return connection

    def peak_bytes(self) -> int:
        found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{self.process.pid}/status").read_text())
        assert found
        return 1024 * int(found[1])


def pour(connection: socket.socket, piece: bytes, seconds: float = 30.0) -> bool:
    """Send `piece` again and again, for `seconds`; whether the server closed before that."""
    deadline = time.monotonic() + seconds
    try:
        while time.monotonic() < deadline:
            connection.sendall(piece)
    except OSError:
        return True
    return False


GET = b"GET /drafters HTTP/1.1\r\nHost: x\r\n"
POST = b"POST /acceptance HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
FLOODS = {
    "small headers": (GET, b"a: b\r\n" * 10_000),
    "one endless value": (GET + b"a: ", b"b" * 65536),
    "one endless name": (GET, b"b" * 65536),
    "an endless line": (b"GET /", b"b" * 65536),
    "a chunk's endless extension": (POST + b"Transfer-Encoding: chunked\r\n\r\n1;", b"b" * 65536),
    "small trailers": (POST + b"Transfer-Encoding: chunked\r\n\r\n1\r\na\r\n0\r\n", b"a: b\r\n" * 10_000),
    "an endless trailer": (POST + b"Transfer-Encoding: chunked\r\n\r\n1\r\na\r\n0\r\na: ", b"b" * 65536),
    "requests before answers": (b"", (GET + b"\r\n") * 1000),
    "nothing but empty lines": (b"", b"\r\n" * 32768),
}


def places(service: RunningService) -> Places:
    found = service.server.config.http.keywords["places"]  # type: ignore[union-attr]
    assert isinstance(found, Places)
    return found
