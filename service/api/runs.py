"""Runs: `PUT`, `GET`, `PATCH`, `DELETE /runs/{run}`, `PUT .../head`, `GET .../worth`, `POST .../drift/{action}`."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal

from fastapi import APIRouter, Query, Request, Response
from pydantic import BaseModel, ConfigDict, Field
from pydantic_core import to_json, to_jsonable_python

from rl_hooks.wire import OPTIONAL_TENSORS, RUN_NAME, Header, parts_bytes, session_field
from service.access.tokens import Token
from service.api.auth import Caller
from service.api.context.answers import Deletion, DriftRequest, HeadReceipt, RunAnswer, RunList, WorthAnswer
from service.api.context.audited import audit
from service.api.context.context import Context, ServiceContext
from service.api.problems import FOLLOWED, Problem, in_units
from service.api.snapshot import log_damaged, read_headlines, read_standing
from service.api.uploads import FILE_BODY, check_announcement, json_body, parse_body, receive_file
from service.monitor.headline import Headline
from service.monitor.records import State
from service.monitor.worth import step_speedup
from service.storage.admission.nearness import check_finite, check_head, join_run
from service.storage.admission.sent import check_initial_drafter
from service.storage.layout import FileId, is_there
from service.storage.ready import PROBE_SECONDS
from service.storage.reports.drafting import Drafting
from service.storage.runs import (
    RunRecord,
    change_state,
    check_not_withdrawn,
    check_open,
    check_same,
    commit_run,
    crc32_of,
    forget_unneeded_heads,
    heads_bytes,
    heads_since,
    keep_head,
    load_target,
    read_head_header,
    read_run_header,
    read_state,
    untouched,
    withdraw_run,
)
from service.storage.spool import Upload

log = logging.getLogger("draftalign.api")

router = APIRouter(tags=["runs"])

#: A worker that has died holds its lease for 15 s.
_LET_GO_SECONDS: Final = 20.0
_POLL_SECONDS: Final = 0.1


@router.put(
    "/runs/{run}",
    status_code=201,
    response_model=None,
    openapi_extra=FILE_BODY,
    responses={
        201: {"model": RunAnswer},
        200: {
            "model": RunAnswer,
            "description": "The same target is registered already; `warning`: what was ignored.",
        },
        409: {"description": "The run is another target's or policy's, or takes no more rollouts."},
        503: {
            "description": "`run-being-deleted`: an earlier run of this name is; send it again. "
            "`run-of-another-state`: another service has it in this Redis."
        },
        403: {"description": "`too-many-runs`, in all or of the token's share: a person has to make room."},
        429: {"description": "`too-many-heads`; `spool-low`."},
    },
)
async def put_run(run: str, request: Request, response: Response, context: Context, caller: Caller) -> dict[str, Any]:
    """Register a run: its target's configuration, embedding, head and, optionally, a first drafter.

    A run that exists is left as it is, unless the worker cannot begin with its file (`worker_error` says why).
    """
    if not RUN_NAME.fullmatch(run):
        raise Problem(422, "bad-run-name", "a run is named by 1 to 64 of A-Z a-z 0-9 . _ -", field="run")
    audit(request, "register")
    length = check_announcement(request, context.settings.max_run_bytes)
    await context.redis.check()
    check_not_withdrawn(context.layout, run)
    if not is_there(context.layout.run_json(run)):
        await _check_number(context, caller)
        await context.check_no_worker(run)
    check_open(context.layout, run, for_rollouts=True)  # a trainer that registers is about to send some
    refused = await _refused_file(context, run)

    async def on_header(header: Header) -> tuple[RunRecord, str]:
        begins = refused is not None or not is_there(context.layout.run_json(run))
        record = read_run_header(run, header, begins=begins)
        if not begins:
            check_same(context.layout, context.run(run), record, header)
        return record, session_field(header.metadata)

    warning: str | None = None
    check_room(context, length)
    with context.disk.spool.reserve(length), context.disk.spool.upload() as upload:
        record, session = await receive_file(request, upload, length, context.settings, on_header)
        await asyncio.to_thread(check_finite, upload.path)
        created = refused is not None or not is_there(context.layout.run_json(run))
        if created:
            await asyncio.to_thread(check_initial_drafter, upload.path)
            await context.redis.check()  # Redis may have stopped while the file came
            forget = context.forgetting(run)  # the keys of an earlier run of this name, which may take long
            created = await context.locking(commit_run, context.layout, record, upload, forget, refused=refused)
            if created and refused is not None:
                await context.redis.soon(
                    context.store(run).forget_refusal()
                )  # the refusal was of the file that was replaced
        if not created:
            warning = await _join(context, record, upload)
            await context.redis.soon(context.store(run).note_registration(record.policy_version, session))
    # Also for a run that exists: Redis may have been emptied since.
    await context.redis.soon(context.of(run).queue.ensure_group())
    response.status_code = 201 if created else 200
    return await describe(context, run) | ({} if warning is None else {"warning": warning, "warning_code": "ignored"})


async def _check_number(context: ServiceContext, caller: Token) -> None:
    """Refuse one more run at the limit. If several register at one moment, a few more than that get in."""
    most = context.settings.max_runs
    names = await asyncio.to_thread(context.layout.run_names)
    share = context.access.tokens.share_of_runs(caller, most)
    if len(names) >= most:
        found = f"there are {most} runs, as many as there may be"
    elif share < most and sum(map(caller.covers, names)) >= share:
        found = f"there are {share} runs that token {caller.name!r} is for, its share of {most}"
    else:
        return
    raise Problem(
        403, "too-many-runs", f"{found}; delete one (`draftalign runs --delete`) or raise DRAFTALIGN_MAX_RUNS"
    )


async def _join(context: ServiceContext, record: RunRecord, upload: Upload) -> str | None:
    """Let a trainer join an existing run if its policy is the run's; returns a warning for it, or None.

    The run stays as it is. The trainer's head may become the run's at its policy version: `join_run` has the rule.
    """
    registered = await asyncio.to_thread(load_target, context.layout, record.run)
    joined = await asyncio.to_thread(join_run, context.layout, record.run, registered, upload.path)
    if joined.new_head is not None:
        await _check_heads(context, record.run, record.policy_version)
        size = parts_bytes(joined.new_head)
        check_room(context, size)
        with context.disk.spool.reserve(size), context.disk.spool.upload() as head:
            for part in joined.new_head:
                await asyncio.to_thread(head.write, part)
            crc32 = await asyncio.to_thread(crc32_of, head.path)
            version, as_of_ns = record.policy_version, joined.as_of_ns
            await _keep_head(context, record.run, version, head, crc32, as_of_ns)
        if joined.as_of_ns is None:  # else a later one stays in force
            await context.redis.soon(context.store(record.run).note_head(record.policy_version))
    return joined.warning


async def _keep_head(context: ServiceContext, run: str, version: int, head: Upload, *rest: Any, **named: Any) -> None:
    """Call `keep_head` in one of few threads. A shared object store has the file before that."""
    await asyncio.to_thread(context.layout.announce, run, head.path)
    await context.in_turn(run, keep_head, context.layout, run, version, head, *rest, **named)


async def _check_session(context: ServiceContext, run: str, session: str) -> None:
    """Refuse a head of a trainer that a later attempt has followed: it would hide the later one's of that version."""
    if await context.redis.soon(context.store(run).was_followed(session)):
        raise Problem(409, "followed", f"heads {FOLLOWED}")


