"""TRL's AsyncGRPOTrainer: `rl_hooks.trl.attach(trainer, url)`, as for GRPO. Written against TRL 1.16.

Its forward is one row over a prefix tree of rollouts, and its batch does not say which weights drew them. So a rollout
gets its number and version where the trainer takes it from the queue, and the batch two more columns where TRL packs
it. Four questions are answered:

- tokens and mask: the paths of the tree; of them the trainer's own loss terms, with the sampler's log-probabilities;
- version: `model_version`, the sampler's of a rollout and the trainer's own. What older weights drew is left out, and
  counted (`skipped_stale`);
- which forward: `compute_loss`, until the first optimizer step after the weights were given to the sampler;
- which rank sends: each the rollouts of its own row; rank 0 takes them from the queue, and registers the run.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from rl_hooks.trainer.hook import DrafterHook
from rl_hooks.trainer.stacks.attachment import Attachment

#: Columns of the batch. int64 [ranks, T]: where the forward has each token of the rollouts, end to end; -1: padding.
_PLACES: Final = "draftalign_places"
#: float64 [ranks, rollouts, 6]: tokens (-1: padding), number, whether the newest version drew it, reward (NaN: not
#: known); the newest version, and the optimizer steps before it, or -1 where it drew nothing of this batch.
_ROLLOUTS: Final = "draftalign_rollouts"


class _Labelled(dict[str, float]):
    """A sample's metrics, which TRL hands on to its collator as they are: with the rollout's number and version."""

    number = version = -1


class AsyncAttachment(Attachment):
    """An AsyncGRPOTrainer with the hook on it."""

    METHODS = ("get_train_dataloader", "compute_loss", "log")
    ATTRIBUTES = (*Attachment.ATTRIBUTES, "model_version", "rollout_queue")

    @staticmethod
    def policy_version(trainer: Any) -> int:
        """How often weights were given to the sampler, as rank 0 counts."""
        return int(trainer.model_version)

    def __init__(self, trainer: Any, hook: DrafterHook) -> None:
        super().__init__(trainer, hook)
        self._numbered = self._steps = 0
        self._newest, self._newest_steps = self.policy_version(trainer), -1  # whether weights are its own is not known
        self._wrap(trainer, "get_train_dataloader", self._load)
        self._wrap(trainer, "compute_loss", self._loss)
        if trainer.rollout_queue is not None:  # rank 0
            self._wrap(trainer.rollout_queue, "get", self._get)
        if trainer.args.gradient_accumulation_steps == 1:
            text = "with gradient_accumulation_steps=1 the trainer takes each rollout a step before it trains on it"
            hook.tally.warn("a step old", f"{text}: of all steps but the first nothing is sent (skipped_stale)")

    def stepped(self) -> None:
        """The weights are of no version now, until they are given to the sampler."""
        self._look()
        self._steps += 1

    def _look(self) -> None:
        """A version that came since the last step is of the weights before the next one."""
        if (version := self.policy_version(self._trainer)) != self._newest:
            self._newest, self._newest_steps = version, self._steps

    # --- rank 0: from the queue into the batch ------------------------------------------------------------------------

    def _get(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        sample = original(*args, **kwargs)
        if self._active:
            self.hook.guard(self._label, sample)
        return sample

    def _label(self, sample: Any) -> None:
        metrics = _Labelled(sample.metrics)
        metrics.number, metrics.version = self._numbered, int(sample.model_version)
        self._numbered += 1
        sample.metrics = metrics

    def _load(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        loader = original(*args, **kwargs)
        if self._active:
            self.hook.guard(lambda: self._wrap(loader.collate_fn, "torch_call", self._collate))
        return loader

    def _collate(self, original: Callable[..., Any], examples: Any) -> Any:
        batch = original(examples)
        if self._active:
            self.hook.guard(lambda: batch.update(self._columns(*examples)))
        return batch

    def _columns(self, rows: Any) -> dict[str, Tensor]:
        self._look()
        drew = any(one["metrics"].version == self._newest for row in rows for one in row.samples)
        newest = (self._newest, self._newest_steps if drew else -1)

        def told(sample: Any) -> tuple[float, ...]:
            of = sample["metrics"]
            reward = of.get("reward", math.nan)
            return (len(sample["input_ids"]), of.number, of.version == self._newest, reward, *newest)

        tables = [torch.tensor([told(sample) for sample in row.samples], dtype=torch.float64) for row in rows]
        return {
            _PLACES: pad_sequence([_paths(row) for row in rows], batch_first=True, padding_value=-1),
            _ROLLOUTS: pad_sequence(tables, batch_first=True, padding_value=-1),
        }

    # --- every rank ---------------------------------------------------------------------------------------------------

    def _request(self, model: Any, inputs: Mapping[str, Any]) -> dict[str, Any] | None:
        if _ROLLOUTS not in inputs or not model.training:
            return None
        table = inputs[_ROLLOUTS][0]
        lengths, numbers, of_newest, rewards, versions, steps = table[table[:, 0] >= 0].T
        fresh = (of_newest == 1) & (steps == self._steps)
        self._skipped_stale += int((~fresh).sum())
        if steps[0] != self._steps:
            return None
        version, lengths = int(versions[0]), lengths.long()
        ids = inputs["input_ids"][inputs["attention_mask"].bool()]  # [N]
        places = inputs[_PLACES][inputs[_PLACES] >= 0]  # [T]
        terms = inputs["token_index"] >= 0
        of, before, logprob = (inputs[name][terms] for name in ("segment_id", "token_index", "old_log_probs"))
        # Rollout and place ascend along the told row; a term names the token before the one that was generated.
        told = torch.repeat_interleave(lengths) * len(ids) + places
        generated = torch.searchsorted(told, of * len(ids) + before) + 1
        loss_mask, logprobs = torch.zeros_like(told, dtype=torch.bool), logprob.new_full(told.shape, math.nan)
        loss_mask[generated], logprobs[generated] = fresh[of], logprob
        return {
            "input_ids": ids[places][None],
            "cu_seqlens": torch.nn.functional.pad(lengths.cumsum(0), (1, 0)),
            "tree_places": places,
            "loss_mask": loss_mask[None],
            "logprobs": logprobs[None],
            "policy_version": version,
            "rewards": rewards.tolist() if bool(rewards.isfinite().all()) else None,
            "temperature": self._trainer.args.temperature,
            "top_p": self._trainer.args.top_p,
            "top_k": self._trainer.args.top_k,
            "rollout_ids": [self.hook.rollout_id(version, int(number)) for number in numbers.tolist()],
        }


def _paths(row: Any) -> Tensor:
    """Where TRL's packed row has each token of its samples, end to end: int64 [T]."""
    numbered = copy.copy(row)  # packed once more, with its node's number in place of a token
    numbered.tokens, numbered.samples, numbered.sample_nodes = range(len(row.tokens)), [], []
    places: Tensor = numbered.pack()["input_ids"].argsort()
    return places[torch.tensor([node for path in row.sample_nodes for node in path])]
