"""What is true of a run now: the figures of the batch that arrived last, and of what engines reported last.

Pure: no torch, no Redis, no clock. The gauges of `/metrics`, the page's tiles and the headline all read this.

Rules:
* Newest is what *arrived* last, never the highest policy version: a trainer that goes on from an earlier checkpoint
  counts on from there, and one absurd version must not stay for ever.
* Batches are in the order of their queue entries, whose ids only grow, whatever a clock does.
* What is pooled is what arrived since the policy version last changed. After a trainer went back to version 3, what its
  first attempt wrote as version 3 is not among it.
* A figure that the newest batches lack is of the newest ones that have it, among the last 256.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, Final

from service.monitor.alpha import (
    DRAFTERS,
    RUNNING_TOTALS,
    pool_point,
    version,
)
from service.monitor.counts import (
    OUR_DRAFTER,
    live_sums,
    method_of,
    number,
)

#: Fewer live rounds than this say little: the page shows no live α that rests on fewer, and no engine is called dead.
ENOUGH_ROUNDS: Final = 200
#: Batches among which a figure that the newest lack is looked for.
LOOK_BACK: Final = 256
#: Two machines' clocks may differ by so much; a report from further ahead was made before the clock was set back.
_CLOCKS_DIFFER_SECONDS: Final = 5.0
_ALONE: Final = ("regret", "best_version", "entropy", "reward", "action", *RUNNING_TOTALS)

Record = Mapping[str, Any]


def arrival(record: Record) -> tuple[int, float, int]:
    """Sort key: the order in which batches arrived. Records that name no queue entry come first, by `created`."""
    milliseconds, _, number_in_it = str(record.get("entry_id")).partition("-")
    if milliseconds.isdigit() and number_in_it.isdigit():
        return 1, float(milliseconds), int(number_in_it)
    return 0, number(record.get("created")) or 0.0, 0


def current(
    scores: Mapping[str, Record] | Iterable[Record], acceptances: Iterable[Record], now: float = math.inf
) -> dict[str, Any] | None:
    """Figures of what came last; None while there are neither scores nor counts of a policy version.

    Field names are those of a point of `GET /alpha`; `compared` holds `alpha_frozen` and `alpha_served` on the newest
    batches on which both were scored. `live`: `{alpha, rounds}` of the engines' last reports, of as many policy
    versions as it takes to have `ENOUGH_ROUNDS`; null below that. `now`: Unix seconds.
    """
    records = sorted(scores.values() if isinstance(scores, Mapping) else scores, key=arrival)[-LOOK_BACK:]
    spells = [list(found) for _, found in groupby((r for r in records if _policy(r) is not None), _policy)]
    reports = _reports(acceptances, spells, now)
    if not spells and not reports:
        return None
    return _of_scores(spells) | _of_reports(reports) | {"policy_version": _policy((spells or reports)[-1][-1])}


def _policy(record: Record) -> int | None:
    return version(record.get("policy_version"))


def _of_scores(spells: Sequence[Sequence[Record]]) -> dict[str, Any]:
    """Each figure from the newest spell (batches of one policy version in a row) that has it."""
    found: dict[str, Any] = {"drafter_version": None, "compared": None}
    for name in (*(f"alpha_{drafter}" for drafter in DRAFTERS), *_ALONE):
        found[name] = None
    for drafter in DRAFTERS:
        found[f"alpha_{drafter}_half_width"] = None
    missing = {*(f"alpha_{drafter}" for drafter in DRAFTERS), *_ALONE, "compared", "drafter_version"}
    for point in _points(spells):
        for name in [name for name in missing if point.get(name) is not None]:
            missing.remove(name)
            found[name] = point[name]
            if f"{name}_half_width" in found:
                found[f"{name}_half_width"] = point[f"{name}_half_width"]
        if not missing:
            break
    return found


def _points(spells: Sequence[Sequence[Record]]) -> Iterator[dict[str, Any]]:
    """A point per spell, newest first."""
    for spell in reversed(spells):
        policy = _policy(spell[-1])
        if policy is None:
            continue
        point = pool_point(policy, spell, ())
        if point["alpha_served_compared"] is not None:
            point["compared"] = {
                "policy_version": policy,
                "alpha_frozen": point["alpha_frozen"],
                "alpha_served": point["alpha_served_compared"],
            }
        yield point


def _of_reports(reports: Sequence[Sequence[Record]]) -> dict[str, Any]:
    """Live α of the policy version reported last that has a round, and of the last `ENOUGH_ROUNDS`."""
    newest = next((sums for group in reversed(reports) if (sums := live_sums(group)) is not None), None)
    return {
        "alpha_live": None if newest is None else newest[0] / newest[1],
        "live_rounds": None if newest is None else int(newest[1]),
        "live": enough_live(reports),
    }


def enough_live(reports: Sequence[Sequence[Record]]) -> dict[str, Any] | None:
    """Pool groups of reports, newest (last) first, until there are `ENOUGH_ROUNDS`; None where there are not."""
    tokens = rounds = 0.0
    for group in reversed(reports):
        if (sums := live_sums(group)) is None:
            continue
        tokens, rounds = tokens + sums[0], rounds + sums[1]
        if rounds >= ENOUGH_ROUNDS:
            return {"alpha": tokens / rounds, "rounds": int(rounds)}
    return None


def _reports(acceptances: Iterable[Record], spells: Sequence[Sequence[Record]], now: float) -> list[list[Record]]:
    """Counts of published drafters by policy version, in the order in which engines last reported them."""

    def reported(record: Record) -> float:
        created = number(record.get("created")) or 0.0
        return created if created <= now + _CLOCKS_DIFFER_SECONDS else -math.inf

    groups: defaultdict[int, list[Record]] = defaultdict(list)
    for record in sorted(acceptances, key=reported):
        if (policy := _policy(record)) is not None and method_of(record) == OUR_DRAFTER:
            groups[policy].append(record)
    back = _went_back(spells)
    if back is not None and (group := groups.get(_policy(spells[-1][-1]) or 0)):
        # Counted with the policies of an attempt that the trainer gave up, unless there is nothing else.
        group[:] = [record for record in group if reported(record) >= back] or group
    return [groups[policy] for policy in sorted(groups, key=lambda p: (reported(groups[p][-1]), p))]


def _went_back(spells: Sequence[Sequence[Record]]) -> float | None:
    """When the last batch of a higher policy version than the current one arrived, in Unix seconds."""
    if not spells:
        return None
    now = _policy(spells[-1][-1]) or 0
    higher = next((spell[-1] for spell in reversed(spells) if (_policy(spell[-1]) or 0) > now), None)
    if higher is None:
        return None
    known, when, _ = arrival(higher)
    return when / 1000.0 if known else when
