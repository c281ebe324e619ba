"""Moving tensors to the device that trains."""

from __future__ import annotations

import torch
from torch import Tensor


def to_device(tensor: Tensor, device: torch.device | str, dtype: torch.dtype | None = None) -> Tensor:
    """Copy without waiting for the device: from the host to CUDA through pinned memory, so that work overlaps."""
    if torch.device(device).type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()
    return tensor.to(device=device, dtype=dtype or tensor.dtype, non_blocking=True)
