"""The α series: pooling of score and acceptance records into the GET /alpha document."""

from __future__ import annotations

import itertools
import json
import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import pytest
from helpers.worker import record_fixtures
from helpers.worker.whole_fixtures import alpha_series
from pydantic_core import to_jsonable_python

from service.monitor.alpha import attempts
from service.monitor.events import RunEvent
from service.monitor.records import DrafterSums, Return, student_95


def score(policy_version: int, **more: Any) -> dict[str, Any]:
    return {
        "batch_id": "b",
        "policy_version": policy_version,
        "drafter_version": "v000001-aaaaaaaa",
        "rollouts": 2,
        "tokens": 100,
        "created": 1.0,
        **more,
    }


def counts(tokens: float, rounds: float) -> dict[str, float]:
    return {"tokens": tokens, "rounds": rounds}


def points(scores: list[dict[str, Any]], acceptances: list[dict[str, Any]] | None = None) -> list[dict[str, Any]]:
    counted = [record_fixtures.acceptance(one) for one in acceptances or []]
    document = to_jsonable_python(alpha_series("default", map(record_fixtures.score, scores), counted, [], 4))
    json.dumps(document, allow_nan=False)  # what the API must be able to do with it
    found: list[dict[str, Any]] = document["points"]
    return found


def test_sums_are_pooled_before_they_are_divided() -> None:
    [point] = points([score(3, served=counts(10, 10)), score(3, served=counts(400, 100))])
    assert point["alpha_served"] == pytest.approx(410 / 110)  # the mean of ratios would be 2.5
    assert point["rollouts"] == 4
    assert point["tokens"] == 200


@pytest.mark.parametrize(("degrees", "quantile"), [(2, 4.303), (4, 2.776), (7, 2.365), (30, 2.042)])
def test_intervals_are_by_students_t(degrees: float, quantile: float) -> None:
    assert student_95(degrees) == pytest.approx(quantile, rel=0.04)


def test_what_has_no_data_is_null_and_never_zero() -> None:
    [point] = points([score(0, served=counts(0, 0), ngram=None, best=counts(math.nan, 3))])
    empty = [k for k, v in point.items() if v is None]
    assert {"alpha_served", "alpha_ngram", "alpha_best", "alpha_frozen", "alpha_candidate"} <= set(empty)
    assert {"publication_lag", "entropy", "reward", "alpha_live", "live_rounds", "action", "best_version"} <= set(empty)
    nothing = to_jsonable_python(alpha_series("r", [], [], [], 4))
    assert nothing == {"run": "r", "depth": 4, "points": [], "events": [], "servers": []}


def test_what_frozen_is_compared_with_is_of_the_same_rollouts() -> None:
    """The first file of a version was compared, the next passed over: they may be of quite different prompts."""
    compared = {"served": counts(300, 100), "frozen": counts(290, 100), "best": counts(300, 80)}
    [point] = points([score(1, **compared), score(1, served=counts(100, 100))])
    assert point["alpha_served"] == pytest.approx(2.0)
    assert point["publication_lag"] == pytest.approx(3.75 - 3.0)


def test_publication_lag_is_formed_only_where_all_drafters_were_scored() -> None:
    three = {"served": counts(300, 100), "frozen": counts(290, 100), "best": counts(300, 90)}
    two = {"served": counts(100, 100), "best": counts(100, 99), "best_version": "candidate"}
    [point] = points(
        [
            score(1, **three, best_version="v000002-bbbbbbbb"),
            score(1, **two, tokens=900),  # hard prompts, and the better of two is not the best of all
            score(1, served=counts(100, 100)),
        ]
    )
    assert point["publication_lag"] == pytest.approx(300 / 90 - 3)
    assert point["best_version"] == "v000002-bbbbbbbb"
    assert point["alpha_best"] == pytest.approx(300 / 90)
    assert points([score(1, **two)])[0]["publication_lag"] is None


