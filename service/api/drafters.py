"""`GET /drafter/latest`, `GET /drafter/{version}/{file}`, `GET`, `POST /drafters`; rollback, hold, release."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import logging
from typing import Annotated, Any, Final, TypeVar

from fastapi import APIRouter, Query, Request, Response
from pydantic import BaseModel, ConfigDict, Field
from pydantic_core import to_json, to_jsonable_python
from starlette.datastructures import Headers
from starlette.responses import FileResponse
from starlette.types import Message, Receive, Scope, Send

from rl_hooks.format.release import NONCE_PATTERN, SIGNATURE_HEADER
from rl_hooks.wire import Header
from service.api.context.answers import DrafterList
from service.api.context.audited import audit
from service.api.context.context import Context, NamedRun, RunQuery, ServiceContext
from service.api.problems import Problem, ProblemResponse
from service.api.runs import check_room
from service.api.uploads import FILE_BODY, check_announcement, json_body, parse_body, receive_file
from service.errors import ObjectStoreError, RunDamaged
from service.reading.pointer import Latest, Pointer
from service.storage.admission.sent import admit, read_sent_header
from service.storage.drafters.versions import MANIFEST, Manifest
from service.storage.runs import check_open

log = logging.getLogger("draftalign.api")

router = APIRouter(tags=["drafters"])

#: How long a download waits for the object store before this process sends the bytes.
_STORE_SECONDS: Final = 3.0


class CheckpointResponse(FileResponse):
    """A file in pieces of 1 MiB: a third of the processor time that the default 64 KiB takes."""

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


def tagged(request: Request, body: bytes, media_type: str = "application/json") -> Response:
    """Answer with `body` and its digest as ETag, or with 304 where the client has it already."""
    etag = f'"{hashlib.blake2b(body, digest_size=16).hexdigest()}"'
    headers = {"ETag": etag, "Cache-Control": "no-cache"}
    if matches(request.headers.get("if-none-match"), etag):
        return Response(status_code=304, headers=headers)
    return Response(body, media_type=media_type, headers=headers)


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
    pointer = context.of(run).pointer
    served = pointer.served()
    if served is None or not matches(known, served.etag):
        await context.looks.catch_up(run)  # another replica may have told the agent of a later one
        served = pointer.served()
    if wait > 0 and (served is None or matches(known, served.etag)):
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(min(wait, context.settings.long_poll_max_seconds)):
                served = await _another(request, context, pointer, known)
    if served is None:
        raise Problem(404, "no-drafter-yet", f"run {run!r} has published no drafter yet")
    headers = {"ETag": served.etag, "Cache-Control": "no-cache"}
    if nonce is None and matches(known, served.etag):
        return Response(status_code=304, headers=headers)
    if nonce is not None and context.access.signer is not None:
        headers[SIGNATURE_HEADER] = context.access.signer.sign(nonce, served.body)
    return Response(served.body, media_type="application/json", headers=headers)


async def _another(request: Request, context: ServiceContext, pointer: Pointer, known: str | None) -> Latest | None:
    """Wait until another drafter than `known` is served, the client is gone, or the server is asked to stop."""
    gone = asyncio.create_task(_gone(request))
    try:
        while ((served := pointer.served()) is None or matches(known, served.etag)) and not (
            gone.done() or context.lifetime.stopping.is_set()
        ):
            moves = asyncio.ensure_future(pointer.moves(served))
            try:
                await asyncio.wait((gone, moves), return_when=asyncio.FIRST_COMPLETED)
            finally:
                moves.cancel()
            if moves.done() and not moves.cancelled():
                moves.result()
    finally:
        gone.cancel()
    return served


async def _gone(request: Request) -> None:
    """Wait until the client has closed the connection."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


