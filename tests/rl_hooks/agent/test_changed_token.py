"""A token that is changed, in the service's file and in the clients', while a trainer sends and an agent follows."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.engine.agent_fixtures import Engine, Service, drafter_bytes, drafter_config, eventually, start_agent
from helpers.service.access_fixtures import TokenFile
from helpers.service.service_fixtures import RunningService, rollout_file

from rl_hooks.sending.sender import RolloutSender


def test_a_token_that_is_taken_back_and_changed_in_a_file_costs_no_rollouts_and_no_drafter(
    serve: Callable[..., RunningService], engine: Engine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokens, told = TokenFile(tmp_path / "tokens.jsonl"), tmp_path / "token"
    for name in ("first", "second"):
        tokens.add(name, "admin")
    service = serve(token_file=tokens.path)
    service.client.headers["Authorization"] = f"Bearer {tokens.secrets['first']}"
    service.register()
    told.write_text(tokens.secrets["first"] + "\n")
    sender = RolloutSender(service.url, token=f"@{told}")
    with (
        caplog.at_level(logging.WARNING, "rl_hooks"),
        start_agent(service.url, engine, cache=tmp_path / "cache", token=f"@{told}") as agent,
    ):
        sender.submit([rollout_file(("a",), policy_version=0)])
        assert sender.flush(60)
        tokens.remove("first")
        for version in (1, 2):
            sender.submit([rollout_file((f"b{version}",), policy_version=version)])
        eventually(lambda: "401" in sender.stats()["last_error"])
        eventually(lambda: agent.metrics.errors.labels("service", "ManifestError")._value.get() > 0)
        served = service.publish(content=drafter_bytes(1), config=json.dumps(drafter_config())).version
        told.unlink()
        eventually(lambda: f"file {told} that DRAFTALIGN_TOKEN names cannot be used" in sender.stats()["last_error"])
        told.write_text(tokens.secrets["second"])
        assert sender.flush(60)
        eventually(lambda: engine.version == served)
    stats = sender.stats()
    assert (stats["sent"], stats["dropped_error"]) == (3, 0)
    assert caplog.text.count("was answered 401: this token is not known") == 1
    assert not any(secret in caplog.text for secret in tokens.secrets.values())
    sender.close(1.0)


def test_an_agent_whose_token_is_gone_waits_and_ends_when_it_is_told_to(
    service: Service, engine: Engine, tmp_path: Path
) -> None:
    told = tmp_path / "token"
    with start_agent(service.url, engine, cache=tmp_path / "cache", token=f"@{told}") as agent:

        def failed(peer: str) -> float:
            return float(agent.metrics.errors.labels(peer, "AgentError")._value.get())

        service.publish(1)
        eventually(lambda: failed("service"))
        told.write_text("s3cret")
        eventually(lambda: engine.version and service.reports)
        told.unlink()
        before = failed("report")
        engine.play(10, 2)
        eventually(lambda: failed("report") > before)  # so there is a report to make at the end, too
