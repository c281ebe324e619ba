"""The safetensors container, as bytes: laid out, its header verified, mapped. What is in it, `rl_hooks.wire` says.

Needs NumPy and nothing else.
"""

from __future__ import annotations

import json
import mmap
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

MAX_HEADER_BYTES: Final = 1 << 20
#: How NumPy sees the dtypes that our formats use. BF16 and F8_E4M3 have no NumPy type: unsigned integers as wide.
NUMPY_DTYPE: Final[Mapping[str, str]] = {
    "BOOL": "|b1",
    "U8": "|u1",
    "I32": "<i4",
    "I64": "<i8",
    "F16": "<f2",
    "BF16": "<u2",
    "F32": "<f4",
    "F8_E4M3": "|u1",
}
DTYPE_BYTES: Final[Mapping[str, int]] = {name: np.dtype(seen).itemsize for name, seen in NUMPY_DTYPE.items()}


class WireError(ValueError):
    """The file breaks the format. `field` names the tensor or metadata key at fault."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor of a file: its safetensors dtype, shape, and little-endian, contiguous bytes."""

    dtype: str
    shape: tuple[int, ...]
    data: memoryview

    @classmethod
    def of(cls, array: npt.NDArray[Any], dtype: str) -> Tensor:
        """View a contiguous array as a tensor of `dtype` (an array of unsigned integers for BF16 and F8_E4M3)."""
        wanted = np.dtype(NUMPY_DTYPE[dtype])
        if array.dtype != wanted:
            raise WireError("tensor", f"{dtype} is carried by NumPy {wanted}, got {array.dtype}; convert it first")
        contiguous = np.ascontiguousarray(array)
        return cls(dtype, tuple(array.shape), contiguous.reshape(-1).view(np.uint8).data)


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where one tensor lies: offsets count from the end of the header."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Header:
    """A parsed and verified safetensors header."""

    tensors: Mapping[str, TensorInfo]
    metadata: Mapping[str, str]
    header_bytes: int
    data_bytes: int

    @property
    def file_bytes(self) -> int:
        """Size that the whole file must have."""
        return self.header_bytes + self.data_bytes


def encode(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> list[bytes | memoryview]:
    """Lay out a safetensors file as parts (header, then one view per tensor) that can be written without a copy."""
    table: dict[str, Any] = {"__metadata__": dict(metadata)}
    parts: list[bytes | memoryview] = []
    offset = 0
    # Wide types first, as safetensors itself does: every tensor then starts aligned to its own width.
    for name, tensor in sorted(tensors.items(), key=lambda item: (-DTYPE_BYTES[item[1].dtype], item[0])):
        size = tensor.data.nbytes
        table[name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + size],
        }
        offset += size
        parts.append(tensor.data)
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return [struct.pack("<Q", len(text)) + text, *parts]


def parts_bytes(parts: Iterable[bytes | memoryview]) -> int:
    """Total size of a file laid out by `encode`."""
    return sum(part.nbytes if isinstance(part, memoryview) else len(part) for part in parts)


def header_size(prefix: bytes) -> int:
    """Size in bytes of the whole header (length word included), from the first eight bytes of a file."""
    if len(prefix) < 8:
        raise WireError("header", f"a safetensors file starts with an 8-byte length, got {len(prefix)} bytes")
    (length,) = struct.unpack("<Q", prefix[:8])
    if not 2 <= length <= MAX_HEADER_BYTES - 8:
        raise WireError("header", f"length word says {length} bytes; expected 2 to {MAX_HEADER_BYTES - 8}")
    return 8 + int(length)


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        raise WireError("header", "a name appears twice")
    return table


def parse_header(prefix: bytes) -> Header:
    """Verify a header, all of which `prefix` holds: known dtypes, sizes that match shapes, no gaps or overlaps."""
    size = header_size(prefix)
    if len(prefix) < size:
        raise WireError("header", f"says it is {size} bytes long, but only {len(prefix)} came")
    try:
        table = json.loads(bytes(prefix[8:size]).decode(), object_pairs_hook=_no_duplicates)
    except WireError:
        raise
    except (ValueError, RecursionError) as error:  # ValueError also for an integer of thousands of digits
        raise WireError("header", f"is not JSON: {error}") from error
    if not isinstance(table, dict):
        raise WireError("header", f"must be a JSON object, got {type(table).__name__}")
    metadata = table.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise WireError("__metadata__", "must map strings to strings")
    tensors = {name: _tensor_info(name, entry) for name, entry in table.items()}
    end = 0
    for name, info in sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].end)):
        if info.begin != end:
            fault = "overlaps the tensor before it" if info.begin < end else "leaves a gap before it"
            raise WireError(name, f"{fault}: it begins at {info.begin}, expected {end}")
        end = info.end
    return Header(tensors, metadata, size, end)


def _tensor_info(name: str, entry: object) -> TensorInfo:
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise WireError(name, "must have exactly dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        raise WireError(name, f"dtype {str(dtype)[:40]!r} is not one of {sorted(DTYPE_BYTES)}")
    if not is_int_list(shape) or len(shape) > 4:
        raise WireError(name, f"shape must be at most four non-negative integers, got {str(shape)[:80]}")
    if not is_int_list(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise WireError(name, f"data_offsets must be two ascending integers, got {str(offsets)[:80]}")
    size = DTYPE_BYTES[dtype]
    for extent in shape:
        size *= extent
    if offsets[1] - offsets[0] != size:
        raise WireError(name, f"{dtype} {shape} takes {size} bytes, data_offsets give {offsets[1] - offsets[0]}")
    return TensorInfo(dtype, tuple(shape), offsets[0], offsets[1])


class MappedFile:
    """A safetensors file mapped read-only. Arrays are views: keep the object alive while they are used."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            if size < 8:
                raise WireError("file", f"{path.name} is {size} bytes long; a safetensors file has at least 8")
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self.header = parse_header(self._map[: header_size(self._map[:8])])
        if self.header.file_bytes != size:
            raise WireError("file", f"{path.name} is {size} bytes long, its header describes {self.header.file_bytes}")

    def __contains__(self, name: str) -> bool:
        return name in self.header.tensors

    def array(self, name: str) -> npt.NDArray[Any]:
        """Read-only view of one tensor (BF16 as uint16, F8_E4M3 as uint8)."""
        info = self.header.tensors[name]
        flat = np.frombuffer(
            self._map,
            dtype=NUMPY_DTYPE[info.dtype],
            count=(info.end - info.begin) // DTYPE_BYTES[info.dtype],
            offset=self.header.header_bytes + info.begin,
        )
        return flat.reshape(info.shape)


def is_int_list(value: object) -> bool:
    """Whether it is a JSON list of non-negative integers that a float64 holds exactly."""
    return isinstance(value, list) and all(type(v) is int and 0 <= v < 1 << 53 for v in value)
