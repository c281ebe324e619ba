"""The replay side (`service/monitor/live/replays.py`): bounds of a choice of prompts, spread, outlier, by figures."""

from __future__ import annotations

import math

import pytest

from service.monitor.live.replays import Replays, VersionReplay, _outlier, _pooled, _spread
from service.monitor.records import DrafterSums, ScoreRecord

#: Tokens and rounds of prompts, the hardest in the middle.
PROMPTS = {"a": (300.0, 100.0), "b": (200.0, 180.0), "c": (500.0, 125.0), "d": (100.0, 50.0)}


def replay(*, told: bool = True) -> VersionReplay:
    sums = DrafterSums.of(*zip(*PROMPTS.values(), strict=True))
    return VersionReplay(sums, (300.0, 200.0, 100.0), (455.0, 300.0, 200.0), PROMPTS if told else {})


def test_the_hardest_prompts_that_make_a_share_of_the_tokens() -> None:
    alpha = 1100 / 455
    for share, rounds in (
        (100 / 1100, 90.0),
        (200 / 1100, 180.0),
        (250 / 1100, 205.0),
        (500 / 1100, 180 + 50 + 200 / 3),
    ):
        assert replay().hardest_ratio(share) == pytest.approx(share * 1100 / rounds / alpha)
        left = 455 - rounds
        assert replay().easiest_ratio(1 - share) == pytest.approx((1 - share) * 1100 / left / alpha)
    assert replay().hardest_ratio(0.95) == replay().easiest_ratio(0.95) == 1.0
    assert replay().hardest_ratio(0.949) < 1.0 < replay().easiest_ratio(0.949)


def test_of_prompts_that_are_not_told_apart_the_squares_bound_it() -> None:
    one = replay(told=False)
    for share in (0.2, 0.5):
        off = math.sqrt(one.sums.off_squared * 4 * share * (1 - share))
        ratio = 1 / (1 + off / (share * 1100))
        assert one.hardest_ratio(share) == pytest.approx(ratio)
        assert ratio < replay().hardest_ratio(share)
    even = VersionReplay(DrafterSums.of([280.0, 300.0, 320.0], [100.0] * 3), (), ())
    for share in (0.2, 0.5):
        rest = 1 - share
        off = math.sqrt(even.sums.off_squared * 3 * share * rest)
        assert even.easiest_ratio(share) == pytest.approx(share / (1 - rest * (1 + off / (rest * 900))))
    far = VersionReplay(DrafterSums.of([1000.0, 1000.0], [10.0, 1000.0]), (), ())
    assert far.easiest_ratio(0.1) == far.easiest_ratio(0.2) > 1


def test_alpha_at_a_depth_is_one_and_the_drafts_kept_up_to_it() -> None:
    one = replay()
    assert one.alpha() == one.alpha(3.0) == one.alpha(7.0) == pytest.approx(1100 / 455)
    for depth, kept in ((0.0, 0.0), (1.0, 300.0), (1.25, 350.0), (2.5, 550.0)):
        assert one.alpha(depth) == pytest.approx(1 + kept / 455)
    bare = VersionReplay(one.sums, (), ())
    assert bare.alpha() == pytest.approx(1100 / 455)
    assert bare.alpha(1.0) is None


def test_the_coin_flips_of_a_round_are_those_of_how_many_drafts_it_keeps() -> None:
    """One round in four keeps none, one, two, three."""
    one = VersionReplay(DrafterSums(250.0, 100.0), (75.0, 50.0, 25.0), (100.0, 75.0, 50.0))
    assert one.flips == pytest.approx(1.25 / 2.5**2)
    certain = VersionReplay(DrafterSums(400.0, 100.0), (100.0, 100.0, 100.0), (100.0, 100.0, 100.0))
    assert certain.flips == 0.0


def test_the_spread_is_the_variance_between_prompts_and_two_of_its_errors() -> None:
    sums = DrafterSums.of([260.0, 300.0, 340.0] * 4, [100.0] * 12)
    within = 8 * 40.0**2 / 3.0**2 * 12 / 11 / 1200
    assert _spread([sums], 1.0) == pytest.approx(within * (1 + 2 * math.sqrt(2 / 11)))
    assert _spread([sums, sums], 4.0) == pytest.approx(4 * within * (1 + 2 * math.sqrt(2 / 22)))
    assert _spread([DrafterSums.of([260.0, 300.0, 340.0] * 3, [100.0] * 9)], 1.0) is not None
    assert _spread([DrafterSums.of([260.0, 340.0] * 4, [100.0] * 8)], 1.0) is None, "seven degrees of freedom"
    assert _spread([DrafterSums.of([300.0], [100.0])] * 20, 1.0) is None, "one prompt a step shows none"
    alone = DrafterSums.of([300.0], [100.0])
    assert _spread([sums, alone], 1.0) == _spread([sums], 1.0)


def test_what_a_step_scatters_beyond_three_times_the_usual_is_one_prompts() -> None:
    usual = DrafterSums.of([290.0, 310.0] * 4, [100.0] * 8)
    odd = DrafterSums.of([300.0] * 7 + [300.0], [100.0] * 7 + [300.0])
    share = usual.off_squared * 8 / usual.tokens**2
    left = odd.off_squared - 3 * share * odd.tokens**2 / 8
    assert _outlier([usual, usual, usual, odd]) == pytest.approx(math.sqrt(left))
    assert _outlier([usual] * 4) == _outlier([]) == _outlier([DrafterSums.of([300.0], [100.0])]) == 0.0


def test_a_response_has_so_many_tokens_that_rounds_emit() -> None:
    sums = DrafterSums.of([30.0, 50.0], [10.0, 20.0])
    record = ScoreRecord(served=sums, drafter_version="v", policy_version=1, rollouts=2, tokens=82)
    assert Replays([record, record]).response_tokens == 40.0
    assert Replays([]).response_tokens is None


def test_replays_that_tell_no_positions_do_not_hide_those_of_the_others() -> None:
    """A batch with a few large weights tells none."""
    one = replay()
    bare = VersionReplay(one.sums, (), ())
    pooled = _pooled([one, bare, one])
    assert pooled.rounds == 3 * one.rounds
    assert pooled.accepted == pytest.approx([3 * n for n in one.accepted])
    assert pooled.reached == pytest.approx([3 * n for n in one.reached])
    assert _pooled([bare, bare]).accepted == _pooled([bare]).reached == ()
    assert _pooled([one, VersionReplay(one.sums, (300.0,), (455.0,))]).accepted == (), "two depths"
