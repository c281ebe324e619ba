"""The reference decoders side by side on one policy and one drafter: plain, a chain as engines draft, an EAGLE-2 tree.

All three must write the same text when nothing is drawn (temperature 0); what they need for it differs.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from drafter.batch import RolloutBatch
from drafter.model.eagle3 import Eagle3Drafter
from drafter.reference.decode import Generation, embedding, generate
from drafter.reference.tree import generate_tree
from drafter.replay.evaluate import _plain

BRANCHES = 4
NODES = 16

#: Logits of a forward pass, in elements: 1 GiB of float32.
_LOGITS_ELEMENTS = 1 << 28


@dataclass(frozen=True, slots=True)
class Prompt:
    """What to decode after, and how the rollouts went on after it."""

    tokens: Sequence[int]
    temperature: float = 1.0
    warped: bool = False  # by top-p or top-k, which the reference decoders do not apply


def compare_decoders(
    policy: Any,
    drafter: Eagle3Drafter,
    prompts: Sequence[Prompt],
    *,
    depth: int,
    max_tokens: int,
    eos_id: int | Collection[int] | None,
) -> dict[str, Any]:
    """Tokens per round of a chain of `depth` drafts and of a tree of the same depth, sampled and greedy.

    `policy` is a transformers causal LM (`drafter.reference.decode` says which), in the drafter's precision, on its
    device. Prompts are decoded in groups, so that logits fit in memory. Sampled figures are at each prompt's own
    temperature; `warped` says that they are of another distribution than some of the rollouts. Ready for JSON: an α
    without any round is None.

    `greedy_texts_equal` counts prompts on which plain decoding, chain and tree write the same text: all, if lossless
    (but for ties, which rounding may break otherwise where more tokens are read at once).
    """
    branches = min(BRANCHES, drafter.config.draft_vocab_size)
    common: dict[str, Any] = {"max_tokens": max_tokens, "eos_id": eos_id}
    plain = partial(generate, policy, None, depth=0, **common)
    chain = partial(generate, policy, drafter, depth=depth, **common)
    tree = partial(generate_tree, policy, drafter, depth=depth, branches=branches, nodes=NODES, **common)
    groups = list(_groups(prompts, embedding(policy).shape[0]))

    def run(decode: Callable[..., Generation], *, greedy: bool) -> Generation:
        dice = torch.Generator().manual_seed(0)
        return Generation.concat(
            [
                decode(
                    [prompt.tokens for prompt in group],
                    temperature=0.0 if greedy else group[0].temperature,
                    generator=dice,
                )
                for group in groups
            ]
        )

    greedy = [run(decode, greedy=True) for decode in (plain, chain, tree)]
    texts = zip(*(found.tokens for found in greedy), strict=True)
    return {
        "prompts": len(prompts),
        "greedy_texts_equal": sum(a == b == c for a, b, c in texts),
        "alpha_chain": _plain(run(chain, greedy=False).alpha),
        "alpha_tree": _plain(run(tree, greedy=False).alpha),
        "alpha_chain_greedy": _plain(greedy[1].alpha),
        "alpha_tree_greedy": _plain(greedy[2].alpha),
        "warped": any(prompt.warped for prompt in prompts),
    }


def distinct_prompts(batches: Iterable[RolloutBatch], count: int) -> list[Prompt]:
    """The first `count` prompts (what precedes a rollout's first response token) that differ, reading no further."""
    found: dict[tuple[int, ...], Prompt] = {}
    for batch in batches:
        for begin, end in itertools.pairwise(batch.cu_seqlens.tolist()):
            generated = batch.loss_mask[begin:end].nonzero()
            if generated.numel() and int(generated[0]):  # nothing can be decoded after nothing
                text = tuple(batch.input_ids[begin : begin + int(generated[0])].tolist())
                found.setdefault(text, Prompt(text, batch.temperature, batch.warped))
            if len(found) == count:
                return list(found.values())
    return list(found.values())


def _groups(prompts: Sequence[Prompt], vocabulary: int) -> Iterator[list[Prompt]]:
    """Consecutive prompts of one temperature, as many (at least one) as keep the logits of a forward pass bounded.

    Most come of the padded prompts, which are read in one pass, or after short ones of a tree.
    """
    group: list[Prompt] = []
    longest = 0
    for prompt in prompts:
        longest = max(longest, len(prompt.tokens), NODES + 1)
        full = (len(group) + 1) * longest * vocabulary > _LOGITS_ELEMENTS
        if group and (full or prompt.temperature != group[0].temperature):
            yield group
            group, longest = [], max(len(prompt.tokens), NODES + 1)
        group.append(prompt)
    if group:
        yield group
