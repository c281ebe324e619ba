# ruff: noqa: E402 - what miles imports must be there, or stand-ins for it, before miles is imported
"""miles' own pass for log-probabilities at TP=2 on two gloo processes: `python miles_trainer.py OUT`.

Run are its `forward_only`, `get_batch`, `DataIterator` and `get_log_probs_and_entropy`, in two rollout steps of other
weights. MILES_SOURCE, MEGATRON_SOURCE: the checkouts (Megatron-LM with slime's patch, where miles has a fork). Its
actor and its `train` are not run: `before_train_step` is called where they call it. Every rank writes OUT/<rank>.json.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from helpers.trainer.hooks_fixtures import Receiver
from helpers.trainer.sent_fixtures import Alone, Found, compare, states_alone, with_and_without
from helpers.worker.rank_fixtures import run_two_ranks
from megatron_cpu import Arguments, OnCPU, call_the_cpu_cuda, prepare  # type: ignore[import-not-found]

prepare(os.environ["MILES_SOURCE"], os.environ["MEGATRON_SOURCE"])

from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.training.global_vars import set_args
from megatron_trainer import AUX, VOCAB, gpt, llama, unsharded  # type: ignore[import-not-found] # beside this file
from miles.backends.megatron_utils.model import forward_only
from miles.backends.megatron_utils.parallel import create_megatron_parallel_state
from miles.backends.training_utils.data import DataIterator
from miles.backends.training_utils.loss import get_log_probs_and_entropy
from miles.backends.training_utils.parallel import set_parallel_state
from miles.utils.ft_utils.process_group_utils import GroupInfo

HOOKS = "rl_hooks.stacks.slime"
SIZES = ((3, 9), (5, 6), (2, 12), (4, 7))
MICRO = [[0, 2], [1], [3]]
STEPS, TEMPERATURE = 2, 0.7
adapter = importlib.import_module(HOOKS)


def rollout_data(step: int) -> dict[str, Any]:
    rng = torch.Generator().manual_seed(100 + step)
    return {
        "tokens": [torch.randint(2, VOCAB, (prompt + response,), generator=rng) for prompt, response in SIZES],
        "loss_masks": [torch.ones(response, dtype=torch.int) for _, response in SIZES],
        "total_lengths": [sum(size) for size in SIZES],
        "response_lengths": [response for _, response in SIZES],
        "rollout_log_probs": [torch.zeros(response) for _, response in SIZES],  # filled in with near the policy's own
    }


@torch.no_grad()
def expected(whole: Any, data: dict[str, Any]) -> dict[tuple[int, ...], Alone]:
    """By tokens. Fills in the sampler's log-probabilities, as of weights that are a little older."""
    every: dict[tuple[int, ...], Alone] = {}
    for (prompt, _), tokens, mask, logprobs in zip(
        SIZES, data["tokens"], data["loss_masks"], data["rollout_log_probs"], strict=True
    ):
        out, before = whole(tokens[None], output_hidden_states=True), torch.zeros(prompt)
        logp = (out.logits[0, :-1].float() / TEMPERATURE).log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
        logprobs.copy_(logp[prompt - 1 :] - 0.1)
        every[tuple(tokens.tolist())] = Alone(
            states_alone(out, AUX),
            torch.cat([before.int(), mask]),
            torch.cat([before, logprobs]),
            None,
            (out.logits[0].float() / TEMPERATURE).logsumexp(-1),
        )
    return every


def train(rank: int, service: Receiver | None, found: Found, *, checkpoint: Path) -> list[torch.Tensor]:
    args = Arguments(
        hf_checkpoint=str(checkpoint),
        start_rollout_id=0,
        rollout_temperature=TEMPERATURE,
        rollout_top_p=1.0,
        rollout_top_k=-1,
        data_pad_size_multiplier=8,
        qkv_format="thd",
        seq_length=64,
        micro_batch_size=1,
        log_probs_chunk_size=-1,
        use_dynamic_batch_size=True,
        custom_megatron_before_log_prob_hook_path=None if service is None else f"{HOOKS}.before_log_prob",
    )
    set_args(args)
    set_parallel_state(create_megatron_parallel_state(GroupInfo(rank=0, size=1, group=None)))
    os.environ["DRAFTALIGN_URL"] = "" if service is None else service.url
    inner = gpt(["packed"])
    model = [DistributedDataParallel(inner.config, DistributedDataParallelConfig(), inner)]
    model[0].role = "actor"
    found["steps"], found["log_probs"] = [], []
    for step in range(STEPS):
        data = rollout_data(step)
        whole = unsharded(inner, tied=False)
        alone = expected(whole, data)
        iterator = [DataIterator(data, None, MICRO)]
        for prefix in ("ref_", ""):
            got = forward_only(
                get_log_probs_and_entropy, args, model, iterator, [len(MICRO)], rollout_id=step, store_prefix=prefix
            )
        found["log_probs"] += [one.tolist() for one in got["log_probs"]]
        if service is not None:
            hook = adapter._actors[model[0]].hook
            assert hook.flush(20), hook.stats()
            if rank == 0:
                found["steps"].append(compare(service, found, alone, whole.lm_head.weight))
            adapter.before_train_step(args, step, 0, model, None, None)
        with torch.no_grad():
            for parameter in inner.parameters():
                parameter.mul_(1.01)
    if service is not None:
        stats = hook.stats()
        found |= {name: stats[name] for name in ("captured_rollouts", "failures", "last_failure")}
        hook.close()
    return [parameter.detach().clone() for parameter in inner.parameters()]


def work(rank: int, out: Path) -> None:
    call_the_cpu_cuda()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=dist.get_world_size())
    llama(tied=False).save_pretrained(checkpoint := out / f"model{rank}")
    with OnCPU():
        found, own = with_and_without(rank, out, partial(train, checkpoint=checkpoint), llama(tied=False), AUX)
    found["same"] = found["log_probs"] == own["log_probs"]
    (out / f"{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    sys.exit(run_two_ranks(partial(work, out=Path(sys.argv[1]))))
