"""`POST /rollouts` and `GET /rollouts/{id}`.

An upload is refused as early as possible: by the request's header fields (before a byte of the body is read), by the
safetensors header (before the features arrive), by the small integer tensors (at the end). The features are not read
here. A refused upload leaves nothing behind.
"""

from __future__ import annotations

import asyncio
import functools
import json
import logging
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
from fastapi import APIRouter, Query, Request, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel
from redis.exceptions import OutOfMemoryError, RedisError

from rl_hooks.format.release import sha256_of
from rl_hooks.wire import (
    AUX_CONVENTION,
    FORMATS,
    NUMPY_DTYPE,
    OPTIONAL_TENSORS,
    Header,
    LastRows,
    RolloutHeader,
    WireError,
    check_index,
    check_rollout_header,
)
from service.access.tokens import Token
from service.api.auth import CALLER, Caller, check_covers
from service.api.context.answers import BatchFate
from service.api.context.context import Context, RunQuery, ServiceContext
from service.api.problems import FOLLOWED, Problem, in_units
from service.api.runs import check_room
from service.api.uploads import FILE_BODY, check_announcement, receive_file
from service.errors import RunClosed, RunNotFound
from service.storage.layout import BATCH_ID
from service.storage.queue.incoming import new_name
from service.storage.queue.keys import death_code
from service.storage.queue.rollout_queue import Batch, Depth, Enqueued
from service.storage.ready import AWAKE_SECONDS, PROBE_SECONDS
from service.storage.runs import RunRecord, check_open
from service.storage.spool import Upload

log = logging.getLogger("draftalign.api")
router = APIRouter(tags=["rollouts"])
#: A file of at most this size in tokens is checked on the event loop, in 0.1 ms: less than a thread takes to begin.
_FEW_TOKENS = 4096


#: `followed`: a later start of the trainer has followed the one that sent it, so it is skipped. `known-rollouts`: some
#: of its rollouts came before. `other-rollouts`: all of their ids came before, with other bytes.
WarningCode = Literal["followed", "known-rollouts", "other-rollouts"]


class Receipt(BaseModel):
    """Answer to an accepted upload. `state` is the batch's state now; a duplicate's batch may have ended already.

    `known_rollouts`: those of its rollouts that came in an earlier batch, by their ids, and are not used again. A file
    that holds nothing else is a duplicate. `dead_total` and `last_dead_reason` count all the run's batches so far: a
    batch can die only after its own answer. `last_rows`: what the run's next files must hold of `last_hidden` and
    `logsumexp` at least, and `optional_tensors`: what they may hold besides (`rl_hooks.wire`). `direct_uploads`: they
    may go straight to an object store (`POST /rollouts/direct`).
    """

    batch_id: str
    duplicate: bool
    run: str
    state: Literal["queued", "trained", "skipped", "dead"] = "queued"
    dead_total: int = 0
    last_dead_reason: str = ""
    known_rollouts: int = 0
    last_rows: LastRows
    optional_tensors: tuple[str, ...] = OPTIONAL_TENSORS
    direct_uploads: bool = False
    warning: str | None = None
    warning_code: WarningCode | None = None


