"""TRL's own GRPOTrainer under DeepSpeed's ZeRO-3, with the hook in it (`sharded_trl.py`), in OpenRLHF's environment."""

from __future__ import annotations

import json
from typing import Any

import pytest
from helpers.trainer.stacks_fixtures import ROOT, Stack

CONFIG = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},  # every parameter is sharded
    "zero_force_ds_cpu_optimizer": False,
}
#: How `accelerate launch` says ZeRO-3.
LAUNCHED = {"ACCELERATE_USE_DEEPSPEED": "true", "DS_ACCELERATOR": "cpu", "HF_HUB_OFFLINE": "1"}
SCRIPT = str(ROOT / "tests/rl_hooks/trainer/sharded_trl.py")

pytestmark = Stack("openrlhf", SCRIPT, "TRL with ZeRO-3").marks


def test_trls_grpo_under_zero3_sends_all_but_the_first_step(tmp_path_factory: pytest.TempPathFactory) -> None:
    """TRL multiplies by the head outside of its module: at first that is whole in TRL's context alone, later always."""
    directory = tmp_path_factory.mktemp("zero3")
    config = directory / "zero3.json"
    config.write_text(json.dumps(CONFIG))
    variables = LAUNCHED | {"ACCELERATE_DEEPSPEED_CONFIG_FILE": str(config), "TRL_EXPERIMENTAL_SILENCE": "1"}
    ranks: list[dict[str, Any]] = Stack("openrlhf", SCRIPT, "", variables).ranks(directory, "zero3")
    for rank, found in enumerate(ranks):
        assert found["versions"] == [1, 2]
        assert (found["stats"]["captured_rollouts"], found["stats"]["failures"]) == (16, 1)
        assert "no rank held the whole lm_head" in found["stats"]["last_failure"]
        for step in found["steps"]:  # each rollout alone, unsharded and unpadded; features within bfloat16's rounding
            assert step["rollouts"] == 8
            assert step["features"] < 2**-7
            assert max(step["lse"], step["logp"]) < 1e-5
        assert (found["sharded"], found["head"], found["same losses"], found["weights"]) == (True, True, True, True)
        kinds = ["PUT /runs/r", *["PUT /runs/r/head", "POST /rollouts?run=r"] * 2]
        assert found["requests"] == (kinds if rank == 0 else kinds[2::2])
