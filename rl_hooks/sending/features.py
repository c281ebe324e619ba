"""From captured states to a rollout file: normalisers, 8-bit features, and the packing of ragged rows.

Three stages, because they happen at three times:
1. `score_rows`, at once: log-sum-exp and log p need the head *before* the next optimizer step.
2. `StagedRollouts`, at once: cast on the device, then start the copy to the host without waiting for it.
3. `StagedRollouts.encode`, later, in the sender's thread: wait for the copy and lay the file out.

Legend: N rows (tokens) of the packed rollouts, R rollouts, H hidden size, A auxiliary layers, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rl_hooks import wire
from rl_hooks.sending.copies import HostCopies

FeatureDtype = Literal["bfloat16", "float8_e4m3"]
#: Largest finite value of float8_e4m3fn.
_E4M3_MAX: Final = 448.0
#: Logits held at once while normalisers are computed: 2^25 floats are 128 MiB.
LOGITS_AT_ONCE: Final = 1 << 25
_PLAIN: Final = wire.LogitMap()


@dataclass(frozen=True, slots=True)
class Captured:
    """The selected rows of one forward, detached, on the model's device and in its dtype."""

    aux: tuple[Tensor, ...]  # A tensors [N, H]
    last: Tensor  # [N, H]
    boundaries: Mapping[str, Tensor | None] = field(default_factory=dict)  # tell where rollouts begin


