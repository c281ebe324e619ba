"""What is true now: the figures of what arrived last, whatever its policy version."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
from helpers.service.service_fixtures import HEADERS, RunningService
from helpers.worker.record_fixtures import compared, score, sums
from helpers.worker.worker_fixtures import Bench

from service.monitor.alpha import Compared, Turn
from service.monitor.current import ENOUGH_ROUNDS, Newest, Tilt, current
from service.monitor.metrics import RunSnapshot, render
from service.monitor.records import AcceptanceRecord, Favour, Return, ScoreRecord


def scored(entry: str, policy_version: int, **drafters: float) -> ScoreRecord:
    sums = {name: {"tokens": 100 * alpha, "rounds": 100.0} for name, alpha in drafters.items()}
    return score({"entry_id": entry, "policy_version": policy_version, **sums})


def counted(policy_version: int, rounds: int, alpha: float, created: float, version: str = "v1") -> AcceptanceRecord:
    emitted = round(rounds * alpha)
    return AcceptanceRecord(
        reporter="e",
        drafter_version=version,
        policy_version=policy_version,
        rounds=rounds,
        accepted_tokens=emitted - rounds,
        emitted_tokens=emitted,
        created=created,
    )


def test_nothing_is_true_of_nothing() -> None:
    assert current([], []) is None
    assert current([ScoreRecord()], [AcceptanceRecord(rounds=3)]) is None


def test_a_figure_that_the_newest_lack_is_of_the_newest_that_have_it() -> None:
    found = current([scored("1-0", 3, served=3.0, frozen=2.0), scored("2-0", 4, served=3.5)], [])
    assert found is not None
    assert (found.policy_version, found.alpha_served, found.alpha_frozen) == (4, 3.5, 2.0)
    assert found.compared == Compared(policy_version=3, alpha_frozen=2.0, alpha_served=3.0)
    assert found.alpha_best is None
    assert found.alpha_served_half_width is None, "of another batch than its α it would say nothing"


def test_drafters_are_compared_over_as_many_batches_as_it_takes_to_know() -> None:
    """The newest file of eight prompts would call a drafter that is 4 % better worse than none."""
    spread = [0.8, 0.9, 0.95, 1.0, 1.05, 1.1, 1.2, 1.32]
    batches = [compared(n, [1.04 * ratio for ratio in spread]) for n in range(1, 10)]
    unlucky = compared(10, [0.9 * ratio for ratio in spread])
    alone = current([unlucky], [])
    assert alone is not None
    assert alone.compared is not None
    assert (alone.compared.low or 0.0) < 0.98 < (alone.compared.high or 0.0), "one file does not tell"
    found = current([*batches, unlucky], [])
    assert found is not None
    assert found.compared is not None
    assert found.compared.policy_version == 10
    assert found.compared.alpha_served / found.compared.alpha_frozen > 1.0
    other = current([*batches, compared(10, [0.9] * 8, "v3")], [])
    assert other is not None
    assert other.compared is not None
    assert other.compared.high == pytest.approx(0.9), "of the drafter that serves, and sure"
    few = current([compared(1, [0.9] * 7)], [])
    assert few is not None
    assert few.compared is not None
    assert few.compared.alpha_served == pytest.approx(2.7)
    assert few.compared.low is None, "too few prompts to say by how much"


@pytest.mark.parametrize("batches", [1, 4])
def test_equal_drafters_are_seldom_told_apart_by_shares_of_many_prompts(batches: int) -> None:
    """Of 256 prompts unlike each other, 16 shares: the 95 % interval leaves the truth out in 20 and 19 of 400 cases."""
    rng, wrong = np.random.default_rng(0), 0
    for _ in range(400):
        records = []
        for n in range(batches):
            length, gain = rng.lognormal(4.0, 1.0, 256), rng.normal(0.0, 0.1, 256)
            share = rng.integers(0, 16, 256)
            tokens, *parts = (np.bincount(share, x) for x in (3 * length, length, length * np.exp(gain - 0.005)))
            shares = [{f"{i:x}": both for i, both in enumerate(zip(tokens, one, strict=True))} for one in parts]
            replayed = [{"version": f"v{i}", "sums": sums(one), "by_share": one} for i, one in enumerate(shares)]
            fields = {"entry_id": f"{n}-0", "batch_id": str(n), "policy_version": n, "drafter_version": "v1"}
            both = {"frozen": sums(shares[0]), "served": sums(shares[1])}
            records.append(score(fields | both | {"replayed": replayed}))
        found = Compared.of(records)
        assert found is not None
        assert found.low is not None
        wrong += not found.low < 1.0 < (found.high or 0.0)
    assert wrong < 36  # 9 %: less than one in 1,000 such tests, if it is 5 %


@pytest.mark.parametrize("prompts", [6, 2, 1])
def test_few_prompts_that_come_again_tell_a_large_difference(prompts: int) -> None:
    """A run of a handful of prompts is not called well served where it is served much worse than at its beginning."""
    rng = np.random.default_rng(0)
    alphas = 0.7 * np.exp(0.03 * rng.normal(size=(20, prompts)))
    batches = [of_prompts(compared(n, list(row)), "again") for n, row in enumerate(alphas, 1)]
    found = current(batches, [])
    assert found is not None
    assert found.compared is not None
    assert found.compared.low is not None
    assert found.compared.low < 0.7 < (found.compared.high or 0.0) < 0.9
    early = current(batches[:7], [])
    assert early is not None
    assert early.compared is not None
    assert early.compared.low is None, "they may be the first of many"


def of_prompts(record: ScoreRecord, name: str) -> ScoreRecord:
    """The batch with its prompts called otherwise."""
    parts = [
        replace(one, by_prompt={f"{name}/{n}": both for n, both in enumerate(one.by_prompt.values())})
        for one in record.replayed or ()
    ]
    return replace(record, replayed=tuple(parts))


def test_a_lag_behind_the_candidate_is_of_many_batches_while_the_first_version_serves() -> None:
    """That version beside itself is known at once, which says nothing of the candidate."""
    rng = np.random.default_rng(0)

    def first(n: int, more: float) -> ScoreRecord:
        sums = {"served": 100.0, "frozen": 100.0, "candidate": 100.0 / (more * math.exp(0.08 * rng.normal()))}
        of = {name: {"tokens": 300.0, "rounds": rounds} for name, rounds in sums.items()}
        best: dict[str, object] = {"best": of["candidate"] if sums["candidate"] < 100 else of["served"]}
        best |= {"best_version": "candidate" if sums["candidate"] < 100 else "v1"}
        fields = {"entry_id": f"{n}-0", "batch_id": str(n), "policy_version": n, "drafter_version": "v1"}
        return score(fields | of | best | {"replayed": [{"version": "v1", "sums": of["served"]}]})

    def behind(scores: Sequence[ScoreRecord]) -> list[tuple[float, float | None]]:
        found = [current(scores[:n], []) for n in range(20, len(scores), 4)]
        return [(one.publication_lag or 0.0, one.compared.by_chance) for one in found if one and one.compared]

    assert max(lag for lag, _ in behind([first(n, 1.0) for n in range(1, 200)])) < 0.05 * 3
    lags = behind([first(n, 1.3) for n in range(1, 60)])
    assert all(0.2 * 3 < lag < 0.4 * 3 and 0.0 < (chance or 0.0) < 0.1 for lag, chance in lags)


def test_a_comparison_says_of_which_drafter_it_is_and_a_lag_is_of_no_other() -> None:
    """After a publish a worker that is behind scores the served drafter alone, and compares nothing."""
    tested = [
        replace(scored(f"{n}-0", n, served=1.6, candidate=2.0, frozen=2.6, best=2.6), drafter_version="v2")
        for n in range(1, 10)
    ]
    found = current(tested, [])
    assert found is not None
    assert found.compared is not None
    assert found.compared.drafter_version == "v2"
    assert found.publication_lag == pytest.approx(1.0)
    later = [replace(scored(f"{n}-0", n, served=2.6), drafter_version="v3") for n in (10, 11)]
    behind = current([*tested, *later], [])
    assert behind is not None
    assert (behind.drafter_version, behind.compared) == ("v3", found.compared)
    assert (behind.publication_lag, behind.best_version) == (None, None)
    for records, is_known in ((tested, True), ([*tested, *later], False)):
        text = render({"r": RunSnapshot(now=100.0, scores=records)}).decode()
        assert ("draftalign_publication_lag{" in text) is is_known


def test_records_that_name_no_queue_entry_come_before_those_that_do() -> None:
    old = ScoreRecord(created=9e12)
    assert sorted([scored("7-1", 1), scored("7-0", 1), old, scored("12-0", 1)], key=lambda one: one.arrival) == [
        old,
        scored("7-0", 1),
        scored("7-1", 1),
        scored("12-0", 1),
    ]


def test_live_alpha_that_rests_on_few_rounds_is_pooled_with_what_came_before() -> None:
    reports = [counted(7, ENOUGH_ROUNDS, 3.0, 10.0), counted(8, 9, 1.0, 20.0)]
    found = current([], reports)
    assert found is not None
    assert (found.alpha_live, found.live_rounds) == (1.0, 9)
    assert found.live is not None
    assert found.live.alpha == pytest.approx((3 * ENOUGH_ROUNDS + 9) / (ENOUGH_ROUNDS + 9))
    assert found.live.rounds == 209
    assert current([], reports[1:]).live is None  # type: ignore[union-attr]


def test_live_alpha_is_not_of_an_attempt_that_the_trainer_gave_up() -> None:
    scores = [scored("3000-0", 3), scored("7000-0", 7), scored("8000-0", 3)]
    before, after = counted(3, 900, 3.0, 3.5), counted(3, 300, 2.0, 8.5, version="v2")
    found = current(scores, [before, after])
    assert found is not None
    assert (found.alpha_live, found.live_rounds) == (2.0, 300)
    assert current(scores, [before]).alpha_live == 3.0  # type: ignore[union-attr]  # there is nothing else


def test_the_service_follows_a_trainer_that_resumed(bench: Bench, serve: Callable[..., RunningService]) -> None:
    bench.begin()
    service, worker = serve(), bench.worker()
    for attempt, policies in enumerate([(6, 7), (999_999_999_999_999,), (3, 4)]):
        for policy in policies:
            bench.post(f"{attempt}/{policy}", policy_version=policy, rollouts=2)
            bench.drain(worker)
            assert service.client.get("/alpha").json()["current"]["policy_version"] == policy
            [gauge] = re.findall(
                r"^draftalign_policy_version{.*} (.*)$", service.client.get("/metrics").text, flags=re.M
            )
            assert float(gauge) == policy
    versions = [p["policy_version"] for p in service.client.get("/alpha").json()["points"]]
    assert versions == [3, 4, 6, 7, 999_999_999_999_999]


def test_a_trainer_that_dies_early_and_registers_again_mixes_no_curves(
    bench: Bench, serve: Callable[..., RunningService]
) -> None:
    bench.begin()
    service, worker = serve(), bench.worker()

    def attempt(name: str, policies: Sequence[int]) -> None:
        for policy in policies:
            bench.post(f"{name}/{policy}", policy_version=policy, rollouts=2)
        bench.drain(worker)

    def shown(which: str) -> list[tuple[int, int]]:
        points = service.client.get("/alpha", params={"attempt": which} if which else {}).json()["points"]
        return [(point["policy_version"], point["rollouts"]) for point in points]

    def register() -> None:
        reply = service.client.put("/runs/default", content=bench.world.run_file(), headers=HEADERS)
        assert reply.status_code == 200, reply.text

    register()
    attempt("first", range(5))
    assert shown("") == [(policy, 2) for policy in range(5)]
    register()
    attempt("second", range(3))
    assert shown("") == [(policy, 2) for policy in range(3)], "followed"
    assert shown("2") == shown(""), "and read again"
    assert shown("1") == [(policy, 2) for policy in range(5)]
    again = serve()  # another API process, which has followed nothing
    points = again.client.get("/alpha").json()["points"]
    assert [point["policy_version"] for point in points] == [0, 1, 2]


def test_counts_of_one_drafter_and_policy_version_are_of_the_attempt_in_which_they_were_made(
    bench: Bench, serve: Callable[..., RunningService]
) -> None:
    """The engine knows its policy version, counts on through a second attempt, and reports before the batches come.

    Another one drafts in the first alone, and reports the same again while the second is under way.
    """
    bench.begin()
    service, worker = serve(), bench.worker()
    drafter = service.client.get("/drafter/latest").json()["version"]
    told = defaultdict[tuple[str, int], list[int]](lambda: [0, 0])

    def rounds(policy: int, rounds: int, accepted: int, engine: str = "e1", **more: object) -> None:
        counts = told[engine, policy]
        counts[:] = counts[0] + rounds, counts[1] + accepted
        report = {"run": "default", "reporter": engine, "drafter_version": drafter, "policy_version": policy, **more}
        report |= {"rounds": counts[0], "accepted_tokens": counts[1], "drafted_tokens": 4 * counts[0]}
        assert service.client.post("/acceptance", json=report).status_code == 200

    def attempt(name: str, policies: Sequence[int], count: int, accepted: int, engines: Sequence[str]) -> None:
        for policy in policies:
            for engine in engines:
                rounds(policy, count, accepted, engine)
            bench.post(f"{name}/{policy}", policy_version=policy, rollouts=2)
        bench.drain(worker)

    def live(which: str) -> list[tuple[int, float, int]]:
        points = service.client.get("/alpha", params={"attempt": which} if which else {}).json()["points"]
        return [(one["policy_version"], one["alpha_live"], one["live_rounds"]) for one in points]

    def register() -> None:
        reply = service.client.put("/runs/default", content=bench.world.run_file(), headers=HEADERS)
        assert reply.status_code == 200, reply.text

    register()
    attempt("first", range(6), 300, 600, ["e1", "e2"])
    register()
    attempt("second", range(4), 100, 50, ["e1"])
    wanted = [(policy, 3.0, 600) for policy in range(6)]
    assert live("1") == wanted
    assert live("2") == live("") == [(policy, 1.5, 100) for policy in range(4)]
    rounds(5, 0, 0)  # an agent that has started again reports all that it has
    for policy in range(6):
        rounds(policy, 0, 0, "e2", final=True)  # it loads another drafter
    assert live("1") == wanted
    assert live("2") == [(policy, 1.5, 100) for policy in range(4)]
    attempt("second, later", range(4, 7), 100, 50, ["e1"])
    assert live("1") == wanted, "as far as the first came"
    assert live("2") == live("") == [(policy, 1.5, 100) for policy in range(7)]
    assert service.client.get("/alpha").json()["current"]["live"] == {"alpha": 1.5, "rounds": 200}
    line, _ = service.client.get("/alpha").json()["servers"]
    assert (line["rounds"], line["alpha"]) == (2500, (6 * 900 + 7 * 150) / 2500), "all that it has counted"
    with serve().client as again:
        assert [one["live_rounds"] for one in again.get("/alpha").json()["points"]] == [100] * 7


def test_counts_from_before_a_return_that_the_newest_batches_do_not_show_are_left_out() -> None:
    """The trainer went back long ago: the 256 newest batches are all of its new attempt."""
    batches = [scored(f"{1000 * n}-0", n, served=3.0) for n in range(100, 400)]
    newest = Newest(batches, returns=[Return(50.0, 3), Return(120.0, 7), Return(1000.0, 9)])
    assert newest.attempt.opened == Turn(120.0, 120.0, -math.inf)
    assert list(newest.attempt.scores) == newest
    counts = [counted(399, 1000, alpha, at) for at, alpha in ((119.0, 2.0), (120.0, 4.0))]
    found = current(newest, counts)
    assert found is not None
    assert found.alpha_live == 4.0
    first = Newest(batches[:5], returns=[Return(100.0, 3)])
    assert first.attempt.opened == Turn(100.0, 100.0, -math.inf), "it came with the first batch that is known"
    assert Newest(batches[:5], returns=[Return(100.5, 3)]).attempt.opened is None
    assert Newest([], returns=[Return(1.0, 3)]).attempt.opened is None


def test_a_report_of_a_clock_that_was_set_back_is_the_oldest() -> None:
    """Clocks of two machines may differ by five seconds. A report from later than that cannot be the newest."""
    ours = counted(8, 1000, 3.0, 90.0)
    for later, alpha in ((104.0, 2.0), (105.0, 2.0), (105.5, 3.0)):
        found = current([], [counted(7, 1000, 2.0, later), ours], now=100.0)
        assert found is not None
        assert found.alpha_live == alpha, later


def test_the_report_that_came_last_is_the_newest_though_its_policy_version_is_lower() -> None:
    """And without batches the policy version is that report's."""
    records = [counted(9, 1000, 2.0, 1.0), counted(8, 1000, 3.0, 2.0)]
    for given in (records, records[::-1]):
        found = current([], given)
        assert found is not None
        assert (found.alpha_live, found.policy_version) == (3.0, 8)
    same = [replace(record, created=2.0) for record in records]
    found = current([], same[::-1])
    assert found is not None
    assert (found.alpha_live, found.policy_version) == (2.0, 9), "reported at once: of the higher one"


