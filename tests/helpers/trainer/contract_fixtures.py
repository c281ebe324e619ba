"""Names, signatures and call sites of other people's packages that we rely on, read in their source: nothing is run.

`CONTRACTS` are those of packages in an index. `tests/stacks/test_contracts.py` reads the pinned releases in the
environments of `make stacks`, and `make stacks-newest` the newest ones.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass
from pathlib import Path


@dataclass(frozen=True)
class Site:
    """What `name` ("function" or "Class.function") of a file must have; an empty name is the whole file.

    `takes`: arguments, whatever their order. `does`: calls, assignments and imports as `ast.unparse` writes them, or
    the function of a call alone; in this order. `says`: texts, such as a key or an option. `names`: fields, whatever
    their type. `never`: calls and texts that are not there.
    """

    file: str
    name: str = ""
    takes: tuple[str, ...] = ()
    does: tuple[str, ...] = ()
    says: tuple[str, ...] = ()
    _: KW_ONLY
    names: tuple[str, ...] = ()
    never: tuple[str, ...] = ()


def done(node: ast.AST) -> Iterator[str]:
    """What is called, assigned and imported, in the source's order. A call comes twice: whole, and its function."""
    kinds = (ast.Call, ast.Assign, ast.AnnAssign, ast.ImportFrom)
    found = [one for one in ast.walk(node) if isinstance(one, kinds)]
    for one in sorted(found, key=lambda each: (each.lineno, each.col_offset)):
        if isinstance(one, ast.AnnAssign):
            yield f"{ast.unparse(one.target)}: {ast.unparse(one.annotation)}"
        else:
            yield ast.unparse(one)
        if isinstance(one, ast.Call):
            yield ast.unparse(one.func)


def gone(root: Path, site: Site) -> str:
    """What of it is not there, or nothing."""
    where = f"{site.file}: {site.name}" if site.name else site.file
    if not (root / site.file).is_file():
        return f"{site.file} is gone"
    node: ast.AST = ast.parse((root / site.file).read_text(encoding="utf-8"))
    for part in filter(None, site.name.split(".")):
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
        inside = [one for one in ast.iter_child_nodes(node) if isinstance(one, kinds) and one.name == part]
        if not inside:
            return f"{where} is gone"
        node = inside[0]
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        has = {argument.arg for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)}
        if lacks := [name for name in site.takes if name not in has]:
            return f"{where} takes no {', '.join(lacks)}"
    steps = done(node)
    for before, step in zip(("", *site.does), site.does, strict=False):
        if step not in steps:  # `in` reads on from where the last one was
            return f"{where} has no {step}" + (f" after {before}" if before else "")
    texts = {one.value for one in ast.walk(node) if isinstance(one, ast.Constant) and isinstance(one.value, str)}
    if lacks := [text for text in site.says if text not in texts]:
        return f"{where} has no {', '.join(map(repr, lacks))}"
    fields = {ast.unparse(one.target) for one in ast.walk(node) if isinstance(one, ast.AnnAssign)}
    if lacks := [name for name in site.names if name not in fields]:
        return f"{where} has no field {', '.join(lacks)}"
    come = texts.union(done(node)).intersection(site.never)
    return f"{where} has {', '.join(sorted(come))} now" if come else ""


@dataclass(frozen=True)
class Contract:
    """What of ours rests on a package: `rests` for people, the sites for `gone`."""

    package: str  # as pip names it
    environment: str  # .venv-NAME of `make stacks`; "" is .venv
    rests: str
    sites: tuple[Site, ...]


_TRL = "trl/trainer"
#: What both trainers of TRL have; the file's name and the class's.
_GRPO = tuple(
    site
    for file, kind in ((f"{_TRL}/grpo_trainer.py", "GRPOTrainer"), (f"{_TRL}/rloo_trainer.py", "RLOOTrainer"))
    for site in (
        Site(file, f"{kind}._calculate_rewards", ("inputs", "prompts", "completions")),
        Site(
            file,
            f"{kind}._generate_and_score_completions",
            ("inputs",),
            ("self._calculate_rewards",),
            ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask"),
        ),
        Site(file, f"{kind}.compute_loss", ("model", "inputs"), ("self._compute_loss(model, inputs)",)),
        Site(file, f"{kind}._compute_loss", ("model", "inputs"), ("self._get_per_token_logps_and_entropies",)),
        Site(file, f"{kind}.log", ("logs",)),
    )
)
_ASYNC = "trl/experimental/async_grpo/async_grpo_trainer.py"
_ASYNC_WORKER = "trl/experimental/async_grpo/async_rollout_worker.py"
_UNSLOTH = "unsloth/models/rl_replacements.py"
_FSDP, _MEGATRON = (f"verl/workers/engine/{name}/transformer_impl.py" for name in ("fsdp", "megatron"))
_SERVER = "verl/workers/rollout/llm_server.py"
_SPANS = ("global_steps", "min_global_steps", "max_global_steps")
_AREAL_FSDP, _AREAL_MEGATRON = (f"areal/engine/{name}_engine.py" for name in ("fsdp", "megatron"))
_RAY_ACTOR, _WRAP = (f"openrlhf/trainer/ray/{name}.py" for name in ("ppo_actor", "vllm_worker_wrap"))
_SGLANG = "sglang/srt"
_SKYRL = "skyrl/backends/skyrl_train/workers"
_GPT, _LAYERS = "megatron/core/models/gpt/gpt_model.py", "megatron/core/tensor_parallel/layers.py"

