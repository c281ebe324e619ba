"""From captured states to a rollout file: normalisers, 8-bit features, and the packing of ragged rows.

Three stages, because they happen at three times:
1. `score_rows` or `score_logits`, at once: log-sum-exp and log p need the head *before* the next optimizer step.
2. `StagedRollouts`, at once: cast on the device, then start the copy to the host without waiting for it.
3. `StagedRollouts.encode`, later, in the sender's thread: wait for the copy and lay the file out.

Legend: N rows (tokens) of the packed rollouts, R rollouts, H hidden size, A auxiliary layers, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Final, Literal, NamedTuple, get_args

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rl_hooks import wire
from rl_hooks.sending.copies import HostCopies

#: "float8_e4m3": of the auxiliary states. The last state stays bfloat16, as the target distribution is made of it; 8
#: bits cost that 3e-4 nats (docs/lab/recall.md), and log p an error of 0.02 nats divided by the temperature.
#: "float8_e4m3_all": of the last state too.
FeatureDtype = Literal["bfloat16", "float8_e4m3", "float8_e4m3_all"]
#: Largest finite value of float8_e4m3fn.
_E4M3_MAX: Final = 448.0
#: Logits held at once while normalisers are computed: 2^25 floats are 128 MiB.
LOGITS_AT_ONCE: Final = 1 << 25
#: Most probable tokens that are looked at for top-p: what is left is then known to 0.4 %.
_LOOKED_AT: Final = 256
_PLAIN: Final = wire.LogitMap()
#: Of two prompts every so many rows are compared. Their states are the same if they are no further apart than this part
#: of their norm.
_COMPARED_EVERY: Final = 8
_ROUNDING: Final = 0.1


@dataclass(frozen=True, slots=True)
class Captured:
    """The selected rows of one forward, detached, on the model's device and in its dtype."""

    aux: tuple[Tensor, ...]  # A tensors [N, H]
    last: Tensor  # [N, H]
    boundaries: Mapping[str, Tensor | None] = field(default_factory=dict)  # tell where rollouts begin


def checked_dtype(dtype: FeatureDtype) -> FeatureDtype:
    """The same. Raises ValueError for what is none."""
    if dtype not in get_args(FeatureDtype):
        raise ValueError(f"dtype: expected one of {', '.join(get_args(FeatureDtype))}, got {dtype!r}")
    return dtype


def row_bytes(layers: int, hidden_size: int, dtype: FeatureDtype) -> int:
    """Bytes of a row of a file, at most: features with scales, normaliser, two log-probabilities, id, mask, version."""
    aux = layers * (2 * hidden_size if dtype == "bfloat16" else hidden_size + 4)
    last = hidden_size + 4 if dtype == "float8_e4m3_all" else 2 * hidden_size
    return aux + last + 21


@torch.no_grad()
def score_rows(
    last_NH: Tensor,
    head_VH: Tensor,
    next_ids_N: Tensor,
    *,
    temperature: float | Tensor,
    top_p: float = 1.0,
    top_k: int = 0,
    logit_map: wire.LogitMap = _PLAIN,
) -> tuple[Tensor, Tensor]:
    """Return (logsumexp [N], log p of `next_ids` [N]), float32, of softmax(logit_map(last @ head^T) / temperature).

    Temperature 0 (greedy) is scored at 1, as the rollout file says; a tensor [N] holds one above 0 for each row. With
    `top_p` below 1 or `top_k` above 0, log p is of what top-k, then top-p, leave of that, and logsumexp of all. At most
    128 MiB of logits exist at a time.
    """

    def product(rows: slice) -> Tensor:
        return last_NH[rows].to(head_VH.dtype) @ head_VH.T

    # An active autocast of the trainer would round the logits once more than the worker does.
    with torch.autocast(last_NH.device.type, enabled=False):
        return score_logits(
            product, len(head_VH), next_ids_N, temperature=temperature, top_p=top_p, top_k=top_k, logit_map=logit_map
        )


