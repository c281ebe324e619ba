"""miles' own pass for log-probabilities with the slime adapter in it (`miles_trainer.py`), in slime's environment.

MILES_SOURCE and MEGATRON_SOURCE name checkouts: neither is in a package index.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.service.service_fixtures import RunningService
from helpers.trainer.stacks_fixtures import Stack, learnt
from helpers.worker.worker_fixtures import Bench

NAMED = all(os.environ.get(name) for name in ("MILES_SOURCE", "MEGATRON_SOURCE"))
VARIABLES = {"DRAFTALIGN_AUX_LAYERS": "0,2,3", "TORCHDYNAMO_DISABLE": "1"}  # miles compiles parts of its losses
STACK = Stack("slime", "miles_trainer.py", "a real miles", VARIABLES)

pytestmark = [*STACK.marks, pytest.mark.skipif(not NAMED, reason="MILES_SOURCE, MEGATRON_SOURCE name no checkouts")]


def test_miles_pass_for_log_probabilities_is_captured_and_the_references_is_not(
    tmp_path: Path, serve: Callable[..., RunningService], bench: Bench
) -> None:
    first, second = STACK.ranks(tmp_path)
    assert [(step["rollouts"], step["left"], step["packed"]) for step in first["steps"]] == [(4, 0, [2, 1, 1])] * 2
    assert [step["versions"] for step in first["steps"]] == [[0] * 3, [1] * 3]
    for step in first["steps"]:
        assert (step["mask"], step["logp"], step["head"]) == (True, 0.0, True), "to the bit"
        assert step["temperature"] == pytest.approx(0.7)
        assert step["features"] < 2**-7
        assert step["normaliser"] < 1e-5
        assert step["strata"], "none: miles keeps no source of a rollout's prompt for its actor"
    assert (first["captured_rollouts"], first["failures"]) == (8, 0)
    assert (first["heads"], second["heads"]) == (["/runs/default", "/runs/default/head"], [])
    for found in (first, second):
        assert (found["same"], found["weights"]) == (True, True), "miles' own log-probabilities, with us and without"
    assert learnt([first["kept"], second["kept"]], serve(), bench) == {0: 4, 1: 4}
