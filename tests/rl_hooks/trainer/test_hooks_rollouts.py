"""What DrafterHook sends, read back as the worker reads it, against the model itself."""

from __future__ import annotations

import gc
import json
import logging
import re
import weakref
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import safetensors.numpy
import torch
from hooks_fixtures import HIDDEN, VOCAB, Padded, Receiver, as_float, free_port, mapped, padded_batch, receiver
from hooks_fixtures import tiny_qwen3 as tiny
from torch import nn
from transformers import DataCollatorWithFlattening

from rl_hooks import wire
from rl_hooks.errors import RolloutError, UnsupportedModelError
from rl_hooks.hook import DrafterHook
from rl_hooks.sending.features import FeatureDtype
from rl_hooks.sending.registration import HeadWatch, RunRegistration
from rl_hooks.sending.sampling import sampling_position
from rl_hooks.trainer import staging

LENGTHS = [(3, 9), (7, 4), (1, 12), (5, 1)]
TEMPERATURE = 0.7


@pytest.fixture(name="service")
def _service() -> Iterator[Receiver]:
    with receiver() as service:
        yield service


def inputs(batch: Padded) -> dict[str, Any]:
    """What `capture` takes of a batch."""
    return {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask, "loss_mask": batch.loss_mask}


def run_once(hook: DrafterHook, model: nn.Module, batch: Padded, version: int = 3, **changes: Any) -> torch.Tensor:
    arguments = inputs(batch) | {"policy_version": version, "temperature": TEMPERATURE}
    with torch.no_grad(), hook.capture(**(arguments | changes)):
        logits: torch.Tensor = model(batch.input_ids, attention_mask=batch.attention_mask).logits
    return logits


def sent_file(service: Receiver, hook: DrafterHook, directory: Path) -> wire.MappedFile:
    assert hook.flush(20), hook.stats()
    return mapped(service.rollouts()[-1], directory)


def logprob_gap(file: wire.MappedFile, head: torch.Tensor, temperature: float) -> float:
    """The worker's check: log p of the emitted tokens from last_hidden and the head, against `logprobs`; mean, nats."""
    ids, mask = torch.from_numpy(file.array("input_ids").astype(np.int64)), file.array("loss_mask") == 1
    logits = as_float(file, "last_hidden") @ head.detach().float().T / temperature
    lse = torch.from_numpy(file.array("logsumexp").copy())
    again = logits[:-1].gather(1, ids[1:, None])[:, 0] - lse[:-1]
    return float((again - torch.from_numpy(file.array("logprobs").copy())[1:]).abs()[mask[1:]].mean())


def normaliser_gap(file: wire.MappedFile, head: torch.Tensor, temperature: float) -> float:
    mask = file.array("loss_mask") == 1
    lse = torch.logsumexp(as_float(file, "last_hidden") @ head.detach().float().T / temperature, dim=1)
    return float((lse - torch.from_numpy(file.array("logsumexp").copy()))[:-1].abs()[mask[1:]].mean())


def test_a_sent_file_is_valid_holds_no_padding_and_says_what_the_batch_said(service: Receiver, tmp_path: Path) -> None:
    model, batch = tiny(), padded_batch(LENGTHS)
    hook = DrafterHook(model, service.url, run="r", aux_layers=(1, 2, 3), strict=True)
    run_once(
        hook,
        model,
        batch,
        rewards=[1.0, 0.0, 0.5, -1.0],
        rollout_ids=list("abcd"),
        strata=list("xyxy"),
        top_p=0.9,
        top_k=-1,
    )
    file = sent_file(service, hook, tmp_path)
    header = wire.check_rollout_header(file.header)
    ids, cu, mask = (file.array(name) for name in ("input_ids", "cu_seqlens", "loss_mask"))
    wire.check_index(header, ids, cu, mask, VOCAB)
    assert (header.run, header.policy_version, header.rollout_ids) == ("r", 3, tuple("abcd"))
    assert (header.rewards, header.temperature, header.top_p, header.top_k) == ((1.0, 0.0, 0.5, -1.0), 0.7, 0.9, 0)
    assert header.target_fingerprint == wire.target_fingerprint(model.config.to_dict(), (1, 2, 3))
    assert header.strata == tuple("xyxy")
    for i, (sequence, prompt) in enumerate(zip(batch.sequences, batch.prompt_lengths, strict=True)):
        assert ids[cu[i] : cu[i + 1]].tolist() == sequence
        assert mask[cu[i] : cu[i + 1]].tolist() == [0] * prompt + [1] * (len(sequence) - prompt)
    assert service.rollouts()[0].headers["x-rollout-id"] == header.batch_id
    by_library = safetensors.numpy.load(service.rollouts()[0].body.replace(b'"BF16"', b'"U16" '))
    assert by_library["input_ids"].tolist() == ids.tolist()
    assert np.array_equal(by_library["aux_hidden"], file.array("aux_hidden"))
    hook.close()


