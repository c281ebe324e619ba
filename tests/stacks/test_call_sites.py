"""Names and call sites that we rely on in slime, miles, NeMo-RL and ROLL, read in their source: nothing of it is run.

None of the four is in a package index: SLIME_SOURCE, MILES_SOURCE, NEMO_RL_SOURCE and ROLL_SOURCE name checkouts. What
is gone is named, with the file and the function where it was.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from helpers.trainer.contract_fixtures import Site, gone

OPTIONS = ("--custom-megatron-before-log-prob-hook-path", "--custom-megatron-before-train-step-hook-path")
#: What `get_batch` gives. A row in which rollouts follow each other, then padding.
BATCH = ("tokens", "total_lengths", "response_lengths", "loss_masks", "multimodal_train_inputs")
#: The two hooks, beside the forwards that they tell apart.
LOG_PROB = ("get_batch", "{forward}", "custom_before_log_prob_hook(args, model, store_prefix)", "forward_backward_func")
TRAIN = (
    "custom_before_train_step_hook(args, rollout_id, step_id, model, optimizer, opt_param_scheduler)",
    *("get_batch", "model(**forward_kwargs)", "forward_backward_func"),
    "optimizer.step",
)

#: NeMo-RL's, one after the other; that for packed rows a second time, for forwards that keep the ranks in step.
ITERATORS = (
    "data.make_microbatch_iterator_with_dynamic_shapes",
    *["data.make_microbatch_iterator_for_packable_sequences"] * 2,
    "data.make_microbatch_iterator",
)


def log_prob(forward: str) -> tuple[str, ...]:
    return tuple(step.format(forward=forward) for step in LOG_PROB)


#: By the variable that names the checkout; read at the commit beside it.
SITES: dict[str, tuple[Site, ...]] = {
    "SLIME_SOURCE": (  # 624b824a898ab0ec1fcb4d373004c7f3852bf515
        Site("slime/utils/arguments.py", says=(*OPTIONS, "--rollout-temperature", "--rollout-top-p")),
        Site("slime/utils/misc.py", "load_function", ("path",)),
        Site(
            "slime/backends/megatron_utils/model.py",
            does=("from .data import DataIterator, get_batch",),
        ),
        Site(
            "slime/backends/megatron_utils/model.py",
            "forward_only",
            ("args", "model", "data_iterator", "store_prefix"),
            log_prob("model(**forward_kwargs)"),
        ),
        Site("slime/backends/megatron_utils/model.py", "train_one_step", ("rollout_id", "step_id", "model"), TRAIN),
        Site(
            "slime/backends/megatron_utils/model.py", "initialize_model_and_optimizer", does=("model[0].role = role",)
        ),
        Site(
            "slime/backends/megatron_utils/data.py",
            "get_batch",
            ("data_iterator", "keys"),
            ("batch = data_iterator.get_next(keys)", "batch['tokens'] = tokens"),
            BATCH,
        ),
        Site(
            "slime/backends/megatron_utils/data.py",
            "DataIterator.get_next",
            ("keys",),
            ("self.rollout_data.get(key, None)", "batch[key] = None"),
        ),
        Site(
            "slime/backends/megatron_utils/actor.py",
            "MegatronTrainRayActor.train_actor",
            ("rollout_id", "rollout_data"),
            (
                *("self._switch_model('ref')", "self.compute_log_prob", "self._switch_model('teacher')"),
                "self._switch_model('old_actor' if self.args.keep_old_actor else 'actor')",
                *("self.compute_log_prob", "train"),
            ),
            ("ref_", "teacher_"),
        ),
        Site("slime/observability/logging_utils.py", "log", ("args", "metrics", "step_key")),
        Site("slime/observability/metric_utils.py", "compute_rollout_step", ("args", "rollout_id")),
        Site(
            "slime/backends/megatron_utils/model.py",
            does=("from slime.observability import logging_utils, train_metric_utils",),
        ),
        Site("slime/utils/data.py", "process_rollout_data", says=("local_raw_reward",)),
        Site("slime/ray/rollout.py", says=("rollout_log_probs", "source_names")),
        Site("slime/utils/data.py", "get_source", ("sample",), says=("source_name",)),
    ),
    "MILES_SOURCE": (  # 31f1ca961a94cb860cec3b2dea34ec332bfa8f76
        Site("miles/utils/arguments.py", says=(*OPTIONS, "--rollout-temperature", "--rollout-top-p", "--qkv-format")),
        Site("miles/utils/misc.py", "load_function", ("path",)),
        Site(
            "miles/backends/megatron_utils/model.py",
            does=("from ..training_utils.data import DataIterator, get_batch",),
        ),
        Site(
            "miles/backends/megatron_utils/model.py",
            "forward_only",
            ("args", "model", "data_iterator", "store_prefix"),
            log_prob("model"),
        ),
        Site("miles/backends/megatron_utils/model.py", "train_one_step", ("rollout_id", "step_id", "model"), TRAIN),
        Site(
            "miles/backends/megatron_utils/model.py", "initialize_model_and_optimizer", does=("model[0].role = role",)
        ),
        Site(
            "miles/backends/training_utils/data.py",
            "get_batch",
            ("data_iterator", "keys"),
            ("batch = data_iterator.get_next(keys)", "batch['tokens'] = tokens"),
            BATCH,
        ),
        Site(
            "miles/backends/training_utils/data.py",
            "DataIterator.get_next",
            ("keys",),
            ("self.rollout_data.get(key, None)", "batch[key] = None"),
        ),
        Site(
            "miles/backends/megatron_utils/actor.py",
            "MegatronTrainRayActor.train_actor",
            ("rollout_id", "rollout_data"),
            (
                *("self._switch_model('ref')", "self.compute_log_prob", "self._switch_model('teacher')"),
                "self._switch_model('old_actor' if self.args.keep_old_actor else 'actor')",
                *("self.compute_log_prob", "train"),
            ),
            ("ref_", "teacher_"),
        ),
        Site("miles/utils/tracking_utils/tracking.py", "log", ("args", "metrics", "step_key")),
        Site("miles/utils/metric_utils.py", "compute_rollout_step", ("args", "rollout_id")),
        Site("miles/backends/training_utils/log_utils.py", does=("from ...utils.tracking_utils import tracking",)),
        Site("miles/ray/rollout/train_data_conversion.py", says=("rollout_log_probs",), never=("source_names",)),
    ),
    "NEMO_RL_SOURCE": (  # 7ea279abfbeb698b092856d0dab61e7cf39bc909
        Site(
            "nemo_rl/models/policy/lm_policy.py",
            "Policy.__init__",
            ("worker_extension_cls_fqn",),
            ("worker_builder_cls_fqn = worker_extension_cls_fqn", "RayWorkerBuilder"),
        ),
        Site(
            "nemo_rl/models/policy/workers/megatron_policy_worker.py",
            "MegatronPolicyWorkerImpl.get_logprobs",
            ("data", "micro_batch_size"),
            ("self.model.eval", "get_microbatch_iterator", "megatron_forward_backward"),
        ),
        *(
            Site(
                f"nemo_rl/models/policy/workers/{module}.py",
                f"{kind}.get_logprobs",
                ("data", "micro_batch_size"),
                ("self.model.eval", *steps),
            )
            for module, kind, steps in (
                ("dtensor_policy_worker", "DTensorPolicyWorkerImpl", (*ITERATORS, "self.model(**model_args)")),
                (
                    "dtensor_policy_worker_v2",
                    "DTensorPolicyWorkerV2Impl",
                    ("get_microbatch_iterator", "forward_with_post_processing_fn"),
                ),
            )
        ),
        Site("nemo_rl/models/automodel/data.py", "get_microbatch_iterator", ("data",), ITERATORS),
        Site(
            "nemo_rl/models/policy/workers/base_policy_worker.py",
            "AbstractPolicyWorker.get_reference_policy_logprobs",
            ("data",),
            ("self.use_reference_model", "self.get_logprobs"),
        ),
        Site("nemo_rl/distributed/virtual_cluster.py", "init_ray", does=("env_vars = dict(os.environ)", "ray.init")),
        Site(
            "nemo_rl/algorithms/grpo.py",
            "grpo_train",
            does=("policy.get_logprobs", "policy.train"),
            says=("input_ids", "input_lengths", "token_mask"),
        ),
        Site("nemo_rl/algorithms/grpo.py", "_build_async_grpo_train_data", ("repeated_batch",), never=("task_name",)),
        Site(
            "nemo_rl/data_plane/schema.py",
            does=("LP_SEED_FIELDS = ('input_ids', 'input_lengths', 'token_mask', 'sample_mask')",),
        ),
    ),
    "ROLL_SOURCE": (  # 8eb27cc2dc34c4d1310b169d9b86d339004d811a
        Site("roll/configs/worker_config.py", "WorkerConfig", does=("worker_cls: Optional[str]",)),
        Site(
            "roll/pipeline/base_worker.py",
            "ActorWorker.compute_log_probs",
            ("data",),
            ("data = self.strategy.get_data_input(data)", "self.strategy.forward_step"),
            ("global_step",),
        ),
        Site("roll/pipeline/base_worker.py", "ActorWorker.forward_func_log_probs", ("data", "output_tensor")),
        Site(
            "roll/distributed/strategy/fsdp2_strategy.py",
            "FSDP2InferStrategy.forward_step",
            ("batch", "forward_func"),
            ("self._fsdp2_forward", "forward_func(data, logits)"),
            ("input_ids", "attention_mask", "disable_adapter"),
        ),
        Site(
            "roll/distributed/strategy/megatron_strategy.py",
            "MegatronInferStrategy.forward_step",
            ("batch", "forward_func"),
            ("self.forward_backward_func",),
            ("disable_adapter",),
        ),
        Site(
            "roll/pipeline/rlvr/rlvr_pipeline.py",
            "RLVRPipeline.run",
            does=("self.actor_train.compute_log_probs", "self.actor_train.train_step"),
            says=("global_step", "response_mask"),
        ),
    ),
}


@pytest.mark.parametrize("variable", SITES)
def test_what_we_rely_on_is_where_it_was_read(variable: str) -> None:
    source = os.environ.get(variable)
    if not source:
        pytest.skip(f"{variable} names no checkout")
    lost = [text for site in SITES[variable] if (text := gone(Path(source), site))]
    assert not lost, "\n".join(lost)


SOURCE = """
from .data import get_batch
class Worker:
    kind: str = "actor"
    def run(self, args, *, model):
        batch = get_batch(args, ["tokens"])
        for step in range(2):
            hook(args, model, step)
        return model(**batch)
