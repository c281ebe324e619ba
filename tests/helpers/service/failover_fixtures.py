"""Real servers on loopback that fail over: a cluster, or a primary and its replica under three Sentinels."""

from __future__ import annotations

import contextlib
import functools
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

from helpers.ports import free_port
from redis import Redis
from redis.exceptions import RedisError

from service.cli.valkey import find_binary


def until(condition: Callable[[], Any], what: str, seconds: float = 90.0) -> None:
    """Wait until `condition` is true; a server that does not answer makes it false."""
    deadline = time.monotonic() + seconds
    while True:
        with contextlib.suppress(RedisError):
            if condition():
                return
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.05)


#: What was answered is on disk: a server that comes back empty may be elected, and its replica then empties itself.
_DATA = (
    'save ""',
    "appendonly yes",
    "appendfsync always",
    "repl-diskless-sync-delay 0",
    "repl-ping-replica-period 1",
)


class Server:
    """One Valkey process, that can be killed and started again on its port with what it wrote down."""

    def __init__(self, place: Path, *options: str) -> None:
        place.mkdir(parents=True)
        self.port, self.bus = free_port(), free_port()
        self.client: Any = Redis(port=self.port)
        self._file = place / "server.conf"
        self._sentinel = any(line.startswith("sentinel ") for line in options)
        self.log = place / "server.log"
        lines = [f"port {self.port}", "bind 127.0.0.1", f"dir {place}", f"logfile {self.log}", *options]
        lines += [f"cluster-port {self.bus}"] if "cluster-enabled yes" in options else []
        lines += [] if self._sentinel else [*_DATA]
        self._file.write_text("\n".join(lines) + "\n")
        self.start()

    def start(self) -> None:
        """Start it, and wait for its first answer."""
        mode = ["--sentinel"] if self._sentinel else []
        argv = [str(find_binary()), str(self._file), *mode]
        self._process = subprocess.Popen(argv)
        until(self.client.ping, "the server answers")
        if self._sentinel:  # one that had no processor for 2 s elects nobody for this long, by default 30 s
            self.client.execute_command("SENTINEL", "DEBUG", "tilt-period", 1000)

    def kill(self) -> None:
        """End it as kill -9 does."""
        self._process.kill()
        self._process.wait()

    def signal(self, number: int) -> None:
        """Send its process a signal."""
        self._process.send_signal(number)

    def is_primary(self) -> bool:
        """Whether it takes writes, by its own word."""
        return bool(self.client.info("replication")["role"] == "master")

    def has_replica(self) -> bool:
        """Whether it is a primary with a replica that has confirmed what it got; it is "online" before it gets any."""
        facts = self.client.info("replication")
        replica = facts.get("slave0", {})
        return bool(facts["role"] == "master" and replica.get("state") == "online" and replica["offset"] > 0)

    def wait_for_replica(self) -> None:
        """Return when the replica has confirmed every write that was answered before."""
        offset = self.client.info("replication")["master_repl_offset"]
        until(lambda: self.client.info("replication")["slave0"]["offset"] >= offset, "the replica has it all")


class Servers(ABC):
    """Some servers, all killed at the end. A test that fails prints what they logged last."""

    url: str
    nodes: list[Server]  # those with data

    def __init__(self, place: Path) -> None:
        self.place = place
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        try:
            self._begin()
        except BaseException:
            self._stack.close()
            raise
        return self

    @abstractmethod
    def _begin(self) -> None: ...

    @abstractmethod
    def settle(self) -> None:
        """Wait until a primary could be lost: all live, those that watch agree, and each replica has caught up."""

    def kill(self, primary: Server) -> None:
        """End a primary as kill -9 does, and wait until its replica has taken over."""
        replica = self.replica_of(primary)
        primary.kill()
        until(replica.is_primary, "the replica takes over")

    def bring_back(self, server: Server) -> None:
        """Start a server that was killed, and wait until it follows and has caught up."""
        server.start()
        self.settle()
        assert not server.is_primary()

    def replica_of(self, primary: Server) -> Server:
        """The one replica of a primary, by the replica's word."""
        (found,) = (node for node in self.nodes if node.client.info("replication").get("master_port") == primary.port)
        return found

    @abstractmethod
    def primary_of(self, _key: str) -> Server:
        """The primary that a write of this key goes to."""

    def set(self, **options: str) -> None:
        """Set options of all servers with data, for their next starts too."""
        for node in self.nodes:
            for name, value in options.items():
                node.client.config_set(name.replace("_", "-"), value)
            node.client.config_rewrite()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._stack.close()
        if kind is not None:
            for log in sorted(self.place.glob("*/server.log")):
                print(f"--- {log.parent.name}", log.read_text()[-6000:], sep="\n")

    def _start(self, place: Path, *options: str) -> Server:
        server = Server(place, *options)
        self._stack.callback(server.client.close)
        self._stack.callback(server.kill)
        return server


