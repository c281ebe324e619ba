"""Whether the served drafter has fallen, so that the archive is to be asked."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from drafter.replay.acceptance import Replay, log_ratio

#: Standard errors by which the served drafter must fall for the archive to be asked.
_FALL: Final = 3.0
#: Weight of the newest claim in the level that it falls from.
_LEVEL_MEMORY: Final = 0.25


@dataclass(slots=True)
class Level:
    """Where the served drafter's log α has been of late."""

    mean: float = math.nan
    variance: float = 0.0  # of one claim about it
    fallen: bool = False  # and the archive was not asked since

    def to_json(self) -> dict[str, Any] | None:
        """What a checkpoint keeps; None before the first claim."""
        return None if math.isnan(self.mean) else asdict(self)

    def take(self, replay: Replay, groups: npt.NDArray[np.int64] | None) -> None:
        """Take in a claim, and see whether α fell significantly. The level then starts there."""
        found = log_ratio(replay.tokens, replay.rounds, groups)
        if not math.isfinite(found.centre) or not math.isfinite(found.error):
            return
        change = 0.0 if math.isnan(self.mean) else found.centre - self.mean
        fell = change < -_FALL * math.sqrt(max(self.variance, found.error**2) + _LEVEL_MEMORY * found.error**2)
        if fell or math.isnan(self.mean):
            self.mean, self.variance = found.centre, found.error**2
        else:
            self.mean += _LEVEL_MEMORY * change
            self.variance += _LEVEL_MEMORY * (change**2 - self.variance)
        self.fallen = self.fallen or fell
