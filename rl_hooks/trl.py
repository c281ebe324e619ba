"""TRL's GRPO, RLOO and AsyncGRPO trainers: one line after construction, before `train()`.

>>> from rl_hooks.trl import attach
>>> attachment = attach(trainer, "http://127.0.0.1:8400")
>>> trainer.train()
>>> attachment.stats(), attachment.overhead_seconds / attachment.step_seconds

Of GRPO and RLOO three private methods are wrapped, on the instance: `_calculate_rewards` (the raw rewards),
`_generate_and_score_completions` (its batch gets two more columns, so that identity and reward survive TRL's shuffle),
and `_compute_loss` (its forward is captured). A trainer that lacks one of them is refused when attaching. `log` is
wrapped too. What differs of AsyncGRPO is in `rl_hooks.stacks.async_grpo`.

A rollout is captured at most once, and only with the weights that generated it. Later iterations over the same
rollouts, and micro-batches after an optimizer step, are left out (`skipped_stale`). A separate pass for old
log-probabilities needs no care: the first pass of `_compute_loss` sees the same weights.
"""

from __future__ import annotations

import importlib.metadata
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Final, Unpack

import torch
from torch import Tensor

from rl_hooks.errors import UnsupportedTrainerError
from rl_hooks.hook import DrafterHook
from rl_hooks.stacks.async_grpo import AsyncAttachment
from rl_hooks.stacks.attachment import Attachment as Attachment
from rl_hooks.stacks.attachment import PromptKinds
from rl_hooks.trainer.base import AttachKeywords, left_out_for_images
from rl_hooks.trainer.hook import PathKeywords

#: Arguments by which TRL's samplers leave the policy's distribution, each with the values that do not.
_USUAL_SAMPLING: Final[Mapping[str, tuple[Any, ...]]] = {
    "top_p": (None, 1.0),
    "top_k": (None, 0, -1),
    "min_p": (None, 0.0),
    "repetition_penalty": (None, 1.0),
    "generation_kwargs": (None, {}),
}
_NEEDED: Final = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")
#: Columns added to TRL's batch: the rollout's number and the policy version that generated it; its reward.
_ORIGIN_KEY: Final = "draftalign_origin"
_REWARD_KEY: Final = "draftalign_reward"


class TrlKeywords(AttachKeywords, PathKeywords, total=False):
    """The names and types of the options of `attach`."""


def attach(trainer: Any, url: str, *, strata: str | None = None, **options: Unpack[TrlKeywords]) -> Attachment:
    """Send this trainer's rollouts and features to the service at `url`.

    `strata`: the column of the training data that says of which kind a prompt is (its source, say), so that another
    mix of kinds is no drift. `options` are those of `DrafterHook`: `run`, `token`, `aux_layers`,
    `initial_drafter`, `strict`, and so on; policy version, rank and world size are the trainer's. Raises
    `UnsupportedTrainerError` for a trainer it cannot wrap, `UnsupportedModelError` and `AuxLayersError` for a model it
    cannot read; nothing is raised later unless `strict`.
    """
    asynchronous = any(base.__name__ == "AsyncGRPOTrainer" for base in type(trainer).__mro__)
    kind: type[Attachment] = AsyncAttachment if asynchronous else GrpoAttachment
    _check_trainer(trainer, kind)
    if strata is not None:
        _check_column(trainer, strata, asynchronous)
    rows = trainer.train_dataset if asynchronous and strata is not None else None
    kinds = None if rows is None else PromptKinds(rows["prompt"], rows[strata])
    hook = DrafterHook(
        trainer.model,
        url,
        policy_version=kind.policy_version(trainer),
        rank=int(trainer.accelerator.process_index),
        world_size=int(trainer.accelerator.num_processes),
        own_log_probs=kind is GrpoAttachment,  # its fused head labels every token of the completions
        **options,
    )
    attachment = kind(trainer, hook)
    if isinstance(attachment, GrpoAttachment):
        attachment.column = strata
    elif isinstance(attachment, AsyncAttachment):
        attachment.kinds = kinds
    return attachment


def _check_column(trainer: Any, column: str, asynchronous: bool) -> None:
    """Refuse what would send no strata."""
    columns = getattr(getattr(trainer, "train_dataset", None), "column_names", None)
    if columns is not None and column not in columns:
        raise UnsupportedTrainerError(
            f"strata={column!r}: the training data has no such column, but {', '.join(columns)}. Name one of them"
        )
    if asynchronous:  # its samples have the prompt and no other column, so the kind is looked up by the prompt
        if columns is None or "prompt" not in columns or not hasattr(trainer.train_dataset, "__len__"):
            raise UnsupportedTrainerError(
                f"strata={column!r}: AsyncGRPOTrainer needs a training Dataset, no stream, with a column prompt. "
                "Leave strata out, or load such a one"
            )
        return
    if getattr(trainer.args, "remove_unused_columns", False):
        raise UnsupportedTrainerError(
            f"strata={column!r}: remove_unused_columns=True takes it off the rows. Set it to False, as GRPOConfig does"
        )


