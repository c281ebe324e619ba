"""convert, inspect and eval on real files, and the bounds that `eval --tree` prints."""

from __future__ import annotations

import copy
import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from decode_fixtures import (
    AUX_LAYERS,
    EOS,
    default_target,
    log_rollouts,
    make_prompts,
    policy_of,
    schooled,
)
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM
from typer.testing import CliRunner, Result
from worker_fixtures import CONFIG, DRAFT, LAYERS, World, joined

from drafter.batch import load_batch
from drafter.errors import DrafterError
from drafter.files.checkpoint import (
    CONFIG_FILE,
    MODEL_FILE,
    config_fingerprint,
    read_drafter,
    write_drafter,
)
from drafter.files.mtp import write_mtp
from drafter.model.eagle3 import Eagle3Drafter
from drafter.mtp.module import MtpConfig, MtpDrafter
from drafter.policy import Policy, TargetHead
from drafter.reference import decoders
from drafter.reference.decode import Generation, generate
from drafter.reference.decoders import Prompt, compare_decoders
from drafter.reference.tree import generate_tree
from drafter.replay.acceptance import find_segments, replay_rounds
from drafter.replay.evaluate import evaluate, tree_bound
from drafter.replay.ngram import ngram_replay
from drafter.replay.replay import replay
from rl_hooks import wire
from rl_hooks.sending.features import as_wire
from service.cli.main import app
from service.errors import ConfigurationError
from service.storage.layout import Layout
from service.storage.runs import commit_run, read_run_header
from service.storage.spool import Spool

ENTERING = list(LAYERS)
ROOT = Path(__file__).resolve().parents[3]


def draftalign(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(a) for a in arguments])


def worked(*arguments: object) -> str:
    result = draftalign(*arguments)
    assert result.exception is None, result.exception
    return result.stdout


def refused(*arguments: object) -> str:
    result = draftalign(*arguments)
    assert isinstance(result.exception, ConfigurationError), (result.exception, result.stdout)
    return str(result.exception)


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture
def drafter_dir(tmp_path: Path, world: World) -> Path:
    directory = tmp_path / "drafter"
    directory.mkdir()
    write_drafter(directory, world.trained_drafter(tmp_path), dtype=torch.bfloat16)
    return directory


@pytest.fixture
def rollouts(tmp_path: Path, world: World) -> Path:
    directory = tmp_path / "rollouts"
    directory.mkdir()
    for index in range(3):
        data = world.rollout_file(f"file{index}", policy_version=index, temperature=(1.0, 0.7, 1.0)[index])
        (directory / f"{index}.safetensors").write_bytes(data)
    return directory


@pytest.fixture
def embedding(tmp_path: Path, world: World) -> Path:
    save_file({"model.embed_tokens.weight": world.embed}, tmp_path / "embedding.safetensors")
    return tmp_path / "embedding.safetensors"


# --- convert --------------------------------------------------------------------------------------------------------


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
    assert "a layout is one of" in refused("convert", drafter_dir, tmp_path / "new", "--to", "gguf")
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


# --- inspect --------------------------------------------------------------------------------------------------------


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


# --- eval -----------------------------------------------------------------------------------------------------------


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
    ngram = [ngram_replay(batch, depth=3) for batch in batches]
    want = sum(float(p.tokens.sum()) for p in ngram) / sum(float(p.rounds.sum()) for p in ngram)
    assert facts["drafters"]["n-gram"]["alpha"] == pytest.approx(want, rel=1e-9)
    joint, given = own["position_acceptance"], own["conditional_acceptance"]
    assert given[0] == pytest.approx(joint[0], rel=1e-12)
    accepted, reached = (sum(float(getattr(p, name)[:, 1].sum()) for p in parts) for name in ("accepted", "reached"))
    assert joint[1] == pytest.approx(accepted / rounds)
    assert given[1] == pytest.approx(accepted / reached)


def test_eval_prints_a_table_per_position_and_the_bounds_of_trees(
    drafter_dir: Path, rollouts: Path, embedding: Path
) -> None:
    text = worked("eval", drafter_dir, rollouts / "0.safetensors", "--target", embedding, "--depth", 2, "--tree")
    lines = text.splitlines()
    assert lines[0].startswith("8 rollouts of 8 prompts in 1 files, policy versions 0 to 0")
    assert "95% interval" in text
    for name in (
        "drafter",
        "n-gram",
        "tree of the 2 most probable, at most",
        "tree of the 4 most probable, at most",
        "tree of the 8 most probable, at most",
    ):
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
    alpha = json.loads(worked("eval", directory, file, *options))["drafters"]["drafter"]["alpha"]
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