def test_stripped_features_equal_those_of_the_unpadded_sequences(service: Receiver, tmp_path: Path) -> None:
    model, batch = tiny().bfloat16().float(), padded_batch(LENGTHS)
    hook = DrafterHook(model, service.url, aux_layers=(1, 2, 3), strict=True)
    run_once(hook, model, batch)
    file = sent_file(service, hook, tmp_path)
    cu, aux, last = file.array("cu_seqlens"), as_float(file, "aux_hidden"), as_float(file, "last_hidden")
    for i, sequence in enumerate(batch.sequences):
        with torch.no_grad():
            states = model(torch.tensor([sequence]), output_hidden_states=True).hidden_states
        rows = slice(cu[i], cu[i + 1])
        expected = torch.cat([states[layer][0] for layer in (1, 2, 3)], dim=1)
        # 2^-8: the files hold bfloat16; a wrong row or layer is off by its whole size.
        assert torch.allclose(aux[rows], expected, rtol=2**-7, atol=1e-3)
        assert torch.allclose(last[rows], states[-1][0], rtol=2**-7, atol=1e-3)
    hook.close()


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3"])
@pytest.mark.parametrize("tied", [True, False])
def test_log_p_recomputed_from_the_sent_features_agrees_with_the_model(
    service: Receiver, tmp_path: Path, dtype: Any, tied: bool
) -> None:
    model, batch = tiny(tied=tied), padded_batch(LENGTHS)
    hook = DrafterHook(model, service.url, aux_layers=(1, 2, 3), dtype=dtype, strict=True)
    logits = run_once(hook, model, batch)
    file = sent_file(service, hook, tmp_path)
    truth = torch.log_softmax(logits / TEMPERATURE, dim=-1)[:, :-1]
    truth = truth.gather(2, batch.input_ids[:, 1:, None])[:, :, 0][batch.loss_mask[:, 1:] == 1]
    mask = file.array("loss_mask") == 1
    assert torch.allclose(torch.from_numpy(file.array("logprobs")[mask]), truth, atol=1e-4)
    assert logprob_gap(file, model.lm_head.weight, TEMPERATURE) < 0.05
    assert normaliser_gap(file, model.lm_head.weight, TEMPERATURE) < 0.05
    hook.close()


def test_8_bit_features_stay_within_their_relative_error(service: Receiver, tmp_path: Path) -> None:
    model, batch = tiny(), padded_batch(LENGTHS)
    files = []
    for dtype in ("bfloat16", "float8_e4m3"):
        hook = DrafterHook(model, service.url, aux_layers=(1, 2, 3), dtype=dtype, strict=True)
        run_once(hook, model, batch)
        files.append(sent_file(service, hook, tmp_path))
        hook.close()
    exact, coarse = (as_float(file, "aux_hidden") for file in files)
    assert files[1].array("aux_hidden_scale").shape == (exact.shape[0], 3)
    assert 0.0 < float((exact - coarse).norm() / exact.norm()) < 0.04  # measured for e4m3: 0.027


