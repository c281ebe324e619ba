"""A real SGLang and its agent, beside it or in it, while something fails: a process, the service, what it answers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import httpx
import pytest
from helpers.engine.agent_fixtures import Peer, eventually, start_agent
from helpers.engine.engine_fixtures import elicit_prompts
from helpers.engine.server_load import Load, alpha, edited, publish
from helpers.service.service_fixtures import RunningService
from sglang_server.sglang_process import PLUGIN, SGLangProcess
from sglang_server.test_sglang_server_inside import Alone, following
from sglang_server.test_sglang_server_swap import other_words, swap

from drafter.model.eagle3 import Eagle3Drafter
from examples.policy import BASE_POLICY
from rl_hooks.agent.agent import SwapAgent

PROMPTS = elicit_prompts(8, seed=4)
FAULTS = ("foreign", "401", "403", "absurd", "flipped", "cut off", "away", "engine paused")


class FaultyPath(Peer):
    """What stands between an engine and the service; `fault` names what it makes of the answers."""

    def __init__(self, service: RunningService) -> None:
        self.service = service
        self.fault = ""
        self.made = 0  # answers that were changed
        super().__init__()

    def answer(self, handler: BaseHTTPRequestHandler, path: str, query: dict[str, str], body: Any) -> None:
        passed = {name: handler.headers[name] for name in ("If-None-Match", "Range") if handler.headers[name]}
        query |= {"wait": "1"} if "wait" in query else {}
        url = f"{self.service.url}{path}"
        said = httpx.request(handler.command, url, params=query, headers=passed, json=body, timeout=30)
        status, content = self._changed(path, said.status_code, said.content)
        self.made += (status, content) != (said.status_code, said.content)
        headers = {name: said.headers[name] for name in ("ETag", "Content-Range") if name in said.headers}
        self.send(handler, status, content, headers)

    def _changed(self, path: str, status: int, content: bytes) -> tuple[int, bytes]:
        latest, model = (path.endswith(name) and status in (200, 206) for name in ("/latest", "/model.safetensors"))
        if self.fault in ("401", "403"):
            return int(self.fault), b'{"type": "about:blank", "detail": "not for you"}'
        if self.fault == "foreign":
            return 200, b'{"status": "ok", "data": [1, 2]}'
        if self.fault == "absurd" and latest:
            document = json.loads(content)
            document["files"] = [file | {"bytes": (1 << 53) - 1} for file in document["files"]]
            return status, json.dumps(document).encode()
        if self.fault == "flipped" and model:
            return status, content[:-1] + bytes([content[-1] ^ 1])
        if self.fault == "cut off" and model:
            return status, content[: len(content) // 2]
        return status, content


@pytest.fixture
def way(serve: Callable[..., RunningService]) -> Iterator[FaultyPath]:
    """To a service that has the run `live`."""
    service = serve()
    service.register("live")
    peer = FaultyPath(service)
    yield peer
    peer.down()


def written(cache: Path) -> dict[str, Any]:
    """What the agent beside the server has written of it."""
    found = list((cache / "default/engines").glob("sglang-*.json"))
    return json.loads(found[0].read_text()) if found else {}


def amid_a_swap(cache: Path, published: Callable[[], str]) -> str:
    """Publish until the agent is seen in a swap, which lasts some milliseconds; returns what it then loads."""
    while True:
        version = published()
        while not list((cache / "default/engines").glob("swap-*")):
            if (written(cache).get("loaded") or ("", ""))[1] == version:
                break  # too late
            time.sleep(0.0005)
        else:
            return version


def failures(agent: SwapAgent, server: SGLangProcess) -> float:
    """Calls of the server that have failed."""
    labels = {"peer": server.url, "kind": "EngineError"}
    return agent.metrics.registry.get_sample_value("draftalign_agent_errors_total", labels) or 0.0


def has_failed(agent: SwapAgent, server: SGLangProcess, more_than: float) -> bool:
    """Whether another call of the server has failed."""
    return failures(agent, server) > more_than


def has(agent: SwapAgent, server: SGLangProcess, version: str) -> bool:
    """Whether the agent says that this version serves."""
    return server.url in agent.followers and agent.followers[server.url].loaded_version == version


def test_a_server_that_is_paused_amid_a_swap_has_the_newest_drafter_when_it_goes_on(
    server: SGLangProcess, service: RunningService, trained: Eagle3Drafter, drafters: Path
) -> None:
    """It then does what its agent asked, though that waits no longer; whatever the order, it generates."""
    swap(server, drafters, drafters / "random", "before-the-agent")
    cache = drafters / "agent-of-a-paused"
    times = {"request_timeout_seconds": 1.0, "swap_timeout_seconds": 1.0}
    with start_agent(service.url, server, cache=cache, engine_kind="sglang", **times) as agent:
        for source in ("trained", "random", "trained"):
            version = amid_a_swap(cache, partial(publish, service, drafters / source, trained))
            os.killpg(server.process.pid, signal.SIGSTOP)
            try:
                eventually(partial(has_failed, agent, server, more_than=failures(agent, server)))
            finally:
                os.killpg(server.process.pid, signal.SIGCONT)
            eventually(partial(has, agent, server, version))
            assert len(server.generate([1, 5, 9])) > 0
    server.flush_cache()
    assert alpha(server, PROMPTS) > 1.5
    assert list((cache / "default/engines").glob("swap-*")) == []


def test_an_agent_that_is_killed_amid_a_swap_leaves_a_server_that_serves(
    server: SGLangProcess, service: RunningService, trained: Eagle3Drafter, drafters: Path, tmp_path: Path
) -> None:
    """Also in a trainer's weight session, in which the agent asks again and again."""
    swap(server, drafters, drafters / "random", "before-the-agent")
    cache = drafters / "agent-killed"
    argv = [*(sys.executable, "-m", "service.cli", "agent", "--service", service.url, "--url", server.url)]
    argv += ["--cache-dir", str(cache), "--engine", "sglang"]
    version = ""
    for amid in ("a swap", "a trainer's session"):
        if amid != "a swap":
            server.post("/begin_weight_update", selector="target")
        with (tmp_path / "agent.log").open("wb") as log, subprocess.Popen(argv, stderr=log) as process:
            try:
                if amid == "a swap":
                    version = amid_a_swap(cache, partial(publish, service, drafters / "trained", trained))
                else:
                    version = publish(service, drafters / "trained", trained)
                    eventually(lambda: b"session is open" in (tmp_path / "agent.log").read_bytes(), 60)
            finally:
                process.kill()
        assert len(server.generate([1, 5, 9])) > 0, amid
    server.post("/end_weight_update")  # the trainer's: nobody has ended it
    with start_agent(service.url, server, cache=cache, engine_kind="sglang") as agent:
        eventually(partial(has, agent, server, version))
    server.flush_cache()
    assert alpha(server, PROMPTS) > 1.5