#: What a DeepSeek-V3 config says beyond the fields of any other.
LATENT = {
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 16,
}


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
    options = ("--depth", 2, "--tree", "--json", "--state-dir", tmp_path / "state")
    figures = json.loads(worked("eval", directory, file, "--target", "mtp", *options))["drafters"]
    assert figures["drafter"]["alpha"] == pytest.approx(want, rel=1e-9)
    assert (
        figures["tree of the 8 most probable, at most"]["alpha"]
        > figures["tree of the 2 most probable, at most"]["alpha"]
    )
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


#: What ends a text, as instruct models have several: the default target hardly emits the first one.
ENDS = [13, EOS]


@pytest.fixture
def policy_dir(tmp_path: Path, target: Any) -> Path:
    policy = copy.deepcopy(target)
    policy.generation_config.eos_token_id = ENDS
    policy.save_pretrained(tmp_path / "policy")
    return tmp_path / "policy"


@pytest.fixture
def trained_dir(tmp_path: Path, trained: Eagle3Drafter) -> Path:
    (tmp_path / "trained").mkdir()
    write_drafter(tmp_path / "trained", trained)
    return tmp_path / "trained"


def logged(target: Any, prompts: list[list[int]], name: str, temperature: float = 1.0, top_p: float = 1.0) -> bytes:
    """Rollouts of `target` as a trainer would send them."""
    dice = torch.Generator().manual_seed(3)
    made = generate(target, None, prompts, max_tokens=12, temperature=temperature, generator=dice)
    batch = log_rollouts(target, prompts, made, temperature)
    tensors = {
        "input_ids": batch.input_ids.int(),
        "cu_seqlens": batch.cu_seqlens.int(),
        "loss_mask": batch.loss_mask.to(torch.uint8),
        "aux_hidden": batch.aux_hidden.bfloat16(),
        "last_hidden": batch.last_hidden.bfloat16(),
        "logprobs": batch.logprobs,
        "logsumexp": batch.logsumexp,
    }
    facts = wire.rollout_metadata(
        run="default",
        policy_version=1,
        rollout_ids=[f"{name}/{i}" for i in range(len(prompts))],
        target_fingerprint=wire.target_fingerprint(target.config.to_dict(), AUX_LAYERS),
        aux_layers=AUX_LAYERS,
        temperature=temperature,
        top_p=top_p,
    )
    return joined(wire.encode({k: as_wire(v) for k, v in tensors.items()}, facts))


