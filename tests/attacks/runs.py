"""Hostile bodies of PUT /runs/{run}: configs and drafters that the worker cannot begin with.

Each killed the worker, or made its run's name unusable, while the API took it. `RUNS` maps what is wrong to the body,
the field at fault and words of the refusal. `TAKEN` maps what is odd in a config that the worker can begin with to the
fields of it, beside those of worker_fixtures.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import numpy as np
from helpers.service.service_fixtures import CONFIG, LAYERS, f32, run_file

from drafter.files.checkpoint import export_config
from drafter.files.mtp import export_mtp_config
from drafter.model.eagle3 import DrafterConfig
from rl_hooks import wire
from rl_hooks.format.eagle3 import tensor_shapes
from rl_hooks.format.mtp import MtpConfig, mtp_shapes, prefix

#: A drafter that fits the target of service_fixtures.
SIZES: Final = DrafterConfig.from_target(CONFIG, LAYERS, 20)


class HostileRun(NamedTuple):
    """A body, and how PUT answers it: 422 with this field, and these words in its detail."""

    body: bytes
    field: str
    words: str


def drafter_tensors(**changes: wire.Tensor | None) -> dict[str, wire.Tensor]:
    """The tensors of a sound drafter, `drafter.*`, but for some (None: left out)."""
    table: dict[str, wire.Tensor | None] = {n: f32(*shape) for n, shape in tensor_shapes(SIZES).items()}
    table["d2t"] = wire.Tensor.of(np.zeros(SIZES.draft_vocab_size, np.int64), "I64")
    table["t2d"] = wire.Tensor.of(np.arange(SIZES.vocab_size) < SIZES.draft_vocab_size, "BOOL")
    return {f"drafter.{n}": t for n, t in (table | changes).items() if t is not None}


def with_drafter(config: Mapping[str, Any] | None = None, tensors: Mapping[str, wire.Tensor] | None = None) -> bytes:
    """A run that brings a drafter: a sound one unless changed."""
    document = export_config(SIZES) if config is None else config
    return run_file(
        tensors=drafter_tensors() if tensors is None else tensors, metadata={"drafter_config": json.dumps(document)}
    )


#: An MTP module that fits that target.
_MODULE: Final = MtpConfig.from_target(
    CONFIG
    | {"kv_lora_rank": 4, "qk_nope_head_dim": 2, "qk_rope_head_dim": 2, "v_head_dim": 4, "moe_intermediate_size": 8}
    | {"n_routed_experts": 4, "num_experts_per_tok": 2}
)


def _with_module(**fields: Any) -> bytes:
    """A run that brings an MTP module, which is sound but for these fields of its config."""
    tensors = {f"drafter.{prefix(_MODULE)}{name}": f32(*shape) for name, shape in mtp_shapes(_MODULE).items()}
    return with_drafter(export_mtp_config(_MODULE) | fields, tensors)


def _with_yarn(theta: float = 10_000.0, **figures: float) -> bytes:
    """The same, its positions stretched by YaRN with these figures in place of its."""
    yarn = {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096, **figures}
    return _with_module(rope_theta=theta, rope_parameters=None, rope_scaling=yarn)


#: Field of the target's config -> values of it that no drafter from scratch can be sized by.
_CONFIGS: Final[dict[str, list[Any]]] = {
    "rope_scaling": ["x", 7, ["x"], True],
    "rope_parameters": ["x", [1], {"full_attention": "x"}, {"full_attention": {"rope_theta": []}}],
    "rope_theta": ["x", [1], {}, {"a": 1}, -1.0, 1e-300, 0.99, float("nan"), float("inf"), True, 10**400],
    "rms_norm_eps": ["x", [1], {"a": 1}, -1e-6, 1.5, float("nan"), True],
    "num_key_value_heads": ["x", [1], -1, 3, 1.5, 1 << 40],
    "head_dim": ["x", [8], -8, 7, 1 << 40, (1 << 24) - 2, 1026, 8.0],
    "num_attention_heads": ["x", [1], -1, 1 << 24, 1 << 60, 0, 16],
    "intermediate_size": ["x", [1], -16, 1 << 40, 1 << 24, None, 0],
    "max_position_embeddings": ["x", [1], -1, 1 << 40, 1e30],
}
#: These make no drafter what it is not: the default stands for them.
_HARMLESS: Final[list[tuple[str, Any]]] = [("rope_theta", {})]
#: Where another field is named than the one that was changed: the two do not fit each other.
_OTHER_WORDS: Final[dict[tuple[str, str], str]] = {
    ("rope_parameters", "{'full_attention': 'x'}"): "full_attention must be an object",
    ("rope_parameters", "{'full_attention': {'rope_theta': []}}"): "",
    ("num_attention_heads", "16"): "head_dim",
    ("num_attention_heads", "16777216"): "",
}


def _stretched(**other: Any) -> dict[str, Any]:
    """The config of a drafter whose rotary positions are stretched as Llama 3's, with these figures in place of its."""
    sound = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    return export_config(SIZES) | {"rope_scaling": {"rope_type": "llama3", **sound, **other}}