def test_live_alpha_pools_past_a_report_without_a_round() -> None:
    """An engine that has just begun with a policy version has counted nothing under it."""
    records = [
        counted(policy, rounds, alpha, float(policy))
        for policy, rounds, alpha in ((1, 150, 2.0), (2, 0, 0.0), (3, 150, 4.0))
    ]
    found = current([], records)
    assert found is not None
    assert found.live is not None
    assert (found.live.alpha, found.live.rounds) == (3.0, 300)


def test_how_far_the_newest_weights_own_tokens_are_off_is_a_median_of_the_newest_batches() -> None:
    def gap(*gaps: float | None) -> float | None:
        now = current([ScoreRecord(policy_version=n, created=n, newest_gap=one) for n, one in enumerate(gaps)], [])
        assert now is not None
        return now.newest_gap

    assert gap(0.3, None, 0.2) is None, "two batches say too little"
    assert gap(0.001, None, 0.9, 0.002) == 0.002, "one batch is no fault that lasts"
    assert gap(*[0.001] * 30, *[0.05] * 11) == 0.05


def test_the_tilt_is_pooled_over_the_batches_whose_law_is_known() -> None:
    records = [
        ScoreRecord(policy_version=0, entry_id="1-0", favour=Favour(30.0, 20.0, 1000)),
        ScoreRecord(policy_version=1, entry_id="2-0"),
        ScoreRecord(policy_version=1, entry_id="3-0", favour=Favour(10.0, 30.0, 500)),
    ]
    now = current(records, ())
    assert now is not None
    assert now.tilt is not None
    half = 1.959963984540054 / math.sqrt(50.0)
    assert (now.tilt.value, now.tilt.tokens, now.tilt.biased) == (0.8, 1500, True)
    assert [now.tilt.low, now.tilt.high] == pytest.approx([0.8 - half, 0.8 + half])
    unknown = current(records[1:2], ())
    assert unknown is not None
    assert unknown.tilt is None
    certain = current([ScoreRecord(policy_version=0, favour=Favour(0.0, 0.0, 10))], ())
    assert certain is not None
    assert certain.tilt is None


