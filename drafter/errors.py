"""Every error that the drafter core raises on purpose."""

from __future__ import annotations

from collections.abc import Sequence

from rl_hooks.format.eagle3 import CheckpointError, DrafterError

__all__ = ["BatchRejected", "CheckpointError", "DrafterError", "NotFinite", "TargetHeadError", "VocabularyError"]


class BatchRejected(DrafterError):  # noqa: N818 - a verdict on data, not a fault
    """The batch must not be used. `reason` is one sentence for the dead-letter record."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class NotFinite(BatchRejected):
    """Some rollouts of a batch hold NaN or infinity, and others do not. `places`: of the ones that do."""

    def __init__(self, reason: str, places: Sequence[int]) -> None:
        super().__init__(reason)
        self.places = tuple(places)


class VocabularyError(DrafterError):
    """A draft vocabulary is not a set of ascending token ids of the target."""


class TargetHeadError(DrafterError):
    """The target's output head does not cover the tokens or the width that were asked for."""
