"""Hostile counts by prompt of one run change nothing of the run beside it: the whole service, and real agents."""

from __future__ import annotations

import asyncio
import re
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from attacks.sent import reports_by_prompt
from helpers.engine.agent_fixtures import Engine, eventually, settle, start_agent
from helpers.service.service_fixtures import RunningService
from helpers.service.storage_fixtures import RolloutQueue, Store
from helpers.worker.worker_fixtures import Bench, alive, nest

from rl_hooks.agent.agent import AgentConfig, SwapAgent
from rl_hooks.engines.counting.counters import Counts, Snapshot
from rl_hooks.engines.protocol import EngineState
from rl_hooks.format.release import Release

#: Gauges that tell the time, what the API's process did, and how much of the disk other processes leave.
_OF_THE_HOST = re.compile(r"heartbeat|_seconds|_timestamp|_age|queue_limit_bytes")


def is_trained(queue: Any, batch: str) -> bool:
    state = queue.batch(batch)["state"]
    assert state in ("queued", "trained")
    return bool(state == "trained")


class Runs:
    """A service with its worker, and two runs with the same drafter, of which batches were scored: honest and evil."""

    def __init__(self, bench: Bench, service: RunningService, tmp_path: Path) -> None:
        self.bench, self.service = bench, service
        drafter = bench.world.trained_drafter(tmp_path)
        for run in ("honest", "evil"):
            bench.register(bench.world.run_file(drafter=drafter), run=run)
            bench.wait(partial(self.is_served, run))
        self.version = service.client.get("/drafter/latest", params={"run": "honest"}).json()["version"]
        for number in range(4):
            self.train(f"first {number}")

    def is_served(self, run: str) -> bool:
        return self.service.client.get("/drafter/latest", params={"run": run}).status_code == 200

    def train(self, name: str) -> None:
        """A batch for each run, of the same eight prompts, until it is trained."""
        for run in ("honest", "evil"):
            body = self.bench.world.rollout_file(name, run=run, prompts=[p for p in range(8) for _ in range(2)])
            reply = self.service.post(body)
            assert reply.status_code == 202, reply.text
            batch, queue = reply.json()["batch_id"], RolloutQueue(self.bench.redis, run)
            self.bench.wait(partial(is_trained, queue, batch))

    def prompts(self, run: str) -> dict[str, tuple[float, float]]:
        """Tokens and rounds of each prompt, as the served drafter's replay has them."""
        found = dict[str, tuple[float, float]]()
        for score in Store(self.bench.redis, run).scores().values():
            for one in score.replayed or ():
                if one.version == self.version:
                    for prompt, (tokens, rounds) in one.by_prompt.items():
                        before = found.get(prompt, (0.0, 0.0))
                        found[prompt] = (before[0] + tokens, before[1] + rounds)
        return found

    def report(self, run: str, fields: Mapping[str, Any], reporter: str = "engine") -> Any:
        named = {"run": run, "reporter": reporter, "drafter_version": self.version, "policy_version": 0}
        return self.service.client.post("/acceptance", json=named | {"window_seconds": 5.0} | dict(fields))

    def honest_counts(self) -> dict[str, Any]:
        """Of an engine that accepts what replay says, prompt by prompt."""
        by_prompt = {p: [round(50 * t), round(50 * r)] for p, (t, r) in self.prompts("honest").items()}
        tokens, rounds = (sum(column) for column in zip(*by_prompt.values(), strict=True))
        counts = {"rounds": rounds, "accepted_tokens": tokens - rounds, "drafted_tokens": 4 * rounds}
        return counts | {"emitted_tokens": tokens, "by_prompt": by_prompt}

    def told(self, run: str) -> dict[str, Any]:
        """Verdicts, publishing, curves and gauges of a run."""
        client = self.service.client
        alpha = client.get("/alpha", params={"run": run}).json()
        lines = [line for line in client.get("/metrics").text.splitlines() if f'run="{run}"' in line]
        return {
            "alpha": {**alpha, "servers": [{**server, "reported": None} for server in alpha["servers"]]},
            "drafters": client.get("/drafters", params={"run": run}).json(),
            "latest": client.get("/drafter/latest", params={"run": run}).json(),
            "run": client.get(f"/runs/{run}").json(),
            "gauges": sorted(line for line in lines if not _OF_THE_HOST.search(line)),
        }


@pytest.fixture
def runs(bench: Bench, service: RunningService, tmp_path: Path) -> Iterator[Runs]:
    with nest(tmp_path / "log") as workers:
        pid = workers.start(bench)
        yield Runs(bench, service, tmp_path)
        assert alive(pid)
        assert "Traceback" not in workers.log.read_text()


def test_hostile_counts_by_prompt_of_one_run_change_nothing_of_the_other(runs: Runs) -> None:
    verdict = runs.report("honest", runs.honest_counts()).json()
    assert verdict["engine"] == "healthy", verdict
    before = runs.told("honest")
    assert before["alpha"]["servers"][0]["alpha"] == pytest.approx(2.0, abs=0.2)
    hostile = reports_by_prompt(runs.prompts("evil"))
    statuses = dict[str, int]()
    for number, (name, fields) in enumerate(hostile.items()):
        for reporter in ("engine", f"engine {number}"):  # the name of the honest one too
            reply = runs.report("evil", fields, reporter)
            statuses[name] = reply.status_code
            assert reply.status_code in (200, 422), f"{name}: {reply.text}"
        assert runs.report("honest", runs.honest_counts()).json() == verdict, name
    refused = [name for name, status in statuses.items() if status == 422]
    assert refused == ["of another version", *list(hostile)[-13:]]
    assert runs.told("honest") == before
    for run in ("honest", "evil"):  # the worker reads what engines count before it publishes
        assert runs.service.client.get(f"/runs/{run}").json()["worker_error"] is None
    runs.train("after")
    assert runs.report("honest", runs.honest_counts()).json()["engine"] == "healthy"
    assert 'draftalign_publishing_held{run="honest"} 0.0' in runs.told("honest")["gauges"]


