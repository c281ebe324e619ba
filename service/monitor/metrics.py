"""`GET /metrics`: the state of every run in Prometheus' text format.

Each scrape builds it from what is stored, on a registry of its own. The API process counts nothing itself, so replicas
of it report the same numbers, also after a restart. A metric without data is absent, never 0: an alert can then tell
"α is low" from "α is not known". No `_created` series. Names, meanings and alerts: docs/reference/metrics.md.

Ratios are left to PromQL wherever they are exact: `rate(round_tokens_total) / rate(rounds_total)` is α over any window.
The gauges `draftalign_alpha` and `draftalign_publication_lag` are of the newest batches that have data for them.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, Final, TypeAlias

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from service.monitor.alpha import Attempt
from service.monitor.counts import sound
from service.monitor.current import Current, Newest, current
from service.monitor.drift.cause import Cause, HasSums, as_fraction, cause_of, engine_change
from service.monitor.events import RunEvent
from service.monitor.headline import RECENT_BATCHES, KnownOfRun
from service.monitor.headroom import STATES, Advice, advise, longest_pause, trainer_silent
from service.monitor.live.watch import EVIDENCE_SECONDS, Watch, failed_pushes
from service.monitor.records import (
    DRAFTERS,
    AcceptanceRecord,
    Estimate,
    Return,
    RunState,
    ScoreRecord,
    ServedDrafter,
    Vocabulary,
)
from service.monitor.worth import Worth

#: What `/metrics` is served as.
CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSnapshot(KnownOfRun):
    """What is stored about one run, read at one moment.

    `scores`: all, or the newest ones. `acceptances`: all, or few records that stand for all (`condensed`).
    `engine`: what engines have of a cause (`engine_change`); None: nothing is known. `returns`: signs that trainers
    went back. `counters`: the queue's (`items, bytes, accepted_total, duplicates_total, dead_total, rejected_total`).
    `queue_limit_bytes`: at which it is full. `redis_fill`: share of Redis' memory in use; None: it has no limit.
    `latest`: None before the first publish. `dead_letters`: the newest ones. `last_report` (Unix seconds): of an engine
    whose records may be left out. `pushes`: when the drafter was last pushed again, oldest first. `worth`: what
    acceptance is worth in time.
    """

    scores: Sequence[ScoreRecord] = ()
    acceptances: Sequence[AcceptanceRecord] = ()
    engine: Estimate | None = None
    history: Sequence[RunEvent] = ()
    returns: Sequence[Return] = ()
    counters: Mapping[str, int] = field(default_factory=dict)
    queue_limit_bytes: int | None = None
    redis_fill: float | None = None
    latest: ServedDrafter | None = None
    dead_letters: Sequence[Mapping[str, str]] = ()
    last_report: float | None = None
    pushes: Sequence[float] = ()
    worth: Worth = field(default_factory=Worth)

    @property
    def newest(self) -> Newest:
        """The newest scores, with the figures of now."""
        return self.scores if isinstance(self.scores, Newest) else Newest(self.scores, returns=self.returns)

    @property
    def current(self) -> Current | None:
        """What is true now; sick engines are no evidence of it."""
        return current(self.newest, sound(self.acceptances, self.watch.sick), self.now)

    @property
    def cause(self) -> Cause | None:
        """Why α changed; None while the worker has measured nothing."""
        change = self.worker.drift_change
        return None if change is None else cause_of(change, self.engine)

    def with_engine(self, attempt: Attempt[Any], replayed: Sequence[HasSums]) -> RunSnapshot:
        """The same, with the engines' part of the cause: of what they counted in an attempt, the trainer's last.

        `replayed`: the served drafter's replay on the attempt's batches.
        """
        if self.worker.drift_change is None:
            return self
        counts = filter(attempt.counted, sound(self.acceptances, self.watch.sick))
        return replace(self, engine=engine_change(replayed, counts))


#: What a run adds to the text: its samples, by the lines that begin their family.
Part: TypeAlias = Mapping[bytes, bytes]
_HEARTBEAT: Final = b"# HELP draftalign_worker_heartbeat_timestamp_seconds "
_FAMILY: Final = re.compile(rb"^(# HELP .*\n# TYPE .*\n)((?:[^#].*\n)*)", re.MULTILINE)
#: The beginning of each family, once for the parts of all runs.
_BEGINNINGS: Final[dict[bytes, bytes]] = {}


def render(
    stores: Mapping[str, RunSnapshot | Part],
    *,
    redis_fill: float | None = None,
    unreadable: Sequence[str] = (),
    token_file_broken: bool | None = None,
) -> bytes:
    """Render snapshots, or parts that were made of them (by run), in the text format.

    `redis_fill`: share of Redis' memory in use; None: it has no limit. `unreadable`: runs of which nothing could be
    read. `token_file_broken`: None where there is no token file.
    """
    families = _Families()
    for run in unreadable:
        text = "1 for a run whose state could not be read; the API's log says why."
        families.gauge("draftalign_run_unreadable", text, 1, run=run)
    text = "Share of Redis' memory (maxmemory) that is in use; at 1 it refuses rollouts. Absent without a limit."
    families.gauge("draftalign_redis_memory_ratio", text, redis_fill if stores else None)
    text = "Runs that are registered, as far as the token may read them. Always there."
    families.gauge("draftalign_runs", text, len(stores) + len(unreadable))
    text = "1 while the token file cannot be used and the tokens before it stay valid."
    families.gauge("draftalign_token_file_broken", text, token_file_broken)
    found: defaultdict[bytes, list[bytes]] = defaultdict(list)
    parts = (part_of(run, one) if isinstance(one, RunSnapshot) else one for run, one in sorted(stores.items()))
    for part in (*parts, families.part()):
        for beginning, samples in part.items():
            found[beginning].append(samples)
    return b"".join(chain.from_iterable((beginning, *samples) for beginning, samples in found.items()))


def part_of(run: str, stored: RunSnapshot) -> Part:
    """What a run adds to the text."""
    families, snapshot = _Families(), _of_now(stored)
    _add_alpha(families, run, snapshot)
    _add_engines(families, run, snapshot)
    _add_headroom(families, run, snapshot)
    _add_worth(families, run, snapshot)
    _add_totals(families, run, snapshot)
    _add_service(families, run, snapshot)
    _add_drafter(families, run, snapshot)
    return families.part()


def with_heartbeat(part: Part, heartbeat: float | None) -> Part:
    """The same part after another sign of life of the worker; that of a run that tells none stays as it is."""
    beginning = next((one for one in part if one.startswith(_HEARTBEAT)), None)
    if beginning is None or heartbeat is None:
        return part
    sample = part[beginning].rpartition(b" ")[0]
    value = floatToGoString(heartbeat)  # type: ignore[no-untyped-call]
    return {**part, beginning: b"%b %b\n" % (sample, value.encode())}


def stands(snapshot: RunSnapshot) -> bool:
    """Whether a run's part stays as it is while nothing is written: it tells nothing that changes by the clock alone.

    Engines' verdicts end some time after their last report; headroom has another meaning once the trainer is silent.
    """
    ended = (snapshot.last_report or 0.0) < snapshot.now - EVIDENCE_SECONDS
    return ended and (snapshot.worker.headroom is None or _trainer_silent(snapshot))


class _Families(Collector):
    """Metric families in the order of their first sample. A value that is None adds nothing."""

    def __init__(self) -> None:
        self._families: dict[str, Metric] = {}

    def gauge(self, name: str, text: str, value: float | None, **labels: str) -> None:
        """Add one sample of a gauge."""
        self._add(GaugeMetricFamily, name, text, value, labels)

    def counter(self, name: str, text: str, value: float | None, **labels: str) -> None:
        """Add one sample of a counter; `name` ends in `_total`."""
        self._add(CounterMetricFamily, name, text, value, labels)

    def _add(
        self,
        kind: type[GaugeMetricFamily] | type[CounterMetricFamily],
        name: str,
        text: str,
        value: float | None,
        labels: Mapping[str, str],
    ) -> None:
        if value is None:
            return
        family = self._families.get(name)
        if family is None:
            family = self._families[name] = kind(name, text, labels=tuple(labels))
        # Both kinds have it; their common base does not.
        family.add_metric(list(labels.values()), float(value))  # type: ignore[attr-defined]

    def collect(self) -> Iterable[Metric]:
        """All families, as Prometheus' client asks for them."""
        return self._families.values()

    def part(self) -> Part:
        """All families as text."""
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        found = _FAMILY.findall(generate_latest(registry))
        return {_BEGINNINGS.setdefault(beginning, beginning): samples for beginning, samples in found}


