"""The drift monitor's statistic tick by tick, its levels and spread, and publishes that gain nothing."""

from __future__ import annotations

import math

import numpy as np
import pytest
from helpers.worker.drift_fixtures import UNLIKE, feed, noise

from benchmarks.alarms import Bank, config, publishing
from service.monitor.drift.limits import Lane
from service.monitor.drift.monitor import DriftMonitor
from service.monitor.drift.state import Levels, Spread


# --- the statistic, tick by tick
@pytest.mark.parametrize("band", [0.0, 0.02])
def test_each_lane_is_pages_cusum_of_losses_in_standard_deviations(band: float) -> None:
    """Against the mean of the ticks before, whose own error counts, until that is frozen; held 5 above the limit.

    A tick counts for 2.5 standard deviations at most.
    """
    lanes = (Lane("fast", 0.5), Lane("slow", 0.1))
    monitor = DriftMonitor(config(baseline_ticks=100, lanes=lanes, dead_band=band))
    values = [*noise(150), *noise(40, seed=1, level=2.7), *noise(60, seed=2, level=3.2)]
    statistic, recent, shown, capped = {"fast": 0.0, "slow": 0.0}, 0.0, 0.0, 0
    for n, value in enumerate(values):
        known = min(n, 100)
        mean = float(np.mean(values[:known])) if n else value
        reading = monitor.tick(value)
        assert (reading.ticks, reading.value) == pytest.approx((n + 1, value))
        recent += max(1 / 32, 1 / (n + 1)) * (value - recent)
        shown += max(1 / 4, 1 / (n + 1)) * (value - shown)
        assert (monitor.state.recent, monitor.state.shown) == pytest.approx((recent, shown))
        if n < 20:
            assert not reading.lanes
            continue
        assert reading.sd is not None
        loss = (mean - value) / math.sqrt(1 + 1 / known) - band * mean
        for lane in lanes:
            limit = monitor.config.limit(lane)
            grown = max(0.0, statistic[lane.name] + min(loss / reading.sd, 2.5) - lane.k)
            statistic[lane.name] = min(grown, limit + 5)
            capped += grown > limit + 5
            found = reading.lanes[lane.name]
            assert (found.statistic, found.limit) == pytest.approx((statistic[lane.name], limit))
            since = monitor.state.evidence.since[lane.name]
            assert (since == (n + 1, 0.0, 0.0)) == (statistic[lane.name] == 0), "there a fall would begin"
    assert capped
    assert monitor.state.baseline == pytest.approx(np.mean(values[:100]))
    assert len(monitor.state.evidence.rows) == 128
    assert monitor.state.evidence.rows[-1].tick == 250


def test_the_sd_is_the_largest_over_batch_lengths_that_were_seen_eight_times() -> None:
    monitor = DriftMonitor(config(batch_ticks=(4, 9)))
    feed(monitor, noise(5))
    for differences, sd in ((7, 0.3), (8, 0.6)):
        monitor.state.spreads = [
            Spread(1, variance=0.04, differences=3),
            Spread(4, variance=0.09, differences=differences),
            Spread(9, variance=0.01, differences=99),
        ]
        found = monitor._sd()
        assert found == pytest.approx(sd)
    monitor.state.spreads = [Spread(1, variance=2e-6**2)]
    assert monitor._sd() is None, "a millionth of α is rounding"


@pytest.mark.parametrize(("ticks", "factor", "counted"), [(60, 0.8, 1), (99, 0.6, 1), (100, 0.6, 0), (300, 0.45, 1)])
def test_ticks_of_what_may_be_a_fall_are_no_spread_once_the_baseline_is_learnt(
    ticks: int, factor: float, counted: int
) -> None:
    """From half of a limit on."""
    monitor = DriftMonitor(config(baseline_ticks=100))
    feed(monitor, noise(ticks))
    before = monitor.state.spreads[0].differences
    monitor.state.statistics = {"fast": factor * monitor._limits["fast"], "slow": 0.0}
    monitor.tick(monitor.state.baseline)
    assert monitor.state.spreads[0].differences == before + counted


