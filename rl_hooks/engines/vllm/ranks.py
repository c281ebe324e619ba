"""The tensor-parallel ranks of one engine: what they agree on, and the policy's head of which each holds a slice.

Its methods are collectives, all but `join` on vLLM's host group (gloo): all ranks call them in the same engine call, in
the same order, whether their own part has worked or not. What a rank cannot do it says with `all_agree(ok=False)`; it
never stays away. A rank that waits on the host longer than `_PATIENCE` for another raises.

With one rank nothing is sent anywhere.

Legend: N rows, H hidden size, V vocabulary, W ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Final

import torch
from torch import Tensor, nn

from rl_hooks.sending.features import score_rows
from rl_hooks.wire import LogitMap

#: A rank that is gone for so long has died, and vLLM's own collectives fail, too.
_PATIENCE: Final = timedelta(seconds=60)


class Ranks:
    """The ranks over which vLLM has split the layers of this worker's model."""

    def __init__(self, worker: Any) -> None:
        self.size = int(worker.vllm_config.parallel_config.tensor_parallel_size)
        self._group: Any = None
        if self.size > 1:
            from vllm.distributed.parallel_state import get_tp_group

            self._group = get_tp_group()

    @property
    def first(self) -> bool:
        """Whether this rank is the one that sends."""
        return self._group is None or self._group.rank_in_group == 0

    def all_agree(self, *, ok: bool) -> bool:
        """Whether all ranks say `ok`. Raises RuntimeError where one does not answer in time."""
        if self._group is None:
            return ok
        answer = torch.tensor([int(ok)])
        minimum = torch.distributed.ReduceOp.MIN
        torch.distributed.all_reduce(answer, minimum, group=self._group.cpu_group, async_op=True).wait(_PATIENCE)
        return bool(answer.item())

    def whole(self, shard: Tensor, rows: int) -> Tensor | None:
        """The matrix [rows, H] of which each rank holds a slice of its padded rows; None on the ranks but the first."""
        if self._group is None:
            return shard[:rows]
        # As bytes: gloo knows fewer types than torch.
        own = shard.detach().to("cpu", copy=True).contiguous().view(torch.uint8)
        parts = [torch.empty_like(own) for _ in range(self.size)] if self.first else None
        group = self._group
        torch.distributed.gather(own, parts, group.ranks[0], group=group.cpu_group, async_op=True).wait(_PATIENCE)
        return None if parts is None else torch.cat([part.view(shard.dtype) for part in parts])[:rows]

    @contextmanager
    def together(self) -> Iterator[None]:
        """A block that all ranks run, and that raises on all of them where it raises on one. No collective inside."""
        try:
            yield
        except Exception:
            self.all_agree(ok=False)
            raise
        if not self.all_agree(ok=True):
            raise OtherRankError("another rank of this engine could not do its part; its log says why")

    def join(self, own_2N: Tensor | None, rows: int) -> tuple[Tensor, Tensor]:
        """(logsumexp [N], log p [N]) from each rank's `Shard.partial`; NaN where a rank has None: it could not score.

        A collective of vLLM's device group. The softmax's normaliser is the sum of those of the slices; the label's
        logit is that of the one rank that has it.
        """
        if own_2N is None:
            own_2N = torch.full((2, rows), torch.nan, device=self._group.device)
        parts = self._group.all_gather(own_2N[None].contiguous(), dim=0)  # [W, 2, N]
        logsumexp = parts[:, 0].logsumexp(dim=0)
        return logsumexp, parts[:, 1].amax(dim=0) - logsumexp


class OtherRankError(RuntimeError):
    """A rank that has done its part raises this where another one has not."""


class Shard:
    """One rank's rows of the head: the tokens from `begin` on; vLLM's padding behind the vocabulary is left out."""

    def __init__(self, weight: Tensor, begin: int, logit_map: LogitMap) -> None:
        self.weight, self.begin, self.logit_map = weight, begin, logit_map

    def partial(self, last_NH: Tensor, labels_N: Tensor, temperature_N: Tensor) -> Tensor:
        """float32 [2, N]: logsumexp over this slice, and the label's logit; -inf where the label is another rank's."""
        rows = len(self.weight)
        if not rows:  # a rank that holds nothing but padding
            return last_NH.new_full((2, len(last_NH)), -torch.inf, dtype=torch.float32)
        own = labels_N - self.begin
        logsumexp, logprob = score_rows(
            last_NH, self.weight, own.clamp(0, rows - 1), temperature=temperature_N, logit_map=self.logit_map
        )
        mine = (own >= 0) & (own < rows)
        return torch.stack([logsumexp, torch.where(mine, logprob + logsumexp, -torch.inf)])


def slice_of(module: nn.Module) -> tuple[int, int]:
    """(first token, tokens) of this rank's slice of a vLLM embedding or head, without padding."""
    indices: Any = module.shard_indices
    if indices.num_added_elements_padded:
        raise ValueError("the policy's head has added tokens (LoRA), which the tap does not know")
    return int(indices.org_vocab_start_index), int(indices.num_org_elements)
