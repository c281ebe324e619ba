"""One run, read at one moment: what `/metrics`, `GET /alpha`, `GET /runs/{run}` and the log's headline are made of."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise, takewhile
from typing import Any, Final

from redis.exceptions import RedisError

from service.api.context import ServiceContext
from service.errors import ServiceError
from service.monitor.alpha import alpha_document
from service.monitor.counts import (
    OUR_DRAFTER,
    live_sums,
    method_of,
    number,
)
from service.monitor.current import arrival, current
from service.monitor.dead_drafter import REPLAYED_BATCHES, DeadRule, pooled_replay_alpha
from service.monitor.headline import (
    ENGINE_SILENT_SECONDS,
    RECENT_BATCHES,
    DeadEngine,
    Headline,
    RunFacts,
    headline,
)
from service.monitor.metrics import RunSnapshot
from service.settings import Settings
from service.storage.reports import NEWEST_REPORTS

log = logging.getLogger("draftalign.api")

_WATCH_SECONDS: Final = 10.0


async def read_snapshot(context: ServiceContext, run: str) -> RunSnapshot:
    """Read all of a run."""
    store = context.store(run)
    return replace(
        await _read_bounded(context, run),
        scores=await store.scores(),
        acceptances=await store.acceptances(),
        history=await asyncio.to_thread(context.registry.history, run),
    )


async def _read_bounded(context: ServiceContext, run: str) -> RunSnapshot:
    """Read what is as small after a year as on the first day."""
    queue = context.queue(run)
    latest = context.registry.latest(run)
    arrivals = await queue.arrivals()
    return RunSnapshot(
        counters=await queue.counters(),
        worker=await context.store(run).worker(),
        latest_manifest=None if latest is None else latest.model_dump(),
        now=time.time(),
        dead_letters=await queue.dead_letters(RECENT_BATCHES),
        oldest_queued=arrivals.oldest,
        last_arrival=arrivals.last,
        registered=context.run(run).created,
    )


async def read_headline(context: ServiceContext, run: str) -> Headline:
    """Say how a run is. It is asked every 10 s for every run: what is read is bounded, however long a run lasts."""
    store = context.store(run)
    bounded = await _read_bounded(context, run)
    snapshot = replace(
        bounded,
        scores=await store.recent_scores(),
        acceptances=await store.newest_acceptances(bounded.now - ENGINE_SILENT_SECONDS),
        published=await asyncio.to_thread(lambda: context.registry.digest(run).published),
        last_report=await store.last_report(),
    )
    return await asyncio.to_thread(lambda: headline(facts_of(snapshot, context.settings, context.dead_rule)))


def run_document(run: str, snapshot: RunSnapshot, settings: Settings, rule: DeadRule) -> dict[str, Any]:
    """Build the answer of `GET /alpha`: the series, what is true now, and that in words."""
    document = alpha_document(run, snapshot.scores, snapshot.acceptances, snapshot.history, settings.depth)
    now = current(snapshot.scores, snapshot.acceptances, snapshot.now)
    return document | {"current": now, "headline": headline(facts_of(snapshot, settings, rule)).as_json()}


def facts_of(snapshot: RunSnapshot, settings: Settings, rule: DeadRule) -> RunFacts:
    """Find out what the headline has to know: the same from all of a run as from what `read_headline` reads."""
    worker, counters = snapshot.worker, snapshot.counters
    scores = snapshot.scores.values() if isinstance(snapshot.scores, Mapping) else snapshot.scores
    recent = sorted(scores, key=arrival)
    letters = sorted(snapshot.dead_letters, key=arrival)
    ended = sorted([*((arrival(r), None) for r in recent[-RECENT_BATCHES:]), *((arrival(r), r) for r in letters)],
                   key=lambda one: one[0])[-RECENT_BATCHES:]  # fmt: skip
    dead = [letter for _, letter in ended if letter is not None]
    engines = _engines(snapshot)
    published = snapshot.published
    if published is None:
        published = Counter(event.get("event") for event in snapshot.history)["published"]
    vocabulary = worker.get("vocabulary") or {}
    served = snapshot.latest_manifest
    queued, size = int(counters.get("items") or 0), int(counters.get("bytes") or 0)
    return RunFacts(
        now=snapshot.now,
        registered=snapshot.registered,
        heartbeat=number(worker.get("heartbeat")),
        worker_error=worker.get("error"),
        action=worker.get("action"),
        accepted=int(counters.get("accepted_total") or 0),
        queued=queued,
        queue_fill=max(queued / settings.queue_max_items, size / settings.queue_max_bytes),
        oldest_queued=snapshot.oldest_queued,
        last_arrival=snapshot.last_arrival,
        last_scored=max((_reported(r) for r in recent), default=None),
        longest_pause=_longest_pause(recent[-RECENT_BATCHES:]),
        recent_batches=len(ended),
        recent_dead=len(dead),
        newest_dead=len(list(takewhile(lambda one: one[1] is not None, reversed(ended)))),
        dead_reason=dead[-1].get("reason") if dead else None,
        gathered=vocabulary.get("tokens"),
        wanted=vocabulary.get("wanted"),
        served_version=served.get("version") if served else None,
        published=published,
        current=current(recent, [r for reports in engines.values() for r in reports], snapshot.now),
        drift_alarm=any(_above(lane) for lane in (worker.get("drift") or {}).values()),
        drift_alpha=number(worker.get("drift_alpha")),
        drift_level=number(worker.get("drift_level")),
        dead_engines=sorted(_dead_engines(engines, recent[-REPLAYED_BATCHES:], rule), key=lambda e: e.reporter),
        last_engine_report=max((_reported(r) for r in snapshot.acceptances), default=snapshot.last_report),
    )


def _above(lane: Mapping[str, Any]) -> bool:
    statistic, limit = number(lane.get("statistic")), number(lane.get("limit"))
    return statistic is not None and limit is not None and statistic > limit


def _longest_pause(records: Sequence[Mapping[str, Any]]) -> float | None:
    """Seconds between batches that arrived one after the other; None where their queue entries are not known."""
    known = [milliseconds / 1000.0 for has, milliseconds, _ in map(arrival, records) if has]
    return max((later - earlier for earlier, later in pairwise(known)), default=None)


def _reported(record: Mapping[str, Any]) -> float:
    return number(record.get("created")) or 0.0


def _engines(snapshot: RunSnapshot) -> dict[str, list[Mapping[str, Any]]]:
    """What engines that have reported lately counted with our drafters: the newest records of each, newest first."""
    reports: defaultdict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for record in sorted(snapshot.acceptances, key=_reported, reverse=True):
        if (reporter := record.get("reporter")) is not None and len(reports[str(reporter)]) < NEWEST_REPORTS:
            reports[str(reporter)].append(record)
    return {
        reporter: [record for record in found if method_of(record) == OUR_DRAFTER]
        for reporter, found in reports.items()
        if snapshot.now - _reported(found[0]) <= ENGINE_SILENT_SECONDS
    }


def _dead_engines(
    engines: Mapping[str, Sequence[Mapping[str, Any]]], scores: Sequence[Mapping[str, Any]], rule: DeadRule
) -> Iterator[DeadEngine]:
    """Engines whose last rounds the dead-drafter rule's limits call dead."""
    for reporter, newest_first in engines.items():
        if not newest_first:
            continue
        drafter = newest_first[0].get("drafter_version")
        replayed = pooled_replay_alpha(scores, drafter)  # type: ignore[arg-type]  # None is the one of unnamed drafters
        if replayed is None:
            continue
        live = _last_rounds([r for r in newest_first if r.get("drafter_version") == drafter], rule.min_rounds)
        if live is not None and live[0] / live[1] <= rule.live_alpha and replayed > rule.replay_alpha:
            yield DeadEngine(reporter, str(drafter), live[0] / live[1], int(live[1]), replayed)


