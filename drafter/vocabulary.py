"""The draft vocabulary: which D of the target's V tokens the drafter can propose.

Invariant: ids ascend, so `d2t` (an *offset*: target id = draft id + d2t[draft id]) and `t2d` describe the same set.
It never changes within a lineage of drafters: lm_head's rows would mean other tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from drafter.errors import VocabularyError
from rl_hooks.format.drafter import vocabulary_digest

#: One draft token in 16 is taken from the lowest ids.
FLOOR: Final = 16


class DraftVocabulary:
    """The ascending target ids int64[D] of the draft tokens, out of `vocab_size` target tokens.

    >>> DraftVocabulary(torch.tensor([0, 2, 5]), vocab_size=8).d2t
    tensor([0, 1, 3])
    """

    def __init__(self, ids: Tensor, vocab_size: int) -> None:
        ids = ids.detach().to("cpu", torch.int64)
        if ids.ndim != 1 or ids.numel() == 0:
            raise VocabularyError(f"expected a non-empty list of token ids, got shape {tuple(ids.shape)}")
        if int(ids[0]) < 0 or int(ids[-1]) >= vocab_size or bool((ids[1:] <= ids[:-1]).any()):
            raise VocabularyError(f"token ids must ascend, be distinct and lie in [0, {vocab_size})")
        self.ids = ids
        self.vocab_size = vocab_size

    @classmethod
    def build(cls, counts: Tensor, size: int, always: Sequence[int] = ()) -> DraftVocabulary:
        """The `size` most frequent tokens by `counts` int[V] (ties: the lower id), `always` (EOS, say) included.

        One slot in `FLOOR` goes to the lowest ids whatever the counts say. In byte-pair vocabularies these are bytes
        and the commonest pieces of any text: a drafter can never propose what its vocabulary lacks.
        """
        vocab_size = counts.numel()
        if not 0 < size <= vocab_size:
            raise VocabularyError(f"size must be from 1 to the target's {vocab_size} tokens, got {size}")
        forced = sorted(set(always))
        if len(forced) > size or any(not 0 <= i < vocab_size for i in forced):
            raise VocabularyError(f"`always` must be at most {size} ids in [0, {vocab_size}), got {forced[:8]}")
        ranked = counts.detach().to("cpu", torch.float64, copy=True)
        floor = min(size // FLOOR, size - len(forced))
        ranked[:floor] = ranked[:floor].clamp(min=float(ranked.max()) + 1)
        ranked[torch.tensor(forced, dtype=torch.int64)] = float("inf")
        chosen = torch.sort(ranked, descending=True, stable=True).indices[:size]
        return cls(chosen.sort().values, vocab_size)

    @classmethod
    def full(cls, vocab_size: int) -> DraftVocabulary:
        """Every target token: no reduction."""
        return cls(torch.arange(vocab_size), vocab_size)

    @classmethod
    def from_d2t(cls, d2t: Tensor, vocab_size: int) -> DraftVocabulary:
        """Read a checkpoint's offsets: id = d2t[i] + i. Absolute ids instead of offsets raise `VocabularyError`."""
        offsets = d2t.detach().to("cpu", torch.int64)
        if offsets.ndim != 1:
            raise VocabularyError(f"d2t must be one-dimensional, got shape {tuple(offsets.shape)}")
        try:
            return cls(offsets + torch.arange(offsets.numel()), vocab_size)
        except VocabularyError as error:
            raise VocabularyError(f"d2t does not hold offsets (target id minus draft id): {error}") from error

    def __len__(self) -> int:
        return self.ids.numel()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, DraftVocabulary):
            return NotImplemented
        return self.vocab_size == other.vocab_size and torch.equal(self.ids, other.ids)

    def __hash__(self) -> int:
        return hash(self.digest)

    @property
    def d2t(self) -> Tensor:
        """Offsets int64[D]: ids - arange(D)."""
        return self.ids - torch.arange(len(self), device=self.ids.device)

    @property
    def t2d(self) -> Tensor:
        """bool[V]: is this target token in the draft vocabulary."""
        mask = torch.zeros(self.vocab_size, dtype=torch.bool, device=self.ids.device)
        mask[self.ids] = True
        return mask

    @property
    def to_draft(self) -> Tensor:
        """int64[V]: the draft id of a target token, -1 outside."""
        table = torch.full((self.vocab_size,), -1, dtype=torch.int64, device=self.ids.device)
        table[self.ids] = torch.arange(len(self), device=self.ids.device)
        return table

    @property
    def digest(self) -> str:
        """SHA-256 (32 hexadecimal digits) of V and the ids: identity of the vocabulary within a lineage."""
        return vocabulary_digest(self.vocab_size, self.ids.numpy().astype("<i8").tobytes())

    def coverage(self, counts: Tensor) -> float:
        """Share of the tokens counted in `counts` int[V] that the drafter could propose; nan when none were."""
        if counts.numel() != self.vocab_size:
            raise VocabularyError(f"counts must have {self.vocab_size} entries, got {counts.numel()}")
        weights = counts.detach().to("cpu", torch.float64)
        return float(weights[self.ids].sum() / weights.sum())
