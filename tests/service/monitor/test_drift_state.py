"""The drift monitor's input and state, and what a change is attributed to."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from helpers.worker.drift_fixtures import feed, noise

from benchmarks.alarms import (
    ROLLOUTS_PER_TICK,
    Bank,
    config,
    tick_values,
)
from service.monitor.drift.limits import DriftConfig, DriftError, Lane, cusum_limit
from service.monitor.drift.monitor import DriftMonitor, DriftReading
from service.monitor.drift.state import ArrivalRate, DriftState
from service.monitor.drift.succession import Succession


# --- input, state, attribution
def test_ticks_close_by_rollouts_across_batches_and_skip_rollouts_without_a_round() -> None:
    monitor = DriftMonitor(config())
    assert monitor.observe([6.0] * 40, [2.0] * 40) == []
    readings = monitor.observe([6.0] * 30 + [0.0] * 9 + [9.0] * 60, [2.0] * 30 + [0.0] * 9 + [3.0] * 60)
    assert [r.ticks for r in readings] == [1, 2]
    assert readings[0].value == 3.0
    assert len(monitor.state.pending) == 40 + 30 + 60 - 2 * ROLLOUTS_PER_TICK


def test_a_change_of_mix_alone_does_not_move_the_value() -> None:
    monitor = DriftMonitor(config())
    first = monitor.observe([4.0] * 32 + [2.0] * 32, [1.0] * 64, ["easy"] * 32 + ["hard"] * 32)
    monitor.observe([4.0] * 32 + [2.0] * 32, [1.0] * 64, ["easy"] * 32 + ["hard"] * 32)
    mixed = monitor.observe([4.0] * 8 + [2.0] * 56, [1.0] * 64, ["easy"] * 8 + ["hard"] * 56)
    only = monitor.observe([2.0] * 64, [1.0] * 64, ["hard"] * 64)
    new = monitor.observe([2.0] * 40 + [1.2] * 24, [1.0] * 64, ["hard"] * 40 + ["new source"] * 24)
    assert [r.value for r in first] == [3.0]
    for [reading] in (mixed, only, new):
        assert reading.value == pytest.approx(reading.baseline, abs=0.1)
        assert reading.baseline is not None
        assert reading.baseline < 3.0, "the baseline is at the mix so far"


def test_strata_beyond_the_most_are_one_and_none_are_told_apart_where_none_may_be() -> None:
    tags = [f"source {n % 8}" for n in range(64)]
    for most, names in ((3, ["", "source 0", "source 1", "source 2"]), (0, [""])):
        monitor = DriftMonitor(config(strata=most))
        for _ in range(3):
            monitor.observe([3.0] * 64, [1.0] * 64, tags)
        assert sorted(monitor.state.levels.names) == names


def test_nothing_is_stated_before_the_warm_up_is_over() -> None:
    monitor = DriftMonitor(config())
    readings = [monitor.tick(v) for v in noise(40)]
    assert all(r.lanes == {} and r.sd is None and not r.alarm for r in readings[:20])
    assert all(set(r.lanes) == {"fast", "slow"} for r in readings[20:])


def test_a_constant_series_gives_no_statistic_rather_than_an_infinite_one() -> None:
    assert feed(DriftMonitor(config()), [3.0] * 100).lanes == {}


def test_a_monitor_restored_from_its_state_goes_on_bit_for_bit() -> None:
    values = noise(600)
    straight, broken = DriftMonitor(config()), DriftMonitor(config())
    expected = [straight.tick(v) for v in values]
    found = []
    for index, value in enumerate(values):
        if index % 50 == 0:
            broken.observe([3.0] * 5, [1.0] * 5)  # a tick half filled must survive as well
            broken = DriftMonitor(config(), DriftState.from_json(broken.state.to_json()))
            assert broken.state.pending.pop() == ("", 3.0, None)
            broken.state.pending.clear()
        found.append(broken.tick(value))
    assert found == expected


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", "null", '{"format": "draftalign.drift.v0", "spreads": [], "pending": []}', '{"format": 3}']
)
def test_a_stored_state_of_another_kind_is_refused_with_advice(text: str) -> None:
    with pytest.raises(DriftError, match="start from scratch"):
        DriftState.from_json(text)


def test_a_state_comes_back_as_it_was_and_one_that_json_cannot_hold_is_not_written() -> None:
    rng, monitor = np.random.default_rng(3), DriftMonitor(config())
    for n in range(25):
        strata, entropies = ["a", "b"] * 20, rng.uniform(0.1, 1.0, 40).tolist()
        monitor.observe(rng.uniform(2, 4, 40).tolist(), [1.0] * 40, strata, entropies=entropies, arrived=60.0 * n)
    assert monitor.state.evidence.rows
    again = DriftState.from_json(monitor.state.to_json())
    assert again == monitor.state
    assert again.to_json() == monitor.state.to_json()
    with pytest.raises(DriftError, match=r"drift\.v3, got 'draftalign\.drift\.v9'.*start from scratch"):
        DriftState.from_json(monitor.state.to_json().replace("drift.v3", "drift.v9"))
    monitor.state.recent = math.inf
    with pytest.raises(ValueError, match="JSON"):
        monitor.state.to_json()


def test_traffic_counts_from_the_first_batch_on_by_the_time_since_the_one_before() -> None:
    """The first batch says when counting begins; what was before it is not known. A clock set back adds no time."""
    traffic = ArrivalRate()
    traffic.add(100, 5000.0)
    assert (traffic.rollouts, traffic.seconds) == (3840.0, 3600.0)
    traffic.add(100, 5060.0)
    kept = math.exp(-60 / (3 * 86_400))
    assert (traffic.rollouts, traffic.seconds) == pytest.approx((3840 * kept + 100, 3600 * kept + 60))
    before = (traffic.rollouts, traffic.seconds)
    traffic.add(10, 4000.0)
    assert (traffic.rollouts, traffic.seconds) == (before[0] + 10, before[1])


@pytest.mark.parametrize(
    ("kinds", "told"),
    [
        (["one"], False),
        (["one", "two"], True),
        (["", "one"], True),
        (["", "greedy"], False),
        (["one", "one greedy"], False),
        (["non", "nongreedy"], True),  # the sender's own names
    ],
)
def test_what_the_prompts_did_is_told_where_their_kinds_are_and_after_the_warm_up(kinds: list[str], told: bool) -> None:
    rng, monitor = np.random.default_rng(4), DriftMonitor(config(warmup_ticks=20))
    for tick in range(1, 30):
        monitor.observe(rng.normal(3.0, 1.0, 64).tolist(), [1.0] * 64, kinds * (64 // len(kinds)))
        change = monitor.change()
        assert (change is None) == (tick <= 20)
    assert change is not None
    assert (change.prompts is not None) == told
    steady = DriftMonitor(config())
    feed(steady, [3.0] * 100)
    assert steady.change() is None, "without a spread nothing is beyond chance"


def test_a_reset_keeps_the_settings() -> None:
    monitor = DriftMonitor(config(lanes=(Lane("only", 0.5),), batch_ticks=(7,)))
    feed(monitor, noise(100))
    monitor.reset()
    assert list(monitor.state.statistics) == ["only"]
    assert [spread.length for spread in monitor.state.spreads] == [1, 7]


def test_the_state_is_small_json(bank: Bank) -> None:
    monitor = DriftMonitor(config())
    feed(monitor, tick_values(bank, 3000, np.random.default_rng(1)).tolist())
    assert len(json.dumps(json.loads(monitor.state.to_json()))) < 32_000


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_a_number_is_refused_and_changes_nothing(value: float) -> None:
    monitor = DriftMonitor(config())
    feed(monitor, noise(30))
    before = monitor.state.to_json()
    with pytest.raises(DriftError, match="finite"):
        monitor.tick(value)
    with pytest.raises(DriftError, match="screen the batch"):
        monitor.observe([1.0, value], [1.0, 1.0])
    with pytest.raises(DriftError, match="paired difference"):
        monitor.rebase(value)
    assert monitor.state.to_json() == before


def test_the_least_settings_that_make_sense_are_taken() -> None:
    least = DriftConfig(rollouts_per_tick=1, warmup_ticks=3, baseline_ticks=4, lanes=(Lane("only", 0.5),))
    readings = DriftMonitor(least).observe(noise(6), [1.0] * 6)
    assert [bool(reading.lanes) for reading in readings] == [False] * 3 + [True] * 3
    assert cusum_limit(2.0, 1.5) == 0.0, "every tick may be one"
    assert DriftConfig(days_between_false_alarms=0.5).limit(Lane("fast", 0.5)) == cusum_limit(0.5, 2 * 720.0)
    assert least.limit(Lane("only", 0.5), 1e-9) == cusum_limit(0.5, 50.0), "the formula holds from 50 ticks on"


def test_lanes_and_batch_lengths_of_other_settings_begin_anew_and_the_rest_goes_on() -> None:
    monitor = DriftMonitor(config())
    feed(monitor, noise(100, level=2.5))
    kept = monitor.state.statistics["slow"] = 3.0
    spreads = monitor.state.spreads
    same = DriftMonitor(config(lanes=(Lane("slow", 0.1), Lane("new", 0.3))), monitor.state)
    assert same.state.statistics == {"slow": kept, "new": 0.0}
    assert same.state.spreads is spreads
    other = DriftMonitor(config(batch_ticks=(5,)), monitor.state)
    assert [(one.length, one.differences) for one in other.state.spreads] == [(1, 0), (5, 0)]


def test_lists_that_are_not_of_one_length_are_refused_and_a_monitor_that_saw_no_tick_has_no_baseline() -> None:
    monitor = DriftMonitor(config())
    for more in ({"strata": ["a"]}, {"entropies": [0.1]}):
        with pytest.raises(DriftError, match="as many tokens, rounds, strata and entropies"):
            monitor.observe([3.0, 3.0], [1.0, 1.0], **more)
    with pytest.raises(DriftError, match=r"rollout 1 has tokens=3\.0, rounds=nan"):
        monitor.observe([3.0, 3.0], [1.0, math.nan])
    assert monitor.reading(3.0, None) == DriftReading(0, 3.0, None, None, {})


def test_an_operator_s_word_is_where_the_next_fall_begins() -> None:
    monitor = DriftMonitor(config())
    feed(monitor, noise(300))
    monitor.rebase(0.1, 0.01)
    feed(monitor, noise(30, seed=1, level=2.0))
    monitor.acknowledge()
    assert monitor.state.statistics == {"fast": 0.0, "slow": 0.0}
    evidence = monitor.state.evidence
    assert evidence.since == dict.fromkeys(("fast", "slow"), (330, evidence.shift, evidence.shift_variance))
    assert evidence.shift_variance > 0


def test_gains_that_each_follow_a_fall_of_the_policy_do_not_lift_the_baseline_to_a_level_never_seen() -> None:
    """A run whose every publish wins back what the policy's last moves cost: α saws between 3.3 and 3.6 for ever."""
    rng = np.random.default_rng(5)
    monitor = DriftMonitor()
    seen = 0.0
    for _ in range(60):
        for step in range(6):
            value = 3.6 - 0.05 * step + float(rng.normal(0, 0.02))
            seen = max(seen, value)
            monitor.tick(value)
        monitor.rebase(0.3)
    assert monitor.state.baseline < seen + 0.35


