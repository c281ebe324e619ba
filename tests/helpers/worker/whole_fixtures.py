"""`GET /alpha` computed at once, from all records of a run: what the API's kept series must equal."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from helpers.service import storage_fixtures
from pydantic_core import to_jsonable_python
from redis import Redis

from service.api.context.context import ServiceContext
from service.api.snapshot import _read_bounded, _true_now
from service.monitor.alpha import Point, attempts, placed, pool_point
from service.monitor.counts import ServerLine, servers, sound
from service.monitor.events import RunEvent
from service.monitor.metrics import RunSnapshot
from service.monitor.records import AcceptanceRecord, ScoreRecord
from service.settings import Settings


@dataclass(frozen=True, slots=True)
class AlphaSeries:
    """The answer without what is true now. `depth`: drafts a round, so that α is from 1 to depth + 1."""

    run: str
    depth: int
    points: Sequence[Point]
    events: Sequence[Mapping[str, object]]
    servers: Sequence[ServerLine]


def alpha_series(
    run: str,
    scores: Iterable[ScoreRecord],
    acceptances: Sequence[AcceptanceRecord],
    history: Iterable[RunEvent],
    depth: int,
    *,
    left_out: Collection[tuple[str, str | None]] = (),
) -> AlphaSeries:
    """One point for every policy version with a score or a live count, in ascending order.

    `acceptances`: cumulative, one per (reporter, drafter version, policy version). A record without a policy version
    belongs to no point. `left_out`: engines (reporter, drafter version) that are among `servers`, and in no point.
    """
    scored: defaultdict[int, list[ScoreRecord]] = defaultdict(list)
    for score in scores:
        if score.policy_version is not None:
            scored[score.policy_version].append(score)
    counted: defaultdict[int, list[AcceptanceRecord]] = defaultdict(list)
    for record in sound(acceptances, left_out):
        if record.policy_version is not None:
            counted[record.policy_version].append(record)
    versions = sorted({*scored, *counted})
    points = [pool_point(policy, scored.get(policy, []), counted.get(policy, [])) for policy in versions]
    events = [event.written for event in placed(history, itertools.chain.from_iterable(scored.values()))]
    return AlphaSeries(run, depth, points, events, servers(acceptances))


async def read_snapshot(context: ServiceContext, client: Redis, run: str) -> RunSnapshot:
    """All of a run, with every score record. `client`: blocking, of the same Redis."""
    store = storage_fixtures.Store(client, run)
    bounded = await _read_bounded(context, run, None, await context.summary(run))
    found = replace(
        bounded,
        scores=list(store.scores().values()),
        acceptances=store.acceptances(),
        history=context.registry.history.events(run),
        returns=store.returns(),
    )
    last = attempts(found.scores, context.settings.max_policy_lag, found.returns)[-1]
    return found.with_engine(last, last.scores)


def run_document(run: str, snapshot: RunSnapshot, settings: Settings, attempt: int | None = None) -> dict[str, Any]:
    """The answer, of this attempt (from 1) or of the last."""
    sick, found = snapshot.watch.sick, attempts(snapshot.scores, settings.max_policy_lag, snapshot.returns)
    number = len(found) if attempt is None else attempt
    chosen = found[number - 1]
    counted = [record for record in snapshot.acceptances if chosen.counted(record)]
    events = [event for event in snapshot.history if chosen.has(event.time)]
    series = alpha_series(run, chosen.scores, counted, events, settings.depth, left_out=sick)
    document: dict[str, Any] = to_jsonable_python(replace(series, servers=servers(snapshot.acceptances)))
    return document | {"attempt": number} | _true_now(snapshot, found, settings)
