"""A CPU platform for verl 0.9.1, through its own registry: lets its real workers run without a GPU. Tests only."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry


def _nothing(*_: Any) -> int:
    return 0


def _group_of_one_backend() -> None:
    """Let a group have one backend: verl names one for the CPU and one for the GPU, which is the CPU here."""
    make = torch.distributed.init_process_group

    def init_process_group(backend: str | None = None, **options: Any) -> None:
        make("gloo" if backend == "cpu:gloo,cpu:gloo" else backend, **options)

    torch.distributed.init_process_group = init_process_group  # type: ignore[assignment]


_group_of_one_backend()


@PlatformRegistry.register(platform="cpu")
class PlatformCPU(PlatformBase):  # type: ignore[misc]
    """What verl asks of a device."""

    device_name = "cpu"
    vendor_name = "generic"
    device_module = torch.cpu
    for _name in (*(f"{of}memory_{what}" for of in ("", "max_") for what in ("allocated", "reserved")), "empty_cache"):
        if not hasattr(torch.cpu, _name):
            setattr(torch.cpu, _name, _nothing)

    def is_available(self) -> bool:
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        del use_smi_check
        return True

    def current_device(self) -> str:
        return "cpu"

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None: ...

    def synchronize(self, device_index: int | None = None) -> None: ...

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None: ...

    def empty_cache(self) -> None: ...

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        del device_index
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    @contextlib.contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        del msg
        yield

    def profiler_start(self) -> None: ...

    def profiler_stop(self) -> None: ...

    def ray_resource_name(self) -> str:
        return "GPU"  # which Ray is told of

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> None:
        return None
