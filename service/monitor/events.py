"""The events of a run's history: what moved `latest`, what was sent, refused, held, measured. Table: state.md.

Pure: no torch, no Redis, no clock. The history may be of another version of the service, or damaged: `read_event`
leaves out fields of another type, and keeps fields that it does not know. What is unknown is None.
"""

from __future__ import annotations

import json
import math
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Final, Literal, NamedTuple, Self, TypeVar, get_args

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    Strict,
    ValidationError,
    model_serializer,
)

_AnEvent = TypeVar("_AnEvent", bound="Event")


class Event(BaseModel):
    """What every event has; all that is known of one whose kind this version does not know.

    `time`: Unix seconds, None before it is recorded. `sequence`: of `latest`, where it moved.
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="allow")
    event: str = ""
    time: Annotated[float, Field(allow_inf_nan=False)] | None = None
    sequence: int | None = None
    version: str | None = None

    @property
    def written(self) -> dict[str, Any]:
        """As it stands in the history: the fields that were set, also those that this version does not know."""
        first = {"time": self.time, "event": self.event}
        return {name: value for name, value in first.items() if value} | self.model_dump(exclude_unset=True)


class GateEvidence(BaseModel):
    """What the gate found of a challenger against the served version (`service.worker.promotion`), in JSON as it came.

    `gain`, with its bounds `low` and `high`: relative. `error`: the chance that the verdict is wrong.
    `trained_to`: the policy version of a candidate's last training. `judged_to`: the newest queue entry that it
    was judged on. `train_on`: whether training goes on from it; None for a candidate.
    """

    model_config = ConfigDict(frozen=True, extra="allow")
    gain: float | None = None
    promised: float | None = None
    low: float | None = None
    high: float | None = None
    looks: int | None = None
    error: float | None = None
    rollouts: int | None = None
    prompts: int | None = None
    alpha_candidate: float | None = None
    alpha_served: float | None = None
    trained_to: int | None = None
    judged_to: str | None = None
    train_on: bool | None = None

    @property
    def archived(self) -> bool:
        """Whether it is of an archived or a sent version, and not of the candidate."""
        return self.train_on is not None

    @model_serializer(mode="wrap")
    def _as_it_came(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {name: value for name, value in write(self).items() if name in self.model_fields_set}


class Decided(Event):
    """Something was decided of a version. `by`: the person who did."""

    policy_version: int | None = None
    reason: str | None = None
    by: str | None = None


class Moved(Decided):
    """`latest` moved to a version, or got another sequence number. `gate`: why the gate wanted it.

    `parent`: of a new version. `previous`: what was served before. `recovered`: by the next move, after a crash.
    `to_hold`: a person holds the version from then on. `override_canary`: engines load it whatever their canaries said.
    """

    event: Literal["published", "rolled_back", "pushed_again"] = "published"
    parent: str | None = None
    previous: str | None = None
    gate: GateEvidence | None = None
    recovered: bool = False
    to_hold: bool = False
    override_canary: bool = False


class DrafterSent(Decided):
    """A person sent a drafter, which waits for the gate."""

    event: Literal["sent"] = "sent"


class Refused(Decided):
    """The gate refused a candidate, or a sent drafter (`version`)."""

    event: Literal["refused"] = "refused"
    gate: GateEvidence | None = None


class HoldChanged(Decided):
    """A person holds the served version, or has released it."""

    event: Literal["held", "released"] = "held"


class Realised(Event):
    """What a version gained over the one before it: relative, with its 95 % interval, beside what was promised."""

    event: Literal["realised"] = "realised"
    policy_version: int | None = None
    before: str | None = None
    promised: float | None = None
    realised: float | None = None
    low: float | None = None
    high: float | None = None
    rollouts: int | None = None


class CanaryVerdict(Event):
    """An engine's agent tried a version. `offer`: the sequence number that it tried; `canary`: all that it says."""

    event: Literal["canary_passed", "canary_rolled_back"] = "canary_passed"
    reporter: str | None = None
    offer: int | None = None
    canary: dict[str, Any] | None = None


class RunStateSet(Event):
    """A person opened, paused, drained or archived the run. `previous`: its state before."""

    event: Literal["run_active", "run_paused", "run_draining", "run_archived"] = "run_active"
    reason: str | None = None
    by: str | None = None
    previous: str | None = None


