"""Files of a drafter, of rollouts and of an embedding; a policy that can decode, and a drafter trained for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from decode_fixtures import default_target, schooled
from safetensors.torch import save_file
from worker_fixtures import World

from drafter.files.checkpoint import (
    write_drafter,
)
from drafter.model.eagle3 import Eagle3Drafter


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


@pytest.fixture
def target() -> Any:
    return default_target()


@pytest.fixture
def trained() -> Eagle3Drafter:
    return schooled()
