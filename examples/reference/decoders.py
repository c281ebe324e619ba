"""The reference decoders side by side on one policy and one drafter: plain, a chain as engines draft, an EAGLE-2 tree.

All three must write the same text when nothing is drawn (temperature 0); what they need for it differs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import torch

from drafter.model.eagle3 import Eagle3Drafter
from examples.reference.decode import Generation, generate
from examples.reference.tree import generate_tree

BRANCHES = 4
NODES = 16


def compare_decoders(
    policy: Any,
    drafter: Eagle3Drafter,
    prompts: Sequence[Sequence[int]],
    *,
    depth: int,
    max_tokens: int,
    eos_id: int | Collection[int] | None,
) -> dict[str, Any]:
    """Tokens per round of a chain of `depth` drafts and of a tree of the same depth, sampled and greedy.

    `policy` is a transformers causal LM (`examples.reference.decode` says which), in the drafter's precision, on its
    device. All prompts are read in one forward. An α without any round is nan.

    `greedy_texts_equal` counts prompts on which plain decoding, chain and tree write the same text: all, if lossless
    (but for ties, which rounding may break otherwise where more tokens are read at once).
    """
    branches = min(BRANCHES, drafter.config.draft_vocab_size)
    common: dict[str, Any] = {"max_tokens": max_tokens, "eos_id": eos_id}
    plain = partial(generate, policy, None, depth=0, **common)
    chain = partial(generate, policy, drafter, depth=depth, **common)
    tree = partial(generate_tree, policy, drafter, depth=depth, branches=branches, nodes=NODES, **common)

    def run(decode: Callable[..., Generation], temperature: float) -> Generation:
        return decode(prompts, temperature=temperature, generator=torch.Generator().manual_seed(0))

    greedy = [run(decode, 0.0) for decode in (plain, chain, tree)]
    texts = zip(*(found.tokens for found in greedy), strict=True)
    return {
        "prompts": len(prompts),
        "greedy_texts_equal": sum(a == b == c for a, b, c in texts),
        "alpha_chain": run(chain, 1.0).alpha,
        "alpha_tree": run(tree, 1.0).alpha,
        "alpha_chain_greedy": greedy[1].alpha,
        "alpha_tree_greedy": greedy[2].alpha,
    }
