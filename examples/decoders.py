"""The reference decoders side by side on one policy and one drafter: plain, a chain as engines draft, an EAGLE-2 tree.

All three must write the same text when nothing is drawn (temperature 0); what they need for it differs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from drafter.decode import Generation, generate
from drafter.model import Eagle3Drafter
from drafter.tree import generate_tree

BRANCHES = 4
NODES = 16


def compare_decoders(
    policy: Any, drafter: Eagle3Drafter, prompts: Sequence[Sequence[int]], *, depth: int, max_tokens: int, eos_id: int
) -> dict[str, float | int]:
    """Tokens per round of a chain of `depth` drafts and of a tree of the same depth, sampled and greedy.

    `greedy_texts_equal` counts prompts on which plain decoding, chain and tree write the same text: all, if lossless.
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
        "alpha_chain": chain(1.0).alpha,
        "alpha_tree": tree(1.0).alpha,
        "alpha_chain_greedy": greedy["chain"].alpha,
        "alpha_tree_greedy": greedy["tree"].alpha,
    }
