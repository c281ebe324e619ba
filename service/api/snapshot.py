"""One run, read at one moment: what `/metrics`, `GET /alpha`, `GET /runs/{run}` and the log's headline are made of."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import takewhile
from typing import Any, Final, TypeVar

from pydantic_core import to_json, to_jsonable_python
from redis.exceptions import RedisError

from service.api.context.context import KeptOfRun, MadeOf, ServiceContext
from service.api.problems import Problem
from service.errors import RunNotFound, ServiceError
from service.monitor.alpha import Attempt, placed
from service.monitor.counts import servers, sound
from service.monitor.current import current
from service.monitor.drift.cause import Cause, as_fraction
from service.monitor.headline import (
    ENGINE_SILENT_SECONDS,
    RECENT_BATCHES,
    Headline,
    KnownOfRun,
    RunFacts,
    headline,
)
from service.monitor.headroom import longest_pause
from service.monitor.live.watch import EngineVerdict, failed_pushes
from service.monitor.metrics import Part, RunSnapshot, advice_of, part_of, stands, with_heartbeat
from service.monitor.records import (
    ANOTHERS_DRAFTER,
    AcceptanceRecord,
    Arrival,
    Estimate,
    Headroom,
    ServedDrafter,
    Vocabulary,
    arrival,
)
from service.reading.deltas import Delta
from service.reading.series import ScoredBatch, Series
from service.settings import Settings
from service.storage.layout import Stamps
from service.storage.ready import Memory, is_of_one_key, memory_of
from service.storage.reports.store import NEWEST_REPORTS, Changes
from service.storage.reports.summary import Summary, SummaryText, answers_of, summary_in
from service.storage.runs import read_state

log = logging.getLogger("draftalign.api")

_WATCH_SECONDS: Final = 10.0
#: Runs that a scrape asks for at once: other requests are answered between two such groups.
_AT_ONCE: Final = 64
_T = TypeVar("_T")
_R = TypeVar("_R")


@dataclass(frozen=True, slots=True)
class RunView:
    """A run as it was last read. `attempts`: all of the trainer. `points`, `events`: of the `attempt`, as JSON.

    `cursor`: a reader's next `since`; None where that is not the last. `delta`: what changed since the cursor that was
    given; None: it is not known.
    """

    snapshot: RunSnapshot
    attempts: Sequence[Attempt[ScoredBatch]]
    attempt: int
    points: Sequence[bytes]
    events: Sequence[bytes]
    cursor: str | None = None
    delta: Delta | None = None


async def read_now(context: ServiceContext, run: str, summary: Summary) -> RunSnapshot:
    """Read what is true of a run now; only what has changed since the last call. `summary`: of it, just now."""
    bounded = await _read_bounded(context, run, None, summary)
    told = await context.of(run).quiet.read(bounded, summary.changes)
    if told is not None:
        return replace(bounded, acceptances=told.acceptances, engine=told.engine)
    async with _followed(context, run, bounded, summary.changes) as (snapshot, _):
        return snapshot


async def read_parts(context: ServiceContext, runs: Sequence[str]) -> tuple[dict[str, Part], dict[str, Exception]]:
    """Each run's part of `/metrics`, as `each_run` has it."""

    async def make(run: str, summary: Summary) -> tuple[Part, RunSnapshot]:
        snapshot = await read_now(context, run, summary)
        return await asyncio.to_thread(part_of, run, snapshot), snapshot

    return await _read_all(context, runs, "part", make, with_heartbeat)


async def read_headlines(
    context: ServiceContext, runs: Sequence[str]
) -> tuple[dict[str, tuple[RunSnapshot, Headline]], dict[str, Exception]]:
    """How each run is, as `each_run` has it. Called every 10 s, it reads a bounded amount, however long a run lasts."""
    memory = await memory_of(context.redis.client)

    async def make(run: str, summary: Summary) -> tuple[RunSnapshot, RunSnapshot]:
        snapshot = await _read_recent(context, run, memory, summary)
        return snapshot, snapshot

    def tell(stored: RunSnapshot, beat: float | None) -> tuple[RunSnapshot, Headline]:
        worker = stored.worker if beat is None else stored.worker.model_copy(update={"heartbeat": beat})
        now = replace(stored, now=time.time(), worker=worker, redis_fill=_fill(memory))
        return now, headline(facts_of(now, context.settings))

    return await _read_all(context, runs, "snapshot", make, tell)


