"""Copies between host and device, which run while the caller goes on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor


class HostCopies:
    """The constructor starts the copies; `wait` completes them. A tensor on the CPU is not copied."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._host = {name: _start(tensor) for name, tensor in tensors.items()}
        self._copied: Any = None
        devices = {tensor.device for tensor in tensors.values() if tensor.is_cuda}
        if devices:
            (self._device,) = devices
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record(torch.cuda.current_stream(self._device))

    def wait(self) -> dict[str, Tensor]:
        """The host tensors, complete."""
        if self._copied is not None:
            # In a thread of its own the current device is 0, of which CUDA would make a context on every rank.
            with torch.cuda.device(self._device):
                self._copied.synchronize()
        return self._host


def to_device(device: torch.device, array: npt.NDArray[Any]) -> Tensor:
    """A copy of the array on a GPU, the array itself on a CPU.

    Pinned first: CUDA lets a copy of more than 64 KiB from other memory wait for what the GPU does now.
    """
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def _start(tensor: Tensor) -> Tensor:
    if not tensor.is_cuda:
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)  # whatever the default is
    return host.copy_(tensor, non_blocking=True)