def decoded(*call: object) -> dict[str, Any]:
    """The part about decoding of what `eval --json` prints, which must be JSON to the letter."""

    def not_json(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    found = json.loads(worked(*call, "--json"), parse_constant=not_json)["decoded"]
    assert isinstance(found, dict)
    return found


def test_eval_decodes_the_rollouts_prompts_with_the_policy(
    tmp_path: Path, target: Any, trained: Eagle3Drafter, policy_dir: Path, trained_dir: Path
) -> None:
    prompts = make_prompts(12, 64, seed=21)
    rollouts = tmp_path / "rollouts"
    rollouts.mkdir()
    for number, part in enumerate((prompts[:5], prompts[:5] + prompts[5:])):
        (rollouts / f"{number}.safetensors").write_bytes(logged(target, part, f"file{number}"))
    call = ["eval", trained_dir, rollouts, "--target", policy_dir, "--depth", 3, "--decode", policy_dir]
    found = decoded(*call, "--prompts", 8, "--max-tokens", 20)
    assert found["prompts"] == found["greedy_texts_equal"] == 8, "the first five came twice and count once"
    assert found["warped"] is False

    def alone(ends: list[int]) -> float:
        return generate(target, trained, prompts[:8], depth=3, max_tokens=20, eos_id=ends, temperature=0.0).alpha

    assert found["alpha_chain_greedy"] == pytest.approx(alone(ENDS), rel=1e-6)
    assert abs(alone(ENDS) - alone(ENDS[:1])) > 1e-3, "texts do end with the last of them"
    assert found["alpha_tree_greedy"] > found["alpha_chain_greedy"] > 1.2
    assert found["alpha_chain"] > 1.1
    assert found["alpha_tree"] > 1.1
    lines = worked(*call, "--max-tokens", 8).splitlines()
    assert lines[-5] == "12 prompts decoded with the policy"
    assert lines[-3].startswith("chain")
    assert lines[-2].startswith("tree of 16 nodes")


def test_eval_decodes_with_the_policys_embedding_whatever_the_replay_takes(
    tmp_path: Path, target: Any, trained: Eagle3Drafter, policy_dir: Path, trained_dir: Path
) -> None:
    prompts = make_prompts(6, 64, seed=22)
    (tmp_path / "file.safetensors").write_bytes(logged(target, prompts, "file"))
    other = target.get_input_embeddings().weight.detach().flip(0).contiguous()
    save_file({"embed_tokens": other}, tmp_path / "other.safetensors")
    call = ["eval", trained_dir, tmp_path / "file.safetensors", "--target", tmp_path / "other.safetensors"]
    found = decoded(*call, "--depth", 3, "--decode", policy_dir, "--max-tokens", 20)
    size: dict[str, Any] = {"depth": 3, "max_tokens": 20, "eos_id": ENDS, "temperature": 0.0}
    assert found["alpha_chain_greedy"] == pytest.approx(generate(target, trained, prompts, **size).alpha, rel=1e-6)


def test_eval_decodes_each_prompt_at_the_temperature_of_its_rollouts(
    tmp_path: Path, target: Any, trained: Eagle3Drafter, policy_dir: Path, trained_dir: Path
) -> None:
    prompts = make_prompts(16, 64, seed=23)
    files = [tmp_path / name for name in ("cold.safetensors", "hot.safetensors")]
    files[0].write_bytes(logged(target, prompts[:8], "cold", temperature=0.5))
    files[1].write_bytes(logged(target, prompts[8:], "hot", temperature=1.5, top_p=0.9))
    call = ["eval", trained_dir, *files, "--target", policy_dir, "--depth", 3, "--decode", policy_dir]
    found = decoded(*call, "--max-tokens", 20)
    dice, size = torch.Generator().manual_seed(0), {"depth": 3, "max_tokens": 20, "eos_id": ENDS}
    parts = [
        generate(target, trained, part, temperature=temperature, generator=dice, **size)  # type: ignore[arg-type]
        for part, temperature in ((prompts[:8], 0.5), (prompts[8:], 1.5))
    ]
    assert found["alpha_chain"] == pytest.approx(Generation.concat(parts).alpha, rel=1e-6)
    assert found["alpha_chain_greedy"] != pytest.approx(found["alpha_chain"], rel=1e-3)
    assert found["greedy_texts_equal"] == 16
    assert found["warped"] is True
    note = "note: rollouts were drawn with top-p or top-k"
    assert worked(*call, "--max-tokens", 8).splitlines()[-1].startswith(note)
    assert decoded(*call, "--prompts", 8)["warped"] is False, "of those that are decoded"


def test_eval_prints_null_where_decoding_had_no_round(
    tmp_path: Path, target: Any, policy_dir: Path, trained_dir: Path
) -> None:
    file = tmp_path / "file.safetensors"
    file.write_bytes(logged(target, make_prompts(2, 64), "file"))
    call = ["eval", trained_dir, file, "--target", policy_dir, "--decode", policy_dir, "--max-tokens", 1]
    assert decoded(*call)["alpha_chain"] is None
    assert worked(*call).splitlines()[-3].split() == ["chain", "-", "-"]


def test_prompts_are_decoded_in_groups_whose_logits_are_bounded(
    target: Any, trained: Eagle3Drafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [*make_prompts(7, 64, seed=24), [5, 9] * 60, *make_prompts(5, 64, seed=25)]
    prompts = [Prompt(text) for text in texts]
    size: dict[str, Any] = {"depth": 3, "max_tokens": 16, "eos_id": EOS}
    want = compare_decoders(target, trained, prompts, **size)
    bound = 3 * 20 * 64
    monkeypatch.setattr(decoders, "_LOGITS_ELEMENTS", bound)
    seen: list[tuple[int, int]] = []
    hook = target.lm_head.register_forward_hook(lambda _module, _inputs, out: seen.append((len(out), out.numel())))
    try:
        found = compare_decoders(target, trained, prompts, **size)
    finally:
        hook.remove()
    assert all(rows == 1 for rows, elements in seen if elements > bound), "a prompt too long for any group"
    assert max(rows for rows, _ in seen) == 3
    assert [len(group) for group in decoders._groups(prompts, 64)] == [3, 3, 1, 1, 3, 2]
    for name in ("prompts", "greedy_texts_equal", "alpha_chain_greedy", "alpha_tree_greedy"):
        assert found[name] == pytest.approx(want[name], rel=1e-6)


def test_eval_says_why_it_cannot_decode(
    tmp_path: Path, drafter_dir: Path, rollouts: Path, embedding: Path, policy_dir: Path
) -> None:
    call = ["eval", drafter_dir, rollouts, "--target", embedding, "--decode"]
    assert "embeds 64 tokens in 64 numbers, the drafter is for 40 tokens in 16" in refused(*call, policy_dir)
    config = json.loads((policy_dir / CONFIG_FILE).read_text())
    package = {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}  # which is not installed
    for odd in ({"intermediate_size": -8}, package, {"model_type": "unheard of"}):
        (policy_dir / CONFIG_FILE).write_text(json.dumps(config | odd))
        assert "transformers cannot load" in refused(*call, policy_dir), odd
    (policy_dir / CONFIG_FILE).write_text(json.dumps(config))
    whole = (policy_dir / MODEL_FILE).read_bytes()
    (policy_dir / MODEL_FILE).write_bytes(whole[: len(whole) // 2])
    assert "transformers cannot load" in refused(*call, policy_dir)
    (policy_dir / MODEL_FILE).unlink()
    assert "transformers cannot load" in refused(*call, policy_dir)


def test_eval_sees_that_it_cannot_decode_before_it_replays(
    tmp_path: Path, drafter_dir: Path, embedding: Path, policy_dir: Path, world: World
) -> None:
    broken, module = tmp_path / "broken.safetensors", tmp_path / "module"
    broken.write_bytes(b"whoever reads this says so")
    module.mkdir()
    write_mtp(module, MtpDrafter(MtpConfig.from_target(CONFIG | LATENT)))
    call = ["eval", drafter_dir, broken, "--target", embedding, "--decode"]
    assert "broken.safetensors" in refused(*call, policy_dir)
    assert "with no MTP module" in refused("eval", module, *call[2:], policy_dir)
    assert "holds no config.json" in refused(*call, "Qwen/Qwen3-8B")
    (policy_dir / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "org/base"}))
    assert "holds an adapter" in refused(*call, policy_dir)


def test_eval_decodes_with_no_weights_that_the_checkpoint_lacks(
    tmp_path: Path, target: Any, policy_dir: Path, trained_dir: Path
) -> None:
    file = tmp_path / "file.safetensors"
    file.write_bytes(logged(target, make_prompts(2, 64), "file"))
    call = ["eval", trained_dir, file, "--target", policy_dir, "--decode", policy_dir, "--max-tokens", 4]
    whole = load_file(policy_dir / MODEL_FILE)
    name = "model.layers.2.mlp.up_proj.weight"

    def store(tensors: dict[str, torch.Tensor]) -> None:
        save_file(tensors, policy_dir / MODEL_FILE, metadata={"format": "pt"})

    store({key: tensor for key, tensor in whole.items() if key != name})
    assert f"lacks 1 of the weights that its config.json asks for, or has them in another shape ({name})" in refused(
        *call
    )
    store(whole | {name: whole[name][:-1].clone()})
    assert f"({name})" in refused(*call)
    store({key: tensor for key, tensor in whole.items() if key != "lm_head.weight"})
    assert "(lm_head.weight)" in refused(*call)
    config = json.loads((policy_dir / CONFIG_FILE).read_text())
    (policy_dir / CONFIG_FILE).write_text(json.dumps(config | {"tie_word_embeddings": True}))
    assert decoded(*call)["prompts"] == 2, "a tied head is not missing"


def test_eval_runs_no_code_of_the_policys_directory_and_asks_no_one_else(
    tmp_path: Path, target: Any, policy_dir: Path, trained_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, ran = tmp_path / "file.safetensors", tmp_path / "ran"
    file.write_bytes(logged(target, make_prompts(2, 64), "file"))
    call = ["eval", trained_dir, file, "--target", policy_dir, "--decode", policy_dir, "--max-tokens", 4]
    asked: list[Any] = []
    for auto in (AutoConfig, AutoModelForCausalLM):
        load = auto.from_pretrained

        def spied(*args: Any, load: Any = load, **options: Any) -> Any:
            asked.append(options.get("local_files_only"))
            return load(*args, **options)

        monkeypatch.setattr(auto, "from_pretrained", spied)
    original = json.loads((policy_dir / CONFIG_FILE).read_text())
    (policy_dir / CONFIG_FILE).write_text(json.dumps(original | {"attn_implementation": "kernels-community/any"}))
    assert decoded(*call)["prompts"] == 2, "kernels, which would be fetched, are not asked for"
    assert asked
    assert all(asked)
    (policy_dir / "own.py").write_text(f"open({str(ran)!r}, 'w').close()\nclass Own: pass\n")
    own = {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Own"}
    (policy_dir / CONFIG_FILE).write_text(json.dumps(original | {"model_type": "own", "auto_map": own}))
    result = CliRunner().invoke(app, [str(a) for a in call], input="y\n")  # to transformers' question whether to run it
    assert "transformers cannot load" in str(result.exception)
    assert not ran.exists()


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


def test_an_error_ends_the_command_with_one_line(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "service.cli", "inspect", str(tmp_path)], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("draftalign: ")
    assert "has no model.safetensors" in done.stderr


# --- bounds of trees ------------------------------------------------------------------------------------------------


@pytest.fixture
def target() -> Any:
    return default_target()


@pytest.fixture
def trained() -> Eagle3Drafter:
    return schooled()


def test_a_bound_of_one_branch_is_greedy_replay_and_more_branches_only_help(
    target: Any, trained: Eagle3Drafter
) -> None:
    prompts = make_prompts(30, 64, seed=11)
    made = generate(target, None, prompts, max_tokens=20, generator=torch.Generator().manual_seed(1))
    batch, policy = log_rollouts(target, prompts, made), policy_of(target)
    bounds = [tree_bound(trained, batch, policy, depth=3, branches=k) for k in (1, 2, 4, 8, 56)]
    np.testing.assert_allclose(bounds[0].rounds, replay(trained, batch, policy, depth=3, drafting="greedy").rounds)
    half = tree_bound(copy.deepcopy(trained).bfloat16(), batch, policy, depth=3, branches=2)  # as on CUDA
    assert half.alpha == pytest.approx(bounds[1].alpha, rel=0.05)
    alphas = [bound.alpha for bound in bounds]
    assert alphas == sorted(alphas)
    assert alphas[2] > alphas[0] + 0.2
    # With all D branches only tokens outside the draft vocabulary are missed.
    segments = find_segments(batch.loss_mask.numpy(), batch.cu_seqlens.numpy())
    known = (trained.vocabulary.to_draft[batch.input_ids] >= 0).numpy().astype(float)
    rows = segments.rows()
    padded = np.concatenate([known, np.zeros(3)])
    want = replay_rounds(np.stack([padded[rows + j] for j in range(3)], axis=1), segments)
    np.testing.assert_allclose(bounds[-1].rounds, want.rounds)


def test_a_full_tree_needs_the_rounds_of_its_bound_and_a_pruned_one_more(target: Any, trained: Eagle3Drafter) -> None:
    """Whether a token is in the tree hangs on the text alone, so live counting and replay agree round by round."""
    prompts = make_prompts(150, 64, seed=12)
    counts = {}
    for nodes in (3 + 9, 5):
        made = generate_tree(
            target,
            trained,
            prompts,
            max_tokens=24,
            depth=2,
            branches=3,
            nodes=nodes,
            generator=torch.Generator().manual_seed(2),
        )
        bound = tree_bound(trained, log_rollouts(target, prompts, made), policy_of(target), depth=2, branches=3)
        counts[nodes] = np.array(made.rounds) - bound.rounds
    assert np.abs(counts[12]).max() == 0
    assert counts[5].sum() > 10


def test_evaluate_refuses_what_it_cannot_pool(target: Any, trained: Eagle3Drafter) -> None:
    with pytest.raises(DrafterError, match="at least one batch"):
        evaluate(trained, [], lambda _: policy_of(target), depth=3)
    prompts = make_prompts(3, 64)
    batch = log_rollouts(target, prompts, generate(target, None, prompts, max_tokens=8))
    with pytest.raises(DrafterError, match="branches"):
        tree_bound(trained, batch, policy_of(target), depth=3, branches=57)
    result = evaluate(trained, [batch, batch], lambda _: policy_of(target), depth=2, branches=(2,))
    assert result.summary()["prompts"] == 3, "the same prompts in two files are the same prompts"
    assert result.drafter.conditional_acceptance.shape == (2,)


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
