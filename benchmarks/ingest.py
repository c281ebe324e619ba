"""What an upload and a download of the API cost beside what the socket and the file system cost alone.

    python benchmarks/ingest.py [--mib 4 64] [--pairs 15] [--direct]

The floor is a process that takes the same bytes from the same client with blocking `recv_into` of 1 MiB and `os.write`,
and answers when the file has its name; for downloads, one that sends a file with `os.sendfile`. Both sides have one
kept connection, files in /dev/shm, and alternate. Printed for each size: medians of wall seconds and of CPU seconds of
the server's process, floor over service (1 is as good as the floor), and Redis commands per upload, those in scripts
included.

`--direct`: the hook's own sender instead, through the API and by an object store, in turns: CPU of the API, and bytes
of the file that pass it. The store is moto in this process, so the seconds say nothing of a real one.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import httpx
import redis

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]  # in this order: tests/ has a folder of each package's name

from helpers.service.service_fixtures import (  # noqa: E402
    CONFIG,
    HEADERS,
    LAYERS,
    publish,
    rollout_metadata,
    rollout_tensors,
    run_file,
)
from helpers.service.valkey_fixtures import OwnValkey  # noqa: E402

from benchmarks.growth import cpu_seconds  # noqa: E402
from rl_hooks import wire  # noqa: E402
from rl_hooks.sending import delivery  # noqa: E402
from rl_hooks.sending.sender import RolloutSender  # noqa: E402
from service.storage.layout import Layout  # noqa: E402
from service.storage.registry import Registry  # noqa: E402

_HIDDEN: Final = 2048
_RUN: Final = CONFIG | {"hidden_size": _HIDDEN}
_BLOCK: Final = 1 << 20
_RESPONSE_TOKENS: Final = 128


class Body:
    """A rollout file of about so many MiB; each time that it is sent it holds other rollouts."""

    def __init__(self, mib: int) -> None:
        rollouts = max(1, (mib << 20) // (8 * _HIDDEN * _RESPONSE_TOKENS))
        self._tensors = rollout_tensors((_RESPONSE_TOKENS,) * rollouts, _HIDDEN)
        self._rollouts, self._sent = rollouts, 0
        self.bytes = memoryview(bytearray(b"".join(bytes(part) for part in self.parts())))

    def renew(self) -> None:
        """Give the rollouts new ids."""
        self._sent += 1
        head = self.parts()[0]
        self.bytes[: len(head)] = head

    def parts(self) -> list[bytes | memoryview]:
        """The file, as the hook lays it out."""
        ids = tuple(f"{self._rollouts:04d}-{self._sent:06d}-{i:06d}" for i in range(self._rollouts))
        fingerprint = wire.target_fingerprint(_RUN, LAYERS)
        return wire.encode(self._tensors, rollout_metadata(ids, target_fingerprint=fingerprint))


class Client:
    """One connection, which is kept."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._buffer = memoryview(bytearray(_BLOCK))

    def post(self, body: memoryview) -> float:
        """Send as the hook does, which waits for 100 Continue; seconds until the answer."""
        head = f"POST /rollouts?run=default HTTP/1.1\r\nHost: localhost\r\nContent-Type: {wire.CONTENT_TYPE}\r\n"
        begun = time.perf_counter()
        self._socket.sendall(f"{head}Content-Length: {len(body)}\r\nExpect: 100-continue\r\n\r\n".encode())
        reply = self._socket.recv(65536)
        assert reply.startswith(b"HTTP/1.1 100"), reply
        self._socket.sendall(body)
        reply = self._socket.recv(65536)
        seconds = time.perf_counter() - begun
        assert reply.startswith(b"HTTP/1.1 202"), reply
        length = int(reply.lower().partition(b"content-length: ")[2].partition(b"\r")[0])
        rest = length - len(reply.partition(b"\r\n\r\n")[2])
        while rest:
            rest -= len(self._socket.recv(rest))
        return seconds

    def get(self, path: str) -> float:
        """Read an answer; seconds until its end."""
        begun = time.perf_counter()
        self._socket.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        reply = self._socket.recv(65536)
        while b"\r\n\r\n" not in reply:
            reply += self._socket.recv(65536)
        assert reply.startswith(b"HTTP/1.1 200"), reply[:200]
        length = int(reply.lower().partition(b"content-length: ")[2].partition(b"\r")[0])
        rest = length - len(reply.partition(b"\r\n\r\n")[2])
        while rest:
            rest -= self._socket.recv_into(self._buffer[: min(rest, _BLOCK)])
        return time.perf_counter() - begun