def test_the_best_is_chosen_of_the_sums_and_not_of_each_batch() -> None:
    """Served is better in two files of a group each, the candidate in one: together they do the same."""
    rounds = [(100, 110, "v000002-b"), (100, 110, "v000002-b"), (120, 100, "candidate")]
    scores = [
        score(
            1,
            **{"served": counts(300, served), "frozen": counts(300, 125), "candidate": counts(300, candidate)},
            **{"best": counts(300, min(served, candidate)), "best_version": best, "drafter_version": "v000002-b"},
        )
        for served, candidate, best in rounds
    ]
    [point] = points(scores)
    assert point["publication_lag"] == 0
    assert point["best_version"] == "v000002-b", "on a tie, what serves"
    assert point["alpha_best"] == pytest.approx(900 / 320)
    [last] = points(scores[2:])
    assert (last["best_version"], last["publication_lag"]) == ("candidate", pytest.approx(0.5))


def test_a_version_that_some_batches_were_scored_with_counts_beside_what_served_them() -> None:
    """Archived versions are scored in turn; the prompts of the others are harder. Few batches do not tell."""

    def turn(n: int, better: float) -> dict[str, Any]:
        served = (100 + n % 3) * (2 if n % 2 else 1)
        return score(
            1,
            **{"served": counts(300, served), "frozen": counts(300, 220), "candidate": counts(300, served)},
            **{"best": counts(300, served), "best_version": "v000009-b", "drafter_version": "v000009-b"},
            batch_id=str(n),
            replayed=[{"version": f"v00000{2 + n % 2}-a", "sums": counts(300, served / (better if n % 2 else 0.9))}],
        )

    [point] = points([turn(n, 1.15) for n in range(20)])
    assert point["best_version"] == "v000003-a"
    assert point["publication_lag"] == pytest.approx(0.15 * point["alpha_served"])
    for scores in ([turn(n, 1.15) for n in range(14)], [turn(n, 0.9) for n in range(20)]):
        [point] = points(scores)
        assert (point["best_version"], point["publication_lag"]) == ("v000009-b", 0)
    lucky = [turn(n, 1.15) | {"replayed": None} for n in range(20)]
    lucky = [one | {"best": counts(300, 90), "best_version": f"v00000{2 + n % 2}-a"} for n, one in enumerate(lucky)]
    assert points(lucky)[0]["publication_lag"] == 0, "records of before tell the best alone: it was lucky"


def test_points_ascend_and_include_versions_that_only_engines_have_counted() -> None:
    live = [{"reporter": "e", "policy_version": 9, "drafter_version": "v7", "rounds": 10, "emitted_tokens": 10}]
    found = points([score(5, served=counts(4, 2)), score(1, served=counts(4, 2))], live)
    assert [p["policy_version"] for p in found] == [1, 5, 9]
    assert found[2]["alpha_live"] == 1.0  # a dead drafter shows at once, before any rollout is scored
    assert found[2]["alpha_served"] is None
    assert found[2]["drafter_version"] == "v7"


def test_live_alpha_pools_reporters_and_prefers_what_was_emitted_after_trimming() -> None:
    live: list[dict[str, Any]] = [
        {"policy_version": 2, "rounds": 100, "accepted_tokens": 300, "emitted_tokens": 390},
        {"policy_version": 2, "rounds": 50, "accepted_tokens": 100, "emitted_tokens": None},
        {"policy_version": 2, "rounds": 0, "accepted_tokens": 0, "emitted_tokens": 0},
        {"policy_version": None, "rounds": 1000, "accepted_tokens": 0, "emitted_tokens": 1000},
    ]
    [point] = points([], live)
    assert point["alpha_live"] == pytest.approx((390 + 150) / 150)
    assert point["live_rounds"] == 150