class _DirectRoute(APIRoute):
    """Calls the handler directly. FastAPI's way to find its arguments takes a tenth of a small upload's time."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """What answers a request."""

        async def answer(request: Request) -> Response:
            scope, run = request.scope, request.query_params.get("run")
            found: Response = await self.endpoint(request, scope["app"].state.context, scope[CALLER], run)
            return found

        return answer


async def post_rollouts(
    request: Request,
    context: Context,
    caller: Caller,
    run: Annotated[
        str | None, Query(description="The file's run; naming it here lets a full queue refuse early.")
    ] = None,
) -> Response:
    """Queue one rollout file. Send `Expect: 100-continue`, so that a refusal costs no transfer."""
    length = check_announcement(request, context.settings.max_body_bytes)
    check_room(context, length, run or "")
    room = QueueRoom(0)
    named: RunRecord | None = None
    if run is None:
        await context.redis.check()  # without it the body could not be queued
    else:
        named = context.run(run)
        check_open(context.layout, run, for_rollouts=True)
        room = await check_queue(context, run, length)

    async def on_header(header: Header) -> tuple[RolloutHeader, RunRecord]:
        nonlocal room
        rollouts = check_header(context, caller, header, run)
        if run is None:
            await context.looks.find(rollouts.run)  # one that the query names was looked for before
        found = named or context.run(rollouts.run)
        check_run(found, rollouts)
        if run is None:
            check_open(context.layout, rollouts.run, for_rollouts=True)
            room = await check_queue(context, rollouts.run, length)
        return rollouts, found

    check_room(context, length, run or "")  # again: others came while Redis was asked; from here on nothing is awaited
    with context.disk.spool.reserve(length, run or ""), context.disk.spool.upload() as upload:
        header, record = await receive_file(request, upload, length, context.settings, on_header)
        read = {name: upload.read(begin, end - begin) for name, (begin, end) in index_stretches(header).items()}
        await check_index_bytes(header, read, record.vocab_size, context.settings.max_rollout_tokens)
        batch = batch_of(header, await _name(context, header, upload))
        outcome = await _enqueue(context, upload, header, batch, room)
    return receipt(context, header, record, outcome)


def check_header(context: ServiceContext, caller: Token, header: Header, run: str | None) -> RolloutHeader:
    """Refuse a file by its header. `run`: the one that the request names, if any."""
    rollouts = check_rollout_header(header)
    if run is not None and rollouts.run != run:
        raise WireError("run", f"the request names run {run!r}, the file {rollouts.run[:80]!r}")
    check_covers(caller, rollouts.run)
    if rollouts.rollouts > context.settings.max_batch_rollouts:
        most = context.settings.max_batch_rollouts
        raise WireError("rollout_ids", f"{rollouts.rollouts} rollouts in one file; at most {most}, send several")
    if rollouts.tokens > (most := context.settings.max_batch_tokens):
        raise WireError(
            "input_ids",
            f"{rollouts.tokens} tokens in one file; at most {most} (`max_batch_tokens`), send several files: other "
            "runs wait while the worker is at one",
        )
    if rollouts.states_bytes > (largest := context.settings.max_body_bytes):
        raise WireError(
            "aux_rows",
            f"tokens share rows that make {rollouts.states_bytes} bytes of states when each has its own; at most "
            f"{largest} (`max_body_bytes`), send several files",
        )
    return rollouts


def batch_of(header: RolloutHeader, blob: str) -> Batch:
    """The queue entry of a file."""
    return Batch(
        batch_id=header.batch_id,
        blob=blob,
        bytes=header.header.file_bytes,
        tokens=header.tokens,
        rollouts=header.rollouts,
        policy_version=header.policy_version,
        policy_version_max=header.policy_version_max,
        rollout_ids=header.rollout_ids,
        session=header.session,
        session_began=header.session_began,
    )


def receipt(context: ServiceContext, header: RolloutHeader, record: RunRecord, outcome: Enqueued) -> Response:
    """The answer to a file that was queued, or is a duplicate: a `Receipt`."""
    duplicate = outcome.outcome == "duplicate"
    found = Receipt.model_validate(
        {
            "batch_id": header.batch_id,
            "duplicate": duplicate,
            "run": header.run,
            "state": outcome.state,
            "dead_total": outcome.dead_total,
            "last_dead_reason": outcome.last_dead_reason,
            "known_rollouts": outcome.known,
            "last_rows": record.last_rows,
            "direct_uploads": context.disk.incoming is not None,
            **_warning(outcome, header.rollouts),
        }
    )
    return Response(found.model_dump_json(), 200 if duplicate else 202, media_type="application/json")


router.add_api_route(
    "/rollouts",
    post_rollouts,
    methods=["POST"],
    response_model=Receipt,
    status_code=202,
    openapi_extra=FILE_BODY,
    responses={
        200: {"description": "A duplicate: it is counted once."},
        409: {"description": "The run takes no more rollouts: it is draining or archived. Do not send it again."},
        429: {"description": "The queue is full."},
    },
    route_class_override=_DirectRoute,
)


def _warning(outcome: Enqueued, rollouts: int) -> dict[str, str]:
    """`warning` for people and `warning_code` for programs; neither where nothing is odd."""
    own = "a rollout's id must be its own within a run, whatever its policy version"
    code: WarningCode
    if outcome.outcome == "outdated":
        code, said = "followed", f"rollouts {FOLLOWED}"
    elif outcome.outcome == "duplicate" and outcome.other:
        code = "other-rollouts"
        said = f"other rollouts came with the same ids, and these are not used: {own}, after a restart too"
    elif outcome.known:
        code = "known-rollouts"
        said = f"rollouts came in an earlier batch ({outcome.known} of {rollouts}) and are not used again: {own}"
    else:
        return {}
    return {"warning": said, "warning_code": code}


class QueueRoom(NamedTuple):
    """What a file finds in its run's queue."""

    limit_bytes: int  # at which the queue is full
    dead_bytes: int | None = None  # that files of the run's dead batches are cut to; None: all stay


