"""Whose rounds are they: attribution around swaps and restarts, and reports."""

from __future__ import annotations

import json
import logging
import math
import os
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from helpers.engine.agent_fixtures import Engine, Service, eventually, running_agent, settle
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, ProcessCollector, generate_latest

from rl_hooks.agent.books import EngineBooks
from rl_hooks.agent.canary import CanaryRule
from rl_hooks.engines.counting.counters import (
    ACCEPTED,
    ACCEPTED_PER_POSITION,
    DRAFTED,
    MAX_BUCKETS,
    ROUNDS,
    Counts,
    Ledger,
    Snapshot,
)
from rl_hooks.engines.protocol import EngineState
from rl_hooks.errors import MetricsError
from rl_hooks.format.release import _replayed_alpha
from rl_hooks.wire import COUNTED_PROMPTS

#: A canary that these few rounds satisfy.
SMALL = CanaryRule(rounds=200)


def _page(engine: Engine) -> str:
    return engine._metrics()


# --- against real servers


def test_rounds_are_booked_under_the_version_that_made_them(service: Service, engine: Engine, tmp_path: Path) -> None:
    first = service.publish(1)
    with running_agent(service, engine, cache=tmp_path) as agent:
        eventually(lambda: engine.version == first)
        settle(engine)
        engine.play(100, 2, requests=4)
        eventually(lambda: service.last_report(first).get("rounds") == 100)
        engine.rounds_during_swap = 7  # these belong to no version
        second = service.publish(2)
        eventually(lambda: engine.version == second)
        settle(engine)
        engine.play(40, 1)
        eventually(lambda: service.last_report(second).get("rounds") == 40)
        eventually(lambda: service.last_report(first)["final"])
        unattributed = agent.followers[engine.url].ledger.unattributed_rounds
    report = service.last_report(first)
    assert report == {
        "run": "default",
        "reporter": f"agent {engine.url}",
        "engine": engine.url,
        "method": "drafter",
        "drafter_version": first,
        "policy_version": None,
        "life": report["life"],
        "rounds": 100,
        "drafted_tokens": 300,
        "accepted_tokens": 200,
        "accepted_per_position": [100, 100, 0],
        "emitted_tokens": 300,  # the four first tokens came from prefills
        "finished_requests": 4,
        "window_seconds": report["window_seconds"],
        "depth": 3,
        "drafting": None,
        "final": True,
    }
    assert 0 < report["window_seconds"] < 60
    assert service.last_report(second)["accepted_tokens"] == 40
    assert unattributed == 7


def test_every_round_of_a_busy_engine_is_booked_once(service: Service, engine: Engine, tmp_path: Path) -> None:
    versions = []
    with running_agent(service, engine, cache=tmp_path) as agent:
        for number in range(1, 5):
            versions.append(service.publish(number))
            while engine.version != versions[-1]:
                engine.play(1, 1)
            settle(engine)
            engine.play(5, 1)
        settle(engine)
        ledger = agent.followers[engine.url].ledger
        booked = sum(ledger.version_counts(version).rounds for version in versions)
        with engine.lock:
            assert booked + ledger.unattributed_rounds <= engine.counters["drafts"]
        assert ledger.version_counts(versions[-1]).rounds >= 5


@pytest.mark.parametrize("in_state", [False, True])
def test_counts_are_kept_apart_by_policy_version(
    service: Service, engine: Engine, tmp_path: Path, in_state: bool
) -> None:
    engine.policy_version, engine.policy_in_state = 3, in_state
    version = service.publish(1)
    with running_agent(service, engine, cache=tmp_path):
        eventually(lambda: engine.version == version)
        settle(engine)
        engine.play(10, 3)
        eventually(lambda: service.last_report(version, 3).get("rounds") == 10)
        engine.policy_version = 4
        settle(engine)
        engine.play(20, 1)
        eventually(lambda: service.last_report(version, 4).get("rounds") == 20)
        eventually(lambda: service.last_report(version, 3)["final"])
    assert service.last_report(version, 3)["accepted_tokens"] == 30
    assert not service.last_report(version, 4)["final"]


