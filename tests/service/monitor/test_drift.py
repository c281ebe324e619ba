"""The drift monitor: its stated alarm rate and delay are held by simulating the shipped code."""

from __future__ import annotations

import json
import math
from dataclasses import asdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import optimize

from benchmarks.alarms import (
    GROUPS_PER_TICK,
    ROLLOUTS_PER_TICK,
    STRATA,
    Bank,
    Mix,
    blocks,
    config,
    count_alarms,
    daily,
    group_monitor,
    harder,
    make_bank,
    median_delay_rollouts,
    mix_alarms,
    mixed,
    tick_values,
    wander,
    weekend,
)
from service.monitor.drift.limits import DriftConfig, DriftError, Lane, cusum_limit
from service.monitor.drift.monitor import DriftMonitor, DriftReading
from service.monitor.drift.state import DriftState
from service.monitor.drift.succession import Succession

SEED = 20_240_611


@pytest.fixture(scope="module")
def bank() -> Bank:
    return make_bank(800, SEED)


def noise(ticks: int, seed: int = 0, level: float = 3.0, sd: float = 0.15) -> list[float]:
    return list(np.random.default_rng([SEED, seed]).normal(level, sd, ticks))


# --- limits
@pytest.mark.parametrize(
    ("k", "per_minute", "limit"),
    [
        (0.1, 1, 32.7),
        (0.1, 10, 44.2),
        (0.1, 100, 55.7),
        (0.25, 1, 16.0),
        (0.25, 10, 20.6),
        (0.5, 1, 8.8),
        (0.5, 100, 13.4),
    ],
)
def test_limits_match_the_table_of_one_alarm_in_30_days(k: float, per_minute: int, limit: float) -> None:
    assert cusum_limit(k, 43_200 * per_minute) == pytest.approx(limit, abs=0.06)


@given(k=st.floats(0.05, 2.0), run_length=st.floats(50, 1e9))
@settings(max_examples=50, deadline=None)
def test_the_limit_is_the_root_that_scipy_finds(k: float, run_length: float) -> None:
    def excess(h: float) -> float:
        b = h + 1.166
        return math.log((math.exp(2 * k * b) - 2 * k * b - 1) / (2 * k * k)) - math.log(run_length)

    found = cusum_limit(k, run_length)
    if found > 0:
        assert found == pytest.approx(optimize.brentq(excess, -1.0, 30 / k), rel=1e-6, abs=1e-6)


def test_each_lane_gets_half_the_permitted_rate() -> None:
    plan = config(days=30)
    assert plan.limit(Lane("fast", 0.5)) == pytest.approx(cusum_limit(0.5, 2 * 43_200))


# --- the promise: rate and delay
def test_the_simulator_forms_ticks_as_the_monitor_does(bank: Bank) -> None:
    monitor = DriftMonitor(config())
    rng = np.random.default_rng(SEED)
    found = []
    for _ in range(1500):
        draw = rng.integers(0, len(bank.stratum), GROUPS_PER_TICK)
        labels = [STRATA[s] for s in np.repeat(bank.stratum[draw], 8)]
        found += monitor.observe(bank.tokens[draw].ravel().tolist(), bank.rounds[draw].ravel().tolist(), labels)
    slow = np.array([reading.value for reading in found[100:]])
    fast = tick_values(bank, 20_000, np.random.default_rng(SEED))
    assert slow.mean() == pytest.approx(fast.mean(), rel=0.005)
    assert slow.std() == pytest.approx(fast.std(), rel=0.1)


def test_false_alarms_come_at_the_stated_rate_within_a_factor_of_two(bank: Bank) -> None:
    # Ten times the shipped rate, so that a short test sees enough alarms; from a cold start, as after an installation.
    days = 3.0
    streams, ticks = 8, 43_200
    alarms = sum(
        count_alarms(tick_values(bank, ticks, np.random.default_rng([SEED, s])), config(days)) for s in range(streams)
    )
    expected = streams * ticks / (days * 1440)
    assert expected / 2 <= alarms <= expected * 2


