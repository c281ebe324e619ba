"""What pools evidence, asks the archive, judges and gives a sent drafter up: by numbers alone, without a worker."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from drafter.replay.acceptance import Replay, log_ratio
from drafter.replay.gate import Look, Verdict
from service.monitor.events import GateEvidence
from service.settings import Settings
from service.worker.lineage import CANDIDATE
from service.worker.promotion.archive import Archive, Level
from service.worker.promotion.evidence import Fresh, Pool
from service.worker.promotion.gate import SENT_LOOKS, Contest, Gate, _without_drafter, archive_trial, given_up
from service.worker.promotion.promises import Kept
from service.worker.promotion.training import UNJUDGED_TRAININGS, Training

UNDECIDED = Verdict(False, 0.05, -0.1, 0.2, 1, 0.5, "")


def replay(rounds: Sequence[float]) -> Replay:
    count = len(rounds)
    return Replay(np.full(count, 80.0), np.array(rounds, dtype=np.float64), *np.zeros((2, count, 4)))


@dataclass(frozen=True)
class Batch:
    """Rollouts by name."""

    names: tuple[str, ...]
    policy_version: int = 1

    def select(self, places: Sequence[int]) -> tuple[str, ...]:
        return tuple(self.names[place] for place in places)


def claim(prompts: str, evidence: Sequence[int] | None = None, *, by_prompt: bool = True) -> Fresh:
    """A claim in one batch, whose rollouts are of these prompts, a letter each."""
    names, all_of_it = tuple(f"{p}{i}" for i, p in enumerate(prompts)), tuple(range(len(prompts)))
    chosen = all_of_it if evidence is None else tuple(evidence)
    batches: Any = (Batch(names),)
    return Fresh(batches, (all_of_it,), {}, tuple(prompts), chosen, by_prompt=by_prompt)


# --- evidence


def scored(prompts: str, policy: int, versions: dict[str, list[float]], looked: tuple[int, ...] | None = None) -> Any:
    places = tuple(range(len(prompts))) if looked is None else looked
    scores = SimpleNamespace(
        versions={name: replay(rounds) for name, rounds in versions.items()}, prompts=tuple(prompts), looked=places
    )
    return Batch(tuple(f"{p}{i}" for i, p in enumerate(prompts)), policy), scores


@pytest.mark.parametrize(
    ("trained", "evidence"),
    [
        ({}, (0, 1, 2, 3, 4)),
        ({"a": 1}, (1, 4)),  # siblings of what was trained on say nothing
        ({"a": 1, "b": 1}, (3, 4)),  # one new prompt is too few: rollouts of another policy than was trained on count
        ({"a": 2, "b": 1}, (0, 2, 4)),
        ({"a": 1, "b": 7, "c": 2}, (1, 3)),
    ],
)
def test_a_claims_evidence_is_of_prompts_that_were_not_trained_on_or_under_another_policy(
    trained: dict[str, int], evidence: tuple[int, ...]
) -> None:
    """Prompts a, b, a of policy 1, then a and c of policy 2."""
    first = scored("aba", 1, {"v1": [30, 31, 32], "v2": [1, 1, 1], "v0": [3, 3, 3]})
    second = scored("ac", 2, {"v1": [40, 41], "v0": [4, 4]}, looked=(5, 9))
    found = Fresh.of([first, second], trained)
    assert (found.prompts, found.evidence, found.by_prompt) == (tuple("abaac"), evidence, True)
    assert (list(found.replays), found.looked) == (["v0", "v1"], ((0, 1, 2), (5, 9))), "those scored on all batches"
    assert found.replays["v1"].rounds.tolist() == [30, 31, 32, 40, 41]


@pytest.mark.parametrize(
    ("trained", "prompts", "by_prompt"), [({}, "aa", True), ({"a": 1}, "aa", False), ({"b": 1}, "aa", True)]
)
def test_where_there_is_but_one_prompt_each_rollout_is_an_observation(
    trained: dict[str, int], prompts: str, by_prompt: bool
) -> None:
    assert Fresh.of([scored(prompts, 1, {"v1": [1, 1]})], trained).by_prompt is by_prompt


def test_selected_rollouts_are_those_of_their_places_in_each_batch() -> None:
    batches: Any = (Batch(("a", "b", "c", "d")), Batch(("e", "f")), Batch(("g", "h", "i")))
    fresh = Fresh(batches, ((0, 2, 3), (1,), (0, 2)), {}, tuple("acdfgi"), tuple(range(6)), by_prompt=True)
    found: list[object] = [*fresh.select([5, 1, 0]), *fresh.select([3])]
    assert found == [("a", "c"), ("i",), ("f",)]
    assert fresh.select([]) == []


def test_claims_of_few_prompts_wait_for_each_other() -> None:
    """Two prompts are enough alone, four together, and two once four claims have waited."""

    def adds(pool: Pool, prompts: str, **more: int) -> int | None:
        found = pool.add(claim(prompts), [replay([30.0])], range(len(prompts)), **more)
        return None if found is None else len(found[0][0].rounds)

    assert adds(Pool(), "ab") == 1
    assert adds(Pool(), "ab", alone=4) is None
    pool = Pool()
    assert [adds(pool, prompt) for prompt in "abcd"] == [None, None, None, 4]
    assert pool.claims == []
    assert [adds(pool, prompt) for prompt in "abab"] == [None, None, None, 4]
    assert [adds(pool, "a") for _ in range(6)] == [None] * 6
    assert len(pool.claims) == 4, "no more are kept"
    assert adds(pool, "b") == 5
    assert [adds(pool, "abcde", claims=3) for _ in range(3)] == [None, None, 3]
    assert adds(pool, "") is None
    assert pool.claims == []


def test_pooled_rollouts_know_their_prompts_and_where_each_counts_none_is_told() -> None:
    pool = Pool()
    assert pool.add(claim("ba"), [replay([1.0, 2.0]), replay([3.0, 4.0])], [1], alone=4) is None
    found = pool.add(claim("cbad"), [replay([5.0] * 4), replay([6.0] * 4)], range(4))
    assert found is not None
    (ours, theirs), groups = found
    assert (ours.rounds.tolist(), theirs.rounds.tolist()) == ([1, 2, 5, 5, 5, 5], [3, 4, 6, 6, 6, 6])
    assert groups is not None
    assert groups.tolist() == [0, 2, 1, 0, 3]
    assert pool.add(claim("a"), [replay([1.0])], [0]) is None
    each = pool.add(claim("aa", by_prompt=False), [replay([7.0, 8.0])], [0, 1], alone=4)
    assert each is not None
    assert (each[0][0].rounds.tolist(), each[1]) == ([7, 8], None), "what waited was counted by prompt"


# --- the level of the served drafter, and the archive


BASE = np.array([30.0, 33.0, 28.0, 31.0, 35.0, 29.0])


def shifted(change: float) -> Replay:
    """The same rollouts, with log α changed by so much."""
    return replay(list(BASE * math.exp(-change)))


def test_a_fall_is_three_standard_errors_below_the_level_which_follows_slowly() -> None:
    error = log_ratio(np.full(6, 80.0), BASE).error
    centre = math.log(480 / BASE.sum())
    level = Level()
    assert level.to_json() is None
    level.take(shifted(0.0), None)
    assert [level.mean, level.variance, level.fallen] == pytest.approx([centre, error**2, False])
    assert Level(**level.to_json() or {}) == level
    bound = 3.0 * math.sqrt(1.25) * error  # of the claim itself, and of a level that has an error too
    for part, fallen in ((0.999, False), (1.001, True)):
        found = replace(level)
        found.take(shifted(-part * bound), None)
        assert found.fallen is fallen
        change = -part * bound
        mean, variance = (centre + change, error**2) if fallen else (centre + change / 4, 0.0)
        variance = variance or error**2 + (change**2 - error**2) / 4
        assert [found.mean, found.variance] == pytest.approx([mean, variance])
    found.take(shifted(1.0), None)
    assert found.fallen, "until the archive was asked"
    restless = Level(centre, (4 * error) ** 2)
    restless.take(shifted(-3.0 * error * math.sqrt(16.25) * 0.999), None)
    assert not restless.fallen
    kept = replace(level)
    for nothing in (replay([]), replay([30.0])):  # no error is known of one rollout
        level.take(nothing, None)
        level.take(shifted(0.5), np.zeros(6, dtype=np.int64))
    assert level == kept


class Drafters:
    """A lineage whose archived versions need so many rounds for each rollout."""

    def __init__(self, **rounds: float) -> None:
        self.rounds, self.asked = rounds, list[tuple[str, tuple[str, ...]]]()
        self.sent: dict[str, int] = {}  # those that wait, and how many versions there were when each came
        self.refused: list[tuple[str, str, object]] = []
        self.published = 5
        self.fault: Exception | None = None

    def archived(self) -> list[str]:
        return list(self.rounds)

    def existing(self, version: str) -> str | None:
        return version

    def waiting(self) -> dict[str, Any]:
        return {version: SimpleNamespace(published=number) for version, number in self.sent.items()}

    def refuse_sent(self, version: str, why: str, evidence: GateEvidence | None = None, *, usable: bool = True) -> None:
        self.refused.append((version, why, evidence if usable else "unusable"))

    def replay(self, version: str, batch: tuple[str, ...], *_: object) -> Replay:
        self.asked.append((version, batch))
        if self.fault is not None:
            raise self.fault
        return replay([self.rounds[version]] * len(batch))


def archive(**rounds: float) -> tuple[Archive, Drafters]:
    lineage: Any = Drafters(**rounds)
    return Archive(Settings(gate_min_gain=0.02), lineage), lineage


def test_the_archive_is_asked_where_the_served_drafter_fell_and_after_sixteen_claims() -> None:
    subject, _ = archive(v1=1.0, v2=1.0)
    assert [subject.due([]) for _ in range(17)] == [[]] * 16 + [["v1", "v2"]]
    assert subject.due(["v1"]) == ["v2"], "those that are scored anyway are judged anyway"
    subject.choose(claim("ab"), ["v2"])
    assert subject.due([]) == []
    subject.watch(claim("abcdef"), shifted(0.0))
    subject.watch(claim("abcdef"), shifted(-1.0))
    assert subject.due([]) == ["v1", "v2"]
    subject.begin(Level(0.5, 0.1))
    assert (subject.due([]), subject.level) == ([], Level(0.5, 0.1))
    subject.watch(claim("a"), shifted(0.0).select(np.array([0])))
    assert subject.level == Level(0.5, 0.1), "a claim of one prompt waits for others"


def test_the_version_that_fits_best_is_found_by_halves_and_judged_on_prompts_that_did_not_choose_it() -> None:
    subject, lineage = archive(v1=5.0, v2=4.0, v3=3.0, v4=2.0, v5=1.0)
    fresh = claim("abababababababcc" + "dx", evidence=range(17))  # x is no evidence
    version, judging = subject.choose(fresh, list(lineage.rounds))
    assert version == "v5"
    of_a = [f"a{i}" for i in range(0, 14, 2)]
    assert judging == [*range(1, 14, 2), 16], "of b and d"
    # Every second prompt chooses: a and c. Four rollouts for five versions, then eight for three; then none are left.
    asked = [(name, list(batch)) for name, batch in lineage.asked]
    assert asked == [(f"v{n}", of_a[:4]) for n in (1, 2, 3, 4, 5)] + [
        (f"v{n}", [*of_a[4:], "c14", "c15"]) for n in (5, 4, 3)
    ]
    alone, lineage = archive(v1=1.0)
    assert alone.choose(fresh, ["v1"]) == ("v1", list(range(17)))
    assert lineage.asked == []
    assert archive(v1=1.0, v0=2.0)[0].choose(claim("aaaa"), ["v1", "v0"]) == ("v1", []), (
        "a single prompt chooses, and later claims judge"
    )


@pytest.mark.parametrize(
    ("prompts", "verdict", "waits", "again"),
    [
        ("aa", {"gain": 0.05}, False, True),
        ("aa", {"gain": 0.0199}, False, False),
        ("aa", {"gain": 0.02, "looks": 3}, False, True),
        ("aa", {"gain": 0.05, "looks": 4}, False, False),
        ("aa", {"gain": 0.05, "promote": True}, True, False),
        ("ab", {"gain": 0.05}, False, False),
        ("ab", {"gain": math.nan}, True, True),
    ],
)
def test_the_chosen_version_is_asked_again_while_it_may_still_be_better(
    prompts: str, verdict: dict[str, Any], waits: bool, again: bool
) -> None:
    subject, _ = archive(v1=2.0, v2=1.0)
    fresh = claim(prompts)
    subject.judged("v1", replace(UNDECIDED, **verdict), fresh, waits=waits)
    assert subject.level.fallen is again
    chosen = subject.choose(fresh, ["v1", "v2"])
    assert chosen == ("v1", [0, 1]) if again else chosen[0] == "v2", "the other one needs fewer rounds"
    assert subject.choose(fresh, ["v2"]) == ("v2", [0, 1]), "it is gone from the archive"


# --- trainings, and drafters that people sent


def test_a_training_is_whole_once_its_parts_are_and_waits_for_enough_rollouts() -> None:
    found = Training()
    assert (found.is_part, found.lacks(1)) == (False, False)
    found.add(2.0, 7, 0.5)
    assert (found.trained_to, found.seconds, found.done, found.tested, found.unjudged) == (7, 2.0, 0.5, 0, 1)
    assert found.is_part
    found.add(3.0, 8, 0.485)
    assert found.is_part
    found.add(1.0, 8, 0.005)
    assert (found.seconds, found.is_part) == (6.0, False)
    found.tested = 5
    assert [found.lacks(n) for n in (5, 6)] == [False, True]
    assert [found.lacks(8, more) for more in (2, 3)] == [True, False]
    found.add(None, 9, 1.0)
    assert (found.trained_to, found.seconds, found.done, found.is_part) == (9, None, 0.0, False)
    found.unjudged = UNJUDGED_TRAININGS - 1
    assert not found.is_blind
    found.add(1.0, 9, 1.0)
    assert found.is_blind


@pytest.mark.parametrize(
    ("verdict", "others", "why"),
    [
        ({"high": 0.0199}, 0, "it is no better"),
        ({"high": 0.02}, 0, ""),
        ({"high": 0.01, "looks": 0}, 0, ""),
        ({"high": math.nan}, 2, ""),
        ({"looks": SENT_LOOKS}, 0, "64 looks have not shown it to be better"),
        ({"looks": SENT_LOOKS - 1}, 2, ""),
        ({}, 3, "3 other versions were published while it waited"),
    ],
)
def test_a_sent_drafter_is_given_up_where_it_is_no_better_or_had_its_time(
    verdict: dict[str, Any], others: int, why: str
) -> None:
    assert given_up(replace(UNDECIDED, **verdict), others, 0.02) == why


def test_all_archived_versions_together_spend_a_tenth_of_the_error() -> None:
    trials = [archive_trial(place) for place in range(1, 1000)]
    assert [trial.share for trial in trials[:3]] == pytest.approx([0.05, 0.1 / 6, 0.1 / 12])
    assert sum(trial.share for trial in trials) == pytest.approx(0.1, rel=2e-3)
    assert trials[0].claims.variances == 0.0


def test_plain_decoding_emits_one_token_a_round() -> None:
    plain = _without_drafter(shifted(0.0))
    assert (plain.rounds == plain.tokens).all()
    assert plain.accepted.sum() == plain.reached.sum() == 0


# --- the gate


def gate(**rounds: float) -> tuple[Gate, Drafters]:
    lineage: Any = Drafters(**rounds)
    return Gate(Settings(gate_min_gain=0.02), lineage), lineage


def compared(prompts: str, evidence: Sequence[int] | None = None, /, **changes: float) -> Fresh:
    """A claim on which these versions' log α differs so much from that of `v1`, or is that; `c` is the candidate."""
    count = len(prompts)
    base = np.resize(BASE, count) * (1 + 0.01 * np.arange(count))
    noise = 1 + 0.02 * np.cos(np.arange(count))
    replays = {
        CANDIDATE if name == "c" else name: replay(list(base * math.exp(-change) * (noise if change else 1.0)))
        for name, change in (changes | {"v1": 0.0}).items()
    }
    return replace(claim(prompts, evidence), replays=replays)