@torch.no_grad()
def score_logits(
    logits_of: Callable[[slice], Tensor],
    vocab_size: int,
    next_ids_N: Tensor,
    *,
    temperature: float | Tensor,
    top_p: float = 1.0,
    top_k: int = 0,
    logit_map: wire.LogitMap = _PLAIN,
) -> tuple[Tensor, Tensor]:
    """What `score_rows` returns, of lm_head's output: `logits_of` returns a copy of that of some rows, [n, V]."""
    scale = temperature if isinstance(temperature, Tensor) or temperature > 0 else 1.0
    parts: list[tuple[Tensor, Tensor]] = []
    step = max(1, LOGITS_AT_ONCE // vocab_size)
    for begin in range(0, max(1, len(next_ids_N)), step):  # one part, if an empty one, where there are no rows
        rows = slice(begin, begin + step)
        logits = logit_map.apply(logits_of(rows).float())
        if isinstance(scale, Tensor):
            logits = logits.div_(scale[rows, None])
        elif scale != 1.0:
            logits = logits.div_(scale)
        logsumexp_n = torch.logsumexp(logits, dim=-1)
        logprob_n = logits.gather(1, next_ids_N[rows, None])[:, 0] - logsumexp_n
        if top_p < 1 or top_k:
            logprob_n -= _log_kept(logits, logsumexp_n, top_p, top_k)
        parts.append((logsumexp_n, logprob_n))
    if len(parts) == 1:
        return parts[0]
    logsumexps, logprobs = zip(*parts, strict=True)
    return torch.cat(logsumexps), torch.cat(logprobs)


def scores_of_slice(logsumexp_N: Tensor, logprob_N: Tensor, own_ids_N: Tensor, width: int) -> Tensor:
    """One rank's part of `joined_scores`, float32 [2, N], where each holds a slice of the vocabulary's rows.

    `logsumexp`, `logprob`: of `score_logits` over the slice, for `own_ids` (counted from its first token) held within
    its `width`. The part is that logsumexp, and the token's logit: -inf where it is another rank's.
    """
    mine = (own_ids_N >= 0) & (own_ids_N < width)
    return torch.stack([logsumexp_N, torch.where(mine, logprob_N + logsumexp_N, -torch.inf)])


def joined_scores(parts_W2N: Tensor) -> Tensor:
    """float32 [2, N], (logsumexp, log p), from each rank's `scores_of_slice`; NaN where one of them has NaN.

    The softmax's normaliser is the sum of those of the slices; the label's logit is that of the one rank that has it.
    """
    logsumexp = parts_W2N[:, 0].logsumexp(dim=0)
    return torch.stack([logsumexp, parts_W2N[:, 1].amax(dim=0) - logsumexp])


def _log_kept(logits_nV: Tensor, logsumexp_n: Tensor, top_p: float, top_k: int) -> Tensor:
    """Log of the probability [n] that top-k, then top-p, leave of softmax(logits).

    A vocabulary is not sorted for top-p alone. Where the `_LOOKED_AT` most probable tokens do not reach it, what is
    left lies between top_p and top_p + 1 / _LOOKED_AT: top_p is taken.
    """
    most = min(top_k or _LOOKED_AT, logits_nV.shape[1])
    total_nk = (logits_nV.topk(most).values - logsumexp_n[:, None]).exp().cumsum(-1)
    whole = total_nk[:, -1:] if top_k else torch.ones_like(total_nk[:, -1:])
    last = (total_nk < top_p * whole).sum(-1, keepdim=True)
    left = torch.where(last < most, total_nk.gather(1, last.clamp(max=most - 1)), top_p)
    return left[:, 0].log()


@torch.no_grad()
def chosen_logits(
    last_NH: Tensor,
    head_VH: Tensor,
    next_ids_N: Tensor,
    *,
    temperature: float,
    logit_map: wire.LogitMap = _PLAIN,
) -> Tensor:
    """logit_map(last @ head^T) / temperature of `next_ids` only: float32 [N], of N rows of the head."""
    found_N = torch.empty(len(next_ids_N), dtype=torch.float32, device=last_NH.device)
    step = max(1, LOGITS_AT_ONCE // last_NH.shape[1])
    for begin in range(0, len(next_ids_N), step):
        rows = slice(begin, begin + step)
        chosen_nH = head_VH.index_select(0, next_ids_N[rows]).float()
        found_N[rows] = chosen_nH.mul_(last_NH[rows].to(head_VH.dtype)).sum(-1)
    logit_map.apply(found_N)
    return found_N.div_(temperature if temperature > 0 else 1.0)


def to_e4m3(x_NH: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise rows to float8 e4m3 with one float32 scale per row: x ≈ fp8 * scale. Returns ([N, H], [N])."""
    x = x_NH.float()
    scale_N = x.abs().amax(dim=-1) / _E4M3_MAX
    # A scale of zero makes NaN of its row, and one below float32's normal range is too coarse to divide by: with scale
    # 1 such a row is zeros.
    scale_N = torch.where(scale_N >= torch.finfo(torch.float32).tiny, scale_N, torch.ones_like(scale_N))
    return (x / scale_N[:, None]).to(torch.float8_e4m3fn), scale_N


@dataclass(frozen=True, slots=True)
class PackedIndex:
    """The small host-side arrays of a batch: its tokens, and which of them the policy generated."""

    input_ids: npt.NDArray[np.int32]  # [N]
    cu_seqlens: npt.NDArray[np.int32]  # [R + 1]
    loss_mask: npt.NDArray[np.uint8]  # [N]
    logprobs: npt.NDArray[np.float32] | None  # [N], NaN where unknown; None: take those that were recomputed
    versions_behind: npt.NDArray[np.int32] | None = None  # [N], as a file has it; None: not known


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
        self._layers = len(captured.aux)
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
        self.data_bytes = sum(t.numel() * t.element_size() for t in tensors.values()) + 9 * N + 4 * (R + 1)

    def encode(self, metadata: Mapping[str, str], *, takes: Collection[str]) -> list[bytes | memoryview]:
        """Lay out the rollout file as parts that can be sent without another copy.

        `takes`: optional tensors that the service takes. With `aux_rows` the auxiliary states of a prompt that several
        rollouts share are there once, where they are alike; that takes a copy of those that are left.
        """
        index, host = self.index, self._copies.wait()
        # An engine may fail to score a token (NaN, -inf): then the value of the trainer's own forward is taken.
        given = index.logprobs if index.logprobs is not None else np.full(len(index.input_ids), np.nan, np.float32)
        recomputed = host["recomputed"].numpy() if "recomputed" in host else given
        known = np.where(index.loss_mask == 1, np.where(np.isfinite(given), given, recomputed), 0.0)
        file = {
            "input_ids": wire.Tensor.of(index.input_ids, "I32"),
            "cu_seqlens": wire.Tensor.of(index.cu_seqlens, "I32"),
            "loss_mask": wire.Tensor.of(index.loss_mask, "U8"),
            "logprobs": wire.Tensor.of(known.astype(np.float32), "F32"),
        }
        if index.versions_behind is not None and "versions_behind" in takes:
            file["versions_behind"] = wire.Tensor.of(index.versions_behind, "I32")
        scale = host.get("aux_hidden_scale")
        rows = shared_rows(index, host["aux_hidden"], scale, self._layers) if "aux_rows" in takes else None
        if rows is not None:
            file["aux_rows"] = wire.Tensor.of(rows.places, "I32")
            aux = {name: host[name] for name in ("aux_hidden", "aux_hidden_scale") if name in host}
            host = {**host, **{name: bytes_of(tensor)[rows.kept].view(tensor.dtype) for name, tensor in aux.items()}}
        file |= {name: as_wire(tensor) for name, tensor in host.items() if name != "recomputed"}
        return wire.encode(file, {**metadata, "format": wire.FORMATS[self._last_rows]})


class SharedRows(NamedTuple):
    """Rows of a packed batch of which several tokens share one."""

    places: npt.NDArray[np.int32]  # [N], among those that are kept
    kept: Tensor  # int64, ascending


def shared_rows(index: PackedIndex, aux: Tensor, scale: Tensor | None, layers: int) -> SharedRows | None:
    """Which rows of aux [N, A * H], of A `layers`, are left where rollouts of one prompt share states; None: all.

    A rollout shares with the first one of its prompt, if their states are alike: token ids do not tell two images
    apart. Each layer is compared in every eighth row and in the last, which has read all of the prompt. Two forwards of
    one text differ by rounding, and by 8 bits: 4 % at most was seen, where other prompts' states differ by all of them.
    """
    first: dict[bytes, int] = {}
    rows = np.arange(len(index.input_ids))
    generated = np.flatnonzero(index.loss_mask)
    for begin, end in pairwise(index.cu_seqlens.tolist()):
        at = int(np.searchsorted(generated, begin))
        prompt = min(end, int(generated[at]) if at < len(generated) else end) - begin
        other = first.setdefault(index.input_ids[begin : begin + prompt].tobytes(), begin)
        compared = torch.tensor(sorted({*range(0, prompt, _COMPARED_EVERY), prompt - 1}))
        if other != begin and _alike(aux, scale, layers, other + compared, begin + compared):
            rows[begin : begin + prompt] = np.arange(other, other + prompt)
    kept, places = np.unique(rows, return_inverse=True)
    if len(kept) == len(rows):
        return None
    return SharedRows(places.astype(np.int32), torch.from_numpy(kept))


def _alike(aux: Tensor, scale: Tensor | None, layers: int, some: Tensor, others: Tensor) -> bool:
    """Whether two sets of rows are the same states but for rounding, in each layer."""

    def numbers(rows: Tensor) -> Tensor:  # [rows, A, H]
        values = bytes_of(aux)[rows].view(aux.dtype).float().view(len(rows), layers, -1)
        return values if scale is None else values * scale[rows][:, :, None]

    one, other = numbers(some), numbers(others)
    return bool(((one - other).norm(dim=2) <= _ROUNDING * one.norm(dim=2)).all())


def bytes_of(tensor: Tensor) -> Tensor:
    """The same memory as integers of its width, which can be indexed whatever the type."""
    return tensor.contiguous().view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.element_size()])


def as_wire(tensor: Tensor) -> wire.Tensor:
    """View a contiguous host tensor as a tensor of the wire format."""
    name, width = WIRE_DTYPES[tensor.dtype]
    # NumPy has neither bfloat16 nor float8: they are sent as unsigned integers of their width.
    array = tensor.contiguous() if width is None else tensor.contiguous().view(width)
    return wire.Tensor.of(array.numpy(), name)


#: How torch types are stored: safetensors' name, and the type to view them as where NumPy lacks them.
WIRE_DTYPES: Final[Mapping[torch.dtype, tuple[str, torch.dtype | None]]] = {
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
    aux = torch.empty(N, A * H, dtype=torch.float8_e4m3fn, device=device)
    scale_NA = torch.empty(N, A, dtype=torch.float32, device=device)
    for i, state_NH in enumerate(captured.aux):
        aux[:, i * H : (i + 1) * H], scale_NA[:, i] = to_e4m3(state_NH)
    found = {"aux_hidden": aux, "aux_hidden_scale": scale_NA}
    if dtype == "float8_e4m3":
        return found | {"last_hidden": captured.last.to(torch.bfloat16)}
    last, scale_N = to_e4m3(captured.last)
    return found | {"last_hidden": last, "last_hidden_scale": scale_N[:, None]}
