"""What `rl_hooks` raises. None of it reaches a training step unless the hook was made with `strict=True`.

HookError
├── UnsupportedModelError    the model's layers, norm or head cannot be found, or the head is of a kind we cannot use
├── AuxLayersError           the requested layers do not exist, or the default three collide in a shallow model
├── CaptureMissedError       a forward ran while armed, and a hook did not fire
├── RolloutError             the tensors given with a rollout contradict each other or the captured features
└── UnsupportedTrainerError  the trainer lacks a method that the adapter wraps (raised when attaching, never later)

The swap agent's, for failures between it, the service and an engine:

AgentError
├── ManifestError     the service's manifest is invalid; nothing was downloaded
│   └── SignatureError  no key that the agent trusts signed the answer to this request
├── DownloadError     the files could not be downloaded; nothing was swapped
│   ├── NoRoomError   the cache's disk has too little free
│   └── DigestError   the downloaded files differ from the manifest
├── AnswerError       an answer was encoded, too long or too slow; nothing of it was used
├── ReportError       the service did not accept a report; counts are cumulative, so nothing is lost
├── CheckpointError   the files match the manifest, but are no drafter that is safe to load
└── EngineError       the engine did not answer, or its answer cannot be used; try again later
    ├── OtherBytesError   the engine found other bytes than were verified, and loaded nothing
    ├── SwapRefusedError  the engine read the drafter and refused it: it will refuse the same drafter again
    └── MetricsError      its /metrics lacks a counter or cannot be read
"""

from __future__ import annotations

from typing import Final

#: Characters of a name or version that an engine or the service tells, in logs and in what is kept. Ours have 128.
MAX_NAME: Final = 200


class HookError(Exception):
    """Base of everything `rl_hooks` raises on its own account (the rollout file raises `wire.WireError`)."""


class UnsupportedModelError(HookError):
    """The model's features or head cannot be read; the message names the places that were searched."""


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
    """The service's manifest is invalid."""


class SignatureError(ManifestError):
    """No key that the agent trusts signed this answer for this request."""


class DownloadError(AgentError):
    """A file could not be downloaded."""


class NoRoomError(DownloadError):
    """The cache's disk has too little free for a file."""


class AnswerError(AgentError):
    """An answer is not one of the expected size: encoded, too long or too slow."""


class ReportError(AgentError):
    """The service did not accept an acceptance report."""


class DigestError(DownloadError):
    """A file's bytes differ from the manifest."""


class CheckpointError(AgentError):
    """The checkpoint must not be shown to an engine."""


class EngineError(AgentError):
    """The engine did not answer, or its answer cannot be used."""


class SwapRefusedError(EngineError):
    """The engine refused this drafter and changed nothing."""


class OtherBytesError(EngineError):
    """The engine found other bytes than the agent had verified, and changed nothing."""


class MetricsError(EngineError):
    """The engine's /metrics lacks a counter or cannot be read."""


def cut(text: str, most: int = MAX_NAME) -> str:
    """The text, or its beginning where it is longer."""
    return text if len(text) <= most else f"{text[: most - 1]}…"
