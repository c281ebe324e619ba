"""The facts that travel between worker, engines and API: score, acceptance, gauges. Tables: state.md.

The events of a run's history are models of the same kind, in `service.monitor.events`.

Pure: no torch, no Redis, no clock. All are frozen. `read` checks what it takes from JSON; a dataclass that our code
makes is not checked again. What is unknown is None.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, ClassVar, Final, Literal, NamedTuple, TypeVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic_core import to_json

#: Drafters that a score record may carry, in the order in which people compare them.
DRAFTERS: Final = ("served", "candidate", "frozen", "ngram", "best")
#: Method of counts that were made with a published drafter; others carry the engine's name for theirs (ngram, mtp).
OUR_DRAFTER: Final = "drafter"
#: `drafting` of an engine that drafts trees. Replay computes chains, so it says nothing about such rounds.
TREES: Final = "trees"
#: Method of counts that an engine made with another client's drafter instead of the run's.
ANOTHERS_DRAFTER: Final = "anothers-drafter"
#: Follows the name of a replayed prompt whose answers have several turns. Engines take each turn for another prompt.
TURNS_MARK: Final = "+"
#: A reporter that is silent for longer is away, or its engine sleeps: what it drafts with meanwhile is not known.
AWAY_SECONDS: Final = 180.0
#: A mean gap of log-probabilities, in nats. More is no rounding: older weights drew the tokens, or features are wrong.
LARGE_GAP_NATS: Final = 0.02
#: Two-sided 95 % quantile of the normal distribution.
Z_95: Final = 1.959963984540054
_CHECKED: Final = ConfigDict(strict=True, allow_inf_nan=False)

_Kind = TypeVar("_Kind", "ScoreRecord", "AcceptanceRecord", "WorkerGauges")


@dataclass(frozen=True, slots=True)
class DrafterSums:
    """Additive statistics of one drafter over rollouts with a round; the second moments give confidence half-widths."""

    __pydantic_config__: ClassVar = _CHECKED
    tokens: float
    rounds: float
    rollouts: float = 0.0
    tokens_squared: float = 0.0
    rounds_squared: float = 0.0
    tokens_rounds: float = 0.0

    @classmethod
    def of(cls, tokens: Iterable[float], rounds: Iterable[float]) -> DrafterSums:
        """Sum one drafter's tokens and rounds per rollout. Rollouts without a round add nothing.

        `DrafterSums.of([8, 4], [2, 2]) == DrafterSums(12, 4, rollouts=2, tokens_squared=80, rounds_squared=8,
        tokens_rounds=24)`.
        """
        sums = cls(0.0, 0.0)
        for token, rnd in zip(map(float, tokens), map(float, rounds), strict=True):
            if rnd > 0:
                sums = sums + cls(token, rnd, 1.0, token * token, rnd * rnd, token * rnd)
        return sums

    def __add__(self, other: DrafterSums) -> DrafterSums:
        return DrafterSums(
            self.tokens + other.tokens,
            self.rounds + other.rounds,
            self.rollouts + other.rollouts,
            self.tokens_squared + other.tokens_squared,
            self.rounds_squared + other.rounds_squared,
            self.tokens_rounds + other.tokens_rounds,
        )

    @property
    def alpha(self) -> float:
        """Tokens per round."""
        return self.tokens / self.rounds

    @property
    def off_squared(self) -> float:
        """Sum of the squared tokens by which each rollout is off what its rounds should have emitted."""
        return self.tokens_squared - 2 * self.alpha * self.tokens_rounds + self.alpha**2 * self.rounds_squared

    @property
    def error(self) -> float | None:
        """Standard error of `alpha`, clustered as the sums are; None of fewer than two."""
        if self.rollouts < 2 or self.tokens <= 0:
            return None
        return math.sqrt(max(self.off_squared, 0.0)) / self.rounds / (1 - self._share)

    @property
    def half_width(self) -> float | None:
        """Half of the 95 % interval of `alpha`, by Student's t."""
        return None if self.error is None else student_95(max(1.0, 1 / self._share - 1)) * self.error

    @property
    def _share(self) -> float:
        """Of each of as many clusters of equal size as would weigh the same (Kish)."""
        squares = self.tokens_squared / self.tokens**2 + 2 * self.tokens_rounds / (self.tokens * self.rounds)
        return min(max((squares + self.rounds_squared / self.rounds**2) / 4, 1 / self.rollouts), 1 - 1e-9)


