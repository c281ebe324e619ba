"""eval on real files: replay, pooled and per position."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.service.command_fixtures import LATENT, refused, worked
from helpers.worker.worker_fixtures import CONFIG, LAYERS, World
from safetensors.torch import save_file

from drafter.batch import load_batch
from drafter.files.checkpoint import (
    CONFIG_FILE,
    MODEL_FILE,
    read_drafter,
    write_drafter,
)
from drafter.files.mtp import write_mtp
from drafter.mtp.module import MtpConfig, MtpDrafter
from drafter.policy import Policy, TargetHead
from drafter.replay.ngram import ngram_replay
from drafter.replay.replay import replay
from rl_hooks import wire
from service.storage.layout import Layout
from service.storage.runs import commit_run, read_run_header
from service.storage.spool import Spool


def test_eval_is_replay_pooled_over_the_files(drafter_dir: Path, rollouts: Path, embedding: Path, world: World) -> None:
    facts = json.loads(worked("eval", drafter_dir, rollouts, "--target", embedding, "--depth", 3, "--json"))
    drafter = read_drafter(drafter_dir)
    batches = [load_batch(path) for path in sorted(rollouts.iterdir())]
    parts = [replay(drafter, batch, world.policy(), depth=3) for batch in batches]
    tokens, rounds = (sum(float(getattr(p, name).sum()) for p in parts) for name in ("tokens", "rounds"))
    own = facts["drafters"]["drafter"]
    assert own["alpha"] == pytest.approx(tokens / rounds, rel=1e-9)
    assert own["interval"][0] < own["alpha"] < own["interval"][1]
    assert facts["policy_versions"] == [0, 2]
    assert (facts["rollouts"], facts["files"]) == (24, 3)
    ngram = [ngram_replay(batch.input_ids, batch.loss_mask, batch.cu_seqlens, depth=3) for batch in batches]
    want = sum(float(p.tokens.sum()) for p in ngram) / sum(float(p.rounds.sum()) for p in ngram)
    assert facts["drafters"]["n-gram"]["alpha"] == pytest.approx(want, rel=1e-9)
    joint, given = own["position_acceptance"], own["conditional_acceptance"]
    assert given[0] == pytest.approx(joint[0], rel=1e-12)
    accepted, reached = (sum(float(getattr(p, name)[:, 1].sum()) for p in parts) for name in ("accepted", "reached"))
    assert joint[1] == pytest.approx(accepted / rounds)
    assert given[1] == pytest.approx(accepted / reached)


def test_eval_prints_a_table_per_position(drafter_dir: Path, rollouts: Path, embedding: Path) -> None:
    text = worked("eval", drafter_dir, rollouts / "0.safetensors", "--target", embedding, "--depth", 2)
    lines = text.splitlines()
    assert lines[0].startswith("8 rollouts of 8 prompts in 1 files, policy versions 0 to 0")
    assert "95% interval" in text
    for name in ("drafter", "n-gram"):
        assert sum(line.startswith(name) for line in lines) == 2, name
    assert lines[-1].count("(") == 2, "one pair per position"


def test_eval_refuses_rollouts_with_the_states_of_other_layers(
    tmp_path: Path, rollouts: Path, embedding: Path, world: World
) -> None:
    other, drafter = tmp_path / "other", world.trained_drafter(tmp_path)
    drafter.config = replace(drafter.config, aux_layers=tuple(layer + 1 for layer in LAYERS))
    other.mkdir()
    write_drafter(other, drafter)
    assert "reads the states entering layers" in refused("eval", other, rollouts, "--target", embedding)


def registered(run: str, world: World, directory: Path) -> Layout:
    """A state directory with this run."""
    layout, body = Layout(directory), world.run_file()
    with Spool(layout).upload() as upload:
        upload.write(body)
        commit_run(layout, read_run_header(run, wire.parse_header(body)), upload)
    return layout


def test_eval_takes_the_embedding_of_each_policy_version_from_a_run(tmp_path: Path) -> None:
    """Tied heads move the embedding; a drafter that is fed the old one drafts worse than it does live."""
    world = World(tied=True)
    moved = world.move_head(5)
    layout = registered("tied", world, tmp_path / "state")
    layout.head("tied", 5).write_bytes(world.head_file(5))
    directory = tmp_path / "drafter"
    directory.mkdir()
    write_drafter(directory, world.trained_drafter(tmp_path))
    file = tmp_path / "late.safetensors"
    file.write_bytes(world.rollout_file("late", policy_version=6))
    options = ("--target", "tied", "--state-dir", tmp_path / "state", "--json")
    only = json.loads(worked("eval", directory, file, *options[2:]))["drafters"]["drafter"]["alpha"]
    alpha = json.loads(worked("eval", directory, file, *options))["drafters"]["drafter"]["alpha"]
    assert only == alpha, "without --target the only run is meant"
    registered("other", world, tmp_path / "state")
    assert "which run? Give --target: other, tied" in refused("eval", directory, file, *options[2:])
    own = replay(read_drafter(directory), load_batch(file), Policy(5, moved), depth=4).alpha
    stale = replay(read_drafter(directory), load_batch(file), world.policy(0), depth=4).alpha
    assert alpha == pytest.approx(own, rel=1e-9)
    assert abs(alpha - stale) > 1e-4


def test_eval_says_where_log_probabilities_contradict_the_features(tmp_path: Path) -> None:
    world = World()
    registered("run", world, tmp_path / "state")
    directory, options = tmp_path / "drafter", ("--target", "run", "--state-dir", tmp_path / "state")
    directory.mkdir()
    write_drafter(directory, world.trained_drafter(tmp_path))

    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        tensors["logprobs"][tensors["loss_mask"].bool()] -= 2.0

    for name, change, far in (("honest", None, False), ("wrong", spoil, True)):
        file = tmp_path / f"{name}.safetensors"
        file.write_bytes(world.rollout_file(name, change=change))
        gap = json.loads(worked("eval", directory, file, *options, "--json"))["logprob_gap_nats"]
        assert gap == pytest.approx(2.0 if far else 0.0, abs=0.05)
        assert worked("eval", directory, file, *options).startswith("These figures mean nothing") == far


def test_eval_scores_an_mtp_module_with_the_head_of_each_policy_version(tmp_path: Path) -> None:
    world = World()
    moved = world.move_head(5)
    layout = registered("mtp", world, tmp_path / "state")
    layout.head("mtp", 5).write_bytes(world.head_file(5))
    torch.manual_seed(0)
    module = MtpDrafter(MtpConfig.from_target(CONFIG | LATENT))
    directory = tmp_path / "module"
    directory.mkdir()
    write_mtp(directory, module)
    file = tmp_path / "late.safetensors"
    file.write_bytes(world.rollout_file("late", policy_version=6))
    want = replay(module, load_batch(file), world.policy(6), depth=2).alpha
    options = ("--depth", 2, "--json", "--state-dir", tmp_path / "state")
    figures = json.loads(worked("eval", directory, file, "--target", "mtp", *options))["drafters"]
    assert figures["drafter"]["alpha"] == pytest.approx(want, rel=1e-9)
    save_file({"model.embed_tokens.weight": world.embed, "lm_head.weight": moved}, tmp_path / "policy.safetensors")
    fixed = json.loads(worked("eval", directory, file, "--target", tmp_path / "policy.safetensors", *options))
    assert fixed["drafters"] == figures
    assert "an MTP module" in refused("convert", directory, tmp_path / "new", "--to", "sglang")


def test_eval_takes_the_embedding_for_the_head_only_where_it_is_said_to_be(
    tmp_path: Path, rollouts: Path, world: World
) -> None:
    torch.manual_seed(0)
    module = MtpDrafter(MtpConfig.from_target(CONFIG | LATENT))
    directory, model = tmp_path / "module", tmp_path / "model"
    for made in (directory, model):
        made.mkdir()
    write_mtp(directory, module)
    alone = model / MODEL_FILE
    save_file({"model.embed_tokens.weight": world.embed}, alone)
    file, options = rollouts / "0.safetensors", ("--depth", 2, "--json")
    want = replay(module, load_batch(file), Policy(0, world.embed, TargetHead(world.embed)), depth=2).alpha

    def alpha(target: Path) -> float:
        facts = json.loads(worked("eval", directory, file, "--target", target, *options))
        return float(facts["drafters"]["drafter"]["alpha"])

    def no_head(target: Path) -> bool:
        return "holds no head" in refused("eval", directory, file, "--target", target, *options)

    assert alpha(alone) == pytest.approx(want, rel=1e-9), "nothing beside it says that it is untied"
    assert no_head(model), "a model without config.json"
    for said in (False, None, "true"):
        (model / CONFIG_FILE).write_text(json.dumps({"tie_word_embeddings": said}))
        assert no_head(model)
        assert no_head(alone)
    (model / CONFIG_FILE).write_text(json.dumps({"tie_word_embeddings": True}))
    assert alpha(model) == alpha(alone) == pytest.approx(want, rel=1e-9)
    (model / CONFIG_FILE).unlink()
    weight_map = {"model.embed_tokens.weight": MODEL_FILE, "lm_head.weight": "head.safetensors"}
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert no_head(alone), "one shard of several"


def test_eval_scales_and_caps_the_logits_of_a_checkpoint_as_its_class_does(
    tmp_path: Path, rollouts: Path, world: World
) -> None:
    torch.manual_seed(0)
    module = MtpDrafter(MtpConfig.from_target(CONFIG | LATENT))
    directory, model = tmp_path / "module", tmp_path / "model"
    for made in (directory, model):
        made.mkdir()
    write_mtp(directory, module)
    save_file({"model.embed_tokens.weight": world.embed, "lm_head.weight": world.heads[0]}, model / MODEL_FILE)
    file = rollouts / "0.safetensors"

    def evaluated(run: Callable[..., str], **config: Any) -> str:
        (model / CONFIG_FILE).write_text(json.dumps(config))
        return run("eval", directory, file, "--target", model, "--depth", 2, "--json")

    def gap(**config: Any) -> float:
        return float(json.loads(evaluated(worked, **config))["logprob_gap_nats"])

    cap = {"final_logit_softcapping": 3.0}
    want, _ = TargetHead(world.heads[0], wire.LogitMap(softcap=3.0)).logprob_gap(load_batch(file))
    assert want > 0.1, "these rollouts are of a policy that caps nothing"
    assert gap(architectures=["Gemma2ForCausalLM"], **cap) == pytest.approx(want, rel=0.2)
    nested = gap(architectures=["Gemma4ForConditionalGeneration"], text_config=cap)
    assert nested == pytest.approx(want, rel=0.2)
    assert gap(architectures=["Gemma2ForCausalLM"]) == pytest.approx(0.0, abs=0.01)
    said = evaluated(refused, architectures=["OwnForCausalLM"], logit_scale=0.5)
    assert "logit_scale = 0.5, and what a OwnForCausalLM does with it is not known" in said
    assert "give --target a run" in said


def test_eval_needs_every_shard_that_a_models_index_names(
    tmp_path: Path, drafter_dir: Path, rollouts: Path, embedding: Path, world: World
) -> None:
    model = tmp_path / "model"
    model.mkdir()
    save_file({"model.embed_tokens.weight": world.embed}, model / "a.safetensors")
    save_file({"embed_tokens": world.embed + 1}, model / "not-named.safetensors")
    index = model / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"model.embed_tokens.weight": "a.safetensors"}}))
    same = [worked("eval", drafter_dir, rollouts, "--target", target) for target in (model, embedding)]
    assert same[0] == same[1]
    index.write_text(
        json.dumps({"weight_map": {"model.embed_tokens.weight": "a.safetensors", "lm_head.weight": "b.safetensors"}})
    )
    assert "lacks b.safetensors" in refused("eval", drafter_dir, rollouts, "--target", model)
    index.write_text("[]")
    assert "must hold a JSON object" in refused("eval", drafter_dir, rollouts, "--target", model)


def test_eval_finds_the_embedding_in_a_models_directory(
    tmp_path: Path, drafter_dir: Path, rollouts: Path, embedding: Path, world: World
) -> None:
    model = tmp_path / "model"
    model.mkdir()
    save_file({"lm_head.weight": world.embed + 1}, model / "model-00001-of-00002.safetensors")
    save_file({"model.embed_tokens.weight": world.embed}, model / "model-00002-of-00002.safetensors")
    same = [worked("eval", drafter_dir, rollouts, "--target", target) for target in (model, embedding)]
    assert same[0] == same[1]


def test_eval_says_what_is_wrong_with_its_files(
    tmp_path: Path, drafter_dir: Path, rollouts: Path, embedding: Path, world: World
) -> None:
    assert "no run 'nowhere'" in refused("eval", drafter_dir, rollouts, "--target", "nowhere", "--state-dir", tmp_path)
    (tmp_path / "empty").mkdir()
    assert "holds no files" in refused("eval", drafter_dir, tmp_path / "empty", "--target", embedding)
    save_file({"something": world.embed}, tmp_path / "other.safetensors")
    assert "no token embedding" in refused("eval", drafter_dir, rollouts, "--target", tmp_path / "other.safetensors")
    save_file({"embed_tokens": world.embed[:5].clone()}, tmp_path / "small.safetensors")
    assert "embed_tokens must be" in refused("eval", drafter_dir, rollouts, "--target", tmp_path / "small.safetensors")
    (tmp_path / "broken.safetensors").write_bytes(b"not a file of rollouts at all")
    message = refused("eval", drafter_dir, tmp_path / "broken.safetensors", "--target", embedding)
    assert "broken.safetensors" in message
    assert "drafting mode" in refused("eval", drafter_dir, rollouts, "--target", embedding, "--drafting", "maybe")
    spoilt = world.rollout_file("nan", change=lambda t: t.update(aux_hidden=torch.full_like(t["aux_hidden"], math.nan)))
    (tmp_path / "nan.safetensors").write_bytes(spoilt)
    assert "NaN" in refused("eval", drafter_dir, tmp_path / "nan.safetensors", "--target", embedding)
