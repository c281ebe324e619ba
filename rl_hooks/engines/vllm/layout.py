"""What a drafter's file must hold to be swapped into a running engine, checked before the engine is touched.

Pure: bytes and a configuration in, tensors or a refusal out. No vLLM. Legend: H hidden, Ht target hidden, A aux layers,
N query heads, G key-value heads, hd head size, I MLP size, D draft vocabulary, V target vocabulary.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Final, Protocol, Self

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from rl_hooks.errors import HookError

MODEL_FILE: Final = "model.safetensors"
CONFIG_FILE: Final = "config.json"
#: Fields that change what the tensors mean, and the one value of each that the layout covers (also when absent).
_FIXED: Final[Mapping[str, Any]] = {
    "norm_before_residual": False,
    "norm_output": False,
    "norm_before_fc": False,
    "fc_norm": False,
    "attention_bias": False,
    "bias": False,
}
#: What the engine shares with the policy, in the names of drafters' files.
_SHARED: Final = ("embed_tokens", "shared_head.head")
_DTYPES: Final = frozenset({"F32", "BF16", "F16"})
_MAX_HEADER_BYTES: Final = 1 << 20


class DrafterRefusedError(HookError):
    """The drafter does not fit the engine and never will; nothing was changed."""


class Layout(Protocol):
    """What cannot be swapped along with the weights, of one kind of drafter."""

    @property
    def vocab_size(self) -> int:
        """V."""

    @property
    def draft_vocab_size(self) -> int:
        """D; V where the drafter proposes every token."""

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """Captured layers of the target; none where the drafter reads its last state only."""

    @property
    def float32(self) -> frozenset[str]:
        """Weights that the engine keeps in float32 whatever its dtype is."""

    @property
    def shared(self) -> frozenset[str]:
        """VLLM modules that the drafter may share with the policy, because no file brings them."""

    def of(self, config: Mapping[str, Any]) -> Self:
        """Read a candidate's config.json; raises `DrafterRefusedError`."""

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every weight in a candidate's file, without d2t and t2d."""

    def unread(self) -> dict[str, tuple[int, ...]]:
        """Parameters that the engine builds and never reads: no file has them, and a reload wants them."""

    def module_elements(self) -> dict[str, int]:
        """Elements by vLLM module, on one rank: of the module itself and what is inside."""

    def fingerprint(self, d2t: Tensor) -> str | None:
        """The service's `config_fingerprint` of this layout, where it can be told from here."""

    def differences(self, other: Self) -> list[str]:
        """`field is ours here, theirs there` for each field that differs."""


