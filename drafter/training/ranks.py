"""The processes that train one drafter together, each on its own device: `torchrun` starts them, rank 0 decides.

`Ranks` is one process alone, which sends nothing. `joined` gives the processes that `torchrun` (or whatever else sets
RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT) started: every rank then calls the same methods in the same order. Small
numbers go over gloo between hosts' memories, so that no rank waits for its device; gradients go over NCCL on CUDA.

A failure of one rank is agreed on: `together` and `shared` raise on every rank what one of them raised, and all go on.
A rank that has gone is `RanksLost`, after which no collective works any more: the process ends, and is started again.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, Final, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from drafter.batch import fill_alone
from drafter.device import RanksLost, is_device_fault, is_out_of_memory
from drafter.errors import BatchRejected, DrafterError

_T = TypeVar("_T")
_E = TypeVar("_E", bound=Exception)

#: How long a rank waits for another one in the middle of a training: it may have to compile, or to read from a disk.
_PATIENCE = timedelta(minutes=10)
#: How long it waits for the next order. Rank 0 gives one each minute, but for claims that take it long to score.
_IDLE = timedelta(hours=1)
_BEAT_SECONDS: Final = 60.0
_ERROR_BYTES: Final = 8192


class Ranks:
    """One process alone. `rank` of `world` processes."""

    rank = 0
    world = 1

    def together(self, work: Callable[[], _T]) -> _T:
        """Do this rank's part of something; raises on every rank where it failed on one."""
        return work()

    def shared(self, work: Callable[[], _T], *, idle: bool = False) -> _T:  # noqa: ARG002 - of several
        """Call `work` on rank 0 alone; returns its result, as JSON, on every rank. `idle`: it may take an hour."""
        return work()

    def add(self, counts: Sequence[int]) -> list[int]:
        """The sums over all ranks."""
        return list(counts)

    def add_table(self, table: Tensor) -> Tensor:
        """The sum of the ranks' tables, which lie in host memory and are of one shape and type; in place."""
        return table

    def fill(self, table: Tensor, parts: Sequence[Callable[[], object]]) -> Tensor:
        """Call `parts`, each of which fills its own places of a table of zeros in host memory; returns the table.

        One rank calls each part, and every rank gets the whole table. What is raised on one rank is raised on all.
        """
        return fill_alone(table, parts)

    def add_gradients(self, parameters: Sequence[nn.Parameter], figures: Tensor) -> Tensor:  # noqa: ARG002 - of several
        """Sum all gradients over all ranks, in place; returns the sums of `figures`.

        A parameter that has a gradient on no rank keeps none.
        """
        return figures

    def give(self, tensors: Sequence[Tensor], rank: int) -> None:
        """Put what that rank has into everybody's tensors."""

    def agreed(self, error: _E) -> _E:
        """Mark an error that every rank raises here, because all of them found it; returns it."""
        return error

    @contextlib.contextmanager
    def in_step(self) -> Iterator[None]:
        """A block that all ranks run alike. An error that was not `agreed` puts them out of step: `RanksLost`."""
        yield


