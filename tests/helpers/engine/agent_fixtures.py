"""A small service and a small engine, both real HTTP servers, that speak what the swap agent speaks."""

from __future__ import annotations

import abc
import asyncio
import contextlib
import hashlib
import json
import socket
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import parse_qs, urlsplit

import numpy as np

from rl_hooks import wire
from rl_hooks.agent.agent import AgentConfig, SwapAgent
from rl_hooks.format.drafter import parse_drafter, weight_shapes

HIDDEN = 8


def drafter_config(hidden: int = HIDDEN) -> dict[str, Any]:
    """The config.json of a drafter that any engine could serve."""
    return {
        "hidden_size": hidden,
        "intermediate_size": hidden,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": hidden,
        "vocab_size": 2 * HIDDEN,
        "draft_vocab_size": HIDDEN,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e4,
        "eagle_aux_hidden_state_layer_ids": [2, 4, 5],
    }


MTP_CONFIG: dict[str, Any] = drafter_config() | {
    "model_type": "glm4_moe",
    "num_hidden_layers": 7,
    "draftalign": {"kind": "mtp"},
}


def drafter_bytes(seed: int, *, poisoned: bool = False, without: str | None = None, hidden: int = HIDDEN) -> bytes:
    """The tensors of such a drafter; what they hold does not matter here."""
    shapes = weight_shapes(parse_drafter(drafter_config(hidden)))
    if poisoned:
        shapes["embed_tokens.weight"] = (64, HIDDEN)
    maps = {"d2t": wire.Tensor.of(np.arange(HIDDEN, dtype=np.int64), "I64")}
    maps["t2d"] = wire.Tensor.of(np.ones(2 * HIDDEN, dtype=np.bool_), "BOOL")
    return _encoded(seed, shapes, without, maps)


def mtp_bytes(seed: int, *, poisoned: bool = False, without: str | None = None) -> bytes:
    """A policy's own module as the service publishes one; `poisoned` with its copies of the policy's weights."""
    shapes = weight_shapes(parse_drafter(MTP_CONFIG))
    if poisoned:
        copies = ("embed_tokens.weight", "shared_head.head.weight")
        shapes |= {f"model.layers.7.{name}": (2 * HIDDEN, HIDDEN) for name in copies}
    return _encoded(seed, shapes, without and f"model.layers.7.{without}", {})


def _encoded(seed: int, shapes: dict[str, tuple[int, ...]], without: str | None, maps: dict[str, wire.Tensor]) -> bytes:
    rng = np.random.default_rng(seed)
    tensors = {
        name: wire.Tensor.of(rng.standard_normal(shape, dtype=np.float32), "F32")
        for name, shape in shapes.items()
        if name != without
    }
    return b"".join(bytes(part) for part in wire.encode(tensors | maps, {"format": "pt"}))


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def manifest(
    version_number: int, files: dict[str, bytes], sequence: int, reason: str, **changes: Any
) -> dict[str, Any]:
    digest = sha256("".join(f"{sha256(files[name])} {name}\n" for name in sorted(files)).encode())
    document: dict[str, Any] = {
        "run": "default",
        "version": f"v{version_number:06d}-{digest[:8]}",
        "sequence": sequence,
        "reason": reason,
        "digest": digest,
        "files": [{"name": name, "bytes": len(data), "sha256": sha256(data)} for name, data in files.items()],
        "parent": None,
        "policy_version": version_number,
        "config_fingerprint": "fingerprint",
        "d2t_sha256": "d2t",
        "aux_layers": [2, 4, 5],
        "aux_layers_convention": "entering",
        "created": 0.0,
    }
    return document | changes


