"""`POST /rollouts/direct`: a rollout file that goes by the object store of `rollouts_url`, past this process.

The sender calls with the file's safetensors header, its length and its SHA-256. It is refused as by `POST /rollouts`,
before any tensor is sent, or it is told where to put the file. When the file is there, it calls again: the header and
the integer tensors are read back from the store and checked, and the batch is queued. Nothing is kept between the two
calls: any replica may answer either, and both may be repeated.
"""

from __future__ import annotations

import asyncio
from typing import Annotated, Final

from fastapi import APIRouter, Query, Request, Response
from pydantic import BaseModel

from rl_hooks.wire import MAX_HEADER_BYTES, RolloutHeader, WireError, parse_header
from service.api.auth import Caller
from service.api.context.context import Context
from service.api.problems import Problem
from service.api.rollouts.batches import (
    Receipt,
    add_entry,
    batch_of,
    check_header,
    check_index_bytes,
    check_queue,
    check_run,
    index_stretches,
    receipt,
)
from service.api.runs import check_room
from service.api.uploads import FILE_BODY, check_announcement, check_length, read_body
from service.errors import ObjectStoreError
from service.storage.layout import BLOB_NAME
from service.storage.queue.incoming import Incoming, new_name
from service.storage.queue.keys import LOST
from service.storage.runs import check_open

router = APIRouter(tags=["rollouts"])
#: A request waits for the store no longer than this.
_STORE_SECONDS: Final = 10.0


class Place(BaseModel):
    """Where to put the file, with exactly these headers. After that call again, with this `upload`."""

    upload: str
    url: str
    headers: dict[str, str]


@router.post(
    "/rollouts/direct",
    status_code=202,
    response_model=None,
    openapi_extra=FILE_BODY,
    responses={
        200: {"model": Receipt, "description": "A duplicate: it is counted once."},
        201: {"model": Place, "description": "The store has no such file: put it there, and ask again."},
        202: {"model": Receipt, "description": "The file was there, and is queued."},
        404: {"description": "`no-direct-uploads`: use `POST /rollouts`."},
        409: {"description": "The run takes no more rollouts: it is draining or archived. Do not send it again."},
        429: {"description": "The queue is full."},
    },
)
async def post_direct(
    request: Request,
    context: Context,
    caller: Caller,
    run: Annotated[str, Query(description="The file's run.")],
    length: Annotated[int, Query(alias="bytes", ge=8, le=1 << 50, description="Length of the whole file.")],
    sha256: Annotated[str, Query(pattern=r"^[0-9a-f]{64}$", description="Of the whole file.")],
    upload: Annotated[str | None, Query(description="As an earlier answer named it, once the file is there.")] = None,
) -> Response:
    """Queue a rollout file that is put into the object store. The body is the file's header alone."""
    incoming = context.disk.incoming
    if incoming is None:
        raise Problem(404, "no-direct-uploads", "no DRAFTALIGN_ROLLOUTS_URL is set here; send it to POST /rollouts")
    prefix_bytes = check_announcement(request, MAX_HEADER_BYTES)
    check_length(length, context.settings.max_body_bytes)
    check_room(context, length, run)
    record = context.run(run)
    check_open(context.layout, run, for_rollouts=True)
    room = await check_queue(context, run, length)
    prefix = await read_body(request, prefix_bytes)
    file = parse_header(prefix)
    if (file.header_bytes, file.file_bytes) != (len(prefix), length):
        found = f"a header of {file.header_bytes} and a file of {file.file_bytes} bytes"
        raise WireError("header", f"describes {found}; the request has {len(prefix)}, and says {length}")
    header = check_header(context, caller, file, run)
    check_run(record, header)
    _check_name(upload, header.batch_id, sha256)
    first = await context.redis.soon(context.of(run).queue.batch(header.batch_id))
    if first is None or (first["state"] == "dead" and first.get("code") in LOST):
        try:
            async with asyncio.timeout(_STORE_SECONDS):
                facts = record.vocab_size, context.settings.max_rollout_tokens
                if upload is None or not await _lies_there(incoming, upload, prefix, header, *facts):
                    name = new_name(header.batch_id, sha256, context.disk.spool.now_ns())
                    place = await asyncio.to_thread(incoming.place, run, name, length)
                    told = Place(upload=name, url=place.url, headers=place.headers)
                    return Response(told.model_dump_json(), 201, media_type="application/json")
                blob = upload
        except TimeoutError as error:
            raise ObjectStoreError(f"the object store did not answer within {_STORE_SECONDS:.0f} s") from error
    else:  # a duplicate. If its file is found lost just now, it may be accepted: never with a file that nobody put
        blob = f"{header.batch_id}.{'0' * 32}.{sha256}.safetensors"
        await context.redis.soon(context.of(run).queue.disown(header.batch_id, blob))
    return receipt(context, header, record, await add_entry(context, header, batch_of(header, blob), room))


def _check_name(upload: str | None, batch_id: str, sha256: str) -> None:
    if upload is None:
        return
    if not BLOB_NAME.fullmatch(upload) or upload.split(".")[::2] != [batch_id, sha256]:
        raise Problem(422, "bad-upload", f"{upload[:80]!r} is no upload of this file; ask without it", field="upload")


async def _lies_there(
    incoming: Incoming, upload: str, prefix: bytes, header: RolloutHeader, vocab_size: int, longest: int
) -> bool:
    """Whether the store has the file, of this length; raises WireError where it is not what the header says."""
    stretches = index_stretches(header)
    ranges = [(0, len(prefix)), *stretches.values()]
    found = await incoming.read(header.run, upload, header.header.file_bytes, ranges)
    if found is None:
        return False
    if found[0] != prefix:
        raise WireError("header", "of the file in the object store is another than the one that was sent")
    await check_index_bytes(header, dict(zip(stretches, found[1:], strict=True)), vocab_size, longest)
    return True
