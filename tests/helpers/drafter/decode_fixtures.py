"""A tiny target whose next token can be learnt, drafters for it, and rollouts as a trainer would log them."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from helpers.made_once import made_once
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from drafter.batch import RolloutBatch
from drafter.model.eagle3 import DrafterConfig, Eagle3Drafter
from drafter.policy import Policy, TargetHead
from drafter.unroll.plan import make_plan
from drafter.vocabulary import DraftVocabulary
from examples.reference.decode import Generation, generate

AUX_LAYERS = (1, 2, 3)
#: A token that the default target emits within 20 in about 40 % of responses, greedy or sampled.
EOS = 59


def seeded(seed: int) -> torch.Generator:
    """A generator of its own."""
    return torch.Generator().manual_seed(seed)


def make_target(vocab_size: int = 64, sharpness: float = 6.0, seed: int = 0) -> Any:
    """A random Qwen3 of four layers; `sharpness` scales its logits, so that sampling is neither uniform nor certain."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        initializer_range=0.1,
        bos_token_id=None,
        eos_token_id=None,
    )
    target = Qwen3ForCausalLM(config).eval()
    with torch.no_grad():
        target.lm_head.weight.mul_(sharpness / (0.1 * 8))
        # Large embeddings: the next token then hangs mostly on the last one, which a small drafter can learn.
        target.get_input_embeddings().weight.mul_(20.0)
    return target


def make_drafter(target: Any, draft_vocab_size: int | None = None, seed: int = 1) -> Eagle3Drafter:
    """An untrained drafter over a random draft vocabulary, its lm_head the target's rows."""
    torch.manual_seed(seed)
    V = target.config.vocab_size
    D = draft_vocab_size or V
    ids = torch.randperm(V)[:D].sort().values
    config = DrafterConfig.from_target(target.config.to_dict(), AUX_LAYERS, D)
    drafter = Eagle3Drafter(config, DraftVocabulary(ids, V))
    drafter.init_from_target(target.lm_head.weight.detach()[ids])
    return drafter


def make_prompts(count: int, vocab_size: int, seed: int = 2) -> list[list[int]]:
    """Prompts of 1 to 9 random tokens."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, vocab_size, rng.integers(1, 10)).tolist() for _ in range(count)]


@torch.no_grad()
def read_whole(target: Any, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Logits [B, T, V] and features [B, T, A·H] of whole texts [B, T] in one pass, without cache or padding."""
    out = target(input_ids=ids, output_hidden_states=True, use_cache=False)
    return out.logits, torch.cat([out.hidden_states[i] for i in AUX_LAYERS], dim=-1)


def log_rollouts(
    target: Any, prompts: list[list[int]], generation: Generation, temperature: float = 1.0
) -> RolloutBatch:
    """Pack prompts and responses with features and log-probabilities of separate clean forward passes."""
    texts = [prompt + response for prompt, response in zip(prompts, generation.tokens, strict=True)]
    features, logprobs = [Tensor()] * len(texts), [Tensor()] * len(texts)
    last, logsumexp = [Tensor()] * len(texts), [Tensor()] * len(texts)
    for length in {len(text) for text in texts}:  # equal lengths together: no padding to get wrong
        rows = [row for row, text in enumerate(texts) if len(text) == length]
        ids = torch.tensor([texts[row] for row in rows])
        logits, aux = read_whole(target, ids)
        states = target.model(input_ids=ids, use_cache=False).last_hidden_state
        tempered = logits / (temperature or 1.0)
        law = torch.log_softmax(tempered, dim=-1)
        own = law[:, :-1].gather(2, ids[:, 1:, None])[:, :, 0]
        for place, row in enumerate(rows):
            features[row], last[row], logsumexp[row] = aux[place], states[place], tempered[place].logsumexp(-1)
            logprobs[row] = torch.cat([torch.zeros(1), own[place]])
    masks = [torch.arange(len(text)) >= len(prompt) for prompt, text in zip(prompts, texts, strict=True)]
    return RolloutBatch(
        input_ids=torch.tensor([token for text in texts for token in text]),
        cu_seqlens=torch.tensor([0, *map(len, texts)]).cumsum(0),
        loss_mask=torch.cat(masks),
        aux_hidden=torch.cat(features),
        last_hidden=torch.cat(last),
        logprobs=torch.cat(logprobs),
        logsumexp=torch.cat(logsumexp),
        temperature=temperature,
        rollout_ids=tuple(f"r{i}" for i in range(len(texts))),
    )


