"""The unroll against the float64 reference, packing, compaction, and mutations that prove that the check has teeth."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.drafter.drafter_worlds import (
    HIDDEN,
    SHAPES,
    Expected,
    World,
    deviation,
    expected,
    gradients,
    mask_of,
    ours,
    world,
)

from drafter.errors import DrafterError
from drafter.model import eagle3_unroll
from drafter.model.eagle3 import Eagle3Drafter, LayerWeights
from drafter.model.eagle3_layer import finish
from drafter.model.eagle3_unroll import unroll
from drafter.model.pointwise import rms_norm, rotary
from drafter.policy import TargetHead
from drafter.training.loss import DraftLoss, draft_loss
from drafter.training.target import draft_target
from drafter.unroll import attention
from drafter.unroll import packed as packed_attention
from drafter.unroll.layout import pack, pad
from drafter.unroll.plan import Plan, make_plan

#: What float64 leaves; the gate asked for is 1e-5.
EXACT = 1e-10
GATE = 1e-5
#: A wrong formula must be told from rounding by a wide margin.
TEETH = 1e-3


@pytest.mark.parametrize("draft", [9, 17], ids=["reduced vocabulary", "full vocabulary"])
@pytest.mark.parametrize("steps", [1, 3, 7])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_step_and_gradient_equals_the_reference(shape: str, steps: int, draft: int) -> None:
    w = world(SHAPES[shape], draft=draft, temperature=0.7)
    want, got = expected(w, steps), ours(w, steps)
    assert list(got.entries) == want.entries
    assert deviation(got, gradients(w, got.loss), want) < EXACT


@pytest.mark.parametrize("steps", [3, 7])
@pytest.mark.parametrize("shape", ["packed, awkward", "one document, full response"])
def test_float32_stays_within_the_gate_of_the_float64_reference(shape: str, steps: int) -> None:
    w = world(SHAPES[shape], dtype=torch.float32)
    got = ours(w, steps)
    assert deviation(got, gradients(w, got.loss), expected(w, steps)) < GATE


def test_packed_documents_equal_the_sum_of_single_ones() -> None:
    w = world(SHAPES["packed, awkward"])
    packed = ours(w, 4)
    parts = [ours(replace(w, batch=d), 4) for d in w.documents if any(make_plan_of(d, 4).entries)]
    assert torch.allclose(packed.kl_sums, torch.stack([p.kl_sums for p in parts]).sum(0), rtol=1e-12)
    torch.testing.assert_close(packed.loss, torch.stack([p.loss for p in parts]).sum(), rtol=1e-12, atol=0)


def make_plan_of(batch: object, steps: int) -> Plan:
    return make_plan(batch.cu_seqlens, batch.loss_mask, steps)  # type: ignore[attr-defined]


def test_what_a_neighbour_holds_changes_nothing() -> None:
    """Nothing crosses a boundary: not attention, not the shift, not the mask."""
    w = world(SHAPES["packed, half response"])
    other = world(SHAPES["packed, half response"], seed=5)
    cut = int(w.batch.cu_seqlens[1])
    mixed = replace(
        w.batch,
        input_ids=torch.cat([w.batch.input_ids[:cut], other.batch.input_ids[cut:]]),
        aux_hidden=torch.cat([w.batch.aux_hidden[:cut], other.batch.aux_hidden[cut:]]),
    )
    plan = make_plan_of(w.batch, 3)
    a, b = (unroll(w.drafter, plan, x.input_ids, x.aux_hidden, w.embed_tokens) for x in (w.batch, mixed))
    for rows, one, two in zip(a.rows, a.pre, b.pre, strict=True):
        torch.testing.assert_close(one[rows < cut], two[rows < cut], rtol=1e-12, atol=1e-12)
        assert not torch.allclose(one[rows >= cut], two[rows >= cut])


def test_prompt_rows_get_only_the_work_that_they_need() -> None:
    plan = make_plan(torch.tensor([0, 100, 140]), torch.cat([mask_of(100, 60), mask_of(40, 39)]), 4)
    # Rows 55..97 of the first document (its first response token, 60, is drafted from row 58 at step 0, 55 at step 3);
    # of the second, rows 34..37 look at its only response token.
    assert plan.computed == (43 + 4, 42 + 3, 41 + 2, 40 + 1)
    assert plan.entries == (40 + 1, 40 + 1, 40 + 1, 40 + 1)
    assert plan.kv_rows.numel() == 98 + 38
    assert sorted(plan.kv_rows.tolist()) == [*range(98), *range(100, 138)]


@pytest.mark.parametrize("lengths", [(300, 2, 2, 3, 200, 7), (40,) * 30, (600, 5, 5, 5, 5, 5, 5)])
def test_bucketing_is_exact_whatever_the_lengths(lengths: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    masks = tuple(mask_of(n, max(1, n // 3)) for n in lengths)
    w = world(masks)
    whole = ours(w, 3)
    monkeypatch.setattr("drafter.unroll.layout._FREE_PAIRS", 0)  # many buckets instead of few
    cut = ours(w, 3)
    torch.testing.assert_close(whole.kl_sums, cut.kl_sums, rtol=1e-11, atol=0)
    for a, b in zip(gradients(w, whole.loss).values(), gradients(w, cut.loss).values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_packed_layout_of_other_devices_agrees_with_the_padded_one(
    shape: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    w = world(SHAPES[shape])
    fused = ours(w, 4)
    fused_grads = gradients(w, fused.loss)
    monkeypatch.setattr("drafter.unroll.plan.pad", pack)
    monkeypatch.setattr(packed_attention, "_SCORES", 200)  # several blocks of queries per document
    plain = ours(w, 4)
    torch.testing.assert_close(fused.kl_sums, plain.kl_sums, rtol=1e-11, atol=0)
    for a, b in zip(fused_grads.values(), gradients(w, plain.loss).values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("layout", [pad, pack], ids=["padded", "packed"])
def test_gradcheck_of_the_merged_attention(layout: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("drafter.unroll.plan.pad", layout)
    plan = make_plan(torch.tensor([0, 6, 13]), torch.cat([mask_of(6, 3), mask_of(7, 6)]), 3)
    n, M = plan.computed[2], plan.kv_rows.numel()
    shapes = [(n, 4, 6), (M, 2, 6), (M, 2, 6), *[(n, 2, 6)] * 4]
    inputs = [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in shapes]

    def attended(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *diagonal: torch.Tensor) -> torch.Tensor:
        pairs = list(zip(diagonal[::2], diagonal[1::2], strict=True))
        return attention.attend(plan, 2, q, attention.gather_keys(plan, k, v), pairs)

    assert torch.autograd.gradcheck(attended, inputs)


@pytest.mark.parametrize("layout", [pad, pack], ids=["padded", "packed"])
def test_gradients_of_peaked_attention_are_those_of_a_plain_softmax(
    layout: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scores of thousands. A slot that holds no row must weigh nothing: exp of its score would be infinite."""
    monkeypatch.setattr("drafter.unroll.plan.pad", layout)
    starts = torch.tensor([0, 6, 19])
    plan = make_plan(starts, torch.cat([mask_of(6, 3), mask_of(13, 9)]), 3)
    n, M, g = plan.computed[2], plan.kv_rows.numel(), torch.Generator().manual_seed(0)
    assert plan.layout.slot_row[2].numel() > n
    shapes = [(n, 4, 6), (M, 2, 6), (M, 2, 6), *[(n, 2, 6)] * 4]
    inputs = [torch.randn(s, generator=g, dtype=torch.float64) for s in shapes]
    q, k, v, k1, v1, k2, v2 = (x.mul_(60 if i in (0, 1, 3, 5) else 1).requires_grad_() for i, x in enumerate(inputs))

    rows = torch.from_numpy(plan.spans.rows[:n])[:, None]
    document = torch.bucketize(plan.kv_rows, starts, right=True)
    seen = (plan.kv_rows <= rows) & (document == torch.bucketize(rows, starts, right=True))  # [n, M]
    keys, values = (x.repeat_interleave(2, 1) for x in (k, v))  # a head each
    scores = torch.einsum("nhd,mhd->nhm", q, keys).masked_fill(~seen[:, None], -torch.inf)
    own = [(q * x.repeat_interleave(2, 1)).sum(-1, keepdim=True) for x in (k1, k2)]
    weights = torch.softmax(torch.cat([scores, *own], -1) / 6**0.5, -1)
    plain = torch.einsum("nhm,mhd->nhd", weights[..., :M], values)
    plain = plain + sum(weights[..., M + i, None] * x.repeat_interleave(2, 1) for i, x in enumerate((v1, v2)))

    out = attention.attend(plan, 2, q, attention.gather_keys(plan, k, v), [(k1, v1), (k2, v2)])
    torch.testing.assert_close(out, plain, rtol=1e-9, atol=1e-11)
    of = (q, k, v, k1, v1, k2, v2)
    got, want = (torch.autograd.grad(x.sin().sum(), of) for x in (out, plain))
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)


