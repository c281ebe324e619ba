"""The α series: score records and acceptance records of one run, pooled per policy version.

Pure: no torch, no Redis, no clock. `GET /alpha` and the page's charts show this document. What is true *now* is not its
last point but `service.monitor.current`: a trainer that went back to an earlier checkpoint writes earlier points again.

Rules:
* Sums are pooled before they are divided (α = tokens / rounds). A mean of ratios is another quantity, 4 % off on the
  same data.
* What has no data is None, never 0: an α of 0 does not exist, and a chart would draw it.
* Regret is formed only from records that carry both the best and the served drafter, so the prompts cancel.
* Confidence half-widths appear where the records carry second moments (`drafter_sums`): the linearised ratio
  estimator, clustered by rollout, Var α = n/(n-1) · Σ(t - αr)² / (Σr)², whose parts add up over records.
"""

from __future__ import annotations

import bisect
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from service.monitor.counts import (
    OUR_DRAFTER,
    Z_95,
    by_drafter,
    by_method,
    live_sums,
    method_of,
    number,
    servers,
)

#: Drafters that a score record may carry, in the order in which people compare them.
DRAFTERS: Final = ("served", "candidate", "frozen", "ngram", "best")
#: Sums since the run began, as they stood when a policy version had been worked on.
RUNNING_TOTALS: Final = ("published_total", "refused_total", "trained_tokens_total")


def drafter_sums(tokens: Iterable[float], rounds: Iterable[float]) -> dict[str, float]:
    """Sum one drafter's per-rollout tokens and rounds into the object that a score record carries.

    Beyond `tokens` and `rounds` it holds the count of rollouts and three second moments, from which pooled confidence
    half-widths follow. `drafter_sums([8, 4], [2, 2]) == {"tokens": 12, "rounds": 4, "rollouts": 2,
    "tokens_squared": 80, "rounds_squared": 8, "tokens_rounds": 24}`. Rollouts without a round add nothing.
    """
    sums = Sums()
    for token, rnd in zip(map(float, tokens), map(float, rounds), strict=True):
        if rnd > 0:
            sums = sums + Sums(token, rnd, 1.0, token * token, rnd * rnd, token * rnd)
    return sums.as_record()


