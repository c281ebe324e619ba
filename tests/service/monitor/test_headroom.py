"""Headroom: what further training would bring, from the gate's verdicts; and what it says to do."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
from helpers.worker.record_fixtures import score, stored

from benchmarks.headroom import World, simulated
from service.monitor.headroom import STATES, Advice, LearningCurve, advise, longest_pause, trainer_silent
from service.monitor.live.watch import Watch
from service.monitor.metrics import RunSnapshot, advice_of
from service.monitor.records import Headroom, WorkerGauges


def curve(gains: list[float], error: float = 0.004, *, promoted: bool = True) -> LearningCurve:
    found = LearningCurve()
    for gain in gains:
        found.learn(gain, error, promoted=promoted)
    return found


def headroom(gains: list[float], error: float = 0.004, *, promoted: bool = True) -> Headroom:
    found = curve(gains, error, promoted=promoted).headroom()
    assert found is not None
    return found


def test_what_is_left_of_a_geometric_curve_is_its_tail() -> None:
    """Within a factor of two at four points of five where it exceeds 2 %, whatever the ratio; errors of 0.4 %."""
    rng = np.random.default_rng(0)
    good, asked = 0, 0
    for first, ratio in ((0.1, 0.5), (0.06, 0.7), (0.02, 1.0), (0.1, 0.8), (0.03, 0.8)) * 12:
        found = LearningCurve()
        for number in range(8):
            gain = first * ratio**number
            found.learn(gain + 0.004 * rng.standard_normal(), 0.004, promoted=True)
            left = gain * sum(ratio**n for n in range(1, 6))
            if number >= 1 and left > 0.02:
                reckoned = found.headroom()
                assert reckoned is not None
                assert reckoned.gain is not None
                asked += 1
                good += 0.5 <= reckoned.gain / left <= 2.0
    assert good >= 0.8 * asked > 100


@pytest.mark.parametrize("error", [0.002, 0.008, 0.03])
@pytest.mark.parametrize("promoted", [0.0, 0.1])
def test_with_nothing_to_gain_zero_is_in_the_interval(error: float, promoted: float) -> None:
    """In 95 % of claims. `promoted`: the share of equal candidates that were, by chance; the others are refused."""
    rng = np.random.default_rng(1)
    found, inside = LearningCurve(), []
    for _ in range(300):
        found.learn(error * rng.standard_normal(), error, promoted=bool(rng.random() < promoted))
        reckoned = found.headroom()
        assert reckoned is not None
        assert reckoned.low is not None
        assert reckoned.high is not None
        inside.append(reckoned.low <= 0.0 <= reckoned.high)
    assert np.mean(inside) >= 0.95


def test_where_the_policy_stands_still_and_looks_are_sharp_headroom_is_near_the_truth() -> None:
    """A training closes three tenths of the distance. The benchmark's truth is what five more trainings then bring."""
    found, ratios = LearningCurve(), []
    rows = list(simulated(World(0.3, 0.3, lambda _: 0.0, 0.001, luck=0.0), seed=0))
    assert rows[0]["there"] == pytest.approx(np.expm1(0.3 * (1 - 0.7**5)))
    for row in rows[1:]:
        found.learn(row["gain"], row["error"], promoted=row["promoted"])
        reckoned = found.headroom()
        assert reckoned is not None
        assert reckoned.gain is not None
        if row["there"] > 0.02:
            ratios.append(reckoned.gain / row["there"])
    assert len(ratios) >= 8
    assert np.mean([0.5 <= ratio <= 2.0 for ratio in ratios]) >= 0.8


def on_a_grid(verdicts: list[tuple[float, float, bool]]) -> dict[str, float]:
    """The posterior of docs/reference, summed up on a grid: each ratio r, and each gain a of the newest training.

    Ratios are equally likely before, a ~ N(0, 5 %). A verdict is the sum of the gains a·r^-age of the trainings since
    the last promotion, with a variance that doubles with each training since it and grows by (1 % · age)².
    """
    a = np.linspace(-0.6, 0.6, 240_001)
    posterior, headrooms, each = [], [], []
    for ratio in (0.5, 0.7, 0.85, 1.0, 1.1):
        fit, since = -0.5 * (a / 0.05) ** 2, 0.0
        for age, (gain, error, promoted) in zip(reversed(range(len(verdicts))), verdicts, strict=True):
            since += ratio ** float(-age)
            variance = (error**2 + 0.001**2) * 2**age + (0.01 * age) ** 2
            fit = fit - 0.5 * (gain - since * a) ** 2 / variance
            since = 0.0 if promoted else since
        posterior.append(np.exp(fit))
        headrooms.append(a * (since + sum(ratio**n for n in range(1, 6))))
        each.append(a * ratio)
    weight = np.concatenate(posterior)
    weight /= weight.sum()
    left, gains = np.concatenate(headrooms), np.concatenate(each)
    order = np.argsort(left)
    below = np.cumsum(weight[order])
    low, middle, high = (float(left[order][np.searchsorted(below, at)]) for at in (0.025, 0.5, 0.975))
    mean = float(weight @ gains)
    return {
        "gain": middle,
        "low": low,
        "high": high,
        "each": mean,
        "error": math.sqrt(float(weight @ gains**2) - mean**2),
    }


