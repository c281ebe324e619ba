"""The head in slices: the same normaliser and log p as whole, and no answer where a rank has none."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from rl_hooks.engines.policy_watch import PolicyWatch
from rl_hooks.engines.vllm.ranks import Ranks, Shard
from rl_hooks.sending.features import score_rows
from rl_hooks.wire import LogitMap

ROWS, HIDDEN, VOCABULARY, PADDED = 40, 16, 105, 192
WORKER = SimpleNamespace(
    vllm_config=SimpleNamespace(parallel_config=SimpleNamespace(tensor_parallel_size=1)), model_runner=None
)


class Group:
    """vLLM's group as one rank sees it: what the others bring is known already."""

    device = "cpu"

    def __init__(self, others: list[Tensor | None]) -> None:
        self._others = others

    def all_gather(self, own: Tensor, dim: int) -> Tensor:
        nothing = torch.full_like(own, torch.nan)
        return torch.cat([own, *(nothing if one is None else one[None] for one in self._others)], dim)


def joined(parts: list[Tensor | None]) -> tuple[Tensor, Tensor]:
    ranks = Ranks(WORKER)
    ranks._group = Group(parts[1:])
    return ranks.join(parts[0], ROWS)


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("logit_map", [LogitMap(), LogitMap(scale=0.25, softcap=3.0)])
def test_slices_give_the_scores_of_the_whole_head(size: int, logit_map: LogitMap) -> None:
    generator = torch.Generator().manual_seed(size)
    last, head = (torch.randn(n, HIDDEN, generator=generator) for n in (ROWS, VOCABULARY))
    labels = torch.randint(VOCABULARY, (ROWS,), generator=generator)
    labels[:6] = torch.tensor([0, 47, 48, 63, 64, 104])  # at the slices' edges
    temperature = torch.rand(ROWS, generator=generator) + 0.5
    each = PADDED // size
    parts: list[Tensor | None] = [
        Shard(head[begin : begin + each], begin, logit_map).partial(last, labels, temperature)
        for begin in range(0, PADDED, each)  # the last of 3 and 4 hold nothing but padding, or little else
    ]
    logsumexp, logprob = score_rows(last, head, labels, temperature=temperature, logit_map=logit_map)
    found = joined(parts)
    assert torch.allclose(found[0], logsumexp, atol=1e-5)
    assert torch.allclose(found[1], logprob, atol=1e-5)
    for missing in range(size):
        lacking = [None if i == missing else part for i, part in enumerate(parts)]
        assert all(bool(one.isnan().all()) for one in joined(lacking))


class Recorded(Ranks):
    """A rank whose others answer as told."""

    def __init__(self, *, others: bool) -> None:
        super().__init__(WORKER)
        self.said: list[bool] = []
        self._others = others

    def all_agree(self, *, ok: bool) -> bool:
        self.said.append(ok)
        return ok and self._others


def test_a_rank_that_fails_answers_and_one_that_did_its_part_raises_with_it() -> None:
    ranks = Recorded(others=True)
    with pytest.raises(ValueError, match="mine"), ranks.together():
        raise ValueError("mine")
    assert ranks.said == [False]
    with pytest.raises(RuntimeError, match="another rank"), Recorded(others=False).together():
        pass
    with Recorded(others=True).together():
        pass


def test_weights_that_only_another_rank_has_seen_to_move_are_a_new_version_here_too() -> None:
    model = torch.nn.Linear(4, 4)
    worker: Any = SimpleNamespace(model_runner=SimpleNamespace(get_model=lambda: model))
    others = {"same": True}
    watch = PolicyWatch(worker, lambda same: same and others["same"])
    watch.number(None, 3)
    assert (watch.settle(None), watch.version) == (False, 3)
    others["same"] = False
    assert (watch.settle(None), watch.version) == (True, 4)
    others["same"] = True
    assert (watch.settle(None), watch.version) == (False, 4)
