"""The modules that vLLM builds of a drafter: which it shares, how many elements each holds. No vLLM is imported.

What a drafter's files hold is `rl_hooks.format`'s, for EAGLE-3 drafters and for a policy's own MTP module alike.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import safe_open
from torch import Tensor

from rl_hooks.engines.candidate import DrafterRefusedError
from rl_hooks.format.drafter import MODEL_FILE, Sizes, read_index, weight_shapes
from rl_hooks.format.eagle3 import DrafterConfig, DrafterError
from rl_hooks.format.engines import unknown_to_vllm
from rl_hooks.format.mtp import GroupedSizes, MtpConfig, parse_mtp_config, prefix

#: As vLLM renames a policy's model type for its module.
_RENAMED: Final[Mapping[str, str]] = {"deepseek_mtp": "deepseek_v3", "glm4_moe_mtp": "glm4_moe"}


def running_module(config: Mapping[str, Any]) -> MtpConfig:
    """Sizes of the MTP module that vLLM runs, by vLLM's copy of the policy's config. Raises `DrafterRefusedError`."""
    own = {**config, "model_type": _RENAMED.get(str(config.get("model_type")), config.get("model_type"))}
    if unknown := unknown_to_vllm(own["model_type"]):
        raise DrafterRefusedError(unknown)
    for field in ("rope_parameters", "rope_scaling"):
        if isinstance(rope := config.get(field), Mapping) and rope:
            # vLLM renames DeepSeek's YaRN once it has built the layer.
            kind = str(rope.get("rope_type", rope.get("type", "default"))).removeprefix("deepseek_")
            own[field] = {**rope, "rope_type": kind}
    try:
        return parse_mtp_config(own)
    except DrafterError as error:
        raise DrafterRefusedError(str(error)) from error


def shared_modules(sizes: Sizes) -> frozenset[str]:
    """Modules of vLLM that the drafter may share with the policy, because no file brings them.

    An EAGLE-3 drafter must have a head of its own: a swap would overwrite the policy's.
    """
    if isinstance(sizes, DrafterConfig):
        return frozenset({"model.embed_tokens"})
    return frozenset({"model.embed_tokens", "lm_head", f"{prefix(sizes)}shared_head.head"})


def float32_weights(sizes: Sizes) -> frozenset[str]:
    """Weights that vLLM keeps in float32 whatever its dtype is: what a router adds to its scores, and GLM's router."""
    if isinstance(sizes, DrafterConfig):
        return frozenset()
    names = ["e_score_correction_bias"] + (["weight"] if isinstance(sizes.attention, GroupedSizes) else [])
    return frozenset(f"{prefix(sizes)}mlp.gate.{name}" for name in names)


def unread_weights(sizes: Sizes) -> dict[str, tuple[int, ...]]:
    """Parameters that vLLM builds in later layers and never reads: no file has them, but a reload needs them."""
    if not isinstance(sizes, DrafterConfig):
        return {}
    return {f"layers.{i}.hidden_norm.weight": (sizes.hidden_size,) for i in range(1, sizes.num_hidden_layers)}


def module_elements(sizes: Sizes) -> dict[str, int]:
    """How many elements each vLLM module has on one rank, its submodules included. To compare with what vLLM built.

    Attention and feed-forward of an MTP module count as a whole, since kernels cut them differently. Biases do not
    count: vLLM's reload leaves them in place and records no shape of them.
    """
    elements: dict[str, int] = {}
    for name, shape in {**weight_shapes(sizes), **unread_weights(sizes)}.items():
        if not name.endswith("bias"):
            module = _module(name, sizes)
            elements[module] = elements.get(module, 0) + math.prod(shape)
    return elements


def _module(name: str, sizes: Sizes) -> str:
    """The vLLM module that a weight becomes part of: query, key and value are stacked, gate and up as well."""
    if isinstance(sizes, MtpConfig):
        where = prefix(sizes)
        short = name.removeprefix(where)
        if short.startswith(("enorm.", "hnorm.", "eh_proj.", "shared_head.")):
            return where + short.removesuffix(".weight")
        return f"{where}mtp_block.{short.partition('.')[0]}"
    module = name.removesuffix(".weight").replace("midlayer.", "layers.0.")
    for part, stacked in (("q", "qkv"), ("k", "qkv"), ("v", "qkv"), ("gate", "gate_up"), ("up", "gate_up")):
        module = module.replace(f".{part}_proj", f".{stacked}_proj")
    return module if module == "lm_head" else f"model.{module}"


def read_own_module(policy: Path, sizes: MtpConfig, dtype: torch.dtype) -> dict[str, Tensor]:
    """The module that a policy's checkpoint ships, sharded or not: what vLLM loaded when it started.

    Raises OSError, `DrafterError`, or `DrafterRefusedError` where it is not there as `sizes` say.
    """
    wanted, float32 = weight_shapes(sizes), float32_weights(sizes)
    places = read_index(policy)
    files = {MODEL_FILE} if places is None else {places[name] for name in wanted if name in places}
    tensors: dict[str, Tensor] = {}
    for path in sorted(policy / file for file in files):
        with safe_open(str(path), framework="pt", device="cpu") as file:
            for name in wanted.keys() & set(file.keys()):
                tensors[name] = file.get_tensor(name).to(torch.float32 if name in float32 else dtype)
    if {name: tuple(tensor.shape) for name, tensor in tensors.items()} != wanted:
        raise DrafterRefusedError(f"{policy} does not hold the module that its configuration describes")
    return tensors