@pytest.mark.parametrize("hard", [0.005, 0.01])
def test_a_few_very_hard_prompts_are_no_alarm(hard: float) -> None:
    """30 days near the highest α that there is. A tick counted in full gives 20 to 60 alarms here."""
    rng = np.random.default_rng([2, SEED])
    prompts = np.where(rng.random((43_200, 8)) < hard, 1.5, 4.9 + 0.05 * rng.normal(size=(43_200, 8)))
    values = np.clip(prompts[..., None] + 0.15 * rng.normal(size=(43_200, 8, 8)), 1, 5).mean(axis=(1, 2))
    assert count_alarms(values, config()) <= 3


@pytest.mark.parametrize(("drop", "reference_rollouts"), [(0.05, 800), (0.10, 300), (0.20, 300)])
def test_a_fall_is_found_within_one_and_a_half_times_the_reference_delay(
    bank: Bank, drop: float, reference_rollouts: float
) -> None:
    # The reference gives the delay of each lane alone at the full rate; half the rate costs a few ticks.
    delay = median_delay_rollouts(bank, drop, runs=60, ticks=200, seed=SEED, settings=config())
    assert delay <= 1.5 * reference_rollouts


def test_wander_widens_the_limits_instead_of_alarming(bank: Bank) -> None:
    def alarms(plan: DriftConfig) -> int:
        total = 0
        for stream in range(4):
            rng = np.random.default_rng([SEED, 7, stream])
            total += count_alarms(tick_values(bank, 15_000, rng) * (1 + wander(15_000, 0.01, 60, rng)), plan)
        return total

    protected, naive = alarms(config()), alarms(config(batch_ticks=()))
    assert naive > 20
    assert protected < naive / 5


def test_a_dead_band_ignores_a_small_fall_and_still_finds_a_large_one(bank: Bank) -> None:
    plan = config(dead_band=0.02)
    rng = np.random.default_rng(SEED)
    monitor = DriftMonitor(plan)
    for value in tick_values(bank, 3000, rng):
        monitor.tick(float(value))
    small = [monitor.tick(float(v)).alarm for v in tick_values(bank, 1500, rng) * 0.985]
    large = [monitor.tick(float(v)).alarm for v in tick_values(bank, 100, rng) * 0.9]
    assert not any(small)
    assert any(large)


@pytest.mark.parametrize("per_minute", [1, 64, 640, 6400])
def test_the_rate_is_in_days_at_whatever_traffic(per_minute: int) -> None:
    # The rate in ticks: `test_false_alarms_come_at_the_stated_rate_within_a_factor_of_two`; both: benchmarks/alarms.py.
    monitor = DriftMonitor(config())
    seconds = 60 * max(64 / per_minute, 8)
    for batch in range(400):  # two days at least
        monitor.state.traffic.add(int(seconds / 60 * per_minute), seconds * batch)
    monitor.observe([1.0], [0.0], arrived=seconds * 399)
    ticks_in_30_days = 30 * 1440 * per_minute / ROLLOUTS_PER_TICK
    for lane in monitor.config.lanes:
        assert monitor._limits[lane.name] == pytest.approx(cusum_limit(lane.k, 2 * ticks_in_30_days), rel=0.02)


def test_the_clock_of_arrivals_may_be_wrong() -> None:
    monitor = DriftMonitor(config())
    before = dict(monitor._limits)
    for arrived in (1e9, 0.0, 1e12, 1e9):  # set back, never set
        monitor.observe([1.0], [0.0], arrived=arrived)
    assert monitor._limits["fast"] == pytest.approx(before["fast"], abs=4), "a pause counts as a day"
    monitor.observe([1.0] * 640, [0.0] * 640, arrived=1e9 + 600)
    assert all(math.isfinite(limit) for limit in monitor._limits.values())


