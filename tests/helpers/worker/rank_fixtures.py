"""Ranks of a trainer on this machine, as forked processes, so that torch and transformers are imported once."""

from __future__ import annotations

import gc
import multiprocessing
import os
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from helpers.ports import free_port


def call_the_cpu_an_accelerator() -> None:
    """Let accelerate shard on CPUs: it does so on accelerators only."""
    state: Any = import_module("accelerate.state")
    kinds: Any = import_module("accelerate.utils").DistributedType
    make = state.PartialState.__init__

    def made(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        if self._shared_state["distributed_type"] == kinds.MULTI_CPU:
            self._shared_state["distributed_type"] = kinds.MULTI_HPU

    state.PartialState.__init__ = made


def run_two_ranks(work: Callable[[int], None], before: Callable[[], None] = lambda: None) -> int:
    """`fork_ranks` of two."""
    return fork_ranks(work, 2, before)


def fork_ranks(work: Callable[[int], None], world: int, before: Callable[[], None] = lambda: None) -> int:
    """Call `work(rank)` on all, in a gloo group; `before` the group begins, in each process. Not 0: one failed."""
    import_module("torch._dynamo")  # or each rank would, with its first optimizer
    port = free_port()

    def one(rank: int) -> None:
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank)}
        os.environ |= {"WORLD_SIZE": str(world), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world)}
        torch.set_num_threads(1)
        gc.freeze()  # it looks for no garbage in what was imported
        before()
        dist.init_process_group("gloo", rank=rank, world_size=world)
        work(rank)
        dist.barrier()
        dist.destroy_process_group()

    ranks = [multiprocessing.get_context("fork").Process(target=one, args=(rank,)) for rank in range(world)]
    try:
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
    finally:  # a test that took too long leaves nobody who shares this process's descriptors
        for process in ranks:
            if process.is_alive():
                process.kill()
    return int(any(process.exitcode for process in ranks))
