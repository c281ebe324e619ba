"""A worker process lives through the whole corpus: hostile runs and rollouts are marked, an honest run is trained.

What the API refuses cannot reach the worker. So the runs are put on the disk as a service without the check did, and
the rollouts are those that the API takes: it never looks at the features.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from attacks.accepted import ACCEPTED
from attacks.runs import RUNS
from service_fixtures import HEADERS, RunningService
from service_fixtures import run_file as plain_run_file
from storage_fixtures import RolloutQueue, Store
from worker_fixtures import Bench, Nest, alive, nest


@pytest.fixture
def bench(tmp_path: Path, redis_url: str) -> Iterator[Bench]:
    with Bench(tmp_path / "state", redis_url) as made:
        yield made


@pytest.fixture
def service(bench: Bench) -> Iterator[RunningService]:
    started = RunningService(state_dir=bench.layout.root, redis_url=bench.redis_url)
    yield started
    started.stop()


@pytest.fixture
def workers(tmp_path: Path) -> Iterator[Nest]:
    with nest(tmp_path / "workers.log") as made:
        yield made


def states(bench: Bench, run: str, batches: list[str]) -> dict[str, dict[str, str]]:
    queue = RolloutQueue(bench.redis, run)
    return {batch: queue.batch(batch) or {"state": "unknown"} for batch in batches}


def errors(bench: Bench, runs: list[str]) -> dict[str, Any]:
    return {run: Store(bench.redis, run).worker().error or None for run in runs}


def test_a_worker_lives_through_every_hostile_run_and_trains_the_honest_one(
    bench: Bench, service: RunningService, workers: Nest
) -> None:
    bench.register(bench.world.run_file(drafter=bench.world.drafter()), run="honest")
    hostile = [f"evil-{number}" for number in range(len(RUNS))]
    pid = workers.start(bench)
    first = bench.post_file(bench.world.rollout_file("first", run="honest"))
    for run, attack in zip(hostile, RUNS.values(), strict=True):
        bench.register(attack.body, run=run, checked=False)
    bench.wait(lambda: all(errors(bench, hostile).values()))
    later = [bench.post_file(bench.world.rollout_file(name, run="honest")) for name in ("b", "c", "d")]
    bench.wait(lambda: all(b["state"] == "trained" for b in states(bench, "honest", [first, *later]).values()))
    assert alive(pid)
    assert errors(bench, ["honest"]) == {"honest": None}
    for run, (name, attack) in zip(hostile, RUNS.items(), strict=True):
        reply = service.client.get(f"/runs/{run}")
        assert reply.status_code == 200, f"{name}: {reply.text}"
        told = reply.json()["worker_error"]
        assert attack.words in told, f"{name}: {told}"
    metrics = service.client.get("/metrics").text
    assert 'draftalign_worker_error{run="honest"} 0.0' in metrics
    assert metrics.count("draftalign_worker_error{") == len(hostile) + 1
    text = workers.log.read_text()
    assert text.count(f"{pid} ") > 0
    assert "Traceback" not in text, "every one of them is foreseen, and named"


def test_a_worker_lives_through_every_hostile_batch_and_trains_the_honest_run(
    bench: Bench, service: RunningService, workers: Nest
) -> None:
    bench.register(bench.world.run_file(drafter=bench.world.drafter()), run="honest")
    reply = service.client.put("/runs/evil", content=plain_run_file(), headers=HEADERS)
    assert reply.status_code == 201
    pid = workers.start(bench, settings={})
    honest, hostile = [], {}
    for number, (name, make) in enumerate(sorted(ACCEPTED.items())):
        reply = service.post(make())
        assert reply.status_code == 202, f"{name}: {reply.text}"
        hostile[reply.json()["batch_id"]] = name
        if number % 4 == 0:
            body = bench.world.rollout_file(f"b{number}", run="honest")
            reply = service.post(body)
            assert reply.status_code == 202, reply.text
            honest.append(reply.json()["batch_id"])
    bench.wait(lambda: all(b["state"] == "trained" for b in states(bench, "honest", honest).values()), 90)
    bench.wait(lambda: not any(b["state"] == "queued" for b in states(bench, "evil", list(hostile)).values()), 90)
    assert alive(pid)
    assert errors(bench, ["honest", "evil"]) == {"honest": None, "evil": None}
    assert not any(b["state"] == "dead" for b in states(bench, "honest", honest).values())
    ended = {hostile[batch]: record for batch, record in states(bench, "evil", list(hostile)).items()}
    assert ended["nothing_wrong"]["state"] == "trained"
    for name, record in ended.items():
        assert record["state"] != "dead" or record["reason"], name
        assert "nan" not in name or record["state"] == "dead", name
    assert "above 0" in ended["log_probabilities_of_a_certainty_and_more"]["reason"]
    assert RolloutQueue(bench.redis, "honest").counters()["dead_total"] == 0