async def check_queue(context: ServiceContext, run: str, length: int) -> QueueRoom:
    """Refuse a file that would not fit the run's queue."""
    settings = context.settings
    queue = context.of(run).queue
    items, size, rollouts = await context.redis.soon(queue.depth())
    coming = context.disk.spool.reserved_bytes(run)
    share, wanted = context.disk.queue_share_bytes(size, run), size + coming + length
    full = items >= settings.queue_max_items or rollouts >= settings.queue_max_rollouts
    dead = 0
    if wanted + settings.dead_letter_bytes > share:  # else there is room, however many are dead
        dead = await context.redis.soon(queue.dead_file_bytes())
        share = context.disk.queue_share_bytes(size, run, dead)
    limit_bytes = share if settings.queue_max_bytes is None else min(share, settings.queue_max_bytes)
    full, gives_way = full or wanted > limit_bytes, None
    if wanted > share and size + coming == 0:
        context.disk.want_room(4 * length)
    elif share - dead < wanted and not full:
        gives_way = share - wanted
    if full:
        await context.redis.soon(context.of(run).queue.count_rejected())
        raise queue_full(context, run, Depth(items, size + coming, rollouts), length, limit_bytes)
    return QueueRoom(limit_bytes, gives_way)


def queue_full(context: ServiceContext, run: str, held: Depth, length: int, limit_bytes: int) -> Problem:
    """The answer to a batch of `length` bytes that finds the run's queue full, naming a limit that it meets."""
    settings = context.settings
    if held.bytes + length > limit_bytes:
        whose = "DRAFTALIGN_QUEUE_MAX_BYTES" if limit_bytes == settings.queue_max_bytes else "its share of the disk"
        found = f"{in_units(held.bytes)} of {in_units(limit_bytes)} ({whose}), and this file has {in_units(length)}"
    elif held.items >= settings.queue_max_items:
        found = f"{held.items} of {settings.queue_max_items} batches (DRAFTALIGN_QUEUE_MAX_ITEMS)"
    else:
        found = f"{held.rollouts} of {settings.queue_max_rollouts} rollouts (DRAFTALIGN_QUEUE_MAX_ROLLOUTS)"
    return Problem(
        429, "queue-full", f"the queue of run {run!r} is full: {found}. Try again when the worker has caught up"
    )


def check_run(record: RunRecord, header: RolloutHeader) -> None:
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
    if record.last_rows == "all" != header.last_rows:
        raise WireError(
            "last_hidden",
            f"run {record.run!r} reads it of prompts too (an MTP module does), got {FORMATS[header.last_rows]}, which "
            f"leaves them out; send {FORMATS['all']}",
        )