@pytest.mark.parametrize("says", [False, True], ids=["by counters that fell", "by the process's start"])
def test_an_engine_that_restarts_begins_a_life_of_its_counts(
    says: bool, service: Service, engine: Engine, tmp_path: Path
) -> None:
    """It may pass what it had counted before, between two looks: then only the start of its process tells."""
    version, after = service.publish(1), 130 if says else 30
    engine.started = 1.7e9 if says else None
    with running_agent(service, engine, cache=tmp_path):
        eventually(lambda: engine.version == version)
        settle(engine)
        engine.play(100, 2)
        eventually(lambda: service.last_report(version).get("rounds") == 100)
    engine.restart(version)
    if says:
        engine.started = 1.7e9 + 100.25
    engine.play(after, 1)
    with running_agent(service, engine, cache=tmp_path):  # the second agent has the memory of the first
        eventually(lambda: service.last_report(version).get("rounds") == after)
        settle(engine)
        engine.play(5, 1)
        eventually(lambda: service.last_report(version).get("rounds") == after + 5)
    first, second = dict.fromkeys(r["life"] for r in service.reports)
    counts = [(r["life"], r["rounds"]) for r in service.reports]
    assert counts == sorted(counts, key=lambda one: ((first, second).index(one[0]), one[1]))
    assert max(rounds for life, rounds in counts if life == first) == 100


def test_reports_go_on_where_they_were_when_the_agent_restarts(
    service: Service, engine: Engine, tmp_path: Path
) -> None:
    version = service.publish(1)
    with running_agent(service, engine, cache=tmp_path):
        eventually(lambda: engine.version == version)
        settle(engine)
        engine.play(100, 2)
        eventually(lambda: service.last_report(version).get("rounds") == 100)
    engine.play(11, 2)  # while no agent looks; the drafter is the same before and after
    with running_agent(service, engine, cache=tmp_path):
        eventually(lambda: service.last_report(version).get("rounds") == 111)
        engine.play(5, 2)
        eventually(lambda: service.last_report(version).get("rounds") == 116)


def test_a_spoilt_memory_is_ignored(service: Service, engine: Engine, tmp_path: Path) -> None:
    version = service.publish(1)
    with running_agent(service, engine, cache=tmp_path):
        eventually(lambda: engine.version == version)
    (memory,) = (tmp_path / "default" / "engines").iterdir()
    for text in ("", "[]", '{"buckets": 3}', "{"):
        memory.write_text(text)
        with running_agent(service, engine, cache=tmp_path):
            settle(engine)
            engine.play(1, 1)
            eventually(lambda: service.last_report(version).get("rounds", 0) >= 1)


def test_of_a_memory_that_cannot_be_read_what_was_rejected_stays_out(
    service: Service, engine: Engine, tmp_path: Path
) -> None:
    with running_agent(service, engine, cache=tmp_path, canary=SMALL):
        first, second = _trial(service, engine, 0)
        eventually(service.verdicts)
        eventually(lambda: engine.version == first)
        settle(engine)
    (memory,) = (tmp_path / "default" / "engines").iterdir()
    document = json.loads(memory.read_text())
    memory.write_text(json.dumps(document | {"canary": {"good": first, "trial": None, "baseline": [], "counts": []}}))
    with running_agent(service, engine, cache=tmp_path, canary=SMALL):
        settle(engine)
        engine.play(1, 1)
        eventually(lambda: service.last_report(first).get("rounds") == 1)
    assert engine.swapped == [first, second, first], "the one that failed stays out"


