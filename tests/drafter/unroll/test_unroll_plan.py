"""The index arithmetic of a batch beside its definition, row by row: `drafter/unroll/plan.py` and `layout.py`."""

from __future__ import annotations

from dataclasses import fields
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor

from drafter.errors import DrafterError
from drafter.unroll.layout import Packed, Padded, pack
from drafter.unroll.plan import Plan, make_plan


def random_batch(seed: int) -> tuple[list[int], list[bool]]:
    """Boundaries of up to eight documents of up to 16 tokens, and a mask of stretches that are responses."""
    rng = np.random.default_rng(seed)
    starts = [0, *np.cumsum(rng.integers(1, 17, rng.integers(1, 9))).tolist()]
    mask = (np.repeat(rng.random(starts[-1]), rng.integers(1, 5, starts[-1]))[: starts[-1]] < rng.random()).tolist()
    return starts, mask


def prompts(sizes: list[tuple[int, int]]) -> tuple[list[int], list[bool]]:
    """The same of documents, each with its tokens and those of its response."""
    mask = [number >= tokens - response for tokens, response in sizes for number in range(tokens)]
    return [0, *np.cumsum([tokens for tokens, _ in sizes]).tolist()], mask


BATCHES = {
    **{f"random {seed}": random_batch(seed) for seed in range(8)},
    "prompts": prompts([(6, 5), (9, 8), (9, 4), (9, 4), (12, 3), (14, 8), (16, 14), (30, 3), (40, 12), (41, 38)]),
    "many prompts": prompts([(n, 1 + n * n % (n - 1)) for n in range(4, 30)]),
    "no pairs to spare": prompts([(n, n) for n in (3, 3, 10, 17, 17, 33)]),  # of 60: none, and one too many
    "one pair too many": prompts([(n, n) for n in (17, 17, 33)]),
    "tool output": ([0, 12, 13, 20], [False] * 3 + [True] * 2 + [False] * 4 + [True] * 3 + [True] + [True] * 7),
    "nothing": ([0, 2, 4], [True, True, False, False]),
    "one token": ([0, 3], [False, False, True]),
}


def planned(name: str, steps: int, *, every_row: bool = False) -> Plan:
    starts, mask = BATCHES[name]
    return make_plan(torch.tensor(starts, dtype=torch.int32), torch.tensor(mask), steps, every_row=every_row)


def depths(name: str, steps: int, *, every_row: bool = False) -> list[int]:
    """By row: at how many steps it is computed."""
    starts, mask = BATCHES[name]
    found = []
    for begin, end in pairwise(starts):
        own = [
            max((j + 1 for j in range(steps) if t + 2 + j < end and mask[t + 2 + j]), default=0)
            for t in range(begin, end)
        ]
        last = max((at for at, depth in enumerate(own) if depth), default=-1)
        found += [max(depth, every_row and at <= last) for at, depth in enumerate(own)]
    return found


