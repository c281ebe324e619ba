"""What POST /acceptance keeps, answers, and does about a drafter that an engine has lost."""

from __future__ import annotations

import errno
import json
import random
import time
from collections.abc import Callable, Mapping
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest
from helpers.service.access_fixtures import TokenFile
from helpers.service.service_fixtures import HEADERS, RunningService, run_file
from helpers.service.storage_fixtures import Store
from helpers.worker.record_fixtures import score, told
from redis import Redis
from typer.testing import CliRunner

from service.access.audit import AuditLog
from service.api.context import context
from service.cli.main import app
from service.monitor.events import Moved
from service.monitor.live.engine import LiveRule
from service.monitor.live.replays import REPLAYED_BATCHES
from service.monitor.live.watch import EngineVerdict, failed_pushes, push_is_due
from service.monitor.records import AcceptanceRecord, DrafterSums, Replayed, ScoreRecord, read
from service.storage.queue.keys import Keys
from service.storage.reports.engine_counts import Account


class Engine:
    """Reports cumulative counts as a swap agent does."""

    def __init__(self, service: RunningService, version: str, reporter: str = "agent http://engine") -> None:
        self.service = service
        self.reporter = reporter
        self.version = version
        self.totals: dict[int | None, tuple[int, int]] = {}

    def report(self, new_rounds: int, accepted: int, policy_version: int | None = 1, **more: Any) -> httpx.Response:
        before = self.totals.get(policy_version, (0, 0))
        rounds, accepted = before[0] + new_rounds, before[1] + accepted
        self.totals[policy_version] = (rounds, accepted)
        document = {
            "run": "default",
            "reporter": self.reporter,
            "engine": "http://engine",
            "drafter_version": self.version,
            "policy_version": policy_version,
            "rounds": rounds,
            "accepted_tokens": accepted,
            "drafted_tokens": 4 * rounds,
            "emitted_tokens": rounds + accepted,
            "accepted_per_position": [1, 2, 3],
            "window_seconds": 5.0,
            "final": False,
            **more,
        }
        return self.service.client.post("/acceptance", json=document)


@pytest.fixture
def engine(service: RunningService, redis_client: Redis) -> Engine:
    return engine_of(service, redis_client)


def engine_of(service: RunningService, redis_client: Redis) -> Engine:
    """An engine that serves the latest drafter, whose replay α is 3."""
    version = service.publish().version
    store = Store(redis_client, "default")
    for number in range(3):
        served = {"tokens": 300.0, "rounds": 100.0}
        record = {"policy_version": 1, "drafter_version": version, "served": served, "created": float(number)}
        store.put_score(f"{number:032x}", score(record))
    return Engine(service, version)


def test_counts_of_a_deleted_runs_drafter_are_refused_in_the_run_that_has_its_name_now(engine: Engine) -> None:
    """The agent goes on, and does not know that the run is another one."""
    service = engine.service
    old = [engine.version, *(service.publish(content=bytes([n])).version for n in (2, 3))]
    assert engine.report(10, 20).status_code == 200
    service.client.delete("/runs/default").raise_for_status()
    service.client.put("/runs/default", content=run_file(), headers=HEADERS).raise_for_status()

    def answers() -> list[int]:
        return [Engine(service, version).report(10, 20).status_code for version in old]

    assert answers() == [422] * 3
    new = [service.publish(content=b"of the new run" + bytes([n])).version for n in range(3)]
    assert answers() == [422] * 3
    refused = Engine(service, old[1]).report(10, 20).json()
    assert (refused["type"], refused["field"]) == ("urn:draftalign:other-runs-drafter", "drafter_version")
    assert service.client.get("/alpha").json()["points"] == []
    service.registry.prune("default", keep=1)
    assert answers() == [422] * 3
    for version in (*new, "initial", "frozen", "somebody's own"):  # two of the new ones were deleted since
        assert Engine(service, version).report(10, 20).status_code == 200, version
    for method in ("mtp", "ngram", "eagle"):
        assert Engine(service, method).report(10, 20, method=method).status_code == 200


