"""Which release an engine should have, and what one process of it can take."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from helpers.engine.agent_fixtures import manifest

from rl_hooks.agent.canary import CanaryResult, CanaryRule
from rl_hooks.agent.follower import EngineFollower
from rl_hooks.agent.metrics import AgentMetrics
from rl_hooks.agent.process import (
    Between,
    EngineProcess,
    LoadedVersion,
    ReleaseChoice,
    RivalClient,
    Seen,
    Since,
    between,
    dump_release,
    load_release,
    rejected_in,
)
from rl_hooks.engines.counting.counters import Counts, Snapshot
from rl_hooks.engines.protocol import EngineState, SwapEngine
from rl_hooks.format.release import Release, parse_manifest


def release(number: int, sequence: int | None = None, reason: str = "published", **changes: Any) -> Release:
    sequence = number if sequence is None else sequence
    document = manifest(number, {"model.safetensors": b"x"}, sequence, reason, **changes)
    return Release(parse_manifest(document, "default"), Path("/nowhere"))


def verdict(loaded: Release, *, passed: bool) -> CanaryResult:
    return CanaryResult(loaded.version, "before", 2.0, 2.5, 100, 100, passed)


def test_a_rejected_version_is_wanted_again_only_where_a_person_overrides_the_canary_later() -> None:
    good, bad = release(1), release(2)
    choice = ReleaseChoice(sequence=1, fallback=good)
    assert choice.wanted(bad, good.version, ()) is bad
    assert choice.judged(verdict(bad, passed=False), bad) == 2
    assert choice.wanted(bad, bad.version, ()) is good
    assert choice.wanted(release(2, 3), bad.version, ()) is good
    assert choice.wanted(release(2, 3, "pushed again"), bad.version, ()) is good, "a reason is for people to read"
    assert choice.wanted(release(2, 2, override_canary=True), bad.version, ()) is good
    wanted = release(2, 3, override_canary=True)
    assert choice.wanted(wanted, good.version, ()) is wanted
    assert ReleaseChoice.restore(json.loads(json.dumps(ReleaseChoice(3, wanted).dump()))).fallback == wanted


def test_without_an_offer_only_a_rejected_version_or_none_at_all_is_replaced() -> None:
    good, bad = release(1), release(2)
    choice = ReleaseChoice(fallback=good)
    assert choice.wanted(None, bad.version, ()) is None
    assert choice.wanted(None, None, ()) is good
    choice.judged(verdict(bad, passed=False), bad)
    assert choice.wanted(None, bad.version, ()) is good


def test_what_the_engine_has_refused_is_not_wanted_and_a_passed_version_becomes_the_fallback() -> None:
    first, second, third = release(1), release(2), release(3)
    choice = ReleaseChoice(fallback=first)
    choice.judged(verdict(second, passed=True), second)
    assert choice.wanted(third, None, {3}) is second  # a process that was started again
    assert choice.wanted(third, second.version, {3}) is None


def test_a_version_on_trial_stays_where_the_engine_refuses_a_newer_one() -> None:
    good, tried, refused = release(1), release(2), release(3)
    choice = ReleaseChoice(fallback=good)
    assert choice.wanted(refused, tried.version, {3}) is None
    choice.judged(verdict(tried, passed=False), tried)
    assert choice.wanted(refused, tried.version, {3}) is good


def test_a_choice_comes_back_from_its_dump() -> None:
    choice = ReleaseChoice(5, release(4, gate={"alpha_served": 2.5}, override_canary=True), {"bad": 3})
    assert choice.fallback is not None
    assert choice.fallback.manifest.replayed_alpha == 2.5
    assert ReleaseChoice.restore(json.loads(json.dumps(choice.dump()))) == choice
    damaged = {"rejected": {"good": 1, "said": "1", "flag": True}}
    assert rejected_in(damaged) == {"good": 1}
    assert rejected_in({"rejected": ["v1"]}) == rejected_in({}) == {}
    assert choice.judged(verdict(release(6), passed=False), None) == 5, "nothing is known of how it was offered"
    assert load_release(dump_release(None)) is None


@pytest.mark.parametrize(
    ("changes", "state", "fault"),
    [
        ({}, {}, None),
        ({"kind": "mtp"}, {}, "its kind is mtp, the engine was started for eagle3"),
        ({"config_fingerprint": "other"}, {}, "it has other sizes than the drafter that the engine was started with"),
        ({"d2t_sha256": "other"}, {}, "it has another draft vocabulary than the drafter"),
        ({}, {"config_fingerprint": "engine's"}, "other sizes than"),
        ({}, {"config_fingerprint": "engine's", "d2t_sha256": "engine's"}, "it has another draft vocabulary than"),
        ({}, {"config_fingerprint": "engine's", "aux_layers": (1, 3)}, "other layers (2,4,5; the engine's: 1,3) than"),
        (
            {"d2t_sha256": "other"},
            {"aux_layers": (1, 3)},
            "it has another draft vocabulary and other layers (2,4,5; the engine's: 1,3) than",
        ),
        ({"d2t_sha256": "other"}, {"aux_layers": (2, 4, 5)}, "it has another draft vocabulary than"),
        ({"d2t_sha256": "other", "aux_layers": ()}, {"aux_layers": (1, 3)}, "it has another draft vocabulary than"),
        ({"config_fingerprint": "other"}, {}, "`draftalign download DIR --run default`, then DIR as"),
        ({"config_fingerprint": "other", "kind": "mtp"}, {"takes": "mtp"}, "cannot change. Restart the engine"),
        ({}, {"d2t_sha256": "said in another way", "aux_layers": (1, 3)}, None),
    ],
)
def test_a_process_takes_only_what_fits_the_drafter_that_it_took(
    changes: dict[str, str], state: dict[str, Any], fault: str | None
) -> None:
    process, loaded = EngineProcess(replaced=True), release(1)
    process.took(loaded)
    assert (process.loaded, process.replaced) == (loaded, False)
    offered = replace(loaded, manifest=replace(loaded.manifest, **changes))  # type: ignore[arg-type]
    found = process.misfit(offered, replace(EngineState(loaded.version, True, 1), **state))
    assert found == fault if fault is None else fault in str(found)


def test_of_a_process_that_has_taken_nothing_only_its_own_word_is_known() -> None:
    offered, said = release(1), EngineState("x", True, 0)
    assert EngineProcess().misfit(offered, said) is None
    assert EngineProcess().misfit(offered, replace(said, config_fingerprint="fingerprint")) is None
    fault = EngineProcess().misfit(offered, replace(said, config_fingerprint="other"))
    assert "another draft vocabulary, other sizes or other layers than the drafter" in str(fault)


def scrape(rounds: int) -> Snapshot:
    return Snapshot(Counts(rounds, 3 * rounds, rounds, (), None))


def test_a_restart_is_seen_by_counters_that_fell_or_by_fewer_swaps() -> None:
    seen = Seen(0.0)
    first = seen.look(scrape(10), EngineState("a", True, 2, policy_version=7), 1.0)
    assert (first.known, first.snapshot, first.restarted) == (None, None, False)
    assert seen.snapshot == replace(scrape(10), policy_version=7)
    later = seen.look(scrape(12), EngineState("a", True, 2), 3.5)
    assert (later.known, later.seconds, later.restarted) == (LoadedVersion("a", 2), 2.5, False)
    assert seen.look(scrape(11), EngineState("a", True, 2), 4.0).restarted
    assert seen.look(None, EngineState("a", True, 1), 5.0).restarted
    assert not seen.look(scrape(0), EngineState("a", True, 1), 6.0).restarted
    assert Seen.restore(json.loads(json.dumps(seen.dump())), 6.0).known == LoadedVersion("a", 1)


def test_counts_by_version_end_with_their_agent_and_show_no_restart_when_they_fall() -> None:
    seen, state = Seen(0.0), EngineState("a", True, 2, policy_version=7)
    exact = (("a", 7, Counts(10, 30, 10)),)
    seen.look(replace(scrape(10), exact=exact, policy_version=8), state, 1.0)
    assert seen.snapshot is not None
    assert seen.snapshot.policy_version == 8, "its own word comes before the state's"
    assert not seen.look(replace(scrape(5), exact=exact), state, 2.0).restarted
    assert not seen.look(None, state, 3.0).restarted
    assert not seen.look(scrape(1), state, 4.0).restarted, "there was no scrape before"


@pytest.mark.parametrize("snapshot", [None, Snapshot(Counts(4, 12, 4, (4,), None), 7, exact=(("a", 7, Counts(4)),))])
@pytest.mark.parametrize("known", [None, LoadedVersion("a", 2), LoadedVersion(None, 0)])
def test_what_was_seen_comes_back_from_its_dump(known: LoadedVersion | None, snapshot: Snapshot | None) -> None:
    seen = Seen(5.0, known, snapshot, life="mark")
    assert Seen.restore(json.loads(json.dumps(seen.dump())), 5.0) == seen
    since = seen.look(scrape(1), EngineState("b", True, 9, life="mark"), 6.0)
    assert since.version == (known and known.version)
    assert [str(LoadedVersion("a", 2)), str(LoadedVersion(None, 0))] == [
        "a (after 2 swaps)",
        "one without a name (after 0 swaps)",
    ]


@pytest.mark.parametrize("in_state", [False, True])
def test_a_restart_is_told_by_the_engines_own_mark_alone_where_it_has_one(in_state: bool) -> None:
    def look(seen: Seen, life: str | None, rounds: int) -> bool:
        snapshot, state = replace(scrape(rounds), life=life), EngineState("a", True, 0)
        if in_state:
            snapshot, state = scrape(rounds), replace(state, life=life)
        return seen.look(snapshot, state, 1.0).restarted

    seen = Seen(0.0)
    assert not look(seen, "one", 10)
    assert look(seen, "two", 30), "it passed what it had counted"
    assert not look(seen, "two", 29)
    assert not look(seen, None, 30), "a page that does not say it once is no other process"
    assert look(seen, None, 20)
    seen = Seen.restore(json.loads(json.dumps(seen.dump())), 1.0)
    assert look(seen, "three", 40)


@pytest.mark.parametrize(
    ("known", "now", "pending", "restarted", "repeated", "found"),
    [
        (("a", 1), ("a", 1), None, False, False, Between.SAME),
        (("a", 1), ("a", 1), "a", False, False, Between.SAME),
        (("a", 1), ("a", 1), "b", False, False, Between.SAME),
        (("a", 1), ("a", 2), None, False, True, Between.SAME),
        (("a", 1), ("a", 2), "a", False, True, Between.OWN_SWAP),
        (("a", 1), ("b", 2), "b", False, False, Between.OWN_SWAP),
        ((None, 0), ("b", 1), "b", False, False, Between.OWN_SWAP),
        (None, ("b", 1), "b", False, False, Between.OWN_SWAP),
        (("a", 1), ("b", 2), None, False, False, Between.OTHER_SWAP),
        (("a", 1), ("c", 2), "b", False, False, Between.OTHER_SWAP),
        (("a", 1), ("a", 2), None, False, False, Between.OTHER_SWAP),
        (("a", 1), (None, 2), None, False, False, Between.OTHER_SWAP),
        (None, ("a", 0), None, False, False, Between.OTHER_SWAP),
        (("a", 1), (None, 0), None, True, False, Between.RESTART),
        (("a", 1), ("b", 0), "b", True, False, Between.RESTART),
        (("a", 5), ("b", 1), "b", True, False, Between.RESTART_AND_SWAP),
        (("a", 1), ("a", 1), None, True, False, Between.RESTART_AND_SWAP),
        (("a", 5), ("a", 1), "a", True, True, Between.RESTART_AND_SWAP),
    ],
)
def test_what_lies_between_two_ticks(
    known: tuple[str | None, int] | None,
    now: tuple[str | None, int],
    pending: str | None,
    restarted: bool,
    repeated: bool,
    found: Between,
) -> None:
    since = Since(None if known is None else LoadedVersion(*known), None, 1.0, restarted)
    assert between(since, LoadedVersion(*now), pending, repeated=repeated) is found


@pytest.mark.parametrize("restarted", [False, True])
def test_the_engine_does_each_of_two_requests_whose_answers_were_lost(restarted: bool) -> None:
    wanted = release(2)
    process = EngineProcess()
    process.asks(wanted)
    if restarted:
        process = EngineProcess(pending=process.pending)  # what an agent leaves to the next one
    process.asks(wanted)
    first, second = LoadedVersion(wanted.version, 2), LoadedVersion(wanted.version, 3)
    assert not process.repeated(LoadedVersion("before", 1), first), "this one changed the version"
    assert process.repeated(first, second)
    assert not process.repeated(second, LoadedVersion(wanted.version, 4)), "nobody asked here for a third"


def test_only_swaps_that_the_agent_asked_for_are_its_own() -> None:
    process, now = EngineProcess(), LoadedVersion("other", 2)
    process.asks(release(2))
    assert not process.repeated(None, now)
    assert not process.repeated(now, None)
    assert not process.repeated(LoadedVersion("other", 1), now), "the agent asked for another version"
    assert process.unseen_swaps == 1
    process.did_nothing()
    assert (process.pending, process.unseen_swaps) == (None, 0)
    assert not process.repeated(LoadedVersion(release(2).version, 1), LoadedVersion(release(2).version, 2))


def test_of_two_clients_that_undo_each_other_the_younger_one_goes_first() -> None:
    elder, younger = RivalClient(), RivalClient()
    elder.took(0.0, others=False)
    turns, now = 0, 1.0
    while not (elder.lost or younger.lost):
        younger.took(now, others=True)
        elder.undone(now)
        if elder.lost:
            break
        elder.took(now + 1, others=True)
        younger.undone(now + 1)
        turns, now = turns + 1, now + 2
    assert (turns, elder.lost, younger.lost) == (3, False, True)


def test_a_turn_is_a_swap_that_is_undone_within_five_minutes_and_one_that_lasts_ends_the_contest() -> None:
    contest = RivalClient()
    contest.undone(0.0)
    assert contest.turns == 0, "the agent has swapped nothing yet"
    for turn in range(4):
        contest.took(1000.0 * turn, others=turn > 0)  # there was no other client's drafter before the first
        contest.undone(1000.0 * turn + 300.0)
        assert (contest.turns, contest.lost) == (turn + 1, False)
    contest.took(5000.0, others=True)
    contest.undone(5300.1)
    assert contest.turns == 0
    younger = RivalClient()
    for turn in range(3):
        assert not younger.lost
        younger.took(float(turn), others=turn == 0)
        younger.undone(float(turn))
    assert younger.lost
    elder = RivalClient(turns=4)
    elder.took(0.0, others=False)
    elder.undone(1.0)
    assert elder.lost


def test_a_person_who_swaps_now_and_then_is_no_contest() -> None:
    contest = RivalClient()
    for hour in range(20):
        contest.took(3600.0 * hour, others=False)
        contest.undone(3600.0 * hour + 600)
    assert (contest.turns, contest.lost) == (0, False)


def contender(cache: Path) -> EngineFollower:
    """A follower whose engine has had v1 of its run."""

    def fetch(*_: Any) -> Release:
        raise AssertionError("nothing is downloaded here")

    engine = SwapEngine("http://engine", httpx.AsyncClient())
    follower = EngineFollower(engine, CanaryRule(rounds=200), AgentMetrics(), cache, fetch)
    follower._took(release(1), None)
    return follower


@pytest.mark.parametrize("version", ["a**", "../../**", "\N{SNOWMAN}" * 200, "\0", ""])
def test_whatever_an_engine_calls_the_drafter_of_another_client_it_is_given_up(version: str, tmp_path: Path) -> None:
    """No pattern that it answers is looked for on the disk, and no name is too long."""
    follower = contender(tmp_path / "default")
    while not follower._process.contest.lost:
        follower._took(release(1), version)
        follower._contend(EngineState(version, True, 2))
    assert "is of a run that is not in this cache" in follower.withheld


def test_what_is_counted_with_anothers_drafter_is_of_another_life(tmp_path: Path) -> None:
    """It may be a version that was counted as the run's own, and the service knows counts by their version."""
    follower = contender(tmp_path / "default")
    (tmp_path / "default" / release(2).version).mkdir(parents=True)
    life = follower.ledger.life
    while not follower._process.contest.lost:
        assert follower.ledger.life == life
        follower._took(release(1), release(2).version)
        follower._contend(EngineState(release(2).version, True, 2))
    assert "is of run 'default' too" in follower.withheld
    assert follower.ledger.life != life