@pytest.mark.parametrize(
    "verdicts",
    [
        [(0.04, 0.01, True)],
        [(0.04, 0.01, False)],
        [(0.09, 0.005, True), (0.05, 0.01, True), (0.02, 0.008, True)],
        [(0.02, 0.03, False), (0.05, 0.004, False), (0.06, 0.006, False)],
        [(-0.03, 0.01, False), (-0.02, 0.02, True), (0.01, 0.001, False), (0.015, 0.02, False)],
        [(0.01, 0.05, True)] * 8,
    ],
)
def test_headroom_is_the_posterior_of_gain_and_ratio(verdicts: list[tuple[float, float, bool]]) -> None:
    found = LearningCurve()
    for gain, error, promoted in verdicts:
        found.learn(gain, error, promoted=promoted)
    reckoned, truth = found.headroom(busy=0.4), on_a_grid(verdicts)
    assert reckoned is not None
    assert reckoned.busy == 0.4
    names = {"gain": "gain", "low": "low", "high": "high", "each": "each", "each_error": "error"}
    for name, of_grid in names.items():
        assert getattr(reckoned, name) == pytest.approx(truth[of_grid], abs=2e-5), name


def test_a_gain_that_was_refused_is_still_to_be_had() -> None:
    served, refused = headroom([0.05]), headroom([0.05], promoted=False)
    assert served.gain is not None
    assert refused.gain == pytest.approx(served.gain + 0.05, rel=0.1)


def test_a_refused_candidate_is_trained_on_so_its_gains_are_not_added_twice() -> None:
    """+5 %, +7.5 %, +8.75 % over the same served drafter are trainings of +5, +2.5 and +1.25 %: 10 % in all."""
    found = headroom([0.05, 0.075, 0.0875], error=0.001, promoted=False)
    assert found.gain is not None
    assert 0.0875 < found.gain < 0.15
    assert found.each is not None
    assert found.each < 0.02


def test_an_older_gain_says_less() -> None:
    new, old = headroom([0.0, 0.1]), headroom([0.1, 0.0])
    assert new.each is not None
    assert old.each is not None
    assert new.each > 3 * abs(old.each)


def test_nothing_is_known_before_the_first_verdict() -> None:
    assert LearningCurve().headroom() is None


def test_it_survives_json_and_holds_little() -> None:
    found = curve([0.01 * n for n in range(50)])
    written = json.loads(json.dumps(asdict(found)))
    assert LearningCurve.of(written["measured"]).headroom() == found.headroom()
    assert len(written["measured"]) == 8


# --- in words
def known(
    gain: float, low: float, high: float, each: float = 0.03, error: float = 0.005, busy: float = 0.3
) -> Headroom:
    return Headroom(gain=gain, low=low, high=high, each=each, each_error=error, busy=busy)


@pytest.mark.parametrize(
    ("found", "action", "starved", "state", "words"),
    [
        (None, "train", False, "unknown", "no training was judged"),
        (None, None, True, "starved", "no new rollouts"),
        (known(0.07, 0.03, 0.1), "train", True, "starved", "no new rollouts"),
        (
            known(0.2, 0.1, 0.3, each=0.07, busy=0.95),
            "defer",
            False,
            "training_bound",
            "each training still gains 7.0%",
        ),
        (known(0.2, 0.1, 0.3, busy=0.5), "train", False, "learning", "do nothing"),
        (known(0.2, 0.1, 0.3, busy=0.01), "idle", False, "unpaid", "costs"),
        (known(-0.1, -0.2, -0.01, each=-0.05), "probe", False, "hurt", "loses 5.0%"),
        (known(-0.74, -1.08, -0.48, each=-0.036, error=0.025), "idle", False, "hurt", "stays worse, -74.0%"),
        (known(0.01, -0.02, 0.09, busy=0.95), "defer", False, "behind", "passed over"),
        (known(0.01, -0.02, 0.09), "idle", False, "resting", "not expected to pay now"),
        (known(0.0, -0.01, 0.012), "idle", False, "converged", "at most 1.2% is left: do nothing"),
        (known(0.015, 0.005, 0.028), "idle", False, "converged", "but for 1.5% (0.5% to 2.8%), which is little: do"),
        (known(-0.02, -0.03, -0.01), "idle", False, "converged", "at most 0.0% is left"),
        (known(0.0, -0.01, 0.01), "train", False, "converged", "do nothing"),
        (known(0.01, -0.02, 0.09), "train", False, "unknown", "do not tell yet"),
        (known(0.01, -0.02, 0.09), "probe", False, "resting", "is uncertain, 1.0% (-2.0% to +9.0%)"),
        (known(0.01, -0.02, 0.09, busy=0.3), "defer", False, "unknown", "would bring 1.0% (-2.0% to +9.0%): the"),
        (known(0.01, -0.02, 0.09, busy=0.95), "train", False, "unknown", "do not tell yet"),
        (known(0.07, 0.03, 0.1, each=-0.005, error=0.005), "train", False, "learning", "7.0% (+3.0% to +10.0%)"),
        (Headroom(gain=0.07, low=0.03, high=0.1), "train", False, "learning", "the worker is at it"),
        (Headroom(gain=0.07, low=0.03, high=0.1, each=-0.01), "train", False, "hurt", "loses 1.0%"),
        (Headroom(gain=0.07, low=0.03), "train", False, "unknown", "no training was judged"),
        (Headroom(gain=0.07, high=0.1), "train", False, "unknown", "no training was judged"),
    ],
)
def test_every_state_has_its_reason(
    found: Headroom | None, action: str | None, starved: bool, state: str, words: str
) -> None:
    said = advise(found, action=action, starved=starved)
    assert said.state == state
    assert words in said.text
    assert said.state in STATES


