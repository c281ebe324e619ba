"""One EAGLE-3 training step, forward and backward: CPU time and peak memory of peers over ours; on a GPU, tokens/s.

    python benchmarks/train_step.py --python .venv-peers/bin/python --json rows.json
    python benchmarks/train_step.py --device cuda --json rows.json

On a CPU every row is a process of its own that alternates ours and the peer on one thread, once in each order; the
ratio is of process CPU time, the median over the pairs. Memory comes from another process, in which blocks of 64 KiB
and more are mapped one by one: VmHWM of one step above what was resident before it. Peers: `benchmarks/step_peers.py`.

On a GPU every row is a process of its own that times at least 30 steps by CUDA events, after a warm-up, and gives their
median and quartiles. The steps go round a few batches of slightly different lengths, as rollouts have them, so that
what a new shape costs is counted. `ours` and the peers are forward and backward, features on the device; `ours,
trainer` is the worker's whole window (`DrafterTrainer.step`: copies, casts, clipping, the optimizer) on
batches that lie on the host. `peak_gib` is the allocator's peak *above* what stays between steps: weights, optimizer
state and the case's features are not in it.

Ours need torch, numpy and safetensors: no other dependency, no installation of this project and no network. A peer that
is not installed is named and its rows are left out.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
#: Peers default to this depth with a frozen head (speculators) or a trained one (SpecForge); 7 trains it in both.
GRID = [("speculators-0.9.0", 3, False), ("specforge-0.2.0", 3, True), ("speculators-0.9.0", 7, True)]
GRID += [("specforge-0.2.0", 7, True)]
TOKENS = {"cpu": [512, 2048, 4096], "cuda": [4096, 16_384]}
#: Shares of the tokens that are generated.
RESPONSES = (1.0, 0.5)
MIB = 1 << 20
#: Steps timed on a GPU, at least, and the batches of different lengths that they go round.
TIMED, BATCHES = 30, 4


def main() -> int:
    """Parse the command line and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=sys.executable, help="interpreter that has torch and the peers")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--peers", nargs="*", help="names to keep, e.g. speculators-0.9.0")
    parser.add_argument("--sizes", nargs="*", default=["S"], help="S, D, M (see step_peers.SIZES)")
    parser.add_argument("--dtypes", nargs="*", default=["float32"], help="float32, bfloat16")
    parser.add_argument("--tokens", nargs="*", type=int, help="default: 512 2048 4096, on a GPU 4096 16384")
    parser.add_argument("--documents", type=int, default=1, help="equal documents that the tokens are of, on a GPU")
    parser.add_argument("--steps", nargs="*", type=int, default=[3, 7])
    parser.add_argument(
        "--pairs", type=int, default=2, help=f"pairs per order on a CPU; steps on a GPU, at least {TIMED}"
    )
    parser.add_argument("--json", type=Path, help="keep the rows here, after each one")
    parser.add_argument("--cell", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.tokens = options.tokens or TOKENS[options.device]
    sys.path.insert(0, str(ROOT))
    if options.cell:
        print("CELL " + json.dumps(_run_cell(json.loads(options.cell))), flush=True)
        return 0
    cells = list(_cells(options))
    missing = _missing(options.python, sorted({cell["peer"] for cell in cells} & {row[0] for row in GRID}))
    for peer in missing:
        print(f"{peer} is not installed for {options.python}: its rows are left out", file=sys.stderr, flush=True)
    rows: list[dict[str, Any]] = []
    for cell in (cell for cell in cells if cell["peer"] not in missing):
        for row in _measure(cell, options.python):
            rows.append({"machine": _machine(), **row})
            print(_line(row), flush=True)
            if options.json:
                options.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 0


def _missing(python: str, peers: list[str]) -> list[str]:
    """Those of the peers that an interpreter lacks: nobody waits for their cells to fail one by one."""
    script = (
        "import sys, importlib.util as u; print(*[p for p in sys.argv[1:] if not u.find_spec(p.partition('-')[0])])"
    )
    done = subprocess.run([python, "-c", script, *peers], capture_output=True, text=True, check=True)
    return done.stdout.split()


def _cells(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Every combination asked for, short ones first."""
    common = {"device": options.device, "pairs": options.pairs}
    if options.device == "cuda":
        # Ours with every depth, and beside each row of the peers with its depth and head.
        kinds = dict.fromkeys([(k, True) for k in options.steps] + [row[1:] for row in GRID])
        grid = [(name, *kind) for kind in kinds for name in ("ours", "ours, trainer")] + GRID
        for tokens in options.tokens:
            for peer, steps, train_head in grid:
                if steps in options.steps and (not options.peers or peer.startswith("ours") or peer in options.peers):
                    case = {"peer": peer, "steps": steps, "train_head": train_head, "size": "8B", "dtype": "bfloat16"}
                    yield common | case | {"tokens": tokens, "documents": options.documents, "mode": "gpu"}
        return
    for dtype in options.dtypes:
        for tokens in sorted(options.tokens):
            for size in options.sizes:
                for peer, steps, train_head in GRID:
                    if steps in options.steps and (not options.peers or peer in options.peers):
                        case = {"peer": peer, "steps": steps, "train_head": train_head, "size": size, "dtype": dtype}
                        yield common | case | {"tokens": tokens}


def _measure(cell: dict[str, Any], python: str) -> list[dict[str, Any]]:
    """Rows of one cell, one per response share."""
    if cell["device"] == "cuda":
        return _in_process(cell, python)
    times = [_in_process({**cell, "mode": "time", "ours_first": first}, python) for first in (True, False)]
    memory = _in_process({**cell, "mode": "memory"}, python)
    rows = []
    for one, other, peak in zip(*times, memory, strict=True):
        pairs = [*zip(one["ours_s"], one["peer_s"], strict=True), *zip(other["ours_s"], other["peer_s"], strict=True)]
        row = {k: cell[k] for k in ("peer", "steps", "train_head", "size", "dtype", "tokens")}
        row |= {"response": one["response"], "agreement": one["agreement"], "pairs": pairs}
        row |= {"cpu_ratio": statistics.median(theirs / ours for ours, theirs in pairs)}
        row |= {"ours_s": statistics.median(p[0] for p in pairs), "peer_s": statistics.median(p[1] for p in pairs)}
        row |= {"ours_mib": peak["ours_mib"], "peer_mib": peak["peer_mib"]}
        rows.append(row | {"memory_ratio": peak["peer_mib"] / peak["ours_mib"]})
    return rows


def _in_process(cell: dict[str, Any], python: str) -> list[dict[str, Any]]:
    """Run one cell in a process of its own and give back what it measured; nothing when it fails, saying why."""
    settings = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "TOKENIZERS_PARALLELISM": "false"}
    if cell["device"] == "cuda":
        del settings["OMP_NUM_THREADS"]
    if cell["mode"] == "memory":
        settings |= {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    command = [python, str(Path(__file__).resolve()), "--cell", json.dumps(cell)]
    done = subprocess.run(command, env={**os.environ, **settings}, capture_output=True, text=True, check=False)
    for line in done.stdout.splitlines():
        if line.startswith("CELL "):
            found: list[dict[str, Any]] = json.loads(line[5:])
            return found
    # The end of the traceback, not its last line: CUDA's errors end in advice that says nothing of what failed.
    reason = done.stderr.strip().splitlines()[-20:] or [f"exit status {done.returncode}"]
    failed = f"{cell['peer']} K={cell['steps']} T={cell['tokens']} {cell['dtype']}: this row failed:"
    print("\n".join([failed, *reason]), file=sys.stderr, flush=True)
    return []


def _run_cell(cell: dict[str, Any]) -> list[dict[str, Any]]:
    import torch

    if cell["device"] == "cuda":
        return [_gpu(cell, response, _timed) for response in RESPONSES]
    torch.set_num_threads(1)
    for tokens in (192, 320):  # two lengths, so that what compiles itself does so for any
        for step in _steps(cell, tokens, 1.0):
            step()
    return [_compared(cell, response) for response in RESPONSES]


def _steps(cell: dict[str, Any], tokens: int, response: float) -> tuple[Any, Any]:
    import torch

    from benchmarks.step_peers import PEERS, SIZES, make_case, ours

    case = make_case(
        SIZES[cell["size"]],
        tokens=tokens,
        response=response,
        steps=cell["steps"],
        train_head=cell["train_head"],
        dtype=getattr(torch, cell["dtype"]),
    )
    return ours(case, full_vocabulary=cell["peer"].startswith("specforge")), PEERS[cell["peer"]](case)


def _compared(cell: dict[str, Any], response: float) -> dict[str, Any]:
    """Ours against the peer: CPU seconds of alternating steps, or the peak of one step of each."""
    from benchmarks.step_peers import agreement

    ours, theirs = _steps(cell, cell["tokens"], response)
    if cell["mode"] == "memory":
        return {"response": response, "ours_mib": _peak(ours), "peer_mib": _peak(theirs)}
    cosine = agreement(ours(), theirs())
    seconds: dict[str, list[float]] = {"ours_s": [], "peer_s": []}
    sides = [("ours_s", ours), ("peer_s", theirs)]
    for _ in range(cell["pairs"]):
        for name, step in sides if cell["ours_first"] else sides[::-1]:
            begun = time.process_time()
            step()
            seconds[name].append(time.process_time() - begun)
    return {"response": response, "agreement": cosine, **seconds}


def _peak(step: Any) -> float:
    """MiB of VmHWM during a step above what was resident before it, once compiled for its shapes."""
    step()
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    step()
    return (_status("VmHWM") - before) / MIB


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _gpu(cell: dict[str, Any], response: float, timed: Callable[..., dict[str, Any]]) -> dict[str, Any]:
    """Response tokens per second on one GPU, and its share of 790 TFLOP/s by the count of docs/lab/gpu.md.

    `timed` is `_timed`: what a test without a GPU replaces.
    """
    import torch

    from benchmarks.step_peers import PEERS, SIZES, floating_point_operations, make_case, ours, ours_trainer
    from drafter.device import has_triton

    size, documents = SIZES[cell["size"]], cell["documents"]
    counted = {"steps": cell["steps"], "train_head": cell["train_head"]}
    case = make_case(
        size,
        tokens=cell["tokens"],
        response=response,
        dtype=getattr(torch, cell["dtype"]),
        device=cell["device"],
        documents=documents,
        batches=BATCHES,
        **counted,
    )
    step = {"ours": ours, "ours, trainer": ours_trainer, **PEERS}[cell["peer"]](case)
    found = timed(step, BATCHES, max(cell["pairs"], TIMED))
    seconds = found.pop("seconds")
    tokens = [batch.tokens for batch in case.batches]
    responses = [batch.response_tokens for batch in case.batches]
    work = [
        floating_point_operations(size, tokens=t, responses=r, documents=documents, **counted)
        for t, r in zip(tokens, responses, strict=True)
    ]
    low, middle, high = statistics.quantiles(seconds, n=4)
    row = {k: cell[k] for k in ("peer", "steps", "train_head", "size", "dtype", "tokens", "documents")}
    row |= {"response": response, "seconds": middle, "quartiles": [low, high], "timed": len(seconds)}
    # Step i ran batch i % BATCHES: rates are of what each step did.
    row |= {"response_tokens_per_s": statistics.median(responses[i % BATCHES] / s for i, s in enumerate(seconds))}
    shares = [work[i % BATCHES] / s / 790e12 for i, s in enumerate(seconds)]
    row |= {"share_of_790_tflops": statistics.median(shares), "lengths": tokens}
    return row | {"torch": torch.__version__, "triton": has_triton()} | found


def _timed(step: Callable[[int], object], batches: int, count: int) -> dict[str, Any]:
    """Seconds of `count` steps that go round the batches, by CUDA events, and the allocator's peak above its rest."""
    import torch

    for which in [*range(batches)] * 3:  # whatever compiles has seen every shape
        step(which)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    resident = torch.cuda.memory_allocated()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]  # type: ignore[no-untyped-call]
    marks[0].record()
    for i, mark in enumerate(marks[1:]):
        step(i % batches)
        mark.record()
    torch.cuda.synchronize()
    peak = (torch.cuda.max_memory_allocated() - resident) / 2**30
    seconds = [one.elapsed_time(two) / 1e3 for one, two in pairwise(marks)]
    return {"seconds": seconds, "peak_gib": peak, "gpu": torch.cuda.get_device_name()}


def _line(row: dict[str, Any]) -> str:
    head = "trained" if row["train_head"] else "frozen"
    start = f"| {row['peer']} | {row['steps']} | {head} | {row['size']} | {row['dtype']} | {row['tokens']} "
    start += f"| {row['response']:.0%} "
    if "seconds" in row:
        share, rate = row["share_of_790_tflops"], row["response_tokens_per_s"]
        middle, (low, high) = row["seconds"] * 1e3, (1e3 * q for q in row["quartiles"])
        took = f"| {row['documents']} | {middle:.1f} ms ({low:.1f} to {high:.1f}) "
        plain = "" if row["triton"] or not row["peer"].startswith("ours") else " without Triton |"
        rates = f"| {rate:,.0f} tokens/s | {share:.1%} | {row['peak_gib']:.2f} GiB above resident |"
        return start + took + rates + plain
    times = f"| **{row['cpu_ratio']:.2f}** | {row['ours_s']:.2f} / {row['peer_s']:.2f} s "
    return start + times + f"| **{row['memory_ratio']:.2f}** | {row['ours_mib']:.0f} / {row['peer_mib']:.0f} MiB |"


def _machine() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


if __name__ == "__main__":
    raise SystemExit(main())
