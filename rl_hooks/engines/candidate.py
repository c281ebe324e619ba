"""A drafter's files on their way into a running engine: checked before the engine is touched, in vLLM and SGLang alike.

What the files must hold is `rl_hooks.format`'s. Here they are held against the one drafter that the engine runs.
Pure: bytes and configurations in, tensors or a refusal out. Legend: D draft vocabulary.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from rl_hooks import wire
from rl_hooks.errors import HookError
from rl_hooks.format import drafter
from rl_hooks.format.drafter import (
    CONFIG_FILE,
    MAX_CONFIG_BYTES,
    MODEL_FILE,
    Sizes,
    check_drafter,
    parse_drafter,
    parse_object,
)
from rl_hooks.format.eagle3 import MAPS, DrafterConfig, DrafterError, named, parse_config, with_defaults, with_layers
from rl_hooks.format.engines import EngineName, limits
from rl_hooks.format.layouts import canonical_names
from rl_hooks.sending.features import WIRE_DTYPES

#: What the engine shares with the policy, in the names of drafters' files.
_SHARED: Final = ("embed_tokens", "shared_head.head")
_DTYPES: Final = {name: dtype for dtype, (name, _) in WIRE_DTYPES.items()}
#: Fields of an engine's copy of the config that do not count: its modules show what it captures and shares.
_NOT_BY_CONFIG: Final = ("eagle_aux_hidden_state_layer_ids", "eagle_config", "tie_word_embeddings")


class DrafterRefusedError(HookError):
    """The drafter does not fit the engine and never will; nothing was changed."""


class DigestMismatchError(HookError):
    """The files are not the ones that were asked for; nothing was changed, and the right ones may come."""


def read_file(path: Path, max_bytes: int, expected_sha256: str | None) -> tuple[bytes, str]:
    """The whole file, and its SHA-256. It is read once, so what is judged and loaded later is what was compared here.

    Raises `DigestMismatchError`, `DrafterRefusedError` for a file that is too large, or OSError.
    """
    with path.open("rb") as file:
        # `read` takes as much memory as it is asked for.
        body = file.read(min(os.fstat(file.fileno()).st_size, max_bytes) + 1)
    if len(body) > max_bytes:
        raise DrafterRefusedError(f"{path.name} has more than {max_bytes} bytes, which this engine cannot need")
    found = hashlib.sha256(body).hexdigest()
    if expected_sha256 not in (None, found):
        raise DigestMismatchError(
            f"{path} holds other bytes than were asked for: expected sha256 {expected_sha256}, got {found}; nothing "
            "was loaded. The agent downloads this version again; where that does not help, check that engine and agent "
            "see the same disk"
        )
    return body, found


def drafter_files(name: str, revision: str | None = None) -> Path:
    """The directory of a drafter that an engine was started with, by a path or by a name in the local hub cache.

    Raises OSError where it has no model.safetensors. The service would start a drafter with another vocabulary, which
    that engine could never load.
    """
    directory = Path(name)
    if not directory.is_dir():
        try:
            from huggingface_hub import snapshot_download

            directory = Path(snapshot_download(name, revision=revision, local_files_only=True))
        except (ImportError, ValueError, OSError) as error:
            raise FileNotFoundError(f"the files of the drafter {name} are not found: {error}") from error
    if not (directory / MODEL_FILE).is_file():
        raise FileNotFoundError(f"{directory} has no {MODEL_FILE}; start the server with a drafter in one such file")
    return directory


def running_sizes(config: Mapping[str, Any], layers: tuple[int, ...]) -> DrafterConfig:
    """Sizes of the EAGLE-3 drafter that an engine runs, by the engine's copy of its config and the layers it captures.

    Raises `DrafterRefusedError` for one that no file could replace.
    """
    own = with_defaults({name: value for name, value in config.items() if name not in _NOT_BY_CONFIG})
    nested = config.get("eagle_config")
    if isinstance(nested, Mapping) and "norm_before_fc" in nested:  # vLLM and SGLang look there first
        own["norm_before_fc"] = bool(nested["norm_before_fc"])
    try:
        return parse_config(with_layers(own, layers))
    except DrafterError as error:
        raise DrafterRefusedError(str(error)) from error


def check_config(directory: Path, running: Sizes, engine: EngineName, expected_sha256: str | None = None) -> None:
    """Refuse a drafter of other sizes or other meaning: same-shaped ones load without a word and only cost α.

    Raises `DrafterRefusedError`, `DigestMismatchError`, or OSError.
    """
    path = directory / CONFIG_FILE
    body, _ = read_file(path, MAX_CONFIG_BYTES, expected_sha256)
    try:
        document = parse_object(body, path)
        sizes = parse_drafter(document, running.aux_layers if isinstance(running, DrafterConfig) else ())
    except DrafterError as error:
        raise DrafterRefusedError(str(error)) from error
    if beyond := limits(engine, sizes):
        raise DrafterRefusedError("; ".join(beyond))
    if differences := drafter.differences(sizes, running):
        raise DrafterRefusedError("restart the server to change " + "; ".join(differences))


def read_candidate(
    body: bytes,
    running: Sizes,
    d2t: Tensor,
    dtype: torch.dtype,
    float32: frozenset[str] = frozenset(),
    *,
    published: bool = False,
) -> dict[str, Tensor]:
    """The weights as `dtype` on the CPU, those in `float32` as float32. The file's d2t must equal the engine's, `d2t`.

    The header is checked before any tensor is made. `published`: the file may be in speculators' layout, with which an
    engine can start. Raises `DrafterRefusedError`.
    """
    header = _check_header(body, running, published=published)
    tensors = {name: _tensor(body, header.header_bytes + info.begin, info) for name, info in header.tensors.items()}
    _check_vocabulary(tensors.pop("d2t", torch.zeros_like(d2t)), tensors.pop("t2d", None), d2t, running.vocab_size)
    weights = {name: tensor.to(torch.float32 if name in float32 else dtype) for name, tensor in tensors.items()}
    for name, weight in weights.items():
        # As the engine will hold it: a float32 weight can be finite and still overflow float16.
        if not bool(torch.isfinite(weight).all()):
            raise DrafterRefusedError(
                f"{name} holds NaN or infinity as {weight.dtype}; this drafter must not be served"
            )
    return weights


def vocabulary_digest(d2t: Tensor, vocab_size: int) -> str:
    """Identity of the draft vocabulary that offsets int64[D] give."""
    ids = d2t.detach().to("cpu", torch.int64) + torch.arange(d2t.numel())
    return drafter.vocabulary_digest(vocab_size, ids.numpy().astype("<i8").tobytes())


def _tensor(body: bytes, offset: int, info: wire.TensorInfo) -> Tensor:
    # NumPy copies without the GIL. `safetensors.torch.load` holds it, which stops the engine's steps.
    flat = np.frombuffer(body, np.uint8, info.end - info.begin, offset).copy()
    return torch.from_numpy(flat).view(_DTYPES[info.dtype]).view(info.shape)


def _check_header(body: bytes, running: Sizes, *, published: bool) -> wire.Header:
    try:
        header = wire.parse_header(body)
    except wire.WireError as error:
        raise DrafterRefusedError(f"{MODEL_FILE} is no safetensors file: {error}") from error
    if header.file_bytes != len(body):
        raise DrafterRefusedError(
            f"{MODEL_FILE} is damaged: {len(body)} bytes, where its header says {header.file_bytes}; fetch it again"
        )
    if published:
        try:
            names = canonical_names(header.tensors)
        except DrafterError as error:
            raise DrafterRefusedError(f"{MODEL_FILE} holds {error}") from error
        header = replace(header, tensors={ours: header.tensors[theirs] for ours, theirs in names.items()})
    infos = header.tensors
    if poison := sorted(name for name in infos if any(shared in name for shared in _SHARED)):
        raise DrafterRefusedError(
            f"{poison[0]} must not be in a drafter's file: the engine shares that module with the policy, whose "
            "weights it would overwrite. Export without it"
        )
    try:
        check_drafter({name: (info.shape, info.dtype) for name, info in infos.items()}, running)
    except DrafterError as error:
        raise DrafterRefusedError(f"{error}. The engine would load what it knows without a word") from error
    maps = MAPS if isinstance(running, DrafterConfig) else ()
    if extra := sorted(infos.keys() - drafter.weight_shapes(running).keys() - set(maps)):  # beside an MTP module
        raise DrafterRefusedError(f"not part of the drafter: {named(extra)}")
    return header


def _check_vocabulary(found: Tensor, mask: Tensor | None, served: Tensor, vocab_size: int) -> None:
    if found.shape != served.shape:
        raise DrafterRefusedError(
            f"d2t has {found.numel()} entries, the served one {served.numel()}; restart the server with this drafter"
        )
    if not torch.equal(found, served):
        changed = int((found != served).sum())
        raise DrafterRefusedError(
            f"d2t differs from the served one in {changed} of {served.numel()} entries; the draft vocabulary is fixed "
            "for the life of a server: restart it with this drafter"
        )
    if mask is not None:
        expected = torch.zeros(vocab_size, dtype=torch.bool)
        expected[found + torch.arange(found.numel())] = True
        if not torch.equal(mask, expected):
            raise DrafterRefusedError("t2d and d2t of this file name different tokens: they come from two exports")
