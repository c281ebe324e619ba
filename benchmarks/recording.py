"""Record the demo's RL run without its service: rollout files and the policy's head, one of each per policy version.

TRL's GRPOTrainer, a demo task's prompts and reward, the demo's inference server; no drafter anywhere, so that what is
replayed later does not depend on one. A recording is a directory:

    recording.json           {format, task, seed, steps, learning_rate, prompts, rewards}, rewards by policy version
    base.safetensors         rollouts of the base policy, for drafters that are trained before RL begins
    last.safetensors         as many of the policy that RL ended with, on prompts of the run's last step
    stale.safetensors        the same rollouts with the base policy's features
    rollouts-<version>.safetensors   as `rl_hooks` sends them: bfloat16 features, `last_hidden` with `logsumexp`
    heads.safetensors        <version>: lm_head [V, H] float32; the policy ties its embedding to it
                             (of the policy that RL ended with: version = steps)

Nothing is pickled. `benchmarks/tracking.py` says how to run it.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from drafter.batch import RolloutBatch, load_batch
from examples import TASKS, demo
from examples.engine_client import EngineClient
from examples.features import Rollout, batch_of
from examples.policy import AUX_LAYERS, load
from examples.task import Task
from rl_hooks import wire
from rl_hooks.sending.features import as_wire

_FORMAT: Final = "draftalign.recording.v1"
_RUN: Final = "recording"
BASE_FILE: Final = "base.safetensors"
LAST_FILE: Final = "last.safetensors"
STALE_FILE: Final = "stale.safetensors"


@dataclass(frozen=True, eq=False)
class Recording:
    """One seed's RL run, loaded."""

    task: Task
    seed: int
    learning_rate: float
    prompts: int  # of a step
    rewards: dict[int, float]  # policy version -> mean reward of its rollouts
    directory: Path
    base: RolloutBatch  # rollouts of the base policy
    base_file: Path
    versions: tuple[int, ...]
    files: tuple[Path, ...]
    batches: tuple[RolloutBatch, ...]
    heads: tuple[Tensor, ...]  # [V, H] each
    last_head: Tensor | None  # of the policy that RL ended with; older recordings lack it


def rollout_file(directory: Path, version: int) -> Path:
    """Where the rollouts of one policy version lie."""
    return directory / f"rollouts-{version:04d}.safetensors"


def open_recording(directory: Path, *, every: int = 1, until: int = 1 << 30) -> Recording:
    """Load every `every`-th policy version below `until`; OSError, ValueError or WireError if one is not there."""
    facts = json.loads((directory / "recording.json").read_text())
    if facts.get("format") != _FORMAT:
        raise ValueError(f"{directory} is not a recording: expected format {_FORMAT}, got {facts.get('format')!r}")
    heads = load_file(directory / "heads.safetensors")
    versions = sorted(int(v) for v in heads if int(v) < min(until, int(facts["steps"])))[::every]
    files = tuple(rollout_file(directory, v) for v in versions)
    return Recording(
        task=TASKS[facts.get("task", "elicit")],
        seed=int(facts["seed"]),
        learning_rate=float(facts["learning_rate"]),
        prompts=int(facts.get("prompts", demo.PROMPTS_PER_STEP)),
        rewards={int(v): float(r) for v, r in facts["rewards"].items()},
        directory=directory,
        base=load_batch(directory / BASE_FILE),
        base_file=directory / BASE_FILE,
        versions=tuple(versions),
        files=files,
        batches=tuple(load_batch(f) for f in files),
        heads=tuple(heads[str(v)] for v in versions),
        last_head=heads.get(str(facts["steps"])),
    )


def record(
    directory: Path,
    task: Task,
    *,
    seed: int,
    steps: int,
    learning_rate: float,
    prompts: int = demo.PROMPTS_PER_STEP,
) -> None:
    """Run RL for `steps` steps of so many prompts and write the recording."""
    os.environ.update({"HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1", "TOKENIZERS_PARALLELISM": "false"})
    directory.mkdir(parents=True, exist_ok=True)
    port = demo.free_port()
    server = ["examples.engine_server", "--policy", str(task.base_policy), "--port", str(port), "--seed", str(seed)]
    with tempfile.TemporaryDirectory() as scratch, demo.child("engine", server) as process:
        engine = EngineClient(f"http://127.0.0.1:{port}")
        engine.wait(process)
        policy, tokenizer = load(task.base_policy)
        config = demo.DemoConfig(steps=steps, seed=seed, out=directory, task_name=task.name, prompts=prompts)
        recorder = _Recorder(config, Path(scratch), engine, policy, tokenizer)
        recorder.record_base()
        recorder.trainer.args.learning_rate = learning_rate  # the optimizer is built when training begins
        recorder.trainer.train()
        recorder.record_last(load(task.base_policy)[0])
    save_file(recorder.heads, directory / "heads.safetensors")
    facts = {
        "format": _FORMAT,
        "task": task.name,
        "seed": seed,
        "steps": steps,
        "learning_rate": learning_rate,
        "prompts": prompts,
        "rewards": {v: logs["reward"] for v, logs in sorted(recorder.logged.items())},
    }
    (directory / "recording.json").write_text(json.dumps(facts, indent=1))  # last: it says that all is there


