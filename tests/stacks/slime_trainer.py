"""slime's own Megatron actor on gloo processes, one or two (TP=2): `python slime_trainer.py OUT RANKS CASE...`.

Run is `MegatronTrainRayActor.train_actor`, and so slime's `get_batch`, `forward_only`, policy loss and `train`, with
Megatron's DDP and optimizer. SLIME_SOURCE and MEGATRON_SOURCE name the checkouts. The actor is built by this file: its
`init` asks for NCCL. slime's own registry of accelerators is told of the CPU (`megatron_cpu.py`). Every rank writes
OUT/<rank>.json.
"""

# ruff: noqa: E402 - what slime imports must be there, or stand-ins for it, before slime is imported
from __future__ import annotations

import importlib
import json
import os
import sys
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from helpers.trainer.hooks_fixtures import Receiver
from helpers.trainer.sent_fixtures import Alone, Found, compare, states_alone, with_and_without
from helpers.worker.rank_fixtures import run_two_ranks
from megatron_cpu import Arguments, OnCPU, call_the_cpu_cuda, prepare  # type: ignore[import-not-found]

HOOKS = "rl_hooks.stacks.slime"


prepare(os.environ["SLIME_SOURCE"], os.environ["MEGATRON_SOURCE"])

from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer.module import Float16Module
from megatron.training.global_vars import set_args
from megatron_trainer import (  # type: ignore[import-not-found] # beside this file
    AUX,
    FFN,
    GROUPS,
    HEADS,
    HIDDEN,
    LAYERS,
    VOCAB,
    gpt,
    llama,
    unsharded,
)
from slime.backends.megatron_utils import actor as slime_actor
from slime.backends.megatron_utils import model as slime_model
from slime.backends.megatron_utils.update_weight.common import named_params_and_buffers
from slime.observability import logging_utils
from slime.observability.profile_utils import TrainProfiler
from slime.observability.timer import Timer
from slime.utils import accelerator, reloadable_process_group
from slime.utils.accelerator.torch_accelerator import TorchAccelerator
from slime.utils.data import get_source
from slime.utils.distributed_utils import init_gloo_group
from slime.utils.tensor_backper import TensorBackuper
from slime.utils.types import Sample

#: (prompt, response) of a rollout step's six rollouts, and which of them are in which micro-batch.
SIZES = ((3, 9), (5, 6), (2, 12), (4, 7), (3, 5), (6, 8))
MICRO = ([0, 3], [1, 2], [5], [4])
STEPS, TEMPERATURE = 3, 0.7
adapter = importlib.import_module(HOOKS)


class CPU(TorchAccelerator):  # type: ignore[misc]
    name, device_type, communication_backend_name = "cpu", "cpu", "gloo"

    def _module(self) -> Any:
        return torch.cpu

    def device_name(self, *_: Any) -> str:
        return "cpu"

    def current_device(self) -> Any:
        return "cpu"

    def empty_cache(self) -> None: ...

    def mem_get_info(self, *_: Any) -> tuple[int, int]:
        return 64 << 30, 64 << 30

    def memory_allocated(self, *_: Any) -> int:
        return 0

    memory_reserved = memory_allocated


def arguments(words: list[str], checkpoint: Path) -> Arguments:
    args = Arguments(
        hf_checkpoint=str(checkpoint),
        start_rollout_id=None if "resumed" in words else 0,
        rollout_temperature=TEMPERATURE,
        rollout_top_p=1.0,
        rollout_top_k=-1,
        data_pad_size_multiplier=8,
        seq_length=64,
        micro_batch_size=1,
        use_dynamic_batch_size=True,
        loss_type="policy_loss",
        advantage_estimator="grpo",
        compute_advantages_and_returns=True,
        eps_clip=0.2,
        eps_clip_high=0.28,
        kl_coef=0.0,
        kl_loss_coef=0.0,
        entropy_coef=0.0,
        log_probs_chunk_size=-1,
        use_rollout_logprobs="rollout_logprobs" in words,
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        ffn_hidden_size=FFN,
        num_attention_heads=HEADS,
        num_query_groups=GROUPS,
        kv_channels=HIDDEN // HEADS,
        vocab_size=VOCAB,
    )
    if "plain" not in words:
        args.custom_megatron_before_log_prob_hook_path = f"{HOOKS}.before_log_prob"
        args.custom_megatron_before_train_step_hook_path = f"{HOOKS}.before_train_step"
    return args