def test_entropy_and_reward_are_pooled_ratios() -> None:
    [point] = points(
        [
            score(1, logprob_sum=-10.0, logprob_tokens=10, reward_sum=1.0, reward_count=4),
            score(1, logprob_sum=-200.0, logprob_tokens=90),
        ]
    )
    assert point["entropy"] == pytest.approx(2.1)
    assert point["reward"] == pytest.approx(0.25)


def test_the_version_that_served_most_and_the_newest_action_are_named() -> None:
    [point] = points(
        [
            score(1, drafter_version="v2", served=counts(500, 100), action="train", created=5.0),
            score(1, drafter_version="v3", served=counts(20, 10), action="idle", created=9.0),
        ]
    )
    assert point["drafter_version"] == "v2"
    assert point["action"] == "idle"


def test_half_widths_pool_over_batches_and_cover_the_truth() -> None:
    rng = random.Random(11)

    def rollout() -> tuple[float, float]:
        rounds = rng.randint(20, 200)
        return rounds * max(1.0, rng.gauss(3.0, 0.5)), rounds

    estimates, widths = [], []
    for _ in range(300):
        batches = [[rollout() for _ in range(20)] for _ in range(3)]
        records = [score(1, served=DrafterSums.of(*zip(*batch, strict=True))) for batch in batches]
        [point] = points(records)
        estimates.append(point["alpha_served"])
        widths.append(point["alpha_served_half_width"])
        assert point["rollouts_replayed"] == 60
    # The stated width is that of the estimator's own spread, and covers 95 % of it.
    assert statistics.mean(widths) == pytest.approx(1.96 * statistics.stdev(estimates), rel=0.12)
    covered = sum(abs(e - 3.0) < w for e, w in zip(estimates, widths, strict=True)) / 300
    assert 0.90 < covered < 0.985


def test_siblings_do_not_make_alpha_seem_surer_than_its_prompts_are() -> None:
    """Four answers a prompt, which are alike. By rollout the interval of 8 prompts held α in half of the cases."""
    rng = random.Random(12)

    def interval() -> tuple[float, float, float]:
        prompts = [rng.gauss(3.0, 0.4) for _ in range(8)]
        rounds = [[rng.randint(60, 100) for _ in range(4)] for _ in prompts]
        tokens = [[n * rng.gauss(of, 0.1) for n in own] for of, own in zip(prompts, rounds, strict=True)]
        by_prompt = DrafterSums.of(map(sum, tokens), map(sum, rounds))
        by_rollout = DrafterSums.of(itertools.chain(*tokens), itertools.chain(*rounds))
        replayed = [{"version": "v000001-aaaaaaaa", "sums": asdict(by_prompt)}]
        [point] = points([score(1, served=by_rollout, candidate=by_rollout, replayed=replayed)])
        return point["alpha_served"], point["alpha_served_half_width"], point["alpha_candidate_half_width"]

    found = [interval() for _ in range(300)]
    assert all(served == candidate for _, served, candidate in found), "the same counts, and so the same prompts"
    assert 0.91 < sum(abs(alpha - 3.0) < width for alpha, width, _ in found) / 300 < 0.985
    one = DrafterSums.of([400.0], [100.0])
    alone = [{"version": "v000001-aaaaaaaa", "sums": asdict(one)}]
    [point] = points([score(1, served=DrafterSums.of([190, 210], [50, 50]), replayed=alone)])
    assert point["alpha_served_half_width"] is None, "answers of one prompt say nothing about others"


def test_rollouts_without_a_round_leave_the_sums_alone() -> None:
    assert DrafterSums.of([8, 0, 4], [2, 0, 2]) == DrafterSums(
        tokens=12.0, rounds=4.0, rollouts=2.0, tokens_squared=80.0, rounds_squared=8.0, tokens_rounds=24.0
    )


def test_events_are_passed_on_as_the_registry_wrote_them() -> None:
    event = {"time": 3.0, "event": "refused", "policy_version": 4, "reason": "no gain"}
    assert alpha_series("r", [], [], [RunEvent.of(event)], 3).events == [event]


