"""`/metrics`: names, absence of what has no data, and promtool's opinion."""

from __future__ import annotations

import math
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers.worker.record_fixtures import stored
from prometheus_client.parser import text_string_to_metric_families

from service.monitor.alpha import attempts
from service.monitor.current import condensed
from service.monitor.headroom import STATES
from service.monitor.live.engine import Stretch
from service.monitor.live.watch import EngineVerdict, Watch
from service.monitor.metrics import RunSnapshot, render
from service.monitor.records import DrafterSums, HeldVersion, Return, RunState
from service.monitor.worth import AtBatch, Worth

NAMES = {
    "draftalign_alpha": {"run", "drafter"},
    "draftalign_publication_lag": {"run"},
    "draftalign_sampling_tilt": {"run"},
    "draftalign_run_unreadable": {"run"},
    "draftalign_dead_file_bytes": {"run"},
    "draftalign_batches_put_back_total": {"run"},
    "draftalign_sampling_biased": {"run"},
    "draftalign_headroom_ratio": {"run"},
    "draftalign_speculation_speedup_ratio": {"run", "batch"},
    "draftalign_speculation_best_depth": {"run", "batch"},
    "draftalign_speculation_costs_from_batch": {"run"},
    "draftalign_headroom_bound_ratio": {"run", "bound"},
    "draftalign_headroom_state": {"run", "state"},
    "draftalign_training_busy_ratio": {"run"},
    "draftalign_policy_entropy_nats": {"run"},
    "draftalign_policy_version": {"run"},
    "draftalign_rounds_total": {"run", "drafter"},
    "draftalign_round_tokens_total": {"run", "drafter"},
    "draftalign_engine_verdict": {"run", "reporter", "verdict"},
    "draftalign_live_replay_log_ratio": {"run", "reporter"},
    "draftalign_engine_failed_pushes": {"run", "reporter"},
    "draftalign_publishing_held": {"run"},
    "draftalign_live_rounds_total": {"run", "reporter"},
    "draftalign_live_accepted_tokens_total": {"run", "reporter"},
    "draftalign_drift_statistic": {"run", "lane"},
    "draftalign_drift_limit": {"run", "lane"},
    "draftalign_drift_part": {"run", "part"},
    "draftalign_drift_cause": {"run", "cause"},
    "draftalign_queue_entries": {"run"},
    "draftalign_queue_bytes": {"run"},
    "draftalign_queue_limit_bytes": {"run"},
    "draftalign_token_file_broken": set(),
    "draftalign_redis_memory_ratio": set(),
    "draftalign_runs": set(),
    "draftalign_batches_accepted_total": {"run"},
    "draftalign_batches_duplicate_total": {"run"},
    "draftalign_batches_dead_total": {"run"},
    "draftalign_batches_rejected_total": {"run"},
    "draftalign_rollouts_not_finite_total": {"run"},
    "draftalign_batches_last_arrival_timestamp_seconds": {"run"},
    "draftalign_vocabulary_tokens": {"run"},
    "draftalign_vocabulary_tokens_wanted": {"run"},
    "draftalign_drafters_published_total": {"run"},
    "draftalign_drafters_refused_total": {"run"},
    "draftalign_gain_promised": {"run", "version"},
    "draftalign_gain_realised": {"run", "version"},
    "draftalign_drafter_sequence": {"run"},
    "draftalign_publish_timestamp_seconds": {"run"},
    "draftalign_worker_heartbeat_timestamp_seconds": {"run"},
    "draftalign_worker_error": {"run"},
    "draftalign_trained_tokens_total": {"run"},
    "draftalign_train_seconds_total": {"run"},
    "draftalign_controller_action": {"run", "action"},
    "draftalign_drafter_info": {"run", "version"},
    "draftalign_drafter_held": {"run"},
    "draftalign_run_state": {"run", "state"},
}


