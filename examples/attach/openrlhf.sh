#!/usr/bin/env bash
# OpenRLHF's own PPO on a Ray cluster with draftalign in its policy's workers: what comes beside the options of your
# script. `pip install './rl_hooks[agent]'` of draftalign's checkout was run where Ray's workers run.
#
# > DRAFTALIGN_URL=http://service:8400 examples/attach/openrlhf.sh --actor.model_name_or_path /models/policy ...
#
# OpenRLHF 0.11.2 has no option for a drafter: add `"speculative_config": {...}` to `actor_kwargs` in its
# openrlhf/trainer/ray/vllm_engine.py, or its engines do not speculate. Give the run the same drafter, or every swap is
# refused: `draftalign warmup /models/policy ... --run "$DRAFTALIGN_RUN"` makes one, or name its folder in
# DRAFTALIGN_INITIAL_DRAFTER.
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

ray job submit --address="${RAY_ADDRESS:-http://127.0.0.1:8265}" --runtime-env="${ENVIRONMENT}" -- \
  python3 -m openrlhf.cli.train_ppo_ray --ds.zero_stage 3 --ds.packing_samples "$@"
