"""A batch of rollouts as tensors: packed along the token axis, no padding.

Legend: T tokens, R rollouts, H target hidden size, A aux layers.
Row t holds features after consuming `input_ids[t]`; `logprobs[t]` is of `input_ids[t]` itself; `logsumexp[t]`
describes the distribution of `input_ids[t+1]`. Log-probabilities are of logits divided by the temperature.
A file may hold `last_hidden` and `logsumexp` only in `rl_hooks.wire.predicting_rows`. Then so does `last_hidden` here,
and rows of it are found by `last_places`; `logsumexp` is 1 where nothing was sent.

Features stay as they were sent, in the mapped file, until rows of them are packed and copied to a device: fp8 rows are
multiplied by their scales there (`RolloutBatch.to`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from drafter.device import to_device
from drafter.errors import BatchRejected, DrafterError, NotFinite
from rl_hooks import wire

#: Tensors with one row per token, in file order.
_PER_TOKEN = ("input_ids", "loss_mask", "aux_hidden", "last_hidden", "logprobs", "logsumexp")
_FLOATS = ("aux_hidden", "last_hidden", "logprobs", "logsumexp")
#: What has a row only for each of `predicting_rows`, where the sender left out the others.
_LAST = ("last_hidden", "last_scale")
#: What has fewer rows where tokens of one prompt share them (`aux_rows`).
_AUX = ("aux_hidden", "aux_scale")
#: Features -> the scales that they have where they are fp8.
_SCALES = {"aux_hidden": "aux_scale", "last_hidden": "last_scale"}
#: Rows that are screened at once: fp8 rows become float32 for it, and ranks share such pieces out.
_SCREENED_ROWS = 1_024
#: Calls functions, each of which fills its own places of a table of zeros in host memory; returns the whole table.
#: `drafter.training.ranks.Ranks.fill` shares the calls out among several processes.
Fill = Callable[[Tensor, Sequence[Callable[[], object]]], Tensor]
#: No log-probability is larger, however it was rounded: a probability of 1 plus one unit in the last place of bfloat16
#: (2^-7) has 0.0078. What float32 or a log-softmax in any type leaves is at most 1e-4.
_LARGEST_LOGPROB = 0.01


@dataclass(frozen=True, eq=False)
class RolloutBatch:
    """Packed rollouts with the features to train and score a drafter on. Immutable; shapes in the module's legend."""

    input_ids: Tensor  # int64[T]
    cu_seqlens: Tensor  # int64[R+1], always on the CPU: plans are made there
    loss_mask: Tensor  # bool[T], True where the policy generated the token
    aux_hidden: Tensor  # f32|bf16|fp8[T, A*H], states entering the aux layers
    logprobs: Tensor  # f32[T]
    last_hidden: Tensor  # f32|bf16|fp8[T, H], after the final norm; fewer rows: see `last_places`
    logsumexp: Tensor  # f32[T], full vocabulary; all NaN where the sender did not know it
    temperature: float = 1.0
    top_p: float = 1.0  # below 1, or `top_k` above 0: `logprobs` are of the truncated distribution
    top_k: int = 0
    rollout_ids: tuple[str, ...] = ()
    policy_version: int = 0
    drafter_version: str = ""  # that drafted the rollouts; empty: not known
    rewards: tuple[float, ...] | None = None
    aux_layers: tuple[int, ...] = ()  # that `aux_hidden` enters; empty: not known
    prompt_hashes: tuple[str, ...] = ()  # `wire.prompt_hash` of each rollout's full prompt; empty: of the rows here
    strata: tuple[str, ...] = ()  # the kind of each rollout's prompt; empty: not known
    offered: tuple[int, int] | None = None  # of a file: rollouts and generated tokens that it was drawn from
    normalised: bool = True  # False: the sender never held the whole head, and `logsumexp` is all NaN
    aux_scale: Tensor | None = None  # f32[T, A] that fp8 `aux_hidden` is multiplied by; None: it is not fp8
    last_scale: Tensor | None = None  # f32[rows of last_hidden, 1], as `aux_scale`
    log_weights: Tensor | None = None  # f32[T], log of a token's probability over that by which it was drawn; None: 0
    aux_rows: Tensor | None = None  # int64[T], the row of aux_hidden and aux_scale of each token; None: one each
    older: Tensor | None = None  # bool[T], whether older weights than the features' may have drawn it; None: not known

    def __post_init__(self) -> None:
        """Raise `DrafterError` where the tensors do not belong together. Shapes only: no device is asked."""
        T = self.input_ids.numel()
        for name, tensor in self._tensors().items():
            rows = len(self.last_hidden) if name in _LAST else len(self.aux_hidden) if self._shares(name) else T
            if tensor.shape[:1] != (rows,):
                raise DrafterError(f"{name} must have one row for each of {T} tokens, got shape {tuple(tensor.shape)}")
        if self.aux_rows is not None and self.aux_rows.shape != (T,):
            raise DrafterError(f"aux_rows must name one row for each of {T} tokens, got {tuple(self.aux_rows.shape)}")
        # Of a batch on a device one would have to wait for the device: it was made from one on the host.
        counted = self.every_last_row or self.loss_mask.device.type != "cpu"
        if not counted and len(self.last_hidden) != self.response_tokens:
            raise DrafterError(
                f"last_hidden must have one row for each of {T} tokens, or of {self.response_tokens} that the policy "
                f"generated, got shape {tuple(self.last_hidden.shape)}"
            )
        for name, scale in _SCALES.items():
            if (getattr(self, name).dtype == torch.float8_e4m3fn) != (getattr(self, scale) is not None):
                raise DrafterError(f"{name} is {getattr(self, name).dtype}; fp8 needs {scale}, no other type has it")
        if not T or self.cu_seqlens.numel() < 2 or int(self.cu_seqlens[-1]) != T:
            raise DrafterError(
                f"cu_seqlens must end at the {T} tokens, at least 1, got {self.cu_seqlens.tolist()[-4:]}"
            )
        if not 0 <= self.temperature < math.inf:
            raise DrafterError(f"temperature must be 0 or more and finite, got {self.temperature}")

    def _tensors(self) -> dict[str, Tensor]:
        """What every selection, packing and copy takes along: rows of tokens, and of `last_hidden`."""
        some = (name for name in (*_SCALES.values(), "log_weights", "older") if getattr(self, name) is not None)
        return {name: getattr(self, name) for name in (*_PER_TOKEN, *some)}

    def _shares(self, name: str) -> bool:
        """Whether tokens may share a row of this tensor."""
        return self.aux_rows is not None and name in _AUX

    @property
    def tokens(self) -> int:
        """T, prompts included."""
        return self.input_ids.numel()

    @property
    def rollouts(self) -> int:
        """R."""
        return self.cu_seqlens.numel() - 1

    @property
    def response_tokens(self) -> int:
        """Tokens that the policy generated: the unit of every denominator."""
        return int(self.loss_mask.sum())

    @property
    def warped(self) -> bool:
        """Whether tokens were drawn from a truncated distribution."""
        return self.top_p < 1.0 or self.top_k > 0

    @property
    def every_last_row(self) -> bool:
        """Whether `last_hidden` has a row for every token, and not only for the predicting ones, which are fewer."""
        return len(self.last_hidden) == self.tokens

    @property
    def rollout_of(self) -> Tensor:
        """The place int64[T] of each token's rollout, on the CPU."""
        return torch.repeat_interleave(torch.arange(self.rollouts), self.cu_seqlens.diff())

    def last_places(self, rows: Tensor) -> Tensor:
        """Where the rows int64[n] of tokens lie in `last_hidden`; beyond its end, an IndexError, if it lacks them."""
        if self.every_last_row:
            return rows
        generated = self.loss_mask[rows + 1]
        return torch.where(generated, self.loss_mask.cumsum(0)[rows + 1] - 1, len(self.last_hidden))

    @property
    def divisor(self) -> float:
        """What logits were divided by: the temperature, and 1 for greedy decoding (temperature 0)."""
        return self.temperature or 1.0

    def select(self, rollouts: Sequence[int]) -> RolloutBatch:
        """The rollouts at these indices, in this order, packed again."""
        starts = self.cu_seqlens.tolist()
        out_of_range = [i for i in rollouts if not 0 <= i < self.rollouts]
        if not rollouts or out_of_range:
            raise DrafterError(f"expected one or more indices in [0, {self.rollouts}), got {list(rollouts)[:8]}")
        index = torch.cat([torch.arange(starts[i], starts[i + 1]) for i in rollouts])
        lengths = torch.tensor([0] + [starts[i + 1] - starts[i] for i in rollouts])
        index = index.to(self.input_ids.device)
        last = index if self.every_last_row else self.last_places(index[self.loss_mask[index]] - 1)
        aux = index if self.aux_rows is None else self.aux_rows[index]
        places = dict.fromkeys(_LAST, last) | dict.fromkeys(_AUX, aux)
        changes: dict[str, Any] = {n: tensor[places.get(n, index)] for n, tensor in self._tensors().items()}
        return replace(
            self,
            aux_rows=None,
            cu_seqlens=lengths.cumsum(0),
            rollout_ids=tuple(self.rollout_ids[i] for i in rollouts) if self.rollout_ids else (),
            rewards=None if self.rewards is None else tuple(self.rewards[i] for i in rollouts),
            prompt_hashes=tuple(self.prompt_hashes[i] for i in rollouts) if self.prompt_hashes else (),
            strata=tuple(self.strata[i] for i in rollouts) if self.strata else (),
            **changes,
        )

    def places_of_some(self, tokens: int) -> range:
        """Places of evenly spaced rollouts that have about `tokens` tokens.

        Never by length: which are long is the text's doing. The first one moves with the policy version, for a trainer
        may sort siblings.
        """
        step = max(1, math.ceil(self.tokens / tokens))
        return range(self.policy_version % min(step, self.rollouts), self.rollouts, step)

    def groups(self, tokens_at_once: int) -> Iterator[RolloutBatch]:
        """Split into consecutive groups of whole rollouts, of about `tokens_at_once` tokens each."""
        if self.tokens <= tokens_at_once:
            yield self
            return
        chosen: list[int] = []
        tokens = 0
        for index, length in enumerate((self.cu_seqlens[1:] - self.cu_seqlens[:-1]).tolist()):
            if chosen and tokens + length > tokens_at_once:
                yield self.select(chosen)
                chosen, tokens = [], 0
            chosen.append(index)
            tokens += length
        yield self.select(chosen)

    @property
    def kind(self) -> tuple[object, ...]:
        """What batches must have in common to be packed together."""
        shapes = [(name, t.shape[1:], t.dtype) for name, t in self._tensors().items()]
        sampling = self.temperature, self.top_p, self.top_k
        return *sampling, self.aux_layers, self.normalised, self.every_last_row, *shapes

    @staticmethod
    def concat(batches: Sequence[RolloutBatch]) -> RolloutBatch:
        """Pack batches of one `kind`; the newest policy version names the result."""
        if not batches:
            raise DrafterError("expected at least one batch to concatenate, got none")
        if len({b.kind for b in batches}) > 1:
            raise DrafterError("batches differ in sampling, layers, or in their tensors; keep them apart")
        batches = [b.spread() for b in batches]
        ends = torch.cat([b.cu_seqlens[1:] - b.cu_seqlens[:-1] for b in batches]).cumsum(0)
        changes: dict[str, Any] = {
            name: torch.cat([getattr(b, name) for b in batches]) for name in batches[0]._tensors()
        }
        rewards = [b.rewards for b in batches]
        drafters = {b.drafter_version for b in batches}
        return replace(
            batches[0],
            cu_seqlens=torch.cat([ends.new_zeros(1), ends]),
            rollout_ids=tuple(i for b in batches for i in b.rollout_ids),
            policy_version=max(b.policy_version for b in batches),
            drafter_version=drafters.pop() if len(drafters) == 1 else "",
            rewards=None if None in rewards else tuple(x for r in rewards if r is not None for x in r),
            prompt_hashes=tuple(h for b in batches for h in prompt_hashes(b)),
            strata=tuple(s for b in batches for s in b.strata or ("",) * b.rollouts if any(c.strata for c in batches)),
            offered=None,
            **changes,
        )

    def spread(self) -> RolloutBatch:
        """The same with a row of `aux_hidden` for each token: what training and replay read."""
        if self.aux_rows is None:
            return self
        scale = None if self.aux_scale is None else self.aux_scale[self.aux_rows]
        return replace(self, aux_hidden=self.aux_hidden[self.aux_rows], aux_scale=scale, aux_rows=None)

    def to(self, device: torch.device | str, dtype: torch.dtype | None = None) -> RolloutBatch:
        """Move to a device; `dtype` converts the features (not log-probabilities). `cu_seqlens` stays on the CPU.

        fp8 features come out as float32, or `dtype`: multiplied by their scales after the copy, which is of the bytes.
        """
        if torch.device(device).type not in ("cpu", "cuda"):  # others may lack fp8
            return self._widened()._moved(device, dtype)
        if self.aux_scale is None and self.last_scale is None:
            return self._moved(device, dtype)
        widened = self._moved(device, None)._widened()
        return widened._moved(device, dtype)

    def used_on(self, stream: torch.cuda.Stream) -> None:
        """Say that work on `stream` reads this batch, which another stream made: its memory is kept until then."""
        for tensor in self._tensors().values():
            tensor.record_stream(stream)

    def _moved(self, device: torch.device | str, dtype: torch.dtype | None) -> RolloutBatch:
        changes: dict[str, Any] = {
            name: to_device(tensor, device, dtype if name in _SCALES else None)
            for name, tensor in self._tensors().items()
        }
        rows = None if self.aux_rows is None else to_device(self.aux_rows, device, None)
        return replace(self, **changes, aux_rows=rows).spread()

    def _widened(self) -> RolloutBatch:
        changes: dict[str, Any] = {name: self.numbers(name) for name in _SCALES}
        return replace(self, **changes, aux_scale=None, last_scale=None).spread()

    def last_rows(self, rows: Tensor) -> Tensor:
        """`last_hidden` of these tokens as numbers [n, H], in float32 where it is fp8. IndexError if it lacks them."""
        return self.numbers("last_hidden", self.last_places(rows))

    def numbers(self, name: str, index: Tensor | slice = slice(None)) -> Tensor:
        """Stored rows of a tensor as numbers: of fp8, x = fp8 * scale per token and layer, in float32."""
        values: Tensor = getattr(self, name)[index]
        scales: Tensor | None = getattr(self, _SCALES[name]) if name in _SCALES else None
        if scales is None:
            return values
        scale = scales[index]
        rows, layers = scale.shape
        return (values.to(torch.float32).view(rows, layers, -1) * scale[:, :, None]).view(rows, -1)