async def _read_all(
    context: ServiceContext,
    runs: Sequence[str],
    kind: MadeOf,
    make: Callable[[str, Summary], Awaitable[tuple[_T, RunSnapshot]]],
    tell: Callable[[_T, float | None], _R],
) -> tuple[dict[str, _R], dict[str, Exception]]:
    """What `make` makes of each run, as `each_run` has it. Of a run in which nothing was written it is the last one.

    `tell`: what that says beside the worker's last sign of life, which comes again and again.
    """
    told, damaged = dict[str, _R](), dict[str, Exception]()
    for begin in range(0, len(runs), _AT_ONCE):
        some = runs[begin : begin + _AT_ONCE]
        answers = await answers_of(context.redis.client, some)
        # Before anything else is read of the runs.
        files = await asyncio.to_thread(_files_of, context, kind, some)
        read = partial(_read_one, context, kind, make, tell, answers, files)
        found, broken = await each_run(some, read)
        told |= found
        damaged |= broken
    return told, damaged


def _files_of(context: ServiceContext, kind: MadeOf, runs: Sequence[str]) -> dict[str, tuple[Stamps, int | None]]:
    """Each run's stamps, and the bound of its queue by what is kept of it; None: not known."""
    found = dict[str, tuple[Stamps, int | None]]()
    for run in runs:
        stamps, kept, limit_bytes = context.layout.stamps(run), context.of(run).made.get(kind), None
        if kept is not None:
            with suppress(OSError):  # who reads the run says why
                limit_bytes = _queue_limit_bytes(context, run, kept.counters)
        found[run] = stamps, limit_bytes
    return found


async def _read_one(
    context: ServiceContext,
    kind: MadeOf,
    make: Callable[[str, Summary], Awaitable[tuple[_T, RunSnapshot]]],
    tell: Callable[[_T, float | None], _R],
    answers: Mapping[str, SummaryText],
    files: Mapping[str, tuple[Stamps, int | None]],
    run: str,
) -> _R:
    """`answers`: of Redis, just now. Where it had none for a run it says why when it is asked for this run alone."""
    answer, (stamps, limit_bytes), made_of = answers.get(run), files[run], context.of(run).made
    beat = None if answer is None else answer.heartbeat
    kept = made_of.get(kind)
    now = answer, beat is not None, stamps, limit_bytes
    if kept is not None and (kept.answer, kept.has_beat, kept.stamps, kept.limit_bytes) == now:
        return tell(kept.made, beat)
    made_of.pop(kind, None)
    made, snapshot = await make(run, await context.summary(run) if answer is None else summary_in(answer))
    if answer is not None and snapshot.queue_limit_bytes is not None and stands(snapshot):
        counters = snapshot.counters
        made_of[kind] = KeptOfRun(answer, beat is not None, stamps, snapshot.queue_limit_bytes, counters, made)
    return tell(made, beat)


async def read_followed(context: ServiceContext, run: str, since: str | None = None) -> RunView:
    """Read what is true of a run now, and its last attempt. `since`: a reader's cursor."""
    summary = await context.summary(run)
    bounded = await _read_bounded(context, run, await memory_of(context.redis.client), summary)
    history = await asyncio.to_thread(context.registry.history.events, run)
    async with _followed(context, run, replace(bounded, history=history), summary.changes) as (snapshot, series):

        def compare() -> RunView:
            view = _view(snapshot, series, len(series.attempts))
            points, events = series.points, view.events
            cursor = series.deltas.take(points, events)
            return replace(view, cursor=cursor, delta=None if since is None else series.deltas.since(since))

        return await asyncio.to_thread(compare)


async def read_attempt(context: ServiceContext, run: str, attempt: int) -> RunView:
    """Read what is true of a run now, and an attempt, from 1, of which nothing is kept; Problem 404: there is none."""
    now = (await read_followed(context, run)).snapshot
    series = Series(context.store(run), context.settings.max_policy_lag, attempt)
    await series.refresh(now.watch.sick)
    if attempt > (there := len(series.attempts)):
        raise Problem(404, "no-such-attempt", f"run {run!r} has {there} attempts, none is number {attempt}")
    return await asyncio.to_thread(_view, now, series, attempt)


def _view(snapshot: RunSnapshot, series: Series, attempt: int) -> RunView:
    chosen = series.chosen
    there = (event for event in snapshot.history if chosen.has(event.time))
    events = [event.text for event in placed(there, chosen.scores)]
    return RunView(snapshot, series.attempts, attempt, list(series.points.values()), events)


