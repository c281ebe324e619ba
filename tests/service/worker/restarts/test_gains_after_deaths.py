"""A published drafter's gain is measured and written once, whoever dies or goes back meanwhile."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.worker.death_fixtures import Stopped, die_in, fails_with
from helpers.worker.record_fixtures import told
from helpers.worker.worker_fixtures import Bench

import service.storage.queue.lease
import service.worker.inbox
import service.worker.process.worker
import service.worker.promotion.promises
from drafter.files.checkpoint import write_drafter
from service.monitor.events import Event, Realised, Refused, read_event
from service.storage.history.events import History
from service.storage.registry import Registry
from service.worker.learner import Learner
from service.worker.lineage import Lineage
from service.worker.loop import RunWorker
from service.worker.promotion.judge import Judge

#: Gains that show at once.
EAGER: dict[str, Any] = {"gate_min_gain": 0.005, "recent_tokens": 100_000, "learning_rate": 5e-3}


def published_by(bench: Bench, worker: RunWorker, name: str) -> int:
    """Post batches until another version is published; returns how many it took."""
    before = Registry(bench.layout).versions("default")
    for n in range(16):
        bench.post(f"{name} {n}", rollouts=64)
        bench.drain(worker)
        if Registry(bench.layout).versions("default") != before:
            return n + 1
    raise AssertionError("nothing was published")


@pytest.mark.parametrize("pushed", [False, True])
def test_a_death_right_after_a_publish_makes_it_no_refusal_and_its_gain_is_measured(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, *, pushed: bool
) -> None:
    bench.begin()
    registry = Registry(bench.layout)
    with monkeypatch.context() as patch:
        die_in(patch, Lineage, "promote", after=True)
        with pytest.raises(Stopped):
            published_by(bench, bench.worker(**EAGER), "a")
    served = registry.latest("default")
    assert served is not None
    assert served.gate is not None
    if pushed:
        registry.push_again("default", "the engine lost it")
    refused = [e for e in told(registry) if e["event"] == "refused"]
    worker = bench.worker(**EAGER)
    bench.drain(worker)
    assert worker.learner.journal.totals.published == 1
    assert worker.learner.judge.gate.served == served.version
    assert worker.learner.judge.gate.outcomes.unmeasured, "those that judged it do not measure it"
    after = [e for e in told(registry) if e["event"] == "refused"]
    assert after == refused, "the candidate is what is served: that is no refusal"
    for n in range(8):
        bench.post(f"b {n}", rollouts=64)
        bench.drain(worker)
    realised = [e for e in told(registry) if e["event"] == "realised"]
    assert realised[0]["version"] == served.version
    assert realised[0]["promised"] == served.gate.gain


@pytest.mark.parametrize("dies", ["before the history has it", "before a checkpoint has it"])
def test_a_death_right_after_a_sent_drafter_is_published_keeps_its_promise_and_what_is_trained(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, dies: str
) -> None:
    bench.begin()
    registry, idle = Registry(bench.layout), EAGER | {"learning_rate": 1e-12}
    bench.worker(**idle).close()
    first, better = registry.latest("default"), bench.world.trained_drafter(tmp_path)
    assert first is not None
    staged = registry.stage("default")
    write_drafter(staged, better)
    sent, _ = registry.archive("default", staged, like=first, reason="from the lab", by="ada", most_waiting=4)
    with monkeypatch.context() as patch:
        if dies == "before the history has it":

            def dying(self: History, run: str, event: Event) -> None:
                if event.event == "published":
                    raise Stopped
                append(self, run, event)

            append = History.record
            patch.setattr(History, "record", dying)
        else:
            die_in(patch, Lineage, "promote", after=True)
        with pytest.raises(Stopped):  # noqa: PT012 - until it has looked often enough
            for n in range(8):
                bench.post(f"a {n}", rollouts=32)
                bench.drain(bench.worker(**idle))
    served = registry.latest("default")
    assert served is not None
    assert served.version == sent.version
    worker = bench.worker(**idle)
    bench.drain(worker)
    gate = worker.learner.judge.gate
    assert (gate.served, gate.outcomes.watched) == (sent.version, first.version)
    assert gate.outcomes.unmeasured, "those that judged it do not measure it"
    assert worker.learner.journal.totals.published == 1
    for name, value in better.state_dict().items():
        trained = worker.learner.lineage.candidate.state_dict()[name]
        assert torch.allclose(trained.float(), value.float(), atol=1e-3), "trained on from it"
    monkeypatch.setattr(service.worker.promotion.promises, "_SETTLED_ROLLOUTS", 1)
    bench.post("b", rollouts=32)
    bench.drain(worker)
    (realised,) = [e for e in told(registry) if e["event"] == "realised"]
    assert (realised["version"], realised["before"]) == (sent.version, first.version)
    assert realised["promised"] > 0
    worker.save()
    registry.push_again("default", "lost")
    published = [e for e in told(registry) if e.get("version") == sent.version and e["event"] == "published"]
    assert [e["gate"]["gain"] for e in published] == [realised["promised"]], "told once"


def test_a_rollback_by_a_person_ends_what_was_being_measured(bench: Bench) -> None:
    bench.begin()
    worker, registry = bench.worker(**EAGER), Registry(bench.layout)
    published_by(bench, worker, "a")
    first = registry.versions("default")[0]
    assert worker.learner.judge.gate.outcomes.watched == first
    measured = worker.learner.judge.gate.served
    worker.save()
    strict = bench.worker(**EAGER | {"gate_min_gain": 1e6})
    bench.post("before", rollouts=64)
    bench.drain(strict)
    registry.rollback("default", first, "by hand")
    strict.learner.judge.controller.curve.learn(0.2, 0.01, promoted=False)
    assert strict.learner.judge.gate.outcomes.watched == first
    bench.post("after", rollouts=64)
    bench.drain(strict)
    assert strict.learner.judge.gate.served == first
    assert strict.learner.judge.gate.outcomes.watched is None, "the other one does not serve"
    assert gains(bench) == [measured], "what is known of it is written"
    assert all(m.gain != 0.2 for m in strict.learner.judge.controller.curve.measured), (
        "that was against another drafter"
    )


def gains(bench: Bench) -> list[str]:
    return [e["version"] for e in told(Registry(bench.layout)) if e["event"] == "realised"]


def test_a_gain_that_is_known_half_is_written_once_whoever_dies(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next publish ends the measurement; the checkpoint is from before it, so the next life finds it again."""
    monkeypatch.setattr(service.worker.promotion.promises, "_SETTLED_ROLLOUTS", 1_000_000)
    bench.begin()
    worker = bench.worker(**EAGER)
    published_by(bench, worker, "a")
    measured = Registry(bench.layout).versions("default")[-1]
    worker.save()
    strict = bench.worker(**EAGER | {"gate_min_gain": 1e6})
    bench.post("half", rollouts=64)
    bench.drain(strict)
    strict.save()
    assert not gains(bench)
    with monkeypatch.context() as patch:
        die_in(patch, Lineage, "promote", after=True)
        with pytest.raises(Stopped):
            published_by(bench, bench.worker(**EAGER), "b")
    with monkeypatch.context() as patch:
        die_in(patch, Learner, "_decide")
        with pytest.raises(Stopped):
            bench.drain(bench.worker(**EAGER))
    bench.drain(bench.worker(**EAGER))
    event = Realised(version=measured)
    worker.learner.lineage.record_gain(event)  # and a third time, from whoever finds it
    assert gains(bench) == [measured]
    Registry(bench.layout).rollback("default", measured, "by hand")
    worker.learner.lineage.record_gain(event)
    assert gains(bench) == [measured, measured], "served again, measured again"


