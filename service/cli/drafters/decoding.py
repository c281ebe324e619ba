"""`draftalign eval --decode`: decode with a policy from a directory, by the reference decoders.

The model may come from anywhere: none of its code is run, and nothing is downloaded.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from service.errors import ConfigurationError

if TYPE_CHECKING:
    from drafter.batch import RolloutBatch
    from drafter.model.eagle3 import Eagle3Drafter


def check_decodable(source: Path, *, mtp: bool) -> None:
    """Raise where the reference decoders do not support the drafter or the files at `source`. Loads no weights."""
    if mtp:
        raise ConfigurationError("--decode is for EAGLE-3 drafters: the reference decoders draft with no MTP module")
    if not (source / "config.json").is_file():  # transformers would look a name up on the hub
        raise ConfigurationError(f"{source} holds no config.json; --decode takes the directory of a transformers model")
    if (source / "adapter_config.json").exists():  # whether the adapter is loaded too would depend on peft
        raise ConfigurationError(
            f"{source} holds an adapter (adapter_config.json); merge it into its base model and save that, then give "
            "--decode its directory"
        )


def _load_policy(source: Path) -> Any:
    """The transformers model at `source`, in float32 on the CPU: all of its own weights, none of its code."""
    import torch
    import transformers
    from safetensors import SafetensorError

    local = {"trust_remote_code": False, "local_files_only": True}
    try:
        config = transformers.AutoConfig.from_pretrained(source, **local)
        # A config may name kernels to download; without a name, transformers uses its own (sdpa or eager).
        config._attn_implementation = config._experts_implementation = None
        policy, found = transformers.AutoModelForCausalLM.from_pretrained(
            source,
            config=config,
            dtype=torch.float32,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are refused below, by name
            **local,
        )
    except (OSError, ValueError, KeyError, RuntimeError, ImportError, SafetensorError) as error:
        raise ConfigurationError(f"transformers cannot load {source}: {error}") from error
    wrong = sorted({*found["missing_keys"], *(name for name, *_ in found["mismatched_keys"])})
    if wrong:
        raise ConfigurationError(
            f"{source} lacks {len(wrong)} of the weights that its config.json asks for, or has them in another shape "
            f"({', '.join(wrong[:3])}{', ...' * (len(wrong) > 3)}); they would be random: save or fetch the model again"
        )
    return policy.eval()


def decode_with(
    source: Path, drafter: Eagle3Drafter, batches: Iterable[RolloutBatch], *, prompts: int, depth: int, max_tokens: int
) -> dict[str, Any]:
    """Decode prompts of the rollouts with the policy at `source`, in float32 on the CPU."""
    from drafter.reference.decoders import compare_decoders, distinct_prompts

    chosen = distinct_prompts(batches, prompts)
    if not chosen:
        raise ConfigurationError("no rollout has a prompt to decode after")
    policy = _load_policy(source)
    rows, hidden = policy.get_input_embeddings().weight.shape
    if hidden != drafter.config.target_hidden_size or rows < drafter.config.vocab_size:
        raise ConfigurationError(
            f"{source} embeds {rows} tokens in {hidden} numbers, the drafter is for {drafter.config.vocab_size} tokens "
            f"in {drafter.config.target_hidden_size}: not its policy"
        )
    ends = policy.generation_config.eos_token_id
    return compare_decoders(policy, drafter.float(), chosen, depth=depth, max_tokens=max_tokens, eos_id=ends)
