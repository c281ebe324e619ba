"""NeMo-RL's own `Policy` and worker group on a real Ray, the hook put on as the guide says: `nemo_rl_ray.py OUT`.

NEMO_RL_SOURCE names the checkout. Ray is told of two GPUs, which are not there; of the test's own is what
nemo_rl_trainer.py replaces in each process, and the workers run in this environment, not in one that uv makes. Writes
OUT/found.json.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import nemo_rl_trainer as single  # type: ignore[import-not-found] # beside this file
import ray
from helpers.trainer.hooks_fixtures import mapped, receiver
from helpers.trainer.sent_fixtures import brought_the_first_drafter, first_drafter, keep

from rl_hooks.stacks import on_ray

STEPS = 2


def worker_process() -> None:
    """What Ray calls in each of its processes: `on_ray.install`, once a CPU was made of the process."""
    single.call_the_cpu_cuda("v2")
    run = threading.Thread.run

    def on_a_cpu(self: threading.Thread) -> None:  # the worker lives in a thread of Ray's
        with single.OnCPU():
            run(self)

    threading.Thread.run = on_a_cpu  # type: ignore[method-assign]
    on_ray.install()


def main(out: Path) -> None:
    single.write_policy(out / "policy")
    single.call_the_cpu_cuda("v2")
    from nemo_rl.algorithms.loss import ClippedPGLossConfig, ClippedPGLossFn
    from nemo_rl.distributed.batched_data_dict import BatchedDataDict
    from nemo_rl.distributed.ray_actor_environment_registry import ACTOR_ENVIRONMENT_REGISTRY
    from nemo_rl.distributed.virtual_cluster import RayVirtualCluster
    from nemo_rl.models.policy.lm_policy import Policy
    from transformers import PreTrainedTokenizerFast

    config = single.configuration(out / "policy", "packed")
    config["dtensor_cfg"]["_v2"] = True
    module, _ = single.WORKERS["v2"]
    ACTOR_ENVIRONMENT_REGISTRY[f"{module}.DTensorPolicyWorkerV2"] = sys.executable
    with receiver() as service:
        os.environ |= {"DRAFTALIGN_URL": service.url, "DRAFTALIGN_RUN": "r", "DRAFTALIGN_AUX_LAYERS": "2,4,5"}
        drafter = os.environ["DRAFTALIGN_INITIAL_DRAFTER"] = first_drafter(out / "first")
        os.environ["__RAY_WORKER_PROCESS_SETUP_HOOK_ENV_VAR"] = f"{Path(__file__).stem}.worker_process"
        ray.init(
            num_cpus=4,  # as many processes begin with it, and each imports torch
            num_gpus=2,
            include_dashboard=False,
            object_store_memory=80_000_000,
            runtime_env={"env_vars": dict(os.environ)},  # all that NeMo-RL's `init_ray` gives it
        )
        cluster = RayVirtualCluster([2], use_gpus=True, num_gpus_per_node=2, max_colocated_worker_groups=1)
        policy = Policy(cluster, config, PreTrainedTokenizerFast.from_pretrained(out / "policy"))
        loss = ClippedPGLossFn(ClippedPGLossConfig(reference_policy_kl_penalty=0.01))
        found: dict[str, Any] = {"metrics": []}
        for step in range(STEPS):
            data = BatchedDataDict(single.rollouts(step, "packed"))
            wanted = ("input_ids", "input_lengths", "token_mask", "sample_mask")
            seen = BatchedDataDict({name: data[name] for name in wanted})
            policy.prepare_for_lp_inference()
            data["prev_logprobs"] = data["generation_logprobs"] = policy.get_logprobs(seen)["logprobs"]
            reference = policy.get_reference_policy_logprobs(seen)["reference_logprobs"]
            data["reference_policy_logprobs"] = reference
            policy.prepare_for_training()
            metrics = policy.train(data, loss)["all_mb_metrics"]
            found["metrics"].append({k: v for k, v in metrics.items() if k.startswith("draftalign/")})
        deadline = time.monotonic() + 30
        rollouts = STEPS * len(single.SIZES)
        sent: dict[int, list[list[int]]] = {}
        while sum(map(len, sent.values())) < rollouts and time.monotonic() < deadline:
            time.sleep(0.1)
            sent = {}
            for file in (mapped(request, out) for request in service.rollouts()):
                bounds = file.array("cu_seqlens").tolist()
                ids = file.array("input_ids").tolist()
                rows = [ids[a:b] for a, b in pairwise(bounds)]
                sent.setdefault(int(file.header.metadata["policy_version"]), []).extend(rows)
        drawn = (single.rollouts(step, "packed") for step in range(STEPS))
        expected = [
            sorted(ids[:n].tolist() for ids, n in zip(one["input_ids"], one["input_lengths"], strict=True))
            for one in drawn
        ]
        found["sent"] = [sorted(sent.get(step, [])) == expected[step] for step in range(STEPS)]
        found["asked"] = sorted({f"{r.method} {r.path}" for r in service.requests if r.method != "GET"})
        registered = [r for r in service.requests if r.path == "/runs/r"]
        found["first_drafter"] = brought_the_first_drafter(registered, out, drafter)
        keep(service.requests, out / "sent")
        policy.shutdown()
        ray.shutdown()
    (out / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
