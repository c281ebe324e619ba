"""The α series: score records and acceptance records of one run, pooled per policy version.

Pure: no torch, no Redis, no clock. `GET /alpha` and the page's charts show this document, of one attempt of the trainer
(`attempts`). What is true *now* is not its last point but `service.monitor.current`.

Rules:
* Sums are pooled before they are divided (α = tokens / rounds). A mean of ratios is another quantity, 4 % off on the
  same data.
* What has no data is None, never 0: an α of 0 does not exist, and a chart would draw it.
* The best drafter and the publication lag come only from batches that all drafters were scored on, those with `frozen`.
  Other batches have other prompts, and fewer drafters to choose the best from.
* Confidence half-widths appear where the records carry second moments (`DrafterSums`): the linearised ratio
  estimator, by Student's t, whose parts add up over records. Answers of one prompt are alike (`_sibling_effect`).
"""

from __future__ import annotations

import bisect
import math
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, ClassVar, Final, Generic, NamedTuple, Protocol, Self, TypeVar

from pydantic import ConfigDict

from service.monitor.counts import LiveAlpha, by_method, live_sums
from service.monitor.events import RunEvent
from service.monitor.records import (
    DRAFTERS,
    AcceptanceRecord,
    Arrival,
    DrafterSums,
    Return,
    ScoreRecord,
    student_95,
)


@dataclass(frozen=True, slots=True)
class Compared:
    """The served drafter beside the frozen one, on the same rollouts.

    `policy_version`: that of the last batch. `drafter_version`: the one that served most of the tokens. `low`, `high`:
    the 95 % interval of α_served / α_frozen, by prompt; None where prompts and batches are too few to tell.
    `by_chance`: the difference that two equally good drafters show on these rollouts by chance, as a fraction (95 %).
    It is measured on these two or, while they are one drafter, on served and candidate; None: it is not known.
    """

    policy_version: int
    alpha_frozen: float
    alpha_served: float
    low: float | None = None
    high: float | None = None
    by_chance: float | None = None
    drafter_version: str | None = None

    @classmethod
    def of(cls, scores: Sequence[ScoreRecord]) -> Compared | None:
        """On records that have both; None where there are none."""
        served, frozen = _pool(scores, "served"), _pool(scores, "frozen")
        if served is None or frozen is None:
            return None
        newest, ratio = scores[-1].policy_version or 0, served.alpha / frozen.alpha
        version = _heaviest((record.drafter_version, _tokens(record, "served")) for record in scores)
        known = _ratio_error(scores, "frozen")
        if known is None:
            return cls(newest, frozen.alpha, served.alpha, drafter_version=version)
        reach, error = math.exp(known), known or _ratio_error(scores, "candidate")
        by_chance = None if error is None else math.expm1(error)
        return cls(newest, frozen.alpha, served.alpha, ratio / reach, ratio * reach, by_chance, version)


#: How many clusters, or batches, the error of a ratio needs.
_LEAST_CLUSTERS: Final = 8


def _ratio_error(scores: Sequence[ScoreRecord], drafter: str) -> float | None:
    """Half of the 95 % interval of log(α_served / α_drafter), clustered by prompt (HC2), by Student's t.

    `drafter`: a role or a version. Clusters are the prompts that records name, or their groups of prompts. A record
    that names none for both drafters is a cluster itself. Where all are of one prompt, each policy version is a
    cluster. None: there are too few.
    """
    by_prompt, by_policy = (defaultdict[str | int | None, list[float]](lambda: [0.0, 0.0]) for _ in range(2))
    for record in scores:
        (ours, served), (theirs, other) = _scored(record, "served"), _scored(record, drafter)
        pairs = {prompt: (served[prompt][1], other[prompt][1]) for prompt in served.keys() & other.keys()}
        if not pairs and ours is not None and theirs is not None:
            pairs = {record.batch_id or "": (ours.rounds, theirs.rounds)}
        for prompt, rounds in pairs.items():
            for cluster in by_prompt[prompt], by_policy[record.policy_version]:
                cluster[:] = [sum(both) for both in zip(cluster, rounds, strict=True)]
    clusters = by_prompt if len(by_prompt) > 1 else by_policy
    if len(clusters) < 2 or max(len(clusters), len(scores)) < _LEAST_CLUSTERS:
        return None
    served_total, other_total = (math.fsum(column) for column in zip(*clusters.values(), strict=True))
    shares = [(a / served_total, b / other_total) for a, b in clusters.values()]
    degrees = max(1.0, 1.0 / math.fsum(((a + b) / 2) ** 2 for a, b in shares) - 1.0)
    variance = math.fsum((a - b) ** 2 / max(1.0 - (a + b) / 2, 1e-9) for a, b in shares)
    return math.sqrt(variance) * student_95(degrees)