def _pre_norm(model: nn.Module, hook: DrafterHook) -> None:
    capture = hook._features
    inner: Any = model
    capture._handles.pop().remove()
    capture._handles.append(
        inner.model.norm.register_forward_pre_hook(lambda module, args: capture._normed(module, (), args[0]))
    )


def _stale_head(model: nn.Module, hook: DrafterHook) -> None:
    del hook
    inner: Any = model
    head = inner.lm_head.weight
    shaken = head + 0.3 * head.std() * torch.randn(head.shape, generator=torch.Generator().manual_seed(1))
    inner.wrong_head = shaken.detach()


@pytest.mark.parametrize(
    ("mutate", "changes", "temperature"),
    [
        (_pre_norm, {}, TEMPERATURE),
        (_stale_head, {}, TEMPERATURE),
        (None, {"shift_mask": True}, TEMPERATURE),
        (None, {}, 1.0),
    ],
    ids=["pre-norm last state", "stale head", "shifted log p", "wrong temperature"],
)
def test_the_log_p_check_catches(
    service: Receiver,
    tmp_path: Path,
    mutate: Callable[[nn.Module, DrafterHook], None] | None,
    changes: dict[str, Any],
    temperature: float,
) -> None:
    model, batch = tiny(), padded_batch(LENGTHS)
    hook = DrafterHook(model, service.url, aux_layers=(1, 2, 3), strict=True)
    with torch.no_grad():
        logits = model(batch.input_ids, attention_mask=batch.attention_mask).logits / TEMPERATURE
    logprobs = torch.zeros(batch.input_ids.shape)
    logprobs[:, 1:] = torch.log_softmax(logits, -1)[:, :-1].gather(2, batch.input_ids[:, 1:, None])[:, :, 0]
    run_once(hook, model, batch, logprobs=logprobs)
    assert logprob_gap(sent_file(service, hook, tmp_path), model.lm_head.weight, TEMPERATURE) < 0.05
    if mutate is not None:
        mutate(model, hook)
    given = logprobs.roll(1, dims=1) if "shift_mask" in changes else logprobs
    run_once(hook, model, batch, version=4, logprobs=given, rollout_ids=list("abcd"))
    file = sent_file(service, hook, tmp_path)
    head = getattr(model, "wrong_head", model.lm_head.weight)
    assert max(logprob_gap(file, head, temperature), normaliser_gap(file, head, temperature)) > 0.2
    hook.close()


def test_swapped_layers_differ_from_the_model_by_far_more_than_rounding(service: Receiver, tmp_path: Path) -> None:
    model, batch = tiny(), padded_batch(LENGTHS)
    hook = DrafterHook(model, service.url, aux_layers=(1, 2, 3), strict=True)
    with torch.no_grad():
        states = model(batch.input_ids, attention_mask=batch.attention_mask, output_hidden_states=True).hidden_states
    real = batch.attention_mask == 1
    right, swapped = (torch.cat([states[i][real] for i in order], 1) for order in ((1, 2, 3), (2, 1, 3)))
    run_once(hook, model, batch)
    sent = as_float(sent_file(service, hook, tmp_path), "aux_hidden")
    assert float((sent - right).norm() / right.norm()) < 2**-7
    assert float((sent - swapped).norm() / right.norm()) > 0.2
    hook.close()


def test_given_log_probabilities_are_sent_and_unknown_ones_are_recomputed(service: Receiver, tmp_path: Path) -> None:
    model, batch = tiny(), padded_batch([(2, 4)])
    hook = DrafterHook(model, service.url, aux_layers=(1, 2, 3), strict=True)
    logits = run_once(hook, model, batch)
    recomputed = sent_file(service, hook, tmp_path).array("logprobs")
    given = torch.full(batch.input_ids.shape, -0.25)
    given[0, 3] = torch.nan
    run_once(hook, model, batch, version=4, logprobs=given)
    logprobs = sent_file(service, hook, tmp_path).array("logprobs")
    assert logprobs.tolist() == [0.0, 0.0, -0.25, pytest.approx(float(recomputed[3])), -0.25, -0.25]
    assert logits.shape[-1] == VOCAB
    hook.close()


