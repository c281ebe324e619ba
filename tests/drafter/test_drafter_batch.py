"""Rollout files as tensors: exact values, selection, packing, screening."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.drafter.drafter_worlds import SHAPES, VOCAB, cast, world
from helpers.service.service_fixtures import with_last_rows

from drafter.batch import RolloutBatch, load_batch, screen
from drafter.errors import BatchRejected, DrafterError, NotFinite
from drafter.policy import TargetHead
from drafter.replay.replay import replay
from drafter.training.trainer import DrafterTrainer, TrainConfig
from rl_hooks import wire

LAYERS, HIDDEN, LENGTHS = (1, 2, 3), 8, (5, 7)
T = sum(LENGTHS)


def file_tensors(features: str) -> tuple[dict[str, wire.Tensor], torch.Tensor, torch.Tensor]:
    """Tensors of a rollout file, and what aux_hidden and last_hidden must read back as."""
    g = torch.Generator().manual_seed(3)
    rng = np.random.default_rng(3)
    aux, last = torch.randn(T, 3 * HIDDEN, generator=g), torch.randn(T, HIDDEN, generator=g)
    mask = np.ones(T, dtype=np.uint8)
    mask[[0, 1, 5, 6]] = 0
    tensors = {
        "input_ids": wire.Tensor.of(rng.integers(0, 90, T).astype("<i4"), "I32"),
        "cu_seqlens": wire.Tensor.of(np.array([0, 5, 12], "<i4"), "I32"),
        "loss_mask": wire.Tensor.of(mask, "U8"),
        "logprobs": wire.Tensor.of(-rng.random(T).astype("<f4"), "F32"),
        "logsumexp": wire.Tensor.of(rng.random(T).astype("<f4"), "F32"),
    }
    read = []
    for name, tensor, layers in (("aux_hidden", aux, 3), ("last_hidden", last, 1)):
        if features == "BF16":
            stored = tensor.to(torch.bfloat16)
            tensors[name] = wire.Tensor.of(stored.view(torch.int16).numpy().view("<u2"), "BF16")
            read.append(stored)
        else:
            per_layer = tensor.view(T, layers, -1)
            scale = per_layer.abs().amax(-1) / 448
            stored = (per_layer / scale[..., None]).to(torch.float8_e4m3fn)
            tensors[name] = wire.Tensor.of(stored.view(T, -1).view(torch.uint8).numpy(), "F8_E4M3")
            tensors[f"{name}_scale"] = wire.Tensor.of(scale.numpy(), "F32")
            read.append((stored.float() * scale[..., None]).view(T, -1))
    return tensors, read[0], read[1]


def write(path: Path, tensors: dict[str, wire.Tensor], **changes: object) -> Path:
    metadata = wire.rollout_metadata(
        run="default",
        policy_version=4,
        rollout_ids=["a", "b"],
        target_fingerprint="f" * 32,
        aux_layers=LAYERS,
        **({"temperature": 0.8, "policy_version_max": 6, "rewards": [0.5, 1.0]} | changes),  # type: ignore[arg-type]
    )
    path.write_bytes(b"".join(wire.encode(tensors, metadata)))
    return path


@pytest.mark.parametrize("features", ["BF16", "F8_E4M3"])
def test_a_file_reads_back_exactly(tmp_path: Path, features: str) -> None:
    tensors, aux, last = file_tensors(features)
    batch = load_batch(write(tmp_path / "r.safetensors", tensors, drafter_version="v000002-0badcafe"), vocab_size=90)
    assert batch.aux_hidden.dtype == (torch.bfloat16 if features == "BF16" else torch.float8_e4m3fn)
    for moved in (batch.to("cpu"), RolloutBatch.concat([batch.select([0]), batch.select([1])]).to("cpu")):
        assert torch.equal(moved.aux_hidden, aux)
        assert torch.equal(moved.last_hidden, last)
    assert torch.equal(batch.to("cpu", torch.bfloat16).aux_hidden, aux.bfloat16())
    assert batch.input_ids.dtype == torch.int64
    assert batch.loss_mask.tolist() == [False] * 2 + [True] * 3 + [False] * 2 + [True] * 5
    assert batch.cu_seqlens.tolist() == [0, 5, 12]
    assert (batch.tokens, batch.rollouts, batch.response_tokens) == (12, 2, 8)
    assert (batch.temperature, batch.warped, batch.policy_version) == (0.8, False, 6)
    assert (batch.rollout_ids, batch.rewards) == (("a", "b"), (0.5, 1.0))
    assert batch.drafter_version == "v000002-0badcafe"
    screen(batch)


@pytest.mark.parametrize("features", ["BF16", "F8_E4M3"])
def test_rows_of_the_last_state_are_found_where_only_those_that_predict_were_sent(
    tmp_path: Path, features: str
) -> None:
    tensors, aux, last = file_tensors(features)
    fewer = with_last_rows(tensors, "predicting")
    assert fewer["last_hidden"].shape == (8, HIDDEN)
    full = load_batch(write(tmp_path / "full", tensors))
    batch = load_batch(write(tmp_path / "fewer", fewer, last_rows="predicting"))
    rows = torch.tensor([1, 2, 3, 6, 7, 8, 9, 10])
    assert wire.predicting_rows(batch.loss_mask.numpy()).tolist() == rows.tolist()
    screen(batch)
    parts = [batch.select([0]), batch.select([1])]
    for found in (batch, RolloutBatch.concat(parts), batch.to("cpu")):
        assert torch.equal(found.last_rows(rows), last[rows])
        assert torch.equal(found.last_rows(rows[[7, 0, 4]]), last[rows[[7, 0, 4]]])
        assert torch.equal(found.logsumexp[rows], full.logsumexp[rows])
        assert found.logsumexp[[0, 4, 5, 11]].tolist() == [1.0] * 4
        assert torch.equal(found.to("cpu").aux_hidden, aux)
        for row in (0, 4, 5):
            with pytest.raises(IndexError):
                found.last_rows(torch.tensor([row]))
    assert torch.equal(parts[1].last_rows(rows[3:] - 5), last[rows[3:]])
    assert batch.kind != full.kind, "they cannot be packed together"
    again = batch.select([1, 0])
    assert torch.equal(again.last_rows(torch.tensor([1, 8])), last[[6, 1]])


def test_a_bad_row_of_those_that_were_sent_is_named_by_its_token(tmp_path: Path) -> None:
    tensors, _, _ = file_tensors("BF16")
    batch = load_batch(write(tmp_path / "x", with_last_rows(tensors, "predicting"), last_rows="predicting"))
    spoilt = batch.last_hidden.clone()
    spoilt[3] = math.nan
    with pytest.raises(BatchRejected, match=r'last_hidden holds NaN or infinity in 1 of 12 rows, first at row 6 .*"b"'):
        screen(replace(batch, last_hidden=spoilt))


def shared(tensors: dict[str, wire.Tensor], rows: list[int]) -> dict[str, wire.Tensor]:
    """A file whose tokens have these rows of the auxiliary states."""
    kept = sorted(set(rows))
    places = np.array([kept.index(row) for row in rows], "<i4")
    fewer = {
        name: wire.Tensor.of(np.frombuffer(t.data, wire.NUMPY_DTYPE[t.dtype]).reshape(t.shape)[kept], t.dtype)
        for name, t in tensors.items()
        if name in ("aux_hidden", "aux_hidden_scale")
    }
    return tensors | fewer | {"aux_rows": wire.Tensor.of(places, "I32")}


@pytest.mark.parametrize("features", ["BF16", "F8_E4M3"])
def test_tokens_that_share_a_row_read_the_same_states(tmp_path: Path, features: str) -> None:
    tensors, aux, _ = file_tensors(features)
    rows = [0, 1, 2, 3, 4, 0, 1, 7, 8, 9, 10, 11]  # the second rollout has the first one's prompt of two tokens
    batch = load_batch(write(tmp_path / "shared", shared(tensors, rows)))
    assert len(batch.aux_hidden) == 10
    screen(batch)
    wanted = aux[rows]
    both, backward = batch.to("cpu"), batch.select([1, 0]).to("cpu")
    packed = RolloutBatch.concat([batch, batch.select([1])]).to("cpu")
    again = RolloutBatch.concat([batch.select([0]), load_batch(write(tmp_path / "plain", tensors)).select([1])])
    assert torch.equal(both.aux_hidden, wanted)
    assert torch.equal(backward.aux_hidden, torch.cat([wanted[5:], wanted[:5]]))
    assert torch.equal(packed.aux_hidden, torch.cat([wanted, wanted[5:]]))
    assert torch.equal(again.to("cpu").aux_hidden, torch.cat([wanted[:5], aux[5:]]))
    assert torch.equal(batch.spread().to("cpu").aux_hidden, wanted)
    assert batch.to("cpu", torch.bfloat16).aux_hidden.shape == (T, 3 * HIDDEN)
    for found in (both, backward, packed, again, batch.spread()):
        assert found.aux_rows is None


def test_which_tokens_older_weights_drew_goes_with_their_tokens(tmp_path: Path) -> None:
    tensors, _, _ = file_tensors("BF16")
    mask = np.frombuffer(tensors["loss_mask"].data, np.uint8)
    behind = np.where(mask > 0, np.arange(T) % 3, 0).astype(np.int32)  # of policy version 5
    told = load_batch(write(tmp_path / "told", tensors | {"versions_behind": wire.Tensor.of(behind, "I32")}))
    older = torch.from_numpy(behind > 0)
    assert told.older is not None
    assert torch.equal(told.older, older)
    assert 0 < int(older.sum()) < int(told.loss_mask.sum())
    both = RolloutBatch.concat([told.select([1]), told.select([0])]).to("cpu")
    assert both.older is not None
    assert torch.equal(both.older, torch.cat([older[5:], older[:5]]))
    assert load_batch(write(tmp_path / "untold", tensors)).older is None


def test_a_bad_row_that_is_shared_is_named_by_its_tokens(tmp_path: Path) -> None:
    batch = load_batch(write(tmp_path / "x", shared(file_tensors("BF16")[0], [0, 1, 2, 3, 4, 0, 1, 7, 8, 9, 10, 11])))
    spoilt = batch.aux_hidden.clone()
    spoilt[1] = math.inf
    with pytest.raises(BatchRejected, match=r'aux_hidden holds NaN or infinity in 2 of 12 rows, first at row 1 .*"a"'):
        screen(replace(batch, aux_hidden=spoilt))
    with pytest.raises(DrafterError, match="aux_rows must name one row for each of 12 tokens"):
        replace(batch, aux_rows=batch.aux_rows[1:])  # type: ignore[index]


def test_fp8_without_scales_and_scales_without_fp8_are_refused(tmp_path: Path) -> None:
    batch = load_batch(write(tmp_path / "r.safetensors", file_tensors("F8_E4M3")[0]))
    with pytest.raises(DrafterError, match="fp8 needs aux_scale"):
        replace(batch, aux_scale=None)
    with pytest.raises(DrafterError, match="fp8 needs last_scale"):
        replace(batch, last_hidden=batch.last_hidden.float())


def test_rollouts_of_two_drafters_packed_together_are_of_none() -> None:
    batch = replace(world(SHAPES["packed, awkward"]).batch, drafter_version="v1")
    other = replace(batch, drafter_version="v2")
    assert RolloutBatch.concat([batch, batch]).drafter_version == "v1"
    assert RolloutBatch.concat([batch, other]).drafter_version == ""


def test_a_broken_file_is_a_wire_error_that_names_the_field(tmp_path: Path) -> None:
    tensors, _, _ = file_tensors("BF16")
    path = write(tmp_path / "r.safetensors", tensors)
    with pytest.raises(wire.WireError, match="input_ids: token"):
        load_batch(path, vocab_size=10)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(wire.WireError, match="bytes long"):
        load_batch(path)


def same(a: RolloutBatch, b: RolloutBatch) -> bool:
    for name in ("input_ids", "cu_seqlens", "loss_mask", "aux_hidden", "last_hidden", "logprobs", "logsumexp"):
        if not torch.equal(getattr(a, name), getattr(b, name)):
            return False
    return (a.rollout_ids, a.rewards) == (b.rollout_ids, b.rewards)


def test_selected_rollouts_put_together_again_are_the_batch() -> None:
    batch = world(SHAPES["packed, awkward"]).batch
    parts = [batch.select([i]) for i in range(batch.rollouts)]
    assert same(RolloutBatch.concat(parts), batch)
    turned = batch.select([2, 0])
    assert turned.rollout_ids == ("r2", "r0")
    assert turned.cu_seqlens.tolist() == [0, 2, 11]
    assert same(RolloutBatch.concat([batch.select([2]), batch.select([0])]), turned)


@pytest.mark.parametrize("limit", [1, 20, 10_000])
def test_groups_are_whole_rollouts_of_about_so_many_tokens(limit: int) -> None:
    batch = world(SHAPES["packed, awkward"]).batch
    groups = list(batch.groups(limit))
    assert all(g.tokens <= limit or g.rollouts == 1 for g in groups)
    assert torch.equal(torch.cat([g.input_ids for g in groups]), batch.input_ids)
    assert sum(g.rollouts for g in groups) == batch.rollouts
    assert (len(groups) == 1) is (limit == 10_000)


def test_a_batch_of_no_tokens_is_none() -> None:
    none = torch.zeros(0)
    with pytest.raises(DrafterError, match="at least 1"):
        RolloutBatch(none.long(), torch.tensor([0, 0]), none.bool(), none[:, None], none, none[:, None], none)


def test_batches_of_different_kinds_are_not_mixed() -> None:
    batch = world(SHAPES["packed, half response"]).batch
    with pytest.raises(DrafterError, match="differ in sampling"):
        RolloutBatch.concat([batch, replace(batch, temperature=0.5)])
    with pytest.raises(DrafterError, match="differ in sampling, layers"):
        RolloutBatch.concat([batch, replace(batch, aux_layers=(0, 1, 2))])
    with pytest.raises(DrafterError, match="at least one batch"):
        RolloutBatch.concat([])
    with pytest.raises(DrafterError, match=r"indices in \[0, 3\)"):
        batch.select([3])
    assert RolloutBatch.concat([batch, replace(batch, policy_version=9)]).policy_version == 9


def test_moving_converts_features_only() -> None:
    batch = cast(world(SHAPES["packed, half response"]).batch, torch.float32).to("cpu", torch.bfloat16)
    assert batch.aux_hidden.dtype == torch.bfloat16
    assert batch.logprobs.dtype == torch.float32
    assert batch.input_ids.dtype == torch.int64


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", ["aux_hidden", "last_hidden", "logprobs", "logsumexp"])
def test_one_bad_number_rejects_its_rollout_and_is_located(name: str, value: float) -> None:
    batch = world(SHAPES["packed, half response"]).batch
    tensor = getattr(batch, name).clone()
    tensor.view(batch.tokens, -1)[13, -1] = value
    words = rf'{name} holds NaN or infinity in 1 of 29 rows, first at row 13.*"r1"'
    with pytest.raises(NotFinite, match=words) as found:
        screen(replace(batch, **{name: tensor}))
    assert found.value.places == (1,)


def test_a_batch_whose_rollouts_are_all_spoilt_or_one_of_whose_sound_ones_says_more_than_1_is_refused() -> None:
    batch = world(SHAPES["packed, half response"]).batch
    firsts, row = batch.cu_seqlens[:-1], int(torch.nonzero(batch.loss_mask)[-1])
    batch.aux_hidden[firsts[:-1]] = torch.nan
    batch.logprobs[int(torch.nonzero(batch.loss_mask)[0])] = torch.inf  # what a spoilt one says is not looked at
    with pytest.raises(NotFinite) as found:
        screen(batch)
    assert found.value.places == tuple(range(batch.rollouts - 1))
    batch.logprobs[row] = 5.0  # of the last rollout, the only sound one
    with pytest.raises(BatchRejected, match="log-probabilities above 0"):
        screen(batch)
    batch.last_hidden[firsts[-1]] = torch.inf  # another tensor spoils that one
    with pytest.raises(BatchRejected, match="aux_hidden holds NaN or infinity") as refused:
        screen(batch)
    assert not isinstance(refused.value, NotFinite)


@pytest.mark.parametrize("warped", [False, True])
def test_a_probability_above_1_is_refused_but_for_what_rounding_leaves(warped: bool) -> None:
    batch = replace(world(SHAPES["packed, half response"]).batch, top_p=0.9 if warped else 1.0)
    row = int(torch.nonzero(batch.loss_mask)[3])
    rounded = torch.tensor(1 + 2**-7).log()  # 1 plus one unit in the last place of bfloat16
    for value in (0.0, rounded, 2e-3):
        batch.logprobs[row] = value
        screen(batch)
    for value in (0.02, 5.0, 65504.0):
        batch.logprobs[row] = value
        with pytest.raises(BatchRejected, match=rf"logprobs holds log-probabilities above 0 .*first at row {row} "):
            screen(batch)


def test_what_a_prompts_tokens_are_given_for_log_probabilities_is_not_looked_at() -> None:
    batch = world(SHAPES["packed, half response"]).batch
    prompt = int(torch.nonzero(~batch.loss_mask)[1])
    batch.logprobs[prompt] = 1.0
    screen(batch)
    batch.loss_mask[prompt] = True
    with pytest.raises(BatchRejected, match="log-probabilities above 0"):
        screen(batch)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"logprobs": torch.zeros(3)}, "logprobs must have one row for each of"),
        ({"last_hidden": torch.zeros(5, 4)}, "last_hidden must have one row"),
        ({"cu_seqlens": torch.tensor([0, 4])}, "cu_seqlens must end at the"),
        ({"temperature": -1.0}, "temperature must be 0 or more"),
    ],
)
def test_tensors_that_do_not_belong_together_make_no_batch(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(DrafterError, match=message):
        replace(world(SHAPES["packed, half response"]).batch, **changes)


@pytest.mark.parametrize("token", [-1, VOCAB])
def test_tokens_outside_the_vocabulary_are_refused_before_anything_moves(token: int) -> None:
    w = world(SHAPES["packed, half response"])
    ids = w.batch.input_ids.clone()
    ids[3] = token
    trainer = DrafterTrainer(w.drafter, TrainConfig(steps_ahead=2))
    with pytest.raises(BatchRejected, match=rf"token ids must be in \[0, {VOCAB}\)"):
        trainer.step([(replace(w.batch, input_ids=ids), w.policy)])
    assert trainer.windows == 0


def test_features_of_other_layers_than_the_drafter_s_are_refused() -> None:
    w = world(SHAPES["packed, half response"], dtype=torch.float32)
    assert w.drafter.config.aux_layers == (1, 2, 3)
    for layers in ((), (1, 2, 3)):
        replay(w.drafter, replace(w.batch, aux_layers=layers), w.policy, depth=2)
    with pytest.raises(BatchRejected, match=r"reads the states entering layers \[1, 2, 3\], these .* \[1, 2, 4\]"):
        replay(w.drafter, replace(w.batch, aux_layers=(1, 2, 4)), w.policy, depth=2)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_rollouts_without_normalisers_are_normalised_with_the_whole_head(temperature: float, tmp_path: Path) -> None:
    w = world(SHAPES["packed, half response"], temperature=temperature)
    batch, head = w.batch, TargetHead(w.head)
    rows = torch.nonzero(batch.loss_mask).flatten() - 1
    assert head.normalise(batch) is batch
    nan = torch.full_like(batch.logsumexp, torch.nan)
    with pytest.raises(BatchRejected, match="logsumexp holds NaN"):
        screen(replace(batch, logsumexp=nan))  # a sender that knows them, and is broken
    unknown = replace(batch, logsumexp=nan, normalised=False)
    screen(unknown)
    found = head.normalise(unknown)
    screen(found)
    assert found.normalised
    assert torch.allclose(found.logsumexp[rows], batch.logsumexp[rows], atol=1e-4)
    gap, checked = head.logprob_gap(found)
    assert checked
    assert gap < 1e-4
    huge = batch.last_hidden.clone()
    huge[rows[:2]] = 3e38
    assert head.logprob_gap(head.normalise(replace(unknown, last_hidden=huge)))[0] == math.inf
    tensors, _, _ = file_tensors("BF16")
    del tensors["logsumexp"]
    assert not load_batch(write(tmp_path / "r.safetensors", tensors)).normalised
