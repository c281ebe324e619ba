"""What may be swapped into a policy's own MTP module, decided from configurations and bytes alone; needs no vLLM."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from mtp_policies import CONFIGS, module, write_module, write_policy
from safetensors.torch import load_file, save, save_file

from drafter.files.mtp import export_mtp_config
from drafter.mtp.module import MtpConfig, MtpDrafter
from rl_hooks.engines.vllm.layout import DrafterRefusedError, read_candidate
from rl_hooks.engines.vllm.mtp_layout import MtpLayout, read_own_module

FAMILIES = sorted(CONFIGS)
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64, "mscale": 1.0}
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("glm4_moe", {}),
    ("glm4_moe", {"n_routed_experts": None}),
    ("glm4_moe", {"attention_bias": False, "use_qk_norm": False, "num_key_value_heads": 2}),
    ("deepseek_v3", {}),
    ("deepseek_v3", {"q_lora_rank": None, "n_shared_experts": 2}),
    ("deepseek_v3", {"n_shared_experts": 0, "rope_parameters": YARN}),
]


def as_vllm_holds_it(config: dict[str, Any]) -> dict[str, Any]:
    """The policy's configuration after vLLM made the drafter's out of it."""
    rope = dict(config["rope_parameters"])
    if rope["rope_type"] == "yarn":
        rope["rope_type"] = "deepseek_yarn"
    name = {"glm4_moe": "glm4_moe_mtp", "deepseek_v3": "deepseek_mtp"}[config["model_type"]]
    return config | {"model_type": name, "rope_parameters": rope}


@pytest.mark.parametrize(("family", "changes"), VARIANTS)
def test_the_layout_is_that_of_the_module_that_the_service_exports(family: str, changes: dict[str, Any]) -> None:
    config = CONFIGS[family] | changes
    drafter = MtpDrafter(MtpConfig.from_target(config))
    layout = MtpLayout.read(as_vllm_holds_it(config))
    shapes = {f"model.layers.1.{name}": tuple(t.shape) for name, t in drafter.state_dict().items()}
    assert layout.shapes() == shapes
    assert layout.differences(layout.of(export_mtp_config(drafter.config))) == []
    biases = sum(torch.Size(shape).numel() for name, shape in shapes.items() if name.endswith("bias"))
    assert sum(layout.module_elements().values()) == sum(torch.Size(s).numel() for s in shapes.values()) - biases


@pytest.mark.parametrize(
    ("family", "field", "value"),
    [
        ("glm4_moe", "head_dim", 16),
        ("glm4_moe", "num_experts_per_tok", 1),
        ("glm4_moe", "routed_scaling_factor", 1.0),
        ("glm4_moe", "norm_topk_prob", False),
        ("glm4_moe", "rope_theta", 5e5),
        ("glm4_moe", "partial_rotary_factor", 1.0),
        ("glm4_moe", "draftalign", {"kind": "mtp", "normed_feedback": True}),
        ("glm4_moe", "draftalign", {"kind": "mtp", "zero_first_embedding": False}),
        ("deepseek_v3", "qk_rope_head_dim", 16),
        ("deepseek_v3", "rope_interleave", False),
        ("deepseek_v3", "rope_parameters", YARN),
        ("deepseek_v3", "rms_norm_eps", 1e-5),
        ("deepseek_v3", "num_hidden_layers", 2),
    ],
)
def test_a_configuration_that_means_something_else_differs(family: str, field: str, value: object) -> None:
    layout = MtpLayout.read(as_vllm_holds_it(CONFIGS[family]))
    assert layout.differences(layout.of(CONFIGS[family])) == []
    assert layout.differences(layout.of(CONFIGS[family] | {field: value}))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model_type": "mimo_mtp"}, "'mimo_mtp'"),
        ({"model_type": "deepseek_mtp", "index_topk": 2048}, "DeepSeek-V3"),
        ({"num_nextn_predict_layers": 3}, "one MTP module"),
        ({"num_nextn_predict_layers": None}, "one MTP module"),
        ({"hidden_size": "64"}, "hidden_size"),
    ],
)
def test_what_cannot_be_swapped_is_refused_by_name(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(DrafterRefusedError, match=says):
        MtpLayout.read(CONFIGS["glm4_moe"] | changes)


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_come_out_in_the_engines_dtype_and_the_routers_as_they_are(family: str, tmp_path: Path) -> None:
    layout = MtpLayout.read(CONFIGS[family])
    body = (write_module(family, tmp_path / "module") / "model.safetensors").read_bytes()
    whole = torch.zeros(layout.vocab_size, dtype=torch.int64)
    weights = read_candidate(body, layout, whole, torch.bfloat16)
    assert weights.keys() == layout.shapes().keys()
    wide = {name for name, weight in weights.items() if weight.dtype == torch.float32}
    assert wide == layout.float32
    assert "model.layers.1.mlp.gate.e_score_correction_bias" in wide


@pytest.mark.parametrize("name", ["model.layers.1.shared_head.head.weight", "model.embed_tokens.weight"])
def test_copies_of_the_policys_weights_are_refused(name: str) -> None:
    layout = MtpLayout.read(CONFIGS["glm4_moe"])
    body = save({n: torch.zeros(s) for n, s in layout.shapes().items()} | {name: torch.zeros(105, 64)})
    with pytest.raises(DrafterRefusedError, match=f"{name} must not be in a drafter's file"):
        read_candidate(body, layout, torch.zeros(105, dtype=torch.int64), torch.float32)


@pytest.mark.parametrize("sharded", [False, True])
def test_the_module_that_the_policy_ships_is_read_back(tmp_path: Path, sharded: bool) -> None:
    policy = write_policy("glm4_moe", tmp_path / "policy")
    layout = MtpLayout.read(CONFIGS["glm4_moe"])
    if sharded:
        tensors = load_file(policy / "model.safetensors")
        (policy / "model.safetensors").unlink()
        places = {name: f"model-{i % 2}.safetensors" for i, name in enumerate(sorted(tensors))}
        for file in set(places.values()):
            save_file({n: t for n, t in tensors.items() if places[n] == file}, policy / file)
        (policy / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    found = read_own_module(policy, layout, torch.float32)
    own = module("glm4_moe", trained=False).state_dict()
    assert found.keys() == layout.shapes().keys()
    assert all(torch.equal(found[f"model.layers.1.{name}"], tensor) for name, tensor in own.items())


def test_a_policy_without_the_module_is_said_to_have_none(tmp_path: Path) -> None:
    policy = write_policy("glm4_moe", tmp_path / "policy")
    tensors = load_file(policy / "model.safetensors")
    del tensors["model.layers.1.eh_proj.weight"]
    save_file(tensors, policy / "model.safetensors")
    with pytest.raises(DrafterRefusedError, match="does not hold the module"):
        read_own_module(policy, MtpLayout.read(CONFIGS["glm4_moe"]), torch.float32)
