"""slime's own Megatron actor with the hook in it (`slime_trainer.py`), in its own environment.

slime and Megatron-LM are in no package index: SLIME_SOURCE and MEGATRON_SOURCE name checkouts of them, the latter with
slime's own patch on it.
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

NAMED = all(os.environ.get(name) for name in ("SLIME_SOURCE", "MEGATRON_SOURCE"))
VARIABLES = {"DRAFTALIGN_AUX_LAYERS": "0,2,3", "TORCHDYNAMO_DISABLE": "1"}  # slime compiles parts of its losses
STACK = Stack("slime", "slime_trainer.py", "a real slime", VARIABLES)
#: "one" optimizer step follows a rollout, or "two"; with a reference model's pass or without.
WORKING = ["one", "two ref", "one sequence recompute", "one bfloat16"]
OTHER = ["one fails", "two ref resumed", "one resumed", "two silent", "two rollout_logprobs"]

pytestmark = [*STACK.marks, pytest.mark.skipif(not NAMED, reason="SLIME_SOURCE, MEGATRON_SOURCE name no checkouts")]


@pytest.fixture(name="ranks", scope="module")
def _ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two ranks found, TP=2."""
    return STACK.ranks(tmp_path_factory.mktemp("two"), "2", *WORKING, *OTHER)


@pytest.fixture(name="alone", scope="module")
def _alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What one process found that has the whole model."""
    out = tmp_path_factory.mktemp("one")
    STACK.run(out, "1", *WORKING[:2])
    found: dict[str, Any] = json.loads((out / "0.json").read_text())
    return found


@pytest.fixture(name="sleeping", scope="module")
def _sleeping(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """As slime's --offload-train has it: its process groups are destroyed and made again before each rollout."""
    return STACK.ranks(tmp_path_factory.mktemp("sleeps"), "2", "one sleeps")


def all_came_right(found: dict[str, Any], case: str) -> None:
    steps = found["steps"]
    assert [(step["rollouts"], step["left"]) for step in steps] == [(6, 0)] * 3
    assert [step["packed"] for step in steps] == [[2, 2, 1, 1]] * 3, "rollouts of each micro-batch, in slime's order"
    assert [step["versions"] for step in steps] == [[0] * 4, [1] * 4, [2] * 4]
    for step in steps:
        assert (step["mask"], step["rewards"], step["logp"]) == (True, True, 0.0), "the sampler's, to the bit"
        assert step["strata"], "slime's source of each rollout's prompt"
        assert step["temperature"] == pytest.approx(0.7)
        # Beside transformers' Llama in float32: bfloat16's rounding of what is sent, or of each layer.
        assert step["features"] < (2**-4 if "bfloat16" in case else 2**-7)
        assert step["normaliser"] < (2**-4 if "bfloat16" in case else 1e-5)
        assert step["head"], "bit for bit, before its rollouts"
    assert found["heads"] == ["/runs/default", *["/runs/default/head"] * 2], "registered with the policy's own head"
    assert (found["captured_rollouts"], found["failures"], found["skipped_empty"]) == (18, 0, 0)
    assert found["first_drafter"]


@pytest.mark.parametrize("case", WORKING)
def test_rank_0_sends_every_rollout_as_it_is_alone_in_one_process(ranks: list[dict[str, Any]], case: str) -> None:
    all_came_right(ranks[0][case], case)
    assert (ranks[1][case]["heads"], ranks[1][case]["captured_rollouts"]) == ([], 0)


@pytest.mark.parametrize("case", WORKING[:2])
def test_one_process_sends_the_same(alone: dict[str, Any], case: str) -> None:
    all_came_right(alone[case], case)


def test_process_groups_that_slime_makes_again_cost_nothing(sleeping: list[dict[str, Any]]) -> None:
    all_came_right(sleeping[0]["one sleeps"], "one sleeps")


