"""What runs beside someone else's code: feature capture, the sender, trainer adapters, the swap agent.

Importing this package costs NumPy and nothing else: no torch, no FastAPI, no Redis, no transformers. Its names, for a
loop of one's own, are imported when they are asked for. `RolloutSender` and `wire` need no torch, the others do.
It never imports `drafter` or `service`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rl_hooks import wire
    from rl_hooks.sending.features import as_wire
    from rl_hooks.sending.registration import RunRegistration
    from rl_hooks.sending.sender import RolloutSender
    from rl_hooks.trainer.hook import DrafterHook

__all__ = ["DrafterHook", "RolloutSender", "RunRegistration", "as_wire", "wire"]

_HOMES = {
    "DrafterHook": "rl_hooks.trainer.hook",
    "RolloutSender": "rl_hooks.sending.sender",
    "RunRegistration": "rl_hooks.sending.registration",
    "as_wire": "rl_hooks.sending.features",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'rl_hooks' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
