"""`deploy/ray/on_ray.py` on a real Ray of local nodes, in Ray's own environment: prints what came of it as JSON.

Acknowledged batches must be trained whatever is killed. `parts`: the worker's process, the API's actor, the node of
both. `hosts`: nodes share no directory, but an object store; a rank of the worker's two, and the worker's node.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
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
from helpers.worker.worker_fixtures import World  # noqa: E402 - after the path is set

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


class Host(deployed.Part):  # type: ignore[misc] # its module is outside of the packages
    """A part of a node that has a state directory of its own, as each host has."""

    def __init__(self, name: str, argv: Sequence[str], environment: Mapping[str, str]) -> None:
        node = ray.get_runtime_context().get_node_id()
        own = {"DRAFTALIGN_STATE_DIR": f"{environment['DRAFTALIGN_STATE_DIR']}/{node}"}
        super().__init__(name, argv, {**environment, **own})


def variables_of(pid: int) -> dict[str, str]:
    """The environment of a process; nothing where it has ended."""
    try:
        found = Path(f"/proc/{pid}/environ").read_bytes().decode()
    except OSError:
        return {}
    return dict(line.partition("=")[::2] for line in found.split("\0") if "=" in line)


def ranks() -> dict[str, int]:
    """Process ids of the worker's ranks, once both run."""

    def both() -> dict[str, int]:
        torchrun = process_of("worker")
        started = Path(f"/proc/{torchrun}/task").glob("*/children")
        pids = [int(pid) for file in started for pid in file.read_text().split()]
        found = {variables["RANK"]: pid for pid in pids if "RANK" in (variables := variables_of(pid))}
        return found if len(found) == 2 else {}

    return dict(until(both, "both ranks run"))


def parts(trial: Trial, cluster: Cluster, nodes: list[Any]) -> dict[str, Any]:
    """Kill one after the other: the worker's process, the API's actor, the node of both."""
    found: dict[str, Any] = {}
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
    return found


def hosts(trial: Trial, cluster: Cluster, nodes: list[Any], out: Path) -> dict[str, Any]:
    """Kill a rank, and the worker's node, whose directory no other node sees."""
    found: dict[str, Any] = {}
    trial.post(4)
    found["quiet"] = trial.trained()
    found["where the secret is seen"] = holders(os.environ["AWS_SECRET_ACCESS_KEY"])

    before = ranks()
    os.kill(before["1"], signal.SIGKILL)
    trial.post(4)
    found["rank killed"] = trial.trained()
    found["another rank"] = ranks()["1"] != before["1"]

    where = node_of("worker")
    found["two nodes"] = where != node_of("api")
    (lost,) = (node for node in nodes if node.node_id == where)
    cluster.remove_node(lost, allow_graceful=False)
    trial.post(4)
    found["node lost"] = trial.trained()
    until(lambda: node_of("worker") != where, "the worker is on another node")
    directories = [out / "state" / node.node_id for node in nodes]
    found["directories"] = sum((each / "runs/default").is_dir() for each in directories)
    found["checkpoints"] = sum(any(each.glob("runs/default/worker/checkpoint-*")) for each in directories)
    return found


def holders(secret: str) -> list[str]:
    """Ray's logs, and command lines of processes, in which the secret stands."""
    session = Path(ray._private.worker._global_node.get_session_dir_path())
    found = [str(log) for log in (session / "logs").rglob("*") if log.is_file() and secret in log.read_text("latin-1")]
    for title in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            found += [str(title)] * (secret in title.read_text("latin-1"))
    return found


def refusals(*asked: tuple[float, str, str]) -> list[str]:
    """What `up` says to this number of GPUs, with DRAFTALIGN_WORKER_RANKS and DRAFTALIGN_DEVICE."""
    said = []
    for gpus, wanted, device in asked:
        os.environ |= {"DRAFTALIGN_WORKER_RANKS": wanted, "DRAFTALIGN_DEVICE": device}
        try:
            deployed.up(gpus)
        except deployed.ConfigurationError as error:
            said.append(str(error))
    del os.environ["DRAFTALIGN_WORKER_RANKS"], os.environ["DRAFTALIGN_DEVICE"]
    return said


def with_gpus(cluster: Cluster) -> list[list[str]]:
    """What the ranks of a worker with two GPUs see; Ray counts them, and there are none."""
    cluster.add_node(num_cpus=3, num_gpus=2)
    os.environ["DRAFTALIGN_DEVICE"] = "cpu"
    deployed.up(2)
    seen = [variables_of(pid) for _, pid in sorted(ranks().items())]
    return [[each[name] for name in ("CUDA_VISIBLE_DEVICES", "LOCAL_RANK", "OMP_NUM_THREADS")] for each in seen]


def main() -> None:
    """Entry point: the directory to work in, the API's port, `parts` or `hosts`."""
    out, what = Path(sys.argv[1]), sys.argv[3]
    ours = ("AWS_", "DRAFTALIGN_", "OMP_")
    variables = {name: os.environ.pop(name) for name in list(os.environ) if name.startswith(ours)}
    redis_url = EmbeddedValkey(out / "redis").url
    variables |= {
        "DRAFTALIGN_REDIS_URL": redis_url,
        "DRAFTALIGN_STATE_DIR": str(out / "state"),
        "DRAFTALIGN_PORT": sys.argv[2],
        "DRAFTALIGN_CHECKPOINT_SECONDS": "0",
        "DRAFTALIGN_DEPTH": "3",
    }
    valkey = deployed.spawn("valkey", ["service.cli.valkey", str(out / "redis")])
    with connect(redis_url) as client:
        until(client.ping, "Redis answers")
    # No node has them: what a part knows of them came from `up`.
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    nodes = [cluster.add_node(num_cpus=2) for _ in range(3 if what == "hosts" else 2)]
    ray.init(address=cluster.address, namespace=deployed.NAMESPACE, log_to_driver=False)
    os.environ |= variables
    try:
        if what == "hosts":
            deployed.Part = Host
            trial = Trial(deployed.up(spread=True))
            found = hosts(trial, cluster, nodes, out)
        else:
            trial = Trial(deployed.up())
            found = parts(trial, cluster, nodes)
        left = [process_of(name) for name in deployed.PARTS]
        deployed.down()
        found["acknowledged"] = len(trial.acknowledged)
        if what == "parts":
            numbers = [
                (gpus, wanted, "cuda") for gpus, wanted in ((1.5, "1"), (-1, "1"), (0.5, "2"), (3, "2"), (2, "1"))
            ]
            devices = [(2, "2", "cuda:0"), (0, "2", "cuda:1"), (1, "1", "cuda:1"), (0.5, "1", "cuda:2")]
            no_devices = [(gpus, str(max(1, gpus)), "gpu") for gpus in (0, 1, 2)]
            found["refused"] = refusals(*numbers, *devices, *no_devices)
            found["gpus"] = with_gpus(cluster)
            left += [process_of(name) for name in deployed.PARTS] + [*ranks().values()]
            deployed.down()
        found["left over"] = [pid for pid in left if Path(f"/proc/{pid}").exists()]
    finally:
        ray.shutdown()
        cluster.shutdown()
        deployed.stop(valkey)
    (out / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
