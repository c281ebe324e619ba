"""What DrafterHook sends, read back as the worker reads it, against the model itself."""

from __future__ import annotations

import json
import logging
import os
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args, get_type_hints

import numpy as np
import pytest
import safetensors.numpy
import torch
from helpers.ports import free_port
from helpers.trainer.capture_fixtures import LENGTHS, TEMPERATURE, gathered, inputs, logprob_gap, run_once, sent_file
from helpers.trainer.hooks_fixtures import (
    HIDDEN,
    VOCAB,
    Answer,
    Padded,
    Received,
    Receiver,
    as_float,
    mapped,
    names_of,
    padded_batch,
)
from helpers.trainer.hooks_fixtures import tiny_qwen3 as tiny
from torch import nn

import rl_hooks
from rl_hooks import trl, wire
from rl_hooks.errors import RolloutError
from rl_hooks.hook import DrafterHook
from rl_hooks.sending.delivery import NO_SUCH_RUN
from rl_hooks.sending.sampling import sampling_position
from rl_hooks.sending.tally import Tally
from rl_hooks.trainer.base import COUNTERS, HookKeywords, HookOptions
from rl_hooks.trainer.hook import DrafterKeywords, DrafterOptions
from rl_hooks.trainer.megatron import hook as megatron
from rl_hooks.trainer.plan import CaptureArguments, CaptureKeywords, RolloutChoice, VersionOrder


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
    assert (header.run, header.policy_version, names_of(header)) == ("r", 3, tuple("abcd"))
    assert (header.rewards, header.temperature, header.top_p, header.top_k) == ((1.0, 0.0, 0.5, -1.0), 0.7, 0.9, 0)
    assert header.target_fingerprint == wire.target_fingerprint(model.config.to_dict(), (1, 2, 3))
    assert header.strata == tuple("xyxy")
    for i, (sequence, prompt) in enumerate(zip(batch.sequences, batch.prompt_lengths, strict=True)):
        assert ids[cu[i] : cu[i + 1]].tolist() == sequence
        assert mask[cu[i] : cu[i + 1]].tolist() == [0] * prompt + [1] * (len(sequence) - prompt)
    by_library = safetensors.numpy.load(service.rollouts()[0].body.replace(b'"BF16"', b'"U16" '))
    assert by_library["input_ids"].tolist() == ids.tolist()
    assert np.array_equal(by_library["aux_hidden"], file.array("aux_hidden"))
    hook.close()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 1e301])
def test_a_reward_that_is_no_number_costs_the_rewards_and_not_the_rollouts(
    service: Receiver, tmp_path: Path, caplog: pytest.LogCaptureFixture, bad: float
) -> None:
    model, batch = tiny(), padded_batch(LENGTHS)
    hook = DrafterHook(model, service.url, aux_layers=(1, 2, 3), strict=True)
    for version in range(2):
        run_once(hook, model, batch, version, rewards=[1.0, bad, 0.5, -1.0])
    header = wire.check_rollout_header(sent_file(service, hook, tmp_path).header)
    assert (header.rollouts, header.rewards) == (4, None)
    assert caplog.text.count("a reward is not finite") == 1
    hook.close()


