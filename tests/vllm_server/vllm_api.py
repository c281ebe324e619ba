"""What the plugin and the examples use of vLLM, looked up in vLLM's source without importing it.

    python tests/vllm_server/vllm_api.py PATH      # the folder `vllm` of an unpacked wheel or sdist

Prints what is missing; the exit status is the number of it. `FUNCTIONS` and `NAMES` are the whole list of what is used:
`unlisted` compares it with the plugin's code.
"""

from __future__ import annotations

import ast
import asyncio
import collections
import concurrent.futures
import contextlib
import dataclasses
import functools
import hashlib
import hmac
import inspect
import itertools
import json
import logging
import math
import os
import queue
import re
import socket
import sys
import threading
import time
import uuid
import weakref
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, Final

import fastapi
import numpy
import numpy.typing
import safetensors
import torch

_V1, _V2 = "v1/worker/gpu_model_runner.py", "v1/worker/gpu/model_runner.py"
_RELOAD = "model_executor/model_loader/reload/"

#: (file, class or "", function, parameters that are passed or read by name)
FUNCTIONS: Final = (
    (_V1, "GPUModelRunner", "get_model", ()),
    (_V1, "GPUModelRunner", "get_draft_model", ()),
    (_V1, "GPUModelRunner", "execute_model", ("scheduler_output",)),
    (
        _V1,
        "GPUModelRunner",
        "propose_draft_token_ids",
        ("scheduler_output", "sampled_token_ids", "hidden_states", "aux_hidden_states"),
    ),
    (_V2, "GPUModelRunner", "get_model", ()),
    (_V2, "GPUModelRunner", "get_draft_model", ()),
    (_V2, "GPUModelRunner", "execute_model", ("scheduler_output",)),
    *(
        (
            f"v1/worker/gpu/spec_decode/{path}",
            name,
            "propose",
            ("input_batch", "last_hidden_states", "aux_hidden_states", "num_rejected", "last_sampled", "dummy_run"),
        )
        for path, name in (
            ("speculator.py", "BaseSpeculator"),
            ("target_dependent_ar/speculator.py", "TargetDependentARSpeculator"),
        )
    ),
    (_RELOAD + "layerwise.py", "", "get_layerwise_info", ("layer",)),
    (_RELOAD + "layerwise.py", "", "initialize_layerwise_reload", ("model",)),
    # It passes its arguments on to the next one.
    (_RELOAD + "layerwise.py", "", "finalize_layerwise_reload", ()),
    (_RELOAD + "layerwise.py", "", "finalize_layerwise_processing", ("model", "model_config")),
    (_RELOAD + "types.py", "LayerReloadingInfo", "can_load", ()),
    ("model_executor/layers/attention/__init__.py", "", "is_deferred_attention_layer", ("layer",)),
    ("v1/engine/async_llm.py", "AsyncLLM", "collective_rpc", ("method", "args")),
    ("v1/engine/async_llm.py", "AsyncLLM", "is_sleeping", ()),
    ("v1/engine/async_llm.py", "AsyncLLM", "reset_prefix_cache", ()),
    *(
        ("v1/engine/core.py", "EngineCore", name, ())
        for name in ("step", "step_with_batch_queue", "wake_up", "shutdown", "_initialize_kv_caches")
    ),
    ("v1/engine/core.py", "EngineCore", "add_request", ("request",)),
    ("v1/engine/core.py", "EngineCore", "sleep", ("level",)),
    ("v1/engine/core.py", "EngineCore", "collective_rpc", ("method", "args")),
    ("v1/engine/core.py", "EngineCore", "set_weight_version", ()),
    (
        "v1/core/sched/scheduler.py",
        "Scheduler",
        "make_spec_decoding_stats",
        (
            *("spec_decoding_stats", "num_draft_tokens", "num_accepted_tokens", "num_invalid_spec_tokens"),
            "request_id",
        ),
    ),
    ("v1/engine/core.py", "EngineCore", "post_step", ()),
    ("v1/engine/core_client.py", "InprocClient", "__init__", ()),
    ("v1/utils.py", "", "shutdown", ("procs", "timeout")),
    ("v1/core/sched/interface.py", "SchedulerInterface", "has_unfinished_requests", ()),
    ("v1/core/sched/scheduler.py", "Scheduler", "schedule", ()),
    ("v1/core/sched/scheduler.py", "Scheduler", "update_from_output", ("scheduler_output",)),
    ("v1/executor/abstract.py", "Executor", "collective_rpc", ("method", "timeout", "args")),
    ("distributed/parallel_state.py", "", "get_tp_group", ()),
    ("model_executor/layers/vocab_parallel_embedding.py", "", "num_org_elements", ()),
    ("model_executor/layers/vocab_parallel_embedding.py", "", "num_added_elements_padded", ()),
    ("v1/worker/gpu_worker.py", "Worker", "wake_up", ("tags",)),
    ("plugins/endpoint_plugins/interface.py", "EndpointPlugin", "attach_router", ("app",)),
    ("plugins/endpoint_plugins/interface.py", "EndpointPlugin", "init_state", ("engine_client", "state", "args")),
    ("v1/worker/gpu_worker.py", "Worker", "reload_weights", ()),
    ("v1/worker/gpu_worker.py", "Worker", "start_weight_update", ()),
    ("v1/worker/gpu_worker.py", "Worker", "sleep", ("level",)),
    ("v1/worker/gpu_worker.py", "Worker", "discard", ("tags",)),
    (_V1, "GPUModelRunner", "reload_weights", ()),
    (_V2, "GPUModelRunner", "reload_weights", ()),
    ("model_executor/models/glm4_moe_mtp.py", "Glm4MoeMTP", "load_weights", ("weights",)),
    ("model_executor/models/deepseek_mtp.py", "DeepSeekMTP", "load_weights", ("weights",)),
    ("utils/cpu_triton_utils.py", "", "_expand_kernel_impl", ()),
)

