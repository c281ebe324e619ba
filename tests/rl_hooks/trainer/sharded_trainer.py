"""Two gloo processes train a tiny model under FSDP2 with the hook on it. Each compares what it sent with a model of its
own that is whole, and writes what it found: `python sharded_trainer.py OUT.json CASE...`

A case is words: how the model is wrapped (`root`, `keep`, `group`, `head`, `embedding`, `tied`, `bf16`, `fused`,
`checkpoint`), `early` (attached before it is sharded), `packed`, and `broken` (the hook of rank 1 fails).
"""

from __future__ import annotations

import dataclasses
import json
import sys
import tempfile
import types
from contextlib import nullcontext
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers.modeling_outputs import CausalLMOutputWithPast

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from helpers.trainer.hooks_fixtures import as_float, mapped, padded_batch, receiver, tiny_qwen3
from helpers.worker.rank_fixtures import run_two_ranks

from rl_hooks.hook import DrafterHook
from rl_hooks.sending.features import score_logits, score_rows
from rl_hooks.trainer import staging

AUX = (1, 2, 3)
TEMPERATURE = 0.7
STEPS = 2


def shard(model: Any, words: list[str], world: int) -> None:
    options: dict[str, Any] = {
        "mesh": init_device_mesh("cpu", (world,)),
        "reshard_after_forward": "keep" not in words,
    }
    if "bf16" in words:
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, **options)
    if "group" in words:  # torchtitan, prime-rl
        fully_shard([model.model.norm, model.lm_head], **options)
    if "head" in words:
        fully_shard(model.lm_head, **options)
    if "embedding" in words:
        fully_shard(model.model.embed_tokens, **options)
    fully_shard(model, **options)


def fused(self: Any, **inputs: Any) -> CausalLMOutputWithPast:
    """A fused loss takes the head's weight by hand and never calls lm_head."""
    hidden = self.model(**inputs).last_hidden_state
    weight = self.lm_head.weight
    return CausalLMOutputWithPast(logits=hidden @ (weight.full_tensor() if isinstance(weight, DTensor) else weight).T)


def make(words: list[str]) -> Any:
    return tiny_qwen3(tied="tied" in words, seed=3).train()


def inputs_of(words: list[str], seed: int) -> tuple[dict[str, Any], dict[str, Any], list[list[int]]]:
    """What the model is called with, what `capture` is told, and the rollouts."""
    batch = padded_batch([(3, 9), (7, 4), (1, 12), (5, 1)], seed=seed)
    loss = batch.loss_mask
    if "packed" not in words:
        given = {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask}
        return given, given | {"loss_mask": loss}, batch.sequences
    lengths = torch.tensor([len(one) for one in batch.sequences])
    row = torch.tensor([[*chain(*batch.sequences), 0, 0, 0]])  # padded to a bucket
    positions = torch.cat([torch.arange(n) for n in [*lengths.tolist(), 3]])[None]
    told = {
        "input_ids": row[:, :-3],
        "cu_seqlens": torch.tensor([0, *lengths.cumsum(0)]),
        "loss_mask": loss[batch.attention_mask == 1][None],
    }
    return {"input_ids": row, "position_ids": positions}, told, batch.sequences


def train(rank: int, world: int, words: list[str], *, attached: bool, found: dict[str, Any]) -> list[torch.Tensor]:
    """Some steps of AdamW. Returns this rank's shards."""
    model = make(words)
    with receiver() as service:
        strict = "broken" not in words

        def attach() -> DrafterHook:
            ranks: dict[str, Any] = {"rank": rank, "world_size": world}
            return DrafterHook(model, service.url, run="r", aux_layers=AUX, **ranks, strict=strict)

        hook = attach() if attached and "early" in words else None
        if "checkpoint" in words:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        if "ddp" in words:
            model = DistributedDataParallel(model)
        else:
            shard(model, words, world)
        if "fused" in words:
            model.forward = types.MethodType(fused, model)
        if attached and hook is None:
            hook = attach()
        if hook is not None and "broken" in words and rank == 1:
            break_inside()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for step in range(STEPS):
            given, told, sequences = inputs_of(words, seed=10 * step + rank)
            known: dict[str, Any] = {}
            if "head" in words and "fused" in words:
                known["logprobs"] = torch.full(told["loss_mask"].shape, -1.5)
            capture = (
                nullcontext()
                if hook is None
                else hook.capture(
                    **told,
                    **known,
                    policy_version=step,
                    temperature=TEMPERATURE,
                    rollout_ids=[f"{rank}-{step}-{i}" for i in range(4)],
                )
            )
            whole = whole_copy(model, words) if attached else None
            with capture:
                out = model(**given, use_cache=False, output_hidden_states=True)
                (out.logits.float().logsumexp(-1) * 1e-2).mean().backward()  # gathers again; checkpoints run again
            if hook is not None:
                found.setdefault("said", []).append(hook.stats()["last_failure"])
            optimizer.step()
            optimizer.zero_grad()
            if hook is not None and whole is not None:
                assert hook.flush(20), hook.stats()
                # Mixed precision is not a bfloat16 model: its own states are the truth then.
                truth = out if "bf16" in words else whole(**given, use_cache=False, output_hidden_states=True)
                note = found.setdefault("steps", []).append
                if len(service.rollouts()) > step:
                    note(compare(service, whole, truth, told, sequences, step))
        if hook is not None:
            found["stats"] = {
                k: v for k, v in hook.stats().items() if k in ("failures", "captured_rollouts", "last_failure")
            }
            found["requests"] = [f"{r.method} {r.path}" for r in service.requests]
            found["closed"] = hook.close()
            vars(staging).update(score_rows=score_rows, score_logits=score_logits)  # what `break_inside` took away
            hooks = [
                one for m in model.modules() for one in (*m._forward_pre_hooks.values(), *m._forward_hooks.values())
            ]
            ours = [one for one in hooks if getattr(one, "func", one).__module__.startswith("rl_hooks")]
            found["hooks_left"] = len(ours)
    return [getattr(p, "to_local", lambda p=p: p)().detach().clone() for p in model.parameters()]


