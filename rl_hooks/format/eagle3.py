"""What an EAGLE-3 drafter's files must say: the fields of config.json, and the names, shapes and dtypes of its tensors.

One definition for all readers of such files, with torch or without: the API checks PUT /runs by it, the worker and the
commands check what they load. SGLang and vLLM load this layout directly (`drafter.files.checkpoint` reads and writes
it). An MTP module's is in `rl_hooks.format.mtp`.

Legend: H hidden, V target vocabulary, D draft vocabulary.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

#: Name -> shape and safetensors dtype, as a file's header has them.
Found = Mapping[str, tuple[tuple[int, ...], str]]

#: Fields that change what the tensors mean. We support one value each; absent means that value.
FIXED: Final[Mapping[str, Any]] = {
    "norm_output": False,
    "fc_norm": False,
    "attention_bias": False,
    "bias": False,
    "tie_word_embeddings": False,
    "embed_requires_grad": False,
    # Those of engines' own classes: vLLM's (0.32), SGLang's (0.5.23) or both.
    "use_aux_norm": False,
    "qkv_bias": False,
    "is_causal": True,
    "rope_is_neox_style": True,
    "logit_scale": 1.0,
    "final_logit_softcapping": None,
}
MAPS: Final = ("d2t", "t2d")
#: Dtypes in which weights may be stored, by safetensors' names. They may differ in a file: readers convert them.
STORED: Final = ("F32", "BF16", "F16")
_MAP_DTYPES: Final[Mapping[str, tuple[str, ...]]] = {"d2t": ("I64",), "t2d": ("BOOL",)}
SIZES: Final = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "draft_vocab_size",
)
MAX_SIZE: Final = 1 << 24  # of anything that a config counts
_MAX_LAYERS: Final = 64
_LLAMA_POSITIONS: Final = 2048
#: Most parameters of one drafter: that of a target of 405 billion has some 5 billion.
MAX_PARAMETERS: Final = 1 << 33
#: How much wider than the hidden state a layer may be; T5-11B, the widest known, is 64 times as wide.
_MAX_RATIO: Final = 128


class DrafterError(Exception):
    """Base of this package's errors: what was expected, what came, what to do."""


class CheckpointError(DrafterError):
    """A checkpoint is torn, incomplete or belongs to another drafter."""