@pytest.mark.parametrize(
    ("tilt", "variance", "biased"),
    [
        (0.8, 10.0, False),  # 2.5 standard errors
        (0.8, 60.0, True),
        (-0.8, 60.0, True),
        (0.09, 1e6, False),  # sure, and no more than what rounding does
        (0.2, 4000.0, True),
    ],
)
def test_a_bias_is_beyond_chance_and_beyond_rounding(tilt: float, variance: float, biased: bool) -> None:
    found = Tilt.of([ScoreRecord(policy_version=0, favour=Favour(tilt * variance, variance, 1000))])
    assert found is not None
    assert found.biased == biased


def test_lossless_engines_are_called_biased_in_fewer_than_one_run_of_a_hundred() -> None:
    """1,000 runs of 600 batches, looked at after each one over the newest 256; tokens as the policy draws them."""
    rng = np.random.default_rng(0)
    runs, batches, tokens, kinds = 1000, 600, 40, 50
    q = rng.dirichlet(np.full(6, 0.3), kinds)  # the drafter's laws, and the policy's
    p = 0.6 * q + 0.4 * rng.dirichlet(np.full(6, 0.3), kinds)
    mean, variance = (p * q).sum(1), (p * q * q).sum(1) - (p * q).sum(1) ** 2
    excess, spread = np.zeros((runs, batches)), np.zeros((runs, batches))
    for _ in range(tokens):
        kind = rng.integers(kinds, size=(runs, batches))
        drawn = (p.cumsum(1)[kind] < rng.random((runs, batches, 1))).sum(-1).clip(max=5)
        excess += q[kind, drawn] - mean[kind]
        spread += variance[kind]
    ends = range(0, batches, 10)
    alarms = 0
    for run in range(runs):
        pooled = [
            Favour(
                float(excess[run, max(0, n - 255) : n + 1].sum()), float(spread[run, max(0, n - 255) : n + 1].sum()), 1
            )
            for n in ends
        ]
        verdicts = [Tilt.of([ScoreRecord(policy_version=0, favour=one)]) for one in pooled]
        alarms += any(one is not None and one.biased for one in verdicts)
    assert alarms < runs / 100


