"""An MTP module on disk, by DeepSeek-V3's names: `model.layers.{N}.*` beside a config.json that transformers knows.

What is written is the module alone. The published checkpoints also hold copies of the policy's embedding and head in
that layer; engines share the policy's live ones, and a swap that carried copies would overwrite them. When such a
checkpoint is read, the copies are compared with the policy's and left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from drafter.errors import CheckpointError
from drafter.files.checkpoint import CONFIG_FILE, MODEL_FILE, opened, read_config, write_files
from drafter.mtp.module import MtpConfig, MtpDrafter
from drafter.policy import Policy
from rl_hooks.format.drafter import read_index
from rl_hooks.format.eagle3 import STORED
from rl_hooks.format.mtp import COPIES, GroupedSizes, LatentSizes, check_mtp_header, parse_mtp_config, prefix

__all__ = ["export_mtp_config", "extract_mtp", "parse_mtp_config", "prefix", "read_mtp", "read_stored_mtp", "write_mtp"]

_STORAGE: Final = (torch.float32, torch.bfloat16, torch.float16)
_NAMES: Final = dict(zip(_STORAGE, STORED, strict=True))  # safetensors'
#: Stays float32 whatever the weights are: the router adds it to float32 scores.
_FLOAT32: Final = "mlp.gate.e_score_correction_bias"


def write_mtp(directory: Path, drafter: MtpDrafter, *, dtype: torch.dtype = torch.float32) -> None:
    """Write model.safetensors and config.json into an existing `directory`, synced to disk.

    Raises `CheckpointError` for weights that are not finite as `dtype`.
    """
    if dtype not in _STORAGE:
        raise CheckpointError(f"weights are stored as float32, bfloat16 or float16, got {dtype}")
    tensors = {}
    for name, tensor in drafter.state_dict().items():
        stored = tensor.detach().to("cpu", torch.float32 if name == _FLOAT32 else dtype).contiguous()
        if not bool(torch.isfinite(stored).all()):
            raise CheckpointError(f"{name} is not finite as {dtype}; go back to the last good weights, do not publish")
        tensors[prefix(drafter.config) + name] = stored
    write_files(directory, tensors, export_mtp_config(drafter.config, dtype))


def export_mtp_config(config: MtpConfig, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """The module's config.json: the policy's own field names, and ours under `draftalign`."""
    experts = config.experts
    document = {
        "architectures": ["Glm4MoeForCausalLM" if config.model_type == "glm4_moe" else "DeepseekV3ForCausalLM"],
        "model_type": config.model_type,
        "num_hidden_layers": config.layer,
        "num_nextn_predict_layers": 1,
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "intermediate_size": config.intermediate_size,
        **_attention_fields(config.attention),
        "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": config.max_position_embeddings,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "n_routed_experts": 0,
        "torch_dtype": str(dtype).removeprefix("torch."),
        "draftalign": {
            "kind": config.kind,
            "zero_first_embedding": config.zero_first_embedding,
            "normed_feedback": config.normed_feedback,
        },
    }
    if experts is not None:
        document |= {
            "n_routed_experts": experts.routed,
            "num_experts_per_tok": experts.chosen,
            "n_shared_experts": experts.shared,
            "moe_intermediate_size": experts.intermediate_size,
            "n_group": experts.groups,
            "topk_group": experts.chosen_groups,
            "norm_topk_prob": experts.normalised,
            "routed_scaling_factor": experts.scaling,
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
        }
    return document


def _attention_fields(sizes: LatentSizes | GroupedSizes) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": sizes.rope_theta}
    fields: dict[str, Any] = {"num_attention_heads": sizes.heads, "rope_theta": sizes.rope_theta}
    if isinstance(sizes, GroupedSizes):
        return fields | {
            "num_key_value_heads": sizes.kv_heads,
            "head_dim": sizes.head_dim,
            "partial_rotary_factor": sizes.rotary / sizes.head_dim,
            "rope_parameters": rope | {"partial_rotary_factor": sizes.rotary / sizes.head_dim},
            "attention_bias": sizes.bias,
            "use_qk_norm": sizes.head_norms,
        }
    if sizes.yarn is not None:
        rope |= {"rope_type": "yarn", **asdict(sizes.yarn)}
    return fields | {
        "num_key_value_heads": sizes.heads,
        "q_lora_rank": sizes.q_rank,
        "kv_lora_rank": sizes.kv_rank,
        "qk_nope_head_dim": sizes.nope,
        "qk_rope_head_dim": sizes.rope,
        "v_head_dim": sizes.value,
        "rope_parameters": rope,
        "rope_interleave": sizes.interleaved,
        "attention_bias": False,
    }


def read_mtp(directory: Path, policy: Policy | None = None) -> MtpDrafter:
    """Read an MTP module, alone or out of the policy's whole checkpoint (sharded or not), as float32 on the CPU.

    A checkpoint's copies of the policy's embedding and head are left out; those that are not `policy`'s are refused.
    Raises `CheckpointError`: names, shapes, dtypes, values.
    """
    config, tensors = read_stored_mtp(directory, policy)
    with torch.random.fork_rng(devices=[]):
        drafter = MtpDrafter(config)
    drafter.float().load_state_dict({name: tensor.float() for name, tensor in tensors.items()})
    return drafter


def read_stored_mtp(directory: Path, policy: Policy | None = None) -> tuple[MtpConfig, dict[str, Tensor]]:
    """`read_mtp` without building the module: its config, and its tensors as they are stored."""
    config = parse_mtp_config(read_config(directory / CONFIG_FILE))
    tensors = _layer_tensors(directory, prefix(config))
    for name, whose in COPIES.items():
        copy = tensors.pop(name, None)
        if copy is None or policy is None:
            continue
        policys = policy.embed_tokens if whose == "embed_tokens" else policy.needed_head().lm_head
        if not torch.equal(copy, policys.to("cpu", copy.dtype)):
            raise CheckpointError(
                f"{name} of this module is not the policy's {whose}: it belongs to another policy version. Give the "
                f"{whose} of the same checkpoint"
            )
    _check(tensors, config)
    return config, tensors


def extract_mtp(checkpoint: Path, directory: Path) -> None:
    """Copy the MTP module out of a policy's checkpoint (sharded or not) into `directory`, as `write_mtp` leaves one.

    Bit for bit, without the copies of the policy's embedding and head. Raises `CheckpointError` as `read_mtp` does.
    """
    config, tensors = read_stored_mtp(checkpoint)
    document = export_mtp_config(config, tensors["eh_proj.weight"].dtype)
    write_files(directory, {prefix(config) + name: tensor for name, tensor in tensors.items()}, document)


def _layer_tensors(directory: Path, where: str) -> dict[str, Tensor]:
    """The tensors whose names begin with `where`, without it, from one file or from those that an index names."""
    index = read_index(directory)
    names = {MODEL_FILE} if index is None else {file for name, file in index.items() if name.startswith(where)}
    files = {directory / name for name in names}
    tensors: dict[str, Tensor] = {}
    for path in sorted(files):
        with opened(path) as file:
            mine = [name for name in file.keys() if name.startswith(where)]  # noqa: SIM118 - not a mapping
            tensors |= {name.removeprefix(where): file.get_tensor(name) for name in mine}
    if not tensors:
        raise CheckpointError(
            f"{directory} holds no {where}*: this checkpoint has no MTP module. Train an EAGLE-3 drafter instead"
        )
    return tensors


def _check(tensors: Mapping[str, Tensor], config: MtpConfig) -> None:
    check_mtp_header({n: (tuple(t.shape), _NAMES.get(t.dtype, str(t.dtype))) for n, t in tensors.items()}, config)
    for name, tensor in tensors.items():
        if not bool(torch.isfinite(tensor).all()):
            raise CheckpointError(f"{name} holds NaN or infinity; this module must not be served")