CONTRACTS: dict[str, Contract] = {
    "TRL GRPO and RLOO": Contract(
        "trl",
        "",
        "rl_hooks.trl wraps four methods. Tokens and mask: the batch's columns; version: `state.global_step`",
        (*_GRPO, Site(f"{_TRL}/grpo_trainer.py", "GRPOTrainer._generate_and_score_completions", says=("tool_mask",))),
    ),
    "TRL AsyncGRPO": Contract(
        "trl",
        "",
        "rl_hooks.stacks.async_grpo. Tokens: a row over a prefix tree; version: `model_version`",
        (
            Site(_ASYNC, "AsyncGRPOTrainer.get_train_dataloader", ("self",)),
            Site(
                _ASYNC,
                "AsyncGRPOTrainer.compute_loss",
                ("model", "inputs"),
                ("model",),
                ("token_index", "segment_id", "old_log_probs", "tree_kv_index", "tree_cu_seqlens_q"),
            ),
            Site(_ASYNC, "AsyncGRPOTrainer._sync_weight", does=("self._sync_weight_lora", "self._sync_weight_merged")),
            Site(_ASYNC, "AsyncGRPOTrainer.log", ("logs",)),
            Site(_ASYNC, "DataCollatorForRollout.torch_call", ("examples",)),
            Site(
                _ASYNC_WORKER,
                "RolloutSample",
                does=("prompt: Messages", "model_version: int", "metrics: dict[str, float]"),
            ),
        ),
    ),
    "Unsloth GRPO": Contract(
        "unsloth",
        "unsloth",
        "rl_hooks.trl refuses it: Unsloth's `compute_loss` takes TRL's place, and calls no `_compute_loss`. An adapter "
        "would wrap that `compute_loss`. Tokens and mask: the same columns; version: `state.global_step`",
        (
            Site(
                _UNSLOTH,
                "grpo_trainer_compute_loss.compute_loss",
                ("model", "inputs"),
                ("self._get_per_token_logps_and_entropies", "grpo_accumulated_loss"),
                ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "tool_mask"),
                never=("self._compute_loss",),
            ),
            Site(_UNSLOTH, does=("RL_FUNCTIONS['grpo_trainer'].append(grpo_trainer_compute_loss)",)),
            Site(_UNSLOTH, says=("UNSLOTH_RETURN_HIDDEN_STATES",)),  # the forward goes past lm_head
            Site("unsloth/models/rl.py", "_wrap_grpo_generate_and_score", ("trainer_cls",), ("original",)),
        ),
    ),
    "verl FSDP engine": Contract(
        "verl",
        "verl",
        "rl_hooks.stacks.verl is a subclass, chosen by vendor. Tokens and mask: the micro-batch; version: "
        "`lr_scheduler.last_epoch`",
        (
            Site("verl/__init__.py", does=("_entry_points(group='verl.plugins')", "_ep.load()")),
            Site(
                "verl/workers/engine/base.py",
                "EngineRegistry.register",
                ("model_type", "backend", "device", "vendor"),
            ),
            Site("verl/workers/engine/base.py", "EngineRegistry.get_engine_cls", says=("VERL_ENGINE_VENDOR",)),
            Site(
                "verl/workers/engine/base.py",
                "BaseEngine.train_batch",
                ("data", "loss_function"),
                ("self.forward_backward_batch(data, loss_function, forward_only=False)",),
                ("metrics",),
            ),
            Site(
                "verl/workers/engine/base.py",
                "BaseEngine.infer_batch",
                ("data", "loss_function"),
                ("self.forward_backward_batch(data, loss_function, forward_only=True)",),
            ),
            Site(_FSDP, "FSDPEngine.initialize", ("self",)),
            Site(_FSDP, "FSDPEngine.disable_adapter", ("self",)),
            Site(_FSDP, "FSDPEngine.lr_scheduler_step", does=("self.lr_scheduler.step()",)),
            Site(_FSDP, "FSDPEngine.get_data_parallel_rank"),
            Site(_FSDP, "FSDPEngine.get_data_parallel_size"),
            Site(_FSDP, "FSDPEngine.is_mp_src_rank_with_outputs"),
            Site(
                _FSDP,
                "FSDPEngineWithLMHead.forward_step",
                ("micro_batch", "loss_function", "forward_only"),
                ("self.prepare_model_inputs", "self.module"),
            ),
        ),
    ),
    "verl Megatron engine": Contract(
        "verl",
        "verl",
        "no adapter. One would be a subclass chosen by vendor, with a `MegatronHook` on `self.module`, around "
        "`forward_step` where `forward_backward_batch` is told forward_only and no loss. Tokens and mask: the "
        "micro-batch that its iterator gives next; version: what `lr_scheduler_step` has counted",
        (
            Site(_MEGATRON, does=("EngineRegistry.register(model_type='language_model', backend='megatron')",)),
            Site(
                _MEGATRON,
                "MegatronEngine.forward_backward_batch",
                ("data", "loss_function", "forward_only"),
                ("prepare_micro_batches", "partial", "make_batch_generator", "forward_backward_func"),
            ),
            Site(
                _MEGATRON,
                "MegatronEngineWithLMHead.forward_step",
                ("batch_iter", "model", "logits_processor_func", "postprocess_micro_batch_func"),
                ("batch: TensorDict", "next(batch_iter)", "self.prepare_model_inputs(batch)", "forward_fn"),
                ("temperature", "thd"),
            ),
            Site(
                _MEGATRON,
                "MegatronEngineWithLMHead.prepare_model_inputs",
                ("batch",),
                says=("input_ids", "loss_mask", "multi_modal_inputs"),
            ),
            Site(_MEGATRON, "MegatronEngine.lr_scheduler_step", does=("self.lr_scheduler.step(1)",)),
            Site(_MEGATRON, "MegatronEngine.disable_adapter", ("self",)),
            Site(_MEGATRON, "MegatronEngine.get_data_parallel_rank"),
            Site(_MEGATRON, "MegatronEngine.is_mp_src_rank_with_outputs"),
        ),
    ),
    "verl extra_fields": Contract(
        "verl",
        "verl",
        "nothing yet. The weights that drew a rollout: their first and last step, in `extra_fields` and the tags of a "
        "rollout; an adapter for verl's asynchronous trainers would take versions from there",
        (
            Site(
                "verl/workers/rollout/vllm_rollout/vllm_async_server.py",
                "vLLMHttpServer.generate",
                ("prompt_ids", "sampling_params", "request_id"),
                ("extra_fields = {'global_steps': self.global_steps}",),
            ),
            Site(
                "verl/workers/rollout/vllm_rollout/vllm_async_server.py",
                "vLLMHttpServer.set_global_steps",
                ("global_steps",),
            ),
            Site(_SERVER, "LLMServerClient.generate", says=_SPANS),
            Site(_SERVER, "FullyAsyncLLMServerClient.generate", does=("super().generate",), says=_SPANS),
            Site(
                "verl/experimental/agent_loop/agent_loop.py",
                "AgentLoopOutput.as_dict",
                says=("extra_fields", "rollout_log_probs", "response_mask"),
            ),
            Site(
                "verl/trainer/ppo/v1/agent_loop_tq.py",
                "AgentLoopWorkerTQ._agent_loop_postprocess",
                ("output", "validate"),
                ("output.as_dict()", "field['loss_mask'] = field['response_mask']", "tq.async_kv_batch_put"),
                ("extra_fields", *_SPANS),
            ),
        ),
    ),
    "AReaL FSDP actor": Contract(
        "areal",
        "areal",
        "rl_hooks.stacks.areal is a subclass of actor and trainer. Tokens and mask: the packed micro-batch; "
        "version: `get_version`",
        (
            Site(_AREAL_FSDP, "FSDPEngine.initialize", ("addr", "ft_spec")),
            Site(_AREAL_FSDP, "FSDPEngine.forward_backward_batch", ("mb_list", "process_output_fn", "forward_only")),
            Site(_AREAL_FSDP, "FSDPEngine.get_version"),
            Site(_AREAL_FSDP, "FSDPEngine.export_stats"),
            Site(
                "areal/workflow/rlvr.py",
                "RLVRWorkflow.arun_episode",
                does=("versions = [-1] * resp.input_len + resp.output_versions",),
            ),
            Site(_AREAL_FSDP, "FSDPPPOActor.compute_logp", does=("self.actor.compute_logp",)),
            Site("areal/api/cli_args.py", "PPOActorConfig.should_compute_prox_logp"),
            Site(
                "areal/trainer/rl_trainer.py",
                "PPOTrainer._create_train_engine",
                ("actor_config", "alloc"),
                ("actor_cls.as_controller(actor_config, self.scheduler)", "actor.create_process_group"),
                ("fsdp",),
            ),
            Site("areal/utils/data.py", "MicroBatchList", does=("forward_indices: list[int] | None",)),
            Site(  # what has no token of its own, as a prompt's kind, is whole in each micro-batch
                "areal/utils/data.py",
                "split_padded_tensor_dict_into_mb_list",
                ("data",),
                ("not_to_split[key] = value", "results.append({**mb, **not_to_split})"),
            ),
        ),
    ),
    "AReaL Megatron engine": Contract(
        "areal",
        "areal",
        "no adapter. One would be a subclass of `MegatronPPOActor` with a `MegatronHook` on `self.model[0]`, around "
        "`forward_backward_batch` while `compute_logp` runs. Tokens and mask: `orig_mb` of each micro-batch, padded as "
        "its `padded_mb` says; version: `get_version`",
        (
            Site(_AREAL_MEGATRON, "MegatronEngine.initialize", ("addr", "ft_spec")),
            Site(
                _AREAL_MEGATRON,
                "MegatronEngine.forward_backward_batch",
                ("mb_list", "process_output_fn", "forward_only"),
                ("next(batch_iter)", "packed_context_parallel_forward", "forward_backward_func"),
                ("cu_seqlens",),
            ),
            Site(
                _AREAL_MEGATRON,
                "MegatronEngine.forward_batch",
                ("input_",),
                ("self.forward_backward_batch(mb_list, process_output, forward_only=True)",),
            ),
            Site(_AREAL_MEGATRON, "MegatronEngine._prepare_mb_list", ("input_",), ("pack_tensor_dict", "pad_mb_list")),
            Site(_AREAL_MEGATRON, "MegatronEngine.get_version"),
            Site(_AREAL_MEGATRON, "MegatronEngine.export_stats"),
            Site(_AREAL_MEGATRON, "MegatronPPOActor.compute_logp", does=("self.actor.compute_logp",)),
            Site("areal/trainer/rl_trainer.py", "PPOTrainer._create_train_engine", says=("megatron",)),
        ),
    ),
    "SGLang's EAGLE worker": Contract(
        "sglang",
        "sglang",
        "rl_hooks.engines.sglang.tap hooks these. Rows: what LogitsProcessor keeps under full capture, also of a "
        "captured graph; tokens: what `eagle_sample` accepts, by request of the batch; version: `weight_version`, or "
        "the updater's calls are counted",
        (
            Site(
                f"{_SGLANG}/layers/logits_processor.py",
                "LogitsProcessor",
                does=("self.keep_last_hidden_states = features.aux_hidden_state_capture is not None",),
            ),
            Site(
                f"{_SGLANG}/layers/logits_processor.py",
                "LogitsProcessor._get_last_hidden_states_to_store",
                ("hidden_states", "aux_hidden_states", "logits_metadata"),
                ("logits_metadata.capture_hidden_mode.is_full",),
            ),
            Site(
                f"{_SGLANG}/layers/logits_processor.py",
                "LogitsProcessor._get_hidden_states_to_store",
                does=("hidden_states_to_store = pack_aux_hidden_states(aux_hidden_states)",),
            ),
            Site(
                f"{_SGLANG}/model_executor/runner/decode_cuda_graph_runner.py",
                does=("dataclasses.replace",),  # with `last_hidden_states`, cut to the batch's rows
            ),
            Site(
                f"{_SGLANG}/model_executor/model_runner.py",
                "ModelRunner.init_attention_backends",
                does=("configure_aux_hidden_state_capture",),
            ),
            Site(f"{_SGLANG}/models/qwen2.py", "Qwen2Model.__init__", does=("self.layers_to_capture = []",)),
            Site(
                f"{_SGLANG}/speculative/eagle_worker_v2.py",
                "EAGLEWorkerV2.__init__",
                ("server_args", "target_worker"),
                ("self.topk = get_spec().speculative_eagle_topk", "self._target_worker = target_worker"),
            ),
            Site(
                f"{_SGLANG}/speculative/eagle_worker_v2.py",
                "EAGLEWorkerV2.forward_batch_generation",
                ("batch",),
                ("batch.spec_info = verify_input", "self.verify", "self.draft_worker._draft_extend_for_decode"),
            ),
            Site(
                f"{_SGLANG}/speculative/eagle_worker_v2.py",
                "EAGLEWorkerV2._forward_prefill_batch",
                ("batch",),
                ("self.target_worker.forward_batch_generation", "self.draft_worker._draft_extend_for_prefill"),
            ),
            Site(
                f"{_SGLANG}/speculative/eagle_worker_v2.py", "EAGLEWorkerV2.verify", ("batch",), ("run_eagle_verify",)
            ),
            Site(
                f"{_SGLANG}/speculative/eagle_worker_common.py",
                "run_eagle_verify",
                ("batch", "target_worker", "topk"),
                (
                    "target_worker.forward_batch_generation",
                    "logits_output = forward_batch_output.logits_output",
                    "eagle_sample",
                    "GenerationBatchResult",
                ),
            ),
            Site(
                f"{_SGLANG}/managers/tp_worker.py",
                "TpModelWorker.forward_batch_generation",
                ("batch", "forward_batch"),
                ("self.model_runner.forward", "GenerationBatchResult"),
            ),
            Site(
                f"{_SGLANG}/managers/schedule_batch.py",
                "Req.__init__",
                ("rid", "origin_input_ids", "sampling_params", "extra_key"),
                (
                    "self.rid = rid",
                    "self.origin_input_ids = origin_input_ids",
                    "self.extend_batch_idx = 0",
                    "self.sampling_params = sampling_params",
                    "self.extra_key = extra_key",
                    "self.eos_token_ids = eos_token_ids",
                    "self.retracted_stain = False",
                ),
            ),
            Site(f"{_SGLANG}/managers/scheduler.py", does=("new_batch.decoding_reqs = running_batch.reqs",)),
            Site(f"{_SGLANG}/constants.py", does=("HEALTH_CHECK_RID_PREFIX = 'HEALTH_CHECK'",)),
            Site(f"{_SGLANG}/managers/scheduler.py", "Scheduler.on_idle"),
            Site(
                f"{_SGLANG}/managers/scheduler.py",
                "Scheduler.init_model_worker",
                does=("self.init_tp_model_worker", "self.maybe_init_draft_worker"),
            ),
            Site(f"{_SGLANG}/model_executor/model_runner.py", "ModelRunner.sample", ("logits_output", "forward_batch")),
            Site(f"{_SGLANG}/managers/scheduler.py", "Scheduler.record_weight_version_change", ("new_version",)),
            *(
                Site(
                    f"{_SGLANG}/managers/scheduler_components/weight_updater.py",
                    f"SchedulerWeightUpdaterManager.{name}",
                    ("recv_req",),
                    ("self.record_weight_version_after_update(recv_req.weight_version)",),
                )
                for name in (f"update_weights_from_{way}" for way in ("disk", "distributed", "tensor", "ipc"))
            ),
            *(
                Site(f"{_SGLANG}/managers/io_struct.py", f"{name}ReqOutput", does=("success: bool",))
                for name in (
                    *("BeginWeightUpdate", "UpdateWeightFromDisk", "UpdateWeightsFromTensor"),
                    *("UpdateWeightsFromDistributed", "UpdateWeightsFromIPC"),
                )
            ),
            Site(
                f"{_SGLANG}/arg_groups/fields/parallel.py",
                says=("--attention-data-parallel-size", "--attention-context-parallel-size"),
                names=("attn_dp_size", "attn_cp_size"),
            ),
            Site(
                f"{_SGLANG}/arg_groups/fields/model.py", says=("serial", "overlap"), names=("startup_weight_load_mode",)
            ),
            Site(
                f"{_SGLANG}/arg_groups/fields/spec.py",
                names=("speculative_adaptive", "speculative_draft_model_quantization"),
            ),
            Site(f"{_SGLANG}/layers/quantization/unquant.py", "UnquantizedLinearMethod"),
            Site(f"{_SGLANG}/layers/quantization/unquant.py", "UnquantizedEmbeddingMethod"),
        ),
    ),
    "SGLang's scheduler": Contract(
        "sglang",
        "sglang",
        "rl_hooks.engines.sglang.inside puts an order behind the requests that the first rank has received, and takes "
        "it out on all ranks before they are dispatched. The draft's own runner loads the weights",
        (
            Site(
                f"{_SGLANG}/managers/scheduler_components/request_receiver.py",
                "SchedulerRequestReceiver.recv_requests",
                does=("recv_reqs = self._pull_raw_reqs()", "self._broadcast_reqs_across_ranks"),
            ),
            Site(
                f"{_SGLANG}/managers/scheduler_components/request_receiver.py",
                "SchedulerRequestReceiver._broadcast_reqs_across_ranks",
                ("recv_reqs",),
                ("broadcast_pyobj",),
            ),
            Site(
                f"{_SGLANG}/managers/scheduler.py",
                "Scheduler.ingest_requests",
                does=("self.request_receiver.recv_requests", "self.process_input_requests(recv_reqs)"),
            ),
            Site(
                f"{_SGLANG}/managers/scheduler.py",
                "Scheduler.process_input_requests",
                ("recv_reqs",),
                ("self._request_dispatcher(recv_req)",),
            ),
            Site(f"{_SGLANG}/managers/scheduler.py", "run_scheduler_process", does=("scheduler.run_event_loop()",)),
            Site(f"{_SGLANG}/managers/scheduler.py", "Scheduler.run_event_loop"),
            Site(f"{_SGLANG}/managers/scheduler.py", "Scheduler.get_internal_state", ("recv_req",)),
            Site(f"{_SGLANG}/managers/tokenizer_manager.py", does=("_SCHEDULER_EXIT_TIMEOUT_SECS = 15",)),
            Site(f"{_SGLANG}/speculative/base_spec_worker.py", "BaseSpecWorker.weight_update_runners"),
            Site(
                f"{_SGLANG}/speculative/eagle_worker_v2.py",
                "EAGLEWorkerV2.__init__",
                does=(
                    "self.speculative_num_steps = get_spec().speculative_num_steps",
                    "self.speculative_num_draft_tokens = get_spec().speculative_num_draft_tokens",
                ),
            ),
            *(
                Site(f"{_SGLANG}/model_executor/model_runner_components/weight_updater.py", f"WeightUpdater.{name}")
                for name in ("begin_weight_update", "update_weights_from_tensor", "end_weight_update")
            ),
            Site(
                f"{_SGLANG}/model_executor/model_runner_components/weight_updater.py",
                "WeightUpdater.update_weights_from_tensor",
                ("named_tensors", "load_format"),
                ("self.get_model().load_weights(named_tensors)",),  # by one tensor at a time
            ),
            Site(
                f"{_SGLANG}/managers/scheduler_components/weight_updater.py",
                "SchedulerWeightUpdaterManager",
                does=("_session: Optional[_WeightUpdateSession]",),
            ),
        ),
    ),
    "SGLang's decoding step": Contract(
        "sglang",
        "sglang",
        "rl_hooks.engines.sglang.rounds, a plugin of SGLang's framework, counts the rounds of each step by what the "
        "requests say of themselves before and after it",
        (
            Site(f"{_SGLANG}/plugins/__init__.py", does=("GENERAL_PLUGINS_GROUP = 'sglang.srt.plugins'",)),
            Site(f"{_SGLANG}/plugins/hook_registry.py", "HookRegistry.register", ("target", "hook", "hook_type")),
            Site(
                f"{_SGLANG}/model_executor/model_runner.py",
                "ModelRunner.__init__",
                ("model_config",),
                ("self.model_config = model_config",),
            ),
            Site(
                f"{_SGLANG}/configs/model_config.py",
                "ModelConfig.__init__",
                ("model_path",),
                ("self.model_path = model_path",),
            ),
            Site(
                f"{_SGLANG}/managers/scheduler_components/weight_updater.py",
                "SchedulerWeightUpdaterManager.release_memory_occupation",
                ("recv_req",),
                ("self.offload_tags.add(tag)",),
            ),
            Site(
                f"{_SGLANG}/managers/scheduler_components/weight_updater.py",
                "SchedulerWeightUpdaterManager.resume_memory_occupation",
                ("recv_req",),
                ("self.offload_tags.remove(tag)",),
            ),
            Site(
                f"{_SGLANG}/managers/scheduler_components/weight_updater.py",
                "SchedulerWeightUpdaterManager.begin_weight_update",
                ("recv_req",),
                ("self._session = _WeightUpdateSession(selector=recv_req.selector)",),
            ),
            Site(
                f"{_SGLANG}/managers/scheduler_components/weight_updater.py",
                "SchedulerWeightUpdaterManager.update_weights_from_tensor",
                ("recv_req",),
                ("self._select_runners(recv_req.selector)",),
            ),
            Site(
                f"{_SGLANG}/managers/scheduler_components/weight_updater.py",
                "SchedulerWeightUpdaterManager.end_weight_update",
                ("recv_req",),
                ("self._session = None",),
            ),
            Site(
                f"{_SGLANG}/managers/tokenizer_control_mixin.py",
                "TokenizerControlMixin.update_weights_from_tensor",
                ("obj",),
                ("is_paused = self.is_pause", "self.update_weights_from_tensor_communicator(obj)"),
            ),
            Site(f"{_SGLANG}/constants.py", does=("GPU_MEMORY_TYPE_WEIGHTS = 'weights'",)),
            Site(
                f"{_SGLANG}/managers/scheduler_components/batch_result_processor.py",
                "SchedulerBatchResultProcessor.process_batch_result_decode",
                ("batch", "result"),
                ("self._normalize_decode_outputs", "req.output_ids.extend", "req.update_finish_state"),
            ),
            Site(
                f"{_SGLANG}/managers/scheduler_components/batch_result_processor.py",
                "SchedulerBatchResultProcessor._resolve_spec_v2_tokens",
                does=("req.finished", "req.update_spec_correct_drafts_histogram"),  # beside `req.spec_verify_ct += 1`
            ),
            Site(
                f"{_SGLANG}/managers/scheduler_components/batch_result_processor.py",
                "SchedulerBatchResultProcessor.process_batch_result_prefill",
                ("batch", "result"),
            ),
            Site(
                f"{_SGLANG}/managers/scheduler.py",
                "Scheduler.run_batch",
                ("batch",),
                ("batch.launch_ts = time.monotonic()",),
            ),
            Site(
                f"{_SGLANG}/managers/scheduler.py",
                "Scheduler.process_batch_result",
                ("batch", "result"),
                (
                    "self.batch_result_processor.process_batch_result_decode(batch, result)",
                    "self.batch_result_processor.process_batch_result_prefill(batch, result)",
                ),
            ),
            Site(
                f"{_SGLANG}/managers/scheduler_components/metrics_reporter.py",
                "SchedulerMetricsReporter.__post_init__",
                does=(
                    "self.is_stats_logging_rank = self.metrics_collector_context.is_stats_logging_rank",
                    "self.current_scheduler_metrics_enabled = "
                    "self.metrics_collector_context.current_scheduler_metrics_enabled",
                ),
            ),
            Site(f"{_SGLANG}/managers/schedule_batch.py", "Req.__init__", does=("self.spec_verify_ct = 0",)),
            Site(f"{_SGLANG}/managers/schedule_batch.py", "Req.output_ids_through_stop"),
            Site(
                f"{_SGLANG}/speculative/eagle_worker_v2.py",
                "EAGLEWorkerV2.forward_batch_generation",
                does=("self.draft_worker.draft(batch)", "self.verify", "self.draft_worker._draft_extend_for_decode"),
            ),
        ),
    ),
    "OpenRLHF Actor": Contract(
        "openrlhf",
        "openrlhf",
        "rl_hooks.stacks.openrlhf wraps `forward` of what the strategy prepares. Tokens and mask: its "
        "arguments; version: how often it was trained between two passes without gradients, from the "
        "`global_step` on that `load_ckpt` returns",
        (
            Site(
                "openrlhf/models/actor.py",
                "Actor.forward",
                ("sequences", "action_mask", "attention_mask", "ring_attn_group"),
                ("unpad_and_slice_tensor", "self.model"),
            ),
            Site(
                "openrlhf/utils/deepspeed/deepspeed.py", "DeepspeedStrategy.prepare", does=("isinstance(arg, tuple)",)
            ),
            Site("openrlhf/utils/deepspeed/deepspeed.py", "DeepspeedStrategy.get_rank"),
            Site(
                "openrlhf/utils/deepspeed/deepspeed.py",
                "DeepspeedStrategy.load_ckpt",
                ("model", "load_dir"),
                ("model.load_checkpoint",),
            ),
            Site(  # the first, a prompt's data source, goes no further
                "openrlhf/trainer/ppo_utils/samples_generator.py",
                "_collect_prompt_batch",
                does=("_, batch_prompts, batch_labels, batch_images = next(dataloader_iter)",),
            ),
        ),
    ),
    "OpenRLHF PolicyModelActor": Contract(
        "openrlhf",
        "openrlhf",
        "the process that the hook lives in: it prepares the Actor for training, makes experience by `forward`, and "
        "returns what is logged from `fit`, of which the trainer keeps what all ranks return",
        (
            Site(
                _RAY_ACTOR,
                "PolicyModelActor.init_model_from_pretrained",
                ("strategy", "pretrain"),
                (
                    *(
                        "Actor",
                        "strategy.prepare((actor, actor_cfg))",
                        "strategy.load_ckpt(self.actor.model, ckpt_path)",
                    ),
                    "ActorPPOTrainer",
                ),
            ),
            Site(
                _RAY_ACTOR,
                "PolicyModelActor.forward",
                ("sequences", "action_mask", "attention_mask"),
                ("self.actor.eval()", "torch.no_grad()", "self.actor"),
            ),
            Site(_RAY_ACTOR, "PolicyModelActor.fit", ("kl_ctl",), ("status = self.trainer.ppo_train(kl_ctl)",)),
            Site(_RAY_ACTOR, "ActorPPOTrainer.training_step", ("experience",), ("self.actor",)),
            Site(
                "openrlhf/trainer/ppo_trainer.py",
                "BasePPOTrainer.ppo_train",
                does=("status.update(ray.get(ref)[0])", "status.update(result)"),
                says=("fit",),
            ),
        ),
    ),
    "OpenRLHF vllm_worker_wrap": Contract(
        "openrlhf",
        "openrlhf",
        "the engine alone sees the policy's new weights by `load_weights`, a parameter at a time; and OpenRLHF's "
        "engines do not speculate unless its `create_vllm_engines` is changed",
        (
            *(
                Site(
                    _WRAP,
                    f"WorkerWrap.{name}",
                    ("name", "dtype", "shape"),
                    ("self.model_runner.model.load_weights(weights=[(name, weight)])",),
                )
                for name in ("update_weight", "update_weight_cuda_ipc")
            ),
            Site(
                "openrlhf/trainer/ray/vllm_engine.py",
                "create_vllm_engines",
                ("num_engines", "tensor_parallel_size", "pretrain"),
                says=("worker_extension_cls", "openrlhf.trainer.ray.vllm_worker_wrap.WorkerWrap"),
                never=("speculative_config",),
            ),
        ),
    ),
    "SkyRL FSDP policy": Contract(
        "skyrl",
        "skyrl",
        "rl_hooks.stacks.skyrl wraps six methods. Tokens and mask: the `Experience`; version: how often "
        "trained weights were sent to the engines, from N on where global_step_N/policy was loaded before",
        (
            Site(f"{_SKYRL}/fsdp/fsdp_worker.py", "FSDPPolicyWorkerBase.init_model", ("model_path",)),
            Site(f"{_SKYRL}/fsdp/fsdp_worker.py", "FSDPPolicyWorkerBase.broadcast_to_inference_engines"),
            Site(
                f"{_SKYRL}/worker.py",
                "PolicyWorkerBase._forward_backward_micro",
                ("experience", "loss_fn"),
                ("experience.to_device", "self.model"),
            ),
            Site(f"{_SKYRL}/worker.py", "PolicyWorkerBase.forward_backward", ("data", "loss_fn")),
            Site(f"{_SKYRL}/worker.py", "PolicyWorkerBase.optim_step", does=("self.strategy.optimizer_step",)),
            Site(f"{_SKYRL}/worker.py", "Worker.load_checkpoint", ("ckpt_dir",), ("self.strategy.load_checkpoint",)),
            Site(
                "skyrl/train/trainer.py",
                "RayPPOTrainer.save_checkpoints",
                does=("os.path.join(self.cfg.trainer.ckpt_path, f'global_step_{self.global_step}')",),
                says=("policy",),
            ),
            *(
                # It loads before it sends, and sends once in a step.
                Site(
                    f"skyrl/train/{file}.py",
                    f"{trainer}.train",
                    does=("self.load_checkpoints()", *("self.dispatch.save_weights_for_sampler()",) * 2),
                )
                for file, trainer in (
                    ("trainer", "RayPPOTrainer"),
                    ("fully_async_trainer", "FullyAsyncRayPPOTrainer"),
                )
            ),
            Site(
                "skyrl/train/dataset/replay_buffer.py",
                "Experience",
                does=("loss_mask: Optional[Integer[torch.LongTensor, 'batch response_len']]",),
            ),
            *(  # nothing says of which kind a rollout's prompt is
                Site(file, name, never=("env_class", "env_classes", "data_source", "env_extras"))
                for file, name in (
                    ("skyrl/train/trainer.py", "RayPPOTrainer.convert_to_training_input"),
                    (f"{_SKYRL}/worker_utils.py", "BaseBatchIterator.batch_to_experience"),
                )
            ),
        ),
    ),
    "Megatron-Core GPTModel": Contract(
        "megatron-core",
        "megatron",
        "rl_hooks.trainer.megatron reads states, output layer and weights by these names",
        (
            Site(
                _GPT,
                "GPTModel.forward",
                ("input_ids", "position_ids", "attention_mask", "packed_seq_params"),
            ),
            Site(
                _GPT,
                "GPTModel.__init__",
                ("share_embeddings_and_output_weights",),
                ("LanguageModelEmbedding", "TransformerBlock", "tensor_parallel.ColumnParallelLinear"),
            ),
            Site(_GPT, "GPTModel._postprocess", does=("self.output_layer",)),
            Site(_LAYERS, "ColumnParallelLinear.forward", ("input_", "weight")),
            Site(
                "megatron/core/packed_seq_params.py",
                "PackedSeqParams",
                does=("cu_seqlens_q: Tensor", "cu_seqlens_q_padded: Tensor"),
            ),
            Site("megatron/core/parallel_state.py", "get_tensor_model_parallel_group"),
            Site("megatron/core/parallel_state.py", "get_data_parallel_rank"),
            Site("megatron/core/parallel_state.py", "get_data_parallel_world_size"),
        ),
    ),
    "Ray": Contract(
        "ray",
        "ray",
        "rl_hooks.stacks.on_ray is the `worker_process_setup_hook` of a runtime environment",
        (
            Site("ray/runtime_env/runtime_env.py", says=("worker_process_setup_hook",)),
            Site("ray/_private/runtime_env/setup_hook.py", "load_and_execute_setup_hook"),
        ),
    ),
}


def broken(contract: Contract, root: Path) -> list[str]:
    """What of a contract the packages in the folder `root` do not have, each named."""
    return [text for site in contract.sites if (text := gone(root, site))]