@router.get(
    "/drafter/{version}/{file}",
    response_class=CheckpointResponse,
    responses={
        206: {"description": "The bytes that Range names."},
        304: {"description": "Still the same."},
        307: {"description": "Fetch it there, without the token."},
    },
)
async def get_file(
    request: Request,
    context: Context,
    version: str,
    file: str,
    run: RunQuery = "default",
    direct: Annotated[bool, Query(description="Answer with the bytes, and never with 307.")] = False,
) -> Response:
    """Download one immutable file of a version. Range requests resume; the ETag is the content's digest.

    With `drafters_url` the answer is 307 to a URL of the object store, if that has the file and can sign.
    """
    context.run(run)
    await context.looks.find(run, version)
    path = context.registry.path(run, version, file)
    manifest = context.registry.get(run, version)
    sha256 = next((f.sha256 for f in manifest.files if f.name == file), None)
    etag = f'"{sha256}"' if file != MANIFEST else f'"{manifest.digest}"'
    headers = {"ETag": etag, "Cache-Control": "private, max-age=31536000, immutable"}
    if sha256 is not None:
        headers["Repr-Digest"] = f"sha-256=:{base64.b64encode(bytes.fromhex(sha256)).decode()}:"
    if matches(request.headers.get("if-none-match"), etag):
        return Response(status_code=304, headers=headers)
    if not direct and sha256 is not None and (url := await _object_url(context, run, manifest, file)) is not None:
        return Response(status_code=307, headers={"Location": url, "Cache-Control": "no-store"})
    try:
        found = path.stat()
    except FileNotFoundError as error:
        context.registry.get(run, version)  # raises where it was pruned just now
        raise RunDamaged(run, path, error) from error
    return CheckpointResponse(path, media_type="application/octet-stream", headers=headers, stat_result=found)


async def _object_url(context: ServiceContext, run: str, manifest: Manifest, name: str) -> str | None:
    """Where the object store has one file; None without a store, or where it does not answer within seconds."""
    objects = context.registry.objects
    if objects is None:
        return None
    size = next(file.bytes for file in manifest.files if file.name == name)

    async def ask() -> str | None:
        try:
            async with asyncio.timeout(_STORE_SECONDS):
                return await objects.url(run, manifest.digest, name, size)
        except (ObjectStoreError, TimeoutError) as error:
            why = str(error) or "the object store does not answer"
            log.warning("%s of %s is sent by this API: %s", name, manifest.version, why)
            return None

    return await context.answers.get(("object", run, manifest.digest, name), ask)


@router.get("/drafters", responses={200: {"model": DrafterList}, 304: {"description": "Still the same."}})
async def get_drafters(request: Request, context: Context, run: RunQuery = "default") -> Response:
    """List the versions that can be served, and the history with every verdict."""
    context.run(run)

    def read() -> bytes:
        registry = context.registry
        latest, (manifests, damaged) = registry.latest(run), registry.manifests(run)
        facts = {
            "run": run,
            "latest": latest,
            "held": to_jsonable_python(registry.held(run)),
            "waiting": list(registry.history.sent(run)),
            "versions": manifests,
            "damaged": damaged,
        }
        history = b",".join(event.text for event in registry.history.events(run))
        return to_json(facts, inf_nan_mode="null")[:-1] + b',"history":[' + history + b"]}"

    return tagged(request, await context.answers.get(("drafters", run), lambda: asyncio.to_thread(read)))


@router.post(
    "/drafters",
    status_code=201,
    response_model=Manifest,
    openapi_extra=FILE_BODY,
    responses={
        200: {"description": "These very files are a version already; they wait for the gate (again)."},
        409: {"description": "Another lineage's drafter, too many that wait, none served yet, or an archived run."},
    },
)
async def post_drafter(
    request: Request,
    response: Response,
    context: Context,
    run: NamedRun,
    reason: Annotated[str, Query(min_length=1, max_length=400, description="Why it is sent.")] = "trained elsewhere",
    by: Annotated[str | None, Query(min_length=1, max_length=80, description="Who sends it.")] = None,
) -> Manifest:
    """Send a drafter that was trained elsewhere. The gate judges it on fresh rollouts; GET /drafters tells the outcome.

    The body is a safetensors file of its tensors; `format` and `drafter_config` stand in the metadata.
    """
    audit(request, "send a drafter", reason=reason)
    context.run(run)
    check_open(context.layout, run)
    length = check_announcement(request, context.settings.max_run_bytes)

    async def on_header(header: Header) -> None:
        read_sent_header(context.layout, run, header)

    check_room(context, 2 * length, run)  # the upload, and the version that is made of it
    with context.disk.spool.reserve(2 * length, run), context.disk.spool.upload() as upload:
        await receive_file(request, upload, length, context.settings, on_header)
        manifest, new = await context.locking(admit, context.layout, run, upload.path, reason, by)
    audit(request, "send a drafter", version=manifest.version, reason=reason)
    response.status_code = 201 if new else 200
    return manifest


