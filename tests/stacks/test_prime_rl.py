"""prime-rl's own RL loop with the hook in it (`prime_rl_trainer.py`), in its own environment.

prime-rl is in no package index: PRIME_RL_SOURCE names a checkout of it.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.service.service_fixtures import RunningService
from helpers.trainer.stacks_fixtures import Stack, learnt
from helpers.worker.worker_fixtures import Bench

STACK = Stack("prime_rl", "prime_rl_trainer.py", "a real prime-rl", {"DRAFTALIGN_AUX_LAYERS": "2,4,5"})
SOURCE = os.environ.get("PRIME_RL_SOURCE", "")
#: SHA-256 of what the adapter was written against: prime-rl v0.8.1.dev67, 559b44772e471d1538537b8805cc77f3824a5e64.
READ = {
    "rl/train.py": "84a75d465b3420bd1282369855e172100827013f1208577fdb80992ac6526f0d",
    "rl/data.py": "ab458295e2e86f3d3c5d635e53bf8883223a6abb43f4c9a597b829478cf3156e",
    "batch.py": "6ab14a0c30ed662e27a485bf9d5f6c42a4982174926a2c7dc33e1ab8f6fa7dea",
    "model.py": "99ac09e057d152a111b84536a89fc555c40412cdc19db9c3d47e6cce576f368b",
}

pytestmark = [*STACK.marks, pytest.mark.skipif(not SOURCE, reason="PRIME_RL_SOURCE names no checkout of prime-rl")]


@pytest.fixture(name="ranks", scope="module", params=["float32", "bfloat16"])
def _ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return [found | {"case": request.param} for found in STACK.ranks(tmp_path_factory.mktemp("sent"), request.param)]


def test_it_is_the_source_that_the_adapter_was_written_against() -> None:
    trainer = Path(SOURCE) / "src/prime_rl/trainer"
    assert {name: hashlib.sha256((trainer / name).read_bytes()).hexdigest() for name in READ} == READ


@pytest.mark.parametrize("rank", [0, 1])
def test_every_rollout_of_a_packed_row_is_sent_as_it_is_alone(ranks: list[dict[str, Any]], rank: int) -> None:
    found = ranks[rank]
    count = (12, 18)[rank]  # of three steps with ten, by prime-rl's own packing
    assert found["extended"] == [True] * 3
    assert found["stats"] == {"captured_rollouts": count, "failures": 0, "skipped_empty": 0, "last_failure": ""}
    sent = found["sent"]
    assert (sent["rollouts"], sent["left"], found["expected"]) == (count, 0, count)
    assert max(sent["packed"]) > 1
    assert (found["graphs"] > 0) is (found["case"] == "bfloat16"), "prime-rl compiles its layers by default"
    assert found["breaks"] == 0
    assert (sent["mask"], sent["logp"]) == (True, 0.0), "the sampler's log-probabilities, to the bit"
    assert sent["strata"], "the name of each rollout's environment"
    assert sent["temperature"] == pytest.approx(0.7)
    # bfloat16 rounds in each of eight layers of prime-rl's own, and elsewhere in transformers'.
    features, normaliser = (2**-7, 1e-5) if found["case"] == "float32" else (2**-5, 2**-5)
    assert sent["features"] < features
    assert sent["normaliser"] < normaliser
    assert sent.get("head", rank == 1)


def test_the_version_is_that_of_the_weights_that_were_broadcast_last(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert found["sent"]["versions"] == [0, 0, 0, 1, 1, 1, 2, 2, 2], "three micro-batches a step"


def test_rank_0_registers_the_run_and_sends_heads(ranks: list[dict[str, Any]]) -> None:
    assert [found["heads"] for found in ranks] == [["/runs/default", *["/runs/default/head"] * 2], []]
    assert [found["first_drafter"] for found in ranks] == [True, None]


def test_the_weights_are_bit_identical_to_prime_rls_own(ranks: list[dict[str, Any]]) -> None:
    assert [(found["weights"], found["moved"]) for found in ranks] == [(True, True)] * 2


def test_what_prime_rl_logs_has_the_hooks_numbers(ranks: list[dict[str, Any]]) -> None:
    assert ranks[0]["logged"] == ["draftalign/dropped", "draftalign/overhead_seconds"]


def test_the_service_takes_all_of_it_and_a_worker_trains_on_it(
    ranks: list[dict[str, Any]], serve: Callable[..., RunningService], bench: Bench
) -> None:
    assert learnt([found["kept"] for found in ranks], serve(), bench) == {0: 10, 1: 10, 2: 10}


def test_it_says_that_it_is_on(ranks: list[dict[str, Any]]) -> None:
    for rank, found in enumerate(ranks):
        (said,) = found["said"]
        assert said.startswith(f"draftalign is on: prime-rl's rank {rank} sends rollouts to http://127.0.0.1:")


def test_a_hook_that_fails_on_one_rank_costs_that_rank_only(tmp_path: Path) -> None:
    well, broken = STACK.ranks(tmp_path, "broken")
    assert (well["stats"]["captured_rollouts"], well["stats"]["failures"]) == (12, 0)
    assert (broken["stats"]["captured_rollouts"], broken["stats"]["failures"]) == (0, 9)
    assert "no room for logits" in broken["stats"]["last_failure"]
    assert (well["weights"], broken["weights"]) == (True, True)
