"""What the scripts of slime and miles share: Megatron on a CPU, and stand-ins for what is imported and not used."""

from __future__ import annotations

import contextlib
import importlib.abc
import sys
import types
from argparse import Namespace
from importlib.machinery import ModuleSpec
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

#: slime and miles import these, and nothing of them is called here but the empty settings of SGLang's dumper.
ABSENT = ("mooncake", "sglang", "torch_memory_saver")


class _Module(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {"_kv_pairs_to_dict": staticmethod(lambda _pairs: {})})


class _StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, fullname: str, *_: Any) -> ModuleSpec | None:
        return ModuleSpec(fullname, self, is_package=True) if fullname.split(".")[0] in ABSENT else None

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None: ...


def prepare(*checkouts: str) -> None:
    """Have the checkouts imported from, and stand-ins for what is absent."""
    sys.path[:0] = checkouts
    sys.meta_path.append(_StandIns())


def call_the_cpu_cuda() -> None:
    """Megatron asks CUDA for the device of buffers, and for dropout's generator."""
    from megatron.core.tensor_parallel import random

    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]
    random.CudaRNGStatesTracker.fork = lambda *_, **__: contextlib.nullcontext()
    random._get_cuda_rng_state = random._set_cuda_rng_state = lambda *_, **__: None


class OnCPU(TorchFunctionMode):
    """Where the device "cuda" is named, the CPU is meant; no memory is pinned."""

    def __torch_function__(self, call: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        more = dict(kwargs or {})
        more.pop("pin_memory", None)
        if str(more.get("device")).startswith("cuda"):
            more["device"] = "cpu"
        if call is torch.Tensor.cuda:
            return args[0]
        return call(*args, **more)


class Arguments(Namespace):
    """A command line. What is not set is off, as in slime and miles."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)