@pytest.mark.parametrize("mix", [daily(0.1), weekend(0.1)])
def test_another_mix_of_known_kinds_is_no_alarm(bank: Bank, mix: Mix) -> None:
    alphas, strata = mixed(bank, mix, 8 * 1440, np.random.default_rng(SEED))
    assert mix_alarms(alphas, strata) <= 1
    assert mix_alarms(alphas, None) >= 2


def test_topics_that_come_one_after_the_other_are_no_alarm() -> None:
    topics = make_bank(800, 4, logits=np.random.default_rng(9).normal(0, 0.3, 6), shares=np.full(6, 1 / 6))
    alphas, strata = mixed(topics, blocks(6, 800, 1), 6000, np.random.default_rng(SEED))
    assert mix_alarms(alphas, strata) <= 1


def test_a_fall_is_found_while_the_mix_changes(bank: Bank) -> None:
    alphas, strata = mixed(bank, lambda tick: harder(0.1 if tick % 40 < 20 else -0.1), 1000, np.random.default_rng(3))
    alphas[800:] *= 0.9
    monitor = group_monitor()
    alarms = []
    for row, codes in zip(alphas.tolist(), strata.tolist(), strict=True):
        alarms += [r.alarm for r in monitor.observe(row, [1.0] * 8, [f"kind {code}" for code in codes])]
    assert not any(alarms[:800])
    assert any(alarms[800:820])


def test_a_state_of_the_format_before_goes_on_with_its_baseline() -> None:
    old = {
        **{"format": "draftalign.drift.v2", "ticks": 1500, "baseline": 3.0, "known_ticks": 1440.0, "recent": 3.0},
        **{"shown": 3.0, "offset": 0.1, "statistics": {"fast": 1.0, "slow": 2.0}, "pending": [["", 2.9]]},
        **{"stratum_means": {"": 3.0}, "stratum_counts": {"": 1500}},
        "spreads": [asdict(spread) for spread in DriftMonitor(config()).state.spreads],
    }
    state = DriftState.from_json(json.dumps(old))
    assert (state.ticks, state.baseline) == (1500, 3.0)
    assert state.known_ticks == pytest.approx(1440)
    assert state.pending == [("", 2.9, None)]
    assert DriftMonitor(config(), state).tick(3.0).baseline == 3.0


# --- baseline and rebase
def feed(monitor: DriftMonitor, values: list[float]) -> DriftReading:
    for value in values:
        reading = monitor.tick(value)
    return reading


def test_the_baseline_is_a_running_mean_and_then_frozen() -> None:
    monitor = DriftMonitor(config(baseline_ticks=100))
    values = noise(100)
    feed(monitor, values)
    assert monitor.state.baseline == pytest.approx(np.mean(values))
    feed(monitor, noise(300, level=2.0))
    assert monitor.state.baseline == pytest.approx(np.mean(values))


def test_publishing_often_does_not_hide_a_slow_fall() -> None:
    # 0.1 % a publish is lost although each new drafter gains a little: after 120 publishes 12 % are gone.
    monitor = DriftMonitor(config())
    feed(monitor, noise(1500))
    level, alarmed_at = 3.0, None
    for publish in range(120):
        level -= 0.006
        feed(monitor, noise(10, seed=publish + 1, level=level))
        monitor.rebase(0.003)
        level += 0.003
        reading = feed(monitor, noise(10, seed=1000 + publish, level=level))
        if reading.alarm and alarmed_at is None:
            alarmed_at = publish
    assert alarmed_at is not None
    assert alarmed_at < 60

    forgetful = DriftMonitor(config())
    for publish in range(120):  # what a reset at every publish would see
        forgetful = DriftMonitor(config())
        reading = feed(forgetful, noise(30, seed=publish, level=3.0 - 0.003 * publish))
        assert not reading.alarm


