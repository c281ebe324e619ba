"""Where every row of a packed batch goes during the unroll: index arithmetic, done once per batch on the CPU.

Row t is *active* at step j iff x[t+2+j] lies in its document and is a response token. It is *computed* at steps 0 to
its last active one, because each step is fed by the one before. Rows that are never active (prompts, tool output) only
contribute step-0 keys and values, and only where a later row of their document looks at them: exact, with one layer.

Legend: T tokens, K steps, M rows with step-0 keys, N computed rows (n_j at step j), P embedded positions, U target
rows, E = sum of active rows over steps. Computed rows are ordered by falling depth: step j's are simply the first n_j.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from drafter.errors import DrafterError

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Bucket:
    """Documents of similar size, padded to one another for the attention kernel: B documents, L span, S prefix.

    A document's span runs from its first to its last computed row; its prefix is what lies before. Padding sits at the
    end, where causality hides it from real queries in the span; in the prefix `prefix_bias` hides it.
    """

    documents: int  # B
    span: int  # L
    slots: slice  # this bucket's part of the padded query axis
    causal_index: Tensor  # int64[B*L] into the M key rows
    prefix_index: Tensor | None  # int64[B*S] into the M key rows; None: no document has a prefix
    prefix_hidden: Tensor | None  # bool[B, S], True where padding; None: equal prefixes


@dataclass(frozen=True, eq=False)
class Plan:
    """The whole index arithmetic of one packed batch; see the module's legend."""

    steps: int  # K
    tokens: int  # T
    computed: tuple[int, ...]  # n_j
    rows: tuple[Tensor, ...]  # per step: the active rows, int64 in [0, T)
    active: tuple[Tensor | None, ...]  # per step: where they are among the n_j computed ones; None: all of them
    kv_rows: Tensor  # int64[M]: computed rows first
    positions: Tensor  # int64[M]: within the document
    read_rows: Tensor  # int64[P]: positions of the packed axis whose token is embedded; those of queries first
    read_by_queries: int  # how many of them
    read_index: tuple[Tensor, ...]  # per step: int64[n_j] into P (step 0: int64[M])
    buckets: tuple[Bucket, ...]
    slot: Tensor  # int64[N]: a computed row's place on the padded query axis
    slot_row: tuple[Tensor, ...]  # per step: int64[slots], the row in that place; an arbitrary one where none is
    order: Tensor  # int64[E]: entries (steps concatenated) sorted by the row of the target that they are compared with
    target_rows: Tensor  # int64[U] in [0, T), ascending: p at row u is the distribution of x[u+1]
    target_index: Tensor  # int64[E]: into U, in the order of `order`
    entry_step: Tensor  # int64[E]: step, in the order of `order`
    target_starts: tuple[int, ...]  # U+1: where each target row's entries begin in `order`

    @property
    def entries(self) -> tuple[int, ...]:
        """Active rows per step."""
        return tuple(r.numel() for r in self.rows)

    def to(self, device: torch.device | str) -> Plan:
        """Copy the index tensors to a device."""

        def move(tensor: Tensor) -> Tensor:
            return tensor.to(device, non_blocking=True)

        return replace(
            self,
            rows=tuple(map(move, self.rows)),
            active=tuple(None if a is None else move(a) for a in self.active),
            kv_rows=move(self.kv_rows),
            positions=move(self.positions),
            read_rows=move(self.read_rows),
            read_index=tuple(map(move, self.read_index)),
            buckets=tuple(
                replace(
                    b,
                    causal_index=move(b.causal_index),
                    prefix_index=None if b.prefix_index is None else move(b.prefix_index),
                    prefix_hidden=None if b.prefix_hidden is None else move(b.prefix_hidden),
                )
                for b in self.buckets
            ),
            slot=move(self.slot),
            slot_row=tuple(map(move, self.slot_row)),
            order=move(self.order),
            target_rows=move(self.target_rows),
            target_index=move(self.target_index),
            entry_step=move(self.entry_step),
        )


