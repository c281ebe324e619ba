"""Real hooks against a real service and a real worker: what a trainer hears of its run."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import torch
from helpers.service.failover_fixtures import until
from helpers.service.service_fixtures import RunningService
from helpers.service.storage_fixtures import RolloutQueue, Store
from helpers.trainer.hooks_fixtures import AUX, Attach, attaching, padded_batch, step
from helpers.trainer.hooks_fixtures import tiny_qwen3 as tiny
from helpers.worker.worker_fixtures import Bench
from redis import Redis

from rl_hooks import wire
from rl_hooks.hook import DrafterHook
from service.monitor.alpha import attempts
from service.monitor.events import GateEvidence
from service.storage.queue.lease import Leases
from service.worker.lineage import CANDIDATE
from service.worker.loop import RunWorker


@pytest.fixture(name="attach")
def _attach(serve: Callable[..., RunningService]) -> Iterator[Attach]:
    with attaching(serve().url) as attach:
        yield attach


def largest_gap(bench: Bench) -> float:
    """Of all score records, none of which lacks it."""
    gaps = [record.logprob_gap for record in bench.store.scores().values()]
    known = [gap for gap in gaps if gap is not None]
    assert len(known) == len(gaps)
    return max(known)


def said(caplog: pytest.LogCaptureFixture, text: str) -> int:
    return len([r for r in caplog.records if r.name == "rl_hooks" and text in r.getMessage()])


def test_a_trainer_whose_batches_die_is_told_once_with_the_workers_reason_and_trains_on_untouched(
    attach: Attach, bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    weights = []
    for attached in (True, False):
        model = tiny(tied=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        hook = attach(model) if attached else None
        worker = bench.worker() if attached else None
        for version in range(4):
            batch = padded_batch([(3, 9), (7, 4)], seed=version)
            if hook is not None and worker is not None:
                loss = step(hook, model, version, batch, wrong=3.0).square().mean()
                bench.drain(worker)  # the batch dies seconds after its 202
                assert hook.stats()["dead"] == version, "each answer tells of what died before it"
                assert said(caplog, "die in the drafter service") == (version > 0)
            else:
                loss = model(batch.input_ids, attention_mask=batch.attention_mask).logits.square().mean()
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            optimizer.step()
        if hook is not None:
            stats = hook.stats()
            reason = stats["last_dead_reason"]
            assert "log-probabilities disagree with the features by 3 nats" in reason
            assert reason in stats["last_error"]
            assert said(caplog, "(1 so far) and train nothing: log-probabilities disagree") == 1
            assert (stats["sent"] - stats["head_updates"], stats["failures"]) == (1 + 4, 0)
        weights.append(torch.cat([p.detach().reshape(-1) for p in model.parameters()]))
    assert torch.equal(*weights)


def test_what_died_before_a_trainer_came_is_not_told_as_its_own(
    attach: Attach, bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny()
    first = attach(model)
    worker = bench.worker()
    step(first, model, 0, wrong=3.0)
    bench.drain(worker)
    second = attach(model)
    for version in (1, 2):
        step(second, model, version)
        bench.drain(worker)
    assert (second.stats()["dead"], second.stats()["last_dead_reason"]) == (0, "")
    assert said(caplog, "die in the drafter service") == 0
    step(first, model, 3)
    assert first.stats()["dead"] == 1


# Each value meets each value of another: a half of all combinations.
@pytest.mark.parametrize(
    ("moved", "tied", "told"),
    [
        (0.0, True, True),
        (0.0, False, False),
        (0.02, True, False),
        (0.02, False, True),
        (0.3, True, True),
        (0.3, False, False),
    ],
)
def test_the_batches_of_a_resumed_trainer_live_however_its_head_has_moved(
    attach: Attach, bench: Bench, moved: float, tied: bool, told: bool
) -> None:
    model = tiny(tied=tied)
    hook = attach(model)
    worker = bench.worker()
    step(hook, model, 0)
    bench.drain(worker)
    hook.close(5.0)
    with torch.no_grad():
        head = model.lm_head.weight
        shift = torch.randn(head.shape, generator=torch.Generator().manual_seed(1))
        head.add_(shift * (moved * head.norm() / shift.norm()))
    resumed = attach(model, policy_version=9 if told else 0)
    for version in (9, 10, 11):
        step(resumed, model, version)
        bench.drain(worker)
    assert bench.queue.counters()["dead_total"] == 0
    assert bench.queue.counters()["acked_total"] == 4
    assert largest_gap(bench) < 0.05, "of its own head and of no older one"


@pytest.mark.parametrize("moved", [0.3, 0.4])
@pytest.mark.parametrize("joins_at", [0, 2, 3])
def test_a_resumed_trainer_never_falls_back_onto_heads_of_the_attempt_that_it_abandoned(
    attach: Attach, bench: Bench, moved: float, joins_at: int
) -> None:
    model = tiny()
    hook = attach(model)
    worker = bench.worker()
    step(hook, model, 0)
    checkpoint = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        head = model.lm_head.weight
        shift = torch.randn(head.shape, generator=torch.Generator().manual_seed(1))
        head.add_(shift * (moved * head.norm() / shift.norm()))
    for version in (5, 6):
        step(hook, model, version)
        bench.drain(worker)
    hook.close(5.0)
    model.load_state_dict(checkpoint)
    resumed = attach(model, policy_version=joins_at)
    for version in range(3, 8):
        step(resumed, model, version)
        bench.drain(worker)
    assert (bench.queue.counters()["dead_total"], bench.queue.counters()["acked_total"]) == (0, 8)
    assert largest_gap(bench) < 0.05, "of its own head"


@pytest.mark.parametrize("begins_at", [0, 3])
def test_no_batch_of_an_abandoned_attempt_meets_a_head_of_the_next(
    attach: Attach, bench: Bench, begins_at: int
) -> None:
    """Kept ones are not trained on again; one that was queued until its head was replaced ends with the reason."""
    model = tiny()
    hook = attach(model)
    worker = bench.worker(recent_tokens=100_000)

    def move(seed: int) -> None:
        with torch.no_grad():
            head = model.lm_head.weight
            shift = torch.randn(head.shape, generator=torch.Generator().manual_seed(seed))
            head.add_(shift * (0.15 * head.norm() / shift.norm()))

    states = []
    for version in range(8):
        states.append({name: value.clone() for name, value in model.state_dict().items()})
        step(hook, model, version)
        if version < 7:
            bench.drain(worker)
        move(version)
    abandoned = set(worker.learner.recent.names())
    hook.close(5.0)
    model.load_state_dict(states[begins_at])
    resumed = attach(model, policy_version=begins_at)
    for version in range(begins_at, 8):
        if version > begins_at:
            move(100 + version)
        step(resumed, model, version)
    bench.drain(worker)
    step(resumed, model, 8)
    stats = resumed.stats()
    assert "the trainer went back to an earlier policy version after this batch" in stats["last_dead_reason"]
    assert stats["dead"] == 1
    assert largest_gap(bench) < 0.05, "all others met their own head"
    kept = worker.learner.recent.but([])
    left = {one.policy_version for one in kept if one.name in abandoned}
    assert left == set(range(max(begins_at, 1))), "step 0 is the same in both"
    assert {one.policy_version for one in kept} == set(range(8))


@pytest.mark.parametrize("moved", [0.0, 0.3, 0.48])
def test_a_trainer_that_begins_again_at_step_0_meets_no_head_of_the_attempt_that_it_abandoned(
    attach: Attach, bench: Bench, moved: float
) -> None:
    """Its head never moves: nothing but the registration's answer tells the hook to send it."""
    model = tiny()
    hook = attach(model)
    worker = bench.worker()
    step(hook, model, 0)
    bench.drain(worker)
    start = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        head = model.lm_head.weight
        shift = torch.randn(head.shape, generator=torch.Generator().manual_seed(1))
        head.add_(shift * (moved * head.norm() / shift.norm()))
    for version in range(1, 6):
        step(hook, model, version)
        bench.drain(worker)
    hook.close(5.0)
    model.load_state_dict(start)
    again = attach(model)
    for version in range(6):
        step(again, model, version)
        bench.drain(worker)
    assert (bench.queue.counters()["dead_total"], bench.queue.counters()["acked_total"]) == (0, 12)
    assert largest_gap(bench) < 0.05, "of its own head"
    assert again.stats()["head_updates"] == 1


