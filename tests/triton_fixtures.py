"""Triton for machines without a GPU: its interpreter, which must be chosen before Triton is first imported."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from types import ModuleType

import pytest

os.environ["TRITON_INTERPRET"] = "1"
with contextlib.suppress(ImportError):  # no wheel for this platform: the tests that need it are skipped
    importlib.import_module("triton.language")
del os.environ["TRITON_INTERPRET"]  # not for the processes that tests start


def interpreted(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Import a module of kernels for the interpreter."""
    pytest.importorskip("triton", reason="Triton has no wheel for this platform")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    sys.modules.pop(name, None)  # decorators look at the environment once
    return importlib.import_module(name)
