"""The soak's verdicts in worlds whose truth is known: hours of memory that wanders, jumps, grows, or does neither."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import asdict

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.signal import lfilter

from benchmarks.soak import Recording, Trend, quantile, series, soak, table, trend, warm_up_seconds

SAMPLES = 1350  # an hour without its first quarter, every 2 s
HOURS = 0.25 + np.arange(SAMPLES) / 1800


def wander(rng: np.random.Generator, share: float, memory_samples: float) -> NDArray[np.float64]:
    """A series about 0 with this standard deviation that forgets within this number of samples."""
    keep = math.exp(-1 / memory_samples)
    steps = rng.standard_normal(SAMPLES) * share * math.sqrt(1 - keep**2)
    steps[0] = rng.standard_normal() * share
    return np.asarray(lfilter([1.0], [1.0, -keep], steps))


def verdicts(growth_an_hour: float, noise: float, memory_samples: float, runs: int = 60) -> Counter[str]:
    rng = np.random.default_rng(7)
    return Counter(
        trend(list(HOURS), list(100 * (1 + growth_an_hour * HOURS + wander(rng, noise, memory_samples)))).verdict
        for _ in range(runs)
    )


@pytest.mark.parametrize(("memory_samples", "flat"), [(1.0, 60), (30.0, 57), (150.0, 40)])
def test_what_does_not_grow_is_hardly_ever_said_to(memory_samples: float, flat: int) -> None:
    found = verdicts(0.0, 0.01, memory_samples)
    assert found["grows"] + found["falls"] <= 2
    assert found["flat"] >= flat


def test_a_leak_of_a_fifth_an_hour_is_found_and_one_of_a_tenth_is_never_called_flat() -> None:
    assert verdicts(0.20, 0.01, 30.0)["grows"] >= 58
    found = verdicts(0.10, 0.01, 30.0)
    assert found["flat"] == 0
    assert found["grows"] >= 57


def test_noise_that_hides_the_answer_is_not_settled() -> None:
    found = verdicts(0.0, 0.10, 150.0)
    assert found["not settled"] >= 50
    assert found["grows"] + found["falls"] <= 6


def test_a_constant_is_flat_and_a_short_run_is_refused() -> None:
    assert trend(list(HOURS), [18.0] * SAMPLES).verdict == "flat"
    assert Trend(0.0, 0.0, 0.0, 0.0).verdict == "flat"
    with pytest.raises(ValueError, match="run longer"):
        trend([0.0, 1.0], [1.0, 1.0])


def test_a_small_level_is_not_asked_to_hold_within_a_share_of_itself() -> None:
    """0.5 MiB an hour on 4 MiB is flat, 2 MiB an hour grows; an unknown unit has a share of the level alone."""
    for slope, unit, verdict in ((0.5, "MiB", "flat"), (2.0, "MiB", "grows"), (0.5, "", "grows"), (9.0, "ms", "flat")):
        assert trend(list(HOURS), list(4.0 + slope * HOURS), unit).verdict == verdict, (slope, unit)


def test_posts_that_become_slower_show_in_the_quantile_that_did() -> None:
    """A minute's p99 rises from 100 to 160 ms in the hour, and its median stays."""
    recording = Recording(640.0, 60.0, 200)
    recording.samples = [{"seconds": 2.0 * i, "up MiB": 60.0} for i in range(1800)]
    posts = [(0.75 * i, 0.0102 if i % 50 else 0.1 + 0.06 * i / 4800, 202) for i in range(4800)]
    recording.posts = posts
    found = series(recording)
    assert found["POST p50, ms"].verdict == "flat"
    assert found["POST p99, ms"].verdict == "grows"
    assert found["POST p99, ms"].slope == pytest.approx(60, rel=0.05)


def test_the_table_says_what_was_recorded() -> None:
    recording = Recording(640.0, 8.0, 200)
    recording.posts = [(0.75 * i, 0.02 if i % 200 else 0.5, 202 if i else 503) for i in range(640)]
    recording.samples = [
        {"seconds": 2.0 * i, "api MiB": 80.0, "worker MiB": 400.0 + i, "redis MiB": 1.0, "api pid": 7.0 + (i > 99)}
        for i in range(240)
    ]
    kept = Recording(**json.loads(json.dumps(asdict(recording))))
    said = table(kept)
    assert "5120 rollouts (0 files before the clock started); 1 were not accepted; 1 processes were restarted" in said
    assert "p50 20 ms, p99 20 ms, longest 500 ms" in said
    assert "| api MiB | 80.0 | 80.0 | +0.0 (+0.0 to +0.0) | flat |" in said
    assert "| grows |" in said.partition("worker MiB")[2]
    assert "| POST p50, ms | 20.0 | 20.0 | +0.0 (+0.0 to +0.0) | flat |" in said
    assert warm_up_seconds(480) == 120
    assert warm_up_seconds(3600) == 900
    assert quantile([3.0, 1.0, 2.0], 0.99) == 3.0


@pytest.mark.slow
def test_640_rollouts_a_minute_are_accepted_and_trained_by_processes_that_stay() -> None:
    """A quarter of a minute of it, with a real `draftalign up` and a reader."""
    recording = soak(0.25, 640.0, 50)
    assert len(recording.posts) == 20
    assert {status for _, _, status in recording.posts} == {202}
    assert (recording.ends["accepted_total"], recording.ends["acked_total"], recording.ends["items"]) == (20, 20, 0)
    for name in ("api pid", "worker pid", "valkey pid"):
        assert len({sample[name] for sample in recording.samples if name in sample}) == 1, name
    assert recording.keys["rollout"] / (8 * len(recording.posts)) < 200