class Carried(Event):
    """First event of a part of the history: what the parts before it said. `sent`: `SentDrafter` by version."""

    event: Literal["carried"] = "carried"
    published: int = 0
    pushed: list[float] = []
    sent: dict[str, Annotated[tuple[str, str | None, int], Strict(False)]] = {}


#: The model of each kind of event.
KINDS: Final[Mapping[str, type[Event]]] = {
    name: kind
    for kind in (Moved, DrafterSent, Refused, HoldChanged, Realised, CanaryVerdict, RunStateSet, Carried)
    for name in get_args(kind.model_fields["event"].annotation)
}


def read_event(written: Mapping[str, Any]) -> Event:
    """The model of an event, by its kind."""
    kind = written.get("event")
    return lenient(KINDS.get(kind, Event) if isinstance(kind, str) else Event, written)


def lenient(kind: type[_AnEvent], written: Mapping[str, Any]) -> _AnEvent:
    """An event of this kind, without its fields of another type."""
    try:
        return kind.model_validate(written)
    except ValidationError as error:
        odd = {fault["loc"][0] for fault in error.errors(include_url=False, include_context=False)}
        return kind.model_validate({name: value for name, value in written.items() if name not in odd})


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEvent:
    """An event as the API passes it on. `text`: all of it as JSON, a fifth of the memory that its values would take."""

    event: str | None = None
    time: float | None = None
    sequence: int | None = None
    version: str | None = None
    text: bytes

    @classmethod
    def of(cls, written: Mapping[str, object]) -> Self:
        """Take the fields that are of the right type."""
        event, time, sequence, version = (written.get(name) for name in ("event", "time", "sequence", "version"))
        try:
            text = json.dumps(written, separators=(",", ":"), allow_nan=False).encode()
        except ValueError:  # NaN is not JSON; "no value" is what it means here
            mended = json.loads(json.dumps(written), parse_constant=lambda _: None)
            text = json.dumps(mended, separators=(",", ":")).encode()
        return cls(
            event=sys.intern(event) if isinstance(event, str) else None,
            time=float(time) if isinstance(time, (int, float)) and math.isfinite(time) else None,
            sequence=sequence if isinstance(sequence, int) else None,
            version=sys.intern(version) if isinstance(version, str) else None,
            text=text,
        )

    @property
    def written(self) -> Mapping[str, object]:
        """All of it, as it stands in the history."""
        found: Mapping[str, object] = json.loads(self.text)
        return found


#: So many of the newest sequence numbers are kept with their offers.
_SEQUENCES: Final = 64


class Offer(NamedTuple):
    """Since when `latest` has named a version under one sequence number, in Unix seconds."""

    began: float
    version: str


@dataclass(slots=True)
class Moves:
    """What `/metrics` tells of a run's history. `counts`: its events by kind, as far as they are kept.

    `realised`: the newest that says what a version gained. `offers`: what each of the newest sequence numbers
    offered, by the first event of it.
    """

    counts: Counter[str] = field(default_factory=Counter)
    realised: Realised = field(default_factory=Realised)
    offers: dict[int, Offer] = field(default_factory=dict)

    def add(self, event: Event) -> None:
        """Take the next event."""
        self.counts[event.event] += 1
        if isinstance(event, Realised):
            self.realised = event
        if event.sequence is not None and event.time is not None:
            self._begin(event.sequence, Offer(event.time, str(event.version)))

    def replaced(self, version: str | None) -> float | None:
        """Since when `latest` has named other versions than this one, in Unix seconds. None: it names this one.

        For a version older than all known offers: since the oldest known offer. None also where none is known.
        """
        since = None
        for _, offer in sorted(self.offers.items()):
            if offer.version == version:
                since = None
            elif since is None:
                since = offer.began
        return since

    def __add__(self, later: Moves) -> Moves:
        realised = later.realised if later.counts["realised"] else self.realised
        both = Moves(self.counts + later.counts, realised, dict(self.offers))
        for sequence, offer in later.offers.items():
            both._begin(sequence, offer)
        return both

    def _begin(self, sequence: int, offer: Offer) -> None:
        self.offers.setdefault(sequence, offer)
        if len(self.offers) > _SEQUENCES:
            del self.offers[next(iter(self.offers))]
