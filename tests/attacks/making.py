"""What attacks are made of.

An attack is a file that lies, a request that lies, or a name that leads elsewhere.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from helpers.service.service_fixtures import rollout_file

from rl_hooks import wire


@dataclass(frozen=True)
class Attack:
    """One hostile request. `status` must come, with `names` in its detail or field."""

    status: int
    names: str
    body: bytes = b""
    method: str = "POST"
    path: str = "/rollouts"
    headers: Mapping[str, str] = field(default_factory=dict)
    #: Content-Length to announce; None: the body's own; -1: none at all.
    announced: int | None = None


MAKERS: Final[dict[str, Callable[[], Attack]]] = {}


def attack(make: Callable[[], Attack]) -> Callable[[], Attack]:
    """Add a maker to the corpus."""
    MAKERS[make.__name__] = make
    return make


def with_header(text: bytes, data: bytes = b"") -> bytes:
    """A file whose header is exactly `text`."""
    return struct.pack("<Q", len(text)) + text + data


def edited(change: Callable[[dict[str, Any]], None]) -> bytes:
    """A valid file whose header was edited afterwards."""
    body = rollout_file()
    size = wire.header_size(body[:8])
    table = json.loads(body[8:size])
    change(table)
    return with_header(json.dumps(table).encode(), body[size:])


def metadata(**changes: str) -> bytes:
    """A valid file but for some metadata."""
    return rollout_file(raw_metadata=changes)


def without(key: str) -> bytes:
    """A valid file but for one missing metadata key."""
    return edited(lambda table: table["__metadata__"].pop(key))


def tensor(**changes: wire.Tensor | None) -> bytes:
    """A valid file but for some tensors (None: left out)."""
    return rollout_file(tensors=changes)


def mask(*values: int) -> wire.Tensor:
    """A loss mask."""
    return wire.Tensor.of(np.array(values, np.uint8), "U8")
