r"""TRL's AsyncGRPOTrainer beside a vLLM that speculates, with draftalign attached by one line.

It needs two GPUs and was run without one: in the test TRL's trainer is real, and sampler and NCCL are not. The server
in one terminal, in an environment with vLLM 0.31.0 (the newest that TRL allows, and new enough for swaps), where
`pip install './rl_hooks[agent]'` of draftalign's checkout was run; the trainer in another, from the checkout:

> CUDA_VISIBLE_DEVICES=0 VLLM_SERVER_DEV_MODE=1 DRAFTALIGN_URL=http://service:8400 DRAFTALIGN_RUN=async-grpo \
>   DRAFTALIGN_SAMPLE_FRACTION=0 vllm serve /models/policy --weight-transfer-config '{"backend": "nccl"}' \
>   --dtype float32 --logprobs-mode processed_logprobs \
>   --speculative-config '{"method": "eagle3", "model": "/models/drafter", "num_speculative_tokens": 4}'
> CUDA_VISIBLE_DEVICES=1 python -m examples.attach.trl_async_grpo --url http://service:8400 --model /models/policy \
>   --initial-drafter /models/drafter

The task stands for yours: the number that the prompt asks for, and nothing else.
"""

from __future__ import annotations

import argparse
import tempfile
from typing import Any


def reward(completions: list[Any], number: list[str], **_: Any) -> list[float]:
    """1 where the answer is the number that was asked for, less where more is said, 0 where it is not in it."""
    answers = [completion[-1]["content"].strip() for completion in completions]
    return [len(right) / len(said) if right in said else 0.0 for said, right in zip(answers, number, strict=True)]


def main() -> None:
    """Train; print what the hook sent."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="the policy that vLLM serves: a folder or a name at the hub")
    parser.add_argument("--vllm", default="http://127.0.0.1:8000", help="the server that generates")
    parser.add_argument("--url", default="http://127.0.0.1:8400", help="of the service")
    parser.add_argument("--run", default="async-grpo")
    parser.add_argument("--initial-drafter", required=True, help="the drafter that vLLM was started with")
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args()

    from datasets import Dataset
    from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

    from rl_hooks.trl import attach

    numbers = [str(number) for number in range(1000, 2000)]
    prompts = [[{"role": "user", "content": f"Say {number} and nothing else."}] for number in numbers]
    config = AsyncGRPOConfig(
        output_dir=tempfile.mkdtemp(),
        max_steps=options.steps,
        per_device_train_batch_size=8,
        max_completion_length=64,
        vllm_server_base_url=options.vllm,
        save_strategy="no",
        report_to="none",
    )
    trainer = AsyncGRPOTrainer(
        model=options.model,
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_dict({"prompt": prompts, "number": numbers}),
    )
    # After construction, before train().
    with attach(trainer, options.url, run=options.run, initial_drafter=options.initial_drafter) as attachment:
        trainer.train()
        attachment.flush(30.0)
        print(attachment.stats())


if __name__ == "__main__":
    main()