def floor(listener: socket.socket, directory: Path, download: Path) -> None:
    """Serve uploads and downloads of one client at a time, with nothing checked."""
    buffer, blob = memoryview(bytearray(_BLOCK)), directory / "blob"
    while True:
        connection, _ = listener.accept()
        with contextlib.suppress(OSError), connection:
            while head := connection.recv(65536):
                if head.startswith(b"GET"):
                    with download.open("rb") as file:
                        size, sent = download.stat().st_size, 0
                        connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % size)
                        while sent < size:
                            sent += os.sendfile(connection.fileno(), file.fileno(), sent, size - sent)
                    continue
                rest = int(head.partition(b"Content-Length: ")[2].partition(b"\r")[0])
                connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
                descriptor = os.open(directory / "upload", os.O_WRONLY | os.O_CREAT | os.O_EXCL)
                while rest:
                    came = connection.recv_into(buffer[: min(rest, _BLOCK)])
                    os.write(descriptor, buffer[:came])
                    rest -= came
                os.close(descriptor)
                (directory / "upload").rename(blob)
                connection.sendall(b"HTTP/1.1 202 Accepted\r\ncontent-length: 0\r\n\r\n")


@contextlib.contextmanager
def floor_process(directory: Path, download: Path) -> Iterator[tuple[int, int]]:
    """Its process id and port."""
    listener = socket.create_server(("127.0.0.1", 0))
    pid = os.fork()
    if pid == 0:
        try:
            floor(listener, directory, download)
        finally:
            os._exit(0)
    try:
        yield pid, listener.getsockname()[1]
    finally:
        listener.close()
        os.kill(pid, 15)
        os.waitpid(pid, 0)


@contextlib.contextmanager
def service_process(directory: Path, redis_url: str, more: Mapping[str, str]) -> Iterator[tuple[int, int]]:
    """Process id and port of an API with the run `default`. `more`: of its environment."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("DRAFTALIGN_")}
    environment |= {"DRAFTALIGN_STATE_DIR": str(directory), "DRAFTALIGN_REDIS_URL": redis_url, "PYTHONPATH": str(ROOT)}
    environment |= {"DRAFTALIGN_PORT": str(port), "DRAFTALIGN_LOG_LEVEL": "ERROR", **more}
    api = subprocess.Popen([sys.executable, "-m", "service.cli", "serve"], env=environment, cwd=ROOT)
    try:
        while True:
            time.sleep(0.1)
            with contextlib.suppress(httpx.HTTPError):
                reply = httpx.put(f"http://127.0.0.1:{port}/runs/default", content=run_file(_RUN), headers=HEADERS)
                reply.raise_for_status()
                break
        yield api.pid, port
    finally:
        api.terminate()
        api.wait()


def send(body: Body, client: Client, spool: Path) -> float:
    """Upload once; the file is deleted afterwards, or they would fill the memory."""
    body.renew()
    seconds = client.post(body.bytes)
    for file in [path for path in spool.rglob("*") if path.is_file()]:
        file.unlink()
    return seconds


def commands(client: Any) -> int:
    """Commands that Redis has run, those inside scripts included."""
    return sum(one["calls"] for name, one in client.info("commandstats").items() if name != "cmdstat_info")


def compare(name: str, sides: Mapping[str, tuple[int, Callable[[], float]]], pairs: int, size: int) -> None:
    """Alternate between the floor and the service, and print the ratios. A side: its process, what to do once."""
    wall: dict[str, list[float]] = {side: [] for side in sides}
    cpu: dict[str, list[float]] = {side: [] for side in sides}
    for turn in range(pairs + 2):
        for side, (pid, act) in sorted(sides.items(), reverse=bool(turn % 2)):
            begun = cpu_seconds(pid)
            seconds = act()
            time.sleep(0.002)  # what it does after its answer counts too
            if turn >= 2:
                wall[side].append(seconds)
                cpu[side].append(cpu_seconds(pid) - begun)
    ratio = {
        what: statistics.median(f / s for f, s in zip(found["floor"], found["service"], strict=True))
        for what, found in (("wall", wall), ("cpu", cpu))
    }
    gib = {side: statistics.median(cpu[side]) / size * 2**30 for side in sides}
    ms = {side: 1000 * statistics.median(wall[side]) for side in sides}
    print(
        f"{name:>16}  wall {ratio['wall']:.2f}  cpu {ratio['cpu']:.2f}   ms {ms['floor']:.1f} / {ms['service']:.1f}   "
        f"CPU s/GiB {gib['floor']:.2f} / {gib['service']:.2f}",
        flush=True,
    )


def direct(mib: int, pairs: int, base: Path, redis_url: str) -> None:
    """The hook's sender through the API and by an object store, in turns."""
    from helpers.service.object_fixtures import BUCKET, SECRET, Store

    store, body, read = Store(), Body(mib), list[int]()
    delivery._SMALLEST_DIRECT_BYTES = 0  # type: ignore[misc]
    os.environ |= {"AWS_ACCESS_KEY_ID": "k", "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_REGION": "us-east-1"}
    os.environ["AWS_ENDPOINT_URL"] = f"http://127.0.0.1:{store.port}"
    store.client().create_bucket(Bucket=BUCKET)

    def count(environ: dict[str, Any], _start: object) -> None:
        begin, _, end = environ.get("HTTP_RANGE", "bytes=0--1").removeprefix("bytes=").partition("-")
        read.append(int(end) + 1 - int(begin))

    with service_process(base / "direct", redis_url, {"DRAFTALIGN_ROLLOUTS_URL": f"s3://{BUCKET}"}) as (pid, port):
        sender, found = RolloutSender(f"http://127.0.0.1:{port}"), dict[bool, list[tuple[float, float, int]]]()
        for turn in range(2 * pairs + 4):
            body.renew()
            parts, by_store = body.parts(), bool(turn % 2)
            client, store.fault = sender._delivery, count
            client.wanted = replace(client.wanted, direct_uploads=by_store)
            read.clear()
            begun, cpu = time.perf_counter(), cpu_seconds(pid)
            assert sender.submit(parts)
            assert sender.flush(120)
            seconds, cpu = time.perf_counter() - begun, cpu_seconds(pid) - cpu
            store.fault = None
            passed = 2 * len(parts[0]) + sum(read) if by_store else len(body.bytes)
            if turn >= 4:
                found.setdefault(by_store, []).append((seconds, cpu, passed))
            keys = store.stored()
            assert len(keys) == by_store
            for key in keys:
                store.client().delete_object(Bucket=BUCKET, Key=key)
            for file in (base / "direct" / "spool" / "runs").rglob("*.safetensors"):
                file.unlink()
        for by_store, name in ((False, "through the API"), (True, "by the store")):
            wall, cpu, passed = (statistics.median(column) for column in zip(*found[by_store], strict=True))
            figures = f"ms {1000 * wall:.1f}  API CPU ms {1000 * cpu:.1f}  KiB past it {passed / 1024:.1f}"
            print(f"{name:>16} {mib} MiB  {figures}")
    store.down()


