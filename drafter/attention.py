"""Attention of the unroll: step-0 keys of earlier rows, and the row's own keys of later steps, in one softmax.

Three disjoint sets of keys per query: the document's prefix (all visible), its span (causal) and the *diagonal* (the
row's own keys of steps 1..j). The first two go through a fused kernel, the third is a few dot products per row; outputs
are merged by log-sum-exp. The backward pass hands each kernel the *merged* output and log-sum-exp: with
P = exp(S - lse) and dS = P (dO.V - dO.O) that is exactly the gradient of the joint softmax, with no recomputation.

Legend: N heads, G key-value heads, hd head size, n rows of this step, B documents, L span, S prefix.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from drafter.plan import Bucket, Plan

_cpu_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_cpu_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class BucketKeys(NamedTuple):
    """Step-0 keys and values of one bucket, padded: [B, G, L, hd] and, where there is a prefix, [B, G, S, hd]."""

    causal_k: Tensor
    causal_v: Tensor
    prefix_k: Tensor | None
    prefix_v: Tensor | None


def gather_keys(plan: Plan, k: Tensor, v: Tensor) -> tuple[BucketKeys, ...]:
    """Lay step-0 keys and values [M, G, hd] out for the kernel, once for all steps."""

    def lay(x: Tensor, index: Tensor, documents: int) -> Tensor:
        return x.index_select(0, index).view(documents, -1, *x.shape[1:]).transpose(1, 2)

    return tuple(
        BucketKeys(
            lay(k, b.causal_index, b.documents),
            lay(v, b.causal_index, b.documents),
            None if b.prefix_index is None else lay(k, b.prefix_index, b.documents),
            None if b.prefix_index is None else lay(v, b.prefix_index, b.documents),
        )
        for b in plan.buckets
    )


def attend(
    plan: Plan, step: int, q: Tensor, keys: Sequence[BucketKeys], diagonal: Sequence[tuple[Tensor, Tensor]]
) -> Tensor:
    """Attention output [n, N, hd] of queries q [n, N, hd] (rotated) at `step`.

    `keys` are the step-0 ones, `diagonal` holds one (k, v) [n, G, hd] for each of steps 1..step.
    """
    flat = [t for b in keys for t in b if t is not None] + [t for pair in diagonal for t in pair]
    out: Tensor = _Attend.apply(plan, step, q, *flat)  # type: ignore[no-untyped-call]
    return out


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, plan: Plan, step: int, q: Tensor, *flat: Tensor) -> Tensor:
        n = q.shape[0]
        keys, diagonal = _unflatten(plan, flat)
        padded_q = q.index_select(0, plan.slot_row[step])
        outs, lses = [], []
        for bucket, bucket_keys in zip(plan.buckets, keys, strict=True):
            out, lse = _forward_bucket(bucket, _lay(padded_q, bucket), bucket_keys)
            outs.append(out.transpose(1, 2).flatten(0, 1))
            lses.append(lse.transpose(1, 2).flatten(0, 1))
        slot = plan.slot[:n]
        out, lse = torch.cat(outs).index_select(0, slot), torch.cat(lses).index_select(0, slot)
        if diagonal:
            out, lse = _merge_diagonal(q, out, lse, diagonal)
        ctx.plan, ctx.step = plan, step
        ctx.save_for_backward(q, out, lse, *flat)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        plan: Plan = ctx.plan
        q, out, lse, *flat = ctx.saved_tensors
        grad = grads[0]
        keys, diagonal = _unflatten(plan, flat)
        n, slots = q.shape[0], plan.slot_row[ctx.step]
        slot = plan.slot[:n]
        # Slots without a row repeat an arbitrary one; a zero gradient takes them out of every sum.
        padded = [x.index_select(0, slots) for x in (q, out, lse)]
        padded_grad = grad.new_zeros(slots.numel(), *grad.shape[1:]).index_copy_(0, slot, grad)
        grad_q_parts, grad_flat = [], []
        for bucket, bucket_keys in zip(plan.buckets, keys, strict=True):
            laid_grad, laid_q, laid_out, laid_lse = (_lay(x, bucket) for x in (padded_grad, *padded))
            grad_q, grad_keys = _backward_bucket(bucket, laid_grad, laid_q, laid_out, laid_lse, bucket_keys)
            grad_q_parts.append(grad_q.transpose(1, 2).flatten(0, 1))
            grad_flat += grad_keys
        grad_q = torch.cat(grad_q_parts).index_select(0, slot)
        if diagonal:
            extra, grad_diagonal = _backward_diagonal(grad, q, out, lse, diagonal)
            grad_q = grad_q + extra
            grad_flat += grad_diagonal
        return None, None, grad_q, *grad_flat


def _unflatten(plan: Plan, flat: Sequence[Tensor]) -> tuple[list[BucketKeys], list[tuple[Tensor, Tensor]]]:
    rest, keys = list(flat), []
    for bucket in plan.buckets:
        if bucket.prefix_index is None:
            keys.append(BucketKeys(rest.pop(0), rest.pop(0), None, None))
        else:
            keys.append(BucketKeys(rest.pop(0), rest.pop(0), rest.pop(0), rest.pop(0)))
    return keys, list(zip(rest[0::2], rest[1::2], strict=True))


def _lay(x: Tensor, bucket: Bucket) -> Tensor:
    """[slots, N, ...] -> [B, N, L, ...] of one bucket."""
    return x[bucket.slots].view(bucket.documents, bucket.span, *x.shape[1:]).transpose(1, 2)


def _bias(bucket: Bucket, q: Tensor) -> Tensor | None:
    if bucket.prefix_hidden is None:
        return None
    bias = q.new_zeros(bucket.prefix_hidden.shape).masked_fill_(bucket.prefix_hidden, -math.inf)
    return bias[:, None, None, :].expand(-1, 1, bucket.span, -1)


def _forward_bucket(bucket: Bucket, q: Tensor, keys: BucketKeys) -> tuple[Tensor, Tensor]:
    out, lse = _kernel_forward(q, keys.causal_k, keys.causal_v, causal=True, bias=None)
    if keys.prefix_k is None or keys.prefix_v is None:
        return out, lse
    before, before_lse = _kernel_forward(q, keys.prefix_k, keys.prefix_v, causal=False, bias=_bias(bucket, q))
    merged = torch.logaddexp(lse, before_lse)
    weight = (lse - merged).exp()[..., None].to(out.dtype)
    before_weight = (before_lse - merged).exp()[..., None].to(out.dtype)
    return weight * out + before_weight * before, merged


def _backward_bucket(
    bucket: Bucket, grad: Tensor, q: Tensor, out: Tensor, lse: Tensor, keys: BucketKeys
) -> tuple[Tensor, list[Tensor]]:
    grad_q, grad_k, grad_v = _kernel_backward(grad, q, keys.causal_k, keys.causal_v, out, lse, causal=True, bias=None)
    if keys.prefix_k is None or keys.prefix_v is None:
        return grad_q, [grad_k, grad_v]
    before_q, before_k, before_v = _kernel_backward(
        grad, q, keys.prefix_k, keys.prefix_v, out, lse, causal=False, bias=_bias(bucket, q)
    )
    return grad_q + before_q, [grad_k, grad_v, before_k, before_v]


def _group(x: Tensor, kv_heads: int) -> Tensor:
    """[n, N, ...] -> [n, G, N/G, ...]: query heads beside the key-value head that they share."""
    return x.view(x.shape[0], kv_heads, -1, *x.shape[2:])


def _merge_diagonal(
    q: Tensor, out: Tensor, lse: Tensor, diagonal: Sequence[tuple[Tensor, Tensor]]
) -> tuple[Tensor, Tensor]:
    kv_heads, scale = diagonal[0][0].shape[1], 1 / math.sqrt(q.shape[-1])
    grouped, wide = _group(q, kv_heads), lse.dtype
    scores = [(grouped * k[:, :, None]).sum(-1, dtype=wide) * scale for k, _ in diagonal]  # each [n, G, N/G]
    grouped_lse = _group(lse, kv_heads)
    merged = torch.logsumexp(torch.stack([grouped_lse, *scores]), dim=0)
    total = _group(out, kv_heads) * (grouped_lse - merged).exp()[..., None].to(out.dtype)
    for score, (_, v) in zip(scores, diagonal, strict=True):
        total = total + (score - merged).exp()[..., None].to(out.dtype) * v[:, :, None]
    return total.view_as(out), merged.view_as(lse)


def _backward_diagonal(
    grad: Tensor, q: Tensor, out: Tensor, lse: Tensor, diagonal: Sequence[tuple[Tensor, Tensor]]
) -> tuple[Tensor, list[Tensor]]:
    kv_heads, scale = diagonal[0][0].shape[1], 1 / math.sqrt(q.shape[-1])
    grouped, grouped_grad, wide = _group(q, kv_heads), _group(grad, kv_heads), lse.dtype
    grouped_lse = _group(lse, kv_heads)
    delta = (grouped_grad * _group(out, kv_heads)).sum(-1, dtype=wide)
    grad_q, grad_diagonal = torch.zeros_like(grouped), []
    for k, v in diagonal:
        score = (grouped * k[:, :, None]).sum(-1, dtype=wide) * scale
        p = (score - grouped_lse).exp()
        slope = (p * ((grouped_grad * v[:, :, None]).sum(-1, dtype=wide) - delta) * scale)[..., None].to(q.dtype)
        grad_q = grad_q + slope * k[:, :, None]
        grad_diagonal += [(slope * grouped).sum(2), (p[..., None].to(q.dtype) * grouped_grad).sum(2)]
    return grad_q.view_as(q), grad_diagonal


# --- the kernel: fused on the CPU, plain matrix products elsewhere ---------------------------------------------------


def _fused(q: Tensor) -> bool:
    return q.device.type == "cpu"


def _kernel_forward(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Output [B, N, L, hd] and its log-sum-exp [B, N, L] over one set of keys [B, G, S, hd]."""
    if _fused(q):
        out, lse = _cpu_forward(q, k, v, 0.0, causal, attn_mask=bias)
        return out, lse
    weights, _, v = _scores(q, k, v, causal, bias)
    lse = torch.logsumexp(weights, dim=-1)
    return (weights - lse[..., None]).exp().to(v.dtype) @ v, lse