def test_rows_without_response_and_single_tokens_are_left_out_and_first_tokens_never_count(
    service: Receiver, tmp_path: Path
) -> None:
    model, batch = tiny(), padded_batch(LENGTHS)
    hook = DrafterHook(model, service.url, aux_layers=(1, 2, 3), strict=True)
    loss, attention = batch.loss_mask.clone(), batch.attention_mask.clone()
    loss[1] = 0  # a truncated completion that the trainer masked out
    attention[3, :-1] = 0
    loss[2] = attention[2]  # a rollout without a prompt
    run_once(hook, model, batch, loss_mask=loss, attention_mask=attention, rollout_ids=list("abcd"))
    file = sent_file(service, hook, tmp_path)
    header = wire.check_rollout_header(file.header)
    assert header.rollout_ids == ("a", "c")
    wire.check_index(header, file.array("input_ids"), file.array("cu_seqlens"), file.array("loss_mask"), VOCAB)
    assert hook.stats()["skipped_empty"] == 2
    hook.close()


def test_padding_on_both_sides_and_holes_by_mask_are_stripped(service: Receiver, tmp_path: Path) -> None:
    model, batch = tiny(), padded_batch([(3, 4)])
    ids, mask, loss = (torch.nn.functional.pad(t, (2, 3)) for t in inputs(batch).values())
    wide = Padded(ids, mask, loss, batch.sequences, batch.prompt_lengths)
    hook = DrafterHook(model, service.url, aux_layers=(1, 2, 3), strict=True)
    run_once(hook, model, wide)
    assert sent_file(service, hook, tmp_path).array("input_ids").tolist() == batch.sequences[0]
    hook.close()


def test_sampling_is_by_id_keeps_whole_rollouts_and_respects_the_budget(service: Receiver, tmp_path: Path) -> None:
    model, batch = tiny(), padded_batch([(4, 6)] * 12)
    names = [f"rollout-{i}" for i in range(12)]
    below = sorted(n for n in names if sampling_position(n, "sample") < 0.5)
    hook = DrafterHook(model, service.url, aux_layers=(1, 2, 3), sample_fraction=0.5, strict=True)
    run_once(hook, model, batch, rollout_ids=names)
    header = wire.check_rollout_header(sent_file(service, hook, tmp_path).header)
    assert sorted(header.rollout_ids) == below
    assert hook.stats()["skipped_sampling"] == 12 - len(below)
    hook.close()
    hook = DrafterHook(model, service.url, aux_layers=(1, 2, 3), max_tokens_per_step=35, strict=True)
    run_once(hook, model, batch, rollout_ids=names)
    run_once(hook, model, batch, rollout_ids=[f"{n}-again" for n in names])  # the same version: nothing is left
    file = sent_file(service, hook, tmp_path)
    assert np.diff(file.array("cu_seqlens")).tolist() == [10, 10, 10]
    assert hook.stats()["captured_rollouts"] == 3
    run_once(hook, model, batch, version=4, rollout_ids=names)
    assert hook.stats()["captured_rollouts"] == 6
    hook.close()


def test_sampling_positions_are_uniform_and_unrelated_to_a_plain_hash() -> None:
    places = np.array([sampling_position(f"id{i}", "sample") for i in range(4000)])
    assert abs(places.mean() - 0.5) < 0.02
    assert abs((places < 0.125).mean() - 0.125) < 0.02


