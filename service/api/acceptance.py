"""`POST /acceptance` and `GET /alpha`: what engines count, and the α series that it becomes part of."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from typing import Annotated, Final, Literal, Self

from fastapi import APIRouter, Query, Request, Response
from pydantic import BaseModel, ConfigDict, Field, model_validator

from rl_hooks.wire import COUNTED_DIGITS, COUNTED_PROMPTS
from service.api.auth import Caller, check_covers
from service.api.context.answers import AlphaAnswer
from service.api.context.audited import audit, audit_now
from service.api.context.context import Context, RunQuery, ServiceContext
from service.api.drafters import tagged
from service.api.problems import Problem
from service.api.snapshot import read_attempt, read_followed, run_text
from service.api.uploads import json_body, parse_body
from service.errors import LatestMoved, RegistryBusy, ServiceError
from service.monitor.events import CanaryVerdict
from service.monitor.live.blocks import Block
from service.monitor.live.watch import EngineVerdict, VerdictName, push_is_due, watch
from service.monitor.records import OUR_DRAFTER, TREES, AcceptanceRecord, StepSample
from service.storage.drafters.versions import Manifest
from service.storage.reports.drafting import Drafting, is_settled, learn_drafting
from service.storage.runs import check_open

log = logging.getLogger("draftalign.api")

router = APIRouter(tags=["acceptance"])

PromptDigits = Annotated[str, Field(pattern=rf"^[0-9a-f]{{{COUNTED_DIGITS}}}$")]
Count = Annotated[int, Field(ge=0, lt=1 << 53, strict=True)]
Name = Annotated[str, Field(min_length=1, max_length=200, pattern=r"^[^/\x00-\x1f\x7f][^\x00-\x1f\x7f]*$")]


#: Most tokens that a round may accept: engines draft fewer.
_MAX_DEPTH: Final = 64
_NOT_COMPARED: Final = (
    "it drafts trees, and replay knows chains alone, so its counts are kept and compared with nothing; start SGLang "
    "with --speculative-eagle-topk 1, --speculative-num-steps and --speculative-num-draft-tokens"
)
#: Tokens by which counters that are read one after the other may disagree.
_READ_APART: Final = 1024


class CanaryReport(BaseModel):
    """What an agent's canary found about a version that it had just loaded."""

    model_config = ConfigDict(extra="ignore", allow_inf_nan=False)
    version: Name
    previous: str = Field(max_length=200)
    alpha: float | None = None
    previous_alpha: float | None = None
    rounds: Count | None = None
    previous_rounds: Count | None = None
    outcome: Literal["passed", "rolled_back"]
    sequence: Count = Field(description="Of the manifest that offered the version.")


class StepTimes(BaseModel):
    """Steps that an engine took at one mean batch size and draft depth, since it or its agent began."""

    model_config = ConfigDict(extra="ignore", allow_inf_nan=False)
    batch: float = Field(ge=0.01, le=65536, description="Sequences a step, on average.")
    depth: int = Field(ge=0, le=64, description="Tokens drafted a round; 0: none.")
    steps: Count
    seconds: float = Field(ge=0, le=1e12, description="Time that all these steps took: 1e-6 to 1,000 s each.")

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if not 1e-6 * self.steps <= self.seconds <= 1e3 * self.steps:
            raise ValueError(f"{self.steps} steps in {self.seconds} s are not 1e-6 to 1,000 s each")
        return self


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
    by_prompt: dict[PromptDigits, tuple[Count, Count]] = Field(
        default_factory=dict,
        max_length=COUNTED_PROMPTS,
        description=f"Emitted tokens and rounds by the first {COUNTED_DIGITS} digits of a prompt's hash, if known.",
    )
    finished_requests: Count | None = Field(None, description="Requests that ended meanwhile, if known.")
    running_requests: Count | None = Field(None, description="Requests that run now, if known.")
    depth: int | None = Field(None, strict=True, description="Tokens that the engine drafts a round, if known.")
    drafting: str | None = Field(None, description="`greedy`, `probabilistic` or `trees`, if known.")
    final: bool = False
    withheld: str | None = Field(
        None, max_length=400, description="Why the engine does not have the newest version, where it does not."
    )
    life: Name | None = Field(
        None, description="Name of the time since which the counts are cumulative: with another they begin again at 0."
    )
    canary: CanaryReport | None = None
    step_times: list[StepTimes] = Field(default_factory=list, max_length=64, description="From which speed-up is told.")

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if self.accepted_tokens > self.drafted_tokens:
            raise ValueError(f"accepted_tokens {self.accepted_tokens} exceeds drafted_tokens {self.drafted_tokens}")
        if self.accepted_tokens > _MAX_DEPTH * self.rounds:
            raise ValueError(
                f"{self.accepted_tokens} accepted_tokens in {self.rounds} rounds; at most {_MAX_DEPTH} a round"
            )
        return self

    def check_emitted(self) -> str | None:
        """Drop emitted tokens that these rounds cannot have emitted. Returns what is wrong with them, or None.

        Each round adds one token of the policy's own, and a response's end trims some.
        """
        least, most, said = self.rounds // 8, self.rounds + self.accepted_tokens, self.emitted_tokens
        if said is None or least - _READ_APART <= said <= most + most // 8 + _READ_APART:
            return None
        self.emitted_tokens = None
        return (
            f"emitted_tokens is left out: {said} of {self.rounds} rounds and {self.accepted_tokens} accepted tokens, "
            f"which emit {least} to {most} (tokens of steps without drafts do not belong to it)"
        )


