#!/usr/bin/env bash
# NeMo-RL's own GRPO with draftalign in its FSDP2 policy's workers: what comes beside the options of your script. From
# NeMo-RL's checkout. Each kind of worker has an environment of its own there, which uv makes: so this package goes into
# a folder that every machine sees, once, from draftalign's checkout:
#
# > pip install --no-deps --target /shared/draftalign ./rl_hooks
# > DRAFTALIGN_URL=http://service:8400 .../examples/attach/nemo_rl.sh policy.model_name=/models/policy ...
#
# /models/drafter is what `draftalign warmup /models/policy ... --run "$DRAFTALIGN_RUN"` wrote.
# What was run of the vLLM that NeMo-RL pins is in docs/guide/stacks.md.
set -euo pipefail
: "${DRAFTALIGN_URL:?the service, as http://host:port}"
export DRAFTALIGN_URL DRAFTALIGN_RUN="${DRAFTALIGN_RUN:-default}"
export PYTHONPATH="${PACKAGE:-/shared/draftalign}${PYTHONPATH:+:${PYTHONPATH}}"
# NeMo-RL starts Ray with all variables and no setup hook; Ray hands its own `worker_process_setup_hook` on by this one.
export __RAY_WORKER_PROCESS_SETUP_HOOK_ENV_VAR=rl_hooks.stacks.on_ray.install

DRAFTS="{method: eagle3, model: ${DRAFTER:-/models/drafter}, num_speculative_tokens: 4}"

# `prev_logprobs` are a pass of their own, which is captured: so no `force_on_policy_ratio`.
exec uv run examples/run_grpo.py \
  policy.dtensor_cfg.enabled=true policy.dtensor_cfg._v2=true \
  policy.dtensor_cfg.tensor_parallel_size=1 policy.dtensor_cfg.context_parallel_size=1 \
  loss_fn.force_on_policy_ratio=false \
  policy.generation.backend=vllm policy.generation.vllm_cfg.logprobs_mode=processed_logprobs \
  "++policy.generation.vllm_kwargs.speculative_config=${DRAFTS}" \
  "$@"