def test_the_head_is_sent_again_before_the_rollouts_of_a_version_in_which_it_moved(
    service: Receiver, tmp_path: Path
) -> None:
    model, batch = tiny(), padded_batch(LENGTHS)
    hook = DrafterHook(model, service.url, run="r", aux_layers=(1, 2, 3), head_tolerance=0.005, strict=True)
    run_once(hook, model, batch, version=0)  # as registered
    with torch.no_grad():
        model.lm_head.weight.mul_(1.003)
    run_once(hook, model, batch, version=1)  # within the tolerance
    with torch.no_grad():
        model.lm_head.weight.mul_(1.003)
    run_once(hook, model, batch, version=2)
    with torch.no_grad():
        model.lm_head.weight.mul_(2.0)  # after the snapshot: must not reach what was queued
    assert hook.flush(20)
    assert [(r.method, r.path) for r in service.requests] == [
        ("PUT", "/runs/r"),
        ("POST", "/rollouts?run=r"),
        ("POST", "/rollouts?run=r"),
        ("PUT", "/runs/r/head"),
        ("POST", "/rollouts?run=r"),
    ]
    file = mapped(service.requests[3], tmp_path)
    assert file.header.metadata == {"format": wire.HEAD_FORMAT, "policy_version": "2"}
    assert torch.allclose(as_float(file, "lm_head") * 2.0, model.lm_head.weight)
    assert logprob_gap(mapped(service.requests[4], tmp_path), as_float(file, "lm_head"), TEMPERATURE) < 0.05
    hook.close()


def test_a_run_resumed_at_a_later_version_sends_its_head_before_its_first_rollouts(service: Receiver) -> None:
    model, batch = tiny(), padded_batch(LENGTHS)
    hook = DrafterHook(model, service.url, run="r", aux_layers=(1, 2, 3), strict=True)
    for version in (40, 41):
        run_once(hook, model, batch, version=version)
    assert hook.flush(20)
    assert [r.path for r in service.requests] == ["/runs/r", "/runs/r/head", *["/rollouts?run=r"] * 2]
    hook.close()


def test_what_the_caller_gets_wrong_raises_only_when_strict(
    service: Receiver, caplog: pytest.LogCaptureFixture
) -> None:
    model, batch = tiny(), padded_batch(LENGTHS)
    bad: dict[str, Any] = {"loss_mask": batch.loss_mask[:, 1:]}
    strict = DrafterHook(model, service.url, aux_layers=(1, 2, 3), strict=True)
    with pytest.raises(RolloutError, match=r"loss_mask must be \[4, 19\] like input_ids, got \[4, 18\]"):
        run_once(strict, model, batch, **bad)
    strict.close()
    lenient = DrafterHook(model, service.url, aux_layers=(1, 2, 3))
    with caplog.at_level(logging.WARNING, "rl_hooks"):
        for version in range(3):
            run_once(lenient, model, batch, version=version, **bad)
    assert lenient.stats()["failures"] == 3
    assert len([r for r in caplog.records if "loss_mask must be" in r.message]) == 1
    lenient.close()


def test_each_kind_of_failure_is_logged_and_the_newest_is_told_in_the_stats(
    service: Receiver, caplog: pytest.LogCaptureFixture
) -> None:
    model, batch = tiny(), padded_batch(LENGTHS)
    hook = DrafterHook(model, service.url, aux_layers=(1, 2, 3))
    wrong: tuple[dict[str, Any], ...] = ({"loss_mask": batch.loss_mask[:, 1:]}, {"rewards": [1.0]}, {"rewards": [1.0]})
    with caplog.at_level(logging.WARNING, "rl_hooks"):
        for version, bad in enumerate(wrong):
            run_once(hook, model, batch, version=version, **bad)
    told = [r.message for r in caplog.records]
    assert [text.count("loss_mask must be") for text in told] == [1, 0]
    assert "RolloutError: rollout_ids, rewards and strata must hold one entry per row (4)" in told[1]
    assert hook.stats()["last_failure"].endswith("rollout_ids, rewards and strata must hold one entry per row (4)")
    assert (hook.stats()["failures"], hook.stats()["last_error"]) == (3, "")
    hook.close()


def test_an_error_of_the_trainers_own_forward_passes_through_untouched(service: Receiver) -> None:
    model, batch = tiny(), padded_batch(LENGTHS)
    hook = DrafterHook(model, service.url, aux_layers=(1, 2, 3))
    with (
        pytest.raises(ZeroDivisionError),
        hook.capture(
            input_ids=batch.input_ids,
            attention_mask=batch.attention_mask,
            loss_mask=batch.loss_mask,
            policy_version=0,
        ),
    ):
        raise ZeroDivisionError
    run_once(hook, model, batch)
    assert hook.flush(20)
    assert (len(service.rollouts()), hook.stats()["failures"]) == (1, 0)
    hook.close()