def test_a_trainer_that_loads_an_earlier_checkpoint_in_the_same_process_opens_an_attempt(
    attach: Attach, bench: Bench
) -> None:
    """Nothing is registered again: the hook says so once a second version shows it, and sends its head."""
    model = tiny()
    hook = attach(model)
    worker = bench.worker()
    for version in [*range(9), *range(4, 8)]:
        if version == 4:
            with torch.no_grad():
                model.lm_head.weight.mul_(1.001)  # by less than it takes to send it
        step(hook, model, version)
        bench.drain(worker)
    assert hook.stats()["head_updates"] == 1
    assert [one.to for one in bench.store.returns()] == [5]
    found = attempts(bench.store.scores().values(), None, bench.store.returns())
    assert [[one.policy_version for one in part.scores] for part in found] == [[*range(9), 4], [5, 6, 7]]


@pytest.mark.parametrize("lags", [(1,), (3,), (3, 5)])
def test_a_trainer_that_captures_late_rollouts_beside_fresh_ones_has_not_gone_back(
    attach: Attach, bench: Bench, lags: tuple[int, ...]
) -> None:
    model = tiny()
    hook = attach(model)
    worker = bench.worker(recent_tokens=100_000)
    for newest in range(6, 12):
        for lag in (0, *lags):
            step(hook, model, newest - lag, padded_batch([(3, 9), (7, 4)], seed=100 * newest + lag))
        if newest % 2:  # the worker is a step behind
            bench.drain(worker)
        with torch.no_grad():
            model.lm_head.weight.mul_(1.0005)  # by less than it takes to send it
    bench.drain(worker)
    assert bench.queue.counters()["dead_total"] == 0
    assert bench.store.returns() == []
    assert hook.stats()["head_updates"] == 1, "the first, of another version than was registered"


