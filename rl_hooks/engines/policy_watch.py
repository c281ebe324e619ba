"""Whether an engine's policy is still the one that its tap registered. The tap cannot follow a policy that changes.

RL stacks write weights in many ways. Two checks find them:

* `on_reload` wraps what loads a policy in a vLLM worker (0.32): the model's `load_weights` (verl, OpenRLHF, NeMo-RL,
  TRL, vLLM's own weight transfer), the runner's `reload_weights`, `start_weight_update`, and what discards weights:
  `sleep` of level 2 and `discard`. Loading the drafter goes through none of them.
* `WeightSample` compares some thousand weights with their first values. It finds weights that are copied into
  parameters directly (prime-rl), which no method's name shows.
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

#: Parameters that are sampled, and elements of each. A step of RL leaves most bfloat16 weights bit-equal, so a small
#: sample could miss it. A change of one weight in a thousand misses all of 16384 with probability e^-16.
_PARAMETERS: Final = 32
_ELEMENTS: Final = 512


class WeightSample:
    """Some weights of a model as they are now, to compare with later ones."""

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
        """Start to copy the sampled weights as they are now, without waiting for the device.

        The returned function waits for the copy, and tells whether they are the same as at first. Call `look` only when
        a forward is about to read the weights: the weights of an engine that sleeps must not be read.
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
        """uint8 [bytes]; None where a parameter is gone, on another device, or of another layout than at first."""
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
    """Call `stop` with the event before this vLLM worker loads or discards the policy's weights."""
    runner = worker.model_runner

    def stopper(event: str) -> Callable[..., None]:
        return lambda *_, **__: stop(event)

    def sleep(level: int = 1, *_: Any, **__: Any) -> None:
        if level >= 2:  # level 1 brings back the same weights
            stop("sleep of level 2")

    def discard(tags: Collection[str] = (), *_: Any, **__: Any) -> None:
        if "weights" in tags:
            stop("discard of the weights")

    _before(runner.get_model(), "load_weights", stopper("load_weights"))
    _before(runner, "reload_weights", stopper("reload_weights"))
    _before(worker, "start_weight_update", stopper("start_weight_update"))
    _before(worker, "sleep", sleep)
    _before(worker, "discard", discard)


def _before(owner: Any, method: str, happens: Callable[..., None]) -> None:
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