@pytest.mark.parametrize("takes", [[], ["aux_rows"], ["aux_rows", "versions_behind"]])
def test_a_file_tells_how_old_the_weights_were_that_drew_a_token_where_the_service_takes_it(
    service: Receiver, tmp_path: Path, takes: list[str]
) -> None:
    service.answer = lambda _request: (202, {}, {"duplicate": False, "optional_tensors": takes})
    model, batch = tiny(), padded_batch(LENGTHS)
    hook = DrafterHook(model, service.url, aux_layers=(1, 2, 3), strict=True)
    behind = (torch.arange(batch.input_ids.numel()) % 4).view_as(batch.input_ids)  # of policy version 3
    run_once(hook, model, batch, versions_behind=torch.where(batch.loss_mask == 1, behind, -7))
    file = sent_file(service, hook, tmp_path)
    assert ("versions_behind" in file) == ("versions_behind" in takes)
    if "versions_behind" in file:
        ids, starts, mask, sent = (file.array(n) for n in ("input_ids", "cu_seqlens", "loss_mask", "versions_behind"))
        wire.check_index(wire.check_rollout_header(file.header), ids, starts, mask, VOCAB, versions_behind=sent)
        assert sent.tolist() == (behind * batch.loss_mask)[batch.attention_mask == 1].tolist()
        assert set(sent.tolist()) == {0, 1, 2, 3}
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
    capture = hook._reader.features
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
    for version, unknown in enumerate((torch.nan, -torch.inf, torch.inf), 4):
        given[0, 3] = unknown
        run_once(hook, model, batch, version=version, logprobs=given)
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
    assert names_of(header) == ("a", "c")
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
    hook = DrafterHook(model, service.url, aux_layers=(1, 2, 3), sample_fraction=0.5, strict=True)
    run_once(hook, model, batch, rollout_ids=names)
    header = wire.check_rollout_header(sent_file(service, hook, tmp_path).header)
    assert header.rollout_ids
    assert all(sampling_position(name, "sample") < 0.5 for name in header.rollout_ids)
    assert hook.stats()["skipped_sampling"] == 12 - len(header.rollout_ids) > 0
    hook.close()
    hook = DrafterHook(model, service.url, aux_layers=(1, 2, 3), max_tokens_per_step=35, strict=True)
    run_once(hook, model, batch, rollout_ids=names)
    run_once(hook, model, batch, rollout_ids=[f"{n}-again" for n in names])  # the same version: nothing is left
    file = sent_file(service, hook, tmp_path)
    assert np.diff(file.array("cu_seqlens")).tolist() == [10, 10, 10]
    assert hook.stats()["captured_rollouts"] == 3
    run_once(hook, model, batch, version=4, rollout_ids=names)
    run_once(hook, model, batch, version=4, rollout_ids=[f"{n}-again" for n in names])
    assert hook.stats()["captured_rollouts"] == 6
    hook.close()


def test_a_file_says_what_it_was_drawn_from_each_rollout_once(service: Receiver, tmp_path: Path) -> None:
    """What a version's spent budget left out is said with the next file; a rollout that could never fit is not."""
    model, names = tiny(), [f"rollout-{n}" for n in range(8)]
    batch, long = padded_batch([(4, 6)] * 8), padded_batch([(4, 6), (4, 36)])
    hook = DrafterHook(model, service.url, aux_layers=(1, 2, 3), max_tokens_per_step=35, strict=True)
    run_once(hook, model, batch, version=2, rollout_ids=names)
    told = wire.check_rollout_header(sent_file(service, hook, tmp_path).header).offered
    assert told == (8, 0), "a start's first version: nobody knows whether the budget will reach its last rollouts"
    run_once(hook, model, batch, rollout_ids=names)
    assert wire.check_rollout_header(sent_file(service, hook, tmp_path).header).offered == (8, 48)
    run_once(hook, model, batch, rollout_ids=names)  # another epoch
    unnamed = padded_batch([(4, 6)] * 2)
    for _ in range(2):
        run_once(hook, model, unnamed)
    run_once(hook, model, long, version=4, rollout_ids=["a", "b"])
    header = wire.check_rollout_header(sent_file(service, hook, tmp_path).header)
    assert (header.policy_version, header.rollouts, header.offered) == (4, 1, (3, 18))
    hook.close()


def chosen_in_order(max_tokens: int, steps: Sequence[tuple[int, Sequence[int]]]) -> list[list[int]]:
    """The tokens of each rollout that is taken of these steps: a policy version, and its rollouts' tokens in order.

    Micro-batches are of eight rollouts. No version's budget may be exceeded.
    """
    choice = RolloutChoice(1.0, max_tokens, Tally(logging.getLogger("rl_hooks"), *COUNTERS))
    taken = []
    for step, (version, tokens) in enumerate(steps):
        names = [f"{step}/{number}" for number in range(len(tokens))]
        of_step = []
        for first in range(0, len(tokens), 8):
            part = tokens[first : first + 8]
            of_step += [part[b] for b in choice.choose(names[first : first + 8], part, part, version)]
        assert sum(of_step) <= max_tokens
        taken.append(of_step)
    return taken


