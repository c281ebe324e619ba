"""OpenRLHF's own Actor with the hook on it: in ZeRO-3 (`openrlhf_trainer.py`), on Ray (`openrlhf_ray.py`)."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from helpers.service.service_fixtures import RunningService
from helpers.trainer.stacks_fixtures import Stack, learnt
from helpers.worker.worker_fixtures import Bench

STACK = Stack("openrlhf", "openrlhf_trainer.py", "OpenRLHF", {"DS_ACCELERATOR": "cpu"})
ON_RAY = Stack("openrlhf", "openrlhf_ray.py", "OpenRLHF on Ray", {"DS_ACCELERATOR": "cpu", "RAY_AUTH_MODE": "disabled"})
CASES = ["untied", "tied early", "untied padded", "untied predicting"]

pytestmark = STACK.marks


@pytest.fixture(name="ranks", scope="module")
def _ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return STACK.ranks(tmp_path_factory.mktemp(STACK.name), *CASES)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("case", CASES)
def test_the_passes_that_make_experience_are_sent_and_nothing_else(
    ranks: list[dict[str, Any]], case: str, rank: int
) -> None:
    found = ranks[rank][case]
    assert found["at rest"] == [[0], [0]]  # ZeRO-3: the head is empty outside the forward
    assert [step["version"] for step in found["steps"]] == [0, 1]
    # As the service answers, which is heard when the first file has gone.
    assert found["steps"][1]["last_rows"] == ("predicting" if "predicting" in case else "all")
    for step in found["steps"]:
        assert step["features"] < 2**-7  # bfloat16's rounding, against each rollout alone
        assert step["lse"] < 1e-5
        assert step["logp"] < 1e-6  # the Actor's own
        assert step.get("head", rank == 1)
    kinds = ["PUT /runs/r", "POST /rollouts?run=r", "PUT /runs/r/head", "POST /rollouts?run=r"]
    assert found["requests"] == (kinds if rank == 0 else kinds[1::2])


@pytest.mark.parametrize("case", CASES)
def test_the_weights_are_bit_identical_with_and_without_the_hook(ranks: list[dict[str, Any]], case: str) -> None:
    assert [found[case]["weights"] for found in ranks] == [True, True]


@pytest.mark.parametrize("case", CASES)
def test_the_service_takes_all_of_it_and_a_worker_trains_on_it(
    ranks: list[dict[str, Any]], case: str, serve: Callable[..., RunningService], bench: Bench
) -> None:
    assert learnt([found[case]["kept"] for found in ranks], serve(), bench) == {0: 8, 1: 8}


def test_what_openrlhf_logs_of_a_training_has_the_hooks_numbers_by_the_guides_line(ranks: list[dict[str, Any]]) -> None:
    """OpenRLHF merges what all ranks return: of rank 0 only."""
    ours = ["draftalign/dropped", "draftalign/overhead_seconds", "policy_loss"]
    assert [found["untied"]["logged"] for found in ranks] == [ours, ["policy_loss"]]


@pytest.fixture(name="on_ray", scope="module")
def _on_ray(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    out = tmp_path_factory.mktemp("ray")
    found = ON_RAY.ranks(out)
    return found, json.loads((out / "requests.json").read_text()) | {"sent": str(out / "sent")}


def test_on_ray_one_line_of_the_runtime_environment_puts_the_hook_on_the_policy_and_on_nothing_else(
    on_ray: tuple[list[dict[str, Any]], dict[str, Any]],
) -> None:
    for rank, found in enumerate(on_ray[0]):
        assert found["extended"]
        assert found["hooked"] == [True, False]  # the policy, the reference
        (said,) = found["said"]
        assert said.startswith(f"draftalign is on: OpenRLHF's rank {rank} sends rollouts to http://127.0.0.1:")


def test_on_ray_each_rank_sends_its_rollouts_of_each_version(
    on_ray: tuple[list[dict[str, Any]], dict[str, Any]],
) -> None:
    assert on_ray[1]["versions"] == [0, 0, 1, 1]
    assert on_ray[1]["asked"] == ["POST /rollouts?run=r", "PUT /runs/r", "PUT /runs/r/head"]
    assert on_ray[1]["first_drafter"]


def test_what_it_sends_on_ray_is_taken_and_trained_on(
    on_ray: tuple[list[dict[str, Any]], dict[str, Any]], serve: Callable[..., RunningService], bench: Bench
) -> None:
    assert learnt([on_ray[1]["sent"]], serve(), bench) == {0: 8, 1: 8}
