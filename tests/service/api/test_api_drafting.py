"""How a run's engines draft is taken from their reports, unless a setting says it."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from typing import Any

import pytest
from helpers.service.service_fixtures import RunningService
from hypothesis import given, settings
from hypothesis import strategies as st

from service.api import acceptance
from service.api.context import evidence
from service.monitor.records import AcceptanceRecord
from service.settings import Settings
from service.storage.layout import Layout
from service.storage.reports import drafting
from service.storage.reports.drafting import Drafting, settings_of
from service.storage.runs import change_state

DEFAULT = (4, "probabilistic")


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is supposed may change again at once, and engines that differ are asked again at once."""
    monkeypatch.setattr(drafting, "CHANGE_SECONDS", 0.0)
    monkeypatch.setattr(evidence, "_ASK_AGAIN_SECONDS", 0.0)


def counts(service: RunningService, engine: str = "one", rounds: int = 10, **said: Any) -> dict[str, Any]:
    """A report that says this."""
    return {
        "reporter": f"agent http://{engine}",
        "drafter_version": service.registry.versions("default")[-1],
        "policy_version": 1,
        "rounds": rounds,
        "accepted_tokens": 5,
        "drafted_tokens": 4 * rounds,
        **said,
    }


def report(service: RunningService, engine: str = "one", rounds: int = 10, **said: Any) -> str | None:
    """What the service warns of after such a report."""
    answer = service.client.post("/acceptance", json=counts(service, engine, rounds, **said))
    assert answer.status_code == 200, answer.text
    warning: str | None = answer.json()["warning"]
    return warning


def supposed(service: RunningService) -> tuple[int, str]:
    found = service.client.get("/runs/default").json()
    assert service.client.get("/alpha").json()["depth"] == found["depth"]
    return found["depth"], found["drafting"]


def served(serve: Callable[..., RunningService], **settings: Any) -> RunningService:
    started = serve(**settings)
    started.register()
    started.publish()
    return started


@pytest.mark.parametrize(
    ("said", "then"),
    [
        ({}, DEFAULT),
        ({"depth": 4, "drafting": "probabilistic"}, DEFAULT),
        ({"depth": 3, "drafting": "greedy"}, (3, "greedy")),
        ({"depth": 16}, (16, "probabilistic")),
        ({"drafting": "greedy"}, (4, "greedy")),
        ({"depth": 99, "drafting": "x" * 500}, DEFAULT),
        ({"depth": -1, "drafting": "greedy"}, (4, "greedy")),
        ({"depth": 0, "drafting": "sideways"}, DEFAULT),
        ({"depth": 3, "drafting": "greedy", "method": "ngram"}, DEFAULT),
    ],
)
def test_what_the_first_engine_says_is_supposed(
    serve: Callable[..., RunningService], said: dict[str, Any], then: tuple[int, str]
) -> None:
    service = served(serve)
    assert supposed(service) == DEFAULT
    assert report(service, **said) is None
    assert supposed(service) == then
    assert report(service, **said) is None


@pytest.mark.parametrize(
    ("said", "warned"),
    [
        (
            {"depth": 3},
            "3 tokens a round where the service replays and trains 4; start the service with DRAFTALIGN_DEPTH=3",
        ),
        ({"drafting": "greedy"}, "greedy drafts where the service assumes probabilistic ones; start"),
        ({"depth": 3, "drafting": "greedy"}, "DRAFTALIGN_DEPTH=3 DRAFTALIGN_DRAFTING=greedy"),
    ],
)
def test_a_setting_that_was_given_holds_and_an_engine_that_drafts_otherwise_is_told(
    serve: Callable[..., RunningService], said: dict[str, Any], warned: str
) -> None:
    service = served(serve, depth=4, drafting="probabilistic")
    assert warned in (report(service, **said) or "")
    assert supposed(service) == DEFAULT
    assert report(service, depth=3, drafting="greedy", method="ngram") is None


def test_counts_of_trees_are_compared_with_nothing_and_the_answer_says_why(
    serve: Callable[..., RunningService],
) -> None:
    service, said = served(serve), "it drafts trees, and replay knows chains alone"
    for how, named in (("trees", True), ("greedy", False)):
        answer = service.client.post("/acceptance", json=counts(service, drafting=how)).json()
        assert (said in answer["verdict"], said in (answer["warning"] or "")) == (named, named)
    assert supposed(service)[1] == "greedy"


def test_what_no_setting_says_is_learnt_beside_one_that_does(serve: Callable[..., RunningService]) -> None:
    service = served(serve, depth=4)
    warning = report(service, depth=3, drafting="greedy")
    assert warning == (
        "the engine makes 3 tokens a round where the service replays and trains 4; "
        "start the service with DRAFTALIGN_DEPTH=3"
    )
    assert supposed(service) == (4, "greedy")