@pytest.mark.parametrize("case", WORKING)
def test_the_service_takes_all_of_it_and_a_worker_trains_on_it(
    ranks: list[dict[str, Any]], serve: Callable[..., RunningService], bench: Bench, case: str
) -> None:
    assert learnt([found[case]["kept"] for found in ranks], serve(), bench) == {0: 6, 1: 6, 2: 6}


def test_slime_has_no_pass_for_log_probabilities_where_one_step_follows(ranks: list[dict[str, Any]]) -> None:
    assert ranks[0]["one"]["passes"] == [False] * 3, "captured is the update's own forward"
    assert ranks[0]["two ref"]["passes"] == [True] * 3


@pytest.mark.parametrize("case", [*WORKING, *OTHER])
def test_the_weights_are_bit_identical_to_slimes_own(ranks: list[dict[str, Any]], case: str) -> None:
    assert [found[case]["weights"] for found in ranks] == [True, True]


def test_a_hook_that_fails_on_one_rank_costs_that_micro_batch_on_all(ranks: list[dict[str, Any]]) -> None:
    found = ranks[0]["one fails"]
    assert [step["rollouts"] for step in found["steps"]] == [6, 4, 6]
    assert [each["one fails"]["failures"] for each in ranks] == [1, 1]
    assert "tensor-parallel rank 1: MemoryError: made by the test" in found["last_failure"]


def test_a_resumed_actor_is_not_told_its_version_before_its_first_training(ranks: list[dict[str, Any]]) -> None:
    with_a_pass, without = (ranks[0][case] for case in ("two ref resumed", "one resumed"))
    assert [step["versions"] for step in with_a_pass["steps"]] == [[], [6] * 4, [7] * 4]
    assert any(
        "their version is not known (before the first training after a resume" in line for line in with_a_pass["said"]
    )
    assert [step["versions"] for step in without["steps"]] == [[5] * 4, [6] * 4, [7] * 4]


def test_rollouts_without_the_samplers_log_probabilities_are_left_out_and_said(ranks: list[dict[str, Any]]) -> None:
    found = ranks[0]["two silent"]
    assert found["captured_rollouts"] == 0
    assert any("they have no log-probabilities of the sampler's" in line for line in found["said"])


def test_steps_after_the_first_have_other_weights_and_are_left_out(ranks: list[dict[str, Any]]) -> None:
    found = ranks[0]["two rollout_logprobs"]
    assert [(step["rollouts"], step["left"]) for step in found["steps"]] == [(4, 2)] * 3
    assert any("rollouts of later steps are left out" in line for line in found["said"])


@pytest.mark.parametrize("case", ["one", "two ref"])
def test_slimes_own_log_has_the_hooks_numbers_of_each_rollout(ranks: list[dict[str, Any]], case: str) -> None:
    """Once for each, by the rank that slime logs on, numbered as slime numbers rollouts."""
    ours = [[one for one in found[case]["logged"] if one[2]] for found in ranks]
    assert [(step, key) for step, key, _ in ours[0]] == [(0, "rollout/step"), (1, "rollout/step"), (2, "rollout/step")]
    assert all("draftalign/dropped" in names for _, _, names in ours[0])
    assert ours[1] == []


def test_it_says_that_it_is_on(ranks: list[dict[str, Any]]) -> None:
    for rank, found in enumerate(ranks):
        first = found["one"]["said"][0]
        assert first.startswith(f"draftalign is on: slime or miles's rank {rank} sends rollouts to http://127.0.0.1:")


def test_it_is_off_and_says_so_where_it_cannot_attach(tmp_path: Path) -> None:
    STACK.run(tmp_path, "1", "one foreign")
    found = json.loads((tmp_path / "0.json").read_text())["one foreign"]
    assert (found["weights"], found["steps"], found["heads"]) == (True, [], [])
    assert found["said"] == ["draftalign is OFF: this policy's rollouts are not sent"]
