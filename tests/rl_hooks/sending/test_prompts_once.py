"""States of a prompt that several rollouts share are sent once: what is left out, and what is not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch
from helpers.trainer.hooks_fixtures import AUX, HIDDEN, Padded, Receiver, mapped, receiver, step, tiny_qwen3

from drafter.batch import load_batch
from rl_hooks import wire
from rl_hooks.hook import DrafterHook
from rl_hooks.sending import features
from rl_hooks.sending.features import Captured, FeatureDtype, PackedIndex, StagedRollouts, shared_rows

DTYPES = get_args(FeatureDtype)
PROMPT, ANSWERS = 9, (4, 6, 3)


def index_of(prompts: list[list[int]], seed: int = 0) -> PackedIndex:
    """One rollout for each prompt, with answers of three lengths."""
    rng = np.random.default_rng(seed)
    ids: list[int] = []
    mask: list[int] = []
    starts = [0]
    for number, prompt in enumerate(prompts):
        answer = rng.integers(2, 60, ANSWERS[number % 3]).tolist()
        ids += [*prompt, *answer]
        mask += [0] * len(prompt) + [1] * len(answer)
        starts.append(len(ids))
    return PackedIndex(np.array(ids, np.int32), np.array(starts, np.int32), np.array(mask, np.uint8), None)


def states_of(index: PackedIndex, noise: float = 0.0, seed: int = 1) -> Captured:
    """States that depend on the token and all before it, as a forward's do, and on nothing else but rounding."""
    g = torch.Generator().manual_seed(seed)
    table = torch.randn(64, 3 * HIDDEN, generator=g)
    parts = []
    for begin, end in zip(index.cu_seqlens[:-1], index.cu_seqlens[1:], strict=True):
        own = table[torch.from_numpy(index.input_ids[begin:end].astype(np.int64))]
        parts.append(own.cumsum(0) / torch.arange(1, end - begin + 1)[:, None].sqrt())
    aux = torch.cat(parts)
    aux = aux * (1 + noise * torch.randn(aux.shape, generator=g))
    return Captured(tuple(aux.chunk(3, dim=1)), torch.randn(len(aux), HIDDEN, generator=g))


