"""What may be swapped into an engine, decided from bytes alone; needs no engine."""

from __future__ import annotations

import json
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save
from torch import Tensor

from drafter.files.checkpoint import export_config
from drafter.model.eagle3 import DrafterConfig
from drafter.vocabulary import DraftVocabulary
from rl_hooks.engines.candidate import (
    DrafterRefusedError,
    check_config,
    read_candidate,
    running_sizes,
    vocabulary_digest,
)
from rl_hooks.format.drafter import differences, weight_shapes
from rl_hooks.format.eagle3 import tensor_shapes

CONFIG = DrafterConfig(
    hidden_size=16,
    target_hidden_size=16,
    intermediate_size=24,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    vocab_size=40,
    draft_vocab_size=20,
    aux_layers=(1, 2, 3),
    rope_theta=5e5,
    model_type="qwen3",
)
VOCABULARY = DraftVocabulary(torch.arange(0, 40, 2), 40)


def tensors() -> dict[str, Tensor]:
    shapes = tensor_shapes(CONFIG)
    weights = {name: torch.randn(shape) for name, shape in shapes.items() if name not in ("d2t", "t2d")}
    return weights | {"d2t": VOCABULARY.d2t, "t2d": VOCABULARY.t2d}


def candidate(body: bytes, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    return read_candidate(body, CONFIG, VOCABULARY.d2t, dtype)


def test_an_engines_own_copy_of_the_config_gives_the_sizes_of_the_drafter() -> None:
    own = export_config(CONFIG) | {"tie_word_embeddings": True, "use_cache": True, "layer_types": None}
    assert running_sizes(own, (1, 2, 3)) == CONFIG
    silent = {n: v for n, v in own.items() if n not in ("max_position_embeddings", "target_hidden_size")}
    assert differences(running_sizes(silent, (1, 2, 3)), CONFIG) == []
    assert running_sizes(own, (0, 1, 2)).aux_layers == (0, 1, 2)  # what it captures, whatever the config says


def test_the_vocabularys_digest_is_the_services() -> None:
    assert vocabulary_digest(VOCABULARY.d2t, 40) == VOCABULARY.digest


def test_a_good_file_comes_out_as_the_engines_dtype_without_its_vocabulary() -> None:
    given_tensors = tensors()
    weights = candidate(save(given_tensors), torch.bfloat16)
    assert weights.keys() == weight_shapes(CONFIG).keys()
    assert {w.dtype for w in weights.values()} == {torch.bfloat16}
    assert torch.equal(weights["fc.weight"], given_tensors["fc.weight"].bfloat16())


def longest_hold(read: Callable[[], object]) -> float:
    """The largest part of the CPU time of `read` that passed between two turns of a thread beside it."""
    done, seen = threading.Event(), threading.Event()

    def run() -> None:
        read()
        done.set()
        seen.wait()  # its clock is read until then

    reader = threading.Thread(target=run)
    reader.start()
    assert reader.ident is not None
    clock, turns = time.pthread_getcpuclockid(reader.ident), [0.0]
    while not done.is_set():
        turns.append(time.clock_gettime(clock))
        time.sleep(0.0005)
    turns.append(time.clock_gettime(clock))
    seen.set()
    reader.join()
    return max(after - before for before, after in pairwise(turns)) / turns[-1]


def test_reading_a_large_file_lets_other_threads_run() -> None:
    """An engine steps in another thread while its next drafter is read.

    A copy that holds the GIL takes a tenth of it in each attempt; a thread that got no core is not late in each.
    """
    large = replace(CONFIG, hidden_size=1024, target_hidden_size=1024, intermediate_size=8192)
    shapes = tensor_shapes(large)
    weights = {name: torch.zeros(shape) for name, shape in shapes.items() if name not in ("d2t", "t2d")}
    body = save(weights | {"d2t": VOCABULARY.d2t, "t2d": VOCABULARY.t2d})
    read = partial(read_candidate, body, large, VOCABULARY.d2t, torch.float32)
    assert any(longest_hold(read) < 1 / 16 for _ in range(30))


def test_a_weight_that_overflows_the_engines_dtype_is_refused() -> None:
    body = tensors()
    body["norm.weight"][0] = 1e6
    assert candidate(save(body)).keys()
    with pytest.raises(DrafterRefusedError, match="float16"):
        candidate(save(body), torch.float16)


def test_a_mask_that_contradicts_the_offsets_is_refused() -> None:
    with pytest.raises(DrafterRefusedError, match="two exports"):
        candidate(save(tensors() | {"t2d": ~VOCABULARY.t2d}))


def test_an_engine_that_lost_its_offsets_refuses_by_name() -> None:
    """It was started with a drafter of a reduced vocabulary that had no d2t, so that it drafts over the whole one."""
    with pytest.raises(DrafterRefusedError, match="d2t has 20 entries, the served one 40"):
        read_candidate(save(tensors()), CONFIG, torch.zeros(40, dtype=torch.int64), torch.float32)


@pytest.mark.parametrize("offsets", [False, True])
def test_a_drafter_over_the_whole_vocabulary_needs_no_offsets(offsets: bool) -> None:
    whole = replace(CONFIG, draft_vocab_size=40)
    body = tensors() | {"lm_head.weight": torch.randn(40, 16)}
    del body["d2t"], body["t2d"]
    zeros = torch.zeros(40, dtype=torch.int64)
    assert read_candidate(save(body | ({"d2t": zeros} if offsets else {})), whole, zeros, torch.float32).keys()


def refusal(directory: Path, document: dict[str, Any]) -> str:
    """What an engine that runs `CONFIG` says of such a config.json; empty if it takes it."""
    (directory / "config.json").write_text(json.dumps(document))
    try:
        check_config(directory, CONFIG, "vllm")
    except DrafterRefusedError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("num_hidden_layers", 2, "num_hidden_layers is 2 here, 1 there"),
        ("norm_before_residual", True, "norm_before_residual is True here, False there"),
        ("hidden_act", "gelu", "hidden_act 'gelu' is not supported"),
        ("rope_theta", 1e4, "one rope_theta of 1 or more"),
        ("rms_norm_eps", 1e-5, "rms_norm_eps is 1e-05 here, 1e-06 there"),
        ("target_model_type", "llama", ""),  # a label
        ("max_position_embeddings", 64, ""),  # a limit
    ],
)
def test_a_configuration_that_means_something_else_is_refused_by_name(
    tmp_path: Path, field: str, value: Any, says: str
) -> None:
    told = refusal(tmp_path, export_config(CONFIG) | {field: value})
    assert says in told
    assert bool(says) == bool(told)


