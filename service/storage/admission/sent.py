"""Drafters that were trained elsewhere: the check of POST /drafters, and their way into the archive.

The body is a safetensors file of the drafter's tensors under their own names; its metadata hold `format` and
`drafter_config`, the text of its config.json. It must be of the run's lineage, because engines cannot swap a draft
vocabulary or a size. It becomes a version that is not served; the worker's gate judges it on fresh rollouts beside the
served one. No torch: what PUT /runs asks of an initial drafter is asked here by the same code, values included.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from rl_hooks.durable import AtomicDirectory
from rl_hooks.format.drafter import (
    CONFIG_FILE,
    MODEL_FILE,
    Sizes,
    differences,
    kind_of,
    parse_drafter,
    read_object,
    vocabulary_digest,
)
from rl_hooks.format.eagle3 import DrafterError
from rl_hooks.format.run import check_run
from rl_hooks.wire import DRAFTER_FORMAT, Header, MappedFile, Tensor, WireError, encode, json_field, layers_field
from service.errors import RunConflict
from service.storage.admission.nearness import check_finite
from service.storage.drafters.versions import Manifest
from service.storage.layout import Layout
from service.storage.registry import Registry
from service.storage.runs import load_target

#: Drafters that may wait for the gate at a time: each costs the replay of a batch, one after the other.
MOST_WAITING: Final = 4
_STORAGE: Final = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


def read_sent_header(layout: Layout, run: str, header: Header) -> Sizes:
    """Verify the header of a POST /drafters body against the run's target and lineage.

    Raises WireError where it is no drafter of the target, RunConflict where it is of another lineage.
    """
    if header.metadata.get("format") != DRAFTER_FORMAT:
        raise WireError("format", f"expected {DRAFTER_FORMAT!r}, got {header.metadata.get('format')!r}")
    config = json_field(header.metadata, "drafter_config", dict)
    metadata = load_target(layout, run).header.metadata
    target, layers = json_field(metadata, "config", dict), layers_field(metadata)
    try:
        check_run(target, layers, config, {name: (info.shape, info.dtype) for name, info in header.tensors.items()})
        sizes = parse_drafter(config, layers)
    except DrafterError as error:
        raise WireError("drafter_config", str(error)) from error
    served = _served(layout, run)
    own = parse_drafter(read_object(layout.drafter_file(run, served.version, CONFIG_FILE)))
    differ = [f"its kind is {kind_of(config)}"] if kind_of(config) != served.kind else differences(own, sizes)
    if differ:
        _refuse(run, served, "; ".join(differ).replace(" here, ", " in the run, ").replace(" there", " in the drafter"))
    return sizes


def admit(layout: Layout, run: str, path: Path, reason: str, by: str | None) -> tuple[Manifest, bool]:
    """Make a version of the verified file at `path` that waits for the gate; returns it, and whether it is new.

    The same files again are the same version, which waits again if it was refused. Reads all of it: call in a thread.
    """
    file = MappedFile(path)
    check_finite(path)
    sizes, served, registry = read_sent_header(layout, run, file.header), _served(layout, run), Registry(layout)
    ids = draft_ids(file, sizes.vocab_size)
    if vocabulary_digest(sizes.vocab_size, ids.astype("<i8").tobytes()) != served.d2t_sha256:
        _refuse(run, served, "its draft vocabulary is another one")
    # That of the lineage: of the fields that may differ, engines know those that they began with.
    document = read_object(layout.drafter_file(run, served.version, CONFIG_FILE)) | {"torch_dtype": _storage(file)}
    with AtomicDirectory(registry.stage(run)) as staged:
        tensors = {n: Tensor.of(file.array(n), info.dtype) for n, info in file.header.tensors.items()}
        with (staged.path / MODEL_FILE).open("wb") as model:
            model.writelines(encode(tensors, {"format": "pt"}))
        (staged.path / CONFIG_FILE).write_text(json.dumps(document, indent=2) + "\n")
        return registry.archive(run, staged.path, like=served, reason=reason, by=by, most_waiting=MOST_WAITING)


def draft_ids(file: MappedFile, vocab_size: int, part: str = "") -> NDArray[np.int64]:
    """Target ids of a drafter's draft tokens; without d2t, the whole vocabulary.

    Raises WireError unless they ascend within the vocabulary and t2d, if it is there, names the same.
    """
    d2t, t2d = f"{part}d2t", f"{part}t2d"
    ids = np.arange(vocab_size, dtype=np.int64)
    if d2t in file:
        offsets = file.array(d2t).reshape(-1).astype(np.int64)
        ids = offsets + np.arange(offsets.size)
        if not offsets.size or ids[0] < 0 or ids[-1] >= vocab_size or bool((ids[1:] <= ids[:-1]).any()):
            raise WireError(d2t, f"must hold offsets (target id minus draft id) of ids that ascend within {vocab_size}")
    if t2d in file and not np.array_equal(np.flatnonzero(file.array(t2d)), ids):
        raise WireError(t2d, "names other tokens than d2t: they come from two exports")
    return ids


def check_initial_drafter(path: Path) -> None:
    """Raise WireError where the draft vocabulary of a PUT /runs body contradicts itself."""
    file = MappedFile(path)
    draft_ids(file, file.header.tensors["embed_tokens"].shape[0], "drafter.")


def _served(layout: Layout, run: str) -> Manifest:
    served = Registry(layout).latest(run)
    if served is None:
        raise RunConflict(
            f"run {run!r} serves no drafter yet, so there is none to compare with: register the run with this one "
            "(the hook's drafter=), or wait for its first"
        )
    return served


def _refuse(run: str, served: Manifest, how: str) -> None:
    raise RunConflict(
        f"the drafter is of another lineage than run {run!r} and its {served.version}: {how}. Engines cannot swap "
        "that; register another run with this drafter"
    )


def _storage(file: MappedFile) -> str:
    """The type of the weights as a config.json names it."""
    found = {info.dtype for info in file.header.tensors.values()} & _STORAGE.keys()
    return _STORAGE[min(found)]