@asynccontextmanager
async def _followed(
    context: ServiceContext, run: str, bounded: RunSnapshot, now: Changes
) -> AsyncIterator[tuple[RunSnapshot, Series]]:
    series = context.of(run).series
    async with series.lock:
        await series.refresh(bounded.watch.sick, now)

        def told() -> RunSnapshot:
            counted = replace(bounded, acceptances=series.acceptances)
            return counted.with_engine(series.attempts[-1], series.served)

        yield await asyncio.to_thread(told), series


async def _read_bounded(context: ServiceContext, run: str, memory: Memory | None, found: Summary) -> RunSnapshot:
    """Read the parts that do not grow with a run's age. `memory`: of Redis. `found`: in it, just now."""
    served = context.of(run).pointer.served()
    latest = None if served is None else served.manifest
    now, evidence, counters = time.time(), context.of(run).evidence, found.counters
    engines, recent = await evidence.engines(found), await evidence.recent(found)
    registered = context.run(run).created

    def told() -> RunSnapshot:
        digest = context.registry.history.digest(run)
        return RunSnapshot(
            scores=recent.newest,
            watch=engines.watch,
            worth=engines.worth,
            pushes=list(digest.pushed),
            published=digest.published,
            moves=digest.moves,
            counters=counters,
            queue_limit_bytes=_queue_limit_bytes(context, run, counters),
            redis_fill=_fill(memory),
            worker=found.worker,
            latest=None if latest is None else ServedDrafter(latest.version, latest.sequence, latest.created),
            now=now,
            api_began=context.lifetime.began,
            dead_letters=found.dead_letters,
            last_report=found.last_report,
            oldest_queued=found.oldest_queued,
            last_arrival=found.last_arrival,
            outdated=found.outdated,
            registered=registered,
            state=read_state(context.layout, run),
            held=context.registry.held(run),
        )

    return await asyncio.to_thread(told)


def _fill(memory: Memory | None) -> float | None:
    return None if memory is None else round(memory.fill, 2)


def _queue_limit_bytes(context: ServiceContext, run: str, counters: Mapping[str, int]) -> int:
    """Bytes at which the queue is full, rounded, so that answers stay equal for a while (304)."""
    found = context.disk.queue_limit_bytes(counters["bytes"], run, counters["dead_file_bytes"])
    return found & -1 << max(0, found.bit_length() - 6)


async def each_run(
    runs: Iterable[str], read: Callable[[str], Awaitable[_T]]
) -> tuple[dict[str, _T], dict[str, Exception]]:
    """What `read` returns for each run that still exists, and the errors of damaged runs: none hides the others.

    Raises RedisError where that is not the fault of one run.
    """
    found, damaged = dict[str, _T](), dict[str, Exception]()
    for run in runs:
        try:
            found[run] = await read(run)
        except RunNotFound:
            continue  # deleted meanwhile
        except Exception as error:
            if isinstance(error, RedisError) and not is_of_one_key(error):
                raise
            damaged[run] = error
    return found, damaged


async def _read_recent(context: ServiceContext, run: str, memory: Memory | None, summary: Summary) -> RunSnapshot:
    bounded = await _read_bounded(context, run, memory, summary)
    counts = await context.store(run).newest_acceptances(bounded.now - ENGINE_SILENT_SECONDS)
    found = replace(bounded, acceptances=counts)
    return await asyncio.to_thread(lambda: found.with_engine(found.newest.attempt, found.newest.attempt.scores))


def log_damaged(damaged: Mapping[str, Exception]) -> None:
    """Say which runs cannot be read, and why."""
    for run, error in damaged.items():
        log.error("run %s cannot be read: %s", run, error)


async def read_standing(context: ServiceContext, run: str) -> dict[str, Any]:
    """The headline, and what a trainer logs: what became of the run's batches, α and headroom; null is not known."""
    memory = await memory_of(context.redis.client)
    snapshot = await _read_recent(context, run, memory, await context.summary(run))
    facts = await asyncio.to_thread(facts_of, snapshot, context.settings)
    counts, now, headroom = snapshot.counters, facts.current, snapshot.worker.headroom
    letters = snapshot.dead_letters
    return {
        "headline": to_jsonable_python(headline(facts)),
        "rollouts": {
            "accepted_total": counts["accepted_total"],
            "trained_total": counts["acked_total"] - counts["skipped_total"],
            "skipped_total": counts["skipped_total"],
            "dead_total": counts["dead_total"],
            "waiting": counts["items"],
            "not_finite_total": counts["not_finite_total"],
            "last_dead_reason": letters[0].get("reason", "") if letters else "",
        },
        "alpha": None if now is None else now.alpha_served,
        "alpha_live": None if now is None or now.live is None else now.live.alpha,
        "headroom": None if headroom is None else headroom.gain,
    }


