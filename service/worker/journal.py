"""What the worker publishes about one run: score records, running totals, the drift monitor, gauges, the log.

Score records that Redis did not take are kept, and sent with the next ones. `state` goes into the worker's checkpoint.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final

from drafter.replay.gate import Verdict
from service.monitor.alpha import Abandoned, attempts
from service.monitor.controller import NO_MEMORY, UNJUDGED, Decision
from service.monitor.drift.cause import cause_of
from service.monitor.drift.limits import DriftConfig, DriftError
from service.monitor.drift.monitor import DriftMonitor, DriftReading
from service.monitor.drift.state import DriftState
from service.monitor.drift.succession import Succession
from service.monitor.headroom import LearningCurve
from service.monitor.live.engine import LiveRule
from service.monitor.live.watch import EVIDENCE_SECONDS
from service.monitor.records import LaneGauges, ScoreRecord, Vocabulary, WorkerGauges
from service.monitor.worth import DraftingTime
from service.settings import Settings
from service.storage.queue.deliveries import Entry
from service.storage.reports.store import MAX_SCORES, Store
from service.worker.scoring import Scores

log = logging.getLogger("draftalign.worker")

#: After a tick with the alarm on, the alarm is logged again only after this number of ticks without it.
_QUIET_TICKS = 50
#: The least time and policy versions over which the share of the engines' time that goes to rounds is measured.
_LEAST_WINDOW_SECONDS: Final = 60.0
_WINDOW_VERSIONS: Final = 4
#: Totals of `served` on those batches on which all drafters were scored, to compare `frozen` and `best` with.
COMPARED: Final = "served_compared"


@dataclass
class Totals:
    """Counters that survive restarts."""

    trained_tokens: int = 0
    train_seconds: float = 0.0
    published: int = 0
    refused: int = 0
    batches: int = 0
    rounds: dict[str, float] = field(default_factory=dict)
    round_tokens: dict[str, float] = field(default_factory=dict)

    @property
    def gauges(self) -> dict[str, Any]:
        """Their part of the `WorkerGauges`."""
        return {f"{name}_total": value for name, value in vars(self).items() if name != "batches"}


class _Pace:
    """The share of the worker's time that goes to training, over about its last twenty claims.

    It is in no checkpoint, since it is known again after two claims.
    """

    def __init__(self) -> None:
        self._seen: float | None = None
        self._trained = self._passed = 0.0  # seconds

    @property
    def busy(self) -> float | None:
        """From 0 to 1; None before the second claim."""
        return min(1.0, self._trained / self._passed) if self._passed > 0 else None

    def claimed(self, train_seconds: float) -> None:
        """Note a claim, and how long its training took."""
        now, before = time.monotonic(), self._seen
        self._seen = now
        if before is not None:
            self._trained = 0.95 * self._trained + train_seconds
            self._passed = 0.95 * self._passed + now - before


class EngineReports:
    """What the engines of one run report. It is in no checkpoint, since engines go on reporting."""

    def __init__(self, store: Store, run: str) -> None:
        self._store = store
        self._run = run
        self._held: str | None = None  # why nothing was published when it was looked at last
        self.drafting = DraftingTime()

    def compare(self, rule: LiveRule, version_seconds: float | None) -> str | None:
        """Compare engines' counts with replay. Returns why nothing may be published; None: it may.

        The log has when a hold begins and ends. `version_seconds`: mean time between two policy versions.
        """
        try:
            heard = self._store.accounts(time.time() - EVIDENCE_SECONDS)
            found = self._store.watch({name: account for name, (_, account) in heard.items()}, rule).hold
            steps = {name: (at, account.steps) for name, (at, account) in heard.items()}
            self.drafting.feed(steps, max(_LEAST_WINDOW_SECONDS, _WINDOW_VERSIONS * (version_seconds or 0.0)))
        except (ValueError, TypeError, ArithmeticError):  # odd counts, which no batch has caused
            log.exception("%s: what engines report cannot be read; nothing changes about publishing", self._run)
            return self._held
        if (found is None) != (self._held is None):
            agree = "publishing goes on: live and replay α agree again"
            log.warning("%s: %s", self._run, agree if found is None else f"nothing is published: {found}")
        self._held = found
        return found


class DriftWatch:
    """Whether α of one run falls: the drift monitor, the version that feeds it, and requests about its alarm."""

    def __init__(self, settings: Settings, run: str) -> None:
        self.monitor = DriftMonitor(
            DriftConfig(
                days_between_false_alarms=settings.drift_days_between_alarms,
                dead_band=settings.drift_dead_band,
                strata=settings.drift_strata,
            )
        )
        self.heeded: dict[str, str] = {}  # requests about the alarm that were carried out, by action
        self._run = run
        self._succession = Succession()
        self._reading: DriftReading | None = None
        self._quiet_until = 0  # tick before which an alarm is not logged again

    @property
    def watched(self) -> str | None:
        """The version whose α feeds the monitor. Every batch must be scored with it."""
        return self._succession.watched

    @property
    def followed(self) -> str | None:
        """The version before that one, while batches tell by how much the two differ."""
        return self._succession.follows

    @property
    def state(self) -> dict[str, object]:
        """What a checkpoint keeps: plain JSON values."""
        return {
            "drift": self.monitor.state.to_json(),
            "succession": asdict(self._succession),
            "drift_heeded": self.heeded,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from `state`. A monitor's state of another kind is dropped: no reason to refuse a run."""
        self.heeded = dict(state["drift_heeded"])
        try:
            self.monitor = DriftMonitor(self.monitor.config, DriftState.from_json(state["drift"]))
            self._succession = Succession(**state["succession"])
        except DriftError as error:
            log.warning("%s: the drift monitor starts afresh: %s", self._run, error)

    def heed(self, asked: Mapping[str, str]) -> bool:
        """Carry out new requests of people. `asked`: request ids by action. Returns whether there were any."""
        new = {action: request for action, request in asked.items() if request != self.heeded.get(action)}
        for action in new:
            if action == "reset":
                self.monitor.reset()
            else:
                self.monitor.acknowledge()
            log.info("%s: drift alarm: %s, as a person asked", self._run, action)
        if new:
            self.heeded = self.heeded | new
            old = self._reading
            self._reading = None if old is None or "reset" in new else self.monitor.reading(old.value, old.sd)
            self._quiet_until = 0
        return bool(new)

    def forget_baseline(self) -> None:
        """Learn a new baseline of α, because earlier α cannot be compared with what comes."""
        self.monitor.reset()
        self._reading = None

    @property
    def gauges(self) -> dict[str, Any]:
        """The drift monitor's part of the `WorkerGauges`."""
        found = self._reading
        if found is None:
            return {"drift_alpha": None, "drift_level": None, "drift_change": None, "drift": {}}
        lanes = {n: LaneGauges(statistic=lane.statistic, limit=lane.limit) for n, lane in found.lanes.items()}
        of_now = {"drift_alpha": found.value, "drift_level": found.baseline, "drift_change": self.monitor.change()}
        return {**of_now, "drift": lanes}

    def feed(self, scores: Scores, latest: str | None) -> None:
        """Feed the monitor the served drafter's rollouts, scored before anything was trained on them."""
        served = scores.record.drafter_version
        if served is None:
            return
        replays = {v: (found.tokens.tolist(), found.rounds.tolist()) for v, found in scores.versions.items()}
        known, milliseconds, _ = scores.record.arrival
        try:
            readings = self._succession.feed(
                self.monitor,
                replays,
                scores.prompts,
                served=served,
                latest=latest,
                strata=scores.strata or None,
                entropies=scores.entropies or None,
                arrived=milliseconds / 1000.0 if known else None,
                sampling=scores.sampling,
            )
        except (ValueError, TypeError, ArithmeticError):  # no batch caused it, and none may end as dead because of it
            log.exception("%s: the drift monitor starts afresh", self._run)
            self.monitor, self._succession = DriftMonitor(self.monitor.config), Succession()
            return
        for reading in readings:
            before, self._reading = self._reading, reading
            alarmed = before is not None and before.alarm
            # Logged once: a publish may bring the statistic just below its limit, and the next tick above it again.
            if reading.alarm and not alarmed and reading.ticks >= self._quiet_until:
                level = 0.0 if reading.baseline is None else reading.baseline
                change = self.monitor.change()
                why = "" if change is None else f": {cause_of(change).text}"
                log.warning("%s: served α %.2f is below its level so far, %.2f%s", self._run, reading.value, level, why)
            if reading.alarm:
                self._quiet_until = reading.ticks + _QUIET_TICKS


