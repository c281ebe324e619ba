"""Detects a row that holds several rollouts, from the arguments of the trainer's forward, and refuses it.

A drafter that is trained on such a row learns to predict the first tokens of one rollout from another, and replay α
counts rounds across the boundary. Three arguments show a boundary between two tokens of a row: positions that go back,
boundaries of sequences (`cu_seq_lens_q` and the like), and sequence numbers that change (`seq_idx`, or an
`attention_mask` that numbers documents). Where the model gets none of them, a packed row looks like one rollout of
several turns.

Legend: B rows, S tokens of a row, padding included.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from torch import Tensor

from rl_hooks.errors import RolloutError

UNPACK: Final = (
    "Packed (padding-free) rows are not supported: they would be trained and replayed across the seam. Send one "
    "rollout a row, padded to [B, S] with an attention_mask, and turn packing off for the forward that is captured."
)
#: Arguments that hold the number of its sequence for each token.
_NUMBERS: Final = ("seq_idx", "attention_mask")


def boundaries_among(kwargs: Mapping[str, Any]) -> dict[str, Tensor]:
    """The arguments of a decoder layer that tell where rollouts begin. Their values are not read here."""
    return {
        name: value
        for name, value in kwargs.items()
        if isinstance(value, Tensor) and (name in ("position_ids", "seq_idx") or name.startswith("cu_seq"))
    }


def refuse_packed(said: Mapping[str, npt.NDArray[Any]], real_BS: npt.NDArray[np.bool_]) -> None:
    """Raise RolloutError for a boundary between two real tokens of a row. Padding may have any position."""
    for name, values in said.items():
        seams_BS = _seams(name, values, real_BS)
        if seams_BS is None or not seams_BS.any():
            continue
        row, token = (int(i) for i in np.argwhere(seams_BS)[0])
        happens = "restart" if name == "position_ids" else "changes" if name in _NUMBERS else "begins another sequence"
        raise RolloutError(f"{name} {happens} at token {token} of row {row}. {UNPACK}")


def _seams(name: str, values: npt.NDArray[Any], real_BS: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_] | None:
    """Real tokens before which there is a seam, [B, S]; None where the values are not of these rows."""
    B, S = real_BS.shape
    if name != "position_ids" and name not in _NUMBERS:
        inside = values.reshape(-1)
        inside = inside[(inside > 0) & (inside < B * S)].astype(np.int64)
        begins = np.zeros(B * S, np.bool_)
        begins[inside] = True
        # After padding nothing was joined: [prompt, response, padding] may be said to be two sequences.
        joined = real_BS.copy()
        joined[:, 1:] &= real_BS[:, :-1]
        joined[:, 0] = False
        return begins.reshape(B, S) & joined
    if values.ndim == 3:
        values = values[0]  # multimodal positions: the first axis of them counts text, or time
    if values.ndim == 1:
        values = values[None]
    if values.ndim != 2 or values.shape[1] != S or values.shape[0] not in (1, B):
        return None
    values_BS = np.broadcast_to(values, (B, S))
    seams = np.zeros((B, S), np.bool_)
    for row in range(B):
        at = np.flatnonzero(real_BS[row])
        step = np.diff(values_BS[row, at])
        seams[row, at[1:]] = step < 0 if name == "position_ids" else step != 0
    return seams
