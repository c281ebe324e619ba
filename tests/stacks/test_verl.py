"""verl's own TrainingWorker with the hook in it (`verl_trainer.py`), in its own environment."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from helpers.service.service_fixtures import RunningService
from helpers.trainer.stacks_fixtures import Stack, learnt
from helpers.worker.worker_fixtures import Bench

STACK = Stack(
    "verl",
    "verl_trainer.py",
    "a real verl",
    # A CPU for verl, which is the test's own affair; and what a user sets, with DRAFTALIGN_URL.
    {"VERL_PLATFORM": "cpu", "VERL_USE_EXTERNAL_MODULES": "verl_cpu", "VERL_ENGINE_VENDOR": "draftalign"},
)

pytestmark = STACK.marks


@pytest.fixture(name="ranks", scope="module")
def _ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return STACK.ranks(tmp_path_factory.mktemp(STACK.name))


@pytest.mark.parametrize("rank", [0, 1])
def test_the_pass_for_old_log_probabilities_is_sent_rollout_by_rollout(ranks: list[dict[str, Any]], rank: int) -> None:
    found = ranks[rank]
    assert found["stats"] == {"captured_rollouts": 8, "failures": 0}
    for version, step in enumerate(found["steps"]):
        assert (step["rollouts"], step["left"], step["mask"]) == (4, 0, True)
        assert len(step["versions"]) > 1  # several packed micro-batches
        assert set(step["versions"]) == {version}
        # As the service answers, which is heard when the first file has gone.
        assert set(step["last_rows"]) == {"predicting"} or version == 0
        assert float(step["temperature"]) == 0.7
        assert step["features"] < 2**-7  # bfloat16's rounding, against each rollout alone
        assert step["logp"] < 1e-6  # verl's own
        assert step.get("head", rank == 1)


def test_rank_0_registers_the_run_from_inside_the_first_forward_and_then_sends_heads(
    ranks: list[dict[str, Any]],
) -> None:
    assert [found["heads"] for found in ranks] == [["/runs/default", "/runs/default/head"], []]
    assert [found["first_drafter"] for found in ranks] == [True, None]


def test_nothing_is_sent_by_the_update_which_is_bit_identical_to_verls_own_engines(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert found["sent_in_update"] == [0, 0]
        assert (found["engine"], found["without"]) == ("DraftalignFSDPEngine", "FSDPEngineWithLMHead")
        assert found["moved"]
        assert found["weights"]


def test_what_verl_logs_of_an_update_has_the_hooks_numbers_on_every_rank(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert found["logged_without"] == [{}, {}]
        assert [step["draftalign/dropped"] for step in found["logged"]] == [0.0, 0.0]
        assert all(step["draftalign/overhead_seconds"] > 0 for step in found["logged"])
    assert ranks[0]["logged"] == ranks[1]["logged"], "rank 0's, and no mean over the ranks"


def test_the_service_takes_all_of_it_and_a_worker_trains_on_it(
    ranks: list[dict[str, Any]], serve: Callable[..., RunningService], bench: Bench
) -> None:
    assert learnt([found["kept"] for found in ranks], serve(), bench) == {0: 8, 1: 8}


def test_it_says_that_it_is_on(ranks: list[dict[str, Any]]) -> None:
    for rank, found in enumerate(ranks):
        (said,) = found["said"]
        assert said.startswith(f"draftalign is on: verl's rank {rank} sends rollouts to http://127.0.0.1:")