def test_counts_of_a_version_that_the_history_has_forgotten_are_booked(engine: Engine) -> None:
    service = engine.service
    gone = engine.version
    for number in (2, 3):
        service.publish(content=bytes([number]))
    service.registry.prune("default", keep=1)
    service.layout.history("default").write_text("")
    assert engine.report(10, 20).status_code == 200
    assert Engine(service, gone.replace("v000001", "v000004")).report(10, 20).status_code == 422


def test_a_name_that_only_a_persons_reason_holds_is_no_version_of_the_run(engine: Engine) -> None:
    service = engine.service
    other = "v000001-cafecafe"
    service.registry.rollback("default", engine.version, f"{other} was better in the last run")
    assert Engine(service, other).report(10, 20).status_code == 422
    assert engine.report(10, 20).status_code == 200


def test_a_live_drafter_is_left_alone(engine: Engine) -> None:
    reply = engine.report(1000, 2000)
    assert reply.status_code == 200
    assert reply.json()["dead"] is False
    assert reply.json()["engine"] == "unknown", "three batches of unknown spread say nothing about a small gap"


def test_a_drafter_that_dies_is_pushed_again_and_the_history_says_why(engine: Engine) -> None:
    engine.report(1000, 2000)
    reply = engine.report(400, 0).json()
    assert reply["dead"]
    assert reply["pushed_again"]["version"] == engine.version
    assert reply["pushed_again"]["sequence"] == 2
    assert reply["pushed_again"]["reason"].startswith("drafter dead in agent http://engine: live α 1.00")
    event = told(engine.service.registry)[-1]
    assert (event["event"], event["sequence"]) == ("pushed_again", 2)
    latest = engine.service.client.get("/drafter/latest").json()
    assert latest == reply["pushed_again"]


def test_rounds_of_a_few_requests_push_nothing_and_those_of_many_do(
    service: RunningService, redis_client: Redis
) -> None:
    """A prompt of which nothing is accepted is answered eight times; of every 20 prompts one is such."""
    version = service.publish().version
    for step in range(8):
        each = {f"{step:04x}{n:04x}": (900.0, 900.0 / (1.01 if n % 20 == step else 3.0)) for n in range(40)}
        sums = DrafterSums.of(*zip(*each.values(), strict=True))
        told = Replayed(version, sums, by_prompt=each)
        record: dict[str, Any] = {
            "served": sums,
            "replayed": (told,),
            "drafter_version": version,
            "rollouts": 320,
            "tokens": 36_000,
        }
        number = f"{step:032x}"
        Store(redis_client, "default").put_score(
            number, ScoreRecord(**record, policy_version=step, batch_id=number, entry_id=f"{step + 1}-0")
        )
    engine, rounds = Engine(service, version), 600
    few = [
        engine.report(rounds, 6, 9, finished_requests=count, running_requests=1, life="a").json() for count in range(8)
    ]
    assert [(one["engine"], one["pushed_again"]) for one in few] == [("unknown", None)] * 8
    assert few[-1]["verdict"].endswith("a hard prompt may do that")
    many = engine.report(rounds, 6, 9, finished_requests=40, running_requests=64, life="a").json()
    assert (many["engine"], many["pushed_again"]["version"]) == ("dead", version)
    silent = Engine(service, version, "agent http://other").report(8 * rounds, 48, 9, life="b").json()
    assert silent["engine"] == "dead", "where nobody says how many requests there are, rounds decide as before"


def test_nothing_is_pushed_to_an_engine_on_one_hard_prompt_where_batches_hold_one_answer_of_eight(
    service: RunningService, redis_client: Redis
) -> None:
    """How many answers a prompt has is known from what all engines emitted, and not from this one's counts."""
    version = service.publish().version
    others = [Engine(service, version, f"agent http://engine-{n}") for n in range(4)]
    for step in range(8):
        each = {f"{step:04x}{n:04x}": (113.0, 113.0 / (1.01 if n % 20 == step else 3.0)) for n in range(40)}
        sums = DrafterSums.of(*zip(*each.values(), strict=True))
        record: dict[str, Any] = {
            "served": sums,
            "replayed": (Replayed(version, sums, by_prompt=each),),
            "drafter_version": version,
            "rollouts": 40,
            "tokens": 40 * 114,
        }
        number = f"{step:032x}"
        Store(redis_client, "default").put_score(
            number, ScoreRecord(**record, policy_version=step, batch_id=number, entry_id=f"{step + 1}-0")
        )
        for other in others:  # eight answers to each of the forty prompts
            told = other.report(3013, 6027, step, finished_requests=80 * (step + 1), running_requests=1, life="a")
            assert told.json()["engine"] in ("healthy", "unknown")
    engine = Engine(service, version)
    one = [engine.report(600, 6, 9, finished_requests=n, running_requests=8 - n, life="a").json() for n in range(8)]
    assert [answer["pushed_again"] for answer in one] == [None] * 8
    many = engine.report(600, 6, 9, finished_requests=320, running_requests=64, life="a").json()
    assert (many["engine"], many["pushed_again"]["version"]) == ("dead", version)


