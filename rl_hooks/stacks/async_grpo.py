"""TRL's AsyncGRPOTrainer: `rl_hooks.trl.attach(trainer, url)`, as for GRPO. Written against TRL 1.16.

Its forward is one row over a prefix tree of rollouts, and its batch does not say which these are. So a rollout gets its
number where the trainer takes it from the queue, and the batch two more columns where TRL packs it. Four questions
are answered:

- tokens and mask: the paths of the tree; of them the trainer's own loss terms, with the sampler's log-probabilities;
- version: `model_version` of the weights of the forward, which gives the features. Older ones may have drawn the
  tokens: in asynchronous RL they mostly have. A sample has the version at which its group began, the oldest that may
  have. What is trained on with weights of no version is left out, and counted (`skipped_stale`);
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

from rl_hooks.stacks.attachment import Attachment, PromptKinds
from rl_hooks.trainer.hook import DrafterHook

#: Columns of the batch. int64 [ranks, T]: where the forward has each token of the rollouts, end to end; -1: padding.
_PLACES: Final = "draftalign_places"
#: float64 [ranks, rollouts, 7]: tokens (-1: padding), number, the prompt's kind, the oldest version that may have drawn
#: it, reward (NaN: not known); of rank 0 when it packed the batch: the version, and how often weights had been given to
#: the sampler. That may be a step before it is trained on.
_ROLLOUTS: Final = "draftalign_rollouts"


class _Labelled(dict[str, float]):
    """A sample's metrics, which TRL hands on to its collator as they are: with what it does not hand on."""

    number = kind = drew = -1


class AsyncAttachment(Attachment):
    """An AsyncGRPOTrainer with the hook on it."""

    METHODS = ("get_train_dataloader", "compute_loss", "_sync_weight_merged", "_sync_weight_lora", "log")
    ATTRIBUTES = (*Attachment.ATTRIBUTES, "model_version", "rollout_queue")
    #: Of the training data, where the kinds of prompts are to be sent.
    kinds: PromptKinds | None = None

    @staticmethod
    def policy_version(trainer: Any) -> int:
        """How often weights were given to the sampler, as rank 0 counts."""
        return int(trainer.model_version)

    def __init__(self, trainer: Any, hook: DrafterHook) -> None:
        super().__init__(trainer, hook)
        self._numbered = self._steps = self._given = 0
        self._given_steps = -1  # optimizer steps when weights were given to the sampler last; nobody knows before that
        self._wrap(trainer, "get_train_dataloader", self._load)
        self._wrap(trainer, "compute_loss", self._loss)
        self._wrap(trainer, "_sync_weight_merged", self._give)  # TRL calls one of the two, on every rank
        self._wrap(trainer, "_sync_weight_lora", self._give)
        if trainer.rollout_queue is not None:  # rank 0
            self._wrap(trainer.rollout_queue, "get", self._get)

    def stepped(self) -> None:
        """The weights are of no version now, until they are given to the sampler."""
        self._steps += 1

    def _give(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        answer = original(*args, **kwargs)
        self._given, self._given_steps = self._given + 1, self._steps
        return answer

    # --- rank 0: from the queue into the batch ------------------------------------------------------------------------

    def _get(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        sample = original(*args, **kwargs)
        if self._active:
            self.hook.guard(self._label, sample)
        return sample

    def _label(self, sample: Any) -> None:
        sample.metrics = metrics = _Labelled(sample.metrics)
        metrics.number, metrics.drew = self._numbered, sample.model_version
        self._numbered += 1
        if self.kinds is not None:
            metrics.kind = self.kinds.number(sample.prompt)
            if metrics.kind < 0:
                self.hook.tally.warn(
                    "kind",
                    "prompts that the training data has not are sent without their kind; so are those of several kinds",
                )

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
        now = (self.policy_version(self._trainer), self._given)

        def told(sample: Any) -> tuple[float, ...]:
            of = sample["metrics"]
            return (len(sample["input_ids"]), of.number, of.kind, of.drew, of.get("reward", math.nan), *now)

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
        lengths, numbers, kinds, drew, rewards, versions, given = table[table[:, 0] >= 0].T
        if self._given_steps != self._steps:
            self._skipped_stale += len(lengths)
            return None
        version, lengths = int(versions[0]) + self._given - int(given[0]), lengths.long()
        ids = inputs["input_ids"][inputs["attention_mask"].bool()]  # [N]
        places = inputs[_PLACES][inputs[_PLACES] >= 0]  # [T]
        terms = inputs["token_index"] >= 0
        of, before, logprob = (inputs[name][terms] for name in ("segment_id", "token_index", "old_log_probs"))
        # Rollout and place ascend along the told row; a term names the token before the one that was generated.
        told = torch.repeat_interleave(lengths) * len(ids) + places
        generated = torch.searchsorted(told, of * len(ids) + before) + 1
        loss_mask, logprobs = torch.zeros_like(told, dtype=torch.bool), logprob.new_full(told.shape, math.nan)
        loss_mask[generated], logprobs[generated] = True, logprob
        return {
            "input_ids": ids[places][None],
            "cu_seqlens": torch.nn.functional.pad(lengths.cumsum(0), (1, 0)),
            "tree_places": places,
            "loss_mask": loss_mask[None],
            "logprobs": logprobs[None],
            "versions_behind": torch.repeat_interleave(version - drew.long(), lengths)[None],
            "policy_version": version,
            "rewards": rewards.tolist() if bool(rewards.isfinite().all()) else None,
            "strata": None if self.kinds is None else [self.kinds.names[int(kind)] for kind in kinds.tolist()],
            "temperature": self._trainer.args.temperature,
            "top_p": self._trainer.args.top_p,
            "top_k": self._trainer.args.top_k,
            "rollout_ids": [self.hook.ids.of(version, int(number)) for number in numbers.tolist()],
        }


def _paths(row: Any) -> Tensor:
    """Where TRL's packed row has each token of its samples, end to end: int64 [T]."""
    numbered = copy.copy(row)  # packed once more, with its node's number in place of a token
    numbered.tokens, numbered.samples, numbered.sample_nodes = range(len(row.tokens)), [], []
    places: Tensor = numbered.pack()["input_ids"].argsort()
    return places[torch.tensor([node for path in row.sample_nodes for node in path])]