def test_a_forward_over_other_tokens_is_refused_and_not_sent(service: Receiver) -> None:
    model, batch = tiny(), padded_batch(LENGTHS)
    hook = DrafterHook(model, service.url, aux_layers=(1, 2, 3))
    with (
        torch.no_grad(),
        hook.capture(
            input_ids=batch.input_ids,
            attention_mask=batch.attention_mask,
            loss_mask=batch.loss_mask,
            policy_version=0,
        ),
    ):
        model(batch.input_ids[:, 1:])
    assert hook.flush(20)
    assert (len(service.rollouts()), hook.stats()["failures"]) == (0, 1)
    hook.close()


def gathered(model: nn.Module, whole: torch.Tensor) -> list[Any]:
    """ZeRO-3's behaviour: lm_head is whole while it runs, and empty otherwise."""
    inner: Any = model

    def fill(*_: Any) -> None:
        inner.lm_head.weight.data = whole

    def empty(*_: Any) -> None:
        inner.lm_head.weight.data = torch.empty(0)

    empty()
    head: nn.Module = inner.lm_head
    return [head.register_forward_pre_hook(fill), head.register_forward_hook(empty)]


@pytest.mark.parametrize("early", [True, False], ids=["attached before", "attached after"])
def test_a_head_that_is_whole_only_while_it_runs_is_read_then(service: Receiver, tmp_path: Path, early: bool) -> None:
    model, batch = tiny(tied=False), padded_batch(LENGTHS)
    plain = DrafterHook(model, service.url, run="r", aux_layers=(1, 2, 3), strict=True)
    run_once(plain, model, batch, rollout_ids=list("abcd"))
    plain.close()
    hooks = [] if early else gathered(model, model.lm_head.weight.data)
    hook = DrafterHook(model, service.url, run="r", aux_layers=(1, 2, 3), strict=True)
    hooks = hooks or gathered(model, model.lm_head.weight.data)
    run_once(hook, model, batch, rollout_ids=list("abcd"))
    assert hook.flush(20)
    first, second = (mapped(one, tmp_path) for one in service.rollouts())
    for name in ("logsumexp", "logprobs", "aux_hidden", "last_hidden"):
        assert np.array_equal(first.array(name), second.array(name))
    puts = [mapped(one, tmp_path) for one in service.requests if one.path == "/runs/r"]
    for name in ("lm_head", "embed_tokens"):
        assert np.array_equal(puts[0].array(name), puts[1].array(name))
    # The weights are those of the first captured forward, and so of its version.
    assert puts[1].header.metadata["policy_version"] == ("0" if early else "3")
    hook.close()


