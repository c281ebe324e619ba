"""What the worker does to one batch: scored first, then trained on; broken ones are buried with a reason."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.service.service_fixtures import RunningService
from helpers.worker.rollout_files import as_fp8, prompts_once_of
from helpers.worker.worker_fixtures import CONFIG, DRAFT, LAYERS, Bench, World
from torch import Tensor

from drafter.batch import load_batch
from drafter.replay.gate import CLAIM_SD, Look, compare
from drafter.replay.lossless import drafters_favour
from drafter.replay.replay import replay
from drafter.training.trainer import DrafterTrainer, _Outcome
from rl_hooks import wire
from rl_hooks.format.eagle3 import DrafterConfig
from rl_hooks.sending.exchange import Origin, RunService
from rl_hooks.sending.standing import Standing
from service.capacity.estimate import Traffic
from service.capacity.sizes import Deployment
from service.monitor.controller import Action, Controller, Decision, Economy
from service.monitor.records import DrafterSums, ScoreRecord, read, written
from service.storage.registry import Registry
from service.worker.learner import Learner
from service.worker.loop import RunWorker
from service.worker.promotion import gate as promotion


def test_a_batch_is_scored_before_it_is_trained_on(bench: Bench, tmp_path: Path) -> None:
    bench.begin()
    worker = bench.worker()
    for name in ("a", "b"):
        body = bench.world.rollout_file(name)
        path = tmp_path / "same.safetensors"
        path.write_bytes(body)
        before = replay(
            worker.learner.lineage.candidate, load_batch(path), bench.world.policy(), depth=4, drafting="probabilistic"
        ).total()
        batch_id = bench.post_file(body)
        bench.drain(worker)
        after = replay(
            worker.learner.lineage.candidate, load_batch(path), bench.world.policy(), depth=4, drafting="probabilistic"
        ).total()
        record = bench.store.scores()[batch_id]
        assert record.candidate is not None
        assert {k: getattr(record.candidate, k) for k in before} == pytest.approx(before)
        assert record.candidate.rounds != pytest.approx(after["rounds"], rel=1e-6), "training changed nothing"
        assert record.drafter_version is not None
        served = worker.learner.lineage.version(record.drafter_version)
        expected = drafters_favour(served, load_batch(path), bench.world.policy())
        assert record.favour is not None
        assert expected is not None
        assert [record.favour.excess, record.favour.variance] == pytest.approx([expected.excess, expected.variance])


@pytest.mark.parametrize("rollouts", [8, 32])
def test_what_redis_keeps_of_a_batchs_scores_is_what_the_plan_counts(rollouts: int, bench: Bench) -> None:
    """Of batches whose rollouts each have a prompt of their own, while versions are published."""
    asked = {"gate_min_gain": 0.0, "gate_confidence": 0.51, "learning_rate": 1e-2, "train_passes": 4.0}
    asked |= {"train_step_tokens": 256}  # few windows
    bench.settings = bench.settings.model_copy(update=asked)
    bench.begin()
    worker = bench.worker()
    for version in range(1, 11):
        bench.world.move_head(version, seed=version // 3)
        bench.put_head(version)
        bench.post(f"file-{version}", rollouts=rollouts, policy_version=version)
        bench.drain(worker)
    kept = bench.redis.memory_usage("da:{default}:scores", samples=0) / len(bench.store.scores())
    drafter = DrafterConfig.from_target(CONFIG, LAYERS, DRAFT)
    planned = Traffic(Deployment(drafter, 20.0, rollouts, 15, ranks=1), bench.settings).score_bytes
    assert planned / 1.5 < kept < 1.5 * planned


def nan_features(t: dict[str, Tensor]) -> None:
    t["aux_hidden"][t["cu_seqlens"][:-1].long(), 3] = float("nan")


def infinite_logprob(t: dict[str, Tensor]) -> None:
    t["logprobs"][t["cu_seqlens"][:-1].long() + 5] = float("-inf")


def shifted(t: dict[str, Tensor]) -> None:
    t["logprobs"] = t["logprobs"].roll(1)


def pre_norm(t: dict[str, Tensor]) -> None:
    t["last_hidden"] = (t["last_hidden"].float() * 3.0).bfloat16()


def wrong_order(t: dict[str, Tensor]) -> None:
    t["last_hidden"] = t["aux_hidden"][:, : t["last_hidden"].shape[1]].contiguous()


def wrong_temperature(t: dict[str, Tensor]) -> None:
    t["logprobs"] = t["logprobs"] * 2.0


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (nan_features, "aux_hidden holds NaN or infinity in 8 of"),
        (infinite_logprob, "logprobs holds NaN or infinity"),
        (shifted, "log-probabilities disagree with the features"),
        (pre_norm, "log-probabilities disagree with the features"),
        (wrong_order, "log-probabilities disagree with the features"),
        (wrong_temperature, "log-probabilities disagree with the features"),
    ],
)
def test_a_broken_batch_is_dead_with_its_reason_and_the_others_live(bench: Bench, change: Any, words: str) -> None:
    bench.begin()
    worker = bench.worker(claim_tokens=10_000)
    good = [bench.post("a")]
    bad = bench.post("bad", change=change)
    good.append(bench.post("b"))
    bench.drain(worker)
    assert (bench.state(bad), words in bench.reason(bad)) == ("dead", True), bench.reason(bad)
    assert [bench.state(b) for b in good] == ["trained", "trained"]
    assert set(bench.store.scores()) == set(good), "a dead batch has no score"
    (kept,) = bench.spooled()
    assert kept.startswith(bad), "only the dead one's file is kept, to be put back"
    assert all(torch.isfinite(p).all() for p in worker.learner.lineage.candidate.parameters())


def overflows(*rows: tuple[int, int], tensor: str = "aux_hidden") -> Callable[[dict[str, Tensor]], None]:
    """Infinity in these rows of rollouts: (rollout, row in it)."""

    def change(t: dict[str, Tensor]) -> None:
        for rollout, row in rows:
            t[tensor][int(t["cu_seqlens"][rollout]) + row, 1] = float("inf")

    return change


@pytest.mark.parametrize(
    ("kind", "bad", "left_out"),
    [
        ("bf16", overflows((0, 4), (2, 6)), {0, 2}),
        ("last states of bf16", overflows((1, 7), tensor="last_hidden"), {1}),
        ("fp8", overflows((3, 5)), {3}),
        ("fp8 of both", overflows((3, 5), tensor="last_hidden"), {3}),
        ("prompts once", overflows(*((rollout, 0) for rollout in (0, 1, 2))), {0, 1, 2}),
    ],
)
def test_rollouts_that_are_not_finite_are_left_out_and_the_others_of_their_batch_train(
    kind: str, bad: Callable[[dict[str, Tensor]], None], left_out: set[int], bench: Bench, tmp_path: Path
) -> None:
    bench.settings = bench.settings.model_copy(update={"recent_tokens": 100_000})
    bench.begin()
    body = bench.world.rollout_file("b", prompts=[1, 1, 1, 2, 2, 3, 3], change=bad)
    if kind.startswith("fp8"):
        body = as_fp8(body, tmp_path / "x", last="both" in kind)
    if kind == "prompts once":
        body = prompts_once_of(body, tmp_path / "x")
    known = bench.post_file(bench.world.rollout_file("b", lengths=[12]))  # "b/0" comes again in the other batch
    batch_id = bench.post_file(body)
    worker = bench.worker()
    bench.drain(worker)
    used = [f"b/{place}" for place in range(7) if place not in {0, *left_out}]
    assert (bench.state(known), bench.state(batch_id)) == ("trained", "trained"), bench.reason(batch_id)
    named = f"{len(left_out - {0})} of 7 rollouts are left out: "
    assert bench.reason(batch_id).startswith(named), bench.reason(batch_id)
    assert bench.store.scores()[batch_id].rollouts == len(used)
    assert bench.queue.counters()["not_finite_total"] == len(left_out - {0})
    for again in (worker, bench.worker()):
        (kept,) = (one for one in again.learner.recent.but([]) if one.name.startswith(batch_id))
        assert list(kept.batch.rollout_ids) == used
        assert all(torch.isfinite(p).all() for p in again.learner.lineage.candidate.parameters())
        again.close()


@pytest.mark.parametrize("truncation", [{"top_p": 0.999}, {"top_k": 39}, {"top_p": 0.9, "top_k": 39}])
def test_invented_log_probabilities_of_truncated_sampling_are_dead(bench: Bench, truncation: dict[str, Any]) -> None:
    """Of a law that is cut off, log p is larger, but not by more than what was cut off had."""
    bench.begin()
    worker = bench.worker(claim_tokens=10_000)
    good = bench.post("a", **truncation)
    bad = bench.post("bad", change=lambda t: t["logprobs"].zero_(), **truncation)
    bench.drain(worker)
    assert (bench.state(bad), "log-probabilities disagree" in bench.reason(bad)) == ("dead", True), bench.reason(bad)
    assert bench.state(good) == "trained"


def test_a_batch_that_no_drafter_can_be_replayed_on_is_dead(bench: Bench) -> None:
    """Finite features that overflow on the way: found by the replay, not by the screen."""
    drafter = bench.world.drafter()
    drafter.fc.weight.data *= 100.0
    bench.register(bench.world.run_file(drafter=drafter))
    bad = bench.post("bad", change=lambda t: t["aux_hidden"].sign_().mul_(3e38))
    good = bench.post("good")
    bench.drain(bench.worker())
    assert bench.state(bad) == "dead"
    assert "replay gives NaN" in bench.reason(bad)
    assert bench.state(good) == "trained"


def test_a_batch_whose_file_is_gone_is_dead_and_the_others_live(bench: Bench) -> None:
    bench.begin()
    gone = bench.post("gone")
    for path in bench.layout.spool("default").iterdir():
        path.unlink()
    good = bench.post("good")
    bench.drain(bench.worker())
    assert bench.state(gone) == "dead"
    assert bench.code(gone) == "blob_missing", "by which the queue lets it be sent again"
    assert bench.state(good) == "trained"


def test_a_batch_that_another_version_queued_is_dead_and_those_behind_it_live(bench: Bench) -> None:
    """Its entry names a file as no version of today does: the run is not closed for it, time and again."""
    bench.begin()
    body = bench.world.rollout_file("of another version")
    header = wire.check_rollout_header(wire.parse_header(body))
    named = bench._spooled(header, f"{header.batch_id}.{'0' * 32}.safetensors", len(body))
    assert bench.enqueue("default", named) == "accepted"
    good = bench.post("good")
    bench.drain(bench.worker())
    assert (bench.state(header.batch_id), bench.code(header.batch_id)) == ("dead", "blob_missing")
    assert bench.state(good) == "trained"


def test_a_truncated_file_is_dead_with_its_reason(bench: Bench) -> None:
    bench.begin()
    torn = bench.post("torn")
    (path,) = bench.layout.spool("default").iterdir()
    path.write_bytes(path.read_bytes()[:-100])
    bench.drain(bench.worker())
    assert bench.state(torn) == "dead"
    assert bench.code(torn) == "blob_damaged"


def test_one_token_responses_are_scored_and_trained(bench: Bench) -> None:
    """They hold no round at all: α of such a batch is nothing, not an error."""
    bench.begin()
    batch = bench.post("short", lengths=[4] * 6)
    other = bench.post("long")
    bench.drain(bench.worker())
    assert [bench.state(b) for b in (batch, other)] == ["trained", "trained"]
    assert bench.store.scores()[batch].candidate == DrafterSums(0.0, 0.0)


def test_answers_without_a_second_token_do_not_wake_an_idle_worker(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    """They say nothing of the drafter, and there is nothing in them to learn."""
    caplog.set_level(logging.INFO, "draftalign.worker")
    bench.begin()
    worker = bench.worker()
    controller = worker.learner.judge.controller
    controller.trainings, controller.idle = 9, True
    batch = bench.post("a", lengths=[4] * 8)
    bench.drain(worker)
    assert bench.state(batch) == "trained"
    assert bench.store.scores()[batch].sums("served") is None
    assert controller.idle
    assert "idle: no answer here has a second token" in caplog.text


def test_stale_batches_are_skipped(bench: Bench) -> None:
    bench.begin()
    batches = {v: bench.post(f"v{v}", policy_version=v) for v in (3, 9, 6, 7)}
    bench.drain(bench.worker(max_policy_lag=2))
    assert {v: bench.state(b) for v, b in batches.items()} == {3: "skipped", 9: "trained", 6: "skipped", 7: "trained"}
    assert "3 policy versions old; limit 2" in bench.reason(batches[6])
    assert bench.spooled() == []


def test_of_one_claim_what_its_newest_makes_stale_is_skipped(bench: Bench) -> None:
    """After a pause the queue holds many versions: the oldest come first, and must not be trained on for that."""
    bench.begin()
    batches = {v: bench.post(f"v{v}", policy_version=v) for v in (3, 9)}
    bench.drain(bench.worker(max_policy_lag=2, claim_tokens=10_000))
    assert {v: bench.state(b) for v, b in batches.items()} == {3: "skipped", 9: "trained"}


def test_a_batch_is_stale_by_what_still_waits_in_the_queue(bench: Bench) -> None:
    """A worker that is behind must not train on every version on its way to the newest."""
    bench.begin()
    batches = {v: bench.post(f"v{v}", policy_version=v) for v in (1, 2, 8, 9)}
    bench.drain(bench.worker(max_policy_lag=1))
    states = {v: bench.state(b) for v, b in batches.items()}
    assert states == {1: "skipped", 2: "skipped", 8: "trained", 9: "trained"}


@pytest.mark.parametrize("checkpoint_seconds", [0.0, 1e6])
def test_a_trainer_that_goes_on_from_an_earlier_checkpoint_is_listened_to(
    bench: Bench, checkpoint_seconds: float
) -> None:
    """Until a checkpoint the batches of before stay in the queue: they make none stale that came after them."""
    bench.begin()
    worker = bench.worker(max_policy_lag=2, checkpoint_seconds=checkpoint_seconds)
    bench.post("before", policy_version=500)
    bench.drain(worker)
    batches = []
    for number in range(12):
        batches.append(bench.post(f"after{number}", policy_version=450 + number))
        bench.drain(worker)
    worker.save()
    states = [bench.state(b) for b in batches]
    assert states == ["skipped"] * 7 + ["trained"] * 5


def test_no_batch_is_stale_by_those_of_an_earlier_start_of_its_trainer(bench: Bench) -> None:
    bench.begin()
    worker = bench.worker(max_policy_lag=2, checkpoint_seconds=1e6)
    starts = [("before", "1" * 32, 500), ("after0", "2" * 32, 450), ("after1", "2" * 32, 451), ("late", "2" * 32, 447)]
    batches = []
    for name, session, version in starts:
        told = {"session": session, "session_began": "500" if name == "before" else "450"}
        batches.append(bench.post(name, policy_version=version, extra=told))
        bench.drain(worker)
    worker.save()
    assert [bench.state(b) for b in batches] == ["trained", "trained", "trained", "skipped"]


def test_who_asks_a_worker_to_stop_does_not_wait_for_all_passes(bench: Bench) -> None:
    bench.begin()
    batch = bench.post("a")
    chosen = bench.settings.model_copy(update={"train_passes": 50.0})
    asked = iter([False, False, True])
    worker = RunWorker(chosen, bench.layout, bench.queue, bench.store, "default", stopping=lambda: next(asked, True))
    worker.cycle()
    assert worker.learner.lineage.trainer is not None
    assert worker.learner.lineage.trainer.windows == 3
    assert bench.state(batch) == "trained", "what was learnt is kept"
    assert worker.learner.judge.controller.trainings == 0, "and half a training says nothing about gains"
    (trial,) = worker.learner.judge.gate.state["trials"].values()
    assert 0.0 < trial["promise"]["moved"] < 0.1, "nor does it count as a whole one"


def test_what_later_looks_publish_wakes_an_idle_worker_and_is_no_headroom_any_more(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The candidate was refused, nothing was trained since, and a later claim shows that it is better."""
    options: dict[str, Any] = {"learning_rate": 1e-2, "train_passes": 4.0, "train_step_tokens": 256}
    bench.begin()
    worker = bench.worker(**options)  # no gain is worth a swap
    for name in "abcd":
        bench.post(name, rollouts=16)
        bench.drain(worker)
    monkeypatch.setattr(Learner, "_decide", lambda *_: Decision(Action.IDLE, "for the test"))
    bench.post("judged", rollouts=16)
    bench.drain(worker)
    refused = worker.learner.judge.controller.curve
    assert [one.promoted for one in refused.measured] == [False] * 4
    later = bench.worker(gate_min_gain=0.0, **options)
    later.learner.judge.controller.idle = True
    bench.post("later", rollouts=16)
    bench.drain(later)
    assert later.learner.lineage.published == 2
    served = replace(refused.measured[-1], promoted=True)  # whose gain is not added to headroom
    assert later.learner.judge.controller.curve.measured == [*refused.measured[:-1], served]
    assert not later.learner.judge.controller.idle


