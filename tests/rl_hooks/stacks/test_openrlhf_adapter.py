"""Which version the OpenRLHF adapter says, and what it leaves out. (tests/stacks runs the real OpenRLHF.)"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.trainer.hooks_fixtures import padded_batch, receiver
from helpers.trainer.openrlhf_fixtures import Actor

from rl_hooks import wire
from rl_hooks.stacks.openrlhf import attach


def passes(version: Callable[[], int] | None, *kinds: dict[str, Any] | None) -> list[int]:
    """Run passes that make experience (with these further arguments) and trainings (None); the versions sent."""
    actor, batch = Actor(), padded_batch([(3, 9), (7, 4)])
    with receiver() as service:
        told: dict[str, Any] = {} if version is None else {"version": version}
        hook = attach(actor, service.url, rank=0, world_size=1, aux_layers=(1, 2, 3), strict=True, **told)
        for more in kinds:
            with torch.set_grad_enabled(more is None):
                actor.forward(batch.input_ids, batch.loss_mask, batch.attention_mask, **(more or {}))
        assert hook.flush(20)
        sent = [int(wire.parse_header(one.body).metadata["policy_version"]) for one in service.rollouts()]
        hook.close()
    return sent


def test_the_version_goes_on_though_a_pass_is_left_out() -> None:
    ring = {"ring_attn_group": object()}
    assert passes(None, {}, {}, None, None, {}, None, ring, None, {}) == [0, 0, 1, 3]


def test_a_rank_that_some_passes_leave_out_is_told_the_version() -> None:
    steps = iter([0, 5])
    assert passes(lambda: next(steps), {}, None, None, {}) == [0, 5]


def test_rollouts_with_images_are_left_out_by_name(caplog: pytest.LogCaptureFixture) -> None:
    assert passes(None, {}, {"pixel_values": torch.zeros(4, 8)}) == [0]
    assert sum("rollouts with images are left out" in record.message for record in caplog.records) == 1
