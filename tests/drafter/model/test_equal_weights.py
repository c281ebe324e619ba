"""Drafters that are said to compute alike do, to the bit: also one in float32 beside its copy in bfloat16."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from helpers.drafter.drafter_worlds import SHAPES, rollouts, world
from helpers.drafter.mtp_worlds import CONFIGS, drafter_for

from drafter.batch import RolloutBatch
from drafter.model.draft_model import DraftModel, computes_alike
from drafter.policy import Policy, TargetHead

HALF = torch.bfloat16
WITH_EXPERTS = [name for name in CONFIGS if name != "dense"]


def drafted(kind: str) -> tuple[DraftModel, RolloutBatch, Policy]:
    """A drafter in float32, rollouts and their policy in bfloat16."""
    masks = SHAPES["packed, awkward"]
    if kind == "eagle3":
        w = world(masks, dtype=torch.float32)
        return w.drafter, w.batch.to("cpu", HALF), Policy(0, w.embed_tokens.to(HALF), TargetHead(w.head.to(HALF)))
    config = CONFIGS[kind]()
    drafter, shared = drafter_for(config)
    head = shared.needed_head().lm_head
    batch = rollouts(masks, head, 1.0, 0)
    last = torch.randn(batch.tokens, config.hidden_size, generator=torch.Generator().manual_seed(7))
    batch = replace(batch, last_hidden=last.to(HALF), input_ids=batch.input_ids % config.vocab_size)
    return drafter.float(), batch, Policy(0, shared.embed_tokens.to(HALF), TargetHead(head.to(HALF)))


def in_half(drafter: DraftModel) -> DraftModel:
    """As a worker on CUDA holds a published version: its buffers stay as they are."""
    other = copy.deepcopy(drafter)
    for parameter in other.parameters():
        parameter.data = parameter.data.to(HALF)
    return other


def states(drafter: DraftModel, batch: RolloutBatch, policy: Policy) -> list[torch.Tensor]:
    unrolled = drafter.unroll(drafter.plan(batch, 3), batch, policy, dtype=HALF)
    return [*unrolled.pre, unrolled.weights.norm, unrolled.weights.lm_head]


@pytest.mark.parametrize("kind", ["eagle3", *CONFIGS])
def test_a_copy_in_the_type_that_both_compute_in_is_alike_and_gives_the_same_bits(kind: str) -> None:
    drafter, batch, policy = drafted(kind)
    if kind in WITH_EXPERTS:  # the router multiplies in float32: a rounded copy of it is another one
        assert not computes_alike(drafter, in_half(drafter), HALF)
        for name, weight in drafter.named_parameters():
            weight.data = weight.data.to(HALF).float() if name in drafter.as_stored else weight.data
    other = in_half(drafter)
    assert computes_alike(drafter, other, HALF)
    assert computes_alike(other, drafter, HALF)
    assert all(map(torch.equal, states(drafter, batch, policy), states(other, batch, policy)))


@pytest.mark.parametrize("kind", ["eagle3", "experts", "glm with biases and head norms"])
def test_one_number_of_any_weight_or_buffer_tells_drafters_apart(kind: str) -> None:
    drafter, _, _ = drafted(kind)
    assert computes_alike(drafter, copy.deepcopy(drafter))
    for name in drafter.state_dict():
        other = copy.deepcopy(drafter)
        last = other.state_dict()[name].view(-1)[-1:]
        last.copy_(last.logical_not() if last.dtype is torch.bool else last + 1)
        assert not computes_alike(drafter, other), name


def test_what_an_experts_router_is_stored_as_is_what_it_multiplies() -> None:
    """Else `as_stored` could be left out: with the rounded router the states are others."""
    drafter, batch, policy = drafted("experts")
    assert not all(map(torch.equal, states(drafter, batch, policy), states(in_half(drafter), batch, policy)))
