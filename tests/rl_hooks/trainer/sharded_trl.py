"""TRL's GRPOTrainer under accelerate's FSDP2 on two gloo processes, with and without us: `python sharded_trl.py OUT`.

accelerate shards on accelerators only, so it is told that the CPU is one. Nothing else of it or of TRL is changed.
"""

from __future__ import annotations

import json
import logging
import sys
from copy import deepcopy
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from hooks_fixtures import as_float, mapped, receiver, tiny_qwen3
from rank_fixtures import run_two_ranks
from torch.distributed.tensor import DTensor
from trl_fixtures import make_trainer

from rl_hooks.trl import attach

STEPS = 3
AUX = (1, 2, 3)


def _call_the_cpu_an_accelerator() -> None:
    make: Any = PartialState.__init__

    def made(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        if self._shared_state["distributed_type"] == DistributedType.MULTI_CPU:
            self._shared_state["distributed_type"] = DistributedType.MULTI_HPU

    PartialState.__init__ = made


def train(rank: int, directory: Path, service: Any, found: dict[str, Any]) -> list[torch.Tensor]:
    AcceleratorState._reset_state(reset_partial_state=True)
    plain = tiny_qwen3()
    trainer = make_trainer(directory, steps=STEPS, generation_kwargs={"min_new_tokens": 12})
    wholes: list[Any] = []
    attachment = None
    if service is not None:
        attachment = attach(trainer, service.url, run="r", aux_layers=AUX)
        loss = trainer._compute_loss

        def remember(model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            copy = deepcopy(plain)  # to make another would seed the generator that samples
            for mine, theirs in zip(copy.parameters(), trainer.model.parameters(), strict=True):
                # The test gathers; the hook does not.
                mine.data.copy_(theirs.full_tensor() if isinstance(theirs, DTensor) else theirs)
            wholes.append(copy)
            return loss(model, inputs, *args, **kwargs)

        trainer._compute_loss = remember
    trainer.train()
    found["sharded"] = all(isinstance(p, DTensor) for p in trainer.model.parameters())
    found["losses"] = [(log["loss"], log["grad_norm"]) for log in trainer.state.log_history if "loss" in log]
    if attachment is not None:
        assert attachment.flush(30)
        stats = attachment.stats()
        found["stats"] = {
            name: stats[name] for name in ("failures", "captured_rollouts", "last_failure", "skipped_stale")
        }
        found["requests"] = [f"{r.method} {r.path}" for r in service.requests]
        found["steps"] = [
            compare(mapped(r, directory), whole) for r, whole in zip(service.rollouts(), wholes, strict=True)
        ]
        heads = [mapped(r, directory) for r in service.requests if r.method == "PUT"]
        newest = as_float(heads[-1], "lm_head" if "lm_head" in heads[-1] else "embed_tokens") if heads else None
        found["head"] = newest is None or torch.equal(newest, wholes[-1].lm_head.weight)
    return [p.to_local().detach().clone() for p in trainer.model.parameters()]


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


def work(rank: int, out: Path) -> None:
    logging.disable(logging.WARNING)
    found: dict[str, Any] = {}
    directory = out / str(rank)
    directory.mkdir()
    without_us: dict[str, Any] = {}
    with receiver() as service:
        with_us = train(rank, directory, service, found)
    without = train(rank, directory, None, without_us)
    found["same losses"] = found["losses"] == without_us["losses"]
    found["weights"] = all(torch.equal(a, b) for a, b in zip(with_us, without, strict=True))
    (out / f"{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    sys.exit(run_two_ranks(partial(work, out=Path(sys.argv[1])), before=_call_the_cpu_an_accelerator))