def test_a_gain_raises_the_baseline_so_that_losing_it_again_alarms() -> None:
    monitor = DriftMonitor(config())
    feed(monitor, noise(1500, level=2.0, sd=0.1))
    monitor.rebase(1.0)
    assert monitor.state.baseline == pytest.approx(3.0, abs=0.03)
    assert not feed(monitor, noise(300, seed=1, level=3.0, sd=0.1)).alarm
    assert feed(monitor, noise(20, seed=2, level=2.7, sd=0.1)).alarm  # still far above the first drafter


def test_a_drafter_that_wins_back_what_was_lost_ends_the_alarm() -> None:
    monitor = DriftMonitor(config())
    feed(monitor, noise(1500))
    assert feed(monitor, noise(200, seed=1, level=2.7)).alarm
    before = monitor.state.baseline
    monitor.rebase(0.31)
    assert monitor.state.baseline == pytest.approx(before, abs=0.08)
    assert not feed(monitor, noise(400, seed=2, level=3.01)).alarm


def test_returning_to_a_lesser_drafter_is_a_decision_and_no_alarm() -> None:
    monitor = DriftMonitor(config())
    feed(monitor, noise(1500))
    monitor.rebase(-0.4)
    assert not feed(monitor, noise(500, seed=1, level=2.6)).alarm


def test_a_tick_that_spans_a_publish_is_read_in_the_new_drafters_units() -> None:
    monitor = DriftMonitor(config())
    feed(monitor, noise(30))
    monitor.observe([3.0] * 40, [1.0] * 40)
    monitor.rebase(1.0)
    [reading] = monitor.observe([4.0] * 24, [1.0] * 24)
    assert reading.value == pytest.approx(4.0)


def test_a_lasting_fall_does_not_widen_its_own_limits() -> None:
    monitor = DriftMonitor(config())
    before = feed(monitor, noise(3000)).sd
    after = feed(monitor, noise(500, seed=1, level=2.7))
    assert after.alarm
    assert before is not None
    assert after.sd is not None
    assert after.sd < 1.1 * before


def test_a_short_history_counts_for_what_it_is_worth() -> None:
    # With n ticks behind it, value - mean has the variance sd² (n + 1) / n: the residual must be scaled back.
    values = noise(20)
    monitor = DriftMonitor(config(lanes=(Lane("only", 0.5),)))
    feed(monitor, values)
    reading = monitor.tick(2.7)
    sd = math.sqrt(np.mean(np.diff(values) ** 2) / 2)
    assert reading.sd == pytest.approx(sd)
    expected = (np.mean(values) - 2.7) / sd * math.sqrt(20 / 21) - 0.5
    assert reading.lanes["only"].statistic == pytest.approx(expected)


def test_retraining_that_keeps_up_with_the_policy_never_alarms() -> None:
    rng = np.random.default_rng(SEED)
    monitor = DriftMonitor(config())
    for publish in range(150):
        reading = feed(monitor, noise(20, seed=publish, level=3.0 - 0.02))
        monitor.rebase(0.02 + float(rng.normal(0, 0.01)), 0.01**2)
        reading = feed(monitor, noise(20, seed=500 + publish, level=3.0))
        assert not reading.alarm


# --- publishes in a world that stands still
def publishing(
    bank: Bank, monitor: DriftMonitor, ticks: int, *, every: int, seed: int, fall_at: int | None = None, drop: float = 0
) -> list[bool]:
    """Alarm or not at every tick, beside publishes of drafters that are no better; the paired error is 0.7 %."""
    rng = np.random.default_rng([SEED, seed])
    values = tick_values(bank, ticks, rng)
    error = 0.007 * float(values.mean())
    alarms = []
    for index, value in enumerate(values.tolist()):
        if index and index % every == 0:
            measured_variance = error**2 * float(rng.chisquare(15)) / 15
            monitor.rebase(float(rng.normal(0, error)), measured_variance)
        fallen = fall_at is not None and index >= fall_at
        alarms.append(monitor.tick(value * (1 - drop if fallen else 1)).alarm)
    return alarms


