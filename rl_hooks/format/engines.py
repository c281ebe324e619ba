"""What one engine cannot take, although it is a drafter: the one list of them.

The engine's adapter, its plugin or loader, `draftalign inspect` and `draftalign convert` say the same sentence.
"""

from __future__ import annotations

from typing import Final, Literal

from rl_hooks.format.drafter import Sizes
from rl_hooks.format.mtp import LatentSizes, MtpConfig

EngineName = Literal["vllm", "sglang"]
#: Types of policies whose MTP layer the vLLM plugin can check and load.
_VLLM_MODULES: Final = ("deepseek_v3", "glm4_moe")


def limits(engine: EngineName, sizes: Sizes) -> list[str]:
    """Why the engine can never take such a drafter, a sentence each; none if it can."""
    if isinstance(sizes, MtpConfig):
        if engine == "sglang":
            return ["SGLang (as of 0.5.23) takes no MTP module while it serves"]
        if unknown := unknown_to_vllm(sizes.model_type):
            return [unknown]
        if isinstance(sizes.attention, LatentSizes) and not sizes.attention.interleaved:
            return [
                "rope_interleave is false, which vLLM (as of 0.32) does not read: it would compute another function"
            ]
        return []
    found = []
    if engine == "sglang" and sizes.norm_before_residual:
        found.append(
            "norm_before_residual is true: SGLang (as of 0.5.23) cannot serve it, it would compute another function "
            "without an error, at a fraction of its acceptance; vLLM serves it"
        )
    if engine == "sglang" and sizes.num_hidden_layers > 1:
        found.append(
            f"it has {sizes.num_hidden_layers} layers: SGLang (as of 0.5.23) serves only drafters of one layer"
        )
    return found


def unknown_to_vllm(model_type: object) -> str | None:
    """Why the plugin cannot swap the MTP module of such a policy, whatever its other fields are; None if it may."""
    known = "draftalign's vLLM plugin swaps MTP modules of DeepSeek-V3's and GLM-4.5's form"
    return None if model_type in _VLLM_MODULES else f"{known}, this one is of {model_type!r}"