async def _check_heads(context: ServiceContext, run: str, version: int) -> None:
    """Make room for one more head of a run; refuse it where none can be made until the worker has caught up.

    The worker deletes heads, but only while it works on the run. Where no batch waits for it, a head above all versions
    so far is accepted: a trainer sends its head before the rollouts that bring the worker to work.
    """
    most = context.settings.max_heads
    newest = await context.redis.soon(context.store(run).latest_policy())
    last_ns = 0  # 0: the times of the spool's files count
    if context.kept is not None:
        last_ns = int(((await context.redis.soon(context.summary(run))).last_arrival or 0.0) * 1e9)
    newest_or_none = -1 if newest is None else newest
    left = await asyncio.to_thread(forget_unneeded_heads, context.layout, run, newest_or_none, most, last_ns)
    if left < most or context.layout.head(run, version).exists():
        return
    waiting = (await context.redis.soon(context.of(run).queue.depth())).items
    active = read_state(context.layout, run).state == "active"
    if active and not waiting and (newest is None or version > newest):
        return
    raise Problem(
        429,
        "too-many-heads",
        f"run {run!r} has {left} heads, and {most} is the most; batches that were received may need them. Try again "
        "when the worker has caught up (a paused run: once it is active), or raise DRAFTALIGN_MAX_HEADS",
    )