def _scored(record: ScoreRecord, drafter: str) -> tuple[DrafterSums | None, Mapping[str, tuple[float, float]]]:
    """A drafter's sums in a record, and its tokens and rounds by prompt or group. `drafter`: a role or a version."""
    prompts = {one.version: one.by_prompt or one.by_share for one in record.replayed or ()}
    oldest = min(prompts, default="")  # of all versions that are kept
    version = {"served": record.drafter_version or "", "frozen": oldest}.get(drafter, drafter)
    sums = record.sums(drafter) if drafter in DRAFTERS else _by_name(record).get(drafter)
    return sums, prompts.get(version, {})


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What batches and engines gave, of one policy version or of the newest that have it; None: not known.

    `alpha_live` is of published drafters. The last three are sums since the run began, as they stood then.
    """

    __pydantic_config__: ClassVar = ConfigDict(json_schema_serialization_defaults_required=True)
    drafter_version: str | None = None
    alpha_served: float | None = None
    alpha_served_half_width: float | None = None
    alpha_candidate: float | None = None
    alpha_candidate_half_width: float | None = None
    alpha_frozen: float | None = None
    alpha_frozen_half_width: float | None = None
    alpha_ngram: float | None = None
    alpha_ngram_half_width: float | None = None
    alpha_best: float | None = None
    alpha_best_half_width: float | None = None
    best_version: str | None = None
    publication_lag: float | None = None
    entropy: float | None = None
    reward: float | None = None
    alpha_live: float | None = None
    live_rounds: int | None = None
    action: str | None = None
    published_total: float | None = None
    refused_total: float | None = None
    trained_tokens_total: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Point(Figures):
    """The pooled records of one policy version.

    Other methods than published drafters stand in `live_by_method`. Of `rollouts`, `rollouts_replayed` gave
    `alpha_served`.
    """

    policy_version: int
    rollouts: int
    rollouts_replayed: int | None
    tokens: int
    live_by_method: Mapping[str, LiveAlpha]


#: Policy versions by which batches may be late, where no setting says so.
_USUAL_LAG: Final = 16
#: So many batches in a row show that a trainer started again; fewer may be late ones.
_IN_A_ROW: Final = 8
#: From this number of batches on an attempt is no longer provisional. Fewer may be late rollouts.
_SURE_ATTEMPT: Final = 3
#: Events about a version that was published before.
_OF_OLDER_VERSIONS: Final = frozenset({"rolled_back", "pushed_again", "held", "released"})


class Scored(Protocol):
    """What tells attempts apart: of a score record, or of what is kept of one."""

    @property
    def policy_version(self) -> int | None:
        """None where it is not known."""

    @property
    def attempt(self) -> int | None:
        """As `ScoreRecord.attempt`."""

    @property
    def arrival(self) -> Arrival:
        """Sort key: the order in which batches arrived."""

    @property
    def created(self) -> float:
        """Unix seconds."""


_Scored = TypeVar("_Scored", bound=Scored)


@dataclass(frozen=True, slots=True)
class Turn:
    """Where an attempt ends and the next one begins. `time`: when the first batch of the next one came (Unix seconds).

    `last`: when the last batch before that came. Between the two, engines already draft for the next attempt: what they
    counted then with policy versions below `below` is of that one. `told`: by a session, and not guessed.
    """

    time: float
    last: float
    below: float
    told: bool = False

    def is_before(self, record: AcceptanceRecord) -> bool:
        """Whether counts are of the next attempt, by when they were reported last."""
        early = record.policy_version is not None and record.policy_version < self.below
        return record.reported >= (self.last if early else self.time)


@dataclass(frozen=True, slots=True)
class Attempt(Generic[_Scored]):
    """One attempt of a trainer at the run. The next begins where it went on from an earlier checkpoint, or from none.

    `opened`, `closed`: None: it is the first, or it has not ended. `scores`: in order of arrival.
    """

    opened: Turn | None
    closed: Turn | None
    scores: Sequence[_Scored]

    @property
    def began(self) -> float | None:
        """Unix seconds; None: it is the first."""
        return None if self.opened is None else self.opened.time

    def has(self, time: float | None) -> bool:
        """Whether it was under way at this time. None, of a record without a time, is in the first attempt only."""
        at = time or 0.0
        return (self.opened is None or at >= self.opened.time) and (self.closed is None or at < self.closed.time)

    def counted(self, record: AcceptanceRecord) -> bool:
        """Whether engines counted this in it."""
        begun = self.opened is None or self.opened.is_before(record)
        return begun and not (self.closed is not None and self.closed.is_before(record))


def attempts(
    scores: Iterable[_Scored], max_lag: int | None = None, returns: Sequence[Return] = ()
) -> list[Attempt[_Scored]]:
    """Tell a trainer's attempts apart, oldest first; at least one. The rule: docs/reference/state.md, "Attempts".

    A batch has the number of its attempt (`ScoreRecord.attempt`) where a session told it; other batches are guessed.
    `returns`: signs that a trainer went back, ascending by time. Batches are taken in order of arrival, and compared
    with the highest version so far; a single batch of an absurd version does not count as that.
    """
    reach = _USUAL_LAG if max_lag is None else max_lag
    records = sorted((s for s in scores if s.policy_version is not None), key=lambda score: score.arrival)
    policies = [record.policy_version or 0 for record in records]
    starts, turns, top = [0], list[Turn](), -math.inf
    falls = any(policy < highest - reach for policy, highest in zip(policies, accumulate(policies, max), strict=True))
    kept = [one for one in returns if records and one.time > arrived(records[0])]  # what was before is forgotten
    waiting = deque(kept)
    #: By attempt and policy version of a sign: index of the last batch that may be the first one after it.
    registered: dict[tuple[int | None, int], int] = {}
    numbers = [record.attempt for record in records]
    last_of = {number: index for index, number in enumerate(numbers)}
    number: int | None = None  # the highest so far
    for index, policy in enumerate(policies) if falls or kept or len(last_of) > 1 else ():
        while waiting and waiting[0].time < arrived(records[index]):
            mark = waiting.popleft()
            registered[mark.attempt, mark.to] = index + _IN_A_ROW - 1
        own, ahead = numbers[index], policies[index : index + _IN_A_ROW]
        told = own is not None and number is not None and own > number
        near_one = any(
            of == own and index <= last and policy - to < top - policy for (of, to), last in registered.items()
        )
        returned = near_one and policy < top - 1 and max(ahead[:3]) < top
        fell = own is None and len(ahead) == _IN_A_ROW and max(ahead) < top - reach
        # Before the last batch of the attempt's number, batches without a number are an engine's, beside the trainer's.
        guessed = (returned or fell) and (own is not None or number is None or last_of[number] < index)
        if told or guessed:
            starts.append(index)
            times = arrived(records[index]), arrived(records[index - 1])
            turns.append(Turn(*times, below=(top + policy) / 2.0, told=told))
            registered, top = {}, -math.inf
        if own is not None:
            number = max(own, number or own)
        near = policies[max(starts[-1], index - _IN_A_ROW + 1) : index + _IN_A_ROW]
        if sum(other >= policy - reach for other in near) > 1:
            top = max(top, policy)
    spans = zip(pairwise([None, *turns, None]), pairwise([*starts, len(records)]), strict=True)
    return [Attempt(opened, closed, records[low:high]) for (opened, closed), (low, high) in spans]


class Abandoned(NamedTuple):
    """The attempt that a trainer abandoned last. Times are Unix ms; -inf: there is none.

    `until`: when its last batch came. `told`: whether a session told of the abandonment; else it is guessed.
    `last_told`: when the last batch came whose session is of that attempt.
    """

    until: float = -math.inf
    told: bool = False
    last_told: float = -math.inf

    @classmethod
    def of(cls, found: Sequence[Attempt[_Scored]]) -> Self:
        """The last attempt but one. A guess counts once the next attempt has `_SURE_ATTEMPT` batches."""
        last = found[-1]
        if last.opened is None or not (last.opened.told or len(last.scores) >= _SURE_ATTEMPT):
            return cls()
        told = last.opened.told
        of_session = [arrived(one) for one in found[-2].scores if told and one.attempt is not None]
        return cls(round(last.opened.last * 1000.0), told, max(of_session, default=-math.inf) * 1000.0)

    def has_not(self, head_ns: int, came: float) -> bool:
        """Whether a head is of the next attempt, and so not for a batch of this one that came before the head.

        `head_ns`: when the head came, in Unix ns. `came`: when the batch did, in Unix ms. A head that came before the
        last batch of this attempt's session is of this attempt, and was late.
        """
        return came <= self.until and not head_ns < self.last_told * 1e6


def arrived(score: Scored) -> float:
    """When a batch came, in Unix seconds."""
    known, milliseconds, _ = score.arrival
    return milliseconds / 1000.0 if known else score.created


def placed(history: Iterable[RunEvent], scores: Iterable[Scored]) -> Iterator[RunEvent]:
    """Pass the registry's events on. One about an older version gets `at_policy_version`: what was worked on then.

    The event's own `policy_version` is that of the drafter.
    """
    begun: list[tuple[float, int]] | None = None  # when each policy version was being worked on
    for event in history:
        if event.event in _OF_OLDER_VERSIONS and event.time is not None:
            if begun is None:
                begun = sorted((s.created, s.policy_version) for s in scores if s.policy_version is not None)
            index = bisect.bisect_right(begun, (event.time, math.inf))
            yield RunEvent.of({**event.written, "at_policy_version": begun[index - 1][1]}) if index else event
        else:
            yield event


def pool_point(policy: int, scores: Sequence[ScoreRecord], acceptances: Sequence[AcceptanceRecord]) -> Point:
    """Pool one policy version's records."""
    ours = [record for record in acceptances if record.ours]
    live = live_sums(ours)
    with_all = [record for record in scores if record.sums("frozen") is not None]
    best, sums = _best(with_all), {drafter: _pool(scores, drafter) for drafter in DRAFTERS}
    sums["best"] = None if best is None else best[1]
    alphas: dict[str, Any] = {}
    effect = _sibling_effect(scores)
    for drafter, found in sums.items():
        alphas[f"alpha_{drafter}"] = None if found is None else found.alpha
        width = None if found is None or effect is None else found.half_width
        alphas[f"alpha_{drafter}_half_width"] = None if width is None or effect is None else width * effect
    compared, served = _pool(with_all, "served"), sums["served"]
    served_most = _heaviest((r.drafter_version, _tokens(r, "served")) for r in scores)
    return Point(
        policy_version=policy,
        drafter_version=served_most or _heaviest((r.drafter_version, r.rounds) for r in ours),
        rollouts=sum(r.rollouts or 0 for r in scores),
        rollouts_replayed=int(served.rollouts) or None if served is not None else None,
        tokens=sum(r.tokens or 0 for r in scores),
        best_version=None if best is None else best[0],
        publication_lag=None if best is None or compared is None else best[1].alpha - compared.alpha,
        entropy=_ratio((None if r.logprob_sum is None else -r.logprob_sum, r.logprob_tokens) for r in scores),
        reward=_ratio((r.reward_sum, r.reward_count) for r in scores),
        alpha_live=None if live is None else live[0] / live[1],
        live_rounds=None if live is None else int(live[1]),
        live_by_method=by_method(acceptances),
        action=max(((r.created, r.action) for r in scores if r.action is not None), default=(0.0, None))[1],
        published_total=_highest(r.published_total for r in scores),
        refused_total=_highest(r.refused_total for r in scores),
        trained_tokens_total=_highest(r.trained_tokens_total for r in scores),
        **alphas,
    )


