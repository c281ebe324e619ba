"""SkyRL's own FSDP policy worker with the hook in it (`skyrl_trainer.py`), in its own environment."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.service.service_fixtures import RunningService
from helpers.trainer.stacks_fixtures import Stack, learnt
from helpers.worker.worker_fixtures import Bench

STACK = Stack("skyrl", "skyrl_trainer.py", "a real SkyRL")

pytestmark = STACK.marks


@pytest.fixture(name="ranks", scope="module", params=["padded", "packed"])
def _ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return STACK.ranks(tmp_path_factory.mktemp(STACK.name), request.param)


@pytest.mark.parametrize("rank", [0, 1])
def test_what_the_first_mini_batch_sees_is_sent_rollout_by_rollout(ranks: list[dict[str, Any]], rank: int) -> None:
    found = ranks[rank]
    assert found["extended"] == [True] * 6, "by Ray's setup hook, when SkyRL's module was imported"
    # Of two steps with two mini-batches of four, the second one's weights are not those that drew the rollouts.
    stats = {"captured_rollouts": 8, "failures": 0, "skipped_stale": 8, "last_failure": ""}
    assert found["stats"] == stats
    for number, step in enumerate(found["steps"]):
        version, second = divmod(number, 2)
        if second:
            assert (step["rollouts"], step["left"]) == (0, 4)
            continue
        assert (step["rollouts"], step["left"], step["mask"]) == (4, 0, True)
        assert step["versions"] == [version, version]  # of two micro-batches
        assert step["temperature"] == 0.7
        assert step["features"] < 2**-7  # bfloat16's rounding, against each rollout alone
        assert step["logp"] < 1e-5
        assert step.get("head", rank == 1)


def test_what_skyrl_logs_of_an_update_has_the_hooks_numbers(ranks: list[dict[str, Any]]) -> None:
    assert ranks[0]["logged"] == [["draftalign/dropped", "draftalign/overhead_seconds"]] * 4
    assert ranks[1]["logged"] == [[]] * 4


def test_supervised_batches_are_left_out(ranks: list[dict[str, Any]]) -> None:
    """The policy did not write them."""
    assert [found["supervised"] for found in ranks] == [0, 0]


def test_rank_0_registers_the_run_and_sends_heads(ranks: list[dict[str, Any]]) -> None:
    assert [found["heads"] for found in ranks] == [["/runs/default", "/runs/default/head"], []]
    assert [found["first_drafter"] for found in ranks] == [True, None]


def test_the_update_is_bit_identical_to_skyrls_own(ranks: list[dict[str, Any]]) -> None:
    assert [(found["moved"], found["weights"]) for found in ranks] == [(True, True)] * 2


def test_the_service_takes_all_of_it_and_a_worker_trains_on_it(
    ranks: list[dict[str, Any]], serve: Callable[..., RunningService], bench: Bench
) -> None:
    assert learnt([found["kept"] for found in ranks], serve(), bench) == {0: 8, 1: 8}


def test_it_says_that_it_is_on(ranks: list[dict[str, Any]]) -> None:
    for rank, found in enumerate(ranks):
        said, supervised = found["said"]
        assert supervised.startswith("draftalign: supervised batches are left out: the policy did not write them")
        assert said.startswith(f"draftalign is on: SkyRL's rank {rank} sends rollouts to http://127.0.0.1:")


def test_a_policy_that_resumes_goes_on_from_the_step_of_skyrls_own_checkpoint(
    tmp_path: Path, serve: Callable[..., RunningService], bench: Bench
) -> None:
    ranks = STACK.ranks(tmp_path, "resumed")
    for found in ranks:
        assert found["loaded"], "what SkyRL saved"
        assert [step["versions"] for step in found["steps"]] == [[0, 0], [], [8, 8], []]
        assert [step["rollouts"] for step in found["steps"]] == [4, 0, 4, 0]
        assert max(step["features"] for step in found["steps"]) < 2**-7
        assert found["stats"] == {"captured_rollouts": 4, "failures": 0, "skipped_stale": 4, "last_failure": ""}
        assert (found["moved"], found["weights"]) == (True, True)
    assert [found["heads"] for found in ranks] == [["/runs/default"] * 2, []], "each worker's rank 0 registers it"
    assert learnt([found["kept"] for found in ranks], serve(), bench) == {0: 8, 8: 8}


def test_fully_async_rollouts_are_sent_with_the_engines_log_probabilities(
    tmp_path: Path, serve: Callable[..., RunningService], bench: Bench
) -> None:
    """Older weights drew them. Those of the second step came without, so they are left out."""
    ranks = STACK.ranks(tmp_path, "async")
    assert learnt([found["kept"] for found in ranks], serve(), bench) == {0: 8}
    for found in ranks:
        stats = {"captured_rollouts": 4, "failures": 0, "skipped_stale": 8, "last_failure": ""}
        assert found["stats"] == stats
        first, *others = found["steps"]
        assert (first["rollouts"], first["left"], first["versions"]) == (4, 0, [0, 0])
        assert (first["mask"], first["temperature"]) == (True, 1.0)
        assert first["features"] < 2**-7
        assert first["logp"] == 0.0, "as the engines gave them, not as the forward would"
        assert [step["rollouts"] for step in others] == [0, 0, 0]
        assert any(one.startswith("draftalign: fully_async rollouts without the engines'") for one in found["said"])
        assert found["weights"]