@dataclass(frozen=True, slots=True)
class DraftLayout:
    """An EAGLE-3 drafter's."""

    hidden_size: int
    target_hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    #: Captured layers of the target, each by the layer whose *input* it is.
    aux_layers: tuple[int, ...]
    rope_theta: float
    rms_norm_eps: float
    model_type: str
    num_hidden_layers: int = 1

    @classmethod
    def read(cls, config: Mapping[str, Any], default_aux_layers: tuple[int, ...]) -> DraftLayout:
        """Read a drafter's config.json, or the engine's copy of it.

        `default_aux_layers` is what the engine captures; it stands in where the configuration names no layers.
        """
        for name, value in _FIXED.items():
            if (given := config.get(name)) is not None and given != value:
                raise DrafterRefusedError(f"{name} must be {json.dumps(value)} to be swapped, got {given!r}")
        heads = integer(config, "num_attention_heads")
        hidden = integer(config, "hidden_size")
        vocab = integer(config, "vocab_size")
        return cls(
            hidden_size=hidden,
            target_hidden_size=integer(config, "target_hidden_size", hidden),
            intermediate_size=integer(config, "intermediate_size"),
            num_attention_heads=heads,
            num_key_value_heads=integer(config, "num_key_value_heads", heads),
            head_dim=integer(config, "head_dim", hidden // heads),
            vocab_size=vocab,
            draft_vocab_size=integer(config, "draft_vocab_size", vocab),
            aux_layers=_aux_layers(config, default_aux_layers),
            rope_theta=_rope_theta(config),
            rms_norm_eps=number(config, "rms_norm_eps"),
            model_type=str(config.get("target_model_type") or "llama"),
            num_hidden_layers=integer(config, "num_hidden_layers", 1),
        )

    @property
    def float32(self) -> frozenset[str]:
        """Nothing: all weights are the engine's dtype."""
        return frozenset()

    @property
    def shared(self) -> frozenset[str]:
        """The embedding; a head of the policy's would be overwritten by a swap."""
        return frozenset({"model.embed_tokens"})

    def of(self, config: Mapping[str, Any]) -> DraftLayout:
        """Read a candidate's config.json; layers that it does not name are this engine's."""
        return DraftLayout.read(config, self.aux_layers)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every weight, as published checkpoints name them. d2t and t2d are checked apart."""
        H, inner = self.hidden_size, self.intermediate_size
        queries, keys = self.num_attention_heads * self.head_dim, self.num_key_value_heads * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {
            "fc.weight": (H, len(self.aux_layers) * self.target_hidden_size),
            "midlayer.hidden_norm.weight": (H,),
        }
        for number in range(self.num_hidden_layers):
            layer, width = _layer_name(number), H if number else 2 * H
            shapes |= {
                f"{layer}.input_layernorm.weight": (H,),
                f"{layer}.self_attn.q_proj.weight": (queries, width),
                f"{layer}.self_attn.k_proj.weight": (keys, width),
                f"{layer}.self_attn.v_proj.weight": (keys, width),
                f"{layer}.self_attn.o_proj.weight": (H, queries),
                f"{layer}.post_attention_layernorm.weight": (H,),
                f"{layer}.mlp.gate_proj.weight": (inner, H),
                f"{layer}.mlp.up_proj.weight": (inner, H),
                f"{layer}.mlp.down_proj.weight": (H, inner),
            }
        return {**shapes, "norm.weight": (H,), "lm_head.weight": (self.draft_vocab_size, H)}

    def unread(self) -> dict[str, tuple[int, ...]]:
        """Parameters that vLLM builds in later layers and never reads: no file has them, and a reload wants them."""
        return {f"layers.{i}.hidden_norm.weight": (self.hidden_size,) for i in range(1, self.num_hidden_layers)}

    def module_elements(self) -> dict[str, int]:
        """Elements by vLLM module, query/key/value and gate/up stacked, on one rank; to hold against what it built."""
        sizes = {name: product(shape) for name, shape in self.shapes().items()}
        elements = {
            "model.fc": sizes["fc.weight"],
            "model.norm": self.hidden_size,
            "lm_head": sizes["lm_head.weight"],
        }
        for number in range(self.num_hidden_layers):
            ours, theirs = _layer_name(number), f"model.layers.{number}."
            elements |= {
                theirs + "hidden_norm": self.hidden_size,
                theirs + "input_layernorm": self.hidden_size,
                theirs + "self_attn.qkv_proj": sum(sizes[f"{ours}.self_attn.{x}_proj.weight"] for x in "qkv"),
                theirs + "self_attn.o_proj": sizes[f"{ours}.self_attn.o_proj.weight"],
                theirs + "post_attention_layernorm": self.hidden_size,
                theirs + "mlp.gate_up_proj": sum(sizes[f"{ours}.mlp.{x}_proj.weight"] for x in ("gate", "up")),
                theirs + "mlp.down_proj": sizes[f"{ours}.mlp.down_proj.weight"],
            }
        return elements

    def fingerprint(self, d2t: Tensor) -> str:
        """The service's `config_fingerprint` of this layout (`drafter.files.checkpoint`; not imported here)."""
        sizes = asdict(self)
        if self.num_hidden_layers == 1:  # as in drafters from before there were several
            del sizes["num_hidden_layers"]
        document = json.dumps({**sizes, "d2t": vocabulary_digest(d2t, self.vocab_size)}, sort_keys=True)
        return hashlib.sha256(document.encode()).hexdigest()[:32]

    def differences(self, other: DraftLayout) -> list[str]:
        """`field: ours, theirs` for each field in which they differ. The target's family name is a label, no more."""
        pairs = ((f.name, getattr(self, f.name), getattr(other, f.name)) for f in fields(self))
        return [f"{name} is {a} here, {b} there" for name, a, b in pairs if a != b and name != "model_type"]


def _layer_name(number: int) -> str:
    """What published checkpoints call a layer."""
    return f"layers.{number}" if number else "midlayer"


def vocabulary_digest(d2t: Tensor, vocab_size: int) -> str:
    """Identity of a draft vocabulary: V and the target ids d2t[i] + i, as the service computes it."""
    ids = d2t.detach().to("cpu", torch.int64) + torch.arange(d2t.numel())
    return hashlib.sha256(vocab_size.to_bytes(8, "little") + ids.numpy().astype("<i8").tobytes()).hexdigest()[:32]


def read_candidate(body: bytes, layout: Layout, d2t: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
    """Weights as `dtype` on the CPU, and nothing else: d2t is compared with the engine's and left behind.

    The header is judged before any tensor is made. Raises `DrafterRefusedError`.
    """
    _check_header(_header(body), layout)
    try:
        tensors = load(body)
    except SafetensorError as error:
        raise DrafterRefusedError(f"{MODEL_FILE} is damaged: {error}; fetch it again") from error
    _check_vocabulary(tensors.pop("d2t", torch.zeros_like(d2t)), tensors.pop("t2d", None), d2t, layout)
    weights = {name: tensor.to(torch.float32 if name in layout.float32 else dtype) for name, tensor in tensors.items()}
    for name, weight in weights.items():
        # As the engine will hold it: a float32 weight can be finite and still overflow float16.
        if not bool(torch.isfinite(weight).all()):
            raise DrafterRefusedError(
                f"{name} holds NaN or infinity as {weight.dtype}; this drafter must not be served"
            )
    return weights


def _check_vocabulary(found: Tensor, mask: Tensor | None, served: Tensor, layout: Layout) -> None:
    found = found.to(torch.int64)
    if not torch.equal(found, served):
        changed = int((found != served).sum())
        raise DrafterRefusedError(
            f"d2t differs from the served one in {changed} of {served.numel()} entries; the draft vocabulary is fixed "
            "for the life of a server: restart it with this drafter"
        )
    if mask is not None:
        expected = torch.zeros(layout.vocab_size, dtype=torch.bool)
        expected[found + torch.arange(found.numel())] = True
        if not torch.equal(mask.to(torch.bool), expected):
            raise DrafterRefusedError("t2d and d2t of this file name different tokens: they come from two exports")


def _header(body: bytes) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and dtype by name, from a safetensors file's first bytes."""
    try:
        (length,) = struct.unpack_from("<Q", body)
        if length > _MAX_HEADER_BYTES:
            raise DrafterRefusedError(f"{MODEL_FILE} declares a header of {length} bytes; a drafter's is far smaller")
        document = json.loads(body[8 : 8 + length])
        return {
            str(name): (tuple(int(n) for n in entry["shape"]), str(entry["dtype"]))
            for name, entry in document.items()
            if name != "__metadata__"
        }
    except (struct.error, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DrafterRefusedError(f"{MODEL_FILE} is no safetensors file: {error!r}") from error


def _check_header(found: Mapping[str, tuple[tuple[int, ...], str]], layout: Layout) -> None:
    if poison := sorted(name for name in found if any(shared in name for shared in _SHARED)):
        raise DrafterRefusedError(
            f"{poison[0]} must not be in a drafter's file: the engine shares that module with the policy, whose "
            "weights it would overwrite. Export without it"
        )
    expected = {**layout.shapes(), "d2t": (layout.draft_vocab_size,), "t2d": (layout.vocab_size,)}
    # A drafter over the whole vocabulary has no offsets: vLLM will not even start with a file that brings some.
    optional = {"t2d", "d2t"} if layout.draft_vocab_size == layout.vocab_size else {"t2d"}
    missing = sorted(expected.keys() - found.keys() - optional)
    extra = sorted(found.keys() - expected.keys())
    if missing or extra:
        raise DrafterRefusedError(
            f"tensors missing: {', '.join(missing) or 'none'}; unknown: {', '.join(extra) or 'none'}. The engine would "
            "load the rest without a word"
        )
    for name, (shape, dtype) in found.items():
        if shape != expected[name]:
            raise DrafterRefusedError(f"{name} must be {expected[name]} in this engine, got {shape}")
        allowed = {"d2t": {"I64", "I32"}, "t2d": {"BOOL", "U8"}}.get(name, _DTYPES)
        if dtype not in allowed:
            raise DrafterRefusedError(f"{name} must be one of {', '.join(sorted(allowed))}, got {dtype}")


def integer(config: Mapping[str, Any], name: str, default: int | None = None) -> int:
    """A positive integer of a config.json; raises `DrafterRefusedError`."""
    value = config.get(name)
    if value is None:
        value = default
    if type(value) is not int or value < 1:
        raise DrafterRefusedError(f"{CONFIG_FILE}: {name} must be a positive integer, got {value!r}")
    return value


def number(config: Mapping[str, Any], name: str) -> float:
    """A number of a config.json; raises `DrafterRefusedError`."""
    value = config.get(name)
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise DrafterRefusedError(f"{CONFIG_FILE}: {name} must be a number, got {value!r}")
    return float(value)


def _aux_layers(config: Mapping[str, Any], default: tuple[int, ...]) -> tuple[int, ...]:
    """Read as vLLM does: the top-level field, then eagle_config's own, both as "entering", then its default."""
    nested = config.get("eagle_config") or {}
    layers = config.get("eagle_aux_hidden_state_layer_ids") or nested.get("eagle_aux_hidden_state_layer_ids")
    if layers is None:
        return default
    if not isinstance(layers, list | tuple) or not all(type(i) is int for i in layers):
        raise DrafterRefusedError(f"{CONFIG_FILE}: eagle_aux_hidden_state_layer_ids must be integers, got {layers!r}")
    return tuple(sorted(layers))  # vLLM captures in ascending order, whatever the order here


def _rope_theta(config: Mapping[str, Any]) -> float:
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if rope.get("rope_type", rope.get("type", "default")) != "default":
        raise DrafterRefusedError(f"only unscaled rotary positions can be swapped, got {rope!r}")
    return number({"rope_theta": rope.get("rope_theta") or config.get("rope_theta")}, "rope_theta")


def product(shape: tuple[int, ...]) -> int:
    """Elements of a shape."""
    return int(torch.Size(shape).numel())
