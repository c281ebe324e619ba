"""An actor on a real Ray whose class is extended by `on_ray.install`: `python ray_actors.py OUT`.

As in SkyRL, the class is decorated in the module that defines it, and a task of Ray's makes the actor: both processes
have the setup hook. The module is the test's own; SkyRL's name is on it, and its methods. Writes OUT/found.json.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path

import ray

MODULE = "skyrl.backends.skyrl_train.workers.fsdp.fsdp_worker"
SOURCE = """
import ray

class FSDPPolicyWorkerBase:
    def init_model(self): ...
    def forward_backward(self): ...
    def _forward_backward_micro(self): ...
    def optim_step(self): ...
    def load_checkpoint(self): ...
    async def broadcast_to_inference_engines(self): ...
    def has(self):
        return [any("stacks/skyrl.py" in one for one in files(getattr(self, name))) for name in NAMES]

def files(method):
    while method is not None:
        yield method.__code__.co_filename
        method = getattr(method, "__wrapped__", None)

NAMES = [name for name in vars(FSDPPolicyWorkerBase) if name != "has" and not name.startswith("__")]
PolicyWorker = ray.remote(FSDPPolicyWorkerBase)
"""


@ray.remote  # type: ignore[untyped-decorator]
def entrypoint() -> object:
    """What SkyRL's own does: make the worker, and ask it."""
    worker = importlib.import_module(MODULE).PolicyWorker.remote()
    return ray.get(worker.has.remote())


def main(out: Path) -> None:
    path = out / (MODULE.replace(".", "/") + ".py")
    path.parent.mkdir(parents=True)
    path.write_text(SOURCE)
    variables = {"PYTHONPATH": f"{out}{os.pathsep}{os.environ['PYTHONPATH']}", "DRAFTALIGN_URL": "http://127.0.0.1:1"}
    hook = {"worker_process_setup_hook": "rl_hooks.stacks.on_ray.install"}
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        object_store_memory=80_000_000,
        runtime_env=hook | {"env_vars": variables | {"OMP_NUM_THREADS": "1"}},
    )
    (out / "found.json").write_text(json.dumps(ray.get(entrypoint.remote())))
    ray.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