def prompt_hashes(batch: RolloutBatch) -> tuple[str, ...]:
    """Identity of each rollout's prompt: what its sender said, else of all that precedes the first response token."""
    if batch.prompt_hashes:
        return batch.prompt_hashes
    ids, starts, mask = batch.input_ids.cpu().numpy(), batch.cu_seqlens.numpy(), batch.loss_mask.cpu().numpy()
    return _prompt_hashes(ids, starts, mask)


def _prompt_hashes(ids: npt.NDArray[Any], starts: npt.NDArray[Any], mask: npt.NDArray[Any]) -> tuple[str, ...]:
    found = []
    for begin, end in pairwise(starts.tolist()):
        generated = np.flatnonzero(mask[begin:end])
        found.append(wire.prompt_hash(ids[begin : begin + int(generated[0])] if generated.size else ids[begin:end]))
    return tuple(found)


def load_batch(path: Path, *, vocab_size: int | None = None) -> RolloutBatch:
    """Map a rollout file. Its features stay in it, in the type that they were sent in; all else is copied out.

    The file may be moved or deleted meanwhile. It must not be written to: whoever reads past the end of a mapped file
    that was cut short is ended by SIGBUS. Token ids are checked against `vocab_size` if given. Raises
    `rl_hooks.wire.WireError` for a broken file, OSError for one that cannot be mapped.
    """
    file = wire.MappedFile(path)
    header = wire.check_rollout_header(file.header)
    ids, starts, mask = (file.array(name) for name in ("input_ids", "cu_seqlens", "loss_mask"))
    V = np.iinfo(np.int32).max if vocab_size is None else vocab_size
    rows, behind = (file.array(name) if name in file else None for name in wire.OPTIONAL_TENSORS)
    wire.check_index(header, ids, starts, mask, V, rows, behind)
    found = _mapped(path, file)
    return RolloutBatch(
        input_ids=torch.from_numpy(ids.astype(np.int64)),
        cu_seqlens=torch.from_numpy(starts.astype(np.int64)),
        loss_mask=torch.from_numpy(mask.astype(np.bool_)),
        aux_hidden=found["aux_hidden"],
        last_hidden=found["last_hidden"],
        aux_scale=found.get("aux_hidden_scale"),
        last_scale=found.get("last_hidden_scale"),
        aux_rows=None if rows is None else torch.from_numpy(rows.astype(np.int64)),
        older=None if behind is None else torch.from_numpy(behind > 0),
        logprobs=torch.from_numpy(file.array("logprobs").astype(np.float32)),
        logsumexp=_normalisers(file, header, mask),
        temperature=header.temperature,
        top_p=header.top_p,
        top_k=header.top_k,
        rollout_ids=header.rollout_ids,
        policy_version=header.policy_version_max,
        drafter_version=header.drafter_version,
        rewards=header.rewards,
        aux_layers=header.aux_layers,
        prompt_hashes=header.prompt_hashes or _prompt_hashes(ids, starts, mask),
        strata=header.strata or (),
        offered=header.offered,
        normalised="logsumexp" in file,
    )