def test_a_server_that_follows_by_itself_goes_on_over_faults_and_has_the_newest_drafter_after_each(
    way: FaultyPath, trained: Eagle3Drafter, drafters: Path, tmp_path: Path
) -> None:
    token = tmp_path / "token"
    token.write_text("one")
    ours = {"DRAFTALIGN_SAMPLE_FRACTION": "0", "DRAFTALIGN_TOKEN": f"@{token}"}

    def published(directory: Path) -> str:
        return publish(way.service, directory, trained, "live")

    with following(way, drafters, tmp_path, **ours) as server:  # type: ignore[arg-type]
        load = Load(server)
        with load.running():
            newest = published(drafters / "trained")
            eventually(lambda: server.has_taken(newest))
            for fault in FAULTS:
                check_a_fault(way, server, load, fault, lambda: published(drafters / "trained"))

            token.unlink()
            newest = published(drafters / "trained")
            eventually(lambda: "cannot be used, so nothing is asked" in server.log.read_text(errors="replace"))
            token.write_text("two")
            eventually(lambda: server.has_taken(newest))
            assert way.authorizations == {"Bearer one", "Bearer two"}

            bad = published(edited(drafters, other_words))
            newest = published(drafters / "trained")
            eventually(lambda: server.has_taken(newest))
            assert not server.has_taken(bad)
            newest = check_a_race(server, lambda: published(drafters / "trained"))
            load.wait_for(8)
        assert load.failures == []
        assert load.changed == {}
        os.killpg(server.process.pid, signal.SIGKILL)

    (tmp_path / "again").mkdir()
    ours["DRAFTALIGN_DRAFTER_DIR"] = str(tmp_path / "cache")
    with following(way, drafters, tmp_path / "again", **ours) as server:  # type: ignore[arg-type]
        eventually(lambda: server.has_taken(newest))
        answers = [server.ask(prompt) for prompt in PROMPTS]
        rounds = sum(answer["meta_info"]["spec_verify_ct"] for answer in answers)
        assert sum(len(answer["output_ids"]) - 1 for answer in answers) / rounds > 1.5


def check_a_fault(way: FaultyPath, server: Alone, load: Load, fault: str, published: Callable[[], str]) -> None:
    """Nothing is taken while it lasts, requests are served (where the engine runs), and the newest comes after it."""
    way.fault, before = fault, way.made
    if fault == "away":
        way.down()
    if fault == "engine paused":
        os.killpg(server.process.pid, signal.SIGSTOP)
    try:
        version = published()
        if fault == "engine paused":
            time.sleep(3)
        elif fault == "away":
            load.wait_for(40)
        else:
            eventually(lambda: way.made >= before + 2)
        assert not server.has_taken(version), fault
    finally:
        way.fault = ""
        if fault == "away":
            way.up()
        if fault == "engine paused":
            os.killpg(server.process.pid, signal.SIGCONT)
    load.wait_for(4)
    eventually(lambda: server.has_taken(version), 90)


def check_a_race(server: Alone, published: Callable[[], str]) -> str:
    """A trainer writes the policy again and again while drafters come; returns the newest, which is taken."""
    said: list[str] = []

    def refit() -> None:
        for number in ("7", "8", "9"):
            written = str(BASE_POLICY / "model.safetensors")
            said.append(server.run_beside(PLUGIN / "trainer.py", server.url, written, number, "1"))

    trainer = threading.Thread(target=refit)
    trainer.start()
    versions = [published()]
    while trainer.is_alive():
        versions.append(published())
        trainer.join(0.2)
    assert all("written\n" in one for one in said), said
    eventually(lambda: server.has_taken(versions[-1]))
    return versions[-1]
