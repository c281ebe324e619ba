"""Distance from drafter to target over all steps, fused with lm_head, in chunks of target rows.

Per supervised entry (row t, step j), with p the target's *true* probabilities on the draft vocabulary, m = sum p its
mass there and q = softmax(lm_head(norm(pre)) / tau):

    kl = sum_v p log(p / (m q)) = m KL(p/m || q) >= 0      d kl / d logits = (m q - p) / tau
    a = sum_v min(p, q)

kl is minimised. a is only reported: the probability that rejection sampling keeps the draft, and 1 - a the total
variation where m = 1.

The loss is sum_j step_decay**j sum_entries kl / denominator, where the *caller's* denominator is the number of
response tokens in the whole optimizer window, across ranks. Peers divide by other counts, so learning rates do not
transfer.

Neither [E, D] nor [T, V] is ever held: chunks walk the target rows, one target softmax serves every step that looks at
it, and the gradients for hidden states and lm_head are formed in the forward pass.

In half precision these are rounded to it: the factors of each product (norm(pre), lm_head, the slopes), the gradient
for hidden states, and that for lm_head once all chunks are summed. Logits, probabilities, the loss and all sums (over
entries, chunks, and the masters' gradients over batches) are float32. On a CPU a product of half precision returns half
precision: there the drafter's logits and each chunk's share of lm_head's gradient are rounded once more.

Legend: E entries (all steps), U target rows, D draft vocabulary, H hidden, K steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import Any, Final

import torch
import torch.nn.functional as F  # noqa: N812 - its name everywhere
from torch import Tensor

from drafter.device import has_triton
from drafter.model.draft_model import DraftModel
from drafter.model.matmul import add_times_wide, times, times_wide
from drafter.model.pointwise import rms_norm, take_rows
from drafter.training.target import DraftTarget
from drafter.unroll.plan import Plan
from drafter.unroll.unrolled import Unrolled

#: Logits held at once on a CPU: 4 MiB of float32. Twice as many would save 1 % of the time and cost 10 MiB.
CHUNK_ELEMENTS = 1 << 20
#: Elsewhere 512 MiB of float32: some 4000 rows of 32k logits, so that each product fills a GPU.
_DEVICE_CHUNK_ELEMENTS = 1 << 27
#: Logits passed over together on a CPU: 256 KiB of float32, so that the passes stay within its second cache.
_BLOCK_ELEMENTS = 1 << 16
#: Stands for log 0 where it is multiplied by that 0.
_LEAST_LOG: Final = -1e30


@dataclass(frozen=True, eq=False)
class DraftLoss:
    """A loss to call backward on, and sums per step to pool over batches before dividing by `entries`."""

    loss: Tensor  # scalar
    kl_sums: Tensor  # [K], detached
    acceptance_sums: Tensor  # [K], detached
    entries: tuple[int, ...]  # K


def draft_loss(
    drafter: DraftModel,
    unrolled: Unrolled,
    target: DraftTarget,
    *,
    denominator: float,
    step_decay: float = 1.0,
    chunk_elements: int | None = None,
) -> DraftLoss:
    """Weighted loss over every entry of the unroll. Gradients reach `pre`, norm and, unless it is frozen, lm_head.

    Holds logits of at most `chunk_elements` (default: what suits the device) or of one target row's entries. Never
    waits for the device.
    """
    weights, plan = unrolled.weights, unrolled.plan
    wide = torch.promote_types(weights.lm_head.dtype, torch.float32)
    device = weights.lm_head.device
    step_weights = torch.full((plan.steps,), step_decay, dtype=wide, device=device)
    step_weights = step_weights.pow_(torch.arange(plan.steps, device=device)).div_(denominator)
    ordered = take_rows(torch.cat(unrolled.pre), plan.order)
    hidden = rms_norm(ordered, weights.norm, drafter.config.rms_norm_eps)
    loss, kl_sums, acceptance_sums = _FusedLoss.apply(  # type: ignore[no-untyped-call]
        hidden,
        weights.lm_head,
        target,
        plan,
        step_weights,
        chunk_elements or chunk_size(device, plan.order.numel() * weights.lm_head.shape[0]),
        torch.is_grad_enabled(),
    )
    return DraftLoss(loss, kl_sums, acceptance_sums, plan.entries)


def chunk_size(device: torch.device, elements: int | None = None) -> int:
    """Logits to hold at once on a device, of `elements` in all: short batches on a CPU make do with half."""
    if device.type != "cpu":
        return _DEVICE_CHUNK_ELEMENTS
    return CHUNK_ELEMENTS if elements is None else min(CHUNK_ELEMENTS, max(CHUNK_ELEMENTS // 2, elements // 8))


def kernels(x: Tensor) -> ModuleType | None:
    """The Triton kernels, for tensors on CUDA where Triton is installed. None: torch does it all."""
    return import_module("drafter.training.triton_loss") if x.is_cuda and has_triton() else None


def _chunks(plan: Plan, size: int, chunk_elements: int) -> Iterator[tuple[int, int]]:
    """Ranges of target rows whose entries' logits fit in `chunk_elements`; at least one row each."""
    starts, limit = plan.target_starts, max(1, chunk_elements // size)
    begin = 0
    for end in range(1, len(starts)):
        last = end == len(starts) - 1
        if last or starts[end + 1] - starts[begin] > limit:
            yield begin, end
            begin = end


class _FusedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        lm_head: Tensor,
        target: DraftTarget,
        plan: Plan,
        step_weights: Tensor,
        chunk_elements: int,
        grad_enabled: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        wide = step_weights.dtype
        want_hidden = grad_enabled and ctx.needs_input_grad[0]
        want_head = grad_enabled and ctx.needs_input_grad[1]
        grad_hidden = torch.empty_like(hidden) if want_hidden else None
        grad_head = torch.zeros_like(lm_head, dtype=wide) if want_head else None
        kl = hidden.new_zeros(hidden.shape[0], dtype=wide)
        acceptance = torch.zeros_like(kl)
        row_weights = step_weights.index_select(0, plan.entry_step)
        fused = kernels(hidden)
        for begin, end in _chunks(plan, lm_head.shape[0], chunk_elements):
            entries = slice(plan.target_starts[begin], plan.target_starts[end])
            p, mass, own = target_of(target, begin, end, wide)
            pick = plan.target_index[entries] - begin
            h = hidden[entries]
            logits = times_wide(h, lm_head)
            scale = row_weights[entries] / target.divisor
            if fused is not None:
                found = fused.measure(logits, p, own, pick, target.divisor)
                kl[entries], acceptance[entries] = found.kl, found.acceptance
                if not grad_enabled:
                    continue
                slope = fused.slope(logits, p, mass, pick, found, scale, target.divisor, h.dtype)
            else:
                if target.divisor != 1:
                    logits.div_(target.divisor)
                for rows in _blocks(logits):
                    at = slice(entries.start + rows.start, entries.start + rows.stop)
                    kl[at], acceptance[at] = _fold(
                        logits[rows], p, mass, own, pick[rows], scale[rows] if grad_enabled else None
                    )
                slope = logits.to(h.dtype)
            if grad_hidden is not None:
                grad_hidden[entries] = times(slope, lm_head.t())
            if grad_head is not None:
                add_times_wide(grad_head, slope.t(), h.t())
        ctx.save_for_backward(grad_hidden, None if grad_head is None else grad_head.to(lm_head.dtype))
        sums = torch.zeros_like(step_weights)
        kl_sums = sums.index_add(0, plan.entry_step, kl)
        acceptance_sums = sums.index_add(0, plan.entry_step, acceptance)
        ctx.mark_non_differentiable(kl_sums, acceptance_sums)
        return (kl * row_weights).sum(), kl_sums, acceptance_sums

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_head = ctx.saved_tensors
        scaled = [None if g is None else g * grads[0].to(g.dtype) for g in (grad_hidden, grad_head)]
        return (*scaled, None, None, None, None, None)


def target_of(target: DraftTarget, begin: int, end: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Give p [n, D] of the target rows [begin, end), its mass m [n] and sum p log p - m log m [n]."""
    logp = target.logprobs(begin, end, dtype)
    if (fused := kernels(logp)) is not None:
        p = logp.contiguous()
        return p, *fused.target(p)
    logp.clamp_(min=_LEAST_LOG)
    p = logp.exp()
    mass = p.sum(-1)
    return p, mass, torch.special.entr(mass) + torch.linalg.vecdot(p, logp)


def _blocks(logits: Tensor) -> Iterator[slice]:
    """Ranges of rows to pass over together: on a CPU what its second cache holds, elsewhere all."""
    n = logits.shape[0]
    size = max(1, _BLOCK_ELEMENTS // logits.shape[1]) if logits.device.type == "cpu" else max(n, 1)
    return (slice(begin, min(begin + size, n)) for begin in range(0, n, size))


def _fold(
    logits: Tensor, p: Tensor, mass: Tensor, own: Tensor, pick: Tensor, scale: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The kl and acceptance [e] of entries with these tempered logits [e, D], whose targets are rows `pick` of p.

    Unless `scale` [e] is None, the logits are overwritten by the derivative of kl by them, times `scale`.
    """
    p, mass, own = p.index_select(0, pick), mass.index_select(0, pick), own.index_select(0, pick)
    q = F.log_softmax(logits, dim=-1)
    kl = own - torch.linalg.vecdot(p, q)
    q.exp_()
    acceptance = torch.minimum(p, q).sum(-1)
    if scale is not None:
        scale = scale[:, None]
        torch.mul(q, scale * mass[:, None], out=logits).addcmul_(p, scale, value=-1)
    return kl, acceptance
