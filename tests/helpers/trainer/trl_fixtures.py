"""A tiny GRPOTrainer or RLOOTrainer of TRL on a CPU."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from helpers.trainer.hooks_fixtures import VOCAB, receiver, tiny_qwen3


def reward_of_even_tokens(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [sum(t % 2 == 0 for t in ids) / len(ids) for ids in completion_ids]


def make_tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<eos>", *(f"w{i}" for i in range(2, VOCAB))]
    inner = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<pad>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>")


def make_trainer(directory: Path, *, steps: int = 3, kind: str = "GRPO", model: Any = None, **changes: Any) -> Any:
    import trl
    from datasets import Dataset

    rng = np.random.default_rng(0)
    prompts = [" ".join(f"w{t}" for t in rng.integers(2, VOCAB, rng.integers(2, 7))) for _ in range(32)]
    rollout_func = changes.pop("rollout_func", None)
    config = getattr(trl, f"{kind}Config")(
        output_dir=str(directory),
        max_steps=steps,
        per_device_train_batch_size=changes.pop("per_device_train_batch_size", 8),
        num_generations=4,
        max_completion_length=changes.pop("max_completion_length", 12),
        learning_rate=1e-2,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=changes.pop("use_cpu", True),
        bf16=False,
        seed=0,
        gradient_checkpointing=changes.pop("gradient_checkpointing", False),
        **changes,
    )
    extra = {} if rollout_func is None else {"rollout_func": rollout_func}
    return getattr(trl, f"{kind}Trainer")(
        model=model or tiny_qwen3(),
        reward_funcs=reward_of_even_tokens,
        args=config,
        train_dataset=Dataset.from_dict({"prompt": prompts, "kind": [f"of {len(one.split())}" for one in prompts]}),
        processing_class=make_tokenizer(),
        **extra,
    )


def train_twice(rank: int, out: Path, train: Callable[..., list[torch.Tensor]]) -> None:
    """Write what `train(directory, service, found)` found with a service, and whether all is the same without one."""
    logging.disable(logging.WARNING)
    directory = out / str(rank)
    directory.mkdir()
    found: dict[str, Any] = {}
    without_us: dict[str, Any] = {}
    with receiver() as service:
        with_us = train(directory, service, found)
    without = train(directory, None, without_us)
    found["same losses"] = found["losses"] == without_us["losses"]
    found["weights"] = all(torch.equal(a, b) for a, b in zip(with_us, without, strict=True))
    (out / f"{rank}.json").write_text(json.dumps(found))
