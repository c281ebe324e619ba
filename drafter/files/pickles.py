"""Tensors of the two pickles that people have drafters in, without running what else a pickle may hold.

Nothing but `draftalign convert --pickle` comes here.
"""

from __future__ import annotations

import warnings
import zipfile
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from drafter.errors import CheckpointError
from drafter.files.checkpoint import MODEL_FILE

#: A state_dict, as SafeAILab publishes its drafters.
STATE_DICT: Final = "pytorch_model.bin"
#: SpecForge's, which has one among a trainer's settings.
TRAINING_STATE: Final = "training_state.pt"


def tensors_of(path: Path) -> dict[str, Tensor]:
    """Plain dense tensors by name, mapped from the file: they may overlap, repeat themselves and change with it.

    Raises `CheckpointError` for whatever else the file holds, code that it would run among it.
    """
    found = _unpickled(path)
    if path.name == TRAINING_STATE:
        found = _draft_state(found, path)
    if not isinstance(found, dict) or not all(isinstance(name, str) and _plain(t) for name, t in found.items()):
        raise CheckpointError(
            f"{path} must hold plain dense tensors by name and nothing else (no sparse, quantized or meta ones); save "
            f"the drafter's as {MODEL_FILE}"
        )
    return found


def _unpickled(path: Path) -> Any:
    """What torch's restricted unpickler makes of a file: containers, numbers, strings and tensors, mapped from it.

    It imports and calls nothing that the file names but a fixed list of torch's own constructors. The two known ways
    around it (CVE-2025-32434, CVE-2026-24747) are of versions before those that draftalign runs with.
    """
    try:
        with zipfile.ZipFile(path) as archive:  # torch maps compressed entries as they are, as other numbers
            if any(entry.compress_type != zipfile.ZIP_STORED for entry in archive.infolist()):
                raise zipfile.BadZipFile("compressed, which torch.save does not do")  # noqa: TRY301 - one way out
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.load(path, weights_only=True, map_location="cpu", mmap=True)
    except Exception as error:  # whatever a damaged or hostile file makes of the unpickler
        # Only torch's first sentence: the next ones advise to allow what was refused.
        reason = str(error).rpartition("WeightsUnpickler error: ")[2].split(". ")[0].partition("\n")[0]
        raise CheckpointError(
            f"{path} cannot be read as tensors alone ({type(error).__name__}: {reason!a:.200}); fetch it again, or "
            f"where it was made save the drafter's tensors as {MODEL_FILE}"
        ) from error


def _draft_state(state: Any, path: Path) -> Any:
    """The weights within what SpecForge's trainer saves; its optimizer and settings stay unread."""
    if not isinstance(state, dict) or "draft_state_dict" not in state:
        raise CheckpointError(
            f"{path} has no draft_state_dict, where SpecForge's trainer puts the weights; give the directory of one of "
            f"its checkpoints, or a state_dict as {STATE_DICT}"
        )
    strategy = state.get("strategy", "eagle3")
    if strategy != "eagle3":
        raise CheckpointError(f"{path} was trained as {strategy!r:.80}; only SpecForge's eagle3 is an EAGLE-3 drafter")
    weights = state["draft_state_dict"]
    if isinstance(weights, dict) and "embed_tokens.weight" in weights:
        raise CheckpointError(
            f"{path} holds embed_tokens.weight, which SpecForge saves only where it was trained: without it this is "
            "another drafter, and engines would overwrite the policy's. Train one with the embedding frozen"
        )
    return weights


def _plain(value: object) -> bool:
    """Whether it is a tensor whose elements are in memory as they read."""
    return (
        isinstance(value, Tensor)
        and type(value) in (Tensor, torch.nn.Parameter)
        and value.layout == torch.strided
        and value.device.type == "cpu"
        and not (value.is_quantized or value.is_nested or value.is_neg() or value.is_conj())
    )
