"""Every error of the API as an RFC 9457 problem document.

    {"type": "urn:draftalign:queue-full", "title": "Too Many Requests", "status": 429,
     "detail": "the queue of run 'default' is full: 10000 of 10000 batches ...", "instance": "/rollouts"}

`field` names the tensor, metadata key or parameter at fault, where one is.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, Final

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from redis import exceptions as redis_errors
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse
from starlette.routing import Match
from starlette.types import Receive, Scope, Send

from rl_hooks.wire import WireError
from service.errors import (
    EndedLife,
    LatestHeld,
    ObjectStoreError,
    RegistryBusy,
    RegistryError,
    RunClosed,
    RunConflict,
    RunDamaged,
    RunNotFound,
    RunWithdrawn,
    TooManyReporters,
    VersionNotFound,
)
from service.storage.ready import is_of_one_key, why_unusable

log = logging.getLogger("draftalign.api")
#: Retry-After of a 429 or 503 that names no time: a trainer that waits for room, or for Redis, asks again this soon.
RETRY_AFTER_SECONDS: Final = 2
#: End of a refusal of what comes from a session that a later attempt of the trainer has followed.
FOLLOWED: Final = (
    "of this trainer are not used any more: another one, or a later start of it, has begun at an earlier policy "
    "version of the run since. If both are to go on, give each a run name of its own (the hook's run=); if they are "
    "ranks of one trainer, tell each hook its rank and world_size"
)

MEDIA_TYPE: Final = "application/problem+json"
#: What every route may answer besides its own, for the OpenAPI document.
RESPONSES: Final[dict[int | str, dict[str, Any]]] = {
    status: {
        "description": f"{text}: a problem document (RFC 9457) says why.",
        "content": {
            MEDIA_TYPE: {
                "schema": {
                    "type": "object",
                    "required": ["type", "title", "status", "detail", "instance"],
                    "properties": {"status": {"type": "integer"}}
                    | {name: {"type": "string"} for name in ("type", "title", "detail", "instance", "field")},
                }
            }
        },
    }
    for status, text in (("4XX", "Refused"), ("5XX", "Failed"))
}
#: Scope key: "reading" once the request's body was asked for, "read" once all of it came.
BODY_STATE: Final = "draftalign.body"
#: Scope key, true once a request was refused: its connection is closed first when connections run out.
REFUSED: Final = "draftalign.refused"
#: Errors of the machine, not of a request.
_DISK: Final = {
    errno.EMFILE,
    errno.ENFILE,
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EIO,
    errno.EROFS,
    errno.EACCES,
    errno.EPERM,
    errno.ENOMEM,
    errno.ESTALE,  # of a shared file system: another host replaced or deleted the file meanwhile
}
_MORE_DESCRIPTORS: Final = "Where this comes again, raise the hard limit of the API's descriptors (`ulimit -Hn`)"
_METHODS: Final = ("DELETE", "GET", "HEAD", "PATCH", "POST", "PUT")
_LINGER_SECONDS: Final = 10.0
_LINGER_IDLE_SECONDS: Final = 1.0


class Problem(Exception):  # noqa: N818 - RFC 9457's word
    """An error to be answered with `status`. `kind` is the last part of the document's `type`."""

    def __init__(
        self, status: int, kind: str, detail: str, *, field: str | None = None, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(detail)
        self.status = status
        self.kind = kind
        self.detail = detail
        self.field = field
        self.headers = dict(headers or {})
        if status in (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE):
            self.headers.setdefault("Retry-After", str(RETRY_AFTER_SECONDS))


def in_units(size: float) -> str:
    """Bytes as a person reads them, and as the page shows them: `763 KiB`, `1.5 GiB`."""
    unit = 0
    while size >= 1024 and unit < 4:
        size, unit = size / 1024, unit + 1
    return f"{size:.{int(unit > 0 and size < 10)}f} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[unit]}"


class ProblemResponse(JSONResponse):
    """A problem document. If the body was not read to its end, the connection is closed, with a short delay.

    A server that closes while its client still sends makes the kernel reset the connection, and the client may never
    see the answer. So the answer goes out first, and for a short time all that the client still sends is discarded. A
    client that sent `Expect: 100-continue` and was not told to go on sends nothing, and is not waited for.
    """

    media_type = MEDIA_TYPE

    def __init__(self, problem: Problem, scope: Scope) -> None:
        content: dict[str, Any] = {
            "type": f"urn:draftalign:{problem.kind}",
            "title": HTTPStatus(problem.status).phrase,
            "status": problem.status,
            # A name in a file may hold half a surrogate pair, which is not UTF-8.
            "detail": problem.detail.encode("utf-8", "backslashreplace").decode(),
            "instance": scope["path"],
        }
        if problem.field is not None:
            content["field"] = problem.field.encode("utf-8", "backslashreplace").decode()
        headers = dict(problem.headers)
        self._unread = _has_body(scope) and scope.get(BODY_STATE) != "read"
        if self._unread:
            headers["Connection"] = "close"
        super().__init__(content, problem.status, headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer; then discard the rest of the body if the client still sends."""
        scope[REFUSED] = True
        waits_for_continue = _header(scope, b"expect") is not None and scope.get(BODY_STATE) is None
        if not self._unread or waits_for_continue:
            await super().__call__(scope, receive, send)
            return
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": bytes(self.body), "more_body": True})
        await _discard(receive)
        await send({"type": "http.response.body", "body": b""})


async def _discard(receive: Receive) -> None:
    """Discard the rest of the body, for at most `_LINGER_SECONDS`."""
    try:
        async with asyncio.timeout(_LINGER_SECONDS):
            while True:
                async with asyncio.timeout(_LINGER_IDLE_SECONDS):
                    message = await receive()
                if message["type"] != "http.request" or not message.get("more_body"):
                    return
    except TimeoutError:
        return


def _header(scope: Scope, name: bytes) -> bytes | None:
    return next((value for key, value in scope["headers"] if key == name), None)


def _has_body(scope: Scope) -> bool:
    return _header(scope, b"content-length") not in (None, b"0") or _header(scope, b"transfer-encoding") is not None


#: Errors of the service by what they are answered with, special kinds before general ones: status, kind, field.
_ANSWERS: Final[Mapping[type[Exception], tuple[int, str, str | None]]] = {
    RunNotFound: (404, "no-such-run", "run"),
    VersionNotFound: (404, "no-such-drafter", None),
    RunConflict: (409, "run-conflict", None),
    RunWithdrawn: (503, "run-being-deleted", None),
    RunClosed: (409, "run-closed", None),
    RunDamaged: (500, "run-damaged", None),
    TooManyReporters: (429, "too-many-reporters", "reporter"),
    EndedLife: (409, "ended-life", "life"),
    RegistryBusy: (503, "registry-busy", None),
    LatestHeld: (409, "drafter-held", None),
    ObjectStoreError: (503, "object-store-away", None),
    RegistryError: (409, "registry", None),
}


def as_problem(error: Exception) -> Problem:
    """Translate an exception of a handler or library."""
    for its_class, (status, name, field) in _ANSWERS.items():
        if isinstance(error, its_class):
            return Problem(status, name, str(error), field=field)
    match error:
        case Problem():
            return error
        case WireError():
            return Problem(422, "bad-file", str(error), field=error.field)
        case redis_errors.OutOfMemoryError():
            return Problem(503, "redis-full", "Redis is out of memory; nothing was queued")
        case redis_errors.RedisError() if (reason := why_unusable(error)) is not None:
            return Problem(503, "redis-unusable", f"nothing was queued: Redis {reason}")
        case redis_errors.ResponseError() if is_of_one_key(error):
            what = "a key of the run in Redis holds what the service did not write"
            return Problem(500, "run-damaged", f"{what}; its log has the command. Delete that key, or the run")
        case redis_errors.MaxConnectionsError():
            what = "all connections to Redis that this process may open are in use; nothing was queued"
            return Problem(503, "redis-away", f"{what}. {_MORE_DESCRIPTORS}")
        case redis_errors.ConnectionError() | redis_errors.TimeoutError():  # loading its data counts as away
            return Problem(503, "redis-away", "Redis does not answer; nothing was queued")
        case RequestValidationError():
            first = error.errors()[0]
            field = ".".join(str(part) for part in first["loc"][1:]) or None
            return Problem(422, "bad-parameter", f"{field}: {first['msg']}", field=field)
        case HTTPException():
            kind = HTTPStatus(error.status_code).phrase.lower().replace(" ", "-")
            return Problem(error.status_code, kind, str(error.detail), headers=error.headers)
        case OSError() if error.errno in _DISK:
            what = f"the service cannot use its files: {os.strerror(error.errno)}"
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                what += "; make room on the state directory's disk: bytes, or files where `df -i` shows none free"
            elif error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
                what += "; see how the state directory is mounted, and who owns what is in it"
            elif error.errno == errno.EMFILE:
                what += f". {_MORE_DESCRIPTORS}"
            return Problem(503, "disk", what)
        case ClientDisconnect():
            return Problem(400, "client-left", "the client left before the end of the body; nothing was kept")
        case _:
            return Problem(500, "bug", "the service failed; its log has the cause. The request may be repeated")


def install(app: FastAPI) -> None:
    """Answer every error of `app` with a problem document."""

    async def handle(request: Request, error: Exception) -> ProblemResponse:
        problem = as_problem(error)
        if problem.status == HTTPStatus.METHOD_NOT_ALLOWED:  # Starlette names the methods of the first route only
            asked = [{**request.scope, "method": method} for method in _METHODS]
            taken = [one["method"] for one in asked if any(r.matches(one)[0] is Match.FULL for r in app.routes)]
            problem.headers["Allow"] = ", ".join(taken)
        if problem.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            kind = problem.kind if isinstance(error, Problem) else type(error).__name__
            log.warning("%s %s: %s: %s", request.method, request.url.path, kind, error)
        elif isinstance(error, ClientDisconnect):
            log.debug("%s %s: %s", request.method, request.url.path, problem.detail)
        return ProblemResponse(problem, request.scope)

    async def handle_os(request: Request, error: Exception) -> ProblemResponse:
        if not (isinstance(error, OSError) and error.errno in _DISK):
            raise error  # it is a bug, as any other unforeseen exception
        return await handle(request, error)

    app.add_exception_handler(OSError, handle_os)
    for kind in (
        Problem,
        WireError,
        *_ANSWERS,
        redis_errors.OutOfMemoryError,
        redis_errors.ResponseError,
        redis_errors.ConnectionError,
        redis_errors.TimeoutError,
        RequestValidationError,
        HTTPException,
        ClientDisconnect,
        Exception,
    ):
        app.add_exception_handler(kind, handle)