def _of_now(snapshot: RunSnapshot) -> RunSnapshot:
    """Leave out verdicts on rollouts where none are scored: else an alert stays on while a run is paused."""
    if snapshot.state.worked_on:
        return snapshot
    of_rollouts: dict[str, object] = {
        "heartbeat": None,
        "error": "",
        "headroom": None,
        "drift": {},
        "drift_change": None,
    }
    worker = snapshot.worker.model_copy(update=of_rollouts)
    watch = Watch() if snapshot.state.state == "archived" else replace(snapshot.watch, hold=None)
    return replace(snapshot, worker=worker, watch=watch)


def _add_alpha(families: _Families, run: str, snapshot: RunSnapshot) -> None:
    """Gauges of what arrived last."""
    found = snapshot.current or Current()
    for drafter in (*DRAFTERS, "live"):
        text = "Tokens per verification round, bonus token included, of the policy version that arrived last with data."
        families.gauge("draftalign_alpha", text, getattr(found, f"alpha_{drafter}"), run=run, drafter=drafter)
    text = "Alpha of the best drafter that could be served minus alpha of the served one, same rollouts."
    lag = found.publication_lag if snapshot.state.worked_on else None
    families.gauge("draftalign_publication_lag", text, lag, run=run)
    if found.tilt is not None and snapshot.state.worked_on:
        text = "Logarithm of the odds of tokens that the drafter proposes, over those that the policy gives them."
        families.gauge("draftalign_sampling_tilt", text, found.tilt.value, run=run)
        text = "1 where that is beyond chance and rounding: speculation is not lossless."
        families.gauge("draftalign_sampling_biased", text, int(found.tilt.biased), run=run)
    text = "Mean negated log-probability of the sampled tokens."
    families.gauge("draftalign_policy_entropy_nats", text, found.entropy, run=run)
    text = "Policy version of the scored batch that arrived last; before the first, of the engines' last report."
    families.gauge("draftalign_policy_version", text, found.policy_version, run=run)