async def _waits_for_head(context: ServiceContext, run: str) -> bool:
    """Whether the run needs a head to go on: then the heads that it has do not count against its share of the disk.

    As in `_check_heads`, no batch waits for the worker, which alone deletes heads. One head may have come since the
    last batch: its answer may have been lost, and it is sent again. Its version does not matter, because a trainer may
    go back to a lower one.
    """
    found = await context.redis.soon(context.summary(run))
    came = await asyncio.to_thread(heads_since, context.layout, run, found.last_arrival or 0.0)
    return not found.counters["items"] and came < 2 and read_state(context.layout, run).state == "active"


async def _refused_file(context: ServiceContext, run: str) -> FileId:
    """Id of the target file that the worker refused to begin with, which the next PUT replaces; else None.

    A worker that failed for another reason has refused nothing, although nothing is trained yet.
    """
    if not is_there(context.layout.run_json(run)) or not untouched(context.layout, run):
        return None
    file = context.layout.target_id(run)
    refused = (await context.redis.soon(context.summary(run))).worker.refused
    return file if file is not None and refused == tuple(file) else None


@router.get("/runs", responses={200: {"model": RunList}})
async def get_runs(context: Context, caller: Caller) -> Response:
    """List the runs that the token is for: name, Unix time of the registration, served drafter and headline."""
    await context.redis.check()
    runs = tuple(filter(caller.covers, await asyncio.to_thread(context.layout.run_names)))
    body = await context.answers.get(("runs", runs), lambda: _listed(context, runs))
    return Response(body, media_type="application/json")


async def _listed(context: ServiceContext, runs: Sequence[str]) -> bytes:
    found, damaged = await read_headlines(context, runs)
    log_damaged(damaged)
    lines: dict[str, dict[str, Any]] = {}
    for run, (now, said) in found.items():
        drafter = None if now.latest is None else now.latest.version
        lines[run] = {"run": run, "created": now.registered, "drafter": drafter, "state": now.state.state}
        lines[run]["headline"] = said
    for run, error in damaged.items():
        said = Headline("bad", "unreadable", "Unreadable", f"Unreadable: {error}")
        lines[run] = {"run": run, "created": None, "drafter": None, "state": None, "headline": said}
    return to_json({"runs": [lines[run] for run in runs if run in lines]}, inf_nan_mode="null")


@router.delete(
    "/runs/{run}",
    status_code=204,
    response_model=None,
    responses={202: {"model": Deletion, "description": "The run is unregistered; a worker still works on it."}},
)
async def delete(run: str, request: Request, context: Context) -> Response:
    """Delete a run: its rollouts, drafters, checkpoints, history and counts. This cannot be undone.

    The run is unregistered at once. What was received is deleted when its worker has released it. If that takes long,
    because a training is under way, the answer is 202, and the sweep, every five minutes, deletes the rest. Do not
    repeat the call: it would delete a run that was registered under the name meanwhile.
    """
    audit(request, "delete")
    await context.redis.check()
    await context.locking(withdraw_run, context.layout, run)
    deadline = time.monotonic() + _LET_GO_SECONDS
    while not await context.finish_deletion(run):
        if time.monotonic() > deadline:
            detail = (
                f"run {run!r} is unregistered, and a worker is still at work on it; its files are deleted some minutes "
                "after that, and nothing more needs doing"
            )
            return Response(Deletion(run=run, detail=detail).model_dump_json(), 202, media_type="application/json")
        await asyncio.sleep(_POLL_SECONDS)
    return Response(status_code=204)


