"""Matrix products for the training step: torch's own, or oneDNN's where that is faster on a CPU.

torch hands float32 products on a CPU to MKL, which leaves AVX-512 unused on processors that are not Intel's: oneDNN's
kernels run at twice the rate there (measured: 224 against 100 GFLOP/s on one core of an AMD EPYC), in the same
arithmetic, float32 throughout. Everything else (other types, other devices, small products) goes to torch.

oneDNN compiles code for each shape. It and the layer between it and torch (ideep) keep 1,024 each, some 0.6 MiB
a shape: with many lengths about 1 GiB. Nearly every window has shapes of its own, so few are kept here. Importing this
sets it for the whole process and its children. Where more shapes repeat, small products take six times as long.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - its name everywhere
from torch import Tensor
from torch.autograd.function import once_differentiable

#: Multiplications below which the longer way to oneDNN costs more than its kernel saves.
_LEAST_WORK = 1 << 20

# Both are read at the first product. Not 0: ideep crashes then.
for _cache in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
    os.environ.setdefault(_cache, "64")


def _find() -> Any:
    """Fetch the operator that torch's own compiler emits for linear layers on a CPU; None in builds without oneDNN."""
    available = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return getattr(torch.ops.mkldnn, "_linear_pointwise", None) if available else None


_ONEDNN = _find()


def _fits(a: Tensor, b: Tensor) -> bool:
    return (
        _ONEDNN is not None
        and a.dtype is torch.float32
        and b.dtype is torch.float32
        and a.device.type == "cpu"
        and a.numel() * b.shape[0] >= _LEAST_WORK
    )


def times(a: Tensor, b: Tensor) -> Tensor:
    """Product of a [n, k] and the transpose of b [m, k]: [n, m]. No gradients."""
    if not _fits(a, b):
        return a @ b.t()
    if not (b.is_contiguous() or b.t().is_contiguous()):
        b = b.contiguous()  # with gaps between rows oneDNN falls back to a loop, a thousand times slower
    result: Tensor = _ONEDNN(a, b, None, "none", [], "")
    return result


def times_wide(a: Tensor, b: Tensor) -> Tensor:
    """`times` in at least float32: half-precision operands keep the float32 sums of a GPU's matrix units."""
    wide = torch.promote_types(a.dtype, torch.float32)
    if a.dtype is not wide and a.device.type in ("cuda", "meta"):  # CPUs have no such product
        return torch.mm(a, b.t(), out_dtype=wide)
    return times(a, b).to(wide)


def add_times_wide(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add `times_wide(a, b)` to `total`.

    A GPU adds while it multiplies: a sum after the product would take a third of the product's time.
    """
    if a.dtype is not total.dtype and a.device.type in ("cuda", "meta"):
        torch.addmm(total, a, b.t(), out_dtype=total.dtype, out=total)
    else:
        total += times_wide(a, b)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return times(x, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        grad_x = times(grad, weight.t()) if ctx.needs_input_grad[0] else None
        grad_weight = times(grad.t(), x.t()) if ctx.needs_input_grad[1] else None
        return grad_x, grad_weight


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """Product of x [.., k] and the transpose of weight [m, k]: [.., m], with gradients for both."""
    if not _fits(x, weight):
        return F.linear(x, weight)
    out: Tensor = _Linear.apply(x.flatten(0, -2), weight)  # type: ignore[no-untyped-call]
    return out.view(*x.shape[:-1], -1)
