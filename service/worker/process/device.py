"""The device that a worker trains on."""

from __future__ import annotations

import os

import torch

from service.errors import ConfigurationError

#: More would wait for the memory.
_FEEDING_THREADS = 8
_MEMORY_ADVICE = (
    "the GPU's memory ran out: lower DRAFTALIGN_TRAIN_STEP_TOKENS, raise DRAFTALIGN_GPU_MEMORY_SHARE where it is set, "
    "or stop what else runs on this GPU"
)


def named_device(name: str) -> torch.device:
    """The device of that name, be it on this machine or not. Raises `ConfigurationError` for what is no name."""
    try:
        return torch.device(name)
    except RuntimeError as error:
        raise ConfigurationError(f"DRAFTALIGN_DEVICE={name!r} names no device: cpu, cuda or cuda:1, say") from error


def checked_device(name: str) -> torch.device:
    """The device of that name. Raises `ConfigurationError` when there is none."""
    device = named_device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        build = "" if torch.version.cuda else f"; torch {torch.__version__} is built without CUDA"
        raise ConfigurationError(
            f"DRAFTALIGN_DEVICE={name!r} is not here: torch sees {torch.cuda.device_count()} CUDA devices{build}"
        )
    return device


def use_device(name: str, memory_share: float = 1.0) -> torch.device:
    """Make a device, and that share of its memory, this process's. Raises `ConfigurationError` when there is none."""
    device = checked_device(name)
    if name == "cpu":
        torch.set_num_threads(1)  # on shared cores, threads that wait for each other are far slower than one
    elif device.type == "cuda":
        torch.cuda.set_device(device.index or 0)  # Triton starts its kernels on the current one
        # Rollouts are gathered for it by the host: a large window takes one thread longer than the GPU trains on it.
        # `torchrun` would leave each rank one.
        shared_by = max(1, int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("WORLD_SIZE") or 1))
        torch.set_num_threads(max(1, min(_FEEDING_THREADS, len(os.sched_getaffinity(0)) // shared_by)))
        if memory_share < 1:
            torch.cuda.set_per_process_memory_fraction(memory_share, device.index or 0)
    return device


def advised(error: str) -> str:
    """What is said of an error: of a GPU's memory that ran out, with what to do. That first: the rest is cut off."""
    return f"{_MEMORY_ADVICE}: {error}" if "CUDA out of memory" in error else error
