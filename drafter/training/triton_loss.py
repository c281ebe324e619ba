"""What the loss does element by element, as Triton kernels: one program per row, few passes over device memory.

Twins of the torch code in `drafter.training.loss`, which states the formulas and is what they are tested against.
`measure` reads a row of logits twice, both times from device memory. The L2 cache serves the second read only where all
rows in flight fit: at 32 000 draft tokens a row is 125 KiB, so four programs on each of an H100's 132 multiprocessors
hold 64 MiB, and the cache has 50 MiB. Needs Triton: `drafter.training.loss` asks for it on CUDA only.

Compiled once per dtype and kind of draft vocabulary (a multiple of 16 or not): what changes from chunk to chunk is not
specialized on.

Legend: e entries of a chunk, n target rows of a chunk, D draft vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

#: Eight elements a thread: no kernel takes more than 63 registers. At 4096 one spilled.
_BLOCK = 2048
_WARPS = 8
#: Vectors of one figure per row. They begin anywhere, so code for aligned ones would mean to compile again and again.
_PER_ROW = ["mass", "own", "pick", "found", "log_total", "factor"]


class Measured(NamedTuple):
    """What one pass over an entry's logits gives, each [e]."""

    logsumexp: Tensor  # of the tempered logits
    kl: Tensor
    acceptance: Tensor  # sum_v min(p, q)


def target(logp: Tensor) -> tuple[Tensor, Tensor]:
    """Overwrite log p [n, D] by p; its mass m [n] and sum p log p - m log m [n]."""
    mass, own = logp.new_empty(logp.shape[0]), logp.new_empty(logp.shape[0])
    _target[(logp.shape[0],)](logp, mass, own, logp.shape[1], BLOCK=_BLOCK, num_warps=_WARPS)
    return mass, own


def measure(logits: Tensor, p: Tensor, own: Tensor, pick: Tensor, divisor: float) -> Measured:
    """Hold logits [e, D], divided by `divisor`, against the rows `pick` int64[e] of p [n, D]."""
    found = logits.new_empty(3, logits.shape[0])
    _measure[(logits.shape[0],)](
        logits, p, own, pick, found, logits.shape[0], logits.shape[1], divisor, BLOCK=_BLOCK, num_warps=_WARPS
    )
    return Measured(found[0], found[1], found[2])


def slope(
    logits: Tensor,
    p: Tensor,
    mass: Tensor,
    pick: Tensor,
    measured: Measured,
    factor: Tensor,
    divisor: float,
    dtype: torch.dtype,
) -> Tensor:
    """`factor` [e] times d kl / d logits: [e, D] in `dtype`.

    The derivative is by the *tempered* logits; fold 1 / divisor into the factor.
    """
    out = torch.empty_like(logits, dtype=dtype)
    _slope[(logits.shape[0],)](
        logits,
        p,
        mass,
        pick,
        measured.logsumexp,
        factor,
        out,
        logits.shape[1],
        divisor,
        BLOCK=_BLOCK,
        num_warps=_WARPS,
    )
    return out


@triton.jit(do_not_specialize_on_alignment=_PER_ROW)  # type: ignore[untyped-decorator]
def _target(logp, mass, own, D, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    logp += row * D
    lanes = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], dtype=logp.dtype.element_ty)
    entropy = tl.zeros([BLOCK], dtype=logp.dtype.element_ty)
    for begin in range(0, D, BLOCK):
        inside = begin + lanes < D
        # -1e30 stands for log 0, which is about to be multiplied by that 0.
        x = tl.load(logp + begin + lanes, mask=inside, other=-1e30)
        x = tl.maximum(x, -1e30, propagate_nan=tl.PropagateNan.ALL)  # a GPU's own maximum would hide a NaN
        p = tl.exp(x)
        tl.store(logp + begin + lanes, p, mask=inside)
        total += p
        entropy += p * x
    m = tl.sum(total, 0)
    tl.store(mass + row, m)
    tl.store(own + row, tl.sum(entropy, 0) - tl.where(m > 0, m * tl.log(tl.where(m > 0, m, 1.0)), 0.0))


@triton.jit(do_not_specialize=["e"], do_not_specialize_on_alignment=_PER_ROW)  # type: ignore[untyped-decorator]
def _measure(logits, p, own, pick, found, e, D, divisor, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    entry = tl.program_id(0).to(tl.int64)
    source = tl.load(pick + entry)
    logits += entry * D
    p += source * D
    lanes = tl.arange(0, BLOCK)
    top = tl.full([BLOCK], float("-inf"), dtype=logits.dtype.element_ty)
    total = tl.zeros([BLOCK], dtype=logits.dtype.element_ty)
    for begin in range(0, D, BLOCK):
        inside = begin + lanes < D
        z = tl.load(logits + begin + lanes, mask=inside, other=float("-inf")) / divisor
        higher = tl.maximum(top, z)
        kept = tl.where(top == float("-inf"), 0.0, tl.exp(top - tl.where(higher == float("-inf"), 0.0, higher)))
        total = total * kept + tl.where(inside, tl.exp(z - tl.where(higher == float("-inf"), 0.0, higher)), 0.0)
        top = higher
    best = tl.max(top, 0)
    log_total = best + tl.log(tl.sum(tl.where(top == float("-inf"), 0.0, total * tl.exp(top - best)), 0))

    cross = tl.zeros([BLOCK], dtype=logits.dtype.element_ty)
    kept = tl.zeros([BLOCK], dtype=logits.dtype.element_ty)
    for begin in range(0, D, BLOCK):
        inside = begin + lanes < D
        logq = tl.load(logits + begin + lanes, mask=inside, other=0.0) / divisor - log_total
        logq = tl.where(inside, logq, 0.0)
        target_p = tl.load(p + begin + lanes, mask=inside, other=0.0)
        q = tl.where(inside, tl.exp(logq), 0.0)
        cross += target_p * logq
        kept += tl.minimum(target_p, q, propagate_nan=tl.PropagateNan.ALL)
    tl.store(found + entry, log_total)
    tl.store(found + e + entry, tl.load(own + source) - tl.sum(cross, 0))
    tl.store(found + 2 * e + entry, tl.sum(kept, 0))


@triton.jit(do_not_specialize_on_alignment=_PER_ROW)  # type: ignore[untyped-decorator]
def _slope(  # type: ignore[no-untyped-def]
    logits, p, mass, pick, log_total, factor, out, D, divisor, BLOCK: tl.constexpr
):
    entry = tl.program_id(0).to(tl.int64)
    source = tl.load(pick + entry)
    logits += entry * D
    out += entry * D
    p += source * D
    m, total, scale = tl.load(mass + source), tl.load(log_total + entry), tl.load(factor + entry)
    lanes = tl.arange(0, BLOCK)
    for begin in range(0, D, BLOCK):
        inside = begin + lanes < D
        logq = tl.load(logits + begin + lanes, mask=inside, other=0.0) / divisor - total
        q = tl.exp(tl.where(inside, logq, 0.0))
        target_p = tl.load(p + begin + lanes, mask=inside, other=0.0)
        value = scale * (m * q - target_p)
        tl.store(out + begin + lanes, value.to(out.dtype.element_ty), mask=inside)
