"""`examples/attach/areal_grpo.py` as AReaL reads it: `python areal_example.py OUT`, in an environment with AReaL 1.0.4.

Its configuration is AReaL's own, from a file. The data set and the engines are not there: calls of them are bound to
AReaL's signatures, its names of workflow and reward are looked up, and OUT/found.json says what came of it.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import inspect
import json
import sys
import types
from pathlib import Path
from typing import Any

# Loggers, and what compares answers: imported, and not used here.
for absent in ("swanlab", "trackio", "math_verify", "math_verify.grader", "math_verify.parser"):
    module: Any = types.ModuleType(absent)
    module.__spec__ = importlib.machinery.ModuleSpec(absent, None, is_package=True)
    module.__getattr__ = lambda name: types.SimpleNamespace if not name.startswith("__") else None
    sys.modules[absent] = module

from areal.trainer.rl_trainer import PPOTrainer  # noqa: E402

example: Any = importlib.import_module("examples.attach.areal_grpo")

NAMES = "experiment_name: e, trial_name: t"
CONFIGURATION = """
experiment_name: e
trial_name: t
cluster: {{fileroot: {out}, n_nodes: 1, n_gpus_per_node: 1}}
tokenizer_path: {out}/policy
train_dataset: {{path: {out}/gsm8k, type: rl, batch_size: 4}}
valid_dataset: {{path: {out}/gsm8k, type: rl, batch_size: 4}}
rollout: {{backend: "vllm:d1", {names}}}
actor: {{backend: "fsdp:d1", path: {out}/policy, use_decoupled_loss: true, prox_logp_method: recompute, {names}}}
ref: {{backend: "fsdp:d1", path: {out}/policy, {names}}}
saver: {{fileroot: {out}, {names}}}
evaluator: {{fileroot: {out}, {names}}}
recover: {{fileroot: {out}, {names}}}
stats_logger: {{fileroot: {out}, {names}}}
"""


def named(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def main(out: Path) -> None:
    found: dict[str, Any] = {}

    class Trainer(example.DraftalignPPOTrainer):  # type: ignore[misc]
        def __init__(self, config: Any, **data: Any) -> None:
            inspect.signature(PPOTrainer.__init__).bind(self, config, **data)
            found["proximal pass"] = config.actor.should_compute_prox_logp()
            found["backend"] = config.actor.backend

        def __enter__(self) -> Any:
            return self

        def __exit__(self, *_: object) -> None: ...

        def train(self, **told: Any) -> None:
            inspect.signature(PPOTrainer.train).bind(self, **told)
            named(told["workflow_kwargs"]["reward_fn"])
            inspect.signature(named(told["workflow"]).__init__).bind(self, **told["workflow_kwargs"])
            found["trained"] = True

    data = inspect.signature(example.get_custom_dataset)
    found["splits"] = []
    example.get_custom_dataset = lambda **told: found["splits"].append(data.bind(**told).arguments["split"])
    example.load_hf_tokenizer = lambda path: path
    example.DraftalignPPOTrainer = Trainer
    (out / "areal.yaml").write_text(CONFIGURATION.format(out=out, names=NAMES))
    example.main(["--config", str(out / "areal.yaml")])
    (out / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
