"""prime-rl's trainer with the hook in it: start this module where you start `prime_rl.trainer.rl.train`.

>>> torchrun --nproc-per-node=8 -m rl_hooks.trainer.stacks.prime_rl @ trainer.toml   # with DRAFTALIGN_URL set

In that module three names are wrapped, and nothing else of prime-rl is. Written against prime-rl 0.8.0. Four questions
are answered:

- tokens and mask: the packed micro-batches, and of them what the sampler drew: not what only the `ce` loss trains on.
  Older weights may have drawn the tokens, so the sampler's log-probabilities (`inference_logprobs`) are sent;
- version: that of the weights of the forward, as prime-rl numbers its broadcasts: a step less than the batch's;
- which forward: the update's, which is the only one; the optimizer steps after all micro-batches of a batch;
- which rank sends: each its own rollouts, as data is parallel; rank 0 registers the run.
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import logging
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from rl_hooks.errors import UnsupportedTrainerError
from rl_hooks.trainer.hook import DrafterHook
from rl_hooks.trainer.stacks.environment import attached

TRAINER: Final = "prime_rl.trainer.rl.train"
_log = logging.getLogger("rl_hooks")


def micro_batch_rollouts(input_ids: Tensor, micro_batch: dict[str, Any]) -> dict[str, Any]:
    """What `DrafterHook.capture` is to be told of a micro-batch, whose forward is over `input_ids` [1, T]."""
    if not torch.equal(input_ids.cpu(), micro_batch["input_ids"]):
        raise UnsupportedTrainerError("this forward is not over the tokens of the next micro-batch of the data loader")
    drawn = micro_batch["loss_mask"]
    rl, ref_kl = micro_batch["rl_weights"], micro_batch["ref_kl_weights"]
    if rl is not None or ref_kl is not None:  # as prime-rl tells tokens with log-probabilities of a sampler from others
        sampled = drawn if rl is None else rl != 0
        drawn = drawn & (sampled if ref_kl is None else sampled | (ref_kl != 0))
    temperatures = set(micro_batch["temperatures"][drawn].tolist())
    if len(temperatures) > 1:
        raise UnsupportedTrainerError(f"rollouts of several temperatures in one micro-batch: {sorted(temperatures)}")
    bounds = torch.tensor([0, *micro_batch["sequence_lengths"]]).cumsum(0)
    # prime-rl pads the row within its last sequence, where positions begin again.
    places = torch.cat([torch.arange(end - begin) for begin, end in pairwise(bounds.tolist())])[None]
    return {
        "input_ids": input_ids,
        "cu_seqlens": bounds,
        "attention_mask": places == micro_batch["position_ids"],
        "loss_mask": drawn,
        "logprobs": micro_batch["inference_logprobs"],
        "temperature": temperatures.pop() if temperatures else 1.0,
    }


class _Run:
    """This process's hook, the micro-batches that it is to see, and of which version the weights are."""

    def __init__(self) -> None:
        self.hook: DrafterHook | None = None
        self.version = -1
        self._waiting: Iterator[dict[str, Any]] = iter(())

    def attach(self, model: Any, parallel: Any, options: dict[str, Any]) -> DrafterHook:
        if parallel.cp_enabled:
            raise UnsupportedTrainerError("context parallelism gives each rank a part of a row: set model.cp to 1")
        return DrafterHook(model, **options, rank=dist.get_rank(), world_size=dist.get_world_size())

    def received(self, micro_batches: list[dict[str, Any]]) -> None:
        """A batch is about to be trained on."""
        self._waiting = iter(list(micro_batches))

    def told(self, hook: DrafterHook, input_ids: Tensor) -> dict[str, Any] | None:
        """What `capture` is to be told of the forward over `input_ids`; None: it is not captured."""
        micro_batch = next(self._waiting, None)
        if micro_batch is None:
            hook.tally.warn("no batch", "forwards without a micro-batch of prime-rl's DataLoader (fake data) are left out")
            return None
        if micro_batch.get("mm_kwargs"):
            hook.tally.warn("images", "rollouts with images are left out: a drafter cannot embed them")
            return None
        return {**micro_batch_rollouts(input_ids, micro_batch), "policy_version": self.version}


def extend(train: Any) -> None:
    """Have prime-rl's module `prime_rl.trainer.rl.train` send rollouts, by what it calls: in place."""
    setup, loader, forward, run = train.setup_model, train.DataLoader, train.forward, _Run()

    @functools.wraps(setup)
    def setup_model(config: Any, parallel_dims: Any, *args: Any, **more: Any) -> Any:
        model = setup(config, parallel_dims, *args, **more)
        run.hook = attached("prime-rl", dist.get_rank(), functools.partial(run.attach, model, parallel_dims))
        return model

    class DataLoader(loader):  # type: ignore[misc]
        def __init__(self, output_dir: Any, start_step: int, *args: Any, **more: Any) -> None:
            super().__init__(output_dir, start_step, *args, **more)
            run.version = start_step - 2  # a batch brings it to that of the weights: the step before

        def get_batch(self) -> Any:
            micro_batches = super().get_batch()
            run.version += 1
            if (hook := run.hook) is not None:
                hook.guard(run.received, micro_batches)
                if dist.get_rank() == 0:  # prime-rl's monitors are rank 0's
                    hook.guard(lambda: asyncio.run(train.monitors.log(hook.metrics(), step=run.version + 1)))
            return micro_batches

    @functools.wraps(forward)
    def captured(model: Any, input_ids: Any, *args: Any, **more: Any) -> Any:
        hook = run.hook
        told = None if hook is None else hook.guard(run.told, hook, input_ids)
        if hook is None or told is None:
            return forward(model, input_ids, *args, **more)
        with hook.capture(**told):
            return forward(model, input_ids, *args, **more)

    train.setup_model, train.DataLoader, train.forward = setup_model, DataLoader, captured


def main() -> None:
    """prime-rl's trainer, extended. It trains without us where it cannot be."""
    train = importlib.import_module(TRAINER)
    try:
        extend(train)
    except Exception:  # noqa: BLE001 - the trainer goes on without us
        _log.exception("draftalign is OFF: this prime-rl cannot be extended; it was written against prime-rl 0.8.0")
    train.main()


if __name__ == "__main__":
    main()
