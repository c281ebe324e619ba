"""`GET /metrics`: the state of every run in Prometheus' text format.

Built afresh for each scrape from what is stored, on a registry of its own: the API process counts nothing itself, so
several replicas of it, or a restart, report the same numbers. A metric without data is absent, never 0: an alert can
then tell "α is low" from "nobody knows α". No `_created` series. Names, meanings and alerts: docs/reference/metrics.md.

Ratios are left to PromQL wherever they are exact: `rate(round_tokens_total) / rate(rounds_total)` is α over any window.
The gauges `draftalign_alpha` and `draftalign_regret` are of what arrived last and has data for them.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from service.monitor.alpha import DRAFTERS
from service.monitor.counts import number
from service.monitor.current import current

#: What `/metrics` is served as.
CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"

Table = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class RunSnapshot:
    """What is stored about one run, read at one moment.

    `scores`, `acceptances`: records as in docs/reference/architecture.md. `history`: the registry's events.
    `counters`: the hash `da:{run}:counters` (`items, bytes, accepted_total, duplicates_total, dead_total,
    rejected_total, dropped_total`).
    `latest_manifest`: `GET /drafter/latest` as a dict, None before the first publish. `now`: when it was read, in Unix
    seconds.

    `worker`: the gauges of `da:{run}:worker`, all optional:
    `heartbeat` Unix seconds · `error` text, or None while there is none · `action` one word ·
    `trained_tokens_total` · `train_seconds_total` ·
    `rounds_total`, `round_tokens_total`: {drafter: sum since the run began}, kept by the worker because the score
    records are bounded in number and a counter must never fall · `published_total`, `refused_total` ·
    `drift`: {lane: {"statistic": S, "limit": h}}, lanes absent until the monitor's warm-up is over; `drift_alpha`,
    `drift_level`: what the monitor compares · `vocabulary`: {"tokens", "wanted"} while it is gathered ·
    `error`: why the worker refused the run.

    `published`, `last_report` (Unix seconds): for a headline, which is read without `history` and without the records
    of engines that fell silent; None where those are here. `dead_letters`: the newest ones. `oldest_queued`,
    `last_arrival`, `registered`: Unix seconds.
    """

    scores: Mapping[str, Table] | Sequence[Table] = ()
    acceptances: Sequence[Table] = ()
    history: Sequence[Table] = ()
    counters: Table = field(default_factory=dict)
    worker: Table = field(default_factory=dict)
    latest_manifest: Table | None = None
    now: float = field(default_factory=time.time)
    dead_letters: Sequence[Table] = ()
    oldest_queued: float | None = None
    last_arrival: float | None = None
    registered: float | None = None
    published: int | None = None
    last_report: float | None = None


def render(stores: Mapping[str, RunSnapshot], *, queue_limit_bytes: int | None = None) -> bytes:
    """Render the snapshots (run name -> snapshot) in the text format. `queue_limit_bytes`: the setting, per run."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Snapshots(stores, queue_limit_bytes))
    return generate_latest(registry)


class _Snapshots(Collector):
    """Turns snapshots into metric families; samples exist only where there is a number."""

    def __init__(self, stores: Mapping[str, RunSnapshot], queue_limit_bytes: int | None) -> None:
        self._stores = stores
        self._queue_limit_bytes = queue_limit_bytes

    def collect(self) -> Iterable[Metric]:
        families = _Families()
        for run, snapshot in sorted(self._stores.items()):
            _add_alpha(families, run, snapshot)
            _add_totals(families, run, snapshot)
            _add_service(families, run, snapshot)
            _add_drafter(families, run, snapshot)
        families.gauge(
            "draftalign_queue_limit_bytes", "Spooled bytes at which a run's queue answers 429.", self._queue_limit_bytes
        )
        return families


