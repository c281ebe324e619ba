"""A hook and an agent reach three API replicas through a TCP balancer, which sends each connection to the next one."""

from __future__ import annotations

import contextlib
import itertools
import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from helpers.engine.agent_fixtures import Engine, drafter_bytes, drafter_config, eventually, settle, start_agent
from helpers.service.service_fixtures import publish
from helpers.service.storage_fixtures import RolloutQueue
from helpers.service.valkey_fixtures import OwnValkey
from helpers.trainer.hooks_fixtures import AUX, step, tiny_qwen3
from redis import Redis
from test_replicas import REPLICAS, Replicas

from rl_hooks.hook import DrafterHook


class Balancer:
    """Round robin by connection. A replica that does not accept is passed over, as balancers do."""

    def __init__(self, ports: list[int]) -> None:
        self._turn = itertools.cycle(ports)
        self._ports = ports
        self.connections = dict.fromkeys(ports, 0)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._join, args=(client,), daemon=True).start()

    def _join(self, client: socket.socket) -> None:
        with client:
            for port in itertools.islice(self._turn, len(self._ports)):
                with contextlib.suppress(ConnectionRefusedError):
                    server = socket.create_connection(("127.0.0.1", port))
                    break
            else:
                return
            self.connections[port] += 1
            with server:
                back = threading.Thread(target=_pump, args=(server, client), daemon=True)
                back.start()
                _pump(client, server)
                back.join()

    def close(self) -> None:
        self._listener.close()


def _pump(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            sink.sendall(data)
    for end in (source, sink):  # a replica that was killed ends both ways at once
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def engine() -> Iterator[Engine]:
    peer = Engine()
    yield peer
    peer.down()


@pytest.mark.slow
def test_a_hook_and_an_agent_behind_a_balancer_go_on_as_replicas_are_killed(
    engine: Engine, tmp_path: Path, own_valkey: OwnValkey
) -> None:
    """Neither asks a replica for what another one alone knows."""
    model = tiny_qwen3()
    with contextlib.ExitStack() as stack:
        replicas = Replicas(tmp_path, own_valkey.url, stack)
        balancer = Balancer(replicas.ports)
        stack.callback(balancer.close)
        hook = DrafterHook(model, balancer.url, aux_layers=AUX)
        stack.callback(hook.close, 1.0)
        assert hook.flush(20)
        stack.enter_context(start_agent(balancer.url, engine, cache=tmp_path / "agent"))
        rounds = 0
        for victim in range(REPLICAS - 1):  # until one is left
            engine.policy_version = victim
            step(hook, model, 2 * victim)
            config = json.dumps(drafter_config() | {"number": victim})
            version = publish(replicas.registry, content=drafter_bytes(victim), config=config).version
            eventually(lambda version=version: engine.version == version)  # type: ignore[misc]
            settle(engine)
            engine.play(100, 2, requests=3)
            replicas.kill(victim)
            step(hook, model, 2 * victim + 1)
            engine.play(100, 2, requests=3)
            rounds += 200
            eventually(lambda: sum(live_rounds(balancer.url)) == rounds)  # noqa: B023
        assert all(balancer.connections.values()), balancer.connections
        stats = hook.stats()
        assert (stats["sent"] + stats["duplicates"], stats["dropped_error"]) == (2 * (REPLICAS - 1) + 1, 0), stats
        with Redis.from_url(own_valkey.url) as client:
            entries = RolloutQueue(client, "default").claim("w", 1 << 40, 1000.0)
        assert [entry.policy_version for entry in entries] == list(range(2 * (REPLICAS - 1)))
        time.sleep(0.2)
        assert live_rounds(balancer.url) == [200] * (REPLICAS - 1), "no report was counted twice"


def live_rounds(url: str) -> list[int]:
    """What engines counted, by policy version."""
    with contextlib.suppress(httpx.TransportError):
        points = httpx.get(f"{url}/alpha?run=default").raise_for_status().json()["points"]
        return [point["live_rounds"] for point in points if point["live_rounds"]]
    return []
