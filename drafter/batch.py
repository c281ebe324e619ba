"""A batch of rollouts as tensors: packed along the token axis, no padding.

Legend: T tokens, R rollouts, H target hidden size, A aux layers.
Row t holds features after consuming `input_ids[t]`; `logprobs[t]` is of `input_ids[t]` itself; `logsumexp[t]`
describes the distribution of `input_ids[t+1]`. Log-probabilities are of logits divided by the temperature.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from drafter.device import to_device
from drafter.errors import BatchRejected, DrafterError
from rl_hooks import wire

#: Tensors with one row per token, in file order.
_PER_TOKEN = ("input_ids", "loss_mask", "aux_hidden", "last_hidden", "logprobs", "logsumexp")
_FLOATS = ("aux_hidden", "last_hidden", "logprobs", "logsumexp")
#: No log-probability is larger, however it was rounded: a probability of 1 plus one unit in the last place of bfloat16
#: (2^-7) has 0.0078. What float32 or a log-softmax in any type leaves is at most 1e-4.
_LARGEST_LOGPROB = 0.01


@dataclass(frozen=True, eq=False)
class RolloutBatch:
    """Packed rollouts with the features to train and score a drafter on. Immutable; shapes in the module's legend."""

    input_ids: Tensor  # int64[T]
    cu_seqlens: Tensor  # int64[R+1], always on the CPU: plans are made there
    loss_mask: Tensor  # bool[T], True where the policy generated the token
    aux_hidden: Tensor  # f32|bf16[T, A*H], states entering the aux layers
    logprobs: Tensor  # f32[T]
    last_hidden: Tensor  # [T, H], after the final norm
    logsumexp: Tensor  # f32[T], full vocabulary; all NaN where the sender did not know it
    temperature: float = 1.0
    warped: bool = False  # top_p < 1 or top_k > 0: `logprobs` are of the truncated distribution
    rollout_ids: tuple[str, ...] = ()
    policy_version: int = 0
    drafter_version: str = ""  # that drafted the rollouts; empty: not known
    rewards: tuple[float, ...] | None = None
    aux_layers: tuple[int, ...] = ()  # that `aux_hidden` enters; empty: not known
    prompt_hashes: tuple[str, ...] = ()  # `wire.prompt_hash` of each rollout's full prompt; empty: of the rows here
    strata: tuple[str, ...] = ()  # the kind of each rollout's prompt; empty: not known
    normalised: bool = True  # False: the sender never held the whole head, and `logsumexp` is all NaN

    def __post_init__(self) -> None:
        """Raise `DrafterError` where the tensors do not belong together. Shapes only: no device is asked."""
        T = self.input_ids.numel()
        for name in _PER_TOKEN:
            tensor = getattr(self, name)
            if tensor.shape[:1] != (T,):
                raise DrafterError(f"{name} must have one row for each of {T} tokens, got shape {tuple(tensor.shape)}")
        if not T or self.cu_seqlens.numel() < 2 or int(self.cu_seqlens[-1]) != T:
            raise DrafterError(
                f"cu_seqlens must end at the {T} tokens, at least 1, got {self.cu_seqlens.tolist()[-4:]}"
            )
        if not 0 <= self.temperature < math.inf:
            raise DrafterError(f"temperature must be 0 or more and finite, got {self.temperature}")

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
    def divisor(self) -> float:
        """What logits were divided by: the temperature, and 1 for greedy decoding (temperature 0)."""
        return self.temperature or 1.0

    def select(self, rollouts: Sequence[int]) -> RolloutBatch:
        """The rollouts at these indices, in this order, packed anew."""
        starts = self.cu_seqlens.tolist()
        out_of_range = [i for i in rollouts if not 0 <= i < self.rollouts]
        if not rollouts or out_of_range:
            raise DrafterError(f"expected one or more indices in [0, {self.rollouts}), got {list(rollouts)[:8]}")
        index = torch.cat([torch.arange(starts[i], starts[i + 1]) for i in rollouts])
        lengths = torch.tensor([0] + [starts[i + 1] - starts[i] for i in rollouts])
        index = index.to(self.input_ids.device)
        changes: dict[str, Any] = {name: getattr(self, name)[index] for name in _PER_TOKEN}
        return replace(
            self,
            cu_seqlens=lengths.cumsum(0),
            rollout_ids=tuple(self.rollout_ids[i] for i in rollouts) if self.rollout_ids else (),
            rewards=None if self.rewards is None else tuple(self.rewards[i] for i in rollouts),
            prompt_hashes=tuple(self.prompt_hashes[i] for i in rollouts) if self.prompt_hashes else (),
            strata=tuple(self.strata[i] for i in rollouts) if self.strata else (),
            **changes,
        )

    def groups(self, tokens_at_once: int) -> Iterator[RolloutBatch]:
        """Split into consecutive groups of whole rollouts, of about so many tokens each."""
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
        tensors = [getattr(self, name) for name in _PER_TOKEN]
        shapes = [(t.shape[1:], t.dtype) for t in tensors]
        return self.temperature, self.warped, self.aux_layers, self.normalised, *shapes

    @staticmethod
    def concat(batches: Sequence[RolloutBatch]) -> RolloutBatch:
        """Pack batches of one `kind`; the newest policy version names the result."""
        if not batches:
            raise DrafterError("expected at least one batch to concatenate, got none")
        if len({b.kind for b in batches}) > 1:
            raise DrafterError("batches differ in temperature, warping, layers, or in their tensors; keep them apart")
        ends = torch.cat([b.cu_seqlens[1:] - b.cu_seqlens[:-1] for b in batches]).cumsum(0)
        changes: dict[str, Any] = {name: torch.cat([getattr(b, name) for b in batches]) for name in _PER_TOKEN}
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
            **changes,
        )

    def pinned(self) -> RolloutBatch:
        """The batch in memory from which copies to a GPU need not be waited for."""
        return replace(self, **{name: getattr(self, name).pin_memory() for name in _PER_TOKEN})

    def to(self, device: torch.device | str, dtype: torch.dtype | None = None) -> RolloutBatch:
        """Move to a device; `dtype` converts the features (not log-probabilities). `cu_seqlens` stays on the CPU."""
        changes: dict[str, Any] = {}
        for name in _PER_TOKEN:
            wanted = dtype if name in ("aux_hidden", "last_hidden") else None
            changes[name] = to_device(getattr(self, name), device, wanted)
        return replace(self, **changes)


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
    """Map a rollout file and copy it out; fp8 features become float32 (x = fp8 * scale per token and layer).

    Token ids are checked against `vocab_size` if given. Raises `rl_hooks.wire.WireError` for a broken file.
    """
    file = wire.MappedFile(path)
    header = wire.check_rollout_header(file.header)
    ids, starts, mask = (file.array(name) for name in ("input_ids", "cu_seqlens", "loss_mask"))
    V = np.iinfo(np.int32).max if vocab_size is None else vocab_size
    wire.check_index(header, ids, starts, mask, V)
    return RolloutBatch(
        input_ids=torch.from_numpy(ids.astype(np.int64)),
        cu_seqlens=torch.from_numpy(starts.astype(np.int64)),
        loss_mask=torch.from_numpy(mask.astype(np.bool_)),
        aux_hidden=_features(file, "aux_hidden"),
        last_hidden=_features(file, "last_hidden"),
        logprobs=torch.from_numpy(file.array("logprobs").astype(np.float32)),
        logsumexp=(
            torch.from_numpy(file.array("logsumexp").astype(np.float32))
            if "logsumexp" in file
            else torch.full((len(ids),), torch.nan)
        ),
        temperature=header.temperature,
        warped=header.top_p < 1.0 or header.top_k > 0,
        rollout_ids=header.rollout_ids,
        policy_version=header.policy_version_max,
        drafter_version=header.drafter_version,
        rewards=header.rewards,
        aux_layers=header.aux_layers,
        prompt_hashes=header.prompt_hashes or _prompt_hashes(ids, starts, mask),
        strata=header.strata or (),
        normalised="logsumexp" in file,
    )


