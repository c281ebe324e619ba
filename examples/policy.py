"""The demo's base policies: a small Qwen3 for each task, pre-trained from scratch on the task's text.

    python -m examples.policy --task elicit --out DIR [--seed 0]      # reruns the recipe whole

The recipe (`Task.pretraining`): some hundred steps of the *teach* text (half of the answers worked), then steps of the
real one, where they are rare; 64 sequences a step, AdamW whose learning rate falls at the end. Loss is on answers only:
prompts are random, so nothing is to be learnt from them. The result is stored in bfloat16 and computes in float32;
figures are measured on the stored weights. `Task.base_policy` holds what the recipe gives with seed 0.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from examples import TASKS, elicit
from examples.task import EOS, PAD, PretrainRecipe, Task

#: The shipped checkpoint of the task `elicit`.
BASE_POLICY: Final = elicit.TASK.base_policy
#: The layers whose input an EAGLE-3 drafter of this policy reads. (2, L//2, L-3) would name layer 2 twice at L = 4.
AUX_LAYERS: Final = (1, 2, 3)

_IGNORED: Final = -100


@dataclass(frozen=True, slots=True)
class Figures:
    """What a policy does on sampled prompts at temperature 1."""

    prompts: int
    reward: float
    worked_fraction: float
    #: Reward of the worked answers alone; nan if there are none.
    accuracy_given_worked: float
    #: Mean over answers, end of sequence included.
    answer_tokens: float
    #: Mean over the answers' tokens of the policy's entropy, in nats.
    entropy_nats: float

    def __str__(self) -> str:
        """One line for people."""
        return (
            f"reward {self.reward:.3f}, worked answers {self.worked_fraction:.1%}, accuracy given worked "
            f"{self.accuracy_given_worked:.3f}, answer {self.answer_tokens:.1f} tokens, entropy "
            f"{self.entropy_nats:.3f} nats per token ({self.prompts} prompts)"
        )


def new_policy(seed: int, task: Task = elicit.TASK) -> Any:
    """A randomly initialised `Qwen3ForCausalLM` (hidden 64, 4 layers, head size 32 so that real engines run it)."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=len(task.vocabulary),
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        initializer_range=0.1,  # about 1/sqrt(hidden): at 0.02 some seeds have not learnt to add by step 550
        use_cache=True,
        bos_token_id=None,
        eos_token_id=task.eos_id,
        pad_token_id=task.vocabulary.index(PAD),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen3ForCausalLM(config)


def sample_batch(task: Task, tokenizer: Any, stage: str, count: int, rng: random.Random) -> tuple[Tensor, Tensor]:
    """`count` texts as (input ids, labels), int64 [count, T], padded on the right; prompts and padding not learnt."""
    texts = [" ".join((*task.sample_text(stage, rng), EOS)) for _ in range(count)]
    rows = [torch.tensor(ids) for ids in tokenizer(texts)["input_ids"]]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=tokenizer.pad_token_id)
    labels = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=_IGNORED)
    labels[:, : task.prompt_tokens] = _IGNORED
    return ids, labels


def pretrain(
    task: Task, seed: int, recipe: PretrainRecipe | None = None, report: Callable[[int, float], None] | None = None
) -> tuple[Any, list[float]]:
    """Run the task's recipe, or another one; return the policy and the loss of every step (nats per answer token).

    `report(step, loss)` is called after each step.
    """
    recipe = recipe or task.pretraining
    model, tokenizer = new_policy(seed, task), task.build_tokenizer()
    model.train()
    rng = random.Random(seed)  # noqa: S311 - text for a demo, not a secret
    optimizers = _optimizers(model, recipe)
    steps = recipe.steps
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(
            optimizer,
            lambda step: min((step + 1) / recipe.warmup_steps, max(0.05, (steps - step) / recipe.decay_steps), 1.0),
        )
        for optimizer in optimizers
    ]
    losses = []
    for step in range(steps):
        stage = "teach" if step < recipe.teach_steps else "real"
        ids, labels = sample_batch(task, tokenizer, stage, recipe.sequences_per_step, rng)
        # Right padding needs no attention mask: causal attention never looks at it.
        logits = model(input_ids=ids, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=_IGNORED
        )
        model.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.grad_clip)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()
        losses.append(loss.item())
        if report is not None:
            report(step, losses[-1])
    return model.eval(), losses


