"""The service as actors of a real Ray with two local nodes (`ray_service.py`), in an environment of its own."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from failover_fixtures import free_port

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PYTHON = Path(os.environ.get("DRAFTALIGN_RAY_PYTHON", ROOT / ".venv-ray/bin/python"))

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not PYTHON.exists(), reason="no .venv-ray (`make stacks`): nothing was checked on Ray"),
]


@pytest.fixture(name="found", scope="module")
def _found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("ray")
    environment = os.environ | {"PYTHONPATH": str(ROOT), "RAY_USAGE_STATS_ENABLED": "0"}
    command = [str(PYTHON), "-W", "ignore", str(HERE / "ray_service.py"), str(out), str(free_port())]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=580, check=False)
    assert done.returncode == 0, done.stderr[-6000:]
    result: dict[str, Any] = json.loads((out / "found.json").read_text())
    return result


def test_what_was_acknowledged_is_trained_whatever_is_killed(found: dict[str, Any]) -> None:
    assert found["acknowledged"] == 16
    names = ("quiet", "worker killed", "api killed", "node lost")
    assert [found[name] for name in names] == [4, 8, 12, 16]
    assert found["another worker"]


def test_both_parts_share_a_node_and_move_together_when_it_is_lost(found: dict[str, Any]) -> None:
    assert found["one node"]
    assert found["another node"]


def test_nothing_is_left_over_after_down(found: dict[str, Any]) -> None:
    assert found["left over"] == []
