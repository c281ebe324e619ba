"""Where packed rollouts lie, and which forwards kept them apart: against transformers' own flash attention."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
import transformers.modeling_flash_attention_utils as flash
from helpers.drafter.target_families import FAMILIES, tiny
from helpers.trainer.hooks_fixtures import receiver, tiny_qwen3
from torch import Tensor

from rl_hooks.errors import RolloutError
from rl_hooks.hook import DrafterHook
from rl_hooks.trainer.packing import PackedRollouts, boundaries_among, check_forward, how_it_reads, lay_out

FLASH = "flash_attention_2"
SEAM, T = 3, 6
PACKED = torch.tensor([[0, 1, 2, 0, 1, 2]])
ROW = torch.ones(1, T, dtype=torch.long)
#: What a forward may be told, by argument. `None` is absent.
POSITIONS = {
    "absent": None,
    "begin again": PACKED,
    "begin again at 5": PACKED + 5,
    "begin again above the lowest": torch.tensor([[0, 1, 2, 1, 2, 3]]),
    "run on": torch.arange(T)[None],
}
BOUNDS = {"absent": None, "seam": torch.tensor([0, 3, 6]), "one": torch.tensor([0, 6])}


def nested(*parts: list[int]) -> Tensor:
    return torch.nested.nested_tensor([torch.tensor(part) for part in parts], layout=torch.jagged)


def _varlen(q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, **_: Any) -> Tensor:
    """flash_attn_varlen_func by its definition: causal from the end, within each sequence."""
    out = torch.zeros_like(q)
    for i in range(len(cu_seqlens_q) - 1):
        a, b = int(cu_seqlens_q[i]), int(cu_seqlens_q[i + 1])
        c, d = int(cu_seqlens_k[i]), int(cu_seqlens_k[i + 1])
        hidden = torch.ones(b - a, d - c).triu(d - c - (b - a) + 1).bool()
        scores = torch.einsum("qhd,khd->hqk", q[a:b], k[c:d]).masked_fill(hidden, -torch.inf)
        out[a:b] = torch.einsum("hqk,khd->qhd", scores.softmax(-1).nan_to_num(0.0), v[c:d])
    return out


def _whole(q: Tensor, k: Tensor, v: Tensor, **_: Any) -> Tensor:
    one = torch.tensor([0, q.shape[1]])
    return torch.stack([_varlen(*row, one, one) for row in zip(q, k, v, strict=True)])


def _leaks(monkeypatch: pytest.MonkeyPatch, rows: int, kwargs: dict[str, Any]) -> bool:
    """Whether a later rollout of any row changes with the tokens of the first, in transformers' own dispatch."""
    functions = (_whole, _varlen, None, flash._pad_input, flash._unpad_input)
    ready = (lambda **given: {"causal": given.get("is_causal")}, None)
    monkeypatch.setattr(flash, "lazy_import_flash_attention", lambda *_: (functions, ready))
    q, k, v = (torch.randn(rows, T, 1, 4, generator=torch.Generator().manual_seed(i)) for i in range(3))
    mask = kwargs.pop("attention_mask", None)
    other = v.clone()
    other[:, :SEAM] += 1.0
    before, after = (flash._flash_attention_forward(q, k, x, mask, T, True, **kwargs) for x in (v, other))
    return not torch.allclose(before[:, SEAM:], after[:, SEAM:])


