"""The demo's inference server as the trainer sees it."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, ClassVar

import httpx
from torch import Tensor

from examples.task import Task
from service.errors import ConfigurationError


class EngineClient:
    """A client of `examples.engine_server`."""

    start_seconds: ClassVar[float] = 60.0

    def __init__(self, url: str, timeout_seconds: float = 120.0, **options: Any) -> None:
        self._http = httpx.Client(base_url=url, timeout=timeout_seconds, trust_env=False, **options)

    def wait(self, process: subprocess.Popen[bytes] | None) -> None:
        """Return once it answers; ConfigurationError when it ended, or never does."""
        deadline = time.monotonic() + self.start_seconds
        while True:
            with suppress(httpx.HTTPError):
                self._http.get("/drafter/state").raise_for_status()
                return
            if (process is not None and process.poll() is not None) or time.monotonic() > deadline:
                raise ConfigurationError(self.silence())
            time.sleep(0.1)

    def silence(self) -> str:
        """What is said of a server that does not answer."""
        return f"the inference server at {self._http.base_url} does not answer"

    def generate(self, prompts: Sequence[Sequence[int]], task: Task) -> list[dict[str, Any]]:
        """One completion per prompt, sampled at temperature 1."""
        body = {
            "prompts": [list(p) for p in prompts],
            "n": 1,
            "max_tokens": task.max_answer_tokens,
            "temperature": 1.0,
            "eos_id": task.eos_id,
        }
        reply = self._http.post("/generate", json=body)
        reply.raise_for_status()
        completions: list[dict[str, Any]] = reply.json()["completions"]
        return completions

    def load_policy(self, model: Any, version: int) -> None:
        """Bring the trainer's weights into the server."""
        from safetensors.torch import save

        weights = save(policy_tensors(model))
        self._http.post("/policy", params={"version": version}, content=weights).raise_for_status()

    def drafter(self) -> dict[str, Any]:
        """What it drafts with."""
        state: dict[str, Any] = self._http.get("/drafter/state").raise_for_status().json()
        return state

    def close(self) -> None:
        """Close the connections."""
        self._http.close()


def policy_tensors(model: Any) -> dict[str, Tensor]:
    """A policy's weights as its checkpoint names them: a tied head is not there twice."""
    tensors = {name: tensor.detach().contiguous() for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        tensors.pop("lm_head.weight", None)
    return tensors