class StateRequest(BaseModel):
    """Body of PATCH /runs/{run}."""

    model_config = ConfigDict(extra="forbid")
    state: State
    reason: str = Field(min_length=1, max_length=400)
    by: str | None = Field(None, min_length=1, max_length=80, description="Who wants it, for people to read.")


@router.patch(
    "/runs/{run}",
    response_model=None,
    responses={200: {"model": RunAnswer}},
    openapi_extra=json_body(StateRequest),
)
async def patch_run(run: str, request: Request, context: Context) -> dict[str, Any]:
    """Make a run active, paused, draining or archived. Worker and API processes obey within seconds.

    `paused`: rollouts are queued within the queue's bounds and not worked on. `draining`: rollouts are refused with
    409, those in the queue are worked on. `archived`: the worker drops the run and its queue; only reading is left.
    """
    audit(request, "change of state")
    context.run(run)
    await context.redis.check()
    body = await parse_body(request, StateRequest)
    audit(request, body.state, reason=body.reason)
    change = await context.locking(change_state, context.layout, run, body.state, body.reason, body.by)
    log.warning("run %s is %s now, by %r: %r", run, change.state, change.by or "a person", change.reason)
    return await describe(context, run)


@router.get("/runs/{run}", response_model=None, responses={200: {"model": RunAnswer}})
async def get_run(run: str, context: Context) -> dict[str, Any]:
    """Read a run's registration, its newest drafter, head and policy, and its headline."""
    return await describe(context, run)


def _state_of(context: ServiceContext, run: str) -> dict[str, Any]:
    """The run's state, and who set it, when and why: null where nobody has set it."""
    found = read_state(context.layout, run)
    change = {"reason": found.reason, "by": found.by, "since": found.since}
    return {"state": found.state, "state_change": None if found.since is None else change}


async def describe(context: ServiceContext, run: str) -> dict[str, Any]:
    """Describe a run as GET /runs/{run} answers it."""
    record = context.run(run)
    await context.redis.check()
    latest = context.registry.latest(run)
    versions = context.registry.versions(run)
    worker = (await context.summary(run)).worker
    standing = await read_standing(context, run)
    return (
        record.model_dump(exclude={"crc32"})
        | standing
        | {
            **_state_of(context, run),
            "held": to_jsonable_python(context.registry.held(run)),
            # How its engines draft, as replay and training suppose.
            **Drafting.supposed(context.settings_of(run)).model_dump(),
            "drafter": None if latest is None else latest.version,
            "reference_version": versions[0] if versions else None,
            "latest_head": await context.store(run).latest_head(),
            "latest_policy": await context.store(run).latest_policy(),
            "worker_error": worker.error or None,
            # Size of the draft vocabulary in use, and its coverage of the newest scored tokens.
            "draft_vocab_size": worker.draft_vocab_size or record.draft_vocab_size,
            "draft_coverage": worker.draft_coverage,
            # As each batch's answer says; a sender that registers knows it before its first file.
            "direct_uploads": context.disk.incoming is not None,
            "optional_tensors": OPTIONAL_TENSORS,
        }
    )


@router.get("/runs/{run}/worth", response_model=None, responses={200: {"model": WorthAnswer}})
async def get_worth(
    run: str,
    context: Context,
    generation_share: Annotated[
        float | None, Query(gt=0, le=1, description="Share of an RL step that generation takes without speculation.")
    ] = None,
) -> dict[str, Any]:
    """Say what acceptance is worth in time: speed-up and best depth by batch size, from the engines' step times.

    `unknown` says why nothing is known. With `generation_share`, each batch size has the speed-up of the RL step too.
    """
    context.run(run)
    await context.redis.check()
    found = (await context.of(run).evidence.engines()).worth
    document: dict[str, Any] = to_jsonable_python(found)
    if generation_share is not None:
        for row in document["batches"]:
            row["step_speedup"] = step_speedup(generation_share, row["speedup"])
    return {"run": run} | document