@dataclass(frozen=True)
class Llama3Rope:
    """Llama 3's stretching of rotary positions, which divides the low frequencies and leaves the high ones alone.

    Frequencies whose wave is longer than original_max_position_embeddings / low_freq_factor are divided by `factor`,
    those whose wave is shorter than original_max_position_embeddings / high_freq_factor stay, between them both mix.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    def __post_init__(self) -> None:
        if self.factor < 1 or not self.low_freq_factor < self.high_freq_factor:
            raise DrafterError(
                "rope_type llama3 needs a factor of at least 1 and a low_freq_factor below high_freq_factor, got "
                f"{self.factor}, {self.low_freq_factor} and {self.high_freq_factor}"
            )


@dataclass(frozen=True)
class DrafterConfig:
    """Sizes of a drafter. `aux_layers` names each captured layer by the layer whose *input* it is ("entering")."""

    hidden_size: int
    target_hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    aux_layers: tuple[int, ...]
    rope_theta: float = 10_000.0
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 32_768
    model_type: str = "llama"
    norm_before_residual: bool = False
    num_hidden_layers: int = 1
    rope_scaling: Llama3Rope | None = None
    norm_before_fc: bool = False

    def __post_init__(self) -> None:
        if self.num_hidden_layers < 1:
            raise DrafterError(f"num_hidden_layers must be at least 1, got {self.num_hidden_layers}")
        if self.num_attention_heads % self.num_key_value_heads:
            raise DrafterError(
                f"num_attention_heads {self.num_attention_heads} must be a multiple of num_key_value_heads "
                f"{self.num_key_value_heads}"
            )
        if self.head_dim % 2:
            raise DrafterError(f"head_dim must be even for rotary positions, got {self.head_dim}")
        if self.hidden_size != self.target_hidden_size:
            raise DrafterError(
                f"the drafter shares the target's embedding, so hidden_size must be {self.target_hidden_size}, "
                f"got {self.hidden_size}"
            )
        if not 0 < self.draft_vocab_size <= self.vocab_size:
            raise DrafterError(f"draft_vocab_size must be 1 to {self.vocab_size}, got {self.draft_vocab_size}")
        if not self.aux_layers or list(self.aux_layers) != sorted(set(self.aux_layers)):
            raise DrafterError(f"aux_layers must be ascending and distinct, got {self.aux_layers}")
        widths = {
            "intermediate_size": self.intermediate_size,
            "num_attention_heads x head_dim": self.num_attention_heads * self.head_dim,
        }
        for name, width in widths.items():
            if width > _MAX_RATIO * self.hidden_size:
                raise DrafterError(
                    f"{name} must be at most {_MAX_RATIO} times hidden_size {self.hidden_size}, got {width}"
                )
        check_parameters(tensor_shapes(self), MAX_PARAMETERS)

    def identity(self) -> dict[str, Any]:
        """Every field as JSON gives it back, to compare with a stored one. An absent switch means that it is off."""
        fields = {**asdict(self), "aux_layers": list(self.aux_layers)}
        for switch in ("norm_before_residual", "norm_before_fc"):
            if not fields[switch]:
                del fields[switch]
        if self.num_hidden_layers == 1:
            del fields["num_hidden_layers"]
        if self.rope_scaling is None:
            del fields["rope_scaling"]
        return fields

    @classmethod
    def from_target(
        cls, config: Mapping[str, Any], aux_layers: Sequence[int], draft_vocab_size: int | None = None
    ) -> DrafterConfig:
        """Sizes of the target's own layers (its transformers config as a dict); D defaults to min(32000, V)."""
        check_streams(config)
        missing = [
            k for k in ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size") if k not in config
        ]
        if missing:
            raise DrafterError(f"the target's config lacks {', '.join(missing)}; send its whole transformers config")
        hidden, heads = count(config, "hidden_size"), count(config, "num_attention_heads")
        rope = rope_fields(config)
        # Gemma gives one set per kind of attention; the drafter's is full.
        rope = _mapping(rope, "full_attention") or rope
        eps = number(config, "rms_norm_eps", 1e-6)
        if eps >= 1:
            raise DrafterError(f"rms_norm_eps must be a small positive number, got {eps!r}")
        return cls(
            hidden_size=hidden,
            target_hidden_size=hidden,
            intermediate_size=count(config, "intermediate_size"),
            num_attention_heads=heads,
            num_key_value_heads=count(config, "num_key_value_heads", heads),
            head_dim=count(config, "head_dim", hidden // heads or None),
            vocab_size=count(config, "vocab_size"),
            draft_vocab_size=int(draft_vocab_size or min(32_000, count(config, "vocab_size"))),
            aux_layers=tuple(int(i) for i in aux_layers),
            rope_theta=rope_theta(config, rope),
            rms_norm_eps=eps,
            max_position_embeddings=count(config, "max_position_embeddings", 32_768),
            model_type=str(config.get("model_type") or "llama"),
        )


#: What is left to a policy that no drafter of ours fits.
UNTRAINED: Final = (
    "What works: the engine's own speculation with n-grams or the policy's MTP module, untrained; draftalign-agent "
    "beside the engine reports its acceptance"
)


def check_streams(config: Mapping[str, Any]) -> None:
    """Raise `DrafterError` for a target with several residual streams (DeepSeek-V4, Gemma 3n)."""
    for name in ("hc_mult", "altup_num_inputs"):
        streams = config.get(name)
        if type(streams) is int and streams > 1:
            raise DrafterError(
                f"the target has {streams} residual streams ({name}), and an EAGLE-3 drafter reads one. {UNTRAINED}"
            )


def count(config: Mapping[str, Any], name: str, default: int | None = None) -> int:
    """A positive integer, or the default where there is one: for zero, null and absence. Raises `DrafterError`."""
    value = config.get(name) or default
    if type(value) is not int or not (0 < value <= MAX_SIZE or value == default):
        raise DrafterError(f"{name} must be a positive integer up to {MAX_SIZE}, got {config.get(name)!r:.80}")
    return value


def number(config: Mapping[str, Any], name: str, default: float | None = None) -> float:
    """A positive number, or the default where there is one: for zero, null and absence. Raises `DrafterError`."""
    value: Any = config.get(name) or default
    if type(value) not in (int, float) or not (0 < value <= sys.float_info.max or value == default):
        raise DrafterError(f"{name} must be a positive number, got {config.get(name)!r:.80}")
    return float(value)


def rope_theta(config: Mapping[str, Any], rope: Mapping[str, Any]) -> float:
    """The base of rotary positions; `rope`: the config's `rope_fields`. Raises `DrafterError`.

    Below 1 the frequencies of later pairs rise, up to infinity, and every state is NaN.
    """
    base = number(config, "rope_theta", number(rope, "rope_theta", 10_000.0))
    if base < 1:
        raise DrafterError(f"rope_theta must be a number of 1 or more, got {base!r}")
    return base


def rope_fields(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a config says of rotary positions, by either of its names. Raises `DrafterError`."""
    return _mapping(config, "rope_parameters") or _mapping(config, "rope_scaling")


def _mapping(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = config.get(name) or {}
    if not isinstance(value, Mapping):
        raise DrafterError(f"{name} must be an object, got {value!r:.80}")
    return value


def check_parameters(shapes: Mapping[str, tuple[int, ...]], most: int) -> None:
    """Raise `DrafterError` for more weights than any drafter has: building them would exhaust the memory."""
    size = {name: math.prod(shape) for name, shape in shapes.items() if name not in MAPS}
    if sum(size.values()) > most:
        largest = max(size, key=lambda name: size[name])
        raise DrafterError(
            f"a drafter of these sizes has {sum(size.values()):.2e} parameters (at most {most:.2e} are taken), most "
            f"of them in {largest} {list(shapes[largest])}: are hidden_size, intermediate_size, num_attention_heads "
            "and head_dim the target's?"
        )


def named(names: Sequence[str]) -> str:
    """Up to four names, for a message."""
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return (", ".join(name[:60] for name in names[:4]) or "none") + more


def tensor_shapes(config: DrafterConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of the canonical layout; the two maps only where the vocabulary is reduced."""
    H, Ht, D, V = config.hidden_size, config.target_hidden_size, config.draft_vocab_size, config.vocab_size
    queries, keys = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    maps: dict[str, tuple[int, ...]] = {} if D == V else {"d2t": (D,), "t2d": (V,)}
    width = len(config.aux_layers) * Ht
    norm: dict[str, tuple[int, ...]] = {"input_norm.weight": (width,)} if config.norm_before_fc else {}
    shapes: dict[str, tuple[int, ...]] = {
        **norm,
        "fc.weight": (H, width),
        "midlayer.hidden_norm.weight": (H,),
    }
    for number in range(config.num_hidden_layers):
        layer, width = (f"layers.{number}", H) if number else ("midlayer", 2 * H)
        shapes |= {
            f"{layer}.input_layernorm.weight": (H,),
            f"{layer}.self_attn.q_proj.weight": (queries, width),
            f"{layer}.self_attn.k_proj.weight": (keys, width),
            f"{layer}.self_attn.v_proj.weight": (keys, width),
            f"{layer}.self_attn.o_proj.weight": (H, queries),
            f"{layer}.post_attention_layernorm.weight": (H,),
            f"{layer}.mlp.gate_proj.weight": (config.intermediate_size, H),
            f"{layer}.mlp.up_proj.weight": (config.intermediate_size, H),
            f"{layer}.mlp.down_proj.weight": (H, config.intermediate_size),
        }
    return {**shapes, "norm.weight": (H,), "lm_head.weight": (D, H), **maps}


def parse_config(document: Mapping[str, Any]) -> DrafterConfig:
    """Read a drafter's config.json. Raises `CheckpointError` for what this layout does not cover."""
    for name, value in FIXED.items():
        if document.get(name, value) != value:
            raise CheckpointError(f"config.json: {name} must be {json.dumps(value)}, got {document[name]!r}")
    _check_meaning(document)
    residual, features = _switch(document, "norm_before_residual"), _switch(document, "norm_before_fc")
    nested = document.get("eagle_config")
    if isinstance(nested, Mapping) and "norm_before_fc" in nested:  # engines look here first
        inner = _switch(nested, "norm_before_fc") if nested["norm_before_fc"] is not None else False
        if "norm_before_fc" in document and inner != features:
            raise CheckpointError(
                f"config.json: norm_before_fc is {features}, in eagle_config {nested['norm_before_fc']!r}; which is "
                "right?"
            )
        features = inner
    try:
        sizes = {name: count(document, name) for name in SIZES}
        layers = count({"num_hidden_layers": 1, **document}, "num_hidden_layers")
        if layers > _MAX_LAYERS:
            raise DrafterError(f"num_hidden_layers must be at most {_MAX_LAYERS}, got {layers}")  # noqa: TRY301
        eps = document.get("rms_norm_eps")
        if not isinstance(eps, float) or not 0 < eps < 1:
            raise DrafterError(f"rms_norm_eps must be a small positive number, got {eps!r}")  # noqa: TRY301
        return DrafterConfig(
            **sizes,
            target_hidden_size=count({"target_hidden_size": sizes["hidden_size"], **document}, "target_hidden_size"),
            aux_layers=_aux_layers(document),
            rope_theta=_rope_theta(document),
            rms_norm_eps=eps,
            max_position_embeddings=count(document, "max_position_embeddings"),
            model_type=str(document.get("target_model_type", "llama")),
            norm_before_residual=residual,
            norm_before_fc=features,
            num_hidden_layers=layers,
            rope_scaling=_rope_scaling(document),
        )
    except CheckpointError:
        raise
    except DrafterError as error:
        raise CheckpointError(f"config.json: {error}") from error


def _switch(document: Mapping[str, Any], name: str) -> bool:
    value = document.get(name, False)
    if not isinstance(value, bool):
        raise CheckpointError(f"config.json: {name} must be true or false, got {value!r}")
    return value


def _check_meaning(document: Mapping[str, Any]) -> None:
    """Refuse, by name, what leaves every shape alone and makes another function of the same weights."""
    names = document.get("architectures") or []
    if not isinstance(names, list) or any(n != "LlamaForCausalLM" and "eagle3" not in str(n).lower() for n in names):
        raise CheckpointError(
            f"config.json: architectures {names!r} are not those of an EAGLE-3 drafter (LlamaForCausalLMEagle3, "
            "Eagle3Speculator or another that says Eagle3; LlamaForCausalLM in SafeAILab's)"
        )
    faults = [name for name in ("mlp_bias", "use_sliding_window") if document.get(name)]
    # A window counts unless it is said to be off: Qwen configs name one that they do not use.
    if document.get("sliding_window") and document.get("use_sliding_window") is not False:
        faults.append(f"sliding_window {document['sliding_window']!r}")
    if document.get("hidden_act") not in (None, "silu"):
        faults.append(f"hidden_act {document['hidden_act']!r}")
    layers = document.get("layer_types") or []
    if not isinstance(layers, list) or any(layer != "full_attention" for layer in layers):
        faults.append(f"layer_types {layers!r}")
    ropes = [document.get(name) for name in ("rope_parameters", "rope_scaling")]
    for rope in (rope for rope in ropes if isinstance(rope, Mapping)):
        if _rope_type(rope) not in ("default", "llama3"):
            faults.append(f"scaled rotary positions {dict(rope)!r}")
    shares = [where.get("partial_rotary_factor") for where in (document, *ropes) if isinstance(where, Mapping)]
    if any(share not in (None, 1, 1.0) for share in shares):
        faults.append(f"partial_rotary_factor {next(s for s in shares if s is not None)!r}")
    if faults:
        raise CheckpointError(
            f"config.json: {', '.join(faults)} is not supported: this layout has silu without biases, full attention "
            "and rotary positions over whole heads, unscaled or scaled as in Llama 3"
        )


def with_layers(document: Mapping[str, Any], aux_layers: Sequence[int]) -> dict[str, Any]:
    """A drafter's config.json with these layers where it names none: vLLM reads one field, SGLang the other."""
    if document.get("eagle_aux_hidden_state_layer_ids") is not None:
        return dict(document)
    nested = document.get("eagle_config") or {}
    if isinstance(nested, Mapping):  # else it is refused by name
        outputs = {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [i - 1 for i in aux_layers]}
        nested = outputs | {name: value for name, value in nested.items() if value is not None}
    return {**document, "eagle_aux_hidden_state_layer_ids": list(aux_layers), "eagle_config": nested}


def reaching(document: Mapping[str, Any], policy: Mapping[str, Any]) -> dict[str, Any]:
    """A drafter's config.json whose max_position_embeddings is not below that of the policy's config.

    No weight depends on it: positions are unscaled, or stretched by a length of their own. Beyond it, an engine may
    stop drafting.
    """
    own, whole = (config.get("max_position_embeddings") for config in (document, policy))
    if type(own) is not int or type(whole) is not int or not own < whole <= MAX_SIZE:
        return dict(document)
    return {**document, "max_position_embeddings": whole}


def with_defaults(document: Mapping[str, Any]) -> dict[str, Any]:
    """A config with the sizes that transformers' LlamaConfig assumes where it is silent; null is silence."""
    given = {name: value for name, value in document.items() if value is not None}
    heads, hidden, vocab = (given.get(n) for n in ("num_attention_heads", "hidden_size", "vocab_size"))
    defaults: dict[str, Any] = {"max_position_embeddings": _LLAMA_POSITIONS}
    if type(heads) is int and type(hidden) is int and heads > 0:
        defaults |= {"head_dim": hidden // heads, "num_key_value_heads": heads}
    if vocab is not None:
        defaults["draft_vocab_size"] = vocab
    return defaults | given


def _aux_layers(document: Mapping[str, Any]) -> tuple[int, ...]:
    """Layer ids by what they enter. Both fields, where present, must name the same layers."""
    layers = document.get("eagle_aux_hidden_state_layer_ids")
    nested = document.get("eagle_config") or {}
    if not isinstance(nested, Mapping) or nested.get("use_aux_hidden_state", True) is not True:
        raise CheckpointError(
            f"config.json: eagle_config must be an object, use_aux_hidden_state in it true, got {nested!r}: a drafter "
            "that reads no auxiliary states is not an EAGLE-3 one"
        )
    outputs = nested.get("eagle_aux_hidden_state_layer_ids")
    # The embedding is what enters layer 0, and the output of layer -1.
    for name, ids, first in (
        ("eagle_aux_hidden_state_layer_ids", layers, 0),
        ("the same of eagle_config", outputs, -1),
    ):
        if ids is not None and not (isinstance(ids, list) and all(type(i) is int and i >= first for i in ids)):
            raise CheckpointError(f"config.json: {name} must be a list of layer numbers from {first}, got {ids!r}")
    if layers is None:
        raise CheckpointError(
            "config.json: eagle_aux_hidden_state_layer_ids is missing; name the layers whose inputs the drafter was "
            "trained on (a drafter fed with other layers still runs, with a worse α)"
        )
    if outputs is not None and [i + 1 for i in outputs] != layers:
        raise CheckpointError(
            f"config.json: eagle_aux_hidden_state_layer_ids {layers} (entering) and eagle_config's {outputs} (outputs, "
            "one less) name different layers"
        )
    return tuple(layers)


def _rope_theta(document: Mapping[str, Any]) -> float:
    places = (document, _mapping(document, "rope_parameters"), _mapping(document, "rope_scaling"))
    given = [x for place in places if (x := place.get("rope_theta")) is not None]
    if not given or any(
        type(x) not in (int, float) or not 1 <= x <= sys.float_info.max or x != given[0] for x in given
    ):
        raise CheckpointError(
            "config.json: one rope_theta of 1 or more, the same in rope_parameters and rope_scaling, is expected; got "
            f"{given}"
        )
    return float(given[0])


def _rope_type(rope: Mapping[str, Any]) -> object:
    return rope.get("rope_type", rope.get("type", "default"))


def _rope_scaling(document: Mapping[str, Any]) -> Llama3Rope | None:
    """How rotary positions are stretched, None for not at all. Both fields, where present, must say the same."""
    ropes = [rope for name in ("rope_parameters", "rope_scaling") if (rope := _mapping(document, name))]
    found = {_llama3(document, rope) if _rope_type(rope) == "llama3" else None for rope in ropes}
    if len(found) > 1:
        raise CheckpointError(
            f"config.json: rope_parameters {dict(ropes[0])!r:.200} and rope_scaling {dict(ropes[1])!r:.200} name other "
            "rotary positions, and engines read one of them; which is right?"
        )
    return next(iter(found), None)


def _llama3(document: Mapping[str, Any], rope: Mapping[str, Any]) -> Llama3Rope:
    name = "original_max_position_embeddings"
    beside = document.get(name)  # transformers, vLLM and SGLang would take it instead
    if beside not in (None, rope.get(name)):
        raise CheckpointError(
            f"config.json: {name} is {beside!r:.80}, in the rotary positions {rope.get(name)!r:.80}; which is right?"
        )
    return Llama3Rope(
        factor=number(rope, "factor"),
        low_freq_factor=number(rope, "low_freq_factor"),
        high_freq_factor=number(rope, "high_freq_factor"),
        original_max_position_embeddings=count(rope, name),
    )


def check_header(found: Found, config: DrafterConfig) -> None:
    """Raise `CheckpointError` unless a file's tensors are those of the config: names, shapes and dtypes."""
    expected = tensor_shapes(config)
    if config.draft_vocab_size == config.vocab_size:  # maps that say nothing are allowed, their content is checked
        expected |= {name: (config.vocab_size,) for name in MAPS if name in found}
    embeddings = [name for name in found if "embed_tokens" in name]
    if embeddings:
        raise CheckpointError(
            f"{embeddings[0]} must not be in a drafter's file: engines that share it with the target would overwrite "
            "the policy's embedding. Export without it"
        )
    compare(found, expected, "Rename to the published names (midlayer.*, fc, norm, lm_head, d2t, t2d)")


def compare(found: Found, expected: Mapping[str, tuple[int, ...]], advice: str) -> None:
    """Raise `CheckpointError` unless these tensors have the expected names and shapes, in a dtype that is read.

    `advice`: what to do where names differ.
    """
    missing, extra = sorted(expected.keys() - found.keys()), sorted(found.keys() - expected.keys())
    if missing or extra:
        raise CheckpointError(f"tensors missing: {named(missing)}; not part of the layout: {named(extra)}. {advice}")
    for name, (shape, dtype) in found.items():
        if shape != expected[name]:
            raise CheckpointError(f"{name} must be {expected[name]} by its config, got {shape}")
        stored = _MAP_DTYPES.get(name, STORED)
        if dtype not in stored:
            raise CheckpointError(f"{name} must be {' or '.join(stored)}, got {dtype}")
