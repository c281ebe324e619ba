"""How long an engine's steps take, by batch size and draft depth. The service fits to it what acceptance is worth.

An engine measures the time from one step of a request to its next (vLLM's inter-token latency, on the engine core's own
clock). So between two scrapes a step took seconds/outputs and held outputs/steps sequences, whether or not the engine
idled in between. That holds only for a constant batch size: else the mean time is weighted by batch size and the mean
size is not. A stretch in which the batch size changed is left out. Sums are kept by depth and by batch size in factors
of √2: they are cumulative, and a report of them may be repeated.

Pure: no clock, no network.
"""

from __future__ import annotations

import math
from typing import Any, Final

from rl_hooks.engines.counting.counters import Snapshot

#: Cells kept; beyond them the ones with the fewest steps go.
MAX_CELLS: Final = 64
#: Longer drafts, larger batches and slower steps than the service takes are left out, or it would refuse the report.
MAX_DEPTH: Final = 64
MAX_BATCH: Final = 65536.0
SECONDS: Final = (1e-6, 1e3)
#: A stretch of fewer steps is left out: its counters were not read at one moment.
_FEWEST_STEPS: Final = 20
#: A stretch whose mean depth is further than this from a whole number was drafted at several depths.
_WHOLE: Final = 0.05
#: The batch size is constant if the sequences at both ends of a stretch, and in its steps, differ by no more.
_STEADY: Final = 0.2
#: A stretch whose steps took longer than this multiple of its cell's mean contains a pause, and is left out.
_PAUSED: Final = 2.0


class StepSums:
    """Sums of one engine, by depth and batch size."""

    def __init__(self) -> None:
        self._cells: dict[tuple[int, int], list[float]] = {}  # (depth, cell) -> [outputs, steps, seconds]

    def add(self, before: Snapshot, after: Snapshot) -> None:
        """Count what lies between two scrapes of one engine process."""
        if before.times is None or after.times is None:
            return
        outputs, steps, waited, _ = (now - then for now, then in zip(after.times, before.times, strict=True))
        rounds = after.counts.rounds - before.counts.rounds
        drafted = after.counts.drafted_tokens - before.counts.drafted_tokens
        if steps < _FEWEST_STEPS or outputs <= 0 or waited <= 0 or min(rounds, drafted) < 0:
            return
        batch, seconds, depth = outputs / steps, waited / outputs, drafted / rounds if rounds else 0.0
        sizes = (before.times[3], after.times[3], batch)
        if max(sizes) - min(sizes) > _STEADY * max(sizes):  # this also finds API servers that count the same steps
            return
        # vLLM counts no round where it drafts nothing: with many outputs of that kind the depth is not known.
        if abs(depth - round(depth)) > _WHOLE or (rounds and rounds < 0.9 * outputs):
            return
        if depth > MAX_DEPTH or not (1 / MAX_BATCH <= batch <= MAX_BATCH and SECONDS[0] <= seconds <= SECONDS[1]):
            return
        key = (round(depth), round(2 * math.log2(batch)))
        cell = self._cells.get(key)
        if cell is not None and seconds > _PAUSED * cell[2] / cell[1]:
            return
        # Each output waited one step: steps x mean step time is what the steps took, without what lay between them.
        known = cell or [0.0, 0.0, 0.0]
        self._cells[key] = [a + b for a, b in zip(known, (outputs, steps, steps * seconds), strict=True)]
        while len(self._cells) > MAX_CELLS:
            del self._cells[min(self._cells, key=lambda one: self._cells[one][1])]

    def document(self) -> list[dict[str, Any]]:
        """As `POST /acceptance` takes them: batch in sequences a step, seconds of all steps."""
        return [
            {"batch": outputs / steps, "depth": depth, "steps": int(steps), "seconds": seconds}
            for (depth, _), (outputs, steps, seconds) in sorted(self._cells.items())
        ]
