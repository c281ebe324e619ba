"""`POST /rollouts` and `GET /rollouts/{id}`.

An upload is refused as early as possible: by the request's header fields (before a byte of the body is read), by the
safetensors header (before the features arrive), by the small integer tensors (at the end). The features are not read
here. A refused upload leaves nothing behind.
"""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request, Response
from pydantic import BaseModel

from rl_hooks.wire import (
    AUX_CONVENTION,
    Header,
    MappedFile,
    RolloutHeader,
    WireError,
    check_index,
    check_rollout_header,
)
from service.api.context import Context, RunQuery, ServiceContext
from service.api.problems import Problem
from service.api.runs import check_room
from service.api.uploads import FILE_BODY, check_announcement, receive_file
from service.errors import RunNotFound
from service.storage.layout import BATCH_ID
from service.storage.queue import Batch, Enqueued
from service.storage.runs import RunRecord
from service.storage.spool import Upload

log = logging.getLogger("draftalign.api")
router = APIRouter(tags=["rollouts"])


class Receipt(BaseModel):
    """Answer to an accepted upload. `state` is the batch's state now; a duplicate's batch may have ended already.

    `dead_total` and `last_dead_reason` count all the run's batches so far: a batch can die only after its own answer.
    """

    batch_id: str
    duplicate: bool
    run: str
    state: Literal["queued", "trained", "held_out", "skipped", "dead"] = "queued"
    dead_total: int = 0
    last_dead_reason: str = ""


@router.post(
    "/rollouts",
    status_code=202,
    openapi_extra=FILE_BODY,
    responses={200: {"description": "A duplicate: it is counted once."}, 429: {"description": "The queue is full."}},
)
async def post_rollouts(
    request: Request,
    response: Response,
    context: Context,
    run: Annotated[
        str | None, Query(description="The file's run; naming it here lets a full queue refuse early.")
    ] = None,
) -> Receipt:
    """Queue one rollout file. Send `Expect: 100-continue`, so that a refusal costs no transfer."""
    length = check_announcement(request, context.settings.max_body_bytes)
    await context.redis.ping()  # without Redis the body could not be queued
    check_room(context, length)
    if run is not None:
        context.run(run)
        await _check_queue(context, run, length)
    headers: list[RolloutHeader] = []

    async def on_header(header: Header) -> bool:
        rollouts = check_rollout_header(header)
        if run is not None and rollouts.run != run:
            raise WireError("run", f"the request names run {run!r}, the file {rollouts.run[:80]!r}")
        _check_run(context.run(rollouts.run), rollouts)
        if run is None:
            await _check_queue(context, rollouts.run, length)
        headers.append(rollouts)
        return True

    with context.spool.reserve(length), context.spool.upload() as upload:
        await receive_file(request, upload, length, context.settings, on_header)
        header = headers[0]
        await asyncio.to_thread(_check_index, upload, header, context.run(header.run).vocab_size)
        outcome = await _enqueue(context, upload, header, length)
    duplicate = outcome.outcome == "duplicate"
    response.status_code = 200 if duplicate else 202
    return Receipt.model_validate(
        {
            "batch_id": header.batch_id,
            "duplicate": duplicate,
            "run": header.run,
            "state": outcome.state,
            "dead_total": outcome.dead_total,
            "last_dead_reason": outcome.last_dead_reason,
        }
    )


async def _check_queue(context: ServiceContext, run: str, length: int) -> None:
    settings = context.settings
    if settings.overflow == "drop_oldest":
        return  # room is made when the entry is added
    items, size = await context.queue(run).depth()
    if items + 1 > settings.queue_max_items or size + length > settings.queue_max_bytes:
        await context.queue(run).count_rejected()
        raise _queue_full(context, run, f"{items} batches, {size} bytes")


def _queue_full(context: ServiceContext, run: str, held: str) -> Problem:
    settings = context.settings
    return Problem(
        429,
        "queue-full",
        f"the queue of run {run!r} holds {held}; the limits are {settings.queue_max_items} batches and "
        f"{settings.queue_max_bytes} bytes. Try again when the worker has caught up",
        headers={"Retry-After": str(settings.retry_after_seconds)},
    )


def _check_run(record: RunRecord, header: RolloutHeader) -> None:
    """The file must be of the target that the run was registered with."""
    if header.aux_layers != record.aux_layers:
        raise WireError(
            "aux_layers",
            f"run {record.run!r} captures {list(record.aux_layers)} ({AUX_CONVENTION}), got {list(header.aux_layers)}",
        )
    if header.hidden_size != record.hidden_size:
        raise WireError(
            "aux_hidden", f"hidden size of run {record.run!r} is {record.hidden_size}, got {header.hidden_size}"
        )
    if header.target_fingerprint != record.target_fingerprint:
        raise WireError(
            "target_fingerprint",
            f"run {record.run!r} is of target {record.target_fingerprint}, got {header.target_fingerprint[:80]!r}",
        )


