"""Every error that the drafter core raises on purpose."""

from __future__ import annotations

from rl_hooks.format.eagle3 import CheckpointError, DrafterError

__all__ = ["BatchRejected", "CheckpointError", "DrafterError", "TargetHeadError", "VocabularyError"]


class BatchRejected(DrafterError):  # noqa: N818 - a verdict on data, not a fault
    """The batch must not be used. `reason` is one sentence for the dead-letter record."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class VocabularyError(DrafterError):
    """A draft vocabulary is not a set of ascending token ids of the target."""


class TargetHeadError(DrafterError):
    """The target's output head does not cover the tokens or the width that were asked for."""