@pytest.mark.parametrize(("warmup_steps", "known"), [(0, True), (10_000, False)])
def test_no_headroom_is_told_while_the_learning_rate_rises(
    bench: Bench, redis_url: str, warmup_steps: int, *, known: bool
) -> None:
    """Small gains of small steps do not say that little is left to gain. A trainer's log is told what is known."""
    bench.begin()
    for name in "abcd":
        bench.post(name, rollouts=32)
        worker = bench.worker(warmup_steps=warmup_steps)
        bench.drain(worker)
    assert worker.learner.judge.controller.curve.measured, "the gate has judged"
    headroom = bench.store.worker().headroom
    assert (headroom is not None) == known
    service = RunningService(state_dir=bench.layout.root, redis_url=redis_url)
    try:
        trainer = Standing(RunService(Origin.parse(service.url), "default"))
        trainer.ask()
        told = trainer.facts()
        assert told["trained"] == 4
        assert told["alpha"] == service.client.get("/runs/default").json()["alpha"]
        assert told.get("headroom") == (None if headroom is None else headroom.gain)
    finally:
        service.stop()


def test_the_controller_is_told_the_alpha_of_the_whole_claim_and_the_error_of_a_gain(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.begin()
    told: list[Any] = []
    learnt: list[dict[str, Any]] = []
    decide = Controller.decide

    def noting(self: Controller, economy: Economy, alpha: float | None, **more: Any) -> Decision:
        told.append(alpha)
        return decide(self, economy, alpha, **more)

    def comparing(*replays: Any) -> Look:
        looks.append(compare(*replays))
        return looks[-1]

    looks: list[Look] = []
    monkeypatch.setattr(Controller, "decide", noting)
    monkeypatch.setattr(Controller, "learn", lambda _, **values: learnt.append(values))
    monkeypatch.setattr(promotion, "compare", comparing)
    worker = bench.worker(claim_tokens=10_000, recent_tokens=10_000)
    for names in ("abcdefgh", "ijklmnop"):  # the candidate is judged on the claim after the one it was trained on
        posted = [bench.post(name) for name in names]
        bench.drain(worker)
        sums = [s for b, record in bench.store.scores().items() if b in posted and (s := record.served) is not None]
        assert len(sums) == 8
        assert told.pop() == pytest.approx(sum(s.tokens for s in sums) / sum(s.rounds for s in sums))
        assert told == []
    [values] = learnt
    assert (values["gain"], values["error"]) in [(look.gain, math.hypot(look.error, CLAIM_SD)) for look in looks]
    assert values["error"] > 0


def test_a_worker_with_nothing_to_do_does_not_put_its_checkpoint_off(bench: Bench) -> None:
    bench.begin()
    worker = bench.worker(checkpoint_seconds=1.0)
    worker._newest.took_seconds = 100.0  # as on a disk that once stood still
    worker.inbox.backlog = False
    batch = bench.post("a")
    worker.cycle()
    assert bench.state(batch) == "queued"
    time.sleep(1.1)
    worker.cycle()
    assert bench.state(batch) == "trained"


def test_an_update_that_was_left_out_is_said_and_not_counted_as_trained(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bench.begin()
    left_out = _Outcome("the loss is nan", float("nan"), float("nan"), [], [])
    monkeypatch.setattr(DrafterTrainer, "_update", lambda *_: left_out)
    bench.post("a")
    bench.drain(bench.worker())
    assert bench.totals()["trained_tokens"] == 0
    assert "changed nothing; the first one: the loss is nan" in caplog.text


def test_scores_carry_what_the_page_shows(bench: Bench) -> None:
    bench.begin()
    first = bench.post("a", rewards=[float(i) for i in range(8)])
    bench.drain(bench.worker())
    (version,) = Registry(bench.layout).versions("default")
    record = bench.store.scores()[first]
    assert record.drafter_version == version
    assert record.action == "train"
    assert (record.train_seconds or 0) > 0
    assert (record.reward_sum, record.reward_count) == (28.0, 8)
    assert record.logprob_gap is not None
    assert record.logprob_gap < 0.01
    assert record.served == record.frozen == record.candidate, "nothing was trained before the first batch"
    gauges = bench.store.worker()
    assert gauges.action == "train"
    assert (gauges.trained_tokens_total or 0) > 0
    assert read(ScoreRecord, written(record)) == record


def test_log_lines_name_the_decision(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    bench.begin()
    bench.post("a")
    with caplog.at_level(logging.INFO, "draftalign.worker"):
        bench.drain(bench.worker())
    assert "served α" in caplog.text
    assert "train: 0 of the first 4 trainings done" in caplog.text


def test_a_world_of_another_seed_is_another_world() -> None:
    assert not torch.equal(World(seed=1).embed, World(seed=2).embed)
