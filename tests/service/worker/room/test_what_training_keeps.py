"""A training on answers of many lengths keeps nothing but its rollouts, once its heap's free pages are returned."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[4]


def test_turns_with_answers_of_many_lengths_keep_little_memory(tmp_path: Path) -> None:
    """Of 2,000 tokens a turn 1 MiB of files stays mapped, as recent rollouts.

    Free pages of the heap would be 50 MiB a turn, and so would caches of 1,024 products (`drafter.model.matmul`).
    """
    arguments = ["--size", "demo", "--tokens", "2000", "--rollouts", "64", "--batches", "5", "--json"]
    subprocess.run(
        [sys.executable, "-m", "benchmarks.worker_window", *arguments, str(tmp_path / "turns.json")],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        check=True,
        capture_output=True,
    )
    resident = [turn["resident_mib"] for turn in json.loads((tmp_path / "turns.json").read_text())]
    assert len(resident) == 5
    assert resident[-1] - resident[0] < 40, resident