def test_a_death_between_a_gain_that_is_written_and_the_checkpoint_writes_it_once(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.begin()
    worker = bench.worker(**EAGER)
    published_by(bench, worker, "a")
    monkeypatch.setattr(service.worker.promotion.promises, "_SETTLED_ROLLOUTS", 1)
    bench.post("after", rollouts=64)
    with monkeypatch.context() as patch:
        die_in(patch, Lineage, "record_gain", after=True)
        with pytest.raises(Stopped):
            bench.drain(worker)
    assert gains(bench)
    strict = bench.worker(**EAGER | {"gate_min_gain": 1e6})
    bench.drain(strict)
    bench.post("more", rollouts=64)
    bench.drain(strict)
    assert len(gains(bench)) == len(set(gains(bench)))


def test_a_death_between_a_refusal_that_is_written_and_the_checkpoint_writes_it_once(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.begin()
    strict = EAGER | {"gate_min_gain": 1e6, "checkpoint_seconds": 3600.0}

    def refused() -> list[str | None]:
        found = [event for event in map(read_event, told(Registry(bench.layout))) if isinstance(event, Refused)]
        return [event.gate.judged_to for event in found if event.gate is not None]

    worker = bench.worker(**strict)
    bench.post("first", rollouts=64)
    bench.drain(worker)
    worker.save()
    with monkeypatch.context() as patch:
        die_in(patch, Lineage, "refuse", after=True, calls=2)
        with pytest.raises(Stopped):  # noqa: PT012 - until two trainings were refused
            for n in range(8):
                bench.post(f"a {n}", rollouts=64)
                bench.drain(worker)
    known = refused()
    assert len(known) == 2
    worker = bench.worker(**strict)
    bench.drain(worker)
    assert worker.learner.journal.totals.refused > 0, "it was judged again"
    assert refused() == known
    bench.post("later", rollouts=64)
    bench.drain(worker)
    assert refused()[:2] == known
    assert len(refused()) == len(set(refused())) == 3, "a later one is another"


def test_rollouts_that_chose_a_version_do_not_measure_it_when_they_come_again(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that fails is not the batches' doing, so their delivery is not counted: it does not tell."""
    bench.begin()
    worker = bench.worker(**EAGER)
    promote = Lineage.promote

    def then_the_disk_fails(self: Lineage, *arguments: Any) -> Any:
        patch.setattr(Judge, "conclude", fails_with(OSError(5, "Input/output error")))
        return promote(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Lineage, "promote", then_the_disk_fails)
        with pytest.raises(OSError, match="Input/output"):
            published_by(bench, worker, "a")
    versions = Registry(bench.layout).versions("default")
    bench.drain(worker)
    assert Registry(bench.layout).versions("default") == versions
    assert worker.learner.judge.gate.outcomes.unmeasured


def test_a_claim_that_fails_after_a_rollback_is_looked_at_once(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.begin()
    worker, registry = bench.worker(**EAGER), Registry(bench.layout)
    published_by(bench, worker, "a")
    worker.save()
    registry.rollback("default", registry.versions("default")[0], "by hand")
    strict = bench.worker(**EAGER | {"gate_min_gain": 1e6})
    monkeypatch.setattr(Lineage, "refuse", fails_with(OSError(28, "no space left on device")))
    bench.post("after", rollouts=64)
    with pytest.raises(OSError, match="no space"):
        bench.drain(strict)
    state = strict.learner.judge.gate.state
    assert state["served"] == registry.versions("default")[0]
    assert (state["trials"]["candidate"]["spent"]["looks"], state["tested"]) == (0, 0), (
        "it comes again, and counts then"
    )


def test_a_version_whose_predecessor_is_gone_is_not_waited_for(bench: Bench) -> None:
    """All drafters would be compared with every claim, for a gain that nobody can measure."""
    bench.begin()
    worker = bench.worker(**EAGER)
    published_by(bench, worker, "a")
    assert worker.learner.judge.gate.outcomes.unmeasured
    shutil.rmtree(bench.layout.drafter("default", str(worker.learner.judge.gate.outcomes.watched)))
    assert not worker.learner.judge.gate.outcomes.unmeasured