def _last_rounds(newest_first: Sequence[Mapping[str, Any]], wanted: int) -> tuple[float, float] | None:
    """Tokens and rounds of the newest records that hold `wanted` rounds; None where all of them do not."""
    for count in range(1, len(newest_first) + 1):
        sums = live_sums(newest_first[:count])
        if sums is not None and sums[1] >= wanted:
            return sums
    return None


async def watch(context: ServiceContext) -> None:
    """Log each run's headline when it becomes another: a worker that is gone cannot say so itself."""
    said: dict[str, str] = {}
    failed: set[tuple[str, type[Exception]]] = set()
    while True:
        await asyncio.sleep(_WATCH_SECONDS)
        try:
            runs = context.layout.run_names()
        except OSError as error:
            log.debug("the runs cannot be listed: %s", error)
            continue
        for run in runs:
            try:
                found = await read_headline(context, run)
            except (RedisError, OSError, ServiceError, ValueError) as error:  # ValueError: a file that is no JSON
                log.debug("run %s: its headline is not known: %s", run, error)
                continue
            except Exception as error:  # one run's trouble is not the others', and the next look may go well
                if (run, type(error)) not in failed:
                    failed.add((run, type(error)))
                    log.exception("run %s: its headline cannot be made; this is said once", run)
                continue
            if said.get(run) != found.state:
                said[run] = found.state
                log.log(logging.WARNING if found.level in ("bad", "warn") else logging.INFO, "%s: %s", run, found.text)
