"""flash_attn has no CPU build: what RL stacks import of it to pack and unpack rows, written in torch."""

from __future__ import annotations

import importlib.machinery
import sys
import types
from typing import Any

import torch


def stand_in(name: str, **functions: Any) -> None:
    """A module of this name, with these functions, for who imports it."""
    module = types.ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None)
    module.__path__ = []
    module.__dict__.update(functions)
    sys.modules[name] = module


def unpad_input(x: Any, attention_mask: Any) -> tuple[Any, ...]:
    places, lengths = attention_mask.flatten().nonzero()[:, 0], attention_mask.sum(-1, dtype=torch.int32)
    cu = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    return x.flatten(0, 1)[places], places, cu, int(lengths.max()), lengths


def pad_input(x: Any, indices: Any, batch: int, seqlen: int) -> Any:
    out = x.new_zeros(batch * seqlen, *x.shape[1:])
    return out.index_copy(0, indices, x).view(batch, seqlen, *x.shape[1:])


def stand_in_for_packing(**more: Any) -> None:
    """`flash_attn.bert_padding`; `more` of its functions."""
    stand_in("flash_attn", __version__="2.8.3")
    packing = {"index_first_axis": lambda x, i: x[i], "unpad_input": unpad_input, "pad_input": pad_input}
    stand_in("flash_attn.bert_padding", **packing, **more)
