"""Rollout files as other senders, or a hook with other settings, write them."""

from __future__ import annotations

from pathlib import Path

import torch
from helpers.worker.worker_fixtures import joined

from drafter.batch import load_batch
from rl_hooks import wire
from rl_hooks.sending.features import PackedIndex, as_wire, shared_rows


def as_fp8(body: bytes, scratch: Path, *, last: bool) -> bytes:
    """The same rollouts with fp8 features, as the hook sends them (`last`: `last_hidden` too, as other senders may)."""
    scratch.write_bytes(body)
    file = wire.MappedFile(scratch)
    tensors = {n: wire.Tensor.of(file.array(n).copy(), i.dtype) for n, i in file.header.tensors.items()}
    for name, layers in (("aux_hidden", 3), ("last_hidden", 1))[: 2 if last else 1]:
        values = torch.from_numpy(file.array(name).copy()).view(torch.bfloat16).float()
        per_layer = values.view(len(values), layers, -1)
        scale = per_layer.abs().amax(-1) / 448
        codes = (per_layer / scale[..., None]).to(torch.float8_e4m3fn).view(len(values), -1)
        tensors[name] = wire.Tensor.of(codes.view(torch.uint8).numpy(), "F8_E4M3")
        tensors[f"{name}_scale"] = as_wire(scale)
    scratch.unlink()
    return joined(wire.encode(tensors, file.header.metadata))


def prompts_once_of(body: bytes, scratch: Path) -> bytes:
    """The same rollouts as a file that holds the states of a shared prompt once."""
    scratch.write_bytes(body)
    file = wire.MappedFile(scratch)
    tensors = {n: wire.Tensor.of(file.array(n).copy(), i.dtype) for n, i in file.header.tensors.items()}
    batch = load_batch(scratch)
    ids, starts, mask = (file.array(name) for name in ("input_ids", "cu_seqlens", "loss_mask"))
    index = PackedIndex(ids, starts, mask, None)
    rows = shared_rows(index, batch.aux_hidden, batch.aux_scale, len(batch.aux_layers))
    assert rows is not None
    for name in {"aux_hidden", "aux_hidden_scale"} & tensors.keys():
        tensors[name] = wire.Tensor.of(file.array(name)[rows.kept.numpy()], tensors[name].dtype)
    tensors["aux_rows"] = wire.Tensor.of(rows.places, "I32")
    return joined(wire.encode(tensors, file.header.metadata))
