"""A worker process whose drafter lives on a CUDA device: it learns, dies, goes on, and survives a full device."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from helpers.worker.worker_fixtures import Bench, Nest, alive, final_state, nest, states

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
    pytest.mark.filterwarnings("default"),
]
SECONDS = 200.0


@pytest.fixture
def workers(tmp_path: Path) -> Iterator[Nest]:
    with nest(tmp_path / "log") as made:
        yield made


@pytest.fixture
def bench(tmp_path: Path, redis_url: str) -> Iterator[Bench]:
    with Bench(tmp_path / "state", redis_url, device="cuda") as made:
        made.begin()
        yield made


def test_a_worker_that_is_killed_on_a_gpu_goes_on_where_it_was(bench: Bench, workers: Nest) -> None:
    for number in range(6):
        bench.post(f"batch {number}")
    first = workers.start(bench, lease_seconds=5.0)
    bench.wait(lambda: states(bench).count("trained") >= 2, SECONDS)
    workers.kill(first)
    second = workers.start(bench, lease_seconds=5.0)
    bench.wait(lambda: states(bench) == ["trained"] * 6, SECONDS)
    bench.wait(lambda: not bench.spooled(), SECONDS)
    assert final_state(bench)["counts"]["skipped_windows"] == 0
    assert alive(second)


def test_a_full_gpu_loses_no_batch_and_no_worker(bench: Bench, workers: Nest) -> None:
    for number in range(3):
        bench.post(f"batch {number}")
    full = workers.start(bench, lease_seconds=5.0, settings={"gpu_memory_share": 1e-6})
    bench.wait(lambda: "out of memory" in workers.log.read_text(), SECONDS)
    assert alive(full)
    assert states(bench) == ["queued"] * 3
    workers.kill(full)
    workers.start(bench, lease_seconds=5.0)
    bench.wait(lambda: states(bench) == ["trained"] * 3, SECONDS)