@torch.no_grad()
def score_rows(
    last_NH: Tensor,
    head_VH: Tensor,
    next_ids_N: Tensor,
    *,
    temperature: float | Tensor,
    logit_map: wire.LogitMap = _PLAIN,
) -> tuple[Tensor, Tensor]:
    """Return (logsumexp [N], log p of `next_ids` [N]), float32, of softmax(logit_map(last @ head^T) / temperature).

    Temperature 0 (greedy) is scored at 1, as the rollout file says; a tensor [N] holds one above 0 for each row. At
    most 128 MiB of logits exist at a time.
    """
    scale = temperature if isinstance(temperature, Tensor) or temperature > 0 else 1.0
    N, V = last_NH.shape[0], head_VH.shape[0]
    logsumexp_N = last_NH.new_zeros(N, dtype=torch.float32)
    logprob_N = torch.zeros_like(logsumexp_N)
    step = max(1, LOGITS_AT_ONCE // V)
    # An active autocast of the trainer would round the logits once more than the worker does.
    with torch.autocast(last_NH.device.type, enabled=False):
        for begin in range(0, N, step):
            rows = slice(begin, begin + step)
            product = (last_NH[rows].to(head_VH.dtype) @ head_VH.T).float()  # [step, V]
            logits = logit_map.apply(product).div_(scale[rows, None] if isinstance(scale, Tensor) else scale)
            logsumexp_N[rows] = torch.logsumexp(logits, dim=-1)
            logprob_N[rows] = logits.gather(1, next_ids_N[rows, None])[:, 0] - logsumexp_N[rows]
    return logsumexp_N, logprob_N


def to_e4m3(x_NH: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise rows to float8 e4m3 with one float32 scale per row: x ≈ fp8 * scale. Returns ([N, H], [N])."""
    x = x_NH.float()
    # A row of zeros keeps scale 1: dividing by its maximum would make NaN of it.
    largest = x.abs().amax(dim=-1)
    scale_N = torch.where(largest > 0, largest / _E4M3_MAX, torch.ones_like(largest))
    return (x / scale_N[:, None]).to(torch.float8_e4m3fn), scale_N


@dataclass(frozen=True, slots=True)
class PackedIndex:
    """The small host-side arrays of a batch: its tokens, and which of them the policy generated."""

    input_ids: npt.NDArray[np.int32]  # [N]
    cu_seqlens: npt.NDArray[np.int32]  # [R + 1]
    loss_mask: npt.NDArray[np.uint8]  # [N]
    logprobs: npt.NDArray[np.float32] | None  # [N], NaN where unknown; None: take those that were recomputed


class StagedRollouts:
    """Features that are copied to the host. The constructor starts the copies; `encode` waits for them.

    `scored`: normaliser and log p of each row, [N] each; None where no rank ever holds the whole head. Then the index
    has the log-probabilities, and whoever reads the file normalises. `predicting`: `wire.predicting_rows` as a tensor,
    where the file has the last state and its normaliser in these rows only.
    """

    def __init__(
        self,
        index: PackedIndex,
        captured: Captured,
        scored: tuple[Tensor, Tensor] | None,
        *,
        dtype: FeatureDtype = "bfloat16",
        predicting: Tensor | None = None,
    ) -> None:
        self.index = index
        self._last_rows: wire.LastRows = "all"
        if predicting is not None:
            self._last_rows = "predicting"
            captured = replace(captured, last=captured.last.index_select(0, predicting.to(captured.last.device)))
        tensors = _cast(captured, dtype)
        if scored is not None:
            logsumexp_N, tensors["recomputed"] = scored
            tensors["logsumexp"] = logsumexp_N
            if predicting is not None:
                tensors["logsumexp"] = logsumexp_N.index_select(0, predicting.to(logsumexp_N.device))
        self._copies = HostCopies(tensors)
        N, R = len(index.input_ids), len(index.cu_seqlens) - 1
        #: Size of the file's tensors, without the header.
        self.data_bytes = sum(t.numel() * t.element_size() for t in tensors.values()) + 5 * N + 4 * (R + 1)

    def encode(self, metadata: Mapping[str, str]) -> list[bytes | memoryview]:
        """Lay out the rollout file as parts that can be sent without another copy."""
        index, host = self.index, self._copies.wait()
        # An engine may fail to score a token (NaN): then the value of the trainer's own forward is taken.
        given = index.logprobs if index.logprobs is not None else np.full(len(index.input_ids), np.nan, np.float32)
        recomputed = host["recomputed"].numpy() if "recomputed" in host else given
        known = np.where(index.loss_mask == 1, np.where(np.isnan(given), recomputed, given), 0.0)
        file = {
            "input_ids": wire.Tensor.of(index.input_ids, "I32"),
            "cu_seqlens": wire.Tensor.of(index.cu_seqlens, "I32"),
            "loss_mask": wire.Tensor.of(index.loss_mask, "U8"),
            "logprobs": wire.Tensor.of(known.astype(np.float32), "F32"),
        }
        file |= {name: as_wire(tensor) for name, tensor in host.items() if name != "recomputed"}
        return wire.encode(file, {**metadata, "format": wire.FORMATS[self._last_rows]})


def as_wire(tensor: Tensor) -> wire.Tensor:
    """View a contiguous host tensor as a tensor of the wire format."""
    name, width = _WIRE_DTYPES[tensor.dtype]
    # NumPy has neither bfloat16 nor float8: they are sent as unsigned integers of their width.
    array = tensor.contiguous() if width is None else tensor.contiguous().view(width)
    return wire.Tensor.of(array.numpy(), name)


_WIRE_DTYPES: Final[Mapping[torch.dtype, tuple[str, torch.dtype | None]]] = {
    torch.bool: ("BOOL", None),
    torch.uint8: ("U8", None),
    torch.int32: ("I32", None),
    torch.int64: ("I64", None),
    torch.float16: ("F16", None),
    torch.float32: ("F32", None),
    torch.bfloat16: ("BF16", torch.uint16),
    torch.float8_e4m3fn: ("F8_E4M3", torch.uint8),
}


def _cast(captured: Captured, dtype: FeatureDtype) -> dict[str, Tensor]:
    """Cast on the device, writing every auxiliary layer straight into its columns of `aux_hidden` [N, A * H]."""
    N, H = captured.aux[0].shape
    A = len(captured.aux)
    device = captured.last.device
    if dtype == "bfloat16":
        aux = torch.empty(N, A * H, dtype=torch.bfloat16, device=device)
        for i, state_NH in enumerate(captured.aux):
            aux[:, i * H : (i + 1) * H] = state_NH
        return {"aux_hidden": aux, "last_hidden": captured.last.to(torch.bfloat16)}
    if dtype != "float8_e4m3":
        raise ValueError(f"feature dtype must be 'bfloat16' or 'float8_e4m3', got {dtype!r}")
    aux = torch.empty(N, A * H, dtype=torch.float8_e4m3fn, device=device)
    scale_NA = torch.empty(N, A, dtype=torch.float32, device=device)
    for i, state_NH in enumerate(captured.aux):
        aux[:, i * H : (i + 1) * H], scale_NA[:, i] = to_e4m3(state_NH)
    # The last state stays bfloat16: 8 bits would cost the target distribution ~1e-3 nats to save a fifth of the file.
    return {"aux_hidden": aux, "aux_hidden_scale": scale_NA, "last_hidden": captured.last.to(torch.bfloat16)}
