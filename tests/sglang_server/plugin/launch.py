"""`sglang.launch_server` on a CPU without AMX and without torchvision and torchaudio; the arguments are its own.

SGLang drafts on a CPU with its AMX backend only, whose kernels are `sgl_kernel` beside this file here. torchvision and
torchaudio have no builds for a CPU torch; SGLang imports them for models that these tests do not serve.
SGLang's processes are forked and not spawned: each would import all of SGLang again, which takes half of a start.
With DRAFTALIGN_TESTS_OVERLAP it overlaps schedules beside EAGLE-3, which it does by itself on GPUs alone.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import inspect
import multiprocessing
import os
import sys
import types
from collections.abc import Callable
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
        absent = fullname.split(".")[0] in _ABSENT or fullname.startswith("sgl_kernel.")
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True) if absent else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing to run."""


sys.meta_path.append(_Finder())
# SGLang finds its schedulers by their titles when it ends. In a fork with another environment no title finds its place.
importlib.import_module("setproctitle").getproctitle()


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


def claim_amx() -> None:
    """Let SGLang draft on this CPU: it asks for AMX, and the kernels here ask for nothing."""
    from sglang.srt import runtime_context

    if hasattr(runtime_context, "override_platform"):
        runtime_context.override_platform(has_amx=True).install()
        return
    from sglang.srt.arg_groups import overrides  # before 0.5.20 each module asks for itself
    from sglang.srt.speculative import draft_utils

    for module in (overrides, draft_utils):
        assert callable(module.cpu_has_amx_support)
        module.cpu_has_amx_support = lambda: True


def lengths_with_drafts() -> None:
    """Before 0.5.20 SGLang's attention on a CPU forgets that drafts add to a request's length."""
    from sglang.srt.layers.attention.intel_amx_backend import IntelAMXAttnBackend

    if "seq_lens = forward_batch.seq_lens" not in inspect.getsource(IntelAMXAttnBackend.forward_extend):
        return

    def mended(original: Callable[..., Any], metadata: str, at: int) -> Callable[..., Any]:
        def forward(self: Any, q: Any, k: Any, v: Any, layer: Any, batch: Any, *rest: Any, **named: Any) -> Any:
            lengths, found = batch.seq_lens, getattr(self, metadata)
            batch.seq_lens = lengths if found is None else found[at]
            try:
                return original(self, q, k, v, layer, batch, *rest, **named)
            finally:
                batch.seq_lens = lengths

        return forward

    for method, metadata, at in (
        ("forward_extend", "extend_metadata", 0),
        ("forward_decode", "draft_decode_metadata", 1),
    ):
        original = getattr(IntelAMXAttnBackend, method)
        setattr(IntelAMXAttnBackend, method, mended(original, metadata, at))


if __name__ == "__main__":
    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    multiprocessing.set_start_method("fork")
    multiprocessing.set_start_method = lambda *_, **__: None
    if os.environ.get("DRAFTALIGN_TESTS_OVERLAP"):
        overlap_schedules()
    load_plugins()
    claim_amx()
    lengths_with_drafts()
    try:
        run_server(prepare_server_args(sys.argv[1:]))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)
