"""The reward of verl's run in test_verl_vllm.py. verl loads this file by its path."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any


def compute_score(solution_str: str, extra_info: dict[str, Any], **_: Any) -> float:
    """Whether the answer has an even number of letters; a step for which the test has a file waits until it is gone."""
    holds = Path(os.environ["TESTS_HOLDS"]) / str(extra_info["step"])
    while holds.exists():
        time.sleep(0.05)
    return float(len(solution_str) % 2 == 0)