@pytest.mark.parametrize("every_row", [False, True])
@pytest.mark.parametrize("steps", [1, 4])
@pytest.mark.parametrize("name", BATCHES)
def test_each_row_and_step_is_where_the_definition_has_it(name: str, steps: int, every_row: bool) -> None:
    (starts, mask), depth = BATCHES[name], depths(name, steps, every_row=every_row)
    plan = planned(name, steps, every_row=every_row)
    T = len(mask)
    document = [max(d for d, begin in enumerate(starts[:-1]) if begin <= t) for t in range(T)]
    computed = sorted((t for t in range(T) if depth[t]), key=lambda t: -depth[t])
    n = [sum(d > j for d in depth) for j in range(steps)]
    assert (plan.steps, plan.tokens, plan.computed) == (steps, T, tuple(n))

    is_active = [[t + 2 + j < starts[document[t] + 1] and mask[t + 2 + j] for t in range(T)] for j in range(steps)]
    rows = [[t for t in computed[: n[j]] if is_active[j][t]] for j in range(steps)]
    assert [one.tolist() for one in plan.rows] == rows
    assert plan.entries == tuple(map(len, rows))
    for j, places in enumerate(plan.active):
        assert (places is None) == (len(rows[j]) == n[j])
        assert places is None or places.tolist() == [i for i in range(n[j]) if is_active[j][computed[i]]]

    last = [max((t for t in computed if document[t] == d), default=-1) for d in range(len(starts) - 1)]
    keys = computed + [t for t in range(T) if not depth[t] and t <= last[document[t]]]
    assert plan.kv_rows.tolist() == keys
    assert plan.positions.tolist() == [t - starts[document[t]] for t in keys]

    of_queries = sorted({t + 1 + j for j in range(steps) for t in computed[: n[j]]})
    assert plan.read_rows.tolist() == of_queries + sorted({t + 1 for t in keys} - set(of_queries))
    assert len(of_queries) == plan.computed[0]
    reads = [plan.read_rows[index].tolist() for index in plan.read_index]
    assert reads == [[t + 1 for t in keys], *([t + 1 + j for t in computed[: n[j]]] for j in range(1, steps))]

    entries = sorted(((t + 1 + j, j, i) for j in range(steps) for i, t in enumerate(rows[j])))
    begins = np.cumsum([0, *plan.entries])
    assert plan.order.tolist() == [begins[j] + i for _, j, i in entries]
    assert plan.entry_step.tolist() == [j for _, j, _ in entries]
    targets = [target for target, _, _ in entries]
    assert plan.target_rows.tolist() == sorted(set(targets))
    assert plan.target_rows[plan.target_index].tolist() == targets
    assert plan.target_starts == (*(targets.index(target) for target in sorted(set(targets))), len(targets))


# --- where queries and keys lie
def spans(name: str, steps: int) -> list[tuple[int, int, int]]:
    """Of each document with computed rows: its first row, its first computed one, its last."""
    starts, depth = BATCHES[name][0], depths(name, steps)
    found = []
    for begin, end in pairwise(starts):
        if own := [t for t in range(begin, end) if depth[t]]:
            found.append((begin, own[0], own[-1]))
    return found


def rows_in_slots(plan: Plan, layout: Padded | Packed, slots: int) -> dict[int, int]:
    """The slot of each computed row, once it is seen that each step has them there."""
    computed = plan.kv_rows[: plan.computed[0]].tolist()
    slot = layout.slot.tolist()
    for n, row in zip(plan.computed, layout.slot_row, strict=True):
        assert row.shape == (slots,)
        assert row[slot[:n]].tolist() == list(range(n))
        assert row.sum() == sum(range(n)), "row 0 stands where there is none"
    return dict(zip(computed, slot, strict=True))


@pytest.mark.parametrize("name", BATCHES)
def test_packed_spans_follow_one_another(name: str) -> None:
    plan, found = planned(name, 3), spans(name, 3)
    layout = pack(plan.spans)
    queries = [0, *np.cumsum([last - first + 1 for _, first, last in found]).tolist()]
    keys = [0, *np.cumsum([last - begin + 1 for begin, _, last in found]).tolist()]
    assert (layout.queries, layout.keys) == (tuple(queries), tuple(keys))
    for starts, told in ((layout.query_starts, queries), (layout.key_starts, keys)):
        assert (starts.dtype, starts.tolist()) == (torch.int32, told)
    assert plan.kv_rows[layout.key_index].tolist() == [t for begin, _, last in found for t in range(begin, last + 1)]
    for row, slot in rows_in_slots(plan, layout, queries[-1]).items():
        (at,) = [n for n, (_, first, last) in enumerate(found) if first <= row <= last]
        assert slot == queries[at] + row - found[at][1]
    if found:
        assert layout.longest_span == max(last - first + 1 for _, first, last in found)
        assert layout.longest_keys == max(last - begin + 1 for begin, _, last in found)


