"""What every kind of drafter is to training, replay and files. A new kind implements this, and `drafter.files.kinds`.

Legend: T tokens, D draft vocabulary, H hidden.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor, nn

from drafter.batch import RolloutBatch
from drafter.errors import BatchRejected
from drafter.policy import Policy
from drafter.unroll.plan import Plan, make_plan
from drafter.unroll.unrolled import Unrolled
from drafter.vocabulary import DraftVocabulary
from rl_hooks.format.drafter import DrafterKind
from rl_hooks.format.eagle3 import DrafterConfig
from rl_hooks.format.mtp import MtpConfig


class DraftModel(nn.Module, ABC):
    """A drafter's own weights. What it shares with the policy comes with each call, as a `Policy`."""

    kind: ClassVar[DrafterKind]
    config: DrafterConfig | MtpConfig
    vocabulary: DraftVocabulary
    #: Weights that it reads as they are stored, whatever it computes in.
    as_stored: ClassVar[frozenset[str]] = frozenset()

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """Layers of the target whose entering states it reads; empty: none."""
        return ()

    @property
    def every_row(self) -> bool:
        """Whether its plans compute every row: a second layer reads what the first one gave for context rows."""
        return False

    def plan(self, batch: RolloutBatch, steps: int) -> Plan:
        """Plan the unroll of a batch, on the host. Raises `BatchRejected` where the batch is of another target."""
        if self.aux_layers and batch.aux_layers and batch.aux_layers != self.aux_layers:
            raise BatchRejected(
                f"the drafter reads the states entering layers {list(self.aux_layers)}, these rollouts carry those "
                f"entering {list(batch.aux_layers)}; capture the drafter's layers, or train a drafter on these"
            )
        ids, size = batch.input_ids, self.config.vocab_size
        # Of a batch on a device one would have to wait for the device: plan before the batch is moved there.
        if ids.device.type == "cpu" and not 0 <= int(ids.min()) <= int(ids.max()) < size:
            raise BatchRejected(f"token ids must be in [0, {size}), got {int(ids.min())} to {int(ids.max())}")
        return make_plan(batch.cu_seqlens, batch.loss_mask, steps, every_row=self.every_row)

    @abstractmethod
    def unroll(self, plan: Plan, batch: RolloutBatch, policy: Policy, *, dtype: torch.dtype | None = None) -> Unrolled:
        """Run every step of `plan` over `batch`, drafting for `policy`; all of them on the drafter's device.

        Computes in `dtype` (default: the parameters' own). Gradients flow to all parameters but the last norm and the
        head, which the loss applies. Raises `DrafterError` where plan, batch or policy do not fit the drafter.
        """

    @abstractmethod
    def to_target(self, draft_ids: Tensor) -> Tensor:
        """Target token ids of draft ids."""


def computes_alike(one: DraftModel, other: DraftModel, dtype: torch.dtype | None = None) -> bool:
    """Whether two drafters of one configuration and vocabulary compute the same to the bit, because weights are equal.

    They compute in `dtype` (default: as stored). Small weights are compared first: a training moves every number, so
    drafters that differ are told apart by a few of them.
    """
    theirs = dict(other.named_parameters())
    for name, ours in sorted(one.named_parameters(), key=lambda named: named[1].numel()):
        cast = dtype if dtype and name not in one.as_stored else torch.promote_types(ours.dtype, theirs[name].dtype)
        if not torch.equal(ours.to(cast), theirs[name].to(cast)):
            return False
    buffers = dict(other.named_buffers())
    return all(torch.equal(ours, buffers[name]) for name, ours in one.named_buffers())
