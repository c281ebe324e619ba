"""AReaL's trainer with the hook in its FSDP actor: in your script, `DraftalignPPOTrainer` for `PPOTrainer`.

>>> from rl_hooks.stacks.areal import DraftalignPPOTrainer
>>> DraftalignPPOTrainer(config, train_dataset=..., valid_dataset=...)     # with DRAFTALIGN_URL in the environment

Both are subclasses of AReaL's own; nothing of it is patched. Written against AReaL 1.0.4. Four questions are answered:

- tokens and mask: the packed micro-batches, and their `loss_mask`; older weights may have drawn some of the tokens, so
  the sampler's log-probabilities are needed, and `versions` says which;
- version: the engine's own (`get_version`), of the weights of the forward, which gives the features;
- which forward: the pass for proximal log-probabilities. Not the update's, not the reference's, not the teacher's;
- which rank sends: each its own rollouts, as data is parallel; rank 0 registers the run.
"""

from __future__ import annotations

import logging
import os
from itertools import islice
from typing import Any

import torch
from areal.engine.fsdp_engine import FSDPPPOActor
from areal.trainer.rl_trainer import PPOTrainer
from areal.utils.environ import is_single_controller

from rl_hooks.errors import ENGINE_INSTEAD, UnsupportedTrainerError
from rl_hooks.stacks.environment import VARIABLES, attached
from rl_hooks.trainer.base import captured, left_out_for_images
from rl_hooks.trainer.hook import DrafterHook

_log = logging.getLogger("rl_hooks")


def prompt_kinds(packed: dict[str, Any], places: list[int], rollouts: int) -> list[str] | None:
    """The prompts' kinds of the rollouts at `places`, where the workflow says the kind of each of the `rollouts`.

    That is an entry `data_source` of the batch: a tensor of one number for each rollout, or a list. AReaL's own
    workflows have none. It splits neither, so a micro-batch has those of the whole batch.
    """
    kinds = packed.get("data_source")
    if isinstance(kinds, torch.Tensor):
        kinds = kinds.tolist()
    if not isinstance(kinds, list) or len(kinds) != rollouts:
        return None
    return [str(kinds[place]) for place in places]


class DraftalignPPOActor(FSDPPPOActor):  # type: ignore[misc]
    """AReaL's `FSDPPPOActor`, sending what its passes for proximal log-probabilities see to `DRAFTALIGN_URL`."""

    hook: DrafterHook | None = None
    _proximal = False

    def initialize(self, addr: str | None, ft_spec: Any, *args: Any, **more: Any) -> None:
        """As AReaL's, and attach. A failure of ours is logged, and the training goes on without us."""
        super().initialize(addr, ft_spec, *args, **more)
        if self.optimizer_config is None:
            return  # the reference model, or a teacher
        self.hook = attached("AReaL", self.data_parallel_rank, self._attach)

    def _attach(self, options: dict[str, Any]) -> DrafterHook:
        if self.parallel_helper.tp_size > 1 or self.parallel_helper.sp_size > 1:
            raise UnsupportedTrainerError(f"only data parallelism in the actor's allocation; else {ENGINE_INSTEAD}")
        if self.enable_tree_training:
            raise UnsupportedTrainerError("tree training is not covered: set enable_tree_training to false")
        if not self.config.should_compute_prox_logp():
            needed = "use_decoupled_loss with prox_logp_method=recompute, or recompute_logprob"
            raise UnsupportedTrainerError(f"there is no pass for proximal log-probabilities to capture: set {needed}")
        rank, world_size = self.data_parallel_rank, self.data_parallel_world_size
        return DrafterHook(self.model, **options, rank=rank, world_size=world_size)

    def compute_logp(self, *args: Any, **more: Any) -> Any:
        """As AReaL's; its micro-batches are captured."""
        self._proximal = True
        try:
            return super().compute_logp(*args, **more)
        finally:
            self._proximal = False

    def forward_backward_batch(self, mb_list: Any, process_output_fn: Any, forward_only: bool = False) -> None:
        """As AReaL's; of proximal log-probabilities a micro-batch at a time."""
        hook = self.hook
        if hook is None or not (forward_only and self._proximal):
            super().forward_backward_batch(mb_list, process_output_fn, forward_only)
            return
        order = iter(mb_list.forward_indices)  # AReaL packs the rollouts in another order, but for what has no token
        for item in mb_list:
            places = list(islice(order, len(item.orig_mb["cu_seqlens"]) - 1))
            with captured(hook, self._told, hook, item.orig_mb, places, len(mb_list.forward_indices)):
                super().forward_backward_batch([item], process_output_fn, forward_only)

    def export_stats(self) -> dict[str, float]:
        """As AReaL's, which logs those of rank 0, and the hook's numbers."""
        stats: dict[str, float] = super().export_stats()
        hook = self.hook if self.data_parallel_rank == 0 else None
        return stats if hook is None else stats | (hook.guard(hook.metrics) or {})

    def _told(
        self, hook: DrafterHook, packed: dict[str, Any], places: list[int], rollouts: int
    ) -> dict[str, Any] | None:
        """What `capture` is to be told of a packed micro-batch, whose rollouts have `places` in the batch; or None."""
        if "multi_modal_input" in packed:
            left_out_for_images(hook.tally)
            return None
        if "logprobs" not in packed:
            hook.tally.warn("logprobs", "rollouts without the sampler's log-probabilities (`logprobs`) are left out")
            return None
        rewards = packed.get("rewards")  # [rollouts of the whole batch], as AReaL's own workflows have them
        drew = packed.get("versions")  # of each token; -1, which is not sent, where a workflow does not know it
        return {
            "input_ids": packed["input_ids"].long(),
            "cu_seqlens": packed["cu_seqlens"].long(),
            "loss_mask": packed["loss_mask"].bool(),
            "logprobs": packed["logprobs"],
            "versions_behind": None if drew is None else self.get_version() - drew.long(),
            "rewards": rewards[places].tolist() if rewards is not None and rewards.ndim == 1 else None,
            "strata": prompt_kinds(packed, places, rollouts),
            "policy_version": self.get_version(),
            "temperature": self.config.temperature,
        }


class DraftalignPPOTrainer(PPOTrainer):  # type: ignore[misc]
    """AReaL's `PPOTrainer` whose FSDP actor is a `DraftalignPPOActor`, on one controller or SPMD."""

    def _create_train_engine(self, actor_config: Any, alloc: Any) -> Any:
        if alloc.backend != "fsdp":
            _log.error("draftalign is OFF: only AReaL's fsdp backend is captured, this is %s", alloc.backend)
            return super()._create_train_engine(actor_config, alloc)
        for spec in actor_config.scheduling_spec:  # the environment of the workers that AReaL starts
            spec.env_vars.update({name: os.environ[name] for name in VARIABLES if name in os.environ})
        single, kind = is_single_controller(), DraftalignPPOActor
        actor = kind.as_controller(actor_config, self.scheduler) if single else kind(config=actor_config)
        actor.create_process_group(parallel_strategy=alloc.parallel)
        return actor