class JoinedRanks(Ranks):
    """One of several processes."""

    def __init__(self) -> None:
        """The default process group is there: gradients go over it."""
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self._idle = dist.new_group(backend="gloo", timeout=_IDLE)
        self._host = dist.new_group(backend="gloo", timeout=_PATIENCE)
        self._agreed: Exception | None = None  # what all ranks have raised last

    def together(self, work: Callable[[], _T]) -> _T:
        """Do this rank's part of something; raises on every rank where it failed on one."""
        done, error = [], None
        try:
            done.append(work())
        except Exception as raised:
            if is_device_fault(raised):
                raise  # the process ends, and the others with it
            error = raised
        if any(self.add([error is not None])):
            told = self._gathered(error)
            raise self.agreed(error or _from_other_rank(told))
        return done[0]

    def shared(self, work: Callable[[], _T], *, idle: bool = False) -> _T:
        """Call `work` on rank 0 alone; returns its result, as JSON, on every rank. `idle`: it may take an hour."""
        error, data = None, b""
        if self.rank == 0:
            try:
                data = json.dumps({"value": work()}).encode()
            except Exception as raised:
                if is_device_fault(raised):
                    raise
                error, data = raised, json.dumps({"error": _described(raised)}).encode()
        group = self._idle if idle else self._host
        with _unless_lost():
            size = torch.tensor([len(data)])
            dist.broadcast(size, 0, group=group)
            sent = torch.frombuffer(bytearray(data or int(size)), dtype=torch.uint8)
            dist.broadcast(sent, 0, group=group)
        if error is not None:
            raise self.agreed(error)
        found: dict[str, Any] = json.loads(sent.numpy().tobytes())
        if "error" in found:
            raise self.agreed(_from_other_rank({0: found["error"]}))
        value: _T = found["value"]
        return value

    def add(self, counts: Sequence[int]) -> list[int]:
        """The sums over all ranks."""
        return [int(total) for total in self.add_table(torch.tensor([int(count) for count in counts]))]

    def add_table(self, table: Tensor) -> Tensor:
        """The sum of the ranks' tables, which lie in host memory and are of one shape and type; in place."""
        with _unless_lost():
            dist.all_reduce(table, group=self._host)
        return table

    def fill(self, table: Tensor, parts: Sequence[Callable[[], object]]) -> Tensor:
        """Call `parts`, each of which fills its own places of a table of zeros in host memory; returns the table.

        One rank calls each part, and every rank gets the whole table. What is raised on one rank is raised on all.
        """
        self.together(lambda: [part() for part in parts[self.rank :: self.world]])
        return self.add_table(table)  # only one rank's number is not 0: nothing is rounded

    def add_gradients(self, parameters: Sequence[nn.Parameter], figures: Tensor) -> Tensor:
        """Sum all gradients over all ranks, in place; returns the sums of `figures`.

        They go as one tensor, of which the parameters' gradients are parts from then on.
        """
        there = self.add([p.grad is not None for p in parameters])
        moved = [p for p, ranks in zip(parameters, there, strict=True) if ranks]

        def packed() -> Tensor:
            return torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1) for p in moved])

        flat = self.together(packed)  # a second copy of all gradients: memory may run out
        with _unless_lost():
            dist.all_reduce(flat)
            dist.all_reduce(figures)
        for parameter, part in zip(moved, torch.split(flat, [p.numel() for p in moved]), strict=True):
            parameter.grad = part.view_as(parameter)
        return figures

    @contextlib.contextmanager
    def in_step(self) -> Iterator[None]:
        """A block that all ranks run alike. An error that was not `agreed` puts them out of step: `RanksLost`."""
        try:
            yield
        except Exception as error:
            if error is self._agreed or is_device_fault(error):
                raise
            raise RanksLost(f"this rank failed where the others go on: {type(error).__name__}: {error}") from error

    def give(self, tensors: Sequence[Tensor], rank: int) -> None:
        """Put what that rank has into everybody's tensors, which are of one type."""
        if tensors:
            flat = self.together(lambda: torch.cat([tensor.reshape(-1) for tensor in tensors]))
            with _unless_lost():
                dist.broadcast(flat, rank)
            for tensor, part in zip(tensors, torch.split(flat, [t.numel() for t in tensors]), strict=True):
                tensor.copy_(part.view_as(tensor))

    def agreed(self, error: _E) -> _E:
        """Mark an error that every rank raises here, because all of them found it; returns it."""
        self._agreed = error
        return error

    def _gathered(self, error: Exception | None) -> dict[int, dict[str, str]]:
        """What each rank that failed says of it."""
        data = b"" if error is None else json.dumps(_described(error)).encode()
        mine = torch.frombuffer(bytearray(data.ljust(_ERROR_BYTES)), dtype=torch.uint8)
        all_of_them = [torch.empty_like(mine) for _ in range(self.world)]
        with _unless_lost():
            dist.all_gather(all_of_them, mine, group=self._host)
        texts = {rank: told.numpy().tobytes().strip() for rank, told in enumerate(all_of_them)}
        return {rank: json.loads(text) for rank, text in texts.items() if text}


