"""AReaL's own FSDP actor with the hook in it (`areal_trainer.py`), in its own environment."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from helpers.service.service_fixtures import RunningService
from helpers.trainer.stacks_fixtures import Stack, learnt
from helpers.worker.worker_fixtures import Bench

STACK = Stack("areal", "areal_trainer.py", "a real AReaL")

pytestmark = STACK.marks


@pytest.fixture(name="ranks", scope="module")
def _ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return STACK.ranks(tmp_path_factory.mktemp(STACK.name))


@pytest.mark.parametrize("rank", [0, 1])
def test_rollouts_are_sent_one_by_one_whatever_weights_drew_them(ranks: list[dict[str, Any]], rank: int) -> None:
    found = ranks[rank]
    assert found["actor"] == "DraftalignPPOActor"
    # Of six rollouts a step one was drawn by the weights before, and one in part.
    assert found["stats"] == {"captured_rollouts": 12, "failures": 0}
    for version, step in enumerate(found["steps"]):
        assert (step["rollouts"], step["left"], step["mask"], step["rewards"]) == (6, 0, True, True)
        assert step["packed"] == [3, 3]  # two packed micro-batches, in AReaL's order
        assert step["strata"], "the workflow's `data_source` of each, in AReaL's order"
        assert set(step["versions"]) == {version}
        assert step["temperature"] == 0.7
        assert step["features"] < 2**-7  # bfloat16's rounding, against each rollout alone
        assert step["logp"] == 0.0  # the sampler's, as the workflow gave them
        assert step.get("head", rank == 1)
    # Of version 0 none is older: where the workflow says -1, a file tells nothing. Then one was begun by the weights
    # before, and one is all theirs.
    assert not any(any(one) for one in found["steps"][0]["behind"])
    assert sorted(map(sum, found["steps"][1]["behind"])) == [0, 0, 0, 0, 4, 10]
    assert found["areals"] == pytest.approx([0.0, 0.0], abs=1e-5), "its own pass agrees with each rollout alone"


def test_an_entry_that_is_not_one_for_each_rollout_sends_no_kinds(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert found["kinds"] == ["chat", "math"]
        assert found["no kinds"] == [None] * 3


def test_what_areal_logs_of_a_step_has_the_hooks_numbers(ranks: list[dict[str, Any]]) -> None:
    assert ranks[0]["logged"] == [["draftalign/dropped", "draftalign/overhead_seconds"]] * 2
    assert ranks[1]["logged"] == [[]] * 2


def test_rank_0_registers_the_run_and_sends_heads(ranks: list[dict[str, Any]]) -> None:
    assert [found["heads"] for found in ranks] == [["/runs/default", "/runs/default/head"], []]
    assert [found["first_drafter"] for found in ranks] == [True, None]


def test_nothing_is_sent_by_the_update_which_is_bit_identical_to_areals_own(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert found["sent_in_update"] == [0, 0]
        assert found["moved"]
        assert found["weights"]


def test_the_service_takes_all_of_it_and_a_worker_trains_on_it(
    ranks: list[dict[str, Any]], serve: Callable[..., RunningService], bench: Bench
) -> None:
    assert learnt([found["kept"] for found in ranks], serve(), bench) == {0: 12, 1: 12}


def test_it_says_that_it_is_on_or_off_and_leaves_the_reference_alone(ranks: list[dict[str, Any]]) -> None:
    for rank, found in enumerate(ranks):
        assert found["hooks of others"] == [None, None, None]
        on, *off = found["said"]
        assert on.startswith(f"draftalign is on: AReaL's rank {rank} sends rollouts to http://127.0.0.1:")
        assert off == ["draftalign is OFF: DRAFTALIGN_URL=http://host:port is not set"] * 2
