"""The service as actors of a real Ray with local nodes (`ray_service.py`), in an environment of its own.

And an actor of a trainer's, whose class Ray's setup hook extends (`ray_actors.py`).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from helpers.ports import free_port
from helpers.service.object_fixtures import BUCKET, running_store
from helpers.trainer.stacks_fixtures import Stack

STACK = Stack("ray", "ray_service.py", "Ray", {"RAY_USAGE_STATS_ENABLED": "0"})
ACTORS = Stack("ray", "ray_actors.py", "Ray", {"RAY_USAGE_STATS_ENABLED": "0"})

pytestmark = STACK.marks


def run(out: Path, what: str) -> dict[str, Any]:
    STACK.run(out, str(free_port()), what)
    result: dict[str, Any] = json.loads((out / "found.json").read_text())
    return result


@pytest.fixture(name="found", scope="module")
def _found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run(tmp_path_factory.mktemp("ray"), "parts")


def test_what_was_acknowledged_is_trained_whatever_is_killed(found: dict[str, Any]) -> None:
    assert found["acknowledged"] == 16
    names = ("quiet", "worker killed", "api killed", "node lost")
    assert [found[name] for name in names] == [4, 8, 12, 16]
    assert found["another worker"]


def test_both_parts_share_a_node_and_move_together_when_it_is_lost(found: dict[str, Any]) -> None:
    assert found["one node"]
    assert found["another node"]


def test_a_worker_with_two_gpus_has_two_ranks_and_sees_both(found: dict[str, Any]) -> None:
    """Each takes the one of its LOCAL_RANK. Ray was told of the GPUs, and there are none: the ranks ran on CPUs."""
    assert found["gpus"] == [["0,1", "0", "1"], ["0,1", "1", "1"]]


def test_ranks_that_the_gpus_are_not_for_are_refused(found: dict[str, Any]) -> None:
    said = [text.partition(",")[0] for text in found["refused"]]
    numbers = [f"DRAFTALIGN_WORKER_RANKS is {n}" for n in ("2", "2", "1")]
    devices = [f"DRAFTALIGN_DEVICE='{name}' names one GPU" for name in ("cuda:0", "cuda:1")]
    seen = "is not what the worker sees: with worker_gpus"
    devices += [f"DRAFTALIGN_DEVICE='cuda:1' {seen} 1 Ray shows it one GPU"]
    devices += [f"DRAFTALIGN_DEVICE='cuda:2' {seen} 0.5 Ray shows it one GPU"]
    devices += ["DRAFTALIGN_DEVICE='gpu' names no device: cpu"] * 3
    assert said == ["worker_gpus is 1.5", "worker_gpus is -1", *numbers, *devices]


def test_nothing_is_left_over_after_down(found: dict[str, Any]) -> None:
    assert found["left over"] == []


def test_nodes_that_share_only_an_object_store_lose_nothing_and_its_keys_come_with_the_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker of two ranks, of which one is killed, and then its node, whose directory nobody else sees."""
    monkeypatch.setenv("DRAFTALIGN_STATE_URL", f"s3://{BUCKET}/state")
    monkeypatch.setenv("DRAFTALIGN_WORKER_RANKS", "2")
    for _ in running_store(monkeypatch):
        found = run(tmp_path, "hosts")
    assert [found[name] for name in ("quiet", "rank killed", "node lost", "acknowledged")] == [4, 8, 12, 12]
    assert found["another rank"]
    assert found["two nodes"]
    assert found["directories"] == 3, "of the API, of the worker, and of its successor"
    assert found["checkpoints"] == 2
    assert found["where the secret is seen"] == []
    assert found["left over"] == []


def test_an_actor_has_what_its_class_was_extended_by_after_ray_had_decorated_it(tmp_path: Path) -> None:
    ACTORS.run(tmp_path)
    assert json.loads((tmp_path / "found.json").read_text()) == [True] * 6
