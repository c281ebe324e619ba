"""A vLLM plugin: what OpenRLHF's own worker extension needs of CUDA, in the engine's process on a CPU. Never shipped.

* NCCL's place: a group of gloo, of the same two processes;
* `torch.empty(..., device="cuda")`, into which a weight is received, is on the CPU;
* linear layers are not packed: a packed one takes no weight by itself, and GPUs do not pack.
"""

from __future__ import annotations

from typing import Any


class Gloo:
    """What OpenRLHF's `stateless_init_process_group` gives, by gloo."""

    def __init__(self, address: str, port: int, rank: int, world_size: int, _device: Any) -> None:
        from vllm.distributed.utils import stateless_init_torch_distributed_process_group

        self.group = stateless_init_torch_distributed_process_group(address, port, rank, world_size, "gloo")

    def broadcast(self, tensor: Any, src: int, stream: Any) -> None:  # noqa: ARG002 - of CUDA
        """Wait until all have it."""
        import torch

        options = torch.distributed.BroadcastOptions()
        options.rootRank = src
        self.group.broadcast([tensor], options).wait()


def without_cuda() -> None:
    """The names of CUDA that the trainer's and the worker's code ask for."""
    import torch

    cuda: Any = torch.cuda
    cuda.current_device = lambda: 0
    cuda.current_stream = lambda *_: None
    cuda.synchronize = lambda *_: None


def register() -> None:
    """General plugin of vLLM's."""
    import torch
    import vllm._custom_ops as operations
    from openrlhf.utils import distributed_util

    without_cuda()
    distributed_util.stateless_init_process_group = Gloo
    operations._supports_onednn = False
    empty: Any = torch.empty

    def empty_on_cpu(*size: Any, device: Any = None, **options: Any) -> Any:
        return empty(*size, device=None if device == "cuda" else device, **options)

    torch.empty = empty_on_cpu
