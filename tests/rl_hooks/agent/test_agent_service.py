"""The swap agent against the real API: what each says is what the other understands."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.engine.agent_fixtures import Engine, drafter_bytes, drafter_config, eventually, settle, start_agent
from helpers.service.service_fixtures import RunningService

from rl_hooks import wire
from rl_hooks.agent.canary import CanaryRule


@pytest.fixture
def service(running_service: RunningService) -> RunningService:
    return running_service


def _publish(service: RunningService, seed: int) -> str:
    return service.publish(content=drafter_bytes(seed), config=json.dumps(drafter_config())).version


def test_a_drafter_goes_out_and_its_acceptance_comes_back(
    service: RunningService, engine: Engine, tmp_path: Path
) -> None:
    engine.policy_version = 5
    with start_agent(service.url, engine, cache=tmp_path / "cache"):
        version = _publish(service, 1)
        eventually(lambda: engine.version == version)
        settle(engine)
        engine.play(100, 2, requests=3)

        def live() -> list[dict[str, Any]]:
            points = service.client.get("/alpha").json()["points"]
            return [point for point in points if point["alpha_live"] is not None]

        (point,) = eventually(live)
    assert point["policy_version"] == 5
    assert point["live_rounds"] == 100
    assert point["alpha_live"] == pytest.approx(3.0)


def test_the_service_supposes_what_the_engine_drafts(service: RunningService, engine: Engine, tmp_path: Path) -> None:
    engine.depth = 7
    with start_agent(service.url, engine, cache=tmp_path / "cache"):
        version = _publish(service, 1)
        eventually(lambda: engine.version == version)
        settle(engine)
        engine.play(100, 2, requests=3)
        eventually(lambda: service.client.get("/runs/default").json()["depth"] == 7)


def test_an_engine_that_drafts_otherwise_than_a_setting_says_is_named_once(
    serve: Callable[..., RunningService], engine: Engine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    service = serve(depth=4)
    service.register()
    engine.depth = 7
    with start_agent(service.url, engine, cache=tmp_path / "cache"):
        version = _publish(service, 1)
        eventually(lambda: engine.version == version)
        for _ in range(2):
            settle(engine)
            engine.play(100, 2, requests=3)
        eventually(lambda: "DRAFTALIGN_DEPTH=7" in caplog.text)
        settle(engine)
        engine.play(100, 2, requests=3)
        settle(engine)
    assert caplog.text.count("DRAFTALIGN_DEPTH=7") == 1
    assert engine.url in next(r.getMessage() for r in caplog.records if "DRAFTALIGN_DEPTH=7" in r.getMessage())


def test_an_agent_says_once_that_the_service_speaks_another_contract_and_goes_on(
    service: RunningService,
    engine: Engine,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(wire, "API_VERSION", 2)
    with start_agent(service.url, engine, cache=tmp_path / "cache"):
        for seed in (1, 2):
            version = _publish(service, seed)
            eventually(lambda version=version: engine.version == version)  # type: ignore[misc]
        monkeypatch.undo()
        version = _publish(service, 3)
        eventually(lambda: engine.version == version)
        monkeypatch.setattr(wire, "API_VERSION", 2)
        version = _publish(service, 4)
        eventually(lambda: engine.version == version)
    said = "expected Draftalign-Api: 2, got '1'; use the agent of the service's version. It goes on"
    assert caplog.text.count(said) == 1


def test_an_agent_without_a_drafter_says_once_what_it_waits_for(
    serve: Callable[..., RunningService], engine: Engine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    service = serve()
    caplog.set_level(logging.INFO, "draftalign.agent")
    with start_agent(service.url, engine, cache=tmp_path / "cache", run="mth"):
        said = eventually(lambda: [r.getMessage() for r in caplog.records if "nothing to load yet" in r.getMessage()])
        service.register("mth")
        eventually(lambda: "run 'mth' has published no drafter yet" in caplog.text)
        settle(engine, 4)
    assert said == [
        f"service {service.url}: nothing to load yet, it is asked again: "
        "run 'mth' is not registered; a trainer's hook or an engine registers it"
    ]
    assert caplog.text.count("nothing to load yet") == 2


def test_an_agent_whose_run_is_misspelt_warns_and_names_the_runs_that_there_are(
    service: RunningService, engine: Engine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    service.register("default")
    service.register("trl")
    with (
        caplog.at_level(logging.WARNING, "draftalign.agent"),
        start_agent(service.url, engine, cache=tmp_path / "cache", run="defalt"),
    ):
        eventually(lambda: "run 'defalt' is not registered" in caplog.text)
        settle(engine, 4)
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.endswith("This service has: default, trl. Is the run's name (--run, DRAFTALIGN_RUN) misspelt?")


def test_a_connection_is_not_reused_when_the_engine_may_be_closing_it(
    service: RunningService, engine: Engine, tmp_path: Path
) -> None:
    # An engine closes what was idle for 5 s. Asked every 2.5 s here, each tick has to come on a connection of its own.
    with start_agent(service.url, engine, cache=tmp_path / "cache", report_seconds=2.5):
        eventually(lambda: len(engine.clients) > 1)
        first = set(engine.clients)
        assert len(first) == 1, "one tick, one connection"
        asked = len(engine.clients)
        eventually(lambda: len(engine.clients) > asked)
    assert engine.clients[asked] not in first


def test_rollback_and_push_again_reach_the_engine(service: RunningService, engine: Engine, tmp_path: Path) -> None:
    first = _publish(service, 1)
    with start_agent(service.url, engine, cache=tmp_path / "cache"):
        eventually(lambda: engine.version == first)
        second = _publish(service, 2)
        eventually(lambda: engine.version == second)
        answer = service.client.post(f"/drafter/{first}/rollback?run=default", json={"reason": "second looks odd"})
        assert answer.status_code == 200
        eventually(lambda: engine.version == first)
        settle(engine)
        service.registry.push_again("default", "a test")
        eventually(lambda: engine.swapped == [first, second, first, first])


def test_a_canarys_verdict_is_kept_in_the_history_and_said(
    service: RunningService, engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("service.monitor.headline._UNSWAPPED_SECONDS", 0.0)
    first = _publish(service, 1)
    with start_agent(service.url, engine, cache=tmp_path / "cache", canary=CanaryRule(rounds=200)):
        eventually(lambda: engine.version == first)
        settle(engine)
        engine.play(300, 3)
        settle(engine)
        second = _publish(service, 2)
        eventually(lambda: engine.version == second)
        settle(engine)
        engine.play(200, 1)
        eventually(lambda: engine.version == first)

        def verdicts() -> list[dict[str, Any]]:
            history = service.client.get("/drafters").json()["history"]
            return [event for event in history if event["event"] == "canary_rolled_back"]

        (event,) = eventually(verdicts)
        settle(engine, 6)
        assert engine.version == first
        why = f"its canary swapped {second} back: α 2.00 over 200 rounds, 4.00 with {first}"
        eventually(lambda: why in _unswapped(service, engine, 3))
    assert event["version"] == second
    assert event["canary"]["previous"] == first


def _unswapped(service: RunningService, engine: Engine, accepted: int = 2) -> str:
    """What the headline says of an engine that goes on with what is not served any more; nothing, where it does not."""
    engine.play(10, accepted)
    said = service.client.get("/runs/default").json()["headline"]
    return next((text for text in (said["text"], *said["also"]) if text.startswith("Not swapped")), "")


def test_the_headline_says_why_an_engine_does_not_have_what_is_published(
    service: RunningService, engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("service.monitor.headline._UNSWAPPED_SECONDS", 0.0)
    first = _publish(service, 1)
    with start_agent(service.url, engine, cache=tmp_path / "cache"):
        eventually(lambda: engine.version == first)
        engine.refusal = (422, "it lacks down_proj")
        _publish(service, 2)
        eventually(lambda: "it lacks down_proj" in _unswapped(service, engine))
        assert engine.version == first
    with start_agent(service.url, engine, cache=tmp_path / "cache"):  # another agent tries again
        engine.refusal = None
        third = _publish(service, 3)
        eventually(lambda: engine.version == third)
        eventually(lambda: not _unswapped(service, engine))


def test_an_engine_whose_refusal_is_no_text_is_named_all_the_same(
    service: RunningService, engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its answers have half a surrogate pair, controls and markup, and are long; its counts must arrive."""
    monkeypatch.setattr("service.monitor.headline._UNSWAPPED_SECONDS", 0.0)
    engine.told = {"drafting": "\ud800"}
    first = _publish(service, 1)
    with start_agent(service.url, engine, cache=tmp_path / "cache"):
        eventually(lambda: engine.version == first)
        engine.refusal = (422, "\ud800\x00\x1b[2J<script>{{ . }}" + "x" * 5000)
        _publish(service, 2)
        eventually(lambda: "<script>" in (said := _unswapped(service, engine)) and len(said) < 600)


