"""OpenRLHF's own Actor in DeepSpeed's ZeRO-3 with the hook on it (`openrlhf_trainer.py`), in its own environment."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PYTHON = Path(os.environ.get("DRAFTALIGN_OPENRLHF_PYTHON", ROOT / ".venv-openrlhf/bin/python"))
CASES = ["untied", "tied early", "untied padded", "untied predicting"]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        not PYTHON.exists(), reason="no .venv-openrlhf (`make stacks`): nothing was checked on OpenRLHF"
    ),
]


@pytest.fixture(name="ranks", scope="module")
def _ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    out = tmp_path_factory.mktemp("openrlhf")
    paths = os.pathsep.join(map(str, (ROOT, ROOT / "tests")))
    environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    command = [str(PYTHON), "-W", "ignore", str(HERE / "openrlhf_trainer.py"), str(out), *CASES]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=580, check=False)
    assert done.returncode == 0, done.stderr[-6000:]
    return [json.loads((out / f"{rank}.json").read_text()) for rank in (0, 1)]


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
