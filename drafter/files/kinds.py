"""Drafters of every kind, read from and written to files."""

from __future__ import annotations

from pathlib import Path

from drafter.errors import CheckpointError
from drafter.files.checkpoint import CONFIG_FILE, read_config, read_drafter, write_drafter
from drafter.files.mtp import read_mtp, write_mtp
from drafter.model.draft_model import DraftModel
from drafter.model.eagle3 import Eagle3Drafter
from drafter.mtp.module import MtpDrafter
from drafter.policy import Policy
from rl_hooks.format.drafter import kind_of


def read_kind(directory: Path, policy: Policy | None = None) -> DraftModel:
    """Read a stored drafter of any kind. `policy`: whose copies a file of the kind may hold, as `read_mtp` says."""
    if kind_of(read_config(directory / CONFIG_FILE)) == "mtp":
        return read_mtp(directory, policy)
    return read_drafter(directory)


def write_kind(directory: Path, drafter: DraftModel) -> None:
    """Write a drafter of any kind as engines read it, in float32."""
    if isinstance(drafter, MtpDrafter):
        write_mtp(directory, drafter)
    elif isinstance(drafter, Eagle3Drafter):
        write_drafter(directory, drafter)
    else:
        raise CheckpointError(f"no file layout is known for drafters of kind {drafter.kind!r}; add one here")