class ChoiceRequest(BaseModel):
    """Body of a hold."""

    model_config = ConfigDict(extra="forbid")
    reason: str = Field(min_length=1, max_length=400)
    by: str | None = Field(None, min_length=1, max_length=80, description="Who wants it, for people to read.")


class RollbackRequest(ChoiceRequest):
    """Body of a rollback."""

    override_canary: bool = Field(
        False, strict=True, description="Whether engines whose canary has rejected the version load it all the same."
    )


_Choice = TypeVar("_Choice", bound=ChoiceRequest)


async def _choice(
    request: Request, context: ServiceContext, run: str, action: str, version: str, kind: type[_Choice]
) -> _Choice:
    audit(request, action, version=version)
    context.run(run)
    await context.looks.find(run, version)
    check_open(context.layout, run)
    body = await parse_body(request, kind)
    audit(request, action, version=version, reason=body.reason)
    return body


_HELD: Final[dict[int | str, dict[str, Any]]] = {
    409: {"description": "A person holds another version, or this one's files no longer match their digests."}
}


@router.post(
    "/drafter/{version}/rollback", response_model=Manifest, responses=_HELD, openapi_extra=json_body(RollbackRequest)
)
async def post_rollback(request: Request, context: Context, version: str, run: NamedRun) -> Manifest:
    """Serve an older version again, until the gate finds a better one. Body: `{"reason": "...", "by": "..."}`.

    Where it is served already, engines load it again. The same body again, while nothing else has moved, changes
    nothing and is answered alike, so a call without an answer may be repeated. With `override_canary` engines whose
    canary has rejected the version load it, too.
    """
    body = await _choice(request, context, run, "rollback", version, RollbackRequest)
    manifest = await context.locking(
        context.registry.rollback, run, version, body.reason, by=body.by, override_canary=body.override_canary
    )
    over = ", over its engines' canaries" if body.override_canary else ""
    log.warning("run %s serves %s again%s, by %r: %r", run, version, over, body.by or "a person", body.reason)
    return manifest


@router.put("/drafter/{version}/hold", response_model=Manifest, responses=_HELD, openapi_extra=json_body(ChoiceRequest))
async def put_hold(request: Request, context: Context, version: str, run: NamedRun) -> Manifest:
    """Serve a version and keep it served until it is released. Body: `{"reason": "...", "by": "..."}`.

    Rollouts are scored and trained on meanwhile; the gate looks at none of them, and nothing is published.
    """
    body = await _choice(request, context, run, "hold", version, ChoiceRequest)
    manifest = await context.locking(context.registry.hold, run, version, body.reason, body.by)
    log.warning("run %s holds %s, by %r: %r", run, version, body.by or "a person", body.reason)
    return manifest


@router.delete(
    "/drafter/{version}/hold",
    status_code=204,
    responses={409: {"description": "Another version is held: nothing was released."}},
)
async def delete_hold(
    request: Request,
    context: Context,
    version: str,
    run: NamedRun,
    by: Annotated[str | None, Query(min_length=1, max_length=80, description="Who releases it.")] = None,
) -> None:
    """Release a held version: it is served until the gate finds a better one. Where none is held, nothing changes."""
    audit(request, "release", version=version)
    context.run(run)
    check_open(context.layout, run)
    if await context.locking(context.registry.release, run, version, by):
        log.warning("run %s: %s is released, by %r", run, version, by or "a person")
