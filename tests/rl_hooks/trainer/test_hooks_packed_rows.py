"""The hook in a forward whose rows hold several rollouts: what it sends is what one rollout a row gives."""

from __future__ import annotations

import gc
import logging
import re
import weakref
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from helpers.trainer.capture_fixtures import LENGTHS, TEMPERATURE, gathered, inputs, logprob_gap, run_once, sent_file
from helpers.trainer.hooks_fixtures import VOCAB, Padded, Receiver, as_float, mapped, names_of, padded_batch
from helpers.trainer.hooks_fixtures import tiny_qwen3 as tiny
from torch import nn
from transformers import DataCollatorWithFlattening

from rl_hooks import wire
from rl_hooks.errors import RolloutError, UnsupportedModelError
from rl_hooks.hook import DrafterHook
from rl_hooks.sending.features import FeatureDtype
from rl_hooks.sending.registration import HeadWatch, RunRegistration
from rl_hooks.trainer import staging


def flattened(lengths: list[tuple[int, int]]) -> tuple[Padded, dict[str, torch.Tensor]]:
    """The same rollouts as one row without padding, and what transformers' own collator says of it."""
    batch = padded_batch(lengths)
    collate = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True, return_tensors="pt")
    said = collate([{"input_ids": sequence} for sequence in batch.sequences])
    pairs = zip(batch.sequences, batch.prompt_lengths, strict=True)
    loss = [int(t >= prompt) for sequence, prompt in pairs for t in range(len(sequence))]
    row = Padded(said["input_ids"], torch.ones_like(said["input_ids"]), torch.tensor([loss]), batch.sequences, [])
    return row, {name: value for name, value in said.items() if isinstance(value, torch.Tensor)}


@pytest.mark.parametrize(
    ("names", "fault", "compiled"),
    [
        (("position_ids",), r"position_ids restart at token 12 of row 0", False),
        (("cu_seq_lens_q", "cu_seq_lens_k"), r"cu_seq_lens_q begins another sequence at token 12 of row 0", False),
        (("seq_idx",), r"seq_idx changes at token 12 of row 0", False),
        (("position_ids", "cu_seq_lens_q", "cu_seq_lens_k"), "token 12", False),
        (("position_ids", "cu_seq_lens_q", "cu_seq_lens_k"), "token 12", True),
    ],
)
def test_a_packed_row_is_refused_by_what_the_forward_says_of_it(
    service: Receiver, names: tuple[str, ...], fault: str, compiled: bool
) -> None:
    model, (row, said) = tiny(), flattened(LENGTHS)
    strict = DrafterHook(model, service.url, aux_layers=(1, 2, 3), strict=True)
    torch._dynamo.reset()
    forward = torch.compile(model, backend="eager") if compiled else model
    with (
        pytest.raises(RolloutError, match=rf"(?s){fault}.*one rollout a row"),
        torch.no_grad(),
        strict.capture(**inputs(row), policy_version=0),
    ):
        forward(row.input_ids, use_cache=False, **{name: said[name] for name in names})
    assert strict.flush(20)
    assert service.rollouts() == []
    strict.close()