@pytest.mark.parametrize("busy", [0.01, 0.95])
def test_what_stops_training_is_said_and_not_its_price(busy: float) -> None:
    """Nothing is trained for want of memory: to lower the worker's cost would do nothing."""
    for low, state in ((0.1, "blocked"), (-0.1, "blocked")):
        found = advise(known(0.2, low, 0.3, busy=busy), action="idle", starved=False, blocked="memory ran out")
        assert (found.state, found.text.endswith("but memory ran out")) == (state, True)
    little = advise(known(0.025, 0.021, 0.029), action="idle", starved=False, blocked="memory ran out")
    assert little.state == "converged"
    undrafted = advise(known(0.2, 0.1, 0.3), action="idle", starved=False, undrafted=True)
    assert undrafted.state == "unpaid"
    assert "no time in rounds with drafts" in undrafted.text
    assert "cost" not in undrafted.text


@pytest.mark.parametrize(
    ("gauge", "state", "words"),
    [
        ("no_memory", "blocked", "memory ran out"),
        ("unjudged", "blocked", "no prompt is new"),
        ("undrafted", "unpaid", "rounds with drafts"),
        (None, "unpaid", "lower the worker's cost"),
    ],
)
def test_the_advice_has_the_workers_reason(gauge: str | None, state: str, words: str) -> None:
    flags: dict[str, Any] = {} if gauge is None else {gauge: True}
    worker = WorkerGauges(action="idle", headroom=known(0.1, 0.05, 0.15), **flags)
    found = advice_of(RunSnapshot(now=0.0, worker=worker))
    assert (found.state, words in found.text) == (state, True)


def test_what_is_half_written_is_unknown() -> None:
    assert advise(Headroom(gain=0.1), action="train", starved=False).state == "unknown"


def test_a_trainer_is_silent_after_ten_minutes_and_three_of_its_pauses() -> None:
    assert not trainer_silent(None, 1e9, None)
    assert [trainer_silent(0.0, now, None) for now in (600.0, 601.0)] == [False, True]
    assert [trainer_silent(0.0, now, 1000.0) for now in (3000.0, 3001.0)] == [False, True]


def test_the_longest_pause_is_between_two_batches_that_came_one_after_the_other() -> None:
    def came(*entries: str | None) -> float | None:
        return longest_pause([score({"entry_id": entry, "policy_version": 1}) for entry in entries])

    assert came("1000-0", "3500-0", "4000-0", "4000-1") == 2.5
    assert came("1000-0", None, "4000-0") == 3.0, "what names no queue entry is not looked at"
    assert came("1000-0") is None
    assert came() is None


def test_a_run_without_new_rollouts_is_starved_but_not_while_some_wait() -> None:
    def said(**more: object) -> Advice:
        return advice_of(stored(now=10_000.0, last_arrival=9000.0, **more))  # type: ignore[arg-type]

    assert said().state == "starved"
    assert said(counters={"items": 1}).state == "unknown"
    held = Watch(hold="all engines count otherwise")
    learning = {"headroom": {"gain": 0.1, "low": 0.05, "high": 0.2, "each": 0.02, "each_error": 0.005, "busy": 0.1}}
    going = {"worker": learning, "counters": {"items": 1}}
    assert said(**going).state == "learning"
    assert said(**going, watch=held) == Advice("unknown", "nothing is trained while publishing is held")
    assert said(scores=[{"policy_version": 1, "entry_id": f"{n}000000-0"} for n in (8, 9)]).state == "unknown"
