"""Policies that ship an MTP module, made by hand, for a real vLLM.

Their one layer adds nothing, so the next token depends on the last one only: a module that reads the embedding of that
token knows everything, whatever its attention and experts do to it is noise, and the noise is what is compared.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from drafter.batch import RolloutBatch
from drafter.files.mtp import write_mtp
from drafter.model.pointwise import rms_norm
from drafter.mtp.module import MtpConfig, MtpDrafter
from drafter.policy import Policy, TargetHead
from examples.policy import BASE_POLICY

HIDDEN, VOCABULARY, HEADS = 64, 105, 2
_COMMON: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "intermediate_size": 128,
    "moe_intermediate_size": 32,
    "num_attention_heads": HEADS,
    "num_hidden_layers": 1,
    "num_nextn_predict_layers": 1,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "hidden_act": "silu",
    "torch_dtype": "float32",
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "first_k_dense_replace": 0,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "glm4_moe": _COMMON
    | {
        "architectures": ["Glm4MoeForCausalLM"],
        "model_type": "glm4_moe",
        "num_key_value_heads": 1,
        "head_dim": 32,
        "attention_bias": True,
        "use_qk_norm": True,
        "partial_rotary_factor": 0.5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    },
    "deepseek_v3": _COMMON
    | {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "num_key_value_heads": HEADS,
        "q_lora_rank": 24,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 24,
        "qk_rope_head_dim": 8,
        "v_head_dim": 32,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "moe_layer_freq": 1,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
}


def embedding_and_head() -> tuple[Tensor, Tensor]:
    """Both [V, H], untied."""
    random = torch.Generator().manual_seed(0)
    return torch.randn(VOCABULARY, HIDDEN, generator=random), torch.randn(VOCABULARY, HIDDEN, generator=random) * 0.4


def shared() -> Policy:
    """What the module shares with the policy."""
    embed_tokens, head = embedding_and_head()
    return Policy(0, embed_tokens, TargetHead(head))


def module(family: str, *, trained: bool) -> MtpDrafter:
    """A random module, or one that copies the last token's embedding and adds what its other weights make of it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        drafter = MtpDrafter(MtpConfig.from_target(CONFIGS[family]))
        with torch.no_grad():
            for name, parameter in drafter.named_parameters():
                if name.endswith(("_proj.weight", "gate.weight", "bias")):
                    parameter.copy_(torch.randn_like(parameter) * 0.12)
                elif name.endswith("norm.weight"):
                    parameter.copy_(1 + 0.1 * torch.randn_like(parameter))
            if trained:
                noise = 0.05 * torch.randn(HIDDEN, 2 * HIDDEN)
                drafter.eh_proj.weight.copy_(torch.eye(HIDDEN, 2 * HIDDEN) * 4 + noise)
    return drafter


def write_policy(family: str, directory: Path) -> Path:
    """A checkpoint as such policies are published: the random module in it, with its copies of embedding and head."""
    directory.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copyfile(BASE_POLICY / name, directory / name)
    (directory / "config.json").write_text(json.dumps(CONFIGS[family]))
    embedding, head = embedding_and_head()
    own = module(family, trained=False)
    tensors = {"model.embed_tokens.weight": embedding, "lm_head.weight": head, "model.norm.weight": torch.ones(HIDDEN)}
    skipped = ("enorm", "hnorm", "eh_proj", "shared_head")
    for name, tensor in own.state_dict().items():
        tensors["model.layers.1." + name] = tensor
        if not name.startswith(skipped):  # the same kind of layer, with nothing to add
            idle = torch.ones_like(tensor) if "norm" in name else torch.zeros_like(tensor)
            tensors["model.layers.0." + name] = idle
    tensors |= {"model.layers.1.embed_tokens.weight": embedding, "model.layers.1.shared_head.head.weight": head}
    save_file({n: t.clone() for n, t in tensors.items()}, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


@torch.no_grad()
def batch_of_texts(texts: Sequence[tuple[list[int], list[int]]]) -> RolloutBatch:
    """Prompts and completions as a trainer would send them: the policy's state is its normed embedding."""
    embedding, head = embedding_and_head()
    lengths = [len(prompt) + len(text) for prompt, text in texts]
    input_ids = torch.tensor([token for prompt, text in texts for token in prompt + text])
    last = rms_norm(embedding[input_ids], torch.ones(HIDDEN), _COMMON["rms_norm_eps"])
    logits = last @ head.T
    logprobs = torch.zeros(len(input_ids))
    logprobs[1:] = logits[:-1].log_softmax(-1).gather(-1, input_ids[1:, None])[:, 0]
    return RolloutBatch(
        input_ids=input_ids,
        cu_seqlens=torch.tensor([0, *lengths]).cumsum(0),
        loss_mask=torch.tensor([place >= len(prompt) for prompt, text in texts for place in range(len(prompt + text))]),
        aux_hidden=torch.zeros(len(input_ids), 0),
        last_hidden=last,
        logprobs=logprobs,
        logsumexp=logits.logsumexp(-1),
        rollout_ids=tuple(str(number) for number in range(len(texts))),
        policy_version=0,
    )


def write_module(family: str, directory: Path, *, trained: bool = True) -> Path:
    """The module as the service publishes one."""
    directory.mkdir()
    write_mtp(directory, module(family, trained=trained))
    return directory