def test_packed_rows_cost_the_trainer_one_warning_and_nothing_else(
    service: Receiver, caplog: pytest.LogCaptureFixture
) -> None:
    model, (row, said) = tiny(), flattened(LENGTHS)
    with torch.no_grad():
        alone = model(row.input_ids, position_ids=said["position_ids"], use_cache=False).logits
    hook = DrafterHook(model, service.url, aux_layers=(1, 2, 3))
    with caplog.at_level(logging.WARNING, "rl_hooks"):
        for version in range(3):
            with torch.no_grad(), hook.capture(**inputs(row), policy_version=version):
                seen = model(row.input_ids, position_ids=said["position_ids"], use_cache=False).logits
            assert torch.equal(seen, alone)
    assert hook.flush(20)
    assert (len(service.rollouts()), hook.stats()["failures"], hook.stats()["captured_rollouts"]) == (0, 3, 0)
    assert len([r for r in caplog.records if "one rollout a row" in r.message]) == 1
    hook.close()


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"attention_mask": None}, r"attention_mask is None.*one rollout a row"),
        ({"attention_mask": torch.tensor([[1] * 12 + [2] * 11 + [3] * 13 + [4] * 6])}, r"attention_mask changes at"),
        ({"input_ids": torch.arange(42)}, r"input_ids must be \[B, S\].*one rollout a row"),
        ({"cu_seqlens": torch.tensor([0, 12, 50])}, r"cu_seqlens must ascend from 0 to at most the 42 tokens"),
        ({"cu_seqlens": torch.tensor([1, 12])}, r"cu_seqlens must ascend from 0"),
        ({"position_ids": torch.arange(42)[None] + 5}, r"the row begins with 5 at token 0 of row 0: a part of a row"),
        ({"position_ids": torch.arange(42)[None] % 12 + 3 * (torch.arange(42) > 13)}, r"after 1 comes 5 at token 14"),
        ({"cu_seqlens": torch.tensor([0, 12, 42]), "rewards": [1.0]}, r"one entry per rollout \(2\)"),
        (
            {"input_ids": torch.nested.nested_tensor([torch.arange(12), torch.arange(20)], layout=torch.jagged)},
            r"attention_mask must be \[1, 32\] like input_ids, got \[1, 42\]",
        ),
    ],
    ids=[
        *("no mask", "documents numbered in the mask", "one axis", "bounds outside", "bounds from 1"),
        *("a slice", "a gap", "one reward for two", "nested and not"),
    ],
)
def test_what_says_packed_in_the_arguments_is_refused_before_the_forward(
    service: Receiver, changes: dict[str, Any], fault: str
) -> None:
    model, (row, _) = tiny(), flattened(LENGTHS)
    hook = DrafterHook(model, service.url, aux_layers=(1, 2, 3), strict=True)
    with (
        pytest.raises(RolloutError, match=f"(?s){fault}"),
        hook.capture(**(inputs(row) | changes), policy_version=0),
    ):
        pass
    hook.close()


def positions_of(batch: Padded, padding: int) -> torch.Tensor:
    """Positions as generation makes them: counted over real tokens, `padding` elsewhere."""
    positions: torch.Tensor = batch.attention_mask.cumsum(1) - 1
    return positions.masked_fill(batch.attention_mask == 0, padding)


@pytest.mark.parametrize(
    "positions",
    [
        lambda batch: positions_of(batch, 1),
        lambda batch: positions_of(batch, 0),
        lambda batch: positions_of(batch, 0) + 5,
        lambda batch: torch.arange(batch.input_ids.shape[1])[None],
        lambda batch: torch.arange(batch.input_ids.shape[1]).expand_as(batch.input_ids) + 5,
    ],
    ids=["padding at 1", "padding at 0", "begin at 5", "one row for all", "an offset for all"],
)
def test_positions_of_padding_and_offsets_are_no_restart(
    service: Receiver, positions: Callable[[Padded], torch.Tensor]
) -> None:
    model, batch = tiny(), padded_batch(LENGTHS)
    hook = DrafterHook(model, service.url, aux_layers=(1, 2, 3), strict=True)
    with torch.no_grad(), hook.capture(**inputs(batch), policy_version=0):
        model(batch.input_ids, attention_mask=batch.attention_mask, position_ids=positions(batch))
    assert hook.flush(20)
    assert (len(service.rollouts()), hook.stats()["captured_rollouts"]) == (1, len(LENGTHS))
    hook.close()


