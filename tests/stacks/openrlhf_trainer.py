"""OpenRLHF's real `Actor`, packed, in DeepSpeed's ZeRO-3 on two gloo processes: `python openrlhf_trainer.py OUT`.

Every rank writes OUT/<rank>.json: what was sent, against each rollout alone in a model of one process; and the weights
with and without us.
"""

from __future__ import annotations

import inspect
import json
import sys
import tempfile
import textwrap
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from einops import rearrange
from helpers.trainer.flash_attn_fixtures import stand_in, stand_in_for_packing
from helpers.trainer.hooks_fixtures import as_float, mapped, of_every_token, only_predicting_rows, receiver, tiny_qwen3
from helpers.trainer.sent_fixtures import keep, states_alone
from helpers.worker.rank_fixtures import run_two_ranks

from rl_hooks import wire
from rl_hooks.stacks.openrlhf import attach

AUX = (1, 2, 3)
ROLLOUTS, PROMPT, RESPONSE, STEPS = 4, 6, 10, 2
TEMPERATURE = 0.7


def actor_of() -> Any:
    stand_in_for_packing(rearrange=rearrange)
    stand_in("flash_attn.utils")
    stand_in("flash_attn.utils.distributed", all_gather=lambda tensor, _group: tensor)
    from openrlhf.models.actor import Actor

    return Actor


