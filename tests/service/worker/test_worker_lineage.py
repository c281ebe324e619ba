"""How a run's drafters begin and change: from scratch, from an initial drafter, by the gate, from the archive."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import redis.asyncio
import torch
from helpers.service.service_fixtures import HEADERS, RunningService
from helpers.service.service_fixtures import run_file as plain_run_file
from helpers.worker.record_fixtures import told
from helpers.worker.worker_fixtures import CONFIG, DRAFT, LAYERS, VOCAB, Bench, World, published, recorded_windows
from redis import Redis

from drafter.batch import load_batch
from drafter.errors import DrafterError
from drafter.files.checkpoint import (
    MODEL_FILE,
    export_config,
    read_drafter,
)
from drafter.model.eagle3 import DrafterConfig, Eagle3Drafter
from rl_hooks import wire
from service.storage.queue.lease import take_from_workers
from service.storage.registry import Registry
from service.storage.reports.store import AsyncStore
from service.storage.runs import delete_run, withdraw_run
from service.worker import inbox
from service.worker.lineage import Lineage
from service.worker.loop import RunWorker, Suspicion
from service.worker.process.worker import Worker
from service.worker.promotion.outcomes import Outcomes
from service.worker.recent import LengthLimit
from service.worker.target import Target

OPEN: dict[str, Any] = {"gate_min_gain": 0.0, "recent_tokens": 100_000, "learning_rate": 5e-3}


def events(bench: Bench) -> list[str]:
    return [e["event"] for e in told(Registry(bench.layout))]


def turn_until(worker: Worker, done: Callable[[], object]) -> None:
    """Let a whole worker (all runs) work until `done`."""
    for _ in range(400):
        worker._look_at = 0.0
        worker._turn()
        if done():
            return
    raise AssertionError("never done")


# --- from scratch
def test_from_scratch_the_vocabulary_is_built_from_enough_tokens_and_frozen(bench: Bench) -> None:
    bench.register()
    worker = bench.worker(vocab_min_tokens=150)
    first = bench.post("a")
    bench.drain(worker)
    assert bench.state(first) == "queued", "too few tokens yet"
    assert worker.learner.lineage.trainer is None
    bench.post("b")
    bench.drain(worker)
    vocabulary = worker.learner.lineage.candidate.vocabulary
    assert len(vocabulary) == DRAFT
    counts = worker.learner.lineage.token_counts
    assert counts.sum() >= 150
    kept = counts[vocabulary.ids].min()
    left_out = [int(counts[t]) for t in range(VOCAB) if t not in set(vocabulary.ids.tolist())]
    assert max(left_out) <= kept, "the most frequent tokens are in"
    bench.post("c")
    bench.drain(worker)
    assert worker.learner.lineage.candidate.vocabulary == vocabulary
    assert bench.worker().learner.lineage.candidate.vocabulary == vocabulary, "also after a restart"
    assert [bench.state(b) for b in bench.posted] == ["trained"] * 3
    assert set(bench.store.scores()) == set(bench.posted)


def test_the_runs_own_vocabulary_size_wins(bench: Bench) -> None:
    bench.register(bench.world.run_file(metadata={"draft_vocab_size": "20"}))
    worker = bench.worker()
    bench.post("a")
    bench.drain(worker)
    assert len(worker.learner.lineage.candidate.vocabulary) == 20


def test_what_waits_for_a_vocabulary_is_bounded_and_its_tokens_count(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches that wait are in memory: one of many prompts and few response tokens must not fill it."""
    monkeypatch.setattr(inbox, "_MOST_WAITING_TOKENS", 60)
    bench.register()
    worker = bench.worker(vocab_min_tokens=10_000)
    posted = [bench.post(f"b{number}", rollouts=2) for number in range(6)]
    bench.drain(worker)
    states = [str((bench.queue.batch(name) or {}).get("state")) for name in posted]
    waiting = states.count("queued")
    assert states == ["skipped"] * (6 - waiting) + ["queued"] * waiting, "the newest wait"
    assert 1 <= waiting < 6
    assert len(list(bench.layout.spool("default").iterdir())) == waiting
    counted = int(worker.learner.lineage.token_counts.sum())
    bench.post("more", rollouts=2)
    bench.drain(worker)
    assert int(worker.learner.lineage.token_counts.sum()) > counted
    reason = (bench.queue.batch(posted[0]) or {})["reason"]
    assert reason == "passed over while the draft vocabulary was gathered"