def test_gradcheck_of_the_whole_step() -> None:
    w = world((mask_of(6, 2), mask_of(5, 3)))
    names, parameters = zip(*w.drafter.named_parameters(), strict=True)

    def loss(*values: torch.Tensor) -> torch.Tensor:
        def run() -> torch.Tensor:
            return ours(w, 3).loss

        given = {f"drafter.{n}": v for n, v in zip(names, values, strict=True)}
        found: torch.Tensor = torch.func.functional_call(_Closure(w.drafter, run), given)
        return found

    assert torch.autograd.gradcheck(loss, parameters, fast_mode=True)


class _Closure(torch.nn.Module):
    """Calls `run` while the drafter's parameters are swapped for others."""

    def __init__(self, drafter: Eagle3Drafter, run: object) -> None:
        super().__init__()
        self.drafter, self.run = drafter, run

    def forward(self) -> torch.Tensor:
        return self.run()  # type: ignore[operator, no-any-return]


def test_a_batch_with_nothing_to_supervise_unrolls_to_nothing() -> None:
    w = world((mask_of(2, 1), mask_of(4, 4)))
    result = ours(w, 3)
    assert result.entries == (0, 0, 0)
    assert result.loss.item() == 0.0


def test_wrong_shapes_are_refused_with_the_expected_ones() -> None:
    w = world(SHAPES["packed, half response"])
    plan = make_plan_of(w.batch, 2)
    with pytest.raises(DrafterError, match="plan is for 29 tokens"):
        unroll(w.drafter, plan, w.batch.input_ids[1:], w.batch.aux_hidden, w.embed_tokens)
    with pytest.raises(DrafterError, match="aux_hidden must be"):
        unroll(w.drafter, plan, w.batch.input_ids, w.batch.aux_hidden[:, 1:], w.embed_tokens)
    with pytest.raises(DrafterError, match="cu_seqlens must ascend"):
        make_plan(torch.tensor([0, 5]), w.batch.loss_mask, 2)
    with pytest.raises(DrafterError, match="at least one step"):
        make_plan(w.batch.cu_seqlens, w.batch.loss_mask, 0)


