"""The kinds of drafter, and what differs between them where a batch or a file is read: all else treats them alike.

`eagle3` reads the auxiliary states and has its own head over a draft vocabulary. `mtp` (`draftalign.kind` in its
config.json) reads last_hidden and uses the policy's head over the whole vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from drafter.batch import RolloutBatch
from drafter.device import working_dtype
from drafter.errors import BatchRejected, TargetHeadError
from drafter.files.checkpoint import (
    CONFIG_FILE,
    read_config,
    read_drafter,
    write_drafter,
)
from drafter.files.mtp import read_mtp, write_mtp
from drafter.model.eagle3 import Eagle3Drafter
from drafter.mtp.module import MtpDrafter, unroll_mtp
from drafter.target import TargetHead
from drafter.unroll.plan import Plan, make_plan
from drafter.unroll.unroll import Unrolled, unroll
from rl_hooks.format.run import kind_of

Drafter = Eagle3Drafter | MtpDrafter


def plan_batch(drafter: Drafter, batch: RolloutBatch, steps: int) -> Plan:
    """Plan the unroll of a batch, on the host, as the drafter's layers need it.

    Raises `BatchRejected` where the batch is not of this drafter's target.
    """
    _check_fit(drafter, batch)
    several = isinstance(drafter, Eagle3Drafter) and drafter.config.num_hidden_layers > 1
    return make_plan(batch.cu_seqlens, batch.loss_mask, steps, every_row=several)


def _check_fit(drafter: Drafter, batch: RolloutBatch) -> None:
    layers = drafter.config.aux_layers if isinstance(drafter, Eagle3Drafter) else ()
    if layers and batch.aux_layers and batch.aux_layers != layers:
        raise BatchRejected(
            f"the drafter reads the states entering layers {list(layers)}, these rollouts carry those entering "
            f"{list(batch.aux_layers)}; capture the drafter's layers, or train a drafter on these"
        )
    ids, size = batch.input_ids, drafter.config.vocab_size
    # Of a batch on a device one would have to wait for the device: plan before the batch is moved there.
    if ids.device.type == "cpu" and not 0 <= int(ids.min()) <= int(ids.max()) < size:
        raise BatchRejected(f"token ids must be in [0, {size}), got {int(ids.min())} to {int(ids.max())}")


def unroll_batch(drafter: Drafter, plan: Plan, batch: RolloutBatch, *, dtype: torch.dtype | None = None) -> Unrolled:
    """Unroll a drafter on the features that its kind reads: the auxiliary states, or for MTP `last_hidden`."""
    if isinstance(drafter, MtpDrafter):
        if batch.last_hidden is None:
            raise BatchRejected("an MTP drafter reads last_hidden, and this batch carries top entries in its place")
        return unroll_mtp(drafter, plan, batch.input_ids, batch.last_hidden, dtype=dtype)
    return unroll(drafter, plan, batch.input_ids, batch.aux_hidden, dtype=dtype)


def share(drafter: Drafter, embed_tokens: Tensor, head: TargetHead | None) -> None:
    """Give a drafter what engines let it share with the policy: the embedding, and for MTP the whole head.

    embed_tokens [V, H] must be on the drafter's device; the head may be elsewhere.
    """
    drafter.embed_tokens = embed_tokens
    if not isinstance(drafter, MtpDrafter):
        return
    if head is None or not head.whole:
        raise TargetHeadError("an MTP drafter draws from the policy's whole lm_head; send all of its rows")
    weight = next(drafter.parameters())
    drafter.head = head.rows(drafter.vocabulary, weight.device, working_dtype(weight.device) or weight.dtype)


def read_kind(directory: Path, embed_tokens: Tensor, lm_head: Callable[[], Tensor]) -> Drafter:
    """Read a stored drafter of either kind over the policy's embed_tokens and lm_head [V, H], asked for if needed."""
    if kind_of(read_config(directory / CONFIG_FILE)) == "mtp":
        return read_mtp(directory, embed_tokens, lm_head())
    return read_drafter(directory, embed_tokens)


def write_kind(directory: Path, drafter: Drafter) -> None:
    """Write a drafter of either kind as engines read it, in float32."""
    if isinstance(drafter, MtpDrafter):
        write_mtp(directory, drafter)
    else:
        write_drafter(directory, drafter)
