"""draftalign's API and worker as actors of a Ray cluster, beside the trainer and the engines that run there.

    export DRAFTALIGN_REDIS_URL=redis://10.0.0.2:6379/0 DRAFTALIGN_STATE_DIR=/shared/draftalign
    export DRAFTALIGN_HOST=0.0.0.0 DRAFTALIGN_TOKEN_FILE=/shared/tokens.jsonl      # off loopback: tokens
    python deploy/ray/on_ray.py up --worker-gpus 1          # prints the API's URL
    python deploy/ray/on_ray.py down

Run where `ray.init()` finds the cluster (RAY_ADDRESS). Each node needs draftalign installed. All DRAFTALIGN_* variables
of this call reach both parts, and so do those of an object store that they name (AWS_*, GOOGLE_*, AZURE_*). Both are
placed on one node, for the state directory; `--spread` where that is shared, or with DRAFTALIGN_STATE_URL. Ray starts a
part again when its process or its node dies; a part that ends by itself ends its actor. Redis is not started here: what
was acknowledged lives there and in the state directory, or in the store of DRAFTALIGN_STATE_URL.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

import ray
from ray.util.placement_group import (
    PlacementGroup,
    get_placement_group,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from service.api.auth import check_binding
from service.cli.checks import check_redis, check_torch
from service.cli.supervisor import spawn, stop
from service.cli.up import worker_argv
from service.errors import ConfigurationError
from service.settings import Settings

NAMESPACE: Final = "draftalign"
PARTS: Final = ("api", "worker")
#: A part that dies sooner is started again only after so long.
_LEAST_SECONDS: Final = 5.0
_PATIENCE_SECONDS: Final = 60.0
#: How the variables begin that lead to an object store and open it, by how its URL begins.
_STORES: Final = {"s3://": "AWS_", "gs://": "GOOGLE_", "az://": "AZURE_"}


class Part:
    """One process of the service, whose life is that of this actor."""

    def __init__(self, name: str, argv: Sequence[str], environment: Mapping[str, str]) -> None:
        """`argv`: what `python -m` runs. Raises where the child could not start with that environment."""
        self._began = time.monotonic()
        self._stopping = False
        # By the actor's main thread: the kernel ends the child with the thread that started it.
        self._child = spawn(name, argv, environment)
        threading.Thread(target=self._follow, daemon=True).start()

    def _follow(self) -> None:
        code = self._child.wait()
        if not self._stopping:
            time.sleep(max(0.0, _LEAST_SECONDS - (time.monotonic() - self._began)))
            print(f"draftalign: the part ended with {code}; Ray starts it again", file=sys.stderr, flush=True)
            os._exit(1)

    def where(self) -> str:
        """The address of the node."""
        return str(ray.util.get_node_ip_address())

    def node(self) -> str:
        """Ray's id of the node."""
        return str(ray.get_runtime_context().get_node_id())

    def process(self) -> int:
        """Process id of the part."""
        return self._child.pid

    def stop(self) -> None:
        """End it as SIGTERM does: a worker writes its checkpoint."""
        self._stopping = True
        stop(self._child, patience_seconds=_PATIENCE_SECONDS)


def up(worker_gpus: float = 0.0, *, spread: bool = False) -> str:
    """Start both parts, detached from this process; returns the API's URL. Raises ConfigurationError.

    `worker_gpus`: a part of one, or whole ones of one node, of which each has a rank. With 0 the worker's ranks
    (DRAFTALIGN_WORKER_RANKS) run on CPUs, unless DRAFTALIGN_DEVICE says otherwise.
    """
    settings = Settings()
    ranks = _ranks(worker_gpus, settings)
    if settings.redis_url is None:
        raise ConfigurationError("DRAFTALIGN_REDIS_URL must be set: a Redis that outlives any node of the cluster")
    check_binding(settings)
    check_redis(settings.redis_url.get_secret_value())
    environment = _environment(settings)
    environment["DRAFTALIGN_REDIS_URL"] = settings.redis_url.get_secret_value()
    environment["DRAFTALIGN_STATE_DIR"] = str(settings.state_dir.resolve())
    if worker_gpus:
        environment.setdefault("DRAFTALIGN_DEVICE", "cuda")
    alone = environment | {"WORLD_SIZE": "1"}  # also where a rank of a trainer has started Ray
    if ranks > 1:
        alone["OMP_NUM_THREADS"] = "1"  # Ray would give each rank as many as the actor has processors
    if NAMESPACE in {group["name"] for group in placement_group_table().values() if group["state"] != "REMOVED"}:
        raise ConfigurationError("it runs in this cluster already; `down` ends it")
    bundles = [{"CPU": 1.0}, {"CPU": float(ranks)} | ({"GPU": worker_gpus} if worker_gpus else {})]
    try:
        places = _placed(bundles, spread=spread)
        api = _start("api", ["service.cli", "serve"], environment, places, bundles)
        worker = _start("worker", worker_argv(ranks), alone, places, bundles)
        ray.get([api.process.remote(), worker.process.remote()], timeout=_PATIENCE_SECONDS)
    except BaseException:
        down()
        raise
    loopback = settings.host.startswith("127.") or settings.host == "localhost"
    host = settings.host if loopback else ray.get(api.where.remote(), timeout=_PATIENCE_SECONDS)
    return f"http{'s' if settings.tls_cert else ''}://{host}:{settings.port}"