def index_stretches(header: RolloutHeader) -> dict[str, tuple[int, int]]:
    """Where in the file the integer tensors lie; no other tensor is read."""
    file, names = header.header, ("input_ids", "cu_seqlens", "loss_mask", *OPTIONAL_TENSORS)
    infos = {name: file.tensors[name] for name in names if name in file.tensors}
    return {name: (file.header_bytes + info.begin, file.header_bytes + info.end) for name, info in infos.items()}


async def check_index_bytes(header: RolloutHeader, read: Mapping[str, bytes], vocab_size: int, longest: int) -> None:
    """Verify the integer tensors. `longest`: most tokens in one rollout."""

    def check() -> None:
        found = {
            name: np.frombuffer(data, NUMPY_DTYPE[header.header.tensors[name].dtype]) for name, data in read.items()
        }
        optional = (found.get(name) for name in OPTIONAL_TENSORS)
        check_index(header, found["input_ids"], found["cu_seqlens"], found["loss_mask"], vocab_size, *optional)
        if (tokens := int(np.diff(found["cu_seqlens"]).max())) > longest:
            raise WireError(
                "cu_seqlens",
                f"a rollout of {tokens} tokens; at most {longest} (`max_rollout_tokens`), cut it: work grows with the "
                "square of a rollout's length, and other runs wait for it",
            )

    if header.tokens <= _FEW_TOKENS:
        check()
    else:
        await asyncio.to_thread(check)


async def _name(context: ServiceContext, header: RolloutHeader, upload: Upload) -> str:
    if context.kept is None:
        return context.disk.spool.new_blob(header.batch_id, upload.digest)
    return new_name(header.batch_id, await asyncio.to_thread(sha256_of, upload.path), context.disk.spool.now_ns())


async def _enqueue(
    context: ServiceContext, upload: Upload, header: RolloutHeader, batch: Batch, room: QueueRoom
) -> Enqueued:
    """Move the file to where it is kept, then add its queue entry: an entry never names a missing file.

    If Redis fails in between, the entry may or may not exist, so the file stays. Without an entry the reaper deletes
    the file; with one, the client's next try is answered as a duplicate.
    """
    run = header.run
    if context.settings.spool_fsync:
        await asyncio.to_thread(upload.sync)
    if context.kept is None:
        upload.keep(context.disk.spool.path(run, batch.blob))
    else:  # a file there that gets no entry is swept
        await asyncio.to_thread(context.kept.put, run, batch.blob, upload.path)
    try:
        return await add_entry(context, header, batch, room, came_here=True)
    except (RunNotFound, RunClosed, WireError):  # it was deleted or closed while this came, or registered again
        await _drop_file(context, run, batch)
        raise


async def add_entry(
    context: ServiceContext, header: RolloutHeader, batch: Batch, room: QueueRoom, *, came_here: bool = False
) -> Enqueued:
    """Add the queue entry of a file that is in its place.

    `came_here`: the file came through this process. If it is not queued, it is deleted: another try sends all of it.
    Else it stays in the object store, from where another try queues it.
    """
    run = header.run
    check_run(context.run(run), header)
    check_open(context.layout, run, for_rollouts=True)
    finishing = asyncio.ensure_future(_finish_enqueue(context, run, batch, room, came_here))
    try:
        for seconds in (PROBE_SECONDS, AWAKE_SECONDS):
            done, _ = await asyncio.wait({finishing}, timeout=seconds)
            if done:
                return finishing.result()
    finally:  # if the client hangs up now, or Redis hangs, the outcome must still be handled
        if not finishing.done():
            finishing.add_done_callback(functools.partial(_log_late, batch.batch_id))
    raise Problem(
        503,
        "redis-away",
        "Redis stopped answering while the file came. It may be queued or not; send it again: it is counted once",
    )


