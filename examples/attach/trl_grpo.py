"""TRL's GRPOTrainer on the demo's small policy, with draftalign attached by one line.

In one terminal, then in another:

> DRAFTALIGN_VOCAB_MIN_TOKENS=500 make up
> .venv/bin/python -m examples.attach.trl_grpo --steps 4        # then see http://127.0.0.1:8400/?run=trl

The four steps send some 1,000 response tokens. By default a run without a first drafter waits for 50,000 of them before
its draft vocabulary is made, and compares no features until then: hence 500, for a trial. What to look at, some
seconds after the last step: the log of `make up` says that more than 500 response tokens are gathered, then "trl:
policy 3 ... train: ...", and `dead` in what this prints is 0. `draftalign dead --run trl` lists batches that died, and
why. A first drafter is served once later rollouts have judged it: give more `--steps` to see one.
"""

from __future__ import annotations

import argparse
import tempfile


def main() -> None:
    """Train; print what the hook sent."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8400", help="of the service")
    parser.add_argument("--run", default="trl")
    parser.add_argument("--steps", type=int, default=4)
    options = parser.parse_args()

    from datasets import Dataset
    from transformers import AutoModelForCausalLM
    from trl import GRPOConfig, GRPOTrainer

    from examples import elicit
    from rl_hooks.trl import attach

    task = elicit.TASK
    config = GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        max_steps=options.steps,
        per_device_train_batch_size=16,
        num_generations=4,
        max_completion_length=task.max_answer_tokens,
        learning_rate=1e-3,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        bf16=False,
    )
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(task.base_policy),
        reward_funcs=task.reward,
        args=config,
        train_dataset=Dataset.from_dict(dict(task.curriculum(options.steps, 4, 0))),
        processing_class=task.build_tokenizer(),
    )
    # After construction, before train(). Four layers are too few for EAGLE-3's own choice: leave `aux_layers` out for
    # your model.
    attachment = attach(trainer, options.url, run=options.run, aux_layers=(1, 2, 3))
    trainer.train()
    attachment.flush(30.0)
    print(attachment.stats())
    attachment.close()


if __name__ == "__main__":
    main()