def test_all_but_the_served_version_are_judged_on_the_evidence_and_the_best_comes_first() -> None:
    subject, _ = gate()
    subject.trained(2.0, 7)
    fresh = compared("abcdefg", range(6), v0=-0.3, c=0.1)
    wider = compared("abcde", range(5), v0=0.2, c=0.1, v2=0.05, v3=0.05)
    contests = subject.judge(fresh, "v1", wider)
    assert [one.version for one in contests] == [CANDIDATE, "v2", "v3", "v0"]
    assert [one.look.rollouts for one in contests] == [6, 5, 5, 6], "archived ones on what they were scored on"
    assert [one.look.gain for one in contests] == pytest.approx(
        [math.expm1(c) for c in (0.1, 0.05, 0.05, -0.3)], abs=0.02
    )
    assert [one.trained_to for one in contests] == [7, None, None, None]
    assert (subject.training.tested, subject.training.unjudged, subject.served) == (6, 0, "v1")
    shares = {version: trial["share"] for version, trial in subject.state["trials"].items()}
    assert shares == pytest.approx({CANDIDATE: 0.9, "v0": 0.05, "v2": 0.1 / 6, "v3": 0.1 / 12})
    assert subject.archive.level.mean == pytest.approx(math.log(480.0 / fresh.replays["v1"].rounds[:6].sum()), abs=0.05)
    subject.judge(compared("abcdefg", [], c=0.1), "v1")
    assert subject.training.unjudged == 0
    subject.trained(2.0, 7)
    subject.judge(compared("abcdefg", [], c=0.1), "v1")
    assert (subject.training.unjudged, subject.training.tested) == (1, 0), "nothing could judge it"