def _log_late(batch_id: str, finishing: asyncio.Future[Enqueued]) -> None:
    if not finishing.cancelled():  # as this process ends
        error = finishing.exception()
        outcome = error or finishing.result().outcome
        log.warning("batch %s, whose client no longer waits: %s", batch_id, outcome)


async def _delete_unless_named(
    context: ServiceContext, run: str, batch: Batch, came_here: bool
) -> dict[str, str] | None:
    """Delete a file that was not queued; returns what the queue knows of its batch.

    The entry may name this very file, which then stays: Redis stored it, its answer was lost, and redis-py's retry
    found a duplicate.
    """
    first = await context.of(run).queue.batch(batch.batch_id)
    if came_here and (first is None or first["blob"] != batch.blob):
        await _drop_file(context, run, batch)
    return first


async def _drop_file(context: ServiceContext, run: str, batch: Batch) -> None:
    """Delete a file that came through this process, wherever it is kept."""
    context.disk.spool.delete(run, batch.blob)
    if context.kept is not None:
        await asyncio.to_thread(context.kept.discard, run, [batch.blob])


async def _finish_enqueue(
    context: ServiceContext, run: str, batch: Batch, room: QueueRoom, came_here: bool
) -> Enqueued:
    settings, spool = context.settings, context.disk.spool
    try:
        outcome = await context.of(run).queue.enqueue(
            batch, max_items=settings.queue_max_items, max_bytes=room.limit_bytes
        )
    except OutOfMemoryError:  # the script changed nothing, and each try leaves a file
        await _delete_unless_named(context, run, batch, came_here)
        raise
    if outcome.replaced is not None:
        spool.delete(run, outcome.replaced)
    if outcome.outcome == "accepted" and not context.of(run).accepted:
        context.of(run).accepted = True
        log.info("%s: first batch accepted since this process began: policy %d, %d rollouts, %d tokens",
                 run, batch.policy_version, batch.rollouts, batch.tokens)  # fmt: skip
    if outcome.outcome != "accepted":
        first = await _delete_unless_named(context, run, batch, came_here)
        outcome = replace(outcome, other=first is not None and int(first.get("bytes", batch.bytes)) != batch.bytes)
    if outcome.outcome == "disowned":
        raise Problem(
            503,
            "spool-swept",
            f"the file was not queued within {settings.orphan_age_seconds:.0f} s and was swept (was this process, or "
            "Redis, stopped?). Nothing was queued; send it again",
        )
    if outcome.outcome == "full":
        raise queue_full(context, run, outcome.held, batch.bytes, room.limit_bytes)
    if outcome.outcome == "accepted" and room.dead_bytes is not None:  # only now: a refused batch needs no room
        try:
            await context.disk.sweep_dead(run, room.dead_bytes)
        except (RedisError, OSError) as error:  # the batch is queued all the same; the next one makes the room
            log.warning("run %s: files of dead batches were not deleted: %s", run, error)
    return outcome


@router.get("/rollouts/{rollout_id:path}")
async def get_rollout(rollout_id: str, context: Context, run: RunQuery = "default") -> BatchFate:
    """Read the state of a batch, or of a rollout's batch; for a dead one, the reason too."""
    context.run(run)
    await context.redis.check()
    queue = context.of(run).queue
    batch_id: str | None = rollout_id
    batch = await queue.batch(rollout_id) if BATCH_ID.fullmatch(rollout_id) else None
    if batch is None and 0 < len(rollout_id) <= 128 and rollout_id.isprintable():
        batch_id = await queue.batch_of(rollout_id)
        batch = None if batch_id is None else await queue.batch(batch_id)
    if batch is None:
        raise Problem(404, "no-such-rollout", f"run {run!r} knows no batch or rollout {rollout_id[:80]!r} (any more)")
    told = {"run": run, "batch_id": batch_id, "code": death_code(batch.get("code"))}
    return BatchFate.model_validate(batch | told | {"rollout_ids": json.loads(batch["rollout_ids"])})
