"""SkyRL's real `FSDPPolicyWorkerBase` on two gloo processes, FSDP2: `skyrl_trainer.py OUT CASE`.

CASE is `padded`, `packed`, `async`: packed, `fully_async`, at temperature 1, in the first step with log-probabilities
of the engines, which are not those of the forward; or `resumed`: after the first step another worker goes on from
SkyRL's own checkpoint of it, which says that it was the eighth. A step has two mini-batches. Of the test's own, for
want of CUDA: the names of devices, flash_attn's packing and its attention, and the broadcast of buffers. Every rank
writes OUT/<rank>.json: what was sent, against each rollout alone in a model of one process; the weights with and
without us.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import typing
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import typing_extensions
from helpers.trainer.flash_attn_fixtures import stand_in_for_packing
from helpers.trainer.hooks_fixtures import Receiver
from helpers.trainer.sent_fixtures import Alone, compare, each_alone, small_policy, states_alone, with_and_without
from helpers.worker.rank_fixtures import run_two_ranks
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from rl_hooks.stacks import on_ray

typing.TypedDict = typing_extensions.TypedDict  # SkyRL's, with pydantic, before Python 3.12

ROLLOUTS, PROMPT, RESPONSE, STEPS = 4, 8, 12, 2
TEMPERATURE = 0.7
AUX = (2, 4, 5)
VOCABULARY = 512
EXTENDED = (
    "init_model",
    "forward_backward",
    "_forward_backward_micro",
    "optim_step",
    "load_checkpoint",
    "broadcast_to_inference_engines",
)


def varlen(module: Any, q: Any, k: Any, v: Any, _mask: Any, **more: Any) -> tuple[torch.Tensor, None]:
    """As `position_ids` [1, T] say."""
    return each_alone(module, q, k, v, [*(more["position_ids"][0] == 0).nonzero()[:, 0].tolist(), q.shape[2]])


def call_the_cpu_cuda() -> None:
    cuda: Any = torch.cuda
    cuda.current_device = lambda: "cpu"
    cuda.set_device = cuda.synchronize = cuda.empty_cache = cuda.manual_seed_all = lambda *_: None
    mesh = torch.distributed.device_mesh.init_device_mesh
    torch.distributed.device_mesh.init_device_mesh = lambda _, **shape: mesh("cpu", **shape)


def share_buffers(model: torch.nn.Module, _state: Any) -> None:
    """SkyRL's broadcast of what no checkpoint holds, without a GPU."""
    for module in model.modules():
        for name in sorted(module._non_persistent_buffers_set):
            own: Any = module._buffers[name]
            buffer = own if dist.get_rank() == 0 else torch.empty(own.shape, dtype=own.dtype)
            dist.broadcast(buffer, src=0)
            module._buffers[name] = buffer


def worker_of(path: Path, case: str) -> Any:
    """A policy's worker as Ray would make it."""
    from skyrl.backends.skyrl_train.distributed import fsdp_utils
    from skyrl.backends.skyrl_train.workers.fsdp.fsdp_worker import FSDPPolicyWorkerBase
    from skyrl.train.config.config import TrainerConfig

    fsdp_utils._sync_non_persistent_buffers = share_buffers
    fsdp_utils.init_device_mesh = torch.distributed.device_mesh.init_device_mesh
    config = TrainerConfig(flash_attn=False, remove_microbatch_padding=False, micro_train_batch_size_per_gpu=2)
    config.policy.model.path = str(path)
    config.policy.optimizer_config.lr = 1e-3  # more, and the service takes the head for another policy's
    config.policy.fsdp_config.mixed_precision = SimpleNamespace(param_dtype="fp32", reduce_dtype="fp32")
    config.algorithm.temperature = temperature_of(case)
    config.fully_async.enabled = case == "async"
    config.algorithm.use_kl_loss = False
    rank = dist.get_rank()
    address = {"master_addr": os.environ["MASTER_ADDR"], "master_port": os.environ["MASTER_PORT"]}
    worker = FSDPPolicyWorkerBase(
        cfg=config, world_size=2, rank=rank, local_rank=rank, sequence_parallel_size=1, **address
    )
    worker.init_worker_process_group()
    worker.init_model(str(path), num_training_steps=100)
    if case != "padded":  # what SkyRL itself does where flash_attn can be installed
        config.remove_microbatch_padding = worker.model.remove_microbatch_padding = True
        worker.model.attn_implementation = worker.model.model.config._attn_implementation = "flash_attention_2"
    return worker


def temperature_of(case: str) -> float:
    return 1.0 if case == "async" else TEMPERATURE


def rollouts(seed: int, *, logprobs: bool) -> Any:
    """A mini-batch of one rank as SkyRL's trainer makes it: padded left, responses at the right; a hole for a tool."""
    from skyrl.backends.skyrl_train.training_batch import TrainingInputBatch

    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCABULARY, (ROLLOUTS, PROMPT + RESPONSE), generator=generator)
    mask, response = torch.ones_like(ids), torch.ones(ROLLOUTS, RESPONSE, dtype=torch.long)
    for b in range(ROLLOUTS):
        mask[b, : 2 * b] = 0
        response[b, :b] = 0
    drawn = response.clone()
    drawn[0, 3:5] = 0
    noise = torch.randn(ROLLOUTS, RESPONSE, generator=generator)
    batch = {"sequences": ids * mask, "attention_mask": mask, "loss_mask": drawn, "response_mask": response}
    batch |= {"action_log_probs": -noise.abs(), "advantages": noise}
    if logprobs:
        batch["rollout_logprobs"] = torch.zeros_like(noise)  # filled in
    batch = TrainingInputBatch(batch)
    batch.metadata = {"response_length": RESPONSE}
    return batch


