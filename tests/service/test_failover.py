"""`serve` and `worker` on a Redis of several hosts: a run is trained, and a primary's death outlived."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from failover_fixtures import Cluster, Sentinels, Servers
from ports import free_port
from service_fixtures import HEADERS
from storage_fixtures import RolloutQueue
from worker_fixtures import ONE_BY_ONE, World

from service.storage.queue.keys import Keys
from service.storage.ready import connect

KINDS: dict[str, Callable[[Path], Servers]] = {
    "cluster": lambda place: Cluster(place, replicas=True),
    "sentinel": Sentinels,
}


@contextlib.contextmanager
def _process(log: Path, environment: dict[str, str], *argv: str) -> Iterator[subprocess.Popen[bytes]]:
    with (
        log.open("wb") as out,
        subprocess.Popen(
            [sys.executable, "-m", "service.cli", *argv], env=environment, stdout=out, stderr=out
        ) as process,
    ):
        try:
            yield process
        finally:
            process.kill()


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
        }
        log = state_dir.parent
        self.processes = [
            stack.enter_context(_process(log / f"{name}.log", environment, name)) for name in ("serve", "worker")
        ]
        self.client = stack.enter_context(httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60.0))
        self._count = 0

    def wait(self, condition: Callable[[], bool], what: str, seconds: float = 90.0) -> None:
        """Wait until `condition` is true; both processes must live, and a refusal of the API makes it false."""
        deadline = time.monotonic() + seconds
        while True:
            with contextlib.suppress(httpx.TransportError):
                if condition():
                    return
            assert all(process.poll() is None for process in self.processes), "a process ended"
            assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
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
        """Send until so many are acknowledged; a refused batch is sent again."""
        found: list[str] = []

        def enough() -> bool:
            if (name := self.send()) is not None:
                found.append(name)
            return len(found) == count

        self.wait(enough, "acknowledged")
        return found


@pytest.mark.slow
@pytest.mark.chaos
@pytest.mark.timeout(400)
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_is_trained_and_published_and_outlives_its_primary(kind: str, tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        servers = stack.enter_context(KINDS[kind](tmp_path / "servers"))
        service = Service(tmp_path / "state", servers, stack)
        service.register()
        redis = stack.enter_context(connect(servers.url))
        queue = RolloutQueue(redis, "default")

        def all_trained(names: list[str]) -> bool:
            return all((queue.batch(name) or {}).get("state") == "trained" for name in names)

        names = service.acknowledged(6)
        service.wait(lambda: all_trained(names), "the first batches are trained")
        service.wait(lambda: service.client.get("/drafter/latest?run=default").status_code == 200, "a drafter")

        primary = servers.primary_of(Keys("default").queue)
        names += service.acknowledged(6)
        primary.wait_for_replica()  # what was acknowledged until here, Redis promises to keep
        killer = threading.Timer(0.2, primary.kill)
        killer.start()
        while killer.is_alive():  # Redis does not promise to keep these
            with contextlib.suppress(httpx.TransportError):
                service.send()
        # Where a failover is quicker than an upload's retries, no upload is refused, which is as good.
        later = service.acknowledged(3)
        service.wait(lambda: all_trained(names + later), "what was acknowledged is trained")