def encoded(index: PackedIndex, captured: Captured, dtype: FeatureDtype, path: Path) -> Path:
    zeros = torch.zeros(len(index.input_ids))
    staged = StagedRollouts(index, captured, (zeros, zeros), dtype=dtype)
    metadata = wire.rollout_metadata(
        run="r",
        policy_version=0,
        rollout_ids=[str(i) for i in range(len(index.cu_seqlens) - 1)],
        target_fingerprint="f" * 32,
        aux_layers=AUX,
    )
    path.write_bytes(b"".join(staged.encode(metadata, takes=["aux_rows"])))
    return path


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_file_reads_back_as_the_one_that_repeats_its_prompts(
    tmp_path: Path, dtype: FeatureDtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    some, other = list(range(2, 2 + PROMPT)), list(range(20, 20 + PROMPT))
    index = index_of([some, some, other, some, other])
    captured = states_of(index)
    with monkeypatch.context() as patch:
        patch.setattr(features, "shared_rows", lambda *_: None)
        full = load_batch(encoded(index, captured, dtype, tmp_path / "full")).to("cpu")
    path = encoded(index, captured, dtype, tmp_path / "once")
    batch = load_batch(path, vocab_size=64)
    assert len(batch.aux_hidden) == len(index.input_ids) - 3 * PROMPT
    assert torch.equal(batch.to("cpu").aux_hidden, full.aux_hidden)
    assert torch.equal(batch.to("cpu").last_hidden, full.last_hidden)
    row = 3 * HIDDEN * (2 if dtype == "bfloat16" else 1) + (0 if dtype == "bfloat16" else 12)
    saved = (tmp_path / "full").stat().st_size - path.stat().st_size
    assert saved == pytest.approx(3 * PROMPT * row - 4 * batch.tokens, abs=200), "but for the header"


@pytest.mark.parametrize("dtype", DTYPES)
def test_two_forwards_of_one_prompt_share_where_they_differ_by_rounding_alone(
    tmp_path: Path, dtype: FeatureDtype
) -> None:
    prompt = list(range(2, 2 + 40))
    index = index_of([prompt] * 4)
    path = encoded(index, states_of(index, noise=0.02), dtype, tmp_path / "x")
    batch, full = load_batch(path).to("cpu"), states_of(index)
    assert len(load_batch(path).aux_hidden) == batch.tokens - 3 * len(prompt)
    true = torch.cat(full.aux, dim=1)
    assert (batch.aux_hidden - true).norm() / true.norm() < 0.06


def test_two_images_behind_one_text_share_nothing() -> None:
    """The tokens are the same, as an image's are all one placeholder, and the states are not."""
    index = index_of([[5] * 40] * 3)
    aux = torch.cat(states_of(index).aux, dim=1)
    image = torch.randn(10, aux.shape[1], generator=torch.Generator().manual_seed(2))
    at = int(index.cu_seqlens[1])
    aux[at + 10 : at + 20] += image
    rows = shared_rows(index, aux, None, 3)
    assert rows is not None
    second = np.arange(at, int(index.cu_seqlens[2]))
    assert {*second} <= {*rows.kept.tolist()}, "the second keeps its own"
    assert len(rows.kept) == len(index.input_ids) - 40, "the third shares with the first"


def test_a_large_channel_of_one_layer_does_not_hide_that_the_others_differ() -> None:
    """Residual streams have channels of some hundred times the others' size, mostly in late layers."""
    index = index_of([[5] * 40] * 2)
    aux = torch.randn(len(index.input_ids), 3 * HIDDEN, generator=torch.Generator().manual_seed(2))
    aux[:, -1] = 1200.0
    assert shared_rows(index, aux, None, 3) is None


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_states_that_are_no_numbers_are_sent_as_they_are(value: float) -> None:
    index = index_of([[5] * 12] * 2)
    aux = torch.cat(states_of(index).aux, dim=1)
    for begin in index.cu_seqlens[:-1]:
        aux[int(begin)] = value
    assert shared_rows(index, aux, None, 3) is None


@pytest.mark.parametrize("prompts", [[[2, 3, 4], [2, 3, 5]], [[2, 3, 4], [2, 3]], [[2, 3, 4]]])
def test_where_nothing_is_shared_there_are_no_rows(prompts: list[list[int]], tmp_path: Path) -> None:
    index = index_of(prompts)
    file = wire.MappedFile(encoded(index, states_of(index), "bfloat16", tmp_path / "x"))
    assert "aux_rows" not in file


# --- a hook and a service
@pytest.fixture
def service() -> Iterator[Receiver]:
    with receiver() as made:
        yield made


def group(size: int, seed: int) -> Padded:
    """Answers of one length to one prompt."""
    rng = np.random.default_rng(seed)
    prompt = rng.integers(2, 60, PROMPT).tolist()
    ids = [prompt + rng.integers(2, 60, 5).tolist() for _ in range(size)]
    mask = [[0] * PROMPT + [1] * 5] * size
    return Padded(torch.tensor(ids), torch.ones(size, PROMPT + 5, dtype=torch.int64), torch.tensor(mask), ids, [])


def test_a_service_that_names_no_optional_tensors_gets_none(service: Receiver, tmp_path: Path) -> None:
    """An older service refuses a file with a tensor that it does not know: it answers without `optional_tensors`."""
    service.answer = lambda _request: (202, {}, {"duplicate": False, "last_rows": "predicting"})
    model = tiny_qwen3()
    hook = DrafterHook(model, service.url, run="r", aux_layers=AUX, patience_seconds=0.5)
    try:
        for version in range(2):
            step(hook, model, version, group(4, version))
            assert hook.flush(30.0)
        for request in service.rollouts():
            file = mapped(request, tmp_path)
            assert "aux_rows" not in file.header.tensors
            assert len(file.array("aux_hidden")) == 4 * (PROMPT + 5)
    finally:
        hook.close()


def test_a_hook_sends_the_states_of_a_prompt_once(service: Receiver, tmp_path: Path) -> None:
    service.answer = lambda _request: (202, {}, {"duplicate": False, "optional_tensors": ["aux_rows"]})
    model = tiny_qwen3()
    hook = DrafterHook(model, service.url, run="r", aux_layers=AUX, patience_seconds=0.5)
    try:
        step(hook, model, 0, group(4, 0))
        assert len(mapped(service.rollouts()[0], tmp_path).array("aux_hidden")) == 4 * (PROMPT + 5) - 3 * PROMPT
    finally:
        hook.close()