# --- mutations: each is a mistake that a peer made or could make, and each must be seen ------------------------------

STEPS = 4


@pytest.fixture(scope="module")
def wanted() -> Expected:
    return expected(world(SHAPES["packed, awkward"]), STEPS)


@pytest.fixture
def bench(wanted: Expected) -> tuple[World, Expected]:
    return world(SHAPES["packed, awkward"]), wanted


def seen(w: World, want: Expected, got: DraftLoss | None = None) -> float:
    result = ours(w, STEPS) if got is None else got
    return deviation(result, gradients(w, result.loss), want)


def test_the_unmutated_bench_passes(bench: tuple[World, Expected]) -> None:
    assert seen(*bench) < EXACT


def test_a_mask_off_by_one_row_is_seen(bench: tuple[World, Expected]) -> None:
    w, want = bench
    assert seen(replace(w, batch=replace(w.batch, loss_mask=w.batch.loss_mask.roll(1))), want) > TEETH


@pytest.mark.parametrize("shift", [-1, 1])
def test_tokens_off_by_one_are_seen(bench: tuple[World, Expected], shift: int) -> None:
    w, want = bench
    assert seen(replace(w, batch=replace(w.batch, input_ids=w.batch.input_ids.roll(shift))), want) > TEETH


@pytest.mark.parametrize("shift", [-1, 1])
def test_a_target_off_by_one_is_seen(bench: tuple[World, Expected], shift: int) -> None:
    w, want = bench
    moved = replace(w.batch, last_hidden=w.batch.last_hidden.roll(shift, 0), logsumexp=w.batch.logsumexp.roll(shift, 0))
    assert seen(replace(w, batch=moved), want) > TEETH


