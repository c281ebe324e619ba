"""One drafter on 1, 2 and 4 ranks over gloo: is what they learn the same, and what does it cost beside one process?

    python -m benchmarks.ranks --hidden 256 --windows 10

Every count of ranks trains the same windows with the shipped classes (`Task`, `windows`, `DrafterTrainer`), each rank
on every W-th rollout, on one thread. Printed for each optimizer: the largest difference of any weight to one process,
as a share of the largest weight of its tensor; processor time of all ranks together beside one process; the share of
rank 0's processor time that is spent in collectives; their number and the bytes of gradients for each window. On cores
that are fewer than the ranks, or shared, wall time says nothing: no speed-up is claimed.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import socket
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from drafter.batch import RolloutBatch
from drafter.model.eagle3 import DrafterConfig, Eagle3Drafter
from drafter.policy import Policy, TargetHead
from drafter.training.ranks import Ranks, joined
from drafter.training.trainer import DrafterTrainer, TrainConfig
from drafter.vocabulary import DraftVocabulary
from service.worker.recent import KeptBatch, Task, windows

LAYERS, ROLLOUTS = (2, 4, 5), 32
METHODS = ("adamw", "muon")


def main() -> None:
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=1024, help="of a window")
    parser.add_argument("--windows", type=int, default=10)
    parser.add_argument("--ranks", type=int, nargs="*", default=[1, 2, 4])
    given = parser.parse_args()
    print("| optimizer | ranks | largest difference | processor time | in collectives | collectives a window | MiB |")
    print("|---|---|---|---|---|---|---|")
    for method in METHODS:
        alone: dict[str, Any] | None = None
        for world in given.ranks:
            found = _on_ranks(world, partial(_train, method, given))
            total = sum(one["cpu_seconds"] for one in found)
            alone = alone or found[0] | {"cpu_seconds": total}
            first = found[0]
            print(
                f"| {method} | {world} | {_difference(alone['weights'], first['weights']):.1e} "
                f"| {total / alone['cpu_seconds']:.2f} | {first['comm_seconds'] / first['cpu_seconds']:.1%} "
                f"| {first['calls'] / given.windows:.0f} | {first['bytes'] / given.windows / 2**20:.1f} |",
                flush=True,
            )


def _train(method: str, given: argparse.Namespace, ranks: Ranks) -> dict[str, Any]:
    trainer, task, target = _world(ranks, method, given)
    meter = _Meter()
    began = time.process_time()
    for window in windows(task.drawn(), trainer, target):
        trainer.step(window)
        if ranks.shared(lambda: trainer.windows >= given.windows):
            break
    seconds = time.process_time() - began
    weights = {name: p.detach() for name, p in trainer.drafter.named_parameters()}
    return {"weights": weights, "cpu_seconds": seconds, **meter.read()}


def _world(ranks: Ranks, method: str, given: argparse.Namespace) -> tuple[DrafterTrainer, Task, Any]:
    """A drafter of a random target, and random rollouts of ragged lengths: what is learnt is of no interest here."""
    generator = torch.Generator().manual_seed(0)
    hidden, vocabulary, drafted = given.hidden, 2048, 1024
    config = {"model_type": "qwen3", "hidden_size": hidden, "intermediate_size": 3 * hidden, "num_hidden_layers": 8}
    config |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": hidden // 4, "vocab_size": vocabulary}
    torch.manual_seed(0)
    drafter = Eagle3Drafter(
        DrafterConfig.from_target(config, LAYERS, drafted), DraftVocabulary(torch.arange(drafted), vocabulary)
    )
    head, embed = (torch.randn(vocabulary, hidden, generator=generator) for _ in range(2))
    drafter.init_from_target(head[:drafted] / hidden)
    lengths = torch.randint(32, 128, (ROLLOUTS,), generator=generator)
    tokens = int(lengths.sum())
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    last = torch.randn(tokens, hidden, generator=generator)
    batch = RolloutBatch(
        input_ids=torch.randint(0, vocabulary, (tokens,), generator=generator),
        cu_seqlens=starts,
        loss_mask=torch.arange(tokens) - starts[:-1].repeat_interleave(lengths) >= 8,
        aux_hidden=torch.randn(tokens, len(LAYERS) * hidden, generator=generator),
        last_hidden=last,
        logprobs=torch.full((tokens,), -1.0),
        logsumexp=torch.logsumexp(last @ head.T, 1),
        rollout_ids=tuple(map(str, range(ROLLOUTS))),
    )
    settings = TrainConfig(steps_ahead=4, learning_rate=1e-3, warmup_windows=2, optimizer=method)  # type: ignore[arg-type]
    task = Task([KeptBatch("one", batch, frozenset())], [], float("inf"), given.tokens, seed=0)
    return DrafterTrainer(drafter, settings, ranks), task, _OnePolicy(Policy(0, embed, TargetHead(head)))


class _OnePolicy:
    """A `service.worker.target.Target` of one head."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy

    def head_of(self, policy_version: int) -> tuple[int, None]:
        return policy_version, None

    def with_head(self, _version: int, _file: Sequence[int] | None) -> Policy:
        return self._policy


class _Meter:
    """Counts collectives of this process, and the processor time in them; gloo's own threads are in it."""

    def __init__(self) -> None:
        self._seen: Counter[str] = Counter()
        self._seconds = 0.0
        for name in ("all_reduce", "broadcast", "all_gather"):
            vars(dist)[name] = self._metered(getattr(dist, name))

    def _metered(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(tensor: Any, *arguments: Any, **options: Any) -> Any:
            began = time.process_time()
            done = real(tensor, *arguments, **options)
            self._seconds += time.process_time() - began
            self._seen["calls"] += 1
            self._seen["bytes"] += tensor.nbytes if "group" not in options else 0
            return done

        return call

    def read(self) -> dict[str, Any]:
        """What was seen so far."""
        return {"calls": self._seen["calls"], "bytes": self._seen["bytes"], "comm_seconds": self._seconds}


def _difference(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> float:
    return max(float((one[n] - two[n]).abs().max() / one[n].abs().max()) for n in one)


def _on_ranks(world: int, work: Callable[[Ranks], dict[str, Any]]) -> list[dict[str, Any]]:
    """What `work` gives on each of so many processes."""
    with socket.socket() as probe, tempfile.TemporaryDirectory() as directory:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])

        def one(rank: int) -> None:
            torch.set_num_threads(1)
            os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            with joined(torch.device("cpu")) as ranks:
                torch.save(work(ranks), Path(directory) / str(rank))

        processes = [multiprocessing.get_context("fork").Process(target=one, args=(r,)) for r in range(world)]
        probe.close()
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        return [torch.load(Path(directory) / str(rank)) for rank in range(world)]


if __name__ == "__main__":
    main()