def test_a_row_alone_whose_boundaries_are_its_own_and_its_paddings_is_one_rollout(service: Receiver) -> None:
    model, batch = tiny(), padded_batch([(3, 9)])
    hook = DrafterHook(model, service.url, aux_layers=(1, 2, 3), strict=True)
    wide = tuple(torch.nn.functional.pad(t, (0, 4)) for t in inputs(batch).values())
    for bounds, (ids, mask, loss) in (
        ([0, 12], tuple(inputs(batch).values())),
        ([0, 12, 16], wide),
    ):
        cu_seqlens = torch.tensor(bounds, dtype=torch.int32)
        with torch.no_grad(), hook.capture(input_ids=ids, attention_mask=mask, loss_mask=loss, policy_version=0):
            model(ids, attention_mask=mask, cu_seq_lens_q=cu_seqlens, cu_seq_lens_k=cu_seqlens)
    assert hook.flush(20)
    assert (len(service.rollouts()), hook.stats()["failures"]) == (2, 0)
    hook.close()


def test_a_multi_turn_row_without_positions_is_one_rollout_though_a_packed_one_would_look_the_same(
    service: Receiver,
) -> None:
    """Docs/trainers.md says so: where neither positions nor boundaries reach the model, nothing can be seen."""
    model, (row, _) = tiny(), flattened(LENGTHS)
    hook = DrafterHook(model, service.url, aux_layers=(1, 2, 3), strict=True)
    run_once(hook, model, row, version=0)
    assert hook.flush(20)
    assert hook.stats()["captured_rollouts"] == 1
    hook.close()


TELL: dict[str, Callable[[Padded, dict[str, torch.Tensor]], dict[str, Any]]] = {
    "boundaries": lambda _, said: {"cu_seqlens": said["cu_seq_lens_q"]},
    "positions": lambda _, said: {"position_ids": said["position_ids"]},
    "nested": lambda row, said: {
        name: torch.nested.nested_tensor_from_jagged(tensor[0], said["cu_seq_lens_q"].long())
        for name, tensor in (("input_ids", row.input_ids), ("loss_mask", row.loss_mask))
    },
    "one axis": lambda row, said: {
        "input_ids": row.input_ids[0],
        "loss_mask": row.loss_mask[0],
        "cu_seqlens": said["cu_seq_lens_q"],
    },
    "positions, padded": lambda row, said: {
        "input_ids": torch.nn.functional.pad(row.input_ids, (0, 6)),
        "loss_mask": torch.nn.functional.pad(row.loss_mask, (0, 6)),
        "position_ids": torch.cat([said["position_ids"], torch.arange(6)[None]], 1),
    },
}


