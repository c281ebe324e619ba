"""A drafter on disk, in the layout that SGLang and vLLM load as it stands: model.safetensors and config.json.

Reading is strict, because engines are not: a missing lm_head or d2t, a wrong layer id or an old embedding loads there
without an error and only shows as a poor α, or worse, as a changed policy. Whatever does not fit raises
`CheckpointError`. `embed_tokens` is never written and never accepted: engines that share it with the target would
overwrite the policy's own embedding. A drafter over the target's whole vocabulary has no `d2t` and `t2d`: vLLM refuses
to start with them, and they would say nothing.

Not here: other projects' layouts (`drafter.formats`), and publishing a directory atomically (the registry does that).
Files are complete and synced when `write_drafter` returns.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from drafter.errors import CheckpointError, DrafterError, VocabularyError
from drafter.model import DrafterConfig, Eagle3Drafter
from drafter.mtp import MtpConfig
from drafter.vocabulary import DraftVocabulary
from rl_hooks.durable import sync

MODEL_FILE: Final = "model.safetensors"
CONFIG_FILE: Final = "config.json"
INDEX_FILE: Final = "model.safetensors.index.json"
#: Fields that change what the tensors mean. We support one value each; absent means that value.
_FIXED: Final[Mapping[str, Any]] = {
    "norm_output": False,
    "norm_before_fc": False,
    "fc_norm": False,
    "attention_bias": False,
    "bias": False,
    "tie_word_embeddings": False,
}
#: Of those, what an export states. The others are newer switches, which are off where they are absent.
_STATED: Final = ("norm_output", "attention_bias", "bias", "tie_word_embeddings")
_MAPS: Final = ("d2t", "t2d")
_SIZES: Final = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "draft_vocab_size",
)
_STORAGE: Final = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_MAX_CONFIG_BYTES: Final = 1 << 20
_MAX_INDEX_BYTES: Final = 1 << 28
_MAX_SIZE: Final = 1 << 24  # of anything that a config counts
_MAX_LAYERS: Final = 64


@dataclass(frozen=True, slots=True)
class FileDigest:
    """What a written file must be when it is read elsewhere."""

    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True, eq=False)
class StoredDrafter:
    """A drafter as files hold it: weights [canonical name] in one dtype, without maps and embedding."""

    config: DrafterConfig
    vocabulary: DraftVocabulary
    weights: Mapping[str, Tensor]

    @property
    def dtype(self) -> torch.dtype:
        """Storage of the weights."""
        return next(iter(self.weights.values())).dtype

    def tensors(self) -> dict[str, Tensor]:
        """All tensors of the canonical layout, `d2t` and `t2d` included where the vocabulary is reduced."""
        if len(self.vocabulary) == self.vocabulary.vocab_size:
            return dict(self.weights)
        return {**self.weights, "d2t": self.vocabulary.d2t, "t2d": self.vocabulary.t2d}


def write_drafter(
    directory: Path, drafter: Eagle3Drafter, *, dtype: torch.dtype = torch.float32
) -> dict[str, FileDigest]:
    """Write model.safetensors and config.json into an existing `directory`, synced to disk; return their digests.

    `dtype` is the storage of the weights. Refuses a drafter with weights that are not finite, also once rounded.
    """
    if dtype not in _STORAGE.values():
        raise CheckpointError(f"weights are stored as float32, bfloat16 or float16, got {dtype}")
    weights = {name: value.detach().to("cpu", dtype).contiguous() for name, value in drafter.named_parameters()}
    return write_stored(directory, StoredDrafter(drafter.config, drafter.vocabulary, weights))


def write_stored(directory: Path, stored: StoredDrafter) -> dict[str, FileDigest]:
    """`write_drafter` for a drafter that needs no embedding because it is not run."""
    tensors = stored.tensors()
    check_tensors(tensors, stored.config)
    save_file(tensors, str(directory / MODEL_FILE), metadata={"format": "pt"})
    document = export_config(stored.config, stored.dtype)
    (directory / CONFIG_FILE).write_text(json.dumps(document, indent=2) + "\n")
    return finish_files(directory)


def finish_files(directory: Path) -> dict[str, FileDigest]:
    """Sync both files and their directory to the disk; return what they must be when they are read elsewhere."""
    digests = {name: _sync_and_digest(directory / name) for name in (MODEL_FILE, CONFIG_FILE)}
    sync(directory)
    return digests


def check_tensors(tensors: Mapping[str, Tensor], config: DrafterConfig) -> None:
    """Raise `CheckpointError` unless names and shapes are the config's, in one dtype, and every value is finite."""
    expected = tensor_shapes(config)
    for name in expected.keys() | tensors.keys():
        shape = tuple(tensors[name].shape) if name in tensors else None
        if shape != expected.get(name):
            raise CheckpointError(f"{name} of this drafter is {shape}, its config says {expected.get(name)}")
    dtypes = {tensor.dtype for name, tensor in tensors.items() if name not in _MAPS}
    if len(dtypes) != 1 or not dtypes <= set(_STORAGE.values()):
        raise CheckpointError(
            f"weights must share one dtype of float32, bfloat16 and float16, got {', '.join(sorted(map(str, dtypes)))}"
        )
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise CheckpointError(
                f"{name} is not finite as {tensor.dtype}; go back to the last good weights, do not publish"
            )