def test_a_promoted_one_comes_before_one_that_seems_better_and_one_that_nothing_is_known_of_is_last() -> None:
    subject, _ = gate()
    subject.trained(2.0, 7)
    prompts = "".join(chr(97 + n) for n in range(26))
    for _ in range(40):
        contests = subject.judge(compared(prompts, c=0.03), "v1")
    assert contests[0].verdict.promote
    wider: Any = compared("abcdef", c=0.03)
    wider.replays["v2"] = replay(list(BASE * [0.6, 1.1, 0.65, 1.0, 0.7, 0.8]))
    contests = subject.judge(compared(prompts, c=0.03, v0=-0.3), "v1", wider)
    assert [(one.version, one.verdict.promote) for one in contests] == [
        (CANDIDATE, True),
        ("v2", False),
        ("v0", False),
    ]
    assert contests[1].verdict.gain > contests[0].verdict.gain
    contests = subject.judge(compared(prompts, c=0.03, v0=-0.3), "v1", compared("ab", c=0.03, v3=0.3))
    assert [one.version for one in contests] == [CANDIDATE, "v0", "v3"]
    assert math.isnan(contests[2].verdict.gain)


def test_what_a_swap_is_worth_and_how_sure_it_must_be_are_settings() -> None:
    found = []
    for settings in (Settings(), Settings(gate_min_gain=0.2), Settings(gate_confidence=0.99)):
        lineage: Any = Drafters()
        subject = Gate(settings, lineage)
        subject.trained(2.0, 7)
        for _ in range(40):
            (contest,) = subject.judge(compared("abcdefghijklmnopqrstuvwxyz", c=0.1), "v1")
        found.append(contest.verdict)
    assert [one.promote for one in found] == [True, False, True]
    assert found[0].gain == found[1].gain
    assert found[2].low < found[0].low
    assert all("expected gain" in one.reason for one in found)


