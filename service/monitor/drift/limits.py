"""Settings of the drift alarm, and the limit of a lane from the permitted rate of false alarms."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

DAY_SECONDS: Final = 86_400.0
#: The formula of the limit holds only for run lengths from here on.
_FEWEST_TICKS: Final = 50.0


class DriftError(ValueError):
    """An observation or a stored state that the monitor cannot use; the message says which."""


def cusum_limit(k: float, run_length_ticks: float) -> float:
    """Limit h of a one-sided CUSUM with allowance `k` (sd) whose false alarms come once in `run_length_ticks`.

    Siegmund (1985): (exp(2kb) - 2kb - 1) / (2k²) = ARL with b = h + 1.166. `cusum_limit(0.25, 43_200)` is 16.0.
    """
    target = 2 * k * k * run_length_ticks
    low, high = 0.0, math.log1p(target) + 3.0  # exp(z) - z - 1 at `high` exceeds the target for every target > 0
    for _ in range(80):
        middle = (low + high) / 2
        if math.expm1(middle) - middle < target:
            low = middle
        else:
            high = middle
    return max(0.0, high / (2 * k) - 1.166)


@dataclass(frozen=True, slots=True)
class Lane:
    """One CUSUM. `k`: allowance in sd; half the size of the fall that it finds fastest."""

    name: str
    k: float


@dataclass(frozen=True, slots=True)
class DriftConfig:
    """Settings, of which `service.settings` checks those that people give. Each lane gets an equal part of the rate."""

    rollouts_per_tick: int = 64  # 8 prompts of 8 rollouts; a tick should hold whole groups
    days_between_false_alarms: float = 30.0
    lanes: tuple[Lane, ...] = (Lane("fast", 0.5), Lane("slow", 0.1))
    baseline_ticks: int = 1_440
    warmup_ticks: int = 20  # no statistic before: the sd of fewer ticks is a guess
    dead_band: float = 0.0  # fraction of the baseline that may be lost without being counted
    batch_ticks: tuple[int, ...] = (15, 60, 240)
    sd_window_ticks: int = 5_760  # memory of the sd estimates
    strata: int = 16  # told apart; all that come later are one together. 0: strata are ignored

    def limit(self, lane: Lane, rollouts_per_second: float = 64 / 60) -> float:
        """The lane's limit h: n lanes, each at 1/n of the permitted rate (union bound)."""
        ticks = self.days_between_false_alarms * DAY_SECONDS * rollouts_per_second / self.rollouts_per_tick
        return cusum_limit(lane.k, max(_FEWEST_TICKS, len(self.lanes) * ticks))
