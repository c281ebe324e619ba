"""AReaL's real `FSDPPPOActor` on two gloo processes: packed; proximal log-probabilities, a PPO update.

`python areal_trainer.py OUT`, in an environment with AReaL 1.0.4. Flash attention has no CPU build: the function that
transformers calls for it is written in torch here, and reads the same boundaries. Every rank writes OUT/<rank>.json:
what was sent, against each rollout alone in a model of one process; and the weights with and without us.
"""

from __future__ import annotations

import importlib.machinery
import json
import os
import sys
import types
from functools import partial
from pathlib import Path
from typing import Any

import torch
from helpers.trainer.hooks_fixtures import Receiver
from helpers.trainer.sent_fixtures import Alone, compare, each_alone, small_policy, states_alone, with_and_without
from helpers.worker.rank_fixtures import run_two_ranks
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

for absent in ("swanlab", "trackio"):  # loggers that nobody uses here
    sys.modules[absent] = types.ModuleType(absent)
    sys.modules[absent].__spec__ = importlib.machinery.ModuleSpec(absent, None)

from areal.api.alloc_mode import ModelAllocation  # noqa: E402
from areal.api.cli_args import MicroBatchSpec, OptimizerConfig, PPOActorConfig  # noqa: E402
from areal.api.io_struct import FinetuneSpec  # noqa: E402
from areal.trainer.rl_trainer import PPOTrainer  # noqa: E402

from rl_hooks.stacks.areal import DraftalignPPOTrainer, prompt_kinds  # noqa: E402

ROLLOUTS, PROMPT, RESPONSE, STEPS = 6, 8, 12, 2
TEMPERATURE = 0.7
AUX = (2, 4, 5)
VOCABULARY = 512


def varlen(module: Any, q: Any, k: Any, v: Any, _mask: Any, **more: Any) -> tuple[torch.Tensor, None]:
    """As `cu_seq_lens_q` says."""
    return each_alone(module, q, k, v, more["cu_seq_lens_q"].tolist())


def actor_of(trainer: Any, path: Path, **changes: Any) -> Any:
    """The actor as this kind of trainer makes it, without the rest of the trainer: that wants an inference server."""
    settings: dict[str, Any] = {
        "path": str(path),
        "experiment_name": "e",
        "trial_name": "t",
        "backend": "fsdp:d2",
        "dtype": "float32",
        "attn_impl": "sdpa",
        "gradient_checkpointing": False,
        "temperature": TEMPERATURE,
        "use_decoupled_loss": True,
        "optimizer": OptimizerConfig(lr=1e-3, warmup_steps_proportion=0.0),
        "mb_spec": MicroBatchSpec(n_mbs=2, max_tokens_per_mb=128),
        "ppo_n_minibatches": 1,
    }
    config = PPOActorConfig(**settings | changes)
    actor = trainer.__new__(trainer)._create_train_engine(config, ModelAllocation.from_str(config.backend))
    actor.initialize(None, FinetuneSpec(1, 64, 8))
    actor.model.config._attn_implementation = "flash_attention_2"
    return actor


def rollouts(seed: int, version: int) -> list[dict[str, torch.Tensor]]:
    """As AReaL's workflows give them. The second was begun by the weights before, the third is all theirs."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for b in range(ROLLOUTS):
        prompt, length = PROMPT - b, PROMPT + RESPONSE - 2 * b
        generated = (torch.arange(length) >= prompt).int()
        if b == 0:
            generated[prompt + 3 : prompt + 5] = 0  # what a tool said
        drawn = torch.where(generated == 1, version, -1)
        if b == 1:
            drawn[prompt : prompt + 4] = version - 1
        if b == 2:
            drawn = torch.where(generated == 1, version - 1, -1)
        one = {
            "input_ids": torch.randint(3, VOCABULARY, (length,), generator=generator).int(),
            "loss_mask": generated,
            "logprobs": torch.zeros(length),  # filled in with the policy's own
            "versions": drawn.int(),
            "attention_mask": torch.ones(length, dtype=torch.bool),
            "rewards": torch.tensor(float(b)),
            "data_source": torch.tensor(b % 3),  # of the test's own workflow: AReaL's have none
        }
        found.append({name: value.unsqueeze(0) for name, value in one.items()})
    return found


@torch.no_grad()
def alone(whole: Any, batch: list[dict[str, torch.Tensor]]) -> dict[tuple[int, ...], Alone]:
    """By tokens. Fills in the batch's `logprobs`."""
    found = {}
    for one in batch:
        ids = one["input_ids"][0].long()
        out = whole(ids[None], output_hidden_states=True, use_cache=False)
        logp = (out.logits[0, :-1] / TEMPERATURE).log_softmax(-1).gather(1, ids[1:, None])[:, 0]
        one["logprobs"] = torch.nn.functional.pad(logp, (1, 0))[None] * one["loss_mask"]
        states, reward = states_alone(out, AUX), float(one["rewards"])
        kind = str(int(one["data_source"]))
        found[tuple(ids.tolist())] = Alone(states, one["loss_mask"][0], one["logprobs"][0], reward, stratum=kind)
    return found


