"""A drafter survives the disk bit for bit, and everything that engines would load silently is refused aloud."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.drafter.formats_fixtures import CONFIG
from safetensors.torch import load_file, save_file
from torch import Tensor

from drafter.errors import CheckpointError
from drafter.files.checkpoint import (
    CONFIG_FILE,
    MODEL_FILE,
    config_fingerprint,
    export_config,
    read_drafter,
    write_drafter,
)
from drafter.model.eagle3 import Eagle3Drafter
from drafter.vocabulary import DraftVocabulary
from rl_hooks.format.eagle3 import parse_config, tensor_shapes

EMBEDDING = torch.randn(20, 16, generator=torch.Generator().manual_seed(0))


def make_drafter(seed: int = 0) -> Eagle3Drafter:
    torch.manual_seed(seed)
    drafter = Eagle3Drafter(CONFIG, DraftVocabulary(torch.tensor([0, 2, 3, 7, 11, 19]), 20))
    with torch.no_grad():
        drafter.norm.weight.normal_()
    return drafter


@pytest.fixture
def written(tmp_path: Path) -> Path:
    write_drafter(tmp_path, make_drafter())
    return tmp_path


def change_tensors(directory: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    tensors = load_file(directory / MODEL_FILE)
    change(tensors)
    save_file(tensors, directory / MODEL_FILE)


def change_config(directory: Path, **changes: Any) -> None:
    document = json.loads((directory / CONFIG_FILE).read_text())
    document.update(changes)
    document = {name: value for name, value in document.items() if value != "absent"}
    (directory / CONFIG_FILE).write_text(json.dumps(document))


def test_a_drafter_comes_back_bit_for_bit(tmp_path: Path) -> None:
    drafter = make_drafter()
    write_drafter(tmp_path, drafter)
    again = read_drafter(tmp_path)
    assert again.config == drafter.config
    assert again.vocabulary == drafter.vocabulary
    for name, value in drafter.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name
    pre = torch.randn(3, 16)
    assert torch.equal(again.logits(pre), drafter.logits(pre))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_storage_rounds_once_and_is_then_stable(tmp_path: Path, dtype: torch.dtype) -> None:
    drafter = make_drafter()
    write_drafter(tmp_path, drafter, dtype=dtype)
    once = read_drafter(tmp_path)
    assert once.fc.weight.dtype == torch.float32
    assert torch.equal(once.fc.weight, drafter.fc.weight.to(dtype).float())
    write_drafter(tmp_path, once, dtype=dtype)
    written = contents(tmp_path)
    write_drafter(tmp_path, drafter, dtype=dtype)
    assert contents(tmp_path) == written


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_equal_drafters_give_equal_files(tmp_path: Path) -> None:
    written = []
    for seed in (0, 0, 1):
        write_drafter(tmp_path, make_drafter(seed=seed))
        written.append(contents(tmp_path))
    assert written[0].keys() == {MODEL_FILE, CONFIG_FILE}
    assert written[0] == written[1]
    assert written[0][MODEL_FILE] != written[2][MODEL_FILE]


def test_the_file_holds_the_published_names_and_never_the_embedding(written: Path) -> None:
    tensors = load_file(written / MODEL_FILE)
    assert {name: tuple(t.shape) for name, t in tensors.items()} == tensor_shapes(CONFIG)
    assert not any("embed" in name for name in tensors)
    assert tensors["d2t"].tolist() == [0, 1, 1, 4, 7, 14]  # offsets: target id minus draft id
    assert tensors["t2d"].nonzero().flatten().tolist() == [0, 2, 3, 7, 11, 19]


def test_the_config_says_what_both_engines_read(written: Path) -> None:
    document = json.loads((written / CONFIG_FILE).read_text())
    assert document["architectures"] == ["LlamaForCausalLMEagle3"]
    assert document["model_type"] == "llama"
    assert document["num_hidden_layers"] == 1
    assert document["norm_before_residual"] is document["tie_word_embeddings"] is document["attention_bias"] is False
    assert document["rope_theta"] == document["rope_parameters"]["rope_theta"] == 1e6
    assert document["eagle_aux_hidden_state_layer_ids"] == [2, 3, 5]
    assert document["eagle_config"] == {
        "use_aux_hidden_state": True,
        "eagle_aux_hidden_state_layer_ids": [1, 2, 4],
    }
    assert document["draft_vocab_size"] == 6
    assert parse_config(document) == CONFIG
    assert parse_config(export_config(CONFIG)) == CONFIG


def test_reading_leaves_the_random_numbers_alone(written: Path) -> None:
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    read_drafter(written)
    assert torch.equal(torch.rand(3), expected)


def put(name: str, value: Tensor) -> Callable[[dict[str, Tensor]], Any]:
    return lambda tensors: tensors.update({name: value})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("lm_head.weight"), "missing: lm_head.weight"),
        (lambda t: t.pop("d2t"), "missing: d2t"),
        (lambda t: t.update({"layers.0.q_norm.weight": torch.ones(8)}), "not part of the layout: layers.0.q_norm"),
        (put("embed_tokens.weight", EMBEDDING), "overwrite the policy's embedding"),
        (put("model.embed_tokens.weight", EMBEDDING), "overwrite the policy's embedding"),
        (put("fc.weight", torch.zeros(16, 32)), r"fc.weight must be \(16, 48\)"),
        (put("lm_head.weight", torch.full((6, 16), math.nan)), "NaN or infinity"),
        (put("norm.weight", torch.full((16,), math.inf)), "NaN or infinity"),
        (put("norm.weight", torch.ones(16, dtype=torch.float64)), "norm.weight must be F32 or BF16 or F16, got F64"),
        (put("d2t", torch.zeros(6, dtype=torch.int32)), "d2t must be I64"),
        (put("d2t", torch.tensor([0, 2, 3, 7, 11, 19])), "does not hold offsets"),
        (put("t2d", torch.zeros(20, dtype=torch.bool)), "d2t and t2d disagree on 6 tokens, first on 0"),
        (put("d2t", torch.zeros(6, dtype=torch.int64)), "disagree"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(written: Path, change: Any, message: str) -> None:
    change_tensors(written, change)
    with pytest.raises(CheckpointError, match=message):
        read_drafter(written)


def test_weights_of_several_dtypes_are_read_as_one(written: Path) -> None:
    """As the worker and every engine read them."""
    change_tensors(written, put("norm.weight", torch.ones(16, dtype=torch.bfloat16)))
    read = read_drafter(written)
    assert {parameter.dtype for parameter in read.parameters()} == {torch.float32}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 0}, "num_hidden_layers must be a positive integer"),
        ({"num_hidden_layers": 65}, "num_hidden_layers must be at most 64"),
        ({"vocab_size": 10**18}, "vocab_size must be a positive integer up to 16777216"),
        ({"norm_before_residual": "yes"}, "norm_before_residual must be true or false"),
        ({"norm_output": True}, "norm_output must be false"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings"),
        ({"attention_bias": True}, "attention_bias"),
        ({"draft_vocab_size": "absent"}, "draft_vocab_size must be a positive integer"),
        ({"draft_vocab_size": 7}, r"must be \(7,\)|must be \(7, 16\)"),
        ({"hidden_size": True}, "hidden_size must be a positive integer"),
        ({"num_key_value_heads": 3}, "multiple"),
        ({"target_hidden_size": 32}, "hidden_size must be 32"),
        ({"rms_norm_eps": "absent"}, "rms_norm_eps"),
        ({"rope_theta": 1e4}, "rope_theta"),
        (
            {"rope_scaling": {"rope_type": "default", "rope_theta": 1e4}},
            "one rope_theta of 1 or more",
        ),  # engines take it
        ({"rope_theta": "absent", "rope_parameters": "absent"}, "rope_theta"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6}}, "scaled rotary positions"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2, 4]}, "different layers"),
        ({"eagle_aux_hidden_state_layer_ids": "absent"}, "is missing"),
        ({"eagle_aux_hidden_state_layer_ids": "2,3,5"}, "list of layer numbers"),
        ({"eagle_aux_hidden_state_layer_ids": [5, 3, 2], "eagle_config": "absent"}, "ascending"),
        ({"eagle_aux_hidden_state_layer_ids": [-1, 2, 4], "eagle_config": None}, "layer numbers from 0"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state in it true"),
        ({"eagle_config": [1]}, "eagle_config must be an object"),
        ({"layer_types": 5}, "layer_types 5"),
        ({"layer_types": [["full_attention"]]}, "layer_types"),
        ({"rope_scaling": "linear"}, "rope_scaling must be an object"),
        ({"rope_theta": 10**400}, "one rope_theta of 1 or more"),
        ({"rope_theta": "x"}, "one rope_theta of 1 or more"),
        ({"architectures": ["PEagleDraftModel"]}, "'PEagleDraftModel'.* not those of an EAGLE-3 drafter"),
        ({"architectures": ["EagleLlamaForCausalLM"]}, "not those of an EAGLE-3 drafter"),
        ({"architectures": ["LlamaForCausalLMEagle"]}, "not those of an EAGLE-3 drafter"),
        ({"architectures": ["MedusaModel"]}, "not those of an EAGLE-3 drafter"),
        ({"architectures": "LlamaForCausalLMEagle3"}, "not those of an EAGLE-3 drafter"),
        ({"sliding_window": 64}, "sliding_window 64"),
        ({"sliding_window": 64, "use_sliding_window": None}, "sliding_window 64"),
    ],
)
def test_configs_that_do_not_fit_are_refused(written: Path, changes: dict[str, Any], message: str) -> None:
    change_config(written, **changes)
    with pytest.raises(CheckpointError, match=message):
        read_drafter(written)


@pytest.mark.parametrize(
    "changes",
    [
        {"use_sliding_window": True, "sliding_window": 64},
        {"layer_types": ["sliding_attention"]},
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        {"partial_rotary_factor": 0.5},
        {"hidden_act": "gelu"},
        {"mlp_bias": True},
    ],
)
def test_configs_of_another_function_are_refused_by_name(written: Path, changes: dict[str, Any]) -> None:
    document = json.loads((written / "config.json").read_text())
    assert parse_config(document | {"layer_types": ["full_attention"], "use_sliding_window": False}) == CONFIG
    with pytest.raises(CheckpointError, match=next(iter(changes)) if "rope_scaling" not in changes else "linear"):
        parse_config(document | changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"sliding_window": None},
        {"sliding_window": 4096, "use_sliding_window": False, "max_window_layers": 28},  # Qwen's
        {"architectures": None},
        {"architectures": ["LlamaForCausalLM"]},  # SafeAILab's
        {"architectures": ["Eagle3LlamaForCausalLM"]},
        {"eagle_config": {}},
        {"eagle_config": None},
    ],
)
def test_fields_that_say_nothing_against_it_are_read(written: Path, changes: dict[str, Any]) -> None:
    change_config(written, **changes)
    assert read_drafter(written).config == CONFIG


def test_the_embeddings_output_is_what_enters_layer_0() -> None:
    document = export_config(replace(CONFIG, aux_layers=(0, 3, 5)))
    assert document["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [-1, 2, 4]
    assert parse_config(document).aux_layers == (0, 3, 5)


def test_a_config_with_only_one_rope_field_or_one_layer_field_will_do(written: Path) -> None:
    change_config(written, rope_parameters="absent", eagle_config="absent", target_hidden_size="absent")
    assert read_drafter(written).config == CONFIG
    change_config(written, rope_theta="absent", rope_parameters={"rope_theta": 1e6})
    assert read_drafter(written).config == CONFIG


def test_torn_or_absent_files_are_refused(written: Path) -> None:
    whole = (written / MODEL_FILE).read_bytes()
    for size in (0, 4, 100, len(whole) - 1):
        (written / MODEL_FILE).write_bytes(whole[:size])
        with pytest.raises(CheckpointError, match="cannot be read"):
            read_drafter(written)
    (written / MODEL_FILE).unlink()
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_drafter(written)
    for text in ("{", "[]", "[" * 100_000, "\x00" * (2 << 20)):
        (written / CONFIG_FILE).write_text(text)
        with pytest.raises(CheckpointError, match=r"JSON|at most"):
            read_drafter(written)
    (written / CONFIG_FILE).unlink()
    with pytest.raises(CheckpointError, match="a drafter needs"):
        read_drafter(written)


def test_a_drafter_that_is_not_finite_is_not_written(tmp_path: Path) -> None:
    drafter = make_drafter()
    with torch.no_grad():
        drafter.fc.weight[0, 0] = 1e6
    write_drafter(tmp_path, drafter)
    with pytest.raises(CheckpointError, match="not finite as"):
        write_drafter(tmp_path, drafter, dtype=torch.float16)
    with pytest.raises(CheckpointError, match="stored as"):
        write_drafter(tmp_path, drafter, dtype=torch.float64)


def test_the_fingerprint_covers_what_an_engine_cannot_swap() -> None:
    vocabulary = DraftVocabulary(torch.arange(6), 20)
    base = config_fingerprint(CONFIG, vocabulary)
    assert base == config_fingerprint(replace(CONFIG), DraftVocabulary(torch.arange(6), 20))
    assert base == config_fingerprint(replace(CONFIG, max_position_embeddings=64), vocabulary)
    changed = [
        replace(CONFIG, hidden_size=32, target_hidden_size=32),
        replace(CONFIG, intermediate_size=32),
        replace(CONFIG, num_attention_heads=2),
        replace(CONFIG, num_key_value_heads=4),
        replace(CONFIG, head_dim=16),
        replace(CONFIG, vocab_size=24),
        replace(CONFIG, draft_vocab_size=7),
        replace(CONFIG, aux_layers=(1, 3, 5)),
        replace(CONFIG, rope_theta=1e4),
        replace(CONFIG, rms_norm_eps=1e-6),
    ]
    prints = {config_fingerprint(config, vocabulary) for config in changed}
    prints.add(config_fingerprint(CONFIG, DraftVocabulary(torch.arange(1, 7), 20)))
    assert len(prints) == len(changed) + 1
    assert base not in prints
