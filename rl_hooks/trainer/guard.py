"""Keeps our failures out of the trainer's step."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

from rl_hooks.sending.tally import Tally, kind_of

_Result = TypeVar("_Result")


class TrainerGuard:
    """Runs our own work inside a training step. `seconds`: the wall time that all of it has taken."""

    def __init__(self, tally: Tally, *, strict: bool) -> None:
        self.seconds = 0.0
        self._tally = tally
        self._strict = strict

    def __call__(self, work: Callable[..., _Result], *args: Any, **kwargs: Any) -> _Result | None:
        """What `work` returns; None where it failed, which is counted and logged, and raised only if `strict`."""
        started = time.perf_counter()
        try:
            return work(*args, **kwargs)
        except Exception as error:
            self._tally.add("failures")
            if self._strict:
                raise
            text = f"rollouts were not captured: {type(error).__name__}: {error}"
            self._tally.note(kind_of(text), text)
            return None
        finally:
            self.seconds += time.perf_counter() - started