def test_without_a_served_drafter_a_trained_candidate_is_compared_with_plain_decoding() -> None:
    subject, _ = gate()
    fresh = compared("abcdef", c=0.1)
    del fresh.replays["v1"]  # type: ignore[attr-defined]
    assert subject.judge(fresh, None) == []
    subject.trained(None, 3)
    (contest,) = subject.judge(fresh, None)
    assert (contest.look.alpha_served, contest.trained_to) == (1.0, 3)
    assert contest.look.gain > 0.5
    assert math.isnan(subject.archive.level.mean)


def test_claims_of_few_prompts_are_looked_at_together_and_told_to_wait() -> None:
    subject, _ = gate()
    subject.trained(2.0, 7)
    looks = [subject.judge(compared(prompts, c=0.1), "v1")[0] for prompts in ("ab", "b", "cd")]
    assert [one.look.fault for one in looks[:2]] == [
        "too little evidence: 2 prompts in 1 claims so far",
        "too little evidence: 2 prompts in 2 claims so far",
    ]
    assert looks[0].verdict.reason == looks[0].look.fault
    assert [one.look.prompts for one in looks] == [0, 0, 4]
    assert [one.verdict.looks for one in looks] == [0, 0, 1]
    (again,) = subject.judge(compared("ab", [], c=0.1), "v1")
    assert "all these prompts were trained on already" in again.look.fault
    (nothing,) = subject.judge(compared("", c=0.1), "v1")
    assert nothing.look.fault
    assert "trained on already" not in nothing.look.fault