def _sibling_effect(scores: Sequence[ScoreRecord]) -> float | None:
    """How many times wider an interval of α is by prompt than by rollout: answers of one prompt are alike.

    That of the served drafter: the others' sums are by rollout only. None: all is of one prompt. 1: nobody knows.
    """
    each = [(record.sums("served"), one.sums) for record in scores for one in record.replayed or ()
            if one.version == record.drafter_version]  # fmt: skip
    pairs = [(by_rollout, by_prompt) for by_rollout, by_prompt in each if by_rollout is not None]
    if not pairs:
        return 1.0
    by_rollout, by_prompt = (sum(column, DrafterSums(0.0, 0.0)) for column in zip(*pairs, strict=True))
    apart, together = by_rollout.half_width, by_prompt.half_width
    if together is None:
        return None
    return max(1.0, together / apart) if apart else 1.0


def _pool(scores: Iterable[ScoreRecord], drafter: str) -> DrafterSums | None:
    found = [sums for record in scores if (sums := record.sums(drafter)) is not None]
    return sum(found, DrafterSums(0.0, 0.0)) if found else None


def _best(scores: Iterable[ScoreRecord]) -> tuple[str | None, DrafterSums] | None:
    """The drafter with the highest α on all these records together, on a tie the served one, and its sums.

    The best of each record, pooled, would be better than any drafter is, because luck helps to choose it each time.
    A version that only some records replayed counts by the lower bound of its gain over the served drafter there.
    A version that is known only as the best of a record does not count: luck helped to choose it.
    """
    records = [record for record in scores if record.sums("best") is not None]
    each = [_by_name(record) for record in records]
    names = [name for name in each[0] if all(name in one for one in each)] if each else []
    pooled = {name: sum((one[name] for one in each), DrafterSums(0.0, 0.0)) for name in names}
    if not pooled:
        return None
    name = max(pooled, key=lambda one: pooled[one].alpha)
    best = pooled[name]
    replayed = [{one.version for one in record.replayed or () if one.sums.rounds > 0} for record in records]
    for version in sorted(set().union(*replayed) - pooled.keys(), reverse=True):
        having = [record for record, versions in zip(records, replayed, strict=True) if version in versions]
        cautious = _lower_bound(having, version, records)
        if cautious is not None and cautious.alpha > best.alpha:
            name, best = version, cautious
    return None if name in ("served", "frozen", "best") else name, best


