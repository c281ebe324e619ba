"""OpenRLHF's PPO on Ray with the hook in its policy, by one line of Ray's runtime environment and no fork.

>>> ray job submit --runtime-env-json '{"worker_process_setup_hook": "rl_hooks.trainer.stacks.on_ray.install",
...     "env_vars": {"DRAFTALIGN_URL": "http://service:8400"}}' -- python -m openrlhf.cli.train_ppo_ray ...

Ray calls `install` in each of its worker processes before the trainer's code. When OpenRLHF's strategy is imported
there, its `prepare` gets one step more: it puts the hook on the `Actor` that is prepared for training. Reference and
reward model are not prepared for training, and the critic is no `Actor`.
Written against Ray 2.60 and OpenRLHF 0.11.2. A process that never imports OpenRLHF is left as it was.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.util
import logging
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, Final

_log = logging.getLogger("rl_hooks")
_STRATEGY: Final = "openrlhf.utils.deepspeed.deepspeed"


def install() -> None:
    """Ray's `worker_process_setup_hook`. Does nothing without DRAFTALIGN_URL."""
    if os.environ.get("DRAFTALIGN_URL") and not any(isinstance(one, _AfterImport) for one in sys.meta_path):
        sys.meta_path.insert(0, _AfterImport())


class _AfterImport(importlib.abc.MetaPathFinder):
    """Calls `extend` on one module right after its own code ran. Finds nothing by itself."""

    def find_spec(
        self, fullname: str, _path: Sequence[str] | None, _target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _STRATEGY:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                run(module)
                try:
                    extend(module.DeepspeedStrategy)
                except Exception:  # noqa: BLE001 - the trainer goes on without us
                    _log.exception("draftalign is OFF: this OpenRLHF cannot be extended; written against 0.11.2")

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def extend(strategy: Any) -> None:
    """Have `strategy.prepare` put the hook on each `Actor` that it prepares for training."""
    prepare = strategy.prepare

    @functools.wraps(prepare)
    def prepared(self: Any, *models: Any) -> Any:
        made = prepare(self, *models)
        for model in models:
            if isinstance(model, tuple):
                try:
                    _attach(self, model[0])
                except Exception:  # noqa: BLE001 - the trainer goes on without us
                    _log.exception("draftalign is OFF: this policy's rollouts are not sent")
        return made

    strategy.prepare = prepared


def _attach(strategy: Any, actor: Any) -> None:
    """Put the hook on it where it is OpenRLHF's `Actor`. Imported here: Ray's other processes shall not load torch."""
    from openrlhf.models import Actor

    from rl_hooks.trainer.stacks.environment import attached
    from rl_hooks.trainer.stacks.openrlhf import attach

    if isinstance(actor, Actor):
        rank, world_size = strategy.get_rank(), strategy.world_size

        def put_on(url: str, run: str, token: str | None) -> Any:
            return attach(actor, url, rank=rank, world_size=world_size, run=run, token=token)

        attached("OpenRLHF", rank, put_on)
