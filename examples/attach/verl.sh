#!/usr/bin/env bash
# verl's own GRPO with draftalign: in verl's environment, where `pip install './rl_hooks[agent]'` of draftalign's checkout
# was run on every machine. /models/drafter is what `draftalign warmup /models/policy ... --run "$DRAFTALIGN_RUN"` wrote.
# What was run of the vLLM that verl pins is in docs/guide/stacks.md.
#
# > DRAFTALIGN_URL=http://service:8400 examples/attach/verl.sh trainer.nnodes=2
#
# Your own options follow: of an option that comes twice, the last counts.
set -euo pipefail
: "${DRAFTALIGN_URL:?the service, as http://host:port}"
export VERL_ENGINE_VENDOR=draftalign DRAFTALIGN_URL DRAFTALIGN_RUN="${DRAFTALIGN_RUN:-default}"

POLICY="${POLICY:-/models/policy}" DRAFTER="${DRAFTER:-/models/drafter}" DATA="${DATA:-/data}"
DRAFTS="{method: eagle3, model: ${DRAFTER}, num_speculative_tokens: 4, draft_load_config: {load_format: auto}}"

exec python -m verl.trainer.main_ppo \
  algorithm.adv_estimator=grpo \
  algorithm.rollout_correction.bypass_mode=False \
  actor_rollout_ref.model.path="${POLICY}" \
  actor_rollout_ref.model.use_remove_padding=True \
  actor_rollout_ref.actor.strategy=fsdp2 \
  actor_rollout_ref.actor.ulysses_sequence_parallel_size=1 \
  actor_rollout_ref.actor.use_dynamic_bsz=True \
  actor_rollout_ref.actor.ppo_mini_batch_size=256 \
  actor_rollout_ref.rollout.name=vllm \
  actor_rollout_ref.rollout.n=8 \
  actor_rollout_ref.rollout.calculate_log_probs=True \
  "+actor_rollout_ref.rollout.engine_kwargs.vllm.speculative_config=${DRAFTS}" \
  data.train_files="${DATA}/train.parquet" data.val_files="${DATA}/test.parquet" data.train_batch_size=256 \
  trainer.v1.trainer_mode=sync trainer.nnodes=1 trainer.n_gpus_per_node=8 \
  "$@"
