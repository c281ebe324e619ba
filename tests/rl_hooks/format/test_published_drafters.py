"""Drafters as speculators publishes them, taken as they are: converted, registered by hook and engine, published."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.drafter.drafter_corpus import TARGET
from helpers.engine.published_drafters import PUBLISHED, small_config, write_published
from helpers.service.command_fixtures import worked
from safetensors.torch import load_file, save_file
from transformers import Qwen3Config, Qwen3ForCausalLM

from drafter.files.checkpoint import read_drafter, read_stored
from rl_hooks import wire
from rl_hooks.engines.candidate import DrafterRefusedError, read_candidate
from rl_hooks.errors import UnsupportedModelError
from rl_hooks.format.eagle3 import CheckpointError, Llama3Rope, parse_config, with_layers
from rl_hooks.format.layouts import canonical_config
from rl_hooks.sending.registration import RunRegistration
from service.settings import Settings
from service.storage.layout import Layout
from service.storage.registry import Registry
from service.storage.runs import commit_run, read_run_header
from service.storage.spool import Spool
from service.worker.lineage import Lineage
from service.worker.target import Target

LAYERS = (2, 4, 5)
FIELDS: dict[str, dict[str, Any]] = {
    "Qwen3-8B": {"norm_before_residual": True, "rope_scaling": Llama3Rope(8.0, 1.0, 4.0, 8192), "rope_theta": 1e4},
    "gpt-oss-20b": {"norm_before_residual": True, "norm_before_fc": True, "rope_scaling": None},
    "Llama-3.3-70B": {"norm_before_residual": True, "rope_scaling": Llama3Rope(8.0, 1.0, 4.0, 8192), "rope_theta": 5e5},
}


def policy() -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    return Qwen3ForCausalLM(Qwen3Config(**TARGET | {"head_dim": 4, "vocab_size": 120}))


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_command_line_converts_it_with_every_bit(name: str, tmp_path: Path) -> None:
    embedding = policy().get_input_embeddings().weight.detach()
    source = write_published(tmp_path / "published", name, embedding, seed=1)
    layers = [] if name == "Llama-3.3-70B" else ["--aux-layers", "2,4,5"]
    worked("convert", source, tmp_path / "ours", "--to", "speculators", *layers)
    facts = json.loads(worked("inspect", tmp_path / "ours", "--json"))
    assert facts["norm_before_fc"] is FIELDS[name].get("norm_before_fc", False)
    assert (facts["rope_scaling"] is None) == (FIELDS[name]["rope_scaling"] is None)
    ours, theirs = load_file(tmp_path / "ours" / "model.safetensors"), load_file(source / "model.safetensors")
    del theirs["embed_tokens.weight"]
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[n], theirs[n]) for n in ours)


def registered(directory: Path, layout: Layout) -> None:
    """PUT /runs as a hook or an engine sends it that starts with this drafter."""
    registration = RunRegistration(policy(), aux_layers=LAYERS, initial_drafter=directory)
    body = b"".join(registration.encode())
    record = read_run_header("run", wire.parse_header(body))
    with Spool(layout).upload() as upload:
        upload.write(body)
        commit_run(layout, record, upload)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_run_that_begins_with_it_publishes_it_in_our_layout(name: str, tmp_path: Path) -> None:
    embedding = policy().get_input_embeddings().weight.detach()
    source, layout = write_published(tmp_path / "published", name, embedding, seed=1), Layout(tmp_path / "state")
    registered(source, layout)
    Lineage(Settings(state_dir=layout.root), layout, "run", Target.open(layout, "run")).begin()
    manifest = Registry(layout).latest("run")
    assert manifest is not None
    published = read_stored(layout.drafter("run", manifest.version))
    for field, value in FIELDS[name].items():
        assert getattr(published.config, field) == value
    assert published.config.aux_layers == LAYERS
    theirs = load_file(source / "model.safetensors")
    for field, weight in published.weights.items():
        assert torch.equal(weight, theirs[field.replace("midlayer.", "layers.0.")].to(weight.dtype)), field
    assert (
        published.weights.keys()
        == dict(read_drafter(layout.drafter("run", manifest.version)).named_parameters()).keys()
    )


def test_a_residual_that_its_readers_take_differently_is_refused_by_name(tmp_path: Path) -> None:
    embedding = policy().get_input_embeddings().weight.detach()
    source = write_published(tmp_path / "published", "Qwen3-8B", embedding, seed=1)
    document = json.loads((source / "config.json").read_text())
    del document["norm_before_residual"]
    (source / "config.json").write_text(json.dumps(document))
    with pytest.raises(UnsupportedModelError, match=r"vLLM takes that for true.* write it into config\.json"):
        RunRegistration(policy(), aux_layers=LAYERS, initial_drafter=source)


@pytest.mark.parametrize("name", PUBLISHED)
def test_an_engine_keeps_the_drafter_that_it_started_with(name: str, tmp_path: Path) -> None:
    """To load it again if the first swap fails. What is published later must be in our layout."""
    embedding = policy().get_input_embeddings().weight.detach()
    source = write_published(tmp_path / "published", name, embedding, seed=1)
    body = (source / "model.safetensors").read_bytes()
    running = parse_config(with_layers(canonical_config(json.loads((source / "config.json").read_text())), LAYERS))
    theirs = load_file(source / "model.safetensors")
    kept = read_candidate(body, running, theirs["d2t"], torch.float32, published=True)
    assert all(torch.equal(kept[n], theirs[n.replace("midlayer.", "layers.0.")].float()) for n in kept)
    assert len(kept) == len(theirs) - 3  # the embedding and both maps
    with pytest.raises(DrafterRefusedError, match=r"embed_tokens\.weight must not be in a drafter's file"):
        read_candidate(body, running, theirs["d2t"], torch.float32)


@pytest.mark.parametrize("change", [{"embed_requires_grad": True}, {"fc_norm": True}, {"norm_output": True}])
def test_what_is_another_drafter_is_refused_there_too(change: dict[str, Any]) -> None:
    document = {**small_config("gpt-oss-20b", 16, 40, 20), **change}
    with pytest.raises(CheckpointError, match=f"{next(iter(change))} must be false"):
        parse_config(with_layers(canonical_config(document), LAYERS))


def test_one_tensor_under_two_names_is_refused_wherever_it_is_read(tmp_path: Path) -> None:
    """Which one would be taken? vLLM loads both, one over the other."""
    embedding = policy().get_input_embeddings().weight.detach()
    source = write_published(tmp_path / "published", "Qwen3-8B", embedding, seed=1)
    theirs = load_file(source / "model.safetensors")
    theirs["midlayer.mlp.up_proj.weight"] = torch.zeros_like(theirs["layers.0.mlp.up_proj.weight"])
    save_file(theirs, source / "model.safetensors")
    running = parse_config(with_layers(canonical_config(json.loads((source / "config.json").read_text())), LAYERS))
    with pytest.raises(DrafterRefusedError, match=r"model\.safetensors holds both midlayer.* and layers"):
        read_candidate(
            (source / "model.safetensors").read_bytes(), running, theirs["d2t"], torch.float32, published=True
        )
    with pytest.raises(UnsupportedModelError, match=r"midlayer\.mlp\.up_proj\.weight twice"):
        RunRegistration(policy(), aux_layers=LAYERS, initial_drafter=source)


@pytest.mark.parametrize("place", ["rope_parameters", "rope_scaling"])
def test_a_rotary_base_that_is_named_in_either_place_is_not_assumed(place: str) -> None:
    document = small_config("Llama-3.3-70B", 16, 40, 20)
    layer = document["transformer_layer_config"]
    rope = {name: value for name, value in layer["rope_parameters"].items() if name != "rope_theta"}
    layer.pop("rope_theta", None)
    layer |= {"rope_parameters": rope, "rope_scaling": rope} | {place: {**rope, "rope_theta": 5e5}}
    assert parse_config(canonical_config(document)).rope_theta == 5e5