@pytest.mark.parametrize("variance", [0.003, math.inf])
def test_after_a_publish_the_strata_are_learnt_apart(variance: float) -> None:
    """A version may be better on one kind of prompts alone; another mix of kinds is then no alarm."""
    rng, monitor = np.random.default_rng(0), DriftMonitor()

    def tick(a: float, b: float, of_a: int = 32) -> bool:
        alphas = [*(a + 0.6 * rng.standard_normal(of_a)), *(b + 0.6 * rng.standard_normal(64 - of_a))]
        [reading] = monitor.observe(alphas, [1.0] * 64, ["A"] * of_a + ["B"] * (64 - of_a))
        return reading.alarm

    for _ in range(300):
        tick(4.0, 3.0)
    monitor.rebase(0.15, variance)
    assert not any(tick(4.0, 3.3) for _ in range(500))
    assert not any(tick(4.0, 3.3, of_a=58) for _ in range(200))
    assert any(tick(3.2, 2.6, of_a=58) for _ in range(100)), "a fall in all kinds is still found"


def test_a_rollback_far_below_the_level_shown_leaves_a_baseline_above_nothing() -> None:
    monitor = DriftMonitor()
    for value in [2.0] * 30 + [5.0] * 30:
        monitor.tick(value)
    monitor.rebase(-3.6, 0.01)
    assert monitor.state.baseline > 0
    for _ in range(30):
        monitor.tick(1.4)
    monitor.change()  # its logarithms exist


def test_a_batch_that_was_scored_before_the_change_discards_no_baseline() -> None:
    monitor, succession = DriftMonitor(), Succession(watched="v1", offered=["v1", "v2"])
    one = ([3.0] * 64, [1.0] * 64)
    names = [f"p{n}" for n in range(64)]
    for _ in range(30):
        succession.feed(monitor, {"v1": one}, names, served="v1", latest="v2")
    succession.feed(monitor, {"v1": one, "v2": one}, names, served="v2", latest="v2")
    assert succession.watched == "v2"
    known = 1 / monitor.state.levels.uncertainty()
    assert succession.feed(monitor, {"v1": one}, names, served="v1", latest="v2") == []
    assert (succession.watched, 1 / monitor.state.levels.uncertainty()) == ("v2", known)