def test_a_memory_that_cannot_be_read_is_ignored(
    service: Service, engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bad sector under the cache leaves engines with a drafter."""
    with running_agent(service, engine, cache=tmp_path):
        eventually((tmp_path / "default" / "engines").is_dir)
    read_text = Path.read_text

    def failing(self: Path, *options: Any, **named: Any) -> str:
        if self.parent.name == "engines":
            raise OSError(5, "Input/output error")
        return read_text(self, *options, **named)

    monkeypatch.setattr(Path, "read_text", failing)
    version = service.publish(1)
    with running_agent(service, engine, cache=tmp_path):
        eventually(lambda: engine.version == version)


def test_reports_are_made_good_when_the_service_was_away(service: Service, engine: Engine, tmp_path: Path) -> None:
    version = service.publish(1)
    with running_agent(service, engine, cache=tmp_path):
        eventually(lambda: engine.version == version)
        settle(engine)
        service.down()
        engine.play(50, 2)
        settle(engine)
        service.up()
        eventually(lambda: service.last_report(version).get("rounds") == 50)


def test_a_report_that_the_service_refuses_does_not_stop_the_agent(
    service: Service, engine: Engine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It may be refused for ever, where the run was archived or deleted, and costs one line."""
    version = service.publish(1)
    service.acceptance_status = 422
    with running_agent(service, engine, cache=tmp_path) as agent, caplog.at_level(logging.INFO, "draftalign.agent"):
        eventually(lambda: engine.version == version)
        settle(engine)
        refused = {"peer": "report", "kind": "ReportError"}

        def counted() -> float:
            return agent.metrics.registry.get_sample_value("draftalign_agent_errors_total", refused) or 0.0

        for _ in range(3):
            before = counted()
            engine.play(50, 2)
            eventually(lambda before=before: counted() > before)  # type: ignore[misc]
        assert caplog.text.count("POST /acceptance answered 422") == 1
        service.acceptance_status = 200
        engine.play(1, 2)
        eventually(lambda: service.last_report(version).get("rounds") == 151)


@pytest.mark.parametrize("status", [200, 302, 404, 502])
def test_what_a_proxy_answers_is_not_the_services_word(
    service: Service, engine: Engine, tmp_path: Path, caplog: pytest.LogCaptureFixture, status: int
) -> None:
    """It is said, and no contact. A verdict is sent once, and counts of what has gone do not change: both wait."""

    def contact() -> float | None:
        name = "draftalign_agent_last_contact_timestamp_seconds"
        return agent.metrics.registry.get_sample_value(name, {"peer": "service"})

    with running_agent(service, engine, cache=tmp_path, canary=CanaryRule(rounds=200)) as agent:
        first, second = _on_trial(service, engine)
        service.proxys_page = status
        engine.play(200, 1)
        eventually(lambda: engine.version == first)
        eventually(lambda: all(path in caplog.text for path in ("POST /acceptance", "GET /drafter/latest")))
        heard = contact()
        settle(engine, 6)
        assert contact() == heard
        assert service.verdicts() == []
        service.proxys_page = None
        (verdict,) = eventually(service.verdicts)
        assert (verdict["version"], verdict["outcome"]) == (second, "rolled_back")
        eventually(lambda: service.last_report(second).get("rounds") == 200)


@pytest.mark.parametrize("name", [ROUNDS, ACCEPTED + "{", DRAFTED, ACCEPTED_PER_POSITION])
def test_a_missing_counter_is_named_and_never_zero(
    service: Service, engine: Engine, tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    engine.hidden_metrics = {name}
    version = service.publish(1)
    with running_agent(service, engine, cache=tmp_path), caplog.at_level(logging.ERROR, "draftalign.agent"):
        eventually(lambda: engine.version == version)  # a drafter it gets nevertheless
        engine.play(10, 1)
        eventually(lambda: name.rstrip("{") in caplog.text)
        settle(engine)
    assert service.reports == []


def test_emitted_tokens_are_unknown_where_the_engine_does_not_count_them(
    service: Service, engine: Engine, tmp_path: Path
) -> None:
    engine.hidden_metrics = {"vllm:generation_tokens_total"}
    version = service.publish(1)
    with running_agent(service, engine, cache=tmp_path):
        eventually(lambda: engine.version == version)
        settle(engine)
        engine.play(10, 1)
        assert eventually(lambda: service.last_report(version))["emitted_tokens"] is None


# --- the canary


def _on_trial(service: Service, engine: Engine) -> tuple[str, str]:
    """Version 1 accepts three drafts a round; version 2 is loaded."""
    first = service.publish(1)
    eventually(lambda: engine.version == first)
    settle(engine)
    engine.play(300, 3)
    settle(engine)
    second = service.publish(2)
    eventually(lambda: engine.version == second)
    settle(engine)
    return first, second


def test_an_engine_that_drafts_nothing_yet_is_reported_once(service: Service, engine: Engine, tmp_path: Path) -> None:
    """So the service knows that it is followed."""
    with running_agent(service, engine, cache=tmp_path):
        first = service.publish(1)
        eventually(lambda: service.reports)
        settle(engine, 6)
        assert [(r["drafter_version"], r["rounds"]) for r in service.reports] == [(first, 0)]
        engine.play(50, 3)
        eventually(lambda: service.reports[-1]["rounds"] == 50)


def test_an_engine_that_counts_exactly_and_drafts_nothing_yet_is_reported() -> None:
    books = EngineBooks(SMALL)
    after, state = Snapshot.of_exact((), Counts(), 4), EngineState("v1", True, 1)
    assert books.book_exact(None, after, state, 1.0, 0.0) is None
    books.book_exact(after, after, state, 1.0, 1.0)
    assert [(b.drafter_version, b.policy_version, b.counts.rounds) for b in books.ledger.buckets()] == [("v1", 4, 0)]
    unknown = EngineBooks(SMALL)
    unknown.book_exact(None, after, EngineState(None, True, 0), 1.0, 0.0)
    assert not unknown.ledger.buckets(), "a drafter without a name"


def _trial(service: Service, engine: Engine, alpha_accepted: int) -> tuple[str, str]:
    """Version 2 accepts `alpha_accepted` drafts a round, for as many rounds as a verdict takes."""
    first, second = _on_trial(service, engine)
    engine.play(199, alpha_accepted)
    settle(engine)
    assert engine.version == second  # too early to tell
    engine.play(1, alpha_accepted)
    return first, second


def test_a_version_that_does_worse_is_swapped_back_and_reported(
    service: Service, engine: Engine, tmp_path: Path
) -> None:
    with running_agent(service, engine, cache=tmp_path, canary=SMALL):
        first, second = _trial(service, engine, 1)
        eventually(lambda: engine.version == first)
        (verdict,) = eventually(service.verdicts)
        settle(engine, 6)
        assert engine.swapped == [first, second, first]
    assert verdict == {
        "version": second,
        "previous": first,
        "alpha": 2.0,
        "previous_alpha": 4.0,
        "rounds": 200,
        "previous_rounds": 300,
        "outcome": "rolled_back",
        "sequence": 2,
    }
    assert [r["drafter_version"] for r in service.reports if "canary" in r] == [second]


def test_an_engine_goes_back_to_a_version_that_was_accepted_without_a_trial(
    service: Service, engine: Engine, tmp_path: Path
) -> None:
    with running_agent(service, engine, cache=tmp_path, canary=SMALL) as agent:
        first = service.publish(1)
        eventually(lambda: engine.version == first)
        settle(engine)
        engine.play(300, 3)
        settle(engine)
        agent.followers[engine.url].books.canary._good_at -= 7200.0  # nothing recent to compare with
        second = service.publish(2)
        eventually(lambda: engine.version == second)
        settle(engine)
        engine.play(400, 3)
        settle(engine)
        third = service.publish(3)
        eventually(lambda: engine.version == third)
        settle(engine)
        engine.play(200, 0)
        (verdict,) = eventually(service.verdicts)
        settle(engine)
        assert engine.swapped == [first, second, third, second]
    assert (verdict["version"], verdict["previous"], verdict["outcome"]) == (third, second, "rolled_back")


def test_a_trial_survives_a_restart_of_the_agent(service: Service, engine: Engine, tmp_path: Path) -> None:
    with running_agent(service, engine, cache=tmp_path, canary=SMALL):
        first, second = _on_trial(service, engine)
    with running_agent(service, engine, cache=tmp_path, canary=SMALL):
        settle(engine)
        assert engine.version == second
        engine.play(400, 0)
        eventually(lambda: engine.version == first)
        (verdict,) = eventually(service.verdicts)
    assert (verdict["version"], verdict["outcome"]) == (second, "rolled_back")


def test_rounds_of_before_an_agent_was_away_for_hours_are_no_baseline(
    service: Service, engine: Engine, tmp_path: Path
) -> None:
    first = service.publish(1)
    with running_agent(service, engine, cache=tmp_path, canary=SMALL):
        eventually(lambda: engine.version == first)
        settle(engine)
        engine.play(300, 3)
        eventually(lambda: service.last_report(first).get("rounds") == 300)
    (memory,) = (tmp_path / "default" / "engines").glob("*.json")
    os.utime(memory, times=(time.time() - 7200,) * 2)
    second = service.publish(2)
    with running_agent(service, engine, cache=tmp_path, canary=SMALL):
        eventually(lambda: engine.version == second)
        settle(engine)
        engine.play(300, 0)
        eventually(lambda: service.last_report(second).get("rounds") == 300)
        settle(engine, 6)
    assert (engine.version, service.verdicts()) == (second, [])


def test_counts_are_reported_while_every_swap_fails(service: Service, engine: Engine, tmp_path: Path) -> None:
    with running_agent(service, engine, cache=tmp_path):
        first = service.publish(1)
        eventually(lambda: engine.version == first)
        settle(engine)
        engine.refusal = (503, "not now")
        service.publish(2)
        settle(engine)
        engine.play(250, 1)
        eventually(lambda: service.last_report(first).get("rounds") == 250)


def test_an_old_manifest_is_not_taken_by_the_next_agent(service: Service, engine: Engine, tmp_path: Path) -> None:
    service.publish(1)
    old = dict(service.manifest or {})
    second = service.publish(2)
    with running_agent(service, engine, cache=tmp_path):
        eventually(lambda: engine.version == second)
        settle(engine)
    service._offer(old)
    with running_agent(service, engine, cache=tmp_path) as agent:
        labels = {"peer": "service", "kind": "ManifestError"}
        eventually(lambda: agent.metrics.registry.get_sample_value("draftalign_agent_errors_total", labels))
        settle(engine)
    assert engine.version == second


def test_a_rejected_version_stays_out_until_a_person_pushes_it_again(
    service: Service, engine: Engine, tmp_path: Path
) -> None:
    with running_agent(service, engine, cache=tmp_path, canary=SMALL):
        first, second = _trial(service, engine, 1)
        eventually(lambda: engine.version == first)
        service.push_again()  # the service's decision, not a person's
        settle(engine, 6)
        assert engine.version == first
        engine.restart()
        eventually(lambda: engine.version == first)
    with running_agent(service, engine, cache=tmp_path, canary=SMALL):  # remembered by the next agent
        settle(engine, 6)
        assert engine.version == first
        engine.restart()
        eventually(lambda: engine.version == first)
        service.push_again(override_canary=True)
        eventually(lambda: engine.version == second)
        engine.play(400, 1)
        settle(engine, 6)
        assert engine.version == second  # a person insisted
        third = service.publish(3)
        eventually(lambda: engine.version == third)


def test_a_version_that_holds_its_own_stays(service: Service, engine: Engine, tmp_path: Path) -> None:
    with running_agent(service, engine, cache=tmp_path, canary=SMALL):
        first, second = _trial(service, engine, 3)
        (verdict,) = eventually(service.verdicts)
        settle(engine)
        assert engine.swapped == [first, second]
    assert verdict["outcome"] == "passed"


@pytest.mark.parametrize(("accepted", "outcome"), [(1, "passed"), (0, "rolled_back")])
def test_a_version_that_is_drafted_at_another_depth_is_judged_by_its_first_drafts(
    service: Service, engine: Engine, tmp_path: Path, accepted: int, outcome: str
) -> None:
    """An engine that drafts fewer tokens in larger batches: first a step's last requests, then the next one's all."""
    with running_agent(service, engine, cache=tmp_path, canary=SMALL):
        first, second = _on_trial(service, engine)
        engine.play(200, accepted, depth=1)
        (verdict,) = eventually(service.verdicts)
        settle(engine, 6)
        assert engine.swapped == [first, second, *([first] if outcome == "rolled_back" else [])]
    assert (verdict["outcome"], verdict["alpha"], verdict["previous_alpha"]) == (outcome, 1.0 + accepted, 2.0)


def test_canary_can_be_switched_off(service: Service, engine: Engine, tmp_path: Path) -> None:
    with running_agent(service, engine, cache=tmp_path, canary=CanaryRule(rounds=0)):
        first, second = _trial(service, engine, 0)
        engine.play(1000, 0)
        settle(engine)
    assert engine.swapped == [first, second]
    assert service.verdicts() == []


def _counts(rounds: int, accepted: int, depth: int = 3) -> Counts:
    return Counts(rounds, depth * rounds, rounds * accepted, (), None, 1.0)


@pytest.mark.parametrize(("method", "reported"), [("ngram", True), ("mtp", True), ("extract_hidden_states", False)])
def test_an_engine_that_speculates_by_another_method_is_counted_under_its_name(
    service: Service, engine: Engine, tmp_path: Path, method: str, reported: bool
) -> None:
    engine.method = method
    service.publish(1)
    with running_agent(service, engine, cache=tmp_path) as agent:
        settle(engine)
        engine.play(10, 3, requests=2)  # rounds that had drafts
        engine.play_plainly(25)  # rounds that had none: one token each, and vLLM does not count them
        if reported:
            report = eventually(lambda: service.last_report(method) if service.last_report(method) else None)
            eventually(lambda: service.last_report(method).get("rounds") == 35)
            report = service.last_report(method)
            assert report["method"] == method
            assert (report["accepted_tokens"], report["emitted_tokens"]) == (30, 65)
        else:
            eventually(lambda: agent.followers[engine.url].ledger.unattributed_rounds == 10)
            assert service.reports == []
        settle(engine, 4)
    assert engine.swapped == []


# --- the ledger by itself


def test_vllm_pages_are_read_with_labels_summed() -> None:
    text = """# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 10.0
vllm:spec_decode_num_drafts_total{engine="1",model_name="m"} 1.0e+01
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 60.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 33.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"} 18.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="2"} 5.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="1",model_name="m",position="1"} 10.0
vllm:spec_decode_num_accepted_tokens_per_pos_created{engine="1",model_name="m",position="1"} 1.7e9
vllm:generation_tokens_total{engine="0",model_name="m"} 60.0
vllm:request_success_total{engine="0",finished_reason="stop",model_name="m"} 9.0
vllm:time_to_first_token_seconds_bucket{engine="0",le="+Inf",model_name="m"} 7.0
vllm:time_to_first_token_seconds_count{engine="0",model_name="m"} 7.0
"""
    snapshot = Snapshot.parse(text)
    assert snapshot == Snapshot(Counts(20, 60, 33, (18, 10, 5), 53, finished_requests=9))
    running = [f'vllm:num_requests_running{{engine="{core}"}} {count}\n' for core, count in enumerate((3, 4.0))]
    assert Snapshot.parse(text + "".join(running)).counts.running_requests == 7
    odd = text.replace('"stop",model_name="m"} 9.0', '"stop"} NaN') + running[0].replace("} 3", "} -3")
    odd_counts = Snapshot.parse(odd).counts
    assert (odd_counts.rounds, odd_counts.finished_requests, odd_counts.running_requests) == (20, None, None)
    counts = snapshot.counts.since(Counts(), 2.0)
    assert counts.alpha == pytest.approx(1 + 33 / 20)
    assert counts.emitted_tokens == 53
    # An engine that counts exactly this is believed; one that counts first tokens only at the end, otherwise.
    assert Snapshot.parse(text + "draftalign:spec_decode_emitted_tokens_total 50\n").counts.emitted_tokens == 50
    assert Snapshot.parse(text.replace("time_to_first_token", "x")).counts.emitted_tokens == 51


def test_a_position_that_fell_tells_of_a_restart_and_emitted_tokens_do_not() -> None:
    """Those are a difference of counters that may be read apart."""
    before = Snapshot(Counts(100, 400, 70, (50, 20), 160))
    assert Snapshot(Counts(105, 420, 75, (56, 19), 170)).has_fallen(before)
    assert not Snapshot(Counts(105, 420, 75, (54, 21), 150)).has_fallen(before)
    assert not Snapshot(Counts(105, 420, 75, (55,), 150)).has_fallen(before)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", ROUNDS),
        (f"{ROUNDS} NaN\n{DRAFTED} 1\n{ACCEPTED} 1\n", "NaN|nan"),
        (f"{ROUNDS} -1\n{DRAFTED} 1\n{ACCEPTED} 1\n", "0 to 2"),
        (f"{ROUNDS} 1\n{DRAFTED} 1\n{ACCEPTED} 1.7e308\n", "0 to 2"),
        (f'{ROUNDS} 1\n{DRAFTED} 1\n{ACCEPTED} 1\n{ACCEPTED_PER_POSITION}{{position="x"}} 1\n', "position"),
        (f'{ROUNDS} 1\n{DRAFTED} 1\n{ACCEPTED} 1\n{ACCEPTED_PER_POSITION}{{position="1000000"}} 1\n', "position"),
        (f"{ROUNDS} {{{{\n", "text format"),
    ],
)
def test_nonsense_metrics_are_an_error(text: str, said: str) -> None:
    with pytest.raises(MetricsError, match=said):
        Snapshot.parse(text)