@pytest.mark.parametrize("every", [8, 64])
def test_publishing_drafters_that_are_no_better_raises_no_alarm(bank: Bank, every: int) -> None:
    alarms = [publishing(bank, DriftMonitor(config()), 10_000, every=every, seed=run) for run in range(4)]
    assert np.mean(alarms) < 0.02


@pytest.mark.parametrize(("every", "drop"), [(8, 0.2), (64, 0.1)])
def test_a_fall_is_found_beside_publishes_that_do_not_repair_it(bank: Bank, every: int, drop: float) -> None:
    for run in range(6):
        monitor = DriftMonitor(config())
        alarms = publishing(bank, monitor, 3200, every=every, seed=run, fall_at=3000, drop=drop)
        assert any(alarms[3000:])


def test_a_baseline_that_was_handed_over_with_an_error_is_learnt_again() -> None:
    monitor = DriftMonitor(config())
    feed(monitor, noise(1500))
    monitor.rebase(0.3, 0.15**2)  # the truth is that nothing changed; the error is two standard deviations
    assert monitor.state.baseline == pytest.approx(3.3, abs=0.02)
    assert not feed(monitor, noise(300, seed=1)).alarm
    assert monitor.state.baseline == pytest.approx(3.0, abs=0.03)


def test_a_difference_that_may_be_chance_ends_no_alarm() -> None:
    monitor = DriftMonitor(config())
    feed(monitor, noise(1500))
    assert feed(monitor, noise(100, seed=1, level=2.7)).alarm
    before = dict(monitor.state.statistics)
    monitor.rebase(0.05, 0.03**2)
    assert monitor.state.statistics == before


# --- which drafter is watched
def replays(prompts: int, **alpha: float) -> dict[str, tuple[list[float], list[float]]]:
    """Per version the tokens and rounds of 8 rollouts of each prompt; prompts differ a little in α."""
    spread = np.repeat(np.linspace(0.9, 1.1, prompts), 8)
    return {v: ([12.0] * len(spread), (12.0 / (a * spread)).tolist()) for v, a in alpha.items()}


def names(prompts: int, start: int = 0) -> list[str]:
    return [f"p{start + n}" for n in range(prompts) for _ in range(8)]


def watching(monitor: DriftMonitor) -> Succession:
    """Thirty ticks under v1."""
    found = Succession()
    for _ in range(30):
        found.feed(monitor, replays(8, v1=3.0), names(8), served="v1", latest="v1")
    return found


def test_a_version_that_changed_outside_the_worker_moves_the_baseline_by_what_it_measures() -> None:
    """A person rolls back to a lesser drafter: nobody told the worker, and it is no alarm."""
    monitor = DriftMonitor(config())
    succession = watching(monitor)
    for _ in range(2):
        succession.feed(monitor, replays(8, v1=3.0, v0=2.0), names(8), served="v0", latest="v0")
    assert succession.watched == "v0"
    assert monitor.state.baseline == pytest.approx(2.0, abs=0.05)
    for _ in range(60):
        [reading] = succession.feed(monitor, replays(8, v0=2.0), names(8), served="v0", latest="v0")
        assert not reading.alarm


def test_a_new_version_is_compared_on_a_tick_before_it_is_watched() -> None:
    monitor = DriftMonitor(config())
    succession = watching(monitor)
    both = replays(4, v1=3.0, v2=3.3)
    assert succession.feed(monitor, both, names(4), served="v2", latest="v2") == []
    assert succession.watched == "v1", "32 rollouts are half a tick"
    succession.feed(monitor, both, names(4, start=4), served="v2", latest="v2")
    assert succession.watched == "v2"
    assert (succession.successor, succession.differences) == (None, {})


