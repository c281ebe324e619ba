"""The API under real uvicorn on a free port, and makers of small run, head, rollout and drafter files."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import uvicorn.server

from rl_hooks import wire
from service.api.app import make_server
from service.settings import Settings
from service.storage.drafters.versions import Manifest
from service.storage.mirror import state_of
from service.storage.registry import Registry

VOCAB, HIDDEN, LAYERS = 50, 8, (2, 4, 5)
CONFIG: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": HIDDEN,
    "num_hidden_layers": 8,
    "vocab_size": VOCAB,
    "intermediate_size": 2 * HIDDEN,
    "num_attention_heads": 1,
}
FINGERPRINT = wire.target_fingerprint(CONFIG, LAYERS)
HEADERS = {"Content-Type": wire.CONTENT_TYPE}


class _OftenAwake:
    """asyncio as uvicorn's server sees it here: it looks a hundred times a second, not ten, whether it is to end."""

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio, name)

    @staticmethod
    async def sleep(seconds: float) -> None:
        await asyncio.sleep(min(seconds, 0.01))


vars(uvicorn.server)["asyncio"] = _OftenAwake()


class RunningService:
    """A served API, and a client for it."""

    def __init__(self, **settings: Any) -> None:
        self.settings = Settings(**settings)
        self.layout = state_of(self.settings)
        self.registry = Registry(self.layout)
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.server = make_server(self.settings)
        self._thread = threading.Thread(target=self.server.run, kwargs={"sockets": [self._socket]})
        self._thread.start()
        while not self.server.started:
            assert self._thread.is_alive(), "the server did not start"
            time.sleep(0.005)
        # Plain http: no time is spent on reading the certificates that this machine trusts, 20 ms for each client.
        self.client = httpx.Client(base_url=self.url, timeout=20.0, verify=ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))

    def stop(self) -> None:
        """Stop as on SIGTERM."""
        self.client.close()
        self.server.handle_exit(15, None)
        self._thread.join(60)
        self._socket.close()
        assert not self._thread.is_alive()

    def wait_for_requests(self, count: int = 1, seconds: float = 60.0) -> None:
        """Block until this number of requests is being served."""
        self._wait(lambda: len(self.server.server_state.tasks) >= count, seconds)

    def wait_for_no_connections(self, seconds: float = 60.0) -> None:
        """Block until the server noticed that its clients closed."""
        self._wait(lambda: not self.server.server_state.connections, seconds)

    @staticmethod
    def _wait(condition: Callable[[], bool], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"nothing happened in {seconds} s"
            time.sleep(0.005)

    def register(self, run: str = "default", **changes: Any) -> httpx.Response:
        return self.client.put(f"/runs/{run}", content=run_file(**changes), headers=HEADERS)

    def post(self, body: bytes, run: str | None = None, **headers: str) -> httpx.Response:
        params = {} if run is None else {"run": run}
        return self.client.post("/rollouts", content=body, params=params, headers=HEADERS | headers)

    def publish(self, run: str = "default", content: bytes = b"weights", **changes: Any) -> Manifest:
        return publish(self.registry, run, content, **changes)

    def spooled(self) -> list[Path]:
        """Every file in the spool, uploads in progress included."""
        return sorted(p for p in (self.layout.root / "spool").rglob("*") if p.is_file())

    def raw(self, request: bytes, *, read_seconds: float = 60.0) -> bytes:
        """Send bytes as they are and read until the server closes or falls silent."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=read_seconds) as connection:
            connection.sendall(request)
            reply = b""
            try:
                while chunk := connection.recv(65536):
                    reply += chunk
            except TimeoutError:
                pass
            return reply


def publish(
    registry: Registry, run: str = "default", content: bytes = b"weights", config: str = "{}", **changes: Any
) -> Manifest:
    """Publish a drafter of two small files."""
    staged = registry.stage(run)
    (staged / "model.safetensors").write_bytes(content)
    (staged / "config.json").write_text(config)
    facts: dict[str, Any] = {
        "policy_version": 1,
        "parent": None,
        "config_fingerprint": "f" * 32,
        "d2t_sha256": "d" * 64,
        "aux_layers": LAYERS,
        "gate": None,
    }
    return registry.publish(run, staged, **(facts | changes))


def joined(parts: list[bytes | memoryview]) -> bytes:
    return b"".join(bytes(part) for part in parts)


def f32(*shape: int) -> wire.Tensor:
    return wire.Tensor.of(np.zeros(shape, np.float32), "F32")


def i32(*values: int) -> wire.Tensor:
    return wire.Tensor.of(np.array(values, np.int32), "I32")


def run_file(
    config: Mapping[str, Any] | None = None,
    tensors: Mapping[str, wire.Tensor] | None = None,
    metadata: Mapping[str, str] | None = None,
) -> bytes:
    """Body of PUT /runs/{run}; `tensors` and `metadata` add to or replace the defaults."""
    config = CONFIG if config is None else config
    meta = {
        "format": wire.RUN_FORMAT,
        "config": json.dumps(config),
        "aux_layers": json.dumps({"convention": "entering", "layers": LAYERS}),
        "target_fingerprint": wire.target_fingerprint(config, LAYERS),
        "policy_version": "0",
    }
    shape = (config.get("vocab_size", 1), config.get("hidden_size", 1))
    own = {"embed_tokens": f32(*shape), "lm_head": f32(*shape)}
    return joined(wire.encode(own | dict(tensors or {}), meta | dict(metadata or {})))


def head_file(
    policy_version: int,
    *,
    rows: int | None = None,
    ids: Sequence[int] | None = None,
    metadata: Mapping[str, str] | None = None,
) -> bytes:
    """Body of PUT /runs/{run}/head. `rows` and `ids` are for those that are refused."""
    tensors = {"lm_head": f32(rows or (VOCAB if ids is None else len(ids)), HIDDEN)}
    if ids is not None:
        tensors["ids"] = i32(*ids)
    meta = {"format": wire.HEAD_FORMAT, "policy_version": str(policy_version)}
    return joined(wire.encode(tensors, meta | dict(metadata or {})))


def rollout_tensors(lengths: tuple[int, ...] = (6, 5), hidden: int = HIDDEN) -> dict[str, wire.Tensor]:
    """Tensors of a small valid batch: token ids count up, all but the first token of a rollout are the policy's.

    Its head is zeros, so every token has the same probability.
    """
    total = sum(lengths)
    bounds = np.cumsum((0, *lengths)).astype(np.int32)
    mask = np.ones(total, np.uint8)
    mask[bounds[:-1]] = 0
    return {
        "input_ids": wire.Tensor.of((np.arange(total) % VOCAB).astype(np.int32), "I32"),
        "cu_seqlens": wire.Tensor.of(bounds, "I32"),
        "loss_mask": wire.Tensor.of(mask, "U8"),
        "aux_hidden": wire.Tensor.of(np.zeros((total, len(LAYERS) * hidden), np.uint16), "BF16"),
        "last_hidden": wire.Tensor.of(np.zeros((total, hidden), np.uint16), "BF16"),
        "logprobs": wire.Tensor.of(np.where(mask, -np.log(VOCAB), 0.0).astype(np.float32), "F32"),
        "logsumexp": wire.Tensor.of(np.full(total, np.log(VOCAB), np.float32), "F32"),
    }


def with_last_rows(tensors: Mapping[str, wire.Tensor], last_rows: wire.LastRows) -> dict[str, wire.Tensor]:
    """The tensors of a rollout file with every row, or of one that leaves out what no EAGLE-3 drafter reads."""
    found = dict(tensors)
    rows = wire.predicting_rows(np.frombuffer(found["loss_mask"].data, np.uint8))
    for name in ("last_hidden", "last_hidden_scale", "logsumexp"):
        if name in found and last_rows == "predicting":
            tensor = found[name]
            array = np.frombuffer(tensor.data, wire.NUMPY_DTYPE[tensor.dtype]).reshape(tensor.shape)
            found[name] = wire.Tensor.of(array[rows], tensor.dtype)
    return found


def rollout_metadata(ids: tuple[str, ...] = ("a", "b"), **changes: Any) -> dict[str, str]:
    """Metadata of a small valid batch."""
    facts: dict[str, Any] = {
        "run": "default",
        "policy_version": 3,
        "rollout_ids": ids,
        "target_fingerprint": FINGERPRINT,
        "aux_layers": LAYERS,
    }
    return wire.rollout_metadata(**(facts | changes))


def rollout_file(
    ids: tuple[str, ...] | None = None,
    *,
    lengths: tuple[int, ...] | None = None,
    tensors: Mapping[str, wire.Tensor | None] | None = None,
    raw_metadata: Mapping[str, str] | None = None,
    **metadata: Any,
) -> bytes:
    """A rollout file; `tensors` replaces (None removes), `raw_metadata` overrides what `metadata` made.

    The ids are a and b; where a policy version is given they are of that version: an id is a rollout's own.
    """
    version = metadata.get("policy_version", "")
    ids = (f"a{version}", f"b{version}") if ids is None else ids
    made = rollout_tensors(lengths or tuple(6 - i % 2 for i in range(len(ids))))
    table: dict[str, wire.Tensor | None] = dict(with_last_rows(made, metadata.get("last_rows", "all")))
    table |= dict(tensors or {})
    meta = rollout_metadata(ids, **metadata) | dict(raw_metadata or {})
    return joined(wire.encode({k: v for k, v in table.items() if v is not None}, meta))
