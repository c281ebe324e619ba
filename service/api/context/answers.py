"""What calls answer, for the OpenAPI document: models of the records that answers are written from.

Most of them only declare an answer, and do not serialise it: a second pass would cost time, and `GET /alpha` joins
pieces of kept JSON. `tests/service/api/test_api_answers.py` checks real answers against them.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, Field

from service.monitor.alpha import Point
from service.monitor.counts import ServerLine
from service.monitor.current import Current
from service.monitor.events import (
    CanaryVerdict,
    DrafterSent,
    Event,
    HoldChanged,
    Moved,
    Realised,
    Refused,
    RunStateSet,
)
from service.monitor.headline import Headline
from service.monitor.headroom import State as HeadroomState
from service.monitor.live.watch import VerdictName
from service.monitor.records import HeldVersion, State
from service.monitor.worth import Worth
from service.storage.drafters.versions import Manifest
from service.storage.queue.dead import BatchFacts, DeadBatch
from service.storage.runs import Registered

#: An event of a run's history, by its kind; of a kind that this version does not know, the last one.
HistoryEvent = Annotated[
    Moved | DrafterSent | Refused | HoldChanged | Realised | CanaryVerdict | RunStateSet | Event,
    Field(union_mode="left_to_right"),
]


class Status(BaseModel):
    """Answer of a probe."""

    status: Literal["ok", "ready"]


class RunLine(BaseModel):
    """One run of `GET /runs`. `created`: Unix seconds. Null: its files cannot be read; the headline says why."""

    run: str
    created: float | None
    drafter: str | None
    state: State | None
    headline: Headline


class RunList(BaseModel):
    """Answer of `GET /runs`."""

    runs: list[RunLine]


class RolloutCounts(BaseModel):
    """What became of a run's batches. `not_finite_total`: rollouts left out of batches that were used."""

    accepted_total: int
    trained_total: int
    skipped_total: int
    dead_total: int
    waiting: int
    not_finite_total: int
    last_dead_reason: str


class StateChange(BaseModel):
    """Who set a run's state, why and since when (Unix seconds)."""

    reason: str
    by: str | None
    since: float


class RunAnswer(Registered):
    """A run: its registration, and how it stands. Null is not known. `state_change`: null where nobody set it.

    `warning`: only of a registration: what of it is ignored, of the kind that `warning_code` names.
    """

    headline: Headline
    rollouts: RolloutCounts
    alpha: float | None
    alpha_live: float | None
    headroom: float | None
    state: State
    state_change: StateChange | None
    held: HeldVersion | None
    depth: int
    drafting: str
    drafter: str | None
    reference_version: str | None
    latest_head: int | None
    latest_policy: int | None
    worker_error: str | None
    draft_coverage: float | None
    direct_uploads: bool
    optional_tensors: list[str]
    warning: str | None = None
    warning_code: Literal["ignored"] | None = None


class Deletion(BaseModel):
    """Answer while a run is being deleted. `detail` is for people."""

    run: str
    state: Literal["deleting"] = "deleting"
    detail: str


class HeadReceipt(BaseModel):
    """Answer to a head."""

    run: str
    policy_version: int
    latest_head: int


class DriftRequest(BaseModel):
    """Answer to a request about the drift alarm. `alarm`: whether there is one now."""

    run: str
    action: Literal["acknowledge", "reset"]
    alarm: bool
    request: str


class BatchFate(BatchFacts):
    """What became of a batch."""

    run: str
    state: Literal["queued", "trained", "skipped", "dead"]
    known_rollouts: int


class DeadPage(BaseModel):
    """A page of a run's dead batches, newest first. `older`: `before` of the next page; null: there is none."""

    run: str
    total: int
    file_bytes: int
    dead: list[DeadBatch]
    older: str | None


class PutBack(BaseModel):
    """Answer to putting a dead batch back. `put_back`: whether this call did it."""

    run: str
    batch_id: str
    state: Literal["queued", "trained", "skipped", "dead"]
    put_back: bool
    known_rollouts: int


class DrafterList(BaseModel):
    """Answer of `GET /drafters`. `damaged`: versions whose manifest cannot be read, and why."""

    run: str
    latest: Manifest | None
    held: HeldVersion | None
    waiting: list[str]
    versions: list[Manifest]
    damaged: dict[str, str]
    history: list[HistoryEvent]


class BatchWorth(BaseModel):
    """What acceptance is worth at one batch size. `step_speedup`: of the RL step, where its share was asked for."""

    batch: int
    best_depth: int
    best_speedup: float
    speedup: float
    step_speedup: float | None = None


class WorthAnswer(BaseModel):
    """Answer of `GET /runs/{run}/worth`. `unknown` says why nothing is known."""

    run: str
    unknown: str | None
    depth: int | None
    batches: list[BatchWorth]
    costs_from: int | None
    plan: list[tuple[int, int, int]] | None


class AttemptLine(BaseModel):
    """One attempt of the trainer. `began`: Unix seconds; null: it is the first."""

    began: float | None
    batches: int
    first_policy: int | None
    last_policy: int | None


class EngineLine(BaseModel):
    """How one engine's live α compares with replay."""

    reporter: str
    verdict: VerdictName
    evidence: str
    drafter_version: str | None
    rounds: int
    alpha_live: float | None
    alpha_replay: float | None
    log_ratio: float | None
    log_ratio_error: float | None


class HeadroomLine(BaseModel):
    """What further training would still bring, and what that says to do."""

    gain: float | None
    low: float | None
    high: float | None
    each: float | None
    each_error: float | None
    busy: float | None
    state: HeadroomState
    text: str


class Fraction(BaseModel):
    """A change as a fraction of α, with its 95 % interval."""

    change: float
    low: float
    high: float


class CauseLine(BaseModel):
    """Why α fell; `cause` is null where no part of the change is a fall beyond chance."""

    cause: str | None
    text: str
    rollouts: int
    parts: dict[str, Fraction]
    entropy: Fraction | None


class AlphaAnswer(BaseModel):
    """Answer of `GET /alpha`. With `since`: `points` and `events` that changed, beside `gone` and `kept_events`."""

    run: str
    depth: int
    points: list[Point]
    events: list[HistoryEvent]
    servers: list[ServerLine]
    attempt: int
    attempts: list[AttemptLine]
    engines: list[EngineLine]
    publishing_held: str | None
    current: Current | None
    headroom: HeadroomLine
    worth: Worth
    headline: Headline
    cause: CauseLine | None
    cursor: str | None = None
    gone: list[int] | None = None
    kept_events: int | None = None
