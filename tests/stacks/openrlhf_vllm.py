"""OpenRLHF's own vLLM engine and its own transfer of weights: `python openrlhf_vllm.py OUT POLICY DRAFTER DEPTH`.

On a real Ray: `create_vllm_engines` makes the engine (`RolloutRayActor` with `WorkerWrap`), `SamplesGenerator` has it
generate, and `ActorPPOTrainer` brings it the weights of OpenRLHF's `Actor`. Each line on stdin is a JSON list
[command, arguments...]; its answer goes to OUT/answers/<number>.

Of the test's own: Ray is told of a GPU; what `create_vllm_engines` gives the engine gets `speculative_config` and
float32; a stand-in for DeepSpeed's engine holds the model; and what openrlhf_vllm_plugin.py has.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ray

#: Of its deviation, what a step of the stand-in for an optimizer adds to a weight.
STEP = 0.05


def arguments() -> Any:
    """Those of OpenRLHF's command line that are read here."""
    advantage = SimpleNamespace(
        is_correction_level="off",
        is_correction_mode="mask",
        is_correction_gating="ratio",
        is_correction_threshold=(0.5, 5.0),
    )
    return SimpleNamespace(
        train=SimpleNamespace(max_epochs=1, dynamic_batch_enable=False, colocate_all=False, async_enable=False),
        actor=SimpleNamespace(
            eps_clip_low_high=(0.2, 0.2),
            dual_clip=None,
            loss_agg_mode="token-mean",
            policy_loss_type="ppo",
            aux_loss_coef=0.0,
        ),
        algo=SimpleNamespace(advantage=advantage, dynamic_filtering_enable=False),
        ds=SimpleNamespace(packing_samples=False, zero_stage=2, tensor_parallel_size=1),
        rollout=SimpleNamespace(batch_size=10**6, n_samples_per_prompt=2, vllm_generate_batch_size=None),
        vllm=SimpleNamespace(
            num_engines=1,
            tensor_parallel_size=1,
            enable_prefix_caching=True,
            enable_sleep=False,
            sync_backend="nccl",
            sync_with_ray=False,
        ),
    )


class Trainer:
    """OpenRLHF's `ActorPPOTrainer` with its `Actor`, in a process of Ray's."""

    def __init__(self, policy: str, engines: list[Any]) -> None:
        import openrlhf_vllm_plugin as stand_ins  # type: ignore[import-not-found] # beside this file
        import torch
        from einops import rearrange
        from helpers.trainer.flash_attn_fixtures import stand_in, stand_in_for_packing

        stand_in_for_packing(rearrange=rearrange)
        stand_in("flash_attn.utils")
        stand_in("flash_attn.utils.distributed", all_gather=None)
        from openrlhf.models.actor import Actor
        from openrlhf.trainer.ray import ppo_actor
        from transformers import AutoModelForCausalLM

        stand_ins.without_cuda()
        ppo_actor.stateless_init_process_group = stand_ins.Gloo
        alone = torch.distributed.HashStore()  # type: ignore[attr-defined]
        torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=alone)
        self.model = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32)
        actor = Actor(self.model)
        actor.model = torch.nn.ModuleDict({"module": self.model})
        strategy = SimpleNamespace(args=arguments(), ring_attn_group=None)
        self.trainer = ppo_actor.ActorPPOTrainer(strategy, actor, None, None, None, vllm_engines=engines)

    def step(self, seed: int, path: str) -> None:
        """All weights move, are written to `path`, and are brought to the engine."""
        import torch

        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for one in self.model.parameters():
                one.add_(torch.randn(one.shape, generator=generator) * one.std() * STEP)
        self.model.save_pretrained(path)
        self.trainer.broadcast_to_vllm()


