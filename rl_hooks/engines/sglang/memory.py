"""Lets no swap begin while SGLang has released the memory of its weights.

A trainer that shares the GPU has SGLang release it while it trains (slime and miles with `--colocate`), and just then
drafters are published. SGLang 0.5.23 takes a weight update all the same; on a GPU, what reads or writes released memory
ends the scheduler. So a plugin of its framework says on the server's metrics page that it is released, where the agent
looks first, and no drafter is loaded meanwhile.

Written against 0.5.23; tests/helpers/trainer/contract_fixtures.py has what it reads.
"""

from __future__ import annotations

import logging
from typing import Any, Final

log = logging.getLogger("draftalign.sglang")

#: On the server's metrics page: 1 while a rank has released its weights, 0 once all have them back.
RELEASED: Final = "draftalign:weights_released"
#: The class that updates, releases and resumes weights in SGLang's scheduler.
UPDATER: Final = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
_WEIGHTS: Final = "weights"
REFUSAL: Final = "draftalign: the memory of this server's weights is released; ask again once it is resumed"
_SESSION: Final = "a trainer's weight-update session is open; it is asked again"


class WeightMemory:
    """What one scheduler's process says of its weights. All calls come from its thread."""

    def __init__(self) -> None:
        self.released = False
        self._gauge: Any = None

    def changed(self, _: Any, manager: Any, *__: Any, **___: Any) -> None:
        """SGLang has released or resumed memory."""
        try:
            self.released = _WEIGHTS in manager.offload_tags
            if self._gauge is None:
                from prometheus_client import Gauge  # as `StepCounter` makes its counters

                says = "Whether the memory of the weights is released."
                self._gauge = Gauge(RELEASED, says, registry=None, multiprocess_mode="max")
            self._gauge.set(int(self.released))
        except Exception:  # an exception here would end the scheduler
            log.exception("draftalign: nobody is told that this server's weights are released")


#: This process's.
MEMORY: Final = WeightMemory()


def hindered(manager: Any) -> str | None:
    """Why no drafter may be loaded now, alike on all ranks; None: it may. `manager`: SGLang's of weight updates."""
    if MEMORY.released:
        return REFUSAL
    return None if manager._session is None else _SESSION
