"""The earliest publish that any test could make (`benchmarks.lag`), against a simulation of the best test."""

from __future__ import annotations

import math

import numpy as np
import pytest

from benchmarks.lag import LookAt, Played


def earliest(*looks: tuple[float, float], spread: float = 0.0) -> int | None:
    """Of (truth, error); the look at place i would let step i draft."""
    return Played(looks=[LookAt(step, *look) for step, look in enumerate(looks)]).earliest(spread)


@pytest.mark.parametrize("truths", [[0.03] * 5, [0.0, 0.01, 0.03, 0.05, 0.06, 0.08]])
def test_before_it_the_likelihood_ratio_test_of_five_percent_shows_the_gain_in_less_than_half_of_the_runs(
    truths: list[float],
) -> None:
    truth, errors = np.array(truths), np.linspace(0.03, 0.04, len(truths))
    noise = np.random.default_rng(0).normal(0.0, errors, size=(20_000, len(truths)))
    equal, better = (((mean + noise) * truth / errors**2).cumsum(1) for mean in (0.0, truth))
    power = (better > np.quantile(equal, 0.95, axis=0)).mean(0)
    first = earliest(*zip(truths, errors.tolist(), strict=True))
    assert first is not None
    assert power[first] > 0.5 > power[first - 1]


def test_a_worse_candidate_and_a_look_that_bounds_nothing_show_nothing() -> None:
    assert earliest((-0.2, 0.01), (0.2, math.nan), (0.0, 0.01)) is None
    assert earliest((-0.2, 0.01), (0.15, 0.1), (0.15, 0.1)) == 2


def test_a_gain_that_varies_from_claim_to_claim_adds_to_the_error() -> None:
    looks = [(0.03, 0.03)] * 9
    assert earliest(*looks, spread=0.04) == earliest(*[(0.03, 0.05)] * 9) == 7
    assert earliest(*looks) == 2