def test_a_token_that_may_read_and_report_is_all_an_agent_needs(
    serve: Callable[..., RunningService], engine: Engine, tmp_path: Path
) -> None:
    service = serve(tokens="r:read,report;a:admin")
    service.client.headers["Authorization"] = "Bearer a"
    assert service.register().status_code == 201
    version = _publish(service, 1)
    with start_agent(service.url, engine, cache=tmp_path / "cache", token=" r\n"):  # as files and secrets have it
        eventually(lambda: engine.version == version)
        settle(engine)
        engine.play(10, 2)
        eventually(
            lambda: any(p["alpha_live"] for p in service.client.get("/alpha").json()["points"]) or _live(service)
        )


def test_an_agent_without_a_token_says_which_variable_to_set(
    serve: Callable[..., RunningService], engine: Engine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    service = serve(tokens="r:read,report")
    with start_agent(service.url, engine, cache=tmp_path / "cache"):
        eventually(lambda: "answered 401: no token came; " in caplog.text)
    assert " (set DRAFTALIGN_TOKEN)" in caplog.text
    assert "{" not in caplog.text, "a sentence, and no JSON"


def test_an_agent_whose_token_may_only_read_swaps_and_says_which_scope_it_lacks(
    serve: Callable[..., RunningService], engine: Engine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    service = serve(tokens="r:read;a:admin")
    service.client.headers["Authorization"] = "Bearer a"
    service.register()
    version = _publish(service, 1)
    with start_agent(service.url, engine, cache=tmp_path / "cache", token="r"):
        eventually(lambda: engine.version == version)
        settle(engine)
        engine.play(10, 2)
        eventually(lambda: "needs scope report or write" in caplog.text)
        second = _publish(service, 2)
        eventually(lambda: engine.version == second)
    assert not _live(service)


def _live(service: RunningService) -> bool:
    return "draftalign_live_rounds_total" in service.client.get("/metrics").text


def test_an_unknown_run_is_waited_for(serve: Callable[..., RunningService], engine: Engine, tmp_path: Path) -> None:
    service = serve()
    with start_agent(service.url, engine, cache=tmp_path / "cache"):
        settle(engine)
        service.register()
        version = _publish(service, 1)
        eventually(lambda: engine.version == version)


def test_a_large_drafter_arrives_whole(service: RunningService, engine: Engine, tmp_path: Path) -> None:
    data = drafter_bytes(1, hidden=256)
    version = service.publish(content=data, config=json.dumps(drafter_config(256))).version
    with start_agent(service.url, engine, cache=tmp_path / "cache"):
        eventually(lambda: engine.version == version)
    assert len(data) > 3 << 20
    assert (tmp_path / "cache" / "default" / version / "model.safetensors").read_bytes() == data
