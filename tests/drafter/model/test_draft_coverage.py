"""The draft vocabulary of a run: how much of what is said it covers, and what happens when a drafter has another."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from helpers.service.service_fixtures import CONFIG, RunningService
from helpers.service.storage_fixtures import Store
from helpers.worker.record_fixtures import gauges
from helpers.worker.worker_fixtures import DRAFT, VOCAB, Bench
from redis import Redis

from drafter.batch import load_batch
from drafter.errors import CheckpointError
from drafter.training.trainer import DrafterTrainer, TrainConfig
from service.errors import WorkerError
from service.storage.registry import Registry


@pytest.fixture
def bench(tmp_path: Path, redis_url: str) -> Iterator[Bench]:
    with Bench(tmp_path / "state", redis_url) as made:
        yield made


def test_each_batch_says_how_many_of_its_tokens_could_be_drafted_and_so_do_log_and_gauges(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    bench.register(bench.world.run_file(drafter=bench.world.drafter()))  # the first DRAFT ids
    worker = bench.worker()
    name = bench.post("a")
    batch = load_batch(bench.layout.spool("default") / bench.spooled()[0])
    with caplog.at_level(logging.INFO, logger="draftalign.worker"):
        bench.drain(worker)
    said = batch.input_ids[batch.loss_mask]
    inside = int((said < DRAFT).sum())
    assert 0 < inside < said.numel()
    record = bench.store.scores()[name]
    assert (record.draftable_tokens, record.tokens) == (inside, said.numel())
    gauges = bench.store.worker()
    assert (gauges.draft_vocab_size, gauges.draft_coverage) == (DRAFT, inside / said.numel())
    assert re.search(rf"draftable {inside / said.numel():.1%}", caplog.text)


def test_the_run_s_description_gives_size_and_coverage(service: RunningService, redis_client: Redis) -> None:
    service.register(config=CONFIG | {"intermediate_size": 8, "num_attention_heads": 2})
    before = service.client.get("/runs/default").json()
    assert before["draft_coverage"] is None
    Store(redis_client, "default").set_worker(gauges({"draft_vocab_size": 40, "draft_coverage": 0.975}))
    after = service.client.get("/runs/default").json()
    assert (after["draft_vocab_size"], after["draft_coverage"]) == (40, 0.975)


def test_a_checkpoint_whose_vocabulary_is_not_the_served_drafters_is_refused_with_what_to_do(bench: Bench) -> None:
    bench.register(bench.world.run_file(drafter=bench.world.drafter()))
    bench.post("a")
    worker = bench.worker()
    bench.drain(worker)
    worker.close()
    served = Registry(bench.layout).latest("default")
    assert served is not None
    kept = bench.layout.worker("default") / "elsewhere"
    bench.layout.worker("default").rename(kept.parent.parent / "kept")
    # A worker of a run whose drafter has other tokens leaves its checkpoint in this one's place.
    other = bench.world.drafter(vocabulary=torch.arange(VOCAB - DRAFT, VOCAB))
    foreign = bench.worker()
    foreign.learner.lineage.set_candidate(other)
    foreign.save()
    with pytest.raises(WorkerError, match=rf"another draft vocabulary .*{served.version}.*move .*worker.* away"):
        bench.worker()


def test_a_trainers_state_of_another_vocabulary_is_refused_by_name(bench: Bench, tmp_path: Path) -> None:
    (tmp_path / "trainer").mkdir()
    DrafterTrainer(bench.world.drafter(), TrainConfig()).save(tmp_path / "trainer")
    other = bench.world.drafter(vocabulary=torch.arange(VOCAB - DRAFT, VOCAB))
    with pytest.raises(CheckpointError, match=r"another draft vocabulary.*stand for other tokens"):
        DrafterTrainer(other, TrainConfig()).load(tmp_path / "trainer")
