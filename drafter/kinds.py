"""The kinds of drafter, and what differs between them where a batch is read: everything else treats them alike."""

from __future__ import annotations

import torch

from drafter.batch import RolloutBatch
from drafter.errors import BatchRejected
from drafter.model import Eagle3Drafter
from drafter.mtp import MtpDrafter, unroll_mtp
from drafter.plan import Plan
from drafter.unroll import Unrolled, unroll

Drafter = Eagle3Drafter | MtpDrafter


def unroll_batch(drafter: Drafter, plan: Plan, batch: RolloutBatch, *, dtype: torch.dtype | None = None) -> Unrolled:
    """Unroll a drafter on the features that its kind reads: the auxiliary states, or for MTP `last_hidden`."""
    if isinstance(drafter, MtpDrafter):
        if batch.last_hidden is None:
            raise BatchRejected("an MTP drafter reads last_hidden, and this batch carries top entries in its place")
        return unroll_mtp(drafter, plan, batch.input_ids, batch.last_hidden, dtype=dtype)
    return unroll(drafter, plan, batch.input_ids, batch.aux_hidden, dtype=dtype)
