"""What is sent from a policy of two processes (FSDP2, DDP), against a whole model of one process."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from helpers.forked import ROOT, run_fork

#: How trainers wrap: layers and the root (verl, accelerate), with and without freeing; [norm, lm_head] as one unit
#: (torchtitan, prime-rl); lm_head and the embedding alone; tied; mixed precision; a fused loss; checkpointing; DDP.
WHOLE = [
    "root",
    "root keep early",
    "group",
    "head early",
    "embedding head",
    "root tied",
    "root bf16",
    "root fused",
    "root checkpoint",
    "ddp checkpoint",
    "ddp tied early",
    "root packed",
]
NEVER_WHOLE = "head fused"
BROKEN = "root broken"

pytestmark = pytest.mark.slow


@pytest.fixture(name="ranks", scope="module")
def _ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    out = tmp_path_factory.mktemp("ranks")
    script = str(Path(__file__).with_name("sharded_trainer.py"))
    cases = [str(out), *WHOLE, NEVER_WHOLE, BROKEN]
    done = run_fork("trainer", script, *cases, directory=ROOT, environment=os.environ, seconds=280)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads((out / f"{rank}.json").read_text()) for rank in (0, 1)]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("case", WHOLE)
def test_what_a_sharded_policy_sends_equals_a_whole_models_bit_for_bit(
    ranks: list[dict[str, Any]], case: str, rank: int
) -> None:
    found = ranks[rank][case]
    assert found["stats"] == {"captured_rollouts": 8, "failures": 0, "last_failure": ""}
    for step in found["steps"]:
        assert (step["tokens"], step["rows"], step["logprobs"], step["lse"]) == (True, True, True, True)
        assert step["logits"] < 1e-5  # the trainer's own logits
        # Alone the sums run in another order; 2^-8 is bfloat16's, and mixed precision rounds at each layer.
        assert step["alone"] < (0.05 if "bf16" in case else 2**-7)
        if rank == 0:  # it tells the service of the weights
            assert (step["head"], step["embedding"]) == (True, True)
    assert len(found["steps"]) == 2
    kinds = ["PUT /runs/r", "POST /rollouts?run=r", "PUT /runs/r/head", "POST /rollouts?run=r"]
    assert found["requests"] == (kinds if rank == 0 else kinds[1::2])


def test_a_head_that_is_never_whole_costs_the_normalisers_only(ranks: list[dict[str, Any]]) -> None:
    for rank in (0, 1):
        found = ranks[rank][NEVER_WHOLE]
        assert found["stats"] == {"captured_rollouts": 8, "failures": 0, "last_failure": ""}
        assert [(s["rows"], s["normaliser"]) for s in found["steps"]] == [(True, False)] * 2
        assert found["requests"] == ["POST /rollouts?run=r"] * 2  # nor is a head, or the run


@pytest.mark.parametrize("case", [*WHOLE, NEVER_WHOLE, BROKEN])
def test_the_weights_are_bit_identical_with_and_without_the_hook(ranks: list[dict[str, Any]], case: str) -> None:
    assert [found[case]["weights"] for found in ranks] == [True, True]


def test_a_hook_that_fails_on_one_rank_stops_neither_rank(ranks: list[dict[str, Any]]) -> None:
    well, broken = (found[BROKEN]["stats"] for found in ranks)
    assert (well["captured_rollouts"], well["failures"]) == (8, 0)
    assert (broken["captured_rollouts"], broken["failures"]) == (0, 2)
    # Both failures came inside the forward: where rows are copied, and where they are scored.
    rows, score = ranks[1][BROKEN]["said"]
    assert "out of range" in rows
    assert "no room for logits" in score


@pytest.mark.parametrize("case", [*WHOLE, NEVER_WHOLE, BROKEN])
def test_nothing_of_the_hook_is_left_on_the_model(ranks: list[dict[str, Any]], case: str) -> None:
    assert [(found[case]["closed"], found[case]["hooks_left"]) for found in ranks] == [(True, 0)] * 2


#: How `accelerate launch` says FSDP2.
FSDP2 = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "false",
}


def test_trls_grpo_under_accelerates_fsdp2(tmp_path: Path) -> None:
    script = str(Path(__file__).with_name("sharded_trl.py"))
    done = run_fork("trainer", script, str(tmp_path), directory=ROOT, environment=os.environ | FSDP2, seconds=280)
    assert done.returncode == 0, done.stderr[-4000:]
    for rank in (0, 1):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert found["stats"] == {"failures": 0, "captured_rollouts": 24, "last_failure": "", "skipped_stale": 0}
        assert [step["rollouts"] for step in found["steps"]] == [8, 8, 8]
        for step in found["steps"]:  # each rollout alone, unsharded and unpadded; features within bfloat16's rounding
            assert step["features"] < 2**-7
            assert max(step["lse"], step["logp"]) < 1e-5
        assert (found["sharded"], found["head"], found["same losses"], found["weights"]) == (True, True, True, True)
        kinds = ["PUT /runs/r", *["POST /rollouts?run=r", "PUT /runs/r/head"] * 2, "POST /rollouts?run=r"]
        assert found["requests"] == (kinds if rank == 0 else kinds[1::2])