def full_snapshot() -> RunSnapshot:
    def sums(alpha: float) -> dict[str, float]:
        return {"tokens": 100 * alpha, "rounds": 100.0}

    drafters = {"served": 3.5, "candidate": 3.6, "frozen": 1.75, "ngram": 1.25, "best": 3.625}
    favour = {"excess": 1.0, "variance": 50.0, "tokens": 400}
    newest = {"policy_version": 8, "favour": favour, **{name: sums(alpha) for name, alpha in drafters.items()}}
    return stored(
        queue_limit_bytes=1 << 30,
        redis_fill=0.25,
        scores=[
            {"policy_version": 7, "frozen": sums(9.0), "logprob_sum": -50.0, "logprob_tokens": 100},
            newest,
        ],
        acceptances=[
            {"reporter": "engine-0", "policy_version": 7, "rounds": 10, "accepted_tokens": 20, "emitted_tokens": 30},
            {"reporter": "engine-0", "policy_version": 8, "rounds": 40, "accepted_tokens": 100, "emitted_tokens": 138},
            {"reporter": "engine-1", "policy_version": None, "rounds": 5, "accepted_tokens": 6, "emitted_tokens": 11},
            {"reporter": "engine-2", "policy_version": 7, "rounds": 6, "accepted_tokens": 15, "emitted_tokens": 21},
        ],
        history=[
            {"time": 100.0, "event": "published", "sequence": 1, "version": "v000001-aaaaaaaa"},
            {"time": 110.0, "event": "refused", "policy_version": 7},
            {"time": 120.0, "event": "published", "sequence": 2, "version": "v000002-bbbbbbbb"},
            {"time": 125.0, "event": "realised", "version": "v000002-bbbbbbbb", "promised": 0.05, "realised": 0.04},
            {"time": 130.0, "event": "rolled_back", "sequence": 3, "version": "v000001-aaaaaaaa"},
        ],
        counters={
            "items": 2,
            "dead_file_bytes": 100,
            "put_back_total": 1,
            "bytes": 4096,
            "accepted_total": 20,
            "duplicates_total": 1,
            "dead_total": 0,
            "rejected_total": 3,
            "not_finite_total": 1,
        },
        worker={
            "heartbeat": 1000.5,
            "error": None,
            "action": "train",
            "trained_tokens_total": 5000,
            "train_seconds_total": 12.5,
            "rounds_total": {"served": 700.0, "frozen": 900.0},
            "round_tokens_total": {"served": 2100.0, "frozen": 1800.0},
            "headroom": {
                "gain": 0.07,
                "low": 0.03,
                "high": 0.2,
                "each": 0.02,
                "each_error": 0.005,
                "busy": 0.9,
            },
            "vocabulary": {"tokens": 27_648, "wanted": 50_000},
            "drift": {"fast": {"statistic": 1.5, "limit": 9.5}, "slow": {"statistic": 0.0, "limit": 36.1}},
            "drift_change": {
                "rollouts": 640,
                "alarm": True,
                "held": {"value": -0.02, "variance": 0.0001},
                "drafter": {"value": -0.2, "variance": 0.0001},
            },
        },
        latest={"version": "v000001-aaaaaaaa", "sequence": 3, "created": 99.0},
        last_arrival=990.0,
        watch=Watch((EngineVerdict("engine-0", "dead", "", None, Stretch(300, 1.0, 3.0, -1.1, 0.1), since=50.0),)),
        pushes=(40.0, 60.0, 90.0),
        state=RunState("draining", "the RL run is over", "ada", 900.0),
        held=HeldVersion("v000001-aaaaaaaa", "the second is odd", 950.0),
        worth=Worth(None, 4, (AtBatch(8, 4, 2.5, 2.25), AtBatch(64, 1, 1.1, 0.9)), 64),
    )


def samples(text: bytes) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    }


def value(text: bytes, name: str, **labels: str) -> float:
    return samples(text)[name, tuple(sorted(labels.items()))]


def test_names_and_labels_are_the_documented_ones() -> None:
    text = render(
        {"a": full_snapshot(), "b": full_snapshot()},
        redis_fill=0.25,
        unreadable=["c"],
        token_file_broken=True,
    )
    found: dict[str, set[str]] = {}
    for name, labels in samples(text):
        assert found.setdefault(name, {k for k, _ in labels}) == {k for k, _ in labels}
    assert found == NAMES
    documented = (Path(__file__).parents[3] / "docs" / "reference" / "metrics.md").read_text()
    assert set(re.findall(r"draftalign_[a-z_]+[a-z]", documented)) >= set(NAMES)
    assert set(re.findall(r"^\| `(draftalign_[a-z_]+[a-z])", documented, flags=re.M)) == set(NAMES)