#: (file, class or "" for anywhere in it, attributes, fields or texts that are read)
NAMES: Final = (
    # Where a runner keeps the drafter's module, for releases without `get_draft_model`.
    (_V1, "", ("drafter",)),
    (_V2, "", ("speculator",)),
    ("compilation/cuda_graph.py", "CUDAGraphWrapper", ("unwrap",)),
    ("model_executor/layers/attention/__init__.py", "", ("Attention", "MLAAttention")),
    ("plugins/__init__.py", "", ("vllm.general_plugins", "vllm.endpoint_plugins")),
    (
        "v1/engine/core.py",
        "",
        ("_weight_version", "model_executor", "scheduler", "_idle_state_callbacks", "input_queue", "WAKEUP"),
    ),
    ("v1/engine/__init__.py", "EngineCoreRequestType", ("WAKEUP",)),
    ("v1/engine/__init__.py", "EngineCoreOutputs", ("outputs",)),
    ("v1/engine/core_client.py", "", ("InprocClient", "engine_core", "call_utility")),
    ("entrypoints/llm.py", "LLM", ("llm_engine",)),
    ("v1/executor/abstract.py", "Executor", ("is_sleeping",)),
    ("v1/executor/uniproc_executor.py", "UniProcExecutor", ("driver_worker",)),
    ("v1/worker/worker_base.py", "WorkerWrapperBase", ("worker",)),
    ("v1/worker/gpu_worker.py", "Worker", ("_weight_update_active",)),
    ("v1/request.py", "Request", ("request_id", "skip_reading_prefix_cache")),
    ("v1/core/sched/scheduler.py", "Scheduler", ("requests", "connector", "finished_req_ids")),
    ("v1/engine/utils.py", "", ("shutdown",)),
    ("v1/engine/async_llm.py", "AsyncLLM", ("engine_core",)),
    ("v1/engine/core_client.py", "MPClient", ("core_engines",)),
    ("v1/engine/core_client.py", "AsyncMPClient", ("call_utility_all_async",)),
    ("v1/engine/__init__.py", "EngineCoreOutput", ("request_id", "new_token_ids")),
    ("v1/worker/worker_base.py", "WorkerBase", ("vllm_config", "model_runner", "device")),
    (
        _V1,
        "GPUModelRunner",
        (
            "input_batch",
            "input_ids",
            "positions",
            "query_start_loc",
            "effective_drafter_max_model_len",
            "max_model_len",
        ),
    ),
    ("v1/worker/gpu_input_batch.py", "InputBatch", ("req_id_to_index",)),
    ("v1/utils.py", "CpuGpuBuffer", ("gpu", "np")),
    ("distributed/parallel_state.py", "GroupCoordinator", ("cpu_group", "ranks", "rank_in_group")),
    ("model_executor/layers/vocab_parallel_embedding.py", "VocabParallelEmbedding", ("shard_indices",)),
    (
        "model_executor/layers/vocab_parallel_embedding.py",
        "VocabParallelEmbeddingShardIndices",
        ("org_vocab_start_index",),
    ),
    ("model_executor/layers/fused_moe/routed_experts.py", "RoutedExperts", ("quant_method",)),
    ("config/speculative.py", "", ("glm4_moe_mtp", "deepseek_mtp")),
    ("config/speculative.py", "SpeculativeConfig", ("enable_adaptive_verification", "rejection_sample_method")),
    ("model_executor/layers/fused_moe/unquantized_fused_moe_method.py", "", ("moe_kernel",)),
    (_V2, "GPUModelRunner", ("speculator",)),
    (
        "v1/worker/gpu/input_batch.py",
        "InputBatch",
        ("req_ids", "num_reqs", "query_start_loc_np", "idx_mapping", "input_ids", "positions"),
    ),
    (
        "v1/core/sched/output.py",
        "SchedulerOutput",
        ("scheduled_new_reqs", "num_scheduled_tokens", "scheduled_spec_decode_tokens", "finished_req_ids"),
    ),
    (
        "v1/core/sched/output.py",
        "NewRequestData",
        (
            *("req_id", "prompt_token_ids", "sampling_params", "mm_features", "lora_request", "prompt_embeds"),
            "prefill_token_ids",
        ),
    ),
    (
        "sampling_params.py",
        "SamplingParams",
        (
            *("temperature", "top_p", "top_k", "min_p", "min_tokens", "max_tokens", "ignore_eos", "stop_token_ids"),
            *("repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "allowed_token_ids"),
            *("structured_outputs", "bad_words", "all_stop_token_ids", "eos_token_id", "extra_args"),
            *("skip_reading_prefix_cache", "Struct"),  # msgspec's, of whose fields `__struct_fields__` tells
        ),
    ),
    (_RELOAD + "types.py", "LayerReloadingInfo", ("restore_metadata", "load_numel")),
    (
        "config/speculative.py",
        "SpeculativeConfig",
        ("method", "num_speculative_tokens", "draft_model_config", "draft_sample_method"),
    ),
    (
        "config/model.py",
        "ModelConfig",
        ("hf_config", "hf_text_config", "dtype", "model", "enable_sleep_mode", "quantization", "revision"),
    ),
    ("config/load.py", "LoadConfig", ("load_format",)),
    (
        "config/vllm.py",
        "VllmConfig",
        ("parallel_config", "speculative_config", "load_config", "model_config", "watermark_config"),
    ),
    (
        "config/parallel.py",
        "ParallelConfig",
        (
            *("tensor_parallel_size", "pipeline_parallel_size", "world_size", "data_parallel_index"),
            *("distributed_executor_backend", "enable_eplb"),
        ),
    ),
    ("config/parallel.py", "", ("external_launcher",)),
    ("config/__init__.py", "", ("set_current_vllm_config",)),
    ("model_executor/models/interfaces.py", "", ("aux_hidden_state_layers",)),
    ("model_executor/models/llama_eagle3.py", "Eagle3LlamaForCausalLM", ("draft_id_to_target_id", "load_weights")),
    (
        "v1/spec_decode/metrics.py",
        "",
        (
            *("vllm:spec_decode_num_drafts", "vllm:spec_decode_num_draft_tokens"),
            *("vllm:spec_decode_num_accepted_tokens", "vllm:spec_decode_num_accepted_tokens_per_pos"),
        ),
    ),
    ("v1/metrics/loggers.py", "", ("vllm:generation_tokens", "vllm:time_to_first_token_seconds")),
)


#: What vLLM has from a release on, and what the plugin goes without before it: watermarks; `discard` of the weights,
#: which nobody can call there; a swap into several cores; adaptive verification.
SINCE: Final = {
    "watermark_config": (0, 30),
    "discard": (0, 31),
    "call_utility_all_async": (0, 32),
    "enable_adaptive_verification": (0, 32),
}

_EAGLE: Final = ("v1/worker/gpu/spec_decode/eagle/speculator.py", "EagleSpeculator")
#: What stood elsewhere in older releases: files and classes, the newest first.
EARLIER: Final = {
    "v1/worker/gpu/spec_decode/target_dependent_ar/speculator.py": (
        ("v1/worker/gpu/spec_decode/autoregressive/speculator.py", "AutoRegressiveSpeculator"),  # up to 0.31
        _EAGLE,  # up to 0.22
    ),
    "v1/worker/gpu/spec_decode/speculator.py": (_EAGLE,),
    "model_executor/layers/fused_moe/routed_experts.py": (
        ("model_executor/layers/fused_moe/layer.py", "FusedMoE"),  # up to 0.23
    ),
}


def differences(root: Path) -> list[str]:
    """What of `FUNCTIONS` and `NAMES` the source below `root` does not have, and its release should have."""
    later = _later(root)
    return [
        *(fault for one in FUNCTIONS if one[2] not in later and (fault := _function_fault(root, *one)) is not None),
        *(fault for path, owner, names in NAMES for fault in _name_faults(root, path, owner, set(names) - later)),
    ]


def _later(root: Path) -> set[str]:
    """Names of `SINCE` that came after the release of this source; none where it does not say which it is."""
    file = root / "_version.py"
    said = re.search(r"version = '(\d+)\.(\d+)", file.read_text()) if file.is_file() else None
    if said is None:
        return set()
    return {name for name, first in SINCE.items() if (int(said[1]), int(said[2])) < first}


def _function_fault(root: Path, path: str, owner: str, name: str, parameters: tuple[str, ...]) -> str | None:
    path, owner = _place(root, path, owner)
    scope = _scope(root, path, owner)
    if scope is None:
        return f"{path}: no {owner or 'such file'}"
    absent: list[list[str]] = []
    for node in ast.walk(scope):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name:
            given = node.args
            known = {a.arg for a in (*given.posonlyargs, *given.args, *given.kwonlyargs)}
            absent.append([p for p in parameters if p not in known])
    if not absent:
        return f"{path}: no {owner + '.' if owner else ''}{name}"
    least = min(absent, key=len)  # functions of that name may stand inside others
    return f"{path}: {name} has no {', '.join(least)}" if least else None


def _name_faults(root: Path, path: str, owner: str, names: Collection[str]) -> list[str]:
    path, owner = _place(root, path, owner)
    scope = _scope(root, path, owner)
    if scope is None:
        return [f"{path}: no {owner or 'such file'}"]
    known = set()
    for node in ast.walk(scope):
        if isinstance(node, ast.Attribute):
            known.add(node.attr)
        elif isinstance(node, ast.Name):
            known.add(node.id)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            known.add(node.name)
        elif isinstance(node, ast.alias):
            known.add(node.asname or node.name)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            known.add(node.value)
    return [f"{path}: {owner or 'the file'} has no {name}" for name in sorted(names) if name not in known]


def _place(root: Path, path: str, owner: str) -> tuple[str, str]:
    """File and class in this release: those of `EARLIER` where the file is not there."""
    if (root / path).exists():
        return path, owner
    return next((place for place in EARLIER.get(path, ()) if (root / place[0]).exists()), (path, owner))


def _scope(root: Path, path: str, owner: str) -> ast.AST | None:
    file = root / path
    if not file.is_file():
        return None
    tree = ast.parse(file.read_text())
    if not owner:
        return tree
    return next((node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == owner), None)


# --- the list, beside the code

_REPOSITORY: Final = Path(__file__).parents[2]
#: The plugin's code.
CODE: Final = (
    *sorted((_REPOSITORY / "rl_hooks/engines/vllm").glob("*.py")),
    *(_REPOSITORY / "rl_hooks" / name for name in ("agent/vllm.py", "agent/in_process.py", "engines/policy_watch.py")),
)
#: Calls that take a name as text: where a vLLM has another one, nothing is said.
_BY_TEXT: Final = frozenset({"getattr", "hasattr", "before_call", "_wrap"})
#: Names that are asked of others: transformers' configs, torch's modules, functions of any kind.
_OTHERS: Final = frozenset(
    (
        *("architectures", "tie_word_embeddings", "vocab_size", "__struct_fields__", "__qualname__"),
        *("draft_id_to_target_id", "weight"),
    )
)


def unlisted(code: Sequence[Path] = CODE) -> list[str]:
    """Names that the plugin's code asks of vLLM and that `FUNCTIONS` and `NAMES` lack, with the file that does.

    A plain attribute counts unless rl_hooks, torch or Python's own library has the name too. One that is asked by text,
    as `getattr` does, counts in any case, except our own, which begin with `_draftalign`.
    """
    known = {name for names in NAMES for name in (names[1], *names[2])} | _OTHERS
    known |= {name for _, owner, function, parameters in FUNCTIONS for name in (owner, function, *parameters)}
    defined, found = _defined() | _of_libraries(), []
    for path in code:
        plain, by_text = _asked(ast.parse(path.read_text()))
        absent = {name for name in plain - defined if not name.startswith("__")} | by_text
        found += [f"{path.name}: {name}" for name in sorted(absent - known) if not name.startswith("_draftalign")]
    return found


def _asked(tree: ast.Module) -> tuple[set[str], set[str]]:
    """Attributes, and names that are given as text: in a call itself, or by a loop over such names."""
    nodes = list(ast.walk(tree))
    plain = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    by_text = {
        alias.name
        for node in nodes
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm"
        for alias in node.names
    }
    loops = [(node.target, node.iter) for node in nodes if isinstance(node, ast.For | ast.comprehension)]
    assigned = [node for node in tree.body if isinstance(node, ast.AnnAssign)]
    constants = {node.target.id: node for node in assigned if isinstance(node.target, ast.Name)}
    for call in nodes:
        if not isinstance(call, ast.Call) or _name(call.func) not in _BY_TEXT or len(call.args) < 2:
            continue
        by_text |= _texts(call.args[1])
        for target, names in loops:
            if isinstance(call.args[1], ast.Name) and call.args[1].id in _variables(target):
                by_text |= _texts(names).union(*(_texts(constants[v]) for v in _variables(names) if v in constants))
    return plain, by_text


def _name(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else ""


def _variables(node: ast.AST) -> set[str]:
    return {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}


def _texts(node: ast.AST) -> set[str]:
    found = {one.value for one in ast.walk(node) if isinstance(one, ast.Constant)}
    return {text for text in found if isinstance(text, str) and text.isidentifier()}


def _defined() -> set[str]:
    """Functions, classes, fields and attributes that rl_hooks itself has."""
    names = set()
    for path in (_REPOSITORY / "rl_hooks").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                names.add(node.name)
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                names.add(node.target.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                names.add(node.attr)
    return names


def _of_libraries() -> set[str]:
    """What modules and objects of torch, NumPy and Python's own library have."""
    parts: list[Any] = [
        *(torch, torch.Tensor, torch.nn.Module, torch.device, torch.accelerator, torch.nn, torch.distributed),
        *(
            torch.distributed.ReduceOp,
            torch.distributed.Work,
            numpy,
            numpy.ndarray,
            numpy.typing,
            safetensors.safe_open,
        ),
        *(asyncio, concurrent.futures.Future, contextlib, dataclasses, functools, hashlib, hashlib.sha256(), hmac),
        *(inspect, inspect.Signature, inspect.BoundArguments, itertools, json, logging, logging.Logger, math, os),
        *(Path, queue, queue.SimpleQueue, re, re.compile(""), socket, threading, threading.Thread, threading.Event),
        *(threading.Lock(), time, weakref, uuid, uuid.uuid4(), dict, list, set, str, bytes, int, collections.deque),
        *(fastapi.FastAPI, fastapi.Request),
    ]
    return {name for part in parts for name in dir(part)}


def main(arguments: list[str]) -> int:
    """Print the differences; how many there are."""
    if len(arguments) != 1 or not (Path(arguments[0]) / "plugins").is_dir():
        sys.exit("expected one argument: the folder `vllm` of an unpacked vLLM")
    found = differences(Path(arguments[0]))
    for line in found:
        print(line)
    print(f"{len(FUNCTIONS)} functions and {sum(len(n[2]) for n in NAMES)} names looked for, {len(found)} missing")
    return len(found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
