"""What a layer does to each element or row between its matrix products, each with a backward pass that keeps little.

torch's own compositions keep several tensors of the input's size for the backward pass; at K draft steps over thousands
of rows that is most of a training step's memory.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - its name everywhere
from torch import Tensor

from drafter.device import fused_on_cuda
from rl_hooks.format.eagle3 import Llama3Rope


class _RMSNorm(torch.autograd.Function):
    """Keeps x and one number per row for the backward pass; torch's own keeps several tensors of x's size on a CPU."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        inverse = torch.rsqrt(torch.linalg.vecdot(wide, wide)[..., None] / x.shape[-1] + eps)
        ctx.save_for_backward(x, weight, inverse)
        return (wide * inverse).to(x.dtype).mul_(weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, inverse = ctx.saved_tensors
        unit, grad_x = (x * inverse).to(x.dtype), None
        if ctx.needs_input_grad[0]:  # features and embeddings have no gradient
            slope = grads[0] * weight
            shared = torch.linalg.vecdot(slope, unit)[..., None] / x.shape[-1]
            grad_x = torch.addcmul(slope, unit, shared, value=-1).mul_(inverse.to(x.dtype))
        grad_weight = torch.linalg.vecdot(grads[0].flatten(0, -2), unit.flatten(0, -2), dim=0)
        return grad_x, grad_weight, None


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.rows = x.shape[0]
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (index,) = ctx.saved_tensors
        return grads[0].new_zeros(ctx.rows, *grads[0].shape[1:]).index_copy_(0, index, grads[0]), None


def take_rows(x: Tensor, index: Tensor) -> Tensor:
    """Rows x[index], of which none is asked for twice: the backward pass copies where torch's own would add."""
    out: Tensor = _Rows.apply(x, index)  # type: ignore[no-untyped-call]
    return out


@fused_on_cuda
def _swiglu(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


@fused_on_cuda
def _swiglu_slope(grad: Tensor, gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    slope = torch.empty_like(gate_up)
    by_gate, by_up = slope.chunk(2, dim=-1)
    by_up.copy_(F.silu(gate).mul_(grad))
    by_gate.copy_(torch.ops.aten.silu_backward(grad * up, gate))
    return slope


class _SwiGLU(torch.autograd.Function):
    """silu(gate) * up, keeping only its input."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        out: Tensor = _swiglu(gate_up)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return (_swiglu_slope(grads[0], *ctx.saved_tensors),)


@fused_on_cuda
def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    out = x * cos
    out[..., :half].addcmul_(x[..., half:], sin[..., :half], value=-1)
    out[..., half:].addcmul_(x[..., :half], sin[..., half:])
    return out


@fused_on_cuda
def _rotate_slope(grad: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = grad.shape[-1] // 2
    out = grad * cos
    out[..., :half].addcmul_(grad[..., half:], sin[..., half:])
    out[..., half:].addcmul_(grad[..., :half], sin[..., :half], value=-1)
    return out


class _Rotate(torch.autograd.Function):
    """(low, high) -> (low cos - high sin, high cos + low sin), keeping only cos and sin."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        out: Tensor = _rotate(x, cos, sin)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _rotate_slope(grads[0], *ctx.saved_tensors), None, None


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalise: x / rms(x) * weight over the last axis, in at least float32."""
    if x.is_cuda:  # one kernel there, which keeps as little
        return F.rms_norm(x, x.shape[-1:], weight, eps)
    out: Tensor = _RMSNorm.apply(x, weight, eps)  # type: ignore[no-untyped-call]
    return out


def rotary(
    positions: Tensor, head_dim: int, theta: float, dtype: torch.dtype, scaling: Llama3Rope | None = None
) -> tuple[Tensor, Tensor]:
    """cos, sin [..., 1, hd] for integer `positions` [...]: computed in at least float32, then rounded to `dtype`."""
    wide = torch.promote_types(dtype, torch.float32)
    exponent = torch.arange(0, head_dim, 2, device=positions.device, dtype=wide) / head_dim
    frequencies = theta**-exponent if scaling is None else stretched(1.0 / theta**exponent, scaling)
    angle = positions.to(wide)[..., None] * frequencies
    angle = torch.cat([angle, angle], dim=-1)[..., None, :]
    return angle.cos().to(dtype), angle.sin().to(dtype)


def stretched(frequencies: Tensor, scaling: Llama3Rope) -> Tensor:
    """Frequencies [hd/2] as Llama 3 stretches them, in the order of transformers' operations: the same bits."""
    waves, whole = 2 * math.pi / frequencies, scaling.original_max_position_embeddings
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    slow = torch.where(waves > whole / low, frequencies / scaling.factor, frequencies)
    share = (whole / waves - low) / (high - low)
    mixed = (1 - share) * slow / scaling.factor + share * slow
    return torch.where((waves < whole / high) | (waves > whole / low), slow, mixed)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary positions (the half-split layout of Llama) to x [..., heads, hd]."""
    out: Tensor = _Rotate.apply(x, cos, sin)  # type: ignore[no-untyped-call]
    return out


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up [.., I] of the two stacked along the last axis [.., 2I]."""
    out: Tensor = _SwiGLU.apply(gate_up)  # type: ignore[no-untyped-call]
    return out
