"""What may be swapped into an engine, decided from bytes alone; needs no vLLM."""

from __future__ import annotations

import json
import struct
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save
from torch import Tensor, nn

from drafter.files.checkpoint import config_fingerprint, export_config, tensor_shapes
from drafter.model.eagle3 import DrafterConfig
from drafter.vocabulary import DraftVocabulary
from rl_hooks.engines.vllm.draft import _shared_modules
from rl_hooks.engines.vllm.layout import (
    DrafterRefusedError,
    DraftLayout,
    read_candidate,
    vocabulary_digest,
)

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
LAYOUT = DraftLayout.read(export_config(CONFIG), ())


def tensors() -> dict[str, Tensor]:
    shapes = tensor_shapes(CONFIG)
    weights = {name: torch.randn(shape) for name, shape in shapes.items() if name not in ("d2t", "t2d")}
    return weights | {"d2t": VOCABULARY.d2t, "t2d": VOCABULARY.t2d}


def candidate(body: bytes, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    return read_candidate(body, LAYOUT, VOCABULARY.d2t, dtype)


def test_the_layout_is_the_one_that_the_service_exports() -> None:
    shapes = tensor_shapes(CONFIG)
    assert LAYOUT.shapes() == {name: s for name, s in shapes.items() if name not in ("d2t", "t2d")}
    assert sum(LAYOUT.module_elements().values()) == sum(torch.Size(s).numel() for s in LAYOUT.shapes().values())


def test_fingerprint_and_vocabulary_digest_are_the_services() -> None:
    assert LAYOUT.fingerprint(VOCABULARY.d2t) == config_fingerprint(CONFIG, VOCABULARY)
    assert vocabulary_digest(VOCABULARY.d2t, 40) == VOCABULARY.digest


def test_a_good_file_comes_out_as_the_engines_dtype_without_its_vocabulary() -> None:
    given_tensors = tensors()
    weights = candidate(save(given_tensors), torch.bfloat16)
    assert weights.keys() == LAYOUT.shapes().keys()
    assert {w.dtype for w in weights.values()} == {torch.bfloat16}
    assert torch.equal(weights["fc.weight"], given_tensors["fc.weight"].bfloat16())


def test_a_weight_that_overflows_the_engines_dtype_is_refused() -> None:
    body = tensors()
    body["norm.weight"][0] = 1e6
    assert candidate(save(body)).keys()
    with pytest.raises(DrafterRefusedError, match="float16"):
        candidate(save(body), torch.float16)


def test_a_mask_that_contradicts_the_offsets_is_refused() -> None:
    body = tensors() | {"t2d": ~VOCABULARY.t2d}
    with pytest.raises(DrafterRefusedError, match="two exports"):
        candidate(save(body))
    del body["t2d"]  # engines do not read it, so it may be absent
    assert candidate(save(body)).keys()


@pytest.mark.parametrize("offsets", [False, True])
def test_a_drafter_over_the_whole_vocabulary_needs_no_offsets(offsets: bool) -> None:
    whole = replace(LAYOUT, draft_vocab_size=40)
    body = tensors() | {"lm_head.weight": torch.randn(40, 16)}
    del body["d2t"], body["t2d"]
    zeros = torch.zeros(40, dtype=torch.int64)
    assert read_candidate(save(body | ({"d2t": zeros} if offsets else {})), whole, zeros, torch.float32).keys()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_hidden_layers", 0),
        ("norm_before_residual", True),
        ("fc_norm", True),
        ("attention_bias", True),
        ("hidden_size", "16"),
        ("hidden_size", True),
        ("vocab_size", -1),
        ("rms_norm_eps", None),
        ("rope_parameters", {"rope_type": "yarn", "rope_theta": 1e4}),
        ("eagle_aux_hidden_state_layer_ids", ["1", "2", "3"]),
    ],
)
def test_a_configuration_that_means_something_else_is_refused(field: str, value: Any) -> None:
    with pytest.raises(DrafterRefusedError):
        DraftLayout.read(export_config(CONFIG) | {field: value}, ())


def test_layers_that_the_configuration_does_not_name_are_the_engines() -> None:
    document = export_config(CONFIG)
    del document["eagle_aux_hidden_state_layer_ids"], document["eagle_config"]
    assert DraftLayout.read(document, (2, 18, 33)).aux_layers == (2, 18, 33)
    differences = DraftLayout.read(document, (2, 18, 33)).differences(LAYOUT)
    assert len(differences) == 1
    assert differences[0].startswith("aux_layers")


def test_the_targets_family_is_a_label() -> None:
    assert LAYOUT.differences(replace(LAYOUT, model_type="llama")) == []


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
        forged({name: {"shape": list(s), "dtype": "F32"} for name, s in LAYOUT.shapes().items()}),
        save(tensors())[:-1],
        save(tensors()) + b"\x00",
    ],
)
def test_a_hostile_file_is_refused_and_never_raises_anything_else(body: bytes) -> None:
    with pytest.raises(DrafterRefusedError):
        candidate(body)


@given(st.binary(max_size=400))
def test_no_header_raises_anything_but_a_refusal(noise: bytes) -> None:
    with pytest.raises(DrafterRefusedError):
        candidate(forged(noise))


class Tower(nn.Module):
    """Stands for a model: its inner part under `model`, as vLLM nests them."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(5, 3)
        self.model.norm = nn.LayerNorm(3)
        self.lm_head = nn.Linear(3, 5, bias=False)


def test_what_is_shared_with_the_policy_is_found_by_module_and_by_parameter() -> None:
    target, draft = Tower(), Tower()
    assert _shared_modules(draft, target) == {}
    draft.model.embed_tokens = target.model.embed_tokens  # as vLLM does
    draft.lm_head.weight = target.lm_head.weight  # as SGLang does
    assert sorted(_shared_modules(draft, target)) == ["lm_head", "model.embed_tokens"]
