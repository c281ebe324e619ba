"""The archive: when the policy goes back to what it was, the drafter of that time serves again, within one claim."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.worker.record_fixtures import told
from helpers.worker.worker_fixtures import Bench, published

from drafter.replay.acceptance import Replay
from service.storage.drafters.versions import Manifest
from service.storage.registry import Registry
from service.worker.loop import RunWorker
from service.worker.promotion.archive import Archive

#: The candidate learns too slowly to matter.
SETTINGS: dict[str, Any] = {"gate_min_gain": 0.005, "recent_tokens": 100_000, "learning_rate": 1e-12}
A, B, A_AGAIN = 0, 100, 200


def begun(bench: Bench, tmp_path: Path, decoys: int) -> tuple[RunWorker, Manifest, Manifest]:
    """A run in B that serves a drafter of B; in its archive lie one of A and some that know neither."""
    world = bench.world
    world.move_head(B)
    world.heads[A_AGAIN] = world.heads[A]
    bench.register(world.run_file(drafter=world.drafter(seed=50)))
    bench.put_head(B)
    bench.put_head(A_AGAIN)
    bench.worker(**SETTINGS)
    for seed in range(decoys):
        published(bench, world.drafter(seed=51 + seed))
    of_a = published(bench, world.trained_drafter(tmp_path, policy_version=A))
    for seed in range(decoys):
        published(bench, world.drafter(seed=71 + seed))
    of_b = published(bench, world.trained_drafter(tmp_path, policy_version=B))
    return bench.worker(**SETTINGS), of_a, of_b


def claim(bench: Bench, worker: RunWorker, name: str, policy_version: int) -> str:
    """One claim's rollouts; returns what is served after it."""
    bench.post(name, policy_version=policy_version, rollouts=32)
    bench.drain(worker)
    latest = Registry(bench.layout).latest("default")
    assert latest is not None
    return latest.version


def test_a_policy_that_goes_back_finds_the_drafter_that_it_had(
    bench: Bench, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    replayed: list[int] = []
    replay = Archive.replay

    def counted(self: Archive, version: str, batches: Any) -> Replay:
        replayed.append(sum(batch.rollouts for batch in batches))
        return replay(self, version, batches)

    monkeypatch.setattr(Archive, "replay", counted)
    worker, of_a, of_b = begun(bench, tmp_path, decoys=3)
    with caplog.at_level(logging.INFO, "draftalign.worker"):
        assert {claim(bench, worker, f"b{n}", B + n) for n in range(4)} == {of_b.version}
        assert replayed == [], "nothing fell, so the archive is not asked"
        worker.learner.judge.controller.curve.learn(0.2, 0.01, promoted=False)
        assert claim(bench, worker, "a", A_AGAIN) == of_a.version
    assert max(replayed[:-1]) <= 8
    assert sum(replayed) < 7 * 32 / 2, "halving: not every version on every rollout"
    (event,) = (e for e in told(Registry(bench.layout)) if e["event"] == "rolled_back")
    assert "re-selected from the archive" in event["reason"]
    assert worker.learner.judge.controller.curve.measured == [], "what was measured was against another drafter"
    # Training goes on from it.
    known = worker.learner.lineage.version(of_a.version).state_dict()
    for name, value in worker.learner.lineage.candidate.state_dict().items():
        assert torch.allclose(value, known[name], atol=1e-4), name


def test_an_archive_that_fits_no_better_is_left_alone(bench: Bench, tmp_path: Path) -> None:
    """α falls, and no archived version would have more."""
    worker, _, of_b = begun(bench, tmp_path, decoys=2)
    bench.world.move_head(150, seed=9)
    bench.put_head(150)
    for n in range(3):
        claim(bench, worker, f"b{n}", B + n)
    assert claim(bench, worker, "elsewhere", 150) == of_b.version


def test_a_first_drafter_that_is_twice_as_good_is_served_at_once(bench: Bench, tmp_path: Path) -> None:
    bench.register(bench.world.run_file(drafter=bench.world.trained_drafter(tmp_path)))
    bench.worker(**SETTINGS)
    first = Registry(bench.layout).versions("default")[0]
    published(bench, bench.world.drafter(seed=9))
    assert claim(bench, bench.worker(**SETTINGS), "a", 0) == first


def test_a_first_drafter_that_was_worse_in_every_claim_serves_again_when_the_policy_goes_back(
    bench: Bench, tmp_path: Path
) -> None:
    """It is scored in each claim, so much is known of it. All of that is about a policy that is gone."""
    world = bench.world
    world.move_head(B)
    world.heads[A_AGAIN] = world.heads[A]
    bench.register(world.run_file(drafter=world.trained_drafter(tmp_path, policy_version=A)))
    bench.put_head(B)
    bench.put_head(A_AGAIN)
    bench.worker(**SETTINGS)
    first = Registry(bench.layout).versions("default")[0]
    of_b = published(bench, world.trained_drafter(tmp_path, policy_version=B))
    worker = bench.worker(**SETTINGS)
    assert {claim(bench, worker, f"b{n}", B + n) for n in range(16)} == {of_b.version}
    assert worker.learner.judge.gate.state["trials"][first]["spent"]["looks"] >= 8, "else this shows nothing"
    assert claim(bench, worker, "a", A_AGAIN) == first


def test_where_each_batch_holds_one_prompt_a_fall_is_found_and_the_drafter_of_that_time_serves_again(
    bench: Bench, tmp_path: Path
) -> None:
    """One prompt bounds nothing, so four claims make a look: one finds the fall, others the better one."""
    worker, of_a, of_b = begun(bench, tmp_path, decoys=1)

    def one_prompt(number: int, policy_version: int) -> str:
        bench.post(f"p{number}", policy_version=policy_version, prompts=[1000 + number] * 16)
        bench.drain(worker)
        latest = Registry(bench.layout).latest("default")
        assert latest is not None
        return latest.version

    assert {one_prompt(number, B + number) for number in range(12)} == {of_b.version}
    after = [one_prompt(16 + number, A_AGAIN) for number in range(20)]
    assert after[-1] == of_a.version
