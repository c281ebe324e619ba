"""`sglang.launch_server` on a CPU without AMX and without torchvision and torchaudio; the arguments are its own.

SGLang drafts on a CPU with its AMX backend only, whose kernels are `sgl_kernel` beside this file here. torchvision and
torchaudio have no builds for a CPU torch; SGLang imports them for models that these tests do not serve.
SGLang's processes are forked and not spawned: each would import all of SGLang again, which takes half of a start.
With DRAFTALIGN_TESTS_OVERLAP it overlaps schedules beside EAGLE-3, which it does by itself on GPUs alone.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import multiprocessing
import os
import sys
import types
from typing import Any

_ABSENT = ("torchvision", "torchaudio")


class _Anything(type):
    def __getattr__(cls, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return cls


class _Module(types.ModuleType):
    __version__ = "0.0.0"

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything(name, (), {})


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, fullname: str, *_: Any) -> importlib.machinery.ModuleSpec | None:
        absent = fullname.split(".")[0] in _ABSENT
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True) if absent else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing to run."""


sys.meta_path.append(_Finder())


def overlap_schedules() -> None:
    """Take away what turns it off on a CPU; the one kernel of Triton's on the way is a lookup of rows."""
    from sglang.srt.arg_groups import speculative_hook
    from sglang.srt.managers import overlap_utils

    def rows_of(rows: Any, *buffers: Any) -> tuple[Any, ...]:
        return tuple(None if buffer is None else buffer[rows] for buffer in buffers)

    assert callable(speculative_hook._disable_overlap_schedule_for_cpu)
    assert callable(overlap_utils.gather_spec_extras)
    speculative_hook._disable_overlap_schedule_for_cpu = lambda _: None
    overlap_utils.gather_spec_extras = rows_of


if __name__ == "__main__":
    from sglang.launch_server import load_plugins, run_server
    from sglang.srt.runtime_context import override_platform
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    multiprocessing.set_start_method("fork")
    multiprocessing.set_start_method = lambda *_, **__: None
    if os.environ.get("DRAFTALIGN_TESTS_OVERLAP"):
        overlap_schedules()
    load_plugins()
    override_platform(has_amx=True).install()
    try:
        run_server(prepare_server_args(sys.argv[1:]))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)
