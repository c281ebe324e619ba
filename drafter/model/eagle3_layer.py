"""The weights of EAGLE-3's layers as unroll and decoding read them, and what follows the attention in each layer."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from drafter.model.matmul import linear
from drafter.model.pointwise import rms_norm, swiglu
from rl_hooks.format.eagle3 import DrafterConfig


class LaterWeights(NamedTuple):
    """A plain layer's weights in the dtype to compute in, projections that read the same input stacked."""

    input_norm: Tensor  # [H]
    qkv: Tensor  # [(N+2G)*hd, H]
    o: Tensor  # [H, N*hd]
    post_norm: Tensor  # [H]
    gate_up: Tensor  # [2I, H]
    down: Tensor  # [H, I]


class LayerWeights(NamedTuple):
    """The weights in the dtype to compute in, projections that read the same input stacked into one matrix."""

    fc: Tensor  # [H, A*Ht]
    hidden_norm: Tensor  # [H]
    input_norm: Tensor  # [H]
    qkv: Tensor  # [(N+2G)*hd, 2H], columns: embedding half, then hidden half
    o: Tensor  # [H, N*hd]
    post_norm: Tensor  # [H]
    gate_up: Tensor  # [2I, H]
    down: Tensor  # [H, I]
    norm: Tensor  # [H]
    lm_head: Tensor  # [D, H]
    later: tuple[LaterWeights, ...] = ()  # layers after the first
    feature_norm: Tensor | None = None  # [A*Ht], of the features before fc


class Layers(Protocol):
    """What the unroll needs of a drafter."""

    config: DrafterConfig

    def weights(self, dtype: torch.dtype | None = None) -> LayerWeights:
        """The weights in `dtype` (default: as stored); gradients flow."""


def finish(r: Tensor, attended: Tensor, weights: LayerWeights | LaterWeights, eps: float) -> Tensor:
    """Compute a layer's `pre` [.., H] from the residual r [.., H] and the attention output [.., N*hd]."""
    h1 = r + linear(attended, weights.o)
    gate_up = linear(rms_norm(h1, weights.post_norm, eps), weights.gate_up)
    return h1 + linear(swiglu(gate_up), weights.down)
