"""What tests of captured rollouts share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from helpers.trainer.hooks_fixtures import Padded, Receiver, as_float, mapped
from torch import nn

from rl_hooks import wire
from rl_hooks.hook import DrafterHook

LENGTHS = [(3, 9), (7, 4), (1, 12), (5, 1)]


TEMPERATURE = 0.7


def inputs(batch: Padded) -> dict[str, Any]:
    """What `capture` takes of a batch."""
    return {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask, "loss_mask": batch.loss_mask}


def run_once(hook: DrafterHook, model: nn.Module, batch: Padded, version: int = 3, **changes: Any) -> torch.Tensor:
    arguments = inputs(batch) | {"policy_version": version, "temperature": TEMPERATURE}
    with torch.no_grad(), hook.capture(**(arguments | changes)):
        logits: torch.Tensor = model(batch.input_ids, attention_mask=batch.attention_mask).logits
    return logits


def sent_file(service: Receiver, hook: DrafterHook, directory: Path) -> wire.MappedFile:
    assert hook.flush(20), hook.stats()
    return mapped(service.rollouts()[-1], directory)


def logprob_gap(file: wire.MappedFile, head: torch.Tensor, temperature: float) -> float:
    """The worker's check: log p of the emitted tokens from last_hidden and the head, against `logprobs`; mean, nats."""
    ids, mask = torch.from_numpy(file.array("input_ids").astype(np.int64)), file.array("loss_mask") == 1
    logits = as_float(file, "last_hidden") @ head.detach().float().T / temperature
    lse = torch.from_numpy(file.array("logsumexp").copy())
    again = logits[:-1].gather(1, ids[1:, None])[:, 0] - lse[:-1]
    return float((again - torch.from_numpy(file.array("logprobs").copy())[1:]).abs()[mask[1:]].mean())


def gathered(model: nn.Module, whole: torch.Tensor) -> list[Any]:
    """ZeRO-3's behaviour: lm_head is whole while it runs, and empty otherwise."""
    inner: Any = model

    def fill(*_: Any) -> None:
        inner.lm_head.weight.data = whole

    def empty(*_: Any) -> None:
        inner.lm_head.weight.data = torch.empty(0)

    empty()
    head: nn.Module = inner.lm_head
    return [head.register_forward_pre_hook(fill), head.register_forward_hook(empty)]
