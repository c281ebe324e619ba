"""NeMo-RL's own DTensor policy workers with the hook on them (`nemo_rl_trainer.py`), in their own environment.

NeMo-RL is in no package index (there is a placeholder of its name): NEMO_RL_SOURCE names a checkout of it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.service.service_fixtures import RunningService
from helpers.trainer.stacks_fixtures import Stack, learnt
from helpers.worker.worker_fixtures import Bench

VARIABLES = {"DRAFTALIGN_AUX_LAYERS": "2,4,5"}
STACK = Stack("nemo_rl", "nemo_rl_trainer.py", "a real NeMo-RL", VARIABLES)
ON_RAY = Stack("nemo_rl", "nemo_rl_ray.py", "NeMo-RL on a real Ray", VARIABLES)
SOURCE = os.environ.get("NEMO_RL_SOURCE", "")

pytestmark = [*STACK.marks, pytest.mark.skipif(not SOURCE, reason="NEMO_RL_SOURCE names no checkout of NeMo-RL")]


@pytest.fixture(name="ranks", scope="module", params=["v1 padded", "v2 packed", "v2 async"])
def _ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    worker, case = request.param.split()
    found = STACK.ranks(tmp_path_factory.mktemp("sent"), worker, case)
    return [one | {"worker": worker, "case": case} for one in found]


@pytest.mark.parametrize("rank", [0, 1])
def test_the_policys_pass_is_sent_rollout_by_rollout(ranks: list[dict[str, Any]], rank: int) -> None:
    found = ranks[rank]
    assert found["extended"], "by Ray's setup hook, when NeMo-RL's module was imported"
    assert found["stats"] == {"captured_rollouts": 12, "failures": 0, "last_failure": ""}
    for version, step in enumerate(found["steps"]):
        assert (step["rollouts"], step["left"], step["mask"]) == (4, 0, True)
        assert set(step["versions"]) == {version}
        assert step["strata"], "none: NeMo-RL gives this pass no task's name"
        assert step["temperature"] == 0.7
        assert step["features"] < 2**-7  # bfloat16's rounding, against each rollout alone
        assert step["normaliser"] < 1e-5
        # NeMo-RL's own, or the sampler's as it gave them.
        assert step["logp"] == 0.0 if found["case"] == "async" else step["logp"] < 1e-5
        assert step.get("head", rank == 1)


def test_forwards_that_only_keep_the_ranks_in_step_are_not_sent(ranks: list[dict[str, Any]]) -> None:
    """Three steps' micro-batches; where rows are packed a rank has two, and the other one three."""
    micro_batches = [sum(len(step["versions"]) for step in found["steps"]) for found in ranks]
    packed = ranks[0]["case"] == "packed"
    assert sorted(micro_batches) == ([6, 9] if packed else [6, 6])
    assert [found["forwards"] for found in ranks] == ([9, 9] if packed else [6, 6])


def test_nothing_is_sent_by_the_reference_or_the_update_and_the_weights_are_nemo_rls_own(
    ranks: list[dict[str, Any]],
) -> None:
    for found in ranks:
        assert found["beside"] == [0, 0, 0]
        assert found["reference"] == [False, True, True], "its weights are others once there was an update"
        assert (found["moved"], found["weights"]) == (True, True)


def test_rank_0_registers_the_run_and_sends_heads(ranks: list[dict[str, Any]]) -> None:
    assert [found["heads"] for found in ranks] == [["/runs/default", *["/runs/default/head"] * 2], []]
    assert [found["first_drafter"] for found in ranks] == [True, None]


def test_what_nemo_rl_logs_of_an_update_has_the_hooks_numbers(ranks: list[dict[str, Any]]) -> None:
    assert ranks[0]["logged"] == [["draftalign/dropped", "draftalign/overhead_seconds"]] * 3
    assert ranks[1]["logged"] == ranks[0]["logged without"] == [[]] * 3


def test_the_service_takes_all_of_it_and_a_worker_trains_on_it(
    ranks: list[dict[str, Any]], serve: Callable[..., RunningService], bench: Bench
) -> None:
    assert learnt([found["kept"] for found in ranks], serve(), bench) == {0: 8, 1: 8, 2: 8}


def test_it_says_that_it_is_on(ranks: list[dict[str, Any]]) -> None:
    for rank, found in enumerate(ranks):
        (said,) = found["said"]
        assert said.startswith(f"draftalign is on: NeMo-RL's rank {rank} sends rollouts to http://127.0.0.1:")


def test_nemo_rls_policy_on_ray_sends_what_its_workers_see(
    tmp_path: Path, serve: Callable[..., RunningService], bench: Bench
) -> None:
    ON_RAY.run(tmp_path)
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["sent"] == [True, True], "each step's rollouts, under its version"
    assert found["asked"] == ["POST /rollouts?run=r", "PUT /runs/r", "PUT /runs/r/head"]
    assert found["first_drafter"]
    assert [sorted(one) for one in found["metrics"]] == [["draftalign/dropped", "draftalign/overhead_seconds"]] * 2
    assert learnt([str(tmp_path / "sent")], serve(), bench) == {0: 8, 1: 8}
