"""The target's side of the loss: its true probabilities on the draft vocabulary.

p(v) = exp(f(W[v].h) / tau - logsumexp) with the *full-vocabulary* normaliser that came with the rollouts, so the
slice's sum is the target's mass on the draft vocabulary, at most 1. f is what the target does to its logits after
lm_head (a scale, a soft cap: `rl_hooks.wire.LogitMap`); for most targets nothing. Rows whose target leaves the draft
vocabulary thereby weigh little in the loss and count as misses in the acceptance, as they will in decoding.

Legend: T tokens, U target rows, V target vocabulary, D draft vocabulary, Ht target hidden size, k top entries.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from drafter.batch import RolloutBatch
from drafter.policy import TargetHead
from drafter.device import to_device
from drafter.errors import TargetHeadError
from drafter.model.matmul import times_wide
from drafter.unroll.plan import Plan
from drafter.vocabulary import DraftVocabulary
from rl_hooks.wire import LogitMap

_PLAIN = LogitMap()


@dataclass(frozen=True, eq=False)
class DraftTarget:
    """p on the draft vocabulary for the U target rows of one plan, formed chunk by chunk and never held whole."""

    divisor: float  # tau, for the drafter's logits as well
    size: int  # D
    hidden: Tensor | None = None  # [U, Ht]
    head_rows: Tensor | None = None  # [D, Ht]
    logsumexp: Tensor | None = None  # [U]
    top_draft_ids: Tensor | None = None  # int64[U, k], -1 outside the draft vocabulary
    top_logprobs: Tensor | None = None  # [U, k]
    tail: Tensor | None = None  # [U]: what the target gives to all tokens without a top entry together
    logit_map: LogitMap = _PLAIN  # of hidden @ head_rows

    def __post_init__(self) -> None:
        """Raise `TargetHeadError` where top entries come without their tail, or a tail without them."""
        if (self.tail is None) is not (self.top_logprobs is None):
            raise TargetHeadError("top entries and their tail (1 - sum p of them) come together")

    def logprobs(self, begin: int, end: int, dtype: torch.dtype) -> Tensor:
        """Form log p [end-begin, D] of target rows [begin, end): -inf where top entries say nothing."""
        if self.hidden is not None and self.head_rows is not None and self.logsumexp is not None:
            logits = times_wide(self.hidden[begin:end].to(self.head_rows.dtype), self.head_rows).to(dtype)
            mapped: Tensor = self.logit_map.apply(logits)
            if self.divisor != 1:
                mapped.div_(self.divisor)
            return mapped.sub_(self.logsumexp[begin:end, None])
        if self.top_draft_ids is None or self.top_logprobs is None:
            raise TargetHeadError("a target needs last_hidden with head rows, or top entries")
        ids, values = self.top_draft_ids[begin:end], self.top_logprobs[begin:end].to(dtype)
        # One spare column swallows the entries outside the draft vocabulary.
        dense = values.new_full((ids.shape[0], self.size + 1), -torch.inf)
        return dense.scatter_(1, torch.where(ids < 0, self.size, ids), values)[:, : self.size]


def draft_target(
    batch: RolloutBatch,
    plan: Plan,
    vocabulary: DraftVocabulary,
    head: TargetHead | None,
    dtype: torch.dtype = torch.float32,
) -> DraftTarget:
    """The target of a batch on its plan's rows: from last_hidden and the head where they are, else from top entries.

    `dtype` is what last_hidden and head are multiplied in; log-probabilities are formed in at least float32.
    """
    rows, device = plan.target_rows, batch.input_ids.device
    if batch.last_hidden is not None and batch.logsumexp is not None:
        if head is None:
            raise TargetHeadError("this batch carries last_hidden, so the policy's lm_head is needed; send it")
        if head.hidden_size != batch.last_hidden.shape[1]:
            raise TargetHeadError(f"last_hidden is {batch.last_hidden.shape[1]} wide, the head {head.hidden_size}")
        return DraftTarget(
            batch.divisor,
            len(vocabulary),
            hidden=batch.last_hidden.index_select(0, rows),
            head_rows=head.rows(vocabulary, device, dtype),
            logsumexp=batch.logsumexp.index_select(0, rows).to(torch.promote_types(dtype, torch.float32)),
            logit_map=head.logit_map,
        )
    if batch.top_ids is None or batch.top_logprobs is None:
        raise TargetHeadError("this batch carries neither last_hidden with logsumexp nor top_ids with top_logprobs")
    wide = torch.promote_types(dtype, torch.float32)
    top_logprobs = batch.top_logprobs.index_select(0, rows).to(wide)
    return DraftTarget(
        batch.divisor,
        len(vocabulary),
        top_draft_ids=to_device(vocabulary.to_draft, device)[batch.top_ids.index_select(0, rows)],
        top_logprobs=top_logprobs,
        tail=(1 - top_logprobs.exp().sum(-1)).clamp(min=0),
    )
