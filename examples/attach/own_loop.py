"""A training loop of one's own (REINFORCE in twenty lines) with `DrafterHook` around the forward that happens anyway.

In one terminal, then in another:

> DRAFTALIGN_VOCAB_MIN_TOKENS=500 make up
> .venv/bin/python -m examples.attach.own_loop      # then see http://127.0.0.1:8400/?run=own-loop

It trains until the service has published a first drafter: some ten steps, each of which waits for the worker. By
default a run without a first drafter waits for 50,000 response tokens before its draft vocabulary is made, and compares
no features until then: hence 500, for a trial. What to look at then: the page says "Published", or how many tokens per
round the drafter gives, and `dead` in what this prints is 0. `draftalign dead --run own-loop` lists batches that died,
with the reason. With `--steps 4` it takes so many steps and waits for nothing.
"""

from __future__ import annotations

import argparse
import itertools
import time

import torch

from rl_hooks.hook import DrafterHook

PROMPTS, PROMPT_TOKENS, ANSWER_TOKENS = 16, 8, 24
#: Without `--steps`: how long a step waits for the worker, and after how many no drafter is expected any more.
PAUSE_SECONDS, MOST_STEPS = 5.0, 200


def is_published(hook: DrafterHook, trained: float) -> bool:
    """Whether a drafter is. Waits a while for more than so many trained batches, which a real loop does not."""
    deadline = time.monotonic() + PAUSE_SECONDS
    while True:
        if not hook.flush(30.0):  # a real loop trains on
            raise SystemExit(f"the service takes nothing: {hook.stats()['last_error']}")
        stands = hook.stats()["run_stands"]
        if "drafter_version" in stands or stands.get("trained", 0) > trained or time.monotonic() > deadline:
            return "drafter_version" in stands
        time.sleep(1.0)


def main() -> None:
    """Train; print what the hook sent."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8400", help="of the service")
    parser.add_argument("--run", default="own-loop")
    parser.add_argument("--steps", type=int, help="default: until a drafter is published")
    options = parser.parse_args()

    from transformers import AutoModelForCausalLM

    from examples import elicit

    torch.manual_seed(0)
    policy = AutoModelForCausalLM.from_pretrained(elicit.TASK.base_policy)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-4)
    # Answers of one length. Not by `min_new_tokens`: it forbids the end token, and then the sampler does not draw from
    # the policy's own distribution, which is what the log-probabilities are of.
    policy.generation_config.eos_token_id = None
    # Four layers are too few for EAGLE-3's own choice: leave `aux_layers` out for your model.
    hook = DrafterHook(policy, options.url, run=options.run, aux_layers=(1, 2, 3))
    for step in itertools.count():
        if step == options.steps:
            break
        prompts = torch.randint(4, policy.config.vocab_size, (PROMPTS, PROMPT_TOKENS))  # [B, P]
        ids = policy.generate(  # [B, S]
            prompts, attention_mask=torch.ones_like(prompts), do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
            max_new_tokens=ANSWER_TOKENS,
        )  # fmt: skip
        generated = torch.zeros_like(ids)  # [B, S], 1 where the policy wrote the token
        generated[:, PROMPT_TOKENS:] = 1
        rewards = (ids[:, PROMPT_TOKENS:] % 2 == 0).float().mean(dim=1)  # [B]
        mask = torch.ones_like(ids)
        with hook.capture(
            input_ids=ids, attention_mask=mask, loss_mask=generated, policy_version=step, rewards=rewards
        ):
            logits = policy(input_ids=ids, attention_mask=mask, use_cache=False).logits  # [B, S, V]
        taken = logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]  # [B, S - 1]
        advantage = rewards - rewards.mean()
        loss = -(advantage[:, None] * taken * generated[:, 1:]).sum() / generated.sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        trained = hook.stats()["run_stands"].get("trained", 0)
        if options.steps is None and (is_published(hook, trained) or step + 1 == MOST_STEPS):
            break
    hook.flush(30.0)
    print(hook.stats())
    hook.close()


if __name__ == "__main__":
    main()
