"""A drafter's two files, config.json and model.safetensors, of either kind: the one reading of them.

Service, worker, agent, vLLM plugin and SGLang loader all decide by these functions. Nothing beside the standard library
is imported, because the engines' environments are not ours. What one engine cannot take although it is a drafter is in
`rl_hooks.format.engines`.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final, Literal, get_args

from rl_hooks.format.eagle3 import (
    MAPS,
    MAX_PARAMETERS,
    CheckpointError,
    DrafterConfig,
    Found,
    check_header,
    parse_config,
    tensor_shapes,
    with_layers,
)
from rl_hooks.format.mtp import MtpConfig, check_mtp_header, mtp_shapes, of_module, parse_mtp_config, prefix

Sizes = DrafterConfig | MtpConfig

MODEL_FILE: Final = "model.safetensors"
CONFIG_FILE: Final = "config.json"
#: What a drafter is, as manifests and config.json name it: a small model, or a policy's own module.
DrafterKind = Literal["eagle3", "mtp"]
_KINDS: Final[tuple[DrafterKind, ...]] = get_args(DrafterKind)
#: Of a model in several files: which of them holds each tensor.
INDEX_FILE: Final = "model.safetensors.index.json"
MAX_CONFIG_BYTES: Final = 1 << 20
_MAX_INDEX_BYTES: Final = 1 << 28
#: As `rl_hooks.format.container` reads it.
_MAX_HEADER_BYTES: Final = 1 << 20
#: Fields in which the drafters of one engine may differ: a label and a limit.
_NO_DIFFERENCE: Final = ("model_type", "max_position_embeddings")


def kind_of(config: Mapping[str, Any]) -> DrafterKind:
    """The kind of drafter, by its config.json. Raises `CheckpointError` for one that is not known."""
    own = config.get("draftalign") or {}
    kind = own.get("kind", "eagle3") if isinstance(own, Mapping) else own
    if kind not in _KINDS:
        raise CheckpointError(f"config.json: draftalign.kind must be {' or '.join(_KINDS)}, got {kind!r:.80}")
    known: DrafterKind = kind
    return known


def read_object(path: Path, max_bytes: int = MAX_CONFIG_BYTES) -> dict[str, Any]:
    """Read a JSON object of bounded size. Raises OSError or `CheckpointError`."""
    size = path.stat().st_size
    if size > max_bytes:
        raise CheckpointError(f"{path} has {size} bytes; at most {max_bytes} are read")
    return parse_object(path.read_bytes(), path)


def parse_object(body: bytes, path: Path) -> dict[str, Any]:
    """The JSON object that was read from `path`. Raises `CheckpointError`."""
    try:
        document = json.loads(body.decode())
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from error
    if not isinstance(document, dict):
        raise CheckpointError(f"{path} must hold a JSON object, got {type(document).__name__}")
    return document


def read_index(directory: Path) -> dict[str, str] | None:
    """Read which file of `directory` holds each tensor of a sharded model; None where there is no index.

    Raises `CheckpointError` for one that cannot be read or names a file elsewhere. The files may be absent.
    """
    path = directory / INDEX_FILE
    if not path.exists():
        return None
    try:
        files = read_object(path, _MAX_INDEX_BYTES).get("weight_map")
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if not isinstance(files, dict):
        raise CheckpointError(f"{path}: weight_map must be an object of tensors and their files, got {files!r:.80}")
    for file in files.values():
        if not isinstance(file, str) or Path(file).name != file:
            raise CheckpointError(f"{path} names a file outside its directory: {file!r}")
    return files


def parse_drafter(config: Mapping[str, Any], aux_layers: Sequence[int] = ()) -> Sizes:
    """Read a config.json. Raises `CheckpointError` for what no drafter of ours is.

    aux_layers: what the run or the engine captures, where that is known. An EAGLE-3 drafter that names none reads them.
    """
    if kind_of(config) == "mtp":
        return parse_mtp_config(config)
    return parse_config(with_layers(config, aux_layers) if aux_layers else config)


def check_drafter(found: Found, sizes: Sizes) -> None:
    """Raise `CheckpointError` unless a file's tensors are a drafter's of these sizes: names, shapes and dtypes.

    In a file with more than an MTP module, such as a policy's checkpoint, the module alone is looked at.
    """
    if isinstance(sizes, MtpConfig):
        check_mtp_header({short: found[name] for short, name in of_module(found, sizes).items()}, sizes)
    else:
        check_header(found, sizes)


def weight_shapes(sizes: Sizes) -> dict[str, tuple[int, ...]]:
    """Name in the file and shape of every weight; d2t and t2d are none."""
    if isinstance(sizes, MtpConfig):
        return {prefix(sizes) + name: shape for name, shape in mtp_shapes(sizes).items()}
    return {name: shape for name, shape in tensor_shapes(sizes).items() if name not in MAPS}


def most_bytes(sizes: Sizes) -> int:
    """What model.safetensors can have: every weight in float32, copies of embedding and head, maps, and the header.

    The copies are the policy's own: published drafters carry them sometimes, and agents strip them.
    """
    weights = sum(math.prod(shape) for shape in weight_shapes(sizes).values())
    copies = min(2 * sizes.vocab_size * sizes.hidden_size, MAX_PARAMETERS)
    maps = sizes.vocab_size * (8 + 1)
    return 4 * (weights + copies) + maps + _MAX_HEADER_BYTES


def fingerprint(sizes: Sizes, d2t_digest: str) -> str:
    """Identity (32 hexadecimal digits) of all that an engine cannot swap along with the weights.

    Sizes, layers, rotary base, norm epsilon and the draft vocabulary. `max_position_embeddings` is left out: it is a
    limit, not a meaning.
    """
    fields = {name: value for name, value in sizes.identity().items() if name != "max_position_embeddings"}
    text = json.dumps({**fields, "d2t": d2t_digest}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def vocabulary_digest(vocab_size: int, ids: bytes) -> str:
    """Identity of a draft vocabulary: V, and the target ids as little-endian int64 in the order of the draft's."""
    return hashlib.sha256(vocab_size.to_bytes(8, "little") + ids).hexdigest()[:32]


def differences(ours: Sizes, theirs: Sizes) -> list[str]:
    """`field is ours here, theirs there` for each field in which they differ and that weights alone cannot change."""
    here, there = _flat(asdict(ours)), _flat(asdict(theirs))
    names = (name for name in here | there if name.rpartition(".")[2] not in _NO_DIFFERENCE)
    return [f"{n} is {here.get(n)} here, {there.get(n)} there" for n in names if here.get(n) != there.get(n)]


def _flat(fields: Mapping[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in fields.items():
        flat |= {f"{name}.{k}": v for k, v in _flat(value).items()} if isinstance(value, Mapping) else {name: value}
    return flat