def test_a_head_that_is_never_whole_costs_one_warning_and_asks_for_log_probabilities(
    service: Receiver, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    model, batch = tiny(tied=False), padded_batch(LENGTHS)
    whole = model.lm_head.weight.data
    model.lm_head.weight.data = torch.empty(0)
    hook = DrafterHook(model, service.url, run="r", aux_layers=(1, 2, 3))
    inner: Any = model.model

    def step(version: int, **known: Any) -> None:
        with torch.no_grad(), hook.capture(**inputs(batch), policy_version=version, **known):
            inner(batch.input_ids, attention_mask=batch.attention_mask).last_hidden_state @ whole.T

    with caplog.at_level(logging.WARNING, "rl_hooks"):
        step(0)
        assert "pass the trainer's own as logprobs=" in hook.stats()["last_failure"]
        for version in (1, 2):
            step(version, logprobs=torch.full(batch.input_ids.shape, -0.5))
    assert hook.flush(20)
    assert [r.path for r in service.requests] == ["/rollouts?run=r"] * 2
    file = mapped(service.rollouts()[-1], tmp_path)
    assert "logsumexp" not in file
    assert set(file.array("logprobs")[file.array("loss_mask") == 1].tolist()) == {-0.5}
    assert wire.check_rollout_header(file.header).rollouts == 4
    assert len([r for r in caplog.records if "no rank holds lm_head whole" in r.message]) == 1
    hook.close()


def test_an_unreachable_service_costs_the_loop_nothing_but_counters() -> None:
    model, batch = tiny(), padded_batch(LENGTHS)
    hook = DrafterHook(model, f"http://127.0.0.1:{free_port()}", aux_layers=(1, 2, 3), strict=True, queue_bytes=20_000)
    for version in range(10):
        run_once(hook, model, batch, version=version)
    stats = hook.stats()
    assert stats["captured_rollouts"] == 40
    assert stats["dropped_full"] > 0
    assert stats["queue_bytes"] <= 20_000
    assert not hook.close(0.1)


def test_autocast_of_the_trainer_does_not_round_the_normalisers(service: Receiver, tmp_path: Path) -> None:
    model, batch = tiny(), padded_batch(LENGTHS)
    hook = DrafterHook(model, service.url, aux_layers=(1, 2, 3), strict=True)
    with torch.autocast("cpu", torch.bfloat16):
        run_once(hook, model, batch)
    file = sent_file(service, hook, tmp_path)
    assert logprob_gap(file, model.lm_head.weight, TEMPERATURE) < 0.05
    assert as_float(file, "last_hidden").shape[1] == HIDDEN
    hook.close()


def test_registration_carries_the_target_and_the_initial_drafter(service: Receiver, tmp_path: Path) -> None:
    drafter = tmp_path / "drafter"
    drafter.mkdir()
    fc = np.arange(6, dtype=np.float32).reshape(2, 3)
    safetensors.numpy.save_file({"fc.weight": fc, "d2t": np.array([0, 3], np.int64)}, drafter / "model.safetensors")
    (drafter / "config.json").write_text('{"model_type": "llama"}')
    files = tmp_path / "files"
    files.mkdir()
    for tied in (True, False):
        model = tiny(tied=tied)
        hook = DrafterHook(
            model, service.url, run="r", aux_layers=(0, 2, 3), initial_drafter=drafter, draft_vocab_size=32
        )
        assert hook.flush(20)
        file = mapped(service.requests[-1], files)
        meta = file.header.metadata
        assert meta["format"] == wire.RUN_FORMAT
        assert json.loads(meta["config"])["hidden_size"] == HIDDEN
        assert json.loads(meta["aux_layers"]) == {"convention": "entering", "layers": [0, 2, 3]}
        assert (meta["draft_vocab_size"], meta["policy_version"]) == ("32", "0")
        assert json.loads(meta["drafter_config"]) == {"model_type": "llama"}
        assert ("lm_head" in file) is (not tied)
        assert torch.equal(as_float(file, "embed_tokens"), model.model.embed_tokens.weight)
        assert np.array_equal(file.array("drafter.fc.weight"), fc)
        assert file.array("drafter.d2t").tolist() == [0, 3]
        hook.close()


# --- rows that hold several rollouts ----------------------------------------------------------------------------------


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
    ("names", "fault"),
    [
        (("position_ids",), r"position_ids restart at token 12 of row 0"),
        (("cu_seq_lens_q", "cu_seq_lens_k"), r"cu_seq_lens_q begins another sequence at token 12 of row 0"),
        (("seq_idx",), r"seq_idx changes at token 12 of row 0"),
        (("position_ids", "cu_seq_lens_q", "cu_seq_lens_k"), "token 12"),
    ],
)
@pytest.mark.parametrize("compiled", [False, True], ids=["plain", "compiled"])
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
    assert (header.rollout_ids, header.rewards) == (tuple("abcd"), (1.0, 2.0, 3.0, 4.0))
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
        monkeypatch.setattr(staging, "score_rows", Mock(side_effect=RuntimeError("out of memory")))
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
            held.append(weakref.ref(hook._features.normed()))
            raise MemoryError

    with pytest.raises(MemoryError):
        step()
    assert held[0]() is None
    assert hook._head.pop() is None
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
    monkeypatch.setattr(staging, "score_rows", scored)
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
