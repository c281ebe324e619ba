"""A real `sglang.launch_server` on a CPU in its own environment, as a child process that dies with the test."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from helpers.engine.engine_fixtures import EOS_ID
from helpers.engine.engine_forks import Fork, Forks
from helpers.engine.server_load import REPOSITORY, write_entry_points
from helpers.ports import free_port

from examples.policy import BASE_POLICY
from rl_hooks.engines.counting.counters import Counts
from rl_hooks.engines.sglang.adapter import GENERATED, REQUESTS, ROUNDS
from rl_hooks.engines.sglang.direct import LOADER

PYTHON = Path(os.environ.get("DRAFTALIGN_SGLANG_PYTHON", REPOSITORY / ".venv-sglang/bin/python"))
DEPTH = 3
PLUGIN = Path(__file__).parent / "plugin"
_START_SECONDS = 300.0


def _environment(overlay: Path) -> dict[str, str]:
    """Of a SGLang on a CPU, with the plugins of `overlay`."""
    return dict(os.environ) | {
        "PYTHONPATH": os.pathsep.join(map(str, [overlay, PLUGIN, REPOSITORY])),
        "SGLANG_PLUGINS": "draftalign",
        "SGLANG_USE_CPU_ENGINE": "1",
        "TORCHDYNAMO_DISABLE": "1",  # compiling takes longer than all that is asked here
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }


@functools.cache
def _forks() -> Forks:
    """A process that has imported what a server does; `launch` first, which stands in for what is not installed."""
    modules = ("launch", "sglang.launch_server", "sglang.srt.entrypoints.http_server", "sglang.srt.managers.scheduler")
    return Forks("sglang", PYTHON, modules, _environment(PLUGIN))


class SGLangProcess:
    """One server with the shipped policy and the drafter of `drafter`; swaps come from under `home`."""

    def __init__(self, scratch: Path, drafter: Path, home: Path, *arguments: str, **environment: str) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.client = httpx.Client(base_url=self.url, timeout=120, limits=httpx.Limits(keepalive_expiry=2.0))
        self.log = scratch / "sglang.log"
        ours = {"DRAFTALIGN_DRAFTER_DIR": str(home)} | environment
        self.environment = _environment(write_entry_points(scratch / "installed")) | ours
        arguments = (*self._options(drafter), *arguments)
        self.process: Fork = _forks().fork(str(PLUGIN / "launch.py"), arguments, self.environment, self.log)

    @classmethod
    @contextmanager
    def ready(cls, scratch: Path, drafters: Path, *arguments: str, **environment: str) -> Iterator[SGLangProcess]:
        """One that serves, with the drafter `random` of `drafters`."""
        started = cls(scratch, drafters / "random", drafters, *arguments, **environment)
        try:
            started.wait_until_ready()
            yield started
        finally:
            started.stop()

    def _options(self, drafter: Path) -> list[str]:
        options = {
            "--model-path": str(BASE_POLICY),
            "--host": "127.0.0.1",
            "--port": str(self.port),
            "--device": "cpu",
            "--dtype": "float32",
            "--context-length": "256",
            "--max-total-tokens": "8192",
            "--mem-fraction-static": "0.5",  # the cache is as above; what else takes memory meanwhile counts as ours
            "--speculative-algorithm": "EAGLE3",
            "--speculative-draft-model-path": str(drafter),
            "--speculative-num-steps": str(DEPTH),
            "--speculative-eagle-topk": "1",
            "--speculative-num-draft-tokens": str(DEPTH + 1),
            "--custom-weight-loader": LOADER,
        }
        flags = ["--skip-tokenizer-init", "--enable-metrics", "--sleep-on-idle"]  # else it polls with a whole core
        return [part for pair in options.items() for part in pair] + flags

    def wait_until_ready(self) -> None:
        """Block until it has served its own first request; raise with the end of its log if it will not."""
        deadline = time.monotonic() + _START_SECONDS
        while time.monotonic() < deadline and self.process.poll() is None:
            if b"fired up and ready" in self.log.read_bytes():
                return
            time.sleep(0.2)
        raise RuntimeError(f"SGLang did not start; the end of its log:\n{self.log_end()}")

    def log_end(self) -> str:
        """What it printed last."""
        return self.log.read_text(errors="replace")[-6000:]

    def stop(self) -> None:
        """End the whole group of processes."""
        self.client.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def run_beside(self, script: Path, *arguments: str) -> str:
        """What a script says that runs in SGLang's Python, beside the server."""
        log = self.log.with_name(f"{script.stem}.log")
        beside = _forks().fork(str(script), arguments, self.environment, log)
        try:
            beside.wait(120)
        finally:
            if beside.poll() is None:
                os.killpg(beside.pid, signal.SIGKILL)
        return log.read_text(errors="replace")

    # --- calls
    def ask(self, prompt: Sequence[int], *, max_tokens: int = 40, stop: bool = True) -> dict[str, Any]:
        """The answer to one greedy request: SGLang on a CPU verifies greedily, whatever temperature is asked for."""
        answer = self.client.post("/generate", json=_greedy(prompt, max_tokens, stop))
        return answer.raise_for_status().json()  # type: ignore[no-any-return]

    def stream(self, prompt: Sequence[int], *, max_tokens: int) -> Iterator[dict[str, Any]]:
        """What is said of one that goes on to `max_tokens`, after each of its steps; of its rounds at its end only."""
        body = _greedy(prompt, max_tokens, stop=False) | {"stream": True}
        with self.client.stream("POST", "/generate", json=body) as answer:
            for line in answer.raise_for_status().iter_lines():
                if line.startswith("data: {"):
                    yield json.loads(line.removeprefix("data: "))["meta_info"]

    def generate(self, prompt: Sequence[int], *, max_tokens: int = 40) -> list[int]:
        """Token ids of one greedy completion, raising on any answer but 200."""
        ids: list[int] = self.ask(prompt, max_tokens=max_tokens)["output_ids"]
        return ids

    @functools.cached_property
    def version(self) -> tuple[int, ...]:
        """Its release: three numbers."""
        facts = self.client.get("/server_info").raise_for_status().json()
        return tuple(int(part) for part in facts["version"].split(".")[:3])

    @functools.cached_property
    def has_sessions(self) -> bool:
        """Whether weights are written in sessions (0.5.21 and newer), of which a GET is no call."""
        return self.client.get("/begin_weight_update").status_code != httpx.codes.NOT_FOUND

    def post(self, path: str, **body: Any) -> dict[str, Any]:
        """A call that must succeed."""
        answer = self.client.post(path, json=body).raise_for_status().json()
        assert answer.get("success", True), answer
        return answer  # type: ignore[no-any-return]

    def flush_cache(self) -> None:
        """Forget all prompts, once it is idle: a request is still running there for a moment after its answer."""
        self.client.post("/flush_cache", params={"timeout": 30}).raise_for_status()

    def counters(self) -> Counts:
        """Its counters now; a request counts when it ends."""
        text = self.client.get("/metrics").raise_for_status().text
        total = dict.fromkeys((ROUNDS, GENERATED, REQUESTS), 0.0)
        for line in text.splitlines():
            name = line.split("{")[0]
            if name in total:
                total[name] += float(line.rsplit(" ", 1)[1])
        rounds, emitted = int(total[ROUNDS]), int(total[GENERATED] - total[REQUESTS])
        return Counts(rounds, rounds * DEPTH, emitted - rounds, (), emitted)


def _greedy(prompt: Sequence[int], max_tokens: int, stop: bool) -> dict[str, Any]:
    ends: dict[str, Any] = {"stop_token_ids": [EOS_ID]} if stop else {"ignore_eos": True}
    return {"input_ids": list(prompt), "sampling_params": {"temperature": 0, "max_new_tokens": max_tokens} | ends}