class _Server(ThreadingHTTPServer):
    """Closes every open connection when it stops, as a process that dies would."""

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, port: int, handler: type[BaseHTTPRequestHandler]) -> None:
        self.connections: set[socket.socket] = set()
        super().__init__(("127.0.0.1", port), handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        self.connections.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self.connections.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Connections that break are part of these tests."""


class Peer(abc.ABC):
    """A server on a port of its own that can go down and come back."""

    def __init__(self) -> None:
        self.lock = threading.Condition()
        self.port = 0
        self.requests: list[tuple[str, str]] = []
        self.clients: list[tuple[str, int]] = []  # of each request
        self.authorizations: set[str | None] = set()
        self._server: _Server | None = None
        self._thread: threading.Thread | None = None
        self.up()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def up(self) -> None:
        peer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True  # else each body waits 40 ms for the acknowledgement of its headers

            def do_GET(self) -> None:
                peer._handle(self, "GET")

            def do_POST(self) -> None:
                peer._handle(self, "POST")

            def log_message(self, *_: Any) -> None:
                pass

        self._server = _Server(self.port, Handler)
        self.port = self._server.server_port
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()

    def down(self) -> None:
        server, thread = self._server, self._thread
        if server is None or thread is None:
            return
        self._server = None
        with self.lock:
            self.lock.notify_all()
        server.shutdown()
        thread.join()
        for connection in list(server.connections):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        server.server_close()

    def _handle(self, handler: BaseHTTPRequestHandler, method: str) -> None:
        length = int(handler.headers.get("Content-Length") or 0)
        body = json.loads(handler.rfile.read(length)) if length else None
        with self.lock:
            self.requests.append((method, handler.path))
            self.clients.append(handler.client_address)
            self.authorizations.add(handler.headers.get("Authorization"))
        parts = urlsplit(handler.path)
        query = {key: values[0] for key, values in parse_qs(parts.query).items()}
        self.answer(handler, parts.path, query, body)

    @abc.abstractmethod
    def answer(self, handler: BaseHTTPRequestHandler, path: str, query: dict[str, str], body: Any) -> None:
        """Answer one request."""

    @staticmethod
    def send(
        handler: BaseHTTPRequestHandler, status: int, body: bytes = b"", headers: dict[str, str] | None = None
    ) -> None:
        handler.send_response(status)
        for key, value in (headers or {}).items():
            handler.send_header(key, value)
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body)

    def send_json(self, handler: BaseHTTPRequestHandler, status: int, document: Any, **headers: str) -> None:
        self.send(handler, status, json.dumps(document).encode(), {"Content-Type": "application/json", **headers})


class HasUrl(Protocol):
    """Anything that is served somewhere."""

    @property
    def url(self) -> str: ...


class Service(Peer):
    """The three calls of the API that the agent uses."""

    def __init__(self) -> None:
        self.manifest: dict[str, Any] | None = None
        self.files: dict[tuple[str, str], bytes] = {}
        self.reports: list[dict[str, Any]] = []
        self.sequence = 0
        self.cut_after: int | None = None  # the next download breaks off after this number of bytes
        self.ranges: list[str | None] = []
        self.acceptance_status = 200
        self.proxys_page: int | None = None  # the status with which a proxy answers, with a page of its own
        super().__init__()

    def publish(
        self, number: int, *, reason: str = "published", files: dict[str, bytes] | None = None, **changes: Any
    ) -> str:
        config = MTP_CONFIG if changes.get("kind") == "mtp" else drafter_config()
        files = files or {"model.safetensors": drafter_bytes(number)}
        files.setdefault("config.json", json.dumps(config | {"number": number}).encode())
        self.sequence += 1
        document = manifest(number, files, self.sequence, reason, **changes)
        for name, data in files.items():
            self.files[document["version"], name] = data
        self._offer(document)
        return str(document["version"])

    def push_again(self, *, override_canary: bool = False) -> None:
        """As the service does by itself, or, to override canaries, as a person's rollback to what is served."""
        assert self.manifest is not None
        self.sequence += 1
        more = {"sequence": self.sequence, "reason": "drafter dead", "override_canary": override_canary}
        self._offer(self.manifest | more)

    def _offer(self, document: dict[str, Any]) -> None:
        with self.lock:
            self.manifest = document
            self.lock.notify_all()

    def answer(self, handler: BaseHTTPRequestHandler, path: str, query: dict[str, str], body: Any) -> None:
        if self.proxys_page is not None:
            self.send(handler, self.proxys_page, b"<!doctype html><h1>Down for maintenance</h1>")
        elif path == "/drafter/latest":
            self._latest(handler, float(query["wait"]))
        elif path == "/acceptance":
            with self.lock:
                if self.acceptance_status == 200:
                    self.reports.append(body)
            self.send_json(handler, self.acceptance_status, {"stored": True})
        else:
            _, _, version, name = path.split("/")
            self._file(handler, self.files[version, name])

    def _latest(self, handler: BaseHTTPRequestHandler, wait: float) -> None:
        def tag() -> str:
            return f'"{self.manifest["sequence"]}-{self.manifest["version"]}"' if self.manifest else ""

        seen, deadline = handler.headers.get("If-None-Match"), time.monotonic() + wait
        with self.lock:
            while (not self.manifest or tag() == seen) and self._server and time.monotonic() < deadline:
                self.lock.wait(deadline - time.monotonic())
            document, etag = self.manifest, tag()
        if document is None:
            self.send_json(handler, 404, {"type": "urn:draftalign:no-drafter", "detail": "no drafter yet"})
        elif etag == seen:
            self.send(handler, 304, headers={"ETag": etag})
        else:
            self.send_json(handler, 200, document, ETag=etag)

    def _file(self, handler: BaseHTTPRequestHandler, data: bytes) -> None:
        wanted = handler.headers.get("Range")
        self.ranges.append(wanted)
        begin = int(wanted.removeprefix("bytes=").removesuffix("-")) if wanted else 0
        handler.send_response(206 if wanted else 200)
        if wanted:
            handler.send_header("Content-Range", f"bytes {begin}-{len(data) - 1}/{len(data)}")
        handler.send_header("Content-Length", str(len(data) - begin))
        handler.end_headers()
        end = len(data)
        if self.cut_after is not None:
            end, self.cut_after = begin + self.cut_after, None
            handler.close_connection = True
        handler.wfile.write(data[begin:end])

    def last_report(self, version: str, policy_version: int | None = None) -> dict[str, Any]:
        with self.lock:
            matching = [
                r for r in self.reports if (r["drafter_version"], r["policy_version"]) == (version, policy_version)
            ]
        return matching[-1] if matching else {}

    def verdicts(self) -> list[dict[str, Any]]:
        with self.lock:
            return [r["canary"] for r in self.reports if "canary" in r]


class Engine(Peer):
    """Counts what a test makes it count, and reads the checkpoints that it is given."""

    depth = 3

    def __init__(self) -> None:
        self.swapped: list[str] = []  # versions, over all restarts
        self.tensors: dict[str, set[str]] = {}
        self.fingerprint: str | None = None
        self.refusal: tuple[int, str] | None = None
        self.refused_versions: set[str] | None = None  # None: all, while there is a refusal
        self.hidden_metrics: set[str] = set()
        self.policy_version: int | None = None
        self.policy_in_state = False  # else a gauge
        self.method: str | None = None  # vLLM's, when it is not eagle3
        self.takes: str | None = None  # the kind of drafter that can be swapped in under that method
        self.started: float | None = None  # when its process began, where its page tells that
        self.rounds_during_swap = 0
        self.read: list[dict[str, str]] = []  # SHA-256 of every file that it was shown, load by load
        self.tells_digest = False  # of the model file, in its answer and its state, as vLLM's plugin does
        self.verifies = False  # compares the files with the digests of the request, and says so
        self.misread = 0  # how many of the next loads find other bytes than lie there
        self.told: dict[str, Any] = {}  # more of its state
        self.swap_asked, self.swap_allowed = threading.Event(), threading.Event()
        self.swap_allowed.set()
        self.swap_turns: threading.Semaphore | None = None  # where set, each swap takes one
        self._start()
        super().__init__()

    def _start(self) -> None:
        self.version: str | None = None
        self.digest: str | None = None
        self.swaps = 0
        self.counters = {"drafts": 0, "undrafted": 0, "accepted": 0, "generated": 0, "finished": 0}
        self.positions = [0] * self.depth

    def restart(self, version: str | None = None) -> None:
        self.down()
        self._start()
        self.version = version
        self.up()

    def play(self, rounds: int, accepted: int, *, requests: int = 0, depth: int | None = None) -> None:
        """Run `rounds` rounds with `accepted` accepted drafts each, of `depth`, and finish `requests` requests."""
        with self.lock:
            self.counters["drafts"] += rounds
            self.counters["undrafted"] += 0 if depth is None else rounds * (self.depth - depth)
            self.counters["accepted"] += rounds * accepted
            self.counters["generated"] += rounds * (1 + accepted) + requests
            self.counters["finished"] += requests
            for position in range(accepted):
                self.positions[position] += rounds

    def play_plainly(self, rounds: int) -> None:
        """Run rounds in which nothing was drafted."""
        with self.lock:
            self.counters["generated"] += rounds

    def answer(self, handler: BaseHTTPRequestHandler, path: str, query: dict[str, str], body: Any) -> None:
        del query
        if path == "/drafter/state":
            state = {
                "version": self.version,
                "loaded": self.version is not None,
                "swaps": self.swaps,
                "depth": self.depth,
                **self.told,
            }
            if self.policy_in_state:
                state["policy_version"] = self.policy_version
            if self.method is not None:
                state["method"] = self.method
                state["takes"] = self.takes
                state["loaded"] = True
            if self.fingerprint is not None:
                state["config_fingerprint"] = self.fingerprint
            if self.tells_digest:
                state["sha256"] = self.digest
            if self.verifies:
                state["verifies"] = True
            self.send_json(handler, 200, state)
        elif path == "/drafter/swap":
            self._swap(handler, body)
        else:
            self.send(handler, 200, self._metrics().encode())

    def _swap(self, handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
        if body.keys() != {"path", "version"} | ({"sha256"} if self.verifies else set()):
            self.send_json(handler, 422, {"title": "Invalid request"})  # as an engine that knows no other field
            return
        if self.refusal is not None and (self.refused_versions is None or body["version"] in self.refused_versions):
            self.send_json(handler, self.refusal[0], {"title": self.refusal[1]})
            return
        self.swap_asked.set()
        self.swap_allowed.wait(60)
        if self.swap_turns is not None:
            self.swap_turns.acquire(timeout=60)
        read = {name: sha256((Path(body["path"]) / name).read_bytes()) for name in ("model.safetensors", "config.json")}
        self.read.append(read)
        digest = read["model.safetensors"]
        if self.misread:
            self.misread, digest = self.misread - 1, sha256(b"other bytes")
        if self.verifies and body["sha256"] != read | {"model.safetensors": digest}:
            self.send_json(handler, 412, {"title": "Other bytes"})
            return
        model = wire.MappedFile(Path(body["path"]) / "model.safetensors")
        if self.rounds_during_swap:
            self.play(self.rounds_during_swap, 1)
        with self.lock:
            previous, self.version, self.digest = self.version, body["version"], digest
            self.swaps += 1
            self.tensors[body["version"]] = set(model.header.tensors)
            self.swapped.append(body["version"])
        answer = {"version": body["version"], "previous": previous}
        self.send_json(handler, 200, answer | ({"sha256": digest} if self.tells_digest else {}))

    def _metrics(self) -> str:
        with self.lock:
            count, positions, policy = dict(self.counters), list(self.positions), self.policy_version
        label = '{engine="0",model_name="tiny"}'
        lines = [
            f"vllm:spec_decode_num_drafts_total{label} {count['drafts']}",
            f"vllm:spec_decode_num_draft_tokens_total{label} {count['drafts'] * self.depth - count['undrafted']}",
            f"vllm:spec_decode_num_accepted_tokens_total{label} {float(count['accepted'])}",
            f"vllm:generation_tokens_total{label} {count['generated']}",
            f'vllm:request_success_total{{finished_reason="stop"}} {count["finished"]}',
            'vllm:request_success_total{finished_reason="length"} 0',
            *(
                f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",position="{i}"}} {value}'
                for i, value in enumerate(positions)
            ),
        ]
        if policy is not None and not self.policy_in_state:
            lines.append(f"draftalign_policy_version {policy}")
        if self.started is not None:
            lines.append(f"process_start_time_seconds {self.started}")
        return "\n".join(line for line in lines if not any(line.startswith(h) for h in self.hidden_metrics)) + "\n"


def running_agent(
    service: Service, *engines: Engine, cache: Path, **changes: Any
) -> contextlib.AbstractContextManager[SwapAgent]:
    """An agent of the small service."""
    return start_agent(service.url, *engines, cache=cache, **changes)


@contextlib.contextmanager
def start_agent(service_url: str, *engines: HasUrl, cache: Path, **changes: Any) -> Iterator[SwapAgent]:
    """An agent with short times, in a thread of its own."""
    settings: dict[str, Any] = {
        "service_url": service_url,
        "engine_urls": tuple(engine.url for engine in engines),
        "cache_dir": cache,
        "agent_id": "agent",
        "wait_seconds": 2.0,
        "report_seconds": 0.03,
        "max_backoff_seconds": 0.1,
        "request_timeout_seconds": 5.0,
    }
    agent = SwapAgent(AgentConfig(**(settings | changes)))
    thread = threading.Thread(target=lambda: asyncio.run(agent.run()))
    thread.start()
    try:
        yield agent
    finally:
        agent.stop()
        thread.join(timeout=60)
        assert not thread.is_alive()


def eventually(condition: Callable[[], Any], seconds: float = 60.0) -> Any:
    """Wait until `condition` is true, and return its value.

    Long waits ask less often: to ask may cost ten milliseconds of CPU, here and in the service.
    """
    deadline, pause = time.monotonic() + seconds, 0.01
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise AssertionError(f"not so within {seconds} s: {condition}")
        time.sleep(pause)
        pause = min(1.2 * pause, 0.05)
    return value


def settle(engine: Engine, scrapes: int = 3) -> None:
    """Wait until the agent has looked at the engine some more times."""

    def looked() -> int:
        with engine.lock:
            return sum(path == "/drafter/state" for _, path in engine.requests)

    goal = looked() + scrapes
    eventually(lambda: looked() >= goal)


def read_metrics(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as response:
        return str(response.read().decode())