class _Families:
    """Metric families in the order of their first sample. A value that is no finite number adds nothing."""

    def __init__(self) -> None:
        self._families: dict[str, Metric] = {}

    def gauge(self, name: str, text: str, value: object, **labels: str) -> None:
        """Add one sample of a gauge."""
        self._add(GaugeMetricFamily, name, text, value, labels)

    def counter(self, name: str, text: str, value: object, **labels: str) -> None:
        """Add one sample of a counter; `name` ends in `_total`."""
        self._add(CounterMetricFamily, name, text, value, labels)

    def _add(
        self,
        kind: type[GaugeMetricFamily] | type[CounterMetricFamily],
        name: str,
        text: str,
        value: object,
        labels: Mapping[str, str],
    ) -> None:
        found = number(value)
        if found is None:
            return
        family = self._families.get(name)
        if family is None:
            family = self._families[name] = kind(name, text, labels=tuple(labels))
        # Both kinds have it; their common base does not.
        family.add_metric(list(labels.values()), found)  # type: ignore[attr-defined]

    def __iter__(self) -> Iterator[Metric]:
        return iter(self._families.values())


def _add_alpha(families: _Families, run: str, snapshot: RunSnapshot) -> None:
    """Gauges of what arrived last."""
    found = current(snapshot.scores, snapshot.acceptances, snapshot.now) or {}
    for drafter in (*DRAFTERS, "live"):
        text = "Tokens per verification round, bonus token included, of the policy version that arrived last with data."
        families.gauge("draftalign_alpha", text, found.get(f"alpha_{drafter}"), run=run, drafter=drafter)
    text = "Alpha of the best drafter that could be served minus alpha of the served one, same rollouts."
    families.gauge("draftalign_regret", text, found.get("regret"), run=run)
    text = "Mean negated log-probability of the sampled tokens."
    families.gauge("draftalign_policy_entropy_nats", text, found.get("entropy"), run=run)
    text = "Policy version of the scored batch that arrived last; before the first, of the engines' last report."
    families.gauge("draftalign_policy_version", text, found.get("policy_version"), run=run)


def _add_totals(families: _Families, run: str, snapshot: RunSnapshot) -> None:
    """Counters of rounds and tokens, replayed and live."""
    for drafter, rounds in _table(snapshot.worker.get("rounds_total")).items():
        text = "Expected verification rounds of replayed rollouts."
        families.counter("draftalign_rounds_total", text, rounds, run=run, drafter=drafter)
    for drafter, tokens in _table(snapshot.worker.get("round_tokens_total")).items():
        text = "Tokens that these rounds emitted; divided by the rounds it is alpha."
        families.counter("draftalign_round_tokens_total", text, tokens, run=run, drafter=drafter)
    rounds_of: defaultdict[str, float] = defaultdict(float)
    accepted_of: defaultdict[str, float] = defaultdict(float)
    for record in snapshot.acceptances:
        if isinstance(reporter := record.get("reporter"), str):
            rounds_of[reporter] += number(record.get("rounds")) or 0.0
            accepted_of[reporter] += number(record.get("accepted_tokens")) or 0.0
    for reporter in sorted(rounds_of):
        text = "Verification rounds that the engine counted."
        families.counter("draftalign_live_rounds_total", text, rounds_of[reporter], run=run, reporter=reporter)
        text = "Accepted draft tokens that the engine counted, before trimming; the bonus token is not among them."
        accepted = accepted_of[reporter]
        families.counter("draftalign_live_accepted_tokens_total", text, accepted, run=run, reporter=reporter)
    worker = snapshot.worker
    text = "Response tokens trained on, repetitions counted."
    families.counter("draftalign_trained_tokens_total", text, worker.get("trained_tokens_total"), run=run)
    text = "Seconds spent in training."
    families.counter("draftalign_train_seconds_total", text, worker.get("train_seconds_total"), run=run)


