"""Which drafter the drift monitor watches, as versions come, go and return."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from helpers.worker.drift_fixtures import SEED, feed, names, noise, noisy, replays, watching

from benchmarks.alarms import (
    config,
)
from service.monitor.drift.cause import cause_of
from service.monitor.drift.monitor import DriftMonitor, DriftReading
from service.monitor.drift.state import DriftState
from service.monitor.drift.succession import Succession
from service.monitor.records import Estimate


# --- which drafter is watched
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


def test_a_comparison_hands_over_the_mean_difference_and_the_variance_of_it() -> None:
    """By prompt; a rollout that one of the two had no round in says nothing."""
    rng = np.random.default_rng(1)
    monitor = DriftMonitor(config())
    succession = watching(monitor)
    old, new = rng.uniform(2.9, 3.1, (9, 8)), rng.uniform(3.2, 3.6, (9, 8))
    found = {v: ([12.0] * 72, (12.0 / alpha).ravel().tolist()) for v, alpha in (("v1", old), ("v2", new))}
    found["v1"][1][0] = 0.0
    found["v2"][1][71] = 0.0
    succession.feed(monitor, found, names(9), served="v2", latest="v2")
    assert succession.watched == "v2"
    counts = np.full(9, 8.0)
    counts[[0, 8]] = 7.0
    differences = new - old
    differences[0, 0] = differences[8, 7] = 0.0
    totals = differences.sum(axis=1)
    mean = totals.sum() / 70
    variance = np.square(totals - counts * mean).sum() / 70**2 * 9 / 8
    evidence = monitor.state.evidence
    assert evidence.shift_variance == pytest.approx(variance)
    assert evidence.shift + monitor.state.baseline == pytest.approx(3.0 + mean, abs=0.05)
    assert Succession().difference() == (0.0, math.inf), "nothing is known of what was not compared"


@pytest.mark.parametrize(
    ("watched", "served", "offered", "compared"),
    [
        ("v1", "v2", ["v1", "v2"], True),
        ("v1", "v2", ["v2"], True),  # the watched one was never seen as the latest
        ("v2", "v1", ["v1", "v2"], False),
        ("v1", "v1", ["v1"], False),
        ("v1", "v9", ["v1"], False),
        ("v8", "v9", ["v1"], False),
    ],
)
def test_only_a_version_that_became_the_latest_after_the_watched_one_is_compared_with_it(
    watched: str, served: str, offered: list[str], compared: bool
) -> None:
    succession = Succession(watched=watched, offered=list(offered))
    both = replays(4, **dict.fromkeys((watched, served), 3.0))
    succession.feed(DriftMonitor(), both, names(4), served=served, latest=offered[-1])
    assert succession.watched == watched
    assert succession.successor == (served if compared else None)
    assert bool(succession.differences) is compared


@pytest.mark.parametrize(
    ("watched", "served", "lowers"),
    [
        ("v2", "v1", True),
        ("v2-abc", "v1-def", True),
        ("v1", "v2", False),
        ("v10-abc", "v10-def", False),
        ("v0", "first", False),
        ("v1", "first", True),  # a name without a number was there before them
        ("one", "other", False),
    ],
)
def test_a_lesser_version_lowers_the_baseline_where_its_number_says_that_it_was_served_before(
    watched: str, served: str, lowers: bool
) -> None:
    monitor, succession = DriftMonitor(), Succession()
    for _ in range(30):
        succession.feed(monitor, replays(8, **{watched: 3.0}), names(8), served=watched, latest=watched)
    found = replays(8, **{watched: 3.0, served: 2.0})
    succession.feed(monitor, found, names(8), served=served, latest=served)
    assert succession.watched == served
    assert monitor.state.baseline == pytest.approx(2.0 if lowers else 3.0, abs=0.2)


def test_a_version_is_offered_again_only_after_another_was() -> None:
    succession, monitor = Succession(), DriftMonitor()
    for latest, returned in (("v1", []), ("v1", []), ("v2", []), ("v2", []), ("v3", []), ("v3", []), ("v2", ["v2"])):
        succession.feed(monitor, replays(1, v1=3.0), names(1), served="v1", latest=latest)
        assert succession.returned == returned
    assert succession.offered == ["v1", "v3", "v2"]


def test_a_version_that_64_batches_in_a_row_were_scored_without_was_deleted() -> None:
    monitor, succession = DriftMonitor(), Succession(watched="v2", previous="v1", offered=["v1", "v2"])

    def batch(version: str) -> list[DriftReading]:
        found = replays(8, **{version: 3.0 if version == "v2" else 2.0})
        return succession.feed(monitor, found, names(8), served=version, latest="v2")

    for _ in range(3):
        assert batch("v2")
        assert [len(batch("v1")) for _ in range(64)] == [0] * 64
        assert succession.watched == "v2"
    [reading] = batch("v1")
    assert succession.watched == "v1"
    assert reading.baseline == pytest.approx(2.0, abs=0.02)


def test_a_tick_that_was_half_filled_as_the_watched_version_was_deleted_keeps_its_values() -> None:
    """Nothing is known of the difference, so nothing is added to them."""
    monitor = DriftMonitor(config())
    succession = watching(monitor)
    succession.feed(monitor, replays(4, v1=3.0), names(4), served="v1", latest="v1")
    before = list(monitor.state.pending)
    assert succession.feed(monitor, replays(2, v9=1.5), names(2), served="v9", latest="v9") == []
    assert monitor.state.pending[:32] == before
    assert monitor.state.evidence.shift == 0.0


def test_what_is_known_of_the_rollouts_reaches_the_monitor() -> None:
    rng = np.random.default_rng(2)
    through, straight = DriftMonitor(config()), DriftMonitor(config())
    succession = Succession()
    for n in range(5):
        more: dict[str, Any] = {"strata": ["a", "b"] * 32, "entropies": rng.uniform(0.1, 2.0, 64).tolist()}
        more["arrived"] = 1000.0 + 7 * n
        one = ([12.0] * 64, rng.uniform(3.0, 5.0, 64).tolist())
        succession.feed(through, {"v1": one}, names(8), served="v1", latest="v1", **more)
        straight.observe(*one, **more)
    assert through.state == straight.state


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


# --- a version of which few prompts have told
def compared(seed: int, lost: float, *, acknowledged: bool = False) -> tuple[DriftMonitor, Succession, list[int]]:
    """Eight answers a prompt, so eight prompts a tick. Each 20 ticks another version, the last one `lost` so much.

    Returns for each tick since then 1 where the version before it was replayed, else 0.
    """
    rng = np.random.default_rng([SEED, seed])
    monitor, succession, replayed = DriftMonitor(config()), Succession(), list[int]()
    for tick in range(400):
        version = f"v{1 + tick // 20}"
        alpha = 3.0 * (1 - lost) if version == "v20" else 3.0
        known = {name for name in (succession.watched, succession.follows, version) if name is not None}
        found, _ = noisy(rng, **{name: alpha if name == version else 3.0 for name in sorted(known)})
        prompts = [f"{tick}/{n // 8}" for n in range(64)]
        if version == "v20":
            replayed.append(int("v19" in known))
            if acknowledged and len(replayed) == 3:
                monitor.acknowledge()
        succession.feed(monitor, found, prompts, served=version, latest=version, arrived=60.0 * tick)
    return monitor, succession, replayed


def drafter_of(monitor: DriftMonitor) -> Estimate:
    change = monitor.change()
    assert change is not None
    return change.drafter


def test_a_new_version_is_compared_until_many_prompts_have_told() -> None:
    """At most 512 rollouts, seven ticks more than before; its loss is known to a third of the error then."""
    monitor, succession, replayed = compared(1, 0.04)
    assert replayed == [1] * 8 + [0] * 12
    assert succession.follows is None
    assert drafter_of(monitor).value == pytest.approx(math.log(0.96), abs=0.01)
    assert math.sqrt(drafter_of(monitor).variance) < 0.005


def test_a_version_of_as_many_prompts_as_rollouts_is_compared_no_longer() -> None:
    monitor = DriftMonitor(config())
    succession = watching(monitor)
    succession.feed(monitor, replays(8, v1=3.0, v2=2.9), [f"q{n}" for n in range(64)], served="v2", latest="v2")
    assert (succession.watched, succession.follows) == ("v2", None)


def test_a_correction_is_as_if_the_difference_had_been_known_at_first() -> None:
    rng = np.random.default_rng(SEED)
    values = rng.normal(3.0, 0.15, 130).tolist()
    first, later = DriftMonitor(config()), DriftMonitor(config())
    for monitor in (first, later):
        feed(monitor, values[:120])
    first.rebase(-0.2, 0.0004, decided=False)
    later.rebase(-0.02, 0.01, decided=False)
    for monitor in (first, later):
        feed(monitor, values[120:125])
    restored = DriftMonitor(later.config, DriftState.from_json(later.state.to_json()))
    for monitor in (later, restored):
        assert monitor.correct(-0.2, 0.0004)
        assert monitor.state == first.state
        assert feed(monitor, values[125:]).lanes


def test_a_persons_word_ends_the_corrections() -> None:
    _, succession, replayed = compared(2, 0.04, acknowledged=True)
    assert sum(replayed) < 8
    assert succession.follows is None
    monitor = DriftMonitor(config())
    feed(monitor, noise(120))
    monitor.rebase(-0.1, 0.001)
    monitor.reset()
    assert not monitor.correct(-0.1, 0.0001)


@pytest.mark.parametrize("lost", [0.04, 0.05])
def test_a_version_that_lost_a_little_is_named_where_each_prompt_has_eight_answers(lost: float) -> None:
    named = [cause_of(change).cause for seed in range(3) if (change := compared(seed, lost)[0].change()) is not None]
    assert named.count("drafter") == 3, named


def test_equal_versions_are_hardly_ever_named_where_each_prompt_has_eight_answers() -> None:
    changes = [compared(seed, 0.0)[0].change() for seed in range(3)]
    named = [cause_of(change).cause for change in changes if change is not None]
    assert len(named) == 3, "a cause is asked for in each"
    assert named.count("drafter") == 0, named