def test_versions_that_follow_each_other_faster_than_they_can_be_compared_are_followed() -> None:
    monitor = DriftMonitor(config())
    succession = watching(monitor)
    for n in range(2, 40):
        known = {v: 3.0 for v in (succession.watched, f"v{n}") if v is not None}
        succession.feed(monitor, replays(4, **known), names(4, start=4 * n), served=f"v{n}", latest=f"v{n}")
        assert int((succession.watched or "v0")[1:]) >= n - 2
    assert monitor.state.baseline == pytest.approx(3.0, abs=0.1)


def noisy(rng: np.random.Generator, **level: float) -> tuple[dict[str, tuple[list[float], list[float]]], list[str]]:
    """One tick of 8 new prompts of 8 rollouts; their difficulty is common to all versions, a little is each one's."""
    hard = np.repeat(rng.normal(0, 0.1, 8), 8) + rng.normal(0, 0.12, 64)
    found = {}
    for version, alpha in level.items():
        own = np.repeat(rng.normal(0, 0.02, 8), 8) + rng.normal(0, 0.02, 64)
        found[version] = ([100.0] * 64, (100.0 / (alpha * np.exp(hard + own))).tolist())
    return found, [f"{rng.integers(1 << 40)}" for _ in range(8) for _ in range(8)][::8] * 8


@pytest.mark.parametrize(("every", "cost"), [(8, 0.02), (8, 0.05), (20, 0.03)])
def test_publishes_that_win_back_what_the_policy_costs_raise_no_lasting_alarm(every: int, cost: float) -> None:
    """The policy moves all the time, each version wins it back: what is served stands at 3.0 on average, for ever."""
    rng = np.random.default_rng([SEED, every, int(100 * cost)])
    monitor, succession = DriftMonitor(config()), Succession()
    alarms: list[bool] = []
    for tick in range(1200):
        version = tick // every
        behind = tick % every / every * cost  # how much the policy has cost the version that is served
        watched = int((succession.watched or f"v{version}")[1:])
        levels = {f"v{v}": 3.0 * math.exp(-behind - cost * (version - v)) for v in {version, watched}}
        found, prompts = noisy(rng, **levels)
        for reading in succession.feed(monitor, found, prompts, served=f"v{version}", latest=f"v{version}"):
            alarms.append(reading.alarm)
    assert np.mean(alarms) < 0.1
    assert monitor.state.baseline < 3.3


def test_a_gate_that_publishes_ever_worse_drafters_is_noticed() -> None:
    rng = np.random.default_rng(SEED)
    monitor, succession = DriftMonitor(config()), Succession()
    alarmed_at = None
    for tick in range(300):
        version = max(0, tick - 100) // 10
        watched = int((succession.watched or "v0")[1:])
        found, prompts = noisy(rng, **{f"v{v}": 3.0 * 0.97**v for v in {version, watched}})
        for reading in succession.feed(monitor, found, prompts, served=f"v{version}", latest=f"v{version}"):
            if reading.alarm and alarmed_at is None:
                alarmed_at = version
    assert alarmed_at is not None
    assert alarmed_at <= 8, "a fifth is lost by then"


def test_a_version_that_is_proven_worse_does_not_become_the_level_to_compare_with() -> None:
    rng = np.random.default_rng(SEED)
    monitor, succession = DriftMonitor(config()), Succession()
    alarms = []
    for tick in range(160):
        version = "v2" if tick >= 80 else "v1"
        found, prompts = noisy(rng, v1=3.0, **({} if version == "v1" else {"v2": 1.6}))
        alarms += [r.alarm for r in succession.feed(monitor, found, prompts, served=version, latest=version)]
    assert not any(alarms[:80])
    assert all(alarms[85:])
    assert monitor.state.baseline > 2.7
    change = monitor.change()
    assert change is not None
    assert change.drafter.value == pytest.approx(math.log(1.6 / 3.0), abs=0.1)
    assert abs(change.held.value) < 0.1