def _check_index(upload: Upload, header: RolloutHeader, vocab_size: int) -> None:
    """Verify the integer tensors; no other tensor is read."""
    file = MappedFile(upload.path)
    arrays = (file.array(name) for name in ("input_ids", "cu_seqlens", "loss_mask"))
    input_ids, cu_seqlens, loss_mask = arrays
    check_index(header, input_ids, cu_seqlens, loss_mask, vocab_size)


async def _enqueue(context: ServiceContext, upload: Upload, header: RolloutHeader, length: int) -> Enqueued:
    """Move the file into the spool, then add its queue entry: an entry never names a missing file.

    If Redis fails in between, the entry may or may not exist, so the file stays. Without an entry the reaper deletes
    the file; with one, the client's next try is answered as a duplicate.
    """
    spool, settings, run = context.spool, context.settings, header.run
    blob = spool.new_blob(header.batch_id)
    if settings.spool_fsync:
        await asyncio.to_thread(upload.sync)
    upload.keep(spool.path(run, blob))
    try:
        context.run(run)
    except RunNotFound:  # it was deleted while this came
        spool.delete(run, blob)
        raise
    batch = Batch(
        batch_id=header.batch_id,
        blob=blob,
        bytes=length,
        tokens=header.tokens,
        rollouts=header.rollouts,
        policy_version=header.policy_version,
        policy_version_max=header.policy_version_max,
        rollout_ids=header.rollout_ids,
    )
    # Shielded: if the client hangs up now, the outcome must still be handled.
    return await asyncio.shield(_finish_enqueue(context, run, batch))


async def _finish_enqueue(context: ServiceContext, run: str, batch: Batch) -> Enqueued:
    settings, spool = context.settings, context.spool
    outcome = await context.queue(run).enqueue(
        batch, max_items=settings.queue_max_items, max_bytes=settings.queue_max_bytes, overflow=settings.overflow
    )
    for dropped in outcome.dropped:
        spool.delete(run, dropped)
    if outcome.outcome == "accepted" and run not in context.accepted_for:
        context.accepted_for.add(run)
        log.info("%s: first batch accepted since this process began: policy %d, %d rollouts, %d tokens",
                 run, batch.policy_version, batch.rollouts, batch.tokens)  # fmt: skip
    if outcome.outcome != "accepted" and not await _is_named(context, run, batch):
        spool.delete(run, batch.blob)
    if outcome.outcome == "disowned":
        raise Problem(
            503,
            "spool-swept",
            f"the file was not queued within {settings.orphan_age_seconds:.0f} s and was swept (was this process, or "
            "Redis, stopped?). Nothing was queued; send it again",
            headers={"Retry-After": str(settings.retry_after_seconds)},
        )
    if outcome.outcome == "full":
        raise _queue_full(context, run, outcome.state)
    return outcome


async def _is_named(context: ServiceContext, run: str, batch: Batch) -> bool:
    """Whether the batch's entry names this very file.

    It does after this sequence: Redis stored the entry, its answer was lost, and redis-py's retry found a duplicate.
    """
    known = await context.queue(run).batch(batch.batch_id)
    return known is not None and known["blob"] == batch.blob


@router.get("/rollouts/{rollout_id:path}")
async def get_rollout(rollout_id: str, context: Context, run: RunQuery = "default") -> dict[str, Any]:
    """Read the state of a batch, or of a rollout's batch; for a dead one, the reason too."""
    context.run(run)
    queue = context.queue(run)
    batch_id: str | None = rollout_id
    batch = await queue.batch(rollout_id) if BATCH_ID.fullmatch(rollout_id) else None
    if batch is None and 0 < len(rollout_id) <= 128 and rollout_id.isprintable():
        batch_id = await queue.batch_of(rollout_id)
        batch = None if batch_id is None else await queue.batch(batch_id)
    if batch is None:
        raise Problem(404, "no-such-rollout", f"run {run!r} knows no batch or rollout {rollout_id[:80]!r} (any more)")
    return {
        "run": run,
        "batch_id": batch_id,
        "state": batch["state"],
        "reason": batch["reason"],
        **{k: int(batch[k]) for k in ("policy_version", "policy_version_max", "rollouts", "tokens", "bytes")},
        "rollout_ids": json.loads(batch["rollout_ids"]),
    }
