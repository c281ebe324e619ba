"""Attention over packed documents: FlashAttention where it runs, plain torch elsewhere, with one contract.

Query i of a document with n queries and m keys sees its first m - n + i + 1 keys, so one causal call covers prefix and
span. That is how FlashAttention aligns a causal mask since 2.1, and how torch relies on it
(`torch.nn.attention.bias.CausalVariant.LOWER_RIGHT` makes the same call). Backward passes take the output and
log-sum-exp of the *whole* softmax (`drafter.unroll.attention`). Nothing here waits for the device.

Legend: N heads, G key-value heads, hd head size, S slots (queries of all documents), M keys of all documents.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from drafter.unroll.layout import Packed

_flash_forward = torch.ops.aten._flash_attention_forward
_flash_backward = torch.ops.aten._flash_attention_backward
#: Scores [.., queries, keys] that the plain kernel holds at once: 64 MiB of float32.
_SCORES = 1 << 24


def gather(layout: Packed, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """Lay step-0 keys and values [M, G, hd] out by document."""
    return k.index_select(0, layout.key_index), v.index_select(0, layout.key_index)


def runs_flash(q: Tensor) -> bool:
    """Whether FlashAttention takes these queries. `meta` tensors do as the GPU would: tests prove its shapes there."""
    return (
        q.device.type in ("cuda", "meta")
        and q.dtype in (torch.bfloat16, torch.float16)
        and q.shape[-1] % 8 == 0
        and q.shape[-1] <= 256
    )


def forward(layout: Packed, q: Tensor, keys: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Output [S, N, hd] and log-sum-exp [S, N], in at least float32, of the queries q [S, N, hd]."""
    k, v = keys
    if not runs_flash(q):
        return _plain_forward(layout, q, k, v)
    scale, starts = 1 / math.sqrt(q.shape[-1]), (layout.query_starts, layout.key_starts)
    longest = layout.longest_span, layout.longest_keys
    out, lse, *_ = _flash_forward(q, k, v, *starts, *longest, 0.0, True, False, scale=scale)
    return out, lse.t()  # the kernel's is [N, S]


def backward(
    layout: Packed, grad: Tensor, q: Tensor, out: Tensor, lse: Tensor, keys: Sequence[Tensor]
) -> tuple[Tensor, list[Tensor]]:
    """Gradients for q [S, N, hd] and for the keys and values."""
    k, v = keys
    if not runs_flash(q):
        return _plain_backward(layout, grad, q, out, lse, k, v)
    scale, starts = 1 / math.sqrt(q.shape[-1]), (layout.query_starts, layout.key_starts)
    longest = layout.longest_span, layout.longest_keys
    # The state of the random numbers is not read: nothing is dropped out.
    state = torch.zeros(2, dtype=torch.uint64, device=q.device)
    grad_q, grad_k, grad_v = _flash_backward(
        grad.contiguous(),
        q,
        k,
        v,
        out,
        lse.t().contiguous(),
        *starts,
        *longest,
        0.0,
        True,
        state,
        torch.zeros((), dtype=torch.uint64, device=q.device),
        scale=scale,
    )
    return grad_q, [grad_k, grad_v]


# --- plain torch: other precisions and devices, and what tests hold the rest against -------------------------------


def _blocks(layout: Packed, heads: int) -> Iterator[tuple[slice, slice, int]]:
    """Blocks of queries, the keys that any of them sees, and how many of these the block's first query sees."""
    for d in range(len(layout.queries) - 1):
        begin, end = layout.queries[d], layout.queries[d + 1]
        first_key, last_key = layout.keys[d], layout.keys[d + 1]
        rows = max(1, _SCORES // (heads * (last_key - first_key)))
        for a in range(begin, end, rows):
            b = min(a + rows, end)
            yield slice(a, b), slice(first_key, last_key - (end - b)), last_key - first_key - (end - a) + 1


def _scores(q: Tensor, k: Tensor, seen: int) -> Tensor:
    """Scores [G, N/G, n, m] of a block, in at least float32; -inf where a query does not look."""
    grouped = by_kv_head(q, k.shape[1])  # [n, G, N/G, hd]
    scores: Tensor = torch.einsum("ngrd,mgd->grnm", grouped, k).to(torch.promote_types(q.dtype, torch.float32))
    hidden = torch.ones(q.shape[0], k.shape[0], dtype=torch.bool, device=q.device).triu(seen)
    return scores.div_(math.sqrt(q.shape[-1])).masked_fill_(hidden, -math.inf)


def by_kv_head(x: Tensor, kv_heads: int) -> Tensor:
    """[n, N, ...] -> [n, G, N/G, ...]: query heads beside the key-value head that they share."""
    return x.view(x.shape[0], kv_heads, -1, *x.shape[2:])


def _by_head(x: Tensor, kv_heads: int) -> Tensor:
    """[n, N] -> [G, N/G, n, 1]."""
    return by_kv_head(x, kv_heads).permute(1, 2, 0)[..., None]


def _plain_forward(layout: Packed, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    out = torch.empty_like(q)
    lse = q.new_empty(q.shape[:2], dtype=torch.promote_types(q.dtype, torch.float32))
    for rows, keys, seen in _blocks(layout, q.shape[1]):
        scores = _scores(q[rows], k[keys], seen)
        total = scores.logsumexp(dim=-1)
        weights = scores.sub_(total[..., None]).exp_().to(v.dtype)
        out[rows] = torch.einsum("grnm,mgd->ngrd", weights, v[keys]).flatten(1, 2)
        lse[rows] = total.permute(2, 0, 1).flatten(1)
    return out, lse


def _plain_backward(
    layout: Packed, grad: Tensor, q: Tensor, out: Tensor, lse: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, list[Tensor]]:
    grad_q, wide = torch.empty_like(q), lse.dtype
    grad_k, grad_v = torch.zeros_like(k, dtype=wide), torch.zeros_like(v, dtype=wide)
    delta = (grad * out).sum(-1, dtype=wide)  # [S, N]
    for rows, keys, seen in _blocks(layout, q.shape[1]):
        p = _scores(q[rows], k[keys], seen).sub_(_by_head(lse[rows], k.shape[1])).exp_()
        of_out = by_kv_head(grad[rows], k.shape[1])
        slope = torch.einsum("ngrd,mgd->grnm", of_out, v[keys]).to(wide).sub_(_by_head(delta[rows], k.shape[1])).mul_(p)
        slope = slope.div_(math.sqrt(q.shape[-1])).to(q.dtype)
        grad_q[rows] = torch.einsum("grnm,mgd->ngrd", slope, k[keys]).flatten(1, 2)
        grad_k[keys] += torch.einsum("grnm,ngrd->mgd", slope, by_kv_head(q[rows], k.shape[1]))
        grad_v[keys] += torch.einsum("grnm,ngrd->mgd", p.to(v.dtype), of_out)
    return grad_q, [grad_k.to(k.dtype), grad_v.to(v.dtype)]