def test_an_engine_that_still_drafts_with_an_older_version_hands_nothing_back() -> None:
    monitor = DriftMonitor(config())
    succession = watching(monitor)
    for n in range(2):
        succession.feed(monitor, replays(8, v1=3.0, v2=3.3), names(8, start=8 * n), served="v2", latest="v2")
    before = monitor.state.baseline
    succession.feed(monitor, replays(8, v1=3.0, v2=3.3), names(8), served="v1", latest="v2")
    assert succession.watched == "v2"
    assert succession.successor is None
    assert monitor.state.baseline == pytest.approx(before, abs=0.1)


def test_a_version_is_watched_though_a_newer_one_is_offered_by_the_time_its_rollouts_are_scored() -> None:
    """A worker that is behind scores rollouts of a version that it has replaced already."""
    monitor = DriftMonitor(config())
    succession = watching(monitor)
    succession.feed(monitor, replays(8, v1=3.0), names(8), served="v1", latest="v2")
    for n in range(2):
        succession.feed(monitor, replays(8, v1=3.0, v2=3.3), names(8, start=8 * n), served="v2", latest="v3")
    assert succession.watched == "v2"


def test_the_difference_counts_prompts_and_not_siblings() -> None:
    succession = Succession(differences={"a": [8 * 0.4, 8.0], "b": [8 * 0.2, 8.0]})
    mean, variance = succession.difference()
    assert mean == pytest.approx(0.3)
    assert math.sqrt(variance) == pytest.approx(np.std([0.4, 0.2], ddof=1) / math.sqrt(2))
    alone = Succession(differences={"a": [8 * 0.4, 8.0]})
    mean, variance = alone.difference()
    assert mean == pytest.approx(0.4)
    assert variance == math.inf


def test_without_the_watched_version_the_baseline_starts_anew() -> None:
    monitor = DriftMonitor(config())
    succession = watching(monitor)
    [reading] = succession.feed(monitor, replays(8, v9=1.5), names(8), served="v9", latest="v9")
    assert succession.watched == "v9"
    assert reading.baseline == pytest.approx(1.5, abs=0.01)


def test_acknowledging_keeps_the_baseline_and_resetting_learns_another() -> None:
    monitor = DriftMonitor(config())
    feed(monitor, noise(1500))
    assert feed(monitor, noise(50, seed=1, level=2.6)).alarm
    monitor.acknowledge()
    assert max(monitor.state.statistics.values()) == 0
    assert feed(monitor, noise(50, seed=2, level=2.6)).alarm, "the fall is still there"
    traffic = monitor.state.traffic
    monitor.reset()
    assert not any(feed(monitor, [value]).alarm for value in noise(500, seed=3, level=2.6))
    assert monitor.state.baseline == pytest.approx(2.6, abs=0.03)
    assert monitor.state.traffic is traffic


def test_an_alarm_clears_soon_after_the_level_is_back() -> None:
    monitor = DriftMonitor(config())
    feed(monitor, noise(1500))
    assert feed(monitor, noise(2000, seed=1, level=2.4)).alarm
    assert not feed(monitor, noise(120, seed=2, level=3.0)).alarm


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
    with pytest.raises(DriftError, match="starts afresh"):
        DriftState.from_json(text)


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


@pytest.mark.parametrize(
    "broken",
    [
        {"rollouts_per_tick": 0},
        {"warmup_ticks": 1},
        {"baseline_ticks": 5},
        {"dead_band": -0.1},
        {"lanes": ()},
        {"lanes": (Lane("a", 0.5), Lane("a", 0.1))},
        {"days_between_false_alarms": 0.0},
    ],
)
def test_settings_that_make_no_sense_are_refused(broken: dict[str, object]) -> None:
    with pytest.raises(DriftError):
        DriftConfig(**broken)  # type: ignore[arg-type]


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
    known = monitor.state.known_ticks
    assert succession.feed(monitor, {"v1": one}, names, served="v1", latest="v2") == []
    assert (succession.watched, monitor.state.known_ticks) == ("v2", known)
