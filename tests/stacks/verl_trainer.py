"""verl's real `TrainingWorker` on two gloo processes: FSDP2, packed; a pass for old log-probabilities, a PPO update.

`python verl_trainer.py OUT`, in an environment with verl 0.9.1 and this package (test_verl.py sets its variables).
Every rank writes OUT/<rank>.json: what was sent, against each rollout alone in a model of one process; and the weights
with and without us.
"""

from __future__ import annotations

import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from helpers.trainer.hooks_fixtures import Receiver
from helpers.trainer.sent_fixtures import Alone, compare, states_alone, with_and_without
from helpers.worker.rank_fixtures import run_two_ranks
from transformers import LlamaConfig, LlamaForCausalLM
from verl.utils import tensordict_utils as tu
from verl.utils.metric import reduce_metrics
from verl.utils.model import compute_position_id_with_mask
from verl.workers.config import ActorConfig, FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
from verl.workers.engine_workers import TrainingWorker, TrainingWorkerConfig
from verl.workers.utils.losses import ppo_loss
from verl.workers.utils.padding import left_right_2_no_padding, no_padding_2_padding

ROLLOUTS, PROMPT, RESPONSE, STEPS = 4, 8, 12, 2
AUX = (2, 4, 5)
WORLD = 2


def policy() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        architectures=["LlamaForCausalLM"],
    )
    return LlamaForCausalLM(config)


def worker_of(path: Path) -> Any:
    precision = dict.fromkeys(("param_dtype", "reduce_dtype", "buffer_dtype"), "fp32")
    return TrainingWorker(
        TrainingWorkerConfig(
            model_type="language_model",
            model_config=HFModelConfig(
                path=str(path),
                load_tokenizer=False,
                use_remove_padding=True,
                override_config={"attn_implementation": "sdpa"},
            ),
            engine_config=FSDPEngineConfig(
                forward_only=False,
                fsdp_size=WORLD,
                strategy="fsdp2",
                use_dynamic_bsz=True,
                use_remove_padding=True,
                use_torch_compile=False,
                max_token_len_per_gpu=64,
                infer_max_token_len_per_gpu=40,
                mixed_precision=precision,
            ),
            optimizer_config=FSDPOptimizerConfig(lr=1e-3, lr_warmup_steps=0, total_training_steps=10),
            checkpoint_config=None,
        )
    )


