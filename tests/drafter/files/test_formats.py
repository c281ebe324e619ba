"""Drafter files: round trips to the bit, and drafters over whole vocabularies."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.drafter import drafter_reference
from helpers.drafter.drafter_worlds import SHAPES, World, expected, gradients, ours, world
from helpers.drafter.formats_fixtures import CONFIG, SOME, folder, retensor, rewrite, stored
from safetensors.torch import load_file
from torch import Tensor

from drafter.errors import CheckpointError
from drafter.files.checkpoint import (
    CONFIG_FILE,
    MODEL_FILE,
    build_drafter,
    config_fingerprint,
    read_drafter,
    read_stored,
    write_drafter,
    write_stored,
)
from drafter.files.formats import LAYOUTS, Layout, Verifier, export_drafter, import_drafter
from drafter.model.eagle3 import Eagle3Drafter
from drafter.model.eagle3_unroll import unroll
from drafter.unroll.plan import make_plan
from drafter.vocabulary import DraftVocabulary
from examples.reference.cached import attend, embed, fuse
from rl_hooks.agent.download import _make_safe
from rl_hooks.errors import InvalidDrafterError
from rl_hooks.format.eagle3 import parse_config


def files(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir())}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("whole", [False, True], ids=["reduced", "whole vocabulary"])
def test_a_round_trip_gives_the_same_bytes(tmp_path: Path, layout: Layout, dtype: torch.dtype, whole: bool) -> None:
    """Canonical -> layout -> canonical -> layout: both files of both layouts, bit for bit."""
    first, there, back, again = (folder(tmp_path / name) for name in ("first", "there", "back", "again"))
    write_stored(first, stored(dtype, whole=whole))
    verifier = Verifier("org/target", ("Qwen3ForCausalLM",))
    export_drafter(there, import_drafter(first).stored, layout, verifier=verifier)
    imported = import_drafter(there)
    write_stored(back, imported.stored)
    assert files(back) == files(first)
    export_drafter(again, imported.stored, layout, verifier=imported.verifier)
    assert files(again) == files(there)
    assert [note[:39] for note in imported.notes] == ["it says max_position_embeddings 512: vL"]
    assert imported.layout == ("speculators" if layout == "speculators" else "sglang")
    assert (imported.verifier == verifier) == (layout == "speculators")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_imported_drafter_is_the_same_drafter_to_the_service(tmp_path: Path, layout: Layout) -> None:
    drafter = stored()
    export_drafter(tmp_path, drafter, layout)
    imported = import_drafter(tmp_path).stored
    assert config_fingerprint(imported.config, imported.vocabulary) == config_fingerprint(CONFIG, SOME)
    assert imported.vocabulary == SOME
    assert imported.dtype == torch.bfloat16


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_export_has_no_embedding_and_names_its_layers(tmp_path: Path, layout: Layout) -> None:
    export_drafter(tmp_path, stored(), layout)
    tensors, document = load_file(tmp_path / MODEL_FILE), json.loads((tmp_path / CONFIG_FILE).read_text())
    assert not [name for name in tensors if "embed" in name or "verifier" in name]
    assert {"d2t", "t2d"} <= tensors.keys()
    assert document["eagle_aux_hidden_state_layer_ids"] == [2, 3, 5]
    assert document["norm_before_residual"] is False
    if layout != "speculators":
        assert document["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 2, 4]


def test_a_speculators_config_keeps_its_verifier_and_its_tokens_per_round(tmp_path: Path) -> None:
    there, back, flat = (folder(tmp_path / name) for name in ("there", "back", "flat"))
    verifier = Verifier("Qwen/Qwen3-8B", ("Qwen3ForCausalLM",))
    export_drafter(there, stored(), "speculators", verifier=verifier, speculative_tokens=5)
    first = import_drafter(there)
    assert (first.verifier, first.speculative_tokens) == (verifier, 5)
    export_drafter(
        back, first.stored, "speculators", verifier=first.verifier, speculative_tokens=first.speculative_tokens
    )
    assert files(back) == files(there)
    export_drafter(flat, first.stored, "sglang", verifier=first.verifier, speculative_tokens=5)
    lost = import_drafter(flat)
    assert (lost.verifier, lost.speculative_tokens) == (Verifier(), 3), "docs/reference/formats.md says so"


def test_the_default_method_says_how_many_tokens_are_drafted(tmp_path: Path) -> None:
    export_drafter(tmp_path, stored(), "speculators")
    other, greedy = ({"proposal_type": n, "speculative_tokens": k} for n, k in (("other", 7), ("greedy", 4)))
    rewrite(tmp_path, lambda d: d["speculators_config"].update(proposal_methods=[other, greedy]))
    assert import_drafter(tmp_path).speculative_tokens == 4
    rewrite(tmp_path, lambda d: d["speculators_config"].update(default_proposal_method=None))
    assert import_drafter(tmp_path).speculative_tokens == 7
    rewrite(tmp_path, lambda d: d.update(speculators_config=None))
    assert import_drafter(tmp_path).speculative_tokens == 3


def test_the_layers_own_architectures_are_the_policys(tmp_path: Path) -> None:
    export_drafter(tmp_path, stored(), "speculators")
    rewrite(tmp_path, lambda d: d["transformer_layer_config"].update(architectures=["Qwen3ForCausalLM"]))
    rewrite(tmp_path, lambda d: d.update(architectures=...))
    assert import_drafter(tmp_path).stored.config == CONFIG


def test_specforge_gets_maps_always_and_no_norm_output(tmp_path: Path) -> None:
    """There `norm_output: false` leaves out the final norm, and a missing map is taken for the first D tokens."""
    export_drafter(tmp_path, stored(whole=True), "specforge")
    tensors, document = load_file(tmp_path / MODEL_FILE), json.loads((tmp_path / CONFIG_FILE).read_text())
    assert tensors["d2t"].eq(0).all()
    assert tensors["t2d"].all()
    assert "norm_output" not in document


def test_speculators_own_classes_read_our_export(tmp_path: Path) -> None:
    eagle3 = pytest.importorskip("speculators.models.eagle3.config")
    export_drafter(tmp_path, stored(norm_before_residual=True), "speculators", verifier=Verifier("org/target", ("X",)))
    config = eagle3.Eagle3SpeculatorConfig.from_pretrained(tmp_path)
    assert config.norm_before_residual is True
    assert config.eagle_aux_hidden_state_layer_ids == [2, 3, 5]
    assert (config.draft_vocab_size, config.target_vocab_size, config.target_hidden_size) == (6, 20, 16)
    assert config.speculators_config.verifier.name_or_path == "org/target"
    layer = config.transformer_layer_config
    assert (layer.num_hidden_layers, layer.head_dim, layer.rms_norm_eps) == (1, 8, 1e-5)
    assert layer.rope_parameters["rope_theta"] == 1e6


def test_what_is_exported_to_specforge_is_not_read_as_another_function(tmp_path: Path) -> None:
    """SpecForge writes `norm_output: true` for what everyone else calls false."""
    export_drafter(tmp_path, stored(), "specforge")
    rewrite(tmp_path, lambda d: d.update(norm_output=True))
    with pytest.raises(CheckpointError, match="--from specforge"):
        import_drafter(tmp_path)
    assert import_drafter(tmp_path, layout="specforge").stored.config == CONFIG
    rewrite(tmp_path, lambda d: d.update(norm_output=False))
    with pytest.raises(CheckpointError, match="leaves out the norm before lm_head"):
        import_drafter(tmp_path, layout="specforge")


def test_a_drafter_over_the_whole_vocabulary_has_no_maps_and_comes_back(tmp_path: Path) -> None:
    torch.manual_seed(0)
    drafter = Eagle3Drafter(replace(CONFIG, draft_vocab_size=20), DraftVocabulary.full(20))
    write_drafter(tmp_path, drafter)
    assert not {"d2t", "t2d"} & load_file(tmp_path / MODEL_FILE).keys()
    again = read_drafter(tmp_path)
    for name, value in drafter.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name
    assert again.vocabulary == DraftVocabulary.full(20)


def test_maps_that_say_nothing_are_read_and_maps_that_lie_are_not(tmp_path: Path) -> None:
    write_stored(tmp_path, stored(whole=True))
    full = DraftVocabulary.full(20)
    retensor(tmp_path, lambda t: t.update(d2t=full.d2t, t2d=full.t2d))
    assert read_stored(tmp_path).vocabulary == full
    retensor(tmp_path, lambda t: t["t2d"].logical_not_())
    with pytest.raises(CheckpointError, match="two exports"):
        read_stored(tmp_path)


def test_a_reduced_drafter_without_maps_is_refused(tmp_path: Path) -> None:
    write_stored(tmp_path, stored())
    retensor(tmp_path, lambda t: (t.pop("d2t"), t.pop("t2d")))
    with pytest.raises(CheckpointError, match="tensors missing: d2t, t2d"):
        read_stored(tmp_path)


def test_the_agent_takes_a_drafter_without_d2t_only_over_the_whole_vocabulary(tmp_path: Path) -> None:
    whole, reduced = folder(tmp_path / "whole"), folder(tmp_path / "reduced")
    write_stored(whole, stored(whole=True))
    _make_safe(whole, "eagle3")
    write_stored(reduced, stored())
    _make_safe(reduced, "eagle3")
    retensor(reduced, lambda t: t.pop("d2t"))
    with pytest.raises(InvalidDrafterError, match="d2t"):
        _make_safe(reduced, "eagle3")
    (reduced / CONFIG_FILE).unlink()
    with pytest.raises(InvalidDrafterError, match=CONFIG_FILE):
        _make_safe(reduced, "eagle3")


class _NormedResidual(drafter_reference.Row):
    """The reference's layer with speculators' switch on: what is added to is the normed state."""

    def __init__(self, weights: Any, config: Any, embedding: Tensor, r: Tensor, position: int) -> None:
        super().__init__(weights, config, embedding, r, position)
        self.r = drafter_reference.rms(r, weights["midlayer.hidden_norm.weight"], config.rms_norm_eps)


@contextmanager
def normed_reference(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patch:
        patch.setattr(drafter_reference, "Row", _NormedResidual)
        yield


def normed_world(shape: str) -> World:
    w = world(SHAPES[shape])
    w.drafter.config = replace(w.drafter.config, norm_before_residual=True)
    return w


@pytest.mark.parametrize("shape", SHAPES)
def test_a_normed_residual_equals_the_float64_reference(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    w = normed_world(shape)
    with normed_reference(monkeypatch):
        want = expected(w, 3)
    got = ours(w, 3)
    assert got.kl_sums.tolist() == pytest.approx(want.kl, rel=1e-10)
    for name, gradient in gradients(w, got.loss).items():
        torch.testing.assert_close(gradient, want.gradients[name], rtol=1e-8, atol=1e-11, msg=name)
    plain = ours(world(SHAPES[shape]), 3)
    assert got.kl_sums.tolist() != pytest.approx(plain.kl_sums.tolist(), rel=1e-3), "the switch does something"


def test_a_normed_residual_decodes_as_it_trains() -> None:
    """Step 0 through the key-value cache gives the unroll's states."""
    w = normed_world("one document, full response")
    plan = make_plan(w.batch.cu_seqlens, w.batch.loss_mask, 1)
    unrolled = unroll(w.drafter, plan, w.batch.input_ids, w.batch.aux_hidden, w.embed_tokens)
    rows = torch.arange(w.batch.tokens - 1)
    embedding = embed(w.drafter, w.batch.input_ids[rows + 1], w.embed_tokens)[None]
    pre, _, _ = attend(w.drafter, embedding, fuse(w.drafter, w.batch.aux_hidden[rows])[None], rows[None])
    torch.testing.assert_close(pre[0, unrolled.rows[0]], unrolled.pre[0], rtol=1e-10, atol=1e-12)


def test_the_switch_is_stored_and_part_of_the_fingerprint(tmp_path: Path) -> None:
    on, off = stored(norm_before_residual=True), stored()
    write_stored(tmp_path, on)
    assert json.loads((tmp_path / CONFIG_FILE).read_text())["norm_before_residual"] is True
    assert build_drafter(read_stored(tmp_path)).config.norm_before_residual is True
    assert config_fingerprint(on.config, SOME) != config_fingerprint(off.config, SOME)
    document = json.loads((tmp_path / CONFIG_FILE).read_text())
    assert parse_config({k: v for k, v in document.items() if k != "norm_before_residual"}) == off.config


def test_a_shuffled_vocabulary_is_refused(tmp_path: Path) -> None:
    drafter = world(SHAPES["packed, half response"], dtype=torch.float32).drafter
    write_drafter(tmp_path, drafter)
    retensor(tmp_path, lambda t: t.update(d2t=t["d2t"].flip(0)))
    with pytest.raises(CheckpointError):
        import_drafter(tmp_path)
