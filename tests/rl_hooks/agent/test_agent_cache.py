"""Bytes that rot in the agent's cache never stay in an engine; a swap whose end the agent never saw is judged."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import logging
import os
import resource
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers.engine.agent_fixtures import (
    Engine,
    Service,
    drafter_bytes,
    drafter_config,
    eventually,
    running_agent,
    settle,
)

from rl_hooks.agent import download
from rl_hooks.agent.agent import SwapAgent
from rl_hooks.agent.canary import CanaryRule
from rl_hooks.agent.download import prune_cache
from rl_hooks.format.release import RECEIPT

SMALL = CanaryRule(rounds=200)


def flip(path: Path, offset: int) -> None:
    """Flip one bit, as a failing disk does: nobody is told."""
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def published(service: Service, version: str) -> dict[str, str]:
    return {name: hashlib.sha256(data).hexdigest() for (v, name), data in service.files.items() if v == version}


def mismatches(agent: SwapAgent, engine: Engine) -> float:
    labels = {"peer": engine.url, "kind": "digest"}
    return agent.metrics.registry.get_sample_value("draftalign_agent_errors_total", labels) or 0.0


def check_everything_read_was_published(service: Service, engine: Engine) -> None:
    assert len(engine.read) == len(engine.swapped)
    for version, read in zip(engine.swapped, engine.read, strict=True):
        assert read.items() >= published(service, version).items(), version


ROT = [
    ("model.safetensors", 3),  # the length of its header
    ("model.safetensors", 60),  # the header
    ("model.safetensors", -1),  # a weight
    ("config.json", 3),
    (RECEIPT, 30),
]


@pytest.mark.parametrize(("name", "offset"), ROT)
def test_a_restarted_engine_never_gets_a_byte_that_rotted_in_the_cache(
    service: Service, engine: Engine, tmp_path: Path, name: str, offset: int, caplog: pytest.LogCaptureFixture
) -> None:
    version = service.publish(1)
    with running_agent(service, engine, cache=tmp_path) as agent, caplog.at_level(logging.ERROR, "draftalign.agent"):
        eventually(lambda: engine.version == version)
        settle(engine)
        engine.down()
        flip(tmp_path / "default" / version / name, offset)
        engine.restart()
        eventually(lambda: engine.version == version)
        settle(engine)
        assert mismatches(agent, engine) == 1
    assert engine.swapped == [version, version]
    check_everything_read_was_published(service, engine)
    assert f"{version} in the cache is not what was downloaded" in caplog.text


def test_no_agent_deletes_what_another_ones_engine_would_go_back_to(
    service: Service, engine: Engine, tmp_path: Path
) -> None:
    """Engines alone share `~/.cache/draftalign` on their host."""
    old = service.publish(1)
    with running_agent(service, engine, cache=tmp_path, canary=CanaryRule(rounds=1000)) as agent:
        eventually(lambda: engine.version == old)
        settle(engine)
        engine.play(1500, 2)
        eventually(lambda: agent.followers[engine.url]._choice.fallback)
        new = service.publish(2)
        eventually(lambda: engine.version == new)
        settle(engine)
    assert prune_cache(tmp_path, "default", set()) == []
    engines = tmp_path / "default" / "engines"
    (memory,) = engines.glob("*.json")
    (engines / "damaged.json").write_text("{")
    killed = engines / "killed.json"  # the memory of an engine alone that nobody ends; its name comes never again
    killed.write_text(json.dumps(json.loads(memory.read_text()) | {"engine": "in-process:host 1 dp0 cafe"}))
    memory_text = memory.read_text()
    memory.unlink()
    assert prune_cache(tmp_path, "default", set()) == [], "it may live"
    two_hours_ago = time.time() - 7200.0
    os.utime(killed, (two_hours_ago, two_hours_ago))
    assert prune_cache(tmp_path, "default", {new}) == [old]
    assert not killed.exists()
    memory.write_text(memory_text)
    os.utime(memory, (two_hours_ago, two_hours_ago))
    assert prune_cache(tmp_path, "default", set()) == [], "of an agent with an address, whose host may be down"
    os.utime(memory, (0, 0))
    assert prune_cache(tmp_path, "default", set()) == [new]
    assert sorted(file.name for file in engines.glob("*.json")) == sorted([memory.name, "damaged.json"])


def test_a_version_that_is_gone_from_the_cache_is_told_as_that_and_once(
    service: Service, engine: Engine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    version = service.publish(1)
    with running_agent(service, engine, cache=tmp_path) as agent, caplog.at_level(logging.INFO, "draftalign.agent"):
        eventually(lambda: engine.version == version)
        settle(engine)
        service.down()
        shutil.rmtree(tmp_path / "default" / version)
        engine.restart()
        settle(engine, 10)
        assert engine.version is None
        assert mismatches(agent, engine) == 0
        service.up()
        eventually(lambda: engine.version == version)
    assert caplog.text.count(f"{version} is not in the cache any more") == 1
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


def test_a_rotted_cache_waits_for_the_service_rather_than_reach_an_engine(
    service: Service, engine: Engine, tmp_path: Path
) -> None:
    version = service.publish(1)
    with running_agent(service, engine, cache=tmp_path) as agent:
        eventually(lambda: engine.version == version)
        settle(engine)
        service.down()
        engine.down()
        flip(tmp_path / "default" / version / "model.safetensors", -1)
        engine.restart()
        eventually(lambda: mismatches(agent, engine))
        settle(engine)
        assert engine.version is None
        service.up()
        eventually(lambda: engine.version == version)
    check_everything_read_was_published(service, engine)


@pytest.mark.parametrize("started_with", [None, "v000001-by-hand"])
def test_a_host_that_starts_again_while_the_service_is_away_has_its_drafter_from_the_cache(
    service: Service, engine: Engine, tmp_path: Path, started_with: str | None
) -> None:
    """Engine and agent both start again; the engine may have been started with a drafter that has a name."""
    service.publish(1)
    before = service.publish(2)
    with running_agent(service, engine, cache=tmp_path):
        eventually(lambda: engine.version == before)
        settle(engine)
    service.down()
    engine.restart(started_with)
    with running_agent(service, engine, cache=tmp_path) as agent:
        eventually(lambda: engine.version == before)
        settle(engine)
        assert agent.offer is None
        after = service.publish(3)
        service.up()
        eventually(lambda: engine.version == after)
    assert engine.swapped[-2:] == [before, after]
    check_everything_read_was_published(service, engine)


def test_a_version_pushed_again_and_one_swapped_back_to_are_verified_too(
    service: Service, engine: Engine, tmp_path: Path
) -> None:
    with running_agent(service, engine, cache=tmp_path, canary=SMALL):
        first, second = on_trial(service, engine)
        flip(tmp_path / "default" / first / "model.safetensors", -1)
        engine.play(400, 0)
        eventually(lambda: engine.version == first)  # its canary failed: back to what rotted meanwhile
        settle(engine)
        flip(tmp_path / "default" / second / "model.safetensors", -1)
        service.push_again(override_canary=True)
        eventually(lambda: engine.version == second)
    assert engine.swapped == [first, second, first, second]
    check_everything_read_was_published(service, engine)


def test_an_engine_that_read_other_bytes_gets_the_right_ones_at_once(
    service: Service, engine: Engine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine.tells_digest, engine.misread = True, 1
    version = service.publish(1)
    with running_agent(service, engine, cache=tmp_path) as agent, caplog.at_level(logging.ERROR, "draftalign.agent"):
        eventually(lambda: engine.version == version and engine.swaps == 2)
        settle(engine)
        assert mismatches(agent, engine) == 1
    assert len(service.ranges) == 4  # both files, downloaded twice: the cached ones were not trusted
    assert engine.swapped == [version, version]
    assert engine.digest == hashlib.sha256(drafter_bytes(1)).hexdigest()
    assert "expected sha256" in caplog.text


def test_an_engine_that_always_reads_other_bytes_is_asked_again_and_not_downloaded_for_each_time(
    service: Service, engine: Engine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine.tells_digest, engine.misread = True, 10**6
    version = service.publish(1)
    with running_agent(service, engine, cache=tmp_path) as agent, caplog.at_level(logging.ERROR, "draftalign.agent"):
        eventually(lambda: mismatches(agent, engine) >= 5)
        assert len([r for r in caplog.records if r.levelno >= logging.ERROR]) == 1
        engine.play(50, 1)
        settle(engine)
        assert len(service.ranges) == 4
        follower = agent.followers[engine.url]
        assert follower.ledger.version_counts(version).rounds == 0  # not that version's work
        engine.misread = 0
        eventually(lambda: engine.digest == hashlib.sha256(drafter_bytes(1)).hexdigest())
        swaps = engine.swaps
        settle(engine)
        assert engine.swaps == swaps


def test_an_engine_that_verifies_loads_nothing_until_the_right_bytes_are_there(
    service: Service, engine: Engine, tmp_path: Path
) -> None:
    engine.tells_digest = engine.verifies = True
    engine.misread = 4
    version = service.publish(1)
    with running_agent(service, engine, cache=tmp_path) as agent:
        eventually(lambda: engine.version == version)
        settle(engine)
        assert mismatches(agent, engine) == 4
    assert engine.swapped == [version], "what it would have read otherwise was never loaded"
    assert len(service.ranges) == 4  # both files, downloaded again once
    assert len(engine.read) == 5


def test_what_an_engine_says_it_serves_is_compared_when_an_agent_starts(
    service: Service, engine: Engine, tmp_path: Path
) -> None:
    engine.tells_digest = True
    version = service.publish(1)
    with running_agent(service, engine, cache=tmp_path):
        eventually(lambda: engine.version == version)
        settle(engine)
    engine.digest = hashlib.sha256(b"other bytes").hexdigest()  # what somebody else may have loaded
    with running_agent(service, engine, cache=tmp_path):
        eventually(lambda: engine.swaps == 2)
        settle(engine)
    assert engine.swapped == [version, version]


def test_a_stripped_drafter_is_compared_by_what_was_left_of_it(
    service: Service, engine: Engine, tmp_path: Path
) -> None:
    engine.tells_digest = True
    version = service.publish(1, files={"model.safetensors": drafter_bytes(1, poisoned=True)})
    with running_agent(service, engine, cache=tmp_path) as agent:
        eventually(lambda: engine.version == version)
        settle(engine)
        assert mismatches(agent, engine) == 0
    assert engine.swapped == [version]


# --- swaps that the agent did not live to see


def on_trial(service: Service, engine: Engine) -> tuple[str, str]:
    """Version 1 with a baseline of α 4, then version 2 loaded."""
    first = service.publish(1)
    baseline(engine, first)
    second = service.publish(2)
    eventually(lambda: engine.version == second)
    settle(engine)
    return first, second


def baseline(engine: Engine, version: str) -> None:
    eventually(lambda: engine.version == version)
    settle(engine)
    for _ in range(3):
        engine.play(100, 3)
        settle(engine)


def command(service: Service, engine: Engine, cache: Path) -> list[str]:
    return [
        *(sys.executable, "-m", "service.cli", "agent", "--service", service.url, "--url", engine.url),
        *("--cache-dir", str(cache), "--report-seconds", "0.05", "--agent-id", "agent"),
        *("--canary-rounds", str(SMALL.rounds)),
    ]


def test_a_disk_that_is_full_half_way_through_a_download_leaves_the_drafter_that_serves(
    service: Service, engine: Engine, tmp_path: Path
) -> None:
    first = service.publish(1)
    room = len(drafter_bytes(1))  # enough for the first; a write beyond it fails, as on a full disk

    def little_room() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, room))

    argv = command(service, engine, tmp_path)
    with subprocess.Popen(argv, stderr=subprocess.PIPE, text=True, preexec_fn=little_room) as process:  # noqa: PLW1509
        try:
            eventually(lambda: engine.version == first, 60)
            larger = {
                "model.safetensors": drafter_bytes(2, hidden=32),
                "config.json": json.dumps(drafter_config(32)).encode(),
            }
            second = service.publish(2, files=larger)
            eventually(lambda: len(service.ranges) > 4)  # it tries again, and has said why
            settle(engine)
        finally:
            process.kill()
        assert process.stderr is not None
        assert "File too large" in process.stderr.read()
    assert engine.swapped == [first]
    with running_agent(service, engine, cache=tmp_path):  # there is room again
        eventually(lambda: engine.version == second)
    check_everything_read_was_published(service, engine)


Fill = Callable[[float], None]


@pytest.fixture(params=["free bytes", "ENOSPC", "EDQUOT"])
def fill(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fill:
    """Let the cache's disk hold this number of versions, each as large as those that are there."""

    def used() -> int:
        return sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())

    def full(versions: float) -> None:
        total = int(versions * used() / len(list((tmp_path / "default").glob("v*"))))
        if request.param == "free bytes":
            monkeypatch.setattr(
                "rl_hooks.agent.download.shutil.disk_usage",
                lambda _: SimpleNamespace(free=download.MIN_FREE_BYTES + total - used()),
            )
            return
        receive = download._Download._receive

        def write(self: download._Download) -> None:
            if used() + self.file.bytes > total:
                raise OSError(getattr(errno, request.param), "as a full disk or quota says")
            receive(self)

        monkeypatch.setattr("rl_hooks.agent.download._Download._receive", write)

    return full


