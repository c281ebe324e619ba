"""Attention of the unroll: step-0 keys of earlier rows, and the row's own keys of later steps, in one softmax.

Two disjoint sets of keys per query: those of step 0 in its document (rows up to its own) and the *diagonal* (the row's
own keys of steps 1..j). The first goes through a fused kernel, the second is a few dot products per row; outputs are
merged by log-sum-exp. The backward pass hands the kernel the *merged* output and log-sum-exp: with
P = exp(S - lse) and dS = P (dO.V - dO.O) that is exactly the gradient of the joint softmax, with no recomputation.

Kernels: `drafter.unroll.padded` on CPUs, `drafter.unroll.packed` elsewhere, as the plan's layout says.

Legend: N heads, G key-value heads, hd head size, n rows of this step, M rows with step-0 keys.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from drafter.device import fused_on_cuda
from drafter.unroll import packed, padded
from drafter.unroll.layout import Layout, Packed
from drafter.unroll.packed import by_kv_head
from drafter.unroll.plan import Plan


def gather_keys(plan: Plan, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """Lay step-0 keys and values [M, G, hd] out for the kernel, once for all steps."""
    keys: tuple[Tensor, ...] = _kernels(plan.layout).gather(plan.layout, k, v)
    return keys


def attend(
    plan: Plan, step: int, q: Tensor, keys: Sequence[Tensor], diagonal: Sequence[tuple[Tensor, Tensor]]
) -> Tensor:
    """Attention output [n, N, hd] of queries q [n, N, hd] (rotated) at `step`.

    `keys` are `gather_keys`'s, `diagonal` holds one (k, v) [n, G, hd] for each of steps 1..step.
    """
    own = [t for pair in diagonal for t in pair]
    out: Tensor = _Attend.apply(plan.layout, step, len(keys), q, *keys, *own)  # type: ignore[no-untyped-call]
    return out


def _kernels(layout: Layout) -> ModuleType:
    """What lays keys out for this layout, and attends in it, forward and backward."""
    return packed if isinstance(layout, Packed) else padded


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, layout: Layout, step: int, shared: int, q: Tensor, *flat: Tensor) -> Tensor:
        slot = layout.slot[: q.shape[0]]
        keys, diagonal = flat[:shared], _pairs(flat[shared:])
        out: Tensor
        lse: Tensor
        out, lse = _kernels(layout).forward(layout, q.index_select(0, layout.slot_row[step]), keys)
        out, lse = out.index_select(0, slot), lse.index_select(0, slot)
        if diagonal:
            out, lse = _merge_diagonal(q, out, lse, diagonal)
        ctx.layout, ctx.step, ctx.shared = layout, step, shared
        ctx.save_for_backward(q, out, lse, *flat)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        layout: Layout = ctx.layout
        q, out, lse, *flat = ctx.saved_tensors
        grad = grads[0]
        keys, diagonal = flat[: ctx.shared], _pairs(flat[ctx.shared :])
        slot, slot_row = layout.slot[: q.shape[0]], layout.slot_row[ctx.step]
        # Slots without a row repeat an arbitrary one. A zero gradient takes them out of every sum, and an infinite
        # log-sum-exp makes their weights 0: with another row's they could overflow, and 0 times infinity is NaN.
        slots = slot_row.numel()
        slot_grad = grad.new_zeros(slots, *grad.shape[1:]).index_copy_(0, slot, grad)
        slot_lse = lse.new_full((slots, lse.shape[1]), math.inf).index_copy_(0, slot, lse)
        slot_q, slot_out = q.index_select(0, slot_row), out.index_select(0, slot_row)
        grad_q, grad_flat = _kernels(layout).backward(layout, slot_grad, slot_q, slot_out, slot_lse, keys)
        grad_q = grad_q.index_select(0, slot)
        if diagonal:
            extra, grad_diagonal = _backward_diagonal(grad, q, out, lse, diagonal)
            grad_q = grad_q + extra
            grad_flat += grad_diagonal
        return None, None, None, grad_q, *grad_flat


def _pairs(flat: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
    return list(zip(flat[0::2], flat[1::2], strict=True))


@fused_on_cuda
def _merge_diagonal(
    q: Tensor, out: Tensor, lse: Tensor, diagonal: Sequence[tuple[Tensor, Tensor]]
) -> tuple[Tensor, Tensor]:
    kv_heads, scale = diagonal[0][0].shape[1], 1 / math.sqrt(q.shape[-1])
    grouped, wide = by_kv_head(q, kv_heads), lse.dtype
    scores = [(grouped * k[:, :, None]).sum(-1, dtype=wide) * scale for k, _ in diagonal]  # each [n, G, N/G]
    grouped_lse = by_kv_head(lse, kv_heads)
    merged = torch.logsumexp(torch.stack([grouped_lse, *scores]), dim=0)
    total = by_kv_head(out, kv_heads) * (grouped_lse - merged).exp()[..., None].to(out.dtype)
    for score, (_, v) in zip(scores, diagonal, strict=True):
        total = total + (score - merged).exp()[..., None].to(out.dtype) * v[:, :, None]
    return total.view_as(out), merged.view_as(lse)


@fused_on_cuda
def _backward_diagonal(
    grad: Tensor, q: Tensor, out: Tensor, lse: Tensor, diagonal: Sequence[tuple[Tensor, Tensor]]
) -> tuple[Tensor, list[Tensor]]:
    kv_heads, scale = diagonal[0][0].shape[1], 1 / math.sqrt(q.shape[-1])
    grouped, grouped_grad, wide = by_kv_head(q, kv_heads), by_kv_head(grad, kv_heads), lse.dtype
    grouped_lse = by_kv_head(lse, kv_heads)
    delta = (grouped_grad * by_kv_head(out, kv_heads)).sum(-1, dtype=wide)
    grad_q, grad_diagonal = torch.zeros_like(grouped), []
    for k, v in diagonal:
        score = (grouped * k[:, :, None]).sum(-1, dtype=wide) * scale
        p = (score - grouped_lse).exp()
        slope = (p * ((grouped_grad * v[:, :, None]).sum(-1, dtype=wide) - delta) * scale)[..., None].to(q.dtype)
        grad_q = grad_q + slope * k[:, :, None]
        grad_diagonal += [(slope * grouped).sum(2), (p[..., None].to(q.dtype) * grouped_grad).sum(2)]
    return grad_q.view_as(q), grad_diagonal
