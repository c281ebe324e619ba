"""The worker's own checkpoints: candidate, optimizer, controller, what is in hand. One directory, one rename.

A checkpoint is complete or invisible: everything is written and fsynced in a temporary directory, then renamed.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from drafter.checkpoint import read_drafter, write_drafter
from drafter.model import Eagle3Drafter
from drafter.trainer import DrafterTrainer

_PREFIX = "checkpoint-"


class WorkerCheckpoint:
    """The newest checkpoint in a directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def newest(self) -> Path | None:
        """The newest complete checkpoint, or None."""
        return max(self._directory.glob(f"{_PREFIX}*"), default=None, key=lambda p: p.name)

    def save(self, trainer: DrafterTrainer, state: Mapping[str, Any]) -> None:
        """Write the next checkpoint durably, then remove the one before."""
        before = self.newest()
        number = 1 + (int(before.name.removeprefix(_PREFIX)) if before else 0)
        temporary = self._directory / ".writing"
        shutil.rmtree(temporary, ignore_errors=True)
        for part in ("trainer", "drafter"):
            (temporary / part).mkdir(parents=True)
        trainer.save(temporary / "trainer")
        write_drafter(temporary / "drafter", trainer.drafter)
        (temporary / "state.json").write_text(json.dumps(state))
        for path in [*temporary.rglob("*"), temporary]:
            _sync(path)
        temporary.rename(self._directory / f"{_PREFIX}{number:09d}")
        _sync(self._directory)
        if before is not None:
            shutil.rmtree(before)

    def drafter(self, embed_tokens: Tensor) -> Eagle3Drafter:
        """The candidate, as the newest checkpoint holds it."""
        return read_drafter(self._require() / "drafter", embed_tokens)

    def restore(self, trainer: DrafterTrainer) -> dict[str, Any]:
        """Load weights and optimizer into `trainer`; returns the state that was saved beside them."""
        trainer.load(self._require() / "trainer")
        state: dict[str, Any] = json.loads((self._require() / "state.json").read_text())
        return state

    def _require(self) -> Path:
        newest = self.newest()
        if newest is None:
            raise FileNotFoundError(f"{self._directory} holds no checkpoint")
        return newest


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