def _add_engines(families: _Families, run: str, snapshot: RunSnapshot) -> None:
    """Live beside replay α, by engine."""
    for engine in snapshot.watch.engines:
        named = {"run": run, "reporter": engine.reporter}
        text = "1 for how the engine's live alpha compares with replay alpha of the same drafter and policy version."
        families.gauge("draftalign_engine_verdict", text, 1, **named, verdict=engine.name)
        if engine.stretch is not None:
            text = "Logarithm of live over replay alpha, over the rounds that the verdict rests on."
            families.gauge("draftalign_live_replay_log_ratio", text, engine.stretch.log_ratio, **named)
        if engine.name == "dead":
            text = "Pushes since the engine lost the drafter, which did not help."
            pushes = len(failed_pushes(engine, snapshot.pushes))
            families.gauge("draftalign_engine_failed_pushes", text, pushes, **named)
    if snapshot.watch.engines:
        text = "1 while nothing is published because live and replay alpha disagree; GET /alpha tells why."
        families.gauge("draftalign_publishing_held", text, int(snapshot.watch.hold is not None), run=run)


def advice_of(snapshot: RunSnapshot) -> Advice:
    """Say what a run's headroom means."""
    if snapshot.watch.hold is not None:
        return Advice("unknown", "nothing is trained while publishing is held")
    starved = _trainer_silent(snapshot) and not snapshot.counters.get("items")
    worker, blocked = snapshot.worker, None
    if worker.no_memory:
        blocked = "memory ran out in each training: make room for the worker"
    elif worker.unjudged:
        blocked = "no prompt is new that could judge it: send new prompts, or let the policy move on"
    return advise(worker.headroom, action=worker.action, starved=starved, blocked=blocked, undrafted=worker.undrafted)


def _trainer_silent(snapshot: RunSnapshot) -> bool:
    return trainer_silent(snapshot.last_arrival, snapshot.now, longest_pause(snapshot.newest[-RECENT_BATCHES:]))