def read_drafter(directory: Path, embed_tokens: Tensor, *, dtype: torch.dtype = torch.float32) -> Eagle3Drafter:
    """Read what `write_drafter` wrote, or another's export in the same layout, with weights as `dtype` on the CPU.

    embed_tokens [V, H] is the target's. Raises `CheckpointError`: names, shapes, dtypes, vocabulary, values.
    """
    try:
        return build_drafter(read_stored(directory), embed_tokens, dtype=dtype)
    except CheckpointError:
        raise
    except DrafterError as error:
        raise CheckpointError(f"{directory} does not fit this target: {error}") from error


def read_stored(directory: Path) -> StoredDrafter:
    """Read the files of a drafter without building it. Raises `CheckpointError`."""
    config = parse_config(read_config(directory / CONFIG_FILE))
    tensors = _read_tensors(directory / MODEL_FILE, config)
    vocabulary = read_vocabulary(tensors, config)
    return StoredDrafter(config, vocabulary, {n: t for n, t in tensors.items() if n not in _MAPS})


def build_drafter(stored: StoredDrafter, embed_tokens: Tensor, *, dtype: torch.dtype = torch.float32) -> Eagle3Drafter:
    """Make the model of stored weights, in `dtype` on the CPU, over the target's embed_tokens [V, H]."""
    # The constructor draws initial weights; a reader must not advance the caller's random numbers.
    with torch.random.fork_rng(devices=[]):
        # The embedding is only looked at: `to` would copy it, large as it is.
        drafter = Eagle3Drafter(stored.config, stored.vocabulary, embed_tokens.to("meta"))
    drafter.to(dtype)
    drafter.embed_tokens = embed_tokens.detach()
    maps = {"d2t": stored.vocabulary.d2t, "t2d": stored.vocabulary.t2d}
    drafter.load_state_dict({**{name: t.to(dtype) for name, t in stored.weights.items()}, **maps})
    return drafter


