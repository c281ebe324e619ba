"""Receives a safetensors file into the spool: refused as early as possible, never held in memory, never kept in part.

`check_announcement` checks the request's header fields (length, type) before a byte of the body is read. `receive_file`
checks the body, and passes the safetensors header to its caller as soon as it is complete.
"""

from __future__ import annotations

import asyncio
import functools
import json
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, Request

from rl_hooks.wire import CONTENT_TYPE, Header, WireError, header_size, parse_header
from service.api.context.disk import is_full
from service.api.port.body import TAKE_BODY, BodyTooSlowError
from service.api.problems import BODY_STATE, Problem
from service.settings import Settings
from service.storage.spool import Upload

Model = TypeVar("Model", bound=BaseModel)
#: What a route makes of a file's header.
Read = TypeVar("Read")
#: A body slower than this on average is refused: it only holds a connection.
_MIN_BYTES_PER_SECOND: Final = 4096
_MAX_JSON_BYTES: Final = 1 << 16
#: The body of a route that takes a file, in the OpenAPI document. Handlers read bodies themselves, within bounds.
FILE_BODY: Final[dict[str, Any]] = {
    "requestBody": {"required": True, "content": {CONTENT_TYPE: {"schema": {"type": "string", "format": "binary"}}}}
}


def json_body(model: type[BaseModel]) -> dict[str, Any]:
    """The body of a route that takes small JSON, in the OpenAPI document."""
    schema = model.model_json_schema()
    parts, text = schema.pop("$defs", {}), json.dumps(schema)
    for name, part in parts.items():  # "#/$defs" would mean the definitions of the whole document, which lack these
        text = text.replace(json.dumps({"$ref": f"#/$defs/{name}"}), json.dumps(part))
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": json.loads(text)}}}}


def check_announcement(request: Request, max_bytes: int) -> int:
    """Check length and type of the body before any of it is read; returns its length in bytes."""
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding != "identity":
        raise Problem(415, "content-encoding", f"send the file as it is, not {encoding[:40]!r}-encoded")
    _check_media_type(request, CONTENT_TYPE)
    text = request.headers.get("content-length")
    if text is None or "transfer-encoding" in request.headers:
        raise Problem(411, "length-required", "send Content-Length; a chunked body has no length to admit it by")
    if not (text.isascii() and text.isdigit() and len(text) <= 15):
        raise Problem(400, "bad-length", f"Content-Length must be a number of bytes, got {text[:40]!r}")
    return check_length(int(text), max_bytes)


def _check_media_type(request: Request, wanted: str) -> None:
    given = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if given != wanted:
        raise Problem(415, "content-type", f"expected {wanted}, got {given[:80]!r}", field="Content-Type")


def check_length(length: int, max_bytes: int) -> int:
    """Refuse a body, or a file, that is too large; returns its length."""
    if length > max_bytes:
        raise Problem(413, "too-large", f"it has {length} bytes, the limit is {max_bytes}; send smaller batches")
    return length


async def receive_file(
    request: Request, upload: Upload, length: int, settings: Settings, on_header: Callable[[Header], Awaitable[Read]]
) -> Read:
    """Write the body to `upload`; returns what `on_header` did, once exactly `length` bytes have come.

    `on_header` is awaited as soon as the header is complete: it raises to refuse the rest.
    """
    deadline = time.monotonic() + settings.body_idle_seconds + length / _MIN_BYTES_PER_SECOND
    prefix = bytearray()
    header: Header | None = None
    received = 0
    more = True
    while more:
        chunk, more = await _next_chunk(request, settings.body_idle_seconds, deadline)
        received += len(chunk)
        if received > length:
            raise WireError("file", f"Content-Length said {length} bytes, but more came")
        _write(upload, chunk)
        if header is None:
            prefix += chunk
            header = _complete_header(prefix, length)
            if header is not None:
                del prefix
                read = await on_header(header)
                if more and await _take_rest(request, upload, length - received, settings, deadline):
                    received, more = length, False
    if received != length:
        raise WireError("file", f"Content-Length said {length} bytes, {received} came")
    if header is None:
        raise WireError("header", f"the file ended after {received} bytes, inside its header")
    return read


async def _take_rest(request: Request, upload: Upload, left: int, settings: Settings, deadline: float) -> bool:
    """Take the rest of the body past the parser and ASGI, where the server can; returns whether it came so."""
    extension = request.scope.get("extensions", {}).get(TAKE_BODY)
    if extension is None:
        return False
    write, seconds = functools.partial(_write, upload), deadline - time.monotonic()
    try:
        await extension["take"](left, write, settings.body_idle_seconds, seconds)
    except BodyTooSlowError as error:
        raise _too_slow() from error
    request.scope[BODY_STATE] = "read"
    return True


def _too_slow() -> Problem:
    return Problem(408, "too-slow", "the body came too slowly; nothing was kept")


def _complete_header(prefix: bytearray, length: int) -> Header | None:
    """The header once `prefix` holds all of it, else None. WireError as soon as a size contradicts the length."""
    if len(prefix) < 8:
        return None
    size = header_size(bytes(prefix[:8]))
    if size > length:
        raise WireError("header", f"says it is {size} bytes long, the whole body has {length}")
    if len(prefix) < size:
        return None
    header = parse_header(bytes(prefix[:size]))
    if header.file_bytes != length:
        raise WireError("header", f"describes a file of {header.file_bytes} bytes, Content-Length says {length}")
    return header


async def _next_chunk(request: Request, idle_seconds: float, deadline: float) -> tuple[bytes, bool]:
    request.scope[BODY_STATE] = "reading"
    try:
        async with asyncio.timeout(min(idle_seconds, max(deadline - time.monotonic(), 0.0))):
            message = await request.receive()
    except TimeoutError as error:
        raise _too_slow() from error
    if message["type"] == "http.disconnect":
        raise ClientDisconnect
    more = bool(message.get("more_body", False))
    if not more:
        request.scope[BODY_STATE] = "read"
    return message.get("body", b""), more


def _write(upload: Upload, chunk: bytes | memoryview) -> None:
    try:
        upload.write(chunk)
    except OSError as error:
        if is_full(error):
            raise Problem(503, "spool-full", "the spool's disk is full", headers={"Retry-After": "10"}) from error
        raise


async def read_body(request: Request, most_bytes: int) -> bytes:
    """Read a body into memory, up to a limit; FastAPI's own reading has none."""
    body = bytearray()
    deadline = time.monotonic() + 30.0
    more = True
    while more:
        chunk, more = await _next_chunk(request, 10.0, deadline)
        body += chunk
        if len(body) > most_bytes:
            raise Problem(413, "too-large", f"the limit for this call is {most_bytes} bytes")
    return bytes(body)


async def parse_body(request: Request, model: type[Model]) -> Model:
    """Read and validate a small JSON body."""
    _check_media_type(request, "application/json")
    try:
        return model.model_validate_json(await read_body(request, _MAX_JSON_BYTES))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(str(part) for part in first["loc"]) or "body"
        raise Problem(422, "bad-body", f"{field}: {first['msg']}", field=field) from error
