"""What the demo adds to a vLLM server on a CPU, inside its processes. Loaded only where VLLM_PLUGINS names it.

* a repair of sampling: on a CPU, vLLM 0.29 to 0.33 write the expanded temperatures into a copy that is thrown away
  (`_ensure_int64` of a float tensor), so every request with a temperature samples garbage while a drafter runs;
* sleeps where vLLM spins: its core and its workers poll each other with a whole CPU core each, for a second after each
  message, which leaves the rest of a small machine nothing;
* `POST /policy {"path", "version"}`: the trainer's weights, from a directory under DRAFTALIGN_POLICY_DIR. RL frameworks
  have ways of their own; the demo's trainer and server share a disk, so a file will do, without development mode;
* `POST /rounds?request=ID`: how many rounds each completion of a request took; vLLM itself counts them all together;
* the gauge `draftalign_policy_version`, from which the swap agent learns whose rounds it counts.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from fastapi import FastAPI, HTTPException, Request


def register() -> None:
    """General plugin: the repair, and the RPC methods. Runs in every process of the server."""
    from vllm.v1.worker.worker_base import WorkerBase

    WorkerBase.examples_load_policy = load_policy
    WorkerBase.examples_count_rounds = count_rounds
    WorkerBase.examples_take_rounds = take_rounds
    repair_sampling()
    sleep_between_polls()


def sleep_between_polls() -> None:
    """Have vLLM's processes wait for each other half a millisecond at a time; a step takes some ten of these."""
    import vllm.distributed.device_communicators.shm_broadcast as queues

    queues.sched_yield = lambda: time.sleep(0.0005)


def repair_sampling() -> None:
    """Replace vLLM's CPU stand-in for the kernel that gives every drafted token its request's temperature."""
    import vllm.utils.cpu_triton_utils as kernels

    def expand(
        output: Any, input_val: Any, cu_num_tokens: Any, replace_from: Any, replace_to: Any, *_: Any, **__: Any
    ) -> None:
        counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
        values = torch.where(input_val == replace_from, torch.full_like(input_val, replace_to), input_val)
        expanded = torch.repeat_interleave(values, counts)
        output[: expanded.numel()] = expanded.to(output.dtype)

    kernels._expand_kernel_impl = expand
    if (holder := getattr(kernels, "expand_kernel", None)) is not None:  # vLLM 0.29 calls what this holds
        holder.func = expand


def load_policy(self: Any, path: str) -> None:
    """RPC: load the policy's weights from `path`, between two steps, in place.

    vLLM's own reload: it unpacks what a CPU or a quantised kernel has packed, keeps every storage, and leaves the
    drafter alone, which follows through the embedding module that it shares with the policy. One thing it forgets on a
    CPU: a head tied to the embedding keeps the packed copy of the old one, and logits then mix both policies.
    """
    self.reload_weights(weights_path=path)
    head = getattr(self.model_runner.get_model(), "lm_head", None)
    if head is not None and hasattr(head, "cpu_linear"):
        with torch.inference_mode():
            head.quant_method.process_weights_after_loading(head)


def count_rounds(self: Any) -> None:
    """RPC: from now on, count the steps in which a request had drafted tokens to verify."""
    runner = self.model_runner
    execute, self.examples_rounds = runner.execute_model, Counter()

    def execute_model(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        drafted = scheduler_output.scheduled_spec_decode_tokens.items()
        self.examples_rounds.update(request for request, tokens in drafted if tokens)
        return execute(scheduler_output, *args, **kwargs)

    runner.execute_model = execute_model


def take_rounds(self: Any, request: str) -> dict[str, int]:
    """RPC: rounds by number of the completion, as vLLM names them: cmpl-REQUEST-NUMBER-RANDOM. They are forgotten."""
    taken = {}
    for name in [name for name in self.examples_rounds if name.startswith(f"cmpl-{request}-")]:
        taken[name.split("-")[2]] = self.examples_rounds.pop(name)
    return taken


class PolicyEndpoints:
    """Endpoint plugin: `POST /policy` and `POST /rounds`."""

    name = "draftalign_examples"
    required_tasks = ("generate",)

    def __init__(self) -> None:
        from prometheus_client import Gauge

        self._directory = Path(os.environ["DRAFTALIGN_POLICY_DIR"]).resolve()
        self._version = Gauge("draftalign_policy_version", "Version of the policy whose weights are loaded.")
        self._engine: Any = None

    def attach_router(self, app: FastAPI) -> None:
        """Called by vLLM while it builds its application."""

        @app.post("/policy")
        async def policy(request: Request) -> dict[str, int]:
            body = await request.json()
            directory = (self._directory / str(body["path"])).resolve()
            if not directory.is_relative_to(self._directory):
                raise HTTPException(403, "path must lie under DRAFTALIGN_POLICY_DIR")
            await self._engine.collective_rpc("examples_load_policy", args=(str(directory),))
            # What is cached was computed by the policy before.
            if not await self._engine.reset_prefix_cache():
                raise HTTPException(409, "requests are running; the demo loads a policy between its steps")
            self._version.set(int(body["version"]))
            return {"policy_version": int(body["version"])}

        @app.post("/rounds")
        async def rounds(request: str) -> dict[str, int]:
            ranks = await self._engine.collective_rpc("examples_take_rounds", args=(request,))
            return dict(ranks[0])

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:  # noqa: ARG002 - vLLM's protocol
        """Called by vLLM once its engine is up."""
        self._engine = engine_client
        self._version.set(0)
        await engine_client.collective_rpc("examples_count_rounds")