def test_a_queue_that_is_full_of_what_waits_for_a_vocabulary_gives_way_and_the_run_begins(
    bench: Bench, redis_url: str
) -> None:
    """It holds two batches, and the vocabulary needs the tokens of five: nothing would ever come or be trained."""
    bodies = [bench.world.rollout_file(f"b{number}", rollouts=2) for number in range(8)]
    service = RunningService(state_dir=bench.layout.root, redis_url=redis_url, queue_max_items=2)

    def post(body: bytes) -> int:
        return service.client.post("/rollouts", content=body, headers=HEADERS).status_code

    try:
        bench.register()
        assert [post(body) for body in bodies[:3]] == [202, 202, 429]
        worker = bench.worker(vocab_min_tokens=100)
        bench.drain(worker)
        bench.drain(worker)
        assert worker.inbox.waiting == 2, "an upload that was refused before it looked says nothing of now"
        for sent, body in enumerate(bodies[2:]):
            if not worker.learner.lineage.begun:
                assert post(body) == 429
                bench.drain(worker)
                assert worker.inbox.waiting == 1, "the oldest gave way"
                bench.drain(worker)
                assert worker.inbox.waiting == 1, "once for what was refused"
                assert post(body) == 202, sent
                bench.drain(worker)
        assert worker.learner.lineage.begun
        names = (wire.batch_id("default", 0, [f"b{number}/0", f"b{number}/1"]) for number in range(8))
        found = [(bench.queue.batch(name) or {}).get("state") for name in names]
        known = found[: found.index(None)]
        assert known == ["skipped"] * (len(known) - 2) + ["trained"] * 2
    finally:
        service.stop()


