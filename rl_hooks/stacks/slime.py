"""slime's and miles' Megatron actor with the hook in it: two options of their own command line name its functions.

--custom-megatron-before-log-prob-hook-path rl_hooks.stacks.slime.before_log_prob
--custom-megatron-before-train-step-hook-path rl_hooks.stacks.slime.before_train_step

Both are needed: where one optimizer step follows a rollout, slime has no pass for old log-probabilities by default. The
second also puts the hook's numbers (`draftalign/...`) into their own log, by the functions that they log with. Of
their modules one name is wrapped (`get_batch`, which both forwards call), and the forward of the model that they give
us. Written against slime 624b824a and miles 31f1ca96. Four questions are answered here:

- tokens and mask: the packed micro-batch, with the sampler's log-probabilities, as older weights may have drawn tokens;
- version: the number of the rollout that the weights are about to be trained on (`rollout_id`);
- which forward: that of old log-probabilities; without one, those of the first optimizer step after the rollout. Not
  the reference's, not a teacher's, not a critic's;
- which rank sends: rank 0 of each tensor-parallel group; the first of these groups registers the run.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any, Final
from weakref import WeakKeyDictionary

import torch
from torch import nn

from rl_hooks.errors import UnsupportedTrainerError
from rl_hooks.stacks.environment import attached
from rl_hooks.trainer.base import captured
from rl_hooks.trainer.megatron.hook import MegatronHook, MegatronKeywords, attach

#: Where each of them makes a forward of a micro-batch. A process has one of the two.
MODULES: Final = ("slime.backends.megatron_utils.model", "miles.backends.megatron_utils.model")
#: Where each of them logs, and where it numbers what it logs of a rollout.
LOGS: Final = {
    "slime.observability.logging_utils": "slime.observability.metric_utils",
    "miles.utils.tracking_utils.tracking": "miles.utils.metric_utils",
}
#: Asked for beside what they ask `get_batch` for; None where the rollouts have none.
WANTED: Final = ("rollout_log_probs", "local_raw_reward", "source_names")
_UNKNOWN: Final = "before the first training after a resume, or without --custom-megatron-before-train-step-hook-path"


def micro_batch_rollouts(batch: dict[str, Any]) -> dict[str, Any]:
    """What `MegatronHook.capture` is to be told of a micro-batch: one packed row [1, T], padded at its end."""
    tokens, lengths, rewards = batch["tokens"], batch["total_lengths"], batch["local_raw_reward"]
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    generated = torch.zeros_like(tokens, dtype=torch.bool)
    logprobs = torch.full_like(tokens, math.nan, dtype=torch.float32)
    parts = zip(bounds[1:].tolist(), batch["loss_masks"], batch["rollout_log_probs"], strict=True)
    for end, mask, of_response in parts:
        generated[0, end - len(mask) : end] = mask.bool()
        logprobs[0, end - len(mask) : end] = of_response
    named = rewards is not None and all(isinstance(reward, int | float) for reward in rewards)
    return {
        "input_ids": tokens,
        "cu_seqlens": bounds,
        "loss_mask": generated,
        "logprobs": logprobs,
        "rewards": rewards if named else None,
        "strata": batch["source_names"],
    }


class _Actor:
    """The hook on one model, and which of its forwards are captured."""

    def __init__(self, hook: MegatronHook, args: Any, model: nn.Module, module: Any) -> None:
        self.hook, self._args = hook, args
        #: Of the weights now, and of those that the next rollout's training begins with; None: not known.
        self.version: int | None = None
        self.coming: int | None = args.start_rollout_id  # which a resumed actor is not told
        #: Whether the forwards that are captured have gradients; None: none is captured.
        self.gradients: bool | None = None
        self.passed = False  # the rollouts to be trained on next have been captured
        self._batch: dict[str, Any] | None = None
        forward, get_batch = model.forward, module.get_batch

        def noted(data_iterator: Any, keys: Sequence[str], *rest: Any, **more: Any) -> Any:
            self._batch = get_batch(data_iterator, [*keys, *WANTED], *rest, **more)
            return self._batch

        def seen(*inputs: Any, **more: Any) -> Any:
            batch, self._batch = self._batch, None
            wanted = batch is not None and torch.is_grad_enabled() is self.gradients
            with captured(hook if wanted else None, self._told, batch):
                return forward(*inputs, **more)

        module.get_batch = noted
        model.forward = seen

    def _told(self, batch: dict[str, Any]) -> dict[str, Any] | None:
        """What `capture` is to be told, the same on every tensor-parallel rank; None where nothing is captured."""
        why = {
            "images are in them, which a drafter cannot embed": bool(batch["multimodal_train_inputs"]),
            "they have no log-probabilities of the sampler's": batch["rollout_log_probs"] is None,
            f"their version is not known ({_UNKNOWN})": self.version is None,
        }
        for reason in (reason for reason, found in why.items() if found):
            self.hook.tally.warn(reason, f"rollouts are left out: {reason}")
            return None
        args = self._args
        sampling = {"temperature": args.rollout_temperature, "top_p": args.rollout_top_p, "top_k": args.rollout_top_k}
        return {**micro_batch_rollouts(batch), **sampling, "policy_version": self.version}

    def log(self, rollout_id: int) -> None:
        """Put the hook's numbers into the trainer's own log, on the one rank that logs."""
        for log, numbers in LOGS.items():
            if self.hook.leads and log in sys.modules:
                step = {"rollout/step": sys.modules[numbers].compute_rollout_step(self._args, rollout_id)}
                sys.modules[log].log(self._args, self.hook.metrics() | step, step_key="rollout/step")


_actors: WeakKeyDictionary[nn.Module, _Actor | None] = WeakKeyDictionary()


def _attach(args: Any, model: nn.Module, options: dict[str, Any]) -> _Actor:
    from transformers import AutoConfig

    module = next((sys.modules[name] for name in MODULES if name in sys.modules), None)
    if module is None or not hasattr(module, "get_batch"):
        raise UnsupportedTrainerError(f"there is no get_batch in {' or '.join(MODULES)}: another slime, or miles")
    if getattr(args, "qkv_format", None) not in (None, "thd"):  # slime has no other
        raise UnsupportedTrainerError(f"qkv_format {args.qkv_format}: only packed rows (thd)")
    if getattr(args, "keep_old_actor", False):
        raise UnsupportedTrainerError("--keep-old-actor: the pass is of older weights than its rollouts' number says")
    config = AutoConfig.from_pretrained(args.hf_checkpoint, trust_remote_code=True)  # as they read it themselves
    return _Actor(attach(model, options.pop("url"), config=config, **options), args, model, module)


def _actor(args: Any, models: Sequence[nn.Module]) -> _Actor | None:
    """The model's; None for a critic, and where attaching failed. (Several models are pipeline stages: refused.)"""
    model = models[0]
    if getattr(model, "role", "actor") != "actor":
        return None
    if model not in _actors:
        rank = torch.distributed.get_rank()
        _actors[model] = attached("slime or miles", rank, lambda said: _attach(args, model, said), MegatronKeywords)
    return _actors[model]


def before_log_prob(args: Any, model: Sequence[nn.Module], store_prefix: str) -> None:
    """For `--custom-megatron-before-log-prob-hook-path`: the pass that follows is the policy's, or another's."""
    # Attach before a pass of the policy's: before another's the model has other weights, which would be registered.
    actor = _actors.get(model[0]) if store_prefix else _actor(args, model)
    if actor is None:
        return
    actor.gradients = None if store_prefix else False
    if not store_prefix:  # a second one without a training between: the other option is not given
        actor.version, actor.passed = None if actor.passed else actor.coming, True


def before_train_step(args: Any, rollout_id: int, step_id: int, model: Sequence[nn.Module], *_: Any) -> None:
    """For `--custom-megatron-before-train-step-hook-path`: the first step is captured where no pass was before it."""
    actor = _actor(args, model)
    if actor is None:
        return
    if step_id and actor.gradients:
        actor.hook.tally.warn("later steps", "rollouts of later steps are left out: the weights have moved since")
    actor.gradients = True if step_id == 0 and not actor.passed else None
    if step_id == 0:
        actor.version, actor.coming, actor.passed = rollout_id, rollout_id + 1, False
        actor.hook.guard(actor.log, rollout_id)
