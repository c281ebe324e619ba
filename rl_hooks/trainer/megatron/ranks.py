"""The tensor-parallel ranks of one forward: how they agree, and how their parts are joined.

Every rank goes through the same exchanges in the same order, whatever has failed on it. All that may fail on one rank
comes before `agree`, and after it come exchanges only. They go over a gloo group of our own with a timeout: a rank that
never comes costs the others one wait, after which they exchange nothing more (`off`).

Legend: N rows (tokens), M rows whose next token is scored, v this rank's part of the vocabulary, V all of it, H hidden
size.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from rl_hooks import wire
from rl_hooks.errors import RolloutError
from rl_hooks.sending.features import joined_scores, score_logits, scores_of_slice

_Told = TypeVar("_Told")


class TensorRanks:
    """The ranks of a tensor-parallel group. Made on all of them at once."""

    def __init__(self, group: Any, patience_seconds: float) -> None:
        self._group = group
        self._global = dist.get_process_group_ranks(group)
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        #: An exchange has failed: these ranks are out of step, and exchange nothing more.
        self.off = False
        # gloo, whatever the trainer's is: its timeout raises, where NCCL's ends the process.
        self._talk = dist.new_group(
            self._global,
            timeout=timedelta(seconds=patience_seconds),
            backend="gloo",
            use_local_synchronization=True,
        )

    @contextmanager
    def _step(self) -> Iterator[None]:
        if self.off:
            raise RolloutError("the tensor-parallel ranks are out of step: nothing more is captured")
        try:
            yield
        except Exception as error:  # noqa: BLE001 - gloo raises several kinds
            self.off = True
            raise RolloutError(
                "a tensor-parallel rank did not come to the exchange after the forward, so nothing more is captured. "
                f"Call `capture` on every rank of the group, around the same forwards ({type(error).__name__}: {error})"
            ) from None

    def tell(self, what: _Told | None) -> _Told | None:
        """What rank 0 says, on every rank."""
        with self._step():
            said = [what]
            dist.broadcast_object_list(said, self._global[0], self._talk)
            return said[0]

    def agree(self, error: str, due: bool) -> bool:
        """Whether any rank says that the head is due. Raises RolloutError, on every rank, where any has an error."""
        with self._step():
            said: list[Any] = [None] * self.size
            dist.all_gather_object(said, (error, due), self._talk)
        wrong = [f"tensor-parallel rank {rank}: {text}" for rank, (text, _) in enumerate(said) if text]
        if wrong:
            raise RolloutError("; ".join(wrong))
        return any(due for _, due in said)

    def whole(self, part_vH: Tensor) -> Tensor | None:
        """The parts of all ranks, one below the other, in the host's memory of rank 0; None on the others."""
        with self._step():
            mine = part_vH.detach().cpu().contiguous()
            parts = [torch.empty_like(mine) for _ in range(self.size)] if self.rank == 0 else None
            # As bytes: gloo knows those on every build.
            views = None if parts is None else [part.view(torch.uint8) for part in parts]
            dist.gather(mine.view(torch.uint8), views, self._global[0], self._talk)
            return None if parts is None else torch.cat(parts)

    def join_rows(self, rows_NX: Tensor) -> Tensor:
        """On rank 0, all rows, of which each rank holds some and zeros for the others: no two values are summed."""
        with self._step():
            dist.reduce(rows_NX, self._global[0], group=self._group)
            return rows_NX

    def join_scores(self, part_2M: Tensor) -> tuple[Tensor, Tensor]:
        """Normaliser and log p, [M] each, from `part_scores` of all ranks."""
        with self._step():
            parts = [torch.empty_like(part_2M) for _ in range(self.size)]
            dist.all_gather(parts, part_2M, group=self._group)
            logsumexp_M, logprob_M = joined_scores(torch.stack(parts))
            return logsumexp_M, logprob_M


def part_scores(
    logits_Tv: Tensor, rows_M: Tensor, next_ids_M: Tensor, first: int, real: int, temperature: float, of: wire.LogitMap
) -> Tensor:
    """`scores_of_slice` [2, M] of tokens `first` to `first` + v of the vocabulary, of which the first `real` exist.

    `logits_Tv` are the trainer's own, and left as they are.
    """
    width, own = max(0, min(logits_Tv.shape[1], real - first)), next_ids_M - first
    if not width:  # padding only
        return logits_Tv.new_full((2, len(rows_M)), -torch.inf, dtype=torch.float32)
    scores = score_logits(
        lambda some: logits_Tv.index_select(0, rows_M[some])[:, :width],
        width,
        own.clamp(0, width - 1),
        temperature=temperature,
        logit_map=of,
    )
    return scores_of_slice(*scores, own, width)
