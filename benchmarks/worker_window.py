"""The shipped worker's whole way of a batch on one device: read, score, judge, train; seconds, and the device's share.

    python -m benchmarks.worker_window --device cuda                 # a Qwen3-8B's drafter, batches of 16k tokens
    python -m benchmarks.worker_window --size S --tokens 2048        # on a CPU, for a look

A run with an embedded Valkey is given batches one by one, and the worker works on each in this process. Features and
tokens are random, log-probabilities the head's own, so that nothing is refused. Of each batch: wall seconds of its
cycle, those of training in it and of each part of scoring, and for one more cycle the seconds of all kernels and copies
on the device, which may run at the same time. On several ranks `digest` is rank 0's alone.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import service.worker.inbox
import service.worker.scoring
from benchmarks.step_peers import AUX, SIZES, Size
from benchmarks.worker_run import WorkerRun
from drafter.batch import RolloutBatch
from drafter.model.eagle3 import Eagle3Drafter
from drafter.policy import TargetHead
from drafter.vocabulary import DraftVocabulary
from rl_hooks.sending.features import score_rows


def main() -> int:
    """Parse the command line, feed the worker, print a line for each batch."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--size", choices=list(SIZES), default="8B")
    parser.add_argument("--tokens", type=int, default=16_384, help="of a batch; half of them are response")
    parser.add_argument("--rollouts", type=int, default=16, help="of a batch")
    parser.add_argument("--batches", type=int, default=6)
    parser.add_argument("--profile", type=Path, help="write the table of one more batch's kernels here")
    options = parser.parse_args()
    spent = _metered()
    size = SIZES[options.size]
    g = torch.Generator(options.device).manual_seed(0)
    embed = torch.randn(size.vocab, size.hidden, generator=g, device=options.device).mul_(0.5).bfloat16()
    head = torch.randn(size.vocab, size.hidden, generator=g, device=options.device).mul_(size.hidden**-0.5).bfloat16()
    ids = torch.arange(size.draft)
    drafter = Eagle3Drafter(size.config(), DraftVocabulary(ids, size.vocab))
    with tempfile.TemporaryDirectory() as name, _run(Path(name), size, embed, head, drafter, options.device) as run:
        for number in range(options.batches + bool(options.profile)):
            run.post(_batch(number, size, head, options, g))
            spent.clear()
            totals = run.worker.learner.journal.totals
            trained, tokens = totals.train_seconds, totals.trained_tokens
            profiled = options.profile is not None and number == options.batches
            with _profile(options.profile) if profiled else _nothing() as found:
                began = time.perf_counter()
                run.worker.cycle()
                took = time.perf_counter() - began
            line = f"batch {number}: cycle {took:.2f} s, training {totals.train_seconds - trained:.2f} s of it, "
            line += f"{totals.trained_tokens - tokens} response tokens trained; "
            line += ", ".join(f"{name} {seconds:.3f} s" for name, seconds in spent.items())
            print(line + (f", kernels and copies {found['busy_s']:.2f} s (profiled)" if profiled else ""), flush=True)
        if options.device != "cpu":
            print(f"peak {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB")
    return 0


#: Parts of scoring, by what does them.
_PARTS: dict[str, tuple[Any, str]] = {
    "digest": (service.worker.inbox, "check_blob"),
    "screen": (service.worker.inbox, "screen"),
    "log-probabilities": (TargetHead, "logprob_gap"),
    "replays": (service.worker.scoring, "replay_each"),
    "prompt lookup": (service.worker.scoring, "_ngram_shared"),
    "lossless": (service.worker.scoring, "_favour"),
}


def _metered() -> dict[str, float]:
    """Have each part add its seconds here."""
    spent: dict[str, float] = {}

    def metered(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            began = time.perf_counter()
            found = real(*arguments, **named)
            spent[name] = spent.get(name, 0.0) + time.perf_counter() - began
            return found

        return call

    for name, (owner, function) in _PARTS.items():
        setattr(owner, function, metered(name, getattr(owner, function)))
    return spent


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
    return WorkerRun(directory, config, AUX, embed=embed.cpu(), head=head.cpu(), drafter=drafter, device=device)


def _batch(number: int, size: Size, head: Any, options: argparse.Namespace, g: torch.Generator) -> RolloutBatch:
    length = options.tokens // options.rollouts
    tokens = length * options.rollouts
    ids = torch.randint(size.draft, (tokens,), generator=g, device=options.device)
    last = torch.randn(tokens, size.hidden, generator=g, device=options.device).bfloat16()
    logsumexp, of_next = score_rows(last, head, ids.roll(-1), temperature=1.0)
    batch = RolloutBatch(
        input_ids=ids,
        cu_seqlens=torch.arange(options.rollouts + 1) * length,
        loss_mask=(torch.arange(length) >= length // 2).repeat(options.rollouts),
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
