"""Uses a weight at a place of the trainer's own forward where it is whole.

FSDP2 and ZeRO-3 keep a part of each weight on a rank. The trainer gathers a weight for the module that uses it, and
frees it afterwards. So hooks before and after that module look in turn, and the first one that finds the weight whole
uses it. No gather is started here: that is a collective, and ranks that do not take part would block the others.

Legend: V vocabulary, H hidden size.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, Generic, TypeVar

import torch
from torch import Tensor, nn

from rl_hooks.errors import RolloutError
from rl_hooks.sending.registration import is_sharded
from rl_hooks.trainer.capture import Hooked, ModuleHook, writes

_Made = TypeVar("_Made")


class WholeWeight(Hooked, Generic[_Made]):
    """Runs some work on a weight, once in each armed forward, at the first place where the weight is whole.

    `read` returns the weight's present state. It is called before and after each of `modules`, and once more after the
    forward. Work that fails does not disturb the forward: `pop` raises its error.
    """

    def __init__(self, read: Callable[[], Tensor], modules: Sequence[nn.Module]) -> None:
        super().__init__()
        #: Wall time of all work.
        self.seconds = 0.0
        self._read: Final = read
        self._work: Callable[[Tensor], _Made] | None = None
        self._ready: Callable[[], bool] = lambda: True
        #: How often the weight had been written to when the forward began; None: that cannot be known.
        self._writes: int | None = None
        self._made: _Made | None = None
        self._errors: list[Exception] = []
        for module in modules:
            # Before it, for who shards after our hooks were registered; after it, for who sharded earlier.
            self._handles.append(module.register_forward_pre_hook(ModuleHook(self._at)))
            self._handles.append(module.register_forward_hook(ModuleHook(self._at)))

    @contextmanager
    def armed(self, work: Callable[[Tensor], _Made], ready: Callable[[], bool] = lambda: True) -> Iterator[None]:
        """Do `work` in the forward that happens inside, or right after it, but not before `ready` returns True.

        `pop` raises RolloutError if an optimizer's step has changed the weight before `work` was done. (A write through
        `.data` is not seen.)
        """
        self.clear()
        self._work, self._ready = work, ready
        try:
            self._writes = _writes(self._read())
        except Exception:  # noqa: BLE001 - `look` meets the error again, and keeps it
            self._writes = None
        try:
            yield
            self.look(late=True)
        finally:
            self._work = None

    def pop(self) -> _Made | None:
        """The result of the work; None if the weight was never whole. Raises the work's error."""
        made, errors = self._made, self._errors
        self.clear()
        if errors:
            raise errors.pop()  # as in `FeatureCapture.pop`
        return made

    def look(self, *, late: bool = False) -> None:
        """Do the work if the weight is whole now, unless it was done in this forward."""
        if self._work is None or not self._ready():
            return
        started = time.perf_counter()
        try:
            weight = self._read()
            if is_sharded(weight):
                return
            if late:
                self._refuse_change(weight)
            work, self._work = self._work, None
            self._made = work(weight.detach())
        except Exception as error:  # noqa: BLE001 - nothing of ours is raised into the trainer's forward; pop raises it
            self._work = None
            self._errors.append(error.with_traceback(None))  # whose frames hold the trainer's tensors
        finally:
            self.seconds += time.perf_counter() - started

    def _refuse_change(self, weight: Tensor) -> None:
        if self._writes not in (None, _writes(weight)):
            raise RolloutError(
                f"lm_head or the embedding, {list(weight.shape)}, was changed inside `capture`, before it could be "
                "read: it is no longer of this policy_version. Keep the optimizer's step out of `capture`"
            )

    def clear(self) -> None:
        """Let go of everything from the last forward."""
        self._made, self._errors = None, []

    def _at(self, _module: nn.Module, *_: Any) -> None:
        # Compiled code cannot run the work. If the weight is whole anyway, the work is done after the forward.
        if not torch.compiler.is_compiling():
            self.look()


def _writes(weight: Tensor) -> int | None:
    """`writes` of a whole matrix; None of another."""
    return None if is_sharded(weight) else writes(weight)
