"""What became of published versions, in numbers: which rollouts measure one, when that ends, and what it corrects."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from drafter.replay.acceptance import Replay, student_quantile
from service.monitor.events import GateEvidence, Realised
from service.worker.promotion.evidence import Fresh
from service.worker.promotion.outcomes import Outcomes

V1, V2, V3 = "v000001-aaaaaaaa", "v000002-bbbbbbbb", "v000003-cccccccc"
TOKENS = 60.0


class Registry:
    """What a lineage says of versions: those that still lie there."""

    def __init__(self, *versions: str) -> None:
        self.there = set(versions)

    def existing(self, version: str) -> str | None:
        return version if version in self.there else None


def outcomes(*versions: str) -> Outcomes:
    return Outcomes(Registry(*versions))  # type: ignore[arg-type]


def replay(rounds: list[float]) -> Replay:
    found = np.array(rounds)
    drafts = np.repeat(found[:, None], 7, axis=1)
    return Replay(np.full(len(rounds), TOKENS), found, 0.5 * drafts, drafts)


def fresh(
    rounds: dict[str, list[float]],
    *,
    policy: int = 7,
    evidence: tuple[int, ...] | None = None,
    prompts: str = "p",
    siblings: int = 1,
) -> Fresh:
    """A claim in one batch: so many rollouts of each prompt. `prompts`: what the prompts' names begin with."""
    number = len(next(iter(rounds.values())))
    everything = tuple(range(number))
    return Fresh(
        (SimpleNamespace(policy_version=policy),),  # type: ignore[arg-type]
        (everything,),
        {version: replay(of) for version, of in rounds.items()},
        tuple(f"{prompts}{i // siblings}" for i in everything),
        everything if evidence is None else evidence,
        by_prompt=True,
    )


def chosen(gain: float = 0.1, promised: float = 0.08, **facts: Any) -> GateEvidence:
    rest: dict[str, Any] = {"judged_to": "5-0"} | facts
    return GateEvidence(gain=gain, promised=promised, **rest)


def claim(rollouts: int, ratio: float, seed: int | list[int] = 0, *, spread: float = 0.05, **facts: Any) -> Fresh:
    """V2 needs 1 / `ratio` of V1's rounds, by the median."""
    rng = np.random.default_rng(seed)
    before = 20.0 + 4.0 * rng.random(rollouts)
    after = before / ratio * np.exp(spread * rng.standard_normal(rollouts))
    return fresh({V1: list(before), V2: list(after)}, **facts)


def delta_error(one: Fresh) -> float:
    """Standard error of the logarithm of V1's rounds over V2's, each rollout divided by 1 - its share (HC2)."""
    before, after = (one.replays[version].rounds / one.replays[version].rounds.sum() for version in (V1, V2))
    return math.sqrt(float(((before - after) ** 2 / (1.0 - (before + after) / 2.0)).sum()))


def begun(**facts: Any) -> Outcomes:
    found = outcomes(V1, V2)
    found.begin(V2, V1, chosen(**facts))
    return found


def test_where_the_trainer_goes_back_what_came_before_counts() -> None:
    """The version was made for a policy that is gone: what it brings on an earlier one breaks no promise."""
    found = begun(trained_to=9)
    assert found.settle(claim(40, 1.1, policy=8)) is None, "engines may be one version apart"
    event = found.settle(claim(300, 0.7, policy=7))
    assert event is not None
    assert event.rollouts == 40
    assert event.realised == pytest.approx(0.1, abs=0.04)
    assert found.watched is None
    found = begun(trained_to=9)
    assert found.settle(claim(300, 0.7, policy=7)) is None
    assert (found.watched, found.correction) == (None, 1.0)


def test_what_a_version_brought_is_the_ratio_of_rounds_with_its_interval() -> None:
    """By the delta method on the log of a ratio of sums, claim by claim, in numpy."""
    found = begun()
    claims = [claim(128, 1.2, seed, policy=8 + seed) for seed in (0, 1)]
    assert found.settle(claims[0]) is None, "128 rollouts are too few"
    event = found.settle(claims[1])
    assert event is not None
    before, after = (sum(float(one.replays[version].rounds.sum()) for one in claims) for version in (V1, V2))
    error = math.sqrt(sum((one.replays[V1].rounds.sum() * delta_error(one)) ** 2 for one in claims)) / before
    assert (event.version, event.before, event.policy_version, event.rollouts) == (V2, V1, 9, 256)
    assert event.promised == 0.08
    assert event.realised == pytest.approx(before / after - 1.0)
    assert event.low is not None
    assert event.high is not None
    low, high = math.log1p(event.low), math.log1p(event.high)
    assert (low + high) / 2.0 == pytest.approx(math.log(before / after))
    assert (high - low) / 2.0 == pytest.approx(1.979 * error, rel=1e-3), "Student's t of 127 degrees"