def test_the_first_drafter_from_scratch_is_published_once_it_beats_plain_decoding(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    bench.register()
    worker = bench.worker(**OPEN)
    registry = Registry(bench.layout)
    for name in "abcdefghijkl":
        bench.post(name)
        bench.drain(worker)
    manifest = registry.latest("default")
    assert manifest is not None
    first = registry.get("default", registry.versions("default")[0])
    assert first.parent is None
    assert first.gate is not None
    gate = first.gate.model_dump()
    assert gate["low"] > 0
    assert gate["error"] <= 0.05
    assert gate["alpha_served"] == pytest.approx(1.0), "plain decoding: one token a round"
    assert gate["alpha_candidate"] > 1.0
    assert {record.action for record in bench.store.scores().values()} == {"train"}, "the claim that published it, too"
    assert "default: draft vocabulary: 32 tokens cover" in caplog.text
    assert f"default: published {first.version} (policy version" in caplog.text
    drafter = read_drafter(bench.layout.drafter("default", first.version))
    assert drafter.vocabulary == worker.learner.lineage.candidate.vocabulary


def test_random_layers_are_not_published_before_they_were_trained(bench: Bench) -> None:
    """Beside no drafter at all they may be worth a few per cent: the target's head guesses some tokens by itself."""
    bench.register()
    worker = bench.worker(**OPEN)
    bench.post("a", rollouts=64)
    bench.drain(worker)
    assert worker.learner.lineage.trainer is not None, "there is a candidate, and it was trained"
    assert bench.state(bench.posted[0]) == "trained"
    assert [trial["spent"]["looks"] for trial in worker.learner.judge.gate.state["trials"].values()] == [0]
    assert Registry(bench.layout).latest("default") is None


def test_random_layers_are_not_published_where_all_rollouts_were_too_long_to_train_on(bench: Bench) -> None:
    bench.register()
    suspicion = Suspicion(limit=LengthLimit(tokens=5, trainings=64))
    chosen = bench.settings.model_copy(update=OPEN)
    worker = RunWorker(chosen, bench.layout, bench.queue, bench.store, "default", suspicion=suspicion)
    for name in "abcdefgh":
        bench.post(name, rollouts=64)
        bench.drain(worker)
    assert worker.learner.lineage.needed_trainer.windows == 0
    assert Registry(bench.layout).latest("default") is None
    assert worker.learner.judge.gate.training.trained_to is None


# --- an initial drafter
def test_an_initial_drafter_is_the_first_version_bit_for_bit(bench: Bench) -> None:
    drafter = bench.world.drafter(seed=3)
    bench.register(bench.world.run_file(drafter=drafter))
    worker = bench.worker()
    manifest = Registry(bench.layout).latest("default")
    assert manifest is not None
    assert (manifest.version[:8], manifest.parent, manifest.reason) == ("v000001-", None, "initial drafter")
    published = read_drafter(bench.layout.drafter("default", manifest.version))
    for name, value in drafter.state_dict().items():
        assert torch.equal(published.state_dict()[name], value)
        assert torch.equal(worker.learner.lineage.candidate.state_dict()[name], value)
    bench.worker()
    assert Registry(bench.layout).versions("default") == [manifest.version], "a restart publishes nothing"


@pytest.mark.parametrize(("said", "published"), [(2048, 65_536), (131_072, 131_072)])
def test_an_initial_drafter_is_published_with_a_limit_that_is_not_below_the_policys(
    bench: Bench, said: int, published: int
) -> None:
    """An engine may stop drafting beyond it; no weight depends on it."""
    drafter = bench.world.drafter(seed=3)
    config = export_config(drafter.config) | {"max_position_embeddings": said}
    policy = {"config": json.dumps(CONFIG | {"max_position_embeddings": 65_536})}
    bench.register(bench.world.run_file(drafter=drafter, drafter_config=config, metadata=policy))
    bench.post("a")
    worker = bench.worker()
    manifest = Registry(bench.layout).latest("default")
    assert manifest is not None
    document = json.loads((bench.layout.drafter("default", manifest.version) / "config.json").read_text())
    assert document["max_position_embeddings"] == published
    bench.drain(worker)
    again = bench.worker().learner.lineage  # its checkpoint is of the drafter that was published
    assert again.candidate.config.max_position_embeddings == published
    assert again.needed_trainer.windows == worker.learner.lineage.needed_trainer.windows > 0


def test_an_initial_drafter_of_two_layers_is_taken_up_trained_and_scored(bench: Bench) -> None:
    one = bench.world.drafter(seed=3)
    torch.manual_seed(0)
    deep = Eagle3Drafter(replace(one.config, num_hidden_layers=2), one.vocabulary)
    bench.register(bench.world.run_file(drafter=deep))
    bench.post("a", policy_version=1)
    worker = bench.worker()
    candidate = worker.learner.lineage.candidate
    assert isinstance(candidate, Eagle3Drafter)
    assert candidate.config.num_hidden_layers == 2
    manifest = Registry(bench.layout).latest("default")
    assert manifest is not None
    published = read_drafter(bench.layout.drafter("default", manifest.version))
    assert published.config == deep.config
    before = {n: p.clone() for n, p in worker.learner.lineage.candidate.named_parameters()}
    for _ in range(5):
        worker.cycle()
    moved = [n for n, p in worker.learner.lineage.candidate.named_parameters() if not torch.equal(p, before[n])]
    assert any(name.startswith("layers.1.") for name in moved)


def broken_config(**changes: Any) -> dict[str, Any]:
    return export_config(DrafterConfig.from_target(CONFIG, LAYERS, DRAFT)) | changes


def other_layers() -> dict[str, Any]:
    entering = [1, 3, 6]
    return broken_config(
        eagle_aux_hidden_state_layer_ids=entering,
        eagle_config={"eagle_aux_hidden_state_layer_ids": [i - 1 for i in entering]},
    )


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (broken_config(norm_output=True), "norm_output must be false"),
        (broken_config(intermediate_size=48), "must be .* by its config"),
        (broken_config(draft_vocab_size=16), "must be .* by its config"),
        (other_layers(), r"reads layers \[1, 3, 6\] \(entering\), the run captures \[2, 4, 5\]"),
    ],
)
def test_an_initial_drafter_that_no_engine_could_serve_is_refused_and_leaves_nothing(
    bench: Bench, config: dict[str, Any], words: str
) -> None:
    bench.register(bench.world.run_file(drafter=bench.world.drafter(), drafter_config=config), checked=False)
    with pytest.raises(DrafterError, match=words):
        bench.worker()
    assert list(bench.layout.drafters("default").iterdir()) == []
    assert Registry(bench.layout).latest("default") is None


