"""NeMo-RL's real DTensor policy workers on two gloo processes: `nemo_rl_trainer.py OUT WORKER CASE`.

NEMO_RL_SOURCE names the checkout. WORKER is `v2` (Automodel's) or `v1`; CASE is `padded`, `packed`, `dynamic`, `async`
(generation that is not colocated, and the sampler's log-probabilities in the batch) or `bfloat16`. Of each step run the
policy's pass, the reference's and an update, with NeMo-RL's own sharding of the batch and its own loss. Of the test's
own, for want of CUDA: the names of devices, the kind of process group, and flash attention's kernel; packages that are
imported and not used here. No Ray actor is around the worker: that is nemo_rl_ray.py. Every rank writes
OUT/<rank>.json: what was sent, against each rollout alone in a model of one process; the weights with and without us.
"""

from __future__ import annotations

import copy
import importlib
import importlib.abc
import json
import os
import sys
import types
from collections.abc import Mapping
from functools import partial
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import ray
import torch
import torch.distributed as dist
from helpers.trainer.hooks_fixtures import Receiver
from helpers.trainer.sent_fixtures import Alone, compare, each_alone, small_policy, states_alone, with_and_without
from helpers.worker.rank_fixtures import run_two_ranks
from tokenizers import Tokenizer, models
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedTokenizerFast, modeling_utils

from rl_hooks.stacks import on_ray

WORKERS = {
    "v1": ("nemo_rl.models.policy.workers.dtensor_policy_worker", "DTensorPolicyWorkerImpl"),
    "v2": ("nemo_rl.models.policy.workers.dtensor_policy_worker_v2", "DTensorPolicyWorkerV2Impl"),
}
EXTENDED = ("__init__", "get_logprobs", "get_reference_policy_logprobs", "train")
#: NeMo-RL's loggers and Automodel's other ways to train.
ABSENT = ("flashoptim", "megatron_fsdp", "mlflow", "swanlab", "wandb")
STEPS, VOCABULARY, PADDED_TO, TEMPERATURE = 3, 512, 4, 0.7
AUX = (2, 4, 5)
#: (prompt, response) of a step's rollouts, of both ranks.
SIZES = ((3, 9), (5, 6), (2, 12), (4, 7), (3, 5), (6, 8), (2, 3), (4, 11))
PACK = {"algorithm": "modified_first_fit_decreasing", "input_key": "input_ids", "input_lengths_key": "input_lengths"}


