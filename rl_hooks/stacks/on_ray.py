"""OpenRLHF, SkyRL or NeMo-RL on Ray with the hook in its policy, by one line of Ray's environment and no fork.

>>> ray job submit --runtime-env-json '{"worker_process_setup_hook": "rl_hooks.stacks.on_ray.install",
...     "env_vars": {"DRAFTALIGN_URL": "http://service:8400"}}' -- python -m openrlhf.cli.train_ppo_ray ...

Ray calls `install` in each of its worker processes before the trainer's code. When the trainer's own module is imported
there, the class in it that holds the policy is extended by the adapter's `extend`. A process that never imports such a
module is left as it was. Written against Ray 2.60.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import logging
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Final

from rl_hooks.stacks.environment import ENGINES_SHARE

_log = logging.getLogger("rl_hooks")
_NEMO_RL: Final = "nemo_rl.models.policy.workers"
#: Module of a trainer: the class in it that is extended, and the adapter that does it.
_EXTENDED: Final = {
    "openrlhf.utils.deepspeed.deepspeed": ("DeepspeedStrategy", "rl_hooks.stacks.openrlhf"),
    "skyrl.backends.skyrl_train.workers.fsdp.fsdp_worker": ("FSDPPolicyWorkerBase", "rl_hooks.stacks.skyrl"),
    f"{_NEMO_RL}.dtensor_policy_worker": ("DTensorPolicyWorkerImpl", "rl_hooks.stacks.nemo_rl"),
    f"{_NEMO_RL}.dtensor_policy_worker_v2": ("DTensorPolicyWorkerV2Impl", "rl_hooks.stacks.nemo_rl"),
}


def install() -> None:
    """Ray's `worker_process_setup_hook`. Does nothing without DRAFTALIGN_URL.

    A vLLM in such a process sends no rollouts of its own, unless it is told to.
    """
    if not os.environ.get("DRAFTALIGN_URL"):
        return
    os.environ.setdefault(ENGINES_SHARE, "0")
    if not any(isinstance(one, _AfterImport) for one in sys.meta_path):
        sys.meta_path.insert(0, _AfterImport())


class _AfterImport(importlib.abc.MetaPathFinder):
    """Extends a trainer's class right after its module's own code ran. Finds nothing by itself."""

    def find_spec(
        self, fullname: str, _path: Sequence[str] | None, _target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in _EXTENDED:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                run(module)
                name, adapter = _EXTENDED[fullname]
                try:
                    kind = getattr(module, name)
                    own = dict(vars(kind))
                    # Imported now: Ray's other processes shall not load torch.
                    importlib.import_module(adapter).extend(kind)
                    _leave_to_inheritance(
                        module, kind, {each for each in vars(kind) if vars(kind)[each] is not own.get(each)}
                    )
                except Exception:  # noqa: BLE001 - the trainer goes on without us
                    _log.exception("draftalign is OFF: %s of %s cannot be extended", name, fullname)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _leave_to_inheritance(module: ModuleType, kind: type, extended: set[str]) -> None:
    """Have the actors of `module` inherit what of `kind` was extended: Ray's decorator has copied `kind`'s own methods.

    A process that makes actors pickles the copies by value, so the actor would have the methods of before.
    """
    for one in vars(module).values():
        actor = getattr(getattr(one, "__ray_metadata__", None), "modified_class", None)
        if isinstance(actor, type) and issubclass(actor, kind):
            for name in extended & vars(actor).keys():
                delattr(actor, name)