def split(
    policies: list[int], max_lag: int | None = None, returns: Sequence[int] = (), to: int = 0
) -> list[list[int | None]]:
    """The policy versions of each attempt, where batches arrived in that order, one a second.

    `returns`: the number of batches after which a trainer registered again, at version `to`.
    """
    scores = [record_fixtures.score(score(p, entry_id=f"{1000 * n}-0")) for n, p in enumerate(policies, 1)]
    random.Random(1).shuffle(scores)  # their order is by arrival
    found = attempts(scores, max_lag, [Return(after + 0.5, to) for after in returns])
    for one, following in itertools.pairwise(found):
        assert one.closed == following.opened
    assert (found[0].opened, found[-1].closed) == (None, None)
    return [[one.policy_version for one in attempt.scores] for attempt in found]


def test_a_trainer_that_starts_again_opens_another_attempt() -> None:
    first, again = list(range(60)), list(range(20, 50))
    assert split(first) == [first]
    assert split(first + first) == [first, first]
    assert split(first + again + first) == [first, again, first], "from a checkpoint, then from step 0"
    assert split([p for p in first for _ in range(5)] + first)[1] == first
    assert split([]) == [[]]


def test_a_trainer_that_registers_again_opens_an_attempt_however_early_it_starts_again() -> None:
    for died in (3, 5, 13, 18, 60):
        first, again = list(range(died + 1)), list(range(30))
        assert split(first + again, returns=[died + 1]) == [first, again], died
    resumed = [10, 11, 12, 13, 14]
    assert split([*range(14), *resumed], returns=[14], to=10) == [list(range(14)), resumed]
    assert split([0, 1, 2, 3, 0, 1, 2, 3, 0, 1], returns=[4, 8]) == [[0, 1, 2, 3], [0, 1, 2, 3], [0, 1]]
    assert split([0, 1, 2, 3, 0], returns=[4])[1] == [0], "at its first batch already"
    first, again = list(range(14)), list(range(8))
    assert split([*first, 13, 13, *again], returns=[14]) == [[*first, 13, 13], again], "an engine had sent some more"
    assert split([*range(100), *range(12), *range(60)], returns=[100, 112])[1:] == [list(range(12)), list(range(60))]


def test_of_several_registrations_at_one_moment_each_counts() -> None:
    first, resumed = list(range(100)), list(range(90, 130))
    scores = [record_fixtures.score(score(p, entry_id=f"{1000 * n}-0")) for n, p in enumerate(first + resumed, 1)]
    for registered in ((90,), (90, 0), (0, 90), (0, 0, 90, 0)):
        marks = [Return(100.5 + n / 100, to) for n, to in enumerate(registered)]
        assert [len(one.scores) for one in attempts(scores, None, marks)] == [100, 40], registered
    assert len(attempts(scores, None, [Return(100.5, 0)])) == 1, "nearer to what came before than to 0"


def test_a_trainer_that_registers_again_and_goes_on_opens_no_attempt() -> None:
    steps = list(range(40))
    assert split(steps, returns=[20]) == [steps], "it went on where it was"
    assert split([*range(21), *range(20, 40)], returns=[21]) == [[*range(21), *range(20, 40)]], "with the same step"
    assert split(steps, returns=[0, 40]) == [steps], "and nothing came before or after"
    old = [20, 22, 20, 21, 20, 21, 22, 23]
    assert split(old, returns=[0]) == [old], "records of before it are forgotten: it says nothing of what is left"
    late = [*range(20), *range(20, 30), 28, *range(30, 40)]
    assert split(late, returns=[20]) == [late], "what is late after its first eight batches is only late"