def test_a_version_whose_wins_did_not_last_is_judged_on_four_claims_together() -> None:
    subject, _ = gate()
    subject.outcomes._won = {"v0": Kept(1.0, -1.0), "v2": Kept(1.0, 0.5)}
    looks = [subject.judge(compared("abcdef", v0=0.1, v2=0.1, c=0.1), "v1") for _ in range(4)]
    prompts = [{one.version: one.look.prompts for one in contests} for contests in looks]
    assert prompts[:3] == [{"v0": 0, "v2": 6, CANDIDATE: 6}] * 3
    assert prompts[3] == {"v0": 6, "v2": 6, CANDIDATE: 6}
    assert {one.version: one.look.rollouts for one in looks[3]}["v0"] == 24
    assert subject.training.tested == 24, "of the candidate"


def test_a_candidate_that_is_the_served_drafter_spends_no_look_until_it_is_trained() -> None:
    subject, _ = gate()
    fresh = compared("abcdef", c=0.0, v0=0.0)
    looks = {one.version: one.verdict.looks for one in subject.judge(fresh, "v1")}
    assert looks == {CANDIDATE: 0, "v0": 1}
    subject.trained(1.0, 2)
    looks = {one.version: one.verdict.looks for one in subject.judge(fresh, "v1")}
    assert looks == {CANDIDATE: 1, "v0": 2}
    (other,) = gate()[0].judge(compared("abcdef", c=0.1), "v1")
    assert other.verdict.looks == 1, "it is not the served drafter, however it came there"


