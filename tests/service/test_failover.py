"""`serve` and `worker` on a Redis of several hosts: a run is trained, and a primary's death outlived."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from helpers.engine.engine_forks import Fork
from helpers.forked import ROOT, forks
from helpers.ports import free_port
from helpers.service.failover_fixtures import Cluster, Sentinels, Server, Servers
from helpers.service.service_fixtures import HEADERS
from helpers.service.storage_fixtures import RolloutQueue
from helpers.worker.worker_fixtures import ONE_BY_ONE, World
from redis.exceptions import RedisError

from service.storage.queue.keys import Keys
from service.storage.ready import connect

KINDS: dict[str, Callable[[Path], Servers]] = {
    "cluster": lambda place: Cluster(place, replicas=True),
    "sentinel": Sentinels,
}


@contextlib.contextmanager
def _process(log: Path, environment: dict[str, str], part: str) -> Iterator[Fork]:
    process = forks("worker" if part == "worker" else "command").fork("service.cli", [part], environment, log)
    try:
        yield process
    except BaseException:
        print(f"--- {part}", log.read_text()[-6000:], sep="\n")
        raise
    finally:
        process.kill()
        process.wait()


class Service:
    """API and worker as processes, and a client that sends batches of a world."""

    def __init__(self, state_dir: Path, servers: Servers, stack: contextlib.ExitStack) -> None:
        self.world = World()
        port = free_port()
        changes = {name: value for name, value in ONE_BY_ONE.items() if name != "gate_min_gain"}
        environment = os.environ | {f"DRAFTALIGN_{name.upper()}": str(value) for name, value in changes.items()}
        environment |= {
            "DRAFTALIGN_STATE_DIR": str(state_dir),
            "DRAFTALIGN_REDIS_URL": servers.url,
            "DRAFTALIGN_PORT": str(port),
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
        }
        log = state_dir.parent
        self.processes = [
            stack.enter_context(_process(log / f"{name}.log", environment, name)) for name in ("serve", "worker")
        ]
        self.client = stack.enter_context(httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60.0))
        self._count = 0

    def wait(self, condition: Callable[[], bool], what: str, seconds: float = 180.0) -> None:
        """Wait until `condition` is true; both processes must live, and a refusal makes it false."""
        deadline = time.monotonic() + seconds
        while True:
            with contextlib.suppress(httpx.TransportError, RedisError):
                if condition():
                    return
            assert all(process.poll() is None for process in self.processes), "a process ended"
            if time.monotonic() > deadline:
                raise TimeoutError(f"not within {seconds} s: {what}")
            time.sleep(0.05)

    def ready(self) -> bool:
        return self.client.get("/readyz").status_code == 200

    def register(self) -> None:
        self.wait(self.ready, "the API is ready")
        body = self.world.run_file(drafter=self.world.drafter())
        assert self.client.put("/runs/default", content=body, headers=HEADERS).status_code == 201

    def send(self) -> str | None:
        """The next batch's id if it was acknowledged, None for a 503; nothing else may come."""
        body = self.world.rollout_file(f"batch{self._count}")
        reply = self.client.post("/rollouts?run=default", content=body, headers=HEADERS)
        if reply.status_code == 503:
            return None
        assert reply.status_code in (200, 202), reply.text
        self._count += 1
        return str(reply.json()["batch_id"])

    def acknowledged(self, count: int) -> list[str]:
        """Send until this number is acknowledged; a refused batch is sent again."""
        found: list[str] = []

        def enough() -> bool:
            if (name := self.send()) is not None:
                found.append(name)
            return len(found) == count

        if count:
            self.wait(enough, "acknowledged")
        return found


class Trial:
    """A run on servers that fail over, and what became of its batches."""

    def __init__(self, place: Path, kind: str, stack: contextlib.ExitStack) -> None:
        self.servers = stack.enter_context(KINDS[kind](place / "servers"))
        self.service = Service(place / "state", self.servers, stack)
        self.service.register()
        self._queue = RolloutQueue(stack.enter_context(connect(self.servers.url)), "default")

    def primary(self) -> Server:
        return self.servers.primary_of(Keys("default").queue)

    def states(self, names: list[str]) -> list[str | None]:
        """None: it is not known any more."""
        return [(self._queue.batch(name) or {}).get("state") for name in names]

    def wait_until_trained(self, names: list[str]) -> None:
        with contextlib.suppress(TimeoutError):
            self.service.wait(lambda: set(self.states(names)) == {"trained"}, "what was acknowledged is trained")
        assert self.states(names) == ["trained"] * len(names)