def test_what_transformers_flash_attention_joins_is_refused_whatever_the_forward_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every combination of positions, boundaries, sequence numbers, masks and rows: no forward that leaks passes."""
    layouts = {n: lay_out(ROW.expand(n, T), None, None, PACKED.expand(n, T)) for n in (1, 2)}
    passed, joined, strict = set(), 0, set()
    cases = product((1, 2), POSITIONS, BOUNDS, BOUNDS, (False, True), (False, True), (False, True))
    for rows, where, cu_q, cu_k, lengths, numbered, masked in cases:
        said: dict[str, Any] = {"position_ids": POSITIONS[where], "cu_seq_lens_q": BOUNDS[cu_q]}
        said |= {"cu_seq_lens_k": BOUNDS[cu_k]}
        said |= {"max_length_q": T, "max_length_k": T} if lengths else {}
        said |= {"seq_idx": torch.tensor([[0, 0, 0, 1, 1, 1]])} if numbered else {}
        if rows == 2:  # boundaries are of both rows, one after the other
            for name in ("cu_seq_lens_q", "cu_seq_lens_k"):
                if said[name] is not None:
                    said[name] = torch.cat([said[name], said[name][1:] + T])
            said["position_ids"] = None if said["position_ids"] is None else said["position_ids"].expand(2, T)
        if lengths and "absent" not in (cu_q, cu_k) and cu_q != cu_k:
            continue  # flash attention reads outside of the shorter one
        mask = torch.ones(rows, T, dtype=torch.long) if masked else None
        leaks = _leaks(monkeypatch, rows, {k: v for k, v in said.items() if k != "seq_idx"} | {"attention_mask": mask})
        joined += leaks
        case = (rows, where, cu_q, cu_k, lengths, masked)
        try:
            check_forward(boundaries_among(said | {"attention_mask": mask}), layouts[rows], FLASH)
        except RolloutError:
            if not leaks:
                strict.add(case)
            continue
        assert not leaks, case
        passed.add(case)
    assert (1, "begin again", "absent", "absent", False, False) in passed
    assert (1, "begin again at 5", "absent", "absent", False, False) in passed
    assert (1, "run on", "seam", "seam", True, False) in passed
    assert (2, "run on", "seam", "seam", True, False) in passed  # boundaries of all rows: the only way for two
    # What is refused without a leak: half-told boundaries, which transformers ignores, that say something else.
    assert joined > 100
    assert all("one" in case[2:4] and (not case[4] or "absent" in case[2:4]) for case in strict), strict


@pytest.mark.parametrize(("bounds", "refused"), [([0, 3, 6], False), ([0, 3, 8], False), ([0, 6], True)])
def test_layers_that_are_told_of_cu_seqlens_alone_go_by_them(bounds: list[int], refused: bool) -> None:
    """Those of prime-rl's own models, which do not ask transformers for attention. Padding may follow."""
    layout = lay_out(ROW, None, torch.tensor([0, SEAM, T]), None)
    said: dict[str, Any] = {"hidden_states": torch.zeros(1, T, 4), "cu_seqlens": torch.tensor(bounds), "max_seqlen": 3}
    if refused:
        with pytest.raises(RolloutError, match="attended to the one before"):
            check_forward(boundaries_among(said), layout, FLASH)
        return
    if bounds[-1] > T:
        layout = lay_out(torch.ones(1, 8), torch.tensor([[1] * T + [0, 0]]), torch.tensor([0, SEAM, 8]), None)
    check_forward(boundaries_among(said), layout, FLASH)
    for more in ({"attention_mask": None}, {"position_ids": torch.arange(T)[None]}):  # transformers' does not heed them
        with pytest.raises(RolloutError, match="attended to the one before"):
            check_forward(boundaries_among(said | more), layout, FLASH)


def test_the_attention_is_that_of_the_forward_and_not_of_the_attaching() -> None:
    """A hook that thought of flash attention would take positions for a separation that sdpa does not make."""
    model = tiny_qwen3(tied=False, seed=1)
    model.config._attn_implementation = FLASH
    with receiver() as service:
        hook = DrafterHook(model, service.url, aux_layers=(1, 2, 3), strict=True)
        model.set_attn_implementation("sdpa")
        row = torch.arange(2, 2 + T)[None]
        told: dict[str, Any] = {"input_ids": row, "loss_mask": ROW, "cu_seqlens": BOUNDS["seam"], "policy_version": 0}
        with pytest.raises(RolloutError, match="attended to the one before"), torch.no_grad(), hook.capture(**told):
            model(row, position_ids=PACKED, use_cache=True)
        hook.close()


@pytest.mark.parametrize("family", FAMILIES)
def test_models_whose_layers_carry_a_state_are_known(family: str) -> None:
    model: Any = tiny(family)
    by_module = any("linear_attn" in name or "mamba" in name for name, _ in model.named_modules())
    assert how_it_reads(model)[1] is by_module
    assert how_it_reads(model)[0] == model.config.get_text_config()._attn_implementation


