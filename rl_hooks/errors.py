"""What `rl_hooks` raises. None of it reaches a training step unless the hook was made with `strict=True`.

HookError
├── UnsupportedModelError    the model's layers, norm or head cannot be found, or the head is of a kind we cannot use
├── AuxLayersError           the layers asked for do not exist, or the default three collide in a shallow model
├── CaptureMissedError       a forward ran while armed, and a hook did not fire
├── RolloutError             the tensors given with a rollout contradict each other or the captured features
└── UnsupportedTrainerError  the trainer lacks a method that the adapter wraps (raised when attaching, never later)

The swap agent's, for what goes wrong between it, the service and an engine:

AgentError
├── ManifestError     the service's manifest breaks the contract; nothing was downloaded
├── DownloadError     the files could not be brought here; nothing was swapped
│   └── DigestError   they came, but are not what the manifest describes
├── ReportError       the service did not take a report; counts are cumulative, so nothing is lost
├── CheckpointError   they are what the manifest describes, but not a drafter that is safe to load
└── EngineError       the engine did not answer, or not usefully; worth another try
    ├── SwapRefusedError  the engine looked at the drafter and said no: the same drafter will be refused again
    └── MetricsError      its /metrics lacks a counter or holds nonsense
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


class AgentError(Exception):
    """Base of everything that the swap agent raises by itself."""


class ManifestError(AgentError):
    """The service's manifest breaks the contract."""


class DownloadError(AgentError):
    """A file could not be downloaded."""


class ReportError(AgentError):
    """The service did not take an acceptance report."""


class DigestError(DownloadError):
    """A file's bytes are not those that the manifest describes."""


class CheckpointError(AgentError):
    """The checkpoint must not be shown to an engine."""


class EngineError(AgentError):
    """The engine did not answer, or not usefully."""


class SwapRefusedError(EngineError):
    """The engine refused this drafter and changed nothing."""


class MetricsError(EngineError):
    """The engine's /metrics does not hold what is needed."""
