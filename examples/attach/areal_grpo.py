"""AReaL's GRPO on GSM8K with draftalign: AReaL's own script, and one name of it changed.

In AReaL's environment, where `pip install './rl_hooks[agent]'` of draftalign's checkout (here /src/draftalign) was run
on every machine, with a configuration of AReaL's:

> DRAFTALIGN_URL=http://service:8400 python /src/draftalign/examples/attach/areal_grpo.py --config gsm8k_grpo.yaml

The configuration needs an `fsdp` actor, and a pass for proximal log-probabilities (`use_decoupled_loss: true` with
`prox_logp_method: recompute`, or `recompute_logprob: true`). AReaL has no option for a drafter: docs/guide/stacks.md.
"""

from __future__ import annotations

import sys

from areal.api.cli_args import GRPOConfig, load_expr_config
from areal.dataset import get_custom_dataset
from areal.utils.hf_utils import load_hf_tokenizer

from rl_hooks.stacks.areal import DraftalignPPOTrainer  # in place of areal.PPOTrainer


def main(arguments: list[str]) -> None:
    """Train as the configuration says."""
    config, _ = load_expr_config(arguments, GRPOConfig)
    tokenizer = load_hf_tokenizer(config.tokenizer_path)
    train = get_custom_dataset(split="train", dataset_config=config.train_dataset, tokenizer=tokenizer)
    test = get_custom_dataset(split="test", dataset_config=config.valid_dataset, tokenizer=tokenizer)
    with DraftalignPPOTrainer(config, train_dataset=train, valid_dataset=test) as trainer:
        trainer.train(
            workflow="areal.workflow.rlvr.RLVRWorkflow",
            workflow_kwargs={
                "reward_fn": "areal.reward.gsm8k.gsm8k_reward_fn",
                "gconfig": config.gconfig,
                "tokenizer": config.tokenizer_path,
            },
        )


if __name__ == "__main__":
    main(sys.argv[1:])