def _check_trainer(trainer: Any, kind: type[Attachment]) -> None:
    missing = [name for name in kind.METHODS if not callable(getattr(trainer, name, None))]
    missing += [name for name in kind.ATTRIBUTES if not hasattr(trainer, name)]
    if missing:
        try:
            version = importlib.metadata.version("trl")
        except importlib.metadata.PackageNotFoundError:
            version = "(not installed)"
        raise UnsupportedTrainerError(
            f"{type(trainer).__name__} of TRL {version} lacks {', '.join(missing)}, which this adapter wraps. It was "
            "written against GRPOTrainer, RLOOTrainer and AsyncGRPOTrainer of TRL 1.16; use rl_hooks.hook.DrafterHook "
            "in your own loop."
        )
    if "_compute_loss" in kind.METHODS and not _calls_compute_loss(type(trainer)):
        raise UnsupportedTrainerError(
            f"{type(trainer).__name__}.compute_loss does not call _compute_loss, whose forward this adapter captures: "
            "nothing would be sent. Unsloth's trainers are so: use TRL's own, without Unsloth"
        )


def _calls_compute_loss(kind: type) -> bool:
    """Whether its `compute_loss` calls `_compute_loss`, itself or by way of `super()`."""
    for base in kind.__mro__:
        method = vars(base).get("compute_loss")
        if method is None:
            continue
        names = inspect.unwrap(method).__code__.co_names
        if "_compute_loss" in names:
            return True
        if "compute_loss" not in names:
            return False
    return False


class GrpoAttachment(Attachment):
    """A GRPOTrainer or RLOOTrainer with the hook on it."""

    METHODS = ("_calculate_rewards", "_generate_and_score_completions", "_compute_loss", "log")

    @staticmethod
    def policy_version(trainer: Any) -> int:
        """As the trainer counts its optimizer steps."""
        return int(trainer.state.global_step)

    def __init__(self, trainer: Any, hook: DrafterHook) -> None:
        super().__init__(trainer, hook)
        self._rewards: Tensor | None = None
        self._captured: set[int] = set()
        self._numbered = 0
        #: Column of the training data with each prompt's kind; None: not told.
        self.column: str | None = None
        self._kinds: dict[int, str] = {}  # of each rollout of the last generation batch
        self._wrap(trainer, "_calculate_rewards", self._calculate_rewards)
        self._wrap(trainer, "_generate_and_score_completions", self._generate)
        self._wrap(trainer, "_compute_loss", self._loss)

    # --- the wrapped methods ----------------------------------------------------------------------------------------

    def _calculate_rewards(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        rewards = original(*args, **kwargs)
        if self._active:
            self._rewards = rewards
        return rewards

    def _generate(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        # Read before generating: this is the version of the weights that generate.
        version = self.policy_version(self._trainer)
        batch = original(*args, **kwargs)
        if self._active and self._trainer.model.training:
            self.hook.guard(self._label, batch, version)
            if self.column is not None:
                self.hook.guard(self._note_kinds, self.column, batch, *args, **kwargs)
        return batch

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

    def _note_kinds(self, column: str, batch: dict[str, Any], inputs: list[dict[str, Any]]) -> None:
        """Remember of which kind each rollout's prompt is, by its number: a shuffle moves rows, not numbers."""
        numbers = batch[_ORIGIN_KEY][:, 0].tolist()
        self._kinds = {n: str(row[column]) for n, row in zip(numbers, inputs, strict=True)}

    def _weighted(self, rewards: Tensor, batch_size: int) -> Tensor:
        """Take this rank's rows of the gathered [B * world, functions] rewards, summed by weight as TRL sums them."""
        begin = int(self._trainer.accelerator.process_index) * batch_size
        mine = rewards[begin : begin + batch_size]
        total = (mine * self._trainer.reward_weights.to(mine.device)).nansum(dim=1)
        return torch.where(mine.isnan().all(dim=1), torch.full_like(total, torch.nan), total)

    def _changed_sampling(self) -> list[str]:
        """What the trainer's arguments do to the policy's distribution, beside its temperature."""
        given = {name: getattr(self._trainer.args, name, None) for name in _USUAL_SAMPLING}
        return [f"{name}={value}" for name, value in given.items() if value not in _USUAL_SAMPLING[name]]

    def _request(self, model: Any, inputs: Mapping[str, Any]) -> dict[str, Any] | None:
        origin = inputs.get(_ORIGIN_KEY)
        if origin is None or not model.training:
            return None
        if inputs.get("pixel_values") is not None:
            left_out_for_images(self.hook.tally)
            return None
        version = self.policy_version(self._trainer)
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
        if sampler is None and (changed := self._changed_sampling()):
            self.hook.tally.warn(
                "sampling",
                f"{', '.join(changed)} changes what is drawn, and TRL tells no log-probabilities of that here (GRPO "
                "does with vLLM): those that are sent are the policy's own, so replay α is too high",
            )
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
            "strata": [self._kinds.get(number, "") for number, _ in rows] if self._kinds else None,
            "temperature": self._trainer.args.temperature,
            "top_p": self._trainer.args.top_p,
            "top_k": self._trainer.args.top_k,
            "rollout_ids": [self.hook.ids.of(version, number) for number, _ in rows],
        }
