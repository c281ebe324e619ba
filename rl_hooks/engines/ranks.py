"""The tensor-parallel ranks of one engine: what they agree on, and the policy's head of which each holds a slice.

The methods of `LayerRanks` are collectives on the engine's host group (gloo): all ranks call them in the same engine
call, in the same order, whether their own part has worked or not. A rank that failed takes part with
`all_agree(ok=False)`. A rank that waits on the host for another longer than `_PATIENCE` raises. `Joiner` joins the
scores of each step; no engine waits for it.

With one rank nothing is sent.

Legend: N rows, H hidden size, V vocabulary, W ranks.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rl_hooks.sending.copies import HostCopies
from rl_hooks.sending.features import joined_scores, score_rows, scores_of_slice
from rl_hooks.sending.tally import Tally
from rl_hooks.wire import LogitMap

log = logging.getLogger("vllm.draftalign")

#: A rank that does not answer for so long has died, and the engine's own collectives fail, too.
_PATIENCE: Final = timedelta(seconds=60)


class LayerRanks:
    """The ranks over which an engine has split the layers of its model.

    `group`: the engine's own, a `GroupCoordinator` of vLLM's or SGLang's; None, or one of one rank: it is not split.
    """

    def __init__(self, group: Any) -> None:
        self.size = 1 if group is None else int(group.world_size)
        #: None with one rank.
        self.group: Any = group if self.size > 1 else None

    @property
    def first(self) -> bool:
        """Whether this rank is the one that sends."""
        return self.group is None or self.group.rank_in_group == 0

    def all_agree(self, *, ok: bool) -> bool:
        """Whether all ranks say `ok`. Raises RuntimeError where one does not answer in time."""
        if self.group is None:
            return ok
        answer = torch.tensor([int(ok)])
        minimum = dist.ReduceOp.MIN
        dist.all_reduce(answer, minimum, group=self.group.cpu_group, async_op=True).wait(_PATIENCE)
        return bool(answer.item())

    def whole(self, shard: Tensor, rows: int) -> Tensor | None:
        """The matrix [rows, H] of which each rank holds a slice of its padded rows; None on all but the first rank."""
        if self.group is None:
            return shard[:rows]
        with self.together():  # memory may run out on one of them
            # As bytes: gloo knows fewer types than torch.
            own = shard.detach().to("cpu", copy=True).contiguous().view(torch.uint8)
            parts = [torch.empty_like(own) for _ in range(self.size)] if self.first else None
        group = self.group
        dist.gather(own, parts, group.ranks[0], group=group.cpu_group, async_op=True).wait(_PATIENCE)
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


class OtherRankError(RuntimeError):
    """Another rank could not do its part; this one could."""


@dataclass(frozen=True, slots=True)
class _Part:
    """What one rank scored of one step."""

    step: int
    rows: int
    policy_version: int
    copies: HostCopies  # "own", float32 [2, N]: `Shard.partial`
    joined: Future[Tensor]


class Joiner:
    """Joins what the ranks score of each step, in a thread and over a gloo group of its own: no engine waits for it.

    The ranks first compare what they are about to join. Where rows or policy versions differ, the step has no scores.
    Where a rank has died, is silent for `patience`, or is at another step, nothing more is joined: `gone`.
    All ranks make their joiner in the same call, and `add` the same steps.
    """

    def __init__(self, group: Any, tally: Tally, patience: timedelta = _PATIENCE) -> None:
        self._group, self._tally, self._patience = group, tally, patience
        self._first, self._size = dist.get_rank(group) == 0, dist.get_world_size(group)
        self._parts: queue.SimpleQueue[_Part | None] = queue.SimpleQueue()
        #: Whether it has given up: nothing is joined any more.
        self.gone = False
        self._thread = threading.Thread(target=self._work, name="draftalign-join", daemon=True)
        self._thread.start()

    @classmethod
    def of(cls, ranks: LayerRanks, tally: Tally) -> Self:
        """The joiner of an engine with several ranks. A collective."""
        members = list(ranks.group.ranks)
        group = dist.new_group(members, timeout=_PATIENCE, backend="gloo", use_local_synchronization=True)
        return cls(group, tally)

    def add(self, step: int, rows: int, policy_version: int, own_2N: Tensor | None) -> Future[Tensor]:
        """Take this rank's part of a step, None where it could not score. It waits for nothing.

        Returns float32 [2, N] on the host, on the first rank: (logsumexp, log p); NaN where they are not known.
        """
        if own_2N is None:
            own_2N = torch.full((2, rows), torch.nan)
        joined: Future[Tensor] = Future()
        self._parts.put(_Part(step, rows, policy_version, HostCopies({"own": own_2N.contiguous()}), joined))
        return joined

    def close(self, timeout_seconds: float) -> None:
        """Join what was added, for some seconds at most."""
        self._parts.put(None)
        self._thread.join(timeout_seconds)

    def _work(self) -> None:
        while (part := self._parts.get()) is not None:
            joined = None
            try:
                joined = None if self.gone else self._join(part)
            except Exception as error:  # noqa: BLE001 - the engine must not feel this
                self.gone = True
                log.warning("draftalign: no features are captured from now on; the engine goes on: %s", error)
            part.joined.set_result(torch.full((2, part.rows), torch.nan) if joined is None else joined)

    def _join(self, part: _Part) -> Tensor | None:
        own_2N = part.copies.wait()["own"]
        said = torch.tensor([part.step, part.rows, part.policy_version])
        told = [torch.empty_like(said) for _ in range(self._size)]
        dist.all_gather(told, said, group=self._group, async_op=True).wait(self._patience)
        steps, rows, versions = torch.stack(told).T.tolist()
        if len(set(steps)) > 1:
            raise RuntimeError(f"the ranks are at different steps: {steps}")
        for what, values in (("rows", rows), ("policy_version", versions)):
            if len(set(values)) > 1:
                self._tally.add(f"ranks_disagreed_{what}")
                self._tally.warn(what, f"draftalign: the ranks disagree in {what} ({values}); a step is not scored")
                return None
        parts = [torch.empty_like(own_2N) for _ in range(self._size)] if self._first else None
        first = dist.get_global_rank(self._group, 0)
        dist.gather(own_2N, parts, first, group=self._group, async_op=True).wait(self._patience)
        return None if parts is None else joined_scores(torch.stack(parts))


class Shard:
    """One rank's rows of the head: tokens from `begin` on, without the padding behind the vocabulary."""

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
        return scores_of_slice(logsumexp, logprob, own, rows)


def slice_of(module: nn.Module) -> tuple[int, int]:
    """(first token, tokens) of this rank's slice of an embedding or head of vLLM's or SGLang's, without padding."""
    indices: Any = module.shard_indices
    if indices.num_added_elements_padded:
        raise ValueError("the policy's head has added tokens (LoRA), which the tap does not know")
    return int(indices.org_vocab_start_index), int(indices.num_org_elements)
