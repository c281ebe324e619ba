"""Several processes that train one drafter: the same gradients and weights as one process, and one fate."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.drafter.drafter_worlds import SHAPES, cast, rollouts, world
from helpers.drafter.mtp_worlds import CONFIGS, drafter_for
from helpers.worker.rank_fixtures import fork_ranks, run_two_ranks
from torch import nn

import drafter.training.optimizer
from drafter.batch import RolloutBatch
from drafter.device import RanksLost
from drafter.errors import BatchRejected, DrafterError, TargetHeadError
from drafter.policy import Policy
from drafter.training.optimizer import Optimizer, _shared_out
from drafter.training.ranks import ALONE, JoinedRanks, Ranks, _unwritten, current, joined
from drafter.training.trainer import DrafterTrainer, StepReport, TrainConfig

SHAPE = SHAPES["packed, awkward"]
CONFIG = TrainConfig(
    steps_ahead=3, learning_rate=1e-2, weight_decay=0.1, warmup_windows=2, optimizer="adamw", grad_clip=0.5
)


def trainer(config: TrainConfig, ranks: Ranks = ALONE) -> DrafterTrainer:
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
    weights = {n: p.detach() for n, p in t.drafter.named_parameters()}
    return {"weights": weights, "gradients": gradients, "moments": t._optimizer.state()}, reports


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


def largest_difference(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """Of any tensor, relative to its largest number."""
    assert a.keys() == b.keys()
    return max(float((a[n] - b[n]).abs().max() / a[n].abs().max().clamp_min(1e-30)) for n in a)


@pytest.mark.parametrize(
    ("config", "tolerance", "ranks"),
    [
        (CONFIG, 1e-5, 2),
        (replace(CONFIG, compute_dtype="float64"), 1e-12, 2),
        (replace(CONFIG, compute_dtype="float64"), 1e-12, 3),
    ],
    ids=["float32", "float64", "float64, three"],
)
def test_ranks_take_the_steps_of_one_process(tmp_path: Path, config: TrainConfig, tolerance: float, ranks: int) -> None:
    """Gradients of each window, weights after all of them, and reports; but rank 0, none has rows in the third."""
    alone, told = train(config, ALONE, 6)

    def work(rank: int) -> None:
        found, reports = train(config, JoinedRanks(), 6, empty=2)
        torch.save((found, reports), tmp_path / f"{rank}.pt")

    assert fork_ranks(work, ranks) == 0
    (zero, reports), *further = (torch.load(tmp_path / f"{rank}.pt", weights_only=False) for rank in range(ranks))
    for one, others in further:
        assert equal(zero["weights"], one["weights"])
        assert equal(zero["moments"], one["moments"])
        assert [replace(report, seconds=0) for report in others] == [replace(report, seconds=0) for report in reports]
    for number, (mine, ours) in enumerate(zip(alone["gradients"], zero["gradients"], strict=True)):
        # AdamW divides by gradients that are nearly zero, so weights differ by more than gradients from then on.
        assert largest_difference(mine, ours) < (tolerance if number == 0 else 100 * tolerance), f"window {number}"
    assert len(zero["gradients"]) == 6
    assert largest_difference(alone["weights"], zero["weights"]) < 10 * tolerance
    for one_process, first in zip(told, reports, strict=True):
        for name in ("entries_per_step", "response_tokens", "tokens", "learning_rate", "skipped"):
            assert getattr(first, name) == getattr(one_process, name)
        assert first.loss == pytest.approx(one_process.loss, rel=100 * tolerance)
        assert first.loss_per_step == pytest.approx(one_process.loss_per_step, rel=100 * tolerance)
        assert first.grad_norm == pytest.approx(one_process.grad_norm, rel=100 * tolerance)


def train_module(kind: str, ranks: Ranks) -> Any:
    """As `train`, of an MTP module."""
    module, policy = drafter_for(CONFIGS[kind]())
    t = DrafterTrainer(module, replace(CONFIG, compute_dtype="float64"), ranks)
    for number in range(3):
        batch = rollouts(SHAPE, policy.needed_head().lm_head, 1.0, number)
        mine = ([batch] if ranks.rank == 0 else []) if number == 1 else share(batch, ranks)
        assert t.step([(one, policy) for one in mine]).skipped is None
    return {n: p.detach() for n, p in t.drafter.named_parameters()}, t._optimizer.state()


@pytest.mark.parametrize(("kind", "ranks"), [("experts", 3), ("dense", 2)])
def test_ranks_take_the_steps_of_one_process_with_an_mtp_module(tmp_path: Path, kind: str, ranks: int) -> None:
    """An expert may be chosen on one rank alone: its gradient is of all ranks all the same."""
    alone = train_module(kind, ALONE)

    def work(rank: int) -> None:
        torch.save(train_module(kind, JoinedRanks()), tmp_path / f"{rank}.pt")

    assert fork_ranks(work, ranks) == 0
    weights, moments = torch.load(tmp_path / "0.pt", weights_only=False)
    for rank in range(1, ranks):
        others, theirs = torch.load(tmp_path / f"{rank}.pt", weights_only=False)
        assert equal(weights, others)
        assert equal(moments, theirs)
    assert largest_difference(alone[0], weights) < 1e-10


def test_matrices_that_muon_moves_on_one_rank_each_are_what_every_rank_would_have_made_of_them(tmp_path: Path) -> None:
    """To the bit, with their momentum; each rank moves some,"""
    config = replace(CONFIG, optimizer="muon")

    def nothing(_: Optimizer) -> None:
        """Where every rank moves all."""

    def work(rank: int) -> None:
        ranks = JoinedRanks()
        found, _ = train(config, ranks, 4)
        moved = {n for n, mover in trainer(config, ranks)._optimizer._movers.items() if mover == rank}
        torch.save((found["weights"], found["moments"], moved), tmp_path / f"shared {rank}.pt")
        Optimizer.exchange = nothing  # type: ignore[assignment,method-assign]
        real = drafter.training.optimizer._shared_out
        vars(drafter.training.optimizer)["_shared_out"] = lambda shapes, _: dict.fromkeys(real(shapes, 1), rank)
        found, _ = train(config, ranks, 4)
        torch.save((found["weights"], found["moments"]), tmp_path / f"whole {rank}.pt")

    assert run_two_ranks(work) == 0
    shared = [torch.load(tmp_path / f"shared {rank}.pt", weights_only=False) for rank in (0, 1)]
    whole = torch.load(tmp_path / "whole 0.pt", weights_only=False)
    for weights, moments, moved in shared:
        assert len(moved) >= 2
        assert equal(weights, whole[0])
        assert equal(moments, whole[1])
    assert not shared[0][2] & shared[1][2]
    start = {n: p.detach() for n, p in trainer(config).drafter.named_parameters()}
    assert largest_difference(whole[0], start) > 1e-3


def test_a_matrix_more_than_there_are_ranks_goes_to_who_has_least_to_do() -> None:
    shapes = {"a": torch.Size((8, 8)), "b": torch.Size((4, 16)), "c": torch.Size((4, 4)), "d": torch.Size((2, 2))}
    assert _shared_out(shapes, 1) == dict.fromkeys("abcd", 0)
    assert _shared_out(shapes, 2) == {"a": 0, "b": 1, "c": 1, "d": 1}
    assert sorted(_shared_out(shapes, 8).values()) == [0, 1, 2, 3]
    # 6,000, 4,816 and 4,250 operations: not the largest, nor the longest, is the dearest.
    shapes = {"a": torch.Size((10, 10)), "b": torch.Size((2, 300)), "c": torch.Size((40, 5))}
    assert _shared_out(shapes, 2) == {"a": 0, "b": 1, "c": 1}
    assert _shared_out({"d": torch.Size((5, 40)), **shapes}, 3) == {"a": 0, "b": 1, "c": 2, "d": 2}


FAULTS: list[tuple[Exception, type[Exception]]] = [
    (RuntimeError("boom"), RuntimeError),
    (OSError(5, "a bad sector"), OSError),
    (torch.OutOfMemoryError("no memory"), MemoryError),
    (BatchRejected("poisoned"), BatchRejected),
    (TargetHeadError("no row"), DrafterError),
    (ValueError("\N{PILE OF POO}" * 5000), RuntimeError),
]


def test_what_one_rank_raises_all_raise_as_somebody_of_the_same_kind_and_all_go_on(tmp_path: Path) -> None:
    """Who is to blame (a batch, a disk, memory) is the same question wherever it happened."""

    def work(rank: int) -> None:
        ranks, told = JoinedRanks(), []
        for error, kind in FAULTS:
            for call in (ranks.together, ranks.shared):
                by = 1 if call == ranks.together else 0

                def part(error: Exception = error, by: int = by) -> int:
                    if rank == by:
                        raise error
                    return 7

                with pytest.raises(type(error) if rank == by else kind) as raised, ranks.in_step():
                    call(part)
                if rank == by:
                    assert raised.value is error
                else:
                    assert str(raised.value).startswith(f"on rank {by}: {type(error).__name__}: {str(error)[:20]}")
                told.append(raised.value)
        assert ranks.together(lambda: rank) == rank
        assert ranks.shared(lambda: {"rank": rank}) == {"rank": 0}
        assert ranks.add([rank, 5]) == [1, 10]
        with pytest.raises(RanksLost, match="ValueError: alone"), ranks.in_step():
            raise ValueError("alone")
        (tmp_path / str(rank)).touch()

    assert run_two_ranks(work) == 0
    assert {p.name for p in tmp_path.iterdir()} == {"0", "1"}


def test_alone_nothing_is_sent_and_nothing_is_hidden() -> None:
    with pytest.raises(ValueError, match="as it was"), ALONE.in_step():
        ALONE.together(lambda: int("as it was"))
    assert ALONE.shared(lambda: (1, 2)) == (1, 2)
    assert current() is ALONE
    with joined(torch.device("cpu")) as ranks:  # without WORLD_SIZE
        assert ranks is ALONE


def test_a_start_reads_nothing_of_an_earlier_start_in_the_same_store(tmp_path: Path) -> None:
    """`torchrun` keeps the store where it starts ranks again."""
    store = torch.distributed.HashStore()  # type: ignore[attr-defined]
    store.set("start", "former")
    store.set("former/1", "its rank 1")
    found: dict[int, Any] = {}

    def start(rank: int) -> None:
        found[rank] = _unwritten(store, rank, 3)

    threads = [threading.Thread(target=start, args=(rank,)) for rank in (1, 2, 0)]
    for thread in threads:
        thread.start()
        time.sleep(0.2)
    for thread in threads:
        thread.join(60)
    found[1].set("address", "mine")
    assert found[0].get("address") == found[2].get("address") == b"mine"
    assert store.get("start") != b"former"