def train(rank: int, service: Receiver | None, found: dict[str, Any], path: Path) -> list[torch.Tensor]:
    os.environ["DRAFTALIGN_URL"] = "" if service is None else service.url
    torch.manual_seed(7)
    actor = actor_of(PPOTrainer if service is None else DraftalignPPOTrainer, path)
    found["actor"] = type(actor).__name__
    first = next(iter(actor.model.parameters())).to_local().detach().clone()
    whole = small_policy(VOCABULARY)
    for step in range(STEPS):
        for mine, theirs in zip(whole.parameters(), actor.model.parameters(), strict=True):
            mine.data.copy_(theirs.full_tensor())  # the test gathers; the hook does not
        actor.set_version(step)
        batch = rollouts(100 * step + rank, step)
        expected = alone(whole, batch)
        proximal = actor.compute_logp(batch)
        gap = max(
            float(((p[0, :-1] - one["logprobs"][0, 1:]) * one["loss_mask"][0, 1:]).abs().max())
            for p, one in zip(proximal, batch, strict=True)
        )
        found.setdefault("areals", []).append(gap)
        sent_before = -1
        if service is not None:
            assert actor.hook.flush(20), actor.hook.stats()
            found.setdefault("steps", []).append(compare(service, found, expected, whole.lm_head.weight))
            sent_before = len(service.rollouts())
        for one, p in zip(batch, proximal, strict=True):
            one["prox_logp"] = p
        actor.ppo_update(actor.compute_advantages(batch))
        logged = [name for name in actor.export_stats() if "draftalign" in name]
        found.setdefault("logged", []).append(sorted(logged))
        if service is not None:
            assert actor.hook.flush(20)
            found.setdefault("sent_in_update", []).append(len(service.rollouts()) - sent_before)
    if service is not None:
        names = ("failures", "captured_rollouts")
        found["stats"] = {name: actor.hook.stats()[name] for name in names}
        actor.hook.close()
        os.environ["DRAFTALIGN_URL"] = ""
        reference = actor_of(DraftalignPPOTrainer, path, optimizer=None)
        off = [{}, {"recompute_logprob": False, "use_decoupled_loss": False}]
        others = [reference, *(actor_of(DraftalignPPOTrainer, path, **changes) for changes in off)]
        found["hooks of others"] = [one.hook for one in others]
        # AReaL keeps a text that is no list as the first workflow gave it; a list need not have an entry a rollout.
        unusable: list[dict[str, Any]] = [{}, {"data_source": "math"}, {"data_source": ["math"] * 2}]
        found["no kinds"] = [prompt_kinds(one, [0, 2], 3) for one in unusable]
        found["kinds"] = prompt_kinds({"data_source": ["math", "code", "chat"]}, [2, 0], 3)
    weights = [one.to_local().detach().clone() for one in actor.model.parameters()]
    found["moved"] = not torch.equal(weights[0], first)
    return weights


def work(rank: int, out: Path) -> None:
    found, _ = with_and_without(rank, out, partial(train, path=out / "policy"))
    (out / f"{rank}.json").write_text(json.dumps(found))


def before() -> None:
    os.environ["AREAL_SPMD_MODE"] = "1"
    ALL_ATTENTION_FUNCTIONS["flash_attention_2"] = varlen


if __name__ == "__main__":
    OUT = Path(sys.argv[1])
    small_policy(VOCABULARY).save_pretrained(OUT / "policy")
    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(VOCABULARY)}, unk_token="t0"))
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token="t0", eos_token="t1").save_pretrained(OUT / "policy")
    sys.exit(run_two_ranks(partial(work, out=OUT), before))