@pytest.mark.parametrize("outputs", [True, False])
def test_an_initial_drafter_that_names_no_layers_reads_those_of_the_registration(bench: Bench, outputs: bool) -> None:
    """Published for engines with both fields: vLLM reads the one, SGLang the other."""
    config = broken_config()
    del config["eagle_aux_hidden_state_layer_ids"]
    if not outputs:
        del config["eagle_config"]
    bench.register(bench.world.run_file(drafter=bench.world.drafter(), drafter_config=config))
    worker = bench.worker()
    assert worker.learner.lineage.candidate.config.aux_layers == LAYERS  # type: ignore[union-attr]
    manifest = Registry(bench.layout).latest("default")
    assert manifest is not None
    published = json.loads((bench.layout.drafter("default", manifest.version) / "config.json").read_text())
    assert published["eagle_aux_hidden_state_layer_ids"] == list(LAYERS)
    assert published["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [i - 1 for i in LAYERS]


def test_a_drafter_whose_outputs_are_of_other_layers_than_the_registration_is_refused(bench: Bench) -> None:
    config = other_layers()
    del config["eagle_aux_hidden_state_layer_ids"]
    with pytest.raises(wire.WireError, match="name different layers"):
        bench.register(bench.world.run_file(drafter=bench.world.drafter(), drafter_config=config))


def test_an_initial_drafter_with_nan_is_refused(bench: Bench) -> None:
    drafter = bench.world.drafter()
    drafter.fc.weight.data[0, 0] = float("nan")
    bench.register(bench.world.run_file(drafter=drafter))
    with pytest.raises(DrafterError, match=r"fc.weight holds NaN"):
        bench.worker()


def test_a_run_that_cannot_be_worked_on_is_named_in_the_log_and_the_others_go_on(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    """One has an initial drafter that fits no engine, one a target's config that no drafter can be sized by."""
    bench.register(
        bench.world.run_file(drafter=bench.world.drafter(), drafter_config=broken_config(norm_output=True)),
        run="aa-broken",
        checked=False,
    )
    unsized = plain_run_file({k: v for k, v in CONFIG.items() if "inter" not in k})
    bench.register(unsized, run="bb-unsized", checked=False)
    bench.register(bench.world.run_file(drafter=bench.world.drafter()))
    batch = bench.post("a")
    worker = Worker(bench.settings, Redis.from_url(bench.redis_url))
    with caplog.at_level(logging.ERROR, "draftalign.worker"):
        turn_until(worker, lambda: bench.state(batch) == "trained")
    assert "run aa-broken: the drafter cannot be served: config.json: norm_output must be false" in caplog.text
    assert "run bb-unsized: the target's config lacks intermediate_size" in caplog.text
    assert caplog.text.count("run aa-broken") == 1, "said once a minute, not every turn"
    worker._redis.close()


@pytest.mark.parametrize("error", [DrafterError("the archive is broken"), torch.OutOfMemoryError("no memory left")])
def test_a_run_whose_worker_fails_later_is_dropped_and_the_others_go_on(
    error: Exception, bench: Bench, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for run in ("aa", "default"):
        bench.register(bench.world.run_file(drafter=bench.world.drafter()), run=run)
    real = Lineage.roles

    def failing(self: Lineage, *args: Any, **more: Any) -> Any:
        if self._run == "aa":
            raise error
        return real(self, *args, **more)

    monkeypatch.setattr(Lineage, "roles", failing)
    lost = bench.post("x", run="aa")
    batch = bench.post("y")
    worker = Worker(bench.settings, Redis.from_url(bench.redis_url))
    turn_until(worker, lambda: bench.state(batch) == "trained")
    assert any("run aa: " in message and str(error) in message for message in caplog.messages)
    assert bench.redis.hget("da:{aa}:batch:" + lost, "state") == b"queued", "nothing is lost by it"
    worker._redis.close()


def test_a_deleted_run_is_let_go_and_one_of_its_name_begins_anew(bench: Bench) -> None:
    """The worker gives the lease back and leaves nothing behind that the next run of that name would go on from."""

    async def take() -> bool:
        client = redis.asyncio.Redis.from_url(bench.redis_url)
        try:
            return await take_from_workers(client, "default")
        finally:
            await client.aclose()

    bench.register(bench.world.run_file(drafter=bench.world.drafter()))
    batch = bench.post("a")
    worker = Worker(bench.settings, Redis.from_url(bench.redis_url))
    turn_until(worker, lambda: bench.state(batch) == "trained")
    withdraw_run(bench.layout, "default")
    assert not asyncio.run(take()), "the worker still holds it"
    turn_until(worker, lambda: not worker.served)
    assert asyncio.run(take())
    assert asyncio.run(take()), "a second request goes on with what the first began"
    delete_run(bench.layout, "default")
    assert not bench.layout.run("default").exists()
    worker._look_at = 0.0
    worker._turn()
    assert not bench.layout.run("default").exists()
    bench.redis.flushdb()
    bench.register(bench.world.run_file(drafter=bench.world.drafter()))
    again = bench.post("b")
    turn_until(worker, lambda: bench.state(again) == "trained")
    assert Registry(bench.layout).versions("default")[0].startswith("v000001-")
    assert worker.served["default"].learner.journal.totals.batches == 1
    worker._redis.close()


# --- heads
def test_a_batch_is_checked_and_trained_with_the_newest_head_not_newer_than_its_policy(bench: Bench) -> None:
    world = bench.world
    world.move_head(3, seed=1)
    world.move_head(7, seed=2)
    bench.register(world.run_file(drafter=world.drafter()))
    bench.put_head(3)
    bench.put_head(7)
    batches = {v: bench.post(f"v{v}", policy_version=v) for v in (2, 3, 5, 7, 9)}
    bench.drain(bench.worker())
    assert {v: bench.state(b) for v, b in batches.items()} == dict.fromkeys(batches, "trained")
    scores = bench.store.scores()
    gaps = [scores[b].logprob_gap for b in batches.values()]
    assert all(gap is not None and gap < 0.01 for gap in gaps)


def test_a_head_that_was_never_sent_shows_as_a_stale_head(bench: Bench) -> None:
    bench.world.move_head(3)
    bench.register(bench.world.run_file(drafter=bench.world.drafter()))
    batch = bench.post("v3", policy_version=3)
    bench.drain(bench.worker())
    assert bench.state(batch) == "dead"
    assert "a stale head" in bench.reason(batch)


def test_a_trainer_that_goes_back_is_followed_with_the_heads_that_it_sends_again(bench: Bench) -> None:
    """Heads and batches of versions that there were before, but of another policy; far enough back to be forgotten."""
    world = bench.world
    bench.register(world.run_file(drafter=world.drafter()))
    worker = bench.worker(recent_tokens=1)

    def send(version: int, policy: int) -> None:
        world.move_head(version, seed=policy)
        bench.put_head(version)
        bench.post(f"{policy}", policy_version=version)

    for version in (199, 200):
        send(version, 1000 + version)
    world.move_head(100, seed=2100)
    bench.put_head(100)  # it has gone back before the worker came to its last batches
    bench.drain(worker)
    bench.post("2100", policy_version=100)
    for version in (199, 200, *range(101, 112)):
        send(version, 2000 + version)
        bench.drain(worker)
    assert [bench.state(b) for b in bench.posted] == ["trained"] * len(bench.posted)
    assert worker.inbox.versions.seconds_per_version is not None, "versions are told apart in time again"


def test_a_tied_embedding_follows_the_head_and_each_batch_of_a_window_has_its_own(
    tmp_path: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    windows = recorded_windows(monkeypatch)
    world = World(tied=True)
    with Bench(tmp_path / "state", redis_url, world) as bench:
        bench.register(world.run_file(drafter=world.drafter()))
        worker = bench.worker()
        bench.post("v0")
        bench.drain(worker)
        moved = world.move_head(2)
        bench.put_head(2)
        bench.post("v2", policy_version=2)
        bench.drain(worker)
        assert [bench.state(b) for b in bench.posted] == ["trained", "trained"]
    assert any({version for version, _ in window} == {0, 2} for window in windows), "or nothing was tested"
    for version, policy in (pair for window in windows for pair in window):
        assert torch.equal(policy.embed_tokens, moved if version == 2 else world.embed)
        assert policy.needed_head().lm_head.equal(policy.embed_tokens)


def test_heads_that_no_batch_can_need_are_deleted(bench: Bench) -> None:
    world = bench.world
    for version in (1, 2, 3, 4, 5):
        world.move_head(version, seed=version)
    bench.register(world.run_file(drafter=world.drafter()))
    worker = bench.worker(max_policy_lag=1, recent_tokens=1)
    for version in (1, 2, 3, 4, 5):
        bench.put_head(version)
        bench.post(f"v{version}", policy_version=version)
        bench.drain(worker)
    assert [bench.state(b) for b in bench.posted] == ["trained"] * 5
    assert sorted(int(p.stem) for p in bench.layout.heads("default").iterdir()) == [4, 5]


def test_heads_of_batches_that_are_kept_are_kept(bench: Bench) -> None:
    world = bench.world
    bench.register(world.run_file(drafter=world.drafter()))
    worker = bench.worker(max_policy_lag=0, recent_tokens=100_000)
    for version in (1, 2, 3):
        world.move_head(version, seed=version)
        bench.put_head(version)
        bench.post(f"v{version}", policy_version=version)
        bench.drain(worker)
    assert sorted(int(p.stem) for p in bench.layout.heads("default").iterdir()) == [1, 2, 3]


# --- gate and archive
def test_a_worse_candidate_is_refused_and_the_verdict_is_kept(bench: Bench, tmp_path: Path) -> None:
    """Training that ruins the drafter: nothing changes for the engines."""
    bench.register(bench.world.run_file(drafter=bench.world.trained_drafter(tmp_path)))
    worker = bench.worker(**OPEN | {"learning_rate": 3.0})
    registry = Registry(bench.layout)
    served = registry.latest("default")
    for name in "abcdefghijkl":
        bench.post(name)
    bench.drain(worker)
    assert registry.latest("default") == served
    refused = [e for e in told(registry) if e["event"] == "refused"]
    assert refused, events(bench)
    judged = [e for e in refused if e["gate"]["low"] is not None]
    assert judged, refused
    assert judged[-1]["gate"]["alpha_candidate"] < judged[-1]["gate"]["alpha_served"]
    assert judged[-1]["gate"]["error"] == 1.0
    assert "no better would look this good in 100 % of trials at most (5 % allowed)" in judged[-1]["reason"]
    assert set(bench.store.scores()) == set(bench.posted)


def test_a_better_candidate_is_published_with_its_evidence(bench: Bench) -> None:
    bench.register(bench.world.run_file(drafter=bench.world.drafter()))
    worker = bench.worker(**OPEN)
    registry = Registry(bench.layout)
    first = registry.latest("default")
    assert first is not None
    for name in "abcdefghijklmnop":
        bench.post(name)
    bench.drain(worker)
    latest = registry.latest("default")
    assert latest is not None
    assert latest.version != first.version, events(bench)
    assert latest.gate is not None
    gate = latest.gate.model_dump()
    assert gate["low"] > 0
    assert gate["error"] <= 0.05
    assert gate["looks"] >= 1
    assert latest.parent is not None
    scores = list(bench.store.scores().values())
    assert scores[0].drafter_version == first.version
    frozen, served = scores[-1].frozen, scores[-1].served
    assert frozen is not None
    assert served is not None
    assert frozen.rounds > served.rounds, "the new one needs fewer rounds"


def test_an_archived_version_that_fits_better_is_served_again(bench: Bench, tmp_path: Path) -> None:
    """No training: learning is too slow to matter, and the archive holds a drafter that knows this policy."""
    bench.register(bench.world.run_file(drafter=bench.world.trained_drafter(tmp_path)))
    bench.worker()
    registry = Registry(bench.layout)
    good = registry.latest("default")
    assert good is not None
    bad = published(bench, bench.world.drafter(9))
    worker = bench.worker(**OPEN | {"learning_rate": 1e-12})  # goes on from what is served: the bad one
    for name in "abcdefghijkl":
        bench.post(name)
    bench.drain(worker)
    latest = registry.latest("default")
    assert latest is not None
    assert (latest.version, latest.sequence > bad.sequence) == (good.version, True)
    assert "re-selected from the archive" in latest.reason
    assert "rolled_back" in events(bench)
    assert bench.store.scores()[bench.posted[0]].best_version == good.version


def test_a_score_names_the_version_that_served_the_batch_where_the_trainer_knew_it(bench: Bench) -> None:
    bench.register(bench.world.run_file(drafter=bench.world.drafter()))
    worker = bench.worker()
    registry = Registry(bench.layout)
    first = registry.latest("default")
    assert first is not None
    published(bench, bench.world.drafter(5))
    by_first = bench.post("a", drafter_version=first.version)
    by_latest = bench.post("b")
    by_unknown = bench.post("c", drafter_version="v000099-deadbeef")
    bench.drain(worker)
    scores = bench.store.scores()
    assert scores[by_first].served == scores[by_first].frozen
    for batch in (by_latest, by_unknown):
        assert scores[batch].served != scores[batch].frozen


def test_the_candidate_that_is_exported_is_the_one_that_was_trained(bench: Bench) -> None:
    bench.register(bench.world.run_file(drafter=bench.world.drafter()))
    worker = bench.worker(**OPEN)
    for name in "abcdefgh":
        bench.post(name)
        bench.drain(worker)
    saved = read_drafter(bench.checkpoint() / "drafter")
    for name, value in worker.learner.lineage.candidate.state_dict().items():
        assert torch.equal(saved.state_dict()[name], value)
    assert (bench.checkpoint() / "drafter" / MODEL_FILE).is_file()


def test_the_target_reads_what_was_registered(bench: Bench, tmp_path: Path) -> None:
    bench.register()
    target = Target.open(bench.layout, "default")
    assert target.aux_layers == LAYERS
    assert torch.equal(target.embed_tokens, bench.world.embed)
    path = tmp_path / "a.safetensors"
    path.write_bytes(bench.world.rollout_file("a"))
    gap, tokens = target.at(0).needed_head().logprob_gap(load_batch(path))
    assert gap < 0.01
    assert tokens > 0


# --- the drift monitor follows what is served, whoever changed it
def test_the_alarms_baseline_moves_by_rollouts_that_came_after_the_change_and_never_by_the_gates_gain(
    bench: Bench,
) -> None:
    bench.begin()
    registry = Registry(bench.layout)
    worker = bench.worker(**OPEN)
    first = registry.versions("default")[0]
    names = iter(f"step{n}" for n in range(100))

    def post(batches: int, by: RunWorker) -> None:
        for _ in range(batches):
            bench.post(next(names), rollouts=64)
            bench.drain(by)

    def watched(by: RunWorker) -> tuple[str | None, float]:
        monitor = by.learner.journal.drift.monitor.state
        return by.learner.journal.drift.watched, monitor.baseline

    while len(registry.versions("default")) < 2:
        before = watched(worker)
        post(1, worker)
    state = worker.learner.journal.drift.monitor.state
    assert worker.learner.journal.drift.watched == first
    assert state.offset == 0.0, "a publish alone moves nothing"

    calm = bench.worker(**OPEN | {"gate_min_gain": 1e6})  # a restart, and what is served stays
    (second,) = registry.versions("default")[1:]
    post(3, calm)
    after = watched(calm)
    assert after[0] == second
    assert after[1] > before[1]

    registry.rollback("default", first, "a person thinks so")
    post(3, calm)
    assert watched(calm)[0] == first
    assert watched(calm)[1] < after[1]


def test_a_version_that_few_prompts_have_told_of_is_compared_with_the_one_before_on_later_claims(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each prompt has eight answers, so a claim has eight prompts; the gate, which measures gains, asks for neither."""
    monkeypatch.setattr(Outcomes, "watched", None)
    bench.begin()
    published(bench, bench.world.drafter(seed=50))  # the first version is replayed on all batches
    second = published(bench, bench.world.drafter(seed=51)).version
    settings = OPEN | {"gate_min_gain": 1e6, "train_step_tokens": 4096}
    worker, numbers = bench.worker(**settings), iter(range(1000))

    def is_replayed(version: str, by: RunWorker) -> bool:
        prompts = [next(numbers) for _ in range(8)]
        batch = bench.post(f"of{prompts[0]}", prompts=[one for one in prompts for _ in range(8)])
        bench.drain(by)
        return version in {one.version for one in bench.store.scores()[batch].replayed or ()}

    assert [is_replayed(second, worker) for _ in range(2)] == [True] * 2
    third = published(bench, bench.world.drafter(seed=52)).version
    found = [is_replayed(second, worker) for _ in range(3)]
    again = bench.worker(**settings)  # a restart, in the midst of it
    found += [is_replayed(second, again) for _ in range(9)]
    assert again.learner.journal.drift.watched == third
    assert found == sorted(found, reverse=True)
    assert 8 <= sum(found) <= 10, "a rollout without a round tells nothing: the first 64 may be of two claims"
    assert again.learner.journal.drift.followed is None


def test_a_person_acknowledges_or_resets_the_alarm_once_and_a_restart_does_not_repeat_it(bench: Bench) -> None:
    bench.begin()
    settings = OPEN | {"train_step_tokens": 4096}  # what is learnt does not matter
    worker = bench.worker(**settings)
    for n in range(24):
        bench.post(f"calm{n}", rollouts=64)
    bench.drain(worker)

    def ask(action: str) -> None:
        async def request() -> None:
            client = redis.asyncio.Redis.from_url(bench.redis_url)
            await AsyncStore(client, "default").ask_of_drift(action)
            await client.aclose()

        asyncio.run(request())

    monitor = worker.learner.journal.drift.monitor
    assert monitor.state.ticks == 24
    assert bench.store.worker().drift
    monitor.state.statistics = dict.fromkeys(monitor.state.statistics, 50.0)
    ask("acknowledge")
    ask("acknowledge")  # twice before the worker has looked
    worker.cycle()
    assert set(monitor.state.statistics.values()) == {0.0}
    assert {lane.statistic for lane in bench.store.worker().drift.values()} == {0.0}
    assert monitor.state.ticks == 24, "the baseline stays"

    again = bench.worker(**settings)
    again.learner.journal.drift.monitor.state.statistics["fast"] = 3.0
    again.cycle()
    assert again.learner.journal.drift.monitor.state.statistics["fast"] == 3.0, "it was carried out before the restart"
    ask("reset")
    again.cycle()
    assert again.learner.journal.drift.monitor.state.ticks == 0
    gauges = bench.store.worker()
    assert (gauges.drift, gauges.drift_level, gauges.drift_change) == ({}, None, None)


def without_normalisers(tensors: dict[str, torch.Tensor]) -> None:
    del tensors["logsumexp"]


def test_rollouts_without_normalisers_are_scored_trained_and_trained_again_after_a_restart(bench: Bench) -> None:
    """Of a trainer that never holds the whole head: the worker normalises them once, with the run's."""
    bench.register(bench.world.run_file(drafter=bench.world.drafter()))
    worker = bench.worker(recent_tokens=10_000)
    twin = bench.post("with")
    bench.drain(worker)
    own = bench.post("without", change=without_normalisers)
    bench.drain(worker)
    assert (bench.state(twin), bench.state(own)) == ("trained", "trained")
    score = bench.store.scores()[own]
    assert score.logprob_gap is not None
    assert score.logprob_gap < 0.01
    worker.close()
    successor = bench.worker(recent_tokens=10_000)
    assert all(kept.batch.normalised for kept in successor.learner.recent._kept.values())
    assert len(successor.learner.recent._kept) == 2
    more = bench.post("more")
    bench.drain(successor)
    assert bench.state(more) == "trained"