class AcceptanceReply(BaseModel):
    """Answer to a report. `verdict`: how live and replay α compare. `warning`: settings that differ."""

    stored: bool = True
    engine: VerdictName
    dead: bool = False
    verdict: str
    pushed_again: Manifest | None = None
    warning: str | None = None


@router.post(
    "/acceptance", responses={409: {"description": "The run is archived."}}, openapi_extra=json_body(AcceptanceReport)
)
async def post_acceptance(request: Request, context: Context, caller: Caller) -> AcceptanceReply:
    """Report an engine's acceptance counts; they are compared with replay. A drafter that it lost is pushed again."""
    report = await parse_body(request, AcceptanceReport)
    check_covers(caller, report.run)
    await context.looks.find(report.run, report.drafter_version)
    context.run(report.run)
    check_open(context.layout, report.run)
    await context.redis.check()
    await _check_version(context, report)
    if report.canary is not None:
        await context.looks.catch_up(report.run)
        _check_canary(context, report.run, report.canary)
    odd = report.check_emitted()
    counts = report.model_dump(exclude={"step_times", "by_prompt"})
    record = AcceptanceRecord(**counts, by_prompt=report.by_prompt or None, created=time.time())
    steps = [StepSample(one.batch, one.depth, one.steps, one.seconds) for one in report.step_times if one.steps]
    blocks = await context.store(report.run).book(record, steps, outdated=_is_outdated(context, report))
    if report.canary is not None:
        found = report.canary
        event = CanaryVerdict(
            event="canary_passed" if found.outcome == "passed" else "canary_rolled_back",
            version=found.version,
            reporter=report.reporter,
            offer=found.sequence,
            canary=found.model_dump(),
        )
        await context.locking(context.registry.history.record_verdict, report.run, event)
    verdict = await _judge(context, report, blocks)
    trees = _NOT_COMPARED if report.drafting == TREES else None
    pushed = await _push_again(request, context, report, verdict) if verdict.name == "dead" else None
    return AcceptanceReply(
        engine=verdict.name,
        dead=verdict.name == "dead",
        verdict=verdict.text,
        pushed_again=pushed,
        warning="; ".join(filter(None, (trees, await _follow_drafting(context, report), odd))) or None,
    )


def _is_outdated(context: ServiceContext, report: AcceptanceReport) -> bool:
    """Whether another version is served than the one that the engine drafted with."""
    try:
        served = context.of(report.run).pointer.served()
    except (OSError, ServiceError):  # a damaged run: its counts are taken all the same
        return False
    return served is not None and served.manifest.version != report.drafter_version


async def _follow_drafting(context: ServiceContext, report: AcceptanceReport) -> str | None:
    """Adopt the depth and drafting that all engines of the run report. Returns a warning where this engine differs.

    Replay, gate and training are wrong for such an engine.
    """
    run, fixed = report.run, context.settings.model_fields_set
    supposed = Drafting.supposed(context.settings_of(run))
    said = supposed.with_reported(report.depth, report.drafting)
    if said == supposed or report.method == "ngram":
        return None
    differing = {name for name, value in said if value != getattr(supposed, name)}
    free = differing - fixed
    ours = report.method == OUR_DRAFTER and not is_settled(context.layout, run)
    if free and ours and await context.of(run).evidence.all_draft(said):
        try:
            await context.locking(learn_drafting, context.layout, run, said)
        except (OSError, RegistryBusy) as error:  # the next report tries it again
            log.error("run %s: how its engines draft cannot be written: %s", run, error)
            return None
        log.warning("run %s: its engines draft %s, %d tokens a round", run, said.drafting, said.depth)
        differing, free = differing & fixed, set()
    facts = {
        "depth": f"{said.depth} tokens a round where the service replays and trains {supposed.depth}",
        "drafting": f"{said.drafting} drafts where the service assumes {supposed.drafting} ones",
    }
    if not differing:
        return None
    wanted = " ".join(f"DRAFTALIGN_{name.upper()}={value}" for name, value in said if name in differing - free)
    advice = [f"start the service with {wanted}"] if wanted else []
    advice += ["let all engines of a run draft alike"] if free else []
    told = " and ".join(facts[name] for name in facts if name in differing)
    return f"the engine makes {told}; {'; '.join(advice)}"


