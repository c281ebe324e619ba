"""Multi-head latent attention and its rotary positions, as DeepSeek-V3 defines them, with keys and values expanded.

    q        = q_b(norm(q_a(x)))                or q_proj(x)
    c, k_rot = split(kv_a(x));  k, v = split(kv_b(norm(c)))     k_rot is shared by all heads
    scores   = (q_nope . k_nope + rope(q_rot) . rope(k_rot)) * scale

Parameter names are the published ones. Heads leave here with values padded to the width of keys, because the fused
kernel wants one width; `merge` cuts the padding off again.

Legend: n rows, N heads, H hidden, nope/rope/v widths per head, hd = nope + rope.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 - its name everywhere
from torch import Tensor, nn

from drafter.model.pointwise import rms_norm
from rl_hooks.format.mtp import LatentSizes, Yarn


class LatentWeights(NamedTuple):
    """The attention's weights in the dtype to compute in."""

    q_a: Tensor | None  # [q_rank, H]
    q_norm: Tensor | None  # [q_rank]
    q_b: Tensor  # [N*hd, q_rank or H]
    kv_a: Tensor  # [kv_rank + rope, H]
    kv_norm: Tensor  # [kv_rank]
    kv_b: Tensor  # [N*(nope+v), kv_rank]
    o: Tensor  # [H, N*v]


class LatentAttention(nn.Module):
    """Projections into and out of the attention kernel, which is the caller's."""

    def __init__(self, sizes: LatentSizes, eps: float) -> None:
        super().__init__()
        self.sizes, self.eps = sizes, eps
        H, N = sizes.hidden_size, sizes.heads
        self.q_proj: nn.Linear | None = None
        if sizes.q_rank is None:
            self.q_proj = nn.Linear(H, N * sizes.width, bias=False)
        else:
            self.q_a_proj = nn.Linear(H, sizes.q_rank, bias=False)
            self.q_a_layernorm = nn.RMSNorm(sizes.q_rank, eps)
            self.q_b_proj = nn.Linear(sizes.q_rank, N * sizes.width, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(H, sizes.kv_rank + sizes.rope, bias=False)
        self.kv_a_layernorm = nn.RMSNorm(sizes.kv_rank, eps)
        self.kv_b_proj = nn.Linear(sizes.kv_rank, N * (sizes.nope + sizes.value), bias=False)
        self.o_proj = nn.Linear(N * sizes.value, H, bias=False)

    def weights(self, dtype: torch.dtype) -> LatentWeights:
        """Cast once for many uses; gradients flow."""
        ranked = self.q_proj is None
        query = self.q_b_proj if self.q_proj is None else self.q_proj
        return LatentWeights(
            q_a=self.q_a_proj.weight.to(dtype) if ranked else None,
            q_norm=self.q_a_layernorm.weight.to(dtype) if ranked else None,
            q_b=query.weight.to(dtype),
            kv_a=self.kv_a_proj_with_mqa.weight.to(dtype),
            kv_norm=self.kv_a_layernorm.weight.to(dtype),
            kv_b=self.kv_b_proj.weight.to(dtype),
            o=self.o_proj.weight.to(dtype),
        )

    def queries(self, x: Tensor, positions: Tensor, weights: LatentWeights) -> Tensor:
        """Queries [n, N, hd] of x [n, H], rotated, with YaRN's share of the softmax scale multiplied in."""
        s = self.sizes
        if weights.q_a is not None and weights.q_norm is not None:
            x = rms_norm(F.linear(x, weights.q_a), weights.q_norm, self.eps)
        q = F.linear(x, weights.q_b).view(-1, s.heads, s.width)
        nope, rope = torch.split(q, [s.nope, s.rope], dim=-1)
        q = torch.cat([nope, self._rotate(rope, positions)], dim=-1)
        return q if s.yarn is None else q * s.yarn.softmax_scale

    def keys_values(self, x: Tensor, positions: Tensor, weights: LatentWeights) -> tuple[Tensor, Tensor]:
        """Keys, rotated, and values padded with zeros, both [n, N, hd], of x [n, H]."""
        s = self.sizes
        latent, rope = torch.split(F.linear(x, weights.kv_a), [s.kv_rank, s.rope], dim=-1)
        latent = rms_norm(latent, weights.kv_norm, self.eps)
        expanded = F.linear(latent, weights.kv_b).view(-1, s.heads, s.nope + s.value)
        nope, v = torch.split(expanded, [s.nope, s.value], dim=-1)
        rope = self._rotate(rope[:, None], positions).expand(-1, s.heads, -1)
        return torch.cat([nope, rope], dim=-1), F.pad(v, (0, s.width - s.value))

    def merge(self, attended: Tensor, weights: LatentWeights) -> Tensor:
        """[n, H] from the kernel's output [n, N, hd]."""
        return F.linear(attended[..., : self.sizes.value].flatten(1), weights.o)

    def _rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """Turn x [n, heads, rope]; interleaved pairs come out half-split, queries and keys alike."""
        s = self.sizes
        wide = torch.promote_types(x.dtype, torch.float32)
        exponent = torch.arange(0, s.rope, 2, device=x.device, dtype=wide) / s.rope
        frequencies = s.rope_theta**-exponent
        scale = 1.0
        if s.yarn is not None:
            frequencies, scale = _stretched(s.yarn, frequencies, s.rope_theta), s.yarn.rotary_scale
        angle = (positions.to(wide)[:, None] * frequencies)[:, None, :]
        cos, sin = (angle.cos() * scale).to(x.dtype), (angle.sin() * scale).to(x.dtype)
        low, high = (x[..., 0::2], x[..., 1::2]) if s.interleaved else x.chunk(2, dim=-1)
        return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1)


def _stretched(yarn: Yarn, plain: Tensor, theta: float) -> Tensor:
    """Blend `plain` (extrapolation) with `plain / factor` (interpolation) over a ramp of dimensions."""
    dim = 2 * plain.numel()

    def dimension(rotations: float) -> float:
        turns = yarn.original_max_position_embeddings / (rotations * 2 * math.pi)
        return dim * math.log(turns) / (2 * math.log(theta))

    low = max(math.floor(dimension(yarn.beta_fast)), 0)
    high = min(math.ceil(dimension(yarn.beta_slow)), dim - 1)
    index = torch.arange(plain.numel(), device=plain.device, dtype=plain.dtype)
    ramp = ((index - low) / (high - low if high != low else 0.001)).clamp(0, 1)
    return plain * (1 - ramp) + plain / yarn.factor * ramp