def _features(file: wire.MappedFile, name: str) -> Tensor:
    raw = torch.from_numpy(file.array(name).copy())
    if file.header.tensors[name].dtype == "BF16":
        return raw.view(torch.bfloat16)
    scale = torch.from_numpy(file.array(f"{name}_scale").copy())  # [T, layers]
    values = raw.view(torch.float8_e4m3fn).to(torch.float32)
    tokens, layers = scale.shape
    return (values.view(tokens, layers, -1) * scale[:, :, None]).view(tokens, -1)


def screen(batch: RolloutBatch) -> None:
    """Raise `BatchRejected` when a float tensor holds NaN or infinity: one bad row would poison the drafter.

    No log-probability of a response token may be above 0.
    """
    for name in _FLOATS:
        if name == "logsumexp" and not batch.normalised:
            continue  # the policy's head gives it (`TargetHead.normalise`)
        largest = getattr(batch, name).reshape(batch.tokens, -1).abs().amax(dim=1)  # NaN if any is; faster than isnan
        _refuse(batch, ~torch.isfinite(largest), f"{name} holds NaN or infinity", "or its capture is broken")
    said = torch.where(batch.loss_mask, batch.logprobs, 0.0)
    _refuse(
        batch,
        said > _LARGEST_LOGPROB,
        "logprobs holds log-probabilities above 0",
        "sends logits, or logs another quantity",
    )


def _refuse(batch: RolloutBatch, bad_rows: Tensor, what: str, why: str) -> None:
    """Raise `BatchRejected` where any of bad_rows bool[T] is true."""
    if not bool(bad_rows.any()):
        return
    bad = torch.nonzero(bad_rows).flatten()
    first = int(bad[0])
    rollout = int(torch.searchsorted(batch.cu_seqlens, first, right=True)) - 1
    label = batch.rollout_ids[rollout] if batch.rollout_ids else str(rollout)
    raise BatchRejected(
        f"{what} in {bad.numel()} of {batch.tokens} rows, first at row {first} "
        f"(rollout {json.dumps(label)}); the trainer's forward {why}"
    )
