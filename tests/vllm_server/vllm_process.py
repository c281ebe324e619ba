"""A real `vllm serve` in its own environment, as a child process that dies with the test."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
from helpers.engine.engine_fixtures import EOS_ID
from helpers.engine.engine_forks import Fork, Forks
from helpers.engine.server_load import write_entry_points
from helpers.ports import free_port

from examples.policy import BASE_POLICY
from rl_hooks.engines.counting.counters import Counts, Snapshot

REPOSITORY = Path(__file__).parents[2]
PYTHON = Path(os.environ.get("DRAFTALIGN_VLLM_PYTHON", REPOSITORY / ".venv-vllm/bin/python"))
DEPTH = 3
_START_SECONDS = 420.0

#: vLLM's V2 model runner on a CPU, its Triton kernels in the interpreter (`plugin/sitecustomize.py`).
V2_RUNNER: dict[str, Any] = {"VLLM_USE_V2_MODEL_RUNNER": "1", "TRITON_INTERPRET": "1"}

#: Its processes are forked, the server's own too (`engine_forks.py`): a tenth of the time of a start. vLLM spawns those
#: of the demo, and those of the LLM that a script attaches.
FORKED: dict[str, Any] = {"DRAFTALIGN_TESTS_FORK": "1"}
#: A fork whose own processes vLLM spawns.
SPAWNS: dict[str, Any] = dict.fromkeys(FORKED, "0")
#: An engine with it is a process that imports vLLM itself: torch reads it when vLLM is imported.
_READ_AT_IMPORT = "TORCHDYNAMO_DISABLE"
_SERVER = "vllm.entrypoints.cli.main"

#: Asynchronous scheduling, vLLM's default on GPUs, which it turns off on a CPU (`plugin/vllm_test_plugin.py`); and what
#: compiles itself at its first step, which takes a minute.
AHEAD: dict[str, Any] = {"DRAFTALIGN_TESTS_ASYNC": "1", "TORCHDYNAMO_DISABLE": "1"}

#: Not an installed distribution: found by its metadata on PYTHONPATH, in the server's processes only.
_ENTRY_POINTS = """\
[vllm.general_plugins]
draftalign_tests = vllm_test_plugin:register
[vllm.endpoint_plugins]
draftalign_tests = vllm_test_plugin:TestEndpoints
"""


def plugins(directory: Path) -> Path:
    """A directory for PYTHONPATH: vLLM finds the tests' plugin there, and ours as pyproject.toml names them."""
    write_entry_points(directory, "draftalign_tests", _ENTRY_POINTS)
    write_entry_points(directory)
    return directory


def cpu_environment(overlay: Path) -> dict[str, str]:
    """The environment of a vLLM on a CPU, with the plugins of `overlay`."""
    path = os.pathsep.join([str(overlay), str(Path(__file__).parent / "plugin"), str(REPOSITORY)])
    return dict(os.environ) | {
        "PYTHONPATH": path,
        "VLLM_PLUGINS": "draftalign,draftalign_tests",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
    }


@functools.cache
def _forks(*, v2: bool) -> Forks:
    """A process that has imported what a server does; another one for the V2 runner: Triton reads its variable then."""
    modules = (_SERVER, "vllm.entrypoints.cli.serve", "vllm.entrypoints.openai.api_server", "vllm.entrypoints.llm")
    runner = "vllm.v1.worker.cpu.model_runner" if v2 else "vllm.v1.worker.cpu_model_runner"
    of_the_core = ("vllm.v1.engine.core", "vllm.v1.worker.cpu_worker", runner)
    overlay = REPOSITORY  # none: it loads no plugins, its forks do
    variables = cpu_environment(overlay) | FORKED | (V2_RUNNER if v2 else {})
    return Forks("vllm-v2" if v2 else "vllm", PYTHON, (*modules, *of_the_core), variables)


def forks_for(environment: Mapping[str, str]) -> Forks:
    """What forks a program with these variables."""
    forked = environment.items() >= FORKED.items()
    assert not (forked and _READ_AT_IMPORT in environment), "its engine has to import vLLM itself"
    return _forks(v2="TRITON_INTERPRET" in environment)


def forking_demo(**environment: str) -> SimpleNamespace:
    """What `examples.vllm_engine` may take for `subprocess`: its server is a fork, too."""

    def fork(command: list[str], *, env: Mapping[str, str], stdout: Any, **_: Any) -> Fork:
        tied, program, *arguments = command[2:]
        assert tied == "service.cli.child", "it ends with who asked for it, who stops it"
        path = os.pathsep.join([str(Path(__file__).parent / "plugin"), env["PYTHONPATH"]])
        variables = {**env, **environment, "PYTHONPATH": path}
        return forks_for(environment).fork(program, arguments, variables, Path(stdout.name))

    return SimpleNamespace(**vars(subprocess) | {"Popen": fork})


