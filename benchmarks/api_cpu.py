"""CPU seconds of a real API by what it is asked: what `draftalign plan` takes a request for.

    python -m benchmarks.capacity --api

Rollout files of several sizes (no worker, hidden size 4096); heads and drafters of several sizes, with a state
directory and with object stores (moto, in this process); and steps of one run beside the plan: a head, the files of
four ranks, and four engines that download a drafter.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Final

import httpx
import numpy as np

from benchmarks import ingest  # it makes tests/ importable

# isort: split
from helpers.service.object_fixtures import BUCKET, SECRET, Store
from helpers.service.service_fixtures import (
    CONFIG,
    HEADERS,
    LAYERS,
    publish,
    rollout_file,
    rollout_tensors,
    run_file,
    with_last_rows,
)
from helpers.service.valkey_fixtures import OwnValkey

from benchmarks.growth import cpu_seconds
from rl_hooks import wire
from rl_hooks.format.eagle3 import DrafterConfig
from service.capacity.estimate import Traffic
from service.capacity.sizes import Deployment, drafter_bytes
from service.settings import Settings
from service.storage.mirror import state_of
from service.storage.registry import Registry

_BLOCK: Final = 1 << 20
#: Of heads and drafters: MiB, and how many heads.
_SIZES: Final = ((4, 8), (64, 5), (256, 3), (1024, 3))
#: What the service is told of object stores, by the name of the part.
_STORES: Final[Mapping[str, Mapping[str, str]]] = {
    "directory": {},
    "drafters in a store": {"DRAFTERS_URL": f"s3://{BUCKET}/drafters"},
    "all in a store": {"DRAFTERS_URL": f"s3://{BUCKET}/drafters", "STATE_URL": f"s3://{BUCKET}/state"},
}


class Api:
    """An API with no worker, a client for it, and the CPU that it takes."""

    def __init__(self, stack: ExitStack, stores: Mapping[str, str]) -> None:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        valkey = OwnValkey(folder / "valkey")
        valkey.start()
        stack.callback(valkey.stop)
        if stores:
            store = Store()
            stack.callback(store.down)
            os.environ |= {"AWS_ACCESS_KEY_ID": "k", "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_REGION": "us-east-1"}
            os.environ["AWS_ENDPOINT_URL"] = f"http://127.0.0.1:{store.port}"
            store.client().create_bucket(Bucket=BUCKET)
        told = {f"DRAFTALIGN_{name}": url for name, url in stores.items()}
        self.pid, port = stack.enter_context(ingest.service_process(folder / "state", valkey.url, told))
        self.client = stack.enter_context(httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=300))
        # As another host, where there is a store of all: a worker publishes.
        at = {"state_dir": folder / ("worker" if "STATE_URL" in stores else "state")}
        urls = {name.lower(): url for name, url in stores.items()}
        self.layout = state_of(Settings(redis_url=valkey.url, **at, **urls))  # type: ignore[arg-type]
        self.registry = Registry(self.layout, urls.get("drafters_url"))

    def used(self, act: Callable[[], Any]) -> float:
        """CPU seconds of the API for something, and for what it does after its answer."""
        before = cpu_seconds(self.pid)
        act()
        time.sleep(0.1)
        return cpu_seconds(self.pid) - before

    def send(self, method: str, path: str, parts: list[bytes | memoryview]) -> None:
        """Send a file, a MiB at a time."""

        def pieces() -> Iterator[bytes]:
            for part in parts:
                flat = memoryview(part).cast("B")
                yield from (bytes(flat[begin : begin + _BLOCK]) for begin in range(0, len(flat), _BLOCK))

        headers = HEADERS | {"Content-Length": str(wire.parts_bytes(parts))}
        reply = self.client.request(method, path, content=pieces(), headers=headers)
        assert reply.is_success, reply.text

    def register(self, run: str, config: Mapping[str, Any], head: wire.Tensor) -> None:
        """Register a run whose embedding is its head's values."""
        metadata = {"format": wire.RUN_FORMAT, "config": json.dumps(config), "policy_version": "0"}
        metadata["aux_layers"] = json.dumps({"convention": "entering", "layers": LAYERS})
        metadata["target_fingerprint"] = wire.target_fingerprint(config, LAYERS)
        self.send("PUT", f"/runs/{run}", wire.encode({"lm_head": head, "embed_tokens": head}, metadata))

    def head(self, run: str, head: wire.Tensor, version: int) -> None:
        """Send a head."""
        metadata = {"format": wire.HEAD_FORMAT, "policy_version": str(version)}
        self.send("PUT", f"/runs/{run}/head", wire.encode({"lm_head": head}, metadata))

    def publish(self, run: str, size: int) -> str:
        """Publish a drafter of so many bytes; returns its version, once the API has it."""
        self.layout.pull(run)  # a worker's host may have heard nothing of the run
        version = publish(self.registry, run, np.random.default_rng(size).bytes(_BLOCK) * (size // _BLOCK)).version
        while self.client.get(f"/drafter/latest?run={run}").json().get("version") != version:
            time.sleep(0.2)
        return version

    def fetch(self, run: str, version: str, name: str = "model.safetensors") -> int:
        """Download a file of it, as far as the API sends it; returns the status."""
        with self.client.stream("GET", f"/drafter/{version}/{name}?run={run}") as reply:
            for _ in reply.iter_raw():
                pass
        assert reply.status_code in (200, 307), reply
        return reply.status_code


def head_of(tokens: int, hidden: int) -> wire.Tensor:
    """Values as of a policy's head."""
    values = np.random.default_rng(0).normal(size=1 << 20).astype(np.float32).view(np.uint32) >> 16
    return wire.Tensor.of(np.resize(values.astype(np.uint16), (tokens, hidden)), "BF16")


def api_cpu() -> Iterator[str]:
    """All of it, line by line."""
    yield from rollout_files()
    for name, stores in _STORES.items():
        yield from heads_and_drafters(name, stores)
    yield from steps()


def rollout_files() -> Iterator[str]:
    """Without requests, and for files of several sizes; hidden size 4096."""
    config = CONFIG | {"hidden_size": 4096}
    metadata = {"run": "big", "target_fingerprint": wire.target_fingerprint(config, LAYERS)}
    with ExitStack() as stack:
        api = Api(stack, {})
        api.client.put("/runs/big", content=run_file(config), headers=HEADERS).raise_for_status()
        yield f"without requests: {api.used(lambda: time.sleep(10)) / 10.1:.4f} cores"
        points = []
        for turn, (tokens, times) in itertools.product(range(2), ((7, 80), (128, 40), (1024, 12), (3072, 6))):
            tensors = rollout_tensors((tokens // 2, tokens - tokens // 2), 4096)
            used = size = 0.0
            for number in range(times):
                ids = (f"{turn}-{tokens}-{number}-a", f"{turn}-{tokens}-{number}-b")
                body = rollout_file(ids, tensors=tensors, policy_version=0, raw_metadata=metadata)
                size, before = float(len(body)), cpu_seconds(api.pid)
                api.client.post("/rollouts?run=big", content=body, headers=HEADERS).raise_for_status()
                used += cpu_seconds(api.pid) - before
            points.append((size, used / times))
            yield f"{size / 2**20:.2f} MiB: {1000 * used / times:.2f} ms of CPU a file"
        sizes, costs = np.array(points).T
        slope, post = np.polyfit(sizes, costs, 1, w=1 / costs)  # relative errors
        yield f"fit: {1000 * post:.2f} ms a post, {slope * 2**30:.2f} s a GiB"


def heads_and_drafters(name: str, stores: Mapping[str, str]) -> Iterator[str]:
    """Files of 1 and 4 MiB, heads and drafters of several sizes."""
    with ExitStack() as stack:
        api = Api(stack, stores)
        for mib in (1, 4):
            body = ingest.Body(mib)
            used = []
            for _ in range(24):
                body.renew()
                used.append(api.used(partial(api.send, "POST", "/rollouts?run=default", [body.bytes])))
            yield _line(name, "rollouts", mib, used[4:])
        for mib, times in _SIZES[: 2 if stores else None]:  # a store of so much memory is not at hand
            run, head = f"run-{mib}", head_of((mib << 20) // 8192, 4096)
            api.register(run, CONFIG | {"hidden_size": 4096, "vocab_size": (mib << 20) // 8192}, head)
            used = [api.used(partial(api.head, run, head, number)) for number in range(1, times + 1)]
            yield _line(name, "head", mib, used)
            before = cpu_seconds(api.pid)
            version = api.publish(run, mib << 20)
            yield _line(name, "published drafter", mib, [cpu_seconds(api.pid) - before])
            status = api.fetch(run, version)  # the first compares its digest
            used = [api.used(partial(api.fetch, run, version)) for _ in range(5)]
            yield _line(name, f"drafter ({status})", mib, used)


def _line(name: str, what: str, mib: int, used: list[float]) -> str:
    lowest, middle, most = (1000 * value for value in (min(used), statistics.median(used), max(used)))
    return f"{name}: {what} of {mib} MiB: {middle:.1f} ms of CPU ({lowest:.1f} to {most:.1f}, {len(used)} times)"


def steps(count: int = 4) -> Iterator[str]:
    """Steps of one run beside the plan: CPU seconds of each part of a step, of the plan and measured."""
    hidden, vocab, tokens, rollouts, ranks, engines = 1024, 32_768, 128, 64, 4, 4
    config = CONFIG | {"hidden_size": hidden, "vocab_size": vocab, "intermediate_size": 3 * hidden}
    config |= {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 128}
    drafter = DrafterConfig.from_target(config, LAYERS, 8192)
    plan = Deployment(drafter, 60.0, rollouts, tokens, 1 / tokens, ranks=ranks, engines=engines)
    size = math.ceil(drafter_bytes(drafter) / _BLOCK) * _BLOCK
    metadata = {"run": "steps", "target_fingerprint": wire.target_fingerprint(config, LAYERS)}
    tensors = with_last_rows(rollout_tensors((tokens,) * (rollouts // ranks), hidden), "predicting")
    with ExitStack() as stack:
        api, head = Api(stack, {}), head_of(vocab, hidden)
        api.register("steps", config, head)
        version = api.publish("steps", size)
        api.fetch("steps", version)
        used: dict[str, list[float]] = {"heads": [], "rollouts": [], "downloads": []}
        for step in range(1, count + 1):
            files = [
                rollout_file(
                    tuple(f"{step}-{rank}-{number}" for number in range(rollouts // ranks)),
                    tensors=tensors, policy_version=step, last_rows="predicting", raw_metadata=metadata,
                )
                for rank in range(ranks)
            ]  # fmt: skip
            used["heads"].append(api.used(partial(api.head, "steps", head, step)))
            posts = (partial(api.send, "POST", "/rollouts?run=steps", [file]) for file in files)
            used["rollouts"].append(sum(api.used(post) for post in posts))
            gets = [partial(api.fetch, "steps", version, name) for name in ("config.json", "model.safetensors")]
            used["downloads"].append(sum(api.used(get) for get in gets * engines))
    said = {name: cores * plan.step_seconds for name, cores in Traffic(plan, Settings()).cores_of.items()}
    sent = f"a head of {head.data.nbytes >> 20} MiB, {ranks} files of {len(files[0]) / 2**20:.1f}"
    yield f"a step ({sent}, {engines} downloads of {size >> 20}), CPU s of the API, plan and measured:"
    for name, values in used.items():
        yield f"  {name}: {said[name]:.3f}, {statistics.median(values):.3f} ({min(values):.3f} to {max(values):.3f})"
    total = sum(statistics.median(values) for values in used.values())
    yield f"  together: {sum(said[name] for name in used):.3f}, {total:.3f}"