def test_a_rebase_and_what_corrects_it_are_no_wander_and_the_baseline_is_frozen_again_when_it_is_as_sure() -> None:
    monitor = DriftMonitor(config(baseline_ticks=100))
    feed(monitor, noise(100))
    learnt = monitor.state.baseline
    assert (monitor.state.offset, monitor.state.levels.doubted) == (0.0, False)
    monitor.rebase(0.2, 0.1**2)
    values = noise(200, seed=1)
    feed(monitor, values[:90])
    assert monitor.state.levels.doubted
    assert 0 < 1 / monitor.state.levels.uncertainty() < 100
    assert monitor.state.offset == pytest.approx(monitor.state.baseline - learnt)
    feed(monitor, values[90:])
    assert not monitor.state.levels.doubted
    assert 100 <= 1 / monitor.state.levels.uncertainty() + 1e-6 < 101
    assert monitor.state.offset == pytest.approx(monitor.state.baseline - learnt)
    frozen = monitor.state.baseline
    monitor.tick(3.5)
    assert monitor.state.baseline == frozen


def test_what_a_worse_version_costs_is_not_learnt_and_the_step_of_a_publish_is_no_spread() -> None:
    plain, published = (
        DriftMonitor(config(lanes=(Lane("only", 5.0),))),
        DriftMonitor(config(lanes=(Lane("only", 5.0),))),
    )
    values = noise(200)
    for monitor in (plain, published):
        feed(monitor, values[:100])
    published.rebase(-0.5, 0.1**2, decided=False)  # 0.3 is more than two standard errors
    for value in values[100:]:
        plain.tick(value)
        published.tick(value - 0.5)
    assert published.state.levels.owed == pytest.approx(-0.3)
    assert published.state.baseline == pytest.approx(plain.state.baseline - 0.2, abs=0.02)
    ratio = published.state.spreads[0].variance / plain.state.spreads[0].variance
    assert ratio == pytest.approx(1.0, abs=0.03), "0.3 of one step in 200"


# --- levels and spread
def test_levels_are_what_bayes_makes_of_the_ticks_and_of_the_errors_of_rebases() -> None:
    """In the form of precisions: each tick adds its share to that of its stratum. A filter works with variances."""
    rng, n = np.random.default_rng(5), 3
    root = rng.normal(size=(n, n))
    covariance, means = root @ root.T + np.eye(n), rng.normal(3.0, 0.3, n)
    shares = [0.5, 0.4, 0.1]
    levels = Levels(["a", "b", "c"], means.tolist(), shares, [1.0, None, 0.5], covariance.tolist())
    precision = np.linalg.inv(covariance)
    weighted = precision @ means
    for _ in range(20):
        j, share, seen = int(rng.integers(n)), float(rng.uniform(0.1, 1.0)), float(rng.normal(3.0, 0.5))
        levels.learn("abc"[j], share, seen, None)
        precision[j, j] += share
        weighted[j] += share * seen
    posterior = np.linalg.inv(precision)
    np.testing.assert_allclose(levels.covariance, posterior)
    np.testing.assert_allclose(levels.means, posterior @ weighted)
    w = np.array(shares)
    assert levels.level == pytest.approx(w @ posterior @ weighted)
    assert levels.uncertainty() == pytest.approx(w @ posterior @ w)
    assert levels.uncertainty({"b": 0.3, "c": 0.7}) == pytest.approx(
        np.array([0, 0.3, 0.7]) @ posterior @ [0, 0.3, 0.7]
    )
    assert levels.entropies == [1.0, None, 0.5]
    levels.learn("b", 0.5, 3.0, 0.8)
    assert levels.entropies[1] == 0.8, "the first that is known"
    own = levels.covariance[0][0]
    levels.learn("a", 0.5, 3.0, 0.4)
    assert levels.entropies[0] == pytest.approx(1.0 + own / (own + 1 / 0.5) * (0.4 - 1.0)), "as surely as the level"


@pytest.mark.parametrize("variance", [0.0, 0.2, 2e8, math.inf])
def test_a_rebase_has_one_error_for_all_strata_and_one_for_each_that_is_larger_the_rarer_it_is(variance: float) -> None:
    covariance = np.array([[0.5, 0.1, 0.0], [0.1, 0.4, 0.0], [0.0, 0.0, 1e9]])
    levels = Levels(["a", "b", "c"], [3.0, 0.2, 2.0], [0.75, 0.249, 0.001], [None] * 3, covariance.tolist())
    levels.move(-0.5, variance)
    np.testing.assert_allclose(levels.means, [2.5, 0.02, 1.5])
    assert levels.doubted is (variance > 0)
    wanted = np.diag([1e9] * 3)
    if math.isfinite(variance):
        wanted = covariance + variance + np.diag(variance * (1 / np.array([0.75, 0.249, 1 / 64]) - 1))
    np.testing.assert_allclose(levels.covariance, np.minimum(wanted, 1e9))