def test_either_sign_of_a_state_is_enough() -> None:
    """RWKV's config names no kinds of layers; MiniMax's class does not say that it is stateful."""
    model: Any = tiny_qwen3(tied=False, seed=1)
    assert how_it_reads(model)[1] is False
    model._is_stateful = True
    assert how_it_reads(model)[1] is True
    model._is_stateful, model.config.layer_types = False, ["full_attention", "linear_attention"]
    assert how_it_reads(model)[1] is True


@pytest.mark.parametrize(
    ("names", "refused"),
    [((), True), (("seq_idx",), True), (("cu_seq_lens_q",), True), (("seq_idx", "cu_seq_lens_q"), False)],
)
def test_recurrent_layers_need_sequence_numbers_and_boundaries(names: tuple[str, ...], refused: bool) -> None:
    """The gated delta rule goes by cu_seq_lens_q, its convolution and Mamba by seq_idx, none by positions."""
    layout = lay_out(ROW, None, BOUNDS["seam"], None)
    both = {"seq_idx": torch.tensor([[0, 0, 0, 1, 1, 1]]), "cu_seq_lens_q": BOUNDS["seam"]}
    said = {"position_ids": PACKED, "mask": None} | {name: both[name] for name in names}
    check_forward(said, layout, FLASH)
    if refused:
        with pytest.raises(
            RolloutError, match=r"recurrent layers carry .* token 3 of row 0.*seq_idx and cu_seq_lens_q"
        ):
            check_forward(said, layout, FLASH, recurrent=True)
    else:
        check_forward(said, layout, FLASH, recurrent=True)


def test_a_packed_forward_of_a_hybrid_model_with_positions_only_is_refused() -> None:
    """Its attention keeps the rollouts apart, its linear attention does not: the second one sees the first."""
    model: Any = tiny("qwen3 next")
    row, other = torch.arange(2, 2 + T)[None], torch.tensor([[40, 41, 42, 5, 6, 7]])
    with torch.no_grad():
        seen = [model(ids, position_ids=PACKED, use_cache=False).logits[:, SEAM:] for ids in (row, other)]
    assert not torch.allclose(*seen)
    with receiver() as service:
        hook = DrafterHook(model, service.url, aux_layers=(2, 3, 4), strict=True)
        told: dict[str, Any] = {"input_ids": row, "loss_mask": ROW, "cu_seqlens": BOUNDS["seam"], "policy_version": 0}
        with pytest.raises(RolloutError, match="recurrent layers"), torch.no_grad(), hook.capture(**told):
            model(row, position_ids=PACKED, use_cache=False)
        hook.close()


def test_nested_tensors_are_compared_rollout_by_rollout() -> None:
    ids = nested([7, 7, 7], [8, 8, 8, 8, 8])
    layout = lay_out(ids, None, None, None)
    with pytest.raises(RolloutError, match=r"loss_mask is nested with \[5, 3\] tokens, but the rollouts have \[3, 5\]"):
        layout.generated(nested([0, 1, 1, 1, 1], [0, 1, 1]))
    assert layout.generated(nested([0, 1, 1], [0, 1, 1, 1, 1])).tolist() == [0, 1, 1, 0, 1, 1, 1, 1]
    assert layout.generated(torch.tensor([[0, 1, 1, 0, 1, 1, 1, 1]])).sum() == 6
    by_bounds = lay_out(torch.ones(8), None, torch.tensor([0, 3, 8]), None)
    assert by_bounds.flat("logprobs", nested([1, 2, 3], [4, 5, 6, 7, 8]), np.int64)[3] == 4
    with pytest.raises(RolloutError, match="logprobs is nested"):
        by_bounds.flat("logprobs", nested([1, 2, 3, 4, 5], [6, 7, 8]), np.int64)
    with pytest.raises(RolloutError, match=r"cu_seqlens are \[0, 5, 8\], but nested input_ids begin at \[0, 3, 8\]"):
        lay_out(ids, None, torch.tensor([0, 5, 8]), None)


def test_a_missing_loss_mask_is_named() -> None:
    with pytest.raises(RolloutError, match=r"loss_mask must be a tensor \[1, 6\] like input_ids, got None"):
        lay_out(ROW, None, BOUNDS["seam"], None).generated(None)


