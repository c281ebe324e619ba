"""The reference decoders side by side on one policy and one drafter: plain, a chain as engines draft, an EAGLE-2 tree.

All three must write the same text when nothing is drawn (temperature 0); what they need for it differs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import torch

from drafter.batch import RolloutBatch
from drafter.decode import Generation, generate
from drafter.model import Eagle3Drafter
from drafter.tree import generate_tree

BRANCHES = 4
NODES = 16


def compare_decoders(
    policy: Any,
    drafter: Eagle3Drafter,
    prompts: Sequence[Sequence[int]],
    *,
    depth: int,
    max_tokens: int,
    eos_id: int | None,
    temperature: float = 1.0,
) -> dict[str, float | int]:
    """Tokens per round of a chain of `depth` drafts and of a tree of the same depth, sampled and greedy.

    `policy` is a transformers causal LM (`drafter.decode` says which), in the drafter's precision, on its device.
    `greedy_texts_equal` counts prompts on which plain decoding, chain and tree write the same text: all, if lossless
    (but for ties, which rounding may break otherwise where more tokens are read at once).
    """
    drafter.embed_tokens = policy.get_input_embeddings().weight.detach().float()
    common: dict[str, Any] = {"max_tokens": max_tokens, "eos_id": eos_id}

    def chain(temperature: float) -> Generation:
        dice = torch.Generator().manual_seed(0)
        return generate(policy, drafter, prompts, depth=depth, temperature=temperature, generator=dice, **common)

    def tree(temperature: float) -> Generation:
        dice = torch.Generator().manual_seed(0)
        size = {"depth": depth, "branches": min(BRANCHES, drafter.config.draft_vocab_size), "nodes": NODES}
        return generate_tree(policy, drafter, prompts, temperature=temperature, generator=dice, **size, **common)

    plain = generate(policy, None, prompts, depth=0, temperature=0.0, **common)
    greedy = {"chain": chain(0.0), "tree": tree(0.0)}
    texts = zip(plain.tokens, *(found.tokens for found in greedy.values()), strict=True)
    return {
        "prompts": len(prompts),
        "greedy_texts_equal": sum(a == b == c for a, b, c in texts),
        "alpha_chain": chain(temperature).alpha,
        "alpha_tree": tree(temperature).alpha,
        "alpha_chain_greedy": greedy["chain"].alpha,
        "alpha_tree_greedy": greedy["tree"].alpha,
    }


def distinct_prompts(batches: Iterable[RolloutBatch], count: int) -> list[list[int]]:
    """The first `count` prompts (what precedes a rollout's first response token) that differ, reading no further."""
    found: dict[tuple[int, ...], None] = {}
    for batch in batches:
        for begin, end in pairwise(batch.cu_seqlens.tolist()):
            generated = batch.loss_mask[begin:end].nonzero()
            if generated.numel() and int(generated[0]):  # nothing can be decoded after nothing
                found[tuple(batch.input_ids[begin : begin + int(generated[0])].tolist())] = None
            if len(found) == count:
                return [list(prompt) for prompt in found]
    return [list(prompt) for prompt in found]