@torch.no_grad()
def alone(whole: Any, batch: Any, case: str) -> dict[tuple[int, ...], Alone]:
    """By tokens, each rollout of a mini-batch in a forward of its own, with the engines' log-probabilities if known.

    Fills these in: as weights might have given them that are a little older.
    """
    found = {}
    for b in range(ROLLOUTS):
        real = batch["attention_mask"][b] == 1
        ids = batch["sequences"][b][real]
        out = whole(ids[None], output_hidden_states=True, use_cache=False)
        drawn = torch.cat([torch.zeros(PROMPT, dtype=torch.long), batch["loss_mask"][b]])[real]
        logp = (out.logits[0, :-1] / temperature_of(case)).log_softmax(-1).gather(1, ids[1:, None])[:, 0]
        logp = torch.nn.functional.pad(logp, (1, 0))
        if "rollout_logprobs" in batch:
            batch["rollout_logprobs"][b] = logp[-RESPONSE:] = logp[-RESPONSE:] - 0.1
        found[tuple(ids.tolist())] = Alone(states_alone(out, AUX), drawn, logp)
    return found


class Engines:
    """What SkyRL's worker sends weights to."""

    async def send_chunks(self, chunks: Any, **_: Any) -> None:
        for _chunk in chunks:
            pass


def send_weights(worker: Any) -> None:
    from skyrl.backends.skyrl_train.workers.fsdp.fsdp_worker import FSDPWeightExtractor

    worker._weight_transfer_sender = Engines()
    worker.weight_extractor = FSDPWeightExtractor(worker.model.model)
    engine = SimpleNamespace(enable_prefix_caching=False, model_dtype="float32")
    asyncio.run(worker.broadcast_to_inference_engines(None, engine))


def resumed(worker: Any, path: Path, found: dict[str, Any]) -> Any:
    """Another worker, which goes on from the checkpoint of this one as SkyRL's trainer has it do."""
    checkpoint = str(path.with_name("checkpoints") / "global_step_8/policy")
    worker.save_checkpoint(ckpt_dir=checkpoint)
    saved = [one.to_local().clone() for one in worker.model.model.parameters()]
    if worker.draftalign is not None:
        worker.draftalign.hook.close()
    another = worker_of(path, "resumed")
    another.load_checkpoint(ckpt_dir=checkpoint, load_optimizer_states=True, load_lr_scheduler_states=True)
    loaded = [one.to_local() for one in another.model.model.parameters()]
    found["loaded"] = all(torch.equal(a, b) for a, b in zip(saved, loaded, strict=True))
    send_weights(another)
    return another


def train(rank: int, service: Receiver | None, found: dict[str, Any], path: Path, case: str) -> list[torch.Tensor]:
    os.environ["DRAFTALIGN_URL"] = "" if service is None else service.url
    on_ray.install()  # before SkyRL's module is imported, as Ray does it
    from skyrl.backends.skyrl_train.workers.fsdp import fsdp_worker

    kind = fsdp_worker.FSDPPolicyWorkerBase
    found["extended"] = [hasattr(getattr(kind, name), "__wrapped__") for name in EXTENDED]
    if service is None:
        for name in EXTENDED:  # it was imported before: SkyRL's own again
            setattr(kind, name, getattr(kind, name).__wrapped__)
    torch.manual_seed(7)
    worker = worker_of(path, case)
    whole = small_policy(VOCABULARY)
    for step in range(STEPS):
        if case == "resumed" and step:
            worker = resumed(worker, path, found)
        module = worker.model.model
        for mine, theirs in zip(whole.parameters(), module.parameters(), strict=True):
            mine.data.copy_(theirs.full_tensor())  # the test gathers; the hook does not
        for mini in range(2):
            # The second step's come without the engines' log-probabilities.
            batch = rollouts(100 * step + 10 * mini + rank, logprobs=case == "async" and step == 0)
            expected = alone(whole, batch, case)
            logged = worker.forward_backward(batch).metrics
            found.setdefault("logged", []).append(sorted(name for name in logged if name.startswith("draftalign/")))
            if service is not None:
                hook = worker.draftalign.hook
                assert hook.flush(20), hook.stats()
                found.setdefault("steps", []).append(compare(service, found, expected, whole.lm_head.weight))
            found.setdefault("norms", []).append(worker.optim_step())
        send_weights(worker)
    worker.forward_backward(rollouts(1000 + rank, logprobs=False), loss_fn="cross_entropy")
    if service is not None:
        assert worker.draftalign.hook.flush(20)
        found["supervised"] = len(service.rollouts()) - found["read"]
        names = ("failures", "captured_rollouts", "skipped_stale", "last_failure")
        found["stats"] = {name: worker.draftalign.hook.stats()[name] for name in names}
        worker.draftalign.hook.close()
    return [one.to_local().detach().clone() for one in module.parameters()]


def work(rank: int, out: Path, case: str) -> None:
    found, own = with_and_without(rank, out, partial(train, path=out / "policy", case=case))
    found["moved"] = found["norms"] == own["norms"] and min(found["norms"]) > 0
    (out / f"{rank}.json").write_text(json.dumps(found))


def before() -> None:
    stand_in_for_packing()
    call_the_cpu_cuda()
    ALL_ATTENTION_FUNCTIONS["flash_attention_2"] = varlen


if __name__ == "__main__":
    OUT = Path(sys.argv[1])
    small_policy(VOCABULARY).save_pretrained(OUT / "policy")
    sys.exit(run_two_ranks(partial(work, out=OUT, case=sys.argv[2]), before))