PAGE = f'{ROUNDS} 5\n{DRAFTED} 20\n{ACCEPTED} 9\n{ACCEPTED_PER_POSITION}{{position="0"}} 9\n'
CREATED = "vllm:spec_decode_num_drafts_created"


def test_a_page_tells_its_process_by_its_start_or_by_the_first_creation_of_its_counter() -> None:
    assert Snapshot.parse(PAGE).life is None
    pages = [
        "process_start_time_seconds 1.7e9\n",
        "process_start_time_seconds 1.7000000001e9\n",
        f'{CREATED}{{engine="0"}} 1.7e9\n',
        f'{CREATED}{{engine="0"}} 1.7e9\n{CREATED}{{engine="1"}} 1.8e9\n',
        f'process_start_time_seconds 1.7e9\n{CREATED}{{engine="0"}} 1.8e9\n',
        "process_start_time_seconds NaN\n",
    ]
    one, other, created, grown, both, odd = (Snapshot.parse(PAGE + more).life for more in pages)
    assert len({one, other, created, odd}) == 4
    assert (grown, both) == (created, one)


def test_a_page_of_the_real_client_library_tells_its_process() -> None:
    registry = CollectorRegistry()
    Counter("vllm:spec_decode_num_drafts", "", ["engine"], registry=registry).labels("0").inc(5)
    alone = PAGE.replace(f"{ROUNDS} 5\n", generate_latest(registry).decode())
    life = Snapshot.parse(alone).life
    assert life is not None
    ProcessCollector(registry=registry)
    with_process = Snapshot.parse(PAGE.replace(f"{ROUNDS} 5\n", generate_latest(registry).decode())).life
    assert with_process not in (None, life)
    assert with_process == Snapshot.parse(PAGE.replace(f"{ROUNDS} 5\n", generate_latest(registry).decode())).life


