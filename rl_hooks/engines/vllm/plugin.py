"""vLLM plugin: swaps the drafter of a running server between two engine steps, without a pause of generation.

    DRAFTALIGN_DRAFTER_DIR=/var/lib/drafters VLLM_PLUGINS=draftalign \
    vllm serve POLICY --speculative-config '{"method": "eagle3", "model": DRAFTER, "num_speculative_tokens": 4}'

| call | effect |
|---|---|
| `POST /drafter/swap` | `{path, version}` -> `{version, previous}`; checked first, all or nothing |
| `GET /drafter/state` | `{version, loaded, swaps, depth, drafting, config_fingerprint, ...}` |

`path` is a directory with model.safetensors and config.json under DRAFTALIGN_DRAFTER_DIR; others are refused.
vLLM's `--api-key` guards /v1 only: set DRAFTALIGN_SWAP_TOKEN to ask for a bearer token here. Errors are RFC 9457
problem documents: 4xx means that this drafter is refused for good, 5xx that it may be accepted later. Entry points,
both named `draftalign`: `vllm.general_plugins` -> `register`, `vllm.endpoint_plugins` -> `DrafterEndpoints`. Details:
docs/guide/vllm.md.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import os
import time
from argparse import Namespace
from pathlib import Path
from typing import Any, Final

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse

from rl_hooks.engines.vllm.worker import REFUSED, RPC_METHODS

log = logging.getLogger("vllm.draftalign")

_MAX_BODY_BYTES: Final = 64 << 10
_MAX_VERSION_LENGTH: Final = 128
_POLL_SECONDS: Final = 0.02
_STAGE_TIMEOUT_SECONDS: Final = 600.0


def register() -> None:
    """General plugin: give vLLM's workers the RPC methods. Runs in every process, and may run twice."""
    from vllm.v1.worker.worker_base import WorkerBase

    for method in RPC_METHODS:
        setattr(WorkerBase, method.__name__, method)


class SwapProblem(Exception):  # noqa: N818 - it becomes a problem document
    """An answer other than 200: becomes a problem document."""

    def __init__(self, status: int, title: str, detail: str) -> None:
        super().__init__(detail)
        self.status, self.title, self.detail = status, title, detail


class Swapper:
    """Swaps through an engine client's `collective_rpc`; one swap at a time."""

    def __init__(self, engine: Any, directory: Path | None) -> None:
        self._engine = engine
        self._directory = directory
        self._lock = asyncio.Lock()
        self._last_state: dict[str, Any] = {"version": None, "loaded": False, "swaps": 0}

    async def state(self) -> dict[str, Any]:
        """The state of the drafter, from a rank that has one (in a pipeline only the last has)."""
        if await self._sleeps():
            # Its weights may be unmapped: reading them would kill the engine. A sleeping engine drafts nothing, so the
            # last state still tells which drafter its counts belong to. The weights are checked when it is awake.
            return {**self._last_state, "problem": "the engine sleeps or is paused"}
        states = await self._call("draftalign_state")
        drafting = [s for s in states if "shared_modules" in s]
        state = dict((drafting or states)[0])
        state["loaded"] = bool(drafting) and all(s["loaded"] for s in drafting)
        if len({(s["version"], s["sha256"]) for s in drafting}) > 1:
            versions = [s["version"] for s in drafting]
            state |= {"loaded": False, "problem": f"workers hold different drafters ({versions}); push one again"}
        self._last_state = state
        return state

    async def swap(self, path: str, version: str) -> dict[str, Any]:
        """Stage on every worker; when all have accepted the drafter, swap on every worker in one call."""
        directory = self._resolve(path)
        async with self._lock:
            await self._check_awake()
            await self._call("draftalign_stage", str(directory), version)
            sha256 = await self._await_staged(version)
            await self._check_awake()  # it may have been put to sleep while the drafter was staged
            results = await self._call("draftalign_apply", version, sha256)
        return {"version": version, "previous": results[0]["previous"], "sha256": sha256}

    def _resolve(self, path: str) -> Path:
        """The requested directory, if it lies under the configured one. Symbolic links are resolved first."""
        if self._directory is None:
            raise SwapProblem(503, "Swapping is off", "set DRAFTALIGN_DRAFTER_DIR to the directory drafters come from")
        try:
            resolved = (self._directory / path).resolve()
            if not resolved.is_relative_to(self._directory) or resolved == self._directory:
                # The same answer whether it exists or not: it must not reveal the file system.
                raise SwapProblem(403, "Not allowed", f"path must name a directory under {self._directory}")
            if not resolved.is_dir():
                raise SwapProblem(404, "No such drafter", f"{resolved} is not a directory on this machine")
        except (ValueError, OSError) as error:  # a NUL byte, a lone surrogate, too long
            raise SwapProblem(422, "Invalid request", f"path is no path: {type(error).__name__}") from error
        return resolved

    async def _check_awake(self) -> None:
        # A paused engine (RL's weight sync) can take a drafter; a sleeping one has given its memory away. vLLM answers
        # "sleeping" to both, so engines that can sleep must be awake and running.
        if await self._sleeps():
            raise SwapProblem(503, "Engine asleep", "the engine sleeps or is paused; ask again when it runs")

    async def _sleeps(self) -> bool:
        can_sleep = getattr(getattr(self._engine, "model_config", None), "enable_sleep_mode", False)
        return bool(can_sleep and await self._engine.is_sleeping())

    async def _await_staged(self, version: str) -> str:
        deadline = time.monotonic() + _STAGE_TIMEOUT_SECONDS
        while True:
            ranks = await self._call("draftalign_staged")
            if all(rank["done"] for rank in ranks):
                break
            if time.monotonic() > deadline:
                raise SwapProblem(503, "Too slow", f"reading {version} took over {_STAGE_TIMEOUT_SECONDS:.0f} s")
            await asyncio.sleep(_POLL_SECONDS)
        for rank in ranks:
            if rank["refused"]:
                raise SwapProblem(409, "Drafter refused", rank["refused"])
            if rank["failed"]:
                raise SwapProblem(503, "Drafter not read", rank["failed"])
        digests = {rank["sha256"] for rank in ranks if rank["sha256"]}
        if len(digests) != 1:
            raise SwapProblem(503, "Drafter not read", f"workers read different files for {version}: {sorted(digests)}")
        return str(digests.pop())

    async def _call(self, method: str, *arguments: Any) -> list[dict[str, Any]]:
        try:
            return list(await self._engine.collective_rpc(method, args=arguments))
        except Exception as error:  # vLLM raises a bare Exception with the worker's text
            text = str(error)
            if REFUSED in text:
                raise SwapProblem(409, "Drafter refused", text.partition(REFUSED)[2]) from error
            raise SwapProblem(503, "Engine error", f"{method}: {text[:500]}") from error