def test_features_in_another_order_of_rows_are_seen(bench: tuple[World, Expected]) -> None:
    w, want = bench
    shuffled = w.batch.aux_hidden[torch.randperm(w.batch.tokens)]
    assert seen(replace(w, batch=replace(w.batch, aux_hidden=shuffled)), want) > TEETH


def test_aux_layers_in_another_order_are_seen(bench: tuple[World, Expected]) -> None:
    w, want = bench
    low, mid, high = torch.split(w.batch.aux_hidden, HIDDEN, dim=1)
    swapped = torch.cat([mid, low, high], dim=1)
    assert seen(replace(w, batch=replace(w.batch, aux_hidden=swapped)), want) > TEETH


def test_ignored_document_boundaries_are_seen(bench: tuple[World, Expected]) -> None:
    w, want = bench
    merged = replace(w.batch, cu_seqlens=torch.tensor([0, w.batch.tokens]))
    assert seen(replace(w, batch=merged), want) > TEETH


def test_d2t_taken_for_an_absolute_index_is_seen(bench: tuple[World, Expected]) -> None:
    w, want = bench
    plan = make_plan_of(w.batch, STEPS)
    unrolled = unroll(w.drafter, plan, w.batch.input_ids, w.batch.aux_hidden, w.embed_tokens)
    target = draft_target(w.batch, plan, w.drafter.vocabulary, TargetHead(w.head), torch.float64)
    wrong = replace(target, head_rows=w.head[w.drafter.vocabulary.d2t])
    assert seen(w, want, draft_loss(w.drafter, unrolled, wrong, denominator=7.0, step_decay=0.8)) > TEETH


@pytest.mark.parametrize(
    "kept", [slice(1, None), slice(None, -1), slice(-1, None)], ids=["first", "own", "all but own"]
)
def test_a_dropped_diagonal_key_is_seen(
    bench: tuple[World, Expected], kept: slice, monkeypatch: pytest.MonkeyPatch
) -> None:
    w, want = bench
    monkeypatch.setattr(
        eagle3_unroll,
        "attend",
        lambda plan, step, q, keys, diagonal: attention.attend(plan, step, q, keys, diagonal[kept]),
    )
    assert seen(w, want) > TEETH


def test_normed_feedback_is_seen(bench: tuple[World, Expected], monkeypatch: pytest.MonkeyPatch) -> None:
    w, want = bench
    fed: list[torch.Tensor] = []

    def normed(r: torch.Tensor, attended: torch.Tensor, weights: LayerWeights, eps: float) -> torch.Tensor:
        fed.append(r)
        return finish(r if len(fed) == 1 else rms_norm(r, weights.norm, eps), attended, weights, eps)

    monkeypatch.setattr(eagle3_unroll, "finish", normed)
    assert seen(w, want) > TEETH


def test_rotary_positions_that_stand_still_are_seen(
    bench: tuple[World, Expected], monkeypatch: pytest.MonkeyPatch
) -> None:
    w, want = bench
    calls: list[int] = []

    def still(positions: torch.Tensor, **rest: Any) -> object:
        calls.append(1)
        return rotary(positions - max(0, len(calls) - 2), **rest)

    monkeypatch.setattr(eagle3_unroll, "rotary", still)
    assert seen(w, want) > TEETH


def test_embedding_and_hidden_halves_swapped_are_seen(bench: tuple[World, Expected]) -> None:
    w, want = bench
    swapped = world(SHAPES["packed, awkward"]).drafter
    for projection in ("q_proj", "k_proj", "v_proj"):
        weight = getattr(swapped.midlayer.self_attn, projection).weight
        weight.data = weight.data.roll(HIDDEN, dims=1)
    assert seen(replace(w, drafter=swapped), want) > TEETH
