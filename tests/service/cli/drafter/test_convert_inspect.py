"""convert and inspect on real files."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from helpers.forked import ROOT, run_fork
from helpers.service.command_fixtures import ENTERING, LATENT, refused, worked
from helpers.worker.worker_fixtures import CONFIG, DRAFT, LAYERS, World
from safetensors.torch import load_file, save_file

from drafter.files.checkpoint import (
    CONFIG_FILE,
    MODEL_FILE,
    config_fingerprint,
    read_drafter,
)
from drafter.files.mtp import write_mtp
from drafter.mtp.module import MtpConfig, MtpDrafter


@pytest.mark.parametrize("layout", ["sglang", "specforge", "speculators"])
def test_convert_there_and_back_gives_the_same_files(tmp_path: Path, drafter_dir: Path, layout: str) -> None:
    there, back = tmp_path / "there", tmp_path / "deep" / "back"
    out = worked("convert", drafter_dir, there, "--to", layout)
    assert str(there / MODEL_FILE) in out
    assert "sha256" in out
    worked("convert", there, back, "--to", "sglang")
    for name in (MODEL_FILE, CONFIG_FILE):
        assert (back / name).read_bytes() == (drafter_dir / name).read_bytes()


def test_convert_names_the_verifier_and_keeps_it_and_the_tokens_per_round(tmp_path: Path, drafter_dir: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    worked("convert", drafter_dir, first, "--to", "speculators", "--verifier", "org/target")
    document = json.loads((first / CONFIG_FILE).read_text())
    assert document["speculators_config"]["verifier"]["name_or_path"] == "org/target"
    document["speculators_config"]["proposal_methods"][0]["speculative_tokens"] = 5
    (first / CONFIG_FILE).write_text(json.dumps(document))
    worked("convert", first, second, "--to", "speculators")
    assert json.loads((second / CONFIG_FILE).read_text()) == document


def test_convert_writes_over_nothing_and_leaves_nothing_behind(tmp_path: Path, drafter_dir: Path) -> None:
    assert "holds something already" in refused("convert", drafter_dir, tmp_path, "--to", "sglang")
    assert "(vLLM reads the first two)" in refused("convert", drafter_dir, tmp_path / "new", "--to", "gguf")
    normed = tmp_path / "normed"
    worked("convert", drafter_dir, normed, "--to", "speculators")
    document = json.loads((normed / CONFIG_FILE).read_text()) | {"norm_before_residual": True}
    (normed / CONFIG_FILE).write_text(json.dumps(document))
    assert "norm_before_residual is true" in refused("convert", normed, tmp_path / "new", "--to", "sglang")
    assert not (tmp_path / "new").exists()
    assert "SGLang" in worked("convert", normed, tmp_path / "new", "--to", "speculators")


def test_convert_says_what_the_config_leaves_open(tmp_path: Path, drafter_dir: Path) -> None:
    document = json.loads((drafter_dir / CONFIG_FILE).read_text())
    del document["eagle_aux_hidden_state_layer_ids"], document["eagle_config"]
    (drafter_dir / CONFIG_FILE).write_text(json.dumps(document))
    assert "--aux-layers" in refused("convert", drafter_dir, tmp_path / "new", "--to", "sglang")
    assert "must be numbers" in refused("convert", drafter_dir, tmp_path / "x", "--to", "sglang", "--aux-layers", "a,b")
    layers = ",".join(map(str, LAYERS))
    worked("convert", drafter_dir, tmp_path / "new", "--to", "sglang", "--aux-layers", layers)
    assert json.loads((tmp_path / "new" / CONFIG_FILE).read_text())["eagle_aux_hidden_state_layer_ids"] == ENTERING


def test_inspect_gives_the_identity_that_the_service_gives(drafter_dir: Path, world: World) -> None:
    facts = json.loads(worked("inspect", drafter_dir, "--json"))
    drafter = read_drafter(drafter_dir)
    assert facts["config_fingerprint"] == config_fingerprint(drafter.config, drafter.vocabulary)
    assert facts["d2t_sha256"] == drafter.vocabulary.digest
    assert facts["aux_layers_entering"] == ENTERING
    assert facts["aux_layers_outputs"] == [layer - 1 for layer in LAYERS]
    assert facts["dtype"] == "bfloat16"
    assert facts["parameters"] == sum(p.numel() for p in drafter.parameters())
    assert facts["notes"] == []
    text = worked("inspect", drafter_dir)
    assert facts["config_fingerprint"] in text
    assert f"{DRAFT} of" in text


def test_inspect_refuses_odd_fields_in_one_line(drafter_dir: Path) -> None:
    document = json.loads((drafter_dir / CONFIG_FILE).read_text())
    (drafter_dir / CONFIG_FILE).write_text(json.dumps(document | {"layer_types": 5}))
    assert "layer_types 5" in refused("inspect", drafter_dir)


def test_inspect_refuses_what_engines_would_load_silently(drafter_dir: Path) -> None:
    tensors = load_file(drafter_dir / MODEL_FILE)
    del tensors["lm_head.weight"]
    save_file(tensors, drafter_dir / MODEL_FILE)
    assert "lm_head.weight" in refused("inspect", drafter_dir)


def test_an_error_ends_the_command_with_one_line(tmp_path: Path) -> None:
    done = run_fork("worker", "service.cli", "inspect", str(tmp_path), directory=ROOT, environment=os.environ)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("draftalign: ")
    assert "has no model.safetensors" in done.stderr


def test_an_mtp_module_is_taken_out_of_a_policys_checkpoint_and_inspected(tmp_path: Path) -> None:
    world = World()
    torch.manual_seed(0)
    module = MtpDrafter(MtpConfig.from_target(CONFIG | LATENT))
    policy = tmp_path / "policy"
    policy.mkdir()
    write_mtp(policy, module)
    stored = load_file(policy / MODEL_FILE)
    layers = {"model.layers.0.input_layernorm.weight": torch.ones(3), "model.embed_tokens.weight": world.embed}
    save_file(stored | layers, policy / MODEL_FILE)
    worked("convert", policy, tmp_path / "mtp", "--to", "mtp")
    taken = load_file(tmp_path / "mtp" / MODEL_FILE)
    assert taken.keys() == stored.keys()
    assert all(torch.equal(taken[name], tensor) for name, tensor in stored.items())
    facts = json.loads(worked("inspect", tmp_path / "mtp", "--json"))
    assert facts["layout"] == "mtp"
    assert facts["parameters"] == sum(t.numel() for t in stored.values())
    assert facts["config_fingerprint"] == config_fingerprint(module.config, module.vocabulary)
    assert facts["attention"].startswith("latent")
    told = worked("inspect", policy)
    assert "SGLang (as of 0.5.23) takes no MTP module" in told
    assert "this one is of 'qwen3'" in told  # a family that vLLM's plugin does not know


def test_a_policy_without_an_mtp_module_is_refused_and_nothing_is_left(tmp_path: Path, drafter_dir: Path) -> None:
    refused("convert", drafter_dir, tmp_path / "new", "--to", "mtp")
    assert not (tmp_path / "new").exists()