def without(batch: RolloutBatch, places: Sequence[int]) -> RolloutBatch:
    """The batch without the rollouts at these places."""
    left_out = set(places)
    return batch.select([i for i in range(batch.rollouts) if i not in left_out]) if left_out else batch


def _normalisers(file: wire.MappedFile, header: wire.RolloutHeader, mask: npt.NDArray[Any]) -> Tensor:
    if "logsumexp" not in file:
        return torch.full((header.tokens,), torch.nan)
    sent = torch.from_numpy(file.array("logsumexp").astype(np.float32))
    if header.last_rows == "all":
        return sent
    return torch.ones(header.tokens).index_copy_(0, torch.from_numpy(wire.predicting_rows(mask)), sent)


def _mapped(path: Path, file: wire.MappedFile) -> dict[str, Tensor]:
    """The features of a file as they lie in it; the scales of fp8 ones are copied out.

    Mapped here: Python's own mapping holds a file descriptor for as long as a tensor lives, and of small batches
    thousands are kept. Private: should anything write to a tensor, the file stays as it is.
    """
    try:
        whole = torch.from_file(str(path), shared=False, size=file.header.file_bytes, dtype=torch.uint8)
    except RuntimeError as error:  # all that torch raises, be the file gone or memory short
        raise OSError(f"{path.name} cannot be mapped: {error}") from error
    found = {}
    for name in _SCALES:
        info = file.header.tensors[name]
        dtype = torch.bfloat16 if info.dtype == "BF16" else torch.float8_e4m3fn
        begin = file.header.header_bytes + info.begin
        raw = whole[begin : begin + info.end - info.begin]
        # Another writer's header may have any length: a view must begin at a multiple of its type's size.
        found[name] = (raw.clone() if begin % dtype.itemsize else raw).view(dtype).view(info.shape)
        if dtype == torch.float8_e4m3fn:
            found[f"{name}_scale"] = torch.from_numpy(file.array(f"{name}_scale").copy())
    return found


