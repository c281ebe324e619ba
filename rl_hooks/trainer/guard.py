"""Keeps our failures out of the trainer's step, and what else the adapters share."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

from rl_hooks.errors import UnsupportedTrainerError
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


def captured(hook: Any, ask: Callable[..., Any], *args: Any, **kwargs: Any) -> AbstractContextManager[object]:
    """`hook.capture` of what `ask` tells it; nothing where there is no hook, `ask` fails, or it tells None."""
    told = None if hook is None else hook.guard(ask, *args, **kwargs)
    return nullcontext() if told is None else hook.capture(**told)


def left_out_for_images(tally: Tally) -> None:
    """Say once that such rollouts are not sent."""
    tally.warn("images", "rollouts with images are left out: a drafter cannot embed them")


def one_temperature(said: Iterable[float]) -> float:
    """That of all rollouts of a micro-batch; 1 where there is none. Raises `UnsupportedTrainerError` for several."""
    found = sorted(set(said))
    if len(found) > 1:
        raise UnsupportedTrainerError(f"rollouts of several temperatures in one micro-batch: {found}")
    return found[0] if found else 1.0