def test_a_stratum_is_known_by_a_tick_s_worth_of_rollouts() -> None:
    levels = Levels()
    for name, mean in (("a", 3.0), ("b", 2.0), ("a", 9.0)):
        levels.meet(name, mean)
    assert (levels.names, levels.means, levels.shares) == (["a", "b"], [3.0, 2.0], [0.0, 0.0])
    assert levels.covariance == [[1e9, 0.0], [0.0, 1e9]]
    for part in (0.25, 0.5, 0.25 + 1e-6):
        assert not levels.has_level("a")
        levels.learn("a", part, 3.0, None)
    assert levels.has_level("a")
    assert not levels.has_level("b")


@pytest.mark.parametrize("length", [1, 4])
def test_the_spread_is_of_successive_differences_of_batch_means_with_a_memory(length: int) -> None:
    values = np.random.default_rng(6).normal(3.0, 0.2, 40 * length)
    spread, memory = Spread(length), 30 * length
    means = values.reshape(-1, length).mean(axis=1)
    halves = np.square(np.diff(means)) / 2
    for tick, value in enumerate(values.tolist(), 1):
        spread.add(value, memory, counts=True)
        if tick == 31 * length:  # 30 differences: as many as the memory holds
            assert spread.variance == pytest.approx(halves[:30].mean())
            assert spread.tick_sd == pytest.approx(math.sqrt(length * halves[:30].mean()))
    kept = (29 / 30) ** np.arange(8, -1, -1)
    assert spread.variance == pytest.approx(kept[0] * 29 / 30 * halves[:30].mean() + (kept / 30) @ halves[30:])
    before, known = spread.variance, spread.differences
    for value in [9.0] * length:
        spread.add(value, memory, counts=False)
    assert (spread.variance, spread.differences, spread.last) == (before, known, 9.0)
    short = Spread(1)
    for value in values[:30].tolist():
        short.add(value, 1, counts=True)
    latest = short.variance
    short.add(short.last or 0.0, 1, counts=True)
    assert short.variance == pytest.approx(latest * 15 / 16), "no memory is shorter than 16 differences"


def test_the_baseline_s_mix_is_that_of_its_ticks() -> None:
    monitor = DriftMonitor(config(baseline_ticks=30))
    for tick in range(1, 41):
        monitor.observe([3.0] * 64, [1.0] * 64, ["a"] * 32 + ["b"] * 32 if tick < 30 else ["a"] * 64)
        of_b = 29 * 0.5 / max(29, min(tick, 30))
        assert monitor.state.levels.shares == pytest.approx([1 - of_b, of_b])


def test_a_tick_is_remembered_with_what_its_strata_lead_one_to_expect() -> None:
    """A stratum that is new says nothing yet; one whose entropy is not known leaves that of the tick unknown."""
    rng, monitor = np.random.default_rng(7), DriftMonitor(config())
    seen: list[tuple[np.ndarray, np.ndarray]] = []
    for _ in range(25):
        alphas, entropies = rng.normal([4.0] * 48 + [2.0] * 16, 0.1), rng.uniform(0.2, 0.9, 64)
        monitor.observe(alphas.tolist(), [1.0] * 64, ["a"] * 48 + ["b"] * 16, entropies=entropies.tolist())
        seen.append((alphas, entropies))
    levels = [np.mean([np.mean(alphas[part]) for alphas, _ in seen]) for part in (slice(48), slice(48, 64))]
    usual = [np.mean([np.mean(entropies[part]) for _, entropies in seen]) for part in (slice(48), slice(48, 64))]
    alphas, entropies = rng.normal(2.42, 0.1, 64), rng.uniform(0.2, 0.9, 64)
    before = monitor.state.statistics["fast"]
    strata = ["a"] * 12 + ["b"] * 36 + ["c"] * 16
    [reading] = monitor.observe(alphas.tolist(), [1.0] * 64, strata, entropies=entropies.tolist())
    row = monitor.state.evidence.rows[-1]
    expected = 0.25 * levels[0] + 0.75 * levels[1]
    level = sum(w * m for w, m in zip(monitor.state.levels.shares, [*levels, alphas[48:].mean()], strict=True))
    assert (row.tick, row.alpha, row.expected) == pytest.approx((26, alphas[:48].mean(), expected))
    assert row.level == pytest.approx(level)
    assert reading.value == pytest.approx(level + alphas[:48].mean() - expected)
    unsure = 0.25**2 / (25 * 0.75) + 0.75**2 / (25 * 0.25)  # at this mix; a stratum is known by its rollouts
    assert reading.sd is not None
    statistic = before + min((expected - alphas[:48].mean()) / math.sqrt(1 + unsure) / reading.sd, 2.5) - 0.5
    assert 1 < statistic == pytest.approx(reading.lanes["fast"].statistic)
    assert row.entropy == pytest.approx(entropies[:48].mean())
    assert row.entropy_expected == pytest.approx(0.25 * usual[0] + 0.75 * usual[1])
    shares = (np.array([48 * 25 + 12, 16 * 25 + 36, 16]) / 64 / 26).tolist()
    assert monitor.state.levels.shares == pytest.approx(shares)
    monitor.observe([3.0] * 64, [1.0] * 64, ["a"] * 64, entropies=[math.nan] + [0.5] * 63)
    assert monitor.state.evidence.rows[-1].entropy is monitor.state.evidence.rows[-1].entropy_expected is None


