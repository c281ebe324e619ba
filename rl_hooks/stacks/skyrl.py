"""SkyRL's FSDP policy workers with the hook on them; `rl_hooks.stacks.on_ray` says how they get it.

Written against SkyRL 0.3.0. Four questions are answered here:

- tokens and mask: the `Experience` of each micro-batch, and its loss mask: what a tool said is context. (The pass for
  old log-probabilities has no such mask.) With `fully_async`, older weights may have drawn some of the tokens, so the
  engines' log-probabilities are needed;
- version: how often trained weights were sent to the engines (`broadcast_to_inference_engines`): that of the weights of
  the forward, which gives the features. SkyRL's trainers send them once a step, and load a checkpoint of step N before
  they send its weights: so a policy that resumes goes on from N;
- which forward: the update's, until its first optimizer step: after it the weights are of no version. Those of later
  mini-batches and epochs are counted as `skipped_stale`;
- which rank sends: each its own rollouts; rank 0 registers the run.
"""

from __future__ import annotations

import functools
import inspect
import re
from typing import Any, Final

import torch.distributed as dist

from rl_hooks.errors import ENGINE_INSTEAD, UnsupportedTrainerError
from rl_hooks.stacks.environment import attached
from rl_hooks.stacks.openrlhf import experience_rollouts
from rl_hooks.trainer.base import captured, left_out_for_images
from rl_hooks.trainer.hook import DrafterHook

#: A policy's part of a checkpoint, as SkyRL's trainers call it.
_CHECKPOINT: Final = re.compile(r".*global_step_(\d+)/policy/?")


class _SkyrlPolicy:
    """One worker's hook, and which weights it trains."""

    def __init__(self, worker: Any, options: dict[str, Any]) -> None:
        if worker.sequence_parallel_size > 1:
            raise UnsupportedTrainerError(f"set sequence_parallel_size to 1, or {ENGINE_INSTEAD}")
        if worker.cfg.fully_async.enabled and worker.cfg.algorithm.temperature != 1.0:
            why = "fully_async rollouts are of older weights, and SkyRL's engines give log-probabilities before the"
            raise UnsupportedTrainerError(f"{why} temperature: set it to 1, or use an engine's tap")
        self._worker = worker
        self.version, self.trained = int(options.get("policy_version", 0)), False
        rank, world_size = dist.get_rank(), dist.get_world_size()
        self.hook = DrafterHook(worker.model.model, **options, rank=rank, world_size=world_size)

    def loaded(self, ckpt_dir: Any) -> None:
        """A checkpoint was loaded: its step is how often its weights had been trained and sent."""
        step = _CHECKPOINT.fullmatch(str(ckpt_dir))
        if step is not None:
            self.version, self.trained = int(step[1]), False
            return
        self.trained = True  # these weights get the next version when they are sent
        why = "a checkpoint was loaded whose folder is no global_step_N/policy: policy versions go on from"
        self.hook.tally.warn("checkpoint", f"{why} {self.version}")

    def told(
        self, experience: Any, _weight: float = 1.0, loss_fn: str | None = None, **_: Any
    ) -> dict[str, Any] | None:
        """What `DrafterHook.capture` is to be told of a micro-batch; None: it is not captured.

        The arguments are those of `_forward_backward_micro`; `loss_fn` is a loss's name, if not the configuration's.
        """
        algorithm = self._worker.cfg.algorithm
        if (loss_fn or algorithm.policy_loss_type) == "cross_entropy":
            self.hook.tally.warn("supervised", "supervised batches are left out: the policy did not write them")
            return None
        if experience.pixel_values is not None:
            left_out_for_images(self.hook.tally)
            return None
        if experience.loss_mask is None:
            self.hook.tally.warn("loss mask", "rollouts without a loss mask are left out: what was drawn is not known")
            return None
        if self.trained:
            self.hook.tally.add("skipped_stale", len(experience.sequences))
            return None
        drawn = experience.loss_mask > 0  # [B, response]
        # SkyRL's engines give log-probabilities before the temperature, so only those at 1 are of what was drawn.
        said = experience.rollout_logprobs if algorithm.temperature == 1.0 else None
        if said is None and self._worker.cfg.fully_async.enabled:
            self.hook.tally.warn("logprobs", "fully_async rollouts without the engines' log-probabilities are left out")
            return None
        packed = self._worker.cfg.remove_microbatch_padding
        told = experience_rollouts(experience.sequences, drawn, experience.attention_mask, packed=packed, logprobs=said)
        return {**told, "policy_version": self.version, "temperature": algorithm.temperature}


def extend(kind: Any) -> None:
    """Have SkyRL's `FSDPPolicyWorkerBase` send rollouts. In place: Ray looks methods up on the class."""
    init, micro, step = kind.init_model, kind._forward_backward_micro, kind.optim_step
    push = kind.broadcast_to_inference_engines
    if not inspect.iscoroutinefunction(push):
        raise UnsupportedTrainerError("broadcast_to_inference_engines is no coroutine: this is no SkyRL 0.3.0")

    update, load = kind.forward_backward, kind.load_checkpoint

    @functools.wraps(init)
    def init_model(self: Any, *args: Any, **more: Any) -> Any:
        made = init(self, *args, **more)
        self.draftalign = attached("SkyRL", dist.get_rank(), functools.partial(_SkyrlPolicy, self))
        return made

    @functools.wraps(micro)
    def forward_backward_micro(self: Any, *args: Any, **more: Any) -> Any:
        policy = self.draftalign
        if policy is None:
            return micro(self, *args, **more)
        with captured(policy.hook, policy.told, *args, **more):
            return micro(self, *args, **more)

    @functools.wraps(update)
    def forward_backward(self: Any, *args: Any, **more: Any) -> Any:
        made = update(self, *args, **more)
        if self.draftalign is not None and dist.get_rank() == 0:  # SkyRL logs rank 0's
            hook = self.draftalign.hook
            hook.guard(lambda: made.metrics.update(hook.metrics()))
        return made

    @functools.wraps(step)
    def optim_step(self: Any, *args: Any, **more: Any) -> Any:
        if self.draftalign is not None:
            self.draftalign.trained = True
        return step(self, *args, **more)

    @functools.wraps(load)
    def load_checkpoint(self: Any, ckpt_dir: Any, *args: Any, **more: Any) -> Any:
        made = load(self, ckpt_dir, *args, **more)
        if self.draftalign is not None:
            self.draftalign.hook.guard(self.draftalign.loaded, ckpt_dir)
        return made

    @functools.wraps(push)
    async def broadcast_to_inference_engines(self: Any, *args: Any, **more: Any) -> Any:
        made = await push(self, *args, **more)
        if self.draftalign is not None and self.draftalign.trained:
            self.draftalign.version, self.draftalign.trained = self.draftalign.version + 1, False
        return made

    kind.draftalign = None  # of a worker that has not begun
    kind.init_model, kind._forward_backward_micro, kind.optim_step = init_model, forward_backward_micro, optim_step
    kind.forward_backward, kind.load_checkpoint = forward_backward, load_checkpoint
    kind.broadcast_to_inference_engines = broadcast_to_inference_engines
