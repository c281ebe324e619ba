"""The drafter that the demo starts with: trained once, before RL, on rollouts of the base policy.

What a user brings from their own EAGLE-3 training. It is then frozen as the run's first version, which is the curve
that the aligned drafter is compared with.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from drafter.batch import RolloutBatch
from drafter.files.checkpoint import write_drafter
from drafter.model.eagle3 import DrafterConfig, Eagle3Drafter
from drafter.policy import Policy, TargetHead
from drafter.training.trainer import DrafterTrainer, TrainConfig
from drafter.vocabulary import DraftVocabulary
from examples.policy import AUX_LAYERS
from examples.task import Task

SEQUENCES_PER_STEP: Final = 40


def train_initial_drafter(
    policy: Any,
    batch: RolloutBatch,
    *,
    depth: int,
    seed: int,
    task: Task,
    report: Callable[[int], None] | None = None,
    steps: int | None = None,
) -> Eagle3Drafter:
    """Train from scratch on `batch` (rollouts of `policy`) by the task's recipe; `report` gets each finished step."""
    vocab_size = int(policy.config.vocab_size)
    counts = torch.bincount(batch.input_ids[batch.loss_mask], minlength=vocab_size)
    vocabulary = DraftVocabulary.build(counts, task.draft_vocabulary, always=[task.eos_id])
    config = DrafterConfig.from_target(policy.config.to_dict(), AUX_LAYERS, len(vocabulary))
    torch.manual_seed(seed)
    drafter = Eagle3Drafter(config, vocabulary)
    head = policy.lm_head.weight.detach().float()
    drafter.init_from_target(head[vocabulary.ids])
    recipe = task.initial_drafter
    steps = recipe.steps if steps is None else steps
    trainer = DrafterTrainer(drafter, TrainConfig(depth, recipe.learning_rate, optimizer=recipe.optimizer))
    frozen = Policy(0, policy.get_input_embeddings().weight.detach().float(), TargetHead(head))
    rng = np.random.default_rng(seed)
    for step in range(steps):
        chosen = rng.choice(batch.rollouts, size=min(SEQUENCES_PER_STEP, batch.rollouts), replace=False)
        trainer.step([(batch.select([int(i) for i in chosen]), frozen)])
        if report is not None:
            report(step + 1)
    return drafter


def save_drafter(drafter: Eagle3Drafter, directory: Path) -> None:
    """Write the canonical checkpoint."""
    directory.mkdir(parents=True, exist_ok=True)
    write_drafter(directory, drafter)