def test_what_a_checkpoint_keeps_is_gone_on_from() -> None:
    subject, lineage = gate(v9=20.0)
    subject.trained(2.0, 7, 0.5)
    assert subject._trials[CANDIDATE].promise.moved == 0.5
    subject.trained(2.0, 7)
    assert subject._trials[CANDIDATE].promise.moved == 1.5
    for prompts in ("abcdef", "ghijkl", "ab"):
        subject.judge(compared(prompts, c=0.1, v0=0.05), "v1")
    subject.promoted("v2", "v1", GateEvidence(gain=0.1, train_on=True))
    subject.judge(replace(compared("abcdef", c=0.1), replays={"v2": shifted(0.0), CANDIDATE: shifted(0.1)}), "v2")
    again = Gate(Settings(gate_min_gain=0.02), lineage)  # type: ignore[arg-type]
    again.restore(json.loads(json.dumps(subject.state)))
    assert json.dumps(again.state) == json.dumps(subject.state)
    assert (again.served, again.outcomes.watched, again.training) == ("v2", "v1", subject.training)
    assert again.archive.level == subject.archive.level
    two = {"v2": replay([30.0, 31.0]), CANDIDATE: replay([29.0, 29.0])}
    subject.judge(replace(compared("ab"), replays=two), "v2")
    assert subject._pools[CANDIDATE].claims
    subject.restore(subject.state)
    assert not subject._pools, "what waited was not in the checkpoint, and comes again"
    begun = Gate(Settings(), lineage)  # type: ignore[arg-type]
    begun.restore(begun.state)
    assert (begun.served, begun.state["level"]) == (None, None)


