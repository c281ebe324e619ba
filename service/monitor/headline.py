"""The state of a run in words: the worst thing that is true, with its number.

Pure: no torch, no Redis, no clock. `GET /alpha`, the page, `GET /runs/{run}` and the API's log all say what this says.
That the API itself is gone only the page can say.

`headline(facts)` collects what is true, worst first, and returns the first of it; the rest stands in `also`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from service.monitor.current import Current, Tilt
from service.monitor.drift.cause import Cause, as_fraction
from service.monitor.events import Moves
from service.monitor.headroom import Advice, trainer_silent
from service.monitor.live.watch import UNREVIVED_PUSHES, EngineVerdict, Watch
from service.monitor.records import AWAY_SECONDS, LARGE_GAP_NATS, AcceptanceRecord, HeldVersion, RunState, WorkerGauges

#: How many of the last batches, by arrival, are looked at.
RECENT_BATCHES: Final = 20
#: A worker is called silent after this time; it sends a heartbeat every 3 s.
SILENT_SECONDS: Final = 10.0
#: The same for a worker that refuses a run: it sends no heartbeat for it while it tries again.
_REFUSED_SECONDS: Final = 75.0
#: A worker that was started with the API has opened its runs by then.
_START_SECONDS: Final = 30.0
#: An engine that has reported nothing for this time is not mentioned.
ENGINE_SILENT_SECONDS: Final = 600.0
#: After a publish every engine has the version by then (the alert `DraftalignEngineBehind` uses the same time).
_UNSWAPPED_SECONDS: Final = 600.0
#: Where this number of the newest batches are dead in a row, there is a warning, however many before them were good.
_DEAD_IN_A_ROW: Final = 3
#: A worker with a heartbeat is called stuck where a batch has waited, and nothing was scored, for this time.
_STUCK_SECONDS: Final = 600.0
_QUEUE_NEARLY_FULL: Final = 0.8
#: From these shares of its memory on Redis is called nearly full, and full: it may refuse a write just below its limit.
REDIS_NEARLY_FULL: Final = 0.9
_REDIS_FULL: Final = 0.99
_BEHIND_SHARE: Final = 0.1  # of the served drafter's α: a larger publication lag is mentioned
_LARGE_TILT: Final = 0.3  # a smaller one may come from a choice of answers by their reward
_MOST_TILT: Final = 5.0  # a larger tilt is shown as this one: its exponential would say nothing more
_MIX: Final = 0.05  # a larger fall of log α by another mix of prompts is mentioned
_BETTER, _WORSE = 1.02, 0.98  # served over frozen: between them they are level
_REASON_CHARACTERS: Final = 300
_CONTEST_CHARACTERS: Final = 400  # two runs and a version are named

#: Verdicts on an engine, the states that they make of the run, and the words for them.
_SICK: Final = (
    ("dead", "engine_dead", "Dead in an engine"),
    ("stale weights", "engine_stale", "Other weights in an engine"),
    ("engine features", "engine_features", "Wrong features in an engine"),
)

Severity = Literal["bad", "warn", "wait", "good", "note"]
_ORDER: Final[tuple[Severity, ...]] = ("bad", "warn", "wait", "good", "note")


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownOfRun:
    """What is stored of a run, and said as it is, at one moment. Times are Unix seconds; None: never, or not known."""

    now: float
    #: When this API process began.
    api_began: float | None = None
    registered: float | None = None
    worker: WorkerGauges = field(default_factory=WorkerGauges)
    oldest_queued: float | None = None
    last_arrival: float | None = None
    #: Whether a trainer goes on sending although a later start of one has followed it.
    outdated: bool = False
    #: How many versions were published, also those that the history has forgotten.
    published: int = 0
    #: Verdicts on the engines: live beside replay α.
    watch: Watch = field(default_factory=Watch)
    #: The moves of `latest`.
    moves: Moves = field(default_factory=Moves)
    #: What a person wants of the run, and the version that a person holds.
    state: RunState = field(default_factory=RunState)
    held: HeldVersion | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts(KnownOfRun):
    """All that the headline needs."""

    #: Batches: taken in since the run began, and in the queue now.
    accepted: int = 0
    queued: int = 0
    #: Share of the queue's bounds that is in use.
    queue_fill: float = 0.0
    #: Share in use of the run's part of the disk, where that bounds its queue; infinite where there is no room.
    disk_fill: float = 0.0
    #: Share in use of Redis' memory.
    redis_fill: float = 0.0
    #: The longest pause between the batches that arrived last, in seconds.
    longest_pause: float | None = None
    last_scored: float | None = None
    #: Of the `RECENT_BATCHES` that arrived last and have ended or were scored: all, and the dead ones.
    recent_batches: int = 0
    recent_dead: int = 0
    #: How many of the newest of these, in a row, are dead, and why the newest dead one is.
    newest_dead: int = 0
    dead_reason: str | None = None
    #: Response tokens that are gathered for the draft vocabulary, and how many it needs; None once it is there.
    gathered: int | None = None
    wanted: int | None = None
    served_version: str | None = None
    #: As in `GET /alpha`.
    current: Current | None = None
    #: What explains the change of α.
    cause: Cause | None = None
    #: The newest report, with a published drafter, of each engine that has reported within `ENGINE_SILENT_SECONDS`.
    engines: Sequence[AcceptanceRecord] = ()
    #: Whether these engines have counted a round.
    drafted: bool = True
    #: The newest report of each engine that another client keeps on its own drafter.
    contested: Sequence[AcceptanceRecord] = ()
    #: How many pushes did not revive the drafter of an engine that is dead.
    failed_pushes: int = 0
    last_engine_report: float | None = None
    #: What further training would bring.
    headroom: Advice | None = None


@dataclass(frozen=True, slots=True)
class Headline:
    """One thing that is true. `text` begins with `word`; `also` are the texts of the other ones, worst first."""

    level: Severity
    state: str
    word: str
    text: str
    also: tuple[str, ...] = field(default=())


def headline(facts: RunFacts) -> Headline:
    """Say the worst thing that is true."""
    found = sorted(_findings(facts), key=lambda one: _ORDER.index(one.level))  # stable: worst first within a level too
    first, *rest = found
    if first.state in ("worker_silent", "no_worker", "refused"):  # how well the drafter did may not be true any more
        rest = [one for one in rest if one.level != "good"]
    return Headline(first.level, first.state, first.word, first.text, tuple(one.text for one in rest))


def _findings(facts: RunFacts) -> Iterator[Headline]:
    """All headlines that hold now: at least one."""
    yield from _of_people(facts)
    if facts.state.state == "archived":
        return  # nothing happens any more
    if facts.state.worked_on:
        yield from _of_worker(facts)
    yield from _of_dead_batches(facts)
    yield from _of_engines(facts)
    yield from _of_queue(facts)
    yield from _of_trainer(facts)
    if facts.current is not None and facts.current.alpha_served is not None:
        yield from _of_alpha(facts, facts.current, facts.current.alpha_served)
    else:
        yield from _before_the_first_score(facts)


# --- people
def _of_people(facts: RunFacts) -> Iterator[Headline]:
    """What a person has asked for. Else it might be taken for a fault, or forgotten."""
    state, queued = facts.state, _batches(facts.queued)
    who = _who(state.by, state.since, facts.now, state.reason)
    if state.state == "paused":
        text = f"{who}: nothing is scored or trained; {queued} queued."
        yield _found("wait", "paused", "Paused", text)
    elif state.state == "draining":
        left = f"{queued} left" if facts.queued else "nothing is left in the queue"
        yield _found("wait", "draining", "Draining", f"{who}: no more rollouts are accepted; {left}.")
    elif state.state == "archived":
        text = f"{who}: its drafters can be fetched; nothing is accepted or trained."
        yield _found("wait", "archived", "Archived", text)
    if facts.held is not None:
        held = facts.held
        who = _who(held.by, held.since, facts.now, held.reason)
        text = f" at {short_version(held.version)}{who}: nothing is published until it is released."
        yield _found("wait", "version_held", "Held", text)


def _who(by: str | None, since: float | None, now: float, reason: str) -> str:
    for_long = "" if since is None else f" for {duration(now - since)}"
    return f"{for_long}{f' by {_short(by, 80)}' if by else ''} ({_short(reason, _REASON_CHARACTERS // 3)})"


# --- worker, queue, trainer
def _of_worker(facts: RunFacts) -> Iterator[Headline]:
    waits = _waits(facts.queued) if facts.queued else ""
    if facts.worker.heartbeat is None:
        yield from _no_worker(facts, waits)
        return
    age = abs(facts.now - facts.worker.heartbeat)  # a heartbeat from the future was made before the clock was set back
    limit = _REFUSED_SECONDS if facts.worker.error else SILENT_SECONDS
    # A worker of a run that was paused, or of a service that was stopped, gets time to come back.
    begun = ((facts.state.since, limit), (facts.api_began, max(limit, _START_SECONDS)))
    if age > limit and not any(at is not None and 0 <= facts.now - at <= seconds for at, seconds in begun):
        nothing = "nothing is scored or trained"
        yield _found(
            "bad", "worker_silent", "Worker silent", f" for {duration(age)}: {nothing}{waits and '; ' + waits}."
        )
    if facts.worker.error:
        # What a silent worker said last is not the worst thing any more.
        if facts.worker.for_memory:
            yield _found("bad", "short_of_memory", "Short of memory", f": {_short(facts.worker.error)}")
        else:
            yield _found("bad", "refused", "Refused by the worker", f": {_short(facts.worker.error)}")
    elif age <= SILENT_SECONDS:
        yield from _of_stuck_worker(facts)


def _of_stuck_worker(facts: RunFacts) -> Iterator[Headline]:
    """Whether a worker makes no progress. Its heartbeat does not show that: it comes from a thread of its own."""
    if not facts.queued or facts.oldest_queued is None or facts.gathered is not None:
        return  # batches have to wait while the draft vocabulary is gathered
    waited = facts.now - facts.oldest_queued
    unscored = None if facts.last_scored is None else abs(facts.now - facts.last_scored)
    if waited > _STUCK_SECONDS and (unscored is None or unscored > _STUCK_SECONDS):
        nothing = "nothing is scored" if unscored is None else f"nothing was scored for {duration(unscored)}"
        for_long = f"{', the oldest' if facts.queued > 1 else ''} for {duration(waited)}"
        yield _found("warn", "stuck", _waits(facts.queued), f"{for_long}; {nothing}.")


def _no_worker(facts: RunFacts, waits: str) -> Iterator[Headline]:
    since = facts.oldest_queued if facts.queued else facts.registered
    late = since is not None and facts.now - since > _START_SECONDS
    start = 'Start "draftalign worker" on the same Redis and state directory, if none runs'
    if facts.queued:
        if late:
            yield _found("bad", "no_worker", "No worker", f" has taken this run up: {waits}. {start}.")
        else:
            queued = f"{_batches(facts.queued)} {'are' if facts.queued > 1 else 'is'} queued"
            yield _found("wait", "no_worker", "Waiting", f": {queued}, the worker has not begun.")
    elif late and facts.current is None:
        yield _found("warn", "no_worker", "No worker", f" has taken this run up. {start}.")


def _of_dead_batches(facts: RunFacts) -> Iterator[Headline]:
    if not facts.recent_dead:
        return
    of = "the last " if facts.recent_batches >= RECENT_BATCHES else ""
    word = f"{facts.recent_dead} of {of}{_batches(facts.recent_batches)} dead"
    most = 2 * facts.recent_dead > facts.recent_batches
    in_a_row = facts.newest_dead >= _DEAD_IN_A_ROW
    reason = _short(
        facts.dead_reason or "no reason", _REASON_CHARACTERS if most or in_a_row else _REASON_CHARACTERS // 3
    )
    if most or not in_a_row:
        yield _found("bad" if most else "note", "batches_dead", word, f": {reason}")
    else:
        yield _found("warn", "batches_dead", word, f", the newest {facts.newest_dead} among them: {reason}")


def _of_queue(facts: RunFacts) -> Iterator[Headline]:
    if facts.redis_fill >= REDIS_NEARLY_FULL:
        level: Severity = "bad" if facts.redis_fill >= _REDIS_FULL else "warn"
        share = f"{facts.redis_fill:.0%}".replace("%", " %")
        text = f": {share} of its memory is in use; at 100 % rollouts of all runs are refused."
        yield _found(level, "redis_full", "Redis full" if level == "bad" else "Redis nearly full", text)
    if facts.disk_fill == math.inf:
        text = ": it has no room for rollouts of this run; rollouts are refused."
        yield _found("warn", "queue_full", "Disk full", text)
    elif facts.disk_fill >= max(_QUEUE_NEARLY_FULL, facts.queue_fill):
        share = f"{facts.disk_fill:.0%}".replace("%", " %")
        waits = f"{_waits(facts.queued)}, {share} of what this run may have of it"
        text = f": {waits}; {'' if facts.disk_fill >= 1 else 'at 100 % '}rollouts are refused."
        yield _found("warn", "queue_full", "Disk nearly full", text)
    elif facts.queue_fill >= _QUEUE_NEARLY_FULL:
        text = f": {_waits(facts.queued)}; {'' if facts.queue_fill >= 1 else 'at 100 % '}rollouts are refused."
        yield _found("warn", "queue_full", f"Queue {facts.queue_fill:.0%} full".replace("%", " %"), text)
    elif facts.worker.action == "defer":
        yield _found(
            "note",
            "behind",
            "Worker behind",
            f": {_batches(facts.queued)} queued, of which the newest policy's are trained on.",
        )


def _of_trainer(facts: RunFacts) -> Iterator[Headline]:
    if facts.outdated:
        text = (
            ": another start has begun at an earlier policy version since, and what this one sends is skipped. If both "
            "are to go on, give each a run name of its own."
        )
        yield _found("warn", "outdated", "A trainer's rollouts are not used", text)
    if facts.last_arrival is None:
        return
    gathering = facts.gathered is not None and facts.gathered < (facts.wanted or 0)  # its batches wait for others
    if facts.gathered is not None and not gathering:
        return  # the first drafter is being made
    age = facts.now - facts.last_arrival
    late = trainer_silent(facts.last_arrival, facts.now, facts.longest_pause)
    if late and (gathering or not facts.queued):
        yield _found("wait", "trainer_silent", "No rollouts", f" for {duration(age)}.")


def _before_the_first_score(facts: RunFacts) -> Iterator[Headline]:
    """What the run waits for. Where that is a worker, `_no_worker` has said so."""
    waiting = "Waiting"
    if facts.current is not None and facts.current.live is not None:
        text = f": {facts.current.live.alpha:.2f} tokens per round in the engines. No rollout is scored yet."
        yield _found("good", "live", "Live", text)
    elif facts.gathered is not None and facts.wanted and facts.gathered >= facts.wanted:
        text = f": {facts.gathered:,} response tokens are gathered; the first drafter is being made."
        yield _found("wait", "learning", "Learning", text)
    elif facts.gathered is not None and facts.wanted and (facts.accepted or facts.queued):
        text = f": {facts.gathered:,} of {facts.wanted:,} response tokens gathered (vocab_min_tokens)."
        yield _found("wait", "gathering", "Waiting for the draft vocabulary", text)
        text = " (initial_drafter=) does not wait; for a trial, start the service with DRAFTALIGN_VOCAB_MIN_TOKENS=500."
        yield _found("note", "gathering", "A run that brings its first drafter", text)
    elif facts.served_version is not None and facts.current is not None:
        version = short_version(facts.served_version)
        text = f": no rollout has come since {version} was published."
        if facts.queued:
            text = f": {version}; {_waits(facts.queued)} to be scored with it."
        yield _found("good", "published", "Published", text)
    elif facts.current is not None:
        yield _found(
            "wait",
            "learning",
            "Learning",
            ": no drafter is served yet; the next rollouts judge the first one.",
        )
    elif facts.queued and facts.worker.heartbeat is not None:
        yield _found("wait", "queued", waiting, f": {_batches(facts.queued)} in the queue, none scored yet.")
    elif facts.accepted and not facts.queued:
        yield _found("wait", "unscored", waiting, ": no rollout has been scored yet.")
    elif not facts.queued:
        yield _found("wait", "no_rollouts", "Waiting for the first rollouts", ".")


# --- engines and α
def _of_engines(facts: RunFacts) -> Iterator[Headline]:
    if facts.watch.hold is not None and facts.state.worked_on:
        yield _found("bad", "held", "Nothing is published", f": {facts.watch.hold}.")
    sick = [engine for engine in facts.watch.engines if engine.sick]
    for name, state, word in _SICK:
        found = [engine for engine in sick if engine.name == name]
        if found:
            yield _found("bad", state, word, _of_sick(found, facts.failed_pushes))
    for engine in facts.watch.engines:
        if engine.name == "depth":
            yield _found("warn", "engine_depth", "Other depth", f": {engine.reporter}: {engine.text}.")
            break
    if facts.contested:
        worst = max(facts.contested, key=lambda report: report.reported)
        why = _short((worst.withheld or "its agent's log says why").rstrip("."), _CONTEST_CHARACTERS)
        yield _found("warn", "engine_contested", "Contested", f": {worst.reporter}: {why}.{_more(facts.contested)}")
    yield from _of_unswapped(facts)
    lower = [engine for engine in facts.watch.engines if engine.name == "lower"]
    if lower:
        yield _found("note", "engine_lower", "Lower in an engine", _of_sick(lower, facts.failed_pushes))
    if facts.current is None:
        return
    if facts.current.tilt is not None and facts.current.tilt.biased and facts.state.worked_on:
        level: Severity = "bad" if abs(facts.current.tilt.value) > _LARGE_TILT else "warn"
        yield _found(level, "not_lossless", "Not lossless", _of_tilt(facts.current.tilt))
    if (gap := facts.current.newest_gap) is not None and gap > LARGE_GAP_NATS and facts.state.worked_on:
        text = (
            f": tokens that the newest weights drew are {gap:.2g} nats off what features and head give them: a stale "
            "head, another temperature or layer, or an engine that rounds more than the trainer."
        )
        yield _found("warn", "wrong_features", "Features disagree", text)
    if facts.last_engine_report is None:
        yield _found("note", "no_engine", "No engine", " reports what it accepts.")
    elif (age := facts.now - facts.last_engine_report) > ENGINE_SILENT_SECONDS:
        text = f" has reported for {duration(age)}: none drafts, or agents are away."
        yield _found("note", "no_engine", "No engine", text)
    elif facts.engines and not facts.drafted:
        first = facts.engines[0]
        version = "" if first.final else f", with {short_version(first.drafter_version)}"  # else it has another by now
        text = f" has drafted yet: {first.reporter} follows{version}."
        yield _found("note", "no_engine", "No engine", text + _more(facts.engines))


def _of_unswapped(facts: RunFacts) -> Iterator[Headline]:
    """Engines that still count with a version long after it was replaced, and those that are away.

    An engine is unswapped only if it was seen with the old version for long (`AcceptanceRecord.behind`): while it was
    away, or asleep, nobody saw what it had.
    """
    replaced = [
        (since, report)
        for report in facts.engines
        if not report.final and (since := facts.moves.replaced(report.drafter_version)) is not None
    ]
    away = [report for since, report in replaced if _is_away(facts, since, report)]
    if away:
        last = max(away, key=lambda report: report.reported)
        text = f": {last.reporter} has not reported for {duration(facts.now - last.reported)}; it had "
        text += f"{short_version(last.drafter_version)}, which is replaced.{_more(away)}"
        yield _found("note", "engine_away", "Away", text)
    found = [(report.reported - since, report) for since, report in replaced]
    found = [one for one in found if min(one[0], one[1].behind or 0.0) >= _UNSWAPPED_SECONDS]
    if not found:
        return
    late, worst = max(found, key=lambda one: (one[1].withheld is not None, one[0]))
    why = _short((worst.withheld or "its agent's log says why").rstrip("."))
    old = short_version(worst.drafter_version)
    text = f": {worst.reporter} drafted with {old} {duration(late)} after it was replaced: {why}.{_more(found)}"
    yield _found("warn", "engine_unswapped", "Not swapped", text)


def _is_away(facts: RunFacts, since: float, report: AcceptanceRecord) -> bool:
    late = facts.now - since > _UNSWAPPED_SECONDS > (report.behind or 0.0)
    return late and facts.now - report.reported > AWAY_SECONDS


def _of_tilt(tilt: Tilt) -> str:
    times, low, high = (math.exp(max(-_MOST_TILT, min(x, _MOST_TILT))) for x in (tilt.value, tilt.low, tilt.high))
    much = f"{times:.2f} times the odds that the policy gives it ({low:.2f} to {high:.2f}, {tilt.tokens:,} tokens)"
    others = "sample otherwise than the rollouts say, or only some of the answers are sent, by their reward, say"
    why = f"the engines accept drafts too freely or {others}" if tilt.value > 0 else f"the engines {others}"
    return f": what the drafter proposes comes at {much}: {why}."


def _more(found: Sequence[object]) -> str:
    """How many engines there are beside the one that is named."""
    return f" So it is in {len(found) - 1} more." if len(found) > 1 else ""


def _of_sick(found: Sequence[EngineVerdict], failed_pushes: int) -> str:
    worst = max(found, key=lambda engine: engine.rounds)
    pushed = ""
    if worst.name == "dead" and failed_pushes >= UNREVIVED_PUSHES:
        pushed = f" It was pushed again {failed_pushes} times, which did not help: restart the engine."
    return f": {worst.reporter}, with {short_version(worst.drafter_version)}: {worst.text}.{_more(found)}{pushed}"


def _of_alpha(facts: RunFacts, now: Current, alpha: float) -> Iterator[Headline]:
    """What is wrong with the served drafter; else how it compares with the first one.

    While no worker works on the run, earlier verdicts count for nothing.
    """
    says, troubles = _alpha_text(facts, now, alpha), list[Headline]()
    if facts.state.worked_on:
        troubles = list(_troubles_of_alpha(facts, now, alpha, says))
        yield from troubles
        yield from _harder_prompts(facts)
        yield from _of_headroom(facts.headroom)
    if not troubles:
        yield _standing(facts, now, alpha, says)


def _troubles_of_alpha(facts: RunFacts, now: Current, alpha: float, says: str) -> Iterator[Headline]:
    compared = now.compared if _is_measured(facts, now) and _is_compared(now) else None
    if compared is not None and compared.high is not None and compared.high < _WORSE:
        yield _found("bad", "worse", "Worse than doing nothing", f": {says}{_beside(now, alpha)}.")
    if facts.worker.unjudged:
        why = "all were trained on under this policy version, so nothing can be judged, and nothing is trained"
        yield _found("warn", "unjudged", "No prompt is new", f": {why}; {says}.")
    if facts.worker.no_memory:
        why = "memory ran out in each training, so rollouts are scored only for a while, and then one more is tried"
        yield _found("warn", "no_memory", "Too little memory to train", f": {why}; {says}.")
    if facts.worker.drift_alarm:
        fell = "α fell beyond chance"
        if facts.worker.drift_alpha is not None and facts.worker.drift_level is not None:
            fell = f"α {facts.worker.drift_alpha:.2f} is below its level so far, {facts.worker.drift_level:.2f}"
        why = f", by {facts.cause.text}" if facts.cause is not None and facts.cause.cause is not None else ""
        yield _found("warn", "drifting", "Drifting", f": {fell}{why}; {says}.")
    known = math.inf if compared is None or compared.by_chance is None else compared.by_chance
    if now.publication_lag is not None and now.publication_lag > max(_BEHIND_SHARE, known) * alpha:
        better = now.best_version
        name = "the drafter in training" if better == "candidate" else short_version(better) or "the best one kept"
        text = f": {says}; {name} would give {now.publication_lag:.2f} more."
        yield _found("warn", "publication_lag", "Behind", text)


def _harder_prompts(facts: RunFacts) -> Iterator[Headline]:
    if facts.worker.drift_alarm or facts.cause is None:
        return
    mix = facts.cause.terms.get("prompts")
    if mix is not None and mix.high < 0 and mix.value < -_MIX:
        text = f": their mix alone puts α {-100 * as_fraction(mix.value):.0f} % lower, which is no drift."
        yield _found("note", "harder_prompts", "Harder prompts", text)


def _standing(facts: RunFacts, now: Current, alpha: float, says: str) -> Headline:
    """How the served drafter compares with the first one. Better or level needs an interval; few prompts give none."""
    compared = now.compared if _is_compared(now) else None
    measured = _is_measured(facts, now)
    if compared is not None and compared.low is not None and compared.high is not None:
        if compared.low > 1.0 and compared.alpha_served > _BETTER * compared.alpha_frozen:
            return _found("good", "aligned", "Aligned", f": {says}{_beside(now, alpha)}.")
        if measured and facts.published > 1 and compared.low >= _WORSE and compared.high <= _BETTER:
            text = f": {says}{_beside(now, alpha)}. Training has gained nothing since."
            return _found("good", "level", "Level", text)
    if compared is not None and measured and facts.published <= 1:
        text = f": {says}; no candidate has been better than this first drafter yet."
        return _found("good", "level", "At the start", text)
    return _found("good", "serving", "Serving", f": {says}{_beside(now, alpha) if measured else ''}.")


def _is_measured(facts: RunFacts, now: Current) -> bool:
    """Whether the newest rollouts are of the drafter that is served now."""
    return now.drafter_version is None or now.drafter_version == facts.served_version


def _is_compared(now: Current) -> bool:
    """Whether the drafter of the newest rollouts is the one that was compared last."""
    return now.compared is not None and now.compared.drafter_version in (None, now.drafter_version)


def _of_headroom(advice: Advice | None) -> Iterator[Headline]:
    """Say what more training would do: a warning where it harms, else perhaps a note."""
    words = {"hurt": "Training hurts", "training_bound": "Training-bound", "unpaid": "Unpaid"}
    words |= {"blocked": "Blocked", "converged": "Converged", "resting": "Resting"}
    if advice is not None and advice.state in words:
        level: Severity = "warn" if advice.state == "hurt" else "note"
        yield _found(level, advice.state, words[advice.state], f": {advice.text}.".replace("%", " %"))


def _alpha_text(facts: RunFacts, now: Current, alpha: float) -> str:
    """Which version gives how much. The served one may be newer than the last rollouts."""
    gave, served = now.drafter_version, facts.served_version
    if gave and served and gave != served:
        since = f"{short_version(served)} is served since"
        return f"{short_version(gave)} gave {alpha:.2f} tokens per round on the last rollouts ({since})"
    return f"{short_version(gave or served) or 'the drafter'} gives {alpha:.2f} tokens per round"


def _beside(now: Current, alpha: float) -> str:
    compared = now.compared
    if compared is None:
        return ""
    frozen, beside_frozen = compared.alpha_frozen, compared.alpha_served
    span = ""
    if compared.low is not None and compared.high is not None:
        gain, low, high = (100 * (x - 1) for x in (beside_frozen / frozen, compared.low, compared.high))
        span = f" ({gain:+.1f} %; {low:+.1f} to {high:+.1f} %)"
    if _is_compared(now) and abs(beside_frozen - alpha) < 0.005:
        return f"; the first drafter, frozen, would give {frozen:.2f}{span}"
    which = "it" if _is_compared(now) else short_version(compared.drafter_version)
    return (
        f". On the newest rollouts that tested both {which} was {beside_frozen:.2f} against {frozen:.2f} of the first "
        f"drafter, frozen{span}"
    )


# --- words
def _found(level: Severity, state: str, word: str, rest: str) -> Headline:
    return Headline(level, state, word, f"{word}{rest}")


def _batches(count: int) -> str:
    return f"{count:,} batch{'' if count == 1 else 'es'}"


def _waits(count: int) -> str:
    return "1 batch waits" if count == 1 else f"{_batches(count)} wait"


def _short(text: str, characters: int = _REASON_CHARACTERS) -> str:
    line = " ".join(text.split())
    return line if len(line) <= characters else f"{line[: characters - 1]}…"


def short_version(version: str | None) -> str:
    """`v000007-0a1b2c3d` as people say it: `v000007`."""
    return (version or "").partition("-")[0]


def duration(seconds: float) -> str:
    """`71 s`, `20 min`, `3 h`, `2 days`."""
    for limit, unit, name in ((90, 1, "s"), (5400, 60, "min"), (172_800, 3600, "h")):
        if seconds < limit:
            return f"{max(0, round(seconds / unit))} {name}"
    return f"{round(seconds / 86_400)} days"
