"""Drafters with equal weights are replayed once for all of them, and nothing that is recorded depends on it."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from helpers.worker.record_fixtures import told
from helpers.worker.worker_fixtures import Bench, final_state, published

import drafter.policy
import service.worker.lineage
import service.worker.scoring
from drafter.model.draft_model import computes_alike
from drafter.replay.replay import replay
from service.storage.registry import Registry
from service.worker.lineage import CANDIDATE

OPEN: dict[str, Any] = {"gate_min_gain": 0.0, "recent_tokens": 100_000, "learning_rate": 5e-3}
#: Of a score record.
OF_THE_CLOCK: dict[str, Any] = {"created": 0, "entry_id": "", "train_seconds": 0}


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The replays of drafters meanwhile: the number of rollouts of each."""
    found = list[int]()

    def counting(drafter: Any, batch: Any, *rest: Any, **named: Any) -> Any:
        found.append(batch.rollouts)
        return replay(drafter, batch, *rest, **named)

    with monkeypatch.context() as patch:
        patch.setattr(service.worker.scoring, "replay", counting)
        yield found


def test_a_candidate_is_replayed_beside_what_was_published_once_it_was_trained(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before that one replay is of both, after a restart too; and so it is of versions with equal weights."""
    bench.begin()
    bench.worker().save()
    worker = bench.worker()  # it knows of the candidate what the checkpoint says
    for name, replays in (("a", 1), ("b", 2)):  # each is trained on once it was scored
        bench.post(name)
        with counted(monkeypatch) as found:
            bench.drain(worker)
        assert found == [bench.world.rollouts] * replays, name
    published(bench, bench.world.drafter())  # the first version's weights under a second name
    bench.post("c")
    with counted(monkeypatch) as found:
        bench.drain(worker)
    assert len(found) == 2, "the first version and the second are one, the candidate is another"
    score = bench.store.scores()[bench.posted[-1]]
    assert score.frozen == score.served
    assert score.candidate != score.served
    assert len(score.replayed or ()) == 2, "each has its own name"


def test_equal_drafters_are_compared_once_for_each_state_of_the_candidate(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared = list[bool]()

    def noted(*drafters: Any) -> bool:
        compared.append(computes_alike(*drafters))
        return compared[-1]

    monkeypatch.setattr(service.worker.lineage, "computes_alike", noted)
    bench.begin()
    worker = bench.worker(recent_tokens=0)
    monkeypatch.setattr(worker.learner, "train", lambda *_: (0.0, 0.0))
    for name in "abc":
        bench.post(name)
    bench.drain(worker)
    assert compared == [True]
    monkeypatch.undo()
    monkeypatch.setattr(service.worker.lineage, "computes_alike", noted)
    for name in "de":
        bench.post(name)
        bench.drain(worker)
    assert compared == [True, False], "of d both were still known to be equal"


def test_a_candidate_that_is_another_versions_now_is_compared_again(bench: Bench) -> None:
    """Its trainer counts windows from zero again, as the one before did when it was compared."""
    bench.begin()
    lineage = bench.worker().learner.lineage
    first = str(lineage.served_version())
    second = published(bench, bench.world.drafter(9)).version

    def replayed() -> dict[str, str]:
        drafters = {CANDIDATE: lineage.candidate, first: lineage.version(first), second: lineage.version(second)}
        return lineage.replayed(drafters)

    assert replayed() == {CANDIDATE: first, first: first, second: second}
    lineage.train_from(second)
    assert replayed() == {CANDIDATE: second, first: first, second: second}


def test_what_is_recorded_is_the_same_to_the_bit_where_each_name_is_replayed(
    tmp_path: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scores, gate, controller, weights and events, over a publish and a restart."""

    def outcome(directory: Path) -> Any:
        with Bench(directory, redis_url, **OPEN) as bench, counted(monkeypatch) as found:
            bench.redis.flushall()
            monkeypatch.setattr(drafter.policy, "_UNFORESEEN", random.Random(0))
            bench.begin()
            for half in ("abcdefgh", "ijklmnop"):
                worker = bench.worker()
                for name in half:
                    bench.post(name)
                bench.drain(worker)
                worker.close()
            scores = {one: asdict(record) | OF_THE_CLOCK for one, record in bench.store.scores().items()}
            events = [event["event"] for event in told(Registry(bench.layout))]
            state = json.loads((bench.checkpoint() / "state.json").read_text())
            return final_state(bench)["weights"], scores, events, state["gate"]["trials"], len(found)

    once = outcome(tmp_path / "once")
    monkeypatch.setattr(service.worker.lineage, "computes_alike", lambda *_: False)
    each = outcome(tmp_path / "each")
    assert "published" in once[2][1:], once[2]
    assert once[-1] < each[-1]
    assert once[:-1] == each[:-1]
