"""The service as actors of a real Ray with two local nodes (`ray_service.py`), in an environment of its own.

And an actor of a trainer's, whose class Ray's setup hook extends (`ray_actors.py`).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from ports import free_port
from stacks_fixtures import Stack

STACK = Stack("ray", "ray_service.py", "Ray", {"RAY_USAGE_STATS_ENABLED": "0"})
ACTORS = Stack("ray", "ray_actors.py", "Ray", {"RAY_USAGE_STATS_ENABLED": "0"})

pytestmark = STACK.marks


@pytest.fixture(name="found", scope="module")
def _found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("ray")
    STACK.run(out, str(free_port()))
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


def test_an_actor_has_what_its_class_was_extended_by_after_ray_had_decorated_it(tmp_path: Path) -> None:
    ACTORS.run(tmp_path)
    assert json.loads((tmp_path / "found.json").read_text()) == [True] * 5
