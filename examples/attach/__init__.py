"""One short script for each way in. `tests/stacks/test_examples.py` says what was checked of each.

`trl_grpo` and `own_loop` run on a CPU in a minute, beside a service that was started with
`DRAFTALIGN_VOCAB_MIN_TOKENS=500`, else their few tokens wait for more. The others stand where the script of your stack
does: `verl.sh`, `openrlhf.sh`, `skyrl.sh`, `nemo_rl.sh`, `slime.sh`, `areal_grpo`, `prime_rl`, `trl_async_grpo`,
`megatron_core`, and `on_ray` for a driver of your own.
"""