def test_values_come_through() -> None:
    text = render({"default": full_snapshot()}, token_file_broken=False)
    alpha = {d: value(text, "draftalign_alpha", run="default", drafter=d) for d in ("served", "frozen", "best", "live")}
    assert alpha == {"served": 3.5, "frozen": 1.75, "best": 3.625, "live": 21 / 6}, "without the dead engine"
    assert value(text, "draftalign_publication_lag", run="default") == pytest.approx(0.125)
    assert value(text, "draftalign_headroom_ratio", run="default") == 0.07
    assert value(text, "draftalign_speculation_speedup_ratio", run="default", batch="8") == 2.25
    assert value(text, "draftalign_speculation_best_depth", run="default", batch="8") == 4
    assert value(text, "draftalign_speculation_costs_from_batch", run="default") == 64
    assert value(text, "draftalign_headroom_bound_ratio", run="default", bound="low") == 0.03
    states = {s: value(text, "draftalign_headroom_state", run="default", state=s) for s in STATES}
    assert [state for state, on in states.items() if on] == ["training_bound"]
    assert value(text, "draftalign_training_busy_ratio", run="default") == 0.9
    assert value(text, "draftalign_policy_version", run="default") == 8
    assert value(text, "draftalign_policy_entropy_nats", run="default") == 0.5  # version 8 has none yet
    assert value(text, "draftalign_rounds_total", run="default", drafter="frozen") == 900
    assert value(text, "draftalign_live_rounds_total", run="default", reporter="engine-0") == 50
    engine = {"run": "default", "reporter": "engine-0"}
    assert value(text, "draftalign_engine_verdict", **engine, verdict="dead") == 1
    assert value(text, "draftalign_live_replay_log_ratio", **engine) == -1.1
    assert value(text, "draftalign_engine_failed_pushes", **engine) == 2
    assert value(text, "draftalign_publishing_held", run="default") == 0
    assert value(text, "draftalign_live_accepted_tokens_total", run="default", reporter="engine-1") == 6
    assert value(text, "draftalign_drift_limit", run="default", lane="slow") == 36.1
    assert value(text, "draftalign_drift_part", run="default", part="policy") == pytest.approx(-0.0198, abs=1e-4)
    assert value(text, "draftalign_drift_cause", run="default", cause="drafter") == pytest.approx(-0.1813, abs=1e-4)
    assert value(text, "draftalign_drafters_published_total", run="default") == 2
    assert value(text, "draftalign_drafters_refused_total", run="default") == 1
    assert value(text, "draftalign_gain_promised", run="default", version="v000002-bbbbbbbb") == 0.05
    assert value(text, "draftalign_gain_realised", run="default", version="v000002-bbbbbbbb") == 0.04
    assert value(text, "draftalign_publish_timestamp_seconds", run="default") == 130.0  # when it was moved back to
    assert value(text, "draftalign_controller_action", run="default", action="train") == 1
    assert value(text, "draftalign_drafter_info", run="default", version="v000001-aaaaaaaa") == 1


def test_a_run_that_the_worker_refuses_shows_until_it_works_again() -> None:
    for worker, shown in (({"error": "fc.weight holds NaN"}, 1), ({"error": None, "heartbeat": 5.0}, 0)):
        assert value(render({"r": stored(worker=worker)}), "draftalign_worker_error", run="r") == shown
    assert "draftalign_worker_error" not in render({"r": stored(worker={"heartbeat": 5.0})}).decode()


def test_a_metric_without_data_is_absent() -> None:
    assert samples(render({})) == {("draftalign_runs", ()): 0.0}
    assert samples(render({"new": stored()})) == {("draftalign_runs", ()): 1.0}
    partial = stored(
        scores=[{"policy_version": 3, "served": {"tokens": 0.0, "rounds": 0.0}}],
        worker={"heartbeat": math.nan, "rounds_total": {"served": None}, "drift": {}, "action": None},
    )
    assert {name for name, _ in samples(render({"r": partial}))} == {"draftalign_policy_version", "draftalign_runs"}


def scored(entry: str, policy_version: int, alpha: float, **more: Any) -> dict[str, Any]:
    """A score record of a batch that came as queue entry `entry`."""
    served = {"tokens": 100 * alpha, "rounds": 100.0}
    return {"entry_id": entry, "policy_version": policy_version, "served": served, **more}


def gauges(snapshot: RunSnapshot) -> tuple[float, float]:
    text = render({"r": snapshot})
    return value(text, "draftalign_policy_version", run="r"), value(text, "draftalign_alpha", run="r", drafter="served")


def test_gauges_follow_a_trainer_that_went_back_to_an_earlier_checkpoint() -> None:
    first = [scored(f"{100 + v}-0", v, 2.0 + v / 10, created=100.0 + v) for v in range(1, 8)]
    again: list[dict[str, Any]] = []
    for n, policy_version in enumerate((3, 4, 5)):
        again.append(scored(f"{200 + n}-0", policy_version, 1.5 + n / 10, created=200.0 + n))
        # Not pooled with what the first attempt wrote under the same policy version.
        now, alpha = gauges(stored([*first, *again]))
        assert now == policy_version
        assert alpha == pytest.approx(1.5 + n / 10)


