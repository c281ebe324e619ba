"""eval with a policy that decodes."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from command_fixtures import LATENT, refused, worked
from decode_fixtures import (
    AUX_LAYERS,
    EOS,
    log_rollouts,
    make_prompts,
)
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM
from typer.testing import CliRunner
from worker_fixtures import CONFIG, World, joined

from drafter.files.checkpoint import (
    CONFIG_FILE,
    MODEL_FILE,
    write_drafter,
)
from drafter.files.mtp import write_mtp
from drafter.model.eagle3 import Eagle3Drafter
from drafter.mtp.module import MtpConfig, MtpDrafter
from drafter.reference import decoders
from drafter.reference.decode import Generation, generate
from drafter.reference.decoders import Prompt, compare_decoders
from rl_hooks import wire
from rl_hooks.sending.features import as_wire
from service.cli.main import app

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
