"""What differs between devices: moving tensors to the one that trains, what it computes in, and fusing its passes."""

from __future__ import annotations

import errno
import inspect
import logging
import os
import shutil
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache, wraps
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.utils._pytree as pytree
from torch import Tensor

log = logging.getLogger("draftalign.drafter")

_T = TypeVar("_T")
_F = TypeVar("_F", bound=Callable[..., Any])
#: Variants of one function that are compiled before the compiler gives up: one per draft step, type, and lone row.
#: Its own limit is 8, which seven steps nearly use up.
_VARIANTS = 64


@cache
def has_triton() -> bool:
    """Whether Triton is installed, which is optional, and has what it needs to start a kernel: it compiles C for it.

    What is missing is named once, in a warning.
    """
    missing = []
    if find_spec("triton") is None:
        missing.append("Triton (install triton)")
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):  # Triton asks for no other name
        missing.append("a C compiler (install gcc and the C headers)")
    if not (Path(sysconfig.get_paths()["include"]) / "Python.h").is_file():
        missing.append("Python's own headers (install python3-dev)")
    if missing:
        log.warning("no fused kernels, losses run in plain torch, slower; missing: %s", ", ".join(missing))
    return not missing


def to_device(tensor: Tensor, device: torch.device | str, dtype: torch.dtype | None = None) -> Tensor:
    """Copy without waiting for the device: from the host to CUDA through pinned memory, so that work overlaps."""
    towards = torch.device(device).type != "cpu"  # back from it, a copy that is not waited for is read too early
    if torch.device(device).type == "cuda" and tensor.device.type == "cpu":
        # Converted first: a copy that converts would be waited for.
        tensor = tensor.to(dtype or tensor.dtype).pin_memory()
    return tensor.to(device=device, dtype=dtype or tensor.dtype, non_blocking=towards)


def prefetch(items: Iterable[_T], device: torch.device) -> Iterator[_T]:
    """Yield the items, the next one made in a thread while the caller keeps `device` busy with this one.

    On CUDA the thread has a stream of its own: its copies run beside the caller's kernels. On a CPU, where the thread
    would take the cores that the caller works with, the items are made one after another.
    """
    if device.type == "cpu":
        yield from items
        return
    iterator, end = iter(items), object()
    with ThreadPoolExecutor(1, "prefetch") as thread:
        thread.submit(_use_own_stream, device).result()  # no initializer: its error would not be told
        waiting = thread.submit(next, iterator, end)
        while (item := waiting.result()) is not end:
            waiting = thread.submit(next, iterator, end)
            yield item  # type: ignore[misc]


def _use_own_stream(device: torch.device) -> None:
    """Give this thread the device's stream for copies, where it has streams; that device is its current one too."""
    if device.type == "cuda":
        torch.cuda.set_stream(_stream_for_copies(device))


@cache
def _stream_for_copies(device: torch.device) -> torch.cuda.Stream:
    """One for the whole process: the allocator keeps freed memory for the stream that it was taken on."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


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

    Numbers of rows are compiled as symbols, so batches of other lengths do not compile again; what follows the first
    axis (heads, widths) belongs to the model and is compiled in.
    """

    @cache
    def compiled() -> Callable[..., Any]:  # not before it is needed: the compiler takes seconds to import
        return _compiled(function)

    @wraps(function)
    def run(first: Tensor, *rest: Any) -> Any:
        if not fuses(first):
            return function(first, *rest)
        # Within an autograd function inputs still say that they want gradients, which would be one more variant.
        arguments = pytree.tree_map_only(Tensor, Tensor.detach, (first, *rest))
        for tensor in pytree.tree_leaves(arguments):
            if isinstance(tensor, Tensor) and tensor.ndim:
                import_module("torch._dynamo").maybe_mark_dynamic(tensor, 0)
        return compiled()(*arguments)

    return run  # type: ignore[return-value]


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """`torch.compile` that keeps `_VARIANTS` of a function; torch 2.11 has but one limit, for the whole process."""
    compiler: Any = torch.compile  # the published stubs lack this argument
    if "recompile_limit" in inspect.signature(compiler).parameters:
        return compiler(function, recompile_limit=_VARIANTS)  # type: ignore[no-any-return]
    settings, whole = import_module("torch._dynamo").config, compiler(function)

    def run(*arguments: Any) -> Any:
        # At each use: torch may keep settings per thread, and backward passes on CUDA have one of their own.
        if settings.recompile_limit < _VARIANTS:
            settings.recompile_limit = _VARIANTS
        return whole(*arguments)

    return run


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether memory ran out, on a GPU or on the host, whose allocator raises a plain RuntimeError, or caused this."""
    if error is None:
        return False
    return (
        isinstance(error, MemoryError | torch.OutOfMemoryError)
        or (isinstance(error, RuntimeError) and "allocate memory" in str(error))
        or (isinstance(error, OSError) and error.errno == errno.ENOMEM)
        or is_out_of_memory(error.__cause__)
    )


class RanksLost(RuntimeError):  # noqa: N818 - reads as what happened
    """A process that trains the same drafter on another device has gone, or is out of step; this one must end too."""


def is_device_fault(error: Exception) -> bool:
    """Whether a device failed (an assertion in a kernel, a lost GPU, a lost rank): this process cannot go on."""
    return isinstance(error, torch.AcceleratorError | RanksLost) or (
        isinstance(error, RuntimeError) and "CUDA error" in str(error)
    )
