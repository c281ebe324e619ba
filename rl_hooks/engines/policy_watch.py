"""Whether an engine's policy is still the one that its tap registered. The tap cannot follow a policy that moves.

Two ways to notice, because RL stacks write weights in many:

* `on_reload` wraps what loads a policy in a vLLM worker (0.32): the model's `load_weights` (verl, OpenRLHF, NeMo-RL,
  TRL, vLLM's own weight transfer), the runner's `reload_weights`, `start_weight_update`, and what discards weights:
  `sleep` of level 2 and `discard`. Loading the drafter goes through none of them.
* `WeightSample` compares some thousand weights with what they were. It finds what is copied into parameters directly
  (prime-rl), or whatever else no name gives away.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Collection
from typing import Any, Final

import torch
from torch import Tensor, nn

from rl_hooks.sending.copies import HostCopies

log = logging.getLogger("draftalign.tap")

#: Parameters looked at, and elements of each. A step of RL leaves most bfloat16 weights bit-equal, so a few rows could
#: miss it; of 16384, a change of one weight in a thousand misses all with probability e^-16.
_PARAMETERS: Final = 32
_ELEMENTS: Final = 512


class WeightSample:
    """Some weights of a model as they are now, to compare with what they are later."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        # Experts move between GPUs while a policy stays the same.
        found = [(name, p) for name, p in model.named_parameters() if _readable(p) and "experts" not in name]
        last = len(found) - 1
        chosen = {round(i * last / (_PARAMETERS - 1)) for i in range(_PARAMETERS)} if found else set()
        self._chosen = [(found[i][0], found[i][1].shape, found[i][1].dtype) for i in sorted(chosen)]
        taken = self._take()
        self._then = None if taken is None else taken.cpu()

    def look(self) -> Callable[[], bool]:
        """Take the weights as they are now, without waiting for the device.

        What is returned waits for them, and tells whether they are the same as at first. Call this where a forward is
        about to read the weights: those of an engine that sleeps must not be touched.
        """
        taken = self._take()
        if taken is None:
            return lambda: False
        copies = HostCopies({"weights": taken})

        def unchanged() -> bool:
            return self._then is not None and torch.equal(copies.wait()["weights"], self._then)

        return unchanged

    @torch.inference_mode()
    def _take(self) -> Tensor | None:
        """uint8 [bytes]; None where a parameter is not what it was: gone, on another device, of another layout."""
        parts = []
        for name, shape, dtype in self._chosen:
            try:
                parameter = self._model.get_parameter(name)
            except AttributeError:
                return None
            if not _readable(parameter) or (parameter.shape, parameter.dtype) != (shape, dtype):
                return None
            flat = parameter.detach().view(-1)
            parts.append(flat[:: max(1, flat.numel() // _ELEMENTS)][:_ELEMENTS].contiguous().view(torch.uint8))
        return torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8)


def on_reload(worker: Any, stop: Callable[[str], None]) -> None:
    """Call `stop` with what happens, before anything loads or discards the policy's weights in this vLLM worker."""
    runner = worker.model_runner

    def say(what: str) -> Callable[..., None]:
        return lambda *_, **__: stop(what)

    def sleep(level: int = 1, *_: Any, **__: Any) -> None:
        if level >= 2:  # level 1 brings back the same weights
            stop("sleep of level 2")

    def discard(tags: Collection[str] = (), *_: Any, **__: Any) -> None:
        if "weights" in tags:
            stop("discard of the weights")

    _before(runner.get_model(), "load_weights", say("load_weights"))
    _before(runner, "reload_weights", say("reload_weights"))
    _before(worker, "start_weight_update", say("start_weight_update"))
    _before(worker, "sleep", sleep)
    _before(worker, "discard", discard)


def _before(owner: Any, method: str, happens: Callable[..., None]) -> None:
    """Have `happens` called with the arguments of every call of this object's method, where this vLLM has it."""
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