def test_hostile_ways_to_draft_of_one_run_change_nothing_of_the_other(runs: Runs) -> None:
    """The most that an engine can say has its own run replayed at 16 drafts, once; what it says after that, nothing."""
    verdict = runs.report("honest", runs.honest_counts()).json()
    before = runs.told("honest")
    counts = {"rounds": 100, "accepted_tokens": 100, "drafted_tokens": 400}
    for number in range(30):
        for depth, drafting in ((16, "greedy"), (1, "probabilistic"), (10**18, "x" * 500), (-1, "\x00"), (0, "")):
            reply = runs.report("evil", counts | {"depth": depth, "drafting": drafting}, f"engine {number % 3}")
            assert reply.status_code == 200, reply.text
    for odd in (True, "2", 2.5, [4], {"depth": 4}):
        assert runs.report("evil", counts | {"depth": odd}).status_code == 422
    assert runs.report("honest", runs.honest_counts()).json() == verdict
    assert runs.told("honest") == before

    def positions(run: str) -> int:
        newest = list(Store(runs.bench.redis, run).scores().values())[-1]
        return len((newest.replayed or ())[0].accepted)

    for number in range(20):  # the worker looks each second for how engines draft
        runs.train(f"after {number}")
        if positions("evil") == 16:
            break
        time.sleep(0.5)
    assert positions("evil") == 16
    assert positions("honest") == 4
    found = {run: runs.service.client.get(f"/runs/{run}").json() for run in ("honest", "evil")}
    assert [(one["depth"], one["drafting"]) for one in found.values()] == [(4, "probabilistic"), (16, "greedy")]
    assert [one["worker_error"] for one in found.values()] == [None, None]
    assert runs.report("honest", runs.honest_counts()).json()["engine"] == "healthy"


@dataclass
class HostileEngine:
    """An engine that an agent follows inside it, and that counts what a test says, by prompt."""

    url: str = "in-process: evil"
    version: str | None = None
    counts: Counts = field(default_factory=Counts)
    looked: int = 0

    async def state(self) -> EngineState:
        return EngineState(self.version, self.version is not None, int(self.version is not None), policy_version=0)

    async def swap(self, release: Release) -> str | None:
        self.version = release.version
        return None

    async def snapshot(self) -> Snapshot:
        self.looked += 1
        return Snapshot.of_exact(((self.version, 0, self.counts),), Counts(), 0)


def grown(counts: Counts, fields: Mapping[str, Any]) -> Counts:
    """As many rounds more; by prompt it counts what it likes."""
    return Counts(
        counts.rounds + 1000,
        counts.drafted_tokens + 4000,
        counts.accepted_tokens + 1000,
        emitted_tokens=(counts.emitted_tokens or 0) + 2000,
        window_seconds=counts.window_seconds + 1.0,
        by_prompt=fields["by_prompt"],
    )


def test_an_agent_whose_engine_counts_what_it_likes_by_prompt_lives_and_changes_nothing_of_the_other_run(
    runs: Runs, tmp_path: Path
) -> None:
    """Only an engine that is its own agent tells counts by prompt: a page of HTTP has none."""
    honest, evil = Engine(), HostileEngine()
    honest.depth, honest.policy_version = 4, 0
    honest._start()
    config = AgentConfig(
        runs.service.url, (evil.url,), run="evil", cache_dir=tmp_path / "evil", agent_id="evil", report_seconds=0.03
    )
    agent = SwapAgent(config, evil)
    thread = threading.Thread(target=lambda: asyncio.run(agent.run()))
    thread.start()
    try:
        with start_agent(runs.service.url, honest, cache=tmp_path / "honest", run="honest"):
            eventually(lambda: honest.version == evil.version == runs.version)
            settle(honest)
            sound = runs.honest_counts()
            with honest.lock:
                honest.counters |= {"drafts": sound["rounds"], "accepted": sound["accepted_tokens"]}
                honest.counters["generated"] = sound["emitted_tokens"]

            def verdict() -> str:
                return " ".join(line for line in runs.told("honest")["gauges"] if "engine_verdict" in line)

            eventually(lambda: 'verdict="healthy"' in verdict())
            settle(honest, 6)
            before = runs.told("honest")
            sent = 0
            for fields in reports_by_prompt(runs.prompts("evil")).values():
                by_prompt = fields["by_prompt"]
                if isinstance(by_prompt, dict) and all(isinstance(c, list) and len(c) == 2 for c in by_prompt.values()):
                    evil.counts, looked, sent = grown(evil.counts, fields), evil.looked, sent + 1
                    eventually(lambda: evil.looked > looked + 3)  # noqa: B023 - called at once
            assert sent >= 18
            evil.counts = grown(evil.counts, {"by_prompt": {}})
            rounds = evil.counts.rounds

            def counted() -> int:
                servers = runs.service.client.get("/alpha", params={"run": "evil"}).json()["servers"]
                return sum(server["rounds"] for server in servers)

            eventually(lambda: counted() == rounds)
            settle(honest)
            assert runs.told("honest") == before
            assert thread.is_alive()
            runs.train("after")
            eventually(lambda: 'verdict="healthy"' in verdict())
    finally:
        agent.stop()
        thread.join(60)
        honest.down()
    assert not thread.is_alive()