def make_plan(cu_seqlens: Tensor, loss_mask: Tensor, steps: int) -> Plan:
    """Plan the unroll of `steps` drafted tokens over packed documents. Nothing in it crosses a document's boundary."""
    if steps < 1:
        raise DrafterError(f"expected at least one step, got {steps}")
    starts = cu_seqlens.cpu().numpy().astype(np.int64)
    mask = loss_mask.cpu().numpy().astype(bool)
    T = mask.size
    if starts.size < 2 or starts[0] != 0 or starts[-1] != T or bool((np.diff(starts) < 1).any()):
        raise DrafterError(f"cu_seqlens must ascend from 0 to the {T} tokens of loss_mask, got {starts.tolist()[:8]}")
    document = np.repeat(np.arange(starts.size - 1), np.diff(starts))
    t = np.arange(T)
    left = starts[document + 1] - t  # rows of this document from t on, t included
    active = np.zeros((steps, T), dtype=bool)
    for j in range(steps):
        inside = left > 2 + j
        active[j, inside] = mask[t[inside] + 2 + j]
    depth = (np.arange(1, steps + 1)[:, None] * active).max(axis=0)

    rows = np.flatnonzero(depth)
    rows = rows[np.argsort(-depth[rows], kind="stable")]
    computed = [int((depth > j).sum()) for j in range(steps)]
    first, last = _extent(rows, document, starts)
    context = (depth == 0) & (t <= last[document])
    kv_rows = np.concatenate([rows, np.flatnonzero(context)])
    kv_place = np.full(T, -1, dtype=np.int64)
    kv_place[kv_rows] = np.arange(kv_rows.size)

    reads = [kv_rows + 1] + [rows[: computed[j]] + 1 + j for j in range(1, steps)]
    by_queries = np.unique(np.concatenate([rows + 1, *reads[1:]]))
    read_rows = np.concatenate([by_queries, np.setdiff1d(reads[0], by_queries)])
    read_place = np.full(T, -1, dtype=np.int64)
    read_place[read_rows] = np.arange(read_rows.size)

    buckets, slot, slot_row = _buckets(rows, document, starts, first, last, kv_place)
    chosen = [np.flatnonzero(active[j, rows[: computed[j]]]) for j in range(steps)]
    # Target-major: one softmax of the target at row t+1+j serves every step that looks at it.
    target = np.concatenate([rows[c] + 1 + j for j, c in enumerate(chosen)])
    step = np.concatenate([np.full(c.size, j) for j, c in enumerate(chosen)])
    order = np.argsort(target, kind="stable")
    target_rows, target_index, counts = np.unique(target[order], return_inverse=True, return_counts=True)
    return Plan(
        steps=steps,
        tokens=T,
        computed=tuple(computed),
        rows=tuple(_tensor(rows[c]) for c in chosen),
        active=tuple(None if c.size == n else _tensor(c) for c, n in zip(chosen, computed, strict=True)),
        kv_rows=_tensor(kv_rows),
        positions=_tensor(kv_rows - starts[document[kv_rows]]),
        read_rows=_tensor(read_rows),
        read_by_queries=by_queries.size,
        read_index=tuple(_tensor(read_place[r]) for r in reads),
        buckets=buckets,
        slot=_tensor(slot),
        slot_row=tuple(_tensor(np.where((slot_row >= 0) & (slot_row < n), slot_row, 0)) for n in computed),
        order=_tensor(order),
        target_rows=_tensor(target_rows),
        target_index=_tensor(target_index),
        entry_step=_tensor(step[order]),
        target_starts=(0, *np.cumsum(counts).tolist()),
    )


def _tensor(array: Ints) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array, dtype=np.int64))


def _extent(rows: Ints, document: Ints, starts: Ints) -> tuple[Ints, Ints]:
    """First and last computed row of every document; (its end, -1) where there is none."""
    first, last = starts[1:].copy(), np.full(starts.size - 1, -1, dtype=np.int64)
    np.minimum.at(first, document[rows], rows)
    np.maximum.at(last, document[rows], rows)
    return first, last


def _buckets(
    rows: Ints, document: Ints, starts: Ints, first: Ints, last: Ints, kv_place: Ints
) -> tuple[tuple[Bucket, ...], Ints, Ints]:
    """Group documents for the attention kernel; also each computed row's slot, and each slot's row (-1: none)."""
    used = np.flatnonzero(last >= 0)
    span, prefix = last[used] - first[used] + 1, first[used] - starts[:-1][used]
    used = used[np.lexsort((span, prefix, prefix > 0))] if used.size else used
    base = np.zeros(starts.size - 1, dtype=np.int64)
    buckets, slots = [], 0
    for members in _groups(used, (last - first + 1)[used], (first - starts[:-1])[used]):
        L = int((last[members] - first[members]).max()) + 1
        prefixes = first[members] - starts[:-1][members]
        S = int(prefixes.max())
        offset = np.arange(L)
        key_rows = np.minimum(first[members][:, None] + offset, last[members][:, None])
        before, hidden = None, None
        if S:
            padding = np.arange(S) >= prefixes[:, None]
            before = kv_place[np.where(padding, first[members][:, None], starts[:-1][members][:, None] + np.arange(S))]
            hidden = torch.from_numpy(padding) if padding.any() else None
        base[members] = slots + L * np.arange(members.size)
        buckets.append(
            Bucket(
                documents=members.size,
                span=L,
                slots=slice(slots, slots + members.size * L),
                causal_index=_tensor(kv_place[key_rows].reshape(-1)),
                prefix_index=None if before is None else _tensor(before.reshape(-1)),
                prefix_hidden=hidden,
            )
        )
        slots += members.size * L
    slot = base[document[rows]] + rows - first[document[rows]]
    slot_row = np.full(slots, -1, dtype=np.int64)
    slot_row[slot] = np.arange(rows.size)
    return tuple(buckets), slot, slot_row


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
        mixed = i > begin and (prefix[i] > 0) != (prefix[begin] > 0)
        if mixed or (i > begin and padded > 2 * (exact + pairs) + _FREE_PAIRS):
            groups.append(used[begin:i])
            begin, exact, width, length = i, 0, int(span[i]), int(prefix[i])
        exact, widest, longest = exact + pairs, width, length
    if used.size:
        groups.append(used[begin:])
    return groups