@pytest.mark.parametrize("bucket", [0, 6], ids=["as long", "padded to a bucket"])
@pytest.mark.parametrize("tell", TELL)
def test_a_packed_row_is_sent_as_its_rollouts_bit_for_bit(
    service: Receiver, tmp_path: Path, tell: str, bucket: int
) -> None:
    model, (row, said) = tiny().bfloat16().float(), flattened(LENGTHS)
    hook = DrafterHook(model, service.url, aux_layers=(1, 2, 3), strict=True)
    bucket = max(bucket, 6 if "padded" in tell else 0)
    longer = torch.nn.functional.pad(row.input_ids, (0, bucket))
    positions = torch.cat([said["position_ids"], torch.arange(bucket)[None]], 1)
    told: dict[str, Any] = {"input_ids": row.input_ids, "loss_mask": row.loss_mask} | TELL[tell](row, said)
    known: dict[str, Any] = {"rollout_ids": list("abcd"), "rewards": [1.0, 2.0, 3.0, 4.0]}
    with torch.no_grad(), hook.capture(**told, **known, policy_version=3, temperature=TEMPERATURE):
        out = model(longer, position_ids=positions, use_cache=False, output_hidden_states=True)
    file = sent_file(service, hook, tmp_path)
    header = wire.check_rollout_header(file.header)
    ids, cu, mask = (file.array(name) for name in ("input_ids", "cu_seqlens", "loss_mask"))
    wire.check_index(header, ids, cu, mask, VOCAB)
    assert (names_of(header), header.rewards) == (tuple("abcd"), (1.0, 2.0, 3.0, 4.0))
    assert file.array("input_ids").tolist() == row.input_ids[0].tolist()
    assert file.array("cu_seqlens").tolist() == said["cu_seq_lens_q"].tolist()
    T = row.input_ids.shape[1]
    sent = torch.cat([as_float(file, "aux_hidden"), as_float(file, "last_hidden")], 1)
    packed = torch.cat([out.hidden_states[i][0, :T] for i in (1, 2, 3, -1)], 1)
    assert torch.equal(sent, packed.to(torch.bfloat16).float())
    assert logprob_gap(file, model.lm_head.weight, TEMPERATURE) < 0.05
    bounds = file.array("cu_seqlens").tolist()
    for (begin, end), sequence in zip(pairwise(bounds), row.sequences, strict=True):
        with torch.no_grad():
            alone = model(torch.tensor([sequence]), output_hidden_states=True).hidden_states
        expected = torch.cat([alone[i][0] for i in (1, 2, 3, -1)], 1)
        assert torch.allclose(packed[begin:end], expected, atol=1e-4)
    hook.close()


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("changes", [{"use_cache": True}, {"position_ids": None}], ids=["a cache", "no positions"])
def test_a_packed_forward_that_attends_across_its_rollouts_is_refused(
    service: Receiver, attention: str, changes: dict[str, Any]
) -> None:
    """With a cache, transformers does not look for packing: every rollout then sees those before it."""
    model, (row, said) = tiny(), flattened(LENGTHS)
    model.set_attn_implementation(attention)
    hook = DrafterHook(model, service.url, aux_layers=(1, 2, 3), strict=True)
    call: dict[str, Any] = {"position_ids": said["position_ids"], "use_cache": False} | changes
    with (
        pytest.raises(RolloutError, match="begins at token 12 of row 0 attended to the one before it"),
        torch.no_grad(),
        hook.capture(
            input_ids=row.input_ids, loss_mask=row.loss_mask, cu_seqlens=said["cu_seq_lens_q"], policy_version=0
        ),
    ):
        model(row.input_ids, **call)
    assert hook.flush(20)
    assert service.rollouts() == []
    hook.close()


def test_a_boundary_inside_what_was_called_one_rollout_is_refused(service: Receiver) -> None:
    model, (row, said) = tiny(), flattened(LENGTHS)
    hook = DrafterHook(model, service.url, aux_layers=(1, 2, 3), strict=True)
    told = said["cu_seq_lens_q"][[0, 2, 3, 4]]  # the first two are said to be one
    with (
        pytest.raises(RolloutError, match="position_ids restart at token 12 of row 0"),
        torch.no_grad(),
        hook.capture(input_ids=row.input_ids, loss_mask=row.loss_mask, cu_seqlens=told, policy_version=0),
    ):
        model(row.input_ids, position_ids=said["position_ids"], use_cache=False)
    hook.close()


@pytest.mark.parametrize("trouble", ["other tokens", "no scores"])
def test_a_capture_that_fails_keeps_no_tensor_of_the_trainer(
    service: Receiver, monkeypatch: pytest.MonkeyPatch, trouble: str
) -> None:
    model, batch = tiny(), padded_batch(LENGTHS)
    told = inputs(batch)
    if trouble == "other tokens":
        told = {name: nn.functional.pad(tensor, (0, 3)) for name, tensor in told.items()}
    else:
        for name in ("score_rows", "score_logits"):
            monkeypatch.setattr(staging, name, Mock(side_effect=RuntimeError("out of memory")))
    hook = DrafterHook(model, service.url, aux_layers=(1, 2, 3))
    logits: list[weakref.ref[torch.Tensor]] = []

    def step(version: int) -> None:
        with hook.capture(**told, policy_version=version):
            out = model(batch.input_ids, attention_mask=batch.attention_mask)
        logits.append(weakref.ref(out.logits))

    gc.collect()
    gc.disable()  # a circle that only the collector breaks would hold them
    try:
        for version in range(3):
            step(version)
        assert [one() is None for one in logits] == [True] * 3
    finally:
        gc.enable()
    assert hook.stats()["failures"] == 3
    hook.close()


