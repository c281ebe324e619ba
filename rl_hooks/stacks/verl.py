"""verl's FSDP engine with the hook in it. `VERL_ENGINE_VENDOR=draftalign` picks it, `DRAFTALIGN_URL` says the service.

verl loads this in each of its processes, through the entry point "verl.plugins", and asks its own engine registry for
the vendor: nothing of verl is patched. Written against verl 0.9.1. Four questions are answered here:

- tokens and mask: nested tensors of the micro-batch; the policy generated what `loss_mask` says of the response;
- version: the RL steps that this engine's weights have seen (its learning rate's schedule moves once a step);
- which forward: that of the old log-probabilities. Not the update's, not the reference's, not one without the adapter;
- which rank sends: each its own rollouts, as data is parallel; rank 0 registers the run.

verl logs a plugin that fails to load at DEBUG and goes on without it. So this one says that it is on.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch

from rl_hooks.errors import ENGINE_INSTEAD, UnsupportedTrainerError
from rl_hooks.sending.tally import Tally
from rl_hooks.stacks.environment import attached
from rl_hooks.trainer.base import captured, left_out_for_images, one_temperature
from rl_hooks.trainer.hook import DrafterHook

VENDOR: Final = "draftalign"
_log = logging.getLogger("rl_hooks")


def micro_batch_rollouts(micro_batch: Any) -> dict[str, Any]:
    """What `DrafterHook.capture` is to be told of a micro-batch of verl's; its responses are padded, or nested."""
    ids, responses = list(micro_batch["input_ids"].unbind()), micro_batch["responses"]
    lengths = [len(one) for one in responses.unbind()]
    if not responses.is_nested:
        lengths = micro_batch["attention_mask"][:, -responses.shape[1] :].sum(1).tolist()
    said = micro_batch["temperature"]
    # The kind of each prompt, by which verl chooses the reward function; as tensordict holds it, or plain.
    found = micro_batch.get("data_source", [])
    sources = [str(one if isinstance(one, str) else getattr(one, "data", one)) for one in found]

    def over_rollouts(name: str) -> torch.Tensor | None:
        of_responses = micro_batch.get(name)
        if of_responses is None:
            return None
        unknown = math.nan if of_responses.is_floating_point() else 0
        rows = zip(ids, lengths, of_responses.unbind(), strict=True)
        return torch.cat([part for i, n, v in rows for part in (v.new_full((len(i) - n,), unknown), v[:n])])

    return {
        "input_ids": torch.cat(ids),
        "cu_seqlens": torch.tensor([0, *(len(one) for one in ids)]).cumsum(0),
        "loss_mask": over_rollouts("loss_mask"),
        "logprobs": over_rollouts("rollout_log_probs"),
        "strata": sources if len(sources) == len(ids) else None,
        "temperature": one_temperature(said.flatten().tolist() if isinstance(said, torch.Tensor) else [float(said)]),
    }


def told_of(micro_batch: Any, tally: Tally) -> dict[str, Any] | None:
    """`micro_batch_rollouts`; None where any has images. (The others of a mixed one have None, or no entries.)"""
    if any(getattr(one, "data", one) for one in micro_batch.get("multi_modal_inputs", [])):
        left_out_for_images(tally)
        return None
    return micro_batch_rollouts(micro_batch)


def register() -> type:
    """Register the engine with verl, and return it. Imports verl."""
    from verl.utils.device import get_device_name as device
    from verl.workers.engine.base import EngineRegistry
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

    @EngineRegistry.register("language_model", ["fsdp", "fsdp2"], device=device(), vendor=VENDOR)
    class DraftalignFSDPEngine(FSDPEngineWithLMHead):  # type: ignore[misc]
        hook: DrafterHook | None = None
        _reference = False
        _passes = 0

        def initialize(self) -> None:
            super().initialize()
            if self.engine_config.forward_only:
                return  # the reference model, or a teacher
            self.hook = attached("verl", self.rank, self._attach)

        def _attach(self, options: dict[str, Any]) -> DrafterHook:
            if self.ulysses_sequence_parallel_size > 1:
                raise UnsupportedTrainerError(f"set ulysses_sequence_parallel_size to 1, or {ENGINE_INSTEAD}")
            if not self.use_remove_padding:
                raise UnsupportedTrainerError("set use_remove_padding to True")
            rank, world_size = self.get_data_parallel_rank(), self.get_data_parallel_size()
            return DrafterHook(self.module, **options, rank=rank, world_size=world_size)

        @contextmanager
        def disable_adapter(self) -> Iterator[None]:
            self._reference = True
            try:
                with super().disable_adapter():
                    yield
            finally:
                self._reference = False

        def forward_step(self, micro_batch: Any, loss_function: Callable[..., Any] | None, forward_only: bool) -> Any:
            hook, wanted = self.hook, forward_only and loss_function is None and not self._reference
            self._passes += wanted
            if hook is not None and not self._passes:
                hook.tally.warn("no pass", "verl updates without a pass for old log-probabilities: nothing is captured")
            with captured(hook if wanted else None, self._told, hook, micro_batch):
                return super().forward_step(micro_batch, loss_function, forward_only)

        def _told(self, hook: DrafterHook, micro_batch: Any) -> dict[str, Any] | None:
            told = told_of(micro_batch, hook.tally)
            return None if told is None else told | {"policy_version": int(self.lr_scheduler.last_epoch)}

        def train_batch(self, data: Any, loss_function: Callable[..., Any]) -> Any:
            output, hook = super().train_batch(data, loss_function), self.hook
            if hook is not None and self.get_data_parallel_rank() == 0 and self.is_mp_src_rank_with_outputs():
                # Lists, as of micro-batches: verl joins those of all ranks, and logs the mean as actor/draftalign/...
                output["metrics"].update({name: [one] for name, one in (hook.guard(hook.metrics) or {}).items()})
            return output

    return DraftalignFSDPEngine


if os.environ.get("VERL_ENGINE_VENDOR") == VENDOR:
    try:
        register()
    except Exception:
        _log.exception("draftalign is OFF: this verl cannot be extended; it was written against verl 0.9.1")
        raise