def break_inside() -> None:
    """Let the hook fail within the forward: first where it copies rows, and then where it scores them."""
    good = staging.RolloutStaging.targets

    def no_rows(self: Any, plan: Any, device: torch.device) -> Any:
        targets = good(self, plan, device)
        return targets if plan.policy_version else dataclasses.replace(targets, rows=targets.rows - 10**6)

    def no_score(*_: Any, **__: Any) -> Any:
        raise MemoryError("no room for logits")

    staging.RolloutStaging.targets = no_rows  # type: ignore[method-assign]
    vars(staging).update(score_rows=no_score, score_logits=no_score)


def whole_copy(model: Any, words: list[str]) -> Any:
    """An unsharded model with the same weights. (The test gathers; the hook does not.)"""
    copy = make(words)
    with torch.no_grad():
        for mine, theirs in zip(copy.parameters(), model.parameters(), strict=True):
            mine.copy_(theirs.full_tensor() if isinstance(theirs, DTensor) else theirs)
    return copy.to(torch.bfloat16) if "bf16" in words else copy


@torch.no_grad()
def compare(
    service: Any,
    whole: Any,
    out: Any,
    told: dict[str, Any],
    sequences: list[list[int]],
    step: int,
) -> dict[str, Any]:
    """The newest file against the states of a forward, and against each rollout alone in a whole model."""
    real = (
        told["attention_mask"] == 1
        if "attention_mask" in told
        else torch.ones_like(told["input_ids"], dtype=torch.bool)
    )

    def rows(state: torch.Tensor) -> torch.Tensor:
        return state[:, : real.shape[1]][real]

    aux, last = torch.cat([rows(out.hidden_states[i]) for i in AUX], 1), rows(out.hidden_states[-1])
    alone = []
    for sequence in sequences:
        one = whole(torch.tensor([sequence]), output_hidden_states=True, use_cache=False)
        alone.append(torch.cat([*(one.hidden_states[i][0] for i in AUX), one.hidden_states[-1][0]], 1))
    with tempfile.TemporaryDirectory() as directory:
        file = mapped(service.rollouts()[step], Path(directory))
        both = torch.cat([as_float(file, "aux_hidden"), as_float(file, "last_hidden")], 1)
        expected = torch.cat([aux, last], 1).to(torch.bfloat16).float()
        ids, mask = torch.from_numpy(file.array("input_ids").copy()).long(), file.array("loss_mask") == 1
        at = torch.from_numpy(mask).nonzero()[:, 0] - 1
        lse, logp = score_rows(last[at], whole.lm_head.weight, ids[at + 1], temperature=TEMPERATURE)
        result: dict[str, Any] = {
            "rows": torch.equal(both, expected),
            "tokens": ids.tolist() == [*chain(*sequences)],
            "alone": float((both - torch.cat(alone).float()).abs().max() / both.abs().max()),
            "normaliser": "logsumexp" in file,
            "logprobs": bool((torch.from_numpy(file.array("logprobs").copy())[at + 1] == logp).all()),
        }
        if "logsumexp" in file:
            sent_lse = torch.from_numpy(file.array("logsumexp").copy())[at]
            result["lse"] = torch.equal(sent_lse, lse)
            tempered = rows(out.logits).float()[at] / TEMPERATURE
            result["logits"] = float((sent_lse - tempered.logsumexp(-1)).abs().max())
        heads = [r for r in service.requests if r.method == "PUT"]
        if heads:  # the newest that came before these rollouts
            newest = mapped(heads[-1], Path(directory))
            name = "lm_head" if "lm_head" in newest else "embed_tokens"
            result["head"] = torch.equal(as_float(newest, name), whole.lm_head.weight.float())
            first = as_float(mapped(heads[0], Path(directory)), "embed_tokens")
            result["embedding"] = step > 0 or torch.equal(first, whole.model.embed_tokens.weight.float())
        return result


def work(rank: int, out: Path, cases: list[str]) -> None:
    report: dict[str, Any] = {}
    for case in cases:
        found: dict[str, Any] = {}
        words = case.split()
        with_us = train(rank, 2, words, attached=True, found=found)
        without = train(rank, 2, words, attached=False, found={})
        found["weights"] = all(torch.equal(a, b) for a, b in zip(with_us, without, strict=True))
        report[case] = found
        (out / f"{rank}.json").write_text(json.dumps(report))
        dist.barrier()


if __name__ == "__main__":
    sys.exit(run_two_ranks(partial(work, out=Path(sys.argv[1]), cases=sys.argv[2:])))