def test_gauges_pool_what_came_since_the_policy_version_changed() -> None:
    scores = [scored("1-0", 4, 9.0), scored("2-0", 5, 2.0), scored("3-0", 4, 3.0), scored("3-1", 4, 3.5)]
    now, alpha = gauges(stored(scores))
    assert now == 4
    assert alpha == pytest.approx(3.25)


def test_one_absurd_policy_version_freezes_no_gauge() -> None:
    scores = [scored("1-0", 999999999999999, 1.3), scored("2-0", 7, 2.5)]
    assert gauges(stored(scores)) == (7, 2.5)


def test_gauges_follow_what_came_last_also_after_the_clock_was_set_back() -> None:
    """Ids of a stream only grow, whatever the clock does; `created` is the worker's clock."""
    scores = [scored("9000-0", 8, 3.0, created=9.0), scored("9000-1", 7, 2.5, created=2.0)]
    assert gauges(stored(scores)) == (7, 2.5)
    assert gauges(stored(list(reversed(scores)))) == (7, 2.5)


def test_the_live_gauge_is_of_what_engines_reported_last() -> None:
    def counted(policy_version: int, accepted: int, created: float) -> dict[str, Any]:
        return {
            "reporter": "e",
            "policy_version": policy_version,
            "rounds": 100,
            "accepted_tokens": accepted,
            "created": created,
        }

    before, after = counted(7, 200, 50.0), counted(3, 50, 60.0)
    assert value(render({"r": stored((), [after, before])}), "draftalign_alpha", run="r", drafter="live") == 1.5
    # Reported in the future: before the clock was set back.
    snapshot = stored((), [counted(7, 200, 5000.0), after], now=60.0)
    assert value(render({"r": snapshot}), "draftalign_alpha", run="r", drafter="live") == 1.5


def test_there_are_no_created_series() -> None:
    assert b"_created" not in render({"a": full_snapshot()})


def test_labels_with_hostile_characters_are_escaped() -> None:
    name = 'a"b\\c\nd'
    snapshot = stored(acceptances=[{"reporter": name, "rounds": 1, "accepted_tokens": 1}])
    assert value(render({"r": snapshot}), "draftalign_live_rounds_total", run="r", reporter=name) == 1


def test_live_counts_are_of_published_drafters_alone() -> None:
    """An engine that drafts by n-gram, at 1.01 tokens a round, has not lost a drafter."""
    ours = {"reporter": "e", "drafter_version": "v1", "policy_version": 1, "rounds": 300, "accepted_tokens": 600}
    other = {"reporter": "n", "method": "ngram", "policy_version": 1, "rounds": 5000, "accepted_tokens": 50}
    mixed = {**other, "reporter": "e", "drafter_version": "ngram"}
    snapshot = stored(acceptances=[ours, other, mixed])
    text = render({"r": snapshot})
    assert value(text, "draftalign_live_rounds_total", run="r", reporter="e") == 300
    assert value(text, "draftalign_live_accepted_tokens_total", run="r", reporter="e") == 600
    assert b'reporter="n"' not in text
    few = condensed(snapshot.acceptances, (), snapshot.newest, snapshot.now)
    assert render({"r": replace(snapshot, acceptances=few)}) == text
    later = [replace(one, policy_version=2, drafter_version="v2") for one in snapshot.acceptances[:1]]
    few = condensed([*snapshot.acceptances, *later], (), snapshot.newest, snapshot.now)
    assert len(few) == 2, "the newest policy version's counts, and one sum of the rest"
    totals = render({"r": replace(snapshot, acceptances=few)})
    assert value(totals, "draftalign_live_rounds_total", run="r", reporter="e") == 600


def test_totals_do_not_depend_on_the_bounded_score_records() -> None:
    snapshot = full_snapshot()
    trimmed = replace(snapshot, scores=[])
    for text in (render({"r": snapshot}), render({"r": trimmed})):
        assert value(text, "draftalign_rounds_total", run="r", drafter="served") == 700


@pytest.mark.parametrize("stores", [{"a": full_snapshot(), "b": stored()}, {"a": stored(counters={"items": 0})}])
def test_promtool_accepts_the_output(stores: dict[str, Any]) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed (Debian package prometheus)")
    done = subprocess.run(
        [promtool, "check", "metrics"],
        input=render(stores, token_file_broken=True),
        capture_output=True,
        timeout=30,
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, b"")


