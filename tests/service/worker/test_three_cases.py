"""The three cases of docs/lab/cases.md in short: a killed drafter, an old one that is better, nothing to gain."""

from __future__ import annotations

import pytest

from benchmarks.three_cases import CASES, World, compare


@pytest.fixture(scope="module")
def world() -> World:
    """Two policies and drafters that know one each well enough to tell them apart."""
    return World(0, ((70, 1e-2), (10, 3e-3)))


def test_a_killed_drafter_is_loaded_again_and_nobody_trains_for_it(world: World) -> None:
    fixed, ours = compare(CASES[0].shortened(2), world, learning_rate=1e-9)
    assert ours.says == "the engine's drafter is dead"
    assert ours.offered == 1, "pushed again, and nothing else"
    assert ours.lost < fixed.lost - 1.0, "the other engine waits for the next version"


def test_an_old_drafter_that_is_better_serves_again_at_no_training_cost(world: World) -> None:
    fixed, ours = compare(CASES[1].shortened(3), world, learning_rate=1e-2, train_passes=4.0)
    assert ours.says == "an archived version is better"
    assert ours.lost < fixed.lost


def test_where_nothing_is_to_be_gained_nothing_is_published_and_training_stops(world: World) -> None:
    fixed, ours = compare(CASES[2].shortened(2), world, learning_rate=1e-9, train_passes=1.0, warmup_steps=1)
    assert fixed.offered == fixed.trainings == 7
    assert ours.offered == 0
    assert ours.trainings <= 6
    assert ours.says == "nothing to gain"
    claims = len(CASES[2].shortened(2).policies)
    assert ours.replayed > claims * 100, "each claim is scored"
    assert fixed.replayed == 0
