"""The products of the training step against float64, in every layout that the step passes in."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from drafter.model.matmul import linear, times

N, K, M = 130, 96, 160  # enough work for oneDNN


def _drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


LAYOUTS: dict[str, tuple[Callable[[], Tensor], Callable[[], Tensor]]] = {
    "dense": (lambda: _drawn(N, K), lambda: _drawn(M, K)),
    "transposed": (lambda: _drawn(K, N).t(), lambda: _drawn(K, M).t()),
    "half of the columns": (lambda: _drawn(N, 2 * K)[:, K:], lambda: _drawn(M, 2 * K)[:, :K]),
    "some rows": (lambda: _drawn(2 * N, K)[N:], lambda: _drawn(3 * M, K)[M : 2 * M]),
    "small": (lambda: _drawn(3, 5), lambda: _drawn(4, 5)),
    "no rows": (lambda: _drawn(0, K), lambda: _drawn(M, K)),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_products_and_gradients_are_those_of_float64(layout: str) -> None:
    x, weight = (make().requires_grad_() for make in LAYOUTS[layout])
    wide_x, wide_weight = (t.detach().double().requires_grad_() for t in (x, weight))
    out, wide = linear(x, weight), wide_x @ wide_weight.t()
    slope = _drawn(*out.shape)
    got = torch.autograd.grad(out, [x, weight], slope)
    want = torch.autograd.grad(wide, [wide_x, wide_weight], slope.double())
    for ours, theirs in zip((out, *got), (wide, *want), strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(times(x.detach(), weight.detach()), out.detach())


def test_leading_axes_are_kept() -> None:
    x, weight = _drawn(2, N, K), _drawn(M, K)
    torch.testing.assert_close(linear(x, weight), x @ weight.t(), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_types_stay_what_they_are(dtype: torch.dtype) -> None:
    assert linear(_drawn(N, K).to(dtype), _drawn(M, K).to(dtype)).dtype is dtype


def test_the_same_product_twice_is_the_same_to_the_bit() -> None:
    x, weight = _drawn(N, K), _drawn(M, K)
    assert torch.equal(times(x, weight), times(x.clone(), weight.clone()))


_MANY_SHAPES = """
import torch
from pathlib import Path
from drafter.model.matmul import times

def resident():
    return int(Path("/proc/self/status").read_text().split("VmRSS:")[1].split()[0]) // 1024

weight, rows = torch.randn(64, 64), torch.randn(2_000, 64)
for n in range(300, 400):
    times(rows[:n], weight)
before = resident()
for n in range(400, 900):
    times(rows[:n], weight)
print(resident() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads resident memory from /proc")
def test_products_of_many_shapes_keep_little_memory() -> None:
    """300 MiB where oneDNN and ideep each keep what they made for 1,024 shapes."""
    own = {name: value for name, value in os.environ.items() if not name.endswith("_CACHE_CAPACITY")}
    grown = subprocess.run([sys.executable, "-c", _MANY_SHAPES], env=own, check=True, capture_output=True, text=True)
    assert int(grown.stdout) < 100, f"{grown.stdout} MiB"
