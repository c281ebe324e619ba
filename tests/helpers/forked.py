"""Programs of ours as forks of a Python that has imported what they import: `engine_forks.py` says of what kind."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from helpers.engine.engine_forks import Fork, Forks

ROOT = Path(__file__).parents[2]
_PATHS = os.pathsep.join(map(str, (ROOT, ROOT / "tests")))
#: What libraries read when they are imported.
_READ_AT_IMPORT = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}
#: A worker and what trains import torch, the other commands do not. Nothing of `rl_hooks` that runs in a trainer: each
#: fork is to be a process of its own for it.
_MODULES = {
    "command": ("service.cli.main", "service.cli.up", "service.api.app"),
    "worker": ("service.cli.main", "service.worker.process.worker"),
    "trainer": (
        *("torch._dynamo", "torch.distributed.fsdp", "transformers.models.qwen3.modeling_qwen3", "datasets"),
        *("trl.trainer.grpo_trainer", "trl.experimental.async_grpo"),
    ),
}


@functools.cache
def forks(kind: str) -> Forks:
    """What forks a `command`, a `worker` or a `trainer`, one for all test processes of a run."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("DRAFTALIGN_")}
    return Forks(kind, Path(sys.executable), _MODULES[kind], kept | {"PYTHONPATH": _PATHS} | _READ_AT_IMPORT)


def run_fork(
    kind: str,
    program: str,
    *arguments: str,
    directory: Path,
    environment: Mapping[str, str],
    seconds: float = 60.0,
) -> subprocess.CompletedProcess[str]:
    """As `subprocess.run` with its output captured. `directory`: where it runs."""
    with tempfile.TemporaryDirectory() as place:
        output, errors = Path(place, "output"), Path(place, "errors")
        given = dict(environment) | {"PYTHONPATH": _PATHS, "OMP_NUM_THREADS": "1"}
        fork = forks(kind).fork(program, arguments, given, output, errors=errors, directory=directory)
        try:
            fork.wait(seconds)
        except subprocess.TimeoutExpired:
            for number in (signal.SIGINT, signal.SIGKILL):  # at first it may end what is in a group of its own, a fork
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(fork.pid, number)
                fork.poll(30.0)
            raise
        code = fork.returncode
        return subprocess.CompletedProcess([program, *arguments], code, output.read_text(), errors.read_text())


@contextlib.contextmanager
def running_api(state_dir: Path, redis_url: str, port: int, log: Path) -> Iterator[Fork]:
    """The API as a process of its own, which is killed at the end. It may not answer yet."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("DRAFTALIGN_")}
    arguments = "serve", "--state-dir", str(state_dir), "--redis-url", redis_url, "--port", str(port)
    fork = forks("command").fork("service.cli", arguments, environment | {"PYTHONPATH": _PATHS}, log)
    try:
        yield fork
    finally:
        fork.kill()
        fork.wait()