def test_layers_that_the_configuration_does_not_name_are_the_engines(tmp_path: Path) -> None:
    document = export_config(CONFIG)
    del document["eagle_aux_hidden_state_layer_ids"], document["eagle_config"]
    assert refusal(tmp_path, document) == ""
    other = export_config(replace(CONFIG, aux_layers=(0, 1, 2)))
    assert refusal(tmp_path, other) == "restart the server to change aux_layers is (0, 1, 2) here, (1, 2, 3) there"


@pytest.mark.parametrize("text", ["{", "[]", "x" * (1 << 21)])
def test_a_config_that_cannot_be_read_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(DrafterRefusedError, match=r"config\.json"):
        check_config(tmp_path, CONFIG, "vllm")


def forged(header: Any, body: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + body


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\x00" * 7,
        b"\xff" * 64,
        struct.pack("<Q", 1 << 62) + b"{}",
        forged(b"[]"),
        forged(b"{}"),
        forged({"fc.weight": 3}),
        forged({"fc.weight": {"shape": "ab", "dtype": "F32"}}),
        forged({name: {"shape": list(s), "dtype": "F32"} for name, s in weight_shapes(CONFIG).items()}),
        save(tensors())[:-1],
        save(tensors()) + b"\x00",
    ],
)
def test_a_hostile_file_is_refused_and_never_raises_anything_else(body: bytes) -> None:
    with pytest.raises(DrafterRefusedError):
        candidate(body)


@settings(deadline=None)
@given(st.binary(max_size=400))
def test_no_header_raises_anything_but_a_refusal(noise: bytes) -> None:
    with pytest.raises(DrafterRefusedError):
        candidate(forged(noise))