RECORDED = Path(__file__).with_name("recorded") / "memory.json"


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"buckets": [{"drafter": "v1", "sums": [1, 2]}]},
        {"snapshot": {"counts": {"rounds": 1, "a count of tomorrow": 2}, "times": None, "exact": None}},
        {"known": 7},
        {"canary": {"good": 3}},
        {"verdicts": [[{"version": "v1", "a field of tomorrow": 1}, 2]]},
        {"fallback": {"manifest": {"version": "v000001-4e27ac3d", "run": "default"}, "path": "x"}},
        {"pending": ["v3"]},
        {"sequence": "two"},
    ],
    ids=lambda changes: ", ".join(changes) or "as it is",
)
def test_what_an_agent_has_rejected_stays_out_also_where_the_rest_cannot_be_read(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    """One memory, as it was written and with each part of it in a form that nobody reads."""
    memory = tmp_path / "default" / "engines" / f"{hashlib.sha256(b'http://engine').hexdigest()[:16]}.json"
    memory.parent.mkdir(parents=True)
    written = json.loads(RECORDED.read_text())
    memory.write_text(json.dumps(written | changes))

    def fetch(*_: Any) -> Release:
        raise AssertionError("nothing is downloaded here")

    engine = SwapEngine("http://engine", httpx.AsyncClient())
    follower = EngineFollower(engine, CanaryRule(rounds=200), AgentMetrics(), tmp_path / "default", fetch)
    assert follower._choice.rejected == {"v000002-6a573c0d": 2}
    again = replace(release(2), manifest=replace(release(2).manifest, version="v000002-6a573c0d"))
    assert follower._choice.wanted(again, "v000001-4e27ac3d", ()) is not again
    counts = {bucket.drafter_version: bucket.counts.rounds for bucket in follower.ledger.buckets()}
    if changes:
        assert (counts, follower.books.canary.good, follower.withheld, follower.sequence) == ({}, None, "", -1)
    else:
        assert counts == {"v000002-6a573c0d": 200, "v000001-4e27ac3d": 305}
        assert follower.books.canary.good == "v000001-4e27ac3d"
        assert follower.withheld.startswith("its canary swapped v000002-6a573c0d back")


def test_an_agent_takes_up_the_marks_of_the_engines_process_and_of_its_counts(tmp_path: Path) -> None:
    follower = contender(tmp_path / "default")
    follower.seen.look(replace(scrape(10), life="the engine's"), EngineState("a", True, 1), 1.0)
    follower._store()
    again = EngineFollower(follower._engine, CanaryRule(rounds=200), AgentMetrics(), tmp_path / "default", None)  # type: ignore[arg-type]
    assert (again.seen.life, again.ledger.life) == ("the engine's", follower.ledger.life)
