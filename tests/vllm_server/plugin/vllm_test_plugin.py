"""What the tests add to the vLLM server, inside its processes. Never shipped.

* the repair of sampling on a CPU, and sleeps where vLLM spins, which the demo's plugin has too;
* a model's class is looked into where it is, and not in a process that imports all of vLLM, as where CUDA must wait;
* a recorder of what the engine's drafter read and answered, for numeric conformance;
* faults: weights that change behind the engine's back, a load that fails half-way;
* `POST /test/rpc {"method", "args"}`, which asks the workers of all cores, and `POST /test/pause`, `hold` and `resume`,
  so that the server runs without development mode.
"""

from __future__ import annotations

import hashlib
import inspect
import os
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
from fastapi import FastAPI, Request
from safetensors.torch import load_file, save_file

from examples.vllm_plugin import load_policy, repair_sampling, sleep_between_polls


def register() -> None:
    """General plugin: the repair, classes looked into at once, and RPC methods on the workers."""
    from vllm.model_executor.models import registry
    from vllm.v1.worker.worker_base import WorkerBase

    registry._run_in_subprocess = lambda look: look()
    looking = (start_recording, stop_recording, policy_digest, storage, keep_collected, take_collected)
    for method in (
        *looking,
        load_policy,
        set_tap,
        refit,
        policy_version,
        wipe_drafter,
        rot_drafter,
        fail_next_load,
        stage_by_rank,
        fail_a_rank,
        fail_a_core,
        plain_requests,
        sleep_lightly,
        sleeps_between_polls,
        schedules_ahead,
    ):
        setattr(WorkerBase, "tests_" + method.__name__, method)
    repair_sampling()
    take_gumbel_precision()
    sleep_between_polls()
    register_files()
    share_counters()
    if os.environ.get("DRAFTALIGN_TESTS_ASYNC"):
        schedule_ahead()
    if os.environ.get("TRITON_INTERPRET") == "1":
        patch_once()
        look_for_no_overflow()
        interpret_log1p()


def patch_once() -> None:
    """Have Triton's interpreter put its functions in place of the language's once.

    It does so at each call of a kernel and of each function in it, and looks at a thousand members to find them.
    """
    import triton.language as tl
    import triton.runtime.interpreter as interpreter

    patch, done = interpreter._patch_lang, set[frozenset[int]]()

    def patch_new(function: Any) -> Any:
        seen = frozenset(id(value) for value in function.__globals__.values() if value is tl or value is tl.core)
        if seen not in done:
            patch(function)  # what it returns would put the language's own back
            done.add(seen)
        return interpreter._LangPatchScope()

    interpreter._patch_lang = patch_new


def look_for_no_overflow() -> None:
    """Have the interpreter compute no operation a second time in 64 bits: it asserts by that in debug mode alone."""
    import triton.runtime.interpreter as interpreter

    builder = interpreter.interpreter_builder
    if hasattr(builder.options, "sanitize_overflow"):
        builder.options = replace(builder.options, sanitize_overflow=False)


def interpret_log1p() -> None:
    """Give Triton's interpreter a `log1p`: the device's gives None there, and vLLM up to 0.29 draws by it."""
    import numpy as np
    import triton.language as tl
    from triton.language.extra import libdevice
    from triton.runtime.interpreter import TensorHandle

    def log1p(x: Any) -> Any:
        return tl.core.tensor(TensorHandle(np.log1p(x.handle.data), x.handle.dtype), x.type)

    libdevice.log1p = log1p


def share_counters() -> None:
    """Let prometheus_client look at PROMETHEUS_MULTIPROC_DIR again: in a fork it was imported without.

    Else API processes that are forked would serve an empty `/metrics`.
    """
    from prometheus_client import values

    if values.ValueClass is values.MutexValue:  # plugins may be loaded twice
        values.ValueClass = values.get_value_class()  # type: ignore[no-untyped-call]