class Speculating:
    """`RolloutRayActor` for `create_vllm_engines`, which has no option for a drafter."""

    def __init__(self, actor: Any, more: dict[str, Any]) -> None:
        self._actor, self._more = actor, more

    def options(self, **options: Any) -> Speculating:
        """Ray's."""
        return Speculating(self._actor.options(**options), self._more)

    def remote(self, **arguments: Any) -> Any:
        """Ray's."""
        return self._actor.remote(**arguments | self._more)


class Commands:
    """What the test asks for."""

    def __init__(self, policy: str, drafter: str, depth: int) -> None:
        from openrlhf.trainer.ppo_utils.samples_generator import SamplesGenerator
        from openrlhf.trainer.ray import vllm_engine
        from transformers import AutoTokenizer

        speculative = {"method": "eagle3", "model": drafter, "num_speculative_tokens": depth}
        more = {"speculative_config": speculative, "dtype": "float32", "block_size": 32, "max_num_seqs": 8}
        vllm_engine.RolloutRayActor = Speculating(vllm_engine.RolloutRayActor, more)
        engines = vllm_engine.create_vllm_engines(1, 1, policy, 1, False, True, True, 256, gpu_memory_utilization=0.9)
        (self.engine,) = engines
        without_us = {"env_vars": {"DRAFTALIGN_URL": ""}}  # the engine alone: the trainer sends nothing
        self.trainer = ray.remote(Trainer).options(runtime_env=without_us).remote(policy, engines)
        strategy = SimpleNamespace(args=arguments())
        tokenizer = AutoTokenizer.from_pretrained(policy)
        self.samples = SamplesGenerator(strategy, None, None, tokenizer, engines)

    def generate(self, prompts: list[str], temperature: float) -> list[list[int]]:
        """Prompt and answer of each of OpenRLHF's experiences."""
        loader = [(None, prompts, [""] * len(prompts), [None] * len(prompts))]
        self.samples._dataloader_iter = iter(loader)
        self.samples._sample_buffer = []
        found = self.samples.generate_samples(temperature=temperature, max_new_tokens=24, max_len=256)[0]
        return [one.sequences[0].tolist() for one in found]

    def step(self, seed: int, path: str) -> None:
        """New weights."""
        ray.get(self.trainer.step.remote(seed, path))

    def rpc(self, method: str) -> Any:
        """The answer of the engine's worker."""

        def ask(actor: Any) -> Any:  # in a thread beside the actor's event loop
            loop = actor.llm.output_handler.get_loop()
            return asyncio.run_coroutine_threadsafe(actor.llm.collective_rpc(method), loop).result(60)

        return ray.get(self.engine.__ray_call__.remote(ask))[0]

    def metrics(self) -> list[float]:
        """Rounds and accepted drafts, as vLLM has counted them."""

        def read(_actor: Any) -> dict[str, float]:
            from prometheus_client import REGISTRY

            return {one.name: one.value for family in REGISTRY.collect() for one in family.samples}

        found = ray.get(self.engine.__ray_call__.remote(read))
        return [found[f"vllm:spec_decode_num_{name}_total"] for name in ("drafts", "accepted_tokens")]


def main() -> None:
    out = Path(sys.argv[1])
    hook = {"worker_process_setup_hook": "rl_hooks.stacks.on_ray.install"}
    ray.init(
        num_cpus=2,
        num_gpus=1,
        include_dashboard=False,
        object_store_memory=80_000_000,
        runtime_env=hook | {"env_vars": {"PYTHONPATH": os.environ["PYTHONPATH"]}},
    )
    commands = Commands(sys.argv[2], sys.argv[3], int(sys.argv[4]))

    def answer(number: int, value: Any) -> None:
        part = out / f"{number}.part"
        part.write_text(json.dumps(value))
        part.rename(out / str(number))

    answer(0, None)
    for number, line in enumerate(sys.stdin, 1):
        name, *given = json.loads(line)
        answer(number, getattr(commands, name)(*given))
    ray.shutdown()


if __name__ == "__main__":
    main()
