"""`PUT /runs/{run}`, `GET /runs/{run}`, `PUT /runs/{run}/head`."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
from fastapi import APIRouter, Request, Response

from rl_hooks.wire import Header, MappedFile, WireError
from service.context import Context, ServiceContext
from service.layout import RUN_NAME
from service.problems import Problem
from service.runs import RunRecord, check_same, commit_run, read_head_header, read_run_header, untouched
from service.spool import Upload
from service.uploads import check_announcement, receive_file

router = APIRouter(tags=["runs"])


@router.put("/runs/{run}", status_code=201, responses={200: {"description": "The same target is registered already."}})
async def put_run(run: str, request: Request, response: Response, context: Context) -> dict[str, Any]:
    """Register a run: its target's configuration, embedding, head and, optionally, a first drafter.

    A run that exists is left as it is, unless the worker has refused it (`worker_error`) before anything was trained.
    """
    if not RUN_NAME.fullmatch(run):
        raise Problem(422, "bad-run-name", "a run is named by 1 to 64 of A-Z a-z 0-9 . _ -", field="run")
    length = check_announcement(request, context.settings.max_run_bytes)
    anew = await _is_refused(context, run)
    records: list[RunRecord] = []

    async def on_header(header: Header) -> bool:
        begins = anew or not context.layout.run_json(run).exists()
        record = read_run_header(run, header, begins=begins)
        records.append(record)
        if not begins:
            check_same(context.run(run), record)
        return begins

    created = False
    check_room(context, length)
    with context.spool.reserve(length), context.spool.upload() as upload:
        await receive_file(request, upload, length, context.settings, on_header)
        if upload.written_bytes == length:
            loop = asyncio.get_running_loop()

            def forget() -> None:
                """What an earlier run of this name left in Redis; in the loop, to which the client belongs."""
                asyncio.run_coroutine_threadsafe(context.store(run).forget(), loop).result()

            created = await context.locking(commit_run, context.layout, records[0], upload, forget, anew=anew)
            if created and anew:
                await context.store(run).forget_error()  # it was of the file that was replaced
    await context.queue(run).ensure_group()  # also for a run that exists: Redis may have been emptied since
    response.status_code = 201 if created else 200
    return await describe(context, run)


async def _is_refused(context: ServiceContext, run: str) -> bool:
    """Whether a run is registered that the worker cannot begin with: the next file takes its place."""
    if not context.layout.run_json(run).exists() or not untouched(context.layout, run):
        return False
    return bool((await context.store(run).worker()).get("error"))


@router.get("/runs/{run}")
async def get_run(run: str, context: Context) -> dict[str, Any]:
    """Read what is registered, and how far the run's drafter and head have come."""
    return await describe(context, run)


async def describe(context: ServiceContext, run: str) -> dict[str, Any]:
    """Describe a run as GET /runs/{run} answers it."""
    record = context.run(run)
    latest = context.registry.latest(run)
    versions = context.registry.versions(run)
    worker = await context.store(run).worker()
    return record.model_dump() | {
        "drafter": None if latest is None else latest.version,
        "reference_version": versions[0] if versions else None,
        "latest_head": await context.store(run).latest_head(),
        "worker_error": worker.get("error"),
        # What the drafters in use can propose, and the share of the newest scored tokens that this is.
        "draft_vocab_size": worker.get("draft_vocab_size") or record.draft_vocab_size,
        "draft_coverage": worker.get("draft_coverage"),
    }


@router.put("/runs/{run}/head", status_code=201)
async def put_head(run: str, request: Request, context: Context) -> dict[str, Any]:
    """Take the policy's head rows again, when the head has moved."""
    record = context.run(run)
    length = check_announcement(request, context.settings.max_run_bytes)
    versions: list[int] = []

    async def on_header(header: Header) -> bool:
        versions.append(read_head_header(record, header))
        return True

    check_room(context, length)
    with context.spool.reserve(length), context.spool.upload() as upload:
        await receive_file(request, upload, length, context.settings, on_header)
        await asyncio.to_thread(_check_ids, upload, record.vocab_size)
        upload.keep(context.layout.head(run, versions[0]))
    latest = await context.store(run).raise_latest_head(versions[0])
    return {"run": run, "policy_version": versions[0], "latest_head": latest}


def _check_ids(upload: Upload, vocab_size: int) -> None:
    file = MappedFile(upload.path)
    if "ids" not in file:
        return
    ids = file.array("ids")
    if int(ids.min()) < 0 or int(ids.max()) >= vocab_size or np.unique(ids).size != ids.size:
        raise WireError("ids", f"must be distinct token ids from 0 to {vocab_size - 1}")


def check_room(context: ServiceContext, length: int) -> None:
    """Refuse an upload that the spool's disk has no room for."""
    free = context.spool.free_bytes() - length
    if free < context.settings.spool_min_free_bytes:
        raise Problem(
            429,
            "spool-low",
            f"{length} bytes would leave {max(free, 0)} free in the spool; at least "
            f"{context.settings.spool_min_free_bytes} must stay free. Try again when the worker has caught up",
            headers={"Retry-After": str(context.settings.retry_after_seconds)},
        )