def take_gumbel_precision() -> None:
    """On a CPU, vLLM 0.23 and 0.24 call their stand-in for a sampling kernel with an argument that it lacks.

    From 0.25 on it takes the argument, and ignores it.
    """
    import vllm.utils.cpu_triton_utils as kernels

    stand_in = getattr(kernels, "_sample_recovered_tokens_kernel_impl", None)
    if stand_in is None or "USE_FP64_GUMBEL" in inspect.signature(stand_in).parameters:
        return

    def recovered(*args: Any, USE_FP64_GUMBEL: bool = False, **named: Any) -> None:
        stand_in(*args, **named)

    if (holder := getattr(kernels, "sample_recovered_tokens_kernel", None)) is not None:
        holder.func = recovered


def schedule_ahead() -> None:
    """Schedule a step while the one before it runs, as vLLM does on GPUs: on a CPU it turns that off without a word.

    The events and streams of CUDA that it then asks for wait for nothing: a CPU's copies are made when they return.
    """
    from vllm.platforms.cpu import CpuPlatform

    class Nothing:
        def __init__(self, *_: Any, **__: Any) -> None:
            self.device = torch.device("cpu")

        def wait(self, *_: Any) -> None:
            pass

        record = synchronize = wait_stream = wait

    check = CpuPlatform.check_and_update_config

    def check_and_schedule_ahead(config: Any) -> None:
        check(config)
        config.scheduler_config.async_scheduling = True

    CpuPlatform.check_and_update_config = staticmethod(check_and_schedule_ahead)
    torch.cuda.Event = torch.cuda.Stream = Nothing  # type: ignore[assignment, misc]


# --- requests


def plain_requests(_: Any) -> dict[str, Any]:
    """By the parameter that a request says: whether its tokens are drawn from the policy's own distribution.

    "none": of requests whose parameters do not change it.
    """
    from vllm import SamplingParams
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    from rl_hooks.engines.vllm.steps import unlike_policy

    def plain(params: SamplingParams) -> bool:
        more: dict[str, Any] = {"mm_features": [], "lora_request": None, "prompt_embeds": None}
        return not unlike_policy(SimpleNamespace(sampling_params=params, prompt_token_ids=[1], **more))

    asked = {"stop": ["x"], "logprobs": True, "seed": 1, "kv_transfer_params": {"a": 1}}
    chat = ChatCompletionRequest(messages=[{"role": "user", "content": "2+2"}], **asked)
    same = [
        chat.to_sampling_params(8, {"top_k": 20, "top_p": 0.95}),
        SamplingParams(n=4, ignore_eos=True, stop_token_ids=[3], prompt_logprobs=1),
        SamplingParams(temperature=0.0, min_tokens=1),
    ]
    said: list[dict[str, Any]] = [
        {"thinking_token_budget": 64},
        {"thinking_token_budget": 0},
        {"watermarking": True},
        {"min_p": 0.1},
        {"trace_decode_token_ids": [1, 2]},
        {"extra_args": {"a": 1}},
        {"repetition_penalty": 1.1},
        {"bad_words": ["x"]},
        {"logit_bias": {3: 1.0}},
        {"allowed_token_ids": [1]},
        {"min_tokens": 2, "max_tokens": 4},
    ]
    # An older vLLM has no watermarks, or asks for them by default and lets the engine's configuration decide.
    said = [one for one in said if all(getattr(same[-1], name, value) != value for name, value in one.items())]
    found = {str(one): plain(SamplingParams(**one)) for one in said}
    return {"none": [plain(params) for params in same], **found}


def sleeps_between_polls(_: Any) -> bool:
    """Whether this worker sleeps where vLLM spins."""
    from vllm.distributed import utils
    from vllm.distributed.device_communicators import shm_broadcast

    return shm_broadcast.sched_yield is not utils.sched_yield


def schedules_ahead(self: Any) -> bool:
    """Whether this worker's steps are scheduled while the one before runs."""
    ahead: bool = self.vllm_config.scheduler_config.async_scheduling and self.model_runner.use_async_scheduling
    return ahead


# --- recording


_RECORDED = ("combine_hidden_states", "forward", "compute_logits")


