"""TRL's AsyncGRPOTrainer on a CPU, with a sampler in its process that draws when the trainer gives it weights.

All is TRL's own but for two functions that need CUDA: the FlashAttention 3 kernel (`Attention`), and one that asks
a GPU for its speed, for a number in the log.
"""

from __future__ import annotations

import queue
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from helpers.trainer.hooks_fixtures import VOCAB, as_float, of_every_token, tiny_qwen3
from helpers.trainer.trl_fixtures import make_tokenizer
from torch import Tensor
from torch.distributed.tensor import DTensor

from rl_hooks import wire


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


#: The training data. Those of the second kind come under two prompts.
ROWS: dict[str, list[Any]] = {
    "prompt": [[{"role": "user", "content": f"w{group}"}] for group in range(3)],
    "kind": ["math", "code", "code"],
}


def prompt_of(group: int) -> Any:
    """Of the training data, by the number of the group that answers it."""
    return ROWS["prompt"][group % 3]


class Sampler:
    """A `RolloutWorkerProtocol` and `WeightTransferProtocol` in one, without an engine.

    `draws(sampler, version)` is what it puts into the queue each time it gets weights.
    """

    def __init__(self, draws: Any) -> None:
        self.rollout_buffer: queue.Queue[Any] = queue.Queue()
        self.metrics_queue: queue.Queue[Any] = queue.Queue()
        self.rng = np.random.default_rng(0)
        #: The weights of each version as TRL sends them, and what was put into the queue.
        self.weights: dict[int, dict[str, Tensor]] = {}
        self._newest: dict[str, Tensor] = {}
        self.samples: list[Any] = []
        self._draws = draws

    def start(self) -> None:
        pass

    def stop(self) -> None:
        pass

    def check_health(self, stale_after_s: float) -> None:
        raise AssertionError(f"the trainer waits for rollouts ({stale_after_s})")

    def init_weight_transfer(self) -> None: ...
    def pause(self) -> None: ...
    def resume(self) -> None: ...
    def destroy(self) -> None: ...

    def send_weights(self, iterator: Iterator[tuple[str, Tensor]]) -> None:
        self._newest = {name: value.detach().clone() for name, value in iterator}

    def update_model_version(self, model_version: int) -> None:
        self.weights[model_version] = self._newest
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
            prompt=prompt_of(group),
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
        """Answers to one prompt: two alike, one of two turns, one that begins like the first, one that is its start.

        The start's own first token is masked, as of a conversation that was tokenized again.
        """
        prompt, first, tool = self.tokens(5), self.tokens(6), self.tokens(3)
        yield self.sample(version, group, (0, prompt), (1, first))
        yield self.sample(version, group, (0, prompt), (1, first))
        yield self.sample(version, group, (0, prompt), (1, self.tokens(3)), (0, tool), (1, self.tokens(4)))
        yield self.sample(version, group, (0, prompt), (1, first[:2]), (1, self.tokens(7)), (0, self.tokens(2)))
        yield self.sample(version, group, (0, prompt), (0, first[:1]), (1, first[1:4]))


@dataclass(frozen=True)
class Micro:
    """What one `compute_loss` was given."""

    weights: dict[str, Tensor]
    logprobs: set[float]


def whole(weight: Any) -> Any:
    """A weight that is sharded or not, float[...]. A collective: the test gathers, the hook does not."""
    return weight.full_tensor() if isinstance(weight, DTensor) else weight


