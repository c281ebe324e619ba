"""The shipped worker's whole turn on one device, by stage: claim, load, score, judge, train, checkpoint, acknowledge.

    python -m benchmarks.worker_window --device cuda                 # a Qwen3-8B's drafter, batches of 16k tokens
    python -m benchmarks.worker_window --size D --rollouts 64 --batches 4 --idle 4 --json turns.json   # on a CPU

A run with an embedded Valkey is given batches one by one, and the worker works on each in this process. Features and
tokens are random, log-probabilities the head's own, so that nothing is refused. Lengths of rollouts are drawn evenly
around their mean. Each turn writes a checkpoint, which a real worker does in a tenth of its time at most. The first
turn is left out of the table. `--idle`: so many more turns in which nothing is trained.

A stage's seconds are its own, without those of stages within it: of this process's processor on a CPU, of the clock on
a GPU, where the host waits for kernels at a few places only. With `--profile` one more turn tells the seconds of all
kernels and copies on the device, which may run at the same time.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median
from threading import get_ident
from typing import Any

import torch

import benchmarks.step_peers
import service.worker.claim
import service.worker.inbox
import service.worker.scoring
from benchmarks.step_peers import AUX, Size
from benchmarks.worker_run import WorkerRun
from drafter.batch import RolloutBatch
from drafter.model.eagle3 import Eagle3Drafter
from drafter.policy import TargetHead
from drafter.training.trainer import DrafterTrainer
from drafter.vocabulary import DraftVocabulary
from rl_hooks.sending.features import score_rows
from service.memory import return_freed_memory
from service.monitor.controller import Action, Controller, Decision
from service.worker.checkpoint import WorkerCheckpoint
from service.worker.journal import Journal
from service.worker.promotion.judge import Judge

#: `demo` is the demonstration's drafter.
SIZES = benchmarks.step_peers.SIZES | {"demo": Size(64, 192, 4, 2, 32, 64, 64)}


def main() -> int:
    """Parse the command line, feed the worker, print a line for each turn, then the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--size", choices=list(SIZES), default="8B")
    parser.add_argument("--tokens", type=int, default=16_384, help="of a batch; half of them are response")
    parser.add_argument("--rollouts", type=int, default=16, help="of a batch")
    parser.add_argument("--batches", type=int, default=6, help="turns that train")
    parser.add_argument("--idle", type=int, default=0, help="turns after these that only score")
    parser.add_argument("--json", type=Path, help="write each turn's seconds by stage here")
    parser.add_argument("--profile", type=Path, help="write the table of one more batch's kernels here")
    options = parser.parse_args()
    meter = _Meter(time.process_time if options.device == "cpu" else time.perf_counter)
    size = SIZES[options.size]
    g = torch.Generator(options.device).manual_seed(0)
    embed = torch.randn(size.vocab, size.hidden, generator=g, device=options.device).mul_(0.5).bfloat16()
    head = torch.randn(size.vocab, size.hidden, generator=g, device=options.device).mul_(size.hidden**-0.5).bfloat16()
    ids = torch.arange(size.draft)
    drafter = Eagle3Drafter(size.config(), DraftVocabulary(ids, size.vocab))
    turns: list[dict[str, Any]] = []
    kinds = ["training"] * (options.batches + bool(options.profile)) + ["idle"] * options.idle
    with tempfile.TemporaryDirectory() as name, _run(Path(name), size, embed, head, drafter, options.device) as run:
        for number, kind in enumerate(kinds):
            run.post(_batch(number, size, head, options, g))
            if kind == "idle":
                Controller.decide = _idle  # type: ignore[method-assign]
            profiled = options.profile is not None and number == options.batches
            with _profile(options.profile) if profiled else _nothing() as found:
                spent = meter.of(run.worker.cycle)
            return_freed_memory()  # as a worker's process does once a minute: what is left is kept
            resident = Path("/proc/self/status").read_text().split("VmRSS:")[1].split()[0]
            turns.append({"kind": kind, "seconds": spent, "resident_mib": int(resident) // 1024, **found})
            line = f"turn {number}, {kind}: {sum(spent.values()):.2f} s, {turns[-1]['resident_mib']} MiB resident"
            print(line + (f", kernels and copies {found['busy_s']:.2f} s (profiled)" if profiled else ""), flush=True)
        if options.device != "cpu":
            print(f"peak {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB")
    if options.json:
        options.json.write_text(json.dumps(turns, indent=1))
    for kind in ("training", "idle"):
        if of_kind := [turn["seconds"] for turn in turns[1:] if turn["kind"] == kind]:
            print(_table(kind, of_kind))
    return 0


#: Stages of a turn, by what does them. What none of them does is the rest.
_STAGES: dict[str, tuple[Any, str]] = {
    "claim": (service.worker.inbox.Inbox, "claim"),
    "digest": (service.worker.inbox, "check_blob"),
    "map the file": (service.worker.inbox, "load_batch"),
    "screen": (service.worker.inbox, "screen"),
    "check log-probabilities": (TargetHead, "logprob_gap"),
    "replays": (service.worker.scoring, "replay_each"),
    "prompt lookup": (service.worker.scoring, "_ngram_shared"),
    "lossless": (service.worker.scoring, "_favour"),
    "score record": (service.worker.claim, "score"),
    "judge": (Judge, "judge"),
    "prepare windows": (DrafterTrainer, "prepare"),
    "train": (DrafterTrainer, "step"),
    "optimizer": (DrafterTrainer, "_update"),
    "record": (Journal, "record"),
    "checkpoint": (WorkerCheckpoint, "save"),
    "acknowledge": (service.worker.inbox.Inbox, "commit"),
}


class _Meter:
    """Adds up the seconds of each stage, without those of the stages that it calls."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock, self._thread = clock, get_ident()
        self._spent: dict[str, float] = {}
        self._inside = [0.0]  # seconds of stages within each open one
        for name, (owner, function) in _STAGES.items():
            setattr(owner, function, self._metered(name, getattr(owner, function)))

    def of(self, call: Callable[[], Any]) -> dict[str, float]:
        """The seconds of a call by stage."""
        self._spent.clear()
        self._metered("rest", call)()
        return dict(self._spent)

    def _metered(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            if get_ident() != self._thread:  # on a GPU a thread prepares the next window meanwhile
                return real(*arguments, **named)
            began = self._clock()
            self._inside.append(0.0)
            try:
                return real(*arguments, **named)
            finally:
                took = self._clock() - began
                self._spent[name] = self._spent.get(name, 0.0) + took - self._inside.pop()
                self._inside[-1] += took

        return call


def _idle(*_arguments: Any, **_named: Any) -> Decision:
    return Decision(Action.IDLE, "asked for by --idle")


def _table(kind: str, turns: Sequence[Mapping[str, float]]) -> str:
    """Median seconds of each stage, and its share of a turn."""
    whole = median(sum(turn.values()) for turn in turns)
    lines = [f"\n{kind} turn: {1000 * whole:.1f} ms (median of {len(turns)})"]
    for name in [*_STAGES, "rest"]:
        own = median(turn.get(name, 0.0) for turn in turns)
        lines.append(f"  {name:24} {1000 * own:10.1f} ms  {100 * own / whole:5.1f} %")
    return "\n".join(lines)


def _run(directory: Path, size: Size, embed: Any, head: Any, drafter: Eagle3Drafter, device: str) -> WorkerRun:
    config = {
        "model_type": "qwen3",
        "hidden_size": size.hidden,
        "intermediate_size": size.intermediate,
        "num_hidden_layers": len(AUX) + 1,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.kv_heads,
        "head_dim": size.head_dim,
        "vocab_size": size.vocab,
    }
    return WorkerRun(
        directory, config, AUX, embed=embed.cpu(), head=head.cpu(), drafter=drafter, device=device, checkpoint_seconds=0
    )


def _batch(number: int, size: Size, head: Any, options: argparse.Namespace, g: torch.Generator) -> RolloutBatch:
    mean = options.tokens // options.rollouts
    lengths = torch.randint(mean // 2, mean * 3 // 2 + 1, (options.rollouts,), generator=g, device=options.device).cpu()
    tokens = int(lengths.sum())
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    place = torch.arange(tokens) - torch.repeat_interleave(starts[:-1], lengths)
    ids = torch.randint(size.draft, (tokens,), generator=g, device=options.device)
    last = torch.randn(tokens, size.hidden, generator=g, device=options.device).bfloat16()
    logsumexp, of_next = score_rows(last, head, ids.roll(-1), temperature=1.0)
    batch = RolloutBatch(
        input_ids=ids,
        cu_seqlens=starts,
        loss_mask=place >= torch.repeat_interleave(lengths // 2, lengths),
        aux_hidden=torch.randn(tokens, 3 * size.hidden, generator=g, device=options.device).bfloat16(),
        logprobs=of_next.roll(1),
        last_hidden=last,
        logsumexp=logsumexp,
        rollout_ids=tuple(f"{number}-{i}" for i in range(options.rollouts)),
        policy_version=0,
    )
    return replace(batch.to("cpu"), loss_mask=batch.loss_mask.cpu())


@contextmanager
def _nothing() -> Iterator[dict[str, float]]:
    yield {}


@contextmanager
def _profile(path: Path) -> Iterator[dict[str, float]]:
    """Kernels and copies of the device meanwhile; the table of the longest goes to `path`."""
    found: dict[str, float] = {}
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        yield found
    table = profiler.key_averages()
    on_device = (e.self_device_time_total for e in table if "CPU" not in str(e.device_type))
    found["busy_s"] = sum(on_device) / 1e6
    path.write_text(table.table(sort_by="self_device_time_total", row_limit=60, max_name_column_width=100))


if __name__ == "__main__":
    raise SystemExit(main())