def fill_alone(table: Tensor, parts: Sequence[Callable[[], object]]) -> Tensor:
    """`Fill` by this process."""
    for part in parts:
        part()
    return table


def screen(batch: RolloutBatch, fill: Fill = fill_alone) -> None:
    """Raise when a float tensor holds NaN or infinity: one bad row would poison the drafter.

    `NotFinite` names the rollouts that hold such; `BatchRejected` where all do, or where a log-probability of a
    response token is above 0. Where several processes `fill`, all raise the same.
    """
    # Where there is no logsumexp, the policy's head gives it (`TargetHead.normalise`).
    names = [name for name in _FLOATS if name != "logsumexp" or batch.normalised]
    lengths = [len(getattr(batch, name)) for name in names]
    table = torch.zeros(sum(lengths), dtype=torch.uint8)

    def look(found: Tensor, name: str, begin: int) -> None:
        rows = batch.numbers(name, slice(begin, begin + _SCREENED_ROWS))
        least, most = rows.reshape(len(rows), -1).aminmax(dim=1)  # NaN if any is; faster than isnan
        found[begin : begin + _SCREENED_ROWS] = ~(torch.isfinite(least) & torch.isfinite(most))

    parts = [
        partial(look, found, name, begin)
        for name, found in zip(names, torch.split(table, lengths), strict=True)
        for begin in range(0, len(found), _SCREENED_ROWS)
    ]
    of_row = batch.rollout_of
    spoilt, why = torch.zeros(batch.rollouts, dtype=torch.bool), ""
    for name, bad in zip(names, torch.split(fill(table, parts).bool(), lengths), strict=True):
        if batch._shares(name):
            bad = bad[batch.aux_rows]
        elif len(bad) < batch.tokens:  # of the predicting rows
            bad = torch.zeros_like(batch.loss_mask).index_copy_(0, torch.nonzero(batch.loss_mask).flatten() - 1, bad)
        if bool(bad.any()):
            why = why or _located(batch, bad, f"{name} holds NaN or infinity", "or its capture is broken")
            spoilt[of_row[bad]] = True
    if bool(spoilt.all()):
        raise BatchRejected(why)
    above = batch.loss_mask & (batch.logprobs > _LARGEST_LOGPROB) & ~spoilt[of_row]
    if bool(above.any()):
        what = "logprobs holds log-probabilities above 0"
        raise BatchRejected(_located(batch, above, what, "sends logits, or logs another quantity"))
    if bool(spoilt.any()):
        raise NotFinite(why, torch.nonzero(spoilt).flatten().tolist())


def _located(batch: RolloutBatch, bad_rows: Tensor, what: str, why: str) -> str:
    """A sentence that names the first of bad_rows bool[T], of which one is true at least."""
    bad = torch.nonzero(bad_rows).flatten()
    first = int(bad[0])
    rollout = int(torch.searchsorted(batch.cu_seqlens, first, right=True)) - 1
    label = batch.rollout_ids[rollout] if batch.rollout_ids else str(rollout)
    return (
        f"{what} in {bad.numel()} of {batch.tokens} rows, first at row {first} "
        f"(rollout {json.dumps(label)}); the trainer's forward {why}"
    )
