"""How long an engine's steps take, by batch size and draft depth: what acceptance is worth in time is fitted to it.

An engine times each token that leaves: from one step of a request to its next (vLLM's inter-token latency, on the
engine core's own clock). So between two scrapes the mean step took seconds/outputs, and held outputs/steps sequences,
whether or not the engine idled in between. Sums are kept by depth and by batch size in factors of √2: they are
cumulative, and a report of them may be repeated.

Pure: no clock, no network.
"""

from __future__ import annotations

import math
from typing import Any, Final

from rl_hooks.engines.counters import Snapshot

#: Cells kept; beyond them the ones with the fewest steps go.
MAX_CELLS: Final = 64
#: A stretch of fewer steps says nothing: its counters were not read at one moment.
_FEWEST_STEPS: Final = 20
#: A stretch whose mean depth is further than this from a whole number was drafted at several depths.
_WHOLE: Final = 0.05


class StepTimes:
    """Sums of one engine, by depth and batch size."""

    def __init__(self) -> None:
        self._cells: dict[tuple[int, int], list[float]] = {}  # (depth, cell) -> [outputs, steps, seconds]

    def add(self, before: Snapshot, after: Snapshot) -> None:
        """Count what lies between two scrapes of one engine process."""
        if before.times is None or after.times is None:
            return
        outputs, steps, seconds = (now - then for now, then in zip(after.times, before.times, strict=True))
        rounds, drafted = after.rounds - before.rounds, after.drafted_tokens - before.drafted_tokens
        if steps < _FEWEST_STEPS or outputs <= 0 or seconds <= 0 or min(rounds, drafted) < 0:
            return
        mean = drafted / rounds if rounds else 0.0
        # vLLM counts no round where it drafts nothing: beside many outputs without one the depth is not known.
        if abs(mean - round(mean)) > _WHOLE or (rounds and rounds < 0.9 * outputs):
            return
        cell = self._cells.setdefault((round(mean), round(2 * math.log2(outputs / steps))), [0.0, 0.0, 0.0])
        # Each output waited one step: steps x mean step time is what the steps took, without what lay between them.
        for i, more in enumerate((outputs, steps, steps * seconds / outputs)):
            cell[i] += more
        while len(self._cells) > MAX_CELLS:
            del self._cells[min(self._cells, key=lambda key: self._cells[key][1])]

    def document(self) -> list[dict[str, Any]]:
        """As `POST /acceptance` takes them: batch in sequences a step, seconds of all steps."""
        return [
            {"batch": outputs / steps, "depth": depth, "steps": int(steps), "seconds": seconds}
            for (depth, _), (outputs, steps, seconds) in sorted(self._cells.items())
        ]
