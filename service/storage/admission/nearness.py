"""Check that a registration or a head belongs to the run's policy, by comparing weights.

RL moves a head in small steps; another model's head is unrelated. So a head must lie near one that the run already has:
the registered one, or one received since. Distance: |a - b| / max(|a|, |b|), Frobenius, over at most 256 rows spread
evenly over the token ids that both hold. Measured on the demo's policy (docs/reference/state.md): 0.053 after 150 steps
of RL, 0.32 after the hardest fine-tuning tried, 1.42 between two initialisations.

The API imports no torch: rows are read as NumPy from the mapped files, and bfloat16 is widened by a shift.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from rl_hooks.format.drafter import CONFIG_FILE, MODEL_FILE
from rl_hooks.wire import HEAD_FORMAT, LogitMap, MappedFile, Tensor, WireError, encode, json_field
from service.errors import RunConflict
from service.storage.layout import Layout
from service.storage.runs import differences

#: Largest distance of two heads of one run. Unrelated heads are 1 to 1.42 apart, whatever their norms.
FARTHEST: Final = 0.5
#: Of an untied embedding from the registered one, the only one that the run has: it is not sent again when it moves.
_FARTHEST_EMBEDDING: Final = 0.9
_SAMPLED_ROWS: Final = 256
_SCANNED_AT_ONCE: Final = 1 << 22
#: Unsigned type of each float's width, its bits without the sign, and the smallest of them that is refused: those of
#: 2^20, in float16 of infinity.
_BITS: Final[Mapping[str, tuple[str, int, int]]] = {
    "F32": ("<u4", 0x7FFFFFFF, 0x49800000),
    "BF16": ("<u2", 0x7FFF, 0x4980),
    "F16": ("<u2", 0x7FFF, 0x7C00),
}


@dataclass(frozen=True, slots=True)
class Joined:
    """Result of registering an existing run: a warning about ignored parts, and the head if the run lacks it."""

    warning: str | None
    new_head: list[bytes | memoryview] | None  # a file as PUT /runs/{run}/head takes it
    as_of_ns: int | None = None  # time to give its file; None: its arrival


def join_run(layout: Layout, run: str, registered: MappedFile, path: Path) -> Joined:
    """Compare a registration, the file at `path`, with the existing run's. Reads files: call in a thread.

    Raises RunConflict if it is of another policy. A head that differs from the head in force at its policy version is
    kept as that version's head: the trainer continues from there and does not send it again.

    The trainer may be older than the run: the head received last is of a higher version. If its version is above 0, the
    trainer has gone back to an earlier checkpoint. Its head is kept as received now, so it hides the heads of the
    abandoned attempt (`Target.at`). Version 0 hides no head, because an engine's tap always says 0: a tap of an engine
    that loaded its weights from disk looks like a trainer that starts again. The hook of such a trainer sends its head
    with the next version, and that one hides the others.
    """
    offered = MappedFile(path)
    _check_map(run, registered, offered)
    head = _Head.of(offered, int(offered.header.metadata["policy_version"]))
    kept = _kept_heads(layout, run, registered)
    config = differences(*(json_field(file.header.metadata, "config", dict) for file in (registered, offered)))
    _check_near(run, head, kept, f". Its config differs: {config}" if config else "")
    if "lm_head" in registered and "lm_head" in offered:  # untied: only the registration has the embedding
        embedding = _Head(offered, "embed_tokens", head.version)
        _check_near(run, embedding, [_Head(registered, "embed_tokens", -1)], farthest=_FARTHEST_EMBEDDING)
    in_force = max((one for one in kept if one.version <= head.version), key=_Head.received)
    newest = max(kept, key=_Head.received)
    ahead, apart = newest is not in_force, _compare(head, in_force)
    went_back = ahead and head.version > 0
    is_kept = apart[0] == 0.0 and not went_back
    as_of_ns = in_force.changed_ns if ahead and not went_back else None
    return Joined(_ignored(layout, run, registered, offered), None if is_kept else head.as_file(), as_of_ns)


def _check_map(run: str, registered: MappedFile, offered: MappedFile) -> None:
    """Raise RunConflict for another map of the logits: under the run's own, every batch of this trainer would die."""
    own, other = (LogitMap.from_metadata(file.header.metadata) for file in (registered, offered))
    # Two stacks may compute one scale in another order.
    if not all(math.isclose(a, b, rel_tol=1e-6) for a, b in zip(_figures(own), _figures(other), strict=True)):
        raise RunConflict(
            f"run {run!r} is registered with {own}, this one has {other} (metadata logit_scale, logit_softcap). "
            "Use another run name (the hook's run=), or delete the run first (`draftalign runs --delete`)"
        )