def test_after_a_publish_the_figures_are_of_the_drafter_that_serves_since_though_the_policy_is_the_same() -> None:
    """A warm-up has one policy version for long. Two engines that swap one after another make one change of it."""
    versions = ["v1", "v1", "v2", "v1", "v2", "v2", "v3", "v0"]  # the last one of an engine that is late
    alphas = [1.0, 1.0, 2.0, 1.0, 2.0, 2.0, 3.0, 1.0]
    scores = [
        replace(scored(f"{1000 * (n + 1)}-0", 0, served=alpha), drafter_version=v)
        for n, (v, alpha) in enumerate(zip(versions, alphas, strict=True))
    ]
    found = current(scores, [])
    assert found is not None
    assert found.alpha_served == pytest.approx(2.0), "since v3 came, with the late one"
    newest = current(scores[:-1], [])
    assert newest is not None
    assert newest.drafter_version == "v3"
    assert newest.alpha_served == pytest.approx(3.0)
    before = current(scores[:-2], [])
    assert before is not None
    assert before.drafter_version == "v2"
    assert before.alpha_served == pytest.approx(7 / 4), "since v2 came first"


def test_after_a_persons_rollback_the_figures_are_of_the_drafter_that_serves_again() -> None:
    """Under one policy version; fewer than eight batches of an older drafter in a row are of engines that are late."""
    versions = ["v2"] * 20 + ["v1"] * 7 + ["v2"] + ["v1"] * 12
    alphas = {"v1": 1.0, "v2": 2.0}
    scores = [
        replace(scored(f"{1000 * (n + 1)}-0", 0, served=alphas[v], frozen=1.0), drafter_version=v)
        for n, v in enumerate(versions)
    ]
    late = current(scores[:-5], [])
    assert late is not None
    assert late.drafter_version == "v2"
    assert late.alpha_served == pytest.approx((21 * 2.0 + 14 * 1.0) / 35)
    back = current(scores, [])
    assert back is not None
    assert (back.drafter_version, back.alpha_served) == ("v1", 1.0)
    assert back.compared is not None
    assert back.compared.alpha_served == 1.0
    newer = replace(scored("90000-0", 0, served=3.0), drafter_version="v3")
    published = current([*scores, newer], [])
    assert published is not None
    assert (published.drafter_version, published.alpha_served) == ("v3", 3.0)


@pytest.mark.parametrize("share", [0.25, 0.5])
def test_engines_that_are_late_are_seldom_taken_for_a_rollback(share: float) -> None:
    """Each of 64 batches is of the older drafter by this chance. Of 4,000 such runs 0.1 and 11 % were."""
    rng, taken = np.random.default_rng(0), 0
    for _ in range(200):
        versions = ["v2", *np.where(rng.random(64) < share, "v1", "v2").tolist()]
        scores = [
            replace(scored(f"{n + 1}-0", 0, served=2.0 if v == "v2" else 1.0), drafter_version=v)
            for n, v in enumerate(versions)
        ]
        taken += len(Newest(scores).spells) > 1
    assert taken <= {0.25: 0.01, 0.5: 0.13}[share] * 200