def test_what_the_service_has_not_got_of_an_earlier_life_is_kept_until_it_has() -> None:
    ledger = Ledger()
    ledger.book("v1", 0, Counts(10))
    ledger.book("v1", 1, Counts(20))
    ledger.buckets()[0].reported = (10, False)
    first = ledger.life
    ledger.begin_life()
    ledger.book("v1", 1, Counts(3))
    assert [(b.life, b.policy_version, b.counts.rounds) for b in ledger.buckets()] == [
        (first, 1, 20),
        (ledger.life, 1, 3),
    ]
    again = Ledger()
    again.restore(json.loads(json.dumps(ledger.dump())), ledger.life)
    assert [(b.life, b.counts) for b in again.buckets()] == [(b.life, b.counts) for b in ledger.buckets()]
    for reported, kept in (((20, True), 2), ((20, False), 1)):  # it must hear too that this has ended
        ledger.buckets()[0].reported = reported
        ledger.book("v1", 1, Counts(3))
        assert len(ledger.buckets()) == kept
    assert [(b.life, b.counts.rounds) for b in ledger.buckets()] == [(ledger.life, 9)]


def test_rounds_that_the_service_has_not_got_yet_are_kept_or_set_aside() -> None:
    """The service is away while the policy moves on; every pair of drafter and policy has a bucket."""
    ledger = Ledger()
    for policy in range(MAX_BUCKETS):
        ledger.book("v1", policy, Counts(10))
    for acknowledged in (3, 5):
        ledger.buckets()[acknowledged].reported = (10, False)
    ledger.buckets()[0].reported = (4, True)  # and six rounds more since then
    kept = {policy: Counts(10) for policy in (MAX_BUCKETS, MAX_BUCKETS + 1)}
    for policy, counts in kept.items():
        ledger.book("v1", policy, counts)
    policies = [bucket.policy_version for bucket in ledger.buckets()]
    assert policies == [policy for policy in range(MAX_BUCKETS + 2) if policy not in (3, 5)]
    assert ledger.unattributed_rounds == 0
    ledger.book("v1", MAX_BUCKETS + 2, Counts(10))
    assert ledger.buckets()[0].policy_version == 1
    assert ledger.unattributed_rounds == 6


