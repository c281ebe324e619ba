"""Tiny randomly initialised models of every family that has something of its own, from transformers' own classes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers as tf
from torch import nn

VOCAB = 61
LAYERS = 6
#: Sizes that every family's config takes.
_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 2,
    "eos_token_id": 1,
}
_EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
_GEMMA: dict[str, Any] = {"head_dim": 8, "sliding_window": 4, "query_pre_attn_scalar": 8}
_LLAMA4: dict[str, Any] = {
    "head_dim": 8,
    "intermediate_size_mlp": 48,
    "num_local_experts": 4,
    "attention_chunk_size": 8,
}
_GEMMA4: dict[str, Any] = {
    "head_dim": 8,
    "global_head_dim": 16,
    "sliding_window": 4,
    "vocab_size_per_layer_input": VOCAB,
}
_VISION: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 8,
    "patch_size": 4,
}
_QWEN3_NEXT: dict[str, Any] = _EXPERTS | {
    "head_dim": 8,
    "num_experts": 4,
    "shared_expert_intermediate_size": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "full_attention_interval": 3,
}
_LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
}
_DEEPSEEK: dict[str, Any] = _LATENT | {
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 2,
    "moe_intermediate_size": 16,
    "num_experts_per_tok": 2,
}
_GRANITE: dict[str, Any] = {"embedding_multiplier": 6.0, "logits_scaling": 4.0}
_MAMBA: dict[str, Any] = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_expand": 2}
_GRANITE_HYBRID: dict[str, Any] = _GRANITE | _MAMBA | {"layers_block_type": ["mamba", "attention"] * (LAYERS // 2)}
_FALCON_H1: dict[str, Any] = _MAMBA | {"head_dim": 8, "mamba_d_ssm": 64}


def _text(config: str, model: str, **own: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        made = getattr(tf, config)(**(_COMMON | {"attn_implementation": "eager"} | own))
        family: nn.Module = getattr(tf, model)(made)
        return family

    return build


def _gemma3_vision() -> nn.Module:
    text = tf.Gemma3TextConfig(**(_COMMON | _GEMMA))
    vision = tf.SiglipVisionConfig(**_VISION)
    family: nn.Module = tf.Gemma3ForConditionalGeneration(tf.Gemma3Config(text_config=text, vision_config=vision))
    return family


def _llama4_vision() -> nn.Module:
    text = tf.Llama4TextConfig(**(_COMMON | _LLAMA4))
    vision = tf.Llama4VisionConfig(**(_VISION | {"vision_output_dim": 16, "projector_input_dim": 16}))
    family: nn.Module = tf.Llama4ForConditionalGeneration(tf.Llama4Config(text_config=text, vision_config=vision))
    return family


def _gemma4_vision() -> nn.Module:
    text = tf.Gemma4TextConfig(**(_COMMON | _GEMMA4 | {"final_logit_softcapping": 5.0}))
    family: nn.Module = tf.Gemma4ForConditionalGeneration(
        tf.Gemma4Config(text_config=text, vision_config=None, audio_config=None)
    )
    return family


#: name -> how to build it. Untied heads are untied by the config, so both kinds appear.
FAMILIES: dict[str, Callable[[], nn.Module]] = {
    "qwen3": _text("Qwen3Config", "Qwen3ForCausalLM", head_dim=8, tie_word_embeddings=True),
    "qwen3 moe": _text("Qwen3MoeConfig", "Qwen3MoeForCausalLM", head_dim=8, num_experts=4, **_EXPERTS),
    "llama 3": _text("LlamaConfig", "LlamaForCausalLM", tie_word_embeddings=False),
    "llama 4 text": _text("Llama4TextConfig", "Llama4ForCausalLM", **_LLAMA4),
    "llama 4 nested": _llama4_vision,
    "gpt-oss": _text("GptOssConfig", "GptOssForCausalLM", head_dim=8, num_local_experts=4, sliding_window=4),
    "gemma 2": _text("Gemma2Config", "Gemma2ForCausalLM", **_GEMMA, final_logit_softcapping=5.0),
    "gemma 3": _text("Gemma3TextConfig", "Gemma3ForCausalLM", **_GEMMA),
    "gemma 3 soft-capped": _text("Gemma3TextConfig", "Gemma3ForCausalLM", **_GEMMA, final_logit_softcapping=5.0),
    "gemma 3 nested": _gemma3_vision,
    "gemma 4": _text("Gemma4TextConfig", "Gemma4ForCausalLM", **_GEMMA4, final_logit_softcapping=5.0),
    "gemma 4 nested": _gemma4_vision,
    "glm 4.5": _text("Glm4MoeConfig", "Glm4MoeForCausalLM", head_dim=8, n_routed_experts=4, **_EXPERTS),
    "mistral": _text("MistralConfig", "MistralForCausalLM", head_dim=8, sliding_window=4),
    "qwen3 next": _text("Qwen3NextConfig", "Qwen3NextForCausalLM", **_QWEN3_NEXT),
    "deepseek-v3": _text("DeepseekV3Config", "DeepseekV3ForCausalLM", **_DEEPSEEK),
    "cohere": _text("CohereConfig", "CohereForCausalLM", logit_scale=0.25),
    "granite": _text("GraniteConfig", "GraniteForCausalLM", **_GRANITE),
    "minicpm 3": _text("MiniCPM3Config", "MiniCPM3ForCausalLM", **_LATENT, dim_model_base=8),
    "nanochat": _text("NanoChatConfig", "NanoChatForCausalLM", head_dim=8, final_logit_softcapping=5.0),
    "hyperclova": _text("HyperCLOVAXConfig", "HyperCLOVAXForCausalLM", logits_scaling=0.5),
}

#: Their cousins, which differ from them in nothing but layers: only their logits are looked at.
COUSINS: dict[str, Callable[[], nn.Module]] = {
    "vault gemma": _text("VaultGemmaConfig", "VaultGemmaForCausalLM", **_GEMMA, final_logit_softcapping=5.0),
    "cohere 2": _text("Cohere2Config", "Cohere2ForCausalLM", logit_scale=0.25, sliding_window=4),
    "cohere 2 moe": _text("Cohere2MoeConfig", "Cohere2MoeForCausalLM", logit_scale=0.25, num_experts=4, **_EXPERTS),
    "granite moe": _text("GraniteMoeConfig", "GraniteMoeForCausalLM", **_GRANITE, num_local_experts=4),
    "granite moe shared": _text("GraniteMoeSharedConfig", "GraniteMoeSharedForCausalLM", **_GRANITE),
    "granite moe hybrid": _text("GraniteMoeHybridConfig", "GraniteMoeHybridForCausalLM", **_GRANITE_HYBRID),
    "falcon h1": _text("FalconH1Config", "FalconH1ForCausalLM", **_FALCON_H1, lm_head_multiplier=0.25),
    "recurrent gemma": _text(
        "RecurrentGemmaConfig", "RecurrentGemmaForCausalLM", lru_width=32, attention_window_size=16, logits_soft_cap=5.0
    ),
}


def tiny(family: str) -> Any:
    """A model whose distributions are far from uniform: under the usual initialisation mistakes would drown."""
    torch.manual_seed(0)
    model = (FAMILIES | COUSINS)[family]().eval().float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim >= 2 and "vision" not in name:
                # Embeddings stay moderate: a head tied to them must not saturate.
                parameter.normal_(std=0.6 if "embed" in name or "lm_head" in name else 0.15)
            elif name.endswith("norm.weight"):
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return model