def test_a_forward_that_raises_leaves_nothing_captured_on_the_device(service: Receiver) -> None:
    model, batch = tiny(), padded_batch(LENGTHS)
    hook = DrafterHook(model, service.url, aux_layers=(1, 2, 3))
    held: list[weakref.ref[torch.Tensor]] = []

    def step() -> None:
        with torch.no_grad(), hook.capture(**inputs(batch), policy_version=0):
            model(batch.input_ids, attention_mask=batch.attention_mask)
            held.append(weakref.ref(hook._reader.features.normed()))
            raise MemoryError

    with pytest.raises(MemoryError):
        step()
    assert held[0]() is None
    assert hook._reader.head.pop() is None
    hook.close()


@pytest.mark.parametrize("tied", [True, False])
def test_weights_that_a_step_changed_inside_the_capture_are_not_sent_as_those_of_its_version(
    service: Receiver, tied: bool
) -> None:
    torch._dynamo.reset()
    model, batch = tiny(tied=tied), padded_batch(LENGTHS)
    hook = DrafterHook(model, service.url, aux_layers=(1, 2, 3), head_tolerance=0.0)
    forward: Any = torch.compile(model, backend="eager")  # then the head is read after the forward
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for version, inside in ((0, False), (1, True)):
        with hook.capture(**inputs(batch), policy_version=version):
            forward(batch.input_ids, attention_mask=batch.attention_mask).logits.logsumexp(-1).mean().backward()
            if inside:
                optimizer.step()
        assert hook.flush(20)
        assert (hook.stats()["failures"], len(service.rollouts())) == (inside, 1)
        optimizer.step()
    assert [request.method for request in service.requests] == ["PUT", "POST"]
    assert re.search(r"changed inside `capture`.*optimizer's step out", hook.stats()["last_failure"])
    hook.close()


def test_the_head_is_sent_of_a_version_of_which_this_rank_samples_no_rollout(service: Receiver, tmp_path: Path) -> None:
    model, batch = tiny(tied=False), padded_batch(LENGTHS)
    hook = DrafterHook(model, service.url, aux_layers=(1, 2, 3), strict=True)
    nothing = inputs(batch) | {"loss_mask": torch.zeros_like(batch.loss_mask)}
    for version in (0, 1):
        run_once(hook, model, batch, version=version, **nothing)
        run_once(hook, model, batch, version=version, **nothing)
        with torch.no_grad():
            model.lm_head.weight.mul_(2.0)
    assert hook.flush(20)
    assert [f"{r.method} {r.path}" for r in service.requests] == ["PUT /runs/default", "PUT /runs/default/head"]
    sent = as_float(mapped(service.requests[-1], tmp_path), "lm_head")
    assert torch.equal(sent, model.lm_head.weight / 2.0)
    hook.close()


def test_a_sharded_run_is_registered_though_its_first_rank_samples_no_rollout(service: Receiver) -> None:
    model, batch = tiny(tied=False), padded_batch(LENGTHS)
    gathered(model, model.lm_head.weight.data)
    hook = DrafterHook(model, service.url, run="r", aux_layers=(1, 2, 3), strict=True)
    run_once(hook, model, batch, loss_mask=torch.zeros_like(batch.loss_mask))
    assert hook.flush(20)
    assert [request.path for request in service.requests] == ["/runs/r"]
    hook.close()


