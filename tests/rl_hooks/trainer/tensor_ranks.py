"""Two tensor-parallel ranks on gloo, without Megatron-Core: `python tensor_ranks.py CASE ...`; not 0: a rank failed."""

from __future__ import annotations

import sys

import pytest
import torch
import torch.distributed as dist
from helpers.worker.rank_fixtures import run_two_ranks

from rl_hooks import wire
from rl_hooks.errors import RolloutError
from rl_hooks.trainer.megatron.ranks import TensorRanks, part_scores

PART, REAL = 8, 13  # two parts of 8, of which 13 tokens exist
TEMPERATURE = 0.7


def logits(rows: int = 20) -> torch.Tensor:
    return torch.randn(rows, 2 * PART, generator=torch.Generator().manual_seed(3)) * 40.0


def scores(rank: int) -> None:
    ranks = TensorRanks(dist.group.WORLD, 60.0)
    rows, next_ids = torch.tensor([0, 3, 19, 7]), torch.tensor([0, 7, 8, 12])
    mine = logits()[:, rank * PART : (rank + 1) * PART].contiguous()
    kept = mine.clone()
    for of in (wire.LogitMap(), wire.LogitMap(2.0, 30.0)):
        lse, logp = ranks.join_scores(part_scores(mine, rows, next_ids, rank * PART, REAL, TEMPERATURE, of))
        whole = of.apply(logits()[rows, :REAL].clone()) / TEMPERATURE
        torch.testing.assert_close(lse, whole.logsumexp(-1))
        torch.testing.assert_close(logp, whole.log_softmax(-1).gather(1, next_ids[:, None])[:, 0])
        assert torch.equal(mine, kept)  # the trainer's own


def talk(rank: int) -> None:
    ranks = TensorRanks(dist.group.WORLD, 60.0)
    assert ranks.tell({"rows": [1, 2]} if rank == 0 else None) == {"rows": [1, 2]}
    assert ranks.agree("", due=rank == 1) is True
    assert ranks.agree("", due=False) is False
    with pytest.raises(RolloutError, match="tensor-parallel rank 1: no memory"):
        ranks.agree("no memory" if rank else "", due=False)
    whole = ranks.whole(torch.full((2, 3), float(rank), dtype=torch.bfloat16))
    assert (whole is None) == (rank == 1)
    assert whole is None or whole.tolist() == [[0.0] * 3] * 2 + [[1.0] * 3] * 2
    assert not ranks.off  # an error that was told leaves them in step


def absent(rank: int) -> None:
    ranks = TensorRanks(dist.group.WORLD, 3.0)
    if rank == 0:
        with pytest.raises(RolloutError, match="did not come to the exchange"):
            ranks.agree("", due=False)
        assert ranks.off
        with pytest.raises(RolloutError, match="out of step"):
            ranks.tell("anything")


if __name__ == "__main__":
    known = {"scores": scores, "talk": talk, "absent": absent}

    def cases(rank: int) -> None:
        for name in sys.argv[1:]:
            known[name](rank)

    sys.exit(run_two_ranks(cases))