def test_engines_that_differ_change_nothing_until_all_say_the_same(
    serve: Callable[..., RunningService], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drafting, "CHANGE_SECONDS", 0.0)
    service = served(serve)
    report(service, "one", depth=3)
    report(service, "two", depth=3)
    warning = report(service, "two", depth=5)
    assert warning == (
        "the engine makes 5 tokens a round where the service replays and trains 3; let all engines of a run draft alike"
    )
    report(service, "one", depth=5)  # at once after it was found that they differ: it is asked again later
    assert supposed(service) == (3, "probabilistic")
    monkeypatch.setattr(evidence, "_ASK_AGAIN_SECONDS", 0.0)
    assert report(service, "one", depth=5) is None
    assert supposed(service) == (5, "probabilistic")


@pytest.mark.usefixtures("at_once")
def test_an_engine_that_fell_silent_is_not_waited_for(
    serve: Callable[..., RunningService], monkeypatch: pytest.MonkeyPatch
) -> None:
    service = served(serve)
    report(service, "gone", depth=3)
    assert report(service, "here", depth=6) is not None
    now = time.time()
    monkeypatch.setattr(evidence, "ENGINE_SILENT_SECONDS", 0.2)
    while time.time() < now + 0.3:
        time.sleep(0.05)
    assert report(service, "here", depth=6) is None
    assert supposed(service) == (6, "probabilistic")


def test_it_is_each_runs_own_and_goes_with_the_run(serve: Callable[..., RunningService]) -> None:
    service = served(serve)
    service.register("other")
    report(service, depth=3)
    other = service.client.get("/runs/other").json()
    assert (other["depth"], other["drafting"]) == DEFAULT
    change_state(service.layout, "default", "archived", "over")
    assert service.client.delete("/runs/default").status_code in (204, 202)
    while service.client.delete("/runs/default").status_code == 202:
        time.sleep(0.1)
    service.register()
    assert supposed(service) == DEFAULT


def test_two_engines_under_one_name_do_not_have_the_run_opened_again_and_again(
    serve: Callable[..., RunningService], monkeypatch: pytest.MonkeyPatch
) -> None:
    service = served(serve)
    written: list[Drafting] = []

    def learn(layout: Layout, run: str, found: Drafting) -> None:
        written.append(found)
        drafting.learn_drafting(layout, run, found)

    monkeypatch.setattr(acceptance, "learn_drafting", learn)
    for n in range(40):
        report(service, depth=3 + n % 2)
    assert [one.depth for one in written] == [3]
    assert supposed(service) == (3, "probabilistic")
    old = time.time() - 601.0
    os.utime(service.layout.run_drafting("default"), (old, old))
    assert report(service, depth=5) is None
    assert supposed(service) == (5, "probabilistic")


def test_a_report_is_taken_where_what_it_says_cannot_be_written(
    serve: Callable[..., RunningService], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    service = served(serve)

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(drafting, "replace_file", full)
        assert report(service, depth=3) is None
    assert "how its engines draft cannot be written: [Errno 28]" in caplog.text
    assert supposed(service) == DEFAULT
    assert report(service, depth=3) is None
    assert supposed(service) == (3, "probabilistic")


@pytest.mark.usefixtures("at_once")
def test_a_damaged_file_is_as_none(serve: Callable[..., RunningService]) -> None:
    service = served(serve)
    report(service, depth=3)
    for text in ("", "{", '{"depth": 99, "drafting": "greedy"}', "[]", "\x00"):
        service.layout.run_drafting("default").write_text(text)
        assert supposed(service) == DEFAULT
    assert report(service, depth=3) is None
    assert supposed(service) == (3, "probabilistic")


@settings(deadline=None)
@given(depth=st.one_of(st.none(), st.integers()), drafting=st.one_of(st.none(), st.text(), st.just("greedy")))
def test_only_what_an_engine_can_do_is_taken(depth: int | None, drafting: str | None) -> None:
    found = Drafting.supposed(Settings()).with_reported(depth, drafting)
    assert found.depth == (depth if depth is not None and 1 <= depth <= 16 else 4)
    assert found.drafting == (drafting if drafting in ("greedy", "probabilistic") else "probabilistic")


def test_the_newest_report_of_each_engine_counts() -> None:
    def said(depth: int | None, at: float, reporter: str = "a", method: str = "drafter") -> AcceptanceRecord:
        return AcceptanceRecord(reporter=reporter, method=method, depth=depth, created=at)

    three = Drafting(depth=3, drafting="greedy")
    assert three.agrees_with([])
    assert three.agrees_with([said(5, 1.0), said(3, 2.0)])
    assert not three.agrees_with([said(3, 1.0), said(5, 2.0)])
    assert not three.agrees_with([said(3, 1.0), said(5, 1.0, "b")])
    assert three.agrees_with([said(3, 1.0), said(5, 1.0, "b", "ngram"), said(None, 1.0, "c")])


def test_settings_that_were_given_stay(serve: Callable[..., RunningService]) -> None:
    service = served(serve)
    report(service, depth=3, drafting="greedy")
    for given_, found in (
        ({}, (3, "greedy")),
        ({"depth": 4}, (4, "greedy")),
        ({"drafting": "probabilistic"}, (3, "probabilistic")),
        ({"depth": 4, "drafting": "probabilistic"}, DEFAULT),
    ):
        settings = settings_of(Settings(**given_), service.layout, "default")
        assert (settings.depth, settings.drafting) == found
