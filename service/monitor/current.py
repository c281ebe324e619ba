"""What is true of a run now: the figures of the batch that arrived last, and of what engines reported last.

Pure: no torch, no Redis, no clock. The gauges of `/metrics`, the page's tiles and the headline all read this.

Rules:
* Newest is what *arrived* last, never the highest policy version: a trainer that goes on from an earlier checkpoint
  counts on from there, and one absurd version must not stay the newest.
* Batches are in the order of their queue entries, whose ids only grow, whatever a clock does.
* Counts from an attempt that the trainer gave up are left out, unless there are no others.
* Figures pool what arrived since the policy version last changed, or another drafter began to serve under it. After a
  trainer went back to version 3, what its first attempt wrote as version 3 is not in the pool.
* A figure that the newest batches lack is of the newest ones that have it, among the last 256.
* Drafters are compared over as many of the newest batches of the served drafter as it takes to know by how much it
  beats the first one or, while that serves, the candidate. On few prompts chance would decide which is better.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from service.monitor.alpha import Attempt, Compared, Figures, Point, Turn, arrived, attempts, pool_point
from service.monitor.counts import LiveAlpha, live_sums, sound
from service.monitor.records import DRAFTERS, AcceptanceRecord, Favour, Return, ScoreRecord

#: Fewer live rounds than this say little: the page shows no live α that rests on fewer, and no engine is called dead.
ENOUGH_ROUNDS: Final = 200
#: Batches among which a figure that the newest lack is looked for.
LOOK_BACK: Final = 256
#: Drafters are compared on more batches until chance makes two equal ones differ by less: an interval of 3 %.
_NARROW: Final = 0.015
#: So many batches in a row of an older drafter are not late: a person has rolled back to it.
_SERVED_AGAIN: Final = 8
#: A tilt is a bias if it exceeds 10 % in odds by so many standard errors. Features in bfloat16, and heads that are off
#: by half a per cent, make a smaller tilt (`tests/drafter/replay/test_lossless.py`).
_SURE: Final = 4.5
_LEAST_TILT: Final = 0.1
#: Batches of which the median says how far tokens of the newest weights are off, and fewest that say it.
_GAPS: Final = 20
_FEWEST_GAPS: Final = 3
#: By how much two machines' clocks may differ. A report from later than that was made before a clock was set back.
_CLOCKS_DIFFER_SECONDS: Final = 5.0


@dataclass(frozen=True, slots=True)
class Tilt:
    """How far the engines' tokens lean towards what the drafter proposes (`Favour.tilt`), over the newest batches.

    `low`, `high`: its 95 % interval. `biased`: it leans beyond chance and beyond what rounding does.
    """

    value: float
    low: float
    high: float
    tokens: int
    biased: bool

    @classmethod
    def of(cls, records: Sequence[ScoreRecord]) -> Tilt | None:
        """Pool the batches that have `favour`; None where none has, or its variance is 0."""
        known = [record.favour for record in records if record.favour is not None]
        pooled = sum(known, Favour(0.0, 0.0, 0))
        found = pooled.tilt
        if found is None:
            return None
        beyond = abs(found.value) - _SURE * math.sqrt(found.variance)
        return cls(found.value, found.low, found.high, pooled.tokens, biased=beyond > _LEAST_TILT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Current(Figures):
    """What is true now.

    `compared`, `publication_lag`, `best_version`: on the newest batches that were scored with all drafters. The last
    two are None while the drafter of the newest batches (`drafter_version`) is another than that of `compared`. `live`:
    the engines' last reports, of as many policy versions as it takes to have `ENOUGH_ROUNDS`; None below that. `tilt`:
    whether speculation is lossless. `newest_gap`: how far the newest weights' own tokens are off their recomputed
    log-probabilities, in nats: the median of the newest batches that tell it.
    """

    policy_version: int | None = None
    compared: Compared | None = None
    live: LiveAlpha | None = None
    tilt: Tilt | None = None
    newest_gap: float | None = None


_ALPHAS: Final = tuple(f"alpha_{drafter}" for drafter in DRAFTERS)
#: Figures of which each is of the newest batches that have it.
_FIGURES: Final = (
    *("drafter_version", *_ALPHAS, "entropy", "reward", "action"),
    *("published_total", "refused_total", "trained_tokens_total"),
)


def current(
    scores: Iterable[ScoreRecord], acceptances: Iterable[AcceptanceRecord], now: float = math.inf
) -> Current | None:
    """Figures of what came last; None while there are neither scores nor counts of a policy version.

    `now`: Unix seconds.
    """
    newest = scores if isinstance(scores, Newest) else Newest(scores)
    reports = _reports(acceptances, newest, now)
    if not newest.spells and not reports:
        return None
    live = next((sums for _, group in reversed(reports) if (sums := live_sums(group)) is not None), None)
    return Current(
        **newest.figures,
        alpha_live=None if live is None else live[0] / live[1],
        live_rounds=None if live is None else int(live[1]),
        live=_enough_live([group for _, group in reports]),
        policy_version=newest.spells[-1].policy_version if newest.spells else reports[-1][0],
        tilt=newest.tilt,
        newest_gap=newest.newest_gap,
    )


@dataclass(frozen=True, slots=True)
class _Spell:
    """Batches of one policy version that arrived in a row, up to the first one of another drafter that serves."""

    policy_version: int
    scores: list[ScoreRecord]


def _spells(scores: Iterable[ScoreRecord]) -> list[_Spell]:
    """Those of the batches whose policy version is known, in order of arrival.

    Engines swap one after another: a batch of an older drafter is late, unless `_SERVED_AGAIN` come in a row.
    """
    found: list[_Spell] = []
    served = ""  # the drafter that serves under this policy version
    known = [score for score in scores if score.policy_version is not None]
    drafters = [(score.policy_version, score.drafter_version or "") for score in known]
    for index, (policy, drafter) in enumerate(drafters):
        same_policy = bool(found) and found[-1].policy_version == policy
        again = drafter != served and drafters[index : index + _SERVED_AGAIN] == [(policy, drafter)] * _SERVED_AGAIN
        if not same_policy or drafter > served or again:
            found.append(_Spell(policy or 0, []))
            served = drafter
        found[-1].scores.append(known[index])
    return found


class Newest(list[ScoreRecord]):
    """The batches that arrived last, oldest first, with their figures, which are computed once.

    `before`: what was newest before. A spell whose records are the same ones is not pooled again. `returns`: see
    `service.monitor.alpha.attempts`.
    """

    def __init__(
        self, scores: Iterable[ScoreRecord], before: Newest | None = None, returns: Sequence[Return] = ()
    ) -> None:
        super().__init__(sorted(scores, key=lambda score: score.arrival)[-LOOK_BACK:])
        self.spells = _spells(self)
        #: The trainer's last attempt, as far as these batches tell it.
        self.attempt = attempts(self, returns=returns)[-1]
        earlier = [one.time for one in returns if self and one.time <= arrived(self[0])]
        if self.attempt.opened is None and earlier:
            self.attempt = Attempt(Turn(earlier[-1], earlier[-1], -math.inf), None, self.attempt.scores)
        self._pooled: dict[tuple[int, ...], Point] = {}
        #: Each figure of the newest batches that have it.
        self.figures = self._newest_figures({} if before is None else before._pooled)
        self.tilt = Tilt.of(self)
        gaps = [score.newest_gap for score in self if score.newest_gap is not None][-_GAPS:]
        self.newest_gap = statistics.median(gaps) if len(gaps) >= _FEWEST_GAPS else None

    def _newest_figures(self, pooled: Mapping[tuple[int, ...], Point]) -> dict[str, Any]:
        left, holders = set(_FIGURES), dict[str, Point]()
        for spell in reversed(self.spells):
            if not left:
                break
            key = tuple(map(id, spell.scores))  # `before` keeps its records alive, so that none has another's id
            point = pooled.get(key) or pool_point(spell.policy_version, spell.scores, ())
            self._pooled[key] = point
            found = {name for name in left if getattr(point, name) is not None}
            holders |= dict.fromkeys(found, point)
            left -= found
        figures = {name: getattr(holders.get(name), name, None) for name in _FIGURES}
        figures |= self._comparison(figures["drafter_version"])
        return figures | {f"{n}_half_width": getattr(holders.get(n), f"{n}_half_width", None) for n in _ALPHAS}

    def _comparison(self, serving: str | None) -> dict[str, Any]:
        """Figures that compare drafters, over as many of the newest spells as it takes.

        While a worker is behind, it compares nothing. What it compared last may be of a replaced drafter, whose lag and
        best version say nothing about the one that is `serving`.
        """
        chosen, enough = list[ScoreRecord](), 1
        for spell in reversed(self.spells):
            more = [r for r in spell.scores if r.sums("frozen") is not None and r.sums("served") is not None]
            if chosen and more and more[-1].drafter_version != chosen[-1].drafter_version:
                break
            chosen = more + chosen
            if len(chosen) < enough:
                continue
            found, enough = Compared.of(chosen), 2 * len(chosen)
            if found is not None and found.by_chance is not None and found.by_chance < _NARROW:
                break
        if not chosen:
            return {}
        found = Compared.of(chosen)
        if found is None or found.drafter_version != serving:
            return {"compared": found}
        point = pool_point(chosen[-1].policy_version or 0, chosen, ())
        return {"compared": found, "publication_lag": point.publication_lag, "best_version": point.best_version}


def _enough_live(reports: Sequence[Sequence[AcceptanceRecord]]) -> LiveAlpha | None:
    """Pool groups of reports, newest (last) first, until there are `ENOUGH_ROUNDS`; None where there are not."""
    tokens = rounds = 0.0
    for group in reversed(reports):
        if (sums := live_sums(group)) is None:
            continue
        tokens, rounds = tokens + sums[0], rounds + sums[1]
        if rounds >= ENOUGH_ROUNDS:
            return LiveAlpha(tokens / rounds, int(rounds))
    return None


def _reports(
    acceptances: Iterable[AcceptanceRecord], newest: Newest, now: float
) -> list[tuple[int, list[AcceptanceRecord]]]:
    """Counts of published drafters by policy version, in the order in which engines last reported them."""

    def reported(record: AcceptanceRecord) -> float:
        return record.reported if record.reported <= now + _CLOCKS_DIFFER_SECONDS else -math.inf

    groups: defaultdict[int, list[AcceptanceRecord]] = defaultdict(list)
    ours = [record for record in acceptances if record.policy_version is not None and record.ours]
    for record in sorted(list(filter(newest.attempt.counted, ours)) or ours, key=reported):
        groups[record.policy_version or 0].append(record)
    back, spells = _went_back(newest.spells), newest.spells
    if back is not None and (group := groups.get(spells[-1].policy_version)):
        # Older reports are of an attempt that the trainer gave up. They count only if there are no others.
        group[:] = [record for record in group if reported(record) >= back] or group
    return sorted(groups.items(), key=lambda item: (reported(item[1][-1]), item[0]))


def condensed(
    acceptances: Sequence[AcceptanceRecord], sick: Collection[tuple[str, str | None]], newest: Newest, now: float
) -> list[AcceptanceRecord]:
    """Replace many records by few, for which `current` and each reporter's sums of our drafters are the same.

    Kept are the newest policy versions, on which `live` rests, and one sum of the rest for each reporter.
    `sick`: engines whose counts are no evidence (`sound`). `now`: Unix seconds.
    """
    if any(record.reported > now for record in acceptances):  # their order changes when that time has come
        return list(acceptances)
    chosen, rounds = set[int](), 0.0
    for _, group in reversed(_reports(sound(acceptances, sick), newest, now)):
        chosen.update(map(id, group))
        rounds += (live_sums(group) or (0.0, 0.0))[1]
        if rounds >= ENOUGH_ROUNDS:
            break
    rest: dict[str, AcceptanceRecord] = {}
    for record in acceptances:
        if record.reporter is not None and record.ours and id(record) not in chosen:
            sums = rest.get(record.reporter, AcceptanceRecord())
            accepted = (sums.accepted_tokens or 0) + (record.accepted_tokens or 0)
            rest[record.reporter] = AcceptanceRecord(
                reporter=record.reporter, rounds=sums.rounds + record.rounds, accepted_tokens=accepted
            )
    return [*(record for record in acceptances if id(record) in chosen), *rest.values()]


def _went_back(spells: Sequence[_Spell]) -> float | None:
    """When the last batch of a higher policy version than the current one arrived, in Unix seconds."""
    higher = [spell.scores[-1] for spell in spells if spell.policy_version > spells[-1].policy_version]
    return arrived(higher[-1]) if higher else None
