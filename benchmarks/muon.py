"""What a step of Muon takes, ours over torch.optim.Muon, by the size of the matrix.

    python -m benchmarks.muon [--device cuda] [--json rows.json]

Both take the same steps in turns, one thread on a CPU; the ratio is of the medians. torch's iterates in bfloat16 on
every device, ours on a CPU in float32: what that wins depends on the CPU's instructions, which are printed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from drafter.training.optimizer import Optimizer

#: The two smallest are the demo's; the large ones are left to a GPU.
SHAPES = {"cpu": [(64, 64), (64, 256), (128, 512), (256, 1024)], "cuda": [(1024, 4096), (4096, 12288)]}
_PAIRS = 9


def main() -> int:
    """Parse the command line and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"CPU instructions: {torch.backends.cpu.get_cpu_capability()}; torch {torch.__version__}; {options.device}")
    rows = []
    for shape in SHAPES[options.device]:
        row = measure(shape, options.device)
        rows.append(row)
        print(
            "{shape[0]} x {shape[1]}: ours {ours_ms:.2f} ms, torch's {torchs_ms:.2f}, {ratio:.2f} of it".format(**row)
        )
        if options.json:
            options.json.write_text(json.dumps(rows, indent=1))
    return 0


def measure(shape: tuple[int, int], device: str) -> dict[str, Any]:
    """Times of a step of each, in ms, and ours over torch's."""
    one, other = (nn.Parameter(torch.randn(*shape, device=device)) for _ in range(2))
    ours = Optimizer({"matrix": one}, "muon", weight_decay=0.0, betas=(0.9, 0.95), epsilon=1e-8)
    torchs = torch.optim.Muon([other], lr=0.0, weight_decay=0.0, adjust_lr_fn="match_rms_adamw")
    times: dict[str, list[float]] = {"ours": [], "torchs": []}
    for pair in range(_PAIRS + 1):
        for name, matrix, step in (("ours", one, lambda: ours.step(0.0)), ("torchs", other, torchs.step)):
            matrix.grad = torch.randn_like(matrix)
            _wait(device)
            began = time.perf_counter()
            step()
            _wait(device)
            if pair:  # the first one makes the state
                times[name].append(1e3 * (time.perf_counter() - began))
    medians = {name: statistics.median(found) for name, found in times.items()}
    ratio = medians["ours"] / medians["torchs"]
    return {"shape": shape, "ours_ms": medians["ours"], "torchs_ms": medians["torchs"], "ratio": ratio}


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    raise SystemExit(main())
