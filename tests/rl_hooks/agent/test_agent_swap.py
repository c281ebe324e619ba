"""The swap agent against real HTTP servers: what it brings to the engines, and what it never does."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from helpers.engine.agent_fixtures import (
    Engine,
    Service,
    drafter_bytes,
    drafter_config,
    eventually,
    read_metrics,
    running_agent,
    settle,
)
from prometheus_client import generate_latest

from rl_hooks.agent.agent import AgentConfig, SwapAgent, pause_seconds
from rl_hooks.agent.download import strip_shared
from rl_hooks.agent.follower import EngineFollower
from rl_hooks.errors import AgentError, DownloadError, EngineError
from rl_hooks.format.release import Release
from rl_hooks.wire import MappedFile


def exposed(agent: SwapAgent) -> str:
    return generate_latest(agent.metrics.registry).decode()


def test_a_published_drafter_reaches_every_engine(service: Service, engine: Engine, tmp_path: Path) -> None:
    second = Engine()
    try:
        version = service.publish(1)
        with running_agent(service, engine, second, cache=tmp_path):
            eventually(lambda: engine.version == version and second.version == version)
            newer = service.publish(2)
            eventually(lambda: engine.version == newer and second.version == newer)
        assert engine.swapped == second.swapped == [version, newer]
    finally:
        second.down()


def test_the_same_offer_is_swapped_in_once(service: Service, engine: Engine, tmp_path: Path) -> None:
    version = service.publish(1)
    with running_agent(service, engine, cache=tmp_path):
        eventually(lambda: engine.version == version)
        settle(engine, 10)
    with running_agent(service, engine, cache=tmp_path):  # nor by an agent that is started again
        settle(engine, 5)
    assert engine.swapped == [version]


def test_an_engine_that_has_the_version_already_is_left_alone(service: Service, engine: Engine, tmp_path: Path) -> None:
    engine.version = service.publish(1)
    with running_agent(service, engine, cache=tmp_path):
        settle(engine, 5)
    assert engine.swapped == []


def test_a_version_pushed_again_is_swapped_again(service: Service, engine: Engine, tmp_path: Path) -> None:
    version = service.publish(1)
    with running_agent(service, engine, cache=tmp_path):
        eventually(lambda: engine.version == version)
        service.push_again()
        eventually(lambda: engine.swapped == [version, version])
        settle(engine, 5)
    assert engine.swapped == [version, version]


def test_a_push_while_the_agent_was_away_is_not_missed(service: Service, engine: Engine, tmp_path: Path) -> None:
    version = service.publish(1)
    with running_agent(service, engine, cache=tmp_path):
        eventually(lambda: engine.version == version)
        settle(engine)
    service.push_again()
    with running_agent(service, engine, cache=tmp_path):
        eventually(lambda: engine.swapped == [version, version])


def test_an_engine_that_restarts_gets_its_drafter_back(service: Service, engine: Engine, tmp_path: Path) -> None:
    version = service.publish(1)
    with running_agent(service, engine, cache=tmp_path):
        eventually(lambda: engine.version == version)
        settle(engine)
        engine.restart()
        eventually(lambda: engine.version == version and engine.swaps == 1)
        settle(engine)
        engine.restart(version="initial")
        eventually(lambda: engine.version == version)
        settle(engine)
        engine.restart(version=version)  # says the right name, but its swap counter went back
        eventually(lambda: engine.swaps == 1)
    assert engine.swapped == [version] * 4


def test_the_service_may_be_down_when_an_engine_restarts(service: Service, engine: Engine, tmp_path: Path) -> None:
    version = service.publish(1)
    with running_agent(service, engine, cache=tmp_path):
        eventually(lambda: engine.version == version)
        service.down()
        engine.restart()
        eventually(lambda: engine.version == version)
        service.up()
        newer = service.publish(2)
        eventually(lambda: engine.version == newer)


def test_agent_starts_before_service_and_engine(service: Service, engine: Engine, tmp_path: Path) -> None:
    service.down()
    engine.down()
    with running_agent(service, engine, cache=tmp_path) as agent:
        eventually(lambda: exposed(agent).count('kind="EngineError"') and 'kind="ConnectError"' in exposed(agent))
        service.up()
        version = service.publish(1)
        engine.up()
        eventually(lambda: engine.version == version)


def test_a_truncated_download_is_resumed_where_it_broke(service: Service, engine: Engine, tmp_path: Path) -> None:
    service.cut_after = 100
    version = service.publish(1)
    with running_agent(service, engine, cache=tmp_path):
        eventually(lambda: engine.version == version)
    assert service.ranges[:2] == [None, "bytes=100-"]
    assert (tmp_path / "default" / version / "model.safetensors").read_bytes() == drafter_bytes(1)


def test_a_download_survives_a_restart_of_the_agent(service: Service, engine: Engine, tmp_path: Path) -> None:
    data = drafter_bytes(1)
    version = service.publish(1)
    part = tmp_path / "default" / f"{version}.part" / "model.safetensors.part"
    part.parent.mkdir(parents=True)
    part.write_bytes(data[:100])
    with running_agent(service, engine, cache=tmp_path):
        eventually(lambda: engine.version == version)
    assert service.ranges[1] == "bytes=100-"


def test_a_rotten_leftover_is_downloaded_from_the_start(service: Service, engine: Engine, tmp_path: Path) -> None:
    version = service.publish(1)
    part = tmp_path / "default" / f"{version}.part" / "model.safetensors.part"
    part.parent.mkdir(parents=True)
    part.write_bytes(b"x" * 100)
    with running_agent(service, engine, cache=tmp_path):
        eventually(lambda: engine.version == version)
    assert service.ranges[1:3] == ["bytes=100-", None]


@pytest.mark.parametrize("change", [lambda d: d[:-1] + bytes([d[-1] ^ 1]), lambda d: d + b"x", lambda d: d[:-1]])
def test_bytes_that_differ_from_the_manifest_are_never_swapped_in(
    service: Service, engine: Engine, tmp_path: Path, change: Callable[[bytes], bytes]
) -> None:
    good = service.publish(1)
    with running_agent(service, engine, cache=tmp_path) as agent:
        eventually(lambda: engine.version == good)
        data = drafter_bytes(2)
        with service.lock:  # published and spoilt in one go
            bad = service.publish(2, files={"model.safetensors": data})
            service.files[bad, "model.safetensors"] = change(data)
        eventually(lambda: 'kind="D' in exposed(agent))
        settle(engine)
        assert engine.swapped == [good]
        assert not (tmp_path / "default" / bad).exists()
        service.files[bad, "model.safetensors"] = data  # the service recovers
        eventually(lambda: engine.version == bad)


def test_a_cached_version_that_rotted_is_downloaded_again(service: Service, engine: Engine, tmp_path: Path) -> None:
    version = service.publish(1)
    with running_agent(service, engine, cache=tmp_path):
        eventually(lambda: engine.version == version)
    model = tmp_path / "default" / version / "model.safetensors"
    model.write_bytes(model.read_bytes()[:-1] + b"?")
    engine.restart()
    with running_agent(service, engine, cache=tmp_path):
        eventually(lambda: engine.version == version)
    assert model.read_bytes() == drafter_bytes(1)


def test_a_poisoned_embedding_is_stripped_before_the_engine_sees_it(
    service: Service, engine: Engine, tmp_path: Path
) -> None:
    version = service.publish(1, files={"model.safetensors": drafter_bytes(1, poisoned=True)})
    with running_agent(service, engine, cache=tmp_path):
        eventually(lambda: engine.version == version)
    assert not any("embed_tokens" in name for name in engine.tensors[version])
    clean, found = tmp_path / "clean", MappedFile(tmp_path / "default" / version / "model.safetensors")
    clean.write_bytes(drafter_bytes(1))
    expected = MappedFile(clean)
    assert found.header.tensors.keys() == expected.header.tensors.keys()
    assert all((found.array(name) == expected.array(name)).all() for name in expected.header.tensors)


def test_a_clean_checkpoint_is_not_rewritten(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(drafter_bytes(1))
    before = path.stat()
    assert strip_shared(path) == []
    assert path.stat().st_ino == before.st_ino
    path.write_bytes(drafter_bytes(1, poisoned=True))
    assert strip_shared(path) == ["embed_tokens.weight"]


@pytest.mark.parametrize("data", [drafter_bytes(1, without="midlayer.mlp.down_proj.weight"), b"not safetensors at all"])
def test_an_incomplete_checkpoint_never_reaches_an_engine(
    service: Service, engine: Engine, tmp_path: Path, data: bytes
) -> None:
    service.publish(1, files={"model.safetensors": data})
    with running_agent(service, engine, cache=tmp_path) as agent:
        eventually(lambda: 'kind="InvalidDrafterError"' in exposed(agent))
        settle(engine)
    assert engine.swapped == []


def test_path_traversal_leaves_nothing_on_the_disk(service: Service, engine: Engine, tmp_path: Path) -> None:
    evil = {"model.safetensors": drafter_bytes(1), "../../evil": b"evil"}
    service.publish(1, files=evil)
    with running_agent(service, engine, cache=tmp_path / "cache") as agent:
        eventually(lambda: 'kind="ManifestError"' in exposed(agent))
        settle(engine)
    assert engine.swapped == []
    assert service.ranges == []
    assert not list(tmp_path.rglob("evil"))


def test_a_drafter_of_another_configuration_is_refused_for_that_engine(
    service: Service, engine: Engine, tmp_path: Path
) -> None:
    good = service.publish(1)
    with running_agent(service, engine, cache=tmp_path) as agent:
        eventually(lambda: engine.version == good)
        service.publish(2, config_fingerprint="another")
        eventually(lambda: 'outcome="refused"} 1.0' in exposed(agent))
        service.publish(3, d2t_sha256="another vocabulary")
        eventually(lambda: 'outcome="refused"} 2.0' in exposed(agent))
        assert engine.swapped == [good]
        newer = service.publish(4)
        eventually(lambda: engine.version == newer)
        other = service.publish(5, config_fingerprint="another")
        eventually(lambda: 'outcome="refused"} 3.0' in exposed(agent))
        engine.restart()  # a new process may have been started with the new configuration
        eventually(lambda: engine.version == other)


def test_what_the_engine_says_about_its_configuration_counts_from_the_first_swap(
    service: Service, engine: Engine, tmp_path: Path
) -> None:
    engine.fingerprint = "the engine's"
    service.publish(1)
    with running_agent(service, engine, cache=tmp_path) as agent:
        eventually(lambda: 'outcome="refused"} 1.0' in exposed(agent))
        settle(engine)
        assert engine.swapped == []
        version = service.publish(2, config_fingerprint="the engine's")
        eventually(lambda: engine.version == version)


@pytest.mark.parametrize(
    ("more", "unlike"),
    [
        ({"d2t_sha256": "the engine's", "aux_layers": [2, 4, 5]}, "another draft vocabulary"),
        ({"d2t_sha256": "d2t", "aux_layers": [1, 2, 3]}, "other layers (2,4,5; the engine's: 1,2,3)"),
        ({"d2t_sha256": "d2t", "aux_layers": [2, 4, 5]}, "other sizes"),
        ({"d2t_sha256": 3, "aux_layers": "2"}, "another draft vocabulary, other sizes or other layers"),
    ],
)
def test_an_engine_that_was_started_with_another_drafter_is_told_what_differs_and_what_to_do(
    service: Service,
    engine: Engine,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    more: dict[str, Any],
    unlike: str,
) -> None:
    engine.fingerprint, engine.told = "the engine's", more
    service.publish(1)
    with running_agent(service, engine, cache=tmp_path), caplog.at_level(logging.WARNING, "draftalign.agent"):
        eventually(lambda: "cannot be swapped into" in caplog.text)
    assert f"it has {unlike} than the drafter that the engine was started with" in caplog.text
    assert "`draftalign download DIR --run default`" in caplog.text


def test_an_engine_that_says_no_is_not_asked_again(service: Service, engine: Engine, tmp_path: Path) -> None:
    engine.refusal = (422, "lacks down_proj")
    service.publish(1)
    with running_agent(service, engine, cache=tmp_path) as agent:
        eventually(lambda: 'outcome="refused"} 1.0' in exposed(agent))
        settle(engine, 8)
        assert [path for _, path in engine.requests].count("/drafter/swap") == 1
        engine.refusal = None
        version = service.publish(2)
        eventually(lambda: engine.version == version)


def test_an_engine_that_refused_the_newest_gets_the_last_good_one_after_a_restart(
    service: Service, engine: Engine, tmp_path: Path
) -> None:
    first = service.publish(1)
    with running_agent(service, engine, cache=tmp_path) as agent:
        eventually(lambda: engine.version == first)
        settle(engine)
        with service.lock:
            second = service.publish(2)
            engine.refusal, engine.refused_versions = (422, "bad weights"), {second}
        eventually(lambda: 'outcome="refused"} 1.0' in exposed(agent))
        settle(engine, 5)
        assert engine.swapped == [first]
        engine.restart()
        eventually(lambda: 'outcome="refused"} 2.0' in exposed(agent))  # a new process may think otherwise
        eventually(lambda: engine.version == first)


def test_an_engine_in_trouble_is_asked_again(service: Service, engine: Engine, tmp_path: Path) -> None:
    engine.refusal = (503, "starting")
    version = service.publish(1)
    with running_agent(service, engine, cache=tmp_path) as agent:
        eventually(lambda: 'outcome="failed"} 2.0' in exposed(agent))
        engine.refusal = None
        eventually(lambda: engine.version == version)


def test_who_is_away_is_named_with_its_address(
    service: Service, engine: Engine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine.down()
    service.down()
    refused = "All connection attempts failed"
    expected = {
        f"engine {engine.url} does not answer (GET /metrics: ConnectError('{refused}'))",
        f"service {service.url} does not answer ({refused})",
    }
    with running_agent(service, engine, cache=tmp_path):
        eventually(lambda: expected <= {record.getMessage() for record in caplog.records})
        engine.up()
        service.up()
        version = service.publish(1)
        eventually(lambda: engine.version == version)


def test_the_same_failure_is_told_now_and_then(caplog: pytest.LogCaptureFixture) -> None:
    agent = SwapAgent(AgentConfig("http://service", ("http://engine",)))
    outcomes: list[Exception | None] = [*(EngineError("away"),) * 40, EngineError("no"), EngineError("no"), None]
    outcomes += [EngineError("no"), *(AgentError(f"{n} of 4 bytes") for n in range(4)), EngineError("no")]

    async def step() -> None:
        if not outcomes:
            raise asyncio.CancelledError
        if (outcome := outcomes.pop(0)) is not None:
            raise outcome

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(agent._repeat("http://engine", step, 0.001))
    told = [record.getMessage().removeprefix("engine http://engine: ") for record in caplog.records]
    assert told == [*("away",) * 4, "no", "no", "0 of 4 bytes"], "1st, 8th, 16th, 32nd"


def test_who_breaks_off_a_download_has_answered(caplog: pytest.LogCaptureFixture) -> None:
    agent = SwapAgent(AgentConfig("http://service", ("http://engine",)))
    for kind in (EngineError, DownloadError):
        error = kind("it stopped at byte 7")
        error.__cause__ = httpx.ReadError("")
        agent._note("http://engine", error)
    agent._note("http://engine", httpx.ReadTimeout(""))
    told = [record.getMessage().removeprefix("engine http://engine") for record in caplog.records]
    silent = " does not answer (ReadTimeout(''))"
    assert told == [" does not answer (it stopped at byte 7)", ": it stopped at byte 7", silent]


def test_one_dead_engine_does_not_hold_up_the_others(service: Service, engine: Engine, tmp_path: Path) -> None:
    dead = Engine()
    dead.down()
    with running_agent(service, dead, engine, cache=tmp_path):
        version = service.publish(1)
        eventually(lambda: engine.version == version)


def test_the_token_goes_to_the_service_and_to_nobody_else(service: Service, engine: Engine, tmp_path: Path) -> None:
    version = service.publish(1)
    with running_agent(service, engine, cache=tmp_path, token="s3cret"):
        eventually(lambda: engine.version == version)
        settle(engine)
        engine.play(10, 1)
        eventually(lambda: service.last_report(version))
    assert service.authorizations == {"Bearer s3cret"}
    assert engine.authorizations == {None}
    assert "s3cret" not in repr(AgentConfig("http://a", ("http://b",), token="s3cret"))


def test_a_sequence_that_goes_back_is_not_followed(
    service: Service, engine: Engine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = service.publish(1), service.publish(2)
    assert first != second
    with running_agent(service, engine, cache=tmp_path), caplog.at_level(logging.WARNING, "draftalign.agent"):
        eventually(lambda: engine.version == second)
        service.sequence = 0
        service.publish(3)
        eventually(lambda: "latest never goes back" in caplog.text)
        settle(engine)
    assert engine.swapped == [second]


def test_only_recent_versions_stay_in_the_cache(service: Service, engine: Engine, tmp_path: Path) -> None:
    versions = []
    with running_agent(service, engine, cache=tmp_path, keep_versions=2):
        for number in range(1, 6):
            versions.append(service.publish(number))
            eventually(lambda: engine.version == versions[-1])
        home = tmp_path / "default"
        eventually(lambda: {p.name for p in home.glob("v*")} == set(versions[-2:]))


def test_what_the_engines_use_is_read_in_the_thread_that_changes_it(
    service: Service, engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_use, readers = EngineFollower.versions_in_use, set()

    def read(self: EngineFollower) -> set[str]:
        readers.add(threading.current_thread().name)
        return in_use(self)

    monkeypatch.setattr(EngineFollower, "versions_in_use", read)
    with running_agent(service, engine, cache=tmp_path, wait_seconds=0.1):
        service.publish(1)
        eventually(lambda: readers)
    assert not {name for name in readers if name.startswith("asyncio")}, readers  # asyncio.to_thread's names


def test_an_agent_ends_where_a_cancellation_was_lost(
    service: Service, engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """asyncio.wait_for of Python 3.11 loses one that comes together with its result (cpython issue 86296)."""
    began: list[bool] = []
    lost: list[bool] = []

    async def deaf_once(*_: object) -> None:
        began.append(True)
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            if lost:
                raise
            lost.append(True)

    monkeypatch.setattr(SwapAgent, "_follow_engine", deaf_once)
    with running_agent(service, engine, cache=tmp_path):
        eventually(lambda: began)
    assert lost


def test_own_metrics_are_served_on_loopback_and_bounded(service: Service, engine: Engine, tmp_path: Path) -> None:
    with running_agent(service, engine, cache=tmp_path, metrics_port=0) as agent:

        def served_and_counted(number: int) -> str:
            version = service.publish(number)
            eventually(lambda: engine.version == version)
            settle(engine)
            engine.play(10, 2)
            eventually(lambda: f'drafter_version="{version}"' in read_metrics(agent.metrics_port or 0))
            return version

        version = [served_and_counted(number) for number in range(1, 12)][-1]
        text = read_metrics(agent.metrics_port or 0)
    assert f'draftalign_agent_drafter_info{{engine="{engine.url}",run="default",version="{version}"}} 1.0' in text
    assert text.count("draftalign_agent_drafter_info{") == 1
    assert text.count("draftalign_agent_alpha{") == 10
    assert f'draftalign_agent_swaps_total{{engine="{engine.url}",outcome="swapped"}} 11.0' in text
    assert f'draftalign_agent_last_contact_timestamp_seconds{{peer="{engine.url}"}}' in text
    assert 'draftalign_agent_last_contact_timestamp_seconds{peer="service"}' in text


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"service_url": "localhost:8400"}, "http://"),
        ({"engine_urls": ()}, "engine_urls"),
        ({"engine_urls": ("http://a", "http://a")}, "engine_urls"),
        ({"run": "../x"}, "run"),
        ({"wait_seconds": 61}, "wait_seconds"),
        ({"report_seconds": 0}, "report_seconds"),
    ],
)
def test_a_configuration_that_cannot_work_is_refused(changes: dict[str, Any], said: str) -> None:
    good = AgentConfig("http://127.0.0.1:1", ("http://127.0.0.1:2",))
    with pytest.raises(ValueError, match=said):
        dataclasses.replace(good, **changes)


def test_a_bug_met_once_does_not_leave_the_engine_alone(
    service: Service, engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tick = EngineFollower.tick
    faults = iter([KeyError("a bug"), ZeroDivisionError()])

    async def faulty(self: EngineFollower, offer: Release | None) -> bool:
        if (fault := next(faults, None)) is not None:
            raise fault
        return await tick(self, offer)

    monkeypatch.setattr(EngineFollower, "tick", faulty)
    version = service.publish(1)
    with running_agent(service, engine, cache=tmp_path) as agent:
        eventually(lambda: engine.version == version)
        assert 'kind="ZeroDivisionError"' in exposed(agent)


def test_pauses_grow_to_a_limit_and_differ() -> None:
    of_the_process = random.getstate()
    pauses = [pause_seconds(failures, 8.0) for failures in range(1, 201)]
    assert random.getstate() == of_the_process, "an engine may be in a trainer's process, whose draws stay as they are"
    assert 0.125 <= pauses[0] <= 0.25
    assert all(4.0 <= pause <= 8.0 for pause in pauses[10:])
    assert len(set(pauses)) > 100


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_command_ends_on_a_signal(service: Service, engine: Engine, tmp_path: Path, number: signal.Signals) -> None:
    version = service.publish(1)
    command = [sys.executable, "-m", "service.cli", "agent", "--service", service.url, "--url", engine.url]
    command += ["--cache-dir", str(tmp_path), "--report-seconds", "0.1"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            eventually(lambda: engine.version == version)
            settle(engine)
            process.send_signal(number)
            _, log = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 0, log
    assert "Traceback" not in log


def test_the_agent_needs_no_torch_and_no_service() -> None:
    heavy = "('torch', 'fastapi', 'redis', 'transformers')"
    program = f"import sys, rl_hooks.agent.agent; print([m for m in {heavy} if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout.strip() == "[]"


def test_the_service_of_these_tests_speaks_range(service: Service) -> None:
    version = service.publish(1)
    url = f"{service.url}/drafter/{version}/config.json"
    whole = httpx.get(url).content
    assert httpx.get(url, headers={"Range": "bytes=3-"}).content == whole[3:]
    assert json.loads(whole) == drafter_config() | {"number": 1}
