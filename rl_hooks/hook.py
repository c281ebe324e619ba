"""The hook for custom training loops: `rl_hooks.trainer.hook` under the name that trainers import it by."""

from rl_hooks.trainer.hook import DrafterHook

__all__ = ["DrafterHook"]