class DrafterEndpoints:
    """Endpoint plugin: the two routes. vLLM loads it only if VLLM_PLUGINS names `draftalign`."""

    name = "draftalign"
    required_tasks = ("generate",)

    def __init__(self) -> None:
        directory = os.environ.get("DRAFTALIGN_DRAFTER_DIR")
        self._directory = Path(directory).resolve() if directory else None
        self._token = os.environ.get("DRAFTALIGN_SWAP_TOKEN") or None
        self._swapper: Swapper | None = None

    def attach_router(self, app: FastAPI) -> None:
        """Called by vLLM while it builds its application."""

        @app.post("/drafter/swap", tags=["draftalign"])
        async def swap(request: Request) -> Response:
            try:
                self._authorize(request)
                path, version = _parse(await _body(request))
                return JSONResponse(await self._engine().swap(path, version))
            except SwapProblem as problem:
                return _problem(problem)

        @app.get("/drafter/state", tags=["draftalign"])
        async def state(request: Request) -> Response:
            try:
                self._authorize(request)
                return JSONResponse(await self._engine().state())
            except SwapProblem as problem:
                return _problem(problem)

    async def init_state(self, engine_client: Any, state: Any, args: Namespace) -> None:  # noqa: ARG002 - vLLM's protocol
        """Called by vLLM once its engine is up."""
        if engine_client is None:
            return
        self._swapper = Swapper(engine_client, self._directory)
        # The workers copy the draft vocabulary to the host at their first call, which must be before they first sleep.
        try:
            await self._swapper.state()
        except SwapProblem as problem:  # the server must start without it
            log.warning("draftalign: the drafter was not looked at: %s", problem.detail)
        if os.environ.get("DRAFTALIGN_TAP_URL"):
            await engine_client.collective_rpc("draftalign_tap")

    def _engine(self) -> Swapper:
        if self._swapper is None:
            raise SwapProblem(503, "No engine", "this server has no engine, or it is still starting")
        return self._swapper

    def _authorize(self, request: Request) -> None:
        given = request.headers.get("authorization", "")
        if self._token and not hmac.compare_digest(given.encode(), f"Bearer {self._token}".encode()):
            raise SwapProblem(
                401, "Not authorized", "send Authorization: Bearer with the value of DRAFTALIGN_SWAP_TOKEN"
            )


async def _body(request: Request) -> bytes:
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > _MAX_BODY_BYTES:
            raise SwapProblem(413, "Too large", f"a swap is asked for in under {_MAX_BODY_BYTES} bytes")
    return body


def _parse(body: bytes) -> tuple[str, str]:
    try:
        document = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise SwapProblem(422, "Invalid request", f"the body is not JSON: {error}") from error
    if not isinstance(document, dict) or document.keys() != {"path", "version"}:
        raise SwapProblem(422, "Invalid request", 'expected {"path": ..., "version": ...}')
    path, version = document["path"], document["version"]
    if not isinstance(path, str) or not path or not isinstance(version, str):
        raise SwapProblem(422, "Invalid request", "path and version must be strings")
    if not 0 < len(version) <= _MAX_VERSION_LENGTH or not version.isprintable():
        raise SwapProblem(422, "Invalid request", f"version must be 1 to {_MAX_VERSION_LENGTH} printable characters")
    return path, version


def _problem(problem: SwapProblem) -> JSONResponse:
    return JSONResponse(
        {"type": "about:blank", "title": problem.title, "status": problem.status, "detail": problem.detail},
        status_code=problem.status,
        media_type="application/problem+json",
        headers={"WWW-Authenticate": "Bearer"} if problem.status == 401 else None,
    )
