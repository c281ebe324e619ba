"""How queries and keys of the unroll are laid out for the attention kernels: padded on a CPU, packed elsewhere.

A document's *span* runs from its first to its last computed row; its *prefix* is what lies before. Every layout gives
each computed row a *slot* on one axis of queries, the same at every step. Some slots are of rows that are not computed
(tool output within a response, rows whose chain has ended). They repeat an arbitrary row, and nothing reads them.

`Padded`: documents of similar size in buckets, for torch's fused kernel on CPUs, which takes rectangles.
`Packed`: spans one after another without padding, for kernels that take the boundaries of documents (FlashAttention).

Legend: M rows with step-0 keys, N computed rows (n_j at step j), B documents of a bucket, L span, S prefix.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_T = TypeVar("_T")
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Spans:
    """What every layout is made from, on the host: the documents that have computed rows."""

    rows: Ints  # [N] computed rows, by falling depth
    span_of_row: Ints  # [N] which of the documents below each lies in
    begin: Ints  # [documents] first row
    first: Ints  # [documents] first computed row
    last: Ints  # [documents] last computed row
    key_place: Ints  # [T] place among the M key rows, -1 where there is none
    computed: tuple[int, ...]  # n_j


@dataclass(frozen=True, eq=False)
class Bucket:
    """Documents of similar size, padded to one another for the attention kernel: B documents, L span, S prefix.

    Padding sits at the end, where causality hides it from real queries in the span; in the prefix a bias hides it.
    """

    documents: int  # B
    span: int  # L
    slots: slice  # this bucket's part of the padded query axis
    causal_index: Tensor  # int64[B*L] into the M key rows
    prefix_index: Tensor | None  # int64[B*S] into the M key rows; None: no document has a prefix
    prefix_hidden: Tensor | None  # bool[B, S], True where padding; None: equal prefixes


@dataclass(frozen=True, eq=False)
class Padded:
    """Rectangles for torch's fused kernel on CPUs."""

    buckets: tuple[Bucket, ...]
    slot: Tensor  # int64[N]: a computed row's place on the padded query axis
    slot_row: tuple[Tensor, ...]  # per step: int64[slots], the row in that place; an arbitrary one where none is


@dataclass(frozen=True, eq=False)
class Packed:
    """Spans one after another: query i of a document sees its first (keys - queries + i + 1) keys."""

    slot: Tensor  # int64[N]
    slot_row: tuple[Tensor, ...]  # per step: int64[slots]
    key_index: Tensor  # int64[keys] into the M key rows: every document's rows up to its last computed one
    query_starts: Tensor  # int32[documents+1]
    key_starts: Tensor  # int32[documents+1]
    queries: tuple[int, ...]  # the same two on the host
    keys: tuple[int, ...]

    @property
    def longest_span(self) -> int:
        """Most queries of a document."""
        return max(b - a for a, b in pairwise(self.queries))

    @property
    def longest_keys(self) -> int:
        """Most keys of a document."""
        return max(b - a for a, b in pairwise(self.keys))


Layout = Padded | Packed


def moved(plan: _T, move: Callable[[Tensor], Tensor]) -> _T:
    """A frozen dataclass with each tensor in its fields, also in tuples of them, as `move` gives it."""

    def of(value: Any) -> Any:
        if isinstance(value, tuple) and value and not isinstance(value[0], int):  # integers: one for each token
            return tuple(map(of, value))
        return move(value) if isinstance(value, Tensor) else value

    return replace(plan, **{name: of(value) for name, value in vars(plan).items()})  # type: ignore[type-var]


def pad(spans: Spans) -> Padded:
    """Group documents of similar size into rectangles."""
    span, prefix = spans.last - spans.first + 1, spans.first - spans.begin
    order = np.lexsort((span, prefix))  # those without a prefix first
    base = np.zeros(span.size, dtype=np.int64)
    buckets, slots = [], 0
    for members in _groups(order, span[order], prefix[order]):
        L, S = int(span[members].max()), int(prefix[members].max())
        first, begin = spans.first[members][:, None], spans.begin[members][:, None]
        key_rows = np.minimum(first + np.arange(L), spans.last[members][:, None])
        before, hidden = None, None
        if S:
            padding = np.arange(S) >= prefix[members][:, None]
            before = spans.key_place[np.where(padding, first, begin + np.arange(S))]
            hidden = torch.from_numpy(padding) if padding.any() else None
        base[members] = slots + L * np.arange(members.size)
        buckets.append(
            Bucket(
                documents=members.size,
                span=L,
                slots=slice(slots, slots + members.size * L),
                causal_index=torch.from_numpy(spans.key_place[key_rows].reshape(-1)),
                prefix_index=None if before is None else torch.from_numpy(before.reshape(-1)),
                prefix_hidden=hidden,
            )
        )
        slots += members.size * L
    slot = base[spans.span_of_row] + spans.rows - spans.first[spans.span_of_row]
    return Padded(tuple(buckets), torch.from_numpy(slot), _rows_of_slots(spans, slot, slots))


def pack(spans: Spans) -> Packed:
    """Lay the spans out one after another."""
    queries = _starts(spans.last - spans.first + 1)
    keys = _starts(spans.last - spans.begin + 1)
    slot = queries[:-1][spans.span_of_row] + spans.rows - spans.first[spans.span_of_row]
    lengths = np.diff(keys)
    key_rows = np.arange(keys[-1]) - np.repeat(keys[:-1], lengths) + np.repeat(spans.begin, lengths)
    return Packed(
        slot=torch.from_numpy(slot),
        slot_row=_rows_of_slots(spans, slot, int(queries[-1])),
        key_index=torch.from_numpy(spans.key_place[key_rows]),
        query_starts=torch.from_numpy(queries.astype(np.int32)),
        key_starts=torch.from_numpy(keys.astype(np.int32)),
        queries=tuple(queries.tolist()),
        keys=tuple(keys.tolist()),
    )


def _starts(lengths: Ints) -> Ints:
    return np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(lengths)])


def _rows_of_slots(spans: Spans, slot: Ints, slots: int) -> tuple[Tensor, ...]:
    """Per step, the row in each slot; row 0 stands where none is."""
    row = np.zeros(slots, dtype=np.int64)
    row[slot] = np.arange(slot.size)
    return tuple(torch.from_numpy(np.where(row < n, row, 0)) for n in spans.computed)


#: Padded query-key pairs that cost no more than another pair of kernel calls.
_FREE_PAIRS = 1 << 18


def _groups(used: Ints, span: Ints, prefix: Ints) -> list[Ints]:
    """Cut the sorted documents into buckets whose padding costs at most as many query-key pairs as the documents do."""
    groups, begin = [], 0
    exact, widest, longest = 0, 0, 0
    for i in range(used.size):  # integers only, no tensor work: microseconds per document
        pairs = int(span[i]) * (int(span[i]) + int(prefix[i]))
        width, length = max(widest, int(span[i])), max(longest, int(prefix[i]))
        padded = (i + 1 - begin) * width * (width + length)
        mixed = (prefix[i] > 0) != (prefix[begin] > 0)
        if mixed or padded > 2 * (exact + pairs) + _FREE_PAIRS:
            groups.append(used[begin:i])
            begin, exact, width, length = i, 0, int(span[i]), int(prefix[i])
        exact, widest, longest = exact + pairs, width, length
    if used.size:
        groups.append(used[begin:])
    return groups
