"""A vLLM plugin: what verl's rollout server asks of a GPU, in the engine's process on a CPU. Never shipped.

* sleep mode, which vLLM has on GPUs alone: a sleep of level 2 takes all weights, the drafter's too, and keeps buffers;
* linear layers are not packed: a packed one takes no weight by itself, and GPUs do not pack.
"""

from __future__ import annotations

import math
from typing import Any

import torch


def sleep(self: Any, level: int = 1) -> None:
    """Of vLLM's CPU worker. What the allocator of a GPU gives back has no value any more: here it is NaN."""
    if level == 2:
        drafter = getattr(self.model_runner, "drafter", None)
        for model in (self.model_runner.model, getattr(drafter, "model", None)):
            for parameter in [] if model is None else model.parameters():
                lost = math.nan if parameter.is_floating_point() else torch.iinfo(parameter.dtype).min
                parameter.data.fill_(lost)


def wake_up(self: Any, tags: list[str] | None = None) -> None:
    """Of vLLM's CPU worker: the memory is there again, with nothing in it."""


def register() -> None:
    """General plugin of vLLM's."""
    import vllm._custom_ops as operations
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.worker.cpu_worker import CPUWorker

    operations._supports_onednn = False
    CpuPlatform.is_sleep_mode_available = lambda _: True
    CPUWorker.sleep, CPUWorker.wake_up = sleep, wake_up
