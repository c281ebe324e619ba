"""Files of a drafter, of rollouts and of an embedding."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers.worker.worker_fixtures import World
from safetensors.torch import save_file

from drafter.files.checkpoint import (
    write_drafter,
)


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture
def drafter_dir(tmp_path: Path, world: World) -> Path:
    directory = tmp_path / "drafter"
    directory.mkdir()
    write_drafter(directory, world.trained_drafter(tmp_path), dtype=torch.bfloat16)
    return directory


@pytest.fixture
def rollouts(tmp_path: Path, world: World) -> Path:
    directory = tmp_path / "rollouts"
    directory.mkdir()
    for index in range(3):
        data = world.rollout_file(f"file{index}", policy_version=index, temperature=(1.0, 0.7, 1.0)[index])
        (directory / f"{index}.safetensors").write_bytes(data)
    return directory


@pytest.fixture
def embedding(tmp_path: Path, world: World) -> Path:
    save_file({"model.embed_tokens.weight": world.embed}, tmp_path / "embedding.safetensors")
    return tmp_path / "embedding.safetensors"