@pytest.mark.parametrize("order", [1, -1], ids=["the shortest first", "the longest first"])
@pytest.mark.parametrize(
    "sizes", [[400], [400, 320, 480, 400], [200, 400]], ids=["alike", "20 % more or less", "twice"]
)
def test_a_budget_is_spread_over_all_micro_batches_however_a_trainer_sorts_them(sizes: list[int], order: int) -> None:
    """What a first version took is not asked: nothing was known of its size."""
    lengths_of = {size: np.linspace(100, 900, size, dtype=int).tolist()[::order] for size in sizes}
    steps = [(version, lengths_of[size]) for version, size in enumerate(sizes * 16)]
    taken = chosen_in_order(50_000, steps)[8:]
    lengths = [length for of_step in taken for length in of_step]
    offered = [length for _, tokens in steps[8:] for length in tokens]
    assert np.mean(lengths) == pytest.approx(np.mean(offered), rel=0.06)
    assert sum(lengths) > 0.85 * sum(50_000 * len(tokens) / max(sizes) for _, tokens in steps[8:])


def test_all_of_a_budget_is_spent_where_versions_are_alike() -> None:
    """The share that is taken follows what is left, for hashes below a fixed share are now fewer and now more."""
    taken = chosen_in_order(1600, [(version, [10] * 640) for version in range(24)])
    assert [sum(of_step) for of_step in taken] == [1600] * 24


