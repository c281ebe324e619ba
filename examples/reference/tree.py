"""Reference EAGLE-2 decoding: a dynamic tree of drafts, verified in one forward pass with tree attention, lossless.

Each round the drafter grows a tree from the last token: every level expands its `branches` most probable nodes (by
the product of q along their path) into their `branches` most probable children, and of all nodes the `nodes` most
probable are kept. A child's product is never above its parent's, so what is kept is a tree. The target reads all of it
at once, each node seeing the text and its own ancestors. Then one walks from the root: draw from the target's p at the
node; if a child holds that token, go there, otherwise the token ends the round.

Why that is lossless: the tree is a function of the text alone, not of chance, so every emitted token is a draw from p
given the text before it. (Rejection sampling gives the same law: child x is accepted with probability p(x), and after a
rejection p is renormalised without x.) Greedy is the same with p on the argmax.

As in `examples.reference.decode`, sequences share a batch, caches are addressed by slot, and a rejected node leaves a
masked slot.

Legend: B sequences, m nodes, K depth, k branches, V target vocabulary, D draft vocabulary, S slots, H hidden.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from drafter.errors import DrafterError
from drafter.model.eagle3 import Eagle3Drafter
from examples.reference.cached import attend, embed
from examples.reference.decode import (
    Generation,
    _DrafterReader,
    _followed_by,
    _Ledger,
    _pad,
    _some,
    _TargetReader,
    embedding,
    sampling_logprobs,
)


@dataclass(frozen=True, slots=True, eq=False)
class DraftTree:
    """Drafted nodes, parents before children. The root (the last token of the text) is not one of them."""

    tokens: Tensor  # int64[B, m], target ids
    parents: Tensor  # int64[B, m]: number of the parent node, -1 for the root
    sees: Tensor  # bool[B, m, m]: itself and its ancestors

    @property
    def depths(self) -> Tensor:
        """Distance from the root, int64[B, m], from 1."""
        return self.sees.sum(dim=2)


@torch.no_grad()
def generate_tree(
    target: Any,
    drafter: Eagle3Drafter,
    prompts: Sequence[Sequence[int]],
    *,
    max_tokens: int,
    eos_id: int | Collection[int] | None = None,
    temperature: float = 1.0,
    depth: int = 4,
    branches: int = 4,
    nodes: int = 16,
    generator: torch.Generator | None = None,
) -> Generation:
    """Continue every prompt until `eos_id` (or one of them) or `max_tokens`, drafting trees of up to `nodes` nodes.

    They have up to `depth` levels, of which `branches` nodes are expanded. `target` is a transformers causal LM in eval
    mode, all its layers full attention (else `DrafterError`), whose attention takes a four-dimensional mask (eager,
    sdpa).
    """
    if not prompts or any(not prompt for prompt in prompts):
        raise DrafterError("expected one or more prompts of at least one token: generation starts from a prefill")
    if max_tokens < 1 or depth < 1 or nodes < 1 or not 1 <= branches <= drafter.config.draft_vocab_size:
        raise DrafterError(
            f"expected max_tokens, depth and nodes of at least 1 and branches from 1 to the draft vocabulary, got "
            f"{max_tokens=} {depth=} {nodes=} {branches=}"
        )
    device = next(target.parameters()).device
    ids, lengths = _pad(prompts, device)
    columns = torch.arange(max(ids.shape[1], depth + 1), device=device)
    places = columns[: ids.shape[1]]
    reader = _TreeReader(target, drafter.config.aux_layers)
    logits, aux = reader.read(ids, places.expand_as(ids))
    reader.keep(places < lengths[:, None])
    first = logits[torch.arange(len(prompts), device=device), lengths - 1][:, None]
    latest = _draw(first[:, 0], temperature, generator)
    ledger = _Ledger(len(prompts), max_tokens, eos_id)
    ledger.add(latest[:, None], first, torch.zeros_like(latest), temperature)
    chain = _TreeDrafter(drafter, embedding(target), temperature=temperature, generator=None)
    chain.read(aux, _followed_by(ids[:, 1:], latest, lengths - 1), places, places < lengths[:, None])
    position = lengths  # of `latest`, which the target has not read yet

    while not ledger.done():
        tree = chain.grow(depth, branches, nodes)
        logits, aux = reader.read_tree(latest, tree, position)
        path, emitted, accepted = walk(tree, logits, depth, temperature, generator)
        kept = columns[: depth + 1] <= accepted[:, None]  # of the path
        # Entries past the path repeat slot 0, so marks are added up, not written over one another.
        reader.keep(torch.zeros_like(logits[:, :, 0]).scatter_add_(1, path, kept.to(logits.dtype)) > 0)
        ledger.add(emitted, _gather(logits, path), accepted, temperature, is_round=True)
        chain.read(_gather(aux, path), emitted, position[:, None] + columns[: depth + 1], kept)
        latest = emitted.gather(1, accepted[:, None])[:, 0]
        position = position + accepted + 1
    return ledger.result()


def walk(
    tree: DraftTree, logits: Tensor, depth: int, temperature: float, generator: torch.Generator | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Draw along the tree from the target's logits [B, m+1, V] after the root and after each node.

    Returns the path's slots [B, K+1] (0 is the root, node i is i+1), the emitted tokens [B, K+1] and the number of
    accepted drafts [B]: the first accepted+1 entries of a row count, and the others of `path` repeat slot 0.
    """
    B = logits.shape[0]
    row = torch.arange(B, device=logits.device)
    slot = torch.zeros(B, dtype=torch.int64, device=logits.device)
    accepted = torch.zeros_like(slot)
    going = torch.ones(B, dtype=torch.bool, device=logits.device)
    path, emitted = [], []
    for _ in range(depth + 1):
        token = _draw(logits[row, slot], temperature, generator)
        path.append(torch.where(going, slot, 0))
        emitted.append(token)
        child = (tree.parents == slot[:, None] - 1) & (tree.tokens == token[:, None])
        going = going & child.any(dim=1)
        slot = torch.where(going, child.long().argmax(dim=1) + 1, slot)
        accepted += going
    return torch.stack(path, dim=1), torch.stack(emitted, dim=1), accepted