def run_text(run: str, followed: RunView, settings: Settings) -> bytes:
    """The answer of `GET /alpha`: the series of an attempt; what is true now, also in words. The last has a `cursor`.

    Where a reader's cursor is known, `points` and `events` are those that changed, beside `gone` and `kept_events`.
    """
    snapshot, delta = followed.snapshot, followed.delta
    rest: dict[str, Any] = {"servers": servers(snapshot.acceptances), "attempt": followed.attempt}
    rest |= _true_now(snapshot, followed.attempts, settings)
    if followed.cursor is not None:
        rest["cursor"] = followed.cursor
    points, events = followed.points, followed.events
    if delta is not None:
        points, events = delta.points, delta.events
        rest |= {"gone": delta.gone, "kept_events": delta.kept_events}
    parts = [to_json({"run": run, "depth": settings.depth})[:-1], b',"points":[', b",".join(points)]
    parts += [b'],"events":[', b",".join(events), b"],", to_json(rest, inf_nan_mode="null")[1:]]
    return b"".join(parts)


def _true_now(snapshot: RunSnapshot, found: Sequence[Attempt[Any]], settings: Settings) -> dict[str, Any]:
    """What is true now, whichever attempt is asked for."""
    facts = facts_of(snapshot, settings)
    headroom = to_jsonable_python(snapshot.worker.headroom or Headroom()) | to_jsonable_python(advice_of(snapshot))
    return {
        "attempts": [_attempt_line(one) for one in found],
        "engines": [engine_line(one) for one in snapshot.watch.engines],
        "publishing_held": snapshot.watch.hold,
        "current": to_jsonable_python(snapshot.current),
        "headroom": headroom,
        "worth": to_jsonable_python(snapshot.worth),
        "headline": to_jsonable_python(headline(facts)),
        "cause": None if facts.cause is None else cause_document(facts.cause),
    }


def _attempt_line(attempt: Attempt[Any]) -> dict[str, Any]:
    policies = [score.policy_version for score in attempt.scores if score.policy_version is not None]
    low, high = (min(policies), max(policies)) if policies else (None, None)
    return {"began": attempt.began, "batches": len(policies), "first_policy": low, "last_policy": high}


def cause_document(why: Cause) -> dict[str, Any]:
    """Changes as fractions of α, with the ends of their 95 % intervals."""

    def fractions(change: Estimate) -> dict[str, float]:
        ends = {"change": change.value, "low": change.low, "high": change.high}
        return {name: as_fraction(log_ratio) for name, log_ratio in ends.items()}

    return {
        "cause": why.cause,
        "text": why.text,
        "rollouts": why.rollouts,
        "parts": {name: fractions(term) for name, term in why.terms.items()},
        "entropy": None if why.entropy is None else fractions(why.entropy),
    }


def engine_line(verdict: EngineVerdict) -> dict[str, Any]:
    """How one engine's live α compares with replay, as `GET /alpha` has it."""
    found = verdict.stretch
    return {
        "reporter": verdict.reporter,
        "verdict": verdict.name,
        "evidence": verdict.text,
        "drafter_version": verdict.drafter_version,
        "rounds": verdict.rounds,
        "alpha_live": None if found is None else found.live_alpha,
        "alpha_replay": None if found is None else found.replay_alpha,
        "log_ratio": None if found is None else found.log_ratio,
        "log_ratio_error": None if found is None else found.error,
    }