@pytest.mark.parametrize("together", [1, 3, 8, 64])
@pytest.mark.parametrize("lengths", [range(10, 74), range(73, 9, -1), [40] * 64])
def test_a_file_says_no_tokens_where_a_first_version_may_be_sent_in_part(lengths: Sequence[int], together: int) -> None:
    """Whatever is left out of it, one of its files says so; and the next version's files say nothing of it."""
    for budget, fits in ((2 * sum(lengths), True), (sum(lengths) // 2, False), (sum(lengths) // 8, False)):
        choice, said = RolloutChoice(1.0, budget, Tally(logging.getLogger("rl_hooks"), *COUNTERS)), list[list[Any]]()
        for version in range(2):
            said.append([])
            for at in range(0, 64, together):
                tokens = lengths[at : at + together]
                if choice.choose([f"{version}/{at + n}" for n in range(len(tokens))], tokens, tokens, version):
                    said[-1].append(choice.take_offered())
        assert all(rollouts > 0 for rollouts, _ in said[0])
        assert all(tokens > 0 for _, tokens in said[0]) == fits
        assert all(tokens >= 10 * rollouts for rollouts, tokens in said[1]), "each has ten at least"
        if fits:
            assert [sum(column) for column in zip(*said[0], strict=True)] == [64, sum(lengths)]


def test_a_later_epoch_takes_nothing_again() -> None:
    """Neither of a version that is as large as was expected, nor of one of half of that."""
    choice = RolloutChoice(1.0, 200, Tally(logging.getLogger("rl_hooks"), *COUNTERS))
    for version, size in ((0, 80), (1, 80), (2, 40)):
        names = [f"{version}/{number}" for number in range(size)]
        epochs = [[names[b] for b in choice.choose(names, [10] * size, [6] * size, version)] for _ in range(3)]
        assert epochs[0]
        assert epochs[1:] == [[], []]


def test_a_budget_is_spread_where_versions_come_again_and_where_they_alternate() -> None:
    tokens = [*range(100, 900, 2)]
    back = chosen_in_order(50_000, [(version, tokens) for version in (*range(9), *range(4, 9))])
    for of_step in (*back[1:9], *back[10:]):
        assert np.mean(of_step) == pytest.approx(np.mean(tokens), rel=0.2)
    choice = RolloutChoice(1.0, 50_000, Tally(logging.getLogger("rl_hooks"), *COUNTERS))
    taken = []
    for step in range(1, 40):  # a half of each version's rollouts comes a step later
        for at, length in enumerate(tokens):
            version = step - at % 2
            if choice.choose([f"{step}/{at}"], [length], [length], version) and step > 4:
                taken.append(length)
    assert np.mean(taken) == pytest.approx(np.mean(tokens), rel=0.06)


def test_a_budget_that_holds_a_whole_version_leaves_out_nothing_of_it() -> None:
    sizes = [40, 400, 8, 400, 90]
    steps = [(version, [100 + n % 7 for n in range(size)]) for version, size in enumerate(sizes * 3)]
    assert chosen_in_order(max(sum(tokens) for _, tokens in steps), steps) == [tokens for _, tokens in steps]


def test_the_budget_is_of_each_version_where_versions_alternate(service: Receiver) -> None:
    model, batch = tiny(), padded_batch([(4, 6)] * 2)
    hook = DrafterHook(model, service.url, aux_layers=(1, 2, 3), max_tokens_per_step=35, strict=True)
    for version in (0, 1, 0, 1, 0, 1):
        run_once(hook, model, batch, version=version)
    assert hook.stats()["captured_tokens"] == 60, "three rollouts of each"
    for version in range(2, 80):  # more than are remembered
        run_once(hook, model, batch, version=version)
    assert len(hook._choice._budgets) == 64
    hook.close()


def test_a_trainer_that_goes_on_from_an_earlier_checkpoint_gets_the_budgets_of_its_versions_again(
    service: Receiver,
) -> None:
    model, batch = tiny(), padded_batch([(4, 6)] * 2)
    hook = DrafterHook(model, service.url, aux_layers=(1, 2, 3), max_tokens_per_step=20, strict=True)
    captured = []
    for version in (*range(9), 4, 5, 6, 7, 8):
        run_once(hook, model, batch, version=version)
        captured.append(hook.stats()["captured_rollouts"])
    # That the trainer went back shows with the second version.
    assert captured == [2, 4, 6, 8, 10, 12, 14, 16, 18, 18, 20, 22, 24, 26]
    hook.close()


@pytest.mark.parametrize("late", [[9, 3, 5], [3, 5, 9], [9, 7, 3, 6]])
def test_late_rollouts_of_several_versions_do_not_renew_budgets_again_and_again(late: list[int]) -> None:
    choice = RolloutChoice(1.0, 20, Tally(logging.getLogger("rl_hooks"), *COUNTERS))
    sent = Counter[int]()
    for number, version in enumerate(late * 20):
        sent[version] += 10 * len(choice.choose([f"rollout {number}"], [10], [6], version))
    assert max(sent.values()) <= 2 * 20, "once they look as if the trainer had gone back to an earlier checkpoint"


def test_what_is_noted_of_one_policy_version_is_bounded() -> None:
    """A loop may never raise it."""
    choice = RolloutChoice(1e-9, 20, Tally(logging.getLogger("rl_hooks"), *COUNTERS))
    for first in (0, 40_000):
        names = [str(n) for n in range(first, first + 40_000)]
        choice.choose(names, [10] * len(names), [6] * len(names), 0)
    assert len(choice._budgets[0].offered) == 65_536
    assert choice.take_offered() == (65_536, 6 * 65_536)
    choice.choose(["0", "80000"], [10] * 2, [6] * 2, 1)
    assert choice.take_offered() == (2, 12)


@pytest.mark.parametrize("stride", [1, 4])
def test_that_a_trainer_went_back_is_seen_each_time_however_it_counts(stride: int) -> None:
    order = VersionOrder()
    versions = [*range(9), *range(4, 9), *range(4, 12), *range(6, 9)]
    back = [at for at, version in enumerate(versions) if order.went_back(stride * version)]
    assert back == [10, 15, 23]


def test_that_rollouts_are_longer_than_the_budget_is_said_once(
    service: Receiver, caplog: pytest.LogCaptureFixture
) -> None:
    model, batch = tiny(), padded_batch([(4, 6)] * 2)
    hook = DrafterHook(model, service.url, aux_layers=(1, 2, 3), max_tokens_per_step=9, strict=True)
    with caplog.at_level(logging.WARNING, "rl_hooks"):
        for version in range(2):
            run_once(hook, model, batch, version=version)
    assert caplog.text.count("a rollout of 10 tokens is left out, as all of more than max_tokens_per_step (9) are") == 1
    assert hook.stats()["skipped_budget"] == 4
    hook.close()


@pytest.mark.parametrize("version", [np.int64(3), torch.tensor(3), 3, 10**15 - 1])
def test_a_policy_version_may_be_any_kind_of_integer(service: Receiver, tmp_path: Path, version: Any) -> None:
    model, batch = tiny(), padded_batch(LENGTHS)
    hook = DrafterHook(model, service.url, aux_layers=(1, 2, 3), policy_version=version, strict=True)
    run_once(hook, model, batch, version=version)
    assert wire.check_rollout_header(sent_file(service, hook, tmp_path).header).policy_version == int(version)
    hook.close()


@pytest.mark.parametrize("version", [-1, 3.0, None, torch.tensor(2.0), 10**15])
def test_a_policy_version_that_is_no_count_is_refused_by_name(service: Receiver, version: Any) -> None:
    model, batch = tiny(), padded_batch(LENGTHS)
    with pytest.raises(RolloutError, match="policy_version must be an integer from 0 on, of at most 15 digits, got"):
        DrafterHook(model, service.url, aux_layers=(1, 2, 3), policy_version=version)
    hook = DrafterHook(model, service.url, aux_layers=(1, 2, 3))
    run_once(hook, model, batch, version=version)
    assert "policy_version must be an integer from 0 on, of at most 15 digits, got" in hook.stats()["last_failure"]
    assert hook.flush(20)
    assert [request.method for request in service.requests] == ["PUT"], "no head, and no rollouts"
    hook.close()


def test_a_misspelt_option_or_argument_is_an_error_at_once(service: Receiver) -> None:
    model = tiny()
    with pytest.raises(TypeError, match="sample_fractoin"):
        DrafterHook(model, service.url, aux_layers=(1, 2, 3), sample_fractoin=0.5)  # type: ignore[call-arg]
    hook = DrafterHook(model, service.url, aux_layers=(1, 2, 3))
    ids = torch.ones(1, 4, dtype=torch.long)
    capture: Callable[..., AbstractContextManager[None]] = hook.capture  # else a type checker says it before
    with pytest.raises(TypeError, match="los_mask"), capture(input_ids=ids, los_mask=ids, policy_version=0):
        pytest.fail("the forward must not run")
    with pytest.raises(TypeError, match="loss_mask"), capture(input_ids=ids, policy_version=0):
        pytest.fail("the forward must not run")
    hook.close()


@pytest.mark.parametrize(
    ("keywords", "fields"),
    [(HookKeywords, HookOptions), (DrafterKeywords, DrafterOptions), (CaptureKeywords, CaptureArguments)],
)
def test_editors_are_told_of_every_option_and_argument(keywords: type, fields: type) -> None:
    assert get_type_hints(keywords) == get_type_hints(fields)


@pytest.mark.parametrize(
    ("attach", "own"),
    [
        (trl.attach, {"policy_version", "rank", "world_size", "own_log_probs"}),
        (megatron.attach, {"rank", "world_size"}),
    ],
)
def test_editors_are_told_of_every_option_of_attach(attach: Callable[..., Any], own: set[str]) -> None:
    """All but those that the trainer says itself; and `wait_seconds`, which is Megatron's own."""
    (keywords,) = get_args(get_type_hints(attach)["options"])
    fields = HookOptions if attach is megatron.attach else DrafterOptions
    known = {name: kind for name, kind in get_type_hints(fields).items() if name not in own}
    assert {n: k for n, k in get_type_hints(keywords).items() if n != "wait_seconds"} == known


def test_what_a_loop_of_ones_own_needs_is_in_the_package() -> None:
    assert [getattr(rl_hooks, name).__name__.rpartition(".")[2] for name in rl_hooks.__all__] == rl_hooks.__all__
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = rl_hooks.nothing


def test_a_capture_after_close_is_said_once_and_is_no_failure(
    service: Receiver, caplog: pytest.LogCaptureFixture
) -> None:
    model, batch = tiny(), padded_batch(LENGTHS)
    hook = DrafterHook(model, service.url, aux_layers=(1, 2, 3))
    hook.close()
    with caplog.at_level(logging.WARNING, "rl_hooks"):
        for version in range(2):
            run_once(hook, model, batch, version=version)
    assert caplog.text.count("`capture` was called after `close`") == 1
    assert hook.stats()["failures"] == 0


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ({"temperature": None}, "temperature: expected a number, got None"),
        ({"rewards": [1.0, None, 0.0, 0.0]}, "rewards: expected a number, got None"),
        ({"rewards": torch.ones(4, 2)}, "rewards: expected a number, got [1.0, 1.0]"),
        ({"loss_mask": np.ones((4, 19))}, "loss_mask must be a tensor [4, 19] like input_ids, got ndarray"),
    ],
)
def test_what_is_wrong_is_named(service: Receiver, bad: dict[str, Any], said: str) -> None:
    model, batch = tiny(), padded_batch(LENGTHS)
    hook = DrafterHook(model, service.url, aux_layers=(1, 2, 3))
    run_once(hook, model, batch, **bad)
    failure = hook.stats()["last_failure"]
    assert said in failure
    assert len(failure) < 200
    hook.close()


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_forked_children_give_their_rollouts_ids_of_their_own(service: Receiver) -> None:
    """Else the service takes what they send for what their parent has sent, and drops it."""
    model = tiny()
    hook = DrafterHook(model, service.url, aux_layers=(1, 2, 3))
    assert hook.flush(20)
    torch.set_num_threads(1)
    for _ in range(2):
        child = os.fork()
        if child == 0:
            try:
                run_once(hook, model, padded_batch(LENGTHS), version=0)
                os._exit(0 if hook.flush(20) and hook.stats()["sent"] == 1 else 1)
            finally:
                os._exit(1)
        assert os.waitpid(child, 0)[1] == 0
    run_once(hook, model, padded_batch(LENGTHS), version=0)
    assert hook.flush(20)
    assert len({request.body for request in service.rollouts()}) == 3
    hook.close()


