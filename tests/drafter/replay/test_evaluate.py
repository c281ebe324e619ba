"""What evaluation pools."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.drafter.decode_fixtures import default_target, log_rollouts, make_prompts, policy_of, schooled

from drafter.errors import DrafterError
from drafter.replay.evaluate import evaluate
from examples.reference.decode import generate


def test_evaluate_pools_files_and_refuses_none() -> None:
    target: Any = default_target()
    drafter = schooled()
    with pytest.raises(DrafterError, match="at least one batch"):
        evaluate(drafter, [], lambda _: policy_of(target), depth=3)
    prompts = make_prompts(3, 64)
    batch = log_rollouts(target, prompts, generate(target, None, prompts, max_tokens=8))
    result = evaluate(drafter, [batch, batch], lambda _: policy_of(target), depth=2)
    assert result.summary()["prompts"] == 3, "the same prompts in two files are the same prompts"
    assert result.drafter.conditional_acceptance.shape == (2,)


def test_files_of_senders_that_knew_the_normalisers_and_of_others_are_pooled() -> None:
    target: Any = default_target()
    prompts = make_prompts(3, 64)
    batch = log_rollouts(target, prompts, generate(target, None, prompts, max_tokens=8))
    without = replace(batch, logsumexp=torch.full_like(batch.logsumexp, torch.nan), normalised=False)
    result = evaluate(schooled(), [batch, without], lambda _: policy_of(target), depth=2)
    assert result.drafter.rounds[:3].tolist() == result.drafter.rounds[3:].tolist()