# --- publishes in a world that stands still
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
    monitor.state.differences = UNLIKE
    monitor.rebase(0.3, 0.15**2)  # the truth is that nothing changed; the error is two standard deviations
    assert monitor.state.baseline == pytest.approx(3.3, abs=0.02)
    assert not feed(monitor, noise(300, seed=1)).alarm
    assert monitor.state.baseline == pytest.approx(3.0, abs=0.03)


def test_a_difference_counts_for_as_much_as_versions_of_the_run_differ() -> None:
    """The share of a difference's variance that is not error, by the method of moments over the last versions."""
    monitor = DriftMonitor(config())
    feed(monitor, noise(400))
    state, error = monitor.state, 0.02

    def counted(difference: float) -> tuple[float, float]:
        """By how much a version moves the level that is shown, and its variance."""
        level, variance = state.recent, state.evidence.shift_variance
        monitor.rebase(difference, error**2)
        return state.recent - level, state.evidence.shift_variance - variance

    share = 1 / (1 + error**2 / (0.02 * state.baseline) ** 2)  # none is known yet: 2 % is supposed
    assert counted(error) == pytest.approx((share * error, share * error**2))
    for sign in (1, -1) * 40:
        counted(sign * error)  # all of it is error
    assert len(state.differences) == 32
    share = 1 / (1 + error**2 / ((0.02 * state.baseline) ** 2 / 33))
    assert share < 0.25
    assert counted(error) == pytest.approx((share * error, share * error**2))
    assert counted(-3 * error) == pytest.approx((-3 * error, error**2)), "beyond chance: as it was measured"
    for _ in range(40):
        counted(3 * error)
    share = 1 / (1 + error**2 / ((32 * 8 * error**2 + (0.02 * state.baseline) ** 2) / 33))
    assert share > 0.85
    assert counted(error) == pytest.approx((share * error, share * error**2))


@pytest.mark.parametrize(("every", "found"), [(8, 2), (64, 4)])
def test_beside_equal_versions_a_fall_of_5_percent_is_found_more_often_than_the_errors_added_up_let_it(
    bank: Bank, every: int, found: int
) -> None:
    """As measured, the differences' errors made the baseline follow: none of 6 was found at 8 ticks, 3 at 64."""
    hits = [
        any(publishing(bank, DriftMonitor(config()), 4000, every=every, seed=run, fall_at=3000, drop=0.05)[3000:])
        for run in range(6)
    ]
    assert sum(hits) >= found


def test_versions_whose_difference_moved_the_baseline_add_no_doubt_to_what_is_owed() -> None:
    """The baseline moves by all of a difference that may be chance, but for rounding; its error counts twice."""
    monitor = DriftMonitor(config())
    feed(monitor, noise(1500))
    monitor.rebase(-0.09, 0.03**2, decided=False)
    levels = monitor.state.levels
    assert (levels.owed, levels.owed_variance) == pytest.approx((-0.03, 0.06**2))
    for _ in range(30):
        monitor.rebase(-0.007, 0.03**2, decided=False)
    assert (levels.owed, levels.owed_variance) == pytest.approx((-0.03, 0.06**2))
    monitor.rebase(-0.09, 0.03**2, decided=False)
    assert (levels.owed, levels.owed_variance) == pytest.approx((-0.06, 2 * 0.06**2))


def test_a_difference_that_may_be_chance_ends_no_alarm() -> None:
    monitor = DriftMonitor(config())
    feed(monitor, noise(1500))
    assert feed(monitor, noise(100, seed=1, level=2.7)).alarm
    before = dict(monitor.state.statistics)
    monitor.rebase(0.05, 0.03**2)
    assert monitor.state.statistics == before