class _Recorder(demo.Session):
    """The demo's RL session with a file in the place of the service."""

    def __init__(
        self, config: demo.DemoConfig, scratch: Path, engine: EngineClient, policy: Any, tokenizer: Any
    ) -> None:
        # Not Session's own: that one attaches to a service.
        self.config = config
        self.state_dir = scratch
        self.engine = engine
        self.policy, self.tokenizer = policy, tokenizer
        self.live, self.logged = {}, {}
        self._loaded_version, self._current = 0, ""
        self._directory = config.out
        self.heads: dict[str, Tensor] = {}
        self.trainer = self._make_trainer()

    def record_base(self) -> None:
        """Rollouts of the policy before any RL, on prompts of their own: the demo's warm-up."""
        texts = self.config.task.sample_prompts(demo.WARM_UP_ROLLOUTS, 10_000 + self.config.seed)
        rollouts = self._generate(texts)
        write_rollouts(self._directory / BASE_FILE, batch_of(self.policy, rollouts), prefix="base")

    def record_last(self, base: Any) -> None:
        """Rollouts of the policy that RL ended with, on new prompts of the last step's kind, features of both."""
        model, steps = self.trainer.accelerator.unwrap_model(self.trainer.model).eval(), self.config.steps
        self.engine.load_policy(model, steps)
        rows = self.config.task.curriculum(2, demo.WARM_UP_ROLLOUTS, 20_000 + self.config.seed)
        rollouts = self._generate(rows["prompt"][demo.WARM_UP_ROLLOUTS :])
        for name, policy in ((LAST_FILE, model), (STALE_FILE, base)):
            batch = batch_of(policy, rollouts, policy_version=steps)
            write_rollouts(self._directory / name, batch, prefix="last")
        self.heads[str(steps)] = model.lm_head.weight.detach().float().clone()

    def _generate(self, texts: Sequence[str]) -> list[Rollout]:
        prompts = [self.tokenizer.encode(text) for text in texts]
        rollouts = []
        for start in range(0, len(prompts), 128):
            part = prompts[start : start + 128]
            rollouts += demo.as_rollouts(part, self.engine.generate(part, self.config.task))
        return [r for r in rollouts if len(r.token_ids) > 1]

    def _rollouts(self, prompts: Sequence[str], trainer: Any) -> dict[str, list[Any]]:
        reply = super()._rollouts(prompts, trainer)
        step = int(trainer.state.global_step)
        model = trainer.accelerator.unwrap_model(trainer.model)
        rollouts = [r for r in self.live[step].rollouts if len(r.token_ids) > 1]
        training = model.training
        model.eval()
        batch = batch_of(model, rollouts, policy_version=step)
        model.train(training)
        write_rollouts(rollout_file(self._directory, step), batch, prefix=f"v{step}")
        self.heads[str(step)] = model.lm_head.weight.detach().float().clone()
        return reply

    def _on_log(self, step: int, logs: dict[str, float]) -> None:
        if "reward" in logs:
            self.logged[step - 1] = logs


def rollout_tensors(batch: RolloutBatch) -> dict[str, wire.Tensor]:
    """The tensors of a batch's rollout file, features in bfloat16."""
    return {
        "input_ids": wire.Tensor.of(batch.input_ids.numpy().astype(np.int32), "I32"),
        "cu_seqlens": wire.Tensor.of(batch.cu_seqlens.numpy().astype(np.int32), "I32"),
        "loss_mask": wire.Tensor.of(batch.loss_mask.numpy().astype(np.uint8), "U8"),
        "logprobs": as_wire(batch.logprobs.float()),
        "logsumexp": as_wire(batch.logsumexp.float()),
        "aux_hidden": as_wire(batch.aux_hidden.to(torch.bfloat16)),
        "last_hidden": as_wire(batch.last_hidden.to(torch.bfloat16)),
    }


def write_rollouts(path: Path, batch: RolloutBatch, *, prefix: str) -> None:
    """Write a batch as a rollout file, features in bfloat16."""
    batch = replace(batch, rollout_ids=tuple(f"{prefix}-{i}" for i in range(batch.rollouts)))
    hidden_size = batch.last_hidden.shape[1]
    config = {"model_type": "qwen3", "hidden_size": hidden_size, "num_hidden_layers": len(AUX_LAYERS) + 1}
    metadata = wire.rollout_metadata(
        run=_RUN,
        policy_version=batch.policy_version,
        rollout_ids=batch.rollout_ids,
        target_fingerprint=wire.target_fingerprint(config, AUX_LAYERS),
        aux_layers=AUX_LAYERS,
    )
    path.write_bytes(b"".join(bytes(part) for part in wire.encode(rollout_tensors(batch), metadata)))
