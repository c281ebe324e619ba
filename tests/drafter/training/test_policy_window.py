"""A training window of several policy versions: each batch is drafted with its own policy, against float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from helpers.drafter.drafter_worlds import SHAPES, VOCAB, World, expected, rollouts, world
from torch import Tensor

from drafter.training.trainer import DrafterTrainer, TrainConfig

STEPS = 3
CONFIG = TrainConfig(steps_ahead=STEPS, compute_dtype="float64", grad_clip=0.0)


def tied_policies() -> list[World]:
    """One drafter, and the rollouts of two policy versions whose embedding is their head."""
    w = world(SHAPES["packed, awkward"])
    found = []
    for version, head in enumerate((w.head, torch.roll(w.head, 3, dims=0) * 1.3)):
        batch = replace(rollouts(SHAPES["packed, awkward"], head, 1.0, seed=version), policy_version=version)
        found.append(World(w.drafter, head, head, batch))
    return found


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_window_of_two_tied_policies_equals_the_reference(
    order: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    policies = tied_policies()
    trainer = DrafterTrainer(policies[0].drafter, CONFIG)
    given: dict[str, Tensor] = {}

    def keep(_: float) -> None:
        given.update({n: p.grad.clone() for n, p in trainer.drafter.named_parameters() if p.grad is not None})

    monkeypatch.setattr(trainer._optimizer, "step", keep)
    window = [policies[i] for i in order]
    tokens = sum(w.batch.response_tokens for w in window)
    want = [expected(w, STEPS, decay=CONFIG.step_decay, denominator=tokens) for w in window]
    report = trainer.step([(w.batch, w.policy) for w in window])
    for step in range(STEPS):
        entries = sum(e.entries[step] for e in want)
        assert report.entries_per_step[step] == entries
        assert report.loss_per_step[step] == pytest.approx(sum(e.kl[step] for e in want) / entries, rel=1e-9)
        both = sum(e.acceptance[step] for e in want)
        assert report.acceptance_per_step[step] == pytest.approx(both / entries, rel=1e-9)
    assert given.keys() == dict(trainer.drafter.named_parameters()).keys()
    for name, gradient in given.items():
        torch.testing.assert_close(gradient, sum(e.gradients[name] for e in want), rtol=1e-8, atol=1e-10)


def test_the_two_policies_differ_in_what_the_drafter_reads() -> None:
    first, second = tied_policies()
    assert not torch.isclose(first.embed_tokens, second.embed_tokens).all(dim=1).any(), f"of {VOCAB} tokens"