@pytest.mark.parametrize("ids", [ROW, ROW[0], nested([1, 1, 1, 1, 1, 1])], ids=["a row", "one axis", "nested"])
@pytest.mark.parametrize(
    ("told", "fault"),
    [
        ({"attention_mask": torch.tensor([[1, 1, 1, 2, 2, 2]])}, "attention_mask changes at token 3"),
        ({"position_ids": PACKED}, "position_ids restart at token 3"),
    ],
    ids=["a mask that numbers documents", "positions that begin again"],
)
def test_what_the_caller_says_of_a_packed_row_must_agree(ids: Tensor, told: dict[str, Tensor], fault: str) -> None:
    said: dict[str, Any] = {"attention_mask": None, "position_ids": None} | told
    with pytest.raises(RolloutError, match=fault):
        lay_out(ids, cu_seqlens=BOUNDS["one"], **said)
    if not ids.is_nested:  # where they agree, both are taken
        assert len(lay_out(ids, cu_seqlens=BOUNDS["seam"], **said).rollouts) == 2


def test_padding_before_the_first_rollout_is_never_its_first_token() -> None:
    ids = torch.arange(6)[None]
    for padding in (1, 2):  # what cumsum(mask) - 1 gives padding on the left
        positions = torch.tensor([[-1] * padding + [*range(6 - padding)]])
        with pytest.raises(RolloutError, match=r"the row begins with -1 at token 0.*attention_mask="):
            lay_out(ids, None, None, positions)
        mask = (positions >= 0).long()
        assert [one.tolist() for one in lay_out(ids, mask, None, positions).rollouts] == [[*range(padding, 6)]]


def test_generated_tokens_of_no_rollout_are_refused() -> None:
    forgot = lay_out(ROW, None, torch.tensor([0, 3]), None)
    with pytest.raises(
        RolloutError, match=r"1 at 3 tokens of no rollout, the first at token 3.*end of the last rollout"
    ):
        forgot.generated(ROW)
    assert forgot.generated(torch.tensor([[0, 1, 1, 0, 0, 0]])).sum() == 2  # the rest is padding
    padded = lay_out(ROW, torch.tensor([[1, 1, 1, 1, 0, 0]]), None, None)
    assert padded.generated(ROW).sum() == 6  # a padded row's loss mask may go over its padding, as it always could


@pytest.mark.parametrize(
    ("said", "refused"),
    [
        ({"position_ids": torch.arange(12)[None]}, True),
        ({"position_ids": torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]])}, True),
        ({"position_ids": torch.tensor([[0, 1, 2, 0, 1, 2, 0, 1]])}, False),
        ({"position_ids": torch.tensor([[0, 1, 2, 0, 1, 2, 1, 1]])}, False),
        ({"cu_seq_lens_q": torch.tensor([0, 3, 12])}, True),
        ({"cu_seq_lens_q": torch.tensor([0, 3, 6]), "position_ids": torch.arange(8)[None]}, False),
        ({"cu_seq_lens_q": torch.tensor([0, 3, 6, 8])}, False),
        ({"seq_idx": torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1]])}, True),
        ({"seq_idx": torch.tensor([[0, 0, 0, 1, 1, 1, 2, 2]])}, False),
    ],
)
def test_a_longer_forward_must_have_a_boundary_where_the_told_row_ends(said: dict[str, Tensor], refused: bool) -> None:
    bounds = BOUNDS["one"] if len(set(said.get("position_ids", ROW)[0].tolist())) == 12 else BOUNDS["seam"]
    layout = lay_out(ROW, None, bounds, None)
    block = torch.zeros(1, 1, 12, 12, dtype=torch.bool)  # attention itself keeps all apart
    if refused:
        with pytest.raises(RolloutError, match="forward is longer than the 6 tokens"):
            check_forward(said | {"mask": block}, layout)
    else:
        check_forward(said | {"mask": block}, layout)


def test_a_longer_forward_cuts_no_rollout_where_the_told_row_ends_in_padding() -> None:
    layout = lay_out(ROW, None, torch.tensor([0, 3]), None)
    check_forward({"position_ids": torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]]), "mask": None}, layout, FLASH)