def test_a_worker_that_a_person_silenced_raises_no_alarm() -> None:
    silent = stored(worker={"heartbeat": 10.0})
    name = "draftalign_worker_heartbeat_timestamp_seconds"
    for state in ("paused", "archived"):
        text = render({"a": replace(silent, state=RunState(state))})
        assert name not in {found for found, _ in samples(text)}, state
        assert value(text, "draftalign_run_state", run="a", state=state) == 1
    assert value(render({"a": replace(silent, state=RunState("draining"))}), name, run="a") == 10.0


@pytest.mark.parametrize(
    ("now", "cause"),
    [
        ([0.7, 1.0, 0], "sampling temperature"),
        ([0.7123, 1.0, 0], "sampling temperature"),
        ([0.7, 0.9, 20], "sampling temperature and top_p and top_k"),
        ([1.0, 1.0, 0], "sampling"),
    ],
)
def test_the_label_of_another_sampling_has_no_values(now: list[float], cause: str) -> None:
    """A schedule would make a series for each of them."""
    held = {"value": -0.2, "variance": 0.0001}
    change = {"rollouts": 640, "alarm": True, "held": held, "drafter": {"value": 0, "variance": 0}}
    change["resampled"] = {"before": [1.0, 1.0, 0], "now": now, "held": held}
    text = render({"a": stored(worker={"drift_change": change})})
    assert value(text, "draftalign_drift_cause", run="a", cause=cause) == pytest.approx(-0.1813, abs=1e-4)
    assert value(text, "draftalign_drift_part", run="a", part="sampling") == pytest.approx(-0.1813, abs=1e-4)
    assert value(text, "draftalign_drift_part", run="a", part="policy") == 0.0


def test_what_was_judged_of_rollouts_keeps_no_alert_on_while_none_are_scored() -> None:
    full = full_snapshot()
    sure = {"excess": 90.0, "variance": 50.0, "tokens": 400}
    scores = [*full.scores, *stored(scores=[{"policy_version": 8, "favour": sure}]).scores]
    full = replace(full, scores=scores, watch=replace(full.watch, hold="they disagree"))
    judged = ("sampling_biased", "drift_statistic", "drift_cause", "headroom_state", "worker_error", "publication_lag")
    draining = render({"a": full})
    assert value(draining, "draftalign_sampling_biased", run="a") == 1
    assert value(draining, "draftalign_publishing_held", run="a") == 1
    assert {f"draftalign_{name}" for name in judged} <= {found for found, _ in samples(draining)}
    for state in ("paused", "archived"):
        names = {found for found, _ in samples(render({"a": replace(full, state=RunState(state))}))}
        assert not {f"draftalign_{name}" for name in judged} & names, state
        assert ("draftalign_engine_verdict" in names) == (state == "paused"), "its engines still draft, and report"
    assert value(render({"a": replace(full, state=RunState("paused"))}), "draftalign_publishing_held", run="a") == 0


def test_the_engines_part_of_a_cause_is_of_the_trainers_last_attempt() -> None:
    """The features broke in an attempt that the trainer gave up: they are not blamed for what falls in the next one."""
    first, second = [(v, 3.0 if v < 5 else 2.0) for v in range(10)], [(v, 3.0) for v in range(6)]
    batches = [
        (1000 * (n + 1), v, DrafterSums.of([40 * a] * 100, [40] * 100)) for n, (v, a) in enumerate([*first, *second])
    ]
    half = {"value": -0.2, "variance": 1e-4}
    snapshot = stored(
        [
            {"entry_id": f"{at}-0", "policy_version": v, "served": served, "batch_id": str(at)}
            for at, v, served in batches
        ],
        [
            {"reporter": f"e{at}", "drafter_version": "v1", "policy_version": v, "rounds": 2000, "created": at / 1000}
            | {"accepted_tokens": 4000, "emitted_tokens": 6000}
            for at, v, _ in batches
        ],
        worker={"drift_change": {"rollouts": 640, "alarm": True, "held": half, "drafter": {"value": 0, "variance": 0}}},
    )
    both, last = attempts(snapshot.scores), attempts(snapshot.scores, returns=[Return(10.5, 0)])[-1]
    assert (len(both), len(last.scores)) == (1, 6)
    mixed, own = snapshot.with_engine(both[0], both[0].scores).cause, snapshot.with_engine(last, last.scores).cause
    assert mixed is not None
    assert mixed.cause == "features or selection"
    assert own is not None
    assert own.cause == "policy moved, or prompts"
    assert own.terms["engine"].value == pytest.approx(0.0)
    assert own.terms["features"].value == 0.0
