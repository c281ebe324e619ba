"""TRL's GRPO and RLOO trainers: one line after construction, before `train()`.

>>> from rl_hooks.trl import attach
>>> attachment = attach(trainer, "http://127.0.0.1:8400")
>>> trainer.train()
>>> attachment.stats(), attachment.overhead_seconds / attachment.step_seconds

Callbacks never see a batch, so three private methods of the trainer are wrapped, on the instance:
`_calculate_rewards` (the raw rewards), `_generate_and_score_completions` (its batch gets two more columns, so that
identity and reward survive TRL's shuffle), and `_compute_loss` (its forward is captured). A trainer that lacks one of
them is refused when attaching. `log` is wrapped too: what the trainer logs gets the hook's numbers (`draftalign/...`),
and so does whatever `report_to` names.

A rollout is captured at most once, and only with the weights that generated it. Later iterations over the same
rollouts, and micro-batches after an optimizer step, are left out (`skipped_stale`). A separate pass for old
log-probabilities needs no care: the first pass of `_compute_loss` sees the same weights.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal

import torch
from torch import Tensor

from rl_hooks.errors import UnsupportedTrainerError
from rl_hooks.hook import DrafterHook

_WRAPPED: Final = ("_calculate_rewards", "_generate_and_score_completions", "_compute_loss", "log")
_NEEDED: Final = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")
#: Columns added to TRL's batch: the rollout's number and the policy version that generated it; its reward.
_ORIGIN_KEY: Final = "draftalign_origin"
_REWARD_KEY: Final = "draftalign_reward"


def attach(
    trainer: Any,
    url: str,
    *,
    run: str = "default",
    token: str | None = None,
    aux_layers: Sequence[int] | Literal["eagle3"] = "eagle3",
    initial_drafter: Path | str | None = None,
    **options: Any,
) -> Attachment:
    """Send this trainer's rollouts and features to the service at `url`.

    `options` are those of `DrafterHook`: `sample_fraction`, `max_tokens_per_step`, `dtype`, `head_tolerance`,
    `queue_bytes`, `strict`, and so on. Raises `UnsupportedTrainerError` for a trainer it cannot wrap,
    `UnsupportedModelError` and `AuxLayersError` for a model it cannot read; nothing is raised later unless `strict`.
    """
    _check_trainer(trainer)
    hook = DrafterHook(
        trainer.model,
        url,
        run=run,
        token=token,
        aux_layers=aux_layers,
        initial_drafter=initial_drafter,
        policy_version=int(trainer.state.global_step),
        rank=int(trainer.accelerator.process_index),
        world_size=int(trainer.accelerator.num_processes),
        **options,
    )
    return Attachment(trainer, hook)


def _check_trainer(trainer: Any) -> None:
    missing = [name for name in _WRAPPED if not callable(getattr(trainer, name, None))]
    missing += [name for name in ("model", "state", "accelerator", "args") if not hasattr(trainer, name)]
    if missing:
        try:
            version = importlib.metadata.version("trl")
        except importlib.metadata.PackageNotFoundError:
            version = "(not installed)"
        raise UnsupportedTrainerError(
            f"{type(trainer).__name__} of TRL {version} lacks {', '.join(missing)}, which this adapter wraps. It was "
            "written against GRPOTrainer and RLOOTrainer of TRL 1.16; use rl_hooks.hook.DrafterHook in your own loop."
        )


class Attachment:
    """A trainer with the hook on it. `detach` takes it off again."""

    def __init__(self, trainer: Any, hook: DrafterHook) -> None:
        self.hook = hook
        self._trainer = trainer
        self._active = True
        self._rewards: Tensor | None = None
        self._captured: set[int] = set()
        self._numbered = 0
        self._skipped_stale = 0
        #: Wall time of the RL steps so far: generation, forward, backward and optimizer.
        self.step_seconds = 0.0
        self._originals: dict[str, Callable[..., Any]] = {name: getattr(trainer, name) for name in _WRAPPED}
        self._wrappers: dict[str, Callable[..., Any]] = {
            "_calculate_rewards": self._calculate_rewards,
            "_generate_and_score_completions": self._generate,
            "_compute_loss": self._compute_loss,
            "log": self._log,
        }
        for name, wrapper in self._wrappers.items():
            setattr(trainer, name, wrapper)
        self._clock = _step_clock(self)
        trainer.add_callback(self._clock)

    @property
    def overhead_seconds(self) -> float:
        """Wall time that the hook took from the trainer."""
        return self.hook.overhead_seconds

    def stats(self) -> dict[str, Any]:
        """Counters of capture and sender, with the time of the RL steps they belong to."""
        return {**self.hook.stats(), "skipped_stale": self._skipped_stale, "step_seconds": self.step_seconds}

    def flush(self, timeout_seconds: float = 30.0) -> bool:
        """Wait until everything captured so far was sent or dropped."""
        return self.hook.flush(timeout_seconds)

    def detach(self, timeout_seconds: float = 5.0) -> bool:
        """Restore the trainer, flush, stop the sender. True if nothing was lost."""
        self._active = False
        for name, wrapper in self._wrappers.items():
            # If another tool has wrapped our wrapper since, ours stays in place, inactive.
            if self._trainer.__dict__.get(name) == wrapper:
                delattr(self._trainer, name)
        self._trainer.remove_callback(self._clock)
        return self.hook.close(timeout_seconds)

    # --- the wrapped methods ----------------------------------------------------------------------------------------

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> Any:
        rewards = self._originals["_calculate_rewards"](*args, **kwargs)
        if self._active:
            self._rewards = rewards
        return rewards

    def _generate(self, *args: Any, **kwargs: Any) -> Any:
        # Read before generating: this is the version of the weights that generate.
        version = int(self._trainer.state.global_step)
        batch = self._originals["_generate_and_score_completions"](*args, **kwargs)
        if self._active and self._trainer.model.training:
            self.hook.guard(self._label, batch, version)
        return batch

    def _compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        original = self._originals["_compute_loss"]
        request = self.hook.guard(self._request, model, inputs) if self._active else None
        if request is None:
            return original(model, inputs, *args, **kwargs)
        with self.hook.capture(**request):
            return original(model, inputs, *args, **kwargs)

    def _log(self, logs: Any, *args: Any, **kwargs: Any) -> Any:
        # In place, as TRL adds its own: whatever `report_to` names is given them.
        if self._active:
            self.hook.guard(lambda: logs.update(self.hook.metrics()))
        return self._originals["log"](logs, *args, **kwargs)

    # --- what they add ----------------------------------------------------------------------------------------------

    def _label(self, batch: dict[str, Any], version: int) -> None:
        """Give every rollout of a fresh generation batch its number, its policy version and its reward."""
        ids = batch["completion_ids"]
        B = ids.shape[0]
        numbers = torch.arange(self._numbered, self._numbered + B, device=ids.device)
        self._numbered += B
        self._captured.clear()
        labels = {_ORIGIN_KEY: torch.stack([numbers, torch.full_like(numbers, version)], dim=1)}
        rewards, self._rewards = self._rewards, None
        if rewards is not None:
            labels[_REWARD_KEY] = self._weighted(rewards, B)
        batch.update(labels)

    def _weighted(self, rewards: Tensor, batch_size: int) -> Tensor:
        """Take this rank's rows of the gathered [B * world, functions] rewards, summed by weight as TRL sums them."""
        begin = int(self._trainer.accelerator.process_index) * batch_size
        mine = rewards[begin : begin + batch_size]
        total = (mine * self._trainer.reward_weights.to(mine.device)).nansum(dim=1)
        return torch.where(mine.isnan().all(dim=1), torch.full_like(total, torch.nan), total)

    def _request(self, model: Any, inputs: Mapping[str, Any]) -> dict[str, Any] | None:
        """What `DrafterHook.capture` is to be told about this micro-batch; None: do not capture it."""
        origin = inputs.get(_ORIGIN_KEY)
        if origin is None or not model.training:
            return None
        if inputs.get("pixel_values") is not None:
            self.hook.tally.warn("images", "rollouts with images are left out: a drafter cannot embed them")
            return None
        version = int(self._trainer.state.global_step)
        rows = [(int(number), int(made)) for number, made in origin.tolist()]
        fresh = [made == version and number not in self._captured for number, made in rows]
        self._captured.update(number for number, _ in rows)
        self._skipped_stale += len(fresh) - sum(fresh)
        if not any(fresh):
            return None
        prompt_ids, prompt_mask, completion_ids, completion_mask = (inputs[name] for name in _NEEDED)
        generated = completion_mask * inputs["tool_mask"] if "tool_mask" in inputs else completion_mask
        generated = generated * torch.tensor(fresh, device=generated.device)[:, None]
        prompt_zeros = torch.zeros_like(prompt_mask)
        sampler = inputs.get("sampling_per_token_logps")
        logprobs = None if sampler is None else torch.cat([prompt_zeros.to(sampler.dtype), sampler], dim=1)
        rewards = inputs.get(_REWARD_KEY)
        known = rewards is not None and not bool(rewards.isnan().any())
        return {
            "input_ids": torch.cat([prompt_ids, completion_ids], dim=1),
            "attention_mask": torch.cat([prompt_mask, completion_mask], dim=1),
            "loss_mask": torch.cat([prompt_zeros, generated.to(prompt_zeros.dtype)], dim=1),
            "policy_version": version,
            "logprobs": logprobs,
            "rewards": rewards if known else None,
            "temperature": self._trainer.args.temperature,
            "top_p": self._trainer.args.top_p,
            "top_k": self._trainer.args.top_k,
            "rollout_ids": [self.hook.rollout_id(version, number) for number, _ in rows],
        }


def _step_clock(attachment: Attachment) -> Any:
    """A TrainerCallback that sums the wall time of whole RL steps."""
    # Imported here: where there is a TRL trainer, transformers is loaded already.
    callback_class: Any = importlib.import_module("transformers").TrainerCallback

    class StepClock(callback_class):  # type: ignore[misc]
        started: float | None = None

        def on_step_begin(self, *_args: Any, **_kwargs: Any) -> None:
            self.started = time.perf_counter()

        def on_step_end(self, *_args: Any, **_kwargs: Any) -> None:
            if self.started is not None:
                attachment.step_seconds += time.perf_counter() - self.started
                self.started = None

    return StepClock()
