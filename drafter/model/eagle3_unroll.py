"""EAGLE-3's test-time-training unroll: K draft steps on the true path, over packed ragged documents, exact and lean.

Step 0 at row t reads token x[t+1] and the target's features of row t, and predicts x[t+2]. Step j reads x[t+1+j] and
the un-normed `pre` of the step before, predicts x[t+2+j], and attends to the step-0 keys of rows <= t of its document
and to its own row's keys of steps 1..j. Rotary position: t+j, counted from the document's start. Which rows are
computed at which step: `drafter.unroll.plan`. The embedding halves of the query, key and value projections do not
depend on the step, so they are computed once per position and read shifted.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
import torch.nn.functional as F  # noqa: N812 - its name everywhere
from torch import Tensor

from drafter.errors import DrafterError
from drafter.model.eagle3_layer import LaterWeights, Layers, finish
from drafter.model.matmul import linear
from drafter.model.pointwise import rms_norm, rotary, rotate, take_rows
from drafter.unroll.attention import attend, gather_keys
from drafter.unroll.plan import Plan
from drafter.unroll.unrolled import Unrolled
from rl_hooks.format.eagle3 import DrafterConfig


def unroll(
    drafter: Layers,
    plan: Plan,
    input_ids: Tensor,
    aux_hidden: Tensor,
    embed_tokens: Tensor,
    *,
    dtype: torch.dtype | None = None,
) -> Unrolled:
    """`Eagle3Drafter.unroll` over input_ids int64[T], aux_hidden [T, A*Ht] and the policy's embed_tokens [V, H]."""
    config, weights = drafter.config, drafter.weights(dtype)
    _check(config, weights.fc.shape[1], plan, input_ids, aux_hidden)
    hd, heads, kv_heads = config.head_dim, config.num_attention_heads, config.num_key_value_heads
    eps, cast, half = config.rms_norm_eps, weights.fc.dtype, config.hidden_size
    split = heads * hd
    if not plan.computed[0]:
        empty = weights.fc.new_zeros(0, half)
        return Unrolled(plan, plan.rows, tuple(empty for _ in range(plan.steps)), weights)

    tokens = input_ids.index_select(0, plan.read_rows)
    embedded = rms_norm(F.embedding(tokens, embed_tokens).to(cast), weights.input_norm, eps)
    by_token, by_state = weights.qkv[:, :half].contiguous(), weights.qkv[:, half:].contiguous()
    embedded_q = linear(embedded[: plan.computed[0]], by_token[:split])
    embedded_kv = linear(embedded, by_token[split:])

    def project_qkv(x: Tensor, step: int) -> Tensor:
        read = plan.read_index[step][: x.shape[0]]
        shared = torch.cat([take_rows(embedded_q, read), take_rows(embedded_kv, read)], dim=-1)
        return linear(x, by_state) + shared

    features = aux_hidden.index_select(0, plan.kv_rows).to(cast)
    if weights.feature_norm is not None:
        features = rms_norm(features, weights.feature_norm, eps)
    r = linear(features, weights.fc)
    x = rms_norm(r, weights.hidden_norm, eps)
    n = plan.computed[0]
    qkv = project_qkv(x[:n], 0)
    kv = qkv[:, split:]
    if n < x.shape[0]:  # context rows: keys and values only
        context_kv = linear(x[n:], by_state[split:]) + take_rows(embedded_kv, plan.read_index[0][n:])
        kv = torch.cat([kv, context_kv])
    k, v = kv.view(-1, 2 * kv_heads, hd).chunk(2, dim=1)
    turns = functools.partial(rotary, head_dim=hd, theta=config.rope_theta, dtype=cast, scaling=config.rope_scaling)
    cos, sin = turns(plan.positions)
    keys = gather_keys(plan, rotate(k, cos, sin), v)

    later = [_Later(config, layer, plan) for layer in weights.later]
    r = r[:n]
    pres: list[Tensor] = []
    diagonal: list[tuple[Tensor, Tensor]] = []
    for step, n in enumerate(plan.computed):
        if not n:  # no response reaches this deep
            pres.append(r[:0])
            continue
        if step:
            r = r[:n]
            x = rms_norm(r, weights.hidden_norm, eps)
            qkv = project_qkv(x, step)
        turn = turns(plan.positions[:n] + step) if step else (cos[:n], sin[:n])
        if step:
            turned, v = torch.split(qkv.view(n, -1, hd), [heads + kv_heads, kv_heads], dim=1)
            q, k = torch.split(rotate(turned, *turn), [heads, kv_heads], dim=1)
            diagonal = [(old_k[:n], old_v[:n]) for old_k, old_v in diagonal]
            diagonal.append((k, v))
        else:
            q = rotate(qkv[:, :split].view(n, heads, hd), *turn)
        attended = attend(plan, step, q, keys, diagonal)
        r = finish(x[:n] if config.norm_before_residual else r, attended.flatten(1), weights, eps)
        for layer in later:
            r = layer.run(step, r, turn)
        chosen = plan.active[step]
        pres.append(r if chosen is None else take_rows(r, chosen))
    return Unrolled(plan, plan.rows, tuple(pres), weights)


class _Later:
    """A layer after the first, over the steps of one unroll: its own step-0 keys, its own diagonal."""

    def __init__(self, config: DrafterConfig, weights: LaterWeights, plan: Plan) -> None:
        self._config, self._weights, self._plan = config, weights, plan
        self._keys: Sequence[Tensor] = ()
        self._diagonal: list[tuple[Tensor, Tensor]] = []

    def run(self, step: int, r: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
        """Compute the layer's `pre` [n, H] from that of the one before; `turn` is cos and sin of the positions."""
        n, config, weights = r.shape[0], self._config, self._weights
        sizes = [config.num_attention_heads + config.num_key_value_heads, config.num_key_value_heads]
        qkv = linear(rms_norm(r, weights.input_norm, config.rms_norm_eps), weights.qkv)
        turned, v = torch.split(qkv.view(n, -1, config.head_dim), sizes, dim=1)
        q, k = torch.split(rotate(turned, *turn), [config.num_attention_heads, config.num_key_value_heads], dim=1)
        if step:
            self._diagonal = [(old_k[:n], old_v[:n]) for old_k, old_v in self._diagonal]
            self._diagonal.append((k, v))
        else:
            self._keys = gather_keys(self._plan, k, v)
        attended = attend(self._plan, step, q, self._keys, self._diagonal)
        return finish(r, attended.flatten(1), weights, config.rms_norm_eps)


def _check(config: DrafterConfig, width: int, plan: Plan, input_ids: Tensor, aux_hidden: Tensor) -> None:
    if input_ids.shape != (plan.tokens,):
        raise DrafterError(f"the plan is for {plan.tokens} tokens, input_ids has shape {tuple(input_ids.shape)}")
    if config.num_hidden_layers > 1 and plan.computed[0] != plan.kv_rows.numel():
        raise DrafterError("a drafter of several layers needs a plan of every row: `drafter.plan` makes it")
    if aux_hidden.shape != (plan.tokens, width):
        raise DrafterError(
            f"aux_hidden must be ({plan.tokens}, {width}) for aux layers {config.aux_layers}, "
            f"got {tuple(aux_hidden.shape)}"
        )
