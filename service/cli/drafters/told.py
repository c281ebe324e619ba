"""What `inspect` and `eval` print: facts of a drafter, and tables of what it would have had accepted."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from drafter.files.formats import Imported
    from drafter.replay.evaluate import Evaluation


def facts_of(imported: Imported) -> dict[str, Any]:
    """The facts of an EAGLE-3 drafter."""
    from drafter.files.checkpoint import config_fingerprint

    stored = imported.stored
    config, vocabulary = stored.config, stored.vocabulary
    parameters = sum(t.numel() for t in stored.weights.values())
    return {
        "layout": imported.layout,
        "parameters": parameters,
        "dtype": str(stored.dtype).removeprefix("torch."),
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "heads": f"{config.num_attention_heads} queries, {config.num_key_value_heads} keys, of {config.head_dim}",
        "rope_theta": config.rope_theta,
        "rope_scaling": config.rope_scaling and {"rope_type": "llama3", **asdict(config.rope_scaling)},
        "aux_layers_entering": list(config.aux_layers),
        "aux_layers_outputs": [layer - 1 for layer in config.aux_layers],
        "draft_vocabulary": f"{len(vocabulary)} of {vocabulary.vocab_size} tokens",
        "d2t_sha256": vocabulary.digest,
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": config.norm_before_fc,
        "config_fingerprint": config_fingerprint(config, vocabulary),
        "verifier": imported.verifier.name_or_path,
        "notes": list(imported.notes),
    }


def mtp_facts(source: Path) -> dict[str, Any]:
    """The facts of an MTP module in a directory."""
    from drafter.files.checkpoint import config_fingerprint
    from drafter.files.formats import engine_limits
    from drafter.files.mtp import prefix, read_stored_mtp
    from drafter.vocabulary import DraftVocabulary
    from rl_hooks.format.mtp import GroupedSizes

    config, tensors = read_stored_mtp(source)
    experts, kind = config.experts, "grouped" if isinstance(config.attention, GroupedSizes) else "latent"
    return {
        "layout": "mtp",
        "policy": config.model_type,
        "tensors": f"{prefix(config)}* ({len(tensors)})",
        "parameters": sum(t.numel() for t in tensors.values()),
        "dtype": str(tensors["eh_proj.weight"].dtype).removeprefix("torch."),
        "hidden_size": config.hidden_size,
        "attention": f"{kind}, {config.attention.heads} heads",
        "feed_forward": "dense" if experts is None else f"{experts.routed} experts, {experts.chosen} chosen",
        "draft_vocabulary": f"all {config.vocab_size} tokens, by the policy's head",
        "zero_first_embedding": config.zero_first_embedding,
        "normed_feedback": config.normed_feedback,
        "config_fingerprint": config_fingerprint(config, DraftVocabulary.full(config.vocab_size)),
        "notes": [
            "an engine starts with the one in the policy's checkpoint (docs/guide/vllm.md)",
            *engine_limits(config),
        ],
    }


def table(result: Evaluation, files: int) -> Iterator[str]:
    """The report, line by line: one row per drafter, then one per position."""
    facts = result.summary()
    low, high = facts["policy_versions"]
    yield (
        f"{facts['rollouts']} rollouts of {facts['prompts']} prompts in {files} files, policy versions {low} to "
        f"{high}, {facts['tokens_by_rounds']:.0f} tokens emitted by rounds of depth {facts['depth']}"
    )
    yield ""
    yield f"{'':<20}{'α':>8}   {'95% interval':<18}{'rounds':>10}"
    for name, figures in facts["drafters"].items():
        interval = f"[{_number(figures['interval'][0])}, {_number(figures['interval'][1])}]"
        yield f"{name:<20}{_number(figures['alpha']):>8}   {interval:<18}{figures['rounds']:>10.0f}"
    yield ""
    yield "share of rounds that kept the draft at position and all before it (of the rounds that came to it)"
    yield f"{'':<20}" + "".join(f"{j:>16}" for j in range(1, facts["depth"] + 1))
    for name, figures in facts["drafters"].items():
        pairs = zip(figures["position_acceptance"], figures["conditional_acceptance"], strict=True)
        yield f"{name:<20}" + "".join(f"{f'{_number(joint)} ({_number(given)})':>16}" for joint, given in pairs)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