#: Two rollouts that share a prefix tree's first token; it forks one token before they differ, as TRL's does.
TREE = {
    "position_ids": torch.tensor([[0, 1, 2, 3, 1, 2]]),
    "tree_kv_index": torch.tensor([0, 0, 1, 2, 3, 0, 4, 5]),
    "tree_cu_seqlens_q": torch.tensor([0, 1, 4, 6]),
    "tree_cu_seqlens_k": torch.tensor([0, 1, 5, 8]),
    "mask": None,
}
PLACES = [0, 1, 2, 3, 0, 4, 5]


def tree_layout(places: list[int], bounds: tuple[int, ...] = (0, 4, 7)) -> PackedRollouts:
    return lay_out(torch.zeros(1, bounds[-1]), None, torch.tensor(bounds), None, torch.tensor(places))


def test_the_paths_of_a_prefix_tree_are_read_where_the_forward_has_them() -> None:
    layout = tree_layout(PLACES)
    assert layout.forward_shape == (1, 6)
    assert [layout.in_forward(rollout).tolist() for rollout in layout.rollouts] == [[0, 1, 2, 3], [0, 4, 5]]
    check_forward(boundaries_among(TREE | {"attention_mask": None}), layout, "tree_fa3")


@pytest.mark.parametrize(
    ("places", "bounds"),
    [
        ([0, 1, 2, 3, 0, 1, 5], (0, 4, 7)),  # a sibling's token
        ([0, 1, 2, 3, 4, 5], (0, 4, 6)),  # without the prefix
        ([0, 1, 2, 0, 4, 5], (0, 3, 6)),  # one token short of a segment
        ([0, 2, 3, 0, 4, 5], (0, 3, 6)),  # a token left out
        ([0, 1, 2, 3, 0, 4, 5], (0, 3, 7)),  # a boundary one token early
    ],
)
def test_what_is_no_path_of_the_forwards_prefix_tree_is_refused(places: list[int], bounds: tuple[int, ...]) -> None:
    with pytest.raises(RolloutError, match=r"no path of the forward's prefix tree|must ascend"):
        check_forward(TREE, tree_layout(places, bounds), "tree_fa3")


@pytest.mark.parametrize(
    "said",
    [
        {"position_ids": torch.tensor([[0, 1, 2, 3, 4, 5]])},
        {"tree_kv_index": torch.tensor([0, 0, 1, 2, 3, 0, 1, 5])},
        {"tree_cu_seqlens_k": torch.tensor([0, 1, 6, 8])},
    ],
)
def test_a_prefix_tree_that_reads_other_tokens_is_refused(said: dict[str, torch.Tensor]) -> None:
    with pytest.raises(RolloutError, match="no path of the forward's prefix tree"):
        check_forward(TREE | said, tree_layout(PLACES), "tree_fa3")


def test_a_prefix_tree_is_refused_where_one_side_does_not_say_it() -> None:
    layout = tree_layout(PLACES)
    with pytest.raises(RolloutError, match="tree_places= of `capture`"):
        check_forward(TREE, lay_out(torch.zeros(1, 6), None, torch.tensor([0, 6]), None), "tree_fa3")
    with pytest.raises(RolloutError, match="can be read: tree_kv_index"):
        check_forward({name: value for name, value in TREE.items() if name != "tree_kv_index"}, layout, "tree_fa3")
    with pytest.raises(RolloutError, match="can be read: attention or layers"):
        check_forward(TREE, layout, "sdpa")
    with pytest.raises(RolloutError, match="can be read: attention or layers"):
        check_forward(TREE, layout, "tree_fa3", recurrent=True)
    with pytest.raises(RolloutError, match="by cu_seqlens="):
        lay_out(torch.zeros(1, 7), torch.ones(1, 7), None, None, torch.tensor(PLACES))
    with pytest.raises(RolloutError, match=r"tree_places must be \[1, 7\]"):
        tree_layout(PLACES[1:])
    with pytest.raises(RolloutError, match="must ascend"):
        tree_layout([0, 1, 2, 3, 0, 5, 4])
