"""What SGLang's CPU engine takes from `sgl-kernel`, in plain PyTorch: no wheel of its CPU kernels is published.

Only what EAGLE-3 with chains of drafts (`--speculative-eagle-topk 1`) calls; whatever else SGLang imports by name
raises when it is called. Slow and plain on purpose: a batch is a loop over its requests. Scheduler, speculative worker,
caches, weight updates and counters are SGLang's own. Never shipped.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from importlib import metadata
from typing import Any

import torch
from torch import Tensor

_LIBRARY: Any = torch.library.Library("sgl_kernel", "DEF")  # type: ignore[no-untyped-call]


def __getattr__(name: str) -> Callable[..., Any]:
    """Any other kernel: importable, so that SGLang's modules load."""
    if name.startswith("__"):
        raise AttributeError(name)

    def absent(*_: Any, **__: Any) -> Any:
        raise NotImplementedError(f"the tests' stand-in has no sgl_kernel.{name}")

    return absent


# --- attention over SGLang's paged keys and values


def _attend(q: Tensor, keys: Tensor, values: Tensor, scale: float, cap: float, seen: Tensor) -> Tensor:
    """Q [Q, H, D]; keys, values [K, G, D] with H a multiple of G; seen bool[Q, K]."""
    share = q.shape[1] // keys.shape[1]
    k, v = (part.repeat_interleave(share, 1).float() for part in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", q.float() * scale, k)
    if cap > 0:
        scores = cap * torch.tanh(scores / cap)
    scores = scores.masked_fill(~seen, float("-inf"))
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).to(q.dtype)


def _only_plain(other: bool, window: int, *more: Tensor | None) -> None:
    if other or window > 0 or any(one is not None for one in more):
        raise NotImplementedError("the tests' stand-in has causal attention only: no window, sinks, tree or encoder")


def _extend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    key_buffer: Tensor,
    value_buffer: Tensor,
    key_scale: float,
    value_scale: float,
    req_to_token: Tensor,
    requests: Tensor,
    lengths: Tensor,
    new_lengths: Tensor,
    starts: Tensor,
    longest: int,
    scaling: float,
    logit_cap: float,
    is_cross: bool,
    window: int,
    encoder_lengths: Tensor | None,
    sinks: Tensor | None,
    tree_mask: Tensor | None,
    is_causal: bool,
) -> None:
    """New tokens of each request see what it has cached and each other, causally."""
    _only_plain(is_cross or not is_causal, window, sinks, tree_mask)
    for request, total, new, start in zip(*(t.tolist() for t in (requests, lengths, new_lengths, starts)), strict=True):
        if not new:
            continue
        cached, rows = req_to_token[request, : total - new].long(), slice(start, start + new)
        keys = torch.cat([key_buffer[cached], k[rows].view(new, *key_buffer.shape[1:])])
        values = torch.cat([value_buffer[cached], v[rows].view(new, *value_buffer.shape[1:])])
        seen = torch.ones(new, total, dtype=torch.bool).tril(total - new)
        out[rows] = _attend(q[rows], keys, values, scaling, logit_cap, seen)


def _decode(
    q: Tensor,
    key_buffer: Tensor,
    value_buffer: Tensor,
    key_scale: float,
    value_scale: float,
    out: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    at: Tensor | None,
    attn_logits: Tensor,
    req_to_token: Tensor,
    requests: Tensor,
    lengths: Tensor,
    scaling: float,
    logit_cap: float,
    is_cross: bool,
    window: int,
    encoder_lengths: Tensor | None,
    sinks: Tensor | None,
) -> None:
    """One new token of each request: its key and value are written first."""
    _only_plain(is_cross, window, sinks)
    if k is not None and v is not None:
        key_buffer[at] = k.view(-1, *key_buffer.shape[1:])
        value_buffer[at] = v.view(-1, *value_buffer.shape[1:])
    for row, (request, total) in enumerate(zip(requests.tolist(), lengths.tolist(), strict=True)):
        cached, seen = req_to_token[request, :total].long(), torch.ones(1, total, dtype=torch.bool)
        one = slice(row, row + 1)
        out[one] = _attend(q[one], key_buffer[cached], value_buffer[cached], scaling, logit_cap, seen)


def _extend_unscaled(*arguments: Any) -> None:
    _extend(*(*arguments[:6], 1.0, 1.0, *arguments[6:], True))


def _decode_unscaled(*arguments: Any) -> None:
    _decode(*(*arguments[:3], 1.0, 1.0, *arguments[3:]))


#: Before, neither was told the scales of the cache, and the first not whether it is causal.
_SCALED = tuple(int(part) for part in metadata.version("sglang").split(".")[:3]) >= (0, 5, 20)
_SCALES = "float key_scale, float value_scale, "

