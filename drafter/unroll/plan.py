"""Where every row of a packed batch goes during the unroll: index arithmetic, done once per batch on the CPU.

Row t is *active* at step j iff x[t+2+j] lies in its document and is a response token. It is *computed* at steps 0 to
its last active one, because each step is fed by the one before. Rows that are never active (prompts, tool output) only
contribute step-0 keys and values, and only where a later row of their document looks at them: exact, with one layer.

Legend: T tokens, K steps, M rows with step-0 keys, N computed rows (n_j at step j), U target rows, E = sum of active
rows over steps. Computed rows are ordered by falling depth: step j's are simply the first n_j.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from drafter.device import to_device
from drafter.errors import DrafterError
from drafter.unroll.layout import Ints, Layout, Spans, moved, pack, pad


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
    read_rows: Tensor  # int64[M]: positions of the packed axis whose token is embedded; the N of queries first
    read_index: tuple[Tensor, ...]  # per step: int64[n_j] into `read_rows` (step 0: int64[M])
    layout: Layout  # of queries and keys, as the kernels of the plan's device take them
    order: Tensor  # int64[E]: entries (steps concatenated) sorted by the row of the target that they are compared with
    target_rows: Tensor  # int64[U] in [0, T), ascending: p at row u is the distribution of x[u+1]
    target_index: Tensor  # int64[E]: into U, in the order of `order`
    entry_step: Tensor  # int64[E]: step, in the order of `order`
    target_starts: tuple[int, ...]  # U+1: where each target row's entries begin in `order`
    spans: Spans  # host: what layouts are made from

    @property
    def entries(self) -> tuple[int, ...]:
        """Active rows per step."""
        return tuple(r.numel() for r in self.rows)

    def to(self, device: torch.device | str) -> Plan:
        """Copy the index tensors to a device, queries and keys laid out for its kernels. Never waits for the device."""
        if torch.device(device).type == "cpu":
            return self

        def move(tensor: Tensor) -> Tensor:
            return to_device(tensor, device)

        return moved(replace(self, layout=moved(pack(self.spans), move)), move)


def make_plan(cu_seqlens: Tensor, loss_mask: Tensor, steps: int, *, every_row: bool = False) -> Plan:
    """Plan the unroll of `steps` drafted tokens over packed documents. Nothing in it crosses a document's boundary.

    `every_row` computes step 0 of context rows too: layers after the first need keys of what the layer before made.
    """
    if steps < 1:
        raise DrafterError(f"expected at least one step, got {steps}")
    starts = cu_seqlens.cpu().numpy().astype(np.int64)
    mask = loss_mask.cpu().numpy()
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

    if every_row:
        _, last = _extent(np.flatnonzero(depth), document, starts)
        depth = np.where((depth == 0) & (t <= last[document]), 1, depth)
    rows = np.flatnonzero(depth)
    rows = rows[np.argsort(-depth[rows], kind="stable")]
    computed = [int((depth > j).sum()) for j in range(steps)]
    first, last = _extent(rows, document, starts)
    context = np.flatnonzero((depth == 0) & (t <= last[document]))
    kv_rows = np.concatenate([rows, context])
    kv_place = np.full(T, -1, dtype=np.int64)
    kv_place[kv_rows] = np.arange(kv_rows.size)

    reads = [kv_rows + 1] + [rows[: computed[j]] + 1 + j for j in range(1, steps)]
    # Later steps read no other token than step 0: where row t is computed at step j, row t+j is computed.
    read_rows = np.concatenate([np.sort(rows), context]) + 1
    read_place = np.full(T, -1, dtype=np.int64)
    read_place[read_rows] = np.arange(read_rows.size)

    spans = _spans(rows, document, starts, first, last, kv_place, tuple(computed))
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
        rows=tuple(torch.from_numpy(rows[c]) for c in chosen),
        active=tuple(None if c.size == n else torch.from_numpy(c) for c, n in zip(chosen, computed, strict=True)),
        kv_rows=torch.from_numpy(kv_rows),
        positions=torch.from_numpy(kv_rows - starts[document[kv_rows]]),
        read_rows=torch.from_numpy(read_rows),
        read_index=tuple(torch.from_numpy(read_place[r]) for r in reads),
        layout=pad(spans),
        order=torch.from_numpy(order),
        target_rows=torch.from_numpy(target_rows),
        target_index=torch.from_numpy(target_index),
        entry_step=torch.from_numpy(step[order]),
        target_starts=(0, *np.cumsum(counts).tolist()),
        spans=spans,
    )


def _extent(rows: Ints, document: Ints, starts: Ints) -> tuple[Ints, Ints]:
    """First and last computed row of every document; (its end, -1) where there is none."""
    first, last = starts[1:].copy(), np.full(starts.size - 1, -1, dtype=np.int64)
    np.minimum.at(first, document[rows], rows)
    np.maximum.at(last, document[rows], rows)
    return first, last


def _spans(
    rows: Ints, document: Ints, starts: Ints, first: Ints, last: Ints, key_place: Ints, computed: tuple[int, ...]
) -> Spans:
    """Documents with computed rows, numbered from 0."""
    used = np.flatnonzero(last >= 0)
    number = np.zeros(starts.size - 1, dtype=np.int64)
    number[used] = np.arange(used.size)
    return Spans(rows, number[document[rows]], starts[:-1][used], first[used], last[used], key_place, computed)