@pytest.mark.parametrize(("rollouts", "gain"), [(64, 1.3), (64, 1.0), (16, 1.15)])
def test_the_interval_holds_the_true_gain_in_95_of_100(rollouts: int, gain: float) -> None:
    """However large the gain is: the gate's own error, of a gain of 0, held it in 100 of 100 where it is 30 %."""
    held, widths = [], []
    for seed in range(150):
        found = begun()
        events = [found.settle(claim(rollouts, gain, [seed, n], spread=0.1)) for n in range(256 // rollouts)]
        event = events[-1]
        assert event is not None
        assert event.low is not None
        assert event.high is not None
        held.append(event.low <= gain * math.exp(-0.005) - 1.0 <= event.high)  # e^(s²/2) more rounds in mean
        widths.append(math.log1p(event.high) - math.log1p(event.low))
    assert 0.9 <= np.mean(held) < 1.0
    assert np.mean(widths) < 0.04


def test_eight_answers_to_a_prompt_that_say_the_same_say_it_once() -> None:
    one = claim(32, 1.2, 4)
    rounds = {version: [x for x in found.rounds for _ in range(8)] for version, found in one.replays.items()}
    event = begun().settle(fresh(rounds, siblings=8))
    assert event is not None
    assert event.low is not None
    assert event.high is not None
    reach = student_quantile(0.975, 31.0) * delta_error(one)
    assert math.log1p(event.high) - math.log1p(event.low) == pytest.approx(2.0 * reach, rel=0.01)


def test_only_rollouts_that_count_as_evidence_measure_it() -> None:
    """The others are of prompts that the candidate was trained on: here they say the contrary."""
    good = claim(300, 1.2)
    rounds = {name: list(one.rounds) for name, one in good.replays.items()}
    rounds[V2][256:] = [2.0 * x for x in rounds[V2][256:]]
    event = begun().settle(fresh(rounds, evidence=tuple(range(256))))
    assert event is not None
    assert event.rollouts == 256
    assert event.realised == pytest.approx(0.2, abs=0.02)


def test_claims_of_too_few_prompts_are_measured_together() -> None:
    """One prompt each: from the fourth claim on they bound an error."""
    found = begun()
    for seed in range(3):
        assert found.settle(claim(1, 1.2, seed, prompts=f"{seed}.")) is None
        assert found.unmeasured
    found.settle(claim(1, 1.2, 3, prompts="3."))
    assert not found.unmeasured
    (promise,) = [found.state["promise"]]
    assert promise["rollouts"] == 4


def test_a_claim_on_which_both_were_not_scored_says_nothing() -> None:
    found = begun()
    assert found.settle(fresh({V2: [10.0] * 300, V3: [20.0] * 300})) is None
    assert found.settle(fresh({V1: [10.0] * 300, V3: [20.0] * 300})) is None
    assert found.unmeasured
    assert outcomes(V1, V2).settle(claim(300, 1.2)) is None, "nothing was begun"


def test_rollouts_that_helped_to_choose_a_version_do_not_measure_it() -> None:
    found = begun(judged_to="5-3")
    assert [found.measures(entry) for entry in ("5-2", "5-3", "5-4", "6-0", "40-0")] == [False, False, True, True, True]
    assert begun(judged_to=None).measures("1-0"), "it is not known which did"
    assert outcomes(V1).measures("1-0"), "no version is measured"


def test_the_version_before_is_watched_until_the_gain_is_known() -> None:
    found = outcomes(V1, V2)
    assert (found.watched, found.unmeasured) == (None, False)
    found.begin(V2, V1, chosen())
    assert (found.watched, found.unmeasured) == (V1, True)
    found.settle(claim(100, 1.2))
    assert (found.watched, found.unmeasured) == (V1, False)
    found.settle(claim(156, 1.2))
    assert (found.watched, found.unmeasured) == (None, False)


def test_what_cannot_be_measured_any_more_is_not_waited_for() -> None:
    """The version before was deleted."""
    found = outcomes(V2)
    found.begin(V2, V1, chosen())
    assert not found.unmeasured


def test_another_version_ends_the_measurement_with_what_is_known() -> None:
    found = begun()
    assert found.end() is None, "nothing is known yet"
    assert found.watched is None
    found = begun()
    found.settle(claim(64, 1.3))
    event = found.end()
    assert event is not None
    assert event.rollouts == 64
    assert event.realised == pytest.approx(0.3, abs=0.03)
    assert found.end() is None, "it is told once"


def test_claims_that_were_gathered_for_one_version_do_not_measure_the_next() -> None:
    found = begun()
    for seed in range(3):
        found.settle(claim(1, 1.2, seed, prompts=f"{seed}."))
    found.end()
    found.begin(V2, V1, chosen())
    found.settle(claim(1, 1.2, 3, prompts="3."))
    assert found.unmeasured


def test_the_next_promise_is_corrected_by_what_came_of_this_one() -> None:
    """0.1 counts as promised and kept at first: (0.1 + realised) / (0.1 + expected), in logarithms."""
    found = begun(gain=0.1)
    assert found.correction == 1.0
    event = found.settle(claim(256, 1.2))
    assert event is not None
    assert event.realised is not None
    assert found.correction == pytest.approx((0.1 + math.log1p(event.realised)) / (0.1 + math.log1p(0.1)))


def test_a_few_rollouts_correct_in_proportion_and_what_is_older_counts_less() -> None:
    found = begun(gain=0.1)
    found.settle(claim(64, 1.2))
    first = found.end()
    found.begin(V2, V1, chosen(gain=0.05))
    second = found.settle(claim(256, 1.1, 1))
    assert isinstance(first, Realised)
    assert isinstance(second, Realised)
    assert first.realised is not None
    assert second.realised is not None
    kept = 0.87 * 0.25 * math.log1p(first.realised) + math.log1p(second.realised)
    expected = 0.87 * 0.25 * math.log1p(0.1) + math.log1p(0.05)
    assert found.correction == pytest.approx((0.1 + kept) / (0.1 + expected))


def test_an_archived_versions_win_corrects_no_promise_and_says_whether_the_next_may_be_by_one_claim() -> None:
    found = begun(train_on=False, gain=0.1)
    assert found.lasts(V2)
    found.settle(claim(8, 1 / 1.2))
    assert found.end() is not None
    assert found.correction == 1.0
    assert not found.lasts(V2), "what it won was lost again, though only eight rollouts say so"
    assert found.lasts(V1), "another one has not won yet"


@pytest.mark.parametrize(("ratio", "lasts"), [(1.1, True), (0.95, True), (0.945, False)])
def test_a_win_lasted_if_it_kept_a_sixth(ratio: float, lasts: bool) -> None:
    """Of ln(1.2) that was expected; 0.1 more counts as expected and kept before anything is known."""
    found = begun(train_on=False, gain=0.2)
    before = [20.0] * 64
    found.settle(fresh({V1: before, V2: [x / ratio for x in before]}))
    found.end()
    assert ((0.1 + math.log(ratio)) / (0.1 + math.log(1.2)) >= 1 / 6) is lasts, "the case is what it says"
    assert found.lasts(V2) is lasts


def test_wins_of_versions_that_were_deleted_are_forgotten() -> None:
    found = begun(train_on=False)
    found.settle(claim(8, 1 / 1.5))
    found.end()
    assert not found.lasts(V2)
    found._lineage.there = {V1, V3}  # type: ignore[attr-defined]
    found.begin(V3, V1, chosen(train_on=False))
    found.settle(fresh({V1: [20.0] * 8, V3: [18.0, 19.0] * 4}))
    found.end()
    assert set(found.state["won"]) == {V3}


def test_it_survives_a_checkpoint() -> None:
    """All of it but the claims that are pooled: they are scored again after a restart, or not at all."""
    found = begun(train_on=False, gain=0.1)
    found.settle(claim(8, 1.1))
    found.end()
    found.begin(V2, V1, chosen())
    found.settle(claim(100, 1.2))
    found.settle(claim(1, 1.2))
    written = json.loads(json.dumps(found.state))
    again = begun(gain=0.5)
    again.settle(claim(1, 1.2))
    again.restore(written)
    assert again.state == found.state
    assert again.watched == V1
    one, other = found.settle(claim(156, 1.2, 5)), again.settle(claim(155, 1.2, 5))
    assert one is not None
    assert other is None, "a claim that waited was not kept"
    assert again.settle(claim(1, 1.2)) is None
    empty = outcomes(V1)
    empty.restore(outcomes(V2).state)
    assert empty.state == outcomes(V2).state


def test_a_look_without_a_bound_is_not_counted() -> None:
    """Two rollouts without a single round."""
    nothing = replace(replay([0.0, 0.0]), tokens=np.zeros(2))
    found = begun()
    one = fresh({V1: [20.0, 20.0], V2: [20.0, 20.0]})
    found.settle(replace(one, replays={V1: nothing, V2: nothing}))
    assert found.unmeasured