class Journal:
    """The journal of one run."""

    def __init__(self, settings: Settings, store: Store, run: str) -> None:
        self.totals = Totals()
        self._store = store
        self._run = run
        self._max_lag = settings.max_policy_lag
        self.drift = DriftWatch(settings, run)
        self._coverage: float | None = None  # share of the newest batch's response tokens that can be drafted at all
        self._pace = _Pace()
        self.engines = EngineReports(store, run)
        self._unsent: dict[str, ScoreRecord] = {}  # score records that Redis has not taken yet, by batch
        self._told: dict[str, Any] | None = None  # the totals that Redis had before this worker told any
        #: Raises where another worker has the run: a worker that was paused would replace its records and gauges.
        self.before_sending: Callable[[], object] = lambda: None

    @property
    def state(self) -> dict[str, object]:
        """What a checkpoint keeps: plain JSON values."""
        return {"totals": asdict(self.totals), **self.drift.state}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from `state`. A drift state of another kind is dropped: no reason to refuse a run."""
        self.totals = Totals(**state["totals"])
        self.drift.restore(state)

    def record(
        self,
        scored: Sequence[tuple[Entry, Scores]],
        decision: Decision,
        train_seconds: float = 0.0,
        *,
        latest: str | None,
    ) -> None:
        """Count scored batches, feed the drift monitor, and send the score records.

        `latest` is the version that engines were offered when the batches were scored.
        """
        for entry, scores in scored:
            record = scores.record
            if entry.belated:  # no evidence about the present, or about the engines
                record = replace(record, favour=None, replayed=None)
            self._unsent[entry.batch_id] = replace(
                record,
                action=decision.action.value,
                train_seconds=train_seconds / len(scored),
                published_total=self.totals.published,
                refused_total=self.totals.refused,
                trained_tokens_total=self.totals.trained_tokens,
            )
            self.totals.batches += 1
            if not entry.belated:
                self.drift.feed(scores, latest)
                self._coverage = (scores.record.draftable_tokens or 0) / max(1, scores.record.tokens or 0)
            replays = dict(scores.replays)
            if "frozen" not in replays:
                replays.pop("best", None)  # the better of two drafters is not the best of all
            elif "served" in replays:
                replays[COMPARED] = replays["served"]
            for name, found in replays.items():
                sums = found.total()
                self.totals.rounds[name] = self.totals.rounds.get(name, 0.0) + float(sums["rounds"])
                self.totals.round_tokens[name] = self.totals.round_tokens.get(name, 0.0) + float(sums["tokens"])
        self._pace.claimed(train_seconds)
        self.send()

    def send(self) -> None:
        """Send the score records that Redis has not taken yet. Raises what `before_sending` does.

        A full Redis is not waited for: acknowledging makes room in it, and a worker that waits acknowledges nothing.
        The newest `MAX_SCORES` records are kept meanwhile.
        """
        if self._unsent:
            self.before_sending()
        for batch_id in list(self._unsent):
            if not self._store.put_score(batch_id, self._unsent[batch_id]):
                log.error("%s: Redis is full; %d score records wait for room", self._run, len(self._unsent))
                break
            del self._unsent[batch_id]
        while len(self._unsent) > MAX_SCORES:
            del self._unsent[next(iter(self._unsent))]

    def abandoned(self, unfinished: Sequence[Entry]) -> Abandoned:
        """The attempt that the trainer abandoned last. `unfinished`: the entries in the queue.

        A registration at an earlier version does not show it: many trainers register at 0, and go on where they were.
        """
        if not (returns := self._store.returns()):
            return Abandoned()
        batches = [
            ScoreRecord(policy_version=entry.policy_version, entry_id=entry.arrived, attempt=entry.attempt)
            for entry in unfinished
        ]
        known = {one.arrival: one for one in (*batches, *self._store.recent_scores())}
        return Abandoned.of(attempts(known.values(), self._max_lag, returns))

    def gathered(self, so_far: Vocabulary | None, batches: int) -> None:
        """Say how far the draft vocabulary of a run from scratch is; None: it is known, and no batches wait for it."""
        if so_far is not None:
            progress = f"{so_far.tokens:,} of {so_far.wanted:,} response tokens gathered"
            log.info("%s: %s for the draft vocabulary; batches waiting: %d", self._run, progress, batches)
        self._store.set_worker(WorkerGauges(vocabulary=so_far))

    def report(
        self,
        newest: Scores,
        decision: Decision,
        draft_vocab_size: int,
        curve: LearningCurve,
        verdict: Verdict | None,
    ) -> None:
        """Say in one line what was done, and set the gauges."""
        served = newest.record.sums("served")
        log.info(
            "%s: policy %d  served α %s  draftable %s  %s: %s%s",
            self._run,
            newest.record.policy_version,
            "-" if served is None else f"{served.alpha:.3f}",
            "-" if self._coverage is None else f"{self._coverage:.1%}",
            decision.action.value,
            decision.reason,
            "" if verdict is None else f"; gate: {verdict.reason}",
        )
        gauges = WorkerGauges.model_construct(  # unchecked: a figure that is no number is nobody's fault here
            action=decision.action.value,
            action_reason=decision.reason,
            **self._never_falling(self.totals.gauges),
            draft_vocab_size=draft_vocab_size,
            draft_coverage=self._coverage,
            headroom=curve.headroom(self._pace.busy),
            unjudged=decision == UNJUDGED,
            no_memory=decision == NO_MEMORY,
            undrafted=decision.undrafted,
            **self.drift.gauges,
        )
        self._store.set_worker(gauges)

    def _never_falling(self, totals: Mapping[str, Any]) -> dict[str, Any]:
        """`totals`, none below what a worker before this one has told.

        After a kill the work since the checkpoint is done again. Prometheus takes a counter that falls for one that
        began at 0, and would count all that the run ever did once more.
        """
        if self._told is None:
            self._told = {name: self._store.told(name) for name in totals}
        return {name: _higher(value, self._told[name]) for name, value in totals.items()}

    def heed_people(self) -> bool:
        """Acknowledge or reset the drift alarm where somebody asked for it; returns whether it was."""
        if new := self.drift.heed(self._store.drift_requests()):
            self._store.set_worker(WorkerGauges.model_construct(**self.drift.gauges))
        return new


def _higher(now: Any, before: Any) -> Any:
    """The higher one of two totals, of sums by drafter each one; `before` is something else where nothing was told."""
    if isinstance(now, dict):
        told = before if isinstance(before, dict) else {}
        return {name: _higher(now.get(name, 0.0), told.get(name)) for name in now.keys() | told}
    return max(now, before) if isinstance(before, int | float) else now
