"""`POST /acceptance` and `GET /alpha`: what engines count, and the α series that it becomes part of."""

from __future__ import annotations

import asyncio
import time
from typing import Annotated, Any, Literal, Self

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field, model_validator

from service.api.context import Context, RunQuery, ServiceContext
from service.api.snapshot import read_snapshot, run_document
from service.api.uploads import parse_body
from service.monitor.dead_drafter import (
    REPLAYED_BATCHES,
    Judgement,
    judge,
    pooled_replay_alpha,
)
from service.monitor.records import OUR_DRAFTER, AcceptanceRecord
from service.settings import Settings
from service.storage.registry import Manifest, canary_key

router = APIRouter(tags=["acceptance"])

Count = Annotated[int, Field(ge=0, lt=1 << 53, strict=True)]
Name = Annotated[str, Field(min_length=1, max_length=200, pattern=r"^[^/\x00-\x1f\x7f][^\x00-\x1f\x7f]*$")]


class CanaryReport(BaseModel):
    """What an agent's canary found about a version that it had just loaded."""

    model_config = ConfigDict(extra="allow")
    version: Name
    previous: str = Field(max_length=200)
    outcome: Literal["passed", "rolled_back"]
    sequence: Count


class AcceptanceReport(BaseModel):
    """Cumulative counts of one reporter for one drafter version and policy version; the newest replaces."""

    model_config = ConfigDict(extra="ignore", allow_inf_nan=False)
    run: str = "default"
    reporter: Name
    engine: str = Field("", max_length=200)
    method: Name = Field(OUR_DRAFTER, description="`drafter`, or what the engine speculates by instead: ngram, mtp.")
    drafter_version: Name
    policy_version: Count | None = None
    rounds: Count
    accepted_tokens: Count = Field(description="Accepted drafts, before trimming at the end of a response.")
    drafted_tokens: Count
    emitted_tokens: Count | None = Field(None, description="Tokens that rounds emitted, after trimming, if known.")
    accepted_per_position: list[Count] = Field(default_factory=list, max_length=64)
    window_seconds: float = Field(0.0, ge=0)
    depth: int | None = Field(None, description="Tokens that the engine drafts a round, if known.")
    drafting: str | None = Field(None, description="`greedy` or `probabilistic`, if known.")
    final: bool = False
    canary: CanaryReport | None = None

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if self.accepted_tokens > self.drafted_tokens:
            raise ValueError(f"accepted_tokens {self.accepted_tokens} exceeds drafted_tokens {self.drafted_tokens}")
        if self.rounds == 0 and self.accepted_tokens > 0:
            raise ValueError("tokens were accepted in no round")
        return self


class AcceptanceReply(BaseModel):
    """Answer to a report. `verdict`: whether the drafter is dead, and why. `warning`: settings that differ."""

    stored: bool = True
    dead: bool = False
    verdict: str
    pushed_again: Manifest | None = None
    warning: str | None = None


@router.post("/acceptance")
async def post_acceptance(request: Request, context: Context) -> AcceptanceReply:
    """Report an engine's acceptance counts. A drafter that the engine has lost is pushed again."""
    report = await parse_body(request, AcceptanceReport)
    context.run(report.run)
    record = AcceptanceRecord(**report.model_dump(), created=time.time())
    rounds, accepted = await context.store(report.run).book(record)
    if report.canary is not None:
        await asyncio.to_thread(_record_canary, context, report, report.canary)
    judgement = await _check_dead(context, report, rounds, accepted)
    pushed = None
    if judgement.push:
        reason = f"drafter dead in {report.reporter}: {judgement.reason}"
        pushed = await context.locking(context.registry.push_again, report.run, reason)
    return AcceptanceReply(
        dead=judgement.dead, verdict=judgement.reason, pushed_again=pushed, warning=_misfit(context.settings, report)
    )


def _misfit(settings: Settings, report: AcceptanceReport) -> str | None:
    """Warn where the engine drafts differently from what replay assumes: α, gate and training would then be wrong."""
    said, wanted = [], []
    if report.depth is not None and 1 <= report.depth <= 16 and report.depth != settings.depth:
        said.append(f"{report.depth} tokens a round where the service replays and trains {settings.depth}")
        wanted.append(f"DRAFTALIGN_DEPTH={report.depth}")
    if report.drafting in ("greedy", "probabilistic") and report.drafting != settings.drafting:
        said.append(f"{report.drafting} drafts where the service assumes {settings.drafting} ones")
        wanted.append(f"DRAFTALIGN_DRAFTING={report.drafting}")
    if report.method == "ngram" or not said:
        return None
    return f"the engine makes {' and '.join(said)}; start the service with {' '.join(wanted)}"


async def _check_dead(context: ServiceContext, report: AcceptanceReport, rounds: int, accepted: int) -> Judgement:
    """Apply the dead-drafter rule to this reporter's counts of this drafter since the rule was last applied."""
    store, run, rule = context.store(report.run), report.run, context.dead_rule
    seen_rounds, seen_accepted = await store.judged(report.reporter, report.drafter_version)
    if rounds < seen_rounds or accepted < seen_accepted:  # the engine started again from zero
        seen_rounds = seen_accepted = 0
    rounds_since, accepted_since = rounds - seen_rounds, accepted - seen_accepted
    # Scores and history are read only if live α is low; on most reports it is not.
    suspect = rule.suspects(rounds_since, accepted_since)
    latest = context.registry.latest(run) if suspect else None
    replayed = await store.recent_scores(REPLAYED_BATCHES) if suspect else []
    judgement = judge(
        rule,
        rounds=rounds_since,
        accepted_tokens=accepted_since,
        replay_alpha=pooled_replay_alpha(replayed, report.drafter_version),
        is_latest=latest is not None and latest.version == report.drafter_version,
        seconds_since_push=await asyncio.to_thread(_seconds_since_push, context, run) if suspect else None,
    )
    if judgement.judged:
        await store.set_judged(report.reporter, report.drafter_version, rounds, accepted)
    return judgement


def _seconds_since_push(context: ServiceContext, run: str) -> float | None:
    pushed = context.registry.digest(run).pushed
    seconds = None if pushed is None else time.time() - pushed
    # Negative: the clock was set back. Treat the time as unknown, so that a dead drafter need not wait for the clock.
    return None if seconds is None or seconds < 0 else seconds


def _record_canary(context: ServiceContext, report: AcceptanceReport, canary: CanaryReport) -> None:
    """Record a canary's verdict in the history; a repeated report records nothing."""
    event = {
        "event": f"canary_{canary.outcome}",
        "version": canary.version,
        "reporter": report.reporter,
        "offer": canary.sequence,
    }
    if canary_key(event) in context.registry.digest(report.run).canaries:
        return
    context.registry.record(report.run, event | {"canary": canary.model_dump()})


@router.get("/alpha")
async def get_alpha(context: Context, run: RunQuery = "default") -> dict[str, Any]:
    """Read the α series, the registry's events, the newest figures, and the headline."""
    context.run(run)
    snapshot = await read_snapshot(context, run)
    return await asyncio.to_thread(run_document, run, snapshot, context.settings, context.dead_rule)
