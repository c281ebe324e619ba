"""The target's side of the loss: its true probabilities on the draft vocabulary.

p(v) = exp(f(W[v].h) / tau - logsumexp) with the *full-vocabulary* normaliser that came with the rollouts, so the
slice's sum is the target's mass on the draft vocabulary, at most 1. f is what the target does to its logits after
lm_head (a scale, a soft cap: `rl_hooks.wire.LogitMap`); for most targets nothing. Rows whose target leaves the draft
vocabulary thereby weigh little in the loss and count as misses in the acceptance, as they will in decoding.

Legend: T tokens, U target rows, V target vocabulary, D draft vocabulary, Ht target hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from drafter.batch import RolloutBatch
from drafter.errors import TargetHeadError
from drafter.model.matmul import times_wide
from drafter.policy import TargetHead
from drafter.unroll.plan import Plan
from drafter.vocabulary import DraftVocabulary
from rl_hooks.wire import LogitMap

_PLAIN = LogitMap()


@dataclass(frozen=True, eq=False)
class DraftTarget:
    """p on the draft vocabulary for the U target rows of one plan, formed chunk by chunk and never held whole."""

    divisor: float  # tau, for the drafter's logits as well
    hidden: Tensor  # [U, Ht]
    head_rows: Tensor  # [D, Ht]
    logsumexp: Tensor  # [U]
    logit_map: LogitMap = _PLAIN  # of hidden @ head_rows

    def logprobs(self, begin: int, end: int, dtype: torch.dtype) -> Tensor:
        """Form log p [end-begin, D] of target rows [begin, end)."""
        logits = times_wide(self.hidden[begin:end].to(self.head_rows.dtype), self.head_rows).to(dtype)
        mapped: Tensor = self.logit_map.apply(logits)
        if self.divisor != 1:
            mapped.div_(self.divisor)
        return mapped.sub_(self.logsumexp[begin:end, None])


def draft_target(
    batch: RolloutBatch,
    plan: Plan,
    vocabulary: DraftVocabulary,
    head: TargetHead,
    dtype: torch.dtype = torch.float32,
) -> DraftTarget:
    """The target of a batch on its plan's rows, from last_hidden and the policy's head.

    `dtype` is what last_hidden and head are multiplied in; log-probabilities are formed in at least float32.
    """
    rows, device = plan.target_rows, batch.input_ids.device
    if head.hidden_size != batch.last_hidden.shape[1]:
        raise TargetHeadError(f"last_hidden is {batch.last_hidden.shape[1]} wide, the head {head.hidden_size}")
    return DraftTarget(
        batch.divisor,
        hidden=batch.last_hidden.index_select(0, batch.last_places(rows)),
        head_rows=head.rows(vocabulary, device, dtype),
        logsumexp=batch.logsumexp.index_select(0, rows).to(torch.promote_types(dtype, torch.float32)),
        logit_map=head.logit_map,
    )
