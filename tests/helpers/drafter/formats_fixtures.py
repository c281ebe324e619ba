"""What tests of drafter files share."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from drafter.files.checkpoint import (
    CONFIG_FILE,
    MODEL_FILE,
    StoredDrafter,
)
from drafter.model.eagle3 import DrafterConfig
from drafter.vocabulary import DraftVocabulary
from rl_hooks.format.eagle3 import tensor_shapes

CONFIG = DrafterConfig(
    hidden_size=16,
    target_hidden_size=16,
    intermediate_size=24,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    vocab_size=20,
    draft_vocab_size=6,
    aux_layers=(2, 3, 5),
    rope_theta=1e6,
    rms_norm_eps=1e-5,
    max_position_embeddings=512,
    model_type="qwen3",
)
#: The smallest one that engines load.
ENGINES_CONFIG = DrafterConfig(
    hidden_size=8,
    target_hidden_size=8,
    intermediate_size=12,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=4,
    vocab_size=16,
    draft_vocab_size=8,
    aux_layers=(1, 2, 3),
    rope_theta=1e4,
    model_type="qwen3",
)
ENGINES_VOCABULARY = DraftVocabulary(torch.arange(0, 16, 2), 16)


SOME = DraftVocabulary(torch.tensor([0, 2, 3, 7, 11, 19]), 20)


def stored(
    dtype: torch.dtype = torch.bfloat16, *, whole: bool = False, norm_before_residual: bool = False
) -> StoredDrafter:
    vocabulary = DraftVocabulary.full(20) if whole else SOME
    config = replace(CONFIG, draft_vocab_size=len(vocabulary), norm_before_residual=norm_before_residual)
    g = torch.Generator().manual_seed(3)
    shapes = {name: shape for name, shape in tensor_shapes(config).items() if name not in ("d2t", "t2d")}
    return StoredDrafter(
        config, vocabulary, {name: torch.randn(shape, generator=g).to(dtype) for name, shape in shapes.items()}
    )


def folder(path: Path) -> Path:
    path.mkdir()
    return path


def rewrite(directory: Path, change: Callable[[dict[str, Any]], Any]) -> Path:
    """Change config.json in place; the value `...` stands for absent."""
    path = directory / CONFIG_FILE
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps({name: value for name, value in document.items() if value is not ...}))
    return directory


def retensor(directory: Path, change: Callable[[dict[str, Tensor]], Any]) -> Path:
    tensors = load_file(directory / MODEL_FILE)
    change(tensors)
    save_file(tensors, directory / "new")
    (directory / "new").replace(directory / MODEL_FILE)  # who mapped the old file keeps it
    return directory


def first(state: dict[str, Any], change: Callable[[Tensor], Any]) -> None:
    state["norm.weight"] = change(state["norm.weight"])