def test_buckets_are_bounded_and_the_least_recent_goes_first() -> None:
    ledger = Ledger()
    for policy in range(MAX_BUCKETS + 5):
        ledger.book("v", 0, _counts(1, 1))
        ledger.book("v", policy, _counts(1, 1))
    kept = {bucket.policy_version for bucket in ledger.buckets()}
    assert len(kept) == MAX_BUCKETS
    assert 0 in kept
    assert 1 not in kept


def test_rounds_of_prompts_are_added_subtracted_and_kept_within_bounds() -> None:
    earlier = Counts(4, by_prompt={"0000000a": (6, 2), "0000000b": (5, 2)})
    later = earlier + Counts(3, by_prompt={"0000000b": (4, 1), "0000000c": (7, 2)})
    assert later.by_prompt == {"0000000a": (6, 2), "0000000b": (9, 3), "0000000c": (7, 2)}
    assert later.since(earlier, 1.0).by_prompt == {"0000000b": (4, 1), "0000000c": (7, 2)}
    assert Counts.load(json.loads(json.dumps(asdict(later)))) == later
    full = Counts(by_prompt={f"{n:08x}": (2, 1) for n in range(COUNTED_PROMPTS)})
    assert (full + full).by_prompt == dict.fromkeys(full.by_prompt, (4, 2))
    assert (full + Counts(by_prompt={"ffffffff": (2, 1)})).by_prompt == {}, "a report with more is refused"


def test_alpha_of_nothing_is_not_a_number() -> None:
    assert math.isnan(Counts().alpha)


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from("ab"), st.integers(0, 3), st.integers(0, 50), st.integers(0, 3)),
        min_size=1,
        max_size=20,
    )
)
def test_dumped_books_are_restored_exactly(entries: list[tuple[str, int, int, int]]) -> None:
    ledger, again = Ledger(), Ledger()
    for version, policy, rounds, accepted in entries:
        ledger.book(version, policy, _counts(rounds, accepted))
    again.restore(ledger.dump(), ledger.life)
    assert [(b.drafter_version, b.policy_version, b.counts) for b in again.buckets()] == [
        (b.drafter_version, b.policy_version, b.counts) for b in ledger.buckets()
    ]
    for version in "ab":
        assert ledger.version_counts(version).rounds == sum(r for v, _, r, _ in entries if v == version)


@pytest.mark.parametrize("gate", [None, {}, {"alpha_served": None}, {"alpha_served": "2"}, {"alpha_served": 0.5}])
def test_a_manifest_without_a_usable_replay_says_so(gate: object) -> None:
    assert _replayed_alpha(gate) is None
    assert _replayed_alpha({"alpha_served": 2.5}) == 2.5
