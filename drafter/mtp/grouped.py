"""Grouped-query attention of an MTP module, as GLM-4.5 defines it: biases and head norms by choice, partial rotation.

Parameter names are the published ones. The kernel is the caller's, as in `drafter.mtp.latent`.

Legend: n rows, N query heads, G key-value heads, hd head width, H hidden.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 - its name everywhere
from torch import Tensor, nn

from drafter.model.pointwise import rms_norm, rotary, rotate
from rl_hooks.format.mtp import GroupedSizes


class GroupedWeights(NamedTuple):
    """The attention's weights in the dtype to compute in."""

    q: tuple[Tensor, Tensor | None]  # [N*hd, H], [N*hd]
    k: tuple[Tensor, Tensor | None]  # [G*hd, H], [G*hd]
    v: tuple[Tensor, Tensor | None]
    q_norm: Tensor | None  # [hd]
    k_norm: Tensor | None
    o: Tensor  # [H, N*hd]


class GroupedAttention(nn.Module):
    """Projections into and out of the attention kernel, which is the caller's."""

    def __init__(self, sizes: GroupedSizes, eps: float) -> None:
        super().__init__()
        self.sizes, self.eps = sizes, eps
        H, hd = sizes.hidden_size, sizes.head_dim
        self.q_proj = nn.Linear(H, sizes.heads * hd, bias=sizes.bias)
        self.k_proj = nn.Linear(H, sizes.kv_heads * hd, bias=sizes.bias)
        self.v_proj = nn.Linear(H, sizes.kv_heads * hd, bias=sizes.bias)
        self.o_proj = nn.Linear(sizes.heads * hd, H, bias=False)
        if sizes.head_norms:
            self.q_norm = nn.RMSNorm(hd, eps)
            self.k_norm = nn.RMSNorm(hd, eps)

    def weights(self, dtype: torch.dtype) -> GroupedWeights:
        """Cast once for many uses; gradients flow."""

        def cast(projection: nn.Linear) -> tuple[Tensor, Tensor | None]:
            bias: Tensor | None = projection.bias
            return projection.weight.to(dtype), None if bias is None else bias.to(dtype)

        normed = self.sizes.head_norms
        return GroupedWeights(
            q=cast(self.q_proj),
            k=cast(self.k_proj),
            v=cast(self.v_proj),
            q_norm=self.q_norm.weight.to(dtype) if normed else None,
            k_norm=self.k_norm.weight.to(dtype) if normed else None,
            o=self.o_proj.weight.to(dtype),
        )

    def queries(self, x: Tensor, positions: Tensor, weights: GroupedWeights) -> Tensor:
        """Queries [n, N, hd] of x [n, H], rotated."""
        return self._turned(F.linear(x, *weights.q), weights.q_norm, positions)

    def keys_values(self, x: Tensor, positions: Tensor, weights: GroupedWeights) -> tuple[Tensor, Tensor]:
        """Keys, rotated, and values, both [n, G, hd], of x [n, H]."""
        k = self._turned(F.linear(x, *weights.k), weights.k_norm, positions)
        return k, F.linear(x, *weights.v).view_as(k)

    def merge(self, attended: Tensor, weights: GroupedWeights) -> Tensor:
        """[n, H] from the kernel's output [n, N, hd]."""
        return F.linear(attended.flatten(1), weights.o)

    def _turned(self, x: Tensor, norm: Tensor | None, positions: Tensor) -> Tensor:
        s = self.sizes
        x = x.view(x.shape[0], -1, s.head_dim)
        if norm is not None:
            x = rms_norm(x, norm, self.eps)
        turned = rotate(x[..., : s.rotary], *rotary(positions, s.rotary, s.rope_theta, x.dtype))
        return torch.cat([turned, x[..., s.rotary :]], dim=-1)