async def _judge(context: ServiceContext, report: AcceptanceReport, blocks: Sequence[Block]) -> EngineVerdict:
    """Judge this engine by itself: a report costs the same however many others there are. `GET /alpha` judges all."""
    replays = (await context.of(report.run).evidence.recent()).replays
    found = await asyncio.to_thread(watch, {report.reporter: blocks}, replays, context.live_rule(report.run))
    why = _NOT_COMPARED if report.drafting == TREES else "no rounds with a published drafter so far"
    nothing = EngineVerdict(report.reporter, "unknown", why)
    return found.get(report.reporter) or nothing


async def _push_again(
    request: Request, context: ServiceContext, report: AcceptanceReport, verdict: EngineVerdict
) -> Manifest | None:
    """Push the drafter that the engine lost again, if it is the served one and a push is due.

    `verdict` is of this engine by itself. Where batches hold some answers of a prompt, how many it has is known only
    from the counts of all engines, so these are asked before a push. It is audited under the reporter's token. If the
    audit log cannot be written, nothing is pushed; the counts are stored all the same.
    """
    run, latest = report.run, context.registry.latest(report.run)
    if latest is None or latest.version != report.drafter_version:
        return None
    pushes = (await asyncio.to_thread(context.registry.history.digest, run)).pushed
    if not push_is_due(context.live_rule(run), verdict, list(pushes), time.time()):
        return None
    beside_all = (await context.of(run).evidence.engines(fresh=True)).watch.get(report.reporter)
    if beside_all is None or beside_all.name != "dead":
        return None
    reason = f"drafter dead in {report.reporter}: {verdict.text}"
    try:
        await audit_now(request, "push again", run=run, version=latest.version, reason=reason)
    except Problem:
        return None  # the log says why
    try:
        return await context.locking(context.registry.push_again, run, reason, latest.sequence)
    except LatestMoved:  # while the audit log was written: by another report, or a person
        audit(request, "push again: not done, latest has just moved")
        return None


async def _check_version(context: ServiceContext, report: AcceptanceReport) -> None:
    """Refuse counts of another run's drafter: an agent may go on after its run was deleted and the name used again."""
    run, version = report.run, report.drafter_version
    if report.method == OUR_DRAFTER and not await asyncio.to_thread(context.registry.may_be_of, run, version):
        raise Problem(
            422,
            "other-runs-drafter",
            f"run {run!r} never had the version {version[:80]!r}: its counts are not booked. Was the run deleted, or "
            "its state replaced? Then restart the agent with an empty cache; GET /drafters has the versions",
            field="drafter_version",
        )


def _check_canary(context: ServiceContext, run: str, canary: CanaryReport) -> None:
    """Refuse a verdict on a version that was never offered: each verdict takes a line on the disk."""
    latest = context.registry.latest(run)
    newest = 0 if latest is None else latest.sequence
    if canary.sequence > newest or canary.version not in context.registry.versions(run):
        raise Problem(
            422,
            "bad-canary",
            f"run {run!r} has no version {canary.version[:80]!r} offered as sequence {canary.sequence}; the newest "
            f"sequence is {newest}, GET /drafters has the versions",
            field="canary",
        )


@router.get("/alpha", responses={200: {"model": AlphaAnswer}, 304: {"description": "Still the same."}})
async def get_alpha(
    request: Request,
    context: Context,
    run: RunQuery = "default",
    attempt: Annotated[
        int | None, Query(ge=1, description="Which attempt of the trainer; by default the last.")
    ] = None,
    since: Annotated[
        str | None, Query(max_length=64, description="`cursor` of the answer before: only what changed of the last.")
    ] = None,
) -> Response:
    """Read the α series and the registry's events of an attempt, the newest figures, and the headline."""
    context.run(run)
    await context.redis.check()

    async def text() -> bytes:
        view = await (read_followed(context, run, since) if attempt is None else read_attempt(context, run, attempt))
        return await asyncio.to_thread(run_text, run, view, context.settings_of(run))

    return tagged(request, await context.answers.get(("alpha", run, attempt, since), text))