class VllmServer:
    """One server with the shipped policy and the drafter of `drafter`; swaps come from `drafters`.

    `speculative`: another speculative configuration than EAGLE-3 with that drafter. `policy`: another policy.
    `options`: more of `vllm serve`.
    """

    def __init__(
        self,
        scratch: Path,
        drafter: Path,
        drafters: Path,
        *,
        eager: bool = True,
        speculative: dict[str, Any] | None = None,
        policy: Path = BASE_POLICY,
        options: Sequence[str] = (),
        **environment: str,
    ) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        # vLLM closes what was idle for 5 s, and a request that goes out just then fails: not reused so late.
        self.client = httpx.Client(base_url=self.url, timeout=120, limits=httpx.Limits(keepalive_expiry=2.0))
        self.log = scratch / "vllm.log"
        variables = cpu_environment(plugins(scratch / "plugin")) | {"DRAFTALIGN_DRAFTER_DIR": str(drafters)}
        variables |= environment
        arguments = [*self._arguments(policy, drafter, speculative, eager=eager), *options]
        self.process: subprocess.Popen[bytes] | Fork
        if environment.keys() >= FORKED.keys() and _READ_AT_IMPORT not in environment:
            self.process = forks_for(environment).fork(_SERVER, arguments, variables, self.log)
            return
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [str(PYTHON), "-m", _SERVER, *arguments],
                env=variables,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # one group: the engine's own processes go when it is killed
            )

    def _arguments(self, policy: Path, drafter: Path, speculative: dict[str, Any] | None, *, eager: bool) -> list[str]:
        eagle3 = {"method": "eagle3", "model": str(drafter), "num_speculative_tokens": DEPTH}
        options = {
            "--served-model-name": "policy",
            "--host": "127.0.0.1",
            "--port": str(self.port),
            "--dtype": "float32",
            "--max-model-len": "256",
            "--max-num-seqs": "8",
            "--max-num-batched-tokens": "256",
            "--num-gpu-blocks-override": "512",  # else it zeroes a whole gigabyte
            "--generation-config": "vllm",
            "--speculative-config": json.dumps(speculative or eagle3),
        }
        flags = [part for pair in options.items() for part in pair] + (["--enforce-eager"] if eager else [])
        return ["serve", str(policy), *flags]

    def wait_until_healthy(self) -> None:
        """Block until it answers; raise with the end of its log if it will not."""
        deadline = time.monotonic() + _START_SECONDS
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                break
            try:
                if self.client.get("/health").status_code == 200:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.1)
        raise RuntimeError(f"vLLM did not start; the end of its log:\n{self.log_end()}")

    def log_end(self) -> str:
        """What it printed last."""
        return self.log.read_text(errors="replace")[-6000:]

    def stop(self) -> None:
        """End the whole group of processes."""
        self.client.close()
        if self.process.poll() is None:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(60)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    # --- calls
    def generate(self, prompt: Sequence[int], *, max_tokens: int = 40, temperature: float = 0.0, **more: Any) -> Any:
        """Token ids of one completion, raising on any answer but 200."""
        body = {
            "model": "policy",
            "prompt": list(prompt),
            "max_tokens": max_tokens,
            "temperature": temperature,
            "return_token_ids": True,
            "stop_token_ids": [EOS_ID],
            **more,
        }
        answer = self.client.post("/v1/completions", json=body).raise_for_status().json()
        return answer["choices"][0]["token_ids"]

    def swap(self, path: Path | str, version: str) -> httpx.Response:
        """Ask for a swap."""
        return self.client.post("/drafter/swap", json={"path": str(path), "version": version})

    def state(self) -> dict[str, Any]:
        """What it says it serves."""
        return self.client.get("/drafter/state").raise_for_status().json()  # type: ignore[no-any-return]

    def rpc(self, method: str, *args: Any) -> Any:
        """Call a method that the tests' plugin put on the worker."""
        body = {"method": "tests_" + method, "args": list(args)}
        return self.client.post("/test/rpc", json=body).raise_for_status().json()[0]

    def counters(self) -> Counts:
        """Its counters now."""
        return Snapshot.parse(self.client.get("/metrics").raise_for_status().text).counts
