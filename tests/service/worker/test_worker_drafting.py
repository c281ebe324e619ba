"""A run is replayed and trained as its engines draft, from the moment at which all of them say so."""

from __future__ import annotations

import json
from typing import Any

import pytest
from helpers.service.service_fixtures import RunningService
from helpers.worker.worker_fixtures import Bench, Nest

from service.monitor.controller import Controller
from service.storage.reports.drafting import Drafting, learn_drafting, settings_of
from service.storage.runs import change_state
from service.worker.loop import RunWorker

OPEN: dict[str, Any] = {"recent_tokens": 100_000}


def positions(bench: Bench, batch: str) -> int:
    """At how many positions the served drafter was replayed on a batch."""
    (served, *_) = bench.store.scores()[batch].replayed or ()
    return len(served.accepted)


def test_a_worker_follows_what_the_engines_say_and_loses_nothing(
    bench: Bench, service: RunningService, workers: Nest
) -> None:
    bench.begin()
    pid = workers.start(bench)
    first = bench.post("first")
    bench.wait(lambda: bench.state(first) == "trained")
    assert positions(bench, first) == 4
    counts = {"rounds": 10, "accepted_tokens": 5, "drafted_tokens": 20}
    version = service.client.get("/drafter/latest").json()["version"]
    said = {"reporter": "e", "drafter_version": version, "policy_version": 0, "depth": 2, "drafting": "greedy"}
    assert service.client.post("/acceptance", json=counts | said).json()["warning"] is None
    waiting = [bench.post(f"meanwhile {n}") for n in range(4)]
    bench.wait(lambda: "its engines draft greedy now, 2 tokens a round" in workers.log.read_text())
    last = bench.post("last")
    bench.wait(lambda: bench.state(last) == "trained")
    assert [bench.state(batch) for batch in waiting] == ["trained"] * 4
    assert positions(bench, last) == 2
    assert bench.totals()["batches"] == 6
    assert bench.trainer_counts()["windows"] > 0
    workers.kill(pid)
    workers.start(bench)
    again = bench.post("after a kill")
    bench.wait(lambda: bench.state(again) == "trained")
    assert positions(bench, again) == 2
    assert workers.log.read_text().count("measured from scratch") == 1


def opened(bench: Bench) -> RunWorker:
    found = settings_of(bench.settings, bench.layout, "default")
    return bench.worker(depth=found.depth, drafting=found.drafting, **OPEN)


def test_what_was_measured_before_is_no_evidence_afterwards(bench: Bench) -> None:
    bench.begin()
    worker = opened(bench)
    for n in range(4):
        bench.post(str(n), rollouts=16)
    bench.drain(worker)
    worker.close()
    kept = opened(bench).learner
    assert kept.journal.drift.monitor.state.ticks > 0
    assert any(trial["spent"]["looks"] for trial in kept.judge.gate.state["trials"].values())
    learn_drafting(bench.layout, "default", Drafting(depth=2, drafting="greedy"))
    anew = opened(bench).learner
    assert anew.journal.drift.monitor.state.ticks == 0
    assert not any(trial["spent"]["looks"] for trial in anew.judge.gate.state["trials"].values())
    assert anew.judge.gate.served == kept.judge.gate.served
    assert kept.judge.controller.trainings > 0
    assert anew.judge.controller == Controller(
        train_seconds=kept.judge.controller.train_seconds, version_seconds=kept.judge.controller.version_seconds
    )
    assert anew.lineage.needed_trainer.config.steps_ahead == 2
    learnt, before = (json.loads(one.lineage.needed_trainer.fingerprint()) for one in (anew, kept))
    assert learnt[2:] == before[2:], "what was learnt stays"


def test_a_run_that_is_not_there_learns_nothing(bench: Bench) -> None:
    from service.errors import RunNotFound

    with pytest.raises(RunNotFound):
        learn_drafting(bench.layout, "nobody", Drafting(depth=2, drafting="greedy"))
    assert not bench.layout.run_drafting("nobody").exists()
    bench.begin()
    change_state(bench.layout, "default", "paused", "x")
    learn_drafting(bench.layout, "default", Drafting(depth=2, drafting="greedy"))
    assert settings_of(bench.settings, bench.layout, "default").depth == 2
