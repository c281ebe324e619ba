"""Megatron-Core's own GPTModel at TP=2 with the hook on it (`megatron_trainer.py`), in its own environment."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from helpers.service.service_fixtures import RunningService
from helpers.trainer.stacks_fixtures import Stack, learnt
from helpers.worker.worker_fixtures import Bench

STACK = Stack("megatron", "megatron_trainer.py", "Megatron-Core")
WORKING = [
    *("untied", "tied", "untied gathered"),
    *("untied sequence", "tied sequence", "untied packed", "tied packed sequence"),
    "untied bfloat16 sequence",
    *("tied predicting sequence", "untied packed predicting"),
]
FAILING = ["untied sequence fails", "untied plan", "untied absent", "untied packed seam", "untied foreign"]

pytestmark = STACK.marks


@pytest.fixture(name="ranks", scope="module")
def _ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return STACK.ranks(
        tmp_path_factory.mktemp(STACK.name), *WORKING, *FAILING, "untied unsent", "untied sequence lost", "refused"
    )


@pytest.mark.parametrize("case", WORKING)
def test_rank_0_sends_what_one_process_with_all_the_weights_computes(ranks: list[dict[str, Any]], case: str) -> None:
    first, second = (found[case] for found in ranks)
    assert [step["version"] for step in first["steps"]] == [0, 1, 2]
    for step in first["steps"]:
        assert step["own"]  # the states of Megatron's own forward, bit for bit
        assert step["first"]  # the state entering layer 0 is of one process, bit for bit
        # Later ones: two ranks' sums, and bfloat16's rounding, once or in each layer.
        assert step["features"] < (2**-4 if "bfloat16" in case else 2**-7)
        assert step["lse"] < 1e-5
        assert step["logp"] < 2e-5
        assert step["head"]  # bit for bit, before its rollouts
    wanted = "predicting" if "predicting" in case else "all"  # as the service answers
    assert [step["last_rows"] for step in first["steps"]] == [wanted] * 3
    assert first["steps"][0]["embedding"]
    assert first["requests"][:2] == ["PUT /runs/r", "POST /rollouts?run=r"]
    assert first["requests"][2:] == ["PUT /runs/r/head", "POST /rollouts?run=r"] * 2
    assert second["requests"] == []
    assert [first["failures"], second["failures"]] == [0, 0]
    assert first["metrics"]["draftalign/dropped"] == 0.0


@pytest.mark.parametrize("case", WORKING)
def test_the_service_takes_all_of_it_and_a_worker_trains_on_it(
    ranks: list[dict[str, Any]], case: str, serve: Callable[..., RunningService], bench: Bench
) -> None:
    assert learnt([found[case]["kept"] for found in ranks], serve(), bench) == {0: 4, 1: 4, 2: 4}


def test_a_head_that_could_not_be_queued_is_sent_with_the_next_batch(ranks: list[dict[str, Any]]) -> None:
    first, second = (found["untied unsent"] for found in ranks)
    posts = ["POST /rollouts?run=r"] * 3
    assert first["requests"] == ["PUT /runs/r", posts[0], "PUT /runs/r/head", *posts[1:]]
    assert [first["head_updates"], first["failures"], second["failures"]] == [1, 0, 0]


def test_a_run_that_the_service_has_lost_is_registered_again_with_the_weights_of_all_ranks(
    ranks: list[dict[str, Any]],
) -> None:
    first, second = (found["untied sequence lost"] for found in ranks)
    post = "POST /rollouts?run=r"
    assert first["requests"] == ["PUT /runs/r", post, "PUT /runs/r", post, "PUT /runs/r/head", post]
    assert second["requests"] == []
    again = first["steps"][1]
    assert (again["head"], again["embedding"], again["head_version"]) == (True, True, 1)
    assert [first["failures"], second["failures"]] == [0, 0]


@pytest.mark.parametrize("case", [*WORKING, *FAILING, "untied sequence lost"])
def test_the_weights_are_bit_identical_with_and_without_the_hook(ranks: list[dict[str, Any]], case: str) -> None:
    assert [found[case]["weights"] for found in ranks] == [True, True]


@pytest.mark.parametrize(("case", "counted"), [("untied sequence fails", [1, 1]), ("untied plan", [1, 0])])
def test_a_hook_that_fails_on_one_rank_costs_that_batch_on_all_and_hangs_none(
    ranks: list[dict[str, Any]], case: str, counted: list[int]
) -> None:
    assert [found[case]["failures"] for found in ranks] == counted
    assert [step["files"] for step in ranks[0][case]["steps"]] == [1, 1, 2]
    assert "MemoryError: made by the test" in ranks[0][case]["last_failure"]
    assert not ranks[0][case]["off"]
    # The head that is missed goes with the next batch.
    assert ranks[0][case]["requests"][-2:] == ["PUT /runs/r/head", "POST /rollouts?run=r"]


def test_a_rank_that_never_captures_costs_the_others_one_wait(ranks: list[dict[str, Any]]) -> None:
    found = ranks[0]["untied absent"]
    assert found["off"]
    assert [step["files"] for step in found["steps"]] == [1, 1, 1]
    assert "did not come to the exchange" in found["last_failure"]


def test_a_packed_row_told_in_another_way_than_the_forward_is_refused(ranks: list[dict[str, Any]]) -> None:
    assert ranks[0]["untied packed seam"]["failures"] == 3
    assert "packed_seq_params say that sequences begin at" in ranks[0]["untied packed seam"]["last_failure"]
    assert ranks[0]["untied packed seam"]["requests"] == ["PUT /runs/r"]


def test_a_generated_token_that_no_tokenizer_has_is_refused(ranks: list[dict[str, Any]]) -> None:
    assert [found["untied foreign"]["failures"] for found in ranks] == [3, 3]
    assert "but the vocabulary has 61" in ranks[0]["untied foreign"]["last_failure"]
    assert ranks[0]["untied foreign"]["requests"] == ["PUT /runs/r"]


def test_what_one_rank_cannot_serve_is_refused_on_all_and_nothing_is_sent(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert (
            "tensor-parallel rank 1: UnsupportedModelError: the config's vocab_size is" in found["refused"]["refused"]
        )
