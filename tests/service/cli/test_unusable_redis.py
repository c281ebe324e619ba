"""A Redis that answers and takes no writes is named before anything starts, with what to do."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from helpers.engine.agent_fixtures import eventually
from helpers.forked import run_fork
from helpers.ports import free_port
from helpers.service.valkey_fixtures import OwnValkey
from redis import Redis
from redis.exceptions import RedisError

from service.cli.checks import check_redis
from service.cli.valkey import find_binary
from service.errors import ConfigurationError


@pytest.mark.parametrize(
    ("broken", "query", "named"),
    [
        ("REPLICAOF 127.0.0.1 1", "", "is a read-only replica .* give the address of its primary"),
        ("ACL SETUSER u on >p ~da:* +@all -@write", "?username=u&password=p", "does not let its user write .* allow"),
        ("ACL SETUSER u on >p ~da:* +@all -@scripting", "?username=u&password=p", "does not let its user write"),
        ("ACL SETUSER u on >p ~other:* +@all", "?username=u&password=p", r"does not let its user write .* da:\*"),
        ("CONFIG SET requirepass p", "", "refuses the user or password .* correct them in DRAFTALIGN_REDIS_URL"),
        ("PING", "?db=99", "has no database of this number"),
        ("CONFIG SET min-replicas-to-write 1", "", "takes no writes without its replicas"),
    ],
)
@pytest.mark.parametrize("may_be_away", [True, False])
def test_what_is_wrong_is_named_with_what_to_do(
    own_valkey: OwnValkey, broken: str, query: str, named: str, may_be_away: bool
) -> None:
    check_redis(own_valkey.url, may_be_away=may_be_away)
    with Redis.from_url(own_valkey.url) as client:
        client.execute_command(*broken.split())
    with pytest.raises(ConfigurationError, match=rf"the Redis at unix://\S* {named}"):
        check_redis(own_valkey.url + query, may_be_away=may_be_away)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--cluster-enabled", "yes"), "is a node of a cluster .* give it as redis.cluster://"),
        (("--sentinel",), "lacks a command: it is a Sentinel's own port, .* give the address of the primary"),
    ],
)
def test_a_node_of_a_cluster_and_a_sentinel_are_named(tmp_path: Path, options: tuple[str, ...], named: str) -> None:
    port = str(free_port())
    file = tmp_path / "server.conf"
    file.write_text(f"bind 127.0.0.1\ndir {tmp_path}\ncluster-port {free_port()}\n")
    argv = [str(find_binary()), str(file), "--port", port, *options]
    with subprocess.Popen(argv, stdout=subprocess.DEVNULL) as server:
        try:
            with Redis(port=int(port)) as client:
                eventually(lambda: _answers(client))
            with pytest.raises(ConfigurationError, match=rf"the Redis at redis://127.0.0.1:{port} {named}"):
                check_redis(f"redis://127.0.0.1:{port}", may_be_away=True)
        finally:
            server.kill()


def test_protected_mode_is_named() -> None:
    """As Redis 7 answers whoever comes from another machine; here a double says it, because loopback never hears it."""
    denied = b"-DENIED Redis is running in protected mode because no password is set. In this mode\r\n"

    def deny() -> None:
        connection, _ = server.accept()
        with connection:
            connection.recv(4096)
            connection.sendall(denied)

    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor() as pool:
        pool.submit(deny)
        named = r"has no password, .* --protected-mode no"
        with pytest.raises(ConfigurationError, match=rf"the Redis at redis://\S* {named}") as refused:
            check_redis(f"redis://127.0.0.1:{server.getsockname()[1]}/0", may_be_away=True)
    assert "In this mode" not in str(refused.value), "Redis goes on for a paragraph"


def _answers(client: Redis) -> bool:
    try:
        return bool(client.ping())
    except RedisError:
        return False


def test_one_that_is_away_or_hangs_or_is_full_is_waited_for(
    own_valkey: OwnValkey, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    pid = own_valkey.process.pid
    os.kill(pid, signal.SIGSTOP)
    try:
        check_redis(own_valkey.url, may_be_away=True)
    finally:
        os.kill(pid, signal.SIGCONT)
    with Redis.from_url(own_valkey.url) as client:
        client.config_set("maxmemory", 1)
    check_redis(own_valkey.url)
    own_valkey.stop()
    check_redis(own_valkey.url, may_be_away=True)
    with pytest.raises(ConfigurationError, match="no Redis answers at unix://"):
        check_redis(own_valkey.url)
    said = [record.getMessage() for record in caplog.records]
    assert ["no Redis answers" in one for one in said] == [True, False, True]
    assert "is full" in said[1]


def test_nothing_is_said_of_one_that_starts_meanwhile(own_valkey: OwnValkey, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    own_valkey.stop()
    starting = threading.Timer(0.3, own_valkey.start)
    starting.start()
    check_redis(own_valkey.url, may_be_away=True)
    starting.join()
    assert caplog.text == ""


@pytest.mark.parametrize("command", ["serve", "worker", "up"])
def test_no_part_starts_on_it(command: str, own_valkey: OwnValkey, tmp_path: Path) -> None:
    with Redis.from_url(own_valkey.url) as client:
        client.replicaof("127.0.0.1", "1")
    given = {"DRAFTALIGN_REDIS_URL": own_valkey.url, "DRAFTALIGN_PORT": str(free_port())}
    kind = "worker" if command == "worker" else "command"
    done = run_fork(kind, "service.cli", command, directory=tmp_path, environment=os.environ | given)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "is a read-only replica" in done.stderr.strip().splitlines()[-1]
