"""The modules that vLLM builds of EAGLE-3 drafters and of policies' own MTP modules; needs no vLLM."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save, save_file
from torch import nn
from vllm_server.mtp_policies import CONFIGS, module, write_module, write_policy

from drafter.files.mtp import export_mtp_config
from drafter.model.eagle3 import DrafterConfig
from drafter.mtp.module import MtpConfig, MtpDrafter
from rl_hooks.engines.candidate import DrafterRefusedError, read_candidate
from rl_hooks.engines.vllm.draft import _shared_modules
from rl_hooks.engines.vllm.modules import (
    float32_weights,
    module_elements,
    read_own_module,
    running_module,
)
from rl_hooks.format.drafter import differences, weight_shapes
from rl_hooks.format.mtp import parse_mtp_config

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
def test_vllms_copy_of_the_config_is_the_module_that_the_service_exports(family: str, changes: dict[str, Any]) -> None:
    config = CONFIGS[family] | changes
    drafter = MtpDrafter(MtpConfig.from_target(config))
    running = running_module(as_vllm_holds_it(config))
    shapes = {f"model.layers.1.{name}": tuple(t.shape) for name, t in drafter.state_dict().items()}
    assert weight_shapes(running) == shapes
    assert differences(running, parse_mtp_config(export_mtp_config(drafter.config))) == []
    biases = sum(torch.Size(shape).numel() for name, shape in shapes.items() if name.endswith("bias"))
    assert sum(module_elements(running).values()) == sum(torch.Size(s).numel() for s in shapes.values()) - biases


@pytest.mark.parametrize("layers", [1, 2])
def test_an_eagle3_drafters_elements_are_counted_once_and_stacked(layers: int) -> None:
    config = DrafterConfig(16, 16, 24, 4, 2, 8, 40, 20, (1, 2, 3), num_hidden_layers=layers)
    elements = module_elements(config)
    unread = 16 * (layers - 1)  # a hidden_norm, which vLLM builds in later layers and never reads
    assert sum(elements.values()) == sum(torch.Size(s).numel() for s in weight_shapes(config).values()) + unread
    assert elements["model.layers.0.self_attn.qkv_proj"] == (32 + 16 + 16) * 32
    assert elements["model.layers.0.mlp.gate_up_proj"] == 2 * 24 * 16
    assert elements.keys() >= {"model.fc", "model.norm", "lm_head", f"model.layers.{layers - 1}.hidden_norm"}


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
    running = running_module(as_vllm_holds_it(CONFIGS[family]))
    assert differences(running, parse_mtp_config(CONFIGS[family])) == []
    assert differences(running, parse_mtp_config(CONFIGS[family] | {field: value}))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model_type": "mimo_mtp"}, "form, this one is of 'mimo_mtp'"),
        ({"model_type": "mimo_mtp", "hidden_act": "gelu"}, "form, this one is of 'mimo_mtp'"),
        ({"model_type": "glm4_moe_mtp", "index_topk": 2048}, "index_topk"),
        ({"num_nextn_predict_layers": 3}, "num_nextn_predict_layers is 3"),
        ({"hidden_size": "64"}, "hidden_size"),
    ],
)
def test_what_cannot_be_swapped_is_refused_by_name(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(DrafterRefusedError, match=says):
        running_module(CONFIGS["glm4_moe"] | changes)


def test_latent_attention_of_a_family_that_the_plugin_does_not_know_is_refused() -> None:
    with pytest.raises(DrafterRefusedError, match="this one is of 'glm4_moe_lite'"):
        running_module(CONFIGS["deepseek_v3"] | {"model_type": "glm4_moe_lite"})


@pytest.mark.parametrize("named", ["type", "rope_type"])
@pytest.mark.parametrize("field", ["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize("kind", ["yarn", "deepseek_yarn"])
def test_yarn_is_read_under_each_of_its_names(kind: str, field: str, named: str) -> None:
    rope = {**{n: v for n, v in YARN.items() if n != "rope_type"}, named: kind}
    silent = {n: v for n, v in CONFIGS["deepseek_v3"].items() if n != "rope_parameters"}
    sizes = running_module(silent | {field: rope})
    assert sizes == parse_mtp_config(silent | {"rope_parameters": YARN})


@pytest.mark.parametrize("extra", [{"d2t": torch.zeros(7, dtype=torch.int64)}, {"t2d": torch.ones(105)}])
def test_a_modules_file_has_no_draft_vocabulary(extra: dict[str, torch.Tensor]) -> None:
    running = running_module(CONFIGS["glm4_moe"])
    body = save({n: torch.zeros(s) for n, s in weight_shapes(running).items()} | extra)
    with pytest.raises(DrafterRefusedError, match=f"not part of the drafter: {next(iter(extra))}"):
        read_candidate(body, running, torch.zeros(105, dtype=torch.int64), torch.float32)


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_come_out_in_the_engines_dtype_and_the_routers_as_they_are(family: str, tmp_path: Path) -> None:
    running = running_module(CONFIGS[family])
    body = (write_module(family, tmp_path / "module") / "model.safetensors").read_bytes()
    whole = torch.zeros(running.vocab_size, dtype=torch.int64)
    weights = read_candidate(body, running, whole, torch.bfloat16, float32_weights(running))
    assert weights.keys() == weight_shapes(running).keys()
    wide = {name for name, weight in weights.items() if weight.dtype == torch.float32}
    assert wide == float32_weights(running)
    assert "model.layers.1.mlp.gate.e_score_correction_bias" in wide


@pytest.mark.parametrize("name", ["model.layers.1.shared_head.head.weight", "model.embed_tokens.weight"])
def test_copies_of_the_policys_weights_are_refused(name: str) -> None:
    running = running_module(CONFIGS["glm4_moe"])
    body = save({n: torch.zeros(s) for n, s in weight_shapes(running).items()} | {name: torch.zeros(105, 64)})
    with pytest.raises(DrafterRefusedError, match=f"{name} must not be in a drafter's file"):
        read_candidate(body, running, torch.zeros(105, dtype=torch.int64), torch.float32)


@pytest.mark.parametrize("sharded", [False, True])
def test_the_module_that_the_policy_ships_is_read_back(tmp_path: Path, sharded: bool) -> None:
    policy = write_policy("glm4_moe", tmp_path / "policy")
    running = running_module(CONFIGS["glm4_moe"])
    if sharded:
        tensors = load_file(policy / "model.safetensors")
        (policy / "model.safetensors").unlink()
        places = {name: f"model-{i % 2}.safetensors" for i, name in enumerate(sorted(tensors))}
        for file in set(places.values()):
            save_file({n: t for n, t in tensors.items() if places[n] == file}, policy / file)
        (policy / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    found = read_own_module(policy, running, torch.float32)
    own = module("glm4_moe", trained=False).state_dict()
    assert found.keys() == weight_shapes(running).keys()
    assert all(torch.equal(found[f"model.layers.1.{name}"], tensor) for name, tensor in own.items())


def test_a_policy_without_the_module_is_said_to_have_none(tmp_path: Path) -> None:
    policy = write_policy("glm4_moe", tmp_path / "policy")
    tensors = load_file(policy / "model.safetensors")
    del tensors["model.layers.1.eh_proj.weight"]
    save_file(tensors, policy / "model.safetensors")
    with pytest.raises(DrafterRefusedError, match="does not hold the module"):
        read_own_module(policy, running_module(CONFIGS["glm4_moe"]), torch.float32)


class Tower(nn.Module):
    """Stands for a model: its inner part under `model`, as vLLM nests them."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(5, 3)
        self.model.norm = nn.LayerNorm(3)
        self.lm_head = nn.Linear(3, 5, bias=False)


def test_what_is_shared_with_the_policy_is_found_by_module_and_by_parameter() -> None:
    target, draft = Tower(), Tower()
    assert _shared_modules(draft, target) == {}
    draft.model.embed_tokens = target.model.embed_tokens  # as vLLM does
    draft.lm_head.weight = target.lm_head.weight  # as SGLang does
    assert sorted(_shared_modules(draft, target)) == ["lm_head", "model.embed_tokens"]