def _lower_bound(having: Sequence[ScoreRecord], version: str, scores: Sequence[ScoreRecord]) -> DrafterSums | None:
    """A version's sums on all `scores`, from the records `having` that replayed it: the lower bound of its α.

    The ratio of its α to the served drafter's there is lowered by its error. None: that error is not known.
    """
    sums = sum((_by_name(record)[version] for record in having), DrafterSums(0.0, 0.0))
    beside, served, error = _pool(having, "served"), _pool(scores, "served"), _ratio_error(having, version)
    if beside is None or served is None or error is None:
        return None
    return DrafterSums(served.tokens, served.rounds * beside.alpha / sums.alpha * math.exp(error))


def _by_name(record: ScoreRecord) -> dict[str, DrafterSums]:
    """Sums of each drafter that a record was scored with, by version, or by role where the version is not known."""
    roles = {"served": record.drafter_version or "served", "candidate": "candidate"}
    roles |= {"best": record.best_version or "best"} | ({"frozen": "frozen"} if record.replayed is None else {})
    named = [(name, sums) for role, name in roles.items() if (sums := record.sums(role)) is not None]
    found = dict(named[::-1])  # of two roles with one version the first counts
    others = {one.version: one.sums for one in record.replayed or () if one.sums.rounds > 0}
    return {name: found[name] for name, _ in named} | {v: sums for v, sums in others.items() if v not in found}


def _tokens(score: ScoreRecord, drafter: str) -> float:
    sums = score.sums(drafter)
    return 0.0 if sums is None else sums.tokens


def _highest(values: Iterable[int | None]) -> float | None:
    return max((float(value) for value in values if value is not None), default=None)


def _ratio(pairs: Iterable[tuple[float | None, float | None]]) -> float | None:
    """Pooled ratio of two sums over the records that have both."""
    both = [(above, below) for above, below in pairs if above is not None and below is not None]
    count = math.fsum(below for _, below in both)
    return math.fsum(above for above, _ in both) / count if count > 0 else None


def _heaviest(pairs: Iterable[tuple[str | None, float]]) -> str | None:
    """The version that weighs most in all; on a tie the one that comes last in order of names."""
    weight: defaultdict[str, float] = defaultdict(float)
    for version, more in pairs:
        if version is not None:
            weight[version] += more
    return max(weight, key=lambda key: (weight[key], key), default=None)
