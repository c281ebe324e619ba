"""What `rl_hooks` raises. None of it reaches a training step unless the hook was made with `strict=True`.

HookError
├── UnsupportedModelError    the model's layers, norm or head cannot be found, or the head is of a kind we cannot use
├── AuxLayersError           the layers asked for do not exist, or the default three collide in a shallow model
├── CaptureMissedError       a forward ran while armed, and a hook did not fire
├── RolloutError             the tensors given with a rollout contradict each other or the captured features
└── UnsupportedTrainerError  the trainer lacks a method that the adapter wraps (raised when attaching, never later)
"""

from __future__ import annotations


class HookError(Exception):
    """Base of everything `rl_hooks` raises on its own account (the rollout file raises `wire.WireError`)."""


class UnsupportedModelError(HookError):
    """The model is not one whose features or head we can read; the message names what was looked for."""


class AuxLayersError(HookError, ValueError):
    """The auxiliary layers are out of range, unordered, or collide."""


class CaptureMissedError(HookError):
    """A forward ran while the capture was armed, but not every hook fired."""


class RolloutError(HookError, ValueError):
    """The tensors of a rollout do not fit together, or do not fit the captured features."""


class UnsupportedTrainerError(HookError):
    """The trainer is of a kind or version that the adapter does not know."""
