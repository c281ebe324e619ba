"""TRL's GRPOTrainer on two gloo processes, with and without us: `python sharded_trl.py OUT [zero3]`.

Under accelerate's FSDP2; it shards on accelerators only, so it is told that the CPU is one. With `zero3`, under its
DeepSpeed ZeRO-3. Nothing else of them or of TRL is changed.
"""

from __future__ import annotations

import sys
from copy import deepcopy
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from helpers.trainer.hooks_fixtures import as_float, mapped, tiny_qwen3
from helpers.trainer.trl_fixtures import make_trainer, train_twice
from helpers.worker.rank_fixtures import call_the_cpu_an_accelerator, run_two_ranks
from torch.distributed.tensor import DTensor

from rl_hooks.trl import attach

ZERO3 = sys.argv[2:] == ["zero3"]
STEPS = 3
AUX = (1, 2, 3)


def _let_deepspeed_run_on_cpus() -> None:
    """It builds no C++: the lock of a build that was killed would hang every later run."""
    import deepspeed  # of the environments that have it

    PartialState._prepare_backend = lambda *_, **__: ("gloo", DistributedType.MULTI_CPU)
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]
    enter = deepspeed.zero.GatheredParameters.__enter__

    def gathers(self: Any) -> None:
        """DeepSpeed's own sometimes returns before gloo has it all."""
        enter(self)
        for parameter in self.params:
            parameter.data.copy_(whole_of(parameter))

    deepspeed.zero.GatheredParameters.__enter__ = gathers


def whole_of(parameter: Any) -> Any:
    """A parameter as the model has it, float[...]. A collective."""
    if isinstance(parameter, DTensor):
        return parameter.full_tensor()
    if not hasattr(parameter, "ds_tensor"):
        return parameter
    shards = [torch.empty_like(parameter.ds_tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(shards, parameter.ds_tensor)
    return torch.cat(shards)[: parameter.ds_numel].view(parameter.ds_shape)


def share_of(parameter: Any) -> torch.Tensor:
    """What this rank has of it."""
    part = parameter.to_local() if isinstance(parameter, DTensor) else parameter.ds_tensor
    return part.detach().clone()


def train(directory: Path, service: Any, found: dict[str, Any]) -> list[torch.Tensor]:
    AcceleratorState._reset_state(reset_partial_state=True)
    plain = tiny_qwen3()
    trainer = make_trainer(directory, steps=STEPS, generation_kwargs={"min_new_tokens": 12}, use_cpu=not ZERO3)
    wholes: list[Any] = []
    attachment = None
    if service is not None:
        attachment = attach(trainer, service.url, run="r", aux_layers=AUX)
        loss = trainer._compute_loss

        def remember(model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            copy = deepcopy(plain)  # to make another would seed the generator that samples
            for mine, theirs in zip(copy.parameters(), trainer.model.parameters(), strict=True):
                mine.data.copy_(whole_of(theirs))  # the test gathers; the hook does not
            wholes.append(copy)
            return loss(model, inputs, *args, **kwargs)

        trainer._compute_loss = remember
    trainer.train()
    found["sharded"] = all(isinstance(p, DTensor) or hasattr(p, "ds_tensor") for p in trainer.model.parameters())
    found["losses"] = [(log["loss"], log["grad_norm"]) for log in trainer.state.log_history if "loss" in log]
    if attachment is not None:
        assert attachment.flush(30)
        stats = attachment.stats()
        found["stats"] = {
            name: stats[name] for name in ("failures", "captured_rollouts", "last_failure", "skipped_stale")
        }
        found["requests"] = [f"{r.method} {r.path}" for r in service.requests]
        files = [mapped(r, directory) for r in service.rollouts()]
        found["versions"] = [int(file.header.metadata["policy_version"]) for file in files]
        found["steps"] = [compare(f, wholes[version]) for f, version in zip(files, found["versions"], strict=True)]
        heads = [mapped(r, directory) for r in service.requests if r.method == "PUT"]
        newest = as_float(heads[-1], "lm_head" if "lm_head" in heads[-1] else "embed_tokens") if heads else None
        found["head"] = newest is None or torch.equal(newest, wholes[-1].lm_head.weight)
    return [share_of(p) for p in trainer.model.parameters()]


@torch.no_grad()
def compare(file: Any, whole: Any) -> dict[str, Any]:
    """Every rollout sent, against its own unpadded forward in a model of one process."""
    cu, ids = file.array("cu_seqlens"), torch.from_numpy(file.array("input_ids").astype(np.int64))
    worst, lse_gap, logp_gap = 0.0, 0.0, 0.0
    for begin, end in pairwise(cu.tolist()):
        out = whole(ids[None, begin:end], output_hidden_states=True)
        states = torch.cat([out.hidden_states[i][0] for i in (*AUX, -1)], 1)
        sent = torch.cat([as_float(file, n)[begin:end] for n in ("aux_hidden", "last_hidden")], 1)
        worst = max(worst, float((sent - states).abs().max() / states.abs().max()))
        at = torch.from_numpy(file.array("loss_mask")[begin:end].astype(np.int64)).nonzero()[:, 0]
        lse = torch.from_numpy(file.array("logsumexp")[begin:end].copy())
        logp = torch.from_numpy(file.array("logprobs")[begin:end].copy())
        expected = out.logits[0].log_softmax(-1)[at - 1].gather(1, ids[begin:end][at][:, None])[:, 0]
        lse_gap = max(lse_gap, float((lse - out.logits[0].logsumexp(-1))[at - 1].abs().max()))
        logp_gap = max(logp_gap, float((logp[at] - expected).abs().max()))
    return {"rollouts": len(cu) - 1, "features": worst, "lse": lse_gap, "logp": logp_gap}


if __name__ == "__main__":
    before = _let_deepspeed_run_on_cpus if ZERO3 else call_the_cpu_an_accelerator
    sys.exit(run_two_ranks(partial(train_twice, out=Path(sys.argv[1]), train=train), before=before))