def _kernel_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    causal: bool,
    bias: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients for q, k, v given the *merged* output and log-sum-exp."""
    if _fused(q):
        grad_q, grad_k, grad_v = _cpu_backward(grad, q, k, v, out, lse, 0.0, causal, attn_mask=bias)
        return grad_q, grad_k, grad_v
    kv_heads = k.shape[1]
    scores, k, v = _scores(q, k, v, causal, bias)
    p = (scores - lse[..., None]).exp()
    delta = (grad * out).sum(-1, keepdim=True)
    slope = (p * (grad @ v.transpose(-1, -2) - delta) / math.sqrt(q.shape[-1])).to(q.dtype)
    grad_k = _fold(slope.transpose(-1, -2) @ q, kv_heads)
    grad_v = _fold(p.to(grad.dtype).transpose(-1, -2) @ grad, kv_heads)
    return slope @ k, grad_k, grad_v


def _fold(x: Tensor, kv_heads: int) -> Tensor:
    """Sum over the query heads that share a key-value head: [B, N, S, hd] -> [B, G, S, hd]."""
    return x.view(x.shape[0], kv_heads, -1, *x.shape[2:]).sum(2)


def _scores(q: Tensor, k: Tensor, v: Tensor, causal: bool, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Scores [B, N, L, S] in at least float32, and keys and values repeated for every query head."""
    repeats = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = (q @ k.transpose(-1, -2)).to(wide) / math.sqrt(q.shape[-1])
    if causal:
        visible = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
        scores = scores.masked_fill(~visible, -math.inf)
    return (scores if bias is None else scores + bias), k, v