def tensor_shapes(config: DrafterConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of the canonical layout; the two maps only where the vocabulary is reduced."""
    H, Ht, D, V = config.hidden_size, config.target_hidden_size, config.draft_vocab_size, config.vocab_size
    queries, keys = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    maps: dict[str, tuple[int, ...]] = {} if D == V else {"d2t": (D,), "t2d": (V,)}
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (H, len(config.aux_layers) * Ht),
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


def export_config(config: DrafterConfig, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """The engines' config.json. vLLM reads the top-level layer ids ("entering"); SGLang adds 1 to eagle_config's."""
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "target_model_type": config.model_type,
        "hidden_act": "silu",
        **{name: getattr(config, name) for name in _SIZES},
        "target_hidden_size": config.target_hidden_size,
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "norm_before_residual": config.norm_before_residual,
        "num_hidden_layers": config.num_hidden_layers,
        **{name: _FIXED[name] for name in _STATED},
        "torch_dtype": str(dtype).removeprefix("torch."),
        "eagle_aux_hidden_state_layer_ids": list(config.aux_layers),
        "eagle_config": {
            "use_aux_hidden_state": True,
            "eagle_aux_hidden_state_layer_ids": [layer - 1 for layer in config.aux_layers],
        },
    }


def parse_config(document: Mapping[str, Any]) -> DrafterConfig:
    """Read a drafter's config.json. Raises `CheckpointError` for what this layout does not cover."""
    for name, value in _FIXED.items():
        if document.get(name, value) != value:
            raise CheckpointError(f"config.json: {name} must be {json.dumps(value)}, got {document[name]!r}")
    _check_meaning(document)
    before = document.get("norm_before_residual", False)
    if not isinstance(before, bool):
        raise CheckpointError(f"config.json: norm_before_residual must be true or false, got {before!r}")
    sizes = {name: _positive(document, name) for name in _SIZES}
    layers = _positive({"num_hidden_layers": 1, **document}, "num_hidden_layers")
    if layers > _MAX_LAYERS:
        raise CheckpointError(f"config.json: num_hidden_layers must be at most {_MAX_LAYERS}, got {layers}")
    eps = document.get("rms_norm_eps")
    if not isinstance(eps, float) or not 0 < eps < 1:
        raise CheckpointError(f"config.json: rms_norm_eps must be a small positive number, got {eps!r}")
    try:
        return DrafterConfig(
            **sizes,
            target_hidden_size=_positive(
                {"target_hidden_size": sizes["hidden_size"], **document}, "target_hidden_size"
            ),
            aux_layers=_aux_layers(document),
            rope_theta=_rope_theta(document),
            rms_norm_eps=eps,
            max_position_embeddings=_positive(document, "max_position_embeddings"),
            model_type=str(document.get("target_model_type", "llama")),
            norm_before_residual=before,
            num_hidden_layers=layers,
        )
    except CheckpointError:
        raise
    except DrafterError as error:
        raise CheckpointError(f"config.json: {error}") from error


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
        if rope.get("rope_type", rope.get("type", "default")) != "default":
            faults.append(f"scaled rotary positions {dict(rope)!r}")
    shares = [where.get("partial_rotary_factor") for where in (document, *ropes) if isinstance(where, Mapping)]
    if any(share not in (None, 1, 1.0) for share in shares):
        faults.append(f"partial_rotary_factor {next(s for s in shares if s is not None)!r}")
    if faults:
        raise CheckpointError(
            f"config.json: {', '.join(faults)} is not supported: this layout has silu without biases, full attention "
            "and unscaled rotary positions over whole heads"
        )


def config_fingerprint(config: DrafterConfig | MtpConfig, vocabulary: DraftVocabulary) -> str:
    """Identity (32 hexadecimal digits) of all that an engine cannot swap along with the weights.

    Sizes, layers, rotary base, norm epsilon and the draft vocabulary. `max_position_embeddings` is left out: it is a
    limit, not a meaning.
    """
    fields = {name: value for name, value in config.identity().items() if name != "max_position_embeddings"}
    text = json.dumps({**fields, "d2t": vocabulary.digest}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def read_config(path: Path) -> Mapping[str, Any]:
    """Read a JSON object of bounded size. Raises `CheckpointError`."""
    try:
        return _read_object(path, _MAX_CONFIG_BYTES)
    except OSError as error:
        raise CheckpointError(f"a drafter needs {CONFIG_FILE} beside {MODEL_FILE}: {error}") from error


def read_index(directory: Path) -> dict[str, str] | None:
    """Read which file of `directory` holds each tensor of a sharded model; None where there is no index.

    Raises `CheckpointError` for one that cannot be read or names a file elsewhere. The files may be absent.
    """
    path = directory / INDEX_FILE
    if not path.exists():
        return None
    try:
        files = _read_object(path, _MAX_INDEX_BYTES).get("weight_map")
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if not isinstance(files, dict):
        raise CheckpointError(f"{path}: weight_map must be an object of tensors and their files, got {files!r:.80}")
    for file in files.values():
        if not isinstance(file, str) or Path(file).name != file:
            raise CheckpointError(f"{path} names a file outside its directory: {file!r}")
    return files


def _read_object(path: Path, limit: int) -> dict[str, Any]:
    size = path.stat().st_size
    if size > limit:
        raise CheckpointError(f"{path} has {size} bytes; at most {limit} are read")
    try:
        document = json.loads(path.read_text())
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from error
    if not isinstance(document, dict):
        raise CheckpointError(f"{path} must hold a JSON object, got {type(document).__name__}")
    return document


def _positive(document: Mapping[str, Any], name: str) -> int:
    value = document.get(name)
    if type(value) is not int or not 0 < value <= _MAX_SIZE:
        raise CheckpointError(f"config.json: {name} must be a positive integer up to {_MAX_SIZE}, got {value!r}")
    return value


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
    for name in ("rope_parameters", "rope_scaling"):
        if not isinstance(document.get(name) or {}, Mapping):
            raise CheckpointError(f"config.json: {name} must be an object, got {document[name]!r}")
    rope = document.get("rope_parameters") or document.get("rope_scaling") or {}
    given = [x for x in (document.get("rope_theta"), rope.get("rope_theta")) if x is not None]
    if not given or any(type(x) not in (int, float) or not 0 < x <= sys.float_info.max or x != given[0] for x in given):
        raise CheckpointError(
            f"config.json: one positive rope_theta, the same in rope_parameters, is expected; got {given}"
        )
    return float(given[0])


def _read_tensors(path: Path, config: DrafterConfig) -> dict[str, Tensor]:
    """Load a file after its header has been compared with the config. Values are checked to be finite."""
    try:
        with safe_open(str(path), framework="pt", device="cpu") as file:
            found = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
            _check_header({n: (tuple(s.get_shape()), s.get_dtype()) for n, s in found.items()}, config)
            tensors: dict[str, Tensor] = {name: file.get_tensor(name) for name in found}
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}; fetch it again") from error
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise CheckpointError(f"{name} holds NaN or infinity; this drafter must not be served")
    return tensors


def _check_header(found: Mapping[str, tuple[tuple[int, ...], str]], config: DrafterConfig) -> None:
    expected = tensor_shapes(config)
    if config.draft_vocab_size == config.vocab_size:  # maps that say nothing are allowed, their content is checked
        expected |= {name: (config.vocab_size,) for name in _MAPS if name in found}
    embeddings = [name for name in found if "embed_tokens" in name]
    if embeddings:
        raise CheckpointError(
            f"{embeddings[0]} must not be in a drafter's file: engines that share it with the target would overwrite "
            "the policy's embedding. Export without it"
        )
    missing, extra = sorted(expected.keys() - found.keys()), sorted(found.keys() - expected.keys())
    if missing or extra:
        raise CheckpointError(
            f"tensors missing: {', '.join(missing) or 'none'}; not part of the layout: {', '.join(extra) or 'none'}. "
            "Rename to the published names (midlayer.*, fc, norm, lm_head, d2t, t2d)"
        )
    for name, (shape, _) in found.items():
        if shape != expected[name]:
            raise CheckpointError(f"{name} must be {expected[name]} by its config, got {shape}")
    kinds = {dtype for name, (_, dtype) in found.items() if name not in _MAPS}
    if len(kinds) != 1 or not kinds <= _STORAGE.keys():
        raise CheckpointError(f"weights must share one dtype of {', '.join(_STORAGE)}, got {', '.join(sorted(kinds))}")
    for name, dtype in zip(_MAPS, ("I64", "BOOL"), strict=True):
        if name in found and found[name][1] != dtype:
            raise CheckpointError(f"{name} must be {dtype}, got {found[name][1]}")


def read_vocabulary(tensors: Mapping[str, Tensor], config: DrafterConfig) -> DraftVocabulary:
    """The draft vocabulary that d2t gives, held against t2d; without them the target's whole one."""
    if "d2t" not in tensors and "t2d" not in tensors and config.draft_vocab_size == config.vocab_size:
        return DraftVocabulary.full(config.vocab_size)
    if "d2t" not in tensors:
        raise CheckpointError("d2t is missing: without it engines take the first draft tokens for the target's")
    try:
        vocabulary = DraftVocabulary.from_d2t(tensors["d2t"], config.vocab_size)
    except VocabularyError as error:
        raise CheckpointError(str(error)) from error
    if "t2d" not in tensors:
        return vocabulary
    wrong = torch.nonzero(vocabulary.t2d != tensors["t2d"]).flatten()
    if wrong.numel():
        raise CheckpointError(
            f"d2t and t2d disagree on {wrong.numel()} tokens, first on {int(wrong[0])}: they come from two exports"
        )
    return vocabulary


def _sync_and_digest(path: Path) -> FileDigest:
    sync(path)
    with path.open("rb") as file:
        return FileDigest(path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest())