@pytest.mark.parametrize(("share", "said"), [(0.1, 1), (0.0, 0)])
def test_dropout_in_the_captured_forward_is_said_once(
    service: Receiver, caplog: pytest.LogCaptureFixture, share: float, said: int
) -> None:
    model = tiny(attention_dropout=share).train()
    hook = DrafterHook(model, service.url, aux_layers=(1, 2, 3), strict=True)
    with caplog.at_level(logging.WARNING, "rl_hooks"):
        for version in range(2):
            run_once(hook, model, padded_batch(LENGTHS), version)
        assert hook.flush(20)
    hook.close()
    assert len([r for r in caplog.records if "drops values at random (model.layers.0.self_attn)" in r.message]) == said


def test_a_dtype_that_is_none_is_refused_when_attaching_and_the_model_left_as_it_was() -> None:
    model = tiny()
    with pytest.raises(ValueError, match="dtype: expected one of bfloat16, float8_e4m3, float8_e4m3_all, got 'fp8'"):
        DrafterHook(model, "http://127.0.0.1:9", aux_layers=(1, 2, 3), dtype="fp8")  # type: ignore[arg-type]
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_an_id_that_comes_again_names_another_rollout_where_its_tokens_differ(
    service: Receiver, tmp_path: Path
) -> None:
    """A loop that counts from 0 in each step, and one that goes over the same rollouts again with other weights."""
    model = tiny()
    hook = DrafterHook(model, service.url, aux_layers=(1, 2, 3), strict=True)
    one, other = padded_batch(LENGTHS, seed=1), padded_batch(LENGTHS, seed=2)
    long = [*"012", "3" * 500]
    for version, batch in enumerate((one, other, one)):
        run_once(hook, model, batch, version=version, rollout_ids=long)
    assert hook.flush(30.0)
    first, second, again = (
        wire.check_rollout_header(mapped(request, tmp_path).header).rollout_ids for request in service.rollouts()
    )
    assert not set(first) & set(second)
    assert first == again
    assert max(map(len, first)) <= 128
    hook.close()