@pytest.mark.parametrize("free", [0, 60, 1 << 18])
@pytest.mark.parametrize("name", BATCHES)
def test_documents_of_a_bucket_are_padded_at_their_end(name: str, free: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bucket ends before the document with which its padding would cost more than its documents, and `free` pairs."""
    monkeypatch.setattr("drafter.unroll.layout._FREE_PAIRS", free)
    plan, found = planned(name, 3), spans(name, 3)
    layout = plan.layout
    assert isinstance(layout, Padded)
    # Those without a prefix first, then by prefix and span.
    found.sort(key=lambda d: (d[1] > d[0], d[1] - d[0], d[2] - d[1]))
    rest, slots, expected = list(found), 0, dict[int, int]()
    for bucket in layout.buckets:
        own, rest = rest[: bucket.documents], rest[bucket.documents :]
        L, S = max(last - first + 1 for _, first, last in own), max(first - begin for begin, first, _ in own)
        assert (bucket.span, bucket.slots) == (L, slice(slots, slots + L * len(own)))
        causal = plan.kv_rows[bucket.causal_index].view(len(own), L).tolist()
        assert causal == [[min(first + i, last) for i in range(L)] for _, first, last in own]
        assert (bucket.prefix_index is None) == (S == 0)
        if bucket.prefix_index is not None:
            hidden = [[i >= first - begin for i in range(S)] for begin, first, _ in own]
            prefix = plan.kv_rows[bucket.prefix_index].view(len(own), S).tolist()
            assert prefix == [
                [first if hidden[d][i] else begin + i for i in range(S)] for d, (begin, first, _) in enumerate(own)
            ]
            told = bucket.prefix_hidden
            assert (told is None) == (not any(map(any, hidden)))
            assert told is None or told.tolist() == hidden
        for n, (_, first, last) in enumerate(own):
            expected |= {t: slots + n * L + t - first for t in range(first, last + 1)}
        slots = bucket.slots.stop
        assert len(own) == 1 or fits(own, free)
        assert not rest or not fits([*own, rest[0]], free)
    assert not rest
    assert rows_in_slots(plan, layout, slots).items() <= expected.items()


def fits(documents: list[tuple[int, int, int]], free: int) -> bool:
    """Whether documents may share a bucket."""
    sizes = [(last - first + 1, first - begin) for begin, first, last in documents]
    L, S = (max(column) for column in zip(*sizes, strict=True))
    exact = sum(span * (span + prefix) for span, prefix in sizes)
    return len({prefix > 0 for _, prefix in sizes}) == 1 and len(sizes) * L * (L + S) <= 2 * exact + free


# --- where the tensors are
def tensors(of: object) -> dict[str, tuple[Tensor | None, ...]]:
    held = {one.name: getattr(of, one.name) for one in fields(of)}  # type: ignore[arg-type]
    each = {name: value if isinstance(value, tuple) else (value,) for name, value in held.items()}
    return {name: one for name, one in each.items() if any(isinstance(part, Tensor) for part in one)}


def test_a_plan_for_another_device_has_all_of_its_tensors_there_and_packed_spans() -> None:
    plan = planned("tool output", 3)
    assert plan.to("cpu") is plan
    moved = plan.to("meta")
    assert isinstance(moved.layout, Packed)
    for one, other in ((plan, moved), (pack(plan.spans), moved.layout)):
        before, after = tensors(one), tensors(other)
        assert before.keys() == after.keys()
        for name, parts in before.items():
            for a, b in zip(parts, after[name], strict=True):
                assert (a is None) == (b is None)
                assert a is None or b is None or (b.device.type, b.shape, b.dtype) == ("meta", a.shape, a.dtype)
    assert {name: one for name, one in vars(moved).items() if name in ("steps", "tokens", "computed", "spans")} == {
        "steps": 3, "tokens": plan.tokens, "computed": plan.computed, "spans": plan.spans
    }  # fmt: skip


@pytest.mark.parametrize(
    ("starts", "steps", "said"),
    [
        ([0, 5], 0, "expected at least one step, got 0"),
        ([0], 1, r"cu_seqlens must ascend from 0 to the 5 tokens of loss_mask, got \[0\]$"),
        ([1, 5], 1, r"got \[1, 5\]$"),
        ([0, 4], 1, r"got \[0, 4\]$"),
        ([0, 3, 3, 5], 1, r"got \[0, 3, 3, 5\]$"),
        ([0, 1, 2, 3, 4, 4, 4, 4, 4, 5], 1, r"got \[0, 1, 2, 3, 4, 4, 4, 4\]$"),
    ],
)
def test_what_cannot_be_planned_is_refused(starts: list[int], steps: int, said: str) -> None:
    with pytest.raises(DrafterError, match=said):
        make_plan(torch.tensor(starts), torch.ones(5), steps)
