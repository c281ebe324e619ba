"""Engines are compared with replays that suppose what they draft now, and not with those of before."""

from __future__ import annotations

import pytest

from service.monitor.live.blocks import Block
from service.monitor.live.engine import LiveRule
from service.monitor.live.replays import Replays
from service.monitor.live.watch import watch
from service.monitor.records import DrafterSums, Replayed, ScoreRecord


def scored(number: int, alpha: float, drafting: str | None, policy: int = 0) -> ScoreRecord:
    """A batch of 16 prompts on which the drafter has this α."""
    sums = DrafterSums.of([100.0] * 16, [100.0 / alpha] * 16)
    told = (Replayed("v1", sums, accepted=(1.0,) * 4, reached=(1.0,) * 4),)
    depth = None if drafting is None else 4
    return ScoreRecord(
        replayed=told,
        drafter_version="v1",
        policy_version=policy,
        entry_id=f"{number + 1}-0",
        tokens=1600,
        depth=depth,
        drafting=drafting,
    )


@pytest.mark.parametrize("before", ["probabilistic", None], ids=["supposed otherwise", "of before it was kept"])
def test_replays_that_suppose_another_way_of_drafting_are_left_out(before: str | None) -> None:
    scores = [*(scored(n, 3.0, before) for n in range(8)), *(scored(n, 2.0, "greedy") for n in range(8, 12))]
    replays = Replays(scores)
    cell = replays.get(Block("v1", 0, 512, 1024, None, (), 0.0))
    assert cell is not None
    assert cell.tokens / cell.rounds == pytest.approx(2.0)
    assert replays.alpha("v1") == pytest.approx(2.0)
    assert Replays(scores[:8]).alpha("v1") == pytest.approx(3.0)


def test_engines_are_not_held_against_what_was_replayed_before() -> None:
    """Two sound engines that draft greedily, of which batches were replayed with sampled drafts before."""
    scores = [scored(n, 3.0, "probabilistic", n) for n in range(8)] + [scored(9, 2.0, "greedy", 8)]
    blocks = [Block("v1", policy, 4096, 8192, None, (), 0.0) for policy in range(8)]  # none has the newest policy yet
    found = watch({"a": blocks, "b": blocks}, Replays(scores), LiveRule())
    assert found.hold is None
    assert not found.sick
