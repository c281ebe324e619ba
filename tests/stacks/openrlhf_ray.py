"""OpenRLHF's real `Actor` and strategy in two Ray actors, the hook put on by Ray: `python openrlhf_ray.py OUT`.

Of the test's own, for want of CUDA: flash_attn's packing, the strategy's call of `deepspeed.initialize` (it asks for a
CUDA Adam), and its process group. Writes OUT/<rank>.json and OUT/requests.json.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any

import ray
from helpers.trainer.hooks_fixtures import mapped, receiver, tiny_qwen3
from helpers.trainer.sent_fixtures import brought_the_first_drafter, first_drafter, keep

STEPS = 2


class Policy:
    """What OpenRLHF's `PolicyModelActor` does with its strategy, in a process of Ray's."""

    def train(self, rank: int, port: int) -> dict[str, Any]:
        import openrlhf_trainer as single  # type: ignore[import-not-found] # beside this file

        said: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("rl_hooks").addHandler(handler)
        found: dict[str, Any] = {"said": said}
        actor_kind = single.actor_of()
        import deepspeed
        import torch
        from openrlhf.utils.deepspeed.deepspeed import DeepspeedStrategy

        found["extended"] = hasattr(DeepspeedStrategy.prepare, "__wrapped__")
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": "2"}
        os.environ["LOCAL_RANK"] = str(rank)
        torch.set_num_threads(1)
        sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]
        torch.distributed.init_process_group("gloo", rank=rank, world_size=2)

        class OnCpu(DeepspeedStrategy):  # type: ignore[misc]
            world_size = 2

            def __init__(self) -> None:
                pass

            def _ds_init_train_model(self, actor: Any, _cfg: Any) -> tuple[Any, ...]:
                config: dict[str, Any] = {"train_micro_batch_size_per_gpu": single.ROLLOUTS}
                config |= {"zero_optimization": {"stage": 2}, "zero_force_ds_cpu_optimizer": False}
                optimizer = torch.optim.AdamW(actor.model.parameters(), lr=1e-2)
                actor.model, *_ = deepspeed.initialize(
                    model=actor.model, optimizer=optimizer, config=config, dist_init_required=False
                )
                return actor, optimizer, None

            def _ds_init_eval_model(self, actor: Any) -> Any:
                return actor

        def actor() -> Any:
            made = actor_kind(tiny_qwen3(layers=8, tied=False, seed=3))
            made.model.config.use_cache = False
            made.packing_samples, made.temperature = True, single.TEMPERATURE
            return made

        strategy = OnCpu()
        reference = strategy.prepare(actor())
        policy, *_ = strategy.prepare((actor(), {}))
        found["hooked"] = ["forward" in one.__dict__ for one in (policy, reference)]
        for step in range(STEPS):
            ids, mask, action_mask = single.rollouts(100 * step + rank)
            with torch.no_grad():
                policy(ids, action_mask, mask)
                reference(ids, action_mask, mask)
            policy.model.backward(-policy(ids, action_mask, mask).mean())
            policy.model.step()
        return found


def main(out: Path) -> None:
    with socket.socket() as probe, receiver() as service:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
        probe.close()
        variables = {"PYTHONPATH": os.environ["PYTHONPATH"], "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
        hook = {"worker_process_setup_hook": "rl_hooks.stacks.on_ray.install"}
        ours = {"DRAFTALIGN_URL": service.url, "DRAFTALIGN_RUN": "r"}
        drafter = first_drafter(out / "first", tiny_qwen3(layers=8).config)
        ours["DRAFTALIGN_INITIAL_DRAFTER"] = drafter
        ray.init(
            num_cpus=2,
            include_dashboard=False,
            object_store_memory=80_000_000,
            runtime_env=hook | {"env_vars": variables | ours},
        )
        kind = ray.remote(Policy)
        policies = [kind.remote() for _ in range(2)]
        found = ray.get([one.train.remote(rank, port) for rank, one in enumerate(policies)])
        deadline = time.monotonic() + 30
        while len(service.rollouts()) < 2 * STEPS and time.monotonic() < deadline:
            time.sleep(0.1)
        versions = [int(mapped(r, out).header.metadata["policy_version"]) for r in service.rollouts()]
        asked = sorted({f"{r.method} {r.path}" for r in service.requests if r.method != "GET"})
        registered = [r for r in service.requests if r.path == "/runs/r"]
        came = {"first_drafter": brought_the_first_drafter(registered, out, drafter)}
        keep(service.requests, out / "sent")
        (out / "requests.json").write_text(json.dumps({"asked": asked, "versions": sorted(versions)} | came))
        for rank, one in enumerate(found):
            (out / f"{rank}.json").write_text(json.dumps(one))
        ray.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