def _figures(one: LogitMap) -> tuple[float, float]:
    return one.scale, math.inf if one.softcap is None else one.softcap


def check_head(layout: Layout, run: str, registered: MappedFile, path: Path) -> None:
    """Raise RunConflict where a PUT /runs/{run}/head body is not near any head of the run. Call in a thread."""
    _check_near(run, _Head.of(MappedFile(path), 0), _kept_heads(layout, run, registered))


def check_finite(path: Path) -> None:
    """Raise WireError where a tensor holds NaN, infinity, or a magnitude of 2^20. Reads all of it: call in a thread.

    No trained weight is near that, and one that is finite and far above makes every forward overflow.
    """
    file = MappedFile(path)
    for name, info in file.header.tensors.items():
        if info.dtype not in _BITS:
            continue
        kind, mask, first_bad = _BITS[info.dtype]
        flat = file.array(name).reshape(-1).view(kind)
        for begin in range(0, flat.size, _SCANNED_AT_ONCE):
            if int((flat[begin : begin + _SCANNED_AT_ONCE] & flat.dtype.type(mask)).max()) >= first_bad:
                raise WireError(name, "holds NaN, infinity, or values of 2^20 and more; check what sent it")


@dataclass(frozen=True, slots=True)
class _Head:
    """A head, or an embedding, in a file. `version` is its policy version; -1: registered with the run."""

    file: MappedFile
    tensor: str
    version: int
    changed_ns: int = 0

    @classmethod
    def of(cls, file: MappedFile, version: int, changed_ns: int = 0) -> _Head:
        """The head of a PUT body; with tied embeddings that is the embedding."""
        return cls(file, "lm_head" if "lm_head" in file else "embed_tokens", version, changed_ns)

    def received(self) -> tuple[int, int]:
        """Sort key: the order in which the run received its heads, as in `Target.at`."""
        return self.changed_ns if self.version >= 0 else -1, self.version

    @property
    def dtype(self) -> str:
        """As safetensors names it."""
        return self.file.header.tensors[self.tensor].dtype

    @property
    def tokens(self) -> int:
        """How many tokens it has a row of."""
        return self.file.header.tensors[self.tensor].shape[0]

    def rows(self, ids: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """The rows of these tokens, flat."""
        raw = self.file.array(self.tensor)[ids]
        if self.dtype == "BF16":
            raw = (raw.astype(np.uint32) << 16).view(np.float32)
        return raw.astype(np.float64).reshape(-1)

    def as_file(self) -> list[bytes | memoryview]:
        """The head as a body of PUT /runs/{run}/head."""
        metadata = {"format": HEAD_FORMAT, "policy_version": str(self.version)}
        return encode({"lm_head": Tensor.of(self.file.array(self.tensor), self.dtype)}, metadata)


def _kept_heads(layout: Layout, run: str, registered: MappedFile) -> list[_Head]:
    """Every head of the run that is still on disk."""
    found = [_Head.of(registered, -1, layout.target(run).stat().st_mtime_ns)]
    for path in layout.heads(run).glob("*.safetensors"):
        # The worker may have just deleted it, or it is damaged: the others suffice.
        with contextlib.suppress(OSError, WireError):
            found.append(_Head.of(MappedFile(path), int(path.stem), path.stat().st_mtime_ns))
    return found


def _check_near(run: str, head: _Head, kept: Sequence[_Head], besides: str = "", *, farthest: float = FARTHEST) -> None:
    compared = []
    for one in sorted(kept, key=lambda one: one.version, reverse=True):  # the newest is most probably near
        apart = _compare(head, one)
        if apart[0] <= farthest:
            return
        compared.append((*apart, one.version))
    distance, cosine, version = min(compared)
    of = "registered with it" if version < 0 else f"of its policy version {version}"
    raise RunConflict(
        f"run {run!r} is another policy's: this {head.tensor} is {distance:.2f} from the nearest of the run's, "
        f"the one {of} (|a - b| / max(|a|, |b|) over sampled rows, at most {farthest:g}; cosine "
        f"{cosine:.2f}). Use another run name (the hook's run=){besides}"
    )


def _compare(one: _Head, other: _Head) -> tuple[float, float]:
    """Distance and cosine of two heads of as many tokens."""
    ids = np.linspace(0, one.tokens - 1, min(_SAMPLED_ROWS, one.tokens)).astype(np.int64)
    a, b = one.rows(ids), other.rows(ids)
    larger, product = max(np.linalg.norm(a), np.linalg.norm(b)), np.linalg.norm(a) * np.linalg.norm(b)
    distance = float(np.linalg.norm(a - b) / larger) if larger > 0 else 0.0
    return distance, float(a @ b / product) if product > 0 else 0.0


def _ignored(layout: Layout, run: str, registered: MappedFile, offered: MappedFile) -> str | None:
    """Say which parts of a registration an existing run ignores; None if there are none."""
    ignored = []
    if "drafter_config" in offered.header.metadata:
        drafter = _Drafter.sent(offered)
        if not any(drafter.equals(one) for one in _kept_drafters(layout, run, registered)):
            ignored.append("its initial drafter")
    size, own = (file.header.metadata.get("draft_vocab_size") for file in (offered, registered))
    if size not in (None, own):
        ignored.append(f"its draft_vocab_size of {size}")
    if not ignored:
        return None
    return (
        f"run {run!r} exists and keeps its drafters; of this registration is ignored: "
        f"{', '.join(ignored)}. To begin with it, use another run name (the hook's run=)"
    )


@dataclass(frozen=True, slots=True)
class _Drafter:
    """A drafter in a file, where `prefix` begins the names of its tensors."""

    file: MappedFile
    config: Any
    prefix: str = ""

    @classmethod
    def sent(cls, file: MappedFile) -> _Drafter:
        """The initial drafter of a registration."""
        return cls(file, json.loads(file.header.metadata["drafter_config"]), "drafter.")

    def tensors(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Type and shape of each tensor, by its own name."""
        found = self.file.header.tensors.items()
        return {k.removeprefix(self.prefix): (i.dtype, i.shape) for k, i in found if k.startswith(self.prefix)}

    def equals(self, other: _Drafter) -> bool:
        """Whether config and weights are the same, bit for bit."""
        mine = self.tensors()
        return (
            self.config == other.config
            and mine == other.tensors()
            and all(
                _same_bytes(self.file.array(self.prefix + name), other.file.array(other.prefix + name)) for name in mine
            )
        )


def _kept_drafters(layout: Layout, run: str, registered: MappedFile) -> Iterator[_Drafter]:
    """The drafter that the run was registered with, and its versions that are still on disk."""
    if "drafter_config" in registered.header.metadata:
        yield _Drafter.sent(registered)
    for directory in layout.drafters(run).glob("v*"):
        # The worker may have just deleted it, or it is damaged: it is none that was sent.
        with contextlib.suppress(OSError, ValueError, WireError):
            config = json.loads((directory / CONFIG_FILE).read_text("utf-8"))
            yield _Drafter(MappedFile(directory / MODEL_FILE), config)


def _same_bytes(one: npt.NDArray[Any], other: npt.NDArray[Any]) -> bool:
    a, b = one.reshape(-1).view(np.uint8), other.reshape(-1).view(np.uint8)
    pieces = range(0, a.size, _SCANNED_AT_ONCE)  # a large drafter is compared piece by piece
    return all(np.array_equal(a[i : i + _SCANNED_AT_ONCE], b[i : i + _SCANNED_AT_ONCE]) for i in pieces)
