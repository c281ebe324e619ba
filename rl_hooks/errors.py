"""What `rl_hooks` raises.

No `HookError` reaches a training step unless the hook was made with `strict=True`. An `AgentError` is the swap agent's,
for a failure between it, the service and an engine.
"""

from __future__ import annotations

from typing import Final

#: Characters of a name or version that an engine or the service tells, in logs and in what is kept. Ours have 128.
MAX_NAME: Final = 200
#: Characters of a reason that the service tells.
MAX_REASON: Final = 2000
#: What works where a rank of the trainer has a part of each row or of each weight: the engine has rows and head whole.
ENGINE_INSTEAD: Final = (
    "let the engine send instead: without this hook, and with DRAFTALIGN_URL and DRAFTALIGN_SAMPLE_FRACTION=0.05 in "
    "the engine's environment (docs/guide/vllm.md)"
)


class HookError(Exception):
    """Base of everything `rl_hooks` raises on its own account (the rollout file raises `wire.WireError`)."""


class UnsupportedModelError(HookError):
    """The model's layers, norm or head cannot be found, or the head is of a kind that we cannot use."""


class WrongTargetError(HookError):
    """What is registered does not give the policy's own logits; nothing more is sent."""


class AuxLayersError(HookError, ValueError):
    """The auxiliary layers are out of range or unordered, or the default three collide in a shallow model."""


class CaptureMissedError(HookError):
    """A forward ran while the capture was armed, but not every hook fired."""


class RolloutError(HookError, ValueError):
    """The tensors of a rollout do not fit together, or do not fit the captured features."""


class UnsupportedTrainerError(HookError):
    """The trainer lacks a method that the adapter wraps; raised when it attaches, never later."""


class AgentError(Exception):
    """Base of everything that the swap agent raises by itself."""


class ManifestError(AgentError):
    """The service's manifest is invalid; nothing was downloaded."""


class SignatureError(ManifestError):
    """No key that the agent trusts signed this answer for this request."""


class DownloadError(AgentError):
    """The files could not be downloaded; nothing was swapped."""


class NoRoomError(DownloadError):
    """The cache's disk has too little free for a file."""


class DigestError(DownloadError):
    """A file's bytes differ from the manifest."""


class AnswerError(AgentError):
    """An answer was encoded, too long or too slow; nothing of it was used."""


class ReportError(AgentError):
    """The service did not accept a report; counts are cumulative, so nothing is lost."""


class InvalidDrafterError(AgentError):
    """The files match the manifest, but are no drafter that is safe to load."""


class EngineError(AgentError):
    """The engine did not answer, or its answer cannot be used; try again later."""


class SwapRefusedError(EngineError):
    """The engine read the drafter and refused it: it will refuse the same drafter again."""


class OtherBytesError(EngineError):
    """The engine found other bytes than were verified, and loaded nothing."""


class MetricsError(EngineError):
    """The engine's /metrics lacks a counter or cannot be read."""


def cut(text: str, most: int = MAX_NAME) -> str:
    """The text, or its beginning where it is longer. Half a surrogate pair, which no request can hold, becomes `?`."""
    text = text.encode("utf-8", "replace").decode()
    return text if len(text) <= most else f"{text[: most - 1]}…"
