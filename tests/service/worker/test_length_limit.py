"""Which rollouts are left out of training where memory ran out with long ones."""

from __future__ import annotations

import numpy as np
import pytest

from service.worker.recent import LengthLimit

STEP = 1000


def within(limit: LengthLimit, lengths: list[int]) -> list[int]:
    return [n for n in lengths if limit.tokens is None or n <= limit.tokens]


@pytest.mark.parametrize(
    ("lengths", "left"),
    [
        ([500, 900, 30_000], [500, 900]),
        ([500, 2000, 3000, 4000, 5000], [500, 2000]),
        ([17_000, 20_000, 25_000, 32_000], [17_000]),
        ([200, 1000], [200, 1000]),  # none is longer than a step: their length does not matter
        ([20_000, 20_000], [20_000, 20_000]),  # nothing would be left
        ([20_000], [20_000]),
        ([], []),
    ],
)
def test_the_longer_half_of_those_that_are_longer_than_a_step_is_left_out(lengths: list[int], left: list[int]) -> None:
    limit = LengthLimit()
    assert limit.tighten(np.array(lengths, dtype=np.int64), STEP) == (left != lengths)
    assert within(limit, lengths) == left


@pytest.mark.parametrize("most", [1500, 5000, 20_000])
def test_a_few_failures_find_what_fits_and_some_training_goes_on(most: int) -> None:
    lengths = [*range(200, 32_000, 100)]
    limit, failures = LengthLimit(), 0
    while max(within(limit, lengths)) > most:
        assert limit.tighten(np.array(within(limit, lengths)), STEP)
        failures += 1
    assert failures <= 6
    assert max(within(limit, lengths)) > most / 2.2, "no more is left out than must be, but for a half"


def test_after_some_trainings_the_long_ones_are_tried_again() -> None:
    limit = LengthLimit()
    limit.trained()
    assert limit.tokens is None
    limit.tighten(np.array([500, 30_000]), STEP)
    for _ in range(63):
        limit.trained()
        assert limit.tokens == 29_999
    limit.trained()
    assert limit.tokens is None
