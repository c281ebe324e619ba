"""A trainer beside SGLang: writes a policy from disk into the server, as slime and verl do, and says its version.

python trainer.py URL MODEL.safetensors VERSION [RANKS]
"""

from __future__ import annotations

import importlib
import json
import sys
import urllib.error
import urllib.request
from typing import Any

import torch
from safetensors.torch import load_file


def call(url: str, path: str, **body: Any) -> None:
    """A call that must succeed."""
    request = urllib.request.Request(url + path, json.dumps(body).encode(), {"Content-Type": "application/json"})  # noqa: S310
    with urllib.request.urlopen(request, timeout=120) as answer:  # noqa: S310
        document = json.load(answer)
    if document.get("success") is False:
        raise RuntimeError(f"{path}: {document}")


def has_sessions(url: str) -> bool:
    """Whether weights are written in sessions: 0.5.21 and newer."""
    try:
        urllib.request.urlopen(url + "/begin_weight_update", timeout=120).close()  # noqa: S310
    except urllib.error.HTTPError as error:
        return error.code != 404
    return True


def main(url: str, path: str, version: str, ranks: str = "1") -> None:
    """One policy update, between pause and continue."""
    importlib.import_module("launch")  # stands in for what SGLang imports and is absent
    from sglang.srt.utils import MultiprocessingSerializer

    torch.multiprocessing.set_sharing_strategy("file_system")  # type: ignore[no-untyped-call]  # by name: the server is no child of this process
    tensors = list(load_file(path).items())
    sessions = has_sessions(url)
    call(url, "/pause_generation", mode="in_place")
    if sessions:
        call(url, "/begin_weight_update", selector="target")
    data = [MultiprocessingSerializer.serialize(tensors, output_str=True) for _ in range(int(ranks))]
    body = {"serialized_named_tensors": data, "flush_cache": False}
    body |= {"selector": "target"} if sessions else {}  # before, no stack's trainer says which
    call(url, "/update_weights_from_tensor", **body, weight_version=version)
    if sessions:
        call(url, "/end_weight_update")
    call(url, "/continue_generation")
    print("written")


if __name__ == "__main__":
    main(*sys.argv[1:])