def test_another_served_drafter_begins_all_trials_again_and_is_measured_beside_the_one_before() -> None:
    subject, _ = gate()
    subject.trained(2.0, 7)
    subject.judge(compared("ab", c=0.1, v0=0.05), "v1")
    subject.judge(compared("abcdef", c=0.1, v0=0.05), "v1")
    assert subject.promoted("v2", "v1", GateEvidence(gain=0.1)) is None, "nothing was promised before"
    assert (subject.served, list(subject.state["trials"]), subject.outcomes.watched) == ("v2", [CANDIDATE], "v1")
    assert not subject._pools
    assert math.isnan(subject.archive.level.mean)
    assert subject._trials[CANDIDATE].promise.variance == 0.0, "it is the served drafter now"
    subject.trained(2.0, 8)
    pair = {"v1": shifted(0.0), "v2": shifted(0.1), CANDIDATE: shifted(0.2)}
    batches: Any = (Batch(tuple("abcdef"), 9),)
    fresh = replace(compared("abcdef"), replays=pair, batches=batches)
    assert subject.outcomes.settle(fresh) is None
    subject.judge(fresh, "v2")
    event = subject.promoted("v0", None, GateEvidence(gain=0.1, train_on=False))
    assert event is not None
    assert (event.version, event.before, event.rollouts) == ("v2", "v1", 6)
    assert event.realised == pytest.approx(math.expm1(0.1))
    assert subject.state["promise"] is None, "there was none before it"
    assert subject._trials[CANDIDATE].promise.variance > 0.0, "training goes on beside the version that serves"


@pytest.mark.parametrize(("prompts", "judging"), [("abcdefghijkl", 6), ("aaaa", 0), ("abcdabcd", 4)])
def test_a_fall_asks_the_archived_version_that_fits_best_and_few_prompts_let_it_wait(
    prompts: str, judging: int
) -> None:
    waits = judging < 6
    subject, lineage = gate(v1=1.0, v8=40.0, v9=28.0)
    fresh = compared(prompts, c=0.1)
    subject.judge(fresh, "v1")
    assert lineage.asked == []
    subject.archive.level.fallen = True
    subject.judge(compared(prompts, [], c=0.1), "v1")
    assert lineage.asked == [], "nothing could choose"
    (contest,) = [one for one in subject.judge(fresh, "v1") if one.version != CANDIDATE]
    assert contest.version == "v9"
    assert contest.look.rollouts == judging, "the other half chose it"
    assert math.isnan(contest.verdict.gain) is waits
    assert (contest.look.fault == "", "trained on already" in contest.look.fault) == (not waits, False)
    assert subject.archive.level.fallen is waits
    again = [one.look.rollouts for one in subject.judge(compared("bcde", c=0.1), "v1") if one.version == "v9"]
    assert again == ([4 + judging] if waits else []), "the choice stands until it is judged"