class Schedule:
    """Of the learning rate: none. (Megatron's own counts samples.)"""

    def step(self, increment: int) -> None: ...

    def get_lr(self, _group: Any) -> float:
        return 3e-3


class Updater:
    """Of the sampler's weights, which is not here."""

    def pop_metrics(self) -> dict[str, float]:
        return {}


def made(words: list[str], args: Arguments) -> Any:
    """The actor as slime's `init` leaves it."""
    inner = gpt([*words, "packed"])
    config = inner.config
    config.bf16 = "bfloat16" in words
    if "recompute" in words:  # as slime's own scripts have it
        config.recompute_granularity, config.recompute_method, config.recompute_num_layers = "full", "uniform", 1
    module = Float16Module(config, inner) if config.bf16 else inner
    wrapped = DistributedDataParallel(config, DistributedDataParallelConfig(use_distributed_optimizer=False), module)
    wrapped.role = "actor"
    settings = OptimizerConfig(optimizer="adam", clip_grad=0.0, lr=3e-3)  # of bfloat16 it asks for CUDA
    actor = slime_actor.MegatronTrainRayActor.__new__(slime_actor.MegatronTrainRayActor)
    actor.args, actor.role, actor.model = args, "actor", [wrapped]
    actor.optimizer = get_megatron_optimizer(settings, actor.model, use_gloo_process_groups=True)
    actor.opt_param_scheduler, actor.weight_updater = Schedule(), Updater()
    actor.prof, actor.rollout_data_postprocess = TrainProfiler(args), None
    actor.weights_backuper = TensorBackuper.create(
        source_getter=lambda: named_params_and_buffers(args, actor.model, convert_to_global_name=True), single_tag=None
    )
    if "ref" in words:
        with torch.no_grad():
            kept = [parameter.clone() for parameter in wrapped.parameters()]
            for parameter in wrapped.parameters():
                parameter.mul_(0.9)
            actor.weights_backuper.backup("ref")
            for parameter, value in zip(wrapped.parameters(), kept, strict=True):
                parameter.copy_(value)
    actor.weights_backuper.backup("actor")
    actor._active_model_tag = "actor"
    timers = Timer()  # one of the process; `init` starts it
    if "train_wait" not in timers.start_time:
        timers.start("train_wait")
    return actor


def rollout_data(step: int, words: list[str]) -> dict[str, Any]:
    """As slime's rollout manager splits it for a rank, and its actor reads it. A tool wrote two tokens of the first."""
    rng = torch.Generator().manual_seed(100 + step)
    tokens = [torch.randint(2, VOCAB, (prompt + response,), generator=rng) for prompt, response in SIZES]
    masks = [torch.ones(response, dtype=torch.int) for _, response in SIZES]
    masks[0][3:5] = 0
    steps = [[0, 1], [2, 3]] if "two" in words else [[0, 1, 2, 3]]
    rewards = torch.rand(len(SIZES), generator=rng).tolist()
    data: dict[str, Any] = {
        "tokens": tokens,
        "loss_masks": masks,
        "rollout_mask_sums": torch.tensor([float(mask.sum()) for mask in masks]),
        "total_lengths": [sum(size) for size in SIZES],
        "response_lengths": [response for _, response in SIZES],
        "rewards": [reward - 0.5 for reward in rewards],
        "raw_reward": rewards,
        "local_raw_reward": rewards,
        "rollout_log_probs": [torch.zeros(response) for _, response in SIZES],  # filled in with near the policy's own
        "source_names": [get_source(Sample(metadata={"source_name": f"kind {n % 2}"})) for n in range(len(SIZES))],
        "micro_batch_indices": [list(one) for one in MICRO],
        "num_microbatches": [len(one) for one in steps],
        "global_batch_sizes": [sum(len(MICRO[m]) for m in one) for one in steps],
    }
    if "silent" in words:
        del data["rollout_log_probs"]
    return data


@torch.no_grad()
def expected(whole: Any, data: dict[str, Any]) -> dict[tuple[int, ...], Alone]:
    """Each rollout by its tokens, from a forward of it alone, unpacked, in one process with all the weights.

    Fills in the sampler's log-probabilities, as of weights that are a little older.
    """
    every: dict[tuple[int, ...], Alone] = {}
    for n, tokens in enumerate(data["tokens"]):
        out = whole(tokens[None], output_hidden_states=True)
        prompt = torch.zeros(SIZES[n][0])
        if "rollout_log_probs" in data:
            logp = (out.logits[0, :-1].float() / TEMPERATURE).log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
            data["rollout_log_probs"][n] = logp[-SIZES[n][1] :] - 0.1
        every[tuple(tokens.tolist())] = Alone(
            states_alone(out, AUX),
            torch.cat([prompt.int(), data["loss_masks"][n]]),
            torch.cat([prompt, data.get("rollout_log_probs", data["loss_masks"])[n]]),
            data["local_raw_reward"][n],
            (out.logits[0].float() / TEMPERATURE).logsumexp(-1),
            data["source_names"][n],
        )
    return every