def test_the_device_is_asked_whether_the_head_moved_once_a_version(
    service: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = Mock(return_value=False)
    monkeypatch.setattr(HeadWatch, "is_due", asked)
    model, batch = tiny(), padded_batch(LENGTHS)
    hook = DrafterHook(model, service.url, aux_layers=(1, 2, 3), strict=True)
    for version in (0, 0, 0, 1, 1):
        run_once(hook, model, batch, version=version)
    assert [call.args[1] for call in asked.call_args_list] == [0, 1]
    hook.close()


def test_what_was_registered_is_not_kept(service: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    encode, sent = RunRegistration.encode, []

    def noted(self: RunRegistration) -> Any:
        sent.append(weakref.ref(self))
        return encode(self)

    monkeypatch.setattr(RunRegistration, "encode", noted)
    model, batch = tiny(tied=False), padded_batch(LENGTHS)
    hook = DrafterHook(model, service.url, aux_layers=(1, 2, 3), strict=True)
    run_once(hook, model, batch)  # the sender's thread holds the newest request
    assert hook.flush(20)
    gc.collect()
    assert [one() for one in sent] == [None]
    hook.close()


def test_a_slice_of_the_head_is_refused_when_attaching_and_in_the_forward(service: Receiver) -> None:
    model, batch = tiny(tied=False), padded_batch(LENGTHS)
    hook = DrafterHook(model, service.url, aux_layers=(1, 2, 3), strict=True)
    model.lm_head.weight = nn.Parameter(model.lm_head.weight[: VOCAB // 2].detach().clone())
    with pytest.raises(UnsupportedModelError, match=rf"{VOCAB // 2} rows.*vocab_size is {VOCAB}.*slice"):
        run_once(hook, model, batch)
    hook.close()
    with pytest.raises(UnsupportedModelError, match="slice"):
        DrafterHook(model, service.url, aux_layers=(1, 2, 3))


def test_a_token_that_the_head_has_no_row_for_is_refused_on_the_host(
    service: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, batch = tiny(), padded_batch(LENGTHS)
    scored = Mock(side_effect=AssertionError)
    for name in ("score_rows", "score_logits"):
        monkeypatch.setattr(staging, name, scored)
    hook = DrafterHook(model, service.url, aux_layers=(1, 2, 3), strict=True)
    for wrong in (VOCAB, -100):
        ids = torch.where(batch.loss_mask == 1, wrong, batch.input_ids)
        with pytest.raises(RolloutError, match=rf"tokens are {wrong} .*{VOCAB} rows"):
            run_once(hook, model, batch, input_ids=ids)
    assert not scored.called
    hook.close()


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3"])
@pytest.mark.parametrize("whole", [True, False], ids=["head whole", "head never whole"])
def test_the_last_states_that_the_service_does_not_want_are_left_out_and_the_others_stay_as_they_are(
    service: Receiver, tmp_path: Path, dtype: FeatureDtype, whole: bool
) -> None:
    model, batch = tiny(tied=False), padded_batch(LENGTHS)
    head = model.lm_head.weight.data
    if not whole:
        model.lm_head.weight.data = torch.empty(0)
    files = []
    for wanted in ("all", "predicting"):
        said = {"duplicate": False, "last_rows": wanted}
        service.answer = lambda _request, said=said: (202, {}, said)  # type: ignore[misc]
        hook = DrafterHook(model, service.url, run="r", aux_layers=(1, 2, 3), dtype=dtype, strict=whole)
        for version in (1, 2):  # where nothing was registered, the first answer is that to the first file
            logprobs = torch.full(batch.input_ids.shape, -0.5)
            with torch.no_grad(), hook.capture(**inputs(batch), policy_version=version, logprobs=logprobs):
                hidden = model.model(batch.input_ids, attention_mask=batch.attention_mask).last_hidden_state
                _ = model.lm_head(hidden) if whole else hidden @ head.T
            assert hook.flush(20), hook.stats()
        files.append(mapped(service.rollouts()[-1], tmp_path))
        hook.close()
    full, fewer = files
    header = wire.check_rollout_header(fewer.header)
    ids, starts, mask = (fewer.array(name) for name in ("input_ids", "cu_seqlens", "loss_mask"))
    wire.check_index(header, ids, starts, mask, VOCAB)
    assert (wire.check_rollout_header(full.header).last_rows, header.last_rows) == ("all", "predicting")
    rows = wire.predicting_rows(full.array("loss_mask"))
    assert ("logsumexp" in fewer) == ("logsumexp" in full) == whole
    assert set(full.header.tensors) == set(fewer.header.tensors)
    for name in full.header.tensors:
        kept = full.array(name)[rows] if name in ("last_hidden", "logsumexp") else full.array(name)
        assert np.array_equal(kept, fewer.array(name)), name
