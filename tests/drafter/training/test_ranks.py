"""Several processes that train one drafter: the same gradients and weights as one process, and one fate."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from drafter_worlds import SHAPES, cast, rollouts, world
from rank_fixtures import run_two_ranks
from torch import nn

from drafter.batch import RolloutBatch
from drafter.model.eagle3 import Eagle3Drafter
from drafter.policy import Policy
from drafter.training.optimizer import Optimizer
from drafter.training.ranks import ALONE, JoinedRanks, Ranks
from drafter.training.trainer import DrafterTrainer, StepReport, TrainConfig

SHAPE = SHAPES["packed, awkward"]
CONFIG = TrainConfig(
    steps_ahead=3, learning_rate=1e-2, weight_decay=0.1, warmup_windows=2, optimizer="adamw", grad_clip=0.5
)


def trainer(config: TrainConfig, ranks: Ranks = ALONE) -> DrafterTrainer[Eagle3Drafter]:
    return DrafterTrainer(world(SHAPE, dtype=torch.float32).drafter, config, ranks)


def window(seed: int) -> tuple[RolloutBatch, Policy]:
    w = world(SHAPE, dtype=torch.float32)
    return cast(rollouts(SHAPE, world(SHAPE).head, 1.0, seed), torch.float32), w.policy


def share(batch: RolloutBatch, ranks: Ranks) -> list[RolloutBatch]:
    """Every W-th rollout."""
    mine = list(range(batch.rollouts))[ranks.rank :: ranks.world]
    return [batch.select(mine)] if mine else []


def train(config: TrainConfig, ranks: Ranks, windows: int, empty: int | None = None) -> tuple[Any, list[StepReport]]:
    """Weights, the gradients that the optimizer was given, and reports. `empty`: a window that rank 0 has whole."""
    gradients: list[dict[str, torch.Tensor]] = []
    real = Optimizer.step

    def noting(self: Optimizer, learning_rate: float) -> None:
        named: dict[str, nn.Parameter] = self._named
        gradients.append({n: p.grad.clone() for n, p in named.items() if p.grad is not None})
        real(self, learning_rate)

    Optimizer.step = noting  # type: ignore[method-assign]
    try:
        t, reports = trainer(config, ranks), []
        for number in range(windows):
            batch, policy = window(number)
            if number == empty:
                mine = [batch] if ranks.rank == 0 else []
            else:
                mine = share(batch, ranks)
            reports.append(t.step([(b, policy) for b in mine]))
    finally:
        Optimizer.step = real  # type: ignore[method-assign]
    return {"weights": {n: p.detach() for n, p in t.drafter.named_parameters()}, "gradients": gradients}, reports


def largest_difference(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """Of any tensor, relative to its largest number."""
    assert a.keys() == b.keys()
    return max(float((a[n] - b[n]).abs().max() / a[n].abs().max().clamp_min(1e-30)) for n in a)


@pytest.mark.parametrize(
    ("config", "tolerance"),
    [
        (CONFIG, 1e-5),
        (replace(CONFIG, loss="alpha"), 1e-5),
        (replace(CONFIG, compute_dtype="float64"), 1e-12),
    ],
    ids=["kl", "alpha", "float64"],
)
def test_two_ranks_take_the_steps_of_one_process(tmp_path: Path, config: TrainConfig, tolerance: float) -> None:
    """Gradients of each window, weights after all of them, and the reports; rank 1 has no rows in the third window."""
    alone, told = train(config, ALONE, 6)

    def work(rank: int) -> None:
        found, reports = train(config, JoinedRanks(), 6, empty=2)
        torch.save((found, reports), tmp_path / f"{rank}.pt")

    assert run_two_ranks(work) == 0
    (zero, reports), (one, others) = (torch.load(tmp_path / f"{rank}.pt", weights_only=False) for rank in (0, 1))
    assert all(torch.equal(zero["weights"][n], one["weights"][n]) for n in zero["weights"])  # bit for bit
    assert len(zero["gradients"]) == len(alone["gradients"]) == 6
    assert largest_difference(alone["gradients"][0], zero["gradients"][0]) < tolerance
    assert largest_difference(alone["weights"], zero["weights"]) < 10 * tolerance
    for one_process, first, second in zip(told, reports, others, strict=True):
        assert replace(first, seconds=0) == replace(second, seconds=0)
        for name in ("entries_per_step", "response_tokens", "tokens", "learning_rate", "skipped"):
            assert getattr(first, name) == getattr(one_process, name)
        assert first.loss == pytest.approx(one_process.loss, rel=100 * tolerance)
        assert first.loss_per_step == pytest.approx(one_process.loss_per_step, rel=100 * tolerance)
        assert first.grad_norm == pytest.approx(one_process.grad_norm, rel=100 * tolerance)