def main() -> None:
    """Run the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, nargs="+", default=[4, 64], help="sizes of a body")
    parser.add_argument("--pairs", type=int, default=15, help="uploads of each side")
    parser.add_argument("--direct", action="store_true", help="through the API and by an object store")
    options = parser.parse_args()
    with contextlib.ExitStack() as stack:
        base = Path(stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm")))
        valkey = OwnValkey(base / "valkey")
        valkey.start()
        stack.callback(valkey.stop)
        if options.direct:
            for mib in options.mib:
                direct(mib, options.pairs, base / str(mib), valkey.url)
            return
        download = base / "download"
        download.write_bytes(bytes(64 << 20))
        (base / "floor").mkdir()
        floor_pid, floor_port = stack.enter_context(floor_process(base / "floor", download))
        pid, port = stack.enter_context(service_process(base / "state", valkey.url, {}))
        store = redis.Redis.from_url(valkey.url)
        print("floor over service; floor / service where two figures stand")
        for mib in options.mib:
            body, before, count = Body(mib), commands(store), options.pairs + 2
            sides = {
                "floor": (floor_pid, functools.partial(send, body, Client(floor_port), base / "floor")),
                "service": (pid, functools.partial(send, body, Client(port), base / "state" / "spool")),
            }
            compare(f"upload {mib} MiB", sides, options.pairs, len(body.bytes))
            print(f"{'':>16}  {(commands(store) - before) / count:.1f} Redis commands an upload")
        version = publish(Registry(Layout(base / "state")), content=bytes(64 << 20)).version
        path = f"/drafter/{version}/model.safetensors?run=default"
        sides = {
            "floor": (floor_pid, functools.partial(Client(floor_port).get, "/")),
            "service": (pid, functools.partial(Client(port).get, path)),
        }
        compare("download 64 MiB", sides, options.pairs, 64 << 20)


if __name__ == "__main__":
    main()