def _add_headroom(families: _Families, run: str, snapshot: RunSnapshot) -> None:
    """What further training would bring, once a training has been judged."""
    found = snapshot.worker.headroom
    if found is None:
        return
    text = "Relative gain in alpha over the served drafter that further training on today's rollouts would bring."
    families.gauge("draftalign_headroom_ratio", text, found.gain, run=run)
    for bound, value in (("low", found.low), ("high", found.high)):
        text = "Bounds of the 95 % interval of the headroom."
        families.gauge("draftalign_headroom_bound_ratio", text, value, run=run, bound=bound)
    text = "Share of the time that the worker trains."
    families.gauge("draftalign_training_busy_ratio", text, found.busy, run=run)
    state = advice_of(snapshot).state
    for one in STATES:
        text = "1 for what the headroom means, 0 for what it does not."
        families.gauge("draftalign_headroom_state", text, int(one == state), run=run, state=one)


def _add_worth(families: _Families, run: str, snapshot: RunSnapshot) -> None:
    """Speed-up by batch size, where step times tell it."""
    for one in snapshot.worth.batches:
        at = {"run": run, "batch": str(one.batch)}
        text = "Tokens per second with the drafter over those without, at the depth in use, at a batch size."
        families.gauge("draftalign_speculation_speedup_ratio", text, one.speedup, **at)
        text = "Depth with the largest speed-up at a batch size; 0: do not speculate."
        families.gauge("draftalign_speculation_best_depth", text, one.best_depth, **at)
    text = "Smallest batch size, of those, at which the depth in use is slower than plain decoding."
    families.gauge("draftalign_speculation_costs_from_batch", text, snapshot.worth.costs_from, run=run)


def _add_totals(families: _Families, run: str, snapshot: RunSnapshot) -> None:
    """Counters of rounds and tokens, replayed and live."""
    worker = snapshot.worker
    for drafter, rounds in sorted(worker.rounds_total.items()):
        text = "Expected verification rounds of replayed rollouts."
        families.counter("draftalign_rounds_total", text, rounds, run=run, drafter=drafter)
    for drafter, tokens in sorted(worker.round_tokens_total.items()):
        text = "Tokens that these rounds emitted; divided by the rounds it is alpha."
        families.counter("draftalign_round_tokens_total", text, tokens, run=run, drafter=drafter)
    rounds_of: defaultdict[str, float] = defaultdict(float)
    accepted_of: defaultdict[str, float] = defaultdict(float)
    for record in snapshot.acceptances:
        if record.reporter is not None and record.ours:  # of another method they would say that our drafter is poor
            rounds_of[record.reporter] += record.rounds
            accepted_of[record.reporter] += record.accepted_tokens or 0
    for reporter in sorted(rounds_of):
        text = "Verification rounds that the engine counted with published drafters."
        families.counter("draftalign_live_rounds_total", text, rounds_of[reporter], run=run, reporter=reporter)
        text = "Accepted draft tokens of these rounds, before trimming; the bonus token is not among them."
        accepted = accepted_of[reporter]
        families.counter("draftalign_live_accepted_tokens_total", text, accepted, run=run, reporter=reporter)
    text = "Response tokens trained on, repetitions counted."
    families.counter("draftalign_trained_tokens_total", text, worker.trained_tokens_total, run=run)
    text = "Seconds spent in training."
    families.counter("draftalign_train_seconds_total", text, worker.train_seconds_total, run=run)


