"""Rotary positions stretched as in Llama 3: transformers' frequencies to the bit, and the whole drafter with them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.drafter.drafter_worlds import SHAPES, World, expected, gradients, ours, world
from helpers.drafter.formats_fixtures import CONFIG, SOME, folder, stored
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from drafter.files.checkpoint import StoredDrafter, config_fingerprint, export_config, read_stored, write_stored
from drafter.files.formats import LAYOUTS, Layout, export_drafter, import_drafter
from drafter.model import pointwise
from drafter.model.eagle3_unroll import unroll
from drafter.model.pointwise import rotary, stretched
from drafter.unroll.plan import make_plan
from examples.reference.cached import attend, embed, fuse
from rl_hooks.format.drafter import differences
from rl_hooks.format.eagle3 import Llama3Rope

#: Llama 3.1's and 3.3's, Llama 3.2's, and one that is small enough for short texts.
PUBLISHED = Llama3Rope(8.0, 1.0, 4.0, 8192)
STRETCHES = (PUBLISHED, Llama3Rope(32.0, 1.0, 4.0, 8192), Llama3Rope(4.0, 0.5, 3.0, 64))
#: Of the worlds' three pairs one is of each band.
SMALL = Llama3Rope(8.0, 1.0, 4.0, 256)


def frequencies(scaling: Llama3Rope, head_dim: int, theta: float) -> torch.Tensor:
    """Ours, in float32."""
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    return stretched(1.0 / theta**exponent, scaling)


def transformers_frequencies(scaling: Llama3Rope, head_dim: int, theta: float) -> torch.Tensor:
    config = replace(CONFIG, head_dim=head_dim, rope_theta=theta, rope_scaling=scaling, max_position_embeddings=131072)
    found: torch.Tensor
    found, scale = ROPE_INIT_FUNCTIONS["llama3"](LlamaConfig(**export_config(config)), torch.device("cpu"))
    assert scale == 1.0
    return found


@pytest.mark.parametrize("theta", [1e4, 5e5])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("scaling", STRETCHES)
def test_frequencies_are_transformers_to_the_bit(scaling: Llama3Rope, head_dim: int, theta: float) -> None:
    want = transformers_frequencies(scaling, head_dim, theta)
    assert torch.equal(frequencies(scaling, head_dim, theta), want)
    for name in ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"):
        changed: dict[str, Any] = {name: 0.25 if name == "low_freq_factor" else 2 * getattr(scaling, name)}
        other = replace(scaling, **changed)
        assert not torch.equal(frequencies(other, head_dim, theta), want), name


def test_cosines_follow_the_frequencies_and_plain_ones_are_untouched() -> None:
    positions = torch.arange(300)
    cos, sin = rotary(positions, 64, 5e5, torch.float32, SMALL)
    angle = positions.float()[:, None] * transformers_frequencies(SMALL, 64, 5e5)
    assert torch.equal(cos[:, 0, :32], angle.cos())
    assert torch.equal(sin[:, 0, 32:], angle.sin())
    plain, _ = rotary(positions, 64, 5e5, torch.float32)
    exponent = torch.arange(0, 64, 2, dtype=torch.float32) / 64
    assert torch.equal(plain[:, 0, :32], (positions.float()[:, None] * 5e5**-exponent).cos())


def scaled_world(shape: str) -> World:
    w = world(SHAPES[shape])
    w.drafter.config = replace(w.drafter.config, rope_scaling=SMALL)
    return w


@pytest.mark.parametrize("shape", SHAPES)
def test_losses_and_gradients_equal_the_float64_reference(shape: str) -> None:
    w = scaled_world(shape)
    want, got = expected(w, 3), ours(w, 3)
    assert got.kl_sums.tolist() == pytest.approx(want.kl, rel=1e-10)
    for name, gradient in gradients(w, got.loss).items():
        torch.testing.assert_close(gradient, want.gradients[name], rtol=1e-8, atol=1e-11, msg=name)


def test_frequencies_that_ignore_the_middle_band_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    w = scaled_world("packed, half response")
    want = expected(w, 3)

    def hard(plain: torch.Tensor, scaling: Llama3Rope) -> torch.Tensor:
        waves = 2 * torch.pi / plain
        return torch.where(waves > scaling.original_max_position_embeddings, plain / scaling.factor, plain)

    monkeypatch.setattr(pointwise, "stretched", hard)
    assert ours(w, 3).kl_sums.tolist() != pytest.approx(want.kl, rel=1e-6)


def test_it_decodes_as_it_trains() -> None:
    """Step 0 through the key-value cache gives the unroll's states."""
    w = scaled_world("one document, full response")
    plan = make_plan(w.batch.cu_seqlens, w.batch.loss_mask, 1)
    unrolled = unroll(w.drafter, plan, w.batch.input_ids, w.batch.aux_hidden, w.embed_tokens)
    rows = torch.arange(w.batch.tokens - 1)
    embedding = embed(w.drafter, w.batch.input_ids[rows + 1], w.embed_tokens)[None]
    pre, _, _ = attend(w.drafter, embedding, fuse(w.drafter, w.batch.aux_hidden[rows])[None], rows[None])
    torch.testing.assert_close(pre[0, unrolled.rows[0]], unrolled.pre[0], rtol=1e-10, atol=1e-12)


def scaled(scaling: Llama3Rope | None = PUBLISHED) -> StoredDrafter:
    return replace(stored(), config=replace(CONFIG, rope_scaling=scaling))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_brings_it_back_and_transformers_reads_it_there(tmp_path: Path, layout: Layout) -> None:
    export_drafter(tmp_path, scaled(), layout)
    assert import_drafter(tmp_path).stored.config == scaled().config
    document: dict[str, Any] = read_json(tmp_path)
    layer = LlamaConfig(**document.get("transformer_layer_config", document))
    found, _ = ROPE_INIT_FUNCTIONS["llama3"](layer, torch.device("cpu"))
    assert torch.equal(found, frequencies(PUBLISHED, CONFIG.head_dim, CONFIG.rope_theta))


def read_json(directory: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((directory / "config.json").read_text())
    return found


def test_it_is_part_of_the_identity_and_a_drafter_without_it_keeps_its_own(tmp_path: Path) -> None:
    assert "rope_scaling" not in CONFIG.identity()
    write_stored(folder(tmp_path / "scaled"), scaled())
    assert read_stored(tmp_path / "scaled").config.rope_scaling == PUBLISHED
    one, two = scaled().config, scaled(replace(PUBLISHED, factor=32.0)).config
    assert len({config_fingerprint(config, SOME) for config in (CONFIG, one, two)}) == 3
    assert differences(one, two) == ["rope_scaling.factor is 8.0 here, 32.0 there"]
    assert "rope_scaling.factor is None here, 8.0 there" in differences(CONFIG, one)
