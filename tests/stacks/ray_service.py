"""`deploy/ray/on_ray.py` on a real Ray of two local nodes, in Ray's own environment: prints what came of it as JSON.

Acknowledged batches must be trained whatever is killed: the worker's process, the API's actor, the node of both.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import ray
from ray.cluster_utils import Cluster
from redis.exceptions import RedisError

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "deploy/ray"), str(ROOT / "tests")]

import on_ray as deployed  # noqa: E402 - after the path is set
from worker_fixtures import World  # noqa: E402 - after the path is set

from service.cli.valkey import EmbeddedValkey  # noqa: E402 - after the path is set
from service.storage.ready import connect  # noqa: E402 - after the path is set

HEADERS = {"Content-Type": "application/x-safetensors"}


def until(condition: Callable[[], Any], what: str, seconds: float = 120.0) -> Any:
    """Wait until it is true and return it; the service may be away meanwhile."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            if found := condition():
                return found
        except (httpx.HTTPError, ray.exceptions.RayError, RedisError) as error:
            reason: object = error
        else:
            reason = "not yet"
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {seconds:g} s: {what}: {reason}")
        time.sleep(0.2)


class Trial:
    """A run whose rollouts are sent, and whether each acknowledged one was trained."""

    def __init__(self, url: str) -> None:
        self.world, self.sender = World(), httpx.Client(base_url=url, timeout=30)
        self.acknowledged: list[str] = []
        until(lambda: self.sender.get("/readyz").status_code == 200, "the API is ready")
        body = self.world.run_file(drafter=self.world.drafter(seed=50))
        self.sender.put("/runs/default", content=body, headers=HEADERS).raise_for_status()

    def post(self, count: int) -> None:
        """Send batches, each until it is acknowledged."""
        for _ in range(count):
            number = len(self.acknowledged)
            body = self.world.rollout_file(f"b-{number}", lengths=[40] * 8, policy_version=0)
            until(partial(self._taken, body), "a batch is acknowledged")
            self.acknowledged.append(f"b-{number}")

    def _taken(self, body: bytes) -> bool:
        reply = self.sender.post("/rollouts?run=default", content=body, headers=HEADERS)
        if reply.status_code in (200, 202):
            return True
        if reply.status_code < 500 and reply.status_code != 429:
            raise RuntimeError(reply.text)
        return False

    def trained(self) -> int:
        """Wait until all that was acknowledged is trained; returns how many that are."""
        return int(until(self._all_trained, "all is trained"))

    def _all_trained(self) -> int:
        found = self.sender.get("/runs/default").raise_for_status().json()["rollouts"]
        return int(found["trained_total"]) if found["trained_total"] >= len(self.acknowledged) else 0


def part(name: str) -> Any:
    """The actor of a part."""
    return ray.get_actor(name, namespace=deployed.NAMESPACE)


def process_of(name: str) -> int:
    """Process id of a part, once Ray has it running."""
    return int(until(lambda: ray.get(part(name).process.remote(), timeout=10), f"{name} runs"))


def node_of(name: str) -> str:
    """Ray's id of the node that a part runs on."""
    return str(until(lambda: ray.get(part(name).node.remote(), timeout=10), f"{name} runs"))


def main() -> None:
    """Entry point: the directory to work in."""
    out = Path(sys.argv[1])
    valkey = deployed.spawn("valkey", ["service.cli.valkey", str(out / "state")])
    os.environ |= {
        "DRAFTALIGN_REDIS_URL": EmbeddedValkey(out / "state").url,
        "DRAFTALIGN_STATE_DIR": str(out / "state"),
        "DRAFTALIGN_PORT": sys.argv[2],
        "DRAFTALIGN_CHECKPOINT_SECONDS": "0",
        "DRAFTALIGN_DEPTH": "3",
        "OMP_NUM_THREADS": "1",
    }
    with connect(os.environ["DRAFTALIGN_REDIS_URL"]) as client:
        until(client.ping, "Redis answers")
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    nodes = [cluster.add_node(num_cpus=2), cluster.add_node(num_cpus=2)]
    ray.init(address=cluster.address, namespace=deployed.NAMESPACE, log_to_driver=False)
    found: dict[str, Any] = {}
    try:
        trial = Trial(deployed.up())
        trial.post(4)
        found["quiet"] = trial.trained()

        os.kill(worker := process_of("worker"), signal.SIGKILL)
        trial.post(4)
        found["worker killed"] = trial.trained()
        found["another worker"] = process_of("worker") != worker

        ray.kill(part("api"), no_restart=False)
        trial.post(4)
        found["api killed"] = trial.trained()

        where = node_of("worker")
        found["one node"] = where == node_of("api")
        (lost,) = (node for node in nodes if node.node_id == where)
        cluster.remove_node(lost, allow_graceful=False)
        trial.post(4)
        found["node lost"] = trial.trained()
        # Processes of the lost node may live, and answer, for a moment longer than its raylet.
        found["another node"] = until(lambda: node_of("worker") != where, "the worker is on another node")

        left = [process_of(name) for name in deployed.PARTS]
        deployed.down()
        found["left over"] = [pid for pid in left if Path(f"/proc/{pid}").exists()]
        found["acknowledged"] = len(trial.acknowledged)
    finally:
        ray.shutdown()
        cluster.shutdown()
        deployed.stop(valkey)
    (out / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
