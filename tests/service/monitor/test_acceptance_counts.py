"""Counts of engines: differences, sums, servers side by side, and where reports without a policy version go."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from helpers.service.service_fixtures import RunningService, rollout_file
from helpers.service.storage_fixtures import Store
from helpers.worker.record_fixtures import acceptance, by_drafter
from redis import Redis

from service.monitor.counts import (
    LiveAlpha,
    by_method,
    servers,
    since,
    total,
)
from service.monitor.records import AcceptanceRecord


def counts(rounds: int, accepted: int, **more: Any) -> dict[str, Any]:
    return {
        "reporter": "agent e",
        "drafter_version": "v1",
        "rounds": rounds,
        "accepted_tokens": accepted,
        "drafted_tokens": 3 * rounds,
        "emitted_tokens": rounds + accepted,
        "accepted_per_position": [accepted],
        "window_seconds": 1.0,
        **more,
    }


def counted(rounds: int, accepted: int, **more: Any) -> AcceptanceRecord:
    return acceptance(counts(rounds, accepted, **more))


def test_a_difference_and_a_sum_undo_each_other() -> None:
    before, now = counted(10, 4), counted(25, 19, accepted_per_position=[12, 7])
    more = since(now, before)
    assert (more.rounds, more.accepted_tokens, more.accepted_per_position) == (15, 15, (8, 7))
    assert total(more, before) == replace(now, window_seconds=1.0)


def test_counts_that_fell_began_anew() -> None:
    assert since(counted(3, 1), counted(100, 70)).rounds == 3
    before = counted(100, 70, drafted_tokens=400, emitted_tokens=160, accepted_per_position=(50, 20))
    for lower in ({"drafted_tokens": 399}, {"accepted_per_position": (56, 19)}):
        now = counted(105, 75, **{"drafted_tokens": 420, "emitted_tokens": 170} | lower)
        assert since(now, before) == now
    read_apart = counted(105, 75, drafted_tokens=420, emitted_tokens=120, accepted_per_position=(54, 21))
    assert since(read_apart, before).rounds == 5, "not all of a healthy engine's rounds once more"
    untold = counted(105, 75, drafted_tokens=None, emitted_tokens=None)
    assert since(untold, before).rounds == 5, "what one of the two does not tell did not fall"


def test_counts_begin_again_with_another_life_and_where_it_is_said_not_with_a_fall() -> None:
    before = counted(100, 70, life="one")
    assert since(counted(105, 75, life="two"), before) == counted(105, 75, life="two")
    assert since(counted(105, 75, life="one"), before).rounds == 5
    late = since(counted(90, 60, life="one"), before)
    assert (late.rounds, late.accepted_tokens) == (0, 0)
    assert since(counted(105, 75), before).rounds == 5, "an agent of an earlier release takes over"
    assert since(counted(90, 60), before).rounds == 90
    assert since(counted(105, 75, life="one"), counted(100, 70)).rounds == 5


def test_rounds_of_prompts_are_differences_and_belong_to_no_sum() -> None:
    """Where one of the two does not know its prompts, or contradicts the other, nothing is known of the difference."""
    before = counted(10, 4, by_prompt={"0000000a": (9, 3), "0000000b": (5, 7)})
    now = counted(25, 19, by_prompt={"0000000a": (15, 5), "0000000b": (5, 7), "0000000c": (4, 2)})
    assert since(now, before).by_prompt == {"0000000a": (6, 2), "0000000c": (4, 2)}
    assert since(now, counted(10, 4)).by_prompt == {}, "some of these rounds were counted before"
    assert since(now, counted(0, 0)).by_prompt == now.by_prompt
    fewer = counted(25, 19, by_prompt={"0000000a": (8, 5), "0000000b": (7, 8)})
    assert since(fewer, before).by_prompt == {"0000000b": (2, 1)}, "tokens of the other one fell"
    assert since(now, None).by_prompt == now.by_prompt
    assert since(counted(25, 19, by_prompt={"0000000a": (2, 1)}), before).by_prompt == {}
    assert since(counted(25, 19), before).by_prompt == {}
    assert total(now, before).by_prompt is None
    assert total(now, None).by_prompt is None


def test_an_unknown_emission_stays_unknown() -> None:
    more = since(counted(9, 2, emitted_tokens=None), counted(4, 1))
    assert more.emitted_tokens is None
    assert total(more, counted(4, 1)).emitted_tokens is None


def test_rounds_without_any_count_of_tokens_give_no_alpha() -> None:
    unknown = counted(100, 0, accepted_tokens=None, emitted_tokens=None)
    assert (by_drafter([unknown]), servers([unknown])) == ({}, [])
    assert by_drafter([unknown, counted(10, 5)])["v1"] == LiveAlpha(1.5, 10)
    assert total(unknown, counted(10, 5)).accepted_tokens is None
    assert by_drafter([counted(10, 0, emitted_tokens=None)])["v1"] == LiveAlpha(1.0, 10), "0 is known"


def test_methods_and_drafters_are_never_one_number() -> None:
    records = [
        counted(100, 200),
        counted(100, 50, drafter_version="v2"),
        counted(10, 1, method="ngram", drafter_version="ngram"),
    ]
    assert by_method(records) == {"ngram": LiveAlpha(1.1, 10)}
    assert {v: s.alpha for v, s in by_drafter(records).items()} == {
        "v1": 3.0,
        "v2": 1.5,
    }


def test_a_server_is_shown_with_what_it_runs_now() -> None:
    records = [
        counted(100, 200, created=1.0),
        counted(50, 25, drafter_version="v2", policy_version=3, created=2.0),
        counted(50, 35, drafter_version="v2", policy_version=4, created=3.0),
    ]
    (line,) = servers(records)
    assert line.drafter_version == "v2"
    assert line.alpha == 1.6
    assert line.rounds == 100
    assert line.reported == 3.0


def test_the_half_width_covers_the_truth_19_times_in_20() -> None:
    rng = np.random.default_rng(0)
    keep, rounds, hits = np.array([0.8, 0.6, 0.5]), 400, 0
    truth = 1 + float(np.cumprod(keep).sum())
    for _ in range(400):
        kept = (rng.random((rounds, 3)) < keep).cumprod(axis=1)
        accepted = int(kept.sum())
        (line,) = servers([counted(rounds, accepted, accepted_per_position=kept.sum(axis=0).tolist())])
        assert line.half_width is not None
        hits += abs(line.alpha - truth) <= line.half_width
    assert 0.92 <= hits / 400 <= 0.98


def test_a_report_without_a_policy_version_goes_to_the_newest_one(service: RunningService, redis_client: Redis) -> None:
    store = Store(redis_client, "default")

    def report(policy: int | None, **more: Any) -> None:
        if policy is not None:
            redis_client.set(store._keys.latest_policy, policy)
        document = {"run": "default", "policy_version": None, **more}
        assert service.client.post("/acceptance", json=document).status_code == 200

    report(None, **counts(10, 5))  # nobody has sent rollouts yet
    report(3, **counts(30, 20))
    report(None, **counts(30, 20))  # the same again: nothing is counted twice
    report(4, **counts(80, 90))
    report(None, **counts(5, 5))  # the engine began again
    found = {r.policy_version: (r.rounds, r.accepted_tokens) for r in store.acceptances()}
    assert found == {None: (10, 5), 3: (20, 15), 4: (55, 75)}
    points = {p["policy_version"]: p for p in service.client.get("/alpha").json()["points"]}
    assert points[3]["alpha_live"] == pytest.approx(1 + 15 / 20)
    assert points[4]["alpha_live"] == pytest.approx(1 + 75 / 55)


def test_counts_follow_a_trainer_that_went_back_and_not_one_absurd_policy_version(
    service: RunningService, redis_client: Redis
) -> None:
    def report(policy: int, rounds: int) -> None:
        assert service.post(rollout_file((f"r{policy}",), policy_version=policy)).status_code == 202
        document = {"run": "default", "policy_version": None, **counts(rounds, rounds)}
        assert service.client.post("/acceptance", json=document).status_code == 200

    for policy, rounds in ((7, 10), (999_999_999_999_999, 30), (3, 60)):
        report(policy, rounds)
    found = {r.policy_version: r.rounds for r in Store(redis_client, "default").acceptances()}
    assert found == {7: 10, 999_999_999_999_999: 20, 3: 30}


def test_an_ngram_server_beside_a_drafter_changes_no_live_alpha(service: RunningService, redis_client: Redis) -> None:
    redis_client.set(Store(redis_client, "default")._keys.latest_policy, 7)
    ours = {"run": "default", "policy_version": 7, **counts(100, 200)}
    ngram = {"run": "default", "policy_version": None, "method": "ngram", **counts(100, 20, drafter_version="ngram")}
    ngram["reporter"] = "agent n"
    for document in (ours, ngram):
        assert service.client.post("/acceptance", json=document).status_code == 200
    document = service.client.get("/alpha").json()
    (point,) = document["points"]
    assert point["alpha_live"] == 3.0
    assert point["live_by_method"] == {"ngram": {"alpha": 1.2, "rounds": 100}}
    assert {s["method"]: s["alpha"] for s in document["servers"]} == {"drafter": 3.0, "ngram": 1.2}
    assert all(s["half_width"] is None or math.isfinite(s["half_width"]) for s in document["servers"])