def test_rollout_ids_may_be_integers(service: Receiver, tmp_path: Path) -> None:
    model, batch = tiny(), padded_batch(LENGTHS)
    hook = DrafterHook(model, service.url, aux_layers=(1, 2, 3), strict=True)
    run_once(hook, model, batch, rollout_ids=[7, 8, 9, 10])
    assert names_of(wire.check_rollout_header(sent_file(service, hook, tmp_path).header)) == ("7", "8", "9", "10")
    hook.close()


def test_an_id_that_comes_twice_in_one_batch_counts_once(service: Receiver, tmp_path: Path) -> None:
    """Equal answers to one prompt, under the prompt's name: the service would refuse a file with an id twice."""
    model, batch = tiny(), padded_batch([(3, 4)] * 3)
    equal = replace(batch, input_ids=batch.input_ids[[0, 1, 0]])
    hook = DrafterHook(model, service.url, aux_layers=(1, 2, 3), strict=True)
    run_once(hook, model, equal, rollout_ids=["p", "p", "p"])
    assert names_of(wire.check_rollout_header(sent_file(service, hook, tmp_path).header)) == ("p", "p")
    hook.close()


def test_any_text_may_be_a_rollouts_id(service: Receiver, tmp_path: Path) -> None:
    model, batch = tiny(), padded_batch(LENGTHS)
    hook = DrafterHook(model, service.url, aux_layers=(1, 2, 3), strict=True)
    run_once(hook, model, batch, rollout_ids=["two\nlines", "a\u00a0b", "\ud800", ""])
    ids = wire.check_rollout_header(sent_file(service, hook, tmp_path).header).rollout_ids
    assert len(set(ids)) == 4
    hook.close()


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16, torch.float64, torch.bool, torch.uint8])
def test_masks_may_be_of_any_type(service: Receiver, tmp_path: Path, kind: torch.dtype) -> None:
    model, batch = tiny(), padded_batch(LENGTHS)
    hook = DrafterHook(model, service.url, aux_layers=(1, 2, 3), strict=True)
    run_once(hook, model, batch, attention_mask=batch.attention_mask.to(kind), loss_mask=batch.loss_mask.to(kind))
    file = sent_file(service, hook, tmp_path)
    assert file.array("loss_mask").sum() == sum(response for _, response in LENGTHS)
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
    assert file.header.metadata == {"format": wire.HEAD_FORMAT, "policy_version": "2", "session": hook.session.id}
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
    with pytest.raises(RolloutError, match=r"got \[4, 18\]; column s is of token s, so put a column in front"):
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
    assert "RolloutError: rollout_ids, rewards, strata and prompt_hashes must hold one entry per row (4)" in told[1]
    assert hook.stats()["last_failure"].endswith(
        "rollout_ids, rewards, strata and prompt_hashes must hold one entry per row (4)"
    )
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


