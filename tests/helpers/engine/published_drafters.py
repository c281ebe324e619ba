"""Small drafters with a config.json like those of the drafters that speculators' quick start serves.

The files themselves were not at hand. Fields and values are composed of what is on record: the converter's printout
(speculators pull request 53), printouts of configs of drafters that speculators trained (its issue 1065), and what is
reported of two drafters: the one of Qwen3-8B has 16 tensors and names no layers, the one of gpt-oss-20b has 17, says
null for them, has a draft vocabulary of 64,000 and both switches on. That the first one scales its rotary positions as
Llama 3 is second-hand; rope_theta, position limit and eps there are guesses, and the copy for Llama 3.3 is made up. The
files bring the policy's embedding, as theirs do.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save_file

from drafter.model.eagle3 import Eagle3Drafter
from drafter.vocabulary import DraftVocabulary
from rl_hooks.format.eagle3 import parse_config, with_layers
from rl_hooks.format.layouts import canonical_config

_LLAMA3: Final[dict[str, Any]] = {
    "factor": 8.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}


def _speculators(name: str, architecture: str) -> dict[str, Any]:
    return {
        "algorithm": "eagle3",
        "default_proposal_method": "greedy",
        "proposal_methods": [
            {"accept_tolerance": 0.0, "proposal_type": "greedy", "speculative_tokens": 3, "verifier_accept_k": 1}
        ],
        "verifier": {"architectures": [architecture], "name_or_path": name},
    }


_QWEN3_AND_GPT_OSS: Final[dict[str, dict[str, Any]]] = {
    # As speculators' converter wrote them, with transformers 4.
    "Qwen3-8B": {
        "architectures": ["Eagle3Speculator"],
        "auto_map": {"": "eagle3.Eagle3SpeculatorConfig"},
        "draft_vocab_size": 32000,
        "has_no_defaults_at_init": False,
        "norm_before_residual": True,
        "speculators_config": _speculators("Qwen/Qwen3-8B", "Qwen3ForCausalLM"),
        "speculators_model_type": "eagle3",
        "speculators_version": "0.1.0.dev21",
        "target_hidden_size": None,
        "torch_dtype": "bfloat16",
        "transformer_layer_config": {
            "attention_bias": False,
            "attention_dropout": 0.0,
            "head_dim": 128,
            "hidden_act": "silu",
            "hidden_size": 4096,
            "initializer_range": 0.02,
            "intermediate_size": 12288,
            "max_position_embeddings": 40960,
            "mlp_bias": False,
            "model_type": "llama",
            "num_attention_heads": 32,
            "num_hidden_layers": 1,
            "num_key_value_heads": 8,
            "pretraining_tp": 1,
            "rms_norm_eps": 1e-06,
            "rope_scaling": _LLAMA3,
            "rope_theta": 10000.0,
            "use_cache": True,
            "vocab_size": 151936,
        },
        "transformers_version": "4.53.2",
    },
    # As speculators trains them, with transformers 5.
    "gpt-oss-20b": {
        "architectures": ["Eagle3DraftModel"],
        "auto_map": {"": "config.Eagle3SpeculatorConfig"},
        "draft_vocab_size": 64000,
        "dtype": "bfloat16",
        "eagle_aux_hidden_state_layer_ids": None,
        "embed_requires_grad": False,
        "has_no_defaults_at_init": False,
        "norm_before_fc": True,
        "norm_before_residual": True,
        "speculators_config": _speculators("openai/gpt-oss-20b", "GptOssForCausalLM"),
        "speculators_model_type": "eagle3",
        "speculators_version": "0.5.0.dev0",
        "target_hidden_size": None,
        "tie_word_embeddings": False,
        "transformer_layer_config": {
            "attention_bias": False,
            "attention_dropout": 0.0,
            "head_dim": 64,
            "hidden_act": "silu",
            "hidden_size": 2880,
            "initializer_range": 0.02,
            "intermediate_size": 2880,
            "layer_types": ["full_attention"],
            "max_position_embeddings": 131072,
            "mlp_bias": False,
            "model_type": "llama",
            "num_attention_heads": 64,
            "num_hidden_layers": 1,
            "num_key_value_heads": 8,
            "pretraining_tp": 1,
            "rms_norm_eps": 1e-05,
            "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
            "use_cache": True,
            "vocab_size": 201088,
        },
        "transformers_version": "5.3.0",
    },
}
#: By the policy that each drafts for.
PUBLISHED: Final[Mapping[str, dict[str, Any]]] = {
    **_QWEN3_AND_GPT_OSS,
    # A policy's own scaled positions, in the words of transformers 5.
    "Llama-3.3-70B": {
        **{name: value for name, value in _QWEN3_AND_GPT_OSS["gpt-oss-20b"].items() if name != "norm_before_fc"},
        "draft_vocab_size": 32000,
        "fc_norm": False,
        "norm_before_fc": False,
        "norm_output": False,
        "eagle_aux_hidden_state_layer_ids": [2, 40, 77],
        "speculators_config": _speculators("meta-llama/Llama-3.3-70B-Instruct", "LlamaForCausalLM"),
        "transformer_layer_config": {
            **_QWEN3_AND_GPT_OSS["gpt-oss-20b"]["transformer_layer_config"],
            "rope_parameters": {**_LLAMA3, "rope_theta": 500000.0},
        },
    },
}
_SIZES: Final[dict[str, int]] = {
    "intermediate_size": 96,
    "head_dim": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def small_config(name: str, hidden: int, vocabulary: int, drafted: int) -> dict[str, Any]:
    """The published config with other sizes, and layers of a policy of eight where it names some."""
    document: dict[str, Any] = json.loads(json.dumps(PUBLISHED[name]))
    document["draft_vocab_size"] = drafted
    document["transformer_layer_config"] |= {**_SIZES, "hidden_size": hidden, "vocab_size": vocabulary}
    if document.get("eagle_aux_hidden_state_layer_ids"):
        document["eagle_aux_hidden_state_layer_ids"] = [2, 4, 5]
    return document


def write_published(directory: Path, name: str, embedding: torch.Tensor, seed: int, drafted: int = 96) -> Path:
    """A drafter of the published form with random weights, for a policy with this embedding [V, H]."""
    vocabulary, hidden = embedding.shape
    document = small_config(name, hidden, vocabulary, drafted)
    config = parse_config(with_layers(canonical_config(document), (2, 4, 5)))
    kept = DraftVocabulary(torch.arange(vocabulary - drafted, vocabulary), vocabulary)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        drafter = Eagle3Drafter(config, kept)
        for parameter in drafter.parameters():
            parameter.data = (
                0.1 * torch.randn_like(parameter) if parameter.ndim == 2 else 1 + 0.2 * torch.randn_like(parameter)
            )
    tensors = {n.replace("midlayer.", "layers.0."): p.data.bfloat16() for n, p in drafter.named_parameters()}
    tensors |= {"embed_tokens.weight": embedding.bfloat16().clone(), "d2t": kept.d2t, "t2d": kept.t2d}
    directory.mkdir(parents=True)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(document, indent=2) + "\n")
    return directory