def _add_service(families: _Families, run: str, snapshot: RunSnapshot) -> None:
    """Queue, worker and drift monitor."""
    counters, worker = snapshot.counters, snapshot.worker
    text = "1 for what a person wants of the run: active, paused, draining or archived; absent where nobody said."
    said = None if snapshot.state == RunState() else 1
    families.gauge("draftalign_run_state", text, said, run=run, state=snapshot.state.state)
    for lane, reading in sorted(worker.drift.items()):
        text = "CUSUM statistic of a fall of the served drafter's alpha, in standard deviations; alarm above the limit."
        families.gauge("draftalign_drift_statistic", text, reading.statistic, run=run, lane=lane)
        text = "Limit of the drift statistic, from the wanted false-alarm rate."
        families.gauge("draftalign_drift_limit", text, reading.limit, run=run, lane=lane)
    why = snapshot.cause
    for part, term in () if why is None else why.terms.items():
        text = "Change of alpha since the drift baseline by part, as a fraction; factors 1 + x multiply to the whole."
        families.gauge("draftalign_drift_part", text, as_fraction(term.value), run=run, part=part)
    if why is not None and why.cause is not None and why.fall is not None:
        text = "The part that explains a fall of alpha, named; its value is that part's change of alpha as a fraction."
        families.gauge("draftalign_drift_cause", text, as_fraction(why.fall), run=run, cause=why.cause)
    families.gauge(
        "draftalign_queue_entries", "Batches in the queue, pending included.", counters.get("items"), run=run
    )
    families.gauge("draftalign_queue_bytes", "Spooled bytes of those batches.", counters.get("bytes"), run=run)
    text = "Spooled bytes at which the queue answers 429; less while others fill the disk."
    families.gauge("draftalign_queue_limit_bytes", text, snapshot.queue_limit_bytes, run=run)
    text = "Bytes of files of dead batches, which are kept to be put back."
    families.gauge("draftalign_dead_file_bytes", text, counters.get("dead_file_bytes"), run=run)
    for name, key, text in (
        ("accepted", "accepted_total", "Rollout batches taken into the queue."),
        ("duplicate", "duplicates_total", "Rollout batches that had been sent before."),
        ("dead", "dead_total", "Rollout batches that ended as dead letters."),
        ("put_back", "put_back_total", "Dead rollout batches that were put back into the queue."),
        ("rejected", "rejected_total", "Rollout batches refused because the queue was full."),
    ):
        families.counter(f"draftalign_batches_{name}_total", text, counters.get(key), run=run)
    text = "Rollouts that were left out of their batch because they hold NaN or infinity."
    families.counter("draftalign_rollouts_not_finite_total", text, counters.get("not_finite_total"), run=run)
    text = "Unix time at which the last rollout batch arrived."
    families.gauge("draftalign_batches_last_arrival_timestamp_seconds", text, snapshot.last_arrival, run=run)
    vocabulary = worker.vocabulary or Vocabulary()
    text = "Response tokens gathered for the draft vocabulary of a run that begins from scratch."
    families.gauge("draftalign_vocabulary_tokens", text, vocabulary.tokens, run=run)
    text = "Response tokens that the draft vocabulary waits for."
    families.gauge("draftalign_vocabulary_tokens_wanted", text, vocabulary.wanted, run=run)
    text = "Unix time of the worker's last sign of life."
    families.gauge("draftalign_worker_heartbeat_timestamp_seconds", text, worker.heartbeat, run=run)
    text = "1 while the worker cannot work on the run; GET /runs/{run} tells why."
    error = None if worker.error == "" else int(worker.error is not None)
    families.gauge("draftalign_worker_error", text, error, run=run)
    if worker.action is not None:
        text = "1 for what the controller decided last."
        families.gauge("draftalign_controller_action", text, 1, run=run, action=worker.action)


def _add_drafter(families: _Families, run: str, snapshot: RunSnapshot) -> None:
    """The registry: how many verdicts, and what is served."""
    moves = snapshot.moves
    for kind, known, text in (
        ("published", snapshot.worker.published_total, "Drafter versions published."),
        ("refused", snapshot.worker.refused_total, "Sent drafters refused, and whole trainings after which none won."),
    ):
        if known is None and not moves.counts:
            continue
        # Either source may have been cut short (the history by its reader, the worker by an older checkpoint).
        families.counter(f"draftalign_drafters_{kind}_total", text, max(known or 0, moves.counts[kind]), run=run)
    for kind, text in (
        ("promised", "Relative gain in α that the gate promised of the version that was measured last."),
        ("realised", "What that version gained over the one before it, on the same later rollouts."),
    ):
        gain = getattr(moves.realised, kind)
        if gain is not None:
            families.gauge(f"draftalign_gain_{kind}", text, gain, run=run, version=str(moves.realised.version))
    latest = snapshot.latest
    if latest is None:
        return
    text = "Sequence number of the served drafter; grows with every publish, rollback and push."
    families.gauge("draftalign_drafter_sequence", text, latest.sequence, run=run)
    text = "Unix time at which the served drafter began to be served."
    offer = moves.offers.get(latest.sequence)
    moment = latest.created if offer is None else offer.began
    families.gauge("draftalign_publish_timestamp_seconds", text, moment, run=run)
    text = "1 while a person holds the served drafter: nothing is published. Absent otherwise."
    families.gauge("draftalign_drafter_held", text, None if snapshot.held is None else 1, run=run)
    text = "1 for the version of the served drafter."
    families.gauge("draftalign_drafter_info", text, 1, run=run, version=latest.version)