def test_another_policy_under_a_runs_name_is_turned_away_and_costs_the_run_nothing(
    attach: Attach, bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    mine, other = tiny(seed=0), tiny(seed=1)
    hook = attach(mine)
    worker = bench.worker()
    step(hook, mine, 0)
    stranger = attach(other)
    assert said(caplog, "answered 409: run 'default' is another policy's") == 1
    assert said(caplog, "Use another run name (the hook's run=)") == 1
    assert said(caplog, "This process sends nothing until it is attached again; its own work goes on") == 1
    for version in range(3):
        step(stranger, other, version)
    stats = stranger.stats()
    assert (stats["captured_rollouts"], stats["sent"], stats["failures"]) == (0, 0, 0)
    step(hook, mine, 1)
    bench.drain(worker)
    counters = bench.queue.counters()
    assert (counters["accepted_total"], counters["acked_total"], counters["dead_total"]) == (2, 2, 0)


def test_another_map_of_the_logits_under_a_runs_name_is_turned_away_with_both_and_another_name_trains(
    attach: Attach, bench: Bench, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model of an unknown kind scales its logits. The hook says so when the run is registered already."""
    model, scaled = tiny(tied=False), wire.LogitMap(scale=0.4)
    forward = model.forward

    def scaling(*args: Any, **named: Any) -> Any:
        output = forward(*args, **named)
        output.logits = output.logits * scaled.scale
        return output

    monkeypatch.setattr(model, "forward", scaling)
    step(attach(model), model, 0)
    assert said(caplog, "under another run name (run=), since this one is registered without it") == 1
    step(attach(model, logit_map=scaled), model, 0)
    assert said(caplog, "registered with LogitMap(scale=1.0, softcap=None), this one has LogitMap(scale=0.4,") == 1
    hook = attach(model, logit_map=scaled, run="scaled")
    step(hook, model, 0)
    step(hook, model, 1)
    queue, store = RolloutQueue(bench.redis, "scaled"), Store(bench.redis, "scaled")
    bench.drain(RunWorker(bench.settings, bench.layout, queue, store, "scaled"))
    counters = queue.counters()
    assert (counters["acked_total"], counters["dead_total"]) == (2, 0)


def test_a_trainer_that_begins_while_a_run_of_its_name_is_deleted_waits_for_the_name(
    serve: Callable[..., RunningService], redis_client: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A person deletes a run to begin again, and its worker is at a training."""
    monkeypatch.setattr("service.api.runs._LET_GO_SECONDS", 0.0)
    service, leases, model = serve(), Leases(redis_client), tiny(tied=False)
    service.register()
    assert leases.hold("default")
    assert service.client.delete("/runs/default").status_code == 202
    with contextlib.closing(DrafterHook(model, service.url, aux_layers=AUX)) as hook:
        until(lambda: hook.stats()["retries"] > 1, "the service refused the registration twice")
        leases.give_back("default")
        assert service.client.delete("/runs/default").status_code == 204
        step(hook, model, 0, padded_batch([(3, 9)]))
        stats = hook.stats()
    assert (stats["sent"], stats["dropped_error"]) == (2, 0), "its registration and a batch"


def test_a_run_that_the_service_has_lost_is_registered_again_by_the_trainer_that_goes_on(
    serve: Callable[..., RunningService], bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    service, model = serve(), tiny(tied=False)
    with attaching(service.url) as attach:
        hook = attach(model)
        step(hook, model, 0)
        assert service.client.delete("/runs/default").status_code == 204
        with torch.no_grad():
            model.lm_head.weight.mul_(1.5)
        step(hook, model, 1)  # tells the hook; its rollouts are lost
        assert not service.client.get("/runs").json()["runs"]
        for version in (2, 3):
            step(hook, model, version)
        stats = hook.stats()
    run = service.client.get("/runs/default").json()
    assert (run["policy_version"], run["rollouts"]["waiting"]) == (2, 2)
    # The registration has the head of version 2, so nothing more was sent of it.
    assert (stats["sent"], stats["dropped_error"], stats["failures"]) == (2 + 3, 2, 0), stats
    assert said(caplog, "was deleted since, or the service has another state") == 2
    bench.drain(bench.worker())
    assert largest_gap(bench) < 0.02


def test_an_initial_drafter_that_comes_too_late_is_named_in_the_trainers_log(
    attach: Attach, bench: Bench, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny()
    attach(model)
    drafter = tmp_path / "drafter"
    drafter.mkdir()
    (drafter / "config.json").write_text("{}")
    safetensors.numpy.save_file({"fc.weight": np.zeros((2, 2), np.float32)}, drafter / "model.safetensors")
    hook = attach(model, initial_drafter=drafter)
    assert said(caplog, "is ignored: its initial drafter. To begin with it, use another run name") == 1
    step(hook, model, 0)
    bench.drain(bench.worker())
    assert bench.queue.counters()["acked_total"] == 1


def test_a_drafter_that_the_run_has_published_is_no_drafter_that_comes_too_late(
    attach: Attach, bench: Bench, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As after a warm-up: what was downloaded of the run is what the trainer is given."""
    model = tiny()
    first, worker = attach(model), bench.worker()
    step(first, model, 0)
    bench.drain(worker)
    version = worker.learner.lineage.promote(CANDIDATE, None, 0, "better", GateEvidence()).version
    drafter = shutil.copytree(bench.layout.drafter("default", version), tmp_path / "drafter")
    hook = attach(model, initial_drafter=drafter)
    assert (said(caplog, "is ignored"), hook.stats()["last_error"]) == (0, "")
    weights = safetensors.numpy.load_file(drafter / "model.safetensors")
    weights["fc.weight"][0, 0] += 1.0
    safetensors.numpy.save_file(weights, drafter / "model.safetensors")
    attach(model, initial_drafter=drafter)
    assert said(caplog, "is ignored: its initial drafter") == 1


def test_a_hook_leaves_out_what_its_run_never_reads_and_the_worker_misses_nothing(attach: Attach, bench: Bench) -> None:
    model = tiny(tied=False)
    hook = attach(model)
    worker = bench.worker()
    formats = []
    for version in range(3):
        step(hook, model, version)
        (path,) = bench.layout.spool("default").glob("*")
        formats.append(wire.MappedFile(path).header.metadata["format"])
        bench.drain(worker)
    assert formats == ["draftalign.rollouts.v2"] * 3, "the answer to the registration says so"
    assert (bench.queue.counters()["dead_total"], bench.queue.counters()["acked_total"]) == (0, 3)
    assert largest_gap(bench) < 0.01
    assert hook.stats()["failures"] == 0
