"""A second, deliberately dumb implementation of the drafter's formulas: float64, one row of one document at a time.

Written from the formulas alone and sharing no code with `drafter/`: explicit softmax, python loops, no packing, no
fusing, nothing compacted. Slow and obvious is the point. `weights` maps canonical checkpoint names to tensors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass
class StepResult:
    """Sums over one step's supervised rows, and the logits of each row (by its index in the packed batch)."""

    kl: Tensor
    acceptance: float
    rows: list[int]
    logits: list[Tensor]


def rms(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt((x * x).mean() + eps) * gain


def frequency(pair: int, width: int, theta: float, stretch: Any) -> float:
    """By how much a pair turns per position. Llama 3 slows down those that turn seldom over the original length."""
    plain = float(theta ** (-2 * pair / width))
    if stretch is None:
        return plain
    turns = stretch.original_max_position_embeddings * plain / (2 * math.pi)
    share = (turns - stretch.low_freq_factor) / (stretch.high_freq_factor - stretch.low_freq_factor)
    share = min(max(share, 0.0), 1.0)
    return float(share * plain + (1 - share) * plain / stretch.factor)


def turn(x: Tensor, position: int, theta: float, stretch: Any = None) -> Tensor:
    """Rotary position of one head vector, half-split: pair (i, i + hd/2) turns by position * `frequency`."""
    half = x.shape[0] // 2
    out: list[Tensor] = [x[0]] * (2 * half)
    for i in range(half):
        angle = position * frequency(i, x.shape[0], theta, stretch)
        c, s = math.cos(angle), math.sin(angle)
        out[i] = x[i] * c - x[i + half] * s
        out[i + half] = x[i + half] * c + x[i] * s
    return torch.stack(out)


class Row:
    """One application of the layer at one row and step."""

    def __init__(self, weights: Mapping[str, Tensor], config: Any, embedding: Tensor, r: Tensor, position: int) -> None:
        self.w, self.c, self.r = weights, config, r
        layer, hd = "midlayer.", config.head_dim
        x = torch.cat(
            [
                rms(embedding, weights[layer + "input_layernorm.weight"], config.rms_norm_eps),
                rms(r, weights[layer + "hidden_norm.weight"], config.rms_norm_eps),
            ]
        )
        q, k, v = (weights[f"{layer}self_attn.{n}_proj.weight"] @ x for n in "qkv")
        theta, stretch = config.rope_theta, config.rope_scaling
        self.q = [turn(q[h * hd : (h + 1) * hd], position, theta, stretch) for h in range(config.num_attention_heads)]
        self.k = [turn(k[h * hd : (h + 1) * hd], position, theta, stretch) for h in range(config.num_key_value_heads)]
        self.v = [v[h * hd : (h + 1) * hd] for h in range(config.num_key_value_heads)]

    def pre(self, visible: list[Row]) -> Tensor:
        """The layer's un-normed output when this row attends to the keys of `visible`."""
        c, w = self.c, self.w
        heads = []
        for h in range(c.num_attention_heads):
            g = h // (c.num_attention_heads // c.num_key_value_heads)
            scores = torch.stack([self.q[h] @ other.k[g] for other in visible]) / math.sqrt(c.head_dim)
            p = torch.exp(scores) / torch.exp(scores).sum()
            heads.append(sum(p[i] * other.v[g] for i, other in enumerate(visible)))
        h1 = self.r + w["midlayer.self_attn.o_proj.weight"] @ torch.cat(heads)
        x = rms(h1, w["midlayer.post_attention_layernorm.weight"], c.rms_norm_eps)
        gate = w["midlayer.mlp.gate_proj.weight"] @ x
        up = w["midlayer.mlp.up_proj.weight"] @ x
        return h1 + w["midlayer.mlp.down_proj.weight"] @ (gate / (1 + torch.exp(-gate)) * up)


def reference_steps(
    weights: Mapping[str, Tensor],
    config: Any,
    embed_tokens: Tensor,
    draft_ids: list[int],
    documents: list[Any],
    steps: int,
    target_head: Tensor,
    temperature: float,
) -> list[StepResult]:
    """Per step: sum of sum_v p log(p / (m q)) and of sum_v min(p, q) over supervised rows.

    Each document has input_ids, loss_mask, aux_hidden, last_hidden, all float64 or integers; p = softmax over the whole
    vocabulary of target_head @ last_hidden / temperature, then restricted to the draft ids; m its mass there.
    """
    zero = next(iter(weights.values())).new_zeros(())
    results = [StepResult(zero, 0.0, [], []) for _ in range(steps)]
    start = 0
    for doc in documents:
        ids, mask = doc.input_ids.tolist(), doc.loss_mask.tolist()
        n = len(ids)
        features = list(doc.aux_hidden)
        if "input_norm.weight" in weights:
            features = [rms(x, weights["input_norm.weight"], config.rms_norm_eps) for x in features]
        first = [
            Row(weights, config, embed_tokens[ids[t + 1]], weights["fc.weight"] @ features[t], t) for t in range(n - 1)
        ]
        for t in range(n - 2):
            here, own, pre = first[t], [], zero
            for j in range(steps):
                if t + 2 + j >= n:
                    break
                if j > 0:
                    here = Row(weights, config, embed_tokens[ids[t + 1 + j]], pre, t + j)
                    own.append(here)
                pre = here.pre(first[: t + 1] + own)
                if not mask[t + 2 + j]:
                    continue
                z = weights["lm_head.weight"] @ rms(pre, weights["norm.weight"], config.rms_norm_eps)
                score(results[j], z, target_head @ doc.last_hidden[t + 1 + j], draft_ids, temperature)
                results[j].rows.append(start + t)
                results[j].logits.append(z.detach())
        start += n
    return results


def score(result: StepResult, z: Tensor, target_logits: Tensor, draft_ids: list[int], temperature: float) -> None:
    q = torch.exp(z / temperature)
    q = q / q.sum()
    p = torch.exp(target_logits / temperature)
    p = (p / p.sum())[draft_ids]
    mass = p.sum()
    result.kl = result.kl + (p * torch.log(p / (mass * q))).sum()
    result.acceptance += float(torch.minimum(p, q).sum().detach())
