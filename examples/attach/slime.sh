#!/usr/bin/env bash
# slime's own examples/scripts with draftalign: what comes beside the options of your script. From slime's checkout, in
# its environment, where `pip install './rl_hooks[agent]'` of draftalign's checkout was run on every machine:
#
# > DRAFTALIGN_URL=http://service:8400 examples/attach/slime.sh --hf-checkpoint /models/Qwen3-4B ...
#
# All options of your script follow (scripts/run-qwen3-4B.sh of slime has some sixty). miles: the same options.
set -euo pipefail
: "${DRAFTALIGN_URL:?the service, as http://host:port}"
export DRAFTALIGN_RUN="${DRAFTALIGN_RUN:-default}" DRAFTALIGN_SAMPLE_FRACTION=0 CUDA_DEVICE_MAX_CONNECTIONS=1

# Ray's workers get these from the job. slime's own image has Megatron-LM at that place, as its scripts say. Its SGLang
# sends nothing (0), since the hook does. In a file, because everybody on this machine may read a command's options.
ENVIRONMENT="$(mktemp)"
trap 'rm -f "${ENVIRONMENT}"' EXIT
PYTHONPATH="${MEGATRON_SOURCE:-/root/Megatron-LM}" python3 -I -c 'import json, os, sys; print(json.dumps(
  {"env_vars": {n: os.environ[n] for n in sys.argv[1:] if n in os.environ}}))' \
  PYTHONPATH CUDA_DEVICE_MAX_CONNECTIONS DRAFTALIGN_SAMPLE_FRACTION DRAFTALIGN_AUX_LAYERS \
  DRAFTALIGN_URL DRAFTALIGN_RUN DRAFTALIGN_TOKEN DRAFTALIGN_INITIAL_DRAFTER DRAFTALIGN_HOOK_OPTIONS \
  DRAFTALIGN_CA_FILE DRAFTALIGN_TOKENS_PER_MINUTE DRAFTALIGN_DRAFTER_DIR DRAFTALIGN_PUBLIC_KEYS >"${ENVIRONMENT}"
HOOKS=rl_hooks.stacks.slime

ray job submit --address="${RAY_ADDRESS:-http://127.0.0.1:8265}" --runtime-env="${ENVIRONMENT}" -- \
  python3 train.py \
  --custom-megatron-before-log-prob-hook-path "${HOOKS}.before_log_prob" \
  --custom-megatron-before-train-step-hook-path "${HOOKS}.before_train_step" \
  "$@"