def _add_service(families: _Families, run: str, snapshot: RunSnapshot) -> None:
    """Queue, worker and drift monitor."""
    counters, worker = snapshot.counters, snapshot.worker
    for lane, reading in _table(worker.get("drift")).items():
        found = _table(reading)
        text = "CUSUM statistic of a fall of the served drafter's alpha, in standard deviations; alarm above the limit."
        families.gauge("draftalign_drift_statistic", text, found.get("statistic"), run=run, lane=lane)
        text = "Limit of the drift statistic, from the wanted false-alarm rate."
        families.gauge("draftalign_drift_limit", text, found.get("limit"), run=run, lane=lane)
    families.gauge(
        "draftalign_queue_entries", "Batches in the queue, pending included.", counters.get("items"), run=run
    )
    families.gauge("draftalign_queue_bytes", "Spooled bytes of those batches.", counters.get("bytes"), run=run)
    for name, key, text in (
        ("accepted", "accepted_total", "Rollout batches taken into the queue."),
        ("duplicate", "duplicates_total", "Rollout batches that had been sent before."),
        ("dead", "dead_total", "Rollout batches that ended as dead letters."),
        ("rejected", "rejected_total", "Rollout batches refused because the queue was full."),
        ("dropped", "dropped_total", "Unread rollout batches dropped for newer ones."),
    ):
        families.counter(f"draftalign_rollouts_{name}_total", text, counters.get(key), run=run)
    text = "Unix time at which the last rollout batch arrived."
    families.gauge("draftalign_rollouts_last_arrival_timestamp_seconds", text, snapshot.last_arrival, run=run)
    vocabulary = _table(worker.get("vocabulary"))
    text = "Response tokens gathered for the draft vocabulary of a run that begins from scratch."
    families.gauge("draftalign_vocabulary_tokens", text, vocabulary.get("tokens"), run=run)
    text = "Response tokens that the draft vocabulary waits for."
    families.gauge("draftalign_vocabulary_tokens_wanted", text, vocabulary.get("wanted"), run=run)
    text = "Unix time of the worker's last sign of life."
    families.gauge("draftalign_worker_heartbeat_timestamp_seconds", text, worker.get("heartbeat"), run=run)
    text = "1 while the worker cannot work on the run; GET /runs/{run} tells why."
    error = None if "error" not in worker else int(worker["error"] is not None)
    families.gauge("draftalign_worker_error", text, error, run=run)
    if isinstance(action := worker.get("action"), str):
        text = "1 for what the controller decided last."
        families.gauge("draftalign_controller_action", text, 1, run=run, action=action)


def _add_drafter(families: _Families, run: str, snapshot: RunSnapshot) -> None:
    """The registry: how many verdicts, and what is served."""
    events = Counter(event.get("event") for event in snapshot.history)
    for kind, text in (
        ("published", "Drafter versions published."),
        ("refused", "Candidates that the gate refused."),
    ):
        known = number(snapshot.worker.get(f"{kind}_total"))
        if known is None and not snapshot.history:
            continue
        # Either source may have been cut short (the history by its reader, the worker by an older checkpoint).
        families.counter(f"draftalign_drafters_{kind}_total", text, max(known or 0, events[kind]), run=run)
    manifest = snapshot.latest_manifest
    if manifest is None:
        return
    text = "Sequence number of the served drafter; grows with every publish, rollback and push."
    families.gauge("draftalign_drafter_sequence", text, manifest.get("sequence"), run=run)
    moved = [event.get("time") for event in snapshot.history if event.get("sequence") == manifest.get("sequence")]
    text = "Unix time at which the served drafter began to be served."
    moment = next((time for time in moved if number(time) is not None), manifest.get("created"))
    families.gauge("draftalign_publish_timestamp_seconds", text, moment, run=run)
    if isinstance(version := manifest.get("version"), str):
        text = "1 for the version of the served drafter."
        families.gauge("draftalign_drafter_info", text, 1, run=run, version=version)


def _table(value: object) -> Mapping[str, Any]:
    """`value` if it is a mapping, else an empty one; keys sorted, so that the output is stable."""
    return {str(key): value[key] for key in sorted(value)} if isinstance(value, Mapping) else {}


__all__ = ["CONTENT_TYPE", "RunSnapshot", "render"]
