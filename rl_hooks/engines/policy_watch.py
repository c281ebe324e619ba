"""Which version of the policy's weights an engine holds, also where a change is not announced.

RL stacks write weights in many ways. Two checks find them:

* `on_reload` wraps what loads a policy in a vLLM worker (0.32): the model's `load_weights` (verl, OpenRLHF, NeMo-RL,
  TRL, vLLM's own weight transfer), the runner's `reload_weights`, `start_weight_update`, and what discards weights:
  `sleep` of level 2 and `discard`. Loading the drafter goes through none of them.
* `WeightSample` compares some thousand weights with earlier values. It finds weights that are copied into parameters
  directly (prime-rl), which no method's name shows.

`PolicyVersions` turns what they find, and the weight version that vLLM was told, into a number.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Final, Self

import torch
from torch import Tensor, nn

from rl_hooks.sending.copies import HostCopies

log = logging.getLogger("draftalign.tap")

#: Events after which the weights are gone.
_DEEP_SLEEP: Final = "sleep of level 2"
_DISCARD: Final = "discard of the weights"
#: Names of vLLM's worker (0.32) by which updates and sleeps are noticed.
_USED: Final = ("start_weight_update", "_weight_update_active", "sleep", "wake_up")
#: A weight version with more digits is no count of updates.
_MAX_DIGITS: Final = 15

#: Parameters that are sampled, and elements of each. A step of RL leaves most bfloat16 weights bit-equal, so a small
#: sample could miss it. A change of one weight in a thousand misses all of 16384 with probability e^-16.
_PARAMETERS: Final = 32
_ELEMENTS: Final = 512
#: Elements are compared as these, by their bytes: a device may not know how to join those of 8 bits.
_WORDS: Final = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(slots=True)
class PolicyVersions:
    """The version of the weights that an engine holds: the number that vLLM was told, else updates are counted.

    vLLM's weight version (0.32: `update_weight_version`) is any text. One that is no number counts as an update when it
    changes. Weights may move a moment before the framework tells their number: counting on gives the same number then.
    """

    current: int
    _named: str | None

    @classmethod
    def start(cls, named: str | None, newest: int) -> Self:
        """`newest`: the newest version that the service knows of this run, 0 for a new run."""
        number = _number(named)
        return cls(newest if number is None else number, named)

    def next(self, named: str | None, *, moved: bool) -> int:
        """The version from now on, where vLLM says `named`; `moved`: the weights have changed since the last call."""
        number = _number(named)
        if named != self._named and number is not None:
            self.current = number
        elif moved or named != self._named:
            self.current += 1
        self._named = named
        return self.current


def _number(named: str | None) -> int | None:
    return int(named) if named and named.isascii() and named.isdecimal() and len(named) <= _MAX_DIGITS else None


class PolicyWatch:
    """Notices in one vLLM worker that the policy's weights have changed, and numbers them once asked to.

    `changing` is called before weights change (as far as that is announced), `leaving` before a sleep of any level, in
    which they are not in their memory, `noticed` after any sign of a change, from any thread: the next `settle` counts
    it.
    `agree(same)`: whether all ranks found their weights the same: each sees a slice, and all must count alike.
    """

    def __init__(self, worker: Any, agree: Callable[[bool], bool] = lambda same: same) -> None:
        self._agree = agree
        #: The worker's weights are not in its memory: they must not be read.
        self.asleep = False
        #: They were discarded, the drafter's with them. Reset when the drafter is loaded again.
        self.lost = False
        #: Since vLLM's start, weights have been loaded or named.
        self.updated = False
        self.weights = WeightSample(worker.model_runner.get_model())
        self.changing: Callable[[], object] = lambda: None
        self.leaving: Callable[[], None] = lambda: None
        self.noticed: Callable[[], None] = lambda: None
        self._versions: PolicyVersions | None = None
        self._moved = False
        self._named: str | None = None
        if missing := [name for name in _USED if not hasattr(worker, name)]:
            log.warning("draftalign: vLLM's worker has no %s: updates may go unnoticed", ", ".join(missing))
        on_reload(worker, self._announced)
        before_call(worker, "sleep", self._sleeps)
        before_call(worker, "wake_up", self._wakes)

    @property
    def version(self) -> int | None:
        """The version of the weights at the last `settle`; None before `number`, unless vLLM names one."""
        return None if self._versions is None else self._versions.current

    def number(self, named: str | None, newest: int) -> int:
        """Number the weights from now on. The present ones are `newest` of the service, or as vLLM `named` them."""
        self._versions = PolicyVersions.start(named, newest)
        return self._versions.current

    def settle(self, named: str | None) -> bool:
        """Bring the version up to date; the weights must be readable. Call it before a forward reads them.

        True: the weights were changed without an announcement, so the newest rows may be of either weights.
        """
        try:
            same = not self.weights.differed and (self._moved or self.weights.look()())
        except Exception:
            self._agree(False)  # the other ranks wait for this one, and will count a change
            self._moved = True  # so this one counts it, too
            raise
        found = not self._agree(same)
        moved, self._moved = self._moved or found, False
        if moved:
            self.weights.retake()
        self.updated |= found or named not in (None, self._named)
        self._named = named
        if self._versions is not None:
            self._versions.next(named, moved=moved)
        elif _number(named) is not None:
            self.number(named, 0)
        return found

    def _sleeps(self, *_: Any, **__: Any) -> None:
        self.asleep = True
        self.leaving()

    def _wakes(self, tags: Collection[str] | None = None, *_: Any, **__: Any) -> None:
        self.asleep = self.asleep and tags is not None and "weights" not in tags

    def _announced(self, what: str) -> None:
        log.debug("draftalign: the policy changes: %s", what)
        self._moved = True
        if what in (_DEEP_SLEEP, _DISCARD):
            self.lost = True
        else:
            self.updated = True
        self.changing()
        self.noticed()


class WeightSample:
    """Some weights of a model as they are now, to compare with later ones."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._then = self._differs_from = torch.empty(0, dtype=torch.uint8)
        self._chosen = self._choose()
        self.retake()

    @property
    def differed(self) -> bool:
        """Whether a look has found other weights since the last `retake`. Looks that began before it do not count."""
        return self._differs_from is self._then

    def retake(self) -> None:
        """Compare with the weights as they are now from now on."""
        taken = self._take()
        if taken is None:  # an update has left a parameter that cannot be read: choose among the others
            self._chosen = self._choose()
            taken = self._take()
            assert taken is not None  # noqa: S101 - those that can be read were chosen
        self._then = taken.cpu()

    def look(self) -> Callable[[], bool]:
        """Start to copy the sampled weights as they are now, without waiting for the device.

        The returned function waits for the copy, and tells whether they are as when last taken. Call `look` only when
        a forward is about to read the weights: the weights of an engine that sleeps must not be read.
        """
        taken, then = self._take(), self._then
        copies = None if taken is None else HostCopies({"weights": taken})

        def unchanged() -> bool:
            same = copies is not None and torch.equal(copies.wait()["weights"], then)
            if not same:
                self._differs_from = then
            return same

        return unchanged

    def _choose(self) -> list[tuple[Callable[[nn.Module], Any], torch.Size, torch.dtype]]:
        # Experts move between GPUs while a policy stays the same.
        found = [(name, p) for name, p in self._model.named_parameters() if _readable(p) and "experts" not in name]
        if not found:
            log.warning("draftalign: no weight of the policy can be read: only updates that are announced are noticed")
        last = len(found) - 1
        chosen = {round(i * last / (_PARAMETERS - 1)) for i in range(_PARAMETERS)} if found else set()
        # Every look asks for each again, as it may be another object: `get_parameter` takes five times as long.
        return [(attrgetter(found[i][0]), found[i][1].shape, found[i][1].dtype) for i in sorted(chosen)]

    @torch.inference_mode()
    def _take(self) -> Tensor | None:
        """uint8 [bytes]; None where a parameter is gone, on another device, or of another layout than at first."""
        parts: dict[torch.dtype, list[Tensor]] = {}
        for named, shape, dtype in self._chosen:
            try:
                parameter = named(self._model)
                same = _readable(parameter) and (parameter.shape, parameter.dtype) == (shape, dtype)
            except AttributeError:  # it is gone, or no tensor any more
                return None
            if not same:
                return None
            size = parameter.numel()
            some = parameter.as_strided(
                (min(size, _ELEMENTS),), (max(1, size // _ELEMENTS),), parameter.storage_offset()
            )
            words = _WORDS.get(dtype.itemsize, dtype)
            parts.setdefault(words, []).append(some.view(words))
        whole = [torch.cat(one).view(torch.uint8) for one in parts.values()]
        return torch.cat(whole) if whole else torch.empty(0, dtype=torch.uint8)


def on_reload(worker: Any, changes: Callable[[str], None]) -> None:
    """Call `changes` with the event before this vLLM worker loads or discards the policy's weights."""
    runner = worker.model_runner

    def announce(event: str) -> Callable[..., None]:
        return lambda *_, **__: changes(event)

    def sleep(level: int = 1, *_: Any, **__: Any) -> None:
        if level >= 2:  # level 1 brings back the same weights
            changes(_DEEP_SLEEP)

    def discard(tags: Collection[str] = (), *_: Any, **__: Any) -> None:
        if "weights" in tags:
            changes(_DISCARD)

    before_call(runner.get_model(), "load_weights", announce("load_weights"))
    before_call(runner, "reload_weights", announce("reload_weights"))
    before_call(worker, "start_weight_update", announce("start_weight_update"))
    before_call(worker, "sleep", sleep)
    before_call(worker, "discard", discard)


def before_call(owner: Any, method: str, happens: Callable[..., None]) -> None:
    """Call `happens` before each call of this object's method, with its arguments, if this vLLM has the method."""
    original = getattr(owner, method, None)
    if original is None:
        return

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        try:
            happens(*args, **kwargs)
        except Exception as error:  # noqa: BLE001 - a trainer's weight update must not feel this
            log.warning("draftalign tap: %s was not understood: %r", method, error)
        return original(*args, **kwargs)

    setattr(owner, method, wrapped)


def _readable(parameter: Tensor) -> bool:
    return parameter.numel() > 0 and parameter.device.type != "meta" and parameter.is_contiguous()