def start_recording(self: Any) -> None:
    """Keep every input and output of the drafter from now on."""
    draft = _draft_model(self)
    calls: list[tuple[str, dict[str, torch.Tensor]]] = []
    originals = {name: getattr(draft, name) for name in _RECORDED if hasattr(draft, name)}
    # An EAGLE-3 drafter returns what its head reads before what is fed back; an MTP module `pre` first, or alone.
    returned = ("normed", "pre") if "combine_hidden_states" in originals else ("pre", "normed")

    def combine(hidden_states: torch.Tensor) -> torch.Tensor:
        fused: torch.Tensor = originals["combine_hidden_states"](hidden_states)
        calls.append(("combine", {"aux": hidden_states.clone(), "fused": fused.clone()}))
        return fused

    def forward(*args: Any, **kwargs: Any) -> Any:
        names = ("input_ids", "positions", "hidden_states")
        given = dict(zip(names, args, strict=False)) | {k: v for k, v in kwargs.items() if k in names}
        kept = {name: given[name].clone() for name in names}
        answer = originals["forward"](*args, **kwargs)
        parts = answer if isinstance(answer, tuple) else (answer,)
        calls.append(("forward", kept | {name: part.clone() for name, part in zip(returned, parts, strict=False)}))
        return answer

    def logits(hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        answer: torch.Tensor = originals["compute_logits"](hidden_states, *args, **kwargs)
        calls.append(("logits", {"hidden_states": hidden_states.clone(), "logits": answer.clone()}))
        return answer

    for name, replacement in zip(_RECORDED, (combine, forward, logits), strict=True):
        if name in originals:
            setattr(draft, name, replacement)
    self.tests_calls = calls


def stop_recording(self: Any, path: str) -> int:
    """Write the calls in order as `000017.forward.positions`, ...; return how many there were."""
    draft = _draft_model(self)
    for name in _RECORDED:
        vars(draft).pop(name, None)  # the instance's attribute hid the class's method
    tensors = {
        f"{i:06d}.{kind}.{name}": value.contiguous()
        for i, (kind, values) in enumerate(self.tests_calls)
        for name, value in values.items()
    }
    save_file(tensors, path)
    return len(self.tests_calls)


# --- looking and breaking


def keep_collected(self: Any) -> None:
    """Keep what the tap collects as it is, before it is rounded to bfloat16 and sent."""
    sender = self._draftalign_swap.tap.tap._sender
    deliver, self.tests_collected = sender.deliver, []

    def keep(collected: Any) -> None:
        self.tests_collected.append(collected)
        deliver(collected)

    sender.deliver = keep


def sleep_lightly(self: Any) -> list[int]:
    """Put the worker to sleep, keeping its weights, and wake it: the tap's rows that were not scored before and after.

    On a CPU vLLM itself ignores both calls.
    """
    tap = self._draftalign_swap.tap.tap
    before = tap._unscored.rows
    self.sleep(level=1)
    after = tap._unscored.rows
    self.wake_up()
    return [before, after]


def take_collected(self: Any, path: str) -> list[dict[str, Any]]:
    """Write the tensors of every rollout as `3.aux`, ...; return what else is known of them.

    Every rank is asked, with the same path. Only the first one of a tensor-parallel group collects: another writes
    nothing, or its empty file could take the place of the first one's.
    """
    tensors: dict[str, torch.Tensor] = {}
    collected = list(self.tests_collected)
    for i, one in enumerate(collected):
        tensors |= {f"{i}.{name}": getattr(one, name).contiguous() for name in ("aux", "last", "logsumexp")}
        tensors |= {
            f"{i}.{name}": torch.from_numpy(getattr(one, name)) for name in ("input_ids", "generated", "logprobs")
        }
    if collected:
        save_file(tensors, path)
    return [{"id": c.request.request_id, "first": c.first_position} for c in collected]


def set_tap(self: Any, fraction: float | None) -> None:
    """Sample this fraction of requests from now on; None takes the tap off the model runner."""
    runner, names = self.model_runner, ("execute_model", "propose_draft_token_ids")
    wrapped = getattr(self, "tests_wrapped", None) or {name: vars(runner)[name] for name in names}
    self.tests_wrapped = wrapped
    for name, wrapper in wrapped.items():
        if fraction is None:
            vars(runner).pop(name, None)
        else:
            setattr(runner, name, wrapper)
    self._draftalign_swap.tap.tap.fraction = fraction or 0.0


def refit(self: Any, how: str, path: str, part: int | None = None) -> int:
    """Bring the policy's weights from a file, as one of the RL stacks does; `part`: of the tensors, only this one.

    Returns how many tensors there are to bring. Linear layers are packed on a CPU: what is not loaded through vLLM's
    layerwise reload (`per tensor`, `copies`) are the weights that stay readable, norms and embedding.
    """
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.reload.layerwise import (
        finalize_layerwise_reload,
        initialize_layerwise_reload,
    )

    model = self.model_runner.get_model()
    weights = sorted(load_file(f"{path}/model.safetensors").items())
    if how in ("per tensor", "copies"):
        weights = [(name, tensor) for name, tensor in weights if "norm" in name or "embed" in name]
    with torch.inference_mode(), set_current_vllm_config(self.vllm_config):
        if how == "reload_weights":
            self.reload_weights(weights_path=path)
        elif how == "buckets":
            initialize_layerwise_reload(model)
            for bucket in (weights[::2], weights[1::2]):
                model.load_weights(bucket)
            finalize_layerwise_reload(model, self.vllm_config.model_config)
        elif how == "per tensor":
            model.load_weights(weights if part is None else [weights[part]])
        elif how == "copies":
            parameters = dict(model.named_parameters())
            for name, tensor in weights:
                parameters[name].data[: len(tensor)].copy_(tensor)  # vLLM pads the vocabulary
        else:
            raise ValueError(how)
        _repack_head(model)
    return len(weights)


def _repack_head(model: Any) -> None:
    # A head that is tied to the embedding keeps the packed copy of the old one on a CPU.
    head = getattr(model, "lm_head", None)
    if head is not None and hasattr(head, "cpu_linear"):
        with torch.inference_mode():
            head.quant_method.process_weights_after_loading(head)


def policy_version(self: Any) -> int | None:
    """What the weights are numbered now."""
    version: int | None = self._draftalign_swap.watch.version
    return version


def register_files() -> None:
    """`weight_transfer_config={"backend": "files"}`: vLLM's own start, update and finish, with a file as transport."""
    from vllm.distributed.weight_transfer.base import (
        WeightTransferEngine,
        WeightTransferInitInfo,
        WeightTransferUpdateInfo,
    )
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.model_executor.model_loader.reload.layerwise import (
        finalize_layerwise_reload,
        initialize_layerwise_reload,
    )

    @dataclass
    class Init(WeightTransferInitInfo):  # type: ignore[misc]
        pass

    @dataclass
    class Update(WeightTransferUpdateInfo):  # type: ignore[misc]
        """Each `parts`-th tensor of a policy, from the one of number `part` on."""

        path: str = ""
        part: int = 0
        parts: int = 1

    class Files(WeightTransferEngine):  # type: ignore[misc]
        init_info_cls, update_info_cls = Init, Update

        def init_transfer_engine(self, info: Any) -> None:
            pass

        def start_weight_update(self) -> None:
            initialize_layerwise_reload(self.model)

        def update_weights(self, info: Any) -> None:
            self.receive_weights(self.parse_update_info(info))

        def receive_weights(self, info: Any) -> None:
            tensors = sorted(load_file(f"{info.path}/model.safetensors").items())
            self.model.load_weights(tensors[info.part :: info.parts])

        def finish_weight_update(self) -> None:
            finalize_layerwise_reload(self.model, self.model_config)
            _repack_head(self.model)

        @staticmethod
        def trainer_send_weights(_iterator: Any, _info: Any) -> None:
            """Abstract in vLLM 0.25."""

        def shutdown(self) -> None:
            pass

    if "files" not in WeightTransferEngineFactory._registry:  # plugins may be loaded twice
        WeightTransferEngineFactory.register_engine("files", Files)


def _draft_model(worker: Any) -> Any:
    from rl_hooks.engines.vllm.draft import draft_model

    return draft_model(worker.model_runner)


def policy_digest(self: Any) -> str:
    """SHA-256 of all of the policy's parameters that a CPU leaves readable, its embedding among them."""
    digest = hashlib.sha256()
    for name, parameter in self.model_runner.get_model().named_parameters():
        digest.update(name.encode() + parameter.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def storage(self: Any) -> dict[str, int]:
    """Address of every parameter of the drafter: CUDA graphs would hold these."""
    return {name: p.data_ptr() for name, p in _draft_model(self).named_parameters()}


def wipe_drafter(self: Any) -> list[str]:
    """What waking from a level-2 sleep does to a drafter: every parameter of its own is lost, nobody is told.

    What it shares with the policy is left: the trainer brings that again.
    """
    draft, policys = _draft_model(self), self.model_runner.get_model().parameters()
    shared = {id(parameter) for parameter in policys}
    lost = {name: p for name, p in draft.named_parameters() if id(p) not in shared and p.numel()}
    with torch.inference_mode():
        for parameter in lost.values():
            parameter.zero_()
    return sorted(lost)


def rot_drafter(self: Any) -> None:
    """Weights that are rubbish, in a server whose state does not show it: what is left is α."""
    swap = self._draftalign_swap
    rubbish = {name: torch.zeros_like(tensor) for name, tensor in swap.weights.served.tensors.items()}
    swap.draft.load(rubbish)
    swap.weights._marks = swap.draft.fingerprint()


def fail_next_load(self: Any) -> None:
    """The next load of weights stops half-way: some layers are new, some are not."""
    draft = _draft_model(self)
    original = draft.load_weights

    def load_weights(weights: Any) -> None:
        del draft.load_weights
        original(pair for i, pair in enumerate(weights) if i < 6)
        raise RuntimeError("the test broke this load half-way")

    draft.load_weights = load_weights


def stage_by_rank(self: Any, paths: list[str], version: str) -> None:
    """Each rank begins to read another directory."""
    self.draftalign_stage(paths[self.rank], version)


def fail_a_rank(self: Any, rank: int) -> None:
    """`fail_next_load` on this rank only."""
    if self.rank == rank:
        fail_next_load(self)


def fail_a_core(self: Any, index: int) -> None:
    """`fail_next_load` in this data-parallel core only."""
    if self.vllm_config.parallel_config.data_parallel_index == index:
        fail_next_load(self)


class TestEndpoints:
    """Endpoint plugin: call a worker method over HTTP, or pause the engine."""

    name = "draftalign_tests"
    required_tasks = None

    def attach_router(self, app: FastAPI) -> None:
        """Add the route."""

        @app.post("/test/rpc")
        async def rpc(request: Request) -> Any:
            body = await request.json()
            method, args = body["method"], tuple(body.get("args", ()))
            ask_all = getattr(self._engine.engine_core, "call_utility_all_async", None)  # not in 0.31
            if ask_all is None:
                return await self._engine.collective_rpc(method, args=args)
            return [one for core in await ask_all("collective_rpc", method, None, args, None) for one in core]

        @app.post("/test/pause")
        async def pause() -> None:
            """Pause, as an engine does that can sleep: vLLM on a CPU has no sleep mode."""
            await self._engine.sleep(0)

        @app.post("/test/hold")
        async def hold() -> None:
            """Pause with the requests that are under way, as a trainer does before it brings weights."""
            await self._engine.pause_generation(mode="keep")

        @app.post("/test/resume")
        async def resume() -> None:
            await self._engine.resume_generation()

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:  # noqa: ARG002 - vLLM's protocol
        """Keep the engine's client."""
        self._engine = engine_client
        if os.environ.get("DRAFTALIGN_TESTS_SLEEP"):
            engine_client.model_config.enable_sleep_mode = True