def _draw(logits: Tensor, temperature: float, generator: torch.Generator | None) -> Tensor:
    return torch.multinomial(sampling_logprobs(logits, temperature).exp(), 1, generator=generator)[:, 0]


def _gather(rows: Tensor, path: Tensor) -> Tensor:
    """Slots of rows [B, m+1, X] at the path's slots: [B, K+1, X]."""
    return rows.gather(1, path[:, :, None].expand(-1, -1, rows.shape[2]))


class _TreeReader(_TargetReader):
    """A target reader that also reads trees."""

    def read_tree(self, root: Tensor, tree: DraftTree, position: Tensor) -> tuple[Tensor, Tensor]:
        """Logits [B, m+1, V] and features of the root [B] and all nodes, in one pass."""
        kept = _some(self.kept)
        B, m = tree.tokens.shape
        inside = torch.zeros(B, m + 1, m + 1, dtype=torch.bool, device=root.device)
        inside[:, :, 0] = True
        inside[:, 1:, 1:] = tree.sees
        seen = torch.cat([kept[:, None, :].expand(B, m + 1, -1), inside], dim=2)
        dtype = next(self.target.parameters()).dtype
        bias = torch.zeros(seen.shape, dtype=dtype, device=root.device).masked_fill_(~seen, torch.finfo(dtype).min)
        ids = torch.cat([root[:, None], tree.tokens], dim=1)
        depths = torch.cat([torch.zeros_like(root)[:, None], tree.depths], dim=1)
        return self.forward(ids, position[:, None] + depths, bias[:, None], torch.ones_like(ids, dtype=torch.bool))

    def forward(self, ids: Tensor, positions: Tensor, mask: Tensor, new: Tensor) -> tuple[Tensor, Tensor]:
        """One pass with an explicit mask [B, 1, L, S+L] to add to the scores."""
        out = self.target(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=self.cache,
            use_cache=True,
            output_hidden_states=True,
        )
        self.cache, self.kept = out.past_key_values, torch.cat([_some(self.kept), new], dim=1)
        return out.logits, torch.cat([out.hidden_states[i] for i in self.aux_layers], dim=-1)