def _made() -> dict[str, HostileRun]:
    found: dict[str, HostileRun] = {}
    for field, values in _CONFIGS.items():
        for value in values:
            if (field, value) in _HARMLESS or value == {"full_attention": {"rope_theta": []}}:
                continue
            words = _OTHER_WORDS.get((field, str(value)), field)
            body = run_file(config=CONFIG | {field: value})
            found[f"{field} is {str(value)[:40]}"] = HostileRun(body, "config", words)
    sizes = {"vocab_size": 2, "hidden_size": 1 << 14, "intermediate_size": 1 << 20}
    found["far too many parameters"] = HostileRun(run_file(config=CONFIG | sizes), "config", "parameters")
    bad = {
        "a drafter's tensor named by half a surrogate pair": (
            with_drafter(tensors=drafter_tensors() | {"drafter.\ud800": f32(1)}),
            "not part of the layout",
        ),
        "a drafter without a config": (with_drafter(config={}), "hidden_size"),
        "a drafter of another layout": (
            with_drafter(tensors={n.replace("midlayer", "layers.0"): t for n, t in drafter_tensors().items()}),
            "draftalign convert",
        ),
        "a drafter of another width": (
            with_drafter(config=export_config(SIZES) | {"hidden_size": 16, "target_hidden_size": 16}),
            "by its config",
        ),
        "a drafter of other layers": (
            with_drafter(
                config=export_config(SIZES) | {"eagle_aux_hidden_state_layer_ids": [1, 4, 5], "eagle_config": {}}
            ),
            "captures [2, 4, 5]",
        ),
        "a drafter whose config is of another kind": (
            with_drafter(config=export_config(SIZES) | {"draftalign": {"kind": "medusa"}}),
            "eagle3 or mtp",
        ),
        "a drafter whose positions are stretched by the text of a number": (
            with_drafter(config=_stretched(factor="8")),
            "factor",
        ),
        "a drafter whose positions are stretched by infinity": (
            with_drafter(config=_stretched(factor=float("inf"))),
            "factor",
        ),
        "a drafter whose middle band of positions is empty": (
            with_drafter(config=_stretched(low_freq_factor=4.0)),
            "low_freq_factor below high_freq_factor",
        ),
        "a drafter whose positions end at none": (
            with_drafter(config=_stretched(original_max_position_embeddings=0)),
            "original_max_position_embeddings",
        ),
        "a drafter with two kinds of positions": (
            with_drafter(config=_stretched() | {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}),
            "which is right",
        ),
        "a drafter without the norm that its config names": (
            with_drafter(config=export_config(SIZES) | {"eagle_config": {}, "norm_before_fc": True}),
            "input_norm.weight",
        ),
        "a drafter that says it is an MTP module": (
            with_drafter(config=export_config(SIZES) | {"draftalign": {"kind": "mtp"}}),
            "kv_lora_rank",
        ),
        "a drafter with its embedding": (
            with_drafter(tensors=drafter_tensors(**{"embed_tokens.weight": f32(50, 8)})),
            "embed_tokens",
        ),
        "a drafter with a missing tensor": (
            with_drafter(tensors=drafter_tensors(**{"fc.weight": None})),
            "missing: fc.weight",
        ),
        "a drafter of integers": (
            with_drafter(tensors=drafter_tensors(**{"norm.weight": wire.Tensor.of(np.zeros(8, np.int32), "I32")})),
            "norm.weight must be F32 or BF16 or F16, got I32",
        ),
        "an MTP module whose experts are multiplied beyond all bounds": (
            _with_module(routed_scaling_factor=1e300),
            "routed_scaling_factor",
        ),
        "an MTP module whose experts are multiplied to float32's end": (
            _with_module(routed_scaling_factor=1e38),
            "routed_scaling_factor",
        ),
        "YaRN of positions that all turn alike": (_with_yarn(1.0), "rope_theta above 1"),
        "YaRN that divides by next to nothing": (_with_yarn(factor=1e-300), "factor"),
        "YaRN of no rotation": (_with_yarn(beta_slow=5e-324), "beta_slow"),
        "YaRN of a magnitude beyond float32": (_with_yarn(mscale=1e300, mscale_all_dim=1e300), "mscale"),
    }
    return found | {name: HostileRun(body, "drafter_config", words) for name, (body, words) in bad.items()}


RUNS: Final = _made()

TAKEN: Final[dict[str, dict[str, Any]]] = {
    "more tokens end a response than the draft vocabulary has": {"eos_token_id": list(range(-500, 500))},
    "what ends a response is no token": {"eos_token_id": [True, None, math.nan, 10**30, "x", [1]]},
    "the largest rope_theta": {"rope_theta": 1e300},
    "the smallest epsilon of a norm": {"rms_norm_eps": 5e-324},
    "fewer positions than tokens": {"max_position_embeddings": 1},
    "heads of two dimensions": {"head_dim": 2, "num_attention_heads": 1},
    "an intermediate layer of one": {"intermediate_size": 1},
    "a field 400 deep": {"x": json.loads("[" * 400 + "]" * 400)},
}