# --- what was sent


def contest(version: str, **verdict: Any) -> Contest:
    look = Look(0.05, 0.1, 4, 5, 2.0, 1.9)
    return Contest(version, replace(UNDECIDED, **verdict), look, judged_to="7-0")


def test_of_what_was_sent_that_which_waits_longest_is_replayed_and_refused_where_it_cannot_be() -> None:
    subject, lineage = gate(s1=20.0, s2=20.0)
    batch: Any = ("a", "b")
    policy: Any = None
    assert subject.replay_sent(batch, policy) == {}
    lineage.sent = {"s1": 5, "s2": 5}
    (found,) = subject.replay_sent(batch, policy).items()
    assert (found[0], found[1].rounds.tolist()) == ("s1", [20.0, 20.0])
    for fault in (OSError("disk"), MemoryError()):  # of this worker, not of the drafter
        lineage.fault = fault
        with pytest.raises(type(fault)):
            subject.replay_sent(batch, policy)
    assert lineage.refused == []
    lineage.fault = ValueError("x" * 1000)
    assert subject.replay_sent(batch, policy) == {}
    ((version, why, unusable),) = lineage.refused
    assert (version, unusable) == ("s1", "unusable")
    assert why == f"it cannot be replayed: {'x' * 1000}"[:400]


def test_what_was_sent_is_refused_with_its_evidence_and_its_part_of_the_error_stays_spent() -> None:
    subject, lineage = gate()
    subject.judge(compared("abcdef", c=0.1, s1=-0.3, s2=0.1), "v1")
    lineage.sent = {"s1": 5, "s2": 2, "s3": 3}
    worse = contest("s1", high=0.01, reason="why")
    subject.dismiss_sent([contest(CANDIDATE, high=0.01), worse, contest("s3"), contest("s2", promote=True)])
    assert lineage.refused == [("s1", "it is no better: why", worse.evidence)]
    assert list(subject.state["trials"]) == [CANDIDATE, "s2", "s1 2"]
    again = subject.judge(compared("abcdef", c=0.1, s1=0.1), "v1")
    assert {one.version for one in again} == {CANDIDATE, "s1"}
    assert subject.state["trials"]["s1"]["share"] == pytest.approx(0.1 / 12)
    subject.dismiss_sent([contest("s2")])
    lineage.sent["s4"] = 0
    subject.dismiss_sent([contest("s4")])  # another one was promoted meanwhile, which ends all trials
    assert lineage.refused.pop()[0] == "s4"
    assert [why for _, why, _ in lineage.refused[1:]] == ["3 other versions were published while it waited: "]


def test_the_evidence_is_what_look_and_verdict_say_and_the_promise_is_corrected() -> None:
    found = contest("s1", gain=0.21)
    assert found.promised == pytest.approx(0.21)
    assert replace(found, correction=0.5).promised == pytest.approx(0.1)
    evidence = replace(found, correction=0.5).evidence
    assert evidence.promised == pytest.approx(0.1)
    assert (evidence.gain, evidence.low, evidence.high, evidence.looks, evidence.error) == (0.21, -0.1, 0.2, 1, 0.5)
    assert (evidence.rollouts, evidence.prompts, evidence.alpha_candidate, evidence.alpha_served) == (5, 4, 2.0, 1.9)
    assert (evidence.judged_to, "trained_to" in evidence.model_fields_set) == ("7-0", False)
    assert replace(found, trained_to=3, judged_to=None).evidence.model_dump().get("trained_to") == 3
