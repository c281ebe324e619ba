"""Muon: a matrix moves by its momentum, with all singular values brought near 1.

By Keller Jordan (https://kellerjordan.github.io/posts/muon/); the size of its steps is Moonshot's (arXiv 2502.16982).
torch.optim.Muon is the same, but iterates in bfloat16 on every device. A CPU whose instructions end at AVX2 has no
kernel for that: a step takes 8 times as long at 64 x 256, and 27 times at 256 x 1,024 (benchmarks/muon.py).
"""

from __future__ import annotations

import math
from typing import Final

import torch
from torch import Tensor

#: Of the momentum, what a step keeps.
MOMENTUM: Final = 0.95
#: Jordan's: from any singular value in (0, 1], five iterations reach 0.7 to 1.2.
_COEFFICIENTS: Final = (3.4445, -4.7750, 2.0315)
_ITERATIONS: Final = 5
_EPSILON: Final = 1e-7


def move(matrix: Tensor, gradient: Tensor, momentum: Tensor, learning_rate: float, weight_decay: float) -> None:
    """Move `matrix` [M, N] and its `momentum` [M, N] in place: Nesterov's, orthogonalised, and decoupled weight decay.

    Waits for no device.
    """
    momentum.lerp_(gradient, 1 - MOMENTUM)
    update = orthogonalised(gradient.lerp(momentum, MOMENTUM))
    matrix.mul_(1 - learning_rate * weight_decay)
    # The root makes the step as large as AdamW's, whatever the matrix's shape.
    matrix.add_(update, alpha=-learning_rate * 0.2 * math.sqrt(max(matrix.shape)))


def orthogonalised(matrix: Tensor) -> Tensor:
    """About U V^T of a matrix [M, N] = U S V^T, by Newton and Schulz' iteration: float32, on a GPU bfloat16."""
    x = matrix.bfloat16() if matrix.is_cuda else matrix.float()
    x = x.T if matrix.shape[0] > matrix.shape[1] else x  # the product of it with itself is the smaller one
    x = x / x.norm().clamp(min=_EPSILON)  # its largest singular value is 1 at most
    a, b, c = _COEFFICIENTS
    for _ in range(_ITERATIONS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if matrix.shape[0] > matrix.shape[1] else x
