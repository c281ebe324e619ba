"""A trainer or an engine registers at version 0 and goes on where it was: nothing that came before is given up."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from helpers.service.service_fixtures import HEADERS, RunningService
from helpers.worker.worker_fixtures import Bench


@pytest.fixture
def run(bench: Bench, serve: Callable[..., RunningService]) -> Run:
    return Run(bench, serve())


class Run:
    """A run at policy version 40, whose head does not move."""

    def __init__(self, bench: Bench, service: RunningService) -> None:
        self.bench, self.service = bench, service
        bench.world.heads |= dict.fromkeys(range(40, 60), bench.world.heads[0])
        bench.begin()

    def post(self, version: int) -> str:
        reply = self.service.post(self.bench.world.rollout_file(f"b{version}", policy_version=version, rollouts=8))
        assert reply.status_code == 202, reply.text
        return str(reply.json()["batch_id"])

    def register_at_0(self) -> None:
        reply = self.service.client.put("/runs/default", content=self.bench.world.run_file(), headers=HEADERS)
        assert reply.status_code == 200, reply.text
        assert [one.to for one in self.bench.store.returns()] == [0]


def test_batches_whose_heads_come_after_them_live(run: Run) -> None:
    worker = run.bench.worker()
    for version in (46, 47):
        run.bench.put_head(version)
        run.post(version)
    run.bench.drain(worker)
    waiting = [run.post(version) for version in (48, 49, 50)]
    for version in (48, 49, 50):
        run.bench.put_head(version)
    run.register_at_0()
    run.bench.drain(worker)
    run.bench.put_head(51)
    waiting.append(run.post(51))
    run.bench.drain(worker)
    assert [(run.bench.state(batch), run.bench.reason(batch)) for batch in waiting] == [("trained", "")] * 4


def test_recent_batches_stay_where_a_second_engine_sends_a_head_again(run: Run) -> None:
    worker = run.bench.worker(recent_tokens=100_000)
    for version in range(40, 51):
        run.bench.put_head(version)
        run.post(version)
        run.bench.drain(worker)
    run.bench.put_head(42)
    run.register_at_0()
    run.bench.put_head(51)
    run.post(51)
    run.bench.drain(worker)
    assert [kept.policy_version for kept in worker.learner.recent.but([])] == list(range(40, 52))