def policy_of(target: Any) -> Policy:
    """What drafters share with it."""
    head = TargetHead(target.get_output_embeddings().weight)
    return Policy(0, target.get_input_embeddings().weight.detach(), head)


def train_lightly(
    target: Any, drafter: Eagle3Drafter, batch: RolloutBatch, steps: int = 40, depth: int = 3
) -> Eagle3Drafter:
    """Cross-entropy on the emitted tokens over the unroll: enough to be often right, no trainer needed."""
    plan, policy = make_plan(batch.cu_seqlens, batch.loss_mask, depth), policy_of(target)
    to_draft = drafter.vocabulary.to_draft
    optimizer = torch.optim.Adam(drafter.parameters(), lr=1e-2)
    for _ in range(steps):
        unrolled = drafter.unroll(plan, batch, policy)
        loss = torch.zeros(())
        for step in range(depth):
            wanted = to_draft[batch.input_ids[unrolled.rows[step] + 2 + step]]
            logits = drafter.logits(unrolled.pre[step])
            loss = loss + torch.nn.functional.cross_entropy(logits, wanted, ignore_index=-1)
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
    return drafter.eval()


@cache
def default_target() -> Any:
    """The target that most tests read; whoever changes one makes it with `make_target`."""
    return make_target()


@cache
def schooling() -> RolloutBatch:
    """Rollouts of the default target to train on."""
    target, prompts = default_target(), make_prompts(60, 64, seed=9)
    made = generate(target, None, prompts, max_tokens=20, generator=torch.Generator().manual_seed(9))
    return log_rollouts(target, prompts, made)


@cache
def greedy_texts() -> Generation:
    """What the default target says to 120 prompts without a drafter."""
    prompts = make_prompts(120, 64)
    return made_once(
        "greedy_texts",
        lambda: generate(default_target(), None, prompts, max_tokens=24, eos_id=EOS, temperature=0.0),
    )


@cache
def schooled() -> Eagle3Drafter:
    """A drafter of 56 of the default target's tokens that is often right; trained once, only read."""
    return made_once(
        "schooled",
        lambda: train_lightly(default_target(), make_drafter(default_target(), 56), schooling(), steps=25),
    )


def chi_square_excess(counts: np.ndarray, expected: np.ndarray) -> float:
    """Standard normal score of a chi-square statistic (Wilson-Hilferty), cells expecting under 5 pooled into one."""
    rare = expected < 5
    counts = np.append(counts[~rare], counts[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    used = expected > 0
    if not used.all() and counts[~used].sum():
        return float("inf")
    counts, expected = counts[used], expected[used]
    degrees = counts.size - 1
    statistic = float((np.square(counts - expected) / expected).sum())
    spread = 2 / (9 * degrees)
    return float(((statistic / degrees) ** (1 / 3) - (1 - spread)) / spread**0.5)


@torch.no_grad()
def exact_law(target: Any, prompt: list[int], count: int) -> np.ndarray:
    """Probability of every continuation of `count` tokens, by reading all of them: [V]*count, flattened."""
    V = target.config.vocab_size
    law = torch.ones(1, dtype=torch.float64)
    texts = torch.tensor([prompt])
    for _ in range(count):
        step = torch.softmax(target(texts, use_cache=False).logits[:, -1].double(), dim=-1)
        law = (law[:, None] * step).flatten()
        texts = torch.cat([texts.repeat_interleave(V, 0), torch.arange(V).repeat(len(texts))[:, None]], dim=1)
    return law.numpy()