class Sentinels(Servers):
    """A primary and its replica under three Sentinels."""

    def __init__(
        self, place: Path, down_after_ms: int = 5000
    ) -> None:  # a busy machine lets a primary wait for seconds
        super().__init__(place)
        self._down_after_ms = down_after_ms

    def _begin(self) -> None:
        place = self.place
        self.nodes = [self._start(place / "primary")]
        self.nodes.append(self._start(place / "replica", f"replicaof 127.0.0.1 {self.nodes[0].port}"))
        until(self.nodes[0].has_replica, "the replica follows")
        watch = (
            f"sentinel monitor mine 127.0.0.1 {self.nodes[0].port} 2",
            f"sentinel down-after-milliseconds mine {self._down_after_ms}",
            "sentinel failover-timeout mine 10000",
        )
        self._watchers = [self._start(place / f"sentinel{n}", *watch) for n in range(3)]
        self.url = f"redis+sentinel://{','.join(f'127.0.0.1:{each.port}' for each in self._watchers)}/mine"
        self.settle()

    def settle(self) -> None:
        """Wait until all Sentinels know each other and one primary, whose replica has caught up."""
        for watcher in self._watchers:
            until(functools.partial(_has_found, watcher), "the Sentinels found all")
        until(
            lambda: self.leader() in [server.port for server in self.nodes if server.has_replica()],
            "the replica of the Sentinels' primary has caught up",
        )

    def leader(self) -> int:
        """The port of whom the Sentinels send clients to; 0 while they say different ones."""
        ports = {int(watcher.client.sentinel_master("mine")["port"]) for watcher in self._watchers}
        return ports.pop() if len(ports) == 1 else 0

    def primary_of(self, _key: str) -> Server:
        """The primary that writes go to."""
        return next(server for server in self.nodes if server.has_replica())


class Cluster(Servers):
    """Three primaries, each with a replica where `replicas`."""

    def __init__(self, place: Path, *, replicas: bool) -> None:
        super().__init__(place)
        self._replicas = replicas

    def _begin(self) -> None:
        options = "cluster-enabled yes", "cluster-node-timeout 2000", "cluster-allow-replica-migration no"
        self.nodes = [self._start(self.place / str(n), *options) for n in range(6 if self._replicas else 3)]
        first = self.nodes[0].client
        for number, node in enumerate(self.nodes):
            node.client.execute_command("CLUSTER SET-CONFIG-EPOCH", number + 1)
        for number, node in enumerate(self.nodes[:3]):
            low, high = 16384 * number // 3, 16384 * (number + 1) // 3 - 1
            node.client.execute_command("CLUSTER ADDSLOTSRANGE", low, high)
        for node in self.nodes[1:]:
            first.execute_command("CLUSTER MEET", "127.0.0.1", node.port, node.bus)
        for number, node in enumerate(self.nodes[3:]):
            primary = self.nodes[number].client.execute_command("CLUSTER MYID").decode()
            until(functools.partial(_knows, node, primary), "the nodes met")
            node.client.execute_command("CLUSTER REPLICATE", primary)
        self.url = f"redis+cluster://127.0.0.1:{self.nodes[0].port},127.0.0.1:{self.nodes[1].port}"
        self.settle()

    def settle(self) -> None:
        """Wait until every node finds the cluster whole, and every primary has its replica."""
        for node in self.nodes:
            until(functools.partial(_finds, node, "cluster_state", "ok"), "the cluster is whole")
            until(functools.partial(_finds, node, "cluster_known_nodes", str(len(self.nodes))), "all met")
        if self._replicas:
            until(lambda: sum(node.has_replica() for node in self.nodes) == 3, "all replicas have caught up")

    def primary_of(self, _key: str) -> Server:
        """The primary that a write of this key goes to."""
        return next(node for node in self.nodes if node.is_primary() and self._serves(node, _key))

    @staticmethod
    def _serves(node: Server, key: str) -> bool:
        try:
            node.client.exists(key)
        except RedisError:  # MOVED
            return False
        return True


def _knows(node: Server, other: str) -> bool:
    return other in str(node.client.cluster("NODES"))


def _finds(node: Server, name: str, value: str) -> bool:
    return bool(node.client.cluster("INFO")[name] == value)


def _has_found(watcher: Server) -> bool:
    facts = watcher.client.sentinel_master("mine")
    return bool(facts["num-other-sentinels"] == 2 and facts["num-slaves"] == 1)
