"""An EAGLE-3 drafter's layers with a key-value cache: what a decoder computes, in place of `Eagle3Drafter.unroll`.

Legend: B sequences, L new positions, S cached ones, A aux layers, H hidden, Ht the target's hidden size, V target
vocabulary, N query heads, G key-value heads, hd head size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F  # noqa: N812 - its name everywhere
from torch import Tensor

from drafter.model.eagle3 import Eagle3Drafter
from drafter.model.eagle3_layer import LayerWeights, finish
from drafter.model.pointwise import rms_norm, rotary, rotate


def embed(drafter: Eagle3Drafter, tokens: Tensor, embed_tokens: Tensor) -> Tensor:
    """Embeddings [.., H] of target token ids [..] by the policy's embed_tokens [V, H], in the parameters' dtype."""
    return F.embedding(tokens, embed_tokens).to(drafter.fc.weight.dtype)


def fuse(drafter: Eagle3Drafter, aux: Tensor) -> Tensor:
    """Compute r [.., H] from the target's features aux [.., A*Ht]."""
    aux = aux.to(drafter.fc.weight.dtype)
    if drafter.input_norm is not None:
        aux = rms_norm(aux, drafter.input_norm.weight, drafter.config.rms_norm_eps)
    return F.linear(aux, drafter.fc.weight)


def attend(
    drafter: Eagle3Drafter,
    embedding: Tensor,
    r: Tensor,
    positions: Tensor,
    past_k: Tensor | None = None,
    past_v: Tensor | None = None,
    mask: Tensor | None = None,
    weights: LayerWeights | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """One pass over B sequences of L new positions, with a cache of S earlier ones.

    embedding, r [B, L, H]; positions int64[B, L], of the rotary embedding.
    past_k, past_v [B, G, S, hd], rotated already. With several layers G is `cache_heads`: all layers' in turn.
    mask bool[B, L, S+L]: True where a query may look, at one key or more. Default: the cache, and causal after it.
    Returns pre [B, L, H] and the new keys and values [B, G, L, hd] to append.
    """
    c, w = drafter.config, weights if weights is not None else drafter.weights()
    L = r.shape[1]
    if mask is None:
        S = 0 if past_k is None else past_k.shape[2]
        mask = torch.ones(L, S + L, dtype=torch.bool, device=r.device).tril(S).expand(r.shape[0], L, S + L)
    turn = rotary(positions, c.head_dim, c.rope_theta, r.dtype, c.rope_scaling)
    layers = c.num_hidden_layers
    earlier = zip(_by_layer(past_k, layers), _by_layer(past_v, layers), strict=True)
    normed = rms_norm(r, w.hidden_norm, c.rms_norm_eps)
    x = torch.cat([rms_norm(embedding, w.input_norm, c.rms_norm_eps), normed], dim=-1)
    attended, k, v = _attended(drafter, F.linear(x, w.qkv), turn, next(earlier), mask)
    pre = finish(normed if c.norm_before_residual else r, attended, w, c.rms_norm_eps)
    keys, values = [k], [v]
    for layer, past in zip(w.later, earlier, strict=True):
        x = rms_norm(pre, layer.input_norm, c.rms_norm_eps)
        attended, k, v = _attended(drafter, F.linear(x, layer.qkv), turn, past, mask)
        pre = finish(pre, attended, layer, c.rms_norm_eps)
        keys.append(k)
        values.append(v)
    return (pre, k, v) if layers == 1 else (pre, torch.cat(keys, dim=1), torch.cat(values, dim=1))


def cache_heads(drafter: Eagle3Drafter) -> int:
    """Key-value heads of a cache, those of all layers."""
    return drafter.config.num_hidden_layers * drafter.config.num_key_value_heads


def _attended(
    drafter: Eagle3Drafter,
    qkv: Tensor,
    turn: tuple[Tensor, Tensor],
    past: tuple[Tensor | None, Tensor | None],
    mask: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Attention output [B, L, N*hd], and the new keys and values [B, G, L, hd], of one layer's projections."""
    heads, kv_heads = drafter.config.num_attention_heads, drafter.config.num_key_value_heads
    together = qkv.view(*qkv.shape[:-1], heads + 2 * kv_heads, drafter.config.head_dim)
    q, k, v = torch.split(together, [heads, kv_heads, kv_heads], dim=-2)
    q, k, v = rotate(q, *turn).transpose(1, 2), rotate(k, *turn).transpose(1, 2), v.transpose(1, 2)
    keys = k if past[0] is None else torch.cat([past[0], k], dim=2)
    values = v if past[1] is None else torch.cat([past[1], v], dim=2)
    out = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask[:, None], enable_gqa=True)
    return out.transpose(1, 2).flatten(2), k, v


def _by_layer(past: Tensor | None, layers: int) -> Sequence[Tensor | None]:
    """A cache [B, layers*G, S, hd], layer by layer."""
    return [None] * layers if past is None else past.chunk(layers, dim=1)
