"""Runs and engines of another kind of drafter: a policy's own MTP module is swapped, counted and refused as one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from helpers.engine.agent_fixtures import Engine, Service, eventually, mtp_bytes, running_agent, settle

from rl_hooks.wire import MappedFile


def publish_module(service: Service, number: int, **changes: Any) -> str:
    return service.publish(number, kind="mtp", files={"model.safetensors": mtp_bytes(number, **changes)})


def test_the_policys_own_module_is_counted_under_its_method_until_the_runs_replaces_it(
    service: Service, engine: Engine, tmp_path: Path
) -> None:
    engine.method = engine.takes = "mtp"
    with running_agent(service, engine, cache=tmp_path):
        settle(engine)
        engine.play(30, 1)
        eventually(lambda: service.last_report("mtp").get("rounds") == 30)
        assert service.last_report("mtp")["method"] == "mtp"
        version = publish_module(service, 1)
        eventually(lambda: engine.version == version)
        settle(engine)
        engine.play(40, 2)
        eventually(lambda: service.last_report(version).get("rounds") == 40)
    assert service.last_report(version)["method"] == "drafter"
    assert service.last_report("mtp")["rounds"] == 30
    assert engine.swapped == [version]


def test_a_restarted_engine_gets_the_runs_module_back(service: Service, engine: Engine, tmp_path: Path) -> None:
    engine.method = engine.takes = "mtp"
    version = publish_module(service, 1)
    with running_agent(service, engine, cache=tmp_path):
        eventually(lambda: engine.version == version)
        engine.restart()
        eventually(lambda: engine.swapped == [version, version])


def test_an_engine_with_mtp_is_left_alone_by_a_run_with_an_eagle3_drafter(
    service: Service, engine: Engine, tmp_path: Path
) -> None:
    engine.method = engine.takes = "mtp"
    service.publish(1)
    with running_agent(service, engine, cache=tmp_path) as agent:
        settle(engine)
        engine.play(30, 1)
        eventually(lambda: service.last_report("mtp").get("rounds") == 30)
        settle(engine)
        labels = {"engine": engine.url, "outcome": "refused"}
        assert not agent.metrics.registry.get_sample_value("draftalign_agent_swaps_total", labels)
    assert engine.swapped == []


def test_an_engine_with_eagle3_refuses_a_module_aloud(
    service: Service, engine: Engine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    publish_module(service, 1)
    with running_agent(service, engine, cache=tmp_path) as agent:
        labels = {"engine": engine.url, "outcome": "refused"}
        eventually(lambda: agent.metrics.registry.get_sample_value("draftalign_agent_swaps_total", labels) == 1)
        settle(engine)
    assert engine.swapped == []
    assert "its kind is mtp, the engine was started for eagle3" in caplog.text


def test_copies_of_the_policys_weights_are_stripped(service: Service, engine: Engine, tmp_path: Path) -> None:
    engine.method = engine.takes = "mtp"
    version = publish_module(service, 1, poisoned=True)
    with running_agent(service, engine, cache=tmp_path):
        eventually(lambda: engine.version == version)
    clean = tmp_path / "clean"
    clean.write_bytes(mtp_bytes(1))
    assert engine.tensors[version] == set(MappedFile(clean).header.tensors)


def test_an_incomplete_module_never_reaches_an_engine(service: Service, engine: Engine, tmp_path: Path) -> None:
    engine.method = engine.takes = "mtp"
    publish_module(service, 1, without="hnorm.weight")
    with running_agent(service, engine, cache=tmp_path) as agent:
        labels = {"peer": "service", "kind": "InvalidDrafterError"}
        eventually(lambda: agent.metrics.registry.get_sample_value("draftalign_agent_errors_total", labels))
        settle(engine)
    assert engine.swapped == []
