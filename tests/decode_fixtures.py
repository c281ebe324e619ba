"""A tiny target whose next token can be learnt, drafters for it, and rollouts as a trainer would log them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from drafter.batch import RolloutBatch
from drafter.decode import Generation
from drafter.model import DrafterConfig, Eagle3Drafter
from drafter.unroll import make_plan, unroll
from drafter.vocabulary import DraftVocabulary

AUX_LAYERS = (1, 2, 3)
#: A token that the default target emits within 20 in about 40 % of responses, greedy or sampled.
EOS = 59


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
    drafter = Eagle3Drafter(config, DraftVocabulary(ids, V), target.get_input_embeddings().weight)
    drafter.init_from_target(target.lm_head.weight.detach()[ids])
    return drafter


def make_prompts(count: int, vocab_size: int, seed: int = 2) -> list[list[int]]:
    """Prompts of 1 to 9 random tokens."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, vocab_size, rng.integers(1, 10)).tolist() for _ in range(count)]


@torch.no_grad()
def read_whole(target: Any, ids: list[int]) -> tuple[Tensor, Tensor]:
    """Logits [T, V] and features [T, A·H] of one sequence, in one pass without cache or padding."""
    out = target(input_ids=torch.tensor([ids]), output_hidden_states=True, use_cache=False)
    return out.logits[0], torch.cat([out.hidden_states[i][0] for i in AUX_LAYERS], dim=-1)


def log_rollouts(
    target: Any, prompts: list[list[int]], generation: Generation, temperature: float = 1.0
) -> RolloutBatch:
    """Pack prompts and responses with features and log-probabilities of separate clean forward passes."""
    ids, mask, features, logprobs, lengths = [], [], [], [], [0]
    for prompt, response in zip(prompts, generation.tokens, strict=True):
        text = prompt + response
        logits, aux = read_whole(target, text)
        law = torch.log_softmax(logits / (temperature or 1.0), dim=-1)
        own = law[:-1].gather(1, torch.tensor(text[1:])[:, None])[:, 0]
        ids.append(torch.tensor(text))
        mask.append(torch.arange(len(text)) >= len(prompt))
        features.append(aux)
        logprobs.append(torch.cat([torch.zeros(1), own]))
        lengths.append(len(text))
    return RolloutBatch(
        input_ids=torch.cat(ids),
        cu_seqlens=torch.tensor(lengths).cumsum(0),
        loss_mask=torch.cat(mask),
        aux_hidden=torch.cat(features),
        logprobs=torch.cat(logprobs),
        temperature=temperature,
        rollout_ids=tuple(f"r{i}" for i in range(len(prompts))),
    )


def train_lightly(drafter: Eagle3Drafter, batch: RolloutBatch, steps: int = 40, depth: int = 3) -> Eagle3Drafter:
    """Cross-entropy on the emitted tokens over the unroll: enough to be often right, no trainer needed."""
    plan = make_plan(batch.cu_seqlens, batch.loss_mask, depth)
    to_draft = drafter.vocabulary.to_draft
    optimizer = torch.optim.Adam(drafter.parameters(), lr=1e-2)
    for _ in range(steps):
        unrolled = unroll(drafter, plan, batch.input_ids, batch.aux_hidden)
        loss = torch.zeros(())
        for step in range(depth):
            wanted = to_draft[batch.input_ids[unrolled.rows[step] + 2 + step]]
            logits = drafter.logits(unrolled.pre[step])
            loss = loss + torch.nn.functional.cross_entropy(logits, wanted, ignore_index=-1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return drafter.eval()


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
    return ((statistic / degrees) ** (1 / 3) - (1 - 2 / (9 * degrees))) / (2 / (9 * degrees)) ** 0.5