for _schema, _function in (
    (
        "extend_attention_cpu(Tensor q, Tensor k, Tensor v, Tensor(a!) out, Tensor key_buffer, Tensor value_buffer, "
        f"{_SCALES}Tensor req_to_token, Tensor requests, Tensor lengths, Tensor new_lengths, "
        "Tensor starts, int longest, float scaling, float logit_cap, bool is_cross, int window, "
        "Tensor? encoder_lengths, Tensor? sinks, Tensor? tree_mask, bool is_causal) -> ()",
        _extend if _SCALED else _extend_unscaled,
    ),
    (
        "decode_attention_cpu(Tensor q, Tensor(a!) key_buffer, Tensor(b!) value_buffer, "
        f"{_SCALES}Tensor(c!) out, Tensor? k, Tensor? v, Tensor? at, Tensor(d!) attn_logits, "
        "Tensor req_to_token, Tensor requests, Tensor lengths, float scaling, float logit_cap, bool is_cross, "
        "int window, Tensor? encoder_lengths, Tensor? sinks) -> ()",
        _decode if _SCALED else _decode_unscaled,
    ),
):
    if not _SCALED:
        _schema = _schema.replace(_SCALES, "").replace(", bool is_causal", "")
    _LIBRARY.define(_schema)
    _LIBRARY.impl(_schema.split("(")[0], _function, "CompositeExplicitAutograd")


# --- where a request's tokens lie: `req_to_token` int32[requests, longest] holds slots of the cache


def assign_req_to_token_pool_cpu(
    requests: Tensor, req_to_token: Tensor, start: Tensor, end: Tensor, slots: Tensor, width: int
) -> None:
    """Request i gets the next `end[i] - start[i]` slots."""
    done = 0
    for request, a, b in zip(requests.tolist(), start.tolist(), end.tolist(), strict=True):
        req_to_token[request, a:b] = slots[done : done + b - a].to(req_to_token.dtype)
        done += b - a


def assign_extend_cache_locs_cpu(
    requests: Tensor, req_to_token: Tensor, start: Tensor, end: Tensor, out: Tensor, width: int
) -> None:
    """Their slots from `start` to `end`, one request after the other."""
    pairs = zip(requests.tolist(), start.tolist(), end.tolist(), strict=True)
    found = torch.cat([req_to_token[request, a:b] for request, a, b in pairs])
    out[: found.numel()] = found.to(out.dtype)


def assign_draft_cache_locs_contiguous_cpu(
    requests: Tensor, req_to_token: Tensor, lengths: Tensor, out: Tensor, width: int, topk: int, steps: int
) -> None:
    """The slots of the drafts, which follow what each request has."""
    assign_extend_cache_locs_cpu(requests, req_to_token, lengths, lengths + topk * steps, out, width)


def build_draft_decode_metadata_cpu(
    req_to_token: Tensor, requests: Tensor, lengths: Tensor, topk: int, steps: int, width: int
) -> Tensor:
    """A chain's drafts already follow what the request has."""
    assert topk == 1
    return req_to_token[requests].clone()


def copy_all_layer_kv_cache_cpu(addresses: Tensor, row_bytes: Tensor, target: Tensor, source: Tensor) -> None:
    """Move rows within each buffer; all are read before one is written."""
    for address, size in zip(addresses.tolist(), row_bytes.tolist(), strict=True):
        rows = [ctypes.string_at(address + row * size, size) for row in source.tolist()]
        for row, data in zip(target.tolist(), rows, strict=True):
            ctypes.memmove(address + row * size, data, size)


# --- chains


def build_tree_kernel_efficient_cpu(
    parents: Tensor,
    selected: Tensor,
    lengths: Tensor,
    mask: Tensor,
    positions: Tensor,
    index: Tensor,
    next_token: Tensor,
    next_sibling: Tensor,
    topk: int,
    depth: int,
    width: int,
    mask_mode: int,
) -> None:
    """Each of `width` tokens follows the one before it; positions count on from the request's length."""
    assert (topk, mask_mode) == (1, 1)
    count, steps = lengths.numel(), torch.arange(width)
    positions.view(count, width).copy_(lengths[:, None] + steps)
    index.view(count, width).copy_(torch.arange(count)[:, None] * width + steps)
    following = steps + 1
    following[-1] = -1
    next_token.view(count, width).copy_(following.expand(count, width))
    chain = torch.ones(width, width, dtype=torch.bool).tril()
    mask[: count * width * width].view(count, width, width).copy_(chain.expand(count, width, width))


def verify_tree_greedy_cpu(
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    target_predict: Tensor,
) -> None:
    """Accept drafts while they are the target's own choice; then the target's choice is emitted."""
    width, predicted = candidates.shape[1], target_predict.flatten().tolist()
    for request, drafted in enumerate(candidates.tolist()):
        last = first = request * width
        accept_index[request, 0] = last
        accepted = 0
        while accepted + 1 < accept_index.shape[1] and drafted[accepted + 1] == predicted[last]:
            predicts[last] = predicted[last]
            accepted += 1
            last = first + accepted
            accept_index[request, accepted] = last
        predicts[last] = predicted[last]
        accept_token_num[request] = accepted


def fill_bonus_tokens_cpu(accepted: Tensor, lengths: Tensor, out: Tensor, stride: int) -> None:
    """The last token of each request's round."""
    out.copy_(accepted.flatten()[torch.arange(lengths.numel()) * stride + lengths.long() - 1])


def fill_accept_out_cache_loc_cpu(accept_index: Tensor, slots: Tensor, out: Tensor) -> None:
    """The slots of what was accepted, in order."""
    kept = accept_index.flatten()
    kept = kept[kept >= 0].long()
    out[: kept.numel()] = slots[kept]
