"""`/runs/{run}/dead`: the batches of a run that ended by a fault are listed, downloaded, put back and discarded."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Mapping
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response

from rl_hooks.wire import CONTENT_TYPE
from service.api.context.answers import DeadPage, PutBack
from service.api.context.audited import audit
from service.api.context.context import Context, ServiceContext
from service.api.drafters import CheckpointResponse
from service.api.problems import Problem
from service.api.rollouts.batches import queue_full
from service.storage.layout import BATCH_ID
from service.storage.queue.dead import DeadBatch, DeadLetter
from service.storage.runs import check_open

log = logging.getLogger("draftalign.api")
router = APIRouter(tags=["rollouts"])


@router.get("/runs/{run}/dead")
async def get_dead(
    run: str,
    context: Context,
    count: Annotated[int, Query(ge=1, le=100, description="Most batches of one answer.")] = 50,
    before: Annotated[
        str | None, Query(pattern=r"^[1-9][0-9]{0,17}-[0-9]{1,18}$", description="`older` of the page before.")
    ] = None,
) -> DeadPage:
    """List the dead batches, newest first: why, when, and whether the file is kept (`has_file`), to be put back."""
    context.run(run)
    await context.redis.check()
    letters = context.dead(run)
    found = await letters.page(count, before)

    def told(one: DeadLetter) -> DeadBatch:
        there = one.has_file and (context.kept is not None or context.disk.spool.path(run, one.blob).exists())
        return one.model_copy(update={"has_file": there})

    return DeadPage(
        run=run,
        total=await letters.total(),
        file_bytes=await context.of(run).queue.dead_file_bytes(),
        dead=[told(one) for one in found],
        older=found[-1].letter_id if len(found) == count else None,
    )


@router.get(
    "/runs/{run}/dead/{batch_id}/file",
    response_class=CheckpointResponse,
    responses={409: {"description": "The batch is not dead."}, 410: {"description": "The file is not kept any more."}},
)
async def get_dead_file(run: str, batch_id: str, context: Context) -> CheckpointResponse:
    """Download the rollout file of a dead batch, as it came."""
    batch = await _batch(context, run, batch_id)
    if batch["state"] != "dead":
        raise _not_dead(run, batch_id, batch["state"])
    path = context.disk.spool.path(run, batch["blob"])
    if context.kept is not None and not path.exists():
        await asyncio.to_thread(_bring, context, run, batch)
    try:
        found = path.stat()
    except FileNotFoundError:
        raise _gone(run, batch_id) from None
    return CheckpointResponse(path, media_type=CONTENT_TYPE, filename=f"{batch_id}.safetensors", stat_result=found)


@router.post(
    "/runs/{run}/dead/{batch_id}/retry",
    status_code=202,
    responses={
        200: {"description": "It is not dead any more; `state` says what it is."},
        410: {"description": "The file is not kept any more."},
        429: {"description": "The queue is full."},
    },
)
async def retry_dead(
    run: str,
    batch_id: str,
    request: Request,
    response: Response,
    context: Context,
) -> PutBack:
    """Put a dead batch back into the queue. Rollouts that came again are left out."""
    audit(request, "put back", batch_id=batch_id)
    settings, batch = context.settings, await _batch(context, run, batch_id)
    check_open(context.layout, run, for_rollouts=True)
    if batch["state"] == "dead":
        there = context.disk.spool.path(run, batch["blob"]).exists()
        if context.kept is not None:
            there = await asyncio.to_thread(context.kept.holds, run, batch["blob"])
        if not there:
            raise _gone(run, batch_id)
    queue, size = context.of(run).queue, int(batch["bytes"])
    held, dead = (await queue.depth()).bytes + size, await queue.dead_file_bytes() - size  # the disk has its file
    limit_bytes = context.disk.queue_limit_bytes(held, run, max(dead, 0))
    outcome = await context.dead(run).put_back(
        batch_id, batch, max_items=settings.queue_max_items, max_bytes=limit_bytes
    )
    if outcome.outcome == "full":
        raise queue_full(context, run, outcome.held, size, limit_bytes)
    if outcome.outcome in ("gone", "disowned"):
        raise _gone(run, batch_id)
    if outcome.outcome == "accepted":
        log.warning("%s: batch %s is put back into the queue; it was dead: %s", run, batch_id, batch["reason"])
    else:
        response.status_code = 200
        if batch["state"] == "dead" and outcome.state == "skipped":
            context.disk.spool.delete(run, batch["blob"])
    put_back = outcome.outcome == "accepted"
    facts = {"run": run, "batch_id": batch_id, "state": outcome.state, "known_rollouts": outcome.known}
    return PutBack.model_validate(facts | {"put_back": put_back})


@router.delete(
    "/runs/{run}/dead/{batch_id}", status_code=204, responses={409: {"description": "The batch is not dead."}}
)
async def discard_dead(run: str, batch_id: str, request: Request, context: Context) -> None:
    """Take a dead batch from the list and delete its file. It stays dead, and a duplicate when it is sent again."""
    audit(request, "discard", batch_id=batch_id)
    batch = await _batch(context, run, batch_id)
    state, blob = await context.dead(run).discard(batch_id)
    if state != "dead":
        raise _not_dead(run, batch_id, state or "unknown")
    if blob is not None:
        context.disk.spool.delete(run, blob)
        log.warning("%s: dead batch %s is discarded; it died of: %s", run, batch_id, batch["reason"])


async def _batch(context: ServiceContext, run: str, batch_id: str) -> dict[str, str]:
    context.run(run)
    await context.redis.check()
    found = await context.of(run).queue.batch(batch_id) if BATCH_ID.fullmatch(batch_id) else None
    if found is None:
        raise Problem(404, "no-such-batch", f"run {run!r} knows no batch {batch_id[:80]!r} (any more)")
    return found


def _bring(context: ServiceContext, run: str, batch: Mapping[str, str]) -> None:
    """Bring a kept file to this host."""
    least, size = context.settings.spool_min_free_bytes, int(batch["bytes"])
    if context.kept is not None:
        with contextlib.suppress(FileNotFoundError):
            context.kept.bring(run, batch["blob"], size, context.disk.spool, least_free_bytes=least, sync=False)


def _gone(run: str, batch_id: str) -> Problem:
    return Problem(
        410,
        "file-gone",
        f"the file of batch {batch_id} of run {run!r} is not kept any more (dead_letter_seconds, dead_letter_bytes)",
    )


def _not_dead(run: str, batch_id: str, state: str) -> Problem:
    return Problem(409, "not-dead", f"batch {batch_id} of run {run!r} is not dead, it is {state}")