@pytest.mark.parametrize("marks", [1, 5])
@pytest.mark.parametrize("late", [(0,), (0, 0, 1), (0, 0, 0, 1, 1, 2), (0, 1, 2, 3), (1, 2, 3, 4)])
def test_a_registration_in_the_middle_of_a_run_hardly_opens_an_attempt(late: tuple[int, ...], marks: int) -> None:
    """300 runs of four batches a step, each this number of versions late. Somebody registers at version 0."""
    opened = 0
    for seed in range(300):
        draw = random.Random(seed)
        policies = [max(0, step - draw.choice(late)) for step in range(100) for _ in range(4)]
        opened += len(split(policies, returns=sorted(draw.sample(range(len(policies)), marks)))) > 1
    assert opened <= 6 * marks


def test_late_or_absurd_batches_open_no_attempt() -> None:
    steps = list(range(60))
    assert len(split(steps[:40] + [3] * 7 + steps[40:])) == 1, "seven that were late by 37 versions"
    assert len(split([*steps[:40], 10**9, *steps[40:]])) == 1
    assert len(split([0] * 20)) == 1
    for seed in range(50):
        draw = random.Random(seed)
        asynchronous = [max(0, step - draw.randrange(17)) for step in range(200) for _ in range(4)]
        assert len(split(asynchronous)) == 1, seed
    wide = [max(0, step - random.Random(7 * step).randrange(60)) for step in range(400)]
    assert len(split(wide, max_lag=60)) == 1, "batches may be as late as the setting says"


def told(*batches: tuple[int, int | None], mark: Return | None = None) -> list[list[int | None]]:
    """The policy versions of each attempt, where batches of these versions and attempts arrived in this order."""
    scores = [
        record_fixtures.score(score(p, entry_id=f"{1000 * n}-0", attempt=own)) for n, (p, own) in enumerate(batches, 1)
    ]
    found = attempts(scores, None, [] if mark is None else [mark])
    return [[one.policy_version for one in attempt.scores] for attempt in found]


def test_what_sessions_tell_of_attempts_is_not_guessed() -> None:
    assert told((0, 1), (1, 1), (0, 2), (5, 2), (1, 2), (1, 3)) == [[0, 1], [0, 5, 1], [1]]
    assert told((0, 1), (0, 4), (0, None)) == [[0], [0, 0]], "attempts whose scores are forgotten are none"
    late = [*((p, 1) for p in range(60)), *((3, 1) for _ in range(20))]
    assert len(told(*late)) == 1, "whatever the versions of a session are"
    beside = [*((p, 1) for p in range(40)), *((0, None) for _ in range(9))]
    assert len(told(*beside, (40, 1))) == 1, "an engine's, while the trainer goes on"
    assert len(told(*beside)) == 2, "another trainer's, which tells no session"
    assert len(told((0, None), (0, 2), (1, 2))) == 1, "of records that begin in the midst of an attempt"


def test_a_return_is_a_sign_for_batches_of_its_attempt_alone() -> None:
    batches = [*((p, 1) for p in range(10)), (0, 1), (1, 1), (2, 1)]
    for attempt, opened in ((None, 1), (0, 1), (2, 1), (1, 2)):
        assert len(told(*batches, mark=Return(10.5, 0, attempt))) == opened, attempt
    for attempt, opened in ((None, 2), (0, 1), (1, 1)):
        silent = [(p, None) for p, _ in batches]
        assert len(told(*silent, mark=Return(10.5, 0, attempt))) == opened, attempt


def test_an_attempt_has_what_happened_while_it_was_under_way() -> None:
    policies = [*range(40), *range(30)]
    scores = [record_fixtures.score(score(p, entry_id=f"{1000 * n}-0")) for n, p in enumerate(policies, 1)]
    first, second = attempts(scores)
    assert (first.closed, second.began) == (second.opened, 41.0)
    assert [first.has(t) for t in (None, 0.0, 40.9, 41.0)] == [True, True, True, False]
    assert [second.has(t) for t in (None, 40.9, 41.0, 1e9)] == [False, False, True, True]
