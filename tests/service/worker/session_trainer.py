"""A trainer with the hook on it, as processes of its own: `python session_trainer.py URL FIRST LAST [RANKS]`.

It trains from policy version FIRST to LAST, says "sent" when the service has all of it, and goes on until it is killed.
With RANKS 2 it has two, in a gloo group, and each ends by itself.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from helpers.trainer.hooks_fixtures import AUX, padded_batch, step, tiny_qwen3
from helpers.worker.rank_fixtures import run_two_ranks

from rl_hooks.hook import DrafterHook


def train(url: str, first: int, last: int, rank: int = 0, world_size: int = 1) -> None:
    """The same start each time; the policy moves as far with each version."""
    model = tiny_qwen3()
    hook = DrafterHook(model, url, aux_layers=AUX, rank=rank, world_size=world_size)
    for version in range(first, last + 1):
        step(hook, model, version, padded_batch([(3, 9), (7, 4), (5, 6)], seed=10 * version + rank))
        with torch.no_grad():
            model.lm_head.weight.mul_(1.01)
    stats = hook.stats()
    assert (stats["failures"], stats["dropped_error"]) == (0, 0), stats
    if world_size > 1:
        hook.close(5.0)


if __name__ == "__main__":
    url, first, last, ranks = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int((*sys.argv, "1")[4])
    if ranks > 1:
        sys.exit(run_two_ranks(lambda rank: train(url, first, last, rank, ranks)))
    train(url, first, last)
    print("sent", flush=True)
    time.sleep(600)