"""
KEPT = Site(
    "w.py",
    "Worker.run",
    ("args", "model"),
    ("get_batch", "hook(args, model, step)", "model(**batch)"),
    ("tokens",),
    never=("self.go", "ids"),
)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("", "", ""),
        ("class Worker", "class Actor", "w.py: Worker.run is gone"),
        ("def run", "def go", "w.py: Worker.run is gone"),
        ("*, model", "*, models", "w.py: Worker.run takes no model"),
        (
            "hook(args, model, step)",
            "hook(model, args, step)",
            "w.py: Worker.run has no hook(args, model, step) after get",
        ),
        ("batch = get_batch(", "batch = get_row(", "w.py: Worker.run has no get_batch"),
        ('"tokens"', '"ids"', "w.py: Worker.run has no 'tokens'"),
        ('["tokens"]', '["tokens", "ids"]', "w.py: Worker.run has ids now"),
        ("return model(**batch)", "return self.go(model(**batch))", "w.py: Worker.run has self.go now"),
    ],
)
def test_a_name_that_is_gone_is_named(tmp_path: Path, old: str, new: str, said: str) -> None:
    (tmp_path / "w.py").write_text(SOURCE.replace(old, new) if old else SOURCE)
    found = gone(tmp_path, KEPT)
    assert found.startswith(said)
    assert bool(found) is bool(said)


def test_calls_in_another_order_and_a_file_that_is_gone_are_named(tmp_path: Path) -> None:
    (tmp_path / "w.py").write_text(SOURCE)
    other = Site("w.py", "Worker.run", does=("model(**batch)", "get_batch"))
    assert gone(tmp_path, other) == "w.py: Worker.run has no get_batch after model(**batch)"
    assert gone(tmp_path, Site("v.py")) == "v.py is gone"
    assert not gone(tmp_path, Site("w.py", does=("from .data import get_batch", "kind: str")))
