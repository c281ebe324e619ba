"""The drift monitor: its stated alarm rate and delay are held by simulating the shipped code."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from helpers.worker.drift_fixtures import SEED, SHORT, UNLIKE, feed, first_alarm, noise, sd_of
from hypothesis import example, given, settings
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
    median_delays_rollouts,
    mix_alarms,
    mixed,
    tick_values,
    wander,
    weekend,
)
from service.monitor.drift.limits import DriftConfig, Lane, cusum_limit
from service.monitor.drift.monitor import DriftMonitor
from service.monitor.drift.state import DriftState, Rise


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


@example(k=0.05, run_length=50.0)
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


def test_a_fall_is_found_within_one_and_a_half_times_the_reference_delay(bank: Bank) -> None:
    # The reference gives the delay of each lane alone at the full rate; half the rate costs a few ticks.
    references = {0.05: 800, 0.10: 300, 0.20: 300}
    delays = median_delays_rollouts(bank, list(references), runs=60, ticks=200, seed=SEED, settings=config())
    for (drop, reference), delay in zip(references.items(), delays, strict=True):
        assert delay <= 1.5 * reference, drop


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


def validated(rng: np.random.Generator, monitor: DriftMonitor, kind: str, fall_at: int) -> tuple[int, int | None]:
    """Alarms before `fall_at`, and rollouts from there until α's fall by 10 % is found; None: it is not.

    A step has 32 prompts of 8. After each tenth one come 512 greedy answers, whose drafts are harder.
    """
    alarms = found = 0
    for step in range(fall_at + 40):
        level = 3.0 if step < fall_at else 2.7
        trained = level * np.exp(rng.normal(0, 0.12, 32).repeat(8) + rng.normal(0, 0.08, 256))
        batches = [(trained, "")]
        if step % 10 == 9:
            batches.append((0.86 * level * np.exp(rng.normal(0, 0.15, 512)), kind))
        for alphas, of in batches:
            found += len(alphas) if step >= fall_at else 0
            for reading in monitor.observe(alphas.tolist(), [1.0] * len(alphas), [of] * len(alphas)):
                if reading.alarm and step >= fall_at:
                    return alarms, found
                if reading.alarm:
                    alarms += 1
                    monitor.acknowledge()
    return alarms, None


def test_greedy_validations_between_the_steps_are_no_alarm_and_hide_no_fall() -> None:
    """The worker tells them apart (`service.worker.scoring`). As one kind they are alarms at first, and then noise."""
    told = [validated(np.random.default_rng(seed), DriftMonitor(config()), "greedy", 150) for seed in range(4)]
    assert sum(alarms for alarms, _ in told) <= 1
    assert all(found is not None and found <= 1024 for _, found in told)
    together = [validated(np.random.default_rng(seed), DriftMonitor(config()), "", 150) for seed in range(4)]
    assert all(alarms > 0 for alarms, _ in together)
    assert all(found is None or found > 1024 for _, found in together)


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


# --- baseline and rebase
def test_the_baseline_is_a_running_mean_and_then_frozen() -> None:
    monitor = DriftMonitor(config(baseline_ticks=100))
    values = noise(100)
    feed(monitor, values)
    assert monitor.state.baseline == pytest.approx(np.mean(values))
    feed(monitor, noise(300, level=2.0))
    assert monitor.state.baseline == pytest.approx(np.mean(values))


@pytest.mark.parametrize("drop", [0.75, 0.92])
def test_a_fall_after_a_rise_that_lasted_is_found_though_alpha_is_above_where_it_began(drop: float) -> None:
    monitor, high = DriftMonitor(SHORT), 3.0 * 1.4 if drop < 0.9 else 3.0 * 1.1
    assert first_alarm(monitor, noise(300)) is None
    climb = [v + (high - 3.0) * n / 50 for n, v in enumerate(noise(50, seed=1))]
    assert first_alarm(monitor, [*climb, *noise(260, seed=2, level=high)]) is None
    assert monitor.state.baseline == pytest.approx(high, rel=0.01)
    found = first_alarm(monitor, noise(300, seed=3, level=drop * high))
    assert found is not None
    assert found < 60
    assert drop * high > 3.0


@pytest.mark.parametrize(
    ("start", "rise", "climb", "fall", "within"),
    [(2200, 1.25, 1, 0.97, 40), (800, 1.25, 1, 0.95, 30), (2200, 1.12, 700, 0.95, 30), (2200, 1.3, 3000, 0.94, 30)],
)
def test_after_a_rise_the_alarm_is_as_keen_as_before_it(
    start: int, rise: float, climb: int, fall: float, within: int
) -> None:
    """As shipped. Before, the rise was noise: after one of 25 % no fall of 3 % was found in 4,000 ticks."""
    monitor, sd = DriftMonitor(), 0.09
    assert first_alarm(monitor, noise(start, seed=21, sd=sd)) is None
    before = sd_of(monitor)
    slope = [v + 3.0 * (rise - 1) * n / climb for n, v in enumerate(noise(climb, seed=22, sd=sd))]
    assert first_alarm(monitor, [*slope, *noise(2600, seed=23, level=3.0 * rise, sd=sd)]) is None
    assert monitor.state.baseline == pytest.approx(3.0 * rise, rel=0.01)
    assert sd_of(monitor) == pytest.approx(before, rel=0.3)
    assert monitor.state.offset == 0.0  # nothing was published
    found = first_alarm(monitor, noise(200, seed=24, level=3.0 * rise * fall, sd=sd))
    assert found is not None
    assert found < within


def test_a_rise_that_does_not_last_was_noise_and_the_limits_know_it() -> None:
    monitor = DriftMonitor(SHORT)
    feed(monitor, noise(20))
    feed(monitor, noise(280, seed=29, sd=0.3))
    before = sd_of(monitor)
    assert before > 0.25
    feed(monitor, noise(60, seed=30, level=4.8, sd=0.3))
    assert sd_of(monitor) == pytest.approx(before, rel=0.2)
    assert DriftState.from_json(monitor.state.to_json()) == monitor.state
    other = DriftMonitor(
        DriftConfig(baseline_ticks=100, batch_ticks=(4,)), DriftState.from_json(monitor.state.to_json())
    )
    feed(other, noise(200, seed=32, level=4.8))
    assert [spread.length for spread in other.state.spreads] == [1, 4]
    feed(monitor, noise(400, seed=31))
    assert sd_of(monitor) > 2 * before


@pytest.mark.parametrize(("share", "counts"), [(0.45, False), (0.55, True)])
def test_what_was_known_before_a_rise_counts_from_half_its_limit_on(share: float, counts: bool) -> None:
    monitor = DriftMonitor(SHORT)
    feed(monitor, noise(300))
    known = [replace(spread, variance=4 * spread.variance) for spread in monitor.state.spreads]
    sd = monitor._sd() or 0.0
    monitor.state.rise = Rise(statistic=share * max(monitor._limits.values()), spreads=known)
    assert monitor._sd() == pytest.approx(sd * (2 if counts else 1))


def test_a_rise_ends_where_the_baseline_is_learnt_from_scratch() -> None:
    """It was above a baseline that is discarded: the new one was raised by it. And it is no noise."""
    monitor = DriftMonitor(SHORT)
    feed(monitor, noise(300))
    before = monitor._sd()
    feed(monitor, noise(100, seed=8, level=4.2))
    assert monitor.state.rise.ticks > 0
    monitor.rebase(-0.6, math.inf)
    assert monitor.state.rise == Rise()
    assert monitor._sd() == pytest.approx(before, rel=0.2)
    feed(monitor, noise(60, seed=9, level=3.6))
    assert monitor.state.baseline == pytest.approx(3.6, rel=0.02)


def test_a_rise_that_raised_the_baseline_is_over_and_pays_what_worse_versions_owe() -> None:
    monitor = DriftMonitor(SHORT)
    feed(monitor, noise(300))
    monitor.rebase(-0.3, 1e-6, decided=False)
    assert monitor.state.levels.owed == pytest.approx(-0.3, rel=0.1)
    raised = 0
    for value in noise(300, seed=10, level=3.6):
        before = monitor.state.baseline
        monitor.tick(value)
        if monitor.state.baseline > before + 0.2:
            raised += 1
            assert monitor.state.rise == Rise()
    assert raised == 1
    assert monitor.state.levels.owed == 0.0
    feed(monitor, noise(300, seed=11, level=3.6))
    assert monitor.state.baseline == pytest.approx(3.6, rel=0.01)


@pytest.mark.parametrize("ticks", [50, 180])
def test_only_a_rise_that_lasts_as_long_as_a_baseline_is_learnt_raises_it(ticks: int) -> None:
    """Its end is noticed some 50 ticks late: then the statistic is below the limit again."""
    monitor = DriftMonitor(SHORT)
    feed(monitor, noise(300))
    before = monitor.state.baseline
    feed(monitor, noise(ticks, seed=4, level=3.3))
    assert (monitor.state.baseline == before) == (ticks < 100)
    if ticks < 100:
        assert first_alarm(monitor, noise(400, seed=5)) is None
        assert monitor.state.rise.ticks == 0
        assert monitor.state.baseline == before
    else:
        assert monitor.state.baseline == pytest.approx(3.3, rel=0.01)


def test_where_nothing_changes_the_baseline_stays_where_it_is() -> None:
    monitor = DriftMonitor(SHORT)
    feed(monitor, noise(100))
    before = monitor.state.baseline
    feed(monitor, noise(8000, seed=6))
    assert monitor.state.baseline == before


def test_a_rise_of_one_kind_of_prompts_raises_the_level_of_that_kind() -> None:
    monitor, rng = DriftMonitor(SHORT), np.random.default_rng(7)
    strata = ["easy"] * 32 + ["hard"] * 32

    def feed_kinds(ticks: int, easy: float, hard: float) -> bool:
        alphas = np.concatenate([rng.normal(easy, 0.3, (ticks, 32)), rng.normal(hard, 0.3, (ticks, 32))], axis=1)
        return any(monitor.observe(row, [1.0] * 64, strata)[0].alarm for row in alphas.tolist())

    assert not feed_kinds(300, 3.5, 2.5)
    assert not feed_kinds(400, 4.1, 2.5)
    found = dict(zip(monitor.state.levels.names, monitor.state.levels.means, strict=True))
    assert found["easy"] == pytest.approx(4.1, abs=0.05)
    assert found["hard"] == pytest.approx(2.5, abs=0.05)
    assert feed_kinds(100, 3.7, 2.5)


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


@pytest.mark.parametrize(
    ("lost", "difference", "variance", "decided", "moved"),
    [
        (0.0, 0.5, 0.01, False, 0.5),
        (0.0, 0.1, 0.01, False, 0.1),
        (0.0, -0.1, 0.01, False, -0.1),  # may be chance: two standard errors are 0.2
        (0.0, -0.5, 0.01, False, -0.2),  # 0.3 of it is proven, and is no level to compare with
        (0.0, -0.5, 0.01, True, -0.5),  # a person wants it
        (0.0, -0.5, 0.0, False, 0.0),
        (0.3, 0.1, 0.01, False, 0.0),  # only makes up for a part of what was lost
        (0.3, 0.1, 0.0, True, 0.0),
        (0.3, 0.25, 0.01, False, 0.0),
        (0.3, 0.5, 0.01, False, 0.2),
        (0.3, 0.5, 0.0, False, 0.2),
    ],
)
def test_a_version_moves_the_baseline_by_what_is_not_made_up_for_nor_proven_worse(
    lost: float, difference: float, variance: float, decided: bool, moved: float
) -> None:
    monitor = DriftMonitor(config())
    feed(monitor, noise(400))
    state = monitor.state
    monitor.observe([3.0], [1.0])
    state.recent = state.shown = state.baseline - lost
    state.offset, state.evidence.shift, state.evidence.shift_variance, state.levels.owed = 0.1, 0.2, 0.3, -0.05
    state.differences = UNLIKE
    before, unsure = state.baseline, state.levels.uncertainty()
    sd = monitor._sd()
    assert sd is not None
    monitor.rebase(difference, variance, decided=decided)
    assert state.baseline - before == pytest.approx(moved, abs=1e-12)
    assert state.recent == state.shown == pytest.approx(before - lost + difference), "in the new version's units"
    assert state.pending[0][1] == pytest.approx(3.0 + difference)
    assert state.offset == pytest.approx(0.1 + moved), "a publish is no wander"
    sure = not decided and difference <= -4 * math.sqrt(variance)
    told = difference if sure else difference - moved
    assert state.evidence.shift == pytest.approx(0.2 + told), "the rest is the version's doing, all of a sure loss"
    assert state.levels.forgiven == pytest.approx(moved if sure else 0.0)
    assert state.evidence.shift_variance == pytest.approx(0.3 + variance)
    assert state.levels.owed == pytest.approx(min(0.0, -0.05 + difference - moved)), "a loss is not learnt as the level"
    assert state.levels.uncertainty() == pytest.approx(unsure + variance / sd**2)
    assert state.levels.doubted is (variance > 0)


def test_a_version_that_comes_after_the_first_tick_moves_the_baseline_and_one_that_comes_before_does_not() -> None:
    monitor = DriftMonitor(config())
    monitor.rebase(0.5)
    assert monitor.state == DriftMonitor(config()).state
    monitor.tick(3.0)
    monitor.rebase(0.5)
    assert monitor.state.baseline == 3.5
    known = monitor.state.levels.uncertainty()
    assert known == pytest.approx(1.0), "a difference without an error leaves it as sure as it was"
    monitor.rebase(0.5, 0.01)
    assert 1 / monitor.state.levels.uncertainty() < 1e-8, "nobody knows yet how much that is in ticks"