@pytest.mark.slow
@pytest.mark.chaos
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_is_trained_and_published_and_outlives_its_primary(kind: str, tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        trial = Trial(tmp_path, kind, stack)
        service = trial.service
        names = service.acknowledged(6)
        trial.wait_until_trained(names)
        service.wait(lambda: service.client.get("/drafter/latest?run=default").status_code == 200, "a drafter")

        primary = trial.primary()
        names += service.acknowledged(6)
        primary.wait_for_replica()  # what was acknowledged until here, Redis promises to keep
        killer = threading.Timer(0.2, primary.kill)
        killer.start()
        while killer.is_alive():  # Redis does not promise to keep these
            with contextlib.suppress(httpx.TransportError):
                service.send()
        # Where a failover is quicker than an upload's retries, no upload is refused, which is as good.
        later = service.acknowledged(3)
        trial.wait_until_trained(names + later)


@pytest.mark.slow
@pytest.mark.chaos
@pytest.mark.parametrize("kind", KINDS)
def test_the_primary_that_took_over_may_die_too_once_the_first_is_back(kind: str, tmp_path: Path) -> None:
    """The first comes back without what came meanwhile: it must follow, and not lead. Then it takes over again.

    Sentinels elect a server that has just come back, so there nothing is acknowledged by a primary without a replica.
    """
    with contextlib.ExitStack() as stack:
        trial = Trial(tmp_path, kind, stack)
        servers, service = trial.servers, trial.service
        alone = 2 if kind == "cluster" else 0
        servers.set(min_replicas_to_write="0" if alone else "1")
        names = service.acknowledged(2)
        first = trial.primary()
        second = servers.replica_of(first)
        for primary, replica in ((first, second), (second, first)):
            primary.wait_for_replica()
            servers.kill(primary)
            names += service.acknowledged(alone)  # of these the one that was killed knows nothing
            servers.bring_back(primary)
            assert trial.primary() is replica
            names += service.acknowledged(2)
        trial.wait_until_trained(names)


@pytest.mark.slow
@pytest.mark.chaos
@pytest.mark.parametrize(
    ("kind", "least", "alone_become"),
    [("cluster", "0", ["trained"] * 2), ("sentinel", "1", []), ("sentinel", "0", [None] * 2)],
    ids=["cluster", "sentinel, min-replicas-to-write 1", "sentinel"],
)
def test_where_the_second_primary_dies_before_the_first_is_back(
    kind: str, least: str, alone_become: list[str | None], tmp_path: Path
) -> None:
    """The first comes back first, with what it had written down when it died.

    A cluster waits for the second. Sentinels let the first lead: what the second alone acknowledged is lost, unless it
    may not write without a replica.
    """
    with contextlib.ExitStack() as stack:
        trial = Trial(tmp_path, kind, stack)
        servers, service = trial.servers, trial.service
        servers.set(min_replicas_to_write=least)
        names = service.acknowledged(3)
        trial.wait_until_trained(names)
        first = trial.primary()
        second = servers.replica_of(first)
        first.wait_for_replica()
        first.kill()
        alone = service.acknowledged(len(alone_become))
        if not alone:
            service.wait(second.is_primary, "the second takes over")
            service.wait(lambda: "NOREPLICAS" in service.client.get("/readyz").text, "it takes no writes")
            assert service.send() is None
        second.kill()
        first.start()
        if kind == "cluster":
            time.sleep(10.0)
            assert not first.is_primary()
        else:
            assert isinstance(servers, Sentinels)
            service.wait(lambda: servers.leader() == first.port, "the first leads again")
        second.start()
        later = service.acknowledged(3)
        trial.wait_until_trained(names + later)
        servers.settle()
        trial.wait_until_trained(
            names + later + [name for name, state in zip(alone, alone_become, strict=True) if state]
        )
        assert trial.states(alone) == alone_become
