"""A drafter's files in speculators' layout, translated into ours: config fields and tensor names, without torch.

Such files may come where ours are expected: with a registration, as the drafter that an engine or a trainer starts
with; in an engine that keeps its first drafter; and to `drafter.files.formats`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from rl_hooks.format.eagle3 import CheckpointError, with_defaults

#: What transformers' LlamaConfig assumes where a config is silent.
ROPE_THETA: Final = 10_000.0
RESIDUAL_UNSAID: Final = (
    "config.json does not say norm_before_residual: vLLM takes that for true, speculators for false. Say which the "
    "drafter was trained with"
)
#: Of the target: engines share them with the policy or build them again, and a trainer reads them from the target.
_TARGETS_OWN: Final = ("embed_tokens.weight", "verifier_lm_head.weight", "verifier_norm.weight")


def is_nested(document: Mapping[str, Any]) -> bool:
    """Whether a config.json is in speculators' layout."""
    return "speculators_model_type" in document or "transformer_layer_config" in document


def flattened(document: Mapping[str, Any]) -> dict[str, Any]:
    """A speculators config as a flat one. Raises `CheckpointError`."""
    kind = document.get("speculators_model_type")
    if kind != "eagle3":
        raise CheckpointError(f"speculators_model_type must be eagle3, got {kind!r}; other kinds are not EAGLE-3")
    layer = document.get("transformer_layer_config")
    if not isinstance(layer, Mapping):
        raise CheckpointError("config.json: a speculators config needs transformer_layer_config")
    own = {name: value for name, value in document.items() if name not in ("transformer_layer_config", "model_type")}
    return {**layer, "architectures": None, **own}  # the layer's are the policy's


def canonical_config(document: Mapping[str, Any]) -> dict[str, Any]:
    """A speculators config as a flat one. Missing and null fields get the values that its readers give them.

    Raises `CheckpointError` where its readers give a field different values.
    """
    flat = {name: value for name, value in flattened(document).items() if value is not None}
    if "norm_before_residual" not in flat:
        raise CheckpointError(f"{RESIDUAL_UNSAID}: write it into config.json")
    return with_rope_theta(with_defaults(flat))


def with_rope_theta(flat: Mapping[str, Any]) -> dict[str, Any]:
    """A flat config with the rotary base that transformers assumes where it names none."""
    places = (flat, flat.get("rope_parameters"), flat.get("rope_scaling"))
    named = any("rope_theta" in place for place in places if isinstance(place, Mapping))
    return dict(flat) if named else {**flat, "rope_theta": ROPE_THETA}


def canonical_names(names: Iterable[str]) -> dict[str, str]:
    """The file's name of each tensor of a speculators file, by ours; without those that are the target's.

    Raises `CheckpointError` for two names of one tensor.
    """
    found: dict[str, str] = {}
    for name in names:
        if name.removeprefix("model.") in _TARGETS_OWN:
            continue
        canonical = name.replace("layers.0.", "midlayer.", 1)
        if canonical in found:
            raise CheckpointError(
                f"both midlayer.* and layers.0.* ({canonical} twice), which are two names of one layer: leave out "
                "those that are not the drafter's"
            )
        found[canonical] = name
    return found