def rollouts(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sequences, attention mask, and action mask [B, S - 1] of an Experience: prompts padded left, responses right."""
    ids = torch.randint(2, 61, (ROLLOUTS, PROMPT + RESPONSE), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones_like(ids)
    for b in range(ROLLOUTS):
        mask[b, :b] = 0
        mask[b, PROMPT + RESPONSE - 2 * b :] = 0
    generated = torch.cat([torch.zeros_like(mask[:, :PROMPT]), mask[:, PROMPT:]], 1)
    return ids * mask, mask, generated[:, 1:]


def gathered(parameter: Any) -> torch.Tensor:
    """A parameter of ZeRO-3 whole. DeepSpeed's own `GatheredParameters` sometimes returns before gloo has it all."""
    shards = [torch.empty_like(parameter.ds_tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(shards, parameter.ds_tensor)
    return torch.cat(shards)[: parameter.ds_numel].view(parameter.ds_shape)


def logged(rank: int, hook: Any) -> dict[str, Any]:
    """What OpenRLHF's own `PolicyModelActor.fit` returns to the trainer, with the guide's line before its `return`."""
    for absent in ("aiohttp", "PIL"):  # agents and images, which nobody uses here
        stand_in(absent, Image=SimpleNamespace(Image=object))
    stand_in("vllm", __version__="0.22.0")
    stand_in("vllm.inputs", TokensPrompt=dict)
    stand_in("vllm.utils", random_uuid=str)
    from openrlhf.trainer.ray import ppo_actor

    cuda: Any = torch.cuda
    cuda.synchronize = lambda: None
    fit = textwrap.dedent(inspect.getsource(ppo_actor.PolicyModelActor.__ray_metadata__.modified_class.fit))
    before, last, _ = fit.partition("    return status")
    assert last, "it returns something else now"
    names = vars(ppo_actor) | {"rank": rank, "hook": hook}
    exec(f"{before}    if rank == 0: status |= hook.metrics()\n{last}", names)  # noqa: S102 - OpenRLHF's source
    trainer = SimpleNamespace(ppo_train=lambda _: {"policy_loss": 0.5}, replay_buffer=[])
    found: dict[str, Any] = names["fit"](SimpleNamespace(actor=torch.nn.Identity(), trainer=trainer))
    return found


def train(rank: int, words: list[str], service: Any, found: dict[str, Any]) -> list[torch.Tensor]:
    model = tiny_qwen3(tied="tied" in words, seed=3)
    model.config.use_cache = False  # as Actor sets it: with a cache, sdpa does not see the packing
    actor = actor_of()(model)
    actor.packing_samples, actor.temperature = True, TEMPERATURE
    options: dict[str, Any] = {"run": "r", "aux_layers": AUX, "rank": rank, "world_size": 2, "strict": True}
    hook = attach(actor, service.url, **options) if service is not None and "early" in words else None
    config = {
        "train_micro_batch_size_per_gpu": ROLLOUTS,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "zero_force_ds_cpu_optimizer": False,
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)
    actor.model = engine
    if service is not None and hook is None:
        hook = attach(actor, service.url, **options)
    for step in range(STEPS):
        whole = tiny_qwen3(tied="tied" in words, seed=3)
        for mine, theirs in zip(whole.parameters(), model.parameters(), strict=True):
            mine.data.copy_(gathered(theirs))  # the test gathers; the hook does not
        ids, mask, action_mask = rollouts(100 * step + rank)
        actor.packing_samples = "padded" not in words
        found.setdefault("at rest", []).append(list(model.lm_head.weight.shape))
        with torch.no_grad():  # PolicyModelActor.forward, which makes the experience
            old = actor(ids, action_mask, mask)
        if hook is not None:
            assert hook.flush(20), hook.stats()
            found.setdefault("steps", []).append(compare(service, whole, ids, mask, action_mask, old, step))
        logp = actor(ids, action_mask, mask)
        engine.backward(-(logp * torch.randn(logp.shape, generator=torch.Generator().manual_seed(step))).mean())
        engine.step()
    if hook is not None:
        found["requests"] = [f"{r.method} {r.path}" for r in service.requests]
        found["logged"] = sorted(logged(rank, hook))
        hook.close()
    return [p.ds_tensor.detach().clone() for p in model.parameters()]


@torch.no_grad()
def compare(service: Any, whole: Any, ids: Any, mask: Any, action_mask: Any, old: Any, step: int) -> dict[str, Any]:
    """The newest file against each rollout alone, and against the Actor's own log-probabilities."""
    result: dict[str, Any] = {"features": 0.0, "lse": 0.0, "logp": 0.0}
    with tempfile.TemporaryDirectory() as directory:
        file = mapped(service.rollouts()[step], Path(directory))
        result["last_rows"] = wire.check_rollout_header(file.header).last_rows
        for b, (begin, end) in enumerate(pairwise(file.array("cu_seqlens").tolist())):
            one = ids[b][mask[b].bool()]
            assert file.array("input_ids")[begin:end].tolist() == one.tolist()
            out = whole(one[None], output_hidden_states=True)
            states = states_alone(out, AUX)
            last = of_every_token(file, "last_hidden")[begin:end]
            last = torch.where(last.isnan(), states[:, -last.shape[1] :], last)  # what was not sent is expected of none
            sent = torch.cat([as_float(file, "aux_hidden")[begin:end], last], 1)
            result["features"] = max(result["features"], float((sent - states).abs().max() / states.abs().max()))
            at = torch.from_numpy(file.array("loss_mask")[begin:end].copy()).long().nonzero()[:, 0]
            lse = of_every_token(file, "logsumexp")[begin:end][at - 1]
            expected = (out.logits[0] / TEMPERATURE).logsumexp(-1)[at - 1]
            result["lse"] = max(result["lse"], float((lse - expected).abs().max()))
            said = torch.from_numpy(file.array("logprobs")[begin:end].copy())[at]
            theirs = old[b][action_mask[b].bool()]
            result["logp"] = max(result["logp"], float((said - theirs).abs().max()))
            result["version"] = int(file.header.metadata["policy_version"])
        heads = [r for r in service.requests if r.method == "PUT"]
        if heads:
            newest = mapped(heads[-1], Path(directory))
            name = "lm_head" if "lm_head" in newest else "embed_tokens"
            result["head"] = torch.equal(as_float(newest, name), whole.lm_head.weight)
    return result


def work(rank: int, out: Path, cases: list[str]) -> None:
    report: dict[str, Any] = {}
    for case in cases:
        found: dict[str, Any] = {}
        with receiver() as service:
            if "predicting" in case:
                service.answer = only_predicting_rows
            with_us = train(rank, case.split(), service, found)
            found["kept"] = keep(service.requests, out / case / f"sent{rank}")
        without = train(rank, case.split(), None, {})
        found["weights"] = all(torch.equal(a, b) for a, b in zip(with_us, without, strict=True))
        report[case] = found
    (out / f"{rank}.json").write_text(json.dumps(report))


def before() -> None:
    # No C++ is built: the lock of a build that was killed would hang every later run.
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]


if __name__ == "__main__":
    OUT, CASES = Path(sys.argv[1]), sys.argv[2:]
    sys.exit(run_two_ranks(partial(work, out=OUT, cases=CASES), before))
