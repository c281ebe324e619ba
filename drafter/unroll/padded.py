"""Attention over padded buckets: torch's fused kernel for CPUs, with the log-sum-exp that merging needs.

The causal span and the prefix are two calls, merged by log-sum-exp. Backward passes take the output and log-sum-exp of
the *whole* softmax (`drafter.unroll.attention`).

Legend: N heads, G key-value heads, hd head size, B documents of a bucket, L span, S prefix.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from drafter.unroll.layout import Bucket, Padded

_kernel_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_kernel_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def gather(layout: Padded, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """Lay step-0 keys and values [M, G, hd] out: per bucket two [B, G, L, hd] and, with a prefix, two [B, G, S, hd]."""

    def lay(x: Tensor, index: Tensor, documents: int) -> Tensor:
        return x.index_select(0, index).view(documents, -1, *x.shape[1:]).transpose(1, 2)

    keys = []
    for b in layout.buckets:
        for index in (b.causal_index, b.prefix_index):
            if index is not None:
                keys += [lay(k, index, b.documents), lay(v, index, b.documents)]
    return tuple(keys)


def forward(layout: Padded, q: Tensor, keys: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Output [slots, N, hd] and log-sum-exp [slots, N] of the queries q [slots, N, hd]."""
    outs, lses = [], []
    for bucket, own in _by_bucket(layout, keys):
        out, lse = _forward_bucket(bucket, _lay(q, bucket), own)
        outs.append(out.transpose(1, 2).flatten(0, 1))
        lses.append(lse.transpose(1, 2).flatten(0, 1))
    return torch.cat(outs), torch.cat(lses)


def backward(
    layout: Padded, grad: Tensor, q: Tensor, out: Tensor, lse: Tensor, keys: Sequence[Tensor]
) -> tuple[Tensor, list[Tensor]]:
    """Gradients for q [slots, N, hd] and for every tensor of `keys`."""
    grad_q, grad_keys = [], []
    for bucket, own in _by_bucket(layout, keys):
        laid = [_lay(x, bucket) for x in (grad, q, out, lse)]
        of_q, of_keys = _backward_bucket(bucket, laid[0], laid[1], laid[2], laid[3], own)
        grad_q.append(of_q.transpose(1, 2).flatten(0, 1))
        grad_keys += of_keys
    return torch.cat(grad_q), grad_keys


def _by_bucket(layout: Padded, keys: Sequence[Tensor]) -> list[tuple[Bucket, Sequence[Tensor]]]:
    pairs, begin = [], 0
    for bucket in layout.buckets:
        end = begin + (2 if bucket.prefix_index is None else 4)
        pairs.append((bucket, keys[begin:end]))
        begin = end
    return pairs


def _lay(x: Tensor, bucket: Bucket) -> Tensor:
    """[slots, N, ...] -> [B, N, L, ...] of one bucket."""
    return x[bucket.slots].view(bucket.documents, bucket.span, *x.shape[1:]).transpose(1, 2)


def _bias(bucket: Bucket, q: Tensor) -> Tensor | None:
    if bucket.prefix_hidden is None:
        return None
    bias = q.new_zeros(bucket.prefix_hidden.shape).masked_fill_(bucket.prefix_hidden, -math.inf)
    return bias[:, None, None, :].expand(-1, 1, bucket.span, -1)


def _forward_bucket(bucket: Bucket, q: Tensor, keys: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    out, lse = _kernel_forward(q, keys[0], keys[1], 0.0, True)
    if bucket.prefix_index is None:
        return out, lse
    before, before_lse = _kernel_forward(q, keys[2], keys[3], 0.0, False, attn_mask=_bias(bucket, q))
    merged = torch.logaddexp(lse, before_lse)
    weight = (lse - merged).exp()[..., None].to(out.dtype)
    before_weight = (before_lse - merged).exp()[..., None].to(out.dtype)
    return weight * out + before_weight * before, merged


def _backward_bucket(
    bucket: Bucket, grad: Tensor, q: Tensor, out: Tensor, lse: Tensor, keys: Sequence[Tensor]
) -> tuple[Tensor, list[Tensor]]:
    grad_q, grad_k, grad_v = _kernel_backward(grad, q, keys[0], keys[1], out, lse, 0.0, True)
    if bucket.prefix_index is None:
        return grad_q, [grad_k, grad_v]
    before_q, before_k, before_v = _kernel_backward(
        grad, q, keys[2], keys[3], out, lse, 0.0, False, attn_mask=_bias(bucket, q)
    )
    return grad_q + before_q, [grad_k, grad_v, before_k, before_v]