@pytest.mark.parametrize("tied", [False, True])
def test_a_model_whose_weights_are_loaded_after_attaching_is_registered_in_its_first_captured_forward(
    service: Receiver, tmp_path: Path, tied: bool
) -> None:
    whole, batch = tiny(tied=tied), padded_batch(LENGTHS)
    model = tiny(tied=tied).to("meta")
    with DrafterHook(model, service.url, run="r", aux_layers=(1, 2, 3), strict=True) as hook:
        model.to_empty(device="cpu").tie_weights()
        model.load_state_dict(whole.state_dict())
        for name, buffer in whole.named_buffers():  # those of the rotary positions are in no checkpoint
            model.get_buffer(name).copy_(buffer)
        run_once(hook, model, batch)
        file = sent_file(service, hook, tmp_path)
    run = mapped(service.requests[0], tmp_path)
    assert run.header.metadata["policy_version"] == "3"
    assert torch.equal(as_float(run, "embed_tokens"), whole.model.embed_tokens.weight)
    assert torch.equal(as_float(run, "embed_tokens" if tied else "lm_head"), whole.lm_head.weight)
    assert logprob_gap(file, whole.lm_head.weight, TEMPERATURE) < 0.05


def test_a_run_that_was_lost_is_registered_again_where_the_head_is_whole_only_while_it_runs(
    service: Receiver, tmp_path: Path
) -> None:
    model, batch, there = tiny(tied=False), padded_batch(LENGTHS), set[str]()

    def answer(request: Received) -> Answer:
        if request.method == "PUT":
            there.add(request.path)
        return (202, {}, {}) if "/runs/r" in there else (404, {}, {"type": NO_SUCH_RUN})

    service.answer = answer
    gathered(model, model.lm_head.weight.data)
    with DrafterHook(model, service.url, run="r", aux_layers=(1, 2, 3), strict=True) as hook:
        for version in range(6):
            if version in (1, 3):  # and once more, within a moment
                there.clear()
            run_once(hook, model, batch, version)
            assert hook.flush(20)
    puts = [mapped(one, tmp_path) for one in service.requests if one.path == "/runs/r"]
    assert [one.header.metadata["policy_version"] for one in puts] == ["0", "2"]
    for name in ("lm_head", "embed_tokens"):
        assert np.array_equal(puts[0].array(name), puts[1].array(name))
    assert hook.stats()["dropped_error"] == 2 + 4, "the heads of versions 1 and 3, the rollouts of 1 and of 3 to 5"


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
