"""A driver of one's own on Ray: what it gives `ray.init`, so that a trainer in Ray's workers gets the hook.

In an environment with Ray and this package:

> DRAFTALIGN_URL=http://service:8400 DRAFTALIGN_RUN=my-run python -m examples.attach.on_ray

Ray calls `install` in each worker process before any code of the trainer's. There it waits until the trainer's own
module is imported (OpenRLHF's, SkyRL's), and extends the class in it that holds the policy. The task below stands where
the trainer's workers would, and prints whether `install` was called in its process.
"""

from __future__ import annotations

import os
import sys

import ray

from rl_hooks.stacks.environment import VARIABLES

RUNTIME_ENVIRONMENT = {
    "worker_process_setup_hook": "rl_hooks.stacks.on_ray.install",
    "env_vars": {name: os.environ[name] for name in VARIABLES if name in os.environ},
}


def waits() -> bool:
    """Whether the hook waits in this worker process for a trainer's module."""
    return any(type(finder).__module__ == "rl_hooks.stacks.on_ray" for finder in sys.meta_path)


if __name__ == "__main__":
    ray.init(runtime_env=RUNTIME_ENVIRONMENT)
    print("the hook waits in a worker of Ray:", ray.get(ray.remote(waits).remote()))
    ray.shutdown()
