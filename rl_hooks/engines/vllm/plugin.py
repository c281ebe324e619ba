"""vLLM plugin: swaps the drafter of a running server between two engine steps, without a pause of generation.

    DRAFTALIGN_DRAFTER_DIR=/var/lib/drafters VLLM_PLUGINS=draftalign \
    vllm serve POLICY --speculative-config '{"method": "eagle3", "model": DRAFTER, "num_speculative_tokens": 4}'

| call | effect |
|---|---|
| `POST /drafter/swap` | `{path, version, sha256}` -> `{version, previous, sha256}`; checked first, all or nothing |
| `GET /drafter/state` | `{version, loaded, swaps, depth, drafting, config_fingerprint, ...}` |

`path` is a directory under DRAFTALIGN_DRAFTER_DIR. With DRAFTALIGN_SWAP_TOKEN both calls need it as a bearer token:
vLLM's `--api-key` guards /v1 only. Errors are RFC 9457 problem documents. 412: the files have other digests than
`sha256` names (without it any bytes are taken); the right files may still come. Any other 4xx refuses this drafter for
good; after a 5xx it may be accepted later. Details: docs/guide/vllm.md.
"""

from __future__ import annotations

import hmac
import json
import logging
import os
import re
from argparse import Namespace
from typing import Any, Final

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse

from rl_hooks.durable import at_home
from rl_hooks.engines.vllm.swapper import Swapper, SwapProblem
from rl_hooks.format.drafter import CONFIG_FILE, MODEL_FILE

log = logging.getLogger("vllm.draftalign")

_MAX_BODY_BYTES: Final = 64 << 10
_MAX_VERSION_LENGTH: Final = 128
_SHA256: Final = re.compile("[0-9a-f]{64}")


class DrafterEndpoints:
    """Endpoint plugin: the two routes. vLLM loads it only if VLLM_PLUGINS names `draftalign`."""

    name = "draftalign"
    required_tasks = ("generate",)

    def __init__(self) -> None:
        directory = os.environ.get("DRAFTALIGN_DRAFTER_DIR")
        self._directory = at_home(directory) if directory else None
        token = os.environ.get("DRAFTALIGN_SWAP_TOKEN", "")
        self._token = token.strip() or token  # an agent sends it so; one of blanks alone lets nobody in
        self._swapper: Swapper | None = None

    def attach_router(self, app: FastAPI) -> None:
        """Called by vLLM while it builds its application."""

        @app.post("/drafter/swap", tags=["draftalign"])
        async def swap(request: Request) -> Response:
            try:
                self._authorize(request)
                return JSONResponse(await self._engine().swap(*_parse(await _body(request))))
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
        except SwapProblem as problem:  # the server must start all the same
            log.warning("draftalign: the drafter was not looked at: %s", problem.detail)

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


def _parse(body: bytes) -> tuple[str, str, dict[str, str] | None]:
    """(path, version, SHA-256 by file name: None where they were not sent)."""
    try:
        document = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise SwapProblem(422, "Invalid request", f"the body is not JSON: {error}") from error
    if not isinstance(document, dict) or document.keys() | {"sha256"} != {"path", "version", "sha256"}:
        raise SwapProblem(422, "Invalid request", 'expected {"path": ..., "version": ..., "sha256": {...}}')
    path, version = document["path"], document["version"]
    if not isinstance(path, str) or not path or not isinstance(version, str):
        raise SwapProblem(422, "Invalid request", "path and version must be strings")
    if not 0 < len(version) <= _MAX_VERSION_LENGTH or not version.isprintable():
        raise SwapProblem(422, "Invalid request", f"version must be 1 to {_MAX_VERSION_LENGTH} printable characters")
    return path, version, _digests(document["sha256"]) if "sha256" in document else None


def _digests(given: Any) -> dict[str, str]:
    if not (
        isinstance(given, dict)
        and given.keys() == {MODEL_FILE, CONFIG_FILE}
        and all(isinstance(digest, str) and _SHA256.fullmatch(digest) for digest in given.values())
    ):
        detail = f"sha256 must name 64 hexadecimal digits each for {MODEL_FILE} and {CONFIG_FILE}, or be left out"
        raise SwapProblem(422, "Invalid request", detail)
    return given


def _problem(problem: SwapProblem) -> JSONResponse:
    return JSONResponse(
        {"type": "about:blank", "title": problem.title, "status": problem.status, "detail": problem.detail},
        status_code=problem.status,
        media_type="application/problem+json",
        headers={"WWW-Authenticate": "Bearer"} if problem.status == 401 else None,
    )