@router.post("/runs/{run}/drift/{action}", status_code=202, responses={409: {"description": "The run is archived."}})
async def post_drift(
    run: str, action: Literal["acknowledge", "reset"], request: Request, context: Context
) -> DriftRequest:
    """Ask the worker to clear the drift alarm, with its baseline kept, or to learn a new baseline.

    The worker does it within seconds, or when it is back. `alarm`: whether there is one now. If α is still low, the
    alarm comes again after `acknowledge`; after `reset` the low level is the baseline.
    """
    audit(request, f"drift {action}")
    context.run(run)
    check_open(context.layout, run)
    await context.redis.check()
    alarm, request_id = (await context.summary(run)).worker.drift_alarm, await context.store(run).ask_of_drift(action)
    return DriftRequest(run=run, action=action, alarm=alarm, request=request_id)


@router.put(
    "/runs/{run}/head",
    status_code=201,
    openapi_extra=FILE_BODY,
    responses={
        409: {
            "description": "The head is near none of the run's heads; the run is archived; or `followed`: a later "
            "attempt of the trainer has begun."
        },
        429: {"description": "`too-many-heads`: what was received may need those that are kept; `spool-low`."},
    },
)
async def put_head(run: str, request: Request, context: Context) -> HeadReceipt:
    """Receive the policy's head, whole, after it has moved."""
    record = context.run(run)
    check_open(context.layout, run)
    length = check_announcement(request, context.settings.max_run_bytes)
    await context.redis.check()

    async def on_header(header: Header) -> tuple[int, bool, str]:
        version, session = read_head_header(record, header), session_field(header.metadata)
        await _check_session(context, run, session)
        await _check_heads(context, run, version)
        return version, header.metadata.get("went_back") == "1", session

    held = 0 if await _waits_for_head(context, run) else await asyncio.to_thread(heads_bytes, context.layout, run)
    check_room(context, length, run, held=held)
    with context.disk.spool.reserve(length, run), context.disk.spool.upload() as upload:
        version, went_back, session = await receive_file(request, upload, length, context.settings, on_header)
        await asyncio.to_thread(check_finite, upload.path)
        registered = await asyncio.to_thread(load_target, context.layout, run)
        await asyncio.to_thread(check_head, context.layout, run, registered, upload.path)
        crc32 = await asyncio.to_thread(crc32_of, upload.path)
        loop = asyncio.get_running_loop()

        def still_wanted() -> None:  # the next attempt may have begun while the file came
            asyncio.run_coroutine_threadsafe(_check_session(context, run, session), loop).result(10 * PROBE_SECONDS)

        await _keep_head(context, run, version, upload, crc32, check=still_wanted)
    await context.redis.soon(context.store(run).note_head(version, went_back=went_back, session=session))
    return HeadReceipt(run=run, policy_version=version, latest_head=version)


def check_room(context: ServiceContext, length: int, run: str = "", held: int = 0) -> None:
    """Refuse an upload that would leave too little free disk, or too little for others (`Disk.share_bytes`).

    `held`: bytes of such files that the run has. `run`: '' where it is not known, or not registered yet.
    """
    free, least = context.disk.spool.free_bytes() - length, context.settings.spool_min_free_bytes
    share, coming = context.disk.share_bytes(held, run), context.disk.spool.reserved_bytes(run)
    if free < least or held + coming == 0 < length - share:
        context.disk.want_room(length * 4 // 3 + 1)
    if free < least:
        left, least_text = in_units(max(free, 0)), in_units(least)
        found = (
            f"{in_units(length)} would leave {left} free on the spool's disk; at least {least_text} must stay free "
            "(DRAFTALIGN_SPOOL_MIN_FREE_BYTES). Where something else fills it, make room"
        )
    elif held + coming + length > share:
        whose = f"run {run!r}" if run else "uploads whose run is not known yet"
        found = (
            f"{whose} would have {in_units(held + coming + length)} there and on their way, and may have "
            f"{in_units(share)} of the spool's disk, so that others find room"
        )
    else:
        return
    raise Problem(429, "spool-low", f"{found}. Try again when the worker has caught up")
