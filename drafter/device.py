"""What differs between devices: moving tensors to the one that trains, and fusing element-wise work there."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable
from functools import cache, wraps
from importlib import import_module
from importlib.util import find_spec
from typing import Any, TypeVar

import torch
from torch import Tensor

log = logging.getLogger("draftalign.drafter")

_F = TypeVar("_F", bound=Callable[..., Any])
#: Variants of one function that are compiled before the compiler gives up: one per draft step, type, and lone row.
#: Its own limit is 8, which seven steps nearly use up.
_VARIANTS = 64


@cache
def has_triton() -> bool:
    """Whether Triton is installed, which is optional, and has the C compiler without which it starts no kernel."""
    if find_spec("triton") is None:
        return False
    compiler = os.environ.get("CC") or next((c for c in ("gcc", "clang", "cc") if shutil.which(c)), None)
    if compiler is None:
        log.warning("Triton finds no C compiler: losses run in plain torch, slower. Install gcc and the C headers")
    return compiler is not None


def to_device(tensor: Tensor, device: torch.device | str, dtype: torch.dtype | None = None) -> Tensor:
    """Copy without waiting for the device: from the host to CUDA through pinned memory, so that work overlaps."""
    towards = torch.device(device).type != "cpu"  # back from it, a copy that is not waited for is read too early
    if torch.device(device).type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()
    return tensor.to(device=device, dtype=dtype or tensor.dtype, non_blocking=towards)


def working_dtype(device: torch.device) -> torch.dtype | None:
    """What drafters compute in: on CUDA bfloat16, as engines serve them there; elsewhere (None) their parameters' own.

    In float32 a GPU would be many times slower, and attend without FlashAttention.
    """
    return torch.bfloat16 if device.type == "cuda" else None


def fuses(x: Tensor) -> bool:
    """Whether element-wise work on `x` is worth compiling: on CUDA, where each pass costs a trip to device memory."""
    return x.is_cuda and has_triton()


def fused_on_cuda(function: _F) -> _F:
    """Compile a function of tensors without gradients where its first argument `fuses`; elsewhere run it as it stands.

    Shapes are compiled as symbols: batches of other lengths do not compile again.
    """

    @cache
    def compiled() -> Callable[..., Any]:  # not before it is needed: the compiler takes seconds to import
        return torch.compile(function, dynamic=True)

    @wraps(function)
    def run(first: Tensor, *rest: Any) -> Any:
        if not fuses(first):
            return function(first, *rest)
        dynamo: Any = import_module("torch._dynamo.config")
        if dynamo.recompile_limit < _VARIANTS:  # each thread has its own
            dynamo.recompile_limit = _VARIANTS
        return compiled()(first, *rest)

    return run  # type: ignore[return-value]