@dataclass(slots=True, eq=False)
class _Level:
    """Nodes being expanded, [B, k] each, and what their path has left in the drafter."""

    number: Tensor  # among all nodes drafted so far
    token: Tensor
    value: Tensor  # log of the product of q along the path
    pre: Tensor  # [B, k, H] of the parent: what the node is fed
    sees: Tensor  # bool[B, k, n]: ancestors among the n nodes expanded so far


class _TreeDrafter(_DrafterReader):
    """The drafter with its cache of step-0 keys; the keys of tree nodes live for one tree only."""

    def grow(self, depth: int, branches: int, nodes: int) -> DraftTree:
        """Draft a tree, its parents before their children."""
        pre = _some(self.pre)[:, None]
        value, token = self._children(pre, torch.zeros_like(pre[:, :, 0], dtype=torch.float32), branches)
        B, k = token.shape
        number = torch.arange(k, device=token.device).expand(B, k)
        drafted = [(token, value, torch.full_like(token, -1))]
        level = _Level(number, token, value, pre.expand(B, k, -1), token.new_zeros(B, k, 0, dtype=torch.bool))
        keys, values = _some(self.keys), _some(self.values)
        for step in range(1, depth):
            sees = torch.cat(
                [level.sees, torch.eye(level.token.shape[1], dtype=torch.bool, device=token.device).expand(B, -1, -1)],
                dim=2,
            )
            text = _some(self.kept)[:, None, :].expand(B, level.token.shape[1], -1)
            position = (_some(self.position)[:, None] + step).expand_as(level.token)
            pre, key, val = attend(
                self.drafter,
                embed(self.drafter, level.token, self.embed_tokens),
                level.pre,
                position,
                keys,
                values,
                torch.cat([text, sees], dim=2),
                self.weights,
            )
            keys, values = torch.cat([keys, key], dim=2), torch.cat([values, val], dim=2)
            value, token = self._children(pre, level.value, branches)
            parent = level.number.repeat_interleave(branches, dim=1)
            start = sum(t.shape[1] for t, _, _ in drafted)
            drafted.append((token, value, parent))
            best = value.topk(min(branches, value.shape[1]), dim=1).indices
            of = best // branches  # the expanded node whose child it is
            level = _Level(
                start + best, token.gather(1, best), value.gather(1, best), _gather(pre, of), _gather(sees, of)
            )
        tokens, scores, parents = (torch.cat(parts, dim=1) for parts in zip(*drafted, strict=True))
        return _most_probable(tokens, scores, parents, nodes)

    def _children(self, pre: Tensor, value: Tensor, branches: int) -> tuple[Tensor, Tensor]:
        """Products and target ids [B, n*k] of the most probable children of the nodes whose output is pre [B, n, H]."""
        logits = self.drafter.logits(pre).float() / (self.temperature or 1.0)
        log_q, choice = torch.log_softmax(logits, dim=-1).topk(branches, dim=-1)
        return (value[:, :, None] + log_q).flatten(1), self.drafter.to_target(choice).flatten(1)


def _most_probable(tokens: Tensor, scores: Tensor, parents: Tensor, nodes: int) -> DraftTree:
    """Keep the best nodes. Equal scores keep their order, so that no child (never above its parent) comes alone."""
    chosen = torch.sort(scores, dim=1, descending=True, stable=True).indices[:, :nodes].sort(dim=1).values
    B, m = chosen.shape
    parent = parents.gather(1, chosen)
    local = torch.searchsorted(chosen, parent.clamp(min=0))
    local = torch.where(parent < 0, -1, local)
    sees = torch.eye(m, dtype=torch.bool, device=tokens.device).repeat(B, 1, 1)
    row = torch.arange(B, device=tokens.device)
    for node in range(m):
        above = local[:, node]
        sees[:, node] |= sees[row, above.clamp(min=0)] & (above >= 0)[:, None]
    return DraftTree(tokens.gather(1, chosen), local, sees)
