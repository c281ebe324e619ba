"""A dumb float64 MTP module: one row at a time, python loops, written from the formulas alone.

`weights` maps DeepSeek-V3's tensor names, without the layer's prefix, to float64 tensors. `c` is a transformers config.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def rms(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt((x * x).mean() + eps) * gain


def frequencies(c: Any) -> tuple[list[float], float, float]:
    """Per pair the angle a position turns it by; the factor on cos and sin; the factor on scores."""
    d, rope = c.qk_rope_head_dim, c.rope_parameters
    plain = [rope["rope_theta"] ** (-2 * i / d) for i in range(d // 2)]
    if rope["rope_type"] == "default":
        return plain, 1.0, 1.0

    def dimension(rotations: float) -> float:
        length = rope["original_max_position_embeddings"]
        return float(d * math.log(length / (rotations * 2 * math.pi)) / (2 * math.log(rope["rope_theta"])))

    def mscale(m: float) -> float:
        return 0.1 * m * math.log(rope["factor"]) + 1

    low = max(math.floor(dimension(rope["beta_fast"])), 0)
    high = min(math.ceil(dimension(rope["beta_slow"])), d - 1)
    turned = []
    for i, angle in enumerate(plain):
        share = min(max((i - low) / ((high - low) or 0.001), 0), 1)
        turned.append(angle * (1 - share) + angle / rope["factor"] * share)
    return turned, mscale(rope["mscale"]) / mscale(rope["mscale_all_dim"]), mscale(rope["mscale_all_dim"]) ** 2


def turn(x: Tensor, position: int, c: Any) -> Tensor:
    """Interleaved pairs: (0, 1), (2, 3), ..."""
    angles, factor, _ = frequencies(c)
    out = x.clone()
    for i, angle in enumerate(angles):
        cos, sin = math.cos(position * angle) * factor, math.sin(position * angle) * factor
        out[2 * i] = x[2 * i] * cos - x[2 * i + 1] * sin
        out[2 * i + 1] = x[2 * i + 1] * cos + x[2 * i] * sin
    return out


def swiglu(w: Mapping[str, Tensor], prefix: str, x: Tensor) -> Tensor:
    gate, up = w[prefix + "gate_proj.weight"] @ x, w[prefix + "up_proj.weight"] @ x
    return w[prefix + "down_proj.weight"] @ (gate / (1 + torch.exp(-gate)) * up)


def feed_forward(w: Mapping[str, Tensor], c: Any, x: Tensor) -> Tensor:
    if "mlp.gate.weight" not in w:
        return swiglu(w, "mlp.", x)
    scores = 1 / (1 + torch.exp(-(w["mlp.gate.weight"] @ x)))
    choice = scores + w["mlp.gate.e_score_correction_bias"]
    size = c.n_routed_experts // c.n_group
    worth = [sum(sorted(choice[g * size : (g + 1) * size].tolist())[-2:]) for g in range(c.n_group)]
    open_groups = sorted(range(c.n_group), key=lambda g: worth[g])[-c.topk_group :]
    allowed = [e for e in range(c.n_routed_experts) if e // size in open_groups]
    chosen = sorted(allowed, key=lambda e: float(choice[e].detach()))[-c.num_experts_per_tok :]
    total = sum(scores[e] for e in chosen) if c.norm_topk_prob else 1.0
    out = swiglu(w, "mlp.shared_experts.", x)
    for e in chosen:
        out = out + scores[e] / total * c.routed_scaling_factor * swiglu(w, f"mlp.experts.{e}.", x)
    return out


class Row:
    """One application of the module at one row and step; `r` is None-free: last_hidden, or the normed output before."""

    def __init__(self, w: Mapping[str, Tensor], c: Any, embedding: Tensor, r: Tensor, position: int) -> None:
        self.w, self.c = w, c
        eps, N, nope = c.rms_norm_eps, c.num_attention_heads, c.qk_nope_head_dim
        e, g = rms(embedding, w["enorm.weight"], eps), rms(r, w["hnorm.weight"], eps)
        self.h = w["eh_proj.weight"] @ torch.cat([e, g])
        x = rms(self.h, w["input_layernorm.weight"], eps)
        if c.q_lora_rank is None:
            q = w["self_attn.q_proj.weight"] @ x
        else:
            q = w["self_attn.q_a_proj.weight"] @ x
            q = w["self_attn.q_b_proj.weight"] @ rms(q, w["self_attn.q_a_layernorm.weight"], eps)
        kv = w["self_attn.kv_a_proj_with_mqa.weight"] @ x
        latent = rms(kv[: c.kv_lora_rank], w["self_attn.kv_a_layernorm.weight"], eps)
        expanded = (w["self_attn.kv_b_proj.weight"] @ latent).view(N, nope + c.v_head_dim)
        rotated = turn(kv[c.kv_lora_rank :], position, c)
        self.q = [torch.cat([head[:nope], turn(head[nope:], position, c)]) for head in q.view(N, -1)]
        self.k = [torch.cat([head[:nope], rotated]) for head in expanded]
        self.v = [head[nope:] for head in expanded]

    def pre(self, visible: list[Row]) -> Tensor:
        w, c = self.w, self.c
        scale = frequencies(c)[2] / math.sqrt(c.qk_nope_head_dim + c.qk_rope_head_dim)
        heads = []
        for n in range(c.num_attention_heads):
            scores = torch.stack([self.q[n] @ other.k[n] for other in visible]) * scale
            p = torch.exp(scores) / torch.exp(scores).sum()
            heads.append(sum(p[i] * other.v[n] for i, other in enumerate(visible)))
        h1 = self.h + w["self_attn.o_proj.weight"] @ torch.cat(heads)
        return h1 + feed_forward(w, c, rms(h1, w["post_attention_layernorm.weight"], c.rms_norm_eps))


def reference_pres(
    w: Mapping[str, Tensor],
    c: Any,
    embed: Tensor,
    ids: list[int],
    last_hidden: Tensor,
    steps: int,
    zero_first: bool,
    normed: bool = True,
) -> dict[tuple[int, int], Tensor]:
    """`pre` of every (row, step) of one document whose drafted token lies in it."""
    n = len(ids)
    first = [
        Row(w, c, embed[ids[t + 1]] * (0.0 if zero_first and t == 0 else 1.0), last_hidden[t], t) for t in range(n - 1)
    ]
    out: dict[tuple[int, int], Tensor] = {}
    for t in range(n - 2):
        here, own = first[t], []
        for j in range(steps):
            if t + 2 + j >= n:
                break
            if j:
                r = out[t, j - 1]
                if normed:
                    r = rms(r, w["shared_head.norm.weight"], c.rms_norm_eps)
                here = Row(w, c, embed[ids[t + 1 + j]], r, t + j)
                own.append(here)
            out[t, j] = here.pre(first[: t + 1] + own)
    return out