def test_a_push_again_is_in_the_audit_log_under_the_reporters_token(
    serve: Callable[..., RunningService], redis_client: Redis, tmp_path: Path
) -> None:
    tokens = TokenFile(tmp_path / "tokens.jsonl")
    tokens.add("trainer", "write")
    tokens.add("engine-7", "report")
    service = serve(token_file=tokens.path)
    service.client.headers.update(tokens.headers("trainer"))
    assert service.register().status_code == 201
    service.client.headers.update(tokens.headers("engine-7"))
    engine = engine_of(service, redis_client)
    engine.report(1000, 2000)
    before = list(AuditLog(service.layout).read())
    assert [call["action"] for call in before] == ["register"], "counts alone are no line"
    pushed = engine.report(400, 0).json()["pushed_again"]
    (line,) = list(AuditLog(service.layout).read("default"))[1:]
    assert (line["token"], line["action"], line["status"]) == ("engine-7", "push again", 200)
    assert (line["call"], line["version"]) == ("POST /acceptance", engine.version)
    assert line["reason"].startswith("drafter dead in agent http://engine")
    assert pushed["sequence"] == 2


def test_where_the_audit_log_cannot_be_written_counts_are_taken_and_nothing_is_pushed(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(AuditLog, "append", broken)
        reply = engine.report(400, 0)
        assert (reply.status_code, reply.json()["dead"], reply.json()["pushed_again"]) == (200, True, None)
        assert [event["event"] for event in told(engine.service.registry)] == ["published"]
    assert engine.report(400, 0).json()["pushed_again"]


def test_an_engine_is_not_pushed_again_where_another_report_did_it_while_the_audit_log_was_written(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else engines that die together are pushed as often, and the pause counts each as a push that did not help."""
    write = AuditLog.append

    def slow(audit_log: AuditLog, entry: Mapping[str, Any]) -> None:
        if "status" not in entry:
            engine.service.registry.push_again("default", "another engine lost it")
        write(audit_log, entry)

    monkeypatch.setattr(AuditLog, "append", slow)
    reply = engine.report(400, 0).json()
    assert (reply["dead"], reply["pushed_again"]) == (True, None)
    assert [event["event"] for event in told(engine.service.registry)].count("pushed_again") == 1
    (line,) = list(AuditLog(engine.service.layout).read("default"))[1:]
    assert line["action"] == "push again: not done, latest has just moved"


def test_small_windows_add_up_to_a_judgement(engine: Engine) -> None:
    replies = [engine.report(60, 0, policy_version=n).json() for n in range(4)]
    assert [reply["dead"] for reply in replies] == [False, False, False, True]


def test_pushes_are_limited_in_rate(engine: Engine) -> None:
    assert engine.report(300, 0).json()["pushed_again"]
    second = engine.report(300, 0).json()
    assert second["dead"]
    assert second["pushed_again"] is None
    assert len(told(engine.service.registry)) == 2


def test_a_clock_that_was_set_back_does_not_keep_a_dead_drafter_waiting(engine: Engine) -> None:
    engine.service.registry.history.record("default", Moved(event="pushed_again", time=time.time() + 3600.0))
    assert engine.report(300, 0).json()["pushed_again"]
    assert engine.report(300, 0).json()["pushed_again"] is None, "the rate is limited from here on"


def test_after_the_pause_it_is_pushed_once_more(
    serve: Callable[..., RunningService], redis_client: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(context, "LiveRule", partial(LiveRule, push_again_seconds=0.0))
    service = serve()
    service.register()
    version = service.publish().version
    record = {"drafter_version": version, "served": {"tokens": 3.0, "rounds": 1.0}, "created": 1.0}
    Store(redis_client, "default").put_score("0" * 32, score(record))
    engine = Engine(service, version)
    assert [engine.report(300, 0).json()["pushed_again"]["sequence"] for _ in range(3)] == [2, 3, 4]


def test_the_pause_doubles_with_each_push_that_did_not_help() -> None:
    rule, dead = LiveRule(), EngineVerdict("e", "dead", "", "v1", since=1000.0)
    times: list[float] = [900.0]  # before it died: it had helped
    for now in range(1001, 20_000):
        if push_is_due(rule, dead, times, float(now)):
            times.append(float(now))
    pauses = [round(later - earlier) for earlier, later in pairwise(times[1:])]
    assert pauses[:8] == [30, 60, 120, 240, 480, 960, 1800, 1800]
    assert len(failed_pushes(dead, times)) == len(times) - 1


def test_a_drafter_that_dies_again_is_pushed_at_once_again(engine: Engine) -> None:
    """A push that helped is no reason to wait: some engines lose their drafter at each weight sync."""
    record = engine.service.registry.history.record
    for age in (300, 240, 180, 120):
        record("default", Moved(event="pushed_again", time=time.time() - age))
    engine.report(1000, 2000)
    assert engine.report(400, 0).json()["pushed_again"]


def test_an_older_version_is_not_pushed_again(engine: Engine) -> None:
    engine.service.publish(content=b"newer")
    reply = engine.report(300, 0).json()
    assert (reply["dead"], reply["pushed_again"]) == (True, None)


def test_a_drafter_that_is_bad_on_replay_too_is_not_dead(service: RunningService, redis_client: Redis) -> None:
    version = service.publish().version
    record = {"drafter_version": version, "served": {"tokens": 105.0, "rounds": 100.0}, "created": 1.0}
    Store(redis_client, "default").put_score("0" * 32, score(record))
    reply = Engine(service, version).report(1000, 0).json()
    assert reply["dead"] is False
    assert "bad, not dead" in reply["verdict"]


def test_an_engine_that_restarts_from_zero_is_still_judged(engine: Engine) -> None:
    engine.report(1000, 2000)
    engine.totals.clear()
    assert engine.report(300, 0).json()["dead"]


def test_an_engine_of_another_life_is_judged_from_scratch_and_what_comes_of_the_old_one_is_refused(
    engine: Engine,
) -> None:
    assert engine.report(1000, 2000, life="one").status_code == 200
    engine.totals.clear()
    reply = engine.report(1500, 0, life="two").json()  # by its counts alone it would have accepted 2,000 fewer
    assert (reply["engine"], "over 1,500 rounds" in reply["verdict"]) == ("dead", True)
    refused = engine.report(2000, 4000, life="one")
    assert (refused.status_code, refused.json()["type"]) == (409, "urn:draftalign:ended-life")
    rounds = engine.service.client.get("/alpha").json()["points"][0]["live_rounds"]
    assert rounds == 1000, "of the old life; those of a dead drafter say nothing of it"


def test_a_report_of_what_is_not_served_any_more_says_so_in_its_record(engine: Engine, redis_client: Redis) -> None:
    def behind() -> float | None:
        (text,) = redis_client.hvals(Keys("default").acceptance)
        record = read(AcceptanceRecord, text)
        assert record is not None
        return record.behind

    engine.report(100, 150)
    assert behind() is None
    engine.service.publish(content=b"another")
    engine.report(100, 150)
    assert behind() == 0.0
    engine.report(100, 150)
    assert 0.0 < (behind() or 0.0) < 60.0


def test_reports_replace_and_live_alpha_appears_in_the_series(engine: Engine) -> None:
    engine.report(100, 150)
    engine.report(100, 150)
    document = engine.service.client.get("/alpha").json()
    (point,) = document["points"]
    assert (point["policy_version"], point["live_rounds"], point["alpha_live"]) == (1, 200, 2.5)
    assert point["alpha_served"] == 3.0
    assert [event["event"] for event in document["events"]] == ["published"]


def test_a_canary_verdict_is_kept_once(engine: Engine) -> None:
    canary = {"version": engine.version, "previous": "v0", "outcome": "rolled_back", "sequence": 1, "alpha": 1.1}
    for _ in range(2):
        assert engine.report(10, 1, canary=canary).status_code == 200
    events = [e for e in told(engine.service.registry) if e["event"] == "canary_rolled_back"]
    assert len(events) == 1
    assert events[0]["canary"]["alpha"] == 1.1


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"rounds": -1}, "rounds"),
        ({"rounds": 1.5}, "rounds"),
        ({"rounds": "12"}, "rounds"),
        ({"rounds": True}, "rounds"),
        ({"rounds": 1 << 60}, "rounds"),
        ({"accepted_tokens": 10_000}, "body"),
        ({"rounds": 0}, "body"),
        ({"rounds": 0, "accepted_tokens": -1}, "accepted_tokens"),
        ({"rounds": 0, "accepted_tokens": 1, "drafted_tokens": 0}, "body"),
        ({"reporter": ""}, "reporter"),
        ({"reporter": "a\nb"}, "reporter"),
        ({"drafter_version": None}, "drafter_version"),
        ({"withheld": 3}, "withheld"),
        ({"withheld": "x" * 401}, "withheld"),
        ({"life": ""}, "life"),
        ({"life": 1.7e9}, "life"),
        ({"life": "a\nb"}, "life"),
        ({"life": "x" * 201}, "life"),
        ({"accepted_per_position": [-1]}, "accepted_per_position.0"),
        ({"accepted_per_position": [0] * 65}, "accepted_per_position"),
        ({"window_seconds": -1}, "window_seconds"),
        ({"by_prompt": {"0000000A": [3, 1]}}, "by_prompt.0000000A.[key]"),
        ({"by_prompt": {"0000000a": [3, -1]}}, "by_prompt.0000000a.1"),
        ({"by_prompt": {"0000000a": [3]}}, "by_prompt.0000000a.1"),
        ({"by_prompt": {f"{n:08x}": [3, 1] for n in range(65)}}, "by_prompt"),
    ],
)
def test_a_bad_report_is_refused_by_the_name_of_its_fault(engine: Engine, changes: Any, field: str) -> None:
    reply = engine.report(10, 5, **changes)
    assert (reply.status_code, reply.json()["field"]) == (422, field)
    assert engine.service.client.get("/alpha").json()["points"][0]["alpha_live"] is None


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e999"])
@pytest.mark.parametrize("name", ["rounds", "window_seconds"])
def test_a_figure_that_is_no_number_is_refused(engine: Engine, name: str, value: str) -> None:
    sound = {"run": "default", "reporter": "e", "drafter_version": engine.version, "rounds": 0, "accepted_tokens": 0}
    body = json.dumps(sound | {"drafted_tokens": 0, name: "?"}).replace('"?"', value)
    reply = engine.service.client.post("/acceptance", content=body, headers={"Content-Type": "application/json"})
    assert (reply.status_code, reply.json()["field"]) == (422, name)


def test_replay_alpha_is_of_the_newest_batches_in_whatever_order_they_were_scored(
    service: RunningService, redis_client: Redis
) -> None:
    version, store = service.publish().version, Store(redis_client, "default")
    for number in random.Random(0).sample(range(300), 300):
        served = {"tokens": 300.0 if number >= 300 - REPLAYED_BATCHES else 200.0, "rounds": 100.0}
        record = {"drafter_version": version, "served": served, "created": float(number)}
        for _ in range(2):  # a redelivered batch is scored again
            store.put_score(f"{number:032x}", score(record))
    assert "against replay α 3.00" in Engine(service, version).report(300, 0).json()["verdict"]


def test_emitted_tokens_that_no_such_rounds_can_emit_are_left_out_and_said(engine: Engine) -> None:
    """The rest of such a report counts: an engine that is not believed at all could not be called dead."""
    for policy, emitted in enumerate(((1 << 53) - 1, 300_000, 0, 10_000), 2):
        reply = engine.report(100_000, 100_000, policy, emitted_tokens=emitted)
        assert reply.status_code == 200
        assert f"emitted_tokens is left out: {emitted} of 100000 rounds" in reply.json()["warning"]
        [point] = [p for p in engine.service.client.get("/alpha").json()["points"] if p["policy_version"] == policy]
        assert point["alpha_live"] == 2.0, "rounds and accepted tokens"
    for policy, sound in ((12, None), (13, 199_000), (14, 200_050), (15, 20_000)):  # trimmed, or counted a moment later
        assert engine.report(100_000, 100_000, policy, emitted_tokens=sound).json()["warning"] is None
    assert engine.report(10, 20, 16, emitted_tokens=0).json()["warning"] is None, "too few to say"


def test_rounds_by_prompt_are_kept_for_the_comparison_and_nowhere_else(engine: Engine, redis_client: Redis) -> None:
    engine.report(600, 1200, by_prompt={"0000000a": [900, 300], "0000000b": [900, 300]})
    engine.report(600, 1200, by_prompt={"0000000a": [1500, 500], "0000000b": [900, 300], "0000000c": [1200, 400]})
    ((_, account),) = Store(redis_client, "default").accounts(0.0).values()
    assert [dict(block.by_prompt) for block in account.blocks] == [
        {"0000000a": [900, 300], "0000000b": [900, 300]},
        {"0000000a": [600, 200], "0000000c": [1200, 400]},
    ]
    assert "0000000a" not in engine.service.client.get("/alpha").text
    torn = json.loads(account.text()) | {"blocks": [["", 7], None]}  # by hand
    assert Account.read(json.dumps(torn)).blocks == ()
    assert Account.read(json.dumps(torn)).sums == account.sums


def test_a_report_of_an_unknown_run_is_a_404(engine: Engine) -> None:
    assert engine.report(10, 5, run="other").status_code == 404
    assert engine.report(10, 5, run="../x").status_code == 404


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"[" * 60_000, b'{"rounds": ' + b"9" * 5000 + b"}", b"\xff"])
def test_what_is_not_a_json_object_is_a_422(service: RunningService, body: bytes) -> None:
    reply = service.client.post("/acceptance", content=body, headers={"Content-Type": "application/json"})
    assert reply.status_code == 422


def test_a_report_has_a_size_limit(service: RunningService) -> None:
    reply = service.client.post(
        "/acceptance", content=b'{"x": "' + b"a" * 100_000 + b'"}', headers={"Content-Type": "application/json"}
    )
    assert reply.status_code == 413


# --- what acceptance is worth in time


def step_times(depths: tuple[int, ...], seconds: Callable[[int, int], float]) -> list[dict[str, Any]]:
    return [
        {"batch": float(batch), "depth": depth, "steps": 100, "seconds": 100 * seconds(batch, depth)}
        for depth in depths
        for batch in (1, 4, 16, 64)
    ]


def linear(batch: int, depth: int) -> float:
    return 0.01 + 2e-5 * batch * (depth + 1) + 5e-4 * depth


@pytest.fixture
def replayed(engine: Engine, redis_client: Redis) -> Engine:
    """The drafter was replayed by position: it keeps half of the first drafts, and half of those of each next one."""
    kept = [500.0, 250.0, 125.0, 62.5]
    sums = {"tokens": 1937.5, "rounds": 1000.0}
    record = {"version": engine.version, "sums": sums, "accepted": kept, "reached": [1000.0, *kept[:-1]]}
    more = {
        "policy_version": 1,
        "drafter_version": engine.version,
        "served": sums,
        "created": 9.0,
        "replayed": [record],
    }
    keys = Keys("default")
    redis_client.delete(keys.scores, keys.recent_scores)
    Store(redis_client, "default").put_score("f" * 32, score(more))
    return engine


def test_step_times_become_speed_up_and_best_depth(replayed: Engine) -> None:
    client = replayed.service.client
    assert client.get("/runs/default/worth").json()["unknown"] == "no engine has said how long its steps take"
    assert replayed.report(100, 90, step_times=step_times((4,), linear)).status_code == 200
    time.sleep(0.05)  # what engines say is told again after a few times what telling took
    unknown = eventually_other(lambda: client.get("/runs/default/worth").json()["unknown"], "no engine")
    assert "at depth 4 do not tell" in unknown
    assert replayed.report(10, 9, step_times=step_times((0, 2, 4), linear)).status_code == 200
    assert eventually_other(lambda: client.get("/runs/default/worth").json()["unknown"], "at depth 4 do not") is None
    found = client.get("/runs/default/worth", params={"generation_share": 0.7}).json()
    tokens = [1.0, 1.5, 1.75, 1.875, 1.9375]
    assert [row["batch"] for row in found["batches"]] == [1, 2, 4, 8, 16, 32, 64]
    for row in found["batches"]:
        truth = [tokens[k] * linear(row["batch"], 0) / linear(row["batch"], k) for k in range(5)]
        assert row["speedup"] == pytest.approx(truth[4], rel=0.02)
        assert truth[row["best_depth"]] >= 0.98 * max(truth)
        assert row["step_speedup"] == pytest.approx(1 / (0.3 + 0.7 / row["speedup"]))
    assert client.get("/alpha").json()["worth"]["batches"][0]["batch"] == 1
    assert 'draftalign_speculation_speedup_ratio{batch="64",run="default"}' in client.get("/metrics").text
    replayed.report(10, 9)  # an agent that says nothing of it
    assert client.get("/runs/default/worth").json()["unknown"] is None


@pytest.mark.parametrize("drafter_seconds", [5e-4, 5e-3])
def test_the_command_says_what_follows_for_an_engine_that_gets_its_list(
    replayed: Engine, drafter_seconds: float
) -> None:
    def slow_drafter(batch: int, depth: int) -> float:
        return 0.01 + 2e-5 * batch * (depth + 1) + drafter_seconds * depth * (1 + batch / 16)

    replayed.report(100, 90, step_times=step_times((0, 2, 4), slow_drafter)).raise_for_status()
    told = CliRunner().invoke(app, ["worth", "--service", replayed.service.url]).output
    plan = json.loads(told.partition("num_speculative_tokens_per_batch_size = ")[2].partition("\n")[0])
    none = [f"{first} to {last}" for first, last, depth in plan if depth == 0]
    assert len(none) == (drafter_seconds > 1e-3), plan
    for place in none:
        assert f"Depth 0 is no speculation: at {place} sequences a step no round is counted" in told
    assert ("has the verdict `depth`, with an alert, while its rounds have other than 4 tokens" in told) == any(
        depth not in (0, 4) for *_, depth in plan
    )


def eventually_other(ask: Callable[[], Any], what: str) -> Any:
    """Ask until the answer is another than what contains `what`."""
    deadline = time.monotonic() + 60
    while what in str(answer := ask()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return answer


@pytest.mark.parametrize(
    "bad",
    [
        {"batch": 0.0},
        {"batch": -1.0},
        {"batch": 1e300},
        {"batch": 1e-300, "steps": 9_000_000_000_000_000, "seconds": 1e-300},
        {"steps": 10**15, "seconds": 1e-300},
        {"seconds": 1e9},
        {"depth": -1},
        {"depth": 1000},
        {"steps": -1},
        {"steps": 2.5},
        {"seconds": -1.0},
        {"seconds": "x"},
        {"seconds": None},
    ],
)
def test_step_times_that_cannot_be_are_refused_and_change_nothing(replayed: Engine, bad: dict[str, Any]) -> None:
    one = {"batch": 4.0, "depth": 3, "steps": 10, "seconds": 1.0} | bad
    assert replayed.report(100, 90, step_times=[one]).status_code == 422
    assert replayed.report(100, 90, step_times=[one | {"batch": 2.0}] * 65).status_code == 422
    assert replayed.service.client.get("/runs/default/worth").json()["unknown"].startswith("no engine")


def test_a_batch_size_without_a_step_does_not_cost_the_engines_other_step_times(replayed: Engine) -> None:
    nothing = {"batch": 3.0, "depth": 2, "steps": 0, "seconds": 0.0}
    assert replayed.report(100, 90, step_times=[nothing, *step_times((0, 2, 4), linear)]).status_code == 200
    assert replayed.service.client.get("/runs/default/worth").json()["unknown"] is None


def test_generation_takes_no_more_than_the_whole_step(replayed: Engine) -> None:
    for share in ("0", "1.1", "nan", "x"):
        assert replayed.service.client.get("/runs/default/worth", params={"generation_share": share}).status_code == 422
    assert replayed.service.client.get("/runs/none/worth").status_code == 404