def student_95(degrees: float) -> float:
    """The 97.5 % quantile of Student's t by the Cornish-Fisher expansion: within 0.5 % from 4 degrees on, 3 % at 2."""
    z = Z_95
    first, second = (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / degrees + second / degrees**2 + third / degrees**3


@dataclass(frozen=True, slots=True)
class Replayed:
    """Replay of one published drafter version on a batch: sums, and expected rounds by draft position.

    `sums`: clustered by prompt, where other sums are clustered by rollout: `rollouts` and the second moments are those
    of prompts. `accepted[j]`: rounds that kept drafts 0..j. `reached[j]`: rounds that kept those before draft j and had
    a draft j. `by_prompt`: tokens and rounds of each prompt, by the name that engines give it (with `TURNS_MARK` it is
    no engine's); empty where the batch has many. `by_share`: then those of 16 groups of prompts, which serve as
    clusters instead.
    """

    __pydantic_config__: ClassVar = _CHECKED
    version: str
    sums: DrafterSums
    accepted: tuple[float, ...] = ()
    reached: tuple[float, ...] = ()
    by_prompt: dict[str, tuple[float, float]] = field(default_factory=dict)
    by_share: dict[str, tuple[float, float]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Favour:
    """Whether a batch's tokens favour what the drafter proposes (`drafter.replay.lossless`); sums over `tokens`.

    `excess`: q of the token less the mean of q under the policy. `variance`: what `excess` has if tokens are drawn from
    the policy.
    """

    __pydantic_config__: ClassVar = _CHECKED
    excess: float
    variance: float  # of few tokens that other weights drew it may be below 0; summed over batches it is not
    tokens: int

    def __add__(self, other: Favour) -> Favour:
        return Favour(self.excess + other.excess, self.variance + other.variance, self.tokens + other.tokens)

    @property
    def tilt(self) -> Estimate | None:
        """The λ for which tokens look drawn from p(v)·exp(λ·q(v)), by one score step; 0 where speculation is lossless.

        The odds of a token that the drafter is sure of are then e^λ times what the policy gives it. None: unknown.
        """
        return Estimate(self.excess / self.variance, 1.0 / self.variance) if self.variance > 0 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreRecord:
    """What every drafter would have had on one batch, and what was done with it.

    `attempt`: the number of the trainer's attempt, which its session tells; None: readers guess it.
    `segments`: stretches of tokens that were generated without others in between; each was a request to an engine.
    `offered`: rollouts, and response tokens of them, that the trainer's hook drew this batch from.
    `newest_gap`: `logprob_gap` of the tokens that the features' own weights drew, where the file tells which.
    `mean_weight`: of tokens that older weights drew, where the law that was logged cannot have drawn them.
    """

    __pydantic_config__: ClassVar = _CHECKED
    absent: ClassVar = frozenset(
        {*DRAFTERS, "replayed", "favour", "depth", "drafting", "attempt", "segments", "offered", "newest_gap"}
    ) | {"mean_weight"}
    ngram: DrafterSums | None = None
    served: DrafterSums | None = None
    candidate: DrafterSums | None = None
    frozen: DrafterSums | None = None
    best: DrafterSums | None = None
    replayed: tuple[Replayed, ...] | None = None
    policy_version: int | None = None
    attempt: int | None = None
    rollouts: int | None = None
    segments: int | None = None
    offered: tuple[int, int] | None = None
    tokens: int | None = None
    best_version: str | None = None
    logprob_sum: float | None = None
    logprob_tokens: int | None = None
    draftable_tokens: int | None = None
    reward_sum: float | None = None
    reward_count: int | None = None
    created: float = 0.0
    batch_id: str | None = None
    entry_id: str | None = None
    drafter_version: str | None = None
    depth: int | None = None
    drafting: str | None = None
    logprob_gap: float | None = None
    newest_gap: float | None = None
    mean_weight: float | None = None
    favour: Favour | None = None
    action: str | None = None
    train_seconds: float | None = None
    published_total: int | None = None
    refused_total: int | None = None
    trained_tokens_total: int | None = None

    def sums(self, drafter: str) -> DrafterSums | None:
        """What a drafter had; None where it was not scored or had no round."""
        found: DrafterSums | None = getattr(self, drafter)
        return found if found is not None and found.rounds > 0 else None

    @property
    def arrival(self) -> Arrival:
        """Sort key: the order in which batches arrived. Records that name no queue entry come first, by `created`."""
        return arrival(self.entry_id, self.created)


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptanceRecord:
    """Cumulative counts of one reporter for one drafter version and policy version.

    Without a reporter it is a sum over all of them; without a policy version, of older ones. `behind`: seconds over
    which it has drafted with this version, while it reported and `latest` named another one. `finished_requests`: that
    ended meanwhile, a cumulative count; `running_requests`: at the time of the report.
    """

    __pydantic_config__: ClassVar = _CHECKED
    absent: ClassVar = frozenset(
        {"by_prompt", "withheld", "life", "behind", "finished_requests", "running_requests"}  # of most engines
    )
    run: str = "default"
    reporter: str | None = None
    engine: str = ""
    method: Annotated[str, Field(min_length=1)] = OUR_DRAFTER
    drafter_version: str | None = None
    policy_version: int | None = None
    rounds: int = 0
    accepted_tokens: int | None = None
    drafted_tokens: int | None = None
    emitted_tokens: int | None = None
    accepted_per_position: tuple[int, ...] = ()
    window_seconds: float | None = None
    depth: int | None = None
    drafting: str | None = None
    final: bool = False
    canary: dict[str, object] | None = None
    created: float | None = None
    by_prompt: dict[str, tuple[int, int]] | None = None
    withheld: str | None = None
    life: str | None = None
    behind: float | None = None
    finished_requests: int | None = None
    running_requests: int | None = None

    @property
    def reported(self) -> float:
        """When it was reported, in Unix seconds; 0 where nobody knows."""
        return self.created or 0.0

    @property
    def emitted(self) -> int | None:
        """What rounds emitted after trimming at the end of a response, which is what replay α counts.

        Where the engine does not know it, every round is taken to have emitted its accepted drafts and one token more,
        which is high by what was trimmed. None where accepted drafts are not known either.
        """
        if self.emitted_tokens is None and self.accepted_tokens is not None:
            return self.accepted_tokens + self.rounds
        return self.emitted_tokens

    @property
    def ours(self) -> bool:
        """Whether the engine speculated with a published drafter."""
        return self.method == OUR_DRAFTER


@dataclass(frozen=True, slots=True)
class StepSample:
    """Steps that an engine took at one batch size (sequences a step, on average) and depth (0: no drafts)."""

    __pydantic_config__: ClassVar = _CHECKED
    batch: float
    depth: int
    steps: int
    seconds: float  # of all steps


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneGauges:
    """One lane of the drift monitor."""

    __pydantic_config__: ClassVar = _CHECKED
    statistic: float | None = None
    limit: float | None = None


@dataclass(frozen=True, slots=True)
class Estimate:
    """A number with the variance of its error."""

    __pydantic_config__: ClassVar = _CHECKED
    value: float
    variance: Annotated[float, Field(ge=0)]

    @property
    def low(self) -> float:
        """Lower end of the 95 % interval."""
        return self.value - Z_95 * math.sqrt(self.variance)

    @property
    def high(self) -> float:
        """Upper end of the 95 % interval."""
        return self.value + Z_95 * math.sqrt(self.variance)


class SamplingSettings(NamedTuple):
    """How answers were sampled, as their file says. `top_p` 1 and `top_k` 0: nothing is cut off."""

    temperature: float
    top_p: float = 1.0
    top_k: int = 0


@dataclass(frozen=True, slots=True)
class Resampled:
    """That answers are sampled otherwise since a fall began. `held`: that part of `Change.held`."""

    __pydantic_config__: ClassVar = _CHECKED
    before: SamplingSettings
    now: SamplingSettings
    held: Estimate


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """How the served drafter's replay α changed since the baseline, over `rollouts`; changes are of logarithms.

    `alarm`: whether the drift alarm is on, and the rollouts are those since the fall began.
    `held`: under the same version, on the same strata. `drafter`: by another version. `prompts`: by another mix of the
    strata; None where there is one. `entropy`: of the policy, on the same strata. `resampled`: None where answers are
    sampled as before.
    """

    __pydantic_config__: ClassVar = _CHECKED
    rollouts: int
    alarm: bool
    held: Estimate
    drafter: Estimate
    prompts: Estimate | None = None
    entropy: Estimate | None = None
    resampled: Resampled | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """Response tokens gathered for a draft vocabulary, and how many it waits for."""

    __pydantic_config__: ClassVar = _CHECKED
    tokens: int | None = None
    wanted: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Headroom:
    """What further training would still bring, as the worker reckoned it. Relative gains in α over the served drafter.

    `low`, `high`: 95 % interval of `gain`. `each`, `each_error`: what the next training brings, and its standard error.
    `busy`: share of the time since rollouts came that was spent on training; None: not known yet.
    """

    __pydantic_config__: ClassVar = _CHECKED
    gain: float | None = None
    low: float | None = None
    high: float | None = None
    each: float | None = None
    each_error: float | None = None
    busy: float | None = None


class WorkerGauges(BaseModel):
    """The worker's gauges; all are unknown before its first sign of life. A write changes only the fields that are set.

    `rounds_total`, `round_tokens_total`: sums since the run began by drafter, kept by the worker because the score
    records are bounded in number and a counter must never fall. `drift`: by lane, absent until the monitor's warm-up is
    over. Why nothing is trained: `unjudged`: no rollout that comes can judge it; `no_memory`: memory ran out in each
    training; `undrafted`: engines spend no time in rounds with drafts. `error`: None while there is none, "" where
    the worker has not said; `for_memory`: it waits for memory. `refused`: inode and mtime (ns) of a target file
    that the worker refused. `opening`: these two of a target file that it began to open, how often it did so without an
    end, and when last, in Unix seconds. `working`: the same of work on the run's batches.
    """

    model_config = ConfigDict(frozen=True, **_CHECKED)
    heartbeat: float | None = None
    action: str | None = None
    action_reason: str | None = None
    trained_tokens_total: int | None = None
    train_seconds_total: float | None = None
    published_total: int | None = None
    refused_total: int | None = None
    rounds_total: dict[str, float] = {}
    round_tokens_total: dict[str, float] = {}
    draft_vocab_size: int | None = None
    draft_coverage: float | None = None
    drift: dict[str, LaneGauges] = {}
    drift_alpha: float | None = None
    drift_level: float | None = None
    drift_change: Change | None = None
    vocabulary: Vocabulary | None = None
    headroom: Headroom | None = None
    unjudged: bool = False
    no_memory: bool = False
    undrafted: bool = False
    error: str | None = ""
    for_memory: bool = False
    refused: tuple[int, int] | None = None
    opening: tuple[int, int, int, float] | None = None
    working: tuple[int, int, int, float] | None = None

    @property
    def drift_alarm(self) -> bool:
        """Whether the drift alarm is raised."""
        return any(
            lane.statistic is not None and lane.limit is not None and lane.statistic > lane.limit
            for lane in self.drift.values()
        )


class Return(NamedTuple):
    """A sign that a trainer went back to policy version `to`, such as another registration.

    `time`: Unix seconds, by the clock that orders batches. `attempt`: the sign is for batches with this
    `ScoreRecord.attempt`; None: for those without one; 0: for no batch.
    """

    time: float
    to: int
    attempt: int | None = None


@dataclass(frozen=True, slots=True)
class ServedDrafter:
    """What the registry's pointer says. `created`: when the version was published, in Unix seconds."""

    version: str
    sequence: int
    created: float


State = Literal["active", "paused", "draining", "archived"]


@dataclass(frozen=True, slots=True)
class RunState:
    """What a person wants of a run, and since when (Unix seconds; None: no person has set a state).

    active: all. paused: rollouts are queued, and nothing else is done with them. draining: no more rollouts are
    accepted, those in the queue are worked on. archived: its drafters can be fetched, and nothing is accepted.
    `by`: who said so, as they named themselves.
    """

    state: State = "active"
    reason: str = ""
    by: str | None = None
    since: float | None = None

    @property
    def worked_on(self) -> bool:
        """Whether a worker is to score and train."""
        return self.state in ("active", "draining")


@dataclass(frozen=True, slots=True)
class HeldVersion:
    """A drafter version that a person holds: it is served until it is released. `since`: Unix seconds, where known.

    `by`: who holds it, as they said; None where they did not.
    """

    version: str
    reason: str
    since: float | None = None
    by: str | None = None


Arrival = tuple[int, float, int]


def arrival(entry_id: str | None, created: float = 0.0) -> Arrival:
    """Sort key of a queue entry: `1-7` comes after `1-6`, whatever a clock does."""
    milliseconds, _, number_in_it = (entry_id or "").partition("-")
    if milliseconds.isdigit() and number_in_it.isdigit():
        return 1, float(milliseconds), int(number_in_it)
    return 0, created, 0


# --- JSON
_READERS: Final[Mapping[type, TypeAdapter[Any]]] = {
    kind: TypeAdapter(kind) for kind in (ScoreRecord, AcceptanceRecord, WorkerGauges)
}


def read(kind: type[_Kind], text: str | bytes) -> _Kind | None:
    """Read a record, without its fields of another type (NaN is written as null); None where it is no JSON object."""
    found: _Kind
    try:
        found = _READERS[kind].validate_json(text)
    except ValidationError as error:
        odd = {fault["loc"][:1] for fault in error.errors(include_url=False, include_context=False)}
        if () in odd:  # no object, or text that is not Unicode
            return None
        document = {name: value for name, value in json.loads(text).items() if (name,) not in odd}
        found = _READERS[kind].validate_json(json.dumps(document))
    return found


def written(record: ScoreRecord | AcceptanceRecord) -> str:
    """A record as JSON. Drafters that were not scored are absent."""
    values = {one.name: getattr(record, one.name) for one in fields(record)}
    kept = {name: value for name, value in values.items() if value is not None or name not in record.absent}
    return to_json(kept, inf_nan_mode="null").decode()  # NaN is not JSON; "no value" is what it means here
