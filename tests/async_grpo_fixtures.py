"""TRL's AsyncGRPOTrainer on a CPU, with a sampler in its process that draws when the trainer gives it weights.

All is TRL's own but for two functions that need CUDA: the FlashAttention 3 kernel (`Attention`), and one that asks a GPU
for its speed, for a number in the log.
"""

from __future__ import annotations

import queue
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hooks_fixtures import VOCAB, tiny_qwen3
from torch import Tensor
from trl_fixtures import make_tokenizer


class Attention:
    """FlashAttention's kernel for ragged rows, in plain torch: a query sees the keys up to its own, from the end."""

    @staticmethod
    def flash_attn_varlen_func(
        q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, _most_q: int, _most_k: int, **said: Any
    ) -> Tensor:
        assert said["causal"]
        assert said["window_size"] == (-1, -1)
        found = []
        for segment in range(len(cu_q) - 1):
            queries = q[cu_q[segment] : cu_q[segment + 1]]
            keys, values = (
                one[cu_k[segment] : cu_k[segment + 1]].repeat_interleave(q.shape[1] // k.shape[1], dim=1)
                for one in (k, v)
            )
            seen = torch.ones(len(queries), len(keys), dtype=torch.bool).tril(len(keys) - len(queries))
            scores = torch.einsum("qhd,khd->hqk", queries, keys) * said["softmax_scale"]
            found.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), values))
        return torch.cat(found)


class Sampler:
    """A `RolloutWorkerProtocol`: `draws(sampler, version)` says what it puts into the queue, each time it gets weights."""

    def __init__(self, draws: Any) -> None:
        self.rollout_buffer: queue.Queue[Any] = queue.Queue()
        self.metrics_queue: queue.Queue[Any] = queue.Queue()
        self.rng = np.random.default_rng(0)
        self.model: Any = None
        #: The weights of each version, and what was put into the queue.
        self.weights: dict[int, dict[str, Tensor]] = {}
        self.samples: list[Any] = []
        self._draws = draws

    def start(self) -> None:
        pass

    def stop(self) -> None:
        pass

    def check_health(self, stale_after_s: float) -> None:
        raise AssertionError(f"the trainer waits for rollouts ({stale_after_s})")

    def update_model_version(self, model_version: int) -> None:
        self.weights[model_version] = deepcopy(self.model.state_dict())
        for sample in self._draws(self, model_version):
            self.samples.append(sample)
            self.rollout_buffer.put(sample)

    def tokens(self, count: int) -> list[int]:
        return [int(token) for token in self.rng.integers(2, VOCAB, count)]

    def sample(self, version: int, group: int, *turns: tuple[int, list[int]]) -> Any:
        """A sample of `turns` (1 if the policy generated them, tokens)."""
        from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

        ids = [token for _, tokens in turns for token in tokens]
        mask = np.array([own for own, tokens in turns for _ in tokens])
        logprobs = np.where(mask == 1, -self.rng.uniform(0.5, 4.0, len(ids)), 0.0)
        return RolloutSample(
            prompt=[],
            completion=[],
            input_ids=np.array(ids),
            completion_mask=mask,
            old_log_probs=logprobs.astype(np.float32),
            advantage=float(self.rng.normal()),
            model_version=version,
            group_id=group,
            metrics={"reward": float(self.rng.uniform())},
        )

    def group(self, version: int, group: int) -> Iterator[Any]:
        """Four answers to one prompt: the second one of two turns, the third like the first for two tokens, the last cut."""
        prompt, first, tool = self.tokens(5), self.tokens(6), self.tokens(3)
        yield self.sample(version, group, (0, prompt), (1, first))
        yield self.sample(version, group, (0, prompt), (1, self.tokens(3)), (0, tool), (1, self.tokens(4)))
        yield self.sample(version, group, (0, prompt), (1, first[:2]), (1, self.tokens(7)), (0, self.tokens(2)))
        yield self.sample(version, group, (0, prompt), (0, first[:1]), (1, first[1:4]))


class NoTransfer:
    """A `WeightTransferProtocol` that transfers nothing: the sampler reads the trainer's model."""

    def init_weight_transfer(self) -> None: ...
    def pause(self) -> None: ...
    def send_weights(self, iterator: Iterator[Any]) -> None: ...
    def resume(self) -> None: ...
    def destroy(self) -> None: ...


def make_async_trainer(directory: Path, draws: Any, *, steps: int = 3, tied: bool = True, **changes: Any) -> Any:
    from datasets import Dataset
    from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer, async_grpo_trainer, packing

    packing._flash_attn = lambda: Attention
    async_grpo_trainer.get_peak_flops_per_device = lambda *_: None
    saved, tokenizer = str(directory / "policy"), make_tokenizer()
    tiny_qwen3(tied=tied).save_pretrained(saved)
    tokenizer.save_pretrained(saved)
    options = {
        "output_dir": str(directory),
        "max_steps": steps,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 3,
        "token_budget": 0,
        "learning_rate": 1e-2,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "bf16": False,
        "seed": 0,
        "gradient_checkpointing": False,
    }
    sampler = Sampler(draws)
    trainer = AsyncGRPOTrainer(
        model=saved,
        args=AsyncGRPOConfig(**options | changes),
        train_dataset=Dataset.from_dict({"prompt": ["w2"]}),
        processing_class=tokenizer,
        rollout_worker=sampler,
        weight_transfer=NoTransfer(),
    )
    sampler.model = trainer.model
    return trainer