@pytest.mark.parametrize("link", [False, True], ids=["", "a link lies among them"])
@pytest.mark.parametrize("restarted", [False, True], ids=["", "after a restart"])
def test_where_the_disk_is_full_of_older_versions_they_give_way_to_the_newest(
    restarted: bool, link: bool, service: Service, engine: Engine, tmp_path: Path, fill: Fill
) -> None:
    """Those that the agent would keep for a swap back too: an engine must not stay behind for good."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(running_agent(service, engine, cache=tmp_path))
        for number in (1, 2, 3):
            version = service.publish(number)
            eventually(lambda version=version: engine.version == version)  # type: ignore[misc]
        if restarted:
            stack.close()
            stack.enter_context(running_agent(service, engine, cache=tmp_path))
        fill(3.5)
        if link:
            (tmp_path / "default" / "0").symlink_to(tmp_path)
        newest = service.publish(4)
        eventually(lambda: engine.version == newest)
    assert service.ranges == [None] * 8, "the newest's config.json, which was there, was not asked for again"


def test_a_full_disk_keeps_what_an_engine_that_is_away_would_get(
    service: Service, engine: Engine, tmp_path: Path, fill: Fill
) -> None:
    """The offer, and what it goes back to where it refuses that; until it has taken the offer."""
    cache, versions = tmp_path / "default", [service.publish(1)]

    def kept() -> list[str]:
        """The versions that are there once the newest was tried again."""
        asked = len(service.requests)
        eventually(lambda: len(service.requests) >= asked + 2)
        return [version for version in versions if (cache / version).exists()]

    with running_agent(service, engine, cache=tmp_path):
        eventually(lambda: engine.version == versions[0])
        settle(engine)
        engine.down()
        for number in (2, 3):
            versions.append(service.publish(number))
            eventually((cache / versions[-1]).exists)
        fill(2.5)
        newest = service.publish(4)
        eventually(lambda: not (cache / versions[1]).exists())
        assert kept() == [versions[0], versions[2]]
        engine.swap_asked.clear()
        engine.swap_allowed.clear()
        engine.restart()
        assert engine.swap_asked.wait(60)
        assert kept() == [versions[0], versions[2]]
        engine.swap_allowed.set()
        eventually(lambda: engine.version == newest)
    assert engine.swapped == [versions[0], versions[2], newest]


@pytest.mark.parametrize("away", [False, True], ids=["", "the service is away"])
@pytest.mark.parametrize("done", [True, False], ids=["done before the next agent", "done after it asked too"])
def test_a_swap_whose_agent_was_killed_half_way_is_still_on_trial(
    service: Service, engine: Engine, tmp_path: Path, done: bool, away: bool
) -> None:
    first = service.publish(1)
    with subprocess.Popen(command(service, engine, tmp_path), stderr=subprocess.DEVNULL) as process:
        try:
            baseline(engine, first)
            engine.swap_asked.clear()
            engine.swap_allowed.clear()
            second = service.publish(2)
            assert engine.swap_asked.wait(60)
        finally:
            process.kill()
    if away:
        service.down()
    if done:
        engine.swap_allowed.set()
        eventually(lambda: engine.version == second)
    with running_agent(service, engine, cache=tmp_path, canary=SMALL):
        settle(engine, 1)
        engine.swap_allowed.set()
        eventually(lambda: engine.version == second)
        settle(engine, 6)
        engine.play(400, 0)
        eventually(lambda: engine.version == first)
        if away:
            service.up()
        (verdict,) = eventually(service.verdicts)
    assert (verdict["version"], verdict["previous"], verdict["outcome"]) == (second, first, "rolled_back")
    assert verdict["previous_alpha"] == 4.0


def test_a_swap_whose_answer_was_lost_is_on_trial(service: Service, engine: Engine, tmp_path: Path) -> None:
    first = service.publish(1)
    with running_agent(service, engine, cache=tmp_path, canary=SMALL, swap_timeout_seconds=0.3):
        baseline(engine, first)
        engine.swap_allowed.clear()
        second = service.publish(2)
        eventually(engine.swap_asked.is_set)
        eventually(lambda: failed(engine) >= 1)
        engine.swap_allowed.set()
        eventually(lambda: engine.version == second)
        settle(engine, 6)
        engine.play(400, 0)
        eventually(lambda: engine.version == first)
        (verdict,) = eventually(service.verdicts)
    assert (verdict["version"], verdict["outcome"]) == (second, "rolled_back")


def test_the_engine_is_still_at_a_repeated_swap_when_the_trial_begins(
    service: Service, engine: Engine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = service.publish(1)
    with running_agent(service, engine, cache=tmp_path, canary=SMALL, swap_timeout_seconds=0.3):
        baseline(engine, first)
        engine.swap_turns = turns = threading.Semaphore(0)
        second = service.publish(2)
        eventually(lambda: failed(engine) >= 1)
        turns.release()
        eventually(lambda: engine.version == second)
        settle(engine, 6)
        engine.play(150, 0)
        settle(engine, 6)
        asked = engine.swaps
        turns.release(100)
        eventually(lambda: engine.swaps > asked)
        settle(engine, 6)
        engine.play(250, 0)
        eventually(lambda: engine.version == first)
        (verdict,) = eventually(service.verdicts)
    assert (verdict["version"], verdict["outcome"]) == (second, "rolled_back")
    assert "another client" not in caplog.text


def test_a_swap_by_another_client_that_keeps_the_version_ends_the_trial(
    service: Service, engine: Engine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = service.publish(1)
    with running_agent(service, engine, cache=tmp_path, canary=SMALL):
        baseline(engine, first)
        second = service.publish(2)
        eventually(lambda: engine.version == second)
        settle(engine, 6)
        engine.swaps += 1
        eventually(lambda: "another client" in caplog.text)


def failed(engine: Engine) -> int:
    """Swaps that were asked for again, because the answer to the first did not come."""
    return [path for _, path in engine.requests].count("/drafter/swap") - 2


def test_a_swap_that_the_engine_refused_is_forgotten(
    service: Service, engine: Engine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = service.publish(1)
    with running_agent(service, engine, cache=tmp_path, canary=SMALL):
        baseline(engine, first)
        engine.refusal = (409, "no")
        second = service.publish(2)
        eventually(lambda: [path for _, path in engine.requests].count("/drafter/swap") == 2)
        settle(engine)
        with caplog.at_level(logging.WARNING, "draftalign.agent"), engine.lock:
            engine.version, engine.swaps = second, engine.swaps + 1  # by hand
        eventually(lambda: "another client changed the drafter" in caplog.text)


def test_somebody_elses_swap_is_undone_and_no_canary_is_said_to_have_failed(
    service: Service, engine: Engine, tmp_path: Path
) -> None:
    first = service.publish(1)
    with running_agent(service, engine, cache=tmp_path, canary=SMALL) as agent:
        baseline(engine, first)
        with engine.lock:
            engine.version, engine.swaps = "by-hand", engine.swaps + 1

        def swaps(outcome: str) -> float | None:
            labels = {"engine": engine.url, "outcome": outcome}
            return agent.metrics.registry.get_sample_value("draftalign_agent_swaps_total", labels)

        eventually(lambda: engine.version == first and (swaps("swapped") or 0) + (swaps("rolled_back") or 0) > 1)
    assert swaps("rolled_back") is None
