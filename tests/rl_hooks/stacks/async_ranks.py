"""TRL's AsyncGRPOTrainer on two gloo processes, with and without us: `python async_ranks.py OUT [fsdp2]`.

Under accelerate's DDP. With `fsdp2`, under its FSDP2, which is told that the CPU is an accelerator.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState
from helpers.trainer.async_grpo_fixtures import (
    ROWS,
    Sampler,
    expected,
    far_from_its_own_forward,
    make_async_trainer,
    rollouts_of,
    sample_of,
    save_policy,
    watch,
    whole,
)
from helpers.trainer.hooks_fixtures import mapped
from helpers.trainer.trl_fixtures import train_twice
from helpers.worker.rank_fixtures import call_the_cpu_an_accelerator, run_two_ranks
from torch.distributed.tensor import DTensor

from rl_hooks.trl import attach

AUX = (0, 1, 3)
FSDP2 = sys.argv[2:] == ["fsdp2"]


def draws(sampler: Sampler, version: int) -> Iterator[Any]:
    """Two groups a micro-batch. In the first version those of rank 0 are said to be of the version before."""
    for group in range(6 + 2 * (version == 1)):
        for sample in sampler.group(version, 10 * version + group):
            sample.model_version -= version == 1 and group % 2 == 0
            yield sample


def train(policy: str, directory: Path, service: Any, found: dict[str, Any]) -> list[torch.Tensor]:
    AcceleratorState._reset_state(reset_partial_state=True)
    trainer = make_async_trainer(directory, policy, draws, **({} if FSDP2 else {"ddp_find_unused_parameters": False}))
    micros = watch(trainer)
    attachment = None if service is None else attach(trainer, service.url, run="r", aux_layers=AUX, strata="kind")
    trainer.train()
    found["losses"] = [(log["loss"], log["grad_norm"]) for log in trainer.state.log_history if "loss" in log]
    if attachment is not None:
        assert attachment.flush(30)
        stats = attachment.stats()
        found["stats"] = {name: stats[name] for name in ("failures", "captured_rollouts", "last_failure")}
        worker = trainer.rollout_worker
        shared = [None if worker is None else (worker.samples, worker.weights)]
        dist.broadcast_object_list(shared)
        assert shared[0] is not None
        samples, weights = shared[0]
        wanted, others = expected(micros, samples, weights)
        found["others"] = (others, stats["skipped_stale"])
        sent = [one for request in service.rollouts() for one in rollouts_of(mapped(request, directory))]
        of_sample = [sample_of(one, samples) for one in sent]
        labelled = sorted((id(sample), one.version) for one, sample in zip(sent, of_sample, strict=True))
        found["wanted"] = labelled == sorted((id(sample), version) for sample, version in wanted)
        found["numbers"] = [number for number, sample in enumerate(samples) if any(sample is one for one in of_sample)]
        pairs = list(zip(sent, of_sample, strict=True))
        found["rewards"] = all(a.reward == b.metrics["reward"] for a, b in pairs)
        found["kinds"] = all(a.stratum == ROWS["kind"][b.group_id % 3] for a, b in pairs)
        found["versions"] = sorted({one.version for one in sent})
        found["far"] = max(far_from_its_own_forward(one, weights[one.version], AUX, 1.0) for one in sent)
        found["requests"] = [f"{r.method} {r.path}" for r in service.requests]
        attachment.close()
    found["sharded"] = all(isinstance(p, DTensor) for p in trainer.model.parameters())
    return [whole(p.detach()).clone() for p in trainer.model.parameters()]


if __name__ == "__main__":
    place = Path(sys.argv[1])
    before = call_the_cpu_an_accelerator if FSDP2 else lambda: None
    sys.exit(run_two_ranks(partial(train_twice, out=place, train=partial(train, save_policy(place))), before=before))
