"""Triton for machines without a GPU: its interpreter, which must be chosen before Triton is first imported."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from types import ModuleType
from typing import Any

import pytest


def _mend_triton_3_6() -> None:
    """Make its interpreter, where bounds of loops are arrays of one number, turn them into integers as 3.7 does.

    NumPy 2.4 refuses `int` of such an array, and warned before. Torch 2.11 comes with this Triton.
    """
    if not sys.modules["triton"].__version__.startswith("3.6."):
        return
    interpreter: Any = importlib.import_module("triton.runtime.interpreter")
    whole = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        whole(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.squeeze()))

    interpreter._patch_lang_tensor = patched


os.environ["TRITON_INTERPRET"] = "1"
with contextlib.suppress(ImportError):  # no wheel for this platform: the tests that need it are skipped
    importlib.import_module("triton.language")
    _mend_triton_3_6()
del os.environ["TRITON_INTERPRET"]  # not for the processes that tests start


def interpreted(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Import a module of kernels for the interpreter."""
    pytest.importorskip("triton", reason="Triton has no wheel for this platform")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    sys.modules.pop(name, None)  # decorators look at the environment once
    return importlib.import_module(name)
