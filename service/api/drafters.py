"""`GET /drafter/latest`, `GET /drafter/{version}/{file}`, `GET /drafters`, `POST /drafter/{version}/rollback`."""

from __future__ import annotations

import asyncio
import base64
import os
import time
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response
from pydantic import BaseModel, ConfigDict, Field
from starlette.datastructures import Headers
from starlette.responses import FileResponse
from starlette.types import Message, Receive, Scope, Send

from rl_hooks.release import NONCE_PATTERN, SIGNATURE_HEADER
from service.api.context import Context, RunQuery, ServiceContext
from service.api.problems import Problem, ProblemResponse
from service.api.uploads import json_body, parse_body
from service.storage.registry import MANIFEST, Manifest

router = APIRouter(tags=["drafters"])

_POLL_SECONDS = 0.1


class CheckpointResponse(FileResponse):
    """A published file in pieces of 1 MiB: a third of the processor time that the default 64 KiB takes."""

    chunk_size = 1 << 20

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the file. Starlette's plain-text answer to a bad range becomes a problem document."""

        async def checked(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] in (400, 416):
                raise _BadRange(message["status"], message["headers"])
            await send(message)

        try:
            await super().__call__(scope, receive, checked)
        except _BadRange as error:
            wanted = Headers(scope=scope).get("range", "")[:80]
            problem = Problem(error.status, "bad-range", f"range {wanted!r} does not fit this file", field="Range")
            if "content-range" in error.headers:
                problem.headers["Content-Range"] = error.headers["content-range"]
            await ProblemResponse(problem, scope)(scope, receive, send)


class _BadRange(Exception):  # noqa: N818
    def __init__(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        super().__init__(status)
        self.status = status
        self.headers = Headers(raw=headers)


def matches(header: str | None, etag: str) -> bool:
    """Whether an If-None-Match header names `etag`."""
    if header is None:
        return False
    candidates = [part.strip().removeprefix("W/") for part in header.split(",")]
    return "*" in candidates or etag in candidates


@router.get("/drafter/latest", response_model=Manifest, responses={304: {"description": "Still the same."}})
async def get_latest(
    request: Request,
    context: Context,
    run: RunQuery = "default",
    wait: Annotated[float, Query(ge=0, description="Seconds to wait for another drafter than If-None-Match.")] = 0.0,
    nonce: Annotated[
        str | None, Query(pattern=NONCE_PATTERN, description="Ask for a signature over this and the body.")
    ] = None,
) -> Response:
    """Read the manifest of the drafter to serve. With `If-None-Match` and `wait` it is a long poll.

    With `nonce` the answer is signed where the service has a key, and never 304: that could be an old one sent again.
    """
    context.run(run)
    known = request.headers.get("if-none-match")
    deadline = time.monotonic() + min(wait, context.settings.long_poll_max_seconds)
    seen = _pointer_state(context, run)  # read before the manifest, so that a move in between is noticed
    manifest = context.registry.latest(run)
    while (manifest is None or matches(known, manifest.etag)) and time.monotonic() < deadline:
        if context.stopping.is_set() or await request.is_disconnected():
            break
        await asyncio.sleep(_POLL_SECONDS)
        now = _pointer_state(context, run)
        if now != seen:
            seen, manifest = now, context.registry.latest(run)
    if manifest is None:
        raise Problem(404, "no-drafter-yet", f"run {run!r} has published no drafter yet; poll again, `wait` helps")
    headers = {"ETag": manifest.etag, "Cache-Control": "no-cache"}
    if nonce is None and matches(known, manifest.etag):
        return Response(status_code=304, headers=headers)
    body = manifest.model_dump_json().encode()
    if nonce is not None and context.signer is not None:
        headers[SIGNATURE_HEADER] = context.signer.sign(nonce, body)
    return Response(body, media_type="application/json", headers=headers)


def _pointer_state(context: ServiceContext, run: str) -> tuple[int, int] | None:
    """Changes whenever `latest` moves. One stat of a small file: too short to need a thread."""
    try:
        status = os.stat(context.layout.latest(run))  # noqa: PTH116
    except FileNotFoundError:
        return None
    return status.st_ino, status.st_mtime_ns


@router.get("/drafter/{version}/{file}", response_class=CheckpointResponse)
async def get_file(request: Request, context: Context, version: str, file: str, run: RunQuery = "default") -> Response:
    """Download one immutable file of a version. Range requests resume; the ETag is the content's digest."""
    context.run(run)
    path = context.registry.path(run, version, file)
    manifest = context.registry.get(run, version)
    sha256 = next((f.sha256 for f in manifest.files if f.name == file), None)
    etag = f'"{sha256}"' if file != MANIFEST else f'"{manifest.digest}"'
    headers = {"ETag": etag, "Cache-Control": "private, max-age=31536000, immutable"}
    if sha256 is not None:
        headers["Repr-Digest"] = f"sha-256=:{base64.b64encode(bytes.fromhex(sha256)).decode()}:"
    if matches(request.headers.get("if-none-match"), etag):
        return Response(status_code=304, headers=headers)
    return CheckpointResponse(path, media_type="application/octet-stream", headers=headers)


@router.get("/drafters")
async def get_drafters(context: Context, run: RunQuery = "default") -> dict[str, Any]:
    """List the versions that can be served, and the history with every verdict."""
    context.run(run)

    def read() -> dict[str, Any]:
        registry = context.registry
        latest = registry.latest(run)
        return {
            "run": run,
            "latest": None if latest is None else latest.model_dump(),
            "versions": [registry.get(run, version).model_dump() for version in registry.versions(run)],
            "history": registry.history(run),
        }

    return await asyncio.to_thread(read)


class RollbackRequest(BaseModel):
    """Body of a rollback."""

    model_config = ConfigDict(extra="forbid")
    reason: str = Field(min_length=1, max_length=400)


@router.post("/drafter/{version}/rollback", response_model=Manifest, openapi_extra=json_body(RollbackRequest))
async def post_rollback(request: Request, context: Context, version: str, run: RunQuery = "default") -> Manifest:
    """Serve an older version again, under a new sequence number. Body: `{"reason": "..."}`."""
    context.run(run)
    body = await parse_body(request, RollbackRequest)
    return await context.locking(context.registry.rollback, run, version, body.reason)