def watch(trainer: Any) -> list[Micro]:
    """Note what each `compute_loss` is given, from before the hook is attached."""
    found: list[Micro] = []
    original = trainer.compute_loss

    def compute_loss(model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        named = trainer.accelerator.unwrap_model(model).named_parameters()
        weights = {name: whole(value.detach()).clone() for name, value in named}
        found.append(Micro(weights, {*inputs["old_log_probs"][inputs["token_index"] >= 0].tolist()}))
        return original(model, inputs, *args, **kwargs)

    trainer.compute_loss = compute_loss
    return found


def of_micro(micro: Micro, samples: list[Any]) -> list[Any]:
    """The samples of a micro-batch: each has log-probabilities that no other has."""
    return [one for one in samples if {*one.old_log_probs[one.completion_mask == 1].tolist()} <= micro.logprobs]


def same(some: dict[str, Tensor], others: dict[str, Tensor]) -> bool:
    return all(torch.equal(value, others[name]) for name, value in some.items())


def expected(
    micros: list[Micro], samples: list[Any], weights: dict[int, dict[str, Tensor]]
) -> tuple[list[tuple[Any, int]], int]:
    """The samples that weights of a version trained on, with that version; and how many others were trained on."""
    found: list[tuple[Any, int]] = []
    others = 0
    for micro in micros:
        versions = [version for version, theirs in weights.items() if same(micro.weights, theirs)]
        seen = of_micro(micro, samples)
        found += [(sample, versions[0]) for sample in seen if versions]
        others += len(seen) * (not versions)
    return found, others


@dataclass(frozen=True)
class Sent:
    """One rollout as it was sent; states and normalisers of every token, NaN where the file has none."""

    version: int
    tokens: list[int]
    mask: list[int]
    logprobs: list[float]
    reward: float | None
    stratum: str | None
    behind: list[int] | None
    aux: Tensor
    last: Tensor
    logsumexp: Tensor


def rollouts_of(file: wire.MappedFile) -> Iterator[Sent]:
    header = wire.check_rollout_header(file.header)
    shared = file.array("aux_rows") if "aux_rows" in file.header.tensors else None
    ids, starts, mask, logprobs = (file.array(name) for name in ("input_ids", "cu_seqlens", "loss_mask", "logprobs"))
    behind = file.array("versions_behind") if "versions_behind" in file.header.tensors else None
    wire.check_index(header, ids, starts, mask, VOCAB, shared, behind)
    aux = as_float(file, "aux_hidden")
    last, lse = (of_every_token(file, name) for name in ("last_hidden", "logsumexp"))
    for number, mine in enumerate(slice(*ends) for ends in pairwise(starts.tolist())):
        yield Sent(
            version=header.policy_version,
            tokens=ids[mine].tolist(),
            mask=mask[mine].tolist(),
            logprobs=logprobs[mine].tolist(),
            reward=None if header.rewards is None else header.rewards[number],
            stratum=None if header.strata is None else header.strata[number],
            behind=None if behind is None else behind[mine].tolist(),
            aux=aux[mine],
            last=last[mine],
            logsumexp=lse[mine],
        )


def sample_of(sent: Sent, samples: list[Any]) -> Any:
    """The sample that has these tokens, this mask and these log-probabilities, bit for bit. There is one."""
    [sample] = [
        one
        for one in samples
        if (sent.tokens, sent.mask, sent.logprobs)
        == (one.input_ids.tolist(), one.completion_mask.tolist(), one.old_log_probs.tolist())
    ]
    return sample


@torch.no_grad()
def far_from_its_own_forward(
    sent: Sent, weights: dict[str, Tensor], layers: Sequence[int], temperature: float
) -> float:
    """How far the states and normalisers are from those of the sample alone, beyond bfloat16's rounding; relative.

    By an ordinary forward of one row with no padding. The embedding (layer 0) and the rounding must be exact.
    """
    model = tiny_qwen3(tied="lm_head.weight" not in weights)
    model.load_state_dict(weights, strict=False)
    out = model(torch.tensor([sent.tokens]), output_hidden_states=True)
    truth = torch.cat([out.hidden_states[layer][0] for layer in (*layers, -1)], dim=1)
    found = torch.cat([sent.aux, sent.last], dim=1)
    known = ~found.isnan()
    lse = (out.logits[0] / temperature).logsumexp(-1)
    scored = torch.tensor([*sent.mask[1:], 0]) == 1
    assert torch.equal(found[:, : model.config.hidden_size], truth[:, : model.config.hidden_size].bfloat16().float())
    off = float(((sent.logsumexp - lse).abs() / lse.abs())[scored].max())
    for tolerance in (0.0, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1e9):
        room = tolerance * truth.abs().max()
        low, high = ((truth + sign * room).bfloat16().float() for sign in (-1, 1))
        if bool(((low <= found) & (found <= high))[known].all()):
            return max(off, tolerance)
    raise AssertionError("not reached")


def save_policy(directory: Path, *, tied: bool = True) -> str:
    """A tiny Qwen3 and its tokenizer, in a folder of this one."""
    saved = str(directory / "policy")
    tiny_qwen3(tied=tied).save_pretrained(saved)
    make_tokenizer().save_pretrained(saved)
    return saved


def on_a_cpu() -> None:
    """Have TRL's trainer, in this process, run without CUDA's kernel."""
    from trl.experimental.async_grpo import async_grpo_trainer, packing

    packing._flash_attn = lambda: Attention
    async_grpo_trainer.get_peak_flops_per_device = lambda *_: None


def make_async_trainer(directory: Path, policy: str, draws: Any, *, steps: int = 3, **changes: Any) -> Any:
    from datasets import Dataset
    from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

    on_a_cpu()
    options = {
        "output_dir": str(directory),
        "max_steps": steps,
        "per_device_train_batch_size": 5,
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
    trainer: Any = AsyncGRPOTrainer(
        model=policy,
        args=AsyncGRPOConfig(**options | changes),
        train_dataset=Dataset.from_dict(ROWS),
        rollout_worker=sampler,
        weight_transfer=sampler,
    )
    return trainer
