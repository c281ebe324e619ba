"""How much memory kept rollouts take: mapped in the type they were sent in, against copied out as numbers.

    python benchmarks/recent_memory.py [--hidden 1024] [--tokens 16384] [--pairs 3]

Each measurement is a process of its own, old and new in turn: it loads files as a run's worker does, screens them,
draws as many windows as one pass needs, lets go of them, and reads its own /proc/self/status (Linux, glibc: what was
freed is given back to the system first). "Copied" is what `load_batch` did before: bfloat16 as it is, fp8 as float32.
Figures are the growth over the same process after it did all this with one small file.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt

from rl_hooks import wire

_FILES = 8
_LAYERS = (1, 2, 3)


def write_file(path: Path, *, tokens: int, hidden: int, fp8: bool, seed: int) -> None:
    """Random rollouts as the hook sends them: fp8 aux_hidden and bfloat16 last_hidden, or both in bfloat16."""
    rng, rollouts = np.random.default_rng(seed), 8
    length = tokens // rollouts
    mask = np.ones((rollouts, length), np.uint8)
    mask[:, : length // 4] = 0
    tensors = {
        "input_ids": wire.Tensor.of(rng.integers(0, 1000, tokens).astype("<i4"), "I32"),
        "cu_seqlens": wire.Tensor.of((np.arange(rollouts + 1) * length).astype("<i4"), "I32"),
        "loss_mask": wire.Tensor.of(mask.reshape(-1), "U8"),
        "logprobs": wire.Tensor.of(-rng.random(tokens).astype("<f4"), "F32"),
        "logsumexp": wire.Tensor.of(rng.random(tokens).astype("<f4"), "F32"),
        "last_hidden": wire.Tensor.of(_bfloat16(rng, tokens, hidden), "BF16"),
    }
    if fp8:
        codes = rng.integers(0, 0x70, (tokens, 3 * hidden), dtype=np.uint8)  # finite, positive
        tensors["aux_hidden"] = wire.Tensor.of(codes, "F8_E4M3")
        tensors["aux_hidden_scale"] = wire.Tensor.of(rng.random((tokens, 3)).astype("<f4"), "F32")
    else:
        tensors["aux_hidden"] = wire.Tensor.of(_bfloat16(rng, tokens, 3 * hidden), "BF16")
    metadata = wire.rollout_metadata(
        run="default",
        policy_version=0,
        rollout_ids=[f"{seed}-{i}" for i in range(rollouts)],
        target_fingerprint="f" * 32,
        aux_layers=_LAYERS,
        temperature=1.0,
    )
    path.write_bytes(b"".join(wire.encode(tensors, metadata)))


def _bfloat16(rng: np.random.Generator, rows: int, width: int) -> npt.NDArray[Any]:
    return (rng.random((rows, width), dtype=np.float32).view("<u4") >> 16).astype("<u2")


def resident() -> dict[str, float]:
    """Memory of this process in MiB: its own (anonymous), and pages of mapped files, which the kernel may drop."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    found = dict(line.split(":", 1) for line in lines)
    return {
        "anonymous": int(found["RssAnon"].split()[0]) / 1024,
        "file": (int(found["RssFile"].split()[0]) + int(found["RssShmem"].split()[0])) / 1024,
    }


def measure(directory: Path, *, copied: bool) -> dict[str, float]:
    """Load, screen and draw; the memory that is then held."""
    import torch

    from drafter.batch import RolloutBatch, load_batch, screen
    from service.worker.recent import RecentRollouts, Task, taken

    def loaded(path: Path) -> RolloutBatch:
        batch = load_batch(path)
        if not copied:
            return batch
        numbers: dict[str, Any] = {name: batch.numbers(name).clone() for name in ("aux_hidden", "last_hidden")}
        return replace(batch, **numbers, aux_scale=None, last_scale=None)

    def held(paths: list[Path], scratch: Path) -> RecentRollouts:
        recent = RecentRollouts(scratch, capacity_tokens=1 << 40)
        for path in paths:
            batch = loaded(path)
            screen(batch)
            newest = recent.add(path, batch)
        for drawn in Task([newest], recent.but([newest]), passes=1, step_tokens=2_048, seed=0).drawn():
            for part in taken(drawn):
                part.to("cpu")
        return recent

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        small = Path(scratch, "small.safetensors")
        write_file(small, tokens=64, hidden=64, fp8=True, seed=99)
        held([small], Path(scratch))
        before = resident()
        recent = held(sorted(directory.iterdir()), Path(scratch))
        after = resident()
        assert len(recent.names()) == _FILES
    return {name: after[name] - before[name] for name in after}


def main() -> None:
    """Print a table: medians of the pairs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=16_384, help="of all files together")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--measure", nargs=2, metavar=("DIRECTORY", "HOW"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.measure:
        directory, how = given.measure
        print(json.dumps(measure(Path(directory), copied=how == "copied")))
        return
    print(f"hidden {given.hidden}, {given.tokens} tokens in {_FILES} files, medians of {given.pairs} pairs, MiB")
    print("| features | files | copied: anonymous | mapped: anonymous | share | mapped: file pages |")
    print("|---|---|---|---|---|---|")
    for fp8 in (True, False):
        with tempfile.TemporaryDirectory() as scratch:
            for i in range(_FILES):
                tokens = given.tokens // _FILES
                write_file(Path(scratch, f"{i}.safetensors"), tokens=tokens, hidden=given.hidden, fp8=fp8, seed=i)
            size = sum(path.stat().st_size for path in Path(scratch).iterdir()) / 2**20
            found: dict[str, list[dict[str, float]]] = {"copied": [], "mapped": []}
            for _ in range(given.pairs):
                for how, figures in found.items():
                    command = [sys.executable, __file__, "--measure", scratch, how]
                    answer = subprocess.run(command, check=True, capture_output=True, text=True)
                    figures.append(json.loads(answer.stdout))
        old, new = (median(f["anonymous"] for f in found[how]) for how in ("copied", "mapped"))
        pages = median(f["file"] for f in found["mapped"])
        kind = "fp8, last_hidden bfloat16" if fp8 else "bfloat16"
        print(f"| {kind} | {size:.0f} | {old:.0f} | {new:.0f} | {new / old:.1%} | {pages:.0f} |")


if __name__ == "__main__":
    main()