def rollouts(seed: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Prompts padded left, responses right, with a hole of tool tokens in the first response."""
    ids = torch.randint(3, 512, (ROLLOUTS, PROMPT + RESPONSE), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones_like(ids)
    for b in range(ROLLOUTS):
        mask[b, :b] = 0
        mask[b, PROMPT + RESPONSE - 2 * b :] = 0
    ids *= mask
    response_mask = mask[:, PROMPT:].clone()
    response_mask[0, 3:5] = 0
    batch = {
        "input_ids": ids,
        "prompts": ids[:, :PROMPT],
        "responses": ids[:, PROMPT:],
        "attention_mask": mask,
        "position_ids": compute_position_id_with_mask(mask),
        "response_mask": response_mask,
    }
    return batch, mask


def unpadded(batch: dict[str, torch.Tensor], mask: torch.Tensor, **more: Any) -> Any:
    others = {"temperature": 0.7, "compute_loss": False, "global_token_num": mask.sum(-1).tolist()}
    return left_right_2_no_padding(
        tu.get_tensordict({k: v.clone() for k, v in batch.items()} | more, non_tensor_dict=others)
    )


def train(rank: int, service: Receiver | None, found: dict[str, Any], path: Path) -> list[torch.Tensor]:
    # Without us it is verl's own engine, which is registered for a GPU's name only.
    os.environ |= {"VERL_ENGINE_VENDOR": "nvidia", "VERL_ENGINE_DEVICE": "cuda"}
    if service is not None:
        os.environ |= {"VERL_ENGINE_VENDOR": "draftalign", "VERL_ENGINE_DEVICE": "cpu"}
    os.environ["DRAFTALIGN_URL"] = "" if service is None else service.url
    torch.manual_seed(7)
    worker = worker_of(path)
    worker.reset()
    module = worker.engine.module
    whole = policy()
    for step in range(STEPS):
        for mine, theirs in zip(whole.parameters(), module.parameters(), strict=True):
            mine.data.copy_(theirs.full_tensor())  # the test gathers; the hook does not
        batch, mask = rollouts(100 * step + rank)
        old = tu.get(worker.infer_batch(unpadded(batch, mask)), "log_probs")
        dense = no_padding_2_padding(old, unpadded(batch, mask)).float()
        sent_before = -1
        if service is not None:
            assert worker.engine.hook.flush(20), worker.engine.hook.stats()
            expected = alone(whole, batch, mask, dense)
            found.setdefault("steps", []).append(compare(service, found, expected, whole.lm_head.weight))
            sent_before = len(service.rollouts())
        generator = torch.Generator().manual_seed(step)
        advantages = torch.randn(ROLLOUTS, RESPONSE, generator=generator)
        data = unpadded(batch, mask, advantages=advantages, old_log_probs=dense, ref_log_prob=dense)
        tu.assign_non_tensor(
            data, compute_loss=True, mini_batch_size=ROLLOUTS * WORLD, global_batch_size=ROLLOUTS * WORLD
        )
        actor = ActorConfig(
            strategy="fsdp2",
            rollout_n=1,
            ppo_mini_batch_size=ROLLOUTS,
            ppo_micro_batch_size_per_gpu=ROLLOUTS,
            use_dynamic_bsz=True,
        )
        worker.set_loss_fn(partial(ppo_loss, actor))
        metrics = tu.get(worker.train_mini_batch(data), "metrics")
        found.setdefault("grad_norm", []).append(metrics["grad_norm"][0])
        ours = {name: value for name, value in metrics.items() if name.startswith("draftalign/")}
        found.setdefault("logged", []).append({k: float(v) for k, v in reduce_metrics(ours).items()})
        if service is not None:
            assert worker.engine.hook.flush(20)
            found.setdefault("sent_in_update", []).append(len(service.rollouts()) - sent_before)
    found["engine"] = type(worker.engine).__name__
    if service is not None:
        found["stats"] = {k: v for k, v in worker.engine.hook.stats().items() if k in ("failures", "captured_rollouts")}
        worker.engine.hook.close()
    return [one.to_local().detach().clone() for one in module.parameters()]


@torch.no_grad()
def alone(
    whole: Any, batch: dict[str, torch.Tensor], mask: torch.Tensor, verls: torch.Tensor
) -> dict[tuple[int, ...], Alone]:
    """By tokens, with verl's own log-probabilities."""
    found = {}
    for b in range(ROLLOUTS):
        real = mask[b] == 1
        ids = batch["input_ids"][b][real]
        out = whole(input_ids=ids[None], use_cache=False, output_hidden_states=True)
        generated, logp = torch.zeros_like(mask[b]), torch.zeros(PROMPT + RESPONSE)
        generated[PROMPT:], logp[PROMPT:] = batch["response_mask"][b], verls[b]
        found[tuple(ids.tolist())] = Alone(states_alone(out, AUX), generated[real], logp[real])
    return found


def work(rank: int, out: Path) -> None:
    found, own = with_and_without(rank, out, partial(train, path=out / "policy"))
    found["logged_without"], found["without"] = own["logged"], own["engine"]
    found["moved"] = found["grad_norm"] == own["grad_norm"] and min(found["grad_norm"]) > 0
    (out / f"{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    OUT = Path(sys.argv[1])
    policy().save_pretrained(OUT / "policy")
    sys.exit(run_two_ranks(partial(work, out=OUT)))