class _StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, fullname: str, *_: Any) -> ModuleSpec | None:
        return ModuleSpec(fullname, self, is_package=True) if fullname.split(".")[0] in ABSENT else None

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        module: Any = types.ModuleType(spec.name)

        def get(name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return type(name, (), {}) if name[0].isupper() else MagicMock(name=name)

        module.__getattr__ = get
        return module  # type: ignore[no-any-return]

    def exec_module(self, module: types.ModuleType) -> None: ...


def is_cuda(value: Any) -> bool:
    return (isinstance(value, str) and value.startswith("cuda")) or getattr(value, "type", None) == "cuda"


class OnCPU(TorchFunctionMode):
    """Where the device "cuda", or its number 0, is named, the CPU is meant; no memory is pinned."""

    def __torch_function__(self, call: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        more = dict(kwargs or {})
        more.pop("pin_memory", None)
        if is_cuda(more.get("device")) or more.get("device") == 0:
            more["device"] = "cpu"
        if call is torch.Tensor.cuda:
            return args[0]
        return call(*("cpu" if is_cuda(one) else one for one in args), **more)


def varlen(module: Any, q: Any, k: Any, v: Any, _mask: Any, **more: Any) -> tuple[torch.Tensor, None]:
    """Flash attention as transformers calls it, on a packed row: as `position_ids` [1, T] say."""
    return each_alone(module, q, k, v, [*(more["position_ids"][0] == 0).nonzero()[:, 0].tolist(), q.shape[2]])


def call_the_cpu_cuda(worker: str) -> None:
    """Have NeMo-RL imported, and run, without a GPU."""
    sys.path.insert(0, os.environ["NEMO_RL_SOURCE"])
    sys.meta_path.append(_StandIns())
    if worker == "v1":
        sys.modules["nemo_automodel"] = None  # type: ignore[assignment] # as in NeMo-RL's own environment for it
    cuda: Any = torch.cuda
    cuda.current_device = lambda: 0
    for owner, names in (
        (cuda, ("set_device", "synchronize", "empty_cache")),
        (cuda.nvtx, ("range_push", "range_pop")),
    ):
        for name in names:
            setattr(owner, name, lambda *_: None)  # each another object: Dynamo knows them by these
    cuda.get_device_name = lambda *_: "CPU"
    mesh: Any = dist.device_mesh.init_device_mesh
    begin = dist.init_process_group

    def mesh_of_cpus(*kind: Any, **more: Any) -> Any:
        more |= {} if kind else {"device_type": "cpu"}
        return mesh(*("cpu" if is_cuda(one) else one for one in kind), **more)

    def gloo(*_: Any, **more: Any) -> None:
        if not dist.is_initialized():
            begin("gloo", **{name: one for name, one in more.items() if name != "backend"})

    dist.device_mesh.init_device_mesh, dist.init_process_group = mesh_of_cpus, gloo
    vars(ray)["get_gpu_ids"] = lambda: [0]
    model: Any = modeling_utils.PreTrainedModel
    model._flash_attn_can_dispatch = lambda *_, **__: True
    modeling_utils.lazy_import_flash_attention = lambda *_, **__: None
    modeling_utils.ALL_ATTENTION_FUNCTIONS["flash_attention_2"] = varlen


def configuration(path: Path, case: str) -> dict[str, Any]:
    """`policy` of NeMo-RL's configuration."""
    packs = {
        "enabled": case == "packed",
        "algorithm": PACK["algorithm"],
        "train_mb_tokens": 24,
        "logprob_mb_tokens": 24,
    }
    return {
        "model_name": str(path),
        "tokenizer": {"name": str(path)},
        "precision": "bfloat16" if case == "bfloat16" else "float32",
        "train_global_batch_size": len(SIZES),
        "train_micro_batch_size": 2,
        "logprob_batch_size": 2,
        "max_grad_norm": 1.0,
        "offload_optimizer_for_logprob": False,
        "make_sequence_length_divisible_by": PADDED_TO,
        "dtensor_cfg": {
            **{"enabled": True, "cpu_offload": False, "sequence_parallel": False, "activation_checkpointing": False},
            **{"tensor_parallel_size": 1, "context_parallel_size": 1, "custom_parallel_plan": None},
        },
        "dynamic_batching": {
            **{"enabled": case == "dynamic", "train_mb_tokens": 40, "logprob_mb_tokens": 40, "sequence_length_round": 4}
        },
        "sequence_packing": packs,
        "optimizer": {"name": "torch.optim.AdamW", "kwargs": {"lr": 1e-3}},
        "generation": {
            **{"backend": "vllm", "temperature": TEMPERATURE, "top_p": 1.0, "top_k": None},
            **{"colocated": {"enabled": case != "async"}, "vllm_cfg": {"logprobs_mode": "processed_logprobs"}},
        },
    }


def rollouts(seed: int, case: str) -> dict[str, torch.Tensor]:
    """A step's batch as GRPO makes it: padded at the right; in every second response a hole for what a tool said."""
    generator = torch.Generator().manual_seed(seed)
    longest = -(-max(map(sum, SIZES)) // PADDED_TO) * PADDED_TO
    ids = torch.randint(3, VOCABULARY, (len(SIZES), longest), generator=generator)
    noise = torch.randn(len(SIZES), longest, generator=generator)
    places = torch.arange(longest)
    lengths = torch.tensor([prompt + response for prompt, response in SIZES])
    drawn = torch.stack([(places >= a) & (places < a + b) for a, b in SIZES])
    drawn[::2, 5:6] = False
    ids[places >= lengths[:, None]] = 0
    batch = {"input_ids": ids, "input_lengths": lengths, "token_mask": drawn.float()}
    batch |= {"sample_mask": torch.ones(len(SIZES)), "advantages": noise}
    if case == "async":
        batch["generation_logprobs"] = torch.zeros_like(noise)  # filled in with near the policy's own
    return batch


def shard(data: Any, config: Mapping[str, Any], rank: int, budget: str) -> Any:
    """A rank's share of a batch, as NeMo-RL's `Policy` makes it for a pass or an update."""
    from nemo_rl.data_plane.worker_mixin import TQWorkerMixin
    from nemo_rl.models.policy.lm_policy import Policy

    dynamic = {**{k: v for k, v in PACK.items() if k != "algorithm"}, "sequence_length_round": 4}
    policy = SimpleNamespace(
        cfg=config,
        data_parallel_size=2,
        use_dynamic_batches=config["dynamic_batching"]["enabled"],
        use_sequence_packing=config["sequence_packing"]["enabled"],
        dynamic_batching_args=dynamic,
        sequence_packing_args={**PACK, "sequence_length_pad_multiple": PADDED_TO},
    )
    if budget == "logprob" and policy.use_sequence_packing:
        # As its data plane does it, where the ranks have not as many micro-batches: some forwards are for nothing.
        mine = data.shard_by_batch_size(2, batch_size=None)[rank]
        return TQWorkerMixin._apply_packing_prep(policy, mine)
    if budget == "logprob":
        return Policy._shard_for_logprob(policy, data)[0][rank]
    return Policy._shard_for_train(policy, data, len(SIZES))[rank]


@torch.no_grad()
def alone(whole: Any, batch: Any, logprobs: torch.Tensor) -> dict[tuple[int, ...], Alone]:
    """By tokens, each rollout in a forward of its own, with these log-probabilities [B, S]."""
    found = {}
    for ids, length, mask, logp in zip(
        batch["input_ids"], batch["input_lengths"].tolist(), batch["token_mask"], logprobs, strict=True
    ):
        out = whole(ids[None, :length], output_hidden_states=True, use_cache=False)
        normaliser = (out.logits[0].float() / TEMPERATURE).logsumexp(-1)
        known = mask[:length].int(), logp[:length].float()
        found[tuple(ids[:length].tolist())] = Alone(states_alone(out, AUX), *known, logsumexp=normaliser)
    return found


def worker_of(kind: Any, worker: str, config: dict[str, Any]) -> Any:
    more: dict[str, Any] = {}
    if worker == "v1":
        more["tokenizer"] = PreTrainedTokenizerFast.from_pretrained(config["tokenizer"]["name"])
    return kind(config, init_optimizer=True, init_reference_model=True, **more)


def train(
    rank: int, service: Receiver | None, found: dict[str, Any], path: Path, worker: str, case: str
) -> list[torch.Tensor]:
    os.environ["DRAFTALIGN_URL"] = "" if service is None else service.url
    on_ray.install()  # before NeMo-RL's module is imported, as Ray does it
    module, name = WORKERS[worker]
    kind = getattr(importlib.import_module(module), name)
    from nemo_rl.algorithms.loss import ClippedPGLossConfig, ClippedPGLossFn
    from nemo_rl.distributed.batched_data_dict import BatchedDataDict

    found["extended"] = hasattr(kind, "draftalign")
    if service is None:
        for each in EXTENDED:  # it was imported before: NeMo-RL's own again
            setattr(kind, each, vars(kind)[each].__wrapped__)
    config = configuration(path, case)
    torch.manual_seed(7)
    policy = worker_of(kind, worker, config)
    whole = small_policy(VOCABULARY)
    loss = ClippedPGLossFn(ClippedPGLossConfig(reference_policy_kl_penalty=0.01))
    for step in range(STEPS):
        for mine, theirs in zip(whole.parameters(), policy.model.parameters(), strict=True):
            mine.data.copy_(theirs.full_tensor())  # the test gathers; the hook does not
        data = BatchedDataDict(rollouts(step, case))
        if case == "async":  # weights that are a little older drew them
            with torch.no_grad():
                logp = (whole(data["input_ids"]).logits[:, :-1] / TEMPERATURE).log_softmax(-1)
            of_tokens = logp.gather(2, data["input_ids"][:, 1:, None])[..., 0] - 0.1
            data["generation_logprobs"][:, 1:] = of_tokens * data["token_mask"][:, 1:]
        wanted = ("input_ids", "input_lengths", "token_mask", "sample_mask", "generation_logprobs")
        share = shard(BatchedDataDict({k: v for k, v in data.items() if k in wanted}), config, rank, "logprob")
        policy.prepare_for_lp_inference()
        forwards = policy.model.register_forward_hook(lambda *_: found.update(forwards=found.get("forwards", 0) + 1))
        own = policy.get_logprobs(data=share)["logprobs"]
        forwards.remove()
        if service is not None:
            hook = policy.draftalign.hook
            assert hook.flush(20), hook.stats()
            seen = copy.deepcopy(whole).bfloat16() if case == "bfloat16" else whole
            expected = alone(seen, share, share["generation_logprobs"] if case == "async" else own)
            found.setdefault("steps", []).append(compare(service, found, expected, seen.lm_head.weight.float()))
        reference = policy.get_reference_policy_logprobs(data=share)["reference_logprobs"]
        found.setdefault("reference", []).append(bool((reference != own).any()))
        policy.prepare_for_training()
        data["prev_logprobs"] = data["generation_logprobs"] = -torch.rand(data["input_ids"].shape)
        data["reference_policy_logprobs"] = -torch.rand(data["input_ids"].shape)
        torch.manual_seed(step)
        made = policy.train(shard(data, config, rank, "train"), loss)
        found.setdefault("norms", []).append(float(made["grad_norm"]))
        logged = [each for each in made["all_mb_metrics"] if each.startswith("draftalign/")]
        found.setdefault("logged", []).append(sorted(logged))
        if service is not None:
            assert hook.flush(20)
            found.setdefault("beside", []).append(len(service.rollouts()) - found["read"])
    if service is not None:
        names = ("failures", "captured_rollouts", "last_failure")
        found["stats"] = {each: hook.stats()[each] for each in names}
        hook.close()
    return [one.to_local().detach().clone() for one in policy.model.parameters()]


def work(rank: int, out: Path, worker: str, case: str) -> None:
    with OnCPU():
        found, own = with_and_without(rank, out, partial(train, path=out / "policy", worker=worker, case=case))
    found["moved"] = found["norms"] == own["norms"] and min(found["norms"]) > 0
    found["logged without"] = own["logged"]
    (out / f"{rank}.json").write_text(json.dumps(found))


def write_policy(path: Path) -> None:
    """A checkpoint with a tokenizer."""
    small_policy(VOCABULARY).save_pretrained(path)
    words = Tokenizer(models.WordLevel({f"w{number}": number for number in range(VOCABULARY)}, "w0"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w1", pad_token="w0").save_pretrained(path)


if __name__ == "__main__":
    OUT, WORKER, CASE = Path(sys.argv[1]), *sys.argv[2:]
    write_policy(OUT / "policy")
    call_the_cpu_cuda(WORKER)
    sys.exit(run_two_ranks(partial(work, out=OUT, worker=WORKER, case=CASE)))
