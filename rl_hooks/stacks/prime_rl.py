"""prime-rl's trainer with the hook in it: start this module where you would start `prime_rl.trainer.rl.train`.

>>> torchrun --nproc-per-node=8 -m rl_hooks.stacks.prime_rl @ trainer.toml     # with DRAFTALIGN_URL set

Of that module three names are wrapped; nothing else of prime-rl is touched. Written against prime-rl 0.8.1.dev67. Four
questions are answered:

- tokens and mask: the packed micro-batches, and of them what the policy drew: not what the `ce` loss alone trains on.
  Older weights may have drawn it, so the sampler's log-probabilities (`inference_logprobs`) are sent;
- version: that of the weights of the forward, as prime-rl numbers what it broadcasts: a step less than the batch's;
- which forward: the update's, the only one. The optimizer steps after all micro-batches of a batch;
- which rank sends: each its own rollouts, as data is parallel; rank 0 registers the run.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import logging
from collections.abc import Iterator, Mapping
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from rl_hooks.errors import ENGINE_INSTEAD, UnsupportedTrainerError
from rl_hooks.stacks.environment import attached
from rl_hooks.trainer.base import captured, left_out_for_images, one_temperature
from rl_hooks.trainer.hook import DrafterHook

TRAINER: Final = "prime_rl.trainer.rl.train"
_log = logging.getLogger("rl_hooks")


def micro_batch_rollouts(input_ids: Tensor, micro_batch: Mapping[str, Any]) -> dict[str, Any]:
    """What `DrafterHook.capture` is to be told of a micro-batch, whose forward is over `input_ids` [1, T]."""
    if not torch.equal(input_ids.cpu(), micro_batch["input_ids"]):
        raise UnsupportedTrainerError("this forward is not over the tokens of the data loader's next micro-batch")
    drawn, rl, ref_kl = (micro_batch[name] for name in ("loss_mask", "rl_weights", "ref_kl_weights"))
    if rl is not None or ref_kl is not None:  # prime-rl's own rule for tokens that have a sampler's log-probabilities
        sampled = drawn if rl is None else rl != 0
        drawn = drawn & (sampled if ref_kl is None else sampled | (ref_kl != 0))
    lengths = micro_batch["sequence_lengths"]
    # The row is padded within its last sequence, where positions begin again.
    places = torch.cat([torch.arange(length) for length in lengths])[None]
    bounds, names = torch.tensor([0, *lengths]).cumsum(0), micro_batch.get("env_names")
    return {
        "input_ids": input_ids,
        "attention_mask": places == micro_batch["position_ids"],
        "cu_seqlens": bounds,
        "loss_mask": drawn,
        "logprobs": micro_batch["inference_logprobs"],
        # prime-rl says of each token which environment its prompt is of; of padding "".
        "strata": [names[begin] for begin in bounds[:-1].tolist()] if names else None,
        "temperature": one_temperature(micro_batch["temperatures"][drawn].tolist()),
    }


class _Run:
    """A process's hook, the micro-batches that it will see, and of which version the weights are."""

    hook: DrafterHook | None = None
    version: int | None = None  # None: not known, as before the first batch
    waiting: Iterator[Mapping[str, Any]] = iter(())

    def attach(self, model: Any, parallel_dims: Any, options: dict[str, Any]) -> DrafterHook:
        if parallel_dims.cp_enabled:
            split = "context parallelism gives a rank a part of each row"
            raise UnsupportedTrainerError(f"{split}: set model.cp to 1, or {ENGINE_INSTEAD}")
        return DrafterHook(model, **options, rank=dist.get_rank(), world_size=dist.get_world_size())

    def told(self, hook: DrafterHook, input_ids: Tensor) -> dict[str, Any] | None:
        micro_batch = next(self.waiting, None)
        if micro_batch is None:
            hook.tally.warn("no batch", "forwards of no micro-batch of prime-rl's DataLoader are left out: fake data")
            return None
        if self.version is None:
            hook.tally.warn("version", "rollouts are left out: this prime-rl's DataLoader is not told its `start_step`")
            return None
        if micro_batch["mm_kwargs"]:
            left_out_for_images(hook.tally)
            return None
        return {**micro_batch_rollouts(input_ids, micro_batch), "policy_version": self.version}


def extend(train: Any) -> None:
    """Have prime-rl's module `prime_rl.trainer.rl.train` send rollouts. In place: its loop looks these names up."""
    setup, loader, run_forward, run = train.setup_model, train.DataLoader, train.forward, _Run()

    def setup_model(config: Any, parallel_dims: Any, *args: Any, **more: Any) -> Any:
        model = setup(config, parallel_dims, *args, **more)
        run.hook = attached("prime-rl", dist.get_rank(), lambda options: run.attach(model, parallel_dims, options))
        return model

    class DataLoader(loader):  # type: ignore[misc, valid-type]
        def __init__(self, *args: Any, **more: Any) -> None:
            super().__init__(*args, **more)
            try:
                step = inspect.signature(loader.__init__).bind(self, *args, **more).arguments["start_step"]
                run.version = step - 2  # its first batch makes this the version of the weights that it meets
            except Exception:  # noqa: BLE001 - another prime-rl; told() says so
                run.version = None

        def get_batch(self) -> Any:
            batch, hook = super().get_batch(), run.hook
            version = run.version = None if run.version is None else run.version + 1
            if hook is not None:
                run.waiting = iter(batch)
                if version is not None and dist.get_rank() == 0:  # the others have no monitors
                    hook.guard(lambda: asyncio.run(train.monitors.log(hook.metrics(), step=version + 1)))
            return batch

    def forward(model: Any, input_ids: Any, *args: Any, **more: Any) -> Any:
        with captured(run.hook, run.told, run.hook, input_ids):
            return run_forward(model, input_ids, *args, **more)

    train.setup_model, train.DataLoader, train.forward = setup_model, DataLoader, forward


def main() -> None:
    """prime-rl's trainer, extended; as it is where it cannot be."""
    train = importlib.import_module(TRAINER)
    try:
        extend(train)
    except Exception:  # noqa: BLE001 - the trainer goes on without us
        _log.exception("draftalign is OFF: this prime-rl cannot be extended; it was written against 0.8.1.dev67")
    train.main()


if __name__ == "__main__":
    main()