class Orders:
    """What rank 0 tells ranks that wait: what changed at once, and the same again each minute.

    A rank that hears nothing for an hour takes rank 0 for gone, ends, and so lets its GPU go: a host that loses its
    power closes no connection.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._told: dict[str, Any] = {}
        self._at = -math.inf  # monotonic

    def stand(self, order: dict[str, Any]) -> None:
        """Tell it, if it is due."""
        now = time.monotonic()
        if self._ranks.world > 1 and (order != self._told or now - self._at >= _BEAT_SECONDS):
            self._ranks.shared(lambda: order, idle=True)
            self._told, self._at = order, now


def _described(error: Exception) -> dict[str, str]:
    kinds = {"memory": is_out_of_memory(error), "rejected": isinstance(error, BatchRejected)}
    kinds |= {"drafter": isinstance(error, DrafterError), "disk": isinstance(error, OSError)}
    kind = next((name for name, holds in kinds.items() if holds), "")
    # In JSON a character takes twelve bytes at the most.
    return {"kind": kind, "text": f"{type(error).__name__}: {error}"[: (_ERROR_BYTES - 64) // 12]}


def _from_other_rank(told: dict[int, dict[str, str]]) -> Exception:
    """The failure of the lowest rank that failed, as an error to raise on the others."""
    rank, found = min(told.items())
    kinds: dict[str, type[Exception]] = {"memory": MemoryError, "rejected": BatchRejected, "disk": OSError}
    kind = kinds.get(found["kind"], DrafterError if found["kind"] == "drafter" else RuntimeError)
    return kind(f"on rank {rank}: {found['text']}")


@contextlib.contextmanager
def _unless_lost() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise RanksLost(f"another rank has gone, or does not answer: {error}") from error


ALONE: Final = Ranks()
_joined: Final = [ALONE]


def current() -> Ranks:
    """The ranks of this process, which has but one process group."""
    return _joined[-1]


def _unwritten(store: Store, rank: int, world: int) -> Store:
    """A part of the store that no earlier start wrote to.

    `torchrun` keeps the store when it starts ranks again, and with it the addresses of those that have gone: a rank
    that reads one connects to nobody. So rank 0 names the start, and answers those who call themselves by that name.
    """
    mine, deadline = uuid.uuid4().hex, time.monotonic() + _PATIENCE.total_seconds()
    if rank == 0:
        store.set("start", mine)
        for other in [store.get(f"{mine}/{number}") for number in range(1, world)]:
            store.set(f"{mine}/{other.decode()}", "here")
        return PrefixStore(mine, store)
    while time.monotonic() < deadline:
        start = store.get("start").decode()
        store.set(f"{start}/{rank}", mine)
        with contextlib.suppress(dist.DistStoreError):  # nobody answers: it may be the name of an earlier start
            store.wait([f"{start}/{mine}"], timedelta(seconds=1))
            return PrefixStore(start, store)
    raise RanksLost(f"rank 0 did not start within {_PATIENCE}")


@contextlib.contextmanager
def joined(device: torch.device) -> Iterator[Ranks]:
    """Join the processes that were started with this one, if there are any; `device` is this rank's."""
    if int(os.environ.get("WORLD_SIZE", "1")) <= 1:
        yield ALONE
        return
    store, rank, world = next(rendezvous("env://", timeout=_PATIENCE))
    store = _unwritten(store, rank, world)
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=_PATIENCE)
    _joined.append(JoinedRanks())
    try:
        yield current()
    finally:
        _joined.pop()
    dist.destroy_process_group()  # not after an error: it may wait for a rank that has gone