def _ranks(gpus: float, settings: Settings) -> int:
    """How many processes the worker has: one for each GPU; without one, as the settings say."""
    if not gpus >= 0 or (gpus > 1 and gpus % 1):  # nan and inf are neither
        raise ConfigurationError(
            f"worker_gpus is {gpus:g}, but a worker has 0 GPUs, a part of one, or whole ones with a rank on each. For "
            "ranks on several nodes, start `torchrun ... draftalign worker` in a job of its own: "
            "docs/guide/machines.md, Several GPUs"
        )
    ranks = math.ceil(gpus) or settings.worker_ranks
    if gpus and "worker_ranks" in settings.model_fields_set and settings.worker_ranks != ranks:
        raise ConfigurationError(
            f"DRAFTALIGN_WORKER_RANKS is {settings.worker_ranks}, but worker_gpus is {gpus:g}, and each rank has one "
            "GPU: leave the variable out, or give both one number"
        )
    _check_device(settings.device, ranks, gpus)
    return ranks


def _check_device(name: str, ranks: int, gpus: float) -> None:
    """Refuse a name that no rank can take: each would say so itself, and be started again, for ever.

    Whether there is such a GPU is the node's to say, not the caller's; so is what a worker without a GPU of Ray's sees.
    """
    if name in ("cpu", "cuda"):
        return
    check_torch()
    from service.ranks import own_device  # torch, which most callers do not need
    from service.worker.process.device import named_device

    device = named_device(name)
    if ranks > 1:
        own_device(name)
    elif gpus and device.index:
        raise ConfigurationError(
            f"DRAFTALIGN_DEVICE={name!r} is not what the worker sees: with worker_gpus {gpus:g} Ray shows it one GPU, "
            "as cuda:0, whatever its number on the node. Leave the variable out"
        )


def _environment(settings: Settings) -> dict[str, str]:
    """What of this process' variables the parts need: our own, and those of the object stores that they name."""
    urls = [url for url in (settings.state_url, settings.drafters_url, settings.rollouts_url) if url is not None]
    stores = [variables for scheme, variables in _STORES.items() if any(url.startswith(scheme) for url in urls)]
    return {name: value for name, value in os.environ.items() if name.startswith(("DRAFTALIGN_", *stores))}


def _placed(bundles: list[dict[str, float]], *, spread: bool) -> PlacementGroup:
    """A place for each part."""
    strategy = "SPREAD" if spread else "STRICT_PACK"
    places = placement_group(bundles, strategy=strategy, name=NAMESPACE, lifetime="detached")
    if not places.wait(_PATIENCE_SECONDS):
        raise ConfigurationError(f"the cluster has no room for {bundles}" + ("" if spread else " on one node"))
    return places


def _start(
    name: str,
    argv: Sequence[str],
    environment: Mapping[str, str],
    places: PlacementGroup,
    bundles: Sequence[Mapping[str, float]],
) -> Any:
    # The environment, with its passwords and keys, is an argument: a `runtime_env` stands in Ray's logs.
    place = PARTS.index(name)
    options = {
        "name": name,
        "namespace": NAMESPACE,
        "lifetime": "detached",
        "max_restarts": -1,
        "num_cpus": bundles[place]["CPU"],
        "num_gpus": bundles[place].get("GPU", 0.0),
        "scheduling_strategy": PlacementGroupSchedulingStrategy(places, placement_group_bundle_index=place),
    }
    if __name__ != "__main__":
        ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # the nodes have draftalign, not this file
    return ray.remote(Part).options(**options).remote(name, argv, environment)


def down() -> None:
    """Stop both parts, the worker first, and give their places back. What they knew stays where it is."""
    for name in reversed(PARTS):
        try:
            part = ray.get_actor(name, namespace=NAMESPACE)
        except ValueError:
            continue
        with contextlib.suppress(ray.exceptions.RayError):  # it may be dead already
            ray.get(part.stop.remote(), timeout=2 * _PATIENCE_SECONDS)
        ray.kill(part, no_restart=True)
    try:
        remove_placement_group(get_placement_group(NAMESPACE))
    except ValueError:
        return


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("do", choices=("up", "down"))
    parser.add_argument("--worker-gpus", type=float, default=0.0, help="a part of one, or several (default: 0)")
    parser.add_argument("--spread", action="store_true", help="on two nodes that share a state directory or store")
    given = parser.parse_args()
    ray.init(namespace=NAMESPACE, log_to_driver=False)
    try:
        if given.do == "up":
            print(up(given.worker_gpus, spread=given.spread))
        else:
            down()
    except (ConfigurationError, subprocess.SubprocessError) as error:
        sys.exit(f"draftalign: {error}")


if __name__ == "__main__":
    main()