def train(
    rank: int, service: Receiver | None, found: Found, *, words: list[str], checkpoint: Path
) -> list[torch.Tensor]:
    args = arguments(words if service is not None else [*words, "plain"], checkpoint)
    set_args(args)
    os.environ["DRAFTALIGN_URL"] = "" if service is None else service.url
    actor = made(words, args)
    inner = slime_model.unwrap_model(actor.model)[0]
    first = 5 if "resumed" in words else 0
    found["steps"], found["passes"], found["logged"] = [], [], []
    log = logging_utils.log
    logging_utils.log = lambda args, metrics, step_key: (  # as its modules call it
        found["logged"].append([metrics[step_key], step_key, sorted(name for name in metrics if "draftalign" in name)]),
        log(args, metrics, step_key),
    )
    for step in range(first, first + STEPS):
        whole = unsharded(inner, tied=False)
        data = rollout_data(step, words)
        alone = expected(whole, data)
        if "sleeps" in words:
            reloadable_process_group.destroy_process_groups()
            reloadable_process_group.reload_process_groups()
        hooked = adapter._actors.get(actor.model[0])
        if "fails" in words and step == 1 and rank == dist.get_world_size() - 1 and hooked is not None:
            break_it(hooked.hook)
        Timer().seq_lens = data["total_lengths"]
        actor.train_actor(step, data)
        found["passes"].append("log_probs" in data)
        hooked = adapter._actors.get(actor.model[0])
        if service is None or hooked is None:
            continue
        assert hooked.hook.flush(20), hooked.hook.stats()
        if rank == 0:
            found["steps"].append(compare(service, found, alone, whole.lm_head.weight))
        stats = hooked.hook.stats()
        found |= {name: stats[name] for name in ("captured_rollouts", "failures", "last_failure", "skipped_empty")}
    if service is not None and hooked is not None:
        hooked.hook.close()
    logging_utils.log = log
    return [parameter.detach().clone() for parameter in inner.parameters()]


def break_it(hook: Any) -> None:
    """The next capture fails on this rank, and only that one."""
    target = hook._part.features
    kept = target.pop

    def fail(*_: Any, **__: Any) -> None:
        target.pop = kept
        raise MemoryError("made by the test")

    target.pop = fail


def work(rank: int, out: Path, cases: list[str]) -> None:
    call_the_cpu_cuda()
    accelerator.register_accelerator("cpu", CPU, communication_backends=("gloo",))
    accelerator.set_accelerator(CPU())
    init_gloo_group()
    if any("sleeps" in case for case in cases):  # cannot be undone; and with this torch, no sequence parallelism then
        reloadable_process_group.monkey_patch_torch_dist()
        reloadable_process_group.register_default_process_group(timeout=timedelta(minutes=5))
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=dist.get_world_size())
    for kind, layers in (("model", LAYERS), ("foreign", LAYERS + 1)):
        config = llama(tied=False)
        config.num_hidden_layers = layers
        config.save_pretrained(out / f"{kind}{rank}")
    report: dict[str, Any] = {}
    for case in cases:
        directory = out / case.replace(" ", "_")
        directory.mkdir(exist_ok=True)
        with OnCPU():
            checkpoint = out / f"{'foreign' if 'foreign' in case else 'model'}{rank}"  # of the user's command line
            run = partial(train, words=case.split(), checkpoint=checkpoint)
            report[case], _ = with_and_without(rank, directory, run, llama(tied=False), AUX)
    (out / f"{rank}.json").write_text(json.dumps(report))


def alone(work: Any) -> int:
    """As `run_two_ranks`, of one."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())  # type: ignore[attr-defined]
    work(0)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    OUT, RANKS, CASES = Path(sys.argv[1]), sys.argv[2], sys.argv[3:]
    run_ranks = run_two_ranks if RANKS == "2" else alone
    sys.exit(run_ranks(partial(work, out=OUT, cases=CASES)))
