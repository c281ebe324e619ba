#!/usr/bin/env bash
# slime's own examples/scripts with draftalign: what comes beside the options of your script. From slime's checkout, in
# its environment, where `pip install './rl_hooks[agent]'` of draftalign's checkout was run on every machine:
#
# > DRAFTALIGN_URL=http://service:8400 examples/attach/slime.sh --hf-checkpoint /models/Qwen3-4B ...
#
# All options of your script follow (scripts/run-qwen3-4B.sh of slime has some sixty). miles: the same options.
set -euo pipefail
: "${DRAFTALIGN_URL:?the service, as http://host:port}"

MORE=""
for name in DRAFTALIGN_TOKEN DRAFTALIGN_INITIAL_DRAFTER; do MORE+="${!name:+, \"${name}\": \"${!name}\"}"; done

# Ray's workers get these from the job. slime's own image has Megatron-LM at that place, as its scripts say. Its SGLang
# sends nothing (0), since the hook does.
ENVIRONMENT="{\"env_vars\": {
  \"PYTHONPATH\": \"${MEGATRON_SOURCE:-/root/Megatron-LM}\",
  \"CUDA_DEVICE_MAX_CONNECTIONS\": \"1\",
  \"DRAFTALIGN_URL\": \"${DRAFTALIGN_URL}\",
  \"DRAFTALIGN_SAMPLE_FRACTION\": \"0\",
  \"DRAFTALIGN_RUN\": \"${DRAFTALIGN_RUN:-default}\"${MORE}
}}"
HOOKS=rl_hooks.trainer.stacks.slime

exec ray job submit --address="${RAY_ADDRESS:-http://127.0.0.1:8265}" --runtime-env-json="${ENVIRONMENT}" -- \
  python3 train.py \
  --custom-megatron-before-log-prob-hook-path "${HOOKS}.before_log_prob" \
  --custom-megatron-before-train-step-hook-path "${HOOKS}.before_train_step" \
  "$@"
