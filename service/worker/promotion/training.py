"""The candidate's training that is still to be judged."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

#: Trainings in a row that nothing could judge, after which none is made. Siblings of one step may come in many claims.
UNJUDGED_TRAININGS: Final = 64
#: Parts that add up to this share count as a whole training: each ends with a whole step.
_WHOLE: Final = 0.99


@dataclass(slots=True)
class Training:
    """What was done since the candidate was last judged, and on how much it was judged since."""

    trained_to: int | None = None  # policy version of the last training; None: the candidate was never trained
    seconds: float | None = None  # of the last training, parts together, until it has been judged
    done: float = 0.0  # share of a whole training that those are
    tested: int = 0  # rollouts that the candidate was judged on since then
    unjudged: int = 0  # trainings since the last claim that had a prompt to judge by

    def add(self, seconds: float | None, policy_version: int, share: float) -> None:
        """Count a share of a training on that policy's rollouts. `seconds`: None where they say nothing."""
        self.tested, self.trained_to = 0, policy_version
        self.unjudged += 1
        if seconds is None:
            self.concluded()
        else:
            self.seconds, self.done = (self.seconds or 0.0) + seconds, self.done + share

    def concluded(self) -> None:
        """What was trained until now is judged, or will not be."""
        self.seconds, self.done = None, 0.0

    @property
    def is_blind(self) -> bool:
        """Whether nothing could judge the last `UNJUDGED_TRAININGS`: one more is of no use."""
        return self.unjudged >= UNJUDGED_TRAININGS

    @property
    def is_part(self) -> bool:
        """Whether a training was cut, and waits for the rest or a verdict."""
        return self.seconds is not None and self.done < _WHOLE

    def lacks(self, rollouts: int, more: int = 0) -> bool:
        """Whether it waits for a verdict, and was judged on fewer than `rollouts`, these `more` included."""
        return self.seconds is not None and self.tested + more < rollouts
