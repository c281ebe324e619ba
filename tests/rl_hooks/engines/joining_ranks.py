"""Two ranks of an engine that join their scores, as processes: `python joining_ranks.py CASE ...`, case after case."""

from __future__ import annotations

import logging
import os
import sys
import time
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from helpers.worker.rank_fixtures import run_two_ranks
from torch import Tensor

from rl_hooks.engines.ranks import Joiner, LayerRanks, Shard
from rl_hooks.sending.features import score_rows
from rl_hooks.sending.tally import Tally
from rl_hooks.wire import LogitMap

ROWS, HIDDEN, VOCABULARY, EACH = 40, 16, 105, 96
LONG = 120.0


class Warnings(logging.Handler):
    """What was logged at WARNING and above."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.said: list[str] = []
        logging.getLogger("vllm.draftalign").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


def joiner(patience: float = LONG) -> tuple[Joiner, Tally]:
    tally = Tally(logging.getLogger("vllm.draftalign"))
    return Joiner(dist.new_group([0, 1], backend="gloo"), tally, timedelta(seconds=patience)), tally


def part(rank: int, rows: int = ROWS) -> tuple[Tensor, Tensor]:
    """What a rank brings, and what comes of both."""
    generator = torch.Generator().manual_seed(rows)
    last, head = (torch.randn(n, HIDDEN, generator=generator) for n in (rows, VOCABULARY))
    labels = torch.randint(VOCABULARY, (rows,), generator=generator)
    temperature = torch.rand(rows, generator=generator) + 0.5
    whole = torch.stack(score_rows(last, head, labels, temperature=temperature, logit_map=LogitMap()))
    shard = Shard(head[rank * EACH : (rank + 1) * EACH], rank * EACH, LogitMap())
    return shard.partial(last, labels, temperature), whole


def is_unknown(found: Tensor) -> bool:
    return bool(found.isnan().all())


def scores(rank: int) -> None:
    """As an engine makes it, with a group of its own."""
    ranks = LayerRanks(None)
    ranks.group = SimpleNamespace(ranks=[0, 1])
    tally = Tally(logging.getLogger("vllm.draftalign"))
    joining = Joiner.of(ranks, tally)
    for step in range(1, 20):
        own, whole = part(rank, ROWS + step)
        found = joining.add(step, ROWS + step, 3, None if rank and step == 7 else own).result(LONG)
        if rank or step == 7:
            assert is_unknown(found)
        else:
            torch.testing.assert_close(found, whole, atol=1e-5, rtol=1e-5)
    joining.close(LONG)
    assert not joining.gone
    assert tally.counts() == {}


def disagree(rank: int) -> None:
    """Rows, then the policy version, then nothing: that step is scored."""
    heard, (joining, tally) = Warnings(), joiner()
    for step, (rows, version) in enumerate(((5 + rank, 3), (5, 3 + rank), (6 + rank, 3), (ROWS, 3)), 1):
        own, whole = part(rank, rows)
        found = joining.add(step, rows, version, own).result(LONG)
        assert is_unknown(found) == (step < 4 or rank == 1)
        assert found.shape == (2, rows)
    if rank == 0:
        torch.testing.assert_close(found, whole, atol=1e-5, rtol=1e-5)
    assert tally.counts() == {"ranks_disagreed_rows": 2, "ranks_disagreed_policy_version": 1}
    assert not joining.gone
    assert len(heard.said) == 2  # one of each kind


def steps(rank: int) -> None:
    """One has seen a step that the other has not: what they bring belongs to different rows."""
    heard, (joining, _) = Warnings(), joiner()
    assert is_unknown(joining.add(1 + rank, ROWS, 3, part(rank)[0]).result(LONG))
    assert joining.gone
    assert [said for said in heard.said if "at different steps: [1, 2]" in said] == heard.said
    assert len(heard.said) == 1


def silent(rank: int) -> None:
    """The engine's thread goes on meanwhile; each gives up once."""
    heard, (joining, _) = Warnings(), joiner(1.0)
    own, _ = part(rank)
    if rank:
        time.sleep(2.5)
    found = [joining.add(step, ROWS, 3, own) for step in range(1, 30)]
    assert rank or not any(one.done() for one in found), "nobody has waited for it"
    assert all(is_unknown(one.result(LONG)) for one in found)
    assert joining.gone
    assert is_unknown(joining.add(30, ROWS, 3, own).result(LONG))
    assert len(heard.said) == 1
    assert "the engine goes on" in heard.said[0]


def dies(rank: int) -> None:
    """Killed in mid-work, without a word."""
    heard, (joining, _) = Warnings(), joiner()
    own, whole = part(rank)
    first: Any = joining.add(1, ROWS, 3, own)
    found = first.result(LONG)
    if rank:
        os._exit(0)
    torch.testing.assert_close(found, whole, atol=1e-5, rtol=1e-5)
    assert is_unknown(joining.add(2, ROWS, 3, own).result(LONG))
    assert joining.gone
    assert len(heard.said) == 1
    os._exit(0)  # no barrier: the other one is gone


if __name__ == "__main__":
    known = {"scores": scores, "disagree": disagree, "steps": steps, "silent": silent, "dies": dies}

    def cases(rank: int) -> None:
        for name in sys.argv[1:]:
            known[name](rank)

    sys.exit(run_two_ranks(cases))
