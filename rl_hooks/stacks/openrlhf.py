"""OpenRLHF's `Actor` with the hook on it, in DeepSpeed's ZeRO-3 or not, packed or padded.

>>> from rl_hooks.stacks.openrlhf import attach
>>> attach(actor, "http://127.0.0.1:8400", rank=strategy.get_rank(), world_size=strategy.world_size)

`actor` is the policy's `openrlhf.models.Actor`, in the process that trains it; attach before or after
`strategy.prepare`. Written against OpenRLHF 0.11.2. Four questions are answered here:

- tokens and mask: the arguments of `Actor.forward`; its action mask is of the last tokens of each row;
- version: how often the policy was trained between two passes that make experience, from the `global_step` of the
  checkpoint that was loaded; a rank that such a pass may leave out has to be told it (`version`);
- which forward: one without gradients, which makes experience. The reference model is another Actor;
- which rank sends: each its own rollouts; rank 0 registers the run. Ring attention is left out, and said.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from rl_hooks.errors import ENGINE_INSTEAD, UnsupportedTrainerError
from rl_hooks.stacks.environment import attached
from rl_hooks.trainer.base import captured, left_out_for_images
from rl_hooks.trainer.hook import DrafterHook

_log = logging.getLogger("rl_hooks")


def experience_rollouts(
    sequences: Tensor, action_mask: Tensor, attention_mask: Tensor, *, packed: bool, logprobs: Tensor | None = None
) -> dict[str, Any]:
    """What `DrafterHook.capture` is to be told of a forward; a packed one strips the padding of all rows into one.

    `sequences`, `attention_mask` [B, S]; `action_mask`, `logprobs` [B, A] are of each row's last A tokens.
    """
    before = sequences.shape[1] - action_mask.shape[1]
    told = {"loss_mask": pad(action_mask.to(attention_mask.dtype), (before, 0))}  # [B, S]
    if logprobs is not None:
        told["logprobs"] = pad(logprobs, (before, 0))  # [B, S]
    if not packed:
        return {"input_ids": sequences, "attention_mask": attention_mask, **told}
    real = attention_mask.bool()
    bounds = pad(attention_mask.sum(1).cumsum(0), (1, 0))
    return {"input_ids": sequences[real], "cu_seqlens": bounds, **{name: one[real] for name, one in told.items()}}


def attach(
    actor: Any, url: str, *, rank: int, world_size: int, version: Callable[[], int] | None = None, **options: Any
) -> DrafterHook:
    """Send what this Actor's passes for experience see to the service at `url`; returns the hook.

    `options` are those of `DrafterHook`; after a resume, `policy_version` is what versions go on from. `version`: says
    the policy's version at each pass, for ranks that some passes leave out: such a rank cannot count them. Raises
    `UnsupportedTrainerError` for another kind of object.
    """
    return _Policy(actor, url, rank=rank, world_size=world_size, version=version, **options).hook


class _Policy:
    """One Actor with its hook, and how often it was trained."""

    def __init__(
        self,
        actor: Any,
        url: str,
        *,
        version: Callable[[], int] | None = None,
        rank: int,
        world_size: int,
        **options: Any,
    ) -> None:
        missing = [name for name in ("model", "packing_samples", "temperature") if not hasattr(actor, name)]
        if missing:
            raise UnsupportedTrainerError(f"{type(actor).__name__} lacks {missing}: it is no Actor of OpenRLHF 0.11.2")
        self.hook = DrafterHook(actor.model, url, rank=rank, world_size=world_size, **options)
        self._actor, self._forward, self._said = actor, actor.forward, version
        self._named = inspect.signature(actor.forward).parameters.keys()
        self._version, self._trained = int(options.get("policy_version", 0)), False
        actor.forward = self._seen

    def loaded(self, model: Any, states: Any) -> None:
        """A checkpoint was loaded into `model`: its `global_step` is how often the policy had been trained."""
        step = states.get("global_step") if isinstance(states, dict) else None
        if model is self._actor.model and type(step) is int and step >= 0:
            self._version, self._trained = step, False

    def _told(self, sequences: Tensor, action_mask: Any, attention_mask: Any, more: Any) -> dict[str, Any] | None:
        """What `capture` is to be told of a pass for experience; None: it is left out."""
        if more.keys() - self._named:  # the model's inputs beside the text
            left_out_for_images(self.hook.tally)
            return None
        if more.get("ring_attn_group") is not None:
            self.hook.tally.warn(
                "ring", f"passes of ring attention are left out: set ring_attn_size to 1, or {ENGINE_INSTEAD}"
            )
            return None
        if action_mask is None or attention_mask is None:
            self.hook.tally.warn("masks", "a forward without masks was left out")
            return None
        told = experience_rollouts(sequences, action_mask, attention_mask, packed=self._actor.packing_samples)
        now = self._version if self._said is None else self._said()
        return {**told, "policy_version": now, "temperature": self._actor.temperature}

    def _seen(
        self, sequences: Tensor, action_mask: Any = None, attention_mask: Any = None, *args: Any, **more: Any
    ) -> Any:
        trains = torch.is_grad_enabled()
        if self._trained and not trains:  # whatever becomes of this pass
            self._version += 1
        self._trained = trains
        with captured(None if trains else self.hook, self._told, sequences, action_mask, attention_mask, more):
            return self._forward(sequences, action_mask, attention_mask, *args, **more)


def extend(strategy: Any) -> None:
    """Have OpenRLHF's `DeepspeedStrategy` put the hook on each `Actor` that it prepares for training.

    Reference and reward model are not prepared for training, and the critic is no `Actor`. A policy that goes on from a
    checkpoint goes on counting there.
    """
    prepare, load = strategy.prepare, strategy.load_ckpt

    @functools.wraps(prepare)
    def prepared(self: Any, *models: Any) -> Any:
        made = prepare(self, *models)
        try:
            from openrlhf.models import Actor  # now: it may import the strategy's module itself

            for model in models:
                if isinstance(model, tuple) and model and isinstance(model[0], Actor):
                    self.draftalign = attached("OpenRLHF", self.get_rank(), functools.partial(_put_on, self, model[0]))
        except Exception:  # noqa: BLE001 - the trainer goes on without us
            _log.exception("draftalign is OFF: this is no OpenRLHF 0.11.2")
        return made

    @functools.wraps(load)
    def load_ckpt(self: Any, model: Any, *args: Any, **more: Any) -> Any:
        found = load(self, model, *args, **more)
        if (policy := self.draftalign) is not None:
            policy.hook.guard(lambda: policy.loaded(model, found[1]))
        return found

    strategy.draftalign = None  # of one that has prepared no policy
    strategy.prepare, strategy.load_ckpt = prepared, load_ckpt


def _put_on(strategy: Any, actor: Any, options: dict[str, Any]) -> _Policy:
    return _Policy(actor, **options, rank=strategy.get_rank(), world_size=strategy.world_size)