@dataclass(frozen=True, slots=True)
class Sums:
    """Additive statistics of one drafter over rollouts. `rollouts` is 0 where a record carried no second moments."""

    tokens: float = 0.0
    rounds: float = 0.0
    rollouts: float = 0.0
    tokens_squared: float = 0.0
    rounds_squared: float = 0.0
    tokens_rounds: float = 0.0

    @classmethod
    def of(cls, record: object) -> Sums | None:
        """Read the object of a score record; None where it is absent, not finite or without a round."""
        if not isinstance(record, Mapping):
            return None
        tokens, rounds = number(record.get("tokens")), number(record.get("rounds"))
        if tokens is None or rounds is None or rounds <= 0:
            return None
        names = ("rollouts", "tokens_squared", "rounds_squared", "tokens_rounds")
        more = [number(record.get(name)) for name in names]
        moments = [value for value in more if value is not None]
        return cls(tokens, rounds, *moments) if len(moments) == len(names) else cls(tokens, rounds)

    def __add__(self, other: Sums) -> Sums:
        return Sums(
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
    def half_width(self) -> float | None:
        """Half of the 95 % confidence interval of `alpha`, clustered by rollout; None below two rollouts."""
        if self.rollouts < 2:
            return None
        alpha = self.alpha
        residual = self.tokens_squared - 2 * alpha * self.tokens_rounds + alpha * alpha * self.rounds_squared
        variance = self.rollouts / (self.rollouts - 1) * max(residual, 0.0) / (self.rounds * self.rounds)
        return Z_95 * math.sqrt(variance)

    def as_record(self) -> dict[str, float]:
        """The object that a score record carries."""
        return {name: getattr(self, name) for name in self.__slots__}


def version(value: object) -> int | None:
    """`value` as a policy version: an integer, or a float that is one."""
    found = number(value)
    return int(found) if found is not None and found.is_integer() else None


def alpha_document(
    run: str,
    scores: Mapping[str, Mapping[str, Any]] | Iterable[Mapping[str, Any]],
    acceptances: Iterable[Mapping[str, Any]],
    history: Iterable[Mapping[str, Any]],
    depth: int,
) -> dict[str, Any]:
    """Build the `GET /alpha` document: `{run, depth, points, events, servers}`.

    `scores`: score records, or batch id -> score record. `acceptances`: cumulative acceptance records, one per
    (reporter, drafter version, policy version). `history`: the registry's events, oldest first, passed on as `events`.
    `depth`: tokens drafted per round, so that α lies between 1 and depth + 1. Points ascend by policy version; one
    exists for every version that has a score or an engine's count. A record without a policy version belongs to none.
    """
    scored: defaultdict[int, list[Mapping[str, Any]]] = defaultdict(list)
    for record in scores.values() if isinstance(scores, Mapping) else scores:
        if (policy := version(record.get("policy_version"))) is not None:
            scored[policy].append(record)
    # When each policy version was being worked on: the order of score records in time.
    begun = sorted((number(r.get("created")) or 0.0, policy) for policy, found in scored.items() for r in found)
    acceptances = list(acceptances)
    counted: defaultdict[int, list[Mapping[str, Any]]] = defaultdict(list)
    for record in acceptances:
        if (policy := version(record.get("policy_version"))) is not None:
            counted[policy].append(record)
    versions = sorted({*scored, *counted})
    points = [pool_point(policy, scored.get(policy, []), counted.get(policy, [])) for policy in versions]
    return {
        "run": run,
        "depth": depth,
        "points": points,
        "events": [_placed(event, begun) for event in history],
        "servers": servers(acceptances),
    }


def _placed(event: Mapping[str, Any], begun: Sequence[tuple[float, int]]) -> dict[str, Any]:
    """An event of the registry; one that moved `latest` back or anew also says at which policy version the run was.

    Its own `policy_version` is of the drafter that it moved to.
    """
    when = number(event.get("time"))
    if event.get("event") not in ("rolled_back", "pushed_again") or when is None:
        return dict(event)
    index = bisect.bisect_right(begun, (when, math.inf))
    return dict(event) | ({"at_policy_version": begun[index - 1][1]} if index else {})


def pool_point(
    policy: int, scores: Sequence[Mapping[str, Any]], acceptances: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Pool one policy version's records. `alpha_live` is of published drafters; other methods stand beside it."""
    ours = [record for record in acceptances if method_of(record) == OUR_DRAFTER]
    point: dict[str, Any] = {
        "policy_version": policy,
        "drafter_version": _weightiest(scores, "drafter_version", "served") or _most_rounds(ours),
        "rollouts": int(_total(scores, "rollouts") or 0),
        "tokens": int(_total(scores, "tokens") or 0),
    }
    for drafter in DRAFTERS:
        sums = _pool(scores, drafter)
        point[f"alpha_{drafter}"] = None if sums is None else sums.alpha
        point[f"alpha_{drafter}_half_width"] = None if sums is None else sums.half_width
    live = live_sums(ours)
    return point | {
        "alpha_served_compared": _served_compared(scores),
        "best_version": _weightiest(scores, "best_version", "best"),
        "regret": _regret(scores),
        "entropy": _ratio(scores, "logprob_sum", "logprob_tokens", sign=-1.0),
        "reward": _ratio(scores, "reward_sum", "reward_count"),
        "alpha_live": None if live is None else live[0] / live[1],
        "live_rounds": None if live is None else int(live[1]),
        "live_by_drafter": by_drafter(acceptances),
        "live_by_method": by_method(acceptances),
        "action": _newest(scores, "action"),
        **{name: _highest(scores, name) for name in RUNNING_TOTALS},
    }


def _pool(scores: Iterable[Mapping[str, Any]], drafter: str) -> Sums | None:
    """Sum of one drafter. Moments count only when every record has them: a part would understate the width."""
    found = [sums for record in scores if (sums := Sums.of(record.get(drafter))) is not None]
    if not found:
        return None
    total = sum(found, Sums())
    return total if all(sums.rollouts > 0 for sums in found) else Sums(total.tokens, total.rounds)


def _regret(scores: Iterable[Mapping[str, Any]]) -> float | None:
    """α of the best drafter minus α of the served one, on the records that carry both."""
    both = [r for r in scores if Sums.of(r.get("best")) is not None and Sums.of(r.get("served")) is not None]
    best, served = _pool(both, "best"), _pool(both, "served")
    return None if best is None or served is None else best.alpha - served.alpha


def _served_compared(scores: Iterable[Mapping[str, Any]]) -> float | None:
    """α of the served drafter on the records that carry the frozen one too: what its α may be compared with."""
    served = _pool([r for r in scores if Sums.of(r.get("frozen")) is not None], "served")
    return None if served is None else served.alpha


def _total(records: Iterable[Mapping[str, Any]], name: str) -> float | None:
    values = [value for record in records if (value := number(record.get(name))) is not None]
    return math.fsum(values) if values else None


def _highest(records: Iterable[Mapping[str, Any]], name: str) -> float | None:
    return max((value for record in records if (value := number(record.get(name))) is not None), default=None)


def _ratio(records: Iterable[Mapping[str, Any]], above: str, below: str, sign: float = 1.0) -> float | None:
    """Pooled ratio of two sums over the records that have both."""
    both = [r for r in records if number(r.get(above)) is not None and number(r.get(below)) is not None]
    total, count = _total(both, above), _total(both, below)
    return None if total is None or count is None or count <= 0 else sign * total / count


def _weightiest(records: Iterable[Mapping[str, Any]], name: str, drafter: str) -> str | None:
    """The version named most often, by tokens of `drafter`; on a tie the one that comes last in order of names."""
    weight: defaultdict[str, float] = defaultdict(float)
    for record in records:
        if isinstance(found := record.get(name), str):
            sums = Sums.of(record.get(drafter))
            weight[found] += 0.0 if sums is None else sums.tokens
    return max(weight, key=lambda key: (weight[key], key), default=None)


def _most_rounds(acceptances: Iterable[Mapping[str, Any]]) -> str | None:
    """The drafter version with most live rounds."""
    weight: defaultdict[str, float] = defaultdict(float)
    for record in acceptances:
        if isinstance(found := record.get("drafter_version"), str):
            weight[found] += number(record.get("rounds")) or 0.0
    return max(weight, key=lambda key: (weight[key], key), default=None)


def _newest(records: Iterable[Mapping[str, Any]], name: str) -> str | None:
    """The value of the record created last."""
    found = [(number(r.get("created")) or 0.0, value) for r in records if isinstance(value := r.get(name), str)]
    return max(found, default=(0.0, None))[1]
