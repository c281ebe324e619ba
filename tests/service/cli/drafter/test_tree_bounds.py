"""The bounds that `eval --tree` prints."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from decode_fixtures import (
    log_rollouts,
    make_prompts,
    policy_of,
)

from drafter.errors import DrafterError
from drafter.model.eagle3 import Eagle3Drafter
from drafter.reference.decode import generate
from drafter.reference.tree import generate_tree
from drafter.replay.acceptance import find_segments, replay_rounds
from drafter.replay.evaluate import evaluate, tree_bound
from drafter.replay.replay import replay


def test_a_bound_of_one_branch_is_greedy_replay_and_more_branches_only_help(
    target: Any, trained: Eagle3Drafter
) -> None:
    prompts = make_prompts(30, 64, seed=11)
    made = generate(target, None, prompts, max_tokens=20, generator=torch.Generator().manual_seed(1))
    batch, policy = log_rollouts(target, prompts, made), policy_of(target)
    bounds = [tree_bound(trained, batch, policy, depth=3, branches=k) for k in (1, 2, 4, 8, 56)]
    np.testing.assert_allclose(bounds[0].rounds, replay(trained, batch, policy, depth=3, drafting="greedy").rounds)
    half = tree_bound(copy.deepcopy(trained).bfloat16(), batch, policy, depth=3, branches=2)  # as on CUDA
    assert half.alpha == pytest.approx(bounds[1].alpha, rel=0.05)
    alphas = [bound.alpha for bound in bounds]
    assert alphas == sorted(alphas)
    assert alphas[2] > alphas[0] + 0.2
    # With all D branches only tokens outside the draft vocabulary are missed.
    segments = find_segments(batch.loss_mask.numpy(), batch.cu_seqlens.numpy())
    known = (trained.vocabulary.to_draft[batch.input_ids] >= 0).numpy().astype(float)
    rows = segments.rows()
    padded = np.concatenate([known, np.zeros(3)])
    want = replay_rounds(np.stack([padded[rows + j] for j in range(3)], axis=1), segments)
    np.testing.assert_allclose(bounds[-1].rounds, want.rounds)


def test_a_full_tree_needs_the_rounds_of_its_bound_and_a_pruned_one_more(target: Any, trained: Eagle3Drafter) -> None:
    """Whether a token is in the tree hangs on the text alone, so live counting and replay agree round by round."""
    prompts = make_prompts(150, 64, seed=12)
    counts = {}
    for nodes in (3 + 9, 5):
        made = generate_tree(
            target,
            trained,
            prompts,
            max_tokens=24,
            depth=2,
            branches=3,
            nodes=nodes,
            generator=torch.Generator().manual_seed(2),
        )
        bound = tree_bound(trained, log_rollouts(target, prompts, made), policy_of(target), depth=2, branches=3)
        counts[nodes] = np.array(made.rounds) - bound.rounds
    assert np.abs(counts[12]).max() == 0
    assert counts[5].sum() > 10


def test_evaluate_refuses_what_it_cannot_pool(target: Any, trained: Eagle3Drafter) -> None:
    with pytest.raises(DrafterError, match="at least one batch"):
        evaluate(trained, [], lambda _: policy_of(target), depth=3)
    prompts = make_prompts(3, 64)
    batch = log_rollouts(target, prompts, generate(target, None, prompts, max_tokens=8))
    with pytest.raises(DrafterError, match="branches"):
        tree_bound(trained, batch, policy_of(target), depth=3, branches=57)
    result = evaluate(trained, [batch, batch], lambda _: policy_of(target), depth=2, branches=(2,))
    assert result.summary()["prompts"] == 3, "the same prompts in two files are the same prompts"
    assert result.drafter.conditional_acceptance.shape == (2,)
