"""The state of a run in words: the worst thing that is true comes first, with its number."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest

from benchmarks.unswapped import simulate
from service.monitor.alpha import Compared
from service.monitor.counts import LiveAlpha
from service.monitor.current import Current, Tilt
from service.monitor.drift.cause import Cause, cause_of
from service.monitor.events import Event, Moved, Moves
from service.monitor.headline import (
    Headline,
    RunFacts,
    duration,
    headline,
)
from service.monitor.headroom import Advice
from service.monitor.live.engine import Stretch
from service.monitor.live.watch import EngineVerdict, Watch
from service.monitor.records import (
    AcceptanceRecord,
    Change,
    Estimate,
    HeldVersion,
    LaneGauges,
    Resampled,
    RunState,
    SamplingSettings,
    WorkerGauges,
)

NOW = 10_000.0
KNOWN = Compared(5, 2.14, 4.77, 2.1, 2.3, 0.05)
POINT = Current(
    policy_version=5,
    drafter_version="v000007-0a1b2c3d",
    alpha_served=4.77,
    alpha_ngram=1.2,
    compared=KNOWN,
    publication_lag=0.0,
    best_version="v000007-0a1b2c3d",
)

#: What the worker says of itself, as the tests name it.
_OF_WORKER = {"heartbeat": "heartbeat", "worker_error": "error"}
_OF_WORKER |= {name: name for name in ("for_memory", "action", "unjudged", "no_memory", "drift_alpha", "drift_level")}


def facts(**changes: Any) -> RunFacts:
    """A run in which all is well."""
    well: dict[str, Any] = {
        "now": NOW,
        "registered": 0.0,
        "heartbeat": NOW - 1,
        "action": "train",
        "accepted": 40,
        "last_arrival": NOW - 5,
        "recent_batches": 20,
        "served_version": "v000007-0a1b2c3d",
        "published": 3,
        "current": POINT,
        "last_engine_report": NOW - 2,
    }
    told = well | changes
    of_worker = {name: told.pop(key) for key, name in _OF_WORKER.items() if key in told}
    if told.pop("drift_alarm", False):
        of_worker["drift"] = {"fast": LaneGauges(statistic=2.0, limit=1.0)}
    return RunFacts(worker=WorkerGauges(**of_worker), **told)


def test_what_the_headroom_means_is_said_beside_the_headline_and_harm_first() -> None:
    bound = Advice("training_bound", "each training still gains 7.0%: a GPU")
    found = headline(facts(headroom=bound))
    assert (found.state, found.also[0]) == ("aligned", "Training-bound: each training still gains 7.0 %: a GPU.")
    hurt = headline(facts(headroom=Advice("hurt", "each training loses 2.0%")))
    assert (hurt.level, hurt.text) == ("warn", "Training hurts: each training loses 2.0 %.")
    for state in ("learning", "starved", "behind", "unknown"):  # said elsewhere, or nothing to say
        assert headline(facts(headroom=Advice(state, "x"))) == headline(facts())


def test_features_that_disagree_with_the_newest_weights_own_tokens_are_said() -> None:
    found = headline(facts(current=replace(POINT, newest_gap=0.0612)))
    assert (found.level, found.state) == ("warn", "wrong_features")
    assert "0.061 nats off" in found.text
    for sound in (0.02, None):
        assert headline(facts(current=replace(POINT, newest_gap=sound))).state != "wrong_features"


def test_an_engine_that_is_not_lossless_is_said_with_how_much() -> None:
    biased = replace(POINT, tilt=Tilt(math.log(2), math.log(1.5), math.log(2.5), 12_000, biased=True))
    found = headline(facts(current=biased))
    assert (found.level, found.state) == ("bad", "not_lossless")
    assert "comes at 2.00 times the odds that the policy gives it (1.50 to 2.50, 12,000 tokens)" in found.text
    assert "accept drafts too freely" in found.text
    sure = headline(facts(current=replace(POINT, tilt=Tilt(1200.0, 1100.0, 1300.0, 8_000, biased=True))))
    assert "148.41 times the odds" in sure.text
    small = headline(facts(current=replace(POINT, tilt=Tilt(0.2, 0.15, 0.25, 400_000, biased=True))))
    assert (small.level, small.state) == ("warn", "not_lossless")
    shy = replace(POINT, tilt=Tilt(-0.3, -0.4, -0.2, 12_000, biased=True))
    assert "accept drafts too freely" not in headline(facts(current=shy)).text
    paused = headline(facts(current=biased, watch=Watch((), "they disagree"), state=RunState("paused", "the GPU")))
    assert paused.state == "paused", "nothing is judged any more"
    assert not [one for one in paused.also if one.startswith(("Not lossless", "Nothing is published"))]
    sound = replace(POINT, tilt=Tilt(0.01, -0.1, 0.12, 12_000, biased=False))
    assert headline(facts(current=sound)) == headline(facts())


def new(**changes: Any) -> RunFacts:
    """A run that was just registered."""
    nothing: dict[str, Any] = {"accepted": 0, "last_arrival": None, "recent_batches": 0, "served_version": None}
    nothing |= {"published": 0, "current": None, "last_engine_report": None, "registered": NOW - 2}
    return facts(**(nothing | changes))


def point(**changes: Any) -> Current:
    return replace(POINT, **changes)


def said(found: Headline) -> tuple[str, str, str]:
    assert found.text.startswith(found.word)
    return found.level, found.state, found.text


DEAD = EngineVerdict(
    "agent http://e:8000",
    "dead",
    "live α 1.00 over 1,500 rounds against replay α 3.95",
    "v000007-0a1b2c3d",
    Stretch(1500, 1.0, 3.95, -1.37, 0.03),
)
GAP = "log-probabilities disagree with the features by 2.7 nats"
STATES = [
    (
        facts(outdated=True),
        (
            "warn",
            "outdated",
            "A trainer's rollouts are not used: another start has begun at an earlier policy version since, and what "
            "this one sends is skipped. If both are to go on, give each a run name of its own.",
        ),
    ),
    (
        facts(heartbeat=NOW - 71, queued=12),
        ("bad", "worker_silent", "Worker silent for 71 s: nothing is scored or trained; 12 batches wait."),
    ),
    (
        facts(worker_error="the checkpoint is of another depth\n", heartbeat=NOW - 50),
        ("bad", "refused", "Refused by the worker: the checkpoint is of another depth"),
    ),
    (
        facts(worker_error="the checkpoint is of another depth", heartbeat=NOW - 100),
        ("bad", "worker_silent", "Worker silent for 2 min: nothing is scored or trained."),
    ),
    (
        new(heartbeat=None, accepted=3, queued=3, oldest_queued=NOW - 60),
        (
            "bad",
            "no_worker",
            'No worker has taken this run up: 3 batches wait. Start "draftalign worker" on the same Redis and state '
            "directory, if none runs.",
        ),
    ),
    (
        new(heartbeat=None, accepted=12, queued=12, oldest_queued=NOW - 3),
        ("wait", "no_worker", "Waiting: 12 batches are queued, the worker has not begun."),
    ),
    (
        new(heartbeat=None, registered=NOW - 60),
        (
            "warn",
            "no_worker",
            'No worker has taken this run up. Start "draftalign worker" on the same Redis and state directory, '
            "if none runs.",
        ),
    ),
    (
        new(accepted=3, recent_batches=3, recent_dead=3, dead_reason=GAP),
        ("bad", "batches_dead", f"3 of 3 batches dead: {GAP}"),
    ),
    (
        facts(recent_batches=20, recent_dead=18, dead_reason=GAP),
        ("bad", "batches_dead", f"18 of the last 20 batches dead: {GAP}"),
    ),
    (
        new(accepted=12, queued=12, gathered=27_648, wanted=50_000),
        (
            "wait",
            "gathering",
            "Waiting for the draft vocabulary: 27,648 of 50,000 response tokens gathered (vocab_min_tokens).",
        ),
    ),
    (
        new(accepted=12, queued=12, gathered=50_688, wanted=50_000),
        (
            "wait",
            "learning",
            "Learning: 50,688 response tokens are gathered; the first drafter is being made.",
        ),
    ),
    (
        facts(watch=Watch((DEAD, replace(DEAD, reporter="f")))),
        (
            "bad",
            "engine_dead",
            "Dead in an engine: agent http://e:8000, with v000007: live α 1.00 over 1,500 rounds against replay α 3.95."
            " So it is in 1 more.",
        ),
    ),
    (
        facts(watch=Watch((DEAD,)), failed_pushes=3),
        (
            "bad",
            "engine_dead",
            "Dead in an engine: agent http://e:8000, with v000007: live α 1.00 over 1,500 rounds against replay α 3.95."
            " It was pushed again 3 times, which did not help: restart the engine.",
        ),
    ),
    (
        facts(watch=Watch((replace(DEAD, name="stale weights", text="live α 2"),))),
        ("bad", "engine_stale", "Other weights in an engine: agent http://e:8000, with v000007: live α 2."),
    ),
    (
        facts(watch=Watch((replace(DEAD, name="engine features", text="live α 2"),))),
        ("bad", "engine_features", "Wrong features in an engine: agent http://e:8000, with v000007: live α 2."),
    ),
    (
        facts(watch=Watch((replace(DEAD, name="trainer features"),), hold="live and replay α disagree")),
        ("bad", "held", "Nothing is published: live and replay α disagree."),
    ),
    (
        facts(watch=Watch((replace(DEAD, name="depth", text="it drafts 2"),))),
        ("warn", "engine_depth", "Other depth: agent http://e:8000: it drafts 2."),
    ),
    (
        facts(current=point(compared=Compared(5, 5.0, 4.77, 0.94, 0.97))),
        (
            "bad",
            "worse",
            "Worse than doing nothing: v000007 gives 4.77 tokens per round; the first drafter, frozen, would give "
            "5.00 (-4.6 %; -6.0 to -3.0 %).",
        ),
    ),
    (
        facts(unjudged=True),
        (
            "warn",
            "unjudged",
            "No prompt is new: all were trained on under this policy version, so nothing can be judged, and nothing is "
            "trained; v000007 gives 4.77 tokens per round.",
        ),
    ),
    (
        facts(no_memory=True),
        (
            "warn",
            "no_memory",
            "Too little memory to train: memory ran out in each training, so rollouts are scored only for a while, and "
            "then one more is tried; v000007 gives 4.77 tokens per round.",
        ),
    ),
    (
        facts(drift_alarm=True, drift_alpha=2.51, drift_level=3.4),
        (
            "warn",
            "drifting",
            "Drifting: α 2.51 is below its level so far, 3.40; v000007 gives 4.77 tokens per round.",
        ),
    ),
    (
        facts(current=point(publication_lag=0.6, best_version="v000003-0a1b2c3d", compared=KNOWN)),
        ("warn", "publication_lag", "Behind: v000007 gives 4.77 tokens per round; v000003 would give 0.60 more."),
    ),
    (
        facts(queued=1, disk_fill=1.35),
        (
            "warn",
            "queue_full",
            "Disk nearly full: 1 batch waits, 135 % of what this run may have of it; rollouts are refused.",
        ),
    ),
    (
        facts(disk_fill=math.inf),
        ("warn", "queue_full", "Disk full: it has no room for rollouts of this run; rollouts are refused."),
    ),
    (
        facts(redis_fill=0.93, queue_fill=0.83),
        (
            "warn",
            "redis_full",
            "Redis nearly full: 93 % of its memory is in use; at 100 % rollouts of all runs are refused.",
        ),
    ),
    (
        facts(redis_fill=1.0),
        (
            "bad",
            "redis_full",
            "Redis full: 100 % of its memory is in use; at 100 % rollouts of all runs are refused.",
        ),
    ),
    (
        facts(queue_fill=0.83, queued=8300),
        ("warn", "queue_full", "Queue 83 % full: 8,300 batches wait; at 100 % rollouts are refused."),
    ),
    (
        facts(last_arrival=NOW - 1200),
        ("wait", "trainer_silent", "No rollouts for 20 min."),
    ),
    (
        new(gathered=27_648, wanted=50_000, accepted=12, queued=12, last_arrival=NOW - 5000),
        ("wait", "trainer_silent", "No rollouts for 83 min."),
    ),
    (
        facts(recent_dead=10, newest_dead=10, dead_reason=GAP),
        ("warn", "batches_dead", f"10 of the last 20 batches dead, the newest 10 among them: {GAP}"),
    ),
    (
        facts(queued=12, oldest_queued=NOW - 7200, last_scored=NOW - 7300),
        ("warn", "stuck", "12 batches wait, the oldest for 2 h; nothing was scored for 2 h."),
    ),
    (
        facts(queued=1, oldest_queued=NOW - 1200),
        ("warn", "stuck", "1 batch waits for 20 min; nothing is scored."),
    ),
    (new(), ("wait", "no_rollouts", "Waiting for the first rollouts.")),
    (new(accepted=2, queued=2), ("wait", "queued", "Waiting: 2 batches in the queue, none scored yet.")),
    (new(accepted=2), ("wait", "unscored", "Waiting: no rollout has been scored yet.")),
    (
        facts(current=Current(alpha_ngram=1.2), served_version=None),
        (
            "wait",
            "learning",
            "Learning: no drafter is served yet; the next rollouts judge the first one.",
        ),
    ),
    (
        facts(current=Current(alpha_ngram=1.2)),
        ("good", "published", "Published: no rollout has come since v000007 was published."),
    ),
    (
        facts(current=Current(alpha_ngram=1.2), queued=18),
        ("good", "published", "Published: v000007; 18 batches wait to be scored with it."),
    ),
    (
        facts(current=Current(live=LiveAlpha(2.5, 900))),
        ("good", "live", "Live: 2.50 tokens per round in the engines. No rollout is scored yet."),
    ),
    (
        facts(),
        (
            "good",
            "aligned",
            "Aligned: v000007 gives 4.77 tokens per round; the first drafter, frozen, would give 2.14 (+122.9 %; "
            "+110.0 to +130.0 %).",
        ),
    ),
    (
        facts(current=point(compared=Compared(3, 2.14, 4.18, 1.8, 2.1))),
        (
            "good",
            "aligned",
            "Aligned: v000007 gives 4.77 tokens per round. On the newest rollouts that tested both it was 4.18 against "
            "2.14 of the first drafter, frozen (+95.3 %; +80.0 to +110.0 %).",
        ),
    ),
    (  # of fewer than eight prompts nobody knows what chance does
        facts(current=point(compared=Compared(5, 2.14, 4.77))),
        (
            "good",
            "serving",
            "Serving: v000007 gives 4.77 tokens per round; the first drafter, frozen, would give 2.14.",
        ),
    ),
    (
        facts(served_version="v000008-0a1b2c3d", current=point(compared=None)),
        (
            "good",
            "serving",
            "Serving: v000007 gave 4.77 tokens per round on the last rollouts (v000008 is served since).",
        ),
    ),
    (  # a look has just found the newer one better
        facts(served_version="v000008-1b2c3d4e", current=point(compared=Compared(5, 4.77, 4.77))),
        (
            "good",
            "serving",
            "Serving: v000007 gave 4.77 tokens per round on the last rollouts (v000008 is served since).",
        ),
    ),
    (
        facts(current=point(compared=Compared(5, 4.75, 4.77, 0.99, 1.018))),
        (
            "good",
            "level",
            "Level: v000007 gives 4.77 tokens per round; the first drafter, frozen, would give 4.75 (+0.4 %; -1.0 to "
            "+1.8 %). Training has gained nothing since.",
        ),
    ),
    (
        facts(current=point(compared=Compared(5, 4.75, 4.77, 0.97, 1.04))),
        (
            "good",
            "serving",
            "Serving: v000007 gives 4.77 tokens per round; the first drafter, frozen, would give 4.75 (+0.4 %; -3.0 to "
            "+4.0 %).",
        ),
    ),
    (
        facts(current=point(compared=Compared(5, 5.0, 4.77, 0.9, 1.01))),
        (
            "good",
            "serving",
            "Serving: v000007 gives 4.77 tokens per round; the first drafter, frozen, would give 5.00 (-4.6 %; -10.0 "
            "to +1.0 %).",
        ),
    ),
    (
        facts(published=1, current=point(compared=Compared(5, 4.77, 4.77))),
        (
            "good",
            "level",
            "At the start: v000007 gives 4.77 tokens per round; no candidate has been better than this first drafter "
            "yet.",
        ),
    ),
]


@pytest.mark.parametrize(("known", "expected"), STATES, ids=[expected[1] for _, expected in STATES])
def test_every_state_is_said_with_its_number(known: RunFacts, expected: tuple[str, str, str]) -> None:
    assert said(headline(known)) == expected


def test_a_lag_that_few_prompts_make_is_not_said() -> None:
    better = {"publication_lag": 0.6, "best_version": "v000003-0a1b2c3d"}
    assert headline(facts(current=point(**better, compared=replace(KNOWN, low=1.7, by_chance=0.16)))).state == "aligned"
    unsure = replace(KNOWN, by_chance=None)
    assert headline(facts(current=point(**better, compared=unsure))).state == "aligned", "it may be chance"


@pytest.mark.parametrize("served", ["v000001-0a1b2c3d", "v000003-0a1b2c3d"], ids=["the first again", "a new one"])
def test_what_was_measured_of_a_replaced_drafter_is_not_said_of_the_one_that_serves(served: str) -> None:
    """A worker that is behind compares nothing: its last comparison is of the version before."""
    of_two = Compared(5, 2.66, 1.59, 0.58, 0.61, 0.02, "v000002-0a1b2c3d")
    behind = {"drafter_version": served, "alpha_served": 2.59, "compared": of_two}
    found = headline(facts(served_version=served, current=point(**behind)))
    name = served.partition("-")[0]
    assert said(found) == (
        "good",
        "serving",
        f"Serving: {name} gives 2.59 tokens per round. On the newest rollouts that tested both v000002 was 1.59 "
        "against 2.66 of the first drafter, frozen (-40.2 %; -42.0 to -39.0 %).",
    )
    worse = {"drafter_version": "v000002-0a1b2c3d", "alpha_served": 1.59, "compared": of_two, "publication_lag": 1.0}
    assert headline(facts(served_version=served, current=point(**worse))).state == "serving", "it serves no more"
    of_it = facts(served_version="v000002-0a1b2c3d", current=point(**worse))
    assert headline(of_it).state == "worse"
    assert "would give 1.00 more" in headline(of_it).also[0]
    better = replace(of_two, alpha_served=4.0, low=1.4, high=1.6)
    ahead = {"drafter_version": served, "alpha_served": 2.59, "compared": better}
    assert headline(facts(served_version=served, current=point(**ahead))).state == "serving", "v000002 was aligned"


def test_the_worst_is_said_first_and_the_rest_beside_it() -> None:
    found = headline(
        facts(
            heartbeat=NOW - 71,
            recent_dead=15,
            dead_reason=GAP,
            watch=Watch((DEAD,)),
            drift_alarm=True,
            last_arrival=NOW - 3600,
        )
    )
    assert found.state == "worker_silent"
    starts = ("15 of the last 20 batches dead", "Dead in an engine", "Drifting", "No rollouts for 60 min")
    assert [text.startswith(start) for text, start in zip(found.also, starts, strict=True)] == [True] * 4


def test_what_is_no_trouble_is_said_beside_the_headline_only() -> None:
    found = headline(facts(recent_dead=2, dead_reason=GAP, last_engine_report=None, action="defer", queued=14))
    assert found.state == "aligned"
    assert found.also == (
        f"2 of the last 20 batches dead: {GAP}",
        "No engine reports what it accepts.",
        "Worker behind: 14 batches queued, of which the newest policy's are trained on.",
    )


def test_an_engine_that_is_followed_and_drafts_nothing_is_told_from_none() -> None:
    idle = AcceptanceRecord(reporter="agent http://e:8000", drafter_version="v000007-a", rounds=0, created=NOW - 2)
    told = "No engine has drafted yet: agent http://e:8000 follows, with v000007."
    assert told in headline(facts(engines=[idle], drafted=False)).also
    assert not headline(facts(engines=[idle])).also, "what came first counts too: its newest report may be of no round"
    gone = headline(facts(engines=[idle], last_engine_report=NOW - 7200)).also
    assert gone == ("No engine has reported for 2 h: none drafts, or agents are away.",)


def test_an_engine_that_its_prompts_may_explain_is_no_trouble() -> None:
    found = headline(facts(watch=Watch((replace(DEAD, name="lower", text="live α 2"),))))
    assert found.state == "aligned"
    assert "Lower in an engine: agent http://e:8000, with v000007: live α 2." in found.also


def unswapped(**changes: Any) -> Headline:
    """Of an engine that counts with v000003, replaced 20 minutes ago and again since."""
    moves = Moves()
    for sequence, (ago, version) in enumerate(((2000, "v000003-0a"), (1200, "v000006-0a"), (30, "v000007-0a1b2c3d"))):
        moves.add(Moved(time=NOW - ago, sequence=sequence, version=version))
    known: dict[str, Any] = {"reporter": "agent http://e:8000", "drafter_version": "v000003-0a", "created": NOW - 30}
    known["behind"] = 600.0
    return headline(facts(moves=moves, engines=[AcceptanceRecord(**(known | {"rounds": 90} | changes))]))


def test_an_engine_that_does_not_get_what_is_published_is_named_with_what_its_agent_says() -> None:
    found = unswapped()
    text = (
        "Not swapped: agent http://e:8000 drafted with v000003 20 min after it was replaced: its agent's log says why."
    )
    assert said(found) == ("warn", "engine_unswapped", text)
    assert unswapped(withheld="another draft vocabulary.").text.endswith("replaced: another draft vocabulary.")
    assert unswapped(drafter_version="initial").state == "engine_unswapped", "one that this run never published"
    assert unswapped(drafter_version="initial", created=NOW - 1450, behind=None).state == "aligned"


def test_a_run_that_waits_for_memory_is_not_called_refused() -> None:
    told = "memory ran out: OSError"
    assert said(headline(facts(worker_error=told, for_memory=True))) == (
        "bad",
        "short_of_memory",
        "Short of memory: memory ran out: OSError",
    )
    assert headline(facts(worker_error=told)).state == "refused"


def test_an_engine_that_another_client_keeps_is_named_with_both_runs() -> None:
    record = AcceptanceRecord(reporter="agent e", method="anothers-drafter", withheld="of run 'b' and run 'a'.")
    text = "Contested: agent e: of run 'b' and run 'a'."
    assert said(headline(facts(contested=[record]))) == ("warn", "engine_contested", text)
    two = headline(facts(contested=[record, replace(record, withheld=None, created=NOW)]))
    assert two.text == "Contested: agent e: its agent's log says why. So it is in 1 more."


def test_an_engine_that_is_silent_with_what_was_replaced_is_away_and_not_unswapped() -> None:
    found = unswapped(behind=20.0, created=NOW - 240)
    assert found.state == "aligned"
    assert found.also == ("Away: agent http://e:8000 has not reported for 4 min; it had v000003, which is replaced.",)
    for changes in ({"created": NOW - 170}, {"drafter_version": "v000006-0a"}, {"final": True}):
        assert unswapped(**({"behind": 20.0, "created": NOW - 240} | changes)).also == ()
    assert unswapped(behind=600.0, created=NOW - 240).state == "engine_unswapped", "what it did is known"


def test_no_engine_that_swaps_is_called_not_swapped_and_those_that_never_do_are() -> None:
    """Simulated: they sleep, their agents are away, clocks differ."""
    found = simulate(engines=40, hours=2.0, seed=1, stuck=4)
    assert found.words.total() == 0
    assert found.old_words.total() > 10, "or nothing is shown here"
    assert found.named[0] < 12
    assert found.named[-1] < 120


@pytest.mark.parametrize(
    "changes",
    [
        {"drafter_version": "v000007-0a1b2c3d"},
        {"drafter_version": "v000006-0a"},
        {"created": NOW - 30, "behind": 599.0},
        {"created": NOW - 30, "behind": None},
        {"final": True},
    ],
)
def test_an_engine_that_was_swapped_or_is_about_to_be_is_no_trouble(changes: dict[str, Any]) -> None:
    assert unswapped(**changes).state == "aligned"


def test_a_version_that_is_served_again_is_not_replaced() -> None:
    moves = Moves()
    for sequence, version in enumerate(("v1", "v2", "v1", "v1")):  # published twice, rolled back, pushed again
        moves.add(Event(time=100.0 + sequence, sequence=sequence, version=version))
    assert (moves.replaced("v1"), moves.replaced("v2"), moves.replaced("v0")) == (None, 102.0, 100.0)
    assert Moves().replaced("v1") is None
    for sequence in range(4, 400):
        moves.add(Event(time=100.0 + sequence, sequence=sequence, version=f"v{sequence}"))
    assert moves.replaced("v1") == 100.0 + 336, "no more of them are kept"


def test_three_dead_batches_in_a_row_are_a_trouble_and_two_are_not() -> None:
    assert headline(facts(recent_dead=2, newest_dead=2)).level == "good"
    assert headline(facts(recent_dead=3, newest_dead=3)).level == "warn"
    assert headline(facts(recent_dead=9, newest_dead=2)).level == "good"
    assert headline(new(accepted=5, recent_batches=5, recent_dead=3, newest_dead=3)).level == "bad", "most are dead"


def test_a_worker_that_beats_but_scores_nothing_is_told_from_one_that_is_at_it() -> None:
    old: dict[str, Any] = {"queued": 50, "oldest_queued": NOW - 7200}
    assert headline(facts(**old)).state == "stuck"
    assert headline(facts(**old, last_scored=NOW - 30)).level == "good", "it is behind"
    assert headline(facts(**old | {"oldest_queued": NOW - 300})).level == "good"
    assert headline(facts(**old, last_scored=NOW + 3600)).state == "stuck", "the clock was set back"
    assert headline(facts(**old, heartbeat=NOW - 71)).also == (), "it is said already"
    gathering: dict[str, Any] = {"gathered": 27_648, "wanted": 50_000, "last_arrival": NOW - 5}
    assert headline(new(**old, **gathering)).state == "gathering", "those batches are to wait"


def test_a_sign_of_life_from_ahead_of_the_clock_is_none() -> None:
    found = headline(facts(heartbeat=NOW + 3600, queued=50))
    assert said(found)[:2] == ("bad", "worker_silent")
    assert headline(facts(heartbeat=NOW + 3)).level == "good", "clocks of two machines differ"


def test_a_trainer_that_pauses_for_long_is_not_called_silent_for_that() -> None:
    assert headline(facts(last_arrival=NOW - 1200, longest_pause=600.0)).state == "aligned"
    assert headline(facts(last_arrival=NOW - 1900, longest_pause=600.0)).state == "trainer_silent"
    assert headline(facts(last_arrival=NOW - 1900, queued=1)).state == "aligned", "the worker is at it"


def test_something_is_always_said() -> None:
    choices: dict[str, tuple[Any, ...]] = {
        "heartbeat": (None, NOW, NOW - 50),
        "accepted": (0, 3),
        "queued": (0, 3),
        "current": (None, Current(), POINT),
        "gathered": (None, 7),
        "registered": (None, NOW - 2),
    }
    for values in itertools.product(*choices.values()):
        assert headline(new(wanted=9, **dict(zip(choices, values, strict=True)))).text


@pytest.mark.parametrize(
    ("seconds", "text"), [(-3, "0 s"), (71, "71 s"), (1200, "20 min"), (7200, "2 h"), (200_000, "2 days")]
)
def test_durations_are_said_in_one_unit(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_a_reason_that_is_a_whole_page_is_cut_short() -> None:
    found = headline(facts(worker_error="<html>\n" + "x" * 5000))
    assert len(found.text) < 350
    assert "\n" not in found.text


# --- the cause of a drift
def cause(held: float = 0.0, prompts: float = 0.0, *, alarm: bool) -> Cause:
    known = [Estimate(change, 1e-4) for change in (held, 0.0, prompts)]
    return cause_of(Change(rollouts=640, alarm=alarm, held=known[0], drafter=known[1], prompts=known[2]))


def test_a_drift_alarm_names_its_cause() -> None:
    said = headline(facts(drift_alarm=True, drift_alpha=2.5, drift_level=3.4, cause=cause(held=-0.3, alarm=True)))
    assert said.state == "drifting"
    assert "below its level so far, 3.40, by features or policy \N{MINUS SIGN}26 % (" in said.text
    unknown = headline(facts(drift_alarm=True, drift_alpha=2.5, drift_level=3.4, cause=cause(alarm=True)))
    assert "level so far, 3.40; v000007" in unknown.text


def test_a_drift_alarm_says_that_the_sampling_was_changed_from_what_to_what() -> None:
    held, now = Estimate(-0.3, 1e-4), SamplingSettings(0.7, 0.95)
    resampled = Resampled(SamplingSettings(1.0), now, held)
    change = Change(rollouts=640, alarm=True, held=held, drafter=Estimate(0.0, 1e-4), resampled=resampled)
    said = headline(facts(drift_alarm=True, drift_alpha=2.5, drift_level=3.4, cause=cause_of(change)))
    assert "3.40, by sampling temperature from 1 to 0.7 and top_p from 1 to 0.95 \N{MINUS SIGN}26 % (" in said.text


def test_harder_prompts_are_a_note_and_no_drift() -> None:
    said = headline(facts(cause=cause(prompts=-0.2, alarm=False)))
    assert said.level == "good"
    assert any("Harder prompts: their mix alone puts α 18 % lower" in one for one in said.also)
    assert not any("Harder" in one for one in headline(facts(cause=cause(prompts=-0.03, alarm=False))).also)


def test_of_a_paused_run_what_was_judged_before_is_no_trouble() -> None:
    worse = point(publication_lag=0.6, best_version="v000003-0a1b2c3d")
    judged: dict[str, Any] = {
        "unjudged": True,
        "no_memory": True,
        "drift_alarm": True,
        "headroom": Advice("hurt", "each loses 2.0%"),
    }
    judged |= {"current": replace(worse, compared=replace(KNOWN, low=0.94, high=0.97))}
    assert headline(facts(**judged)).level == "bad"
    paused = headline(facts(**judged, state=RunState("paused", "the GPU is needed")))
    assert paused.state == "paused"
    [serving] = paused.also
    assert serving.startswith("Serving: v000007 gives 4.77 tokens per round")
    level = headline(facts(state=RunState("paused", "the GPU is needed")))
    assert level.also[0].startswith("Aligned"), "what it is worth is said still"


def test_what_a_person_asked_for_is_no_fault_and_is_said() -> None:
    asked: dict[str, Any] = {"by": "ada", "reason": "the GPU is needed", "since": NOW - 7200}
    silent: dict[str, Any] = {"heartbeat": NOW - 7200, "queued": 3, "oldest_queued": NOW - 7000}
    assert headline(facts(**silent)).state == "worker_silent"
    paused = headline(facts(**silent, state=RunState("paused", **asked)))
    assert (paused.level, paused.state) == ("wait", "paused")
    assert paused.text == ("Paused for 2 h by ada (the GPU is needed): nothing is scored or trained; 3 batches queued.")
    full = headline(facts(**silent, queue_fill=0.9, state=RunState("paused", **asked)))
    assert (full.state, full.also[0]) == ("queue_full", paused.text), "but a full queue is one"
    draining = headline(facts(**silent, state=RunState("draining", **asked)))
    assert draining.state == "worker_silent", "its worker has work to do"
    drained = headline(facts(state=RunState("draining", **asked)))
    assert drained.text.endswith("no more rollouts are accepted; nothing is left in the queue.")
    archived = headline(facts(**silent, recent_dead=20, state=RunState("archived", **asked)))
    assert (archived.level, archived.state, archived.also) == ("wait", "archived", ())
    held = headline(facts(held=HeldVersion("v000003-0a1b2c3d", "v4 is odd", NOW - 60)))
    assert (held.level, held.state) == ("wait", "version_held")
    assert held.text == "Held at v000003 for 60 s (v4 is odd): nothing is published until it is released."
    assert held.also[0].startswith("Aligned"), "what the drafter is worth is said too"


def test_a_worker_is_not_called_silent_for_a_pause_or_for_a_time_when_nothing_ran() -> None:
    silent: dict[str, Any] = {"heartbeat": NOW - 500, "queued": 4}
    assert headline(facts(**silent)).state == "worker_silent"
    resumed = RunState("draining", "for a test", "ada", NOW - 2)
    assert headline(facts(**silent, state=resumed)).state == "draining"
    assert headline(facts(**silent, state=replace(resumed, since=NOW - 300))).word == "Worker silent"
    assert headline(facts(**silent, api_began=NOW - 2)).state != "worker_silent"
    assert headline(facts(**silent, api_began=NOW - 25)).state != "worker_silent", "it imports torch"
    late = headline(facts(**silent, api_began=NOW - 100))
    assert late.text.startswith("Worker silent for 8 min")