def facts_of(snapshot: RunSnapshot, settings: Settings) -> RunFacts:
    """Collect what the headline needs. Of the whole run and of what `read_headlines` reads the facts are the same."""
    counters, recent = snapshot.counters, snapshot.newest
    ended: list[tuple[Arrival, Mapping[str, str] | None]] = [
        (score.arrival, None) for score in recent[-RECENT_BATCHES:]
    ]
    ended += [(arrival(letter.get("entry_id")), letter) for letter in snapshot.dead_letters]
    ended = sorted(ended, key=lambda one: one[0])[-RECENT_BATCHES:]
    dead = [letter for _, letter in ended if letter is not None]
    engines = [found for found in _engines(snapshot).values() if found]
    reports = [record for found in engines for record in found]
    newest = {r.reporter: r for r in sorted(snapshot.acceptances, key=lambda r: r.reported)}
    recent_reports = [r for r in newest.values() if snapshot.now - r.reported <= ENGINE_SILENT_SECONDS]
    vocabulary = snapshot.worker.vocabulary or Vocabulary()
    queued, size = int(counters.get("items") or 0), int(counters.get("bytes") or 0)
    limit_bytes = snapshot.queue_limit_bytes
    of_bytes = 0.0 if limit_bytes is None else size / limit_bytes if limit_bytes else math.inf
    by_disk = settings.queue_max_bytes is None or limit_bytes == 0  # no setting leaves no room
    return RunFacts(
        **{one.name: getattr(snapshot, one.name) for one in fields(KnownOfRun)},
        accepted=int(counters.get("accepted_total") or 0),
        queued=queued,
        queue_fill=max(queued / settings.queue_max_items, 0.0 if by_disk else of_bytes),
        disk_fill=of_bytes if by_disk else 0.0,
        redis_fill=snapshot.redis_fill or 0.0,
        last_scored=max((r.created for r in recent), default=None),
        longest_pause=longest_pause(recent[-RECENT_BATCHES:]),
        recent_batches=len(ended),
        recent_dead=len(dead),
        newest_dead=len(list(takewhile(lambda one: one[1] is not None, reversed(ended)))),
        dead_reason=dead[-1].get("reason") if dead else None,
        gathered=vocabulary.tokens,
        wanted=vocabulary.wanted,
        served_version=None if snapshot.latest is None else snapshot.latest.version,
        current=current(snapshot.newest, sound(reports, snapshot.watch.sick), snapshot.now),
        cause=snapshot.cause,
        engines=[found[0] for found in engines],
        drafted=any(record.rounds for record in reports),
        contested=[r for r in recent_reports if r.reporter is not None and r.method == ANOTHERS_DRAFTER],
        failed_pushes=max((len(failed_pushes(e, snapshot.pushes)) for e in snapshot.watch.engines), default=0),
        last_engine_report=max((r.reported for r in snapshot.acceptances), default=snapshot.last_report),
        headroom=advice_of(snapshot),
    )


def _engines(snapshot: RunSnapshot) -> dict[str, list[AcceptanceRecord]]:
    """What engines that have reported lately counted with our drafters: the newest records of each, newest first."""
    reports: defaultdict[str, list[AcceptanceRecord]] = defaultdict(list)
    for record in sorted(snapshot.acceptances, key=lambda record: record.reported, reverse=True):
        if record.reporter is not None and len(reports[record.reporter]) < NEWEST_REPORTS:
            reports[record.reporter].append(record)
    return {
        reporter: [record for record in found if record.ours]
        for reporter, found in reports.items()
        if snapshot.now - found[0].reported <= ENGINE_SILENT_SECONDS
    }


async def watch_headlines(context: ServiceContext) -> None:
    """Log each run's headline when it becomes another: a worker that is gone cannot say so itself."""
    said: dict[str, str] = {}
    failed: set[tuple[str, type[Exception]]] = set()

    @contextmanager
    def going_on(what: str) -> Iterator[None]:
        try:
            yield
        except (RedisError, OSError, ServiceError, ValueError) as error:  # ValueError: a file that is no JSON
            log.debug("%s cannot be read, so no headline is known: %s", what, error)
        except Exception as error:  # the other runs' headlines still count, and the next try may succeed
            if (what, type(error)) not in failed:
                failed.add((what, type(error)))
                log.exception("%s: no headline can be made; this is said once", what)

    while True:
        await asyncio.sleep(_WATCH_SECONDS)
        with going_on("the list of runs"):
            found, damaged = await read_headlines(context, await asyncio.to_thread(context.layout.run_names))
            for run, error in damaged.items():
                with going_on(f"run {run}"):
                    raise error
            for run, (_, now) in found.items():
                if said.get(run) != now.state:
                    said[run] = now.state
                    level = logging.WARNING if now.level in ("bad", "warn") else logging.INFO
                    log.log(level, "%s: %s", run, now.text)
