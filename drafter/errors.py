"""Every error that the drafter core raises on purpose.

DrafterError
├── BatchRejected      rollouts that must not be trained on or scored
├── CheckpointError    files of a drafter or of a trainer that do not fit
├── VocabularyError    a draft vocabulary that contradicts itself or the target's
└── TargetHeadError    the policy's lm_head lacks what is asked of it
"""

from __future__ import annotations


class DrafterError(Exception):
    """Base of this package's errors: what was expected, what came, what to do."""


class BatchRejected(DrafterError):  # noqa: N818 - a verdict on data, not a fault
    """The batch must not be used. `reason` is one sentence for the dead-letter record."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class CheckpointError(DrafterError):
    """A checkpoint is torn, incomplete or belongs to another drafter."""


class VocabularyError(DrafterError):
    """A draft vocabulary is not a set of ascending token ids of the target."""


class TargetHeadError(DrafterError):
    """The target's output head does not cover the tokens or the width that were asked for."""
