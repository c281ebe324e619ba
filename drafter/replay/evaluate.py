"""Replay α of any drafter on any rollout files, beside n-gram drafting and the upper bound of draft trees.

The bound: a round with k branches per step keeps the emitted token x at step j exactly if x is among the k most
probable of q[t, j], so c = 1 there and 0 elsewhere (`drafter.replay.acceptance` does the rest). It supposes a full
tree of k^j nodes at step j; a real tree (`drafter.reference.tree`) verifies a few dozen and keeps less.

Legend: T tokens, N tokens emitted by rounds, K depth, k branches, D draft vocabulary, H hidden.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - its name everywhere
from torch import Tensor

from drafter.batch import RolloutBatch, screen
from drafter.errors import DrafterError
from drafter.model.draft_model import DraftModel
from drafter.model.pointwise import rms_norm
from drafter.policy import Policy
from drafter.replay.acceptance import Ints, Replay, find_segments, replay_rounds
from drafter.replay.ngram import ngram_replay
from drafter.replay.replay import TOKENS_AT_ONCE, Drafting, along_the_text, prompt_groups, replay
from drafter.unroll.unrolled import Unrolled

#: Logits held at once, in elements: 128 MiB of float32.
_LOGITS_ELEMENTS = 1 << 25


@dataclass(frozen=True, slots=True, eq=False)
class Evaluation:
    """Replays of the same rollouts, in one order. `groups` numbers each rollout's prompt: the unit that varies."""

    drafter: Replay
    ngram: Replay
    trees: dict[int, Replay]  # branches -> upper bound
    groups: Ints
    policy_versions: tuple[int, int]  # lowest and highest
    tokens: int  # prompts included

    def rows(self) -> dict[str, Replay]:
        """All replays by the name that tables give them."""
        bounds = {f"tree of the {k} most probable, at most": bound for k, bound in self.trees.items()}
        return {"drafter": self.drafter, "n-gram": self.ngram, **bounds}

    def summary(self, level: float = 0.95) -> dict[str, Any]:
        """Every figure as plain numbers, ready for JSON; nan becomes None."""
        figures = {
            name: {
                "alpha": _plain(one.alpha),
                "interval": [_plain(x) for x in one.interval(level, self.groups)],
                "rounds": float(one.rounds.sum()),
                "position_acceptance": [_plain(x) for x in one.position_acceptance.tolist()],
                "conditional_acceptance": [_plain(x) for x in one.conditional_acceptance.tolist()],
            }
            for name, one in self.rows().items()
        }
        return {
            "rollouts": self.drafter.rollouts,
            "prompts": int(torch.unique(torch.from_numpy(self.groups)).numel()),
            "tokens": self.tokens,
            "tokens_by_rounds": float(self.drafter.tokens.sum()),
            "policy_versions": list(self.policy_versions),
            "depth": self.drafter.depth,
            "level": level,
            "drafters": figures,
        }


def evaluate(
    drafter: DraftModel,
    batches: Iterable[RolloutBatch],
    policy_at: Callable[[int], Policy],
    *,
    depth: int,
    drafting: Drafting = "probabilistic",
    branches: Sequence[int] = (),
) -> Evaluation:
    """Replay every batch, one in memory at a time, with the policy of its version, which `policy_at` gives.

    Raises `BatchRejected` for features that give no probabilities, `DrafterError` where a batch is of another target.
    """
    own, ngram, trees = [], [], {k: list[Replay]() for k in sorted(set(branches))}
    texts = []
    for batch in batches:
        screen(batch)
        texts.append(_text_only(batch))
        policy = policy_at(batch.policy_version)
        own.append(replay(drafter, batch, policy, depth=depth, drafting=drafting))
        ngram.append(ngram_replay(batch, depth=depth))
        for k, bounds in trees.items():
            bounds.append(tree_bound(drafter, batch, policy, depth=depth, branches=k))
    if not texts:
        raise DrafterError("expected at least one batch of rollouts to evaluate on")
    versions = [batch.policy_version for batch in texts]
    return Evaluation(
        drafter=Replay.concat(own),
        ngram=Replay.concat(ngram),
        trees={k: Replay.concat(bounds) for k, bounds in trees.items()},
        groups=prompt_groups(RolloutBatch.concat(texts)),
        policy_versions=(min(versions), max(versions)),
        tokens=sum(batch.tokens for batch in texts),
    )


def tree_bound(drafter: DraftModel, batch: RolloutBatch, policy: Policy, *, depth: int, branches: int) -> Replay:
    """Upper bound on what a tree of `branches` per step would have had, one forward pass of the unroll."""
    if depth < 1 or not 1 <= branches <= len(drafter.vocabulary):
        raise DrafterError(f"expected depth >= 1 and branches from 1 to the draft vocabulary: {depth=} {branches=}")
    parts = [_tree_bound(drafter, group, policy, depth, branches) for group in batch.groups(TOKENS_AT_ONCE)]
    return Replay.concat(parts)


def _tree_bound(drafter: DraftModel, batch: RolloutBatch, policy: Policy, depth: int, branches: int) -> Replay:
    segments = find_segments(batch.loss_mask.cpu().numpy(), batch.cu_seqlens.numpy())

    def found(unrolled: Unrolled, batch: RolloutBatch, pre: Tensor, emitted: Tensor) -> Tensor:
        return _among_best(drafter, unrolled, pre, batch.input_ids[emitted], branches).float()

    return replay_rounds(along_the_text(drafter, batch, policy, segments, depth, found).cpu().numpy(), segments)


def _among_best(drafter: DraftModel, unrolled: Unrolled, pre: Tensor, emitted: Tensor, branches: int) -> Tensor:
    """1 where the emitted target token [n] is among the most probable drafts of pre [n, H], else 0."""
    weights, ids = unrolled.weights, drafter.vocabulary.ids.to(pre.device)
    limit = max(1, _LOGITS_ELEMENTS // ids.numel())
    parts = [pre.new_zeros(0)]
    for part, wanted in zip(torch.split(pre, limit), torch.split(emitted, limit), strict=True):
        normed = rms_norm(part, weights.norm, drafter.config.rms_norm_eps)
        best = ids[F.linear(normed, weights.lm_head).topk(branches, dim=-1).indices]
        parts.append((best == wanted[:, None]).any(dim=1).to(pre.dtype))
    return torch.cat(parts)


def _text_only(batch: RolloutBatch) -> RolloutBatch:
    """What prompts are told apart by; features and sampling are left out, so that any batches can be pooled."""
    return replace(
        batch,
        aux_hidden=batch.aux_hidden.new_zeros(batch.tokens, 0, dtype=torch.float32),
        last_hidden=batch.last_hidden.new_zeros(batch.tokens, 0, dtype=torch.float32),
        aux_scale=None,
        last_scale=None,
        aux_rows=None,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
    )


def _plain(value: float) -> float | None:
    return None if math.isnan(value) else value
