#!/usr/bin/env bash
# SkyRL's own trainer on a Ray cluster with draftalign in its FSDP policy's workers: what comes beside the options of
# your script. `pip install './rl_hooks[agent]'` of draftalign's checkout was run where Ray's workers run.
#
# > DRAFTALIGN_URL=http://service:8400 examples/attach/skyrl.sh trainer.policy.model.path=/models/policy ...
#
# /models/drafter is what `draftalign warmup /models/policy ... --run "$DRAFTALIGN_RUN"` wrote.
# What was run of the vLLM that SkyRL pins is in docs/guide/stacks.md.
set -euo pipefail
: "${DRAFTALIGN_URL:?the service, as http://host:port}"
export DRAFTALIGN_RUN="${DRAFTALIGN_RUN:-default}"

# In a file, because everybody on this machine may read a command's options.
ENVIRONMENT="$(mktemp)"
trap 'rm -f "${ENVIRONMENT}"' EXIT
python3 -I -c 'import json, os, sys; print(json.dumps({"worker_process_setup_hook": sys.argv[1],
  "env_vars": {n: os.environ[n] for n in sys.argv[2:] if n in os.environ}}))' rl_hooks.stacks.on_ray.install \
  DRAFTALIGN_URL DRAFTALIGN_RUN DRAFTALIGN_TOKEN DRAFTALIGN_INITIAL_DRAFTER DRAFTALIGN_AUX_LAYERS \
  DRAFTALIGN_HOOK_OPTIONS DRAFTALIGN_CA_FILE DRAFTALIGN_SAMPLE_FRACTION DRAFTALIGN_TOKENS_PER_MINUTE \
  DRAFTALIGN_DRAFTER_DIR DRAFTALIGN_PUBLIC_KEYS >"${ENVIRONMENT}"
DRAFTS="{method: eagle3, model: ${DRAFTER:-/models/drafter}, num_speculative_tokens: 4}"

ray job submit --address="${RAY_ADDRESS:-http://127.0.0.1:8265}" --runtime-env="${ENVIRONMENT}" -- \
  python3 -m skyrl.train.entrypoints.main_base \
  trainer.strategy=fsdp \
  trainer.policy.sequence_parallel_size=1 \
  generator.inference_engine.backend=vllm \
  "generator.inference_engine.speculative_config=${DRAFTS}" \
  "$@"