def _optimizers(model: Any, recipe: PretrainRecipe) -> list[torch.optim.Optimizer]:
    """AdamW for all, or Muon for the layers' matrices and AdamW for the rest."""
    by_muon = [p for n, p in model.named_parameters() if recipe.muon and p.ndim == 2 and "embed" not in n]
    kept = {id(p) for p in by_muon}
    rest = [p for p in model.parameters() if id(p) not in kept]
    adamw = torch.optim.AdamW(rest, lr=recipe.learning_rate, betas=(0.9, 0.98), weight_decay=recipe.weight_decay)
    if not by_muon:
        return [adamw]
    muon = torch.optim.Muon(
        by_muon, lr=recipe.learning_rate, weight_decay=recipe.weight_decay, adjust_lr_fn="match_rms_adamw"
    )
    return [adamw, muon]


def save(model: Any, directory: Path, task: Task = elicit.TASK) -> None:
    """Write config, tokenizer and weights: stored in bfloat16, declared float32, which is what they compute in."""
    copy.deepcopy(model).to(torch.bfloat16).save_pretrained(directory)
    task.build_tokenizer().save_pretrained(directory)
    # save_pretrained notes the dtype of the weights; loaders must cast them up, since RL trains them.
    path = directory / "config.json"
    config = json.loads(path.read_text())
    config["dtype"] = "float32"
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def load(directory: Path = BASE_POLICY) -> tuple[Any, Any]:
    """(model in float32 and evaluation mode, tokenizer) of a checkpoint directory."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, local_files_only=True)
    return model.eval(), AutoTokenizer.from_pretrained(directory, local_files_only=True)


@torch.inference_mode()
def measure(model: Any, task: Task, *, prompts: int = 512, seed: int = 1) -> Figures:
    """Sample one answer for each of `prompts` prompts at temperature 1 and judge them."""
    tokenizer, texts = task.build_tokenizer(), task.sample_prompts(prompts, seed)
    ids = tokenizer(texts, return_tensors="pt")["input_ids"]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=task.max_answer_tokens,
        )
    answers = output[:, ids.shape[1] :]  # [prompts, T]
    is_eos = answers == tokenizer.eos_token_id
    mask = is_eos.cumsum(1) - is_eos.long() == 0  # true up to and including the first end of sequence
    logprobs = model(input_ids=output, use_cache=False).logits[:, ids.shape[1] - 1 : -1].log_softmax(-1)
    entropy = -(logprobs.exp() * logprobs).sum(-1)[mask].mean().item()
    decoded = tokenizer.batch_decode(answers, skip_special_tokens=True)
    rewards = task.reward(texts, decoded)
    worked = [r for r, text, answer in zip(rewards, texts, decoded, strict=True) if task.is_worked(text, answer)]
    return Figures(
        prompts=prompts,
        reward=sum(rewards) / prompts,
        worked_fraction=len(worked) / prompts,
        accuracy_given_worked=sum(worked) / len(worked) if worked else math.nan,
        answer_tokens=mask.sum(1).float().mean().item(),
        entropy_nats=entropy,
    )


def main() -> None:
    """Rerun the recipe, print progress and figures, and keep the checkpoint if `--out` says where."""
    parser = argparse.ArgumentParser(prog="python -m examples.policy", description=main.__doc__)
    parser.add_argument("--task", choices=TASKS, default=elicit.TASK.name)
    parser.add_argument("--out", type=Path, help="directory for the checkpoint (default: keep nothing)")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    # On shared cores more threads make so small a model slower: they wait for each other at every operation.
    torch.set_num_threads(1)
    task, began = TASKS[arguments.task], time.process_time()
    steps = task.pretraining.steps

    def report(step: int, loss: float) -> None:
        if step % 50 == 0 or step == steps - 1:
            elapsed = time.process_time() - began
            print(f"step {step:4d}/{steps}  loss {loss:.4f} nats per token  {elapsed:6.1f} CPU-seconds", flush=True)

    model, _ = pretrain(task, arguments.seed, report=report)
    model.to(torch.bfloat16).to(torch.float32)  # what is stored is what is measured
    print(measure(model, task, prompts=2048))
    if arguments.out is not None:
        save(model, arguments.out, task)
        print(f"wrote {arguments.out}")


if __name__ == "__main__":
    main()
